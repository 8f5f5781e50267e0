"""A split forward: its pieces called in turns, and for a key whose segments are all captured, a recorded way.

Note [Recorded replays]
    Between two segments the code that torch.fx made, a wrapper, its look-ups and checks and a mode for the copy into
    each slot take longer than the launch of a graph. Once all segments of a key are captured, and checked as often as
    asked, what a replay does is known: launch a graph, call an eager piece, copy its results into the slots of the next
    graph, and so on. That is written down as one function for each key, whose graphs, slots and segments' outputs are
    globals. What may change between calls is an argument of it, as Dynamo's code reads it anew each time: inputs,
    parameters, buffers, sizes. What eager pieces return is a local. Eager pieces are called themselves, so they see the
    forward context and raise as ever.

    The function goes with the graphs that it launches: any capture and any reset of a segment drops all of them. Where
    something is not as it was (gradients are on, an address differs under ``always``), the wrappers do the call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from cgplan.descriptors import BatchDescriptor
from cgplan.graphs.addresses import AddressManifest
from cgplan.modes import CUDAGraphMode
from cgplan.runtime.context import CaptureScope, ForwardContext, current_forward_context
from cgplan.runtime.splitting import Piece, operator_name
from cgplan.runtime.wrapper import CUDAGraphEntry, CUDAGraphWrapper

_MODES = ("set_grad_enabled", "enter_inference_mode", "enter_autocast", "inference_mode")


class SegmentWrapper(CUDAGraphWrapper):
    """Captures one segment of a split forward.

    Attributes:
        changed: Called whenever its graphs change.
    """

    def __init__(self, runnable: Callable[..., Any], **options: Any) -> None:
        super().__init__(runnable, CUDAGraphMode.PIECEWISE, **options)
        self.changed: Callable[[], None] = lambda: None

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

    def _capture(self, *args: Any) -> tuple[CUDAGraphEntry, Any]:
        self.changed()
        return super()._capture(*args)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What serves one key: the function, and what it was recorded for."""

    call: Callable[..., Any]
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
        self._segments: dict[str, SegmentWrapper] = {}
        changes_modes = any(
            (operator_name(node) or "").endswith(_MODES)
            for piece in pieces
            for node in getattr(split, piece.name).graph.nodes
        )
        for name, runnable in runnables.items():
            # In the instance's own dict it is found at once; as a submodule only after a failed look-up.
            del split._modules[name]
            split.__dict__[name] = runnable
            if isinstance(runnable, SegmentWrapper):
                self._segments[name] = runnable
                runnable.changed = self.recorded.clear
        self._program = None if changes_modes or not self._segments else _Program.of(split, self._segments)
        _ = split.code  # generates it: until then `forward` is a stub that does so on each call
        self._by_wrappers: Callable[..., Any] = split.forward

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

    def _record(self, program: _Program, args: tuple[Any, ...], context: ForwardContext) -> None:
        """Record the key that the wrappers have just served, if nothing is left to be checked."""
        entries: dict[str, CUDAGraphEntry] = {}
        for name, wrapper in self._segments.items():
            entry = wrapper.ready(context)
            if entry is None:
                return
            entries[name] = entry
        manifest, some = None, next(iter(self._segments.values()))
        metadata = frozenset[str]().union(*(entry.metadata for entry in entries.values()))
        if some.options.address_check == "always":
            roots = _roots(program.read, metadata, args, context)
            manifest = AddressManifest.of(roots, some.backend.device, repeats=True)
            manifest.check(roots, what=f"{CUDAGraphMode.PIECEWISE} {context.descriptor}")  # compiles itself
        call = program.bind(self.split, entries)
        self.recorded[context.descriptor] = _Recorded(call, context.scope, manifest, program.read, metadata)


def _roots(
    read: Sequence[int], metadata: Collection[str], args: tuple[Any, ...], context: ForwardContext
) -> dict[str, Any]:
    roots: dict[str, Any] = {"args": [args[i] for i in read]}
    if context.scope is not None:
        roots["metadata"] = context.metadata
    elif metadata:  # what only eager pieces read may be new on each call
        roots["metadata"] = {name: context.metadata.get(name) for name in metadata}
    return roots


