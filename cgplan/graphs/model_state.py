"""ModelState: everything that a model holds at one moment. It finds moved tensors, and undoes the changes of captures.

Note [What is looked at]
    One walk answers for addresses, exchanged objects, rebinding, random generators and what is put back. It enters
    modules, dicts, lists, tuples, deques, attributes and slots of objects, partials and bound methods; of a function
    what it is closed over, its defaults and attributes, and the globals that its own code names, functions of its
    file included; of a module its forward hooks; of a class with
    ``forward`` or ``__call__`` the tensors, generators, modules, numbers and containers that this method names. A
    script module is read through ``named_parameters`` and ``named_buffers``. The walk does not enter sets, classes,
    Python modules, threads, locks, attributes of tensors, and what belongs to graphs (``__graph_memory__``). It reads
    ``__dict__``, slots and cells, never a property, so no code of the user runs but ``__tensor_flatten__``.

Note [What is put back]
    A capture runs the forward: look, warm-ups, capture. What each of these runs changes (a counter, a KV cache, an
    attribute that is bound again, an item appended) gets back what it was. What the runs before a capture changed and
    the capture itself left alone was made once, on first use: a table, a flag that says so. The graph was captured with
    it, so it stays, and the report names it. Where no capture succeeds, all is put back.
    A storage is copied before the first operator that writes to it, so only what is written is copied. Storages beyond
    the limit are copied to the host, up to a bound; what is larger still is named as not kept.
"""

from __future__ import annotations

import keyword
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cgplan.backends.host_sync import written_tensors
from cgplan.errors import AddressError

_NUMBERS = (bool, int, float, complex)
_PLAIN = frozenset(
    {*_NUMBERS, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout, range, slice}
)
_STATE = (torch.Tensor, torch.Generator, torch.nn.Module, dict, list, deque, *_NUMBERS)  # globals of a class's method
_OPAQUE = (type, types.ModuleType, Enum, set, frozenset)
_OPAQUE_MODULES = ("threading", "_thread", "logging", "weakref", "torch._", "cgplan.graphs", "cgplan.piecewise")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_TORCH = frozenset(vars(torch.nn.Module()))  # what torch itself keeps in the __dict__ of each module
_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_MOST_ITEMS = 100_000  # of one container: a vocabulary, say, is not looked into
_HOST_COPIES = 1 << 30  # bytes that are copied to the host at most
_SMALL = 1 << 20  # bytes of a storage made by the forward that is copied before it is written
_SHOWN = 10
_ABSENT: Any = object()
_CELL: Any = types.CellType.cell_contents
_COMPILED = "_torchdynamo_orig_callable"  # where torch.compile keeps a function

Outcome = Literal["device", "host", "new", "not kept"]
Token = tuple[str, Any]  # path and what changed there


@dataclass(slots=True)
class _Based:
    """Items of a subclass of a builtin container, read and written without the subclass's code."""

    base: Any
    value: Any

    def __getitem__(self, key: Any) -> Any:
        return self.base.__getitem__(self.value, key)

    def __setitem__(self, key: Any, item: Any) -> None:
        self.base.__setitem__(self.value, key, item)

    def __delitem__(self, key: Any) -> None:
        self.base.__delitem__(self.value, key)


@dataclass(slots=True)
class _Members:
    """Slots of an object, or the contents of a cell; keys are the descriptors."""

    value: Any

    def __getitem__(self, member: Any) -> Any:
        return member.__get__(self.value)

    def __setitem__(self, member: Any, item: Any) -> None:
        member.__set__(self.value, item)

    def __delitem__(self, member: Any) -> None:
        member.__delete__(self.value)


@dataclass(slots=True)
class _Scripted:
    """Parameters and buffers of a script module, by their dotted names."""

    value: Any

    def __getitem__(self, name: str) -> Any:
        *modules, last = name.split(".")
        value = self.value
        for step in (*modules, last):
            value = getattr(value, step)
        return value


