"""From the tensors of a call into the static buffers: copies, and padding behind them.

Note [Copying in]
    A copier prepares once, for each size of batch, all that does not change from call to call. Sources may be of any
    strides, on the host or on the device, and may overlap the static buffers: a tensor that is its buffer's own view
    stays as it is, and one that lies in a buffer otherwise (an output that the model passed through, say) is copied
    out first, because the order in which the buffers are written is not defined. Copies are queued on the current
    stream, as the replay behind them is. A host tensor may be written to as soon as the call has returned.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from cgplan.buffers.static import StaticBuffers
from cgplan.errors import InputError

CopyIn = Callable[[Sequence[torch.Tensor], int], None]
PLAIN = (torch.Tensor, torch.nn.Parameter)


def as_plain(value: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or its elements where it is of a subclass: what lies at that one's address, if it has one, is
    its own affair.
    """
    if type(value) in PLAIN:
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=value.device).copy_(value)


def no_memory(name: str) -> InputError:
    """The error for a tensor whose storage was freed."""
    return InputError(
        f"input {name!r} has no memory: its storage was freed, or is that of a tensor of zeros that torch made up",
        remedy="Pass a tensor that holds its numbers, such as .clone() gives before the storage is freed.",
    )


class BatchCopy(ABC):
    """Brings batches of one size into the static buffers, see Note [Copying in].

    Its functions take the batch's tensors in the order of the buffers, their names, shapes, dtypes and devices checked,
    and the current stream's handle, which devices without streams do not look at.

    Args:
        buffers: Where to.
        num_tokens, num_reqs: The batch.
        padded_tokens, padded_reqs: What it is padded to.
        copy_inputs: Whether tensors from elsewhere are copied in; False: they are refused with an InputError.
    """

    def __init__(
        self,
        buffers: StaticBuffers,
        num_tokens: int,
        num_reqs: int,
        padded_tokens: int,
        padded_reqs: int,
        *,
        copy_inputs: bool,
    ) -> None:
        self._names = tuple(buffers.buffers)
        self._buffers = tuple(buffers.buffers.values())
        self._owns = buffers.owns
        self._marks = buffers.marks
        self._tokens, self._reqs = num_tokens, num_reqs
        self._copy_inputs = copy_inputs
        self._rows = [buffer.count(num_tokens, num_reqs) for buffer in self._buffers]
        self._padded_rows = [buffer.count(padded_tokens, padded_reqs) for buffer in self._buffers]
        self.look_at_writes()

    def look_at_writes(self) -> None:
        """Prepare for the buffers that the model is known to write into, at first and whenever there are more."""
        # Rows up to which padding is due after each batch, whatever came before it; 0 for none.
        self._least_rows = [
            padded if padded > rows and (buffer.spec.pad == "last" or buffer.written) else 0
            for buffer, rows, padded in zip(self._buffers, self._rows, self._padded_rows, strict=True)
        ]
        self._always_pads = any(self._least_rows)

    @abstractmethod
    def run(self, values: Sequence[torch.Tensor], stream: int) -> None:
        """Copy a batch in, with padding behind it. Raises InputError for tensors that may not be copied."""

    def pad(self, values: Sequence[torch.Tensor], stream: int) -> None:  # noqa: ARG002
        """Reset the padding that needs it, most often none: the caller has written the rows of the batch. ``values``
        are not looked at.
        """
        marks = self._marks
        if marks.tokens > self._tokens or marks.reqs > self._reqs or marks.exposed_tokens or self._always_pads:
            self._reset_padding(stream)
        marks.tokens, marks.reqs = self._tokens, self._reqs

    @abstractmethod
    def _reset_padding(self, stream: int) -> None:
        """Make the rows behind the batch padding, as far as an earlier one reached."""

    def quickest(self, values: Sequence[torch.Tensor]) -> CopyIn:  # noqa: ARG002
        """What does the work of ``run`` soonest for tensors of the devices and strides of these."""
        return self.run

    def _is_own(self, index: int, value: torch.Tensor) -> bool:
        """Whether a tensor is its buffer's own view, and stays as it is. Refuses others where copies are off."""
        tensor, address = self._buffers[index].tensor, value.data_ptr()
        if address == tensor.data_ptr() and value.stride() == tensor.stride():
            return True
        if not address and value.numel():
            raise no_memory(self._names[index])
        if not self._copy_inputs:
            raise InputError(
                f"input {self._names[index]!r} does not lie in its static buffer, and cudagraph_copy_inputs is false",
                remedy="Write into the tensors of runner.stage(...) or runner.input_views(...), or set "
                "cudagraph_copy_inputs: true.",
            )
        return False


