"""Other graphs for recent batches, and runs on padding that time steps."""

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch

from cgplan.backends.context import random_state_kept
from cgplan.captures.captured_keys import CapturedKeys
from cgplan.captures.model_graphs import ModelGraphs, Rehearsal
from cgplan.errors import CaptureMemoryError, CgplanError, TrafficError
from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.propose import PlanInputs, plan_graphs
from cgplan.planning import Plan
from cgplan.planning.difference import compare
from cgplan.pricing import GraphCosts, representative_keys
from cgplan.reports.records import ReplanReport, ReplanWay, uncapturable
from cgplan.runner.stats import Mark, RunnerStats
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes

REPEATS = 5
WORTH_MOVING = 0.25  # share of the pools' bytes that it has to give back

Rounds = tuple[list[float], list[float]]
Points = dict[tuple[CUDAGraphMode, int], dict[int, float]]
Reopen = Callable[[Plan], CapturedKeys]


@contextmanager
def on_padding(graphs: ModelGraphs) -> Iterator[Rehearsal]:
    """A block between calls; model, random states and buffers are put back."""
    with (
        graphs.rehearsing() as rehearsal,
        torch.no_grad(),
        graphs.buffers.on_padding(),
        random_state_kept(graphs.backend.device, graphs.generators),
    ):
        yield rehearsal


def time_on_padding(
    graphs: ModelGraphs,
    keys: Sequence[Key],
) -> dict[Key, Rounds]:
    """Microseconds from an idle device."""
    found = dict[Key, Rounds]()
    if not keys:
        return found
    with on_padding(graphs) as rehearsal:
        for key in keys:
            rehearsal.look(key)
            views = graphs.views(key[1])
            eager = partial(graphs.run_eager, key[1], views)
            replay = partial(graphs.run_wrapped, key, views)
            found[key] = [], []
            for index in range(1 + REPEATS):
                for run, rounds in zip((eager, replay), found[key], strict=True):
                    with rehearsal.from_same_state(key, replays=run is replay):
                        [microseconds] = graphs.backend.time_calls(run, 1)[0]
                    if index:  # the first round warms up
                        rounds.append(microseconds)
    return found


class Replanner:
    def __init__(self, stats: RunnerStats) -> None:
        self._stats = stats
        self._mark: Mark | None = None
        self._points: Points = {}

    def replan(
        self,
        captured: CapturedKeys,
        traffic: Traffic | None,
        times: StepTimes | None,
        costs: GraphCosts | None,
        reopen: Reopen | None = None,
    ) -> ReplanReport:
        """See GraphRunner.replan. ``reopen`` frees all memory; without it nothing is exchanged."""
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
        elif not isinstance(traffic, Traffic):
            raise TrafficError(
                f"traffic is a {type(traffic).__name__}",
                remedy="Give Traffic, such as runner.stats.traffic().",
            )
        if times is None:
            times = self._step_times(graphs)
        if costs is None and captured.history:
            costs = _costs(captured)
        inputs = PlanInputs(
            graphs.config,
            [(traffic, 1.0)],
            times,
            costs,
            lost,
            any_size=True,  # once captured, it is timed
        )
        wanted = plan_graphs(inputs).explained()
        way: ReplanWay = "proposed"
        new: tuple[Key, ...] = ()
        evicted: tuple[Key, ...] = ()
        if reopen:
            self._mark = stats.mark()
            captured, way, new = _exchange(captured, wanted, reopen)
            evicted = _without(plan.keys, captured.keys)
            stats.captures += len(new)
            stats.evictions += len(evicted)
            stats.failures += len(set(captured.failed) - failed)
        told = {*wanted.keys, *lost}
        still_failed = [why for key, why in captured.failed.items() if key in told]
        old = set(plan.keys)
        evidence = wanted.evidence or {}
        return ReplanReport(
            difference=compare(plan, wanted),
            verdict=evidence.get("verdict", ""),
            way=way,
            captured=_without(new, old),
            evicted=evicted,
            recaptured=len(old.intersection(new)),
            failed=tuple(still_failed),
            pool_bytes=(pool_bytes, captured.graphs.pools.nbytes),
            seconds=time.perf_counter() - start,
        )

    def _step_times(self, graphs: ModelGraphs) -> StepTimes:
        keys = representative_keys(graphs.plan.keys, graphs.plan.max_num_seqs)
        for (mode, descriptor), (eager, replays) in time_on_padding(graphs, keys).items():
            loras = descriptor.num_active_loras
            for way, rounds in ((CUDAGraphMode.NONE, eager), (mode, replays)):
                by_size = self._points.setdefault((way, loras), {})
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


def _without(
    keys: Iterable[Key],
    others: Container[Key],
) -> tuple[Key, ...]:
    return tuple(key for key in keys if key not in others)


def _costs(
    captured: CapturedKeys,
) -> GraphCosts:
    report = captured.report.changed(records=tuple(captured.history))
    return GraphCosts.from_report(report, captured.graphs.config)


def _exchange(
    captured: CapturedKeys,
    wanted: Plan,
    reopen: Reopen,
) -> tuple[CapturedKeys, ReplanWay, tuple[Key, ...]]:
    keys = _without(wanted.keys, captured.failed)
    if wanted.max_capture_size > captured.graphs.most_tokens:
        failed = dict(captured.failed)
        before = captured.graphs.plan
        try:
            captured = reopen(wanted)
        except CaptureMemoryError:
            captured = reopen(before)
            captured.capture(before.keys)
            raise
        finally:
            captured.failed.update(failed)
        return captured, "new buffers", captured.capture(keys)
    evicted = _without(captured.keys, keys)
    added = _without(keys, captured.keys)
    captured.asked = wanted
    captured.wanted = wanted
    if not evicted and not added:
        return captured, "exchanged", ()
    captured.guard.spent_seconds = 0.0
    is_moved = _is_worth_moving(
        captured,
        keys,
        evicted,
        added,
    )
    new = captured.capture(
        keys,
        evicted=evicted,
        renew=is_moved,
    )
    way: ReplanWay = "new generation" if is_moved else "exchanged"
    return captured, way, new


def _is_worth_moving(
    captured: CapturedKeys,
    keys: Sequence[Key],
    evicted: Sequence[Key],
    added: Sequence[Key],
) -> bool:
    """Whether a new generation takes less memory."""
    pools = captured.graphs.pools
    history = captured.history
    if pools.policy == "per_graph" or not pools.is_private:
        return False
    if evicted and len(evicted) == len(captured.keys):  # the pools are free then
        return True
    if not history:
        return False
    largest = Counter[CUDAGraphMode]()
    for record in history:
        largest[record.mode] = max(largest[record.mode], record.descriptor.num_tokens)
    for mode, descriptor in added:
        if descriptor.num_tokens > largest[mode]:
            return True
    needed = _costs(captured).of(keys).pool_bytes
    return pools.nbytes - needed > WORTH_MOVING * pools.nbytes
