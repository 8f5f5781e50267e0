"""The cost of graphs: device memory and start-up time, from real captures."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from operator import itemgetter
from statistics import fmean
from typing import Any

from cgplan.config import Config
from cgplan.errors import ReportError
from cgplan.modes import CUDAGraphMode, Key
from cgplan.planning.build import build_plan, lora_cases, resolve_mode
from cgplan.planning.plan import KeyCost, Plan, Predicted
from cgplan.planning.vllm_log import StartLog
from cgplan.pricing.allocator import unit_of
from cgplan.units import counted, format_bytes, grouped

_CAPTURED = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
Points = list[tuple[int, int]]  # tokens, bytes


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
    chosen: set[Key] = set()
    for by_size in lanes.values():
        small = min((size for size in by_size if size > 1), default=1)
        bend = max((size for size in by_size if size <= max_num_seqs), default=small)
        for size in (small, bend, max(by_size)):
            chosen.add(by_size[size])
    return tuple(key for key in keys if key in chosen)


@dataclass(frozen=True)
class CaseCost:
    """What one LoRA case adds to a plan; None: not known."""

    num_active_loras: int
    graphs: int
    bytes: int | None
    seconds: float | None


def case_costs(
    plan: Plan,
    costs: GraphCosts | None,
) -> tuple[CaseCost, ...]:
    """The marginal cost of each LoRA case; they do not add up, because cases share memory."""
    if plan.max_loras is None:
        return ()
    whole = costs and costs.of(plan.keys)
    found = []
    for case in plan.lora_cases:
        rest = [key for key in plan.keys if key[1].num_active_loras != case]
        nbytes = None
        seconds = None
        if costs and whole:
            others = costs.of(rest)
            nbytes = whole.total_bytes - others.total_bytes
            seconds = whole.seconds - others.seconds
        graphs = len(plan.keys) - len(rest)
        found.append(CaseCost(case, graphs, nbytes, seconds))
    return tuple(found)


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
    ``pool_bytes``, ``driver_bytes`` and ``seconds``.

    Attributes:
        source, estimated, notes, workspace_bytes, model: As in ``Predicted``.
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
        self._lines = {}
        cases = product(
            _CAPTURED,
            (False, True),
            ("driver_bytes", "seconds"),
        )
        for case in cases:
            self._lines[case] = self._line(*case)
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

        Without DEBUG lines a graph takes 1 MiB, vLLM's own least, and the pool the rest.
        """
        plan = build_plan(config)
        planned = Counter(mode for mode, _ in plan.keys)
        graphs = log.graphs or {mode: (count, 0) for mode, count in planned.items()}
        total = sum(count for count, _ in graphs.values())
        if not total:
            raise ReportError(
                f"{path}: vLLM captured no graph", remedy="Give the log of a start with graphs."
            )
        least = min(1 << 20, log.bytes / total)
        known = 0.0
        driver = {}
        pools = {}
        largest = {}
        for mode, (count, tokens) in graphs.items():
            rest = log.bytes - (total - 1) * least
            first, each = log.by_mode.get(mode, (rest, least))
            driver[mode] = each
            known += each * count
            pools[mode] = max(first - each, 0.0)
            largest[mode] = tokens or max(log.sizes, default=plan.max_capture_size)
        known += max(pools.values())
        scale = log.bytes / known if known else 0.0  # to what captures took
        seconds = log.seconds / total
        keys = []
        points = {}
        for mode in graphs:
            nbytes = driver[mode] * scale
            for case in lora_cases(config):
                keys.append(MeasuredKey(mode, case, largest[mode], nbytes, seconds))
            # one pool for all modes
            top = largest[mode] if log.by_mode else max(largest.values())
            points[mode] = [(0, 0), (top, round(pools[mode] * scale))]
        how = f"{format_bytes(round(least))}, the pool the rest"
        if log.by_mode:
            how = "what vLLM estimates for its mode"
        notes = [
            *log.doubts(),
            *log.of_other_options(plan),
            f"{path} has the costs of {counted(total, 'graph')} together, "
            f"{format_bytes(log.bytes)} and {log.seconds:.0f} s: each graph was given the same "
            f"seconds and, of memory, {how}",
        ]
        if log.drafts:
            notes.append(f"{path} is of a start with drafts: each graph has its share of theirs")
        source = f"the log of vLLM, {path}"
        if plan.draft_keys and not log.drafts:
            source += " (no graph of the draft model)"
        costs = cls(keys, points, config, source=source, notes=notes)
        costs.estimated = True
        costs.model = log.model or ""
        return costs

    def of(self, keys: Sequence[Key]) -> Predicted:
        """The cost of capturing these keys, in this order, into one pool."""
        held = 0
        costs: list[KeyCost] = []
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
        line = []
        for tokens, found in sorted(by_size.items()):
            line.append((tokens, fmean(found)))
        return line
