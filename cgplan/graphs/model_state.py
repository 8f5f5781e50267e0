"""ModelState: everything that a model holds at one moment. It finds moved tensors, and undoes the changes of captures.

Note [What is looked at]
    One walk answers for addresses, exchanged objects, rebinding, random generators and what is put back. It enters
    modules with their forward hooks, dicts, lists, tuples, deques, attributes and slots of objects, partials and bound
    methods; of a function its closure, defaults, attributes and the globals that its code names, functions and state
    of other files too; of an object ``forward``, ``__call__``, the methods that these name, and state of the class
    under such names. It does not enter sets, threads, locks, loggers, functions of torch and Python's library,
    attributes of tensors, and what belongs to graphs (``__graph_memory__``). It reads ``__dict__``, slots and cells,
    never a property, so no code of the user runs but ``__tensor_flatten__``.

Note [What is put back]
    What each run of a capture changes (look, warm-ups, capture: a counter, a KV cache, an attribute that is bound
    again) gets back what it was. What the runs before a capture changed and the capture itself left alone was made
    once, on first use: a table, also in a dict that has one for each size, or a flag. The graph was captured with it,
    so it stays, and the report names it; but not a flag of an object that loses a tensor again, such as a cache that is
    empty once more. Where no capture succeeds, all is put back. A storage is copied before the
    first operator that writes to it: on its device up to a limit, then on the host up to a bound; what is larger still
    is named as not kept. Small storages are put back after each key, too; and those that an operator adds to in place
    (``add_``, ``sub_``) ahead of each run, so that positions do not run past a cache: on a GPU that ends the process.
    Where torch's versions do not count a write (``.data``), a second look tells whether each run writes.
"""

from __future__ import annotations

import dis
import re
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from inspect import getattr_static
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cgplan.backends.host_sync import written_tensors
from cgplan.errors import AddressError

_NUMBERS = (bool, int, float, complex)
_PLAIN = frozenset(
    {*_NUMBERS, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout, range, slice}
)
_STATE = (torch.Tensor, torch.Generator, torch.nn.Module, dict, list, deque, *_NUMBERS)
_OPAQUE = (type, types.ModuleType, Enum, set, frozenset)
_OPAQUE_MODULES = ("threading", "_thread", "logging", "weakref", "torch._", "cgplan.graphs", "cgplan.piecewise")
_FOREIGN = frozenset({"torch", "cgplan", "numpy", *sys.stdlib_module_names})  # packages whose code is not entered
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_TORCH = frozenset(vars(torch.nn.Module()))  # what torch itself keeps in the __dict__ of each module
_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_MOST_ITEMS = 100_000  # of one container: a vocabulary, say, is not looked into
_HOST_COPIES = 1 << 30  # bytes that are copied to the host at most
_COUNTS = ("add_", "sub_", "_foreach_add_", "_foreach_sub_")
_SMALL = 1 << 20  # bytes of a storage made by the forward that is copied before it is written
_SHOWN = 10
_ABSENT: Any = object()
_GONE = (LookupError, AttributeError, ValueError)  # raised where a place is no longer there
_CELL: Any = types.CellType.cell_contents
_COMPILED = "_torchdynamo_orig_callable"  # where torch.compile keeps a function

Outcome = Literal["device", "host", "new", "not kept"]
Token = tuple[str, Any]  # path and what changed there
Inside = list[tuple[Any, Any, str]]  # container, key and step of the path of each place in an object


@dataclass(slots=True)
class _Via:
    """An object whose places are read and bound by these functions, not by the object's own code."""

    value: Any
    get: Callable[[Any, Any], Any]
    bind: Any = None

    def __getitem__(self, key: Any) -> Any:
        return self.get(self.value, key)

    def __setitem__(self, key: Any, item: Any) -> None:
        self.bind(self.value, key, item)


def _bind_in_class(value: Any, name: str, item: Any) -> None:
    type.__setattr__(next(owner for owner in type(value).__mro__ if name in vars(owner)), name, item)


_MEMBER = (lambda value, member: member.__get__(value), lambda value, member, item: member.__set__(value, item))


