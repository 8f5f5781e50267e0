"""A split forward: its pieces called in turns, and for a key whose segments are all captured, a recorded way.

Note [Recorded replays]
    Between two segments the code that torch.fx made, a wrapper, its look-ups and checks and a mode for the copy into
    each slot take longer than the launch of a graph. Once all segments of a key are captured, and checked as often as
    asked, what a replay does is known: launch a graph, call an eager piece, copy its results into the slots of the next
    graph, and so on. That is written down as one function for each key, whose graphs, slots and segments' outputs are
    globals. What may change between calls is an argument of it, as Dynamo's code reads it anew each time: inputs,
    parameters, buffers, sizes. What eager pieces return is a local. Eager pieces are called themselves, so they see the
    forward context and raise as ever.

    Where a runner traced the model, the code that Dynamo made around the graph is done by that function, too, see Note
    [Code around a graph] in prologue.py: then only what eager pieces are given is read anew.

    Eager pieces are handed the segments' outputs themselves. Where one changes a tensor object (``transpose_`` in the
    kernel of a custom operator) in the call before, nothing is recorded: the wrappers hand out what is as it was.

    The function goes with the graphs that it launches: any capture and any reset of a segment drops all of them. Where
    something is not as it was (gradients are on, an address differs under ``always``), the wrappers do the call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import fx

from cgplan.backends.context import CaptureScope, ForwardContext, current_forward_context
from cgplan.errors import SealedError
from cgplan.graphs.addresses import AddressManifest
from cgplan.graphs.wrapper import CUDAGraphEntry, CUDAGraphWrapper
from cgplan.graphs.written import LARGEST
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.piecewise.prologue import Prologue
from cgplan.piecewise.recorded import Program
from cgplan.piecewise.split import Piece, operator_name

RETRACED = (
    "Capture the model itself, without torch.compile: then there is one trace, and it has no guards. Else see to it "
    "that one trace serves all sizes: torch._dynamo.maybe_mark_dynamic(x, 0) on each input ahead of the compiled call, "
    "or dynamic=True where no size equals another dimension."
)
_MODES = ("set_grad_enabled", "enter_inference_mode", "enter_autocast", "inference_mode")


class SegmentWrapper(CUDAGraphWrapper):
    """Captures one segment of a split forward.

    Attributes:
        changed: Called whenever its graphs change.
        trace: The same object for all segments of a trace.
        guarded: Whether Dynamo may trace the model anew, see `traces.py`.

    Args:
        written: Positions of the arguments that it writes to; warm-ups leave them as they were, but for what is larger
            than ``LARGEST`` bytes (a KV cache, into which the same values are written again).
    """

    _compares_copied: ClassVar[bool] = False

    def __init__(
        self, runnable: Callable[..., Any], *, guarded: bool = False, written: Sequence[int] = (), **options: Any
    ) -> None:
        super().__init__(runnable, CUDAGraphMode.PIECEWISE, **options)
        self._written = written
        self.changed: Callable[[], None] = lambda: None
        self.trace: object = self
        self.guarded = guarded

    def reset(self, scope: CaptureScope | None = None) -> None:
        """As CUDAGraphWrapper's."""
        self.changed()
        super().reset(scope)

    def take_out(
        self, scope: CaptureScope, descriptors: Collection[BatchDescriptor]
    ) -> list[tuple[Any, Callable[[], None]]]:
        """As CUDAGraphWrapper's."""
        self.changed()
        return super().take_out(scope, descriptors)

    def ready(self, context: ForwardContext) -> CUDAGraphEntry | None:
        """The entry that serves a context without anything left to be captured or checked; None if there is none."""
        entry = self.entries.get(context.descriptor)
        if entry is None or entry.scope is not context.scope:
            return None
        unchecked = entry.manifest is not None and context.descriptor not in self._checked
        return None if unchecked else entry

    def _missing(self, descriptor: BatchDescriptor) -> SealedError:
        if not self.guarded:
            return super()._missing(descriptor)
        return SealedError(
            f"torch.compile has compiled the model anew since the captures, and that code has no PIECEWISE graph for "
            f"{descriptor}",
            remedy=RETRACED,
        )

    def _warm_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run it as if it had not run: what it writes to has been computed once, by the pieces before it."""
        given = [args[i] for i in self._written if args[i].nbytes <= LARGEST and 0 not in args[i].stride()]
        saved = [tensor.clone() for tensor in given]
        super()._warm_up(args, kwargs)
        for tensor, before in zip(given, saved, strict=True):
            tensor.copy_(before)

    def _capture(self, *args: Any) -> tuple[CUDAGraphEntry, Any]:
        self.changed()
        return super()._capture(*args)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What serves one key: the function, and what it was recorded for."""

    call: Callable[..., Any]
    direct: Callable[..., Any] | None  # the same with what Dynamo's code does around it
    scope: CaptureScope | None
    manifest: AddressManifest | None  # where addresses are looked at on each call
    read: tuple[int, ...]  # the arguments that graphs read
    metadata: frozenset[str]  # what they read of the context's metadata outside of runners


