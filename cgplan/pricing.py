"""The cost of graphs, device memory and start-up time, from real captures or from recorded
allocations.

The allocator is PyTorch's: c10/cuda/CUDACachingAllocator.cpp of torch 2.11 to 2.13, with the
default PYTORCH_CUDA_ALLOC_CONF.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, product
from operator import attrgetter, itemgetter
from statistics import fmean
from typing import Any, NamedTuple

from cgplan.config import Config
from cgplan.errors import ReportError
from cgplan.modes import CUDAGraphMode, Key
from cgplan.planning.plan import KeyCost, Predicted, build_plan, lora_cases, resolve_mode
from cgplan.planning.vllm_log import StartLog
from cgplan.units import counted, format_bytes, grouped

_CAPTURED = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
Points = list[tuple[int, int]]  # tokens, bytes


@dataclass(frozen=True)
class MeasuredKey:
    """With `dims`, ``num_tokens`` are elements of its box."""

    mode: CUDAGraphMode
    num_active_loras: int
    num_tokens: int
    driver_bytes: float
    seconds: float

    @property
    def has_lora(self) -> bool:
        return self.num_active_loras > 0


class GraphCosts:
    """Costs of keys that share one pool, interpolated between real captures.

    Other graphs are priced as these; the notes say so. A subclass without figures overrides
    ``pool_bytes``, which is no less for a larger size, ``driver_bytes`` and ``seconds``.

    Attributes:
        source, estimated, notes, workspace_bytes, model, has_drafts: As in ``Predicted``.
        config: Its inputs are in the static buffers.
        once_seconds: Extra time of the first capture: tracing, loading kernels.
        largest: Elements of the largest graph whose cost is not extrapolated.
        pools: By mode: (num_tokens, bytes of a pool that began with this size).
    """

    estimated = False
    notes: tuple[str, ...] = ()
    workspace_bytes = 0
    once_seconds = 0.0
    largest = math.inf
    model = ""
    has_drafts = False

    def __init__(
        self,
        keys: Iterable[MeasuredKey],
        pools: Mapping[CUDAGraphMode, Sequence[tuple[int, int]]],
        config: Config,
        *,
        source: str,
        workspace_bytes: int = 0,
        once_seconds: float = 0.0,
        notes: Iterable[str] = (),
    ) -> None:
        self.source = source
        self.config = config
        self.workspace_bytes = workspace_bytes
        self.once_seconds = once_seconds
        self._keys = tuple(keys)
        self.largest = max([key.num_tokens for key in self._keys], default=0)
        self._measured = grouped(
            ((key.mode, key.num_active_loras, key.num_tokens), key) for key in self._keys
        )
        cases = product(_CAPTURED, (False, True), ("driver_bytes", "seconds"))
        self._lines = {case: self._line(*case) for case in cases}
        priced = [(key.mode, key.has_lora) for key in self._keys]
        self.notes = (*notes, *stand_in_notes(config, priced))
        self._pools: dict[CUDAGraphMode, Points] = {}
        every = list[int]()
        for mode, points in pools.items():
            sizes, reserved = zip(*sorted(points), strict=True)
            # a pool that holds a size holds every smaller one
            self._pools[mode] = list(zip(sizes, accumulate(reserved, max), strict=True))
            every += reserved
        self._unit = unit_of(every)

    @classmethod
    def from_report(
        cls,
        report: Any,
        config: Config,
        notes: Iterable[str] = (),
    ) -> GraphCosts:
        """Driver memory by nodes. Raises ReportError without keys."""
        records = tuple(report.records)
        if not records:
            raise ReportError(
                "the report has no captured keys",
                remedy="Report a capture with `capture_policy: eager`, or give --costs measure.",
            )
        by_mode = grouped((record.mode, record) for record in records)
        per_node = {}  # a key, where nodes were not counted
        for mode, own in by_mode.items():
            nbytes = sum(record.driver_bytes or 0 for record in own)
            nodes = sum(record.nodes or 1 for record in own)
            per_node[mode] = nbytes / max(nodes, 1)
        captured = []
        for record in records:
            driver = round(per_node[record.mode] * (record.nodes or 1))
            cost = KeyCost(record.pool_growth, driver, record.seconds)
            captured.append(((record.mode, record.descriptor), cost))
        return cls.of_captures(
            captured,
            config,
            source=f"measured: {report.origin}",
            workspace_bytes=report.workspace_bytes,
            notes=notes,
        )

    @classmethod
    def of_captures(
        cls,
        captured: Sequence[tuple[Key, KeyCost]],
        config: Config,
        most: int = 0,
        **others: Any,
    ) -> GraphCosts:
        """In capture order; a mode's pool is in proportion to its largest size, or ``most``. What
        the first key of a mode takes beyond the next one is taken once.
        """
        (first_mode, _), first = captured[0]
        once = 0.0
        for (mode, _), cost in captured[1:]:
            if mode is first_mode:
                once = max(first.seconds - cost.seconds, once)
                break
        extra = once
        keys = []
        pools = {}
        pool = 0
        largest: dict[CUDAGraphMode, int] = {}
        for (mode, descriptor), cost in captured:
            size = descriptor.elements
            pool += cost.pool_bytes
            largest[mode] = max(largest.get(mode, most), size)
            pools[mode] = [(0, 0), (largest[mode], pool)]
            key = MeasuredKey(
                mode,
                descriptor.num_active_loras,
                size,
                cost.driver_bytes,
                cost.seconds - extra,
            )
            keys.append(key)
            extra = 0.0
        return cls(keys, pools, config, once_seconds=once, **others)

    @classmethod
    def from_vllm_log(
        cls,
        log: StartLog,
        config: Config,
        path: str,
    ) -> GraphCosts:
        """Estimates from vLLM's log of one start. Raises ReportError without graphs.

        A graph takes 1 MiB, vLLM's own least, and one pool for all modes the rest.
        """
        plan = build_plan(config)
        graphs = dict(log.graphs)
        if not graphs:
            for mode, found in grouped(log.started(plan).keys).items():
                graphs[mode] = len(found), max(key.num_tokens for key in found)
        total = sum(count for count, _ in graphs.values())
        if not total:
            raise ReportError(
                f"{path}: vLLM captured no graph", remedy="Give the log of a start with graphs."
            )
        least = min(1 << 20, log.bytes / total)
        seconds = log.seconds / total
        keys = []
        points = {}
        largest = max(tokens or plan.max_capture_size for _, tokens in graphs.values())
        pool = round(log.bytes - total * least)
        for mode, (_, tokens) in graphs.items():
            own = tokens or plan.max_capture_size
            for case in lora_cases(config):
                keys.append(MeasuredKey(mode, case, own, least, seconds))
            points[mode] = [(0, 0), (largest, pool)]
        notes = [
            *log.doubts(plan),
            *log.of_other_options(plan),
            f"{path} has the costs of {counted(total, 'graph')} together, "
            f"{format_bytes(log.bytes)} and {log.seconds:.0f} s: each graph was given the same "
            f"seconds and, of memory, {format_bytes(round(least))}, the pool the rest",
        ]
        if log.drafts:
            notes.append(f"{path} is of a start with drafts: each graph has its share of theirs")
        source = f"the log of vLLM, {path}"
        if plan.draft_keys and not log.drafts:
            source += " (no graph of the draft model)"
        costs = cls(keys, points, config, source=source, notes=notes)
        costs.estimated = True
        costs.model = log.model or ""
        costs.has_drafts = bool(log.drafts)
        return costs

    def of(self, keys: Sequence[Key]) -> Predicted:
        """The cost of capturing these keys, in this order, into one pool."""
        held = 0
        costs = []
        extrapolated = False
        seconds = self.once_seconds
        for key in keys:
            mode, descriptor = key
            extrapolated |= descriptor.elements > self.largest
            pool = max(held, self.pool_bytes(mode, descriptor.elements))
            seconds += self.seconds(key)
            driver = self.driver_bytes(key)
            costs.append(KeyCost(pool - held, driver, seconds))
            held = pool
            seconds = 0.0
        static = 0
        for sizes, most in widest(keys).items():
            static += self.static_bytes(most, sizes)
        return Predicted(
            keys=tuple(costs),
            static_bytes=static,
            workspace_bytes=self.workspace_bytes if keys else 0,
            source=self.source,
            estimated=self.estimated,
            notes=self.notes,
            extrapolated=extrapolated,
            model=self.model,
            has_drafts=self.has_drafts,
        )

    def static_bytes(
        self,
        num_tokens: int,
        sizes: tuple[int, ...] = (),
    ) -> int:
        """As the function ``static_bytes``."""
        return static_bytes(self.config, num_tokens, sizes)

    def pool_bytes(
        self,
        mode: CUDAGraphMode,
        num_tokens: int,
    ) -> int:
        """Bytes of a pool after captures of that mode up to that size (with `dims` the elements of
        a box), largest first; a pool of several modes has the largest of their bytes.

        Interpolated, in whole segments; below the measured sizes at least in proportion.
        """
        if mode not in self._pools:
            found = [self.pool_bytes(other, num_tokens) for other in self._pools]
            return max(found, default=0)
        points = self._pools[mode]
        small, least = points[0]
        nbytes = interpolate(points, num_tokens)
        if num_tokens < small:
            nbytes = max(nbytes, least * num_tokens / small)
        rounded = math.ceil(nbytes / self._unit) * self._unit
        above = [most for size, most in points if size >= num_tokens]
        return min([rounded, *above])

    def driver_bytes(self, key: Key) -> int:
        """The driver's memory for one key, on average: the driver takes chunks."""
        found = self._of(key, "driver_bytes")
        return max(round(found), 0)

    def seconds(self, key: Key) -> float:
        return self._of(key, "seconds")

    def _of(
        self,
        key: Key,
        figure: str,
    ) -> float:
        """Never below the least measured: a line through noisy times ends at graphs that cost
        nothing.
        """
        mode, descriptor = key
        case = mode, descriptor.num_active_loras, descriptor.elements
        same = self._measured.get(case)
        if same:
            return fmean(getattr(measured, figure) for measured in same)
        points = self._lines[mode, descriptor.has_lora, figure]
        if not points:
            return 0.0
        least = min(least for _, least in points)
        found = interpolate(points, descriptor.elements)
        return max(found, least)

    def _line(
        self,
        mode: CUDAGraphMode,
        has_lora: bool,
        figure: str,
    ) -> list[tuple[int, float]]:
        of_mode = [measured for measured in self._keys if measured.mode is mode]
        alike = [measured for measured in of_mode if measured.has_lora == has_lora]
        by_size = grouped(
            (measured.num_tokens, getattr(measured, figure))
            for measured in alike or of_mode or self._keys
        )
        return [(tokens, fmean(found)) for tokens, found in sorted(by_size.items())]


