"""What a record of a model enters: no objects with ``__graph_memory__``, which are not its state.
No user code runs but ``__tensor_flatten__``.
"""

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
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

NUMBERS = (bool, int, float, complex)
PLAIN = frozenset(
    {
        *NUMBERS,
        torch.dtype,
        torch.device,
        torch.Size,
        torch.layout,
        str,
        bytes,
        type(None),
        range,
        slice,
    }
)
# held by classes and modules, and no state
_CODE = (
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    property,
    staticmethod,
    classmethod,
)
_CONTAINERS = (
    OrderedDict,
    dict,
    list,
    tuple,
    deque,
)
_OPAQUE = (types.ModuleType, Enum, set, frozenset)
_OPAQUE_MODULES = re.compile(
    r"(threading|_thread|logging|weakref|cgplan\.graphs|cgplan\.piecewise)(\.|$)|torch\._"
)
_FOREIGN = frozenset({"torch", "cgplan", "numpy", "_pytest", *sys.stdlib_module_names})
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_IN_EACH_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_SMALL = 4096  # bytes
_MOST_ITEMS = 100_000  # of a container that is entered
_CELL: Any = types.CellType.cell_contents
_COMPILED = "_torchdynamo_orig_callable"  # where torch.compile keeps a function
RUN_BY_A_CALL = ("forward", "__call__")
_GLOBAL_READS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")

ReadState = Callable[[], object]


class Inside(NamedTuple):
    """A place in an object; ``step`` ends its path."""

    container: Any
    key: Any
    step: str


@dataclass(slots=True)
class Via:
    """Reads without the object's own code; binds slots."""

    value: Any
    get: Callable[[Any, Any], Any]

    def __getitem__(self, key: Any) -> Any:
        return self.get(self.value, key)

    def __setitem__(
        self,
        member: Any,
        item: Any,
    ) -> None:
        member.__set__(self.value, item)


@dataclass(slots=True)
class InClass:
    """As getattr_static, in a tenth of its time."""

    kind: type

    def __getitem__(self, name: str) -> Any:
        for owner in self.kind.__mro__:
            own = vars(owner)
            if name in own:
                return own[name]
        raise AttributeError(name)


def _read_member(
    value: Any,
    member: Any,
) -> Any:
    return member.__get__(value)


@dataclass(slots=True)
class Contents:
    """A container, as it was.

    Attributes:
        base: The type that reads it without user code.
        owner: The object whose attributes it holds.
    """

    value: Any
    base: Any
    owner: Any = None
    holds: Literal["items", "attributes", "parts"] = "items"
    length: int = field(init=False)
    keys: list[Any] = field(init=False)
    kind: type = field(init=False)

    def __post_init__(self) -> None:
        base = self.base
        self.length = base.__len__(self.value)
        self.keys = list(base.__iter__(self.value)) if issubclass(base, dict) else []
        self.kind = type(self.owner)

    def __getitem__(self, _: int) -> int | None:
        """Its length, unless its last key or owner changed."""
        owner = self.owner
        if type(owner) is not self.kind:
            return None
        if owner is not None and object.__getattribute__(owner, "__dict__") is not self.value:
            return None
        if self.base.__len__(self.value) != self.length:
            return None
        if self.keys and next(self.base.__reversed__(self.value)) is not self.keys[-1]:
            return None
        return self.length  # the same object: places are compared by identity

    def refill(self) -> None:
        """A list or deque that grew."""
        while self.base.__len__(self.value) > self.length:
            self.base.pop(self.value)


@dataclass(slots=True)
class Found:
    entries: list[Inside] = field(default_factory=list)
    contents: dict[str, Contents] = field(default_factory=dict)
    is_compiled: bool = False  # by torch.compile

    def add(
        self,
        container: Any,
        key: Any,
        step: str,
    ) -> None:
        self.entries.append(Inside(container, key, step))

    def add_value(
        self,
        value: Any,
        step: str = "",
    ) -> None:
        self.add({"": value}, "", step)


@dataclass
class Layout:
    """What objects of one class hold.

    Attributes:
        base: The container that the class extends.
        is_foreign: Of torch or Python's library.
        names_entered: How many names were looked up in the class.
    """

    kind: type
    static: dict[str, Any]
    base: Any
    slots: list[tuple[str, Any]]
    is_module: bool
    is_foreign: bool
    names_entered: int = 0


def layout_of(kind: type) -> Layout | None:
    """None: not entered."""
    static = dict[str, Any]()
    for owner in reversed(kind.__mro__):
        static.update(vars(owner))
    is_module = issubclass(kind, torch.nn.Module)
    is_opaque = _OPAQUE_MODULES.match(kind.__module__) is not None and not is_module
    if is_opaque or issubclass(kind, _OPAQUE) or "__graph_memory__" in static:
        return None
    base = next((each for each in _CONTAINERS if issubclass(kind, each)), None)
    slots = []
    for owner in kind.__mro__:
        if "__slots__" not in vars(owner):
            continue
        for name, member in vars(owner).items():
            if type(member) is types.MemberDescriptorType:
                slots.append((name, member))
    return Layout(
        kind,
        static,
        base,
        slots,
        is_module,
        _is_foreign(kind.__module__),
    )


