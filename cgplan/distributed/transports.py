"""Memory of one process that others on the same machine can read.

``empty`` allocates, until ``free``; ``place`` copies tensors, until ``forget``; no peer may have
these open then. ``export`` names an allocation; ``open`` maps another process's, and returns its
base here. Failures are RegistrationErrors.
"""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cgplan.errors import RegistrationError


@dataclass(frozen=True)
class ExportedMemory:
    # plain values
    handle: Any
    offset: int  # from the allocation's base, in bytes
    nbytes: int  # of the allocation


_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class CudaIpcTransport:
    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver, runtime

        self._driver = driver
        self._runtime = runtime
        self._device = device
        self._handles: dict[int, bytes] = {}  # by base

    def empty(self, nbytes: int) -> Tensor:
        return torch.zeros(
            nbytes,
            dtype=torch.uint8,
            device=self._device,
        )

    def place(self, tensor: Tensor) -> Tensor:
        return tensor

    def export(self, address: int) -> ExportedMemory:
        with torch.cuda.device(self._device):
            result = self._driver.cuMemGetAddressRange(address)
            pointer, nbytes = self._checked(result, "cuMemGetAddressRange")
            base = int(pointer)
            if base not in self._handles:
                result = self._runtime.cudaIpcGetMemHandle(base)
                (handle,) = self._checked(result, "cudaIpcGetMemHandle")
                self._handles[base] = bytes(handle.reserved)
        return ExportedMemory(
            self._handles[base],
            address - base,
            int(nbytes),
        )

    def open(self, memory: ExportedMemory) -> int:
        handle = self._runtime.cudaIpcMemHandle_t()
        handle.reserved = memory.handle
        with torch.cuda.device(self._device):
            result = self._runtime.cudaIpcOpenMemHandle(handle, _LAZY_PEER_ACCESS)
            (base,) = self._checked(result, "cudaIpcOpenMemHandle")
        return int(base)

    def close(self, base: int) -> None:
        with torch.cuda.device(self._device):
            result = self._runtime.cudaIpcCloseMemHandle(base)
            self._checked(result, "cudaIpcCloseMemHandle")

    def forget(self) -> None:
        self._handles.clear()

    def free(self) -> None:
        self.forget()

    def _checked(
        self,
        result: tuple[Any, ...],
        call: str,
    ) -> list[Any]:
        status, *values = result
        if int(status) != 0:
            why = " (torch's expandable segments are on)" if uses_expandable_segments() else ""
            self._runtime.cudaGetLastError()  # else torch's next CUDA call would raise it
            raise RegistrationError(
                f"{call} answered {status.name}{why}",
                remedy="Leave expandable_segments out of PYTORCH_ALLOC_CONF, let the containers of "
                "ranks see one another's GPUs, or set compilation.all_reduce: nccl.",
            )
        return values


def uses_expandable_segments() -> bool:
    """Their memory has no IPC handle."""
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    return bool(settings.get("expandable_segments", False))


_BLOCK_BYTES = 1 << 20
_ALIGNMENT = 64


def _rounded(nbytes: int, unit: int) -> int:
    return math.ceil(nbytes / unit) * unit


class _Block:
    """A nameless file, mapped while a tensor lies on it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = _rounded(nbytes, mmap.PAGESIZE)
        self.file = os.memfd_create("cgplan", os.MFD_CLOEXEC)
        os.ftruncate(self.file, self.nbytes)
        self.used = 0
        self.memory = mmap.mmap(self.file, self.nbytes)
        self.whole = torch.frombuffer(self.memory, dtype=torch.uint8)  # an audit finds it
        self.base = self.whole.data_ptr()

    def take(self, nbytes: int) -> Tensor:
        start = self.used
        self.used += _rounded(nbytes, _ALIGNMENT)
        return torch.frombuffer(
            self.memory,
            dtype=torch.uint8,
            count=nbytes,
            offset=start,
        )


class SharedMemoryTransport:
    """Blocks that other processes can map."""

    def __init__(self) -> None:
        self._own: list[_Block] = []
        self._placed: list[_Block] = []
        self._opened: dict[int, mmap.mmap] = {}

    def empty(self, nbytes: int) -> Tensor:
        block = _Block(nbytes)
        self._own.append(block)
        return block.take(nbytes)

    def place(self, tensor: Tensor) -> Tensor:
        nbytes = tensor.nbytes
        block = self._placed[-1] if self._placed else None
        if block is None or block.used + nbytes > block.nbytes:
            block = _Block(max(nbytes, _BLOCK_BYTES))
            self._placed.append(block)
        with torch.inference_mode(False):
            taken = block.take(nbytes).view(tensor.dtype)
            return taken.view(tensor.shape)

    def export(self, address: int) -> ExportedMemory:
        for block in (*self._own, *self._placed):
            offset = address - block.base
            if 0 <= offset < block.nbytes:
                handle = (os.getpid(), block.file)
                return ExportedMemory(
                    handle,
                    offset,
                    block.nbytes,
                )
        raise AssertionError("the address lies in no block")

    def open(self, memory: ExportedMemory) -> int:
        pid, file = memory.handle
        try:
            descriptor = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
        except OSError as error:
            raise RegistrationError(
                f"shared memory of process {pid} cannot be opened: {error.strerror}",
                remedy="All ranks have to run on one machine, as the same user, in one namespace "
                "of processes.",
            ) from error
        try:
            mapped = mmap.mmap(descriptor, memory.nbytes)
        finally:
            os.close(descriptor)
        base = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        self._opened[base] = mapped
        return base

    def close(self, base: int) -> None:
        del self._opened[base]  # mapped until the last tensor goes

    def forget(self) -> None:
        _drop(self._placed)

    def free(self) -> None:
        _drop(self._placed)
        _drop(self._own)


def _drop(blocks: list[_Block]) -> None:
    while blocks:
        os.close(blocks.pop().file)


MemoryTransport = CudaIpcTransport | SharedMemoryTransport
