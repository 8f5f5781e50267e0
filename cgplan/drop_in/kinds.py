"""Kinds of calls, which one set of graphs can serve.

Note [The life of a kind]
    Its first calls run the model's own code, watched from the second one on:

    stage          next      after
    NEW            SEEN      a call
    SEEN, CHANGED  READY     a call that changed nothing of Python: the next one captures
    SEEN           CHANGED   a call that changed the model, perhaps once
    CHANGED        CHANGED   a call that only added something for a new size, such as a table
    CHANGED        EAGER     a call that changed the model again
    READY          DIFFERED  a graph whose output differed from eager
    DIFFERED       EAGER     another one
    any            EAGER     what else no graph serves

    An exact kind (one shape, no padding) begins as NEW, or in the stage of the one it replaces.

    A change of the model between calls frees its graphs (``Kind.start_again``):

    READY, DIFFERED  NEW     without a replay since the change before: it did not pay
    CHANGED          SEEN
    others but NEW   SEEN    unless memory alone moved

    Calls of an EAGER kind do not look for such a change.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cgplan.buffers.batch import Batch, BatchReader
from cgplan.config import Dim, Input
from cgplan.drop_in.call_form import (
    CONSTANTS,
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
from cgplan.graphs.change_detector import ChangeDetector
from cgplan.graphs.fingerprint import ABSENT, Change, Fingerprint
from cgplan.modes import Key
from cgplan.runner.routing import RoutedBatch
from cgplan.runner.runner import GraphRunner
from cgplan.runner.stats import RunnerStats

_MOST_MISSES = 16  # a few objects, each of them new once and used once
_MOST_AGAIN = 8  # objects used in turn
_MOST_SIZES = 64  # for which a model adds something

Shape = tuple[int | str, ...]
Sizes = dict[str, int]  # of a batch, by name
OwnedKey = tuple[int, Key]  # id of the kind that has the graph, key


class Stage(Enum):
    NEW = auto()
    SEEN = auto()
    CHANGED = auto()
    READY = auto()
    DIFFERED = auto()
    EAGER = auto()


class _Point(NamedTuple):
    sizes: Sizes
    shapes: Shapes


@dataclass(eq=False, repr=False)
class Kind:
    """One kind of calls.

    Attributes:
        specs: In the order of the form; shapes have names where sizes vary.
        grows: Names without a bound: for a larger batch the runner is opened again.
        shapes: Of the outputs, in terms of sizes.
        state, objects: Of the object arguments: a key, and their watch.
        written: Ids of the storages that its graphs write.
        stats: Of its runners, one after the other.
        replays: Until the model's last change.
        waiting: Keys without room: times asked for, uses of all graphs before.
    """

    forward: ByName
    specs: dict[str, Input]
    form: Form
    state: Any
    device: torch.device

    def __post_init__(self) -> None:
        names = dict[str, None]()
        for spec in self.specs.values():
            for extent in spec.extents:
                if extent.symbol:
                    names[extent.symbol] = None
        self.names = tuple(names)
        self._reader = BatchReader(self.specs, self.names, self.device)
        self.dims: dict[str, Dim] = {}
        self.grows = set[str]()
        self.notes = list[str]()
        self.is_exact = False
        self.stage = Stage.NEW
        self.eager_reason = ""
        self.learns = "the first calls of a kind"
        self.first_calls = 0
        self.runner: GraphRunner | None = None
        self.stats: RunnerStats | None = None
        self.replays = 0
        self.shapes: tuple[Shape, ...] = ()
        self.keys = list[str]()  # of outputs in a mapping
        self.requires_grad: tuple[bool, ...] = ()
        self.objects: ChangeDetector | None = None
        self.batch: Mapping[str, Tensor] = {}
        self.written = frozenset[int]()
        self.waiting: dict[Key, tuple[int, dict[OwnedKey, int]]] = {}
        self._points = list[_Point]()

    @property
    def is_learning(self) -> bool:
        return self.stage in (Stage.NEW, Stage.SEEN, Stage.CHANGED)

    @property
    def may_capture(self) -> bool:
        return self.stage in (Stage.READY, Stage.DIFFERED)

    # --- its life ---------------------------------------------------------------------------------

    def note_run(
        self,
        sizes: Sizes,
        of_model: Sequence[Change] = (),
        of_arguments: Sequence[Change] = (),
    ) -> None:
        known = [point.sizes for point in self._points]
        adds = sizes not in known
        adds &= len(known) < _MOST_SIZES
        adds &= all(change.was is ABSENT for change in of_model)
        if not of_model and not of_arguments:
            self.stage = Stage.SEEN if self.stage is Stage.NEW else Stage.READY
        elif not of_arguments and (adds or self.stage is not Stage.CHANGED):
            self.stage = Stage.CHANGED
        else:
            first = (*of_model, *of_arguments)[0]
            reason = f"each run changes {first.path}"
            reason += first.hint(of_model) if of_model else "; answers are right"
            self.run_eagerly(reason)

    def note_difference(
        self,
        reason: str,
    ) -> None:
        if self.stage is Stage.DIFFERED:
            self.run_eagerly(reason)
        else:
            self.stage = Stage.DIFFERED

    def run_eagerly(
        self,
        reason: str,
    ) -> None:
        self.close()
        self.stage = Stage.EAGER
        self.eager_reason = reason

    def start_again(
        self,
        *,
        is_moved: bool,
    ) -> None:
        """After a change of the model. A kind without a replay since the last change begins
        anew.
        """
        served = False
        if self.runner:
            replays = self.runner.stats.replays.total()
            # the call that captured is one
            served = replays > self.replays + 1
            self.replays = replays
        self.close()
        stays = is_moved and self.stage is not Stage.CHANGED
        if self.may_capture and not served:
            self.stage = Stage.NEW
        elif not stays and self.stage is not Stage.NEW:
            self.stage = Stage.SEEN
        if not is_moved:
            self.forget_outputs()
            self.eager_reason = ""

    def forget_outputs(self) -> None:
        self._points.clear()
        self.forward.outputs.clear()
        self.forward.returns = None

    def forget_others(
        self,
        sizes: Sizes,
        shapes: Shapes,
    ) -> None:
        """Where the same sizes gave other shapes: the model has changed, and nothing watched it."""
        if any(was.sizes == sizes and was.shapes != shapes for was in self._points):
            self.forget_outputs()

    # --- which calls are of this kind -------------------------------------------------------------

    def take_objects(self, device: torch.device) -> None:
        record = Fingerprint.of(object_roots(self.form), device)
        self.objects = ChangeDetector(record, at_once=True)

    def sizes_of(
        self,
        tensors: Sequence[Tensor],
    ) -> Sizes:
        """Raises InputError for a batch of another kind."""
        batch = self._reader.read(self.inputs(tensors))
        sizes = dict(zip(self.names, batch.box, strict=True))
        if self.is_exact:
            for name, dim in self.dims.items():
                if dim.max != sizes[name]:
                    raise InputError(f"{name} is {sizes[name]}, the kind has {dim.max}")
        return sizes

    def outgrown(
        self,
        sizes: Sizes,
    ) -> list[str]:
        return [name for name in self.grows if sizes[name] > self.dims[name].top]

    def inputs(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.specs, tensors, strict=True))

    def route(self, sizes: Sizes) -> RoutedBatch:
        assert self.runner
        tokens, *others = sizes.values()
        batch = Batch(tokens, None, tuple(others))
        return self.runner.router.route(batch)

    def objects_hold(self) -> bool:
        with torch._C.DisableTorchFunction():
            return self.objects is None or self.objects.holds() or not self.objects.changes()

    # --- the outputs ------------------------------------------------------------------------------

    def learn(
        self,
        sizes: Sizes,
        form: Form,
        shapes: Shapes,
    ) -> None:
        """Raises OutputShapeError where outputs do not follow from sizes."""
        given = set(map(id, objects_in(self.form)))
        for value in objects_in(form):
            if id(value) not in given:
                raise OutputShapeError(
                    f"the model returns a {type(value).__name__}, whose tensors cannot be reached: "
                    "return tensors alone, or of transformers pass use_cache=False"
                )
        if self._points and form != self.forward.returns:
            raise OutputShapeError(
                "the output's structure, or a number in it, depends on the size of the batch"
            )
        for part in form:
            if is_tensor_type(part) and part is not Tensor:
                raise OutputShapeError(
                    f"the model returns a {part.__name__}, which graphs do not support"
                )
        self.forward.returns = form
        self.forward.differs = False
        point = _Point(sizes, shapes)
        if point not in self._points:
            self._points.append(point)
        found = []
        for index, shape in enumerate(shapes):
            extents = [self._extent(index, at) for at in range(len(shape))]
            found.append(self._without_chance(extents, shape))
        self.shapes = tuple(found)

    def relearn(self) -> bool:
        """Whether captures and comparisons told news. Raises as ``learn``."""
        before = self.forward.returns, self.shapes
        for shapes, (form, outputs) in self.forward.outputs.items():
            sizes = Sizes()
            specs = self.specs.values()
            for spec, shape in zip(specs, shapes, strict=True):
                for extent, size in zip(spec.extents, shape, strict=True):
                    if extent.symbol is not None:
                        sizes[extent.symbol] = size
            self.learn(sizes, form, outputs)
        return (self.forward.returns, self.shapes) != before

    def seen(
        self,
        tensors: Sequence[Tensor],
    ) -> Form | None:
        found = self.forward.outputs.get(shapes_of(tensors), (self.forward.returns,))
        return found[0]

    def _extent(
        self,
        index: int,
        at: int,
    ) -> int | str:
        """A number, or ``factor * name + offset``."""
        ranks = {len(point.shapes[index]) for point in self._points}
        if len(ranks) > 1:
            raise OutputShapeError(
                f"the number of dimensions of output {index} depends on the batch"
            )
        values = [(point.sizes, point.shapes[index][at]) for point in self._points]
        sizes, first = values[0]
        is_fixed = all(value == first for _, value in values)
        for name in self.names:
            by_size = {sizes[name]: value for sizes, value in values}
            if len(by_size) == 1:  # an equal number is taken for it
                if is_fixed and first == sizes[name]:
                    return name
                continue
            low = min(by_size)
            high = max(by_size)
            start = by_size[low]
            growth = by_size[high] - start
            factor, rest = divmod(growth, high - low)
            offset = start - factor * low
            if rest or factor <= 0 or offset < 0:
                continue
            follows = True
            for others, value in values:
                follows &= value == factor * others[name] + offset
            if follows:
                text = name if factor == 1 else f"{factor} * {name}"
                return f"{text} + {offset}" if offset else text
        if is_fixed:
            return first
        raise OutputShapeError(
            f"the size of output {index} in dimension {at} does not follow from sizes of inputs"
        )

    def _without_chance(
        self,
        extents: list[int | str],
        shape: torch.Size,
    ) -> Shape:
        """With one size seen, several dimensions of an output may equal it by chance: where an
        input has the name at one of these places, the others keep their number.
        """
        for name in self.names:
            seen = {point.sizes[name] for point in self._points}
            if len(seen) > 1:
                continue
            of_inputs = set()
            for spec in self.specs.values():
                for at, extent in enumerate(spec.extents):
                    if extent.symbol == name:
                        of_inputs.add(at)
            named = {at for at, found in enumerate(extents) if found == name}
            if named & of_inputs:
                for at in named - of_inputs:
                    extents[at] = shape[at]
        return tuple(extents)

    # --- the batch of a capture -------------------------------------------------------------------

    def fill(
        self,
        views: Mapping[str, Tensor],
    ) -> None:
        for name, view in views.items():
            spec = self.specs[name]
            pad = 0 if spec.pad == "last" else spec.pad
            view.fill_(pad)
            real = self.batch.get(name)
            if real is None:  # recapture() or wake() of its runner
                continue
            common = tuple(map(slice, map(min, view.shape, real.shape)))
            view[common].copy_(real[common])
            for at, extent in enumerate(spec.extents):
                if extent.symbol == self.names[0]:
                    rows = torch.arange(view.shape[at], device=view.device)
                    copies = view.index_select(at, rows % real.shape[at])
                    view.copy_(copies)
                    break

    @property
    def has_graphs(self) -> bool:
        return self.runner is not None and bool(self.runner.plan.keys)

    def close(self) -> None:
        if self.runner:
            self.runner.close()
        self.runner = self.objects = None


@dataclass
class Family:
    """Kinds that differ in constants and objects alone.

    Attributes:
        values: Of each constant, by path.
        misses: Calls in a row with an object in a new state.
        again: Since then, calls by form, of the last few.
    """

    calls: int = 0
    kinds: int = 0
    values: dict[str, set[str]] = field(default_factory=dict)
    misses: int = 0
    again: dict[Form, int] = field(default_factory=dict)

    def skips_a_call(
        self,
        form: Form,
    ) -> bool:
        """Objects are new or change with each call, as growing caches do. False for one that
        comes again, at its calls 2, 3, 5, 9, ...
        """
        if self.misses <= _MOST_MISSES:
            return False
        count = self.again.pop(form, 0)
        if len(self.again) == _MOST_AGAIN:
            del self.again[next(iter(self.again))]
        self.again[form] = count + 1
        return count.bit_count() != 1

    def add(
        self,
        constants: Iterator[tuple[str, Any]],
    ) -> list[str]:
        """Returns the constants that differed in each call."""
        self.kinds += 1
        for path, value in constants:
            known = self.values.setdefault(path, set())
            if len(known) < 1000:
                known.add(repr(value))
        if not 4 <= self.kinds == self.calls:
            return []
        return [path for path, values in self.values.items() if len(values) == self.calls]


def without_constants(form: Form) -> Form:
    kept = []
    is_value = False
    for part in form:
        if type(part) is ById:
            part = type(part.value)
        kept.append(None if is_value else part)
        is_value = not is_value and type(part) is type and part in CONSTANTS
    return tuple(kept)
