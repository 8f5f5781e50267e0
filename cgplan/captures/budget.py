"""Which keys a session starts with, and when it stops. Kernels are not counted: eager calls load
them, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from cgplan.backends import MemoryReading
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.config import BudgetConfig, Config
from cgplan.errors import CaptureMemoryError
from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.subset import restricted, spread
from cgplan.planning import Plan
from cgplan.planning.costs import KeyCost
from cgplan.pricing.estimated import NODE_BYTES
from cgplan.reports.records import BudgetRecord, GraphRecord, Limit, StopRecord
from cgplan.units import format_bytes, format_seconds

NO_GRAPH = "no graph was captured within this budget: every batch runs eagerly"


def fitting(
    plan: Plan,
    config: Config,
    free: int | None,
) -> Plan:
    """The plan without keys that are predicted not to fit; ``free``: device memory in bytes. The
    largest sizes go first: they take most and gain least.
    """
    most = config.budget.max_graphs
    if most is None:
        most = len(plan.keys)
    order = sorted(plan.keys, key=lambda key: (-key[1].elements, key[0] is CUDAGraphMode.FULL))
    while True:
        part = restricted(plan, spread(plan, order, most), config)
        if not order or _fits(part, config.budget, free):
            return part
        del order[0]


def _fits(
    part: Plan,
    budget: BudgetConfig,
    free: int | None,
) -> bool:
    cost = part.predicted
    if cost is None:
        return True
    if budget.memory is not None and cost.total_bytes > budget.memory:
        return False
    if budget.capture_time is not None and cost.seconds > budget.capture_time:
        return False
    if budget.reserve is None or free is None:
        return True
    return free - cost.total_bytes >= budget.reserve


class BudgetGuard:
    """Says before and after each capture whether all ranks' budgets allow the key.

    Attributes:
        shared_bytes: Bytes of the pool that others captured before.
        spent_seconds: In blocks of ``timed``.
        stops: Refused keys, in order.
    """

    def __init__(
        self,
        graphs: ModelGraphs,
        records: Mapping[Key, GraphRecord],
        before: MemoryReading,
    ) -> None:
        self.budget = graphs.config.budget
        self._limits = self.budget.model_dump()
        self.active = set(self._limits.values()) != {None}
        self.shared_bytes = graphs.pools.nbytes
        self.stops: list[StopRecord] = []
        self._graphs = graphs
        self._records = records
        self._reserved = before.reserved
        self._outside: int | None = None
        self._start = 0.0
        self.spent_seconds = 0.0
        self._predicted = dict[Key, KeyCost]()
        plan = graphs.plan
        if plan.predicted is not None:
            self._predicted = dict(zip(plan.keys, plan.predicted.keys, strict=True))

    # --- seconds ----------------------------------------------------------------------------------

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A block that spends the budget's seconds."""
        self._start = time.perf_counter() - self.spent_seconds
        try:
            yield
        finally:
            self.spent_seconds = self.used_seconds

    @property
    def used_seconds(self) -> float:
        return time.perf_counter() - self._start

    # --- bytes ------------------------------------------------------------------------------------

    def start_in_service(self) -> None:
        """Memory allocated since then belongs to others."""
        graphs = self._graphs
        graphs.backend.release_cached()
        self._reserved = graphs.backend.memory().reserved - graphs.buffers.nbytes
        self.shared_bytes = graphs.pools.nbytes

    @property
    def used_bytes(self) -> int:
        used = max(self._graphs.buffers.nbytes, self._outside or 0)
        if self._records:
            used += self._graphs.pools.nbytes - self.shared_bytes
        for record in self._records.values():
            used += _driver(record)
        return used

    def outside_bytes(self) -> int:
        """Bytes outside of the pool; caches are empty."""
        graphs = self._graphs
        held = graphs.backend.memory().reserved - self._reserved
        pool = graphs.pools.nbytes - self.shared_bytes
        return held - graphs.copied_bytes - pool

    # --- keys -------------------------------------------------------------------------------------

    def allows(self, key: Key) -> bool:
        return not self._graphs.ranks.any_refuses(self.active and self._refuses(key))

    def keeps(
        self,
        key: Key,
        remaining: int,
    ) -> bool:
        """Without predictions, the first key goes if the driver's memory for the ``remaining`` ones
        would pass a limit.
        """
        return not self._graphs.ranks.any_refuses(self.active and self._overshoots(key, remaining))

    def ran_out(
        self,
        key: Key,
        error: BaseException,
    ) -> None:
        """Tell all ranks that memory ran out."""
        if isinstance(error, CaptureMemoryError):
            free = format_bytes(self._graphs.backend.memory().free)
            self._stop("device memory", key, f"it ran out, with {free} free on the device")
        self._graphs.ranks.any_refuses(True, because=error)

    def record(
        self,
        left_out: Sequence[Key],
        skipped: Sequence[Key],
        used_bytes: int,
    ) -> BudgetRecord:
        return BudgetRecord(
            **self._limits,
            used_bytes=used_bytes,
            used_seconds=self.spent_seconds,
            left_out=tuple(left_out),
            stops=tuple(self.stops),
            skipped=tuple(skipped),
        )

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
            if record.nodes is not None:  # a chunk may serve many
                taken = min(taken, record.nodes * NODE_BYTES)
            rest = remaining * taken
        if rest:
            expected = f", {format_bytes(rest)} expected for the {remaining} keys after it"
        if self.budget.memory is not None:
            backend = self._graphs.backend
            if self._outside is None and backend.counts_driver_bytes:
                backend.release_cached()
                self._outside = self.outside_bytes()
            if self.used_bytes + rest > self.budget.memory:
                return self._stop("memory", key, f"{self._used()} with it{expected}")
        return self._short_of_reserve(key, rest, expected)

    def _expected(self, key: Key) -> tuple[int, float]:
        """The driver takes chunks, so the largest counts."""
        cost = self._predicted.get(key)
        if cost is not None:
            return cost.pool_bytes + cost.driver_bytes, cost.seconds
        records = list(self._records.values())
        alike = [record for record in records if record.mode is key[0]]
        if not alike:
            alike = records
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
        has_more = (self._outside or 0) > self._graphs.buffers.nbytes
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
