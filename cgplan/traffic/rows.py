"""Files as typed rows: CSV or JSON lines, columns known by name. Each error names file, line,
column and the cell.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, create_model

from cgplan.errors import CgplanError, ConfigError, TrafficError, did_you_mean
from cgplan.modes import RUNTIME_MODES, CUDAGraphMode
from cgplan.planning.costs import Record
from cgplan.traffic.histogram import MOST_BATCHED_TOKENS

R = TypeVar("R", bound=Record)


def _runtime_mode(value: object) -> CUDAGraphMode:
    name = str(value).rpartition(".")[2]  # CUDAGraphMode.FULL, as logs may have it
    try:
        mode = CUDAGraphMode.NONE if name.lower() == "eager" else CUDAGraphMode.parse(name)
    except ConfigError:
        mode = None
    if mode not in RUNTIME_MODES:
        raise ValueError("not one of the runtime modes NONE (or eager), PIECEWISE, FULL")
    return mode


Whole = Annotated[int, Field(ge=0, le=1 << 53)]  # which a float counts exactly
Size = Annotated[int, Field(ge=1, le=MOST_BATCHED_TOKENS)]
RuntimeMode = Annotated[CUDAGraphMode, BeforeValidator(_runtime_mode)]


@dataclass(frozen=True)
class Form(Generic[R]):
    """A form that a file of rows may have.

    Attributes:
        name: In words.
        row: The type of its rows: a field is a column, its alias the column's name in files.
        error: Raised for files that break the form.
        remedy: Of errors about the columns; absent: their names.
        unused: Columns that such files have and nothing here needs; None: any others.
    """

    name: str
    row: type[R]
    error: type[CgplanError] = TrafficError
    remedy: str = ""
    unused: tuple[str, ...] | None = ()

    @cached_property
    def columns(self) -> dict[str, bool]:
        """Names of the columns, and whether each is required."""
        return {
            field.alias or name: field.is_required()
            for name, field in self.row.model_fields.items()
        }

    @property
    def described(self) -> str:
        """Its columns in words."""
        required, optional = (
            ", ".join(n for n, r in self.columns.items() if r == wanted) for wanted in (True, False)
        )
        return f"{self.name} has {required}" + (f", and may have {optional}" if optional else "")

    def read(self, cells: Mapping[str, Any], where: str) -> R:
        """The typed row; blank cells of optional columns are absent. Raises ``error`` for a cell
        that cannot be.
        """
        given = {
            name: cell
            for name, cell in cells.items()
            if self.columns[name] or cell not in (None, "")
        }
        try:
            return self.row.model_validate(given)
        except ValidationError as error:
            wrong = error.errors()[0]
            problem = wrong["msg"].removeprefix("Value error, ")
            raise self.error(
                f"{where}: {wrong['loc'][0]} is {short(wrong['input'])}: {problem}",
                remedy="Correct that row.",
            ) from None

    def match(
        self, names: Sequence[str], where: str, ignored: dict[str, None] | None = None
    ) -> list[tuple[int, str]]:
        """Places and names, as the form writes them, of its columns among names in any case.

        Names that it does not know are added to ``ignored``. Raises ``error`` for repeated and
        missing columns, and for an unknown name without ``ignored``, beside a missing column, or
        near the name of a column that is not given.
        """
        known, remedy = (
            {column.lower(): column for column in self.columns},
            self.remedy or f"{self.described}.",
        )
        found: dict[str, int] = {}
        unknown: list[str] = []
        for place, name in enumerate(names):
            column = known.get(name.strip().lower())
            if column in found:
                raise self.error(
                    f"{where}: column {column!r} stands twice", remedy="Keep one of them."
                )
            if column is not None:
                found[column] = place
            elif self.unused is not None and name.strip() not in self.unused:
                unknown.append(name)
        missing = [
            column for column, required in self.columns.items() if required and column not in found
        ]
        for name in unknown:
            absent = [column.lower() for column in self.columns if column not in found]
            hint = did_you_mean(name.strip().lower(), absent, " (did you mean {!r}?)")
            if ignored is None or missing or hint:
                raise self.error(f"{where}: unknown column {short(name)}{hint}", remedy=remedy)
            ignored[name.strip()] = None
        if missing:
            raise self.error(f"{where}: column {missing[0]!r} is missing", remedy=remedy)
        return [(place, column) for column, place in found.items()]


def first_line(text: str) -> tuple[int, str, str]:
    """Number and text of the first line that is not blank, and what separates its columns: a comma,
    or else a tab, a semicolon or a bar; (1, "", ",") for a blank text.
    """
    lines = enumerate(text.split("\n"), start=1)
    number, line = next(((number, line) for number, line in lines if line.strip()), (1, ""))
    return number, line, next((separator for separator in ",\t;|" if separator in line), ",")


def csv_rows(
    text: str, path: Path, form: Form[R], ignored: dict[str, None] | None = None
) -> Iterator[tuple[str, R]]:
    """(``file:line``, typed row) of each row; ``ignored`` as in ``Form.match``.

    Raises:
        form.error: an unknown, missing or repeated column, too few or too many fields, a cell that
            cannot be, no CSV.
    """
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=first_line(text)[2], skipinitialspace=True
    )
    columns, width = list[tuple[int, str]](), 0
    try:
        for fields in reader:
            where = f"{path}:{reader.line_num}"
            if not any(field.strip() for field in fields):
                continue
            if not columns:
                columns, width = form.match(fields, where, ignored), len(fields)
                continue
            if len(fields) != width:
                raise form.error(
                    f"{where}: {len(fields)} fields, but the header has {width}",
                    remedy="Give each row one value for each column; the file may have been cut "
                    "off there.",
                )
            yield (
                where,
                form.read({column: fields[place].strip() for place, column in columns}, where),
            )
    except csv.Error as error:
        raise form.error(
            f"{path}:{reader.line_num}: not CSV: {error}", remedy="Correct that line."
        ) from None


def jsonl_rows(
    text: str, path: Path, form: Form[R], ignored: dict[str, None] | None = None
) -> Iterator[tuple[str, R]]:
    """The same of JSON lines."""
    matched: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{path}:{number}"
        if line.strip():
            row = json_object(line, where)
            if (names := tuple(row)) not in matched:
                matched[names] = form.match(names, where, ignored)
            values = list(row.values())
            yield (
                where,
                form.read({column: values[place] for place, column in matched[names]}, where),
            )


def sized_rows(
    text: str, path: Path, names: Sequence[str], error: type[CgplanError], figure: str, kind: Any
) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Sizes and a figure of each row: a column for each of ``names``, and the figure's, of
    pydantic's ``kind``.
    """
    fields: dict[str, Any] = {
        f"size_{i}": (Size, Field(alias=name)) for i, name in enumerate(names)
    }
    form: Form[Any] = Form(
        f"a table of {figure}",
        create_model("_Row", __base__=Record, **fields, **{figure: kind}),
        error,
    )
    for _, found in (jsonl_rows if text.lstrip().startswith("{") else csv_rows)(text, path, form):
        *sizes, value = dict(found).values()
        yield tuple(sizes), value


def json_object(text: str, where: str) -> dict[str, Any]:
    """One JSON object. Raises TrafficError."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: a number with too many digits, too
        raise TrafficError(
            f"{where}: not JSON: {error}", remedy="Give one JSON object a line."
        ) from None
    if not isinstance(row, dict):
        raise TrafficError(
            f"{where}: {short(row)} is not an object", remedy="Give one JSON object a line."
        )
    return row


def short(value: object) -> str:
    """A value as a message shows it, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
