"""A runner measured: latency by size, other ways to run its model beside it, and which part of a
step runs inside graphs.

Note [Workspaces]
    Inductor's recording drops cuBLAS workspaces that other graphs captured: ``reduce-overhead`` is
    prepared while there are none, and stays ready.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from operator import attrgetter
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cgplan.backends import GraphBackend
from cgplan.backends.context import forward_context, random_state_kept
from cgplan.buffers.compare import deviation
from cgplan.buffers.static import Tensors, example_batch
from cgplan.captures.failures import drop_locals, explain_eager_failure, raise_caused
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.config import Config
from cgplan.errors import BackendError, CgplanError, ConfigError, first_line
from cgplan.graphs.fingerprint import Fingerprint
from cgplan.graphs.footprint import look
from cgplan.graphs.put_back import PutBack
from cgplan.graphs.written import copy_limit
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.piecewise.trace import with_own_code
from cgplan.planning import CudagraphDispatcher, build_plan
from cgplan.reports.records import (
    OURS,
    BaselineRecord,
    BaselinesRecord,
    BaselineTiming,
    BenchRecord,
    BenchReport,
    DoctorReport,
    FloorRecord,
    SplitRecord,
    Timing,
    check_baselines,
)
from cgplan.runner.auto import timed_keys
from cgplan.runner.replan import on_padding
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
    peers = None
    with random_state_kept(runner.backend.device, runner.graphs.generators):
        measured = _measured(runner, by_box, progress)
        if against:
            peers = bench_baselines(
                runner,
                [batches[0] for batches in by_box],
                against,
                seed=seed,
                progress=progress,
            )
    return BenchReport(**measured, peers=peers)


def _state_of(
    runner: GraphRunner,
    batches: Iterable[BenchBatch],
    run: Callable[[BenchBatch], object],
) -> PutBack:
    """Before the runs of these batches."""
    limit = copy_limit(
        runner.config.compilation,
        runner.backend,
    )
    found = PutBack(runner.graphs.fingerprint(), limit)
    found.keeps_first_use = False  # a look alone does not tell it apart

    def run_all() -> None:
        for batch in batches:
            _begin_again(found)
            run(batch)

    look(run_all, found)
    return found


def _begin_again(state: PutBack) -> None:
    """Positions must not run past a cache."""
    state.last = state.before.changes()
    state.rewind()


def _measured(
    runner: GraphRunner,
    by_box: Sequence[list[BenchBatch]],
    progress: Progress | None = None,
) -> dict[str, Any]:
    batches = []
    for found in by_box:
        batches += found
    repeats = runner.config.report.repeats
    rounds = min(MOST_ROUNDS, repeats)
    turns = list(product(range(rounds), batches))

    def run(batch: BenchBatch) -> None:
        runner.run_eagerly(padded=False, **_call_of(runner, batch))

    routes = [runner.route(batch.tensors, **batch.options) for batch in batches]
    missing = {route.missing for route in routes if route.missing}
    if missing:
        runner.exchange(captured=missing)
    floor = floor_of(runner)
    runner.backend.release_cached()
    state = _state_of(runner, batches, run)
    try:
        for index, (number, batch) in enumerate(turns):
            name = f"{batch.size} tokens"
            if progress:
                progress(index, len(turns), name)
            share = len(range(number, repeats, rounds))
            try:
                _take_turn(runner, batch, share, state)
            except Exception as error:
                failure = explain_eager_failure(error, name, runner.model, runner.config.inputs)
                raise_caused(failure, error)
    finally:
        state.restore()
    return {
        "environment": runner.backend.environment(runner.plan.config_hash),
        "capture": runner.report,
        "repeats": repeats,
        "records": tuple(_record(runner, batch) for batch in batches),
        "floor": floor,
    }


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
        state_bytes=runner.graphs.facts.state_bytes,
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


def _take_turn(
    runner: GraphRunner,
    batch: BenchBatch,
    repeats: int,
    state: PutBack,
) -> None:
    call = _call_of(runner, batch)
    route = runner.route(batch.tensors, **batch.options)
    eager = partial(runner.run_eagerly, padded=False, **call)
    ways: dict[str, Callable[[], object]] = {"eager": eager}
    entry = None
    if route.mode is not CUDAGraphMode.NONE:
        ways["graph"] = ways["graph_queued"] = partial(runner, **call)
        entry = runner.graphs.entry((route.mode, route.descriptor))
    if entry:
        replays = [runner.backend.replay_of(graph) for graph in entry.segments]

        def replay() -> None:
            for run in replays:
                run()

        ways["replay"] = ways["replay_queued"] = replay
    for name, way in ways.items():
        queued = name.endswith("queued")
        _begin_again(state)
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
    found = {}
    unsure = []
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


Call = Callable[[], Any]
Captured = tuple[Any, dict[str, Tensor], Any]
Times = tuple[list[float], list[float], list[float]]
MOST_ROUNDS = 5
LONGEST_REASON = 160  # characters
_REDRAWN = "the model draws random numbers, and padding and inductor's code draw others"
_UNLIKE = "its output has another structure, shape, dtype or value beside tensors, or no tensor"
_UNSTEADY = (
    "the model's own code, run twice from the same inputs, state and seed, gives different results"
)
_STATIC = "_dynamo_static_input_type"  # set by mark_static_address


@dataclass(frozen=True)
class BenchBatch:
    """``size`` unpadded tokens on the device, and the options of the runner's call."""

    size: int
    inputs: Tensors
    metadata: Tensors
    options: Mapping[str, Any]
    descriptor: BatchDescriptor
    times: dict[str, list[float]] = field(
        default_factory=lambda: defaultdict(list),
    )

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.inputs, **self.metadata}

    def run(
        self,
        model: Callable[..., Any],
        tensors: Tensors | None = None,
    ) -> Any:
        given = tensors or self.tensors
        inputs = {name: given[name] for name in self.inputs}
        metadata = {name: given[name] for name in self.metadata}
        with forward_context(CUDAGraphMode.NONE, self.descriptor, metadata):
            return model(**inputs)

    def given_to(
        self,
        runner: GraphRunner,
    ) -> dict[str, Tensor]:
        """Tensors of a runner's call; filled static buffers if it copies none."""
        is_eager = self.size > runner.reachable.max_capture_size
        if is_eager or runner.config.compilation.cudagraph_copy_inputs:
            return self.tensors
        views = runner.input_views(self.size, self.descriptor.num_reqs)
        for name, value in self.tensors.items():
            views[name].copy_(value)
        return views