@dataclass(slots=True)
class _Layout:
    """How the objects of one class are read without code of the class."""

    is_opaque: bool
    is_compiled: bool
    attributes: Any
    slots: tuple[tuple[str, Any], ...]
    methods: tuple[types.FunctionType, ...]

    @classmethod
    def of(cls, kind: type) -> _Layout:
        static: dict[str, Any] = {}
        for owner in reversed(kind.__mro__):
            static |= vars(owner)
        own = next((vars(owner)["__dict__"] for owner in kind.__mro__ if "__dict__" in vars(owner)), None)
        is_module = issubclass(kind, torch.nn.Module)
        opaque = issubclass(kind, _OPAQUE) or "__graph_memory__" in static
        slots = [vars(owner).items() for owner in kind.__mro__ if "__slots__" in vars(owner)]
        return cls(
            opaque or (kind.__module__.startswith(_OPAQUE_MODULES) and not is_module),
            is_module and any(_COMPILED in f.__dict__ for f in static.values() if isinstance(f, types.FunctionType)),
            own if isinstance(own, types.GetSetDescriptorType | types.MemberDescriptorType) else None,
            tuple((n, m) for items in slots for n, m in items if isinstance(m, types.MemberDescriptorType)),
            tuple(f for n in ("forward", "__call__") if isinstance(f := static.get(n), types.FunctionType)),
        )


@dataclass(slots=True, eq=False)
class Place:
    """One place in the model and what was there.

    Attributes:
        path: Such as ``model.layers[0].weight``.
        container, key: Where it is read; None once the record let go of the model's objects.
        value: The object there; None after that.
        step: The last step of the path.
        home: The id of the container.
        address: Of a dense tensor on the device of the record, in bytes.
        form: Of such a tensor: dtype, shape, strides, conjugate and negative bit.
    """

    path: str
    container: Any
    key: Any
    value: Any
    step: str
    home: int
    address: int | None = None
    form: tuple[Any, ...] | None = None

    def now(self) -> Any:
        """The object there now; ``_ABSENT`` if there is none."""
        try:
            return self.container[self.key]
        except (LookupError, AttributeError, ValueError):
            return _ABSENT


@dataclass(slots=True)
class _Saved:
    """A storage that an operator was about to write: its copy (None where it is too large), and its version then."""

    path: str
    tensor: torch.Tensor
    storage: torch.UntypedStorage
    copy: torch.UntypedStorage | None
    nbytes: int
    version: int | None
    kept: Outcome = "device"


