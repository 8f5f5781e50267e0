"""The fast check of an address manifest: one generated function that reads each tensor's address directly.

Note [Cost of a check]
    ``Tensor.data_ptr`` takes about 40 ns and is nearly all of it. Where torch was built for CUDA it has a function that
    compares a list of tensors with a list of addresses in one call; an equal one, compiled to be measured, took 75 ns a
    tensor, because it unpacks all list items in a general way. So each tensor is read by instructions of its own, which
    the interpreter specialises. ``vars(object)[name]`` is faster than ``object.name`` here, and runs no code of the
    class.

    Whether a tensor has another form is looked at only where it is another object than before: the check then
    holds the tensors, because an object is told by itself for 5 ns, by its number for 30. All are compared in one go,
    objects by ``is`` and then addresses, because a tensor that is the same object may have been given other memory.

    So the same object at the same address in another form (``w.t_()``, ``w.data = w.data.t()``) is not seen by this
    check, but by a walk. To ask each tensor for its form costs as much again as its address, or more: on a host where
    ``data_ptr`` took 50 ns, ``stride`` took 70, ``shape`` 93, ``_version``, which setting ``data`` does not change, 54,
    and torch's own guards of a list of tensors, which fail where the thread's modes are others, 48 a tensor.

    Of a model with a few tensors in each of hundreds of modules the way to them takes longer than the tensors. So
    modules are held, too, and told by themselves, and where a structure may grow nothing is read but the way to what
    was there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import is_, itemgetter
from types import CodeType, FunctionType
from typing import Any

import torch

from cgplan.graphs.address_layout import Layout, is_name
from cgplan.graphs.address_walk import Entry, Form, Leaf, Node, Part, form_of

_GROUP = 16  # tensors from which on one call for all is faster than an expression for each
Check = Callable[[Mapping[str, Any]], bool]


def compile_check(
    top: Node,
    device: torch.device,
    tensors: Sequence[torch.Tensor] = (),
    modules: Mapping[Node, torch.nn.Module] | None = None,
    *,
    may_grow: bool = False,
) -> Check:
    """A function of the roots: whether all tensors lie where the walk that made ``top`` found them.

    It raises whatever a structure of another shape makes it raise. It holds classes, keys and numbers, and what is
    given of these:

    Args:
        top: Made by a walk.
        device: Of the walk.
        tensors: Those of the walk by their numbers: then the forms of others in their places are looked at, too.
        modules: Those of the walk: any other object in the place of one is refused.
        may_grow: Whether tensors that were not there are no matter.
    """
    writer = _Writer(device, tensors, modules or {}, may_grow)
    writer.write(top)
    code = _compiled("\n ".join(["def check(roots):", *writer.lines, "return True"]))
    function: Check = FunctionType(code.replace(), writer.names)  # a copy: specialised instructions are not shared
    if not any(isinstance(e.child, Leaf) and e.child.overrides for node in nodes_of(top) for e in node.entries):
        return function

    def quietly(roots: Mapping[str, Any]) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return function(roots)

    return quietly


def nodes_of(top: Node) -> Iterator[Node]:
    """All containers, each once, by its first path, those outside before those inside."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack += [e.child for e in reversed(list(node.entries)) if isinstance(e.child, Node) and not e.is_link]


def _is_group(part: Part) -> bool:
    """Whether a part is many tensors and nothing else."""
    if part.kind not in ("sequence", "dict", "attributes", "module") or len(part.entries) != part.size:
        return False
    return part.size >= _GROUP and all(isinstance(e.child, Leaf) and e.child.address for e in part.entries)


