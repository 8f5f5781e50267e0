"""A model that Dynamo traces, split at operators: eager parts, and segments, which Inductor may
compile.
"""

from __future__ import annotations

import copy
import operator
import re
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch.fx.passes.split_module import split_module
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.backend import autocast_cache
from cgplan.backends.blame import Line, users_lines
from cgplan.backends.context import ForwardContext, current_forward_context, get_forward_context
from cgplan.backends.host_sync import ALLOCATIONS, Args, Function, Kwargs, tensors_in
from cgplan.buffers.batch import BatchReader
from cgplan.config import CompilationConfig, Config, validate_config
from cgplan.errors import (
    BackendError,
    CaptureError,
    CgplanError,
    ConfigError,
    HostSyncError,
    ModelError,
    did_you_mean,
    first_line,
)
from cgplan.graphs.wrapper import CUDAGraphEntry, CUDAGraphOptions, CUDAGraphWrapper, Recorded
from cgplan.modes import CUDAGraphMode
from cgplan.piecewise.breakable import (
    BreakableCUDAGraphCapture,
    BreakableCUDAGraphWrapper,
    as_eager_piece,
)
from cgplan.planning.plan import DEFAULT_SPLITTING_OPS


class PiecewiseBackend:
    """Splits what Dynamo traced; outside of a capture the pieces run one after the other.

    Attributes:
        traces: They live as long as graphs, which read their constants.
        capture: The next forward enters it.
        codes: Equal for traces that differ in guards alone.
        missed: The last guard that did not hold.
    """

    def __init__(self, compilation: CompilationConfig, backend: GraphBackend) -> None:
        self.splitting_ops = compilation.splitting_ops
        self.compiler = compilation.compiler
        self.backend = backend
        self.traces: list[Function] = []
        self.pieces: list[tuple[Piece, ...]] = []
        self.compiled: dict[Any, Function] = {}
        self.capture: AbstractContextManager[object] | None = None
        self.codes: set[str] = set()
        self.missed = ""
        if self.compiler == "inductor" and self.backend.device.type == "cpu":
            raise BackendError(
                "the tape cannot record compiler: inductor, whose kernels do not pass PyTorch's "
                "dispatcher",
                remedy="Set compilation.compiler: eager where there is no GPU.",
            )

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Function:  # noqa: ARG002
        if self.backend.is_capturing():
            raise CaptureError(
                f"Dynamo traces the model again inside a capture: {self.missed or 'no trace fits'}",
                remedy="Leave the model's Python attributes and torch's modes as they are in the "
                "warm-ups.",
            )
        self.codes.add(gm.code)
        split, pieces = split_graph(gm, self.splitting_ops)
        for piece in pieces:
            module = getattr(split, piece.name)
            # generates `forward`
            _ = module.code
            if piece.eager:
                names = [operator_name(node) or "" for node in module.graph.nodes]
                # they may change a tensor object's shape (t_)
                in_place = any(name.endswith("_") for name in names)
                module.forward = as_eager_piece(
                    module.forward,
                    piece.title,
                    is_traced=not in_place,
                )
            elif self.compiler == "inductor":
                key = structure_of(module)
                if key not in self.compiled:
                    self.compiled[key] = compile_for_all_sizes(module)
                module.forward = self.compiled[key]
        _ = split.code
        self.traces.append(split)
        self.pieces.append(pieces)

        def forward_of_pieces(*args: Any) -> Any:
            capture = self.capture
            self.capture = None
            with capture or nullcontext():
                return split(*args)

        return forward_of_pieces


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
            if found:
                guard, _, _ = str(failure.reason).partition("\nUser stack trace")
                guard = " ".join(guard.split())
                found.missed = re.sub(r"^\d+/\d+: | \(HINT: .*", "", guard)

        optimize = torch._dynamo.optimize(self.splitter, nopython=True, guard_fail_fn=note_miss)
        self._traced = {}
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
            if context and context.runtime_mode is CUDAGraphMode.PIECEWISE:
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
        traces = 2 * len(self._keys)  # of first use, and of later runs
        tracing = config.patch(
            automatic_dynamic_shapes=False,
            recompile_limit=max(config.recompile_limit, traces),
            accumulated_recompile_limit=max(config.accumulated_recompile_limit, traces),
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


def _user_line(error: BaseException) -> Line:
    stack = getattr(error, "real_stack", None) or []
    lines = ((frame.filename, frame.lineno or 0) for frame in reversed(stack))
    return next(users_lines(lines))


# where PyTorch's names differ
_OF_PYTHON = {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "and_": "bitwise_and",
    "or_": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "iadd": "add_",
    "isub": "sub_",
    "imul": "mul_",
    "itruediv": "div_",
}
# homes of other functions in traces
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "aten": (
        torch,
        Tensor,
        torch.nn.functional,
        torch.fft,
        torch.linalg,
        torch.special,
    ),
    "python": (operator,),
    "higher_order": (torch.ops.higher_order,),
}


