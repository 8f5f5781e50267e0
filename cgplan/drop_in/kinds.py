"""Kinds of calls: what calls have in common that one set of graphs can serve, and the life of each.

Note [The life of a kind]
    The first two calls of a kind run by the model's own code, and answer with it. The second one is
    watched: what it changes of Python, each run changes, and the kind stays with the model's own
    code. The third call captures. So the user's code runs no more often than it is called, until it
    is known to leave Python as it found it. What the sizes of outputs are is learnt from runs that
    were made anyway: those calls, the look at a padded batch, and comparisons of replays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cgplan.buffers.batch import BatchReader
from cgplan.config import Dim, Input
from cgplan.drop_in.call_form import (
    ById,
    ByName,
    Form,
    Shapes,
    is_tensor_type,
    object_roots,
    objects_in,
    shapes_of,
)
from cgplan.errors import InputError, OutputShapeError
from cgplan.graphs.fingerprint import Fingerprint
from cgplan.graphs.watch import Watch
from cgplan.runner.runner import GraphRunner

WATCHED = 2  # calls by the model's own code, before a capture
AMBIENT = 4  # parts of a form that are no arguments, at its end

Shape = tuple[int | str, ...]


class Kind:
    """One kind of calls, see Note [The life of a kind].

    Attributes:
        forward: The model, called with tensors by name.
        specs: The inputs, in the order of the form; shapes have names where sizes vary.
        dims: Bounds and sizes of the names; a kind has one size alone where ``min`` is ``max``.
        grows: Names without a bound: for a larger batch the runner is opened again.
        is_exact: Whether nothing varies.
        calls: Those so far, until the capture.
        why: Why the model's own code runs; absent: graphs may.
        runner: Absent until the third call.
        returns: Form of the output.
        shapes: Of the outputs, in terms of sizes.
        asks: Whether each output asks for a gradient, in the model's own code.
        state: Of the object arguments, as a key; another one is another kind.
        objects: Tells whether they are as they were, once there is a graph.
        autocast: The dtype of autocast around the calls, or False.
        batch: The present batch, while its graph is captured.
        failures: Verifications that failed.
    """

    def __init__(
        self, forward: ByName, specs: dict[str, Input], device: torch.device, *, said: str
    ) -> None:
        names = dict[str, None]()
        for spec in specs.values():
            for extent in spec.extents:
                if extent.symbol:
                    names[extent.symbol] = None
        self.forward, self.specs, self.names = forward, specs, tuple(names)
        self._reader = BatchReader(specs, self.names, device)
        self.dims: dict[str, Dim] = {}
        self.grows = set[str]()
        self.notes = [said]
        self.is_exact = False
        self.calls = self.failures = 0
        self.why: str | None = None
        self.runner: GraphRunner | None = None
        self.returns: Form | None = None
        self.shapes: tuple[Shape, ...] = ()
        self.asks: tuple[bool, ...] = ()
        self.objects: Watch | None = None
        self.state: Any = ()
        self.autocast: Any = False
        self.batch: Mapping[str, Tensor] = {}
        self._points: list[tuple[dict[str, int], Shapes]] = []

    # --- which calls are of this kind -------------------------------------------------------------

    def take_objects(self, device: torch.device) -> None:
        """Take down the object arguments as they are."""
        if roots := object_roots(self.forward.form):
            self.objects = Watch(Fingerprint.of(roots, device), at_once=True)

    def sizes_of(self, tensors: Sequence[Tensor]) -> dict[str, int]:
        """The sizes of a batch by name. Raises InputError for a batch of another kind."""
        batch = self._reader.read(self.inputs(tensors))
        sizes = dict(zip(self.names, (batch.num_tokens, *batch.sizes), strict=True))
        for name, dim in self.dims.items():
            if dim.min == dim.max != sizes[name]:
                raise InputError(f"{name} is {sizes[name]}, the kind has {dim.max}")
        return sizes

    def inputs(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """The tensors of a call by the names of the inputs."""
        return dict(zip(self.specs, tensors, strict=True))

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a call of this form is of this kind."""
        with suppress(InputError):
            return bool(self.sizes_of(tensors))
        return False

    def has_objects(self) -> bool:
        """Whether the object arguments are as they were."""
        return self.objects is None or self.objects.holds() or not self.objects.changes()

    # --- the outputs ------------------------------------------------------------------------------

    def learn(self, sizes: dict[str, int], form: Form, shapes: Shapes) -> None:
        """Learn from an output for a batch of these sizes. Raises OutputShapeError where sizes do
        not follow.
        """
        given = objects_in(self.forward.form)
        hidden = [value for value in objects_in(form) if not any(value is one for one in given)]
        if hidden:
            raise OutputShapeError(
                f"the model returns a {type(hidden[0]).__name__}, whose tensors cannot be reached"
            )
        if self._points and form != self.returns:
            raise OutputShapeError(
                "the output's structure, or a number in it, depends on the size of the batch"
            )
        if odd := [part.__name__ for part in form if is_tensor_type(part) and part is not Tensor]:
            raise OutputShapeError(
                f"the model returns a {odd[0]}, a kind of tensor that graphs know nothing of"
            )
        self.returns = self.forward.returns = form
        self.forward.returns_tensor, self.forward.differs = form == (Tensor,), False
        point = sizes, shapes
        if point not in self._points:
            self._points.append(point)
        found = list[Shape]()
        for index, shape in enumerate(point[1]):
            found.append(tuple(self._extent(index, at) for at in range(len(shape))))
        self.shapes = tuple(found)

    def relearn(self) -> bool:
        """Learn from the runs that captures and comparisons made; whether outputs are of another
        form, or their sizes follow in another way. Raises OutputShapeError as ``learn`` does.
        """
        before = self.returns, self.shapes
        for shapes, (form, outputs) in self.forward.outputs.items():
            sizes = dict[str, int]()
            for spec, shape in zip(self.specs.values(), shapes, strict=True):
                for extent, size in zip(spec.extents, shape, strict=True):
                    if extent.symbol is not None:
                        sizes[extent.symbol] = size
            self.learn(sizes, form, outputs)
        return (self.returns, self.shapes) != before

    def return_as_seen(self, tensors: Sequence[Tensor]) -> None:
        """Give the output the structure that the model's own code gave for such tensors."""
        seen = self.forward.outputs.get(shapes_of(tensors))
        if seen is not None:
            self.returns = seen[0]
            self.forward.returns_tensor = seen[0] == (Tensor,)

    def forget_outputs(self) -> None:
        """The model has changed: what it returns may be of another form now."""
        self._points.clear()
        self.forward.outputs.clear()

    def _extent(self, index: int, at: int) -> int | str:
        """One dimension of an output, as far as the runs tell: a number, or
        ``factor * name + offset``.
        """
        seen = [(sizes, shapes[index]) for sizes, shapes in self._points]
        if len({len(shape) for _, shape in seen}) > 1:
            raise OutputShapeError(
                f"the number of dimensions of output {index} depends on the batch"
            )
        values = [(sizes, shape[at]) for sizes, shape in seen]
        first, last = values[0], values[-1]
        is_fixed = all(value == first[1] for _, value in values)
        for name in self.names:
            sizes = {found[name] for found, _ in values}
            if len(sizes) == 1:  # nothing is known but this size: an equal number is taken for it
                if is_fixed and first[1] == first[0][name]:
                    return name
                continue
            low, high = min(values, key=lambda v: v[0][name]), max(values, key=lambda v: v[0][name])
            factor, rest = divmod(high[1] - low[1], high[0][name] - low[0][name])
            offset = low[1] - factor * low[0][name]
            fits = not rest and factor > 0 and offset >= 0
            if fits and all(value == factor * found[name] + offset for found, value in values):
                return f"{factor} * " * (factor > 1) + name + f" + {offset}" * (offset > 0)
        if is_fixed:
            return int(last[1])
        raise OutputShapeError(
            f"the size of output {index} in dimension {at} does not follow from sizes of inputs"
        )

    # --- the batch of a capture -------------------------------------------------------------------

    def fill(self, views: Mapping[str, Tensor]) -> None:
        """Fill static rows with the present batch, and copies of its rows behind it."""
        for name, view in views.items():
            real, spec = self.batch[name], self.specs[name]
            view.fill_(0 if spec.pad == "last" else spec.pad)
            part = real[tuple(slice(0, size) for size in view.shape)]
            view[tuple(slice(0, size) for size in part.shape)].copy_(part)
            at = next(
                (at for at, extent in enumerate(spec.extents) if extent.symbol == self.names[0]),
                None,
            )
            if at is not None and part.shape[at] < view.shape[at]:
                rows = torch.arange(view.shape[at], device=view.device) % part.shape[at]
                view.copy_(view.index_select(at, rows))

    def start_again(self, *, is_moved: bool) -> None:
        """Free the graphs of a model that changed. Where its tensors moved, and nothing else is
        new, the next call captures; else it is watched once more. A kind that served no call since
        its capture begins anew: its model changes too often to be captured each time.
        """
        served = self.replays > 1
        self.close()
        if not is_moved:
            self.forget_outputs()
            self.returns = self.why = None
        if self.calls >= WATCHED:
            self.calls = 0 if not served else WATCHED if is_moved else WATCHED - 1

    @property
    def replays(self) -> int:
        return 0 if self.runner is None else sum(self.runner.stats.replays.values())

    @property
    def has_graphs(self) -> bool:
        return self.runner is not None and bool(self.runner.plan.keys)

    def close(self) -> None:
        """Free its graphs."""
        if self.runner is not None:
            self.runner.close()
        self.runner = self.objects = None


