"""Records of measurements: saved, reloaded and shown as tables."""

from cgplan.reports import bench_tables, capture_tables, plan_tables  # each registers its renderers
from cgplan.reports.layout import render, render_text
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

__all__ = [
    "BenchRecord",
    "BenchReport",
    "CaptureReport",
    "Environment",
    "GraphRecord",
    "Report",
    "StateRecord",
    "Timing",
    "bench_tables",
    "capture_tables",
    "load_report",
    "plan_tables",
    "render",
    "render_text",
]
