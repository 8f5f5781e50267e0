"""The calls of one model, and the graphs that serve them."""

import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._dynamo.guards import GlobalStateGuard
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from cgplan.backends import select_backend
from cgplan.backends.context import AmbientState, current_forward_context, is_capture_allowed
from cgplan.backends.host_sync import storage_id
from cgplan.captures.model_graphs import RealRows
from cgplan.config import BudgetConfig, validate_config
from cgplan.drop_in.call_form import (
    ONE_TENSOR,
    Args,
    Call,
    Kwargs,
    arguments_of,
    call_form,
    module_of,
    object_roots,
    objects_in,
    reason_against,
    rebuild,
    tail_of,
    taken_apart,
)
from cgplan.drop_in.gradients import OwnCode, with_gradients
from cgplan.drop_in.kinds import Kind, Sizes, Stage
from cgplan.drop_in.learner import NEW_STATES, Learner
from cgplan.errors import (
    CaptureError,
    CgplanError,
    GradientError,
    ModelError,
    NumbersError,
    OutputShapeError,
)
from cgplan.graphs.fingerprint import is_ignored
from cgplan.graphs.wrapper import GraphPool
from cgplan.graphs.written import version_of
from cgplan.modes import CUDAGraphMode, Key
from cgplan.planning import build_plan
from cgplan.runner.prepared import PreparedCall
from cgplan.runner.runner import GraphRunner
from cgplan.runner.session import CaptureSession
from cgplan.units import listed

_MOST_CALLS = 4096
_MORE = "raise max_graphs, or pad inputs to a few shapes"
_SHARED = "an argument is a tensor of the model, or shares memory that the model writes"
_INSIDE = "inside the forward of another runner"
_NO_CALL: tuple[Any, ...] = (None,) * 5  # form, function mode, has_state, runner, kind
_traits = attrgetter("shape", "dtype", "layout", "device", "requires_grad")
_requires_grad = attrgetter("requires_grad")
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_tracing = torch._C._get_tracing_state
_saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_transforms = torch._C._functorch.peek_interpreter_stack


