"""Batches that the caller writes straight into the static buffers."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from types import TracebackType
from typing import Any, NoReturn

import torch

from cgplan.errors import CgplanError, InputError
from cgplan.runtime.launching import BatchLauncher
from cgplan.runtime.prepared import PreparedBatch
from cgplan.runtime.views import HandedViews

_NO_OUTPUT = object()
_fill, _empty = dict.update, dict.clear  # callers do not change what a block holds, see StagedBuffers._refuse


class StagedBuffers(dict[str, torch.Tensor]):
    """The static buffers' own views for one batch, by name; ``GraphRunner.stage`` makes it.

    It is a block: inside, each input and metadata tensor has the shape of the unpadded batch and is the caller's to
    write in place. Leaving the block resets what padding needs it and runs the batch; an exception in the block runs
    nothing. After the block ``output`` is the batch's output, and the tensors are out of reach: to write into one that
    was kept is to write into the batches of others. The runner owns the memory. It can be entered again and again.

    Args:
        launcher: Runs the batch.
        batch: The batch, prepared.
        make: Makes views of the batch's rows, as tensors of nobody else.

    Raises:
        InputError: a tensor is put in or taken out, instead of being written to in place.
        CgplanError: it is entered while a call is under way, while another stream still has work of the call before, or
            after its graphs are gone, or used outside of its block; leaving it raises what a call raises.
    """

    __slots__ = (
        "__weakref__", "_acquire", "_batch", "_entered", "_given", "_handed", "_launcher", "_names", "_output",
        "_reference", "_release", "_tensors", "_views",
    )  # fmt: skip

    def __init__(
        self, launcher: BatchLauncher, batch: PreparedBatch, make: Callable[[], Mapping[str, torch.Tensor]]
    ) -> None:
        super().__init__()
        self._launcher: BatchLauncher | None = launcher
        self._acquire, self._release = launcher.acquire, launcher.release
        self._entered: BatchLauncher | None = None  # what holds the lock, inside the block
        self._batch = batch
        own = make()
        self._names, self._tensors = tuple(own), tuple(own.values())
        self._handed = HandedViews(lambda: tuple(make().values()))
        self._given = self._handed.tensors()
        self._views = dict(zip(self._names, self._given, strict=True))
        self._output: Any = _NO_OUTPUT
        self._reference = weakref.ref(self)

    def __enter__(self) -> StagedBuffers:
        acquired, launcher = self._acquire(False), self._launcher
        try:
            if launcher is None:
                raise CgplanError(
                    "the graphs that these buffers were staged for are gone", remedy="Call runner.stage(...) again."
                )
            if not acquired:
                raise launcher.under_way()
            launcher.take_stream()
            if self._batch.copy is None:  # it runs eagerly, and resets no padding
                launcher.extend_marks(self._batch)
            self._output = _NO_OUTPUT
            given = self._handed.tensors()
            if given is not self._given:
                self._given, self._views = given, dict(zip(self._names, given, strict=True))
            _fill(self, self._views)
            self._entered = launcher
        except BaseException:
            if acquired:
                _empty(self)
                self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        launcher = self._entered
        if launcher is None:
            raise self._ended()
        batch, done = self._batch, False
        try:
            if kind is None:
                self._output = launcher.launch(batch, batch.pad, self._tensors)
                done = True
        finally:
            self._entered = None
            _empty(self)
            if not done:
                launcher.extend_marks(batch)
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

    def look_again(self) -> None:
        """Have the model's addresses checked before the batch runs the next time."""
        if self._launcher is not None:
            self._batch.look_again()

    def retire(self) -> None:
        """Let go of all memory: the graphs are gone. The lock is held, and not by this block."""
        self._launcher, self._views, self._tensors, self._output = None, {}, (), _NO_OUTPUT
        del self._batch, self._handed, self._given

    def __missing__(self, name: str) -> torch.Tensor:
        if self._entered is None:
            raise self._ended()
        near = difflib.get_close_matches(str(name), self._names, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise InputError(f"unknown input {name!r}", remedy=f"{hint}Declared are {', '.join(self._names)}.")

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        if self[name] is not value:  # it is after `buffers[name] += 1`
            self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Nothing comes in or goes: the model would not see it."""
        raise InputError(
            "tensors cannot be put into staged buffers, or taken out: the graphs read the memory that is there",
            remedy="Write in place: buffers[name].copy_(tensor).",
        )

    __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

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
        if self._entered is None:
            raise self._ended()
        return self._views

    def _ended(self) -> CgplanError:
        return CgplanError(
            "the staged buffers were used outside of their `with` block",
            remedy="Write into them inside `with runner.stage(...) as buffers:`; what comes later belongs to others.",
        )
