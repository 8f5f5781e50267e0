"""Traffic from files of any form that people have it in, and requests made up from a few figures.

A file's text tells its form. Histograms, logs and saved traffic hold steps; traces hold requests,
which ``simulate`` turns into steps.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.client import HTTPException
from operator import le
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

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

if TYPE_CHECKING:
    import numpy as np

_P95_DEVIATIONS = 1.6448536269514722  # of a normal distribution
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ADD_LORA = "Add a `lora` section, such as `lora: {max_loras: 4}`."
# Of the tables that ``--cudagraph-metrics`` writes into a log of vLLM.
COLUMNS = ("Unpadded Tokens", "Padded Tokens", "Num Paddings", "Runtime Mode", "Count")
_HEADER = re.compile(r"\|\s*" + r"\s*\|\s*".join(COLUMNS) + r"\s*\|")
# The logger writes in front of a row, too. A row has 5 cells; one that was cut off begins with a
# number.
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


def _microseconds(value: object) -> float:
    """Of a timestamp: a date and time, UTC unless it says otherwise, or seconds."""
    try:
        return float(str(value)) * 1e6
    except ValueError:
        pass
    try:
        # takes the 7 digits of Azure's traces; the 7th, 100 ns, is cut off
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        raise ValueError(
            "neither a date and time, such as 2023-11-16 18:17:03.979960, nor a number of seconds"
        ) from None
    return (moment.replace(tzinfo=moment.tzinfo or UTC) - _EPOCH) / timedelta(microseconds=1)


_MOST_US = 1e17  # since 1970: the year 5138
_LEAST_RATE = 1e-6  # requests a second
_CLOCK_US = 1e14  # arrivals that far from 0 are dates, or seconds since 1970
Moment = Annotated[float, Field(ge=-_MOST_US, le=_MOST_US), BeforeValidator(_microseconds)]
Seconds = Annotated[float, Field(ge=0, le=_MOST_US / 1e6), AfterValidator(lambda s: s * 1e6)]
Milliseconds = Annotated[float, Field(ge=0, le=_MOST_US / 1e3), AfterValidator(lambda ms: ms * 1e3)]


class _RequestRow(Record):
    """A request; its arrival in microseconds."""

    unit: ClassVar[str] = "seconds"  # of an arrival that is a number
    block: ClassVar[int] = 512  # tokens of a hash id
    fails: ClassVar[bool] = False  # whether a request without output is one that failed
    arrival: float
    context_tokens: Whole
    generated_tokens: Whole
    adapter: Whole | None = None
    cached_tokens: Whole = 0
    hash_ids: tuple[int, ...] = ()


# AzurePublicDataset, AzureLLMInferenceDataset2023.md and 2024.md; the timestamps of 2024 have a
# zone, +00:00.
class _AzureRow(_RequestRow):
    arrival: Moment = Field(alias="TIMESTAMP")
    context_tokens: Whole = Field(alias="ContextTokens")
    generated_tokens: Whole = Field(alias="GeneratedTokens")
    adapter: Whole | None = Field(None, alias="Adapter")


# HPMLL/BurstGPT, README.md of release v1.2.
class _BurstRow(_RequestRow):
    fails: ClassVar[bool] = True
    arrival: Moment = Field(alias="Timestamp")
    context_tokens: Whole = Field(alias="Request tokens")
    generated_tokens: Whole = Field(alias="Response tokens")


# kvcache-ai/Mooncake, FAST25-release/README.md.
class _MooncakeRow(_RequestRow):
    unit: ClassVar[str] = "milliseconds"
    arrival: Milliseconds = Field(alias="timestamp")
    context_tokens: Whole = Field(alias="input_length")
    generated_tokens: Whole = Field(alias="output_length")


# alibaba-edu/qwen-bailian-usagetraces-anon, README.md.
class _BailianRow(_MooncakeRow):
    unit: ClassVar[str] = "seconds"
    block: ClassVar[int] = 16
    arrival: Seconds = Field(alias="timestamp")
    chat_id: Any


# SGLang 0.5.23, --export-metrics-to-file: srt/observability/request_metrics_exporter.py.
class _SGLangRow(_RequestRow):
    fails: ClassVar[bool] = True
    arrival: Seconds = Field(alias="request_received_ts")
    context_tokens: Whole = Field(alias="prompt_tokens")
    generated_tokens: Whole = Field(alias="completion_tokens")


# A run of `vllm bench serve` (vLLM 0.33.0, vllm/benchmarks/serve.py) or of SGLang's bench_serving
# (0.5.23, sglang/benchmark/serving.py, which has no start_times). An infinite rate is "inf" there
# and Infinity here, that of a trace is "trace". Failed requests have no output.
class _BenchRow(Record):
    input_lens: tuple[Whole, ...]
    output_lens: tuple[Whole, ...]
    start_times: tuple[Seconds, ...] = ()
    request_rate: Any = None
    max_concurrency: Any = None
    request_throughput: Annotated[float, Field(ge=_LEAST_RATE, allow_inf_nan=False)]


class _Turn(BaseModel):
    value: str


class _ShareGPTRow(Record):
    conversations: tuple[_Turn, ...]


class _LogRow(Record):
    num_tokens: Annotated[int, Field(alias="Unpadded Tokens", ge=1, le=MOST_BATCHED_TOKENS)]
    padded: Whole = Field(alias="Padded Tokens")
    paddings: Whole = Field(alias="Num Paddings")
    ran_as: RuntimeMode = Field(alias="Runtime Mode")
    count: Whole = Field(alias="Count")


HISTOGRAM = Form("a histogram", _HistogramRow)
TRACE = Form("a request trace", _AzureRow)
_BURST = ("Model", "Session ID", "Elapsed time", "Total tokens", "Log Type")
BURSTGPT = Form("BurstGPT's trace", _BurstRow, unused=_BURST)
MOONCAKE = Form("a Mooncake trace", _MooncakeRow)
BAILIAN = Form("a Bailian trace", _BailianRow, unused=("parent_chat_id", "type", "turn"))
SGLANG_LOG = Form("SGLang's log of requests", _SGLangRow, unused=None)
_DETAILS = (
    "Run `vllm bench serve` with --save-result --save-detailed, SGLang's bench_serving with "
    "--output-details."
)
BENCH = Form("a benchmark's result", _BenchRow, remedy=_DETAILS, unused=None)
SHAREGPT = Form("a ShareGPT conversation", _ShareGPTRow, unused=None)
FORMS: tuple[Form[Any], ...] = (HISTOGRAM, TRACE, BURSTGPT, MOONCAKE, BAILIAN, SGLANG_LOG, BENCH)
VLLM_LOG = Form("a table of CUDA graph statistics", _LogRow)


def read_traffic(
    path: str | Path, plan: Plan, *, speedup: float = 1.0, request_rate: float | None = None
) -> Traffic | RequestTrace:
    """Steps or requests from a file. Its content tells its form, not its name:

    - a histogram of steps, as CSV or as one JSON object a line: num_tokens, count, and where they
      are known num_reqs, uniform and num_active_loras;
    - a request trace, as either: Azure's (TIMESTAMP: a date and time, or seconds; ContextTokens,
      GeneratedTokens, and where it is known Adapter, a number, empty for none), BurstGPT's,
      Mooncake's (timestamp: milliseconds), Bailian's, or SGLang's log of requests;
    - results of vLLM's or SGLang's serving benchmark, with details;
    - ShareGPT's list of conversations;
    - a log of vLLM with its tables of CUDA graph statistics;
    - Traffic that was saved as JSON, or the statistics of a runner (``runner.stats.json()``);
    - metrics of one runner in Prometheus' text format (``runner.stats.prometheus()``).

    Notes of the traffic say how columns that a histogram lacks are guessed, which columns are
    ignored, and how many tokens of prompts were cached: blocks of ``hash_ids`` that an earlier row
    brought are not prefilled again.

    Args:
        path: UTF-8 text, or an address of it that begins with http. Read once: it may be a pipe.
        plan: Its bounds of a batch inform the guesses, and its adapters and query length are those
            of all steps.
        speedup: Requests come so many times as fast as they were recorded.
        request_rate: Requests a second of ShareGPT's conversations, which have no times.

    Raises:
        TrafficError: the file cannot be read, has none of these forms, holds no batch, or a row
            makes no sense.
    """
    text, path = _text_of(path), Path(str(path).rpartition("://")[2])
    found = _parsed(text, path, plan, request_rate)
    if isinstance(found, RequestTrace):
        return found.hurried(speedup)
    if speedup != 1:
        raise TrafficError(
            f"{path} holds counts of steps, which cannot be sped up",
            remedy="Leave the speedup out, or give a request trace.",
        )
    for shape, _ in found.histogram:
        _check_shape(shape, path, plan)
    seqs, tokens = plan.max_num_seqs, plan.max_num_batched_tokens
    beyond = sum(
        weight
        for shape, weight in found.histogram
        if shape.num_tokens > tokens or shape.num_reqs > seqs
    )
    if not beyond:
        return found
    note = (
        f"{beyond / found.total:.1%} of the steps are larger than this scheduler makes them "
        f"(max_num_seqs {seqs}, "
        f"max_num_batched_tokens {tokens})"
    )
    return found.model_copy(update={"notes": (*found.notes, note)})


def read_sizes(path: str | Path, dims: Sequence[Dim]) -> SizeCounts:
    """Batches from CSV, or one JSON object a line: a column for each of ``dims`` by its name, and
    perhaps ``count`` (``weight``, if a dimension is named count; absent: 1). Batches above a
    dimension's max are counted apart.

    Raises:
        TrafficError: the file cannot be read, has other columns, holds no batch up to max, or a row
            makes no sense.
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
    return SizeCounts(
        tuple(names), {sizes: n for sizes, n in sorted(counts.items()) if n}, beyond, path.name
    )


