"""Walk: what a record of a model enters, and how it reads it without running code of the user.

Note [What is looked at]
    One walk answers for changes of Python, addresses, random generators and what is put back. It
    enters modules with their forward hooks, dicts, lists, tuples, deques, attributes and slots of
    objects, partials and bound methods, of builtin ones the object; of a function its closure,
    defaults, attributes and the globals that its code names, functions and state of other files
    too; of an object ``forward``, ``__call__``, the methods and properties that these name, and
    state of the class under such names; of a class of the user that is a value all of its state. It
    does not enter threads, locks, loggers, functions and classes of torch and Python's library,
    attributes of tensors, and what belongs to graphs (``__graph_memory__``). It reads ``__dict__``,
    slots and cells, never a property, so no code of the user runs but ``__tensor_flatten__``.
"""

from __future__ import annotations

import dis
import io
import random
import re
import sys
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from inspect import getattr_static
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch

NUMBERS = (bool, int, float, complex)
_OF_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout)
PLAIN = frozenset({*NUMBERS, *_OF_TORCH, str, bytes, type(None), range, slice})
_STATE = (torch.Tensor, torch.Generator, torch.nn.Module, dict, list, deque, str, *NUMBERS)
_OPAQUE = (types.ModuleType, Enum, set, frozenset)
_OPAQUE_MODULES = re.compile(
    r"(threading|_thread|logging|weakref|cgplan\.graphs|cgplan\.piecewise)(\.|$)|torch\._"
)
# packages whose code is not entered
_FOREIGN = frozenset({"torch", "cgplan", "numpy", "_pytest", *sys.stdlib_module_names})
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# what torch keeps in the __dict__ of each module
_IN_EACH_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_MOST_ITEMS = 100_000  # of one container: a vocabulary, say, is not looked into
_CELL: Any = types.CellType.cell_contents
_COMPILED = "_torchdynamo_orig_callable"  # where torch.compile keeps a function
_GLOBAL_READS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")

Token = Callable[[], object]  # gives the state of an object that changes inside


class Inside(NamedTuple):
    """A place in an object: what is read, by which key, and the last step of its path."""

    container: Any
    key: Any
    step: str


@dataclass(slots=True)
class _Via:
    """An object whose places are read and bound by these functions, not by its own code."""

    value: Any
    get: Callable[[Any, Any], Any]
    bind: Any = None

    def __getitem__(self, key: Any) -> Any:
        return self.get(self.value, key)

    def __setitem__(self, key: Any, item: Any) -> None:
        self.bind(self.value, key, item)


def _bind_in_class(value: Any, name: str, item: Any) -> None:
    for owner in type(value).__mro__:
        if name in vars(owner):
            type.__setattr__(owner, name, item)
            return


def _read_member(value: Any, member: Any) -> Any:
    return member.__get__(value)


def _bind_member(value: Any, member: Any, item: Any) -> None:
    member.__set__(value, item)


@dataclass(slots=True)
class Contents:
    """A container, as it was.

    Attributes:
        value: The container.
        base: The type that reads it without code of the user.
        length: Of items.
        is_dict: Whether it is a dict, whose keys are ``keys``.
        owner: The object whose attributes it holds, of the class ``kind``.
        holds: Items, attributes of an object, or the parameters, buffers or submodules of a module.
    """

    value: Any
    base: Any
    length: int
    is_dict: bool
    keys: list[Any]
    owner: Any
    kind: type
    holds: Literal["items", "attributes", "parts"]

    @classmethod
    def of(
        cls,
        value: Any,
        base: Any,
        *,
        owner: Any = None,
        holds: Literal["items", "attributes", "parts"] = "items",
    ) -> Contents:
        is_dict = issubclass(base, dict)
        keys = list(base.__iter__(value)) if is_dict else []
        return cls(value, base, base.__len__(value), is_dict, keys, owner, type(owner), holds)


@dataclass(slots=True)
class Found:
    """What is inside of one object: places, and containers by the step of their path."""

    places: list[Inside]
    contents: dict[str, Contents]
    is_compiled: bool = False  # whether torch.compile made it


@dataclass(slots=True)
class Layout:
    """How objects of one class are read: the container that it derives from, and what a walk enters
    of the class.
    """

    is_module: bool
    base: Any
    slots: list[tuple[str, Any]]
    methods: dict[str, types.FunctionType]
    state: dict[str, None]
    is_entered: bool = False  # whether an object of it was met


def layout_of(kind: type) -> Layout | None:
    """None for classes that a walk does not enter."""
    static = dict[str, Any]()
    for owner in reversed(kind.__mro__):
        static.update(vars(owner))
    is_module = issubclass(kind, torch.nn.Module)
    is_foreign = _OPAQUE_MODULES.match(kind.__module__) is not None and not is_module
    if is_foreign or issubclass(kind, _OPAQUE) or "__graph_memory__" in static:
        return None
    bases = (base for base in (OrderedDict, dict, list, tuple, deque) if issubclass(kind, base))
    slots = list[tuple[str, Any]]()
    for owner in kind.__mro__:
        for name, member in vars(owner).items() if "__slots__" in vars(owner) else ():
            if type(member) is types.MemberDescriptorType:
                slots.append((name, member))
    layout = Layout(is_module, next(bases, None), slots, {}, {})
    names = ["forward", "__call__"]
    for name in names:  # it grows by the names that methods name
        value = _function_of(static.get(name))
        if type(value) is types.FunctionType:
            if name not in layout.methods:
                layout.methods[name] = value
                names += _names_in(value)
        elif issubclass(type(value), (*_STATE, type)):
            layout.state[name] = None
    return layout


