"""PIECEWISE by splitting the traced forward: a torch.compile backend, and `compile_piecewise` on top of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

import torch
from torch import fx

from cgplan.config import CompilationConfig, Config
from cgplan.errors import BackendError, CaptureError, CgplanError
from cgplan.graphs import GraphBackend, select_backend
from cgplan.modes import CUDAGraphMode
from cgplan.planning import build_plan
from cgplan.runtime.partition import PartitionedForward, compile_for_all_sizes
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
        max_rows: Largest number of rows that the trace will be run with; any if absent.

    Attributes:
        is_bounded: Whether the trace does not hold beyond ``max_rows``.
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
        """Split and wrap; Dynamo calls this once for each graph."""
        self.is_bounded = _refuse_branches_on_size(self.max_rows)
        forward = self._partitioned(gm) if self.partition else self._split(gm)
        if self.max_rows is not None:  # whose guards are not kept; inductor may have added some
            self.is_bounded = _refuse_branches_on_size(self.max_rows)
        return forward

    def _split(self, gm: fx.GraphModule) -> Callable[..., Any]:
        split, pieces = split_graph(gm, self.splitting_ops)
        self.pieces.append(pieces)
        fresh = _made_by_eager_pieces(split, pieces)
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
        key = _structure(module)
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
    autocast: bool

    @classmethod
    def now(cls, device: str) -> _Ambient:
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(device))


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
        reqs = min(max_tokens, config.scheduler.max_num_seqs)
        sizes = [config.inputs[name].dims[dim].size(max_tokens, reqs) for name, dim in self._rows.items()]
        self.backend = PiecewiseBackend(
            compilation.splitting_ops,
            compilation.compiler,
            backend,
            compilation.address_policy,
            compilation.use_inductor_graph_partition,
            max(sizes, default=0),
        )
        self._compiled = torch.compile(
            _with_own_code(model), backend=self.backend, fullgraph=True, options={"guard_filter_fn": _no_guards}
        )
        self._model = model
        self._ambient: _Ambient | None = None
        self._device = backend.device.type

    def __call__(self, **inputs: torch.Tensor) -> Any:
        """Run the model; wrapped segments capture or replay as the forward context says."""
        if torch._C._len_torch_dispatch_stack():  # a tape records, or somebody looks: operators, not compiled code
            return self._model(**inputs)
        if self.backend.is_bounded and self._is_larger(inputs):
            return self._model(**inputs)
        now = _Ambient.now(self._device)
        if self._ambient is None:
            output = self._trace(inputs)
            self._ambient = now
            return output
        if now != self._ambient:
            raise CaptureError(
                f"the model was traced under {self._ambient} and is run under {now}",
                remedy="Call the runner under the grad, inference and autocast state of its capture.",
            )
        return self._compiled(**inputs)

    def _is_larger(self, inputs: Mapping[str, torch.Tensor]) -> bool:
        most = self.backend.max_rows or 0
        return any(inputs[name].shape[dim] > most for name, dim in self._rows.items())

    def _trace(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        for name, dim in self._rows.items():
            if inputs[name].shape[dim] > 1:  # Dynamo takes a size of 1 for a constant
                torch._dynamo.mark_dynamic(inputs[name], dim)
        try:
            # Without it a trace holds for 2 rows and more only, because 1 and 0 broadcast.
            with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
                return self._compiled(**inputs)
        except torch._dynamo.exc.Unsupported as error:
            if "runtime/wrapper.py" in str(error):
                raise CaptureError(
                    "the model holds graph wrappers of its own, and is to be traced as a whole as well",
                    remedy="Set compilation.piecewise: wrappers, or take the wrappers out.",
                ) from error
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


def _no_guards(guards: Sequence[Any]) -> list[bool]:
    return [False] * len(guards)


def _made_by_eager_pieces(split: fx.GraphModule, pieces: Sequence[Piece]) -> dict[str, tuple[int, ...]]:
    """For each segment, the positions of the arguments that an eager piece returned: fresh tensors on each call."""
    eager = {piece.name for piece in pieces if piece.eager}
    fresh: set[fx.Node] = set()
    positions: dict[str, tuple[int, ...]] = {}
    for node in split.graph.nodes:
        if node.op == "call_module":
            positions[str(node.target)] = tuple(i for i, arg in enumerate(node.args) if arg in fresh)
            if node.target in eager:
                fresh.add(node)
        elif node.op == "call_function" and node.args and node.args[0] in fresh:  # an item of its tuple
            fresh.add(node)
    return positions


def _structure(module: fx.GraphModule) -> Any:
    """A key that is equal for segments that compile to the same code: their graphs without names."""
    index: dict[fx.Node, int] = {}
    parts = []
    for node in module.graph.nodes:
        index[node] = len(index)
        args = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{index[n]}")
        value = node.meta.get("example_value")
        shape = (
            (tuple(map(str, value.shape)), str(value.stride()), value.dtype) if isinstance(value, torch.Tensor) else ""
        )
        target = node.target if node.op.startswith("call") else ""
        parts.append((node.op, str(target), str(args), str(shape)))
    return tuple(parts)


def _refuse_branches_on_size(max_rows: int | None) -> bool:
    """Raise CaptureError if the trace went one of several ways because of the number of rows.

    A condition that all sizes up to ``max_rows`` fulfil (a check of a maximum, say) is none; True if there are such.
    """
    context, bounded = torch._guards.TracingContext.try_get(), False
    if context is None or context.fake_mode is None or context.fake_mode.shape_env is None:
        return False
    for guard in context.fake_mode.shape_env.guards:
        expression = guard.expr
        if getattr(expression, "rel_op", "") == "==" and all(side.is_symbol for side in expression.args):
            continue  # two inputs of one batch
        if not expression.free_symbols or _holds(expression, _SAMPLES):
            continue
        if max_rows is None or not _holds(expression, range(2, max_rows + 1)):
            raise CaptureError(
                f"the model's Python code depends on the number of rows ({expression}), at {guard.sloc}",
                remedy="Other sizes would take another way. Avoid the branch, or use compilation.splitting_modules.",
            )
        bounded = True
    return bounded


_SAMPLES = (2, 3, 4, 5, 7, 8, 63, 64, 65, 1 << 20)


def _holds(expression: Any, sizes: Iterable[int]) -> bool:
    """Whether a condition on one symbol is true for these sizes; 0 and 1 Dynamo treats apart."""
    (symbol, *others) = expression.free_symbols
    return not others and all(bool(expression.subs(symbol, n)) for n in sizes)


def _user_line(error: BaseException) -> str:
    """The user's line that Dynamo stopped at."""
    stack = getattr(error, "real_stack", None)
    if not stack:
        return "an unknown line"
    frame = stack[-1]
    return f"{frame.filename}:{frame.lineno}: `{(frame.line or '').strip()}`"
