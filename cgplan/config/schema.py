"""The models behind the YAML file. Frozen; unknown keys are errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic._internal._model_construction import ModelMetaclass

from cgplan.config.messages import explain
from cgplan.config.values import (
    DIMENSION,
    Attention,
    BatchBound,
    Bytes,
    BytesToSpend,
    Count,
    CountOrZero,
    Device,
    DType,
    Flag,
    LadderName,
    Length,
    Mode,
    Seconds,
    SecondsToSpend,
    Symbol,
    check_example,
    check_package,
    check_pad,
    check_sizes,
    is_value_of,
)
from cgplan.errors import ConfigError, did_you_mean
from cgplan.modes import AttentionSupport, CUDAGraphMode

SYMBOLS = ("num_tokens", "num_reqs")
WORDS_OF_A_CALL = {"uniform_decode", "num_active_loras", "invalid_modes", "padded", "self"}
_UP_TO = "up to "
_EXTENT = re.compile(
    r"(?:(?P<factor>\d+)\s*\*\s*)?(?P<symbol>[a-z_]\w*)\s*(?:\+\s*(?P<offset>\d+))?", re.ASCII
)


@dataclass(frozen=True)
class Extent:
    """How long one dimension of a tensor is: ``factor * symbol + offset``, or just ``offset``
    without a symbol.
    """

    symbol: str | None  # ``num_tokens``, ``num_reqs``, a name of ``dims``, or None for a fixed size
    factor: int  # rows of the input for each row of the batch
    offset: int  # rows that every batch has besides (the 1 in ``num_reqs + 1``)
    is_most: bool = False  # whether tensors may be shorter, without a symbol

    @classmethod
    def parse(cls, value: int | str) -> Extent:
        """From YAML: ``224``, ``up to 16``, ``num_tokens``, ``num_reqs + 1``, ``2 * length``.
        Raises ValueError.
        """
        if (
            isinstance(value, str)
            and value.startswith(_UP_TO)
            and value.removeprefix(_UP_TO).isdecimal()
        ):
            return replace(cls.parse(int(value.removeprefix(_UP_TO))), is_most=True)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"a dimension must be at least 1, found {value}")
        if isinstance(value, int):
            return cls(None, 0, value)
        match = _EXTENT.fullmatch(value.strip())
        if match is None:
            raise ValueError(
                f"cannot read the dimension {value!r}; allowed are a number, `up to 16`, "
                "num_tokens, num_reqs, "
                "num_reqs + 1, 2 * num_tokens and the like, and names that `dims` declares"
            )
        factor = int(match["factor"] or 1)
        if factor < 1:
            raise ValueError(f"the factor in {value!r} must be at least 1")
        return cls(match["symbol"], factor, int(match["offset"] or 0))

    def size(self, num_tokens: int, num_reqs: int) -> int:
        """Rows of this dimension in a batch of ``num_tokens`` tokens and ``num_reqs`` requests."""
        return self.at({"num_tokens": num_tokens, "num_reqs": num_reqs})

    def at(self, sizes: Mapping[str, int]) -> int:
        """Rows of this dimension where the names have these sizes."""
        return (
            self.offset if self.symbol is None else self.factor * sizes[self.symbol] + self.offset
        )

    def takes(self, size: int) -> bool:
        """Whether a tensor may have ``size`` rows there; for a dimension without a symbol."""
        return size <= self.offset if self.is_most else size == self.offset

    def count(self, size: int) -> int | None:
        """The symbol's value for which this dimension has ``size`` rows, None if there is none."""
        rest = size - self.offset
        return (
            rest // self.factor if self.symbol and rest >= 0 and rest % self.factor == 0 else None
        )


class UpTo(str):
    """A dimension of an input that may be narrower than its static buffer, such as block tables:
    ``UpTo(16)``, in YAML ``up to 16``. Calls pad it with the input's ``pad``; eager runs get it as
    it is.
    """

    def __new__(cls, most: int) -> UpTo:
        return super().__new__(cls, f"{_UP_TO}{most}")


