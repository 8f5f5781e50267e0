"""The optimal capture sizes of one lane, for every number of graphs at once.

Note [One lane]
~~~~~~~~~~~~~~~
Candidates c_1 < ... < c_N; a batch of n tokens runs at the smallest chosen size that holds it, and takes ``miss(n)``
(eager, or another lane) above the largest one. With T nondecreasing and W(j) the weight of the batches up to c_j,

    F_k(j) = min over i < j of F_{k-1}(i) + (W(j) - W(i)) T(j) + price(j),    F_k(0) = 0

is the least total of the batches up to c_j with at most k sizes, the largest of which is c_j. The whole lane costs
min over j of F_k(j) + sum of w(n) miss(n) for n > c_j. This is exact, for each k up to K.

The cost of a step (i, j) is Monge, for (W(j) - W(i)) T(j) has the cross difference -(W(i') - W(i)) (T(j') - T(j)) <= 0
for i < i', j < j', and what depends on i or j alone does not matter. So the best i moves up with j, and divide and
conquer over j finds a level in O(N log N): N / 2 first, then the halves, each between the answers that enclose it. A
sum of such costs with other weights and times is Monge too.

Note [Candidates]
~~~~~~~~~~~~~~~~~
Sizes at which no batch sits (after rounding up to multiples of q) are not needed. Let c be chosen, p the chosen size
below it, and c' the largest rounded batch up to c. If no batch lies above p, drop c. Otherwise p < c' <= c; in place of
c, c' runs the same batches, since none lies above it, and T(c') <= T(c). Neither step adds a graph or makes one larger;
so under a budget as well nothing is lost, as long as a smaller graph does not cost more.

A size c with a larger candidate d and T(d) <= T(c) is not needed *below* another chosen size e. If e >= d, choose d
instead of c: its batches take T(d) <= T(c), and those between c and d take T(d) <= T(e). If c < e < d, T(e) = T(c), and
c is dropped. As the *largest* size c is needed all the same: d runs batches that would miss, for whom eager may be
faster, and it costs more memory. So F_k(j) stays for every j, and paths only do not lead on from such a c. Graphs that
cost more for larger sizes break the argument (d may not be paid for); there nothing is dropped.

The largest size c is not needed if T(c) >= miss(n) for all n <= c: without it, its batches miss, and that is no slower.
So candidates end at the last c of which that is not true.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Paths:
    """F of Note [One lane], for several sets of weights at once.

    Attributes:
        cost: [K + 1, sets, N + 1]; inf where there is no path (at least one size, and none chosen).
        parent: [K + 1, sets, N + 1]: the size below the largest one, 0 for none.
    """

    cost: Floats
    parent: npt.NDArray[np.int32]

    @property
    def graphs(self) -> int:
        """K."""
        return len(self.cost) - 1

    def up_to(self, graphs: int) -> Paths:
        """The same for fewer graphs; no copy."""
        return Paths(self.cost[: graphs + 1], self.parent[: graphs + 1])

    def sizes(self, graphs: int, last: int, which: int = 0) -> list[int]:
        """Candidates chosen by the best path of at most so many graphs that ends at ``last``, ascending."""
        chosen: list[int] = []
        while last > 0:
            chosen.append(last)
            last = int(self.parent[graphs, which, last])
            graphs -= 1
        return chosen[::-1]


def best_paths(
    weights: Floats,
    times: Floats,
    graphs: int,
    *,
    price: Floats | None = None,
    passing: Bools | None = None,
    known: Paths | None = None,
) -> Paths:
    """The least cost of every path, see Note [One lane].

    Args:
        weights: W, cumulative: [terms, sets, N + 1], nondecreasing, 0 at index 0. Each term has times of its own.
        times: T: [terms, N + 1], nondecreasing; index 0 is not used.
        graphs: K.
        price: Of each size: [N + 1]; absent: 0.
        passing: [N + 1]: whether paths may lead on from a candidate, see Note [Candidates]; absent: from all.
        known: The answer for fewer graphs, to go on from.
    """
    terms, sets, width = weights.shape
    cost = np.full((graphs + 1, sets, width), np.inf)
    cost[:, :, 0] = 0.0
    parent = np.zeros((graphs + 1, sets, width), dtype=np.int32)
    start = 0 if known is None else known.graphs
    if known is not None:
        cost[: start + 1], parent[: start + 1] = known.cost, known.parent
    rounds, flat = _rounds(width - 1), weights.reshape(terms, -1)
    for level in range(start + 1, graphs + 1):
        before = cost[level - 1] if passing is None else np.where(passing, cost[level - 1], np.inf)
        after, below = _level(before.ravel(), flat, times, rounds, sets)
        cost[level, :, 1:] = after[:, 1:] if price is None else after[:, 1:] + price[1:]
        parent[level] = below[:, :width]
        if np.array_equal(cost[level], cost[level - 1]):  # more graphs change nothing
            cost[level:], parent[level:] = cost[level], parent[level]
            break
    return Paths(cost, parent)


def _rounds(number: int) -> list[tuple[Ints, Ints, Ints]]:
    """Candidates 1 to N in the order in which they are solved: (these, the solved ones below and above them)."""
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
    before: Floats, weights: Floats, times: Floats, rounds: list[tuple[Ints, Ints, Ints]], sets: int
) -> tuple[Floats, Ints]:
    """One more graph: [sets, N + 1] costs without prices, and [sets, N + 2] parents.

    In a round, the sizes below that come into question for neighbours share their ends at most. So all are gone
    through at once, in place; an end that is shared has the upper one's times there and is looked at apart.
    """
    width = before.size // sets
    after = np.full((sets, width), np.inf)
    parent = np.zeros((sets, width + 1), dtype=np.int64)
    parent[:, width] = width - 1
    offsets = np.arange(sets)[:, None] * width
    for middle, below, above in rounds:
        number = sets * middle.size
        spans = np.empty((number, 2), dtype=np.int64)  # of each size: the first one below it, and the last one
        low, high = spans.T
        low[:] = (parent[:, below] + offsets).ravel()
        high[:] = (np.minimum(parent[:, above], middle - 1) + offsets).ravel()
        np.maximum(low, high, out=high)
        runs = np.append(low[1:], before.size)
        runs[1:] -= low[1:]
        owner = np.repeat(np.arange(number), runs)
        value, end = before, before[high]
        for term, time in zip(weights, times, strict=True):
            own = np.tile(time[middle], sets)
            value = value - term * own.take(owner)  # faster than own[owner]
            end = end - term[high] * own
        inner = np.minimum.reduceat(value, spans.ravel())[::2]
        hits = np.flatnonzero(value == inner.take(owner))[::-1]
        best = high.copy()
        best[owner[hits]] = hits  # the first hit of each is written last
        least = np.where(at_end := (end < inner) | (low == high), end, inner)
        parent[:, middle] = np.where(at_end, high, best).reshape(sets, -1) - offsets
        for term, time in zip(weights.reshape(-1, sets, width), times, strict=True):
            least = least + (term[:, middle] * time[middle]).ravel()
        after[:, middle] = least.reshape(sets, -1)
    return after, parent
