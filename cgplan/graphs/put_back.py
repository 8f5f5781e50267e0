"""What runs ahead of a capture change of a model, and what it gets back.

Note [What is put back]
    First use is what first runs of keys change and later ones do not: tables, their flags, and what
    a run with such flags was seen to write, though no byte shows it.

    changed                   a graph stays           none stays
    by each run, or by a      back                    back
      later one
      entries of containers   stay                    back
      attributes, before      as the first run left   back
      absent or None          them, where anything
                              is first use
    on first use              stays                   back, or stays with what cannot be undone,
                                                      unless looks saw state computed from inputs
      tensor, flags unseen    stays                   stays
    on first use and by each  refused                 back
      run, in another way
    by several runs of a key, as first use;           as first use
      then by no more         tensors are refused
    by a failed run           Python back at its end, tensors as above

    A tensor goes back with Python that may count its writes or, if no graph stays, flag them. Else
    what each run changes, and may be a flag, stays as the first run left it, with the tensor.
    Where `Calls.warm_up` finds an eager kind, first use stays bound, but other flags and containers
    go back. Where runs led on through states of an argument, none stays.
    Small tensors go back ahead of each run, too, as positions must not run past a cache.
"""

from collections.abc import Iterator, KeysView, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cgplan.backends.host_sync import storage_id
from cgplan.graphs.fingerprint import (
    ABSENT,
    Change,
    Fingerprint,
    is_same,
    is_tensor,
    is_within,
)
from cgplan.graphs.walk import PLAIN
from cgplan.graphs.written import (
    Outcome,
    Run,
    Uses,
    WritesOfEngine,
    WrittenStorages,
    by_address,
    version_of,
)
from cgplan.modes import Key


@dataclass
class _Bound:
    """A place of Python that runs changed.

    Attributes:
        first: What the first run left there.
        is_captured: That one was a capture.
        began_with: Runs that began with the change.
    """

    first: Any
    is_captured: bool
    uses: Uses = field(default_factory=Uses)
    began_with: set[int] = field(default_factory=set)

    def may_flag(
        self,
        of_tensor: Set[int],
    ) -> bool:
        """Whether every run that made the change afresh wrote the tensor."""
        return self.uses.runs.keys() - self.began_with <= of_tensor


