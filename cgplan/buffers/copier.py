"""From the tensors of a call into the static buffers: copies, and padding behind them.

Note [Copying in]
    A copier prepares once, for each size of batch, all that does not change from call to call.
    Sources may have any strides, lie on the host or on the device, and overlap the static buffers.
    A tensor that is its buffer's own view stays as it is. One that lies in a buffer otherwise (an
    output that the model passed through, say) is cloned first, because the buffers are written in
    no particular order. Copies are queued on the current stream, as the replay behind them is. The
    caller may write to a host tensor as soon as the call has returned.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from cgplan.buffers.static import StaticBuffer, StaticBuffers
from cgplan.errors import InputError

CopyIn = Callable[[Sequence[Tensor], int, bool], None]


class BatchCopy:
    """Brings batches of one size into the static buffers by torch's operators, see Note [Copying
    in]: one launch for each dtype, one for each input with padding to reset.

    Its functions take the batch's tensors in the order of the buffers, their names, shapes, dtypes
    and devices checked; the current stream's handle; and whether the tensors are known to be laid
    out as those that ``path`` was given, without gaps and lazy conjugates.
    """

    def __init__(
        self, copier: Copier, num_tokens: int, num_reqs: int, padded_tokens: int, padded_reqs: int
    ) -> None:
        self._static, self._copy_inputs = copier.buffers, copier.copy_inputs
        self._buffers, self._marks = tuple(self._static.buffers.values()), self._static.marks
        self._tokens, self._reqs = num_tokens, num_reqs
        self._rows = [buffer.count(num_tokens, num_reqs) for buffer in self._buffers]
        self._padded_rows = [buffer.count(padded_tokens, padded_reqs) for buffer in self._buffers]
        self._views: list[Tensor] = []
        self.look_at_writes()

    def look_at_writes(self) -> None:
        # Rows up to which padding is due after each batch, whatever came before it; 0 for none.
        self._least_rows = [
            padded if padded > rows and (buffer.spec.pad == "last" or buffer.written) else 0
            for buffer, rows, padded in zip(
                self._buffers, self._rows, self._padded_rows, strict=True
            )
        ]
        self._always_pads = any(self._least_rows)

    @torch.no_grad()
    def run(self, values: Sequence[Tensor], stream: int, known: bool = False) -> None:  # noqa: ARG002
        """Copy any batch in, with padding behind it. Raises InputError for tensors that may not be
        copied.
        """
        self._views = self._views or [
            b.view(rows) for b, rows in zip(self._buffers, self._rows, strict=True)
        ]
        # _foreach_copy_ is one launch for tensors of one dtype and device, and a loop over all for
        # others
        groups: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
        for index, value in enumerate(values):
            source = self._source(index, value)
            if source is not None:
                targets, sources = groups.setdefault((source.dtype, source.device), ([], []))
                targets.append(self._views[index])
                sources.append(source)
        for targets, sources in groups.values():
            torch._foreach_copy_(targets, sources)
        self.pad(values, stream)

    def path(self, values: Sequence[Tensor]) -> CopyIn:
        """The quickest function that does the work of ``run`` for tensors on the devices of these.
        Where they are narrower than the buffers in other dimensions than rows, they are padded
        there first.
        """
        widths = [
            self._missing(buffer, value)
            for buffer, value in zip(self._buffers, values, strict=True)
        ]
        return partial(self._widened, widths) if any(map(any, widths)) else self._path(values)

    def _path(self, values: Sequence[Tensor]) -> CopyIn:  # noqa: ARG002
        return self.run

    @staticmethod
    def _missing(buffer: StaticBuffer, value: Tensor) -> list[int]:
        """Elements that are missing at the end of each dimension, as torch.nn.functional.pad takes
        them.
        """
        dims = reversed([*enumerate(zip(buffer.tensor.shape, value.shape, strict=True))])
        return [
            n
            for dim, (wide, narrow) in dims
            for n in (0, 0 if dim == buffer.row_dim else wide - narrow)
        ]

    def _widened(
        self,
        widths: Sequence[list[int]],
        values: Sequence[Tensor],
        stream: int,
        known: bool,  # noqa: ARG002
    ) -> None:
        wide = [
            torch.nn.functional.pad(value, missing, value=cast(float, buffer.spec.pad))
            if any(missing)
            else value
            for buffer, value, missing in zip(self._buffers, values, widths, strict=True)
        ]
        self.run(wide, stream)

    def pad(self, values: Sequence[Tensor], stream: int, known: bool = False) -> None:  # noqa: ARG002
        """Reset the padding that needs it, most often none: the caller has written the batch in
        place.
        """
        marks = self._marks
        if (
            marks.tokens > self._tokens
            or marks.reqs > self._reqs
            or marks.exposed_tokens
            or self._always_pads
        ):
            self._reset_padding(stream)
        marks.tokens, marks.reqs = self._tokens, self._reqs

    @torch.no_grad()
    def _reset_padding(self, stream: int) -> None:  # noqa: ARG002
        for buffer, rows, padded in zip(self._buffers, self._rows, self._padded_rows, strict=True):
            buffer.pad(rows, padded)

    def _source(self, index: int, value: Tensor) -> Tensor | None:
        tensor, address = self._buffers[index].tensor, value.data_ptr()
        if address == tensor.data_ptr() and value.stride() == tensor.stride():
            return None
        if not address and value.numel():
            raise InputError(
                f"input {list(self._static.buffers)[index]!r} has no memory: its storage was freed",
                remedy="Pass a tensor that holds its numbers, such as .clone() gives before the "
                "storage is freed.",
            )
        if not self._copy_inputs:
            raise InputError(
                f"input {list(self._static.buffers)[index]!r} does not lie in its static buffer, "
                "and "
                "cudagraph_copy_inputs is false",
                remedy="Write into the tensors of runner.stage(...) or runner.input_views(...), "
                "or set "
                "cudagraph_copy_inputs: true.",
            )
        return value.clone() if bisect_right(self._static.bounds, address) & 1 else value


class Copier:
    """Makes a BatchCopy for each size of batch.

    Args:
        buffers: The targets; the caller owns them.
        copy_inputs: Whether tensors from elsewhere are copied in; False: they are an InputError.

    Attributes:
        name: How it copies, for reports.
    """

    name = "torch operators"
    batch_copy: type[BatchCopy] = BatchCopy

    def __init__(self, buffers: StaticBuffers, *, copy_inputs: bool) -> None:
        self.buffers, self.copy_inputs = buffers, copy_inputs
        self._copies: weakref.WeakSet[BatchCopy] = weakref.WeakSet()

    def prepare(
        self, num_tokens: int, num_reqs: int, padded_tokens: int, padded_reqs: int
    ) -> BatchCopy:
        copy = self.batch_copy(self, num_tokens, num_reqs, padded_tokens, padded_reqs)
        self._copies.add(copy)
        return copy

    def note_writes(self, before: list[int]) -> None:
        """Find the buffers that the model has written into since their ``versions`` were
        ``before``: from now on their padding is reset with every batch.
        """
        if self.buffers.note_writes(before):
            for copy in self._copies:
                copy.look_at_writes()

    def close(self) -> None:
        """Free the memory that copies go through."""
