"""Pinned memory that host tensors pass through on their way to the device."""

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
    """A point in the device's work, as torch.cuda.Event."""

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
    """Host memory that copies need not wait for. Raises CgplanError if there is no more."""
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
            remedy="Free memory of the host; or pass tensors on the device, or write them in "
            "place (runner.stage).",
        ) from error


def _release(wait: Callable[[], None], blocks: list[Tensor]) -> None:
    if blocks:
        wait()
    blocks.clear()


class StagingBlocks:
    """Two blocks of pinned memory, written in turns. A block takes as many batches as fit. When it
    is full, or the stream changes, a fence is put behind the work that reads it, and waited for
    before the block is written again.

    Args:
        new_fence: Makes a fence behind the work that is queued on a stream, by handle.
        wait: Waits for the device.
        allocate: Makes a block that the device reads under the host's address.
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
        # torch hands freed blocks out at once, but the device may still read them
        weakref.finalize(self, _release, wait, self._blocks).atexit = False

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def take(
        self,
        nbytes: int,
        stream: int,
    ) -> int:
        """The address of ``nbytes`` bytes to write now and to read on ``stream`` before the next
        ``take``.
        """
        at = self._at
        if at + nbytes > self._end or stream != self._stream:
            at = self._next_block(nbytes, stream)
        self._at = at + nbytes
        return at

    def close(self) -> None:
        """Give the blocks back, once the device has read them."""
        _release(self._wait, self._blocks)
        self._fences = [None, None]
        self._at = 0
        self._end = 0

    def _next_block(
        self,
        nbytes: int,
        stream: int,
    ) -> int:
        if self._end and self._stream is not None:
            self._fences[self._turn] = self._new_fence(self._stream)
        self._turn = 1 - self._turn
        fence = self._fences[self._turn]
        if not self._blocks or self._blocks[0].nbytes < nbytes:
            self.close()
            size = max(LEAST_BYTES, 1 << (nbytes - 1).bit_length())
            self._blocks += [self._allocate(size), self._allocate(size)]  # both or none
        elif fence is not None:
            fence.synchronize()
            self._fences[self._turn] = None
        block = self._blocks[self._turn]
        start = block.data_ptr()
        self._end = start + block.nbytes
        self._stream = stream
        return start
