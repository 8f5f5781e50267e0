"""Traffic from files of any form that people have it in, and requests made up from a few figures.

A file's text tells its form. Histograms, logs and saved traffic hold steps; traces hold requests, which ``simulate``
turns into steps.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.client import HTTPException
from operator import le
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from cgplan.config import Dim, load
from cgplan.config.schema import TrafficConfig
from cgplan.errors import TrafficError
from cgplan.modes import CUDAGraphMode
from cgplan.planning import Plan
from cgplan.planning.costs import Record
from cgplan.traffic.histogram import MOST_BATCHED_TOKENS, SizeCounts, StepCounts, StepShape, Traffic
from cgplan.traffic.rows import (
    Form,
    RuntimeMode,
    Whole,
    csv_rows,
    first_line,
    json_object,
    jsonl_rows,
    short,
    sized_rows,
)
from cgplan.traffic.simulation import NO_ADAPTER, Request, RequestTrace

_P95_DEVIATIONS = 1.6448536269514722  # of a normal distribution
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ADD_LORA = "Add a `lora` section, such as `lora: {max_loras: 4}`."
# Of the tables that ``--cudagraph-metrics`` writes into a log of vLLM.
COLUMNS = ("Unpadded Tokens", "Padded Tokens", "Num Paddings", "Runtime Mode", "Count")
_HEADER = re.compile(r"\|\s*" + r"\s*\|\s*".join(COLUMNS) + r"\s*\|")
# The logger writes in front of a row, too. A row has 5 cells; one that was cut off begins with a number.
_ROW = re.compile(r"\|((?:[^|]*\|){5}|\s*-?\d+\s*(?:\|.*)?)$")
_MODE = re.compile(r"- Mode: *(?:CUDAGraphMode\.)?(\w+)\s*$")
_SIZES = re.compile(r"- Capture sizes: *\[([\d, ]*)\]\s*$")
_METRIC = "cgplan_batches"  # of a runner's metrics, in Prometheus' text format
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_TIMEOUT_SECONDS = 5.0
_LOG_LINE = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR)\b")


class _HistogramRow(Record):
    num_tokens: Annotated[int, Field(ge=1, le=MOST_BATCHED_TOKENS)]
    count: Whole
    num_reqs: Whole | None = None
    uniform: bool | None = None
    num_active_loras: Whole | None = None


def _microseconds(text: str) -> float:
    """Of a timestamp: a date and time, UTC unless it says otherwise, or seconds."""
    try:
        return float(text) * 1e6
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)  # takes the 7 digits of Azure's traces; the 7th, 100 ns, is cut off
    except ValueError:
        raise ValueError(
            "neither a date and time, such as 2023-11-16 18:17:03.979960, nor a number of seconds"
        ) from None
    return (moment.replace(tzinfo=moment.tzinfo or UTC) - _EPOCH) / timedelta(microseconds=1)


_MOST_US = 1e17  # since 1970: the year 5138


class _TraceRow(Record):
    arrival: Annotated[float, BeforeValidator(_microseconds)] = Field(alias="TIMESTAMP", ge=-_MOST_US, le=_MOST_US)
    context_tokens: Whole = Field(alias="ContextTokens")
    generated_tokens: Whole = Field(alias="GeneratedTokens")
    adapter: Whole | None = Field(None, alias="Adapter")


class _MooncakeRow(Record):
    arrival: Annotated[float, Field(alias="timestamp", ge=0, le=_MOST_US / 1e3), AfterValidator(lambda ms: ms * 1e3)]
    context_tokens: Whole = Field(alias="input_length")
    generated_tokens: Whole = Field(alias="output_length")
    hash_ids: Any = None
    adapter: Whole | None = None


class _LogRow(Record):
    num_tokens: Annotated[int, Field(alias="Unpadded Tokens", ge=1, le=MOST_BATCHED_TOKENS)]
    padded: Whole = Field(alias="Padded Tokens")
    paddings: Whole = Field(alias="Num Paddings")
    ran_as: RuntimeMode = Field(alias="Runtime Mode")
    count: Whole = Field(alias="Count")


HISTOGRAM = Form("a histogram", _HistogramRow)
TRACE = Form("a request trace", _TraceRow)
MOONCAKE = Form("a Mooncake trace", _MooncakeRow)
VLLM_LOG = Form("a table of CUDA graph statistics", _LogRow)


def read_traffic(path: str | Path, plan: Plan, *, speedup: float = 1.0) -> Traffic | RequestTrace:
    """Steps or requests from a file. Its content tells its form, not its name:

    - a histogram of steps, as CSV or as one JSON object a line: num_tokens, count, and where they are known num_reqs,
      uniform and num_active_loras;
    - a request trace as CSV: TIMESTAMP (a date and time, or seconds), ContextTokens, GeneratedTokens, and where it is
      known Adapter (a number, empty for none); or Mooncake's, one JSON object a line: timestamp (milliseconds),
      input_length, output_length;
    - a log of vLLM with its tables of CUDA graph statistics;
    - Traffic that was saved as JSON, or the statistics of a runner (``runner.stats.json()``);
    - metrics of one runner in Prometheus' text format (``runner.stats.prometheus()``).

    Columns that a histogram lacks are guessed; the notes of the traffic say how.

    Args:
        path: UTF-8 text, or an address of it that begins with http. Read once: it may be a pipe.
        plan: Its bounds of a batch inform the guesses, and its adapters and query length are those of all steps.
        speedup: Requests come so many times as fast as they were recorded.

    Raises:
        TrafficError: the file cannot be read, has none of these forms, holds no batch, or a row makes no sense.
    """
    text, path = _text_of(path), Path(str(path).rpartition("://")[2])
    if not 0 < speedup < math.inf:
        raise TrafficError(f"a speedup of {speedup} makes no sense", remedy="Give a number above 0; 1 is as recorded.")
    found = _parsed(text, path, plan)
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
        _check_shape(shape, path, plan)
    seqs, tokens = plan.max_num_seqs, plan.max_num_batched_tokens
    beyond = sum(weight for shape, weight in found.histogram if shape.num_tokens > tokens or shape.num_reqs > seqs)
    if not beyond:
        return found
    note = (
        f"{beyond / found.total:.1%} of the steps are larger than this scheduler makes them (max_num_seqs {seqs}, "
        f"max_num_batched_tokens {tokens})"
    )
    return found.model_copy(update={"notes": (*found.notes, note)})


def read_sizes(path: str | Path, dims: Sequence[Dim]) -> SizeCounts:
    """Batches from CSV, or one JSON object a line: a column for each of ``dims`` by its name, and perhaps ``count``
    (``weight``, if a dimension is named count; absent: 1). Batches above a dimension's max are counted apart.

    Raises:
        TrafficError: the file cannot be read, has other columns, holds no batch up to max, or a row makes no sense.
    """
    path, names, most = Path(path), [dim.name for dim in dims], [dim.max for dim in dims]
    counts: Counter[tuple[int, ...]] = Counter()
    beyond = 0
    column = "weight" if "count" in names else "count"
    for sizes, count in sized_rows(_text_of(path), path, names, TrafficError, column, (Whole, 1)):
        if all(map(le, sizes, most)):
            counts[sizes] += count
        else:
            beyond += count
    if not counts.total():
        raise TrafficError(
            f"{path}: no batch up to {dict(zip(names, most, strict=True))} with a count above 0",
            remedy="Give traffic with such a batch, or raise max in `dims`.",
        )
    return SizeCounts(tuple(names), {sizes: n for sizes, n in sorted(counts.items()) if n}, beyond, path.name)


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


def _text_of(path: str | Path) -> str:
    if str(path).startswith(("http://", "https://")):
        from urllib.request import urlopen

        try:
            with urlopen(str(path), timeout=_TIMEOUT_SECONDS) as answer:
                text = str(answer.read(), "utf-8")
        except (OSError, ValueError, HTTPException) as error:
            remedy = "Give the address of a runner's metrics, such as http://localhost:8000/metrics, or a file of them."
            raise TrafficError(f"{path} cannot be read: {error}", remedy=remedy) from None
    else:
        text = load.read_text(path, TrafficError, "Give a readable file: a histogram, a request trace, or a log.")
    if not text.strip():
        raise TrafficError(f"{path} is empty", remedy="Give a file with traffic in it.")
    return text


def _parsed(text: str, path: Path, plan: Plan) -> Traffic | RequestTrace:
    number, first, separator = first_line(text)
    trace: Form[Any]
    if first.lstrip().startswith("{"):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):  # but perhaps one object a line
            document = {}
        if "kind" in document or "batches" in document:
            return _saved(text, document, path)
        names, read, trace = list(json_object(first, f"{path}:{number}")), jsonl_rows, MOONCAKE
    elif _HEADER.search(text):
        return log_traffic(text, path, plan)
    elif _METRIC in text:
        return _metrics(text, path, plan)
    else:
        names, read, trace = first.split(separator), csv_rows, TRACE
    given = {name.strip(' "\r').lower() for name in names}
    forms: tuple[Form[Any], ...] = (HISTOGRAM, trace)
    known = {form: given & {column.lower() for column in form.columns} for form in forms}
    form = max(known, key=lambda form: len(known[form]))
    if not known[form]:
        raise _unknown_form(text, first, path)
    rows = read(text, path, form)
    return _histogram(rows, path, plan) if form is HISTOGRAM else _trace(rows, path, plan)


def _saved(text: str, data: Mapping[str, Any], path: Path) -> Traffic:
    """Saved traffic, or the batches that a runner's statistics count (``runner.stats.json()``)."""
    try:
        if "kind" in data:
            return Traffic.from_json(text)
        traffic = Traffic.from_json(json.dumps({"histogram": data["batches"], "source": "statistics of a runner"}))
    except TrafficError as error:
        raise TrafficError(f"{path}: {error.message}", remedy=error.remedy) from None
    return traffic.model_copy(update={"source": f"{path.name}: {traffic.source}"})


