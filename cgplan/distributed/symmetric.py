"""PyTorch's symmetric memory behind the same interface: its one-shot and two-shot all-reduce over a staging buffer."""

from __future__ import annotations

import logging

import torch

from cgplan.distributed.all_reduce import AllReduce
from cgplan.distributed.ranks import Ranks
from cgplan.errors import AllReduceError
from cgplan.graphs import GraphBackend

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16)  # what torch's kernels take
_ONE_SHOT_BYTES = 512 << 10  # up to here each rank reads all inputs; beyond it, a part of each
_ALIGNMENT = 16


class SymmetricAllReduce(AllReduce):
    """Copies each input to one buffer in symmetric memory, and reduces there. NVLink multicast is not used.

    Args:
        ranks, backend: As for AllReduce.
        fallback: For tensors that torch's kernels do not take.
        max_bytes: Of the buffer.
    """

    name = "symm_mem"

    def __init__(self, ranks: Ranks, backend: GraphBackend, fallback: AllReduce, max_bytes: int) -> None:
        super().__init__(ranks, backend)
        from torch.distributed import _symmetric_memory as symmetric

        self._fallback, self._max_bytes, self._said = fallback, max_bytes, False
        self._group_name: str = ranks.group_name
        with ranks.step("opening symmetric memory"):
            try:
                self._buffer = symmetric.empty(max_bytes, dtype=torch.uint8, device=ranks.device)
                symmetric.rendezvous(self._buffer, self._group_name)  # type: ignore[arg-type]
            except RuntimeError as error:
                raise AllReduceError(
                    f"torch's symmetric memory cannot be opened: {str(error).splitlines()[0]}",
                    remedy="Set compilation.all_reduce: custom or nccl.",
                ) from error

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """By torch's kernels, or by the fallback."""
        parts = self.ranks.world_size * _ALIGNMENT if x.nbytes > _ONE_SHOT_BYTES else _ALIGNMENT
        if x.dtype not in _DTYPES or x.nbytes > self._max_bytes or x.nbytes % parts:
            if not self._said and self.ranks.rank == 0:
                self._said = True
                logger.warning("symm_mem does not take %d bytes of %s; nccl does it", x.nbytes, x.dtype)
            return self._fallback.reduce(x)
        return super().reduce(x)

    def run(self, x: torch.Tensor, out: torch.Tensor, row: torch.Tensor) -> None:  # noqa: ARG002
        """Copy in, reduce, copy out."""
        buffer = self._buffer[: x.nbytes].view(x.dtype)
        buffer.copy_(x.view(-1))
        if x.nbytes <= _ONE_SHOT_BYTES:
            out.view(-1).copy_(torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", self._group_name))
        else:
            torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", self._group_name)
            out.view(-1).copy_(buffer)


__all__ = ["SymmetricAllReduce"]
