"""The Pareto curve of graphs against step time, and the ladders beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from cgplan.modes import Key
from cgplan.optimizer.evidence import LadderPoint, ParetoPoint
from cgplan.optimizer.lanes import expected_step, key_of, padded_share, serve
from cgplan.optimizer.problem import Problem
from cgplan.optimizer.search import Limits, Search
from cgplan.planning.costs import GraphCosts
from cgplan.planning.plan import Plan, capture_order
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes

FIRST, LAST = 64, 128  # graphs that curves go up to
MOST = 256  # graphs of a plan
CLOSE = 0.01  # share of the time that graphs can save at all that may be left when a curve has gone far enough
ALIKE = 1e-3  # relative difference between steps that count as equally long
WORTH = 1e-4  # relative gain below which graphs are not worth a word
NO_GAIN = 0.01  # relative distance from the bound below which other sizes bring no gain in step time


@dataclass(frozen=True)
class Curve:
    """The best plans by their number of graphs, if nothing else is limited.

    Attributes:
        plan: Bounds of a batch, as the keys need them.
        found: Index k: at most k graphs.
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
            curve = cls(problem, plan, costs, Search(problem, Limits(graphs), curve=True))
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
        return self.keys_of(self.found.chosen(graphs))

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


def ladder_points(
    ladders: Mapping[str, Plan], traffic: Traffic, times: StepTimes, curve: Curve
) -> Iterator[LadderPoint]:
    """Expected step, costs and padding of each ladder's plan, and the points of the curve that equal it."""
    for name, plan in ladders.items():
        served = serve(plan.keys, traffic, times)
        expected = expected_step(served)
        equal, alike = curve.fewest(expected), curve.fewest(expected * (1 + ALIKE))
        bytes_, seconds = price(curve.costs, plan.keys)
        yield LadderPoint(
            name=name,
            graphs=len(plan.keys),
            expected_us=expected,
            bytes=bytes_,
            seconds=seconds,
            padding=padded_share(served),
            unused=len(plan.keys) - sum(part.lane is not None for part in served),
            equal=None if equal is None else curve.point(equal),
            alike=None if alike is None else curve.point(alike),
            no_gain=expected <= (1 + NO_GAIN) * curve.problem.infinite_us,
        )