def named_in_class(
    layout: Layout | None,
    named: dict[str, None],
) -> list[Inside]:
    """Methods and attributes of a class that code names."""
    found = Found()
    if layout is None:
        return []
    wanted = list(RUN_BY_A_CALL if layout.is_foreign else named)
    new = wanted[layout.names_entered :]
    layout.names_entered = len(wanted)
    kind = layout.kind
    for name in new:
        if name not in layout.static:
            continue
        value = _function_of(layout.static[name])
        if _is_state(value):
            found.add(InClass(kind), name, f".{name}")
        elif type(value) is types.FunctionType:
            found.add(InClass(kind), name, f".<{name}>")
            found.add_value(value)
            if "super" not in names_in(value):
                continue
            for base in kind.__mro__:
                function = _function_of(vars(base).get(name))
                if type(function) is types.FunctionType and function is not value:
                    found.add(InClass(base), name, f".<{base.__name__}.{name}>")
                    found.add_value(function)
    return found.entries


def _is_state(value: Any) -> bool:
    return not issubclass(type(value), _CODE)


def is_leaf(value: Any) -> bool:
    """Whether the walk finds nothing inside a value."""
    kind = type(value)
    layout = layout_of(kind)
    if layout is None or issubclass(kind, (str, bytes, *NUMBERS)):
        return True
    return layout.base is None and not layout.slots and not kind.__dictoffset__


def _function_of(value: Any) -> Any:
    if type(value) is property:
        return value.fget
    return value.__func__ if type(value) in (staticmethod, classmethod) else value


def names_in(function: Any) -> tuple[str, ...]:
    while type(inner := function.__dict__.get("__wrapped__")) is types.FunctionType:
        function = inner
    if _is_foreign(function.__globals__.get("__name__")):
        return ()
    return _names_of(function.__code__)


def _codes_in(code: types.CodeType) -> list[types.CodeType]:
    found = [code]
    for outer in found:  # it grows
        found += [each for each in outer.co_consts if isinstance(each, types.CodeType)]
    return found


@cache
def _names_of(code: types.CodeType) -> tuple[str, ...]:
    names = {}
    for each in _codes_in(code):
        names.update(dict.fromkeys(each.co_names))
    return tuple(names)


@cache
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """``co_names`` has attributes, too."""
    names = dict[str, None]()
    for each in _codes_in(code):
        for instruction in dis.get_instructions(each):
            if instruction.opname in _GLOBAL_READS:
                names[instruction.argval] = None
    return tuple(names)


@cache
def _is_foreign(module: object) -> bool:
    return str(module).partition(".")[0] in _FOREIGN


def inside(
    value: Any,
    layout: Layout | None,
) -> Found:
    kind = type(value)
    found = Found()
    if layout is None:
        return found
    if issubclass(kind, types.FunctionType):
        _enter_function(value, found)
    elif issubclass(kind, type):
        _enter_class(value, found)
    elif issubclass(kind, types.BuiltinMethodType | types.MethodType):
        owner = value.__self__
        is_tensor = issubclass(type(owner), torch.Tensor)
        found.add_value(owner, ".__self__" * is_tensor)
        if kind is types.MethodType:
            found.add_value(value.__func__, ".__func__")
    elif issubclass(kind, torch.jit.ScriptModule):
        parts = Via(value, lambda part, path: attrgetter(path)(part))
        for name, _ in (*value.named_parameters(), *value.named_buffers()):
            found.add(parts, name, f".{name}")
    else:
        if issubclass(kind, partial):
            for name in ("func", "args", "keywords"):
                found.add_value(getattr(value, name), f".{name}")
        if layout.base is not None and layout.base.__len__(value) <= _MOST_ITEMS:
            _enter_container(value, layout.base, found)
        _enter_object(value, layout, found)
    return found


def _enter_container(
    value: Any,
    base: Any,
    found: Found,
) -> None:
    kind = type(value)
    where = value
    if kind is not base:
        where = Via(value, base.__getitem__)
    if base is not tuple:
        found.contents[""] = Contents(value, base)
    if issubclass(base, dict):
        for key in dict.keys(value):
            found.add(where, key, step(key))
        return
    names = getattr(kind, "_fields", ())
    for index in range(base.__len__(value)):
        name = f"[{index}]"
        if index < len(names):
            name = f".{names[index]}"
        found.add(where, index, name)


