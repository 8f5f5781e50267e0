"""The Pareto curve of graphs against step time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cgplan.modes import Key
from cgplan.optimizer.evidence import ParetoPoint
from cgplan.optimizer.lanes import key_of
from cgplan.optimizer.problem import Problem
from cgplan.optimizer.search import Limits, Search
from cgplan.planning.costs import GraphCosts
from cgplan.planning.plan import Plan, capture_order

FIRST, LAST = 64, 128  # graphs that curves go up to
CLOSE = 0.01  # share of the time that graphs can save at all that may be left when a curve has gone far enough
WORTH = 1e-4  # relative gain below which graphs are not worth a word


@dataclass(frozen=True)
class Curve:
    """The best plans by their number of graphs, if nothing else is limited; ``plan`` has the bounds of a batch."""

    problem: Problem
    plan: Plan
    costs: GraphCosts | None
    found: Search

    @classmethod
    def of(cls, problem: Problem, plan: Plan, costs: GraphCosts | None, most: int | None) -> Curve:
        """A curve of 64 graphs; of 128 where 64 do not bring 99% of what graphs can bring, or ``most`` allows more."""
        curve = cls(problem, plan, costs, Search(problem, Limits(FIRST), curve=True))
        if curve.enough() is None or (most or 0) > FIRST:
            curve = cls(problem, plan, costs, Search(problem, Limits(LAST), curve=True))
        return curve

    @property
    def graphs(self) -> int:
        return self.found.value.size - 1

    def expected_us(self, graphs: int) -> float:
        return float(self.found.value[graphs]) / self.problem.weight

    def fewest(self, expected_us: float) -> int | None:
        """The fewest graphs with which steps are no longer than that; None if the curve does not get there."""
        enough = np.flatnonzero(self.found.value <= expected_us * self.problem.weight * (1 + 1e-9))
        return int(enough[0]) if enough.size else None

    def enough(self) -> int | None:
        """The fewest graphs that bring 99% of what a graph for every size would; None if the curve is too short."""
        eager, bound = self.problem.eager_total / self.problem.weight, self.problem.infinite_us
        return self.fewest(bound + CLOSE * (eager - bound))

    def last(self) -> int:
        """The number of graphs from which more bring less than 0.01%."""
        return self.fewest(self.expected_us(self.graphs) * (1 + WORTH)) or 0

    def keys_of(self, chosen: Iterable[Iterable[int]]) -> tuple[Key, ...]:
        return capture_order(
            key_of(lane.lane, int(lane.sizes[index]), self.plan)
            for lane, picked in zip(self.problem.lanes, chosen, strict=True)
            for index in picked
        )

    def price(self, keys: tuple[Key, ...]) -> dict[str, Any]:
        """``bytes`` and ``seconds`` of keys, in capture order; None where costs are not known."""
        cost = None if self.costs is None else self.costs.of(keys)
        return {"bytes": cost and cost.total_bytes, "seconds": cost and cost.seconds}

    def point(self, graphs: int | None) -> ParetoPoint | None:
        if graphs is None:
            return None
        cost = self.price(self.keys_of(self.found.chosen(graphs)))
        return ParetoPoint(graphs=graphs, expected_us=self.expected_us(graphs), **cost)
