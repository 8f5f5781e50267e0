"""The models behind the YAML file: values with their forms and parsers, sections, and messages
for what pydantic refused.
"""

from __future__ import annotations

import math
import re
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic._internal._model_construction import ModelMetaclass
from pydantic_core import ErrorDetails

from cgplan.errors import ConfigError, did_you_mean
from cgplan.modes import AttentionSupport, CUDAGraphMode
from cgplan.units import grouped

DType = Literal[
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
]
LadderName = Literal["vllm", "sglang", "trtllm", "powers_of_two", "vllm_interactivity"]
Symbol = Literal["num_tokens", "num_reqs"]


class Record(BaseModel):
    """A frozen value that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    def changed(self, **fields: Any) -> Self:
        return self.model_copy(update=fields)


def _by_name(enum: type[CUDAGraphMode] | type[AttentionSupport]) -> BeforeValidator:
    def parse(value: object) -> object:
        try:
            return enum.parse(value)
        except ConfigError as error:  # pydantic adds the key's path to ValueErrors
            raise ValueError(f"{error.message}. {error.remedy}") from None

    return BeforeValidator(parse)


def _one_of(enum: type[CUDAGraphMode] | type[AttentionSupport]) -> WithJsonSchema:
    return WithJsonSchema({"enum": list(enum.__members__), "type": "string"})


_AS_TEXT = PlainSerializer(str, return_type=str)
Mode = Annotated[CUDAGraphMode, _by_name(CUDAGraphMode), _AS_TEXT, _one_of(CUDAGraphMode)]
Attention = Annotated[
    AttentionSupport, _by_name(AttentionSupport), _AS_TEXT, _one_of(AttentionSupport)
]

DIMENSION = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
Count = Annotated[int, Field(strict=True, ge=1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]
# a ladder lists every size up to it
BatchBound = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]
Flag = Annotated[bool, Field(strict=True)]
# YAML reads the word off as false
Off = BeforeValidator(lambda value: "off" if value is False else value)


def check_pad(value: object) -> object:
    if value != "last" and not isinstance(value, int | float):
        raise ValueError(f"found {value!r}, expected a number, true, false, or `last`")
    return value


def check_example(value: object) -> object:
    if isinstance(value, list | tuple):
        if len(value) == 2 and all(type(bound) is int for bound in value):
            if value[0] >= value[1]:
                raise ValueError(f"found {value!r}: low must be below high")
            return value
    elif value in (None, "normal", "arange", "spread") or isinstance(value, int | float):
        return value
    raise ValueError(
        f"found {value!r}, expected a number, `normal`, `arange`, `spread`, or [low, high]"
    )


def check_package(value: object) -> object:
    if not str(value).isidentifier() or value in ("cgplan", "torch", "triton"):
        raise ValueError(
            f"found {value!r}, expected a top-level package other than torch, triton and cgplan"
        )
    return value


def check_sizes(value: object) -> object:
    if isinstance(value, str) and value not in get_args(LadderName):
        names = ", ".join(get_args(LadderName))
        raise ValueError(
            f"unknown ladder {value!r}; choose one of {names}, or give a list: [1, 2, 4]"
        )
    if isinstance(value, list | tuple) and not value:
        raise ValueError("the list of capture sizes is empty; leave the key out for a ladder")
    return value


SizesOrLadder = Annotated[tuple[Count, ...] | LadderName | None, BeforeValidator(check_sizes)]


def _check_device(value: object) -> object:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(value)):
        raise ValueError(f"found {value!r}, expected auto, cpu, cuda, or cuda:N")
    return str(value)


Device = Annotated[
    str,
    BeforeValidator(_check_device),
    WithJsonSchema({"type": "string", "pattern": r"auto|cpu|cuda(:\d+)?"}),
]

TAPE = "cpu (tape)"  # the name of the backend of device cpu

LARGEST = {  # torch.finfo(...).max
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": 3.4028234663852886e38,
    "float64": 1.7976931348623157e308,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}


def is_value_of(dtype: str, value: float) -> bool:
    """Whether the dtype holds the number, rounded if it is floating point."""
    is_finite = isinstance(value, int) or math.isfinite(value)
    if dtype in LARGEST:
        return not is_finite or abs(value) <= LARGEST[dtype]
    if dtype == "bool":
        return value in (0, 1)
    if not is_finite or value != int(value):
        return False
    bits = int(re.sub(r"\D", "", dtype))
    if dtype == "uint8":
        return 0 <= value < 1 << bits
    half = 1 << bits - 1
    return -half <= value < half


_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)


def _amount(
    units: Mapping[str, float],
    unit: str,
    example: str,
    most: float,
) -> Callable[[object], float]:
    factors = {"": 1.0, **{name.lower(): factor for name, factor in units.items()}}
    allowed = (
        f"expected a number of {unit}, or one with a unit ({', '.join(units)}), such as {example}"
    )

    def parse(value: object) -> float:
        named = ""
        if isinstance(value, int | float) and not isinstance(value, bool):
            amount = value
        else:
            match = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
            if match is None or match[2].lower() not in factors:
                raise ValueError(f"found {value!r}, {allowed}")
            named = match[2].lower()
            amount = float(match[1]) * factors[named]
        if unit == "bytes" and not named and amount % 1:
            raise ValueError(f"found {value!r} bytes; was a unit meant? {allowed}")
        if not 0 <= amount <= most:
            raise ValueError(
                f"found {value!r}, which is not between 0 and {most:g} {unit}; {allowed}"
            )
        return amount

    return parse


_UNITS_OF_BYTES = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
}
_parse_bytes = _amount(_UNITS_OF_BYTES, "bytes", "2GiB or 512MiB", most=1 << 50)
_parse_seconds = _amount({"ms": 1e-3, "s": 1.0, "min": 60.0}, "seconds", "30s or 2min", most=10**6)


def _above_zero(value: float) -> float:
    if value == 0:
        raise ValueError("found 0, which pays for no graph; leave it out for no bound")
    return value


def _or_text(kind: str, bound: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": kind, bound: 0}, {"type": "string"}]})


# dumped as numbers of the base unit
Bytes = Annotated[
    int, BeforeValidator(lambda value: round(_parse_bytes(value))), _or_text("integer", "minimum")
]
Seconds = Annotated[float, BeforeValidator(_parse_seconds), _or_text("number", "minimum")]
BytesToSpend = Annotated[
    Bytes, AfterValidator(_above_zero), _or_text("integer", "exclusiveMinimum")
]
SecondsToSpend = Annotated[
    Seconds, AfterValidator(_above_zero), _or_text("number", "exclusiveMinimum")
]


SYMBOLS = ("num_tokens", "num_reqs")
WORDS_OF_A_CALL = {"uniform_decode", "num_active_loras", "invalid_modes", "padded", "self"}
_UP_TO = "up to "
_EXTENT = re.compile(
    r"(?:(?P<factor>\d+)\s*\*\s*)?(?P<symbol>[a-z_]\w*)\s*(?:\+\s*(?P<offset>\d+))?", re.ASCII
)


@dataclass(frozen=True)
class Extent:
    """A dimension's length: ``factor * symbol + offset``, or ``offset`` without a symbol."""

    symbol: str | None  # ``num_tokens``, ``num_reqs``, or a name of ``dims``
    factor: int
    offset: int
    is_most: bool = False  # whether tensors may be shorter, without a symbol

    @classmethod
    @cache
    def parse(cls, value: int | str) -> Extent:
        """From YAML: ``224``, ``up to 16``, ``num_tokens``, ``num_reqs + 1``, ``2 * length``.
        Raises ValueError.
        """
        most = str(value).removeprefix(_UP_TO)
        is_most = str(value).startswith(_UP_TO) and most.isdecimal()
        if is_most:
            value = int(most)
        if isinstance(value, int):
            if value < 0:
                raise ValueError(
                    f"a dimension must be at least 0, found {value}; num_tokens counts rows"
                )
            return cls(None, 0, value, is_most)
        match = _EXTENT.fullmatch(value.strip())
        if match is None:
            raise ValueError(
                f"cannot read the dimension {value!r}; write a number, `up to 16`, "
                "num_tokens, num_reqs + 1, 2 * num_tokens, or a name of `dims`"
            )
        factor = int(match["factor"] or 1)
        if factor < 1:
            raise ValueError(f"the factor in {value!r} must be at least 1")
        return cls(match["symbol"], factor, int(match["offset"] or 0))

    def size(self, num_tokens: int, num_reqs: int) -> int:
        return self.at({"num_tokens": num_tokens, "num_reqs": num_reqs})

    def at(self, sizes: Mapping[str, int]) -> int:
        if self.symbol is None:
            return self.offset
        return self.factor * sizes[self.symbol] + self.offset

    def takes(self, size: int) -> bool:
        return size <= self.offset if self.is_most else size == self.offset

    def count(self, size: int) -> int | None:
        """The symbol's value for this length, if any."""
        rest = size - self.offset
        if self.symbol is None or rest < 0 or rest % self.factor:
            return None
        return rest // self.factor