def synthetic_requests(made: TrafficConfig, plan: Plan) -> RequestTrace:
    """Requests made up from the `traffic` section of a configuration.

    They arrive as a Poisson process. Lengths are lognormal with the given median and 95th
    percentile, rounded, and kept between 1 and 2^20 tokens; those of a prompt and its output are
    independent. The share of requests with an adapter, and the adapters, are drawn independently;
    without LoRA in the plan none has one. Equal seeds give equal requests.
    """
    import numpy as np

    rng, number = np.random.default_rng(made.seed), made.num_requests

    def lengths(median: int, p95: int) -> list[int]:
        drawn = rng.lognormal(math.log(median), math.log(p95 / median) / _P95_DEVIATIONS, number)
        return [int(length) for length in np.clip(np.rint(drawn), 1, MOST_BATCHED_TOKENS)]

    arrivals = _poisson(made.request_rate, number, rng)
    prompts, outputs = (
        lengths(made.prompt_median, made.prompt_p95),
        lengths(made.output_median, made.output_p95),
    )
    adapters = [NO_ADAPTER] * number
    if made.lora_share > 0 and plan.max_loras:
        chosen = rng.integers(made.num_adapters or plan.max_loras, size=number)
        adapters = np.where(rng.random(number) < made.lora_share, chosen, NO_ADAPTER).tolist()
    requests = list(map(Request, arrivals, prompts, outputs, adapters))
    return RequestTrace(
        requests, f"synthetic: {number} requests, {made.request_rate:g} a second, seed {made.seed}"
    )