def _has_other_forms(known: Sequence[torch.Tensor], forms: Sequence[Form], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether any of the tensors is neither the one that is known nor of its form."""
    return any(t is not k and form_of(t) != form for k, form, t in zip(known, forms, tensors, strict=True))


@lru_cache(maxsize=64)
def _compiled(source: str) -> CodeType:
    """The code of ``check``. Kept, because the graphs of a session have the same structure at other addresses."""
    module = compile(source, "<cgplan address check>", "exec")
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))


@dataclass(slots=True)
class _Writer:
    """Writes the lines of a check. Containers become locals, addresses and classes globals of the function."""

    device: torch.device
    tensors: Sequence[torch.Tensor]
    modules: Mapping[Node, torch.nn.Module]
    may_grow: bool
    lines: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=lambda: {"pointer": torch.Tensor.data_ptr})
    _sources: dict[Node, str] = field(default_factory=dict)
    _constants: dict[int, str] = field(default_factory=dict)
    _readings: list[str] = field(default_factory=list)
    _leaves: list[Leaf] = field(default_factory=list)

    def write(self, top: Node) -> None:
        """Write all lines. Links are compared at the end, when the containers that they lead to are known."""
        links: list[tuple[str, Node]] = []
        locals_: dict[Node, str] = {}
        for number, node in enumerate(nodes_of(top)):
            if self.may_grow and not node.live:
                continue
            conditions: list[str] = []
            if node in self.modules:
                local = self._constant(self.modules[node])
                self._refuse([f"{self._sources[node]} is not {local}"])
            elif node.layout:
                local = f"c{number}"
                self.lines.append(f"{local} = {self._sources[node]}")
                conditions.append(f"type({local}) is not {self._constant(node.layout.cls)}")
            else:
                local = "roots"
            locals_[node] = local
            for part in node.parts:
                if not self._is_needed(node, part):
                    continue
                view = self._view(node.layout, part, local, conditions)
                if _is_group(part):
                    self._add_group(view, part)
                    continue
                for entry in part.entries:
                    reading = self._reading(view, part, entry)
                    if isinstance(entry.child, Leaf):
                        self._readings.append(reading)
                        self._leaves.append(entry.child)
                    elif not isinstance(entry.child, Node):
                        conditions += [] if self.may_grow else [f"{reading} is not None"]
                    elif entry.is_link:
                        links.append((reading, entry.child))
                    else:
                        self._sources[entry.child] = reading
            self._refuse(conditions)
        self._refuse([f"{reading} is not {locals_[node]}" for reading, node in links])
        self._compare_all()

    def _is_needed(self, node: Node, part: Part) -> bool:
        """Whether a part is looked at: where nothing that comes matters, only the way to what was there."""
        if not self.may_grow or any(isinstance(e.child, Leaf | Node) for e in part.entries):
            return True
        return part.kind == "attributes" and any(p.entries for p in node.parts if p.kind == "module")

    def _view(self, layout: Layout | None, part: Part, local: str, conditions: list[str]) -> str:
        """What a part's children are read from; adds the conditions under which the part has changed."""
        made = None if layout is None else self._made(layout, part, local)
        view = local
        if made is not None:
            self._refuse(conditions)  # its class is known before it is read
            conditions.clear()
            view = f"{local}_{part.kind}{part.detail if part.kind == 'module' else ''}"
            self.lines.append(f"{view} = {made}")
        if part.kind == "values":
            conditions.append(f"[*map(id, {view})] != {self._constant(part.detail)}")
            self.lines.append(f"{view}_list = [*{view}.values()]")
        if part.kind not in ("slots", "wrapper") and not self.may_grow:
            conditions.append(f"len({view}) != {part.size}")
        return view

    def _made(self, layout: Layout, part: Part, local: str) -> str | None:
        """The expression that makes what a part is read from; None where the container itself can be read."""
        match part.kind:
            case "attributes" if layout.simple:
                return f"{local}.__dict__"
            case "attributes":
                return f"{self._constant(layout.attributes, layout.attributes.__get__)}({local})"
            case "module":
                return f"{local}_attributes[{part.detail!r}]"
            case "mapping" | "values" if layout.base is Mapping:
                return f"dict({local}.items())"
            case "values" | "dict" if part.kind == "values" or not layout.plain:
                return f"dict({self._constant(dict.items)}({local}))"
            case "sequence" if not layout.plain:
                return f"[*{self._constant(layout.base.__iter__)}({local})]"
        return None

    def _reading(self, view: str, part: Part, entry: Entry) -> str:
        """The expression that reads one child."""
        if part.kind == "wrapper":
            return f"getattr({view}, {entry.access!r})"
        if part.kind == "values":
            return f"{view}_list[{entry.access}]"
        if part.kind == "slots":
            name, member, is_direct = entry.access
            return f"{view}.{name}" if is_direct else f"{self._constant(member, member.__get__)}({view})"
        key = entry.access
        if type(key) is int or (type(key) is str and is_name(key) and sys.intern(key) is key):
            return f"{view}[{key!r}]"
        return f"{view}[{self._constant(key)}]"  # found by identity, where a literal would be compared by letters

    def _add_group(self, view: str, part: Part) -> None:
        """Have all tensors of a part compared; the number of children has been, where it counts."""
        self._leaves += [entry.child for entry in part.entries if isinstance(entry.child, Leaf)]
        if part.kind == "sequence" and not self.may_grow:
            self._readings.append(f"*{view}")
        else:
            getter = itemgetter(*(entry.access for entry in part.entries))
            self._readings.append(f"*{self._constant(getter)}({view})")

    def _compare_all(self) -> None:
        """Compare all tensors in one go, see Note [Cost of a check]."""
        if not self._leaves:
            return
        addresses = self._constant([leaf.address for leaf in self._leaves])
        self.lines.append(f"g = [{', '.join(self._readings)}]")
        if self.tensors:
            known = [self.tensors[leaf.number] for leaf in self._leaves]
            others = partial(_has_other_forms, known, [leaf.form for leaf in self._leaves])
            same = f"all(map({self._constant(is_)}, g, {self._constant(known)}))"
            self._refuse([f"not {same} and {self._constant(others)}(g)"])
        elsewhere = [f"g[{i}].device != {self._constant(self.device)}" for i in self._empty()]
        self._refuse([f"[*map(pointer, g)] != {addresses}", *elsewhere])

    def _empty(self) -> list[int]:
        """Which tensors have no memory: they must still be on the device."""
        return [i for i, leaf in enumerate(self._leaves) if not leaf.address]

    def _refuse(self, conditions: list[str]) -> None:
        if conditions:
            self.lines.append(f"if {' or '.join(conditions)}: return False")

    def _constant(self, key: Any, value: Any = None) -> str:
        """The name of a global that is ``value``, or ``key`` itself; one for each ``key``."""
        if id(key) not in self._constants:
            name = self._constants[id(key)] = f"k{len(self.names)}"
            self.names[name] = key if value is None else value
        return self._constants[id(key)]
