"""A runner beside its baselines: other ways to run its model, each with its costs, its speed and
its results.

Note [Graphs of several baselines in one process]
    inductor's CUDA graphs drop the process's cuBLAS workspaces around each recording, also those
    that other graphs were captured with. So ``reduce-overhead`` is prepared while no other graph is
    there, stays ready, and records nothing later. Dynamo is never reset, which would drop the
    traces of cgplan's runners: a baseline drops its own code object.

Note [Comparing results]
    A forward may write into its inputs and its model's tensors, and draw random numbers. So each
    compared call starts from the same inputs, state and seed. A model whose own code gives other
    results from there the second time cannot be compared: its state lies where no fingerprint looks
    (another library's generator, atomics). Random numbers are the same for the same operators on
    the same shapes; padding, and inductor's generator, change them.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cgplan.backends import GraphBackend
from cgplan.backends.context import forward_context
from cgplan.buffers.compare import deviation
from cgplan.buffers.static import Tensors
from cgplan.captures.failures import drop_locals
from cgplan.errors import BackendError, CgplanError
from cgplan.graphs.ambient import random_state_kept
from cgplan.graphs.fingerprint import Fingerprint
from cgplan.graphs.footprint import look
from cgplan.graphs.put_back import PutBack
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.piecewise.trace import with_own_code
from cgplan.reports.records import (
    OURS,
    BaselineRecord,
    BaselinesRecord,
    CaptureReport,
    Timing,
    WayRecord,
)
from cgplan.runner.runner import GraphRunner

Call = Callable[[], Any]
MOST_ROUNDS = 5
LONGEST_REASON = 160  # characters
_REDRAWN = "the model draws random numbers, and padding and inductor's code draw others"
_UNLIKE = (
    "its output has another structure, shape, dtype or value beside tensors than that of the "
    "model's own code, or "
    "holds no tensor"
)
_UNSTEADY = (
    "the model's own code, run twice from the same inputs, state and seed, gives different results"
)
_STATIC = "_dynamo_static_input_type"  # where mark_static_address leaves its mark


@dataclass(frozen=True)
class BenchBatch:
    """One batch that is measured: its tensors on the device, and the other arguments of a runner's
    call.

    Attributes:
        size: Tokens, unpadded.
        descriptor: The batch in an eager forward's context.
    """

    size: int
    inputs: Tensors
    metadata: Tensors
    options: Mapping[str, Any]
    descriptor: BatchDescriptor

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.inputs, **self.metadata}

    def run(self, model: Callable[..., Any], tensors: Tensors | None = None) -> Any:
        """Call a model on the batch, or on other tensors in its place, in the forward context that
        it may read.
        """
        given = self.tensors if tensors is None else tensors
        with forward_context(
            CUDAGraphMode.NONE, self.descriptor, {name: given[name] for name in self.metadata}
        ):
            return model(**{name: given[name] for name in self.inputs})

    def given_to(self, runner: GraphRunner) -> dict[str, Tensor]:
        """The tensors of a runner's call. A runner that copies no inputs gets views of its static
        buffers, filled.
        """
        if (
            runner.config.compilation.cudagraph_copy_inputs
            or self.size > runner.wanted.max_capture_size
        ):
            return self.tensors
        views = runner.input_views(self.size, self.descriptor.num_reqs)
        for name, value in self.tensors.items():
            views[name].copy_(value)
        return views


@dataclass(slots=True)
class Way:
    """One way to run the model, with its figures by size.

    Attributes:
        record: Its costs, or why it failed.
        undo: Gives its memory back.
        calls: Run a batch; the values of its tensors may change from call to call.
        first: Seconds of the first call, with the compilation and recording that happen in it.
        times: Microseconds: device, latency, host.
        results: Records of a report.
        note: For the reader of its figures.
    """

    record: WayRecord
    undo: ExitStack = field(default_factory=ExitStack)
    calls: dict[int, Call] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    times: dict[int, tuple[list[float], list[float], list[float]]] = field(default_factory=dict)
    results: dict[int, BaselineRecord] = field(default_factory=dict)
    note: str | None = None

    @property
    def stays_ready(self) -> bool:  # Note [Graphs of several baselines in one process]
        return self.record.name == "reduce-overhead"

    def attempt(self, action: Callable[..., None], *args: Any) -> None:
        """Do something with it, unless it failed before. An error frees it and becomes its
        record.
        """
        if self.record.failure is not None:
            return
        try:
            action(self, *args)
        except Exception as error:
            drop_locals(error)
            with suppress(Exception):
                self.close()
            # A long message loses its middle: the reason may stand at either end.
            text = (
                error.message
                if isinstance(error, CgplanError)
                else f"{type(error).__name__}: {error}"
            )
            line, half = " ".join((text.splitlines() or [""])[0].split()), LONGEST_REASON // 2
            if len(line) > LONGEST_REASON:
                line = f"{line[: half - 3]} ... {line[2 - half :]}"
            self.record = WayRecord(name=self.record.name, failure=line)

    def close(self) -> None:
        self.calls.clear()
        self.undo.close()


def ours(bench: Comparison, way: Way) -> None:
    """The runner itself, captured again."""
    runner = bench.runner
    way.undo.callback(runner.suspend)
    runner.recapture()

    def call_of(batch: BenchBatch) -> Call:
        given = batch.given_to(runner)
        copies = [
            (given[name], value)
            for name, value in batch.tensors.items()
            if given[name] is not value
        ]
        arguments: dict[str, Any] = {**given, **batch.options}

        def run() -> Any:
            for view, value in copies:  # batches of other sizes lie on the same memory
                view.copy_(value)
            return runner(**arguments)

        return run

    bench.first_calls(way, call_of)


def eager(bench: Comparison, way: Way) -> None:
    """The model's own code."""
    bench.first_calls(way, lambda batch: lambda: batch.run(bench.runner.model))


