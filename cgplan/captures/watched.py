"""The CUDA graphs of a process, whoever captures them, and the memory that they read.

Note [Modules of the process]
    The garbage collector lists them; Dynamo would trace a hook of torch.nn. `gc.freeze()`, which
    engines call around captures, hides objects from the list, so they are noted before.
"""

from __future__ import annotations

import gc
import re
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._prims_common import compute_required_storage_length
from torch.multiprocessing.reductions import StorageWeakRef

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.backend import captured, forget_capture, note_capture, watches
from cgplan.backends.blame import users_lines
from cgplan.backends.graph_nodes import Launch, OperatorLog
from cgplan.backends.replacing import replaced, shared
from cgplan.captures.audit import (
    Owner,
    Owners,
    Pointer,
    ReadGraph,
    Stale,
    Stretches,
    blocks_of,
    figures_of,
    frozen,
    is_among,
    launch_of,
    living,
    living_tensors,
    owner_records,
    pointers_of,
    proofs_of,
    span_of,
)
from cgplan.errors import AuditError, CgplanError, ConfigError
from cgplan.graphs.fingerprint import Fingerprint
from cgplan.graphs.walk import is_leaf
from cgplan.reports.records import StaleRecord, WatchedRecord, WatchReport
from cgplan.units import counted, format_bytes

_OF_FUNCTIONS = ".<"  # in the path of a global or a closure: engines may bind it in each step
_SHARE = 20  # durations of a look-up: as long its places serve captures
Memory = tuple[int, int]  # from its start to before its end
Read = tuple[StorageWeakRef, str]  # memory that a graph reads, and its path or size


class _Place(NamedTuple):
    path: str
    memory: Memory  # of its elements
    whole: Memory  # of its storage
    storage: StorageWeakRef
    holder: weakref.ref[Any]  # the module, or else the tensor
    home: tuple[int, str]  # its id, and the last step of the path


class Places:
    def __init__(self, found: Collection[_Place], roots: Collection[str]) -> None:
        self.roots = roots
        self.by_path = {place.path: place for place in found}
        self.by_home = {place.home: place for place in found}
        tied = dict[int, list[_Place]]()
        for place in sorted(found, key=lambda place: -place.memory[1]):
            tied.setdefault(place.memory[0], []).append(place)
        self._by_memory = Stretches((*places[0].memory, places) for places in tied.values())

    @classmethod
    def of(cls, roots: Mapping[str, Any]) -> Places:
        found = []
        for place in Fingerprint.of(roots, _device()).of_tensors:
            whole = span_of(place.value)
            if whole is None:
                continue
            memory = whole
            traits = place.traits
            if traits and place.address is not None:
                length = compute_required_storage_length(traits.shape, traits.strides, 0)
                memory = place.address, place.address + length * traits.dtype.itemsize
            holder = (place.above or place).value
            if not issubclass(type(holder), nn.Module):
                holder = place.value
            found.append(
                _Place(
                    place.path,
                    memory,
                    whole,
                    StorageWeakRef(place.value.untyped_storage()),
                    weakref.ref(holder),
                    (id(holder), place.home[1]),
                )
            )
        return cls(found, list(roots))

    def living(self) -> Places:
        found = [place for place in self.by_path.values() if not place.storage.expired()]
        return self if len(found) == len(self.by_path) else Places(found, self.roots)

    def at(self, address: int) -> list[_Place]:
        found = self._by_memory.find(address) or []
        return [place for place in found if address < place.memory[1]]

    def _is_stale(
        self,
        before: _Place,
        now: Places,
    ) -> bool:
        found = None
        if _OF_FUNCTIONS not in before.path:
            found = now.by_path.get(before.path)
            if found is None and before.holder() is not None:
                found = now.by_home.get(before.home)
        if found is None:
            return bool(before.storage.expired())
        if found.memory[0] != before.memory[0]:
            return True
        # taken out of its model, which lives on
        return _root(before.path) in now.roots and _root(found.path) not in self.roots

    def find(
        self,
        address: int,
        now: Places,
    ) -> tuple[str, bool]:
        """The path there, and whether it is stale."""
        places = self.at(address)
        stale = [place for place in places if self._is_stale(place, now)]
        found = stale or places
        return (found[0].path if found else ""), bool(stale)


def _root(path: str) -> str:
    return re.split(r"[.\[]", path)[0]


