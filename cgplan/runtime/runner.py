"""GraphRunner: a model with its graphs. A call dispatches, copies in, pads, replays and slices."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch

from cgplan.descriptors import BatchDescriptor
from cgplan.errors import InputError
from cgplan.graphs.copying import CopyIn
from cgplan.modes import CUDAGraphMode
from cgplan.runtime.dispatching import Route, as_flag, as_rows
from cgplan.runtime.prepared import BatchPreparer, PreparedBatch, Values, on_device
from cgplan.runtime.runner_state import NONE_YET, RunnerState
from cgplan.runtime.staging import StagedBuffers
from cgplan.runtime.stats import RunnerStats

MOST_PREPARED = 4096  # sizes of batches that are kept ready; the one that was prepared first goes first
_NOT_MET = (LookupError, AttributeError, TypeError, RuntimeError, ValueError)  # what looking up a wrong call may raise


class GraphRunner(RunnerState):
    """Runs a model by captured graphs. A CaptureSession makes it; ``close`` frees what it owns.

    It owns the static buffers, the graphs and their pools. Outputs are borrowed unless ``compilation.outputs`` is
    ``clone``: views of graph memory, overwritten by the next call of this runner, and the same tensor objects each
    time. One whose shape, strides or requires_grad was changed in place is left to its holder, and the next call
    gives another. (Other memory of the same shape, given to one by ``.data =`` or ``set_``, would not be noticed.)
    With ``capture_policy: lazy`` a call may capture the key that its batch asks for; ``replan`` exchanges the
    graphs of an adaptive runner. Not for use from several threads, and on one stream at a time: a call from another
    stream is refused while the stream of the last call still has work.

    Attributes:
        stats: What calls were answered with so far.
    """

    def __call__(
        self, *args: Any, uniform_decode: bool | None = None, num_active_loras: int = 0, **inputs: torch.Tensor
    ) -> Any:
        """Run one batch.

        Args:
            inputs: Every declared input and metadata tensor, by name, unpadded, on the runner's device or on the host.
                Host tensors may be written to as soon as the call has returned.
            uniform_decode: Whether every request has ``plan.query_len`` tokens. Absent: for a query length of 1 it
                follows from the counts; for a longer one the batch is taken as mixed.
            num_active_loras: Distinct adapters in the batch.

        Returns:
            What the model returns, with the padding sliced off; see the class for how long it is valid.

        Raises:
            InputError: a tensor does not match its declaration; nothing was launched.
            CaptureError: autocast is not as it was at capture.
            AddressError: memory that the graph uses has moved, see ``compilation.address_check``.
            DispatchMissError: no graph serves the batch and ``compilation.on_miss`` is ``error``.
            CgplanError: the runner is closed, or another call is under way.
        """
        if args:
            raise InputError("the runner takes no positional arguments", remedy="Pass every input by its name.")
        if not self._acquire(False):
            raise self._launcher.under_way()
        try:
            stats, began = self.stats, 0
            if stats.until_timed:
                stats.until_timed -= 1
            else:
                began = perf_counter_ns()
            copy_in: CopyIn | None = None
            try:  # see Note [The hot path] in prepared.py
                values: Values = self._pick(inputs)
                uniform, loras, is_alike, batch, way = self._recent
                if len(inputs) != self._num_inputs:
                    pass
                elif uniform is uniform_decode and loras is num_active_loras and is_alike(*values):
                    copy_in = way
                else:
                    # What is equal to a count or flag need not be one: 1.0 and True are no counts.
                    if type(num_active_loras) is not int or not (
                        uniform_decode is None or type(uniform_decode) is bool
                    ):
                        uniform_decode = as_flag(uniform_decode)
                        num_active_loras = as_rows("num_active_loras", num_active_loras)
                    i, dim, j, other = self._counted
                    asked = values[i].shape[dim], values[j].shape[other], uniform_decode, num_active_loras
                    batch = self._batches[asked]
                    for is_alike, way in batch.ways:
                        if is_alike(*values):
                            copy_in = way
                            self._recent = uniform_decode, num_active_loras, is_alike, batch, way
                            break
            except _NOT_MET:
                pass
            if copy_in is None:
                _, _, is_alike, batch, way = NONE_YET  # it may capture, and graphs wait for outputs that are held here
                batch, values, copy_in = self._look_closer(inputs, uniform_decode, num_active_loras)
            output = self._launch(batch, copy_in, values)
            if began:
                stats.add_time(perf_counter_ns() - began)
            return output
        finally:
            self._release()

    def _look_closer(
        self, inputs: Mapping[str, Any], uniform_decode: bool | None, num_active_loras: int
    ) -> tuple[PreparedBatch, Values, CopyIn]:
        """Check a call that is not like an earlier one, and prepare its batch if it is the first of its size."""
        uniform_decode, num_active_loras = as_flag(uniform_decode), as_rows("num_active_loras", num_active_loras)
        route, demand = self.route(inputs, uniform_decode, num_active_loras), self._demand
        values: Values = self._pick(inputs)
        if demand.may_capture(route):
            values = demand.safe(values)
            self._capture_for(route)
            route = self.route(inputs, uniform_decode, num_active_loras)
        i, dim, j, other = self._counted
        asked = (values[i].shape[dim], values[j].shape[other], uniform_decode, num_active_loras)
        batch = self._batches.get(asked)
        if batch is None:
            batch = self._preparer.prepare(route)
            if not demand.is_open(route):
                while len(self._batches) >= MOST_PREPARED:
                    self._batches.pop(next(iter(self._batches)))
                self._batches[asked] = batch
        return batch, values, batch.way(values)

    def _capture_for(self, route: Route) -> None:
        """Capture what a batch asks for; the lock is held."""
        self._launcher.check()
        try:
            if route.wanted is not None:
                self.graphs_changed()  # what is prepared holds outputs, and a graph that is given up waits for its own
                self._demand.capture(route.wanted)
        finally:
            self.graphs_changed()

    def stage(
        self,
        num_tokens: int,
        num_reqs: int | None = None,
        uniform_decode: bool | None = None,
        num_active_loras: int = 0,
    ) -> StagedBuffers:
        """The static buffers' own views, to be written in place: no copy is made.

        ::

            with runner.stage(num_tokens=13) as buffers:
                buffers["input_ids"].copy_(ids)
            logits = buffers.output

        Leaving the block runs the batch, see StagedBuffers. With ``capture_policy: lazy`` its key is captured here,
        ahead of the block, unless another block is open.

        Args:
            num_tokens: Tokens of the batch, at most what the static buffers hold: the largest size of the session. A
                batch that no graph serves runs eagerly, as in a call.
            num_reqs: Requests; needed where an input counts them and it does not follow from the tokens.
            uniform_decode, num_active_loras: As for a call.

        Raises:
            InputError: there cannot be such a batch, or it does not fit into the static buffers.
            DispatchMissError, CgplanError: As for a call.
        """
        counts = (num_tokens, num_reqs, uniform_decode, num_active_loras)
        if (
            num_tokens.__class__ is int  # 1.0 and True are equal to 1, and no counts; sooner than by type()
            and num_active_loras.__class__ is int
            and (num_reqs is None or num_reqs.__class__ is int)
            and (uniform_decode is True or uniform_decode is None or uniform_decode is False)
        ):
            try:
                return self._staged[counts]
            except _NOT_MET:
                pass
        return self._new_stage(*counts)

    def _new_stage(
        self, num_tokens: int, num_reqs: int | None, uniform_decode: bool | None, num_active_loras: int
    ) -> StagedBuffers:
        self._check_open()
        num_tokens, uniform_decode = as_rows("num_tokens", num_tokens), as_flag(uniform_decode)
        num_reqs = None if num_reqs is None else as_rows("num_reqs", num_reqs)
        num_active_loras = as_rows("num_active_loras", num_active_loras)
        counts = (num_tokens, num_reqs, uniform_decode, num_active_loras)
        if (known := self._staged.get(counts)) is not None:  # from numbers of other classes
            return known
        route, demand = self._router.of_counts(*counts), self._demand
        if demand.may_capture(route) and self._acquire(False):  # not inside another block, whose rows are written
            try:
                self._capture_for(route)
            finally:
                self._release()
        kept, preparer = self._staged, self._preparer  # which are exchanged together with the graphs
        route = self._router.of_counts(*counts)
        staged = self._build_stage(route, preparer)
        if not demand.is_open(route):
            while len(kept) >= MOST_PREPARED:
                kept.pop(next(iter(kept)))
            kept[counts] = staged
        if len(self._handed) > 2 * MOST_PREPARED:
            self._handed = [reference for reference in self._handed if reference() is not None]
        return staged

    def _build_stage(self, route: Route, preparer: BatchPreparer) -> StagedBuffers:
        """Blocks may be made inside of another one, so without the lock: whether another thread has exchanged the
        graphs meanwhile is looked at last, once it would find the block that it has to retire.
        """
        launcher, graphed, tokens = self._launcher, self._graphed, route.batch.num_tokens
        self._check_open()
        try:
            views = partial(graphed.buffers.views, tokens, route.batch.num_reqs or 0)
            staged = StagedBuffers(launcher, preparer.prepare(route), views)
        except Exception:
            if self._preparer is preparer:
                raise
            raise launcher.under_way() from None
        self._handed.append(weakref.ref(staged))
        if self._preparer is not preparer:
            staged.retire()
            raise launcher.under_way()
        return staged

    def run_eagerly(
        self,
        *,
        padded: bool = True,
        uniform_decode: bool | None = None,
        num_active_loras: int = 0,
        **inputs: torch.Tensor,
    ) -> Any:
        """As a call, but the model's own code runs and no graph. Padded as a call pads, it is what a replay must equal.

        Args:
            inputs, uniform_decode, num_active_loras: As for a call.
            padded: Pad to the capture size, in the static buffers; False: run the tensors as they are.
        """
        if not self._acquire(False):
            raise self._launcher.under_way()
        try:
            route, graphed = self.route(inputs, uniform_decode, num_active_loras), self._graphed
            self._launcher.take_stream()
            tokens, reqs = route.batch.num_tokens, route.batch.num_reqs
            values = self._pick(inputs)
            if route.mode is CUDAGraphMode.NONE or not padded:
                tensors = zip(self._reader.names, on_device(values, self.backend.device), strict=True)
                return graphed.run_eager(route.unpadded, dict(tensors))
            key = route.descriptor
            copy = self._copier.prepare(tokens, reqs or 0, key.num_tokens, graphed.padded_reqs(key))
            copy.run(values, self._launcher.current_stream())
            before = graphed.buffers.versions()
            try:
                output = graphed.run_eager(key, graphed.views(key))
            finally:
                self._copier.note_writes(before)
            return self._outputs.cut(output, tokens, reqs)
        finally:
            self._release()

    def route(
        self, inputs: Mapping[str, torch.Tensor], uniform_decode: bool | None = None, num_active_loras: int = 0
    ) -> Route:
        """Check a batch and dispatch it, without running anything. Arguments and errors as for a call."""
        self._check_open()
        loras = as_rows("num_active_loras", num_active_loras)
        return self._router.of_tensors(inputs, as_flag(uniform_decode), loras)

    def input_views(self, num_tokens: int, num_reqs: int | None = None) -> dict[str, torch.Tensor]:
        """Views of the static buffers for a batch, by name: write into them and pass them to the call.

        They may be written to at any time, so padding behind each batch is reset as far as they reach. ``stage`` does
        without that, and is to be preferred. The runner owns the memory.
        """
        self._check_open()
        num_tokens = as_rows("num_tokens", num_tokens)
        self._router.check_size(num_tokens)
        reqs = min(num_tokens, self.plan.max_num_seqs) if num_reqs is None else as_rows("num_reqs", num_reqs)
        if not 0 < reqs <= min(num_tokens, self.plan.max_num_seqs):
            raise InputError(
                f"{num_tokens} tokens are 1 to {min(num_tokens, self.plan.max_num_seqs)} requests, asked for {reqs}",
                remedy="Ask for fewer, or raise scheduler.max_num_seqs.",
            )
        return self._graphed.buffers.expose(num_tokens, reqs)

    def graph(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> Any:
        """The backend's graph of a FULL key, to replay bare. None if the key has none."""
        entry = self._graphed.wrapper.entries.get(descriptor) if mode is CUDAGraphMode.FULL else None
        return None if entry is None else entry.graph


__all__ = ["GraphRunner", "Route", "RunnerStats"]
