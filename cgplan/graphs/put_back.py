"""What runs ahead of a capture change of a model, and what it gets back.

Note [What is put back]
    Tensors and attributes; dicts, lists and sets lose what they got if no graph stays. Small
    storages are rewound before each run: positions must not run past a cache. What one run alone
    changed of Python, ahead of captures, was made on first use, and stays, as captures rely on it;
    then other attributes keep what the first run left, which may belong to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cgplan.backends import GraphBackend
from cgplan.backends.host_sync import storage_id
from cgplan.config import CompilationConfig
from cgplan.graphs.fingerprint import (
    ABSENT,
    Change,
    Fingerprint,
    Place,
    is_same,
    is_tensor,
    is_within,
)
from cgplan.modes import Key

_HOST_COPIES = 1 << 30  # bytes
_SMALL = 1 << 20  # bytes

Outcome = Literal["device", "host", "new", "not kept"]
FirstUse = Literal["seen", "hidden"]


class _Unowned(NamedTuple):
    """Written, and on no path of the model yet."""

    reference: StorageWeakRef
    copy: torch.UntypedStorage | None
    version: int | None


@dataclass(slots=True)
class Written:
    """A storage.

    Attributes:
        runs: Those that wrote it, and how many versions.
        is_captured: A capture did.
        after_run: Its bytes, if small: kernels may write without a version.
        after_first: Those that the first of ``runs`` computed.
    """

    path: str
    tensor: torch.Tensor
    storage: torch.UntypedStorage
    copy: torch.UntypedStorage | None
    version: int | None
    outcome: Outcome
    runs: dict[int, int] = field(default_factory=dict)
    is_captured: bool = False
    after_run: torch.UntypedStorage | None = None
    after_first: torch.UntypedStorage | None = None

    @property
    def is_small(self) -> bool:
        return self.copy is not None and self.storage.nbytes() <= _SMALL

    def count_run(
        self,
        number: int,
        *,
        captures: bool,
    ) -> None:
        version = version_of(self.tensor)
        has_written = version != self.version
        if self.is_small:
            before = bytes_of(self.after_run or self.copy)
            now = bytes_of(self.storage).to(before.device)
            is_changed = not torch.equal(now, before)
            has_written |= is_changed
            self.after_run = self.storage.clone()
            if is_changed and not self.runs and not captures:
                self.after_first = self.after_run
        elif version is None:
            has_written = True
        if has_written:
            self.runs[number] = (version or 0) - (self.version or 0)
        self.is_captured |= has_written and captures
        self.version = version

    def put_back(
        self,
        copy: torch.UntypedStorage | None,
    ) -> None:
        if copy is not None and self.storage.nbytes() == copy.nbytes():
            self.storage.copy_(copy)
            self.after_run = None


@dataclass(slots=True)
class _PathChanges:
    """Of Python, by runs.

    Attributes:
        first: What the first one left there.
        is_captured: The first one was a capture.
    """

    first: Any
    is_captured: bool
    runs: set[int] = field(default_factory=set)


class _Run(NamedTuple):
    """``key``: an object of its own after a failure; ``began_with``: paths that had changed."""

    key: object
    captures: bool
    began_with: frozenset[str]


class PutBack:
    """Undoes what runs on padding change of a model; see Note [What is put back].

    Args:
        limit: Bytes of copies on the device.

    Attributes:
        outcome: Bytes and kind of copy by path; ``new``: made on first use.
        volatile: Paths that runs bind, but on first use.
        last: Changes of Python after the last run.
        newly_written: Paths of tensors that the last run wrote, and an earlier one did not.
        written: By address.
        keeps_first_use: Else ``restore`` undoes all.
    """

    def __init__(
        self,
        before: Fingerprint,
        limit: int,
    ) -> None:
        self.before = before
        self._limit = limit
        self.outcome: dict[str, tuple[int, Outcome]] = {}
        self.volatile = set[str]()
        self.written: dict[int, Written] = {}
        self._unowned: dict[int, _Unowned] = {}
        self._state_at = self._storages(before)
        self._versioned = list[Place]()
        for place in before.of_tensors:
            if place.value.layout is torch.strided and not place.value.is_inference():
                self._versioned.append(place)
        self._small_state: dict[int, Written] = {}  # a look sees what its size writes
        self.last: dict[str, Change] = {}
        self._paths = dict[str, _PathChanges]()
        self._of_engine = set[str]()  # paths
        self.key: Key | None = None  # of the next run
        self._runs = list[_Run]()
        self.copied = Counter[Outcome]()  # bytes
        self.keeps_first_use = True
        self.newly_written: list[str] = []
        for address, (path, tensor) in self._state_at.items():
            storage = tensor.untyped_storage()
            is_state = type(tensor) is not torch.nn.Parameter
            if limit and is_state and 0 < storage.nbytes() <= _SMALL:
                self._small_state[address] = self._copied(
                    path,
                    tensor,
                    storage,
                )

    @staticmethod
    def _storages(state: Fingerprint) -> dict[int, tuple[str, torch.Tensor]]:
        found = dict[int, tuple[str, torch.Tensor]]()
        for place in state.of_tensors:
            with suppress(RuntimeError, NotImplementedError):
                address = place.value.untyped_storage().data_ptr()
                found.setdefault(address, (place.path, place.value))
        return found

    @contextmanager
    def run(
        self,
        *,
        captures: bool = False,
        enters_made: bool = False,
    ) -> Iterator[dict[str, Change]]:
        """A block of one run; its end fills the dict with the changes of Python, ``enters_made``:
        also inside what earlier runs made.
        """
        found = dict[str, Change]()
        for written in self.written.values():
            if written.is_small and self._first_use(written) != "seen":
                written.put_back(written.copy)
        held = self._now() if enters_made and self.made else None
        versions = self._versions()
        began_with = frozenset(self.last)
        is_whole = False
        try:
            yield found
            is_whole = True
        finally:
            now = self.before.changes()
            changed = _differing(self.last, now)
            if changed:
                self._adopt_unowned()
            self._unowned.clear()
            self._note_newly_written(versions)  # compares with runs before
            number = len(self._runs)
            run = _Run(
                self.key if is_whole else object(),
                captures,
                began_with,
            )
            self._runs.append(run)
            with torch._C.DisableTorchFunction():
                for written in self.written.values():
                    written.count_run(number, captures=captures)
            for path, change in changed.items():
                if path in self._of_engine:
                    continue
                found[path] = change
                if path not in self._paths:
                    # what a capture left lies in the pool
                    first = ABSENT if captures else change.now
                    self._paths[path] = _PathChanges(
                        first,
                        captures,
                    )
                self._paths[path].runs.add(number)
            self.last = now
            if held is not None:
                for path, change in held.changes().items():
                    if path not in changed:
                        found[path] = change

    def _versions(self) -> list[int]:
        with torch._C.DisableTorchFunction():
            return [place.value._version for place in self._versioned]

    def _note_newly_written(
        self,
        before: list[int],
    ) -> None:
        self.newly_written = []
        versions = zip(self._versioned, before, self._versions(), strict=True)
        for place, version, now in versions:
            if now == version:
                continue
            address = place.value.untyped_storage().data_ptr()
            written = self.written.get(address)
            is_steady = written is not None and len(written.runs) == len(self._runs)
            if not is_steady:
                self.newly_written.append(place.path)
            if written is None and address in self._small_state:
                self.written[address] = self._small_state[address]

    @contextmanager
    def setting_context(self) -> Iterator[None]:
        """Around an engine's code: what it binds is put back."""
        yield
        now = self.before.changes()
        for path in _differing(self.last, now):
            self._of_engine.add(path)
            self._paths.pop(path, None)
        self.last = now

    def save(
        self,
        written: Iterable[torch.Tensor],
    ) -> None:
        for tensor in written:
            try:
                storage = tensor.untyped_storage()
                if storage.device.type == "meta":
                    continue
                address = storage.data_ptr()
            except (RuntimeError, NotImplementedError):
                continue
            if not address or address in self.written:
                continue
            if address in self._state_at:
                small = self._small_state.get(address)
                self.written[address] = small or self._copied(*self._state_at[address], storage)
                continue
            known = self._unowned.get(address)
            if known is None or known.reference.expired():
                reference = StorageWeakRef(storage)
                copy = None
                nbytes = storage.nbytes()
                if nbytes <= _SMALL or nbytes <= self._room():
                    with suppress(torch.OutOfMemoryError):
                        copy = storage.clone()
                self._unowned[address] = _Unowned(reference, copy, version_of(tensor))

    def _room(self) -> int:
        """Bytes left for copies on the device."""
        left = self._limit - self.copied["device"]
        for address, known in list(self._unowned.items()):
            if known.reference.expired():
                del self._unowned[address]
            elif known.copy is not None:
                left -= known.copy.nbytes()
        return left

    def _copied(
        self,
        path: str,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
    ) -> Written:
        nbytes = storage.nbytes()
        copy: torch.UntypedStorage | None = None
        outcome: Outcome = "not kept"
        if self.copied["device"] + nbytes <= self._limit:
            with suppress(torch.OutOfMemoryError):
                copy = storage.clone()
                outcome = "device"
        if (
            copy is None
            and storage.device.type != "cpu"
            and self.copied["host"] + nbytes <= _HOST_COPIES
        ):
            copy = storage.cpu()
            outcome = "host"
        if copy is not None:
            self.copied[outcome] += nbytes
        return Written(
            path,
            tensor,
            storage,
            copy,
            version_of(tensor),
            outcome,
        )

    def _adopt_unowned(self) -> None:
        new = {key: one for key, one in self._unowned.items() if not one.reference.expired()}
        if not new:
            return
        for address, (path, tensor) in self._storages(self._now()).items():
            if address not in new or address in self.written:
                continue
            _, copy, version = new[address]
            if copy is not None:
                self.copied["device"] += copy.nbytes()
            self.written[address] = Written(
                path,
                tensor,
                tensor.untyped_storage(),
                copy,
                version,
                "new" if copy is None else "device",  # large ones are made by runs
            )

    @property
    def made(self) -> set[str]:
        """Paths of Python, on first use."""
        found = set[str]()
        for path, known in self._paths.items():
            if self.keeps_first_use and not known.is_captured and len(known.runs) == 1:
                found.add(path)
        return found

    def is_steady(
        self,
        path: str,
    ) -> bool:
        """Whether each run changed it."""
        known = self._paths.get(path)
        return known is not None and len(known.runs) == len(self._runs)

    def _first_use(
        self,
        written: Written,
    ) -> FirstUse | None:
        """Whether it was made on first use, and how that is seen; None: it gets its copy back.

        seen    each run that wrote it left something of Python that stays
        hidden  one run wrote it, and none after it: not with its key, nor after each attribute
                that this run changed was put back, so that none of them is the flag
        """
        made = self.made
        leave_python = set[int]()
        for path, known in self._paths.items():
            is_undone = self.is_steady(path) or known.is_captured or self.may_undo(path)
            if path in made or not is_undone:
                leave_python |= known.runs
        if written.runs and written.runs.keys() <= leave_python:
            return "seen"
        if len(written.runs) != 1 or written.after_first is None:
            return None
        number = max(written.runs)
        run, *later = self._runs[number:]
        if not any(other.key == run.key and not other.captures for other in later):
            return None
        for path, known in self._paths.items():
            is_tried = any(path not in other.began_with for other in later)
            if number in known.runs and not is_tried and self.may_undo(path):
                return None
        return "hidden"

    @property
    def leaves_python(self) -> bool:
        """Whether ``restore`` leaves some changes of Python though no graph stays."""
        for change in self.last.values():
            if not change.is_addition and not self.before.is_attribute(change):
                return True
        return "hidden" in map(self._first_use, self.written.values())

    @property
    def prepared(self) -> list[str]:
        """Paths of tensors that first use wrote more often than later runs, which write them, too:
        nothing holds what they were in between; or that other runs of a key do not write.
        """
        made = self.made
        steady = set(filter(self.is_steady, self._paths))
        of_first_use = set[int]()
        for path, known in self._paths.items():
            change = self.last.get(path)
            is_of_a_size = change is not None and change.is_addition and path not in steady
            if path in made or is_of_a_size:
                of_first_use |= known.runs
        found = list[str]()
        for written in self.written.values():
            first = later = -1  # none
            write = set[object]()
            do_not = set[object]()
            for number, run in enumerate(self._runs):
                versions = written.runs.get(number)
                if versions is None:
                    do_not.add(run.key)
                    continue
                write.add(run.key)
                if number in of_first_use:
                    first = max(first, versions)
                else:
                    later = max(later, versions)
            is_refilled = (
                len(write) > 1
                and not write.isdisjoint(do_not)
                and written.after_first is not None
                and all(written.runs.values())
                and not is_within(written.path, steady)
            )
            if later >= 0 and (is_refilled or first > later):
                found.append(written.path)
        return found

    def may_undo(
        self,
        path: str,
    ) -> bool:
        """Containers lose what runs put in or exchange, but only if no graph stays."""
        change = self.last.get(path)
        if change is None or self.before.is_attribute(change):
            return True
        return change.where is not None and not self.keeps_first_use

    def made_of(
        self,
        computed: Mapping[int, StorageWeakRef],
    ) -> list[str]:
        """Paths on these storages that were made on first use."""
        found = list[str]()
        state = self._storages(self._now()) if self.made else self._state_at
        for address, (path, tensor) in state.items():
            written = self.written.get(address)
            if storage_id(tensor) not in computed:
                continue
            if written is None or self._first_use(written) is not None:
                found.append(path)
        return found

    def rebound(
        self,
        read: Mapping[str, torch.Tensor],
        changed: Mapping[str, Change],
    ) -> list[str]:
        """Paths of read tensors that a run exchanged."""
        bound = {path for path, change in changed.items() if change.where is not None}
        within = [path for path in read if is_within(path, bound)]
        found = list[str]()
        if not within:
            return found
        now = self._now()
        held = set(map(id, now.tensors))
        for path in within:
            place = now.places.get(path)
            stays = id(read[path]) in held
            if place is not None:
                stays = place.value is read[path]
            if not stays:
                found.append(path)
        return found

    def _now(self) -> Fingerprint:
        return Fingerprint.of(self.before.roots, self.before.device)

    def count_as_run(self) -> None:
        """The last capture, whose replay computed what it left."""
        for path, known in self._paths.items():
            if known.is_captured and path in self.last:
                known.first = self.last[path].now
                known.is_captured = False
        for written in self.written.values():
            if written.is_small and written.path in self.newly_written:
                written.is_captured = False
                written.after_first = written.after_run = written.storage.clone()

    def restore(
        self,
        *,
        between_keys: bool = False,
    ) -> None:
        """Undo changes; between keys, large storages wait. The device is idle."""
        if len(self._runs) < 2:  # a look alone: no second run tells first use apart
            self.keeps_first_use = False
        self.outcome.clear()
        for written in self.written.values():
            nbytes = written.storage.nbytes()
            if between_keys and nbytes > _SMALL:
                continue
            first_use = self._first_use(written)
            if first_use != "seen":
                written.put_back(written.after_first if first_use else written.copy)
            self.outcome[written.path] = nbytes, "new" if first_use else written.outcome
        if between_keys and not self.last:
            return
        made = self.made
        if not between_keys:
            self.last = self.before.changes()
        for path, change in self.last.items():
            known = self._paths.get(path)
            if path in made:
                nbytes = change.now.nbytes if is_tensor(change.now) else 0
                self.outcome[path] = nbytes, "new"
                continue
            self.volatile.add(path)
            if not self.may_undo(path):
                continue
            value = change.was
            if made and known is not None and not known.is_captured:
                value = known.first
            change.bind(value)
        if self.last:
            self.last = self.before.changes()

    def drop_copies(self) -> None:
        """An exception's frames may hold this object for long."""
        self.written.clear()
        self._small_state.clear()
        self.copied.clear()


def _differing(
    before: Mapping[str, Change],
    now: Mapping[str, Change],
) -> dict[str, Change]:
    found = dict[str, Change]()
    for path, change in now.items():
        known = before.get(path)
        if known is None:
            found[path] = change
        elif not is_same(known.now, change.now):
            found[path] = replace(change, was=known.now)
    for path, change in before.items():
        if path not in now:
            found[path] = replace(
                change,
                was=change.now,
                now=change.was,
            )
    return found


def copy_limit(
    compilation: CompilationConfig,
    backend: GraphBackend,
) -> int:
    """Bytes on the device."""
    limit = compilation.state_copy
    if limit is None:
        limit = (backend.memory().free or 4 << 30) // 4
    return limit


def bytes_of(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def version_of(tensor: torch.Tensor) -> int | None:
    """Torch's count of writes; inference tensors have none."""
    return None if tensor.is_inference() else tensor._version