@dataclass(frozen=True)
class Piece:
    """One part of a split forward.

    Attributes:
        eager: Of splitting operators; else it is captured.
        title: Its first splitting operator.
    """

    name: str
    eager: bool
    operators: tuple[str, ...]
    title: str = ""


@dataclass
class _Run:
    eager: bool
    nodes: list[fx.Node] = field(default_factory=list)


def operator_name(node: fx.Node) -> str | None:
    """``namespace::name``; None for a node that calls nothing."""
    target = node.target
    if node.op == "call_method":
        return f"aten::{target}"
    if node.op != "call_function":
        return None
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order::{target.name()}"
    name = getattr(target, "__name__", target)
    is_of_python = getattr(target, "__module__", None) == "_operator"
    return f"python::{name}" if is_of_python else f"aten::{name}"


def split_graph(
    gm: fx.GraphModule,
    splitting_ops: Sequence[str] | None,
) -> tuple[fx.GraphModule, tuple[Piece, ...]]:
    """Split a graph into a module with one submodule a piece.

    Eager pieces hold consecutive splitting operators, nodes between them without work, and all of a
    transformed function (torch.vmap). Nodes keep their order.

    Args:
        splitting_ops: ``namespace::name`` or ``namespace::name.overload``, Python's operators by
            PyTorch's names (``aten::matmul`` for ``@``). None: attention, which may be missing.

    Raises:
        ConfigError: an operator does not exist, or does not occur.
    """
    wanted = frozenset(DEFAULT_SPLITTING_OPS if splitting_ops is None else splitting_ops)
    occurring = set()
    splitting = set()
    for node in gm.graph.nodes:
        names = _names(node)
        occurring |= names
        if names & wanted:
            splitting.add(node)
    refuse_missing_ops(splitting_ops or (), occurring)
    runs = _runs(gm.graph.nodes, splitting)
    run_of = {}
    for index, run in enumerate(runs):
        run_of.update(dict.fromkeys(run.nodes, index))
    split = split_module(gm, None, run_of.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
    pieces = []
    for call in split.graph.find_nodes(op="call_module"):
        name = str(call.target)
        run = runs[int(name.removeprefix("submod_"))]
        chosen = [node for node in run.nodes if node in splitting]
        first, *_ = chosen or run.nodes
        call.stack_trace = first.stack_trace  # for messages
        operators = []
        for node in getattr(split, name).graph.nodes:
            called = operator_name(node)
            if called is not None:
                operators.append(min(_aten_names(node), default=called))
        title = operator_name(first) or ""
        piece = Piece(name, run.eager, tuple(operators), title)
        pieces.append(piece)
    split.recompile()
    return split, tuple(pieces)


def refuse_missing_ops(wanted: Iterable[str], occurring: Collection[str]) -> None:
    for missing in wanted:
        if missing in occurring:
            continue
        listed = [
            name
            for name in sorted(occurring)
            if not name.endswith(".default") and not name.startswith("python::")
        ]
        raise _unusable(missing, listed, f"The model's operators are {', '.join(listed)}.")


def refuse_unknown_ops(splitting_ops: Sequence[str] | None) -> None:
    """Raises ConfigError. PyTorch's functions count: traces hold ``F.softsign`` as
    ``aten::softsign``.
    """
    for wanted in splitting_ops or ():
        namespace, _, bare = wanted.removesuffix(".default").partition("::")
        homes = _FUNCTIONS.get(namespace, ())
        if _exists(wanted) or any(hasattr(home, bare) for home in homes):
            continue
        known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
        raise _unusable(
            wanted,
            known,
            "Import the library that registers it before the capture.",
        )


def _unusable(wanted: str, known: Collection[str], then: str) -> ConfigError:
    hint = did_you_mean(
        wanted,
        known,
        "Did you mean {}? ",
        2,
    )
    what = "does not occur in the model"
    form = ""
    if not _exists(wanted):
        what = "does not exist"
        form = "Operators are named namespace::name, as in aten::softmax. "
    return ConfigError(
        f"compilation.splitting_ops: the operator {wanted!r} {what}",
        remedy=f"{form}{hint}{then}",
    )


def _exists(name: str) -> bool:
    namespace, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), op)
    except (AttributeError, RuntimeError):
        return False
    return not overload or hasattr(packet, overload)


