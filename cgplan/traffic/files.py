"""Traffic from files of any form that people have it in, and traffic made up from a few figures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from cgplan.config import Config
from cgplan.errors import ConfigError, TrafficError
from cgplan.traffic.histogram import Batch, Traffic
from cgplan.traffic.rows import (
    ADD_LORA,
    GUESSES,
    MOST_STEPS,
    Form,
    Guessed,
    Row,
    absent,
    adapter,
    check_separator,
    csv_header,
    csv_rows,
    flag,
    json_object,
    jsonl_rows,
    likely_batch,
    nearest_form,
    read_text,
    whole,
)
from cgplan.traffic.simulation import NO_ADAPTER, Limits, Request, StepTime, simulate
from cgplan.traffic.vllm_log import COLUMNS, has_table, log_traffic

TRACE = Form("a request trace", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), ("Adapter",))
MOONCAKE = Form("a Mooncake trace", ("timestamp", "input_length", "output_length"), ("hash_ids", "adapter"))
_LONGEST_TRACE = 1e17  # microseconds
_REQUEST_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)


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
    if _REQUEST_NUMBER.fullmatch(text):
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


HISTOGRAM = Form("a histogram", ("num_tokens", "count"), ("num_reqs", "uniform", "num_active_loras"))
_LARGEST_BATCH = 1 << 20  # tokens; the largest bound that a configuration may state
_P95_DEVIATIONS = 1.6448536269514722  # of a normal distribution
_NUMBER = re.compile(r"\[?\s*-?[\d.]+\s*\]?")  # also of a JSON list
_LOG_LINE = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR)\b")


def read_traffic(path: str | Path, *, config: Config, step_time: StepTime, speedup: float = 1.0) -> Traffic:
    """Traffic from a file. What it holds is told by its content, not by its name:

    - a histogram of steps, as CSV or as one JSON object a line: num_tokens, count, and where they are known num_reqs,
      uniform and num_active_loras;
    - a request trace as CSV: TIMESTAMP (a date and time, or seconds), ContextTokens, GeneratedTokens, and where it is
      known Adapter (a number, empty for none); or Mooncake's, one JSON object a line: timestamp (milliseconds),
      input_length, output_length. It becomes steps by ``simulate``;
    - a log of vLLM with its tables of CUDA graph statistics;
    - Traffic that was saved as JSON, or the statistics of a runner (``runner.stats.json()``).

    Columns that a histogram lacks are guessed; the notes of the traffic say how.

    Args:
        path: UTF-8 text.
        config: Its scheduler, speculation and LoRA bound the simulation, and inform the guesses.
        step_time: Microseconds that a step with a batch lasts; for request traces.
        speedup: Requests come so many times as fast as they were recorded.

    Raises:
        TrafficError: the file cannot be read, has none of these forms, holds no batch, or a row makes no sense.
        StepTimeError: a step time is not positive.
    """
    return parse_traffic(read_text(Path(path)), path, config=config, step_time=step_time, speedup=speedup)


def parse_traffic(text: str, path: str | Path, *, config: Config, step_time: StepTime, speedup: float = 1.0) -> Traffic:
    """The same from a text that was read already: from a pipe it can be read once alone. ``path`` names it in messages.

    Raises:
        TrafficError, StepTimeError: as ``read_traffic`` does.
    """
    path = Path(path)
    if not 0 < speedup < math.inf:
        raise TrafficError(f"a speedup of {speedup} makes no sense", remedy="Give a number above 0; 1 is as recorded.")
    found = _parsed(text, path, config)
    if isinstance(found, Traffic):
        if speedup != 1:
            raise TrafficError(
                f"{path} holds counts of steps, which cannot be sped up",
                remedy="Leave the speedup out, or give a request trace.",
            )
        return _fitting(found, str(path), config)
    hurried = [request._replace(arrival_us=request.arrival_us / speedup) for request in found.requests]
    fast = f", {speedup:g} times as fast as recorded" if speedup != 1 else ""
    traffic = simulate(hurried, Limits.of(config), step_time, source=f"{path.name}: {len(hurried)} requests{fast}")
    return traffic.model_copy(update={"notes": (*found.notes, *traffic.notes)})


def synthetic_traffic(config: Config, step_time: StepTime) -> Traffic:
    """Traffic made up from the configuration's `traffic` section, by ``simulate``.

    Requests arrive as a Poisson process. Lengths are lognormal with the given median and 95th percentile, rounded, and
    kept between 1 and 2^20 tokens; those of a prompt and its output are independent. The share of requests with an
    adapter, and the adapters, are drawn independently. Equal seeds give equal requests.

    Args:
        config: With a `traffic` section.
        step_time: Microseconds that a step with a batch lasts.

    Raises:
        ConfigError: there is no such section.
        StepTimeError: a step time is not positive.
    """
    import numpy as np  # it takes longer to import than all of planning, which most commands do without

    made = config.traffic
    if made is None:
        raise ConfigError("there is no traffic to plan for", remedy="Add a `traffic` section, or give a file.")
    rng, number = np.random.default_rng(made.seed), made.num_requests

    def lengths(median: int, p95: int) -> list[int]:
        drawn = rng.lognormal(math.log(median), math.log(p95 / median) / _P95_DEVIATIONS, number)
        return [int(length) for length in np.clip(np.rint(drawn), 1, _LARGEST_BATCH)]

    arrivals = np.cumsum(rng.exponential(1e6 / made.request_rate, number)).tolist()
    prompts, outputs = lengths(made.prompt_median, made.prompt_p95), lengths(made.output_median, made.output_p95)
    adapters = [NO_ADAPTER] * number
    if made.lora_share > 0 and config.lora:
        chosen = rng.integers(made.num_adapters or config.lora.max_loras, size=number)
        adapters = np.where(rng.random(number) < made.lora_share, chosen, NO_ADAPTER).tolist()
    requests = map(Request, arrivals, prompts, outputs, adapters)
    source = f"synthetic: {number} requests, {made.request_rate:g} a second, seed {made.seed}"
    return simulate(requests, Limits.of(config), step_time, source=source)


def _parsed(text: str, path: Path, config: Config) -> Traffic | Trace:
    if text.lstrip().startswith("{"):
        whole_file = _single_object(text)
        if whole_file is not None and "kind" in whole_file:
            return _saved(text, whole_file, path)
        if whole_file is not None and "batches" in whole_file:
            return _of_stats(whole_file["batches"], path)
        if whole_file is not None and "\n" in text.strip():
            raise _unknown_form(text, list(whole_file), path)
        number, first = next((i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip())
        names = list(json_object(first, f"{path}:{number}"))
        form = nearest_form(names, (HISTOGRAM, MOONCAKE))
        read = jsonl_rows
    elif has_table(text):
        return log_traffic(text, path, config)
    else:
        check_separator(text, path, (HISTOGRAM, TRACE))
        names = csv_header(text)
        form = nearest_form(names, (HISTOGRAM, TRACE))
        read = csv_rows
    if form is None:
        raise _unknown_form(text, names, path)
    rows = read(text, path, form)
    return _histogram(rows, path, config) if form is HISTOGRAM else parse_trace(rows, form, path, config)


def _single_object(text: str) -> dict[str, Any] | None:
    """The file as one JSON object, None where it is not one (but one in each line, say)."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _saved(text: str, data: Mapping[str, Any], path: Path) -> Traffic:
    if data["kind"] != "traffic":
        raise TrafficError(
            f"{path} holds a {data['kind']!s:.40}, not traffic",
            remedy="Give a file of traffic; a plan or report is none.",
        )
    try:
        return Traffic.from_json(text)
    except TrafficError as error:
        raise TrafficError(f"{path}: {error.message}", remedy=error.remedy) from None


