"""Files as typed rows: CSV or JSON lines, columns known by name. Each error names file, line, column and the cell."""

from __future__ import annotations

import csv
import difflib
import io
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BeforeValidator, ValidationError
from pydantic_core import PydanticCustomError

from cgplan.config import load
from cgplan.errors import CgplanError, ConfigError, TrafficError
from cgplan.modes import RUNTIME_MODES, CUDAGraphMode
from cgplan.planning.costs import Record

MOST_TOKENS = 1 << 30  # of a request; more is a mistake in the file
MOST_STEPS = 1 << 53  # that a float counts exactly


class Row(Record):
    """Base of typed rows: a field is a column, its alias the column's name in files."""


R = TypeVar("R", bound=Row)


def wrong_cell(allowed: str, remedy: str = "Correct that row.") -> PydanticCustomError:
    """The error of a cell that holds something else than ``allowed`` says ("not ...")."""
    return PydanticCustomError("cell", "{allowed}", {"allowed": allowed, "remedy": remedy})


def whole(low: int = 0, high: int = MOST_TOKENS, remedy: str = "Correct that row.") -> BeforeValidator:
    """A whole number between two bounds, written in any way (``34``, ``34.0``)."""

    def read(value: object) -> int:
        try:
            number = Decimal("nan" if isinstance(value, bool) else str(value))
        except InvalidOperation:
            number = Decimal("nan")
        if not number.is_finite() or not low <= number <= high or number != number.to_integral_value():
            raise wrong_cell(f"not a whole number from {low} to {high}", remedy)
        return int(number)

    return BeforeValidator(read)


def _flag(value: object) -> bool:
    words = {"true": True, "1": True, "false": False, "0": False}
    if (word := str(value).lower()) not in words:
        raise wrong_cell("not true or false", "Write true or false, or 1 or 0.")
    return words[word]


def _runtime_mode(value: object) -> CUDAGraphMode:
    name = str(value).rpartition(".")[2]  # CUDAGraphMode.FULL, as logs may have it
    try:
        mode = CUDAGraphMode.NONE if name.lower() == "eager" else CUDAGraphMode.parse(name)
    except ConfigError:
        mode = None
    if mode not in RUNTIME_MODES:
        raise wrong_cell("not a runtime mode", "A step runs in one of the modes NONE (or eager), PIECEWISE, FULL.")
    return mode


Flag = Annotated[bool, BeforeValidator(_flag)]
RuntimeMode = Annotated[CUDAGraphMode, BeforeValidator(_runtime_mode)]


@dataclass(frozen=True)
class Form(Generic[R]):
    """A form that a file of rows may have.

    Attributes:
        name: In words.
        row: The type of its rows.
        error: Raised for files that break the form.
        remedy: Of errors about the columns; absent: their names.
    """

    name: str
    row: type[R]
    error: type[CgplanError] = TrafficError
    remedy: str = ""

    @cached_property
    def columns(self) -> dict[str, bool]:
        """Names of the columns, and whether each is required."""
        return {field.alias or name: field.is_required() for name, field in self.row.model_fields.items()}

    @property
    def described(self) -> str:
        """Its columns in words."""
        required, optional = (", ".join(n for n, r in self.columns.items() if r == wanted) for wanted in (True, False))
        return f"{self.name} has {required}" + (f", and may have {optional}" if optional else "")

    def read(self, cells: Mapping[str, Any], where: str) -> R:
        """The typed row; blank cells of optional columns are absent. Raises ``error`` for a cell that cannot be."""
        given = {name: cell for name, cell in cells.items() if self.columns[name] or cell not in (None, "")}
        try:
            return self.row.model_validate(given)
        except ValidationError as error:
            wrong = error.errors()[0]
            raise self.error(
                f"{where}: {wrong['loc'][0]} is {_short(wrong['input'])}, {wrong['msg']}",
                remedy=wrong["ctx"]["remedy"],
            ) from None

    def match(self, names: Sequence[str], where: str) -> list[str]:
        """The names, in any case, as the form writes them. Raises ``error`` for unknown, repeated and missing ones."""
        known = {column.lower(): column for column in self.columns}
        remedy, found = self.remedy or f"{self.described}.", list[str]()
        for name in names:
            column = known.get(name.strip().lower())
            if column is None:
                near = difflib.get_close_matches(name.strip().lower(), known, n=1)
                hint = f" (did you mean {known[near[0]]!r}?)" if near else ""
                raise self.error(f"{where}: unknown column {_short(name)}{hint}", remedy=remedy)
            if column in found:
                raise self.error(f"{where}: column {column!r} stands twice", remedy="Keep one of them.")
            found.append(column)
        missing = [column for column, required in self.columns.items() if required and column not in found]
        if missing:
            raise self.error(f"{where}: column {missing[0]!r} is missing", remedy=remedy)
        return found


