"""Looks, warm-ups and captures of one model, until it is put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cgplan.backends.backend import span
from cgplan.captures.failures import explain_failure
from cgplan.captures.model_runs import ModelRuns
from cgplan.captures.warm_ups import ANEW
from cgplan.errors import CaptureError, HostSyncError
from cgplan.graphs.ambient import AmbientState
from cgplan.graphs.fingerprint import Change, is_ignored
from cgplan.graphs.footprint import (
    Footprint,
    examine,
    listed,
    refuse_first_use,
    refuse_rebound,
)
from cgplan.graphs.put_back import PutBack
from cgplan.modes import CUDAGraphMode, Key
from cgplan.piecewise.split import refuse_missing_ops
from cgplan.planning.build import DEFAULT_SPLITTING_OPS

_HALVES = (torch.float16, torch.bfloat16)


class Rehearsal:
    """Runs ahead of captures, and captures; ``kept`` puts the model back.

    Attributes:
        judged: Modes whose first run was compared with the look.
    """

    def __init__(
        self,
        runs: ModelRuns,
        kept: PutBack,
    ) -> None:
        self.kept = kept
        self._runs = runs
        self._footprints: dict[CUDAGraphMode, Footprint] = {}
        self.judged = set[CUDAGraphMode]()
        self._changed: Mapping[str, Change] = {}
        # met only by a capture
        self._late_syncs: dict[CUDAGraphMode, HostSyncError] = {}

    # --- looks ------------------------------------------------------------------------------------

    def set_context(self, key: Key) -> None:
        runs = self._runs
        if runs.before_key is None:
            return
        mode, descriptor = key
        try:
            with self.kept.setting_context():
                runs.before_key(mode, descriptor, runs.views(descriptor))
        except Exception as error:
            raise explain_failure(error, f"{mode} {descriptor}") from error

    def look(self, key: Key) -> None:
        """Look once for each mode. Raises as ``footprint.examine``."""
        self.set_context(key)
        mode, descriptor = key
        if mode in self._footprints:
            return
        runs = self._runs
        route = runs.route
        model = runs.model
        split: Iterable[str] = ()
        breaks = None
        is_piecewise = mode is CUDAGraphMode.PIECEWISE
        if is_piecewise:
            split = self._split_at()
            breaks = route.breaks
        if breaks is not None:
            model = partial(breaks.forward, model)
        views = runs.views(descriptor)
        with span("look"):
            found = examine(
                partial(runs.run, model, CUDAGraphMode.NONE, descriptor, views),
                self.kept,
                inputs=list(views.values()),
                part="eager piece" if runs.runs_python_again(mode) else "segment",
                eager_ops=split,
                is_whole=not is_piecewise,
                hidden_from=runs.config.compilation.hide_capture_from,
                capture_visible_because=self._late_syncs.get(mode),
            )
        if found.host_sync is not None and not isinstance(found.host_sync, HostSyncError):
            raise found.host_sync  # tagged as unsafe
        if breaks is not None and found.error is None:
            refuse_missing_ops(split, found.names)
        self._footprints[mode] = found
        if is_piecewise and route.name in ("modules", "wrappers"):
            route.operators = found.operators
        self._note_found(mode, found, views.values())

    def _split_at(self) -> Iterable[str]:
        name = self._runs.route.name
        given = self._runs.config.compilation.splitting_ops
        if name not in ("ops", "modules"):
            return ()
        if name == "ops" and given is None:
            return DEFAULT_SPLITTING_OPS
        return given or ()

    def _note_found(
        self,
        mode: CUDAGraphMode,
        found: Footprint,
        views: Iterable[Tensor],
    ) -> None:
        runs = self._runs
        facts = runs.facts
        addresses = runs.addresses
        read = set(map(id, found.reads.values()))
        of_pieces = set[int]()
        # else FULL graphs read the tensors of eager pieces
        if runs.plan.mode is CUDAGraphMode.PIECEWISE and runs.route.breaks is not None:
            for module in runs.route.breaks.modules.values():
                of_pieces.update(map(id, module.parameters()))
                of_pieces.update(map(id, module.buffers()))
        addresses.reads |= found.reads.keys()
        unread = set[str]()
        for path, place in self.kept.before.places.items():
            if id(place.value) in read:
                addresses.reads.add(path)
            elif id(place.value) in of_pieces:
                unread.add(path)
        addresses.volatile |= unread - addresses.reads
        facts.overwritten |= found.overwritten
        facts.read_whole |= found.read_whole
        facts.outside += found.outside
        facts.is_coarse |= self._is_coarse(found, [*views, *found.reads.values()])
        because = found.capture_visible_because
        if because is not None:
            facts.told.add(mode)
            packages = ", ".join(sorted(found.packages_that_ask))
            facts.note(
                f"{packages} is told of captures, and may run slower kernels there than in eager "
                f"calls (attention with masks that mask nothing): as in eager calls, "
                f"{because.message}"
            )
        runs.use_generators(found.generators.values())

    def _is_coarse(
        self,
        found: Footprint,
        tensors: list[Tensor],
    ) -> bool:
        device = self._runs.backend.device.type
        if AmbientState.now(device).autocast is not None:
            return True
        if any(tensor.dtype in _HALVES for tensor in tensors):
            return True
        if device != "cuda":
            return False
        if torch.get_float32_matmul_precision() != "highest":
            return True
        return torch.backends.cudnn.allow_tf32 and any("conv" in name for name in found.names)

    def host_sync(self, mode: CUDAGraphMode) -> CaptureError | None:
        found = self._footprints.get(mode)
        return None if found is None else found.host_sync

    def note_failure(self, mode: CUDAGraphMode, failure: Any) -> bool:
        """Whether another look helps: the capture alone needed the host, and packages are told of
        it then.
        """
        found = self._footprints.get(mode)
        if found is None:  # the look itself failed
            return False
        is_hidden = found.packages_that_ask and found.capture_visible_because is None
        if is_hidden and isinstance(failure, HostSyncError):
            self._late_syncs[mode] = failure
            del self._footprints[mode]
            return True
        if mode not in self.judged:
            del self._footprints[mode]
        return False

    # --- runs after a look ------------------------------------------------------------------------

    @contextmanager
    def judged_run(
        self,
        mode: CUDAGraphMode,
        *,
        captures: bool = False,
    ) -> Iterator[None]:
        """A block of one run; a mode's first is compared with the look. Raises CaptureError if
        graph code reads what that run binds again, if the model keeps what it computed from
        padding, and for some changes under ``strict``.
        """
        is_first = mode not in self.judged
        with self.kept.run(captures=captures, enters_made=is_first) as self._changed:
            yield
        if is_first:
            self._judge(mode, self._changed)

    def _judge(self, mode: CUDAGraphMode, changed: Mapping[str, Change]) -> None:
        runs = self._runs
        facts = runs.facts
        found = self._footprints[mode]
        compilation = runs.config.compilation
        if not runs.runs_python_again(mode):
            refuse_rebound(found, changed, self.kept)
        made = listed(self.kept.made_of(found.from_inputs))
        if made:
            refuse_first_use(made, self.kept)
        if compilation.strict and found.writes_input is not None:
            raise CaptureError(
                f"the forward writes into an argument, at {found.writes_input}; a graph would "
                "write into its copy",
                remedy="Write into a tensor of the model, or return the result.",
            )
        python = list(self.changes)
        facts.changes_python |= bool(python)
        facts.aside |= found.aside
        python = runs.frozen(mode, python)
        if python and compilation.strict:
            raise CaptureError(
                f"each run changes {changed[python[0]]}; a replay runs no Python",
                remedy="Keep it in a tensor, or name it in `ignore` if it decides nothing: "
                f"ignore=[{python[0]!r}].",
            )
        self.judged.add(mode)
        if python:
            facts.note(
                f"the forward changes {listed(python)}; replays do not, nor do they see it change"
            )

    @property
    def changes(self) -> dict[str, Change]:
        """Of Python by the last run, but what is ignored."""
        ignore = self._runs.config.compilation.ignore
        found = self._changed.items()
        return {path: change for path, change in found if not is_ignored(path, ignore)}

    @property
    def has_left(self) -> bool:
        """Whether the last run did what not every run does."""
        return bool(self.changes or self.kept.newly_written)

    def refuse_changed(self, what: str) -> None:
        """Raise CaptureError if the last run, which failed, left more than attributes."""
        for change in self.changes.values():
            if not self.kept.before.is_attribute(change):
                raise CaptureError(
                    f"{what}: the capture failed without a warm-up, and left {change}",
                    remedy=ANEW,
                )

    def refuse_value(self, mode: CUDAGraphMode) -> None:
        """Raise CaptureError if an input's value made something on first use."""
        read = self._footprints[mode].value_read
        if read and self.kept.has_made:
            refuse_first_use(f"a value for the host ({read})", self.kept)
