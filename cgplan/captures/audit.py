"""Who owns the memory that captured graphs point to.

Note [Owners]
    Each word of a node that is an address is looked up in this order: tensors that the model's
    state holds, by their path, and static buffers; blocks of graph pools; then, for memory of
    neither, everything that can be reached from the runner, closures and caches included, by
    Python's garbage collector. What is left has no owner: memory that the allocator holds as free,
    memory that only others hold, and addresses where no memory is any more. A replay reads or
    writes there what belongs to somebody else, or will. Memory that no Python object holds and that
    is taken belongs to PyTorch or a library, such as the state of a random generator.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, get_args
from weakref import ReferenceType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cgplan.backends.graph_nodes import Block, GraphNodes, Launch
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.errors import AuditError
from cgplan.graphs.fingerprint import Fingerprint
from cgplan.graphs.watch import Watch
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

# words below are numbers, and those above are no addresses of a process
_ADDRESSES = 1 << 32, 1 << 47
_RECORDS = (Fingerprint, Watch)  # they hold the tensors of the capture, which the model may not
_NOT_ENTERED = (
    type,
    ModuleType,
    FrameType,
    ReferenceType,
    str,
    bytes,
    int,
    float,
    BuiltinFunctionType,
    *_RECORDS,
)
_TABLE = "the table of other ranks' buffers"  # as a node
_SHOWN = 10
_STEPS = 4  # of the path to an object
_PROBLEMS: tuple[Problem, ...] = get_args(Problem)


class _Owner(NamedTuple):
    kind: OwnerKind
    name: str
    nbytes: int | None = None


class _Ranges:
    """Stretches of memory with something for each. Of several that hold an address the innermost
    counts; of those that are alike the first.
    """

    def __init__(self, rows: Iterable[tuple[int, int, Any]]) -> None:
        first = dict[tuple[int, int], Any]()
        for start, end, value in rows:
            if end > start:
                first.setdefault((start, -end), value)
        ordered = sorted(first)
        self._starts = np.array([start for start, _ in ordered], np.uint64)
        self._ends = np.array([-end for _, end in ordered], np.uint64)
        self.values, around = [first[place] for place in ordered], list[int]()
        self._around = np.full(len(ordered) + 1, -1)  # of each the next larger one that may hold it
        for index, (start, _) in enumerate(ordered):
            while around and self._ends[around[-1]] <= start:
                around.pop()
            self._around[index] = around[-1] if around else -1
            around.append(index)

    def spans(self, address: int) -> bool:
        """Whether an address lies between the first and the last of them."""
        return bool(len(self._starts) and self._starts[0] <= address < self._ends.max())

    def find(self, addresses: NDArray[np.uint64]) -> NDArray[np.int64]:
        """For each address the index of its value, -1 where there is none."""
        at = np.searchsorted(self._starts, addresses, "right") - 1
        ends = np.append(self._ends, np.uint64(0))
        while (missed := (at >= 0) & (addresses >= ends[at])).any():
            at = np.where(missed, self._around[at], at)
        return at


@dataclass(slots=True)
class _Words:
    """All words of some graphs that may be addresses, and each address once.

    Attributes:
        graphs: Key, number among the key's graphs, nodes and logged operators of each graph.
        keys: Each key once.
        graph, node, certain: Of each word: the index of its graph, of the node in it, and whether
            it is certain.
        address: Of each word, as an index of ``addresses``.
        key: Of each word, as an index of ``keys``.
    """

    graphs: list[tuple[Key, int, GraphNodes, Sequence[Launch]]]
    keys: list[Key]
    graph: NDArray[np.int64]
    node: NDArray[np.int64]
    certain: NDArray[np.bool_]
    key: NDArray[np.int64]
    addresses: NDArray[np.uint64]
    address: NDArray[np.int64]

    @classmethod
    def of(cls, graphs: list[tuple[Key, int, GraphNodes, Sequence[Launch]]]) -> _Words:
        keys = list(dict.fromkeys(key for key, *_ in graphs))
        nodes = [nodes for _, _, nodes, _ in graphs]
        words = np.concatenate([np.zeros(0, np.uint64), *(n.words for n in nodes)])
        kept = (words >= _ADDRESSES[0]) & (words < _ADDRESSES[1])
        graph = np.repeat(np.arange(len(graphs)), [len(n.words) for n in nodes])[kept]
        addresses, address = np.unique(words[kept], return_inverse=True)
        return cls(
            graphs=graphs,
            keys=keys,
            graph=graph,
            node=np.concatenate([np.zeros(0, np.int64), *(n.nodes for n in nodes)])[kept],
            certain=np.concatenate([np.zeros(0, np.bool_), *(n.certain for n in nodes)])[kept],
            key=np.array([keys.index(key) for key, *_ in graphs], np.int64)[graph],
            addresses=addresses,
            address=address,
        )


def audit(graphed: ModelGraphs, environment: Environment) -> AuditReport:
    """Look up every pointer of the graphs that are captured now, see Note [Owners]. Findings have
    operators and lines where the graphs were captured with ``compilation.audit``. Raises
    BackendError where nodes cannot be read.
    """
    start, backend = time.perf_counter(), graphed.backend
    graphs = [
        (key, number, backend.nodes(graph), graph.launches)
        for key, entry in graphed.captured()
        for number, graph in enumerate(entry.segments)
    ]
    if graphs and (rows := graphed.peer_memory().addresses):
        words = np.array(rows, np.uint64)
        table = GraphNodes(
            (_TABLE,), 0, words, np.zeros(len(words), np.int64), np.ones(len(words), np.bool_)
        )
        graphs.append((graphs[0][0], len(graphs), table, ()))
    found = _Words.of(graphs)
    read = time.perf_counter()
    lookup = _Lookup(graphed, found)
    owners, owner = lookup.owners, lookup.owner_of[found.address]
    findings, unproven = list[Finding](), dict[OwnerKind, int]()
    for place in np.flatnonzero(
        np.isin(owner, [i for i, o in enumerate(owners) if o.kind in _PROBLEMS])
    ):
        known = owners[owner[place]]
        if (finding := _finding(found, int(place), known)) is not None:
            findings.append(finding)
        else:
            owner[place] = unproven.setdefault(known.kind, len(owners))
            if owner[place] == len(owners):
                owners.append(_Owner("unproven", f"looks like {known.kind}"))
    opaque = sum(nodes.opaque for _, _, nodes, _ in graphs)
    notes = [f"{counted(opaque, 'node')} cannot be read"] * (opaque > 0)
    if any(finding.operator is None for finding in findings):
        notes.append("for operators and lines capture with compilation.audit: report")
    counts = np.zeros((len(found.keys), len(owners)), np.int64)
    is_known = owner >= 0
    np.add.at(counts, (found.key[is_known], owner[is_known]), 1)
    records = [
        OwnerRecord(kind=o.kind, name=o.name, nbytes=o.nbytes, words=int(words), keys=int(keys))
        for o, words, keys in zip(owners, counts.sum(0), (counts > 0).sum(0), strict=True)
        if words
    ]
    return AuditReport(
        environment=environment,
        keys=tuple(
            _audited(found, key, owners, counts[index]) for index, key in enumerate(found.keys)
        ),
        owners=tuple(sorted(records, key=lambda row: -row.words)),
        findings=tuple(findings),
        read_seconds=read - start,
        classify_seconds=time.perf_counter() - read,
        notes=tuple(notes),
    )


def audit_error(report: AuditReport) -> AuditError:
    """The error of a report with findings."""
    first = dict.fromkeys(finding.text for finding in report.findings)
    lines = "".join(f"\n  {text}" for text in [*first][:_SHOWN]) + "\n  and more" * (
        len(first) > _SHOWN
    )
    return AuditError(
        f"{counted(len(report.findings), 'pointer')} of captured graphs into memory that is not "
        f"the runner's:{lines}",
        remedy="Keep what a graph reads in the model, or pass it as an input; capture again where "
        "it was replaced.",
    )


def _audited(
    found: _Words, key: Key, owners: Sequence[_Owner], counts: NDArray[np.int64]
) -> AuditedKey:
    nodes = [nodes for other, _, nodes, _ in found.graphs if other == key]
    kinds = Counter[OwnerKind]()
    for owner, count in zip(owners, counts.tolist(), strict=True):
        kinds[owner.kind] += count
    return AuditedKey(
        mode=key[0],
        descriptor=key[1],
        graphs=len(nodes),
        nodes=sum(len(n.names) for n in nodes),
        opaque=sum(n.opaque for n in nodes),
        words=int(counts.sum()),
        kinds={kind: count for kind, count in kinds.most_common() if count},
        kernels=dict(Counter(name for n in nodes for name in n.names).most_common()),
    )


def _finding(found: _Words, place: int, owner: _Owner) -> Finding | None:
    """None where nothing proves that the node uses the word."""
    (mode, descriptor), number, nodes, launches = found.graphs[found.graph[place]]
    node, address = int(found.node[place]), int(found.addresses[found.address[place]])
    # a tape adds the step later
    made = [one for one in launches if one.first <= node < max(one.end, one.first + 1)]
    launch = next(
        (one for one in made if one.operator == nodes.names[node]), made[-1] if made else None
    )
    if not found.certain[place] and (launch is None or address not in launch.operands):
        return None
    return Finding(
        mode=mode,
        descriptor=descriptor,
        problem=owner.kind,  # type: ignore[arg-type]  # the caller looked
        graph=number,
        node=node,
        kernel=nodes.names[node],
        operator=launch and launch.operator,
        line=launch and launch.line,
        address=address,
        detail=owner.name,
    )


class _Lookup:
    """Finds the owner of each address.

    Attributes:
        owners: Each owner once.
        owner_of: Of each address, as an index of ``owners``; -1 for words that are no addresses.
    """

    def __init__(self, graphed: ModelGraphs, found: _Words) -> None:
        self._graphed, self._found = graphed, found
        self._ids: dict[_Owner, int] = {}
        self.owner_of = np.full(len(found.addresses), -1)
        self._captured_at = graphed.captured_addresses()
        self._in_state()
        blocks = _Ranges((block.start, block.end, block) for block in graphed.backend.blocks())
        at = blocks.find(found.addresses)
        suspects = self._in_blocks(blocks, at) | self._outside(blocks, at)
        if suspects:
            self._in_python(suspects)

    @property
    def owners(self) -> list[_Owner]:
        return list(self._ids)

    def _set(self, places: Any, owner: _Owner) -> None:
        self.owner_of[places] = self._ids.setdefault(owner, len(self._ids))

    def _in_state(self) -> None:
        state = _Ranges(_state(self._graphed))
        at = state.find(self._found.addresses)
        for index in np.unique(at[at >= 0]):
            self._set(at == index, state.values[index])

    def _in_blocks(self, blocks: _Ranges, at: NDArray[np.int64]) -> dict[int, Block | None]:
        """Addresses in memory of the allocator; returns those whose owner has to be found yet, by
        their block.
        """
        found, pools, suspects = self._found, self._graphed.pools.handles, dict[int, Block | None]()
        first, last = np.full(len(at), len(found.keys)), np.full(len(at), -1)
        np.minimum.at(first, found.address, found.key)
        np.maximum.at(last, found.address, found.key)
        for index in np.unique(at[at >= 0]):
            block: Block = blocks.values[index]
            places = (at == index) & ((self.owner_of < 0) | block.is_free)
            if any(block.pool is pool for pool in pools):
                taken = "free" if block.is_free else "taken"
                places &= self.owner_of < 0
                self._set(places & (first == last), _Owner("graph pool", f"{taken} (one key)"))
                self._set(
                    places & (first < last), _Owner("graph pool", f"{taken} (several keys in turn)")
                )
            elif block.pool == "library":
                self._set(places, _Owner("library", "workspaces of cuBLAS"))
            else:
                suspects |= dict.fromkeys(np.flatnonzero(places).tolist(), block)
        return suspects

    def _outside(self, blocks: _Ranges, at: NDArray[np.int64]) -> dict[int, Block | None]:
        """Addresses outside of the allocator's memory; returns those on the host."""
        found, backend, suspects = self._found, self._graphed.backend, dict[int, Block | None]()
        certain = np.zeros(len(at), np.bool_)
        certain[found.address[found.certain]] = True
        for index in np.flatnonzero(at < 0).tolist():
            address, is_known = int(found.addresses[index]), self.owner_of[index] >= 0
            kind = backend.memory_at(address)
            if kind is None and (is_known or (certain[index] and blocks.spans(address))):
                self._set(
                    index,
                    _Owner("unmapped", f"no memory is there now{self._was(address, address)}"),
                )
            elif kind == "device" and not is_known:
                self._set(index, _Owner("library", "memory outside of PyTorch's allocator"))
            elif kind == "host" and not is_known:
                suspects[index] = None
        return suspects

    def _in_python(self, suspects: Mapping[int, Block | None]) -> None:
        """Memory that is neither known state nor a graph pool's: by the tensors that lie there."""
        reached, living = _held_in_python(
            self._graphed,
            [tensor for _, _, nodes, _ in self._found.graphs for tensor in nodes.tensors],
        )
        addresses = self._found.addresses[np.fromiter(suspects, np.int64)]
        for (index, block), mine, others in zip(
            suspects.items(), reached.find(addresses), living.find(addresses), strict=True
        ):
            address = int(self._found.addresses[index])
            detail = (
                "host memory"
                if block is None
                else f"{format_bytes(block.end - block.start)} of the device"
            )
            if block is not None and block.pool is not None:
                detail += " in another graph pool"
            detail += self._was(address if block is None else block.start, address)
            detail += f", allocated at {block.line}" if block is not None and block.line else ""
            is_free, in_pool = (
                block is not None and block.is_free,
                block is not None and block.pool is not None,
            )
            if mine >= 0 and not is_free:
                self._set(index, reached.values[mine])
            elif is_free or (others < 0 and (block is None or in_pool)):
                self._set(index, _Owner("free block", f"{detail}; nobody holds it"))
            elif others < 0:
                self._set(index, _Owner("library", "memory that no Python object holds"))
            elif in_pool:
                self._set(index, _Owner("another runner's pool", detail))
            else:
                self._set(
                    index,
                    _Owner(
                        "unowned block",
                        f"{detail}; nothing that a run of the model can reach holds it",
                    ),
                )

    def _was(self, start: int, address: int) -> str:
        """What lay at an address at capture, or next before it from ``start`` on."""
        near = max(
            (place for place in self._captured_at if start <= place <= address), default=None
        )
        return "" if near is None else f", where {self._captured_at[near]} lay at capture"


