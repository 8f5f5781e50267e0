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
        parent: [K + 1, N + 1]: the size below the largest one; -1 where a path starts.
        each: Graphs of a size: [N + 1].
    """

    cost: Floats
    parent: Ints
    each: Ints

    def sizes(
        self,
        graphs: int,
        last: int,
    ) -> list[int]:
        """Candidates of the best path of at most so many graphs to ``last``, ascending."""
        chosen: list[int] = []
        below = int(self.parent[graphs, last])
        while below >= 0:
            chosen.insert(0, last)
            graphs -= int(self.each[last])
            last = below
            below = int(self.parent[graphs, last])
        return chosen


def best_paths(
    weights: Floats,
    times: Floats,
    graphs: int,
    price: Floats | float = 0.0,
    each: Ints | None = None,
) -> Paths:
    """The least cost of every path, see Note [One lane].

    Args:
        weights: W of each kind of batches: [kinds, N + 1], nondecreasing.
        times: T of each kind: [kinds, N + 1], nondecreasing; index 0 is not used.
        graphs: K.
        price: Of each size: [N + 1], or all.
        each: Graphs that each size counts as: [N + 1]; None: 1.
    """
    width = weights.shape[1]
    if each is None:
        each = np.ones(width, dtype=int)
    shape = graphs + 1, width
    cost = np.full(shape, np.inf)
    cost[:, 0] = 0.0
    parent = np.full(cost.shape, -1)
    took = weights * times
    ran = took.sum(axis=0) + price
    counts = set(each[1:].tolist())
    widest = max(counts, default=1)
    for level in range(1, graphs + 1):
        for count in counts:
            if count <= level:
                before = cost[level - count]
                least, below = best_start(before, weights, times)
                total = least + ran
                here = (each == count) & (total < cost[level])
                cost[level, here] = total[here]
                parent[level, here] = below[here]
        if level < widest:
            continue
        before = cost[level - widest]
        if np.array_equal(cost[level], before):  # more graphs change nothing
            cost[level:] = before
            parent[level:] = parent[level]
            break
    return Paths(cost, parent, each)


def best_start(
    before: Floats,
    weights: Floats,
    times: Floats,
) -> tuple[Floats, Ints]:
    """Of each row j the least ``before[i]`` less weights(i) times(j) over i below j, and that i,
    which moves up with j.
    """
    rows = before.size
    stride = 1
    while stride * FAN < rows:
        stride *= FAN
    least = np.empty(rows)
    found = np.zeros(rows + stride, dtype=int)
    found[rows:] = rows - 1
    here = np.arange(0, rows, stride)
    below = here
    above = np.full_like(here, rows)
    while True:
        first = found[below]
        most = np.minimum(found[above], here - 1)
        most = np.maximum(most, first)
        counts = most - first + 1
        ends = counts.cumsum()
        starts = ends - counts
        row = here.repeat(counts)
        tried = np.arange(row.size)
        tried += (first - starts).repeat(counts)
        value = before[tried]
        for weight, time in zip(weights, times, strict=True):
            value -= weight[tried] * time[row]
        least[here] = np.minimum.reduceat(value, starts)
        hits = np.flatnonzero(value == least[row])
        hits = hits[::-1]  # the first one of a row is written last
        found[row[hits]] = tried[hits]
        if stride == 1:
            return least, found[:rows]
        coarse = stride
        stride //= FAN
        here = np.arange(0, rows, stride)
        beyond = here % coarse
        here = here[beyond > 0]
        below = here - beyond[beyond > 0]
        above = below + coarse
