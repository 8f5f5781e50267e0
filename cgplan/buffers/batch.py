"""From the tensors of a call to the batch that they are: names, shapes and counts checked before anything runs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from cgplan.buffers.copier import PLAIN, no_memory
from cgplan.buffers.static import torch_dtype
from cgplan.config import Dim, Input
from cgplan.errors import InputError
from cgplan.modes import BatchDescriptor

_UNINITIALISED = (UninitializedParameter, UninitializedBuffer)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one call."""

    num_tokens: int
    num_reqs: int | None


@dataclass(frozen=True, slots=True)
class _Expected:
    """One declared input, with all that a call's check needs looked up before."""

    spec: Input
    dtype: torch.dtype
    ndim: int
    fixed: tuple[tuple[int, int], ...]  # (dimension, size)
    row_dim: int | None
    rows: Dim | None

    @classmethod
    def of(cls, spec: Input) -> _Expected:
        dims, row_dim = spec.dims, spec.row_dim
        fixed = tuple((i, dim.offset) for i, dim in enumerate(dims) if dim.symbol is None)
        return cls(spec, torch_dtype(spec), len(dims), fixed, row_dim, None if row_dim is None else dims[row_dim])


class BatchReader:
    """Checks a call's tensors against the declared inputs and counts their rows.

    Args:
        specs: Inputs and metadata by name.
        device: Where the tensors have to be, if not on the host.
    """

    def __init__(self, specs: Mapping[str, Input], device: torch.device) -> None:
        self._device = device
        self._expected = {name: _Expected.of(spec) for name, spec in specs.items()}
        self._counts_tokens = self.counting("num_tokens") is not None

    @property
    def names(self) -> tuple[str, ...]:
        """The inputs in their order."""
        return tuple(self._expected)

    def counting(self, symbol: str) -> tuple[int, int] | None:
        """The first input that counts a symbol: its index and the dimension; None if there is none."""
        for index, expected in enumerate(self._expected.values()):
            if expected.rows is not None and expected.rows.symbol == symbol:
                return index, expected.row_dim or 0
        return None

    def read(self, given: Mapping[str, Any]) -> Batch:
        """The batch that ``given`` is. Raises InputError for a wrong name, type, dtype, device, shape or row count."""
        if not isinstance(given, Mapping):
            raise InputError(f"the batch is a {type(given).__name__}", remedy="Pass a dict of tensors by name.")
        if given.keys() != self._expected.keys():
            raise self._wrong_names(given)
        counts: dict[str | None, tuple[int, str]] = {}
        for name, expected in self._expected.items():
            value = given[name]
            self._check(name, value, expected)
            dim = expected.rows
            if dim is None or expected.row_dim is None:
                continue
            count = dim.count(value.shape[expected.row_dim])
            if count is None:
                raise InputError(
                    f"input {name!r} has {value.shape[expected.row_dim]} rows; declared are "
                    f"{expected.spec.shape[expected.row_dim]}",
                    remedy="Check the shape that the configuration declares.",
                )
            seen, by = counts.setdefault(dim.symbol, (count, name))
            if seen != count:
                raise InputError(
                    f"input {name!r} is a batch of {dim.symbol} = {count}, but {by!r} of {seen}",
                    remedy="Give all inputs of a call the same batch.",
                )
        tokens, reqs = counts.get("num_tokens"), counts.get("num_reqs")
        num_tokens = tokens[0] if tokens else reqs[0] if reqs else 0
        if num_tokens == 0 or (reqs and reqs[0] == 0):
            raise InputError("the batch has 0 rows", remedy="Do not call the runner for an empty batch.")
        return Batch(num_tokens, reqs[0] if reqs else None)

    def refuse_other(self, batch: Batch, descriptor: BatchDescriptor) -> None:
        """Raise InputError if a batch has other rows than its descriptor says, where inputs count them."""
        counted = {"num_tokens": batch.num_tokens} if self._counts_tokens else {}
        if batch.num_reqs is not None and descriptor.num_reqs is not None:
            counted["num_reqs"] = batch.num_reqs
        for symbol, count in counted.items():
            if count != (wanted := getattr(descriptor, symbol)):
                raise InputError(
                    f"the inputs are a batch of {symbol} = {count}, the forward context's descriptor says {wanted!r}",
                    remedy="Pad the inputs to the size of the descriptor, or pass the descriptor that they have.",
                )

    def _check(self, name: str, value: Any, expected: _Expected) -> None:
        if not isinstance(value, torch.Tensor):
            raise InputError(
                f"input {name!r} is a {type(value).__name__}, not a tensor", remedy="Pass torch tensors by name."
            )
        if value.is_nested or isinstance(value, _UNINITIALISED):
            what = "a nested tensor" if value.is_nested else "not initialised yet"
            raise InputError(
                f"input {name!r} is {what}", remedy="Pass a dense tensor, such as .to_padded_tensor() gives."
            )
        shape = value.shape
        if len(shape) != expected.ndim or any([shape[i] != size for i, size in expected.fixed]):  # noqa: C419 (faster)
            raise InputError(
                f"input {name!r} has shape {list(shape)}, declared is {list(expected.spec.shape)}",
                remedy="Change the tensor, or the shape in the configuration.",
            )
        if value.dtype is not expected.dtype:
            raise InputError(
                f"input {name!r} has dtype {value.dtype}, declared is {expected.dtype}",
                remedy=f"Convert it with .to({expected.dtype}), or declare its dtype.",
            )
        if value.device != self._device and value.device.type != "cpu":
            raise InputError(
                f"input {name!r} is on {value.device}, the runner on {self._device}",
                remedy=f"Move it with .to('{self._device}'); a tensor on the host will do, too.",
            )
        if value.layout is not torch.strided:
            raise InputError(
                f"input {name!r} has the layout {value.layout}",
                remedy="Pass a dense tensor, such as .to_dense() gives.",
            )
        if type(value) in PLAIN and not _has_memory(value):
            raise no_memory(name)

    def _wrong_names(self, given: Mapping[str, Any]) -> InputError:
        unknown = [name for name in given if name not in self._expected]
        if unknown:
            near = difflib.get_close_matches(unknown[0], self._expected, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            return InputError(
                f"unknown input {unknown[0]!r}", remedy=f"{hint}Declared are {', '.join(self._expected) or 'none'}."
            )
        missing = [name for name in self._expected if name not in given]
        return InputError(f"input {missing[0]!r} is missing", remedy="Pass every declared input by name.")


def _has_memory(value: torch.Tensor) -> bool:
    """Whether a tensor's storage holds its elements: that of one of zeros may not be there, others may be freed."""
    if value._is_zerotensor():
        return False
    last = value.storage_offset() + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return value.numel() == 0 or value.untyped_storage().nbytes() >= (last + 1) * value.itemsize


def exact_check(values: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A function that tells, in half a microsecond, whether tensors are like these: of the same class, dtype, device,
    shape and strides. It may say no to tensors that are alike; those are looked at one by one then.

    Returns:
        None where there is no such function for these tensors.
    """
    guards = _tensor_guards()
    if guards is None or any(type(value) is not torch.Tensor for value in values):
        return None
    check: Callable[..., bool] = guards(*values, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check if check(*values) else None  # no, if a tensor is there twice


@cache
def _tensor_guards() -> Any:
    """Dynamo's compiled checks of tensors, if this torch has them and they do what they are used for here.

    They are private to torch. In Python the same checks take five times as long, which for five inputs is as much as
    all that a call does besides the copies.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        like = torch.empty(2, 3, device="cpu")  # the default device may be another one
        guards: Any = TensorGuards  # its stub knows no positional arguments
        check = guards(like, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        others = [
            like.new_empty(3, 3), like.new_empty(3, 2).t(), like.new_empty(6), like.to(torch.int32), like.to("meta"),
            torch.nn.Parameter(like), like.to(torch.cfloat).conj(),
        ]  # fmt: skip
        works = check(torch.empty_like(like)) and not any(check(other) for other in others)
    except (ImportError, AttributeError, TypeError, RuntimeError, SystemError):
        return None
    return guards if works else None