class PutBack:
    """Undoes what runs on padding change of a model; see Note [What is put back].

    Attributes:
        outcome: Bytes and kind of copy by path; ``new``: made on first use.
        volatile: Paths that runs bind; of first use, those bound for several sizes.
        last: Changes of Python after the last run.
        held: Tensors of first use that the graph of a key may read, though another key replaces
            them; None: what was there before, which graphs of earlier rehearsals may read.
        captured: Keys whose capture did not fail.
        keeps_first_use, keeps_containers: A graph (after `Calls.warm_up` a call) relies on them.
        computed: Storages computed from inputs, by id, as looks saw.
        values_read: Where the host first needed a value of inputs, by key.
    """

    def __init__(
        self,
        before: Fingerprint,
        limit: int,
    ) -> None:
        self.before = before
        self.storages = WrittenStorages(
            before,
            limit,
        )
        self.outcome: dict[str, tuple[int, Outcome]] = {}
        self.volatile = set[str]()
        self.last: dict[str, Change] = {}
        self.held: dict[Key | None, list[torch.Tensor]] = {}
        self._bound = dict[str, _Bound]()
        self._of_engine = set[str]()  # paths
        self._writes_of_engine = WritesOfEngine(limit)
        self.key: Key | None = None  # of the next run
        self._runs = list[object]()  # keys
        self.captured = set[object]()
        self.computed: dict[int, StorageWeakRef] = {}
        self.values_read: dict[object, str] = {}
        self.keeps_first_use = True
        self.keeps_containers = True
        self._flags = set[str]()  # paths: of tensors that stay
        self._growing = set[int]()  # ids of dicts that later runs add to: no first use

    # --- what runs change -------------------------------------------------------------------------

    @contextmanager
    def run(
        self,
        *,
        captures: bool = False,
        computes: bool = True,
        replays: bool = False,
        enters_made: bool = False,
    ) -> Iterator[dict[str, Change]]:
        """A block of one run, whose end fills the dict with the changes of Python; with
        ``enters_made`` also those inside what earlier runs made, which do not go back.
        ``replays``: it runs no Python.
        """
        found = dict[str, Change]()
        # no run, and no tape that records one, may pass the end of a cache; but one run tells no
        # first use: until the next one its flags and bytes stay together
        if len(self._runs) != 1 or not self._bound:
            self.storages.rewind()
        self.storages.begin_run()
        inside = self._now() if enters_made and self.last else None
        is_whole = False
        try:
            yield found
            is_whole = True
        finally:
            now = self.before.changes()
            if not is_whole:
                for change in _differing(self.last, now).values():
                    if change.where:
                        change.bind(change.was)
                now = self.before.changes()
            changed = _differing(self.last, now)
            key = self.key if is_whole else object()
            number = len(self._runs)
            run = Run(
                number=number,
                key=key,
                is_later=key in self._runs,
                ran_python=is_whole and not replays,
                captures=captures,
                computes=computes,
            )
            self._runs.append(key)
            if changed:
                self.storages.adopt(self._now)
            self.storages.count_run(run)
            for path, change in changed.items():
                if path not in self._of_engine:
                    found[path] = change
            self._count(run, found)
            self.last = now
            if inside:
                for path, change in inside.changes().items():
                    if path not in changed:
                        found[path] = change

    def _count(
        self,
        run: Run,
        changed: Mapping[str, Change],
    ) -> None:
        if run.captures and run.ran_python:
            self.captured.add(run.key)
        for path, change in changed.items():
            if path in self._bound:
                continue
            # what a capture left lies in the pool
            first = ABSENT if run.captures else change.now
            self._bound[path] = _Bound(first, run.captures)
            grows = change.was is ABSENT and not self.before.is_attribute(change)
            if run.is_later and grows and change.where:
                self._growing.add(id(change.where[0]))
        for path, known in self._bound.items():
            if path in self.last:
                known.began_with.add(run.number)
            if path in changed:
                known.uses.count(run)
            else:
                known.uses.miss(run)

    def hold_made(self) -> list[str]:
        """Ahead of a capture. Returns paths of tensors."""
        now = {}
        was = {}
        for path in self.perhaps_made & self.last.keys():
            change = self.last[path]
            now[path] = change.now
            was[path] = change.was
        if not now:
            return []
        for key, roots in ((self.key, now), (None, was)):
            reached = Fingerprint.of(
                roots,
                self.before.device,
            )
            self.held[key] = reached.tensors
        return [path for path, value in now.items() if is_tensor(value)]

    @contextmanager
    def setting_context(self) -> Iterator[None]:
        """Around an engine's code: what it binds or writes is put back."""
        self._writes_of_engine.guarded = self.storages.uncopied  # else an older copy goes back
        with self._writes_of_engine:
            yield
        now = self.before.changes()
        for path in _differing(self.last, now):
            self._of_engine.add(path)
            self._bound.pop(path, None)
        self.last = now

    def count_as_run(self) -> None:
        """The last capture, whose replay computed what it left."""
        for path, known in self._bound.items():
            if known.is_captured and path in self.last:
                known.first = self.last[path].now
                known.is_captured = False
        for written in self.storages.written.values():
            written.version = version_of(written.tensor)
            written.is_captured = False  # all graphs go
            if written.is_small and written.path in self.storages.newly_written:
                written.after_first = written.now = written.storage.clone()

    def _now(self) -> Fingerprint:
        return Fingerprint.of(self.before.roots, self.before.device)

    def rebound(
        self,
        read: Mapping[str, torch.Tensor],
        changed: Mapping[str, Change],
    ) -> list[str]:
        """Paths of read tensors that a run exchanged."""
        bound = {path for path, change in changed.items() if change.where}
        within = [path for path in read if is_within(path, bound)]
        found = list[str]()
        if not within:
            return found
        now = self._now()
        held = set(map(id, now.tensors))
        for path in within:
            place = now.places.get(path)
            stays = id(read[path]) in held
            if place:
                stays = place.value is read[path]
            if not stays:
                found.append(path)
        return found

    def is_steady(
        self,
        path: str,
    ) -> bool:
        """Whether each run that ended changed it."""
        known = self._bound.get(path)
        return known is not None and not known.uses.skipped

    # --- what becomes of it -----------------------------------------------------------------------

    @property
    def made(self) -> dict[str, Uses]:
        """Changes of Python that stay, by path: those of first use."""
        found = {}
        lasting = set[int]()  # runs that cannot be undone
        is_of_inputs = bool(self.values_read)  # of padding, or an example
        for reference in self.computed.values():
            is_of_inputs |= not reference.expired()
        for path, known in self._bound.items():
            uses = known.uses
            if known.is_captured or not uses.is_first_use:
                continue
            change = self.last.get(path)
            if change is None:
                continue
            container, _ = change.where or (None, None)
            if id(container) in self._growing:
                continue
            # `_stays` decides on flags
            if type(change.now) in PLAIN and not self.keeps_containers:
                continue
            if container is None and not is_of_inputs:
                lasting.update(uses.runs)
            found[path] = uses
        if self.keeps_first_use:
            return found
        stays = {}
        for path, uses in found.items():
            if lasting.issuperset(uses.runs):
                stays[path] = uses
        return stays

    @property
    def python_of_sizes(self) -> list[str]:
        """Paths of values, not tensors, that first runs of several keys changed."""
        found = []
        for path, uses in self.made.items():
            if len(uses.runs) > 1 and not is_tensor(self.last[path].now):
                found.append(path)
        return found

    @property
    def perhaps_made(self) -> KeysView[str]:
        """All that a single run changed, too."""
        if len(self._runs) < 2:
            return self._bound.keys()
        return self.made.keys()

    @property
    def is_first_run(self) -> bool:
        """Whether the next run is a key's first."""
        return self.key not in self._runs

    @property
    def prepared(self) -> list[str]:
        """Paths of tensors that first use wrote, and later runs write, too, or fill again: nothing
        holds what they were in between.
        """
        of_first_use = _runs_of(self.made)
        steady = set(filter(self.is_steady, self._bound))
        found = []
        for written in self.storages.written.values():
            if is_within(written.path, steady):  # each run binds another tensor
                continue
            uses = written.uses
            first, later = self._by_key(uses.runs, of_first_use)
            ways = self._by_key(uses.ways, of_first_use)
            is_irregular = uses.stopped and (uses.repeated or written.is_filled_again)
            if not later:  # its flag stays, its bytes would not
                is_irregular |= bool(first) and not uses.is_first_use
            for begun, gone_on in ((first, later), ways):
                for key in begun.keys() & gone_on.keys():
                    is_irregular |= begun[key] != gone_on[key]
            if is_irregular:
                found.append(written.path)
        return found

    def _by_key(
        self,
        of_runs: Mapping[int, object],
        of_first_use: set[int],
    ) -> tuple[dict[object, object], dict[object, object]]:
        """Of runs of first use, and of later ones."""
        first = dict[object, object]()
        later = dict[object, object]()
        for number, value in of_runs.items():
            found = first if number in of_first_use else later
            found[self._runs[number]] = value
        return first, later

    @property
    def kept_of_values(self) -> list[str]:
        """Lines where the host needed values of inputs, of keys that made something."""
        keys = set[object]()
        for number in _runs_of(self.made):
            keys.add(self._runs[number])
        found = []
        for key, line in self.values_read.items():
            if key in keys:
                found.append(line)
        return found

    @property
    def made_of_inputs(self) -> list[str]:
        """Paths of tensors that were made on first use of what looks saw computed."""
        found = list[str]()
        if not self.computed:
            return found
        made = self.made
        of_first_use = _runs_of(made)
        storages = self.storages
        state = by_address(self._now()) if made else storages.of_model
        for address, (path, tensor) in state.items():
            reference = self.computed.get(storage_id(tensor))
            if reference is None or reference.expired():
                continue
            is_first = is_within(path, made)
            written = storages.written.get(address)
            if written:
                is_first = written.uses.is_first_use
                if not written.shows:
                    is_first &= of_first_use.issuperset(written.uses.runs)
            if is_first:
                found.append(path)
        return found

    def may_undo(
        self,
        path: str,
    ) -> bool:
        """Containers lose what runs put in or exchange, but only if no graph stays."""
        change = self.last.get(path)
        keeps = self.keeps_first_use and self.keeps_containers
        # None: undone already
        if change is None or (not keeps and change.where):
            return True
        return self.before.is_attribute(change)

    # --- putting back -----------------------------------------------------------------------------

    def rewind(self) -> None:
        """Ahead of a try of a key: undo all but first use and large storages."""
        self.storages.rewind()
        self._undo(self.made)

    def restore(self) -> None:
        """Undo changes for good. The device is idle."""
        self.last = self.before.changes()  # by runs of a bench, too
        made = self.made
        of_made = set[int]()  # runs
        undone = dict[str, _Bound]()
        for path, known in self._bound.items():
            if path not in made and self.may_undo(path):
                undone[path] = known
            elif known.uses.is_first_use:
                of_made.update(known.uses.runs)
        steady = set(filter(self.is_steady, self._bound))  # there each run binds another tensor
        self.outcome.clear()  # rewinds noted some
        filled = set[int]()  # on first use
        for written in self.storages.written.values():
            stays = not is_within(written.path, steady)
            stays = stays and self._stays(written.uses, of_made, undone)
            if stays:
                written.give_back()
                filled.add(storage_id(written.tensor))
            else:
                written.fill(written.copy)
            self.outcome[written.path] = (
                written.storage.nbytes(),
                "new" if stays else written.outcome,
            )
        self._writes_of_engine.put_back(filled)
        self._undo(made)

    def _stays(
        self,
        uses: Uses,
        of_made: Set[int],
        undone: Mapping[str, _Bound],
    ) -> bool:
        """Whether a tensor is of first use. Then changes that may be its flag are, too."""
        runs = uses.runs.keys()
        is_of_made = of_made >= runs
        stays = uses.is_first_use if is_of_made else uses.stopped
        flags = set[str]()
        for path, known in undone.items():
            if is_of_made:  # by what each run changes no longer
                if known.uses.is_first_use and known.may_flag(runs):
                    flags.add(path)
            elif not known.began_with.isdisjoint(runs):  # it may count its writes
                stays &= known.uses.runs.keys().isdisjoint(runs)
            elif known.may_flag(runs):
                flags.add(path)
                stays &= self.keeps_first_use
        if stays and self.keeps_first_use:
            self._flags |= flags
        return stays

    def _undo(
        self,
        made: Mapping[str, Uses],
    ) -> None:
        """All Python but what was made."""
        for path, change in self.last.items():
            known = self._bound.get(path)
            if path not in made or len(made[path].runs) > 1:  # bound for each size
                self.volatile.add(path)
            if path in made:
                nbytes = change.now.nbytes if is_tensor(change.now) else 0
                self.outcome[path] = nbytes, "new"
            elif self.may_undo(path):
                is_flag = path in self._flags
                is_attribute = self.before.is_attribute(change)
                if is_flag and not is_attribute:
                    continue
                value = change.was
                # first use may have made it, or it says what that filled
                is_of_first_use = is_flag or (made and change.is_new and is_attribute)
                if known and is_of_first_use and not known.is_captured:
                    value = known.first
                change.bind(value)
        if self.last:
            self.last = self.before.changes()


def _runs_of(made: Mapping[str, Uses]) -> set[int]:
    found = set[int]()
    for uses in made.values():
        found.update(uses.runs)
    return found


def _differing(
    before: Mapping[str, Change],
    now: Mapping[str, Change],
) -> dict[str, Change]:
    found = {}
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
