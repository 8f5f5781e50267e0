"""Which operators PIECEWISE graphs hold of a model that is not traced, and which run between them.

Note [Seen, not read]
    A CUDA graph knows kernels alone, so operators are looked at while they run. Not in the capture itself: code that
    the model has compiled does not run under a dispatch mode, and a capture of other code would be another graph. After
    it, then, in one eager forward of the smallest key, as warm-ups run it. Compiled code is listed by the operators
    that it was compiled from; where cgplan has split it, by those of its segments. Kernels that do not pass PyTorch's
    dispatcher are not listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from cgplan.descriptors import BatchDescriptor
from cgplan.graphs.host_sync import OperatorOnlooker, tensors_in
from cgplan.graphs.recorder import computes
from cgplan.modes import CUDAGraphMode
from cgplan.runtime.ambient import random_state_kept
from cgplan.runtime.graphed import GraphedModel
from cgplan.runtime.segments import SegmentWrapper
from cgplan.runtime.wrapper import CUDAGraphWrapper

R = TypeVar("R")


class _Sides(OperatorOnlooker):
    """Counts operators: those in segments as captures record them, others as eager code calls them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.in_segment = True
        self.saw_segments = False
        self.captured, self.eager = Counter[str](), Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count, and run."""
        if self.in_segment:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return self.run(func, args, kwargs or {})

    def run_piece(self, piece: Callable[[], R]) -> R:
        """Run an eager piece between segments."""
        before, self.in_segment = self.in_segment, False
        try:
            return piece()
        finally:
            self.in_segment = before

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Count what a replay would run."""
        given = {_memory(tensor) for tensor in tensors_in((args, kwargs))}
        result = super().run(func, args, kwargs)
        leaves = tree_leaves(result)
        made = {_memory(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)} - given
        if computes(func, leaves, makes_memory=bool(made)):
            (self.captured if self.in_segment else self.eager)[func._schema.name] += 1
        return result


class _Marked:
    """What a wrapper holds, while it is looked at: says when it runs, and is otherwise like it."""

    def __init__(self, runnable: Callable[..., Any], sides: _Sides) -> None:
        self._runnable, self._sides = runnable, sides

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._sides.in_segment = self._sides.saw_segments = True
        try:
            return self._runnable(*args, **kwargs)
        finally:
            self._sides.in_segment = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runnable, name)


def note_operators(graphed: GraphedModel) -> None:
    """Have the route know its operators, once a PIECEWISE key is captured; see Note [Seen, not read].

    The forward runs on what the static buffers hold, which is padding. The model's attributes and torch's random
    numbers are put back; what it writes in place stays, as after a warm-up. A forward that fails here is not looked at.
    """
    route, scope = graphed.route, graphed.scope
    wrappers = [wrapper for wrapper in scope.wrappers if wrapper.runtime_mode is CUDAGraphMode.PIECEWISE]
    captured = [e.descriptor for wrapper in wrappers for e in wrapper.entries.values() if e.scope is scope]
    if route.name not in ("modules", "wrappers") or any(route.operators) or not captured:
        return
    descriptor, state, sides = min(captured, key=_size), graphed.state(), _Sides(graphed.backend.device)
    marked = wrappers if route.name == "wrappers" else []
    try:
        with (
            suppress(Exception),
            random_state_kept(graphed.backend.device, graphed.generators),
            _marked(marked, sides),
            sides,
        ):
            graphed.run_eager(descriptor, graphed.views(descriptor))
            route.operators = sides.captured, sides.eager
    finally:
        if state is not None:
            state.restore()
    if marked and not sides.saw_segments:  # the model is compiled, and has its wrappers in the code
        of_traces = [w.operators for w in marked if isinstance(w, SegmentWrapper) and descriptor in w.entries]
        route.operators = Counter(name for names in of_traces for name in names), Counter()


@contextmanager
def _marked(wrappers: Sequence[CUDAGraphWrapper], sides: _Sides) -> Iterator[None]:
    """A block in which these wrappers say what runs in them. Without any, all but eager pieces is in segments."""
    held = [wrapper.runnable for wrapper in wrappers]
    sides.in_segment = not wrappers
    try:
        for wrapper in wrappers:
            wrapper.runnable = _Marked(wrapper.runnable, sides)
        yield
    finally:
        for wrapper, runnable in zip(wrappers, held, strict=True):
            wrapper.runnable = runnable


def _size(descriptor: BatchDescriptor) -> tuple[int, int]:
    return descriptor.num_tokens, descriptor.num_active_loras


def _memory(tensor: torch.Tensor) -> int:
    """Which memory a tensor lies in; one without strides, a sparse one, is memory of its own."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


__all__ = ["note_operators"]