@dataclass(eq=False)
class WatchedGraph:
    """``stack``: the user's lines, the innermost first. ``places``: at its capture, or shortly
    before; ``later``: at the next look-up. ``stream``: the handle of the one that was captured.
    """

    name: str
    stack: tuple[str, ...]
    stream: int | None
    pool: Any
    places: Places
    launches: list[Launch]
    reads: list[Read] = field(default_factory=list)
    proofs: dict[int, Owner] | None = None
    later: Places | None = None


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class GraphWatch:
    """See ``watch``. It holds no graph, and no model but those of ``roots``."""

    def __init__(
        self,
        roots: Mapping[str, Any] | None,
        *,
        operators: bool,
        every_replay: bool,
    ) -> None:
        self._roots = _named(roots)
        self.operators = operators
        self.every_replay = every_replay
        self._graphs = weakref.WeakKeyDictionary[Any, WatchedGraph]()
        self._count = 0
        self._forgotten = 0
        self._names = weakref.WeakKeyDictionary[nn.Module, str]()
        self._kinds = Counter[str]()  # of named modules
        self._before = weakref.WeakSet((*captured, *living(torch.cuda.CUDAGraph)))
        self._known = set[object]()
        self._places = Places((), ())
        self._due = 0.0  # the next look-up
        # graphs, at the last capture from these lines, which may be of another model
        self._ended = dict[tuple[str, ...], int]()
        self._closing = ExitStack()
        self._closing.enter_context(_hooks())
        if every_replay:
            self._closing.enter_context(_checked_replays())
        watches.add(self)
        _open.add(self)

    def __enter__(self) -> GraphWatch:
        if self not in _open:
            raise CgplanError("the watch is closed", remedy="Make another one.")
        return self

    def __exit__(
        self,
        *raised: object,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Watch no further captures. Earlier graphs can be checked until they are reset."""
        _open.discard(self)
        self._closing.close()

    def note(
        self,
        graph: Any,
        pool: Any,
        launches: list[Launch],
    ) -> None:
        """A graph was captured."""
        if self not in _open:
            return
        stack = tuple(map(str, users_lines(traceback.walk_stack(None))))
        is_of_torch = isinstance(graph, torch.cuda.CUDAGraph)
        stream = torch.cuda.current_stream().cuda_stream if is_of_torch else None
        ended = self._count - len(self._graphs)
        if time.perf_counter() > self._due or self._ended.get(stack) != ended:
            self._places_now()
        self._ended[stack] = ended
        self._places = self._places.living()
        watched = WatchedGraph(
            f"graph {self._count}",
            stack,
            stream,
            pool,
            self._places,
            launches,
        )
        self._count += 1
        self._graphs[graph] = watched
        if self.every_replay and is_of_torch:
            watched.reads = self._reads_of(watched, graph)

    def _reads_of(
        self,
        watched: WatchedGraph,
        graph: Any,
    ) -> list[Read]:
        """What it surely reads outside of its pool."""
        backend = self._backend_of_graphs()
        read = ReadGraph(
            watched,
            0,
            backend.nodes(graph),
            watched.launches,
        )
        places = watched.places
        tensors = Stretches((*span, tensor) for tensor, span in living_tensors())
        blocks = blocks_of(backend)
        found = {}
        for pointer in pointers_of([read], on_host=False):
            address = pointer.address
            block = blocks.find(address)
            if block and is_among({watched.pool}, block.pool):
                continue
            there = places.at(address)
            tensor = tensors.find(address)
            if there:
                name = there[0].path
                storage = there[0].storage
            elif tensor is not None and launch_of(pointer, "state")[1]:
                memory = tensor.untyped_storage()
                name = f"a tensor of {format_bytes(memory.nbytes())}"
                storage = StorageWeakRef(memory)
            else:
                continue
            found[storage.cdata] = storage, name
        return list(found.values())

    def refuse_freed(self, graph: Any) -> None:
        """Raise AuditError for freed memory."""
        watched = self._graphs.get(graph)
        if watched is None:
            return
        for storage, name in watched.reads:
            if storage.expired():
                raise AuditError(
                    f"{watched.name}, captured at {watched.stack[0]}, reads {name}, which was "
                    "freed",
                    remedy="Keep the tensor and write into it, or capture again afterwards.",
                )

    def forget(self, graph: Any) -> None:
        """It was reset, or is captured again."""
        self._before.discard(graph)
        if self._graphs.pop(graph, None) is not None:
            self._forgotten += 1

    def _places_now(self) -> Places:
        start = time.perf_counter()
        roots = self._roots
        if not roots:
            modules = []
            inner = set[int]()
            for module in living(nn.Module):
                held = vars(module).get("_modules", {})
                if "_orig_mod" not in held:  # what torch.compile returns
                    modules.append(module)
                    inner.update(map(id, held.values()))
            for module in modules:
                if id(module) in inner or module in self._names:
                    continue
                kind = type(module).__name__
                self._kinds[kind] += 1
                number = self._kinds[kind]
                self._names[module] = kind if number == 1 else f"{kind}#{number}"
            # the first ones first: what wraps them later gives no other paths
            roots = {name: module for module, name in self._names.items()}
        self._places = Places.of(roots)
        end = time.perf_counter()
        self._due = end + _SHARE * (end - start)
        for graph in self._graphs.values():
            graph.later = graph.later or self._places
        return self._places

    def _backend_of_graphs(self) -> GraphBackend:
        is_of_torch = any(isinstance(graph, torch.cuda.CUDAGraph) for graph in self._graphs)
        return _backend(str(_device()) if is_of_torch else "cpu")

    def prove(
        self,
        graph: Any,
        twin: Any,
    ) -> None:
        """Compare a graph with ``twin``, a second capture of its function into another pool.

        Later checks count pointers into the graph's pool as proven, and words that only look like
        some as disproven.

        Raises ConfigError for graphs with different nodes, in one pool, or unknown to the watch;
        BackendError as ``check``.
        """
        twins = (graph, twin)
        watched = {id(each): found for each, found in self._graphs.items()}
        seen = [watched[id(each)] for each in twins if id(each) in watched]
        pools = [each.pool for each in seen]
        names = " and ".join(each.name for each in seen)
        proofs = None
        if self not in _open:
            problem = "the watch is closed"
        elif len(seen) < 2:
            problem = f"the watch saw {names or 'none'} of the two, or they were reset"
        elif pools[0] == pools[1]:
            problem = f"{names} are in one pool"
        else:
            problem = f"{names} have different nodes"
            backend = self._backend_of_graphs()
            proofs = proofs_of(backend, blocks_of(backend), twins, pools)
        if proofs is None:
            raise ConfigError(
                f"no proof: {problem}",
                remedy="Capture one function twice, with equal shapes, into new pools, and prove "
                "before the watch is closed.",
            )
        seen[0].proofs = proofs

    def baseline(self) -> WatchReport:
        """Findings that ``changed`` leaves out."""
        report, self._known = self._check()
        return report

    def changed(self) -> WatchReport:
        """``check`` without what ``baseline`` found."""
        return self._check(known=self._known)[0]

    def check(self, roots: Mapping[str, Any] | None = None) -> WatchReport:
        """Look up each pointer of each graph that lives.

        ``roots`` are objects by name: owners of memory ahead of those that the watch knows; paths
        of stale tensors are of ``watch``. Raises ConfigError as ``watch``, BackendError without
        cuda-bindings or a recent driver.
        """
        return self._check(roots)[0]

    def _readable(self, backend: GraphBackend) -> list[ReadGraph]:
        found = []
        for graph, watched in list(self._graphs.items()):
            if isinstance(graph, torch.cuda.CUDAGraph) is backend.is_tape:
                continue
            with suppress(RuntimeError):  # torch's: it was reset while no watch was open
                nodes = backend.nodes(graph)
                found.append(
                    ReadGraph(
                        watched,
                        0,
                        nodes,
                        watched.launches,
                        watched.proofs,
                    )
                )
        return found

    def _check(
        self,
        roots: Mapping[str, Any] | None = None,
        known: Collection[object] = (),
    ) -> tuple[WatchReport, set[object]]:
        """Leaves out ``known`` keys of stale pointers; all are returned beside the report."""
        start = time.perf_counter()
        backend = self._backend_of_graphs()
        graphs = self._readable(backend)
        pools = {graph.key.pool for graph in graphs}
        read = time.perf_counter()
        places = self._places_now()
        at_capture = {}
        late = [graph.key.later for graph in graphs]
        for then in dict.fromkeys(late + [graph.key.places for graph in graphs]):
            for place in then.by_path.values():
                if _OF_FUNCTIONS not in place.path:
                    at_capture[place.memory[0]] = place.path

        # the first owner of memory counts
        given = Places.of(_named(roots))
        owned = (*given.by_path.values(), *places.by_path.values())
        state = [(*place.memory, Owner("state", place.path)) for place in owned]
        state += [(*place.whole, Owner("state", place.path)) for place in owned]
        owners = Owners(
            backend,
            graphs,
            state=state,
            at_capture=at_capture,
            own_pools=pools,
        )
        totals = Counter[str]()
        find = cache(Places.find)  # many nodes point to one tensor

        def place_of(pointer: Pointer, owner: Owner) -> tuple[str, bool, bool]:
            watched: WatchedGraph = pointer.graph.key
            path, is_stale = find(watched.places, pointer.address, places)
            is_known = bool(path)
            if not is_known:
                path, is_stale = find(watched.later, pointer.address, places)
            totals[_name_of(path, owner)] += 1
            return path, is_stale, is_known

        found = list(owners.stale(place_of))
        new = [stale for stale in found if stale.key not in known]
        left_out = len(found) - len(new)
        notes = []
        if left_out:
            notes.append(f"{counted(left_out, 'pointer')} stale at the baseline: left out")
        unwatched = len(self._before)
        if unwatched:
            notes.append(f"{counted(unwatched, 'graph')} from before the watch: not looked at")
        gone = self._count - self._forgotten - len(self._graphs)
        if gone:
            notes.append(f"{counted(gone, 'graph')} captured and gone: check while they live")
        records = [
            WatchedRecord(
                name=graph.key.name,
                line=graph.key.stack[0],
                stack=graph.key.stack,
                stream=graph.key.stream,
                **figures_of([graph.nodes], owners.counts[graph.key]),
            )
            for graph in graphs
        ]
        report = WatchReport(
            environment=backend.environment(),
            graphs=tuple(records),
            owners=owner_records(owners.counts.values()),
            stale=_stale_records(new, totals),
            left_out=left_out,
            unwatched=unwatched,
            gone=gone,
            read_seconds=read - start,
            classify_seconds=time.perf_counter() - read,
            notes=tuple(notes),
        )
        return report, {stale.key for stale in found}


_open = weakref.WeakSet[GraphWatch]()
_backend = cache(select_backend)


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

    Also a plain call, which watches until ``close``. Without a GPU it sees cgplan's own graphs.

    Args:
        roots: Objects by name whose tensors get paths; absent: all modules.
        operators: Note the operator and line of each node, which makes captures slower.
        every_replay: A replay of a CUDA graph raises AuditError if memory that the graph reads
            was freed. Captures and replays are slower.

    Raises ConfigError for roots without names, or that cannot hold tensors.
    """
    return GraphWatch(roots, operators=operators, every_replay=every_replay)


@shared
@contextmanager
def _hooks() -> Iterator[None]:
    graphs: Any = torch.cuda.CUDAGraph
    torch_init = graphs.__init__
    torch_begin = graphs.capture_begin
    torch_end = graphs.capture_end
    torch_reset = graphs.reset
    made = weakref.WeakKeyDictionary[Any, bool]()  # and whether its owner keeps the raw graph
    open_logs = weakref.WeakKeyDictionary[Any, tuple[list[Launch], ExitStack]]()

    def init(graph: Any, keep_graph: bool = False) -> None:
        torch_init(graph, True)
        made[graph] = keep_graph

    def capture_begin(graph: Any, *args: Any, **options: Any) -> None:
        torch_begin(graph, *args, **options)
        if graph not in made:  # it is from before
            return
        forget_capture(graph)
        launches = list[Launch]()
        modes = ExitStack()
        open_logs[graph] = launches, modes
        if any(watch.operators for watch in _open):
            modes.enter_context(OperatorLog(lambda: launches, _device()))

    def capture_end(graph: Any) -> None:
        if graph not in open_logs:
            torch_end(graph)
            return
        launches, modes = open_logs.pop(graph)
        modes.close()
        torch_end(graph)
        if not made[graph]:
            graph.instantiate()
        note_capture(graph, graph.pool(), launches)

    def reset(graph: Any) -> None:
        forget_capture(graph)
        torch_reset(graph)

    by_python = gc.freeze

    def freeze() -> None:
        frozen[:] = map(weakref.ref, living((Tensor, nn.Module, graphs)))
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
        for watch in list(_open):
            watch.refuse_freed(graph)
        by_torch(graph)

    with replaced(torch.cuda.CUDAGraph, replay=replay):
        yield


def _named(roots: Any) -> dict[str, Any]:
    if roots is None:
        return {}
    if not isinstance(roots, Mapping):
        raise ConfigError(
            f"the roots of a watch are a {type(roots).__name__}",
            remedy="""Name each object: {"model": model}.""",
        )
    named = {str(name): root for name, root in roots.items()}
    for name, root in named.items():
        if is_leaf(root):
            raise ConfigError(
                f"the root {name!r} holds no tensor",
                remedy="Give objects whose tensors graphs read.",
            )
    return named


def _name_of(path: str, owner: Owner) -> str:
    return re.sub(r"\[\d+\]", "[*]", path) or owner.name


def _stale_records(
    found: Iterable[Stale],
    totals: Counter[str],
) -> tuple[StaleRecord, ...]:
    groups = dict[tuple[str, str], list[Stale]]()
    for each in found:
        name = _name_of(each.path, each.owner)
        groups.setdefault((each.problem, name), []).append(each)
    records = []
    for (_, name), group in groups.items():
        graphs = dict.fromkeys(each.pointer.graph.key.name for each in group)
        records.append(
            StaleRecord(
                name=name,
                pointers=len(group),
                of=totals[name],
                graphs=tuple(graphs),
                **group[0].details,
            )
        )
    return tuple(records)
