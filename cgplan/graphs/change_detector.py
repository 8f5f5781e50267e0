"""Whether a model is still as its fingerprint says, for a microsecond and its addresses a call.

Note [Watched dicts and classes]
    CPython 3.12 reports changes of dicts and classes to a callback, which sets a flag alone, since
    it runs in the middle of other code. Other places are compared in rotation, as is what nothing
    reports: another class, ``__dict__`` or order. CPython reports a class once for each version; a
    comparison gives it a new one, of which 3.13 has 1000.

Note [Addresses]
    Nothing reports `.data =`, and a replay with old addresses may draw random numbers or write, so
    each call reads all addresses first, 50 ns each.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
from collections.abc import Iterable
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from cgplan.graphs.fingerprint import Change, Fingerprint, Place, Stateful, Traits
from cgplan.graphs.walk import Contents, InClass, Via

# tensors, other places, containers of each call
_WITH_WATCHER = (4, 16, 8)
_WITHOUT_WATCHER = (64, 128, 128)
_DEALLOCATED = 5
_address_of = torch._C.TensorBase.data_ptr
_requires_grad = attrgetter("requires_grad")
_Compared = tuple[Any, Any, Any, Traits | None]  # container, key, value, traits
_flags: dict[int, list[list[bool]]] = {}  # by the address of a dict or class
_lock = threading.RLock()  # of flags and what is watched: a watch may be closed by a collection


def _note_dict(
    event: int,
    address: int,
    *_: int,  # key and value
) -> int:
    _note(address)
    if event == _DEALLOCATED:
        _flags.pop(address, None)
    return 0


def _note(
    address: int,
) -> int:
    for flag in _flags.get(address, ()):
        flag[0] = True
    return 0


_dict_event = ctypes.PYFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    *3 * [ctypes.c_void_p],
)
_class_event = ctypes.PYFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
)
_callbacks: dict[str, Any] = {
    "Dict": _dict_event(_note_dict),
    "Type": _class_event(_note),
}


@cache
def _watcher(kind: str) -> int | None:
    if sys.version_info < (3, 12):
        return None
    add = getattr(ctypes.pythonapi, f"Py{kind}_AddWatcher")
    try:
        found: int = add(_callbacks[kind])
    except RuntimeError:  # all are taken
        return None
    atexit.register(_end, kind, found)
    if kind == "Dict" and not _reports_attributes(found):
        return None
    return found


class _Probe:
    value = 0


def _reports_attributes(watcher: int) -> bool:
    """CPython 3.13.0 keeps attributes of small objects where their dict's watchers see nothing."""
    probe = _Probe()
    probe.value = 1
    flag = [False]
    held = vars(probe)
    _flags[id(held)] = [flag]
    ctypes.pythonapi.PyDict_Watch(watcher, ctypes.py_object(held))
    probe.value = 2
    ctypes.pythonapi.PyDict_Unwatch(watcher, ctypes.py_object(held))
    del _flags[id(held)]
    return flag[0]


def _end(
    kind: str,
    watcher: int,
) -> None:
    """At the interpreter's end callbacks are freed, and dicts still change."""
    _flags.clear()
    getattr(ctypes.pythonapi, f"Py{kind}_ClearWatcher")(watcher)


def _takes_version(
    kind: type,
) -> bool:
    return bool(ctypes.pythonapi.PyUnstable_Type_AssignVersionTag(ctypes.py_object(kind)))


def _length(
    held: Contents,
    _: int,
) -> int | None:
    """None where its last key or owner changed."""
    owner = held.owner
    if type(owner) is not held.kind:
        return None
    if owner is not None and object.__getattribute__(owner, "__dict__") is not held.value:
        return None
    if held.base.__len__(held.value) != held.length:
        return None
    if held.keys and next(held.base.__reversed__(held.value)) is not held.keys[-1]:
        return None
    return held.length  # the same object: places are compared by identity


def _state(
    stateful: Stateful,
    _: int,
) -> object:
    return stateful.state if stateful.read() == stateful.state else None


