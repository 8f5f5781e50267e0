"""The CPU stand-in, with the contract of CUDA graphs."""

import gc
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

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
from cgplan.backends.graph_nodes import Block, GraphNodes, Launch
from cgplan.backends.host_sync import as_written, host_guard
from cgplan.backends.replacing import ALL_OTHERS, answering, replaced
from cgplan.backends.tape_recorder import Recorder, Step, Tape, TapePool, replay
from cgplan.config.values import TAPE
from cgplan.errors import CaptureError


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
        if tape.refusals.first is not None:
            self._trim(graph.pool)
            raise tape.refusals.first
        graph.steps = tape.steps
        graph.notes = tuple(tape.notes)
        graph.pool.graphs.add(graph)
        note_capture(graph, graph.pool, graph.launches)

    def abort(self, graph: TapeGraph) -> None:
        self._stop(graph)
        self._trim(graph.pool)

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
        self._trim(graph.pool)

    def num_nodes(self, graph: TapeGraph) -> int:
        return len(graph.steps or ())

    def logging_operators(self) -> AbstractContextManager[object]:
        return replaced(self, _logs_operators=True)

    def nodes(self, graph: TapeGraph) -> GraphNodes:
        steps = graph.steps or []
        tensors: list[Tensor] = []
        nodes: list[int] = []
        for index, step in enumerate(steps):
            for tensor in step.tensors():
                # without dimensions: TorchScript's numbers
                if tensor.dim() and tensor.numel():
                    tensors.append(tensor)
                    nodes.append(index)
        addresses = [tensor.data_ptr() for tensor in tensors]
        return GraphNodes(
            names=tuple(step.operator for step in steps),
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
            reserved=self.pool_bytes(*self._own_pools),
        )

    def session(self) -> AbstractContextManager[None]:
        return gc_paused()

    def synchronize(self) -> None:
        pass

    def release_cached(self) -> None:
        for pool in list(self._own_pools):
            self._trim(pool)

    def _stop(self, graph: TapeGraph) -> Tape:
        assert graph.under_way is not None, "no capture is under way in this graph"
        tape, modes = graph.under_way
        graph.under_way = None
        modes.close()
        tape.before.restore()
        return tape

    def _trim(self, pool: TapePool) -> None:
        if not pool.graphs:
            gc.collect(0)  # frames of an exception hold tensors
            pool.trim()
