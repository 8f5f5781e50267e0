"""Traffic from files of any form that people have it in, and requests made up from a few figures.

A file's text tells its form. Histograms, logs and saved traffic hold steps; traces hold requests, which ``simulate``
turns into steps.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from cgplan.config.schema import TrafficConfig
from cgplan.errors import TrafficError
from cgplan.planning import Plan
from cgplan.traffic.histogram import MOST_BATCHED_TOKENS, StepCounts, StepShape, Traffic
from cgplan.traffic.rows import (
    MOST_STEPS,
    Flag,
    Form,
    Row,
    csv_rows,
    first_line,
    json_object,
    jsonl_rows,
    nearest_form,
    read_text,
    whole,
    wrong_cell,
)
from cgplan.traffic.simulation import NO_ADAPTER, Request, RequestTrace
from cgplan.traffic.vllm_log import COLUMNS, has_table, log_traffic

_LATEST = 1e14  # of a timestamp, in seconds or milliseconds
_P95_DEVIATIONS = 1.6448536269514722  # of a normal distribution
_ADD_LORA = "Add a `lora` section, such as `lora: {max_loras: 4}`."
_SECONDS = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
_NUMBER = re.compile(r"\[?\s*-?[\d.]+\s*\]?")  # also of a JSON list
_LOG_LINE = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR)\b")


class _HistogramRow(Row):
    num_tokens: Annotated[int, whole(1, MOST_BATCHED_TOKENS)]
    count: Annotated[int, whole(high=MOST_STEPS)]
    num_reqs: Annotated[int, whole(1)] | None = None
    uniform: Flag | None = None
    num_active_loras: Annotated[int, whole()] | None = None


def _date_or_seconds(text: str) -> tuple[str, float]:
    """The form of a timestamp, and its microseconds since any moment that all of this form share."""
    if _SECONDS.fullmatch(text) and abs(float(text)) < _LATEST:
        return "seconds", float(text) * 1e6
    try:
        moment = datetime.fromisoformat(text)  # takes the 7 digits of Azure's traces; the 7th, 100 ns, is cut off
    except ValueError:
        raise wrong_cell(
            "neither a date and time nor seconds",
            "Write it as in 2023-11-16 18:17:03.979960, or as a number of seconds.",
        ) from None
    zone = moment.tzinfo and UTC
    return f"date {zone}", (moment - datetime(1970, 1, 1, tzinfo=zone)) / timedelta(microseconds=1)


def _milliseconds(value: object) -> tuple[str, float]:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LATEST:
        raise wrong_cell(f"not a number below {_LATEST:.0e}", "Write it as a number of milliseconds.")
    return "milliseconds", value * 1e3


Adapter = Annotated[
    int, whole(remedy="Write adapters as numbers from 0 up, one for each name, and leave the field empty for none.")
]


class _TraceRow(Row):
    arrival: Annotated[Any, BeforeValidator(_date_or_seconds)] = Field(alias="TIMESTAMP")
    context_tokens: Annotated[int, whole()] = Field(alias="ContextTokens")
    generated_tokens: Annotated[int, whole()] = Field(alias="GeneratedTokens")
    adapter: Adapter | None = Field(None, alias="Adapter")


class _MooncakeRow(Row):
    arrival: Annotated[Any, BeforeValidator(_milliseconds)] = Field(alias="timestamp")
    context_tokens: Annotated[int, whole()] = Field(alias="input_length")
    generated_tokens: Annotated[int, whole()] = Field(alias="output_length")
    hash_ids: Any = None
    adapter: Adapter | None = None


HISTOGRAM = Form("a histogram", _HistogramRow)
TRACE = Form("a request trace", _TraceRow)
MOONCAKE = Form("a Mooncake trace", _MooncakeRow)


def read_traffic(path: str | Path, plan: Plan, *, speedup: float = 1.0) -> Traffic | RequestTrace:
    """Steps or requests from a file. Its content tells its form, not its name:

    - a histogram of steps, as CSV or as one JSON object a line: num_tokens, count, and where they are known num_reqs,
      uniform and num_active_loras;
    - a request trace as CSV: TIMESTAMP (a date and time, or seconds), ContextTokens, GeneratedTokens, and where it is
      known Adapter (a number, empty for none); or Mooncake's, one JSON object a line: timestamp (milliseconds),
      input_length, output_length;
    - a log of vLLM with its tables of CUDA graph statistics;
    - Traffic that was saved as JSON, or the statistics of a runner (``runner.stats.json()``).

    Columns that a histogram lacks are guessed; the notes of the traffic say how.

    Args:
        path: UTF-8 text. Read once: it may be a pipe.
        plan: Its bounds of a batch inform the guesses, and its adapters and query length are those of all steps.
        speedup: Requests come so many times as fast as they were recorded.

    Raises:
        TrafficError: the file cannot be read, has none of these forms, holds no batch, or a row makes no sense.
    """
    path = Path(path)
    if not 0 < speedup < math.inf:
        raise TrafficError(f"a speedup of {speedup} makes no sense", remedy="Give a number above 0; 1 is as recorded.")
    found = _parsed(read_text(path), path, plan)
    if isinstance(found, RequestTrace):
        if speedup == 1:
            return found
        hurried = [request._replace(arrival_us=request.arrival_us / speedup) for request in found.requests]
        return found._replace(requests=hurried, source=f"{found.source}, {speedup:g} times as fast as recorded")
    if speedup != 1:
        raise TrafficError(
            f"{path} holds counts of steps, which cannot be sped up",
            remedy="Leave the speedup out, or give a request trace.",
        )
    for shape, _ in found.histogram:
        _check_shape(shape, str(path), plan, any_number=True)
    seqs, tokens = plan.max_num_seqs, plan.max_num_batched_tokens
    beyond = sum(weight for shape, weight in found.histogram if shape.num_tokens > tokens or shape.num_reqs > seqs)
    if not beyond:
        return found
    note = (
        f"{beyond / found.total:.1%} of the steps are larger than this scheduler makes them (max_num_seqs {seqs}, "
        f"max_num_batched_tokens {tokens})"
    )
    return found.model_copy(update={"notes": (*found.notes, note)})


def synthetic_requests(made: TrafficConfig, plan: Plan) -> RequestTrace:
    """Requests made up from the `traffic` section of a configuration.

    They arrive as a Poisson process. Lengths are lognormal with the given median and 95th percentile, rounded, and
    kept between 1 and 2^20 tokens; those of a prompt and its output are independent. The share of requests with an
    adapter, and the adapters, are drawn independently; without LoRA in the plan none has one. Equal seeds give equal
    requests.
    """
    import numpy as np  # it takes longer to import than all of planning, which most commands do without

    rng, number = np.random.default_rng(made.seed), made.num_requests

    def lengths(median: int, p95: int) -> list[int]:
        drawn = rng.lognormal(math.log(median), math.log(p95 / median) / _P95_DEVIATIONS, number)
        return [int(length) for length in np.clip(np.rint(drawn), 1, MOST_BATCHED_TOKENS)]

    arrivals = np.cumsum(rng.exponential(1e6 / made.request_rate, number)).tolist()
    prompts, outputs = lengths(made.prompt_median, made.prompt_p95), lengths(made.output_median, made.output_p95)
    adapters = [NO_ADAPTER] * number
    if made.lora_share > 0 and plan.max_loras:
        chosen = rng.integers(made.num_adapters or plan.max_loras, size=number)
        adapters = np.where(rng.random(number) < made.lora_share, chosen, NO_ADAPTER).tolist()
    requests = list(map(Request, arrivals, prompts, outputs, adapters))
    return RequestTrace(requests, f"synthetic: {number} requests, {made.request_rate:g} a second, seed {made.seed}")


def _parsed(text: str, path: Path, plan: Plan) -> Traffic | RequestTrace:
    forms: tuple[Form[Any], ...] = (HISTOGRAM, TRACE)
    number, first, separator = first_line(text)
    if first.lstrip().startswith("{"):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):  # but perhaps one object a line
            document = {}
        if "kind" in document or "batches" in document:
            return _saved(text, document, path)
        if document and "\n" in text.strip():
            raise _unknown_form(text, list(document), path)
        names, read, forms = list(json_object(first, f"{path}:{number}")), jsonl_rows, (HISTOGRAM, MOONCAKE)
    elif has_table(text):
        return log_traffic(text, path, plan)
    else:
        names, read = [name.strip().strip('"') for name in first.split(separator)[:50]], csv_rows  # 50 tell the form
    form = nearest_form(names, forms)
    if form is None:
        raise _unknown_form(text, names, path)
    rows = read(text, path, form)
    return _histogram(rows, path, plan) if form is HISTOGRAM else _trace(rows, form, path, plan)


def _saved(text: str, data: Mapping[str, Any], path: Path) -> Traffic:
    """Saved traffic, or the batches that a runner's statistics count (``runner.stats.json()``)."""
    if data.get("kind", "traffic") != "traffic":
        raise TrafficError(
            f"{path} holds a {data['kind']!s:.40}, not traffic",
            remedy="Give a file of traffic; a plan or report is none.",
        )
    try:
        if "kind" in data:
            return Traffic.from_json(text)
        traffic = Traffic.from_json(json.dumps({"histogram": data["batches"], "source": "statistics of a runner"}))
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
            remedy="Begin with a line such as num_tokens,count.",
        )
    listed = ", ".join(repr(name if len(name) <= 40 else f"{name[:37]}...") for name in names[:3] if name)
    return TrafficError(
        f"{path}: unknown columns {listed}" if listed else f"{path}: no column has a name",
        remedy="; ".join(form.described for form in (HISTOGRAM, TRACE, MOONCAKE))
        + "; a log of vLLM and traffic that cgplan saved will do as well.",
    )