class Calls:
    """Calls wait for each other.

    Attributes:
        eager: Numbers of calls by reason.
        own_code_reason: Of a block whose calls graphs do not answer.
    """

    __graph_memory__ = True

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._model = learner.model
        self._module = module_of(self._model)
        self._name = learner.name
        self._settings = learner.settings
        self._lock = threading.RLock()
        self.replayed = 0
        self.eager = Counter[str]()
        self.own_code_reason = ContextVar("cgplan_own_code_reason", default="")
        self.pool: Any = None
        self.device = "cpu"
        # by form, shapes and dtypes: kinds that a graph serves, or that run eagerly
        self._known: dict[Any, list[Kind]] = {}
        self._last = _NO_CALL

    def recapture(self) -> None:
        with self._lock:
            self.learner.forget()
            self._known.clear()
            self.pool = None

    def forget_object(self, value: Any) -> None:
        with self._lock:
            self.learner.forget_object(value)
            self._known.clear()

    # --- a call -----------------------------------------------------------------------------------

    def run(
        self,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        # not under the lock: its holder may be the capture or the look that this call is inside of
        reason = _INSIDE
        if current_forward_context() is None:
            reason = self.own_code_reason.get() or self._reason_of_context()
        if reason:
            return self._run_model(reason, args, kwargs)
        with self._lock:
            form, tensors = call_form(args, kwargs)
            mode = _get_current_function_mode()
            last_form, last_mode, has_state, runner, kind = self._last
            # mode and has_state compare what the tail holds; a closed runner has no alike call
            is_again = form == last_form and mode is last_mode and has_state()
            prepared = runner.alike_call(tensors) if is_again else None
            if prepared is None:
                tail = tail_of(tensors, self.device)
                whole = [*form, tail]
                try:
                    key = (*whole, *map(_traits, tensors))
                except RuntimeError:
                    return self._run_model("an argument is a nested tensor", args, kwargs)
                for kind in self._known.get(key, ()):
                    if kind.objects_hold():  # they may be in a new state
                        break
                else:
                    return self._learn_or_capture(self._own_call(args, kwargs, whole, tensors))
            if kind.eager_reason:
                return self._run_model(kind.eager_reason, args, kwargs)
            if kind.runner is None or not self.learner.holds():
                whole = [*form, tail_of(tensors, self.device)]
                call = self._own_call(args, kwargs, whole, tensors)  # ahead of what frees outputs
                if kind.runner is None or self.learner.free_if_changed():
                    return self._learn_or_capture(call)
            if self._is_shared(kind, tensors):
                return self._run_model(_SHARED, args, kwargs)
            # objects are compared in the loop above; guards of (x, x) take (x, y), too
            if not (prepared or kind.objects or tail.same):
                self._last = form, mode, GlobalStateGuard().check, kind.runner, kind
            return self._replay(kind, tensors, args, kwargs, prepared)

    def _own_call(
        self,
        args: Args,
        kwargs: Kwargs,
        form: list[Any],
        tensors: list[Tensor],
    ) -> Call:
        """With copies of borrowed outputs, which captures overwrite and closed graphs free."""
        pool = self.pool
        own = []
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

    def _reason_of_context(self) -> str:
        if getattr(self._module, "training", False):  # frozen scripts have none
            reason = "the model is in training mode; call .eval() for graphs"
            self.learner.tell_once(reason)
            return reason
        if _saving_hooks(False) is not None and torch.is_grad_enabled():
            return "hooks save tensors for backward, as activation checkpointing does"
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
        return ""

    def _run_model(
        self,
        reason: str,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        output = self._model(*args, **kwargs)
        self.eager[reason] += 1
        return output

    def _is_shared(
        self,
        kind: Kind,
        tensors: Sequence[Tensor],
    ) -> bool:
        """An argument is the model's, or in memory that graphs write."""
        if not self.learner.tensor_ids.isdisjoint(map(id, tensors)):
            return True
        written = kind.written
        return bool(written) and not written.isdisjoint(map(storage_id, tensors))

    def _learn_or_capture(self, call: Call) -> Any:
        args = call.args
        kwargs = call.kwargs
        tensors = call.tensors
        self._last = _NO_CALL
        reason = reason_against(call.form, tensors)
        if call.tail.is_grad and True in map(_requires_grad, tensors):
            reason = "a tensor argument asks for a gradient"
        if reason:
            return self._run_model(reason, args, kwargs)
        if self.pool is None:
            self._take_device(tensors)
            return self.run(args, kwargs)  # whose tail has the device's autocast
        learner = self.learner
        if not learner.holds():  # now, or a new kind's first call is blamed
            learner.free_if_changed()
        family = learner.family_of(call)
        if family.skips_a_call(call.form):
            kinds = " or ".join(object_roots(call.form))
            learner.tell_once(
                f"{NEW_STATES}, {kinds}: graphs need one object whose Python values and shapes "
                "stay, such as a static cache without windows"
            )
            return self._run_model(NEW_STATES, args, kwargs)
        kind, sizes = learner.kind_of(family, call)
        if kind.stage is Stage.NEW and self._settings.compilation.capture_policy == "eager":
            kind, sizes = learner.warmed_up(call)
        if kind.may_capture:
            learner.free_if_changed()  # compares all; a change sets the kind back
        if kind.is_learning:
            output = learner.learning_call(kind, sizes, call)
            kind.first_calls += 1
            self.eager[kind.eager_reason or kind.learns] += 1
            return output
        refusal = kind.eager_reason or self._provide_graph(kind, sizes, tensors)
        if refusal:
            return self._run_refused(refusal, kind, call)
        assert kind.runner
        if objects_in(call.form):
            kind.take_objects(self.pool.backend.device)
        if kind.route(sizes).missing is None:
            self._remember(call, kind)
        with kind.runner.no_capture():  # `_make_room` alone lets keys in
            return self._replay(kind, tensors, args, kwargs)

    def _run_refused(
        self,
        refusal: str | ModelError,
        kind: Kind,
        call: Call,
    ) -> Any:
        """If the model's own code fails, too, the batch is at fault, and the kind stays."""
        if isinstance(refusal, str):
            if kind.stage is Stage.EAGER and not objects_in(call.form):
                self._remember(call, kind)
            return self._run_model(refusal, call.args, call.kwargs)
        if kind.runner:
            kind.runner.retry_failed()
        output = self._run_model(refusal.message, call.args, call.kwargs)
        self._give_up(kind, refusal)
        return output

    def _remember(
        self,
        call: Call,
        kind: Kind,
    ) -> None:
        key = (*call.form, *map(_traits, call.tensors))
        if len(self._known) >= _MOST_CALLS:
            self._known.clear()
        others = [other for other in self._known.get(key, ()) if other is not kind]
        self._known[key] = [kind, *others]

    def _replay(
        self,
        kind: Kind,
        tensors: list[Tensor],
        args: Args,
        kwargs: Kwargs,
        prepared: PreparedCall | None = None,
    ) -> Any:
        assert kind.runner
        wants_grad = True in kind.requires_grad and torch.is_grad_enabled()
        again = None
        if wants_grad and self._settings.grad:
            again = self._own_code_again(args, kwargs)
        try:
            if prepared is None:
                output = kind.runner(*tensors)
            else:
                output = kind.runner.call_again(prepared, tensors)
        except NumbersError as error:
            returns = kind.seen(tensors)  # relearn may forget it
            output = self._after_a_difference(kind, error, tensors)
        except ModelError as error:  # failed in a comparison
            raise error.__cause__ or error from None
        else:
            self.replayed += 1
            returns = kind.forward.returns
            if kind.forward.differs:
                returns = kind.seen(tensors)
                self.learner.relearn(kind)
        if wants_grad:
            output = with_gradients(output, kind.requires_grad, again, self._name)
        if returns == ONE_TENSOR:
            return output
        leaves = output if isinstance(output, tuple) else (output,)
        assert returns is not None
        return rebuild(iter(returns), iter(leaves))

    def _after_a_difference(
        self,
        kind: Kind,
        error: NumbersError,
        tensors: list[Tensor],
    ) -> Any:
        """A graph that differs ends, a padded one ends all padding."""
        assert kind.runner
        route = kind.route(kind.sizes_of(tensors))
        is_padded = route.batch.box != route.descriptor.box
        detector = self.learner.detector
        assert detector
        ignored = [
            path for path in detector.record.changes() if is_ignored(path, self._settings.ignore)
        ]
        if ignored:
            error.message += f"; ignored, and changed since the capture: {listed(ignored)}"
        has_changed = self.learner.relearn(kind)
        if is_padded and not has_changed:
            self.learner.give_up(kind, error.message)
        elif not has_changed:
            self.learner.tell_once(error.message)
            self._known.clear()
            kind.runner.exchange(evicted=[route.key])
            kind.note_difference(error.message)
        if self._settings.strict:
            raise error
        self.eager["a graph differed from the model's own code"] += 1
        return error.output

    def _own_code_again(
        self,
        args: Args,
        kwargs: Kwargs,
    ) -> OwnCode:
        detector = self.learner.detector
        assert detector
        record = detector.record
        form, given = call_form(args, kwargs)
        call = self._own_call(args, kwargs, form, given)  # nothing asks for its tail
        tensors = [*record.tensors, *call.tensors]
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

    # --- captures ---------------------------------------------------------------------------------

    def _provide_graph(
        self,
        kind: Kind,
        sizes: Sizes,
        tensors: list[Tensor],
        is_call: bool = True,
    ) -> str | ModelError | None:
        """Why the model's own code runs, if it does."""
        if (kind.runner is None or kind.outgrown(sizes)) and not is_capture_allowed():
            return "no graph may be captured inside capture_allowed(False)"
        error = self._capture(kind, sizes, tensors)
        while error:
            # again, as long as a failure teaches something and the kind is not given up
            if not self.learner.relearn(kind):
                if self._settings.strict:
                    raise error
                if isinstance(error, ModelError):
                    return error
                self._give_up(kind, error)
            if not kind.may_capture or kind not in self.learner.kinds:
                return kind.eager_reason or error.message
            error = self._capture(kind, sizes, tensors)
        runner = kind.runner
        assert runner
        kind.written = frozenset(runner.graphs.facts.storages_written)
        if self._is_shared(kind, tensors):
            return _SHARED
        route = kind.route(sizes)
        if route.mode is CUDAGraphMode.NONE and self._settings.compilation.on_miss == "eager":
            why_not = runner.router.reason_for_none(route)
            runner.stats.count_of(route, why_not).calls += is_call
            if objects_in(kind.form) and not kind.has_graphs:
                kind.close()  # it may hold a dropped cache
            reason = "no graph serves the batch"
            if route.missing is None:
                given = self._settings
                bounds = f"sizes={given.sizes!r:.80}, max_size={given.max_size}"
                reason += f": {why_not} ({runner.plan.sizes_source}; {bounds})"
                self.learner.tell_once(reason)
            elif is_capture_allowed():
                reason += f", and max_graphs={self._settings.max_graphs} leaves no room: {_MORE}"
            return reason
        return None

    def _give_up(
        self,
        kind: Kind,
        error: CgplanError,
    ) -> None:
        may_be_padding = isinstance(error, ModelError | OutputShapeError)
        text = f"{error.message}. {error.remedy}".removesuffix(". ")
        text = f"no graph could be captured for one kind of calls: {text}"
        self.learner.give_up(kind, text, tries_exact=may_be_padding)

    def _capture(
        self,
        kind: Kind,
        sizes: Sizes,
        tensors: Sequence[Tensor],
    ) -> CgplanError | None:
        """Why that failed, if it did."""
        self.learner.watch_model()
        # they may lie in static buffers, which are filled
        kind.batch = kind.inputs([tensor.clone() for tensor in tensors])
        try:
            runner = kind.runner
            if runner is None or kind.outgrown(sizes):
                runner = kind.runner = self._open_runner(kind, sizes)
                kind.stats = runner.stats
            missing = kind.route(sizes).missing
            if missing and is_capture_allowed() and self._make_room(kind, missing):
                runner.exchange(captured=[missing])
        except CgplanError as error:
            return error
        finally:
            kind.batch = {}
        for failure in runner.report.failed:
            if (failure.mode, failure.descriptor) == missing:
                known = {"ModelError": ModelError, "OutputShapeError": OutputShapeError}
                return known.get(failure.error, CaptureError)(failure.detail, remedy=failure.remedy)
        if kind.forward.differs:
            return OutputShapeError("the output depends on the size of the batch")
        return None

    def _open_runner(
        self,
        kind: Kind,
        sizes: Sizes,
    ) -> GraphRunner:
        """Of a session without keys, whose graphs ``exchange`` captures; under ``capture_policy:
        eager`` it has them.
        """
        kind.close()
        self._known.clear()
        settings = self._settings
        self.learner.grow(kind, sizes)
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
        for warning in plan.warnings:
            self.learner.tell_once(warning)
        held = sum(len(runner.plan.keys) for runner in self.learner.runners)
        if len(plan.keys) + held > settings.max_graphs:
            config = config.with_values("compilation", capture_policy="lazy")
            plan = build_plan(config)
        weak = weakref.proxy(kind)  # its runner holds the function
        return CaptureSession(
            plan,
            kind.forward,
            self.pool.backend,
            config,
            pool=self.pool,
            name=self._name,
            state={"model": self._model, **object_roots(kind.form)},
            real_rows=RealRows(lambda views: weak.fill(views), tuple(settings.pad)),
        ).run(kind.stats)

    def _make_room(
        self,
        kind: Kind,
        missing: Key,
    ) -> bool:
        """Whether there is room for one, perhaps as another went that was asked for less."""
        owners = {}
        uses = {}
        for other in self.learner.kinds:
            if other.stats is None:
                continue
            for key, count in other.stats.replays.items():
                uses[id(other), key] = count
            if other.runner:
                for key in other.runner.plan.keys:
                    owners[id(other), key] = other
        most = self._settings.max_graphs
        if len(owners) < most:
            return True
        # the least used goes once this key was asked for twice, and more often than it ran since
        asked, before = kind.waiting.pop(missing, (0, uses))
        asked += 1
        since = {graph: uses.get(graph, 0) - before.get(graph, 0) for graph in owners}
        least = min(since, key=since.__getitem__)
        if asked < 2 or asked <= since[least]:
            kind.waiting[missing] = asked, before
            return False
        self.learner.tell_once(
            f"calls ask for more than {most} graphs; the least used go: {_MORE}", "max_graphs"
        )
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
        devices = [tensor.device for tensor in held if tensor.device.type not in ("cpu", "meta")]
        backend = select_backend(str(self._settings.device or [*devices, "cpu"][0]))
        self.learner.backend = backend
        self.pool = GraphPool(backend)
        self.pool.use.waits = True
        self.device = backend.device.type

    # --- ahead of calls ---------------------------------------------------------------------------

    def warm_up(
        self,
        args: Args,
        kwargs: Kwargs,
    ) -> None:
        if current_forward_context() is not None:
            self.learner.tell_once(_INSIDE)
            return
        with self._lock:
            form, tensors = call_form(args, kwargs)
            reason = self._reason_of_context() or reason_against(form, tensors)
            if reason:
                self.learner.tell_once(f"warm_up takes the arguments of a call: {reason}", reason)
                return
            if self.pool is None:
                self._take_device(tensors)
            form.append(tail_of(tensors, self.device))
            call = Call(args, kwargs, tuple(form), tensors)
            self.learner.free_if_changed()
            is_done = False
            while not is_done:
                kind, sizes = self.learner.warmed_up(call)
                if kind.eager_reason:
                    break
                refusal = self._provide_graph(kind, sizes, tensors, is_call=False)
                if isinstance(refusal, ModelError):
                    self._give_up(kind, refusal)
                    refusal = refusal.message
                is_done = kind in self.learner.kinds  # else an exact one takes its place
                if is_done and refusal:
                    self.learner.tell_once(refusal)
