"""CUDA graph modes, and the key of a graph."""

from __future__ import annotations

from enum import Enum, IntEnum
from math import prod
from typing import NamedTuple, Self

from cgplan.errors import ConfigError, did_you_mean


class _Named:
    @classmethod
    def parse(cls, value: object) -> Self:
        """Member by name, in any case. Raises ConfigError."""
        if isinstance(value, cls):
            return value
        members: dict[str, Self] = dict(cls.__members__)  # type: ignore[attr-defined]
        kind = _SETTINGS[cls.__name__]
        choose = f"Choose one of {', '.join(members)}."
        if value is None:  # an empty key in YAML
            raise ConfigError(f"{kind} has no value", remedy=choose)
        name = str(value).strip().upper()
        if name in members:
            return members[name]
        raise ConfigError(f"unknown {kind} {value!r}", remedy=did_you_mean(name, members) + choose)

    def __str__(self) -> str:
        return self.name  # type: ignore[attr-defined,no-any-return]


_SETTINGS = {
    "CUDAGraphMode": "cudagraph_mode",
    "AttentionSupport": "attention_support",
}


class CUDAGraphMode(_Named, Enum):
    """The graphs that run a batch: a runtime mode, or one of uniform decode and one of mixed
    batches; AUTO, which measuring decides, is planned as FULL.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)
    AUTO = "AUTO"

    def separate_routine(self) -> bool:
        """Whether uniform decode has graphs of its own."""
        return isinstance(self.value, tuple)

    def decode_mode(self) -> CUDAGraphMode:
        """Runtime mode of uniform decode."""
        return CUDAGraphMode(self.value[0]) if isinstance(self.value, tuple) else self

    def mixed_mode(self) -> CUDAGraphMode:
        """Runtime mode of mixed batches."""
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self

    def has_mode(self, mode: CUDAGraphMode) -> bool:
        """Whether some batches run in this runtime mode."""
        return mode in (self.decode_mode(), self.mixed_mode())


for _mode in CUDAGraphMode:
    _has_decode = _mode.decode_mode() is not CUDAGraphMode.NONE
    assert _has_decode or _mode.mixed_mode() is CUDAGraphMode.NONE, (
        f"{_mode}: graphs of mixed batches serve uniform decode, too"
    )

RUNTIME_MODES = (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)


class AttentionSupport(_Named, IntEnum):
    """The batches whose attention a graph can hold."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class BatchDescriptor(NamedTuple):
    """A batch as a graph sees it; with the runtime mode the graph's key, which each replay hashes.

    Attributes:
        num_tokens: Rows, padded to a capture size.
        num_reqs: Requests, padded; None: any number (PIECEWISE, eager).
        uniform: Whether each request has ``1 + num_speculative_tokens`` tokens.
        num_active_loras: Distinct adapters; 0 without LoRA.
        sizes: Of ``Config.dim_names`` after the first, padded.
        max_query_len: Tokens of a request at most; None: any number.
    """

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0
    sizes: tuple[int, ...] = ()
    max_query_len: int | None = None

    @property
    def box(self) -> tuple[int, ...]:
        """The size in each dimension, rows first."""
        return (self.num_tokens, *self.sizes)

    @property
    def elements(self) -> int:
        """The product of the sizes."""
        return self.num_tokens * prod(self.sizes)

    @property
    def size(self) -> str:
        """``8``; with more dimensions ``8x128``."""
        return "x".join(map(str, self.box))

    @property
    def uniform_query_len(self) -> int | None:
        """Tokens of each request in a uniform batch, else None."""
        if not self.uniform or not self.num_reqs:
            return None
        return self.num_tokens // self.num_reqs

    def __str__(self) -> str:
        parts = [f"size={self.size}"]
        if self.num_reqs is not None:
            parts.append(f"num_reqs={self.num_reqs}")
        if self.uniform:
            parts.append("uniform")
        if self.max_query_len is not None:
            parts.append(f"max_query_len={self.max_query_len}")
        if self.has_lora:
            parts.append(f"num_active_loras={self.num_active_loras}")
        return " ".join(parts)


Key = tuple[CUDAGraphMode, BatchDescriptor]  # of one graph, FULL or PIECEWISE
