"""A model that is traced once and split: `compile_piecewise`, and the state that its trace depends on."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import isqrt
from types import CodeType, FunctionType
from typing import Any

import torch

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.blame import users_line
from cgplan.backends.context import current_forward_context
from cgplan.buffers.batch import BatchReader
from cgplan.buffers.static import StaticBuffers
from cgplan.config import CompilationConfig, Config, Dim, validate_config
from cgplan.errors import BackendError, CaptureError, CgplanError, ConfigError, HostSyncError, InputError, ModelError
from cgplan.graphs.ambient import AmbientState, random_state_kept
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.piecewise.backend import PiecewiseBackend
from cgplan.piecewise.prologue import read_prologue
from cgplan.piecewise.segments import SplitForward
from cgplan.planning import Plan, build_plan

_dropped: list[tuple[CodeType, PiecewiseBackend]] = []  # that are still to be forgotten


def forget_trace(code: CodeType, backend: PiecewiseBackend) -> None:
    """Drop what Dynamo keeps of a function: its cache holds the graphs' wrappers, where no collector sees them.

    It may be called again.
    """
    torch._C._dynamo.eval_frame.reset_code(code)
    backends = torch._dynamo.eval_frame.cached_backends
    for key, found in backends.copy().items():  # a copy: other threads compile meanwhile
        if found is backend or getattr(found, "compiler_fn", None) is backend:  # what torch.compile puts around it
            backends.pop(key, None)
    backend.compiled.clear()


def forget_dropped(code: CodeType, backend: PiecewiseBackend) -> None:
    """The same for a model that is gone, wherever that was found. In the middle of a capture, which freed graphs would
    make invalid on a GPU, it is put off until the next model is made or goes.
    """
    _dropped.append((code, backend))
    if not backend.backend.is_capturing():
        forget_put_off()


def forget_put_off() -> None:
    """Forget the models that went in the middle of a capture; outside of one."""
    with suppress(IndexError):  # another thread took the last one
        while _dropped:
            forget_trace(*_dropped.pop())


class PiecewiseModel:
    """A model whose PIECEWISE segments are captured; called with the declared inputs by name.

    Dynamo traces at the first call, with a dynamic number of rows, and never again: none of its guards is kept,
    which is safe because a forward that branches on the number of rows is refused at the trace, and grad, inference
    and autocast state are compared here. The model's Python attributes are frozen by the trace. Where the forward only
    holds up to the largest capture size (it checks a maximum, say), larger batches run its own code.

    Attributes:
        backend: Holds the pieces.
        model: What is traced.
    """

    def __init__(self, model: Callable[..., Any], config: Config, backend: GraphBackend, max_tokens: int) -> None:
        if not callable(model):
            raise ModelError(
                f"the model is {model!r:.100}, which cannot be called", remedy="Pass a function or module."
            )
        if isinstance(model, PiecewiseModel):
            raise ModelError(
                "the model was compiled by compile_piecewise before",
                remedy="Pass the model itself, or, to capture it as it is, set compilation.piecewise: wrappers.",
            )
        compilation: CompilationConfig = config.compilation
        self._rows = {name: spec.row_dim for name, spec in config.inputs.items() if spec.row_dim is not None}
        self._declared = {name: config.inputs[name].dims[dim] for name, dim in self._rows.items()}
        reqs = min(max_tokens, config.scheduler.max_num_seqs)
        sizes = [dim.size(max_tokens, reqs) for dim in self._declared.values()]
        self.backend = PiecewiseBackend(
            compilation.splitting_ops,
            compilation.compiler,
            backend,
            compilation.address_policy,
            compilation.use_inductor_graph_partition,
            max(sizes, default=0),
        )
        forget_put_off()
        own = _with_own_code(model)
        self._code = own.__code__
        self._compiled = torch.compile(
            own, backend=self.backend, fullgraph=True, options={"guard_filter_fn": _no_guards}
        )
        # Also for a model that nobody forgets. What is called then holds neither this object nor the model; at exit it
        # is not called, as other threads may still run the trace.
        weakref.finalize(self, forget_dropped, self._code, self.backend).atexit = False
        self.model = model
        self._reader = BatchReader(config.inputs, backend.device)
        self._ambient: AmbientState | None = None
        self._forward: Callable[[], SplitForward | None] = lambda: None  # what may be called without Dynamo's code
        self._device = backend.device.type
        self._compiler = compilation.compiler

    def __call__(self, *args: Any, **inputs: torch.Tensor) -> Any:
        """Run the model; wrapped segments capture or replay as the forward context says.

        Raises:
            InputError: outside of a runner, which has looked at them: inputs are not as they are declared, or have
                other rows than the descriptor of a PIECEWISE forward context.
            CaptureError: grad, inference or autocast state is not that of the trace.
        """
        if args:
            raise InputError("the model takes no positional arguments", remedy="Pass every input by its name.")
        context = current_forward_context()
        if context is None or context.scope is None:
            batch = self._reader.read(inputs)
            if context is not None and context.runtime_mode is CUDAGraphMode.PIECEWISE:
                self._reader.refuse_other(batch, context.descriptor)
        if torch._C._len_torch_dispatch_stack():  # a tape records, or somebody looks: operators, not compiled code
            return self.model(**inputs)
        if self.backend.is_bounded and self._is_larger(inputs):
            return self.model(**inputs)
        if self._compiler == "inductor":  # its code is made for the strides of static buffers
            inputs = {name: tensor.contiguous() for name, tensor in inputs.items()}
        now = AmbientState.now(self._device)
        if self._ambient is None:
            try:
                output = self._trace(inputs)
            except BaseException:  # half a trace is none
                self.forget()
                self.backend.pieces.clear()
                self.backend.is_bounded = False
                raise
            self._ambient = now
            self._look_at_code(inputs)
            return output
        self._ambient.refuse_other(now, "traced")
        forward = self._forward()
        if forward is not None and context is not None and (call := forward.direct(context)) is not None:
            return call(inputs, self.model, globals())
        try:
            return self._compiled(**inputs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise (error.inner_exception if isinstance(error.inner_exception, CgplanError) else error) from None

    def _look_at_code(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Have replays do what Dynamo's code does, if it is simple enough and this torch shows it."""
        forward = self.backend.last()
        entries_of: Callable[[CodeType], Sequence[Any]] | None
        entries_of = getattr(torch._dynamo.eval_frame, "_debug_get_cache_entry_list", None)
        entries = list(entries_of(self._code)) if entries_of is not None else []
        if forward is None or forward.num_results is None or len(entries) != 1:
            return
        prologue = read_prologue(entries[0].code, globals(), tuple(inputs), forward.num_results)
        if prologue is not None:
            forward.take_prologue(prologue)
            self._forward = self.backend.last  # gone as soon as Dynamo forgets the trace

    def _dims(self, inputs: Mapping[str, torch.Tensor]) -> dict[int, Dim]:
        """Declared dimensions by their sizes; sizes that stand for several are left out."""
        found: dict[int, set[Dim]] = {}
        for name, dim in self._rows.items():
            found.setdefault(inputs[name].shape[dim], set()).add(self._declared[name])
        return {size: next(iter(dims)) for size, dims in found.items() if len(dims) == 1}

    def forget(self) -> None:
        """Drop what Dynamo keeps of the trace; once it is made, the model must not be called any more."""
        forget_trace(self._code, self.backend)

    def _is_larger(self, inputs: Mapping[str, torch.Tensor]) -> bool:
        most = self.backend.max_rows or 0
        return any(inputs[name].shape[dim] > most for name, dim in self._rows.items())

    def _trace(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        own = {name: tensor.view_as(tensor) for name, tensor in inputs.items()}  # one tensor twice would stay one
        for name, dim in self._rows.items():
            if own[name].shape[dim] > 1:  # Dynamo takes a size of 1 for a constant
                torch._dynamo.mark_dynamic(own[name], dim)
            else:
                self.backend.is_bounded, self.backend.max_rows = True, 1
        self.backend.dims = self._dims(own)
        try:
            # Without the first a trace holds for 2 rows and more only, because 1 and 0 broadcast. Without the second
            # sizes and numbers in which this model differs from the one traced before would be taken for variables.
            oblivious = torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
            with oblivious, torch._dynamo.config.patch(automatic_dynamic_shapes=False):
                return self._compiled(**own)
        except torch._dynamo.exc.UserError as error:  # with torch 2.11 an Unsupported, too
            if "data-dependent" in str(error):
                raise HostSyncError(
                    f"the model's Python code depends on a value of a tensor, at {_user_line(error)}",
                    remedy="Keep it on the device (torch.where, masked_fill), or split without a trace: it runs "
                    "between segments: compilation.splitting_modules, or piecewise: modules for functions under "
                    "eager_break_during_capture.",
                ) from error
            raise CaptureError(
                f"the number of rows is not free in this model: {str(error).splitlines()[0]}",
                remedy="Avoid Python code that depends on the number of rows or on values, or split without a trace: "
                "compilation.splitting_modules, or piecewise: modules for functions under eager_break_during_capture.",
            ) from error
        except torch._dynamo.exc.Unsupported as error:
            if "graphs/wrapper.py" in str(error):
                raise CaptureError(
                    "the model holds graph wrappers of its own, and is to be traced as a whole as well",
                    remedy="Set compilation.piecewise: wrappers, or take the wrappers out.",
                ) from error
            if "failed to bind arguments" in str(error):  # Python says it better
                return self.model(**inputs)
            if "backends/context.py" in str(error):
                raise CaptureError(
                    f"the model reads the forward context in code that is traced, at {_user_line(error)}",
                    remedy="A trace would keep what it read. Read the context inside a custom operator, as "
                    "cgplan::attention does, pass what you need as an input, or use compilation.splitting_modules.",
                ) from error
            raise CaptureError(
                f"the model cannot be traced as one graph, at {_user_line(error)}: {str(error).splitlines()[0]}",
                remedy="Change that line, or split without a trace: compilation.splitting_modules breaks the capture "
                "at modules, piecewise: modules at functions under eager_break_during_capture.",
            ) from error
        except torch._dynamo.exc.TorchRuntimeError as error:  # it hides what an operator raised, and the model's line
            try:
                self.model(**inputs)
            except Exception as own:
                raise own from None
            raise CaptureError(
                f"the model runs, but cannot be traced, at {_user_line(error)}: {_cause(error)}",
                remedy="See that the operator there has a fake kernel (torch.library.register_fake) that agrees with "
                "its real one, or use compilation.splitting_modules, which needs no trace.",
            ) from error
        except torch._dynamo.exc.BackendCompilerFailed as error:
            inner = error.inner_exception
            raise inner if isinstance(inner, CgplanError) else error from None


def compile_piecewise(
    model: Callable[..., Any],
    config: Config | Mapping[str, Any],
    *,
    backend: GraphBackend | None = None,
    max_tokens: int | None = None,
) -> PiecewiseModel:
    """A model that is split at ``compilation.splitting_ops`` when it is first called.

    Args:
        model: Any callable or nn.Module that Dynamo can trace as one graph.
        config: Its inputs say which dimensions count rows; its compilation says where to split and how to compile. A
            mapping is validated as a YAML file would be. Sizes and policies of a session mean nothing here: the
            forward context says what is captured.
        backend: Device of the graphs; chosen by ``config.device`` if absent.
        max_tokens: Largest capture size; that of ``build_plan(config)`` if absent.

    Raises:
        ConfigError: the configuration is wrong, or asks for another way than to split at operators (a cudagraph_mode
            without PIECEWISE, splitting_modules, another ``piecewise``); at the first call, for a splitting op that
            does not occur.
        ModelError: the model cannot be called, or comes from compile_piecewise. One under torch.compile is split as the
            model that it holds.
        BackendError: ``backend`` is no backend.
        CaptureError: at the first call, where the model cannot be traced, or branches on the number of rows.
    """
    if isinstance(config, Mapping):
        config = validate_config(dict(config))
    if not isinstance(config, Config):
        raise ConfigError(
            f"compile_piecewise was given a {type(config).__name__} as its configuration",
            remedy="Pass a cgplan.Config, or a mapping such as {'inputs': {...}, 'compilation': {...}}.",
        )
    _refuse_other_ways(config.compilation)
    if backend is not None and not isinstance(backend, GraphBackend):
        raise BackendError(
            f"{backend!r:.100} is no backend", remedy='Make one with cgplan.backends.select_backend("auto").'
        )
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise ConfigError(f"max_tokens is {max_tokens!r:.100}", remedy="Give the largest capture size, in tokens.")
    most = build_plan(config).max_capture_size if max_tokens is None else max_tokens
    return PiecewiseModel(model, config, backend or select_backend(config.device), most)


def _refuse_other_ways(compilation: CompilationConfig) -> None:
    """Raise ConfigError for a configuration whose PIECEWISE segments do not come from operators, or that has none."""
    mode, way = compilation.cudagraph_mode, compilation.piecewise
    found = None
    if "cudagraph_mode" in compilation.model_fields_set and not mode.has_mode(CUDAGraphMode.PIECEWISE):
        found = f"cudagraph_mode is {mode}"  # the default is a session's
    elif compilation.splitting_modules:
        found = "splitting_modules are given"
    elif way not in ("auto", "ops"):
        found = f"piecewise is {way}"
    if found is not None:
        raise ConfigError(
            f"compile_piecewise splits at operators and captures PIECEWISE graphs, but compilation.{found}",
            remedy="Leave it out, or use cgplan.capture, which knows all modes and ways.",
        )


def _with_own_code(model: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls the model and has a code object of its own.

    Dynamo keeps what it compiled with the code object: there it would stay as long as the model's class, and after
    some sessions on one model Dynamo would refuse to trace it again.
    """

    def forward(**inputs: torch.Tensor) -> Any:
        return model(**inputs)

    return FunctionType(forward.__code__.replace(), globals(), "forward", closure=forward.__closure__)


def _no_guards(guards: Sequence[Any]) -> list[bool]:
    return [False] * len(guards)


def _cause(error: BaseException) -> str:
    """What an operator raised while Dynamo traced it."""
    text = str(error)
    found = re.search(r": got (\w+\(.*\))$", text, re.MULTILINE)
    return found[1] if found else text.splitlines()[0]


def _user_line(error: BaseException) -> str:
    """The user's line that Dynamo stopped at."""
    return users_line(
        (frame.filename, frame.lineno or 0) for frame in reversed(getattr(error, "real_stack", None) or [])
    )


def sizes_of_trace(most_tokens: int, max_num_seqs: int, *, mixed: bool) -> tuple[int, int]:
    """Rows and requests of the batch that a trace for up to ``most_tokens`` is made with; ``mixed``: requests differ.

    They are different primes: a number that is equal to another dimension (the rows of a cache, say) could be taken for
    it, and the code would hold for that size alone. They are three at least, because one row is taken for a constant.
    """
    rows = _prime_below(most_tokens)
    return rows, min(_prime_below(rows) if mixed and rows > 3 else rows, max_num_seqs)


def _prime_below(most: int) -> int:
    """The largest prime below ``most``, three at least."""
    return next((n for n in range(most - 1, 3, -1) if all(n % d for d in range(2, isqrt(n) + 1))), 3)


class FirstTrace:
    """Lets the compiler of a route see the model once, on padding that lies in memory of its own.

    What is traced holds for the inference mode and autocast of the trace, so that it is made in those of the session,
    whatever the call has that asks for it.

    Args:
        plan, config, backend: As for a session.
        ambient: Torch's state in the session.
        is_made: Whether there is nothing to trace.
    """

    def __init__(
        self, plan: Plan, config: Config, backend: GraphBackend, ambient: AmbientState, *, is_made: bool
    ) -> None:
        self._plan, self._config, self._backend, self._ambient = plan, config, backend, ambient
        self._is_made = is_made
        self._failure: CgplanError | None = None
        self._is_too_large = False

    def forget_failure(self) -> None:
        """Have a trace that failed tried again."""
        self._failure, self._is_too_large = None, False

    def make(
        self,
        run: Callable[[BatchDescriptor, Mapping[str, torch.Tensor]], Any],
        descriptor: BatchDescriptor,
        generators: Iterable[torch.Generator],
    ) -> None:
        """Trace, unless that is done.

        Args:
            run: Runs what is traced.
            descriptor: The key that is captured next.
            generators: Those that the model draws from.

        Raises:
            CgplanError: as the trace; each time, until ``forget_failure``.
        """
        if self._is_made:
            return
        if (failure := self._failure) is not None:
            raise type(failure)(failure.message, remedy=failure.remedy)
        device = self._backend.device
        mixed = self._plan.mode.has_mode(CUDAGraphMode.PIECEWISE)
        most = descriptor.num_tokens if self._is_too_large else self._plan.max_capture_size
        rows, reqs = sizes_of_trace(most, self._plan.max_num_seqs, mixed=mixed)
        batch = descriptor._replace(num_tokens=rows, num_reqs=reqs, uniform=False)
        try:
            with self._ambient.without_grad(device.type), random_state_kept(device, generators):
                specs = {**self._config.inputs, **self._config.metadata}
                run(batch, StaticBuffers(specs, rows, reqs, device).views(rows, reqs))
        except CgplanError as error:
            self._failure = type(error)(error.message, remedy=error.remedy)  # without the traceback, which holds memory
            raise
        except Exception:
            self._is_too_large = True  # out of memory, say: the next key is smaller
            raise
        self._is_made = True


__all__ = ["FirstTrace", "forget_dropped", "forget_put_off", "forget_trace"]
