"""Segments that Inductor compiles, and its own graph partition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from cgplan.backends import GraphBackend
from cgplan.backends.host_sync import Args, Function
from cgplan.graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper
from cgplan.modes import CUDAGraphMode
from cgplan.piecewise.split import Piece, operator_name
from cgplan.planning.build import DEFAULT_SPLITTING_OPS

Partition = Callable[[list[Any]], Any]
Order = tuple[int, ...]  # dimensions, the outermost first
_DECOMPOSED_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
)


def compile_for_all_sizes(
    module: fx.GraphModule,
    patches: dict[str, Any] | None = None,
) -> Function:
    """With the number of rows free."""
    # inductor gives real tensors other sizes
    inputs = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            inputs.append(node.meta["example_value"])
    compiled = torch._inductor.standalone_compile(
        module,
        inputs,
        dynamic_shapes="from_tracing_context",
        options={"config_patches": patches} if patches else None,
    )
    orders = list(map(_order_of, inputs))
    output = module.graph.output_node().args[0]
    is_alone = not isinstance(output, tuple | list)

    def call(*args: Any) -> Any:
        # an eager piece may give another layout than the trace
        result = compiled(*map(_in_order, args, orders))
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


def _in_order(value: Any, order: Order | None) -> Any:
    if order is None or value.permute(order).is_contiguous():
        return value
    ordered = torch.empty_permuted(
        value.shape,
        order,
        dtype=value.dtype,
        device=value.device,
    )
    return ordered.copy_(value)


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
        parts.append((node.op, target, str(arguments), facts))
    return tuple(parts)


class _PartitionWrapper(CUDAGraphWrapper):
    """Copies all arguments but those in the pool and the forward's own (parameters, static
    buffers): Inductor does not say which ones it allocates.
    """

    def __init__(self, partition: Partition, forward: PartitionedForward, **options: Any) -> None:
        def run(*leaves: Any) -> Any:
            return partition(tree_unflatten(leaves, self._spec))

        super().__init__(run, CUDAGraphMode.PIECEWISE, **options)
        self._forward = forward
        self._spec: Any = None

    def call(self, args: list[Any]) -> Any:
        leaves, self._spec = tree_flatten(args)
        return self(*leaves)

    def _copied_arguments(self, args: Args, pool: Any) -> tuple[int, ...]:
        own = set()
        for tensor in self._forward.arguments:
            if isinstance(tensor, Tensor):
                own.add(tensor.untyped_storage().data_ptr())
        copied = []
        for i, arg in enumerate(args):
            if not isinstance(arg, Tensor):
                continue
            if arg.device != self.backend.device or self.backend.in_pool(arg, pool):
                continue
            if arg.untyped_storage().data_ptr() not in own:
                copied.append(i)
        return tuple(copied)


@dataclass(eq=False)
class PartitionedForward:
    """``arguments`` are those of this call."""

    backend: GraphBackend
    options: CUDAGraphOptions
    arguments: Args = ()
    num_partitions: int = 0

    def compile(
        self,
        gm: fx.GraphModule,
        splitting_ops: Sequence[str] | None,
    ) -> tuple[Piece, ...]:
        """Cuts at these operators and those tagged cudagraph_unsafe. Returns the partitions, and
        the operators between.
        """
        wanted = list(DEFAULT_SPLITTING_OPS if splitting_ops is None else splitting_ops)
        captured = []
        between = []
        for node in gm.graph.nodes:
            name = operator_name(node)
            if name in wanted:
                between.append(Piece(name, True, (name,)))
            elif name is not None:
                captured.append(name)
        if "aten::scaled_dot_product_attention" in wanted:
            wanted += _DECOMPOSED_ATTENTION
        patches = {"graph_partition": True, "custom_should_partition_ops": wanted}
        hook = torch._inductor.utils._unstable_customized_partition_wrapper
        before = hook.wrapper
        torch._inductor.utils.set_customized_partition_wrappers(self._wrap)
        try:
            self._compiled = compile_for_all_sizes(gm, patches)
        finally:
            hook.wrapper = before
        partitions = []
        for number in range(self.num_partitions):
            operators = () if number else tuple(captured)
            partitions.append(Piece(f"partition_{number}", False, operators))
        return (*partitions, *between)

    def __call__(self, *args: Any) -> Any:
        self.arguments = args
        try:
            return self._compiled(*args)
        finally:
            self.arguments = ()

    def _wrap(
        self,
        partition: Partition,
        metadata: Any,
    ) -> Partition:
        self.num_partitions = metadata.num_partitions
        wrapper = _PartitionWrapper(
            partition,
            self,
            backend=self.backend,
            options=self.options,
        )
        return wrapper.call
