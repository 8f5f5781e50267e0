"""Fingerprint: everything that a model holds at one moment, by path, and what has changed since.

Note [What is looked at]
    One walk answers for changes of Python, addresses, random generators and what is put back. It
    enters modules with their forward hooks, dicts, lists, tuples, deques, attributes and slots of
    objects, partials and bound methods; of a function its closure, defaults, attributes and the
    globals that its code names, functions and state of other files too; of an object ``forward``,
    ``__call__``, the methods that these name, and state of the class under such names. It does not
    enter threads, locks, loggers, functions of torch and Python's library, attributes of tensors,
    and what belongs to graphs (``__graph_memory__``). It reads ``__dict__``, slots and cells, never
    a property, so no code of the user runs but ``__tensor_flatten__``.

Note [What counts as a change]
    A plain value is another one (floats by their bits, 1 and True by their types), a container has
    another length, a place holds another object, a tensor lies elsewhere or has another form. Sets,
    bytearrays and NumPy's arrays change with their contents, random generators of Python and NumPy
    with their state; an iterator counts as changed by each run. Numbers that are written into
    tensors in place are no change: graphs see them.
"""

from __future__ import annotations

import dis
import io
import random
import re
import struct
import sys
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache, partial
from inspect import getattr_static
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from cgplan.errors import AddressError

_NUMBERS = (bool, int, float, complex)
_PLAIN = frozenset(
    {
        *_NUMBERS,
        str,
        bytes,
        type(None),
        torch.dtype,
        torch.device,
        torch.Size,
        torch.layout,
        range,
        slice,
    }
)
_STATE = (torch.Tensor, torch.Generator, torch.nn.Module, dict, list, deque, str, *_NUMBERS)
_OPAQUE = (type, types.ModuleType, Enum, set, frozenset)
_OPAQUE_MODULES = re.compile(
    r"(threading|_thread|logging|weakref|cgplan\.graphs|cgplan\.piecewise)(\.|$)|torch\._"
)
_FOREIGN = frozenset(
    {"torch", "cgplan", "numpy", "_pytest", *sys.stdlib_module_names}
)  # packages whose code is not entered
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)
# what torch keeps in the __dict__ of each module
_OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training"}
_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_MOST_ITEMS = 100_000  # of one container: a vocabulary, say, is not looked into
_SHOWN = 10
ABSENT: Any = object()
_ADDRESS: Any = object()  # of a tensor that moved
_GONE = (LookupError, AttributeError, ValueError)  # raised where a place is no longer there
_CELL: Any = types.CellType.cell_contents
_COMPILED = "_torchdynamo_orig_callable"  # where torch.compile keeps a function

# container, key and step of the path of each place in an object
Inside = list[tuple[Any, Any, str]]


@dataclass(slots=True)
class _Via:
    """An object whose places are read and bound by these functions, not by the object's own
    code.
    """

    value: Any
    get: Callable[[Any, Any], Any]
    bind: Any = None

    def __getitem__(self, key: Any) -> Any:
        return self.get(self.value, key)

    def __setitem__(self, key: Any, item: Any) -> None:
        self.bind(self.value, key, item)


def _bind_in_class(value: Any, name: str, item: Any) -> None:
    type.__setattr__(
        next(owner for owner in type(value).__mro__ if name in vars(owner)), name, item
    )


_MEMBER = (
    lambda value, member: member.__get__(value),
    lambda value, member, item: member.__set__(value, item),
)


class _Layout(NamedTuple):
    """How objects of one class are read: the container that it derives from, and what a walk enters
    of the class.
    """

    is_module: bool
    base: Any
    slots: list[tuple[str, Any]]
    methods: dict[types.FunctionType, None]
    state: dict[str, None]


