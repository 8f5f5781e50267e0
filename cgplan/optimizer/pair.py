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

from copy import copy
from dataclasses import replace

import numpy as np

from cgplan.optimizer.paths import Floats, best_below, best_start
from cgplan.optimizer.problem import Candidates, Chosen, Prices, Problem

NOTHING = Candidates(
    lanes=(),
    sizes=np.zeros(1, dtype=np.int64),
    times=np.zeros((1, 1)),
    each=np.ones(1, dtype=np.int64),
    driver=np.zeros(1),
    seconds=np.zeros(1),
    pool=np.zeros(1),
    static=np.zeros(1),
)


class Pair:
    """The best plans of one lane or two, see Note [Two lanes].

    Attributes:
        value: [K + 1] least totals by the number of graphs, with the price of costs.
    """

    def __init__(self, problem: Problem, prices: Prices, spare: Floats) -> None:
        if len(problem.lanes) == 1:
            demands = tuple(replace(demand, lanes=(1,)) for demand in problem.demands)
            problem = replace(
                problem,
                lanes=(NOTHING, *problem.lanes),
                demands=demands,
            )
        self._problem, self._prices = problem, prices
        self._first, self._second = problem.lanes
        served = [demand.lanes for demand in problem.demands]
        self._both = [number for number, lanes in enumerate(served) if lanes == (0, 1)]
        mine = [number for number, lanes in enumerate(served) if lanes == (0,)]
        self._theirs = [number for number, lanes in enumerate(served) if lanes == (1,)]
        graphs = spare.size - 1
        self._own = problem.paths(
            0,
            [*self._both, *mine],
            graphs,
            prices,
        )
        self._before = self._own.cost + problem.missed(0, mine)
        self._after = problem.paths(
            1,
            self._theirs,
            graphs,
            prices,
        )
        self._beyond = self._after.cost + problem.missed(1, self._theirs)
        self._start = np.full(self._beyond.shape, np.inf)
        self._end = np.zeros(self._beyond.shape, dtype=np.int64)
        shared, times = problem.weights(0, self._both), self._second.times[:1, 1:]
        reach = (
            np.searchsorted(
                self._first.sizes,
                self._second.sizes[1:],
                side="right",
            )
            - 1
        )
        for k in range(graphs + 1 if times.size else 0):
            found = best_start(
                self._before[k],
                shared,
                times,
                reach,
            )
            self._start[k, 1:], self._end[k, 1:] = found
        # bytes that follow from where the two lanes end
        pool = np.maximum.outer(self._first.pool, self._second.pool)
        static = np.maximum.outer(self._first.static, self._second.static)
        some = np.add.outer(self._first.sizes, self._second.sizes) > 0
        self._taken_by = pool + static + problem.workspace * some
        self._solve(spare, 0, graphs)

    def within(self, spare: Floats, low: int, high: int) -> Pair:
        """The same with ``low`` to ``high`` graphs of the first lane."""
        other = copy(self)
        other._solve(spare, low, high)
        return other

    def _solve(self, spare: Floats, low: int, high: int) -> None:
        problem, both = self._problem, self._both
        self._low = low
        self._find_room(spare)
        self._join(high)
        if both:
            least = self._taken_by[0, 1:].min(initial=np.inf)
            paid = np.flatnonzero(spare >= least).max(initial=0)
            self._go_on(problem.weights(1, [*both, *self._theirs]), int(paid))
        taken, byte = self._taken_by[0], self._prices.byte
        missed = problem.missed(1, [*both, *self._theirs]) + problem.eager_us
        self._joined += missed + byte * taken
        self._joined[taken > spare[:, None]] = np.inf
        self._apart += problem.missed(0, both) + problem.eager_us + byte * self._taken_by[:, 0]
        self._apart[self._room < 0] = np.inf
        value = np.minimum(self._joined.min(axis=1), self._apart.min(axis=1))
        self.value = np.minimum.accumulate(value)

    def _find_room(self, spare: Floats) -> None:
        """[K + 1, ends of the first lane]: the largest end of the second one below it that the
        limits pay for, -1 for none.
        """
        below = np.searchsorted(self._second.sizes, self._first.sizes, side="right") - 1
        self._room = np.empty((spare.size, below.size), dtype=np.int64)
        for end, most in enumerate(below.tolist()):
            paid = np.searchsorted(self._taken_by[end, : most + 1], spare, side="right")
            self._room[:, end] = paid - 1

    def _join(self, high: int) -> None:
        """Totals by graphs and the end of the first lane that is the larger one, and by graphs and
        the first size of the second lane above the end of the first.
        """
        most = len(self._before) - 1
        after = np.minimum.accumulate(self._beyond, axis=1)
        self._apart = np.full(self._before.shape, np.inf)
        self._joined = np.full(self._beyond.shape, np.inf)
        self._share = np.zeros(self._joined.shape, dtype=np.int64)
        self._parent = np.full(self._joined.shape, -1)
        for k in range(self._low, high + 1):
            if k > self._low and np.array_equal(self._before[k], self._before[k - 1]):
                continue
            rest = np.arange(most + 1 - k)
            after_it = after[rest[:, None], np.maximum(self._room[k:], 0)]
            self._apart[k:] = np.minimum(self._apart[k:], self._before[k] + after_it)
            total = self._start[k] + self._after.cost[: most + 1 - k]
            is_less = total < self._joined[k:]
            self._joined[k:][is_less] = total[is_less]
            self._share[k:][is_less] = k
        shared = self._problem.weights(1, self._both)
        self._joined += (shared * self._second.times).sum(axis=0)

    def _go_on(self, weights: Floats, graphs: int) -> None:
        """Totals by graphs, up to so many, and the last size of the second lane."""
        times = self._second.times
        ran = (weights * times).sum(axis=0) + self._prices.of(self._second)
        for level in range(1, graphs + 1):
            least, below = best_below(
                self._joined[level - 1],
                weights,
                times,
            )
            is_less = least + ran < self._joined[level]
            self._joined[level, is_less] = (least + ran)[is_less]
            self._parent[level, is_less] = below[is_less]

    def chosen(self, graphs: int) -> Chosen:
        """The plan of at most so many graphs, of the lanes in their order."""
        joined, apart = self._joined[: graphs + 1], self._apart[: graphs + 1]
        sizes: list[int] = []
        if joined.min() < apart.min():
            level, size = map(int, np.unravel_index(joined.argmin(), joined.shape))
            while self._parent[level, size] >= 0:
                sizes.insert(0, size)
                size = int(self._parent[level, size])
                level -= 1
            share = int(self._share[level, size])
            end = int(self._end[share, size])
        else:
            level, end = map(int, np.unravel_index(apart.argmin(), apart.shape))
            room = int(self._room[level, end]) + 1
            shares = range(self._low, level + 1)
            totals = [self._before[k, end] + self._beyond[level - k, :room].min() for k in shares]
            share = shares[int(np.argmin(totals))]
            size = int(self._beyond[level - share, :room].argmin())
        last = (*self._after.sizes(level - share, size), *sizes)
        if self._first is NOTHING:
            return (last,)
        return tuple(self._own.sizes(share, end)), last
