"""Where the inputs of captured all-reduces lie for every rank (docs/distributed.md, Buffers that
graphs read), and memory of one process that others on the same machine can read.

``empty`` allocates, until ``free``; ``place`` copies tensors, until ``forget``; no peer may have
these open then. ``export`` names an allocation; ``open`` maps another process's, and returns its
base here. Failures are RegistrationErrors.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cgplan.captures.model_graphs import PeerMemory
from cgplan.distributed.ranks import Ranks, refuse_unlike
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


logger = logging.getLogger(__name__)

SUM_ALIKE = (
    "Every rank has to sum as many tensors, of the same shapes and dtypes, in the same order."
)


@dataclass(frozen=True)
class Registration:
    """What one rank has registered, and maps of its peers."""

    rows: int = 0  # captured all-reduces
    mapped_bytes: int = 0  # of peers' allocations
    registration_seconds: float = 0.0


class _Mapped(NamedTuple):
    base: int
    end: int
    name: str


class GraphBufferRegistry:
    """Owns the table, and mappings of peers' memory, not the transport.

    Attributes:
        table: [capacity, world_size] int64 on the device: address of each rank's input, as this
            rank sees it; 0 if not registered.
    """

    def __init__(
        self,
        ranks: Ranks,
        transport: MemoryTransport,
        device: torch.device,
        capacity: int,
    ) -> None:
        self._ranks = ranks
        self._transport = transport
        self.table = torch.zeros(
            capacity,
            ranks.world_size,
            dtype=torch.int64,
            device=device,
        )
        self.is_sealed = False
        self._addresses: list[int] = []
        self._inputs: dict[str, str] = {}
        # by (rank, handle)
        self._opened: dict[tuple[int, object], _Mapped] = {}
        self._blocks: dict[tuple[int, object], _Mapped] = {}
        self._has_begun = False

    @property
    def rows(self) -> int:
        return len(self._addresses)

    def take_row(self, tensor: Tensor) -> Tensor:
        """[world_size] int64. Raises RegistrationError if the table is full, or sealed."""
        if self.is_sealed:
            raise RegistrationError(
                "an all-reduce was captured after the graph buffers had been registered",
                remedy="Capture all graphs in one session; recapture() begins a new one.",
            )
        if self.rows == len(self.table):
            raise RegistrationError(
                f"the pointer table's {len(self.table)} rows are taken",
                remedy="Raise distributed.table_rows: a row for each all-reduce in each graph.",
            )
        self._addresses.append(tensor.data_ptr())
        self.note(tensor)
        return self.table[self.rows - 1]

    def note(self, tensor: Tensor) -> None:
        """For the comparison, without a row."""
        name = f"all-reduce {len(self._inputs) + 1}"
        self._inputs[name] = f"{list(tensor.shape)} {tensor.dtype}"

    def register(self) -> Registration:
        """A step of all ranks. Raises RankFailedError, RankMismatchError for other all-reduces."""
        start = time.perf_counter()
        own = {"captured all-reduces": f"{len(self._inputs)}", **self._inputs}
        refuse_unlike(
            self._ranks.agree("the capture pass", value=own),
            f"{SUM_ALIKE} Does the model branch on its rank?",
        )
        self._has_begun = True
        columns = self._columns("graph pool", self._addresses, self._opened)
        with self._ranks.step("writing the table"):
            if self.rows:
                written = torch.tensor(columns, dtype=torch.int64).T
                self.table[: self.rows].copy_(written)
            if self.table.device.type == "cuda":
                torch.cuda.synchronize(self.table.device)
        self.is_sealed = True
        found = Registration(
            rows=self.rows,
            mapped_bytes=sum(mapped.end - mapped.base for mapped in self._opened.values()),
            registration_seconds=time.perf_counter() - start,
        )
        logger.info("rank %d: %s", self._ranks.rank, found)
        return found

    def unregister(self) -> None:
        """Steps (1) to (3) of Note [Teardown] in ranks.py."""
        opened = list(self._opened.values())
        self._opened.clear()
        try:
            if self._has_begun:
                self._close_peers(opened, "the end of all replays", "closing the peers' handles")
        finally:
            self._has_begun = False
            self.is_sealed = False
            self._addresses.clear()
            self._inputs.clear()
            self.table.zero_()
            self._transport.forget()

    def open_block(self, name: str, block: Tensor) -> list[int]:
        """A step of all ranks; each rank's address, as this rank sees it."""
        columns = self._columns(name, [block.data_ptr()], self._blocks)
        return [address for (address,) in columns]

    def close(self) -> None:
        """The blocks of ``open_block`` may then be freed."""
        self.unregister()
        blocks = list(self._blocks.values())
        self._blocks.clear()
        self._close_peers(blocks, "the end of all reductions", "closing the peers' blocks")

    def peer_memory(self) -> PeerMemory:
        addresses = []
        if self.is_sealed:
            addresses = self.table[: self.rows].flatten().tolist()
        return PeerMemory([*self._opened.values(), *self._blocks.values()], addresses)

    def _columns(
        self,
        name: str,
        addresses: list[int],
        opened: dict[tuple[int, object], _Mapped],
    ) -> list[list[int]]:
        memories = list[ExportedMemory]()
        with self._ranks.step(f"exporting the {name}"):
            memories += [self._transport.export(address) for address in addresses]
        shared = self._ranks.agree(f"exchanging the {name}", value=memories)
        columns = []
        with self._ranks.step(f"opening the {name}"):
            for rank, theirs in enumerate(shared):
                if rank == self._ranks.rank:
                    columns.append(addresses)
                    continue
                column = list[int]()
                columns.append(column)
                for memory in theirs:
                    key = (rank, memory.handle)
                    if key not in opened:
                        base = self._transport.open(memory)
                        end = base + memory.nbytes
                        opened[key] = _Mapped(base, end, f"rank {rank}'s {name}")
                    column.append(opened[key].base + memory.offset)
        return columns

    def _close_peers(self, memory: Sequence[_Mapped], before: str, after: str) -> None:
        """Between two steps, unless a rank is lost."""
        error: Exception | None = None
        try:
            if self._ranks.lost is None:
                self._ranks.agree(before)
        finally:
            for mapped in reversed(memory):
                try:
                    self._transport.close(mapped.base)
                except Exception as raised:
                    error = error or raised
        if self._ranks.lost is None:
            self._ranks.agree(after, error=error)
        elif error is not None:
            raise error