def _of_stats(batches: Any, path: Path) -> Traffic:
    """The batches that a runner's statistics count (``runner.stats.json()``)."""
    try:
        traffic = Traffic.from_json(json.dumps({"histogram": batches, "source": "statistics of a runner"}))
    except TrafficError as error:
        raise TrafficError(f"{path}: {error.message}", remedy=error.remedy) from None
    return traffic.model_copy(update={"source": f"{path.name}: {traffic.source}"})


def _unknown_form(text: str, names: list[str], path: Path) -> TrafficError:
    if _LOG_LINE.search(text):
        return TrafficError(
            f"{path}: the log holds no table of CUDA graph statistics",
            remedy="Run vLLM with --cudagraph-metrics and with its log of statistics on; then it writes tables that "
            f"begin with | {' | '.join(COLUMNS)} |.",
        )
    if names and all(_NUMBER.fullmatch(name) for name in names):
        return TrafficError(
            f"{path}: the first line holds numbers, not the names of columns",
            remedy=f"Begin with a line such as {','.join(HISTOGRAM.required)}.",
        )
    listed = ", ".join(repr(name if len(name) <= 40 else f"{name[:37]}...") for name in names[:3] if name)
    return TrafficError(
        f"{path}: unknown columns {listed}" if listed else f"{path}: no column has a name",
        remedy="; ".join(form.describe() for form in (HISTOGRAM, TRACE, MOONCAKE))
        + "; a log of vLLM and traffic that cgplan saved will do as well.",
    )