def _function_of(value: Any) -> Any:
    """The function of a method, static method or property; other values as they are."""
    if type(value) is property:
        return value.fget
    return value.__func__ if type(value) in (staticmethod, classmethod) else value


# --- the code of functions ------------------------------------------------------------------------


def _names_in(function: Any) -> tuple[str, ...]:
    """The names in a function's code, and in that of a function of the user that it wraps."""
    inner = function.__dict__.get("__wrapped__")
    while type(inner) is types.FunctionType:
        function, inner = inner, inner.__dict__.get("__wrapped__")
    return () if _is_foreign(function.__globals__.get("__name__")) else _names_of(function.__code__)


@cache
def _names_of(code: types.CodeType) -> tuple[str, ...]:
    names = dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names.update(dict.fromkeys(_names_of(inner)))
    return tuple(names)


@cache
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The globals that code reads or binds; among its names are those of attributes, too."""
    names = dict[str, None]()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL_READS:
            names[instruction.argval] = None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names.update(dict.fromkeys(_globals_of(inner)))
    return tuple(names)


def _is_foreign(module: object) -> bool:
    return str(module).partition(".")[0] in _FOREIGN


# --- what is inside of an object ------------------------------------------------------------------


def inside(value: Any, layout: Layout | None) -> Found:
    """The places in an object, and the containers that hold them."""
    kind = type(value)
    found = Found([], {})
    if layout is None:
        return found
    if issubclass(kind, types.FunctionType):
        _enter_function(value, found)
    elif issubclass(kind, type):
        _enter_class(value, found)
    elif issubclass(kind, types.BuiltinMethodType):
        if not issubclass(type(value.__self__), types.ModuleType):
            found.places.append(Inside({"": value.__self__}, "", ""))
    elif issubclass(kind, types.MethodType):
        found.places.append(Inside({"": value.__self__}, "", ""))
        found.places.append(Inside({"": value.__func__}, "", ".__func__"))
    elif issubclass(kind, torch.jit.ScriptModule):
        for name, _ in (*value.named_parameters(), *value.named_buffers()):
            found.places.append(Inside(_Via(value, _read_path), name, f".{name}"))
    else:
        if issubclass(kind, partial):
            for name in ("func", "args", "keywords"):
                found.places.append(Inside({"": getattr(value, name)}, "", f".{name}"))
        if layout.base is not None and layout.base.__len__(value) <= _MOST_ITEMS:
            _enter_container(value, layout.base, found)
        _enter_object(value, layout, found)
    return found


def _read_path(value: Any, name: str) -> Any:
    return attrgetter(name)(value)


def _enter_container(value: Any, base: Any, found: Found) -> None:
    kind = type(value)
    where = value
    if kind is not base:
        where = _Via(value, base.__getitem__, getattr(base, "__setitem__", None))
    if base is not tuple:
        found.contents[""] = Contents.of(value, base)
    if issubclass(base, dict):
        for key in dict.keys(value):
            found.places.append(Inside(where, key, step(key)))
        return
    names = getattr(kind, "_fields", ())
    for index in range(base.__len__(value)):
        name = f".{names[index]}" if index < len(names) else f"[{index}]"
        found.places.append(Inside(where, index, name))


def _enter_object(value: Any, layout: Layout, found: Found) -> None:
    """Attributes, slots, and what the walk enters of the class."""
    for name, member in layout.slots:
        found.places.append(Inside(_Via(value, _read_member, _bind_member), member, f".{name}"))
    own: Any = None
    if type(value).__dictoffset__:
        # some classes, such as TypeVar of Python 3.12, claim one and have none
        with suppress(AttributeError):
            own = object.__getattribute__(value, "__dict__")
    if isinstance(own, dict):
        if layout.is_module:
            _enter_module(own, found)
        found.contents[".__dict__"] = Contents.of(own, dict, owner=value, holds="attributes")
        for name in own:
            if not (layout.is_module and name in _IN_EACH_MODULE):
                found.places.append(Inside(own, name, f".{name}"))
    for name in layout.state:
        if name not in (own or ()):
            found.places.append(
                Inside(_Via(value, getattr_static, _bind_in_class), name, f".{name}")
            )
    for name, method in layout.methods.items():
        found.places.append(Inside({"": method}, "", ""))
        if not layout.is_entered:
            where = _Via(type(value), getattr_static, setattr)
            found.places.append(Inside(where, name, f".<{name}>"))
    layout.is_entered = True


def _enter_class(value: type, found: Found) -> None:
    """State of a class of the user's, and of those above it."""
    names = dict[str, None]()
    for owner in value.__mro__:
        if _is_foreign(owner.__module__):
            continue
        for name, held in vars(owner).items():
            if issubclass(type(held), (*_STATE, type)) and not name.startswith("__"):
                names[name] = None
    for name in names:
        found.places.append(Inside(_Via(value, getattr_static, setattr), name, f".{name}"))


