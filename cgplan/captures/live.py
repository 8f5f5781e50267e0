"""LiveGraphs: a runner's graphs while it serves, captured and given up between batches.

Note [Captures between batches]
    Static buffers hold the batch that is to be run, or what the caller wrote for the next one; the model's caches hold
    live requests. So captures run on padding, which the user declared harmless, and the buffers get their bytes back.
    What a capture may overwrite besides is the memory of the pool: outputs of earlier calls, as each replay does.
    A key that cannot be captured is remembered with the reason, and leaves the others as they are.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from cgplan.buffers.outputs import OutputRows
from cgplan.captures.budget import NO_GRAPH, BudgetGuard
from cgplan.captures.failures import drop_locals
from cgplan.captures.key_capture import KeyCapture
from cgplan.captures.model_graphs import GraphedModel
from cgplan.errors import BudgetError, CaptureError, ConfigError, ModelError
from cgplan.modes import Key
from cgplan.optimizer.subset import restricted
from cgplan.planning import MissReason, Plan
from cgplan.planning.plan import capture_order
from cgplan.reports.records import CaptureReport, FailedKey, GraphRecord


class LiveGraphs:
    """The graphs of a model that a session has captured, and more or fewer of them later.

    Args:
        graphed: The model with its graphs, sealed.
        guard: The session's, with what it has captured.
        report: What the session's captures cost.
        asked: What the session was to capture.
        wanted: What may be captured: all of ``asked``, or what its static buffers hold.

    Attributes:
        graphed, asked, wanted: As above; ``graphed.plan`` is what is captured now.
        failed: Keys that were not captured, by key. They are not tried again until they are taken out.
        history: Records of this generation's captures in order, those of evicted keys included.
        report: What the captures cost, as they are now.
    """

    def __init__(
        self, graphed: GraphedModel, guard: BudgetGuard, report: CaptureReport, asked: Plan, wanted: Plan
    ) -> None:
        self.graphed, self.asked, self.wanted = graphed, asked, wanted
        self.failed: dict[Key, FailedKey] = {}
        self.history: list[GraphRecord] = list(report.records)
        self._guard, self._first = guard, report
        self._records: dict[Key, GraphRecord] = {(r.mode, r.descriptor): r for r in report.records}
        self._capture = KeyCapture.of(graphed, in_service=True)
        self._workspace_bytes = report.workspace_bytes
        self._is_new = not report.records
        guard.rest()
        self._update(0.0)

    @property
    def outputs(self) -> OutputRows:
        """How outputs are cut."""
        return self._capture.outputs

    @property
    def keys(self) -> tuple[Key, ...]:
        """What is captured now."""
        return self.graphed.plan.keys

    def reason_against(self, key: Key) -> MissReason:
        """Why a wanted key has no graph."""
        failed = self.failed.get(key)
        if failed is not None:
            return MissReason.OVER_BUDGET if failed.is_over_budget else MissReason.CAPTURE_FAILED
        waits = self.graphed.config.compilation.capture_policy == "lazy" and key in self.wanted.keys
        return MissReason.NOT_CAPTURED_YET if waits else MissReason.OVER_BUDGET

    def retry_failed(self) -> None:
        """Forget which keys could not be captured."""
        self.failed.clear()

    def check(self, key: Key) -> None:
        """Raise AddressError if the model's memory has moved since the captures: older graphs are of no use then. Where
        there are none, nothing has been captured that could be of no use.
        """
        if self.keys or self.graphed.is_invalid:
            self.graphed.check_addresses(*key, again=True)
        else:
            self.graphed.find_generators()

    def check_all(self) -> None:
        """The same where no key is asked for."""
        self.graphed.check_valid("the runner was captured")
        if self.keys:
            self.check(self.keys[0])
        else:
            self.graphed.find_generators()

    def capture(self, keys: Collection[Key], *, evicted: Collection[Key] = (), anew: bool = False) -> tuple[Key, ...]:
        """Give up some keys, then capture others, the largest first. Failures are remembered, and do not raise.

        Args:
            keys: What is captured, as far as it is among ``wanted``, has no graph and has not failed before.
            evicted: What is given up before.
            anew: Whether the budget's seconds are counted anew.

        Returns:
            The keys that were captured.
        """
        with self._changes(anew):
            self._evict(evicted)
            new = [key for key in self._possible(keys) if key not in self._records]
            for key in new:
                self._capture_one(key)
        return tuple(key for key in new if key in self._records)

    def begin_anew(self, keys: Collection[Key]) -> tuple[Key, ...]:
        """A new generation with these keys: all graphs are freed, and these captured into new pools, largest first.

        Returns:
            The keys that were captured.
        """
        with self._changes(anew=True):
            self._begin_anew(self._possible(keys))
        return tuple(self._records)

    @contextmanager
    def _changes(self, anew: bool) -> Iterator[None]:
        start = time.perf_counter()
        self._guard.go_on(anew=anew)
        try:
            with self.graphed.captures_again():
                yield
        finally:
            self._guard.rest()
            self._update(time.perf_counter() - start)

    def _possible(self, keys: Collection[Key]) -> tuple[Key, ...]:
        """Those of the keys that are wanted and have not failed, in capture order."""
        wanted = set(self.wanted.keys)
        return capture_order(key for key in keys if key in wanted and key not in self.failed)

    def _begin_anew(self, keys: Sequence[Key]) -> None:
        self._evict(tuple(self._records))
        self.graphed.pools.renew()
        self._guard.forget(in_service=True)
        self.history.clear()
        for key in capture_order(keys):
            self._capture_one(key)

    def _evict(self, keys: Collection[Key]) -> None:
        if not keys:
            return
        try:
            self.graphed.evict(keys)
        finally:  # where it was interrupted, those that are gone are not dispatched to
            for key in keys:
                if not self.graphed.holds(key):
                    self._records.pop(key, None)
        self._guard.release(keys, self.graphed.pools.nbytes)

    def _capture_one(self, key: Key) -> None:
        """Capture a key, or remember why not."""
        guard, backend = self._guard, self.graphed.backend
        if guard.stop_before(key):
            self._refuse(key)
            return
        if self._is_new:
            backend.release_cached()
        before, pool_before = backend.memory(), self.graphed.pools.nbytes
        try:
            captured = self._capture.capture(*key)
        except (CaptureError, ModelError, ConfigError) as error:
            self.failed[key] = FailedKey(
                mode=key[0], descriptor=key[1], error=type(error).__name__, detail=error.message
            )
            drop_locals(error)
            self._give_up(key, pool_before)
            return
        except BaseException:
            self._give_up(key, None)
            raise
        if guard.add(captured, 0):
            del captured
            self._refuse(key)
            self._give_up(key, pool_before)
            return
        self._records[key] = record = captured.record(backend)
        self.history.append(record)
        if self._is_new and backend.supports("driver_bytes"):
            backend.release_cached()
            grown = backend.memory().reserved - before.reserved - (self.graphed.pools.nbytes - pool_before)
            self._workspace_bytes = max(grown, 0)
        self._is_new = False

    def _give_up(self, key: Key, pool_before: int | None) -> None:
        """Free what there is of a key that could not be captured; where the pools held so many bytes before it, make
        them give back what it has made them grow by: for that all graphs have to be captured again.
        """
        pools = self.graphed.pools
        self.graphed.scope.entries.clear()
        self.graphed.evict([key])
        self.graphed.backend.release_cached()
        self._guard.release([key], pools.nbytes)
        if pool_before is not None and pools.is_private and pools.nbytes > pool_before and self._records:
            self._begin_anew(tuple(self._records))

    def _refuse(self, key: Key) -> None:
        stop = self._guard.stops[-1]
        self.failed[key] = FailedKey(
            mode=key[0], descriptor=key[1], error=BudgetError.__name__, detail=f"{stop.limit}: {stop.detail}"
        )

    def _update(self, seconds: float) -> None:
        """Bring plan and report up to date, after so many seconds of changes."""
        graphed, first = self.graphed, self._first
        config, backend, pools = graphed.config, graphed.backend, graphed.pools
        graphed.plan = self._with_buffers(restricted(self.wanted, tuple(self._records), config))
        records = tuple(self._records[key] for key in graphed.plan.keys)
        before = self._first if seconds == 0.0 else self.report
        driver = first.driver_bytes
        if driver is not None:  # of what kernels took, nothing comes back
            driver += sum(record.driver_bytes or 0 for record in records) - first.graph_driver_bytes
        skipped = tuple(key for key in self.wanted.keys if key not in self._records)
        lazy = config.compilation.capture_policy == "lazy"
        self.report: CaptureReport = first.model_copy(
            update={
                "plan": graphed.plan,
                "records": records,
                "pool_bytes": pools.nbytes,
                "workspace_bytes": self._workspace_bytes,
                "driver_bytes": driver,
                "free_after": before.free_after if seconds == 0.0 else backend.memory().free,
                "session_seconds": before.session_seconds + seconds,
                "split": graphed.route.describe(),
                "capture_policy": config.compilation.capture_policy,
                "pool": pools.policy,
                "generation": pools.generation,
                "waiting": sum(key not in self.failed for key in skipped) if lazy else 0,
                "failed": tuple(self.failed.values()),
                "warnings": tuple(text for text in first.warnings if text != NO_GRAPH or not records),
            }
        )
        if seconds and first.budget is not None:
            used = self.report.graph_bytes - self._guard.shared_bytes
            budget = self._guard.record(first.budget.left_out, () if lazy else skipped, used)
            self.report = self.report.model_copy(update={"budget": budget})

    def _with_buffers(self, plan: Plan) -> Plan:
        """The plan, with what the static buffers take as its prediction where they were made for a larger size."""
        predicted, graphed = plan.predicted, self.graphed
        if predicted is None or not plan.keys or graphed.most_tokens == plan.max_capture_size:
            return plan
        known = predicted.model_copy(update={"static_bytes": graphed.buffers.nbytes})
        return plan.model_copy(update={"predicted": known})


__all__ = ["LiveGraphs"]
