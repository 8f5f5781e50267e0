"""How far two outputs lie apart, and whether rounding explains it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

# of the largest value; COARSE for other dtypes
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 2e-3,
    torch.float16: 1e-2,
}
COARSE = 5e-2  # half precision, TensorFloat32
_STEPS = 256  # of the precision, for sums in another order
_HUGE = 1e30  # values of masks


@dataclass(frozen=True)
class Difference:
    """Of one part of two outputs.

    Attributes:
        largest: Absolute; None where they cannot be compared.
        limit: What rounding explains; 0 for whole numbers.
        share: Of wrong elements.
    """

    where: str
    largest: float | None
    limit: float = 0.0
    is_wrong: bool = True
    share: float = 1.0

    def __str__(self) -> str:
        if self.largest is None:
            return self.where
        return (
            f"{self.where}, the largest deviation is {self.largest:.3g}, allowed are "
            f"{self.limit:.3g}"
        )


def deviation(found: Any, wanted: Any) -> float | None:
    """Largest absolute difference of two pytrees; NaN equals NaN. Infinity where only one side has
    a NaN or an infinity, None without a tensor or where something else differs.
    """
    largest = None
    for difference in differences(found, wanted):
        if difference.largest is None:
            return None
        largest = max(largest or 0.0, difference.largest)
    return largest


def differences(
    found: Any,
    wanted: Any,
    *,
    is_coarse: bool = False,
) -> Iterator[Difference]:
    """Of each tensor, and of each other part that differs. ``is_coarse``: at least ``COARSE``, and
    half of the whole numbers may differ.
    """
    leaves, spec = tree_flatten(found)
    others, other_spec = tree_flatten(wanted)
    if spec != other_spec:
        yield Difference("the outputs have different structures", None)
        return
    for index, (one, other) in enumerate(zip(leaves, others, strict=True)):
        where = f"output {index}"
        kind = _kind(one)
        other_kind = _kind(other)
        if kind != other_kind:
            yield Difference(f"{where}, {kind} and {other_kind}", None)
        elif isinstance(one, Tensor):
            yield compare(where, one, other, is_coarse=is_coarse)
        elif not _is_same(one, other):
            yield Difference(f"{where} ({one!r:.100}, not {other!r:.100})", None)


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {list(leaf.shape)}"
    return "no tensor"


def compare(
    where: str,
    found: Tensor,
    wanted: Tensor,
    *,
    is_coarse: bool = False,
    before: Tensor | None = None,
) -> Difference:
    """Of one shape and dtype. Rounding goes by the largest value that differs; of state, by its
    largest change since ``before``, unless it counts.
    """
    if not found.numel():
        return Difference(where, 0.0, is_wrong=False)
    between = apart(found, wanted)
    largest = float(between.max())
    is_whole = not (wanted.is_floating_point() or wanted.is_complex())
    is_counted = is_whole
    if before is not None and not is_whole:
        change = apart(wanted, before)
        is_counted = bool(change.any()) and torch.equal(change, change.round())
    limit = 0.0
    most = 0.0
    if is_counted and is_coarse:
        most = 0.5  # rounding may decide
    if not is_counted:
        tolerance = TOLERANCES.get(wanted.dtype, COARSE)
        if is_coarse:
            tolerance = max(tolerance, COARSE)
        size = _size_of(wanted, between)
        limit = tolerance * size
        if before is not None and not is_coarse:
            step = _STEPS * torch.finfo(wanted.dtype).eps * size
            limit = min(limit, tolerance * _size_of(change, between) + step)
    wrong = between > limit
    share = int(wrong.count_nonzero()) / wrong.numel()
    return Difference(
        where,
        largest,
        limit,
        is_wrong=share > most,
        share=share,
    )


def _size_of(values: Tensor, between: Tensor) -> float:
    """The largest of those that differ, at least the mean."""
    wide = torch.complex128 if values.is_complex() else torch.float64  # 8 bits have no abs
    sizes = values.to(wide).abs().nan_to_num(0, 0, 0)
    sizes = sizes.masked_fill(sizes > _HUGE, 0)
    largest = sizes.masked_fill(between == 0, 0).max()
    return float(torch.maximum(largest, sizes.mean()))


def is_equal(one: Any, other: Any) -> bool:
    """Without rounding; NaN equals NaN."""
    return all(difference.largest == 0 for difference in differences(one, other))


def _is_same(one: Any, other: Any) -> bool:
    kind: Any = type(one)
    by_identity = kind.__eq__ is object.__eq__  # it equals none of another run
    if type(other) is not kind:
        return False
    if by_identity or one == other:
        return True
    return bool(one != one and other != other)


def apart(one: Tensor, other: Tensor) -> Tensor:
    """Absolute differences; NaN equals NaN."""
    is_whole = not (one.is_floating_point() or one.is_complex())
    is_same = one == other
    dtype = torch.complex128 if one.is_complex() else torch.float64
    one = one.to(dtype)
    other = other.to(dtype)
    is_same |= one.isnan() & other.isnan()
    found = (one - other).abs()
    if is_whole:  # float64 rounds large ones
        found = found.clamp(min=1)
    found = found.masked_fill(is_same, 0.0)
    return found.nan_to_num(math.inf, posinf=math.inf)