def bare(bench: Comparison, way: Way) -> None:
    """Graphs by hand, one for each size in one pool: copy each tensor into a static one, replay,
    and nothing else.
    """
    backend, model = bench.runner.backend, bench.runner.model
    pool, captured = backend.new_pool(), dict[int, tuple[Any, dict[str, Tensor], Any]]()
    with backend.session():
        for batch in sorted(bench.batches, key=lambda b: -b.size):
            static = {name: value.clone() for name, value in batch.tensors.items()}
            for _ in range(bench.runner.config.compilation.cudagraph_num_of_warmups):
                batch.run(model, static)
            graph = backend.new_graph(pool)
            try:
                with backend.capturing(graph):
                    output = batch.run(model, static)
            except CgplanError:
                raise
            except Exception as error:  # torch's own, which may name no operator
                kept = PutBack(Fingerprint.of({}, backend.device), 0)
                found = look(partial(batch.run, model, static), kept)
                raise found.host_sync or error from None
            way.undo.callback(backend.reset, graph)
            captured[batch.size] = graph, static, output

    def call_of(batch: BenchBatch) -> Call:
        graph, static, output = captured[batch.size]
        pairs = [(static[name], value) for name, value in batch.tensors.items()]
        replay = backend.launcher(graph)

        def run() -> Any:
            for target, value in pairs:
                target.copy_(value)
            replay()
            return output

        return run

    bench.first_calls(way, call_of)


def make_graphed_callables(bench: Comparison, way: Way) -> None:
    """``torch.cuda.make_graphed_callables``: one for each size in one pool, without gradients,
    torch's own warm-ups.
    """
    graphed, pool = dict[int, Callable[..., Any]](), torch.cuda.graph_pool_handle()
    way.undo.callback(graphed.clear)
    for batch in sorted(bench.batches, key=lambda b: -b.size):

        def forward(*given: Tensor, batch: BenchBatch = batch) -> Any:
            with torch.no_grad():
                return batch.run(bench.runner.model, dict(zip(batch.tensors, given, strict=True)))

        static = tuple(value.clone() for value in batch.tensors.values())
        graphed[batch.size] = torch.cuda.make_graphed_callables(forward, static, pool=pool)

    def call_of(batch: BenchBatch) -> Call:
        function, tensors = graphed[batch.size], tuple(batch.tensors.values())
        return lambda: function(*tensors)

    bench.first_calls(way, call_of)


