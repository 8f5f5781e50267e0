"""Latency of a runner, size by size: eager, through the runner, and as a bare replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
    if against and len(runner.config.dim_names) > 1:
        raise ConfigError(
            "bench compares with other ways where rows alone vary",
            remedy="Leave --against out.",
        )
    boxes = _boxes(runner)
    records = list[BenchRecord]()
    first = list[BenchBatch]()
    for index, (size, *sizes) in enumerate(boxes):
        if progress:
            progress(index, len(boxes), f"{size} tokens")
        try:
            batches = examples(runner, size, tuple(sizes))
            first.append(batches[0])
            for batch in batches:
                records.append(_measure(runner, batch))
        except Exception as error:
            failure = explain_eager_failure(error, f"{size} tokens")
            raise failure from (error if failure is not error else error.__cause__)
    report = runner.report  # baselines capture the runner again, and change its report
    peers = None
    if against:
        peers = bench_baselines(
            runner,
            first,
            against,
            seed=seed,
            progress=progress,
        )
    return BenchReport(
        environment=describe_environment(runner.backend, runner.plan.config_hash),
        capture=report,
        repeats=runner.config.report.repeats,
        records=tuple(records),
        peers=peers,
    )


def examples(
    runner: GraphRunner,
    size: int,
    sizes: tuple[int, ...] = (),
) -> list[BenchBatch]:
    """Batches of a size, as uniform decode, as a mixed batch, or as both; with all adapters active.
    ``sizes``: in the other named dimensions.
    """
    plan = runner.plan
    config = runner.config
    loras = 0 if config.lora is None else config.lora.max_loras
    dispatch = CudagraphDispatcher(runner.wanted).dispatch
    as_mixed = dispatch(size, False, loras, sizes=sizes)
    kinds = [False]
    reqs, rest = divmod(size, plan.query_len)
    if not rest and reqs <= plan.max_num_seqs:
        kinds = [True]
        if as_mixed[0] is CUDAGraphMode.PIECEWISE:
            as_decode = dispatch(size, True, loras, sizes=sizes)
            if as_mixed != as_decode:
                kinds.append(False)
    batches = []
    for uniform in kinds:
        reqs = min(size, plan.max_num_seqs)
        if uniform:
            reqs = size // plan.query_len
        specs = config.tensors_at(sizes)
        tensors = example_batch(specs, size, reqs, runner.backend.device)
        options: dict[str, Any] = {
            "uniform_decode": uniform,
            "num_active_loras": loras,
        }
        route = runner.route(tensors, **options)
        batch = BenchBatch(
            size=size,
            inputs={name: tensors[name] for name in config.inputs},
            metadata={name: tensors[name] for name in config.metadata},
            options=options,
            descriptor=route.unpadded,
        )
        batches.append(batch)
    return batches


def call_examples(runner: GraphRunner, times: int = 3) -> None:
    """Call the runner with example batches of each size that is or may be captured, for its
    trace.
    """
    with runner.trace():
        boxes = {descriptor.box for _, descriptor in runner.wanted.keys}
        for size, *sizes in sorted(boxes):
            for batch in examples(runner, size, tuple(sizes)):
                call = _call_of(runner, batch)
                for _ in range(times):
                    runner(**call)


def _boxes(runner: GraphRunner) -> list[tuple[int, ...]]:
    """Sizes to measure: rows, then those of the other named dimensions."""
    boxes = {descriptor.box for _, descriptor in runner.wanted.keys}
    asked = runner.config.report.sizes
    if not asked:
        return sorted(boxes)
    others = {box[1:] for box in boxes} or {()}
    found = []
    for size in sorted(set(asked)):
        for rest in sorted(others):
            found.append((size, *rest))
    return found


def _call_of(runner: GraphRunner, batch: BenchBatch) -> dict[str, Any]:
    return {**batch.given_to(runner), **batch.options}


def _measure(runner: GraphRunner, batch: BenchBatch) -> BenchRecord:
    call = _call_of(runner, batch)
    if runner.config.compilation.capture_policy == "lazy":
        runner(**call)  # captures its graph
    route = runner.route(batch.tensors, **batch.options)
    eager, eager_host = _time(
        runner,
        partial(
            runner.run_eagerly,
            padded=False,
            **call,
        ),
    )
    graph = graph_host = graph_queued = None
    replay = replay_queued = None
    if route.mode is not CUDAGraphMode.NONE:
        whole = partial(runner, **call)
        graph, graph_host = _time(runner, whole)
        graph_queued, _ = _time(runner, whole, queued=True)
    captured = runner.graph(route.mode, route.descriptor)
    if captured is not None:
        bare = partial(runner.backend.replay, captured)
        replay, _ = _time(runner, bare)
        replay_queued, _ = _time(runner, bare, queued=True)
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
    asked = runner.config.report
    with torch.no_grad():
        for _ in range(asked.warmups):
            call()
        device, host = runner.backend.time_calls(
            call,
            asked.repeats,
            queued=queued,
        )
    return timing(device), timing(host)
