"""Graphs on demand: a key captured when a batch first asks for it, and others planned for what
batches asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch

from cgplan.backends.context import is_capture_allowed
from cgplan.captures.captured_keys import CapturedKeys
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.config import Config
from cgplan.errors import CaptureMemoryError, CgplanError
from cgplan.graphs.ambient import random_state_kept
from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.propose import propose
from cgplan.planning import Plan
from cgplan.planning.costs import GraphCosts, representative_keys
from cgplan.planning.difference import compare
from cgplan.planning.plan import capture_config, config_hash
from cgplan.pricing.measured import MeasuredCosts
from cgplan.reports.records import ReplanReport, Way, uncapturable
from cgplan.runner.prepared import Values
from cgplan.runner.routing import RoutedBatch
from cgplan.runner.stats import Mark, RunnerStats
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes

REPEATS = 5
WORTH_MOVING = 0.25  # of the pools' bytes: what a new generation has to give back

Points = dict[tuple[CUDAGraphMode, int], dict[int, float]]
Reopen = Callable[[Plan], CapturedKeys]


def time_on_padding(
    graphed: ModelGraphs, keys: Sequence[Key]
) -> dict[Key, tuple[list[float], list[float]]]:
    """Microseconds of eager steps and of graphs by key, from an idle device, in rounds: both run in
    turns.

    The keys, which are captured, are run on padding; no call is under way. That is what their
    kernels take, except attention over long sequences: padding has none.
    """
    found = dict[Key, tuple[list[float], list[float]]]()
    backend = graphed.backend
    if not keys:
        return found
    random = random_state_kept(backend.device, graphed.generators)
    with graphed.keeping_state() as kept, torch.no_grad(), graphed.buffers.on_padding(), random:
        for mode, descriptor in keys:
            graphed.look(mode, descriptor)
            views = graphed.views(descriptor)
            ways: tuple[Callable[[], Any], ...] = (
                partial(graphed.run_eager, descriptor, views),
                partial(graphed.run_graphed, mode, descriptor, views),
            )
            times = found[mode, descriptor] = ([], [])
            for call, rounds in (1 + REPEATS) * list(zip(ways, times, strict=True)):  # in turns
                kept.restore(between_keys=True)
                graphed.announce(mode, descriptor)
                rounds += backend.time_calls(call, 1)[0]
            for rounds in times:
                del rounds[0]  # it warmed up
    return found


class OnDemand:
    """When a runner may capture while it serves, and other graphs for what it served."""

    def __init__(self, live: CapturedKeys, stats: RunnerStats) -> None:
        self.live = live
        self._stats = stats
        self._forbidden = 0
        self._mark: Mark | None = None
        self._points: Points = {}

    @property
    def config(self) -> Config:
        return self.live.graphed.config

    @contextmanager
    def forbidden(self) -> Iterator[None]:
        self._forbidden += 1
        try:
            yield
        finally:
            self._forbidden -= 1

    def is_open(self, route: RoutedBatch) -> bool:
        """Whether the batch may get another graph later, so that its way must not be remembered."""
        return route.wanted is not None and route.wanted not in self.live.failed

    def may_capture(self, route: RoutedBatch) -> bool:
        return not self._forbidden and is_capture_allowed() and self.is_open(route)

    def safe(self, values: Values) -> Values:
        """Tensors of a batch that a capture leaves alone: outputs of an earlier call lie where it
        captures.
        """
        device, buffers = self.live.graphed.backend.device, self.live.graphed.buffers
        return [
            value.clone() if value.device == device and not buffers.owns(value) else value
            for value in values
        ]

    def replan(
        self,
        traffic: Traffic | None,
        times: StepTimes | None,
        costs: GraphCosts | None,
        reopen: Reopen,
        *,
        apply: bool,
    ) -> ReplanReport:
        """See GraphRunner.replan; the runner's lock is held. ``reopen`` gives all memory back, and
        makes static buffers for a plan.
        """
        policy = self.config.compilation.capture_policy
        if policy != "adaptive":
            raise CgplanError(
                f"the runner cannot be replanned: compilation.capture_policy is {policy}",
                remedy="Set compilation.capture_policy: adaptive.",
            )
        if self._forbidden:
            raise CgplanError(
                "replan inside runner.no_capture()", remedy="Call it after the block."
            )
        start, stats, live = time.perf_counter(), self._stats, self.live
        old, before, known = live.graphed.plan, live.graphed.pools.nbytes, set(live.failed)
        live.check()
        lost = uncapturable(live.failed.values())
        if traffic is None:
            traffic = stats.traffic(self._mark)
        if times is None:
            times = self._step_times()
        if costs is None and live.history:
            costs = self._costs()
        wanted = self._proposal(traffic, times, costs)
        way: Way = "proposed"
        new: tuple[Key, ...] = ()
        evicted: tuple[Key, ...] = ()
        if apply:
            self._mark = stats.mark()
            way, new = self._exchange(wanted, reopen)
            live = self.live
            evicted = tuple(key for key in old.keys if key not in set(live.keys))
            stats.captures += len(new)
            stats.evictions += len(evicted)
            stats.failures += len(set(live.failed) - known)
        told = {*wanted.keys, *lost}
        return ReplanReport(
            difference=compare(old, wanted),
            way=way,
            captured=tuple(key for key in new if key not in set(old.keys)),
            evicted=evicted,
            recaptured=sum(key in set(old.keys) for key in new),
            failed=tuple(why for key, why in live.failed.items() if key in told),
            pool_bytes=(before, live.graphed.pools.nbytes),
            seconds=time.perf_counter() - start,
        )

    def _proposal(self, traffic: Traffic, times: StepTimes, costs: GraphCosts | None) -> Plan:
        """The plan that the traffic deserves, with batches bounded to the largest size that may be
        captured.
        """
        config, limited = self.config, self.config
        most, tokens = (
            config.compilation.max_cudagraph_capture_size,
            config.scheduler.max_num_batched_tokens,
        )
        if most is not None and most < tokens:
            bounds = config.scheduler.model_copy(update={"max_num_batched_tokens": most})
            limited = config.model_copy(update={"scheduler": bounds})
        plan = propose(limited, traffic, times, costs, uncapturable(self.live.failed.values())).plan
        made = {"config_hash": config_hash(config), "config": capture_config(config)}
        return plan.model_copy(update={"max_num_batched_tokens": tokens, **made})

    def _step_times(self) -> StepTimes:
        graphed = self.live.graphed
        keys = representative_keys(graphed.plan.keys, graphed.plan.max_num_seqs)
        for (mode, descriptor), both in time_on_padding(graphed, keys).items():
            for way, rounds in zip((CUDAGraphMode.NONE, mode), both, strict=True):
                by_size = self._points.setdefault((way, descriptor.num_active_loras), {})
                by_size[descriptor.num_tokens] = median(rounds)
        if not self._points:
            return StepTimes.default()
        notes, times = ["attention over real sequences takes longer"], dict(self._points)
        full, piecewise = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
        for mode, other in ((full, piecewise), (piecewise, full)):
            if not any(name[0] is mode for name in times):  # no graph of it is captured
                times |= {
                    (mode, case): found
                    for (other_mode, case), found in self._points.items()
                    if other_mode is other
                }
                notes.append(f"{mode} steps were not timed: {other} steps stand in")
        return StepTimes.measured(times, "the runner, on padding", notes)

    def _costs(self) -> GraphCosts:
        report = self.live.report.model_copy(update={"records": tuple(self.live.history)})
        return MeasuredCosts.from_report(report, self.config)

    def _exchange(self, wanted: Plan, reopen: Reopen) -> tuple[Way, tuple[Key, ...]]:
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
            return "new generation", live.capture(keys, renew=True, from_zero=True)
        if evicted or added:
            return "exchanged", live.capture(added, evicted=evicted, from_zero=True)
        return "exchanged", ()

    def _is_worth_moving(
        self, keys: tuple[Key, ...], evicted: tuple[Key, ...], added: tuple[Key, ...]
    ) -> bool:
        """Whether a new generation takes less memory than an exchange inside the pools, see Note
        [Generations].
        """
        pools, history = self.live.graphed.pools, self.live.history
        if pools.policy == "per_graph" or not pools.is_private or not (evicted or added):
            return False
        if evicted and set(evicted) == set(self.live.keys):  # the pools are free then
            return True
        if not history:
            return False
        largest: dict[CUDAGraphMode, int] = {}
        for record in history:
            largest[record.mode] = max(largest.get(record.mode, 0), record.descriptor.num_tokens)
        if any(descriptor.num_tokens > largest.get(mode, 0) for mode, descriptor in added):
            return True
        needed = sum(cost.pool_bytes for cost in self._costs().of(keys).keys)
        return pools.nbytes - needed > WORTH_MOVING * pools.nbytes
