"""How objects are read without running their code: the children of a container, and what they are called.

Note [Address paths]
    A path begins with the name of a root. ``.name`` is an attribute, a field of a named tuple, or a string key that is
    an identifier; ``[2]`` is an index, a number as key, or the name of a module in a ``ModuleList``; ``['a b']`` is any
    other string, ``[Color.RED]`` a member of an enum, and ``[<Point>]`` a key that is an object of the user's, whose
    ``repr`` is not called. ``#2`` tells apart what would have one name.
    Nothing is read that could run code of the user's: no properties, no ``__getattr__``, no class attributes. Two
    protocols are exceptions: ``items()`` of a Mapping that is no dict, and ``__tensor_flatten__`` of a tensor subclass
    that wraps other tensors.
"""

from __future__ import annotations

import keyword
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from threading import Thread
from typing import Any, Literal

import torch

PartKind = Literal["roots", "sequence", "dict", "values", "mapping", "attributes", "slots", "module", "wrapper"]
Children = Iterable[tuple[str, Any, Any]]  # step of the path, index or key or name by which it is read, value
Reading = tuple[PartKind, int, Children, Any]  # how, number of children, children, detail as in `Part`

SCALARS = frozenset({int, float, complex, bool, str, bytes, torch.dtype, torch.device, torch.Size})
_CLOSED = (type, types.ModuleType, types.FunctionType, types.MethodType, Thread, Enum, weakref.ref)
GRAPH_MEMORY = "__graph_memory__"  # a true class attribute of this name: what is inside belongs to graphs
_CLOSED_MODULES = frozenset({"threading", "_thread"})
_MODULE_DICTS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class Layout:
    """How the objects of one class are read.

    Attributes:
        cls: The class.
        base: The builtin container or Mapping whose items it has, Tensor, or None.
        plain: Whether indexing and ``len`` run no code of the class.
        fields: Names of a named tuple's items.
        attributes: Reads the instance's ``__dict__``; None if instances have none.
        slots: Name and descriptor of each slot, and whether ``object.name`` reads it without code of the class.
        simple: Whether ``object.__dict__`` runs no code of the class.
        closed: Nothing inside is looked at.
    """

    cls: type
    base: Any
    plain: bool
    fields: tuple[str, ...]
    attributes: Any
    slots: tuple[tuple[str, Any, bool], ...]
    simple: bool
    closed: bool

    @classmethod
    def of(cls, kind: type) -> Layout:
        """The layout of the objects whose class is ``kind``."""
        bases = [b for b in (torch.Tensor, dict, list, tuple, deque, Mapping) if issubclass(kind, b)]
        base: Any = bases[0] if bases else None
        reading = ("__getitem__", "__len__", "__iter__", "__missing__")
        plain = base in (dict, list, tuple) and all(_static(kind, n) is _static(base, n) for n in reading)
        fields = _static(kind, "_fields") if base is tuple else ()
        fields = fields if type(fields) is tuple and all(type(n) is str for n in fields) else ()
        attributes = _static(kind, "__dict__")
        if not isinstance(attributes, types.GetSetDescriptorType | types.MemberDescriptorType):  # a property, or none
            attributes = None
        simple = _static(kind, "__getattribute__") is object.__getattribute__
        slots: dict[str, Any] = {}
        for owner in kind.__mro__:
            if "__slots__" in owner.__dict__:
                members = [(n, m) for n, m in owner.__dict__.items() if isinstance(m, types.MemberDescriptorType)]
                slots = {**dict(m for m in members if not m[0].startswith("_")), **slots}
        if issubclass(kind, partial):  # written in C: what it holds is in members that no __slots__ lists
            slots = {**{name: partial.__dict__[name] for name in ("func", "args", "keywords")}, **slots}
        closed = issubclass(kind, _CLOSED) or kind.__module__ in _CLOSED_MODULES
        closed = closed or (base is None and attributes is None and not slots) or bool(_static(kind, GRAPH_MEMORY))
        direct = simple and _static(kind, "__getattr__") is None
        reads = tuple((n, m, direct and is_name(n) and _static(kind, n) is m) for n, m in slots.items())
        return cls(kind, base, plain, fields, attributes, reads, simple, closed)


def parts_of(layout: Layout, value: Any) -> list[Reading]:
    """The children of a container, by the ways that they are read."""
    parts: list[Reading] = []
    if layout.base is dict:
        parts.append(_dict_part("dict", dict(dict.items(value))))
    elif layout.base is Mapping:
        try:
            items = dict(value.items())
        except Exception:  # the user's code; what cannot be listed cannot be named
            items = {}
        parts.append(_dict_part("mapping", items))
    elif layout.base is not None:
        names = [f".{name}" for name in layout.fields]
        listed = list(layout.base.__iter__(value))
        names += [f"[{i}]" for i in range(len(names), len(listed))]
        parts.append(("sequence", len(listed), [(names[i], i, v) for i, v in enumerate(listed)], None))
    if layout.attributes is not None:
        found = layout.attributes.__get__(value)
        named = [(key_step(n), n, v) for n, v in found.items() if isinstance(n, str) and not n.startswith("_")]
        parts.append(("attributes", len(found), named, None))
        for name in _MODULE_DICTS if issubclass(layout.cls, torch.nn.Module) else ():
            if type(inner := found.get(name)) in (dict, OrderedDict):
                steps = [(key_step(k, in_module=True), k, v) for k, v in inner.items() if type(k) is str]
                parts.append(("module", len(inner), steps, name))
    if layout.slots:
        parts.append(("slots", 0, list(_filled_slots(layout, value)), None))
    return parts


def _dict_part(kind: PartKind, items: dict[Any, Any]) -> Reading:
    if all(map(_is_constant, items)):
        return kind, len(items), [(key_step(k), k, v) for k, v in items.items()], None
    ids = list(map(id, items))  # the manifest holds no objects of the user's: the keys are known by their ids
    return "values", len(items), [(key_step(k), i, v) for i, (k, v) in enumerate(items.items())], ids


def _filled_slots(layout: Layout, value: Any) -> Iterator[tuple[str, Any, Any]]:
    for slot in layout.slots:
        with suppress(AttributeError):  # not set
            yield key_step(slot[0]), slot, slot[1].__get__(value)


def wrapped_tensors(tensor: Any) -> Children:
    """What a tensor subclass says that it wraps."""
    try:
        return [(f".{name}", name, getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]
    except Exception:  # the user's code
        return []


def _static(kind: type, name: str) -> Any:
    """The class attribute as it stands in the class, without binding it; None if there is none."""
    return next((owner.__dict__[name] for owner in kind.__mro__ if name in owner.__dict__), None)


def _is_constant(key: Any) -> bool:
    """Whether a key may be held and shown: it refers to nothing, and its repr runs no code of the user's."""
    return key is None or type(key) in SCALARS or (type(key) is tuple and all(map(_is_constant, key)))


def key_step(key: Any, *, in_module: bool = False) -> str:
    """The step of a path for a key, see Note [Address paths]."""
    if type(key) is str:
        if is_name(key):
            return f".{key}"
        return f"[{key}]" if in_module and key.isdecimal() else f"[{key!r}]"
    if issubclass(type(key), Enum):
        return f"[{type(key).__name__}.{key._name_}]"
    return f"[{key!r}]" if _is_constant(key) else f"[<{type(key).__name__}>]"


def is_name(text: str) -> bool:
    """Whether it can be written behind a dot, in a path and in Python."""
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text)
