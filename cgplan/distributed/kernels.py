"""Sums over a row of the registry's table: Triton kernels on GPUs, the same protocol in torch operators on the CPU."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import torch

from cgplan.backends import GraphBackend
from cgplan.distributed.all_reduce import AllReduce
from cgplan.distributed.custom import DTYPES, PACK_BYTES, CustomAllReduce
from cgplan.distributed.ranks import Ranks
from cgplan.distributed.registry import SUM_ALIKE
from cgplan.distributed.transports import CudaIpcTransport, SharedMemoryTransport
from cgplan.errors import AllReduceError, CgplanError, RankMismatchError, RegistrationError

_MOST_BLOCKS = 64  # of one kernel, each with its own signals
_WARPS = 8
_BLOCK_BYTES = _WARPS * 32 * PACK_BYTES  # that a block takes at a time
_LOOKS_PER_SECOND = 1 << 20  # of a kernel that waits, roughly
# Messages up to so many bytes are one-shot: beyond it, reading every input whole costs more than a second exchange.
ONE_SHOT_BYTES = {2: 1 << 20, 4: 512 << 10, 8: 256 << 10}

_MOST_DIMS = 64  # of a tensor whose shape is compared; of one with more it is the number of elements
_RECORD = 1 + _MOST_DIMS  # words: what a rank brings to a sum
_SPINS = 200  # looks at the signals before the thread yields for longer
_SAME_CALLS = "Every rank has to make the same calls in the same order."  # a remedy


def _unregistered() -> RegistrationError:
    return RegistrationError(
        "a graph was replayed before its buffers were registered",
        remedy="End the capture pass on all ranks first: CaptureSession does, or AllReduce.end_pass().",
    )


class CudaAllReduce(CustomAllReduce):
    """One-shot and two-shot all-reduce on 2, 4 or 8 GPUs, see triton_kernels.py.

    A wait ends, and leaves NaN and an error word, after about ``distributed.timeout``. The slices of the two-shot
    all-reduce lie behind the signals. The arguments are those of CustomAllReduce.
    """

    def __init__(
        self, ranks: Ranks, backend: GraphBackend, fallback: AllReduce, max_bytes: int, table_rows: int
    ) -> None:
        from cgplan.distributed.triton_kernels import ABORTED, one_shot, two_shot

        self._one_shot, self._two_shot = one_shot, two_shot
        self._limit = min(int(ranks.timeout * _LOOKS_PER_SECOND), (1 << 31) - 1)
        self._most = ONE_SHOT_BYTES[ranks.world_size]
        self._signal_bytes = _MOST_BLOCKS * ranks.world_size * 4
        slice_bytes = -(-max_bytes // (PACK_BYTES * ranks.world_size)) * PACK_BYTES
        transport, nbytes = CudaIpcTransport(ranks.device), self._signal_bytes + slice_bytes
        super().__init__(ranks, backend, transport, nbytes, fallback, max_bytes, table_rows)
        device = ranks.device
        self._signals = torch.tensor(self._addresses, dtype=torch.int64, device=device)
        self._counts = torch.zeros(_MOST_BLOCKS, dtype=torch.int32, device=device)
        self._error = torch.zeros(1, dtype=torch.int32, device=device)
        self._aborted = torch.full((1,), ABORTED, dtype=torch.int32).pin_memory()
        self._beside = torch.cuda.Stream(device)  # for the word that ends a wait on the other streams

    def run(self, x: torch.Tensor, out: torch.Tensor, row: torch.Tensor) -> None:
        world, pack = self.world_size, PACK_BYTES // x.itemsize
        packs, block = x.nbytes // PACK_BYTES, _BLOCK_BYTES // x.itemsize
        common = {
            "RANK": self.rank, "WORLD": world, "PACK": pack, "BLOCK": block, "LIMIT": self._limit,
            "num_warps": _WARPS,
        }  # fmt: skip
        given = (row, out, self._signals, self._counts, self._error, packs)
        if x.nbytes <= self._most:
            self._one_shot[self._grid(x.nbytes)](*given, **common)
        else:
            slice_packs = -(-packs // world)
            self._two_shot[self._grid(slice_packs * PACK_BYTES)](
                *given, slice_packs, SIGNAL_BYTES=self._signal_bytes, **common
            )

    def reset(self) -> None:
        torch.cuda.synchronize(self.ranks.device)
        self._own[: self._signal_bytes].zero_()
        self._counts.zero_()
        self._error.zero_()
        torch.cuda.synchronize(self.ranks.device)

    def abort(self) -> None:
        """Write the error word beside the kernels that wait."""
        with torch.cuda.device(self.ranks.device), torch.cuda.stream(self._beside):
            self._error.copy_(self._aborted, non_blocking=True)

    def check(self) -> None:
        """Raise what the error word says. Waits for the device."""
        from cgplan.distributed.triton_kernels import TIMED_OUT, UNREGISTERED

        code = int(self._error.item())
        if not code:
            return
        self.ranks.check()
        if code == UNREGISTERED:
            raise _unregistered()
        raise AllReduceError(
            f"an all-reduce on rank {self.rank} {'timed out' if code == TIMED_OUT else 'was aborted'}: a rank "
            "did not come to it, and sums since then are wrong",
            remedy=_SAME_CALLS,
        )

    def _grid(self, nbytes: int) -> tuple[int]:
        return (min(-(-nbytes // _BLOCK_BYTES), _MOST_BLOCKS),)


class CpuAllReduce(CustomAllReduce):
    """Sums over table rows on the CPU.

    A barrier: each rank adds one to its own count, writes it to its place in every rank's signals, and waits until all
    places in its signals are as high. Counts only grow, so nothing has to be set back between replays. Each place
    is one aligned word with one writer; a yield, which passes through locks, stands before each write and after each
    wait, so that data is written before the count that tells of it, on any processor. Behind the counts is a record for
    each rank, of what it brings to the sum: dtype and shape, written before the first barrier, compared before the
    second. The arguments are those of CustomAllReduce.
    """

    def __init__(
        self, ranks: Ranks, backend: GraphBackend, fallback: AllReduce, max_bytes: int, table_rows: int
    ) -> None:
        words = (1 + _RECORD) * ranks.world_size
        super().__init__(ranks, backend, SharedMemoryTransport(), 8 * words, fallback, max_bytes, table_rows)
        self._signals: list[Any] = [(ctypes.c_uint64 * words).from_address(address) for address in self._addresses]
        self._count = 0
        self._left: CgplanError | None = None  # why a barrier was left without the others
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def run(self, x: torch.Tensor, out: torch.Tensor, row: torch.Tensor) -> None:
        """Barrier, sum in float32 in the order of the ranks, barrier.

        Raises:
            RankMismatchError: ranks bring tensors of different shapes or dtypes; on all ranks, and sums may go on.
            RegistrationError: the row is not written: the graph was replayed before registration.
            RankFailedError: a rank is lost, or has failed.
            AllReduceError: a rank did not come within the timeout, now or earlier: counts that are out of step would
                let a rank read what another one has not written yet.
        """
        if self._left is not None:
            self.ranks.check()
            raise AllReduceError(
                f"rank {self.rank} has left an earlier all-reduce: {self._left.message}",
                remedy="Capture again on all ranks, or start them again.",
            )
        addresses = row.tolist()
        if not all(addresses):
            raise _unregistered()
        own = _record(x)
        at = self.world_size + self.rank * _RECORD
        for signals in self._signals:
            signals[at : at + len(own)] = own
        self._meet()
        unlike = self._unlike(own)
        if unlike is not None:
            self._meet()  # no rank writes its record of the next sum before all have read this one
            raise unlike
        total = self._view(addresses[0], x).to(torch.float32, copy=True)
        for address in addresses[1:]:
            total += self._view(address, x)
        out.view(-1).copy_(total)
        self._meet()

    def reset(self) -> None:
        self._count, self._left = 0, None
        self._own.zero_()
        self._views.clear()

    def release(self) -> None:
        self._views.clear()
        super().release()

    def _view(self, address: int, like: torch.Tensor) -> torch.Tensor:
        """A rank's input, [numel], on the memory at an address."""
        key = (address, like.nbytes, like.dtype)
        if key not in self._views:
            memory = (ctypes.c_char * like.nbytes).from_address(address)
            self._views[key] = torch.frombuffer(memory, dtype=like.dtype)
        return self._views[key]

    def _unlike(self, own: list[int]) -> RankMismatchError | None:
        """How the first rank whose record differs from rank 0's does; the same on all ranks."""
        world, told = self.world_size, self._signals[self.rank]
        if all(told[at : at + len(own)] == own for at in range(world, len(told), _RECORD)):
            return None
        first, *others = [_described(told[at : at + _RECORD]) for at in range(world, len(told), _RECORD)]
        rank, theirs = next((rank, theirs) for rank, theirs in enumerate(others, 1) if theirs != first)
        return RankMismatchError(
            f"rank {rank} came to all-reduce {(self._count + 1) // 2} with {theirs}, rank 0 with {first}",
            remedy=SUM_ALIKE,
        )

    def _meet(self) -> None:
        try:
            self._barrier()
        except CgplanError as error:
            self._left = error
            raise

    def _barrier(self) -> None:
        rank, world, own = self.rank, self.world_size, self._signals[self.rank]
        self._count += 1
        time.sleep(0)
        for signals in self._signals:
            signals[rank] = self._count
        spins, deadline = 0, time.monotonic() + self.ranks.timeout
        while min(own[:world]) < self._count:
            spins += 1
            if spins < _SPINS:
                os.sched_yield()
                continue
            time.sleep(2e-5 if spins < 50 * _SPINS else 1e-3)
            if spins % 256 == 0:
                self.ranks.check()
                if time.monotonic() > deadline:
                    late = ", ".join(str(peer) for peer, count in enumerate(own[:world]) if count < self._count)
                    error = AllReduceError(
                        f"rank {late} did not come to an all-reduce within {self.ranks.timeout:g} s",
                        remedy=_SAME_CALLS,
                    )
                    self.ranks.leave(error)
                    raise error
        time.sleep(0)


def _record(x: torch.Tensor) -> list[int]:
    """Dtype and number of dimensions in one word, and the sizes."""
    shape = x.shape if x.dim() <= _MOST_DIMS else (x.numel(),)
    return [len(shape) * len(DTYPES) + DTYPES.index(x.dtype), *shape]


def _described(record: list[int]) -> str:
    dims, dtype = divmod(record[0], len(DTYPES))
    return f"{record[1 : 1 + dims]} {DTYPES[dtype]}"


__all__ = ["ONE_SHOT_BYTES", "CpuAllReduce", "CudaAllReduce"]