def _poisson(
    request_rate: float, number: int, rng: np.random.Generator | None = None
) -> list[float]:
    """Arrivals of a Poisson process, in microseconds."""
    # it takes longer to import than all of planning, which most commands do without
    import numpy as np

    times = (rng or np.random.default_rng(0)).exponential(1e6 / request_rate, number)
    return [float(time) for time in np.cumsum(times)]


def _text_of(path: str | Path) -> str:
    if str(path).startswith(("http://", "https://")):
        from urllib.request import urlopen

        try:
            with urlopen(str(path), timeout=_TIMEOUT_SECONDS) as answer:
                text = str(answer.read(), "utf-8")
        except (OSError, ValueError, HTTPException) as error:
            remedy = (
                "Give the address of a runner's metrics, such as http://localhost:8000/metrics, "
                "or a file of them."
            )
            raise TrafficError(f"{path} cannot be read: {error}", remedy=remedy) from None
    else:
        text = load.read_text(
            path, TrafficError, "Give a readable file: a histogram, a request trace, or a log."
        )
    if not text.strip():
        raise TrafficError(f"{path} is empty", remedy="Give a file with traffic in it.")
    return text


def _parsed(
    text: str, path: Path, plan: Plan, request_rate: float | None
) -> Traffic | RequestTrace:
    number, first, separator = first_line(text)
    read, ignored, notes = csv_rows, dict[str, None](), list[str]()
    if first.lstrip().startswith("{"):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):  # but perhaps one object a line
            document = {}
        if "kind" in document or "batches" in document:
            return _saved(text, document, path)
        if document and "\n" in text.strip():  # one object over several lines
            number, text = 1, (first := json.dumps(document))
        names, read = list(json_object(first, f"{path}:{number}")), jsonl_rows
    elif _HEADER.search(text):
        return log_traffic(text, path, plan)
    elif _METRIC in text:
        return _metrics(text, path, plan)
    elif first.lstrip().startswith("[") and '"conversations"' in text:
        return _trace(
            _conversations(text, path, request_rate, notes), _RequestRow, path, plan, notes
        )
    else:
        names = first.split(separator)
    given = {name.strip(' "\r').lower() for name in names}
    known = {form: given & {column.lower() for column in form.columns} for form in FORMS}
    form = max(known, key=lambda form: len(known[form]))
    if not known[form]:
        raise _unknown_form(text, first, path)
    rows = read(text, path, form, ignored)
    found: Traffic | RequestTrace
    if form is HISTOGRAM:
        found = _histogram(rows, path, plan)
    elif form is BENCH:
        found = _trace(_bench_requests(rows, notes), _BurstRow, path, plan, notes)
    else:
        found = _trace(rows, form.row, path, plan, notes)
    if not ignored:
        return found
    said = (*found.notes, f"columns that nothing needs were ignored: {', '.join(ignored)}")
    return (
        found._replace(notes=said)
        if isinstance(found, RequestTrace)
        else found.model_copy(update={"notes": said})
    )


