"""The best sizes of all lanes within the limits, and a bound on how much better others could be.

Note [Lanes]
~~~~~~~~~~~~
One lane or two are solved exactly. Of more, each lane gets its best list in turn for what the
others leave to it, and graphs go from lane to lane, until nothing is better than that, or than one
lane alone; then one graph more is added. The bound there is that of a graph for each size.

Note [Limits]
~~~~~~~~~~~~~
Memory is static(largest size) + pool(largest size of each mode) + workspaces + driver bytes of each
key. Of one lane or two the cheapest keys count. That allows too much, so it gives a bound,
and if the limits pay for the plan all the same, it is the best one. If not, one rate prices bytes
and seconds, each as a share of its limit: the least of time + price * cost, less price * limit, is
below every plan within the limits (a Lagrangian relaxation). Workspaces, and the first graph's own
seconds, are taken off the limits there. Exchanges of sizes spend the rest.

Note [Two lanes]
~~~~~~~~~~~~~~~~
A batch goes to the first of its lanes whose largest size holds it. Let A_k(e) be the least total of
the first lane's batches up to its end e, and F_k(j) that of the second one's own batches up to its
size j (Note [One lane]). Batches that both may run, with the cumulative weight V, run in the second
one above e. The first size j of the second lane that is above e costs

    min over k1 + k2 = k of F_k2(j) + min over e <= j of A_k1(e) + (V(j) - V(e)) T(j)

and from there on the second lane's path has the weights of both kinds. (An e below the size before
j is too dear here, and the same plan is found at that size.) Where the first lane ends above the
second one, they share the limits alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from cgplan.optimizer.paths import (
    Floats,
    Ints,
    Paths,
    best_start,
)
from cgplan.optimizer.problem import (
    Candidates,
    Chosen,
    Prices,
    Problem,
)

NOTHING = Candidates(
    lanes=(),
    sizes=np.zeros(1, dtype=int),
    times=np.zeros((1, 1)),
    key_costs=np.zeros((3, 1)),
    pools=np.zeros((2, 1)),
)


class Pair:
    """The best plans of one lane or two, see Note [Two lanes].

    Attributes:
        value: [K + 1] least totals by the number of graphs, with the price of costs.
    """

    def __init__(
        self,
        problem: Problem,
        prices: Prices,
        spare: Floats,
    ) -> None:
        if len(problem.lanes) == 1:
            demands = [replace(demand, lanes=(1,)) for demand in problem.demands]
            problem = replace(
                problem,
                lanes=(NOTHING, *problem.lanes),
                demands=tuple(demands),
            )
        self._problem = problem
        first, second = problem.lanes
        graphs = spare.size - 1
        alone, missed = self._left_to(0, (0,))
        passed, missed_first = self._left_to(0, (0, 1))
        self._own = first.paths(
            alone + passed,
            graphs,
            prices,
        )
        self._before = self._own.cost + missed
        others, missed = self._left_to(1, (1,))
        shared, missed_second = self._left_to(1, (0, 1))
        self._after = second.paths(
            others,
            graphs,
            prices,
        )
        self._beyond = self._after.cost + missed
        self._held = np.searchsorted(
            second.sizes,
            first.sizes,
            side="right",
        )
        joined = self._join(passed)
        took = shared * second.times
        joined += took.sum(axis=0)
        more = graphs if shared.any() else 0
        self._both = second.paths(
            shared + others,
            more,
            prices,
            start=joined,
        )
        self._joined = self._both.cost + missed + missed_second
        self._apart += missed_first
        by_last = (
            (self._joined, second),
            (self._apart, first),
        )
        for totals, lane in by_last:
            buffers = lane.pools.sum(axis=0)
            totals += prices.byte * buffers
            totals[buffers > spare[:, None]] = np.inf
        value = np.minimum(
            self._joined.min(axis=1),
            self._apart.min(axis=1),
        )
        value += problem.eager_us
        self.value = np.minimum.accumulate(value)

    def _left_to(
        self,
        n: int,
        lanes: tuple[int, ...],
    ) -> tuple[Floats, Floats]:
        demands = [demand for demand in self._problem.demands if demand.lanes == lanes]
        part = replace(
            self._problem,
            demands=tuple(demands),
            eager_us=0.0,
        )
        return part.left_to(n, ((), ()))

    def _join(self, passed: Floats) -> Floats:
        """Totals by graphs and the first size of the second lane above the end of the first; and,
        where that end is the larger one, by graphs and the end.
        """
        first, second = self._problem.lanes
        last = np.searchsorted(
            first.sizes,
            second.sizes,
            side="right",
        )
        after = np.minimum.accumulate(self._beyond, axis=1)
        self._apart = np.full_like(self._before, np.inf)
        found = np.full_like(after, np.inf)
        self._starts = np.full_like(after, np.inf)
        self._end = np.zeros_like(self._after.parent)
        for k, before in enumerate(self._before):
            if k and np.array_equal(before, self._before[k - 1]):
                continue
            starts, self._end[k] = best_start(
                before,
                passed,
                second.times[:1],
                last - 1,
            )
            starts[0] = np.inf
            self._starts[k] = starts
            rest = len(after) - k
            joined = self._after.cost[:rest] + starts
            found[k:] = np.minimum(
                found[k:],
                joined,
            )
            apart = before + after[:rest, self._held - 1]
            self._apart[k:] = np.minimum(
                self._apart[k:],
                apart,
            )
        return found

    def chosen(self, graphs: int) -> Chosen:
        """The plan of at most so many graphs."""
        joined = self._joined[: graphs + 1]
        apart = self._apart[: graphs + 1]
        sizes: list[int] = []
        if joined.min() < apart.min():
            place = _place_of_least(joined)
            sizes, level, size = self._both.back(*place)
            before = self._after.cost[level::-1, size]
            starts = self._starts[: level + 1, size]
            totals = before + starts
            share = int(totals.argmin())
            end = int(self._end[share, size])
        else:
            level, end = _place_of_least(apart)
            beside = self._beyond[level::-1, : self._held[end]]
            totals = beside + self._before[: level + 1, [end]]
            share, size = _place_of_least(totals)
        last = self._after.sizes(level - share, size) + sizes
        own = self._own.sizes(share, end)
        if self._problem.lanes[0] is NOTHING:
            return (tuple(last),)
        return tuple(own), tuple(last)


def _place_of_least(table: Floats) -> tuple[int, int]:
    return divmod(int(table.argmin()), len(table[0]))


MOST_GRAPHS = 256  # graphs of a plan
ROUNDING = 1e-9  # relative: sums of seconds are not exact
PROVEN = 1e-9  # relative gap that counts as none
EXCHANGED = 2  # plans of rates, the best ones
SWEEPS = 12  # rates to try
Lists = tuple[tuple[int, int], ...]  # lanes, and how many sizes each gets


@dataclass(frozen=True)
class Limits:
    """The limits of a plan: graphs, bytes, seconds; inf: no limit."""

    graphs: int
    memory: float = np.inf
    seconds: float = np.inf

    @property
    def has_prices(self) -> bool:
        return min(self.memory, self.seconds) < np.inf

    def pays_for(
        self,
        graphs: Any,
        memory: Any,
        seconds: Any,
    ) -> Any:
        """Whether plans cost no more, each a number or an array."""
        most = self.memory * (1 + ROUNDING)
        longest = self.seconds * (1 + ROUNDING)
        return (graphs <= self.graphs) & (memory <= most) & (seconds <= longest)


@dataclass(frozen=True)
class Best:
    """A plan within the limits.

    Attributes:
        chosen: Candidates of each lane.
        total: Microseconds, times weight.
        least: Of the best plan found, which may have a few graphs more.
        bound: No plan within the limits is below it.
    """

    chosen: Chosen
    total: float
    least: float
    bound: float


def best_plan(
    problem: Problem,
    limits: Limits,
    *,
    goal: float = 0.0,
) -> Best:
    """The best plan within the limits; of those that take no longer than ``goal`` (microseconds,
    times weight), the one with the fewest graphs. The plan may have no graph.

    Exact with one lane or two if only the number of graphs is limited or all keys cost the same;
    otherwise ``bound`` says how good it is.
    """
    memory, seconds = problem.least(limits.graphs)
    paid = limits.pays_for(0, memory, seconds)
    most = int(np.flatnonzero(paid)[-1])
    limits = replace(limits, graphs=most)
    found = Search(problem, limits)
    best = found.best(most, goal)
    pays = limits.pays_for(*problem.costs_of(best.chosen))
    is_exact = len(problem.lanes) <= 2 or not limits.has_prices
    if pays and is_exact:
        return best
    chosen, priced = _priced(problem, limits)
    total = problem.total_of(chosen)
    if pays and best.total <= max(total, goal):
        return best
    bound = max(best.bound, priced)
    bound = min(bound, total)
    return Best(chosen, total, total, bound)


def _priced(
    problem: Problem,
    limits: Limits,
) -> tuple[Chosen, float]:
    """The best plan within the limits, and the best bound, of several rates."""
    plans = {problem.nothing}
    bound = -np.inf
    low = 0.0
    high = np.inf
    rate = 0.01
    numbers = range(1, limits.graphs + 1)
    for _ in range(SWEEPS):
        found = Search(
            problem,
            limits,
            rate=rate,
        )
        shares = np.isfinite([limits.memory, limits.seconds])
        own = found.bound[-1] - rate * problem.saved * shares.sum()
        own += found.prices.total(problem.workspace, problem.once)
        bound = max(bound, float(own))

        def is_too_much(graphs: int, found: Search = found) -> bool:
            costs = problem.costs_of(found.chosen(graphs))
            return not limits.pays_for(*costs)

        graphs = bisect_left(numbers, True, key=is_too_much)
        plan = found.chosen(graphs)
        plans.add(plan)
        if graphs == limits.graphs:
            high = rate
        else:
            low = rate
        rate *= 2
        if high < np.inf:
            rate = (low + high) / 2
    tried = sorted(plans, key=problem.total_of)
    tried = tried[:EXCHANGED]
    best = [exchanged(problem, plan, limits) for plan in tried]
    least = min(best, key=problem.total_of)
    return least, bound


def exchanged(
    problem: Problem,
    chosen: Chosen,
    limits: Limits,
) -> Chosen:
    """The plan with more sizes, or with others in the place of one, until nothing is better."""
    best = _filled(problem, chosen, limits)
    least = problem.total_of(best)
    while True:
        before = best
        for n, picked in enumerate(before):
            for index in picked:
                left = [other for other in picked if other != index]
                rest = _with(before, n, left)
                taken = n, index
                other = _filled(problem, rest, limits, taken)
                total = problem.total_of(other)
                if _is_less(total, least):
                    best = other
                    least = total
        if best is before:
            return best


def _filled(
    problem: Problem,
    chosen: Chosen,
    limits: Limits,
    without: tuple[int, int] | None = None,
) -> Chosen:
    """The plan with more sizes, each the one that saves most of those that are paid for."""
    while True:
        found = []
        every = problem.gains(chosen)
        if without:
            n, index = without
            every[n][index] = -np.inf
        for n, gains in enumerate(every):
            costs = problem.costs_with(chosen, n)
            paid = limits.pays_for(*costs)
            gains[~paid] = -np.inf
            index = int(gains.argmax())
            gain = float(gains[index])
            found.append((gain, n, index))
        gain, n, index = max(found)
        total = problem.total_of(chosen)
        if not _is_less(total - gain, total):
            return chosen
        sizes = {*chosen[n], index}
        chosen = _with(chosen, n, sizes)


def _is_less(
    total: float,
    than: float,
) -> bool:
    return total < than * (1 - PROVEN)


def _with(
    chosen: Chosen,
    n: int,
    sizes: Iterable[int],
) -> Chosen:
    lists = list(chosen)
    lists[n] = tuple(sorted(sizes))
    return tuple(lists)


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
    """

    def __init__(
        self,
        problem: Problem,
        limits: Limits,
        *,
        rate: float = 0.0,
    ) -> None:
        self.problem = problem
        self.limits = limits
        saved = rate * problem.saved
        self.prices = Prices(saved / limits.memory, saved / limits.seconds)
        self.pair = None
        self._paths: dict[tuple[int, bytes], Paths] = {}
        self._plans = [problem.nothing]
        self.bound = np.full(limits.graphs + 1, problem.best_total)
        if len(problem.lanes) in (1, 2):
            driver, seconds = problem.least(limits.graphs)
            paid = limits.pays_for(0, driver, seconds)
            spare = limits.memory * (1 + ROUNDING) - driver  # for pools
            self.pair = Pair(
                problem,
                self.prices,
                np.where(paid, spare, -np.inf),
            )
            self.value = self.pair.value
            if problem.rising:
                self.bound = self.value
        else:
            self.value = self._in_turns()

    def best(
        self,
        graphs: int,
        goal: float,
    ) -> Best:
        least = float(self.value[graphs])
        enough = max(least * (1 + PROVEN), goal)
        is_enough = self.value <= enough
        fewest = int(is_enough.argmax())
        chosen = self.chosen(min(graphs, fewest))
        total = self.problem.total_of(chosen)
        bound = float(self.bound[graphs])
        least = min(
            least,
            total,
        )
        return Best(chosen, total, least, bound)

    def chosen(self, graphs: int) -> Chosen:
        """The plan of at most so many graphs. Each size but the largest is in favour of the largest
        one below the next that takes and costs as much.
        """
        if self.pair:
            plan = self.pair.chosen(graphs)
        else:
            last = len(self._plans) - 1
            plan = self._plans[min(graphs, last)]
        found = []
        for lane, picked in zip(self.problem.lanes, plan, strict=True):
            sizes = list(picked)
            for n, above in enumerate(picked[1:]):
                last = int(lane.alike[sizes[n]])
                sizes[n] = min(last, above - 1)
            found.append(tuple(sizes))
        return tuple(found)

    def _in_turns(self) -> Floats:
        """Totals by graphs, see Note [Lanes]."""
        nothing = self._plans[0]
        found = nothing
        total = self._total(found)
        most = self.limits.graphs
        totals = np.full(most + 1, total)
        alone = [self._turn(nothing, n, most) for n in range(len(nothing))]
        ends = [turn.least[-1] for turn in alone]
        least = min(ends, default=np.inf)
        for count in range(1, totals.size):
            graphs = sum(map(len, found))
            plan, better = self._improved(found, count)
            for n, turn in enumerate(alone):
                expected = turn.least[count]
                if _is_less(expected, better):
                    plan = _with(nothing, n, turn.sizes(count))
                    better = expected
            if better < total:
                found = plan
                total = better
            elif graphs < count - 1 and least >= total:  # two more graphs brought nothing
                break
            for n, sizes in enumerate(found):
                fewer = sizes[:-1]
                shorter = _with(found, n, fewer)
                if self._total(shorter) <= total:  # others took its batches
                    found = shorter
            self._plans.append(found)
            totals[count:] = total
        return totals

    def _total(self, chosen: Chosen) -> Any:
        """With the price, but for what the first graph brings."""
        graphs, memory, seconds = self.problem.costs_of(chosen)
        if graphs:
            memory -= self.problem.workspace
            seconds -= self.problem.once
        price = self.prices.total(memory, seconds)
        return self.problem.total_of(chosen) + price

    def _improved(
        self,
        chosen: Chosen,
        graphs: int,
    ) -> tuple[Chosen, float]:
        best = chosen
        total = self._total(chosen)
        before = None
        while best is not before:
            before = best
            turns = []
            for n, sizes in enumerate(best):
                most = len(sizes) + 2
                turn = self._turn(best, n, most)
                turns.append(turn)
            for expected, lists in sorted(_changes(best, turns, total, graphs)):
                if not _is_less(expected, total):
                    break
                other = best
                for n, count in lists:
                    turn = turns[n]
                    if other is not best:
                        turn = self._turn(other, n, count)
                    other = _with(other, n, turn.sizes(count))
                found = self._total(other)
                if _is_less(found, total):
                    best = other
                    total = found
                    break
        return best, total

    def _turn(
        self,
        chosen: Chosen,
        n: int,
        graphs: int,
    ) -> _Turn:
        problem = self.problem
        lane = problem.lanes[n]
        others = _with(chosen, n, ())
        weights, beyond = problem.left_to(n, others)
        name = n, weights.tobytes()
        paths = self._paths.get(name)
        if paths is None or len(paths.cost) <= graphs:
            paths = lane.paths(weights, 2 * graphs, self.prices)
            self._paths[name] = paths
        _, most = problem.parts(others)
        larger = np.maximum(lane.pools, most[:, None])
        totals = paths.cost[: graphs + 1] + beyond
        totals += self.prices.byte * larger.sum(axis=0)
        return _Turn(
            paths,
            totals.min(axis=1),
            totals.argmin(axis=1),
        )


class _Turn(NamedTuple):
    """The best lists of one lane: the least total of the plan by its graphs, and their end."""

    paths: Paths
    least: Floats
    ends: Ints

    def sizes(self, graphs: int) -> list[int]:
        end = int(self.ends[graphs])
        return self.paths.sizes(graphs, end)


def _changes(
    chosen: Chosen,
    turns: list[_Turn],
    total: float,
    graphs: int,
) -> Iterator[tuple[float, Lists]]:
    """Changes of one list or two, and the totals to expect."""
    counts = [len(sizes) for sizes in chosen]
    room = graphs - sum(counts)
    lanes = range(len(turns))
    for n, turn in enumerate(turns):
        now = counts[n]
        fewest = max(now - 1, 0)
        most = now + min(room, 2)
        for count in range(fewest, most + 1):
            yield turn.least[count], ((n, count),)
        for giver, given, taken in product(lanes, (1, 2), (1, 2)):
            left = counts[giver] - given
            is_other = giver != n and left >= 0
            if is_other and taken - given <= room:
                lost = turns[giver].least[left] - total
                lists = (giver, left), (n, now + taken)
                yield lost + turn.least[now + taken], lists
