"""Batches that the caller writes straight into the static buffers."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from types import TracebackType
from typing import Any

import torch

from cgplan.errors import CgplanError, InputError
from cgplan.runtime.launching import BatchLauncher
from cgplan.runtime.prepared import PreparedBatch

_NO_OUTPUT = object()


class StagedBuffers(dict[str, torch.Tensor]):
    """The static buffers' own views for one batch, by name; ``GraphRunner.stage`` makes it.

    It is a block: inside, each input and metadata tensor has the shape of the unpadded batch and is the caller's to
    write in place. Leaving the block resets what padding needs it and runs the batch; an exception in the block runs
    nothing. After the block ``output`` is the batch's output, and the tensors are out of reach: to write into one that
    was kept is to write into the batches of others. The runner owns the memory. It can be entered again and again.

    Raises:
        CgplanError: it is entered while a call is under way, or after its graphs are gone, or used outside of its
            block; leaving it raises what a call raises.
    """

    __slots__ = ("__weakref__", "_batch", "_launcher", "_names", "_output", "_reference", "_tensors", "_views")

    def __init__(self, launcher: BatchLauncher, batch: PreparedBatch, views: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._launcher: BatchLauncher | None = launcher
        self._batch = batch
        self._views = views
        self._names, self._tensors = tuple(views), tuple(views.values())
        self._output: Any = _NO_OUTPUT
        self._reference = weakref.ref(self)

    def __enter__(self) -> StagedBuffers:
        launcher = self._launcher
        if launcher is None:
            raise CgplanError(
                "the graphs that these buffers were staged for are gone", remedy="Call runner.stage(...) again."
            )
        if not launcher.acquire(False):
            raise launcher.under_way()
        if self._batch.copy is None:  # it runs eagerly, and resets no padding
            launcher.extend_marks(self._batch)
        self._output = _NO_OUTPUT
        self.update(self._views)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        launcher = self._launcher
        if launcher is None or not self:
            raise self._ended()
        done = False
        try:
            if kind is None:
                self._output = launcher.launch(self._batch, self._batch.pad, self._tensors)
                done = True
        finally:
            self.clear()
            if not done:
                launcher.extend_marks(self._batch)
            launcher.release()
        last, launcher.last_staged = launcher.last_staged, self._reference
        if last is not self._reference and last is not None and (other := last()) is not None:
            other._output = _NO_OUTPUT  # it would keep an output alive that nobody may come for

    @property
    def output(self) -> Any:
        """What the model returned for the batch, with the padding sliced off; valid as long as a call's output is.

        Raises:
            CgplanError: the block has not been left yet, or another batch was staged since.
        """
        if self._output is _NO_OUTPUT:
            raise CgplanError(
                "there is no output of these staged buffers",
                remedy="Read it after the `with` block and before the next batch is staged.",
            )
        return self._output

    def retire(self) -> None:
        """Let go of all memory: the graphs are gone."""
        self.clear()
        self._launcher, self._views, self._tensors, self._output = None, {}, (), _NO_OUTPUT
        del self._batch

    def __missing__(self, name: str) -> torch.Tensor:
        if not self:
            raise self._ended()
        near = difflib.get_close_matches(name, self._names, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise InputError(f"unknown input {name!r}", remedy=f"{hint}Declared are {', '.join(self._names)}.")

    def __iter__(self) -> Iterator[str]:
        return self._open().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict, inside the block."""
        return self._open().get(name, default)

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """As of a dict, inside the block."""
        return self._open().keys()

    def values(self) -> ValuesView[torch.Tensor]:  # type: ignore[override]
        """As of a dict, inside the block."""
        return self._open().values()

    def items(self) -> ItemsView[str, torch.Tensor]:  # type: ignore[override]
        """As of a dict, inside the block."""
        return self._open().items()

    def _open(self) -> dict[str, torch.Tensor]:
        if not self:
            raise self._ended()
        return self._views

    def _ended(self) -> CgplanError:
        return CgplanError(
            "the staged buffers were used outside of their `with` block",
            remedy="Write into them inside `with runner.stage(...) as buffers:`; what comes later belongs to others.",
        )
