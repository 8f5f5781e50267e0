"""Memory of one process that others can read: CUDA IPC, and shared memory on the CPU."""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from cgplan.errors import RegistrationError


@dataclass(frozen=True, slots=True)
class ExportedMemory:
    """An address as another process can reach it."""

    handle: Any  # of the allocation that holds it: plain values, equal for all addresses of one allocation
    offset: int  # bytes from the allocation's base to the address
    nbytes: int  # of the whole allocation, which a peer maps


class MemoryTransport(ABC):
    """Hands memory of this process to others on the same machine, and opens theirs."""

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory that can be exported, [nbytes] uint8, zero. The transport owns it until ``free``."""

    @abstractmethod
    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself where any memory can be exported; else memory of the transport with its layout, to which
        the caller copies the data.
        """

    @abstractmethod
    def export(self, address: int) -> ExportedMemory:
        """The allocation that holds an address. Raises RegistrationError if it cannot be handed to others."""

    @abstractmethod
    def open(self, memory: ExportedMemory) -> int:
        """Map another process's allocation; returns where its base lies here. Raises RegistrationError."""

    @abstractmethod
    def close(self, base: int) -> None:
        """Unmap an allocation that ``open`` mapped. Its owner must not have freed it yet."""

    @abstractmethod
    def forget(self) -> None:
        """Free the memory of ``place``; no peer may have it open."""

    @abstractmethod
    def free(self) -> None:
        """Free all memory of the transport; no peer may have it open."""


_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class CudaIpcTransport(MemoryTransport):
    """Memory of one GPU."""

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver, runtime

        self._driver, self._runtime, self._device = driver, runtime, device
        self._own: list[torch.Tensor] = []
        self._handles: dict[int, tuple[bytes, int]] = {}  # base -> handle, bytes

    def empty(self, nbytes: int) -> torch.Tensor:
        self._own.append(torch.zeros(nbytes, dtype=torch.uint8, device=self._device))
        return self._own[-1]

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def export(self, address: int) -> ExportedMemory:
        with torch.cuda.device(self._device):
            base, nbytes = self._checked(self._driver.cuMemGetAddressRange(address), "cuMemGetAddressRange")
            if int(base) not in self._handles:
                handle = self._checked(self._runtime.cudaIpcGetMemHandle(int(base)), "cudaIpcGetMemHandle")[0]
                self._handles[int(base)] = (bytes(handle.reserved), int(nbytes))
        found, size = self._handles[int(base)]
        return ExportedMemory(found, address - int(base), size)

    def open(self, memory: ExportedMemory) -> int:
        handle = self._runtime.cudaIpcMemHandle_t()
        handle.reserved = memory.handle
        with torch.cuda.device(self._device):
            result = self._runtime.cudaIpcOpenMemHandle(handle, _LAZY_PEER_ACCESS)
            return int(self._checked(result, "cudaIpcOpenMemHandle")[0])

    def close(self, base: int) -> None:
        with torch.cuda.device(self._device):
            self._checked(self._runtime.cudaIpcCloseMemHandle(base), "cudaIpcCloseMemHandle")

    def forget(self) -> None:
        """The pool may free these allocations now; the next export asks for new handles."""
        self._handles.clear()

    def free(self) -> None:
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
    """A file of this process without a name, mapped. Tensors on it keep the mapping. ``used``: bytes handed out."""

    memory: mmap.mmap
    file: int
    used: int = 0

    @property
    def base(self) -> int:
        return torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()

    @classmethod
    def of(cls, nbytes: int) -> _Block:
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        file = os.memfd_create("cgplan", os.MFD_CLOEXEC)
        os.ftruncate(file, nbytes)
        return cls(mmap.mmap(file, nbytes), file)


class SharedMemoryTransport(MemoryTransport):
    """Blocks that other processes of this machine can map."""

    def __init__(self) -> None:
        self._own: list[_Block] = []
        self._placed: list[_Block] = []
        self._opened: dict[int, mmap.mmap] = {}

    def empty(self, nbytes: int) -> torch.Tensor:
        self._own.append(_Block.of(nbytes))
        return torch.frombuffer(self._own[-1].memory, dtype=torch.uint8, count=nbytes)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory in a block, contiguous: an operator's result lies in private memory."""
        size = -(-max(tensor.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        if not self._placed or self._placed[-1].used + size > len(self._placed[-1].memory):
            self._placed.append(_Block.of(max(size, _BLOCK_BYTES)))
        block = self._placed[-1]
        with torch.inference_mode(False):
            raw = torch.frombuffer(block.memory, dtype=torch.uint8, count=tensor.nbytes, offset=block.used)
            block.used += size
            return raw.view(tensor.dtype).view(tensor.shape)

    def export(self, address: int) -> ExportedMemory:
        """The block that holds an address, by its owner's descriptor."""
        for block in (*self._own, *self._placed):
            offset, nbytes = address - block.base, len(block.memory)
            if 0 <= offset < nbytes:
                return ExportedMemory((os.getpid(), block.file, nbytes), offset, nbytes)
        raise RegistrationError(
            f"address {address:#x} does not lie in shared memory", remedy="Copy the tensor to where `place` says."
        )

    def open(self, memory: ExportedMemory) -> int:
        pid, file, nbytes = memory.handle
        try:
            descriptor = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
        except OSError as error:
            raise RegistrationError(
                f"shared memory of process {pid} cannot be opened: {error.strerror}",
                remedy="All ranks have to run on one machine, as the same user, in one namespace of processes.",
            ) from error
        try:
            mapped = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        base = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        self._opened[base] = mapped
        return base

    def close(self, base: int) -> None:
        """Drop the mapping; it goes with the last tensor on it."""
        del self._opened[base]

    def forget(self) -> None:
        _drop(self._placed)

    def free(self) -> None:
        _drop(self._placed)
        _drop(self._own)


def _drop(blocks: list[_Block]) -> None:
    while blocks:
        os.close(blocks.pop().file)
