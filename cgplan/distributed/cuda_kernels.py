"""Launches the Triton kernels of the custom all-reduce, and owns what they signal through."""

from __future__ import annotations

import threading

import torch

from cgplan.distributed.ranks import Ranks
from cgplan.distributed.registry import GraphBufferRegistry
from cgplan.distributed.transport import MemoryTransport
from cgplan.errors import AllReduceError, RegistrationError

MOST_BLOCKS = 64  # of one kernel, each with signals of its own
PACK_BYTES = 16  # what a thread loads at once
WARPS = 8
BLOCK_BYTES = WARPS * 32 * PACK_BYTES  # what a block takes at a time
DEBUG_LOOKS = 1 << 22  # of a wait before it gives up: some seconds
# Messages up to so many bytes are one-shot: beyond it, reading every input whole costs more than a second exchange.
ONE_SHOT_BYTES = {2: 1 << 20, 4: 512 << 10, 8: 256 << 10}


class CudaKernels:
    """One-shot and two-shot all-reduce on one GPU.

    Args:
        ranks: All ranks; 2, 4 or 8.
        registry: Opens the signals.
        transport: Holds them, and the slices of the two-shot all-reduce behind them.
        max_bytes: Largest message.
        bounded: Whether a wait gives up after some seconds, for debugging; else it ends when a rank is lost.
        one_shot_bytes: Largest message that is reduced in one shot; absent: by the number of ranks.
    """

    def __init__(
        self,
        ranks: Ranks,
        registry: GraphBufferRegistry,
        transport: MemoryTransport,
        max_bytes: int,
        *,
        bounded: bool = False,
        one_shot_bytes: int | None = None,
    ) -> None:
        from cgplan.distributed.triton_kernels import ABORTED, TIMED_OUT, UNREGISTERED, one_shot, two_shot

        self._one_shot, self._two_shot = one_shot, two_shot
        self._messages = {UNREGISTERED: "unregistered", TIMED_OUT: "timed out", ABORTED: "aborted"}
        self._ranks, self._limit = ranks, DEBUG_LOOKS if bounded else 0
        self._most = ONE_SHOT_BYTES[ranks.world_size] if one_shot_bytes is None else one_shot_bytes
        self._signal_bytes = MOST_BLOCKS * ranks.world_size * 4
        slice_bytes = -(-max_bytes // (PACK_BYTES * ranks.world_size)) * PACK_BYTES
        device = ranks.device
        self._own = transport.empty(self._signal_bytes + slice_bytes)
        addresses = registry.open_block("signals", self._own)
        self._signals = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._counts = torch.zeros(MOST_BLOCKS, dtype=torch.int32, device=device)
        self._error = torch.zeros(1, dtype=torch.int32, device=device)
        self._aborted = torch.full((1,), ABORTED, dtype=torch.int32).pin_memory()
        self._beside = torch.cuda.Stream(device)  # for the word that ends a wait on the other streams
        self._lock = threading.Lock()

    def run(self, x: torch.Tensor, out: torch.Tensor, row: torch.Tensor) -> None:
        """Queue the kernel on the current stream. Raises RankFailedError where a rank is lost: it would not wait."""
        self._ranks.watch.check_lost()
        world, pack = self._ranks.world_size, PACK_BYTES // x.itemsize
        packs, block = x.nbytes // PACK_BYTES, BLOCK_BYTES // x.itemsize
        common = {
            "RANK": self._ranks.rank, "WORLD": world, "PACK": pack, "BLOCK": block, "LIMIT": self._limit,
            "num_warps": WARPS,
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
        """Signals, counts and the error word from 0."""
        torch.cuda.synchronize(self._ranks.device)
        self._own[: self._signal_bytes].zero_()
        self._counts.zero_()
        self._error.zero_()
        torch.cuda.synchronize(self._ranks.device)

    def abort(self) -> None:
        """End all waits, now and later; from any thread, while kernels wait on other streams."""
        with self._lock, torch.cuda.device(self._ranks.device), torch.cuda.stream(self._beside):
            self._error.copy_(self._aborted, non_blocking=True)

    def check(self) -> None:
        """Raise what the error word says. Waits for the device."""
        try:
            code = int(self._error.item())
        except RuntimeError:  # of the device; a rank that was killed may be why
            self._ranks.watch.blame(patience=2.0)
            raise
        if not code:
            return
        self._ranks.watch.check()
        if self._messages[code] == "unregistered":
            raise RegistrationError(
                "a graph was replayed before its buffers were registered",
                remedy="End the capture pass on all ranks first: CaptureSession does, or AllReduce.end_pass().",
            )
        raise AllReduceError(
            f"an all-reduce on rank {self._ranks.rank} {self._messages[code]}: a rank did not come to it, and sums "
            "since then are wrong",
            remedy="Every rank has to make the same calls in the same order.",
        )

    def forget(self) -> None:
        """Nothing is kept of table rows."""

    def _grid(self, nbytes: int) -> tuple[int]:
        return (min(-(-nbytes // BLOCK_BYTES), MOST_BLOCKS),)


__all__ = ["CudaKernels"]
