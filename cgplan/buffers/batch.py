"""Checks the tensors of a call, and counts their rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from cgplan.buffers.static import torch_dtype
from cgplan.config import Input
from cgplan.errors import InputError, did_you_mean
from cgplan.modes import BatchDescriptor


def never(*_: object) -> bool:
    return False


def is_dense(value: Tensor) -> bool:
    return value.is_contiguous() and not value.is_conj() and not value.is_neg()


def alike_to(values: Sequence[Tensor]) -> Callable[..., bool]:
    """Whether tensors equal these in all but numbers and addresses; nested ones never do."""
    if not all(map(is_dense, values)):
        return never
    return TensorGuards(*values, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


@dataclass(frozen=True)
class Batch:
    """``num_reqs`` is None where no input counts requests."""

    num_tokens: int
    num_reqs: int | None
    sizes: tuple[int, ...] = ()


def unknown_input(name: str, declared: Iterable[str]) -> InputError:
    declared = tuple(declared)
    listed = f"Declared are {', '.join(declared) or 'none'}."
    return InputError(f"unknown input {name!r}", remedy=did_you_mean(name, declared) + listed)


class BatchReader:
    def __init__(
        self, specs: Mapping[str, Input], dim_names: Sequence[str], device: torch.device
    ) -> None:
        self._device = device
        self._dim_names = dim_names
        self._specs = {}
        self.symbols = set()
        for name, spec in specs.items():
            extents = spec.extents
            self._specs[name] = (spec, torch_dtype(spec), extents)
            self.symbols |= {extent.symbol for extent in extents}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._specs)

    def read(self, given: Mapping[str, Tensor]) -> Batch:
        """Raises InputError for a tensor that is not as declared."""
        if not isinstance(given, Mapping):
            raise InputError(
                f"the inputs are of type {type(given).__name__}",
                remedy="Pass tensors by name.",
            )
        if given.keys() != self._specs.keys():
            for name in given:
                if name not in self._specs:
                    raise unknown_input(name, self._specs)
            missing = next(name for name in self._specs if name not in given)
            raise InputError(
                f"input {missing!r} is missing", remedy="Pass every declared input by name."
            )
        counts: dict[str, int] = {}
        counted_by: dict[str, str] = {}
        for name, (spec, dtype, extents) in self._specs.items():
            value = given[name]
            self._check(name, value, dtype)
            shape = value.shape
            known = zip(shape, extents, strict=False)
            fits = [extent.symbol is not None or extent.takes(n) for n, extent in known]
            if len(shape) != len(extents) or not all(fits):
                raise InputError(
                    f"input {name!r} has shape {list(shape)}, declared is {list(spec.shape)}",
                    remedy="Change the tensor, or the shape in the configuration.",
                )
            for n, extent, declared in zip(shape, extents, spec.shape, strict=True):
                if extent.symbol is None:
                    continue
                count = extent.count(n)
                if count is None:
                    raise InputError(
                        f"input {name!r} has {n} rows; declared are {declared}",
                        remedy="Check the shape that the configuration declares.",
                    )
                by = counted_by.setdefault(extent.symbol, name)
                seen = counts.setdefault(extent.symbol, count)
                if seen != count:
                    raise InputError(
                        f"input {name!r} has {extent.symbol} = {count}, but {by!r} has {seen}",
                        remedy="Give all inputs of a call the same batch.",
                    )
        reqs = counts.get("num_reqs")
        tokens, *sizes = [counts.get(name, reqs or 0) for name in self._dim_names]
        if 0 in (tokens, reqs, *sizes):
            raise InputError(
                "the batch has 0 rows", remedy="Do not call the runner for an empty batch."
            )
        return Batch(tokens, reqs, tuple(sizes))

    def refuse_other(self, batch: Batch, descriptor: BatchDescriptor) -> None:
        counted = ["sizes", "num_reqs"]
        if self._dim_names[0] in self.symbols:
            counted.insert(0, "num_tokens")
        for symbol in counted:
            count = getattr(batch, symbol)
            wanted = getattr(descriptor, symbol)
            is_known = count not in (None, ()) and wanted not in (None, ())
            if is_known and count != wanted:
                raise InputError(
                    f"the inputs are a batch of {symbol} = {count}, the forward context's "
                    f"descriptor says {wanted!r}",
                    remedy="Pad the inputs to that size, or give their descriptor.",
                )

    def _check(self, name: str, value: Tensor, dtype: torch.dtype) -> None:
        if not isinstance(value, Tensor):
            raise InputError(
                f"input {name!r} is of type {type(value).__name__}",
                remedy="Pass a tensor: torch.from_numpy(array), torch.tensor(numbers).",
            )
        if value.dtype is not dtype:
            raise InputError(
                f"input {name!r} has dtype {value.dtype}, declared is {dtype}",
                remedy=f"Convert it with .to({dtype}), or declare its dtype.",
            )
        if value.layout is not torch.strided or value.is_nested:
            kind = "a nested tensor" if value.is_nested else f"of layout {value.layout}"
            raise InputError(
                f"input {name!r} is {kind}",
                remedy="Pass a dense tensor: .to_dense(), .to_padded_tensor().",
            )
        if value.device != self._device and value.device.type != "cpu":
            raise InputError(
                f"input {name!r} is on {value.device}, the runner on {self._device}",
                remedy=f"Move it with .to('{self._device}'), or pass a tensor on the host.",
            )
