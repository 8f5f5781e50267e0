"""Files of traffic as rows: their text, their columns, and the numbers in them. Each complaint names file and line."""

from __future__ import annotations

import csv
import difflib
import io
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from cgplan.config import Config, load
from cgplan.errors import TrafficError
from cgplan.traffic.histogram import Batch

MOST_TOKENS = 1 << 30  # of a request; more is a mistake in the file
MOST_STEPS = 1 << 53  # that a float counts exactly
ADD_LORA = "Add a `lora` section, such as `lora: {max_loras: 4}`."  # a remedy of several complaints
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Form:
    """A form that rows of traffic may have.

    Attributes:
        name: In words.
        required, optional: Its columns, or keys.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """All of them."""
        return self.required + self.optional

    def describe(self) -> str:
        """Its columns in words."""
        extra = f", and may have {', '.join(self.optional)}" if self.optional else ""
        return f"{self.name} has {', '.join(self.required)}{extra}"


def read_text(path: Path) -> str:
    """Text of a file, without a byte order mark. Raises TrafficError for what is no UTF-8 text, or blank."""
    text = load.read_text(path, TrafficError, "Give a readable file: a histogram, a request trace, or a log.")
    if "\0" in text:
        raise TrafficError(f"{path}: holds NUL bytes, so it is no text", remedy="Unpack it, or save it as UTF-8.")
    if not text.strip():
        raise TrafficError(f"{path} is empty", remedy="Give a file with traffic in it.")
    return text


def nearest_form(names: Collection[str], forms: Sequence[Form]) -> Form | None:
    """The form with most of these columns, in any case; failing that, with the most similar ones; None if none is."""

    def score(form: Form) -> tuple[int, int]:
        known = [column.lower() for column in form.columns]
        lower = [name.strip().lower() for name in names]
        near = sum(bool(difflib.get_close_matches(name, known, n=1, cutoff=0.75)) for name in lower)
        return sum(name in known for name in lower), near

    best = max(forms, key=score)
    return best if any(score(best)) else None


def csv_header(text: str) -> list[str]:
    """The first fields of the first line that is not blank, as far as they tell the form."""
    first = next(line for line in text.splitlines() if line.strip())
    return [name.strip().strip('"') for name in first.split(",")[:50]]


def check_separator(text: str, path: Path, forms: Sequence[Form]) -> None:
    """Raises TrafficError for a table whose columns are separated by something else than commas."""
    number, first = next((i, line) for i, line in enumerate(text.splitlines(), start=1) if line.strip())
    known = {column.lower() for form in forms for column in form.columns}
    for separator, name in load.SEPARATORS.items():
        names = [field.strip().strip('"').lower() for field in first.split(separator)]
        if "," not in first and len(names) > 1 and known & {*names}:
            raise TrafficError(
                f"{path}:{number}: the columns are separated by {name}",
                remedy=f"Separate them by commas, as in {','.join(forms[0].required)}.",
            )


def csv_rows(text: str, path: Path, form: Form) -> Iterator[tuple[str, Row]]:
    """(``file:line``, values by column) of each row; columns are matched in any case.

    Raises:
        TrafficError: an unknown, missing or repeated column, a row with too few or too many fields, or no CSV at all.
    """
    reader = csv.reader(io.StringIO(text, newline=""))
    columns: list[str] = []
    try:
        for fields in reader:
            where = f"{path}:{reader.line_num}"
            if not any(field.strip() for field in fields):
                continue
            if not columns:
                columns = _columns(fields, where, form)
                continue
            if len(fields) != len(columns):
                raise TrafficError(
                    f"{where}: {len(fields)} fields, but the header has {len(columns)}",
                    remedy="Give each row one value for each column; the file may have been cut off there.",
                )
            yield where, dict(zip(columns, (field.strip() for field in fields), strict=True))
    except csv.Error as error:
        raise TrafficError(f"{path}:{reader.line_num}: not CSV: {error}", remedy="Correct that line.") from None


def jsonl_rows(text: str, path: Path, form: Form) -> Iterator[tuple[str, Row]]:
    """(``file:line``, values by key) of each line. Raises TrafficError as csv_rows does."""
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        row = json_object(line, where)
        names = _columns(list(row), where, form)
        yield where, dict(zip(names, row.values(), strict=True))


def json_object(text: str, where: str) -> dict[str, Any]:
    """One JSON object. Raises TrafficError."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: a number with too many digits, too
        raise TrafficError(f"{where}: not JSON: {error}", remedy="Give one JSON object a line.") from None
    if not isinstance(row, dict):
        raise TrafficError(f"{where}: {_short(row)} is not an object", remedy="Give one JSON object a line.")
    return row


