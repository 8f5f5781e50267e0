"""The problem of a search as arrays: the sizes that it chooses among, and the batches that want
them.

Note [Candidates]
~~~~~~~~~~~~~~~~~
A size at which no batch sits (after rounding up to whole requests) runs the batches of the size
below it that has one, and is no faster. So it is a candidate only where it costs less. Of the
others the last one is the last that is faster than what its batches do without it.

Note [One list]
~~~~~~~~~~~~~~~
Some engines capture each size in all lanes that may hold it. Such lanes are one lane here: each
demand has its own times there (those of the first lane that holds the size), and a size counts as
many graphs as lanes hold it. vLLM's model runner V1 rounds the list to whole requests where a mode
is FULL; V2 rounds decode graphs alone, so that sizes beyond those are as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.lanes import key_of, largest_of, list_stride, may_serve, stride_of
from cgplan.optimizer.paths import Floats, Ints, Paths, best_paths, min_plus
from cgplan.planning.costs import GraphCosts
from cgplan.planning.plan import Lane, Plan, capture_order
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes
from cgplan.units import grouped

Chosen = tuple[tuple[int, ...], ...]  # candidates of each lane, ascending, as indices


@dataclass(frozen=True, eq=False)
class Candidates:
    """Sizes that a lane may have, ascending; index 0 stands for none. Arrays are [N + 1].

    Attributes:
        lanes: The lane, or those that share the list.
        sizes: In tokens.
        times: Microseconds of a step at that size: [1, N + 1], or [demands, N + 1] of a list.
        each: Graphs that a size counts as.
        driver: Bytes that the driver takes for them; 0 without costs, as all below.
        seconds: Warm-ups and captures.
        pool, static: Bytes of the pool and of the static buffers, where that size is the largest.
    """

    lanes: tuple[Lane, ...]
    sizes: Ints
    times: Floats
    each: Ints
    driver: Floats
    seconds: Floats
    pool: Floats
    static: Floats

    def least(self, graphs: int) -> Floats:
        """Bytes of the driver and seconds that 0 or more graphs cost at least, inf where there are
        not so many: [2, K + 1].
        """
        found = np.full((2, graphs + 1), np.inf)
        found[:, 0] = 0.0
        most = min(int(self.each[1:].sum()), graphs)
        for row, figure in zip(
            found,
            (self.driver, self.seconds),
            strict=True,
        ):
            every = np.sort(np.repeat(figure[1:] / self.each[1:], self.each[1:]))
            row[1 : most + 1] = np.cumsum(every[:most])
        return found


class Prices(NamedTuple):
    """Microseconds, times weight, of a byte and of a second."""

    byte: float
    second: float

    def of(self, lane: Candidates) -> Floats:
        """The price of each candidate, but for pool and static buffers."""
        return self.byte * lane.driver + self.second * lane.seconds


@dataclass(frozen=True, eq=False)
class Demand:
    """Batches that try the same lanes. Sums are cumulative over ``tokens``: [n + 1], 0 first.

    Attributes:
        lanes: Indices of the lanes that may serve them, in the order in which they are tried.
        tokens: Sizes of the batches, ascending: [n].
        slowest: The longest eager step of those sizes: [n].
        weight: Weights.
        eager: Weights times the microseconds of eager steps.
        best: Weights times the least microseconds that any lane or an eager step could take.
    """

    lanes: tuple[int, ...]
    tokens: Ints
    slowest: Floats
    weight: Floats
    eager: Floats
    best: Floats

    def below(self, sizes: Ints) -> Ints:
        """How many entries of ``tokens`` each size holds."""
        return np.searchsorted(
            self.tokens,
            sizes,
            side="right",
        )


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything that a search needs to know.

    Attributes:
        lanes: In the order in which they are tried.
        demands: Batches that a graph may serve.
        eager_us: Weight times microseconds of the batches that none may serve.
        weight: Of all batches.
        workspace, once: Bytes and seconds that the first graph brings with it.
        rising: Whether no larger graph is faster, in whatever mode its batches run there.
    """

    lanes: tuple[Candidates, ...]
    demands: tuple[Demand, ...]
    eager_us: float
    weight: float
    workspace: float = 0.0
    once: float = 0.0
    rising: bool = True

    @property
    def infinite_us(self) -> float:
        """Mean microseconds of a step if every batch had a graph of its own size, and ran in its
        best mode.
        """
        best = sum(float(demand.best[-1]) for demand in self.demands)
        return (self.eager_us + best) / self.weight

    @property
    def eager_total(self) -> float:
        return self.eager_us + sum(float(demand.eager[-1]) for demand in self.demands)

    @property
    def saved(self) -> float:
        """Microseconds, times weight, that graphs can save at all."""
        return self.eager_total - self.infinite_us * self.weight

    @property
    def changeable(self) -> float:
        """Microseconds, times weight, of the batches that graphs make faster, at their best: what
        shares refer to.
        """
        total = 0.0
        for demand in self.demands:
            best, eager = np.diff(demand.best), np.diff(demand.eager)
            total += float(best[best < eager].sum())
        return total

    @cached_property
    def holds(self) -> list[list[Ints]]:
        """Of each demand and lane: how many batch sizes each candidate holds; 0 where the lane may
        not serve them.
        """
        found = []
        for demand in self.demands:
            below = [demand.below(lane.sizes) for lane in self.lanes]
            found.append([held * (n in demand.lanes) for n, held in enumerate(below)])
        return found

    def weights(self, n: int, demands: Iterable[int]) -> Floats:
        """The weight of the batches of these demands up to each candidate of a lane, by kinds."""
        found = np.zeros(self.lanes[n].times.shape)
        for number in demands:
            kind = min(number, len(found) - 1)
            found[kind] += self.demands[number].weight[self.holds[number][n]]
        return found

    def missed(self, n: int, demands: Iterable[int]) -> Floats:
        """Weight times microseconds of the eager steps of their batches above each candidate."""
        found = np.zeros(self.lanes[n].sizes.size)
        for number in demands:
            eager = self.demands[number].eager
            found += eager[-1] - eager[self.holds[number][n]]
        return found

    def paths(self, n: int, demands: Iterable[int], graphs: int, prices: Prices) -> Paths:
        """Paths of a lane that has all batches of these demands."""
        lane = self.lanes[n]
        weights = self.weights(n, demands)
        return best_paths(
            weights,
            lane.times,
            graphs,
            prices.of(lane),
            lane.each,
        )

    def left_to(self, n: int, others: Chosen) -> tuple[Floats, Floats]:
        """The weight of the batches up to each candidate of a lane that others leave to it, by
        kinds, and what all other batches take, if it ends there.
        """
        lane = self.lanes[n]
        weights, beyond = np.zeros(lane.times.shape), np.full(lane.sizes.size, self.eager_us)
        for number, demand in enumerate(self.demands):
            now = self._now(number, others)
            beyond += now[-1]
            if n in demand.lanes:
                held, passed = self.holds[number][n], 0
                for earlier in demand.lanes[: demand.lanes.index(n)]:
                    if others[earlier]:
                        passed = max(passed, int(self.holds[number][earlier][others[earlier][-1]]))
                held = np.maximum(held, passed)
                kind = min(number, len(weights) - 1)
                weights[kind] += demand.weight[held] - demand.weight[passed]
                beyond -= now[held] - now[passed]
        return weights, beyond

    def least(self, graphs: int) -> Floats:
        """Bytes and seconds that 0 or more graphs cost at least, whichever they are, without pool
        and static buffers; inf where there are not so many: [2, K + 1].
        """
        found = np.full((2, graphs + 1), np.inf)
        found[:, 0] = 0.0
        for lane in self.lanes:
            found = np.stack([*map(min_plus, found, lane.least(graphs))])
        found[0, 1:] += self.workspace
        found[1, 1:] += self.once
        return found

    def _now(self, number: int, chosen: Sequence[Sequence[int]]) -> Floats:
        """Weight times microseconds of the batches of a demand, cumulative, in the order of its
        tokens.
        """
        demand = self.demands[number]
        spent, weight, passed = np.diff(demand.eager), np.diff(demand.weight), 0
        for n in demand.lanes:
            times = self.lanes[n].times
            kind = min(number, len(times) - 1)
            for index in chosen[n]:
                held = int(self.holds[number][n][index])
                if held > passed:
                    spent[passed:held] = weight[passed:held] * times[kind, index]
                    passed = held
        return np.append(0.0, np.cumsum(spent))

    def total_of(self, chosen: Sequence[Sequence[int]]) -> float:
        """Microseconds, times weight, if these candidates of each lane are captured."""
        spent = (float(self._now(n, chosen)[-1]) for n in range(len(self.demands)))
        return self.eager_us + sum(spent)

    def gains(self, chosen: Sequence[Sequence[int]]) -> list[Floats]:
        """What each candidate of each lane saves as one more of these: microseconds, times
        weight.
        """
        found = [np.zeros(lane.sizes.size) for lane in self.lanes]
        for number, demand in enumerate(self.demands):
            now, passed = self._now(number, chosen), 0
            for n in demand.lanes:
                lane, held = self.lanes[n], self.holds[number][n]
                picked = np.array([0, *chosen[n]])
                below = np.searchsorted(
                    picked[1:],
                    np.arange(held.size),
                    side="left",
                )
                first = np.maximum(held[picked[below]], passed)
                last = np.maximum(held, first)
                times = lane.times[min(number, len(lane.times) - 1)]
                ran = (demand.weight[last] - demand.weight[first]) * times
                found[n] += now[last] - now[first] - ran
                passed = max(passed, int(held[picked[-1]]))
        return found

    def costs_of(self, chosen: Sequence[Sequence[int]]) -> tuple[int, float, float]:
        """Graphs, bytes and seconds."""
        graphs, driver, seconds, pool, static = self.parts(chosen)
        if not graphs:
            return 0, 0.0, 0.0
        return int(graphs), self.workspace + driver + pool + static, self.once + seconds

    def costs_with(self, chosen: Sequence[Sequence[int]], n: int) -> tuple[Floats, Floats, Floats]:
        """The same with each candidate of a lane as one more."""
        graphs, driver, seconds, pool, static = self.parts(chosen)
        lane = self.lanes[n]
        ends = np.maximum(lane.pool, pool) + np.maximum(lane.static, static)
        return (
            np.asarray(graphs + lane.each, dtype=np.float64),
            self.workspace + driver + lane.driver + ends,
            self.once + seconds + lane.seconds,
        )

    def parts(self, chosen: Sequence[Sequence[int]]) -> tuple[float, ...]:
        """Graphs, bytes of the driver, seconds, and bytes of the pool and of static buffers."""
        sums, ends = np.zeros(3), np.zeros(2)
        for lane, picked in zip(self.lanes, chosen, strict=True):
            if len(picked):
                figures = np.stack(
                    [
                        lane.each,
                        lane.driver,
                        lane.seconds,
                        lane.pool,
                        lane.static,
                    ]
                )
                figures = figures[:, [*picked]]
                sums += figures[:3].sum(axis=1)
                ends = np.maximum(ends, figures[3:].max(axis=1))
        return (*sums.tolist(), *ends.tolist())

    def keys_of(self, chosen: Iterable[Iterable[int]], plan: Plan) -> tuple[Key, ...]:
        """The keys of these candidates, in capture order."""
        keys = []
        for candidates, picked in zip(self.lanes, chosen, strict=True):
            for size in candidates.sizes[[*picked]].tolist():
                for lane in candidates.lanes:
                    if size <= largest_of(lane, plan):
                        keys.append(key_of(lane, size, plan))
        return capture_order(keys)


