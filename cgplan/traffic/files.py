"""Traffic from files, whose text tells their form.

Histograms, logs and saved traffic hold steps; traces hold requests for ``simulate``. Rows of
CSV or JSON lines are typed; errors name file, line, column and the cell.
"""

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from http.client import HTTPException
from itertools import chain, takewhile
from operator import le
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError, create_model

from cgplan.config import Dim, load
from cgplan.config.schema import Record
from cgplan.errors import CgplanError, TrafficError, did_you_mean
from cgplan.modes import RUNTIME_MODES, CUDAGraphMode
from cgplan.planning import Plan
from cgplan.traffic.histogram import MOST_BATCHED_TOKENS, SizeCounts, StepShape, Traffic
from cgplan.traffic.simulation import NO_ADAPTER, Request, RequestTrace, poisson_arrivals
from cgplan.units import counted, listed

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
        matched = {}
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
            allowed = self.row.model_fields[own].description or ""
            raise self.error(
                f"{where}: {column} is {short(wrong['input'])}: {problem}",
                remedy=f"{self.row_remedy} {allowed}".rstrip(),
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
        found = {}
        unknown = []
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
            form = " (did you mean {!r}?)"
            if name.lower().endswith("seconds"):
                form = ": times are in {}: convert them, rename the column"
            near = did_you_mean(name.lower(), absent, "{}")
            hint = near and form.format(absent[near])
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
    fields = {figure: kind}
    sizes = {f"size_{index}": (Size, ...) for index in range(len(names))}
    row = create_model(
        "_Row",
        __base__=Record,
        **sizes | fields,
    )
    form = Form(
        "of `dims` (requests: `cgplan init TARGET` without --call) the table",
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


def kind_of(text: str) -> Any:
    """Of what cgplan saved as JSON; else None."""
    found = None
    if first_line(text).lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            found = json.loads(text).get("kind")
    return found


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
            entries = [
                (f"{where}, entry {number}", entry)
                for number, entry in enumerate(document, start=1)
            ]
        for where, entry in entries:
            if not isinstance(entry, dict):
                raise error(f"{where}: {short(entry)} is not an object", remedy=remedy)
            yield where, tuple(entry), list(entry.values())


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MORE_LORAS = (
    "Plan with a `lora` section, such as `lora: {max_loras: 4}`, or a larger number; with --vllm "
    "by --enable-lora --max-loras 4: vLLM ignores the second without the first."
)
_TIMEOUT_SECONDS = 5.0
_MOST_US = 1e17  # the year 5138
_LEAST_RATE = 1e-6  # requests a second
_CLOCK_US = 1e14  # arrivals that far from 0 are dates, or seconds since 1970
# Of the tables that vLLM logs with ``--cudagraph-metrics``.
COLUMNS = ("Unpadded Tokens", "Padded Tokens", "Num Paddings", "Runtime Mode", "Count")
_HEADER = re.compile(r"\|\s*" + r"\s*\|\s*".join(COLUMNS) + r"\s*\|")
# a row has 5 cells; one that was cut off begins with a number
_ROW = re.compile(r"\|((?:[^|]*\|){5}|\s*-?\d+\s*(?:\|.*)?)$")
_MODE = re.compile(r"- Mode: *(?:CUDAGraphMode\.)?(\w+)\s*$")
_SIZES = re.compile(r"- Capture sizes: *\[([\d, ]*)\]\s*$")
FEW_STEPS = 100  # below which they need not be typical
NO_SHAPES = "no input of a fixed size"
METRIC = "cgplan_batches"  # of a runner's metrics, in Prometheus' text format
_REPLAYS = re.compile(r'^cgplan_replays_total\{.*?num_tokens="(\d+)"', re.MULTILINE)
_INFO = re.compile(r"^cgplan_info\{.*", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def _seconds(value: object) -> float:
    """Of a date and time, UTC unless it says otherwise, or a number."""
    text = str(value)
    if ":" not in text:
        with suppress(ValueError):
            number = float(text)
            if number <= _MOST_US / 1e6:
                return number
    try:
        # of the 7 digits of Azure's traces the last, 100 ns, is cut off
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            "neither a date and time, such as 2023-11-16 18:17:03.979960, nor a number of seconds; "
            "divide milliseconds by 1000"
        ) from None
    zoned = moment.replace(tzinfo=moment.tzinfo or UTC)
    return (zoned - _EPOCH).total_seconds()


class _StepRow(Record):
    num_tokens: Size
    count: Whole
    num_reqs: Whole | None = None
    uniform: bool | None = None
    num_active_loras: Whole = 0


class _MetricRow(_StepRow):
    runner: str = ""


class _RequestRow(Record):
    arrival: Annotated[float, Field(ge=0, le=_MOST_US / 1e3)]  # in the unit of its form
    context_tokens: Whole
    generated_tokens: Whole
    adapter: Whole | None = Field(default=None, description="Number adapters 1 to N, in any order.")
    cached_tokens: Whole = 0
    hash_ids: tuple[int, ...] = ()


class _DatedRow(_RequestRow):
    arrival: Annotated[
        float, Field(ge=-_MOST_US / 1e6, le=_MOST_US / 1e6), BeforeValidator(_seconds)
    ]


class _ChatRow(_RequestRow):
    chat_id: Any


class _RunRow(Record):
    """A run of a serving benchmark. ``request_rate`` is a number, "inf" or Infinity, or "trace"."""

    input_lens: tuple[Whole, ...]
    output_lens: tuple[Whole, ...]
    start_times: tuple[Annotated[float, Field(ge=0, le=_MOST_US / 1e6)], ...] = ()
    request_rate: Any = None
    max_concurrency: Any = None
    request_throughput: Annotated[float, Field(ge=_LEAST_RATE, allow_inf_nan=False)]


class _Message(BaseModel):
    value: str


class _ConversationRow(Record):
    conversations: tuple[_Message, ...]


class _LogRow(Record):
    num_tokens: Size
    padded: Whole
    paddings: Whole
    ran_as: RuntimeMode
    count: Whole
    mode: str | None = None  # of the server
    largest: Whole = 0  # size of the server


@dataclass(frozen=True, eq=False)
class RequestForm(Form[R]):
    microseconds: float = 1e6  # of the unit of arrivals
    block: int = 512  # tokens of a hash id
    fails: bool = False  # requests without output have failed


HISTOGRAM = Form("a histogram", _StepRow)
_MOONCAKE = ("timestamp", "input_length", "output_length")
REQUESTS: tuple[RequestForm[Any], ...] = (
    # AzurePublicDataset, AzureLLMInferenceDataset2023.md and 2024.md.
    RequestForm(
        "a request trace",
        _DatedRow,
        ("TIMESTAMP", "ContextTokens", "GeneratedTokens", "Adapter"),
    ),
    # HPMLL/BurstGPT, README.md of release v1.2.
    RequestForm(
        "BurstGPT's trace",
        _DatedRow,
        ("Timestamp", "Request tokens", "Response tokens"),
        unused=("Model", "Session ID", "Elapsed time", "Total tokens", "Log Type"),
        fails=True,
    ),
    # kvcache-ai/Mooncake, FAST25-release/README.md.
    RequestForm("a Mooncake trace", _RequestRow, _MOONCAKE, microseconds=1e3),
    # alibaba-edu/qwen-bailian-usagetraces-anon, README.md.
    RequestForm(
        "a Bailian trace",
        _ChatRow,
        _MOONCAKE,
        unused=("parent_chat_id", "type", "turn"),
        block=16,
    ),
    # SGLang 0.5.23, --export-metrics-to-file: srt/observability/request_metrics_exporter.py.
    RequestForm(
        "SGLang's log of requests",
        _RequestRow,
        ("request_received_ts", "prompt_tokens", "completion_tokens"),
        unused=None,
        fails=True,
    ),
)
# vLLM 0.33.0, vllm/benchmarks/serve.py; SGLang 0.5.23, sglang/benchmark/serving.py, which has no
# start_times.
BENCH = RequestForm(
    "a benchmark's result",
    _RunRow,
    remedy="Run `vllm bench serve` with --save-result --save-detailed, SGLang's bench_serving with "
    "--output-details.",
    unused=None,
    microseconds=1.0,
    fails=True,
)
SHAREGPT = RequestForm("a ShareGPT conversation", _ConversationRow, unused=None, microseconds=1.0)
FORMS: tuple[Form[Any], ...] = (HISTOGRAM, *REQUESTS, BENCH)
METRICS = Form("metrics of a runner", _MetricRow, unused=None)
VLLM_LOG = Form("a table of CUDA graph statistics", _LogRow, COLUMNS)


def read_traffic(
    path: str | Path,
    plan: Plan,
    *,
    speedup: float = 1.0,
    request_rate: float | None = None,
) -> Traffic | RequestTrace:
    """Steps or requests from a file, whose content tells its form: docs/planning.md, Traffic.

    Notes say which columns are guessed or ignored, and how many tokens of prompts were cached.

    Args:
        path: UTF-8 text, or an address that begins with http. Read once: it may be a pipe.
        plan: Its bounds of a batch inform the guesses.
        speedup: How many times as fast as recorded requests come.
        request_rate: Requests a second of ShareGPT's conversations.

    Raises:
        TrafficError: the file cannot be read, has none of these forms, holds no batch, or has a
            wrong row.
    """
    text, path = _read(path)
    found = _traffic_of(text, path, plan, request_rate)
    if isinstance(found, RequestTrace):
        return found.hurried(speedup)
    if speedup != 1:
        raise TrafficError(
            f"{path} holds counts of steps, which cannot be sped up",
            remedy="Leave the speedup out, or give a request trace.",
        )
    doubts = _doubts(path, plan, found.total, found.inputs)
    found = found.changed(warnings=(*found.warnings, *doubts))
    seqs, tokens = plan.max_num_seqs, plan.max_num_batched_tokens
    beyond = 0.0
    loras = plan.max_loras or 0
    most_loras = loras + 1 if loras else 0  # a runner counts more of them as one more
    for shape, weight in found.histogram:
        if shape.uniform and shape.num_tokens != plan.query_len * shape.num_reqs:
            raise TrafficError(
                f"{path}: a uniform batch has {shape.num_tokens} tokens for {shape.num_reqs} "
                f"requests, but the query length is {plan.query_len}",
                remedy="Set speculative.num_speculative_tokens as it was where the traffic was "
                "recorded.",
            )
        if shape.num_active_loras > most_loras:
            raise TrafficError(
                f"{path}: a batch has {shape.num_active_loras} active LoRA adapters, the "
                f"configuration allows {loras}",
                remedy=_MORE_LORAS,
            )
        if shape.num_tokens > tokens or shape.num_reqs > seqs:
            beyond += weight
    if not beyond:
        return found
    note = (
        f"{beyond / found.total:.1%} of the steps are larger than this scheduler makes them "
        f"(max_num_seqs {seqs}, max_num_batched_tokens {tokens})"
    )
    return found.changed(notes=(*found.notes, note))


def read_sizes(path: str | Path, dims: Sequence[Dim], plan: Plan) -> SizeCounts:
    """Batches from CSV or JSON lines with a column for each of ``dims``: docs/planning.md, Several
    sizes. The column ``count`` is called ``weight`` if a dimension is named count.

    Raises:
        TrafficError: as ``read_traffic``, or no batch is within the max of its dimensions.
    """
    text, path = _read(path)
    most = {dim.name: dim.max for dim in dims}
    names = tuple(most)
    column = "weight" if "count" in most else "count"
    counts: Counter[tuple[int, ...]] = Counter()
    beyond = 0
    rows: Iterable[tuple[tuple[int, ...], Any]]
    inputs = None
    warnings: tuple[str, ...] = ()
    if METRIC in text or '"histogram"' in text:
        if len(names) > 1:
            raise TrafficError(
                f"{path} counts batches by one size, and `dims` has {', '.join(names)}",
                remedy=f"Give CSV with the columns {', '.join(names)} and {column}, or capture a "
                f"runner for each {names[1]}, with metrics of its own.",
            )
        seen = _traffic_of(text, path, plan, None)
        assert isinstance(seen, Traffic)
        rows = [((shape.num_tokens,), round(weight)) for shape, weight in seen.histogram]
        inputs = seen.inputs
        warnings = seen.warnings
    else:
        rows = sized_rows(text, path, names, TrafficError, column, (Whole, 1))
    for sizes, count in rows:
        if not all(map(le, sizes, most.values())):
            beyond += count
        elif count:
            counts[sizes] += count
    if not counts:
        raise TrafficError(
            f"{path}: no batch up to {most} with a count above 0",
            remedy="Give traffic with such a batch, or raise max in `dims`.",
        )
    warnings += tuple(_doubts(path, plan, beyond + counts.total(), inputs))
    return SizeCounts(names, dict(sorted(counts.items())), beyond, path.name, warnings)


def _read(path: str | Path) -> tuple[str, Path]:
    if str(path).startswith(("http://", "https://")):
        from urllib.request import urlopen

        try:
            with urlopen(str(path), timeout=_TIMEOUT_SECONDS) as answer:
                text = str(answer.read(), "utf-8")
            if not text.strip():
                raise ValueError("the answer is empty")
        except (OSError, ValueError, HTTPException) as error:
            raise TrafficError(
                f"{path} cannot be read: {error}",
                remedy="Give the address of a runner's metrics, such as "
                "http://localhost:8000/metrics, or a file of them.",
            ) from None
    else:
        text = load.read_text(
            path,
            TrafficError,
            "Give a file with traffic in it: a histogram, a request trace, or a log; "
            "or an address with http://.",
        )
    kind = kind_of(text)
    if kind not in (None, "traffic"):
        raise TrafficError(
            f"{path} is a saved {kind}, not traffic",
            remedy="Give requests, counts of steps, or metrics of a runner; a bench is for "
            "--step-times, a capture for --costs.",
        )
    path = Path(str(path).rpartition("://")[2])
    return text, Path("a pipe") if path.is_fifo() else path


def _traffic_of(
    text: str,
    path: Path,
    plan: Plan,
    request_rate: float | None,
) -> Traffic | RequestTrace:
    first = first_line(text).lstrip()
    if first.startswith("{"):
        if kind_of(text):
            return _saved(text, path)
    elif _HEADER.search(text):
        return log_traffic(text, path, plan)
    elif METRIC in text:
        return _metrics(text, path, plan)
    elif first.startswith("[") and '"conversations"' in text:
        return _conversations(text, path, plan, request_rate)
    _, names, _ = next(raw_rows(text, path, TrafficError))
    given = set(map(str.lower, names))
    known = {form: len(given.intersection(map(str.lower, form.columns))) for form in FORMS}
    form = max(FORMS, key=known.__getitem__)
    if not known[form]:
        raise _unknown_form(text, first, path)
    ignored: dict[str, None] = {}
    rows = form.read(raw_rows(text, path, TrafficError), ignored)
    if isinstance(form, RequestForm):
        said: list[str] = []
        requests = _run_requests(rows, said) if form is BENCH else rows
        trace = _requests(requests, form, path, plan, said)
        return trace._replace(notes=(*_note_on(ignored), *trace.notes))
    counts, guesses = _counted(rows, plan)
    return Traffic.of(counts, f"{path.name}: histogram", [*guesses, *_note_on(ignored)])


def _doubts(path: Path, plan: Plan, steps: float, inputs: str | None) -> Iterator[str]:
    declared = ", ".join(plan.fixed_inputs)
    if inputs not in (None, declared):
        yield (
            f"the runner of {path.name} takes {inputs or NO_SHAPES}, the configuration declares "
            f"{declared or NO_SHAPES}: take traffic and runner.config of one runner"
        )
    if steps < FEW_STEPS:
        yield (
            f"{path.name} has {counted(round(steps), 'step')}: let the server run for a typical "
            "hour, and plan again"
        )


def _counted(
    rows: Iterable[tuple[str, _StepRow]], plan: Plan
) -> tuple[Counter[StepShape], list[str]]:
    q = plan.query_len
    most = plan.max_num_seqs
    counts = Counter[StepShape]()
    guessed = 0
    for _, row in rows:
        size = row.num_tokens
        uniform = row.uniform
        reqs = row.num_reqs
        if uniform is None:
            uniform = size == q * reqs if reqs else size % q == 0 and size <= q * most
            guessed += row.count
        if reqs is None:
            reqs = max(size // q, 1) if uniform else min(size, most)
        counts[StepShape(size, reqs, uniform, row.num_active_loras)] += row.count
    notes = []
    if guessed:
        notes.append(
            f"uniform decode was guessed for {guessed:,} steps: a batch counts as uniform if its "
            "tokens are a multiple of the query length, for at most max_num_seqs requests (or "
            "pictures: raise it)"
        )
    return counts, notes


def _note_on(ignored: Iterable[str]) -> Iterator[str]:
    if ignored:
        yield f"columns that nothing needs were ignored: {', '.join(ignored)}"


def _unknown_form(text: str, first: str, path: Path) -> TrafficError:
    if LOG_LINE.search(text):
        return TrafficError(
            f"{path}: the log holds no table of CUDA graph statistics",
            remedy="Run vLLM with --cudagraph-metrics and with its log of statistics on; then it "
            f"writes tables that begin with | {' | '.join(COLUMNS)} |.",
        )
    if "# TYPE " in text:
        return TrafficError(
            f"{path}: the metrics count no batches ({METRIC}_total)",
            remedy="Give those of a runner that has run some; of an engine, its log or requests.",
        )
    described = "; ".join(form.described for form in FORMS)
    found = "is YAML, not traffic"
    if path.suffix not in (".yaml", ".yml"):
        found = f"has no known column in {short(first)}"
    return TrafficError(
        f"{path} {found}",
        remedy=f"{described}; ShareGPT's conversations, vLLM's logs, metrics with "
        f"{METRIC}_total and what cgplan saved will do, too.",
    )


def _saved(text: str, path: Path) -> Traffic:
    try:
        return Traffic.from_json(text)
    except TrafficError as error:
        error.message = f"{path}: {error.message}"
        raise


def log_traffic(text: str, path: Path, plan: Plan) -> Traffic:
    """Traffic from all tables of a log of vLLM, which empties its counts after each
    (``CUDAGraphLogging.log`` in vllm/compilation/cuda_graph.py).

    A row does not say whether its batch was uniform decode. If the server's mode keeps FULL graphs
    for uniform decode, batches that ran FULL were, and others up to the largest capture size were
    not. Else a batch is taken to be uniform if it could. Graphs of both kinds tell the mode, too.
    """
    rows = list(VLLM_LOG.read(_log_rows(text, path)))
    unnamed = {row.ran_as for _, row in rows if not row.mode}
    has_both = unnamed >= {CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE}
    warnings = []
    if unnamed and not has_both:
        warnings.append(
            f"{path.name} has tables without the lines `- Mode:` and `- Capture sizes:` above "
            "them, so decode was guessed: give the log with these lines"
        )
    steps = []
    odd = 0
    for where, row in rows:
        uniform = None
        mode = CUDAGraphMode.__members__.get(row.mode or "FULL_AND_PIECEWISE" * has_both)
        if mode is not None and mode.separate_routine():
            if row.ran_as is CUDAGraphMode.FULL:
                uniform = row.num_tokens % plan.query_len == 0
                odd += 0 if uniform else row.count
            elif row.num_tokens <= row.largest or row.ran_as is CUDAGraphMode.PIECEWISE:
                uniform = False
        step = _StepRow(num_tokens=row.num_tokens, count=row.count, uniform=uniform)
        steps.append((where, step))
    notes = []
    if odd:
        notes.append(
            f"{odd} steps ran as uniform decode with a number of tokens that is no multiple of "
            f"the query length {plan.query_len}, and count as mixed; is "
            "speculative.num_speculative_tokens that of the server?"
        )
    counts, guesses = _counted(steps, plan)
    return Traffic.of(counts, f"{path.name}: vLLM log", [*notes, *guesses], warnings)


def _metrics(text: str, path: Path, plan: Plan) -> Traffic:
    rows = list(METRICS.read(_metric_rows(text, path)))
    runners = {row.runner for _, row in rows}
    declared = ", ".join(plan.fixed_inputs)
    infos = [dict(_LABEL.findall(line)) for line in _INFO.findall(text)]
    if len(runners) > 1:
        own = {info["runner"] for info in infos if info["inputs"] == declared} & runners
        read = "cat" if path.is_file() else "curl -s"
        raise TrafficError(
            f"{path} has batches of several runners: {', '.join(sorted(runners))}",
            remedy=f"Give the lines of one of them: {read} {path} | grep "
            f"""'runner="{max(own or runners)}"' > metrics.txt, and --traffic metrics.txt""",
        )
    counts, guesses = _counted(rows, plan)
    sizes = {descriptor.num_tokens for _, descriptor in plan.keys}
    others = sorted(set(map(int, _REPLAYS.findall(text))) - sizes)
    warnings = []
    inputs = next((info["inputs"] for info in infos if info["runner"] in runners), None)
    if others:
        warnings.append(
            f"the runner of {path.name} has graphs of {listed(others)}, which the configuration "
            "does not list: take runner.config of that runner, unless you changed the sizes since"
        )
    source = f"{path.name}: metrics of a runner"
    return Traffic.of(counts, source, guesses, warnings, inputs=inputs)


def _metric_rows(text: str, path: Path) -> Iterator[RawRow]:
    for number, line in enumerate(text.split("\n"), start=1):
        name, _, rest = line.partition("{")
        if name == f"{METRIC}_total":
            labels, _, value = rest.rpartition("}")
            cells = {**dict(_LABEL.findall(labels)), "count": None}
            with suppress(ValueError, IndexError):
                cells["count"] = float(value.split()[0])  # 1e+06, say; a time may follow
            yield f"{path}:{number}", tuple(cells), list(cells.values())


def _log_rows(text: str, path: Path) -> Iterator[RawRow]:
    in_table = False
    mode = ""
    largest = 0
    for number, line in enumerate(map(str.rstrip, text.split("\n")), start=1):
        if _HEADER.search(line):
            in_table = True
        elif found := _MODE.search(line):
            mode = found[1]
        elif found := _SIZES.search(line):
            largest = max(map(int, re.findall(r"\d+", found[1])), default=0)
        elif in_table and (found := _ROW.search(line)):
            cells = [cell.strip() for cell in found[1].removesuffix("|").split("|")]
            if not "".join(cells).strip("-"):  # the rule below the header
                continue
            where = f"{path}:{number}"
            if len(cells) != len(COLUMNS) or not found[1].endswith("|"):
                raise TrafficError(
                    f"{where}: {len(cells)} cells where the table has {len(COLUMNS)} columns",
                    remedy="The line may have been cut off, or two processes wrote into it; "
                    "correct or remove it.",
                )
            yield where, (*COLUMNS, "mode", "largest"), (*cells, mode, largest)


def _requests(
    rows: Iterable[tuple[str, _RequestRow]],
    form: RequestForm[Any],
    path: Path,
    plan: Plan,
    notes: list[str],
) -> RequestTrace:
    requests = []
    brought: set[int] = set()  # blocks of earlier prompts
    start = math.nan
    empty = failed = prompts = cached = 0
    for where, row in rows:
        if row.adapter is not None and plan.max_loras is None:
            raise TrafficError(
                f"{where}: the request uses an adapter, but the configuration has none",
                remedy=_MORE_LORAS,
            )
        arrival = row.arrival * form.microseconds
        if math.isnan(start):
            start = arrival
        prompt, generated = row.context_tokens, row.generated_tokens
        if not prompt:
            empty += 1
            continue
        if form.fails and not generated:
            failed += 1
            continue
        held = row.cached_tokens
        if row.hash_ids:
            known = list(takewhile(brought.__contains__, row.hash_ids))
            held = max(held, form.block * len(known))
            brought.update(row.hash_ids)
        held = min(held, prompt - 1)
        prompts += prompt
        cached += held
        adapter = NO_ADAPTER if row.adapter is None else row.adapter
        requests.append(Request(arrival - start, prompt - held, generated, adapter))
    if empty:
        notes.append(f"{empty} requests without a prompt were left out")
    if failed:
        notes.append(f"{failed} requests without output were left out: they failed")
    if cached:
        how = "by the file"
        if brought:
            how = f"an unbounded cache of blocks of {form.block} tokens, in the file's order"
        notes.append(
            f"{cached / prompts:.1%} of the prompts' {prompts:,} tokens were cached, so not "
            f"prefilled: {how}"
        )
    warnings: Iterable[str] = ()
    if not abs(start) > _CLOCK_US:
        warnings = _unit_note(requests, is_in_milliseconds=form.microseconds == 1e3)
    source = f"{path.name}: {len(requests)} requests"
    return RequestTrace(requests, source, tuple(notes), bool(cached), tuple(warnings))


def _unit_note(requests: Sequence[Request], *, is_in_milliseconds: bool) -> Iterator[str]:
    """A warning if arrivals in the other unit make a plausible load, and in this one do not."""
    arrivals = [request.arrival_us for request in requests]
    span = max(arrivals, default=0.0) - min(arrivals, default=0.0)
    if len(requests) < 8 or not span:
        return
    rate = (len(requests) - 1) / span * 1e6
    total = sum(request.context_tokens + request.generated_tokens for request in requests)
    tokens = rate * total / len(requests)
    unit, other, factor = "seconds", "milliseconds", 1000.0
    if is_in_milliseconds:
        unit, other, factor = other, unit, 0.001
    if _is_plausible(rate, tokens) or not _is_plausible(rate * factor, tokens * factor):
        return
    yield (
        f"timestamps were taken for {unit}: {rate:.3g} requests and {tokens:.3g} tokens a second. "
        f"If they are {other}, it is {rate * factor:.3g} and {tokens * factor:.3g}: give "
        f"--speedup {factor:g}"
    )


def _is_plausible(request_rate: float, token_rate: float) -> bool:
    return 1 / 3600 <= request_rate <= 1e4 and 50 <= token_rate <= 1e6


def _run_requests(
    rows: Iterable[tuple[str, _RunRow]], notes: list[str]
) -> Iterator[tuple[str, _RequestRow]]:
    end = 0.0
    said = dict[str, None]()
    for where, run in rows:
        number = len(run.input_lens)
        rate = run.request_rate
        if {len(run.output_lens), len(run.start_times) or number} != {number}:
            raise TrafficError(
                f"{where}: {number} input_lens, {len(run.output_lens)} output_lens, "
                f"{len(run.start_times)} start_times",
                remedy="Give the file as the benchmark wrote it: an entry for each request.",
            )
        if run.start_times:
            first = min(run.start_times)
            times = [(time - first) * 1e6 for time in run.start_times]
        else:
            if not isinstance(rate, int | float) or not _LEAST_RATE <= rate < math.inf:
                is_paced = rate == "trace" or run.max_concurrency
                rate = run.request_throughput if is_paced else math.inf
            times = [0.0] * number
            how = "all at once"
            if rate != math.inf:
                times = poisson_arrivals(rate, number)
                how = f"as a Poisson process of {rate:.4g} a second"
            said[f"the benchmark has no start_times: requests come {how}"] = None
        for time, prompt, generated in zip(times, run.input_lens, run.output_lens, strict=True):
            yield where, _request_row(end + time, prompt, generated)
        end += max(times, default=0.0)
    notes.extend(said)


def _conversations(
    text: str,
    path: Path,
    plan: Plan,
    request_rate: float | None,
) -> RequestTrace:
    """Their first two messages, as in vLLM's and SGLang's benchmarks."""
    if request_rate is None or not 0 < request_rate < math.inf:
        raise TrafficError(
            f"{path}: conversations have no times",
            remedy="Add a whole `traffic` section, with traffic.request_rate in requests a second.",
        )
    raw = list(json_rows(text, path, TrafficError, "Give the file as it was published."))
    requests = []
    arrivals = poisson_arrivals(request_rate, len(raw))
    for (where, row), arrival in zip(SHAREGPT.read(raw), arrivals, strict=True):
        if len(row.conversations) >= 2:
            prompt, answer = (math.ceil(len(turn.value) / 4) for turn in row.conversations[:2])
            requests.append((where, _request_row(arrival, prompt, answer)))
    note = (
        "lengths are of the first two messages, 4 characters a token; Poisson arrivals, "
        f"{request_rate:g} a second"
    )
    return _requests(
        requests,
        SHAREGPT,
        path,
        plan,
        [note],
    )


def _request_row(arrival: float, prompt: int, generated: int) -> _RequestRow:
    return _RequestRow(arrival=arrival, context_tokens=prompt, generated_tokens=generated)
