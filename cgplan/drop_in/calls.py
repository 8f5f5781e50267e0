"""Calls: what is known of the calls of one model, and the graphs that serve them.

Note [A call]
    A call like an earlier one costs the runner's call, the flattening of its arguments, one
    look-up, and a look at whether the model is as it was. Each kind of calls (kinds.py) has a
    configuration and a GraphRunner; all runners share one pool. Where eager is right, eager runs:
    whatever cannot be captured, or differs from the model's own code, is answered by that code,
    told once, and counted by ``explain``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast, get_args

import torch
from torch import Tensor

from cgplan.backends import select_backend
from cgplan.backends.context import current_forward_context, is_capture_allowed
from cgplan.captures.model_runs import RealRows
from cgplan.config import BudgetConfig, Config, validate_config
from cgplan.config.values import DType
from cgplan.drop_in.call_form import (
    Call,
    Form,
    call_form,
    constants_in,
    flatten,
    is_tensor_type,
    module_of,
    object_roots,
    objects_in,
    rebuild,
    shapes_of,
)
from cgplan.drop_in.gradients import outputs_that_ask
from cgplan.drop_in.inference import Inference, Settings
from cgplan.drop_in.kinds import WATCHED, Family, Kind, without_constants
from cgplan.errors import (
    CaptureError,
    CgplanError,
    GradientError,
    InputError,
    ModelError,
    NumbersError,
    OutputShapeError,
)
from cgplan.graphs.ambient import AmbientState
from cgplan.graphs.fingerprint import Fingerprint
from cgplan.graphs.footprint import look
from cgplan.graphs.pools import GraphPool
from cgplan.graphs.put_back import PutBack
from cgplan.graphs.watch import Watch
from cgplan.modes import CUDAGraphMode, Key
from cgplan.planning import build_plan
from cgplan.runner.runner import GraphRunner
from cgplan.runner.session import CaptureSession

_MOST_CALLS = 4096  # that are found by one look-up
_MOST_KINDS = 256  # that are remembered
_traits = attrgetter("shape", "dtype", "layout", "device")
_asks_grad = attrgetter("requires_grad")
_dispatch_modes, _tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
_saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_transforms = torch._C._functorch.peek_interpreter_stack
logger = logging.getLogger(__name__)


@dataclass
class _Served:
    """What serves calls of one key: the runner of a kind, or the model's own code for a reason."""

    kind: Kind
    why: str | None = None


def _fill(kind: weakref.ref[Kind], views: Mapping[str, Tensor]) -> None:
    cast(Kind, kind()).fill(views)  # its runner holds this function, and is freed with the kind