def _saved(text: str, data: Mapping[str, Any], path: Path) -> Traffic:
    """Saved traffic, or the batches that a runner's statistics count (``runner.stats.json()``)."""
    try:
        if "kind" in data:
            return Traffic.from_json(text)
        traffic = Traffic.from_json(
            json.dumps({"histogram": data["batches"], "source": "statistics of a runner"})
        )
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
            remedy="Run vLLM with --cudagraph-metrics and with its log of statistics on; then it "
            "writes tables that "
            f"begin with | {' | '.join(COLUMNS)} |.",
        )
    return TrafficError(
        f"{path}: no known column in {short(first)}",
        remedy="; ".join(form.described for form in FORMS)
        + f"; ShareGPT's conversations, vLLM's logs, metrics with {_METRIC}_total and what cgplan "
        "saved will do, too.",
    )


def _histogram(rows: Iterable[tuple[str, _HistogramRow]], path: Path, plan: Plan) -> Traffic:
    steps = StepCounts(plan)
    for _, row in rows:
        steps.add(**dict(row))
    return Traffic.of(steps.counts, f"{path.name}: histogram", steps.notes())


def _check_shape(shape: StepShape, path: Path, plan: Plan) -> None:
    """Raises TrafficError for a shape that no step under this plan can have. A runner counts any
    number of adapters beyond max_loras as max_loras + 1.
    """
    most = plan.max_loras or 0
    if shape.uniform and shape.num_tokens != plan.query_len * shape.num_reqs:
        raise TrafficError(
            f"{path}: a uniform batch has {shape.num_tokens} tokens for {shape.num_reqs} requests, "
            f"but the query length is {plan.query_len}",
            remedy="Set speculative.num_speculative_tokens as it was where the traffic was "
            "recorded.",
        )
    if shape.num_active_loras > (most and most + 1):
        raise TrafficError(
            f"{path}: a batch has {shape.num_active_loras} active LoRA adapters, the "
            f"configuration allows {most}",
            remedy="Raise lora.max_loras." if most else _ADD_LORA,
        )


