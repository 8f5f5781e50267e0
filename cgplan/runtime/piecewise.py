"""PIECEWISE by splitting the traced forward: a torch.compile backend, and `compile_piecewise` on top of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Literal

import torch
from torch import fx

from cgplan.config import CompilationConfig, Config, Dim
from cgplan.errors import BackendError, CaptureError, CgplanError
from cgplan.graphs import GraphBackend, select_backend
from cgplan.modes import CUDAGraphMode
from cgplan.planning import build_plan
from cgplan.runtime.fresh import fresh_arguments
from cgplan.runtime.partition import PartitionedForward, compile_for_all_sizes, structure_of
from cgplan.runtime.row_conditions import refuse_branches_on_size
from cgplan.runtime.splitting import Piece, split_graph
from cgplan.runtime.wrapper import CUDAGraphOptions, CUDAGraphWrapper

Compiler = Literal["eager", "inductor"]


class PiecewiseBackend:
    """A torch.compile backend: splits what Dynamo traced and wraps each segment in a CUDAGraphWrapper(PIECEWISE).

    Outside of a forward context the segments run as they are, so the compiled model is then just the model.

    Args:
        splitting_ops: See ``compilation.splitting_ops``.
        compiler: ``eager`` runs a segment's operators as they were traced; ``inductor`` compiles each distinct segment
            once, for all sizes.
        backend: Device of the graphs; chosen as for ``auto`` if absent.
        address_check: See ``compilation.address_check``.
        partition: See ``compilation.use_inductor_graph_partition``.
        max_rows: For a trace whose guards are not kept: the largest number of rows that it will be run with.

    Attributes:
        is_bounded: Whether the trace is known to hold up to ``max_rows`` only.
        dims: What the sizes at the trace stand for, where the inputs declare it.
        pieces: Of each graph that was traced, in order.
        compilations: How many distinct segments inductor compiled.
    """

    def __init__(
        self,
        splitting_ops: Sequence[str] | None = None,
        compiler: Compiler = "eager",
        backend: GraphBackend | None = None,
        address_check: Literal["off", "first", "always"] = "first",
        partition: bool = False,
        max_rows: int | None = None,
    ) -> None:
        self.splitting_ops = splitting_ops
        self.compiler = compiler
        self.partition = partition
        self.max_rows = max_rows
        self.is_bounded = False
        self.dims: dict[int, Dim] = {}
        self.address_check = address_check
        self.backend = backend or select_backend()
        self.pieces: list[tuple[Piece, ...]] = []
        self.compiled: dict[Any, Callable[..., Any]] = {}
        if compiler == "inductor" and self.backend.device.type == "cpu":
            raise BackendError(
                "compiler: inductor on the tape: its kernels do not pass PyTorch's dispatcher and cannot be recorded",
                remedy="Set compilation.compiler: eager where there is no GPU.",
            )

    @property
    def compilations(self) -> int:
        """Distinct segments that inductor compiled."""
        return len(self.compiled)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:  # noqa: ARG002
        """Split and wrap; Dynamo calls this once for each graph. See PiecewiseModel for what ``max_rows`` changes."""
        if self.max_rows is not None:
            if self.pieces:
                raise CaptureError(
                    "the model is traced a second time: torch._dynamo.reset() dropped the trace that was captured",
                    remedy="Capture again after torch._dynamo.reset().",
                )
            refuse_branches_on_size(self.max_rows, self.dims)
        forward = self._partitioned(gm) if self.partition else self._split(gm)
        if self.max_rows is not None:  # inductor may have added conditions
            self.is_bounded |= refuse_branches_on_size(self.max_rows, self.dims)
        return forward

    def _split(self, gm: fx.GraphModule) -> Callable[..., Any]:
        split, pieces = split_graph(gm, self.splitting_ops)
        self.pieces.append(pieces)
        fresh = fresh_arguments(split, pieces)
        for piece in pieces:
            module = getattr(split, piece.name)
            _ = module.code  # generates it: until then `forward` is a stub that does so on each call
            runnable: Callable[..., Any] = module.forward
            if not piece.eager:
                if self.compiler == "inductor":
                    runnable = self._compile(module)
                options = CUDAGraphOptions(copied_arguments=fresh[piece.name], address_check=self.address_check)
                runnable = CUDAGraphWrapper(runnable, CUDAGraphMode.PIECEWISE, backend=self.backend, options=options)
            # In the instance's own dict it is found at once; as a submodule only after a failed look-up.
            del split._modules[piece.name]
            split.__dict__[piece.name] = runnable
        return split.forward

    def _partitioned(self, gm: fx.GraphModule) -> Callable[..., Any]:
        forward = PartitionedForward(self.backend, CUDAGraphOptions(address_check=self.address_check))
        forward.compile(gm, self.splitting_ops)
        self.compiled[gm] = forward
        self.pieces.append(forward.pieces(gm, self.splitting_ops))
        return forward

    def _compile(self, module: fx.GraphModule) -> Callable[..., Any]:
        key = structure_of(module)
        if key not in self.compiled:
            self.compiled[key] = compile_for_all_sizes(module)
        return self.compiled[key]


def cgplan_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """``torch.compile(model, backend="cgplan")``; ``options`` are splitting_ops and compiler."""
    return PiecewiseBackend(**options)(gm, example_inputs)


@dataclass(frozen=True, slots=True)
class _Ambient:
    """State that a trace depends on, and that skipped guards would have compared."""

    grad: bool
    inference: bool
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device: str) -> _Ambient:
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    def __str__(self) -> str:
        states = {"gradients": self.grad, "inference mode": self.inference, "autocast": self.autocast is not None}
        kind = f" in {self.autocast}" if self.autocast else ""
        return ", ".join(f"{name} {'on' if on else 'off'}" for name, on in states.items()) + kind


class PiecewiseModel:
    """A model whose PIECEWISE segments are captured; called with the declared inputs by name.

    Dynamo traces at the first call, with a dynamic number of rows, and never again: none of its guards is kept,
    which is safe because a forward that branches on the number of rows is refused at the trace, and grad, inference
    and autocast state are compared here. The model's Python attributes are frozen by the trace. Where the forward only
    holds up to the largest capture size (it checks a maximum, say), larger batches run its own code.

    Attributes:
        backend: Holds the pieces.
    """

    def __init__(self, model: Callable[..., Any], config: Config, backend: GraphBackend, max_tokens: int) -> None:
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
        own = _with_own_code(model)
        self._code = own.__code__
        self._compiled = torch.compile(
            own, backend=self.backend, fullgraph=True, options={"guard_filter_fn": _no_guards}
        )
        self._model = model
        self._ambient: _Ambient | None = None
        self._device = backend.device.type
        self._compiler = compilation.compiler

    def __call__(self, **inputs: torch.Tensor) -> Any:
        """Run the model; wrapped segments capture or replay as the forward context says."""
        if torch._C._len_torch_dispatch_stack():  # a tape records, or somebody looks: operators, not compiled code
            return self._model(**inputs)
        if self.backend.is_bounded and self._is_larger(inputs):
            return self._model(**inputs)
        if self._compiler == "inductor":  # its code is made for the strides of static buffers
            inputs = {name: tensor.contiguous() for name, tensor in inputs.items()}
        now = _Ambient.now(self._device)
        if self._ambient is None:
            output = self._trace(inputs)
            self._ambient = now
            return output
        if now != self._ambient:
            raise CaptureError(
                f"the model was traced with {self._ambient} and is run with {now}",
                remedy="Call the runner under the grad, inference and autocast state of its capture.",
            )
        try:
            return self._compiled(**inputs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise (error.inner_exception if isinstance(error.inner_exception, CgplanError) else error) from None

    def _dims(self, inputs: Mapping[str, torch.Tensor]) -> dict[int, Dim]:
        """Declared dimensions by their sizes; sizes that stand for several are left out."""
        found: dict[int, set[Dim]] = {}
        for name, dim in self._rows.items():
            found.setdefault(inputs[name].shape[dim], set()).add(self._declared[name])
        return {size: next(iter(dims)) for size, dims in found.items() if len(dims) == 1}

    def forget(self) -> None:
        """Drop what Dynamo keeps of the trace; the model must not be called any more."""
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
        except torch._dynamo.exc.Unsupported as error:
            if "runtime/wrapper.py" in str(error):
                raise CaptureError(
                    "the model holds graph wrappers of its own, and is to be traced as a whole as well",
                    remedy="Set compilation.piecewise: wrappers, or take the wrappers out.",
                ) from error
            if "failed to bind arguments" in str(error):  # Python says it better
                return self._model(**inputs)
            raise CaptureError(
                f"the model cannot be traced as one graph, at {_user_line(error)}: {str(error).splitlines()[0]}",
                remedy="Change that line, or split by modules: compilation.splitting_modules breaks the capture at "
                "modules and needs no trace.",
            ) from error
        except torch._dynamo.exc.BackendCompilerFailed as error:
            inner = error.inner_exception
            raise inner if isinstance(inner, CgplanError) else error from None
        except torch._dynamo.exc.UserError as error:
            raise CaptureError(
                f"the number of rows is not free in this model: {str(error).splitlines()[0]}",
                remedy="Avoid Python code that depends on the number of rows, or use compilation.splitting_modules.",
            ) from error


def compile_piecewise(
    model: Callable[..., Any], config: Config, *, backend: GraphBackend | None = None, max_tokens: int | None = None
) -> PiecewiseModel:
    """A model that is split at ``compilation.splitting_ops`` when it is first called.

    Args:
        model: Any callable or nn.Module that Dynamo can trace as one graph.
        config: Its inputs say which dimensions count rows; its compilation says where to split and how to compile.
        backend: Device of the graphs; chosen by ``config.device`` if absent.
        max_tokens: Largest capture size; that of ``build_plan(config)`` if absent.

    Raises:
        ConfigError: at the first call, for a splitting op that does not occur.
        CaptureError: at the first call, where the model cannot be traced, or branches on the number of rows.
    """
    most = build_plan(config).max_capture_size if max_tokens is None else max_tokens
    return PiecewiseModel(model, config, backend or select_backend(config.device), most)


def _with_own_code(model: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls the model and has a code object of its own.

    Dynamo keeps what it compiled with the code object: there it would stay as long as the model's class, and after
    some sessions on one model Dynamo would refuse to trace it again.
    """

    def forward(**inputs: torch.Tensor) -> Any:
        return model(**inputs)

    return FunctionType(forward.__code__.replace(), globals(), "forward", closure=forward.__closure__)


def forget_trace(code: CodeType, backend: PiecewiseBackend) -> None:
    """Drop what Dynamo keeps of a function: its cache holds the graphs' wrappers, where no collector sees them."""
    torch._C._dynamo.eval_frame.reset_code(code)
    torch._dynamo.eval_frame.cached_backends.pop(id(backend), None)
    backend.compiled.clear()


def _no_guards(guards: Sequence[Any]) -> list[bool]:
    return [False] * len(guards)


def _user_line(error: BaseException) -> str:
    """The user's line that Dynamo stopped at."""
    stack = getattr(error, "real_stack", None)
    if not stack:
        return "an unknown line"
    frame = stack[-1]
    return f"{frame.filename}:{frame.lineno}: `{(frame.line or '').strip()}`"
