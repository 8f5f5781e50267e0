"""Segments that Inductor compiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from cgplan.backends.host_sync import Function

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
