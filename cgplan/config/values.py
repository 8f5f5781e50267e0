"""Values of records and configurations, and their parsers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
)

from cgplan.errors import ConfigError
from cgplan.modes import AttentionSupport, CUDAGraphMode

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
LadderName = Literal["vllm", "sglang", "trtllm", "powers_of_two"]
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
            amount: float = value
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
