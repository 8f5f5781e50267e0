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
            demands = []
            for demand in problem.demands:
                served = replace(demand, lanes=(1,))
                demands.append(served)
            problem = replace(
                problem,
                lanes=(NOTHING, *problem.lanes),
                demands=tuple(demands),
            )
        self._problem = problem
        self._prices = prices
        first, second = problem.lanes
        self._first = first
        self._second = second
        graphs = spare.size - 1
        alone, missed = self._left_to(0, (0,))
        own, self._missed_first = self._left_to(0, (0, 1))
        self._own = first.paths(alone + own, graphs, prices)
        self._before = self._own.cost + missed
        self._passed = own
        self._others, missed = self._left_to(1, (1,))
        self._shared, self._missed = self._left_to(1, (0, 1))
        self._missed += missed
        self._after = second.paths(self._others, graphs, prices)
        self._beyond = self._after.cost + missed
        self._find_starts()
        # bytes that follow from where the two lanes end
        pools, static = map(
            np.maximum.outer,
            first.pools,
            second.pools,
        )
        self._taken_by = pools + static
        self._solve(spare)

    def _find_starts(self) -> None:
        """Least totals up to a size of the second lane above the first one's end, and that end."""
        first = self._first
        second = self._second
        sizes = second.sizes[1:]
        times = second.times[:1, 1:]
        weights = self._passed
        ends = first.sizes
        held = np.searchsorted(ends, sizes, side="right")
        last = held - 1
        self._start = np.full_like(self._beyond, np.inf)
        parent = self._after.parent
        self._end = np.zeros_like(parent)
        if not sizes.size:
            return
        for k, before in enumerate(self._before):
            start = self._start[k]
            end = self._end[k]
            found = best_start(before, weights, times, last)
            start[1:], end[1:] = found

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

    def _solve(self, spare: Floats) -> None:
        self._room = self._room_in(spare)
        self._join()
        taken = self._taken_by[0]
        if self._shared.any():
            some = taken[1:]
            least = some.min(initial=np.inf)
            is_paid = spare >= least
            paid = np.flatnonzero(is_paid)
            most = paid.max(initial=0)
            self._go_on(int(most))
        byte = self._prices.byte
        joined = self._joined
        joined += self._missed
        joined += byte * taken
        is_too_much = taken > spare[:, None]
        joined[is_too_much] = np.inf
        taken = self._taken_by[:, 0]
        apart = self._apart
        apart += self._missed_first
        apart += byte * taken
        is_too_much = self._room < 0
        apart[is_too_much] = np.inf
        value = np.minimum(
            joined.min(axis=1),
            apart.min(axis=1),
        )
        value += self._problem.eager_us
        self.value = np.minimum.accumulate(value)

    def _room_in(self, spare: Floats) -> Ints:
        """[K + 1, ends of the first lane]: the largest end of the second one below it that the
        limits pay for, -1 for none.
        """
        ends = self._first.sizes
        sizes = self._second.sizes
        held = np.searchsorted(sizes, ends, side="right")
        rooms = []
        for end, number in enumerate(held):
            taken = self._taken_by[end]
            taken = taken[:number]
            paid = np.searchsorted(
                taken,
                spare,
                side="right",
            )
            rooms.append(paid - 1)
        return np.stack(rooms, axis=1)

    def _join(self) -> None:
        """Totals by graphs and the end of the first lane that is the larger one, and by graphs and
        the first size of the second lane above the end of the first.
        """
        beyond = self._beyond
        after = np.minimum.accumulate(beyond, axis=1)
        ends = self._end
        every = self._before
        self._apart = np.full_like(every, np.inf)
        self._joined = np.full_like(after, np.inf)
        self._share = np.zeros_like(ends)
        self._parent = np.full_like(ends, -1)
        for k, before in enumerate(every):
            fewer = every[k - 1]
            if k and np.array_equal(before, fewer):
                continue
            apart = self._apart[k:]
            joined = self._joined[k:]
            share = self._share[k:]
            rest = np.arange(len(joined))
            room = self._room[k:]
            room = np.maximum(room, 0)
            rows = rest[:, None]
            beside = after[rows, room]
            total = before + beside
            np.minimum(
                apart,
                total,
                out=apart,
            )
            total = self._after.cost[rest]
            total += self._start[k]
            is_less = total < joined
            joined[is_less] = total[is_less]
            share[is_less] = k
        times = self._second.times
        ran = self._shared * times
        took = ran.sum(axis=0)
        self._joined += took

    def _go_on(self, graphs: int) -> None:
        """Totals by graphs, up to so many, and the last size of the second lane."""
        second = self._second
        times = second.times
        weights = self._shared + self._others
        took = weights * times
        ran = took.sum(axis=0)
        ran += self._prices.of(second)
        for level in range(1, graphs + 1):
            before = self._joined[level - 1]
            joined = self._joined[level]
            parent = self._parent[level]
            least, below = best_below(before, weights, times)
            total = least + ran
            is_less = total < joined
            joined[is_less] = total[is_less]
            parent[is_less] = below[is_less]

    def chosen(self, graphs: int) -> Chosen:
        """The plan of at most so many graphs, of the lanes in their order."""
        most = graphs + 1
        joined = self._joined[:most]
        apart = self._apart[:most]
        sizes: list[int] = []
        least = joined.min()
        if least < apart.min():
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
            room = self._room[level, end]
            room += 1
            shares = np.arange(level + 1)
            rest = level - shares
            beside = self._beyond[rest, :room]
            least = beside.min(axis=1)
            least += self._before[shares, end]
            found = least.argmin()
            share = shares[found]
            nearest = beside[found]
            size = int(nearest.argmin())
        left = int(level - share)
        last = self._after.sizes(left, size)
        last += sizes
        end = int(end)
        own = self._own.sizes(share, end)
        if self._first is NOTHING:
            return (tuple(last),)
        return tuple(own), tuple(last)


def _place_of_least(table: Floats) -> tuple[int, int]:
    place = int(table.argmin())
    width = len(table[0])
    return divmod(place, width)
