"""How far two outputs of a model lie apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten


def deviation(found: Any, wanted: Any) -> float | None:
    """Largest absolute difference of two outputs, of which any may be nested tuples, lists and dicts of tensors.

    Returns:
        0.0 where all tensors are equal (NaN equals NaN), infinity where only one side has a NaN or an infinity. None
        where the outputs cannot be compared: their structures, shapes, dtypes or values beside tensors differ, or
        neither holds a tensor.
    """
    largest = [difference for _, difference in differences(found, wanted)]
    return None if None in largest else max(map(float, largest), default=None)  # type: ignore[arg-type]


def differences(found: Any, wanted: Any) -> Iterator[tuple[str, float | None]]:
    """Of each tensor of two outputs, as for ``deviation``, the largest difference, in words and as a number; None for a
    part that cannot be compared.
    """
    (leaves, spec), (others, other_spec) = tree_flatten(found), tree_flatten(wanted)
    if spec != other_spec:
        yield "the outputs have different structures", None
        return
    for index, (one, other) in enumerate(zip(leaves, others, strict=True)):
        kinds = [f"{t.dtype} {list(t.shape)}" if isinstance(t, Tensor) else "no tensor" for t in (one, other)]
        if kinds[0] != kinds[1]:
            yield f"output {index}, {kinds[0]} and {kinds[1]}", None
        elif isinstance(one, Tensor):
            largest = largest_difference(one, other)
            yield f"output {index}, the largest deviation is {largest:.3g}", largest
        elif not _is_same(one, other):
            yield f"output {index}, {one!r:.100} and {other!r:.100}", None


def _is_same(one: Any, other: Any) -> bool:
    kind: Any = type(one)
    by_identity = kind.__eq__ is object.__eq__  # such an object equals none that another run made
    return type(other) is kind and (by_identity or bool(one == other or (one != one and other != other)))


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Largest absolute difference of two tensors of one shape; NaN equals NaN, and nothing else."""
    return float(apart(one, other).max()) if one.numel() else 0.0


def apart(one: Tensor, other: Tensor) -> Tensor:
    """Absolute differences, as in ``largest_difference``, of each element."""
    dtype = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(dtype), other.to(dtype)
    found = (one - other).abs().masked_fill(one.isnan() & other.isnan() | (one == other), 0.0)
    return found.nan_to_num(math.inf, posinf=math.inf)