def read_text(path: Path) -> str:
    """Text of a file of traffic, without a byte order mark. Raises TrafficError for a file without text."""
    text = load.read_text(path, TrafficError, "Give a readable file: a histogram, a request trace, or a log.")
    if "\0" in text:
        raise TrafficError(f"{path}: holds NUL bytes, so it is no text", remedy="Unpack it, or save it as UTF-8.")
    if not text.strip():
        raise TrafficError(f"{path} is empty", remedy="Give a file with traffic in it.")
    return text


def nearest_form(names: Collection[str], forms: Sequence[Form[Any]]) -> Form[Any] | None:
    """The form with most columns like these names, in any case; None if it has none."""

    def alike(form: Form[Any]) -> int:
        known = [column.lower() for column in form.columns]
        return sum(bool(difflib.get_close_matches(name.strip().lower(), known, n=1, cutoff=0.75)) for name in names)

    best = max(forms, key=alike)
    return best if alike(best) else None


def first_line(text: str) -> tuple[int, str, str]:
    """Number and text of the first line that is not blank, and what separates columns there; (1, "", ",") without one.

    A comma, or else a tab, a semicolon or a bar.
    """
    lines = enumerate(io.StringIO(text, newline=None), start=1)
    number, line = next(((number, line.rstrip("\n")) for number, line in lines if line.strip()), (1, ""))
    return number, line, next((separator for separator in ",\t;|" if separator in line), ",")


def csv_rows(text: str, path: Path, form: Form[R]) -> Iterator[tuple[str, Mapping[str, str], R]]:
    """(``file:line``, cells by column, typed row) of each row.

    Raises:
        form.error: an unknown, missing or repeated column, too few or too many fields, a cell that cannot be, no CSV.
    """
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=first_line(text)[2], skipinitialspace=True)
    columns: list[str] = []
    try:
        for fields in reader:
            where = f"{path}:{reader.line_num}"
            if not any(field.strip() for field in fields):
                continue
            if not columns:
                columns = form.match(fields, where)
                continue
            if len(fields) != len(columns):
                raise form.error(
                    f"{where}: {len(fields)} fields, but the header has {len(columns)}",
                    remedy="Give each row one value for each column; the file may have been cut off there.",
                )
            cells = dict(zip(columns, (field.strip() for field in fields), strict=True))
            yield where, cells, form.read(cells, where)
    except csv.Error as error:
        raise form.error(f"{path}:{reader.line_num}: not CSV: {error}", remedy="Correct that line.") from None


def jsonl_rows(text: str, path: Path, form: Form[R]) -> Iterator[tuple[str, Mapping[str, Any], R]]:
    """The same of JSON lines."""
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{path}:{number}"
        if line.strip():
            row = json_object(line, where)
            cells = dict(zip(form.match(list(row), where), row.values(), strict=True))
            yield where, cells, form.read(cells, where)


def json_object(text: str, where: str) -> dict[str, Any]:
    """One JSON object. Raises TrafficError."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: a number with too many digits, too
        raise TrafficError(f"{where}: not JSON: {error}", remedy="Give one JSON object a line.") from None
    if not isinstance(row, dict):
        raise TrafficError(f"{where}: {_short(row)} is not an object", remedy="Give one JSON object a line.")
    return row


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
