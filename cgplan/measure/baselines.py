"""A runner beside its baselines: other ways to run its model, each with its costs, its speed and its results.

Note [Graphs of several baselines in one process]
    inductor's CUDA graphs drop the process's cuBLAS workspaces around each recording, also those that other graphs were
    captured with. So ``reduce-overhead`` is prepared while no other graph is there, stays ready, and records nothing
    later. Dynamo is never reset, which would drop the traces of cgplan's runners: a baseline drops its own code object.

Note [Comparing results]
    A forward may write into its inputs and its model's tensors, and draw random numbers. So each compared call starts
    from the same inputs, state and seed. A model whose own code, run twice from there, gives different results cannot
    be compared: its state lies where nobody looks (closures, globals, another library's generator, atomics). Random
    numbers are the same for the same operators on the same shapes; padding, and inductor's generator, change them.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from cgplan.backends import GraphBackend
from cgplan.backends.context import forward_context
from cgplan.buffers.compare import deviation
from cgplan.captures.failures import drop_locals
from cgplan.errors import BackendError, CgplanError
from cgplan.graphs.ambient import random_state_kept
from cgplan.graphs.footprint import look
from cgplan.graphs.model_state import ModelState
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.reports.records import OURS, CaptureReport, PeerRecord, PeersRecord, Timing, WayRecord, check_peers
from cgplan.runner.runner import GraphRunner

Call = Callable[[], Any]
MOST_ROUNDS = 5
LONGEST_REASON = 160  # characters
_INDUCTOR_REDRAWS = "code that inductor compiled draws others"
_UNLIKE = (
    "its output has another structure, shape, dtype or value beside tensors than that of the model's own code, or "
    "holds no tensor"
)
_UNSTEADY = "the model's own code, run twice from the same inputs, state and seed, gives different results"
_STATIC = "_dynamo_static_input_type"  # where mark_static_address leaves its mark


@dataclass(frozen=True, slots=True)
class BenchBatch:
    """One batch that is measured.

    Attributes:
        size: Tokens, unpadded.
        inputs, metadata: Its tensors, on the device.
        options: The other arguments of a runner's call.
        descriptor: The batch in an eager forward's context.
    """

    size: int
    inputs: Mapping[str, torch.Tensor]
    metadata: Mapping[str, torch.Tensor]
    options: Mapping[str, Any]
    descriptor: BatchDescriptor

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {**self.inputs, **self.metadata}

    def run(self, model: Callable[..., Any], tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
        """Call a model on the batch, or on other tensors in its place, in the forward context that it may read."""
        given = self.tensors if tensors is None else tensors
        with forward_context(CUDAGraphMode.NONE, self.descriptor, {name: given[name] for name in self.metadata}):
            return model(**{name: given[name] for name in self.inputs})

    def given_to(self, runner: GraphRunner) -> dict[str, torch.Tensor]:
        """The tensors of a runner's call. A runner that copies no inputs gets views of its static buffers, filled."""
        if runner.config.compilation.cudagraph_copy_inputs or self.size > runner.wanted.max_capture_size:
            return self.tensors
        views = runner.input_views(self.size, self.descriptor.num_reqs)
        for name, value in self.tensors.items():
            views[name].copy_(value)
        return views


