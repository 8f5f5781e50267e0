"""What runs ahead of a capture change of a model, and what it gets back.

Note [What is put back]
    Tensors and attributes, not other containers; dicts lose what they got if no graph stays. What
    the first run alone made stays with a capture, which relies on it. Small storages are rewound
    before each run: positions must not run past a cache. Containers are not put back, so what a run
    wrote together with a change of one (a row of a table, behind a set of sizes) stays, too, unless
    every run makes that change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cgplan.backends.host_sync import storage_id
from cgplan.graphs.fingerprint import ABSENT, Change, Fingerprint, is_same, is_tensor, is_within

_HOST_COPIES = 1 << 30  # bytes
_SMALL = 1 << 20  # bytes

Outcome = Literal["device", "host", "new", "not kept"]


class _New(NamedTuple):
    reference: StorageWeakRef
    copy: torch.UntypedStorage | None
    version: int | None


@dataclass(slots=True)
class _Written:
    """``after_run``: its bytes, if small: kernels may write without a version."""

    path: str
    tensor: torch.Tensor
    storage: torch.UntypedStorage
    copy: torch.UntypedStorage | None
    version: int | None
    kept: Outcome
    runs: set[int] = field(default_factory=set)  # numbers of those that wrote it
    captures: int = 0
    after_run: torch.UntypedStorage | None = None

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
            has_written |= not torch.equal(now, before)
            self.after_run = self.storage.clone()
        elif version is None:
            has_written = True
        if has_written:
            self.runs.add(number)
        self.captures += has_written and captures
        self.version = version

    def put_back(self) -> None:
        if self.copy is not None and self.storage.nbytes() == self.copy.nbytes():
            self.storage.copy_(self.copy)
            self.after_run = None


class PutBack:
    """Undoes what runs on padding change of a model; see Note [What is put back].

    Args:
        limit: Bytes of copies on the device.

    Attributes:
        outcome: Bytes and kind of copy by path; ``new``: made on first use.
        volatile: Paths that each run binds again.
        last: Changes of Python after the last run.
        newly_written: Paths of tensors that the last run wrote, and an earlier one did not.
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
        self._written: dict[int, _Written] = {}
        self._new: dict[int, _New] = {}
        self._places = self._storages(before)
        self._unseen: dict[int, _Written] = {}  # small state, which only some sizes may write
        self.last: dict[str, Change] = {}
        self._first = dict[str, Any]()  # what their first change left there
        self._changed = list[set[str]]()  # paths, by run
        self._runs = Counter[str]()
        self._captured = set[str]()  # paths that a capture changed first
        self._keeps_first_use = True
        self._of_context = set[str]()  # paths
        self.newly_written: list[str] = []
        for address, (path, tensor) in self._places.items():
            storage = tensor.untyped_storage()
            is_state = type(tensor) is not torch.nn.Parameter
            if limit and is_state and 0 < storage.nbytes() <= _SMALL:
                self._unseen[address] = self._saved(path, tensor, storage)

    @property
    def _count(self) -> int:
        """Of runs."""
        return len(self._changed)

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
        """A block; yields its changes of Python, with ``enters_made`` also inside what earlier runs
        made.
        """
        found = dict[str, Change]()
        self.rewind()
        made = self._now() if enters_made and self.has_made else None
        versions = [version_of(place.value) for place in self.before.of_tensors]
        try:
            yield found
        finally:
            now = self.before.changes()
            changed = _differing(self.last, now)
            if changed:
                self._adopt_new()
            self._new.clear()
            self._note_newly_written(versions)
            for written in self._written.values():
                written.count_run(
                    self._count,
                    captures=captures,
                )
            self._changed.append(set(changed))
            self._runs.update(changed.keys())
            for path, change in changed.items():
                self._first.setdefault(path, change.now)
                if captures and self._runs[path] == 1:
                    self._captured.add(path)
                if path not in self._of_context:
                    found[path] = change
            self.last = now
            inside = {} if made is None else made.changes()
            for path, change in inside.items():
                if path not in changed:
                    found[path] = change

    def _note_newly_written(
        self,
        versions: Iterable[int | None],
    ) -> None:
        self.newly_written = []
        pairs = zip(
            self.before.of_tensors,
            versions,
            strict=True,
        )
        for place, version in pairs:
            if version_of(place.value) == version:
                continue
            address = place.value.untyped_storage().data_ptr()
            written = self._written.get(address)
            is_steady = written is not None and len(written.runs) == self._count
            if not is_steady:
                self.newly_written.append(place.path)
            unseen = self._unseen.get(address)
            if written is None and unseen is not None:
                if unseen.runs:  # what one run wrote may be behind a flag that no walk sees
                    self._written[address] = unseen
                unseen.runs.add(self._count)

    @contextmanager
    def setting_context(self) -> Iterator[None]:
        """Around an engine's code: what it binds is put back."""
        yield
        now = self.before.changes()
        self._of_context |= _differing(self.last, now).keys()
        self.last = now

    def save(self, written: Iterable[torch.Tensor]) -> None:
        for tensor in written:
            try:
                storage = tensor.untyped_storage()
                address = storage.data_ptr()
            except (RuntimeError, NotImplementedError):
                continue
            if not address or address in self._written:
                continue
            if address in self._places:
                self._written[address] = self._saved(*self._places[address], storage)
                continue
            known = self._new.get(address)
            if known is None or known.reference.expired():
                reference = StorageWeakRef(storage)
                copy = None
                if storage.nbytes() <= _SMALL:
                    copy = storage.clone()
                self._new[address] = _New(reference, copy, version_of(tensor))

    def _saved(
        self,
        path: str,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
    ) -> _Written:
        nbytes = storage.nbytes()
        copy: torch.UntypedStorage | None = None
        kept: Outcome = "not kept"
        if self.copied("device") + nbytes <= self._limit:
            with suppress(torch.OutOfMemoryError):
                copy = storage.clone()
                kept = "device"
        if (
            copy is None
            and storage.device.type != "cpu"
            and self.copied("host") + nbytes <= _HOST_COPIES
        ):
            copy = storage.cpu()
            kept = "host"
        return _Written(
            path,
            tensor,
            storage,
            copy,
            version_of(tensor),
            kept,
        )

    def _adopt_new(self) -> None:
        new = {key: one for key, one in self._new.items() if not one.reference.expired()}
        if not new:
            return
        for address, (path, tensor) in self._storages(self._now()).items():
            if address not in new or address in self._written:
                continue
            _, copy, version = new[address]
            self._written[address] = _Written(
                path,
                tensor,
                tensor.untyped_storage(),
                copy,
                version,
                "new" if copy is None else "device",
            )

    def rewind(self) -> None:
        for written in self._written.values():
            if written.is_small and not self._is_from_first_use(written):
                written.put_back()

    def _is_from_first_use(self, written: _Written) -> bool:
        if len(written.runs) == 1 and self.has_made:
            return True
        if not self._keeps_first_use or not written.runs:
            return False
        flags = self._kept_in_containers()
        return all(self._changed[number] & flags for number in written.runs)

    def _kept_in_containers(self) -> set[str]:
        """Paths that are not put back, and that not every run changes."""
        found = set[str]()
        for path, change in self.last.items():
            is_steady = self._runs[path] == self._count
            if not is_steady and not self.before.is_attribute(change):
                found.add(path)
        return found - self._captured - self._of_context

    def _made_on_first_use(self) -> set[str]:
        """Paths that one run ahead of the captures changed."""
        if not self._keeps_first_use:
            return set()
        once = {path for path, runs in self._runs.items() if runs == 1}
        return once - self._captured - self._of_context

    @property
    def has_made(self) -> bool:
        return bool(self._made_on_first_use())

    @property
    def leaves_python(self) -> bool:
        """Whether ``restore`` leaves some changes of Python though no graph stays."""
        return not all(map(self._may_undo, self.last.values()))

    def _may_undo(self, change: Change) -> bool:
        """Dicts lose what runs put in, but only if no graph stays."""
        return change.was is ABSENT or self.before.is_attribute(change)

    def made_of(
        self,
        computed: Mapping[int, StorageWeakRef],
    ) -> list[str]:
        """Paths on these storages that were made on first use."""
        found = list[str]()
        if not self.has_made:
            return found
        for address, (path, tensor) in self._storages(self._now()).items():
            written = self._written.get(address)
            if written is not None and not self._is_from_first_use(written):
                continue
            if storage_id(tensor) in computed:
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

    @property
    def written(self) -> list[tuple[str, torch.Tensor]]:
        return [(written.path, written.tensor) for written in self._written.values()]

    @property
    def unwritten_by_captures(self) -> set[str]:
        """Paths that no capture wrote."""
        return {written.path for written in self._written.values() if not written.captures}

    def count_as_run(
        self,
        changed: Iterable[str],
    ) -> None:
        """Paths that a capture changed, and its replay computed."""
        self._captured.difference_update(changed)

    def forget_captures(self) -> None:
        """Say that no graph stays: ``restore`` undoes all."""
        self._keeps_first_use = False

    def copied(
        self,
        where: Outcome = "device",
    ) -> int:
        """In bytes."""
        nbytes = 0
        for written in self._written.values():
            if written.copy is not None and written.kept == where:
                nbytes += written.copy.nbytes()
        return nbytes

    def restore(
        self,
        *,
        between_keys: bool = False,
    ) -> None:
        """Undo changes; between keys, large storages wait. The device is idle."""
        if self._count < 2:  # no second run tells first use apart
            self.forget_captures()
        self.outcome.clear()
        for written in self._written.values():
            nbytes = written.storage.nbytes()
            if between_keys and nbytes > _SMALL:
                continue
            if self._is_from_first_use(written):
                self.outcome[written.path] = nbytes, "new"
                continue
            self.outcome[written.path] = nbytes, written.kept
            written.put_back()
        if between_keys and not self.last:
            return
        made = self._made_on_first_use()
        may_undo = self.before.is_attribute if self._keeps_first_use else self._may_undo
        self.last = self.before.changes()
        for path, change in self.last.items():
            if path in made:
                nbytes = change.now.nbytes if is_tensor(change.now) else 0
                self.outcome[path] = nbytes, "new"
                continue
            self.volatile.add(path)
            if not may_undo(change):
                continue
            value = change.was
            if made and path not in self._captured | self._of_context:
                value = self._first.get(path, value)
            with suppress(LookupError, AttributeError, TypeError):
                _bind(change, value)
        if self.last:
            self.last = self.before.changes()

    def restore_python(
        self,
        ignore: Iterable[str],
    ) -> bool:
        """Undo changes of attributes; whether Python is then as it was."""
        for change in self.before.changes(ignore).values():
            if self.before.is_attribute(change):
                _bind(change, change.was)
        return not self.before.changes(ignore)

    def drop_copies(self) -> None:
        """An exception's frames may hold this object for long."""
        self._written.clear()


def _bind(
    change: Change,
    value: Any,
) -> None:
    assert change.where is not None
    container, key = change.where
    if value is ABSENT:
        del container[key]
    else:
        container[key] = value


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


def bytes_of(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def version_of(tensor: torch.Tensor) -> int | None:
    """Torch's count of writes; inference tensors have none."""
    return None if tensor.is_inference() else tensor._version
