"""CapturedKeys: which keys of a model are captured, inside a budget: at start-up, and later between batches.

Note [Captures between batches]
    Static buffers hold the batch that comes next, or rows that the caller is writing; the model's caches hold live
    requests. So captures run on padding, which the user declared harmless, and the buffers get their bytes back.
    Captures also overwrite the memory of the pool, outputs of earlier calls included, as each replay does.
    A key that cannot be captured is remembered with the reason, and the others stay as they are.

Note [Giving a key up]
    A pool gives no segment back while one of its graphs lives. So where a key that is given up has made the pool grow,
    all graphs are freed, and those before it are captured again into a new pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cgplan.backends import MemoryReading
from cgplan.captures.budget import NO_GRAPH, BudgetGuard
from cgplan.captures.environment import describe_environment
from cgplan.captures.failures import drop_locals
from cgplan.captures.key import CapturedKey, capture_key, driver_bytes
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.captures.together import ALONE, Together
from cgplan.errors import BudgetError, CaptureError, CaptureMemoryError, ConfigError, ModelError, RankFailedError
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.optimizer.subset import restricted
from cgplan.planning import MissReason, Plan
from cgplan.planning.plan import capture_order
from cgplan.reports.records import CaptureReport, FailedKey, GraphRecord


@dataclass(frozen=True, slots=True)
class CaptureProgress:
    """How far a session is: key ``index`` (from 0) of ``total`` comes next."""

    index: int
    total: int
    mode: CUDAGraphMode
    descriptor: BatchDescriptor


class CapturedKeys:
    """The keys of a model that have graphs, and those that could not be captured.

    Args:
        graphed: The model with its buffers; nothing is captured yet. Its plan is what may be captured.
        guard: Says what the budget allows.
        asked: The plan that the user asked for.
        before: Device memory before anything of the model was allocated.
        together: The sessions of other ranks.
        progress: Called before each key of the first captures.

    Attributes:
        graphed, asked: As above; ``graphed.plan`` is what is captured now.
        wanted: What may be captured: all of ``asked``, or what its static buffers hold.
        failed: Keys that were not captured, by key. They are not tried again until they are taken out.
        history: Records of this generation's captures in order, those of evicted keys included.
        report: What the captures cost, as they are now.
    """

    report: CaptureReport

    def __init__(
        self,
        graphed: ModelGraphs,
        guard: BudgetGuard,
        asked: Plan,
        before: MemoryReading,
        together: Together = ALONE,
        progress: Callable[[CaptureProgress], None] = lambda _: None,
    ) -> None:
        self.graphed, self.asked, self.wanted = graphed, asked, graphed.plan
        self.failed: dict[Key, FailedKey] = {}
        self.history: list[GraphRecord] = []
        self._guard, self._before, self._together, self._progress = guard, before, together, progress
        self._records: dict[Key, GraphRecord] = {}
        self._workspace_bytes = 0
        self._is_new = True  # nothing was ever captured

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
        """Raise AddressError if the model's memory has moved since the captures: older graphs are of no use then."""
        if self.keys or self.graphed.is_invalid:
            self.graphed.check_addresses(*key, again=True)

    def check_all(self) -> None:
        """The same where no key is asked for."""
        self.graphed.check_valid("the runner was captured")
        if self.keys:
            self.check(self.keys[0])

    # --- at start-up ----------------------------------------------------------------------------------------------

    def capture_first(self, keys: Sequence[Key], start: float) -> None:
        """Capture these keys until the budget stops it, on all ranks, and write the report.

        A key that cannot be captured is an error, but for memory that runs out where there is a budget.

        Args:
            keys: In capture order.
            start: When the session began, by ``time.perf_counter``.
        """
        graphed, backend = self.graphed, self.graphed.backend
        with graphed.keeping_state(), backend.session(), torch.no_grad():
            self._guard.begin()
            captured = self._capture(keys, keep_going=False)
            self._guard.rest()
            graphed.buffers.restore()
            backend.synchronize()
        self._together.end()
        inspecting = time.perf_counter()
        reading = sum(c.reading_seconds for c in captured)
        shared = captured[0].before[1] if captured else None  # bytes that others had captured into the pool before
        self._record(captured)
        captured.clear()
        end = time.perf_counter()
        backend.release_cached()
        self._is_new = not self._records
        self._seal(shared, end - start, end - inspecting + reading)

    def without_buffers(self, graphed: ModelGraphs) -> None:
        """Go on with a model whose buffers hold no key, as none was captured."""
        self.graphed = graphed
        self._seal(None, self.report.session_seconds, self.report.inspection_seconds)

    def _seal(self, shared: int | None, seconds: float, inspection_seconds: float) -> None:
        graphed, backend, before = self.graphed, self.graphed.backend, self._before
        config, pool, after = graphed.config, graphed.pools.nbytes, backend.memory()
        graphed.plan = restricted(self.wanted, tuple(self._records), config)
        graphed.seal()
        if backend.supports("driver_bytes") and self._records:
            grown = after.reserved - before.reserved - (pool - (pool if shared is None else shared))
            self._workspace_bytes = max(grown - graphed.buffers.nbytes, 0)
        self.report = CaptureReport(
            environment=describe_environment(backend, self.asked.config_hash),
            plan=graphed.plan,
            records=tuple(self._records.values()),
            pool_bytes=pool,
            static_bytes=graphed.buffers.nbytes,
            workspace_bytes=self._workspace_bytes,
            driver_bytes=driver_bytes(backend, before, after),
            free_before=before.free,
            free_after=after.free,
            session_seconds=seconds,
            inspection_seconds=inspection_seconds,
            split=graphed.route.describe(),
            looked_at=graphed.looked_at,
            state=graphed.state,
            borrowed_outputs=True,
            warnings=(*graphed.plan.warnings, *self._warnings()),
        )

    def close_session(self, left_out: Sequence[Key], skipped: Sequence[Key]) -> None:
        """Add to the report what the budget did not allow, and what other ranks say."""
        used = self.report.graph_bytes - self._guard.shared_bytes
        refused = (NO_GRAPH,) if (left_out or skipped) and not self.report.records else ()
        found = {
            "budget": self._guard.record(left_out, skipped, used),
            "warnings": (*self.report.warnings, *refused),
        }
        self._first = self.report = self._together.completed(self.report.model_copy(update=found))
        self._update(0.0)

    def _warnings(self) -> list[str]:
        graphed, warnings = self.graphed, list[str]()
        config, model = graphed.config, graphed.model
        if empty := [r.descriptor for r in self._records.values() if r.nodes == 0]:
            names = ", ".join(map(str, empty))
            warnings.append(f"graphs without any kernel: {names}; does the model run on this device?")
        if graphed.returns_nothing:
            warnings.append("the model returned no tensor: is there a return in its forward?")
        if isinstance(model, torch.nn.Module) and model.training:
            warnings.append(
                "the model is in training mode: dropout and batch norm run as in training; call .eval() before the "
                "capture"
            )
        with_rows = [buffer.tensor for buffer in graphed.buffers.buffers.values() if buffer.rows is not None]
        if config.compilation.debug and not any(tensor.is_floating_point() for tensor in with_rows):
            warnings.append(
                "debug mode puts NaN into the padding rows of floating-point inputs, of which there are none: whether "
                "padding reaches real rows is not checked"
            )
        return warnings + graphed.route.warnings() + graphed.notes

    # --- between batches ------------------------------------------------------------------------------------------

    def capture(
        self, keys: Collection[Key], *, evicted: Collection[Key] = (), from_zero: bool = False
    ) -> tuple[Key, ...]:
        """Give up some keys, then capture others, the largest first. Failures are remembered, and do not raise.

        Args:
            keys: Keys to capture, as far as they are among ``wanted``, have no graph and have not failed before.
            evicted: Keys to give up before.
            from_zero: Whether the budget's seconds count from 0 again.

        Returns:
            The keys that were captured.
        """
        with self._changes(from_zero):
            self._evict(evicted)
            new = [key for key in self._possible(keys) if key not in self._records]
            self._capture_recorded(new)
        return tuple(key for key in new if key in self._records)

    def begin_again(self, keys: Collection[Key]) -> tuple[Key, ...]:
        """Begin a new generation: all graphs are freed, and these keys captured into new pools, largest first.

        Returns:
            The keys that were captured.
        """
        with self._changes(from_zero=True):
            keys = self._possible(keys)
            self._free_all()
            self._capture_recorded(keys)
        return tuple(self._records)

    @contextmanager
    def _changes(self, from_zero: bool) -> Iterator[None]:
        start = time.perf_counter()
        self._guard.go_on(from_zero=from_zero)
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

    def _capture_recorded(self, keys: Sequence[Key]) -> None:
        """Capture keys one by one, so that an interrupt leaves those before it with their records."""
        graphed, backend, pools = self.graphed, self.graphed.backend, self.graphed.pools
        for key in keys:
            if self._is_new:
                backend.release_cached()
            before, pool_before = backend.memory(), pools.nbytes
            try:
                self._record(self._capture([key], keep_going=True))
            finally:
                if key not in self._records:
                    self._give_up(key)
            if key not in self._records:
                if pools.is_private and pools.nbytes > pool_before and self._records:  # Note [Giving a key up]
                    kept = capture_order(self._records)
                    self._free_all()
                    self._capture_recorded(kept)
                continue
            if self._is_new and backend.supports("driver_bytes"):
                backend.release_cached()
                reserved = backend.memory().reserved - graphed.copied_bytes
                self._workspace_bytes = max(reserved - before.reserved - (pools.nbytes - pool_before), 0)
            self._is_new = False

    # --- the loop -------------------------------------------------------------------------------------------------

    def _capture(self, keys: Sequence[Key], *, keep_going: bool, again: bool = False) -> list[CapturedKey]:
        """Capture keys in order, as far as the budget allows.

        Args:
            keys: What to capture.
            keep_going: Whether a key that cannot be captured, or that the budget refuses, is remembered in ``failed``
                and the next one tried; the caller frees what is left of it. Else its error is raised, and the budget
                ends the loop.
            again: Whether these are keys that were captured before.
        """
        graphed, guard, together = self.graphed, self._guard, self._together
        captured: list[CapturedKey] = []
        for index, key in enumerate(keys):
            if together.any(guard.stop_before(key)):
                if not keep_going:
                    break
                self._refuse(key)
                continue
            self._progress(CaptureProgress(index, len(keys), *key))
            try:
                captured.append(capture_key(graphed, key, in_service=keep_going))
            except (CaptureError, ModelError, ConfigError, RankFailedError) as error:
                self._note_failure(key, error, keep_going=keep_going)
            else:
                if not together.any(guard.add(captured[-1], 0 if keep_going else len(keys) - index - 1)):
                    continue
                captured.pop()
                if keep_going:
                    self._refuse(key)
            if not keep_going:  # Note [Giving a key up]
                before = tuple(c.key for c in captured)
                captured.clear()
                guard.forget()
                graphed.drop_all()
                together.dropped()
                if before:
                    return [] if again else self._capture(before, keep_going=False, again=True)
        return captured

    def _note_failure(self, key: Key, error: Exception, *, keep_going: bool) -> None:
        """Remember why a key failed; raise again what ends the loop."""
        ran_out = isinstance(error, CaptureMemoryError | RankFailedError)  # the second: another rank has said the first
        if keep_going and not isinstance(error, RankFailedError):
            self.failed[key] = FailedKey(
                mode=key[0], descriptor=key[1], error=type(error).__name__, detail=str(getattr(error, "message", error))
            )
        elif keep_going or not ran_out or not self._guard.active:
            raise error
        drop_locals(error)
        if not keep_going:
            if isinstance(error, CaptureMemoryError):
                self._guard.ran_out(key)
            self._together.any(True, because=error)

    def _refuse(self, key: Key) -> None:
        stop = self._guard.stops[-1]
        self.failed[key] = FailedKey(
            mode=key[0], descriptor=key[1], error=BudgetError.__name__, detail=f"{stop.limit}: {stop.detail}"
        )

    def _record(self, captured: Sequence[CapturedKey]) -> None:
        for done in captured:
            self._records[done.key] = record = done.record(self.graphed.backend)
            self.history.append(record)

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

    def _give_up(self, key: Key) -> None:
        """Free what there is of a key that could not be captured."""
        self.graphed.scope.entries.clear()
        self.graphed.evict([key])
        self.graphed.backend.release_cached()
        self._guard.release([key], self.graphed.pools.nbytes)

    def _free_all(self) -> None:
        """Begin a new generation, with no graph yet."""
        self._evict(tuple(self._records))
        self.graphed.pools.renew()
        self._guard.forget(in_service=True)
        self.history.clear()

    def _update(self, seconds: float) -> None:
        """Bring plan and report up to date, after so many seconds of changes."""
        graphed, first = self.graphed, self._first
        config, backend, pools = graphed.config, graphed.backend, graphed.pools
        graphed.plan = self._with_buffers(restricted(self.wanted, tuple(self._records), config))
        records = tuple(self._records[key] for key in graphed.plan.keys)
        driver = first.driver_bytes
        if driver is not None:  # of what kernels took, nothing comes back
            driver += sum(record.driver_bytes or 0 for record in records) - first.graph_driver_bytes
        skipped = tuple(key for key in self.wanted.keys if key not in self._records)
        lazy = config.compilation.capture_policy == "lazy"
        self.report = first.model_copy(
            update={
                "plan": graphed.plan,
                "records": records,
                "pool_bytes": pools.nbytes,
                "workspace_bytes": self._workspace_bytes,
                "driver_bytes": driver,
                "free_after": backend.memory().free if seconds else self.report.free_after,
                "session_seconds": self.report.session_seconds + seconds,
                "split": graphed.route.describe(),
                "capture_policy": config.compilation.capture_policy,
                "pool": pools.policy,
                "generation": pools.generation,
                "waiting": sum(key not in self.failed for key in skipped) if lazy else 0,
                "failed": tuple(self.failed.values()),
                "looked_at": graphed.looked_at,
                "state": graphed.state,
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


__all__ = ["CaptureProgress", "CapturedKeys"]
