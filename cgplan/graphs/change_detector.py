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

import atexit
import ctypes
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import chain, cycle, repeat
from operator import attrgetter
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards

from cgplan.backends.context import AddressPolicy
from cgplan.buffers.batch import never
from cgplan.errors import AddressError
from cgplan.graphs.fingerprint import Change, Fingerprint, Place, Stateful, Traits
from cgplan.graphs.walk import Contents, InClass, Via
from cgplan.modes import Key

# tensors, other places, containers of each call
_WITH_WATCHER = (3, 16, 4)
_WITHOUT_WATCHER = (40, 128, 128)
_DEALLOCATED = 5
_address_of = torch._C.TensorBase.data_ptr
_requires_grad = attrgetter("requires_grad")
_Compared = list[Any]  # container, key, value, traits, guard
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
        found = add(_callbacks[kind])
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

    Attributes:
        is_late: Calls may have passed since the last change that was found.
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
        self._rotates = False
        self.is_late = False
        self._in_turns = set[str]()  # paths of tensors
        of_tensors = [place for place in counted if place.address is not None]
        self._tensors = [place.value for place in of_tensors]
        self._addresses = [place.address for place in of_tensors]
        self._require_grad = [place.requires_grad for place in of_tensors]
        tensors = []
        others = []
        containers = []
        for place in counted:
            compared = [
                place.container,
                place.key,
                place.value,
                place.traits,
                never,
            ]
            self._all.append(compared)
            container = place.container
            if type(container) is InClass:
                container = container.kind
            is_steady = place.above is None or type(container) is tuple
            is_reported = is_steady or id(container) in self._watched
            if place.address is not None and (is_reported or not is_told):
                tensors.append(compared)
                self._in_turns.add(place.path)
            elif not is_reported:
                others.append(compared)
        for extent in extents:
            compared = [extent, 0, extent.length, None, never]
            self._all.append(compared)
            # nothing reports another class or order
            has_order = extent.base is not dict and extent.length > 1
            has_class = extent.owner is not None and extent.kind is not OrderedDict
            if has_class or has_order or id(extent.value) not in self._watched:
                containers.append(compared)
        for stateful in record.stateful:
            if self._is_whole and (at_once or stateful.is_small):
                others.append([Via(stateful, _state), 0, stateful.state, None, never])
        most = _WITH_WATCHER if is_told else _WITHOUT_WATCHER
        self._most_tensors = most[0]
        turns = list[Iterator[Iterable[_Compared]]]()
        for part, count in zip((tensors, others, containers), most, strict=True):
            if at_once or len(part) <= count:
                turns.append(repeat(part))
            else:
                turns.append(zip(*count * [cycle(part)], strict=True))
                self._rotates = True
        self._turns = zip(*turns, strict=True) if tensors or others or containers else None

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

    def holds(self) -> bool:
        """If False, ``holds_all`` or ``changes`` decides."""
        try:
            if self._flag[0] or [*map(_address_of, self._tensors)] != self._addresses:
                return False
        except RuntimeError:  # sparse now
            return False
        # a runner's outputs never want gradients
        has_grad = self._is_whole and torch.is_grad_enabled()
        if has_grad and [*map(_requires_grad, self._tensors)] != self._require_grad:
            return False
        return self._turns is None or _holds(chain(*next(self._turns)))

    def holds_all(self) -> bool:
        self._reset()
        with torch._C.DisableTorchFunction():
            found = not self._have_moved() and _holds(self._all)
        if not found:
            self._flag[0] = True
        return found

    def _have_moved(self) -> bool:
        with suppress(RuntimeError):  # sparse now
            now = [*map(_address_of, self._tensors)]
            return now != self._addresses
        return True

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
        is_late = self._rotates and not self._flag[0]
        with torch._C.DisableTorchFunction():
            at_once = self._have_moved()
        self._reset()
        found = self.record.changes(ignore)
        # fewer unchanged ones than a turn takes: each turn has one that changed
        at_once |= len(self._in_turns - found.keys()) < self._most_tensors
        of_tensors = self._in_turns >= found.keys()
        self.is_late = is_late and not (at_once and of_tensors)
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
        self._turns = None
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
        if above and id(above) not in found:
            found[id(above)] = above
            todo.append(above)
    return todo


