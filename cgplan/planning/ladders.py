"""Ladders: rules that yield capture sizes. Each takes the largest size and returns the sizes up to it, ascending."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType


def vllm(maximum: int) -> tuple[int, ...]:
    """1, 2, 4, then 8..255 by 8, then from 256 by 16. The maximum itself only if it is on the stride."""
    return tuple(s for s in (1, 2, 4, *range(8, 256, 8), *range(256, maximum + 1, 16)) if s <= maximum)


def sglang(maximum: int) -> tuple[int, ...]:
    """SGLang's decode ladder: 1, 2, 4, 8, 12, 16..256 by 8, 272..496 by 16, from 512 by 32, and the maximum."""
    steps = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 497, 16), *range(512, maximum + 1, 32))
    return _up_to(maximum, steps)


def trtllm(maximum: int) -> tuple[int, ...]:
    """TensorRT-LLM's: 1, 2, 4, 8..128 by 8, then by 64, and the maximum."""
    return _up_to(maximum, (1, 2, 4, *range(8, 129, 8), *range(192, maximum + 1, 64)))


def powers_of_two(maximum: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... and the maximum."""
    return _up_to(maximum, tuple(1 << k for k in range(maximum.bit_length())))


def _up_to(maximum: int, steps: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({s for s in steps if s < maximum} | {maximum}))


LADDERS: Mapping[str, Callable[[int], tuple[int, ...]]] = MappingProxyType(
    {"vllm": vllm, "sglang": sglang, "trtllm": trtllm, "powers_of_two": powers_of_two}
)
