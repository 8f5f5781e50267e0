"""Memory of one process that others on the same machine can read: CUDA IPC, and shared memory on
the CPU.

A transport hands out memory that can be exported (``empty``, [nbytes] uint8, zero, until ``free``),
and places tensors there (``place``, until ``forget``). ``export`` names the allocation that holds
an address; ``open`` maps another process's allocation and returns where its base lies here;
``close`` unmaps it, before its owner frees it. No peer may have memory open at ``forget`` and
``free``. Calls that fail raise RegistrationError.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cgplan.errors import RegistrationError


@dataclass(frozen=True)
class ExportedMemory:
    """An address as another process can reach it."""

    # of the allocation that holds it: plain values, equal for all addresses of one allocation
    handle: Any
    offset: int  # bytes from the allocation's base to the address
    nbytes: int  # of the whole allocation, which a peer maps


_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class CudaIpcTransport:
    """Memory of one GPU."""

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver, runtime

        self._driver, self._runtime, self._device = driver, runtime, device
        self._own: list[Tensor] = []
        self._handles: dict[int, tuple[bytes, int]] = {}  # base -> handle, bytes

    def empty(self, nbytes: int) -> Tensor:
        self._own.append(torch.zeros(nbytes, dtype=torch.uint8, device=self._device))
        return self._own[-1]

    def place(self, tensor: Tensor) -> Tensor:
        return tensor

    def export(self, address: int) -> ExportedMemory:
        with torch.cuda.device(self._device):
            base, nbytes = self._checked(
                self._driver.cuMemGetAddressRange(address), "cuMemGetAddressRange"
            )
            if int(base) not in self._handles:
                handle = self._checked(
                    self._runtime.cudaIpcGetMemHandle(int(base)), "cudaIpcGetMemHandle"
                )[0]
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
            expandable = (
                " (torch's expandable segments are on)" if uses_expandable_segments() else ""
            )
            self._runtime.cudaGetLastError()  # else the next CUDA call of torch would raise it
            raise RegistrationError(
                f"{call} answered {result[0].name}{expandable}",
                remedy="Leave expandable_segments out of PYTORCH_ALLOC_CONF, and let the "
                "containers of all ranks see "
                "one another's GPUs; or set compilation.all_reduce: nccl.",
            )
        return result[1:]


def uses_expandable_segments() -> bool:
    """Whether torch's allocator maps memory piece by piece; such memory has no IPC handle."""
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    return bool(settings.get("expandable_segments", False))


_BLOCK_BYTES = 1 << 20
_ALIGNMENT = 64


class _Block:
    """A file of this process without a name, mapped. Tensors on it keep the mapping. ``used``:
    bytes handed out.
    """

    def __init__(self, nbytes: int) -> None:
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.file, self.used = os.memfd_create("cgplan", os.MFD_CLOEXEC), 0
        os.ftruncate(self.file, nbytes)
        self.memory = mmap.mmap(self.file, nbytes)
        self.whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.base = self.whole.data_ptr()


class SharedMemoryTransport:
    """Blocks that other processes of this machine can map."""

    def __init__(self) -> None:
        self._own: list[_Block] = []
        self._placed: list[_Block] = []
        self._opened: dict[int, mmap.mmap] = {}

    def empty(self, nbytes: int) -> Tensor:
        self._own.append(_Block(nbytes))
        return torch.frombuffer(self._own[-1].memory, dtype=torch.uint8, count=nbytes)

    def place(self, tensor: Tensor) -> Tensor:
        """Memory in a block, contiguous: an operator's result lies in private memory."""
        size = -(-max(tensor.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        if not self._placed or self._placed[-1].used + size > len(self._placed[-1].memory):
            self._placed.append(_Block(max(size, _BLOCK_BYTES)))
        block = self._placed[-1]
        with torch.inference_mode(False):
            raw = torch.frombuffer(
                block.memory, dtype=torch.uint8, count=tensor.nbytes, offset=block.used
            )
            block.used += size
            return raw.view(tensor.dtype).view(tensor.shape)

    def export(self, address: int) -> ExportedMemory:
        blocks = (*self._own, *self._placed)
        block = next(block for block in blocks if 0 <= address - block.base < len(block.memory))
        nbytes = len(block.memory)
        return ExportedMemory((os.getpid(), block.file, nbytes), address - block.base, nbytes)

    def open(self, memory: ExportedMemory) -> int:
        pid, file, nbytes = memory.handle
        try:
            descriptor = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
        except OSError as error:
            raise RegistrationError(
                f"shared memory of process {pid} cannot be opened: {error.strerror}",
                remedy="All ranks have to run on one machine, as the same user, in one namespace "
                "of processes.",
            ) from error
        try:
            mapped = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        base = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        self._opened[base] = mapped
        return base

    def close(self, base: int) -> None:
        del self._opened[base]  # the mapping goes with the last tensor on it

    def forget(self) -> None:
        _drop(self._placed)

    def free(self) -> None:
        _drop(self._placed)
        _drop(self._own)


def _drop(blocks: list[_Block]) -> None:
    while blocks:
        os.close(blocks.pop().file)


MemoryTransport = CudaIpcTransport | SharedMemoryTransport
