"""The best boxes to choose for batches, and a bound on how much better others could be.

Note [Boxes]
~~~~~~~~~~~~
To choose K columns with the least total of each row's weight times its least cost is the p-median
problem. Columns chosen one by one, and exchanged for others, give a choice. A price u(p) for each
row, and prices v for the shares of the limits that columns take, give a bound:

    L(u, v) = sum of w(p) u(p) - v limits - the K largest gains above 0,
    gain(j) = sum of w(p) max(u(p) - cost(p, j), 0) - v shares(j)

is below every choice within the limits (Lagrangian relaxation), and subgradient steps raise it. A
column whose gain is farther from the K-th than the choice from the bound is in no better choice.
Branching on the others closes the gap, or the effort ends and the gap is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cgplan.optimizer.paths import Floats, Ints

EFFORT = 1 << 30  # rows times columns times subgradient steps, about
STEPS, NODE_STEPS, PATIENCE = 2000, 60, 20  # at the root, at other nodes, without progress at least
PROVEN = 1e-9  # relative gap that counts as none
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Purse:
    """What columns cost, and the limits. Arrays are [columns].

    Attributes:
        graphs, memory, seconds: Limits of columns, bytes and seconds; inf: none.
        driver, took: Bytes and seconds of each column.
        pool, static: Bytes of which the largest counts, of all columns and of those of a ``group``.
        least: Bytes of the pool and of static buffers that every choice takes.
    """

    graphs: int
    memory: float
    seconds: float
    driver: Floats
    took: Floats
    pool: Floats
    static: Floats
    group: Ints
    least: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of_graphs(cls, graphs: int, columns: int) -> Purse:
        """A limit of their number alone."""
        zeros = np.zeros(columns)
        group = np.zeros(columns, dtype=np.int64)
        return cls(
            graphs,
            np.inf,
            np.inf,
            zeros,
            zeros,
            zeros,
            zeros,
            group,
        )

    def pays_beside(self, chosen: Sequence[int]) -> Bools:
        """Whether the limits pay for each column beside the chosen ones."""
        driver, took, pool, static = self._spent(chosen)
        memory = driver + self.driver + np.maximum(self.pool, pool)
        memory += static.sum() + np.maximum(self.static - static[self.group], 0.0)
        is_paid = (memory <= self.memory) & (took + self.took <= self.seconds)
        return np.asarray(is_paid & (len(chosen) < self.graphs))

    def pays(self, chosen: Sequence[int]) -> bool:
        return not chosen or bool(self.pays_beside(chosen[:-1])[chosen[-1]])

    def left(self, chosen: Sequence[int]) -> Floats:
        """[2] the shares of memory and of seconds that other columns may take at most."""
        driver, took, pool, static = self._spent(chosen)
        pool, fixed = max(pool, self.least[0]), max(float(static.sum()), self.least[1])
        return np.array([1 - (driver + pool + fixed) / self.memory, 1 - took / self.seconds])

    def _spent(self, chosen: Sequence[int]) -> tuple[float, float, float, Floats]:
        picked = np.array(chosen, dtype=np.int64)
        static = np.zeros(int(self.group.max(initial=0)) + 1)
        np.maximum.at(
            static,
            self.group[picked],
            self.static[picked],
        )
        driver, took = float(self.driver[picked].sum()), float(self.took[picked].sum())
        return driver, took, float(self.pool[picked].max(initial=0.0)), static


class Dual(NamedTuple):
    """Prices of rows and of limits, the bound that they give, and the gains of columns."""

    bound: float
    rows: Floats
    limits: Floats
    gains: Floats


def best_columns(
    cost: Floats, weights: Floats, purse: Purse, start: Sequence[int] = ()
) -> tuple[list[int], float]:
    """The columns within the limits with the least total of each row's weight times its least cost,
    and a bound on it, see Note [Boxes]. The choice is the best one where the bound is its total.

    Args:
        cost: [rows, columns].
        weights: [rows], above 0.
        start: A choice to begin with; if it is paid for, what is found is at least as good.
    """
    best, value, effort, number = list[int](), total_of(cost, weights, ()), EFFORT, count()

    def look_around(chosen: Sequence[int]) -> None:
        nonlocal best, value
        for limits in purses:
            found = exchanged(
                cost,
                weights,
                limits,
                chosen,
            )
            total = total_of(cost, weights, found)
            if total < value and purse.pays(found):
                best, value = found, total

    shares = np.stack([purse.driver / purse.memory, purse.took / purse.seconds])
    most = min(purse.graphs, _number(shares, purse.left(())))
    purse = replace(purse, graphs=most)
    shares[most * shares.max(axis=1) <= purse.left(())] = 0.0  # their number alone limits those
    purses = [purse]
    if shares.any():
        purses.append(Purse.of_graphs(max(most, 1), cost.shape[1]))
    look_around(())
    look_around(start)
    price = np.full(len(cost), cost[:, best].min(axis=1, initial=cost.max()).max())
    nodes = [
        (
            -np.inf,
            next(number),
            list[int](),
            np.arange(cost.shape[1]),
            price,
            np.zeros(2),
        )
    ]
    while nodes and effort > 0 and nodes[0][0] < value * (1 - PROVEN):
        low, step, sure, free, price, limits_price = heappop(nodes)
        free = free[purse.pays_beside(sure)[free]]
        if not free.size:
            look_around(sure)
            continue
        highest = cost[:, sure].min(axis=1, initial=cost.max())
        steps = NODE_STEPS if step else min(STEPS, EFFORT // cost.size)
        part, left = shares[:, free], purse.left(sure)
        graphs = min(purse.graphs - len(sure), max(_number(part, left), 1))
        relaxed = _Relaxed(
            cost[:, free],
            weights,
            highest,
            part,
            left,
            graphs,
        )
        dual = relaxed.raised(
            price,
            limits_price,
            value,
            steps,
        )
        effort -= free.size * len(cost) * steps
        order = np.argsort(-dual.gains, kind="stable")
        free, gains = free[order], dual.gains[order]
        opened = int((gains[:graphs] > 0).sum())
        if not step or total_of(
            cost,
            weights,
            [*sure, *free[:opened]],
        ) < value * (1 - PROVEN):
            look_around([*sure, *free[:opened].tolist()])
        bound = max(dual.bound, low)
        if bound < value * (1 - PROVEN):
            at = max(opened - 1, 0)
            threshold = max(float(gains[graphs - 1]), 0.0)
            rest = np.delete(free, at)[np.delete(gains, at) > threshold - (value - bound)]
            for some in ([*sure, int(free[at])], sure):
                heappush(
                    nodes,
                    (
                        bound,
                        next(number),
                        some,
                        rest,
                        dual.rows,
                        dual.limits,
                    ),
                )
    return best, min(
        value,
        *(node[0] for node in nodes),
        np.inf,
    )


def _number(shares: Floats, left: Floats) -> int:
    """How many columns at most take no more than what is left."""
    spent = np.cumsum(np.sort(shares, axis=1), axis=1)
    return int((spent <= left[:, None] * (1 + PROVEN)).all(axis=0).sum())


def total_of(cost: Floats, weights: Floats, chosen: Sequence[int] | Ints) -> float:
    """The total of a choice; that of the largest cost without one."""
    return float(weights @ cost[:, [*chosen]].min(axis=1, initial=cost.max()))


def exchanged(cost: Floats, weights: Floats, purse: Purse, chosen: Sequence[int] = ()) -> list[int]:
    """Columns chosen one by one for the most gain, then exchanged for others as long as that
    gains. Those to begin with (without any, the
    one with the least largest cost) are those that are paid for.
    """
    best = list[int]()
    for column in [*chosen] or [int(cost.max(axis=0).argmin())]:
        if purse.pays([*best, column]):
            best.append(column)
    reach = np.empty_like(cost)
    turn = idle = 0
    while True:
        whole = idle == 0  # first one more, then one in the place of another
        rest = best if whole else [*best[:turn], *best[turn + 1 :]]
        before = cost[:, rest].min(axis=1, initial=cost.max())
        gains = np.where(
            purse.pays_beside(rest),
            _gains(
                cost,
                weights,
                before,
                reach,
            ),
            -1.0,
        )
        more = [*rest, int(gains.argmax())]
        least = total_of(cost, weights, best) * (1 - PROVEN)
        if gains.max() > 0 and total_of(cost, weights, more) < least:
            best, idle = more, 0
        elif idle == len(best):
            return best
        else:
            idle += 1
            turn = (turn + 1 - whole) % len(best)


def _gains(cost: Floats, weights: Floats, price: Floats, reach: Floats) -> Floats:
    """Of each column; ``reach`` takes what each row saves."""
    np.subtract(price[:, None], cost, out=reach)
    return np.asarray(weights @ np.maximum(reach, 0, out=reach))


@dataclass
class _Relaxed:
    """The relaxation at one node: a row costs ``most`` without any of the columns, of which there
    may be ``graphs``; they take ``shares``, [2, columns], of what is ``left``, [2].
    """

    cost: Floats
    weights: Floats
    most: Floats
    shares: Floats
    left: Floats
    graphs: int

    def raised(self, rows: Floats, limits: Floats, value: float, steps: int) -> Dual:
        """The largest bound that steps from these prices find."""
        reach, length, idle = np.empty_like(self.cost), 1.5, 0
        best = Dual(
            -np.inf,
            rows,
            limits,
            self.shares[0],
        )
        total = float(self.weights.sum())
        for _ in range(steps):
            rows = np.clip(rows, 0, self.most)
            gains = (
                _gains(
                    self.cost,
                    self.weights,
                    rows,
                    reach,
                )
                - limits @ self.shares
            )
            opened = np.argpartition(-gains, self.graphs - 1)[: self.graphs]
            opened = opened[gains[opened] > 0]
            bound = float(self.weights @ rows - limits @ self.left - gains[opened].sum())
            if bound > best.bound:
                best, idle = (
                    Dual(
                        bound,
                        rows,
                        limits,
                        gains,
                    ),
                    0,
                )
            else:
                idle += 1
            slope = 1.0 - np.count_nonzero(reach[:, opened], axis=1)
            slope[(slope > 0) & (rows >= self.most)] = 0
            over = self.shares[:, opened].sum(axis=1) - self.left
            over[(over < 0) & (limits <= 0)] = 0
            norm = self.weights @ slope**2 + total * over @ over
            if not norm or bound >= value * (1 - PROVEN):
                break
            if idle > max(PATIENCE, steps // 30):
                rows, limits, length, idle = best.rows, best.limits, length / 2, 0
            else:
                pace = length * (value - bound) / norm
                rows = rows + pace * slope
                limits = np.maximum(limits + pace * total * over, 0)
        return best
