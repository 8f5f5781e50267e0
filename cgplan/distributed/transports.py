"""How one process lets others read its memory: the protocol behind CUDA IPC and shared memory."""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import torch

from cgplan.errors import BackendError, RegistrationError


@dataclass(frozen=True, slots=True)
class ExportedMemory:
    """An address as another process can reach it.

    Attributes:
        handle: Of the allocation that holds it: plain values, equal for all addresses of one allocation.
        offset: Bytes from the allocation's base to the address.
        nbytes: Of the whole allocation, which is what a peer maps.
    """

    handle: Any
    offset: int
    nbytes: int


class MemoryTransport(ABC):
    """Hands memory of this process to others on the same machine, and opens theirs.

    Attributes:
        name: For reports.
    """

    name: str

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory of its own that can be exported, [nbytes] uint8, zero. The transport owns it until ``close``."""

    @abstractmethod
    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where a tensor's data can be read by others: the tensor itself where any memory can be exported, else memory
        of the transport with its layout, which the caller has to copy it to.
        """

    @abstractmethod
    def export(self, address: int) -> ExportedMemory:
        """The allocation that holds an address. Raises RegistrationError if it cannot be handed to others."""

    @abstractmethod
    def open(self, memory: ExportedMemory) -> int:
        """Map another process's allocation; returns where its base lies here. Raises RegistrationError."""

    @abstractmethod
    def close(self, base: int) -> None:
        """Unmap what ``open`` gave. Its owner must not have freed it yet."""

    @abstractmethod
    def forget(self) -> None:
        """Free what ``place`` gave; no peer may have it open."""

    @abstractmethod
    def free(self) -> None:
        """Free all memory of its own; no peer may have it open."""


_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class CudaIpcTransport(MemoryTransport):
    """Memory of one GPU. Raises BackendError where cuda-bindings is not installed."""

    name = "CUDA IPC"

    def __init__(self, device: torch.device) -> None:
        try:
            from cuda.bindings import driver, runtime
        except ImportError:
            raise BackendError(
                "the custom all-reduce needs cuda-bindings, which is not installed",
                remedy="Install cuda-bindings, or set compilation.all_reduce: nccl.",
            ) from None
        self._driver, self._runtime, self._device = driver, runtime, device
        self._own: list[torch.Tensor] = []
        self._handles: dict[int, tuple[bytes, int]] = {}  # base -> handle, bytes

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory of torch's allocator."""
        tensor = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        self._own.append(tensor)
        return tensor

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def export(self, address: int) -> ExportedMemory:
        """The allocation that holds an address."""
        with torch.cuda.device(self._device):
            base, nbytes = self._checked(self._driver.cuMemGetAddressRange(address), "cuMemGetAddressRange")
            if int(base) not in self._handles:
                handle = self._checked(self._runtime.cudaIpcGetMemHandle(int(base)), "cudaIpcGetMemHandle")[0]
                self._handles[int(base)] = (bytes(handle.reserved), int(nbytes))
        found, size = self._handles[int(base)]
        return ExportedMemory(found, address - int(base), size)

    def open(self, memory: ExportedMemory) -> int:
        """Map a peer's allocation into this process."""
        handle = self._runtime.cudaIpcMemHandle_t()
        handle.reserved = memory.handle
        with torch.cuda.device(self._device):
            result = self._runtime.cudaIpcOpenMemHandle(handle, _LAZY_PEER_ACCESS)
            return int(self._checked(result, "cudaIpcOpenMemHandle")[0])

    def close(self, base: int) -> None:
        """Unmap it."""
        with torch.cuda.device(self._device):
            self._checked(self._runtime.cudaIpcCloseMemHandle(base), "cudaIpcCloseMemHandle")

    def forget(self) -> None:
        """Handles are of allocations that the pool may free now; the next export asks for them anew."""
        self._handles.clear()

    def free(self) -> None:
        """Give all memory back to torch's allocator."""
        self.forget()
        self._own.clear()

    def _checked(self, result: tuple[Any, ...], call: str) -> tuple[Any, ...]:
        if int(result[0]) != 0:
            expandable = " (torch's expandable segments are on)" if uses_expandable_segments() else ""
            self._runtime.cudaGetLastError()  # else the next CUDA call of torch would raise it
            raise RegistrationError(
                f"{call} answered {result[0].name}{expandable}",
                remedy="Leave expandable_segments out of PYTORCH_ALLOC_CONF, and let the containers of all ranks see "
                "one another's GPUs; or set compilation.all_reduce: nccl.",
            )
        return result[1:]


def uses_expandable_segments() -> bool:
    """Whether torch's allocator maps memory piece by piece; such memory has no IPC handle."""
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    return bool(settings.get("expandable_segments", False))


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


__all__ = ["CudaIpcTransport", "ExportedMemory", "MemoryTransport", "SharedMemoryTransport", "uses_expandable_segments"]