def problem_of(
    lanes: Sequence[Lane],
    traffic: Traffic,
    times: StepTimes,
    plan: Plan,
    costs: GraphCosts | None,
    without: Collection[Key] = (),
    *,
    one_list: bool = False,
) -> Problem:
    """The problem of planning these lanes for this traffic; the keys in ``without`` are no
    candidates. ``one_list``: see Note [One list].

    Raises:
        StepTimeError: step times of a lane's mode, or of eager steps, are missing.
    """
    batches = [batch for batch, _ in traffic.histogram]
    used = [lane for lane in lanes if any(may_serve(lane, batch, traffic) for batch in batches)]
    if not one_list:
        lanes = used
    groups = grouped(
        (
            tuple(index for index, lane in enumerate(lanes) if may_serve(lane, batch, traffic)),
            (
                batch.num_tokens,
                batch.num_active_loras,
                weight,
            ),
        )
        for batch, weight in traffic.histogram
    )
    everything = [
        _demand(
            on,
            rows,
            lanes,
            times,
            plan,
        )
        for on, rows in sorted(groups.items())
    ]
    demands = tuple(demand for demand in everything if demand.lanes)
    problem = Problem(
        lanes=(),
        demands=demands,
        eager_us=float(sum(demand.eager[-1] for demand in everything if not demand.lanes)),
        weight=traffic.total,
        workspace=0.0 if costs is None else float(costs.workspace_bytes),
        once=0.0 if costs is None else costs.once_seconds,
    )
    if not used:
        return problem
    market = _Market(
        times,
        plan,
        costs,
        without,
    )
    if one_list:
        made, rising = _one_list(lanes, demands, market)
        shared = tuple(replace(demand, lanes=(0,)) for demand in demands)
        return replace(
            problem,
            lanes=(made,),
            demands=shared,
            rising=rising,
        )
    found: list[Candidates] = []
    # where a lane may end depends on those after it
    for index in reversed(range(len(lanes))):
        above = max((float(other.times[0, -1]) for other in found), default=0.0)
        wanted = [demand for demand in demands if index in demand.lanes]
        found.insert(0, market.candidates(lanes[index], wanted, above))
    return replace(problem, lanes=tuple(found))


