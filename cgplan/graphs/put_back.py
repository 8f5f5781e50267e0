"""What runs ahead of a capture change of a model, and what it gets back.

Note [What is put back]
    Tensors and attributes that each run of a key changes; dicts, lists and sets lose what they got
    if no graph stays. What first runs of keys alone change was made on first use, of the model or
    of a size, and stays with its flags, seen or not, as captures rely on it; new attributes that
    each run changes keep what the first run left. If no graph stays, all Python is undone that can
    be, with tensors that its runs wrote. What a failed run changed is undone at its end.
    Small storages are rewound before each run, as positions must not run past a cache, until a run
    of a key does not write them again.
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


class _Unowned(NamedTuple):
    """Written, and on no path of the model yet."""

    reference: StorageWeakRef
    copy: torch.UntypedStorage | None
    version: int | None


class _Run(NamedTuple):
    """``key``: an object of its own after a failure; ``is_later``: it has run before."""

    number: int
    key: object
    is_later: bool
    captures: bool


@dataclass(slots=True)
class _Uses:
    """The runs that changed something; see Note [What is put back].

    Attributes:
        runs: With versions written, if it is a tensor.
        by_later_run: Not each was its key's first one.
        repeated: Two runs of a key did.
        stopped: A later run of such a key did not.
    """

    runs: dict[int, int] = field(default_factory=dict)
    by_later_run: bool = False
    repeated: bool = False
    stopped: bool = False
    _keys: set[object] = field(default_factory=set)

    def count(
        self,
        run: _Run,
        versions: int = 0,
    ) -> None:
        self.by_later_run |= run.is_later
        self.repeated |= run.key in self._keys
        self.runs[run.number] = versions
        self._keys.add(run.key)

    def miss(self, run: _Run) -> None:
        self.stopped |= run.key in self._keys


@dataclass(slots=True)
class Written:
    """A storage.

    Attributes:
        is_captured: A capture did.
        is_filled_again: A run changed what another one computed.
        now: Its bytes, if small: kernels may write without a version.
        after_first: Those that its first run computed.
    """

    path: str
    tensor: torch.Tensor
    storage: torch.UntypedStorage
    copy: torch.UntypedStorage | None
    version: int | None
    outcome: Outcome
    uses: _Uses = field(default_factory=_Uses)
    is_captured: bool = False
    is_filled_again: bool = False
    now: torch.UntypedStorage | None = None
    after_first: torch.UntypedStorage | None = None

    @property
    def is_small(self) -> bool:
        return self.copy is not None and self.storage.nbytes() <= _SMALL

    def count_run(
        self,
        run: _Run,
    ) -> None:
        version = version_of(self.tensor)
        has_written = version != self.version
        uses = self.uses
        if self.is_small:
            now = bytes_of(self.storage)
            before = bytes_of(self.now or self.copy).to(now.device)
            is_changed = not torch.equal(now, before)
            has_written |= is_changed
            if is_changed:
                original = bytes_of(self.copy).to(now.device)
                fills_again = bool(uses.runs)
                if now.shape == before.shape == original.shape:
                    is_kept = (before == original) | (now == before)
                    fills_again = not is_kept.all()
                self.is_filled_again |= fills_again
            self.now = self.storage.clone()
            if is_changed and not uses.runs and not run.captures:
                self.after_first = self.now
        elif version is None:
            has_written = True
        if has_written:
            uses.count(run, (version or 0) - (self.version or 0))
            self.is_captured |= run.captures
        elif not run.captures or all(uses.runs.values()):  # else writes of captures do not show
            had_stopped = uses.stopped
            uses.miss(run)
            if uses.stopped and not had_stopped and len(uses.runs) == 1:
                self.put_back(self.after_first)
        self.version = version

    def put_back(
        self,
        copy: torch.UntypedStorage | None,
    ) -> None:
        if copy is not None and self.storage.nbytes() == copy.nbytes():
            self.storage.copy_(copy)
            self.now = copy


@dataclass(slots=True)
class _PathChanges:
    """Of Python.

    Attributes:
        first: What the first run left there.
        is_captured: That one was a capture.
        is_tried: A later run began without the change.
    """

    first: Any
    is_captured: bool
    uses: _Uses = field(default_factory=_Uses)
    is_tried: bool = False


class PutBack:
    """Undoes what runs on padding change of a model; see Note [What is put back].

    Args:
        limit: Bytes of copies on the device.

    Attributes:
        outcome: Bytes and kind of copy by path; ``new``: made on first use.
        volatile: Paths that runs bind, but on first use.
        last: Changes of Python after the last run.
        newly_written: Paths of tensors that the last run wrote, and another one did not.
        written: By address.
        keeps_first_use: A graph relies on it.
        keeps_containers: Likewise.
        computed: Storages of inputs' values by id, as looks saw them.
        value_read: Where the host first needed a value of inputs.
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
        self._runs = 0
        self._whole_runs = list[object]()  # keys
        self.computed: dict[int, StorageWeakRef] = {}
        self.value_read: str | None = None
        self.copied = Counter[Outcome]()  # bytes
        self.keeps_first_use = True
        self.keeps_containers = True
        self._growing = set[int]()  # ids of dicts and lists that later runs add to
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
        # the bytes may belong to Python that one run left
        may_be_first = self._runs == 1 and bool(self.last)
        for written in self.written.values():
            if written.is_small and not may_be_first and not self._is_first_use(written.uses):
                written.put_back(written.copy)
        held = self._now() if enters_made and self.last else None
        versions = self._versions()
        for path, known in self._paths.items():
            known.is_tried |= path not in self.last
        is_whole = False
        try:
            yield found
            is_whole = True
        finally:
            now = self.before.changes()
            if not is_whole:
                self._undo_failed(_differing(self.last, now), captures=captures)
                now = self.before.changes()
            changed = _differing(self.last, now)
            if changed:
                self._adopt_unowned()
            self._unowned.clear()
            self._note_newly_written(versions)
            key = self.key if is_whole else object()
            run = _Run(
                self._runs,
                key,
                key in self._whole_runs,
                captures,
            )
            self._runs += 1
            if is_whole:
                self._whole_runs.append(key)
            for path, change in changed.items():
                if path not in self._of_engine:
                    found[path] = change
            self._count(run, found)
            self.last = now
            if held is not None:
                for path, change in held.changes().items():
                    if path not in changed:
                        found[path] = change

    def _undo_failed(
        self,
        changed: Mapping[str, Change],
        *,
        captures: bool,
    ) -> None:
        """Python that a failed run left half done is no first use."""
        for change in changed.values():
            is_attribute = self.before.is_attribute(change)
            if is_attribute or (change.where is not None and not captures):
                change.bind(change.was)

    def _count(
        self,
        run: _Run,
        changed: Mapping[str, Change],
    ) -> None:
        with torch._C.DisableTorchFunction():
            for written in self.written.values():
                written.count_run(run)
                runs = written.uses.runs
                if run.number in runs and len(runs) < self._runs:
                    self.newly_written.append(written.path)
        for path, change in changed.items():
            if path not in self._paths:
                # what a capture left lies in the pool
                first = ABSENT if run.captures else change.now
                self._paths[path] = _PathChanges(first, run.captures)
                grows = change.was is ABSENT and not self.before.is_attribute(change)
                if run.is_later and grows and change.where:
                    self._growing.add(id(change.where[0]))
        for path, known in self._paths.items():
            if path in changed:
                known.uses.count(run)
            else:
                known.uses.miss(run)

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
            if address in self._small_state:
                self.written.setdefault(address, self._small_state[address])
            if address not in self.written:
                self.newly_written.append(place.path)

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
        """Paths of Python that stay, as they were made on first use."""
        first = dict[str, set[int]]()
        lasting = set[int]()  # runs
        for path, known in self._paths.items():
            if known.is_captured or not self._is_first_use(known.uses):
                continue
            runs = set(known.uses.runs)
            change = self.last.get(path)
            if change is not None:
                container, _ = change.where or (None, None)
                if id(container) in self._growing:
                    continue
                if container is None:
                    lasting |= runs
            first[path] = runs
        if self.keeps_first_use:
            lasting.update(*first.values())
        elif self._is_of_inputs:
            lasting.clear()
        return {path for path, runs in first.items() if runs <= lasting}

    @property
    def _is_of_inputs(self) -> bool:
        """Whether looks saw state computed from inputs, which are padding or an example."""
        if self.value_read is not None:
            return True
        return not all(reference.expired() for reference in self.computed.values())

    def _is_first_use(
        self,
        uses: _Uses,
    ) -> bool:
        """Whether they were first runs of their keys alone, or several and then no more, as far as
        runs tell.
        """
        if uses.by_later_run:
            return uses.repeated and uses.stopped
        return uses.stopped or 0 < len(uses.runs) < len(self._whole_runs)

    def is_steady(
        self,
        path: str,
    ) -> bool:
        """Whether each run changed it."""
        known = self._paths.get(path)
        return known is not None and len(known.uses.runs) == self._runs

    @property
    def prepared(self) -> list[str]:
        """Paths of tensors that first use wrote, and later runs write, too, or fill again: nothing
        holds what they were in between.
        """
        of_first_use = set[int]()
        for path in self.made:
            of_first_use |= self._paths[path].uses.runs.keys()
        steady = set(filter(self.is_steady, self._paths))
        found = list[str]()
        for written in self.written.values():
            if is_within(written.path, steady):  # each run binds another tensor
                continue
            uses = written.uses
            first = later = -1  # none
            for number, versions in uses.runs.items():
                if number in of_first_use:
                    first = max(first, versions)
                else:
                    later = max(later, versions)
            is_irregular = uses.stopped and (uses.repeated or written.is_filled_again)
            is_lost = False
            if uses.runs and later < 0:  # its flag stays
                is_lost = not self._is_first_use(uses)
            if is_irregular or is_lost or first > later >= 0:
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
        keeps = self.keeps_first_use and self.keeps_containers
        return change.where is not None and not keeps

    @property
    def made_of_inputs(self) -> list[str]:
        """Paths of tensors that were made on first use of what looks saw computed."""
        found = list[str]()
        made = self.made
        state = self._storages(self._now()) if made else self._state_at
        for address, (path, tensor) in state.items():
            reference = self.computed.get(storage_id(tensor))
            if reference is None or reference.expired():
                continue
            is_first = is_within(path, made)
            if address in self.written:
                is_first = self._is_first_use(self.written[address].uses)
            if is_first:
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
                written.after_first = written.now = written.storage.clone()

    def restore(
        self,
        *,
        between_keys: bool = False,
    ) -> None:
        """Undo changes; between keys, large storages wait. The device is idle."""
        if self._runs < 2 and not between_keys:  # no second run tells first use apart
            self.keeps_first_use = False
        made = self.made
        if not between_keys:
            self.last = self.before.changes()
        self.outcome.clear()
        kept = self._kept(made)
        for address, written in self.written.items():
            nbytes = written.storage.nbytes()
            if between_keys and (nbytes > _SMALL or self._is_first_use(written.uses)):
                continue
            stays = address in kept
            if not stays:
                written.put_back(written.copy)
            self.outcome[written.path] = nbytes, "new" if stays else written.outcome
        if between_keys and not self.last:
            return
        for path, change in self.last.items():
            if path not in made:
                self.volatile.add(path)
                self._undo(path, change, keeps_new=bool(made))
                continue
            nbytes = change.now.nbytes if is_tensor(change.now) else 0
            self.outcome[path] = nbytes, "new"
            if len(self._paths[path].uses.runs) > 1:  # bound for each size
                self.volatile.add(path)
        if self.last:
            self.last = self.before.changes()

    def _undo(
        self,
        path: str,
        change: Change,
        *,
        keeps_new: bool,
    ) -> None:
        """Where first use made something, new attributes keep what the first run left."""
        if not self.may_undo(path):
            return
        known = self._paths.get(path)
        value = change.was
        is_new = value is ABSENT and self.before.is_attribute(change)
        if keeps_new and is_new and known is not None:
            value = known.first  # ABSENT, if a capture left it
        change.bind(value)

    def _kept(
        self,
        made: set[str],
    ) -> set[int]:
        """Addresses of what first use wrote, but with Python that is undone."""
        of_made = set[int]()  # runs
        of_undone = set[int]()
        untried = set[int]()
        for path, known in self._paths.items():
            runs = known.uses.runs.keys()
            if path in made or not self.may_undo(path):
                if self._is_first_use(known.uses):
                    of_made |= runs
                continue
            of_undone |= runs
            if not known.is_tried:
                untried |= runs
        kept = set[int]()
        for address, written in self.written.items():
            uses = written.uses
            stays = self._is_first_use(uses)
            if not uses.runs.keys() <= of_made:
                flags = of_undone if uses.repeated else untried
                stays = uses.stopped and flags.isdisjoint(uses.runs)
            if stays:
                kept.add(address)
        return kept

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