class _Layout(NamedTuple):
    """How objects of one class are read: the container that it derives from, and what a walk enters of the class."""

    is_module: bool
    base: Any
    slots: list[tuple[str, Any]]
    methods: dict[types.FunctionType, None]
    state: dict[str, None]


def _layout_of(kind: type) -> _Layout | None:
    """None for classes that a walk does not enter."""
    static = {name: value for owner in reversed(kind.__mro__) for name, value in vars(owner).items()}
    is_module = issubclass(kind, torch.nn.Module)
    is_foreign = kind.__module__.startswith(_OPAQUE_MODULES) and not is_module
    if is_foreign or issubclass(kind, _OPAQUE) or "__graph_memory__" in static:
        return None
    base = next((base for base in (OrderedDict, dict, list, tuple, deque) if issubclass(kind, base)), None)
    slotted = [vars(owner) for owner in kind.__mro__ if "__slots__" in vars(owner)]
    slots = [(n, m) for owner in slotted for n, m in owner.items() if type(m) is types.MemberDescriptorType]
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
    while "__wrapped__" in function.__dict__ and type(function.__dict__["__wrapped__"]) is types.FunctionType:
        function = function.__dict__["__wrapped__"]
    return () if _is_foreign(function.__globals__.get("__name__")) else _names_of(function.__code__)


