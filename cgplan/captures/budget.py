"""Budgets that hold: which keys a session starts with, and when it stops.

Note [What a budget counts]
    Memory is static buffers, the graph pool, what the driver takes while graphs are captured, and what the first
    warm-up leaves outside of the pool (library workspaces). Kernels that warm-ups load are not counted: eager calls
    need them, too. A key counts as one graph, in however many segments it is captured. Seconds are those of captures
    with their warm-ups, as plans predict them: not what comes before the first (static buffers, a garbage collection).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from cgplan.backends import GraphBackend, MemoryReading
from cgplan.captures.key import CapturedKey, driver_bytes
from cgplan.config import Config
from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.subset import restricted, spread
from cgplan.planning import Plan
from cgplan.planning.costs import Predicted
from cgplan.pricing.estimated import NODE_BYTES
from cgplan.reports.records import BudgetRecord, Limit, StopRecord
from cgplan.units import format_bytes, format_seconds

NO_GRAPH = "no graph was captured within this budget: every batch runs eagerly"


def fitting(plan: Plan, config: Config, free: int | None) -> tuple[Plan, tuple[Key, ...]]:
    """The plan without the keys that are known not to fit the budget before anything is captured, and those keys.

    The number of graphs is always known, memory and time where the plan has predictions. For want of memory or time the
    largest sizes go first: they take most of the pool, and graphs gain least there; of equal sizes, PIECEWISE before
    FULL. Of what is left, ``budget.max_graphs`` keeps the largest sizes and those that pad least: Note [Spread].

    Args:
        plan: What is to be captured.
        config: Its budget, and the inputs.
        free: Free device memory, None where not known.
    """
    order = sorted(plan.keys, key=lambda key: (-key[1].num_tokens, key[0] is CUDAGraphMode.FULL))
    most = len(order) if config.budget.max_graphs is None else config.budget.max_graphs
    start, kept = 0, spread(plan, order, most)
    while start < len(order) and not _fits(plan, config, free, kept):
        start += 1
        kept = spread(plan, order[start:], most)
    left = set(order) - set(kept)
    return restricted(plan, kept, config), tuple(key for key in order if key in left)


def _fits(plan: Plan, config: Config, free: int | None, keys: Sequence[Key]) -> bool:
    """Whether memory and time are enough for these keys, as far as they are predicted."""
    budget = config.budget
    if plan.predicted is None or (budget.memory, budget.capture_time, budget.reserve) == (None, None, None):
        return True
    predicted: Predicted | None = restricted(plan, keys, config).predicted
    if predicted is None:
        return True
    memory, seconds = predicted.total_bytes, predicted.seconds
    return (
        (budget.memory is None or memory <= budget.memory)
        and (budget.capture_time is None or seconds <= budget.capture_time)
        and (budget.reserve is None or free is None or free - memory >= budget.reserve)
    )


class BudgetGuard:
    """Watches a session, and says before and after each key whether the budget allows it.

    Several ranks that must capture the same graphs need limits that all of them meet alike: a number of graphs, or
    memory with the same predictions, not seconds.

    Args:
        config: Its budget.
        plan: What is captured; its predictions are used where it has some.
        backend: The device.
        before: Its memory before anything of the session was allocated.

    Attributes:
        active: Whether there is any limit.
        static_bytes: Bytes of the static buffers, once there are any.
        shared_bytes: What others had captured into the pool before; it does not count.
        copied_bytes: Says what copies of the model's state take on the device now; they go after the captures.
        stops: What it refused, in order.
    """

    def __init__(self, config: Config, plan: Plan, backend: GraphBackend, before: MemoryReading) -> None:
        self.budget = config.budget
        self.active = any(limit is not None for limit in vars(config.budget).values())
        self.static_bytes = 0
        self.shared_bytes = 0
        self.copied_bytes: Callable[[], int] = int
        self._is_first = True
        self.stops: list[StopRecord] = []
        self._backend = backend
        self._before = before
        self._spent: float | None = None
        self._predicted = dict(zip(plan.keys, plan.predicted.keys, strict=True)) if plan.predicted else {}
        self.forget()
        self.begin()

    def begin(self) -> None:
        """Count seconds from now on: the first capture comes."""
        self._start = time.perf_counter()

    def forget(self, *, in_service: bool = False) -> None:
        """All graphs were freed; time goes on. ``in_service``: what lies outside of the pool stays as it was measured,
        because others have allocated since.
        """
        self._captured: list[CapturedKey] = []
        self._driver: list[int] = []
        self._outside: int | None = self._outside if in_service else None
        self._pool_bytes = 0

    def release(self, keys: Collection[Key], pool_bytes: int) -> None:
        """Some graphs were freed, and the pools hold so many bytes now."""
        kept = [pair for pair in zip(self._captured, self._driver, strict=True) if pair[0].key not in keys]
        self._captured, self._driver = [captured for captured, _ in kept], [driver for _, driver in kept]
        self._pool_bytes = pool_bytes - self.shared_bytes if kept else 0

    def rest(self) -> None:
        """Stop counting seconds until ``go_on``: batches are served in between."""
        self._spent = self.used_seconds

    def go_on(self, *, from_zero: bool = False) -> None:
        """Count seconds again, on from those before the rest, or from 0."""
        self._start = time.perf_counter() - (0.0 if from_zero else self.used_seconds)
        self._spent = None
        if not self._captured and self._is_first:  # nothing of what was allocated since the session is of graphs
            now = self._backend.memory()
            self._before = MemoryReading(now.free, now.total, now.reserved - self.static_bytes)

    @property
    def used_bytes(self) -> int:
        """See Note [What a budget counts]."""
        pool = self._pool_bytes
        return max(self.static_bytes, self._outside or 0) + pool + sum(self._driver)

    @property
    def used_seconds(self) -> float:
        """Since ``begin``, without the times between ``rest`` and ``go_on``."""
        return time.perf_counter() - self._start if self._spent is None else self._spent

    def stop_before(self, key: Key) -> bool:
        """Whether capturing ``key`` would pass a limit, as far as that can be foreseen."""
        if not self.active:
            return False
        budget, (growth, seconds) = self.budget, self._expected(key)
        if budget.max_graphs is not None and len(self._captured) >= budget.max_graphs:
            return self._stop("max_graphs", key, f"{len(self._captured)} graphs are captured")
        if budget.capture_time is not None and self.used_seconds + seconds > budget.capture_time:
            expected = f", {format_seconds(seconds)} expected for it" if seconds else ""
            return self._stop("capture_time", key, f"{format_seconds(self.used_seconds)} are used{expected}")
        if budget.memory is not None and self.used_bytes + growth > budget.memory:
            return self._stop("memory", key, f"{self._used()}{_more(growth)}")
        return self._short_of_reserve(key, growth, _more(growth))

    def add(self, captured: CapturedKey, remaining: int) -> bool:
        """Take note of a captured key; whether it has to be freed again.

        That is so if it has passed a limit; and if nothing was predicted, it is the first one, and the ``remaining``
        keys will pass a limit should the driver take as much for each of them: better to begin with a smaller size
        than to end with large ones alone.
        """
        if not self.active:
            return False
        if self._is_first:
            self._is_first, self.shared_bytes = False, captured.before[1]
        self._captured.append(replace(captured, entries=()))  # outputs are watched: nobody else may hold them
        self._pool_bytes = captured.after[1] - self.shared_bytes
        self._driver.append(max(driver_bytes(self._backend, captured.before[0], captured.after[0]) or 0, 0))
        first = len(self._captured) == 1 and captured.key not in self._predicted
        rest = self._expected_of_driver(captured) * remaining if first else 0
        if self.budget.memory is not None:
            if self._outside is None:
                self._outside = self._kept_outside()
            if self.used_bytes + rest > self.budget.memory:
                return self._stop("memory", captured.key, f"{self._used()} with it{_more(rest, remaining)}")
        return self._short_of_reserve(captured.key, rest, _more(rest, remaining))

    def ran_out(self, key: Key) -> None:
        """Take note that memory ran out at ``key``."""
        free = format_bytes(self._backend.memory().free)
        self._stop("device memory", key, f"it ran out, with {free} free on the device")

    def record(self, left_out: Sequence[Key], skipped: Sequence[Key], used_bytes: int) -> BudgetRecord | None:
        """The outcome for the report, None without a budget."""
        if not self.active:
            return None
        return BudgetRecord(
            **self.budget.model_dump(),
            used_bytes=used_bytes,
            used_seconds=self.used_seconds,
            left_out=tuple(left_out),
            stops=tuple(self.stops),
            skipped=tuple(skipped),
        )

    def _expected(self, key: Key) -> tuple[int, float]:
        """Bytes and seconds for a key: as predicted, else as measured of its mode, else of the session; else nothing.

        A larger size was captured before it, and left a pool that holds it: without predictions that growth is not
        expected again. The driver takes memory in chunks, so that the most that a key took counts.
        """
        cost = self._predicted.get(key)
        if cost is not None:
            return cost.pool_bytes + cost.driver_bytes, cost.seconds
        seen = list(zip(self._captured, self._driver, strict=True))
        alike = [(c, driver) for c, driver in seen if c.mode is key[0]] or seen
        if not alike:
            return 0, 0.0
        last = alike[-1][0]
        return max(driver for _, driver in alike), last.warmup_seconds + last.capture_seconds

    def _expected_of_driver(self, captured: CapturedKey) -> int:
        """Driver memory of one more key like it: what it took, or less, if that was a chunk for many nodes."""
        taken = self._driver[-1]
        nodes = captured.record(self._backend).nodes if taken else None
        return taken if nodes is None else min(taken, nodes * NODE_BYTES)

    def _kept_outside(self) -> int:
        """What the session holds outside of the pool once caches are given back; 0 where the device does not tell."""
        if not self._backend.supports("driver_bytes"):
            return 0
        self._backend.release_cached()
        return self._backend.memory().reserved - self.copied_bytes() - self._before.reserved - self._pool_bytes

    def _short_of_reserve(self, key: Key, growth: int, expected: str) -> bool:
        if self.budget.reserve is None:
            return False
        free = self._backend.memory().free
        growth -= self.copied_bytes()
        if free is not None and free - growth < self.budget.reserve:
            self._backend.release_cached()  # what the warm-ups used is free, too
            free = self._backend.memory().free
        if free is None or free - growth >= self.budget.reserve:
            return False
        return self._stop("reserve", key, f"{format_bytes(free)} are free{expected}")

    def _used(self) -> str:
        if self._captured:
            return f"{format_bytes(self.used_bytes)} are used"
        also = " and workspaces" if (self._outside or 0) > self.static_bytes else ""
        return f"the static buffers{also} take {format_bytes(self.used_bytes)}"

    def _stop(self, limit: Limit, key: Key, detail: str) -> bool:
        self.stops.append(StopRecord(limit=limit, mode=key[0], descriptor=key[1], detail=detail))
        return True


def _more(growth: int, keys: int | None = None) -> str:
    """What is expected besides, in words: for one key, or for so many after it."""
    if not growth:
        return ""
    return f", {format_bytes(growth)} expected for {'it' if keys is None else f'the {keys} keys after it'}"
