"""Step times as files have them: the report of a bench, or a table."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from cgplan.config import files
from cgplan.config.values import mode_by_name
from cgplan.errors import ConfigError, StepTimeError
from cgplan.modes import RUNTIME_MODES, CUDAGraphMode

# Microseconds by tokens that ran, by (runtime mode, LoRA case).
Points = dict[tuple[CUDAGraphMode, int], dict[int, float]]

COLUMNS = ("mode", "num_tokens", "microseconds")
LORA_COLUMN = "num_active_loras"
LARGEST_SIZE = 1 << 20
LONGEST_STEP = 1e15  # microseconds; more is a mistake, and sums of such steps would overflow
REMEDY = "Give the JSON file of `cgplan bench --output`, or a CSV file with mode,num_tokens,microseconds."


class _Part(BaseModel):
    """Of a bench report, what step times need; the reports are a layer below and cannot be imported."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Timing(_Part):
    median: float = Field(gt=0, le=LONGEST_STEP, allow_inf_nan=False)


class _Descriptor(_Part):
    num_tokens: int = Field(ge=1, le=LARGEST_SIZE)
    num_active_loras: int = Field(default=0, ge=0)


class _Record(_Part):
    num_tokens: int = Field(ge=1, le=LARGEST_SIZE)
    mode: Annotated[CUDAGraphMode, BeforeValidator(mode_by_name)]
    descriptor: _Descriptor
    eager: _Timing
    graph: _Timing | None


class _Environment(_Part):
    device: str


class _Bench(_Part):
    kind: Literal["bench"]
    environment: _Environment | None = None
    records: tuple[_Record, ...] = Field(min_length=1)


def bench_points(report: Mapping[str, Any], source: str) -> tuple[Points, str]:
    """Medians from an idle device, by the size that ran, and the device.

    Raises:
        StepTimeError: it is no report of a bench, or a time in it is not positive.
    """
    try:
        bench = _Bench.model_validate(report)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise StepTimeError(f"{source}: no bench report: {where}: {first['msg']}", remedy=REMEDY) from None
    points: Points = {}
    for record in bench.records:
        case = record.descriptor.num_active_loras
        runs = [(CUDAGraphMode.NONE, record.num_tokens, record.eager)]
        if record.graph is not None and record.mode is not CUDAGraphMode.NONE:
            runs.append((record.mode, record.descriptor.num_tokens, record.graph))
        for mode, size, timing in runs:
            curve = points.setdefault((mode, case), {})
            curve[size] = max(timing.median, curve.get(size, 0.0))  # batches that were padded alike
    return points, bench.environment.device if bench.environment else ""


def table_points(text: str, source: str) -> Points:
    """Points of a CSV table: mode (eager or NONE, PIECEWISE, FULL), num_tokens, microseconds; num_active_loras too
    where LoRA cases were measured.

    Raises:
        StepTimeError: a column is missing or unknown, there is no row, or a row makes no sense; names it.
    """
    reader = csv.reader(io.StringIO(text), skipinitialspace=True)
    header = [name.strip().lower() for name in next(reader, [])]
    missing = [name for name in COLUMNS if name not in header]
    unknown = [name for name in header if name not in (*COLUMNS, LORA_COLUMN)]
    for separator, name in files.SEPARATORS.items():
        if len(header) == 1 and {*COLUMNS} & {part.strip() for part in header[0].split(separator)[1:]}:
            raise StepTimeError(f"{source}: the columns are separated by {name}", remedy=REMEDY)
    if missing or unknown or len(set(header)) < len(header):
        wrong = (
            [f"column {missing[0]!r} is missing"] if missing else [f"column {name!r} is unknown" for name in unknown]
        )
        raise StepTimeError(
            f"{source}: {(wrong or ['a column stands twice'])[0]}, found {', '.join(header) or 'nothing'}",
            remedy=REMEDY,
        )
    points: Points = {}
    rows: dict[tuple[CUDAGraphMode, int, int], int] = {}
    for cells in reader:
        if not any(cell.strip() for cell in cells):
            continue
        where = f"{source}:{reader.line_num}"
        if len(cells) != len(header):
            raise StepTimeError(f"{where}: {len(cells)} values for {len(header)} columns", remedy=REMEDY)
        row = dict(zip(header, (cell.strip() for cell in cells), strict=True))
        mode, case = _mode(row["mode"], where), _whole(row.get(LORA_COLUMN, "0"), LORA_COLUMN, 0, where)
        size, time = _whole(row["num_tokens"], "num_tokens", 1, where), _time(row["microseconds"], where)
        first = rows.setdefault((mode, case, size), reader.line_num)
        if first != reader.line_num:
            raise StepTimeError(
                f"{where}: {row['mode']} at {size} tokens stands in row {first} already",
                remedy="Keep one row for each mode and size.",
            )
        points.setdefault((mode, case), {})[size] = time
    if not points:
        raise StepTimeError(f"{source}: no row below the header", remedy=REMEDY)
    return points


def text_of(path: str | Path) -> str:
    """A file's text. Raises StepTimeError if it cannot be read."""
    return files.read_text(path, StepTimeError, REMEDY)


def json_of(text: str, source: str) -> dict[str, Any]:
    """A JSON object. Raises StepTimeError for anything else."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # also a whole number of thousands of digits
        raise StepTimeError(f"{source}: not JSON: {error}", remedy=REMEDY) from None
    if not isinstance(data, dict):
        raise StepTimeError(f"{source}: no bench report: it is not an object", remedy=REMEDY)
    return data


def _mode(text: str, where: str) -> CUDAGraphMode:
    try:
        mode = CUDAGraphMode.NONE if text.lower() == "eager" else CUDAGraphMode.parse(text)
    except ConfigError:
        mode = None
    if mode not in RUNTIME_MODES:
        raise StepTimeError(
            f"{where}: unknown mode {text!r}",
            remedy="A step runs in one of the modes eager (or NONE), PIECEWISE, FULL.",
        )
    return mode


def _whole(text: str, name: str, least: int, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= LARGEST_SIZE):
        raise StepTimeError(
            f"{where}: {name} is {text!r}", remedy=f"Give a whole number from {least} to {LARGEST_SIZE} in each row."
        )
    return int(text)


def _time(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LONGEST_STEP:
        raise StepTimeError(
            f"{where}: microseconds is {text!r}",
            remedy=f"Give a number above 0 in each row, {LONGEST_STEP:.0e} at most.",
        )
    return value
