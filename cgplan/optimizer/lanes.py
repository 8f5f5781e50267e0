"""Lanes: which graphs may run a batch, in which order, and how long traffic takes in a set of
graphs.

And the problem of a search: the sizes that it chooses among, and the batches that want them, as
arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.optimizer.paths import Floats, Ints
from cgplan.planning.costs import GraphCosts
from cgplan.planning.plan import Lane, Plan
from cgplan.traffic.histogram import StepShape, Traffic
from cgplan.traffic.step_times import StepTimes
from cgplan.units import grouped

EAGER = Lane(CUDAGraphMode.NONE, False, 0)


def lanes_of(mode: CUDAGraphMode, lora_cases: Sequence[int]) -> tuple[Lane, ...]:
    """The lanes of a resolved mode, in the order in which a batch tries them: FULL before
    PIECEWISE, and within a mode the cases of fewer adapters first.
    """
    pairs = (
        [(CUDAGraphMode.FULL, True), (mode.mixed_mode(), False)]
        if mode.separate_routine()
        else [(mode, False)]
    )
    runtime_modes = [
        (runtime, uniform) for runtime, uniform in pairs if runtime is not CUDAGraphMode.NONE
    ]
    return tuple(
        Lane(runtime, uniform, case)
        for runtime, uniform in runtime_modes
        for case in sorted(lora_cases)
    )


def may_serve(lane: Lane, batch: StepShape, traffic: Traffic) -> bool:
    is_kind = (
        (lane.mode is CUDAGraphMode.FULL) == batch.uniform
        if traffic.apart
        else batch.uniform or not lane.uniform
    )
    return is_kind and lane.num_active_loras >= batch.num_active_loras


def stride_of(lane: Lane, plan: Plan) -> int:
    return plan.query_len if lane.uniform else 1


def largest_of(lane: Lane, plan: Plan) -> int:
    limit, stride = plan.max_num_batched_tokens, stride_of(lane, plan)
    if lane.uniform:
        limit = min(limit, stride * plan.max_num_seqs)
    return limit // stride * stride


def key_of(lane: Lane, num_tokens: int, plan: Plan) -> Key:
    piecewise, case = lane.mode is CUDAGraphMode.PIECEWISE, lane.num_active_loras
    reqs = None if piecewise else min(num_tokens // stride_of(lane, plan), plan.max_num_seqs)
    return lane.mode, BatchDescriptor(num_tokens, reqs, lane.uniform, case > 0, case)


@dataclass(frozen=True)
class Use:
    """The batches that one graph runs, or that run eagerly (lane EAGER, size None): sums over them,
    by their weights.

    ``unpadded``: microseconds if each ran at its own size.
    """

    lane: Lane
    size: int | None
    weight: float
    tokens: float
    microseconds: float
    unpadded: float

    @property
    def padding(self) -> float:
        """Share of the tokens that run which are padding, from 0 to 1."""
        return 0.0 if self.size is None else 1 - self.tokens / (self.weight * self.size)


class Run:
    """Traffic run through graphs, by the rule of the dispatcher.

    A batch runs in the first lane with a graph that holds it, at the smallest such size; eagerly if
    there is none. FULL graphs of uniform decode come first, then FULL graphs of mixed batches, then
    PIECEWISE ones; of each kind those for the fewest adapters. Raises StepTimeError where times of
    a mode that runs a batch are missing.

    Attributes:
        traffic, times: The batches, and how long steps take.
        eager: (shape, weight) of the batches that run eagerly.
        place: Of the lane that runs each shape of the histogram, see ``place_of``.
    """

    def __init__(self, keys: Iterable[Key], traffic: Traffic, times: StepTimes) -> None:
        self._tokens, _, self._uniform, self._loras, self._weight = traffic.columns
        self.traffic, self.times, self._size = traffic, times, self._tokens.copy()
        self.place = np.full(self._tokens.size, np.inf)
        sizes = grouped((Lane.of(mode, key), key.num_tokens) for mode, key in keys)
        self._lanes = sorted(sizes, key=place_of)
        self._time, self._unpadded = np.zeros(self._tokens.size), np.zeros(self._tokens.size)
        for lane in self._lanes:
            held = np.unique(sizes[lane])
            runs = np.isinf(self.place) & self._may_run(lane, held[-1])
            self.place[runs] = place_of(lane)
            self._size[runs] = held[np.searchsorted(held, self._tokens[runs])]
            self._time_of(lane, runs)
        missed = np.isinf(self.place)
        for case in np.unique(self._loras[missed]):
            self._time_of(
                EAGER._replace(num_active_loras=int(case)), missed & (self._loras == case)
            )
        self.eager = [traffic.histogram[index] for index in np.flatnonzero(missed)]
        self._total = float(self._weight @ self._time)

    def _may_run(self, lane: Lane, size: float) -> np.ndarray:
        kind: Any = self._uniform > 0 if lane.uniform else True
        if self.traffic.apart:
            kind = (self._uniform > 0) == (lane.mode is CUDAGraphMode.FULL)
        return np.asarray((self._tokens <= size) & (self._loras <= lane.num_active_loras) & kind)

    def _time_of(self, lane: Lane, runs: np.ndarray) -> None:
        if runs.any():
            mode, case = lane.mode, lane.num_active_loras
            self._time[runs] = self.times.at(mode, self._size[runs], case)
            self._unpadded[runs] = self.times.at(mode, self._tokens[runs], case)

    @property
    def expected_us(self) -> float:
        return self._total / float(self._weight.sum())

    @property
    def by_kind(self) -> dict[str, Any]:
        """Mean microseconds of the steps of uniform decode, and of the others; None where there is
        none.
        """
        kinds = {"decode_us": self._uniform > 0, "mixed_us": self._uniform == 0}
        return {
            name: float(np.average(self._time[here], weights=self._weight[here]))
            if here.any()
            else None
            for name, here in kinds.items()
        }

    @property
    def padding(self) -> float:
        """Share of all tokens that run, eager steps included, which are padding."""
        return 1 - float(self._weight @ self._tokens) / float(self._weight @ self._size)

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """An entry for each graph that runs a batch, in the order of lanes and sizes, and last one
        for eager steps.
        """
        found, per_step = [], (self._tokens, self._time, self._unpadded)
        for lane in (*self._lanes, EAGER):
            runs = self.place == (np.inf if lane is EAGER else place_of(lane))
            for size in (
                [None] if lane is EAGER else np.unique(self._size[runs]).astype(int).tolist()
            ):
                here = runs if size is None else runs & (self._size == size)
                if here.any():
                    weight = self._weight[here]
                    sums = (float(weight @ figures[here]) for figures in per_step)
                    found.append(Use(lane, size, float(weight.sum()), *sums))
        return tuple(found)

    def largest_batch(self, lane: Lane) -> int:
        """Tokens of the largest batch that comes to the lane: it may run there, and no earlier lane
        runs it.
        """
        comes = (self.place >= place_of(lane)) & self._may_run(lane, np.inf)
        return int(self._tokens[comes].max(initial=0))

    def gain_of(self, lane: Lane, size: int) -> tuple[float, float]:
        """Weight of the batches that one graph more would run, and how many microseconds shorter it
        makes the step.
        """
        place = place_of(lane)
        worse = (self.place > place) | ((self.place == place) & (self._size > size))
        moved = self._may_run(lane, size) & worse
        time = self.times.of(lane.mode, size, lane.num_active_loras)
        gain = float(self._weight[moved] @ (self._time[moved] - time))
        return float(self._weight[moved].sum()), gain / float(self._weight.sum())


def place_of(lane: Lane) -> float:
    """A number that is smaller for the lane that a batch tries first."""
    return float(
        lane.num_active_loras
        + (1e9 * (not lane.uniform))
        + 2e9 * (lane.mode is not CUDAGraphMode.FULL)
    )


@dataclass(frozen=True, eq=False)
class Candidates:
    """Sizes that a lane may have, ascending; index 0 stands for none. Arrays are [N + 1].

    Attributes:
        sizes: In tokens.
        times: Microseconds of a step at that size.
        driver: Bytes that the driver takes for each key; 0 without costs, as all below.
        seconds: Warm-ups and capture of each key.
        pool, static: Bytes of the pool and of the static buffers, where that size is the largest.
    """

    lane: Lane
    sizes: Ints
    times: Floats
    driver: Floats
    seconds: Floats
    pool: Floats
    static: Floats


@dataclass(frozen=True, eq=False)
class Demand:
    """Batches that try the same lanes. Arrays of sums are cumulative over ``tokens``: [n + 1], 0
    first.

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
        return np.searchsorted(self.tokens, sizes, side="right")


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything that a search needs to know.

    Attributes:
        lanes: In the order in which they are tried; the last one serves every demand, but where
            kinds are ``apart``.
        demands: Batches that a graph may serve.
        eager_us: Weight times microseconds of the batches that none may serve.
        weight: Of all batches.
        workspace, once: Bytes and seconds that the first graph brings with it.
        one_list: Whether each size is captured in all lanes that may hold it. Candidates of shorter
            lanes are then the first of those of longer ones.
        relaxed: The same with costs that no set of any sizes is below, where some of larger sizes
            are lower; bounds are true of it.
    """

    lanes: tuple[Candidates, ...]
    demands: tuple[Demand, ...]
    eager_us: float
    weight: float
    workspace: float = 0.0
    once: float = 0.0
    one_list: bool = False
    relaxed: Problem | None = None

    @property
    def infinite_us(self) -> float:
        """Mean microseconds of a step if every batch had a graph of its own size, and ran in its
        best mode.
        """
        return (
            self.eager_us + sum(float(demand.best[-1]) for demand in self.demands)
        ) / self.weight

    @property
    def eager_total(self) -> float:
        return self.eager_us + sum(float(demand.eager[-1]) for demand in self.demands)

    @property
    def changeable(self) -> float:
        """Microseconds, times weight, of the batches that graphs make faster, at their best: what
        shares refer to.
        """
        parts = [(np.diff(demand.best), np.diff(demand.eager)) for demand in self.demands]
        return float(sum(best[best < eager].sum() for best, eager in parts))

    def with_one_more(
        self, chosen: Sequence[Sequence[int]], most: int
    ) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Choices with one size more, of at most so many sizes of each lane."""
        longest = max((lane.sizes.size for lane in self.lanes), default=0)
        for at, lane in [*enumerate(self.lanes)] if not self.one_list else [(None, None)]:
            size = longest if lane is None else lane.sizes.size
            for index in range(1, size, 1 + size // most):
                yield tuple(
                    tuple(sorted({*picked, index}))
                    if at in (None, n) and index < self.lanes[n].sizes.size
                    else (*picked,)
                    for n, picked in enumerate(chosen)
                )

    @cached_property
    def _cheapest(self) -> tuple[Floats, Floats]:
        driver, seconds = (
            np.concatenate([[], *(getattr(lane, cost)[1:] for lane in self.lanes)])
            for cost in ("driver", "seconds")
        )
        return self.workspace + np.cumsum(np.sort(driver)), self.once + np.cumsum(np.sort(seconds))

    def cheapest(self, graphs: int) -> tuple[float, float]:
        """Bytes and seconds that 1 or more graphs cost at least, whichever they are; inf if there
        are not so many.
        """
        bytes_, seconds = self._cheapest
        return (
            (np.inf, np.inf)
            if graphs > bytes_.size
            else (float(bytes_[graphs - 1]), float(seconds[graphs - 1]))
        )

    def total_of(self, chosen: Sequence[Sequence[int]]) -> float:
        """Microseconds, times weight, if these candidates of each lane are captured."""
        total = self.eager_us
        for demand in self.demands:
            passed = 0
            for index in demand.lanes:
                lane, picked = self.lanes[index], list(chosen[index])
                held = np.maximum(demand.below(lane.sizes[picked]), passed)
                runs = np.diff(demand.weight[held], prepend=demand.weight[passed])
                total += float(runs @ lane.times[picked])
                passed = int(held[-1]) if picked else passed
            total += float(demand.eager[-1] - demand.eager[passed])
        return total

    def costs_of(self, chosen: Sequence[Sequence[int]]) -> tuple[int, float, float]:
        """Graphs, bytes and seconds."""
        picked = [
            (lane, list(sizes)) for lane, sizes in zip(self.lanes, chosen, strict=True) if sizes
        ]
        if not picked:
            return 0, 0.0, 0.0
        driver = sum(float(lane.driver[sizes].sum()) for lane, sizes in picked)
        pool = max(float(lane.pool[sizes].max()) for lane, sizes in picked)
        static = max(float(lane.static[sizes].max()) for lane, sizes in picked)
        seconds = self.once + sum(float(lane.seconds[sizes].sum()) for lane, sizes in picked)
        return (
            sum(len(sizes) for _, sizes in picked),
            self.workspace + driver + pool + static,
            seconds,
        )


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
    candidates. ``one_list``: as in a Problem.

    Raises:
        StepTimeError: step times of a lane's mode, or of eager steps, are missing.
    """
    used = [
        lane
        for lane in lanes
        if any(may_serve(lane, batch, traffic) for batch, _ in traffic.histogram)
    ]
    lanes = list(lanes) if one_list and used else used
    groups = grouped(
        (
            tuple(index for index, lane in enumerate(lanes) if may_serve(lane, batch, traffic)),
            (batch.num_tokens, batch.num_active_loras, weight),
        )
        for batch, weight in traffic.histogram
    )
    demands = [_demand(served, rows, lanes, times, plan) for served, rows in sorted(groups.items())]
    found: list[Candidates] = []
    if one_list and lanes:
        found = _aligned(lanes, demands, times, plan, costs, without)
    # where a lane may end depends on those after it
    for index in reversed(range(len(lanes) - len(found))):
        above = max((float(c.times[-1]) for c in found), default=0.0)
        wanted = [demand for demand in demands if index in demand.lanes]
        found.insert(0, _candidates(lanes[index], wanted, times, plan, above, costs, without))
    problem = Problem(
        lanes=tuple(found),
        demands=tuple(demand for demand in demands if demand.lanes),
        eager_us=float(sum(demand.eager[-1] for demand in demands if not demand.lanes)),
        weight=traffic.total,
        workspace=float(costs.workspace_bytes) if costs is not None else 0.0,
        once=costs.once_seconds if costs is not None else 0.0,
        one_list=one_list,
    )
    if costs is None or not costs.bends:
        return problem
    relaxed = [_relaxed(lane, plan, costs) for lane in found]
    return (
        problem
        if relaxed == found
        else replace(problem, relaxed=replace(problem, lanes=tuple(relaxed)))
    )


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
        eager[loras == case] = times.at(CUDAGraphMode.NONE, sizes[loras == case], int(case))
    best = eager.copy()
    for lane in (lanes[index] for index in served):
        rounded = _rounded(sizes, lane, plan)
        fits = rounded <= largest_of(lane, plan)
        if fits.any():
            best[fits] = np.minimum(
                best[fits], times.at(lane.mode, rounded[fits], lane.num_active_loras)
            )
    tokens, at = np.unique(sizes, return_inverse=True)
    slowest = np.zeros(tokens.size)
    np.maximum.at(slowest, at, eager)
    sums = (
        np.cumsum([0.0, *np.bincount(at, values)])
        for values in (weights, weights * eager, weights * best)
    )
    return Demand(served, tokens, slowest, *sums)


def _rounded(sizes: Ints, lane: Lane, plan: Plan) -> Ints:
    stride = stride_of(lane, plan)
    return -(-sizes // stride) * stride


def _candidates(
    lane: Lane,
    wanted: Sequence[Demand],
    times: StepTimes,
    plan: Plan,
    above: float,
    costs: GraphCosts | None,
    without: Collection[Key],
) -> Candidates:
    """Sizes at which a batch sits, up to the last one that can be worth a graph: Note [Candidates]
    of the optimizer.

    Where other lanes follow (their slowest graph takes ``above``), a batch may fall to one of
    those.
    """
    rounded = np.concatenate([[0], *(_rounded(demand.tokens, lane, plan) for demand in wanted)])
    sizes, at = np.unique(rounded, return_inverse=True)
    misses = np.zeros(sizes.size)
    np.maximum.at(
        misses, at[1:], np.concatenate([np.maximum(demand.slowest, above) for demand in wanted])
    )
    fits = [
        size <= largest_of(lane, plan) and key_of(lane, int(size), plan) not in without
        for size in sizes
    ]
    sizes, misses = sizes[fits], np.maximum.accumulate(misses)[fits]
    curve = times.at(lane.mode, sizes, lane.num_active_loras)
    sizes = sizes[: int(np.flatnonzero(curve < misses).max(initial=0)) + 1]
    return _priced(lane, _with_cheaper(lane, sizes, plan, costs), times, plan, costs)


def _with_cheaper(lane: Lane, sizes: Ints, plan: Plan, costs: GraphCosts | None) -> Ints:
    """The sizes, and larger ones that cost less than the one below them: costs bend there."""
    if costs is None or sizes.size < 2:
        return sizes
    most = largest_of(lane, plan)
    bends = {
        int(n) for n in _rounded(np.array([*costs.bends]), lane, plan) if sizes[1] < n <= most
    } - {*sizes.tolist()}

    def paid(size: int) -> tuple[int, float]:
        key = key_of(lane, size, plan)
        return costs.driver_bytes(key), costs.seconds(key)

    below = {n: int(sizes[np.searchsorted(sizes, n) - 1]) for n in bends}
    cheaper = [n for n in bends if any(a < b for a, b in zip(paid(n), paid(below[n]), strict=True))]
    return np.sort(np.append(sizes, cheaper).astype(np.int64))


def _aligned(
    lanes: Sequence[Lane],
    demands: Sequence[Demand],
    times: StepTimes,
    plan: Plan,
    costs: GraphCosts | None,
    without: Collection[Key],
) -> list[Candidates]:
    """Candidates of lanes that share one list: sizes of batches of any lane, that no lane has to do
    without; whole requests where a mode is FULL, as vLLM rounds its list.
    """
    tops = {lane: largest_of(lane, plan) for lane in lanes}
    # where fewer lanes hold a size, it is fewer graphs
    beyond = np.array([0, *(top + 1 for top in tops.values())])
    strict = Lane(CUDAGraphMode.FULL, any(lane.mode is CUDAGraphMode.FULL for lane in lanes), 0)
    sizes = _rounded(np.concatenate([beyond, *(demand.tokens for demand in demands)]), strict, plan)
    sizes = np.setdiff1d(sizes, [key[1].num_tokens for key in without])
    for lane in lanes:
        sizes = np.unique(_rounded(_with_cheaper(lane, sizes, plan, costs), strict, plan))
    sizes = sizes[sizes <= max(tops.values())]
    return [_priced(lane, sizes[sizes <= tops[lane]], times, plan, costs) for lane in lanes]


def _relaxed(lane: Candidates, plan: Plan, costs: GraphCosts) -> Candidates:
    """The lane with the least costs of any size that runs as many batches: between bends, costs lie
    on lines.
    """
    most = largest_of(lane.lane, plan)
    ends = sorted({*(n for n in costs.bends if n <= most), most})
    keys, least = [key_of(lane.lane, n, plan) for n in ends], list[Floats]()
    for own, figure in ((lane.driver, costs.driver_bytes), (lane.seconds, costs.seconds)):
        from_here = np.minimum.accumulate([float(figure(key)) for key in reversed(keys)])[::-1]
        least.append(
            np.append(
                own[:1], np.minimum(own[1:], from_here[np.searchsorted(ends, lane.sizes[1:])])
            )
        )
    same = np.array_equal(least[0], lane.driver) and np.array_equal(least[1], lane.seconds)
    return lane if same else replace(lane, driver=least[0], seconds=least[1])


def _priced(
    lane: Lane, sizes: Ints, times: StepTimes, plan: Plan, costs: GraphCosts | None
) -> Candidates:
    figures = np.zeros((4, sizes.size))
    if costs is not None:
        for index, size in enumerate(sizes[1:].tolist(), 1):
            key = key_of(lane, size, plan)
            pool, static = costs.pool_bytes(lane.mode, size), costs.static_bytes(size)
            figures[:, index] = costs.driver_bytes(key), costs.seconds(key), pool, static
    return Candidates(lane, sizes, times.at(lane.mode, sizes, lane.num_active_loras), *figures)
