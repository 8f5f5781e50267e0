"""Latency of a runner by size."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch

from cgplan.buffers.static import example_batch
from cgplan.captures.failures import explain_eager_failure, raise_caused
from cgplan.errors import ConfigError
from cgplan.measure.baselines import MOST_ROUNDS, BenchBatch, bench_baselines, timing
from cgplan.modes import CUDAGraphMode
from cgplan.planning import CudagraphDispatcher
from cgplan.reports.records import (
    BenchRecord,
    BenchReport,
    FloorRecord,
    check_baselines,
)
from cgplan.runner.runner import GraphRunner

Progress = Callable[[int, int, str], None]
COPIED_BYTES = 256 << 20
KERNELS = 1000
MEDIANS = "eager", "graph", "replay"
ROUNDS = 10
UNSURE = 2  # times the fastest call, for a median


def bench(
    runner: GraphRunner,
    *,
    progress: Progress | None = None,
    against: Sequence[str] = (),
    seed: int | None = None,
) -> BenchReport:
    """Measure the sizes of ``config.report``, or all captured ones, on example batches.

    Batches are uniform decode where the size allows that, else mixed; both where their graphs
    differ. They take turns, so that no size alone meets other work on the machine.

    Args:
        progress: Called with (done, total, name).
        against: Of BASELINE_NAMES; the runner is captured again.
        seed: For the order of turns; absent: drawn.

    Raises:
        ConfigError: an unknown name in ``against``.
        ModelError: the model failed eagerly.
    """
    against = check_baselines(against)
    if against and len(runner.config.dim_names) > 1:
        raise ConfigError(
            "bench --against needs inputs where only rows vary", remedy="Leave --against out."
        )
    by_box = [examples(runner, *box) for box in _boxes(runner)]
    records = latencies(runner, by_box, progress)
    report = runner.report  # before baselines change it
    peers = None
    if against:
        peers = bench_baselines(
            runner,
            [batches[0] for batches in by_box],
            against,
            seed=seed,
            progress=progress,
        )
    return BenchReport(
        environment=runner.backend.environment(runner.plan.config_hash),
        capture=report,
        repeats=runner.config.report.repeats,
        records=records,
        floor=floor_of(runner),
        peers=peers,
    )


def latencies(
    runner: GraphRunner,
    by_box: Sequence[list[BenchBatch]],
    progress: Progress | None = None,
) -> tuple[BenchRecord, ...]:
    batches = list[BenchBatch]()
    for found in by_box:
        batches += found
    repeats = runner.config.report.repeats
    rounds = min(MOST_ROUNDS, repeats)
    turns = list(product(range(rounds), batches))
    for index, (number, batch) in enumerate(turns):
        name = f"{batch.size} tokens"
        if progress:
            progress(index, len(turns), name)
        share = len(range(number, repeats, rounds))
        try:
            _take_turn(runner, batch, share)
        except Exception as error:
            raise_caused(explain_eager_failure(error, name), error)
    return tuple(_record(runner, batch) for batch in batches)


def floor_of(runner: GraphRunner) -> FloorRecord | None:
    """None on the tape, without memory for a copy, and on a busy device."""
    backend = runner.backend
    if backend.is_tape:
        return None
    try:
        source = torch.zeros(
            COPIED_BYTES,
            dtype=torch.uint8,
            device=backend.device,
        )
        target = torch.empty_like(source)
    except torch.OutOfMemoryError:
        return None
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
    for times in (copies, replays):
        if median(times) > UNSURE * min(times):
            return None
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


def call_examples(runner: GraphRunner) -> None:
    with runner.trace():
        for box in _captured(runner):
            for batch in examples(runner, *box):
                call = _call_of(runner, batch)
                for _ in range(3):
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


def _take_turn(runner: GraphRunner, batch: BenchBatch, repeats: int) -> None:
    call = _call_of(runner, batch)
    if runner.config.compilation.is_lazy:
        runner(**call)  # captures its graph
    route = runner.route(batch.tensors, **batch.options)
    eager = partial(runner.run_eagerly, padded=False, **call)
    ways: dict[str, Callable[[], object]] = {"eager": eager}
    entry = None
    if route.mode is not CUDAGraphMode.NONE:
        ways["graph"] = ways["graph_queued"] = partial(runner, **call)
        entry = runner.graphs.entry((route.mode, route.descriptor))
    if entry is not None:
        replays = [runner.backend.replay_of(graph) for graph in entry.segments]

        def replay() -> None:
            for run in replays:
                run()

        ways["replay"] = ways["replay_queued"] = replay
    for name, way in ways.items():
        queued = name.endswith("queued")
        with torch.no_grad():
            for _ in range(runner.config.report.warmups):
                way()
            device, host = runner.backend.time_calls(
                way,
                repeats,
                queued=queued,
            )
        batch.times[name] += device
        if name in ("eager", "graph"):
            batch.times[f"{name}_host"] += host


def _record(runner: GraphRunner, batch: BenchBatch) -> BenchRecord:
    route = runner.route(batch.tensors, **batch.options)
    found = dict[str, Any]()
    unsure = list[str]()
    for name, times in batch.times.items():
        found[name] = timing(times)
        if name in MEDIANS and found[name].median > UNSURE * min(times):
            unsure.append(name)
    return BenchRecord(
        num_tokens=batch.size,
        sizes=route.batch.sizes,
        mode=route.mode,
        descriptor=route.descriptor,
        padded_rows=route.descriptor.num_tokens - batch.size,
        unsure=tuple(unsure),
        **found,
    )