class Baseline:
    """``first`` in seconds, ``times`` (device, latency, host) in us."""

    def __init__(self, name: str) -> None:
        self.record = BaselineTiming(name=name)
        self.undo = ExitStack()
        self.calls: dict[int, Call] = {}
        self.first: dict[int, float] = {}
        self.times: dict[int, Times] = {}
        self.results: dict[int, BaselineRecord] = {}
        self.note: str | None = None

    @property
    def stays_ready(self) -> bool:  # Note [Workspaces]
        return self.record.name == "reduce-overhead"

    def attempt(self, action: Callable[..., None], *args: Any) -> None:
        """Act unless it failed; an error closes it and becomes its record."""
        if self.record.failure is not None:
            return
        try:
            action(self, *args)
        except Exception as error:
            drop_locals(error)
            with suppress(Exception):
                self.close()
            reason = first_line(error)
            if not isinstance(error, CgplanError):
                reason = f"{type(error).__name__}: {reason}"
            if len(reason) > LONGEST_REASON:  # what happened may stand at either end
                reason = f"{reason[:77]} ... {reason[-78:]}"
            self.record = BaselineTiming(name=self.record.name, failure=reason)

    def close(self) -> None:
        self.calls.clear()
        self.undo.close()


def ours(
    bench: Comparison,
    baseline: Baseline,
) -> None:
    runner = bench.runner
    baseline.undo.callback(runner.sleep)
    runner.recapture()

    def call_of(batch: BenchBatch) -> Call:
        given = batch.given_to(runner)
        arguments = {**given, **batch.options}
        pairs = [(given[name], value) for name, value in batch.tensors.items()]
        copies = [(view, value) for view, value in pairs if view is not value]

        def run() -> Any:
            for view, value in copies:  # sizes share static buffers
                view.copy_(value)
            return runner(**arguments)

        return run

    bench.first_calls(baseline, call_of)


def eager(
    bench: Comparison,
    baseline: Baseline,
) -> None:
    bench.first_calls(baseline, lambda batch: partial(batch.run, bench.runner.model))


