"""The best boxes to choose for batches, and a bound on how much better others could be.

Note [Boxes]
~~~~~~~~~~~~
To choose columns with the least total of each row's weight times its least cost is the p-median
problem. A price u for each row and prices v for the limits give a bound on every choice within the
limits (Lagrangian relaxation), which subgradient steps raise:

    L(u, v) = sum of w u - v limits - the most that columns gain,

where a column gains the sum of w max(u - cost, 0) less v times its figures. A column that loses
more than the gap is in no better choice. Branching on the cost of one row closes the gap, or the
effort ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cgplan.optimizer.paths import Floats, Ints

EFFORT = 220_000_000  # costs to look at, about
OVERHEAD = 1 << 14  # of a step, in costs
STEPS, PATIENCE = 100, 20  # at a node, without progress
LENGTH = 1.5  # of the first step, as a share of the way to the value
MOMENTUM = 0.8  # share of the step before
RECENT = 0.1  # weight of the last choice
RARE = 0.05  # share of recent choices below which a column is not likely
NEVER = 1e-3  # of a column that was in none
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

    def pays_beside(self, chosen: list[int]) -> Bools:
        """Whether the limits pay for each column beside the chosen ones."""
        driver, took, pool, static = self.figures
        held = np.zeros_like(static)
        held[chosen] = static[chosen]
        shape = -1, self.groups
        largest = held.reshape(shape).max(axis=0)
        grown = static.reshape(shape) - largest
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
        [],
    )
    search.look_around(())
    search.look_around(start)
    is_held = np.isfinite(cost)
    bound = search.bound(cost[is_held].max())
    return search.best, bound


class _Node(NamedTuple):
    """The choices of these columns that cost each row at most its cap."""

    bound: float
    columns: Ints
    caps: Floats
    prices: Floats


class _Dual(NamedTuple):
    """A bound, its prices, gains of columns, and how often they were chosen of late."""

    bound: float
    prices: Floats
    gains: Floats
    often: Floats


@dataclass
class _Search:
    """The best choice that was found, and its total."""

    cost: Floats
    weights: Floats
    purse: Purse
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

    def bound(self, cap: float) -> float:
        """Of all choices that cost each row at most the cap."""
        rows, columns = self.cost.shape
        own = self.cost[:, self.best].min(axis=1, initial=self.cost.max())
        first = _Node(
            -np.inf,
            np.arange(columns),
            np.full(rows, cap),
            np.append(own, [0.0] * 4),
        )
        nodes = [first]
        closed: list[float] = []
        while nodes and self.effort > 0:
            nodes.sort(key=attrgetter("bound"), reverse=True)
            node = nodes.pop()
            relaxed = _Relaxed(self, node)
            if not relaxed.is_possible:
                continue
            dual = relaxed.raised(node.prices, self.value)
            self.effort -= STEPS * (relaxed.size + OVERHEAD)
            if dual.bound >= self.value * (1 - PROVEN):
                continue
            number = np.count_nonzero(dual.often > RARE)
            likely = np.argsort(-dual.often)[:number]
            self.look_around(relaxed.columns[likely].tolist())
            parts = self._parts(node, relaxed, dual)
            nodes += parts
            if not parts:
                closed.append(dual.bound)
        closed += [node.bound for node in nodes]
        return min([self.value, *closed])

    def _parts(
        self,
        node: _Node,
        relaxed: _Relaxed,
        dual: _Dual,
    ) -> list[_Node]:
        """Nodes in the place of this one, where it can be split."""
        gap = self.value - dual.bound
        is_left = dual.gains > -gap  # others are in no better choice
        cost = relaxed.cost[:, is_left]
        bound = max(node.bound, dual.bound)
        rest = _Node(
            bound,
            relaxed.columns[is_left],
            node.caps,
            dual.prices,
        )
        is_held = cost <= node.caps[:, None]
        if bound - node.bound > gap or not is_held.any(axis=1).all():
            return [rest]
        is_used = cost < dual.prices[: len(cost), None]
        often = is_used * dual.often[is_left]
        share = is_held * (often + NEVER)
        mean = (share * cost).sum(axis=1)
        mean /= share.sum(axis=1)
        apart = np.abs(cost - mean[:, None])
        spread = (share * apart).sum(axis=1)
        spread *= self.weights
        row = int(spread.argmax())
        is_cheap = cost[row] <= mean[row]
        is_dear = is_held[row] & ~is_cheap
        if not is_cheap.any() or not is_dear.any():
            return []
        caps = np.minimum(
            node.caps,
            cost[:, is_cheap].max(axis=1),
        )
        cheap = rest._replace(caps=caps)
        dear = rest._replace(columns=rest.columns[~is_cheap])
        return [cheap, dear]


class _Relaxed:
    """L at a node. Limits are of graphs, memory beside the least static buffers, all memory, and
    seconds.

    Attributes:
        cost: [rows, columns]; the largest of all where it is above the cap.
        size: Pairs of a row and a column that holds it.
    """

    def __init__(self, search: _Search, node: _Node) -> None:
        purse = search.purse
        weights = search.weights
        self._weights = weights
        worse = search.value / weights.min()  # of one row makes a choice no better
        self._most = max(
            search.cost.max(),
            worse,
        )
        cost = search.cost[:, node.columns]
        is_held = cost <= node.caps[:, None]
        is_some = is_held.any(axis=0)
        is_held = is_held[:, is_some]
        self.columns = node.columns[is_some]
        self.cost = np.where(
            is_held,
            cost[:, is_some],
            self._most,
        )
        column, self._row = np.nonzero(is_held.T)
        self.size = column.size
        is_first = np.diff(column, prepend=-1) > 0
        self._starts = np.flatnonzero(is_first)
        weighted = self.cost.T * weights
        self._weighted = weighted[is_held.T]

        def least_of(figure: Floats) -> float:
            """Of a figure of which the largest counts."""
            held = np.where(
                is_held,
                figure[self.columns],
                np.inf,
            )
            least = held.min(
                axis=1,
                initial=np.inf,
            )
            return float(least.max())

        total = weights.sum()
        byte = total / purse.memory
        second = total / purse.seconds
        units = [[byte], [second], [byte], [byte]]
        shares = purse.figures * units
        driver, took = shares[:2, self.columns]
        pool, static = shares[2:]
        beside = total - least_of(pool)
        left = beside - least_of(static)
        graphs = min(
            purse.graphs,
            _number(driver, left),
            _number(took, total),
        )
        self.is_possible = graphs > 0
        each = np.full(
            self.columns.size,
            total / max(graphs, 1),
        )
        self._shares = np.stack([each, driver, driver, took])
        self._ends = np.append(
            weights,
            [-total, -left, -beside, -total],
        )
        self._scale = np.append(
            weights,
            [total] * 4,
        )
        pool = np.maximum(
            pool - least_of(pool),
            0.0,
        )
        self._order = np.argsort(pool, kind="stable")
        self._pool = pool.reshape(
            -1,
            purse.groups,
        )
        self._static = static.reshape(-1, purse.groups)

    def raised(self, prices: Floats, value: float) -> _Dual:
        """The largest bound that steps from these prices find."""
        rows = len(self.cost)
        often = np.zeros(self.columns.size)
        heading = np.zeros_like(prices)
        best = _Dual(
            -np.inf,
            prices,
            often,
            often,
        )
        length, idle = LENGTH, 0
        for _ in range(STEPS):
            worth = self._weights * prices[:rows]
            saved = worth[self._row]
            saved -= self._weighted
            np.maximum(saved, 0.0, out=saved)
            gains = np.add.reduceat(saved, self._starts)
            limits = prices[rows:]
            gains -= limits @ self._shares
            gain, chosen, taken = self._chosen(gains, limits)
            bound = float(self._ends @ prices) - gain
            often = often * (1 - RECENT)
            often[chosen] += RECENT
            idle += 1
            if bound > best.bound:
                best = _Dual(bound, prices, gains, often)
                idle = 0
            elif idle > PATIENCE:
                length /= 2
                idle = 0
            is_served = self.cost[:, chosen] < prices[:rows, None]
            served = self._weights * is_served.sum(axis=1)
            slope = self._ends + np.append(-served, taken)
            is_fixed = np.where(
                slope > 0,
                prices >= self._most,
                prices <= 0,
            )
            slope[is_fixed] = 0.0
            if bound >= value * (1 - PROVEN) or not slope.any():
                break
            heading = slope + MOMENTUM * heading
            step = heading / self._scale
            pace = length * (value - bound)
            pace /= heading @ step
            prices = prices + pace * step
            prices = np.clip(
                prices,
                0.0,
                self._most,
            )
        return best._replace(often=often)

    def _chosen(
        self,
        gains: Floats,
        limits: Floats,
    ) -> tuple[float, Ints, Floats]:
        """The most gain of columns together, these columns, and their shares of the limits."""
        static_price = limits[2]
        pool_price = limits[1] + static_price
        each = np.zeros(self._pool.size)
        each[self.columns] = np.maximum(gains, 0.0)
        each = each.reshape(self._pool.shape)
        most = np.cumsum(each, axis=0)
        most -= static_price * self._static
        most = np.maximum(most, 0.0)
        most = np.maximum.accumulate(most)
        rises = np.diff(
            most,
            axis=0,
            prepend=0.0,
        )
        pools = self._pool.ravel()
        pools = pools[self._order]
        totals = rises.ravel()
        totals = np.cumsum(totals[self._order])
        totals -= pool_price * pools
        best = int(totals.argmax())
        gain = max(float(totals[best]), 0.0)
        is_allowed = (self._pool <= pools[best]) & (gain > 0)
        end = (is_allowed * most).max(axis=0)
        is_chosen = (each > 0) & (most - rises < end)
        pool = is_chosen * self._pool
        static = is_chosen * self._static
        is_chosen = is_chosen.ravel()
        chosen = np.flatnonzero(is_chosen[self.columns])
        taken = self._shares[:, chosen].sum(axis=1)
        taken[1:3] += pool.max()
        taken[2] += static.max(axis=0).sum()
        return gain, chosen, taken


def _number(shares: Floats, left: float) -> int:
    """How many columns at most take no more than what is left."""
    spent = np.cumsum(np.sort(shares))
    return int(np.count_nonzero(spent <= left * (1 + PROVEN)))
