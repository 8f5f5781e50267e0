"""Which tensors can be reached from some values, and by which paths: the tree that an address manifest keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from cgplan.graphs.address_layout import SCALARS, Layout, PartKind, Reading, parts_of, wrapped_tensors

Form = tuple[torch.dtype, torch.Size, tuple[int, ...], bool, bool]


def form_of(tensor: torch.Tensor) -> Form:
    """Type, shape, strides, and whether it is read conjugated or negated: what besides its address a graph has frozen
    of a tensor."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor: its address in bytes, its number, equal for the same tensor under another path, and its form."""

    address: int
    number: int
    form: Form
    overrides: bool  # it has a __torch_function__ of its own


@dataclass(slots=True)
class Entry:
    """One child of a container.

    Attributes:
        step: Its part of the path.
        access: Index, key or name by which it is read, as the part's kind needs.
        child: A tensor, a container, ``NONE`` for None, or None for what holds no tensors.
        is_link: Whether the container was reached before, by another path.
    """

    step: str
    access: Any
    child: Leaf | Node | Literal["NONE"] | None = None
    is_link: bool = False


@dataclass(slots=True)
class Part:
    """Children that are read in one way; ``size`` counts all of them, with those that were dropped."""

    kind: PartKind
    size: int
    entries: list[Entry]
    detail: Any = None  # module: the name of the dict; values: the ids of the keys


@dataclass(slots=True, eq=False)
class Node:
    """A container, without any reference to it.

    Attributes:
        layout: How it is read; None for the roots.
        parts: Its children.
        live: Whether tensors are inside, or it is a root: these are the containers that the fast check looks at.
    """

    layout: Layout | None
    parts: list[Part]
    live: bool = False

    @property
    def entries(self) -> Iterator[Entry]:
        """The children of all parts."""
        return (entry for part in self.parts for entry in part.entries)

    @property
    def is_empty(self) -> bool:
        """Whether it is a builtin container or Mapping with nothing in it."""
        return bool(self.parts) and self.parts[0].kind in ("sequence", "dict", "mapping") and not self.parts[0].size


@dataclass(slots=True)
class Walk:
    """One walk over a structure. Holds what it visits, so that ids stay valid, and is dropped after it.

    Attributes:
        device: Tensors elsewhere are left alone.
        tensors: The tensors that were found, by id, with their numbers.
    """

    device: torch.device
    tensors: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    _layouts: dict[type, Layout] = field(default_factory=dict)
    _seen: dict[int, tuple[Any, Node]] = field(default_factory=dict)
    _parents: dict[Node, list[Node]] = field(default_factory=dict)
    _todo: list[tuple[Node, Entry, Any]] = field(default_factory=list)

    def run(self, roots: Mapping[str, Any]) -> Node:
        """The tree of all containers that hold tensors of the device; containers met again are links."""
        top = Node(None, [], live=True)
        with torch._C.DisableTorchFunctionSubclass():
            self._add_parts(top, [("roots", len(roots), [(str(n), n, v) for n, v in roots.items()], None)])
            while self._todo:
                parent, entry, value = self._todo.pop()
                entry.child, entry.is_link = self._visit(value)
                if isinstance(entry.child, Node):
                    self._parents.setdefault(entry.child, []).append(parent)
        self._prune(top)
        return top

    def modules(self) -> dict[Node, torch.nn.Module]:
        """The modules that were found."""
        return {node: value for value, node in self._seen.values() if isinstance(value, torch.nn.Module)}

    def _visit(self, value: Any) -> tuple[Leaf | Node | Literal["NONE"] | None, bool]:
        if value is None:
            return "NONE", False
        kind = type(value)
        layout = self._layouts.get(kind)
        if layout is None:
            layout = self._layouts[kind] = Layout.of(kind)
        if layout.closed:
            return None, False
        if (seen := self._seen.get(id(value))) is not None:
            return seen[1], True
        parts: Any
        if layout.base is not torch.Tensor:
            parts = parts_of(layout, value)
        elif value.device != self.device:
            return None, False
        elif hasattr(kind, "__tensor_flatten__"):
            parts = [("wrapper", 0, wrapped_tensors(value), None)]
        else:
            return self._leaf(value), False
        node = Node(layout, [])
        self._seen[id(value)] = (value, node)
        self._add_parts(node, parts)
        return node, False

    def _leaf(self, tensor: torch.Tensor) -> Leaf | None:
        try:
            address, form = tensor.data_ptr(), form_of(tensor)
        except Exception:  # sparse and fake tensors have no memory at one address
            return None
        number = self.tensors.setdefault(id(tensor), (tensor, len(self.tensors)))[1]
        kind = type(tensor)
        quiet = kind is torch.Tensor or kind.__torch_function__ is torch._C._disabled_torch_function_impl
        return Leaf(address, number, form, not quiet)

    def _add_parts(self, node: Node, parts: Iterable[Reading]) -> None:
        taken: dict[str, Any] = {}
        todo: list[tuple[Node, Entry, Any]] = []
        for kind, size, triples, detail in parts:
            part = Part(kind, size, [], detail)
            node.parts.append(part)
            for step, access, value in triples:
                if type(value) in SCALARS or taken.get(step) is value is not None:  # an item that is an attribute too
                    continue
                name, count = step, 1
                while name in taken:
                    count += 1
                    name = f"{step}#{count}"
                taken[name] = value
                entry = Entry(name, access)
                part.entries.append(entry)
                todo.append((node, entry, value))
        self._todo += reversed(todo)

    def _prune(self, top: Node) -> None:
        """Find the containers with tensors inside, through links too, and drop the others."""
        nodes = [top, *(node for _, node in self._seen.values())]
        spread = [n for n in nodes if any(isinstance(e.child, Leaf) for e in n.entries)]
        spread += [e.child for e in top.entries if isinstance(e.child, Node) and e.child.parts[0].kind != "attributes"]
        while spread:
            node = spread.pop()
            node.live = True
            spread += [parent for parent in self._parents.get(node, ()) if not parent.live]
        for node in nodes:
            for part in node.parts:
                part.entries = [e for e in part.entries if _is_kept(e)] if node.live else []


def _is_kept(entry: Entry) -> bool:
    child = entry.child
    if isinstance(child, Node):
        return child.live or (child.is_empty and not entry.is_link)
    return child is not None