def bare(
    bench: Comparison,
    baseline: Baseline,
) -> None:
    backend = bench.runner.backend
    asked = bench.runner.config.compilation.cudagraph_num_of_warmups
    warmups = 1 if asked == "auto" else asked
    pool = backend.new_pool()
    captured = {}
    with backend.session():
        for batch in bench.largest_first():
            static = {name: value.clone() for name, value in batch.tensors.items()}
            forward = partial(batch.run, bench.runner.model, static)
            for _ in range(warmups):
                forward()
            graph = backend.new_graph(pool)
            try:
                with backend.capturing(graph):
                    output = forward()
            except CgplanError:
                raise
            except Exception as error:  # of torch, which may name no operator
                nothing = Fingerprint.of({}, backend.device)
                found = look(forward, PutBack(nothing, 0))
                raise found.host_sync or error from None
            baseline.undo.callback(backend.reset, graph)
            captured[batch.size] = graph, static, output

    def call_of(batch: BenchBatch) -> Call:
        graph, static, output = captured[batch.size]
        replay = backend.replay_of(graph)
        pairs = list(zip(static.values(), batch.tensors.values(), strict=True))

        def run() -> Any:
            for target, value in pairs:
                target.copy_(value)
            replay()
            return output

        return run

    bench.first_calls(baseline, call_of)


def make_graphed_callables(
    bench: Comparison,
    baseline: Baseline,
) -> None:
    graphed = dict[int, Callable[..., Any]]()
    pool = torch.cuda.graph_pool_handle()
    baseline.undo.callback(graphed.clear)
    for batch in bench.largest_first():

        def forward(*given: Tensor, batch: BenchBatch = batch) -> Any:
            tensors = dict(zip(batch.tensors, given, strict=True))
            with torch.no_grad():
                return batch.run(bench.runner.model, tensors)

        static = tuple(value.clone() for value in batch.tensors.values())
        graphed[batch.size] = torch.cuda.make_graphed_callables(forward, static, pool=pool)

    def call_of(batch: BenchBatch) -> Call:
        return partial(graphed[batch.size], *batch.tensors.values())

    bench.first_calls(baseline, call_of)


def reduce_overhead(
    bench: Comparison,
    baseline: Baseline,
) -> None:
    """From an empty cache. The model's tensors are marked static: torch leaves out graphs that
    write into others.
    """
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees
    from torch._inductor.utils import fresh_inductor_cache

    model = bench.runner.model
    device = bench.runner.backend.device
    for tensor in Fingerprint.of({"model": model}, device).tensors:
        is_static = isinstance(tensor, torch.nn.Parameter) or hasattr(tensor, _STATIC)
        if tensor.device == device and not is_static:
            torch._dynamo.mark_static_address(tensor, guard=False)
            baseline.undo.callback(delattr, tensor, _STATIC)

    own = with_own_code(model)
    compiled = torch.compile(own, mode="reduce-overhead", dynamic=False)
    baseline.undo.callback(reset_cudagraph_trees)
    baseline.undo.callback(torch._C._dynamo.eval_frame.reset_code, own.__code__)

    def call_of(batch: BenchBatch) -> Call:
        def run() -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return batch.run(compiled)

        return run

    counters = torch._dynamo.utils.counters["inductor"]
    before = counters["cudagraph_skips"]
    limits = {"recompile_limit": 1024, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits), fresh_inductor_cache():
        bench.first_calls(
            baseline,
            call_of,
            2,
        )  # compiles, records
    skipped = counters["cudagraph_skips"] - before
    if skipped:
        baseline.note = (
            f"torch left out {skipped} graphs and ran them eagerly; TORCH_LOGS=perf_hints says why"
        )


# Each prepares and calls all sizes; its ``undo`` frees memory.
BASELINES: dict[str, Callable[[Comparison, Baseline], None]] = {
    OURS: ours,
    "eager": eager,
    "bare": bare,
    "make_graphed_callables": make_graphed_callables,
    "reduce-overhead": reduce_overhead,
}
_NEED_CUDA = ("make_graphed_callables", "reduce-overhead")


