"""The graphs of one model in an engine, alone or in a shared pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cgplan.backends import GraphBackend, select_backend
from cgplan.captures.captured_keys import Progress
from cgplan.captures.model_graphs import BeforeKey
from cgplan.config import Config
from cgplan.errors import BackendError, CgplanError
from cgplan.graphs.wrapper import GraphPool
from cgplan.planning import Plan, build_plan
from cgplan.reports.layout import Column, Grid, TextColumn, plain_text
from cgplan.reports.records import CaptureReport, ReplanReport
from cgplan.runner.runner import GraphRunner
from cgplan.runner.session import CaptureSession
from cgplan.runner.stats import RunnerStats
from cgplan.units import format_bytes


@dataclass(frozen=True)
class PoolReport:
    """``pool_bytes`` of ``parts`` are the whole pool's so far."""

    parts: Mapping[str, CaptureReport]
    pool_bytes: int

    @property
    def graphs(self) -> int:
        return sum(len(report.records) for report in self.parts.values())

    @property
    def static_bytes(self) -> int:
        return sum(report.static_bytes for report in self.parts.values())

    @property
    def outside_bytes(self) -> int:
        return sum(
            report.workspace_bytes + (report.driver_bytes or 0) for report in self.parts.values()
        )

    @property
    def total_bytes(self) -> int:
        return self.pool_bytes + self.static_bytes + self.outside_bytes

    def __str__(self) -> str:
        table = Grid(
            self.parts.items(),
            TextColumn("part", "0"),
            Column("graphs", lambda row: len(row[1].records)),
            Column(
                "pool grew by", lambda row: sum(r.pool_growth for r in row[1].records), format_bytes
            ),
            Column("static", "1.static_bytes", format_bytes),
            Column("workspaces", "1.workspace_bytes", format_bytes),
            Column("driver", "1.driver_bytes", format_bytes),
            Column("seconds", "1.session_seconds", "{:.2f}".format),
        )
        total = (
            f"{self.graphs} graphs in one pool of {format_bytes(self.pool_bytes)}; "
            f"{format_bytes(self.total_bytes)}"
        )
        return f"{plain_text(table)}\n\n{total} in all"


class CudaGraphManager:
    """The graphs of one model: planned at once, captured by ``capture``, called like the model.
    ``close`` frees the memory, and ``capture`` may follow. Not for several threads.

    Args:
        model: On the device already. The caller owns it.
        backend: Absent: the pool's, or that of ``config.device``.
        pool: Absent: by ``compilation.pool``.
        plan: Absent: ``build_plan(config)``.
        before_key: As of a CaptureSession.

    Raises:
        ConfigError: ``cudagraph_mode`` is AUTO, which ``choose_mode`` decides.
        PlanError: the configuration allows no plan.
        BackendError: the device is missing, or is not the pool's.
        CgplanError: ``compilation.pool`` asks for several, and one is given.
    """

    def __init__(
        self,
        config: Config,
        model: Callable[..., Any],
        backend: GraphBackend | None = None,
        *,
        pool: GraphPool | None = None,
        plan: Plan | None = None,
        name: str = "model",
        progress: Progress | None = None,
        before_key: BeforeKey | None = None,
    ) -> None:
        if backend is None:
            backend = pool.backend if pool else select_backend(config.device)
        if pool and pool.backend is not backend:
            raise BackendError(
                f"{name!r} was given a pool of another backend ({pool.backend.name}, "
                f"{pool.backend.device})",
                remedy="Give the GraphPool and its members one backend of select_backend.",
            )
        self.config = config
        self.backend = backend
        self.name = name
        self.plan = plan or build_plan(config)
        self.pool = GraphPool(backend) if pool is None else pool
        given = self.pool if pool or config.compilation.pool == "shared" else None
        self._session = CaptureSession(
            self.plan,
            model,
            backend,
            config,
            progress=progress,
            pool=given,
            name=name,
            before_key=before_key,
        )
        self._runner: GraphRunner | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Planned, then captured sizes in tokens, ascending."""
        plan = self.runner.plan if self.is_captured else self.plan
        return plan.capture_sizes

    @property
    def is_captured(self) -> bool:
        return self._runner is not None and not self._runner.is_closed

    @property
    def runner(self) -> GraphRunner:
        """Raises CgplanError before ``capture`` and after ``close``."""
        if self._runner is None or self._runner.is_closed:
            raise CgplanError(f"{self.name!r} has no graphs", remedy="Call capture() first.")
        return self._runner

    @property
    def report(self) -> CaptureReport:
        return self.runner.report

    @property
    def stats(self) -> RunnerStats:
        return self.runner.stats

    def capture(self) -> CaptureReport:
        """Capture the plan. Raises as CaptureSession.run, and CgplanError if captured already."""
        if self.is_captured:
            raise CgplanError(
                f"{self.name!r} is captured already", remedy="Call recapture(), or close() first."
            )
        self._runner = self._session.run()
        return self._runner.report

    def run(self, *tensors: Any, **batch: Any) -> Any:
        """Run one batch, as a GraphRunner. The next call of any member of the pool overwrites
        borrowed outputs.
        """
        return self.runner(*tensors, **batch)

    def replan(self, **options: Any) -> ReplanReport:
        """See GraphRunner.replan."""
        return self.runner.replan(**options)

    def recapture(self) -> CaptureReport:
        """Capture again, with the model's current memory; ``stats`` stay. Raises as
        CaptureSession.run; then no graph is left.
        """
        if not self.is_captured:
            return self.capture()
        self.runner.recapture()
        return self.report

    def close(self) -> None:
        """Free graphs and static buffers; with its last member, the pool."""
        if self._runner:
            self._runner.close()

    def __enter__(self) -> CudaGraphManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def capture_together(managers: Sequence[CudaGraphManager]) -> PoolReport:
    """Capture managers that share a pool, all or none; the largest size goes first.

    Raises:
        CgplanError: they do not share one pool, two have one name, or one is captured.
        CaptureError, ModelError: as CaptureSession.run; nothing stays captured.
    """
    names = [manager.name for manager in managers]
    if len({id(manager.pool) for manager in managers}) != 1 or len(set(names)) < len(names):
        raise CgplanError(
            f"{'managers ' + ', '.join(names) if names else 'an empty list'} cannot be captured "
            "together",
            remedy="Give them one GraphPool, and different names.",
        )
    if any(manager.is_captured for manager in managers):
        raise CgplanError("one of the managers is captured already", remedy="Close it first.")
    reports = {}
    try:
        for manager in sorted(managers, key=lambda manager: -manager.plan.max_capture_size):
            reports[manager.name] = manager.capture()
    except BaseException:
        for manager in managers:
            manager.close()
        raise
    return PoolReport(reports, managers[0].pool.nbytes)
