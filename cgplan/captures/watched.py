"""The CUDA graphs of a process, whoever captures them, and what became of the memory they read.

Note [Kept graphs]
    Nodes can be read while a graph's `cudaGraph_t` lives. Inside a watch `torch.cuda.CUDAGraph`
    keeps it, and instantiates the graph at the end of its capture, as it does without.

Note [Modules of the process]
    The collector tells them. A hook of torch.nn would be traced by Dynamo. Frozen objects are
    hidden from it, so modules get their names before `gc.freeze()`, which engines call around
    their captures.
"""

from __future__ import annotations

import gc
import re
import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.backend import forget_capture, note_capture, watches
from cgplan.backends.blame import blamed_line
from cgplan.backends.graph_nodes import Launch, OperatorLog, nodes_so_far
from cgplan.backends.replacing import replaced, shared
from cgplan.captures.audit import (
    PROBLEMS,
    Owner,
    Owners,
    Pointer,
    ReadGraph,
    Stretches,
    kinds_of,
    launch_of,
    living_tensors,
    owner_records,
    pointers_of,
    span_of,
)
from cgplan.captures.environment import describe_environment
from cgplan.errors import AuditError, ConfigError
from cgplan.graphs.fingerprint import Fingerprint
from cgplan.reports.records import StaleRecord, WatchedRecord, WatchReport
from cgplan.units import counted, format_bytes

_HOOKED = ("__init__", "capture_begin", "capture_end", "reset")
_VARIABLE = ".<"  # in the path of a global or a closure: engines may bind it in each step
_NODE_BYTES = 1950  # of a kept graph, measured: docs/benchmarks.md, Watch
_SHARE = 20  # times the last walk's duration: then places are looked up again
Memory = tuple[int, int]  # from its start to before its end
Read = tuple[StorageWeakRef, str]  # memory that a graph reads, and its path or size
Problem = tuple[str, str]  # what became of memory, and its path


class _Place(NamedTuple):
    memory: Memory
    storage: StorageWeakRef


class Places:
    """Where tensors lie at one moment, by path and by memory."""

    def __init__(self, by_path: dict[str, _Place]) -> None:
        self.by_path = by_path
        tied = dict[Memory, list[str]]()
        for path, place in by_path.items():
            tied.setdefault(place.memory, []).append(path)
        rows = [(*memory, paths) for memory, paths in tied.items()]
        self.by_memory = Stretches[list[str]](rows)

    @classmethod
    def of(
        cls,
        roots: Mapping[str, Any],
        device: torch.device,
    ) -> Places:
        found = dict[str, _Place]()
        for place in Fingerprint.of(roots, device).of_tensors:
            memory = span_of(place.value)
            if memory is not None:
                storage = place.value.untyped_storage()
                found[place.path] = _Place(memory, StorageWeakRef(storage))
        return cls(found)

    def living(self) -> Places:
        """Without those whose memory was freed since."""
        found = dict[str, _Place]()
        for path, place in self.by_path.items():
            if not place.storage.expired():
                found[path] = place
        return self if len(found) == len(self.by_path) else Places(found)

    def is_stale(
        self,
        path: str,
        now: Places,
    ) -> bool:
        """Whether the path lies elsewhere now, or is gone with its memory."""
        before = self.by_path[path]
        found = now.by_path.get(path)
        if found is not None and _VARIABLE not in path:
            return found.memory != before.memory
        is_freed: bool = before.storage.expired()
        return is_freed


