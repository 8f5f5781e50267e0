"""Inductor's own graph partition: the whole forward is compiled at once, and cut at operators no
graph may hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx

from cgplan.backends import GraphBackend
from cgplan.backends.host_sync import Args
from cgplan.graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper
from cgplan.modes import CUDAGraphMode
from cgplan.piecewise.split import Piece, operator_name
from cgplan.planning.build import DEFAULT_SPLITTING_OPS

Partition = Callable[[list[Any]], Any]
# What inductor sees of scaled_dot_product_attention.
_DECOMPOSED_ATTENTION = [
    f"aten::_scaled_dot_product_{kind}"
    for kind in (
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
]


def compile_for_all_sizes(
    module: fx.GraphModule, patches: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """A module that Dynamo is tracing, compiled by Inductor with the number of rows free."""
    # The tracer's own fake tensors: Inductor would give real ones sizes of their own.
    inputs = [node.meta["example_value"] for node in module.graph.nodes if node.op == "placeholder"]
    options = {"config_patches": patches} if patches else None
    compiled = torch._inductor.standalone_compile(
        module, inputs, dynamic_shapes="from_tracing_context", options=options
    )
    orders = [_order_of(value) if isinstance(value, Tensor) else None for value in inputs]

    def call(*args: Any) -> Any:
        # An eager piece may choose another kernel than the trace did, with another layout of its
        # result.
        result = compiled(
            *(
                a if order is None else _in_order(a, order)
                for a, order in zip(args, orders, strict=True)
            )
        )
        # Whether one result comes alone or in a tuple differs between versions of torch.
        return result[0] if is_alone and isinstance(result, tuple | list) else result

    (output,) = (node for node in module.graph.nodes if node.op == "output")
    is_alone = not isinstance(output.args[0], tuple | list)
    return call


def _order_of(traced: Tensor) -> tuple[int, ...] | None:
    """The dimensions of a traced tensor from the outermost to the innermost; None if there are gaps
    between rows.
    """
    numbers: list[Any] = [*traced.shape, *traced.stride()]
    hints = [n.node.hint if isinstance(n, torch.SymInt) else n for n in numbers]
    if None in hints:  # it depends on data
        return None
    sizes, strides = hints[: traced.dim()], hints[traced.dim() :]
    order = sorted(range(len(sizes)), key=lambda dim: -strides[dim])
    dense = all(
        strides[order[i]] == math.prod(sizes[dim] for dim in order[i + 1 :])
        for i in range(len(order))
    )
    return tuple(order) if dense else None


def _in_order(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    if tensor.permute(order).is_contiguous():
        return tensor
    return torch.empty_permuted(
        tensor.shape, order, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def structure_of(module: fx.GraphModule) -> Any:
    """A key that is equal for segments that compile to the same code: their graphs without
    names.
    """
    index: dict[fx.Node, int] = {}
    parts = []
    for node in module.graph.nodes:
        index[node] = len(index)
        args = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{index[n]}")
        value = node.meta.get("example_value")
        shape: Any = str(value) if isinstance(value, torch.SymInt) else ""
        if isinstance(value, Tensor):
            shape = (tuple(map(str, value.shape)), str(value.stride()), value.dtype)
        target: Any = str(node.target) if node.op.startswith("call") else ""
        if node.op == "get_attr":  # a body of a higher-order operator, or a constant
            held = getattr(module, str(node.target), None)
            target = structure_of(held) if isinstance(held, fx.GraphModule) else id(held)
        parts.append((node.op, target, str(args), str(shape)))
    return tuple(parts)


class _PartitionWrapper(CUDAGraphWrapper):
    """Captures one partition. `call` takes its arguments as Inductor passes them: in a list, the
    results of an operator that has several in a tuple. The wrapper sees them one by one.

    What Inductor allocates between partitions lies elsewhere on each call, and it does not say
    which arguments those are: all that are neither in the pool nor the forward's own (parameters,
    static buffers) are copied.
    """

    def __init__(self, partition: Partition, forward: PartitionedForward, **options: Any) -> None:
        super().__init__(
            lambda *args: partition(self._nested(args)), CUDAGraphMode.PIECEWISE, **options
        )
        self._forward = forward
        self._sizes: list[int | None] = []

    def call(self, args: list[Any]) -> Any:
        self._sizes = [len(arg) if isinstance(arg, tuple) else None for arg in args]
        return self(*[leaf for arg in args for leaf in (arg if isinstance(arg, tuple) else (arg,))])

    def _nested(self, leaves: tuple[Any, ...]) -> list[Any]:
        rest = iter(leaves)
        return [next(rest) if size is None else tuple(islice(rest, size)) for size in self._sizes]

    def _copied_arguments(self, args: Args, pool: Any) -> tuple[int, ...]:
        own = {
            t.untyped_storage().data_ptr() for t in self._forward.arguments if isinstance(t, Tensor)
        }
        return tuple(
            i
            for i, arg in enumerate(args)
            if isinstance(arg, Tensor)
            and arg.device == self.backend.device
            and arg.untyped_storage().data_ptr() not in own
            and not self.backend.in_pool(arg, pool)
        )


class PartitionedForward:
    """A forward that Inductor compiled, its partitions wrapped; ``arguments`` are those of the call
    under way.
    """

    def __init__(self, backend: GraphBackend, options: CUDAGraphOptions) -> None:
        self.arguments: tuple[Any, ...] = ()
        self._backend = backend
        self._options = options
        self._count = 0  # partitions

    def compile(self, gm: fx.GraphModule, splitting_ops: Sequence[str] | None) -> tuple[Piece, ...]:
        """Compile once, for all sizes; partitions are cut at these operators and at those tagged
        cudagraph_unsafe.

        Returns the partitions, whose operators Inductor has fused, and the operators between them.
        """
        wanted = list(DEFAULT_SPLITTING_OPS if splitting_ops is None else splitting_ops)
        named = [name for name in map(operator_name, gm.graph.nodes) if name is not None]
        between = [Piece(name, True, (name,)) for name in named if name in wanted]
        captured = tuple(name for name in named if name not in wanted)
        if "aten::scaled_dot_product_attention" in wanted:
            wanted += _DECOMPOSED_ATTENTION
        hook = torch._inductor.utils._unstable_customized_partition_wrapper
        before = hook.wrapper
        torch._inductor.utils.set_customized_partition_wrappers(self._wrap)
        try:
            self._compiled = compile_for_all_sizes(
                gm, {"graph_partition": True, "custom_should_partition_ops": wanted}
            )
        finally:
            hook.wrapper = before
        return (
            *(Piece(f"partition_{i}", False, () if i else captured) for i in range(self._count)),
            *between,
        )

    def __call__(self, *args: Any) -> Any:
        self.arguments = args
        try:
            return self._compiled(*args)
        finally:
            self.arguments = ()

    def _wrap(self, partition: Partition, metadata: Any) -> Partition:
        self._count = metadata.num_partitions
        return _PartitionWrapper(partition, self, backend=self._backend, options=self._options).call