class Calls:
    """The calls of one model, from several threads one after the other. It owns graphs, pool and
    static buffers, not the model.

    Attributes:
        pool: Of all runners, once the device is known, whose type is ``device``.
        eager: The number of calls by the model's own code, by reason.
        changed: How often graphs were freed because the model had changed, by the first path.
        told: What was logged once, by what it is about.
    """

    __graph_memory__ = True  # no state of a model that holds one

    def __init__(
        self,
        model: Callable[..., Any],
        signature: inspect.Signature,
        settings: Settings,
        name: str,
    ) -> None:
        self._model, self._module, self._name = model, module_of(model), name
        self._has_modes = hasattr(self._module, "training")
        self._signature, self._settings = signature, settings
        self._inference = Inference(model, signature, settings)
        self._lock = threading.RLock()
        self.eager, self.changed = Counter[str](), Counter[str]()
        self.told: dict[str, str] = {}
        self._know_nothing()

    def _know_nothing(self) -> None:
        self.pool: Any = None
        self.device = "cpu"
        # by the form of the call; the least recently used go first
        self._kinds = OrderedDict[Form, list[Kind]]()
        self._families: dict[Form, Family] = {}
        # by form, shapes and dtypes
        self._served: dict[Any, list[_Served]] = {}
        # forms of which nothing varies, since padding reached real rows or the model refused it
        self._exact = set[Form]()
        # of the model, once a call left it as it was, and the tensors that it held then
        self._watch: Watch | None = None
        self._tensors: list[Tensor] = []
        # keys without room: how often they were asked for, and the uses of graphs before
        self._waiting: dict[tuple[int, Key], tuple[int, dict[tuple[int, Key], int]]] = {}

    def recapture(self) -> None:
        """Free all graphs, and forget what was learnt of calls."""
        with self._lock:
            for kind in self.kinds:
                kind.close()
            if self._watch is not None:
                self._watch.close()
            self._know_nothing()

    # --- a call -----------------------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's output for a batch: padded, by a graph, and cut; or by its own code."""
        with self._lock:
            form, tensors = call_form(args, kwargs)
            grad = torch.is_grad_enabled()
            asks = grad and (True in map(_asks_grad, tensors) or _saving_hooks(False) is not None)
            device = self.device
            autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
            form += asks, grad, torch.get_default_dtype(), autocast
            if asks or self._is_elsewhere():
                return self._own(self._why_elsewhere(asks), args, kwargs)
            try:
                key = (*form, *map(_traits, tensors))
            except RuntimeError:
                return self._own("an argument is a nested tensor", args, kwargs)
            served = self._served.get(key, ())
            if len(served) == 1 and served[0].kind.objects is None:
                found: _Served | None = served[0]
            else:
                found = _matching(served)
            if found is None:
                return self._slow(key, Call(args, kwargs, tuple(form), tensors))
            if found.why is not None:
                return self._own(found.why, args, kwargs)
            if self._watch is None or not (self._watch.holds() or self.holds()):
                return self._slow(key, Call(args, kwargs, tuple(form), tensors))
            return self._replay(found.kind, tensors, args, kwargs)

    def _is_elsewhere(self) -> bool:
        """Whether a call runs by the model's own code, whatever its arguments are."""
        return (
            (self._has_modes and self._module.training)
            or current_forward_context() is not None
            or _dispatch_modes() > 0
            or _transforms() is not None
            or _tracing() is not None
        )

    def _why_elsewhere(self, asks: bool) -> str:
        """Why it does."""
        if self._has_modes and self._module.training:
            why = "the model is in training mode; call .eval() for graphs"
            self._tell(why)
            return why
        if current_forward_context() is not None:
            return "inside the forward of another runner"
        if _saving_hooks(False) is not None:
            return "hooks save tensors for backward, as activation checkpointing does"
        if asks:
            return "a tensor argument asks for a gradient"
        return "under a dispatch mode, a transform of torch.func, or torch.jit.trace"

    def _own(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.eager[why] += 1
        return self._model(*args, **kwargs)

    def suspect(self) -> None:
        """Compare the whole model at the next call."""
        if self._watch is not None:
            self._watch.suspect()

    def holds(self) -> bool:
        """Whether the model is as it was; else its graphs are freed, and that is told."""
        if self._watch is None:
            return False
        changes = self._watch.changes(self._settings.ignore)
        if not changes:
            return True
        first, more = next(iter(changes.values())), len(changes) - 1
        self.changed[first.path] += 1
        others = f", and {more} more changes" if more else ""
        self._tell(f"captured again: {first}{others}", first.path)
        self._watch.close()
        self._watch, self._tensors = None, []
        self._served.clear()
        is_moved = all(change.is_move for change in changes.values())
        for kind in self.kinds:
            kind.start_again(is_moved=is_moved)
        return False

    def _look_after(self, record: Fingerprint) -> None:
        """Capture again once the model is not as in this record."""
        self._watch, self._tensors = Watch(record), record.tensors

    def _slow(self, key: Any, call: Call) -> Any:
        """A call that no earlier one prepared."""
        args, kwargs, tensors = call.args, call.kwargs, call.tensors
        if (why := _why_not(call.form, tensors)) is not None:
            return self._own(why, args, kwargs)
        if self.pool is None:
            self._take_device(tensors)
            return self.run(args, kwargs)  # autocast is asked for this device
        if self._watch is not None and not self._watch.holds():
            self.holds()
        family = self._families.setdefault(without_constants(call.form), Family())
        if family.is_hopeless():
            return self._own("an object argument is in another state at each call", args, kwargs)
        kind = self._kind_of(family, call)
        is_eager = self._settings.compilation.capture_policy == "eager"
        if kind.why is None and kind.calls == 0 and is_eager:
            kind = self._warmed_up(call)
        if kind.why is None and kind.calls >= WATCHED:
            self.holds()  # ahead of a capture all is compared
        if kind.why is None and kind.calls < WATCHED:
            self.eager["the first calls of a kind"] += 1
            return self._first_calls(kind, call)
        why = kind.why or self._prepare(kind, tensors)
        has_objects = bool(objects_in(call.form))
        if why is not None:
            if kind.why is not None and not has_objects:
                self._remember(key, _Served(kind, why))
            return self._own(why, args, kwargs)
        assert kind.runner is not None
        if has_objects:
            kind.take_objects(self.pool.backend.device)
        if kind.runner.route(kind.inputs(tensors)).wanted is None:
            self._remember(key, _Served(kind))
        with kind.runner.no_capture():
            return self._replay(kind, tensors, args, kwargs)

    def _remember(self, key: Any, found: _Served) -> None:
        if len(self._served) >= _MOST_CALLS:
            self._served.clear()
        others = [other for other in self._served.get(key, ()) if other.kind is not found.kind]
        self._served[key] = [found, *others]

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
            if kind.forward.differs:  # from the outputs before, in structure or in a number
                self._relearn(kind)
                kind.return_as_seen(tensors)
        if kind.asks and torch.is_grad_enabled():
            again = self._own_code_again(args, kwargs) if self._settings.recomputes else None
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
        if self._settings.strict:
            raise error
        assert kind.runner is not None
        output, sizes = error.output, kind.sizes_of(tensors)
        route = kind.runner.route(kind.inputs(tensors))
        padded = (route.descriptor.num_tokens, *route.descriptor.sizes)
        if self._relearn(kind):
            pass
        elif padded != tuple(sizes.values()):
            self._give_up(kind, error.message)
        else:
            kind.failures += 1
            self._tell(error.message)
            self._served.clear()
            kind.runner.exchange(evicted=[(route.mode, route.descriptor)])
            if kind.failures > 1:
                self._give_up(kind, error.message, keeps_exact=False)
        self.eager["a graph differed from the model's own code"] += 1
        kind.return_as_seen(tensors)
        return output

    def _own_code_again(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], list[Tensor]]:
        """For ``grad="recompute"``: runs the model with gradients, under the autocast of now. What
        it does raises GradientError where the model has changed since, or its tensors or those of
        the arguments were written.
        """
        assert self._watch is not None
        record, ignore = self._watch.record, self._settings.ignore
        tensors = [*self._tensors, *call_form(args, kwargs)[1]]
        versions = list(map(_version_of, tensors))
        ambient = AmbientState.now(self.device)

        def run() -> list[Tensor]:
            if list(map(_version_of, tensors)) != versions or record.changes(ignore):
                raise GradientError(
                    f"{self._name}, or a tensor that it reads, has changed between its call and "
                    "backward",
                    remedy="Call backward before the optimizer's step and before .train(), and "
                    "leave arguments as they were.",
                )
            with ambient._replace(grad=True, inference=False).entered(self.device):
                form, leaves = list[Any](), list[Tensor]()
                flatten([self._model(*args, **kwargs)], form, leaves)
            return leaves

        return run

    # --- kinds ------------------------------------------------------------------------------------

    @property
    def kinds(self) -> list[Kind]:
        found = list[Kind]()
        for kinds in list(self._kinds.values()):
            found += kinds
        return found

    @property
    def runners(self) -> list[GraphRunner]:
        return [kind.runner for kind in self.kinds if kind.runner is not None]

    def _kind_of(self, family: Family, call: Call) -> Kind:
        """The kind of a call; the first one makes it."""
        known = self._kinds.setdefault(call.form, [])
        self._kinds.move_to_end(call.form)
        state: Any = ()
        if roots := object_roots(call.form):
            state = Fingerprint.of(roots, self.pool.backend.device).as_key()
        family.calls += 1
        for kind in known:
            if kind.state == state and kind.fits(call.tensors):
                family.misses = 0
                return kind
        kind = self._new_kind(call)
        kind.state, kind.autocast = state, call.autocast
        known.append(kind)
        constants = constants_in(call.by_name(self._signature), "")
        for path, count in family.add(constants, holds_objects=bool(state)):
            self._tell(
                f"argument `{path}` had {count} values in {count} calls; pass a tensor, or graphs "
                "serve values that come back",
                path,
            )
        self._forget_old_kinds()
        return kind

    def _new_kind(self, call: Call) -> Kind:
        device, is_exact = self.pool.backend.device, call.form in self._exact
        try:
            return self._inference.kind(call, device, is_exact=is_exact)
        except InputError as error:
            if self._settings.strict or is_exact:
                raise
            self._tell(f"{error.message}; so nothing is padded, and each shape has its own graph")
            self._exact.add(call.form)
            return self._inference.kind(call, device, is_exact=True)

    def _forget_old_kinds(self) -> None:
        if len(self._families) > _MOST_KINDS:
            self._families.pop(next(iter(self._families)))
        more = sum(len(kinds) or 1 for kinds in self._kinds.values()) - _MOST_KINDS
        if more <= 0:
            return
        older = [kind for kind in self.kinds[:-1] if not kind.has_graphs][:more]
        for kind in older:
            kind.close()
        for form, kinds in list(self._kinds.items()):
            kinds[:] = [kind for kind in kinds if kind not in older]
            if not kinds:
                del self._kinds[form]
                self._exact.discard(form)

    def _first_calls(self, kind: Kind, call: Call) -> Any:
        """A call by the model's own code, from which a kind is learnt; the second one is
        watched.
        """
        settings, tensors, device = self._settings, call.tensors, self.pool.backend.device
        sizes, shapes = kind.sizes_of(tensors), shapes_of(tensors)
        versions = list(map(_version_of, tensors))
        records = list[Fingerprint]()
        if kind.calls == WATCHED - 1:
            records.append(Fingerprint.of({"model": self._model}, device, draws=True))
            records.append(Fingerprint.of(call.by_name(self._signature), device))
        before = _drawn_and_written(records)
        output = self._model(*call.args, **call.kwargs)
        kind.calls += 1
        paths = [path for record in records for path in record.changes(settings.ignore)]
        if paths:
            kind.why = f"each run changes {paths[0]}; ignore=[{paths[0]!r}] if it decides nothing"
        elif records and self._watch is None:
            self._look_after(records[0].without_draws())
        for name, tensor, version in zip(kind.specs, tensors, versions, strict=True):
            if _version_of(tensor) != version:
                kind.why = f"the forward writes into argument `{name}`"
                break
        if shapes_of(tensors) != shapes:
            kind.why = "the forward changes the shape of an argument"
        self._learn(kind, sizes, output)
        is_asked = settings.recomputes and True in kind.asks
        if is_asked and _drawn_and_written(records) != before:
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
            kind.learn(sizes, tuple(form), shapes_of(leaves))
        except OutputShapeError as error:
            self._give_up(kind, error.message)
        if torch.is_grad_enabled():
            kind.asks = tuple(leaf.requires_grad for leaf in leaves)

    def _relearn(self, kind: Kind) -> bool:
        """Whether the model has changed, or an output has another size than was taken for it; the
        kind's graphs are then freed. Raises OutputShapeError where sizes do not follow and
        ``strict`` asks for it.
        """
        seen = dict(kind.forward.outputs)  # by the model's own code as it is now
        if self._watch is not None and not self.holds():
            kind.forward.outputs |= seen
            return True
        try:
            if not kind.relearn():
                return False
            kind.close()
            self._served.clear()
        except OutputShapeError as error:
            if self._settings.strict:
                raise
            self._give_up(kind, error.message)
        return True

    def _give_up(self, kind: Kind, why: str, *, keeps_exact: bool = True) -> None:
        """End a kind's graphs. ``keeps_exact``: if sizes vary in it, kinds in which nothing does
        take its place.
        """
        kind.close()
        self._served.clear()
        if kind.is_exact or not keeps_exact:
            kind.why = why
            self._tell(why)
            return
        self._tell(f"{why}; so nothing is padded, and each shape has its own graph")
        for form, kinds in list(self._kinds.items()):
            if kind in kinds:
                self._exact.add(form)
                kinds.remove(kind)

    # --- captures ---------------------------------------------------------------------------------

    def _prepare(self, kind: Kind, tensors: list[Tensor]) -> str | None:
        """Have the graph of a batch captured, if there is room for it; why the model's own code
        runs, if it does.
        """
        if self._watch is None:
            self._look_after(Fingerprint.of({"model": self._model}, self.pool.backend.device))
        inputs = kind.inputs(tensors)
        kind.batch = {name: tensor.clone() for name, tensor in inputs.items()}
        try:
            sizes = kind.sizes_of(tensors)
            has_grown = any(sizes[name] > kind.dims[name].top for name in kind.grows)
            if kind.runner is None or has_grown:
                if not is_capture_allowed():
                    return "no graph may be captured inside capture_allowed(False)"
                self._open(kind, sizes)
            runner = cast(GraphRunner, kind.runner)
            wanted = runner.route(inputs).wanted
            if wanted is not None and is_capture_allowed() and self._has_room(kind, wanted):
                runner.exchange([wanted])
        except (CaptureError, ModelError) as error:
            return self._after_a_failure(kind, error, tensors)
        finally:
            kind.batch = {}
        for failure in runner.report.failed:
            if (failure.mode, failure.descriptor) == wanted:
                known = {"ModelError": ModelError, "OutputShapeError": OutputShapeError}
                failed = known.get(failure.error, CaptureError)(failure.detail)
                return self._after_a_failure(kind, failed, tensors)
        if kind.forward.differs:
            differs = OutputShapeError("the output depends on the size of the batch")
            return self._after_a_failure(kind, differs, tensors)
        route = runner.route(inputs)
        if objects_in(kind.forward.form) and not kind.has_graphs:
            kind.close()  # it would hold a cache that nobody else does
        if route.mode is CUDAGraphMode.NONE and runner.config.compilation.on_miss == "eager":
            batch = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            return f"no graph serves the batch of {batch}"
        return None

    def _open(self, kind: Kind, sizes: dict[str, int]) -> None:
        """Give a kind its runner, for sizes that hold the present batch. Raises ConfigError for
        wrong settings.
        """
        kind.close()
        self._served.clear()
        for name in kind.grows:
            if sizes[name] > kind.dims[name].top:
                kind.dims[name] = self._inference.dim(kind, name, sizes[name])
        config = self._config_of(kind, self._settings.compilation)
        plan = build_plan(config)
        held = sum(len(runner.plan.keys) for runner in self.runners)
        if len(plan.keys) + held > self._settings.max_graphs:
            lazy = self._settings.compilation.model_copy(update={"capture_policy": "lazy"})
            config = self._config_of(kind, lazy)
            plan = build_plan(config)
        fill = functools.partial(_fill, weakref.ref(kind))
        session = CaptureSession(
            plan,
            kind.forward,
            self.pool.backend,
            config,
            pool=self.pool,
            name=self._name,
            state={"model": self._model, **object_roots(kind.forward.form)},
            real_rows=RealRows(fill, tuple(self._settings.pad)),
        )
        kind.runner = session.run()

    def _config_of(self, kind: Kind, compilation: Any) -> Config:
        return validate_config(
            {
                "model": {"output_shapes": kind.shapes},
                "dims": kind.dims,
                "device": str(self.pool.backend.device),
                "inputs": kind.specs,
                "budget": BudgetConfig(max_graphs=self._settings.max_graphs),
                "compilation": compilation,
            }
        )

    def _after_a_failure(self, kind: Kind, error: CgplanError, tensors: list[Tensor]) -> str | None:
        """A graph could not be captured; why the model's own code runs, unless a second try has it
        captured. Raises the error where ``strict`` asks for it.
        """
        if self._relearn(kind):
            goes_on = kind.why is None and kind.calls >= WATCHED and kind in self.kinds
            return self._prepare(kind, tensors) if goes_on else kind.why or error.message
        if self._settings.strict:
            raise error
        is_padding = isinstance(error, ModelError | OutputShapeError)
        self._give_up(kind, f"no graph could be captured: {error.message}", keeps_exact=is_padding)
        return kind.why or error.message

    def _has_room(self, kind: Kind, wanted: Key) -> bool:
        """Whether a graph may be captured: there are fewer than ``max_graphs``, or one is used less
        than this batch is asked for, which then goes.
        """
        graphs = dict[tuple[int, Key], tuple[Kind, Key]]()
        uses = dict[tuple[int, Key], int]()
        for other in self.kinds:
            for key in () if other.runner is None else other.runner.plan.keys:
                graphs[id(other), key] = other, key
                uses[id(other), key] = cast(GraphRunner, other.runner).stats.replays[key]
        most = self._settings.max_graphs
        if len(graphs) < most:
            return True
        asked, before = self._waiting.pop((id(kind), wanted), (0, uses))
        since = {name: count - before.get(name, 0) for name, count in uses.items()}
        least = min(since, key=lambda name: since[name])
        if asked + 1 <= since[least] or not asked:
            if len(self._waiting) >= _MOST_KINDS:
                self._waiting.clear()
            self._waiting[id(kind), wanted] = asked + 1, before
            return False
        self._tell(f"calls ask for more than {most} graphs; the least used go", "max_graphs")
        least_kind, key = graphs[least]
        self._served.clear()
        cast(GraphRunner, least_kind.runner).exchange(evicted=[key])
        if least_kind is not kind and not least_kind.has_graphs:
            least_kind.close()
        return True

    def _take_device(self, tensors: Sequence[Tensor]) -> None:
        """Make the pool of all runners, on the device of the model or of the first batch."""
        held = [*self._module.parameters(), *self._module.buffers(), *tensors]
        device = next((t.device for t in held if t.device.type != "cpu"), held[0].device)
        self.pool = GraphPool(select_backend(str(self._settings.device or device)))
        self.pool.use.waits = True
        self.device = self.pool.backend.device.type

    def _tell(self, text: str, about: str | None = None) -> None:
        """Log something once; of several things ``about`` one, the first."""
        if (about or text) not in self.told:
            self.told[about or text] = text
            logger.warning("%s: %s", self._name, text)

    # --- ahead of calls ---------------------------------------------------------------------------

    def warm_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See ``Graphed.warm_up``."""
        with self._lock:
            form, tensors = call_form(args, kwargs)
            if self._is_elsewhere():
                why: str | None = self._why_elsewhere(asks=False)
            else:
                why = _why_not(form, tensors)
            if why is not None:
                self._tell(why)
                return
            if self.pool is None:
                self._take_device(tensors)
            autocast = torch.is_autocast_enabled(self.device)
            dtype = autocast and torch.get_autocast_dtype(self.device)
            form += False, torch.is_grad_enabled(), torch.get_default_dtype(), dtype
            call = Call(args, kwargs, tuple(form), tensors)
            self.holds()
            while (kind := self._warmed_up(call)).why is None:
                self._prepare(kind, tensors)
                if kind in self.kinds:  # else one in which nothing varies takes its place
                    break

    def _warmed_up(self, call: Call) -> Kind:
        """The kind of a call after its first calls, which are made here and put back."""
        backend = self.pool.backend
        roots = {"model": self._model, "arguments": call.by_name(self._signature)}
        limit = backend.memory().free or 4 << 30
        kept = PutBack(Fingerprint.of(roots, backend.device), limit)
        failed = list[Exception]()

        def first_calls() -> None:
            try:
                self._first_calls(kind, call)
            except Exception as error:
                failed.append(error)

        while True:
            kind = self._kind_of(Family(), call)
            if failed or kind.why is not None or kind.calls >= WATCHED:
                break
            look(first_calls, kept)
        if failed or kind.why is not None:
            kept.forget_captures()
        kept.restore()
        if failed:
            raise failed[0]
        return kind


def _matching(served: Sequence[_Served]) -> _Served | None:
    """What serves a call: object arguments may be in other states than at any earlier one."""
    return next((found for found in served if found.kind.has_objects()), None)


def _why_not(form: Sequence[Any], tensors: Sequence[Tensor]) -> str | None:
    """Why a call with these arguments runs by the model's own code; None where it does not."""
    if not any(tensor.ndim for tensor in tensors) or not all(tensor.numel() for tensor in tensors):
        return "no tensor argument has a dimension, or one is empty"
    odd = set[str]()
    for tensor in tensors:
        if str(tensor.dtype).removeprefix("torch.") not in get_args(DType):
            odd.add(str(tensor.dtype))
        if tensor.layout is not torch.strided or tensor.is_nested:
            odd.add(str(tensor.layout))
        if tensor.is_meta:
            odd.add(tensor.device.type)
    for part in form:
        if is_tensor_type(part) and part is not Tensor:
            odd.add(part.__name__)
    for value in objects_in(form):
        if hasattr(value, "__array__"):
            odd.add(type(value).__name__)
    return f"an argument is of {', '.join(sorted(odd))}" if odd else None


def _drawn_and_written(records: Sequence[Fingerprint]) -> list[Any]:
    """The states of torch's random generators, and the versions of the tensors in records."""
    if not records:
        return []
    index = records[0].device.index or 0
    generators = [torch.default_generator, *torch.cuda.default_generators[index:][:1]]
    tensors = list[Tensor]()
    for record in records:
        generators += record.generators
        tensors += record.tensors
    states = [generator.get_state().tolist() for generator in generators]
    return [states, list(map(_version_of, tensors))]


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