def _holds(compared: Iterable[_Compared]) -> bool:
    try:
        for each in compared:
            container, key, value, traits, is_alike = each
            if container[key] is not value:
                return False
            if traits is None or is_alike(value):
                continue
            if traits != Traits.of(value):
                return False
            guards = TensorGuards(  # type: ignore[misc]
                value, dynamic_dims_sizes=None, dynamic_dims_strides=None
            )
            each[-1] = guards.check  # of this autocast and inference mode
    except (LookupError, AttributeError, ValueError, TypeError, RuntimeError):
        return False
    return True


class AddressChecks:
    """Refuses replays once tensors that graphs read have moved.

    Attributes:
        first_use: Paths of tensors made on first use that graphs read and hold. Where another one
            takes its place, ``compare_again`` has comparisons tell whether graphs still are right,
            once for each path.
        holds: Each call's quick look: if False, ``check`` decides.
        is_outdated: Graphs were captured since ``seal``.
    """

    def __init__(
        self,
        roots: dict[str, Any],
        device: torch.device,
        policy: AddressPolicy,
    ) -> None:
        self._roots = roots
        self._device = device
        self._policy = policy
        self.reads = set[str]()
        self.volatile = set[str]()
        self.first_use = set[str]()
        self.compare_again: Callable[[], object] = never
        self.is_outdated = True
        self.holds: Callable[[], bool] = never
        self._sealed: Fingerprint | None = None
        self._detector: ChangeDetector | None = None
        self._checked = set[Key]()
        self._moved: str | None = None

    def seal(
        self,
        known: Fingerprint | None = None,
    ) -> None:
        """``known``: a record that may still be true."""
        is_current = self._sealed is not None and not self.is_outdated
        if is_current or self._policy == "off" or self._moved is not None:
            return
        sealed = self._record_of_reads(None if known is None or known.changes() else known)
        self.forget_all()
        self._sealed = sealed
        self.is_outdated = False
        if self._policy == "first":
            sealed.let_go()  # each check is a walk
            return
        steady = sealed.steady()
        generators = [each for each in steady if issubclass(type(each.value), torch.Generator)]
        modules, held = sealed.modules()
        watched = [*sealed.checked(), *generators, *modules]
        self._detector = ChangeDetector(sealed, watched, held)
        self.holds = self._detector.holds

    def check(
        self,
        key: Key,
        *,
        again: bool = False,
    ) -> None:
        """Raise AddressError if a tensor moved. ``first`` looks once, unless ``again``."""
        self.refuse_invalid()
        if self._sealed is None:
            return
        if self._detector:
            if self._detector.holds_all():
                return
        elif key in self._checked and not again:
            return
        replaced = set[str]()
        if self.first_use:
            replaced = self.first_use.intersection(self._sealed.changes())
        if replaced:
            self.first_use -= replaced
            self.volatile |= replaced
            self._sealed.volatile |= replaced
            self.compare_again()
        mode, descriptor = key
        self._sealed.refuse_moved(f"{mode} {descriptor}", self._roots, may_grow=True)
        if not again:  # a call follows
            self._checked.add(key)
        if self._detector:  # no graph reads what has changed
            self.is_outdated = True
            self.seal()

    def take_record(self) -> Fingerprint:
        """Of what graphs read, without the tensors; nothing is checked any more."""
        found = self._sealed or self._record_of_reads(None)
        self.forget_all()
        return found.let_go()

    def _record_of_reads(self, known: Fingerprint | None) -> Fingerprint:
        found = known or Fingerprint.of(self._roots, self._device)
        found.volatile |= self.volatile
        found.narrow(self.reads | self.first_use)
        return found

    def invalidate(
        self,
        name: str,
    ) -> None:
        self._moved = name
        self.forget_all()

    def refuse_invalid(self) -> None:
        if self._moved is not None:
            raise AddressError(
                f"the model was captured before {self._moved!r} moved: a replay would use the old "
                "memory",
                remedy="Call runner.recapture().",
            )

    def forget(self, keys: Collection[Key]) -> None:
        self._checked.difference_update(keys)

    def forget_all(self) -> None:
        self._sealed = None
        self._detector = None
        self.holds = never

    def at_capture(self) -> dict[int, str]:
        places = {} if self._sealed is None else self._sealed.places
        return {place.address: path for path, place in places.items() if place.address is not None}
