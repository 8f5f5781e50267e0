"""What is learnt of a model and its calls; from a kind's first call the names of inputs, and which
sizes vary.
"""

import inspect
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from cgplan.backends import GraphBackend, select_backend
from cgplan.config import BudgetConfig, CompilationConfig, Dim, Input
from cgplan.config.schema import WORDS_OF_A_CALL
from cgplan.drop_in.call_form import (
    ById,
    ByName,
    Call,
    Form,
    arguments_by_name,
    constants_in,
    containers_in,
    object_roots,
    objects_in,
    shapes_of,
    taken_apart,
    tensors_by_name,
)
from cgplan.drop_in.kinds import Family, Kind, Sizes, Stage, without_constants
from cgplan.errors import ConfigError, InputError, OutputShapeError, did_you_mean
from cgplan.graphs.change_detector import ChangeDetector
from cgplan.graphs.fingerprint import Fingerprint, is_ignored
from cgplan.graphs.footprint import look
from cgplan.graphs.put_back import PutBack
from cgplan.graphs.written import copy_limit, version_of
from cgplan.modes import CUDAGraphMode
from cgplan.runner.runner import GraphRunner
from cgplan.units import counted

BATCH = "batch"
_MOST_NOTES = 16
_NOTHING_VARIES = "nothing varies: each shape has its graph"
_DYNAMIC = 'Pass dimensions by input: dynamic={"x": {0: "batch"}}.'
_PAD = 'Pass values by input: pad={"x": -1}.'
_SIZES = "Pass a list of sizes, or the name of a ladder: sizes=[1, 2, 4]."
_MAX_GRAPHS = "Pass a number: max_graphs=16."
_MOST_KINDS = 256
_MANY_SHAPES = 16
_MANY_OBJECTS = 2
_MOST_STATES = 2  # of one object that graphs serve: new, and filled
NEW_STATES = "an object argument is new or in another state at each call"
_EXACT = "so nothing is padded, and each shape has its own graph"
logger = logging.getLogger(__name__)

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
        _refuse_other("ignore", self.ignore, Sequence, 'Pass a list: ignore=["model.calls"].')
        _refuse_other(
            "compilation",
            self.compilation,
            Mapping,
            'Pass settings by name: compilation={"on_miss": "error"}.',
        )
        _refuse_other("strict", self.strict, bool, "Pass strict=True, or leave it out.")
        if self.grad not in ("recompute", None):
            raise ConfigError(f"grad is {self.grad!r}", remedy="Choose recompute or None.")
        most = 1 << 20 if self.sizes else self.max_size or 1 << 20
        _validated(
            Dim,
            _SIZES,
            max=most,
            sizes=self.sizes,
        )
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
            raise ConfigError("max_graphs is None", remedy=_MAX_GRAPHS)
        _validated(BudgetConfig, _MAX_GRAPHS, max_graphs=self.max_graphs)
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
            "pool": "shared",
            "cudagraph_copy_inputs": True,
            "key_rules": "vllm_v1",
            "max_cudagraph_capture_size": None,
        }
        if self.dynamic == {}:
            own |= {"cudagraph_capture_sizes": None, "boxes": None}
        given = {
            "capture_policy": "lazy",
            "outputs": self.outputs,
            "verify": self.verify,
            **(self.compilation or {}),
        }
        for name in own.keys() & given:
            raise ConfigError(
                f"compilation has {name}, which graphed sets",
                remedy="Leave it out. graphed itself has strict and ignore, and where rows vary "
                "sizes and max_size.",
            )
        self.compilation = _validated(CompilationConfig, "", **given, **own)
        if self.compilation.cudagraph_mode is CUDAGraphMode.AUTO:
            raise ConfigError(
                "cudagraph_mode is AUTO, which measures other modes, and graphed does not",
                remedy="Leave cudagraph_mode out, or name a mode.",
            )


def _validated(
    section: Callable[..., Any],
    remedy: str,
    **values: Any,
) -> Any:
    try:
        return section(**values)
    except ConfigError as error:
        text = error.message.removeprefix(f"{section.__name__}: ")
        raise ConfigError(text, remedy=remedy or error.remedy) from None