def _layout_of(kind: type) -> _Layout | None:
    """None for classes that a walk does not enter."""
    static = {
        name: value for owner in reversed(kind.__mro__) for name, value in vars(owner).items()
    }
    is_module = issubclass(kind, torch.nn.Module)
    is_foreign = _OPAQUE_MODULES.match(kind.__module__) is not None and not is_module
    if is_foreign or issubclass(kind, _OPAQUE) or "__graph_memory__" in static:
        return None
    base = next(
        (base for base in (OrderedDict, dict, list, tuple, deque) if issubclass(kind, base)), None
    )
    slotted = [vars(owner) for owner in kind.__mro__ if "__slots__" in vars(owner)]
    slots = [
        (n, m)
        for owner in slotted
        for n, m in owner.items()
        if type(m) is types.MemberDescriptorType
    ]
    layout, names = _Layout(is_module, base, slots, {}, {}), ["forward", "__call__"]
    for name in names:  # it grows by the names that methods name
        value: Any = static.get(name)
        value = value.__func__ if type(value) in (staticmethod, classmethod) else value
        if type(value) is types.FunctionType and value not in layout.methods:
            layout.methods[value] = None
            names += _names_in(value)
        elif issubclass(type(value), _STATE):
            layout.state[name] = None
    return layout


def _names_in(function: Any) -> tuple[str, ...]:
    """The names in a function's code, and in that of a function of the user that it wraps."""
    while (
        "__wrapped__" in function.__dict__
        and type(function.__dict__["__wrapped__"]) is types.FunctionType
    ):
        function = function.__dict__["__wrapped__"]
    return () if _is_foreign(function.__globals__.get("__name__")) else _names_of(function.__code__)


