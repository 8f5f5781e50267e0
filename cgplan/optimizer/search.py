"""The best sizes of all lanes within the limits, and a bound on how much better others could be.

Note [Lanes]
~~~~~~~~~~~~
One lane or two are solved exactly (pair.py). Of three and more, each lane gets its best list in
turn for what the others' lists leave to it, and graphs go from lane to lane, until nothing is
better; so one graph after the other is added. The bound comes from letting each group of batches
have all the graphs for itself, in its fastest lane.

Note [Limits]
~~~~~~~~~~~~~
Memory is static(largest size) + pool(largest size of each mode) + workspaces + driver bytes of each
key. The search counts the cheapest keys of each lane. That allows too much, so it gives a bound,
and if the limits pay for the plan all the same, it is the best one. If not, the range of the first
of two lanes' graphs is halved, best bound first. If that does not help, because keys of a lane
differ, one rate prices bytes and seconds, each as a share of its limit: the least of time + price *
cost, less price * limit, is below every plan within the limits (a Lagrangian relaxation). Exchanges
of sizes spend the rest of the limits.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from cgplan.optimizer.pair import Pair
from cgplan.optimizer.paths import Floats, Paths, best_paths, min_plus
from cgplan.optimizer.problem import Chosen, Prices, Problem

MOST = 256  # graphs of a plan
ROUNDING = 1e-9  # relative: sums of seconds are not exact
PROVEN = 1e-9  # relative gap that counts as none
HALVINGS = 64  # of the number of graphs of the first lane
TRIED = 8  # changes of lists, the most promising ones
EXCHANGED = 2  # plans of rates, the best ones
SWEEPS = 12  # rates to try


@dataclass(frozen=True)
class Limits:
    """The limits of a plan: graphs, bytes, seconds; None: no limit."""

    graphs: int
    memory: float | None = None
    seconds: float | None = None

    def pays_for(self, graphs: Any, memory: Any, seconds: Any) -> Any:
        """Whether plans cost no more, each a number or an array."""
        paid = graphs <= self.graphs
        if self.memory is not None:
            paid = paid & (memory <= self.memory * (1 + ROUNDING))
        if self.seconds is not None:
            paid = paid & (seconds <= self.seconds * (1 + ROUNDING))
        return paid


@dataclass(frozen=True)
class Best:
    """A plan within the limits.

    Attributes:
        chosen: Candidates of each lane.
        least: Microseconds, times weight, of the best plan that was found, which may have a few
            graphs more.
        bound: No plan within the limits is below it.
    """

    chosen: Chosen
    least: float
    bound: float


def best_plan(problem: Problem, limits: Limits, *, slack: float = 0.0) -> Best:
    """The best plan within the limits; of those within ``slack`` (microseconds, times weight) of
    it, the one with the fewest graphs. The plan may have no graph.

    Exact with one lane or two if only the number of graphs is limited or all keys of a lane cost
    the same; otherwise ``bound`` says how good it is.
    """
    numbers = np.arange(limits.graphs + 1)
    paid = limits.pays_for(numbers, *problem.least(limits.graphs))
    limits = replace(limits, graphs=int(np.flatnonzero(paid)[-1]))
    found = Search(problem, limits)
    best = found.best(limits.graphs, slack)
    pays = bool(limits.pays_for(*problem.costs_of(best.chosen)))
    has_prices = limits.memory is not None or limits.seconds is not None
    if pays and (len(problem.lanes) <= 2 or not has_prices):
        return best
    bound = best.bound
    if len(problem.lanes) == 2:
        halved = _halved(found, limits, slack)
        if np.isfinite(halved.least):
            return halved
        bound = max(bound, halved.bound)
    chosen, priced = _priced(problem, limits)
    total = problem.total_of(chosen)
    if pays and total >= problem.total_of(best.chosen) - slack:
        return best
    return Best(
        chosen,
        total,
        min(max(bound, priced), total),
    )


def _halved(found: Search, limits: Limits, slack: float) -> Best:
    """The plan of two lanes that a range of the first one's graphs proves; ``least`` is inf without
    one.
    """
    pair = found.pair
    assert pair is not None, "two lanes are solved together"
    parts: dict[tuple[int, int], Pair] = {(0, limits.graphs): pair}

    def best_of(graphs: int, enough: float) -> tuple[Chosen | None, float]:
        """The best plan of so many graphs, if it takes no longer than that; and a bound."""
        open_ = [
            (
                float(pair.value[graphs]),
                0,
                limits.graphs,
            )
        ]
        bound = -np.inf
        for _ in range(HALVINGS):
            bound, low, high = heappop(open_)
            if bound == np.inf:  # the limits pay for no plan of these graphs
                break
            chosen = found.raised(parts[low, high].chosen(graphs))
            if bound > enough:
                break
            if limits.pays_for(*found.problem.costs_of(chosen)):
                return chosen, bound
            if low == high:
                break
            middle = (low + high) // 2
            for first, last in ((low, middle), (middle + 1, high)):
                if (first, last) not in parts:
                    parts[first, last] = pair.within(
                        found.spare(first, last),
                        first,
                        last,
                    )
                heappush(
                    open_,
                    (
                        float(parts[first, last].value[graphs]),
                        first,
                        last,
                    ),
                )
        return None, bound

    chosen, bound = best_of(limits.graphs, np.inf)
    if chosen is None:
        return Best(((), ()), np.inf, bound)
    least = min(bound, found.problem.total_of(chosen))
    while graphs := sum(map(len, chosen)):
        fewer, _ = best_of(graphs - 1, bound * (1 + PROVEN) + slack)
        if fewer is None:
            break
        chosen = fewer
    return Best(chosen, least, bound)


def _priced(problem: Problem, limits: Limits) -> tuple[Chosen, float]:
    """The best plan within the limits that some rate of prices gives, and the best bound of these
    rates.
    """
    plans: set[Chosen] = {((),) * len(problem.lanes)}
    bound, low, high, rate = -np.inf, 0.0, np.inf, 0.01
    numbers = range(1, limits.graphs + 1)
    start: Chosen | None = None
    for _ in range(SWEEPS):
        found = Search(
            problem,
            limits,
            rate=rate,
            start=start,
        )
        start = found.chosen(limits.graphs)
        bound = max(bound, float(found.bound[-1]) - found.budget_price)

        def is_too_much(graphs: int, found: Search = found) -> bool:
            return not limits.pays_for(*problem.costs_of(found.chosen(graphs)))

        graphs = bisect_left(numbers, True, key=is_too_much)
        plans.add(found.chosen(graphs))
        if graphs == limits.graphs:
            high = rate
        else:
            low = rate
        rate = 2 * rate if high == np.inf else (low + high) / 2
    tried = sorted(plans, key=problem.total_of)[:EXCHANGED]
    best = [exchanged(problem, plan, limits) for plan in tried]
    return min(best, key=problem.total_of), bound


def exchanged(problem: Problem, chosen: Chosen, limits: Limits) -> Chosen:
    """The plan after exchanges: more sizes, or others in the place of one, until none of them makes
    it better.
    """
    best = _filled(problem, chosen, limits)
    least = problem.total_of(best)
    while True:
        before = best
        for n, picked in enumerate(before):
            for index in picked:
                left = tuple(other for other in picked if other != index)
                some = (
                    *before[:n],
                    left,
                    *before[n + 1 :],
                )
                other = _filled(
                    problem,
                    some,
                    limits,
                    (n, index),
                )
                total = problem.total_of(other)
                if total < least * (1 - PROVEN):
                    best, least = other, total
        if best is before:
            return best


def _filled(
    problem: Problem, chosen: Chosen, limits: Limits, without: tuple[int, int] | None = None
) -> Chosen:
    """The plan with more sizes, each the one that saves most of those that are paid for."""
    while True:
        found = []
        for n, gains in enumerate(problem.gains(chosen)):
            paid = limits.pays_for(*problem.costs_with(chosen, n))
            gains = np.where(paid, gains, -np.inf)
            if without is not None and without[0] == n:
                gains[without[1]] = -np.inf
            found.append(
                (
                    float(gains.max()),
                    n,
                    int(gains.argmax()),
                )
            )
        gain, n, index = max(found)
        if gain <= PROVEN * problem.total_of(chosen):
            return chosen
        chosen = (
            *chosen[:n],
            tuple(sorted({*chosen[n], index})),
            *chosen[n + 1 :],
        )


class Search:
    """The best plans by their number of graphs: index k means at most k.

    Args:
        limits: The cheapest keys of a lane count, see Note [Limits].
        rate: Price on bytes and seconds: of a whole limit, as a share of the microseconds that
            graphs can save.

    Attributes:
        value: [K + 1] total microseconds (times weight) of the best plan found, with the price of
            its costs.
        bound: [K + 1] no plan is below it.
        prices: At the rate.
        pair: Plans of one lane or two.
    """

    def __init__(
        self,
        problem: Problem,
        limits: Limits,
        *,
        rate: float = 0.0,
        start: Chosen | None = None,
    ) -> None:
        self.problem, self.limits = problem, limits
        saved = rate * problem.saved
        self.prices = Prices(
            saved / limits.memory if limits.memory else 0.0,
            saved / limits.seconds if limits.seconds else 0.0,
        )
        self.pair: Pair | None = None
        self._paths: dict[tuple[int, bytes], Paths] = {}
        self._turns: list[Chosen] = [((),) * len(problem.lanes)]
        if len(problem.lanes) in (1, 2):
            self.pair = Pair(
                problem,
                self.prices,
                self.spare(0, limits.graphs),
            )
            self.value = self.bound = self.pair.value
        else:
            self.value = self._in_turns(start or self._turns[0])
            self.bound = self._in_fastest_lanes()
        if not problem.rising:
            self.bound = np.full(limits.graphs + 1, problem.infinite_us * problem.weight)

    @property
    def budget_price(self) -> float:
        """The price of the whole budget."""
        memory, seconds = self.limits.memory or 0.0, self.limits.seconds or 0.0
        return self.prices.byte * memory + self.prices.second * (seconds - self.problem.once)

    def best(self, graphs: int, slack: float) -> Best:
        """The plan with the fewest graphs of those within ``slack`` of the best one of at most so
        many.
        """
        least = float(self.value[graphs])
        chosen = self.chosen(min(graphs, self.fewest(least * (1 + PROVEN) + slack)))
        return Best(
            chosen,
            min(least, self.problem.total_of(chosen)),
            float(self.bound[graphs]),
        )

    def fewest(self, total: float) -> int:
        """The fewest graphs with a plan that is no dearer; the most if there is none."""
        enough = np.append(self.value[:-1] <= total, True)
        return int(enough.argmax())

    def chosen(self, graphs: int) -> Chosen:
        """The plan of at most so many graphs."""
        if self.pair is not None:
            return self.raised(self.pair.chosen(graphs))
        return self.raised(self._turns[min(graphs, len(self._turns) - 1)])

    def raised(self, chosen: Chosen) -> Chosen:
        """Each size but the largest in favour of the largest one below the next that takes and
        costs as much.
        """
        found = []
        for lane, picked in zip(self.problem.lanes, chosen, strict=True):
            figures = np.stack(
                [
                    *lane.times,
                    lane.each,
                    lane.driver,
                    lane.seconds,
                ]
            )
            sizes = list(picked)
            for n, (size, above) in enumerate(pairwise(picked)):
                same = (figures[:, size:above] == figures[:, [size]]).all(axis=0)
                sizes[n] = size + int(np.flatnonzero(same)[-1])
            found.append(tuple(sizes))
        return tuple(found)

    def _in_turns(self, plan: Chosen) -> Floats:
        """One graph more after the other, see Note [Lanes]; the totals."""
        totals = [self._total(self._turns[0])]
        for count in range(1, self.limits.graphs + 1):
            found, total = self._turns[-1], totals[-1]
            if sum(map(len, plan)) <= count:
                plan, better = self._improved(plan, count)
                if better < total:
                    found, total = plan, better
                elif sum(map(len, found)) < count - 1:
                    break
            self._turns.append(found)
            totals.append(total)
        return np.array([*totals, *[totals[-1]] * (self.limits.graphs + 1 - len(totals))])

    def _total(self, chosen: Chosen) -> float:
        """With the price of the plan."""
        graphs, memory, seconds = self.problem.costs_of(chosen)
        seconds -= self.problem.once * bool(graphs)
        price = self.prices.byte * memory + self.prices.second * seconds
        return self.problem.total_of(chosen) + price

    def _improved(self, chosen: Chosen, graphs: int) -> tuple[Chosen, float]:
        """The plan of at most so many graphs that turns lead to from another one."""
        total = self._total(chosen)
        while True:
            counts = [*map(len, chosen)]
            turns = [self._turn(chosen, n, count + 2) for n, count in enumerate(counts)]
            changes: list[tuple[float, tuple[tuple[int, int], ...]]] = []
            for n, turn in enumerate(turns):
                for count in range(max(counts[n] - 1, 0), counts[n] + 2):
                    if count - counts[n] <= graphs - sum(counts):
                        changes.append((turn.value(count), ((n, count),)))
                for giver, given, taken in product(range(len(turns)), (1, 2), (1, 2)):
                    left = counts[giver] - given
                    if giver != n and left >= 0 and taken - given <= graphs - sum(counts):
                        lost = float(turns[giver].free[left].min()) - total
                        expected = lost + float(turn.free[counts[n] + taken].min())
                        changes.append((expected, ((giver, left), (n, counts[n] + taken))))
            for expected, lists in sorted(changes)[:TRIED]:
                if expected >= total * (1 - PROVEN):
                    return chosen, total
                other = chosen
                for n, count in lists:
                    turn = turns[n] if other is chosen else self._turn(other, n, count)
                    other = (
                        *other[:n],
                        turn.sizes(count),
                        *other[n + 1 :],
                    )
                found = self._total(other)
                if found < total * (1 - PROVEN):
                    chosen, total = other, found
                    break
            else:
                return chosen, total

    def _turn(self, chosen: Chosen, n: int, graphs: int) -> _Turn:
        """The best lists of a lane for what the others' lists leave to it, within the limits."""
        lane = self.problem.lanes[n]
        others = (
            *chosen[:n],
            (),
            *chosen[n + 1 :],
        )
        weights, beyond = self.problem.left_to(n, others)
        name = n, weights.tobytes()
        if name not in self._paths or len(self._paths[name].cost) <= graphs:
            self._paths[name] = best_paths(
                weights, lane.times, 2 * graphs, self.prices.of(lane), lane.each
            )
        paths = self._paths[name]
        _, driver, seconds, pool, static = self.problem.parts(others)
        least = lane.least(graphs)[:, :, None]
        ends = np.maximum(lane.pool, pool) + np.maximum(lane.static, static)
        memory = self.problem.workspace + driver + ends + least[0]
        seconds = seconds + self.problem.once + least[1]
        free = paths.cost[: graphs + 1] + beyond + self.prices.byte * ends
        totals = free.copy()
        totals[~np.broadcast_to(self.limits.pays_for(0, memory, seconds), totals.shape)] = np.inf
        return _Turn(paths, free, totals)

    def _in_fastest_lanes(self) -> Floats:
        """A bound: each group of batches has all the graphs for itself, in the fastest of its
        lanes, up to the largest size that the memory besides the keys pays for.
        """
        problem, graphs = self.problem, self.limits.graphs
        if not problem.lanes:
            return self.value
        if any(self.prices):
            return np.full(graphs + 1, -np.inf)
        sizes = np.unique(np.concatenate([lane.sizes for lane in problem.lanes]))
        times, fixed = [], []
        for lane in problem.lanes:
            place = np.searchsorted(lane.sizes, sizes)
            times.append(np.append(lane.times[0], np.inf)[place])
            fixed.append(np.append(lane.pool + lane.static, np.inf)[place])
        driver, seconds = problem.least(graphs)
        is_paid = self.limits.pays_for(
            0,
            np.min(fixed, axis=0) + driver[:, None],
            seconds[:, None],
        )
        longest = max(float(lane.times[0, -1]) for lane in problem.lanes)
        total = np.full(graphs + 1, problem.eager_us)
        for demand in problem.demands:
            fastest = np.min([times[lane] for lane in demand.lanes], axis=0)
            held = demand.below(sizes)
            paths = best_paths(
                demand.weight[held][None], np.minimum(fastest, longest)[None], graphs
            )
            cost = paths.cost + demand.eager[-1] - demand.eager[held]
            total += np.where(is_paid, cost, np.inf).min(axis=1)
        return np.minimum(self.value, np.minimum.accumulate(total))

    def spare(self, low: int, high: int) -> Floats:
        """Bytes that ends may take, by the number of graphs, of which the first of two lanes has
        ``low`` to ``high``; -inf where their keys are not paid for: [K + 1].
        """
        graphs = self.limits.graphs
        first, last = self.problem.lanes[0].least(graphs), self.problem.lanes[-1].least(graphs)
        if len(self.problem.lanes) == 1:
            driver, seconds = first
        else:
            first[:, :low] = np.inf
            first[:, high + 1 :] = np.inf
            driver, seconds = map(min_plus, first, last)
        spare = np.full(graphs + 1, np.inf)
        if self.limits.memory is not None:
            spare = self.limits.memory * (1 + ROUNDING) - driver
        numbers = np.arange(graphs + 1)
        seconds = seconds + self.problem.once * (numbers > 0)
        spare[~self.limits.pays_for(numbers, 0.0, seconds)] = -np.inf
        return spare


class _Turn(NamedTuple):
    """The best lists of one lane: totals of the plan by its graphs and its end, without limits and
    within them.
    """

    paths: Paths
    free: Floats
    totals: Floats

    def value(self, graphs: int) -> float:
        return float(self.totals[graphs].min())

    def sizes(self, graphs: int) -> tuple[int, ...]:
        return tuple(self.paths.sizes(graphs, int(self.totals[graphs].argmin())))
