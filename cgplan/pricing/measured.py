"""The cost of graphs, from captures that were really made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

from cgplan.config import Config
from cgplan.errors import ReportError
from cgplan.modes import CUDAGraphMode, Key
from cgplan.planning.build import build_plan, lora_cases, resolve_mode
from cgplan.planning.costs import GraphCosts
from cgplan.planning.plan import Plan
from cgplan.planning.vllm_log import StartLog
from cgplan.pricing.allocator import unit_of
from cgplan.units import counted, format_bytes, grouped

_CAPTURED = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)


def stand_in_notes(config: Config, priced: Iterable[tuple[CUDAGraphMode, bool]]) -> Iterator[str]:
    """A note for each kind of graph that the configuration may have and that is not ``priced``,
    (mode, has_lora).
    """
    known = set(priced)
    measured = [mode for mode in _CAPTURED if any(found is mode for found, _ in known)]
    mode_of_plan, _ = resolve_mode(config)
    for mode in filter(mode_of_plan.has_mode, _CAPTURED if known else ()):
        if mode not in measured:
            others = " and ".join(map(str, measured))
            yield (
                f"there are no figures of {mode} graphs: they are priced as {others} ones of "
                "the same size"
            )
            continue
        for has_lora in sorted({case > 0 for case in lora_cases(config)}):
            if (mode, has_lora) not in known:
                which, instead = ("with", "without") if has_lora else ("without", "with")
                yield (
                    f"there are no figures of {mode} graphs {which} adapters: they are priced "
                    f"as those {instead}"
                )


@dataclass(frozen=True)
class CaseCost:
    """The saving of a plan without one of its LoRA cases, whose batches then take the next larger
    one.

    ``bytes`` of device memory and ``seconds`` that its ``graphs`` add to those of the other cases;
    None: not known.
    """

    num_active_loras: int
    graphs: int
    bytes: int | None
    seconds: float | None


def case_costs(plan: Plan, costs: GraphCosts | None) -> tuple[CaseCost, ...]:
    """The marginal cost of each LoRA case, fewest adapters first; empty without LoRA.

    The cases share the pool, the static buffers and the workspaces, so that their marginal costs do
    not add up to the cost of the plan.
    """
    if plan.max_loras is None:
        return ()
    found = []
    for case in plan.lora_cases:
        rest = [key for key in plan.keys if key[1].num_active_loras != case]
        nbytes, seconds = None, None
        if costs is not None:
            whole, others = costs.of(plan.keys), costs.of(rest)
            nbytes, seconds = whole.total_bytes - others.total_bytes, whole.seconds - others.seconds
        found.append(CaseCost(case, len(plan.keys) - len(rest), nbytes, seconds))
    return tuple(found)


def interpolate(points: Sequence[tuple[int, float]], at: int) -> float:
    """The affine function through neighbouring (tokens, value), extended beyond the outer ones; a
    lone point holds everywhere. Points are ascending.
    """
    if len(points) == 1:
        return points[0][1]
    upper = next((i for i in range(1, len(points) - 1) if points[i][0] >= at), len(points) - 1)
    (left, low), (right, high) = points[upper - 1], points[upper]
    return low + (high - low) * (at - left) / (right - left)


@dataclass(frozen=True)
class MeasuredKey:
    """The cost of one captured key, as ``KeyCost``; with `dims`, ``num_tokens`` are the elements of
    its box.
    """

    mode: CUDAGraphMode
    num_active_loras: int
    num_tokens: int
    driver_bytes: float
    seconds: float

    @property
    def has_lora(self) -> bool:
        return self.num_active_loras > 0


class MeasuredCosts(GraphCosts):
    """Costs from captures that were really made; sizes between those that were captured are
    interpolated.

    Graphs of a mode that was not captured are priced as those of the others, and graphs with
    adapters as those without where there are no others (or the other way round); the notes say so.

    ``pools`` are, for each mode, (num_tokens, bytes of a pool that this size was captured into
    first), ascending.
    """

    estimated = False

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
        self._measured = grouped(
            ((key.mode, key.num_active_loras, key.num_tokens), key) for key in self._keys
        )
        self._lines: dict[tuple[CUDAGraphMode, bool, str], list[tuple[int, float]]] = {}
        self.notes = (
            *notes,
            *stand_in_notes(config, ((key.mode, key.has_lora) for key in self._keys)),
        )
        self._pools: dict[CUDAGraphMode, list[tuple[int, int]]] = {}
        # a pool into which a size has been captured holds every smaller one
        for mode, points in pools.items():
            sizes, found = zip(*sorted(points), strict=True)
            self._pools[mode] = list(zip(sizes, accumulate(found, max), strict=True))
        self._unit = unit_of(nbytes for points in pools.values() for _, nbytes in points)

    @classmethod
    def from_report(cls, report: Any, config: Config, notes: Iterable[str] = ()) -> MeasuredCosts:
        """Costs from a CaptureReport of the same model, of which ``records``, ``workspace_bytes``
        and ``origin`` are read; ``notes`` say where it was another model.

        Driver memory, which the driver takes in chunks, is spread over the keys of a mode by their
        nodes. A report says of a mode's largest size alone how large a pool it needs; those of
        smaller ones are taken in proportion. Raises ReportError for a report of no key.
        """
        records = tuple(report.records)
        if not records:
            raise ReportError(
                "the report has no captured keys, so it says nothing of costs",
                remedy="Give the report of a capture with `capture_policy: eager`, or --costs "
                "measure.",
            )
        by_mode = {
            mode: [r for r in records if r.mode is mode] for mode in {r.mode for r in records}
        }
        per_node = {  # per key where nodes were not counted
            mode: sum(r.driver_bytes or 0 for r in of_mode)
            / max(sum(r.nodes or 1 for r in of_mode), 1)
            for mode, of_mode in by_mode.items()
        }
        pools, pool = dict[CUDAGraphMode, tuple[tuple[int, int], ...]](), 0
        for record in records:
            pool += record.pool_growth
            pools[record.mode] = (
                (0, 0),
                (max(r.descriptor.elements for r in by_mode[record.mode]), pool),
            )
        first = [r.seconds for r in by_mode[records[0].mode][:2]]
        # how much longer the first key took than the next one of its mode
        once = max(first[0] - first[-1], 0.0)
        keys = [
            MeasuredKey(
                mode=r.mode,
                num_active_loras=r.descriptor.num_active_loras,
                num_tokens=r.descriptor.elements,
                driver_bytes=per_node[r.mode] * (r.nodes or 1),
                seconds=r.seconds - (0.0 if index else once),
            )
            for index, r in enumerate(records)
        ]
        return cls(
            keys,
            pools,
            config,
            source=f"measured: {report.origin}",
            workspace_bytes=report.workspace_bytes,
            once_seconds=once,
            notes=notes,
        )

    @classmethod
    def from_vllm_log(cls, log: StartLog, config: Config, path: str) -> MeasuredCosts:
        """Estimates from what vLLM logs of all graphs of one start together. Raises ReportError for
        a log of no graph.

        Each graph takes the same seconds. A log of level DEBUG tells the memory of a mode's largest
        graph from that of each other one; else a graph takes 1 MiB, the least that vLLM itself
        expects of the driver, and the pool the rest. A pool is in proportion to its largest size.
        """
        plan = build_plan(config)
        own = grouped((mode, key.num_tokens) for mode, key in plan.keys)
        graphs = log.graphs or {mode: (len(sizes), max(sizes)) for mode, sizes in own.items()}
        total = sum(count for count, _ in graphs.values())
        if not total:
            raise ReportError(
                f"{path}: vLLM captured no graph", remedy="Give the log of a start with graphs."
            )
        each = min(1 << 20, log.bytes / total)
        by_mode = {
            mode: log.by_mode.get(mode, (log.bytes - (total - 1) * each, each)) for mode in graphs
        }
        pools = {mode: max(first - other, 0.0) for mode, (first, other) in by_mode.items()}
        known = max(pools.values()) + sum(
            by_mode[mode][1] * count for mode, (count, _) in graphs.items()
        )
        scale = log.bytes / known if known else 0.0  # to what the captures really took
        largest = {
            mode: tokens or max(own.get(mode, [plan.max_capture_size]))
            for mode, (_, tokens) in graphs.items()
        }
        keys = [
            MeasuredKey(mode, case, largest[mode], by_mode[mode][1] * scale, log.seconds / total)
            for mode, case in product(graphs, lora_cases(config))
        ]
        how = (
            "what vLLM estimates for its mode"
            if log.by_mode
            else f"{format_bytes(round(each))}, the pool the rest"
        )
        notes = [
            f"{path} has the costs of {counted(total, 'graph')} together, "
            f"{format_bytes(log.bytes)} and "
            f"{log.seconds:.0f} s: each graph was given the same seconds and, of memory, {how}"
        ]
        if total != len(plan.keys):
            notes.append(
                f"{path} is of a start with {counted(total, 'graph')}, the configuration has "
                f"{len(plan.keys)}"
            )
        # one pool for all modes
        top = largest if log.by_mode else dict.fromkeys(graphs, max(largest.values()))
        points = {mode: ((0, 0), (top[mode], round(pool * scale))) for mode, pool in pools.items()}
        costs = cls(keys, points, config, source=f"the log of vLLM, {path}", notes=notes)
        costs.estimated = True
        return costs

    def pool_bytes(self, mode: CUDAGraphMode, num_tokens: int) -> int:
        """Other sizes than the measured ones lie on the line through their neighbours; smaller ones
        take at least their share of the smallest. Rounded up to whole segments where pools consist
        of them.
        """
        points = self._pools.get(mode)
        if not points:  # a mode that was not measured: the largest pool of the others
            return max(
                (
                    self.pool_bytes(other, num_tokens)
                    for other, found in self._pools.items()
                    if found
                ),
                default=0,
            )
        above = next((point for point in points if point[0] >= num_tokens), None)
        if above is not None and above[0] == num_tokens:
            return above[1]
        (small, least), unit = points[0], self._unit
        share = least * num_tokens / small if num_tokens < small else 0.0
        nbytes = math.ceil(max(interpolate(points, num_tokens), share) / unit) * unit
        return nbytes if above is None else min(nbytes, above[1])

    def driver_bytes(self, key: Key) -> int:
        """On average, because the driver takes memory in chunks."""
        return max(round(self._of(key, "driver_bytes")), 0)

    def seconds(self, key: Key) -> float:
        return self._of(key, "seconds")

    def _of(self, key: Key, figure: str) -> float:
        """A figure of a key: as measured of it, else from those like it, whatever their number of
        adapters, if they have some; else from those of its mode, else from all.

        No size takes less than the least that was measured: times are noisy, and a line through two
        of them, drawn beyond them, would end at graphs that cost nothing.
        """
        mode, descriptor = key
        name = mode, descriptor.num_active_loras, descriptor.elements
        if itself := self._measured.get(name):
            return float(sum(getattr(k, figure) for k in itself) / len(itself))
        line = mode, descriptor.has_lora, figure
        if line not in self._lines:
            self._lines[line] = self._line(*line)
        points = self._lines[line]
        if not points:
            return 0.0
        return max(interpolate(points, descriptor.elements), min(least for _, least in points))

    def _line(self, mode: CUDAGraphMode, has_lora: bool, figure: str) -> list[tuple[int, float]]:
        alike = [k for k in self._keys if (k.mode, k.has_lora) == (mode, has_lora)]
        alike = alike or [k for k in self._keys if k.mode is mode] or [*self._keys]
        by_size = grouped((measured.num_tokens, getattr(measured, figure)) for measured in alike)
        return [(size, sum(found) / len(found)) for size, found in sorted(by_size.items())]
