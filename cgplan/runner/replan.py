"""Graphs on demand: a key captured when a batch first asks for it, and others planned for what batches asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from cgplan.captures.captured_keys import CapturedKeys
from cgplan.captures.failures import explain_eager_failure
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.config import Config
from cgplan.errors import CaptureMemoryError, CgplanError, InputError
from cgplan.graphs.ambient import random_state_kept
from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.propose import propose
from cgplan.planning import Plan
from cgplan.planning.costs import GraphCosts, representative_keys
from cgplan.planning.difference import compare
from cgplan.planning.plan import capture_config, config_hash
from cgplan.pricing.measured import MeasuredCosts
from cgplan.reports.records import GraphRecord, ReplanReport, Way, uncapturable
from cgplan.runner.prepared import Values
from cgplan.runner.routing import Route
from cgplan.runner.stats import Mark, RunnerStats
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes

Points = Mapping[tuple[CUDAGraphMode, int], Mapping[int, float]]
REPEATS = 5


def time_on_padding(graphed: ModelGraphs, repeats: int = REPEATS) -> Points:
    """Median microseconds of graphs and of eager steps, from an idle device, by (runtime mode, LoRA case) and tokens.

    The representative keys among those that are captured are run on padding. That is what their kernels take, except
    attention over long sequences: padding has none.

    Args:
        graphed: The model with its graphs; no call is under way.
        repeats: Timed calls of each key and way.

    Raises ModelError if the model fails.
    """
    found: dict[tuple[CUDAGraphMode, int], dict[int, float]] = {}
    keys: Sequence[Key] = representative_keys(graphed.plan.keys, graphed.plan.max_num_seqs)
    if not keys:
        return found
    kept = random_state_kept(graphed.backend.device, graphed.generators)
    with graphed.keeping_state(), torch.no_grad(), graphed.buffers.on_padding(), kept:
        for mode, descriptor in keys:
            graphed.look(mode, descriptor)
            views = graphed.views(descriptor)
            ways: dict[CUDAGraphMode, Callable[[], Any]] = {
                mode: partial(graphed.run_graphed, mode, descriptor, views),
                CUDAGraphMode.NONE: partial(graphed.run_eager, descriptor, views),
            }
            for way, call in ways.items():
                try:
                    call()
                except Exception as error:
                    failure = explain_eager_failure(error, f"{mode} {descriptor} on padding")
                    raise failure from (error if failure is not error else error.__cause__)
                device, _ = graphed.backend.time_calls(call, repeats)
                found.setdefault((way, descriptor.num_active_loras), {})[descriptor.num_tokens] = median(device)
    return found


WORTH_MOVING = 0.25  # of the pools' bytes: what a new generation has to give back

Reopen = Callable[[Plan], CapturedKeys]


@dataclass(frozen=True, slots=True)
class _Captures:
    """What MeasuredCosts needs to know of a generation's captures."""

    records: tuple[GraphRecord, ...]
    workspace_bytes: int
    origin: str