def _dims_by_input(given: Any) -> dict[str, dict[int, Dim | str]] | None:
    if given is None:
        return None
    found = {}
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
class Learner:
    __graph_memory__ = True

    model: Callable[..., Any]
    signature: inspect.Signature
    settings: Settings
    name: str

    def __post_init__(self) -> None:
        self.backend: GraphBackend
        self._begin()

    def _begin(self) -> None:
        self.notices: dict[str, str] = {}
        self.changed = Counter[str]()  # of the same subjects
        # the least recently used go first
        self._kinds = OrderedDict[Form, list[Kind]]()
        self._families: dict[Form, Family] = {}
        self._exact = set[Form]()
        self._numbers: dict[int, int] = {}  # of object arguments, by id
        self.detector: ChangeDetector | None = None
        self.tensor_ids = frozenset[int]()

    def forget(self) -> None:
        for kind in self.kinds:
            kind.close()
        if self.detector:
            self.detector.close()
        self._begin()

    def tell_once(
        self,
        text: str,
        subject: str | None = None,
    ) -> None:
        subject = subject or text
        if subject not in self.notices and text not in self.notices.values():
            self.notices[subject] = text
            logger.warning("%s: %s", self.name, text)

    # --- the model --------------------------------------------------------------------------------

    def suspect(self) -> None:
        detector = self.detector  # another thread may end it
        if detector:
            detector.suspect()

    def free_if_changed(self, begun: Kind | None = None) -> bool:
        """Whether the model has changed: then all graphs go, and kinds start again. True also for
        a model that is not watched yet. ``begun``: the kind whose first call may have changed it.
        """
        if self.detector is None:
            return True
        if begun is not None:
            self.detector.suspect()  # a change by this call is not late
        changes = list(self.detector.changes(self.settings.ignore).values())
        if not changes:
            return False
        first = changes[0]
        self.changed[first.subject] += 1
        text = f"captured again: {first}"
        if begun is not None:
            others = [kind.notes for kind in self.kinds if kind is not begun]
            known = set[str]().union(*others)
            new = [note for note in begun.notes if note not in known]
            text = f"captured again, as the first call with {', '.join(new)} changed {first}"
        if len(changes) > 1:
            text += f", and {counted(len(changes) - 1, 'more change')}"
        hint = first.hint(changes)
        is_moved = all(change.is_move for change in changes)
        if self.detector.is_late:
            text += (
                f"{hint}; calls from the change to now may have been answered by the old graphs: "
                "call recapture() after such changes"
            )
        else:
            text += "; answers stay right" + (hint or ", and each change costs a capture")
        self.tell_once(text, first.subject)
        self.detector.close()
        self.detector = None
        self.tensor_ids = frozenset()
        for kind in self.kinds:
            kind.start_again(is_moved=is_moved)
        return True

    def _fingerprint(
        self,
        roots: Mapping[str, Any],
        *,
        draws: bool = False,
    ) -> Fingerprint:
        return Fingerprint.of(roots, self.backend.device, draws=draws)

    def watch_model(self, record: Fingerprint | None = None) -> None:
        if self.detector is None:
            record = record or self._fingerprint({"model": self.model}, draws=True)
            paths = [*record.places, *(drawn.path for drawn in record.draws)]
            self.detector = ChangeDetector(record.without_draws())
            self.tensor_ids = frozenset(map(id, record.tensors))
            for pattern in self.settings.ignore:
                if not any(is_ignored(path, [pattern]) for path in paths):
                    near = [path for path in paths if path.count(".") == pattern.count(".")]
                    hint = did_you_mean(pattern, near, "; did you mean {!r}?", cutoff=0.75)
                    self.tell_once(f"ignore names {pattern!r}, where nothing is compared yet{hint}")
                for part in record.parts():
                    if is_ignored(part.path, [pattern]):
                        self.tell_once(
                            f"ignore names {pattern!r}, which holds {part.path}: graphs keep its "
                            "old memory after an exchange; name Python values",
                            pattern,
                        )

    def holds(self) -> bool:
        with torch._C.DisableTorchFunction():
            return self.detector is not None and self.detector.holds()

    # --- kinds ------------------------------------------------------------------------------------

    @property
    def kinds(self) -> list[Kind]:
        found = []
        for kinds in list(self._kinds.values()):
            found += kinds
        return found

    @property
    def runners(self) -> list[GraphRunner]:
        return [kind.runner for kind in self.kinds if kind.runner]

    def forget_object(self, value: Any) -> None:
        for kind in self.kinds:
            if ById(value) in kind.form:
                kind.close()
                self._kinds[kind.form].remove(kind)
        for family in self._families.values():
            family.misses = 0  # the next object is new by this

    def family_of(self, call: Call) -> Family:
        return self._families.setdefault(without_constants(call.form), Family())

    def kind_of(
        self,
        family: Family,
        call: Call,
    ) -> tuple[Kind, Sizes]:
        known = self._kinds.setdefault(call.form, [])
        self._kinds.move_to_end(call.form)
        roots = object_roots(call.form)
        state = ()
        if roots:
            state = self._fingerprint(roots).as_key()
        family.calls += 1
        alike = [kind for kind in known if kind.state == state]
        for kind in alike:
            family.misses = 0  # another shape makes no object new
            with suppress(InputError):
                return kind, kind.sizes_of(call.tensors)
        others = len(known) - len(alike)
        kind = self._add_kind(call, state)
        if others > _MOST_STATES:
            kind.learns = NEW_STATES
        if len(alike) == _MANY_SHAPES:
            new = [note for note in kind.notes if note not in alike[0].notes]
            self.tell_once(
                f"more than {_MANY_SHAPES} shapes came, now {', '.join(new)}: each has "
                "graphs of its own, from its third call on; pad them to a few, and replace an "
                "argument that grows with each call (docs/graphed.md, Options and models without "
                "graphs)",
                "shapes",
            )
        constants = constants_in(call.by_name(self.signature), "")
        family.misses += bool(state)
        for path in family.add(constants):
            self.tell_once(
                f"argument `{path}` had {family.calls} values in {family.calls} calls; "
                "pass a tensor, or graphs serve values that come back",
                path,
            )
        self._forget_old_kinds()
        return kind, kind.sizes_of(call.tensors)

    def _add_kind(
        self,
        call: Call,
        state: Any,
    ) -> Kind:
        is_exact = call.form in self._exact
        try:
            kind = self.new_kind(call, state, self.backend.device, is_exact=is_exact)
        except InputError as error:
            if self.settings.strict or is_exact:
                raise
            self.tell_once(f"{error.message}; {_EXACT}")
            self._exact.add(call.form)
            return self._add_kind(call, state)
        for given in (*(self.settings.dynamic or ()), *self.settings.pad):
            what = f"dynamic or pad names {given!r}"
            head = given.partition(".")[0]
            parts = [name for name in kind.specs if name.partition(".")[0] == head]
            if parts and given not in parts:
                raise ConfigError(
                    what,
                    remedy=f"Names there are {', '.join(parts)}.",
                )
            if not parts and head not in self.signature.parameters:
                # another call may have it
                hint = did_you_mean(given, kind.specs, "did you mean {!r}?")
                hint = hint or f"it has {', '.join(kind.specs)}"
                now = f"; of it {_NOTHING_VARIES}" if kind.is_exact else ""
                self.tell_once(f"{what}, which a call lacks; {hint}{now}", given)
        twins = list[str]()
        for other in self.kinds:
            if other.stats and {*kind.notes} <= {*other.notes}:
                twins += other.notes
        for argument, given in call.by_name(self.signature).items():
            for value in objects_in(taken_apart(given)[0]):
                number = self._numbers.setdefault(id(value), len(self._numbers) + 1)
                text = f"{argument}: {type(value).__name__}"
                note = f"{text} {number}, in one of its states"
                seen = {note, *(other for other in twins if other.startswith(f"{text} "))}
                if len(seen) > _MANY_OBJECTS:
                    self.tell_once(
                        f"argument `{argument}` had {len(seen)} objects of "
                        f"{type(value).__name__}, and each has graphs of its own: keep one, and "
                        "reset() it",
                        text,
                    )
                kind.notes.append(note)
        self._kinds[call.form].append(kind)
        return kind

    def _forget_old_kinds(self) -> None:
        if len(self._families) > _MOST_KINDS:
            self._families.pop(next(iter(self._families)))
        count = sum(len(kinds) or 1 for kinds in self._kinds.values())
        if count <= _MOST_KINDS:
            return
        older = [kind for kind in self.kinds[:-1] if not kind.has_graphs]
        for kind in older[: count - _MOST_KINDS]:
            kind.close()
            self._kinds[kind.form].remove(kind)
        for form, kinds in list(self._kinds.items()):
            if not kinds:
                del self._kinds[form]
                self._exact.discard(form)

    # --- runs -------------------------------------------------------------------------------------

    def learning_call(
        self,
        kind: Kind,
        sizes: Sizes,
        call: Call,
        *,
        is_ahead: bool = False,
    ) -> Any:
        settings = self.settings
        tensors = call.tensors
        shapes = shapes_of(tensors)
        versions = list(map(version_of, tensors))
        records = []
        if kind.stage is not Stage.NEW:
            records = [
                self._fingerprint({"model": self.model}, draws=True),
                self._fingerprint(call.by_name(self.signature)),
            ]
        drawn, written = _effects_until_now(records)
        output = self.model(*call.args, **call.kwargs)
        if kind.stage is Stage.NEW and not is_ahead:
            self.free_if_changed(kind)
        changes = []
        # of arguments nothing is ignored
        for record, ignored in zip(records, (settings.ignore, ()), strict=False):
            changes.append(list(record.changes(ignored).values()))
        kind.note_run(sizes, *changes)
        if kind.may_capture:
            self.watch_model(records[0])
        held = set[int]().union(*map(Fingerprint.container_ids, records))
        if held.intersection(map(id, containers_in(output))):
            kind.run_eagerly(
                "the model returns a list, a dict or an object that it keeps, or that it was given"
            )
        for name, tensor, version in zip(kind.specs, tensors, versions, strict=True):
            if version_of(tensor) != version:
                kind.run_eagerly(f"the forward writes into argument `{name}`")
                break
        if shapes_of(tensors) != shapes:
            kind.run_eagerly("the forward changes the shape of an argument")
        self._learn(kind, sizes, output)
        drawn_now, written_now = _effects_until_now(records)
        is_steady = kind.may_capture  # else it changed the model
        writes_state = is_steady and written_now != written
        draws = is_steady and drawn_now != drawn
        if settings.grad and True in kind.requires_grad and (draws or writes_state):
            kind.run_eagerly(
                "backward could not run it again: each run draws random numbers, or writes tensors"
            )
        if kind.eager_reason:
            self.tell_once(kind.eager_reason)
        elif writes_state and not kind.is_exact and not settings.pad:
            self.give_up(kind, "the forward writes state, which padding might reach")
            exact = self._add_kind(call, kind.state)
            exact.stage = kind.stage
            self._learn(exact, exact.sizes_of(tensors), output)
        return output

    def _learn(
        self,
        kind: Kind,
        sizes: Sizes,
        output: Any,
    ) -> None:
        form, leaves = taken_apart(output)
        kind.keys = []
        if isinstance(output, Mapping):
            kind.keys = [f", {path}" for path, _ in tensors_by_name(output, "")]
        if any(leaf.is_meta or leaf.is_quantized for leaf in leaves):
            kind.run_eagerly("the model returns a tensor without data, or a quantized one")
        try:
            shapes = shapes_of(leaves)
            kind.forget_others(sizes, shapes)
            kind.learn(sizes, form, shapes)
        except OutputShapeError as error:
            self.give_up(kind, error.message)
        if torch.is_grad_enabled():
            kind.requires_grad = tuple(leaf.requires_grad for leaf in leaves)

    def relearn(self, kind: Kind) -> bool:
        """Whether the kind was not as learnt; then it has no graphs."""
        if self.detector and self.free_if_changed():
            return True
        try:
            if not kind.relearn():
                return False
            kind.close()
        except OutputShapeError as error:
            if self.settings.strict:
                raise
            self.give_up(kind, error.message)
        return True

    def grow(
        self,
        kind: Kind,
        sizes: Sizes,
    ) -> None:
        for name in kind.outgrown(sizes):
            kind.dims[name] = self.dimension_of(kind, name, sizes[name])

    def give_up(
        self,
        kind: Kind,
        reason: str,
        *,
        tries_exact: bool = True,
    ) -> None:
        """``tries_exact``: a kind without padding may take its place."""
        if kind.is_exact or not tries_exact:
            kind.run_eagerly(reason)
            self.tell_once(reason)
            return
        kind.close()
        self.tell_once(f"{reason}; {_EXACT}")
        self._exact.add(kind.form)
        with suppress(ValueError):  # given up before
            self._kinds[kind.form].remove(kind)

    def warmed_up(self, call: Call) -> tuple[Kind, Sizes]:
        kind, sizes = self._runs_ahead(call)
        if kind.may_capture and self.free_if_changed():  # what first use made stays
            kind, sizes = self._runs_ahead(call)
        return kind, sizes

    def _runs_ahead(self, call: Call) -> tuple[Kind, Sizes]:
        kept = PutBack(
            self._fingerprint({"model": self.model, "arguments": call.by_name(self.signature)}),
            copy_limit(self.settings.compilation, self.backend),
        )
        failed = list[Exception]()

        def first_calls() -> None:
            try:
                self.learning_call(kind, sizes, call, is_ahead=True)
            except Exception as error:
                failed.append(error)

        uncounted = Family()
        states = list[Any]()
        try:
            while True:
                kind, sizes = self.kind_of(uncounted, call)
                if uncounted.misses > _MOST_STATES:
                    kind.run_eagerly(NEW_STATES)
                if failed or not kind.is_learning:
                    break
                states.append(kind.state)
                look(first_calls, kept, inputs=call.tensors)
            # state that went on from run to run was not made once
            kept.keeps_first_use = states[1:2] == [kind.state] and not (
                failed or kept.prepared or kept.values_read or kept.made_of_inputs
            )
            kept.keeps_containers = kind.stage is not Stage.EAGER  # else no graph relies on them
        finally:
            kept.restore()
        if failed:
            raise failed[0]
        if kind.may_capture:  # what led to its state may have gone back
            return self.kind_of(uncounted, call)
        return kind, sizes

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
        specs = {
            name: Input(
                shape=shapes[name],
                dtype=tensor.dtype,
                pad=pads.get(name, 0),
            )
            for name, tensor in named.items()
        }
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
        sizes = None
        most = None
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

    def _names_of(
        self,
        forward: ByName,
        call: Call,
    ) -> list[str]:
        # tensors may come twice, marks do not
        marks = [torch.empty(0) for _ in call.tensors]
        args, kwargs = forward.arguments(marks)
        name_of = {}
        for argument, value in arguments_by_name(self.signature, args, kwargs).items():
            for path, mark in tensors_by_name(value, argument):
                name_of[id(mark)] = path + "_" * (path in WORDS_OF_A_CALL)
        names = [name_of.get(id(mark), f"tensor_{index}") for index, mark in enumerate(marks)]
        counts = Counter(names)
        for index, name in enumerate(names):
            if counts[name] > 1:
                names[index] = f"{name}_{index}"
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
    return [name for name, tensor in named.items() if tensor.shape[:1] == (votes[0],)]


def _effects_until_now(records: Sequence[Fingerprint]) -> tuple[list[Any], list[int | None]]:
    if not records:
        return [], []
    index = records[0].device.index or 0
    generators = [torch.default_generator, *torch.cuda.default_generators[index : index + 1]]
    tensors = []
    for record in records:
        generators += record.generators
        tensors += record.tensors
    return [each.get_state().tolist() for each in generators], list(map(version_of, tensors))