@dataclass(slots=True)
class Baseline:
    """One way to run a model, with its measurements. After ``free`` it can be prepared again.

    Attributes:
        name: As in reports.
        prepare: All that is done before the first call.
        call: A call with these tensors; their values may change from call to call.
        free: Gives memory back.
        check: Raises an error where the baseline cannot run. Runs before ``prepare``, and its time is not counted.
        preparing: A block around preparation and first calls.
        redraws: Why a model draws other random numbers than by its own code, from the same seed; None if it does not.
        calls_until_ready: Calls of a new size before it runs as it will from then on.
        note: For the reader of its figures.
        record: Its costs, or why it failed.
        calls, first, times, results: By size: the call, seconds of the first one, microseconds (device, latency, host)
            and the record of a report.
    """

    name: str
    prepare: Callable[[Sequence[BenchBatch]], object]
    call: Callable[[BenchBatch], Call]
    free: Callable[[], object] = lambda: None
    check: Callable[[Sequence[BenchBatch]], object] = lambda _: None
    preparing: Callable[[], AbstractContextManager[object]] = nullcontext
    redraws: Callable[[BenchBatch], str | None] = lambda _: None
    calls_until_ready: int = 1
    note: str | None = None
    record: WayRecord = field(init=False)
    calls: dict[int, Call] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    times: dict[int, tuple[list[float], list[float], list[float]]] = field(default_factory=dict)
    results: dict[int, PeerRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.record = WayRecord(name=self.name)


def ours(runner: GraphRunner) -> Baseline:
    """The runner itself, captured again."""

    def call(batch: BenchBatch) -> Call:
        given = batch.given_to(runner)
        copies = [(given[name], value) for name, value in batch.tensors.items() if given[name] is not value]
        arguments: dict[str, Any] = {**given, **batch.options}

        def run() -> Any:
            for view, value in copies:  # batches of other sizes lie on the same memory
                view.copy_(value)
            return runner(**arguments)

        return run if copies else lambda: runner(**arguments)

    def redraws(batch: BenchBatch) -> str | None:
        route = runner.route(batch.tensors, **batch.options)
        if route.mode is not CUDAGraphMode.NONE and route.descriptor.num_tokens != batch.size:
            return "a padded batch draws others"
        return _INDUCTOR_REDRAWS if runner.config.compilation.compiler == "inductor" else None

    return Baseline(OURS, lambda _: runner.recapture(), call, runner.suspend, redraws=redraws)


def eager(runner: GraphRunner) -> Baseline:
    """The model's own code."""
    return Baseline("eager", lambda _: None, lambda batch: lambda: batch.run(runner.model))


def bare(runner: GraphRunner) -> Baseline:
    """Graphs by hand, one for each size in one pool: copy each tensor into a static one, replay, and nothing else."""
    backend, model = runner.backend, runner.model
    captured: dict[int, tuple[Any, dict[str, torch.Tensor], Any]] = {}

    def prepare(batches: Sequence[BenchBatch]) -> None:
        pool = backend.new_pool()
        with backend.session():
            for batch in sorted(batches, key=lambda b: -b.size):
                static = {name: value.clone() for name, value in batch.tensors.items()}
                for _ in range(runner.config.compilation.cudagraph_num_of_warmups):
                    batch.run(model, static)
                graph = backend.new_graph(pool)
                try:
                    with backend.capturing(graph):
                        output = batch.run(model, static)
                except CgplanError:
                    raise
                except Exception as error:  # torch's own, which may name no operator
                    found = look(lambda: batch.run(model, static), ModelState.of({}, backend.device))  # noqa: B023
                    raise found.host_sync or error from None
                captured[batch.size] = graph, static, output

    def call(batch: BenchBatch) -> Call:
        graph, static, output = captured[batch.size]
        pairs = [(static[name], value) for name, value in batch.tensors.items()]
        replay = backend.launcher(graph)

        def run() -> Any:
            for target, value in pairs:
                target.copy_(value)
            replay()
            return output

        return run

    def free() -> None:
        while captured:
            backend.reset(captured.popitem()[1][0])

    return Baseline("bare", prepare, call, free)


def make_graphed_callables(runner: GraphRunner) -> Baseline:
    """``torch.cuda.make_graphed_callables``: one for each size in one pool, without gradients, torch's own warm-ups."""
    model, graphed = runner.model, dict[int, Callable[..., Any]]()

    def check(batches: Sequence[BenchBatch]) -> None:
        """A capture that fails in torch's function leaves torch's allocator unusable; ``bare`` cleans up."""
        _need_cuda(runner)
        trial = bare(runner)
        try:
            trial.prepare(batches)
        finally:
            trial.free()

    def prepare(batches: Sequence[BenchBatch]) -> None:
        pool = torch.cuda.graph_pool_handle()
        for batch in sorted(batches, key=lambda b: -b.size):

            def forward(*given: torch.Tensor, batch: BenchBatch = batch) -> Any:
                with torch.no_grad():
                    return batch.run(model, dict(zip(batch.tensors, given, strict=True)))

            static = tuple(value.clone() for value in batch.tensors.values())
            graphed[batch.size] = torch.cuda.make_graphed_callables(forward, static, pool=pool)

    def call(batch: BenchBatch) -> Call:
        function, tensors = graphed[batch.size], tuple(batch.tensors.values())
        return lambda: function(*tensors)

    return Baseline("make_graphed_callables", prepare, call, graphed.clear, check)


def reduce_overhead(runner: GraphRunner) -> Baseline:
    """``torch.compile(mode="reduce-overhead", dynamic=False)``, with a step marked before each call.

    Each size is compiled from an empty cache. Tensors that the model holds are marked static, as parameters are:
    torch leaves out graphs that write into other tensors.
    """
    model, marked = runner.model, list[torch.Tensor]()
    compiled: list[tuple[Callable[..., Any], Any]] = []  # (result of torch.compile, its code object)

    def prepare(_: Sequence[BenchBatch]) -> None:
        device = runner.backend.device
        held = [t for t in ModelState.of({"model": model}, device).tensors if t.device == device]
        marked.extend(t for t in held if not hasattr(t, _STATIC) and not isinstance(t, torch.nn.Parameter))
        for tensor in marked:
            torch._dynamo.mark_static_address(tensor, guard=False)

        def forward(**inputs: torch.Tensor) -> Any:
            return model(**inputs)

        own = FunctionType(forward.__code__.replace(), globals(), "forward", closure=forward.__closure__)
        compiled.append((torch.compile(own, mode="reduce-overhead", dynamic=False), own.__code__))

    @contextmanager
    def preparing() -> Iterator[None]:
        from torch._inductor.utils import fresh_inductor_cache

        before = _skipped_graphs()
        limits = {"recompile_limit": 1024, "fail_on_recompile_limit_hit": True}
        with torch._dynamo.config.patch(limits), fresh_inductor_cache():
            yield
        if skipped := _skipped_graphs() - before:
            found.note = f"torch left out {skipped} graphs and ran them eagerly; TORCH_LOGS=perf_hints says why"

    def call(batch: BenchBatch) -> Call:
        function = compiled[0][0]

        def run() -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return batch.run(function)

        return run

    def free() -> None:
        while marked:
            delattr(marked.pop(), _STATIC)
        while compiled:
            torch._C._dynamo.eval_frame.reset_code(compiled.pop()[1])
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()

    found = Baseline(
        "reduce-overhead", prepare, call, free, lambda _: _need_cuda(runner), preparing, lambda _: _INDUCTOR_REDRAWS
    )
    found.calls_until_ready = 2  # the first compiles and warms up, the second records
    return found


def _need_cuda(runner: GraphRunner) -> None:
    if runner.backend.device.type != "cuda":
        raise BackendError(f"it needs CUDA, and this is {runner.backend.name}", remedy="Run it on a GPU.")


def _skipped_graphs() -> int:
    return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"])


BASELINES: dict[str, Callable[[GraphRunner], Baseline]] = {
    OURS: ours,
    "eager": eager,
    "bare": bare,
    "make_graphed_callables": make_graphed_callables,
    "reduce-overhead": reduce_overhead,
}


def bench_baselines(
    runner: GraphRunner,
    batches: Sequence[BenchBatch],
    against: Sequence[str],
    *,
    seed: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> PeersRecord:
    """Measure a runner and other ways to run its model, on the same tensors.

    The runner is closed and captured again, twice: first each way is prepared with nothing else ready, which gives its
    costs; then all are ready at once and take turns, so that a slow moment of the machine hits all alike. Outputs and
    views that the runner handed out before are no longer valid. A way that fails is a record with the reason. Other
    graphs of the process should be closed before, see Note [Graphs of several baselines in one process].

    Args:
        runner: It is open again afterwards, unless its capture failed.
        batches: Example batches, one for each size.
        against: Names of baselines.
        seed: Of the order; drawn if absent.
        progress: Called with (done, total, name of the step) before each step.

    Raises:
        ConfigError: an unknown baseline.
    """
    names = check_peers(against)
    seed = random.SystemRandom().randrange(1 << 16) if seed is None else seed
    order = random.Random(seed)
    rounds = min(MOST_ROUNDS, runner.config.report.repeats)
    baselines = [BASELINES[name](runner) for name in (OURS, *names)]
    steps = itertools.count()

    def step(text: str) -> None:
        if progress:
            progress(next(steps), 2 * len(baselines) + rounds, text)

    with torch.no_grad():
        own = OwnResults(runner, batches, order.randrange(1 << 16))
        turns = _Turns(runner, batches, own, math.ceil(runner.config.report.repeats / rounds))
        runner.suspend()
        for baseline in sorted(order.sample(baselines, len(baselines)), key=lambda b: b.calls_until_ready):
            step(f"{baseline.name}, alone")
            turns.attempt(baseline, turns.price)
            if baseline.calls_until_ready == 1:  # else it stays ready
                turns.free(baseline)
        for baseline in baselines:
            step(f"{baseline.name}, beside the others")
            if not baseline.calls:
                turns.attempt(baseline, turns.prepare)
        for number in range(rounds):
            step(f"round {number + 1}")
            pairs = [(b, batch.size) for b in baselines if b.record.failure is None for batch in batches]
            for baseline, size in order.sample(pairs, len(pairs)):
                turns.attempt(baseline, turns.measure, size)
        for baseline in baselines:  # after all calls: a graph whose memory another one took would show here
            turns.attempt(baseline, turns.compare)
        for baseline in baselines[1:]:
            turns.free(baseline)
    return PeersRecord(
        seed=seed,
        rounds=rounds,
        repeats=rounds * turns.repeats,
        capture_seconds=turns.captured.session_seconds if turns.captured else None,
        keys=len(turns.captured.records) if turns.captured else 0,
        ways=tuple(b.record for b in baselines),
        records=tuple(b.results[batch.size] for batch in batches for b in baselines if b.record.failure is None),
    )


@dataclass(slots=True)
class _Turns:
    """Steps of a comparison; ``attempt`` runs one, and its error becomes the baseline's record."""

    runner: GraphRunner
    batches: Sequence[BenchBatch]
    own: OwnResults
    repeats: int
    captured: CaptureReport | None = None

    def attempt(self, baseline: Baseline, action: Callable[..., None], *args: Any) -> None:
        if baseline.record.failure is not None:
            return
        try:
            action(baseline, *args)
        except Exception as error:
            drop_locals(error)
            self.free(baseline)
            baseline.record = WayRecord(name=baseline.name, failure=_reason(error))

    def free(self, baseline: Baseline) -> None:
        if baseline.record.failure is not None:
            return
        baseline.calls.clear()
        try:
            baseline.free()
        except Exception as error:
            baseline.record = WayRecord(name=baseline.name, failure=_reason(error))

    def price(self, baseline: Baseline) -> None:
        """Seconds and memory with nothing else ready."""
        baseline.check(self.batches)
        before, start = used_bytes(self.runner.backend), time.perf_counter()
        self.prepare(baseline)
        seconds, taken = time.perf_counter() - start, used_bytes(self.runner.backend) - before
        if baseline.name == OURS:
            self.captured = self.runner.report
        baseline.record = WayRecord(name=baseline.name, ready_seconds=seconds, memory_bytes=taken, note=baseline.note)

    def prepare(self, baseline: Baseline) -> None:
        synchronize = self.runner.backend.synchronize
        with baseline.preparing():
            self.own.restore()
            baseline.prepare(self.batches)
            for batch in self.batches:
                call = baseline.call(batch)
                self.own.restore()
                synchronize()
                start = time.perf_counter()
                for _ in range(baseline.calls_until_ready):
                    call()
                synchronize()
                baseline.first.setdefault(batch.size, time.perf_counter() - start)
                baseline.calls[batch.size] = call

    def measure(self, baseline: Baseline, size: int) -> None:
        call, backend = baseline.calls[size], self.runner.backend
        self.own.restore()
        for _ in range(2):  # after another baseline, caches hold its data
            call()
        queued, _ = backend.time_calls(call, self.repeats, queued=True)
        latency, host = backend.time_calls(call, self.repeats)
        for kept, more in zip(baseline.times.setdefault(size, ([], [], [])), (queued, latency, host), strict=True):
            kept.extend(more)

    def compare(self, baseline: Baseline) -> None:
        for batch in self.batches:
            difference, reason = self.own.compare(batch.size, baseline.calls[batch.size], baseline.redraws(batch))
            device, latency, host = map(timing, baseline.times[batch.size])
            baseline.results[batch.size] = PeerRecord(
                name=baseline.name,
                num_tokens=batch.size,
                device=device,
                latency=latency,
                host=host,
                first_call_seconds=baseline.first[batch.size],
                deviation=difference,
                not_comparable=reason,
            )


class OwnResults:
    """Results of a model's own code on some batches, see Note [Comparing results].

    Args:
        runner: Knows the model and the device.
        batches: Are run here, four times each; afterwards they and the model's state are as they were.
        seed: Of compared calls.
    """

    def __init__(self, runner: GraphRunner, batches: Sequence[BenchBatch], seed: int) -> None:
        model, self._device, self._seed = runner.model, runner.backend.device, seed
        self._inputs = [(tensor, tensor.clone()) for batch in batches for tensor in batch.tensors.values()]
        self._written = ModelState.of({"model": model}, self._device)
        self._generators = self._written.generators
        self._outputs: dict[int, Any] = {}
        self._unsteady: set[int] = set()
        self._draws: set[int] = set()
        with random_state_kept(self._device, self._generators):
            free = runner.backend.memory().free or 4 << 30
            look(lambda: [batch.run(model) for batch in batches], self._written, free // 4)
            for batch in batches:
                first, second, other = (self._run(lambda: batch.run(model), seed + more) for more in (0, 0, 1))  # noqa: B023
                self._outputs[batch.size] = first
                if deviation(second, first):
                    self._unsteady.add(batch.size)
                elif deviation(other, first):
                    self._draws.add(batch.size)
            self.restore()

    def restore(self) -> None:
        """Give inputs and state the values of the beginning."""
        for tensor, before in self._inputs:
            tensor.copy_(before)
        self._written.restore()

    def compare(self, size: int, call: Call, redraws: str | None = None) -> tuple[float | None, str | None]:
        """The largest difference of a call's result from the model's own, or why there is none.

        Args:
            size: Of the batch.
            call: Runs it.
            redraws: Why it draws other random numbers than the model's own code; None if it does not.
        """
        if size in self._unsteady:
            return None, _UNSTEADY
        with random_state_kept(self._device, self._generators):
            found = deviation(self._run(call, self._seed), self._outputs[size])
            self.restore()
        if found is None:
            return None, _UNLIKE
        if found and redraws and size in self._draws:
            return None, f"the model draws random numbers, and {redraws}"
        return found, None

    def _run(self, call: Call, seed: int) -> Any:
        self.restore()
        torch.manual_seed(seed)
        for generator in self._generators:
            generator.manual_seed(seed)
        return tree_map_only(torch.Tensor, torch.Tensor.clone, call())


def used_bytes(backend: GraphBackend) -> int:
    """Device memory that is taken, once caches are given back; on the tape, what pools have reserved."""
    backend.synchronize()
    gc.collect()
    backend.release_cached()
    now = backend.memory()
    return now.reserved if now.free is None or not backend.supports("driver_bytes") else now.total - now.free


def timing(values: Sequence[float]) -> Timing:
    """Median and 99th percentile of some times."""
    return Timing(median=float(np.median(values)), p99=float(np.percentile(values, 99)))


def _reason(error: Exception) -> str:
    """One short line. A long message loses its middle: the reason may stand at either end."""
    text = error.message if isinstance(error, CgplanError) else f"{type(error).__name__}: {error}"
    line = " ".join((text.splitlines() or [""])[0].split())
    half = LONGEST_REASON // 2
    return line if len(line) <= LONGEST_REASON else f"{line[: half - 3]} ... {line[2 - half :]}"
