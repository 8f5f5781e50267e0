"""Who owns the memory that graphs point to. Tensors that the walk misses count as the model's.
docs/audit.md says what proves a pointer.
"""

import gc
import time
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar, get_args

import numpy as np
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from cgplan.backends import GraphBackend
from cgplan.backends.graph_nodes import Block, GraphNodes, Launch
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.errors import AuditError
from cgplan.modes import Key
from cgplan.reports.records import (
    AuditedKey,
    AuditReport,
    Environment,
    Finding,
    OwnerKind,
    OwnerRecord,
    Problem,
)
from cgplan.units import counted, format_bytes

T = TypeVar("T")
# other words are no addresses
_LEAST = 1 << 32
_LEAST_ON_HOST = 1 << 16  # heaps may begin below 4 GiB
_MOST = 1 << 47
_TABLE = "the table of other ranks' buffers"
_UNKNOWN = Launch(0, 0, None, None, frozenset())
_SHOWN = 10
_UNHELD = "; nobody holds it"
_NO_LONGER = "; the model no longer holds it"
_NOT_FOUND = "tensors that the walk over the model does not find"
PROBLEMS: tuple[Problem, ...] = get_args(Problem)
frozen = list[weakref.ref[Any]]()  # what gc.freeze() hid from gc.get_objects() in a watch


class Owner(NamedTuple):
    kind: OwnerKind
    name: str
    nbytes: int | None = None


_PROVEN = Owner("proven", "memory of its pool")
_DISPROVEN = Owner("disproven", "no address")


class ReadGraph(NamedTuple):
    key: Any
    number: int
    nodes: GraphNodes
    launches: Sequence[Launch]
    proofs: Mapping[int, Owner] | None = None  # by number of the word


class Pointer(NamedTuple):
    graph: ReadGraph
    node: int
    is_certain: bool
    address: int
    proof: Owner | None = None


class Stale(NamedTuple):
    pointer: Pointer
    owner: Owner
    launch: Launch
    problem: str
    path: str

    @property
    def key(self) -> tuple[Any, str, str | int]:
        return self.pointer.graph.key, self.problem, self.path or self.pointer.address

    @property
    def details(self) -> dict[str, Any]:
        line = self.launch.line
        return {
            "problem": self.problem,
            "kernel": self.pointer.graph.nodes.names[self.pointer.node],
            "operator": self.launch.operator,
            "line": None if line is None else str(line),
            "detail": self.owner.name,
        }


class Stretches(Generic[T]):
    """Memory with values; the innermost one around an address counts, of equal ones the first."""

    def __init__(self, rows: Iterable[tuple[int, int, T]]) -> None:
        first = dict[tuple[int, int], T]()
        for start, end, value in rows:
            if end > start:
                first.setdefault((start, -end), value)
        self._starts = list[int]()
        self._ends = list[int]()
        self._values = list[T]()
        self._around = list[int]()  # the next larger one, or -1
        open_ones = [-1]
        for index, (start, minus_end) in enumerate(sorted(first)):
            while open_ones[-1] >= 0 and self._ends[open_ones[-1]] <= start:
                open_ones.pop()
            self._around.append(open_ones[-1])
            open_ones.append(index)
            self._starts.append(start)
            self._ends.append(-minus_end)
            self._values.append(first[start, minus_end])

    def spans(self, address: int) -> bool:
        return bool(self._starts) and self._starts[0] <= address < max(self._ends)

    def find(self, address: int) -> T | None:
        index = bisect_right(self._starts, address) - 1
        while index >= 0 and self._ends[index] <= address:
            index = self._around[index]
        return self._values[index] if index >= 0 else None