class OnDemand:
    """Captures keys for a runner while it serves.

    Args:
        stats: Of the runner; captures and failures are counted there.

    Attributes:
        live: The runner's graphs.
    """

    def __init__(self, live: CapturedKeys, stats: RunnerStats) -> None:
        self.live = live
        self._stats = stats
        self._forbidden = 0
        self._mark: Mark | None = None
        self._points: dict[tuple[CUDAGraphMode, int], dict[int, float]] = {}

    @property
    def config(self) -> Config:
        """What was asked for."""
        return self.live.graphed.config

    @property
    def is_lazy(self) -> bool:
        """Whether keys are captured when they are first met."""
        return self.config.compilation.capture_policy == "lazy"

    @contextmanager
    def forbidden(self) -> Iterator[None]:
        """A block in which nothing is captured."""
        self._forbidden += 1
        try:
            yield
        finally:
            self._forbidden -= 1

    def is_open(self, route: Route) -> bool:
        """Whether the batch may get another graph later, so that its way must not be remembered."""
        return route.wanted is not None and route.wanted not in self.live.failed

    def may_capture(self, route: Route) -> bool:
        """Whether the key that a batch asks for can be captured now."""
        return not self._forbidden and self.is_open(route)

    def capture(self, key: Key) -> None:
        """Capture a key, or remember why it cannot be. Raises AddressError if the model's memory has moved."""
        self.live.check(key)
        captured = self.live.capture([key])
        if captured:
            self._stats.captures += 1
        if key in self.live.failed:
            self._stats.failures += 1

    def safe(self, values: Values) -> Values:
        """Tensors of a batch that a capture leaves alone: outputs of an earlier call lie where it captures."""
        graphed = self.live.graphed
        return [
            value.clone() if value.device == graphed.backend.device and not graphed.buffers.owns(value) else value
            for value in values
        ]

    def replan(
        self, traffic: Traffic | None, times: StepTimes | None, costs: GraphCosts | None, reopen: Reopen, *, apply: bool
    ) -> ReplanReport:
        """See GraphRunner.replan; the runner's lock is held. ``reopen`` gives all memory back, and makes static buffers
        for a plan.
        """
        self._check_policy()
        _check_given(traffic, times, costs, apply)
        start, live, old = time.perf_counter(), self.live, self.live.graphed.plan
        before = live.graphed.pools.nbytes
        live.check_all()
        way: Way = "proposed"
        new: tuple[Key, ...] = ()
        known = set(live.failed)
        wanted, lost = self._proposal(traffic, times, costs), uncapturable(live.failed.values())
        if apply:
            self._mark = self._stats.mark()
            way, new = self._exchange(wanted, reopen)
        planned = set(wanted.keys)
        live = self.live
        had, has = set(old.keys), set(live.keys) if apply else set(old.keys)
        evicted = tuple(key for key in old.keys if key not in has)
        failed = tuple(why for key, why in live.failed.items() if key in planned or key in lost)
        if apply:
            self._stats.captures += len(new)
            self._stats.evictions += len(evicted)
            self._stats.failures += len(set(live.failed) - known)
        return ReplanReport(
            difference=compare(old, wanted),
            way=way,
            captured=tuple(key for key in new if key not in had),
            evicted=evicted,
            recaptured=sum(key in had for key in new),
            failed=failed,
            pool_bytes=(before, live.graphed.pools.nbytes),
            seconds=time.perf_counter() - start,
        )

    def _check_policy(self) -> None:
        policy = self.config.compilation.capture_policy
        if policy != "adaptive":
            raise CgplanError(
                f"the runner cannot be replanned: compilation.capture_policy is {policy}",
                remedy="Set compilation.capture_policy: adaptive.",
            )
        if self._forbidden:
            raise CgplanError("replan inside runner.no_capture()", remedy="Call it after the block.")

    def _proposal(self, traffic: Traffic | None, times: StepTimes | None, costs: GraphCosts | None) -> Plan:
        """What the batches since the last replan deserve."""
        live = self.live
        if traffic is None:
            traffic = self._stats.traffic(self._mark)
        if times is None:
            times = self._step_times()
        if costs is None and live.history:
            costs = self._costs()
        limited = _limited(self.config)
        plan = propose(limited, traffic, times, costs, uncapturable(live.failed.values())).plan
        return plan.model_copy(
            update={
                "max_num_batched_tokens": self.config.scheduler.max_num_batched_tokens,
                "config_hash": config_hash(self.config),
                "config": capture_config(self.config),
            }
        )

    def _step_times(self) -> StepTimes:
        """Of the keys that are captured now, and of earlier ones."""
        for name, points in time_on_padding(self.live.graphed).items():
            self._points.setdefault(name, {}).update(points)
        if not self._points:
            return StepTimes.default()
        notes = ["attention over real sequences takes longer"]
        times: dict[tuple[CUDAGraphMode, int], Mapping[int, float]] = {**self._points}
        full, piecewise = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
        for mode, other in ((full, piecewise), (piecewise, full)):
            if not any(name[0] is mode for name in times):  # no graph of it is captured
                times |= {(mode, name[1]): found for name, found in self._points.items() if name[0] is other}
                notes.append(f"{mode} steps were not timed: {other} steps stand in")
        return StepTimes.measured(times, "the runner, on padding", notes)

    def _costs(self) -> GraphCosts:
        report = self.live.report
        records = tuple(self.live.history)
        return MeasuredCosts.from_report(_Captures(records, report.workspace_bytes, report.origin), self.config)

    def _exchange(self, wanted: Plan, reopen: Reopen) -> tuple[Way, tuple[Key, ...]]:
        """Make the wanted plan's keys those that are captured; how, and which were captured for it."""
        live = self.live
        keys = tuple(key for key in wanted.keys if key not in live.failed)
        if wanted.max_capture_size > live.graphed.most_tokens:
            failed, before = dict(live.failed), live.graphed.plan
            try:
                self.live = reopen(wanted)
            except CaptureMemoryError:
                self.live = reopen(before)
                self.live.capture(before.keys, from_zero=True)
                raise
            finally:
                self.live.failed.update(failed)
            return "new buffers", self.live.capture(keys, from_zero=True)
        evicted = tuple(key for key in live.keys if key not in set(keys))
        added = tuple(key for key in keys if key not in set(live.keys))
        live.asked = live.wanted = wanted
        if self._is_worth_moving(keys, evicted, added):
            return "new generation", live.begin_again(keys)
        if evicted or added:
            return "exchanged", live.capture(added, evicted=evicted, from_zero=True)
        return "exchanged", ()

    def _is_worth_moving(self, keys: tuple[Key, ...], evicted: tuple[Key, ...], added: tuple[Key, ...]) -> bool:
        """Whether a new generation takes less memory than an exchange inside the pools, see Note [Generations]."""
        pools, history = self.live.graphed.pools, self.live.history
        if pools.policy == "per_graph" or not pools.is_private or not (evicted or added):
            return False
        if evicted and set(evicted) == set(self.live.keys):  # the pools are free then
            return True
        largest: dict[CUDAGraphMode, int] = {}
        for record in history:
            largest[record.mode] = max(largest.get(record.mode, 0), record.descriptor.num_tokens)
        if any(descriptor.num_tokens > largest.get(mode, 0) for mode, descriptor in added):
            return bool(history)
        needed = sum(cost.pool_bytes for cost in self._costs().of(keys).keys) if history else 0
        return pools.nbytes - needed > WORTH_MOVING * pools.nbytes


def _check_given(traffic: Any, times: Any, costs: Any, apply: Any) -> None:
    for name, value, kind in (
        ("traffic", traffic, Traffic), ("times", times, StepTimes), ("costs", costs, GraphCosts), ("apply", apply, bool)
    ):  # fmt: skip
        if not isinstance(value, kind) and (value is not None or kind is bool):
            raise InputError(
                f"replan was given {name}={value!r:.100} where a {kind.__name__} belongs",
                remedy=f"Pass a {kind.__name__}{'' if kind is bool else ', or leave it out: it is measured then'}.",
            )


def _limited(config: Config) -> Config:
    """The configuration with batches bounded to the largest size that may be captured, where it says one."""
    most = config.compilation.max_cudagraph_capture_size
    if most is None or most >= config.scheduler.max_num_batched_tokens:
        return config
    bounds = config.scheduler.model_copy(update={"max_num_batched_tokens": most})
    return config.model_copy(update={"scheduler": bounds})


__all__ = ["OnDemand"]
