"""Saved reports and plans, read again."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from cgplan.config import files
from cgplan.errors import ReportError
from cgplan.planning import Plan
from cgplan.planning.plan import PLAN_SCHEMA_VERSION
from cgplan.reports.records import REPORT_SCHEMA_VERSION, BenchReport, CaptureReport

Report = CaptureReport | BenchReport | Plan
_KINDS: dict[str, tuple[type[CaptureReport] | type[BenchReport] | type[Plan], int]] = {
    "capture": (CaptureReport, REPORT_SCHEMA_VERSION),
    "bench": (BenchReport, REPORT_SCHEMA_VERSION),
    "plan": (Plan, PLAN_SCHEMA_VERSION),
}
_REMEDY = "Give a JSON file that `cgplan ... --output` wrote."


def load_report(path: str | Path) -> Report:
    """A saved report or plan. Raises ReportError if the file is none, or of a schema version that is not read."""
    return parse_report(files.read_text(path, ReportError, _REMEDY), path)


def parse_report(text: str, path: str | Path) -> Report:
    """The same from a text that was read already; ``path`` names it in messages. Raises ReportError likewise."""
    remedy = _REMEDY
    try:
        data = json.loads(text)
    except RecursionError:
        raise ReportError(f"{path}: nested too deeply", remedy=remedy) from None
    except json.JSONDecodeError as error:
        if Path(path).suffix in (".yaml", ".yml"):
            remedy = f"That is a configuration, it seems, which --config takes. {remedy}"
        raise ReportError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}", remedy=remedy) from None
    except ValueError as error:  # a number of thousands of digits
        raise ReportError(f"{path}: not JSON: {error}", remedy=remedy) from None
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ReportError(f"{path}: not a cgplan report (its kind is {kind!r})", remedy=remedy)
    model, version = _KINDS[kind]
    if data.get("schema_version") != version:
        raise ReportError(
            f"{path}: schema version {data.get('schema_version')!r}, this cgplan reads {version}",
            remedy="Make the report again with this version of cgplan, or read it with the version that wrote it.",
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}." for part in first["loc"]).removesuffix(".")
        wrong = ": ".join(filter(None, (where, first["msg"].removeprefix("Value error, "))))
        raise ReportError(f"{path}: damaged report: {wrong}", remedy=remedy) from None
