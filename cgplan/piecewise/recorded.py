"""What a replay of a split forward does, written down as one function, see Note [Recorded replays] in segments.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import fx
from torch.utils._pytree import tree_leaves

from cgplan.graphs.wrapper import CUDAGraphEntry
from cgplan.piecewise.memory_homes import MemoryHomes
from cgplan.piecewise.prologue import Prologue
from cgplan.piecewise.split import operator_name

_ROOTS = ("inputs", "model", "names")


@dataclass(frozen=True, slots=True)
class Program:
    """The code of recorded functions, which is the same for all keys, and what their globals stand for.

    Attributes:
        code: Of a function of the split graph's arguments.
        values: For each name that is a global: the node whose value at capture it is.
        slots: For each segment, (name of the global, position of the argument).
        read: Positions of the arguments that segments are given.
        arguments: Names of the split graph's arguments.
        lines: Of the function, but for its last one.
        results: The sources of what it returns; None where that is no flat tuple of nodes.
    """

    code: CodeType
    values: Mapping[str, fx.Node]
    slots: Mapping[str, Sequence[tuple[str, int]]]
    read: tuple[int, ...]
    arguments: tuple[str, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...] | None

    @classmethod
    def of(cls, split: fx.GraphModule, segments: Mapping[str, Collection[int]]) -> Program | None:
        """None where the graph does more than to call pieces and take their results apart.

        Args:
            split: Calls the pieces.
            segments: Names of the pieces that are replayed, with the positions of the arguments that are copied.
        """
        writer = _Writer(segments, MemoryHomes(split, segments))
        if not all(map(writer.write, split.graph.nodes)):
            return None
        output = fx.node.map_arg(writer.output, writer.result)
        arguments = [node for node in split.graph.nodes if node.op == "placeholder"]
        names = tuple(node.name for node in arguments)
        read = tuple(i for i, node in enumerate(arguments) if node in writer.read)
        results = output if isinstance(output, tuple | list) else ()
        flat = all(isinstance(result, _Source) for result in results)
        return cls(
            code=_compiled("replay", names, [*writer.lines, f"return {output!r}"]),
            values=writer.values,
            slots=writer.slots,
            read=read,
            arguments=names,
            lines=tuple(writer.lines),
            results=tuple(map(repr, results)) if results and flat else None,
        )

    def with_prologue(self, prologue: Prologue) -> CodeType | None:
        """The code of a function of (inputs, model, globals) that does what ``prologue`` does, too, but for arguments
        that only segments read; None where their names would collide.
        """
        if self.results is None:
            return None
        body = [*self.lines, f"return {prologue.result(self.results)}"]
        used = set(re.findall(r"\w+", " ".join((*self.lines, *self.results))))
        lines = prologue.read({i: name for i, name in enumerate(self.arguments) if name in used})
        taken = {*_ROOTS, *(line.partition(" = ")[0] for line in lines if line.startswith("read_"))}
        if taken & {*self.arguments, *used}:
            return None
        return _compiled("step", _ROOTS, [*lines, *body])

    def bind(self, code: CodeType, split: fx.GraphModule, entries: Mapping[str, CUDAGraphEntry]) -> Callable[..., Any]:
        """The function of a code for the segments of one key."""
        names: dict[str, Any] = {}
        for name, node in self.values.items():
            names[name] = _value_of(node, split, entries)
        for segment, slots in self.slots.items():
            entry = entries[segment]
            names[f"replay_{segment}"] = entry.backend.launcher(entry.graph)
            names[f"give_{segment}"] = entry.handed
            names.update((name, entry.slots[position]) for name, position in slots)
        return FunctionType(code.replace(), names)  # a copy: specialised instructions are not shared


def _compiled(name: str, arguments: Sequence[str], lines: Sequence[str]) -> CodeType:
    source = "\n ".join([f"def {name}({', '.join(arguments)}):", *lines])
    module = compile(source, "<cgplan recorded replay>", "exec")
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))


def _value_of(node: fx.Node, split: fx.GraphModule, entries: Mapping[str, CUDAGraphEntry]) -> Any:
    """What a global stands for: an eager piece, a constant, a segment's output or an item of it."""
    target = str(node.target)
    if node.op == "get_attr":
        return getattr(split, target)
    if node.op == "call_function":
        return _value_of(node.args[0], split, entries)[node.args[1]]  # type: ignore[arg-type]
    return entries[target].output if target in entries else split.__dict__[target]


class _Source(str):
    """An expression, which shows itself without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class _Writer:
    """Writes one line for each thing that a replay does."""

    def __init__(self, segments: Mapping[str, Collection[int]], memory: MemoryHomes) -> None:
        self.lines: list[str] = []
        self.output: Any = None
        self.values: dict[str, fx.Node] = {}
        self.slots: dict[str, list[tuple[str, int]]] = {}
        self.read: set[fx.Node] = set()
        self._order: dict[fx.Node, int] = {}
        self._segments = segments
        self._memory = memory

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
                self.output = node.args[0]
            case _:
                return False
        return True

    def result(self, node: fx.Node) -> _Source:
        """The source of a result. Those who get a segment's output may change its tensor objects, also where an eager
        piece has handed it through.
        """
        if node.op == "get_attr":
            return _Source(node.name)
        if node.name not in self.values:
            if node not in self._memory.of_segments:
                return _Source(node.name)
            return self._made_once(f"own_{node.name}", f"{node.name}.detach()")
        if node.op == "call_function" and isinstance(node.args[0], fx.Node):
            return _Source(f"{self.result(node.args[0])}[{node.args[1]!r}]")
        return self._made_once(f"given_{node.target}", f"give_{node.target}()")

    def _made_once(self, name: str, source: str) -> _Source:
        line = f"{name} = {source}"
        if line not in self.lines:
            self.lines.append(line)
        return _Source(name)

    def _launch(self, node: fx.Node) -> None:
        segment = str(node.target)
        slots = self.slots[segment] = []
        for position in self._segments[segment]:
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


__all__ = ["Program"]
