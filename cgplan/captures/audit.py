"""Who owns the memory that captured graphs point to.

Note [Owners]
    Each word of a node that is an address is looked up in this order: tensors that the walk over
    the model finds, by their path, and static buffers; blocks of graph pools; then what torch's
    allocator says of the block, and whether a tensor of this process lies there. A replay reads or
    writes memory of somebody else, or will, where the allocator has freed the block, where no
    memory is any more, where only another runner's pool holds it, and where the model held a tensor
    at capture and others alone hold it now. Memory that no Python object holds and that is taken
    belongs to PyTorch or a library, such as the state of a random generator. What other tensors
    hold is the model's, by ways that the walk does not enter: sets, or compiled code.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

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
# words below are numbers, and those above are no addresses of a process
_LEAST = 1 << 32
_LEAST_ON_HOST = 1 << 16  # some interpreters have their heap below 4 GiB
_MOST = 1 << 47
_TABLE = "the table of other ranks' buffers"  # as a node
_SHOWN = 10
_PROBLEMS: tuple[Problem, ...] = get_args(Problem)


class _Owner(NamedTuple):
    kind: OwnerKind
    name: str
    nbytes: int | None = None


class _Graph(NamedTuple):
    """A graph of a key, with its number among the key's graphs."""

    key: Key
    number: int
    nodes: GraphNodes
    launches: Sequence[Launch]


class _Word(NamedTuple):
    graph: _Graph
    node: int
    is_certain: bool
    address: int


class _Stretches(Generic[T]):
    """Stretches of memory with something for each. Of several that hold an address the innermost
    counts; of those that are alike the first.
    """

    def __init__(self, rows: Iterable[tuple[int, int, T]]) -> None:
        first = dict[tuple[int, int], T]()
        for start, end, value in rows:
            if end > start:
                first.setdefault((start, -end), value)
        self._starts = list[int]()
        self._ends = list[int]()
        self._values = list[T]()
        self._around = list[int]()  # of each the next larger one that may hold it, or -1
        around = list[int]()
        for index, (start, minus_end) in enumerate(sorted(first)):
            while around and self._ends[around[-1]] <= start:
                around.pop()
            self._around.append(around[-1] if around else -1)
            around.append(index)
            self._starts.append(start)
            self._ends.append(-minus_end)
            self._values.append(first[start, minus_end])

    def spans(self, address: int) -> bool:
        """Whether an address lies between the first and the last of them."""
        return bool(self._starts) and self._starts[0] <= address < max(self._ends)

    def find(self, address: int) -> T | None:
        index = bisect_right(self._starts, address) - 1
        while index >= 0 and self._ends[index] <= address:
            index = self._around[index]
        return self._values[index] if index >= 0 else None


def audit(graphs: ModelGraphs, environment: Environment) -> AuditReport:
    """Look up every pointer of the graphs that are captured now, see Note [Owners]. Findings have
    operators and lines where the graphs were captured with ``compilation.audit``. Raises
    BackendError where nodes cannot be read.
    """
    start = time.perf_counter()
    captured = _captured(graphs)
    least = _LEAST if graphs.backend.device.type == "cuda" else _LEAST_ON_HOST
    words = _words(captured, least)
    read = time.perf_counter()
    owners = _Owners(graphs, captured, words)
    findings = list[Finding]()
    counts = {graph.key: Counter[_Owner]() for graph in captured}
    for word in words:
        owner = owners.of[word.address]
        if owner is None:
            continue
        if owner.kind in _PROBLEMS:
            finding = _finding(word, owner)
            if finding is None:
                owner = _Owner("unproven", f"looks like {owner.kind}")
            else:
                findings.append(finding)
        counts[word.graph.key][owner] += 1
    opaque = sum(graph.nodes.opaque for graph in captured)
    notes = list[str]()
    if opaque:
        notes.append(f"{counted(opaque, 'node')} cannot be read")
    if any(finding.operator is None for finding in findings):
        notes.append("for operators and lines capture with compilation.audit: report")
    return AuditReport(
        environment=environment,
        keys=tuple(_audited(captured, key, of_key) for key, of_key in counts.items()),
        owners=_owner_records(counts.values()),
        findings=tuple(findings),
        read_seconds=read - start,
        classify_seconds=time.perf_counter() - read,
        notes=tuple(notes),
    )