def _histogram(rows: Iterable[tuple[str, Any, _HistogramRow]], path: Path, plan: Plan) -> Traffic:
    steps = StepCounts(plan)
    for where, _, row in rows:
        shape = steps.add(**dict(row))
        _check_shape(shape, where, plan)
    return Traffic.of(steps.counts, f"{path.name}: histogram", steps.notes())


def _check_shape(shape: StepShape, where: str, plan: Plan, *, any_number: bool = False) -> None:
    """Raises TrafficError for a shape that no step under this plan can have. max_loras + 1 adapters are possible where
    they may stand for ``any_number`` of them, as runners take and count it.
    """
    most = plan.max_loras or 0
    if shape.num_reqs > shape.num_tokens:
        problem, remedy = f"{shape.num_reqs} requests have {shape.num_tokens} tokens", "Correct that batch."
    elif shape.uniform and shape.num_tokens != plan.query_len * shape.num_reqs:
        problem = (
            f"a uniform batch has {shape.num_tokens} tokens for {shape.num_reqs} requests, "
            f"but the query length is {plan.query_len}"
        )
        remedy = "Set speculative.num_speculative_tokens as it was where the traffic was recorded."
    elif shape.num_active_loras > (most and most + any_number):
        problem = f"a batch has {shape.num_active_loras} active LoRA adapters, the configuration allows {most}"
        remedy = "Raise lora.max_loras." if most else _ADD_LORA
    else:
        return
    raise TrafficError(f"{where}: {problem}", remedy=remedy)


