"""What eager pieces of a traced forward return: which of it lies elsewhere on each call, and must not be written to.

Note [Fresh results]
    A segment reads a fresh result of an eager piece from a slot of its own, and the result itself goes on to whoever
    else reads it. A segment that wrote into its slot would leave the others the old values; so that is refused. An
    eager piece may write into a fresh result, unless a view that a segment has made of its copy is read afterwards, and
    into such a view, unless the result is. What a piece returns of its arguments' memory is as fresh as these are: a
    fresh result that is handed through is copied again, anything else lies where it lay at capture, and may be written
    to.

    A tensor object that was made in one piece must keep its shape in the others (``unsqueeze_``): on replay a segment
    runs no code that would change it, and an eager piece would change it once more on each call. Eager pieces may do
    so to fresh results, which are other objects each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from cgplan.errors import CaptureError
from cgplan.piecewise.memory_homes import MemoryHomes
from cgplan.piecewise.split import Piece, operator_name, storages_of, value_of

_IN_PLACE = frozenset(
    f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
) | {"setitem", "ilshift", "irshift"}


def fresh_arguments(split: fx.GraphModule, pieces: Sequence[Piece]) -> dict[str, tuple[int, ...]]:
    """For each piece, the positions of the arguments that an eager piece made, see Note [Fresh results].

    Raises:
        CaptureError: a segment writes into one of them, a piece writes into one of two copies that are both read, or
            changes the shape of another piece's tensor.
    """
    memory = MemoryHomes(split, {piece.name for piece in pieces if not piece.eager})
    eager = {piece.name for piece in pieces if piece.eager}
    found: dict[str, tuple[int, ...]] = {}
    for node in split.graph.nodes:
        if node.op == "call_module":
            name = str(node.target)
            found[name] = tuple(i for i, arg in enumerate(node.args) if memory.is_fresh(arg))
            kept = [i for i in range(len(node.args)) if name not in eager or i not in found[name]]
            _refuse_changed_shapes(getattr(split, name), kept)
            if name not in eager:
                _refuse_writes(getattr(split, name), found[name])
    _refuse_stale_copies(split, memory)
    return found


def written_arguments(segment: fx.GraphModule) -> tuple[int, ...]:
    """The positions of the arguments whose memory a segment writes to."""
    written = {s for node in segment.graph.nodes for target in _written(node) for s in storages_of(target)}
    arguments = [node for node in segment.graph.nodes if node.op == "placeholder"]
    return tuple(i for i, node in enumerate(arguments) if written & set(storages_of(node)))


def _refuse_stale_copies(split: fx.GraphModule, memory: MemoryHomes) -> None:
    """Refuse a write that the trace sees through all values of one memory, and that reaches one copy of it only."""
    order = {node: index for index, node in enumerate(split.graph.nodes)}
    copied = {s for node, storages in memory.storages.items() if memory.is_fresh(node) for s in storages}
    for call in (node for node in order if node.op == "call_module"):
        given = list(memory.arguments(call))
        for node in getattr(split, str(call.target)).graph.nodes:
            for storages in (copied & set(storages_of(target)) for target in _written(node)):
                hit = {home for _, homes, inside in given if inside & storages for home in homes}
                stale = [
                    value
                    for value, homes in memory.homes.items()
                    if hit and memory.storages[value] & storages and order[value] <= order[call] and homes != hit
                ]
                if len(hit) > 1 or any(order[user] >= order[call] for value in stale for user in value.users):
                    raise _writes_to_a_copy(node)


def _refuse_writes(segment: fx.GraphModule, fresh: Sequence[int]) -> None:
    arguments = [node for node in segment.graph.nodes if node.op == "placeholder"]
    kept = {storage for i in fresh for storage in storages_of(arguments[i])}
    for node in segment.graph.nodes:
        for target in _written(node):
            if kept & set(storages_of(target)):
                raise _writes_to_a_copy(node)


def _writes_to_a_copy(node: fx.Node) -> CaptureError:
    return CaptureError(
        f"the model writes into what an eager piece returned: {operator_name(node)}, at {_line(node)}",
        remedy="Make a new tensor instead (x = x * 2 for x.mul_(2)), or use compilation.splitting_modules, which "
        "allows it.",
    )


def _refuse_changed_shapes(piece: fx.GraphModule, kept: Sequence[int]) -> None:
    arguments = [node for node in piece.graph.nodes if node.op == "placeholder"]
    values = {id(value) for i in kept if isinstance(value := value_of(arguments[i]), torch.Tensor)}
    for node in piece.graph.nodes:
        target = node.args[0] if node.args and _changes_shape(node) else None
        # An operator may return its argument itself (`contiguous`): then the tracer's value is the same object, too.
        if isinstance(target, fx.Node) and id(value_of(target)) in values:
            raise CaptureError(
                f"the model changes the shape of a tensor in place, in another piece than the one that made it: "
                f"{operator_name(node)}, at {_line(node)}",
                remedy="Make a view instead: x = x.unsqueeze(0) for x.unsqueeze_(0).",
            )


def _changes_shape(node: fx.Node) -> bool:
    """Whether a node changes shape, strides or memory of a tensor object, as torch tags such operators."""
    packet: Any = node.target
    if not isinstance(packet, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        home, _, bare = (operator_name(node) or "").partition("::")
        packet = getattr(torch.ops.aten, bare, None) if home == "aten" and bare.endswith("_") else None
    if isinstance(packet, torch._ops.OpOverloadPacket):
        return any(torch.Tag.inplace_view in getattr(packet, name).tags for name in packet.overloads())
    return isinstance(packet, torch._ops.OpOverload) and torch.Tag.inplace_view in packet.tags


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that a node writes to."""
    out = node.kwargs.get("out")
    yield from (item for item in (out if isinstance(out, tuple | list) else (out,)) if isinstance(item, fx.Node))
    target = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = target.default
    if isinstance(target, torch._ops.OpOverload):
        names = [
            argument for argument in target._schema.arguments if argument.alias_info and argument.alias_info.is_write
        ]
        for argument in names:
            at = target._schema.arguments.index(argument)
            value = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(value, fx.Node):
                yield value
        return
    name = (operator_name(node) or "").partition("::")[2]
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    if in_place and node.args and isinstance(node.args[0], fx.Node):
        yield node.args[0]


def _line(node: fx.Node) -> str:
    """The user's line that a node came from."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip().startswith("File ")]
    return lines[-1] if lines else "an unknown line"


__all__ = ["fresh_arguments", "written_arguments"]
