"""Addresses of the model's memory since its capture."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from cgplan.backends.context import AddressPolicy
from cgplan.errors import AddressError
from cgplan.graphs.change_detector import ChangeDetector
from cgplan.graphs.fingerprint import Fingerprint
from cgplan.modes import Key


def _never() -> bool:
    return False


class AddressChecks:
    """Refuses replays once tensors that graphs read have moved.

    Attributes:
        holds: Each call's quick look: if False, ``check`` decides.
        reads: Their paths.
        is_outdated: Graphs were captured since ``seal``.
    """

    def __init__(self, roots: dict[str, Any], device: torch.device, policy: AddressPolicy) -> None:
        self._roots = roots
        self._device = device
        self._policy = policy
        self.reads = set[str]()
        self.volatile = set[str]()
        self.is_outdated = True
        self.holds: Callable[[], bool] = _never
        self._sealed: Fingerprint | None = None
        self._detector: ChangeDetector | None = None
        self._checked = set[Key]()
        self._moved: str | None = None

    def seal(self, known: Fingerprint | None = None) -> None:
        """``known``: a record that may still be true."""
        is_current = self._sealed is not None and not self.is_outdated
        if is_current or self._policy == "off":
            return
        sealed = known
        if sealed is None or sealed.changes():
            sealed = Fingerprint.of(self._roots, self._device)
        sealed.volatile |= self.volatile
        sealed.narrow(self.reads)
        self.forget_all()
        self._sealed = sealed
        self.is_outdated = False
        if self._policy == "first":
            sealed.let_go()  # each check is a walk
            return
        watched = sealed.checked()
        for place in sealed.steady():
            if issubclass(type(place.value), torch.Generator):
                watched.append(place)
        modules, held = sealed.modules()
        self._detector = ChangeDetector(sealed, [*watched, *modules], held)
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
        if self._detector is not None:
            if self._detector.holds_all():
                return
        elif key in self._checked and not again:
            return
        mode, descriptor = key
        self._sealed.refuse_moved(f"{mode} {descriptor}", self._roots, may_grow=True)
        self._checked.add(key)
        if self._detector is not None:  # graphs do not read it
            self.is_outdated = True
            self.seal()

    def take_record(self) -> Fingerprint:
        """Of what graphs read, without the tensors; nothing is checked any more."""
        found = self._sealed
        if found is None:
            found = Fingerprint.of(self._roots, self._device)
            found.volatile |= self.volatile
            found.narrow(self.reads)
        self.forget_all()
        return found.let_go()

    def invalidate(self, name: str) -> None:
        """Refuse replays: ``name`` has moved."""
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
        self.holds = _never

    def at_capture(self) -> dict[int, str]:
        """Paths by address."""
        found = dict[int, str]()
        if self._sealed is None:
            return found
        for path, place in self._sealed.places.items():
            if place.address is not None:
                found[place.address] = path
        return found