def _metrics(text: str, path: Path, plan: Plan) -> Traffic:
    """Traffic from the counter of batches of a runner, since it began or was reset."""
    steps, runners = StepCounts(plan), set[str]()
    for number, line in enumerate(text.split("\n"), start=1):
        name, _, rest = line.partition("{")
        if name == f"{_METRIC}_total":
            labels, _, value = rest.rpartition("}")
            cells: dict[str, Any] = dict(_LABEL.findall(labels))
            runners.add(cells.get("runner", ""))
            with suppress(ValueError, IndexError):
                cells["count"] = float(value.split()[0])  # 1e+06, say; a time may follow
            known = {name: cells.get(name) for name in HISTOGRAM.columns}
            steps.add(**dict(HISTOGRAM.read(known, f"{path}:{number}")))
    if len(runners) > 1:
        raise TrafficError(
            f"{path} has batches of several runners: {', '.join(sorted(runners))}",
            remedy="Give a file with the lines of one of them.",
        )
    return Traffic.of(steps.counts, f"{path.name}: metrics of a runner", steps.notes())


def _unknown_form(text: str, first: str, path: Path) -> TrafficError:
    if _LOG_LINE.search(text):
        return TrafficError(
            f"{path}: the log holds no table of CUDA graph statistics",
            remedy="Run vLLM with --cudagraph-metrics and with its log of statistics on; then it writes tables that "
            f"begin with | {' | '.join(COLUMNS)} |.",
        )
    return TrafficError(
        f"{path}: no known column in {short(first)}",
        remedy="; ".join(form.described for form in (HISTOGRAM, TRACE, MOONCAKE))
        + f"; a log of vLLM, metrics with {_METRIC}_total and traffic that cgplan saved will do as well.",
    )


