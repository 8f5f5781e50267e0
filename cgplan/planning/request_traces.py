"""Request traces: when requests came and how long they were, in the forms that such traces are published in."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from cgplan.config import Config
from cgplan.errors import TrafficError
from cgplan.planning.simulation import NO_ADAPTER, Request
from cgplan.planning.traffic_rows import ADD_LORA, Form, Row, absent, adapter, whole

TRACE = Form("a request trace", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), ("Adapter",))
MOONCAKE = Form("a Mooncake trace", ("timestamp", "input_length", "output_length"), ("hash_ids", "adapter"))
_LONGEST_TRACE = 1e17  # microseconds
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)


class Trace(NamedTuple):
    """Requests of a file, in order of arrival, and what was left out of it."""

    requests: list[Request]
    notes: tuple[str, ...]


def parse_trace(rows: Iterable[tuple[str, Row]], form: Form, path: Path, config: Config) -> Trace:
    """Requests of a trace, in microseconds since its first.

    Raises:
        TrafficError: timestamps do not ascend or cannot be read, a length is no whole number, a request has an adapter
            and the configuration no `lora` section, or no request is left.
    """
    stamp, context, generated, *_, named = form.columns
    requests: list[Request] = []
    first: datetime | float | None = None
    empty, last = 0, -math.inf
    for where, row in rows:
        moment = _date_or_seconds(row[stamp], where) if form is TRACE else _milliseconds(row[stamp], where)
        first = moment if first is None else first
        arrival = _microseconds_between(first, moment, where)
        if arrival < last:
            raise TrafficError(
                f"{where}: {stamp} {row[stamp]} is before that of the row above", remedy="Sort the rows by time."
            )
        last = arrival
        request = Request(
            arrival,
            whole(row, context, where),
            whole(row, generated, where),
            NO_ADAPTER if absent(row, named) else adapter(row, named, where),
        )
        if request.adapter != NO_ADAPTER and config.lora is None:
            raise TrafficError(f"{where}: the request uses an adapter, but the configuration has none", remedy=ADD_LORA)
        if request.context_tokens:
            requests.append(request)
        else:
            empty += 1
    if not requests:
        raise TrafficError(f"{path}: no request with a prompt", remedy="Give a trace with at least one request.")
    return Trace(requests, (f"{empty} requests without a prompt were left out",) if empty else ())


def _date_or_seconds(text: str, where: str) -> datetime | float:
    if _NUMBER.fullmatch(text):
        return float(text) * 1e6
    try:
        return datetime.fromisoformat(text)  # takes the 7 digits of Azure's traces; the 7th, 100 ns, is cut off
    except ValueError:
        raise TrafficError(
            f"{where}: TIMESTAMP {text[:40]!r} is neither a date and time nor seconds",
            remedy="Write it as in 2023-11-16 18:17:03.979960, or as a number of seconds.",
        ) from None


def _milliseconds(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TrafficError(
            f"{where}: timestamp {value!r:.40} is not a number", remedy="Write it as a number of milliseconds."
        )
    try:
        return value * 1e3
    except OverflowError:
        raise TrafficError(f"{where}: the timestamp is too large", remedy="Write it in milliseconds.") from None


def _microseconds_between(first: datetime | float, moment: datetime | float, where: str) -> float:
    if (
        isinstance(first, datetime)
        and isinstance(moment, datetime)
        and (first.tzinfo is None) == (moment.tzinfo is None)
    ):
        return (moment - first) / timedelta(microseconds=1)
    if isinstance(first, datetime) or isinstance(moment, datetime):
        raise TrafficError(
            f"{where}: the timestamp has another form than that of the first row",
            remedy="Write all of them alike: with a time zone, without one, or in seconds.",
        )
    if not abs(moment - first) < _LONGEST_TRACE:
        raise TrafficError(f"{where}: a timestamp of {moment:g} us makes no sense", remedy="Correct that row.")
    return moment - first
