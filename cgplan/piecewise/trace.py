"""A model that Dynamo traces, and that is split at operators."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Collection, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.backend import autocast_cache
from cgplan.backends.blame import users_lines
from cgplan.backends.context import ForwardContext, current_forward_context, get_forward_context
from cgplan.backends.host_sync import Args, Function, Kwargs
from cgplan.buffers.batch import BatchReader
from cgplan.config import Config, validate_config
from cgplan.errors import (
    CaptureError,
    CgplanError,
    ConfigError,
    HostSyncError,
    ModelError,
    first_line,
)
from cgplan.graphs.wrapper import CUDAGraphEntry, CUDAGraphOptions, CUDAGraphWrapper, Recorded
from cgplan.modes import CUDAGraphMode
from cgplan.piecewise.backend import PiecewiseBackend
from cgplan.piecewise.breakable import BreakableCUDAGraphCapture, BreakableCUDAGraphWrapper

_OTHERWISE = (
    "or split without a trace: compilation.splitting_modules breaks the capture at modules, "
    "piecewise: modules at functions under eager_break_during_capture."
)
_TRIES = 2  # the first run may make something


class PiecewiseModel(BreakableCUDAGraphWrapper):
    """A model that is split at operators in mode PIECEWISE, and just the model in others.

    One row, and each of ``static_sizes`` (in tokens), has a trace of its own. A replay enters
    neither Dynamo nor the model's Python code.
    """

    def __init__(
        self,
        model: Function,
        config: Config,
        backend: GraphBackend,
        static_sizes: Collection[int] = (),
    ) -> None:
        if isinstance(model, PiecewiseModel):
            raise ModelError(
                "the model was compiled by compile_piecewise before",
                remedy="Pass the model itself, or, to capture it as it is, set "
                "compilation.piecewise: wrappers.",
            )
        self.splitter = PiecewiseBackend(config.compilation, backend)
        options = CUDAGraphOptions(address_check=config.compilation.address_policy)
        super().__init__(model, backend=backend, options=options)
        self._config = config
        self._specs = config.tensors_at((1,) * (len(config.dim_names) - 1))
        self._reader = BatchReader(config.inputs, config.dim_names, backend.device)
        self._keys: set[object] = set()
        self._static = static_sizes
        splitter = weakref.ref(self.splitter)  # Dynamo keeps it

        def note_miss(failure: Any) -> None:
            found = splitter()
            if found is not None:
                guard, _, _ = str(failure.reason).partition("\nUser stack trace")
                guard = " ".join(guard.split())
                found.missed = re.sub(r"^\d+/\d+: | \(HINT: .*", "", guard)

        optimize = torch._dynamo.optimize(self.splitter, nopython=True, guard_fail_fn=note_miss)
        self._traced: dict[bool, Function] = {}
        # else Dynamo uses the dynamic trace for static sizes
        for is_static in (False, True):
            own = with_own_code(model)
            self._traced[is_static] = optimize(own)
            # at exit other threads may still run a trace
            forget = weakref.finalize(self, _forget_trace, own.__code__, self.splitter)
            forget.atexit = False

    def __call__(self, **inputs: Tensor) -> Any:
        """Raises, outside of a runner, InputError for inputs that are not as declared or do not fit
        the descriptor; CaptureError where the model cannot be captured.
        """
        context = current_forward_context()
        if context is None or context.scope is None:
            batch = self._reader.read(inputs)
            if context is not None and context.runtime_mode is CUDAGraphMode.PIECEWISE:
                self._reader.refuse_other(batch, context.descriptor)
        return super().__call__(**inputs)

    def traced(self, **inputs: Tensor) -> Any:
        """Run the trace that holds, or make one."""
        for mode in _get_current_dispatch_mode_stack():
            # under another mode Dynamo runs no trace
            if not mode.is_infra_mode():
                return self.runnable(**inputs)
        # else one tensor for two inputs stays one
        own = {name: tensor.view_as(tensor) for name, tensor in inputs.items()}
        context = current_forward_context()
        if context is None:
            is_static = self._config.compilation.compile_shapes == "static"
        else:
            self._keys.add(context.descriptor)
            is_static = context.descriptor.num_tokens in self._static
        if not is_static:
            for name in self._config.inputs:
                dim = self._specs[name].row_dim
                if dim is None:
                    continue
                torch._dynamo.maybe_mark_dynamic(own[name], dim)
        config = torch._dynamo.config
        # else other sizes and numbers become variables, equal sizes one
        shapes = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
        tracing = config.patch(
            automatic_dynamic_shapes=False,
            recompile_limit=max(config.recompile_limit, len(self._keys)),
            accumulated_recompile_limit=max(config.accumulated_recompile_limit, len(self._keys)),
        )
        with shapes, tracing, autocast_cache(on=False):
            return self._run_trace(is_static, own, inputs)

    def _run_trace(self, is_static: bool, own: Kwargs, inputs: Kwargs) -> Any:
        dynamo = torch._dynamo.exc
        try:
            return self._traced[is_static](**own)
        except dynamo.FailOnRecompileLimitHit as error:
            raise CaptureError(
                f"the model was traced {len(self.splitter.traces)} times, and no trace holds for "
                "the next key: this condition of a trace is no longer true: "
                f"{self.splitter.missed}",
                remedy=f"Keep that value the same in all calls, pass it as an input, {_OTHERWISE}",
            ) from error
        except (dynamo.UserError, dynamo.Unsupported, dynamo.InternalTorchDynamoError) as error:
            if "failed to bind arguments" in str(error):
                return self.runnable(**inputs)
            raise _untraceable(error) from error
        except dynamo.TorchRuntimeError as error:
            try:
                self.runnable(**inputs)  # Dynamo hides an operator's error
            except Exception as own_error:
                raise own_error from None
            raised = re.search(r": got (\w+\(.*\))$", str(error), re.MULTILINE)
            said = raised[1] if raised else first_line(error)
            raise CaptureError(
                f"the model runs, but cannot be traced, at {_user_line(error)}: {said}",
                remedy="See that the operator there has a fake kernel "
                "(torch.library.register_fake) that agrees with it, or use "
                "compilation.splitting_modules.",
            ) from error
        except dynamo.BackendCompilerFailed as error:
            inner = error.inner_exception
            raise inner if isinstance(inner, CgplanError) else error from None

    def _warm_up(self, args: Args, kwargs: Kwargs) -> None:
        saved = [(tensor, tensor.clone()) for tensor in kwargs.values()]
        self.traced(*args, **kwargs)
        for tensor, before in saved:
            tensor.copy_(before)

    def _record(self, pool: Any, args: Args, kwargs: Kwargs) -> Recorded:
        """Dynamo and its guards stay outside of the capture."""
        splitter = self.splitter
        is_first_run = get_forward_context().descriptor not in self._keys
        for _ in range(_TRIES):
            known = len(splitter.codes)
            capture = splitter.capture = BreakableCUDAGraphCapture(self.backend, pool)
            try:
                output = self.traced(*args, **kwargs)
                if splitter.capture is not None:
                    raise CaptureError(
                        "the model ran without its trace, so nothing was captured",
                        remedy="Check that the forward computes something from its inputs, and "
                        "that torch.compile is on.",
                    )
            finally:
                splitter.capture = None
            if is_first_run or len(splitter.codes) == known:
                return capture.recorded(output, {})
            del output
            capture.reset()
        raise CaptureError(
            "each run of the model computes something else, and Dynamo traces it again: this "
            f"condition of the last trace is no longer true: {splitter.missed}",
            remedy="Keep a number that changes in a tensor and write it in place "
            "(self.step.add_(1)), or pass it as an input.",
        )

    def _roots(
        self,
        entry: CUDAGraphEntry,
        context: ForwardContext,
        args: Args,
        kwargs: Kwargs,
    ) -> dict[str, Any]:
        roots = super()._roots(entry, context, args, kwargs)
        model = getattr(self.runnable, "__self__", self.runnable)
        if isinstance(model, torch.nn.Module):
            roots["model"] = dict(model.named_parameters()) | dict(model.named_buffers())
        return roots

    def __deepcopy__(self, memo: dict[int, Any]) -> PiecewiseModel:
        runnable = copy.deepcopy(self.runnable, memo)
        made = PiecewiseModel(runnable, self._config, self.backend, self._static)
        memo[id(self)] = made
        return made


def compile_piecewise(
    model: Function, config: Config | Mapping[str, Any], *, backend: GraphBackend | None = None
) -> PiecewiseModel:
    """A model that is split at ``compilation.splitting_ops`` when it is first captured.

    Args:
        model: Dynamo can trace it as one graph.
        config: Sizes and policies of sessions mean nothing here.

    Raises:
        ConfigError: a wrong configuration or route; at the first capture, a missing splitting op.
        ModelError: the model comes from compile_piecewise.
        CaptureError: at the first capture, the model cannot be traced.
    """
    if isinstance(config, Mapping):
        config = validate_config(dict(config))
    compilation = config.compilation
    is_own = "cudagraph_mode" in compilation.model_fields_set  # the default is a session's
    wrong = ""
    if is_own and not compilation.cudagraph_mode.has_mode(CUDAGraphMode.PIECEWISE):
        wrong = "cudagraph_mode"
    elif compilation.splitting_modules:
        wrong = "splitting_modules"
    elif compilation.piecewise not in ("auto", "ops"):
        wrong = "piecewise"
    if wrong:
        raise ConfigError(
            "compile_piecewise splits at operators and captures PIECEWISE graphs, but "
            f"compilation.{wrong} is {getattr(compilation, wrong)}",
            remedy="Leave it out, or use cgplan.capture, which knows all modes and routes.",
        )
    return PiecewiseModel(model, config, backend or select_backend(config.device))


def _forget_trace(code: CodeType, splitter: PiecewiseBackend) -> None:
    """Garbage collections leave what Dynamo keeps."""
    torch._C._dynamo.eval_frame.reset_code(code)
    backends = torch._dynamo.eval_frame.cached_backends
    for key, found in backends.copy().items():
        if found is splitter:
            backends.pop(key, None)
    splitter.traces.clear()
    splitter.compiled.clear()


def with_own_code(model: Function) -> Function:
    """Dynamo limits the traces of one code object."""

    def forward(**inputs: Tensor) -> Any:
        return model(**inputs)

    code = forward.__code__.replace()
    return FunctionType(code, globals(), "forward", closure=forward.__closure__)


def _untraceable(error: Exception) -> CgplanError:
    text = str(error)
    if "data-dependent" in text.lower():
        return HostSyncError(
            f"the model's Python code depends on a value of a tensor, at {_user_line(error)}",
            remedy=f"Keep it on the device (torch.where, masked_fill), {_OTHERWISE}",
        )
    if CUDAGraphWrapper.__call__.__code__.co_filename in text:
        return CaptureError(
            "the model holds graph wrappers, and PIECEWISE traces it as a whole",
            remedy="Set compilation.piecewise: wrappers, or remove the wrappers.",
        )
    if get_forward_context.__code__.co_filename in text:
        return CaptureError(
            f"the model reads the forward context in code that is traced, at {_user_line(error)}",
            remedy="Read it inside a custom operator, as cgplan::attention does, pass what you "
            "need as an input, or use compilation.splitting_modules.",
        )
    return CaptureError(
        f"the model cannot be traced as one graph, at {_user_line(error)}: "
        f"{first_line(error.__cause__ or error)}",
        remedy=f"Change that line, {_OTHERWISE}",
    )


def _user_line(error: BaseException) -> str:
    stack = getattr(error, "real_stack", None) or []
    lines = ((frame.filename, frame.lineno or 0) for frame in reversed(stack))
    return next(users_lines(lines))
