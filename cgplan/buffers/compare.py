"""How far two outputs of a model lie apart, and whether rounding explains it: the one comparison of
the package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

# Of the largest value, for numbers that other kernels computed; for dtypes that are not here as for
# half precision.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-3, torch.float16: 1e-2}
COARSE = 5e-2  # where something was computed in half precision or in TensorFloat32
_STEPS = 256  # of the dtype's precision at a value, by which sums in another order may differ
_HUGE = 1e30  # values of masks, which tell nothing of the size of the others


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one part of two outputs.

    Attributes:
        where: The part, in words.
        largest: The largest absolute difference; None where the parts cannot be compared.
        limit: What rounding explains; 0 for whole numbers.
        is_wrong: Whether it is more than that.
        share: The part of the elements for which it is.
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
    """Largest absolute difference of two outputs, of which any may be nested tuples, lists and
    dicts of tensors.

    Returns:
        0.0 where all tensors are equal (NaN equals NaN), infinity where only one side has a NaN or
        an infinity. None where the outputs cannot be compared: their structures, shapes, dtypes or
        values beside tensors differ, or neither holds a tensor.
    """
    largest = [difference.largest for difference in differences(found, wanted)]
    return None if None in largest else max(map(float, largest), default=None)  # type: ignore[arg-type]


def differences(found: Any, wanted: Any, *, is_coarse: bool = False) -> Iterator[Difference]:
    """Of each tensor of two outputs, and of each other part that differs. ``is_coarse``: the
    tolerance is ``COARSE`` at least, and up to half of the whole numbers may differ.
    """
    (leaves, spec), (others, other_spec) = tree_flatten(found), tree_flatten(wanted)
    if spec != other_spec:
        yield Difference("the outputs have different structures", None)
        return
    for index, (one, other) in enumerate(zip(leaves, others, strict=True)):
        kinds = [
            f"{t.dtype} {list(t.shape)}" if isinstance(t, Tensor) else "no tensor"
            for t in (one, other)
        ]
        if kinds[0] != kinds[1]:
            yield Difference(f"output {index}, {kinds[0]} and {kinds[1]}", None)
        elif isinstance(one, Tensor):
            yield compare(f"output {index}", one, other, is_coarse=is_coarse)
        elif not _is_same(one, other):
            yield Difference(f"output {index}, {one!r:.100} and {other!r:.100}", None)


def compare(
    where: str,
    found: Tensor,
    wanted: Tensor,
    *,
    is_coarse: bool = False,
    before: Tensor | None = None,
) -> Difference:
    """The difference of two tensors of one shape and dtype. Rounding goes by the largest value that
    differs; of state, that was ``before``, by the largest change, and changes by whole numbers are
    counts, which do not round.
    """
    if not found.numel():
        return Difference(where, 0.0, is_wrong=False)
    between = apart(found, wanted)
    largest = float(between.max())
    is_float = wanted.is_floating_point() or wanted.is_complex()
    if not is_float or (before is not None and _counts(before, wanted)):
        share = int(between.count_nonzero()) / between.numel()
        most = 0.5 if is_coarse else 0.0  # rounding may decide which of them an element is
        return Difference(where, largest, is_wrong=share > most, share=share)
    tolerance = max(TOLERANCES.get(wanted.dtype, COARSE), COARSE if is_coarse else 0.0)
    limit = tolerance * _size_of(wanted, between)
    if before is not None and not is_coarse:
        step = _STEPS * torch.finfo(wanted.dtype).eps * _size_of(wanted, between)
        limit = min(limit, tolerance * _size_of(apart(wanted, before), between) + step)
    share = int((between > limit).count_nonzero()) / between.numel()
    return Difference(where, largest, limit, is_wrong=share > 0, share=share)


def _counts(before: Tensor, after: Tensor) -> bool:
    """Whether numbers changed, and each by a whole number."""
    change = apart(after, before)
    return bool(change.any()) and torch.equal(change, change.round())


def _size_of(values: Tensor, between: Tensor) -> float:
    """The largest of those that differ, or their mean where that is larger."""
    wide = torch.complex128 if values.is_complex() else torch.float64  # 8 bits have no abs
    sizes = values.to(wide).abs().nan_to_num(0, 0, 0)
    sizes = sizes.masked_fill(sizes > _HUGE, 0)
    return float(torch.maximum(sizes.masked_fill(between == 0, 0).max(), sizes.mean()))


def is_equal(one: Any, other: Any) -> bool:
    """Whether two outputs are equal, without rounding; NaN equals NaN."""
    return all(difference.largest == 0 for difference in differences(one, other))


def _is_same(one: Any, other: Any) -> bool:
    kind: Any = type(one)
    by_identity = kind.__eq__ is object.__eq__  # such an object equals none that another run made
    return type(other) is kind and (
        by_identity or bool(one == other or (one != one and other != other))
    )


def apart(one: Tensor, other: Tensor) -> Tensor:
    """Absolute differences of each element; NaN equals NaN, and nothing else."""
    is_whole = not (one.is_floating_point() or one.is_complex())
    is_same = one == other
    dtype = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(dtype), other.to(dtype)
    found = (one - other).abs().masked_fill(one.isnan() & other.isnan() | is_same, 0.0)
    if is_whole:  # float64 rounds large ones
        found = found.clamp(min=1).masked_fill(is_same, 0.0)
    return found.nan_to_num(math.inf, posinf=math.inf)