class SplitForward:
    """Calls the pieces of a split graph, see Note [Recorded replays].

    Args:
        split: The graph: a call of a submodule for each piece.
        runnables: What stands for each submodule: segments are SegmentWrappers.
        pieces: Which of them are eager.

    Attributes:
        split: The graph module; its ``forward`` is the way of the wrappers.
        recorded: What was recorded, by key.
    """

    def __init__(
        self, split: fx.GraphModule, runnables: Mapping[str, Callable[..., Any]], pieces: Sequence[Piece]
    ) -> None:
        self.split = split
        self.recorded: dict[BatchDescriptor, _Recorded] = {}
        changes_modes = any(
            (operator_name(node) or "").endswith(_MODES)
            for piece in pieces
            for node in getattr(split, piece.name).graph.nodes
        )
        self._segments = {n: runnable for n, runnable in runnables.items() if isinstance(runnable, SegmentWrapper)}
        copied = {name: wrapper.options.copied_arguments for name, wrapper in self._segments.items()}
        self._program = None if changes_modes or not copied else Program.of(split, copied)
        trace = object()
        for name, runnable in runnables.items():
            # In the instance's own dict it is found at once; as a submodule only after a failed look-up.
            del split._modules[name]
            split.__dict__[name] = runnable
            if isinstance(runnable, SegmentWrapper):
                runnable.changed, runnable.trace = self.recorded.clear, trace
        self._direct: CodeType | None = None
        _ = split.code  # generates it: until then `forward` is a stub that does so on each call
        self._by_wrappers: Callable[..., Any] = split.forward

    @property
    def num_results(self) -> int | None:
        """How many results the graph has; None where it cannot be recorded."""
        return None if self._program is None or self._program.results is None else len(self._program.results)

    def __call__(self, *args: Any) -> Any:
        """The forward; segments capture or replay as the forward context says."""
        context = current_forward_context()
        if context is None or context.runtime_mode is not CUDAGraphMode.PIECEWISE or torch.is_grad_enabled():
            return self._by_wrappers(*args)
        recorded = self.recorded.get(context.descriptor)
        if recorded is not None and recorded.scope is context.scope:
            manifest = recorded.manifest
            if manifest is None or manifest.still_holds(_roots(recorded.read, recorded.metadata, args, context)):
                return recorded.call(*args)
            return self._by_wrappers(*args)  # they say what has moved
        output = self._by_wrappers(*args)
        if self._program is not None and (context.scope is None or not context.scope.is_open):
            self._record(self._program, args, context)
        return output

    def take_prologue(self, prologue: Prologue) -> None:
        """Let keys that are recorded from now on do what Dynamo's code does, so that `direct` can be called instead."""
        if self._program is not None:
            self._direct = self._program.with_prologue(prologue)
            self.recorded.clear()

    def direct(self, context: ForwardContext) -> Callable[..., Any] | None:
        """A function of (inputs, model, globals of the traced function) that does a call in this context as Dynamo's
        code would, and reads less; None where there is none, or addresses have to be looked at.
        """
        if context.runtime_mode is not CUDAGraphMode.PIECEWISE or torch.is_grad_enabled():
            return None
        recorded = self.recorded.get(context.descriptor)
        return None if recorded is None or recorded.scope is not context.scope else recorded.direct

    def _record(self, program: Program, args: tuple[Any, ...], context: ForwardContext) -> None:
        """Record the key that the wrappers have just served, if nothing is left to be checked."""
        entries: dict[str, CUDAGraphEntry] = {}
        for name, wrapper in self._segments.items():
            entry = wrapper.ready(context)
            if entry is None:
                return
            entries[name] = entry
        manifest, some = None, next(iter(self._segments.values()))
        metadata = frozenset[str]().union(*(entry.metadata for entry in entries.values()))
        if some.options.policy(context.scope) == "always":
            roots = _roots(program.read, metadata, args, context)
            manifest = AddressManifest.of(roots, some.backend.device, repeats=True)
            manifest.check(roots, what=f"{CUDAGraphMode.PIECEWISE} {context.descriptor}")  # compiles itself
        call, direct = program.bind(program.code, self.split, entries), None
        if self._direct is not None and manifest is None:
            direct = program.bind(self._direct, self.split, entries)
        recorded = _Recorded(call, direct, context.scope, manifest, program.read, metadata)
        self.recorded[context.descriptor] = recorded


def _roots(
    read: Sequence[int], metadata: Collection[str], args: tuple[Any, ...], context: ForwardContext
) -> dict[str, Any]:
    roots: dict[str, Any] = {"args": [args[i] for i in read]}
    if context.scope is not None:
        roots["metadata"] = context.metadata
    elif metadata:  # what only eager pieces read may be new on each call
        roots["metadata"] = {name: context.metadata.get(name) for name in metadata}
    return roots


__all__ = ["RETRACED", "SegmentWrapper", "SplitForward"]
