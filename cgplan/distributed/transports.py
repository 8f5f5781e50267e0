"""Memory of one process that others on the same machine can read.

``empty`` allocates, until ``free``; ``place`` copies tensors, until ``forget``; no peer may have
these open then. ``export`` names an allocation; ``open`` maps another process's, and returns its
base here. Failures are RegistrationErrors.
"""

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


_ARENA_BYTES = 1 << 40  # of addresses; memory is taken as it is written
_ALIGNMENT = 64


class SharedMemoryTransport:
    """A sparse file without a name, which other processes can map."""

    def __init__(self) -> None:
        self._file = os.memfd_create("cgplan", os.MFD_CLOEXEC)
        os.ftruncate(self._file, _ARENA_BYTES)
        self._memory = mmap.mmap(self._file, _ARENA_BYTES)
        self._whole = torch.frombuffer(self._memory, dtype=torch.uint8)  # an audit finds it
        self._kept = 0  # bytes
        self._used = 0
        self._opened: dict[int, Tensor] = {}

    def empty(self, nbytes: int) -> Tensor:
        taken = self._take(nbytes)
        self._kept = self._used
        return taken

    def place(self, tensor: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return self._take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)

    def export(self, address: int) -> ExportedMemory:
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        return ExportedMemory(path, address - self._whole.data_ptr(), self._used)

    def open(self, memory: ExportedMemory) -> int:
        try:
            with open(memory.handle, "r+b") as file:
                mapped = mmap.mmap(file.fileno(), memory.nbytes)
        except OSError as error:
            raise RegistrationError(
                f"shared memory of another rank cannot be opened: {error.strerror}",
                remedy="All ranks have to run on one machine, as the same user, in one namespace "
                "of processes.",
            ) from error
        tensor = torch.frombuffer(mapped, dtype=torch.uint8)
        self._opened[tensor.data_ptr()] = tensor
        return tensor.data_ptr()

    def close(self, base: int) -> None:
        del self._opened[base]

    def forget(self) -> None:
        self._used = self._kept

    def free(self) -> None:
        os.close(self._file)

    def _take(self, nbytes: int) -> Tensor:
        start = self._used
        self._used += math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
        # it owns its storage
        return torch.frombuffer(
            self._memory,
            dtype=torch.uint8,
            count=nbytes,
            offset=start,
        )


MemoryTransport = CudaIpcTransport | SharedMemoryTransport
