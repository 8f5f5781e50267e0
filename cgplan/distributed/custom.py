"""CustomAllReduce: reads the peers' graph buffers where they lie, through the registry's pointer table."""

from __future__ import annotations

import logging
from abc import abstractmethod

import torch

from cgplan.backends import GraphBackend
from cgplan.backends.context import current_forward_context
from cgplan.distributed.all_reduce import AllReduce
from cgplan.distributed.ranks import Ranks
from cgplan.distributed.registry import GraphBufferRegistry, Registration
from cgplan.distributed.transports import MemoryTransport
from cgplan.modes import CUDAGraphMode
from cgplan.units import format_bytes

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PACK_BYTES = 16  # one load of a thread; inputs are aligned to it, and so many bytes long or a multiple


class CustomAllReduce(AllReduce):
    """One-shot and two-shot all-reduce over registered buffers.

    An all-reduce in a FULL graph reads its peers' inputs where their graphs have them. One that runs eagerly, or in a
    PIECEWISE segment (which runs while the next one is captured, before anything is registered), copies its input to a
    staging buffer that was registered at the start. What the kernels cannot take goes to ``fallback``, and a line in
    the log says so, once for each reason.

    Args:
        ranks, backend: As for AllReduce.
        transport: How ranks reach each other's memory; the all-reduce owns it.
        signal_bytes: Of the memory through which ranks signal to each other.
        fallback: For other tensors; the all-reduce owns it.
        max_bytes: Largest tensor that the kernels take.
        table_rows: All-reduces in all graphs, at most.

    Attributes:
        registry: Of the graphs' buffers.
    """

    name = "custom"

    def __init__(
        self,
        ranks: Ranks,
        backend: GraphBackend,
        transport: MemoryTransport,
        signal_bytes: int,
        fallback: AllReduce,
        max_bytes: int,
        table_rows: int,
    ) -> None:
        super().__init__(ranks, backend)
        self._transport, self._fallback, self._max_bytes = transport, fallback, max_bytes
        self.registry = GraphBufferRegistry(ranks, transport, backend.device, table_rows)
        self._own = transport.empty(signal_bytes)
        self._addresses = self.registry.open_block("signals", self._own)  # of all ranks' signals
        self._staging = transport.empty(max_bytes)
        row = self.registry.open_block("staging buffers", self._staging)
        self._staging_row = torch.tensor(row, dtype=torch.int64, device=backend.device)
        self._logged: set[str] = set()

    @abstractmethod
    def reset(self) -> None:
        """Make this rank's signals new, and forget table rows; no rank is in a sum."""

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Over the registered buffer in a FULL graph, else over the staging buffer."""
        if not self._takes(x):
            return self._fallback.reduce(x)
        if not x.numel():
            return x.clone()
        x = x.contiguous()
        if x.data_ptr() % PACK_BYTES:  # a slice
            x = x.clone()
        context, is_capturing = current_forward_context(), self.backend.is_capturing()
        is_segment = context is not None and context.runtime_mode is CUDAGraphMode.PIECEWISE
        if is_capturing and not is_segment:
            source = self._transport.place(x)
            row = self.registry.take_row(source)
        else:
            if is_capturing:
                self.registry.note(x)
            source, row = self._staging[: x.nbytes].view(x.dtype).view(x.shape), self._staging_row
        if source is not x:
            source.copy_(x)
        out = torch.empty_like(x)
        torch.ops.cgplan.all_reduce_row(source, out, row, self.number)
        return out

    def begin_pass(self) -> None:
        """Unregister, and make the signals new: a rank that failed may have left a barrier early."""
        self.registry.unregister()
        with self.ranks.step("the end of all sums"):  # one that was aborted may still write a signal to a peer
            self.reset()
        with self.ranks.step("new signals"):
            self.reset()
        self._fallback.begin_pass()

    def end_pass(self) -> Registration:
        return self.registry.register()

    @property
    def is_read(self) -> bool:
        return self.registry.is_sealed and self.registry.rows > 0

    def release(self) -> None:
        self.registry.unregister()

    def close(self) -> None:
        if self.is_closed:
            return
        super().close()
        try:
            self.registry.close()
        finally:
            self._transport.free()
            self._fallback.close()

    def _takes(self, x: torch.Tensor) -> bool:
        """Whether the kernels take a tensor. The same on all ranks: shape and dtype decide."""
        if x.dtype not in DTYPES:
            reason, kind = f"{x.dtype} is none of float32, float16, bfloat16", "dtype"
        elif x.nbytes > self._max_bytes:
            reason, kind = f"{format_bytes(x.nbytes)} are more than distributed.all_reduce_max_size", "size"
        elif x.nbytes % PACK_BYTES:
            reason, kind = f"{x.nbytes} bytes are not a multiple of {PACK_BYTES}", "alignment"
        else:
            return True
        if self.rank == 0 and kind not in self._logged:
            logger.warning("custom all-reduce: %s; %s does it", reason, self._fallback.name)
        self._logged.add(kind)
        return False


__all__ = ["CustomAllReduce"]