class _TypedErrors(ModelMetaclass):
    """Makes ``Input(...)`` and the like raise ConfigError, as the file does; validation inside
    pydantic is as ever.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (of a metaclass)
        try:
            return super().__call__(*args, **kwargs)
        except ValidationError as error:
            raise explain(error, kwargs, cls.__name__, cast(type[BaseModel], cls)) from None


class Section(BaseModel, metaclass=_TypedErrors):
    """A part of the configuration: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class DistributedConfig(Section):
    """Several processes under torchrun, one rank each; without torchrun nothing of it is used."""

    timeout: Annotated[Seconds, Field(gt=0)] = 60.0
    """How long ranks wait for one another, with a unit as in `30s`: at the start, at each common
    step, and in each all-reduce.
    """
    all_reduce_max_size: Bytes = 8 << 20
    """Largest tensor that the custom and symm_mem all-reduce take, in the units of `budget.memory`;
    larger ones go to NCCL. Two staging buffers of this size are kept on each rank.
    """
    table_rows: Count = 1 << 14
    """Rows of the device pointer table: captured all-reduces at most, in all graphs of a runner."""
    data_parallel_sync: Flag = False
    """Before each batch ranks agree on one graph, by a small all-reduce: the largest padded size
    and the weakest mode (`cgplan.distributed.in_step`). Needed where ranks run different batches
    and exchange data inside.
    """


class TrafficConfig(Section):
    """Synthetic traffic: Poisson arrivals, lognormal lengths. A file of traffic on the command line
    wins over it.
    """

    request_rate: Annotated[float, Field(strict=True, ge=0.001, le=1e6)]
    """Requests per second on average; the times between them are exponentially distributed."""
    num_requests: Annotated[int, Field(strict=True, ge=1, le=1 << 20)] = 10_000
    """Requests to simulate."""
    prompt_median: Length
    """Tokens of a prompt: the median of a lognormal distribution."""
    prompt_p95: Length
    """Tokens of a prompt: the 95th percentile."""
    output_median: Length
    """Tokens generated for a request: the median of a lognormal distribution."""
    output_p95: Length
    """Tokens generated for a request: the 95th percentile."""
    lora_share: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0
    """Share of the requests that use a LoRA adapter, from 0 to 1."""
    num_adapters: Count | None = None
    """Distinct adapters among all requests, each as likely as the others. Absent:
    lora.max_loras.
    """
    seed: CountOrZero = 0
    """Of the random numbers; equal seeds give equal traffic."""

    @model_validator(mode="after")
    def _percentiles_ascend(self) -> TrafficConfig:
        lengths = {
            "prompt": (self.prompt_median, self.prompt_p95),
            "output": (self.output_median, self.output_p95),
        }
        for name, (median, p95) in lengths.items():
            if p95 < median:
                raise ValueError(
                    f"{name}_p95 is {p95}, which is below {name}_median = {median}; exchange the "
                    "two"
                )
        return self


class BudgetConfig(Section):
    """Limits on the cost of graphs: of the plan, and of the capture."""

    memory: BytesToSpend | None = None
    """Device memory for all graphs together, their static buffers included: whole bytes, or with a
    unit (B, kB, MB, GB, KiB, MiB, GiB), as in `2GiB`. Absent: no bound.
    """
    capture_time: SecondsToSpend | None = None
    """Start-up time for all captures together, warm-ups included: seconds, or with a unit (ms, s,
    min), as in `30s`. Absent: no bound.
    """
    compile_time: SecondsToSpend | None = None
    """Time for compilations that serve one size each (`compilation.compile_shapes`), as in `30s`:
    the first is made in any case, and a size whose compilation would end beyond it shares a trace.
    Absent: no bound.
    """
    max_graphs: Count | None = None
    """Graphs at most. Without traffic to choose by, the largest sizes stay and those with which
    batches of all sizes are padded least. Absent: no bound.
    """
    reserve: Bytes | None = None
    """Device memory that a capture leaves free, in the units of `memory`. Absent: nothing is kept
    free.
    """


Shape = Annotated[
    tuple[Annotated[int, Field(strict=True)] | str, ...],
    BeforeValidator(lambda value: [value] if isinstance(value, int | str) else value),
    WithJsonSchema({"anyOf": [DIMENSION, {"type": "array", "items": DIMENSION}]}),
]