def _names(node: fx.Node) -> set[str]:
    name = operator_name(node)
    if name is None:
        return set()
    overload = "default"
    if isinstance(node.target, torch._ops.OpOverload):
        overload = node.target._overloadname
    return {name, f"{name}.{overload}", *_aten_names(node)}


def _aten_names(node: fx.Node) -> set[str]:
    """Several for an index."""
    if not isinstance(_value_of(node), Tensor):
        return set()
    home, _, name = (operator_name(node) or "").partition("::")
    if home != "python":
        return set()
    if name != "getitem":
        found = f"aten::{_OF_PYTHON.get(name, name)}"
        return {found} if _exists(found) else set()
    indexed, index = node.args
    steps = index if isinstance(index, tuple) else (index,)
    names = set()
    if isinstance(_value_of(indexed), Tensor):
        for step in steps:
            if step is None or step is Ellipsis:
                continue
            name = "index"
            value = _value_of(step) if isinstance(step, fx.Node) else step
            if isinstance(step, slice):
                name = "slice"
            elif type(step) is int or (value is not step and not isinstance(value, Tensor)):
                name = "select"
            names.add(f"aten::{name}")
    return names


def _runs(
    nodes: Iterable[fx.Node],
    splitting: Collection[fx.Node],
) -> list[_Run]:
    """In turns eager or not; idle runs join eager neighbours."""
    runs: list[_Run] = []
    run_of: dict[Any, _Run] = {}
    depth = 0  # of transforms (torch.vmap)
    for node in nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        eager = node in splitting
        run = None
        if node.target is operator.getitem:
            producer = node.args[0]  # a tuple does not cross pieces
            if isinstance(_value_of(producer), tuple | list):
                run = run_of.get(producer)
        if run is None:
            name = operator_name(node) or ""
            opens = name.endswith("_increment_nesting")
            continues = runs and runs[-1].eager == eager and not opens
            if depth == 0 and not continues:
                runs.append(_Run(eager))
            run = runs[-1]
            run.eager |= eager
            depth += opens
            depth -= name.endswith("_decrement_nesting")
        run.nodes.append(node)
        run_of[node] = run
    merged: list[_Run] = []
    for run in runs:
        is_idle = len(runs) > 1 and not any(map(_works, run.nodes))
        eager = run.eager or is_idle
        if not merged or merged[-1].eager != eager:
            merged.append(_Run(eager))
        merged[-1].nodes += run.nodes
    return merged


