"""The CPU stand-in, with the contract of CUDA graphs: it records the operators of a forward
into a pool, and replays them.
"""

from __future__ import annotations

import gc
import math
import os
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from cgplan.backends.backend import (
    GraphBackend,
    MemoryReading,
    PoolMemory,
    foreign_pool,
    forget_capture,
    gc_paused,
    note_capture,
    number_of,
    tensor_on,
)
from cgplan.backends.blame import blamed_line
from cgplan.backends.graph_nodes import Block, GraphNodes, Launch
from cgplan.backends.host_sync import (
    ALLOCATIONS,
    Args,
    DispatchMode,
    Kwargs,
    Refusals,
    as_its_caller,
    as_written,
    count_writes,
    host_guard,
    implemented_in_python,
    is_composite,
    operator_of,
    refuse_host,
    tensors_in,
    written_tensors,
)
from cgplan.backends.replacing import ALL_OTHERS, answering, replaced
from cgplan.config.schema import TAPE
from cgplan.errors import CaptureError

_COLLECTIVES = ("c10d", "_c10d_functional")
_POSTED = ("c10d::send", "c10d::recv_")


@dataclass(frozen=True)
class Step:
    """``copies``: fresh results by (index among the flat results, slot). ``is_posted``: only the
    next step that is not posted waits for it.
    """

    operator: str
    call: partial[Any]
    copies: list[tuple[int, Tensor]]
    is_posted: bool