def _histogram(rows: Iterable[tuple[str, _HistogramRow]], path: Path, plan: Plan) -> Traffic:
    steps = StepCounts(plan)
    for _, row in rows:
        steps.add(**dict(row))
    return Traffic.of(steps.counts, f"{path.name}: histogram", steps.notes())


def _check_shape(shape: StepShape, path: Path, plan: Plan) -> None:
    """Raises TrafficError for a shape that no step under this plan can have. A runner counts any number of adapters
    beyond max_loras as max_loras + 1.
    """
    most = plan.max_loras or 0
    if shape.uniform and shape.num_tokens != plan.query_len * shape.num_reqs:
        raise TrafficError(
            f"{path}: a uniform batch has {shape.num_tokens} tokens for {shape.num_reqs} requests, "
            f"but the query length is {plan.query_len}",
            remedy="Set speculative.num_speculative_tokens as it was where the traffic was recorded.",
        )
    if shape.num_active_loras > (most and most + 1):
        raise TrafficError(
            f"{path}: a batch has {shape.num_active_loras} active LoRA adapters, the configuration allows {most}",
            remedy="Raise lora.max_loras." if most else _ADD_LORA,
        )


def _trace(rows: Iterable[tuple[str, Any]], path: Path, plan: Plan) -> RequestTrace:
    requests: list[Request] = []
    start, empty = math.nan, 0
    for where, row in rows:
        if row.adapter is not None and plan.max_loras is None:
            raise TrafficError(
                f"{where}: the request uses an adapter, but the configuration has none", remedy=_ADD_LORA
            )
        start = row.arrival if math.isnan(start) else start
        if row.context_tokens:
            adapter = NO_ADAPTER if row.adapter is None else row.adapter
            requests.append(Request(row.arrival - start, row.context_tokens, row.generated_tokens, adapter))
        else:
            empty += 1
    notes = (f"{empty} requests without a prompt were left out",) if empty else ()
    return RequestTrace(requests, f"{path.name}: {len(requests)} requests", notes)


