"""Lanes: which graphs may run a batch, in which order, and how long traffic takes in a set of
graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
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


def list_stride(lanes: Sequence[Lane], plan: Plan) -> tuple[int, int]:
    """Of one list for these lanes: its stride, and up to where its sizes are whole requests
    besides. See Note [One list] in problem.py.
    """
    if plan.key_rules == "vllm_v2":
        return 1, max((largest_of(lane, plan) for lane in lanes if lane.uniform), default=0)
    is_full = any(lane.mode is CUDAGraphMode.FULL for lane in lanes)
    return plan.query_len if is_full else 1, 0


def key_of(lane: Lane, num_tokens: int, plan: Plan) -> Key:
    piecewise, case = lane.mode is CUDAGraphMode.PIECEWISE, lane.num_active_loras
    reqs = None if piecewise else min(num_tokens // stride_of(lane, plan), plan.max_num_seqs)
    return lane.mode, BatchDescriptor(
        num_tokens,
        reqs,
        lane.uniform,
        case > 0,
        case,
    )


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
    there is none. Raises StepTimeError where times of a mode that runs a batch are missing.

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
        found, per_step = (
            [],
            (
                self._tokens,
                self._time,
                self._unpadded,
            ),
        )
        for lane in (*self._lanes, EAGER):
            runs = self.place == (np.inf if lane is EAGER else place_of(lane))
            for size in (
                [None] if lane is EAGER else np.unique(self._size[runs]).astype(int).tolist()
            ):
                here = runs if size is None else runs & (self._size == size)
                if here.any():
                    weight = self._weight[here]
                    sums = (float(weight @ figures[here]) for figures in per_step)
                    found.append(
                        Use(
                            lane,
                            size,
                            float(weight.sum()),
                            *sums,
                        )
                    )
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
        time = self.times.of(
            lane.mode,
            size,
            lane.num_active_loras,
        )
        gain = float(self._weight[moved] @ (self._time[moved] - time))
        return float(self._weight[moved].sum()), gain / float(self._weight.sum())


def place_of(lane: Lane) -> float:
    """A number that is smaller for the lane that a batch tries first."""
    return float(
        lane.num_active_loras
        + (1e9 * (not lane.uniform))
        + 2e9 * (lane.mode is not CUDAGraphMode.FULL)
    )