@dataclass
class _Before:
    generators: dict[torch.Generator, Tensor]
    memory: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = field(
        default_factory=dict
    )

    def keep(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() and storage._cdata not in self.memory:
            self.memory[storage._cdata] = storage, storage.clone()

    def restore(self) -> None:
        for storage, before in self.memory.values():
            storage.copy_(before)
        for generator, state in self.generators.items():
            generator.set_state(state)


class Recorder(DispatchMode):
    """One for all tapes of a thread: a capture may begin inside an operator, after which torch
    restores its modes.
    """

    tape: Tape | None = None

    @contextmanager
    def writes_to(self, tape: Tape) -> Iterator[None]:
        if self not in _get_current_dispatch_mode_stack():
            _push_mode(self)
        self.tape = tape
        try:
            yield
        finally:
            self.tape = None
            self.leave()

    def leave(self) -> None:
        if _get_current_dispatch_mode() is self:
            _pop_mode()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Inside an operator torch has taken the mode off."""
        _push_mode(self)
        try:
            yield
        finally:
            self.leave()

    def see(
        self,
        func: Any,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        tape = self.tape
        if tape is None:
            return func(*args, **kwargs)
        # replays must not run its Python code
        if implemented_in_python(func, "CPU"):
            return self._look_inside(tape, func, args, kwargs)
        # else it hides host reads
        if is_composite(func, "CPU"):
            with self._inside():
                return as_its_caller(func, func.decompose, "cpu")(*args, **kwargs)
        refuse_host(func, args, kwargs, tape.refusals)
        return tape.record(func, args, kwargs)

    def _look_inside(
        self,
        tape: Tape,
        func: Any,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """Records its operators, or the whole if it needs the host."""
        refusals = tape.refusals
        name = func._schema.name
        first = refusals.first
        count_writes(func, args, kwargs)
        before = _Before({g: g.get_state() for g in tape.before.generators})
        for tensor in written_tensors(func, args, kwargs):
            before.keep(tensor.untyped_storage())
        known = len(tape.steps)
        try:
            cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
            with self._inside():
                result = as_its_caller(func, func.redispatch, "cpu")(cpu, *args, **kwargs)
        except Exception:
            if refusals.first is first or self.tape is not tape:
                raise
        if refusals.first is first or self.tape is not tape:
            return result
        before.restore()
        del tape.steps[known:]
        if tape.launches is not None:
            del tape.launches[known:]
        assert refusals.first
        note = (
            f"{refusals.first.message}; the tape calls operator {name} again on each replay, a "
            "GPU may refuse it"
        )
        tape.notes[note] = None
        refusals.first = first
        refusals.is_on = False
        try:
            result = tape.record(func, args, kwargs)
        finally:
            refusals.is_on = True
        if self.tape is not tape:
            raise CaptureError(
                f"operator {name} needs the host, and breaks the capture as well, at "
                f"{blamed_line()}",
                remedy="Read the value inside the eager piece.",
            )
        return result


@dataclass(eq=False)
class Tape:
    """Runs a forward once and keeps its ``steps`` on fixed memory.

    Attributes:
        before: Restored at the end, because a GPU's capture runs nothing.
    """

    pool: TapePool
    generators: Mapping[int, torch.Generator]
    launches: list[Launch] | None

    def __post_init__(self) -> None:
        self.steps: list[Step] = []
        self.refusals = Refusals()
        self.notes: dict[str, None] = {}
        default = torch.default_generator
        self.before = _Before({default: default.get_state()})
        for alias in self.pool.aliases.values():
            self.before.keep(alias)

    def _note_draw(
        self,
        generator: torch.Generator,
    ) -> None:
        if number_of(generator) not in self.generators:
            raise CaptureError(
                f"a generator that is not registered draws, at {blamed_line()}",
                remedy="Keep it with the model, or pass it to backend.register_generator.",
            )
        self.before.generators.setdefault(generator, generator.get_state())

    def record(
        self,
        func: Any,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        given = _storages(func, leaves)
        call = as_its_caller(func, func, "cpu")
        is_lifted = func is torch.ops.aten.lift_fresh.default
        if func.namespace == "aten" and operator_of(func).is_view and not is_lifted:
            result = call(*args, **kwargs)
            self.refusals.follow(func, args, kwargs, result)
            return result
        for tensor in written_tensors(func, args, kwargs):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.pool.aliases:
                self.before.keep(storage)
        generator = kwargs.get("generator")
        if generator is not None:
            self._note_draw(generator)
        # the same memory without a hold on its block: the operator may change their layout
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                alias = self.pool.aliases.get(leaf.untyped_storage()._cdata)
                leaves[i] = leaf.detach() if alias is None else tensor_on(alias, leaf)
        fixed_args, fixed_kwargs = tree_unflatten(leaves, spec)
        if is_lifted:
            call = torch.ops.aten.clone.default
        elif func.namespace in _COLLECTIVES and func._schema.name not in _POSTED:
            call = partial(_awaited, func)
        results, spec = tree_flatten(call(*args, **kwargs))
        if func._opname.startswith("_foreach_"):
            count_writes(func, args, kwargs)
        copies = self._move_fresh(results, given)
        if self._makes_step(func, results, copies):
            name = func._schema.name
            if self.launches is not None:
                first = len(self.steps)
                launch = Launch(first, first + 1, name, blamed_line(), frozenset())
                self.launches.append(launch)
            step = partial(call, *fixed_args, **fixed_kwargs)
            self.steps.append(Step(name, step, copies, name in _POSTED))
        result = tree_unflatten(results, spec)
        self.refusals.follow(func, args, kwargs, result)
        return result

    def _move_fresh(
        self,
        results: list[Any],
        given: set[int],
    ) -> list[tuple[int, Tensor]]:
        """Into the pool: ``results`` that lie on none of the storages ``given``."""
        copies = []
        blocks = {}
        for i, leaf in enumerate(results):
            if not isinstance(leaf, Tensor):
                continue
            source = leaf.untyped_storage()
            # a zero derivative, or what an ``out=`` is about to grow
            is_void = leaf._is_zerotensor() or source.device.type == "meta" or not source.nbytes()
            if is_void or source._cdata in given:
                continue
            if source._cdata not in blocks:
                block = self.pool.take(source.nbytes())
                blocks[source._cdata] = block.copy_(source)
            block = blocks[source._cdata]
            copies.append((i, tensor_on(self.pool.aliases[block._cdata], leaf)))
            results[i] = tensor_on(block, leaf)
        return copies

    def _makes_step(
        self,
        func: Any,
        results: list[Any],
        copies: list[tuple[int, Tensor]],
    ) -> bool:
        """False for views and bare memory."""
        schema = func._schema
        writes = schema.is_mutable and torch.Tag.inplace_view not in func.tags
        if copies or writes or not tensors_in(results):
            return schema.name.removeprefix("aten::") not in ALLOCATIONS
        if func.namespace == "aten" or all(r.alias_info for r in schema.returns):
            return False
        # it may have written to it
        if func.namespace not in _COLLECTIVES:
            note = f"operator {schema.name} returns an argument, and its schema does not say why"
            self.notes[note] = None
        return True


def _storages(func: Any, leaves: list[Any]) -> set[int]:
    found = set()
    for tensor in leaves:
        if not isinstance(tensor, Tensor):
            continue
        if tensor.device.type not in ("cpu", "meta") or tensor.layout is not torch.strided:
            raise CaptureError(
                f"operator {func._schema.name} has a {tensor.layout} tensor on {tensor.device}, at "
                f"{blamed_line()}",
                remedy="The tape records dense tensors on the CPU; use device: cuda for others.",
            )
        found.add(tensor.untyped_storage()._cdata)
    return found


def _awaited(func: Any, *args: Any, **kwargs: Any) -> Any:
    result = func(*args, **kwargs)
    _wait(result)
    return result


def _wait(results: Any) -> None:
    for leaf in tree_leaves(results):
        if isinstance(leaf, Tensor):
            torch.ops._c10d_functional.wait_tensor(leaf)
        else:
            leaf.wait()


def replay(steps: list[Step]) -> None:
    # tensors of inference mode may be written only there; autocast did its part
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        posted = list[Any]()
        for step in steps:
            if posted and not step.is_posted:
                _wait(posted)
                posted.clear()
            try:
                result = step.call()
            except Exception as error:
                error.add_note(
                    f"A graph replayed {step.operator}. If an index is out of bounds, an input is, "
                    "such as `positions` from max_cache_len on; a GPU would stop the process."
                )
                raise
            if step.is_posted:
                posted.append(result)
            if step.copies:
                flat = [result] if isinstance(result, Tensor) else tree_leaves(result)
                for i, slot in step.copies:
                    slot.copy_(flat[i])
        _wait(posted)


ALIGNMENT = 64  # bytes, as torch


class TapePool:
    """Blocks of host memory, freed by the last tensor on them.

    Attributes:
        aliases: A second storage of each taken block, without a hold, by the first one's address.
    """

    def __init__(self, backend: object = None) -> None:
        self.backend = backend
        self.aliases: dict[int, torch.UntypedStorage] = {}
        self.graphs = weakref.WeakSet[object]()
        self.nbytes = 0  # reserved, taken or free
        self.held = 0  # taken
        self._segments: dict[int, NDArray[np.uint8]] = {}  # by address
        self._free: dict[int, int] = {}  # lengths by address

    def spans(self) -> Iterator[tuple[int, int, bool]]:
        """First address, end, and whether it is free."""
        for start, segment in self._segments.items():
            end = start + segment.nbytes
            at = start
            for free in sorted(self._free):
                if not start <= free < end:
                    continue
                if at < free:
                    yield at, free, False
                at = free + self._free[free]
                yield free, at, True
            if at < end:
                yield at, end, False

    def take(self, nbytes: int) -> torch.UntypedStorage:
        """With the block's old contents."""
        nbytes = max(nbytes, 1)
        size = math.ceil(nbytes / ALIGNMENT) * ALIGNMENT
        start = None
        for at, length in self._free.items():
            if length >= size and (start is None or length < self._free[start]):
                start = at
        if start is None:
            start = self._new_segment(size)
        self.held += size
        left = self._free.pop(start) - size
        if left:
            self._free[start + size] = left
        bases = sorted(self._segments)
        base = bases[bisect_right(bases, start) - 1]
        first = start - base
        memory = self._segments[base][first : first + nbytes]
        storage = torch.from_numpy(memory).untyped_storage()
        alias = torch.from_numpy(memory.view()).untyped_storage()
        key = storage._cdata
        self.aliases[key] = alias
        # it dies with the last tensor on the block
        finalizer = weakref.finalize(
            memory,
            self._give_back,
            key,
            start,
            start + size,
        )
        finalizer.atexit = False
        return storage

    def trim(self) -> None:
        if self.graphs:
            return
        gc.collect(0)  # frames of an exception hold tensors
        for start, segment in list(self._segments.items()):
            if self._free.get(start) == segment.nbytes:
                del self._segments[start], self._free[start]
                self.nbytes -= segment.nbytes

    def _give_back(
        self,
        key: int,
        start: int,
        end: int,
    ) -> None:
        del self.aliases[key]
        self.held -= end - start
        for at, length in list(self._free.items()):
            if at + length == start:
                del self._free[at]
                start = at
            elif at == end:
                del self._free[at]
                end += length
        self._free[start] = end - start

    def _new_segment(self, size: int) -> int:
        raw = np.empty(size + ALIGNMENT, np.uint8)
        skipped = -raw.ctypes.data % ALIGNMENT
        segment = raw[skipped : skipped + size]
        start = segment.ctypes.data
        self._segments[start] = segment
        self.nbytes += size
        self._free[start] = size
        return int(start)


@dataclass(eq=False)
class TapeGraph:
    pool: TapePool
    steps: list[Step] | None = None
    under_way: tuple[Tape, ExitStack] | None = None
    notes: tuple[str, ...] = ()
    launches: list[Launch] = field(default_factory=list)
    proofs: object = None


_pools = weakref.WeakSet[TapePool]()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.recorder = Recorder()  # type: ignore[no-untyped-call]


class TapeBackend(GraphBackend):
    name = TAPE
    is_tape = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._thread = _Thread()
        self._own_pools = weakref.WeakSet[TapePool]()
        self._logs_operators = False
        self._generators = dict[int, torch.Generator]()
        self.register_generator(torch.default_generator)

    def register_generator(self, generator: torch.Generator) -> None:
        self._generators[number_of(generator)] = generator

    def new_pool(self) -> TapePool:
        pool = TapePool(self)
        _pools.add(pool)
        self._own_pools.add(pool)
        return pool

    def pool_memory(self, *pools: TapePool) -> PoolMemory:
        nbytes = 0
        held = 0
        for pool in pools:
            nbytes += pool.nbytes
            held += pool.held
        return PoolMemory(nbytes, held)

    def new_graph(self, pool: TapePool) -> TapeGraph:
        if not isinstance(pool, TapePool) or pool.backend is not self:
            raise foreign_pool(pool, self)
        return TapeGraph(pool)

    def begin(self, graph: TapeGraph) -> None:
        assert graph.steps is None, "a graph is captured once"
        if self.is_capturing():
            raise CaptureError(
                "a capture inside another one",
                remedy="End the open one first.",
            )
        tape = Tape(
            graph.pool,
            self._generators,
            graph.launches if self._logs_operators else None,
        )
        with ExitStack() as modes:
            modes.enter_context(answering([ALL_OTHERS], lambda _: True))
            modes.enter_context(as_written())
            modes.enter_context(host_guard(tape.refusals))
            modes.enter_context(self._thread.recorder.writes_to(tape))
            graph.under_way = tape, modes.pop_all()

    def end(self, graph: TapeGraph) -> None:
        """Raises HostSyncError even if the forward caught it."""
        tape = self._stop(graph)
        if tape.refusals.first:
            graph.pool.trim()
            raise tape.refusals.first
        graph.steps = tape.steps
        graph.notes = tuple(tape.notes)
        graph.pool.graphs.add(graph)
        note_capture(graph, graph.pool, graph.launches)

    def abort(self, graph: TapeGraph) -> None:
        self._stop(graph)
        graph.pool.trim()

    def is_capturing(self) -> bool:
        return self._thread.recorder.tape is not None

    def replay_of(self, graph: TapeGraph) -> Callable[[], None]:
        assert graph.steps is not None, "the graph was not captured, or was reset"
        return partial(replay, graph.steps)

    def reset(self, graph: TapeGraph) -> None:
        graph.steps = None
        forget_capture(graph)
        # torch put the mode back where an eager piece failed inside an operator
        if not self.is_capturing():
            self._thread.recorder.leave()
        graph.pool.graphs.discard(graph)
        graph.pool.trim()

    def num_nodes(self, graph: TapeGraph) -> int:
        return len(graph.steps or ())

    def logging_operators(self) -> AbstractContextManager[object]:
        return replaced(self, _logs_operators=True)

    def nodes(self, graph: TapeGraph) -> GraphNodes:
        steps = graph.steps or []
        tensors = []
        nodes = []
        for index, step in enumerate(steps):
            given: Args = (step.call.args, step.call.keywords)
            if step.operator == "aten::lift_fresh":  # of Python's numbers
                given = ()
            for tensor in tensors_in((given, step.copies)):
                # without dimensions: TorchScript's numbers
                if tensor.dim() and tensor.numel():
                    tensors.append(tensor)
                    nodes.append(index)
        addresses = [tensor.data_ptr() for tensor in tensors]
        return GraphNodes(
            names=tuple([step.operator for step in steps]),
            opaque=0,
            words=np.array(addresses, np.uint64),
            nodes=np.array(nodes, np.int64),
            certain=np.ones(len(tensors), np.bool_),
            tensors=tuple(tensors),
        )

    def blocks(self) -> list[Block]:
        found = []
        for pool in _pools:
            for start, end, is_free in pool.spans():
                found.append(Block(start, end, pool, is_free, ""))
        return found

    def notes(self, graph: TapeGraph) -> tuple[str, ...]:
        return graph.notes

    def borrow(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        for pool in self._own_pools:
            alias = pool.aliases.get(storage._cdata)
            if alias is not None:
                with _disable_current_modes():
                    # a view of inference mode is of use only there
                    return tensor_on(alias, tensor)
        return tensor

    def in_pool(
        self,
        tensor: Tensor,
        pool: TapePool,
    ) -> bool:
        if tensor.device != self.device or tensor.layout is not torch.strided:
            return False
        address = tensor.untyped_storage().data_ptr()
        return any(start <= address < end for start, end, _ in pool.spans())

    def is_empty(self, graph: TapeGraph) -> bool:
        return not graph.steps

    def slot(self, value: Tensor) -> Tensor:
        slot = torch.empty_like(value)
        with _disable_current_modes():
            slot.copy_(value)
        return slot

    def memory(self) -> MemoryReading:
        page = os.sysconf("SC_PAGE_SIZE")
        free = None
        if "SC_AVPHYS_PAGES" in os.sysconf_names:
            free = os.sysconf("SC_AVPHYS_PAGES") * page
        return MemoryReading(
            free,
            total=os.sysconf("SC_PHYS_PAGES") * page,
            reserved=self.pool_memory(*self._own_pools).nbytes,
        )

    def session(self) -> AbstractContextManager[None]:
        return gc_paused()

    def synchronize(self) -> None:
        pass

    def release_cached(self) -> None:
        for pool in list(self._own_pools):
            pool.trim()

    def _stop(self, graph: TapeGraph) -> Tape:
        assert graph.under_way, "no capture is under way in this graph"
        tape, modes = graph.under_way
        graph.under_way = None
        modes.close()
        tape.before.restore()
        return tape
