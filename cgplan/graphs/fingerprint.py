"""What a model holds at one moment, by path, and what changed since, but for numbers in tensors."""

from __future__ import annotations

import operator
import re
import struct
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import repeat
from typing import Any, NamedTuple, Self

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from cgplan.errors import AddressError
from cgplan.graphs import walk
from cgplan.graphs.walk import PLAIN, Contents, Inside, ReadState
from cgplan.units import listed

_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    type,
)
_STRUCTURE = ("._modules", *(f".{name}" for name in walk.HOOKS))
_KINDS_OF_MOVES = (
    "changed",
    "reshaped",
    "missing",
    "added",
)
_SHOWN = 10
ABSENT: Any = object()
_ADDRESS: Any = object()  # address of a moved tensor
_CONTENTS: Any = object()  # of a list, deque or set
_ABSENT_ERRORS = (LookupError, AttributeError, ValueError)


@dataclass(frozen=True, slots=True, eq=False)
class _Leaf:
    value: Any

    def __eq__(
        self,
        other: object,
    ) -> bool:
        return isinstance(other, _Leaf) and is_same(self.value, other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


class Traits(NamedTuple):
    """What a graph relies on of a tensor."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(
        cls,
        tensor: torch.Tensor,
    ) -> Traits:
        strides = tensor.stride() if tensor.layout is torch.strided else ()
        return cls(
            tensor.dtype,
            tensor.shape,
            strides,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def __str__(self) -> str:
        bits = " conjugated" * self.is_conj + " negated" * self.is_neg
        return f"{self.dtype} {list(self.shape)} with strides {list(self.strides)}{bits}"


@dataclass(slots=True, eq=False)
class Place:
    """A place in the model, such as ``model.layers[0].weight``.

    Attributes:
        home: The id of its holder, and the path's last step.
        address, requires_grad, traits: Of a dense tensor on the record's device.
    """

    path: str
    above: Place | None
    home: tuple[int, str]
    container: Any
    key: Any
    value: Any
    address: int | None = None
    requires_grad: bool = False
    traits: Traits | None = None

    def enter_tensor(
        self,
        device: torch.device,
    ) -> list[Inside]:
        """Returns what a subclass wraps."""
        tensor = self.value
        if hasattr(type(tensor), "__tensor_flatten__"):
            found = []
            with suppress(Exception):  # code of the user
                own = object.__getattribute__(tensor, "__dict__")
                for name in tensor.__tensor_flatten__()[0]:
                    where = own if name in own else walk.Via(tensor, getattr)
                    found.append(Inside(where, name, f".{name}"))
                return found
        with suppress(RuntimeError, NotImplementedError):
            if tensor.layout is torch.strided and tensor.device == device:
                self.address = tensor.data_ptr()
                self.requires_grad = tensor.requires_grad
                self.traits = Traits.of(tensor)
        return []

    def compare(
        self,
        now: Any,
    ) -> Change | None:
        if now is not self.value and not is_same(self.value, now):
            return Change(
                self.path,
                self.value,
                now,
                (self.container, self.key),
            )
        before = self.traits
        if before is None:
            return None
        later = Traits.of(now)
        if now.layout is not torch.strided or later != before:
            return Change(self.path, before, later)
        if now.data_ptr() != self.address:
            return Change(self.path, _ADDRESS, _ADDRESS)
        if now.requires_grad != self.requires_grad:
            return Change(
                f"{self.path}.requires_grad",
                self.requires_grad,
                now.requires_grad,
            )
        return None


_Classes = dict[type, tuple[Place, walk.Layout | None]]  # the first object's place


@dataclass(frozen=True)
class Change:
    """A change of a value.

    Attributes:
        where: Its container and key.
        left: The container, key and value that it takes the place of: None, of a submodule.
    """

    path: str
    was: Any
    now: Any
    where: tuple[Any, Any] | None = field(default=None, repr=False, compare=False)
    left: tuple[Any, Any, Any] | None = field(default=None, repr=False, compare=False)

    @property
    def is_move(self) -> bool:
        """A tensor moved, or one like it is there."""
        if self.was is _ADDRESS:
            return True
        if not self.is_of_tensors:
            return False
        was = self.was
        now = self.now
        is_alike = Traits.of(was) == Traits.of(now) and was.device == now.device
        return is_alike and was.requires_grad == now.requires_grad

    def bind(
        self,
        value: Any,
    ) -> None:
        """Where the container can be written."""
        assert self.where
        container, key = self.where
        with suppress(LookupError, AttributeError, TypeError):
            if self.left and value is self.left[2]:
                former, name, _ = self.left
                former[name] = value
                value = ABSENT
            if key is _CONTENTS:
                container.refill()
            elif value is ABSENT:
                del container[key]
            else:
                container[key] = value

    @property
    def subject(self) -> str:
        """The path, or that of the table whose entry came or went."""
        if self.path.endswith("]") and (self.was is ABSENT or self.now is ABSENT):
            return self.path.rpartition("[")[0]
        return self.path

    def hint(self, changes: Sequence[Self]) -> str:
        """Of numbers, and of tensors that moved: text, flags and lengths decide. ``changes``: of
        the same run.
        """
        if self.is_move:
            return "; write it in place (`copy_`) to keep graphs"
        kinds = {type(self.was), type(self.now)} - {type(ABSENT)}
        if self.path.startswith("len(") or not kinds <= {int, float}:
            return ""
        subject = self.subject
        alike = {re.sub(r"\[\d+\]", "[*]", change.subject) for change in changes}
        if len(changes) > len(alike) == 1:
            subject = alike.pop()
        return (
            f"; ignore=[{subject!r}] if it decides nothing, or make it a tensor and write it in "
            "place"
        )

    @property
    def is_new(self) -> bool:
        return self.was is ABSENT or self.was is None

    @property
    def is_of_tensors(self) -> bool:
        return _has_shape(self.was) and _has_shape(self.now)

    def __str__(self) -> str:
        if self.was is _ADDRESS:
            return f"{self.path} (its memory)"
        if type(self.was) is Stateful:
            return f"{self.path} (its contents)"
        if self.is_move:
            return f"{self.path} (another tensor)"
        was = _shown(self.was)
        now = _shown(self.now)
        if was == now:
            return f"{self.path} (another {was.removeprefix('a ')})"
        return f"{self.path} (it was {was} and is {now})"


class Stateful(NamedTuple):
    path: str
    read: ReadState
    state: Any
    is_small: bool = False
    items: Any = None  # a set

    def refill(self) -> None:
        """A set of plain values."""
        before = {item for _, item in self.state}
        set.intersection_update(self.items, before)
        set.update(self.items, before)


@dataclass(eq=False)
class Fingerprint:
    """What objects hold at one moment, by path. It holds them until ``let_go``.

    Attributes:
        volatile: Paths that each run binds again; not compared.
        only: Paths whose addresses are compared; None: all.
        draws: Random generators of the host.
    """

    roots: dict[str, Any]
    device: torch.device
    places: dict[str, Place] = field(default_factory=dict)
    of_tensors: list[Place] = field(default_factory=list)
    contents: dict[str, Contents] = field(default_factory=dict)
    generators: tuple[torch.Generator, ...] = ()
    is_compiled: bool = False
    volatile: set[str] = field(default_factory=set)
    only: set[str] | None = None
    count: int = 0
    stateful: list[Stateful] = field(default_factory=list)
    draws: list[Stateful] = field(default_factory=list)
    _empty: list[Any] = field(default_factory=list)  # containers
    _filled: dict[str, Contents] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        roots: Mapping[str, Any],
        device: torch.device,
        *,
        draws: bool = False,
    ) -> Fingerprint:
        found = cls(dict(roots), torch.empty(0, device=device).device)
        with torch._C.DisableTorchFunction():
            found._walk()
        for path, held in found.contents.items():
            is_plain = held.owner is None and type(held.value) is held.base
            if is_plain and not held.length:
                found._empty.append(held.value)
            else:
                found._filled[path] = held
        if draws:
            for name, read in walk.generators_of_the_host(found.device).items():
                found.draws.append(Stateful(name, read, read()))
        return found

    def _walk(self) -> None:
        named = dict.fromkeys(walk.RUN_BY_A_CALL)  # in code so far
        classes: _Classes = {}
        seen = {}  # keeps ids taken
        of_torch = vars(torch.nn.modules.module)
        roots = [Inside(of_torch, f"_global{name}", f"torch.nn{name}") for name in walk.HOOKS]
        roots += [Inside(self.roots, name, name) for name in reversed(self.roots)]
        todo: list[tuple[Place | None, int, Inside]] = [(None, 0, root) for root in roots]
        while todo:
            above, home, entry = todo.pop()
            try:
                value = entry.container[entry.key]
            except _ABSENT_ERRORS:
                continue
            place = above
            if entry.step or above is None:
                place = self._add_place(above, home, entry, value)
            assert place
            kind = type(value)
            found = []
            is_lazy = issubclass(kind, UninitializedTensorMixin)
            if issubclass(kind, torch.Tensor) and not is_lazy:
                found = place.enter_tensor(self.device)
                if not found:  # else it is inside
                    self.of_tensors.append(place)
            elif issubclass(kind, torch.Generator):
                known = (
                    torch.default_generator,
                    *torch.cuda.default_generators,
                    *self.generators,
                )
                if value.device == self.device and value not in known:
                    self.generators += (value,)
            elif not (is_lazy or kind in PLAIN or id(value) in seen):
                seen[id(value)] = value
                found = self._enter(value, place, classes, named)
            todo += zip(repeat(place), repeat(id(value)), reversed(found))
            if not todo:
                for of_class, (first, layout) in classes.items():
                    for inner in walk.named_in_class(layout, named):
                        todo.append((first, id(of_class), inner))
        self.count = len({id(p.value) for p in self.of_tensors if p.address is not None})

    def _add_place(
        self,
        above: Place | None,
        home: int,
        entry: Inside,
        value: Any,
    ) -> Place:
        container, key, step = entry
        first = path = step if above is None else above.path + step
        number = 1
        while path in self.places:
            number += 1
            path = f"{first}#{number}"
        place = Place(
            path,
            above,
            (home, step),
            container,
            key,
            value,
        )
        self.places[path] = place
        return place

    def _enter(
        self,
        value: Any,
        place: Place,
        classes: _Classes,
        named: dict[str, None],
    ) -> list[Inside]:
        kind = type(value)
        if issubclass(kind, types.FunctionType):
            named |= dict.fromkeys(walk.names_in(value))
        if kind not in classes:
            classes[kind] = place, walk.layout_of(kind)
        read = walk.state_reader(value)
        if read:
            is_small = walk.is_small_array(value)
            items = value if issubclass(kind, set) else None
            self.stateful.append(Stateful(place.path, read, read(), is_small, items))
        found = walk.inside(value, classes[kind][1])
        for step, held in found.contents.items():
            self.contents.setdefault(place.path + step, held)
        self.is_compiled |= found.is_compiled
        return found.entries

    @property
    def tensors(self) -> list[torch.Tensor]:
        by_id = {}
        for place in self.of_tensors:
            by_id[id(place.value)] = place.value
        return list(by_id.values())

    def summary(self) -> str:
        names = ", ".join(f"{name} ({type(value).__name__})" for name, value in self.roots.items())
        text = f"{names}: {self.count} tensors in {len(self.places)} places"
        if self.generators:
            text += f", {len(self.generators)} random generators"
        return text

    def changes(
        self,
        ignore: Iterable[str] = (),
    ) -> dict[str, Change]:
        """What differs now, by path; ``*`` in a path to ``ignore`` is one part."""
        found = []
        with torch._C.DisableTorchFunction():
            for place in self.places.values():
                try:
                    now = place.container[place.key]
                except _ABSENT_ERRORS:
                    now = ABSENT
                if now is place.value and place.traits is None:
                    continue
                change = place.compare(now)
                if change:
                    found.append(change)
        contents = self._filled
        if any(self._empty):
            contents = self.contents
        found += _changes_of(contents)
        for before in (*self.stateful, *self.draws):
            state = before.read()
            if state != before.state:
                later = before._replace(state=state)
                where = None
                if before.items is not None:
                    where = before, _CONTENTS
                found.append(Change(before.path, before, later, where))
        by_path = dict[str, Change]()
        for change in found:
            if is_ignored(change.path, ignore):
                continue
            former = by_path.get(change.path)
            if former and former.where and change.was is ABSENT:
                left = *former.where, former.was
                change = replace(
                    change,
                    was=former.was,
                    left=left,
                )
            by_path[change.path] = change
        return by_path

    def is_attribute(
        self,
        change: Change,
    ) -> bool:
        if change.where is None:
            return False
        container, key = change.where
        if isinstance(key, types.MemberDescriptorType):  # a slot
            return True
        for held in self.contents.values():
            if held.value is container and held.holds != "items":
                return True
        return False

    def undo_attributes(
        self,
        ignore: Iterable[str] = (),
    ) -> bool:
        """Whether Python is then as it was."""
        for change in self.changes(ignore).values():
            if self.is_attribute(change):
                change.bind(change.was)
        return not self.changes(ignore)

    def container_ids(self) -> set[int]:
        found = set()
        for held in self.contents.values():
            found.add(id(held.value))
            found.add(id(held.owner))
        return found

    def as_key(self) -> tuple[Any, ...]:
        """Hashable; objects that the walk enters stand by their type."""
        found = list[Any]()
        for path, place in self.places.items():
            value = place.value
            kind = type(value)
            held: Any = (place.address, place.traits)
            if kind in PLAIN:
                held = repr(value)
            elif issubclass(kind, _FUNCTIONS):
                held = value
            elif place.traits is None and walk.is_leaf(value):
                held = _Leaf(value)
            found.append((path, kind, held))
        for path, contents in self.contents.items():
            found.append((path, contents.length))
        for stateful in self.stateful:
            found.append((stateful.path, stateful.state))
        return tuple(found)

    def without_draws(self) -> Fingerprint:
        self.draws = []
        return self

    def let_go(self) -> Fingerprint:
        """Drop the model's objects; addresses can still be compared."""
        for place in self.places.values():
            place.container = place.key = place.value = None
        self.of_tensors = []
        self.roots = {}
        self.contents = self._filled = {}
        self.stateful = []
        return self

    def steady(
        self,
        places: Mapping[str, Place] | None = None,
    ) -> list[Place]:
        if places is None:
            places = self.places
        if not self.volatile:
            return list(places.values())
        found = []
        left_out = set()
        for place in places.values():
            above = place.above
            is_below = above is not None and f"len({above.path})" in self.volatile
            if is_below or id(above) in left_out or place.path in self.volatile:
                left_out.add(id(place))
            else:
                found.append(place)
        return found

    def checked(self) -> list[Place]:
        found = [place for place in self.steady() if place.address is not None]
        return found if self.only is None else [place for place in found if place.path in self.only]

    def narrow(
        self,
        read: Collection[str],
    ) -> None:
        """Compare addresses of parameters, buffers and these paths alone."""
        self.only = {*read, *(place.path for place in self.parts())}

    def parts(self) -> list[Place]:
        """Submodules, parameters and buffers."""
        within = {id(held.value) for held in self.contents.values() if held.holds == "parts"}
        return [place for place in self.places.values() if id(place.container) in within]

    def moved(
        self,
        now: Fingerprint,
        *,
        may_grow: bool = False,
    ) -> dict[str, list[str]]:
        """Lines by kind; new tensors are allowed if the model ``may_grow``."""
        after = {p.path: p for p in self.steady(now.places) if p.address is not None}
        by_home = {p.home: p for p in after.values()}  # reached by another path first
        lines: dict[str, list[str]] = {kind: [] for kind in _KINDS_OF_MOVES}
        for old in self.checked():
            new = after.get(old.path) or by_home.get(old.home)
            if new is None:
                lines["missing"].append(old.path)
            elif new.traits != old.traits:
                lines["reshaped"].append(f"{old.path}: {old.traits} at capture, {new.traits} now")
            elif new.address != old.address:
                moved = f"{old.address:#x} at capture, {new.address:#x} now"
                lines["changed"].append(f"{old.path}: {moved}")
        if may_grow:
            return lines
        for path in after:
            known = self.places.get(path)
            if known is None or known.address is None:
                lines["added"].append(path)
        return lines

    def modules(self) -> tuple[list[Place], list[Contents]]:
        modules = [p for p in self.steady() if issubclass(type(p.value), torch.nn.Module)]
        held = [held for path, held in self.contents.items() if path.endswith(_STRUCTURE)]
        return modules, held

    def refuse_reshaped(
        self,
        roots: Mapping[str, Any],
    ) -> None:
        """Raise AddressError where tensors are gone or look otherwise; they may have moved."""
        lines = self.moved(Fingerprint.of(roots, self.device), may_grow=True)
        found = [f"{path} is gone" for path in lines["missing"]]
        found += lines["reshaped"]
        if found:
            raise AddressError(
                f"the model has other tensors than before: {listed(found, _SHOWN)}",
                remedy="Give the model its tensors again, or call runner.recapture().",
            )

    def refuse_moved(
        self,
        what: str,
        roots: Mapping[str, Any] | None = None,
        *,
        may_grow: bool = False,
    ) -> None:
        now = Fingerprint.of(self.roots if roots is None else roots, self.device)
        lines = self.moved(now, may_grow=may_grow)
        if any(lines.values()):
            raise _moved_error(what, lines, self.count)
        others = []
        for place in self.modules()[0]:
            new = now.places.get(place.path)
            if new and new.value is not place.value:
                kind = type(new.value).__name__
                before = type(place.value).__name__
                others.append(f"{place.path} is now another object, {kind}; at capture {before}")
        for path, held in self.contents.items():
            later = now.contents.get(path)
            if later is None or later.length == held.length:
                continue
            if path.endswith(_STRUCTURE):
                others.append(f"{path} has {later.length}, at capture {held.length}")
        if others:
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


def _changes_of(contents: Mapping[str, Contents]) -> list[Change]:
    found = []
    for path, held in contents.items():
        owner = held.owner
        length = held.base.__len__(held.value)
        has_length = length == held.length
        keys = held.base.__iter__(held.value)
        if held.holds == "items":
            has_keys = all(map(operator.is_, held.keys, keys))
        else:
            now = [*keys]
            has_keys = held.keys == now
            if held.holds == "attributes":
                has_keys = has_keys or {*held.keys} == {*now}
        if type(owner) is not held.kind:
            found.append(Change(path, held.kind.__name__, type(owner).__name__))
        elif owner is not None and object.__getattribute__(owner, "__dict__") is not held.value:
            found.append(Change(path, "its own", "another one"))
        elif has_length and has_keys:
            continue
        elif not issubclass(held.base, dict):
            where = None
            if length > held.length:
                where = held, _CONTENTS
            found.append(Change(f"len({path})", held.length, length, where))
        else:
            known = set(map(id, held.keys))
            head = path if held.holds == "items" else path.rpartition(".")[0]
            step_to = walk.step_to_part if held.holds == "parts" else walk.step
            added = []
            for key, value in dict.items(held.value):
                if id(key) in known:
                    continue
                change = Change(
                    head + step_to(key),
                    ABSENT,
                    value,
                    (held.value, key),
                )
                added.append(change)
            if has_length and not added:
                added.append(Change(path, "in its order", "in another one"))
            found += added
    return found


def is_tensor(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor)  # isinstance asks the object for its class


def _has_shape(value: Any) -> bool:
    return is_tensor(value) and not (value.is_nested and value.layout is torch.strided)


def is_same(
    before: Any,
    now: Any,
) -> bool:
    """Whether both are one object, or equal plain values, tuples or methods."""
    kind = type(before)
    if before is now or kind is not type(now):
        return before is now
    if kind is float:
        return struct.pack("d", before) == struct.pack("d", now)
    if kind is types.MethodType:
        return before.__self__ is now.__self__ and before.__func__ is now.__func__
    if kind is Stateful:
        return bool(before.state == now.state)
    if kind is tuple:
        return len(before) == len(now) and all(map(is_same, before, now))
    return kind in PLAIN and repr(before) == repr(now)


def is_within(
    path: str,
    heads: Collection[str],
) -> bool:
    """Whether a path is one of ``heads``, or below; ``len(a)`` is above ``a[0]``."""
    if path in heads:
        return True
    while (cut := max(path.rfind("."), path.rfind("["))) > 0:
        path = path[:cut]
        if path in heads or f"len({path})" in heads:
            return True
    return False


def is_ignored(
    path: str,
    ignore: Iterable[str],
) -> bool:
    parts = _parts(path.removeprefix("len(").removesuffix(")"))
    for pattern in ignore:
        wanted = _parts(pattern)
        literal = (name.replace("[", "[[]") for name in wanted)
        if len(parts) >= len(wanted) and all(map(fnmatchcase, parts, literal)):
            return True
    return False


@cache
def _parts(path: str) -> list[str]:
    return re.findall(r"\[[^\]]*\]|[^.\[]+", path)


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    if _has_shape(value):
        return f"a tensor {list(value.shape)}"
    if type(value) is Traits:
        return str(value)
    if type(value) in PLAIN:
        return repr(value)[:60]
    return f"a {type(value).__name__}"


def _moved_error(
    what: str,
    lines: dict[str, list[str]],
    count: int,
) -> AddressError:
    shown = [kind for kind, found in lines.items() if found or kind != "reshaped"]
    counts = [f"{len(lines[kind])} {kind}" for kind in shown]
    has_moved = lines["changed"] or lines["missing"] or lines["added"]
    is_what = "have moved" if has_moved else "are others now"
    text = f"{what} was captured with {count} tensors; some {is_what}: {', '.join(counts)}"
    for kind, found in lines.items():
        for line in found[:_SHOWN]:
            text += f"\n  {kind:<7}  {line}"
        if len(found) > _SHOWN:
            text += f"\n  and {len(found) - _SHOWN} more {kind}"
    remedy = (
        "Write new values into the captured tensors in place (copy_), declare the tensor as an "
        "input, or capture again: runner.recapture()."
    )
    every = "\n".join(line for found in lines.values() for line in found)
    positions = set(map(int, re.findall(r"(?m)^args\[(\d+)\](?::|$)", every)))
    if positions:
        remedy += (
            " Where it is an argument of a CUDAGraphWrapper that eager code makes on each call, "
            f"options=CUDAGraphOptions(copied_arguments={tuple(sorted(positions))}) copies it to "
            "where the graph reads it."
        )
    return AddressError(text, remedy=remedy)
