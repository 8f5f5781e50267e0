"""Where the inputs of captured all-reduces lie for every rank: docs/architecture.md, Buffers that
graphs read.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cgplan.captures.model_graphs import PeerMemory
from cgplan.distributed.ranks import Ranks, refuse_unlike
from cgplan.distributed.transports import MemoryTransport
from cgplan.errors import RegistrationError

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
        memories = []
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
        error = None
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
