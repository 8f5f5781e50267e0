"""The storages of a model that runs write, and copies of them from before."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cgplan.backends import GraphBackend
from cgplan.backends.host_sync import (
    Args,
    DispatchMode,
    Kwargs,
    storage_id,
    written_tensors,
)
from cgplan.config import CompilationConfig
from cgplan.graphs.fingerprint import Fingerprint, Place

_HOST_COPIES = 1 << 30  # bytes
_SMALL = 1 << 20  # bytes

Outcome = Literal["device", "host", "new", "not kept"]


class Run(NamedTuple):
    """A run of the forward.

    Attributes:
        key: An object of its own after a failure.
        is_later: The key has run before.
        ran_python: It did not fail, and was no replay.
        computes: False: a capture that only records.
    """

    number: int
    key: object
    is_later: bool
    ran_python: bool
    captures: bool
    computes: bool


@dataclass
class Uses:
    """The runs that changed one place.

    Attributes:
        runs: By number: how many versions of a tensor it wrote.
        by_later_run: One was not its key's first.
        repeated: Two runs of a key did.
        skipped: Some run did not.
        stopped: A later run of a key that changed it did not.
        ways: The operator by which watched runs wrote it first, and whether unread.
    """

    runs: dict[int, int] = field(default_factory=dict)
    by_later_run: bool = False
    repeated: bool = False
    skipped: bool = False
    stopped: bool = False
    ways: dict[int, object] = field(default_factory=dict)
    _keys: set[object] = field(default_factory=set)

    def count(
        self,
        run: Run,
        versions: int = 0,
    ) -> None:
        self.skipped |= not self.runs and run.number > 0
        self.by_later_run |= run.is_later
        self.repeated |= run.key in self._keys
        self.runs[run.number] = versions
        self._keys.add(run.key)

    def miss(
        self,
        run: Run,
        *,
        is_sure: bool = True,
    ) -> None:
        if run.ran_python:
            self.skipped = True
            self.stopped |= is_sure and run.key in self._keys

    @property
    def is_first_use(self) -> bool:
        """Whether only first runs of keys changed it, or several of a key did, and then no more."""
        if self.by_later_run:
            return self.repeated and self.stopped
        return bool(self.runs) and self.skipped


class _Unowned(NamedTuple):
    """Written, and on no path of the model yet."""

    reference: StorageWeakRef
    copy: torch.UntypedStorage | None
    version: int | None


@dataclass
class Written:
    """A storage.

    Attributes:
        shows: A run changed its bytes or its version.
        is_captured: A capture did.
        is_filled_again: A run changed what another one computed.
        now: Its bytes, if small: kernels may write without a version.
        after_first: Those that its first run computed.
        seen: Whether the last watched run of a key wrote it, if it has no version.
    """

    path: str
    tensor: torch.Tensor
    storage: torch.UntypedStorage
    copy: torch.UntypedStorage | None
    version: int | None
    outcome: Outcome
    uses: Uses = field(default_factory=Uses)
    shows: bool = False
    is_captured: bool = False
    is_filled_again: bool = False
    now: torch.UntypedStorage | None = None
    after_first: torch.UntypedStorage | None = None
    seen: dict[object, bool] = field(default_factory=dict)

    @property
    def is_small(self) -> bool:
        return self.copy is not None and self.storage.nbytes() <= _SMALL

    def count_run(
        self,
        run: Run,
        *,
        is_seen: bool | None,
    ) -> None:
        """``is_seen``: an operator wrote it, perhaps what was there; None: unwatched."""
        uses = self.uses
        version = version_of(self.tensor)
        versions = (version or 0) - (self.version or 0)
        self.version = version
        has_written = versions != 0
        if self.is_small:
            has_written |= self._compare_bytes(run)
        elif version is None:
            if is_seen is not None:
                self.seen[run.key] = is_seen
            default = not self.seen or any(self.seen.values())
            has_written = self.seen.get(run.key, default)
        self.shows |= has_written
        if has_written or is_seen:
            uses.count(run, versions)
            self.is_captured |= run.captures
            return
        is_sure = self.shows
        if not run.computes:  # a write shows by its version alone
            is_sure = all(uses.runs.values())
        uses.miss(run, is_sure=is_sure)
        self.give_back()

    def _compare_bytes(
        self,
        run: Run,
    ) -> bool:
        """Whether they are others than after the run before."""
        now = bytes_of(self.storage)
        before = bytes_of(self.now or self.copy).to(now.device)
        is_changed = not torch.equal(now, before)
        self.now = self.storage.clone()
        if is_changed:
            original = bytes_of(self.copy).to(now.device)
            fills_again = bool(self.uses.runs)
            if now.shape == before.shape == original.shape:
                is_first_change = (before == original) | (now == before)
                fills_again = not is_first_change.all()
            self.is_filled_again |= fills_again
            if not self.uses.runs and not run.captures:
                self.after_first = self.now
        return is_changed

    def give_back(self) -> None:
        """A rewind took what its single run computed."""
        if self.uses.stopped and len(self.uses.runs) == 1:
            self.fill(self.after_first)

    def fill(
        self,
        copy: torch.UntypedStorage | None,
    ) -> None:
        if copy is not None and self.storage.nbytes() == copy.nbytes():
            self.storage.copy_(copy)
            self.now = copy


class WrittenStorages:
    """See Note [What is put back] in put_back.py.

    Args:
        limit: Bytes of copies on the device.

    Attributes:
        copied: Bytes by kind of copy.
        watched: Of this run, if its operators were seen: the first one that wrote each storage, by
            id; ids of those overwritten unread.
        newly_written: Paths of tensors that the last run wrote, and another one did not.
        unsure: Keys whose first run wrote what others did not, and no version shows it.
        lost: Paths of tensors that were copied only after a run had written them.
    """

    def __init__(
        self,
        before: Fingerprint,
        limit: int,
    ) -> None:
        self._limit = limit
        self.written: dict[int, Written] = {}
        self.copied = Counter[Outcome]()
        self.newly_written: list[str] = []
        self.unsure = set[object]()
        self.lost: list[str] = []
        self._unowned: dict[int, _Unowned] = {}
        self.watched: tuple[dict[int, str], set[int]] | None = None
        self.of_model = by_address(before)
        self._versioned = list[Place]()
        self._versions = list[int]()  # ahead of the run
        for place in before.of_tensors:
            if place.value.layout is torch.strided and version_of(place.value) is not None:
                self._versioned.append(place)
        self._copies: dict[int, Written] = {}  # ahead of writes that no look saw
        for address, (path, tensor) in self.of_model.items():
            storage = tensor.untyped_storage()
            if type(tensor) is torch.nn.Parameter or not storage.nbytes():
                continue
            if limit and storage.nbytes() <= _SMALL:
                self._copies[address] = self._copied(
                    path,
                    tensor,
                    storage,
                )

    def save(
        self,
        written: Iterable[torch.Tensor],
        *,
        adopts: bool = True,
    ) -> None:
        """Ahead of an operator that writes them. ``adopts``: also what the model may hold at the
        run's end; a later run's new tensors would seem first use.
        """
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
            if address in self.of_model:
                copied = self._copies.get(address)
                copied = copied or self._copied(*self.of_model[address], storage)
                self.written[address] = copied
                continue
            if not adopts:
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
        copy = None
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

    def begin_run(self) -> None:
        with torch._C.DisableTorchFunction():
            self._versions = [place.value._version for place in self._versioned]
        for known in (*self._copies.values(), *self.written.values()):
            known.version = version_of(known.tensor)  # an engine may have written it

    def rewind(self) -> None:
        """Small ones, except those of first use."""
        for written in self.written.values():
            if written.is_small and not written.uses.is_first_use:
                written.fill(written.copy)

    @property
    def uncopied(self) -> set[int]:
        """Ids of the model's storages that no run has written."""
        found = set()
        for address, (_, tensor) in self.of_model.items():
            if address not in self.written:
                found.add(storage_id(tensor))
        return found

    def adopt(
        self,
        state: Callable[[], Fingerprint],
    ) -> None:
        """Storages that the run bound in the model."""
        if not self._unowned:
            return
        for address, (path, tensor) in by_address(state()).items():
            known = self._unowned.get(address)
            if known is None or known.reference.expired() or address in self.written:
                continue
            _, copy, version = known
            if copy is not None:
                copied = self.copied["device"] + copy.nbytes()
                if copied <= self._limit:
                    self.copied["device"] = copied
                else:
                    copy = None
            self.written[address] = Written(
                path,
                tensor,
                tensor.untyped_storage(),
                copy,
                version,
                "new" if copy is None else "device",
            )

    def count_run(
        self,
        run: Run,
    ) -> None:
        self.newly_written = []
        with torch._C.DisableTorchFunction():
            for place, version in zip(self._versioned, self._versions, strict=True):
                if place.value._version == version:
                    continue
                storage = place.value.untyped_storage()
                address = storage.data_ptr()
                if address in self.written:
                    continue
                written = self._copies.get(address)
                if written is None:
                    written = self._copied(place.path, place.value, storage)
                    written.version = version
                    # without a copy the report says "not kept"
                    if run.computes and written.copy is not None:
                        self.lost.append(place.path)
                self.written[address] = written
            for written in self.written.values():
                is_seen = None
                if self.watched is not None:
                    seen, overwritten = self.watched
                    storage = written.storage._cdata
                    is_seen = storage in seen
                    if is_seen:
                        written.uses.ways[run.number] = seen[storage], storage in overwritten
                written.count_run(run, is_seen=is_seen)
                if run.number in written.uses.runs and written.uses.skipped:
                    self.newly_written.append(written.path)
                    if is_seen and not (run.is_later or written.uses.runs[run.number]):
                        self.unsure.add(run.key)
        self._unowned.clear()
        self.watched = None

    def clear(self) -> None:
        """Drop copies: an exception's frames may hold this object for long."""
        self.written.clear()
        self._copies.clear()
        self.copied.clear()


