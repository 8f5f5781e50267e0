"""Watch: tells on each call, for about a microsecond, whether a model is still as its fingerprint
says.

Note [Watched dicts]
    Modules and most objects keep their attributes in dicts, and CPython 3.12 tells of changes of a
    dict. So a call looks at one flag. The callback sets the flag and nothing else: it runs in the
    middle of other code. A dict that is written without a change (3.13 tells of those, too) sets it
    as well; the fingerprint then decides. Not told are ``.data =``, lists, slots, cells and
    classes. Those are compared in rotation, some on each call, and all of them whenever ``changes``
    is asked for. On Python 3.11, or where no watcher is free, everything is compared in rotation.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

from cgplan.graphs.fingerprint import Change, Fingerprint, Place
from cgplan.graphs.walk import Contents

# tensors and other places that each call compares, with watched dicts and without
_TOLD, _UNTOLD = (4, 4), (128, 128)
_DEALLOCATED = 5
_Compared = tuple[Any, Any, Any, tuple[Any, ...] | None]  # container, key, value, facts of a tensor
_flags: dict[int, list[list[bool]]] = {}  # by the address of a dict


def _note(event: int, address: int, key: int, value: int) -> int:  # noqa: ARG001
    for flag in _flags.get(address, ()):
        flag[0] = True
    if event == _DEALLOCATED:
        _flags.pop(address, None)
    return 0


_on_event = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, *3 * [ctypes.c_void_p])(_note)


@cache
def _watcher() -> int | None:
    """The process's watcher of dicts; None where there is none."""
    if sys.version_info < (3, 12):
        return None
    try:
        found: int = ctypes.pythonapi.PyDict_AddWatcher(_on_event)
    except RuntimeError:  # all are taken
        return None
    return found


class _Extent:
    """The length of a container, as a place; also another one where its last key, or the class of
    the object that it belongs to, is another.
    """

    def __init__(self, held: Contents) -> None:
        self._held = held

    def __getitem__(self, key: int) -> int | None:
        held = self._held
        if type(held.owner) is not held.kind or held.base.__len__(held.value) != held.length:
            return None
        if held.keys and next(held.base.__reversed__(held.value)) is not held.keys[-1]:
            return None
        return held.length  # the very object, by which places are compared


class Watch:
    """Compares a model with its fingerprint on each call.

    Args:
        record: The model as it was; its objects are held until ``close``.
        places: Those that count, and their containers; absent: all.
        contents: Containers whose length counts beside these places.
        at_once: Each call compares all that is not told, not some in rotation.
    """

    __graph_memory__ = True  # no state of a model that holds one

    def __init__(
        self,
        record: Fingerprint,
        places: Iterable[Place] | None = None,
        contents: Iterable[Contents] = (),
        *,
        at_once: bool = False,
    ) -> None:
        self.record, self._is_whole = record, places is None
        self._flag = [False]  # whether a watched dict was written since the last comparison
        counted = list(record.places.values() if places is None else places)
        if places is not None:
            ways = {id(place): place for place in counted}
            for place in counted:  # it grows by the places above
                if place.above is not None and id(place.above) not in ways:
                    ways[id(place.above)] = place.above
                    counted.append(place.above)
        self._dicts: list[Any] = []
        extents = list(record.contents.values() if self._is_whole else contents)
        counts = {id(place.container) for place in counted}
        counts.update(id(held.value) for held in extents)
        # Globals of the user's are in rotation: each assignment in a script would tell.
        values = [held.value for held in record.contents.values()]
        self._watch(value for value in values if id(value) in counts)
        told = {id(value) for value in self._dicts}
        self._all = list[_Compared]()
        rest = list[_Compared]()
        for place in counted:
            compared = place.container, place.key, place.value, place.tensor
            self._all.append(compared)
            if not _is_told(place, told):
                rest.append(compared)
        for held in extents:
            self._all.append((_Extent(held), 0, held.length, None))
            if id(held.value) not in told:
                rest.append(self._all[-1])
        tensors = [place for place in rest if place[3] is not None]
        others = [place for place in rest if place[3] is None]
        most_tensors, most_others = _TOLD if self._dicts else _UNTOLD
        if at_once:
            most_tensors, most_others = len(tensors) or 1, len(others) or 1
        # Each call compares some of both: where all tensors have moved, it sees that.
        self._chunks = list[list[_Compared]]()
        count = max(-(-len(tensors) // most_tensors), -(-len(others) // most_others))
        for at in range(count):
            self._chunks.append(_slice(tensors, at, most_tensors) + _slice(others, at, most_others))
        self._at = 0
        self._tokens = record.changing if at_once else []

    def _watch(self, containers: Iterable[Any]) -> None:
        watcher = _watcher()
        if watcher is None:
            return
        found = {id(value): value for value in containers if issubclass(type(value), dict)}
        for address, value in found.items():
            ctypes.pythonapi.PyDict_Watch(watcher, ctypes.py_object(value))
            _flags.setdefault(address, []).append(self._flag)
            self._dicts.append(value)

    def holds(self) -> bool:
        """Whether nothing that this call compares has changed: what was told, and the next places
        in rotation.
        """
        if self._flag[0]:
            return not self._is_whole and self.holds_all()
        for _, token, before in self._tokens:
            if token() != before:
                return False
        if not self._chunks:
            return True
        chunk = self._chunks[self._at]
        self._at = (self._at + 1) % len(self._chunks)
        return _holds(chunk)

    def holds_all(self) -> bool:
        """Whether each place holds the very object that it held, at its address."""
        self._flag[0] = False
        found = _holds(self._all)
        if not found:
            self._flag[0] = True
        return found

    def suspect(self) -> None:
        """Compare everything at the next call."""
        self._flag[0] = True

    def changes(self, ignore: Iterable[str] = ()) -> dict[str, Change]:
        """All that differs from the record; where nothing does, the flag is down again."""
        self._flag[0] = False  # ahead: another thread may write meanwhile
        found = self.record.changes(ignore)
        if found:
            self._flag[0] = True
        return found

    def close(self) -> None:
        """Hold nothing of the model any more."""
        watcher = _watcher() if self._dicts else None
        for value in self._dicts:
            others = [flag for flag in _flags.get(id(value), ()) if flag is not self._flag]
            if others:
                _flags[id(value)] = others
            if not others and _flags.pop(id(value), None) is not None:
                ctypes.pythonapi.PyDict_Unwatch(watcher, ctypes.py_object(value))
        self._dicts, self._chunks, self._all = [], [], []

    def __del__(self) -> None:
        self.close()


def _holds(places: Iterable[_Compared]) -> bool:
    try:
        for container, key, value, tensor in places:
            if container[key] is not value:
                return False
            if tensor is None:
                continue
            if (value.data_ptr(), value.requires_grad, value.stride(), value.shape) != tensor:
                return False
    except (LookupError, AttributeError, ValueError, TypeError):  # it is no longer there
        return False
    return True


def _slice(places: list[_Compared], at: int, most: int) -> list[_Compared]:
    """The places of one call, of which there are at most so many: from the first on again where the
    last has had its turn.
    """
    count = -(-len(places) // most)
    return places[at % count * most :][:most] if places else []


def _is_told(place: Place, told: set[int]) -> bool:
    """Whether a change there sets the flag: no tensor's address does. Roots are the record's
    own.
    """
    is_steady = place.above is None or type(place.container) is tuple
    return place.address is None and (is_steady or id(place.container) in told)
