"""The cost of graphs, from recordings of allocations run through a model of PyTorch's caching
allocator.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from cgplan.config import Config
from cgplan.modes import CUDAGraphMode, Key
from cgplan.planning.costs import GraphCosts
from cgplan.pricing.allocator import Allocation, CachingPool
from cgplan.pricing.measured import interpolate, stand_in_notes
from cgplan.units import grouped

# One H200, driver 580, torch 2.11: what a kernel node takes of the driver's memory, and how long a
# decoder layer's kernels take to capture and to launch in a warm-up, each divided by their number.
# Operators stand in for nodes.
NODE_BYTES = 2 << 10
CAPTURE_SECONDS = 15e-6
WARMUP_SECONDS = 17e-6
WORKSPACE_BYTES = 32 << 20  # torch's cuBLAS workspace on that GPU; about 8 MiB before Hopper

_GRID = 1.25  # pools are worked out for sizes this factor apart, and interpolated between them


@dataclass(frozen=True)
class Recording:
    """The allocations of one key's capture.

    Attributes:
        operators: How many were recorded.
        events: Blocks that it took from an empty pool and gave back, in order. Blocks are numbered
            as they were taken.
        hidden_bytes: Most bytes taken at once inside operators with Python code of their own, which
            are not in ``events``: on a GPU such an operator is mostly one kernel.
        hidden_in: The names of those operators.
    """

    mode: CUDAGraphMode
    has_lora: bool
    num_tokens: int
    operators: int
    events: tuple[Allocation, ...]
    hidden_bytes: int = 0
    hidden_in: tuple[str, ...] = ()

    @classmethod
    def of(cls, key: Key, operators: int, log: Sequence[Allocation]) -> Recording:
        """From the log of a pool, whose block numbers are used again once a block is free."""
        living: dict[int, int] = {}
        taken: list[Allocation] = []
        order: list[tuple[int, Allocation]] = []  # with the blocks numbered as they were taken
        for event in log:
            if event.nbytes is not None:
                living[event.block] = len(taken)
                taken.append(event)
                order.append((len(taken) - 1, event))
            elif event.block in living:
                order.append((living.pop(event.block), event))
        hidden = {
            n for n, event in order if event.nbytes is None and event.inside and taken[n].inside
        }
        changes = (
            (taken[n].nbytes or 0) * (-1 if event.nbytes is None else 1)
            for n, event in order
            if n in hidden
        )
        mode, descriptor = key
        return cls(
            mode,
            descriptor.has_lora,
            descriptor.elements,
            operators,
            events=tuple(Allocation(n, event.nbytes) for n, event in order if n not in hidden),
            hidden_bytes=max(accumulate(changes, initial=0)),
            hidden_in=tuple(sorted({taken[n].inside for n in hidden})),
        )

    def scaled(self, other: Recording, num_tokens: int) -> list[Allocation]:
        """The events of another size: each block's bytes on the line through those of the two
        recordings.

        Where the two did not do the same, this one's bytes in proportion to the size.
        """
        mine, theirs = self.num_tokens, other.num_tokens
        forms = (
            [(event.block, event.nbytes is None) for event in one.events] for one in (self, other)
        )
        if mine == theirs or next(forms) != next(forms):
            sizes = [-(-(event.nbytes or 0) * num_tokens // mine) for event in self.events]
        else:
            pairs = zip(self.events, other.events, strict=True)
            sizes = [
                _between((mine, e.nbytes or 0), (theirs, o.nbytes or 0), num_tokens)
                for e, o in pairs
            ]
        return [
            e if e.nbytes is None else Allocation(e.block, n)
            for e, n in zip(self.events, sizes, strict=True)
        ]


class EstimatedCosts(GraphCosts):
    """Costs worked out on the CPU. Pool bytes follow from recorded allocations; the rest are
    figures of one H200.

    Graphs of which no key was recorded are priced as others are; the notes say so.

    ``recordings`` hold one or more sizes of each mode, with and without adapters; ``note`` is a
    part of ``source``.
    """

    estimated = True
    workspace_bytes = WORKSPACE_BYTES

    def __init__(self, recordings: Sequence[Recording], config: Config, note: str = "") -> None:
        self.config = config
        ascending = sorted(recordings, key=lambda r: r.num_tokens)
        self._lanes = grouped(
            ((recording.mode, recording.has_lora), recording) for recording in ascending
        )
        self._pools: dict[tuple[CUDAGraphMode, bool, int], int] = {}
        self.source = _source(recordings, config.compilation.cudagraph_num_of_warmups, note)
        self.notes = tuple(stand_in_notes(config, self._lanes))

    def pool_bytes(self, mode: CUDAGraphMode, num_tokens: int) -> int:
        """Smaller sizes, each half of the one before, are taken to be captured, too."""
        lanes = [lane for lane in self._lanes if lane[0] is mode] or self._lanes
        return max((self._pool_bytes(lane, num_tokens) for lane in lanes), default=0)

    def driver_bytes(self, key: Key) -> int:
        return round(self._operators(key) * NODE_BYTES)

    def seconds(self, key: Key) -> float:
        warmups = self.config.compilation.cudagraph_num_of_warmups
        return self._operators(key) * (CAPTURE_SECONDS + warmups * WARMUP_SECONDS)

    def _operators(self, key: Key) -> float:
        mode, descriptor = key
        alike = ((mode, descriptor.has_lora), (mode, not descriptor.has_lora), *self._lanes)
        lane = next((self._lanes[name] for name in alike if name in self._lanes), [])
        points = [(recording.num_tokens, recording.operators) for recording in lane]
        return max(interpolate(points, descriptor.elements), 0.0) if points else 0.0

    def _pool_bytes(self, lane: tuple[CUDAGraphMode, bool], num_tokens: int) -> int:
        """On the grid worked out, between its sizes interpolated.

        A larger size is never taken to need less, although it can: a block of 10 MiB reserves less
        than one that is a little smaller. The search relies on that.
        """
        recorded = [recording.num_tokens for recording in self._lanes[lane]]
        grid = _grid(recorded, num_tokens)
        upper = bisect_left(grid, num_tokens)
        left = max((self._worked_out(lane, size) for size in grid[:upper]), default=0)
        right = max(left, self._worked_out(lane, grid[upper]))
        if upper == 0 or grid[upper] == num_tokens:
            return right
        return _between((grid[upper - 1], left), (grid[upper], right), num_tokens)

    def _worked_out(self, lane: tuple[CUDAGraphMode, bool], num_tokens: int) -> int:
        recordings, last, pool, size = (
            self._lanes[lane],
            len(self._lanes[lane]) - 1,
            CachingPool(),
            num_tokens,
        )
        while size and (*lane, num_tokens) not in self._pools:
            upper = next(
                (i for i, recording in enumerate(recordings) if recording.num_tokens >= size), last
            )
            pool.run(
                recordings[upper].scaled(recordings[upper - 1 if upper else min(1, last)], size)
            )
            size //= 2
        return self._pools.setdefault((*lane, num_tokens), pool.reserved)


def _between(one: tuple[int, int], other: tuple[int, int], at: int) -> int:
    """The whole number at or above the line through two points; none below 0."""
    (x, y), (x2, y2) = one, other
    return max(-(-((y2 - y) * (at - x)) // (x2 - x)) + y, 0) if x2 > x else _between(other, one, at)


def _grid(recorded: Sequence[int], num_tokens: int) -> list[int]:
    """The recorded sizes, and others a factor apart, up to one that is at least ``num_tokens``."""
    sizes, size = set(recorded), 1.0
    while size < max(*recorded, num_tokens) * _GRID:
        sizes.add(int(size))
        size = max(size * _GRID, size + 1)
    return sorted({*sizes, int(size)})


def _source(recordings: Sequence[Recording], warmups: int, note: str) -> str:
    hidden = max((recording.hidden_bytes for recording in recordings), default=0)
    names = ", ".join(sorted({name for recording in recordings for name in recording.hidden_in}))
    parts = [
        f"allocations of {len(recordings)} keys recorded on the CPU, run through a model of "
        "PyTorch's allocator",
        f"for each operator {NODE_BYTES >> 10} KiB of driver memory, {CAPTURE_SECONDS * 1e6:.0f} "
        "us of capture and "
        f"{WARMUP_SECONDS * 1e6:.0f} us of each warm-up ({warmups}), and {WORKSPACE_BYTES >> 20} "
        "MiB of cuBLAS "
        "workspace, as on one H200",
        "what kernels take inside themselves is not seen",
    ]
    if hidden:
        parts.append(
            f"left out: up to {hidden / 2**20:.1f} MiB that {names} took on the CPU and gave back"
        )
    return "; ".join([*parts, *([note] if note else [])])
