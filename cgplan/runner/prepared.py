"""One size of batch, ready to be called: how it is copied in, run and cut.

Note [The hot path]
    A decode step of a small model takes the device less than a millisecond, so each microsecond that a call costs the
    host counts. A call therefore looks its batch up by the shapes, dtypes and devices of its tensors, copies by one
    launch, replays, and returns new tensor objects on memory that is known. The rest is prepared on the first call of
    its kind, and kept until graphs are captured or freed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from cgplan.backends.context import ForwardContext, reset_context, set_context
from cgplan.buffers.copier import Copier, CopyIn
from cgplan.buffers.outputs import OutputRows
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.graphs.wrapper import CUDAGraphEntry
from cgplan.modes import CUDAGraphMode
from cgplan.runner.routing import Route
from cgplan.runner.stats import BatchCount

Values = Sequence[torch.Tensor]


def on_device(values: Values, device: torch.device) -> list[torch.Tensor]:
    """The tensors, those on the host copied to the device."""
    return [value if value.device == device else value.to(device) for value in values]


@dataclass(slots=True, eq=False)
class PreparedCall:
    """Calls of one kind: as many rows, tensors of the same shapes, dtypes and devices.

    Attributes:
        route: Where they go.
        count: How many there were.
        copy_in: Brings the tensors into the static buffers, given the current stream's handle.
        replay: Launches the graph, or its segments and eager pieces in turns; or runs the model itself.
        output: Returns the output of the last replay, without its padding.
        needs_check: Whether the addresses of the model's memory have to be checked before the next call.
    """

    route: Route
    count: BatchCount
    copy_in: CopyIn
    replay: Callable[[], None]
    output: Callable[[], Any]
    needs_check: bool

    @classmethod
    def of(
        cls,
        route: Route,
        count: BatchCount,
        values: Values | None,
        graphed: ModelGraphs,
        outputs: OutputRows,
        copier: Copier,
    ) -> PreparedCall:
        """Prepare calls with such tensors; ``values=None``: with a batch that is written into the static buffers."""
        mode, descriptor, tokens, reqs = route.mode, route.descriptor, route.batch.num_tokens, route.batch.num_reqs
        if mode is CUDAGraphMode.NONE:
            device, names = graphed.backend.device, tuple(graphed.buffers.buffers)

            def run_eager(values: Values) -> Any:
                tensors = dict(zip(names, on_device(values, device), strict=True))
                return graphed.run_eager(route.unpadded, tensors)

            run = _ModelRun(
                run_eager, lambda out: tree_map_only(torch.Tensor, torch.clone, out) if outputs.clone else out
            )
            return cls(route, count, run.copy_in, run.replay, run.output, needs_check=False)
        copy = copier.prepare(tokens, reqs or 0, descriptor.num_tokens, graphed.padded_reqs(descriptor))
        copy_in = copy.pad if values is None else copy.path(values)
        entry = graphed.entry((mode, descriptor))
        if entry is None:

            def run_padded(_: Values) -> Any:
                before = graphed.buffers.versions()
                try:
                    output = graphed.run_graphed(mode, descriptor, graphed.views(descriptor))
                finally:
                    copier.note_writes(before)
                outputs.check(output, descriptor, graphed.padded_reqs(descriptor))
                return output

            run = _ModelRun(run_padded, lambda out: outputs.cut(out, tokens, reqs))
            return cls(route, count, copy_in, run.replay, run.output, needs_check=True)
        if mode is CUDAGraphMode.FULL:
            replay = graphed.backend.launcher(entry.graph)
        else:
            replay = _replay_of_pieces(entry, route, graphed, copier)
        return cls(route, count, copy_in, replay, outputs.reader(entry.output, tokens, reqs), needs_check=True)


class _ModelRun:
    """The model itself in place of a replay. It holds the batch's tensors until it runs, and then the output until that
    is asked for.
    """

    def __init__(self, run: Callable[[Values], Any], finish: Callable[[Any], Any]) -> None:
        self._run, self._finish = run, finish
        self._held: Any = ()

    def copy_in(self, values: Values, stream: int) -> None:  # noqa: ARG002
        self._held = values

    def replay(self) -> None:
        values, self._held = self._held, ()
        self._held = self._run(values)

    def output(self) -> Any:
        output, self._held = self._held, ()
        return self._finish(output)


def _replay_of_pieces(entry: CUDAGraphEntry, route: Route, graphed: ModelGraphs, copier: Copier) -> Callable[[], None]:
    """The replay of a PIECEWISE key: its eager pieces read the forward context and may write into static buffers."""
    mode, descriptor, scope, replay = route.mode, route.descriptor, graphed.scope, entry.graph.replay
    tensors = [buffer.tensor for buffer in graphed.buffers.buffers.values()]
    views, names = graphed.views(descriptor), tuple(graphed.config.metadata)
    metadata = [views[name] for name in names]
    version = operator.attrgetter("_version")

    def run() -> None:
        before = [*map(version, tensors)]
        given = dict(zip(names, map(torch.Tensor.detach, metadata), strict=True))
        token = set_context(ForwardContext(mode, descriptor, given, scope))
        try:
            with torch.no_grad():
                replay()
        finally:
            reset_context(token)
            if [*map(version, tensors)] != before:
                copier.note_writes(before)

    return run
