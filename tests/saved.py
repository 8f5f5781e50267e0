"""The saved reports and plans of ``tests/data/golden``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cgplan.planning import Plan
from cgplan.reports import load_report

GOLDEN = Path(__file__).parent / "data" / "golden"
SAVED = sorted(path.stem for path in GOLDEN.glob("*.json"))


def golden_report(name: str) -> Any:
    return load_report(GOLDEN / f"{name}.json")


def golden_text(name: str) -> str:
    return (GOLDEN / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n")


def plan_named(name: str) -> Plan:
    found = golden_report(name)
    assert isinstance(found, Plan)
    return found