class WritesOfEngine(DispatchMode):
    """Copies memory of the model ahead of what an engine's code writes there.

    Args:
        limit: Bytes of copies.

    Attributes:
        guarded: Ids of storages.
    """

    def __init__(
        self,
        limit: int,
        guarded: Collection[int] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = limit
        self.guarded = guarded
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def see(
        self,
        func: Any,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        for tensor in written_tensors(func, args, kwargs):
            number = storage_id(tensor)
            if number not in self.guarded or number in self._copies:
                continue
            storage = tensor.untyped_storage()
            nbytes = storage.nbytes()
            if nbytes <= self._left:
                self._left -= nbytes
                self._copies[number] = storage, storage.clone()
        return func(*args, **kwargs)

    def put_back(self, filled: Collection[int] = ()) -> None:
        """``filled``: ids of storages that stay."""
        for number, (storage, copy) in self._copies.items():
            if number not in filled:
                storage.copy_(copy)
        self._copies.clear()


def by_address(state: Fingerprint) -> dict[int, tuple[str, torch.Tensor]]:
    found = dict[int, tuple[str, torch.Tensor]]()
    for place in state.of_tensors:
        with suppress(RuntimeError, NotImplementedError):
            address = place.value.untyped_storage().data_ptr()
            found.setdefault(address, (place.path, place.value))
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
    """Torch's count of writes; inference tensors have none, and empty ones nothing to write."""
    # the storage of an empty view may be written
    is_empty = not tensor.numel() and not tensor.untyped_storage().nbytes()
    return None if tensor.is_inference() or is_empty else tensor._version
