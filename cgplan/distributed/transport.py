"""How one process lets others read its memory: the protocol behind CUDA IPC and shared memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch


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


__all__ = ["ExportedMemory", "MemoryTransport"]
