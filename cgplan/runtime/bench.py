"""Latency of a runner, size by size: eager, through the runner, and as a bare replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from cgplan.graphs.buffers import example_batch
from cgplan.modes import CUDAGraphMode
from cgplan.reports.records import BenchRecord, BenchReport, Timing
from cgplan.runtime.environment import describe_environment
from cgplan.runtime.failures import explain_eager_failure
from cgplan.runtime.runner import GraphRunner


def bench(runner: GraphRunner, *, progress: Callable[[int, int], None] | None = None) -> BenchReport:
    """Measure the sizes of ``config.report`` (absent: every size that is or may be captured) on example batches.

    Uniform decode batches are measured where the plan has graphs of their own for them, mixed batches elsewhere.

    Args:
        runner: What to measure; its stats count these calls too.
        progress: Called with (done, total) before each size.
    """
    sizes = sorted(set(runner.config.report.sizes or runner.wanted.capture_sizes))
    records = []
    for index, size in enumerate(sizes):
        if progress:
            progress(index, len(sizes))
        try:
            records.append(_measure(runner, size))
        except Exception as error:
            failure = explain_eager_failure(error, f"{size} tokens")
            raise failure from (error if failure is not error else error.__cause__)
    return BenchReport(
        environment=describe_environment(runner.backend, runner.plan.config_hash),
        capture=runner.report,
        repeats=runner.config.report.repeats,
        records=tuple(records),
    )


def _measure(runner: GraphRunner, size: int) -> BenchRecord:
    plan, config = runner.plan, runner.config
    uniform = size % plan.query_len == 0 and size <= plan.query_len * plan.max_num_seqs
    reqs = size // plan.query_len if uniform else min(size, plan.max_num_seqs)
    batch = example_batch({**config.inputs, **config.metadata}, size, reqs, runner.backend.device)
    if not config.compilation.cudagraph_copy_inputs and size <= runner.wanted.max_capture_size:
        views = runner.input_views(size, reqs)
        for name, value in batch.items():
            views[name].copy_(value)
        batch = views
    loras = config.lora.max_loras if config.lora else 0

    call: dict[str, Any] = {**batch, "uniform_decode": uniform, "num_active_loras": loras}
    if config.compilation.capture_policy == "lazy":
        runner(**call)  # captures its graph
    route = runner.route(batch, uniform, loras)
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
    return _timing(device), _timing(host)


def _timing(values: Sequence[float]) -> Timing:
    return Timing(median=float(np.median(values)), p99=float(np.percentile(values, 99)))
