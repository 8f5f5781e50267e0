"""What is inferred from the first call of a kind: names of inputs, and which sizes vary."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from cgplan.config import BudgetConfig, CompilationConfig, Dim, Input
from cgplan.config.schema import WORDS_OF_A_CALL
from cgplan.drop_in.call_form import (
    ByName,
    Call,
    arguments_by_name,
    tensors_by_name,
)
from cgplan.drop_in.kinds import AMBIENT, Kind
from cgplan.errors import ConfigError

BATCH = "batch"
_NOTHING_VARIES = "nothing varies: each shape has its graph"
_DYNAMIC = 'Pass dimensions by input: dynamic={"x": {0: "batch"}}.'
_COMPILATION = 'Pass settings by name: compilation={"on_miss": "error"}.'
_PAD = 'Pass values by input: pad={"x": -1}.'
_VERIFY = ("off", "first", "rarely", "always")

Shapes = dict[str, list[int | str]]


@dataclass(frozen=True)
class Settings:
    """The arguments of ``graphed``, checked."""

    sizes: Sequence[int] | str | None
    max_size: int | None
    dynamic: Mapping[str, Mapping[int, Dim | str]] | None
    pad: Mapping[str, float]
    device: str | torch.device | None
    max_graphs: int
    strict: bool
    ignore: tuple[str, ...]
    recomputes: bool  # grad="recompute"
    compilation: CompilationConfig

    @classmethod
    def checked(
        cls,
        *,
        sizes: Any,
        max_size: int | None,
        dynamic: Any,
        pad: Any,
        max_graphs: int,
        device: Any,
        compilation: Any,
        outputs: str,
        verify: Any,
        strict: bool,
        ignore: Any,
        grad: Any,
    ) -> Settings:
        """Raises ConfigError where an argument of ``graphed`` is wrong."""
        _refuse_other("dynamic", dynamic, Mapping, _DYNAMIC)
        _refuse_other("pad", pad, Mapping, _PAD)
        sizes_remedy = "Pass a list of sizes, or the name of a ladder: sizes=[1, 2, 4]."
        _refuse_other("sizes", sizes, Sequence, sizes_remedy)
        ignore = (ignore,) if isinstance(ignore, str) else ignore
        _refuse_other("ignore", ignore, Sequence, 'Pass a list: ignore=["model.calls"].')
        _refuse_other("compilation", compilation, Mapping, _COMPILATION)
        _refuse_unknown("verify", verify, _VERIFY)
        _refuse_unknown("grad", grad, ("recompute", None))
        if sizes is not None and not isinstance(sizes, str):
            for size in sizes:
                if not isinstance(size, int):
                    what = f"sizes has {size!r}, which is no number"
                    raise ConfigError(what, remedy=sizes_remedy)
        for name, value in (pad or {}).items():
            _refuse_other("a name of pad", name, str, _PAD)
            if isinstance(value, str):
                remedy = "Give numbers; cgplan.capture takes `last`."
                raise ConfigError(f"pad is {pad}", remedy=remedy)
        if max_graphs is None:
            raise ConfigError("max_graphs is None", remedy="Pass a number: max_graphs=16.")
        ignored = tuple(ignore or ())
        given = {
            "capture_policy": "lazy",
            "outputs": outputs,
            "verify": verify,
            **(compilation or {}),
            "strict": True,
            "ignore": ignored,
            "address_check": "off",
        }
        return cls(
            sizes=sizes,
            max_size=max_size,
            dynamic=_dims_by_input(dynamic),
            pad=dict(pad or {}),
            device=device,
            max_graphs=cast(int, BudgetConfig(max_graphs=max_graphs).max_graphs),
            strict=strict,
            ignore=ignored,
            recomputes=grad is not None,
            compilation=CompilationConfig(**given),
        )


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


def _refuse_unknown(
    name: str,
    value: Any,
    allowed: Sequence[str | None],
) -> None:
    if value not in allowed:
        remedy = f"Choose one of {', '.join(map(str, allowed))}."
        raise ConfigError(f"{name} is {value!r}", remedy=remedy)


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
        return Dim(name, min=max(given.min, 1), max=given.max)
    return str(name)


class Inference:
    """Makes kinds of calls of one model."""

    __graph_memory__ = True  # no state of a model that holds one

    def __init__(
        self,
        model: Callable[..., Any],
        signature: inspect.Signature,
        settings: Settings,
    ) -> None:
        self._model = model
        self._signature = signature
        self._settings = settings

    def kind(
        self,
        call: Call,
        device: torch.device,
        *,
        is_exact: bool,
    ) -> Kind:
        """The kind of a call; ``is_exact``: nothing varies in it. Raises InputError for sizes that
        contradict the settings, and ConfigError.
        """
        forward = ByName(
            self._model,
            len(call.args),
            call.kwargs,
            call.form[:-AMBIENT],
        )
        pads = self._settings.pad
        names = self._names_of(forward, call)
        named = dict(zip(names, call.tensors, strict=True))
        dynamic = {} if is_exact else self._settings.dynamic
        shapes, note = _shapes_of(named, dynamic)
        specs = dict[str, Input]()
        for name, tensor in named.items():
            specs[name] = Input(
                shape=shapes[name],
                dtype=tensor.dtype,
                pad=pads.get(name, 0),
            )
        kind = Kind(forward, specs, device, note)
        if len(kind.names) == 1:
            for name, spec in specs.items():
                # copies of a real row are valid for the model, in each dtype
                if name not in pads and any(extent.symbol for extent in spec.extents):
                    specs[name] = spec.model_copy(update={"pad": "last"})
        for name, spec in specs.items():
            kind.notes.append(f"{name}: {spec.dtype} [{', '.join(map(str, spec.shape))}]")
        kind.is_exact = note == _NOTHING_VARIES
        for name, size in kind.sizes_of(call.tensors).items():
            if kind.is_exact:
                kind.dims[name] = Dim(name, min=size, max=size, sizes=(size,))
            else:
                kind.dims[name] = self.dim(kind, name, size)
        return kind

    def dim(
        self,
        kind: Kind,
        name: str,
        size: int,
    ) -> Dim:
        """Bounds and sizes of a name: those given, or that grow with batches."""
        settings = self._settings
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
            most = most or max(sizes, default=None)
        if most is None:
            kind.grows.add(name)
            most = 4 << (size - 1).bit_length()
        return Dim(name, max=most, sizes=sizes)

    def _names_of(
        self,
        forward: ByName,
        call: Call,
    ) -> list[str]:
        """A name for each tensor of a call. Raises ConfigError where settings name others."""
        # a tensor may come twice in a call, and a mark does not
        marks = [torch.empty(0) for _ in call.tensors]
        args, kwargs = forward.arguments(marks)
        name_of = dict[int, str]()
        for argument, value in arguments_by_name(self._signature, args, kwargs).items():
            for path, mark in tensors_by_name(value, argument):
                name_of[id(mark)] = path + "_" * (path in WORDS_OF_A_CALL)
        names = list[str]()
        for index, mark in enumerate(marks):
            names.append(name_of.get(id(mark), f"tensor_{index}"))
        counts = Counter(names)
        for index, name in enumerate(names):
            if counts[name] > 1:
                names[index] = f"{name}_{index}"
        for given in (*(self._settings.dynamic or ()), *self._settings.pad):
            head = given.partition(".")[0]
            parts = [name for name in names if name.partition(".")[0] == head]
            if parts and given not in names:  # another call may have an argument that this lacks
                raise ConfigError(
                    f"dynamic or pad names {given!r}", remedy=f"Names there are {', '.join(parts)}."
                )
        return names


def _shapes_of(
    named: Mapping[str, Tensor],
    dynamic: Mapping[str, Mapping[int, Dim | str]] | None,
) -> tuple[Shapes, str]:
    """Shapes with names where sizes vary, and a note on why there."""
    shapes: Shapes = {name: list(tensor.shape) for name, tensor in named.items()}
    note = "names of dimensions: as dynamic says"
    if dynamic is None:
        batched = _batched(named)
        dynamic = {name: {0: BATCH} for name in batched}
        note = f"{BATCH}: dimension 0 of {', '.join(batched)}"
    is_named = False
    for name, shape in shapes.items():
        for at, dim in dynamic.get(name, {}).items():
            if -len(shape) <= at < len(shape):
                shape[at] = dim if isinstance(dim, str) else dim.name
                is_named = True
    if not is_named:
        first = next(shape for shape in shapes.values() if shape)
        first[0] = BATCH
        note = _NOTHING_VARIES
    return shapes, note


def _batched(named: Mapping[str, Tensor]) -> list[str]:
    """The inputs whose dimension 0 has the size that most inputs have there."""
    rows = Counter(tensor.shape[0] for tensor in named.values() if tensor.ndim)
    several = {size: count for size, count in rows.items() if size > 1}
    counts = several or rows  # one row may be broadcast
    most = max(counts.values())
    votes = [size for size, count in counts.items() if count == most]
    if len(votes) > 1:
        return []
    return [name for name, tensor in named.items() if tensor.shape[:1] == (votes[0],)]
