"""Graphed: a drop-in for a model. Calls tell what a configuration would say, and padding is proven before it is used.

Note [Kinds of calls]
    A kind of call is its structure, its arguments that are no tensors, and dtype, rank and fixed sizes of its tensors.
    Each kind has a configuration and a GraphRunner; all runners share one pool. A call like an earlier one costs the
    runner's call, the flattening of its arguments, and one look-up.

Note [The proof]
    The first batch of a kind runs alone and padded, by the model's own code, and so does each that is smaller than all
    before it. Real rows have to be equal: alone and padded within a tolerance, since other sizes run other kernels; to
    the last bit between padding of zeros and of extreme values and NaN in floats, unless an operator checks values on
    the device. The model is as it was afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, cast, get_args

import torch
import yaml
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, register_dataclass, tree_flatten

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.context import current_forward_context
from cgplan.buffers.batch import BatchReader
from cgplan.buffers.compare import apart
from cgplan.config import BudgetConfig, CompilationConfig, Dim, Extent, Input, validate_config
from cgplan.config.schema import WORDS_OF_A_CALL
from cgplan.config.values import DType
from cgplan.errors import (
    AddressError,
    CgplanError,
    ConfigError,
    InputError,
    ModelError,
    NumbersError,
    OutputShapeError,
    did_you_mean,
)
from cgplan.graphs.ambient import random_state_kept
from cgplan.graphs.footprint import look
from cgplan.graphs.model_state import ModelState
from cgplan.graphs.pools import GraphPool
from cgplan.models.loading import load_model
from cgplan.modes import Key
from cgplan.planning import build_plan
from cgplan.planning.build import sizes_of
from cgplan.reports.records import CaptureReport
from cgplan.runner.runner import GraphRunner
from cgplan.runner.session import CaptureSession

BATCH = "batch"
_NOTHING_VARIES = "nothing varies: each shape has its graph"
_MOST_FAILURES = 3  # kinds of calls with one object among the arguments that are tried
_MOVED = "an argument holds other tensors than at the capture"
_UNPADDED = "With dynamic={} each shape has its own graph, without padding."
_MOST_CALLS = 4096  # that are found by one look-up
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-3, torch.float16: 1e-2}  # of the largest value; others: 5e-2
_CONSTANTS = frozenset({int, float, bool, str, type(None)})
_shape, _dtype, _asks_grad = attrgetter("shape"), attrgetter("dtype"), attrgetter("requires_grad")
logger = logging.getLogger(__name__)


class _Held:
    """A hashable box: of a structure of pytree, or of an object, which equals itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __eq__(self, other: object) -> bool:
        is_spec = type(self.value) is TreeSpec
        return isinstance(other, _Held) and (self.value == other.value if is_spec else self.value is other.value)


def _flatten(items: Iterable[Any], form: list[Any], tensors: list[Tensor]) -> None:
    """Append the tensors in values, and a hashable form from which ``_rebuild`` makes each value again."""
    for value in items:
        kind = type(value)
        if kind is Tensor or isinstance(value, Tensor):
            form.append(Tensor)
            tensors.append(value)
        elif kind in _CONSTANTS:
            form += kind, value
        elif kind is dict:
            form += dict, tuple(value)
            _flatten(value.values(), form, tensors)
        elif kind is tuple or kind is list:
            form += kind, len(value)
            _flatten(value, form, tensors)
        else:
            _flatten_other(value, form, tensors)


def _flatten_other(value: Any, form: list[Any], tensors: list[Tensor]) -> None:
    leaves, spec = tree_flatten(value)
    if spec.is_leaf() and dataclasses.is_dataclass(kind := type(value)):
        register_dataclass(kind)
        leaves, spec = tree_flatten(value)
    if not spec.is_leaf():
        form += TreeSpec, _Held(spec)
        _flatten(leaves, form, tensors)
    elif hasattr(value, "__array__"):
        raise InputError(f"an argument is a {type(value).__name__}", remedy="Pass a tensor: torch.from_numpy(array).")
    else:
        has_value = isinstance(value, Hashable) and type(value).__hash__ is not object.__hash__
        form += type(value), value if has_value else _Held(value)


def _rebuild(form: Iterator[Any], tensors: Iterator[Any], kind: Any = None) -> Any:
    """A value again, whose form begins with ``kind``; absent: the next of the form."""
    kind = kind or next(form)
    if kind is Tensor:
        return next(tensors)
    told = next(form)
    if kind not in (dict, tuple, list, TreeSpec):
        return told.value if type(told) is _Held else told
    count = told.value.num_leaves if kind is TreeSpec else len(told) if kind is dict else told
    items = [next(tensors) if (item := next(form)) is Tensor else _rebuild(form, tensors, item) for _ in range(count)]
    if kind is dict:
        return dict(zip(told, items, strict=True))
    return items if kind is list else tuple(items) if kind is tuple else told.value.unflatten(items)


def _named(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, f"{path}.{key}" if path else str(key))
    else:
        tensors = list[Tensor]()
        _flatten([value], [], tensors)
        yield from ((path if value is tensor else f"{path}.{i}", tensor) for i, tensor in enumerate(tensors))


class _Name(str):
    """Of a tensor, in its place."""


def _module_of(model: object) -> nn.Module:
    """The model itself, that whose bound method it is, or an empty one."""
    owner = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    return owner if isinstance(owner, nn.Module) else nn.Module().eval()


def _share(module: nn.Module, model: nn.Module) -> None:
    """Give a module the parameters, buffers and modules of another one, under the same names."""
    held = "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"
    module.__dict__.update({name: vars(model)[name] for name in held if name in vars(model)})  # scripts have none
    module.__dict__["training"] = model.training


