"""Saved reports and plans, and the text that each is shown as.

The files are in ``tests/data/golden``; after a wanted change ``cgplan inspect NAME.json > NAME.txt`` writes a text.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cgplan.errors import ReportError
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.planning import Plan
from cgplan.planning.difference import compare
from cgplan.reports import load_report, render_text
from cgplan.reports.layout import plain_text
from cgplan.reports.plan_tables import render_difference
from cgplan.reports.records import FailedKey, ReplanReport

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
SAVED = sorted(path.stem for path in GOLDEN.glob("*.json"))


def golden(name: str) -> str:
    return (GOLDEN / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n")


def plan(name: str) -> Plan:
    found = load_report(GOLDEN / f"{name}.json")
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_report_is_shown_as_ever(name: str) -> None:
    report = load_report(GOLDEN / f"{name}.json")
    assert render_text(report) == golden(name)
    assert type(report).model_validate_json(report.model_dump_json()) == report
    if not isinstance(report, Plan):
        assert str(report) == golden(name)


@pytest.mark.parametrize("name", SAVED)
def test_no_word_is_broken_in_80_columns(name: str) -> None:
    """Headings may go on after a hyphen."""
    report = load_report(GOLDEN / f"{name}.json")
    wide, narrow = ([part for word in render_text(report, width).split() for part in re.split(r"(?<=-)", word)]
                    for width in (100, 80))  # fmt: skip
    assert max(map(len, render_text(report, 80).splitlines())) <= 80
    drawn = re.compile(r"[-#|+*.\d]*")  # lines and bars are as long as there is room, axes have as many ticks
    assert {word for word in narrow if not drawn.fullmatch(word)} <= set(wide)


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [("plan_priced", "plan_traffic", "diff_traffic"), ("plan_bounded", "plan_lora", "diff_lora")],
)
def test_a_difference_is_shown_as_ever(old: str, new: str, name: str) -> None:
    shown = render_difference(compare(plan(old), plan(new)), f"{old}.json", f"{new}.json")
    assert plain_text(shown) == golden(name)


def test_a_replan_is_shown_as_ever() -> None:
    descriptor = BatchDescriptor(12, 12, True)
    report = ReplanReport(
        difference=compare(plan("plan_priced"), plan("plan_traffic")),
        way="new generation",
        captured=((CUDAGraphMode.FULL, descriptor),),
        evicted=plan("plan_priced").keys,
        recaptured=2,
        failed=(FailedKey(mode=CUDAGraphMode.FULL, descriptor=descriptor, error="HostSyncError", detail="item"),),
        pool_bytes=(3 << 20, 1 << 20),
        seconds=0.25,
    )
    assert str(report) == golden("replan")
    proposed = report.model_copy(update={"way": "proposed", "captured": (), "recaptured": 0, "failed": ()})
    assert "proposed only: nothing was captured" in str(proposed)


@pytest.mark.parametrize("name", SAVED)
def test_a_damaged_report_is_refused_as_such(name: str, tmp_path: Path) -> None:
    text = (GOLDEN / f"{name}.json").read_text(encoding="utf-8")
    for damaged in (text[:-9], text.replace('"kind":', '"kinds":'), text.replace('"schema_version":', '"version":')):
        (tmp_path / "run.json").write_text(damaged)
        with pytest.raises(ReportError, match=r"run\.json"):
            load_report(tmp_path / "run.json")
