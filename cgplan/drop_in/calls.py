"""What is known of the calls of one model, and the graphs that serve them."""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from cgplan.backends import select_backend
from cgplan.backends.context import current_forward_context, is_capture_allowed
from cgplan.captures.model_graphs import RealRows
from cgplan.config import BudgetConfig, validate_config
from cgplan.drop_in.call_form import (
    Call,
    Form,
    arguments_of,
    call_form,
    constants_in,
    containers_in,
    module_of,
    object_roots,
    objects_in,
    reason_against,
    rebuild,
    shapes_of,
    tail_of,
    taken_apart,
)
from cgplan.drop_in.gradients import OwnCode, with_gradients
from cgplan.drop_in.inference import Inference, Settings
from cgplan.drop_in.kinds import Family, Kind, Stage, without_constants
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
from cgplan.graphs.change_detector import ChangeDetector
from cgplan.graphs.fingerprint import Fingerprint
from cgplan.graphs.footprint import look
from cgplan.graphs.pools import GraphPool
from cgplan.graphs.put_back import PutBack, copy_limit, version_of
from cgplan.modes import CUDAGraphMode, Key
from cgplan.planning import build_plan
from cgplan.runner.runner import GraphRunner
from cgplan.runner.session import CaptureSession

_MOST_CALLS = 4096
_MOST_KINDS = 256
_SHARED = "an argument is a tensor of the model, or shares memory that the model writes"
_INSIDE = "inside the forward of another runner"
_EXACT = "so nothing is padded, and each shape has its own graph"
_traits = attrgetter("shape", "dtype", "layout", "device")
_requires_grad = attrgetter("requires_grad")
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_tracing = torch._C._get_tracing_state
_saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_transforms = torch._C._functorch.peek_interpreter_stack
logger = logging.getLogger(__name__)

_Graph = tuple[int, Key]  # id of its kind, key


class _Effects(NamedTuple):
    drawn: list[Any]  # states of generators
    written: list[int | None]  # versions of tensors


def _fill(
    kind: weakref.ref[Kind],
    views: Mapping[str, Tensor],
) -> None:
    cast(Kind, kind()).fill(views)  # no strong reference: its runner holds this function


