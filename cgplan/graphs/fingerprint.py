"""Fingerprint: everything that a model holds at one moment, by path, and what has changed since.

Note [What counts as a change]
    A plain value is another one (floats by their bits, 1 and True by their types), a container has
    another length, a place holds another object, a tensor lies elsewhere or has another form. Sets,
    bytearrays and NumPy's arrays change with their contents, random generators of Python and NumPy
    with their state; an iterator counts as changed by each run. Numbers that are written into
    tensors in place are no change: graphs see them.
"""

from __future__ import annotations

import operator
import re
import struct
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

import torch

from cgplan.errors import AddressError
from cgplan.graphs import walk
from cgplan.graphs.walk import PLAIN, Contents, Inside, Token

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)
_STRUCTURE = ("._modules", *(f".{name}" for name in walk.HOOKS))
_SHOWN = 10
ABSENT: Any = object()
_ADDRESS: Any = object()  # of a tensor that moved
_GONE = (LookupError, AttributeError, ValueError)  # raised where a place is no longer there


class Form(NamedTuple):
    """What a graph relies on of a tensor, beside its address."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())

    def __str__(self) -> str:
        bits = " conjugated" * self.is_conj + " negated" * self.is_neg
        return f"{self.dtype} {list(self.shape)} with strides {list(self.strides)}{bits}"


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
        form: Of such a tensor.
    """

    path: str
    above: Place | None
    home: tuple[int, str]
    container: Any
    key: Any
    value: Any
    address: int | None = None
    asks: bool = False
    form: Form | None = None

    @property
    def tensor(self) -> tuple[Any, ...] | None:
        """What each call compares of a tensor beside its identity: address, ``requires_grad``,
        strides, shape.
        """
        if self.address is None or self.form is None:
            return None
        return self.address, self.asks, self.form.strides, self.form.shape

    def enter_tensor(self, device: torch.device) -> list[Inside]:
        """The tensors that the tensor here wraps, where a class of the user's says so. Of others it
        is taken down where they lie, if they are dense and on the device.
        """
        tensor, kind = self.value, type(self.value)
        is_plain = kind in (torch.Tensor, torch.nn.Parameter)
        if not is_plain and hasattr(kind, "__tensor_flatten__"):
            found = list[Inside]()
            with suppress(Exception):  # code of the user
                own = object.__getattribute__(tensor, "__dict__")
                for name in tensor.__tensor_flatten__()[0]:
                    where = own if name in own else {name: getattr(tensor, name)}
                    found.append(Inside(where, name, f".{name}"))
                return found
        with suppress(RuntimeError, NotImplementedError):
            if tensor.layout is torch.strided and tensor.device == device:
                self.address, self.asks = tensor.data_ptr(), tensor.requires_grad
                self.form = Form.of(tensor)
        return []

    def compare(self, now: Any) -> Change | None:
        """What has changed, where the place holds ``now``."""
        if now is not self.value and not is_same(self.value, now):
            return Change(self.path, self.value, now, (self.container, self.key))
        if self.form is None:
            return None
        form = Form.of(now)
        if form != self.form:
            return Change(self.path, str(self.form), str(form))
        if now.data_ptr() != self.address:
            return Change(self.path, _ADDRESS, _ADDRESS)
        is_asking: bool = now.requires_grad
        if is_asking != self.asks:
            return Change(f"{self.path}.requires_grad", self.asks, is_asking)
        return None


class _State(NamedTuple):
    """Of an object that changes inside."""

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
        was, now = self.was, self.now
        if not (_has_shape(was) and _has_shape(now)):
            return was is _ADDRESS
        is_alike = Form.of(was)[:3] == Form.of(now)[:3] and was.device == now.device
        return is_alike and was.requires_grad == now.requires_grad

    @property
    def is_reshaped(self) -> bool:
        """Whether a tensor of another shape is there."""
        are_both = _has_shape(self.was) and _has_shape(self.now)
        return are_both and self.was.shape != self.now.shape

    def __str__(self) -> str:
        if self.was is _ADDRESS:
            return f"{self.path} (its memory)"
        if type(self.was) is _State:
            return f"{self.path} (its contents)"
        if self.is_move:
            return f"{self.path} (another tensor)"
        return f"{self.path} (it was {_words(self.was)} and is {_words(self.now)})"


