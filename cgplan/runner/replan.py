"""Replanning: other graphs for the batches that a runner was asked for, and runs on padding that
time steps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch

from cgplan.captures.captured_keys import CapturedKeys
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.captures.rehearsal import Rehearsal
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
from cgplan.runner.stats import Mark, RunnerStats
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes

REPEATS = 5
WORTH_MOVING = 0.25  # of the pools' bytes: what a new generation has to give back

Points = dict[tuple[CUDAGraphMode, int], dict[int, float]]
Reopen = Callable[[Plan], CapturedKeys]


@contextmanager
def on_padding(graphs: ModelGraphs) -> Iterator[Rehearsal]:
    """A block of runs on padding between calls: the model, torch's random numbers and the static
    buffers are afterwards as they were.
    """
    random = random_state_kept(graphs.backend.device, graphs.generators)
    with graphs.rehearsing() as rehearsal, torch.no_grad(), graphs.buffers.on_padding(), random:
        yield rehearsal


def time_on_padding(
    graphs: ModelGraphs, keys: Sequence[Key]
) -> dict[Key, tuple[list[float], list[float]]]:
    """Microseconds of eager steps and of graphs by key, from an idle device, in rounds: both run in
    turns.

    The keys, which are captured, are run on padding; no call is under way. That is what their
    kernels take, except attention over long sequences: padding has none.
    """
    found = dict[Key, tuple[list[float], list[float]]]()
    if not keys:
        return found
    with on_padding(graphs) as rehearsal:
        for mode, descriptor in keys:
            rehearsal.look(mode, descriptor)
            views = graphs.views(descriptor)
            eager = partial(graphs.run_eager, descriptor, views)
            replay = partial(graphs.run_graphed, mode, descriptor, views)
            times: tuple[list[float], list[float]] = ([], [])
            found[mode, descriptor] = times
            for is_timed in (False, *REPEATS * [True]):  # the first round warms up
                for run, rounds in zip((eager, replay), times, strict=True):
                    rehearsal.kept.restore(between_keys=True)
                    rehearsal.announce(mode, descriptor)
                    [microseconds] = graphs.backend.time_calls(run, 1)[0]
                    if is_timed:
                        rounds.append(microseconds)
    return found


class Replanner:
    """Makes other graphs for what a runner served, from one time to the next.

    Args:
        stats: The runner's counts.
    """

    def __init__(self, stats: RunnerStats) -> None:
        self._stats = stats
        self._mark: Mark | None = None  # the counts when graphs were exchanged last
        self._points: Points = {}

    def replan(
        self,
        captured: CapturedKeys,
        traffic: Traffic | None,
        times: StepTimes | None,
        costs: GraphCosts | None,
        reopen: Reopen | None = None,
    ) -> ReplanReport:
        """See GraphRunner.replan; the runner's lock is held. ``reopen`` gives all memory back, and
        makes static buffers for a plan; without it nothing is exchanged.
        """
        graphs = captured.graphs
        policy = graphs.config.compilation.capture_policy
        if policy != "adaptive":
            raise CgplanError(
                f"the runner cannot be replanned: compilation.capture_policy is {policy}",
                remedy="Set compilation.capture_policy: adaptive.",
            )
        start = time.perf_counter()
        stats = self._stats
        plan = graphs.plan
        pool_bytes = graphs.pools.nbytes
        failed = set(captured.failed)
        captured.check_addresses()
        lost = uncapturable(captured.failed.values())
        if traffic is None:
            traffic = stats.traffic(self._mark)
        if times is None:
            times = self._step_times(graphs)
        if costs is None and captured.history:
            costs = _costs(captured)
        wanted = _proposal(captured, traffic, times, costs)
        way: Way = "proposed"
        new: tuple[Key, ...] = ()
        evicted: tuple[Key, ...] = ()
        if reopen is not None:
            self._mark = stats.mark()
            captured, way, new = _exchange(captured, wanted, reopen)
            kept = set(captured.keys)
            evicted = tuple(key for key in plan.keys if key not in kept)
            stats.captures += len(new)
            stats.evictions += len(evicted)
            stats.failures += len(set(captured.failed) - failed)
        told = {*wanted.keys, *lost}
        old = set(plan.keys)
        return ReplanReport(
            difference=compare(plan, wanted),
            way=way,
            captured=tuple(key for key in new if key not in old),
            evicted=evicted,
            recaptured=len(old.intersection(new)),
            failed=tuple(why for key, why in captured.failed.items() if key in told),
            pool_bytes=(pool_bytes, captured.graphs.pools.nbytes),
            seconds=time.perf_counter() - start,
        )

    def _step_times(self, graphs: ModelGraphs) -> StepTimes:
        keys = representative_keys(graphs.plan.keys, graphs.plan.max_num_seqs)
        for (mode, descriptor), (eager, replays) in time_on_padding(graphs, keys).items():
            for way, rounds in ((CUDAGraphMode.NONE, eager), (mode, replays)):
                by_size = self._points.setdefault((way, descriptor.num_active_loras), {})
                by_size[descriptor.num_tokens] = median(rounds)
        if not self._points:
            return StepTimes.default()
        notes = ["attention over real sequences takes longer"]
        times = dict(self._points)
        full = CUDAGraphMode.FULL
        piecewise = CUDAGraphMode.PIECEWISE
        timed = {mode for mode, _ in self._points}
        for mode, other in ((full, piecewise), (piecewise, full)):
            if mode in timed or other not in timed:
                continue
            notes.append(f"{mode} steps were not timed: {other} steps stand in")
            for (timed_mode, loras), by_size in self._points.items():
                if timed_mode is other:
                    times[mode, loras] = by_size
        return StepTimes.measured(times, "the runner, on padding", notes)


def _costs(captured: CapturedKeys) -> GraphCosts:
    """Costs of graphs by the captures of this generation."""
    report = captured.report.model_copy(update={"records": tuple(captured.history)})
    return MeasuredCosts.from_report(report, captured.graphs.config)


def _proposal(
    captured: CapturedKeys, traffic: Traffic, times: StepTimes, costs: GraphCosts | None
) -> Plan:
    """The plan that the traffic deserves, with batches bounded to the largest size that may be
    captured.
    """
    config = limited = captured.graphs.config
    most = config.compilation.max_cudagraph_capture_size
    tokens = config.scheduler.max_num_batched_tokens
    if most is not None and most < tokens:
        bounds = config.scheduler.model_copy(update={"max_num_batched_tokens": most})
        limited = config.model_copy(update={"scheduler": bounds})
    lost = uncapturable(captured.failed.values())
    plan = propose(limited, traffic, times, costs, lost).plan
    return plan.model_copy(
        update={
            "max_num_batched_tokens": tokens,
            "config_hash": config_hash(config),
            "config": capture_config(config),
        }
    )


def _exchange(
    captured: CapturedKeys, wanted: Plan, reopen: Reopen
) -> tuple[CapturedKeys, Way, tuple[Key, ...]]:
    """Exchange graphs for those of a plan: what is captured now, in which way, and the keys that
    were captured for it.
    """
    keys = tuple(key for key in wanted.keys if key not in captured.failed)
    if wanted.max_capture_size > captured.graphs.most_tokens:
        captured = _with_new_buffers(captured, wanted, reopen)
        return captured, "new buffers", captured.capture(keys, from_zero=True)
    old = set(captured.keys)
    new = set(keys)
    evicted = tuple(key for key in captured.keys if key not in new)
    added = tuple(key for key in keys if key not in old)
    captured.asked = captured.wanted = wanted
    if not evicted and not added:
        return captured, "exchanged", ()
    if _is_worth_moving(captured, keys, evicted, added):
        return captured, "new generation", captured.capture(keys, renew=True, from_zero=True)
    return captured, "exchanged", captured.capture(added, evicted=evicted, from_zero=True)


def _with_new_buffers(captured: CapturedKeys, wanted: Plan, reopen: Reopen) -> CapturedKeys:
    failed = dict(captured.failed)
    before = captured.graphs.plan
    try:
        captured = reopen(wanted)
    except CaptureMemoryError:
        captured = reopen(before)
        captured.capture(before.keys, from_zero=True)
        raise
    finally:
        captured.failed.update(failed)
    return captured


def _is_worth_moving(
    captured: CapturedKeys,
    keys: Sequence[Key],
    evicted: Sequence[Key],
    added: Sequence[Key],
) -> bool:
    """Whether a new generation takes less memory than an exchange inside the pools, see Note
    [Generations].
    """
    pools = captured.graphs.pools
    history = captured.history
    if pools.policy == "per_graph" or not pools.is_private:
        return False
    if evicted and set(evicted) == set(captured.keys):  # the pools are free then
        return True
    if not history:
        return False
    largest = Counter[CUDAGraphMode]()
    for record in history:
        largest[record.mode] = max(largest[record.mode], record.descriptor.num_tokens)
    if any(descriptor.num_tokens > largest[mode] for mode, descriptor in added):
        return True
    needed = sum(cost.pool_bytes for cost in _costs(captured).of(keys).keys)
    return pools.nbytes - needed > WORTH_MOVING * pools.nbytes