class ChangeDetector:
    """Compares a model with its fingerprint on each call.

    Args:
        record: Its objects are held until ``close``.
        at_once: Each call compares everything.
    """

    __graph_memory__ = True

    def __init__(
        self,
        record: Fingerprint,
        places: Iterable[Place] | None = None,
        contents: Iterable[Contents] = (),
        *,
        at_once: bool = False,
    ) -> None:
        self.record = record
        self._is_whole = places is None
        self._flag = [False]  # what is watched was written
        if places is None:
            places = record.places.values()
            contents = record.contents.values()
        counted = _with_those_above(places)
        extents = list(contents)
        self._watched = dict[int, tuple[str, Any]]()
        self._watch_all(counted, extents)
        is_told = bool(self._watched) and _watcher("Dict") is not None
        self._all = list[_Compared]()
        self._tensors = list[torch.Tensor]()
        self._addresses = list[int]()
        self._require_grad = list[bool]()
        tensors = list[_Compared]()
        others = list[_Compared]()
        containers = list[_Compared]()
        for place in counted:
            compared = (
                place.container,
                place.key,
                place.value,
                place.traits,
            )
            self._all.append(compared)
            if place.address is not None:
                self._tensors.append(place.value)
                self._addresses.append(place.address)
                self._require_grad.append(place.requires_grad)
            is_reported = self._is_reported(place)
            if place.address is not None and (is_reported or not is_told):
                tensors.append(compared)
            elif not is_reported:
                others.append(compared)
        for extent in extents:
            compared = Via(extent, _length), 0, extent.length, None
            self._all.append(compared)
            containers.append(compared)  # nothing reports another class or order
        for stateful in record.stateful:
            if self._is_whole and (at_once or stateful.is_small):
                others.append((Via(stateful, _state), 0, stateful.state, None))
        most = _WITH_WATCHER if is_told else _WITHOUT_WATCHER
        parts = list[list[list[_Compared]]]()
        for part, count in zip((tensors, others, containers), most, strict=True):
            parts.append(_slices(part, len(part) if at_once else count))
        self._chunks = _chunks(parts)
        self._at = 0

    def _watch_all(
        self,
        places: Iterable[Place],
        extents: Iterable[Contents],
    ) -> None:
        """A script's globals, which change often, stay in rotation."""
        counted = {id(extent.value) for extent in extents}
        for place in places:
            container = place.container
            counted.add(id(container))
            if type(container) is InClass:
                self._watch("Type", container.kind)
        for held in self.record.contents.values():
            if issubclass(type(held.value), dict) and id(held.value) in counted:
                self._watch("Dict", held.value)

    def _watch(
        self,
        kind: str,
        value: Any,
    ) -> None:
        watcher = _watcher(kind)
        address = id(value)
        if watcher is None or address in self._watched:
            return
        with _lock:
            if kind == "Dict" or _takes_version(value):
                # first, as a collection may end another detector of the value
                _flags.setdefault(address, []).append(self._flag)
                self._watched[address] = kind, value
                getattr(ctypes.pythonapi, f"Py{kind}_Watch")(watcher, ctypes.py_object(value))

    def _is_reported(
        self,
        place: Place,
    ) -> bool:
        container = place.container
        if type(container) is InClass:
            container = container.kind
        is_steady = place.above is None or type(container) is tuple
        return is_steady or id(container) in self._watched

    def holds(self) -> bool:
        """If False, ``holds_all`` or ``changes`` decides."""
        with torch._C.DisableTorchFunction():  # a mode takes 1 us for each address
            if self._flag[0] or [*map(_address_of, self._tensors)] != self._addresses:
                return False
            # a runner's outputs never want gradients
            has_grad = self._is_whole and torch.is_grad_enabled()
            if has_grad and [*map(_requires_grad, self._tensors)] != self._require_grad:
                return False
            if not self._chunks:
                return True
            chunk = self._chunks[self._at]
            self._at = (self._at + 1) % len(self._chunks)
            return _holds(chunk)

    def holds_all(self) -> bool:
        """Each place holds the same object at its address."""
        self._reset()
        with torch._C.DisableTorchFunction():
            is_moved = [*map(_address_of, self._tensors)] != self._addresses
            found = not is_moved and _holds(self._all)
        if not found:
            self._flag[0] = True
        return found

    def _reset(self) -> None:
        """Ahead of a comparison: another thread may write meanwhile."""
        self._flag[0] = False
        for kind, value in self._watched.values():
            if kind == "Type" and not _takes_version(value):
                self._flag[0] = True  # it is not reported any more

    def suspect(self) -> None:
        self._flag[0] = True

    def changes(
        self,
        ignore: Iterable[str] = (),
    ) -> dict[str, Change]:
        self._reset()
        found = self.record.changes(ignore)
        if found:
            self._flag[0] = True
        return found

    def close(self) -> None:
        for address, (kind, value) in self._watched.items():
            with _lock:
                others = [flag for flag in _flags.get(address, ()) if flag is not self._flag]
                if others:
                    _flags[address] = others
                elif _flags.pop(address, None) is not None:
                    unwatch = getattr(ctypes.pythonapi, f"Py{kind}_Unwatch")
                    unwatch(_watcher(kind), ctypes.py_object(value))
        self._watched = {}
        self._chunks = []
        self._all = []
        self._tensors = []

    def __del__(self) -> None:
        if _lock is not None:  # at the interpreter's end
            self.close()


def _with_those_above(
    places: Iterable[Place],
) -> list[Place]:
    found = {id(place): place for place in places}
    todo = list(found.values())
    for place in todo:  # it grows
        above = place.above
        if above is not None and id(above) not in found:
            found[id(above)] = above
            todo.append(above)
    return todo


def _slices(
    compared: list[_Compared],
    most: int,
) -> list[list[_Compared]]:
    return [compared[start : start + most] for start in range(0, len(compared), most or 1)]


def _chunks(parts: list[list[list[_Compared]]]) -> list[list[_Compared]]:
    """For each call some of all parts, as all tensors may have moved."""
    found = list[list[_Compared]]()
    for at in range(max(map(len, parts))):
        chunk = list[_Compared]()
        for slices in parts:
            if slices:
                turn = at % len(slices)
                chunk += slices[turn]
        found.append(chunk)
    return found


def _holds(compared: Iterable[_Compared]) -> bool:
    try:
        for container, key, value, traits in compared:
            if container[key] is not value:
                return False
            if traits is None:
                continue
            if value.stride() != traits.strides or value.shape != traits.shape:
                return False
    except (LookupError, AttributeError, ValueError, TypeError):
        return False
    return True
