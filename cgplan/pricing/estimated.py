"""The cost of graphs, from recorded allocations."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from cgplan.config import Config
from cgplan.modes import CUDAGraphMode, Key
from cgplan.planning.costs import GraphCosts
from cgplan.pricing.allocator import Allocation, CachingPool
from cgplan.pricing.measured import interpolate, stand_in_notes
from cgplan.units import grouped

# One H200, driver 580, torch 2.11: driver memory of a node, and seconds of a decoder layer for each
# kernel. Operators stand in for nodes.
NODE_BYTES = 2 << 10
CAPTURE_SECONDS = 15e-6
WARMUP_SECONDS = 17e-6
WORKSPACE_BYTES = 32 << 20  # torch's cuBLAS workspace there; about 8 MiB before Hopper

_GRID = 1.25  # between sizes whose pools are worked out; others are interpolated
_Lane = tuple[CUDAGraphMode, bool]  # with adapters or without


@dataclass(frozen=True)
class Recording:
    """The allocations of one key's capture in an empty pool.

    ``hidden_bytes`` were held inside operators with Python code, ``hidden_in``: on a GPU these are
    mostly one kernel.
    """

    mode: CUDAGraphMode
    has_lora: bool
    num_tokens: int
    operators: int
    events: tuple[Allocation, ...]
    hidden_bytes: int = 0
    hidden_in: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        key: Key,
        operators: int,
        log: Sequence[Allocation],
    ) -> Recording:
        """From a pool's log, which reuses numbers of free blocks."""
        living: dict[int, int] = {}
        taken: list[Allocation] = []
        renumbered: list[Allocation] = []
        hidden: set[int] = set()
        for event in log:
            if event.nbytes is not None:
                number = living[event.block] = len(taken)
                taken.append(event)
            elif event.block in living:
                number = living.pop(event.block)
                if event.inside and taken[number].inside:
                    hidden.add(number)
            else:
                continue
            renumbered.append(Allocation(number, event.nbytes))
        events = []
        held = most = 0
        for event in renumbered:
            if event.block not in hidden:
                events.append(event)
            elif event.nbytes is None:
                held -= taken[event.block].nbytes or 0
            else:
                held += event.nbytes
                most = max(most, held)
        mode, descriptor = key
        names = sorted({taken[number].inside for number in hidden})
        lane = mode, descriptor.has_lora
        return cls(
            *lane,
            descriptor.elements,
            operators,
            tuple(events),
            most,
            tuple(names),
        )

    @property
    def lane(self) -> _Lane:
        return self.mode, self.has_lora

    @property
    def form(self) -> list[tuple[int, bool]]:
        return [(event.block, event.nbytes is None) for event in self.events]

    def scaled(
        self,
        other: Recording,
        num_tokens: int,
    ) -> list[Allocation]:
        """On the line through both recordings; if these differ in form, in proportion."""
        mine, theirs = self.num_tokens, other.num_tokens
        is_alike = mine != theirs and self.form == other.form
        partners = other.events if is_alike else self.events
        found = []
        for event, partner in zip(self.events, partners, strict=True):
            nbytes = event.nbytes
            if nbytes is not None and is_alike:
                nbytes = _between((mine, nbytes), (theirs, partner.nbytes or 0), num_tokens)
            elif nbytes is not None:
                nbytes = -(-nbytes * num_tokens // mine)
            found.append(Allocation(event.block, nbytes))
        return found


class EstimatedCosts(GraphCosts):
    """Costs without a GPU: pool bytes from recorded allocations, the rest from one H200.

    Graphs without a recording are priced as others; the notes say so.
    """

    estimated = True
    workspace_bytes = WORKSPACE_BYTES

    def __init__(
        self,
        recordings: Sequence[Recording],
        config: Config,
        note: str = "",
    ) -> None:
        self.config = config
        ascending = sorted(recordings, key=attrgetter("num_tokens"))
        self._lanes = grouped((recording.lane, recording) for recording in ascending)
        self._pools: dict[tuple[_Lane, int], int] = {}
        asked = config.compilation.cudagraph_num_of_warmups
        self._warmups = 0 if asked == "auto" else asked  # of most keys
        self.source = _source(recordings, self._warmups, note)
        self.notes = tuple(stand_in_notes(config, self._lanes))

    def pool_bytes(self, mode: CUDAGraphMode, num_tokens: int) -> int:
        """As if the halved sizes down to 1 were captured, too."""
        lanes = [lane for lane in self._lanes if lane[0] is mode] or self._lanes
        found = [self._pool_bytes(lane, num_tokens) for lane in lanes]
        return max(found, default=0)

    def driver_bytes(self, key: Key) -> int:
        return round(self._operators(key) * NODE_BYTES)

    def seconds(self, key: Key) -> float:
        return self._operators(key) * (CAPTURE_SECONDS + self._warmups * WARMUP_SECONDS)

    def _operators(self, key: Key) -> float:
        mode, descriptor = key
        own = mode, descriptor.has_lora
        others = mode, not descriptor.has_lora
        for lane in (own, others, *self._lanes):
            if lane in self._lanes:
                points = [(each.num_tokens, each.operators) for each in self._lanes[lane]]
                return max(interpolate(points, descriptor.elements), 0.0)
        return 0.0

    def _pool_bytes(
        self,
        lane: _Lane,
        num_tokens: int,
    ) -> int:
        """Never falls, because the search relies on that: in PyTorch 10 MiB reserve less than a
        little less.
        """
        recorded = [recording.num_tokens for recording in self._lanes[lane]]
        grid = _grid(recorded, num_tokens)
        upper = bisect_left(grid, num_tokens)
        left = max((self._worked_out(lane, size) for size in grid[:upper]), default=0)
        above = grid[upper]
        right = max(left, self._worked_out(lane, above))
        if upper == 0 or above == num_tokens:
            return right
        below = grid[upper - 1]
        return _between((below, left), (above, right), num_tokens)

    def _worked_out(
        self,
        lane: _Lane,
        num_tokens: int,
    ) -> int:
        asked = lane, num_tokens
        if asked not in self._pools:
            recordings = self._lanes[lane]
            last = len(recordings) - 1
            sizes = [recording.num_tokens for recording in recordings]
            pool = CachingPool()
            size = num_tokens
            while size:
                upper = min(bisect_left(sizes, size), last)
                neighbour = upper - 1 if upper else min(1, last)
                pool.run(recordings[upper].scaled(recordings[neighbour], size))
                size //= 2
            self._pools[asked] = pool.reserved
        return self._pools[asked]


def _between(
    one: tuple[int, int],
    other: tuple[int, int],
    at: int,
) -> int:
    (left, low), (right, high) = sorted((one, other))
    falls = (low - high) * (at - left) // (right - left)
    return max(low - falls, 0)


def _grid(recorded: Sequence[int], num_tokens: int) -> list[int]:
    sizes = set(recorded)
    size = 1.0
    largest = max(*recorded, num_tokens)
    while size < largest * _GRID:
        sizes.add(int(size))
        size = max(size * _GRID, size + 1)
    sizes.add(int(size))
    return sorted(sizes)


def _source(
    recordings: Sequence[Recording],
    warmups: int,
    note: str,
) -> str:
    parts = [
        f"allocations of {len(recordings)} keys recorded on the CPU, in a model of "
        "PyTorch's allocator",
        f"for each operator {NODE_BYTES >> 10} KiB of driver memory, {CAPTURE_SECONDS * 1e6:.0f} "
        f"us of capture and {WARMUP_SECONDS * 1e6:.0f} us of each warm-up ({warmups}), and "
        f"{WORKSPACE_BYTES >> 20} MiB of cuBLAS workspace, as on one H200",
        "what kernels take inside themselves is not seen",
    ]
    hidden = 0
    names = set[str]()
    for recording in recordings:
        hidden = max(hidden, recording.hidden_bytes)
        names.update(recording.hidden_in)
    if hidden:
        parts.append(
            f"left out: up to {hidden / 2**20:.1f} MiB that {', '.join(sorted(names))} took on the "
            "CPU and gave back"
        )
    if note:
        parts.append(note)
    return "; ".join(parts)