@dataclass(frozen=True, slots=True)
class _Program:
    """The code of recorded functions, which is the same for all keys, and what their globals stand for.

    Attributes:
        code: Of a function of the split graph's arguments.
        values: For each name that is a global: the node whose value at capture it is.
        slots: For each segment, (name of the global, position of the argument).
        read: Positions of the arguments that segments are given.
    """

    code: CodeType
    values: Mapping[str, fx.Node]
    slots: Mapping[str, Sequence[tuple[str, int]]]
    read: tuple[int, ...]

    @classmethod
    def of(cls, split: fx.GraphModule, segments: Mapping[str, SegmentWrapper]) -> _Program | None:
        """None where the graph does more than to call pieces and take their results apart."""
        writer = _Writer(segments)
        if not all(map(writer.write, split.graph.nodes)):
            return None
        arguments = [node for node in split.graph.nodes if node.op == "placeholder"]
        read = tuple(i for i, node in enumerate(arguments) if node in writer.read)
        source = "\n ".join([f"def replay({', '.join(node.name for node in arguments)}):", *writer.lines])
        module = compile(source, "<cgplan recorded replay>", "exec")
        code = next(constant for constant in module.co_consts if isinstance(constant, CodeType))
        return cls(code, writer.values, writer.slots, read)

    def bind(self, split: fx.GraphModule, entries: Mapping[str, CUDAGraphEntry]) -> Callable[..., Any]:
        """The function for the segments of one key."""
        names: dict[str, Any] = {}
        for name, node in self.values.items():
            names[name] = _value_of(node, split, entries)
        for segment, slots in self.slots.items():
            entry = entries[segment]
            names[f"replay_{segment}"] = entry.backend.launcher(entry.graph)
            names.update((name, entry.slots[position]) for name, position in slots)
        return FunctionType(self.code.replace(), names)  # a copy: specialised instructions are not shared


def _value_of(node: fx.Node, split: fx.GraphModule, entries: Mapping[str, CUDAGraphEntry]) -> Any:
    """What a global stands for: an eager piece, a constant, a segment's output or an item of it."""
    target = str(node.target)
    if node.op == "get_attr":
        return getattr(split, target)
    if node.op == "call_function":
        return _value_of(node.args[0], split, entries)[node.args[1]]  # type: ignore[arg-type]
    return entries[target].output if target in entries else split.__dict__[target]


class _Writer:
    """Writes one line for each thing that a replay does."""

    def __init__(self, segments: Mapping[str, SegmentWrapper]) -> None:
        self.lines: list[str] = []
        self.values: dict[str, fx.Node] = {}
        self.slots: dict[str, list[tuple[str, int]]] = {}
        self.read: set[fx.Node] = set()
        self._order: dict[fx.Node, int] = {}
        self._segments = segments

    def write(self, node: fx.Node) -> bool:
        """False for a node that cannot be recorded."""
        self._order[node] = len(self._order)
        if node.op.startswith("call") and not all(isinstance(arg, fx.Node | int) for arg in node.args):
            return False
        match node.op:
            case "placeholder":
                return True
            case "get_attr":
                self.values[node.name] = node
            case "call_module" if str(node.target) in self._segments:
                self._launch(node)
            case "call_module" if not node.kwargs:
                self.values[f"piece_{node.target}"] = node
                result = f"{node.name} = " if node.users else ""
                self.lines.append(f"{result}piece_{node.target}({', '.join(map(str, node.args))})")
                self._drop_last_used(node)
            case "call_function" if operator_name(node) == "python::getitem" and isinstance(node.args[0], fx.Node):
                if node.args[0].name in self.values:  # of a segment's output
                    self.values[node.name] = node
                else:
                    self.lines.append(f"{node.name} = {node.args[0].name}[{node.args[1]!r}]")
                    self._drop_last_used(node)
            case "output" if all(isinstance(leaf, fx.Node | int | None) for leaf in tree_leaves(node.args[0])):
                self.lines.append(f"return {node.args[0]!r}")  # nodes are shown by their names
            case _:
                return False
        return True

    def _launch(self, node: fx.Node) -> None:
        segment = str(node.target)
        slots = self.slots[segment] = []
        for position in self._segments[segment].options.copied_arguments:
            name = f"slot_{segment}_{position}"
            slots.append((name, position))
            self.lines.append(f"{name}.copy_({node.args[position]})")
        self.lines.append(f"replay_{segment}()")
        self._drop_last_used(node)
        self.values[node.name] = node
        copied = {position for _, position in slots}
        self.read |= {arg for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and i not in copied}

    def _drop_last_used(self, node: fx.Node) -> None:
        """Free what eager pieces returned as soon as nobody reads it any more, as torch.fx does."""
        made = [n for n in node.all_input_nodes if n.op != "placeholder" and n.name not in self.values]
        last = [n for n in made if all(user in self._order for user in n.users)]
        if last:
            self.lines.append(f"{' = '.join(n.name for n in last)} = None")


__all__ = ["SegmentWrapper", "SplitForward"]
