"""Reports as files: which are read again, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from saved import GOLDEN, SAVED, golden_report

from cgplan.errors import ConfigError, ReportError
from cgplan.reports import load_report
from cgplan.reports.records import check_baselines

PLAN = json.loads((GOLDEN / "plan_ladder.json").read_text(encoding="utf-8"))
CAPTURE = json.loads((GOLDEN / "capture_lora.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SAVED)
def test_a_report_reads_back_equal(name: str) -> None:
    report = golden_report(name)
    assert type(report).model_validate_json(report.model_dump_json()) == report


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "{",
            "run.json: not JSON: Expecting property name enclosed in double quotes: line 1 column 2",
        ),
        ("[]", "not a cgplan report"),
        ('{"kind": ["plan"]}', "not a cgplan report"),
        ("[" * 100_000, "not JSON: maximum recursion depth exceeded"),
        ('{"kind": "capture", "schema_version": 999}', "schema version 999, this cgplan reads 1"),
        (json.dumps({**PLAN, "schema_version": 1}), "schema version 1, this cgplan reads 2"),
        ('{"kind": "plan", "schema_version": 2}', "damaged report: requested_mode"),
        (json.dumps({**PLAN, "query_len": 0}), "damaged report: query_len: Input"),
        (json.dumps({**CAPTURE, "extra": 1}), "damaged report: extra"),
        (json.dumps({**CAPTURE, "records": 3}), "damaged report: records: Input"),
    ],
    ids=range(10),
)
def test_other_files_are_refused(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(ReportError) as caught:
        load_report(path)
    assert str(path) in caught.value.message
    assert words in caught.value.message
    assert "--output" in caught.value.remedy or "this version" in caught.value.remedy


def test_baselines_are_named() -> None:
    assert check_baselines(["eager", " bare", "eager"]) == ("eager", "bare")
    with pytest.raises(
        ConfigError, match="unknown baseline 'reduce_overheads' to bench against"
    ) as caught:
        check_baselines(["reduce_overheads"])
    assert "reduce-overhead" in caught.value.remedy
