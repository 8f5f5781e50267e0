"""How long a step takes, by its runtime mode and the size that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import (
    AliasPath,
    BaseModel,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from cgplan.config import load
from cgplan.config.schema import TAPE, Record, first_problem
from cgplan.errors import CgplanError, StepTimeError
from cgplan.modes import CUDAGraphMode
from cgplan.planning.plan import Mode
from cgplan.planning.vllm_log import logged_steps, steps_before_start
from cgplan.traffic.files import (
    LOG_LINE,
    METRIC,
    Form,
    R,
    RawRow,
    RuntimeMode,
    Size,
    Whole,
    csv_rows,
    json_rows,
    kind_of,
    sized_rows,
)
from cgplan.traffic.histogram import MOST_BATCHED_TOKENS
from cgplan.units import counted, format_microseconds, grouped

# Microseconds by tokens that ran, by (runtime mode, LoRA case).
Points = Mapping[tuple[CUDAGraphMode, int], Mapping[int, float]]
Floats = npt.NDArray[np.float64]

Time = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Figure = Annotated[float, Field(ge=1e-9, le=1e12)]
EAGER = "eager"
_POINTS = "iteration_groups"  # the list of points in Dynamo's file
# vLLM measured 9 to 10% for batches without adapters in graphs with LoRA kernels (its pull 25914)
LORA_OVERHEAD = 0.1
# of the time that eager takes longer than FULL; 0.10 to 0.22 in DEFAULT_POINTS
PIECEWISE_SHARE = 0.25
# relative changes of a measured point
WORTH_A_NOTE = 0.05
WORTH_A_WARNING = 0.3
OF_ANOTHER_MODEL = (
    "sizes for another model: give --step-times, by `cgplan bench --output` or vLLM's log"
)
FEW = 16  # tokens
ABOUT = 1.01  # times a measured size is as good as measured
FAR = 200  # times as long, or as short
FULL_OF_DECODE = "FULL graphs were timed for uniform decode alone: mixed batches may take longer"
_OF_LOG = (
    "steps are medians of what vLLM's engine waited for one; its sizes and mode tell which "
    "graph ran it"
)

# One NVIDIA H200, the reference decoder in Qwen3-0.6B's shape (28 layers, so 29 PIECEWISE
# segments).
DEFAULT_POINTS: Points = {
    (CUDAGraphMode.NONE, 0): {
        1: 14500,
        256: 14400,
    },
    (CUDAGraphMode.PIECEWISE, 0): {
        1: 5850,
        8: 6100,
        64: 5900,
        256: 9500,
    },
    (CUDAGraphMode.FULL, 0): {
        1: 3400,
        8: 3350,
        64: 4740,
        256: 8930,
    },
}


class Timed(NamedTuple):
    mode: CUDAGraphMode
    tokens: int  # that ran
    microseconds: float
    is_mixed: bool = False  # or may be, where the mode is FULL
    is_prefill: bool = False
    case: int = 0  # of LoRA


class _TableRow(Record):
    mode: RuntimeMode
    num_tokens: Size
    microseconds: Time
    num_active_loras: Whole = 0

    @property
    def runs(self) -> list[Timed]:
        case = self.num_active_loras
        return [Timed(self.mode, self.num_tokens, self.microseconds, True, case=case)]


class _Server(BaseModel):
    disable_cuda_graph: bool = False
    backend: str = Field(
        default="full",
        validation_alias=AliasPath("cuda_graph_config", "decode", "backend"),
    )

    @property
    def mode(self) -> CUDAGraphMode:
        if self.disable_cuda_graph or self.backend == "disabled":
            return CUDAGraphMode.NONE
        if self.backend == "breakable":
            return CUDAGraphMode.PIECEWISE
        return CUDAGraphMode.FULL


class _ServedRow(Record):
    max_concurrency: Size
    request_rate: Annotated[Literal["inf"], BeforeValidator(str)]
    median_itl_ms: Figure
    spec_decode_num_drafts: None = None
    accept_length: None = None
    mode: RuntimeMode | None = None  # of ``--metadata mode=eager``
    server_info: _Server = _Server()

    @property
    def runs(self) -> list[Timed]:
        mode = self.server_info.mode if self.mode is None else self.mode
        return [Timed(mode, self.max_concurrency, self.median_itl_ms * 1e3)]


class _BatchRow(Record):
    run_name: str
    batch_size: Size
    input_len: Size
    prefill_latency: Figure
    median_decode_latency: Figure | None = None

    @property
    def runs(self) -> Iterator[Timed]:
        prompts = self.batch_size * self.input_len
        yield Timed(CUDAGraphMode.NONE, prompts, self.prefill_latency * 1e6, is_prefill=True)
        if self.median_decode_latency is not None:
            mode = CUDAGraphMode.NONE if self.run_name == EAGER else CUDAGraphMode.FULL
            yield Timed(mode, self.batch_size, self.median_decode_latency * 1e6)


class _ServedBatchRow(Record):
    run_name: str
    batch_size: Size
    output_len: Annotated[int, Field(ge=2)]
    output_throughput: Figure
    steady_state_output_throughput: Figure | None = None
    acc_length: Annotated[float, Field(le=1)]

    @property
    def runs(self) -> list[Timed]:
        mode = CUDAGraphMode.NONE if self.run_name == EAGER else CUDAGraphMode.FULL
        rate = self.steady_state_output_throughput or self.output_throughput
        return [Timed(mode, self.batch_size, self.batch_size / rate * 1e6)]


class _Query(BaseModel):
    query_len: Size


class _ForwardRow(Record):
    requests: tuple[_Query, ...] = Field(min_length=1)
    median_us: Figure

    @property
    def runs(self) -> list[Timed]:
        each = [request.query_len for request in self.requests]
        is_mixed = len(set(each)) > 1
        return [Timed(CUDAGraphMode.FULL, sum(each), self.median_us, is_mixed)]


class _Point(BaseModel):
    batch_size: Size
    total_prefill_tokens: Whole
    expected_cudagraph_mode: RuntimeMode
    expected_capture_size: Size | None = None


class _PointRow(Record):
    point: _Point
    wall_time: Figure

    @property
    def runs(self) -> list[Timed]:
        mode = self.point.expected_cudagraph_mode
        size = self.point.expected_capture_size or self.point.batch_size
        prompts = self.point.total_prefill_tokens
        if prompts and mode is not CUDAGraphMode.NONE:
            return []
        return [Timed(mode, prompts or size, self.wall_time * 1e6, is_prefill=prompts > 0)]


class _PassRow(Record):
    workload_kind: Literal["prefill", "decode"]
    batch_size: Size
    total_prefill_tokens: Whole
    latency_ms: Figure
    mode: RuntimeMode = CUDAGraphMode.FULL
    cell_id: str = ""

    @property
    def runs(self) -> list[Timed]:
        prompts = self.total_prefill_tokens
        mode = CUDAGraphMode.NONE if prompts else self.mode
        size = prompts or self.batch_size
        return [Timed(mode, size, self.latency_ms * 1e3, is_prefill=prompts > 0)]


@dataclass(frozen=True, eq=False)
class StepForm(Form[R]):
    """A form of step times; its rows have ``runs``.

    Attributes:
        mark: A column that no other form has.
        note: What its times are, and what is assumed.
    """

    error: type[CgplanError] = StepTimeError
    unused: tuple[str, ...] | None = None
    mark: str = ""
    note: str = ""


# Read in the sources of vLLM 0.33.0 (vllm/benchmarks), SGLang 0.5.23 (sglang/benchmark), ai-dynamo
# 1.6.1 (dynamo/vllm/instrumented_scheduler.py), aisimulate 0.13 (collector/fpm_forward/database.py)
MEASURED: tuple[StepForm[Any], ...] = (
    StepForm(
        "a result of vllm bench serve or SGLang's bench_serving",
        _ServedRow,
        row_remedy="Give results of --max-concurrency N and --request-rate inf, without "
        "speculation.",
        mark="median_itl_ms",
        note="a step of N requests was taken as the median time between tokens at "
        "--max-concurrency N, the server included, in a FULL graph of N tokens, or eagerly where "
        "--metadata mode=eager or SGLang's server_info says so",
    ),
    StepForm(
        "a result of vllm bench forward",
        _ForwardRow,
        mark="median_us",
        note="steps are forwards in FULL graphs, without sampling and work on the CPU",
    ),
    StepForm(
        "a result of SGLang's bench_one_batch",
        _BatchRow,
        mark="prefill_latency",
        note="decode was taken to run in FULL graphs of its batch, or eagerly where --run-name is "
        "eager",
    ),
    StepForm(
        "a result of SGLang's bench_one_batch_server",
        _ServedBatchRow,
        row_remedy="Give runs of --output-len 2 or more, without speculation.",
        mark="last_ttft",
        note="a step is its tokens by the output throughput, the server included, in a FULL graph, "
        "or eagerly where --run-name is eager",
    ),
    StepForm(
        "Dynamo's self-benchmark of vLLM",
        _PointRow,
        mark="wall_time",
        note="steps are the scheduler's wall times; the file tells the graph of each",
    ),
    StepForm(
        "a forward-pass table of AISimulate",
        _PassRow,
        mark="workload_kind",
        note="decode was taken to run in FULL graphs of its batch, where no column mode says "
        "otherwise",
    ),
)
# Columns of results without the batch of a step.
TIMELESS = {
    "avg_latency": "vllm bench latency",
    "tokens_per_second": "vllm bench throughput",
    "successful_requests": "SGLang's bench_offline_throughput",
}
REMEDY = (
    "Give the JSON file of `cgplan bench --output`, a CSV file with mode,num_tokens,microseconds, "
    "a log of vLLM with --enable-logging-iteration-details, or "
    f"{', '.join(form.name for form in MEASURED)}."
)
TABLE = StepForm(
    "a table of step times",
    _TableRow,
    remedy=REMEDY,
    unused=(),
    mark="microseconds",
)


class _Descriptor(BaseModel):
    num_tokens: Size
    sizes: tuple[Size, ...] = ()
    uniform: bool = False
    num_active_loras: Whole = 0


class _Timing(BaseModel):
    median: Time


class _BenchRecord(BaseModel):
    """Of a bench's record; this folder cannot import ``reports``."""

    num_tokens: Size
    mode: Mode
    descriptor: _Descriptor
    eager: _Timing
    graph: _Timing | None = None
    unsure: tuple[str, ...] = ()


