"""The best plan that a budget pays for, and how far from the best it may be."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cgplan.optimizer.boxes import Boxes, Limits, Prices
from cgplan.optimizer.problem import Problem
from cgplan.optimizer.search import PROVEN, Found, search

Chosen = tuple[tuple[int, ...], ...]
TRIALS = 6  # degrees of caution to try
SWEEPS = 12  # prices to try


@dataclass(frozen=True)
class Best:
    """The best plan that was found within the limits.

    Attributes:
        chosen: Candidates of each lane, ascending, as indices.
        least: Microseconds, times weight, of the best plan that was found, which may have a few graphs more.
        bound: What no plan within the limits can be below.
    """

    chosen: Chosen
    least: float
    bound: float


def best_plan(problem: Problem, limits: Limits, *, tolerance: float = 0.0, effort: int = 1 << 24) -> Best:
    """The best plan within the limits; of those within ``tolerance`` (relative) of it, the one with the fewest graphs.

    Exact with one lane, and with two as long as the effort lasts, if nothing but graphs is limited or all keys of a
    mode cost the same; otherwise ``bound`` says how good it is. It may have no graph.
    """
    limits = replace(limits, graphs=_payable(problem, limits))
    found = search(problem, limits, effort=effort)
    bound = float(found.bound[-1])
    chosen = _fewest(Boxes(problem, limits), found, tolerance)
    if limits.pays_for(*problem.costs_of(chosen)):
        return Best(chosen, min(float(found.value[-1]), problem.total_of(chosen)), bound)
    few = replace(limits, graphs=min(limits.graphs, sum(map(len, chosen)) + 1))  # fewer if keys are dearer, as a rule
    plans = _cautious(problem, few, effort // 4)
    swept, bounds = _swept(problem, limits, effort // 4)
    nothing: Chosen = ((),) * len(problem.lanes)
    best = _filled(problem, limits, min([nothing, *plans, *swept], key=problem.total_of))
    total = problem.total_of(best)
    return Best(best, total, min(max(bound, *bounds), total))


def _payable(problem: Problem, limits: Limits) -> int:
    """How many graphs the limits pay for at most, if they are the cheapest."""
    low, high = 0, limits.graphs
    while low < high:
        middle = (low + high + 1) // 2
        if limits.pays_for(middle, *problem.cheapest(middle)):
            low = middle
        else:
            high = middle - 1
    return low


def _fewest(boxes: Boxes, found: Found, tolerance: float) -> Chosen:
    enough = found.value <= found.value[-1] * (1 + max(tolerance, PROVEN))
    return _chosen(boxes, found, int(np.flatnonzero(enough)[0]))


def _chosen(boxes: Boxes, found: Found, graphs: int) -> Chosen:
    return tuple(tuple(sizes) for sizes in boxes.sizes_at(found.ends[graphs], graphs))


def _cautious(problem: Problem, limits: Limits, effort: int) -> list[Chosen]:
    """Plans within the limits that come from assuming keys to be dearer, no more than it takes."""
    plans: list[Chosen] = []
    low, high, caution = 0.0, 1.0, 1.0
    for _ in range(TRIALS):
        found = search(problem, limits, caution=caution, effort=effort // TRIALS)
        chosen = _chosen(Boxes(problem, limits, caution=caution), found, limits.graphs)
        if limits.pays_for(*problem.costs_of(chosen)):
            plans.append(chosen)
            high = caution
        else:
            low = caution
        caution = (low + high) / 2
    return plans


def _swept(problem: Problem, limits: Limits, effort: int) -> tuple[list[Chosen], list[float]]:
    """Plans within the limits, and bounds, from prices that rise until the best plan at these prices can be paid for,
    and then close in on those that it just can: Note [Budgets] of the search.
    """
    plans: list[Chosen] = []
    bounds: list[float] = []
    whole = problem.eager_total - problem.infinite_us * problem.weight
    low, high, rate = 0.0, np.inf, 0.01
    for _ in range(SWEEPS):
        prices = Prices(
            byte=0.0 if limits.memory is None else rate * whole / limits.memory,
            second=0.0 if limits.seconds is None else rate * whole / limits.seconds,
        )
        found = search(problem, limits, prices=prices, effort=effort // SWEEPS)
        spent = prices.byte * (limits.memory or 0) + prices.second * ((limits.seconds or 0) - problem.once)
        bounds.append(float(found.bound[-1]) - spent)
        chosen = _chosen(Boxes(problem, limits, prices), found, limits.graphs)
        if limits.pays_for(*problem.costs_of(chosen)):
            plans.append(chosen)
            high = rate
        else:
            low = rate
        rate = 2 * rate if high == np.inf else (low + high) / 2
    return plans, bounds


def _filled(problem: Problem, limits: Limits, chosen: Chosen) -> Chosen:
    """With what is left of the budget spent, graph by graph, on the one that brings most."""
    while True:
        least, best = problem.total_of(chosen), chosen
        for at, lane in enumerate(problem.lanes):
            for index in _sample(lane.sizes.size):
                more = tuple(
                    tuple(sorted({*sizes, index})) if number == at else sizes for number, sizes in enumerate(chosen)
                )
                if limits.pays_for(*problem.costs_of(more)) and (total := problem.total_of(more)) < least:
                    least, best = total, more
        if least >= problem.total_of(chosen) * (1 - PROVEN):
            return chosen
        chosen = best


def _sample(size: int) -> range:
    """Candidates, or some of them if there are very many."""
    return range(1, size, 1 + size // 1024)
