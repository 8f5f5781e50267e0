"""One size of batch, ready to be called."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cgplan.backends.context import ForwardContext, reset_context, set_context
from cgplan.buffers.batch import never
from cgplan.buffers.static import Copier, CopyIn
from cgplan.captures.model_graphs import DeclaredMetadata, ModelGraphs
from cgplan.graphs.wrapper import CUDAGraphEntry
from cgplan.modes import CUDAGraphMode
from cgplan.runner.routing import RoutedBatch
from cgplan.runner.stats import BatchCount

Values = Sequence[Tensor]
Replay = Callable[[], None]
Read = Callable[[], Any]
NO_COMPARISON = -1


@dataclass(slots=True)
class Due:
    """Replays until the next comparison (negative: none); the number of the last one compared."""

    left: int = NO_COMPARISON
    verified_at: int = 0


@dataclass(slots=True, eq=False)
class PreparedCall:
    """Calls with tensors of the same shapes, dtypes and devices.

    Attributes:
        output: Returns the last replay's output, without padding.
    """

    route: RoutedBatch
    count: BatchCount
    copy_in: CopyIn
    replay: Replay
    output: Read
    needs_check: bool
    flags: tuple[Any, ...] = ()
    is_alike: Callable[..., bool] = never
    due: Due = field(default_factory=Due)

    @classmethod
    def of(
        cls,
        route: RoutedBatch,
        count: BatchCount,
        values: Values | None,
        graphs: ModelGraphs,
        copier_of: Callable[[tuple[int, ...]], Copier],
    ) -> PreparedCall:
        """``values=None``: staged batches."""
        mode = route.mode
        descriptor = route.descriptor
        batch = route.batch
        if mode is CUDAGraphMode.NONE:
            return cls(route, count, *_runs_eagerly(route, graphs), needs_check=False)
        copier = copier_of(descriptor.sizes)
        copy = copier.for_batch(
            batch.num_tokens,
            batch.num_reqs or 0,
            descriptor.num_tokens,
            graphs.padded_reqs(descriptor),
        )
        copy_in = copy.pad if values is None else copy.path(values)
        entry = graphs.entry(route.key)
        if entry is None:
            replay, read = _runs_wrappers(route, graphs, copier)
        else:
            read = graphs.outputs.reader(entry.output, batch)
            if mode is CUDAGraphMode.FULL:
                replay = graphs.backend.replay_of(entry.graph)
            else:
                replay = _pieces(entry, route, graphs, copier)
        return cls(route, count, copy_in, replay, read, needs_check=True)


def _runs_eagerly(
    route: RoutedBatch,
    graphs: ModelGraphs,
) -> tuple[CopyIn, Replay, Read]:
    held: list[Any] = []  # the tensors, then the output
    clone = graphs.outputs.clone

    def take(values: Values, *_: object) -> None:
        held[:] = [values]

    def run() -> None:
        with torch._C._EnableTorchFunction():
            held[:] = [graphs.run_unpadded(route.unpadded, held.pop())]

    def output() -> Any:  # it may be the model's or the caller's
        return tree_map_only(Tensor, torch.clone, held.pop()) if clone else held.pop()

    return take, run, output


def _runs_wrappers(
    route: RoutedBatch,
    graphs: ModelGraphs,
    copier: Copier,
) -> tuple[Replay, Read]:
    descriptor = route.descriptor
    outputs = graphs.outputs
    held: list[Any] = []

    def run() -> None:
        before = copier.buffers.versions()
        try:
            with torch._C._EnableTorchFunction():
                held[:] = [graphs.run_wrapped(route.key, graphs.views(descriptor))]
        finally:
            copier.note_writes(before)
        outputs.check(held[0], descriptor, graphs.padded_reqs(descriptor))

    def output() -> Any:
        return outputs.cut(held.pop(), route.batch)

    return run, output


def _pieces(
    entry: CUDAGraphEntry,
    route: RoutedBatch,
    graphs: ModelGraphs,
    copier: Copier,
) -> Replay:
    """Eager pieces may write into static buffers."""
    scope = graphs.scope
    replay = entry.graph.replay
    tensors = [buffer.tensor for buffer in copier.buffers.buffers.values()]
    views = graphs.views(route.descriptor)
    metadata = {name: views[name] for name in graphs.config.metadata}
    version = operator.attrgetter("_version")

    def run() -> None:
        before = [*map(version, tensors)]  # `versions`, without a call
        given = DeclaredMetadata()
        for name, view in metadata.items():
            given[name] = view.detach()  # a piece may change the object
        token = set_context(ForwardContext(route.mode, route.descriptor, given, scope))
        try:
            with torch.no_grad(), torch._C._EnableTorchFunction():
                replay()
        finally:
            reset_context(token)
            if [*map(version, tensors)] != before:
                copier.note_writes(before)

    return run
