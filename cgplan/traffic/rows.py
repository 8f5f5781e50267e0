"""Files as typed rows: CSV or JSON lines. Errors name file, line, column and the cell."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, create_model

from cgplan.config.values import Record
from cgplan.errors import CgplanError, TrafficError, did_you_mean
from cgplan.modes import RUNTIME_MODES, CUDAGraphMode
from cgplan.traffic.histogram import MOST_BATCHED_TOKENS

LOG_LINE = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR)\b")
_FILLED = re.compile(r"\S")
AT_ONCE = 10_000  # rows, which bounds the memory of reading
R = TypeVar("R", bound=Record)
# place, names of the columns, values
RawRow = tuple[str, tuple[str, ...], Sequence[Any]]


def _runtime_mode(value: object) -> CUDAGraphMode:
    # logs may have CUDAGraphMode.FULL
    name = str(value).rpartition(".")[2].strip().upper()
    if name == "EAGER":
        return CUDAGraphMode.NONE
    mode = CUDAGraphMode.__members__.get(name)
    if mode not in RUNTIME_MODES:
        raise ValueError("not one of the runtime modes NONE (or eager), PIECEWISE, FULL")
    return mode


Whole = Annotated[int, Field(ge=0, le=1 << 53)]  # which a float counts exactly
Size = Annotated[int, Field(ge=1, le=MOST_BATCHED_TOKENS)]
RuntimeMode = Annotated[CUDAGraphMode, BeforeValidator(_runtime_mode)]


@dataclass(frozen=True, eq=False)
class Form(Generic[R]):
    """A form of a file of rows.

    Attributes:
        names: Of its first columns, if they are not those of the fields.
        remedy: Of errors about the columns; absent: their names.
        row_remedy: Of errors about a cell.
        unused: Other columns that such files have; None: any.
    """

    name: str
    row: type[R]
    names: tuple[str, ...] = ()
    error: type[CgplanError] = TrafficError
    remedy: str = ""
    row_remedy: str = "Correct that row."
    unused: tuple[str, ...] | None = ()

    @cached_property
    def columns(self) -> dict[str, str]:
        fields = list(self.row.model_fields)
        given = len(self.names)
        names = [*self.names, *fields[given:]]
        return dict(zip(names, fields, strict=True))

    @cached_property
    def required(self) -> list[str]:
        fields = self.row.model_fields
        return [column for column, own in self.columns.items() if fields[own].is_required()]

    @property
    def described(self) -> str:
        text = f"{self.name} has {', '.join(self.required)}"
        optional = [column for column in self.columns if column not in self.required]
        if optional:
            text = f"{text}, and may have {', '.join(optional)}"
        return text

    def read(
        self,
        rows: Iterable[RawRow],
        ignored: dict[str, None] | None = None,
    ) -> Iterator[tuple[str, R]]:
        """(place, typed row) of each row; blank cells of optional columns are absent.

        ``ignored`` as in ``match``. Raises ``error`` for a wrong column or cell.
        """
        return chain.from_iterable(self._parts(rows, ignored))

    def _parts(
        self,
        rows: Iterable[RawRow],
        ignored: dict[str, None] | None,
    ) -> Iterator[Iterable[tuple[str, R]]]:
        matched: dict[tuple[str, ...], dict[str, int]] = {}
        places: list[str] = []
        cells: list[dict[str, Any]] = []
        for where, names, values in rows:
            if len(cells) == AT_ONCE:
                yield self._typed(places, cells)
                places = []
                cells = []
            if names not in matched:
                matched[names] = self.match(names, where, ignored)
            if values == names:
                continue
            row = {}
            for column, place in matched[names].items():
                cell = values[place]
                if cell not in (None, "") or column in self.required:
                    row[self.columns[column]] = cell
            places.append(where)
            cells.append(row)
        yield self._typed(places, cells)

    @cached_property
    def _reader(self) -> TypeAdapter[list[R]]:
        return TypeAdapter(list[self.row])  # type: ignore[name-defined]

    def _typed(
        self,
        places: Sequence[str],
        cells: list[dict[str, Any]],
    ) -> Iterable[tuple[str, R]]:
        try:
            found = self._reader.validate_python(cells)
        except ValidationError as failure:
            wrong = failure.errors()[0]
            index, own, *inner = map(str, wrong["loc"])
            where = places[int(index)]
            column = next(name for name, field in self.columns.items() if field == own)
            column = ".".join([column, *inner])
            problem = wrong["msg"].removeprefix("Value error, ")
            raise self.error(
                f"{where}: {column} is {short(wrong['input'])}: {problem}",
                remedy=self.row_remedy,
            ) from None
        return zip(places, found, strict=True)

    def match(
        self,
        names: Sequence[str],
        where: str,
        ignored: dict[str, None] | None = None,
    ) -> dict[str, int]:
        """The place of each column among names in any case; unknown names are added to ``ignored``.

        Raises ``error`` for repeated and missing columns, and for an unknown name without
        ``ignored``, beside a missing column, or near the name of one.
        """
        absent = {column.lower(): column for column in self.columns}
        found: dict[str, int] = {}
        unknown: list[str] = []
        for place, given in enumerate(names):
            name = given.strip()
            column = absent.pop(name.lower(), None)
            if column is not None:
                found[column] = place
            elif name.lower() in map(str.lower, found):
                problem = f"{where}: column {name!r} is there twice"
                raise self.error(problem, remedy="Keep one of them.")
            elif self.unused is not None and name not in self.unused:
                unknown.append(name)
        missing = [column for column in self.required if column not in found]
        remedy = self.remedy or f"{self.described}."
        for name in unknown:
            hint = did_you_mean(
                name.lower(),
                absent,
                " (did you mean {!r}?)",
            )
            if ignored is None or missing or hint:
                raise self.error(f"{where}: unknown column {short(name)}{hint}", remedy=remedy)
            ignored[name] = None
        if missing:
            raise self.error(f"{where}: column {missing[0]!r} is missing", remedy=remedy)
        return found


def raw_rows(
    text: str,
    path: str | Path,
    error: type[CgplanError],
) -> Iterator[RawRow]:
    if text.lstrip().startswith("{"):
        return json_rows(text, path, error)
    return csv_rows(text, path, error)


def sized_rows(
    text: str,
    path: str | Path,
    names: Sequence[str],
    error: type[CgplanError],
    figure: str,
    kind: Any,
) -> Iterator[tuple[tuple[int, ...], Any]]:
    """From columns ``names`` and ``figure`` (of pydantic's ``kind``)."""
    fields: dict[str, Any] = {figure: kind}
    sizes = {f"size_{index}": (Size, ...) for index in range(len(names))}
    row = create_model(
        "_Row",
        __base__=Record,
        **sizes | fields,
    )
    form: Form[Any] = Form(
        "the table",
        row,
        tuple(names),
        error,
    )
    rows = raw_rows(
        text,
        path,
        error,
    )
    for _, typed in form.read(rows):
        *found, value = dict(typed).values()
        yield tuple(found), value


def first_line(text: str) -> str:
    return next(filter(str.strip, text.split("\n")), "")


def whole_object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def short(value: object) -> str:
    """A value for a message, in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def csv_rows(
    text: str,
    path: str | Path,
    error: type[CgplanError],
) -> Iterator[RawRow]:
    header = first_line(text)
    separator = next((char for char in ",\t;|" if char in header), ",")
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=separator,
        skipinitialspace=True,
    )
    names: tuple[str, ...] = ()
    try:
        for fields in reader:
            values = tuple(map(str.strip, fields))
            if not any(values):
                continue
            names = names or values
            where = f"{path}:{reader.line_num}"
            if len(values) != len(names):
                raise error(
                    f"{where}: {len(values)} fields, but the header has {len(names)}",
                    remedy="Give each row one value for each column; the file may have been cut "
                    "off there.",
                )
            yield where, names, values
    except csv.Error as failure:
        raise error(
            f"{path}:{reader.line_num}: not CSV: {failure}",
            remedy="Correct that line.",
        ) from None


def json_rows(
    text: str,
    path: str | Path,
    error: type[CgplanError],
    remedy: str = "Give one JSON object a line.",
    inside: str = "",
) -> Iterator[RawRow]:
    """Objects of JSON texts that stand one after the other, and of the lists in them and in their
    ``inside``.
    """
    decoder = json.JSONDecoder()
    place = 0
    line = 1
    while found := _FILLED.search(text, place):
        start = found.start()
        line += text.count("\n", place, start)
        where = f"{path}:{line}"
        try:
            document, place = decoder.raw_decode(
                text,
                start,
            )
        except (ValueError, RecursionError) as failure:  # ValueError: too many digits, too
            raise error(f"{where}: not JSON: {failure}", remedy=remedy) from None
        line += text.count("\n", start, place)
        if isinstance(document, dict):
            document = document.get(inside, document)
        entries = [(where, document)]
        if isinstance(document, list):
            entries = []
            for number, entry in enumerate(document, start=1):
                entries.append((f"{where}, entry {number}", entry))
        for where, entry in entries:
            if not isinstance(entry, dict):
                raise error(f"{where}: {short(entry)} is not an object", remedy=remedy)
            yield where, tuple(entry), list(entry.values())