class _TypedErrors(ModelMetaclass):
    """``Input(...)`` and the like raise ConfigError."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (of a metaclass)
        try:
            return super().__call__(*args, **kwargs)
        except ValidationError as error:
            raise explain(error, kwargs, cls.__name__, cast(type[BaseModel], cls)) from None


class _Named(_TypedErrors):
    """``Dim("batch", max=8)``. An ``__init__`` would raise for files too, without their line."""

    def __call__(cls, name: str = "", **values: Any) -> Any:  # noqa: N805
        return super().__call__(name=name, **values)


class Options(BaseModel, metaclass=_TypedErrors):
    model_config = Record.model_config

    def changed(self, **fields: Any) -> Self:
        return self.model_copy(update=fields)


class Section(Options):
    """A part of the configuration."""


class DistributedConfig(Section):
    """Several processes under torchrun, one rank each."""

    timeout: Annotated[Seconds, Field(gt=0)] = 60.0
    """How long ranks wait for one another, as in `30s`."""
    all_reduce_max_size: Bytes = 8 << 20
    """Largest tensor of the custom all-reduce, in units of `budget.memory`; NCCL takes larger ones.
    Ranks keep two buffers of this size.
    """
    table_rows: Count = 1 << 14
    """Captured all-reduces of a runner at most."""
    data_parallel_sync: Flag = False
    """Before each batch ranks agree on the largest padded size and the weakest mode, which they
    need if they run different batches and exchange data inside. In a plan: `--replicas` are ranks.
    """


class TrafficConfig(Section):
    """Synthetic traffic: Poisson arrivals, lognormal lengths. A file on the command line wins."""

    request_rate: Annotated[float, Field(strict=True, ge=0.001, le=1e6)]
    """Requests per second."""
    num_requests: BatchBound = 10_000
    """Requests to simulate."""
    prompt_median: BatchBound
    """Median tokens of a prompt."""
    prompt_p95: BatchBound
    """Their 95th percentile."""
    output_median: BatchBound
    """Median of generated tokens."""
    output_p95: BatchBound
    """Their 95th percentile."""
    lora_share: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0
    """Share of requests with a LoRA adapter."""
    num_adapters: Count | None = None
    """Distinct adapters, equally likely. Absent: lora.max_loras."""
    seed: CountOrZero = 0
    """Equal seeds give equal traffic."""

    @model_validator(mode="after")
    def _percentiles_ascend(self) -> TrafficConfig:
        for name in ("prompt", "output"):
            median = getattr(self, f"{name}_median")
            p95 = getattr(self, f"{name}_p95")
            if p95 < median:
                raise ValueError(
                    f"{name}_p95 is {p95}, which is below {name}_median = {median}; exchange the "
                    "two"
                )
        return self


class BudgetConfig(Section):
    """Limits of plans and captures."""

    memory: BytesToSpend | None = None
    """Device memory for graphs and static buffers: bytes, or with a unit (B, kB, MB, GB, KiB, MiB,
    GiB).
    """
    capture_time: SecondsToSpend | None = None
    """Time for captures and warm-ups: seconds, or with a unit (ms, s, min)."""
    max_graphs: Count | None = None
    """Graphs at most. Without traffic the largest sizes stay, and those that pad least."""
    reserve: Bytes | None = None
    """Device memory that captures leave free, in units of `memory`."""


Shape = Annotated[
    tuple[Annotated[int, Field(strict=True)] | str, ...],
    BeforeValidator(lambda value: [value] if isinstance(value, int | str) else value),
    WithJsonSchema({"anyOf": [DIMENSION, {"type": "array", "items": DIMENSION}]}),
]


class Dim(Section, metaclass=_Named):
    """A size of the batch that varies: rows, the length of texts, the height of pictures."""

    name: Annotated[str, Field(pattern=r"^([a-z_][a-z0-9_]*)?$")] = ""
    """Its name in shapes; in a file the key."""
    min: Count = 1
    """Smallest size."""
    max: BatchBound
    """Largest size with a graph, rounded up to multiple_of."""
    multiple_of: Count = 1
    """Capture sizes are multiples of it."""
    sizes: SizesOrLadder = None
    """Capture sizes, or a ladder's name. Absent: powers of two, times multiple_of."""

    if TYPE_CHECKING:

        def __init__(self, name: str = "", **values: Any) -> None: ...

    @model_validator(mode="after")
    def _in_bounds(self) -> Dim:
        if self.min > self.max:
            raise ValueError(
                f"min is {self.min}, which is above max = {self.max}; exchange the two"
            )
        for size in self.sizes if isinstance(self.sizes, tuple) else ():
            if not self.min <= size <= self.top or size % self.multiple_of:
                raise ValueError(
                    f"size {size} cannot be captured; {self.min} to {self.top} and multiples of "
                    f"{self.multiple_of} are allowed"
                )
        return self

    @property
    def top(self) -> int:
        return -(-self.max // self.multiple_of) * self.multiple_of


class Input(Section):
    """A tensor that the model reads as an argument, or from the forward context's metadata. In
    short `[shape, dtype, pad]`, as in `[[num_tokens, 8], float32, 0]`.
    """

    shape: Shape
    """Numbers, `up to 16` where tensors may be narrower (calls fill them with `pad`), names of
    `dims`, and one dimension of rows at most: `num_tokens`, `num_reqs + 1`, `2 * num_tokens`.
    """
    dtype: Annotated[DType, BeforeValidator(lambda value: str(value).removeprefix("torch."))]
    """Element type, by torch's name."""
    pad: Annotated[float | int | bool | Literal["last"], BeforeValidator(check_pad)]
    """Content of padding rows: a number, or `last` to repeat the last row (cumulative offsets)."""
    example: Annotated[
        float | int | Literal["normal", "arange", "spread"] | tuple[int, int] | None,
        BeforeValidator(check_example),
    ] = None
    """Values for bench: a number, `normal` (standard normal), `arange`, `spread` (offsets that
    spread num_tokens evenly over requests), or `[low, high]`: random, high excluded. Absent:
    `normal` for floating point, else pad.
    """

    @classmethod
    def like(
        cls, tensor: Any, rows: int = 0, *, pad: float | Literal["last"], symbol: str = "num_tokens"
    ) -> Input:
        """Declare tensors like this one, whose dimension ``rows`` counts ``symbol``. Raises
        ConfigError.
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
        symbols = []
        is_narrow = False
        for extent in self.extents:
            is_narrow |= extent.is_most
            if extent.symbol:
                symbols.append(extent.symbol)
            elif extent.offset < 1:
                raise ValueError("a dimension of an input must be at least 1, found 0")
        if sum(symbol in SYMBOLS for symbol in symbols) > 1:
            raise ValueError(
                f"only one dimension may count rows of the batch, found shape {list(self.shape)}"
            )
        if self.pad == "last" and (len(symbols) != 1 or is_narrow):
            raise ValueError(
                "pad: last needs a dimension that counts rows of the batch, and one alone"
            )
        if self.pad != "last" and not is_value_of(self.dtype, self.pad):
            raise ValueError(f"pad {self.pad} is not a value of dtype {self.dtype}")
        return self

    @property
    def extents(self) -> tuple[Extent, ...]:
        return tuple(map(Extent.parse, self.shape))

    @property
    def row_dim(self) -> int | None:
        """Index of the dimension that counts tokens or requests, if any."""
        rows = (dim for dim, extent in enumerate(self.extents) if extent.symbol in SYMBOLS)
        return next(rows, None)


def _from_short(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    if len(value) != 3 or isinstance(value[1], int):
        raise ValueError(
            f"found {value!r}, expected shape with rows first, dtype and pad, as in "
            '[["num_tokens", 8], "float32", 0]'
        )
    return dict(zip(("shape", "dtype", "pad"), value, strict=True))


_Declared = Annotated[
    Input, BeforeValidator(_from_short, json_schema_input_type=Input | tuple[Any, Any, Any])
]


class ModelConfig(Section):
    """The model that is captured."""

    target: str | None = None
    """`package.module:name` or `path/to/file.py:name`, a module or what returns the model, or
    `transformers`, a Hugging Face causal LM. Absent: given from Python.
    """
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the target."""
    output_rows: Symbol = "num_tokens"
    """What dimension 0 of each output counts; padding is cut there."""
    output_shapes: tuple[Shape, ...] | None = None
    """Shapes of the outputs, as for inputs; padding is cut from named dimensions. Needed if
    several dimensions vary.
    """


class CompilationConfig(Section):
    """The graphs that are captured, and how."""

    cudagraph_mode: Mode = CUDAGraphMode.FULL
    """FULL_DECODE_ONLY: mixed batches run eagerly. FULL_AND_PIECEWISE: mixed batches take
    PIECEWISE. AUTO: a capture times FULL, PIECEWISE, inductor and eager steps, and keeps the
    fastest.
    """
    cudagraph_capture_sizes: SizesOrLadder = None
    """Sizes in tokens, or a ladder's name. Absent: the vllm ladder, or the sizes of the first of
    `dims`.
    """
    boxes: tuple[tuple[Count, ...], ...] | None = None
    """Combinations of sizes in the order of `dims` (after num_tokens, if inputs count it). Absent:
    all.
    """
    max_cudagraph_capture_size: BatchBound | None = None
    """Largest capture size in tokens. Absent: min(2 * query length * max_num_seqs, 512), at most
    max_num_batched_tokens.
    """
    capture_policy: Literal["eager", "lazy", "adaptive"] = "eager"
    """eager: all keys at once. lazy: each when a batch first asks for it, at most one in a call.
    adaptive: all at once; `runner.replan()` exchanges them for keys that recent batches asked for.
    """
    pool: Literal["shared", "per_mode", "per_graph"] = "shared"
    """Graphs that share memory. shared: all of a runner. per_mode: those of a mode. per_graph:
    none; outputs last until their own graph's next replay.
    """
    cudagraph_num_of_warmups: CountOrZero | Literal["auto"] = "auto"
    """Eager runs of each key before its capture. auto: one of the first and of the smallest key of
    each mode, and of keys that need one (docs/concepts.md, Warm-ups). 0: of keys that need one.
    """
    cudagraph_copy_inputs: Flag = True
    """Calls copy tensors into static buffers. false: the caller writes into `runner.input_views`
    and passes those.
    """
    key_rules: Literal["vllm_v1", "vllm_v2"] = "vllm_v1"
    """Keys and dispatch of vLLM's model runner V1, or, for plans alone, of V2, the default of vLLM
    0.33.
    """
    cudagraph_specialize_lora: Flag = True
    """Capture graphs without adapters, too; false: one graph serves both. V2 ignores it."""
    splitting_ops: tuple[str, ...] | None = None
    """Operators kept out of PIECEWISE segments, such as `aten::matmul` (`@`) or `aten::slice`
    (`x[:, :4]`). Absent: PyTorch's attention operators and cgplan::attention; with piecewise:
    modules none.
    """
    splitting_modules: tuple[str, ...] = ()
    """Modules kept out of PIECEWISE segments, as in `layers.*.self_attn`. The capture breaks there,
    and at splitting_ops if given, without a trace.
    """
    piecewise: Literal["auto", "ops", "modules", "wrappers"] = "auto"
    """ops: a trace is split at splitting_ops. modules: the capture breaks at splitting_modules,
    splitting_ops, and functions under eager_break_during_capture. wrappers: the model holds
    CUDAGraphWrappers. auto: modules where these are given, or such functions are called and no
    splitting_ops are given; else ops.
    """
    compiler: Literal["eager", "inductor"] = "eager"
    """How segments run. inductor compiles each distinct one once, needs a GPU, and traces in every
    mode.
    """
    compile_shapes: Literal["auto", "dynamic", "static"] = "auto"
    """Sizes that a trace serves. dynamic: all; one row has another. static: one. auto: with
    inductor static for the sizes that matter most; else dynamic.
    """
    address_check: Annotated[
        Literal["off", "first", "always"],
        Off,
    ] = "always"
    """When addresses that graphs read are checked. always: each call, with changes of modules
    that Python reports. first: each graph's first replay.
    """
    state_copy: Bytes | None = None
    """Device memory, in units of `budget.memory`, for copies of state that warm-ups write and
    captures put back; host memory takes further ones. Absent: a quarter of what is free.
    """
    verify: Annotated[
        Literal["off", "first", "rarely", "always"],
        Off,
    ] = "first"
    """When replays are compared with the model's own code, for an eager step's time and memory.
    first: each graph's first replay, also with real rows as padding. rarely: replays 1, 2, 4, 8,
    ... off: `runner.verify(batch)` alone.
    """
    strict: Flag = False
    """Whether Python values that each run changes (a counter, a growing list), which replays do
    not, are an error, not a warning.
    """
    ignore: tuple[str, ...] = ()
    """Python values that each run may change, such as `model.calls`; `*` is one part."""
    debug: Flag = False
    """`verify: always`, addresses on each replay, and outputs that the next call fills with NaN."""
    audit: Annotated[
        Literal["off", "report", "error", "prove"],
        Off,
    ] = "off"
    """Whether captures look up each pointer's owner, operator and line, which takes time. error: a
    pointer into memory that is not the runner's is an error. prove: as error, after a second
    capture has shown which words are pointers.
    """
    attention_support: Attention = AttentionSupport.ALWAYS
    """Batches whose attention a FULL graph can hold."""
    outputs: Literal["borrow", "clone"] = "borrow"
    """borrow: outputs lie in graph memory, until the next replay of any graph in the pool. clone:
    outputs are copies.
    """
    hide_capture_from: tuple[Annotated[str, BeforeValidator(check_package)], ...] = (
        "transformers",
    )
    """Packages that get the answer no from `torch.cuda.is_current_stream_capturing()` in captures,
    unless their code then needs the host.
    """
    all_reduce: Literal["auto", "custom", "nccl"] = "auto"
    """custom: cgplan's kernels over registered graph buffers (on the CPU a slow stand-in). nccl:
    torch.distributed (gloo on the CPU). auto: custom on GPUs where it works, else nccl.
    """
    on_miss: Literal["eager", "error"] = "eager"
    """What becomes of a batch without a graph."""

    @property
    def is_lazy(self) -> bool:
        return self.capture_policy == "lazy"

    @property
    def segments_from(self) -> str:
        if self.piecewise != "auto":
            return self.piecewise
        return "modules" if self.splitting_modules else "ops"

    @property
    def address_policy(self) -> Literal["off", "first", "always"]:
        """``address_check``, and always in debug mode."""
        return "always" if self.debug else self.address_check

    @model_validator(mode="after")
    def _consistent(self) -> CompilationConfig:
        sizes = self.cudagraph_capture_sizes
        maximum = self.max_cudagraph_capture_size
        if isinstance(sizes, tuple) and maximum is not None and max(sizes) != maximum:
            raise ValueError(
                f"max_cudagraph_capture_size is {maximum}, but the largest of "
                f"cudagraph_capture_sizes is {max(sizes)}; remove one of the two, or set it to null"
            )
        return self


class SchedulerConfig(Section):
    """Bounds of the batches that the scheduler makes."""

    max_num_seqs: BatchBound = 256
    """Requests of the server's largest batch, or pictures where rows are pictures. Plans insure
    batches up to it.
    """
    max_num_batched_tokens: BatchBound = 8192
    """Tokens in one batch at most."""
    mixed_batches: Flag = True
    """Whether simulated batches mix prefill and decode, as in vLLM. false: prefill first, as in
    SGLang (chunked-prefill-size: max_num_batched_tokens).
    """


class LoRAConfig(Section):
    """LoRA adapters that a batch may use."""

    max_loras: Count
    """Distinct adapters in one batch at most; in a call one more stands for any number."""
    rank: Count = 16
    """Rank of the adapters."""
    specialize_active_lora: Flag = False
    """Capture a graph for each power of two of active adapters up to max_loras."""


class SpeculativeConfig(Section):
    """Speculative decoding."""

    num_speculative_tokens: CountOrZero = 0
    """Draft tokens of each request."""
    method: Literal["eagle", "eagle3", "mtp", "ngram", "draft_model"] | None = None
    """What drafts. With key_rules: vllm_v2 plans have the draft's graphs (eagle, eagle3, mtp)."""
    varlen_decode: Flag = False
    """Whether decode graphs take 1 to 1 + num_speculative_tokens tokens a request, as vLLM's
    adaptive verification does (key_rules: vllm_v2).
    """
    accepted_tokens: Annotated[float, Field(strict=True, ge=1)] | None = None
    """Mean tokens of a request in a simulated decode step. Absent: all drafts are accepted."""

    @property
    def has_draft_graphs(self) -> bool:
        """Whether vLLM's model runner V2 captures graphs of a draft model."""
        return self.num_speculative_tokens > 0 and self.method in ("eagle", "eagle3", "mtp")

    @model_validator(mode="after")
    def _not_more_than_drafted(self) -> SpeculativeConfig:
        most = 1 + self.num_speculative_tokens
        if self.accepted_tokens is not None and not self.accepted_tokens <= most:
            raise ValueError(
                f"accepted_tokens is {self.accepted_tokens:g}, but with "
                f"{self.num_speculative_tokens} draft tokens a request advances by {most} at most"
            )
        return self


class ReportConfig(Section):
    """Sizes and repeats of measurements, and names for profilers."""

    sizes: tuple[Count, ...] | None = None
    """Batch sizes to measure, in tokens. Absent: bench takes all captured ones, `cudagraph_mode:
    AUTO` and `cgplan doctor` the smallest, the largest, and that of all requests.
    """
    repeats: Count = 30
    """Timed calls of each size and way of running."""
    warmups: CountOrZero = 3
    """Untimed calls before them."""
    nvtx: Flag = False
    """Make each call of a runner an NVTX range."""


def _named(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    found = {}
    for name, dim in value.items():
        if isinstance(dim, Mapping) and not all(isinstance(key, str) for key in dim):
            raise ValueError(f"dims.{name} has keys that are not text: {', '.join(map(repr, dim))}")
        found[name] = {**dim, "name": name} if isinstance(dim, Mapping) else dim
    return found


class Config(Section):
    """A YAML file. `model` and `inputs` may be absent if nothing is captured."""

    model: ModelConfig | None = None
    device: Device = "auto"
    """`auto` (a GPU if any), `cuda`, `cuda:N`, or `cpu` (the tape backend)."""
    dims: Annotated[dict[str, Dim], BeforeValidator(_named)] = Field(default_factory=dict)
    """Sizes of a batch that vary. The first one stands for num_tokens if no input counts that or
    num_reqs.
    """
    inputs: dict[str, _Declared] = Field(default_factory=dict)
    """Arguments of the model's forward, by name."""
    metadata: dict[str, _Declared] = Field(default_factory=dict)
    """Tensors that the model reads from the forward context, by name."""
    compilation: CompilationConfig = Field(default_factory=CompilationConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    lora: LoRAConfig | None = None
    speculative: SpeculativeConfig = Field(default_factory=SpeculativeConfig)
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    report: ReportConfig = Field(default_factory=ReportConfig)
    traffic: TrafficConfig | None = None
    budget: BudgetConfig = Field(default_factory=BudgetConfig)

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, data: Any) -> Any:
        """A section without keys is null in YAML."""
        if not isinstance(data, dict):
            return data
        return {
            name: section
            for name, section in data.items()
            if section is not None or name not in cls.model_fields
        }

    def with_values(
        self,
        section: str,
        **values: Any,
    ) -> Config:
        """The same with other values in one section, which are valid."""
        return self.changed(**{section: getattr(self, section).changed(**values)})

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        twice = sorted(set(self.inputs) & set(self.metadata))
        if twice:
            raise ValueError(f"{twice[0]!r} is both an input and metadata")
        reserved = sorted(WORDS_OF_A_CALL & set(self.tensors))
        if reserved:
            raise ValueError(
                f"{reserved[0]!r} is a word of the runner's call and cannot name an input"
            )
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
                    f"input {name!r} has {first!r} twice; the first name of `dims` counts rows: "
                    "declare another before it, such as batch, or write num_tokens in the shape"
                )
        shapes = self.model.output_shapes if self.model else None
        for index, shape in enumerate(shapes or ()):
            self._symbols_of(f"output {index}", map(Extent.parse, shape))
        if others and self.tensors and shapes is None:
            raise ValueError(
                f"{' and '.join(self.dim_names)} vary: write model.output_shapes, one for each "
                f"output; in Python cgplan.capture(..., output_shapes=[['{first}', 10]])"
            )
        self._check_boxes()
        if self.traffic and self.traffic.lora_share > 0 and self.lora is None:
            raise ValueError(
                f"traffic.lora_share is {self.traffic.lora_share:g}, but there is no `lora` "
                "section; add one, such as `lora: {max_loras: 4}`"
            )
        return self

    def _symbols_of(self, where: str, extents: Iterable[Extent]) -> list[str]:
        allowed = (*SYMBOLS, *self.dims)
        symbols = [extent.symbol for extent in extents if extent.symbol is not None]
        for symbol in symbols:
            if symbol not in allowed:
                hint = did_you_mean(symbol, allowed, " (did you mean {!r}?)")
                hint = hint or f": known are {', '.join(allowed)}"
                raise ValueError(
                    f"{where} has a dimension {symbol!r}, which `dims` does not declare{hint}"
                )
        return symbols

    def _check_boxes(self) -> None:
        names = self.dim_names
        boxes = self.compilation.boxes or ()
        for box in boxes:
            for name, size in zip(names, box, strict=False):
                if name in self.dims and size > self.dims[name].top:
                    raise ValueError(
                        f"compilation.boxes: {size} is above the max of {name}, "
                        f"{self.dims[name].top}"
                    )
        first = names[0]
        if first in self.dims and self.compilation.max_cudagraph_capture_size is not None:
            raise ValueError(f"max_cudagraph_capture_size counts tokens; write dims.{first}.max")
        widths = {len(box) for box in boxes} - {len(names)}
        if widths or (boxes and not self.dims):
            raise ValueError(
                f"compilation.boxes has sizes of {', '.join(names)} each, in this order"
            )

    @property
    def tensors(self) -> dict[str, Input]:
        return {**self.inputs, **self.metadata}

    @property
    def dim_names(self) -> tuple[str, ...]:
        """Names of the sizes in a descriptor's ``box``."""
        if not self.dims:
            return ("num_tokens",)
        counts_rows = any(spec.row_dim is not None for spec in self.tensors.values())
        return ("num_tokens", *self.dims) if counts_rows else tuple(self.dims)

    def shape_at(self, shape: tuple[int | str, ...], sizes: Sequence[int]) -> tuple[int | str, ...]:
        """A shape in num_tokens and num_reqs, for these sizes of the other dimensions."""
        first, *others = self.dim_names
        at = dict(zip(others, sizes, strict=True))
        found = []
        for length in shape:
            extent = Extent.parse(length)
            if extent.symbol in at:
                length = extent.at(at)
            elif extent.symbol == first:
                length = str(length).replace(first, "num_tokens")
            found.append(length)
        return tuple(found)

    def tensors_at(self, sizes: Sequence[int] = ()) -> dict[str, Input]:
        """Inputs and metadata with shapes of ``shape_at``."""
        tensors = self.tensors
        if not self.dims:
            return tensors
        found = {}
        for name, spec in tensors.items():
            shape = self.shape_at(spec.shape, sizes)
            found[name] = spec.changed(shape=shape)
        return found

    @property
    def query_len(self) -> int:
        """Tokens of each request in uniform decode: 1 + num_speculative_tokens."""
        return 1 + self.speculative.num_speculative_tokens


Path_ = tuple[str | int, ...]
Places = Mapping[Path_, str]  # ``line 12``, or the option that gave a value
NOWHERE: Places = MappingProxyType({})


def explain(
    error: ValidationError,
    data: Any,
    source: str,
    root: type[BaseModel],
    places: Places = NOWHERE,
) -> ConfigError:
    """A message for each key; ``source`` names the file or class of ``data``."""
    by_path = grouped((_real_path(detail, data), detail) for detail in error.errors())
    messages = []
    is_unknown = False
    for path, details in by_path.items():
        kinds = {detail["type"] for detail in details}
        is_unknown |= "extra_forbidden" in kinds
        below = [other for other in by_path if other != path and other[: len(path)] == path]
        if "value_error" in kinds or not below:
            message = _message(
                path,
                details,
                root,
                places,
            )
            messages.append(message)
    message = messages[0]
    if len(messages) > 1:
        message = "\n  - ".join((f"{source}:", *messages))
    elif not message.startswith("--"):
        message = f"{source}: {message}"
    remedy = "Correct the value; `cgplan schema --format markdown` describes it."
    if message.startswith("--"):
        remedy = "Give the option a value as expected; -h lists the options."
    if is_unknown:
        remedy = "Correct or remove the key; `cgplan schema --format markdown` lists all keys."
    if re.search(r"\bpad(: found|' is missing)", message):
        remedy = "Give pad=0, or the value that padding rows may hold."
    if "dims" in message:
        remedy += (
            ' A dimension is declared as dims={"batch": {"max": 16, "sizes": [1, 4, 16]}} in '
            "Python, and as dims: {batch: {max: 16, sizes: [1, 4, 16]}} in a file."
        )
    return ConfigError(message, remedy=remedy)


def first_problem(error: ValidationError) -> str:
    """Pydantic's first complaint, as ``records.0.mode: Field required``."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    what = _problem(first)
    return f"{where}: {what}" if where else what


def _problem(detail: ErrorDetails) -> str:
    return detail["msg"].removeprefix("Value error, ")


def _real_path(detail: ErrorDetails, data: Any) -> Path_:
    """pydantic's location without the names of union members."""
    real: list[str | int] = []
    for part in detail["loc"]:
        if isinstance(data, dict):
            is_inside = part in data
            if not is_inside and detail["type"] == "missing":
                return (*real, part)
        else:
            is_inside = isinstance(data, list | tuple) and part in range(len(data))
        if is_inside:
            real.append(part)
            data = data[part]
    return tuple(real)


def _message(
    path: Path_,
    details: Sequence[ErrorDetails],
    root: type[BaseModel],
    places: Places,
) -> str:
    where = ""
    key = ".".join(map(str, path))
    for depth in range(len(path)):
        place = places.get(path[: depth + 1], "")
        if place.startswith("line "):
            where = f"{place}: "
        elif place == "--set":
            where = "--set "
        elif place.startswith("--"):  # it stands for its one key
            where = ""
            key = place
    named = f"{where}{key}: " if key else where
    for detail in details:
        if detail["type"] == "value_error":
            return f"{named}{_problem(detail)}"
    detail = details[0]
    if detail["type"] == "extra_forbidden":
        return f"{where}unknown key {key!r}{_nearest(path, root)}"
    if detail["type"] == "missing":
        return f"{where}{key!r} is missing"
    words = [detail["msg"].removeprefix("Input should be ") for detail in details]
    allowed = " or ".join(dict.fromkeys(words)).replace("valid tuple", "list")
    shown = textwrap.shorten(repr(details[0]["input"]), 200, placeholder="...")
    return f"{named}found {shown}, expected {allowed}"


def _nearest(path: Path_, root: type[BaseModel]) -> str:
    *parents, name = path
    model = root
    for parent in parents:  # a name in a mapping of sections is no field
        if parent in model.model_fields:
            field = model.model_fields[str(parent)]
            model = _model_in(field.annotation) or model
    fields = list(model.model_fields)
    same_end = [field for field in fields if field.endswith(f"_{name}")]
    for near in (str(name), *same_end):
        hint = did_you_mean(near, fields, " (did you mean {!r}?)")
        if hint:
            return hint
    for section, info in root.model_fields.items():
        inside = _model_in(info.annotation)
        is_mapping = "dict" in str(info.annotation)
        if inside is not None and not is_mapping and name in inside.model_fields:
            return f" (it belongs under {section!r})"
    return f" (allowed here: {', '.join(fields)})"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """As in ``dict[str, Input]`` or ``LoRAConfig | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in typing.get_args(annotation):
        found = _model_in(inner)
        if found is not None:
            return found
    return None