def _demand(
    served: tuple[int, ...],
    rows: list[tuple[int, int, float]],
    lanes: Sequence[Lane],
    times: StepTimes,
    plan: Plan,
) -> Demand:
    sizes, loras, weights = (np.array(column) for column in zip(*rows, strict=True))
    eager = np.zeros(sizes.size)
    for case in np.unique(loras):
        eager[loras == case] = times.at(
            CUDAGraphMode.NONE,
            sizes[loras == case],
            int(case),
        )
    best = eager.copy()
    for lane in (lanes[index] for index in served):
        rounded = _rounded(sizes, stride_of(lane, plan))
        fits = rounded <= largest_of(lane, plan)
        if fits.any():
            took = times.at(
                lane.mode,
                rounded[fits],
                lane.num_active_loras,
            )
            best[fits] = np.minimum(best[fits], took)
    tokens, at = np.unique(sizes, return_inverse=True)
    slowest = np.zeros(tokens.size)
    np.maximum.at(slowest, at, eager)

    def summed(values: Floats) -> Floats:
        return np.cumsum([0.0, *np.bincount(at, values)])

    return Demand(
        served,
        tokens,
        slowest,
        weight=summed(weights),
        eager=summed(weights * eager),
        best=summed(weights * best),
    )


def _rounded(sizes: Ints, stride: int) -> Ints:
    return -(-sizes // stride) * stride


@dataclass(frozen=True)
class _Market:
    """What graphs of a lane take and cost, and which there are."""

    times: StepTimes
    plan: Plan
    costs: GraphCosts | None
    without: Collection[Key]
    known: dict[tuple[Lane, int], Floats] = field(default_factory=dict)

    def candidates(self, lane: Lane, wanted: Sequence[Demand], above: float) -> Candidates:
        """See Note [Candidates]. Where other lanes follow (their slowest graph takes ``above``), a
        batch may fall to one of those.
        """
        most, stride = largest_of(lane, self.plan), stride_of(lane, self.plan)
        rounded, misses = [np.zeros(1, dtype=np.int64)], [np.zeros(1)]
        for demand in wanted:
            rounded.append(_rounded(demand.tokens, stride))
            misses.append(np.maximum(demand.slowest, above))
        sizes, at = np.unique(np.concatenate(rounded), return_inverse=True)
        missed = np.zeros(sizes.size)
        np.maximum.at(
            missed,
            at,
            np.concatenate(misses),
        )
        lost = {key[1].num_tokens for key in self.without if Lane.of(*key) == lane}
        fits = (sizes <= most) & ~np.isin(sizes, [*lost])
        missed = np.maximum.accumulate(missed)[fits]
        sizes = sizes[fits]
        took = self.times.at(
            lane.mode,
            sizes,
            lane.num_active_loras,
        )
        sizes = sizes[: int(np.flatnonzero(took < missed).max(initial=0)) + 1]
        return self.priced(
            lane,
            self.with_cheaper(lane, sizes, stride),
            stride,
        )

    def paid(self, lane: Lane, stride: int) -> Floats:
        """[2, sizes] bytes of the driver and seconds of every multiple of ``stride``, from 0 on."""
        if (lane, stride) not in self.known:
            most, costs = largest_of(lane, self.plan), self.costs
            figures = np.zeros((2, most // stride + 1))
            if costs is not None:
                for index in range(1, figures.shape[1]):
                    key = key_of(lane, index * stride, self.plan)
                    figures[:, index] = costs.driver_bytes(key), costs.seconds(key)
            self.known[lane, stride] = figures
        return self.known[lane, stride]

    def with_cheaper(self, lane: Lane, sizes: Ints, stride: int) -> Ints:
        """The sizes, and others that cost less than the one below them."""
        paid = self.paid(lane, stride)
        every = np.arange(paid.shape[1]) * stride
        below = np.searchsorted(sizes, every, side="right") - 1
        cheaper = (paid < paid[:, sizes[below] // stride]).any(axis=0)
        return np.union1d(sizes, every[cheaper & (below > 0)])

    def priced(self, lane: Lane, sizes: Ints, stride: int) -> Candidates:
        driver, seconds = self.paid(lane, stride)[:, sizes // stride]
        pool, static = np.zeros(sizes.size), np.zeros(sizes.size)
        if self.costs is not None:
            for index, size in enumerate(sizes[1:].tolist(), 1):
                pool[index] = self.costs.pool_bytes(lane.mode, size)
                static[index] = self.costs.static_bytes(size)
        took = self.times.at(
            lane.mode,
            sizes,
            lane.num_active_loras,
        )[None]
        each = np.ones(sizes.size, dtype=np.int64)
        return Candidates(
            (lane,),
            sizes,
            took,
            each,
            driver,
            seconds,
            pool,
            static,
        )


def _one_list(
    lanes: Sequence[Lane], demands: Sequence[Demand], market: _Market
) -> tuple[Candidates, bool]:
    """The list, and whether no larger graph is faster. Its sizes are those of batches of any lane,
    that no lane has to do without; whole requests as the key rules have them.
    """
    plan = market.plan
    tops = [largest_of(lane, plan) for lane in lanes]
    stride, whole = list_stride(lanes, plan)
    # where fewer lanes hold a size, it is fewer graphs
    wanted = np.concatenate(
        [
            [0],
            np.add(tops, 1),
            *(demand.tokens for demand in demands),
        ]
    )
    rounded = _rounded(wanted, plan.query_len)
    sizes = np.unique(np.where(rounded <= whole, rounded, _rounded(wanted, stride)))
    sizes = np.setdiff1d(sizes, [key.num_tokens for _, key in market.without])
    sizes = sizes[sizes <= max(tops)]
    for lane, top in zip(lanes, tops, strict=True):
        sizes = np.union1d(
            sizes,
            market.with_cheaper(
                lane,
                sizes[sizes <= top],
                stride,
            ),
        )
    sizes = sizes[(sizes > whole) | (sizes % plan.query_len == 0)]
    width = sizes.size
    times = np.zeros((len(demands), width))
    figures = np.zeros((5, width))
    for index, (lane, top) in reversed([*enumerate(zip(lanes, tops, strict=True))]):
        own = market.priced(
            lane,
            sizes[sizes <= top],
            stride,
        )
        held = own.sizes.size
        for number, demand in enumerate(demands):
            if index in demand.lanes:
                times[number, 1:held] = own.times[0, 1:]
        figures[:3, :held] += own.each, own.driver, own.seconds
        ends = np.stack([own.pool, own.static])
        figures[3:, :held] = np.maximum(figures[3:, :held], ends)
    rising = np.maximum.accumulate(times, axis=1)
    each, driver, seconds, pool, static = figures
    made = Candidates(
        lanes=tuple(lanes),
        sizes=sizes,
        times=rising,
        each=each.astype(np.int64),
        driver=driver,
        seconds=seconds,
        pool=pool,
        static=static,
    )
    return made, np.array_equal(times, rising)