def _columns(names: Sequence[str], where: str, form: Form) -> list[str]:
    """The names as the form writes them, all of them known, and none of the required ones missing."""
    known = {column.lower(): column for column in form.columns}
    found: list[str] = []
    for name in names:
        column = known.get(name.strip().lower())
        if column is None:
            near = difflib.get_close_matches(name.strip().lower(), known, n=1)
            hint = f" (did you mean {known[near[0]]!r}?)" if near else ""
            raise TrafficError(f"{where}: unknown column {_short(name)}{hint}", remedy=f"{form.describe()}.")
        if column in found:
            raise TrafficError(f"{where}: column {column!r} stands twice", remedy="Keep one of them.")
        found.append(column)
    missing = [column for column in form.required if column not in found]
    if missing:
        raise TrafficError(f"{where}: column {missing[0]!r} is missing", remedy=f"{form.describe()}.")
    return found


def whole(row: Row, column: str, where: str, *, low: int = 0, high: int = MOST_TOKENS) -> int:
    """A whole number between two bounds, written in any way (``34``, ``34.0``). Raises TrafficError."""
    value = row[column]
    try:
        number = Decimal(str(value)) if not isinstance(value, bool) else Decimal("nan")
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite() or not low <= number <= high or number != number.to_integral_value():
        raise TrafficError(
            f"{where}: {column} is {_short(value)}, not a whole number from {low} to {high}",
            remedy="Correct that row.",
        )
    return int(number)


def adapter(row: Row, column: str, where: str) -> int:
    """The number of an adapter. Raises TrafficError."""
    try:
        return whole(row, column, where)
    except TrafficError as error:
        raise TrafficError(
            error.message,
            remedy="Write adapters as numbers from 0 up, one for each name, and leave the field empty for none.",
        ) from None


def flag(row: Row, column: str, where: str) -> bool:
    """true or false, or 1 or 0. Raises TrafficError."""
    words = {"true": True, "1": True, "false": False, "0": False}
    value = str(row[column]).strip().lower()
    if value not in words:
        raise TrafficError(f"{where}: {column} is {_short(row[column])}", remedy="Write true or false, or 1 or 0.")
    return words[value]


def absent(row: Row, column: str) -> bool:
    """Whether the row says nothing in that column."""
    return row.get(column) in (None, "")


def likely_batch(
    num_tokens: int,
    config: Config,
    num_reqs: int | None = None,
    uniform: bool | None = None,
    num_active_loras: int = 0,
) -> Batch:
    """Batch from what is known of it; GUESSES says how the rest is chosen."""
    q, most = config.query_len, config.scheduler.max_num_seqs
    if uniform is None and num_reqs is not None:
        uniform = num_tokens == q * num_reqs
    elif uniform is None:
        uniform = num_tokens % q == 0 and num_tokens <= q * most
    if num_reqs is None:
        num_reqs = max(num_tokens // q, 1) if uniform else min(num_tokens, most)
    return Batch(num_tokens, num_reqs, uniform, num_active_loras)


GUESSES = {
    "uniform": "whether a batch is uniform decode was guessed: it is if it could be, having a multiple of the query "
    "length in tokens and no more requests than max_num_seqs",
    "num_reqs": "requests of a batch were guessed: tokens / query length of a uniform one, else as many as there are "
    "tokens, at most max_num_seqs",
    "num_active_loras": "batches are taken to use no LoRA adapter, as nothing is said of any",
}


class Guessed:
    """What had to be guessed, for the notes: they say how much of the traffic hangs on what is uniform."""

    def __init__(self) -> None:
        self._columns: set[str] = set()
        self._steps = self._tokens = self._uniform = 0

    def add(self, column: str, batch: Batch, count: int) -> None:
        """So many steps with a batch of which that column (a key of GUESSES) was guessed."""
        self._columns.add(column)
        if column == "uniform":
            self._steps += count
            self._tokens += count * batch.num_tokens
            self._uniform += count * batch.uniform

    def notes(self) -> Iterator[str]:
        """A sentence for each column that was guessed."""
        for column, words in GUESSES.items():
            if column not in self._columns:
                continue
            if column != "uniform":
                yield words
            elif self._steps:
                of = f"of {self._steps:,} steps with {self._tokens:,} tokens"
                yield f"{of}, {words}; {self._uniform:,} of these steps are taken as uniform"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
