"""The problem of a search: the sizes that lanes may have, and how long traffic takes in a set of
graphs, both as arrays.

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

from collections.abc import (
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.evidence import SizeUse
from cgplan.optimizer.paths import (
    Floats,
    Ints,
    Paths,
    best_paths,
)
from cgplan.planning.plan import (
    Lane,
    Plan,
    capture_order,
)
from cgplan.pricing import GraphCosts
from cgplan.traffic.histogram import StepShape, Traffic
from cgplan.traffic.simulation import StepTime
from cgplan.traffic.step_times import StepTimes
from cgplan.units import grouped

EAGER = Lane(CUDAGraphMode.NONE, False, 0)
Lists = Mapping[Lane, Sequence[int]]  # sizes of graphs in tokens, ascending, at least one each


def stride_of(
    lane: Lane,
    plan: Plan,
) -> int:
    return plan.query_len if lane.uniform else 1


def largest_of(
    lane: Lane,
    plan: Plan,
) -> int:
    limit = plan.max_num_batched_tokens
    stride = stride_of(lane, plan)
    if lane.uniform:
        decode = stride * plan.max_num_seqs
        limit = min(limit, decode)
    return limit // stride * stride


def list_stride(
    lanes: Sequence[Lane],
    plan: Plan,
) -> tuple[int, int]:
    """Of one list for these lanes: its stride, and up to where its sizes are whole requests
    besides. See Note [One list] in problem.py.
    """
    if plan.key_rules == "vllm_v2":
        decode = [lane for lane in lanes if lane.uniform]
        tops = [largest_of(lane, plan) for lane in decode]
        return 1, max(tops, default=0)
    for lane in lanes:
        if lane.uniform or lane.mode is CUDAGraphMode.FULL:
            return plan.query_len, 0
    return 1, 0


def keys_of(
    lists: Lists,
    plan: Plan,
) -> tuple[Key, ...]:
    """In capture order."""
    keys = []
    for lane, sizes in lists.items():
        for size in sizes:
            key = lane.key(
                size,
                plan.query_len,
                plan.max_num_seqs,
            )
            keys.append(key)
    return capture_order(keys)


class Steps:
    """Batches run through graphs: each in the first lane with a graph that holds it, at the
    smallest such size, as the dispatcher has it.

    Raises StepTimeError where times of a mode that runs a batch are missing.

    Attributes:
        batches: A StepShape of arrays.
        missed: Whether a batch runs eagerly.
    """

    def __init__(
        self,
        lists: Lists,
        batches: Any,
        times: StepTimes,
        apart: bool,
    ) -> None:
        self.batches = batches
        self.times = times
        self.apart = apart
        tokens = batches.num_tokens
        loras = batches.num_active_loras
        self._tokens = tokens
        self._size = tokens.copy()  # that runs
        self.microseconds = np.zeros_like(tokens)
        self._place = np.full_like(tokens, np.inf)  # of the lane; inf: eager
        self._parts: list[tuple[Lane, Any]] = []  # batches of each lane
        missed = np.isinf(self._place)
        for place, lane in sorted([(lane.place, lane) for lane in lists]):
            sizes = np.array(lists[lane])
            fits = self.may_run(lane, sizes[-1])
            runs = missed & fits
            missed &= ~fits
            at = np.searchsorted(sizes, tokens[runs])
            self._place[runs] = place
            self._run_in(lane, runs, sizes[at])
        for case in set(loras[missed].tolist()):
            here = missed & (loras == case)
            eager = EAGER._replace(num_active_loras=int(case))
            self._run_in(eager, here, tokens[here])
        self.missed = missed

    def _run_in(
        self,
        lane: Lane,
        here: Any,
        sizes: Any,
    ) -> None:
        if sizes.size:
            self._size[here] = sizes
            took = self.times.at(
                lane.mode,
                sizes,
                lane.num_active_loras,
            )
            self.microseconds[here] = took
            self._parts.append((lane, here))

    def serves(
        self,
        lane: Lane,
        batch: StepShape,
    ) -> Any:
        return lane.serves(batch.uniform, batch.num_active_loras, self.apart)

    def may_run(
        self,
        lane: Lane,
        most: float,
    ) -> Any:
        is_small = self._tokens <= most
        return is_small & self.serves(lane, self.batches)


def step_clock(
    plan: Plan,
    times: StepTimes,
    *,
    apart: bool = False,
) -> StepTime:
    """Microseconds of a step in the graph that the plan's dispatcher chooses; ``apart`` as in
    Traffic.
    """
    decode = plan.max_num_seqs * plan.query_len
    largest = max(plan.max_num_batched_tokens, plan.max_capture_size, decode)
    tokens = np.arange(largest + 1.0)
    lists = plan.lanes()

    @cache
    def every(uniform: bool, adapters: int) -> Any:
        columns = np.broadcast_arrays(tokens, tokens, uniform, adapters)
        batches = StepShape._make(columns)
        return Steps(lists, batches, times, apart).microseconds

    def time(shape: StepShape) -> float:
        size, _, uniform, adapters = shape
        found = every(uniform, adapters)
        return float(found[size])

    return time


class Run(Steps):
    """Traffic run through graphs."""

    def __init__(
        self,
        lists: Lists,
        traffic: Traffic,
        times: StepTimes,
    ) -> None:
        self.traffic = traffic
        batches, self.weights = traffic.columns
        super().__init__(lists, batches, times, traffic.apart)

    @property
    def unmeasured(self) -> float:
        """The share of the steps that run at sizes larger than those whose times were measured."""
        beyond = np.zeros_like(self.missed)
        for lane, here in self._parts:
            most = self.times.measured_to(lane.mode, lane.num_active_loras)
            beyond[here] = self._size[here] > most
        return float(self.weights[beyond].sum() / self.weights.sum())

    @property
    def expected_us(self) -> float:
        return float(np.average(self.microseconds, weights=self.weights))

    @property
    def by_kind(self) -> dict[str, Any]:
        uniform = self.batches.uniform
        means = {}
        for name, here in (("decode_us", uniform), ("mixed_us", ~uniform)):
            if here.any():
                time = self.microseconds[here]
                mean = np.average(time, weights=self.weights[here])
                means[name] = float(mean)
        return means

    @property
    def padding(self) -> float:
        tokens = float(self.weights @ self._tokens)
        ran = float(self.weights @ self._size)
        return 1 - tokens / ran

    @cached_property
    def uses(self) -> tuple[SizeUse, ...]:
        """Of each graph that runs a batch, in the order of lanes and sizes, last of eager steps."""
        found = []
        for lane, runs in self._parts:
            if lane.mode is EAGER.mode:
                continue
            for size in np.unique(self._size[runs]):
                here = self.runs_in(lane, int(size))
                tokens = self._tokens[here]
                own = self.times.at(
                    lane.mode,
                    tokens,
                    lane.num_active_loras,
                )
                use = self._use(lane, int(size), here, own)
                found.append(use)
        if self.missed.any():
            own = self.microseconds[self.missed]
            use = self._use(EAGER, None, self.missed, own)
            found.append(use)
        return tuple(found)

    def _use(
        self,
        lane: Lane,
        size: int | None,
        here: Any,
        own: Any,
    ) -> SizeUse:
        weight = self.weights[here]
        total = float(weight.sum())
        padding = 0.0
        if size is not None:
            tokens = float(weight @ self._tokens[here])
            padding = 1 - tokens / (total * size)
        time = float(weight @ self.microseconds[here])
        unpadded = float(weight @ own)
        return SizeUse(
            **lane._asdict(),
            size=size,
            share=total / self.traffic.total,
            padding=padding,
            step_us=time / total,
            own_us=unpadded / total,
        )

    def runs_in(self, lane: Lane, size: int) -> Any:
        """Whether this graph runs a batch, of each."""
        is_there = self._place == lane.place
        return is_there & (self._size == size)


Chosen = tuple[tuple[int, ...], ...]  # candidates of each lane, ascending, as indices


@dataclass(frozen=True, eq=False)
class Candidates:
    """Sizes that a lane may have, ascending; index 0 stands for none. Arrays are [.., N + 1].

    Attributes:
        lanes: The lane, or those that share the list.
        times: Microseconds of a step: [1, N + 1], or [demands, N + 1] of a list.
        key_costs: Graphs that a size counts as, their driver bytes, and seconds; without costs both
            are 0, as ``pools``.
        pools: Bytes of the pool and of the static buffers, where that size is the largest.
    """

    lanes: tuple[Lane, ...]
    sizes: Ints
    times: Floats
    key_costs: Floats
    pools: Floats

    @property
    def each(self) -> Ints:
        graphs: Floats = self.key_costs[0]
        return graphs.astype(int)

    def paths(
        self,
        weights: Floats,
        graphs: int,
        prices: Prices,
    ) -> Paths:
        return best_paths(
            weights,
            self.times,
            graphs,
            price=prices.of(self),
            each=self.each,
        )


class Prices(NamedTuple):
    """Microseconds, times weight, of a byte and of a second."""

    byte: float
    second: float

    def of(self, lane: Candidates) -> Any:
        """The price of each candidate, but for pool and static buffers."""
        _, driver, seconds = lane.key_costs
        return self.total(driver, seconds)

    def total(
        self,
        memory: Any,
        seconds: Any,
    ) -> Any:
        of_memory = self.byte * memory
        return of_memory + self.second * seconds


@dataclass(frozen=True, eq=False)
class Demand:
    """Batches that try the same lanes. Sums are cumulative over ``tokens``: [n + 1], 0 first.

    Attributes:
        lanes: Indices of the lanes that may serve them, in the order in which they are tried.
        tokens: Sizes of the batches, ascending: [n].
        slowest: The longest eager step up to those sizes: [n + 1], 0 first.
        eager: Weights times microseconds of eager steps.
        best: Weights times the least microseconds of any lane or an eager step.
        row: Of ``Candidates.times``.
    """

    lanes: tuple[int, ...]
    tokens: Ints
    slowest: Floats
    weight: Floats
    eager: Floats
    best: Floats
    row: int = 0

    @cached_property
    def each_weight(self) -> Floats:
        return np.diff(self.weight, prepend=0.0)

    @cached_property
    def each_eager(self) -> Floats:
        return np.diff(self.eager, prepend=0.0)

    def below(self, sizes: Ints) -> Ints:
        """How many entries of ``tokens`` each size holds."""
        return np.searchsorted(self.tokens, sizes, side="right")


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything that a search needs to know.

    Attributes:
        plan: With bounds.
        lanes: In the order in which they are tried.
        eager_us: Weight times microseconds of the batches that no lane may serve.
        weight: Of all batches.
        workspace, once: Bytes and seconds that the first graph brings with it.
    """

    plan: Plan
    lanes: tuple[Candidates, ...]
    demands: tuple[Demand, ...]
    eager_us: float
    weight: float
    workspace: float = 0.0
    once: float = 0.0

    @property
    def nothing(self) -> Chosen:
        return ((),) * len(self.lanes)

    @property
    def infinite_us(self) -> float:
        """Mean microseconds of a step if every batch had a graph of its own size, and ran in its
        best mode.
        """
        return self.best_total / self.weight

    @property
    def best_total(self) -> float:
        least = [float(demand.best[-1]) for demand in self.demands]
        return self.eager_us + sum(least)

    @property
    def eager_total(self) -> float:
        eager = [float(demand.eager[-1]) for demand in self.demands]
        return self.eager_us + sum(eager)

    @property
    def saved(self) -> float:
        return self.eager_total - self.best_total

    @property
    def changeable(self) -> float:
        """Microseconds, times weight, of the batches that graphs make faster, at their best: what
        shares refer to.
        """
        total = 0.0
        for demand in self.demands:
            best = np.diff(demand.best, prepend=0.0)
            is_faster = best < demand.each_eager
            faster = best[is_faster]
            total += float(faster.sum())
        return total

    @cached_property
    def holds(self) -> list[list[Ints]]:
        """Of each demand and lane: how many batch sizes each candidate holds."""
        found = []
        for demand in self.demands:
            row = [demand.below(lane.sizes) for lane in self.lanes]
            found.append(row)
        return found

    def left_to(
        self,
        n: int,
        others: Chosen,
    ) -> tuple[Floats, Floats]:
        """The weight of the batches up to each candidate that other lanes leave to this one, by
        kinds, and what all other batches take if it ends there.
        """
        lane = self.lanes[n]
        weights = np.zeros(lane.times.shape)
        beyond = np.full(lane.sizes.size, self.eager_us)
        for number, demand in enumerate(self.demands):
            now, before = self._now(number, others)
            beyond += now[-1]
            if n in before:
                passed = before[n]
                held = self.holds[number][n]
                held = np.maximum(held, passed)
                weight = demand.weight[held]
                weights[demand.row] += weight - demand.weight[passed]
                beyond -= now[held] - now[passed]
        return weights, beyond

    def _now(
        self,
        number: int,
        chosen: Chosen,
    ) -> tuple[Floats, dict[int, int]]:
        """Weight times microseconds of the batches of a demand, cumulative, in the order of its
        tokens; and of each lane how many batch sizes those before it run.
        """
        demand = self.demands[number]
        spent = demand.each_eager.copy()
        weight = demand.each_weight
        passed = 0
        before = {}
        for n in demand.lanes:
            before[n] = passed
            lane = self.lanes[n]
            holds = self.holds[number][n]
            for index in chosen[n]:
                held = int(holds[index])
                if held > passed:
                    ran = slice(passed + 1, held + 1)
                    time = lane.times[demand.row, index]
                    spent[ran] = weight[ran] * time
                    passed = held
        return spent.cumsum(), before

    def total_of(self, chosen: Chosen) -> float:
        total = self.eager_us
        for number in range(len(self.demands)):
            now, _ = self._now(number, chosen)
            total += float(now[-1])
        return total

    def gains(self, chosen: Chosen) -> list[Floats]:
        """What each candidate of each lane saves as one more."""
        found = [np.zeros(lane.sizes.size) for lane in self.lanes]
        for number, demand in enumerate(self.demands):
            now, before = self._now(number, chosen)
            for n, passed in before.items():
                held = self.holds[number][n]
                picked = chosen[n]
                every = np.arange(held.size)
                at = np.searchsorted(picked, every)
                below = np.array([0, *picked])
                first = held[below[at]]
                first = np.maximum(first, passed)
                last = np.maximum(held, first)
                weight = demand.weight[last]
                weight = weight - demand.weight[first]
                took = weight * self.lanes[n].times[demand.row]
                found[n] += now[last] - now[first] - took
        return found

    def costs_of(self, chosen: Chosen) -> tuple[float, float, float]:
        key_costs, pools = self.parts(chosen)
        graphs, driver, seconds = key_costs.tolist()
        if not graphs:
            return 0.0, 0.0, 0.0
        memory = self.workspace + driver + float(pools.sum())
        return graphs, memory, seconds + self.once

    def costs_with(
        self,
        chosen: Chosen,
        n: int,
    ) -> tuple[Floats, Floats, Floats]:
        """Graphs, bytes and seconds with each candidate of a lane as one more."""
        lane = self.lanes[n]
        key_costs, pools = self.parts(chosen)
        graphs, driver, seconds = lane.key_costs
        larger = np.maximum(lane.pools, pools[:, None])
        memory = driver + larger.sum(axis=0)
        return (
            graphs + key_costs[0],
            memory + key_costs[1] + self.workspace,
            seconds + key_costs[2] + self.once,
        )

    def parts(self, chosen: Chosen) -> tuple[Floats, Floats]:
        key_costs = np.zeros(3)
        pools = np.zeros(2)
        for lane, picked in zip(self.lanes, chosen, strict=True):
            if not picked:
                continue
            at = list(picked)
            own = lane.key_costs[:, at]
            key_costs += own.sum(axis=1)
            most = lane.pools[:, at]
            pools = np.maximum(pools, most.max(axis=1))
        return key_costs, pools

    def lists_of(self, chosen: Chosen) -> Lists:
        found = {}
        for candidates, picked in zip(self.lanes, chosen, strict=True):
            sizes = candidates.sizes[[*picked]]
            for lane in candidates.lanes:
                most = largest_of(lane, self.plan)
                own = sizes[sizes <= most]
                if own.size:
                    found[lane] = own.tolist()
        return found


