"""Splitting a traced forward at operators."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module

from cgplan.backends.host_sync import ALLOCATIONS, tensors_in
from cgplan.errors import ConfigError, did_you_mean
from cgplan.planning.build import DEFAULT_SPLITTING_OPS

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


@dataclass(slots=True)
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
    occurring = set[str]()
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
    given = set[int]()
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