def audit_error(report: AuditReport) -> AuditError:
    """The error of a report with findings."""
    texts = list(dict.fromkeys(finding.text for finding in report.findings))
    lines = "".join(f"\n  {text}" for text in texts[:_SHOWN])
    if len(texts) > _SHOWN:
        lines += "\n  and more"
    return AuditError(
        f"{counted(len(report.findings), 'pointer')} of captured graphs into memory that is not "
        f"the runner's:{lines}",
        remedy="Keep what a graph reads in the model, or pass it as an input; capture again where "
        "it was replaced.",
    )


def _captured(graphs: ModelGraphs) -> list[_Graph]:
    """The graphs that are captured now; the table of other ranks' buffers counts as one."""
    found = list[_Graph]()
    for key, entry in graphs.captured():
        for number, graph in enumerate(entry.segments):
            found.append(_Graph(key, number, graphs.backend.nodes(graph), graph.launches))
    rows = graphs.peer_memory().addresses
    if found and rows:
        words = np.array(rows, np.uint64)
        nodes = np.zeros(len(words), np.int64)
        certain = np.ones(len(words), np.bool_)
        table = GraphNodes((_TABLE,), 0, words, nodes, certain)
        found.append(_Graph(found[0].key, len(found), table, ()))
    return found


def _words(captured: Iterable[_Graph], least: int) -> list[_Word]:
    """Words that may be addresses, from ``least`` on."""
    found = list[_Word]()
    for graph in captured:
        nodes = graph.nodes
        columns = (nodes.nodes.tolist(), nodes.certain.tolist(), nodes.words.tolist())
        for node, is_certain, word in zip(*columns, strict=True):
            if least <= word < _MOST:
                found.append(_Word(graph, node, is_certain, word))
    return found


def _audited(captured: Iterable[_Graph], key: Key, counts: Counter[_Owner]) -> AuditedKey:
    mine = [graph.nodes for graph in captured if graph.key == key]
    kinds = Counter[OwnerKind]()
    kernels = Counter[str]()
    for owner, count in counts.items():
        kinds[owner.kind] += count
    for nodes in mine:
        kernels.update(nodes.names)
    return AuditedKey(
        mode=key[0],
        descriptor=key[1],
        graphs=len(mine),
        nodes=kernels.total(),
        opaque=sum(nodes.opaque for nodes in mine),
        words=counts.total(),
        kinds=dict(kinds.most_common()),
        kernels=dict(kernels.most_common()),
    )


def _owner_records(counts: Iterable[Mapping[_Owner, int]]) -> tuple[OwnerRecord, ...]:
    words = Counter[_Owner]()
    keys = Counter[_Owner]()
    for of_key in counts:
        words.update(of_key)
        keys.update(of_key.keys())
    return tuple(
        OwnerRecord(
            kind=owner.kind,
            name=owner.name,
            nbytes=owner.nbytes,
            words=count,
            keys=keys[owner],
        )
        for owner, count in words.most_common()
    )


def _finding(word: _Word, owner: _Owner) -> Finding | None:
    """None where nothing proves that the node uses the word."""
    graph = word.graph
    node = word.node
    name = graph.nodes.names[node]
    found = None
    for launch in graph.launches:
        end = max(launch.end, launch.first + 1)  # a tape adds the step later
        if launch.first <= node < end and (found is None or found.operator != name):
            found = launch
    if not word.is_certain and (found is None or word.address not in found.operands):
        return None
    return Finding(
        mode=graph.key[0],
        descriptor=graph.key[1],
        problem=owner.kind,  # type: ignore[arg-type]  # the caller looked
        graph=graph.number,
        node=node,
        kernel=name,
        operator=None if found is None else found.operator,
        line=None if found is None else found.line,
        address=word.address,
        detail=owner.name,
    )