class Copier(ABC):
    """Makes a BatchCopy for each size of batch.

    Args:
        buffers: Where to; the caller owns them.
        copy_inputs: As for BatchCopy.

    Attributes:
        name: How it copies, for reports.
    """

    name: str

    def __init__(self, buffers: StaticBuffers, *, copy_inputs: bool) -> None:
        self.buffers, self.copy_inputs = buffers, copy_inputs
        self._copies: weakref.WeakSet[BatchCopy] = weakref.WeakSet()

    def prepare(self, num_tokens: int, num_reqs: int, padded_tokens: int, padded_reqs: int) -> BatchCopy:
        """For batches of one size; arguments as for BatchCopy."""
        copy = self._prepare(num_tokens, num_reqs, padded_tokens, padded_reqs)
        self._copies.add(copy)
        return copy

    @abstractmethod
    def _prepare(self, num_tokens: int, num_reqs: int, padded_tokens: int, padded_reqs: int) -> BatchCopy:
        """Make it."""

    def note_writes(self, before: list[int]) -> None:
        """Say that the model's own code has run on the static buffers, whose ``versions`` were ``before``.

        What it wrote into gets its padding reset with every batch from now on, as what warm-ups wrote into does.
        """
        if self.buffers.note_writes(before):
            for copy in self._copies:
                copy.look_at_writes()

    def close(self) -> None:
        """Free what copies go through."""
        return


class TorchCopier(Copier):
    """Copies by torch's operators: one launch for each dtype, one for each input with padding to reset.

    Args:
        buffers: Where to; the caller owns them.
        copy_inputs: As for BatchCopy.
    """

    name = "torch operators"

    def _prepare(self, num_tokens: int, num_reqs: int, padded_tokens: int, padded_reqs: int) -> TorchBatchCopy:
        return TorchBatchCopy(
            self.buffers, num_tokens, num_reqs, padded_tokens, padded_reqs, copy_inputs=self.copy_inputs
        )


class TorchBatchCopy(BatchCopy):
    """One size of batch, copied by torch's operators."""

    def __init__(self, buffers: StaticBuffers, *counts: int, copy_inputs: bool) -> None:
        super().__init__(buffers, *counts, copy_inputs=copy_inputs)
        self._targets = [buffer.view(rows) for buffer, rows in zip(self._buffers, self._rows, strict=True)]

    @torch.no_grad()
    def run(self, values: Sequence[torch.Tensor], stream: int) -> None:
        """Copy a batch in, with padding behind it."""
        # _foreach_copy_ is one launch for tensors of one dtype and device, and a loop over all for others
        groups: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for index, value in enumerate(map(as_plain, values)):
            if self._is_own(index, value):
                continue
            targets, sources = groups.setdefault((value.dtype, value.device), ([], []))
            targets.append(self._targets[index])
            sources.append(value.clone() if self._owns(value) else value)
        for targets, sources in groups.values():
            torch._foreach_copy_(targets, sources)
        self.pad(values, stream)

    def _reset_padding(self, stream: int) -> None:  # noqa: ARG002
        with torch.no_grad():
            for buffer, rows, padded in zip(self._buffers, self._rows, self._padded_rows, strict=True):
                buffer.pad(rows, padded)