def _works(node: fx.Node) -> bool:
    if _value_of(node) is None:
        return True  # it returns nothing, so it writes
    _, _, bare = (operator_name(node) or "").partition("::")
    writes = bare.endswith("_") or bare == "setitem"
    if writes or node.kwargs.get("out") is not None:
        return True
    if bare in ALLOCATIONS:
        return False
    given = set()
    for argument in node.all_input_nodes:
        given |= _storages_of(argument)
    return not _storages_of(node) <= given


def _value_of(node: Any) -> Any:
    """The tracer's fake tensors, which share storages as the real ones."""
    return node.meta.get("example_value", node.meta.get("val"))


def _storages_of(node: fx.Node) -> set[int]:
    functorch = torch._C._functorch
    found = set()
    for tensor in tensors_in(_value_of(node)):
        while functorch.is_functorch_wrapped_tensor(tensor):
            tensor = functorch.get_unwrapped(tensor)
        found.add(tensor.untyped_storage()._cdata)
    return found


Order = tuple[int, ...]  # dimensions, the outermost first


def compile_for_all_sizes(module: fx.GraphModule) -> Function:
    """With the number of rows free."""
    # inductor gives real tensors other sizes
    inputs = []
    orders = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            traced = node.meta["example_value"]
            inputs.append(traced)
            orders.append(_order_of(traced))
    compiled = torch._inductor.standalone_compile(
        module,
        inputs,
        dynamic_shapes="from_tracing_context",
    )
    output = module.graph.output_node().args[0]
    is_alone = not isinstance(output, tuple | list)

    def call(*args: Any) -> Any:
        ordered = []
        for value, order in zip(args, orders, strict=False):
            # an eager piece may give another layout than the trace
            if order is not None and not value.permute(order).is_contiguous():
                like = torch.empty_permuted(
                    value.shape,
                    order,
                    dtype=value.dtype,
                    device=value.device,
                )
                value = like.copy_(value)
            ordered.append(value)
        result = compiled(*ordered)
        # versions of torch differ
        if is_alone and isinstance(result, tuple | list):
            return result[0]
        return result

    return call


def _order_of(traced: Any) -> Order | None:
    """None with gaps, or where the shape depends on data."""
    if not isinstance(traced, Tensor):
        return None
    sizes = _hints(traced.shape)
    strides = _hints(traced.stride())
    if None in sizes or None in strides:
        return None
    dims = range(len(sizes))
    order = sorted(dims, key=strides.__getitem__, reverse=True)
    expected = 1
    for dim in reversed(order):
        if strides[dim] != expected:
            return None
        expected *= sizes[dim]
    return tuple(order)


def _hints(numbers: Sequence[Any]) -> list[Any]:
    return [n.node.hint if isinstance(n, SymInt) else n for n in numbers]


def structure_of(module: fx.GraphModule) -> Any:
    """Equal for segments that compile to the same code."""
    index: dict[fx.Node, int] = {}
    parts = []
    for node in module.graph.nodes:
        index[node] = len(index)
        given = (node.args, node.kwargs)
        arguments = fx.node.map_arg(given, lambda n: f"%{index[n]}")
        target: Any = ""
        if node.op == "get_attr":  # a body, or a constant
            held = getattr(module, str(node.target), None)
            target = id(held)
            if isinstance(held, fx.GraphModule):
                target = structure_of(held)
        elif node.op.startswith("call"):
            target = str(node.target)
        value = node.meta.get("example_value")
        facts = ""
        if isinstance(value, SymInt):
            facts = str(value)
        elif isinstance(value, Tensor):
            facts = f"{value.shape} {value.stride()} {value.dtype}"
        part = (
            node.op,
            target,
            str(arguments),
            facts,
        )
        parts.append(part)
    return tuple(parts)
