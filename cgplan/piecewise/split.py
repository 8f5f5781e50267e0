"""Splitting a traced forward at operators: which nodes stand in graph segments, and which between
them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module

from cgplan.backends.host_sync import ALLOCATIONS
from cgplan.errors import ConfigError, did_you_mean
from cgplan.planning.build import DEFAULT_SPLITTING_OPS

_OF_PYTHON: dict[Any, str] = {  # PyTorch's names of Python's operators on tensors
    **{
        f: f.__name__
        for f in (
            operator.add,
            operator.sub,
            operator.mul,
            operator.matmul,
            operator.neg,
            operator.pow,
        )
    },
    **{
        f: f.__name__
        for f in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
    },
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
# where a trace may take functions from that are not operators
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "aten": (torch, Tensor, torch.nn.functional, torch.fft, torch.linalg, torch.special),
    "python": (operator,),
    "higher_order": (torch.ops.higher_order,),
}


@dataclass(frozen=True)
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
    eager: bool
    nodes: list[fx.Node] = field(default_factory=list)


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
    home = "python" if getattr(target, "__module__", None) == "_operator" else "aten"
    return f"{home}::{getattr(target, '__name__', target)}"


def split_graph(
    gm: fx.GraphModule, splitting_ops: Sequence[str] | None
) -> tuple[fx.GraphModule, tuple[Piece, ...]]:
    """Split a graph at operators.

    Consecutive splitting operators stay in one eager piece; so do nodes between two of them that
    compute nothing (views, sizes, allocations would leave an empty segment), and all of a function
    that is transformed (torch.vmap). Nodes keep their order, so mutations do too.

    Args:
        gm: What Dynamo traced.
        splitting_ops: ``namespace::name`` or ``namespace::name.overload``, Python's operators by
            PyTorch's names for them (``aten::matmul`` for ``@``, ``aten::slice`` for ``x[:, :4]``);
            None for PyTorch's attention operators and cgplan::attention, of which any may be
            missing.

    Returns:
        A module that calls one submodule a piece, and the pieces in the order of their calls.

    Raises:
        ConfigError: an operator does not exist, or does not occur in the model.
    """
    names = {node: _names(node) for node in gm.graph.nodes}
    occurring = set().union(*names.values())
    refuse_missing_ops(splitting_ops or (), occurring)
    wanted = frozenset(DEFAULT_SPLITTING_OPS if splitting_ops is None else splitting_ops)
    splitting = {node for node, found in names.items() if found & wanted}
    runs = _runs(gm.graph.nodes, splitting)
    run_of = {node: index for index, run in enumerate(runs) for node in run.nodes}
    split = split_module(gm, None, lambda node: run_of[node], keep_original_order=True)  # type: ignore[arg-type]
    pieces = []
    for call in (node for node in split.graph.nodes if node.op == "call_module"):
        name = str(call.target)
        run = runs[int(name.removeprefix("submod_"))]
        first = next((node for node in run.nodes if node in splitting), run.nodes[0])
        call.stack_trace = first.stack_trace  # messages name the user's line of a piece
        nodes = [
            node for node in getattr(split, name).graph.nodes if operator_name(node) is not None
        ]
        operators = tuple(
            min(_aten_names(node), default=operator_name(node) or "") for node in nodes
        )
        pieces.append(Piece(name, run.eager, operators, operator_name(first) or ""))
    split.recompile()
    return split, tuple(pieces)


def refuse_missing_ops(wanted: Iterable[str], occurring: Collection[str]) -> None:
    """Raise ConfigError for a name that is not among those of the model's operators."""
    for missing in (name for name in wanted if name not in occurring):
        listed = sorted(
            n for n in occurring if not n.endswith(".default") and not n.startswith("python::")
        )
        what = "does not occur in the model" if _exists(missing) else "does not exist"
        raise _unusable(missing, what, listed, f"The model's operators are {', '.join(listed)}.")


def refuse_unknown_ops(splitting_ops: Sequence[str] | None) -> None:
    """Raise ConfigError for names that no operator has, before any trace; the trace says whether
    the others occur.

    Functions of PyTorch count, because Dynamo leaves calls as they were written: ``aten::softsign``
    is ``F.softsign``.
    """
    for wanted in splitting_ops or ():
        namespace, _, bare = wanted.removesuffix(".default").partition("::")
        if not _exists(wanted) and not any(
            hasattr(home, bare) for home in _FUNCTIONS.get(namespace, ())
        ):
            known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
            then = "Import the library that registers it before the capture."
            raise _unusable(wanted, "does not exist", known, then)