@cache
def _names_of(code: types.CodeType) -> tuple[str, ...]:
    inner = [name for c in code.co_consts if isinstance(c, types.CodeType) for name in _names_of(c)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


@cache
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The globals that code reads or binds; among its names are those of attributes, too."""
    inner = [
        name for c in code.co_consts if isinstance(c, types.CodeType) for name in _globals_of(c)
    ]
    read = [
        i.argval
        for i in dis.get_instructions(code)
        if i.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")
    ]
    return tuple(dict.fromkeys((*read, *inner)))


def _is_foreign(module: object) -> bool:
    return str(module).partition(".")[0] in _FOREIGN


@dataclass(slots=True, eq=False)
class Place:
    """One place in the model and what was there.

    Attributes:
        path: Such as ``model.layers[0].weight``.
        above: The place that it lies in.
        home: The id of the object that it lies in, and the last step of the path.
        container, key: Where it is read; None once the record let go of the model's objects.
        value: The object there; None after that.
        address: Of a dense tensor on the device of the record, in bytes.
        asks: Whether such a tensor asks for a gradient.
        form: Of such a tensor: dtype, shape, strides, conjugate and negative bit.
    """

    path: str
    above: Place | None
    home: tuple[int, str]
    container: Any
    key: Any
    value: Any
    address: int | None = None
    asks: bool = False
    form: tuple[Any, ...] | None = None

    @property
    def tensor(self) -> tuple[Any, ...] | None:
        """What each call compares of a tensor beside its identity: address, ``requires_grad``,
        strides, shape.
        """
        if self.address is None or self.form is None:
            return None
        _, shape, strides, _, _ = self.form
        return self.address, self.asks, strides, shape

    def compare(self, now: Any) -> Change | None:
        """What has changed, where the place holds ``now``."""
        if now is not self.value and not is_same(self.value, now):
            return Change(self.path, self.value, now, (self.container, self.key))
        if self.form is None:
            return None
        if _form_of(now) != self.form:
            return Change(self.path, _in_words(self.form), _in_words(_form_of(now)))
        if now.data_ptr() != self.address:
            return Change(self.path, _ADDRESS, _ADDRESS)
        is_asking: bool = now.requires_grad
        return (
            None
            if is_asking == self.asks
            else Change(f"{self.path}.requires_grad", self.asks, is_asking)
        )


class _Inside(NamedTuple):
    """The state of an object that changes inside."""

    token: object


@dataclass(frozen=True, slots=True)
class Change:
    """What was at a place of a record, and what is there now; ``ABSENT`` is nothing, a tensor that
    moved an address. ``where``: the container and the key that bind it.
    """

    path: str
    was: Any
    now: Any
    where: tuple[Any, Any] | None = field(default=None, repr=False, compare=False)

    @property
    def is_move(self) -> bool:
        """Whether a tensor like the one that was there is elsewhere."""
        if not (is_tensor(self.was) and is_tensor(self.now)):
            return self.was is _ADDRESS
        kinds = [
            (t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in (self.was, self.now)
        ]
        return kinds[0] == kinds[1]

    @property
    def is_reshaped(self) -> bool:
        """Whether a tensor of another shape is there."""
        return is_tensor(self.was) and is_tensor(self.now) and self.was.shape != self.now.shape

    def __str__(self) -> str:
        if self.was is _ADDRESS:
            return f"{self.path} (its memory)"
        if type(self.was) is _Inside:
            return f"{self.path} (its contents)"
        if self.is_move:
            return f"{self.path} (another tensor)"
        return f"{self.path} (it was {_words(self.was)} and is {_words(self.now)})"


@dataclass(slots=True)
class Contents:
    """A container, the type that reads it without code of the user, its length, the keys of a dict,
    and the object whose attributes it holds.
    """

    value: Any
    base: Any
    length: int
    keys: list[Any]
    owner: Any
    is_dict: bool

    def added(self, path: str) -> dict[str, Change]:
        """The keys of a dict that came, by path."""
        known = set(map(id, self.keys))
        parts = tuple(f".{part}" for part in _MODULE_DICTS)
        is_of_module = path.endswith(parts)
        head = path.rpartition(".")[0] if is_of_module or path.endswith(".__dict__") else path
        found = dict[str, Change]()
        for key, value in dict.items(self.value):
            if id(key) not in known:
                added = head + (_step_inside(key) if is_of_module else _step(key))
                found[added] = Change(added, ABSENT, value, (self.value, key))
        return found


@dataclass(slots=True, eq=False)
class Fingerprint:
    """Everything that some objects hold at one moment, by path; see Note [What is looked at]. It
    holds the objects until ``let_go``; afterwards paths and addresses alone.

    Attributes:
        roots: The objects by name.
        device: Tensors elsewhere have no address here.
        places: All places, in the order of the walk, by path.
        contents: Containers by path.
        generators: Random generators of the device, but for the default one.
        is_compiled: Whether functions or modules under torch.compile were found.
        volatile: Paths that are not compared: each run of the forward binds another object there.
        only: Paths of the tensors whose addresses are compared; None: all.
        count: The number of tensors with an address, each counted once.
        tokens: Of objects that change inside: path, a function that gives their state, and that
            state.
    """

    roots: dict[str, Any]
    device: torch.device
    places: dict[str, Place] = field(default_factory=dict)
    contents: dict[str, Contents] = field(default_factory=dict)
    generators: tuple[torch.Generator, ...] = ()
    is_compiled: bool = False
    volatile: set[str] = field(default_factory=set)
    only: set[str] | None = None
    count: int = 0
    tokens: list[tuple[str, Callable[[], object], object]] = field(default_factory=list)

    @classmethod
    def of(
        cls, roots: Mapping[str, Any], device: torch.device, *, draws: bool = False
    ) -> Fingerprint:
        """Everything that can be reached from ``roots`` now. ``cuda`` without an index is the
        current device. ``draws``: and where the random generators of the host are.
        """
        found = cls(dict(roots), torch.empty(0, device=device).device)
        with torch._C.DisableTorchFunctionSubclass():
            found._walk()
        if draws:
            found.tokens += _generators_of_the_host(found.device)
        found.tokens = [(path, token, token()) for path, token, _ in found.tokens]
        return found

    def _walk(self) -> None:
        defaults = {id(torch.default_generator), *map(id, torch.cuda.default_generators)}
        # classes may change between walks
        layout_of: Callable[[type], _Layout | None] = cache(_layout_of)
        seen: dict[int, Any] = {}  # holds what was visited, so that ids stay valid
        of_all_modules = vars(torch.nn.modules.module)
        todo: list[Any] = [
            (None, 0, of_all_modules, f"_global{name}", f"torch.nn{name}") for name in _HOOKS
        ]
        todo += [(None, 0, self.roots, name, name) for name in reversed(self.roots)]
        while todo:
            above, home, container, key, step = todo.pop()
            try:
                value = container[key]
            except _GONE:
                continue
            place = above
            if step or above is None:  # an empty step (the object of a bound method) has no path
                path = name = step if above is None else above.path + step
                number = 1
                while path in self.places:
                    number += 1
                    path = f"{name}#{number}"
                place = self.places[path] = Place(path, above, (home, step), container, key, value)
            kind = type(value)
            inside: Inside = []
            if kind in _PLAIN:
                continue
            if issubclass(kind, torch.Tensor):
                inside = self._note_tensor(place, value)
            elif issubclass(kind, torch.Generator):
                if (
                    value.device == self.device
                    and id(value) not in defaults
                    and value not in self.generators
                ):
                    self.generators += (value,)
            elif id(value) not in seen:
                seen[id(value)] = value
                inside = self._enter(value, layout_of(kind), place.path)
            for container, key, step in reversed(inside):
                todo.append((place, id(value), container, key, step))
        self.count = len({id(p.value) for p in self.places.values() if p.address is not None})

    def _note_tensor(self, place: Place, tensor: Any) -> Inside:
        """Take down where a tensor lies; the tensors that it wraps, if it is of such a class."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(
            type(tensor), "__tensor_flatten__"
        ):
            with suppress(Exception):  # code of the user
                inner = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
                own = object.__getattribute__(tensor, "__dict__")
                return [(own if name in own else inner, name, f".{name}") for name in inner]
        with suppress(RuntimeError, NotImplementedError):
            if tensor.layout is torch.strided and tensor.device == self.device:
                place.address, place.asks = tensor.data_ptr(), tensor.requires_grad
                place.form = _form_of(tensor)
        return []

    def _enter(self, value: Any, layout: _Layout | None, path: str) -> Inside:
        kind = type(value)
        if (token := _token_of(value)) is not None:
            self.tokens.append((path, token, None))
        if layout is None:
            return []
        if issubclass(kind, types.FunctionType):
            return self._of_function(value)
        if issubclass(kind, types.MethodType):
            return [({"": value.__self__}, "", ""), ({"": value.__func__}, "", ".__func__")]
        if issubclass(kind, torch.jit.ScriptModule):
            names = [name for name, _ in (*value.named_parameters(), *value.named_buffers())]
            return [
                (_Via(value, lambda v, n: attrgetter(n)(v)), name, f".{name}") for name in names
            ]
        found: Inside = []
        if issubclass(kind, partial):
            found += [
                ({"": getattr(value, name)}, "", f".{name}")
                for name in ("func", "args", "keywords")
            ]
        if (base := layout.base) is not None and base.__len__(value) <= _MOST_ITEMS:
            where = (
                value
                if kind is base
                else _Via(value, base.__getitem__, getattr(base, "__setitem__", None))
            )
            items = list(dict.keys(value) if issubclass(base, dict) else base.__iter__(value))
            if base is not tuple:
                self._note_contents(path, value, base)
            if issubclass(base, dict):
                found += [(where, key, _step(key)) for key in items]
            else:
                names = list(getattr(kind, "_fields", ()))
                found += [
                    (where, i, f".{names[i]}" if i < len(names) else f"[{i}]")
                    for i in range(len(items))
                ]
        return found + self._of_object(value, layout, path)

    def _of_object(self, value: Any, layout: _Layout, path: str) -> Inside:
        """Attributes, slots, and what the walk enters of the class."""
        found: Inside = []
        for name, member in layout.slots:
            found.append((_Via(value, *_MEMBER), member, f".{name}"))
        own: Any = None
        if type(value).__dictoffset__:
            # some classes, such as TypeVar of Python 3.12, claim one and have none
            with suppress(AttributeError):
                own = object.__getattribute__(value, "__dict__")
        if isinstance(own, dict):
            if layout.is_module:
                self._of_module(own, path, found)
            self._note_contents(f"{path}.__dict__", own, dict, value)
            for name in own:
                if not (layout.is_module and name in _OF_TORCH):
                    found.append((own, name, f".{name}"))
        for name in layout.state:
            if name not in (own or ()):
                found.append((_Via(value, getattr_static, _bind_in_class), name, f".{name}"))
        for method in layout.methods:
            found.append(({"": method}, "", ""))
        return found

    def _of_module(self, own: dict[str, Any], path: str, found: Inside) -> None:
        """Parameters, buffers, modules inside, and hooks."""
        for part in _MODULE_DICTS:
            inner = own.get(part, {})
            self.is_compiled |= "_orig_mod" in inner
            self._note_contents(f"{path}.{part}", inner, type(inner))
            for name in inner:
                found.append((inner, name, _step_inside(name)))
        for name in _HOOKS:
            if name in own:
                self._note_contents(f"{path}.{name}", own[name], type(own[name]))
            if own.get(name):
                found.append((own, name, f".{name}"))

    def _of_function(self, function: types.FunctionType) -> Inside:
        """Objects that a function refers to; of a function that is not the user's, only the one
        that it stands for.
        """
        own, code, named = function.__dict__, function.__code__, function.__globals__
        self.is_compiled |= _COMPILED in own
        if _is_foreign(named.get("__name__")):
            return [(own, name, "") for name in ("__wrapped__", _COMPILED) if name in own]
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        found: Inside = [(_Via(cell, *_MEMBER), _CELL, f".<{name}>") for name, cell in cells]
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name) is not None:
                found.append((_Via(function, getattr, setattr), name, f".{name}"))
        found += [(own, name, f".{name}") for name in own]
        for name in _globals_of(code):
            value = named.get(name)
            if issubclass(type(value), types.ModuleType | type):
                of_module = vars(value).get(
                    "__module__" if issubclass(type(value), type) else "__name__"
                )
                for inner in () if _is_foreign(of_module) else _names_of(code):
                    if issubclass(type(vars(value).get(inner)), (*_STATE, types.FunctionType)):
                        found.append(
                            (_Via(value, getattr_static, setattr), inner, f".<{name}.{inner}>")
                        )
            elif name in named:
                found.append((named, name, f".<{name}>"))
        return found

    def _note_contents(self, path: str, value: Any, base: Any, owner: Any = None) -> None:
        is_dict = issubclass(base, dict)
        keys = list(dict.keys(value)) if is_dict else []
        self.contents.setdefault(
            path, Contents(value, base, base.__len__(value), keys, owner, is_dict)
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, on any device, each once."""
        return list(
            {id(p.value): p.value for p in self.places.values() if is_tensor(p.value)}.values()
        )

    def summary(self) -> str:
        """One line on what is looked at."""
        names = ", ".join(f"{name} ({type(value).__name__})" for name, value in self.roots.items())
        generators = f", {len(self.generators)} random generators" if self.generators else ""
        return f"{names}: {self.count} tensors in {len(self.places)} places{generators}"

    # --- changes ----------------------------------------------------------------------------------

    def changes(self, ignore: Iterable[str] = ()) -> dict[str, Change]:
        """What differs from the record now, by path; see Note [What counts as a change]. Paths that
        ``ignore`` names are left out: ``*`` stands for one part.
        """
        found, is_short = dict[str, Change](), False
        with torch._C.DisableTorchFunctionSubclass():
            for place in self.places.values():
                try:
                    now = place.container[place.key]
                except _GONE:
                    now, is_short = ABSENT, True
                if now is place.value and place.form is None:
                    continue
                change = place.compare(now)
                if change is not None:
                    found[change.path] = change
        for path, held in self.contents.items():
            if (
                held.owner is not None
                and object.__getattribute__(held.owner, "__dict__") is not held.value
            ):
                found[path] = Change(path, "its own", "another one")
            length = held.base.__len__(held.value)
            if held.is_dict and (length != held.length or is_short):
                found |= held.added(path)
            elif length != held.length:
                found[f"len({path})"] = Change(f"len({path})", held.length, length)
        for path, token, before in self.tokens:
            now = token()
            if now != before:
                found[path] = Change(path, _Inside(before), _Inside(now))
        return {path: change for path, change in found.items() if not is_ignored(path, ignore)}

    def as_key(self) -> tuple[Any, ...]:
        """Plain values, lengths, addresses, functions, and contents as a hashable key; other
        objects by their type.
        """
        found = list[Any]()
        for path, place in self.places.items():
            value, kind = place.value, type(place.value)
            held: Any = repr(value) if kind in _PLAIN else (place.address, place.form)
            if issubclass(kind, _FUNCTIONS):
                held = value
            found.append((path, kind, held))
        for path, contents in self.contents.items():
            found.append((path, contents.length))
        for path, _, token in self.tokens:
            found.append((path, token))
        return tuple(found)

    def without_draws(self) -> Fingerprint:
        """The same, without the random generators of the host, which move between calls."""
        of_the_host = [path for path, _, _ in _generators_of_the_host(self.device)]
        self.tokens = [token for token in self.tokens if token[0] not in of_the_host]
        return self

    # --- addresses --------------------------------------------------------------------------------

    def let_go(self) -> Fingerprint:
        """Hold nothing of the model any more; addresses can still be compared, given the roots."""
        for place in self.places.values():
            place.container = place.key = place.value = None
        self.roots, self.contents, self.tokens = {}, {}, []
        return self

    def steady(self, places: Mapping[str, Place] | None = None) -> list[Place]:
        """Places that must stay: not where each run of the forward binds another object, nor
        below.
        """
        below = tuple(f"{path}{step}" for path in self.volatile for step in ".[")
        found = self.places if places is None else places
        return [
            p
            for path, p in found.items()
            if path not in self.volatile and not path.startswith(below)
        ]

    def checked(self) -> list[Place]:
        """The places of tensors whose addresses count."""
        found = [place for place in self.steady() if place.address is not None]
        return found if self.only is None else [place for place in found if place.path in self.only]

    def narrow(self, read: Collection[str]) -> None:
        """Compare addresses of parameters, buffers, and of the tensors at these paths alone."""
        held = {
            id(c.value)
            for path, c in self.contents.items()
            if path.endswith(("._parameters", "._buffers"))
        }
        self.only = {
            path
            for path, place in self.places.items()
            if path in read or id(place.container) in held
        }

    def moved(self, now: Fingerprint, *, may_grow: bool = False) -> dict[str, list[str]]:
        """Lines on tensors that lie elsewhere (``changed``), are in another form (``reshaped``),
        are gone (``missing``) or came (``added``, unless ``may_grow``: no graph can depend on
        them), by ``now``, a later record.
        """
        after = {p.path: p for p in self.steady(now.places) if p.address is not None}
        others = {p.home: p for p in after.values()}  # reached by another name first
        lines: dict[str, list[str]] = {
            kind: [] for kind in ("changed", "reshaped", "missing", "added")
        }
        for old in self.checked():
            new = after.get(old.path) or others.get(old.home)
            if new is None:
                lines["missing"].append(old.path)
            elif new.address != old.address:
                lines["changed"].append(
                    f"{old.path}: {old.address:#x} at capture, {new.address:#x} now"
                )
            elif new.form != old.form:
                was, now_is = _in_words(old.form), _in_words(new.form)
                lines["reshaped"].append(f"{old.path}: {was} at capture, {now_is} now")
        if not may_grow:
            lines["added"] += [
                path
                for path in after
                if path not in self.places or self.places[path].address is None
            ]
        return lines

    def refuse_moved(
        self, what: str, roots: Mapping[str, Any] | None = None, *, may_grow: bool = False
    ) -> None:
        """Raise AddressError for all that ``moved`` lists, and for exchanged generators. ``what``
        is the graph; other objects than those of the record come as ``roots``, such as the
        arguments of this call.
        """
        now = Fingerprint.of(self.roots if roots is None else roots, self.device)
        lines = self.moved(now, may_grow=may_grow)
        if any(lines.values()):
            raise AddressError(_message(what, lines, self.count), remedy=_remedy(lines))
        if now.generators != self.generators:
            raise AddressError(
                f"{what} was captured with other torch.Generator objects than the model holds "
                "now: a replay would draw "
                "from the old ones",
                remedy="Seed a generator in place (manual_seed, set_state), or call "
                "runner.recapture().",
            )


def _form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _in_words(form: tuple[Any, ...] | None) -> str:
    assert form is not None, "tensors with an address have a form"
    dtype, shape, strides, is_conj, is_neg = form
    bits = " conjugated" * is_conj + " negated" * is_neg
    return f"{dtype} {list(shape)} with strides {list(strides)}{bits}"


def is_tensor(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor)  # isinstance would ask the object for its class


def is_same(before: Any, now: Any) -> bool:
    """Whether a place holds what it held: the same object, or an equal plain value, tuple of those,
    or method.
    """
    kind = type(before)
    if before is now or kind is not type(now):
        return before is now
    if kind is float:
        return struct.pack("d", before) == struct.pack("d", now)
    if kind is types.MethodType:
        return before.__self__ is now.__self__ and before.__func__ is now.__func__
    if kind is _Inside:
        return bool(before.token == now.token)
    if kind is tuple:
        return len(before) == len(now) and all(map(is_same, before, now))
    return kind in _PLAIN and repr(before) == repr(now)


def is_ignored(path: str, ignore: Iterable[str]) -> bool:
    """Whether a pattern names the path, or a part above it: ``model.calls`` also
    ``len(model.calls)``.
    """
    plain = path.removeprefix("len(").removesuffix(")")
    return any(_matches(plain, pattern) for pattern in ignore)


@cache
def _parts(path: str) -> list[str]:
    return re.findall(r"\[[^\]]*\]|[^.\[]+", path)


def _matches(path: str, pattern: str) -> bool:
    parts, wanted = _parts(path), _parts(pattern)
    return len(parts) >= len(wanted) and all(
        map(fnmatchcase, parts, (w.replace("[", "[[]") for w in wanted))
    )


def _token_of(value: Any) -> Callable[[], object] | None:
    """A function that gives the state of an object which changes inside; None for other objects."""
    kind = type(value)
    if issubclass(kind, set | frozenset):
        return partial(_of_set, value)
    if issubclass(kind, bytearray | array):
        return lambda: memoryview(value).tobytes()
    if issubclass(kind, random.Random):
        return lambda: hash(value.getstate())
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return lambda: (value.shape, hash(value.tobytes()))
    if kind.__module__.startswith("numpy.random"):
        state = value.bit_generator if hasattr(value, "bit_generator") else value
        return lambda: repr(state.__getstate__())
    if issubclass(kind, io.StringIO | io.BytesIO):
        return lambda: None if value.closed else value.tell()
    if hasattr(kind, "__next__") and kind.__module__.partition(".")[0] not in (
        "_io",
        "torch",
        "cgplan",
    ):
        return object  # another one each time: who asks an iterator moves it on
    return None


def _generators_of_the_host(device: torch.device) -> list[tuple[str, Callable[[], object], object]]:
    found: list[tuple[str, Callable[[], object], object]] = [
        ("Python's random numbers", random.getstate, None)
    ]
    if "numpy.random" in sys.modules:
        found.append(("NumPy's random numbers", _numpy_random, None))
    if device.type != "cpu":
        found.append(("torch's random numbers of the host", _host_random, None))
    return found


def _of_set(value: Any) -> object:
    is_plain = all(type(item) in _PLAIN for item in value)
    return frozenset(value) if is_plain else frozenset(map(id, value))


def _numpy_random() -> object:
    state = sys.modules["numpy.random"].get_state()
    return hash(state[1].tobytes()), state[2:]


def _host_random() -> object:
    return hash(bytes(torch.default_generator.get_state().tolist()))


def _words(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    if is_tensor(value):
        return f"a tensor {list(value.shape)}"
    return repr(value)[:60] if type(value) in _PLAIN else f"a {type(value).__name__}"


def _step(key: Any) -> str:
    """The step of a path for a key, without code of the user: ``.name``, ``['a b']``,
    ``[<Point>]``.
    """
    if type(key) is str and key.isidentifier():
        return f".{key}"
    if isinstance(key, Enum):
        return f"[{type(key).__name__}.{key._name_}]"
    return f"[{key!r}]" if _is_constant(key) else f"[<{type(key).__name__}>]"


def _step_inside(name: str) -> str:
    """The step to a parameter, buffer or module of a module: ``[0]``, ``.weight``."""
    return f"[{name}]" if name.isdecimal() else f".{name}"


def _is_constant(key: Any) -> bool:
    return type(key) in _PLAIN or (type(key) is tuple and all(map(_is_constant, key)))


def _message(what: str, lines: dict[str, list[str]], count: int) -> str:
    counts = ", ".join(
        f"{len(found)} {kind}" for kind, found in lines.items() if found or kind != "reshaped"
    )
    only_reshaped = not any(found for kind, found in lines.items() if kind != "reshaped")
    text = f"{what} was captured with {count} tensors that "
    text += f"{'are others now' if only_reshaped else 'have moved'}: {counts}"
    for kind, found in lines.items():
        text += "".join(f"\n  {kind:<7}  {line}" for line in found[:_SHOWN])
        text += f"\n  and {len(found) - _SHOWN} more {kind}" if len(found) > _SHOWN else ""
    return text


def _remedy(lines: dict[str, list[str]]) -> str:
    remedy = (
        "Write new values into the captured tensors in place (copy_), declare the tensor as an "
        "input so that it is "
        "copied into a static buffer, or capture again."
    )
    arguments = (
        re.match(r"args\[(\d+)\](?::|$)", line) for found in lines.values() for line in found
    )
    if positions := sorted({int(argument[1]) for argument in arguments if argument}):
        remedy += (
            " Where it is an argument of a CUDAGraphWrapper that eager code makes on each call, "
            f"options=CUDAGraphOptions(copied_arguments={tuple(positions)}) copies it to where "
            "the graph reads it."
        )
    return remedy