class _Changing(NamedTuple):
    """An object that changes inside: its path, a function that gives its state, and that state."""

    path: str
    token: Token
    before: object


@dataclass(slots=True, eq=False)
class Fingerprint:
    """Everything that some objects hold at one moment, by path; see Note [What is looked at] in
    walk.py. It holds the objects until ``let_go``; afterwards paths and addresses alone.

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
        changing: Objects that change inside.
        draws: Random generators of the host.
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
    changing: list[_Changing] = field(default_factory=list)
    draws: list[_Changing] = field(default_factory=list)

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
        for name, token in walk.generators_of_the_host(found.device).items() if draws else ():
            found.draws.append(_Changing(name, token, token()))
        return found

    def _walk(self) -> None:
        layout_of: Callable[[type], Any] = cache(walk.layout_of)  # classes may change between walks
        seen: dict[int, Any] = {}  # holds what was visited, so that ids stay valid
        of_all_modules = vars(torch.nn.modules.module)
        todo: list[tuple[Place | None, int, Inside]] = []
        for name in walk.HOOKS:
            todo.append((None, 0, Inside(of_all_modules, f"_global{name}", f"torch.nn{name}")))
        for name in reversed(self.roots):
            todo.append((None, 0, Inside(self.roots, name, name)))
        while todo:
            above, home, (container, key, step) = todo.pop()
            try:
                value = container[key]
            except _GONE:
                continue
            place = above
            if step or place is None:  # an empty step (the object of a bound method) has no path
                path = name = step if above is None else above.path + step
                number = 1
                while path in self.places:
                    number += 1
                    path = f"{name}#{number}"
                place = Place(path, above, (home, step), container, key, value)
                self.places[path] = place
            kind = type(value)
            found: list[Inside] = []
            if kind in PLAIN:
                continue
            if issubclass(kind, torch.Tensor):
                found = place.enter_tensor(self.device)
            elif issubclass(kind, torch.Generator):
                self._note_generator(value)
            elif id(value) not in seen:
                seen[id(value)] = value
                found = self._enter(value, layout_of(kind), place.path)
            for entry in reversed(found):
                todo.append((place, id(value), entry))
        self.count = len({id(p.value) for p in self.places.values() if p.address is not None})

    def _note_generator(self, value: torch.Generator) -> None:
        defaults = (torch.default_generator, *torch.cuda.default_generators)
        is_default = any(value is default for default in defaults)
        if value.device == self.device and not is_default and value not in self.generators:
            self.generators += (value,)

    def _enter(self, value: Any, layout: walk.Layout | None, path: str) -> list[Inside]:
        if (token := walk.token_of(value)) is not None:
            self.changing.append(_Changing(path, token, token()))
        found = walk.inside(value, layout)
        for step, held in found.contents.items():
            self.contents.setdefault(path + step, held)
        self.is_compiled |= found.is_compiled
        return found.places

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
            found |= _changes_of(path, held, is_short=is_short)
        for path, token, before in (*self.changing, *self.draws):
            now = token()
            if now != before:
                found[path] = Change(path, _State(before), _State(now))
        return {path: change for path, change in found.items() if not is_ignored(path, ignore)}

    def is_attribute(self, change: Change) -> bool:
        """Whether it is of an attribute of an object, or of a part of a module."""
        if change.where is None:
            return False
        container, key = change.where
        if isinstance(key, types.MemberDescriptorType):  # a slot
            return True
        held = (c for c in self.contents.values() if c.value is container)
        return any(contents.holds != "items" for contents in held)

    def as_key(self) -> tuple[Any, ...]:
        """Plain values, lengths, addresses, functions, and contents as a hashable key; other
        objects by their type.
        """
        found = list[Any]()
        for path, place in self.places.items():
            value, kind = place.value, type(place.value)
            held: Any = repr(value) if kind in PLAIN else (place.address, place.form)
            if issubclass(kind, _FUNCTIONS):
                held = value
            found.append((path, kind, held))
        for path, contents in self.contents.items():
            found.append((path, contents.length))
        for path, _, before in self.changing:
            found.append((path, before))
        return tuple(found)

    def without_draws(self) -> Fingerprint:
        """The same, without the random generators of the host, which move between calls."""
        self.draws = []
        return self

    # --- addresses --------------------------------------------------------------------------------

    def let_go(self) -> Fingerprint:
        """Hold nothing of the model any more; addresses can still be compared, given the roots."""
        for place in self.places.values():
            place.container = place.key = place.value = None
        self.roots, self.contents, self.changing = {}, {}, []
        return self

    def steady(self, places: Mapping[str, Place] | None = None) -> list[Place]:
        """Places that must stay: not where each run of the forward binds another object, nor
        below.
        """
        found = self.places if places is None else places
        if not self.volatile:
            return list(found.values())
        return [place for path, place in found.items() if not is_within(path, self.volatile)]

    def checked(self) -> list[Place]:
        """The places of tensors whose addresses count."""
        found = [place for place in self.steady() if place.address is not None]
        return found if self.only is None else [place for place in found if place.path in self.only]

    def narrow(self, read: Collection[str]) -> None:
        """Compare addresses of parameters, buffers, and of the tensors at these paths alone."""
        held = {id(c.value) for c in self.contents.values() if c.holds == "parts"}
        self.only = set()
        for path, place in self.places.items():
            if path in read or id(place.container) in held:
                self.only.add(path)

    def moved(self, now: Fingerprint, *, may_grow: bool = False) -> dict[str, list[str]]:
        """Lines on tensors that lie elsewhere (``changed``), are in another form (``reshaped``),
        are gone (``missing``) or came (``added``, unless ``may_grow``: no graph can depend on
        them), by ``now``, a later record.
        """
        after = {p.path: p for p in self.steady(now.places) if p.address is not None}
        others = {p.home: p for p in after.values()}  # reached by another name first
        lines: dict[str, list[str]] = {k: [] for k in ("changed", "reshaped", "missing", "added")}
        for old in self.checked():
            new = after.get(old.path) or others.get(old.home)
            if new is None:
                lines["missing"].append(old.path)
            elif new.address != old.address:
                moved = f"{old.address:#x} at capture, {new.address:#x} now"
                lines["changed"].append(f"{old.path}: {moved}")
            elif new.form != old.form:
                lines["reshaped"].append(f"{old.path}: {old.form} at capture, {new.form} now")
        for path in () if may_grow else after:
            known = self.places.get(path)
            if known is None or known.address is None:
                lines["added"].append(path)
        return lines

    def modules(self) -> tuple[list[Place], list[Contents]]:
        """The places of modules, and the containers of modules and hooks."""
        places = [p for p in self.steady() if issubclass(type(p.value), torch.nn.Module)]
        held = [c for path, c in self.contents.items() if path.endswith(_STRUCTURE)]
        return places, held

    def exchanged(self, now: Fingerprint) -> list[str]:
        """Lines on modules that are others, and on modules and hooks that came or went."""
        lines = list[str]()
        for place in self.modules()[0]:
            new = now.places.get(place.path)
            if new is not None and new.value is not place.value:
                was, is_now = type(place.value).__name__, type(new.value).__name__
                lines.append(f"{place.path} is another {is_now}, at capture a {was}")
        for path, held in self.contents.items():
            later = now.contents.get(path)
            if path.endswith(_STRUCTURE) and later is not None and later.length != held.length:
                lines.append(f"{path} has {later.length}, at capture {held.length}")
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
        if others := self.exchanged(now):
            raise AddressError(
                f"{what} was captured with other modules or hooks than the model has now: "
                f"{', '.join(others[:_SHOWN])}",
                remedy="Change a model ahead of its capture, or call runner.recapture().",
            )
        if now.generators != self.generators:
            raise AddressError(
                f"{what} was captured with other torch.Generator objects than the model holds "
                "now: a replay would draw from the old ones",
                remedy="Seed a generator in place (manual_seed, set_state), or call "
                "runner.recapture().",
            )


def _changes_of(path: str, held: Contents, *, is_short: bool) -> dict[str, Change]:
    """What has changed of a container itself, by path; ``is_short``: a place is gone, so that
    another key may have come where the length is the same.
    """
    owner = held.owner
    if type(owner) is not held.kind:
        return {path: Change(path, held.kind.__name__, type(owner).__name__)}
    if owner is not None and object.__getattribute__(owner, "__dict__") is not held.value:
        return {path: Change(path, "its own", "another one")}
    length = held.base.__len__(held.value)
    if held.is_dict and (length != held.length or is_short):
        return _added(path, held)
    if length != held.length:
        return {f"len({path})": Change(f"len({path})", held.length, length)}
    if not all(map(operator.is_, held.keys, held.base.__iter__(held.value))):
        return {path: Change(path, "in its order", "in another one")}
    return {}


def _added(path: str, held: Contents) -> dict[str, Change]:
    """The keys of a dict that came, by path."""
    known = set(map(id, held.keys))
    head = path if held.holds == "items" else path.rpartition(".")[0]
    found = dict[str, Change]()
    for key, value in dict.items(held.value):
        if id(key) in known:
            continue
        added = head + (walk.step_to_part(key) if held.holds == "parts" else walk.step(key))
        found[added] = Change(added, ABSENT, value, (held.value, key))
    return found


def is_tensor(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor)  # isinstance would ask the object for its class


def _has_shape(value: Any) -> bool:
    """Whether it is a tensor that can be asked for its shape."""
    return is_tensor(value) and not (value.is_nested and value.layout is torch.strided)


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
    if kind is _State:
        return bool(before.token == now.token)
    if kind is tuple:
        return len(before) == len(now) and all(map(is_same, before, now))
    return kind in PLAIN and repr(before) == repr(now)


def is_within(path: str, heads: Collection[str]) -> bool:
    """Whether a path is one of ``heads``, or below one; what a container holds is below its
    length.
    """
    if path in heads:
        return True
    while (cut := max(path.rfind("."), path.rfind("["))) > 0:
        path = path[:cut]
        if path in heads or f"len({path})" in heads:
            return True
    return False


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
    if len(parts) < len(wanted):
        return False
    return all(map(fnmatchcase, parts, (name.replace("[", "[[]") for name in wanted)))


def _words(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    if _has_shape(value):
        return f"a tensor {list(value.shape)}"
    return repr(value)[:60] if type(value) in PLAIN else f"a {type(value).__name__}"


def _message(what: str, lines: dict[str, list[str]], count: int) -> str:
    counts = list[str]()
    for kind, found in lines.items():
        if found or kind != "reshaped":
            counts.append(f"{len(found)} {kind}")
    has_moved = any(lines[kind] for kind in ("changed", "missing", "added"))
    is_what = "have moved" if has_moved else "are others now"
    text = f"{what} was captured with {count} tensors that {is_what}: {', '.join(counts)}"
    for kind, found in lines.items():
        for line in found[:_SHOWN]:
            text += f"\n  {kind:<7}  {line}"
        if len(found) > _SHOWN:
            text += f"\n  and {len(found) - _SHOWN} more {kind}"
    return text


def _remedy(lines: dict[str, list[str]]) -> str:
    remedy = (
        "Write new values into the captured tensors in place (copy_), declare the tensor as an "
        "input so that it is copied into a static buffer, or capture again."
    )
    positions = set[int]()
    for line in (*lines["changed"], *lines["reshaped"], *lines["missing"], *lines["added"]):
        if argument := re.match(r"args\[(\d+)\](?::|$)", line):
            positions.add(int(argument[1]))
    if positions:
        remedy += (
            " Where it is an argument of a CUDAGraphWrapper that eager code makes on each call, "
            f"options=CUDAGraphOptions(copied_arguments={tuple(sorted(positions))}) copies it to "
            "where the graph reads it."
        )
    return remedy