def problem_of(
    lanes: Sequence[Lane],
    traffic: Traffic,
    times: StepTimes,
    plan: Plan,
    costs: GraphCosts | None,
    without: Collection[Key] = (),
    *,
    one_list: bool = False,
    asked_to: int = 0,
) -> Problem:
    """The keys in ``without`` are no candidates, nor are sizes above all that was measured or asked
    for (``asked_to``), unless the plan names a maximum. ``one_list``: see Note [One list].

    Raises StepTimeError where step times of a lane's mode, or of eager steps, are missing.
    """
    batches, weights = traffic.columns
    offers = []
    serves = []
    has_graphs = False
    for lane in lanes:
        may = lane.serves(batches.uniform, batches.num_active_loras, traffic.apart)
        has_graphs |= bool(may.any())
        if one_list or may.any():
            alike = lanes if one_list else [lane]
            measured = [times.measured_at(one.mode, one.num_active_loras)[-1] for one in alike]
            allowed = plan.largest_allowed or max(asked_to, *measured)
            offer = _Offer(
                lane,
                stride_of(lane, plan),
                min(largest_of(lane, plan), allowed),
                times,
                plan,
                costs,
            )
            offers.append(offer)
            serves.append(may.tolist())
    served = list(zip(*serves, strict=True))
    if not served:
        served = [()] * weights.size
    groups = grouped(zip(served, range(weights.size), strict=True))
    demands = []
    eager_us = 0.0
    for on, rows in groups.items():
        own = StepShape._make(column[rows] for column in batches)
        tried = tuple(np.flatnonzero(on).tolist())
        demand = _demand(
            tried,
            own,
            weights[rows],
            offers,
            times,
        )
        if tried:
            demands.append(demand)
        else:
            eager_us += float(demand.eager[-1])
    problem = Problem(
        plan,
        lanes=(),
        demands=tuple(demands),
        eager_us=eager_us,
        weight=traffic.total,
    )
    if costs:
        problem = replace(
            problem,
            workspace=float(costs.workspace_bytes),
            once=costs.once_seconds,
        )
    if not has_graphs:
        return problem
    if one_list:
        return _with_one_list(problem, offers, without)
    found: list[Candidates] = []
    above = 0.0
    # where a lane may end depends on those after it
    for index, offer in reversed([*enumerate(offers)]):
        wanted = [demand for demand in demands if index in demand.lanes]
        sizes = offer.wanted_sizes(wanted, above, without)
        candidates = offer.candidates(sizes)
        above = max(above, float(candidates.times[0, -1]))
        found.insert(0, candidates)
    return replace(problem, lanes=tuple(found))