class _Owners:
    """Finds the owner of each address.

    Attributes:
        of: By address; None for words that are no addresses.
    """

    def __init__(
        self, graphs: ModelGraphs, captured: Sequence[_Graph], words: Iterable[_Word]
    ) -> None:
        self._graphs = graphs
        self._captured = captured
        self._at_capture = graphs.addresses.at_capture()
        self._state = _Stretches(_state(graphs))
        blocks = graphs.backend.blocks()
        self._blocks = _Stretches((block.start, block.end, block) for block in blocks)
        keys = dict[int, set[Key]]()
        certain = set[int]()
        for word in words:
            keys.setdefault(word.address, set()).add(word.graph.key)
            if word.is_certain:
                certain.add(word.address)
        self.of = dict[int, _Owner | None]()
        for address, users in keys.items():
            turns = "one key" if len(users) == 1 else "several keys in turn"
            self.of[address] = self._find(address, turns, is_certain=address in certain)

    def _find(self, address: int, turns: str, *, is_certain: bool) -> _Owner | None:
        owner = self._state.find(address)
        block = self._blocks.find(address)
        if block is None:
            return self._outside(address, owner, is_certain=is_certain)
        if any(block.pool is pool for pool in self._graphs.pools.handles):
            taken = "free" if block.is_free else "taken"
            return owner or _Owner("graph pool", f"{taken} ({turns})")
        if owner is not None and not block.is_free:
            return owner
        if block.pool == "library":
            return _Owner("library", "workspaces of cuBLAS")
        return self._held(address, block)

    def _outside(self, address: int, owner: _Owner | None, *, is_certain: bool) -> _Owner | None:
        """The owner of an address outside of the allocator's memory."""
        kind = self._graphs.backend.memory_at(address)
        if kind is None:
            if owner is None and not (is_certain and self._blocks.spans(address)):
                return None
            was = self._was(address, address + 1, address)
            return _Owner("unmapped", f"no memory is there now{was}")
        if owner is not None:
            return owner
        if kind == "device":
            return _Owner("library", "memory outside of PyTorch's allocator")
        return self._held(address, None)

    def _held(self, address: int, block: Block | None) -> _Owner:
        """The owner of memory that is neither known state nor a graph pool's of this runner."""
        holder = self._living.find(address)
        is_free = False
        in_pool = False
        line = ""
        if block is None:
            start, end = holder or (address, address + 1)
            detail = "host memory"
        else:
            start = block.start
            end = block.end
            is_free = block.is_free
            line = block.line
            detail = f"{format_bytes(end - start)} of the device"
            in_pool = block.pool is not None
        if in_pool:
            detail += " in another graph pool"
        was = self._was(start, end, address)
        detail += was
        if line:
            detail += f", allocated at {line}"
        if is_free or (holder is None and (block is None or in_pool)):
            return _Owner("free block", f"{detail}; nobody holds it")
        if holder is None:
            return _Owner("library", "memory that no Python object holds")
        if in_pool:
            return _Owner("another runner's pool", detail)
        if was:
            return _Owner("unowned block", f"{detail}; the model no longer holds it")
        kind: OwnerKind = "host memory" if block is None else "state"
        return _Owner(kind, "tensors that the walk over the model does not find")

    @cached_property
    def _living(self) -> _Stretches[tuple[int, int]]:
        """Where the tensors of this process lie, but for those that graphs keep."""
        of_graphs = set[int]()
        for graph in self._captured:
            of_graphs.update(map(id, graph.nodes.tensors))
        found = list[tuple[int, int, tuple[int, int]]]()
        for item in gc.get_objects():
            if issubclass(type(item), Tensor) and id(item) not in of_graphs:
                span = _span(item)
                if span is not None:
                    found.append((*span, span))
        return _Stretches(found)

    def _was(self, start: int, end: int, address: int) -> str:
        """Which tensor lay between ``start`` and ``end`` at capture, the next one to an address."""
        places = [place for place in self._at_capture if start <= place < end]
        if not places:
            return ""
        near = min(places, key=lambda place: abs(place - address))
        return f", where {self._at_capture[near]} lay at capture"


def _state(graphs: ModelGraphs) -> Iterator[tuple[int, int, _Owner]]:
    """Where the tensors of the model's state and the static buffers lie."""
    places = graphs.record().places
    device = graphs.backend.device.type
    declared = set[int]()
    for place in places.values():
        if isinstance(place.value, torch.nn.Module):
            held = vars(place.value)
            for name in ("_parameters", "_buffers"):
                declared.update(map(id, held.get(name, {}).values()))
    for path, place in places.items():
        if not isinstance(place.value, Tensor):
            continue
        span = _span(place.value)
        if span is None:
            continue
        kind: OwnerKind = "parameter or buffer" if id(place.value) in declared else "state"
        if place.value.device.type != device:
            kind = "host memory"
        yield *span, _Owner(kind, path, span[1] - span[0])
    for start, end, name in graphs.peer_memory().mapped:
        yield start, end, _Owner("peer", name, end - start)
    for sizes, buffers in graphs.buffers.items():
        box = f" of {'x'.join(map(str, sizes))}" if sizes else ""
        for name, buffer in buffers.buffers.items():
            span = _span(buffer.tensor)
            assert span is not None
            yield *span, _Owner("static buffer", f"{name}{box}", span[1] - span[0])


def _span(tensor: Tensor) -> tuple[int, int] | None:
    """The memory of a tensor's storage; None where it has none."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    except (RuntimeError, NotImplementedError):  # sparse tensors, and subclasses without memory
        return None