def _trace(rows: Iterable[tuple[str, Mapping[str, Any], Any]], form: Form[Any], path: Path, plan: Plan) -> RequestTrace:
    stamp = next(iter(form.columns))
    requests: list[Request] = []
    first: tuple[str, float] | None = None
    empty, last = 0, -math.inf
    for where, cells, row in rows:
        first = first or row.arrival
        if row.arrival[0] != first[0]:
            raise TrafficError(
                f"{where}: the timestamp has another form than that of the first row",
                remedy="Write all of them alike: with a time zone, without one, or in seconds.",
            )
        arrival = row.arrival[1] - first[1]
        if arrival < last:
            raise TrafficError(
                f"{where}: {stamp} {cells[stamp]} is before that of the row above", remedy="Sort the rows by time."
            )
        last = arrival
        if row.adapter is not None and plan.max_loras is None:
            raise TrafficError(
                f"{where}: the request uses an adapter, but the configuration has none", remedy=_ADD_LORA
            )
        if row.context_tokens:
            adapter = NO_ADAPTER if row.adapter is None else row.adapter
            requests.append(Request(arrival, row.context_tokens, row.generated_tokens, adapter))
        else:
            empty += 1
    if not requests:
        raise TrafficError(f"{path}: no request with a prompt", remedy="Give a trace with at least one request.")
    notes = (f"{empty} requests without a prompt were left out",) if empty else ()
    return RequestTrace(requests, f"{path.name}: {len(requests)} requests", notes)
