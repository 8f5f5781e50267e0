"""Batches that the caller writes straight into the static buffers."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from types import TracebackType
from typing import Any, NoReturn

import torch

from cgplan.buffers.views import HandedViews
from cgplan.errors import CgplanError, InputError
from cgplan.runner.prepared import BatchLauncher, PreparedBatch

_NO_OUTPUT, _UNREAD = object(), object()
_fill, _empty, _count = dict.update, dict.clear, dict.__len__  # callers change nothing, see StagedBuffers._refuse


def _unread() -> object:
    """In place of a function that reads an output which can be read later as well."""
    return _UNREAD


def _inside(method: Any) -> Any:
    """A method of dict that looks into it without asking for an item: what a block holds is put in before."""

    def look(self: StagedBuffers, *args: Any) -> Any:
        if self._entered is not None:
            self._open()
        return method(self, *args)

    return look


class StagedBuffers(dict[str, torch.Tensor]):
    """The static buffers' own views for one batch, by name; ``GraphRunner.stage`` makes it.

    It is a block: inside, each input and metadata tensor has the shape of the unpadded batch and is the caller's to
    write in place. Leaving the block resets what padding needs it and runs the batch; an exception in the block runs
    nothing. After the block ``output`` is the batch's output, and the tensors are out of reach: to write into one that
    was kept is to write into the batches of others. The runner owns the memory. It can be entered again and again.
    Tensors and outputs that nobody asks for cost nothing: what is handed out is looked at, see HandedViews.

    Args:
        launcher: Runs the batch.
        batch: The batch, prepared.
        make: Makes views of the batch's rows, as tensors of nobody else.

    Raises:
        InputError: a tensor is put in or taken out, instead of being written to in place; or one that was resized left
            the block as torch's RuntimeError, for the memory cannot move.
        CgplanError: it is entered while a call is under way, while another stream still has work of the call before, or
            after its graphs are gone, or used outside of its block; leaving it raises what a call raises.
    """

    __slots__ = (
        "__weakref__", "_acquire", "_batch", "_current_stream", "_entered", "_given", "_handed", "_is_asked",
        "_is_eager", "_launcher", "_names", "_output", "_own", "_read", "_reference", "_release", "_tensors", "_views",
    )  # fmt: skip

    def __init__(
        self, launcher: BatchLauncher, batch: PreparedBatch, make: Callable[[], Mapping[str, torch.Tensor]]
    ) -> None:
        super().__init__()
        self._launcher: BatchLauncher | None = launcher
        self._acquire, self._release = launcher.acquire, launcher.release
        self._current_stream = launcher.current_stream
        self._entered: BatchLauncher | None = None  # what holds the lock, inside the block
        self._batch, self._is_eager = batch, batch.copy is None
        self._read = batch.output
        if batch.output_stays:
            batch.output = _unread
        own = make()

        def fresh() -> tuple[torch.Tensor, ...]:
            return tuple(make().values())

        self._names, self._tensors = tuple(own), tuple(own.values())
        # An eager run gives the model these very objects, which it may change in place.
        self._own = HandedViews(fresh) if self._is_eager else None
        self._handed = HandedViews(fresh)
        self._given = self._handed.tensors()
        self._views = dict(zip(self._names, self._given, strict=True))
        self._is_asked = False
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
            stream, use = self._current_stream(), launcher.use
            if stream != use.stream or use.user is not launcher.name:
                launcher.take_stream()
            if self._is_eager:  # it resets no padding
                launcher.extend_marks(self._batch)
            self._output = _NO_OUTPUT
            if self._is_asked:
                self._put_in()
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
        batch = self._batch
        try:
            if kind is None:
                tensors = self._tensors if self._own is None else self._own.tensors()
                self._output = launcher.launch(batch, batch.pad, tensors)
            else:
                launcher.extend_marks(batch)
                if kind is RuntimeError and "storage that is not resizable" in str(error):  # see buffers.py
                    raise InputError(
                        f"staged buffers cannot be resized, the graphs read the memory that is there: {error}",
                        remedy="Stage a batch of the size that is needed: runner.stage(num_tokens).",
                    ) from error
        except BaseException:
            launcher.extend_marks(batch)
            raise
        finally:
            self._entered = None
            _empty(self)
            self._release()
        last = launcher.last_staged
        if last is not self._reference:
            launcher.last_staged = self._reference
            if last is not None and (other := last()) is not None:
                other._output = _NO_OUTPUT  # it would keep an output alive that nobody may come for

    @property
    def output(self) -> Any:
        """What the model returned for the batch, with the padding sliced off; valid as long as a call's output is.

        Raises:
            CgplanError: the block has not been left yet, or another batch was staged since.
        """
        output = self._output
        if output is _UNREAD:
            output = self._output = self._read()
        if output is _NO_OUTPUT:
            raise CgplanError(
                "there is no output of these staged buffers",
                remedy="Read it after the `with` block and before the next batch is staged.",
            )
        return output

    def look_again(self) -> None:
        """Have the model's addresses checked before the batch runs the next time."""
        if self._launcher is not None:
            self._batch.look_again()

    def retire(self) -> None:
        """Let go of all memory: the graphs are gone. The lock is held, and not by this block."""
        if self._launcher is None:
            return
        self._launcher, self._views, self._tensors, self._output = None, {}, (), _NO_OUTPUT
        del self._batch, self._handed, self._given, self._read, self._own

    def __missing__(self, name: str) -> torch.Tensor:
        view = self._open().get(name)
        if view is not None:
            return view
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

    __contains__, __len__, __eq__, __ne__, __repr__, __or__, __reversed__, copy = map(
        _inside,
        (dict.__contains__, _count, dict.__eq__, dict.__ne__, dict.__repr__, dict.__or__, dict.__reversed__, dict.copy),
    )

    def _open(self) -> dict[str, torch.Tensor]:
        """The views, put in and as they were made unless somebody has changed one inside this block."""
        if self._entered is None:
            raise self._ended()
        if not _count(self):
            self._is_asked = True  # the next block will be, too, and be ready for it
            self._put_in()
        return self._views

    def _put_in(self) -> None:
        given = self._handed.tensors()
        if given is not self._given:
            self._given, self._views = given, dict(zip(self._names, given, strict=True))
        _fill(self, self._views)

    def _ended(self) -> CgplanError:
        return CgplanError(
            "the staged buffers were used outside of their `with` block",
            remedy="Write into them inside `with runner.stage(...) as buffers:`; what comes later belongs to others.",
        )
