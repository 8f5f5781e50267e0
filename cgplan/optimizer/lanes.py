"""Lanes: the sizes that they may have, and how long traffic takes in a set of graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np

from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.evidence import SizeUse
from cgplan.planning.plan import Lane, Plan, capture_order
from cgplan.traffic.histogram import StepShape, Traffic
from cgplan.traffic.simulation import StepTime
from cgplan.traffic.step_times import StepTimes

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
    """Batches run through graphs, by the rule of the dispatcher.

    A batch runs in the first lane with a graph that holds it, at the smallest such size; eagerly if
    there is none. Raises StepTimeError where times of a mode that runs a batch are missing.

    Attributes:
        batches: A StepShape of arrays.
        times: How long steps take.
        apart: As in Traffic.
        microseconds: Of each batch.
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
            case = lane.num_active_loras
            self.microseconds[here] = self.times.at(lane.mode, sizes, case)
            self._parts.append((lane, here))

    def serves(
        self,
        lane: Lane,
        batch: StepShape,
    ) -> Any:
        """Whether the lane is for a batch, or for each of ``Traffic.columns``."""
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
    """Traffic run through graphs.

    Attributes:
        weights: Of the batches.
    """

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
        """Mean microseconds of the steps of uniform decode, and of the others; None where there is
        none.
        """
        uniform = self.batches.uniform
        return {
            "decode_us": self._mean(uniform),
            "mixed_us": self._mean(~uniform),
        }

    def _mean(self, here: Any) -> float | None:
        weight = self.weights[here]
        if not weight.size:
            return None
        time = self.microseconds[here]
        return float(np.average(time, weights=weight))

    @property
    def padding(self) -> float:
        """Share of all tokens that run, eager steps included, which are padding."""
        tokens = float(self.weights @ self._tokens)
        ran = float(self.weights @ self._size)
        return 1 - tokens / ran

    @cached_property
    def uses(self) -> tuple[SizeUse, ...]:
        """An entry for each graph that runs a batch, in the order of lanes and sizes, and last one
        for eager steps.
        """
        found = []
        for lane, runs in self._parts:
            if lane.mode is EAGER.mode:
                continue
            for size in np.unique(self._size[runs]):
                here = runs & (self._size == size)
                own = self.times.at(lane.mode, self._tokens[here], lane.num_active_loras)
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

    def gain_of(
        self,
        lane: Lane,
        size: int,
    ) -> tuple[float, float]:
        """Weight of the batches that one graph more would run, and how many microseconds shorter it
        makes the step.
        """
        is_later = self._place > lane.place
        is_here = self._place == lane.place
        is_larger = is_here & (self._size > size)
        moved = self.may_run(lane, size)
        moved &= is_later | is_larger
        case = lane.num_active_loras
        time = self.times.of(lane.mode, size, case)
        weight = self.weights[moved]
        saved = weight @ (self.microseconds[moved] - time)
        return float(weight.sum()), float(saved / self.weights.sum())
