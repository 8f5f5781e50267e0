"""The keys of a model that are captured, at start-up and between batches.

Note [Giving a key up]
    A pool keeps its segments while a graph lives, so graphs are captured again in a new pool. What
    is captured next:

    start-up, refused ahead     none: a smaller key takes as much of the driver's memory
    start-up, none captured     the next key
    start-up, others captured   those again: on other ranks the pool may have grown, and their
                                collectives count from the first one; keys that wait get no graph
    service, an own pool grew   those again, then keys that wait
    service, else               the next key; no new pool
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cgplan.backends import MemoryReading
from cgplan.backends.backend import span
from cgplan.captures.audit import audit, audit_error
from cgplan.captures.capturer import Capturer, Next, driver_bytes
from cgplan.captures.failures import drop_locals
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.config import Config
from cgplan.errors import (
    AuditError,
    BudgetError,
    CaptureError,
    CaptureMemoryError,
    CgplanError,
    ConfigError,
    ModelError,
    RankFailedError,
)
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.optimizer.subset import restricted, spread
from cgplan.planning import MissReason, Plan
from cgplan.planning.plan import KeyCost, capture_order
from cgplan.pricing import NODE_BYTES
from cgplan.reports.records import (
    AuditReport,
    BudgetRecord,
    CaptureReport,
    FailedKey,
    GraphRecord,
    Limit,
    StopRecord,
)
from cgplan.units import counted, format_bytes, format_seconds, listed


@dataclass(frozen=True)
class CaptureProgress:
    """Key ``index`` (from 0) is captured next."""

    index: int
    total: int
    mode: CUDAGraphMode
    descriptor: BatchDescriptor


Progress = Callable[[CaptureProgress], None]


@dataclass(eq=False, repr=False)
class CapturedKeys:
    """The keys that have graphs, and those that have none.

    Args:
        graphs: Its ``plan`` is ``wanted`` until ``start_up`` ends, then what is captured of it.
        wanted: What is ``fitting`` of the plan ``asked`` for.
        prove: By a second capture of a plan, for ``audit: prove``.

    Attributes:
        failed: Keys that are not tried again.
        history: Captures in order, with those of evicted keys, since the pool was new.
    """

    graphs: ModelGraphs
    asked: Plan
    wanted: Plan
    before: MemoryReading
    prove: Callable[[ModelGraphs, Plan], None]
    progress: Progress | None = None

    def __post_init__(self) -> None:
        graphs = self.graphs
        self.failed: dict[Key, FailedKey] = {}
        self.history: list[GraphRecord] = []
        self.report: CaptureReport
        self._records: dict[Key, GraphRecord] = {}
        self.guard = BudgetGuard(graphs, self._records, self.before)
        self._capturer = Capturer(graphs)
        self._environment = graphs.backend.environment(self.asked.config_hash)
        self._survivable: tuple[type[CgplanError], ...] = ()
        if self.guard.active:
            # another rank ran out of memory, and this one waited for its sum
            self._survivable = (CaptureMemoryError, RankFailedError)
        self._loaded_bytes: int | None = None  # of kernels
        self._workspace_bytes: int | None = None  # None: nothing was captured
        self._seconds = 0.0
        self._audited: AuditReport | None = None

    @property
    def keys(self) -> tuple[Key, ...]:
        return self.graphs.plan.keys

    def reason_against(self, key: Key) -> MissReason:
        failed = self.failed.get(key)
        if failed and not failed.is_over_budget:
            return MissReason.CAPTURE_FAILED
        if failed is None and self.graphs.on_demand and key in self.wanted.keys:
            return MissReason.NOT_CAPTURED_YET
        return MissReason.OVER_BUDGET

    def check_addresses(self, key: Key | None = None) -> None:
        addresses = self.graphs.addresses
        addresses.refuse_invalid()
        if self.keys:
            addresses.check(key or self.keys[0], again=True)

    # --- at start-up, and later -------------------------------------------------------------------

    def start_up(
        self,
        keys: Sequence[Key],
        began: float,
    ) -> None:
        """Raises as CaptureSession.run, and AuditError."""
        graphs = self.graphs
        if keys:
            with graphs.first_captures(), self.guard.timed():
                self.capture_all(keys)
                self._capturer.refuse_uncomputed()
        self._capturer.in_service = True
        self._survivable = (CaptureError, ModelError, ConfigError)
        graphs.ranks.end()
        self._seconds = time.perf_counter() - began
        if keys and not self._records and not graphs.on_demand:
            graphs.allocate_buffers(())  # no graph reads static buffers
        self._note_workspace()
        taken = driver_bytes(graphs.backend, self.before, graphs.backend.memory())
        if taken is not None:
            self._loaded_bytes = taken - self.guard.graph_driver_bytes
        graphs.seal()
        self._audit_if_asked()
        self._note_captured()
        self.report = graphs.ranks.completed(self.report)

    def capture(
        self,
        keys: Collection[Key],
        *,
        evicted: Collection[Key] = (),
        renew: bool = False,
    ) -> tuple[Key, ...]:
        """The largest keys first; returns those that have graphs then. ``renew``: free all graphs
        first, for a new pool. Raises AddressError, as new graphs would hide a move, and AuditError.
        """
        if keys:
            self.check_addresses(next(iter(keys)))
        start = time.perf_counter()
        new: tuple[Key, ...] = ()
        try:
            if renew:
                self._free_all()
            elif evicted:
                self._evict(evicted)
            missing = set(self.wanted.keys) - set(self.failed) - set(self._records)
            new = capture_order(key for key in keys if key in missing)
            if new:  # else no walk over the model
                with self.graphs.captures_again(), self.guard.timed():
                    if self._workspace_bytes is None:
                        self.guard.start_in_service()
                    self.capture_all(new)
            self._note_workspace()
            self._audit_if_asked()
        except AuditError:
            self._evict(new)
            raise
        finally:
            self._seconds += time.perf_counter() - start
            self._note_captured()
        return tuple(key for key in new if key in self._records)

    def _audit_if_asked(self) -> None:
        setting = self.graphs.config.compilation.audit
        self._audited = None
        if setting == "off":
            return
        if setting == "prove":
            self.prove(self.graphs, self._plan())
        self._audited = self.audit()
        if self._audited.findings and setting != "report":
            raise audit_error(self._audited)

    def audit(self) -> AuditReport:
        return audit(self.graphs, self._environment)

    # --- the loop ---------------------------------------------------------------------------------

    def capture_all(
        self,
        keys: Sequence[Key],
    ) -> None:
        in_service = self._capturer.in_service
        pools = self.graphs.pools
        waiting = list(keys)
        had_graphs = set[Key]()
        done = 0
        while waiting:
            key = waiting.pop(0)
            if key not in had_graphs and not self.guard.allows(key):
                if not in_service:
                    break
                self._remember_refusal(key)  # in service there is one rank
                continue
            if self.progress is not None:
                total = done + 1 + len(waiting)
                self.progress(CaptureProgress(done, total, *key))
            done += 1
            pool_bytes = pools.nbytes if in_service else 0
            found = self._capture_one(key, 0 if in_service else len(waiting))
            if isinstance(found, GraphRecord):
                self.history.append(found)
                continue
            captured = capture_order(self._records)
            if found is Next.START_AGAIN:
                assert not in_service, "captures in service have warm-ups"
                waiting = [*captured, key, *waiting]
            elif in_service:
                if not captured or not pools.is_private or pools.nbytes <= pool_bytes:
                    continue
                waiting = [*captured, *waiting]
            elif captured:
                waiting = list(captured)
            had_graphs.update(captured)
            self._free_all()
            self.graphs.ranks.dropped()
            done = 0
        if self.graphs.real_rows:  # `refill` takes real rows for the model's writes
            self.graphs.buffers.fill_padding()

    def _capture_one(
        self,
        key: Key,
        remaining: int,
    ) -> GraphRecord | Next:
        in_service = self._capturer.in_service
        try:
            with span(f"{key[0]} {key[1]}", num_tokens=key[1].num_tokens) as shown:
                found = self._capturer.capture(key)
                if isinstance(found, Next):
                    return found
                for name in ("pool_growth", "driver_bytes", "nodes", "graphs"):
                    shown[name] = getattr(found, name)
        except self._survivable as error:
            drop_locals(error)
            if in_service:
                self._remember(key, error)
            else:
                self.guard.ran_out(key, error)
        except BaseException:
            if in_service:
                self._give_up(key)
            raise
        else:
            self._records[key] = found
            if self.guard.keeps(key, remaining):  # may raise for all ranks, at start-up alone
                return found
            if in_service:
                self._remember_refusal(key)
        self._give_up(key)
        return Next.GIVE_UP

    def _remember_refusal(self, key: Key) -> None:
        stop = self.guard.stops[-1]
        self._remember(key, BudgetError(f"{stop.limit}: {stop.detail}"))

    def _remember(self, key: Key, error: CgplanError) -> None:
        self.failed[key] = FailedKey(
            mode=key[0],
            descriptor=key[1],
            error=type(error).__name__,
            detail=error.message,
            remedy=error.remedy,
        )

    def _give_up(self, key: Key) -> None:
        self._evict([key])
        self.graphs.backend.release_cached()

    def _evict(self, keys: Collection[Key]) -> None:
        self.graphs.evict(keys)
        for key in keys:
            self._records.pop(key, None)

    def _free_all(self) -> None:
        self._evict(tuple(self._records))
        self.graphs.pools.renew()
        self.history.clear()

    # --- the report -------------------------------------------------------------------------------

    def _note_workspace(self) -> None:
        if self._workspace_bytes is not None:
            return
        self.graphs.backend.release_cached()  # also static buffers that no graph reads
        if not self._records:
            return
        self._workspace_bytes = 0
        if self.graphs.backend.counts_driver_bytes:
            beside = self.guard.beside_pool_bytes() - self.graphs.buffers.nbytes
            self._workspace_bytes = max(beside, 0)

    def _note_captured(self) -> None:
        graphs = self.graphs
        guard = self.guard
        plan = self._plan()
        graphs.plan = plan
        records = tuple(map(self._records.__getitem__, plan.keys))
        missing = [key for key in self.wanted.keys if key not in self._records]
        waiting = 0
        if graphs.on_demand:
            waiting = sum(key not in self.failed for key in missing)
            missing = []
        missing = [key for key in missing if self.reason_against(key) is MissReason.OVER_BUDGET]
        in_plan = set(self.wanted.keys)
        left_out = [key for key in self.asked.keys if key not in in_plan]
        warnings = list(plan.warnings)
        empty = [str(record.descriptor) for record in records if record.nodes == 0]
        if empty:
            warnings.append(
                f"graphs without any kernel: {listed(empty)}; does the model run on this device?"
            )
        if self._capturer.returns_nothing:
            warnings.append("the model returned no tensor: is there a return in its forward?")
        if isinstance(graphs.model, torch.nn.Module) and graphs.model.training:
            warnings.append("the model is in training mode: call .eval() before the capture")
        warnings += [*graphs.route.warnings(), *graphs.facts.notes]
        lost = len(left_out) + len(missing)
        if lost:
            lack = f"the budget leaves {counted(lost, 'key')} without a graph"
            warnings.append(lack if records else NO_GRAPH)
        driver = self._loaded_bytes
        if driver is not None:
            driver += guard.graph_driver_bytes
        report = CaptureReport(
            environment=self._environment,
            plan=plan,
            records=records,
            pool_bytes=graphs.pools.nbytes,
            static_bytes=graphs.buffers.nbytes,
            workspace_bytes=self._workspace_bytes or 0,
            driver_bytes=driver,
            free_before=self.before.free,
            free_after=graphs.backend.memory().free,
            session_seconds=self._seconds,
            inspection_seconds=self._capturer.inspection_seconds,
            split=graphs.route.describe() if graphs.most_tokens else None,
            capture_policy=graphs.config.compilation.capture_policy,
            pool=graphs.pools.policy,
            generation=graphs.pools.generation,
            waiting=waiting,
            failed=tuple(self.failed.values()),
            warnings=tuple(warnings),
            looked_at=graphs.looked_at,
            started_again=self._capturer.started_again,
            state=graphs.state_records,
            audit=self._audited,
        )
        if guard.active:
            used = report.graph_bytes - guard.shared_bytes
            budget = BudgetRecord(
                **guard.limits,
                used_bytes=used,
                used_seconds=guard.spent_seconds,
                left_out=tuple(left_out),
                stops=tuple(guard.stops),
                skipped=tuple(missing),
            )
            report = report.changed(budget=budget)
        self.report = report

    def _plan(self) -> Plan:
        graphs = self.graphs
        plan = restricted(self.wanted, tuple(self._records), graphs.config)
        predicted = plan.predicted
        if predicted is None or not plan.keys or graphs.most_tokens == plan.max_capture_size:
            return plan
        # buffers are those of ``wanted``
        predicted = predicted.changed(static_bytes=graphs.buffers.nbytes)
        return plan.changed(predicted=predicted)


NO_GRAPH = "no graph was captured within this budget: every batch runs eagerly"


def fitting(
    plan: Plan,
    config: Config,
    free: int | None,
) -> Plan:
    """The plan without keys that are predicted to pass the budget, whose reserve is of ``free``
    bytes. The largest sizes go first: they take most and gain least.
    """
    budget = config.budget
    most = budget.max_graphs
    if most is None:
        most = len(plan.keys)
    order = sorted(plan.keys, key=lambda key: (-key[1].elements, key[0] is CUDAGraphMode.FULL))
    while True:
        part = restricted(plan, spread(plan, order, most), config)
        cost = part.predicted
        if not order or cost is None:
            return part
        fits = budget.memory is None or cost.total_bytes <= budget.memory
        fits &= budget.capture_time is None or cost.seconds <= budget.capture_time
        if budget.reserve is not None and free is not None:
            fits &= free - cost.total_bytes >= budget.reserve
        if fits:
            return part
        del order[0]


class BudgetGuard:
    """Says before and after each capture whether the budgets of all ranks allow the key.

    Attributes:
        shared_bytes: Of the pool, before this session.
        spent_seconds: In blocks of ``timed``.
    """

    def __init__(
        self,
        graphs: ModelGraphs,
        records: Mapping[Key, GraphRecord],
        before: MemoryReading,
    ) -> None:
        self.budget = graphs.config.budget
        self.limits = self.budget.model_dump()
        self.active = set(self.limits.values()) != {None}
        self.shared_bytes = graphs.pools.nbytes
        self.stops: list[StopRecord] = []
        self._graphs = graphs
        self._records = records
        self._reserved = before.reserved
        self._beside_pool: int | None = None
        self._start = 0.0
        self.spent_seconds = 0.0
        self._predicted = dict[Key, KeyCost]()
        plan = graphs.plan
        if plan.predicted:
            self._predicted = dict(zip(plan.keys, plan.predicted.keys, strict=True))

    @contextmanager
    def timed(self) -> Iterator[None]:
        self._start = time.perf_counter() - self.spent_seconds
        try:
            yield
        finally:
            self.spent_seconds = self.used_seconds

    @property
    def used_seconds(self) -> float:
        return time.perf_counter() - self._start

    def start_in_service(self) -> None:
        """Memory allocated since the session began belongs to others."""
        graphs = self._graphs
        graphs.backend.release_cached()
        self._reserved = graphs.backend.memory().reserved - graphs.buffers.nbytes
        self.shared_bytes = graphs.pools.nbytes

    @property
    def graph_driver_bytes(self) -> int:
        return sum(map(_driver, self._records.values()))

    @property
    def used_bytes(self) -> int:
        used = max(self._graphs.buffers.nbytes, self._beside_pool or 0)
        if self._records:  # else the next key takes what the pool has
            used += self._graphs.pools.nbytes - self.shared_bytes
        return used + self.graph_driver_bytes

    def beside_pool_bytes(self) -> int:
        """Static buffers and workspaces; the caller has emptied caches."""
        graphs = self._graphs
        held = graphs.backend.memory().reserved - self._reserved
        pool = graphs.pools.nbytes - self.shared_bytes
        return held - graphs.copied_bytes - pool

    def allows(self, key: Key) -> bool:
        return not self._graphs.ranks.any_refuses(self.active and self._refuses(key))

    def keeps(
        self,
        key: Key,
        remaining: int,
    ) -> bool:
        """Without predictions, the largest keys are given up until the driver's memory for the
        ``remaining`` ones is within the limits; 0 in service, where a key given up stays
        ``failed``.
        """
        return not self._graphs.ranks.any_refuses(self.active and self._overshoots(key, remaining))

    def ran_out(
        self,
        key: Key,
        error: BaseException,
    ) -> None:
        if isinstance(error, CaptureMemoryError):
            free = format_bytes(self._graphs.backend.memory().free)
            self._stop("device memory", key, f"it ran out, with {free} free on the device")
        self._graphs.ranks.any_refuses(True, because=error)  # answers the others' ``keeps``

    def _refuses(self, key: Key) -> bool:
        budget = self.budget
        graphs = len(self._records)
        if budget.max_graphs is not None and graphs >= budget.max_graphs:
            return self._stop("max_graphs", key, f"{graphs} graphs are captured")
        growth, seconds = self._expected(key)
        used = self.used_seconds
        if budget.capture_time is not None and used + seconds > budget.capture_time:
            detail = f"{format_seconds(used)} are used"
            if seconds:
                detail += f", {format_seconds(seconds)} expected for it"
            return self._stop("capture_time", key, detail)
        expected = f", {format_bytes(growth)} expected for it" if growth else ""
        if budget.memory is not None and self.used_bytes + growth > budget.memory:
            return self._stop("memory", key, self._used() + expected)
        return self._short_of_reserve(key, growth, expected)

    def _overshoots(
        self,
        key: Key,
        remaining: int,
    ) -> bool:
        rest = 0
        expected = ""
        if len(self._records) == 1 and key not in self._predicted:
            record = self._records[key]
            taken = _driver(record)
            assert record.nodes is not None, "of saved reports alone"
            taken = min(taken, record.nodes * NODE_BYTES)  # a chunk may serve many
            rest = remaining * taken
        if rest:
            expected = f", {format_bytes(rest)} expected for the {remaining} keys after it"
        if self.budget.memory is not None:
            backend = self._graphs.backend
            if self._beside_pool is None and backend.counts_driver_bytes:
                backend.release_cached()
                self._beside_pool = self.beside_pool_bytes()
            if self.used_bytes + rest > self.budget.memory:
                return self._stop("memory", key, f"{self._used()} with it{expected}")
        return self._short_of_reserve(key, rest, expected)

    def _expected(self, key: Key) -> tuple[int, float]:
        """The driver takes chunks, so the largest counts."""
        cost = self._predicted.get(key)
        if cost:
            return cost.pool_bytes + cost.driver_bytes, cost.seconds
        records = list(self._records.values())
        alike = [record for record in records if record.mode is key[0]] or records
        if not alike:
            return 0, 0.0
        return max(map(_driver, alike)), alike[-1].seconds

    def _short_of_reserve(
        self,
        key: Key,
        growth: int,
        expected: str,
    ) -> bool:
        if self.budget.reserve is None:
            return False
        backend = self._graphs.backend
        needed = self.budget.reserve + growth - self._graphs.copied_bytes
        free = backend.memory().free
        if free is not None and free < needed:
            backend.release_cached()
            free = backend.memory().free
        if free is None or free >= needed:
            return False
        return self._stop("reserve", key, f"{format_bytes(free)} are free{expected}")

    def _used(self) -> str:
        used = format_bytes(self.used_bytes)
        if self._records:
            return f"{used} are used"
        has_more = (self._beside_pool or 0) > self._graphs.buffers.nbytes
        return f"the static buffers{' and workspaces' if has_more else ''} take {used}"

    def _stop(
        self,
        limit: Limit,
        key: Key,
        detail: str,
    ) -> bool:
        stop = StopRecord(
            limit=limit,
            mode=key[0],
            descriptor=key[1],
            detail=detail,
        )
        self.stops.append(stop)
        return True


def _driver(record: GraphRecord) -> int:
    return max(record.driver_bytes or 0, 0)
