"""Splitting a traced forward at operators: which nodes stand in graph segments, and which between them."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from cgplan.errors import ConfigError
from cgplan.planning.build import DEFAULT_SPLITTING_OPS

_OF_PYTHON: dict[Any, str] = {  # what PyTorch calls Python's operators on tensors
    **{f: f.__name__ for f in (operator.add, operator.sub, operator.mul, operator.matmul, operator.neg, operator.pow)},
    **{f: f.__name__ for f in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)},
    operator.truediv: "div",
    operator.floordiv: "floor_divide",
    operator.mod: "remainder",
    operator.and_: "bitwise_and",
    operator.or_: "bitwise_or",
    operator.xor: "bitwise_xor",
    operator.invert: "bitwise_not",
    operator.iadd: "add_",
    operator.isub: "sub_",
    operator.imul: "mul_",
    operator.itruediv: "div_",
}

_HOMES: dict[str, tuple[Any, ...]] = {  # of what a trace may call that is no operator, by the namespace it goes by
    "aten": (torch, torch.Tensor, torch.nn.functional, torch.fft, torch.linalg, torch.special),
    "python": (operator,),
    "higher_order": (torch.ops.higher_order,),
}


@dataclass(frozen=True, slots=True)
class Piece:
    """One part of a split forward.

    Attributes:
        name: Of the submodule that holds it.
        eager: Whether it runs between segments (it holds splitting operators) or is captured.
        operators: Names of its operators, in order.
        title: For messages: its first splitting operator.
    """

    name: str
    eager: bool
    operators: tuple[str, ...]
    title: str = ""


@dataclass(slots=True)
class _Run:
    """Consecutive nodes of one kind."""

    eager: bool
    nodes: list[fx.Node]


def operator_name(node: fx.Node) -> str | None:
    """``namespace::name`` of what a node calls; None for a node that calls nothing."""
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
    name = getattr(target, "__name__", str(target))
    home = "python" if getattr(target, "__module__", None) == "_operator" else "aten"
    return f"{home}::{name}"


def split_graph(gm: fx.GraphModule, splitting_ops: Sequence[str] | None) -> tuple[fx.GraphModule, tuple[Piece, ...]]:
    """Split a graph at operators.

    Consecutive splitting operators stay in one eager piece; so do nodes between two of them that compute nothing
    (views, sizes, allocations would leave an empty segment). Nodes keep their order, so mutations do too.

    Args:
        gm: What Dynamo traced.
        splitting_ops: ``namespace::name`` or ``namespace::name.overload``, Python's operators by PyTorch's names for
            them (``aten::matmul`` for ``@``, ``aten::slice`` for ``x[:, :4]``); None for PyTorch's attention operators
            and cgplan::attention, of which any may be missing.

    Returns:
        A module that calls one submodule a piece, and the pieces in the order of their calls.

    Raises:
        ConfigError: an operator does not exist, or does not occur in the model.
    """
    _check_splitting_ops(splitting_ops, gm.graph.nodes)
    wanted = frozenset(DEFAULT_SPLITTING_OPS if splitting_ops is None else splitting_ops)
    runs = _merge_idle(_runs(gm.graph.nodes, lambda node: bool(_names(node) & wanted)))
    piece_of = {node: index for index, run in enumerate(runs) for node in run.nodes}
    split = split_module(gm, None, lambda node: piece_of[node], keep_original_order=True)  # type: ignore[arg-type]
    pieces = []
    for call in (node for node in split.graph.nodes if node.op == "call_module"):
        run = runs[int(str(call.target).removeprefix("submod_"))]
        first = next((node for node in run.nodes if _names(node) & wanted), run.nodes[0])
        call.stack_trace = first.stack_trace  # messages name the user's line of a piece
        operators = _operators(getattr(split, str(call.target)))
        pieces.append(Piece(str(call.target), run.eager, operators, operator_name(first) or ""))
    split.recompile()
    return split, tuple(pieces)


def _names(node: fx.Node) -> set[str]:
    """The names that a splitting op may be given by."""
    name = operator_name(node)
    if name is None:
        return set()
    overload = node.target._overloadname if isinstance(node.target, torch._ops.OpOverload) else "default"
    return {name, f"{name}.{overload}", *_aten_names(node)}


def _aten_names(node: fx.Node) -> set[str]:
    """What PyTorch calls the Python operator of a node that makes a tensor; with an index it may be several."""
    if node.op != "call_function" or not isinstance(value_of(node), torch.Tensor):
        return set()
    if node.target is operator.getitem and isinstance(value_of(node.args[0]), torch.Tensor):  # type: ignore[arg-type]
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return {f"aten::{_index_name(step)}" for step in index if step is not None and step is not Ellipsis}
    return {f"aten::{_OF_PYTHON[node.target]}"} if node.target in _OF_PYTHON else set()


def _index_name(step: Any) -> str:
    """The operator of one part of an index."""
    if isinstance(step, slice):
        return "slice"
    is_number = isinstance(step, int) or (isinstance(step, fx.Node) and not isinstance(value_of(step), torch.Tensor))
    return "select" if is_number and not isinstance(step, bool) else "index"


def _operators(module: fx.GraphModule) -> tuple[str, ...]:
    """Names that splitting ops may be given by, one for each operator."""
    named = [(operator_name(node), sorted(_aten_names(node))) for node in module.graph.nodes]
    return tuple(in_aten[0] if in_aten else name for name, in_aten in named if name is not None)


def _runs(nodes: Iterable[fx.Node], splits: Callable[[fx.Node], bool]) -> list[_Run]:
    runs: list[_Run] = []
    run_of: dict[fx.Node, _Run] = {}
    for node in nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        producer = node.args[0] if node.target is operator.getitem else None
        if isinstance(producer, fx.Node) and producer in run_of and isinstance(value_of(producer), tuple | list):
            run = run_of[producer]  # a tuple's items stay with it: tuples do not cross pieces
        else:
            eager = splits(node)
            if not runs or runs[-1].eager != eager:
                runs.append(_Run(eager, []))
            run = runs[-1]
        run.nodes.append(node)
        run_of[node] = run
    return runs


def _merge_idle(runs: list[_Run]) -> list[_Run]:
    """Runs without work join the eager pieces beside them; a graph with no kernel is no graph."""
    merged: list[_Run] = []
    for run in runs:
        eager = run.eager or (len(runs) > 1 and not any(map(_works, run.nodes)))
        if merged and merged[-1].eager == eager:
            merged[-1].nodes.extend(run.nodes)
        else:
            merged.append(_Run(eager, list(run.nodes)))
    return merged


def _works(node: fx.Node) -> bool:
    """Whether a node launches something: not a view, a size or an allocation."""
    value, name = value_of(node), operator_name(node) or ""
    bare = name.partition("::")[2]
    if any(overload._schema.is_mutable for overload in _overloads(node.target)):
        return True
    if bare.endswith("_") or bare in ("setitem", "copy_") or node.kwargs.get("out") is not None:
        return True
    if bare in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"):
        return False
    made = _tensors(value)
    if not made:
        return value is None and name.startswith("aten::")  # returns nothing, so it writes somewhere
    given = {storage for arg in node.all_input_nodes for storage in storages_of(arg)}
    return any(storage not in given for storage in storages_of(node))


def _overloads(target: Any) -> list[torch._ops.OpOverload]:
    """The overloads that a target may call, but for those that write to results they are given."""
    if isinstance(target, torch._ops.OpOverload):
        return [target]
    if not isinstance(target, torch._ops.OpOverloadPacket):
        return []
    found = [getattr(target, name) for name in target.overloads()]
    return [o for o in found if not any(argument.is_out for argument in o._schema.arguments)]


def storages_of(node: fx.Node) -> list[int]:
    """The memory that a node's value lies in, by the fake tensors of the trace."""
    return [t.untyped_storage()._cdata for t in _tensors(value_of(node))]


