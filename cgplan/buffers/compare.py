"""How far two outputs of a model lie apart."""

from __future__ import annotations

import math
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
    (leaves, spec), (others, other_spec) = tree_flatten(found), tree_flatten(wanted)
    if spec != other_spec or not all(map(_is_alike, leaves, others)):
        return None
    pairs = [(a, b) for a, b in zip(leaves, others, strict=True) if isinstance(a, Tensor)]
    return max((largest_difference(a, b) for a, b in pairs), default=None)


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Largest absolute difference of two tensors of one shape; NaN equals NaN, and nothing else."""
    dtype = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(dtype), other.to(dtype)
    apart = (one - other).abs().masked_fill(one.isnan() & other.isnan() | (one == other), 0.0)
    return float(apart.nan_to_num(math.inf, posinf=math.inf).max()) if apart.numel() else 0.0


def _is_alike(one: Any, other: Any) -> bool:
    """Whether two leaves of outputs can be compared: tensors of one shape and dtype, or equal values of one class."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.shape, one.dtype) == (other.shape, other.dtype)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return type(one) is type(other) and bool(one == other or (one != one and other != other))
