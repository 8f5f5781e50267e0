"""The best sizes of all lanes within the limits, and a bound on how much better others could be.

Note [Several lanes]
~~~~~~~~~~~~~~~~~~~~
A batch goes to the first of its lanes whose largest size holds it. So once it is fixed where each
lane *ends*, it is fixed which batches it runs, and the lanes share nothing but the limits: each is
Note [One lane], exactly and for every number of graphs, and a min-plus product shares the graphs
out. The last lane serves every batch that a graph may serve, and only eager steps follow it, so its
paths tell its end. (Where decode and prefill are apart, each has lanes of its own, and eager steps
follow both.)

The search goes over the ends of the other lanes. With two lanes that is one number, and it is
enumerated: of the ends between two that were tried, lo and hi, none is better than the first lane
    cut at lo + 1, the last lane with the batches
above hi, and the batches in between at their best time of all. Intervals whose bound is not below
the best plan are dropped, the others halved; if none is left, the plan is proven. With more lanes
the ends are improved one at a time (coordinate descent), and the bound comes from letting each
group of batches have all the graphs for itself.

Note [Limits]
~~~~~~~~~~~~~
Memory is static(largest size) + pool(largest size of each mode) + workspaces + driver bytes of each
key. The first two follow from the ends. Where the keys of a mode cost the same, the numbers of
graphs that the limits pay for are exact. Otherwise the cheapest key of each mode counts. That
allows too much, so it gives a bound; and if the limits pay for the plan all the same, it is the
best one. If not, one rate prices bytes and seconds, each as a share of its limit, and bisection
finds the smallest rate at which the best plan fits. The least of time + price * cost, less price *
limit, is below every plan within the limits (a Lagrangian relaxation). Where some larger graph
costs less than a smaller one, a bound is that of costs which no graph for the same batches is
below.

Note [One list]
~~~~~~~~~~~~~~~
Some engines capture each size in all lanes that may hold it. A batch then runs at the smallest size
that holds it, in the first of its lanes that may hold that size: one path for all lanes, in which
each kind of batches has its own times, and a size counts as many graphs as lanes hold it (the end
of Note [One lane]).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt

from cgplan.optimizer.lanes import Candidates, Problem
from cgplan.optimizer.paths import Floats, Ints, Paths, best_paths

MOST = 256  # graphs of a plan
Chosen = tuple[tuple[int, ...], ...]  # candidates of each lane, ascending, as indices
ROUNDING = 1e-9  # relative: sums of seconds are not exact
PROVEN = 1e-9  # relative gap that counts as none
CURVE_PROVEN = 5e-4  # of each point of a curve
EFFORT = 1 << 24  # candidates times graphs times ends to try, about
AT_ONCE = 16  # ends to try in one pass
BATCH = 1 << 21  # candidates times graphs in one pass, about
CORNERS = 64  # of three or more lanes, tried first: each lane whole or empty
SWEEPS = 12  # rates to try
SAMPLE = 1024  # sizes of a lane to try as one graph more


@dataclass(frozen=True)
class Limits:
    """The limits of a plan: graphs, bytes, seconds; None: no limit."""

    graphs: int
    memory: float | None = None
    seconds: float | None = None

    def pays_for(self, graphs: int, memory: float, seconds: float) -> bool:
        return (
            graphs <= self.graphs
            and (self.memory is None or memory <= self.memory * (1 + ROUNDING))
            and (self.seconds is None or seconds <= self.seconds * (1 + ROUNDING))
        )


@dataclass(frozen=True)
class Best:
    """A plan within the limits.

    Attributes:
        chosen: Candidates of each lane.
        least: Microseconds, times weight, of the best plan that was found, which may have a few
            graphs more.
        bound: No plan within the limits is below it.
    """

    chosen: Chosen
    least: float
    bound: float


def best_plan(problem: Problem, limits: Limits, *, slack: float = 0.0) -> Best:
    """The best plan within the limits; of those within ``slack`` (microseconds, times weight) of
    it, the one with the fewest graphs.

    Exact with one lane, and with two as long as the effort lasts, if only the number of graphs is
    limited or all keys of a mode cost the same; otherwise ``bound`` says how good it is. The plan
    may have no graph.
    """

    def pays(chosen: Chosen) -> bool:
        return limits.pays_for(*problem.costs_of(chosen))

    def paid(found: Search | ListSearch) -> int:
        """The number of graphs up to which the plans are within the limits."""
        return bisect_left(
            numbers[: limits.graphs], True, key=lambda graphs: not pays(found.chosen(graphs))
        )

    numbers, true = range(1, limits.graphs + 1), problem.relaxed or problem
    limits = replace(
        limits,
        graphs=bisect_left(numbers, True, key=lambda k: not limits.pays_for(k, *true.cheapest(k))),
    )
    found = search(problem, limits)
    enough = found.value <= found.value[-1] * (1 + PROVEN) + slack
    chosen = found.chosen(int(np.flatnonzero(enough)[0]))
    bound = float((found if true is problem else search(true, limits)).bound[-1])
    if pays(chosen):
        return Best(chosen, min(float(found.value[-1]), problem.total_of(chosen)), bound)
    best: Chosen = ((),) * len(problem.lanes)
    low, high, rate = 0.0, np.inf, 0.01
    for _ in range(SWEEPS):
        found = search(problem, limits, rate=rate, effort=EFFORT // SWEEPS)
        priced = (
            found if true is problem else search(true, limits, rate=rate, effort=EFFORT // SWEEPS)
        )
        bound = max(bound, float(priced.bound[-1]) - priced.budget_price)
        graphs = paid(found)
        best = min(best, found.chosen(graphs), key=problem.total_of)
        low, high = (low, rate) if graphs == limits.graphs else (rate, high)
        rate = 2 * rate if high == np.inf else (low + high) / 2
    while True:  # spend the rest of the limits, graph by graph, on the one that saves most
        more = problem.with_one_more(best, SAMPLE)
        filled = min(filter(pays, more), key=problem.total_of, default=best)
        total = problem.total_of(best)
        if problem.total_of(filled) >= total * (1 - PROVEN):
            return Best(best, total, min(bound, total))
        best = filled


@dataclass(frozen=True, eq=False)
class _Corner:
    """Plans whose lanes but the last end at ``ends``.

    Attributes:
        paths: Of each lane.
        curves: Totals of each lane but the last, by its graphs: [K + 1].
        last: Totals of the last lane and eager steps, by its graphs and its end: [K + 1, N + 1].
    """

    ends: tuple[int, ...]
    paths: list[Paths]
    curves: list[Floats]
    last: Floats


# two ends that were tried, and the bound of those between them
_Span = tuple[_Corner, _Corner, Floats]


class Search:
    """The best plans within the limits, by their number of graphs: index k means at most k.

    Args:
        limits: If keys of a mode differ in cost, the cheapest counts.
        rate: Price on bytes and seconds: of a whole limit, as a share of the microseconds that
            graphs can save.
        curve: Whether to prove every number of graphs, to 0.05%, or the largest alone.
        effort: Candidates times graphs times ends to try, about.

    Attributes:
        value: [K + 1] total microseconds (times weight) of the best plan found, with the price of
            its costs.
        bound: [K + 1] no plan is below it.
    """

    def __init__(
        self,
        problem: Problem,
        limits: Limits,
        *,
        rate: float = 0.0,
        curve: bool = False,
        effort: int = EFFORT,
    ) -> None:
        lanes, graphs = problem.lanes, limits.graphs
        self._problem, self._rate, self._memory = problem, rate, limits.memory
        # ends that may be tried
        self._left = effort // max(1, sum(lane.sizes.size for lane in lanes) * graphs)
        self._watched, self._proven = (
            (slice(1, None), CURVE_PROVEN) if curve else (slice(graphs, None), PROVEN)
        )
        self._best: list[_Corner | None] = [None] * (graphs + 1)
        self.value = self.bound = np.full(graphs + 1, problem.eager_total)
        if not lanes:
            return
        self._byte, self.budget_price, self._prices = _prices(problem, limits, rate)
        self._holds = [
            [demand.below(lane.sizes) * (index in demand.lanes) for index, lane in enumerate(lanes)]
            for demand in problem.demands
        ]
        self._found: dict[tuple[int, ...], Paths] = {}
        # Lanes of the other mode, and those of the last lane's mode before it.
        self._groups: tuple[list[int], list[int]] = ([], [])
        for index, lane in enumerate(lanes[:-1]):
            self._groups[lane.lane.mode is lanes[-1].lane.mode].append(index)
        counts = np.arange(graphs + 1)
        # graphs of the other mode, and of the last lane's mode
        self._both = np.add.outer(counts, counts)
        bytes_, seconds = (
            np.add.outer(counts * other, counts * last)
            for other, last in zip(
                *map(self._cheapest, (self._groups[0], [*self._groups[1], -1])), strict=True
            )
        )
        # Bytes that may follow from the ends, where these numbers of graphs are paid for.
        self._spare = (np.inf if limits.memory is None else limits.memory * (1 + ROUNDING)) - bytes_
        if limits.seconds is not None:
            self._spare[
                (seconds + problem.once > limits.seconds * (1 + ROUNDING)) & (self._both > 0)
            ] = -np.inf
        if len(lanes) == 1:
            self._try([()])
            self.bound = self.value
        else:
            floor = self._enumerate() if len(lanes) == 2 else self._descend()
            self.bound = np.minimum(self.value, floor)

    def chosen(self, graphs: int) -> Chosen:
        corner = self._best[graphs]
        if corner is None:
            return ((),) * len(self._problem.lanes)
        table, allowed = self._table(corner.curves, corner.last, corner.ends)
        a, b = np.unravel_index(np.where(self._both <= graphs, table, np.inf).argmin(), table.shape)
        room = (corner.last + self._byte * self._fixed(corner.ends))[:, : int(allowed[a, b]) + 1]
        other, same = self._groups
        shared = _shares([corner.curves[i] for i in other], int(a))
        *rest, last = _shares([*(corner.curves[i] for i in same), room.min(axis=1)], int(b))
        share = dict(zip((*other, *same), (*shared, *rest), strict=True))
        found = [corner.paths[i].sizes(share[i], end) for i, end in enumerate(corner.ends)]
        found.append(corner.paths[-1].sizes(last, int(room[last].argmin())))
        return tuple(
            _raised(lane, sizes) for lane, sizes in zip(self._problem.lanes, found, strict=True)
        )

    def _enumerate(self) -> Floats:
        """Try the ends of the first of two lanes; returns the bound."""
        floor = np.full(self.value.size, np.inf)
        low, high = self._try([(0,), (self._problem.lanes[0].sizes.size - 1,)])
        spans = self._spans(low, high, -floor)
        at_once = max(
            1, min(AT_ONCE, BATCH // (self._problem.lanes[1].sizes.size * self.value.size))
        )
        while spans:
            gaps = [
                (self.value * (1 - self._proven) - least)[self._watched].max()
                for *_, least in spans
            ]
            hopeful = (
                [] if self._left <= 0 else [number for number, gap in enumerate(gaps) if gap > 0]
            )
            floor = np.min(
                [floor, *(span[2] for n, span in enumerate(spans) if n not in hopeful)], axis=0
            )
            spans = [spans[n] for n in sorted(hopeful, key=lambda number: -gaps[number])]
            halved, spans = spans[:at_once], spans[at_once:]
            middles = self._try([((low.ends[0] + high.ends[0]) // 2,) for low, high, _ in halved])
            for (low, high, least), middle in zip(halved, middles, strict=True):
                spans += [*self._spans(low, middle, least), *self._spans(middle, high, least)]
        return np.maximum(floor, self._apart()) if self._left <= 0 else floor

    def _spans(self, low: _Corner, high: _Corner, least: Floats) -> list[_Span]:
        """The ends between two that were tried, if there are any; no plan with one of them is below
        ``least``.
        """
        lo, hi, price = low.ends[0] + 1, high.ends[0], self._prices[0]
        if lo >= hi:
            return []
        first = high.paths[0].cost[:, lo] - price[lo] + price[lo:].min()
        bound = self._least(self._table([first], high.last, (lo,))[0])
        for demand, holds in zip(self._problem.demands, self._holds, strict=True):
            if 0 in demand.lanes:
                bound = bound + (demand.best[holds[0][hi]] - demand.best[holds[0][lo]])
        return [(low, high, np.maximum(bound, least))]

    def _descend(self) -> Floats:
        """Begin with lanes that are whole or empty, and move one end at a time, by less and less;
        returns the bound.
        """
        tops = np.array([lane.sizes.size - 1 for lane in self._problem.lanes[:-1]])
        around = set(list(product(*((0, int(top)) for top in tops)))[-CORNERS:])
        tried: set[tuple[int, ...]] = set()
        shift = 1
        while shift <= max(int(tops.max()), 1).bit_length():
            before = self.value
            self._try(sorted(around - tried)[: max(self._left, 1)])
            tried |= around
            shift += int(np.array_equal(before, self.value) or self._left <= 0)
            steps = np.diag(np.maximum(tops >> shift, 1))
            best = {corner.ends for corner in self._best[self._watched] if corner is not None}
            best = best or {*sorted(tried, key=sum)[: tops.size + 1]}  # the limits pay for none yet
            moved = [np.clip([*(ends + steps), *(ends - steps)], 0, tops).tolist() for ends in best]
            around = {tuple(ends) for several in moved for ends in several}
        return self._apart()

    def _apart(self) -> Floats:
        """A bound: each group of batches has all the graphs for itself, in the fastest of its
        lanes, up to the largest size that the memory besides the keys pays for.
        """
        problem, graphs = self._problem, self.value.size - 1
        if self._rate or not problem.demands:
            return np.full(graphs + 1, -np.inf)
        sizes = np.unique(np.concatenate([lane.sizes for lane in problem.lanes]))
        places = [np.searchsorted(lane.sizes, sizes) for lane in problem.lanes]
        times, fixed = (
            [np.append(figures[lane], np.inf)[at] for lane, at in enumerate(places)]
            for figures in (
                [lane.times for lane in problem.lanes],
                [lane.pool + lane.static for lane in problem.lanes],
            )
        )
        least = np.array([0.0, *(problem.cheapest(k)[0] for k in range(1, graphs + 1))])
        beyond = np.min(fixed, axis=0) + least[:, None] > (
            np.inf if self._memory is None else self._memory
        )
        fastest = [
            np.min([times[lane] for lane in demand.lanes], axis=0) for demand in problem.demands
        ]
        weights = np.stack([demand.weight[demand.below(sizes)] for demand in problem.demands])
        found = best_paths(
            weights,
            np.minimum(fastest, max(float(lane.times[-1]) for lane in problem.lanes)),
            graphs,
        )
        total = np.full(graphs + 1, problem.eager_us)
        for demand, paths in zip(problem.demands, found, strict=True):
            cost = paths.cost + demand.eager[-1] - demand.eager[demand.below(sizes)]
            total += np.where(beyond, np.inf, cost).min(axis=1)
        return np.asarray(np.minimum.accumulate(total))

    def _try(self, tried: Sequence[tuple[int, ...]]) -> list[_Corner]:
        problem, corners, paths = self._problem, list[_Corner](), list[list[Paths]]()
        # tokens that earlier lanes hold
        passed = np.zeros((len(tried), len(problem.demands)), dtype=np.int64)
        for lane in range(len(problem.lanes)):
            paths.append(self._paths(lane, passed))
            for number, demand in enumerate(problem.demands):
                if lane + 1 < len(problem.lanes) and lane in demand.lanes:
                    held = self._holds[number][lane][[ends[lane] for ends in tried]]
                    passed[:, number] = np.maximum(passed[:, number], held)
        for row, ends in enumerate(tried):
            beyond = np.full(problem.lanes[-1].sizes.size, problem.eager_us)
            for demand, holds, gone in zip(problem.demands, self._holds, passed[row], strict=True):
                beyond += demand.eager[-1] - demand.eager[np.maximum(holds[-1], gone)]
            mine = [found[row] for found in paths]
            curves = [path.cost[:, end] for path, end in zip(mine, ends, strict=False)]
            corners.append(_Corner(ends, mine, curves, mine[-1].cost + beyond))
            value = self._least(self._table(curves, corners[-1].last, ends)[0])
            for graphs in np.flatnonzero(value < self.value):
                self._best[graphs] = corners[-1]
            self.value = np.minimum(self.value, value)
        self._left -= len(corners)
        return corners

    def _paths(self, lane: int, passed: Ints) -> list[Paths]:
        """Paths of a lane for the batches that each row of ``passed`` leaves to it."""
        wanting = [
            number for number, demand in enumerate(self._problem.demands) if lane in demand.lanes
        ]
        names = [(lane, *case) for case in passed[:, wanting].tolist()]
        missing = [name for name in dict.fromkeys(names) if name not in self._found]
        if missing:
            candidates, graphs = self._problem.lanes[lane], self.value.size - 1
            weights = np.zeros((len(missing), candidates.sizes.size))
            for number, gone in zip(wanting, np.array(missing).T[1:], strict=True):
                weight = self._problem.demands[number].weight
                weights += np.maximum(
                    weight[self._holds[number][lane]] - weight[gone][:, None], 0.0
                )
            found = best_paths(weights, candidates.times, graphs, self._prices[lane])
            self._found |= zip(missing, found, strict=True)
        return [self._found[name] for name in names]

    def _table(
        self, curves: Sequence[Floats], last: Floats, ends: tuple[int, ...]
    ) -> tuple[Floats, Ints]:
        """[K + 1, K + 1] totals by graphs of the other mode and of the last lane's mode, inf beyond
        the limits; and the largest end of the last lane that the limits pay for, -1 for none.
        """
        fixed = self._fixed(ends)
        allowed = np.searchsorted(fixed, self._spare, side="right") - 1
        columns, which = np.unique(np.maximum(allowed, 0), return_inverse=True)
        second = np.minimum.accumulate(last + self._byte * fixed, axis=1)[:, columns]
        for lane in self._groups[1]:
            second = _min_plus(second, curves[lane])
        first = np.zeros(self.value.size)
        for lane in self._groups[0]:
            first = _min_plus(first, curves[lane])
        table = first[:, None] + second[np.arange(self.value.size), which.reshape(allowed.shape)]
        return np.where(allowed < 0, np.inf, table), allowed

    def _fixed(self, ends: tuple[int, ...]) -> Floats:
        """Bytes that follow from where lanes end, by the end of the last one: [N + 1]."""
        *others, last = self._problem.lanes
        pool, static, some = last.pool, last.static, last.sizes > 0
        for lane, end in zip(others, ends, strict=True):
            pool, static = np.maximum(pool, lane.pool[end]), np.maximum(static, lane.static[end])
            some = some | (end > 0)
        return np.asarray(pool + static + self._problem.workspace * some)

    def _cheapest(self, group: Sequence[int]) -> tuple[float, float]:
        lanes = [self._problem.lanes[i] for i in group if self._problem.lanes[i].sizes.size > 1]
        driver = min((float(lane.driver[1:].min()) for lane in lanes), default=0.0)
        return driver, min((float(lane.seconds[1:].min()) for lane in lanes), default=0.0)

    @staticmethod
    def _least(table: Floats) -> Floats:
        """The least total by the number of all graphs: [K + 1]."""
        least = np.full(len(table), np.inf)
        for first, row in enumerate(table):
            np.minimum(least[first:], row[: len(row) - first], out=least[first:])
        return np.asarray(np.minimum.accumulate(least))


class ListSearch:
    """The same for plans whose lanes share one list of sizes, see Note [One list]; exact for each
    number of graphs where nothing else is limited. Seconds and driver bytes bound it by their
    ``rate`` alone.
    """

    def __init__(
        self,
        problem: Problem,
        limits: Limits,
        *,
        rate: float = 0.0,
        curve: bool = False,
        effort: int = EFFORT,
    ) -> None:
        del curve, effort  # all numbers of graphs are proven
        self._problem, graphs = problem, limits.graphs
        longest = max(problem.lanes, key=lambda lane: lane.sizes.size)
        self._sizes = longest.sizes
        byte, self.budget_price, prices = _prices(problem, limits, rate)
        held = [self._sizes <= lane.sizes[-1] for lane in problem.lanes]

        def padded(figures: Sequence[Floats]) -> Floats:
            return np.stack(
                [np.append(own, np.zeros(self._sizes.size - own.size)) for own in figures]
            )

        fixed = longest.static + padded([lane.pool for lane in problem.lanes]).max(axis=0)
        fixed[1:] += problem.workspace
        weights = np.stack(
            [demand.weight[demand.below(self._sizes)] for demand in problem.demands]
        )[:, None]
        times = np.stack([self._times(demand.lanes, held) for demand in problem.demands])[:, None]
        # else a larger graph is faster, in another mode
        is_proven = bool((np.diff(times[..., 1:]) >= 0).all())
        times = np.maximum.accumulate(times, axis=-1)
        each = np.sum(held, axis=0)
        (self._paths,) = best_paths(weights, times, graphs, padded(prices).sum(axis=0), each)
        beyond = sum(
            demand.eager[-1] - demand.eager[demand.below(self._sizes)] for demand in problem.demands
        )
        self._total = self._paths.cost + beyond + problem.eager_us + byte * fixed
        if limits.memory is not None:
            self._total[:, fixed > limits.memory * (1 + ROUNDING)] = np.inf
        self.value = np.minimum.accumulate(self._total.min(axis=1))
        self.bound = (
            self.value if is_proven else np.full(graphs + 1, problem.infinite_us * problem.weight)
        )

    def _times(self, lanes: Sequence[int], held: Sequence[npt.NDArray[np.bool_]]) -> Floats:
        times = np.full(self._sizes.size, np.inf)
        for index in reversed(lanes):
            times[held[index]] = self._problem.lanes[index].times
        times[0] = 0.0  # no size
        return times

    def chosen(self, graphs: int) -> Chosen:
        graphs = int(self._total[: graphs + 1].min(axis=1).argmin())
        picked = self._paths.sizes(graphs, int(self._total[graphs].argmin()))
        return tuple(
            tuple(n for n in picked if n < lane.sizes.size) for lane in self._problem.lanes
        )


def search(problem: Problem, limits: Limits, **options: Any) -> Search | ListSearch:
    """The best plans of a problem, by their number of graphs."""
    return (ListSearch if problem.one_list and problem.lanes else Search)(
        problem, limits, **options
    )


def _prices(problem: Problem, limits: Limits, rate: float) -> tuple[float, float, list[Floats]]:
    """At a rate: the price of a byte, of the whole budget, and of the keys of each lane."""
    saved = problem.eager_total - problem.infinite_us * problem.weight
    byte, second = (
        rate * saved / limit if limit else 0.0 for limit in (limits.memory, limits.seconds)
    )
    whole = byte * (limits.memory or 0) + second * ((limits.seconds or 0) - problem.once)
    return byte, whole, [byte * lane.driver + second * lane.seconds for lane in problem.lanes]


def _raised(lane: Candidates, sizes: list[int]) -> tuple[int, ...]:
    """Each size but the largest in favour of the largest one below the next that takes and costs as
    much.
    """
    figures = np.stack([lane.times, lane.driver, lane.seconds])
    alike = [
        (figures[:, size:above] == figures[:, [size]]).all(axis=0)
        for size, above in pairwise(sizes)
    ]
    return (
        *(size + int(np.flatnonzero(same)[-1]) for size, same in zip(sizes, alike, strict=False)),
        *sizes[-1:],
    )


def _min_plus(table: Floats, curve: Floats) -> Floats:
    """The least sums of entries of [K + 1, ...] and [K + 1] whose numbers of graphs add up to at
    most k.
    """
    total = np.full(table.shape, np.inf)
    for graphs, value in enumerate(curve):
        np.minimum(total[graphs:], table[: len(table) - graphs] + value, out=total[graphs:])
    return total


def _shares(curves: Sequence[Floats], graphs: int) -> list[int]:
    """How the best sum of [K + 1] curves shares out at most so many graphs; as few as give the
    same.
    """
    sums = [np.zeros(graphs + 1)]
    for curve in curves:
        sums.append(_min_plus(sums[-1], curve[: graphs + 1]))
    found: list[int] = []
    for before, curve in zip(reversed(sums[:-1]), reversed(curves), strict=True):
        found.insert(0, int((before[graphs::-1] + curve[: graphs + 1]).argmin()))
        graphs -= found[0]
    return found