def bench_baselines(
    runner: GraphRunner,
    batches: Sequence[BenchBatch],
    against: Sequence[str],
    *,
    seed: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> BaselinesRecord:
    """Each way to run the model alone for its costs, then all in turns.

    The runner is captured again: its outputs and views become invalid. Close other graphs before,
    see Note [Workspaces]. ``batches``: one for each size.
    """
    if seed is None:
        seed = random.SystemRandom().randrange(1 << 16)
    order = random.Random(seed)
    repeats = runner.config.report.repeats
    rounds = min(MOST_ROUNDS, repeats)
    baselines = [Baseline(name) for name in (OURS, *against)]
    done = itertools.count()

    def step(text: str) -> None:
        if progress:
            progress(
                next(done),
                2 * len(baselines) + rounds,
                text,
            )

    with torch.no_grad():
        bench = Comparison(
            runner, batches, seed=order.randrange(1 << 16), repeats=math.ceil(repeats / rounds)
        )
        runner.sleep()
        shuffled = order.sample(baselines, len(baselines))
        for baseline in sorted(shuffled, key=attrgetter("stays_ready")):
            step(f"{baseline.record.name}, alone")
            baseline.attempt(bench.price)
            if not baseline.stays_ready:
                baseline.attempt(Baseline.close)
        for baseline in baselines:
            step(f"{baseline.record.name}, beside the others")
            if not baseline.stays_ready:
                baseline.attempt(bench.prepare)
        for number in range(rounds):
            step(f"round {number + 1}")
            turns = list(itertools.product(_ready(baselines), batches))
            order.shuffle(turns)
            for baseline, batch in turns:
                baseline.attempt(bench.measure, batch.size)
        for baseline in baselines:  # last: graphs whose memory was taken show here
            baseline.attempt(bench.compare)
        for baseline in baselines[1:]:
            baseline.attempt(Baseline.close)
    pairs = itertools.product(batches, _ready(baselines))
    return BaselinesRecord(
        seed=seed,
        rounds=rounds,
        repeats=rounds * bench.repeats,
        capture_seconds=bench.capture_seconds,
        keys=bench.keys,
        ways=tuple(baseline.record for baseline in baselines),
        records=tuple(baseline.results[batch.size] for batch, baseline in pairs),
    )


def _ready(baselines: Sequence[Baseline]) -> list[Baseline]:
    return [baseline for baseline in baselines if baseline.record.failure is None]


@dataclass(eq=False)
class Comparison:
    """Results of a runner's model, each from the same inputs, state and seed, which stay."""

    runner: GraphRunner
    batches: Sequence[BenchBatch]
    seed: int = 0
    repeats: int = 1
    capture_seconds: float | None = None
    keys: int = 0

    def __post_init__(self) -> None:
        runner = self.runner
        batches = self.batches
        seed = self.seed
        self._inputs: list[tuple[Tensor, Tensor]] = []
        for batch in batches:
            self._inputs += [(tensor, tensor.clone()) for tensor in batch.tensors.values()]
        self._state = _state_of(runner, batches, partial(BenchBatch.run, model=runner.model))
        self._generators = self._state.before.generators
        self._outputs: dict[int, Any] = {}
        self._unsteady = set[int]()
        self._draws = set[int]()

        for batch in batches:
            call = partial(batch.run, runner.model)
            wanted = self._outputs[batch.size] = self._run(call, seed)
            again = self._run(call, seed)
            otherwise = self._run(call, seed + 1)
            if deviation(again, wanted):
                self._unsteady.add(batch.size)
            elif deviation(otherwise, wanted):
                self._draws.add(batch.size)
        self.restore()

    def largest_first(self) -> list[BenchBatch]:
        return sorted(
            self.batches,
            key=attrgetter("size"),
            reverse=True,
        )

    def restore(self) -> None:
        for tensor, before in self._inputs:
            tensor.copy_(before)
        self._state.restore()

    def first_calls(
        self, baseline: Baseline, call_of: Callable[[BenchBatch], Call], times: int = 1
    ) -> None:
        synchronize = self.runner.backend.synchronize
        for batch in self.batches:
            call = call_of(batch)
            baseline.calls[batch.size] = call
            self.restore()
            synchronize()
            start = time.perf_counter()
            for _ in range(times):
                call()
            synchronize()
            baseline.first.setdefault(batch.size, time.perf_counter() - start)

    def prepare(self, baseline: Baseline) -> None:
        self.restore()
        BASELINES[baseline.record.name](self, baseline)

    def price(self, baseline: Baseline) -> None:
        name = baseline.record.name
        backend = self.runner.backend
        if name in _NEED_CUDA and backend.device.type != "cuda":
            problem = f"it needs CUDA, and this is {backend.name}"
            raise BackendError(problem, remedy="Run it on a GPU.")
        # a capture that fails inside would leave torch's allocator unusable
        if name == "make_graphed_callables":
            trial = Baseline("bare")
            try:
                bare(self, trial)
            finally:
                trial.close()
        before = used_bytes(backend)
        start = time.perf_counter()
        self.prepare(baseline)
        seconds = time.perf_counter() - start
        after = used_bytes(backend)
        if name == OURS:
            report = self.runner.report
            self.capture_seconds = report.session_seconds
            self.keys = len(report.records)
        baseline.record = BaselineTiming(
            name=name, ready_seconds=seconds, memory_bytes=after - before, note=baseline.note
        )

    def measure(
        self,
        baseline: Baseline,
        size: int,
    ) -> None:
        call = baseline.calls[size]
        backend = self.runner.backend
        self.restore()
        for _ in range(2):
            call()
        device, _ = backend.time_calls(
            call,
            self.repeats,
            queued=True,
        )
        times = baseline.times.setdefault(size, ([], [], []))
        measured = (device, *backend.time_calls(call, self.repeats))
        for known, more in zip(
            times,
            measured,
            strict=True,
        ):
            known.extend(more)

    def compare(self, baseline: Baseline) -> None:
        for size in self._outputs:
            difference, reason = self._deviation(size, baseline)
            device, latency, host = map(timing, baseline.times[size])
            baseline.results[size] = BaselineRecord(
                name=baseline.record.name,
                num_tokens=size,
                device=device,
                latency=latency,
                host=host,
                first_call_seconds=baseline.first[size],
                deviation=difference,
                not_comparable=reason,
            )

    def _deviation(
        self,
        size: int,
        baseline: Baseline,
    ) -> tuple[float | None, str | None]:
        if size in self._unsteady:
            return None, _UNSTEADY
        call = baseline.calls[size]
        found = self._run(call, self.seed)
        difference = deviation(found, self._outputs[size])
        self.restore()
        if difference is None:
            return None, _UNLIKE
        redraws = baseline.stays_ready
        if baseline.record.name == OURS:
            is_padded = size not in self.runner.reachable.capture_sizes
            redraws = is_padded or self.runner.config.compilation.compiler != "eager"
        if difference and size in self._draws and redraws:
            return None, _REDRAWN
        return difference, None

    def _run(
        self,
        call: Call,
        seed: int,
    ) -> Any:
        self.restore()
        torch.manual_seed(seed)
        for generator in self._generators:
            generator.manual_seed(seed)
        output = call()
        return tree_map_only(
            Tensor,
            Tensor.clone,
            output,
        )


def used_bytes(backend: GraphBackend) -> int:
    """Device bytes in use without caches; on the tape, of pools."""
    backend.synchronize()
    gc.collect()
    backend.release_cached()
    now = backend.memory()
    if now.free is None or not backend.counts_driver_bytes:
        return now.reserved
    return now.total - now.free


def timing(values: Sequence[float]) -> Timing:
    median, p99 = map(float, np.percentile(values, (50, 99)))
    return Timing(median=median, p99=p99)


def check_up(runner: GraphRunner) -> DoctorReport:
    """For a few sizes."""
    boxes = {descriptor.box for _, descriptor in timed_keys(runner)}
    by_box = [examples(runner, *box) for box in sorted(boxes)]
    measured = _measured(runner, by_box)
    records = [record for record in measured["records"] if record.graph]
    outside = Counter[str]()
    for record in records:
        entry = runner.graphs.entry(record.key)
        if entry is None:
            continue
        if entry.eager_pieces:
            outside.clear()
            for piece in entry.graph.eager_pieces:
                place = f"{piece.name}, at {piece.line}"
                outside[place] += 1
    measured["records"] = tuple(records)
    return DoctorReport(**measured, outside=dict(outside.most_common()))


def describe_split(
    model: Callable[..., Any],
    config: Config,
    backend: GraphBackend,
) -> SplitRecord | None:
    """None without PIECEWISE keys. For a split by operators, the model runs once on padding and is
    put back, except for a KV cache that padding writes. Raises as choose_route, and ModelError.
    """
    plan = build_plan(config)
    piecewise = [key for key in plan.keys if key[0] is CUDAGraphMode.PIECEWISE]
    if not piecewise:
        return None
    config = config.with_values("compilation", compiler="eager")
    graphs = ModelGraphs(plan, config, model, backend)
    smallest = piecewise[-1]
    try:
        graphs.choose_route()
        if graphs.route.splitter:
            with on_padding(graphs) as rehearsal:
                rehearsal.look(smallest)
                graphs.warm_up(smallest)
        return graphs.route.describe()
    except Exception as error:
        failure = explain_eager_failure(error, f"{smallest[0]} {smallest[1]}", model, config.inputs)
        drop_locals(error)
        raise_caused(failure, error)
    finally:
        graphs.free()
