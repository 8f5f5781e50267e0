"""Graphed: a drop-in for a model. Calls tell what a configuration would say, and replays are
compared with the model.

Note [A call]
    A call like an earlier one costs the runner's call, the flattening of its arguments, one
    look-up, and a look at whether the model is as it was. Each kind of calls (kinds.py) has a
    configuration and a GraphRunner; all runners share one pool.
    Where eager is right, eager runs: whatever cannot be captured, or differs from the model's own
    code, is answered by that code, told once, and counted by ``explain``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import MethodType
from typing import Any, Literal, Self, cast, get_args

import torch
import yaml
from torch import Tensor, nn

from cgplan.backends import select_backend
from cgplan.backends.context import current_forward_context
from cgplan.captures.model_runs import RealRows
from cgplan.config import BudgetConfig, CompilationConfig, Dim, Input, validate_config
from cgplan.config.schema import WORDS_OF_A_CALL
from cgplan.config.values import DType
from cgplan.drop_in.call_form import (
    ByName,
    Name,
    call_form,
    constants_in,
    flatten,
    is_tensor_type,
    module_of,
    object_roots,
    objects_in,
    rebuild,
    shapes_of,
    share,
    tensors_by_name,
    written,
)
from cgplan.drop_in.gradients import outputs_that_ask
from cgplan.drop_in.kinds import WATCHED, Family, Kind, inferred_shapes, without_constants
from cgplan.errors import (
    CaptureError,
    CgplanError,
    ConfigError,
    GradientError,
    InputError,
    ModelError,
    NumbersError,
    OutputShapeError,
    did_you_mean,
)
from cgplan.graphs.ambient import AmbientState
from cgplan.graphs.fingerprint import Fingerprint
from cgplan.graphs.footprint import look
from cgplan.graphs.pools import GraphPool
from cgplan.graphs.put_back import PutBack
from cgplan.graphs.watch import Watch
from cgplan.modes import CUDAGraphMode, Key
from cgplan.planning import build_plan
from cgplan.reports.records import CaptureReport
from cgplan.runner.runner import GraphRunner
from cgplan.runner.session import CaptureSession

_MOST_CALLS = 4096  # that are found by one look-up
_MOST_KINDS = 256  # that are remembered
_AMBIENT = 4  # parts of a form that are no arguments, at its end
_traits = attrgetter("shape", "dtype", "layout", "device")
_asks_grad = attrgetter("requires_grad")
_dispatch_modes, _tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
_transforms = torch._C._functorch.peek_interpreter_stack
logger = logging.getLogger(__name__)


@dataclass
class _Call:
    """What serves calls of one key: the runner of a kind, or the model's own code for a reason."""

    kind: Kind
    why: str | None = None


@dataclass
class _Learnt:
    """What a Graphed has learnt of calls, and its graphs.

    Attributes:
        pool: Of all runners, once the device is known, whose type is ``device``.
        kinds: By the form of the call; the least recently used go first.
        calls: By form, shapes and dtypes.
        exact: Forms of which nothing varies, since padding reached real rows or the model refused
            it.
        watch: Of the model, once a call left it as it was.
        tensors: Those that the model held then.
        eager: Calls by the model's own code, by reason.
    """

    __graph_memory__ = True  # no state of a model that holds a Graphed
    pool: Any = None
    device: str = "cpu"
    kinds: OrderedDict[Any, list[Kind]] = field(default_factory=OrderedDict)
    calls: dict[Any, list[_Call]] = field(default_factory=dict)
    exact: set[Any] = field(default_factory=set)
    families: dict[Any, Family] = field(default_factory=dict)
    watch: Watch | None = None
    tensors: list[Tensor] = field(default_factory=list)
    eager: Counter[str] = field(default_factory=Counter)
    told: dict[str, str] = field(default_factory=dict)
    waiting: dict[tuple[int, Key], tuple[int, dict[tuple[int, Key], int]]] = field(
        default_factory=dict
    )
    lock: Any = field(default_factory=threading.RLock)


class _OfMethod:
    """Where an object keeps the graphs of a decorated method; copies and pickles of the object have
    none.
    """

    __graph_memory__ = True  # no state of the object

    def __init__(self) -> None:
        self.made: Graphed | None = None

    def __reduce__(self) -> Any:
        return _OfMethod, ()


def _forward(graphs: weakref.ref[Graphed], *args: Any, **kwargs: Any) -> Any:
    # The bound method, in the attribute that code asks for its signature, would keep a dropped one
    # and its graphs.
    return Graphed.forward(cast(Graphed, graphs()), *args, **kwargs)


def _fill(kind: weakref.ref[Kind], views: Mapping[str, Tensor]) -> None:
    # its runner holds this function, and is freed with the kind at once
    cast(Kind, kind()).fill(views)