def stand_in_notes(
    config: Config,
    priced: Iterable[tuple[CUDAGraphMode, bool]],
) -> Iterator[str]:
    """On graphs of the configuration whose (mode, has_lora) is not ``priced``."""
    known = set(priced)
    if not known:
        return
    modes = {mode for mode, _ in known}
    others = " and ".join(str(mode) for mode in _CAPTURED if mode in modes)
    with_lora = {case > 0 for case in lora_cases(config)}
    planned, _ = resolve_mode(config)
    for mode in _CAPTURED:
        if not planned.has_mode(mode):
            continue
        if mode not in modes:
            yield (
                f"there are no figures of {mode} graphs: they are priced as {others} ones of "
                "the same size"
            )
            continue
        for has_lora in sorted(with_lora):
            if (mode, has_lora) not in known:
                which, instead = ("with", "without") if has_lora else ("without", "with")
                yield (
                    f"there are no figures of {mode} graphs {which} adapters: they are priced "
                    f"as those {instead}"
                )


def widest(
    keys: Iterable[Key],
) -> dict[tuple[int, ...], int]:
    """The most tokens with each ``sizes``, for which static buffers are made."""
    found: dict[tuple[int, ...], int] = {}
    for _, descriptor in keys:
        most = found.get(descriptor.sizes, 0)
        found[descriptor.sizes] = max(most, descriptor.num_tokens)
    return found