class _Bench(BaseModel):
    kind: Literal["bench"]
    device: str = Field("", validation_alias=AliasPath("environment", "device"))
    backend: str = Field("", validation_alias=AliasPath("environment", "backend"))
    records: tuple[_BenchRecord, ...] = Field(min_length=1)

    @property
    def doubt(self) -> str:
        """As in ``StepTimes``."""
        doubts = []
        if self.backend == TAPE:
            doubts.append(f"of {TAPE}, not of a GPU")
        if any(record.unsure for record in self.records):
            doubts.append("not to be trusted")
        return f"by times {', '.join(doubts)}: " if doubts else ""


class TimeCurve(Record):
    """Measured points of one runtime mode and LoRA case.

    Attributes:
        points: (tokens that ran, microseconds), ascending in both: the least nondecreasing values
            that are not below the measured ones, because a larger batch does not take less time.
    """

    mode: Mode
    num_active_loras: int = 0
    points: tuple[tuple[Size, Time], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ascending(self) -> TimeCurve:
        for (size, time), (larger, longer) in pairwise(self.points):
            if size >= larger or time > longer:
                raise ValueError(f"{self.mode}: points do not ascend")
        return self

    def at(self, num_tokens: Floats) -> Floats:
        """Microseconds: linear between points, constant below them, with the last slope beyond."""
        sizes, values = np.array(self.points, dtype=np.float64).T
        beyond = np.maximum(num_tokens - sizes[-1], 0.0)
        between = np.interp(num_tokens, sizes, values)
        return np.asarray(between + self.last_slope * beyond)

    @property
    def last_slope(self) -> float:
        """Microseconds a token, from half the last size on, as neighbours differ by noise."""
        last, above = self.points[-1]
        first, below = self.points[0]
        for size, time in self.points[:-1]:
            if 2 * size <= last:
                first, below = size, time
        return (above - below) / max(last - first, 1)

    @property
    def name(self) -> str:
        name = _name(self.mode)
        if self.num_active_loras:
            name = f"{name} with {self.num_active_loras} adapters"
        return name


class StepTimes(Record, extra="ignore"):
    """Microseconds of a step, by runtime mode; nondecreasing in the tokens that run.

    docs/planning.md, Step times, has the rules below, between and beyond points, and for modes and
    LoRA cases that were not measured.

    Attributes:
        lora_overhead: Extra time of a step with LoRA kernels, as a fraction.
        full_of_decode: Whether FULL graphs ran uniform decode alone, and tell nothing of mixed
            batches.
        doubt: The beginning of each verdict by these times.
        unsure: Why they may be wrong, or others than the plan's.
    """

    kind: Literal["step_times"] = "step_times"
    source: str
    curves: tuple[TimeCurve, ...] = Field(min_length=1)
    lora_overhead: float = Field(
        default=LORA_OVERHEAD,
        ge=0,
        allow_inf_nan=False,
    )
    full_of_decode: bool = False
    notes: tuple[str, ...] = ()
    doubt: str = ""
    unsure: tuple[str, ...] = ()

    @classmethod
    def measured(
        cls,
        points: Points,
        source: str,
        notes: Iterable[str] = (),
    ) -> StepTimes:
        """A time that falls is raised to the largest before it."""
        modes = {mode for mode, _ in points}
        curves = []
        said = list(notes)
        unsure = []
        for mode, case in sorted(points, key=lambda key: (key[0].value, key[1])):
            raw = points[mode, case]
            sizes, times = zip(*sorted(raw.items()), strict=True)
            ascending = zip(sizes, accumulate(times, max), strict=True)
            curve = TimeCurve(mode=mode, num_active_loras=case, points=tuple(ascending))
            curves.append(curve)
            points_raised = [(f"{size} tokens", raw[size], time) for size, time in curve.points]
            height, text = _most_raised(curve.name, points_raised)
            if height > 1 + WORTH_A_WARNING:
                unsure.append(f"{text}; were they steps of other ranks, adapters or contexts?")
            elif height > 1 + WORTH_A_NOTE:
                said.append(text)
            if len(raw) < 2:
                unsure.append(
                    f"{curve.name} was measured at {counted(sizes[0], 'token')} only: taken as "
                    "long for others; measure those, too"
                )
            if sizes[0] > FEW and mode is not CUDAGraphMode.PIECEWISE:
                unsure.append(
                    f"{curve.name} below {sizes[0]} tokens was not measured: taken as "
                    f"long as at {sizes[0]}; measure smaller steps, too: eager ones of an engine "
                    "by a start without graphs"
                )
        if modes == {CUDAGraphMode.NONE, CUDAGraphMode.FULL}:
            unsure.append(
                f"PIECEWISE was not measured: FULL plus {PIECEWISE_SHARE:.0%} of the time that "
                "eager takes longer; to an engine also send prompts shorter than its largest "
                "size, a few at a time: only those steps run in PIECEWISE graphs"
            )
        return cls(source=source, curves=tuple(curves), notes=tuple(said), unsure=tuple(unsure))

    @classmethod
    def default(cls) -> StepTimes:
        """Enough to see the shape of an answer, not to trust its figures."""
        times = cls.measured(
            DEFAULT_POINTS, "default, of another model: Qwen3-0.6B's shape on an H200"
        )
        return times.changed(unsure=(OF_ANOTHER_MODEL,))

    @classmethod
    def load(cls, path: str | Path) -> StepTimes:
        """Step times from a file, whose content tells its form; ``REMEDY`` lists the forms.

        Of a bench they are the medians from an idle device. JSON of other programs may stand one
        after the other: ``cat graphs.json eager.json``. Raises StepTimeError with file and row.
        """
        return cls.parse(load.read_text(path, StepTimeError, REMEDY), path)

    @classmethod
    def parse(
        cls,
        text: str,
        path: str | Path,
        *,
        in_step: bool = False,
    ) -> StepTimes:
        """As ``load``, from a text; ``path`` names it in messages. ``in_step``: data-parallel ranks
        of a log run each step together.
        """
        steps = [Timed(*step) for step in logged_steps(text, in_step=in_step)]
        if steps:
            source = f"the log of vLLM, {path}"
            lost = steps_before_start(text)
            if lost:
                left_out = counted(lost, "iteration")
                source += (
                    f" (without {left_out} before its first start: give graphs.log from its first "
                    "line)"
                )
            return _of_runs(steps, median, path, source, [_OF_LOG])
        is_json = text.lstrip().startswith(("{", "["))
        if not is_json and LOG_LINE.search(text):
            raise StepTimeError(
                f"{path}: the log has no iteration without speculative tokens after its start",
                remedy="Run vLLM with --enable-logging-iteration-details, without "
                "--speculative-config, send it requests, and give the log from its first line.",
            )
        if not is_json and METRIC in text:
            raise StepTimeError(
                f"{path}: metrics of a runner, which have no times of steps",
                remedy="Give them as --traffic, and here what `cgplan bench --output FILE` saved.",
            )
        if is_json:
            rows = json_rows(text, path, StepTimeError, REMEDY, _POINTS)
        else:
            rows = csv_rows(text, path, StepTimeError)
        found: list[tuple[StepForm[Any], RawRow]] = []
        for raw in rows:
            where, names, _ = raw
            for mark, program in TIMELESS.items():
                if mark in names:
                    raise StepTimeError(
                        f"{where}: a result of {program}, which does not tell the batch of a step",
                        remedy=REMEDY,
                    )
            form = next((form for form in (*MEASURED, TABLE) if form.mark in names), None)
            if form is None and is_json:
                return _saved(text, path)
            found.append((form or TABLE, raw))
        return _of_rows(grouped(found), path)

    def beside(self, loras: StepTimes) -> StepTimes:
        """These, and for steps with adapters, of any number, those of ``loras``."""
        curves = {curve.mode: curve.changed(num_active_loras=1) for curve in loras.curves}
        kept = [one for one in self.curves if not one.num_active_loras or one.mode not in curves]
        doubts, _ = loras.said_for(CUDAGraphMode.FULL_DECODE_ONLY)
        return self.changed(
            source=f"{self.source}; with adapters {loras.source}",
            curves=(*kept, *curves.values()),
            unsure=(*self.unsure, *[f"with adapters: {doubt}" for doubt in doubts]),
        )

    def said_for(self, mode: CUDAGraphMode) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """``unsure`` and notes, less those on PIECEWISE graphs if the resolved mode has none."""
        hidden = () if mode.has_mode(CUDAGraphMode.PIECEWISE) else ("PIECEWISE ",)
        unsure, notes = (
            tuple(text for text in texts if not text.startswith(hidden))
            for texts in (self.unsure, self.notes)
        )
        if self.full_of_decode and mode.mixed_mode() is CUDAGraphMode.FULL:
            unsure += (FULL_OF_DECODE,)
        return unsure, notes

    def of(
        self,
        mode: CUDAGraphMode,
        num_tokens: int,
        num_active_loras: int = 0,
    ) -> float:
        """Microseconds of a step that runs ``num_tokens``, padding included. Raises as ``at``."""
        return float(self.at(mode, np.array([num_tokens]), num_active_loras)[0])

    def at(
        self,
        mode: CUDAGraphMode,
        tokens: npt.NDArray[Any],
        num_active_loras: int = 0,
    ) -> Floats:
        """Of an array of tokens, likewise. Raises StepTimeError if no curve tells the time."""
        lane = mode, num_active_loras
        largest = int(tokens.max(initial=0))
        known = self._known.get(lane)
        if known is None or largest >= known.size:
            every = np.arange(1 << largest.bit_length())
            known = self._times_of(mode, every, num_active_loras)
            self._known[lane] = known
        found: Floats = known[tokens.astype(int)]
        return found

    @cached_property
    def _known(self) -> dict[tuple[CUDAGraphMode, int], Floats]:
        """The times of 0 tokens and more."""
        return {}

    def _times_of(
        self,
        mode: CUDAGraphMode,
        tokens: npt.NDArray[Any],
        num_active_loras: int,
    ) -> Floats:
        curve, factor = self._curve_of(mode, num_active_loras)
        of_full = None
        if mode is not CUDAGraphMode.FULL:
            full, _ = self._curve_of(CUDAGraphMode.FULL, num_active_loras)
            if full:
                of_full = self.at(CUDAGraphMode.FULL, tokens, num_active_loras)
        between = None
        if mode is CUDAGraphMode.PIECEWISE and of_full is not None:
            of_eager = self.at(CUDAGraphMode.NONE, tokens, num_active_loras)
            between = of_full + PIECEWISE_SHARE * np.maximum(of_eager - of_full, 0.0)
            if curve is None:
                return between
        if curve is None:
            name = _name(mode)
            measured = ", ".join(dict.fromkeys(_name(curve.mode) for curve in self.curves))
            raise StepTimeError(
                f"{self.source}: no {name} step times, found {measured}",
                remedy=f"Measure {name} steps: cgplan bench, a table with rows of mode {name}, or "
                "an engine's benchmark or log once more in that mode, of vLLM without "
                "--speculative-config, into the same file: cat graphs.log eager.log > both.log",
            )
        found = factor * curve.at(tokens)
        if between is not None:
            first, time = curve.points[0]
            small = np.minimum(between, factor * time)
            found = np.where(tokens < first, small, found)
        last, longest = curve.points[-1]
        beyond = found
        for other in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
            if other is mode:
                break
            slower, slower_factor = self._curve_of(other, num_active_loras)
            if slower:
                times = slower_factor * slower.at(tokens)
                at_last = slower_factor * slower.at(np.array(last))
                saving = np.maximum(at_last - factor * longest, 0.0)
                if other is CUDAGraphMode.NONE:
                    saving = np.maximum(saving - (times - at_last), 0.0)
                beyond = np.maximum(beyond, times - saving)
        if of_full is not None and (
            self.measured_to(CUDAGraphMode.FULL, num_active_loras) >= last
            or self.of(CUDAGraphMode.FULL, last, num_active_loras) <= factor * longest
        ):
            beyond = np.maximum(beyond, of_full)
        return np.where(tokens > last, beyond, found)

    def measured_at(self, mode: CUDAGraphMode, num_active_loras: int = 0) -> tuple[int, ...]:
        """Sizes in tokens, ascending."""
        curve, _ = self._curve_of(mode, num_active_loras)
        if curve:
            return tuple(size for size, _ in curve.points)
        if mode is not CUDAGraphMode.PIECEWISE:
            return (0,)  # ``at`` raises
        others = (CUDAGraphMode.FULL, CUDAGraphMode.NONE)  # which tell of PIECEWISE
        found = [self.measured_at(other, num_active_loras) for other in others]
        return min(found, key=max)

    def measured_to(self, mode: CUDAGraphMode, num_active_loras: int = 0) -> int:
        """The largest size whose time is as good as measured."""
        return int(ABOUT * self.measured_at(mode, num_active_loras)[-1])

    def told_apart(self, cases: Iterable[int]) -> tuple[int, ...]:
        """The LoRA cases worth planning for: the largest of those whose graphs take equal times."""
        found = {}
        for case in sorted(cases):
            piecewise = self._curve_of(CUDAGraphMode.PIECEWISE, case)
            full = self._curve_of(CUDAGraphMode.FULL, case)
            found[piecewise, full] = case
        return tuple(found.values())

    def _curve_of(
        self,
        mode: CUDAGraphMode,
        case: int,
    ) -> tuple[TimeCurve | None, float]:
        """The curve that tells the times of a LoRA case, and their factor."""
        curves = {curve.num_active_loras: curve for curve in self.curves if curve.mode is mode}
        if not curves:
            return None, 1.0
        with_adapters = sorted(curves.keys() - {0})
        factor = 1 + self.lora_overhead
        if case == 0:
            if 0 in curves:
                return curves[0], 1.0
            return curves[with_adapters[0]], 1 / factor
        if not with_adapters:
            return curves[0], factor
        for measured in with_adapters:
            if measured >= case:
                return curves[measured], 1.0
        return curves[with_adapters[-1]], 1.0


class StepSurface(NamedTuple):
    """Microseconds of a step by several sizes, never below that of a smaller batch.

    Linear in each size between measured ones, constant below them, in proportion beyond them.
    """

    axes: tuple[Floats, ...]  # measured sizes of each dimension, ascending
    values: Floats  # times of all their combinations: [sizes of the first axis, ...]
    source: str
    eager: Floats | None = None  # as values, without graphs; None: not known
    doubt: str = ""  # as in StepTimes
    unsure: tuple[str, ...] = ()  # likewise

    @classmethod
    def parse(
        cls,
        text: str,
        path: str | Path,
        names: Sequence[str],
    ) -> StepSurface:
        """From CSV with a column for each name and ``microseconds``, or a bench's JSON, of a full
        grid. Of equal sizes the longest time counts. Raises StepTimeError.
        """
        rows = []
        doubt = ""
        try:
            bench = _Bench.model_validate_json(text)
            doubt = bench.doubt
            for record in bench.records:
                if record.graph:
                    ran = record.descriptor
                    sizes = ran.num_tokens, *ran.sizes
                    rows.append((sizes, [record.graph.median, record.eager.median]))
        except ValidationError:
            if kind_of(text):
                _saved(text, path)
            kind = Time, ...
            for sizes, time in sized_rows(text, path, names, StepTimeError, "microseconds", kind):
                rows.append((sizes, [time]))
        longest: dict[tuple[int, ...], Floats] = {}
        for sizes, times in rows:
            longest[sizes] = np.maximum(times, longest.get(sizes, 0.0))
        axes = [sorted(set(column)) for column in zip(*longest, strict=True)]
        grid = list(product(*axes))
        missing = [f", not {sizes}" for sizes in grid if sizes not in longest]
        if len(axes) != len(names) or missing:
            raise StepTimeError(
                f"{path}: no times of a full grid of {' x '.join(names)}: {len(longest)} "
                f"rows{''.join(missing[:1])}",
                remedy=f"Give CSV with {','.join(names)},microseconds, and a row for each "
                "combination of its sizes.",
            )
        shape = [len(axis) for axis in axes]
        table = np.array([longest[sizes] for sizes in grid]).T.reshape(-1, *shape)
        raw = table.copy()
        for dim in range(1, table.ndim):
            np.maximum.accumulate(table, axis=dim, out=table)
        measured = tuple(np.array(axis, dtype=np.float64) for axis in axes)
        values, *eager = table
        dims = " x ".join(names)
        places = [f"{dims} {' x '.join(map(str, sizes))}" for sizes in grid]
        unsure = []
        for name, took, counts in zip(("graph", EAGER), raw, table, strict=False):
            points = zip(places, took.flat, counts.flat, strict=True)
            height, text = _most_raised(name, points)
            if height > 1 + WORTH_A_NOTE:
                unsure.append(f"{text}; measure again")
        surface = cls(measured, values, str(path), *eager)
        return surface._replace(doubt=doubt, unsure=tuple(unsure))

    def at(self, sizes: npt.NDArray[np.int64]) -> Floats:
        """Microseconds of boxes: [n, dimensions] -> [n]."""
        rows = np.arange(len(sizes))
        shape = rows.size, *self.values.shape
        found = np.broadcast_to(self.values, shape)
        for axis, asked in zip(self.axes, sizes.T, strict=True):
            place = np.interp(asked, axis, np.arange(axis.size))
            below = found[rows, place.astype(int)]
            above = found[rows, np.ceil(place).astype(int)]
            others = [1] * (below.ndim - 1)
            share = (place % 1).reshape(-1, *others)
            found = below * (1 - share) + above * share
        largest = [axis[-1] for axis in self.axes]
        beyond = np.maximum(sizes / largest, 1).prod(1)
        return np.asarray(found * beyond)


def _most_raised(name: str, points: Iterable[tuple[str, float, float]]) -> tuple[float, str]:
    """How far the point was raised that was raised most, and a sentence on it.

    Args:
        points: Where each is, its time as measured, and as it counts.
    """
    where, value, height = max(points, key=lambda point: point[2] / point[1])
    return height / value, (
        f"{name} at {where} took {format_microseconds(value)}, a smaller batch "
        f"{format_microseconds(height)}: raised to that, as larger batches take no less time"
    )


def _name(mode: CUDAGraphMode) -> str:
    return "eager" if mode is CUDAGraphMode.NONE else str(mode)


def _of_rows(
    found: Mapping[StepForm[Any], Sequence[RawRow]],
    path: str | Path,
) -> StepTimes:
    runs = []
    cells = set()
    for form, raws in found.items():
        for _, row in form.read(raws):
            runs += row.runs
            if isinstance(row, _PassRow):
                cells.add((row.workload_kind, row.cell_id))
    if len(cells) > len(dict(cells)):
        raise StepTimeError(
            f"{path}: passes of several deployments", remedy="Keep those of one cell_id."
        )
    # prefill reads no contexts, so its steps do not compare with those of decode
    largest = max([run.tokens for run in runs if not run.is_prefill], default=0)
    kept = [run for run in runs if run.tokens > largest or not run.is_prefill]
    sources = [form.name for form in found if form.note]
    notes = [form.note for form in found if form.note]
    pick = max if TABLE in found else median
    times = _of_runs(kept, pick, path, ", ".join([*sources, str(path)]), notes)
    for curve in times.curves:
        size, time = curve.points[0]
        likeness = time / DEFAULT_POINTS[curve.mode, 0][1]
        if not 1 / FAR < likeness < FAR:
            warning = (
                f"{_name(curve.mode)} at {counted(size, 'token')} takes "
                f"{format_microseconds(time)}, {likeness:.2g} times the default: is the unit right?"
            )
            return times.changed(unsure=(warning, *times.unsure))
    return times


def _of_runs(
    runs: Sequence[Timed],
    pick: Callable[[list[float]], float],
    path: str | Path,
    source: str,
    notes: Iterable[str] = (),
) -> StepTimes:
    """``pick`` chooses where a size ran several times."""
    points: dict[tuple[CUDAGraphMode, int], dict[int, float]] = {}
    times = grouped(((run.mode, run.case, run.tokens), run.microseconds) for run in runs)
    for (mode, case, size), found in times.items():
        if size <= MOST_BATCHED_TOKENS:
            points.setdefault((mode, case), {})[size] = pick(found)
    if not points:
        raise StepTimeError(f"{path}: no row of step times", remedy=REMEDY)
    measured = StepTimes.measured(points, source, notes)
    full = [run.is_mixed for run in runs if run.mode is CUDAGraphMode.FULL]
    return measured.changed(full_of_decode=full != [] and not any(full))


_SAVED: TypeAdapter[StepTimes | _Bench] = TypeAdapter(
    Annotated[StepTimes | _Bench, Field(discriminator="kind")]
)


def _saved(
    text: str,
    path: str | Path,
) -> StepTimes:
    try:
        found = _SAVED.validate_json(text)
    except ValidationError as error:
        problem = f"{path}: neither a bench report nor step times: {first_problem(error)}"
        kind = kind_of(text)
        if kind not in (None, "bench", "step_times"):
            problem = f"{path} is a saved {kind}, which has no step times"
        raise StepTimeError(problem, remedy=REMEDY) from None
    if isinstance(found, StepTimes):
        return found
    runs = []
    for record in found.records:
        ran = record.descriptor
        if ran.sizes:
            raise StepTimeError(
                f"{path} has times of batches of several sizes, and the configuration counts "
                "num_tokens alone",
                remedy="Give a bench of this configuration, or plan with the `dims` of that bench.",
            )
        case = ran.num_active_loras
        runs.append(Timed(CUDAGraphMode.NONE, record.num_tokens, record.eager.median, case=case))
        if record.mode is not CUDAGraphMode.NONE and record.graph:
            time = record.graph.median
            runs.append(Timed(record.mode, ran.num_tokens, time, not ran.uniform, case=case))
    source = f"{path}, {found.device}" if found.device else str(path)
    if found.backend == TAPE:
        source += f", {TAPE}"
    return _of_runs(runs, max, path, source).changed(doubt=found.doubt)
