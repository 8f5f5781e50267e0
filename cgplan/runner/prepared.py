"""What a call needs, made once for each size of batch: where it goes, how it is copied in, run and cut.

Note [The hot path]
    A decode step of a small model takes the device less than a millisecond, so each microsecond that a call costs the
    host counts. A call therefore looks its batch up by what its shapes say, has all shapes, types and strides checked
    by one compiled function, copies by one launch, replays, and hands out views that exist. All else is made here, on
    the first call with a batch of that size, and kept. It holds as long as the graphs do: what frees or captures
    graphs drops all of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from cgplan.buffers.batch import exact_check
from cgplan.buffers.copier import BatchCopy, Copier, CopyIn
from cgplan.buffers.outputs import OutputRows
from cgplan.buffers.views import HandedViews
from cgplan.captures.model_graphs import GraphedModel
from cgplan.errors import CgplanError
from cgplan.graphs.pools import PoolUse
from cgplan.modes import CUDAGraphMode
from cgplan.runner.debug import DebugChecks
from cgplan.runner.routing import BatchRouter, Route
from cgplan.runner.stats import BatchCount, RunnerStats

if TYPE_CHECKING:
    from cgplan.runner.staging import StagedBuffers


_MOST_WAYS = 4
Values = Sequence[torch.Tensor]
Run = Callable[[CopyIn, Values, int], Any]


def on_device(values: Values, device: torch.device) -> list[torch.Tensor]:
    """The tensors, those on the host copied to the device."""
    return [value if value.device == device else value.to(device) for value in values]


def leave_alone(values: Values, stream: int) -> None:
    """How a batch that runs on its own tensors is copied in."""


@dataclass(slots=True, eq=False)
class PreparedBatch:
    """One size of batch, ready to run.

    Attributes:
        route: Where it goes.
        count: Its calls so far.
        copy: Brings it into the static buffers; None for a batch that runs eagerly, on its own tensors.
        run: Runs it, of (how to copy, the tensors, the current stream); the batch's output.
        replay, output: For a FULL graph with nothing to be done around it: launch it, and give its output's rows.
            ``run`` does the same, a little later. Elsewhere ``replay`` is None.
        output_stays: Whether ``output`` gives the same until the next call, so that it can be asked then.
        pad: How a batch is brought in that the caller has written into the static buffers.
        unchecked: Whether the model's addresses have to be checked before a call.
        ways: (whether tensors are like those of an earlier call, how such are copied in soonest).
    """

    route: Route
    count: BatchCount
    copy: BatchCopy | None
    run: Run
    replay: Callable[[], None] | None = None
    output: Callable[[], Any] = lambda: None
    output_stays: bool = False
    pad: CopyIn = leave_alone
    unchecked: bool = False
    ways: list[tuple[Callable[..., bool], CopyIn]] = field(default_factory=list)

    def look_again(self) -> None:
        """Have the model's addresses checked before the next call."""
        self.unchecked = self.copy is not None  # what runs eagerly has no addresses

    def way(self, values: Values) -> CopyIn:
        """How to copy these tensors, which fit the batch, in; remembered for those that are like them."""
        copy = leave_alone if self.copy is None else self.copy.quickest(values)
        check = exact_check(values)
        if check is not None:
            self.ways = [*self.ways[1 - _MOST_WAYS :], (check, copy)]
        return copy


