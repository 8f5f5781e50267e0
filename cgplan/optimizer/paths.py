"""The optimal capture sizes of one lane, for every number of graphs at once.

Note [One lane]
~~~~~~~~~~~~~~~
Candidates c_1 < ... < c_N; a batch of n tokens runs at the smallest chosen size that holds it, and
takes ``miss(n)`` (eager, or another lane) above the largest one. With T nondecreasing and W(j) the
weight of the batches up to c_j,

    F_k(j) = min over i < j of F_{k-1}(i) + (W(j) - W(i)) T(j) + price(j),    F_k(0) = 0

is the least total of the batches up to c_j with at most k sizes, the largest of which is c_j. The
whole lane costs min over j of F_k(j) + sum of w(n) miss(n) for n > c_j. This is exact, for each k
up to K.

The cost of a step (i, j) is Monge, for (W(j) - W(i)) T(j) has the cross difference -(W(i') - W(i))
(T(j') - T(j)) <= 0 for i < i', j < j', and terms of i or j alone do not matter. So the best i moves
up with j, and divide and conquer over j finds a level in O(N log N): N / 2 first, then the halves,
each between the answers that enclose it.

Sums of such costs are Monge, too: several kinds of batches, each with its W and T, may share the
sizes. A size that is captured for m of them counts as m graphs: F_k(j) takes F_{k-m} of the size
below, where m is that of c_j.

Note [Candidates]
~~~~~~~~~~~~~~~~~
Sizes at which no batch sits (after rounding up to multiples of q) are not needed. Let c be chosen,
p the chosen size below it, and c' the largest rounded batch up to c. If no batch lies above p, drop
c. Otherwise p < c' <= c; in place of c, c' runs the same batches, since none lies above it, and
T(c') <= T(c). Neither step adds a graph or makes one larger; so under a budget as well nothing is
lost, as long as a smaller graph does not cost more.

The largest size c is not needed if T(c) >= miss(n) for all n <= c: without it, its batches miss,
and that is no slower. So candidates end at the last c of which that is not true.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Paths:
    """F of Note [One lane].

    Attributes:
        cost: [K + 1, N + 1]; inf where there is no path (at least one size, and none chosen).
        parent: [K + 1, N + 1]: the size below the largest one, 0 for none.
        each: Graphs of a size: [N + 1].
    """

    cost: Floats
    parent: npt.NDArray[np.int32]
    each: Ints

    def sizes(self, graphs: int, last: int) -> list[int]:
        """Candidates chosen by the best path of at most so many graphs that ends at ``last``,
        ascending.
        """
        chosen: list[int] = []
        while last > 0:
            chosen.append(last)
            last, graphs = int(self.parent[graphs, last]), graphs - int(self.each[last])
        return chosen[::-1]


def best_paths(
    weights: Floats,
    times: Floats,
    graphs: int,
    price: Floats | None = None,
    each: Ints | None = None,
) -> list[Paths]:
    """The least cost of every path, see Note [One lane], for several sets of weights.

    Args:
        weights: W, cumulative: [sets, N + 1], nondecreasing, 0 at index 0; of several kinds of
            batches that share sizes: [kinds, sets, N + 1].
        times: T: [N + 1], or as the weights, nondecreasing; index 0 is not used.
        graphs: K.
        price: Of each size: [N + 1]; None: 0.
        each: Graphs that each size counts as: [N + 1]; None: 1.
    """
    *_, sets, width = weights.shape
    times = np.broadcast_to(times, weights.shape).reshape(-1, sets, width)
    weights = weights.reshape(-1, sets, width)
    each = np.ones(width, dtype=np.int64) if each is None else each
    counts = np.unique(each[1:]).tolist()
    cost = np.full((graphs + 1, sets, width), np.inf)
    cost[:, :, 0] = 0.0
    parent = np.zeros((graphs + 1, sets, width), dtype=np.int32)
    rounds = _rounds(width - 1)
    for level in range(1, graphs + 1):
        for count in counts[: bisect_right(counts, level)]:
            here = 1 + np.flatnonzero(each[1:] == count)
            after, below = _level(cost[level - count], weights, times, rounds)
            cost[level, :, here] = after[:, here].T + (0.0 if price is None else price[here, None])
            parent[level, :, here] = below[:, here].T
        before = level - max(counts, default=1)
        if before >= 0 and np.array_equal(cost[level], cost[before]):  # more graphs change nothing
            cost[level:], parent[level:] = cost[level], parent[level]
            break
    return [Paths(cost[:, number], parent[:, number], each) for number in range(sets)]


def _rounds(number: int) -> list[tuple[Ints, Ints, Ints]]:
    """Candidates 1 to N in the order in which they are solved: (these, the solved ones below and
    above them).
    """
    found = []
    spans = np.array([[1, number]] if number else [], dtype=np.int64).reshape(-1, 2)
    while spans.size:
        low, high = spans.T
        middle = (low + high) // 2
        found.append((middle, low - 1, high + 1))
        halves = np.stack([low, middle - 1, middle + 1, high], 1).reshape(-1, 2)  # still ascending
        spans = halves[halves[:, 0] <= halves[:, 1]]
    return found


def _level(
    before: Floats, weights: Floats, times: Floats, rounds: list[tuple[Ints, Ints, Ints]]
) -> tuple[Floats, Ints]:
    """One more graph: [sets, N + 1] costs without prices, and [sets, N + 2] parents.

    In a round, the ranges of smaller sizes that two neighbours have to try share at most their
    ends. So one pass over the flat arrays serves all of them; a shared end has the upper
    neighbour's times there and is tried apart.
    """
    sets, width = before.shape
    before, flat = before.ravel(), weights.reshape(len(weights), -1)
    after = np.full((sets, width), np.inf)
    parent = np.zeros((sets, width + 1), dtype=np.int64)
    parent[:, width] = width - 1
    offsets = np.arange(sets)[:, None] * width
    for middle, below, above in rounds:
        number = sets * middle.size
        # of each size: the first one below it, and the last one
        spans = np.empty((number, 2), dtype=np.int64)
        low, high = spans.T
        low[:] = (parent[:, below] + offsets).ravel()
        high[:] = (np.minimum(parent[:, above], middle - 1) + offsets).ravel()
        np.maximum(low, high, out=high)
        runs = np.append(low[1:], before.size)
        runs[1:] -= low[1:]
        owner = np.repeat(np.arange(number), runs)
        time = times[:, :, middle].reshape(len(times), -1)
        value, end = before.copy(), before[high]
        for weight, took in zip(flat, time, strict=True):
            value -= weight * took.take(owner)  # faster than took[owner]
            end -= weight[high] * took
        inner = np.minimum.reduceat(value, spans.ravel())[::2]
        hits = np.flatnonzero(value == inner.take(owner))[::-1]
        best = high.copy()
        best[owner[hits]] = hits  # the first hit of each is written last
        at_end = (end < inner) | (low == high)
        parent[:, middle] = np.where(at_end, high, best).reshape(sets, -1) - offsets
        ran = (weights[:, :, middle] * times[:, :, middle]).sum(axis=0)
        after[:, middle] = np.where(at_end, end, inner).reshape(sets, -1) + ran
    return after, parent