@dataclass(slots=True, eq=False)
class ModelState:
    """Everything that some objects hold at one moment, by path; see Note [What is looked at].

    It holds the objects until ``let_go``; afterwards paths and numbers alone.

    Attributes:
        roots: The objects by name.
        device: Tensors elsewhere have no address here.
        places: All places, in the order of the walk, by path.
        generators: Random generators of the device, but for the default one.
        is_compiled: Whether functions or modules under torch.compile were found.
        outcome: After ``restore``, bytes by path, and whether the place was put back from a copy (on the ``device`` or
            the ``host``), was made on first use and stays (``new``), or was too large to be copied (``not kept``).
        volatile: Paths at which each run of the forward binds another object.
    """

    roots: dict[str, Any]
    device: torch.device
    places: dict[str, Place] = field(default_factory=dict)
    generators: tuple[torch.Generator, ...] = ()
    is_compiled: bool = False
    outcome: dict[str, tuple[int, Outcome]] = field(default_factory=dict)
    volatile: set[str] = field(default_factory=set)
    _sizes: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # of dicts their keys, of lists their items
    _fast: list[tuple[Any, Any, Any, int | None]] = field(default_factory=list)
    _storages: dict[int, Place] | None = None
    _saved: dict[int, _Saved] = field(default_factory=dict)
    _fresh: dict[int, tuple[StorageWeakRef, torch.UntypedStorage, int | None]] = field(default_factory=dict)
    _once: set[Token] = field(default_factory=set)
    _each: set[Token] = field(default_factory=set)
    _count: int = 0

    @classmethod
    def of(cls, roots: Mapping[str, Any], device: torch.device) -> ModelState:
        """Everything that can be reached from ``roots`` now. ``cuda`` without an index is the current device."""
        state = cls(dict(roots), torch.empty(0, device=device).device)
        with torch._C.DisableTorchFunctionSubclass():
            state._walk()
        return state

    def _walk(self) -> None:
        generators: dict[int, torch.Generator] = {}
        defaults = {id(torch.default_generator), *map(id, torch.cuda.default_generators)}
        layouts: dict[type, _Layout] = {}
        seen: dict[int, Any] = {}  # holds what was visited, so that ids stay valid
        todo: list[tuple[Any, Any, str, str]] = [(self.roots, name, "", name) for name in reversed(self.roots)]
        while todo:
            container, key, above, step = todo.pop()
            place = Place(above + step, container, key, _ABSENT, step, id(getattr(container, "value", container)))
            value = place.value = place.now()
            if value is _ABSENT:
                continue
            path, number = place.path, 1
            while step and place.path in self.places:
                number += 1
                place.path = f"{path}#{number}"
            if step or not above:  # else it stands for what it was found in
                self.places[place.path] = place
            kind = type(value)
            if kind in _PLAIN:
                continue
            if issubclass(kind, torch.Tensor):
                inner = self._note_tensor(place, value)
                todo += [(inner, name, place.path, f".{name}") for name in reversed(inner)]
            elif id(value) not in seen:
                seen[id(value)] = value
                if issubclass(kind, torch.Generator):
                    if value.device == self.device and id(value) not in defaults:
                        generators[id(value)] = value
                    continue
                layout = layouts[kind] if kind in layouts else layouts.setdefault(kind, _Layout.of(kind))
                if not layout.is_opaque:
                    self.is_compiled |= layout.is_compiled
                    children = list(self._children(value, layout, place.path))
                    todo += [(where, key, place.path, step) for where, key, step in reversed(children)]
        self.generators = tuple(generators.values())
        self._count = len({id(p.value) for p in self.places.values() if p.address is not None})

    def _note_tensor(self, place: Place, tensor: torch.Tensor) -> dict[str, Any]:
        """Take down where a tensor lies; the tensors that it wraps, if it is of such a class."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(type(tensor), "__tensor_flatten__"):
            with suppress(Exception):  # code of the user
                return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}  # type: ignore[attr-defined]
        with suppress(RuntimeError, NotImplementedError):
            if tensor.layout is torch.strided and tensor.device == self.device:
                place.address, place.form = tensor.data_ptr(), _form_of(tensor)
        return {}

    def _children(self, value: Any, layout: _Layout, path: str) -> Iterator[tuple[Any, Any, str]]:
        """(container, key, step of the path) of each place inside."""
        kind = type(value)  # isinstance would ask the object for its class
        if issubclass(kind, types.MethodType):
            yield {"": value.__self__}, "", ""
            yield {"": value.__func__}, "", ".__func__"
        elif issubclass(kind, types.FunctionType):
            yield from self._of_function(value)
        elif issubclass(kind, torch.jit.ScriptModule):
            yield from ((_Scripted(value), n, f".{n}") for n, _ in (*value.named_parameters(), *value.named_buffers()))
        elif issubclass(kind, partial):
            yield from (({"": getattr(value, n)}, "", f".{n}") for n in ("func", "args", "keywords"))
        elif issubclass(kind, dict):
            yield from self._of_dict(value, path)
        elif issubclass(kind, list | tuple | deque):
            base: Any = next(b for b in (list, tuple, deque) if issubclass(kind, b))
            if base.__len__(value) <= _MOST_ITEMS:
                where = value if kind is base else _Based(base, value)
                items, names = list(base.__iter__(value)), getattr(kind, "_fields", ())
                if base is not tuple:
                    self._sizes[path] = where, items
                yield from ((where, i, f".{names[i]}" if i < len(names) else f"[{i}]") for i in range(len(items)))
        if not issubclass(kind, types.FunctionType | torch.jit.ScriptModule):
            yield from self._of_object(value, layout, path)

    def _of_dict(self, value: dict[Any, Any], path: str, *, in_module: bool = False) -> Iterator[tuple[Any, Any, str]]:
        if dict.__len__(value) <= _MOST_ITEMS:
            base = OrderedDict if issubclass(type(value), OrderedDict) else dict
            where = value if type(value) in (dict, OrderedDict) else _Based(base, value)
            self._sizes[path] = where, list(dict.keys(value))
            yield from ((where, key, _step(key, in_module=in_module)) for key in dict.keys(value))

    def _of_object(self, value: Any, layout: _Layout, path: str) -> Iterator[tuple[Any, Any, str]]:
        """Attributes, slots, and the globals of ``forward`` and ``__call__`` that may be state."""
        if layout.attributes is not None and isinstance(own := layout.attributes.__get__(value), dict):
            is_module = issubclass(type(value), torch.nn.Module)
            for part in _MODULE_DICTS if is_module else ():
                if isinstance(inner := own.get(part), dict):
                    self.is_compiled |= "_orig_mod" in inner
                    yield from self._of_dict(inner, f"{path}.{part}", in_module=True)
            self._sizes[f"{path}.__dict__"] = own, list(own)
            hidden = _OF_TORCH.difference(hooks for hooks in _HOOKS if own.get(hooks)) if is_module else ()
            yield from ((own, name, _step(name)) for name in own if isinstance(name, str) and name not in hidden)
        yield from ((_Members(value), member, _step(name)) for name, member in layout.slots)
        for method in layout.methods:
            for where, key, step in self._of_function(method):
                if isinstance(where, _Members) or isinstance(where[key], _STATE):
                    yield where, key, step

    def _of_function(self, function: types.FunctionType) -> Iterator[tuple[Any, Any, str]]:
        """Objects that a function refers to; of a function that torch made, only the one that it stands for."""
        own = function.__dict__
        self.is_compiled |= _COMPILED in own
        if str(function.__globals__.get("__name__", "")).startswith(("torch.", "cgplan.")):
            yield from ((own, name, "") for name in ("__wrapped__", _COMPILED) if name in own)
            return
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            yield _Members(cell), _CELL, f".<{name}>"
        for name in ("__defaults__", "__kwdefaults__"):
            if (given := getattr(function, name)) is not None:
                yield {"": given}, "", f".{name}"
        yield from ((own, name, _step(name)) for name in own)
        named = function.__globals__
        self.is_compiled |= any(_COMPILED in getattr(named.get(name), "__dict__", ()) for name in code.co_names)
        yield from (
            (named, name, f".<{name}>")
            for name in code.co_names
            if name in named and (not isinstance(named[name], types.FunctionType) or named[name].__globals__ is named)
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, on any device, each once."""
        found = {id(p.value): p.value for p in self.places.values() if isinstance(p.value, torch.Tensor)}
        return list(found.values())

    def __len__(self) -> int:
        """The number of tensors with an address, each counted once."""
        return self._count

    def summary(self) -> str:
        """One line on what is looked at."""
        names = ", ".join(f"{name} ({type(value).__name__})" for name, value in self.roots.items())
        generators = f", {len(self.generators)} random generators" if self.generators else ""
        return f"{names}: {self._count} tensors in {len(self.places)} places{generators}"

    # --- addresses ------------------------------------------------------------------------------------------------

    def let_go(self) -> ModelState:
        """Hold nothing of the model any more; addresses can still be compared, given the roots."""
        for place in self.places.values():
            place.container = place.key = place.value = None
        self.roots, self._storages, self._fast = {}, None, []
        self._sizes.clear()
        self._saved.clear()
        return self

    def holds(self) -> bool:
        """Whether each object is where it was and each tensor at its address: a fast loop, for checks on each replay.

        False also where something was exchanged that no address depends on, and after ``let_go``.
        """
        if not self._fast:
            for p in self.places.values():
                if p.container is not None and type(p.value) not in _PLAIN and self._counts(p.path):
                    self._fast.append((p.container, p.key, p.value, p.address))
        try:
            with torch._C.DisableTorchFunctionSubclass():
                for container, key, value, address in self._fast:
                    if container[key] is not value or (address is not None and value.data_ptr() != address):
                        return False
        except (LookupError, AttributeError, ValueError):
            return False
        return bool(self._fast)

    def _counts(self, path: str) -> bool:
        """Whether what is at a path must stay: not where each run of the forward binds another object, nor below."""
        return not any(path == v or path.startswith((f"{v}.", f"{v}[")) for v in self.volatile)

    def moved(self, now: ModelState | None = None, *, may_grow: bool = False) -> list[str]:
        """Lines on tensors that lie elsewhere (``changed``), are in another form (``reshaped``), are gone (``missing``)
        or came (``added``, unless ``may_grow``).

        Args:
            now: Another record of the same roots; absent: as they are now.
            may_grow: Leave out tensors that came: no graph can depend on them.
        """
        now = ModelState.of(self.roots, self.device) if now is None else now
        before = {path: p for path, p in self.places.items() if p.address is not None and self._counts(path)}
        after = {path: p for path, p in now.places.items() if p.address is not None and self._counts(path)}
        others = {(p.home, p.step): p for p in after.values()}  # reached by another name first
        lines: dict[str, list[str]] = {"changed": [], "reshaped": [], "missing": [], "added": []}
        for path, old in before.items():
            new = after.get(path) or others.get((old.home, old.step))
            if new is None:
                lines["missing"].append(path)
            elif new.address != old.address:
                lines["changed"].append(f"{path}: {old.address:#x} at capture, {new.address:#x} now")
            elif new.form != old.form:
                lines["reshaped"].append(f"{path}: {_words(old.form)} at capture, {_words(new.form)} now")
        if not may_grow:
            lines["added"] += [path for path in after if path not in before]
        return [f"{kind:<7}  {line}" for kind, found in lines.items() for line in found]

    def refuse_moved(self, what: str, roots: Mapping[str, Any] | None = None, *, may_grow: bool = False) -> None:
        """Raise AddressError for what ``moved`` lists, and for exchanged generators; ``what`` is the graph.

        Args:
            roots: Other objects in place of those of the record, such as the arguments of this call.
            may_grow: As for ``moved``.
        """
        now = ModelState.of(self.roots if roots is None else roots, self.device)
        if lines := self.moved(now, may_grow=may_grow):
            raise AddressError(_message(what, lines, self._count), remedy=_remedy(lines))
        if [id(g) for g in now.generators] != [id(g) for g in self.generators]:
            raise AddressError(
                f"{what} was captured with other torch.Generator objects than the model holds now: a replay would draw "
                "from the old ones",
                remedy="Seed a generator in place (manual_seed, set_state), or call runner.recapture().",
            )
        if self._fast:  # something was exchanged that no address depends on: hold what is there now
            self.places = {path: now.places[path] for path in self.places if path in now.places}
            self._fast = []

    # --- what a capture changes -----------------------------------------------------------------------------------

    def rebound(self) -> list[Place]:
        """Places at which something else is now: ``self.cache = self.cache + x``, ``self.step += 1``."""
        return [p for p in self.places.values() if not _is_same(p.value, p.now())]

    def _changes(self) -> dict[Token, Any]:
        """All differences from the record: the present value by path and kind of change."""
        found: dict[Token, Any] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for place in self.places.values():
                now = place.now()
                if not _is_same(place.value, now):
                    found[place.path, "bound"] = now
                elif place.address is not None and now.data_ptr() != place.address:
                    found[place.path, "moved"] = now.data_ptr()
        is_short = any(now is _ABSENT for now in found.values())
        for path, (where, before) in self._sizes.items():
            value = where.value if type(where) is _Based else where
            if issubclass(type(value), dict):
                if is_short or dict.__len__(value) != len(before):
                    known = set(map(id, before))
                    if new := tuple(pair for pair in dict.items(value) if id(pair[0]) not in known):
                        found[path, "keys"] = new
            elif (base := list if isinstance(value, list) else deque).__len__(value) != len(before):
                found[path, "items"] = tuple(base.__iter__(value))
        for key, saved in self._saved.items():
            version = _version_of(saved.tensor)
            if version is not None and version != saved.version:
                found[saved.path, ("written", key)] = version
        return found

    @contextmanager
    def noting_capture(self) -> Iterator[None]:
        """A block that captures one key, after its warm-ups; see Note [What is put back]."""
        warm = self._changes()
        yield
        after = self._changes()
        once = {token for token, value in warm.items() if token in after and _equal(value, after[token])}
        self._once |= once
        self._each |= after.keys() - once

    def save_written(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], limit: int) -> None:
        """Copy the model's storages that an operator is about to write, unless that was done.

        Args:
            func, args, kwargs: The operator and its arguments, in a dispatch mode around the forward.
            limit: Bytes of copies on their device; further ones lie on the host.
        """
        for tensor in written_tensors(func, args, kwargs):
            try:
                storage = tensor.untyped_storage()
                address = storage.data_ptr()
            except (RuntimeError, NotImplementedError):
                continue
            if not address or address in self._saved:
                continue
            if (place := self._storage_places().get(address)) is not None:
                self._saved[address] = self._save(place, storage, limit)
            elif storage.nbytes() <= _SMALL and (address not in self._fresh or self._fresh[address][0].expired()):
                self._fresh[address] = StorageWeakRef(storage), storage.clone(), _version_of(tensor)

    def adopt_fresh(self) -> None:
        """After a run: small tensors that it made and the model holds now (a counter) get back the values that they
        were made with, if captures write them, too.
        """
        fresh, self._fresh = {key: f for key, f in self._fresh.items() if not f[0].expired()}, {}
        for place in ModelState.of(self.roots, self.device).places.values() if fresh else ():
            if isinstance(place.value, torch.Tensor) and place.value.layout is torch.strided:
                storage = place.value.untyped_storage()
                if (found := fresh.get(storage.data_ptr())) is not None and storage.data_ptr() not in self._saved:
                    copy, version = found[1:]
                    saved = _Saved(place.path, place.value, storage, copy, copy.nbytes(), version)
                    self._saved[storage.data_ptr()] = saved

    def _storage_places(self) -> dict[int, Place]:
        if self._storages is None:
            self._storages = {}
            for place in self.places.values():
                if isinstance(place.value, torch.Tensor):
                    with suppress(RuntimeError, NotImplementedError):
                        self._storages.setdefault(place.value.untyped_storage().data_ptr(), place)
        return self._storages

    def _save(self, place: Place, storage: torch.UntypedStorage, limit: int) -> _Saved:
        nbytes, copy, kept = storage.nbytes(), None, "not kept"
        if self.copied("device") + nbytes <= limit:
            with suppress(torch.OutOfMemoryError):
                copy, kept = storage.clone(), "device"
        if copy is None and storage.device.type != "cpu" and self.copied("host") + nbytes <= _HOST_COPIES:
            copy, kept = storage.cpu(), "host"
        return _Saved(place.path, place.value, storage, copy, nbytes, _version_of(place.value), kept)  # type: ignore[arg-type]

    def copied(self, where: Outcome = "device") -> int:
        """Bytes of copies that are held now, on their own device or on the host."""
        return sum(saved.nbytes for saved in self._saved.values() if saved.kept == where)

    def restore(self) -> None:
        """Undo the changes since the record, see Note [What is put back]. May be called again; the device is idle."""
        stays, changes = self._once - self._each, self._changes()
        for key, saved in self._saved.items():
            if (saved.path, ("written", key)) not in stays:
                self.outcome[saved.path] = saved.nbytes, saved.kept
                if saved.copy is not None and saved.storage.nbytes() == saved.nbytes:
                    saved.storage.copy_(saved.copy)
        for path, kind in sorted(changes, key=lambda token: token[1] != "items"):  # lengths come first
            if (path, kind) in stays:
                now = changes[path, kind]
                self.outcome[path] = now.nbytes if isinstance(now, torch.Tensor) else 0, "new"
                continue
            if kind in ("bound", "moved"):
                self.volatile.add(path)
            if kind == "bound":
                with suppress(LookupError, AttributeError, TypeError):  # a tuple cannot change
                    self.places[path].container[self.places[path].key] = self.places[path].value
            elif kind == "items":
                where, before = self._sizes[path]
                value = getattr(where, "value", where)
                base: Any = list if isinstance(value, list) else deque
                base.clear(value)
                base.extend(value, before)
            elif kind == "keys":
                for key, _ in changes[path, kind]:
                    del self._sizes[path][0][key]


