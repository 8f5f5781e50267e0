"""What a runner holds, and how it changes between its calls, which are in runner.py."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

from cgplan.config import Config
from cgplan.errors import CgplanError
from cgplan.graphs import GraphBackend
from cgplan.graphs.copying import CopyIn
from cgplan.planning import Plan
from cgplan.planning.costs import GraphCosts, Key
from cgplan.planning.latency import StepTimes
from cgplan.planning.traffic import Traffic
from cgplan.reports.records import CaptureReport
from cgplan.reports.replan import ReplanReport
from cgplan.runtime.batch import BatchReader
from cgplan.runtime.debug import DebugChecks
from cgplan.runtime.dispatching import BatchRouter
from cgplan.runtime.launching import BatchLauncher
from cgplan.runtime.live import LiveGraphs
from cgplan.runtime.on_demand import OnDemand
from cgplan.runtime.pools import PoolUse
from cgplan.runtime.prepared import BatchPreparer, PreparedBatch, leave_alone
from cgplan.runtime.staging import StagedBuffers
from cgplan.runtime.state_kept import state_kept
from cgplan.runtime.stats import RunnerStats

# Of the last call: its flags, what is like its tensors, the batch, and how such are copied in.
Recent = tuple[bool | None, int, Callable[..., bool], Any, CopyIn]
NONE_YET: Recent = (None, 0, lambda *_: False, None, leave_alone)


class RunnerState:
    """The graphs of a model with all that calls are prepared from, made anew whenever graphs come or go.

    Args:
        live: The model with its graphs.
        capture: Captures a plan, of its keys those given; absent: as a session does.
        use: Who runs the graphs of its pools.
        name: What messages call the runner.

    Attributes:
        stats: What calls were answered with so far.
    """

    def __init__(
        self,
        live: LiveGraphs,
        capture: Callable[[Plan, Collection[Key] | None], LiveGraphs],
        use: PoolUse,
        name: str,
    ) -> None:
        graphed = live.graphed
        self.stats = RunnerStats(graphed.plan)
        self._capture_plan, self._use, self._name = capture, use, name
        self._reader = BatchReader({**graphed.config.inputs, **graphed.config.metadata}, graphed.backend.device)
        names = self._reader.names
        self._num_inputs = len(names)
        self._pick: Callable[[Mapping[str, Any]], tuple[Any, ...]]
        self._pick = itemgetter(*names) if len(names) > 1 else lambda given: tuple([given[name] for name in names])
        first = self._reader.counting("num_tokens") or self._reader.counting("num_reqs") or (0, 0)
        self._counted = (*first, *(self._reader.counting("num_reqs") or first))
        self._handed: list[weakref.ref[StagedBuffers]] = []
        self._demand = OnDemand(live, self.stats)
        self._open()

    def _open(self) -> None:
        """Take the graphs that ``_demand`` holds."""
        live = self._demand.live
        self._graphed, self._outputs = live.graphed, live.outputs
        graphed, compilation = live.graphed, live.graphed.config.compilation
        self._copier = graphed.backend.copier(graphed.buffers, copy_inputs=compilation.cudagraph_copy_inputs)
        self._launcher = BatchLauncher(graphed, self._use, self._name)
        self._acquire, self._release, self._launch = (
            self._launcher.acquire, self._launcher.release, self._launcher.launch,
        )  # fmt: skip
        self.graphs_changed()
        self._closed = self._is_freed = self._suspended = False  # last: what takes no lock looks at it first

    def graphs_changed(self) -> None:
        """Drop what was prepared for calls, after graphs were captured or freed; staged buffers are of no use then. The
        lock is held, or nobody has the runner yet.
        """
        for reference in self._handed:
            if (staged := reference()) is not None:
                staged.retire()
        self._handed.clear()
        self._batches: dict[tuple[Any, ...], PreparedBatch] = {}
        self._recent = NONE_YET
        self._staged: dict[tuple[Any, ...], StagedBuffers] = {}
        live = self._demand.live
        wanted = live.wanted if self._demand.is_lazy else None
        asked = None if live.asked is wanted or live.asked.keys == self.plan.keys else live.asked
        self._router = BatchRouter(
            self.plan, self._reader, live.graphed.most_tokens, wanted, live.reason_against, asked
        )
        self.stats.plan = self.plan
        self._debug = DebugChecks(self._graphed) if self.config.compilation.debug else None
        nvtx = self.config.report.nvtx
        self._preparer = BatchPreparer(
            self._graphed, self._outputs, self._copier, self._router, self.stats, self._debug, nvtx=nvtx
        )

    @property
    def report(self) -> CaptureReport:
        """What the captures cost, those since the session included."""
        return self._demand.live.report

    @property
    def plan(self) -> Plan:
        """What is captured now."""
        return self._graphed.plan

    @property
    def wanted(self) -> Plan:
        """What may be captured: with ``capture_policy: lazy`` all that batches can ask for, elsewhere ``plan``."""
        return self._demand.live.wanted if self._demand.is_lazy else self.plan

    @property
    def config(self) -> Config:
        """What was asked for."""
        return self._graphed.config

    @property
    def model(self) -> Callable[..., Any]:
        """The model as it was given; whoever calls it sets the forward context that it may read."""
        return self._graphed.model

    @property
    def backend(self) -> GraphBackend:
        """The device."""
        return self._graphed.backend

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or failed to capture again: for good. One that is suspended, or captures, is not."""
        return self._closed and not self._suspended

    def invalidate(self, name: str) -> None:
        """Say that memory which the graphs use has moved (a KV cache that was allocated anew, say).

        Calls that a graph would serve raise AddressError with that name until ``recapture``; so does leaving a block of
        staged buffers that is under way. The name is a label for that message alone: all graphs are refused.
        Raises InputError for what is no name, CgplanError if the runner is closed.
        """
        self._check_open()
        self._graphed.invalidate(name)
        self._look_again()

    def refuse(self, error: CgplanError) -> None:
        """Have calls that a graph would serve raise an error like this one until ``recapture``: another rank is lost,
        and what a graph sums with it would be wrong without a word. From any thread.
        """
        self._graphed.refuse(error)
        self._look_again()

    def _look_again(self) -> None:
        for batch in list(self._batches.values()):
            batch.look_again()
        for reference in list(self._handed):
            if (staged := reference()) is not None:
                staged.look_again()

    def recapture(self) -> None:
        """Capture the same plan again, with the model's memory as it is now; keys that failed are forgotten.

        The old graphs, pools and static buffers are freed first: outputs and ``input_views`` that were handed out are
        no longer valid. No call comes in between, of another member of the pool neither. Raises as CaptureSession.run
        does; the runner is then closed, and cannot capture again. Raises CgplanError, and changes nothing, if a call is
        under way.
        """
        with self._use.held(self._name):
            if not self._suspended:
                self._check_open()
            live = self._demand.live
            keys = live.keys if self._demand.is_lazy else None
            self._suspended = True
            try:
                with state_kept(live.graphed.holder, self.backend):
                    self._free_once()
                    self._demand.live = self._capture_plan(live.asked, keys)
                self._open()
            finally:
                self._suspended = False
            self.stats.captures += len(self.plan.keys)

    @contextmanager
    def no_capture(self) -> Iterator[None]:
        """A block in which no call captures: a batch whose graph is not there runs by a larger one, or eagerly."""
        with self._demand.forbidden():
            yield

    def retry_failed(self) -> None:
        """Forget which keys could not be captured (``report.failed``): the next batch that asks for one tries again.

        Raises:
            CgplanError: a call is under way.
        """
        with self._use.held(self._name):
            self._demand.live.retry_failed()
            self.graphs_changed()

    def replan(
        self,
        *,
        traffic: Traffic | None = None,
        times: StepTimes | None = None,
        costs: GraphCosts | None = None,
        apply: bool = True,
    ) -> ReplanReport:
        """Plan anew for the batches that were asked for, inside the budget, and exchange the graphs for those.

        Sizes that the new plan lacks are evicted; new ones are captured, the largest first, into the pools that are
        there, or all into new ones, see Note [Generations] in pools.py. Outputs that were handed out are no longer
        valid. A key that cannot be captured does not raise: ``report.failed`` of the runner says why.

        Args:
            traffic: What to plan for; absent: the batches since the last replan.
            times: Step times; absent: measured now, on padding.
            costs: What graphs cost; absent: what captures so far have cost.
            apply: False: propose only.

        Returns:
            What changed; it prints as tables.

        Raises:
            CgplanError: ``compilation.capture_policy`` is not ``adaptive``, a call is under way, or captures are
                forbidden.
            TrafficError: no batch was asked for since.
            BudgetError: the budget does not pay for a single graph.
            AddressError: the model's memory has moved: ``recapture`` first.
        """
        with self._use.held(self._name):
            self._check_open()
            try:
                self._launcher.check()
                if apply:
                    self.graphs_changed()  # what is prepared holds outputs, and evicted graphs wait for theirs
                return self._demand.replan(traffic, times, costs, self._reopen, apply=apply)
            finally:
                if self._demand.live.graphed is not self._graphed:
                    self._open()
                if apply:
                    self.graphs_changed()

    def _reopen(self, plan: Plan) -> LiveGraphs:
        """Give all memory back, and make static buffers for a plan, without a graph yet."""
        self._free()
        return self._capture_plan(plan, ())

    def close(self) -> None:
        """Free graphs, pools and static buffers, for good. Outputs that were handed out are no longer valid.

        Raises:
            CgplanError: a call is under way.
        """
        with self._use.held(self._name):
            self._free_once()
            self._suspended = False

    def suspend(self) -> None:
        """Give graphs, pools and static buffers back as ``close`` does, until ``recapture`` makes them anew.

        Raises CgplanError as ``close`` does, and of a closed runner. Calls in between raise it, too.
        """
        with self._use.held(self._name):
            if not self._suspended:
                self._check_open()
                self._free_once()
                self._suspended = True

    def _free_once(self) -> None:
        if not self._is_freed:  # a close that was interrupted is made good by the next one
            self._free()

    def _free(self) -> None:
        self._closed = True
        self.graphs_changed()
        self._copier.close()
        self._graphed.free()
        self._is_freed = True

    def _check_open(self) -> None:
        if self._suspended:
            raise CgplanError("the runner is suspended", remedy="Call runner.recapture() first.")
        if self._closed:
            raise CgplanError("the runner is closed", remedy="Capture again.")