def _demand(
    served: tuple[int, ...],
    batches: StepShape,
    weights: Floats,
    offers: Sequence[_Offer],
    times: StepTimes,
) -> Demand:
    sizes = np.asarray(batches.num_tokens, dtype=int)
    loras = np.asarray(batches.num_active_loras)
    eager = np.zeros(sizes.size)
    for case in set(loras.tolist()):
        here = loras == case
        own = sizes[here]
        eager[here] = times.at(CUDAGraphMode.NONE, own, int(case))
    best = eager.copy()
    for index in served:
        offer = offers[index]
        rounded = _rounded(sizes, offer.stride)
        fits = rounded <= offer.largest
        if fits.any():
            took = np.full_like(best, np.inf)
            took[fits] = offer.time(rounded[fits])
            best = np.minimum(best, took)
    tokens, at = np.unique(sizes, return_inverse=True)
    slowest = np.zeros(tokens.size + 1)
    np.maximum.at(
        slowest,
        at + 1,
        eager,
    )

    def summed(values: Floats) -> Floats:
        each = np.bincount(at, values)
        return np.cumsum([0.0, *each])

    return Demand(
        served,
        tokens,
        np.maximum.accumulate(slowest),
        weight=summed(weights),
        eager=summed(weights * eager),
        best=summed(weights * best),
    )