def audit(
    graphs: ModelGraphs,
    environment: Environment,
) -> AuditReport:
    """Look up every pointer of the graphs; ``compilation.audit`` gives operators and lines. Raises
    BackendError where nodes cannot be read.
    """
    start = time.perf_counter()
    captured = _captured(graphs)
    read = time.perf_counter()
    owners = Owners(
        graphs.backend,
        captured,
        state=_state(graphs),
        at_capture=graphs.addresses.at_capture(),
        own_pools=graphs.pools.handles,
    )
    findings = []
    for stale in owners.stale():
        pointer = stale.pointer
        mode, descriptor = pointer.graph.key
        findings.append(
            Finding(
                mode=mode,
                descriptor=descriptor,
                graph=pointer.graph.number,
                node=pointer.node,
                address=pointer.address,
                **stale.details,
            )
        )
    opaque = sum(graph.nodes.opaque for graph in captured)
    notes = []
    if opaque:
        notes.append(f"{counted(opaque, 'node')} cannot be read")
    if any(finding.operator is None for finding in findings):
        notes.append("for operators and lines capture with compilation.audit: report")
    return AuditReport(
        environment=environment,
        keys=tuple(_audited(captured, *item) for item in owners.counts.items()),
        owners=owner_records(owners.counts.values()),
        findings=tuple(findings),
        read_seconds=read - start,
        classify_seconds=time.perf_counter() - read,
        notes=tuple(notes),
    )


def audit_error(report: AuditReport) -> AuditError:
    texts = list(dict.fromkeys(finding.text for finding in report.findings))
    lines = "".join(f"\n  {text}" for text in texts[:_SHOWN])
    if len(texts) > _SHOWN:
        lines += "\n  and more"
    error = AuditError(
        f"captured graphs have {counted(len(report.findings), 'pointer')} into memory that is not "
        f"the runner's:{lines}",
        remedy="Hold the tensors in the model, or pass them as inputs; capture again after a "
        "replacement.",
    )
    error.report = report
    return error


def _captured(graphs: ModelGraphs) -> list[ReadGraph]:
    found = []
    for key, entry in graphs.captured():
        found += [
            ReadGraph(
                key,
                number,
                graphs.backend.nodes(graph),
                graph.launches,
                graph.proofs,
            )
            for number, graph in enumerate(entry.segments)
        ]
    rows = graphs.ranks.peer_memory().addresses
    if found and rows:
        words = np.array(rows, np.uint64)
        nodes = np.zeros(len(rows), np.int64)
        certain = np.ones(len(rows), np.bool_)
        table = GraphNodes((_TABLE,), 0, words, nodes, certain)
        found.append(ReadGraph(found[0].key, len(found), table, ()))
    return found


def pointers_of(
    captured: Iterable[ReadGraph],
    *,
    on_host: bool,
) -> list[Pointer]:
    least = _LEAST_ON_HOST if on_host else _LEAST
    found = []
    for graph in captured:
        nodes = graph.nodes.nodes.tolist()
        certain = graph.nodes.certain.tolist()
        proofs = graph.proofs or {}
        found += [
            Pointer(
                graph,
                nodes[index],
                certain[index],
                word,
                proofs.get(index),
            )
            for index, word in enumerate(graph.nodes.words.tolist())
            if least <= word < _MOST
        ]
    return found


def is_among(handles: Collection[Any], pool: Any) -> bool:
    """A pool of torch, or one of cgplan with a few of those."""
    return pool in handles or any(handle in handles for handle in getattr(pool, "handles", ()))


def prove(
    graphs: ModelGraphs,
    twin: ModelGraphs,
) -> None:
    first = dict(graphs.captured())
    blocks = blocks_of(graphs.backend)
    for key, entry in twin.captured():
        for graph, other in zip(first[key].segments, entry.segments, strict=False):
            graph.proofs = proofs_of(
                graphs.backend,
                blocks,
                (graph, other),
                (graph.pool, other.pool),
            )


def blocks_of(backend: GraphBackend) -> Stretches[Block]:
    return Stretches((block.start, block.end, block) for block in backend.blocks())


def proofs_of(
    backend: GraphBackend,
    blocks: Stretches[Block],
    graphs: Iterable[Any],
    pools: Sequence[Any],
) -> dict[int, Owner] | None:
    """Of words by number; None for different nodes."""
    nodes, other = map(backend.nodes, graphs)
    if nodes.names != other.names or nodes.words.size != other.words.size:
        return None
    found = {}
    for index, words in enumerate(zip(nodes.words.tolist(), other.words.tolist(), strict=True)):
        block, there = map(blocks.find, words)
        if block is None or there is None or not is_among(pools[:1], block.pool):
            continue
        if words[0] == words[1] and block.is_free:
            found[index] = _DISPROVEN
        elif is_among(pools[1:], there.pool):
            found[index] = _PROVEN
    return found


