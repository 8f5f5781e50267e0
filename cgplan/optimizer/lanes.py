"""Lanes: which graphs may run a batch, in which order, and how long a plan's graphs take over traffic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.planning.plan import Lane, Plan
from cgplan.traffic.histogram import StepShape, Traffic
from cgplan.traffic.step_times import StepTimes


def lanes_of(mode: CUDAGraphMode, lora_cases: Sequence[int]) -> tuple[Lane, ...]:
    """The lanes of a resolved mode, in the order in which a batch tries them: FULL before PIECEWISE, and within a mode
    the cases of fewer adapters first.
    """
    pairs = [(CUDAGraphMode.FULL, True), (mode.mixed_mode(), False)]
    if not mode.separate_routine():
        pairs = [(mode, False)]
    return tuple(
        Lane(runtime, uniform, case)
        for runtime, uniform in pairs
        if runtime is not CUDAGraphMode.NONE
        for case in sorted(lora_cases)
    )


def may_serve(lane: Lane, batch: StepShape) -> bool:
    """Whether the lane's graphs can run such a batch at all, if one is large enough."""
    return (batch.uniform or not lane.uniform) and lane.num_active_loras >= batch.num_active_loras


def stride_of(lane: Lane, plan: Plan) -> int:
    """Tokens that sizes of a lane are multiples of."""
    return plan.query_len if lane.uniform else 1


def largest_of(lane: Lane, plan: Plan) -> int:
    """The largest capture size of a lane within the plan's bounds of a batch."""
    limit, stride = plan.max_num_batched_tokens, stride_of(lane, plan)
    if lane.uniform:
        limit = min(limit, stride * plan.max_num_seqs)
    return limit // stride * stride


def key_of(lane: Lane, num_tokens: int, plan: Plan) -> Key:
    """The key of a lane's graph for this size, within the plan's bounds of a batch."""
    reqs: int | None = min(num_tokens // stride_of(lane, plan), plan.max_num_seqs)
    if lane.mode is CUDAGraphMode.PIECEWISE:
        reqs = None
    case = lane.num_active_loras
    return lane.mode, BatchDescriptor(num_tokens, reqs, lane.uniform, case > 0, case)


class Routes:
    """The graph that runs each batch, for any set of keys: the rule of the dispatcher.

    FULL graphs of uniform decode (if the batch is uniform), then FULL graphs of mixed batches, then PIECEWISE ones; of
    each kind those for the fewest adapters that are enough first; there the smallest size that holds the batch. The
    first hit runs it. Without one it runs eagerly.
    """

    def __init__(self, keys: Iterable[Key]) -> None:
        sizes: dict[Lane, set[int]] = {}
        for mode, key in keys:
            sizes.setdefault(Lane.of(mode, key), set()).add(key.num_tokens)
        order = sorted(
            sizes, key=lambda lane: (lane.mode is not CUDAGraphMode.FULL, not lane.uniform, lane.num_active_loras)
        )
        self.sizes = {lane: sorted(sizes[lane]) for lane in order}

    def of(self, batch: StepShape) -> tuple[Lane, int] | None:
        """The lane and the capture size that run a batch, None if no graph does."""
        for lane, sizes in self.sizes.items():
            if may_serve(lane, batch) and batch.num_tokens <= sizes[-1]:
                return lane, sizes[bisect_left(sizes, batch.num_tokens)]
        return None


@dataclass(frozen=True, slots=True)
class Served:
    """The batches that one graph runs, or that run eagerly (lane and size None).

    Attributes:
        lane, size: The graph; size in tokens.
        weight: Of the batches that it runs.
        tokens: Tokens of those batches, times their weights.
        microseconds: Time of those steps, times their weights.
        unpadded: The same if each ran at its own size.
    """

    lane: Lane | None
    size: int | None
    weight: float
    tokens: float
    microseconds: float
    unpadded: float

    @property
    def padding(self) -> float:
        """Share of the tokens that run which are padding, from 0 to 1."""
        return 0.0 if self.size is None else 1 - self.tokens / (self.weight * self.size)


def serve(keys: Iterable[Key], traffic: Traffic, times: StepTimes) -> tuple[Served, ...]:
    """Traffic run through these graphs: one entry for each graph that runs a batch, and one for eager steps if there
    are any; in the order of lanes and sizes, eager last.

    Raises:
        StepTimeError: times of a mode that runs a batch are missing.
    """
    routes, clock = Routes(keys), _Clock(times, traffic.max_tokens)
    sums: dict[tuple[Lane, int] | None, list[float]] = {}
    for batch, weight in traffic.histogram:
        route = routes.of(batch)
        entry = sums.setdefault(route, [0.0, 0.0, 0.0, 0.0])
        entry[0] += weight
        entry[1] += weight * batch.num_tokens
        entry[2] += weight * clock.of(batch, route)
        entry[3] += weight * clock.of(batch, route and (route[0], batch.num_tokens))
    order = {lane: index for index, lane in enumerate(routes.sizes)}
    return tuple(
        Served(*(route or (None, None)), *sums[route])
        for route in sorted(sums, key=lambda route: (len(order), 0) if route is None else (order[route[0]], route[1]))
    )


def expected_step(served: Iterable[Served]) -> float:
    """Mean microseconds of a step."""
    weight, total = 0.0, 0.0
    for part in served:
        weight += part.weight
        total += part.microseconds
    return total / weight


def padded_share(served: Iterable[Served]) -> float:
    """Share of all tokens that run, eager steps included, which are padding."""
    run, real = 0.0, 0.0
    for part in served:
        run += part.tokens if part.size is None else part.weight * part.size
        real += part.tokens
    return 1 - real / run


class _Clock:
    """Step times as lists, made when they are first asked for."""

    def __init__(self, times: StepTimes, limit: int) -> None:
        self._times, self._limit = times, limit
        self._curves: dict[tuple[CUDAGraphMode, int], list[float]] = {}

    def of(self, batch: StepShape, route: tuple[Lane, int] | None) -> float:
        lane, size = route or (None, batch.num_tokens)
        key = (CUDAGraphMode.NONE, batch.num_active_loras) if lane is None else (lane.mode, lane.num_active_loras)
        curve = self._curves.get(key)
        if curve is None or size >= len(curve):
            limit = max(size, self._limit)
            curve = self._curves[key] = self._times.curve(key[0], limit, key[1]).tolist()
        return curve[size]
