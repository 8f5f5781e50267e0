"""Pinned memory between host tensors and the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
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


def empty_pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Raises CgplanError if the host has no more."""
    try:
        return torch.empty(
            tuple(shape),
            dtype=dtype,
            device="cpu",
            pin_memory=True,
        )
    except RuntimeError as error:
        raise CgplanError(
            f"no pinned memory on the host for {list(shape)} elements of {dtype}: "
            f"{first_line(error)}",
            remedy="Free memory of the host, pass tensors on the device, or use runner.stage.",
        ) from error


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
        allocate: The device reads it under the host's address.
    """

    def __init__(
        self,
        new_fence: Callable[[int], Fence],
        wait: Callable[[], None],
        allocate: Callable[[int], Tensor] = lambda nbytes: empty_pinned([nbytes], torch.uint8),
    ) -> None:
        self._new_fence = new_fence
        self._wait = wait
        self._allocate = allocate
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
                both = (
                    self._allocate(size),
                    self._allocate(size),
                )
                self._blocks += both  # or none
            elif fence is not None:
                fence.synchronize()
                self._fences[self._turn] = None
            block = self._blocks[self._turn]
            at = block.data_ptr()
            self._end = at + block.nbytes
            self._stream = stream
        self._at = at + nbytes
        return at

    def close(self) -> None:
        """Waits for the device."""
        _release(self._wait, self._blocks)
        self._fences = [None, None]
        self._at = 0
        self._end = 0
