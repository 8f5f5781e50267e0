"""In whose memory each value of a split forward lies: an argument's, or that of the piece that made or copied it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from cgplan.piecewise.split import storages_of, value_of

_NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)
Homes = frozenset[fx.Node]


class _Found(NamedTuple):
    """What is known of one value."""

    homes: Homes = frozenset()
    storages: frozenset[int] = frozenset()
    of_segment: bool = False


class MemoryHomes:
    """Follows memory through the pieces of a split forward, by the storages of the trace's fake tensors.

    A value's homes are nodes of ``split.graph``: an argument, or the call of an eager piece or of a segment. There are
    several where it cannot be told which. What an eager piece made is *fresh*: it lies elsewhere on each call, whoever
    hands it through. A segment that is given a fresh value reads a copy, so what it returns of that is at home there.

    Args:
        split: Calls the pieces.
        segments: Names of the pieces that are replayed.

    Attributes:
        homes: Of each tensor or constant that is an argument or result of a piece.
        storages: The memory of the same by the trace, in which all copies of one value are one.
        of_segments: Those that may be a tensor object that a segment has made, wherever it lies.
    """

    def __init__(self, split: fx.GraphModule, segments: Collection[str]) -> None:
        self.homes: dict[fx.Node, Homes] = {}
        self.storages: dict[fx.Node, frozenset[int]] = {}
        self.of_segments: set[fx.Node] = set()
        self._split, self._segments = split, segments
        self._items: dict[fx.Node, dict[int, _Found]] = {}
        for node in split.graph.nodes:
            if node.op == "call_module":
                self._follow(node)
            elif node.op in ("placeholder", "get_attr"):
                self._settle(node, _Found(frozenset([node]), frozenset(storages_of(node))))
            elif node.op == "call_function" and node.args and node.args[0] in self._items:
                self._settle(node, self._items[node.args[0]].get(node.args[1], _Found()))

    def is_fresh(self, node: Any) -> bool:
        """Whether a value may lie elsewhere on each call."""
        return any(home.op == "call_module" and home.target not in self._segments for home in self.homes.get(node, ()))

    def arguments(self, call: fx.Node) -> Iterator[tuple[fx.Node, Homes, frozenset[int]]]:
        """Each argument of a piece: the value, where what the piece reads of it lies, and its storages."""
        piece = getattr(self._split, str(call.target))
        inside = [node for node in piece.graph.nodes if node.op == "placeholder"]
        for value, placeholder in zip(call.args, inside, strict=True):
            if isinstance(value, fx.Node) and value in self.homes:
                copied = call.target in self._segments and self.is_fresh(value)
                yield value, frozenset([call]) if copied else self.homes[value], frozenset(storages_of(placeholder))

    def _follow(self, call: fx.Node) -> None:
        piece = getattr(self._split, str(call.target))
        (output,) = (node for node in piece.graph.nodes if node.op == "output")
        given = list(self.arguments(call))

        def settled(result: Any) -> _Found:
            if not isinstance(result, fx.Node) or isinstance(value_of(result), _NUMBERS):
                return _Found()
            storages = frozenset(storages_of(result))
            same = [(value, homes) for value, homes, inside in given if inside & storages]
            found = Homes().union(*(homes for _, homes in same))
            of_segment = call.target in self._segments or any(value in self.of_segments for value, _ in same)
            return _Found(found or frozenset([call]), storages, of_segment)

        if isinstance(output.args[0], tuple | list):
            self._items[call] = {index: settled(result) for index, result in enumerate(output.args[0])}
        else:
            self._settle(call, settled(output.args[0]))

    def _settle(self, node: fx.Node, found: _Found) -> None:
        self.homes[node], self.storages[node] = found.homes, found.storages
        if found.of_segment:
            self.of_segments.add(node)


__all__ = ["MemoryHomes"]
