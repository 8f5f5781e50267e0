"""Budgets that hold: which keys a session starts with, and when it stops.

Note [What a budget counts]
    Memory is static buffers, the graph pool, what the driver takes while graphs are captured, and
    what the first warm-up leaves outside of the pool (library workspaces). Kernels that warm-ups
    load are not counted: eager calls need them, too. A key counts as one graph, in however many
    segments it is captured. Seconds are those of captures with their warm-ups, as plans predict
    them: not what comes before the first (static buffers, a garbage collection).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from cgplan.backends import MemoryReading
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.config import Config
from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.subset import restricted, spread
from cgplan.planning import Plan
from cgplan.pricing.estimated import NODE_BYTES
from cgplan.reports.records import BudgetRecord, GraphRecord, Limit, StopRecord
from cgplan.units import format_bytes, format_seconds

NO_GRAPH = "no graph was captured within this budget: every batch runs eagerly"


def fitting(plan: Plan, config: Config, free: int | None) -> Plan:
    """The plan without the keys that are known not to fit the budget before anything is captured.

    The number of graphs is always known, memory and time where the plan has predictions. For want
    of memory or time the largest sizes go first: they take most of the pool, and graphs gain least
    there; of equal sizes, PIECEWISE before FULL. Of what is left, ``budget.max_graphs`` keeps the
    largest sizes and those that pad least: Note [Spread].
    """
    budget = config.budget

    def fits(part: Plan) -> bool:
        cost = part.predicted
        return cost is None or (
            (budget.memory is None or cost.total_bytes <= budget.memory)
            and (budget.capture_time is None or cost.seconds <= budget.capture_time)
            and (
                budget.reserve is None or free is None or free - cost.total_bytes >= budget.reserve
            )
        )

    order = sorted(plan.keys, key=lambda key: (-key[1].elements, key[0] is CUDAGraphMode.FULL))
    most = len(order) if budget.max_graphs is None else budget.max_graphs
    start, part = 0, restricted(plan, spread(plan, order, most), config)
    while start < len(order) and not fits(part):
        start += 1
        part = restricted(plan, spread(plan, order[start:], most), config)
    return part


class BudgetGuard:
    """Watches the captures of a model, and says before and after each key whether the budget allows
    it.

    Several ranks that must capture the same graphs need limits that all of them meet alike: a
    number of graphs, or memory with the same predictions, not seconds.

    Args:
        records: What is captured now, by key; the caller keeps it up to date.
        before: The device's memory before anything of the model was allocated.

    Attributes:
        active: Whether there is any limit.
        shared_bytes: Bytes that others had captured into the pool before; they do not count.
        stops: Keys that were refused, in order.
    """

    def __init__(
        self, graphed: ModelGraphs, records: Mapping[Key, GraphRecord], before: MemoryReading
    ) -> None:
        self.budget = graphed.config.budget
        # that one leaves out no key
        self._limits = self.budget.model_dump(exclude={"compile_time"})
        self.active = any(limit is not None for limit in self._limits.values())
        self.shared_bytes = graphed.pools.nbytes
        self.stops: list[StopRecord] = []
        self._graphed, self._records, self._reserved = graphed, records, before.reserved
        self._outside: int | None = None
        self._start, self._spent = time.perf_counter(), 0.0
        predicted = graphed.plan.predicted
        self._predicted = (
            dict(zip(graphed.plan.keys, predicted.keys, strict=True)) if predicted else {}
        )

    def go_on(self, *, from_zero: bool = False) -> None:
        """Count seconds from now on: captures come. ``from_zero``: without those before the last
        ``rest``.
        """
        self._start = time.perf_counter() - (0.0 if from_zero else self._spent)

    def rest(self) -> None:
        """Stop counting seconds until ``go_on``: batches are served in between."""
        self._spent = self.used_seconds

    def start_in_service(self) -> None:
        """Nothing was ever captured: all memory that was allocated since the session is of
        others.
        """
        self._graphed.backend.release_cached()
        self._reserved = self._graphed.backend.memory().reserved - self._graphed.buffers.nbytes
        self.shared_bytes = self._graphed.pools.nbytes

    @property
    def used_seconds(self) -> float:
        return time.perf_counter() - self._start

    @property
    def used_bytes(self) -> int:
        pool = self._graphed.pools.nbytes - self.shared_bytes if self._records else 0
        return (
            max(self._graphed.buffers.nbytes, self._outside or 0)
            + pool
            + sum(map(_driver, self._records.values()))
        )

    def outside_bytes(self) -> int:
        """Bytes that the model holds outside of the pool, static buffers included; caches were
        given back before.
        """
        graphed, pool = self._graphed, self._graphed.pools.nbytes - self.shared_bytes
        return graphed.backend.memory().reserved - graphed.copied_bytes - self._reserved - pool

    def stop_before(self, key: Key) -> bool:
        if not self.active:
            return False
        budget, (growth, seconds) = self.budget, self._expected(key)
        if budget.max_graphs is not None and len(self._records) >= budget.max_graphs:
            return self._stop("max_graphs", key, f"{len(self._records)} graphs are captured")
        if budget.capture_time is not None and self.used_seconds + seconds > budget.capture_time:
            expected = f", {format_seconds(seconds)} expected for it" if seconds else ""
            return self._stop(
                "capture_time", key, f"{format_seconds(self.used_seconds)} are used{expected}"
            )
        expected = f", {format_bytes(growth)} expected for it" if growth else ""
        if budget.memory is not None and self.used_bytes + growth > budget.memory:
            return self._stop("memory", key, f"{self._used()}{expected}")
        return self._short_of_reserve(key, growth, expected)

    def overshoots(self, key: Key, remaining: int) -> bool:
        """Whether a key that was captured, and stands in the records, has to be freed again.

        That is so if it has passed a limit; and if nothing was predicted, it is the first one, and
        the ``remaining`` keys will pass a limit should the driver take as much for each of them:
        better to begin with a smaller size than to end with large ones alone.
        """
        if not self.active:
            return False
        rest = 0
        if len(self._records) == 1 and key not in self._predicted:
            # or less, if it was a chunk for many
            taken, nodes = _driver(self._records[key]), self._records[key].nodes
            rest = remaining * (taken if nodes is None else min(taken, nodes * NODE_BYTES))
        expected = (
            f", {format_bytes(rest)} expected for the {remaining} keys after it" if rest else ""
        )
        if self.budget.memory is not None:
            if self._outside is None and self._graphed.backend.supports("driver_bytes"):
                self._graphed.backend.release_cached()
                self._outside = self.outside_bytes()
            if self.used_bytes + rest > self.budget.memory:
                return self._stop("memory", key, f"{self._used()} with it{expected}")
        return self._short_of_reserve(key, rest, expected)

    def ran_out(self, key: Key) -> None:
        free = format_bytes(self._graphed.backend.memory().free)
        self._stop("device memory", key, f"it ran out, with {free} free on the device")

    def record(
        self, left_out: Sequence[Key], skipped: Sequence[Key], used_bytes: int
    ) -> BudgetRecord:
        return BudgetRecord(
            **self._limits,
            used_bytes=used_bytes,
            used_seconds=self._spent,
            left_out=tuple(left_out),
            stops=tuple(self.stops),
            skipped=tuple(skipped),
        )

    def _expected(self, key: Key) -> tuple[int, float]:
        # Bytes and seconds, as predicted; else as measured of its mode, else of the session. A
        # larger size left a pool that holds this one. The driver takes memory in chunks, so the
        # most that a key took counts.
        cost = self._predicted.get(key)
        if cost is not None:
            return cost.pool_bytes + cost.driver_bytes, cost.seconds
        alike = [r for r in self._records.values() if r.mode is key[0]] or list(
            self._records.values()
        )
        if not alike:
            return 0, 0.0
        return max(map(_driver, alike)), alike[-1].seconds

    def _short_of_reserve(self, key: Key, growth: int, expected: str) -> bool:
        if self.budget.reserve is None:
            return False
        backend, needed = (
            self._graphed.backend,
            self.budget.reserve + growth - self._graphed.copied_bytes,
        )
        free = backend.memory().free
        if free is not None and free < needed:
            backend.release_cached()  # what the warm-ups used is free, too
            free = backend.memory().free
        if free is None or free >= needed:
            return False
        return self._stop("reserve", key, f"{format_bytes(free)} are free{expected}")

    def _used(self) -> str:
        used, static = format_bytes(self.used_bytes), self._graphed.buffers.nbytes
        if self._records:
            return f"{used} are used"
        return (
            f"the static buffers{' and workspaces' if (self._outside or 0) > static else ''} "
            f"take {used}"
        )

    def _stop(self, limit: Limit, key: Key, detail: str) -> bool:
        self.stops.append(StopRecord(limit=limit, mode=key[0], descriptor=key[1], detail=detail))
        return True


def _driver(record: GraphRecord) -> int:
    return max(record.driver_bytes or 0, 0)
