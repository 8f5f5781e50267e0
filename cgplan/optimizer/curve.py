"""The Pareto curve, and what stands beside it: ladders, and sizes that are not worth a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from cgplan.config import Config
from cgplan.errors import PlanError
from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.evidence import LadderPoint, NotWorth, ParetoPoint
from cgplan.optimizer.lanes import (
    Routes,
    expected_step,
    key_of,
    lanes_of,
    largest_of,
    may_serve,
    padded_share,
    serve,
    stride_of,
)
from cgplan.optimizer.left_out import NO_BATCH
from cgplan.optimizer.problem import Problem
from cgplan.optimizer.search import Limits, Search
from cgplan.planning.build import LADDERS, build_plan
from cgplan.planning.costs import GraphCosts
from cgplan.planning.plan import Plan, capture_order
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes

FIRST, LAST = 64, 128  # graphs that curves go up to
MOST = 256  # graphs of a plan
CLOSE = 0.01  # share of what graphs can bring at all that may be left when a curve has gone far enough
ALIKE = 1e-3  # relative difference that steps are called as long with
WORTH = 1e-4  # relative gain below which graphs are not worth a word
NO_GAIN = 0.01  # relative distance from the bound below which other sizes bring no gain in step time


@dataclass(frozen=True)
class Curve:
    """The best plans by their number of graphs, if nothing else is limited.

    Attributes:
        found: Index k: at most k graphs.
        graphs: K, the largest number.
    """

    problem: Problem
    plan: Plan
    costs: GraphCosts | None
    found: Search

    @classmethod
    def of(cls, problem: Problem, plan: Plan, costs: GraphCosts | None, most: int | None) -> Curve:
        """A curve of 64 graphs; of 128 where 64 do not bring 99% of what graphs can bring, or ``most`` allows more."""
        graphs = FIRST
        while True:
            found = Search(problem, Limits(graphs), curve=True)
            curve = cls(problem, plan, costs, found)
            if graphs >= LAST or (curve.enough() is not None and (most or 0) <= graphs):
                return curve
            graphs *= 2

    @property
    def graphs(self) -> int:
        """The largest number of graphs."""
        return self.found.value.size - 1

    def expected_us(self, graphs: int) -> float:
        """Mean microseconds of a step."""
        return float(self.found.value[graphs]) / self.problem.weight

    def fewest(self, expected_us: float) -> int | None:
        """The fewest graphs with which steps are no longer than that; None if the curve does not get there."""
        enough = np.flatnonzero(self.found.value <= expected_us * self.problem.weight * (1 + 1e-9))
        return int(enough[0]) if enough.size else None

    def enough(self) -> int | None:
        """The fewest graphs that bring 99% of what a graph for every size would; None if the curve is too short."""
        eager, bound = self.problem.eager_total / self.problem.weight, self.problem.infinite_us
        return self.fewest(bound + CLOSE * (eager - bound))

    def keys(self, graphs: int) -> tuple[Key, ...]:
        """The keys of a point, in capture order."""
        if graphs == 0:
            return ()
        return self.keys_of(self.found.chosen(graphs))

    def all_keys(self) -> tuple[Key, ...]:
        """A key for every candidate of every lane."""
        return self.keys_of(range(1, lane.sizes.size) for lane in self.problem.lanes)

    def keys_of(self, chosen: Iterable[Iterable[int]]) -> tuple[Key, ...]:
        """The keys of chosen candidates, in capture order."""
        return capture_order(
            key_of(lane.lane, int(lane.sizes[index]), self.plan)
            for lane, picked in zip(self.problem.lanes, chosen, strict=True)
            for index in picked
        )

    def point(self, graphs: int) -> ParetoPoint:
        """A point with its costs."""
        bytes_, seconds = price(self.costs, self.keys(graphs)) if self.costs is not None else (None, None)
        return ParetoPoint(graphs=graphs, expected_us=self.expected_us(graphs), bytes=bytes_, seconds=seconds)

    def points(self) -> tuple[ParetoPoint, ...]:
        """From one graph to where more bring less than 0.01%."""
        last = self.fewest(self.expected_us(self.graphs) * (1 + WORTH)) or 0
        return tuple(self.point(graphs) for graphs in range(1, last + 1))


def price(costs: GraphCosts | None, keys: tuple[Key, ...]) -> tuple[int | None, float | None]:
    """Bytes and seconds of keys, in capture order; None where costs are not known."""
    if costs is None:
        return None, None
    cost = costs.of(keys)
    return cost.total_bytes, cost.seconds


def ladder_points(config: Config, traffic: Traffic, times: StepTimes, curve: Curve) -> Iterator[LadderPoint]:
    """What each ladder gives that fits the configuration, and the sizes that it lists, first."""
    given, most = config.compilation.cudagraph_capture_sizes, config.compilation.max_cudagraph_capture_size
    listed = isinstance(given, tuple)
    for name in ("configured", *LADDERS) if listed else LADDERS:
        sizes = {"cudagraph_capture_sizes": name, "max_cudagraph_capture_size": None if listed else most}
        asked = config.compilation if name == "configured" else config.compilation.model_copy(update=sizes)
        try:
            keys = build_plan(config.model_copy(update={"compilation": asked})).keys
        except PlanError:
            continue
        served = serve(keys, traffic, times)
        expected = expected_step(served)
        equal, alike = curve.fewest(expected), curve.fewest(expected * (1 + ALIKE))
        bytes_, seconds = price(curve.costs, keys)
        yield LadderPoint(
            name=name,
            graphs=len(keys),
            expected_us=expected,
            bytes=bytes_,
            seconds=seconds,
            padding=padded_share(served),
            unused=len(keys) - sum(part.lane is not None for part in served),
            equal=None if equal is None else curve.point(equal),
            alike=None if alike is None else curve.point(alike),
            no_gain=expected <= (1 + NO_GAIN) * curve.problem.infinite_us,
        )


def not_worth(plan: Plan, traffic: Traffic, times: StepTimes) -> Iterator[NotWorth]:
    """Sizes of the plan's lanes at which a graph brings nothing: no batch would run in it, none that comes there is as
    large, or eager steps take no longer. LoRA cases that were not planned for are left out.
    """
    routes, lanes = Routes(plan.keys), lanes_of(plan.mode, plan.lora_cases)
    runs = [(batch, routes.of(batch)) for batch, _ in traffic.histogram]
    ranks = [(batch, len(lanes) if route is None else lanes.index(route[0])) for batch, route in runs]
    planned = times.told_apart(plan.lora_cases)
    for rank, lane in enumerate(lanes):
        if lane.num_active_loras not in planned:
            continue
        largest, stride, case = largest_of(lane, plan), stride_of(lane, plan), lane.num_active_loras
        graph, eager = (times.curve(m, largest, case) for m in (lane.mode, CUDAGraphMode.NONE))
        worth = np.flatnonzero(graph < eager)
        end = int(worth[-1]) // stride * stride if worth.size else 0
        # Batches that graphs of an earlier lane run do not come here.
        wanted = max((batch.num_tokens for batch, at in ranks if at >= rank and may_serve(lane, batch)), default=0)
        wanted = min(-(-wanted // stride) * stride, largest)
        if wanted < end:
            reason = f"no batch of this lane is as large: {wanted} does as well" if wanted else NO_BATCH
            yield NotWorth(**lane._asdict(), first=wanted + 1, last=end, reason=reason)
        if end < largest:
            yield NotWorth(**lane._asdict(), first=end + 1, last=largest, reason="an eager step takes no longer")