def value_of(node: fx.Node) -> Any:
    """The example value that the tracer left: fake tensors, which share storages where the real ones will."""
    return node.meta.get("example_value", node.meta.get("val"))


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, tuple | list) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _check_splitting_ops(splitting_ops: Sequence[str] | None, nodes: Iterable[fx.Node]) -> None:
    """Raise ConfigError for names of operators that do not exist or do not occur."""
    if splitting_ops is None:
        return
    occurring = {name for node in nodes for name in _names(node)}
    listed = sorted({name for name in occurring if not name.endswith(".default") and not name.startswith("python::")})
    for wanted in (name for name in splitting_ops if name not in occurring):
        what = "does not occur in the model" if _exists(wanted) else "does not exist"
        raise _refused(wanted, what, listed, f"The model's operators are {', '.join(listed)}.")


def refuse_unknown_ops(splitting_ops: Sequence[str] | None) -> None:
    """Refuse names that no operator has, ahead of any trace. Whether the others occur, the trace says.

    Functions and methods of PyTorch count, because Dynamo leaves calls as they were written: ``aten::softsign`` is the
    name of ``F.softsign`` in a trace. An operator of a library has to be registered by now.

    Raises:
        ConfigError: there is no such operator.
    """
    for wanted in splitting_ops or ():
        namespace, _, bare = wanted.removesuffix(".default").partition("::")
        if not _exists(wanted) and not any(hasattr(home, bare) for home in _HOMES.get(namespace, ())):
            known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
            raise _refused(wanted, "does not exist", known, "Import the library that registers it before the capture.")


def _refused(wanted: str, what: str, known: Collection[str], then: str) -> ConfigError:
    near = difflib.get_close_matches(wanted, known, n=2)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    form = "" if _exists(wanted) else "Operators are named namespace::name, as in aten::softmax. "
    return ConfigError(f"compilation.splitting_ops: the operator {wanted!r} {what}", remedy=f"{form}{hint}{then}")


def _exists(name: str) -> bool:
    namespace, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), op)
        return not overload or hasattr(packet, overload)
    except (AttributeError, RuntimeError):
        return False
