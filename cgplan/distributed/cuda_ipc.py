"""CUDA IPC as a transport: memory that torch's allocator got from cudaMalloc, handed to other processes.

A handle is of a whole allocation: base = cuMemGetAddressRange(address), handle = cudaIpcGetMemHandle(base). A peer
opens it with cudaIpcOpenMemHandle, once for each base, and adds the offset. Memory of a graph pool stays mapped as long
as one of its graphs lives, although torch shows its blocks as free: so handles may be taken after the captures.
"""

from __future__ import annotations

from typing import Any

import torch

from cgplan.distributed.transport import ExportedMemory, MemoryTransport
from cgplan.errors import BackendError, RegistrationError

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


__all__ = ["CudaIpcTransport", "uses_expandable_segments"]