class Calls:
    """The calls of one model, one after the other. It owns graphs, pool and static buffers.

    Attributes:
        replayed, eager: Numbers of calls that graphs answered, and of others by reason.
        changed: Changes of the model that freed graphs, by the first path.
    """

    __graph_memory__ = True  # not model state

    def __init__(
        self,
        model: Callable[..., Any],
        signature: inspect.Signature,
        settings: Settings,
        name: str,
    ) -> None:
        self._model = model
        self._module = module_of(model)
        self._name = name
        self._has_modes = hasattr(self._module, "training")
        self._signature = signature
        self._settings = settings
        self._inference = Inference(model, signature, settings)
        self._lock = threading.RLock()
        self.replayed = 0
        self.eager = Counter[str]()
        self.changed = Counter[str]()
        self.notices: dict[str, str] = {}
        self._reset()

    def _reset(self) -> None:
        self.pool: Any = None
        self.device = "cpu"
        # the least recently used go first
        self._kinds = OrderedDict[Form, list[Kind]]()
        self._families: dict[Form, Family] = {}
        # by form, shapes and dtypes: kinds that a graph serves, or that run eagerly
        self._known: dict[Any, list[Kind]] = {}
        self._exact = set[Form]()
        self._detector: ChangeDetector | None = None
        self._tensors: list[Tensor] = []
        self._tensor_ids = frozenset[int]()
        # keys without room: times asked for, uses of graphs before
        self._waiting: dict[_Graph, tuple[int, dict[_Graph, int]]] = {}

    def recapture(self) -> None:
        with self._lock:
            for kind in self.kinds:
                kind.close()
            if self._detector is not None:
                self._detector.close()
            self._reset()

    # --- a call -----------------------------------------------------------------------------------

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        # not under the lock: its holder may wait for that capture
        if current_forward_context() is not None:
            return self._run_model(_INSIDE, args, kwargs)
        with self._lock:
            form, tensors = call_form(args, kwargs)
            tail = tail_of(tensors, self.device)
            wants_grad = tail.is_grad and (
                True in map(_requires_grad, tensors) or _saving_hooks(False) is not None
            )
            reason = self._reason_of_context(wants_grad)
            if reason is not None:
                return self._run_model(reason, args, kwargs)
            form.append(tail)
            try:
                key = (*form, *map(_traits, tensors))
            except RuntimeError:
                return self._run_model("an argument is a nested tensor", args, kwargs)
            for kind in self._known.get(key, ()):
                # objects may be in a new state
                if kind.objects is None or kind.objects_hold():
                    break
            else:
                return self._run_unknown(key, self._own_call(args, kwargs, form, tensors))
            if kind.eager_reason is not None:
                return self._run_model(kind.eager_reason, args, kwargs)
            is_same = self._detector is not None and self._detector.holds()
            if not is_same:
                call = self._own_call(args, kwargs, form, tensors)
                if self._free_if_changed():
                    return self._run_unknown(key, call)
            if self._is_shared(kind, tensors):
                return self._run_model(_SHARED, args, kwargs)
            return self._replay(kind, tensors, args, kwargs)

    def _own_call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        form: list[Any],
        tensors: list[Tensor],
    ) -> Call:
        """With copies of borrowed outputs, which captures overwrite and closed graphs free."""
        pool = self.pool
        own = list[Tensor]()
        is_borrowed = False
        borrows = pool is not None and self._settings.compilation.outputs == "borrow"
        for tensor in tensors:
            if borrows and pool.backend.in_pool(tensor, pool.handle):
                is_borrowed = True
                tensor = tensor.clone()
            own.append(tensor)
        if is_borrowed:  # else lists and dicts are the caller's
            args, kwargs = arguments_of(tuple(form), len(args), tuple(kwargs), own)
        return Call(args, kwargs, tuple(form), own)

    def _reason_of_context(self, wants_grad: bool) -> str | None:
        if self._has_modes and self._module.training:
            reason = "the model is in training mode; call .eval() for graphs"
            self.tell_once(reason)
            return reason
        if wants_grad:
            if _saving_hooks(False) is not None:
                return "hooks save tensors for backward, as activation checkpointing does"
            return "a tensor argument asks for a gradient"
        if _dispatch_modes() > 0 or _transforms() is not None or _tracing() is not None:
            return "under a dispatch mode, a transform of torch.func, or torch.jit.trace"
        if _function_modes() > 0:
            modes = _get_current_function_mode_stack()
            if not all(type(mode) is DeviceContext for mode in modes):
                return "under a mode of torch functions"
            if any(mode.device.type == "meta" for mode in modes):
                return "the default device is meta"
        if forward_ad._current_level >= 0:
            return "inside forward-mode differentiation"
        if self.device == "cuda" and torch.cuda.is_current_stream_capturing():
            return "inside a capture of the caller's"
        return None

    def _run_model(
        self,
        reason: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        output = self._model(*args, **kwargs)
        self.eager[reason] += 1
        return output

    def suspect(self) -> None:
        if self._detector is not None:
            self._detector.suspect()

    def _free_if_changed(self) -> bool:
        """Free the graphs of a model that has changed; True also before it is watched."""
        if self._detector is None:
            return True
        found = self._detector.changes(self._settings.ignore)
        changes = list(found.values())
        if not changes:
            return False
        first = changes[0]
        self.changed[first.path] += 1
        text = f"captured again: {first}"
        if len(changes) > 1:
            text += f", and {len(changes) - 1} more changes"
        self.tell_once(text, first.path)
        self._detector.close()
        self._detector = None
        self._tensors = []
        self._tensor_ids = frozenset()
        self._known.clear()
        is_moved = all(change.is_move for change in changes)
        for kind in self.kinds:
            kind.start_again(is_moved=is_moved)
        return True

    def _fingerprint(
        self,
        roots: Mapping[str, Any],
        *,
        draws: bool = False,
    ) -> Fingerprint:
        return Fingerprint.of(roots, self.pool.backend.device, draws=draws)

    def _watch_model(self, record: Fingerprint) -> None:
        self._detector = ChangeDetector(record)
        self._tensors = record.tensors
        self._tensor_ids = frozenset(map(id, record.tensors))

    def _is_shared(
        self,
        kind: Kind,
        tensors: Sequence[Tensor],
    ) -> bool:
        """An argument is the model's, or in memory that graphs write."""
        if not self._tensor_ids.isdisjoint(map(id, tensors)):
            return True
        written = kind.written
        return bool(written) and not written.isdisjoint(map(_storage_of, tensors))

    def _run_unknown(
        self,
        key: Any,
        call: Call,
    ) -> Any:
        args = call.args
        kwargs = call.kwargs
        tensors = call.tensors
        reason = reason_against(call.form, tensors)
        if reason is not None:
            return self._run_model(reason, args, kwargs)
        if self.pool is None:
            self._take_device(tensors)
            return self.run(args, kwargs)  # for autocast of this device
        if self._detector is not None and not self._detector.holds():
            self._free_if_changed()
        family_form = without_constants(call.form)
        family = self._families.setdefault(family_form, Family())
        if family.skips_a_call():
            reason = "an object argument is in another state at each call"
            kinds = {type(value).__name__ for value in objects_in(call.form)}
            self.tell_once(
                f"{reason}, {' or '.join(sorted(kinds))}: graphs need one object whose Python "
                "values and shapes stay, such as a static cache without windows"
            )
            return self._run_model(reason, args, kwargs)
        kind, sizes = self._kind_of(family, call)
        is_eager = self._settings.compilation.capture_policy == "eager"
        if kind.eager_reason is None and kind.stage is Stage.NEW and is_eager:
            kind, sizes = self._warmed_up(call)
        if kind.may_capture:
            self._free_if_changed()  # the watch looks at less
        if kind.eager_reason is None and not kind.may_capture:
            output = self._learning_call(kind, sizes, call)
            self.eager["the first calls of a kind"] += 1
            return output
        reason = kind.eager_reason or self._provide_graph(kind, sizes, tensors)
        has_objects = bool(objects_in(call.form))
        if reason is not None:
            if kind.eager_reason is not None and not has_objects:
                self._remember(key, kind)
            return self._run_model(reason, args, kwargs)
        assert kind.runner is not None
        if has_objects:
            kind.take_objects(self.pool.backend.device)
        if kind.route(sizes).missing is None:
            self._remember(key, kind)
        with kind.runner.no_capture():
            return self._replay(kind, tensors, args, kwargs)

    def _remember(
        self,
        key: Any,
        kind: Kind,
    ) -> None:
        if len(self._known) >= _MOST_CALLS:
            self._known.clear()
        others = [other for other in self._known.get(key, ()) if other is not kind]
        self._known[key] = [kind, *others]

    def _replay(
        self,
        kind: Kind,
        tensors: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        assert kind.runner is not None
        inputs: dict[str, Any] = dict(zip(kind.specs, tensors, strict=True))
        wants_grad = kind.requires_grad and torch.is_grad_enabled()
        again: OwnCode | None = None
        if wants_grad and self._settings.recomputes:
            again = self._own_code_again(args, kwargs)
        try:
            output = kind.runner(**inputs)
        except NumbersError as error:
            output = self._after_a_difference(kind, error, tensors)
        except ModelError as error:  # failed in a comparison
            raise error.__cause__ or error from None
        else:
            self.replayed += 1
            if kind.forward.differs:
                self._relearn(kind)
                kind.return_as_seen(tensors)
        if wants_grad:
            output = with_gradients(output, kind.requires_grad, again, self._name)
        if kind.forward.returns_tensor:
            return output
        form = iter(kind.returns or ())
        leaves = output if isinstance(output, tuple) else (output,)
        return rebuild(form, iter(leaves))

    def _after_a_difference(
        self,
        kind: Kind,
        error: NumbersError,
        tensors: list[Tensor],
    ) -> Any:
        """A graph that differs ends; the second one ends its kind, a padded one all padding."""
        if self._settings.strict:
            raise error
        assert kind.runner is not None
        sizes = kind.sizes_of(tensors)
        route = kind.route(sizes)
        key = route.descriptor
        is_padded = key.box != tuple(sizes.values())
        has_changed = self._relearn(kind)
        if is_padded and not has_changed:
            self._give_up(kind, error.message)
        elif not has_changed:
            kind.failures += 1
            self.tell_once(error.message)
            self._known.clear()
            kind.runner.exchange(evicted=[(route.mode, key)])
            if kind.failures > 1:
                self._give_up(kind, error.message, keeps_exact=False)
        self.eager["a graph differed from the model's own code"] += 1
        kind.return_as_seen(tensors)
        return error.output

    def _own_code_again(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> OwnCode:
        """Raises GradientError where the model has changed."""
        assert self._detector is not None
        record = self._detector.record
        form, given = call_form(args, kwargs)
        call = self._own_call(args, kwargs, form, given)
        tensors = [*self._tensors, *call.tensors]
        versions = list(map(version_of, tensors))
        ambient = AmbientState.now(self.device)

        def run() -> list[Tensor]:
            is_written = list(map(version_of, tensors)) != versions
            if is_written or record.changes(self._settings.ignore):
                raise GradientError(
                    f"{self._name}, or a tensor that it reads, has changed between its call and "
                    "backward",
                    remedy="Call backward before the optimizer's step and .train(); leave "
                    "arguments as they were.",
                )
            with ambient._replace(grad=True, inference=False).entered(self.device):
                return taken_apart(self._model(*call.args, **call.kwargs))[1]

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

    def _kind_of(
        self,
        family: Family,
        call: Call,
    ) -> tuple[Kind, dict[str, int]]:
        """And the sizes of the call, by name."""
        known = self._kinds.setdefault(call.form, [])
        self._kinds.move_to_end(call.form)
        roots = object_roots(call.form)
        state: Any = ()
        if roots:
            state = self._fingerprint(roots).as_key()
        family.calls += 1
        for kind in known:
            if kind.state != state:
                continue
            with suppress(InputError):
                sizes = kind.sizes_of(call.tensors)
                family.misses = 0
                return kind, sizes
        kind = self._add_kind(call, state)
        constants = constants_in(call.by_name(self._signature), "")
        count = family.calls
        for path in family.add(constants, holds_objects=bool(state)):
            self.tell_once(
                f"argument `{path}` had {count} values in {count} calls; pass a tensor, or graphs "
                "serve values that come back",
                path,
            )
        self._forget_old_kinds()
        return kind, kind.sizes_of(call.tensors)

    def _add_kind(
        self,
        call: Call,
        state: Any,
    ) -> Kind:
        device = self.pool.backend.device
        is_exact = call.form in self._exact
        try:
            kind = self._inference.kind(call, device, is_exact=is_exact)
        except InputError as error:
            if self._settings.strict or is_exact:
                raise
            self.tell_once(f"{error.message}; {_EXACT}")
            self._exact.add(call.form)
            kind = self._inference.kind(call, device, is_exact=True)
        kind.state = state
        tail = call.tail
        kind.notes.append("grad mode" if tail.is_grad else "no_grad")
        if tail.autocast:
            kind.notes.append(f"autocast {tail.autocast}")
        kind.autocast = tail.autocast
        self._kinds.setdefault(call.form, []).append(kind)
        return kind

    def _forget_old_kinds(self) -> None:
        if len(self._families) > _MOST_KINDS:
            self._families.pop(next(iter(self._families)))
        count = sum(len(kinds) or 1 for kinds in self._kinds.values())
        if count <= _MOST_KINDS:
            return
        older = [kind for kind in self.kinds[:-1] if not kind.has_graphs]
        older = older[: count - _MOST_KINDS]
        for kind in older:
            kind.close()
        for form, kinds in list(self._kinds.items()):
            kinds[:] = [kind for kind in kinds if kind not in older]
            if not kinds:
                del self._kinds[form]
                self._exact.discard(form)

    def _learning_call(
        self,
        kind: Kind,
        sizes: dict[str, int],
        call: Call,
    ) -> Any:
        settings = self._settings
        tensors = call.tensors
        shapes = shapes_of(tensors)
        versions = list(map(version_of, tensors))
        records = list[Fingerprint]()
        if kind.stage in (Stage.SEEN, Stage.CHANGED):
            arguments = call.by_name(self._signature)
            records = [
                self._fingerprint({"model": self._model}, draws=True),
                self._fingerprint(arguments),
            ]
        before = _effects_until_now(records)
        output = self._model(*call.args, **call.kwargs)
        changes = [list(record.changes(settings.ignore).values()) for record in records]
        kind.note_run(sizes, *changes)
        if kind.may_capture and self._detector is None:
            self._watch_model(records[0].without_draws())
        if _holds_container(records, output):
            kind.eager_reason = (
                "the model returns a list, a dict or an object that it keeps, or that it was given"
            )
        for name, tensor, version in zip(kind.specs, tensors, versions, strict=True):
            if version_of(tensor) != version:
                kind.eager_reason = f"the forward writes into argument `{name}`"
                break
        if shapes_of(tensors) != shapes:
            kind.eager_reason = "the forward changes the shape of an argument"
        self._learn(kind, sizes, output)
        after = _effects_until_now(records)
        is_steady = kind.may_capture  # else it changed the model
        recomputes = settings.recomputes and True in kind.requires_grad
        if is_steady and recomputes and before != after:
            kind.eager_reason = (
                "backward could not run it again: each run draws random numbers, or writes tensors"
            )
        writes_state = is_steady and before.written != after.written
        if kind.eager_reason is not None:
            self.tell_once(kind.eager_reason)
        elif writes_state and not kind.is_exact and not settings.pad:
            self._give_up(kind, "the forward writes state, which padding might reach")
            exact = self._add_kind(call, kind.state)
            exact.stage = kind.stage
            self._learn(exact, exact.sizes_of(tensors), output)
        return output

    def _learn(
        self,
        kind: Kind,
        sizes: dict[str, int],
        output: Any,
    ) -> None:
        form, leaves = taken_apart(output)
        try:
            kind.learn(sizes, form, shapes_of(leaves))
        except OutputShapeError as error:
            self._give_up(kind, error.message)
        if torch.is_grad_enabled():
            kind.requires_grad = tuple(map(_requires_grad, leaves))

    def _relearn(self, kind: Kind) -> bool:
        seen = dict(kind.forward.outputs)
        if self._detector is not None and self._free_if_changed():
            kind.forward.outputs |= seen
            return True
        try:
            if not kind.relearn():
                return False
            kind.close()
            self._known.clear()
        except OutputShapeError as error:
            if self._settings.strict:
                raise
            self._give_up(kind, error.message)
        return True

    def _give_up(
        self,
        kind: Kind,
        reason: str,
        *,
        keeps_exact: bool = True,
    ) -> None:
        kind.close()
        self._known.clear()
        if kind.is_exact or not keeps_exact:
            kind.eager_reason = reason
            self.tell_once(reason)
            return
        self.tell_once(f"{reason}; {_EXACT}")
        for form, kinds in list(self._kinds.items()):
            if kind in kinds:
                self._exact.add(form)
                kinds.remove(kind)

    # --- captures ---------------------------------------------------------------------------------

    def _provide_graph(
        self,
        kind: Kind,
        sizes: dict[str, int],
        tensors: list[Tensor],
    ) -> str | None:
        """Why the model's own code runs, if it does."""
        is_new = kind.runner is None or bool(kind.outgrown(sizes))
        if is_new and not is_capture_allowed():
            return "no graph may be captured inside capture_allowed(False)"
        error = self._capture(kind, sizes, tensors)
        while error is not None:
            if not self._relearn(kind):
                if self._settings.strict:
                    raise error
                is_padding = isinstance(error, ModelError | OutputShapeError)
                text = f"no graph could be captured: {error.message}"
                self._give_up(kind, text, keeps_exact=is_padding)
            if not kind.may_capture or kind not in self.kinds:
                return kind.eager_reason or error.message
            error = self._capture(kind, sizes, tensors)
        assert kind.runner is not None
        kind.note_written()
        if self._is_shared(kind, tensors):
            return _SHARED
        route = kind.route(sizes)
        if route.mode is CUDAGraphMode.NONE and self._settings.compilation.on_miss == "eager":
            if objects_in(kind.forward.form) and not kind.has_graphs:
                kind.close()  # it may hold a dropped cache
            batch = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            reason = f"no graph serves {batch}"
            if route.missing is None:
                self.tell_once(f"{reason}: `sizes` or `max_size` end below it", "sizes")
            elif is_capture_allowed():
                reason += f", and max_graphs={self._settings.max_graphs} leaves no room"
            return reason
        return None

    def _capture(
        self,
        kind: Kind,
        sizes: dict[str, int],
        tensors: Sequence[Tensor],
    ) -> CgplanError | None:
        """Capture the graph of a batch, where it may and there is room; why that failed."""
        if self._detector is None:
            self._watch_model(self._fingerprint({"model": self._model}))
        kind.batch = kind.inputs([tensor.clone() for tensor in tensors])
        try:
            runner = kind.runner
            if runner is None or kind.outgrown(sizes):
                runner = kind.runner = self._new_runner(kind, sizes)
            missing = kind.route(sizes).missing
            if missing is not None and is_capture_allowed() and self._make_room(kind, missing):
                runner.exchange([missing])
        except CgplanError as error:
            return error
        finally:
            kind.batch = {}
        for failure in runner.report.failed:
            if (failure.mode, failure.descriptor) == missing:
                known = {"ModelError": ModelError, "OutputShapeError": OutputShapeError}
                return known.get(failure.error, CaptureError)(failure.detail)
        if kind.forward.differs:
            return OutputShapeError("the output depends on the size of the batch")
        return None

    def _new_runner(
        self,
        kind: Kind,
        sizes: dict[str, int],
    ) -> GraphRunner:
        """Without graphs unless ``capture_policy`` is ``eager``: ``exchange`` captures them."""
        kind.close()
        self._known.clear()
        settings = self._settings
        for name in kind.outgrown(sizes):
            kind.dims[name] = self._inference.dim(kind, name, sizes[name])
        config = validate_config(
            {
                "model": {"output_shapes": kind.shapes},
                "dims": kind.dims,
                "device": str(self.pool.backend.device),
                "inputs": kind.specs,
                "budget": BudgetConfig(max_graphs=settings.max_graphs),
                "compilation": settings.compilation,
            }
        )
        plan = build_plan(config)
        held = sum(len(runner.plan.keys) for runner in self.runners)
        if len(plan.keys) + held > settings.max_graphs:
            lazy = settings.compilation.model_copy(update={"capture_policy": "lazy"})
            config = config.model_copy(update={"compilation": lazy})
            plan = build_plan(config)
        fill = partial(_fill, weakref.ref(kind))
        return CaptureSession(
            plan,
            kind.forward,
            self.pool.backend,
            config,
            pool=self.pool,
            name=self._name,
            state={"model": self._model, **object_roots(kind.forward.form)},
            real_rows=RealRows(fill, tuple(settings.pad)),
        ).run()

    def _make_room(
        self,
        kind: Kind,
        missing: Key,
    ) -> bool:
        """Whether there are fewer than ``max_graphs``, or one less asked for can go."""
        owners = dict[_Graph, Kind]()
        uses = dict[_Graph, int]()
        for other in self.kinds:
            if other.runner is None:
                continue
            for key in other.runner.plan.keys:
                owners[id(other), key] = other
                uses[id(other), key] = other.runner.stats.replays[key]
        most = self._settings.max_graphs
        if len(owners) < most:
            return True
        asked, before = self._waiting.pop((id(kind), missing), (0, uses))
        since = {graph: count - before.get(graph, 0) for graph, count in uses.items()}
        least = min(since, key=since.__getitem__)
        if asked + 1 <= since[least] or not asked:
            if len(self._waiting) >= _MOST_KINDS:
                self._waiting.clear()
            self._waiting[id(kind), missing] = asked + 1, before
            return False
        self.tell_once(f"calls ask for more than {most} graphs; the least used go", "max_graphs")
        owner = owners[least]
        self._known.clear()
        cast(GraphRunner, owner.runner).exchange(evicted=[least[1]])
        if owner is not kind and not owner.has_graphs:
            owner.close()
        return True

    def _take_device(
        self,
        tensors: Sequence[Tensor],
    ) -> None:
        held = [
            *self._module.parameters(),
            *self._module.buffers(),
            *tensors,
        ]
        devices = [tensor.device for tensor in held if tensor.device.type != "cpu"]
        devices.append(held[0].device)
        backend = select_backend(str(self._settings.device or devices[0]))
        self.pool = GraphPool(backend)
        self.pool.use.waits = True
        self.device = self.pool.backend.device.type

    def tell_once(
        self,
        text: str,
        subject: str | None = None,
    ) -> None:
        subject = subject or text
        if subject not in self.notices:
            self.notices[subject] = text
            logger.warning("%s: %s", self._name, text)

    # --- ahead of calls ---------------------------------------------------------------------------

    def warm_up(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if current_forward_context() is not None:
            self.tell_once(_INSIDE)
            return
        with self._lock:
            form, tensors = call_form(args, kwargs)
            reason = self._reason_of_context(wants_grad=False)
            reason = reason or reason_against(form, tensors)
            if reason is not None:
                self.tell_once(reason)
                return
            if self.pool is None:
                self._take_device(tensors)
            form.append(tail_of(tensors, self.device))
            call = Call(args, kwargs, tuple(form), tensors)
            self._free_if_changed()
            is_done = False
            while not is_done:
                kind, sizes = self._warmed_up(call)
                if kind.eager_reason is not None:
                    break
                reason = self._provide_graph(kind, sizes, tensors)
                is_done = kind in self.kinds  # else an exact one takes its place
                if is_done and reason is not None:
                    self.tell_once(reason)

    def _warmed_up(self, call: Call) -> tuple[Kind, dict[str, int]]:
        arguments = call.by_name(self._signature)
        before = self._fingerprint({"model": self._model, "arguments": arguments})
        kept = PutBack(before, copy_limit(self._settings.compilation, self.pool.backend))
        failed = list[Exception]()

        def first_calls() -> None:
            try:
                self._learning_call(kind, sizes, call)
            except Exception as error:
                failed.append(error)

        stays = False
        try:
            while True:
                kind, sizes = self._kind_of(Family(), call)
                if failed or kind.eager_reason is not None or kind.may_capture:
                    break
                look(first_calls, kept)
            stays = not failed and kind.eager_reason is None
        finally:
            if not stays:
                kept.forget_captures()
            kept.restore()
        if failed:
            raise failed[0]
        return kind, sizes


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _holds_container(
    records: Sequence[Fingerprint],
    output: Any,
) -> bool:
    """The model, or an argument, holds a container of the output."""
    held = set[int]()
    for record in records:
        held |= record.container_ids()
    return any(id(container) in held for container in containers_in(output))


def _effects_until_now(records: Sequence[Fingerprint]) -> _Effects:
    if not records:
        return _Effects([], [])
    index = records[0].device.index or 0
    of_device = torch.cuda.default_generators[index : index + 1]
    generators = [torch.default_generator, *of_device]
    tensors = list[Tensor]()
    for record in records:
        generators += record.generators
        tensors += record.tensors
    states = [generator.get_state().tolist() for generator in generators]
    return _Effects(states, list(map(version_of, tensors)))