def _trace(
    rows: Iterable[tuple[str, Any]],
    form: type[_RequestRow],
    path: Path,
    plan: Plan,
    notes: list[str],
) -> RequestTrace:
    requests: list[Request] = []
    brought: set[int] = set()  # blocks of earlier prompts
    start, empty, failed, prompts, cached = math.nan, 0, 0, 0, 0
    for where, row in rows:
        if row.adapter is not None and plan.max_loras is None:
            raise TrafficError(
                f"{where}: the request uses an adapter, but the configuration has none",
                remedy=_ADD_LORA,
            )
        start = row.arrival if math.isnan(start) else start
        prompt, generated = row.context_tokens, row.generated_tokens
        if not prompt:
            empty += 1
        elif form.fails and not generated:
            failed += 1
        else:
            blocks = next(
                (i for i, block in enumerate(row.hash_ids) if block not in brought),
                len(row.hash_ids),
            )
            brought.update(row.hash_ids)
            held = min(max(row.cached_tokens, blocks * form.block), prompt - 1)
            prompts, cached = prompts + prompt, cached + held
            adapter = NO_ADAPTER if row.adapter is None else row.adapter
            requests.append(Request(row.arrival - start, prompt - held, generated, adapter))
    if empty:
        notes.append(f"{empty} requests without a prompt were left out")
    if failed:
        notes.append(f"{failed} requests without output were left out: they failed")
    if cached:
        how = (
            f"an unbounded cache of blocks of {form.block} tokens, in the file's order"
            if brought
            else "by the file"
        )
        notes.append(
            f"{cached / prompts:.1%} of the prompts' {prompts:,} tokens were cached, so not "
            f"prefilled: {how}"
        )
    if not abs(start) > _CLOCK_US:
        notes.extend(_unit_note(requests, form.unit))
    return RequestTrace(
        requests, f"{path.name}: {len(requests)} requests", tuple(notes), bool(cached)
    )


def _unit_note(requests: Sequence[Request], unit: str) -> Iterator[str]:
    """A note where arrivals in the other unit make a plausible load, and in this one do not: for a
    server or a fleet, 1 request an hour to 10,000 a second, and 50 tokens a second to 1 million.
    """
    arrivals = [request.arrival_us for request in requests]
    span = max(arrivals, default=0.0) - min(arrivals, default=0.0)
    if len(requests) < 8 or not span:
        return
    rate = (len(requests) - 1) / span * 1e6
    tokens = sum(request.context_tokens + request.generated_tokens for request in requests) / len(
        requests
    )
    other, factor = ("milliseconds", 1000.0) if unit == "seconds" else ("seconds", 0.001)
    taken, meant = (1 / 3600 <= r <= 1e4 and 50 <= r * tokens <= 1e6 for r in (rate, rate * factor))
    if meant and not taken:
        yield (
            f"timestamps were taken for {unit}: {rate:.3g} requests and {rate * tokens:.3g} "
            "tokens a second. If they "
            f"are {other}, it is {rate * factor:.3g} and {rate * tokens * factor:.3g}: give "
            f"--speedup {factor:g}"
        )


def _bench_requests(
    rows: Iterable[tuple[str, _BenchRow]], notes: list[str]
) -> Iterator[tuple[str, _RequestRow]]:
    """Requests of benchmark runs, one run after the other."""
    end, said = 0.0, dict[str, None]()
    for where, run in rows:
        number, rate = len(run.input_lens), run.request_rate
        if {len(run.output_lens), len(run.start_times) or number} != {number}:
            raise TrafficError(
                f"{where}: {number} input_lens, {len(run.output_lens)} output_lens, "
                f"{len(run.start_times)} start_times",
                remedy="Give the file as the benchmark wrote it: an entry for each request.",
            )
        if run.start_times:
            first = min(run.start_times)
            times = [time - first for time in run.start_times]
        else:
            if not (isinstance(rate, int | float) and _LEAST_RATE <= rate < math.inf):
                rate = (
                    run.request_throughput if rate == "trace" or run.max_concurrency else math.inf
                )
            times = [0.0] * number if rate == math.inf else _poisson(rate, number)
            how = (
                "all at once"
                if rate == math.inf
                else f"as a Poisson process of {rate:.4g} a second"
            )
            said[f"the benchmark has no start_times: requests come {how}"] = None
        for time, prompt, generated in zip(times, run.input_lens, run.output_lens, strict=True):
            yield (
                where,
                _RequestRow(arrival=end + time, context_tokens=prompt, generated_tokens=generated),
            )
        end += max(times, default=0.0)
    notes.extend(said)


