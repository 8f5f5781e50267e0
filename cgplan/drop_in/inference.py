"""From a kind's first call: names of inputs, and which sizes vary."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from cgplan.backends import select_backend
from cgplan.config import BudgetConfig, CompilationConfig, Dim, Input
from cgplan.config.schema import WORDS_OF_A_CALL
from cgplan.drop_in.call_form import (
    ByName,
    Call,
    arguments_by_name,
    constants_in,
    tensors_by_name,
)
from cgplan.drop_in.kinds import Kind
from cgplan.errors import ConfigError
from cgplan.planning.build import refuse_auto

BATCH = "batch"
_MOST_NOTES = 16
_NOTHING_VARIES = "nothing varies: each shape has its graph"
_DYNAMIC = 'Pass dimensions by input: dynamic={"x": {0: "batch"}}.'
_COMPILATION = 'Pass settings by name: compilation={"on_miss": "error"}.'
_PAD = 'Pass values by input: pad={"x": -1}.'
_SIZES = "Pass a list of sizes, or the name of a ladder: sizes=[1, 2, 4]."
_STRICT = "Pass strict=True, or leave it out."
_IGNORE = 'Pass a list: ignore=["model.calls"].'

NamedShapes = dict[str, list[int | str]]


@dataclass
class Settings:
    sizes: Any
    max_size: int | None
    dynamic: Any  # Mapping[str, Mapping[int, Dim | str]] | None
    pad: Any
    max_graphs: Any
    device: str | torch.device | None
    compilation: Any
    outputs: str
    verify: str
    strict: bool
    ignore: Any
    grad: str | None

    def __post_init__(self) -> None:
        _refuse_other("dynamic", self.dynamic, Mapping, _DYNAMIC)
        _refuse_other("pad", self.pad, Mapping, _PAD)
        _refuse_other("sizes", self.sizes, Sequence, _SIZES)
        if isinstance(self.ignore, str):
            self.ignore = (self.ignore,)
        _refuse_other("ignore", self.ignore, Sequence, _IGNORE)
        _refuse_other("compilation", self.compilation, Mapping, _COMPILATION)
        _refuse_other("strict", self.strict, bool, _STRICT)
        if self.grad not in ("recompute", None):
            raise ConfigError(f"grad is {self.grad!r}", remedy="Choose recompute or None.")
        most = 1 << 20 if self.sizes else self.max_size or 1 << 20
        try:
            Dim(BATCH, max=most, sizes=self.sizes)
        except ConfigError as error:
            raise ConfigError(error.message.removeprefix("Dim: "), remedy=_SIZES) from None
        if self.max_size and self.sizes and not isinstance(self.sizes, str):
            raise ConfigError(
                "max_size has no effect beside a list of sizes",
                remedy="Leave it out: larger batches than the largest size run eagerly.",
            )
        if self.device is not None and not torch.cuda.is_available():
            select_backend(str(self.device))  # which raises
        self.pad = dict(self.pad or {})
        for name, value in self.pad.items():
            _refuse_other("a name of pad", name, str, _PAD)
            if isinstance(value, str):
                remedy = "Give numbers; cgplan.capture takes `last`."
                raise ConfigError(f"pad is {self.pad}", remedy=remedy)
        if self.max_graphs is None:
            raise ConfigError("max_graphs is None", remedy="Pass a number: max_graphs=16.")
        self.max_graphs = BudgetConfig(max_graphs=self.max_graphs).max_graphs
        self.dynamic = _dims_by_input(self.dynamic)
        if self.dynamic == {} and (self.sizes or self.max_size):
            raise ConfigError(
                "sizes and max_size have no effect where nothing varies (dynamic={})",
                remedy="Leave them out: each shape has its graph.",
            )
        self.ignore = tuple(self.ignore or ())
        own = {
            "strict": True,  # captures raise, and ``graphed`` decides
            "ignore": self.ignore,
            "address_check": "off",
        }
        given = {
            "capture_policy": "lazy",
            "outputs": self.outputs,
            "verify": self.verify,
            **(self.compilation or {}),
        }
        for name in own.keys() & given:
            raise ConfigError(
                f"compilation has {name}, which graphed sets",
                remedy="Pass strict and ignore to graphed itself; leave out address_check.",
            )
        self.compilation = CompilationConfig(**given, **own)
        refuse_auto(self.compilation)

    @property
    def recomputes(self) -> bool:
        return self.grad is not None


def _dims_by_input(given: Any) -> dict[str, dict[int, Dim | str]] | None:
    if given is None:
        return None
    found = dict[str, dict[int, Dim | str]]()
    for name, dims in given.items():
        _refuse_other("a name of dynamic", name, str, _DYNAMIC)
        _refuse_other(f"dynamic[{name!r}]", dims, Mapping, _DYNAMIC)
        for at in dims:
            _refuse_other(f"a dimension of dynamic[{name!r}]", at, int, _DYNAMIC)
        found[name] = {at: _dim_of(dim) for at, dim in dims.items()}
    return found


def _refuse_other(
    name: str,
    value: Any,
    kind: type,
    remedy: str,
) -> None:
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name} is {value!r:.80}, of {type(value).__name__}", remedy=remedy)


def _dim_of(given: Any) -> Dim | str:
    if isinstance(given, Dim | str):
        return given
    if not (hasattr(given, "__name__") and hasattr(given, "max")):
        raise ConfigError(
            f"dynamic: {given!r} names no dimension",
            remedy="Give cgplan.Dim, torch.export.Dim, or a name.",
        )
    name = given.__name__
    if type(given.max) is int and name.isidentifier():
        return Dim(
            name,
            min=max(given.min, 1),
            max=given.max,
        )
    return str(name)


@dataclass(eq=False, repr=False)
class Inference:
    __graph_memory__ = True

    model: Callable[..., Any]
    signature: inspect.Signature
    settings: Settings

    def new_kind(
        self,
        call: Call,
        state: Any,
        device: torch.device,
        *,
        is_exact: bool,
    ) -> Kind:
        """Raises InputError for sizes that contradict the settings, and ConfigError."""
        forward = ByName(
            self.model,
            len(call.args),
            call.kwargs,
            call.form[:-1],
            call.tail.same,
        )
        pads = self.settings.pad
        names = self._names_of(forward, call)
        named = dict(zip(names, call.tensors, strict=True))
        dynamic = {} if is_exact else self.settings.dynamic
        shapes, note = _shapes_of(named, dynamic)
        specs = dict[str, Input]()
        for name, tensor in named.items():
            specs[name] = Input(
                shape=shapes[name],
                dtype=tensor.dtype,
                pad=pads.get(name, 0),
            )
        kind = Kind(forward, specs, call.form, state, device)
        kind.notes.append(note)
        if len(kind.names) == 1:
            for name, spec in kind.specs.items():
                # copies of a real row are always valid, but only rows have copies
                if name not in pads and any(extent.symbol for extent in spec.extents):
                    kind.specs[name] = spec.changed(pad="last")
        kind.is_exact = note == _NOTHING_VARIES
        for name, spec in kind.specs.items():
            shape = ", ".join(map(str, named[name].shape if kind.is_exact else spec.shape))
            kind.notes.append(f"{name}: {spec.dtype} [{shape}]")
        constants = constants_in(call.by_name(self.signature), "")
        for path, value in islice(constants, _MOST_NOTES):
            if value is not None:
                kind.notes.append(f"{path} = {value!r:.40}")
        tail = call.tail
        kind.notes.append("grad mode" if tail.is_grad else "no_grad")
        if torch.is_inference_mode_enabled():
            kind.notes.append("first called in inference_mode")
        if tail.autocast:
            kind.notes.append(f"autocast {tail.autocast}")
        for name, size in kind.sizes_of(call.tensors).items():
            if kind.is_exact:
                kind.dims[name] = Dim(
                    name,
                    min=size,
                    max=size,
                    sizes=(size,),
                )
            else:
                kind.dims[name] = self.dimension_of(kind, name, size)
        return kind

    def dimension_of(
        self,
        kind: Kind,
        name: str,
        size: int,
    ) -> Dim:
        settings = self.settings
        sizes: Any = None
        most: int | None = None
        if name == kind.names[0]:
            sizes = settings.sizes
            most = settings.max_size
        for dims in (settings.dynamic or {}).values():
            for given in dims.values():
                if not isinstance(given, Dim) or given.name != name:
                    continue
                if sizes or most:
                    raise ConfigError(
                        f"{name} has a Dim, and sizes or max_size were given, too",
                        remedy=f"Leave them out: cgplan.Dim({name!r}, max=..., sizes=...).",
                    )
                return given
        if sizes is not None and not isinstance(sizes, str):
            sizes = tuple(sizes)
            most = max(sizes)
        if most is None:
            kind.grows.add(name)
            most = 4 << (size - 1).bit_length()
        return Dim(
            name,
            max=most,
            sizes=sizes,
        )

    def _names_of(self, forward: ByName, call: Call) -> list[str]:
        """Raises ConfigError where settings name other tensors."""
        # tensors may come twice, marks do not
        marks = [torch.empty(0) for _ in call.tensors]
        args, kwargs = forward.arguments(marks)
        name_of = dict[int, str]()
        for argument, value in arguments_by_name(self.signature, args, kwargs).items():
            for path, mark in tensors_by_name(value, argument):
                name_of[id(mark)] = path + "_" * (path in WORDS_OF_A_CALL)
        names = list[str]()
        for index, mark in enumerate(marks):
            names.append(name_of.get(id(mark), f"tensor_{index}"))
        counts = Counter(names)
        for index, name in enumerate(names):
            if counts[name] > 1:
                names[index] = f"{name}_{index}"
        for given in (*(self.settings.dynamic or ()), *self.settings.pad):
            head = given.partition(".")[0]
            parts = [name for name in names if name.partition(".")[0] == head]
            if parts and given not in names:  # another call may have it
                raise ConfigError(
                    f"dynamic or pad names {given!r}", remedy=f"Names there are {', '.join(parts)}."
                )
        return names


def _shapes_of(
    named: Mapping[str, Tensor],
    dynamic: Mapping[str, Mapping[int, Dim | str]] | None,
) -> tuple[NamedShapes, str]:
    shapes: NamedShapes = {name: list(tensor.shape) for name, tensor in named.items()}
    note = "names of dimensions: as dynamic says"
    if dynamic is None:
        batched = _batched(named)
        dynamic = {name: {0: BATCH} for name in batched}
        note = f"{BATCH}: dimension 0 of {', '.join(batched)}"
    is_named = False
    for name, shape in shapes.items():
        for at, dim in dynamic.get(name, {}).items():
            if not -len(shape) <= at < len(shape):
                raise ConfigError(
                    f"dynamic names dimension {at} of {name!r}, which has {len(shape)}",
                    remedy="The first one is 0, the last one -1.",
                )
            shape[at] = dim if isinstance(dim, str) else dim.name
            is_named = True
    if not is_named:
        first = next(shape for shape in shapes.values() if shape)
        first[0] = BATCH
        note = _NOTHING_VARIES
    return shapes, note


def _batched(named: Mapping[str, Tensor]) -> list[str]:
    rows = Counter[int]()
    for tensor in named.values():
        if tensor.ndim:
            rows[tensor.shape[0]] += 1
    several = {size: count for size, count in rows.items() if size > 1}
    counts = several or rows  # one row may be broadcast
    most = max(counts.values())
    votes = [size for size, count in counts.items() if count == most]
    if len(votes) > 1:
        return []
    shape = (votes[0],)
    return [name for name, tensor in named.items() if tensor.shape[:1] == shape]