def _enter_module(own: dict[str, Any], found: Found) -> None:
    """Parameters, buffers, modules inside, and hooks."""
    for part in _MODULE_DICTS:
        held = own.get(part, {})
        found.is_compiled |= "_orig_mod" in held
        found.contents[f".{part}"] = Contents.of(held, type(held), holds="parts")
        for name in held:
            found.places.append(Inside(held, name, step_to_part(name)))
    for name in HOOKS:
        if name in own:
            found.contents[f".{name}"] = Contents.of(own[name], type(own[name]))
        if own.get(name):
            found.places.append(Inside(own, name, f".{name}"))


def _enter_function(function: types.FunctionType, found: Found) -> None:
    """Objects that a function refers to; of a function that is not the user's, only the one that it
    stands for.
    """
    own, code, named = function.__dict__, function.__code__, function.__globals__
    found.is_compiled |= _COMPILED in own
    if _is_foreign(named.get("__name__")):
        for name in ("__wrapped__", _COMPILED):
            if name in own:
                found.places.append(Inside(own, name, ""))
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        found.places.append(Inside(_Via(cell, _read_member, _bind_member), _CELL, f".<{name}>"))
    for name in ("__defaults__", "__kwdefaults__"):
        if getattr(function, name) is not None:
            found.places.append(Inside(_Via(function, getattr, setattr), name, f".{name}"))
    for name in own:
        found.places.append(Inside(own, name, f".{name}"))
    for name in _globals_of(code):
        value = named.get(name)
        if issubclass(type(value), types.ModuleType | type):
            _enter_namespace(value, name, code, found)
        elif name in named:
            found.places.append(Inside(named, name, f".<{name}>"))


def _enter_namespace(value: Any, name: str, code: types.CodeType, found: Found) -> None:
    """State and functions of a module of the user's, or of a class, that code names."""
    held = vars(value)
    if _is_foreign(held.get("__module__" if issubclass(type(value), type) else "__name__")):
        return
    for inner in _names_of(code):
        if issubclass(type(held.get(inner)), (*_STATE, type, types.FunctionType)):
            where = _Via(value, getattr_static, setattr)
            found.places.append(Inside(where, inner, f".<{name}.{inner}>"))


# --- objects that change inside -------------------------------------------------------------------


def token_of(value: Any) -> Token | None:
    """A function that gives the state of an object which changes inside; None for other objects."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if issubclass(kind, set | frozenset):
        return partial(_of_set, value)
    if issubclass(kind, bytearray | array):
        return partial(_of_bytes, value)
    if issubclass(kind, random.Random):
        return lambda: hash(value.getstate())
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return lambda: (value.shape, hash(value.tobytes()))
    if kind.__module__.startswith("numpy.random"):
        state = value.bit_generator if hasattr(value, "bit_generator") else value
        return lambda: repr(state.__getstate__())
    if issubclass(kind, io.StringIO | io.BytesIO):
        return lambda: None if value.closed else value.tell()
    if hasattr(kind, "__next__") and package not in ("_io", "torch", "cgplan"):
        return object  # another one each time: who asks an iterator moves it on
    return None


def _of_set(value: Any) -> object:
    is_plain = all(type(item) in PLAIN for item in value)
    return frozenset(value) if is_plain else frozenset(map(id, value))


def _of_bytes(value: Any) -> object:
    return memoryview(value).tobytes()


def generators_of_the_host(device: torch.device) -> dict[str, Token]:
    """The random generators of Python, NumPy and torch's host, by name."""
    found: dict[str, Token] = {"Python's random numbers": random.getstate}
    if "numpy.random" in sys.modules:
        found["NumPy's random numbers"] = _numpy_random
    if device.type != "cpu":
        found["torch's random numbers of the host"] = _host_random
    return found


def _numpy_random() -> object:
    state = sys.modules["numpy.random"].get_state()
    return hash(state[1].tobytes()), state[2:]


def _host_random() -> object:
    return hash(bytes(torch.default_generator.get_state().tolist()))


# --- paths ----------------------------------------------------------------------------------------


def step(key: Any) -> str:
    """The step of a path for a key, without code of the user: ``.name``, ``['a b']``,
    ``[<Point>]``.
    """
    if type(key) is str and key.isidentifier():
        return f".{key}"
    if isinstance(key, Enum):
        return f"[{type(key).__name__}.{key._name_}]"
    return f"[{key!r}]" if _is_constant(key) else f"[<{type(key).__name__}>]"


def step_to_part(name: str) -> str:
    """The step to a parameter, buffer or module of a module: ``[0]``, ``.weight``."""
    return f"[{name}]" if name.isdecimal() else f".{name}"


def _is_constant(key: Any) -> bool:
    return type(key) in PLAIN or (type(key) is tuple and all(map(_is_constant, key)))
