"""The cost of graphs, from recorded allocations."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

from cgplan.config import Config
from cgplan.modes import CUDAGraphMode
from cgplan.pricing.allocator import Allocation, CachingPool
from cgplan.pricing.costs import GraphCosts, MeasuredKey, interpolate
from cgplan.units import grouped

# One H200, driver 580, torch 2.11: driver memory of a node, and seconds of a decoder layer for each
# kernel. Operators stand in for nodes.
NODE_BYTES = 2 << 10
CAPTURE_SECONDS = 15e-6
WARMUP_SECONDS = 17e-6
WORKSPACE_BYTES = 32 << 20  # torch's cuBLAS workspace there; about 8 MiB before Hopper

_GRID = 1.25  # between sizes whose pools are worked out; others are interpolated


@dataclass(frozen=True)
class Recording:
    """The allocations of one key's capture in an empty pool.

    ``hidden``: the most bytes held inside each operator with Python code: on a GPU it is mostly one
    kernel.
    """

    mode: CUDAGraphMode
    has_lora: bool
    num_tokens: int
    operators: int
    events: tuple[Allocation, ...]
    hidden: Mapping[str, int] = field(default_factory=dict)

    @cached_property
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
                both = sorted([(mine, nbytes), (theirs, partner.nbytes or 0)])
                nbytes = max(math.ceil(interpolate(both, num_tokens)), 0)
            elif nbytes is not None:
                nbytes = -(-nbytes * num_tokens // mine)
            found.append(Allocation(event.block, nbytes))
        return found


def estimated_costs(
    recordings: Sequence[Recording],
    config: Config,
    note: str = "",
) -> GraphCosts:
    """Pool bytes from recorded allocations, the rest from one H200."""
    asked = config.compilation.cudagraph_num_of_warmups
    warmups = 0 if asked == "auto" else asked  # of most keys
    seconds = CAPTURE_SECONDS + warmups * WARMUP_SECONDS
    keys = []
    for recording in recordings:
        operators = recording.operators
        key = MeasuredKey(
            recording.mode,
            int(recording.has_lora),
            recording.num_tokens,
            operators * NODE_BYTES,
            operators * seconds,
        )
        keys.append(key)
    ascending = sorted(recordings, key=attrgetter("num_tokens"))
    pools = {}
    for mode, of_mode in grouped((each.mode, each) for each in ascending).items():
        lanes = grouped((each.has_lora, each) for each in of_mode).values()
        recorded = [each.num_tokens for each in of_mode]
        points = []
        for size in _grid(recorded, config.scheduler.max_num_batched_tokens):
            points.append((size, max(_reserved(lane, size) for lane in lanes)))
        pools[mode] = points
    costs = GraphCosts(
        keys,
        pools,
        config,
        source=_source(recordings, warmups, note),
        workspace_bytes=WORKSPACE_BYTES,
    )
    costs.estimated = True
    costs.largest = math.inf
    return costs


def _reserved(
    recordings: Sequence[Recording],
    num_tokens: int,
) -> int:
    """As if the halved sizes down to 1 were captured, too."""
    last = len(recordings) - 1
    sizes = [recording.num_tokens for recording in recordings]
    pool = CachingPool()
    while num_tokens:
        upper = min(bisect_left(sizes, num_tokens), last)
        neighbour = upper - 1 if upper else min(1, last)
        pool.run(recordings[upper].scaled(recordings[neighbour], num_tokens))
        num_tokens //= 2
    return pool.reserved


def _grid(recorded: Iterable[int], num_tokens: int) -> list[int]:
    sizes = set(recorded)
    size = 1.0
    largest = max(*sizes, num_tokens)
    while size < largest * _GRID:
        sizes.add(int(size))
        size = max(size * _GRID, size + 1)
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
    hidden = Counter[str]()
    for recording in recordings:
        hidden |= Counter(recording.hidden)
    if hidden:
        most = max(hidden.values())
        parts.append(
            f"left out: up to {most / 2**20:.1f} MiB that {', '.join(sorted(hidden))} took on the "
            "CPU and gave back"
        )
    if note:
        parts.append(note)
    return "; ".join(parts)
