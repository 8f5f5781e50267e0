"""The search for the best sizes of all lanes under one budget: branch and bound over where the lanes end.

Note [Several lanes]
~~~~~~~~~~~~~~~~~~~~
A batch goes to the first of its lanes whose largest size holds it. So once it is fixed where each lane *ends*, it is
fixed which batches it runs, and the lanes have nothing to do with each other but the budget: each is Note [One lane] of
the optimizer, exactly and for every number of graphs, and a min-plus product shares the graphs out. The last lane
serves every batch that a graph may serve, and nothing comes after it but eager steps, so its end is found on the way.

What is left is to search over the ends of the others, and with two lanes that is one number. A *box* gives each of them
an interval [lo, hi]. At its upper corner the answer is computed exactly. From below, the box is bounded by what is sure
in all of it: a batch above hi passes the lane by, one up to lo is run by it (and the lane, cut at lo, costs no more
than any that ends later), and for one in between its best time of all is counted, and no graph. Boxes whose bound is
not below the best answer are dropped, the others are cut in pieces. When none is left the answer is proven; when the
effort runs out, the least bound of those left is the lower bound, and the gap is reported.

For several lanes there is a second bound: let all lanes share their graphs, so that a graph of one lane is one of every
lane. Each set of graphs becomes one lane with as many sizes or fewer, and no batch is run more slowly.

Note [Budgets]
~~~~~~~~~~~~~~
Memory is static(largest size) + pool(largest size of each mode) + workspaces + driver bytes of each key. The first two
follow from where lanes end, so they are exact in a corner, and at lo they are a lower bound for the box. Where the keys
of a mode cost the same, what numbers of graphs the budget pays for is exact as well.

Otherwise the cheapest key of each mode counts. That allows too much, so it gives a bound, and if the plan found can be
paid for all the same, the best one. If not, plans come from taking keys as dearer (at the dearest, what is found can be
paid for), and more bounds from prices on bytes and seconds: the least of time + price * cost, less price * budget, is
below every plan within the budget (a Lagrangian relaxation). What is left between the two is the gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from cgplan.optimizer.boxes import FREE, PIECES, Boxes, Limits, Prices
from cgplan.optimizer.paths import Floats, Ints
from cgplan.optimizer.problem import Problem

PROVEN = 1e-9  # relative gap that is taken for none
CURVE_PROVEN = 5e-4  # of each point of a curve
WHOLE = 64  # corners to begin with
STEPS = 8  # ends of a lane to try


@dataclass(frozen=True)
class Found:
    """What a search found, by the number of graphs: index k means at most k.

    Attributes:
        value: Total microseconds (times weight) of the best plan found; with prices, those included. inf: none.
        bound: What no plan can be below.
        ends: [K + 1, lanes but the last]: where the lanes of that plan end, as indices into their candidates.
    """

    value: Floats
    bound: Floats
    ends: Ints


def search(
    problem: Problem,
    limits: Limits,
    *,
    prices: Prices = FREE,
    caution: float = 0.0,
    curve: bool = False,
    effort: int = 1 << 24,
) -> Found:
    """The best plan within the limits, for each number of graphs up to ``limits.graphs``.

    Args:
        problem: Candidates and demands.
        limits: What may be spent.
        prices: On bytes and seconds.
        caution: See Boxes.
        curve: Whether every number of graphs is to be proven, or the largest alone.
        effort: Candidates times graphs times boxes to go through at most.
    """
    if not problem.lanes:
        nothing = np.full(limits.graphs + 1, problem.eager_total)
        return Found(nothing, nothing, np.zeros((limits.graphs + 1, 0), dtype=np.int64))
    boxes = Boxes(problem, limits, prices, caution)
    watched = slice(1 if curve else limits.graphs, None)
    tops = np.array([lane.sizes.size - 1 for lane in problem.lanes[:-1]], dtype=np.int64)
    best = _Incumbent(boxes, tops, effort // boxes.effort)
    best.look_around(watched)
    shared = boxes.shared_bound()
    low, high = np.zeros_like(tops)[None], tops[None]
    bound = np.full((1, limits.graphs + 1), -np.inf) if tops.any() else best.value[None]
    closed = best.value
    while True:
        gap = best.value * (1 - (CURVE_PROVEN if curve else PROVEN)) - np.maximum(bound, shared)
        hope = (low < high).any(axis=1) & (gap[:, watched] > 0).any(axis=1)
        closed = np.minimum(closed, bound[~hope].min(axis=0, initial=np.inf))
        low, high, bound, gap = low[hope], high[hope], bound[hope], gap[hope]
        if not hope.any() or best.left <= 0:
            break
        first = np.argsort(-gap[:, watched].max(axis=1), kind="stable")
        chosen, rest = first[: boxes.at_once], first[boxes.at_once :]
        lower, upper, parent = boxes.cut(low[chosen], high[chosen])
        below = np.maximum(best.improve(lower, upper), bound[chosen][parent])
        low, high = np.concatenate([low[rest], lower]), np.concatenate([high[rest], upper])
        bound = np.concatenate([bound[rest], below])
    least = np.minimum(np.minimum(best.value, closed), bound.min(axis=0, initial=np.inf))
    return Found(best.value, np.maximum(least, np.minimum(best.value, shared)), best.ends)


class _Incumbent:
    """The best plan so far for each number of graphs; ``left`` counts down the boxes that may still be looked at."""

    def __init__(self, boxes: Boxes, tops: Ints, left: int) -> None:
        graphs = boxes.limits.graphs
        self.boxes, self.tops, self.left = boxes, tops, left
        self.value = np.full(graphs + 1, boxes.problem.eager_total)
        self.ends = np.zeros((graphs + 1, tops.size), dtype=np.int64)

    def improve(self, low: Ints, high: Ints) -> Floats:
        """Take what the upper corners of boxes give; returns the bounds of the boxes."""
        found = []
        for start in range(0, len(low), PIECES * self.boxes.at_once):
            part = slice(start, start + PIECES * self.boxes.at_once)
            value, bound = self.boxes.evaluate(low[part], high[part])
            better = value.min(axis=0) < self.value
            self.ends[better] = high[part][value.argmin(axis=0)[better]]
            self.value = np.minimum(self.value, value.min(axis=0))
            found.append(bound)
        self.left -= len(low)
        return np.concatenate(found)

    def look_around(self, watched: slice) -> None:
        """Where boxes have many sides, they close in slowly: begin with lanes that are whole or empty, and go on with
        those that differ from the best so far in the end of one lane, as long as that helps.
        """
        sides = self.tops.size
        whole = list(product((0, 1), repeat=sides))[-WHOLE:]
        corners = np.array(whole, dtype=np.int64).reshape(len(whole), sides) * self.tops
        while True:
            before = self.value
            self.improve(corners, corners)
            if sides < 2 or self.left <= 0 or np.array_equal(before, self.value):
                break
            around = [
                np.where(np.arange(sides) == lane, self.tops * step // STEPS, ends)
                for ends in np.unique(self.ends[watched], axis=0)
                for lane in range(sides)
                for step in range(STEPS + 1)
            ]
            corners = np.unique(np.array(around), axis=0)[: self.left]