def _rounded(
    sizes: Ints,
    stride: int,
) -> Ints:
    return -(-sizes // stride) * stride


@dataclass(frozen=True, eq=False)
class _Offer:
    lane: Lane
    stride: int
    largest: int
    times: StepTimes
    plan: Plan
    costs: GraphCosts | None

    def time(self, sizes: Ints) -> Floats:
        lane = self.lane
        return self.times.at(lane.mode, sizes, lane.num_active_loras)

    @cached_property
    def costs_by_size(self) -> Floats:
        """Bytes of the driver and seconds of every multiple of the stride, from 0 on."""
        number = self.largest // self.stride
        figures = np.zeros((2, number + 1))
        costs = self.costs
        plan = self.plan
        if costs is None:
            return figures
        for index in range(1, number + 1):
            size = index * self.stride
            key = self.lane.key(
                size,
                plan.query_len,
                plan.max_num_seqs,
            )
            driver = costs.driver_bytes(key)
            figures[:, index] = driver, costs.seconds(key)
        return figures

    def wanted_sizes(
        self,
        wanted: Sequence[Demand],
        above: float,
        without: Iterable[Key],
    ) -> Ints:
        """See Note [Candidates]. Where other lanes follow (their slowest graph takes ``above``), a
        batch may fall to one of those.
        """
        tokens = [np.array([0]), *(demand.tokens for demand in wanted)]
        rounded = _rounded(np.concatenate(tokens), self.stride)
        lost = [key[1].num_tokens for key in without if Lane.of(*key) == self.lane]
        sizes = np.setdiff1d(rounded, lost)
        sizes = sizes[sizes <= self.largest]
        missed = np.full(sizes.size, above)
        for demand in wanted:
            held = demand.below(sizes)
            missed = np.maximum(missed, demand.slowest[held])
        faster = np.flatnonzero(self.time(sizes) < missed)
        last = int(faster.max(initial=0))
        return self.with_cheaper(sizes[: last + 1])

    def with_cheaper(self, sizes: Ints) -> Ints:
        """The sizes, and others that cost less than the one below them."""
        costs = self.costs_by_size
        every = np.arange(costs.shape[1])
        multiples = sizes // self.stride
        held = np.searchsorted(multiples, every, side="right")
        below = multiples[held - 1]
        is_cheaper = (costs < costs[:, below]).any(axis=0)
        is_cheaper &= below > 0
        cheaper = every[is_cheaper] * self.stride
        return np.union1d(sizes, cheaper)

    def candidates(self, sizes: Ints) -> Candidates:
        key_costs = np.ones((3, sizes.size))
        multiples = sizes // self.stride
        key_costs[1:] = self.costs_by_size[:, multiples]
        pools = np.zeros((2, sizes.size))
        costs = self.costs
        if costs:
            for index in range(1, sizes.size):
                size = int(sizes[index])
                pool = costs.pool_bytes(self.lane.mode, size)
                pools[:, index] = pool, costs.static_bytes(size)
        times = self.time(sizes)
        return Candidates(
            lanes=(self.lane,),
            sizes=sizes,
            times=times[None],
            key_costs=key_costs,
            pools=pools,
        )


def _with_one_list(
    problem: Problem,
    offers: Sequence[_Offer],
    without: Iterable[Key],
) -> Problem:
    """Sizes that one lane has to do without are of none."""
    plan = problem.plan
    lanes = tuple(offer.lane for offer in offers)
    stride, whole = list_stride(lanes, plan)
    offers = [replace(offer, stride=stride) for offer in offers]
    # beyond the largest size of a lane, a size is fewer graphs
    beyond = np.array([0, *(offer.largest + 1 for offer in offers)])
    every = np.concatenate([beyond, *(demand.tokens for demand in problem.demands)])
    sizes = _rounded(every, stride)
    requests = _rounded(every, plan.query_len)
    sizes = np.where(
        requests <= whole,
        requests,
        sizes,
    )
    sizes = np.setdiff1d(sizes, [lost.num_tokens for _, lost in without])
    largest = max(offer.largest for offer in offers)
    sizes = sizes[sizes <= largest]
    for offer in offers:
        own = sizes[sizes <= offer.largest]
        cheaper = offer.with_cheaper(own)
        sizes = np.union1d(sizes, cheaper)
    is_whole = sizes % plan.query_len == 0
    sizes = sizes[is_whole | (sizes > whole)]
    width = sizes.size
    demands = problem.demands
    times = np.zeros((len(demands), width))
    key_costs = np.zeros((3, width))
    pools = np.zeros((2, width))
    for index, offer in reversed([*enumerate(offers)]):  # the first lane's times stay
        own = sizes[sizes <= offer.largest]
        made = offer.candidates(own)
        here = slice(1, own.size)
        key_costs[:, here] += made.key_costs[:, here]
        most = np.maximum(pools[:, here], made.pools[:, here])
        pools[:, here] = most
        for number, demand in enumerate(demands):
            if index in demand.lanes:
                times[number, here] = made.times[0, here]
    made = Candidates(
        lanes=lanes,
        sizes=sizes,
        times=np.maximum.accumulate(times, axis=1),
        key_costs=key_costs,
        pools=pools,
    )
    shared = [replace(demand, lanes=(0,), row=row) for row, demand in enumerate(demands)]
    return replace(
        problem,
        lanes=(made,),
        demands=tuple(shared),
    )
