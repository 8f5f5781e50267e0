"""The batch of a call: its tensors checked, its rows counted, and its rows of the outputs."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from cgplan.buffers.static import torch_dtype
from cgplan.config import Config, Extent, Input
from cgplan.errors import InputError, OutputShapeError, did_you_mean
from cgplan.modes import BatchDescriptor
from cgplan.units import counted


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

    @property
    def box(self) -> tuple[int, ...]:
        return (self.num_tokens, *self.sizes)


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
                    other = "also" if by == name else f"but {by!r} has"
                    raise InputError(
                        f"input {name!r} has {extent.symbol} = {count}, {other} {seen}",
                        remedy=f"Give one {extent.symbol} in a call.",
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


class OutputRows:
    """Cuts padding off by ``model.output_rows`` or ``model.output_shapes``."""

    def __init__(self, config: Config) -> None:
        model = config.model
        self.clone = config.compilation.outputs == "clone"
        self._config = config
        self._rows = model.output_rows if model else "num_tokens"
        self._given = model.output_shapes if model else None
        self._extents: dict[tuple[int, ...], list[list[Extent]]] = {}

    def shapes(
        self,
        batch: Batch | BatchDescriptor,
        num_reqs: int | None,
    ) -> Iterator[tuple[int, ...]]:
        tokens = batch.num_tokens
        reqs = tokens // self._config.query_len if num_reqs is None else num_reqs
        sizes = batch.sizes
        if sizes not in self._extents:
            parsed = []
            for declared in self._given or ((self._rows,),):
                shape = self._config.shape_at(declared, sizes)
                parsed.append(list(map(Extent.parse, shape)))
            self._extents[sizes] = parsed
        extents: Iterable[list[Extent]] = self._extents[sizes]
        if not self._given:
            extents = cycle(extents)
        for each in extents:
            yield tuple(extent.size(tokens, reqs) for extent in each)

    def check(
        self,
        output: Any,
        descriptor: BatchDescriptor,
        num_reqs: int,
    ) -> None:
        """Raise OutputShapeError if padding cannot be cut off."""
        shapes = self.shapes(descriptor, num_reqs)
        leaves = tree_leaves(output)
        tensors = sum(isinstance(leaf, Tensor) for leaf in leaves)
        if self._given and len(self._given) != tensors:
            raise OutputShapeError(
                f"model.output_shapes has {counted(len(self._given), 'shape')}, the model returns "
                f"{counted(tensors, 'tensor')}",
                remedy="Write a shape for each tensor that the model returns, in their order.",
            )
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                shape = next(shapes)
                known = leaf.shape
                if not self._given:
                    known = known[:1]
                if tuple(known) == shape:
                    continue
                said = f"model.output_shapes says {list(shape)}"
                if self._given is None:
                    said = f"dimension 0 should have {shape[0]} rows ({self._rows})"
                raise OutputShapeError(
                    f"output {index} of the model has shape {list(leaf.shape)}; {said} for "
                    f"{descriptor}",
                    remedy=f"Write {' or '.join(self._config.dim_names)} in place of the number of "
                    "rows in shapes of inputs. Return tensors with the batch first, or set "
                    "output_rows (model.output_rows in YAML) to what dimension 0 counts: "
                    "num_tokens or num_reqs; or model.output_shapes.",
                )
            if hides_tensors(leaf):
                raise OutputShapeError(
                    f"output {index} of the model is a {type(leaf).__name__}, whose tensors "
                    "cannot be reached",
                    remedy="Return tensors in tuples, lists and dicts, or register the class as a "
                    "pytree node.",
                )

    def cut(
        self,
        output: Any,
        batch: Batch,
    ) -> Any:
        """Views without padding, or copies if ``clone``."""
        views = self._views(output, batch)
        return tree_map_only(Tensor, torch.clone, views) if self.clone else views

    def _views(
        self,
        output: Any,
        batch: Batch,
    ) -> Any:
        shapes = self.shapes(batch, batch.num_reqs)

        def cut(tensor: Tensor) -> Tensor:
            rows = map(slice, next(shapes))
            return tensor[tuple(rows)]

        if type(output) is Tensor:  # in a third of the time
            return cut(output)
        with torch._C._EnableTorchFunction():  # else subclasses are lost
            return tree_map_only(Tensor, cut, output)

    def reader(
        self,
        output: Any,
        batch: Batch,
    ) -> Callable[[], Any]:
        """``cut`` of an output in fixed memory."""
        # else of use only in inference mode
        with torch.inference_mode(False), torch.no_grad():
            views = self._views(output, batch)
        return renewed(views, clone=self.clone)


def renewed(
    output: Any,
    only: Container[int] | None = None,
    *,
    clone: bool = False,
) -> Callable[[], Any]:
    """New tensor objects in new containers each time. ``only``: ids of the tensors that are
    renewed.
    """
    leaves, spec = tree_flatten(output)
    places = []
    tensors = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and (only is None or id(leaf) in only):
            places.append(i)
            tensors.append(leaf)
    if isinstance(output, Tensor) and tensors:
        return output.clone if clone else output.detach
    renew: Any = partial(
        map,
        Tensor.clone if clone else Tensor.detach,
    )
    forms = {(type(tensor), tensor.dtype) for tensor in tensors}
    if clone and len(tensors) > 1 and forms == {(Tensor, tensors[0].dtype)}:
        renew = _cloned_by_one_launch
    if type(output) is tuple and list(map(id, output)) == list(map(id, tensors)):
        return lambda: tuple(renew(tensors))  # faster than tree_unflatten

    def read() -> Any:
        handed = list(leaves)
        for i, tensor in zip(places, renew(tensors), strict=True):
            handed[i] = tensor
        return tree_unflatten(handed, spec)

    return read


def _cloned_by_one_launch(tensors: list[Tensor]) -> list[Tensor]:
    clones = list(map(torch.empty_like, tensors))
    torch._foreach_copy_(clones, tensors)
    return clones


def hides_tensors(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return False
    held: Iterable[Any]
    if isinstance(leaf, Mapping):
        held = leaf.values()
    elif is_dataclass(leaf):
        held = [getattr(leaf, field.name, None) for field in fields(leaf)]
    else:
        held = getattr(leaf, "__dict__", {}).values()
    return any(isinstance(value, Tensor) for value in held)