class Dim(Section):
    """A size of the batch that varies: its rows, the length of texts, the height of pictures."""

    name: Annotated[str, Field(pattern=r"^([a-z_][a-z0-9_]*)?$")] = ""
    """In a file the key; the name that shapes of inputs have."""
    min: Count = 1
    """Smallest size."""
    max: BatchBound
    """Largest size that has a graph, rounded up to multiple_of. Batches beyond run eagerly, or are
    an error (`compilation.on_miss`).
    """
    multiple_of: Count = 1
    """Capture sizes are multiples of this number."""
    sizes: Annotated[tuple[Count, ...] | LadderName | None, BeforeValidator(check_sizes)] = None
    """Capture sizes, or a ladder's name. Absent: powers of two, times multiple_of."""

    def __init__(self, name: str = "", **values: Any) -> None:
        super().__init__(name=name, **values)

    @model_validator(mode="after")
    def _in_bounds(self) -> Dim:
        if self.min > self.max:
            raise ValueError(
                f"min is {self.min}, which is above max = {self.max}; exchange the two"
            )
        given = self.sizes if isinstance(self.sizes, tuple) else ()
        if wrong := [n for n in given if not self.min <= n <= self.top or n % self.multiple_of]:
            bounds = f"{self.min} to {self.top} and multiples of {self.multiple_of} are allowed"
            raise ValueError(f"size {wrong[0]} cannot be captured; {bounds}")
        return self

    @property
    def top(self) -> int:
        """The largest capture size: ``max``, rounded up to ``multiple_of``."""
        return -(-self.max // self.multiple_of) * self.multiple_of


class Input(Section):
    """A tensor that the model reads: an argument of its forward, or an entry of the forward
    context's metadata. In short `[shape, dtype, pad]`, such as `[num_tokens, int32, -1]` or
    `[[num_tokens, 8], float32, 0]`.
    """

    shape: Shape
    """Dimensions in order: numbers, `up to 16` where tensors may be narrower, names that `dims`
    declares, and at most one that counts rows of the batch: `num_tokens`, `num_reqs`, or such as
    `num_reqs + 1` and `2 * num_tokens`.
    """
    dtype: Annotated[DType, BeforeValidator(lambda value: str(value).removeprefix("torch."))]
    """Element type, by torch's name."""
    pad: Annotated[float | int | bool | Literal["last"], BeforeValidator(check_pad)]
    """Content of the padding rows: a number, or `last` to repeat the batch's last row (for
    cumulative offsets). There is no default, because 0 is wrong as often as right.
    """
    example: Annotated[
        float | int | Literal["normal", "arange", "spread"] | tuple[int, int] | None,
        BeforeValidator(check_example),
    ] = None
    """Values that bench runs on: a number, `normal` (standard normal), `arange` (0, 1, 2, ... over
    all elements), `spread` (offsets that spread num_tokens evenly over the requests), or `[low,
    high]` for random whole numbers from low to high - 1. Absent: `normal` for floating point, the
    padding value otherwise.
    """

    @classmethod
    def like(
        cls, tensor: Any, rows: int = 0, *, pad: float | Literal["last"], symbol: str = "num_tokens"
    ) -> Input:
        """Declare tensors of this dtype and shape whose dimension ``rows`` counts ``symbol``.
        Raises ConfigError.
        """
        shape = [*tensor.shape]
        if not -len(shape) <= rows < len(shape):
            raise ConfigError(
                f"a tensor of shape {shape} has no dimension {rows} that could count {symbol}",
                remedy="Pass the dimension as `rows`, or declare it: cgplan.Input(shape=..., "
                "dtype=..., pad=...).",
            )
        shape[rows] = symbol
        return cls(shape=tuple(shape), dtype=tensor.dtype, pad=pad)

    @model_validator(mode="after")
    def _consistent(self) -> Input:
        symbols = [extent.symbol for extent in self.extents if extent.symbol]
        if sum(symbol in SYMBOLS for symbol in symbols) > 1:
            raise ValueError(
                f"only one dimension may count rows of the batch, found shape {list(self.shape)}"
            )
        if self.pad == "last" and (
            len(symbols) != 1 or any(extent.is_most for extent in self.extents)
        ):
            raise ValueError(
                "pad: last needs a dimension that counts rows of the batch, and one alone"
            )
        if self.pad != "last" and not is_value_of(self.dtype, self.pad):
            raise ValueError(f"pad {self.pad} is not a value of dtype {self.dtype}")
        return self

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The parsed shape."""
        return tuple(Extent.parse(d) for d in self.shape)

    @property
    def row_dim(self) -> int | None:
        """Index of the dimension that counts tokens or requests, None if the input has a fixed
        shape.
        """
        return next((i for i, extent in enumerate(self.extents) if extent.symbol in SYMBOLS), None)


def _from_short(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    if len(value) != 3:
        raise ValueError(
            f"found {value!r}, expected shape, dtype and pad, as in [num_tokens, int32, -1]"
        )
    return dict(zip(("shape", "dtype", "pad"), value, strict=True))


_Declared = Annotated[
    Input, BeforeValidator(_from_short, json_schema_input_type=Input | tuple[Any, Any, Any])
]


class ModelConfig(Section):
    """The model that is captured."""

    target: str | None = None
    """`package.module:callable` or `path/to/file.py:callable`, called with kwargs; it returns an
    nn.Module or another callable. The word `transformers` builds a Hugging Face causal LM. Absent
    where the model is given from Python.
    """
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the target."""
    output_rows: Symbol = "num_tokens"
    """Rows that dimension 0 of each output counts, `num_tokens` or `num_reqs`; padding is sliced
    off there.
    """
    output_shapes: tuple[Shape, ...] | None = None
    """Shapes of the outputs in order, written as those of inputs; padding is sliced off each
    dimension with a name. Needed where `dims` declares more than one name; absent: output_rows says
    all.
    """


class CompilationConfig(Section):
    """Which graphs are captured, and how a batch that none serves is run."""

    cudagraph_mode: Mode = CUDAGraphMode.FULL
    """NONE, PIECEWISE, FULL, FULL_DECODE_ONLY (FULL for uniform decode, eager for mixed batches),
    FULL_AND_PIECEWISE (FULL for uniform decode, PIECEWISE for mixed batches) or AUTO (a capture
    tries FULL, leaves modules that fail out, times it beside PIECEWISE, inductor and eager steps,
    and keeps the fastest; nothing if graphs bring less than 2%).
    """
    cudagraph_capture_sizes: Annotated[
        tuple[Count, ...] | LadderName | None, BeforeValidator(check_sizes)
    ] = None
    """Sizes in tokens, or a ladder's name. Absent: the vllm ladder, or that of the first of `dims`
    in their place.
    """
    boxes: tuple[tuple[Count, ...], ...] | None = None
    """With `dims`: the combinations of sizes to capture, each in the order of `dims` (behind
    num_tokens, where inputs count it). Absent: all combinations.
    """
    max_cudagraph_capture_size: BatchBound | None = None
    """Largest capture size in tokens. Absent: min(2 * query length * max_num_seqs, 512), at most
    max_num_batched_tokens.
    """
    capture_policy: Literal["eager", "lazy", "adaptive"] = "eager"
    """When keys are captured. eager: all of the plan at once. lazy: each when a batch first asks
    for it, at most one in a call. adaptive: the plan at once, and `runner.replan()` exchanges keys
    for those that the batches since asked for.
    """
    pool: Literal["shared", "per_mode", "per_graph"] = "shared"
    """Which graphs share a memory pool. shared: all of a runner, which never run at once. per_mode:
    those of one runtime mode. per_graph: none, so that an output lasts until the next replay of its
    own graph, and an evicted graph gives its memory back at once; takes the most memory.
    """
    cudagraph_num_of_warmups: CountOrZero = 1
    """Eager runs of each key on the capture stream before it is captured."""
    cudagraph_copy_inputs: Flag = True
    """true: a call copies its tensors into static buffers that cgplan owns. false: the caller
    writes into the static buffers itself (`runner.input_views`) and passes those views; other
    tensors are refused.
    """
    key_rules: Literal["vllm_v1", "vllm_v2"] = "vllm_v1"
    """Which graphs there are for the capture sizes, and which of them runs a batch: as in vLLM's
    model runner V1, which captures follow, or V2, the default of vLLM 0.33, for plans alone.
    """
    cudagraph_specialize_lora: Flag = True
    """Capture graphs without adapters beside those with; false: one graph serves both."""
    splitting_ops: tuple[str, ...] | None = None
    """Operators kept out of PIECEWISE segments, as `namespace::name`; Python's operators by
    PyTorch's names for them (`aten::matmul` for `@`, `aten::slice` for `x[:, :4]`). Absent:
    PyTorch's attention operators and cgplan::attention, and with piecewise: modules none; empty:
    nothing to split at.
    """
    splitting_modules: tuple[str, ...] = ()
    """Modules kept out of PIECEWISE segments, by dotted name with `*` for one part, as in
    `layers.*.self_attn`. The capture breaks there, and at splitting_ops if they are given; nothing
    is traced.
    """
    piecewise: Literal["auto", "ops", "modules", "wrappers"] = "auto"
    """How PIECEWISE segments come about. ops: the traced forward is split at splitting_ops.
    modules: the capture breaks at splitting_modules, at splitting_ops, and at functions under
    eager_break_during_capture. wrappers: the model
    itself holds CUDAGraphWrappers. auto: modules if splitting_modules are given, or no
    splitting_ops and the model calls such functions; else ops.
    """
    compiler: Literal["eager", "inductor"] = "eager"
    """How a segment of a traced forward runs: its operators as they are, or compiled by inductor,
    each distinct segment of a trace once (needs a GPU). inductor traces the model in every mode.
    """
    compile_shapes: Literal["auto", "dynamic", "static"] = "auto"
    """How many sizes a trace of the forward serves. dynamic: all; one row has another trace.
    static: one size, for which inductor then chooses its kernels. auto: with compiler: inductor
    static for the four sizes with the most
    steps of the plan's traffic, without traffic for the smallest and the largest; dynamic for all
    others.
    """
    use_inductor_graph_partition: Flag = False
    """With compiler: inductor, compile the forward as a whole and let inductor cut it, at
    splitting_ops and at operators tagged cudagraph_unsafe. false: the traced forward is split
    first.
    """
    address_check: Annotated[
        Literal["off", "first", "always"],
        # YAML reads the word off as false
        BeforeValidator(lambda value: "off" if value is False else value),
    ] = "always"
    """Whether the tensors that graphs read are checked to be where they were at capture. always: on
    each call, by what Python tells of changes of modules and by some addresses in rotation. first:
    on each graph's first replay. off: never.
    """
    state_copy: Bytes | None = None
    """Device memory that copies of the model's state may take while graphs are captured, in the
    units of `budget.memory`: a capture puts back the state that its warm-ups wrote. Copies beyond
    it go to host memory. Absent: a quarter of the free device memory.
    """
    verify: Annotated[
        Literal["off", "first", "rarely", "always"],
        BeforeValidator(lambda value: "off" if value is False else value),
    ] = "first"
    """When replays are compared with the model's own code: real rows, and the tensors that the
    graph writes, within rounding. first: at each graph's first replay, also with copies of real
    rows in the padding. rarely: at its replays 1, 2, 4, 8, ... always: at each. off: only when
    `runner.verify(batch)` is called. A comparison takes an eager step's time and memory.
    """
    strict: Flag = False
    """Whether a change of Python that each run of the forward makes (a counter, a list that grows,
    a text) is an error, not a warning: replays do not make it.
    """
    ignore: tuple[str, ...] = ()
    """Paths of Python values that decide nothing, such as `model.calls`: each run may change them.
    `*` stands for one part of a path.
    """
    debug: Flag = False
    """Check everything, slowly: `verify: always`, addresses on every replay, and outputs are copies
    that the next call fills with NaN.
    """
    audit: Annotated[
        Literal["off", "report", "error"],
        BeforeValidator(lambda value: "off" if value is False else value),
    ] = "off"
    """Whether each pointer in each graph is looked up when captures are over, those on demand too:
    into memory of the model, the runner, its pools, or of nobody. report: the report says what was
    found. error: a pointer into memory that is not the runner's is an error. Captures note
    operators and lines for it, which takes time.
    """
    attention_support: Attention = AttentionSupport.ALWAYS
    """Batches for which the model's attention can stand inside a FULL graph: ALWAYS, UNIFORM_BATCH,
    UNIFORM_SINGLE_TOKEN_DECODE or NEVER.
    """
    outputs: Literal["borrow", "clone"] = "borrow"
    """borrow: outputs are new tensor objects on graph memory, overwritten by the next replay of any
    graph in the pool. clone: outputs are copies.
    """
    hide_capture_from: tuple[Annotated[str, BeforeValidator(check_package)], ...] = (
        "transformers",
    )
    """Packages whose code runs in captures as in eager calls: where it asks
    `torch.cuda.is_current_stream_capturing()`, it is told no, unless a look ahead of the captures
    saw that it then needs the host. `[]`: all are told the truth.
    """
    all_reduce: Literal["auto", "custom", "nccl", "symm_mem"] = "auto"
    """How ranks sum tensors, in models that are split over several processes. custom: cgplan's
    kernels over registered graph buffers (shared memory on the CPU). nccl: torch.distributed (gloo
    on the CPU). symm_mem: PyTorch's symmetric memory. auto: custom where it can work, else nccl.
    """
    on_miss: Literal["eager", "error"] = "eager"
    """A batch that no graph serves is run eagerly, or is an error."""

    @property
    def verify_policy(self) -> Literal["off", "first", "rarely", "always"]:
        """When replays are compared: verify, and always in debug mode."""
        return "always" if self.debug else self.verify

    @property
    def address_policy(self) -> Literal["off", "first", "always"]:
        """How often addresses are checked: address_check, and always in debug mode."""
        return "always" if self.debug else self.address_check

    @model_validator(mode="after")
    def _consistent(self) -> CompilationConfig:
        if self.use_inductor_graph_partition and self.compiler != "inductor":
            raise ValueError("use_inductor_graph_partition needs compiler: inductor")
        sizes, maximum = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        if isinstance(sizes, tuple) and maximum is not None and max(sizes) != maximum:
            raise ValueError(
                f"max_cudagraph_capture_size is {maximum}, but the largest of "
                f"cudagraph_capture_sizes is {max(sizes)}; "
                "remove one of the two, or take one back with --set KEY=null"
            )
        return self


class SchedulerConfig(Section):
    """Bounds of the batches that the scheduler makes."""

    max_num_seqs: BatchBound = 256
    """Requests in one batch at most."""
    max_num_batched_tokens: BatchBound = 8192
    """Tokens in one batch at most."""
    mixed_batches: Flag = True
    """Whether a simulated batch may hold prefill and decode, as in vLLM. false: one of them,
    prefill first, as in SGLang; max_num_batched_tokens is its chunked-prefill-size then. A capture
    does not count with it.
    """


class LoRAConfig(Section):
    """LoRA adapters that a batch may use."""

    max_loras: Count
    """Distinct adapters in one batch at most; a call may say one more, which stands for any
    number.
    """
    rank: Count = 16
    """Rank of the adapters; informs the model's builder and reports."""
    specialize_active_lora: Flag = False
    """Capture one graph for each power of two of active adapters up to max_loras."""


class SpeculativeConfig(Section):
    """Speculative decoding."""

    num_speculative_tokens: CountOrZero = 0
    """Draft tokens for each request; the query length of uniform decode is 1 more."""
    method: Literal["eagle", "mtp", "ngram", "draft_model"] | None = None
    """What drafts. With key_rules: vllm_v2 plans have the draft's graphs (eagle, mtp)."""
    varlen_decode: Flag = False
    """Whether decode graphs take requests of 1 to 1 + num_speculative_tokens tokens (key_rules:
    vllm_v2): vLLM's adaptive verification.
    """
    accepted_tokens: Annotated[float, Field(strict=True, ge=1)] | None = None
    """Tokens that a request advances in a decode step on average, from 1 to 1 +
    num_speculative_tokens; simulated traffic counts with it, a capture does not. Absent: all drafts
    are accepted.
    """

    @property
    def has_draft_graphs(self) -> bool:
        """Whether vLLM's model runner V2 captures graphs of a draft model."""
        return self.num_speculative_tokens > 0 and self.method in ("eagle", "mtp")

    @model_validator(mode="after")
    def _not_more_than_drafted(self) -> SpeculativeConfig:
        if (
            self.accepted_tokens is not None
            and not self.accepted_tokens <= 1 + self.num_speculative_tokens
        ):
            raise ValueError(
                f"accepted_tokens is {self.accepted_tokens:g}, but with "
                f"{self.num_speculative_tokens} draft tokens a "
                f"request advances by {1 + self.num_speculative_tokens} at most"
            )
        return self


class ReportConfig(Section):
    """Sizes and repeats of measurements, and names for profilers."""

    sizes: tuple[Count, ...] | None = None
    """Batch sizes to measure, in tokens. Absent: bench measures every captured size,
    `cudagraph_mode: AUTO` and `cgplan doctor` the smallest, the largest, and the one for all
    requests.
    """
    repeats: Count = 30
    """Timed calls of each size and way of running."""
    warmups: CountOrZero = 3
    """Untimed calls before them."""
    nvtx: Flag = False
    """Make each call of a runner a named range (NVTX) for profilers."""


def _named(value: object) -> object:
    """Dimensions with the names of their keys."""
    if not isinstance(value, Mapping):
        return value
    found = dict[object, object]()
    for name, dim in value.items():
        if isinstance(dim, Mapping) and not all(isinstance(key, str) for key in dim):
            raise ValueError(f"dims.{name} has keys that are not text: {', '.join(map(repr, dim))}")
        found[name] = {**dim, "name": name} if isinstance(dim, Mapping) else dim
    return found


class Config(Section):
    """Everything that one YAML file says. `model` and `inputs` may be absent where nothing is
    captured.
    """

    model: ModelConfig | None = None
    """The model that is captured."""
    device: Device = "auto"
    """`auto` (a GPU if there is one), `cuda`, `cuda:N`, or `cpu` (the tape backend)."""
    dims: Annotated[dict[str, Dim], BeforeValidator(_named)] = Field(default_factory=dict)
    """Sizes of a batch that vary, by name, beside num_tokens and num_reqs. Where no input counts
    those, the first one stands for num_tokens.
    """
    inputs: dict[str, _Declared] = Field(default_factory=dict)
    """Arguments of the model's forward, by name."""
    metadata: dict[str, _Declared] = Field(default_factory=dict)
    """Tensors that the model reads from the forward context, by name."""
    compilation: CompilationConfig = Field(default_factory=CompilationConfig)
    """Which graphs are captured."""
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    """Bounds of a batch."""
    lora: LoRAConfig | None = None
    """LoRA adapters; absent: none."""
    speculative: SpeculativeConfig = Field(default_factory=SpeculativeConfig)
    """Speculative decoding."""
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    """Several processes under torchrun."""
    report: ReportConfig = Field(default_factory=ReportConfig)
    """Sizes and repeats of bench."""
    traffic: TrafficConfig | None = None
    """Synthetic traffic to plan for; absent: none, traffic comes from a file."""
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    """Limits on the cost of graphs."""

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        twice = sorted(set(self.inputs) & set(self.metadata))
        if twice:
            raise ValueError(
                f"{twice[0]!r} is both an input and metadata; a name may stand in one of them"
            )
        reserved = sorted(WORDS_OF_A_CALL & set(self.tensors))
        if reserved:
            raise ValueError(
                f"{reserved[0]!r} is a word of the runner's call and cannot name an input"
            )
        self._check_dims()
        if self.traffic is not None and self.traffic.lora_share > 0 and self.lora is None:
            raise ValueError(
                f"traffic.lora_share is {self.traffic.lora_share:g}, but there is no `lora` "
                "section; add one, such as `lora: {max_loras: 4}`"
            )
        return self

    def _check_dims(self) -> None:
        first, *others = self.dim_names
        for name, dim in self.dims.items():
            if name in SYMBOLS or dim.name != name:
                raise ValueError(f"{name!r} cannot name a dimension of `dims`")
        for name, spec in self.tensors.items():
            symbols = self._symbols_of(f"input {name!r}", spec.extents)
            if spec.pad == "last" and not set(symbols).isdisjoint(others):
                raise ValueError(
                    f"input {name!r}: pad: last goes with rows of the batch, not with "
                    f"{', '.join(self.dims)}"
                )
            if symbols.count(first) > 1:
                raise ValueError(
                    f"input {name!r} has {first!r} twice; only one dimension may count rows"
                )
        given = self.model.output_shapes if self.model else None
        for i, shape in enumerate(given or ()):
            self._symbols_of(f"output {i}", map(Extent.parse, shape))
        if len(self.dim_names) > 1 and self.tensors and given is None:
            raise ValueError(
                "`dims` declares more than one name: write the shapes of outputs into "
                "model.output_shapes"
            )
        self._check_boxes()

    def _symbols_of(self, where: str, extents: Iterable[Extent]) -> list[str]:
        allowed = (*SYMBOLS, *self.dims)
        symbols = [extent.symbol for extent in extents if extent.symbol is not None]
        for symbol in symbols:
            if symbol not in allowed:
                hint = did_you_mean(symbol, allowed, " (did you mean {!r}?)")
                raise ValueError(
                    f"{where} has a dimension {symbol!r}, which `dims` does not declare{hint}"
                )
        return symbols

    def _check_boxes(self) -> None:
        for box in self.compilation.boxes or ():
            for name, size in zip(self.dim_names, box, strict=False):
                if name in self.dims and size > self.dims[name].top:
                    raise ValueError(
                        f"compilation.boxes: {size} is above the max of {name}, "
                        f"{self.dims[name].top}"
                    )
        if (
            self.dim_names[0] in self.dims
            and self.compilation.max_cudagraph_capture_size is not None
        ):
            raise ValueError(
                f"max_cudagraph_capture_size counts tokens; write dims.{self.dim_names[0]}.max"
            )
        widths = {len(box) for box in self.compilation.boxes or ()} - {len(self.dim_names)}
        if widths or (self.compilation.boxes and not self.dims):
            raise ValueError(
                f"compilation.boxes has sizes of {', '.join(self.dim_names)} each, in this order"
            )

    @property
    def tensors(self) -> dict[str, Input]:
        """Inputs and metadata by name."""
        return {**self.inputs, **self.metadata}

    @property
    def dim_names(self) -> tuple[str, ...]:
        """Names of the sizes of a batch: first what ``num_tokens`` of a descriptor counts, then
        those of ``sizes``.
        """
        if not self.dims or any(
            e.symbol in SYMBOLS for spec in self.tensors.values() for e in spec.extents
        ):
            return ("num_tokens", *self.dims)
        return tuple(self.dims)

    def shape_at(self, shape: tuple[int | str, ...], sizes: Sequence[int]) -> tuple[int | str, ...]:
        """A shape in terms of num_tokens and num_reqs, for these sizes of the other dimensions."""
        first, *others = self.dim_names
        at, found = dict(zip(others, sizes, strict=True)), list[int | str]()
        for given, extent in zip(shape, map(Extent.parse, shape), strict=True):
            renamed = re.sub(first, "num_tokens", str(given)) if extent.symbol == first else given
            found.append(extent.at(at) if extent.symbol in at else renamed)
        return tuple(found)

    def tensors_at(self, sizes: Sequence[int] = ()) -> dict[str, Input]:
        """Inputs and metadata, their shapes as ``shape_at`` gives them."""
        tensors = self.tensors
        if not self.dims:
            return tensors
        return {
            n: s.model_copy(update={"shape": self.shape_at(s.shape, sizes)})
            for n, s in tensors.items()
        }

    @property
    def query_len(self) -> int:
        """Tokens of each request in a uniform decode batch: 1 + num_speculative_tokens."""
        return 1 + self.speculative.num_speculative_tokens