class BatchPreparer:
    """Prepares batches for a runner, from its graphs as they are now.

    Args:
        graphed: The model with its graphs.
        outputs: How outputs are cut.
        copier: Brings batches into the static buffers.
        router: Says why no graph serves a batch.
        stats: Where calls are counted.
        debug: Checks around each replay, if any.
        nvtx: Whether each call is a named range in profilers.
    """

    def __init__(
        self,
        graphed: GraphedModel,
        outputs: OutputRows,
        copier: Copier,
        router: BatchRouter,
        stats: RunnerStats,
        debug: DebugChecks | None,
        *,
        nvtx: bool,
    ) -> None:
        self._graphed, self._outputs, self._copier, self._router = graphed, outputs, copier, router
        self._stats, self._debug, self._nvtx = stats, debug, nvtx
        self._names = tuple(graphed.buffers.buffers)

    def prepare(self, route: Route) -> PreparedBatch:
        """A batch of that size.

        Raises:
            DispatchMissError: no graph serves it and ``compilation.on_miss`` is ``error``.
        """
        graphed, descriptor = self._graphed, route.descriptor
        tokens, reqs = route.batch.num_tokens, route.batch.num_reqs
        eager = route.mode is CUDAGraphMode.NONE
        reason = self._router.reason_for_none(route, graphed.config.compilation.on_miss) if eager else None
        count = self._stats.count_of(
            tokens, reqs, route.uniform, route.num_active_loras, route.mode, descriptor, reason
        )
        if eager:
            return PreparedBatch(route, count, None, self._named(route, self._eager(route, count)))
        copy = self._copier.prepare(tokens, reqs or 0, descriptor.num_tokens, graphed.padded_reqs(descriptor))
        entry = graphed.wrapper.entries.get(descriptor) if route.mode is CUDAGraphMode.FULL else None
        if entry is None or self._debug is not None:
            run = self._named(route, self._padded(route, count))
            return PreparedBatch(route, count, copy, run, pad=copy.pad, unchecked=True)
        replay = graphed.backend.launcher(entry.graph)
        output = self._outputs.cutter(entry.output, tokens, reqs)

        def run_graph(copy_in: CopyIn, values: Values, stream: int) -> Any:
            copy_in(values, stream)
            count.calls += 1
            replay()
            return output()

        run = self._named(route, run_graph)
        direct = None if self._nvtx else replay
        stays = direct is not None and not self._outputs.clone
        return PreparedBatch(route, count, copy, run, direct, output, stays, pad=copy.pad, unchecked=True)

    def _eager(self, route: Route, count: BatchCount) -> Run:
        graphed, names, unpadded, clone = self._graphed, self._names, route.unpadded, self._outputs.clone

        def run(copy_in: CopyIn, values: Values, stream: int) -> Any:
            copy_in(values, stream)
            count.calls += 1
            tensors = zip(names, on_device(values, graphed.backend.device), strict=True)
            output = graphed.run_eager(unpadded, dict(tensors))
            return tree_map_only(torch.Tensor, torch.clone, output) if clone else output

        return run

    def _padded(self, route: Route, count: BatchCount) -> Run:
        """PIECEWISE, where the model's own code runs with graphs inside, and whatever debug mode looks at."""
        graphed, outputs, debug, copier = self._graphed, self._outputs, self._debug, self._copier
        mode, descriptor, batch = route.mode, route.descriptor, route.batch
        padded_reqs, names = graphed.padded_reqs(descriptor), self._names
        views = HandedViews(lambda: tuple(graphed.views(descriptor).values()))
        entry = graphed.wrapper.entries.get(descriptor) if mode is CUDAGraphMode.FULL else None

        def replay() -> Any:
            if entry is not None:
                graphed.backend.replay(entry.graph)
                return entry.output
            tensors = dict(zip(names, views.tensors(), strict=True))
            before = graphed.buffers.versions()
            try:
                output = graphed.run_graphed(mode, descriptor, tensors)
            finally:
                copier.note_writes(before)
            outputs.check(output, descriptor, padded_reqs)
            return output

        def cut(output: Any) -> Any:
            return outputs.cut(output, batch.num_tokens, batch.num_reqs)

        def run(copy_in: CopyIn, values: Values, stream: int) -> Any:
            copy_in(values, stream)
            count.calls += 1
            if debug is not None:
                return debug.replay(mode, descriptor, replay, cut)
            return cut(replay())

        return run

    def _named(self, route: Route, run: Run) -> Run:
        """The same as a named range, where that is asked for."""
        if not self._nvtx:
            return run
        annotate, name = self._graphed.backend.annotate, f"cgplan {route.mode} {route.descriptor}"

        def run_named(copy_in: CopyIn, values: Values, stream: int) -> Any:
            with annotate(name):
                return run(copy_in, values, stream)

        return run_named


class BatchLauncher:
    """Runs prepared batches of one model, one at a time.

    Args:
        graphed: The model with its graphs.
        use: Who runs the graphs of its pools; shared by the runners of a shared pool.
        name: What messages call the runner.

    Attributes:
        acquire, release: Of the lock that each call takes; it is never waited for.
        use, name: As given.
        marks: How far batches reach into the static buffers.
        current_stream: The handle of the current stream.
        last_staged: The staged buffers whose output is the latest.
    """

    def __init__(self, graphed: GraphedModel, use: PoolUse, name: str) -> None:
        self.acquire, self.release = use.acquire, use.release
        self.use, self.name = use, name
        self.marks = graphed.buffers.marks
        self.current_stream = graphed.backend.stream_getter()
        self.last_staged: weakref.ref[StagedBuffers] | None = None
        self._graphed = graphed
        kind = graphed.backend.device.type  # without an argument it answers for CUDA, in half the time
        self._is_autocast = torch.is_autocast_enabled if kind == "cuda" else partial(torch.is_autocast_enabled, kind)
        self._is_plain = False  # whether a call without autocast has passed
        self._checks_once = graphed.config.compilation.address_policy != "always"

    def launch(self, batch: PreparedBatch, copy_in: CopyIn, values: Values) -> Any:
        """Copy a batch in and run it; the lock is held.

        Raises:
            CgplanError: the stream of the call before is another one, and still has work.
            CaptureError, AddressError: as GraphRunner's call.
        """
        stream, use = self.current_stream(), self.use
        if stream != use.stream or use.user is not self.name:
            use.take_stream(stream, self.name, self._graphed.backend)
        if not self._is_plain or self._is_autocast():
            self._graphed.check_autocast()
            self._is_plain = not self._is_autocast()
        if batch.unchecked:
            self._check_addresses(batch)
        replay = batch.replay
        if replay is None:
            return batch.run(copy_in, values, stream)
        copy_in(values, stream)
        batch.count.calls += 1
        replay()
        return batch.output()

    def _check_addresses(self, batch: PreparedBatch) -> None:
        batch.unchecked = not self._checks_once  # ahead of the check: another thread may ask for one meanwhile
        try:
            self._graphed.check_addresses(batch.route.mode, batch.route.descriptor)
        except BaseException:
            batch.unchecked = True
            raise

    def take_stream(self) -> None:
        """Note that the caller writes on the current stream; the lock is held. Raises as ``launch``."""
        stream, use = self.current_stream(), self.use
        if stream != use.stream or use.user is not self.name:
            use.take_stream(stream, self.name, self._graphed.backend)

    def extend_marks(self, batch: PreparedBatch) -> None:
        """Note that rows of a batch may have been written, and no padding was reset."""
        self.marks.extend(batch.route.batch.num_tokens, batch.route.batch.num_reqs or 0)

    def check(self) -> None:
        """What ``launch`` checks first, for work ahead of it; the lock is held. Raises as it does."""
        self.take_stream()
        self._graphed.check_autocast()

    def under_way(self) -> CgplanError:
        """The error of a call inside a call, or from a second thread."""
        return self.use.under_way(self.name)