def log_traffic(text: str, path: Path, plan: Plan) -> Traffic:
    """Traffic from all tables of a log.

    vLLM empties its counts after each table (``CUDAGraphLogging.log`` in vllm/compilation/cuda_graph.py), so the
    tables are added up. A row does not say whether its batch was uniform decode. Where the server's mode keeps FULL
    graphs for uniform decode (FULL_DECODE_ONLY, FULL_AND_PIECEWISE), batches that ran FULL were uniform, and others
    were not, up to the largest capture size. Elsewhere a batch is taken to be uniform if it could be.

    Args:
        text, path: The log; ``path`` names it in messages.
        plan: Informs the guesses.

    Raises:
        TrafficError: a row is cut off, or holds something else than numbers and a runtime mode.
    """
    steps = StepCounts(plan)
    mode: CUDAGraphMode | None = None  # of the server, as its largest size; None where the log does not tell it
    tables = largest = told = odd = 0
    for number, line in enumerate(map(str.rstrip, text.split("\n")), start=1):
        if _HEADER.search(line):
            tables += 1
        elif found := _MODE.search(line):
            mode = CUDAGraphMode.__members__.get(found[1])
        elif found := _SIZES.search(line):
            largest = max(map(int, re.findall(r"\d+", found[1])), default=0)
        elif tables and (found := _ROW.search(line)) and found[1].strip("|- "):  # not the rule below the header
            row, uniform = _log_row(found[1], f"{path}:{number}"), None
            if mode is not None and mode.separate_routine():
                if row.ran_as is CUDAGraphMode.FULL:
                    uniform = row.num_tokens % plan.query_len == 0
                    odd += 0 if uniform else row.count
                elif row.num_tokens <= largest:
                    uniform = False
            told += row.count * (uniform is not None)
            steps.add(row.num_tokens, row.count, uniform=uniform)
    notes = [f"{tables} tables were added up; vLLM empties its counts after each"] if tables > 1 else []
    if told:
        notes.append(f"the runtime mode tells uniform decode from mixed batches for {told} steps")
    if odd:
        notes.append(
            f"{odd} steps ran as uniform decode with a number of tokens that is no multiple of the query length "
            f"{plan.query_len}, and count as mixed; is speculative.num_speculative_tokens that of the server?"
        )
    return Traffic.of(steps.counts, f"{path.name}: vLLM log", [*notes, *steps.notes()])


def _log_row(text: str, where: str) -> _LogRow:
    cells = [cell.strip() for cell in text.removesuffix("|").split("|")]
    if len(cells) != len(COLUMNS) or not text.endswith("|"):
        raise TrafficError(
            f"{where}: {len(cells)} cells where the table has {len(COLUMNS)} columns",
            remedy="The line may have been cut off, or two processes wrote into it; correct or remove it.",
        )
    return VLLM_LOG.read(dict(zip(COLUMNS, cells, strict=True)), where)
