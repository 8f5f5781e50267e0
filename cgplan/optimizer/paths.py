"""The best capture sizes of one lane, for every number of graphs at once.

Note [One lane]
~~~~~~~~~~~~~~~
Candidates c_1 < ... < c_N; a batch runs at the smallest chosen size that holds it. With W(j) the
weight of the batches up to c_j and T(j) the time of a step there, nondecreasing, the least total of
the batches up to c_j with at most k sizes, the largest of which is c_j, is

    F_k(j) = min over i < j of F_{k-1}(i) + (W(j) - W(i)) T(j) + price(j),    F_k(0) = 0

Several kinds of batches, each with its W and T, may share the sizes. A size that counts as m graphs
takes F_{k-m} of the size below. The cross difference of (W(j) - W(i)) T(j) is at most 0, so the
best i moves up with j.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
FAN = 8  # rows so many apart are solved first, and bound those between them


@dataclass(frozen=True)
class Paths:
    """F of Note [One lane].

    Attributes:
        cost: [K + 1, N + 1]; inf where there is no path.
        parent: [K + 1, N + 1]: the size below the largest one, 0 for none.
        each: Graphs of a size: [N + 1].
    """

    cost: Floats
    parent: Ints
    each: Ints

    def sizes(self, graphs: int, last: int) -> list[int]:
        """Candidates of the best path of at most so many graphs to ``last``, ascending."""
        chosen: list[int] = []
        while last > 0:
            chosen.insert(0, last)
            below = int(self.parent[graphs, last])
            graphs -= int(self.each[last])
            last = below
        return chosen


def best_paths(
    weights: Floats,
    times: Floats,
    graphs: int,
    price: Floats | None = None,
    each: Ints | None = None,
) -> Paths:
    """The least cost of every path, see Note [One lane].

    Args:
        weights: W of each kind of batches: [kinds, N + 1], nondecreasing.
        times: T of each kind: [kinds, N + 1], nondecreasing; index 0 is not used.
        graphs: K.
        price: Of each size: [N + 1]; None: 0.
        each: Graphs that each size counts as: [N + 1]; None: 1.
    """
    width = weights.shape[1]
    if each is None:
        each = np.ones(width, dtype=np.int64)
    cost = np.full((graphs + 1, width), np.inf)
    cost[:, 0] = 0.0
    parent = np.zeros((graphs + 1, width), dtype=np.int64)
    ran = (weights * times).sum(axis=0)
    if price is not None:
        ran += price
    counts = np.unique(each[1:]).tolist()
    for level in range(1, graphs + 1):
        for count in counts:
            if count > level:
                continue
            here = each == count
            here[0] = False
            least, below = best_below(cost[level - count], weights, times)
            cost[level, here] = (least + ran)[here]
            parent[level, here] = below[here]
        before = level - max(counts, default=1)
        if before >= 0 and np.array_equal(cost[level], cost[before]):  # more graphs change nothing
            cost[level:] = cost[level]
            parent[level:] = parent[level]
            break
    return Paths(cost, parent, each)


def best_below(before: Floats, weights: Floats, times: Floats) -> tuple[Floats, Ints]:
    """Of each size j the least ``before[i]`` less weights(i) times(j) over i < j, and that i.

    inf and 0 where there is no such i.
    """
    least = np.full(before.size, np.inf)
    below = np.zeros(before.size, dtype=np.int64)
    if before.size > 1:
        least[1:], below[1:] = best_start(
            before,
            weights,
            times[:, 1:],
            np.arange(before.size - 1),
        )
    return least, below


def best_start(before: Floats, weights: Floats, times: Floats, last: Ints) -> tuple[Floats, Ints]:
    """Of each row j the least ``before[i]`` less weights(i) times(j) over i up to ``last[j]``, and
    that i, which moves up with j.

    Args:
        before: [M].
        weights: [kinds, M], nondecreasing.
        times: [kinds, rows], nondecreasing.
        last: [rows], nondecreasing.
    """
    rows = last.size
    least = np.empty(rows)
    stride = 1
    while stride < rows:
        stride *= FAN
    found = np.zeros(rows + stride, dtype=np.int64)
    found[rows:] = before.size - 1
    here = np.zeros(1, dtype=np.int64)
    below, above = here, here + rows
    while True:
        first = found[below]
        counts = np.maximum(np.minimum(found[above], last[here]), first) - first + 1
        starts = np.cumsum(counts) - counts
        tried = np.arange(int(counts.sum())) + np.repeat(first - starts, counts)
        value = before[tried]
        for weight, took in zip(weights, times, strict=True):
            value -= weight[tried] * np.repeat(took[here], counts)
        least[here] = np.minimum.reduceat(value, starts)
        hits = np.flatnonzero(value == np.repeat(least[here], counts))[::-1]
        owner = np.searchsorted(starts, hits, side="right") - 1
        found[here[owner]] = tried[hits]  # the first hit of each row is written last
        if stride == 1:
            return least, found[:rows]
        coarse = stride
        stride //= FAN
        here = np.arange(0, rows, stride)
        here = here[here % coarse > 0]
        below = here // coarse * coarse
        above = below + coarse


def min_plus(table: Floats, curve: Floats) -> Floats:
    """The least sums of entries of two [K + 1] whose numbers of graphs add up to k."""
    total = np.full(table.shape, np.inf)
    for graphs, value in enumerate(curve):
        np.minimum(
            total[graphs:],
            table[: table.size - graphs] + value,
            out=total[graphs:],
        )
    return total
