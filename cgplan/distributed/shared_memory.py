"""Shared memory of the host as a transport: what stands in for CUDA IPC where there is no GPU.

A block is a file that lives in memory alone and has no name (memfd_create); others reach it through its owner's file
descriptor under /proc. So there is nothing to unlink: a block is gone with the last process that holds it, however that
process ends.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from dataclasses import dataclass

import torch

from cgplan.distributed.transport import ExportedMemory, MemoryTransport
from cgplan.errors import BackendError, RegistrationError

_BLOCK_BYTES = 1 << 20
_ALIGNMENT = 64


@dataclass(slots=True, eq=False)
class _Block:
    """One mapped file. ``file``: its descriptor, in the process that owns it; ``used``: bytes handed out."""

    memory: mmap.mmap
    base: int
    file: int = -1
    used: int = 0

    @property
    def nbytes(self) -> int:
        return len(self.memory)

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
        # Tensors may still lie on the mapping; it goes with the last of them.
        del self.memory


def _map(file: int, nbytes: int) -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(file, nbytes)
    return memory, torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


class SharedMemoryTransport(MemoryTransport):
    """Blocks that other processes of this machine can map. Raises BackendError where the system has no memfd."""

    name = "shared memory"

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise BackendError("shared memory between ranks needs Linux", remedy="Set compilation.all_reduce: nccl.")
        self._own: list[_Block] = []
        self._placed: list[_Block] = []
        self._opened: dict[int, _Block] = {}

    def empty(self, nbytes: int) -> torch.Tensor:
        """A block of its own."""
        block = self._new_block(nbytes)
        self._own.append(block)
        return torch.frombuffer(block.memory, dtype=torch.uint8, count=nbytes)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory in a block, contiguous: what an operator made lies in private memory."""
        size = -(-max(tensor.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        if not self._placed or self._placed[-1].used + size > self._placed[-1].nbytes:
            self._placed.append(self._new_block(max(size, _BLOCK_BYTES)))
        block = self._placed[-1]
        with torch.inference_mode(False):
            raw = torch.frombuffer(block.memory, dtype=torch.uint8, count=tensor.nbytes, offset=block.used)
            block.used += size
            return raw.view(tensor.dtype).view(tensor.shape)

    def export(self, address: int) -> ExportedMemory:
        """The block that holds an address, by its owner's descriptor."""
        blocks = sorted((*self._own, *self._placed), key=lambda block: block.base)
        index = bisect_right([block.base for block in blocks], address) - 1
        if index < 0 or address >= blocks[index].base + blocks[index].nbytes:
            raise RegistrationError(
                f"address {address:#x} does not lie in shared memory", remedy="Copy the tensor to where `place` says."
            )
        block = blocks[index]
        return ExportedMemory((os.getpid(), block.file, block.nbytes), address - block.base, block.nbytes)

    def open(self, memory: ExportedMemory) -> int:
        """Map a peer's block."""
        pid, file, nbytes = memory.handle
        try:
            descriptor = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
        except OSError as error:
            raise RegistrationError(
                f"shared memory of process {pid} cannot be opened: {error.strerror}",
                remedy="All ranks have to run on one machine, as the same user, in one namespace of processes.",
            ) from error
        try:
            mapped, base = _map(descriptor, nbytes)
        finally:
            os.close(descriptor)
        self._opened[base] = _Block(mapped, base)
        return base

    def close(self, base: int) -> None:
        """Drop the mapping."""
        self._opened.pop(base).close()

    def forget(self) -> None:
        """Drop the blocks of placed tensors."""
        while self._placed:
            self._placed.pop().close()

    def free(self) -> None:
        """Drop every block."""
        self.forget()
        while self._own:
            self._own.pop().close()

    def _new_block(self, nbytes: int) -> _Block:
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        file = os.memfd_create("cgplan", os.MFD_CLOEXEC)
        os.ftruncate(file, nbytes)
        memory, base = _map(file, nbytes)
        return _Block(memory, base, file)


__all__ = ["SharedMemoryTransport"]
