"""Latency of a runner by size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch

from cgplan.buffers.static import example_batch
from cgplan.captures.environment import describe_environment
from cgplan.captures.failures import explain_eager_failure, raise_caused
from cgplan.errors import ConfigError
from cgplan.measure.baselines import BenchBatch, bench_baselines, timing
from cgplan.modes import CUDAGraphMode
from cgplan.planning import CudagraphDispatcher
from cgplan.reports.records import (
    BenchRecord,
    BenchReport,
    FloorRecord,
    Timing,
    check_baselines,
)
from cgplan.runner.runner import GraphRunner

COPIED_BYTES = 256 << 20
KERNELS = 1000
ROUNDS = 10


def bench(
    runner: GraphRunner,
    *,
    progress: Callable[[int, int, str], None] | None = None,
    against: Sequence[str] = (),
    seed: int | None = None,
) -> BenchReport:
    """Measure the sizes of ``config.report``, or all captured ones, on example batches.

    Batches are uniform decode where the size allows that, else mixed; both where their graphs
    differ.

    Args:
        progress: Called with (done, total, name).
        against: Of BASELINE_NAMES; the runner is captured again.
        seed: Of the order of turns; absent: drawn.

    Raises:
        ConfigError: an unknown name in ``against``.
        ModelError: the model failed eagerly.
    """
    against = check_baselines(against)
    if against and len(runner.config.dim_names) > 1:
        raise ConfigError(
            "bench compares with other ways where rows alone vary", remedy="Leave --against out."
        )
    boxes = _boxes(runner)
    records = list[BenchRecord]()
    first = list[BenchBatch]()
    for index, box in enumerate(boxes):
        name = f"{box[0]} tokens"
        if progress:
            progress(index, len(boxes), name)
        try:
            batches = examples(runner, *box)
            records += [_measure(runner, batch) for batch in batches]
        except Exception as error:
            raise_caused(explain_eager_failure(error, name), error)
        first.append(batches[0])
    report = runner.report  # before baselines change it
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
        floor=floor_of(runner),
        peers=peers,
    )


def floor_of(runner: GraphRunner) -> FloorRecord | None:
    """None on the tape, and without memory for a copy."""
    backend = runner.backend
    free = backend.memory().free
    if backend.is_tape or free is None or free < 4 * COPIED_BYTES:
        return None
    source = torch.zeros(
        COPIED_BYTES,
        dtype=torch.uint8,
        device=backend.device,
    )
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    copies, _ = backend.time_calls(
        copy,
        ROUNDS,
        queued=True,
    )
    number = torch.zeros(1, device=backend.device)
    graph = backend.new_graph(backend.new_pool())
    with backend.session(), backend.capturing(graph):
        for _ in range(KERNELS):
            number.add_(1)
    replays, _ = backend.time_calls(
        backend.replay_of(graph),
        ROUNDS,
        queued=True,
    )
    backend.reset(graph)
    return FloorRecord(
        weight_bytes=runner.graphs.facts.weight_bytes,
        bytes_per_us=2 * COPIED_BYTES / median(copies),
        kernel_us=median(replays) / KERNELS,
    )


def examples(runner: GraphRunner, size: int, *sizes: int) -> list[BenchBatch]:
    plan = runner.plan
    config = runner.config
    loras = 0 if config.lora is None else config.lora.max_loras
    kinds = [False]
    reqs, rest = divmod(size, plan.query_len)
    if not rest and reqs <= plan.max_num_seqs:
        kinds = [True]
        dispatch = CudagraphDispatcher(runner.reachable).dispatch
        as_mixed, as_decode = (
            dispatch(
                size,
                kind,
                loras,
                sizes=sizes,
            )
            for kind in (False, True)
        )
        if as_mixed[0] is not CUDAGraphMode.NONE and as_mixed != as_decode:
            kinds.append(False)
    specs = config.tensors_at(sizes)
    batches = []
    for uniform in kinds:
        count = reqs if uniform else min(size, plan.max_num_seqs)
        tensors = example_batch(
            specs,
            size,
            count,
            runner.backend.device,
        )
        options: dict[str, Any] = {"uniform_decode": uniform, "num_active_loras": loras}
        batch = BenchBatch(
            size=size,
            inputs={name: tensors[name] for name in config.inputs},
            metadata={name: tensors[name] for name in config.metadata},
            options=options,
            descriptor=runner.route(tensors, **options).unpadded,
        )
        batches.append(batch)
    return batches


def call_examples(runner: GraphRunner, times: int = 3) -> None:
    with runner.trace():
        for box in _captured(runner):
            for batch in examples(runner, *box):
                call = _call_of(runner, batch)
                for _ in range(times):
                    runner(**call)


def _captured(runner: GraphRunner) -> list[tuple[int, ...]]:
    return sorted({descriptor.box for _, descriptor in runner.reachable.keys})


def _boxes(runner: GraphRunner) -> list[tuple[int, ...]]:
    boxes = _captured(runner)
    asked = runner.config.report.sizes
    if not asked:
        return boxes
    others = {box[1:] for box in boxes} or {()}
    return sorted((size, *rest) for size, rest in product(set(asked), others))


def _call_of(runner: GraphRunner, batch: BenchBatch) -> dict[str, Any]:
    return {**batch.given_to(runner), **batch.options}


def _measure(runner: GraphRunner, batch: BenchBatch) -> BenchRecord:
    call = _call_of(runner, batch)
    if runner.config.compilation.is_lazy:
        runner(**call)  # captures its graph
    route = runner.route(batch.tensors, **batch.options)
    eager, eager_host = _time(runner, partial(runner.run_eagerly, padded=False, **call))
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
        device, host = runner.backend.time_calls(call, asked.repeats, queued=queued)
    return timing(device), timing(host)
