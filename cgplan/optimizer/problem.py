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
from typing import Any

import numpy as np

from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.evidence import SizeUse
from cgplan.optimizer.paths import (
    Floats,
    Ints,
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
            most = self.times.measured_to(
                lane.mode,
                lane.num_active_loras,
            )
            beyond[here] = self._size[here] > most
        share = self.weights[beyond].sum() / self.weights.sum()
        return float(share)

    @property
    def expected_us(self) -> float:
        mean = np.average(
            self.microseconds,
            weights=self.weights,
        )
        return float(mean)

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


@dataclass(frozen=True, eq=False)
class Demand:
    """Batches that try the same lanes, by their sizes: [n].

    Attributes:
        lanes: Indices of the lanes that may serve them, in the order in which they are tried.
        tokens: Sizes of the batches, ascending.
        slowest: The longest eager step up to those sizes: [n + 1], 0 first.
        weights: Of the batches of each size.
        eager: Weights times microseconds of eager steps.
        row: Of ``Candidates.times``.
    """

    lanes: tuple[int, ...]
    tokens: Ints
    slowest: Floats
    weights: Floats
    eager: Floats
    row: int = 0

    @cached_property
    def weight(self) -> Floats:
        """Up to each size: [n + 1], 0 first."""
        return np.append(0.0, self.weights.cumsum())

    def below(self, sizes: Ints) -> Ints:
        """How many entries of ``tokens`` each size holds."""
        return np.searchsorted(self.tokens, sizes, side="right")


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything that a search needs to know. Totals are microseconds, times weight.

    Attributes:
        plan: With bounds.
        lanes: In the order in which they are tried.
        weight: Of all batches.
        eager_total: Of eager steps.
        best_total: If every batch had a graph of its own size, and ran in its best mode.
        changeable: The same, of the batches that graphs make faster: what shares refer to.
        largest: Of the sizes allowed.
        workspace, once: Bytes and seconds that the first graph brings with it.
    """

    plan: Plan
    lanes: tuple[Candidates, ...]
    demands: tuple[Demand, ...]
    weight: float
    eager_total: float
    best_total: float
    changeable: float
    largest: int
    workspace: float = 0.0
    once: float = 0.0

    @property
    def nothing(self) -> Chosen:
        return ((),) * len(self.lanes)

    @property
    def infinite_us(self) -> float:
        return self.best_total / self.weight

    @property
    def saved(self) -> float:
        return self.eager_total - self.best_total

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
        beyond = np.zeros(lane.sizes.size)
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
        spent = demand.eager.copy()
        passed = 0
        before = {}
        for n in demand.lanes:
            before[n] = passed
            lane = self.lanes[n]
            holds = self.holds[number][n]
            for index in chosen[n]:
                held = int(holds[index])
                if held > passed:
                    ran = slice(passed, held)
                    time = lane.times[demand.row, index]
                    spent[ran] = demand.weights[ran] * time
                    passed = held
        return np.append(0.0, spent.cumsum()), before

    def total_of(self, chosen: Chosen) -> float:
        total = 0.0
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
    run = Run({}, traffic, times)
    eager = run.microseconds
    best = eager.copy()
    tokens = run.batches.num_tokens.astype(int)
    serves = [run.serves(lane, run.batches) for lane in lanes]
    shared, _ = list_stride(lanes, plan)
    offers: list[_Offer] = []
    tried: list[tuple[int, ...]] = [()] * tokens.size
    for lane, may in zip(lanes, serves, strict=True):
        if may.any() or (one_list and np.any(serves)):
            alike = lanes if one_list else [lane]
            largest = asked_to
            for one in alike:
                measured = times.measured_at(one.mode, one.num_active_loras)
                largest = max(largest, measured[-1])
            allowed = plan.largest_allowed or largest
            stride = stride_of(lane, plan)
            offer = _Offer(
                lane,
                shared if one_list else stride,
                min(largest_of(lane, plan), allowed),
                times,
                plan,
                costs,
            )
            rounded = _rounded(tokens, stride)
            fits = may & (rounded <= offer.largest)
            best[fits] = np.minimum(best[fits], offer.time(rounded[fits]))
            for row in np.flatnonzero(may).tolist():
                tried[row] = (*tried[row], len(offers))
            offers.append(offer)
    demands = []
    groups = grouped((on, row) for row, on in enumerate(tried))
    for on, rows in groups.items():
        demand = _demand(
            on,
            tokens[rows],
            run.weights[rows],
            eager[rows],
        )
        demands.append(demand)
    found = _lists(offers, demands, without, one_list=one_list)
    if one_list:
        demands = [
            replace(demand, lanes=demand.lanes and (0,), row=row)
            for row, demand in enumerate(demands)
        ]
    is_faster = best < eager
    problem = Problem(
        plan,
        lanes=tuple(found),
        demands=tuple(demands),
        weight=traffic.total,
        eager_total=float(run.weights @ eager),
        best_total=float(run.weights @ best),
        changeable=float(run.weights @ (best * is_faster)),
        largest=max((offer.largest for offer in offers), default=0),
    )
    if costs is None:
        return problem
    return replace(
        problem,
        workspace=float(costs.workspace_bytes),
        once=costs.once_seconds,
    )


def _lists(
    offers: Sequence[_Offer],
    demands: Sequence[Demand],
    without: Collection[Key],
    *,
    one_list: bool,
) -> list[Candidates]:
    lists = [{index: offer} for index, offer in enumerate(offers)]
    if one_list and offers:
        lists = [dict(enumerate(offers))]
    found: list[Candidates] = []
    above = 0.0
    # where a lane may end depends on those after it
    for own in reversed(lists):
        wanted = [demand for demand in demands if own.keys() & demand.lanes]
        rows = [tuple(own)]
        if one_list:
            rows = [demand.lanes for demand in demands]
        sizes = _wanted_sizes(
            [*own.values()],
            wanted,
            above,
            without,
        )
        candidates = _candidates(own, rows, sizes)
        slowest = candidates.times[:, -1].max()
        above = max(above, float(slowest))
        found.insert(0, candidates)
    return found


def _demand(
    lanes: tuple[int, ...],
    tokens: Ints,
    weights: Floats,
    eager: Floats,
) -> Demand:
    sizes, at = np.unique(tokens, return_inverse=True)
    slowest = np.zeros(sizes.size + 1)
    np.maximum.at(
        slowest,
        at + 1,
        eager,
    )
    return Demand(
        lanes,
        sizes,
        np.maximum.accumulate(slowest),
        weights=np.bincount(at, weights).astype(np.float64),
        eager=np.bincount(at, weights * eager).astype(np.float64),
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

    def pools(self, sizes: Ints) -> Floats:
        """Bytes of the pool and of static buffers."""
        figures = np.zeros((2, sizes.size))
        costs = self.costs
        if costs is None:
            return figures
        for index, size in enumerate(sizes.tolist()):
            pool = costs.pool_bytes(self.lane.mode, size)
            figures[:, index] = pool, costs.static_bytes(size)
        return figures

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


def _wanted_sizes(
    offers: Sequence[_Offer],
    wanted: Sequence[Demand],
    above: float,
    without: Iterable[Key],
) -> Ints:
    """See Note [Candidates]. Where other lanes follow (their slowest graph takes ``above``), a
    batch may fall to one of those. Sizes that one lane of a list has to do without are of none.
    """
    first = offers[0]
    lanes = [offer.lane for offer in offers]
    whole = 0
    if len(offers) > 1:
        _, whole = list_stride(lanes, first.plan)
    # beyond the largest size of a lane, a size is fewer graphs
    beyond = np.array([0, *(offer.largest + 1 for offer in offers)])
    every = np.concatenate([beyond, *(demand.tokens for demand in wanted)])
    requests = _rounded(every, first.plan.query_len)
    sizes = np.where(
        requests <= whole,
        requests,
        _rounded(every, first.stride),
    )
    lost = [key[1].num_tokens for key in without if Lane.of(*key) in lanes]
    sizes = np.setdiff1d(sizes, lost)
    missed = np.full(sizes.size, above)
    for demand in wanted:
        held = demand.below(sizes)
        missed = np.maximum(missed, demand.slowest[held])
    last = 0
    for offer in offers:
        own = sizes[sizes <= offer.largest]
        faster = np.flatnonzero(offer.time(own) < missed[: own.size])
        last = max(last, faster.max(initial=0))
    sizes = sizes[: last + 1]
    for offer in offers:
        sizes = offer.with_cheaper(sizes)
    is_whole = sizes % first.plan.query_len == 0
    return np.asarray(sizes[is_whole | (sizes > whole)])


def _candidates(
    offers: dict[int, _Offer],
    rows: Sequence[Sequence[int]],
    sizes: Ints,
) -> Candidates:
    """Of these lanes together; ``rows``: which of them serve the batches of each row of times."""
    times = np.zeros((len(rows), sizes.size))
    key_costs = np.zeros((3, sizes.size))
    pools = np.zeros((2, sizes.size))
    for index, offer in reversed(offers.items()):  # the first lane's times stay
        own = sizes[sizes <= offer.largest]
        here = slice(1, own.size)
        own = own[here]
        multiples = own // offer.stride
        key_costs[0, here] += 1
        key_costs[1:, here] += offer.costs_by_size[:, multiples]
        pools[:, here] = np.maximum(
            pools[:, here],
            offer.pools(own),
        )
        took = offer.time(own)
        for row, lanes in enumerate(rows):
            if index in lanes:
                times[row, here] = took
    return Candidates(
        lanes=tuple(offer.lane for offer in offers.values()),
        sizes=sizes,
        times=np.maximum.accumulate(times, axis=1),
        key_costs=key_costs,
        pools=pools,
    )