def _enter_object(
    value: Any,
    layout: Layout,
    found: Found,
) -> None:
    for name, member in layout.slots:
        slot = Via(value, _read_member)
        found.add(slot, member, f".{name}")
    own = None
    if type(value).__dictoffset__:
        # TypeVar of Python 3.12 claims one and has none
        with suppress(AttributeError):
            own = object.__getattribute__(value, "__dict__")
    if isinstance(own, dict):
        if layout.is_module:
            for part in _MODULE_DICTS:
                held = own.get(part, {})
                found.is_compiled |= "_orig_mod" in held
                found.contents[f".{part}"] = Contents(
                    held,
                    type(held),
                    holds="parts",
                )
                for name in held:
                    found.add(held, name, step_to_part(name))
            for name in HOOKS:
                if name in own:
                    found.contents[f".{name}"] = Contents(own[name], type(own[name]))
                if own.get(name):
                    found.add(own, name, f".{name}")
        found.contents[".__dict__"] = Contents(
            own,
            dict,
            value,
            "attributes",
        )
        for name in own:
            if not (layout.is_module and name in _IN_EACH_MODULE):
                found.add(own, name, f".{name}")


def _enter_class(
    value: type,
    found: Found,
) -> None:
    names = dict[str, None]()
    for owner in value.__mro__:
        if _is_foreign(owner.__module__):
            continue
        for name, held in vars(owner).items():
            if _is_state(held) and not name.startswith("__"):
                names[name] = None
    where = InClass(value)
    for name in names:
        found.add(where, name, f".{name}")


def _enter_function(
    function: types.FunctionType,
    found: Found,
) -> None:
    """Of foreign code, only what it wraps."""
    own = function.__dict__
    code = function.__code__
    named = function.__globals__
    # torch.compiler.disable keeps one, too
    found.is_compiled |= _COMPILED in own and "_torchdynamo_disable" not in own
    if _is_foreign(named.get("__name__")):
        for name in ("__wrapped__", _COMPILED):
            if name in own:
                found.add(own, name, "")
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        found.add(Via(cell, _read_member), _CELL, f".<{name}>")
    for name in ("__defaults__", "__kwdefaults__"):
        if getattr(function, name) is not None:
            found.add(Via(function, getattr), name, f".{name}")
    for name in own:
        found.add(own, name, f".{name}")
    for name in _globals_of(code):
        value = named.get(name)
        if issubclass(type(value), types.ModuleType | type):
            _enter_namespace(value, name, code, found)
        elif name in named:
            found.add(named, name, f".<{name}>")


def _enter_namespace(
    value: Any,
    name: str,
    code: types.CodeType,
    found: Found,
) -> None:
    where = vars(value)
    held = where
    home = "__name__"
    if issubclass(type(value), type):
        where = InClass(value)
        home = "__module__"
    if _is_foreign(held.get(home)):
        return
    for inner in _names_of(code):
        now = held.get(inner)
        if inner in held and (_is_state(now) or type(now) is types.FunctionType):
            found.add(where, inner, f".<{name}.{inner}>")
        elif type(now) in (staticmethod, classmethod):
            found.add_value(now.__func__)


def state_reader(value: Any) -> ReadState | None:
    """None for objects without an inner state."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if issubclass(kind, set | frozenset):
        return partial(_of_set, value)
    if issubclass(kind, bytearray | array):
        return lambda: memoryview(value).tobytes()
    if issubclass(kind, random.Random):
        return lambda: hash(value.getstate())
    if kind is np.ndarray:
        return lambda: (value.shape, hash(value.tobytes()))
    if kind.__module__.startswith("numpy.random"):
        bits = getattr(value, "bit_generator", value)
        return lambda: repr(bits.__getstate__())
    if issubclass(kind, io.StringIO | io.BytesIO):
        return lambda: None if value.closed else value.tell()
    if hasattr(kind, "__next__") and package not in ("_io", "torch", "cgplan"):
        return object  # another one each time: asking an iterator moves it on
    return None


def is_small_array(value: Any) -> bool:
    """Whether each call can compare its contents."""
    return type(value) is np.ndarray and value.nbytes <= _SMALL


def _of_set(value: Any) -> object:
    if PLAIN.issuperset(map(type, value)):
        return frozenset((type(item), item) for item in value)
    return frozenset(map(id, value))


def generators_of_the_host(device: torch.device) -> dict[str, ReadState]:
    found: dict[str, ReadState] = {"Python's random numbers": random.getstate}
    if "numpy.random" in sys.modules:
        found["NumPy's random numbers"] = _numpy_random
    if device.type != "cpu":
        host = torch.default_generator
        found["torch's random numbers of the host"] = lambda: hash(bytes(host.get_state().tolist()))
    return found


def _numpy_random() -> object:
    state = sys.modules["numpy.random"].get_state()
    return hash(state[1].tobytes()), state[2:]


def step(key: Any) -> str:
    """``.name``, ``['a b']``, ``[<Point>]``."""
    if type(key) is str and key.isidentifier():
        return f".{key}"
    if isinstance(key, Enum):
        return f"[{type(key).__name__}.{key._name_}]"
    return f"[{key!r}]" if _is_constant(key) else f"[<{type(key).__name__}>]"


@cache
def step_to_part(name: str) -> str:
    """``[0]``, ``.weight``."""
    return f"[{name}]" if name.isdecimal() else f".{name}"


def _is_constant(key: Any) -> bool:
    return type(key) in PLAIN or (type(key) is tuple and all(map(_is_constant, key)))
