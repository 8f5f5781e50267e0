"""Whether a model is still as its fingerprint says, for about a microsecond a call.

Note [Watched dicts]
    CPython 3.12 reports changes of dicts to a callback. It sets one flag and nothing else, since it
    runs in the middle of other code. ``.data =`` and changes of lists, slots, cells and classes are
    not reported: each call compares some in rotation.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterable
from functools import cache
from typing import Any

from cgplan.graphs.fingerprint import Change, Fingerprint, Place
from cgplan.graphs.walk import Contents

# tensors, others of each call
_WITH_WATCHER = (4, 1)
_WITHOUT_WATCHER = (64, 256)
_DEALLOCATED = 5
_Compared = tuple[Any, Any, Any, tuple[Any, ...] | None]  # container, key, value, Place.tensor
_flags: dict[int, list[list[bool]]] = {}  # by the address of a dict
_lock = threading.RLock()  # of flags and watched dicts: a watch may be closed by a collection


def _note(
    event: int,
    address: int,
    *_: int,  # key and value
) -> int:
    for flag in _flags.get(address, ()):
        flag[0] = True
    if event == _DEALLOCATED:
        _flags.pop(address, None)
    return 0


_on_event = ctypes.PYFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    *3 * [ctypes.c_void_p],
)(_note)


@cache
def _watcher() -> int | None:
    if sys.version_info < (3, 12):
        return None
    try:
        found: int = ctypes.pythonapi.PyDict_AddWatcher(_on_event)
    except RuntimeError:  # all are taken
        return None
    return found


class _Extent:
    """A length as a place; None where its last key or owner changed."""

    def __init__(self, held: Contents) -> None:
        self._held = held

    def __getitem__(
        self,
        key: int,
    ) -> int | None:
        held = self._held
        if type(held.owner) is not held.kind:
            return None
        if held.base.__len__(held.value) != held.length:
            return None
        if held.keys and next(held.base.__reversed__(held.value)) is not held.keys[-1]:
            return None
        return held.length  # the same object: places are compared by identity


class Watch:
    """Compares a model with its fingerprint on each call.

    Args:
        record: Its objects are held until ``close``.
        at_once: Each call compares everything.
    """

    __graph_memory__ = True  # not model state

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
        self._flag = [False]  # a watched dict was written
        if places is None:
            places = record.places.values()
            contents = record.contents.values()
        counted = _with_those_above(places)
        extents = list(contents)
        held = {id(place.container) for place in counted}
        held.update(id(extent.value) for extent in extents)
        self._dicts = dict[int, Any]()
        self._watch_dicts(held)
        self._all = list[_Compared]()
        tensors = list[_Compared]()
        others = list[_Compared]()
        for place in counted:
            compared = place.container, place.key, place.value, place.tensor
            self._all.append(compared)
            if place.address is not None:
                tensors.append(compared)
            elif not self._is_reported(place):
                others.append(compared)
        for extent in extents:
            compared = _Extent(extent), 0, extent.length, None
            self._all.append(compared)
            if id(extent.value) not in self._dicts:
                others.append(compared)
        most_tensors, most_others = _WITH_WATCHER if self._dicts else _WITHOUT_WATCHER
        if at_once:
            most_tensors = len(tensors)
            most_others = len(others)
        # so that each call compares a tensor: all may have moved
        first = _slices(tensors, most_tensors)
        second = _slices(others, most_others)
        self._chunks = list[list[_Compared]]()
        for at in range(max(len(first), len(second))):
            chunk = list[_Compared]()
            for slices in (first, second):
                if slices:
                    turn = at % len(slices)
                    chunk += slices[turn]
            self._chunks.append(chunk)
        self._at = 0
        self._stateful = record.stateful if at_once else []

    def _watch_dicts(self, counted: set[int]) -> None:
        """A script's globals, which change often, stay in rotation."""
        watcher = _watcher()
        if watcher is None:
            return
        for held in self.record.contents.values():
            value = held.value
            address = id(value)
            is_dict = issubclass(type(value), dict)
            if not is_dict or address not in counted or address in self._dicts:
                continue
            with _lock:
                _flags.setdefault(address, []).append(self._flag)
                ctypes.pythonapi.PyDict_Watch(watcher, ctypes.py_object(value))
            self._dicts[address] = value

    def _is_reported(self, place: Place) -> bool:
        is_steady = place.above is None or type(place.container) is tuple
        return is_steady or id(place.container) in self._dicts

    def holds(self) -> bool:
        """Looks at watched dicts and the next places in rotation."""
        if self._flag[0]:
            return not self._is_whole and self.holds_all()
        for _, read, state in self._stateful:
            if read() != state:
                return False
        if not self._chunks:
            return True
        chunk = self._chunks[self._at]
        self._at = (self._at + 1) % len(self._chunks)
        return _holds(chunk)

    def holds_all(self) -> bool:
        """Each place holds the same object at its address."""
        self._flag[0] = False
        found = _holds(self._all)
        if not found:
            self._flag[0] = True
        return found

    def suspect(self) -> None:
        self._flag[0] = True

    def changes(
        self,
        ignore: Iterable[str] = (),
    ) -> dict[str, Change]:
        self._flag[0] = False  # ahead: another thread may write meanwhile
        found = self.record.changes(ignore)
        if found:
            self._flag[0] = True
        return found

    def close(self) -> None:
        watcher = _watcher() if self._dicts else None
        for address, value in self._dicts.items():
            with _lock:
                others = [flag for flag in _flags.get(address, ()) if flag is not self._flag]
                if others:
                    _flags[address] = others
                elif _flags.pop(address, None) is not None:
                    ctypes.pythonapi.PyDict_Unwatch(watcher, ctypes.py_object(value))
        self._dicts = {}
        self._chunks = []
        self._all = []

    def __del__(self) -> None:
        self.close()


def _with_those_above(places: Iterable[Place]) -> list[Place]:
    found = {id(place): place for place in places}
    todo = list(found.values())
    for place in todo:  # it grows
        above = place.above
        if above is not None and id(above) not in found:
            found[id(above)] = above
            todo.append(above)
    return todo


def _slices(
    places: list[_Compared],
    most: int,
) -> list[list[_Compared]]:
    return [places[start : start + most] for start in range(0, len(places), most or 1)]


def _holds(places: Iterable[_Compared]) -> bool:
    try:
        for container, key, value, tensor in places:
            if container[key] is not value:
                return False
            if tensor is None:
                continue
            if (
                value.data_ptr(),
                value.requires_grad,
                value.stride(),
                value.shape,
            ) != tensor:
                return False
    except (LookupError, AttributeError, ValueError, TypeError):
        return False
    return True