@dataclass(eq=False)
class WatchedGraph:
    """``places`` are of a moment before its capture."""

    number: int
    line: str
    graph: weakref.ref[Any]
    pool: Any
    places: Places
    launches: list[Launch] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"graph {self.number}"


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class GraphWatch:
    """See ``watch``. It holds no graph and no model."""

    def __init__(
        self,
        roots: Mapping[str, Any] | None,
        *,
        operators: bool,
        every_replay: bool,
    ) -> None:
        _refuse_unnamed(roots)
        self._roots = dict(roots or {})
        self.operators = operators
        self.every_replay = every_replay
        self._checked = weakref.WeakKeyDictionary[Any, WatchedGraph]()  # at each replay
        self._graphs = list[WatchedGraph]()
        self._count = 0
        self._names = weakref.WeakKeyDictionary[nn.Module, str]()
        self._before = weakref.WeakSet[Any]()
        self._known = set[Problem]()
        self._places: Places | None = None
        self._taken = 0.0
        self._cost = 0.0
        self._closing = ExitStack()
        self._backend: GraphBackend | None = None
        for item in gc.get_objects():
            if issubclass(type(item), torch.cuda.CUDAGraph):
                self._before.add(item)
        self._closing.enter_context(_hooks())
        if every_replay:
            self._closing.enter_context(_checked_replays())
        watches.add(self)

    def __enter__(self) -> GraphWatch:
        return self

    def __exit__(
        self,
        *raised: object,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Watch no further captures. Earlier graphs can be checked."""
        watches.discard(self)
        self._closing.close()

    def note(
        self,
        graph: Any,
        pool: Any,
        launches: list[Launch],
    ) -> None:
        """A graph was captured."""
        watched = WatchedGraph(
            self._count,
            blamed_line(),
            weakref.ref(graph),
            pool,
            self._recent_places(),
            launches,
        )
        self._count += 1
        self._graphs.append(watched)
        if self.every_replay and isinstance(graph, torch.cuda.CUDAGraph):
            watched.reads = self._reads_of(watched, graph)
            self._checked[graph] = watched

    def _reads_of(
        self,
        watched: WatchedGraph,
        graph: Any,
    ) -> list[Read]:
        """What is surely read outside of the pool of the graph."""
        backend = self._backend_of_graphs()
        read = ReadGraph(
            watched,
            watched.number,
            backend.nodes(graph),
            watched.launches,
        )
        places = watched.places
        rows = list[tuple[int, int, Read]]()
        for path, place in places.by_path.items():
            rows.append((*place.memory, (place.storage, path)))
        for tensor, (start, end) in living_tensors():
            name = f"a tensor of {format_bytes(end - start)}"
            storage = StorageWeakRef(tensor.untyped_storage())
            rows.append((start, end, (storage, name)))
        living = Stretches(rows)
        blocks = Stretches((block.start, block.end, block.pool) for block in backend.blocks())
        found = dict[int, Read]()
        for pointer in pointers_of([read], on_host=False):
            address = pointer.address
            given = living.find(address)
            if given is None or _is_among({watched.pool}, blocks.find(address)):
                continue
            if places.by_memory.find(address) or launch_of(pointer, "state")[1]:
                found[given[0].cdata] = given
        return list(found.values())

    def refuse_freed(self, graph: Any) -> None:
        """Raise AuditError if memory that it reads was freed since its capture."""
        watched = self._checked.get(graph)
        if watched is None:
            return
        for storage, name in watched.reads:
            if storage.expired():
                raise AuditError(
                    f"{watched.name}, captured at {watched.line}, reads {name}, which was freed",
                    remedy="Keep what graphs read, and write into it; capture again where it was "
                    "replaced.",
                )

    def forget(self, graph: Any) -> None:
        """It was reset, or is captured again."""
        self._graphs = [watched for watched in self._graphs if watched.graph() is not graph]

    def _recent_places(self) -> Places:
        now = time.perf_counter()
        if self._places is None or now - self._taken > _SHARE * self._cost:
            self._places = self._places_now()
            self._taken = time.perf_counter()
            self._cost = self._taken - now
        self._places = self._places.living()
        return self._places

    def _places_now(self) -> Places:
        roots = self._roots
        if not roots:
            self.name_modules()
            # the first ones first: what wraps them later gives no other paths
            roots = {name: module for module, name in self._names.items()}
        return Places.of(roots, _device())

    def name_modules(self) -> None:
        """Give those a name that no other one holds."""
        modules = list[nn.Module]()
        inner = set[int]()
        for item in gc.get_objects():
            if not issubclass(type(item), nn.Module):
                continue
            held = vars(item).get("_modules", {})
            if "_orig_mod" not in held:  # what torch.compile returns
                modules.append(item)
                inner.update(map(id, held.values()))
        taken = set(self._names.values())
        for module in modules:
            if id(module) in inner or module in self._names:
                continue
            kind = type(module).__name__
            name = kind
            number = 1
            while name in taken:
                number += 1
                name = f"{kind}_{number}"
            taken.add(name)
            self._names[module] = name

    def _backend_of_graphs(self) -> GraphBackend:
        is_of_torch = False
        for watched in self._graphs:
            graph = watched.graph()
            if isinstance(graph, torch.cuda.CUDAGraph):
                is_of_torch = True
        if self._backend is None or self._backend.is_tape is is_of_torch:
            self._backend = select_backend("cuda" if is_of_torch else "cpu")
        return self._backend

    def baseline(self) -> WatchReport:
        """Findings that ``changed`` leaves out."""
        report, self._known = self._check()
        return report

    def changed(self) -> WatchReport:
        """``check`` without what ``baseline`` found."""
        return self._check(known=self._known)[0]

    def check(self, roots: Mapping[str, Any] | None = None) -> WatchReport:
        """Look up each pointer of each graph that lives.

        ``roots`` are objects by name whose tensors are owners, ahead of those of ``watch``.
        Raises BackendError without cuda-bindings or a recent driver.
        """
        _refuse_unnamed(roots)
        return self._check(roots)[0]

    def _check(
        self,
        roots: Mapping[str, Any] | None = None,
        known: Collection[Problem] = (),
    ) -> tuple[WatchReport, set[Problem]]:
        """And the problems that are not ``known``, which the report has."""
        start = time.perf_counter()
        backend = self._backend_of_graphs()
        living = list[WatchedGraph]()
        captured = list[ReadGraph]()
        pools = set[Any]()
        for watched in self._graphs:
            graph = watched.graph()
            is_of_torch = isinstance(graph, torch.cuda.CUDAGraph)
            if graph is None or is_of_torch is backend.is_tape:
                continue
            living.append(watched)
            nodes = backend.nodes(graph)
            captured.append(ReadGraph(watched, watched.number, nodes, watched.launches))
            pools.add(watched.pool)
        pointers = pointers_of(captured, on_host=backend.is_tape)
        read = time.perf_counter()
        places = self._places_now()
        at_capture = dict[int, str]()
        for then in dict.fromkeys(watched.places for watched in living):
            for path, place in then.by_path.items():
                if _VARIABLE not in path:
                    at_capture[place.memory[0]] = path

        state = list[tuple[int, int, Owner]]()
        named = places if roots is None else Places.of(roots, _device())
        # the first owner of memory counts
        for path, place in (*named.by_path.items(), *places.by_path.items()):
            state.append((*place.memory, Owner("state", path)))
        owners = Owners(
            backend,
            captured,
            pointers,
            state=state,
            at_capture=at_capture,
            is_own_pool=partial(_is_among, pools),
        )
        counts, stale, found = _sorted_out(
            pointers,
            owners,
            places,
            known,
        )
        records = [_record_of(graph, counts) for graph in captured]
        notes = list[str]()
        unwatched = len(self._before)
        if unwatched:
            notes.append(f"{counted(unwatched, 'graph')} from before the watch: not looked at")
        if captured and not backend.is_tape:
            kept = sum(len(graph.nodes.names) for graph in captured) * _NODE_BYTES
            notes.append(f"about {format_bytes(kept)} of host memory keep graphs that can be read")
        gone = sum(watched.graph() is None for watched in self._graphs)
        if gone:
            notes.append(f"{counted(gone, 'graph')} captured and gone: check while they live")
        report = WatchReport(
            environment=describe_environment(backend, ""),
            graphs=tuple(records),
            owners=owner_records(counts.values()),
            stale=tuple(stale),
            unwatched=unwatched,
            gone=gone,
            read_seconds=read - start,
            classify_seconds=time.perf_counter() - read,
            notes=tuple(notes),
        )
        return report, found


def watch(
    roots: Mapping[str, Any] | None = None,
    *,
    operators: bool = False,
    every_replay: bool = False,
) -> GraphWatch:
    """Watch each ``torch.cuda.CUDAGraph`` that the process captures from now on, whoever makes it.

        with cgplan.watch({"model": model, "cache": kv}) as watch:
            ...  # capture, and replace weights later
        print(watch.check())

    Also a plain call, which watches until ``close``. Outputs and replays are the same. Without a
    GPU it sees cgplan's own graphs.

    Args:
        roots: Objects by name whose tensors get paths; absent: all modules.
        operators: Note the operator and line of each node, which makes captures slower.
        every_replay: A replay of a CUDA graph raises AuditError if memory that the graph reads
            was freed. Captures and replays are slower.

    Raises ConfigError for roots without names.
    """
    return GraphWatch(roots, operators=operators, every_replay=every_replay)


@shared
@contextmanager
def _hooks() -> Iterator[None]:
    graphs = torch.cuda.CUDAGraph
    by_torch = {name: getattr(graphs, name) for name in _HOOKED}
    made = weakref.WeakSet[Any]()  # others are from before
    kept = weakref.WeakSet[Any]()  # by its owner
    open_logs = weakref.WeakKeyDictionary[Any, _OpenLog]()

    def init(graph: Any, keep_graph: bool = False) -> None:
        by_torch["__init__"](graph, True)
        made.add(graph)
        if keep_graph:
            kept.add(graph)

    def capture_begin(graph: Any, *args: Any, **options: Any) -> None:
        by_torch["capture_begin"](graph, *args, **options)
        if graph not in made:
            return
        forget_capture(graph)
        log = open_logs[graph] = _OpenLog()
        if any(watch.operators for watch in watches):
            log.begin()

    def capture_end(graph: Any) -> None:
        log = open_logs.pop(graph, None)
        if log is None:
            by_torch["capture_end"](graph)
            return
        log.modes.close()
        by_torch["capture_end"](graph)
        if graph not in kept:
            graph.instantiate()
        note_capture(graph, graph.pool(), log.launches)

    def reset(graph: Any) -> None:
        forget_capture(graph)
        by_torch["reset"](graph)

    by_python = gc.freeze

    def freeze() -> None:
        for watch in list(watches):
            watch.name_modules()
        by_python()

    of_graphs = replaced(
        graphs,
        __init__=init,
        capture_begin=capture_begin,
        capture_end=capture_end,
        reset=reset,
    )
    with of_graphs, replaced(gc, freeze=freeze):
        yield


@shared
@contextmanager
def _checked_replays() -> Iterator[None]:
    by_torch = torch.cuda.CUDAGraph.replay

    def replay(graph: Any) -> None:
        for watch in list(watches):
            watch.refuse_freed(graph)
        by_torch(graph)

    with replaced(torch.cuda.CUDAGraph, replay=replay):
        yield


def _refuse_unnamed(roots: Any) -> None:
    if roots is not None and not isinstance(roots, Mapping):
        raise ConfigError(
            f"the roots of a watch are a {type(roots).__name__}",
            remedy="""Name each object: {"model": model}.""",
        )


class _OpenLog:
    """Of the operators of a capture that is under way."""

    def __init__(self) -> None:
        self.launches = list[Launch]()
        self.modes = ExitStack()

    def begin(self) -> None:
        device = _device()

        def so_far() -> tuple[_OpenLog, int] | None:
            count = nodes_so_far(device)
            return None if count is None else (self, count)

        self.modes.enter_context(OperatorLog(so_far, device))


def _is_among(
    handles: Collection[Any],
    pool: Any,
) -> bool:
    """A pool of torch, or one of cgplan with a few of those."""
    return any(handle in handles for handle in getattr(pool, "handles", (pool,)))


def _record_of(
    graph: ReadGraph,
    counts: Mapping[WatchedGraph, Counter[Owner]],
) -> WatchedRecord:
    watched: WatchedGraph = graph.key
    kinds = kinds_of(counts.get(watched, Counter()))
    return WatchedRecord(
        name=watched.name,
        line=watched.line,
        nodes=len(graph.nodes.names),
        opaque=graph.nodes.opaque,
        words=kinds.total(),
        kinds=dict(kinds.most_common()),
    )


def _sorted_out(
    pointers: Iterable[Pointer],
    owners: Owners,
    places: Places,
    known: Collection[Problem],
) -> tuple[dict[WatchedGraph, Counter[Owner]], list[StaleRecord], set[Problem]]:
    """Pointers by graph and owner; those that are stale; the problems that are not ``known``."""
    counts = dict[WatchedGraph, Counter[Owner]]()
    totals = Counter[str]()  # of pointers, by path at capture without numbers
    groups = dict[tuple[Any, str], list[tuple[Pointer, Owner]]]()
    new = set[Problem]()

    @cache  # many nodes point to one tensor
    def place_of(then: Places, address: int) -> tuple[str, str, bool]:
        """The path at capture, without numbers too, and whether it is stale."""
        paths = then.by_memory.find(address) or [""]
        path = paths[0]
        is_stale = False
        for each in paths:
            if each and then.is_stale(each, places):
                path = each
                is_stale = True
                break
        return path, re.sub(r"\d+", "*", path), is_stale

    for pointer in pointers:
        owner = owners.of[pointer.address]
        if owner is None:
            continue
        watched: WatchedGraph = pointer.graph.key
        path, name, is_stale = place_of(watched.places, pointer.address)
        name = name or owner.name
        totals[name] += 1
        is_problem = owner.kind in PROBLEMS
        if is_problem or (is_stale and owner.kind != "graph pool"):
            if path or launch_of(pointer, owner.kind)[1]:
                problem: Any = owner.kind if is_problem else "moved"
                found_one = problem, path or owner.name
                if found_one not in known:
                    new.add(found_one)
                    groups.setdefault((problem, name), []).append((pointer, owner))
            else:
                owner = Owner("unproven", f"looks like {owner.kind}")
        counts.setdefault(watched, Counter())[owner] += 1
    stale = list[StaleRecord]()
    for (problem, name), found in groups.items():
        pointer, owner = found[0]
        launch, _ = launch_of(pointer, owner.kind)
        graphs = dict.fromkeys(other.graph.key.name for other, _ in found)
        stale.append(
            StaleRecord(
                problem=problem,
                name=name,
                pointers=len(found),
                of=totals[name],
                graphs=tuple(graphs),
                kernel=pointer.graph.nodes.names[pointer.node],
                operator=None if launch is None else launch.operator,
                line=None if launch is None else launch.line,
                detail=owner.name,
            )
        )
    return counts, stale, new