def static_bytes(
    config: Config,
    num_tokens: int,
    sizes: tuple[int, ...] = (),
) -> int:
    """Exact, as ``buffers.static.StaticBuffers`` allocates them.

    ``num_tokens`` is the largest capture size with ``sizes`` in the dimensions after the first.
    """
    reqs = min(num_tokens, config.scheduler.max_num_seqs)
    total = 0
    for spec in config.tensors_at(sizes).values():
        bits = re.search(r"\d+", spec.dtype)  # bool has none
        itemsize = int(bits[0]) // 8 if bits else 1
        extents = [extent.size(num_tokens, reqs) for extent in spec.extents]
        total += itemsize * math.prod(extents)
    return total


def representative_keys(
    keys: Sequence[Key],
    max_num_seqs: int,
) -> tuple[Key, ...]:
    """Keys whose costs tell those of the others, in capture order.

    Of each mode, without and with LoRA adapters: the largest size, the largest in which every token
    can be a request, because costs bend there, and the smallest, above 1 if possible: kernels for a
    single row differ.
    """
    lanes: dict[tuple[CUDAGraphMode, bool], dict[int, Key]] = {}
    # of the LoRA cases, the one for the most stays
    for key in sorted(keys, key=lambda key: key[1].num_active_loras):
        mode, descriptor = key
        lane = mode, descriptor.has_lora
        by_size = lanes.setdefault(lane, {})
        by_size[descriptor.elements] = key
    chosen = set()
    for by_size in lanes.values():
        small = min((size for size in by_size if size > 1), default=1)
        bend = max((size for size in by_size if size <= max_num_seqs), default=small)
        for size in (small, bend, max(by_size)):
            chosen.add(by_size[size])
    return tuple(key for key in keys if key in chosen)


