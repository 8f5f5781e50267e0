"""Latency of a runner, size by size: eager, through the runner, and as a bare replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgplan.buffers.static import example_batch
from cgplan.captures.environment import describe_environment
from cgplan.captures.failures import explain_eager_failure
from cgplan.measure.baselines import BenchBatch, bench_baselines, timing
from cgplan.modes import CUDAGraphMode
from cgplan.planning import CudagraphDispatcher
from cgplan.reports.records import BenchRecord, BenchReport, Timing, check_peers
from cgplan.runner.runner import GraphRunner


def bench(
    runner: GraphRunner,
    *,
    progress: Callable[[int, int, str], None] | None = None,
    against: Sequence[str] = (),
    seed: int | None = None,
) -> BenchReport:
    """Measure the sizes of ``config.report`` (absent: every size that is or may be captured) on example batches.

    Uniform decode batches are measured where a batch of that size can be one. Mixed batches are measured elsewhere,
    and beside them where the plan has other graphs for those: so that the planner learns of both.

    Args:
        runner: Its stats count these calls, too.
        progress: Called with (done, total, name of the step) before each step.
        against: Other ways to run the model that are measured beside it, see bench_baselines, which captures the runner
            again: ``eager``, ``bare``, ``make_graphed_callables``, ``reduce-overhead``.
        seed: Of the random order in which they take turns; drawn if absent.

    Raises:
        ConfigError: an unknown name in ``against``.
        ModelError: the model failed eagerly.
    """
    against = check_peers(against)
    sizes = sorted(set(runner.config.report.sizes or runner.wanted.capture_sizes))
    records = []
    for index, size in enumerate(sizes):
        if progress:
            progress(index, len(sizes), f"{size} tokens")
        try:
            records += [_measure(runner, size, uniform) for uniform in _kinds(runner, size)]
        except Exception as error:
            failure = explain_eager_failure(error, f"{size} tokens")
            raise failure from (error if failure is not error else error.__cause__)
    peers, report = None, runner.report  # baselines capture the runner again, and change its report
    if against:
        batches = [example(runner, size, _kinds(runner, size)[0]) for size in sizes]
        peers = bench_baselines(runner, batches, against, seed=seed, progress=progress)
    return BenchReport(
        environment=describe_environment(runner.backend, runner.plan.config_hash),
        capture=report,
        repeats=runner.config.report.repeats,
        records=tuple(records),
        peers=peers,
    )


def _kinds(runner: GraphRunner, size: int) -> tuple[bool, ...]:
    """Whether a batch of that size is measured as uniform decode, as a mixed one, or as both."""
    plan, dispatch = runner.plan, CudagraphDispatcher(runner.wanted).dispatch
    can_be_uniform = size % plan.query_len == 0 and size <= plan.query_len * plan.max_num_seqs
    as_uniform, as_mixed = (dispatch(size, uniform, _loras(runner)) for uniform in (True, False))
    if can_be_uniform and as_mixed[0] is CUDAGraphMode.PIECEWISE and as_mixed != as_uniform:
        return True, False
    return (can_be_uniform,)


def _loras(runner: GraphRunner) -> int:
    """Active adapters of the batches that are measured."""
    return runner.config.lora.max_loras if runner.config.lora else 0


def example(runner: GraphRunner, size: int, uniform: bool) -> BenchBatch:
    """A batch of that size."""
    plan, config = runner.plan, runner.config
    reqs = size // plan.query_len if uniform else min(size, plan.max_num_seqs)
    tensors = example_batch({**config.inputs, **config.metadata}, size, reqs, runner.backend.device)
    options: dict[str, Any] = {"uniform_decode": uniform, "num_active_loras": _loras(runner)}
    route = runner.route(tensors, **options)
    inputs, metadata = ({name: tensors[name] for name in names} for names in (config.inputs, config.metadata))
    return BenchBatch(size, inputs, metadata, options, route.unpadded)


def _measure(runner: GraphRunner, size: int, uniform: bool) -> BenchRecord:
    batch = example(runner, size, uniform)
    call: dict[str, Any] = {**batch.given_to(runner), **batch.options}
    if runner.config.compilation.capture_policy == "lazy":
        runner(**call)  # captures its graph
    route = runner.route(batch.tensors, **batch.options)
    eager, eager_host = _time(runner, lambda: runner.run_eagerly(padded=False, **call))
    graph = graph_host = replay = graph_queued = replay_queued = None
    if route.mode is not CUDAGraphMode.NONE:
        graph, graph_host = _time(runner, lambda: runner(**call))
        graph_queued, _ = _time(runner, lambda: runner(**call), queued=True)
    captured = runner.graph(route.mode, route.descriptor)
    if captured is not None:
        replay, _ = _time(runner, lambda: runner.backend.replay(captured))
        replay_queued, _ = _time(runner, lambda: runner.backend.replay(captured), queued=True)
    return BenchRecord(
        num_tokens=size,
        mode=route.mode,
        descriptor=route.descriptor,
        padded_rows=route.descriptor.num_tokens - size,
        eager=eager,
        graph=graph,
        replay=replay,
        graph_queued=graph_queued,
        replay_queued=replay_queued,
        eager_host=eager_host,
        graph_host=graph_host,
    )


def _time(runner: GraphRunner, call: Callable[[], object], *, queued: bool = False) -> tuple[Timing, Timing]:
    with torch.no_grad():
        for _ in range(runner.config.report.warmups):
            call()
        device, host = runner.backend.time_calls(call, runner.config.report.repeats, queued=queued)
    return timing(device), timing(host)