class Graphed:
    """A model or a function that runs by captured graphs; ``graphed`` makes it, and says what it
    promises.

    It has the model's attributes. Pickles hold the model and the settings. It owns graphs, pool and
    static buffers, not the model. Calls from several threads run one after the other.
    """

    _learnt: _Learnt
    _signature: inspect.Signature
    _name: str

    def __init__(self, model: Callable[..., Any], settings: dict[str, Any]) -> None:
        module = module_of(model)
        called = module.forward if module is model else model
        try:
            signature = inspect.signature(called)
        except ValueError:  # of a builtin
            signature = inspect.signature(lambda *args, **kwargs: None)  # noqa: ARG005
        by_itself = functools.partial(_forward, weakref.ref(self))
        name = f"graphed {getattr(model, '__name__', type(model).__name__)}"
        self.__dict__.update(
            _untraced=torch.compiler.disable(by_itself),
            forward=functools.update_wrapper(by_itself, called),
            _wrapped=model,
            _module=module,
            _has_modes=hasattr(module, "training"),
            _settings=settings,
            _signature=signature,
            _learnt=_Learnt(),
            _name=name,
        )
        if module is not model:
            self.__dict__.update(
                {n: getattr(model, n) for n in functools.WRAPPER_ASSIGNMENTS if hasattr(model, n)}
            )
            self.__dict__["__signature__"] = signature
        self._refuse_unknown_names()
        if (example := settings["example"]) is not None:
            if not isinstance(example, Sequence | Mapping | Tensor):
                raise ConfigError(
                    f"the example is a {type(example).__name__}",
                    remedy="Give the arguments of one call: a tensor, a sequence, or a mapping by "
                    "name.",
                )
            named = dict(example) if isinstance(example, Mapping) else {}
            args = () if named else (example,) if isinstance(example, Tensor) else tuple(example)
            self.warm_up(*args, **named)

    def _refuse_unknown_names(self) -> None:
        known = self._signature.parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
            return
        for setting in ("dynamic", "pad"):
            for name in self._settings[setting] or ():
                if name.partition(".")[0] not in known:
                    remedy = did_you_mean(name, known) + f"Arguments are {', '.join(known)}."
                    raise ConfigError(
                        f"{setting} names {name!r}, which is no argument of {self._name}",
                        remedy=remedy,
                    )

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """Of a method in a class body: a set of graphs for each object, which the object holds."""
        if owner is None or isinstance(self._wrapped, nn.Module | MethodType):
            return self
        bound = MethodType(self._wrapped, owner)
        held = getattr(owner, "__dict__", None)
        if held is None:  # nothing can be kept with it
            return bound
        # a class below may have a method of the same name
        name = f"graphs of {self._wrapped.__qualname__}"
        graphs = held.get(name)
        # a copy has the first one's
        if graphs is None or graphs.made is None or graphs.made.__self__ is not owner:
            graphs = held[name] = _OfMethod()
            graphs.made = Graphed(bound, {**self._settings, "example": None})
        return graphs.made

    # --- calls ------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Graphed.forward(self, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a batch: padded, by a graph, and cut; or by the model's own
        code.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._untraced(*args, **kwargs)
        learnt = self._learnt
        with learnt.lock:
            form, tensors = call_form(args, kwargs)
            grad = torch.is_grad_enabled()
            asks = grad and True in map(_asks_grad, tensors)
            device = learnt.device
            autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
            form += asks, grad, torch.get_default_dtype(), autocast
            key = (*form, *map(_traits, tensors))
            if asks or self._is_elsewhere():
                return self._own(self._why_eager(asks), args, kwargs)
            calls = learnt.calls.get(key, ())
            call = (
                calls[0] if len(calls) == 1 and calls[0].kind.objects is None else _matching(calls)
            )
            if call is None:
                return self._slow(key, tuple(form), tensors, args, kwargs)
            if call.why is not None:
                return self._own(call.why, args, kwargs)
            if learnt.watch is None or not (learnt.watch.holds() or self._holds()):
                return self._slow(key, tuple(form), tensors, args, kwargs)
            return self._replay(call.kind, tensors, args, kwargs)

    def _is_elsewhere(self) -> bool:
        """Whether a call runs by the model's own code, whatever its arguments are."""
        return (
            (self._has_modes and self._module.training)
            or current_forward_context() is not None
            or _dispatch_modes() > 0
            or _transforms() is not None
            or _tracing() is not None
        )

    def _why_eager(self, asks: bool) -> str:
        """Why it does."""
        if self._has_modes and self._module.training:
            why = "the model is in training mode; call .eval() for graphs"
            self._tell(why)
            return why
        if current_forward_context() is not None:
            return "inside the forward of another runner"
        if asks:
            return "a tensor argument asks for a gradient"
        return "under a dispatch mode, a transform of torch.func, or torch.jit.trace"

    def _own(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._learnt.eager[why] += 1
        return self._wrapped(*args, **kwargs)

    def _holds(self) -> bool:
        """Whether the model is as it was; else its graphs are freed, and that is told."""
        learnt = self._learnt
        if learnt.watch is None:
            return False
        changes = learnt.watch.changes(self._settings["ignore"])
        if not changes:
            return True
        first, more = next(iter(changes.values())), len(changes) - 1
        self._tell(
            f"captured again: {first}" + f", and {more} more changes" * (more > 0), first.path
        )
        learnt.watch.close()
        learnt.watch, learnt.tensors = None, []
        learnt.calls.clear()
        is_moved = all(change.is_move for change in changes.values())
        for kind in self._kinds():
            kind.start_again(is_moved=is_moved)
        return False

    def _look_after(self, record: Fingerprint) -> None:
        """Capture again once the model is not as in this record."""
        self._learnt.watch, self._learnt.tensors = Watch(record), record.tensors

    def _slow(
        self,
        key: Any,
        form: tuple[Any, ...],
        tensors: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A call that no earlier one prepared."""
        learnt = self._learnt
        if (why := _why_not(form, tensors)) is not None:
            return self._own(why, args, kwargs)
        if learnt.pool is None:
            self._take_device(tensors)
            return Graphed.forward(self, *args, **kwargs)  # autocast is asked for this device
        if learnt.watch is not None and not learnt.watch.holds():
            self._holds()
        family = learnt.families.setdefault(without_constants(form), Family())
        if family.is_hopeless():
            return self._own("an object argument is in another state at each call", args, kwargs)
        kind = self._kind_of(family, form, tensors, args, kwargs)
        if (
            kind.why is None
            and kind.calls == 0
            and self._settings["compilation"].capture_policy == "eager"
        ):
            kind = self._warmed_up(form, tensors, args, kwargs)
        if kind.why is None and kind.calls >= WATCHED:
            self._holds()  # ahead of a capture all is compared
        if kind.why is None and kind.calls < WATCHED:
            learnt.eager["the first calls of a kind"] += 1
            return self._first_calls(kind, tensors, args, kwargs)
        why = kind.why or self._prepare(kind, tensors)
        has_objects = bool(objects_in(form))
        if why is not None:
            if kind.why is not None and not has_objects:
                self._remember(key, _Call(kind, why))
            return self._own(why, args, kwargs)
        assert kind.runner is not None
        if has_objects:
            kind.take_objects(learnt.pool.backend.device)
        if kind.runner.route(dict(zip(kind.specs, tensors, strict=True))).wanted is None:
            self._remember(key, _Call(kind))
        with kind.runner.no_capture():
            return self._replay(kind, tensors, args, kwargs)

    def _remember(self, key: Any, call: _Call) -> None:
        calls = self._learnt.calls
        if len(calls) >= _MOST_CALLS:
            calls.clear()
        calls[key] = [call, *(other for other in calls.get(key, ()) if other.kind is not call.kind)]

    def _replay(
        self, kind: Kind, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The output by a kind's runner, or by the model's own code where the runner found a
        difference.
        """
        assert kind.runner is not None
        inputs: dict[str, Any] = dict(zip(kind.specs, tensors, strict=True))
        try:
            output = kind.runner(**inputs)
        except NumbersError as error:
            output = self._after_a_difference(kind, error, tensors)
        except ModelError as error:  # the model's own code failed in a comparison
            raise error.__cause__ or error from None
        else:
            if kind.forward.differs:
                self._after_another_form(kind, tensors)
        if kind.asks and torch.is_grad_enabled():
            again = (
                self._own_code_again(args, kwargs)
                if self._settings["grad"] == "recompute"
                else None
            )
            output = outputs_that_ask(output, kind.asks, again, self._name)
        if kind.forward.returns_tensor:
            return output
        leaves = output if isinstance(output, tuple) else (output,)
        return rebuild(iter(kind.returns or ()), iter(leaves))

    def _after_a_difference(self, kind: Kind, error: NumbersError, tensors: list[Tensor]) -> Any:
        """What the model's own code gave. A graph that differs ends; the second one ends its kind,
        and padding that reaches real rows all graphs with padding. Raises the error where
        ``strict`` asks for it.
        """
        if self._settings["strict"]:
            raise error
        assert kind.runner is not None
        output, sizes = error.output, kind.sizes_of(tensors)
        route = kind.runner.route(dict(zip(kind.specs, tensors, strict=True)))
        padded = (route.descriptor.num_tokens, *route.descriptor.sizes)
        if self._relearn(kind):
            pass
        elif padded != tuple(sizes.values()):
            self._give_up(kind, error.message)
        else:
            kind.failures += 1
            self._tell(error.message)
            self._learnt.calls.clear()
            kind.runner.exchange(evicted=[(route.mode, route.descriptor)])
            if kind.failures > 1:
                self._give_up(kind, error.message, keeps_exact=False)
        self._learnt.eager["a graph differed from the model's own code"] += 1
        self._return_as_seen(kind, tensors)
        return output

    def _after_another_form(self, kind: Kind, tensors: list[Tensor]) -> None:
        """The model's own code gave an output of another structure, or with another number in it,
        than it did before. Raises OutputShapeError where ``strict`` asks for it.
        """
        self._relearn(kind)
        self._return_as_seen(kind, tensors)

    def _return_as_seen(self, kind: Kind, tensors: list[Tensor]) -> None:
        """Give the output the structure that the model's own code gave for such tensors."""
        seen = kind.forward.outputs.get(shapes_of(tensors))
        if seen is not None:
            kind.returns = seen[0]
            kind.forward.returns_tensor = seen[0] == (Tensor,)

    def _own_code_again(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], list[Tensor]]:
        """For ``grad="recompute"``: runs the model with gradients, under the autocast of now. What
        it does raises GradientError where the model has changed since, or its tensors or those of
        the arguments were written.
        """
        learnt, ignore = self._learnt, self._settings["ignore"]
        assert learnt.watch is not None
        record = learnt.watch.record
        tensors = [*learnt.tensors, *call_form(args, kwargs)[1]]
        versions = list(map(_version_of, tensors))
        ambient = AmbientState.now(learnt.device)

        def run() -> list[Tensor]:
            if list(map(_version_of, tensors)) != versions or record.changes(ignore):
                raise GradientError(
                    f"{self._name}, or a tensor that it reads, has changed between its call and "
                    "backward",
                    remedy="Call backward before the optimizer's step and before .train(), and "
                    "leave arguments as they "
                    "were.",
                )
            with ambient._replace(grad=True, inference=False).entered(learnt.device):
                form, leaves = list[Any](), list[Tensor]()
                flatten([self._wrapped(*args, **kwargs)], form, leaves)
            return leaves

        return run

    # --- the life of a kind -----------------------------------------------------------------------

    def _kinds(self) -> list[Kind]:
        return [kind for kinds in list(self._learnt.kinds.values()) for kind in list(kinds)]

    def _kind_of(
        self,
        family: Family,
        form: tuple[Any, ...],
        tensors: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Kind:
        """The kind of a call; the first one makes it."""
        learnt = self._learnt
        known = learnt.kinds.setdefault(form, [])
        learnt.kinds.move_to_end(form)
        state = self._state_of(form)
        family.calls += 1
        for kind in known:
            if kind.state == state and kind.fits(tensors):
                family.misses = 0
                return kind
        kind = self._new_kind(form, tensors, args, kwargs)
        kind.state, kind.autocast = state, form[-1]
        known.append(kind)
        for path, count in family.add(
            constants_in(self._bound(args, kwargs), ""), holds_objects=bool(state)
        ):
            self._tell(
                f"argument `{path}` had {count} values in {count} calls; pass a tensor, or graphs "
                "serve values that "
                "come back",
                path,
            )
        self._forget_old_kinds()
        return kind

    def _state_of(self, form: tuple[Any, ...]) -> Any:
        """What object arguments hold, as a key: plain values, lengths and addresses."""
        roots = object_roots(form)
        if not roots:
            return ()
        return Fingerprint.of(roots, self._learnt.pool.backend.device).as_key()

    def _new_kind(
        self,
        form: tuple[Any, ...],
        tensors: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Kind:
        names = self._names_of(tensors, args, kwargs)
        named = dict(zip(names, tensors, strict=True))
        is_exact = form in self._learnt.exact
        pads = self._settings["pad"] or {}
        shapes, said = inferred_shapes(named, self._settings["dynamic"], is_exact=is_exact)
        specs = {
            n: Input(shape=shapes[n], dtype=t.dtype, pad=pads.get(n, 0)) for n, t in named.items()
        }
        if len({e.symbol for spec in specs.values() for e in spec.extents if e.symbol}) == 1:
            # copies of a real row are valid for the model, in each dtype
            for name, spec in specs.items():
                if name not in pads and any(extent.symbol for extent in spec.extents):
                    specs[name] = spec.model_copy(update={"pad": "last"})
        forward = ByName(self._wrapped, len(args), list(kwargs), form[:-_AMBIENT])
        kind = Kind(forward, specs, self._learnt.pool.backend.device, said=said)
        kind.notes += [f"{n}: {s.dtype} [{', '.join(map(str, s.shape))}]" for n, s in specs.items()]
        try:
            sizes = kind.sizes_of(tensors)
        except InputError as error:
            if self._settings["strict"] or is_exact:
                raise
            self._tell(f"{error.message}; so nothing is padded, and each shape has its own graph")
            self._learnt.exact.add(form)
            return self._new_kind(form, tensors, args, kwargs)
        for name, size in sizes.items():
            kind.dims[name] = self._dim(kind, name, size)
            if said.startswith("nothing varies"):
                kind.dims[name], kind.is_exact = Dim(name, min=size, max=size, sizes=(size,)), True
        return kind

    def _names_of(
        self, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[str]:
        """A name for each tensor of a call, in order. Raises ConfigError where settings name
        others.
        """
        form, _ = call_form(args, kwargs)
        # a tensor may come twice in a call, and a mark does not
        marks = [torch.empty(0) for _ in tensors]
        forward = ByName(self._wrapped, len(args), list(kwargs), tuple(form))
        marked, marked_by_name = forward.arguments(marks)
        name_of = dict[int, str]()
        for name, value in self._bound(marked, marked_by_name).items():
            for path, mark in tensors_by_name(value, name):
                name_of[id(mark)] = path + "_" * (path in WORDS_OF_A_CALL)
        names = [name_of.get(id(mark), f"tensor_{index}") for index, mark in enumerate(marks)]
        twice = {name for name, count in Counter(names).items() if count > 1}
        names = [f"{name}_{index}" if name in twice else name for index, name in enumerate(names)]
        for given in (*(self._settings["dynamic"] or ()), *(self._settings["pad"] or ())):
            parts = [name for name in names if name.partition(".")[0] == given.partition(".")[0]]
            # an argument that this call leaves out may come in another
            if parts and given not in names:
                raise ConfigError(
                    f"dynamic or pad names {given!r}", remedy=f"Names there are {', '.join(parts)}."
                )
        return names

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name; those of ``**kwargs`` by their own."""
        try:
            found = dict(self._signature.bind(*args, **kwargs).arguments)
        except TypeError:  # the signature is not that of the code, which may take them
            return {**{f"args.{index}": value for index, value in enumerate(args)}, **kwargs}
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                found |= found.pop(name, {})
        return found

    def _dim(self, kind: Kind, name: str, size: int) -> Dim:
        """Bounds and sizes of a name: those given, or that grow with batches."""
        given = [
            dim for dims in (self._settings["dynamic"] or {}).values() for dim in dims.values()
        ]
        sizes, most = (
            self._settings[key] if name == kind.names[0] else None for key in ("sizes", "max_size")
        )
        for dim in given:
            if isinstance(dim, Dim) and dim.name == name:
                if sizes or most:
                    remedy = f"Leave them out: cgplan.Dim({name!r}, max=..., sizes=...)."
                    raise ConfigError(
                        f"{name} has a Dim, and sizes or max_size were given, too", remedy=remedy
                    )
                return dim
        if sizes is not None and not isinstance(sizes, str):
            sizes = tuple(sizes)
            most = most or max(sizes, default=None)
        if most is None:
            kind.grows.add(name)
            most = 4 << (size - 1).bit_length()
        return Dim(name, max=most, sizes=sizes)

    def _forget_old_kinds(self) -> None:
        learnt = self._learnt
        more = sum(len(kinds) or 1 for kinds in learnt.kinds.values()) - _MOST_KINDS
        if more > 0:
            older = [(kinds, kind) for kinds in learnt.kinds.values() for kind in kinds][:-1]
            for kinds, kind in [pair for pair in older if not pair[1].has_graphs][:more]:
                kind.close()
                kinds.remove(kind)
            for form in [form for form, kinds in learnt.kinds.items() if not kinds]:
                del learnt.kinds[form]
                learnt.exact.discard(form)
        if len(learnt.families) > _MOST_KINDS:
            learnt.families.pop(next(iter(learnt.families)))

    def _first_calls(
        self, kind: Kind, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call by the model's own code, from which a kind is learnt; the second one is
        watched.
        """
        device = self._learnt.pool.backend.device
        is_second = kind.calls == WATCHED - 1
        ignore = self._settings["ignore"]
        sizes, shapes = kind.sizes_of(tensors), shapes_of(tensors)
        versions = list(map(_version_of, tensors))
        before = given = None
        moved: Callable[[], Any] = tuple
        if is_second:
            before = Fingerprint.of({"model": self._wrapped}, device, draws=True)
            given = Fingerprint.of(self._bound(args, kwargs), device)
            moved = functools.partial(_drawn_and_written, before, given)
        moved_before = moved()
        output = self._wrapped(*args, **kwargs)
        kind.calls += 1
        if before is not None and given is not None:
            changes = {**before.changes(ignore), **given.changes(ignore)}
            if changes:
                path = next(iter(changes))
                kind.why = f"each run changes {path}; ignore=[{path!r}] if it decides nothing"
            elif self._learnt.watch is None:
                self._look_after(before.without_draws())
        changed = [
            n for n, t, v in zip(kind.specs, tensors, versions, strict=True) if _version_of(t) != v
        ]
        if changed:
            kind.why = f"the forward writes into argument `{changed[0]}`"
        if shapes_of(tensors) != shapes:
            kind.why = "the forward changes the shape of an argument"
        self._learn(kind, sizes, output)
        if self._settings["grad"] == "recompute" and True in kind.asks and moved() != moved_before:
            kind.why = (
                "backward could not run it again: each run draws random numbers, or writes tensors"
            )
        if kind.why is not None:
            self._tell(kind.why)
        return output

    def _learn(self, kind: Kind, sizes: dict[str, int], output: Any) -> None:
        """Learn from an output of the model's own code; where sizes do not follow, nothing varies
        in the kind.
        """
        form, leaves = list[Any](), list[Tensor]()
        flatten([output], form, leaves)
        try:
            kind.learn(sizes, tuple(form), [leaf.shape for leaf in leaves])
        except OutputShapeError as error:
            self._give_up(kind, error.message)
        if torch.is_grad_enabled():
            kind.asks = tuple(leaf.requires_grad for leaf in leaves)

    def _relearn(self, kind: Kind) -> bool:
        """Whether an output has another size than was taken for it; the kind's graphs are then
        freed. Raises OutputShapeError where sizes do not follow and ``strict`` asks for it.
        """
        try:
            if not kind.relearn():
                return False
            kind.close()
            self._learnt.calls.clear()
        except OutputShapeError as error:
            if self._settings["strict"]:
                raise
            self._give_up(kind, error.message)
        return True

    def _give_up(self, kind: Kind, why: str, *, keeps_exact: bool = True) -> None:
        """End a kind's graphs. ``keeps_exact``: if sizes vary in it, kinds in which nothing does
        take its place.
        """
        kind.close()
        self._learnt.calls.clear()
        if kind.is_exact or not keeps_exact:
            kind.why = why
            self._tell(why)
            return
        self._tell(f"{why}; so nothing is padded, and each shape has its own graph")
        for form, kinds in list(self._learnt.kinds.items()):
            if kind in kinds:
                self._learnt.exact.add(form)
                kinds.remove(kind)

    # --- captures ---------------------------------------------------------------------------------

    def _open(self, kind: Kind, tensors: Sequence[Tensor]) -> None:
        """Give a kind its runner, for sizes that hold the present batch. Raises ConfigError for
        wrong settings.
        """
        kind.close()
        self._learnt.calls.clear()
        for name, size in kind.sizes_of(tensors).items():
            if name in kind.grows and size > kind.dims[name].top:
                kind.dims[name] = self._dim(kind, name, size)
        pool, compilation, most = (
            self._learnt.pool,
            self._settings["compilation"],
            self._settings["max_graphs"],
        )
        values = {
            "model": {"output_shapes": kind.shapes},
            "dims": kind.dims,
            "device": str(pool.backend.device),
            "inputs": kind.specs,
            "budget": BudgetConfig(max_graphs=most),
        }
        config = validate_config({**values, "compilation": compilation})
        if (
            len(build_plan(config).keys) + sum(len(runner.plan.keys) for runner in self.runners)
            > most
        ):
            lazy = compilation.model_copy(update={"capture_policy": "lazy"})
            config = validate_config({**values, "compilation": lazy})
        rows = RealRows(
            functools.partial(_fill, weakref.ref(kind)), tuple(self._settings["pad"] or ())
        )
        state = {"model": self._wrapped, **object_roots(kind.forward.form)}
        session = CaptureSession(
            build_plan(config),
            kind.forward,
            pool.backend,
            config,
            pool=pool,
            name=self._name,
            state=state,
            real_rows=rows,
        )
        kind.runner = session.run()

    def _prepare(self, kind: Kind, tensors: list[Tensor]) -> str | None:
        """Have the graph of a batch captured, if there is room for it; why the model's own code
        runs, if it does.
        """
        if self._learnt.watch is None:
            self._look_after(
                Fingerprint.of({"model": self._wrapped}, self._learnt.pool.backend.device)
            )
        kind.batch = {
            name: tensor.clone() for name, tensor in zip(kind.specs, tensors, strict=True)
        }
        try:
            sizes = kind.sizes_of(tensors)
            if kind.runner is None or any(
                n in kind.grows and size > kind.dims[n].top for n, size in sizes.items()
            ):
                self._open(kind, tensors)
            assert kind.runner is not None
            runner, inputs = kind.runner, dict(zip(kind.specs, tensors, strict=True))
            wanted = runner.route(inputs).wanted
            if wanted is not None and self._has_room(kind, wanted):
                runner.exchange([wanted])
        except (CaptureError, ModelError) as error:
            return self._after_a_failure(kind, error, tensors)
        finally:
            kind.batch = {}
        failed = {(failure.mode, failure.descriptor): failure for failure in runner.report.failed}
        if wanted in failed:
            failure = failed[wanted]
            errors = {error.__name__: error for error in (ModelError, OutputShapeError)}
            return self._after_a_failure(
                kind, errors.get(failure.error, CaptureError)(failure.detail), tensors
            )
        if kind.forward.differs:
            return self._after_a_failure(
                kind, OutputShapeError("the output depends on the size of the batch"), tensors
            )
        route = runner.route(inputs)
        if objects_in(kind.forward.form) and not kind.has_graphs:
            kind.close()  # it would hold a cache that nobody else does
        if route.mode is CUDAGraphMode.NONE and runner.config.compilation.on_miss == "eager":
            return (
                "no graph serves the batch of "
                f"{', '.join(f'{n} = {size}' for n, size in sizes.items())}"
            )
        return None

    def _after_a_failure(self, kind: Kind, error: CgplanError, tensors: list[Tensor]) -> str | None:
        """A graph could not be captured; why the model's own code runs, unless a second try has it
        captured. Raises the error where ``strict`` asks for it.
        """
        if self._relearn(kind):
            return self._prepare(kind, tensors) if kind in self._kinds() else error.message
        if self._settings["strict"]:
            raise error
        is_padding = isinstance(error, ModelError | OutputShapeError)
        self._give_up(kind, f"no graph could be captured: {error.message}", keeps_exact=is_padding)
        return kind.why or error.message

    def _has_room(self, kind: Kind, wanted: Key) -> bool:
        """Whether a graph may be captured: there are fewer than ``max_graphs``, or one is used less
        than this batch is asked for, which then goes.
        """
        learnt = self._learnt
        graphs = {
            (id(k), key): (k, key) for k in self._kinds() if k.runner for key in k.runner.plan.keys
        }
        if len(graphs) < self._settings["max_graphs"]:
            return True
        uses = {name: k.runner.stats.replays[key] for name, (k, key) in graphs.items() if k.runner}
        asked, before = learnt.waiting.pop((id(kind), wanted), (0, uses))
        since = {name: count - before.get(name, 0) for name, count in uses.items()}
        least = min(since, key=lambda name: since[name])
        if asked + 1 <= since[least] or not asked:
            if len(learnt.waiting) >= _MOST_KINDS:
                learnt.waiting.clear()
            learnt.waiting[id(kind), wanted] = asked + 1, before
            return False
        self._tell(
            f"calls ask for more than {self._settings['max_graphs']} graphs; the least used go",
            "max_graphs",
        )
        least_kind, key = graphs[least]
        assert least_kind.runner is not None
        learnt.calls.clear()
        least_kind.runner.exchange(evicted=[key])
        if least_kind is not kind and not least_kind.has_graphs:
            least_kind.close()
        return True

    def _take_device(self, tensors: Sequence[Tensor]) -> None:
        """Make the pool of all runners, on the device of the model or of the first batch."""
        held = [*self._module.parameters(), *self._module.buffers(), *tensors]
        device = next((t.device for t in held if t.device.type != "cpu"), held[0].device)
        self._learnt.pool = pool = GraphPool(
            select_backend(str(self._settings["device"] or device))
        )
        pool.use.waits = True
        self._learnt.device = pool.backend.device.type

    def _tell(self, text: str, about: str | None = None) -> None:
        """Log something once; of several things ``about`` one, the first."""
        if (about or text) not in self._learnt.told:
            self._learnt.told[about or text] = text
            logger.warning("%s: %s", self._name, text)

    # --- what users ask ---------------------------------------------------------------------------

    @property
    def runners(self) -> tuple[GraphRunner, ...]:
        """The runner of each kind of calls, most calls first. Freed graphs close them."""
        found = [kind.runner for kind in self._kinds() if kind.runner is not None]
        return tuple(sorted(found, key=lambda runner: runner.stats.calls, reverse=True))

    @property
    def report(self) -> CaptureReport:
        """Memory and time of the graphs, for the kind with the most calls. Raises CgplanError
        before the third call.
        """
        return self._busiest()[1].report

    def _busiest(self) -> tuple[Kind, GraphRunner]:
        found = [(kind, kind.runner) for kind in self._kinds() if kind.runner is not None]
        if not found:
            raise CgplanError(
                f"{self._name} has no graphs",
                remedy="Call it three times, or give it an example; explain() says why calls ran "
                "eagerly.",
            )
        return max(found, key=lambda pair: pair[1].stats.calls)

    def explain(self) -> str:
        """What was inferred for each kind of calls, and from what; which graphs there are; calls
        that ran eagerly.
        """
        most = self._settings["max_graphs"]
        lines = [f"{self._name}: {sum(len(r.plan.keys) for r in self.runners)} of {most} graphs"]
        for kind in self._kinds():
            if kind.runner is None:
                continue
            sizes = ", ".join(key.size for _, key in reversed(kind.runner.plan.keys))
            lines.append(f"- {kind.runner.stats.calls} calls; graphs of {sizes or 'no size'}")
            lines += [f"  {note}" for note in kind.notes]
            for index, shape in enumerate(kind.shapes):
                is_fixed = not any(isinstance(dim, str) for dim in shape)
                lines.append(
                    f"  output {index}: [{', '.join(map(str, shape))}]{' (fixed)' * is_fixed}"
                )
            if kind.asks and True in kind.asks and self._settings["grad"] is None:
                lines.append("  backward through its outputs raises GradientError")
        lines += sorted(self._learnt.told.values())
        lines += [
            f"{calls} calls ran eagerly: {why}" for why, calls in self._learnt.eager.most_common()
        ]
        return "\n".join(lines)

    def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """Make the graph for such a call ahead of it: the model's own code runs twice, and is
        looked at and captured. Tensors and attributes of the model and of arguments, and torch's
        random numbers, are afterwards as they were. Raises what the model raises.
        """
        with self._learnt.lock:
            form, tensors = call_form(args, kwargs)
            form += self._ambient()
            why = self._why_eager(asks=False) if self._is_elsewhere() else _why_not(form, tensors)
            if why is not None:
                self._tell(why)
                return
            if self._learnt.pool is None:
                self._take_device(tensors)
                form[-_AMBIENT:] = self._ambient()
            self._holds()
            while (kind := self._warmed_up(tuple(form), tensors, args, kwargs)).why is None:
                self._prepare(kind, tensors)
                if kind in self._kinds():  # else one in which nothing varies takes its place
                    break

    def _warmed_up(
        self,
        form: tuple[Any, ...],
        tensors: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Kind:
        """The kind of a call after its first calls, which are made here and put back."""
        backend = self._learnt.pool.backend
        roots = {"model": self._wrapped, "arguments": self._bound(args, kwargs)}
        kept = PutBack(Fingerprint.of(roots, backend.device), backend.memory().free or 4 << 30)
        failed = list[Exception]()

        def call() -> None:
            try:
                self._first_calls(kind, tensors, args, kwargs)
            except Exception as error:
                failed.append(error)

        while True:
            kind = self._kind_of(Family(), form, tensors, args, kwargs)
            if failed or kind.why is not None or kind.calls >= WATCHED:
                break
            look(call, kept)
        if failed or kind.why is not None:
            kept.forget_captures()
        kept.restore()
        if failed:
            raise failed[0]
        return kind

    def _ambient(self) -> list[Any]:
        """What decides beside the arguments: a gradient that one asks for, grad mode, the default
        dtype, autocast.
        """
        device = self._learnt.device
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        return [False, torch.is_grad_enabled(), torch.get_default_dtype(), autocast]

    def save_config(self, path: str | Path) -> None:
        """Write ``config_text`` to a file. Raises as it does."""
        Path(path).write_text(self.config_text(), encoding="utf-8")

    def config_text(
        self, target: str | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> str:
        """The configuration of the kind with the most calls, as `cgplan capture --config` takes it;
        comments say what was inferred, and from what. Arguments that are no tensors stand in
        ``call``, see ``as_called``.

        Args:
            target, kwargs: What makes the model; absent: its class, where that needs no arguments.

        Raises:
            CgplanError: there are no graphs yet.
            ConfigError: an argument of the calls has no form in YAML, or they were made under
                autocast.
        """
        kind, runner = self._busiest()
        if kind.autocast:
            raise ConfigError(
                "calls were made under torch.autocast, of which a file knows nothing",
                remedy="Enter torch.autocast in the model's forward, and call it outside.",
            )
        target = target or target_of(self._wrapped)
        config = runner.config
        values = config.model_dump(
            mode="json", exclude_defaults=True, exclude={"dims": {"__all__": {"name"}}}
        )
        made_by = {
            name: value
            for name, value in (("target", target), ("kwargs", dict(kwargs or {})))
            if value
        }
        args, keywords = kind.forward.arguments(map(Name, kind.specs))
        call = self._bound(args, keywords)
        if list(call.items()) != [(name, name) for name in kind.specs]:
            if target is not None and target.partition(":")[0].endswith(".py"):
                made_by["target"] = str(Path(target).resolve())
            as_yaml = {name: written(value, name) for name, value in call.items()}
            made_by = {"target": "cgplan.drop_in:as_called", "kwargs": {**made_by, "call": as_yaml}}
        values["model"] = {**made_by, **values.get("model", {})}
        for name in ("capture_policy", "strict", "ignore", "verify", "address_check"):
            values["compilation"].pop(name, None)
        notes = ["Written by cgplan.graphed, which inferred:", *kind.notes]
        if target is None:
            key = "model.kwargs.target" if "target" in made_by else "model.target"
            notes.append(
                f"To fill in: {key}, a function that returns the model, such as my_model.py:build"
            )
        text = "".join(f"# {note}\n" for note in notes)
        return text + yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=110)

    def recapture(self) -> None:
        """Free all graphs, and forget what was learnt of calls; they are captured again as calls
        ask for them.
        """
        learnt = self._learnt
        with learnt.lock:
            for kind in self._kinds():
                kind.close()
            if learnt.watch is not None:
                learnt.watch.close()
            fresh = _Learnt(eager=learnt.eager, told=learnt.told, lock=learnt.lock)
            vars(learnt).update(vars(fresh))  # other threads wait for its lock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_wrapped"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped, name, value)  # which the forward may read
        self._suspect()

    def _suspect(self) -> None:
        """Compare the whole model at the next call."""
        if self._learnt.watch is not None:
            self._learnt.watch.suspect()

    def __reduce__(self) -> Any:
        # a decorated function is a global of this name
        name = getattr(self._wrapped, "__qualname__", "")
        if name and getattr(sys.modules.get(self._wrapped.__module__), name, None) is self:
            return name
        return type(self), (self._wrapped, {**self._settings, "example": None})


class GraphedModule(Graphed, nn.Module):
    """Graphed of a module, and a module itself: with the model's parameters and ``state_dict``."""

    def __init__(self, model: nn.Module, settings: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        share(self, model)
        super().__init__(model, settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            self._forward_hooks
            or self._forward_pre_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
        ):
            return nn.Module.__call__(self, *args, **kwargs)
        # nn.Module would take a microsecond to find that out
        return Graphed.forward(self, *args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self._module._apply(fn, recurse)
        self._suspect()
        return self

    def train(self, mode: bool = True) -> Self:
        """As the model's; in training mode calls run the model's own code."""
        self._module.train(mode)
        self.__dict__["training"] = mode
        self._suspect()
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self._module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        self._suspect()
        return self._module.load_state_dict(*args, **kwargs)


def _matching(calls: Sequence[_Call]) -> _Call | None:
    """What serves a call: object arguments may be in other states than at any earlier one."""
    return next((call for call in calls if call.kind.has_objects()), None)


def _why_not(form: Sequence[Any], tensors: Sequence[Tensor]) -> str | None:
    """Why a call with these arguments runs by the model's own code; None where it does not."""
    if not any(tensor.ndim for tensor in tensors) or not all(tensor.numel() for tensor in tensors):
        return "no tensor argument has a dimension, or one is empty"
    odd = {
        str(t.dtype) for t in tensors if str(t.dtype).removeprefix("torch.") not in get_args(DType)
    }
    odd |= {str(t.layout) for t in tensors if t.layout is not torch.strided or t.is_nested}
    odd |= {part.__name__ for part in form if is_tensor_type(part) and part is not Tensor}
    odd |= {t.device.type for t in tensors if t.is_meta}
    odd |= {type(value).__name__ for value in objects_in(form) if hasattr(value, "__array__")}
    return f"an argument is of {', '.join(sorted(odd))}" if odd else None


def _drawn_and_written(*records: Fingerprint) -> tuple[list[list[int]], list[int]]:
    """The states of torch's random generators, and the versions of the tensors in records."""
    device = records[0].device
    defaults = [torch.default_generator, *torch.cuda.default_generators[device.index or 0 :][:1]]
    generators = (*defaults, *(generator for record in records for generator in record.generators))
    tensors = (tensor for record in records for tensor in record.tensors)
    return [g.get_state().tolist() for g in generators], list(map(_version_of, tensors))


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def target_of(model: object) -> str | None:
    """The target that makes such a model: its class, if that is importable and asks for no
    arguments.
    """
    kind = type(model)
    is_global = (
        getattr(sys.modules[kind.__module__], kind.__qualname__, None) is kind
        and kind.__module__ != "__main__"
    )
    takes_none = kind.__init__ is nn.Module.__init__ or not inspect.signature(kind).parameters
    made_alone = isinstance(model, nn.Module) and takes_none
    return f"{kind.__module__}:{kind.__qualname__}" if is_global and made_alone else None


def _dim_of(given: Any) -> Dim | str:
    """A dimension of ``dynamic``: a name, or one with its bounds."""
    if isinstance(given, Dim | str):
        return given
    if not hasattr(given, "__name__"):
        raise ConfigError(
            f"dynamic: {given!r} names no dimension",
            remedy="Give cgplan.Dim, torch.export.Dim, or a name.",
        )
    is_bound = type(given.max) is int and given.__name__.isidentifier()
    return (
        Dim(given.__name__, min=max(given.min, 1), max=given.max)
        if is_bound
        else str(given.__name__)
    )


def _checked(name: str, value: Any, kinds: tuple[type, ...], remedy: str) -> None:
    if value is not None and not isinstance(value, kinds):
        raise ConfigError(f"{name} is {value!r:.80}, of {type(value).__name__}", remedy=remedy)


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
    verify: Literal["off", "first", "rarely", "always"] = "rarely",
    strict: bool = False,
    ignore: Sequence[str] = (),
    grad: Literal["recompute"] | None = None,
) -> Any:
    """A drop-in for a model or a function of tensors that runs by captured graphs; also a
    decorator.

        g = cgplan.graphed(model, sizes=[1, 4, 16])
        y = g(x)

    What it promises (docs/concepts.md has the whole contract): a call returns what the model
    returns, within rounding, or runs the model. The first two calls of a kind run the model's own
    code, the third captures. A graph is used only for a forward that leaves Python as it found it.
    Weights may change in place, and move: then the next call captures again. Replays 1, 2, 4, 8,
    ... of a graph are compared with the model's own code.

    Arguments may be tensors, numbers, text, None, and dicts, lists, tuples, dataclasses and pytrees
    of them; those that are no tensors are part of the kind of the call. Pass the same cache object
    in each call; a new one gets graphs of its own.

    Args:
        model: Absent: a decorator is returned. Of a method in a class body, each object has its own
            graphs.
        sizes: Capture sizes, or a ladder's name; absent: powers of two.
        max_size: The largest size. A larger batch runs eagerly, or is an error (``on_miss`` in
            ``compilation``). Absent: that of ``sizes``, or none, and graphs grow with the batches.
        example: Arguments of one call, for ``warm_up``: a tensor, a sequence, or a mapping by name.
        dynamic: Dimensions that vary, by input:
            ``{"x": {0: cgplan.Dim("batch", max=64), 1: "length"}}``; parts of an argument are named
            ``obs.position``. ``{}``: none, each shape has a graph. Absent: dimension 0 of the
            inputs that agree in it.
        pad: Values of padding by input, where it is not 0: those alone have to be harmless.
        max_graphs: Graphs at most, of all kinds of calls; the least used go.
        device: Absent: the model's, or that of the tensors.
        compilation: More settings of ``compilation``. ``capture_policy: eager``: the first call
            warms up.
        outputs: ``borrow``: outputs are valid until the next call; ``clone``: they are the
            caller's.
        verify: When replays are compared: ``off``, the ``first`` of each graph, ``rarely`` (1, 2,
            4, 8, ...), or ``always``. A comparison takes an eager run's time and memory.
        strict: Where the model's own code would answer because a graph cannot be captured or
            differs, raise.
        ignore: Paths of Python values that decide nothing, such as ``model.calls``; ``*`` stands
            for one part.
        grad: ``recompute``: backward runs the model's own code again, as activation checkpointing
            does. Absent: it raises GradientError.

    Raises ConfigError for a wrong setting. Calls raise what the model raises; with ``strict``
    CaptureError and NumbersError, too.
    """
    _checked(
        "dynamic", dynamic, (Mapping,), 'Pass dimensions by input: dynamic={"x": {0: "batch"}}.'
    )
    _checked("pad", pad, (Mapping,), 'Pass values by input: pad={"x": -1}.')
    _checked(
        "sizes",
        sizes,
        (Sequence,),
        "Pass a list of sizes, or the name of a ladder: sizes=[1, 2, 4].",
    )
    _checked(
        "ignore",
        None if isinstance(ignore, str) else ignore,
        (Sequence,),
        'Pass a list: ignore=["model.calls"].',
    )
    for name, value, allowed in (
        ("verify", verify, ("off", "first", "rarely", "always")),
        ("grad", grad, ("recompute", None)),
    ):
        if value not in allowed:
            raise ConfigError(
                f"{name} is {value!r}", remedy=f"Choose one of {', '.join(map(str, allowed))}."
            )
    for name, dims in (dynamic or {}).items():
        _checked(
            f"dynamic[{name!r}]",
            dims,
            (Mapping,),
            'Pass names by dimension: dynamic={"x": {0: "batch"}}.',
        )
    if dynamic is not None:
        dynamic = {
            name: {at: _dim_of(dim) for at, dim in dims.items()} for name, dims in dynamic.items()
        }
    if any(isinstance(value, str) for value in (pad or {}).values()):
        raise ConfigError(f"pad is {pad}", remedy="Give numbers; cgplan.capture takes `last`.")
    ignored = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    given = {"capture_policy": "lazy", "outputs": outputs, "verify": verify, **(compilation or {})}
    settings: dict[str, Any] = {
        "sizes": sizes,
        "max_size": max_size,
        "example": example,
        "dynamic": dynamic,
        "pad": pad,
        "device": device,
        "max_graphs": BudgetConfig(max_graphs=max_graphs).max_graphs,
        "strict": strict,
        "ignore": ignored,
        "grad": grad,
        "compilation": CompilationConfig(
            **{**given, "strict": True, "ignore": ignored, "address_check": "off"}
        ),
    }

    def made(model: Callable[..., Any]) -> Graphed:
        if not callable(model) or isinstance(model, type):
            raise ConfigError(
                f"graphed was given {model!r:.80}, which is no model",
                remedy="Pass a module or a function of tensors.",
            )
        return (
            GraphedModule(model, settings)
            if isinstance(model, nn.Module)
            else Graphed(model, settings)
        )

    return made if model is None else made(model)