def interpolate(
    points: Sequence[tuple[int, float]],
    at: int,
) -> float:
    """Linear between neighbours of ascending (tokens, value), also beyond the ends."""
    if len(points) == 1:
        return points[0][1]
    place = bisect_left(points, at, key=itemgetter(0))
    upper = min(max(place, 1), len(points) - 1)
    left, low = points[upper - 1]
    right, high = points[upper]
    return low + (high - low) * (at - left) / (right - left)


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
        notes=["the costs are estimated as on an H200: --costs measure has those of this machine"],
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


MIN_BLOCK_SIZE = 512  # kMinBlockSize: sizes are rounded up to it
SMALL_SIZE = 1 << 20  # kSmallSize: most bytes in small segments
SMALL_BUFFER = 2 << 20  # kSmallBuffer: a small segment
LARGE_BUFFER = 20 << 20  # kLargeBuffer, large_segment_size(): a segment between the limits
MIN_LARGE_ALLOC = 10 << 20  # kMinLargeAlloc: from here segments fit their request
ROUND_LARGE = 2 << 20  # kRoundLarge: ... rounded up to it
_Block = tuple[int, int]  # size, address


class Allocation(NamedTuple):
    """A block that was taken or given back.

    Attributes:
        block: Unique among living blocks.
        nbytes: Bytes asked for; None: given back.
    """

    block: int
    nbytes: int | None


def round_size(nbytes: int) -> int:
    """Bytes of a request's block (``round_size``)."""
    return max(-(-nbytes // MIN_BLOCK_SIZE), 1) * MIN_BLOCK_SIZE


def segment_size(size: int) -> int:
    """Bytes of a new segment (``get_allocation_size``)."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def unit_of(pools: Iterable[int]) -> int:
    """Bytes that these pools grow by: a segment, or 1 on the tape."""
    return 1 if any(nbytes % ROUND_LARGE for nbytes in pools) else ROUND_LARGE


class CachingPool:
    """A private pool, which keeps its ``reserved`` bytes."""

    def __init__(self) -> None:
        self.reserved = 0
        self._end = 0  # the address beyond the last segment
        self._free: tuple[list[_Block], list[_Block]] = ([], [])
        self._size: dict[int, int] = {}  # of free blocks by address
        self._start: dict[int, int] = {}  # free blocks by the address beyond
        self._taken: dict[int, _Block] = {}

    def run(self, events: Iterable[Allocation]) -> None:
        """Take and give back blocks; 0 bytes take none, unknown ones are ignored."""
        for event in events:
            if event.nbytes is None:
                self._release(event.block)
                continue
            if not event.nbytes:
                continue
            # get_free_block: the smallest that fits, the lowest of equals
            size = round_size(event.nbytes)
            is_small = size <= SMALL_SIZE
            free = self._free[is_small]
            place = bisect_left(free, (size, -1))
            if place < len(free):
                _, address = free[place]
                found = self._remove(address, is_small)
            else:
                found = segment_size(size)
                address = self._end
                self.reserved += found
                self._end += found + 1  # no neighbour of the next segment
            rest = found - size
            least = MIN_BLOCK_SIZE if is_small else SMALL_SIZE + 1  # should_split
            if rest >= least:
                self._insert(address + size, rest, is_small)
                found = size
            self._taken[event.block] = found, address

    def _release(self, block: int) -> None:
        if block not in self._taken:
            return
        size, address = self._taken.pop(block)
        is_small = size <= SMALL_SIZE
        before = self._start.get(address)
        if before is not None:
            size += self._remove(before, is_small)
            address = before
        if address + size in self._size:
            size += self._remove(address + size, is_small)
        self._insert(address, size, is_small)

    def _insert(self, address: int, size: int, is_small: bool) -> None:
        free = self._free[is_small]
        insort(free, (size, address))
        self._size[address] = size
        self._start[address + size] = address

    def _remove(
        self,
        address: int,
        is_small: bool,
    ) -> int:
        size = self._size.pop(address)
        del self._start[address + size]
        free = self._free[is_small]
        place = bisect_left(free, (size, address))
        del free[place]
        return size