@dataclass
class Family:
    """Kinds of calls that differ in constants and objects alone.

    Attributes:
        calls, kinds: Their numbers.
        values: Those of each constant, by the path of its argument.
        misses: Calls in a row with an object that was in a new state.
    """

    calls: int = 0
    kinds: int = 0
    values: dict[str, set[str]] = field(default_factory=dict)
    misses: int = 0

    def is_hopeless(self) -> bool:
        """Whether the state of an object changes with each call, as that of a growing cache does;
        it is looked at again now and then.
        """
        if self.misses < 8:
            return False
        self.misses += 1
        return self.misses.bit_count() != 1

    def add(
        self, constants: Iterator[tuple[str, Any]], *, holds_objects: bool
    ) -> list[tuple[str, int]]:
        """Count a new kind; the constants that had another value in each call, with the number of
        calls.
        """
        self.kinds += 1
        self.misses += holds_objects
        for path, value in constants:
            known = self.values.setdefault(path, set())
            if len(known) < 1000:
                known.add(repr(value))
        if not 4 <= self.kinds == self.calls:
            return []
        return [
            (path, self.calls) for path, values in self.values.items() if len(values) == self.calls
        ]


def without_constants(form: Form) -> Form:
    """A form in which constants are left out, by which families are known."""
    kept = list[Any]()
    is_value = False
    for part in form:
        if type(part) is ById:
            part = type(part.value)
        kept.append(None if is_value else part)
        is_value = not is_value and (part is int or part is float or part is bool or part is str)
    return tuple(kept)
