"""Pinned memory between host tensors and the device."""

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from cgplan.errors import CgplanError, first_line

ALIGNMENT = 16
LEAST_BYTES = 1 << 16


class Fence(Protocol):
    """As torch.cuda.Event."""

    def synchronize(self) -> None: ...


def stream_at(handle: int, device: torch.device) -> torch.cuda.Stream:
    if handle:
        return torch.cuda.ExternalStream(handle, device=device)
    return torch.cuda.default_stream(device)


def fence_behind(handle: int, device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream_at(handle, device))
    return event


def _release(wait: Callable[[], None], blocks: list[Tensor]) -> None:
    if blocks:
        wait()
    blocks.clear()


class StagingBlocks:
    """Two blocks of pinned memory, in turns. A fence after the work that reads a full block is
    waited for before the block is written again; another stream begins a new block.

    Args:
        new_fence: After a stream's work, by handle.
        wait: For the device.
    """

    def __init__(
        self,
        new_fence: Callable[[int], Fence],
        wait: Callable[[], None],
    ) -> None:
        self._new_fence = new_fence
        self._wait = wait
        self._blocks: list[Tensor] = []
        self._fences: list[Fence | None] = [None, None]
        self._turn = 0
        self._at = 0
        self._end = 0
        self._stream: int | None = None
        # torch hands freed blocks out while the device reads them
        weakref.finalize(self, _release, wait, self._blocks).atexit = False

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def take(
        self,
        nbytes: int,
        stream: int,
    ) -> int:
        """The address of ``nbytes`` bytes to write, and to read on ``stream``, before the next
        ``take``.
        """
        at = self._at
        if at + nbytes > self._end or stream != self._stream:
            if self._end and self._stream is not None:
                self._fences[self._turn] = self._new_fence(self._stream)
            self._turn = 1 - self._turn
            fence = self._fences[self._turn]
            if not self._blocks or self._blocks[0].nbytes < nbytes:
                self.close()
                size = max(LEAST_BYTES, 1 << (nbytes - 1).bit_length())
                self._blocks += [self.allocate(size), self.allocate(size)]  # both or none
            elif fence is not None:
                fence.synchronize()
                self._fences[self._turn] = None
            block = self._blocks[self._turn]
            at = block.data_ptr()
            self._end = at + block.nbytes
            self._stream = stream
        self._at = at + nbytes
        return at

    def allocate(self, nbytes: int) -> Tensor:
        """The device reads it under its address. Raises CgplanError if the host has no more."""
        try:
            return torch.empty(
                nbytes,
                dtype=torch.uint8,
                device="cpu",
                pin_memory=True,
            )
        except RuntimeError as error:
            raise CgplanError(
                f"no pinned memory on the host for [{nbytes}] elements of torch.uint8: "
                f"{first_line(error)}",
                remedy="Free memory of the host, pass tensors on the device, or use runner.stage.",
            ) from error

    def close(self) -> None:
        """Waits for the device."""
        _release(self._wait, self._blocks)
        self._fences = [None, None]
        self._at = 0
        self._end = 0
