"""Copies the tensors of a call into the static buffers, and pads them.

Note [Copying in]
    Sources may lie anywhere, and overlap the buffers: a buffer's own view stays, other tensors in
    buffers are cloned first. The caller may write to a host tensor once the call has returned.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from cgplan.buffers.static import StaticBuffer, StaticBuffers, pad_value
from cgplan.errors import InputError

Values = Sequence[Tensor]
CopyIn = Callable[[Values, int, bool], None]
Group = tuple[list[Tensor], list[Tensor]]


class BatchCopy:
    """For batches of one size.

    Its functions take the batch's checked tensors in the order of the buffers, the current stream's
    handle, and whether they are dense and like ``path``'s tensors: ``PreparedCall.is_alike``.
    """

    def __init__(
        self,
        copier: Copier,
        num_tokens: int,
        num_reqs: int,
        padded_tokens: int,
        padded_reqs: int,
    ) -> None:
        self._static = copier.buffers
        self._copy_inputs = copier.copy_inputs
        self._names = list(self._static.buffers)
        self._buffers = tuple(self._static.buffers.values())
        self._marks = self._static.marks
        self._tokens = num_tokens
        self._reqs = num_reqs
        self._rows = [buffer.count(num_tokens, num_reqs) for buffer in self._buffers]
        self._padded_rows = [buffer.count(padded_tokens, padded_reqs) for buffer in self._buffers]
        self._views: list[Tensor] = []
        self.look_at_writes()

    def look_at_writes(self) -> None:
        """Find the rows up to which padding is always due."""
        self._least_rows = list(self._padded_rows)
        for index, buffer in enumerate(self._buffers):
            keeps_padding = buffer.spec.pad != "last" and not buffer.written
            if keeps_padding or self._padded_rows[index] <= self._rows[index]:
                self._least_rows[index] = 0
        self._always_pads = any(self._least_rows)

    @torch.no_grad()
    def run(
        self,
        values: Values,
        stream: int,
        is_alike: bool = False,  # noqa: ARG002
    ) -> None:
        """Raises InputError for tensors that may not be copied."""
        if not self._views:
            self._views = list(map(StaticBuffer.view, self._buffers, self._rows))
        # _foreach_copy_ is one launch only for one dtype and device
        groups: dict[tuple[torch.dtype, torch.device], Group] = {}
        for index, value in enumerate(values):
            source = self._source(index, value)
            if source is not None:
                kind = (source.dtype, source.device)
                targets, sources = groups.setdefault(kind, ([], []))
                targets.append(self._views[index])
                sources.append(source)
        for targets, sources in groups.values():
            torch._foreach_copy_(targets, sources)
        self.pad(values, stream)

    def path(self, values: Values) -> CopyIn:
        """The quickest function like ``run``. Tensors narrower than the buffers, but for rows, are
        padded.
        """
        missing = list(map(_missing, self._buffers, values))
        if any(map(any, missing)):
            return partial(self._widened, missing)
        return self._path(values)

    def _path(self, values: Values) -> CopyIn:  # noqa: ARG002
        return self.run

    def _widened(
        self,
        missing: Sequence[list[int]],
        values: Values,
        stream: int,
        is_alike: bool,  # noqa: ARG002
    ) -> None:
        wide = list(values)
        for index, widths in enumerate(missing):
            if any(widths):
                pad = pad_value(self._buffers[index].spec)
                wide[index] = torch.nn.functional.pad(values[index], widths, value=pad)
        self.run(wide, stream)

    def pad(
        self,
        values: Values,  # noqa: ARG002
        stream: int,
        is_alike: bool = False,  # noqa: ARG002
    ) -> None:
        """Reset padding of a batch that was written in place."""
        marks = self._marks
        is_longer = marks.tokens > self._tokens or marks.reqs > self._reqs
        if is_longer or marks.exposed_tokens or self._always_pads:
            self._reset_padding(stream)
        marks.tokens = self._tokens
        marks.reqs = self._reqs

    @torch.no_grad()
    def _reset_padding(self, stream: int) -> None:  # noqa: ARG002
        for index, buffer in enumerate(self._buffers):
            buffer.pad(self._rows[index], self._padded_rows[index])

    def _source(
        self,
        index: int,
        value: Tensor,
    ) -> Tensor | None:
        """None for its buffer's own view."""
        target = self._buffers[index].tensor
        address = value.data_ptr()
        if address == target.data_ptr() and value.stride() == target.stride():
            return None
        name = self._names[index]
        if not address and value.numel():
            raise InputError(
                f"input {name!r} has no memory: its storage was freed",
                remedy="Pass a .clone() from before the storage was freed.",
            )
        if not self._copy_inputs:
            raise InputError(
                f"input {name!r} is not in its static buffer, and cudagraph_copy_inputs is false",
                remedy="Write into the tensors of runner.stage(...) or runner.input_views(...), "
                "or set cudagraph_copy_inputs: true.",
            )
        lies_in_buffer = bisect_right(self._static.bounds, address) % 2
        return value.clone() if lies_in_buffer else value


def _missing(
    buffer: StaticBuffer,
    value: Tensor,
) -> list[int]:
    missing = []
    for dim in reversed(range(value.dim())):
        is_counted = dim == buffer.row_dim
        missing += [0, 0 if is_counted else buffer.tensor.shape[dim] - value.shape[dim]]
    return missing


class Copier:
    """The caller owns ``buffers``; copy_kernel.py has a faster one.

    Args:
        copy_inputs: Else tensors from elsewhere are an InputError.
    """

    batch_copy: type[BatchCopy] = BatchCopy

    def __init__(
        self,
        buffers: StaticBuffers,
        *,
        copy_inputs: bool,
    ) -> None:
        self.buffers = buffers
        self.copy_inputs = copy_inputs
        self._copies: weakref.WeakSet[BatchCopy] = weakref.WeakSet()

    def for_batch(
        self,
        num_tokens: int,
        num_reqs: int,
        padded_tokens: int,
        padded_reqs: int,
    ) -> BatchCopy:
        copy = self.batch_copy(self, num_tokens, num_reqs, padded_tokens, padded_reqs)
        self._copies.add(copy)
        return copy

    def note_writes(self, before: list[int]) -> None:
        """From now on reset padding that the model has written into since ``before``."""
        if self.buffers.note_writes(before):
            for copy in self._copies:
                copy.look_at_writes()

    def close(self) -> None: ...