def _unusable(wanted: str, what: str, known: Collection[str], then: str) -> ConfigError:
    hint = did_you_mean(wanted, known, "Did you mean {}? ", 2)
    form = "" if _exists(wanted) else "Operators are named namespace::name, as in aten::softmax. "
    return ConfigError(
        f"compilation.splitting_ops: the operator {wanted!r} {what}", remedy=f"{form}{hint}{then}"
    )


def _exists(name: str) -> bool:
    namespace, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), op)
        return not overload or hasattr(packet, overload)
    except (AttributeError, RuntimeError):
        return False


def _names(node: fx.Node) -> set[str]:
    """The names that a splitting op may be given by."""
    name = operator_name(node)
    if name is None:
        return set()
    overload = (
        node.target._overloadname if isinstance(node.target, torch._ops.OpOverload) else "default"
    )
    return {name, f"{name}.{overload}", *_aten_names(node)}


def _aten_names(node: fx.Node) -> set[str]:
    """PyTorch's names of the Python operator of a node that makes a tensor; an index may have
    several.
    """
    if node.op != "call_function" or not isinstance(_value_of(node), Tensor):
        return set()
    if node.target is operator.getitem and isinstance(_value_of(node.args[0]), Tensor):
        steps = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return {
            f"aten::{_index_name(step)}"
            for step in steps
            if step is not None and step is not Ellipsis
        }
    return {f"aten::{_OF_PYTHON[node.target]}"} if node.target in _OF_PYTHON else set()


def _index_name(step: Any) -> str:
    if isinstance(step, slice):
        return "slice"
    is_number = isinstance(step, int) or (
        isinstance(step, fx.Node) and not isinstance(_value_of(step), Tensor)
    )
    return "select" if is_number and not isinstance(step, bool) else "index"


def _runs(nodes: Iterable[fx.Node], splitting: Collection[fx.Node]) -> list[_Run]:
    """The nodes in runs that are eager or not, in turns. Runs without work join the eager ones
    beside them.
    """
    runs: list[_Run] = []
    run_of: dict[fx.Node, _Run] = {}
    depth = 0  # of transforms such as torch.vmap, which switch a state of torch on and off
    for node in (node for node in nodes if node.op not in ("placeholder", "output", "get_attr")):
        name, eager = operator_name(node) or "", node in splitting
        producer: Any = node.args[0] if node.target is operator.getitem else None
        if producer in run_of and isinstance(_value_of(producer), tuple | list):
            run = run_of[producer]  # a tuple's items stay with it: tuples do not cross pieces
        else:
            opens = name.endswith("_increment_nesting")
            if not depth and (opens or not runs or runs[-1].eager != eager):
                runs.append(_Run(eager))
            run = runs[-1]
            run.eager |= eager
            depth += opens - name.endswith("_decrement_nesting")
        run.nodes.append(node)
        run_of[node] = run
    merged: list[_Run] = []
    for run in runs:
        eager = run.eager or (len(runs) > 1 and not any(map(_works, run.nodes)))
        if not merged or merged[-1].eager != eager:
            merged.append(_Run(eager))
        merged[-1].nodes += run.nodes
    return merged


def _works(node: fx.Node) -> bool:
    """Whether a node launches something: not a view, a size or an allocation."""
    name, target = operator_name(node) or "", node.target
    called: list[Any] = [target] if isinstance(target, torch._ops.OpOverload) else []
    if isinstance(target, torch._ops.OpOverloadPacket):
        called = [getattr(target, overload) for overload in target.overloads()]
    if any(o._schema.is_mutable and not any(a.is_out for a in o._schema.arguments) for o in called):
        return True
    bare = name.partition("::")[2]
    if bare.endswith("_") or bare == "setitem" or node.kwargs.get("out") is not None:
        return True
    if bare in ALLOCATIONS:
        return False
    value = _value_of(node)
    if value is None:
        return name.startswith("aten::")  # it returns nothing, so it writes somewhere
    given = {storage for argument in node.all_input_nodes for storage in _storages_of(argument)}
    return any(storage not in given for storage in _storages_of(node))


def _value_of(node: Any) -> Any:
    """The example value that the tracer left: fake tensors, which share storages where the real
    ones will.
    """
    return node.meta.get("example_value", node.meta.get("val"))


def _storages_of(node: fx.Node) -> list[int]:
    value = _value_of(node)
    found = []
    for tensor in value if isinstance(value, tuple | list) else [value]:
        if isinstance(tensor, Tensor):
            while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                tensor = torch._C._functorch.get_unwrapped(tensor)
            found.append(tensor.untyped_storage()._cdata)
    return found
