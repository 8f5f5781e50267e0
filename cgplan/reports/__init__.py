"""What a run measured: records, how they are saved and reloaded, and how they are shown."""

from typing import TYPE_CHECKING, Any

from cgplan.reports.records import (
    BenchRecord,
    BenchReport,
    CaptureReport,
    Environment,
    GraphRecord,
    Report,
    StateRecord,
    Timing,
    load_report,
)

if TYPE_CHECKING:
    from cgplan.reports.capture_tables import render, render_text

__all__ = [
    "BenchRecord",
    "BenchReport",
    "CaptureReport",
    "Environment",
    "GraphRecord",
    "Report",
    "StateRecord",
    "Timing",
    "load_report",
    "render",
    "render_text",
]


def __getattr__(name: str) -> Any:
    if name not in ("render", "render_text"):
        raise AttributeError(f"module 'cgplan.reports' has no attribute {name!r}")
    from cgplan.reports import capture_tables

    return getattr(capture_tables, name)
