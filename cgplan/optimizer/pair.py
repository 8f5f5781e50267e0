"""The best sizes of two lanes, for every number of graphs at once.

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

from dataclasses import replace

import numpy as np

from cgplan.optimizer.paths import (
    Floats,
    Ints,
    best_below,
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
        # bytes that follow from where the two lanes end
        pools, static = map(
            np.maximum.outer,
            first.pools,
            second.pools,
        )
        taken_by = pools + static
        self._room = self._room_in(spare, taken_by)
        self._start(passed)
        self._join()
        took = shared * second.times
        self._joined += took.sum(axis=0)
        if shared.any():
            self._go_on(shared + others, prices)
        taken = taken_by[0]
        joined = self._joined
        joined += missed + missed_second + prices.byte * taken
        joined[taken > spare[:, None]] = np.inf
        apart = self._apart
        apart += missed_first + prices.byte * taken_by[:, 0]
        apart[self._room < 0] = np.inf
        value = np.minimum(
            joined.min(axis=1),
            apart.min(axis=1),
        )
        value += problem.eager_us
        self.value = np.minimum.accumulate(value)

    def _left_to(
        self,
        n: int,
        lanes: tuple[int, ...],
    ) -> tuple[Floats, Floats]:
        """``Problem.left_to`` of the batches that try these lanes."""
        demands = [demand for demand in self._problem.demands if demand.lanes == lanes]
        part = replace(
            self._problem,
            demands=tuple(demands),
            eager_us=0.0,
        )
        return part.left_to(n, ((), ()))

    def _room_in(
        self,
        spare: Floats,
        taken_by: Floats,
    ) -> Ints:
        """[K + 1, ends of the first lane]: the largest end of the second one below it that the
        limits pay for, -1 for none.
        """
        first, second = self._problem.lanes
        held = np.searchsorted(
            second.sizes,
            first.sizes,
            side="right",
        )
        rooms = []
        for taken, number in zip(taken_by, held, strict=True):
            paid = np.searchsorted(
                taken[:number],
                spare,
                side="right",
            )
            rooms.append(paid - 1)
        return np.stack(rooms, axis=1)

    def _start(self, passed: Floats) -> None:
        """Least totals up to a size of the second lane above the first one's end, and that end."""
        first, second = self._problem.lanes
        held = np.searchsorted(
            first.sizes,
            second.sizes,
            side="right",
        )
        self._starts = np.empty_like(self._beyond)
        self._end = np.empty_like(self._after.parent)
        for k, before in enumerate(self._before):
            found = best_start(
                before,
                passed,
                second.times[:1],
                held - 1,
            )
            self._starts[k], self._end[k] = found
        self._starts[:, 0] = np.inf

    def _join(self) -> None:
        """Totals by graphs and the end of the first lane that is the larger one, and by graphs and
        the first size of the second lane above the end of the first.
        """
        after = np.minimum.accumulate(self._beyond, axis=1)
        every = self._before
        self._apart = np.full_like(every, np.inf)
        self._joined = np.full_like(after, np.inf)
        self._share = np.zeros_like(self._end)
        self._parent = np.full_like(self._end, -1)
        for k, before in enumerate(every):
            if k and np.array_equal(before, every[k - 1]):
                continue
            apart = self._apart[k:]
            joined = self._joined[k:]
            rest = np.arange(len(joined))
            room = np.maximum(self._room[k:], 0)
            beside = after[rest[:, None], room]
            np.minimum(
                apart,
                before + beside,
                out=apart,
            )
            total = self._after.cost[rest] + self._starts[k]
            is_less = total < joined
            joined[is_less] = total[is_less]
            self._share[k:][is_less] = k

    def _go_on(
        self,
        weights: Floats,
        prices: Prices,
    ) -> None:
        """Totals by graphs and the last size of the second lane."""
        second = self._problem.lanes[1]
        times = second.times
        took = weights * times
        ran = took.sum(axis=0) + prices.of(second)
        for level in range(1, len(self._joined)):
            least, below = best_below(
                self._joined[level - 1],
                weights,
                times,
            )
            total = least + ran
            is_less = total < self._joined[level]
            self._joined[level, is_less] = total[is_less]
            self._parent[level, is_less] = below[is_less]

    def chosen(self, graphs: int) -> Chosen:
        """The plan of at most so many graphs, of the lanes in their order."""
        most = graphs + 1
        joined = self._joined[:most]
        apart = self._apart[:most]
        sizes: list[int] = []
        if joined.min() < apart.min():
            level, size = _place_of_least(joined)
            below = self._parent[level, size]
            while below >= 0:
                sizes.insert(0, size)
                size = int(below)
                level -= 1
                below = self._parent[level, size]
            share = self._share[level, size]
            end = self._end[share, size]
        else:
            level, end = _place_of_least(apart)
            room = self._room[level, end] + 1
            rest = level - np.arange(level + 1)
            beside = self._beyond[rest, :room]
            least = beside.min(axis=1) + self._before[: level + 1, end]
            share = least.argmin()
            size = int(beside[share].argmin())
        left = int(level - share)
        last = self._after.sizes(left, size) + sizes
        own = self._own.sizes(share, int(end))
        if self._problem.lanes[0] is NOTHING:
            return (tuple(last),)
        return tuple(own), tuple(last)


def _place_of_least(table: Floats) -> tuple[int, int]:
    return divmod(int(table.argmin()), len(table[0]))