class _ByName(nn.Module):
    """The model as a runner calls it: tensors by name, in the form's order. A tensor or a tuple of them comes out."""

    returns: tuple[Any, ...] = ()  # form of the output, once it is known

    def __init__(
        self,
        model: Callable[..., Any],
        signature: inspect.Signature,
        form: tuple[Any, ...],
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        _share(self, _module_of(model))
        self.signature = signature
        self.arguments = {name: value for name, value in given.items() if _Held(value) in form}  # findings name these
        self.objects = tuple(box for box in form if type(box) is _Held and type(box.value) is not TreeSpec)
        self.form = form
        self.__dict__["wrapped"] = model  # not as a module: it would be there twice
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        by_name = kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
        self.plain: tuple[str, ...] = form[1] if by_name and set(form[2:-1]) == {Tensor} else ()
        self.names: tuple[str, ...] = ()  # of the tensors, in the form's order, where others may come in another one

    def flat(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], list[Tensor]]:
        """Form and tensors of the output. Raises OutputShapeError where the form is not as it is known to be."""
        given = inspect.BoundArguments(self.signature, _rebuild(iter(self.form), iter(tensors)))
        form, leaves = list[Any](), list[Tensor]()
        _flatten([self.__dict__["wrapped"](*given.args, **given.kwargs)], form, leaves)
        boxes = [box for box in form if type(box) is _Held and type(box.value) is not TreeSpec]
        if hidden := [box.value for box in boxes if box not in self.objects]:  # an argument comes out as it went in
            raise OutputShapeError(
                f"the model returns a {type(hidden[0]).__name__}, whose tensors cannot be reached",
                remedy="Return tensors in tuples, lists, dicts and dataclasses; transformers: pass use_cache=False.",
            )
        if self.returns and tuple(form) != self.returns:
            raise OutputShapeError(
                "the structure of the output, or a number in it, depends on the size of the batch",
                remedy="Return tensors for what depends on the batch.",
            )
        return tuple(form), leaves

    def forward(self, **tensors: Tensor) -> Any:
        if self.plain and self.returns == (Tensor,):  # nothing that a trace would not follow
            return self.__dict__["wrapped"](**dict(zip(self.plain, tensors.values(), strict=True)))
        form, leaves = self.flat([tensors[name] for name in self.names or tensors])
        return leaves[0] if form == (Tensor,) else tuple(leaves)


def as_called(target: str, call: Mapping[str, Any], kwargs: Mapping[str, Any] = MappingProxyType({})) -> nn.Module:
    """A model of tensors by name, from one with other arguments: the target in files that ``save_config`` writes.

    ``call`` has the arguments: constants, lists, mappings, `{$tuple: [...]}`, and `$name` for the tensor of that name.
    Raises ModelError as ``load_model`` does.
    """
    model = load_model(target, kwargs, device=torch.get_default_device()).forward
    marks, form, ordered = dict[str, Tensor](), list[Any](), list[Tensor]()

    def filled(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("$"):
            return marks.setdefault(value[1:], torch.empty(0))
        if isinstance(value, dict):
            items = {name: filled(item) for name, item in value.items()}
            return tuple(items["$tuple"]) if items.keys() == {"$tuple"} else items
        return [filled(item) for item in value] if isinstance(value, list) else value

    _flatten([{name: filled(value) for name, value in call.items()}], form, ordered)
    made = _ByName(model, inspect.signature(getattr(model, "forward", model)), (*form, False))
    made.names = tuple(next(name for name, mark in marks.items() if mark is tensor) for tensor in ordered)
    return made


def _written(value: Any, path: str) -> Any:
    """An argument as ``as_called`` reads it. Raises ConfigError where YAML has no form for it."""
    kind = type(value)
    if isinstance(value, _Name):
        return f"${value}"
    if kind in (list, tuple):
        items = [_written(item, f"{path}.{at}") for at, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _written(item, f"{path}.{key}") for key, item in value.items()}
    if kind in _CONSTANTS and not str(value).startswith("$"):
        return value
    raise ConfigError(
        f"argument {path} is {value!r:.80}, of {kind.__name__}, which a YAML file cannot hold",
        remedy="Save a model that is called with tensors, numbers, text, and lists, tuples and dicts by name of them: "
        "`graphed` a function that makes the argument itself.",
    )


class _Kind:
    """One kind of calls: what was learnt of it, and its runner.

    Attributes:
        forward: The model, called with tensors by name.
        specs: The inputs, in the order of the form; shapes have names where sizes vary.
        dims: Bounds and sizes of the names; a kind has one size alone where ``min`` is ``max``.
        grows: Names without a bound: for a larger batch the runner is opened again.
        outputs: Shapes of the outputs, once padding is proven.
        proven: The smallest sizes for which it is.
        notes: What was inferred, and from what.
        runner: Absent until the padding is proven.
    """

    runner: GraphRunner

    def __init__(self, forward: _ByName, specs: dict[str, Input], device: torch.device) -> None:
        names = dict.fromkeys(e.symbol for spec in specs.values() for e in spec.extents if e.symbol)
        self.forward, self.specs, self.reader = forward, specs, BatchReader(specs, tuple(names), device)
        self.names, self.dims, self.grows = tuple(names), dict[str, Dim](), set[str]()
        self.outputs: tuple[tuple[int | str, ...], ...] = ()
        self.proven, self.notes, self.failures = dict[str, int](), list[str](), 0

    def sizes_of(self, named: Mapping[str, Tensor]) -> dict[str, int]:
        """The sizes of a batch by name. Raises InputError for a batch of another kind."""
        batch = self.reader.read(named)
        sizes = dict(zip(self.names, (batch.num_tokens, *batch.sizes), strict=True))
        if any(dim.min == dim.max != sizes[name] for name, dim in self.dims.items()):
            raise InputError(f"a batch of {_words(sizes)}, which is another kind")
        return sizes

    def fits(self, form: list[Any], named: Mapping[str, Tensor]) -> bool:
        """Whether a call is of this kind."""
        with suppress(InputError):
            return self.forward.form == tuple(form) and bool(self.sizes_of(named))
        return False

    def varying(self, names: Collection[str]) -> list[str]:
        """The inputs with one of these names in their shapes."""
        return [name for name, spec in self.specs.items() if any(extent.symbol in names for extent in spec.extents)]

    def say_failures(self) -> None:
        """Log why the latest graph could not be captured, once. Raises OutputShapeError where another graph would serve
        the batch, and cut its outputs wrongly.
        """
        failed = self.runner.report.failed
        if odd := next((failure for failure in failed if failure.error == OutputShapeError.__name__), None):
            raise OutputShapeError(odd.detail, remedy="Return tensors whose sizes follow from those of the inputs.")
        if len(failed) > self.failures:
            logger.warning("%s was not captured and runs eagerly: %s", failed[-1].descriptor, failed[-1].detail)
        self.failures = len(failed)


def _at(extents: Iterable[Extent], sizes: Mapping[str, int]) -> list[int]:
    return [extent.at(sizes) for extent in extents]


def _words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())