@cache
def _names_of(code: types.CodeType) -> tuple[str, ...]:
    inner = [name for c in code.co_consts if isinstance(c, types.CodeType) for name in _names_of(c)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


@cache
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The globals that code reads; among its names are those of attributes, too."""
    inner = [name for c in code.co_consts if isinstance(c, types.CodeType) for name in _globals_of(c)]
    read = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
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
        form: Of such a tensor: dtype, shape, strides, conjugate and negative bit, in words.
    """

    path: str
    above: Place | None
    home: tuple[int, str]
    container: Any
    key: Any
    value: Any
    address: int | None = None
    form: str = ""


@dataclass(slots=True)
class _Saved:
    """A storage that an operator was about to write: its copy (None where it is too large), and its version then.
    ``look`` is the number of the look that saw it, ``again`` whether a later one did. ``counts``: an operator added to
    it; ``written`` is what the first run left there, and the version then.
    """

    path: str
    tensor: torch.Tensor
    storage: torch.UntypedStorage
    copy: torch.UntypedStorage | None
    version: int | None
    look: int
    kept: Outcome = "device"
    again: bool = False
    counts: bool = False
    written: tuple[torch.UntypedStorage, int | None] | None = None

    @property
    def is_blind(self) -> bool:
        """Whether the version tells nothing of the write: of inference tensors, views of others, and ``.data``."""
        return _version_of(self.tensor) in (None, self.version)


@dataclass(slots=True, eq=False)
class ModelState:
    """Everything that some objects hold at one moment, by path; see Note [What is looked at]. It holds the objects
    until ``let_go``; afterwards paths and numbers alone.

    Attributes:
        roots: The objects by name.
        device: Tensors elsewhere have no address here.
        places: All places, in the order of the walk, by path.
        generators: Random generators of the device, but for the default one.
        is_compiled: Whether functions or modules under torch.compile were found.
        outcome: After ``restore``, bytes by path, and whether the place was put back from a copy (on the ``device`` or
            the ``host``), was made on first use and stays (``new``), or was too large to be copied (``not kept``).
        volatile: Paths that are not compared: each run of the forward binds another object there, or no graph reads it.
        count: The number of tensors with an address, each counted once.
    """

    roots: dict[str, Any]
    device: torch.device
    places: dict[str, Place] = field(default_factory=dict)
    generators: tuple[torch.Generator, ...] = ()
    is_compiled: bool = False
    outcome: dict[str, tuple[int, Outcome]] = field(default_factory=dict)
    volatile: set[str] = field(default_factory=set)
    count: int = 0
    _contents: dict[str, tuple[Any, Any, list[Any]]] = field(default_factory=dict)  # of dicts the keys, else the items
    _fast: list[tuple[Any, Any, Any, int | None]] = field(default_factory=list)
    _storages: dict[int, Place] = field(default_factory=dict)
    _saved: dict[int, _Saved] = field(default_factory=dict)
    _fresh: dict[int, tuple[StorageWeakRef, torch.UntypedStorage, int | None, bool]] = field(default_factory=dict)
    _once: dict[Token, bool] = field(default_factory=dict)  # whether no capture changed it
    _looks: int = 0
    _has_captured: bool = False

    @classmethod
    def of(cls, roots: Mapping[str, Any], device: torch.device) -> ModelState:
        """Everything that can be reached from ``roots`` now. ``cuda`` without an index is the current device."""
        state = cls(dict(roots), torch.empty(0, device=device).device)
        with torch._C.DisableTorchFunctionSubclass():
            state._walk()
        return state

    def _walk(self) -> None:
        defaults = {id(torch.default_generator), *map(id, torch.cuda.default_generators)}
        layout_of: Callable[[type], _Layout | None] = cache(_layout_of)  # classes may change between walks
        seen: dict[int, Any] = {}  # holds what was visited, so that ids stay valid
        todo: list[Any] = [(None, 0, self.roots, name, name) for name in reversed(self.roots)]
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
                if value.device == self.device and id(value) not in defaults and value not in self.generators:
                    self.generators += (value,)
            elif id(value) not in seen:
                seen[id(value)] = value
                if (layout := layout_of(kind)) is not None:
                    inside = self._inside(value, layout, place.path)
            for container, key, step in reversed(inside):
                todo.append((place, id(value), container, key, step))
        self.count = len({id(p.value) for p in self.places.values() if p.address is not None})

    def _note_tensor(self, place: Place, tensor: Any) -> Inside:
        """Take down where a tensor lies; the tensors that it wraps, if it is of such a class."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(type(tensor), "__tensor_flatten__"):
            with suppress(Exception):  # code of the user
                inner = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
                return [(inner, name, f".{name}") for name in inner]
        with suppress(RuntimeError, NotImplementedError):
            if tensor.layout is torch.strided and tensor.device == self.device:
                bits = " conjugated" * tensor.is_conj() + " negated" * tensor.is_neg()
                place.form = f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}{bits}"
                place.address = tensor.data_ptr()
        return []

    def _inside(self, value: Any, layout: _Layout, path: str) -> Inside:
        kind = type(value)
        if issubclass(kind, types.FunctionType):
            return self._of_function(value)
        if issubclass(kind, types.MethodType):
            return [({"": value.__self__}, "", ""), ({"": value.__func__}, "", ".__func__")]
        if issubclass(kind, torch.jit.ScriptModule):
            names = [name for name, _ in (*value.named_parameters(), *value.named_buffers())]
            return [(_Via(value, lambda v, n: attrgetter(n)(v)), name, f".{name}") for name in names]
        found: Inside = []
        if issubclass(kind, partial):
            found += [({"": getattr(value, name)}, "", f".{name}") for name in ("func", "args", "keywords")]
        if (base := layout.base) is not None and base.__len__(value) <= _MOST_ITEMS:
            where = value if kind is base else _Via(value, base.__getitem__, getattr(base, "__setitem__", None))
            items = list(dict.keys(value) if issubclass(base, dict) else base.__iter__(value))
            if base is not tuple:
                self._contents[path] = value, base, items
            if issubclass(base, dict):
                found += [(where, key, _step(key)) for key in items]
            else:
                names = list(getattr(kind, "_fields", ()))
                found += [(where, i, f".{names[i]}" if i < len(names) else f"[{i}]") for i in range(len(items))]
        return found + self._of_object(value, layout, path)

    def _of_object(self, value: Any, layout: _Layout, path: str) -> Inside:
        """Attributes, slots, and what the walk enters of the class."""
        found: Inside = [(_Via(value, *_MEMBER), member, f".{name}") for name, member in layout.slots]
        own: Any = None
        if type(value).__dictoffset__:
            with suppress(AttributeError):  # some classes, such as TypeVar of Python 3.12, claim one and have none
                own = object.__getattribute__(value, "__dict__")
        if isinstance(own, dict):
            for part in _MODULE_DICTS if layout.is_module else ():
                inner = own.get(part, {})
                self.is_compiled |= "_orig_mod" in inner
                self._contents[f"{path}.{part}"] = inner, type(inner), list(inner)
                found += [(inner, name, f"[{name}]" if name.isdecimal() else f".{name}") for name in inner]
            self._contents[f"{path}.__dict__"] = own, dict, list(own)
            hidden = _OF_TORCH.difference(name for name in _HOOKS if own.get(name)) if layout.is_module else ()
            found += [(own, name, f".{name}") for name in own if name not in hidden]
        of_class = [name for name in layout.state if name not in (own or ())]
        found += [(_Via(value, getattr_static, _bind_in_class), name, f".{name}") for name in of_class]
        return found + [({"": method}, "", "") for method in layout.methods]

    def _of_function(self, function: types.FunctionType) -> Inside:
        """Objects that a function refers to; of a function that is not the user's, only the one that it stands for."""
        own, code, named = function.__dict__, function.__code__, function.__globals__
        self.is_compiled |= _COMPILED in own
        if _is_foreign(named.get("__name__")):
            return [(own, name, "") for name in ("__wrapped__", _COMPILED) if name in own]
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        found: Inside = [(_Via(cell, *_MEMBER), _CELL, f".<{name}>") for name, cell in cells]
        given = {name: getattr(function, name) for name in ("__defaults__", "__kwdefaults__")}
        found += [(given, name, f".{name}") for name in given if given[name] is not None]
        found += [(own, name, f".{name}") for name in own]
        for name in _globals_of(code):
            value = named.get(name)
            if issubclass(type(value), types.ModuleType | type):
                of_module = vars(value).get("__module__" if issubclass(type(value), type) else "__name__")
                for inner in () if _is_foreign(of_module) else _names_of(code):
                    if issubclass(type(vars(value).get(inner)), (*_STATE, types.FunctionType)):
                        found.append((_Via(value, getattr_static, setattr), inner, f".<{name}.{inner}>"))
            elif name in named:
                found.append((named, name, f".<{name}>"))
        return found

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, on any device, each once."""
        return list({id(p.value): p.value for p in self.places.values() if _is_tensor(p.value)}.values())

    @property
    def numbers(self) -> dict[str, complex]:
        """The numbers by path."""
        return {path: p.value for path, p in self.places.items() if type(p.value) in _NUMBERS}

    def summary(self) -> str:
        """One line on what is looked at."""
        names = ", ".join(f"{name} ({type(value).__name__})" for name, value in self.roots.items())
        generators = f", {len(self.generators)} random generators" if self.generators else ""
        return f"{names}: {self.count} tensors in {len(self.places)} places{generators}"

    # --- addresses ------------------------------------------------------------------------------------------------

    def let_go(self) -> ModelState:
        """Hold nothing of the model any more; addresses can still be compared, given the roots."""
        for place in self.places.values():
            place.container = place.key = place.value = None
        self.roots, self._fast = {}, []
        for held in (self._contents, self._storages, self._saved):
            held.clear()
        return self

    def holds(self) -> bool:
        """Whether each tensor and generator is where it was, at its address: a fast loop, for checks on each replay.

        False also where something on the way was exchanged that no address depends on, and after ``let_go``.
        """
        if not self._fast:
            ways = set[Place | None]()  # to tensors and generators
            for place in reversed(self._steady(self.places)):
                if place in ways or place.address is not None or issubclass(type(place.value), torch.Generator):
                    ways.add(place.above)
                    self._fast.append((place.container, place.key, place.value, place.address))
        try:
            with torch._C.DisableTorchFunctionSubclass():
                for container, key, value, address in self._fast:
                    if container[key] is not value or (address is not None and value.data_ptr() != address):
                        return False
        except (*_GONE, TypeError):  # nothing can be read where the record let go
            return False
        return True

    def _steady(self, places: Mapping[str, Place]) -> list[Place]:
        """Places that must stay: not where each run of the forward binds another object, nor below."""
        below = tuple(f"{path}{step}" for path in self.volatile for step in ".[")
        return [p for path, p in places.items() if path not in self.volatile and not path.startswith(below)]

    def moved(self, now: ModelState, *, may_grow: bool = False) -> dict[str, list[str]]:
        """Lines on tensors that lie elsewhere (``changed``), are in another form (``reshaped``), are gone (``missing``)
        or came (``added``, unless ``may_grow``: no graph can depend on them), by ``now``, a later record.
        """
        after = {p.path: p for p in self._steady(now.places) if p.address is not None}
        others = {p.home: p for p in after.values()}  # reached by another name first
        lines: dict[str, list[str]] = {kind: [] for kind in ("changed", "reshaped", "missing", "added")}
        for old in self._steady(self.places):
            if old.address is None:
                continue
            new = after.get(old.path) or others.get(old.home)
            if new is None:
                lines["missing"].append(old.path)
            elif new.address != old.address:
                lines["changed"].append(f"{old.path}: {old.address:#x} at capture, {new.address:#x} now")
            elif new.form != old.form:
                lines["reshaped"].append(f"{old.path}: {old.form} at capture, {new.form} now")
        if not may_grow:
            lines["added"] += [path for path in after if path not in self.places or self.places[path].address is None]
        return lines

    def refuse_moved(self, what: str, roots: Mapping[str, Any] | None = None, *, may_grow: bool = False) -> None:
        """Raise AddressError for all that ``moved`` lists, and for exchanged generators. ``what`` is the graph; other
        objects than those of the record come as ``roots``, such as the arguments of this call.
        """
        now = ModelState.of(self.roots if roots is None else roots, self.device)
        lines = self.moved(now, may_grow=may_grow)
        if any(lines.values()):
            raise AddressError(_message(what, lines, self.count), remedy=_remedy(lines))
        if now.generators != self.generators:
            raise AddressError(
                f"{what} was captured with other torch.Generator objects than the model holds now: a replay would draw "
                "from the old ones",
                remedy="Seed a generator in place (manual_seed, set_state), or call runner.recapture().",
            )
        if self._fast:  # something was exchanged that no address depends on: hold what is there now
            self.places = {path: now.places[path] for path in self.places if path in now.places}
            self._fast = []

    # --- what a capture changes -----------------------------------------------------------------------------------

    def rebound(self) -> dict[str, tuple[Any, int | None]]:
        """Paths at which something else is now (``self.cache = self.cache + x``, ``self.step += 1``), or a tensor that
        moved: the object there, and the tensor's address.
        """
        found: dict[str, tuple[Any, int | None]] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for path, place in self.places.items():
                try:
                    now = place.container[place.key]
                except _GONE:
                    now = _ABSENT
                if now is not place.value and not is_same(place.value, now):
                    found[path] = now, None
                elif place.address is not None and now.data_ptr() != place.address:
                    found[path] = now, now.data_ptr()
        return found

    def _changes(self) -> dict[Token, Any]:
        """All differences from the record: the present value by path and kind of change."""
        found: dict[Token, Any] = {(path, "bound"): now for path, now in self.rebound().items()}
        is_short = any(now is _ABSENT for now, _ in found.values())
        for path, (value, base, before) in self._contents.items():
            if not issubclass(base, dict):
                if base.__len__(value) != len(before):
                    found[path, "items"] = tuple(base.__iter__(value))
            elif is_short or dict.__len__(value) != len(before):
                known = set(map(id, before))
                found |= {(path, ("key", id(pair[0]))): pair for pair in dict.items(value) if id(pair[0]) not in known}
        for key, saved in self._saved.items():
            version = _version_of(saved.tensor)
            if version is not None and version != saved.version:
                found[saved.path, key] = version
        return found

    @contextmanager
    def noting_capture(self) -> Iterator[None]:
        """A block that captures one key, after its warm-ups; see Note [What is put back]."""
        warm = self._changes()
        yield
        self.rewind()
        after = self._changes()
        grown = {path for path, kind in after.keys() - warm.keys() if isinstance(kind, tuple)}
        for (path, kind), value in after.items():
            is_first = path not in grown or not isinstance(kind, tuple)  # else a dict grows in captures, too
            stays = (path, kind) in warm and _equal(value, warm[path, kind])
            self._once[path, kind] = self._once.get((path, kind), is_first) and stays
        self._has_captured = True

    @contextmanager
    def setting_context(self) -> Iterator[None]:
        """A block of an engine's code: what it changes is put back, and no graph relies on what is bound there."""
        before = self._changes()
        yield
        self._once |= dict.fromkeys(self._changes().keys() - before.keys(), False)

    def forget_captures(self) -> None:
        """Say that no graph stays, so ``restore`` undoes what was made on first use, too."""
        self._once.clear()
        self._has_captured = False

    def grown(self) -> set[str]:
        """Paths of lists and deques that are longer or shorter than they were."""
        lists = {path: held for path, held in self._contents.items() if not issubclass(held[1], dict)}
        return {path for path, (value, base, was) in lists.items() if base.__len__(value) != len(was)}

    def has_blind_writes(self) -> bool:
        """Whether only another look can tell that a storage is written once, or by each run."""
        return any(saved.is_blind for saved in self._saved.values())

    def save_written(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], limit: int) -> None:
        """Copy the model's storages that an operator is about to write, unless that was done; ``limit`` bytes of copies
        lie on their device, further ones on the host.
        """
        counts = func._opname in _COUNTS
        for tensor in written_tensors(func, args, kwargs):
            try:
                storage = tensor.untyped_storage()
                address = storage.data_ptr()
            except (RuntimeError, NotImplementedError):
                continue
            if not address:
                continue
            if (saved := self._saved.get(address)) is not None:
                saved.again |= self._looks > saved.look
                saved.counts |= counts
                continue
            for place in () if self._storages else self.places.values():
                with suppress(RuntimeError, NotImplementedError):
                    if _is_tensor(place.value):
                        self._storages.setdefault(place.value.untyped_storage().data_ptr(), place)
            if address in self._storages:
                self._save(self._storages[address], storage, limit)
                self._saved[address].counts = counts
            elif storage.nbytes() <= _SMALL and (address not in self._fresh or self._fresh[address][0].expired()):
                self._fresh[address] = StorageWeakRef(storage), storage.clone(), _version_of(tensor), counts

    def adopt_fresh(self) -> None:
        """After a run: small tensors that it made and the model holds now (a counter) get their first values back."""
        fresh, self._fresh = {key: f for key, f in self._fresh.items() if not f[0].expired()}, {}
        for place in ModelState.of(self.roots, self.device).places.values() if fresh else ():
            if _is_tensor(place.value) and place.value.layout is torch.strided:
                storage = place.value.untyped_storage()
                address = storage.data_ptr()
                if address in fresh and address not in self._saved:
                    _, copy, version, counts = fresh[address]
                    saved = _Saved(place.path, place.value, storage, copy, version, self._looks, counts=counts)
                    self._saved[address] = saved
        self._looks += 1

    def rewind(self) -> None:
        """Ahead of each run and after the capture: small tensors that count hold what they held before the first run;
        or, if only the first run wrote them, what it wrote.
        """
        for key, saved in self._saved.items():
            if saved.copy is None or not saved.counts or self._once.get((saved.path, key)):
                continue
            if saved.storage.nbytes() == saved.copy.nbytes() <= _SMALL:
                version = _version_of(saved.tensor)
                saved.written, is_first = saved.written or (saved.storage.clone(), version), saved.written is None
                is_once = not (is_first or saved.again or version != saved.written[1])
                saved.storage.copy_(saved.written[0] if is_once else saved.copy)

    def _save(self, place: Place, storage: torch.UntypedStorage, limit: int) -> None:
        nbytes, kept, copy = storage.nbytes(), "not kept", None
        if self.copied("device") + nbytes <= limit:
            with suppress(torch.OutOfMemoryError):
                kept, copy = "device", storage.clone()
        if copy is None and storage.device.type != "cpu" and self.copied("host") + nbytes <= _HOST_COPIES:
            kept, copy = "host", storage.cpu()
        version = _version_of(place.value)
        self._saved[storage.data_ptr()] = _Saved(place.path, place.value, storage, copy, version, self._looks, kept)  # type: ignore[arg-type]

    def copied(self, where: Outcome = "device") -> int:
        """Bytes of copies that are held now, on their own device or on the host."""
        return sum(s.copy.nbytes() for s in self._saved.values() if s.copy is not None and s.kept == where)

    def restore(self, *, between_keys: bool = False) -> None:
        """Undo the changes since the record, see Note [What is put back]. May be called again; the device is idle.
        ``between_keys``: a forward that counts its calls goes on from where it was; large storages wait for the end.
        """
        changes = self._changes()
        self.outcome.clear()  # a place that stayed after one key may be put back after the next
        for key, saved in self._saved.items():
            nbytes = saved.storage.nbytes()
            if self._once.get((saved.path, key)) or (between_keys and nbytes > _SMALL):
                continue
            if self._has_captured and saved.is_blind and not saved.again and self._looks > saved.look + 1:
                self.outcome[saved.path] = nbytes, "new"
                continue
            self.outcome[saved.path] = nbytes, saved.kept
            if saved.copy is not None and nbytes == saved.copy.nbytes():
                saved.storage.copy_(saved.copy)
                saved.written = None
        emptied = {  # objects that lose a tensor, and with it the flag that says that they have it
            self.places[path].home[0]
            for (path, kind), now in changes.items()
            if kind == "bound" and not self._once.get((path, kind)) and _is_tensor(now[0])
            and not _is_tensor(self.places[path].value)
        }  # fmt: skip
        for path, kind in sorted(changes, key=lambda token: token[1] != "items"):  # lengths come first
            now = changes[path, kind]
            is_flag = kind == "bound" and not _is_tensor(now[0]) and self.places[path].home[0] in emptied
            if self._once.get((path, kind)) and not is_flag:
                self.outcome[path] = now[0].nbytes if kind == "bound" and _is_tensor(now[0]) else 0, "new"
            elif kind == "bound":
                self.volatile.add(path)
                with suppress(LookupError, AttributeError, TypeError):  # a tuple cannot change
                    self.places[path].container[self.places[path].key] = self.places[path].value
            elif kind == "items":
                value, base, before = self._contents[path]
                base.clear(value)
                base.extend(value, before)
            elif isinstance(kind, tuple):  # a key that is new
                value, base, _ = self._contents[path]
                base.__delitem__(value, now[0])

    def drop_copies(self) -> None:
        """Free the copies at once: frames that an exception in a library keeps may hold this record for long."""
        self._saved.clear()