def figures_of(
    nodes: Collection[GraphNodes],
    counts: Mapping[Owner, int],
) -> dict[str, Any]:
    kinds = Counter[OwnerKind]()
    for owner, count in counts.items():
        kinds[owner.kind] += count
    return {
        "nodes": sum(len(each.names) for each in nodes),
        "opaque": sum(each.opaque for each in nodes),
        "words": kinds.total(),
        "kinds": dict(kinds.most_common()),
    }


def _audited(
    captured: Iterable[ReadGraph],
    key: Key,
    counts: Counter[Owner],
) -> AuditedKey:
    mine = [graph.nodes for graph in captured if graph.key == key]
    kernels = Counter[str]()
    for nodes in mine:
        kernels.update(nodes.names)
    return AuditedKey(
        mode=key[0],
        descriptor=key[1],
        graphs=len(mine),
        kernels=dict(kernels.most_common()),
        **figures_of(mine, counts),
    )


def owner_records(counts: Iterable[Mapping[Owner, int]]) -> tuple[OwnerRecord, ...]:
    words = Counter[Owner]()
    keys = Counter[Owner]()
    for of_key in counts:
        words.update(of_key)
        keys.update(of_key.keys())
    return tuple(
        OwnerRecord(
            **owner._asdict(),
            words=count,
            keys=keys[owner],
        )
        for owner, count in words.most_common()
    )


def launch_of(
    pointer: Pointer,
    kind: OwnerKind,
) -> tuple[Launch, bool]:
    """The operator that launched its node, and whether anything proves that the node uses it.
    Kernels that never read them have addresses on the host's stack: they look unmapped.
    """
    graph = pointer.graph
    name = graph.nodes.names[pointer.node]
    found = _UNKNOWN
    for launch in graph.launches:
        end = max(launch.end, launch.first + 1)  # views launch nothing
        if launch.first <= pointer.node < end:
            found = launch
            if launch.operator == name:
                break
    is_used = pointer.is_certain and (kind != "unmapped" or name == _TABLE)
    return found, is_used or pointer.address in found.operands