class _Proof:
    """See Note [The proof]; for a batch of a kind, whose ``outputs``, ``proven`` and ``notes`` it writes.

    Raises NumbersError for padding that reaches real rows, ModelError where the model fails on padding, and
    OutputShapeError for outputs whose shapes do not follow from sizes of the batch.
    """

    def __init__(self, kind: _Kind, batch: Mapping[str, Tensor], backend: GraphBackend) -> None:
        self.kind, self.batch, self.backend = kind, batch, backend
        self.real, self.padded = kind.sizes_of(batch), dict[str, int]()
        for name, dim in kind.dims.items():
            size, sizes = self.real[name], sizes_of(dim)
            larger = next((n for n in sizes if n > size), None)
            # A length without a bound may be the longest that the model takes, so it is padded no further.
            if larger is None or (size in sizes and name in kind.grows and name != kind.names[0]):
                larger = min(size, sizes[-1])
            self.padded[name] = larger
            # The most padding that a batch there has; indices may point at what is left out.
            shortest = max(*(n + 1 for n in (0, *sizes) if n < larger), min(dim.min, larger))
            if shortest == larger:
                shortest = max(larger - 1, min(dim.min, larger))
            others = set(kind.varying([n for n in kind.names if n != name])) - set(kind.varying([name]))
            may_cut = all(batch[n].is_floating_point() for n in others)
            if size < larger and not may_cut:
                continue
            if size > shortest and not may_cut and kind.proven:
                continue
            self.real[name] = min(size, shortest)
            if self.real[name] < size and not may_cut:
                raise InputError(
                    f"no padding can be tried for {name}: the first batch has the largest size, {size}",
                    remedy="Teach by a smaller batch: example=(...).",
                )
        self.state = ModelState.of({"model": kind.forward}, backend.device)
        self.written, self.shapes, self.draws = list[str](), [list(shape) for shape in kind.outputs], False
        self.overwritten: set[str] = set()
        tensors, halves = (*kind.forward.parameters(), *batch.values()), (torch.float16, torch.bfloat16)
        is_half = torch.is_autocast_enabled(backend.device.type) or any(t.dtype in halves for t in tensors)
        self.tolerance = 5e-2 if is_half else 0.0  # at least: an output in float32 may come of bfloat16

    def look(self) -> str | None:
        """Find out what the forward writes, and how exactly it computes; which values it checks on the device."""
        limit = (self.backend.memory().free or 4 << 30) // 4
        try:
            seen = look(lambda: self.run(self.real, restores=False), self.state, limit)
        finally:
            self.state.restore()
        convolves = torch.backends.cudnn.allow_tf32 and any("conv" in name for name in seen.names)
        is_coarse = convolves or torch.get_float32_matmul_precision() != "highest"
        if is_coarse and self.backend.device.type == "cuda":  # TensorFloat32
            self.tolerance = 5e-2
        outcome = map(self.state.places.get, self.state.outcome)
        self.written = [p.path for p in outcome if p and isinstance(p.value, Tensor) and p.value.nbytes < limit // 4]
        return seen.checks

    def prove(self, pinned: Collection[str]) -> tuple[Any, ...]:
        """The output's form. ``pinned``: inputs whose padding is what was asked for, and nothing else."""
        kind, real, checks = self.kind, self.real, self.look()
        form, alone, kept = self.run(real)
        if is_first := not kind.proven:
            self.shapes = [list(leaf.shape) for leaf in alone]
        for index, (leaf, shape) in enumerate(zip(alone, self.shapes, strict=True)):
            if (wanted := _at(map(Extent.parse, shape), real)) != list(leaf.shape):
                raise OutputShapeError(
                    f"output {index} has shape {list(leaf.shape)} for {_words(real)}, and {wanted} by larger batches",
                    remedy="Return tensors whose sizes follow from those of the inputs.",
                )
        grown = [name for name in self.padded if self.padded[name] > real[name]]
        base, tried, found = alone, ["what `pad` says" if pinned else "zeros"], list[str]()
        for names in [[name] for name in grown] + [grown] * (len(grown) > 1):
            other, base, state = self.run({**real, **{name: self.padded[name] for name in names}})
            if is_first and len(names) == 1:
                self.infer(alone, base, names[0], same=form == other)
            if not self.draws and (where := self.difference(base, alone)):
                raise self.refusal(where, kind.varying(names), names)
            differ = [_wrong_row(one, b, b.shape, 5e-2) is not None for one, b in zip(state, kept, strict=True)]
            found += [path.removeprefix("model.") for path, d in zip(self.written, differ, strict=True) if d]
        floats = [n for n in kind.varying(grown) if n not in pinned and self.batch[n].is_floating_point()]
        if floats and checks is None:
            tried += ["extreme values", "NaN", *self.try_extremes(floats, grown, base)]
        kind.outputs = tuple(map(tuple, self.shapes))
        kind.proven = {name: min(size, kind.proven.get(name, size)) for name, size in real.items()}
        kind.notes.append(
            f"padding proven: {_words(real)} alone and as {_words(self.padded)}, with {', '.join(tried)}"
            + f" alone, since the forward has {checks}" * bool(checks and floats)
            + "; the forward draws random numbers, so alone was not compared" * self.draws
            if grown
            else "never padded"
        )
        for index, shape in enumerate(self.shapes if is_first else ()):
            is_fixed = not any(isinstance(dim, str) for dim in shape)
            kind.notes.append(f"output {index}: [{', '.join(map(str, shape))}]{' (fixed)' * is_fixed}")
        if found:
            kind.notes.append(f"padding is written into the model's state: {', '.join(dict.fromkeys(found))}")
            logger.warning("graphed: %s; give inputs a `pad` that is not kept, or dynamic={}", kind.notes[-1])
        if is_first and self.overwritten:
            kind.notes.append(
                f"the forward writes into {', '.join(sorted(self.overwritten))}: graphs write into copies"
            )
            logger.warning("graphed: %s, and the caller's tensors stay as they are", kind.notes[-1])
        return form

    def try_extremes(self, floats: Sequence[str], grown: Sequence[str], base: Sequence[Tensor]) -> list[str]:
        """Pad floats with extreme values and NaN; remarks."""
        remarks = list[str]()
        exact = self.difference(self.run(self.padded)[1], base, exact=True) is None  # sums in any order on a GPU
        for name in floats:
            most = torch.finfo(self.batch[name].dtype).max
            for value in (most, -most):
                if where := self.difference(self.run(self.padded, {name: value})[1], base, exact=exact):
                    raise self.refusal(where, [name], grown)
            if self.difference(self.run(self.padded, {name: math.nan})[1], base, exact=exact):
                remarks.append(f"NaN in {name} reaches real rows and is never there")
        return remarks

    def run(
        self, sizes: Mapping[str, int], values: Mapping[str, float] | None = None, *, restores: bool = True
    ) -> tuple[tuple[Any, ...], list[Tensor], list[Tensor]]:
        """Form and tensors of the output for real rows that are padded to these sizes, with these values by input; and
        what the model wrote.
        """
        tensors, copies = list[Tensor](), dict[str, tuple[Tensor, Tensor]]()
        for name, spec in self.kind.specs.items():
            part = self.batch[name][tuple(map(slice, _at(spec.extents, self.real)))]
            value: Any = (values or {}).get(name, spec.pad)
            tensors.append(part.new_full(_at(spec.extents, sizes), value))
            copies[name] = tensors[-1][tuple(map(slice, part.shape))].copy_(part), part
        device = self.backend.device
        cuda = torch.cuda.default_generators
        default = cuda[device.index or 0] if device.type == "cuda" else torch.default_generator
        generators = (default, *self.state.generators)
        with torch.no_grad(), random_state_kept(device, self.state.generators):
            before = [generator.get_state() for generator in generators]
            try:
                form, leaves = self.kind.forward.flat(tensors)
                self.draws |= any(not torch.equal(g.get_state(), b) for g, b in zip(generators, before, strict=True))
                kept = [self.state.places[path].value.clone() for path in self.written]
                self.overwritten |= {name for name, (copy, part) in copies.items() if apart(copy, part).any()}
                return form, [leaf.clone() for leaf in leaves], kept
            except Exception as error:
                if sizes == self.real or isinstance(error, CgplanError):
                    raise
                raise ModelError(
                    f"the model fails where {_words(self.real)} is padded to {_words(sizes)}: {error}",
                    remedy="Say which dimensions vary, by dynamic={...}; taken was "
                    f"{ {name: list(spec.shape) for name, spec in self.kind.specs.items()} }. {_UNPADDED}",
                ) from error
            finally:
                if restores:
                    self.backend.synchronize()
                    self.state.restore()

    def infer(self, alone: Sequence[Tensor], base: Sequence[Tensor], name: str, *, same: bool) -> None:
        """Write a name into the dimensions of outputs that grow with it; ``same``: whether the structures are."""
        real, padded = self.real[name], self.padded[name]
        for index, (one, other, shape) in enumerate(zip(alone, base, self.shapes, strict=same)):
            same &= one.ndim == other.ndim
            for i, (size, grown) in enumerate(zip(one.shape, other.shape, strict=False)):
                factor, rest = divmod(grown - size, padded - real)
                offset = size - factor * real
                same &= not rest and factor >= 0 and offset >= 0 and not (factor and isinstance(shape[i], str))
                if factor:
                    shape[i] = f"{factor} * " * (factor > 1) + name + f" + {offset}" * (offset > 0)
            if not same:
                raise OutputShapeError(
                    f"output {index} has shape {list(one.shape)} for {name} = {real} and {list(other.shape)} for "
                    f"{padded}: it depends on data, on a product of sizes, or its structure on {name}",
                    remedy="Return tensors whose sizes follow from those of the inputs.",
                )

    def difference(self, outputs: Sequence[Tensor], others: Sequence[Tensor], *, exact: bool = False) -> str | None:
        """Where real rows of two outputs differ."""
        for index, (one, other) in enumerate(zip(outputs, others, strict=True)):
            is_whole = not (one.is_floating_point() or one.is_complex())
            share = 0.5 if self.tolerance and not exact and is_whole else 0.0  # rounding may decide another one
            tolerance = 0.0 if exact else max(self.tolerance, _TOLERANCES.get(one.dtype, 5e-2))
            row = _wrong_row(one, other, _at(map(Extent.parse, self.shapes[index]), self.real), tolerance, share)
            if row is not None:
                return f"row {row} of output {index}"
        return None

    def refusal(self, where: str, inputs: Sequence[str], names: Sequence[str]) -> NumbersError:
        sizes = ", ".join(f"{name} = {self.real[name]} is padded to {self.padded[name]}" for name in names)
        return NumbersError(
            f"{where} depends on padding of {' or '.join(inputs)}, where {sizes}",
            remedy="Give the model a mask that it uses, or name a value of padding that it ignores: pad={name: value}. "
            + _UNPADDED,
        )


def _wrong_row(found: Tensor, wanted: Tensor, shape: Sequence[int], tolerance: float, share: float = 0.0) -> int | None:
    """The first row in which outputs differ, as far as ``shape`` reaches. Floats may by a part of the largest value;
    ``share``: and so may a part of all values.
    """
    one, other = (output[tuple(map(slice, shape))] for output in (found, wanted))
    between = apart(one, other)
    rounds = one.numel() and tolerance and (wanted.is_floating_point() or wanted.is_complex())
    # Where both are equal, a mask's finfo.min would hide the others.
    differing = other.abs().double().nan_to_num(0, 0, 0).masked_fill(between == 0, 0) if rounds else between
    limit = tolerance * float(differing.max()) if rounds else 0.0
    wrong = (between > limit).nonzero()
    return (int(wrong[0, 0]) if found.ndim else 0) if len(wrong) > share * between.numel() else None


@dataclasses.dataclass
class _Learnt:
    """What a Graphed has learnt of calls, and its graphs."""

    __graph_memory__ = True  # no state of a model that holds a Graphed
    pool: Any = None  # a GraphPool, once the device is known
    device: str = "cpu"  # the pool's type of device
    kinds: list[_Kind] = dataclasses.field(default_factory=list)
    calls: dict[tuple[Any, ...], tuple[GraphRunner, list[str], tuple[Any, ...] | None]] = dataclasses.field(
        default_factory=dict
    )
    eager: Counter[str] = dataclasses.field(default_factory=Counter)
    given_up: set[int] = dataclasses.field(default_factory=set)  # ids of arguments


def _forward(graphs: weakref.ref[Graphed], *args: Any, **kwargs: Any) -> Any:
    # The bound method, in the attribute that code asks for its signature, would keep a dropped one and its graphs.
    return Graphed.forward(cast(Graphed, graphs()), *args, **kwargs)


class Graphed:
    """A model or a function that runs by captured graphs; ``graphed`` makes it, and says what its settings are.

    It has the model's attributes; where one is set, graphs are captured again as calls ask for them. In training mode,
    and for a tensor argument that asks for a gradient in grad mode, the model's own code runs; ``explain`` counts such
    calls. Outputs of graphs are detached. Pickles hold the model and the settings. It owns graphs, pool and static
    buffers, not the model.
    """

    _learnt: _Learnt
    _signature: inspect.Signature

    def __init__(self, model: Callable[..., Any], settings: dict[str, Any]) -> None:
        module = _module_of(model)
        called = module.forward if module is model else model
        try:
            signature = inspect.signature(called)
        except ValueError:  # of a builtin
            signature = inspect.signature(lambda *args, **kwargs: None)  # noqa: ARG005
        by_itself = functools.partial(_forward, weakref.ref(self))
        self.__dict__.update(
            _untraced=torch.compiler.disable(by_itself), forward=functools.update_wrapper(by_itself, called),
            _wrapped=model, _module=module, _settings=settings, _signature=signature, _learnt=_Learnt(),
        )  # fmt: skip
        if module is not model:
            self.__dict__.update({n: getattr(model, n) for n in functools.WRAPPER_ASSIGNMENTS if hasattr(model, n)})
            self.__dict__["__signature__"] = signature
        known = self._signature.parameters
        for setting in ("dynamic", "pad"):
            names = [] if any(p.kind is p.VAR_KEYWORD for p in known.values()) else settings[setting] or ()
            if unknown := [name for name in names if name.partition(".")[0] not in known]:
                remedy = did_you_mean(unknown[0], known) + f"Arguments are {', '.join(known)}."
                raise ConfigError(
                    f"{setting} names {unknown[0]!r}, which is no argument of {self._name}", remedy=remedy
                )
        if (example := settings["example"]) is not None:
            if not isinstance(example, Sequence | Mapping | Tensor):
                raise ConfigError(
                    f"the example is a {type(example).__name__}",
                    remedy="Give the arguments of one call: a tensor, a sequence, or a mapping by name.",
                )
            named = dict(example) if isinstance(example, Mapping) else {}
            args = () if named else (example,) if isinstance(example, Tensor) else tuple(example)
            self._prepare(args, named, "the example")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Graphed.forward(self, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a batch: padded, by a graph, and cut; or by the model's own code."""
        if torch.compiler.is_dynamo_compiling():
            return self._untraced(*args, **kwargs)
        form: list[Any] = [len(args), *kwargs]
        tensors = list[Tensor]()
        _flatten(args, form, tensors)
        if kwargs:
            _flatten(kwargs.values(), form, tensors)
        asks = torch.is_grad_enabled() and True in map(_asks_grad, tensors)
        learnt, kind = self._learnt, None
        device = learnt.device
        form += asks, torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        key = (*form, *map(_shape, tensors), *map(_dtype, tensors))  # runners look at devices
        call = learnt.calls.get(key)
        if call is None or self._module.training or current_forward_context() is not None:
            if (why := self._why_eager(form, tensors, asks=asks)) is not None:
                learnt.eager[why] += 1
                return self._wrapped(*args, **kwargs)
            if learnt.pool is None:
                self._take_device(tensors)
                return Graphed.forward(self, *args, **kwargs)  # autocast is asked for this device
            kind, names = self._prepare(args, kwargs, "the first call")
            self._make_room(kind, dict(zip(names, tensors, strict=True)))
            if len(learnt.calls) >= _MOST_CALLS:
                learnt.calls.clear()
            returns = kind.forward.returns
            call = kind.runner, names, None if returns == (Tensor,) else returns
        runner, names, made = call
        inputs: dict[str, Any] = dict(zip(names, tensors, strict=True))
        try:
            output = runner(**inputs)
        except AddressError as error:
            return self._after_a_move(error, runner)(*args, **kwargs)
        if kind is not None:
            kind.say_failures()
            learnt.calls[key] = call
            if kind.forward.objects and not runner.plan.keys:
                self._give_up(kind)
        return output if made is None else _rebuild(iter(made), iter(output))

    def _after_a_move(self, error: AddressError, runner: GraphRunner) -> Callable[..., Any]:
        """What serves a call whose graph would read old memory. Raises the error where the model is to be moved by
        ``self``.
        """
        if any(kind.runner is runner and kind.forward.objects for kind in self._learnt.kinds):
            if not self._learnt.eager[_MOVED]:
                logger.warning("%s runs the model's own code: %s", self._name, error.message)
            self._learnt.eager[_MOVED] += 1
            return cast("Callable[..., Any]", self._wrapped)
        if not self._is_bound:
            raise error
        logger.warning("%s is captured again: %s", self._name, error.message)
        self.recapture()
        return functools.partial(Graphed.forward, self)

    def _why_eager(self, form: Iterable[Any], tensors: Sequence[Tensor], *, asks: bool) -> str | None:
        """Why a call runs by the model's own code; None where it does not."""
        if self._module.training:
            why = "the model is in training mode; call .eval() for graphs"
            if not self._learnt.eager[why]:
                logger.warning("%s: %s", self._name, why)
            return why
        if current_forward_context() is not None:
            return "inside the forward of another runner"
        if asks:
            return "a tensor argument asks for a gradient"
        for box in form if self._learnt.given_up else ():
            if type(box) is _Held and id(box.value) in self._learnt.given_up:
                return f"no graph could be captured with its {type(box.value).__name__}; the log says why"
        if not any(tensor.ndim for tensor in tensors) or not all(tensor.numel() for tensor in tensors):
            return "no tensor argument has a dimension, or one is empty"
        odd = {str(t.dtype) for t in tensors if str(t.dtype).removeprefix("torch.") not in get_args(DType)}
        odd |= {str(t.layout) for t in tensors if t.layout is not torch.strided or t.is_nested}
        return f"a tensor argument is of {', '.join(sorted(odd))}" if odd else None

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], origin: str) -> tuple[_Kind, list[str]]:
        """The kind of a call, its runner open and large enough, and the names of the tensors in the call's order."""
        given, tensors = list[Any](), list[Tensor]()
        _flatten([(args, kwargs)], given, tensors)
        if self._learnt.pool is None:
            self._take_device(tensors)
        marks = [torch.empty(0) for _ in tensors]  # a tensor may come twice in a call, and a mark does not
        args, kwargs = _rebuild(iter(given), iter(marks))
        arguments = dict(self._signature.bind(*args, **kwargs).arguments)
        form, ordered = list[Any](), list[Tensor]()
        _flatten([arguments], form, ordered)
        device = self._learnt.device
        form.append(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
        starred = {n for n, parameter in self._signature.parameters.items() if parameter.kind is parameter.VAR_KEYWORD}
        pairs = [pair for n, value in arguments.items() for pair in _named(value, "" if n in starred else n)]
        name_of = {id(mark): name + "_" * (name in WORDS_OF_A_CALL) for name, mark in pairs}
        if twice := [name for name, count in Counter(name_of.values()).items() if count > 1]:
            raise InputError(f"two tensors of a call are called {twice[0]}", remedy="Give their keys other names.")
        tensor_of = {id(mark): tensor for mark, tensor in zip(marks, tensors, strict=True)}
        named = {name_of[id(mark)]: tensor_of[id(mark)] for mark in ordered}
        backend = self._learnt.pool.backend
        on_device = {n: t.to(backend.device) if t.device.type == "cpu" else t for n, t in named.items()}
        kind = next((kind for kind in self._learnt.kinds if kind.fits(form, named)), None)
        if kind is None:
            kind = self._learn(_ByName(self._wrapped, self._signature, tuple(form), arguments), on_device, origin)
        sizes = kind.sizes_of(named)
        if grown := [name for name in kind.grows if sizes[name] > kind.dims[name].top]:
            kind.dims |= {name: self._dim(kind, name, sizes[name]) for name in grown}
            held = kind.runner.plan.keys
            self._drop(kind)
            self._open(kind)
            kind.runner.exchange(held)
        if any(size < kind.proven[name] for name, size in sizes.items()):
            _Proof(kind, on_device, backend).prove(self._settings["pad"] or {})
        return kind, [name_of[id(mark)] for mark in marks]

    def _take_device(self, tensors: Sequence[Tensor]) -> None:
        """Make the pool of all runners, on the device of the model or of the first batch."""
        held = [*self._module.parameters(), *self._module.buffers(), *tensors]
        device = next((t.device for t in held if t.device.type != "cpu"), held[0].device)
        self._learnt.pool = pool = GraphPool(select_backend(str(self._settings["device"] or device)))
        self._learnt.device = pool.backend.device.type

    def _learn(self, forward: _ByName, named: dict[str, Tensor], origin: str) -> _Kind:
        """Infer what a new kind of calls needs, prove its padding, and open its runner."""
        backend, pads = self._learnt.pool.backend, self._settings["pad"] or {}
        for given in (*(self._settings["dynamic"] or ()), *pads):
            parts = [name for name in named if name.partition(".")[0] == given.partition(".")[0]]
            if parts and given not in named:  # an argument that this call leaves out may come in another
                raise ConfigError(f"dynamic or pad names {given!r}", remedy=f"Names there are {', '.join(parts)}.")
        shapes, said = self._vary(named)
        specs = {n: Input(shape=shapes[n], dtype=t.dtype, pad=pads.get(n, 0)) for n, t in named.items()}
        kind = _Kind(forward, specs, backend.device)
        kind.notes = [f"{n}: {s.dtype} [{', '.join(map(str, s.shape))}], from {origin}" for n, s in specs.items()]
        kind.notes.append(said)
        for name, size in kind.sizes_of(named).items():
            kind.dims[name] = self._dim(kind, name, size)
            if said is _NOTHING_VARIES:
                kind.dims[name] = Dim(name, min=size, max=size, sizes=(size,))
        kind.forward.returns = _Proof(kind, named, backend).prove(pads)
        while len(self._learnt.kinds) >= self._settings["max_graphs"]:
            self._drop(min(self._learnt.kinds, key=lambda kind: kind.runner.stats.calls))
        self._open(kind)
        return kind

    def _vary(self, named: Mapping[str, Tensor]) -> tuple[dict[str, list[int | str]], str]:
        """Shapes with names where sizes vary, and why there."""
        dynamic, said = self._settings["dynamic"], "names of dimensions: as dynamic says"
        if dynamic is None:
            rows = Counter(tensor.shape[0] for tensor in named.values() if tensor.ndim)
            votes = [n for n in rows if rows[n] == max(rows.values())]
            if len(votes) > 1:  # one row is broadcast
                votes = [n for n in votes if n > 1]
            one, other = (next(name for name, t in named.items() if t.shape[:1] == (n,)) for n in (votes[0], votes[-1]))
            if len(votes) > 1:
                raise InputError(
                    f"inputs {one!r} and {other!r} disagree in dimension 0: {votes[0]} and {votes[-1]}",
                    remedy=f"Say which dimensions vary, such as dynamic={{{one!r}: {{0: 'batch'}}}}.",
                )
            dynamic = {name: {0: BATCH} for name, t in named.items() if t.shape[:1] == (votes[0],)}
            said = f"{BATCH}: dimension 0 of {', '.join(dynamic)}"
        shapes: dict[str, list[int | str]] = {name: list(tensor.shape) for name, tensor in named.items()}
        for name, shape in shapes.items():
            for at, dim in dynamic.get(name, {}).items():
                if not -len(shape) <= at < len(shape):
                    raise ConfigError(f"dynamic: {name!r} has no dimension {at}; its shape is {shape}")
                shape[at] = dim if isinstance(dim, str) else dim.name
        if not any(isinstance(dim, str) for shape in shapes.values() for dim in shape):
            next(shape for shape in shapes.values() if shape)[0] = BATCH
            said = _NOTHING_VARIES
        return shapes, said

    def _dim(self, kind: _Kind, name: str, size: int) -> Dim:
        """Bounds and sizes of a name: those given, or that grow with batches."""
        given = [dim for dims in (self._settings["dynamic"] or {}).values() for dim in dims.values()]
        sizes, most = (self._settings[key] if name == kind.names[0] else None for key in ("sizes", "max_size"))
        for dim in given:
            if isinstance(dim, Dim) and dim.name == name:
                if sizes or most:
                    remedy = f"Leave them out: cgplan.Dim({name!r}, max=..., sizes=...)."
                    raise ConfigError(f"{name} has a Dim, and sizes or max_size were given, too", remedy=remedy)
                return dim
        if sizes is not None and not isinstance(sizes, str):
            sizes = tuple(sizes)
            most = most or max(sizes, default=None)
        if most is None:
            kind.grows.add(name)
            most = 4 << (size - 1).bit_length()
        return Dim(name, max=most, sizes=sizes)

    def _open(self, kind: _Kind) -> None:
        """Give a kind its runner, for its present sizes."""
        pool = self._learnt.pool
        compilation = self._settings["compilation"]
        # Others may bind tensors in arguments between calls (a beam search does, in a cache), and move a bound model.
        if (kind.forward.objects or self._is_bound) and "address_check" not in compilation.model_fields_set:
            compilation = compilation.model_copy(update={"address_check": "always"})
        config = validate_config({
            "model": {"output_shapes": kind.outputs},
            "dims": kind.dims,
            "device": str(pool.backend.device),
            "inputs": kind.specs,
            "compilation": compilation,
            "budget": BudgetConfig(max_graphs=self._settings["max_graphs"]),
        })  # fmt: skip
        plan = build_plan(config)
        kind.runner = CaptureSession(plan, kind.forward, pool.backend, config, pool=pool, name=self._name).run()
        self._learnt.kinds.append(kind)

    def _make_room(self, kind: _Kind, inputs: Mapping[str, Tensor]) -> None:
        """Free the least used graphs, if there are too many with the one that a batch may be about to have captured."""

        def use(graph: tuple[_Kind, Key]) -> tuple[bool, int]:
            calls = graph[0].runner.stats.replays[graph[1]]
            return graph[0] is kind and not calls, calls  # what is new is not freed first

        wanted, failed = kind.runner.route(inputs).wanted, kind.runner.report.failed
        is_new = wanted is not None and wanted not in [(key.mode, key.descriptor) for key in failed]
        most = self._settings["max_graphs"] - is_new
        while len(graphs := [(k, key) for k in self._learnt.kinds for key in k.runner.plan.keys]) > most:
            least, key = min(graphs, key=use)
            if not any(runner.stats.evictions for runner in self.runners):
                logger.warning(
                    "%s: calls ask for more than %s graphs; the least used go", self._name, self._settings["max_graphs"]
                )
            self._learnt.calls.clear()
            least.runner.exchange(evicted=[key])
            if least is not kind and not least.runner.plan.keys:
                self._drop(least)

    def _give_up(self, kind: _Kind) -> None:
        """Forget an object among the arguments with which no kind could be captured, after a few: a cache that makes
        its tensors anew is of another kind with each token.
        """
        for box in kind.forward.objects:
            alike = [known for known in self._learnt.kinds if box in known.forward.objects]
            if len(alike) == _MOST_FAILURES and not any(known.runner.plan.keys for known in alike):
                with suppress(TypeError):  # not every object takes weak references
                    weakref.finalize(box.value, self._learnt.given_up.discard, id(box.value)).atexit = False
                    self._learnt.given_up.add(id(box.value))
                    for known in alike:
                        self._drop(known)

    def _drop(self, kind: _Kind) -> None:
        self._learnt.calls.clear()
        self._learnt.kinds.remove(kind)
        kind.runner.close()

    @property
    def _is_bound(self) -> bool:
        return getattr(self._wrapped, "__self__", None) is self._module

    @property
    def _name(self) -> str:
        return f"graphed {getattr(self._wrapped, '__name__', type(self._wrapped).__name__)}"

    @property
    def runners(self) -> tuple[GraphRunner, ...]:
        """The runner of each kind of calls, most calls first. Freed graphs close them."""
        return tuple(
            sorted((k.runner for k in self._learnt.kinds), key=lambda runner: runner.stats.calls, reverse=True)
        )

    @property
    def report(self) -> CaptureReport:
        """Memory and time of the graphs, for the kind with the most calls. Raises CgplanError before the first one."""
        return self._busiest.runner.report

    @property
    def _busiest(self) -> _Kind:
        if not self._learnt.kinds:
            raise CgplanError(f"{self._name} has no graphs", remedy="Call it first, or give it an example.")
        return max(self._learnt.kinds, key=lambda kind: kind.runner.stats.calls)

    def explain(self) -> str:
        """What was inferred for each kind of calls, and from what; which graphs there are; calls that ran eagerly."""
        lines = [
            f"{self._name}: {sum(len(r.plan.keys) for r in self.runners)} of {self._settings['max_graphs']} graphs"
        ]
        eager = [(calls, why) for why, calls in self._learnt.eager.items()]
        for kind in self._learnt.kinds:
            sizes = ", ".join(key.size for _, key in reversed(kind.runner.plan.keys))
            lines.append(f"- {kind.runner.stats.calls} calls; graphs of {sizes or 'no size'}")
            lines += [f"  {note}" for note in kind.notes]
            lines += [f"  not captured: {failed.descriptor}: {failed.detail}" for failed in kind.runner.report.failed]
            eager += [(calls, str(why)) for why, calls in kind.runner.stats.eager.items()]
        if any(p.requires_grad for p in self._module.parameters()):
            lines.append("outputs of graphs are detached; parameters ask for gradients")
        return "\n".join([*lines, *(f"{calls} calls ran eagerly: {why}" for calls, why in eager)])

    def save_config(self, path: str | Path) -> None:
        """Write ``config_text`` to a file. Raises as it does."""
        Path(path).write_text(self.config_text(), encoding="utf-8")

    def config_text(self, target: str | None = None, kwargs: Mapping[str, Any] | None = None) -> str:
        """The configuration of the kind with the most calls, as `cgplan capture --config` takes it; comments say what
        was inferred, and from what. Arguments that are no tensors stand in ``call``, see ``as_called``.

        Args:
            target, kwargs: What makes the model; absent: its class, where that needs no arguments.

        Raises:
            CgplanError: there was no call yet.
            ConfigError: an argument of the calls has no form in YAML, or they were made under autocast.
        """
        kind = self._busiest
        config, target = kind.runner.config, target or _target(self._wrapped)
        values = config.model_dump(mode="json", exclude_defaults=True, exclude={"dims": {"__all__": {"name"}}})
        made_by = {name: value for name, value in (("target", target), ("kwargs", dict(kwargs or {}))) if value}
        *form, autocast = kind.forward.form
        if autocast:
            raise ConfigError(
                "calls were made under torch.autocast, of which a file knows nothing",
                remedy="Enter torch.autocast in the model's forward, and call it outside.",
            )
        if kind.forward.plain != tuple(kind.specs):
            if target is not None and target.partition(":")[0].endswith(".py"):
                made_by["target"] = str(Path(target).resolve())
            call = _rebuild(iter(form), map(_Name, kind.specs))
            written = {name: _written(value, name) for name, value in call.items()}
            made_by = {"target": f"{__name__}:{as_called.__name__}", "kwargs": {**made_by, "call": written}}
        values["model"] = {**made_by, **values.get("model", {})}
        values["compilation"].pop("capture_policy", None)
        notes = ["Written by cgplan.graphed, which inferred:", *kind.notes]
        if target is None:
            key = "model.kwargs.target" if "target" in made_by else "model.target"
            notes.append(f"To fill in: {key}, a function that returns the model, such as my_model.py:build")
        text = "".join(f"# {note}\n" for note in notes)
        return text + yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=110)

    def recapture(self) -> None:
        """Free all graphs; calls capture them again as they need them."""
        for kind in list(self._learnt.kinds):
            self._drop(kind)
        self.__dict__["_learnt"] = _Learnt(eager=self._learnt.eager)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_wrapped"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped, name, value)  # which the forward may read
        self.recapture()

    def __reduce__(self) -> Any:
        name = getattr(self._wrapped, "__qualname__", "")  # a decorated function is a global of this name
        if name and getattr(sys.modules.get(self._wrapped.__module__), name, None) is self:
            return name
        return type(self), (self._wrapped, {**self._settings, "example": None})