def _form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _is_same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if type(before) not in (*_NUMBERS, str) or type(before) is not type(now):
        return False
    return bool(before == now or before != before)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return _is_same(one, other)


def _step(key: Any, *, in_module: bool = False) -> str:
    """The step of a path for a key, without code of the user: ``.name``, ``[2]``, ``['a b']``, ``[<Point>]``."""
    if type(key) is str:
        if key.isascii() and key.isidentifier() and not keyword.iskeyword(key):
            return f".{key}"
        return f"[{key}]" if in_module and key.isdecimal() else f"[{key!r}]"
    if isinstance(key, Enum):
        return f"[{type(key).__name__}.{key._name_}]"
    return f"[{key!r}]" if _is_constant(key) else f"[<{type(key).__name__}>]"


def _is_constant(key: Any) -> bool:
    return type(key) in _PLAIN or (type(key) is tuple and all(map(_is_constant, key)))


def _words(form: tuple[Any, ...] | None) -> str:
    assert form is not None
    dtype, shape, stride, is_conj, is_neg = form
    bits = f"{', conjugated' if is_conj else ''}{', negated' if is_neg else ''}"
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} with strides {list(stride)}{bits}"


def _message(what: str, lines: list[str], count: int) -> str:
    kinds = {kind: [n for n in lines if n.startswith(kind)] for kind in ("changed", "reshaped", "missing", "added")}
    counts = ", ".join(f"{len(found)} {kind}" for kind, found in kinds.items() if found or kind != "reshaped")
    moved = "were others" if len(kinds["reshaped"]) == len(lines) else "do not lie where they lay"
    shown = [f"{what} was captured with {count} tensors that {moved}: {counts}"]
    for kind, found in kinds.items():
        shown += [f"  {line}" for line in found[:_SHOWN]]
        if len(found) > _SHOWN:
            shown.append(f"  and {len(found) - _SHOWN} more {kind}")
    return "\n".join(shown)


def _remedy(lines: Iterable[str]) -> str:
    names = (line.split()[1].rstrip(":") for line in lines)
    positions = sorted({int(n[5:-1]) for n in names if n.startswith("args[") and n[5:-1].isdecimal()})
    remedy = (
        "Write new values into the captured tensors in place (copy_), declare the tensor as an input so that it is "
        "copied into a static buffer, or capture again."
    )
    if not positions:
        return remedy
    shown = f"({positions[0]},)" if len(positions) == 1 else str(tuple(positions))
    return (
        f"{remedy} Where it is an argument of a CUDAGraphWrapper that eager code makes on each call, "
        f"options=CUDAGraphOptions(copied_arguments={shown}) copies it to where the graph reads it."
    )


__all__ = ["ModelState", "Place"]
