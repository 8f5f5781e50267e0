"""Step times: how long one step takes, by the way it is run and by the size that really runs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, model_validator

from cgplan.config import load
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
    for separator, name in load.SEPARATORS.items():
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
    return load.read_text(path, StepTimeError, REMEDY)


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


Mode = Annotated[CUDAGraphMode, BeforeValidator(mode_by_name), PlainSerializer(str, return_type=str)]
Floats = npt.NDArray[np.float64]

LORA_OVERHEAD = 0.1  # vLLM measured 9 to 10% for batches without adapters in graphs with LoRA kernels (its pull 25914)
PIECEWISE_SHARE = 0.25  # of what eager takes longer than FULL; 0.10 to 0.22 in the default figures below
WORTH_A_NOTE = 0.05  # relative change of a measured point

# One NVIDIA H200, the reference decoder in Qwen3-0.6B's shape (28 layers, so 29 PIECEWISE segments).
DEFAULT_POINTS: Mapping[CUDAGraphMode, Mapping[int, float]] = {
    CUDAGraphMode.NONE: {1: 14500, 256: 14400},
    CUDAGraphMode.PIECEWISE: {1: 5850, 8: 6100, 64: 5900, 256: 9500},
    CUDAGraphMode.FULL: {1: 3400, 8: 3350, 64: 4740, 256: 8930},
}


class Curve(BaseModel):
    """Measured points of one way of running a step.

    Attributes:
        mode: NONE (eager), PIECEWISE or FULL.
        num_active_loras: The LoRA case that ran (0: no adapters).
        points: (tokens that ran, microseconds), ascending in both: the least nondecreasing values that are not below
            what was measured, because a larger batch does not take less time. Tile steps stay.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode
    num_active_loras: int = 0
    points: tuple[tuple[int, float], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ascending(self) -> Curve:
        sizes, values = zip(*self.points, strict=True)
        if not all(0 < value <= LONGEST_STEP for value in values) or min(sizes) < 1 or max(sizes) > LARGEST_SIZE:
            raise ValueError(
                f"{self.mode}: sizes are from 1 to {LARGEST_SIZE}, times above 0 and at most {LONGEST_STEP:.0e} us"
            )
        if any(a >= b for a, b in pairwise(sizes)) or any(a > b for a, b in pairwise(values)):
            raise ValueError(f"{self.mode}: points do not ascend")
        return self

    def at(self, num_tokens: Floats) -> Floats:
        """Microseconds: linear between points, the first one's below them, on with the last slope beyond them."""
        sizes, values = np.array(self.points, dtype=np.float64).T
        beyond = self.last_slope * np.maximum(num_tokens - sizes[-1], 0.0)
        return np.asarray(np.interp(num_tokens, sizes, values) + beyond)

    @property
    def last_slope(self) -> float:
        """Microseconds a token between the last two points, 0 if there is only one."""
        if len(self.points) < 2:
            return 0.0
        (first, below), (last, above) = self.points[-2:]
        return (above - below) / (last - first)


class StepTimes(BaseModel):
    """Microseconds of one step, by runtime mode, nondecreasing in the tokens that run (padding counts).

    Between measured points times are linear. Beyond the last point of a mode they go on with its last slope, and
    neither eager nor PIECEWISE steps take less than a FULL graph there, which does the same work on the device. A LoRA
    case takes the time of the next larger case that was measured (else of the largest one below it, else
    ``1 + lora_overhead`` times that of a step without adapters). PIECEWISE below its first point, or without points,
    is FULL plus a quarter of what eager takes longer, at most the first point.

    Attributes:
        source: Where the figures come from, in words.
        curves: What was measured, one for each mode and LoRA case.
        lora_overhead: What a step with LoRA kernels takes longer, as a fraction, where no case of that mode was
            measured.
        notes: What was assumed or changed on the way.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["step_times"] = "step_times"
    source: str
    curves: tuple[Curve, ...] = Field(min_length=1)
    lora_overhead: float = Field(default=LORA_OVERHEAD, ge=0, allow_inf_nan=False)
    notes: tuple[str, ...] = ()

    @classmethod
    def measured(
        cls, points: Mapping[tuple[CUDAGraphMode, int], Mapping[int, float]], source: str, notes: Iterable[str] = ()
    ) -> StepTimes:
        """Step times from points by (mode, LoRA case) and tokens; raises a falling point to the largest before it."""
        found, said = [], list(notes)
        for (mode, case), values in sorted(points.items(), key=lambda item: (item[0][0].value, item[0][1])):
            raw = sorted(values.items())
            heights = np.maximum.accumulate([value for _, value in raw])
            curve = Curve(
                mode=mode,
                num_active_loras=case,
                points=tuple((size, float(height)) for (size, _), height in zip(raw, heights, strict=True)),
            )
            found.append(curve)
            has_full = any(other is CUDAGraphMode.FULL for other, _ in points)
            said += _notes(curve, raw, floor=has_full and mode is not CUDAGraphMode.FULL)
        modes = {curve.mode for curve in found}
        if modes == {CUDAGraphMode.NONE, CUDAGraphMode.FULL}:
            said.append(f"PIECEWISE was not measured: FULL plus {PIECEWISE_SHARE:.0%} of what eager takes longer")
        return cls(source=source, curves=tuple(found), notes=tuple(said))

    @classmethod
    def default(cls) -> StepTimes:
        """Measured on one H200 with a small decoder: enough to see the shape of an answer, not to trust its figures."""
        return cls.measured(
            {(mode, 0): points for mode, points in DEFAULT_POINTS.items()},
            "default: one NVIDIA H200, decoder of 28 layers in Qwen3-0.6B's shape",
            ["no step times were given: these are of another model than yours; `cgplan bench --output` measures it"],
        )

    @classmethod
    def from_bench(cls, report: Mapping[str, Any], source: str = "cgplan bench") -> StepTimes:
        """Step times from the JSON of ``cgplan bench --output``: medians from an idle device, by the size that ran.

        Raises:
            StepTimeError: it is no such report, or a time is not positive.
        """
        points, device = bench_points(report, source)
        return cls.measured(points, f"{source}, {device}" if device else source)

    @classmethod
    def from_table(cls, path: str | Path) -> StepTimes:
        """Step times from a CSV file with the columns mode (eager, PIECEWISE, FULL), num_tokens and microseconds, and
        num_active_loras where LoRA cases were measured.

        Raises:
            StepTimeError: the file cannot be read, a column is missing or unknown, or a row makes no sense; names it.
        """
        return cls.measured(table_points(text_of(path), str(path)), str(path))

    @classmethod
    def load(cls, path: str | Path) -> StepTimes:
        """Step times from a file: a saved bench, saved step times, or a CSV table, told by its content.

        Raises:
            StepTimeError: as ``from_bench`` and ``from_table`` do.
        """
        return cls.parse(text_of(path), path)

    @classmethod
    def parse(cls, text: str, path: str | Path) -> StepTimes:
        """The same from a text that was read already; ``path`` names it in messages. Raises StepTimeError likewise."""
        if not text.lstrip().startswith(("{", "[")):
            return cls.measured(table_points(text, str(path)), str(path))
        data = json_of(text, str(path))
        if data.get("kind") != "step_times":
            return cls.from_bench(data, str(path))
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise StepTimeError(f"{path}: damaged step times: {error.errors()[0]['msg']}", remedy=REMEDY) from None

    def notes_for(self, mode: CUDAGraphMode) -> tuple[str, ...]:
        """The notes, less those on PIECEWISE graphs where a (resolved) cudagraph_mode has none."""
        piecewise = CUDAGraphMode.PIECEWISE
        return tuple(note for note in self.notes if mode.has_mode(piecewise) or not note.startswith(f"{piecewise} "))

    def of(self, mode: CUDAGraphMode, num_tokens: int, num_active_loras: int = 0) -> float:
        """Microseconds of a step in this runtime mode that really runs at ``num_tokens``.

        Raises:
            StepTimeError: nothing was measured that says how long the mode takes.
        """
        return float(self._values(mode, num_active_loras, np.array([num_tokens], dtype=np.float64))[0])

    def curve(self, mode: CUDAGraphMode, limit: int, num_active_loras: int = 0) -> Floats:
        """``of`` for 0 to ``limit`` tokens: microseconds [limit + 1]; index 0 is 0. Raises as ``of`` does."""
        values = self._values(mode, num_active_loras, np.arange(limit + 1, dtype=np.float64))
        values[0] = 0.0
        return values

    def told_apart(self, cases: Sequence[int]) -> tuple[int, ...]:
        """The LoRA cases worth planning for: of neighbours whose graphs take the same time, the larger serves more."""

        def times(case: int) -> list[tuple[int, float]]:
            chosen = [self._curve_of(mode, case) for mode in RUNTIME_MODES[1:]]
            return [(curve.num_active_loras, factor) for curve, factor in chosen if curve is not None]

        ordered = sorted(cases)
        apart = [case for case, above in pairwise(ordered) if times(case) != times(above)]
        return (*apart, *ordered[-1:])

    def _curve_of(self, mode: CUDAGraphMode, case: int) -> tuple[Curve | None, float]:
        """The measured curve that stands for a case, and the factor to apply to it."""
        curves = {c.num_active_loras: c for c in self.curves if c.mode is mode}
        with_adapters = sorted(n for n in curves if n > 0)
        if not curves:
            return None, 1.0
        if case == 0:
            return (curves[0], 1.0) if 0 in curves else (curves[with_adapters[0]], 1 / (1 + self.lora_overhead))
        if not with_adapters:
            return curves[0], 1 + self.lora_overhead
        return curves[next((n for n in with_adapters if n >= case), with_adapters[-1])], 1.0

    def _values(self, mode: CUDAGraphMode, case: int, tokens: Floats) -> Floats:
        curve, factor = self._curve_of(mode, case)
        full, full_factor = self._curve_of(CUDAGraphMode.FULL, case)
        if mode is CUDAGraphMode.PIECEWISE and full is not None:
            derived = self._between(case, tokens)
            if curve is None:
                return derived
            first = curve.points[0]
            own = np.where(tokens < first[0], np.minimum(derived, factor * first[1]), factor * curve.at(tokens))
        elif curve is None:
            measured = ", ".join(sorted({c.mode.name for c in self.curves})).replace("NONE", "eager")
            name = "eager" if mode is CUDAGraphMode.NONE else str(mode)
            raise StepTimeError(
                f"{self.source}: no {name} step times, found {measured}",
                remedy=f"Measure {name} steps: cgplan bench, or a table with rows of mode {name}.",
            )
        else:
            own = factor * curve.at(tokens)
        if mode is CUDAGraphMode.FULL or full is None:
            return own
        return np.where(tokens > curve.points[-1][0], np.maximum(own, full_factor * full.at(tokens)), own)

    def _between(self, case: int, tokens: Floats) -> Floats:
        full = self._values(CUDAGraphMode.FULL, case, tokens)
        eager = self._values(CUDAGraphMode.NONE, case, tokens)
        return full + PIECEWISE_SHARE * np.maximum(eager - full, 0.0)


def _notes(curve: Curve, raw: Sequence[tuple[int, float]], floor: bool) -> list[str]:
    """What was changed in a curve, and what is assumed beyond it; ``floor``: no less than a FULL graph."""
    name = "eager" if curve.mode is CUDAGraphMode.NONE else str(curve.mode)
    if curve.num_active_loras:
        name += f" with {curve.num_active_loras} adapters"
    notes = []
    rise, size, value, height = max(
        (height / value - 1, size, value, height) for (size, value), (_, height) in zip(raw, curve.points, strict=True)
    )
    if rise > WORTH_A_NOTE:
        notes.append(
            f"{name} at {size} tokens took {value:.0f} us, a smaller batch {height:.0f} us: raised to that, since more "
            "tokens do not take less time"
        )
    last = curve.points[-1][0]
    if len(curve.points) < 2:
        notes.append(f"{name} was measured at {last} tokens alone")
    else:
        least = ", and no less than a FULL graph takes" if floor else ""
        notes.append(f"{name} beyond {last} tokens: {curve.last_slope:.3g} us for each more, as before it{least}")
    return notes
