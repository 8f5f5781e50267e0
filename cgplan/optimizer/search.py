"""The sizes of all lanes within the limits that a search finds best.

Note [Lanes]
~~~~~~~~~~~~
The best sizes of one lane are exact (Note [One lane]). Of more, each lane gets its best list in
turn for what the others leave to it, and graphs go from lane to lane, until nothing is better than
that; then one graph more is added. Of two, plans that begin with the best list of one alone, and
have the other's beside it, take the place of a worse one.

Note [Limits]
~~~~~~~~~~~~~
Memory is static(largest size) + pool(largest size of each mode) + workspaces + driver bytes of each
key. If the limits do not pay for the best plan of so many graphs, one rate prices bytes and
seconds, each as a share of its limit, and is raised until they do. Exchanges of sizes spend the
rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cgplan.optimizer.paths import Floats, Ints, Paths, best_paths
from cgplan.optimizer.problem import Chosen, Problem

MOST_GRAPHS = 256  # graphs of a plan
ROUNDING = 1e-9  # relative: sums are not exact
EXCHANGED = 12  # plans of rates, the best ones
STARTS = 32  # graphs of one lane beside which others are planned
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


def best_plan(
    problem: Problem,
    limits: Limits,
    *,
    goal: float = 0.0,
) -> Chosen:
    """The best plan within the limits that is found; of those that take no longer than ``goal``
    (microseconds, times weight), the one with the fewest graphs. The plan may have no graph.
    """
    plans = {problem.nothing}
    low = rate = 0.0
    high = np.inf
    for _ in range(SWEEPS):
        found = Search(
            problem,
            limits,
            rate=rate,
        )
        every = map(found.chosen, range(limits.graphs + 1))
        paid = [plan for plan in every if limits.pays_for(*problem.costs_of(plan))]
        plans.update(paid)
        if len(paid) <= limits.graphs:
            low = rate
        elif rate:
            high = rate
        else:
            return found.best(limits.graphs, goal)
        rate = 2 * rate or 0.01
        if high < np.inf:
            rate = (low + high) / 2
    tried = sorted(plans, key=problem.total_of)
    tried = tried[:EXCHANGED]
    plans.update([exchanged(problem, plan, limits) for plan in tried])
    least = min(map(problem.total_of, plans))
    enough = max(
        goal,
        least,
    )
    sufficient = [plan for plan in plans if problem.total_of(plan) <= enough]
    return min(
        sufficient,
        key=problem.costs_of,
    )


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
    return total < than * (1 - ROUNDING)


def _with(
    chosen: Chosen,
    n: int,
    sizes: Iterable[int],
) -> Chosen:
    lists = list(chosen)
    lists[n] = tuple(sorted(sizes))
    return tuple(lists)


class Search:
    """Plans by their number of graphs: index k means at most k.

    Args:
        rate: Price on bytes and seconds: of a whole limit, as a share of the microseconds that
            graphs can save.

    Attributes:
        value: [K + 1] total microseconds (times weight) of the best plan found, with the price of
            its costs.
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
        whole = np.array([np.inf, limits.memory, limits.seconds])
        self.rates = rate * problem.saved / whole  # of a graph, a byte and a second
        self._paths: dict[tuple[int, bytes], Paths] = {}
        self._turns: dict[tuple[int, Chosen], _Turn] = {}
        self._plans = [problem.nothing]
        self.value = self._in_turns()

    def fewest(self, total: float) -> int | None:
        """The number of graphs with which steps take no longer; None: none does."""
        is_enough = self.value <= total * (1 + ROUNDING)
        return int(is_enough.argmax()) if is_enough.any() else None

    def best(
        self,
        graphs: int,
        goal: float,
    ) -> Chosen:
        enough = max(self.value[graphs], goal)
        fewest = self.fewest(enough)
        return self.chosen(min(graphs, fewest or 0))

    def chosen(self, graphs: int) -> Chosen:
        """The plan of at most so many graphs."""
        last = len(self._plans) - 1
        return self._plans[min(graphs, last)]

    def _in_turns(self) -> Floats:
        """Totals by graphs, see Note [Lanes]."""
        nothing = self._plans[0]
        found = nothing
        total = self._total(found)
        most = self.limits.graphs
        totals = np.full(most + 1, total)
        starts = [*self._starts()]
        ends = [self._turn(*start).least[-1] for start in starts]
        least = min(ends, default=np.inf)
        for count in range(1, totals.size):
            graphs = sum(map(len, found))
            plan, better = self._improved(found, total, count)
            expected = better
            for begun, n in starts:
                turn = self._turn(begun, n)
                left = count - sum(map(len, begun))
                if left >= 0 and _is_less(turn.least[left], expected):
                    expected = turn.least[left]
                    plan = _with(begun, n, turn.sizes(left))
            if expected < better:
                plan, better = self._improved(plan, expected, count)
            if better < total:
                found = plan
                total = better
            elif graphs < count - 1 and least >= total:  # two more graphs brought nothing
                break
            for n, sizes in enumerate(found):
                turn = self._turn(found, n)
                fewer = len(sizes) - 1
                if fewer >= 0 and turn.least[fewer] <= total:  # others took its batches
                    found = _with(found, n, turn.sizes(fewer))
            self._plans.append(found)
            totals[count:] = total
        return totals

    def _starts(self) -> Iterator[tuple[Chosen, int]]:
        """Plans of no lane or one, and the lane whose turn it is."""
        nothing = self.problem.nothing
        lanes = range(len(nothing))
        for first in lanes:
            yield nothing, first
            turn = self._turn(nothing, first)
            most = min(self.limits.graphs, STARTS)
            if len(lanes) > 2 or any(self.rates):  # they take long
                most = 0
            graphs = 1
            while graphs <= most:
                begun = _with(
                    nothing,
                    first,
                    turn.sizes(graphs),
                )
                for n in lanes:
                    if n != first:
                        yield begun, n
                graphs += graphs // 4 or 1

    def _total(self, chosen: Chosen) -> float:
        """With the price, but for what the first graph brings."""
        key_costs, pools = self.problem.parts(chosen)
        price = self.rates @ key_costs + self.rates[1] * pools.sum()
        return self.problem.total_of(chosen) + float(price)

    def _improved(
        self,
        best: Chosen,
        total: float,
        graphs: int,
    ) -> tuple[Chosen, float]:
        before = None
        while best is not before:
            before = best
            turns = [self._turn(best, n) for n in range(len(best))]
            for expected, lists in sorted(_changes(best, turns, total, graphs)):
                if not _is_less(expected, total):
                    break
                other = best
                for n, count in lists:
                    turn = turns[n]
                    if other is not best:
                        turn = self._turn(other, n)
                    other = _with(other, n, turn.sizes(count))
                found = self._total(other)
                if _is_less(found, total):
                    best = other
                    total = found
                    break
        return best, total

    def _turn(self, chosen: Chosen, n: int) -> _Turn:
        problem = self.problem
        lane = problem.lanes[n]
        others = _with(chosen, n, ())
        place = n, others
        if place in self._turns:
            return self._turns[place]
        weights, beyond = problem.left_to(n, others)
        name = n, weights.tobytes()
        if name not in self._paths:
            self._paths[name] = best_paths(
                weights,
                lane.times,
                self.limits.graphs,
                price=self.rates @ lane.key_costs,
                each=lane.each,
            )
        paths = self._paths[name]
        spent, most = problem.parts(others)
        larger = np.maximum(
            lane.pools,
            most[:, None],
        ).sum(axis=0)
        totals = paths.cost + beyond
        totals += self.rates[1] * larger
        memory = larger + spent[1] + problem.workspace
        totals[:, memory > self.limits.memory * (1 + ROUNDING)] = np.inf
        turn = _Turn(
            paths,
            totals.min(axis=1),
            totals.argmin(axis=1),
        )
        self._turns[place] = turn
        return turn


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
    for n, turn in enumerate(turns):
        now = counts[n]
        more = now + 1
        fewest = max(now - 1, 0)
        for count in range(fewest, now + min(room, 1) + 1):
            yield turn.least[count], ((n, count),)
        for giver, other in enumerate(turns):
            left = counts[giver] - 1
            if giver != n and left >= 0:
                lost = other.least[left] - total
                yield lost + turn.least[more], ((giver, left), (n, more))
