"""What the plans in a box of ends cost: exactly in its upper corner, at least anywhere in it. See Note [Several lanes]
and Note [Budgets] of the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cgplan.optimizer.paths import Floats, Ints, Paths, best_paths
from cgplan.optimizer.problem import Demand, Problem
from cgplan.optimizer.products import product, shares

ROUNDING = 1e-9  # relative: sums of seconds are not exact
BATCH = 1 << 21  # numbers in a table of several boxes, about
PIECES = 4  # that a box is cut into


@dataclass(frozen=True)
class Limits:
    """What a plan may cost: graphs, bytes, seconds; None: no limit."""

    graphs: int
    memory: float | None = None
    seconds: float | None = None

    @property
    def only_graphs(self) -> bool:
        """Whether nothing but their number is limited."""
        return self.memory is None and self.seconds is None

    def pays_for(self, graphs: int, memory: float, seconds: float) -> bool:
        """Whether a plan with these costs is within the limits."""
        return (
            graphs <= self.graphs
            and (self.memory is None or memory <= self.memory * (1 + ROUNDING))
            and (self.seconds is None or seconds <= self.seconds * (1 + ROUNDING))
        )


@dataclass(frozen=True)
class Prices:
    """Microseconds (times weight) for a byte and for a second."""

    byte: float = 0.0
    second: float = 0.0


FREE = Prices()


@dataclass(frozen=True)
class _Corner:
    """All that plans whose lanes end there are read from: tables as in Boxes, of one box.

    Attributes:
        ends: Of each lane but the last.
        paths: Of each lane.
        curves: Of each lane but the last: [K + 1].
        last: Of the last lane, by its end: [K + 1, N + 1].
        table, allowed: [K + 1, K + 1], as ``_tables`` returns them.
    """

    ends: Ints
    paths: list[Paths]
    curves: list[Floats]
    last: Floats
    table: Floats
    allowed: Ints


class Boxes:
    """Boxes of ends: [boxes, lanes but the last] indices into candidates, a lower and an upper one.

    Tables are [boxes, K + 1]: total microseconds (times weight) with at most so many graphs.
    """

    def __init__(self, problem: Problem, limits: Limits, prices: Prices = FREE, caution: float = 0.0) -> None:
        """``caution``: where keys of a mode differ in cost, each is taken at the cheapest (0) to the dearest (1).

        With 0, bounds hold for every plan within the limits; with 1, every plan that is found is within them.
        """
        self.problem, self.limits, self.prices = problem, limits, prices
        lanes = problem.lanes
        equal = limits.only_graphs or all(lane.equal_costs for lane in lanes)
        self.passing = [lane.passing if equal else None for lane in lanes]
        self.price = [prices.byte * lane.driver + prices.second * lane.seconds for lane in lanes]
        self.holds = [[demand.below(lane.sizes) for lane in lanes] for demand in problem.demands]
        width = sum(lane.sizes.size for lane in lanes)
        self.effort = max(1, width * limits.graphs)
        self.at_once = max(1, min(16, BATCH // self.effort) // PIECES)
        same = [lane.lane.mode is lanes[-1].lane.mode for lane in lanes]
        self.first = [i for i, with_last in enumerate(same) if not with_last]
        self.second = [i for i, with_last in enumerate(same[:-1]) if with_last]
        self._last_corner: _Corner | None = None
        self.each = [self._each(group, caution) for group in (self.first, [*self.second, len(lanes) - 1])]

    def evaluate(self, low: Ints, high: Ints) -> tuple[Floats, Floats]:
        """The value of the upper corner, and a bound below which no corner of the box is."""
        passed = self._nothing_passed(len(low))
        exact, floor = [], []
        unsure = np.zeros(len(low))
        for index in range(low.shape[1]):
            lo, hi = low[:, index], high[:, index]
            paths, which = self._paths(index, passed)
            exact.append(_at(paths, which, hi))
            price = self.price[index]
            least = np.append(0.0, np.minimum.accumulate(price[:0:-1])[::-1])
            floor.append(_at(paths, which, lo) + (least[lo] - price[lo])[:, None])
            for number, demand in self._wanting(index):
                at = self.holds[number][index]
                end = np.maximum(at[hi], passed[number])
                unsure += demand.best[end] - demand.best[np.maximum(at[lo], passed[number])]
                passed[number] = end
        last = self._last(passed)[0]
        value = self._least(*self._tables(exact, last, high))
        below = value if np.array_equal(low, high) else self._least(*self._tables(floor, last, low))
        return value + self.problem.eager_us, below + (unsure + self.problem.eager_us)[:, None]

    def cut(self, low: Ints, high: Ints) -> tuple[Ints, Ints, Ints]:
        """Each box in pieces, across the lane with the most batches between its bounds; and which box each was."""
        score = (high - low) * 1e-9
        for demand, holds in zip(self.problem.demands, self.holds, strict=True):
            for index in demand.lanes[:-1]:
                score[:, index] += (
                    demand.weight[holds[index][high[:, index]]] - demand.weight[holds[index][low[:, index]]]
                )
        rows, lane = np.arange(len(low)), np.where(high > low, score, -1.0).argmax(axis=1)
        first, last = low[rows, lane], high[rows, lane]
        edges = first + (last + 1 - first) * np.arange(PIECES + 1)[:, None] // PIECES
        lows, highs = (np.repeat(side[None], PIECES, axis=0) for side in (low, high))
        lows[:, rows, lane], highs[:, rows, lane] = edges[:-1], edges[1:] - 1
        real = (edges[:-1] < edges[1:]).ravel()
        flat = (-1, low.shape[1])
        return lows.reshape(flat)[real], highs.reshape(flat)[real], np.tile(rows, PIECES)[real]

    def shared_bound(self) -> Floats:
        """[K + 1]: what no plan can be below, because graphs that every lane shares do not either; -inf with prices."""
        lanes, demands = self.problem.lanes, self.problem.demands
        if len(lanes) < 2 or self.prices != FREE or not demands:
            return np.full(self.limits.graphs + 1, -np.inf)
        sizes = np.unique(np.concatenate([lane.sizes for lane in lanes]))
        weights = np.stack([demand.weight[demand.below(sizes)] for demand in demands])[:, None]
        times = []
        for demand in demands:
            fastest = [np.append(lanes[i].times, np.inf)[np.searchsorted(lanes[i].sizes, sizes)] for i in demand.lanes]
            times.append(np.minimum(np.min(fastest, axis=0), demand.fastest.min()))
        (paths,) = self.problem.solved.paths(
            ["shared"],
            self.limits.graphs,
            lambda _, known: best_paths(weights, np.stack(times), self.limits.graphs, known=known),
        )
        missed = sum(demand.eager[-1] - demand.eager[demand.below(sizes)] for demand in demands)
        return np.asarray((paths.cost[:, 0] + missed).min(axis=1) + self.problem.eager_us)

    def sizes_at(self, ends: Ints, graphs: int) -> list[list[int]]:
        """Candidates of each lane, ascending, in the best plan of at most so many graphs whose lanes end there."""
        if self._last_corner is None or not np.array_equal(self._last_corner.ends, ends):
            self._last_corner = self._corner(ends)
        corner = self._last_corner
        counts = np.arange(corner.table.shape[0])
        within = np.where(np.add.outer(counts, counts) <= graphs, corner.table, np.inf)
        a, b = np.unravel_index(within.argmin(), within.shape)
        room = corner.last[:, : int(corner.allowed[a, b]) + 1]
        share = dict(zip(self.first, shares([corner.curves[i] for i in self.first], int(a)), strict=True))
        *others, rest = shares([*(corner.curves[i] for i in self.second), room.min(axis=1)], int(b))
        share |= dict(zip(self.second, others, strict=True))
        chosen = [corner.paths[i].sizes(share[i], int(end)) for i, end in enumerate(ends)]
        return [*chosen, corner.paths[-1].sizes(rest, int(room[rest].argmin()))]

    def _corner(self, ends: Ints) -> _Corner:
        passed = self._nothing_passed(1)
        paths: list[Paths] = []
        for index, end in enumerate(ends):
            paths += self._paths(index, passed)[0]
            for number, _ in self._wanting(index):
                passed[number] = np.maximum(passed[number], self.holds[number][index][end])
        curves = [path.cost[:, 0, end] for path, end in zip(paths, ends, strict=True)]
        last, of_last = self._last(passed)
        table, allowed = self._tables([curve[None] for curve in curves], last, ends[None])
        priced = last[0] + self.prices.byte * self._fixed(ends[None])
        return _Corner(ends, [*paths, *of_last], curves, priced, table[0], allowed[0])

    def _nothing_passed(self, boxes: int) -> list[Ints]:
        """Of each demand, how many of its tokens earlier lanes hold: [boxes]."""
        return [np.zeros(boxes, dtype=np.int64) for _ in self.problem.demands]

    def _wanting(self, index: int) -> list[tuple[int, Demand]]:
        return [(n, demand) for n, demand in enumerate(self.problem.demands) if index in demand.lanes]

    def _paths(self, index: int, passed: list[Ints]) -> tuple[list[Paths], Ints]:
        """Paths of a lane for what earlier lanes let pass: of each different case, and which one is each box's."""
        wanting = self._wanting(index)
        cases = np.stack([passed[number] for number, _ in wanting], axis=1)
        cases, which = np.unique(cases, axis=0, return_inverse=True)
        lane, passing = self.problem.lanes[index], self.passing[index]

        def solve(numbers: list[int], known: Paths | None) -> Paths:
            weights = np.zeros((1, len(numbers), lane.sizes.size))
            for column, (number, demand) in enumerate(wanting):
                gone = demand.weight[cases[numbers, column]][:, None]
                weights[0] += np.maximum(demand.weight[self.holds[number][index]] - gone, 0.0)
            price, graphs = self.price[index], self.limits.graphs
            return best_paths(weights, lane.times[None], graphs, price=price, passing=passing, known=known)

        names = [(index, self.prices, passing is None, *case) for case in cases.tolist()]
        return self.problem.solved.paths(names, self.limits.graphs, solve), which.ravel()

    def _last(self, passed: list[Ints]) -> tuple[Floats, list[Paths]]:
        """The last lane, with eager steps beyond it, by its end: [boxes, K + 1, N + 1]; and its paths."""
        index = len(self.problem.lanes) - 1
        paths, which = self._paths(index, passed)
        eager = np.zeros((len(which), self.problem.lanes[index].sizes.size))
        for number, demand in self._wanting(index):
            held = np.maximum(self.holds[number][index], passed[number][:, None])
            eager += demand.eager[-1] - demand.eager[held]
        costs = np.stack([paths[case].cost[:, 0] for case in which])
        costs += eager[:, None]
        return costs, paths

    def _tables(self, curves: list[Floats], last: Floats, ends: Ints) -> tuple[Floats, Ints]:
        """[boxes, K + 1, K + 1] totals by graphs of the first mode and of the last lane's mode, inf where the budget
        does not pay for them; and the largest end of the last lane that it pays for.
        """
        first, second = (product([curves[i] for i in group], last.shape[:2]) for group in (self.first, self.second))
        fixed = self._fixed(ends)
        totals = last + self.prices.byte * fixed[:, None]
        np.minimum.accumulate(totals, axis=2, out=totals)
        if self.second:
            totals = product([second[:, :, None], totals], totals.shape)
        allowed = self._allowed(fixed)
        boxes, counts = np.arange(len(ends))[:, None, None], np.arange(last.shape[1])
        table = first[:, :, None] + totals[boxes, counts, np.maximum(allowed, 0)]
        return np.where(allowed < 0, np.inf, table), allowed

    def _fixed(self, ends: Ints) -> Floats:
        """[boxes, N + 1]: bytes that follow from where lanes end, by the end of the last one."""
        *others, last = self.problem.lanes
        pool, static, some = last.pool, last.static, last.sizes > 0
        for lane, end in zip(others, ends.T[:, :, None], strict=True):
            pool, static = np.maximum(pool, lane.pool[end]), np.maximum(static, lane.static[end])
            some = some | (end > 0)
        return np.broadcast_to(pool + static + self.problem.workspace * some, (len(ends), last.sizes.size))

    def _allowed(self, fixed: Floats) -> Ints:
        """[boxes, K + 1, K + 1]: the largest end of the last lane that the limits pay for, -1 for none."""
        counts = np.arange(self.limits.graphs + 1)
        driver, seconds = (np.add.outer(counts * a, counts * b) for a, b in zip(*self.each, strict=True))
        allowed = np.full((len(fixed), *driver.shape), fixed.shape[1] - 1)
        if self.limits.memory is not None:
            spare = self.limits.memory * (1 + ROUNDING) - driver
            allowed = np.stack([np.searchsorted(row, spare, side="right") - 1 for row in fixed])
        if self.limits.seconds is not None:
            seconds[np.add.outer(counts, counts) > 0] += self.problem.once
            allowed[:, seconds > self.limits.seconds * (1 + ROUNDING)] = -1
        return allowed

    @staticmethod
    def _least(table: Floats, _: Ints) -> Floats:
        """[boxes, K + 1]: the least total by the number of all graphs."""
        least = np.full(table.shape[:2], np.inf)
        for first in range(table.shape[1]):
            np.minimum(least[:, first:], table[:, first, : table.shape[2] - first], out=least[:, first:])
        return np.asarray(np.minimum.accumulate(least, axis=1))

    def _each(self, group: Sequence[int], caution: float) -> tuple[float, float]:
        """Bytes and seconds that a key of these lanes is taken at."""
        lanes = [self.problem.lanes[i] for i in group if self.problem.lanes[i].sizes.size > 1]
        if not lanes:
            return 0.0, 0.0
        driver, seconds = (
            np.concatenate([getattr(lane, cost)[1:] for lane in lanes]) for cost in ("driver", "seconds")
        )
        return float(driver.min() + caution * np.ptp(driver)), float(seconds.min() + caution * np.ptp(seconds))


def _at(paths: Sequence[Paths], which: Ints, ends: Ints) -> Floats:
    """[boxes, K + 1]: costs of the paths of each box that end there."""
    return np.stack([paths[case].cost[:, 0, end] for case, end in zip(which, ends, strict=True)])
