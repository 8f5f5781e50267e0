"""Batches that the caller writes straight into the static buffers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from cgplan.buffers.batch import unknown_input
from cgplan.errors import CgplanError, InputError
from cgplan.modes import CUDAGraphMode
from cgplan.runner.launcher import Launcher
from cgplan.runner.prepared import PreparedCall, Values

_MISSING = object()
_UNREAD = object()


class StagedBuffers(Mapping[str, Tensor]):
    """The runner's static rows of one batch, by name.

    Inside the block, which can be entered again, the caller writes in place. Leaving it runs the
    batch, and raises as a call; then ``output`` is there.

    Raises:
        InputError: a tensor is put in instead of written in place, or its name is not declared.
        CgplanError: used outside of its block; entered during a call, while another stream has
            work, or after its graphs are gone.
    """

    __slots__ = (
        "__weakref__",
        "_entered",
        "_launcher",
        "_marks",
        "_output",
        "_reqs",
        "_tokens",
        "_views",
        "call",
    )
    __hash__ = object.__hash__

    def __init__(self, launcher: Launcher, call: PreparedCall) -> None:
        batch = call.route.batch
        buffers = launcher.graphs.buffers[()]
        self._launcher = weakref.ref(launcher)
        self.call: PreparedCall | None = call
        self._marks = buffers.marks
        self._tokens = batch.num_tokens
        self._reqs = batch.num_reqs or 0
        self._views = buffers.views(self._tokens, self._reqs)
        self._entered: Launcher | None = None  # inside the block
        self._output: Any = _MISSING

    def __enter__(self) -> StagedBuffers:
        launcher = self._launcher()
        call = self.call
        if launcher is None or call is None:
            raise CgplanError(
                "the graphs that these buffers were staged for are gone",
                remedy="Call runner.stage(...) again.",
            )
        use = launcher.use
        use.take(launcher.name)
        # as take_stream, which is slower
        if use.stream != launcher.stream() or use.user is not launcher.name:
            try:
                launcher.take_stream()
            except BaseException:
                use.release()
                raise
        marks = self._marks
        if self._tokens > marks.tokens or self._reqs > marks.reqs:
            marks.extend(self._tokens, self._reqs)
        self._output = _MISSING
        self._entered = launcher
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        launcher = self._entered
        call = self.call
        if launcher is None or call is None:
            raise self._ended()
        try:
            if kind is None:
                values: Values = ()
                if call.route.mode is CUDAGraphMode.NONE:
                    values = [view.detach() for view in self._views.values()]
                with torch._C.DisableTorchFunction():
                    launcher.launch(call, values)
                self._output = call.output() if launcher.graphs.outputs.clone else _UNREAD
            last = launcher.last_staged
            launcher.last_staged = self
            if last is not None and last is not self:
                last.drop_output()
        finally:
            self._entered = None
            launcher.use.release()

    @property
    def output(self) -> Any:
        """Valid as a call's. Raises CgplanError before the end of the block, and after a batch of
        other counts was staged.
        """
        call = self.call
        if self._output is _MISSING or call is None:
            raise CgplanError(
                "these staged buffers have no output",
                remedy="Read it after the `with` block and before the next batch is staged.",
            )
        if self._output is _UNREAD:
            self._output = call.output()
        return self._output

    def drop_output(self) -> None:
        self._output = _MISSING

    def retire(self) -> None:
        """Its graphs are gone."""
        self.call = None
        self._views = {}
        self.drop_output()

    def __getitem__(self, name: str) -> Tensor:
        if self._entered is None:
            raise self._ended()
        if name not in self._views:
            raise unknown_input(name, self._views)
        return self._views[name].detach()

    def __setitem__(self, name: str, value: Tensor) -> None:
        own = self[name].data_ptr()
        # it is the same after `buffers[name] += 1`
        if not isinstance(value, Tensor) or value.data_ptr() != own:
            raise InputError(
                "values cannot be put into staged buffers: graphs read their memory",
                remedy="Write in place: buffers[name].copy_(tensor), .fill_(number).",
            )

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def _ended(self) -> CgplanError:
        return CgplanError(
            "the staged buffers were used outside of their `with` block",
            remedy="Write into them inside `with runner.stage(...) as buffers:`; later their "
            "memory belongs to others.",
        )