def _conversations(
    text: str, path: Path, rate: float | None, notes: list[str]
) -> Iterator[tuple[str, _RequestRow]]:
    """The first two messages of each conversation, as vLLM's and SGLang's benchmarks take them."""
    if rate is None or not 0 < rate < math.inf:
        remedy = (
            "Give the configuration a whole `traffic` section: traffic.request_rate, requests a "
            "second, is taken."
        )
        raise TrafficError(f"{path}: conversations have no times", remedy=remedy)
    notes.append(
        f"lengths are of the first two messages, 4 characters a token; Poisson arrivals, {rate:g} "
        "a second"
    )
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TrafficError(
            f"{path}: not JSON: {error}", remedy="Give the file as it was published."
        ) from None
    for number, (entry, arrival) in enumerate(
        zip(entries, _poisson(rate, len(entries)), strict=True)
    ):
        where = f"{path}: conversation {number}"
        places = SHAREGPT.match(list(entry) if isinstance(entry, dict) else [], where)
        talk = SHAREGPT.read({name: entry[name] for _, name in places}, where).conversations
        if len(talk) >= 2:
            prompt, answer = (math.ceil(len(turn.value) / 4) for turn in talk[:2])
            yield (
                where,
                _RequestRow(arrival=arrival, context_tokens=prompt, generated_tokens=answer),
            )


def log_traffic(text: str, path: Path, plan: Plan) -> Traffic:
    """Traffic from all tables of a log.

    vLLM empties its counts after each table (``CUDAGraphLogging.log`` in
    vllm/compilation/cuda_graph.py), so the tables are added up. A row does not say whether its
    batch was uniform decode. Where the server's mode keeps FULL graphs for uniform decode
    (FULL_DECODE_ONLY, FULL_AND_PIECEWISE), batches that ran FULL were uniform, and others were not,
    up to the largest capture size. Elsewhere a batch is taken to be uniform if it could be.

    Args:
        text, path: The log; ``path`` names it in messages.
        plan: Informs the guesses.

    Raises:
        TrafficError: a row is cut off, or holds something else than numbers and a runtime mode.
    """
    steps = StepCounts(plan)
    # of the server, as its largest size; None where the log does not tell it
    mode: CUDAGraphMode | None = None
    tables = largest = told = odd = 0
    for number, line in enumerate(map(str.rstrip, text.split("\n")), start=1):
        if _HEADER.search(line):
            tables += 1
        elif found := _MODE.search(line):
            mode = CUDAGraphMode.__members__.get(found[1])
        elif found := _SIZES.search(line):
            largest = max(map(int, re.findall(r"\d+", found[1])), default=0)
        # not the rule below the header
        elif tables and (found := _ROW.search(line)) and found[1].strip("|- "):
            row, uniform = _log_row(found[1], f"{path}:{number}"), None
            if mode is not None and mode.separate_routine():
                if row.ran_as is CUDAGraphMode.FULL:
                    uniform = row.num_tokens % plan.query_len == 0
                    odd += 0 if uniform else row.count
                elif row.num_tokens <= largest:
                    uniform = False
            told += row.count * (uniform is not None)
            steps.add(row.num_tokens, row.count, uniform=uniform)
    notes = (
        [f"{tables} tables were added up; vLLM empties its counts after each"] if tables > 1 else []
    )
    if told:
        notes.append(f"the runtime mode tells uniform decode from mixed batches for {told} steps")
    if odd:
        notes.append(
            f"{odd} steps ran as uniform decode with a number of tokens that is no multiple of "
            "the query length "
            f"{plan.query_len}, and count as mixed; is speculative.num_speculative_tokens that of "
            "the server?"
        )
    return Traffic.of(steps.counts, f"{path.name}: vLLM log", [*notes, *steps.notes()])


def _log_row(text: str, where: str) -> _LogRow:
    cells = [cell.strip() for cell in text.removesuffix("|").split("|")]
    if len(cells) != len(COLUMNS) or not text.endswith("|"):
        raise TrafficError(
            f"{where}: {len(cells)} cells where the table has {len(COLUMNS)} columns",
            remedy="The line may have been cut off, or two processes wrote into it; correct or "
            "remove it.",
        )
    return VLLM_LOG.read(dict(zip(COLUMNS, cells, strict=True)), where)
