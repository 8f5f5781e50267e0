"""Latency of a runner, size by size: eager, through the runner, and as a bare replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgplan.buffers.static import example_batch
from cgplan.captures.environment import describe_environment
from cgplan.captures.failures import explain_eager_failure
from cgplan.errors import ConfigError
from cgplan.measure.baselines import BenchBatch, bench_baselines, timing
from cgplan.modes import CUDAGraphMode
from cgplan.planning import CudagraphDispatcher
from cgplan.reports.records import BenchRecord, BenchReport, Timing, check_baselines
from cgplan.runner.runner import GraphRunner


def bench(
    runner: GraphRunner,
    *,
    progress: Callable[[int, int, str], None] | None = None,
    against: Sequence[str] = (),
    seed: int | None = None,
) -> BenchReport:
    """Measure the sizes of ``config.report`` (absent: every size that is or may be captured) on
    example batches.

    Uniform decode batches are measured where a batch of that size can be one. Mixed batches are
    measured elsewhere, and beside them where the plan has other graphs for those: so that the
    planner learns of both.

    Args:
        runner: Its stats count these calls, too.
        progress: Called with (done, total, name of the step) before each step.
        against: Other ways to run the model that are measured beside it, see bench_baselines, which
            captures the runner again: ``eager``, ``bare``, ``make_graphed_callables``,
            ``reduce-overhead``.
        seed: Of the random order in which they take turns; drawn if absent.

    Raises:
        ConfigError: an unknown name in ``against``.
        ModelError: the model failed eagerly.
    """
    against = check_baselines(against)
    boxes = {descriptor.box for _, descriptor in runner.wanted.keys}
    if asked := runner.config.report.sizes:
        boxes = {(size, *rest) for size in asked for _, *rest in boxes or {(0,)}}
    if against and len(runner.config.dim_names) > 1:
        raise ConfigError(
            "bench compares with other ways where rows alone vary", remedy="Leave --against out."
        )
    records, first = list[BenchRecord](), list[BenchBatch]()
    for index, (size, *sizes) in enumerate(sorted(boxes)):
        if progress:
            progress(index, len(boxes), f"{size} tokens")
        try:
            batches = examples(runner, size, tuple(sizes))
            first.append(batches[0])
            records += [_measure(runner, batch) for batch in batches]
        except Exception as error:
            failure = explain_eager_failure(error, f"{size} tokens")
            raise failure from (error if failure is not error else error.__cause__)
    report = runner.report  # baselines capture the runner again, and change its report
    return BenchReport(
        environment=describe_environment(runner.backend, runner.plan.config_hash),
        capture=report,
        repeats=runner.config.report.repeats,
        records=tuple(records),
        peers=bench_baselines(runner, first, against, seed=seed, progress=progress)
        if against
        else None,
    )


def examples(runner: GraphRunner, size: int, sizes: tuple[int, ...] = ()) -> list[BenchBatch]:
    """Batches of a size, as uniform decode, as a mixed batch, or as both; with all adapters active.
    ``sizes``: in the other named dimensions.
    """
    plan, config = runner.plan, runner.config
    loras, dispatch = (
        config.lora.max_loras if config.lora else 0,
        CudagraphDispatcher(runner.wanted).dispatch,
    )
    as_mixed = dispatch(size, False, loras, sizes=sizes)
    kinds: tuple[bool, ...] = (False,)
    if size % plan.query_len == 0 and size <= plan.query_len * plan.max_num_seqs:
        has_more = as_mixed[0] is CUDAGraphMode.PIECEWISE and as_mixed != dispatch(
            size, True, loras, sizes=sizes
        )
        kinds = (True, False) if has_more else (True,)
    batches = []
    for uniform in kinds:
        reqs = size // plan.query_len if uniform else min(size, plan.max_num_seqs)
        tensors = example_batch(config.tensors_at(sizes), size, reqs, runner.backend.device)
        options: dict[str, Any] = {"uniform_decode": uniform, "num_active_loras": loras}
        inputs, metadata = (
            {name: tensors[name] for name in names} for names in (config.inputs, config.metadata)
        )
        batches.append(
            BenchBatch(size, inputs, metadata, options, runner.route(tensors, **options).unpadded)
        )
    return batches


def call_examples(runner: GraphRunner, times: int = 3) -> None:
    """Call the runner with example batches of each size that is or may be captured, for its
    trace.
    """
    with runner.trace():
        for size, *sizes in sorted({descriptor.box for _, descriptor in runner.wanted.keys}):
            for batch in examples(runner, size, tuple(sizes)):
                call: dict[str, Any] = {**batch.given_to(runner), **batch.options}
                for _ in range(times):
                    runner(**call)


def _measure(runner: GraphRunner, batch: BenchBatch) -> BenchRecord:
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
        num_tokens=batch.size,
        sizes=route.batch.sizes,
        mode=route.mode,
        descriptor=route.descriptor,
        padded_rows=route.descriptor.num_tokens - batch.size,
        eager=eager,
        graph=graph,
        replay=replay,
        graph_queued=graph_queued,
        replay_queued=replay_queued,
        eager_host=eager_host,
        graph_host=graph_host,
    )


def _time(
    runner: GraphRunner, call: Callable[[], object], *, queued: bool = False
) -> tuple[Timing, Timing]:
    with torch.no_grad():
        for _ in range(runner.config.report.warmups):
            call()
        device, host = runner.backend.time_calls(call, runner.config.report.repeats, queued=queued)
    return timing(device), timing(host)
