"""Records of measurements, and their tables."""

from cgplan.reports import plan_tables, run_tables  # each registers its renderers
from cgplan.reports.layout import render, render_text
from cgplan.reports.records import (
    AuditReport,
    BenchRecord,
    BenchReport,
    CaptureReport,
    Environment,
    GraphRecord,
    Report,
    StateRecord,
    Timing,
    VerifyRecord,
    check_baselines,
    load_plan,
    load_report,
)

__all__ = [
    "AuditReport",
    "BenchRecord",
    "BenchReport",
    "CaptureReport",
    "Environment",
    "GraphRecord",
    "Report",
    "StateRecord",
    "Timing",
    "VerifyRecord",
    "check_baselines",
    "load_plan",
    "load_report",
    "plan_tables",
    "render",
    "render_text",
    "run_tables",
]