def _histogram(rows: Iterable[tuple[str, Row]], path: Path, config: Config) -> Traffic:
    counts: dict[Batch, float] = {}
    guessed = Guessed()
    for where, row in rows:
        batch = likely_batch(
            whole(row, "num_tokens", where, low=1, high=_LARGEST_BATCH),
            config,
            num_reqs=None if absent(row, "num_reqs") else whole(row, "num_reqs", where, low=1),
            uniform=None if absent(row, "uniform") else flag(row, "uniform", where),
            num_active_loras=0 if absent(row, "num_active_loras") else whole(row, "num_active_loras", where),
        )
        _check_batch(batch, where, config)
        count = whole(row, "count", where, high=MOST_STEPS)
        counts[batch] = counts.get(batch, 0) + count
        for column in GUESSES:
            if absent(row, column):
                guessed.add(column, batch, count)
    return Traffic.of(counts, f"{path.name}: histogram", guessed.notes())


def _check_batch(batch: Batch, where: str, config: Config, *, any_number: bool = False) -> None:
    """Raises TrafficError for a batch that no step under this configuration can be. max_loras + 1 adapters are possible
    where they may stand for ``any_number`` of them, as runners take and count it.
    """
    most = config.lora.max_loras if config.lora else 0
    if batch.num_reqs > batch.num_tokens:
        problem, remedy = f"{batch.num_reqs} requests have {batch.num_tokens} tokens", "Correct that batch."
    elif batch.uniform and batch.num_tokens != config.query_len * batch.num_reqs:
        problem = (
            f"a uniform batch has {batch.num_tokens} tokens for {batch.num_reqs} requests, "
            f"but the query length is {config.query_len}"
        )
        remedy = "Set speculative.num_speculative_tokens as it was where the traffic was recorded."
    elif batch.num_active_loras > (most and most + any_number):
        problem = f"a batch has {batch.num_active_loras} active LoRA adapters, the configuration allows {most}"
        remedy = "Raise lora.max_loras." if config.lora else ADD_LORA
    elif batch.num_tokens > _LARGEST_BATCH:
        problem, remedy = f"a batch has {batch.num_tokens} tokens", f"A batch has {_LARGEST_BATCH} tokens at most."
    else:
        return
    raise TrafficError(f"{where}: {problem}", remedy=remedy)


def _fitting(traffic: Traffic, where: str, config: Config) -> Traffic:
    """The traffic, with a note on batches that this scheduler would not make. Raises TrafficError."""
    scheduler = config.scheduler
    beyond = 0.0
    for batch, weight in traffic.histogram:
        _check_batch(batch, where, config, any_number=True)
        if batch.num_tokens > scheduler.max_num_batched_tokens or batch.num_reqs > scheduler.max_num_seqs:
            beyond += weight
    if not beyond:
        return traffic
    note = (
        f"{beyond / traffic.total:.1%} of the steps are larger than this scheduler makes them (max_num_seqs "
        f"{scheduler.max_num_seqs}, max_num_batched_tokens {scheduler.max_num_batched_tokens})"
    )
    return traffic.model_copy(update={"notes": (*traffic.notes, note)})
