"""CustomAllReduce: reads the peers' graph buffers where they lie, through the registry's pointer table."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from cgplan.backends import GraphBackend
from cgplan.backends.context import current_forward_context
from cgplan.distributed.all_reduce import AllReduce
from cgplan.distributed.ranks import Ranks
from cgplan.distributed.registry import GraphBufferRegistry, Registration
from cgplan.distributed.transports import MemoryTransport
from cgplan.errors import CgplanError
from cgplan.modes import CUDAGraphMode
from cgplan.units import format_bytes

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ALIGNMENT = 16  # bytes: what one thread loads at once


class Kernels(Protocol):
    """What sums over a table row, on one kind of device."""

    def run(self, x: torch.Tensor, out: torch.Tensor, row: torch.Tensor) -> None:
        """Write the sum of all ranks' inputs, which lie where ``row`` says, to ``out``."""

    def reset(self) -> None:
        """Make the barriers' signals new; no rank is in a reduction."""

    def abort(self) -> None:
        """Have barriers that are waited in end, from another thread."""

    def check(self) -> None:
        """Raise AllReduceError if a barrier was left without the others."""

    def forget(self) -> None:
        """Drop what was kept of table rows: they will be written anew."""


class CustomAllReduce(AllReduce):
    """One-shot and two-shot all-reduce over registered buffers.

    An all-reduce in a FULL graph reads its peers' inputs where their graphs have them. One that runs eagerly, or in a
    PIECEWISE segment (which runs while the next one is captured, before anything is registered), copies its input to a
    staging buffer that was registered at the start. What the kernels cannot take goes to ``fallback``, and a line in
    the log says so, once for each reason.

    Args:
        ranks, backend: As for AllReduce.
        transport: How ranks reach each other's memory; it becomes the all-reduce's own.
        registry: On that transport.
        kernels: Of the device.
        fallback: For other tensors.
        max_bytes: Largest tensor that the kernels take.
    """

    name = "custom"

    def __init__(
        self,
        ranks: Ranks,
        backend: GraphBackend,
        transport: MemoryTransport,
        registry: GraphBufferRegistry,
        kernels: Kernels,
        fallback: AllReduce,
        max_bytes: int,
    ) -> None:
        super().__init__(ranks, backend)
        self.registry = registry
        self._transport, self._kernels, self._fallback, self._max_bytes = transport, kernels, fallback, max_bytes
        self._staging = transport.empty(max_bytes)
        addresses = registry.open_block("staging buffers", self._staging)
        self._staging_row = torch.tensor(addresses, dtype=torch.int64, device=backend.device)
        self._said: set[str] = set()
        self._failed = False
        self._listening = (ranks.watch.tell(self._abort), ranks.renew_after_failures(self._renew))

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Over the registered buffer in a FULL graph, else over the staging buffer."""
        reason = self._unfit(x)
        if reason:
            self._say(reason)
            return self._fallback.reduce(x)
        if not x.numel():
            return x.clone()
        x = x.contiguous()
        if x.data_ptr() % ALIGNMENT:  # a slice: the kernels load whole packs
            x = x.clone()
        is_capturing = self.backend.is_capturing()
        if is_capturing and not _in_segment():
            source = self._transport.place(x)
            row = self.registry.take_row(source)
        else:
            if is_capturing:
                self.registry.note(x)
            source = self._staging[: x.nbytes].view(x.dtype).view(x.shape)
            row = self._staging_row
        if source is not x:
            source.copy_(x)
        out = torch.empty_like(x)
        torch.ops.cgplan.all_reduce_row(source, out, row, self.number)
        return out

    def run(self, x: torch.Tensor, out: torch.Tensor, row: torch.Tensor) -> None:
        """By the device's kernels."""
        self._kernels.run(x, out, row)

    def begin_pass(self) -> None:
        """Unregister, and make the signals new: a rank that failed may have left a barrier early."""
        self.registry.unregister()
        self._kernels.forget()
        self.ranks.agree("the start of the capture pass")
        self._kernels.reset()
        self.ranks.agree("new signals")
        self._fallback.begin_pass()

    @property
    def is_read(self) -> bool:
        """Whether rows are written for graphs that were not given up."""
        return self.registry.is_sealed and self.registry.rows > 0

    def end_pass(self, error: BaseException | None = None) -> Registration:
        """Register, see GraphBufferRegistry.register."""
        return self.registry.register(error)

    def release(self) -> None:
        """Close the peers' handles, between two barriers."""
        self._kernels.forget()
        self.registry.unregister()

    def check(self) -> None:
        """Raise AllReduceError if a kernel gave up."""
        self._kernels.check()

    def _close(self) -> None:
        """Close and free staging, signals and table."""
        for stop in self._listening:
            stop()
        try:
            self.registry.close()
        finally:
            self._transport.free()
            self._fallback.close()

    def _unfit(self, x: torch.Tensor) -> str:
        """Why the kernels cannot take a tensor; empty if they can. The same on all ranks: shape and dtype decide."""
        if x.dtype not in DTYPES:
            return f"{x.dtype} is none of float32, float16, bfloat16"
        if x.nbytes > self._max_bytes:
            return f"{format_bytes(x.nbytes)} are more than distributed.all_reduce_max_size"
        if x.nbytes % ALIGNMENT:
            return f"{x.nbytes} bytes are not a multiple of {ALIGNMENT}"
        return ""

    def _say(self, reason: str) -> None:
        kind = reason.partition(" ")[2]
        if kind not in self._said:
            self._said.add(kind)
            if self.ranks.rank == 0:
                logger.warning("custom all-reduce: %s; %s does it", reason, self._fallback.name)

    def _renew(self) -> None:
        """Make the signals new, on all ranks. Each ends its own waits before: what they wait for may never come.

        A sum that was broken off may still write a signal to a peer: so all are over before signals count again.
        """
        self.ranks.agree("the start of new signals")
        with self.ranks.step("the end of sums under way"):
            self._kernels.abort()
            self._kernels.reset()
        with self.ranks.step("new signals"):
            self._kernels.reset()

    def _abort(self, _: CgplanError) -> None:
        self._kernels.abort()


def _in_segment() -> bool:
    context = current_forward_context()
    return context is not None and context.runtime_mode is CUDAGraphMode.PIECEWISE


__all__ = ["ALIGNMENT", "DTYPES", "CustomAllReduce", "Kernels"]