class GraphedModule(Graphed, nn.Module):
    """Graphed of a module, and a module itself: with the model's parameters and ``state_dict``. After ``to``, graphs
    are captured again as calls ask for them.
    """

    def __init__(self, model: nn.Module, settings: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        _share(self, model)
        super().__init__(model, settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks:
            return nn.Module.__call__(self, *args, **kwargs)
        return Graphed.forward(self, *args, **kwargs)  # nn.Module would take a microsecond to find that out

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self.recapture()
        self._module._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> Self:
        """As the model's; in training mode calls run the model's own code."""
        self._module.train(mode)
        self.__dict__["training"] = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self._module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's; graphs are captured again where parameters are exchanged (``assign=True``)."""
        if kwargs.get("assign"):
            self.recapture()
        return self._module.load_state_dict(*args, **kwargs)


def _target(model: object) -> str | None:
    """The target that makes such a model: its class, if that is importable and asks for no arguments."""
    kind = type(model)
    is_global = getattr(sys.modules[kind.__module__], kind.__qualname__, None) is kind and kind.__module__ != "__main__"
    takes_none = kind.__init__ is nn.Module.__init__ or not inspect.signature(kind).parameters
    made_alone = isinstance(model, nn.Module) and takes_none
    return f"{kind.__module__}:{kind.__qualname__}" if is_global and made_alone else None


def _dim_of(given: Any) -> Dim | str:
    """A dimension of ``dynamic``: a name, or one with its bounds."""
    if isinstance(given, Dim | str):
        return given
    if not hasattr(given, "__name__"):
        raise ConfigError(
            f"dynamic: {given!r} names no dimension", remedy="Give cgplan.Dim, torch.export.Dim, or a name."
        )
    is_bound = type(given.max) is int and given.__name__.isidentifier()
    return Dim(given.__name__, min=max(given.min, 1), max=given.max) if is_bound else str(given.__name__)


def graphed(
    model: Callable[..., Any] | None = None,
    *,
    sizes: Sequence[int] | str | None = None,
    max_size: int | None = None,
    example: Tensor | Sequence[Any] | Mapping[str, Any] | None = None,
    dynamic: Mapping[str, Mapping[int, Any]] | None = None,
    pad: Mapping[str, float] | None = None,
    max_graphs: int = 16,
    device: str | torch.device | None = None,
    compilation: Mapping[str, Any] | None = None,
    outputs: Literal["clone", "borrow"] = "clone",
) -> Any:
    """A drop-in for a model or a function of tensors that runs by captured graphs; also a decorator.

        g = cgplan.graphed(model, sizes=[1, 4, 16])
        y = g(x)

    A graph is captured when a batch first asks for it. Arguments may be tensors, numbers, text, None, and dicts, lists,
    tuples, dataclasses and pytrees of them; those that are no tensors are part of the kind of the call. An object of
    another kind is known by its identity: graphs see tensors in it, and no later change beside those.

    Args:
        model: Absent: a decorator is returned.
        sizes: Capture sizes, or a ladder's name; absent: powers of two.
        max_size: The largest size. A larger batch runs eagerly, or is an error (``on_miss`` in ``compilation``).
            Absent: that of ``sizes``, or none, and graphs grow with the batches.
        example: Arguments of one call: a tensor, a sequence, or a mapping by name; absent: the first call teaches.
        dynamic: Dimensions that vary, by input: ``{"x": {0: cgplan.Dim("batch", max=64), 1: "length"}}``; parts of an
            argument are named ``obs.position``. ``{}``: none, each shape has a graph. Absent: dimension 0 of the inputs
            that agree in it.
        pad: Values of padding by input, where it is not 0: those alone have to be harmless.
        max_graphs: Graphs at most, of all kinds of calls; the least used go.
        device: Absent: the model's, or that of the tensors.
        compilation: More settings of ``compilation``.
        outputs: ``borrow``: outputs are valid until the next call; ``clone``: they are the caller's.

    Calls raise NumbersError where padding changes real rows, InputError for inputs that disagree in a dimension,
    ConfigError for a wrong setting, ModelError and OutputShapeError where the model fails on padding, or has outputs
    whose sizes do not follow from those of its inputs.
    """
    if dynamic is not None:
        dynamic = {name: {at: _dim_of(dim) for at, dim in dims.items()} for name, dims in dynamic.items()}
    if any(isinstance(value, str) for value in (pad or {}).values()):
        raise ConfigError(f"pad is {pad}", remedy="Give numbers; cgplan.capture takes `last`.")
    settings: dict[str, Any] = {
        "sizes": sizes, "max_size": max_size, "example": example, "dynamic": dynamic, "pad": pad, "device": device,
        "max_graphs": BudgetConfig(max_graphs=max_graphs).max_graphs,
        "compilation": CompilationConfig(**{"capture_policy": "lazy", "outputs": outputs, **(compilation or {})}),
    }  # fmt: skip

    def made(model: Callable[..., Any]) -> Graphed:
        return GraphedModule(model, settings) if isinstance(model, nn.Module) else Graphed(model, settings)

    return made if model is None else made(model)
