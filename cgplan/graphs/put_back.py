"""PutBack: what runs ahead of a capture change of a model, and what it gets back.

Note [What is put back]
    What each run writes or binds (a counter, a KV cache, an attribute that is bound again) gets
    back what it was: tensors, and attributes of modules and objects. Of other containers of Python,
    such as a list that the user fills, nothing is. What one run ahead of the captures changed, and
    the others left alone, was made on first use: a table, a flag. The graph was captured with it,
    so it stays, and so does all else that this run bound. Where no capture succeeds, all is put
    back. A storage is copied before the first operator that writes to it: on its device up to a
    limit, then on the host up to a bound; what is larger still is named as not kept. Small storages
    hold their first values ahead of each run, so that positions do not run past a cache: on a GPU
    that ends the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cgplan.backends.host_sync import written_tensors
from cgplan.graphs.fingerprint import ABSENT, Change, Fingerprint, is_same, is_tensor, is_within

_HOST_COPIES = 1 << 30  # bytes that are copied to the host at most
_SMALL = 1 << 20  # bytes of a storage that is put back ahead of each run

Outcome = Literal["device", "host", "new", "not kept"]


@dataclass(slots=True)
class _Written:
    """A storage that an operator was about to write: its copy (None where it is too large), the
    tensor's version, the number of runs that wrote it, and of captures among them.
    """

    path: str
    tensor: torch.Tensor
    storage: torch.UntypedStorage
    copy: torch.UntypedStorage | None
    version: int | None
    kept: Outcome
    runs: int = 0
    captures: int = 0
    # by the last run, where it is small: versions do not tell all
    left: torch.UntypedStorage | None = None

    @property
    def is_small(self) -> bool:
        return self.copy is not None and self.storage.nbytes() == self.copy.nbytes() <= _SMALL

    def count_run(self, *, captures: bool) -> None:
        """Note whether the run that ends has written it."""
        version = _version_of(self.tensor)
        has_written = version != self.version
        if self.is_small:
            before = _bytes_of(self.left or self.copy)
            has_written |= not torch.equal(_bytes_of(self.storage).to(before.device), before)
            self.left = self.storage.clone()
        elif version is None:
            has_written = True
        self.runs += has_written
        self.captures += has_written and captures
        self.version = version


class PutBack:
    """Undoes what runs on padding change of a model; see Note [What is put back].

    Args:
        before: The model as it is.
        limit: Bytes of copies on the device.

    Attributes:
        outcome: After ``restore``, bytes by path, and whether the place was put back from a copy
            (on the ``device`` or the ``host``), was made on first use and stays (``new``), or was
            too large to be copied (``not kept``).
        volatile: Paths that each run binds again.
    """

    def __init__(self, before: Fingerprint, limit: int) -> None:
        self.before, self._limit = before, limit
        self.outcome: dict[str, tuple[int, Outcome]] = {}
        self.volatile = set[str]()
        self._written: dict[int, _Written] = {}
        self._fresh: dict[int, tuple[StorageWeakRef, torch.UntypedStorage | None, int | None]] = {}
        self._places = self._storages(before)
        self._last: dict[str, Change] = {}  # after the last run
        self._first = dict[str, Any]()  # what the first run that changed a path left there
        self._count = 0  # of runs
        self._runs = Counter[str]()  # that changed a path
        self._captured = set[str]()  # paths that a capture was the first to change
        self._made_stays = True
        self._in_context = set[str]()

    @staticmethod
    def _storages(state: Fingerprint) -> dict[int, tuple[str, torch.Tensor]]:
        found = dict[int, tuple[str, torch.Tensor]]()
        for place in state.places.values():
            with suppress(RuntimeError, NotImplementedError):
                if is_tensor(place.value):
                    found.setdefault(
                        place.value.untyped_storage().data_ptr(), (place.path, place.value)
                    )
        return found

    # --- runs -------------------------------------------------------------------------------------

    @contextmanager
    def run(
        self, *, captures: bool = False, enters_made: bool = False
    ) -> Iterator[dict[str, Change]]:
        """A block of one run of the forward. The dict gets what the run changed of Python, by path;
        with ``enters_made`` also inside of what earlier runs made.
        """
        found = dict[str, Change]()
        self.rewind()
        made = self._now() if enters_made and self.has_made else None
        try:
            yield found
        finally:
            now = self.before.changes()
            changed = _differing(self._last, now)
            self._adopt_fresh(changed)
            for written in self._written.values():
                written.count_run(captures=captures)
            self._count += 1
            self._runs.update(changed.keys())
            for path, change in changed.items():
                self._first.setdefault(path, change.now)
                if captures and self._runs[path] == 1:
                    self._captured.add(path)
            self._last = now
            found |= {
                path: change for path, change in changed.items() if path not in self._in_context
            }
            inside = {} if made is None else made.changes()
            found |= {path: change for path, change in inside.items() if path not in changed}

    @contextmanager
    def setting_context(self) -> Iterator[None]:
        """A block of an engine's code: what it binds is put back, and no graph relies on it."""
        yield
        now = self.before.changes()
        self._in_context |= _differing(self._last, now).keys()
        self._last = now

    def save_written(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Copy the model's storages that an operator is about to write, unless that was done."""
        for tensor in written_tensors(func, args, kwargs):
            try:
                storage = tensor.untyped_storage()
                address = storage.data_ptr()
            except (RuntimeError, NotImplementedError):
                continue
            if not address or address in self._written:
                continue
            if address in self._places:
                self._written[address] = self._saved(*self._places[address], storage)
            elif address not in self._fresh or self._fresh[address][0].expired():
                copy = storage.clone() if storage.nbytes() <= _SMALL else None
                self._fresh[address] = StorageWeakRef(storage), copy, _version_of(tensor)

    def _saved(self, path: str, tensor: torch.Tensor, storage: torch.UntypedStorage) -> _Written:
        nbytes, version = storage.nbytes(), _version_of(tensor)
        if self.copied("device") + nbytes <= self._limit:
            with suppress(torch.OutOfMemoryError):
                return _Written(path, tensor, storage, storage.clone(), version, "device")
        if storage.device.type != "cpu" and self.copied("host") + nbytes <= _HOST_COPIES:
            return _Written(path, tensor, storage, storage.cpu(), version, "host")
        return _Written(path, tensor, storage, None, version, "not kept")

    def _adopt_fresh(self, changed: Mapping[str, Change]) -> None:
        """Small tensors that the run made, and that the model holds now (a counter), have first
        values, too.
        """
        fresh, self._fresh = {key: f for key, f in self._fresh.items() if not f[0].expired()}, {}
        if not fresh or not changed:
            return
        for address, (path, tensor) in self._storages(self._now()).items():
            if address in fresh and address not in self._written:
                _, copy, version = fresh[address]
                kept: Outcome = "new" if copy is None else "device"
                self._written[address] = _Written(
                    path, tensor, tensor.untyped_storage(), copy, version, kept
                )

    def rewind(self) -> None:
        """Small tensors hold what they held before the first run, but for what was made on first
        use.
        """
        for written in self._written.values():
            if written.is_small and not self._is_made(written):
                assert written.copy is not None
                written.storage.copy_(written.copy)
                written.left = None

    def _is_made(self, written: _Written) -> bool:
        """Whether it was written on first use: by one run, which also bound something that
        stays.
        """
        return self._made_stays and written.runs == 1 and bool(self._made())

    def _made(self) -> set[str]:
        """Paths that one run ahead of the captures changed, and no other."""
        if not self._made_stays:
            return set()
        once = {path for path, runs in self._runs.items() if runs == 1}
        return once - self._captured - self._in_context

    @property
    def has_made(self) -> bool:
        """Whether the first run changed what later runs left alone."""
        return bool(self._made())

    @property
    def leaves_python(self) -> bool:
        """Whether runs changed of Python what ``restore`` leaves alone."""
        return not all(map(self.before.is_attribute, self._last.values()))

    def made_of(self, computed: Mapping[int, StorageWeakRef]) -> list[str]:
        """Paths of tensors on these storages that were made on first use and stay."""
        found = list[str]()
        for address, (path, tensor) in self._storages(self._now()).items() if self.has_made else ():
            written = self._written.get(address)
            is_made = written is None or self._is_made(written)
            if (
                is_made
                and tensor.layout is torch.strided
                and tensor.untyped_storage()._cdata in computed
            ):
                found.append(path)
        return found

    def gone(self, read: Mapping[str, torch.Tensor], changed: Mapping[str, Change]) -> list[str]:
        """Paths of tensors that were read and are no longer there, as a run bound others there, or
        above.
        """
        bound = {path for path, change in changed.items() if change.where is not None}
        found = [path for path in read if is_within(path, bound)]
        if not found:
            return []
        now = self._now()
        held = set(map(id, now.tensors))
        gone = list[str]()
        for path in found:
            place = now.places.get(path)
            stays = id(read[path]) in held if place is None else place.value is read[path]
            if not stays:
                gone.append(path)
        return gone

    def _now(self) -> Fingerprint:
        return Fingerprint.of(self.before.roots, self.before.device)

    @property
    def written(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that runs wrote, with their paths."""
        return [(written.path, written.tensor) for written in self._written.values()]

    @property
    def left_by_captures(self) -> set[str]:
        """Paths of tensors that runs wrote, and captures did not."""
        return {written.path for written in self._written.values() if not written.captures}

    # --- putting back -----------------------------------------------------------------------------

    def forget_captures(self) -> None:
        """Say that no graph stays, so ``restore`` undoes what was made on first use, too."""
        self._made_stays = False

    def copied(self, where: Outcome = "device") -> int:
        """Bytes of copies that are held now, on their own device or on the host."""
        return sum(
            w.copy.nbytes()
            for w in self._written.values()
            if w.copy is not None and w.kept == where
        )

    def restore(self, *, between_keys: bool = False) -> None:
        """Undo the changes. May be called again; the device is idle. ``between_keys``: large
        storages wait.
        """
        if self._count < 2:  # none left alone what it changed
            self._made_stays = False
        self.outcome.clear()  # a place that stayed after one key may be put back after the next
        for written in self._written.values():
            nbytes = written.storage.nbytes()
            if between_keys and nbytes > _SMALL:
                continue
            if self._is_made(written):
                self.outcome[written.path] = nbytes, "new"
                continue
            self.outcome[written.path] = nbytes, written.kept
            if written.copy is not None and nbytes == written.copy.nbytes():
                written.storage.copy_(written.copy)
                written.left = None
        if between_keys and not self._last:
            return  # the last run left Python as it was
        made = self._made()
        for path, change in self.before.changes().items():
            if path in made:
                self.outcome[path] = change.now.nbytes if is_tensor(change.now) else 0, "new"
                continue
            self.volatile.add(path)
            if not self.before.is_attribute(change):
                continue
            is_later = bool(made) and path not in self._captured | self._in_context
            with suppress(LookupError, AttributeError, TypeError):
                _bind(change, self._first.get(path, change.was) if is_later else change.was)
        self._last = self.before.changes()

    def restore_python(self, ignore: Iterable[str]) -> bool:
        """Undo what a run bound of attributes; whether it changed nothing else of Python, but what
        ``ignore`` names.
        """
        for change in self.before.changes(ignore).values():
            if self.before.is_attribute(change):
                _bind(change, change.was)
        return not self.before.changes(ignore)

    def drop_copies(self) -> None:
        """Free the copies at once: frames that an exception in a library keeps may hold this record
        for long.
        """
        self._written.clear()


def _bind(change: Change, value: Any) -> None:
    """Bind a value where the change is."""
    assert change.where is not None
    container, key = change.where
    if value is ABSENT:
        del container[key]
    else:
        container[key] = value


def _differing(before: Mapping[str, Change], now: Mapping[str, Change]) -> dict[str, Change]:
    """Changes of ``now`` that are none, or others, in ``before``; and paths that are as at first
    again.
    """
    found = dict[str, Change]()
    for path, change in now.items():
        if path not in before:
            found[path] = change
        elif not is_same(before[path].now, change.now):
            found[path] = replace(change, was=before[path].now)
    for path, change in before.items():
        if path not in now:
            found[path] = replace(change, was=change.now, now=change.was)
    return found


def _bytes_of(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