def reduce_overhead(bench: Comparison, way: Way) -> None:
    """``torch.compile(mode="reduce-overhead", dynamic=False)``, with a step marked before each
    call.

    Each size is compiled from an empty cache. Tensors that the model holds are marked static, as
    parameters are: torch leaves out graphs that write into other tensors.
    """
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees
    from torch._inductor.utils import fresh_inductor_cache

    model, device = bench.runner.model, bench.runner.backend.device
    for tensor in Fingerprint.of({"model": model}, device).tensors:
        if (
            tensor.device == device
            and not hasattr(tensor, _STATIC)
            and not isinstance(tensor, torch.nn.Parameter)
        ):
            torch._dynamo.mark_static_address(tensor, guard=False)
            way.undo.callback(delattr, tensor, _STATIC)

    own = with_own_code(model)
    compiled = torch.compile(own, mode="reduce-overhead", dynamic=False)
    way.undo.callback(reset_cudagraph_trees)
    way.undo.callback(torch._C._dynamo.eval_frame.reset_code, own.__code__)

    def call_of(batch: BenchBatch) -> Call:
        def run() -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return batch.run(compiled)

        return run

    counters = torch._dynamo.utils.counters["inductor"]
    before, limits = (
        counters["cudagraph_skips"],
        {"recompile_limit": 1024, "fail_on_recompile_limit_hit": True},
    )
    with torch._dynamo.config.patch(limits), fresh_inductor_cache():
        bench.first_calls(way, call_of, 2)  # the first compiles and warms up, the second records
    if skipped := counters["cudagraph_skips"] - before:
        way.note = (
            f"torch left out {skipped} graphs and ran them eagerly; TORCH_LOGS=perf_hints says why"
        )


# Each prepares all sizes, calls each once, and pushes on ``way.undo`` what gives the memory back.
BASELINES: dict[str, Callable[[Comparison, Way], None]] = {
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
) -> BaselinesRecord:
    """Measure a runner and other ways to run its model, on the same tensors.

    The runner is closed and captured again, twice: first each way is prepared with nothing else
    ready, which gives its costs; then all are ready at once and take turns, so that a slow moment
    of the machine hits all alike. Outputs and views that the runner handed out before are no longer
    valid. A way that fails is a record with the reason. Other graphs of the process should be
    closed before, see Note [Graphs of several baselines in one process].

    Args:
        runner: It is open again afterwards, unless its capture failed.
        batches: Example batches, one for each size.
        against: Names of BASELINES.
        seed: Of the order; drawn if absent.
        progress: Called with (done, total, name of the step) before each step.
    """
    seed = random.SystemRandom().randrange(1 << 16) if seed is None else seed
    order, repeats = random.Random(seed), runner.config.report.repeats
    rounds = min(MOST_ROUNDS, repeats)
    ways = [Way(WayRecord(name=name)) for name in (OURS, *against)]
    steps = itertools.count()

    def step(text: str) -> None:
        if progress:
            progress(next(steps), 2 * len(ways) + rounds, text)

    with torch.no_grad():
        bench = Comparison(runner, batches, order.randrange(1 << 16), math.ceil(repeats / rounds))
        runner.suspend()
        for way in sorted(order.sample(ways, len(ways)), key=lambda w: w.stays_ready):
            step(f"{way.record.name}, alone")
            way.attempt(bench.price)
            if not way.stays_ready:
                way.attempt(Way.close)
        for way in ways:
            step(f"{way.record.name}, beside the others")
            if not way.stays_ready:
                way.attempt(bench.prepare)
        for number in range(rounds):
            step(f"round {number + 1}")
            pairs = [(w, batch.size) for w in ways if w.record.failure is None for batch in batches]
            for way, size in order.sample(pairs, len(pairs)):
                way.attempt(bench.measure, size)
        for way in ways:  # after all calls: a graph whose memory another one took would show here
            way.attempt(bench.compare)
        for way in ways[1:]:
            way.attempt(Way.close)
    return BaselinesRecord(
        seed=seed,
        rounds=rounds,
        repeats=rounds * bench.repeats,
        capture_seconds=bench.captured.session_seconds if bench.captured else None,
        keys=len(bench.captured.records) if bench.captured else 0,
        ways=tuple(w.record for w in ways),
        records=tuple(
            w.results[batch.size] for batch in batches for w in ways if w.record.failure is None
        ),
    )