class Owners:
    """``counts``: Pointers by key and owner, once ``stale`` is through.

    Args:
        state: Start, end and owner of each tensor.
    """

    def __init__(
        self,
        backend: GraphBackend,
        captured: Sequence[ReadGraph],
        *,
        state: Iterable[tuple[int, int, Owner]],
        at_capture: Mapping[int, str],
        own_pools: Collection[Any],
    ) -> None:
        self._backend = backend
        self._captured = captured
        self._at_capture = at_capture
        self._own_pools = own_pools
        self._state = Stretches(state)
        self._blocks = blocks_of(backend)
        self._pointers = pointers_of(captured, on_host=backend.is_tape)
        self.counts = {graph.key: Counter[Owner]() for graph in captured}
        keys = dict[int, set[Any]]()
        certain = set()
        for pointer in self._pointers:
            keys.setdefault(pointer.address, set()).add(pointer.graph.key)
            if pointer.is_certain:
                certain.add(pointer.address)
        self._of = dict[int, Owner | None]()
        for address, users in keys.items():
            turns = "one key" if len(users) == 1 else "several keys in turn"
            self._of[address] = self._find(address, turns, is_certain=address in certain)

    def stale(
        self,
        place_of: Callable[..., tuple[str, bool, bool]] | None = None,
    ) -> Iterator[Stale]:
        """``place_of``: a path, whether it is stale, and whether it proves the pointer."""
        for pointer in self._pointers:
            owner = pointer.proof or self._of[pointer.address]
            if owner is None:
                continue
            kind = owner.kind
            path, has_moved, is_proven = "", False, False
            if place_of:
                path, has_moved, is_proven = place_of(pointer, owner)
            is_problem = kind in PROBLEMS
            if is_problem or (has_moved and kind not in ("graph pool", "proven", "disproven")):
                launch, is_used = launch_of(pointer, kind)
                became = kind if is_problem else "moved"
                if is_proven or is_used:
                    yield Stale(
                        pointer,
                        owner,
                        launch,
                        became,
                        path,
                    )
                else:
                    owner = Owner("unproven", f"looks like {kind}")
            self.counts[pointer.graph.key][owner] += 1

    def _find(
        self,
        address: int,
        turns: str,
        *,
        is_certain: bool,
    ) -> Owner | None:
        owner = self._state.find(address)
        block = self._blocks.find(address)
        if block is None:
            return self._outside(address, owner, is_certain=is_certain)
        if is_among(self._own_pools, block.pool):
            taken = "free" if block.is_free else "taken"
            return Owner("graph pool", f"{taken} ({turns})")
        if owner and not block.is_free:
            return owner
        if block.pool == "library":
            return Owner("library", "workspaces of cuBLAS")
        return self._in_block(address, block)

    def _outside(
        self,
        address: int,
        owner: Owner | None,
        *,
        is_certain: bool,
    ) -> Owner | None:
        kind = self._backend.memory_at(address)
        if kind is None:
            if owner is None and not (is_certain and self._blocks.spans(address)):
                return None
            was = self._was(address, address + 1, address)
            return Owner("unmapped", f"no memory is there now{was}")
        if owner:
            return owner
        if kind == "device":
            return Owner("library", "memory outside of PyTorch's allocator")
        holder = self._living.find(address)
        start, end = holder or (address, address + 1)
        was = self._was(start, end, address)
        if holder is None:
            return Owner("free block", f"host memory{was}{_UNHELD}")
        if was:
            return Owner("unowned block", f"host memory{was}{_NO_LONGER}")
        return Owner("host memory", _NOT_FOUND)

    def _in_block(
        self,
        address: int,
        block: Block,
    ) -> Owner:
        is_held = self._living.find(address) is not None
        in_pool = block.pool is not None
        was = self._was(block.start, block.end, address)
        detail = f"{format_bytes(block.end - block.start)} of the device"
        if in_pool:
            detail += " in another graph pool"
        detail += was
        if block.line:
            detail += f", allocated at {block.line}"
        # what a tape's graph reads is not freed
        by_graphs = self._backend.is_tape and in_pool and not is_held
        if block.is_free or by_graphs:
            return Owner("free block", detail + _UNHELD)
        if not is_held:
            return Owner("library", "memory that no Python object holds")
        if in_pool:
            return Owner("another runner's pool", detail)
        if was:
            return Owner("unowned block", detail + _NO_LONGER)
        return Owner("state", _NOT_FOUND)

    @cached_property
    def _living(self) -> Stretches[tuple[int, int]]:
        of_graphs = set[int]()
        for graph in self._captured:
            of_graphs.update(map(id, graph.nodes.tensors))
        return Stretches(
            (*span, span) for tensor, span in living_tensors() if id(tensor) not in of_graphs
        )

    def _was(
        self,
        start: int,
        end: int,
        address: int,
    ) -> str:
        places = [place for place in self._at_capture if start <= place < end]
        if not places:
            return ""
        near = min(places, key=lambda place: abs(place - address))
        return f", where {self._at_capture[near]} was at capture"


def _state(graphs: ModelGraphs) -> Iterator[tuple[int, int, Owner]]:
    record = graphs.fingerprint()
    parts = {id(held.value) for held in record.contents.values() if held.holds == "parts"}
    declared = {id(place.value) for place in record.of_tensors if id(place.container) in parts}
    for place in record.of_tensors:
        span = span_of(place.value)
        if span is None:
            continue
        kind: OwnerKind = "state"
        if place.value.device.type != graphs.backend.device.type:
            kind = "host memory"
        elif id(place.value) in declared:
            kind = "parameter or buffer"
        yield *span, Owner(kind, place.path, span[1] - span[0])
    for start, end, name in graphs.ranks.peer_memory().mapped:
        yield start, end, Owner("peer", name, end - start)
    for sizes, buffers in graphs.buffers.items():
        box = f" of {'x'.join(map(str, sizes))}" if sizes else ""
        for name, buffer in buffers.buffers.items():
            span = span_of(buffer.tensor)
            assert span
            yield *span, Owner("static buffer", f"{name}{box}", span[1] - span[0])


def living_tensors() -> Iterator[tuple[Tensor, tuple[int, int]]]:
    for tensor in living(Tensor):
        span = span_of(tensor)
        if span:
            yield tensor, span


def living(kind: Any) -> Iterator[Any]:
    for item in chain(gc.get_objects(), (ref() for ref in frozen)):
        if issubclass(type(item), kind):
            yield item


def span_of(tensor: Tensor) -> tuple[int, int] | None:
    if isinstance(tensor, FakeTensor):
        return None
    try:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors, and some subclasses
        return None
    return start, start + storage.nbytes()
