"""The best boxes to choose for batches, and a bound on how much better others could be.

Note [Boxes]
~~~~~~~~~~~~
To choose columns with the least total of each row's weight times its least cost is the p-median
problem. A price u for each row and prices v for bytes and seconds give a bound on every choice
within the limits (Lagrangian relaxation), which subgradient steps raise:

    L(u, v) = sum of w u - v limits - the most that so many columns gain,

where a column gains the sum of w max(u - cost, 0) less v times its figures. A column that loses
more than the gap is in no better choice. Branching on columns, which pays for what they take of the
limits, closes the gap, or the effort ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cgplan.optimizer.paths import Floats, Ints

EFFORT = 280_000_000  # costs to look at, about
OVERHEAD = 3 << 13  # of a step, in costs
FIRST, STEPS = 200, 40  # at the first node, at others
PATIENCE = 8  # steps without progress
LENGTH = 1.5  # of the first step, as a share of the way to the value
MOMENTUM = 0.8  # share of the step before
RECENT = 0.1  # weight of the last choice
RARE = 0.05  # share of recent choices below which a column is not likely
LEAST = 1e-9  # bytes or seconds that are left
PROVEN = 1e-9  # relative gap that counts as none
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Purse:
    """What columns cost, and the limits.

    Attributes:
        graphs, memory, seconds: Limits of columns, bytes and seconds; inf: none.
        figures: [4, columns] bytes of the driver, seconds, bytes of the pool and of static buffers.
            The largest pool counts, and the largest static buffers of each group.
        groups: Column c is of group c % groups, in which neither of these falls.
    """

    graphs: int
    memory: float
    seconds: float
    figures: Floats
    groups: int = 1

    @classmethod
    def of_graphs(cls, graphs: int, columns: int) -> Purse:
        """A limit of their number alone."""
        return cls(
            graphs,
            np.inf,
            np.inf,
            np.zeros((4, columns)),
        )

    def buffers(self, chosen: list[int] | Ints) -> Floats:
        """Bytes of static buffers, by groups."""
        held = np.zeros_like(self.figures[3])
        held[chosen] = self.figures[3, chosen]
        largest: Floats = held.reshape(-1, self.groups).max(axis=0)
        return largest

    def pays_beside(self, chosen: list[int]) -> Bools:
        """Whether the limits pay for each column beside the chosen ones."""
        driver, took, pool, static = self.figures
        largest = self.buffers(chosen)
        grown = static.reshape(-1, self.groups) - largest
        grown = np.maximum(grown, 0.0)
        memory = driver + driver[chosen].sum()
        memory += np.maximum(
            pool,
            pool[chosen].max(initial=0.0),
        )
        memory += largest.sum()
        memory += grown.ravel()
        seconds = took + took[chosen].sum()
        is_paid = (memory <= self.memory) & (seconds <= self.seconds)
        return np.asarray(is_paid & (len(chosen) < self.graphs))


def filled(cost: Floats, weights: Floats) -> Floats:
    """Finite costs with which no row is left without a column that holds it."""
    is_held = np.isfinite(cost)
    rarest = weights.min() / weights.sum()
    missed = 2 * cost[is_held].max() / rarest
    return np.where(is_held, cost, missed)


def exchanged(
    cost: Floats,
    weights: Floats,
    purse: Purse,
    start: Sequence[int] = (),
) -> tuple[list[int], float]:
    """Columns chosen one by one for the most gain, then exchanged for others as long as that gains;
    and their total. The first are those of ``start`` that are paid for; without any, the one with
    the least largest cost.
    """
    best: list[int] = []
    for column in start or [int(cost.max(axis=0).argmin())]:
        if purse.pays_beside(best)[column]:
            best.append(column)
    most = cost.max()
    now = cost[:, best].min(axis=1, initial=most)
    total = float(weights @ now)
    saved = np.empty_like(cost)
    turn = idle = 0
    while True:
        is_more = idle == 0  # first one more, then one in the place of another
        rest = best.copy()
        if not is_more:
            del rest[turn]
        before = cost[:, rest].min(axis=1, initial=most)
        np.subtract(
            before[:, None],
            cost,
            out=saved,
        )
        np.maximum(saved, 0.0, out=saved)
        gains = purse.pays_beside(rest) * (weights @ saved)
        column = int(gains.argmax())
        after = float(weights @ before - gains[column])
        if after < total * (1 - PROVEN):
            best = [*rest, column]
            total = after
            idle = 0
        elif idle == len(best):
            return best, total
        else:
            idle += 1
            turn = (turn + 1 - is_more) % len(best)


def best_columns(
    cost: Floats,
    weights: Floats,
    purse: Purse,
    start: Sequence[int] = (),
) -> tuple[list[int], float]:
    """The columns within the limits with the least total of each row's weight times its least cost,
    and a bound on it, see Note [Boxes]. The choice is the best one where the bound is its total.

    Args:
        cost: [rows, columns]; inf where a column does not hold the row.
        weights: [rows], above 0.
        start: A choice to begin with; if it is paid for, what is found is at least as good.
    """
    search = _Search(
        filled(cost, weights),
        weights,
        purse,
        np.isfinite(cost),
        [],
    )
    search.look_around(())
    search.look_around(start)
    bound = search.bound()
    return search.best, bound


class _Node(NamedTuple):
    """The choices of all fixed columns and of some free ones."""

    bound: float
    fixed: Ints
    free: Ints
    prices: Floats  # of rows, bytes and seconds
    steps: int = STEPS


class _Dual(NamedTuple):
    """A bound, its prices, gains of columns, what a choice with each of them loses, and how often
    they were chosen of late.
    """

    bound: float
    prices: Floats
    gains: Floats
    lost: Floats
    often: Floats


@dataclass
class _Search:
    """The best choice that was found, and its total."""

    cost: Floats
    weights: Floats
    purse: Purse
    is_held: Bools
    best: list[int]
    value: float = np.inf
    effort: int = EFFORT

    def look_around(self, start: Sequence[int]) -> None:
        found, total = exchanged(
            self.cost,
            self.weights,
            self.purse,
            start,
        )
        self.effort -= self.cost.size * len(found)
        if total < self.value:
            self.best = found
            self.value = total

    def bound(self) -> float:
        """Of all choices."""
        own = self.cost[:, self.best].min(axis=1, initial=self.cost.max())
        every = np.flatnonzero(self.is_held.any(axis=0))
        first = _Node(
            -np.inf,
            every[:0],
            every,
            np.append(own, [0.0, 0.0]),
            FIRST,
        )
        nodes = [first]
        while nodes and self.effort > 0:
            nodes.sort(key=attrgetter("bound"), reverse=True)
            nodes += self._parts(nodes.pop())
        bounds = [node.bound for node in nodes]
        return min([self.value, *bounds])

    def _parts(self, node: _Node) -> list[_Node]:
        """Nodes in the place of this one; none where no choice in it is better."""
        purse = self.purse
        fixed = node.fixed
        paid = purse.pays_beside(fixed.tolist())
        free = node.free[paid[node.free]]
        columns = np.append(fixed, free)
        is_held = self.is_held[:, columns]
        if not is_held.any(axis=1).all():
            return []
        driver, took, pool, static = purse.figures
        room = 1 + PROVEN  # sums are not exact
        memory = room * purse.memory - driver[fixed].sum()
        buffers = (
            (pool, pool[fixed].max(initial=0.0)),
            (static, purse.buffers(fixed).sum()),
        )
        for figure, spent in buffers:
            held = np.where(is_held, figure[columns], np.inf)
            least = held.min(axis=1)
            memory -= max(spent, least.max())
        seconds = room * purse.seconds - took[fixed].sum()
        limits = np.array([[memory], [seconds]])
        if (limits < 0).any():
            return []
        shares = purse.figures[:2, columns] / np.maximum(limits, LEAST)
        shares[:, : fixed.size] = 0.0
        spent = np.sort(shares).cumsum(axis=1)
        number = (spent <= 1 + PROVEN).sum(axis=1)  # of columns that a limit pays for at most
        graphs = min(purse.graphs, *number)
        dual = self._raised(
            node,
            columns,
            shares,
            graphs,
        )
        self.effort -= node.steps * (is_held.sum() + OVERHEAD)
        if dual.bound >= self.value * (1 - PROVEN):
            return []
        number = np.count_nonzero(dual.often > RARE)
        likely = np.argsort(-dual.often)[:number]
        self.look_around(columns[likely].tolist())
        is_open = dual.lost < self.value - dual.bound  # others are in no better choice
        is_open[: fixed.size] = False
        if not is_open.any():
            return []
        often = dual.often[is_open]
        gains = np.maximum(dual.gains[is_open], LEAST)
        doubt = often * (1 - often) * gains
        rest = columns[is_open]
        at = doubt.argmax()
        without = _Node(
            max(node.bound, dual.bound),
            fixed,
            np.delete(rest, at),
            dual.prices,
        )
        beside = without._replace(fixed=np.append(fixed, rest[at]))
        return [without, beside]

    def _raised(
        self,
        node: _Node,
        columns: Ints,
        shares: Floats,
        graphs: int,
    ) -> _Dual:
        """The largest bound that steps from the node's prices find, for at most so many columns
        with these shares of bytes and seconds.
        """
        value = self.value
        weights = self.weights
        rows = weights.size
        total = weights.sum()
        most = max(
            self.cost.max(),
            value / weights.min(),  # of one row makes a choice no better
        )
        cost = self.cost[:, columns]
        is_held = self.is_held[:, columns]
        column, row = np.nonzero(is_held.T)
        first = np.searchsorted(column, np.arange(columns.size))
        weighted = weights[row] * cost[row, column]
        fixed = np.arange(node.fixed.size)
        shares = total * shares
        ends = np.append(weights, [-total, -total])
        prices = node.prices
        often = np.zeros(columns.size)
        heading = np.zeros_like(prices)
        best = _Dual(
            -np.inf,
            prices,
            often,
            often,
            often,
        )
        length, idle = LENGTH, 0
        for _ in range(node.steps):
            worth = weights * prices[:rows]
            saved = worth[row]
            saved -= weighted
            np.maximum(saved, 0.0, out=saved)
            gains = np.add.reduceat(saved, first)
            gains -= prices[rows:] @ shares
            order = np.argsort(-gains)
            order = order[order >= fixed.size]
            left = graphs - fixed.size
            chosen = order[:left]
            chosen = chosen[gains[chosen] > 0]
            chosen = np.append(fixed, chosen)
            bound = float(ends @ prices - gains[chosen].sum())
            often = often * (1 - RECENT)
            often[chosen] += RECENT
            idle += 1
            if bound > best.bound:
                instead = gains[order[left - 1 : left]].max(initial=0.0)
                best = _Dual(
                    bound,
                    prices,
                    gains,
                    instead - gains,
                    often,
                )
                idle = 0
            elif idle > PATIENCE:
                length /= 2
                idle = 0
            is_served = cost[:, chosen] < prices[:rows, None]
            is_served &= is_held[:, chosen]
            served = weights * is_served.sum(axis=1)
            taken = shares[:, chosen].sum(axis=1)
            slope = ends + np.append(-served, taken)
            is_fixed = np.where(
                slope > 0,
                prices >= most,
                prices <= 0,
            )
            slope[is_fixed] = 0.0
            if bound >= value * (1 - PROVEN) or not slope.any():
                break
            heading = slope + MOMENTUM * heading
            step = heading / np.abs(ends)
            pace = length * (value - bound)
            pace /= heading @ step
            prices = prices + pace * step
            prices = np.clip(
                prices,
                0.0,
                most,
            )
        return best._replace(often=often)
