"""CapturedKeys: which keys of a model are captured, inside a budget: at start-up, and later between
batches.

Note [Captures between batches]
    Static buffers hold the batch that comes next, or rows that the caller is writing; the model's
    caches hold live requests. So captures run on padding, which the user declared harmless, and the
    buffers get their bytes back. Captures also overwrite the memory of the pool, outputs of earlier
    calls included, as each replay does. A key that cannot be captured is remembered with the
    reason, and the others stay as they are.

Note [Giving a key up]
    A pool gives no segment back while one of its graphs lives. So where a key that is given up has
    made the pool grow, all graphs are freed, and those before it are captured again into a new
    pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from cgplan.backends import MemoryReading
from cgplan.backends.backend import span
from cgplan.captures.audit import audit, audit_error
from cgplan.captures.budget import NO_GRAPH, BudgetGuard
from cgplan.captures.environment import describe_environment
from cgplan.captures.failures import drop_locals
from cgplan.captures.model_graphs import ModelGraphs, driver_bytes
from cgplan.captures.rank_sync import SINGLE_RANK, RankSync
from cgplan.errors import (
    AuditError,
    BudgetError,
    CaptureError,
    CaptureMemoryError,
    ConfigError,
    ModelError,
    RankFailedError,
)
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.optimizer.subset import restricted
from cgplan.planning import MissReason, Plan
from cgplan.planning.plan import capture_order
from cgplan.reports.records import AuditReport, CaptureReport, FailedKey, GraphRecord


@dataclass(frozen=True)
class CaptureProgress:
    """How far a session is: key ``index`` (from 0) of ``total`` comes next."""

    index: int
    total: int
    mode: CUDAGraphMode
    descriptor: BatchDescriptor


Progress = Callable[[CaptureProgress], None]


class CapturedKeys:
    """The keys of a model that have graphs, and those that could not be captured.

    Args:
        graphed: The model with its buffers; nothing is captured yet. Its ``plan`` is what is
            captured now.
        asked: The plan that the user asked for.
        wanted: The part of it that may be captured; the budget does not pay for the rest.
        before: Device memory before anything of the model was allocated.
        together: The sessions of other ranks.
        progress: Called before each key.

    Attributes:
        failed: Keys that were not captured, by key. They are not tried again until they are taken
            out.
        history: Records of this generation's captures in order, those of evicted keys included.
    """

    report: CaptureReport

    def __init__(
        self,
        graphed: ModelGraphs,
        asked: Plan,
        wanted: Plan,
        before: MemoryReading,
        together: RankSync = SINGLE_RANK,
        progress: Progress | None = None,
    ) -> None:
        self.graphed, self.asked, self.wanted = graphed, asked, wanted
        self.failed: dict[Key, FailedKey] = {}
        self.history: list[GraphRecord] = []
        self._records: dict[Key, GraphRecord] = {}
        self.guard = BudgetGuard(graphed, self._records, before)
        self._before, self._together, self._progress = before, together, progress
        self._environment = describe_environment(graphed.backend, asked.config_hash)
        left_out = [key for key in asked.keys if key not in set(wanted.keys)]
        self._left_out = sorted(
            left_out, key=lambda key: (-key[1].num_tokens, key[0] is CUDAGraphMode.FULL)
        )
        self._loaded_bytes: int | None = None  # that the driver took for kernels
        self._workspace_bytes: int | None = None  # None: nothing was ever captured
        self._seconds = 0.0
        self._audited: AuditReport | None = None

    @property
    def keys(self) -> tuple[Key, ...]:
        return self.graphed.plan.keys

    def reason_against(self, key: Key) -> MissReason:
        """Why a wanted key has no graph."""
        failed = self.failed.get(key)
        if failed is not None:
            return MissReason.OVER_BUDGET if failed.is_over_budget else MissReason.CAPTURE_FAILED
        waits = self.is_lazy and key in self.wanted.keys
        return MissReason.NOT_CAPTURED_YET if waits else MissReason.OVER_BUDGET

    @property
    def is_lazy(self) -> bool:
        """Whether keys are captured when they are first met."""
        return self.graphed.config.compilation.capture_policy == "lazy"

    def check(self, key: Key | None = None) -> None:
        """Raise AddressError if the model's memory has moved since the captures: older graphs are
        of no use then.
        """
        self.graphed.check_valid()
        if self.keys:
            self.graphed.check_addresses(*(key or self.keys[0]), again=True)

    # --- captures ---------------------------------------------------------------------------------

    def capture_first(self, keys: Sequence[Key], start: float) -> None:
        """Capture these keys until the budget stops it, on all ranks, and write the report. A key
        that cannot be captured is an error, but for memory that runs out where there is a budget.
        """
        graphed, backend = self.graphed, self.graphed.backend
        if keys:
            self._capture_at_start(keys)
        self._together.end()
        self._seconds = time.perf_counter() - start
        if keys and not self._records and not self.is_lazy:  # the buffers are of no use either
            graphed.allocate_buffers(())
        backend.release_cached()
        taken = driver_bytes(backend, self._before, backend.memory())
        if taken is not None:
            self._loaded_bytes = taken - sum(
                record.driver_bytes or 0 for record in self._records.values()
            )
        if self._records:
            self._note_workspace()
        graphed.seal()
        self._audit()
        self._write_report()
        self.report = self._together.completed(self.report)

    def _capture_at_start(self, keys: Sequence[Key]) -> None:
        graphed, backend, guard = self.graphed, self.graphed.backend, self.guard
        with (
            span("capture session"),
            graphed.keeping_state() as kept,
            backend.session(),
            torch.no_grad(),
        ):
            guard.go_on(from_zero=True)
            try:
                self._capture(keys)
            except BaseException:  # no graph stays
                kept.forget_captures()
                raise
            guard.rest()
            if graphed.real_rows is not None:
                graphed.buffers.clear_all()
            graphed.buffers.restore()
            backend.synchronize()

    def _audit(self) -> None:
        setting = self.graphed.config.compilation.audit
        self._audited = None if setting == "off" else self.audit()
        if self._audited is not None and self._audited.findings and setting == "error":
            raise audit_error(self._audited)

    def audit(self) -> AuditReport:
        """Who owns the memory that the graphs point to now. Raises BackendError where nodes cannot
        be read.
        """
        return audit(self.graphed, self._environment)

    def capture(
        self,
        keys: Collection[Key],
        *,
        evicted: Collection[Key] = (),
        renew: bool = False,
        from_zero: bool = False,
    ) -> tuple[Key, ...]:
        """Capture keys between batches, the largest first, as far as they are among ``wanted``,
        have no graph and have not failed before. Failures are remembered, and do not raise.

        Args:
            keys: What to capture.
            evicted: Keys to give up before.
            renew: Give all up, and begin a new generation.
            from_zero: Whether the budget's seconds count from 0 again.

        Returns:
            The keys that were captured.
        """
        start = time.perf_counter()
        self.guard.go_on(from_zero=from_zero)
        try:
            with self.graphed.captures_again():
                if self._workspace_bytes is None:
                    self.guard.start_in_service()
                if renew:
                    self._free_all()
                elif evicted:
                    self._evict(evicted)
                wanted = set(self.wanted.keys) - set(self.failed) - set(self._records)
                new = capture_order(key for key in keys if key in wanted)
                self._capture(new, in_service=True)
            self._audit()
        except AuditError:
            self._evict(new)
            raise
        finally:
            self.guard.rest()
            self._seconds += time.perf_counter() - start
            self._write_report()
        return tuple(key for key in new if key in self._records)

    def _capture(
        self, keys: Sequence[Key], *, in_service: bool = False, again: bool = False
    ) -> None:
        # In service a key that cannot be captured, or that the budget refuses, is remembered in
        # `failed` and the next one tried. Else its error is raised, and the budget ends the loop.
        # `again`: they were captured before.
        pools = self.graphed.pools
        for index, key in enumerate(keys):
            if self._together.any_refuses(self.guard.stop_before(key)):
                if not in_service:
                    return
                self._refuse(key)
                continue
            if self._progress is not None:
                self._progress(CaptureProgress(index, len(keys), *key))
            grown = pools.nbytes
            try:
                if self._capture_one(key, len(keys) - index - 1, in_service=in_service):
                    continue
            except BaseException:
                if in_service:
                    self._give_up(key)
                raise
            self._give_up(key)
            before = capture_order(self._records)
            # Note [Giving a key up]
            if not in_service or (before and pools.is_private and pools.nbytes > grown):
                self._free_all()
                self._together.dropped()
                if before and not again:
                    self._capture(before, in_service=in_service, again=not in_service)
            if before and not in_service:
                return

    def _capture_one(self, key: Key, remaining: int, *, in_service: bool) -> bool:
        """Whether a key was captured, and the budget lets it stay."""
        try:
            with span("{} {}".format(*key), num_tokens=key[1].num_tokens) as shown:
                record = self._records[key] = self.graphed.capture_key(key, in_service=in_service)
                shown |= {
                    name: getattr(record, name)
                    for name in ("pool_growth", "driver_bytes", "nodes", "graphs")
                }
        except (CaptureError, ModelError, ConfigError, RankFailedError) as error:
            # here, or on another rank
            ran_out = isinstance(error, CaptureMemoryError | RankFailedError)
            if in_service and not isinstance(error, RankFailedError):
                self._fail(key, type(error).__name__, error.message)
            elif in_service or not (ran_out and self.guard.active):
                raise
            drop_locals(error)
            if not in_service:
                if isinstance(error, CaptureMemoryError):
                    self.guard.ran_out(key)
                self._together.any_refuses(True, because=error)
            return False
        if self._together.any_refuses(self.guard.overshoots(key, 0 if in_service else remaining)):
            if in_service:
                self._refuse(key)
            return False
        self.history.append(record)
        if in_service and self._workspace_bytes is None:
            self.graphed.backend.release_cached()
            self._note_workspace()
        return True

    def _refuse(self, key: Key) -> None:
        stop = self.guard.stops[-1]
        self._fail(key, BudgetError.__name__, f"{stop.limit}: {stop.detail}")

    def _fail(self, key: Key, error: str, detail: str) -> None:
        self.failed[key] = FailedKey(mode=key[0], descriptor=key[1], error=error, detail=detail)

    def _give_up(self, key: Key) -> None:
        self._evict([key])
        self.graphed.backend.release_cached()

    def _evict(self, keys: Collection[Key]) -> None:
        self.graphed.evict(keys)
        for key in keys:
            self._records.pop(key, None)

    def _free_all(self) -> None:
        """Begin a new generation, with no graph yet."""
        self._evict(tuple(self._records))
        self.graphed.pools.renew()
        self.history.clear()

    # --- the report -------------------------------------------------------------------------------

    def _note_workspace(self) -> None:
        outside = self.guard.outside_bytes() if self.graphed.backend.supports("driver_bytes") else 0
        self._workspace_bytes = max(outside - self.graphed.buffers.nbytes, 0)

    def _write_report(self) -> None:
        """Bring plan and report up to date with the graphs that are there."""
        graphed, guard = self.graphed, self.guard
        backend, pools, compilation = graphed.backend, graphed.pools, graphed.config.compilation
        plan = restricted(self.wanted, tuple(self._records), graphed.config)
        if (
            plan.predicted is not None
            and plan.keys
            and graphed.most_tokens != plan.max_capture_size
        ):
            predicted = plan.predicted.model_copy(update={"static_bytes": graphed.buffers.nbytes})
            plan = plan.model_copy(update={"predicted": predicted})
        graphed.plan = plan
        records = tuple(self._records[key] for key in plan.keys)
        missing = tuple(key for key in self.wanted.keys if key not in self._records)
        skipped = () if self.is_lazy else missing
        no_graph = (NO_GRAPH,) if (self._left_out or skipped) and not records else ()
        driver = (
            None
            if self._loaded_bytes is None
            else self._loaded_bytes + sum(r.driver_bytes or 0 for r in records)
        )
        report = CaptureReport(
            environment=self._environment,
            plan=plan,
            records=records,
            pool_bytes=pools.nbytes,
            static_bytes=graphed.buffers.nbytes,
            workspace_bytes=self._workspace_bytes or 0,
            driver_bytes=driver,
            free_before=self._before.free,
            free_after=backend.memory().free,
            session_seconds=self._seconds,
            inspection_seconds=graphed.inspection_seconds,
            split=graphed.route.describe() if graphed.most_tokens else None,
            borrowed_outputs=True,
            capture_policy=compilation.capture_policy,
            pool=pools.policy,
            generation=pools.generation,
            waiting=sum(key not in self.failed for key in missing) if self.is_lazy else 0,
            failed=tuple(self.failed.values()),
            warnings=(*plan.warnings, *self._warnings(), *no_graph),
            looked_at=graphed.looked_at,
            state=graphed.state,
            audit=self._audited,
        )
        if guard.active:
            budget = guard.record(self._left_out, skipped, report.graph_bytes - guard.shared_bytes)
            report = report.model_copy(update={"budget": budget})
        self.report = report

    def _warnings(self) -> list[str]:
        graphed, warnings = self.graphed, list[str]()
        if empty := [record.descriptor for record in self._records.values() if record.nodes == 0]:
            names = ", ".join(map(str, empty))
            warnings.append(
                f"graphs without any kernel: {names}; does the model run on this device?"
            )
        if graphed.returns_nothing:
            warnings.append("the model returned no tensor: is there a return in its forward?")
        if isinstance(graphed.model, torch.nn.Module) and graphed.model.training:
            warnings.append(
                "the model is in training mode: dropout and batch norm run as in training; call "
                ".eval() before the "
                "capture"
            )
        return warnings + graphed.route.warnings() + graphed.notes
