"""Values of the configuration: what each kind of field accepts, and what it says about anything else."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from cgplan.errors import ConfigError
from cgplan.modes import AttentionSupport, CUDAGraphMode

DType = Literal[
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "bool",
]  # fmt: skip
LadderName = Literal["vllm", "sglang", "trtllm", "powers_of_two"]
Symbol = Literal["num_tokens", "num_reqs"]


def enum_by_name(enum: type[CUDAGraphMode] | type[AttentionSupport]) -> Any:
    """Annotation for an enum that YAML writes by name, in any case."""

    def parse(value: object) -> object:
        try:
            return enum.parse(value)
        except ConfigError as error:  # pydantic collects ValueErrors and adds the key's path
            raise ValueError(f"{error.message}. {error.remedy}") from None

    names = [member.name for member in enum]
    return Annotated[
        enum,
        BeforeValidator(parse),
        PlainSerializer(lambda member: member.name, return_type=str),
        WithJsonSchema({"enum": names, "type": "string"}),
    ]


def mode_by_name(value: object) -> CUDAGraphMode:
    """Mode by name; a ValueError, which pydantic collects, for any other."""
    try:
        return CUDAGraphMode.parse(value)
    except ConfigError as error:
        raise ValueError(error.message) from None


def dtype_name(value: object) -> object:
    """``torch.float16`` and ``float16`` alike; torch itself is not needed to plan."""
    return str(value).removeprefix("torch.") if value is not None else value


def strict_size(value: object) -> object:
    """A capture size as YAML gives it: a whole number of at least 1, and no text or truth value. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"a capture size must be a whole number, found {value!r}")
    if value < 1:
        raise ValueError(f"a capture size must be at least 1, found {value}")
    return value


DEVICE = r"auto|cpu|cuda(:\d+)?"
DIMENSION = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
CaptureSize = Annotated[int, Field(ge=1), BeforeValidator(strict_size)]
Count = Annotated[int, Field(strict=True, ge=1)]
BatchBound = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]  # a ladder lists every size up to it
CountOrZero = Annotated[int, Field(strict=True, ge=0)]
Flag = Annotated[bool, Field(strict=True)]


def check_pad(value: object) -> object:
    """A padding value: a number, a truth value, or `last`. Raises ValueError."""
    if value != "last" and not isinstance(value, int | float):
        raise ValueError(f"found {value!r}, expected a number, true, false, or `last`")
    return value


def check_example(value: object) -> object:
    """An example: a number, one of the words, or [low, high]. Raises ValueError."""
    pair = isinstance(value, list | tuple) and len(value) == 2 and all(type(v) is int for v in value)
    if value not in (None, "normal", "arange", "spread") and not isinstance(value, int | float) and not pair:
        raise ValueError(f"found {value!r}, expected a number, `normal`, `arange`, `spread`, or [low, high]")
    if pair and value[0] >= value[1]:  # type: ignore[index]
        raise ValueError(f"found {value!r}: low must be below high")
    return value


def check_device(value: object) -> object:
    """A device by torch's name, or `auto`. Raises ValueError."""
    if not isinstance(value, str) or not re.fullmatch(DEVICE, value):
        raise ValueError(f"found {value!r}, expected auto, cpu, cuda, or cuda:N")
    return value


def check_sizes(value: object) -> object:
    """Capture sizes: a ladder's name, or a list that is not empty. Raises ValueError."""
    if isinstance(value, str):
        names = get_args(LadderName)
        if value not in names:
            raise ValueError(f"unknown ladder {value!r}; choose one of {', '.join(names)}, or give a list of sizes")
    elif isinstance(value, list | tuple) and not value:
        raise ValueError("the list of capture sizes is empty; leave the key out for the vllm ladder")
    return value


LARGEST = {  # torch.finfo(...).max
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": 3.4028234663852886e38,
    "float64": 1.7976931348623157e308,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}


def is_value_of(dtype: str, value: float) -> bool:
    """Whether a tensor of that dtype can hold the number, rounded where it is floating point."""
    if dtype.startswith(("float", "bfloat")):
        return (not isinstance(value, int) and not math.isfinite(value)) or abs(value) <= LARGEST[dtype]
    if dtype == "bool":
        return value in (0, 1)
    bits, signed = int(dtype.removeprefix("u").removeprefix("int")), not dtype.startswith("u")
    low, high = (-(1 << bits - 1), 1 << bits - 1) if signed else (0, 1 << bits)
    return (isinstance(value, int) or math.isfinite(value)) and value == int(value) and low <= value < high
