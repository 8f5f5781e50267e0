"""The custom all-reduce on the CPU: the kernels' protocol in torch operators, with barriers over shared memory."""

from __future__ import annotations

import ctypes
import os
import time

import torch

from cgplan.distributed.custom import DTYPES
from cgplan.distributed.ranks import Ranks
from cgplan.distributed.registry import SUM_ALIKE, GraphBufferRegistry
from cgplan.distributed.transport import MemoryTransport
from cgplan.errors import AllReduceError, CgplanError, RankMismatchError, RegistrationError

_SPINS = 200  # looks at the signals before the thread yields for longer


class CpuKernels:
    """Sums over table rows on the CPU.

    A barrier: each rank adds one to its own count, writes it to its place in every rank's signals, and waits until all
    places of its own signals are as high. Counts only grow, so nothing has to be set back between replays. Each place
    is one aligned word with one writer; a yield, which passes through locks, stands before each write and after each
    wait, so that data is written before the count that tells of it, on any processor. Behind the counts are as many
    places more, for what each rank brings to the sum: bytes and dtype, written before the first barrier, compared
    before the second.

    Args:
        ranks: All ranks.
        registry: Opens the signals.
        transport: Holds them.
    """

    def __init__(self, ranks: Ranks, registry: GraphBufferRegistry, transport: MemoryTransport) -> None:
        self._ranks = ranks
        self._own = transport.empty(2 * 8 * ranks.world_size)
        addresses = registry.open_block("signals", self._own)
        self._signals = [(ctypes.c_uint64 * (2 * ranks.world_size)).from_address(address) for address in addresses]
        self._count = 0
        self._left: CgplanError | None = None  # why a barrier was left without the others
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def run(self, x: torch.Tensor, out: torch.Tensor, row: torch.Tensor) -> None:
        """Barrier, sum in float32 in the order of the ranks, barrier.

        Raises:
            RankMismatchError: ranks bring tensors of different sizes or dtypes; on all ranks, and sums may go on.
            RegistrationError: the row is not written: the graph was replayed before registration.
            RankFailedError: a rank is lost, or has failed.
            AllReduceError: a rank did not come within the timeout, now or earlier: counts that are out of step would
                let a rank read what another one has not written yet.
        """
        if self._left is not None:
            self._ranks.watch.check()
            raise AllReduceError(
                f"rank {self._ranks.rank} has left an earlier all-reduce: {self._left.message}",
                remedy="Capture again on all ranks, or start them again.",
            )
        addresses = row.tolist()
        if not all(addresses):
            raise RegistrationError(
                "a graph was replayed before its buffers were registered",
                remedy="End the capture pass on all ranks first: CaptureSession does, or AllReduce.end_pass().",
            )
        self._bring(x)
        self._meet()
        unlike = self._unlike()
        if unlike is not None:
            self._meet()  # nobody writes what it brings to the next sum before all have read this
            raise unlike
        total = self._view(addresses[0], x).to(torch.float32, copy=True)
        for address in addresses[1:]:
            total += self._view(address, x)
        out.view(-1).copy_(total)
        self._meet()

    def reset(self) -> None:
        """All counts from 0."""
        self._count, self._left = 0, None
        self._own.zero_()

    def abort(self) -> None:
        """Barriers look for failures themselves."""

    def check(self) -> None:
        """Barriers raise themselves."""

    def forget(self) -> None:
        """Drop the views of peers' memory."""
        self._views.clear()

    def _view(self, address: int, like: torch.Tensor) -> torch.Tensor:
        """A rank's input, [numel], on the memory at an address."""
        key = (address, like.nbytes, like.dtype)
        if key not in self._views:
            memory = (ctypes.c_char * like.nbytes).from_address(address)
            self._views[key] = torch.frombuffer(memory, dtype=like.dtype)
        return self._views[key]

    def _bring(self, x: torch.Tensor) -> None:
        """Tell all ranks what this one brings to the sum."""
        world, said = self._ranks.world_size, x.nbytes * len(DTYPES) + DTYPES.index(x.dtype)
        for signals in self._signals:
            signals[world + self._ranks.rank] = said

    def _unlike(self) -> RankMismatchError | None:
        """What the first rank brings that differs from rank 0's; the same on all ranks."""
        world = self._ranks.world_size
        first, *others = self._signals[self._ranks.rank][world:]
        for rank, said in enumerate(others, 1):
            if said != first:
                return RankMismatchError(
                    f"rank {rank} came to all-reduce {(self._count + 1) // 2} with {_brought(said)}, rank 0 with "
                    f"{_brought(first)}",
                    remedy=SUM_ALIKE,
                )
        return None

    def _meet(self) -> None:
        try:
            self._barrier()
        except CgplanError as error:
            self._left = error
            raise

    def _barrier(self) -> None:
        rank, own = self._ranks.rank, self._signals[self._ranks.rank]
        self._count += 1
        time.sleep(0)
        for signals in self._signals:
            signals[rank] = self._count
        spins, deadline = 0, time.monotonic() + self._ranks.timeout
        world = self._ranks.world_size
        while min(own[:world]) < self._count:
            spins += 1
            if spins < _SPINS:
                os.sched_yield()
                continue
            time.sleep(2e-5 if spins < 50 * _SPINS else 1e-3)
            if spins % 16 == 0:
                self._ranks.watch.check()
                if time.monotonic() > deadline:
                    late = ", ".join(str(peer) for peer, count in enumerate(own[:world]) if count < self._count)
                    raise AllReduceError(
                        f"rank {late} did not come to an all-reduce within {self._ranks.timeout:g} s",
                        remedy="Every rank has to make the same calls in the same order.",
                    )
        time.sleep(0)


def _brought(said: int) -> str:
    nbytes, dtype = divmod(said, len(DTYPES))
    return f"{nbytes} bytes of {DTYPES[dtype]}"


__all__ = ["CpuKernels"]