class Comparison:
    """A runner, some batches, and the results of the model's own code on them, see Note [Comparing
    results].

    Args:
        runner: Knows the model and the device.
        batches: Are run here, four times each; afterwards they and the model's state are as they
            were.
        seed: Of compared calls.
        repeats: Timed calls in a turn.

    Attributes:
        captured: The report of the runner's capture with nothing else ready.
    """

    captured: CaptureReport | None = None

    def __init__(
        self, runner: GraphRunner, batches: Sequence[BenchBatch], seed: int = 0, repeats: int = 1
    ) -> None:
        self.runner, self.batches, self.repeats, self._seed = runner, batches, repeats, seed
        self._inputs = [
            (tensor, tensor.clone()) for batch in batches for tensor in batch.tensors.values()
        ]
        limit = (runner.backend.memory().free or 4 << 30) // 4
        self._state = PutBack(Fingerprint.of({"model": runner.model}, runner.backend.device), limit)
        self._generators = self._state.before.generators
        self._outputs: dict[int, Any] = {}
        self._unsteady, self._draws = set[int](), set[int]()
        with random_state_kept(runner.backend.device, self._generators):
            look(lambda: [batch.run(runner.model) for batch in batches], self._state)
            for batch in batches:
                first, second, other = (
                    self._run(lambda: batch.run(runner.model), seed + more)  # noqa: B023
                    for more in (0, 0, 1)
                )
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
        self._state.restore()

    def first_calls(self, way: Way, call_of: Callable[[BenchBatch], Call], times: int = 1) -> None:
        """Run each batch as often as it takes until its calls are as they will be from then on."""
        synchronize = self.runner.backend.synchronize
        for batch in self.batches:
            call = way.calls[batch.size] = call_of(batch)
            self.restore()
            synchronize()
            start = time.perf_counter()
            for _ in range(times):
                call()
            synchronize()
            way.first.setdefault(batch.size, time.perf_counter() - start)

    def prepare(self, way: Way) -> None:
        self.restore()
        BASELINES[way.record.name](self, way)

    def price(self, way: Way) -> None:
        """Seconds and memory with nothing else ready."""
        name, backend = way.record.name, self.runner.backend
        if name in ("make_graphed_callables", "reduce-overhead") and backend.device.type != "cuda":
            raise BackendError(
                f"it needs CUDA, and this is {backend.name}", remedy="Run it on a GPU."
            )
        # a capture that fails in it leaves torch's allocator unusable
        if name == "make_graphed_callables":
            trial = Way(WayRecord(name="bare"))
            try:
                bare(self, trial)
            finally:
                trial.close()
        before, start = used_bytes(backend), time.perf_counter()
        self.prepare(way)
        seconds, taken = time.perf_counter() - start, used_bytes(backend) - before
        if name == OURS:
            self.captured = self.runner.report
        way.record = WayRecord(name=name, ready_seconds=seconds, memory_bytes=taken, note=way.note)

    def measure(self, way: Way, size: int) -> None:
        call, backend = way.calls[size], self.runner.backend
        self.restore()
        for _ in range(2):  # after another baseline, caches hold its data
            call()
        queued, _ = backend.time_calls(call, self.repeats, queued=True)
        latency, host = backend.time_calls(call, self.repeats)
        for kept, more in zip(
            way.times.setdefault(size, ([], [], [])), (queued, latency, host), strict=True
        ):
            kept.extend(more)

    def compare(self, way: Way) -> None:
        for size in self._outputs:
            difference, reason = self._deviation(size, way)
            device, latency, host = map(timing, way.times[size])
            way.results[size] = BaselineRecord(
                name=way.record.name,
                num_tokens=size,
                device=device,
                latency=latency,
                host=host,
                first_call_seconds=way.first[size],
                deviation=difference,
                not_comparable=reason,
            )

    def _deviation(self, size: int, way: Way) -> tuple[float | None, str | None]:
        """The largest difference of a call's result from the model's own, or why there is none."""
        if size in self._unsteady:
            return None, _UNSTEADY
        with random_state_kept(self.runner.backend.device, self._generators):
            found = deviation(self._run(way.calls[size], self._seed), self._outputs[size])
            self.restore()
        if found is None:
            return None, _UNLIKE
        is_alike = (
            self.runner.config.compilation.compiler == "eager"
            and size in self.runner.wanted.capture_sizes
        )
        redraws = way.stays_ready or (way.record.name == OURS and not is_alike)
        return (None, _REDRAWN) if found and redraws and size in self._draws else (found, None)

    def _run(self, call: Call, seed: int) -> Any:
        self.restore()
        torch.manual_seed(seed)
        for generator in self._generators:
            generator.manual_seed(seed)
        return tree_map_only(Tensor, Tensor.clone, call())


def used_bytes(backend: GraphBackend) -> int:
    """Device memory that is taken, once caches are given back; on the tape, what pools have
    reserved.
    """
    backend.synchronize()
    gc.collect()
    backend.release_cached()
    now = backend.memory()
    return (
        now.reserved
        if now.free is None or not backend.supports("driver_bytes")
        else now.total - now.free
    )


def timing(values: Sequence[float]) -> Timing:
    """Median and 99th percentile of some times."""
    return Timing(median=float(np.median(values)), p99=float(np.percentile(values, 99)))
