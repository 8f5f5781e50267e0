"""What an eager piece can reach besides its results: what is inside of Python values, and the state of modules."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cached_property
from typing import Any

import torch

from cgplan.backends.host_sync import tensors_in

SCALARS = frozenset({int, float, complex, bool, str, bytes, torch.dtype, torch.device, torch.Size})
# What cannot change, and what stands for code or for a whole model: nothing inside is looked at.
_WHOLE = (type, Enum, torch.Tensor, torch.nn.Module, types.ModuleType, types.FunctionType, types.MethodType)
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # other classes may have no memory of their own
_WHOLE_TYPES = SCALARS | {type(None), range, slice, type(...), torch.layout, torch.memory_format}


def contents(value: Any) -> object:
    """What is inside a mutable object, as a value that equals another one as long as nothing inside has changed.

    Numbers and strings are compared by value, NaN equal to NaN; tensors, modules and functions by what they are. Lists,
    dicts, sets, attributes, slots and objects with a buffer (NumPy arrays, bytearrays) are looked into, at any depth.

    Returns:
        None for what cannot change.
    """
    if type(value) in _WHOLE_TYPES or isinstance(value, _WHOLE):
        return None
    return _inside(value, {})


def _inside(value: Any, seen: dict[int, int]) -> object:
    if type(value) in _WHOLE_TYPES:
        return type(value), repr(value)
    if isinstance(value, _WHOLE):
        return id(value)
    if id(value) in seen:  # met before: a cycle, or one object in two places
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    return type(value), *(_inside_of_part(part, seen) for part in _parts(value))


def _inside_of_part(part: Any, seen: dict[int, int]) -> object:
    if isinstance(part, dict):
        return tuple((_key(key), _inside(inner, seen)) for key, inner in part.items())
    if isinstance(part, set | frozenset):
        return frozenset(map(_key, part))
    if isinstance(part, list | tuple):
        return tuple(_inside(inner, seen) for inner in part)
    return part  # bytes


def _key(key: Any) -> object:
    return (type(key), repr(key)) if type(key) in _WHOLE_TYPES else id(key)


def _parts(value: Any) -> Iterator[Any]:
    """A container's items, an object's attributes and slots, a buffer's bytes."""
    if isinstance(value, dict | set | frozenset | list | tuple):
        yield value
    if isinstance(attributes := getattr(value, "__dict__", None), dict):
        yield attributes
    for owner in type(value).__mro__:
        members = [(n, m) for n, m in vars(owner).items() if isinstance(m, types.MemberDescriptorType)]
        if "__slots__" in vars(owner):
            yield {name: member.__get__(value) for name, member in members if hasattr(value, name)}
    try:
        buffer = memoryview(value)
    except (TypeError, ValueError, BufferError):  # it has none, or none that could be read
        return
    yield (buffer.format, buffer.shape, buffer.tobytes())


def modules_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.nn.Module]:
    """The modules whose state a piece can reach: the one that it is a method of, those it is given, and theirs."""
    reached = (function, getattr(function, "__self__", None), *args, *kwargs.values())
    return [inner for m in reached if isinstance(m, torch.nn.Module) for inner in m.modules()]


def state_of(modules: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Parameters, buffers and tensors in attributes. Tensor subclasses may have no memory of their own."""
    held = (t for m in modules for t in (*vars(m).values(), *m._parameters.values(), *m._buffers.values()))
    return [t for t in held if type(t) in _PLAIN]


class Given:
    """What a call was given, and the state of its modules: objects that eager calls would hand out each time, too."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    @cached_property
    def _tensors(self) -> list[torch.Tensor]:  # to look through all modules takes milliseconds, and few ask for it
        return [*tensors_in(self._call[1:]), *state_of(modules_of(*self._call))]

    def are_seen_by(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view, of their memory or of what a function holds in other ways, and none of them: an
        eager call makes it anew. In inference mode torch does not say what a view is; then their memory alone counts.
        """
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        start = tensor.untyped_storage().data_ptr()
        plain = [t for t in self._tensors if type(t) in _PLAIN and t.layout is torch.strided]
        same = [t for t in plain if t.untyped_storage().data_ptr() == start]
        return (bool(same) or tensor._is_view()) and all(tensor is not one for one in same)


class Containers:
    """The lists, dicts and sets in a function's arguments as they are now.

    Args:
        tree: Arguments; tuples, lists, dicts and sets are looked into.
    """

    def __init__(self, tree: Any) -> None:
        self._found: dict[int, tuple[Any, list[tuple[Any, Any]]]] = {}
        todo = [tree]
        while todo:
            value = todo.pop()
            if not isinstance(value, tuple | list | dict | set) or id(value) in self._found:
                continue
            items = _items(value)
            self._found[id(value)] = value, items
            todo += [item for _, item in items]

    def have_new_values(self) -> bool:
        """Whether values were put into any of them since; values that were taken out are no matter."""
        return any(_has_new(_items(value), before) for value, before in self._found.values())


def _items(value: Any) -> list[tuple[Any, Any]]:
    """(key, value) of a dict; of others the key is None."""
    if isinstance(value, dict):
        return list(dict.items(value))
    return [(None, item) for item in value]


def _has_new(now: list[tuple[Any, Any]], before: list[tuple[Any, Any]]) -> bool:
    """Whether ``now`` is no part of ``before`` in the same order."""
    rest = iter(before)
    return not all(any(key is k and item is i for k, i in rest) for key, item in now)


__all__ = ["Containers", "Given", "contents", "modules_of", "state_of"]