def _is_tensor(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor)  # isinstance would ask the object for its class


def _version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def is_same(before: Any, now: Any) -> bool:
    if type(before) not in (*_NUMBERS, str) or type(before) is not type(now):
        return before is now
    return bool(before == now or before != before)


def _equal(one: Any, other: Any) -> bool:
    if type(one) is tuple and type(other) is tuple:
        return len(one) == len(other) and all(map(_equal, one, other))
    return is_same(one, other)


def _step(key: Any) -> str:
    """The step of a path for a key, without code of the user: ``.name``, ``['a b']``, ``[<Point>]``."""
    if type(key) is str and key.isidentifier():
        return f".{key}"
    if isinstance(key, Enum):
        return f"[{type(key).__name__}.{key._name_}]"
    return f"[{key!r}]" if _is_constant(key) else f"[<{type(key).__name__}>]"


def _is_constant(key: Any) -> bool:
    return type(key) in _PLAIN or (type(key) is tuple and all(map(_is_constant, key)))


def _message(what: str, lines: dict[str, list[str]], count: int) -> str:
    counts = ", ".join(f"{len(found)} {kind}" for kind, found in lines.items() if found or kind != "reshaped")
    only_reshaped = not any(found for kind, found in lines.items() if kind != "reshaped")
    text = f"{what} was captured with {count} tensors that "
    text += f"{'were others' if only_reshaped else 'do not lie where they lay'}: {counts}"
    for kind, found in lines.items():
        text += "".join(f"\n  {kind:<7}  {line}" for line in found[:_SHOWN])
        text += f"\n  and {len(found) - _SHOWN} more {kind}" if len(found) > _SHOWN else ""
    return text


def _remedy(lines: dict[str, list[str]]) -> str:
    remedy = (
        "Write new values into the captured tensors in place (copy_), declare the tensor as an input so that it is "
        "copied into a static buffer, or capture again."
    )
    arguments = (re.match(r"args\[(\d+)\](?::|$)", line) for found in lines.values() for line in found)
    if positions := sorted({int(argument[1]) for argument in arguments if argument}):
        remedy += (
            " Where it is an argument of a CUDAGraphWrapper that eager code makes on each call, "
            f"options=CUDAGraphOptions(copied_arguments={tuple(positions)}) copies it to where the graph reads it."
        )
    return remedy