def _state(graphed: ModelGraphs) -> Iterator[tuple[int, int, _Owner]]:
    """Where the tensors of the model's state and the static buffers lie."""
    places = Fingerprint.of(graphed.roots, graphed.backend.device).places
    modules = [place.value for place in places.values() if isinstance(place.value, torch.nn.Module)]
    declared = {
        id(t) for m in modules for held in (m._parameters, m._buffers) for t in held.values()
    }
    for path, place in places.items():
        if isinstance(place.value, Tensor) and (span := _span(place.value)) is not None:
            kind: OwnerKind = "parameter or buffer" if id(place.value) in declared else "state"
            kind = kind if place.value.device.type == graphed.backend.device.type else "host memory"
            yield *span, _Owner(kind, path, span[1] - span[0])
    for start, end, name in graphed.peer_memory().mapped:
        yield start, end, _Owner("peer", name, end - start)
    for sizes, buffers in graphed.buffers.items():
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


def _held_in_python(graphed: ModelGraphs, by_graphs: Sequence[Tensor]) -> tuple[_Ranges, _Ranges]:
    """Memory of tensors that can be reached from the runner, with their paths; and of all living
    tensors.
    """
    excepted = set(map(id, by_graphs))
    reached, seen, above = list[tuple[int, int, _Owner]](), {id(graphed)}, dict[int, Any]()
    seen.add(id(graphed.written))  # a record, too
    waiting = deque([graphed.__dict__])
    while waiting:
        item = waiting.popleft()
        if isinstance(item, Tensor) and (span := _span(item)) is not None:
            kind: OwnerKind = (
                "state" if graphed.backend.device.type == item.device.type else "host memory"
            )
            reached.append((*span, _Owner(kind, _path(item, above), span[1] - span[0])))
        for inner in _inside(item):
            if (
                id(inner) not in seen
                and id(inner) not in excepted
                and not issubclass(type(inner), _NOT_ENTERED)
            ):
                seen.add(id(inner))
                above[id(inner)] = item
                waiting.append(inner)
    living = (o for o in gc.get_objects() if issubclass(type(o), Tensor) and id(o) not in excepted)
    return _Ranges(reached), _Ranges(
        (*span, None) for o in living if (span := _span(o)) is not None
    )


def _inside(item: Any) -> list[Any]:
    """The objects that an object holds; of a function not all globals, but those that its code
    names.
    """
    if type(item) is not FunctionType:
        return gc.get_referents(item)
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    names, codes = set[str](), [item.__code__]
    # it grows by inner functions, and by what Dynamo compiled in the function's place
    for code in codes:
        names.update(code.co_names)
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        codes += [entry.code for entry in _debug_get_cache_entry_list(code)]
    named = [item.__globals__[name] for name in names if name in item.__globals__]
    return [item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__, *named]


def _path(item: Any, above: Mapping[int, Any]) -> str:
    """The last steps from the runner to an object, by names and indices."""
    steps = list[str]()
    while (holder := above.get(id(item))) is not None and len(steps) < _STEPS:
        pairs: Iterable[tuple[Any, Any]] = ()
        if isinstance(holder, dict):
            pairs = holder.items()
        elif isinstance(holder, list | tuple):
            pairs = enumerate(holder)
        elif hasattr(holder, "__dict__"):
            pairs = vars(holder).items()
        steps.append(
            next(
                (f"[{key!r:.40}]" for key, value in pairs if value is item),
                f"<{type(holder).__name__}>",
            )
        )
        item = holder
    return "".join(reversed(steps))
