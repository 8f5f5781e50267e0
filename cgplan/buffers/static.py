"""Static buffers: the memory that graphs read their inputs from. Owned by the runner, outside the
graph pool.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cgplan.config import Extent, Input
from cgplan.errors import CaptureMemoryError, first_line

Tensors = Mapping[str, Tensor]


def torch_dtype(spec: Input) -> torch.dtype:
    return getattr(torch, spec.dtype)  # type: ignore[no-any-return]


@dataclass(slots=True)
class Marks:
    """How far batches reach into static buffers; rows behind that hold padding.

    Attributes:
        tokens, reqs: Of the last batch; rows behind it are padding.
        exposed_tokens, exposed_reqs: Rows that the caller may have written at any time, through
            ``expose``.
    """

    tokens: int = 0
    reqs: int = 0
    exposed_tokens: int = 0
    exposed_reqs: int = 0

    def extend(self, num_tokens: int, num_reqs: int) -> None:
        """Say that the caller may have written the rows of such a batch, and that no padding was
        reset.
        """
        self.tokens, self.reqs = max(self.tokens, num_tokens), max(self.reqs, num_reqs)


@dataclass(slots=True, eq=False)
class StaticBuffer:
    """One input's memory for the largest batch.

    Attributes:
        tensor: The memory; its address never changes.
        row_dim, rows: The dimension that counts rows of the batch, and how; None for a fixed shape.
        marks: Shared by the buffers of a model.
        written: Whether the model itself writes into it, so that padding does not last from one
            replay to the next.
        version: torch's count of writes to the memory when it was last all padding.
    """

    spec: Input
    tensor: Tensor
    row_dim: int | None
    rows: Extent | None
    marks: Marks
    written: bool = False
    version: int = 0
    _views: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def allocate(
        cls, spec: Input, num_tokens: int, num_reqs: int, device: torch.device, marks: Marks
    ) -> StaticBuffer:
        extents, row_dim = spec.extents, spec.row_dim
        shape = [extent.size(num_tokens, num_reqs) for extent in extents]
        # a tensor made in inference mode could be written to only there
        with torch.inference_mode(False):
            tensor = torch.zeros(shape, dtype=torch_dtype(spec), device=device)
        made = cls(spec, tensor, row_dim, None if row_dim is None else extents[row_dim], marks)
        made.clear()
        return made

    @property
    def filled(self) -> int:
        """Rows from here on hold padding, in a batch that has been staged."""
        return self.count(self.marks.tokens, self.marks.reqs)

    def count(self, num_tokens: int, num_reqs: int) -> int:
        """Rows of a batch; 0 for a fixed shape."""
        return 0 if self.rows is None else self.rows.size(num_tokens, num_reqs)

    def view(self, rows: int) -> Tensor:
        """The first ``rows`` rows; all of a buffer of fixed shape. Views are made once and kept:
        users get ``view(rows).detach()``, whose shape and strides they may change in place.
        """
        if self.row_dim is None:
            return self.tensor
        if rows not in self._views:
            with torch.inference_mode(False):  # for the same reason as the memory
                self._views[rows] = self.tensor.narrow(self.row_dim, 0, rows)
        return self._views[rows]

    def pad(self, rows: int, padded_rows: int) -> None:
        """Make the rows behind a batch of ``rows`` rows padding again, as far as an earlier batch
        reached.
        """
        if self.row_dim is None:
            return
        marks = self.marks
        reach = self.count(
            max(marks.tokens, marks.exposed_tokens), max(marks.reqs, marks.exposed_reqs)
        )
        if self.spec.pad == "last":
            if padded_rows > rows > 0:
                tail = self.tensor.narrow(self.row_dim, rows, padded_rows - rows)
                tail.copy_(self.tensor.narrow(self.row_dim, rows - 1, 1))
        elif (end := max(reach, padded_rows if self.written else 0)) > rows:
            self.tensor.narrow(self.row_dim, rows, end - rows).fill_(self.spec.pad)

    def clear(self) -> None:
        """Make every row padding again."""
        self.tensor.fill_(0 if self.spec.pad == "last" else self.spec.pad)
        self.version = self.tensor._version

    def restore(self) -> None:
        """The same after warm-ups: a model that wrote into its padding will do so on every
        replay.
        """
        # torch's operators count writes, kernels of others do not
        counted = self.tensor._version != self.version
        before = self.tensor.clone()
        self.clear()
        # NaN equals nothing
        bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (before, self.tensor)]
        self.written = self.written or counted or not torch.equal(*bits)


class StaticBuffers:
    """All inputs and metadata of a model, by name, for the largest batch that is captured with such
    ``sizes``.

    Attributes:
        bounds: First address and the one behind the last of each buffer in turns, ascending.

    Raises:
        CaptureMemoryError: the device has no memory for them.
    """

    def __init__(
        self, specs: Mapping[str, Input], num_tokens: int, num_reqs: int, device: torch.device
    ) -> None:
        self.marks = Marks()
        self.buffers: dict[str, StaticBuffer] = {}
        for name, spec in specs.items():
            try:
                self.buffers[name] = StaticBuffer.allocate(
                    spec, num_tokens, num_reqs, device, self.marks
                )
            except RuntimeError as error:
                if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(
                    error
                ):
                    raise
                raise CaptureMemoryError(  # a GPU's, the CPU's
                    f"no memory for static buffers of {num_tokens} tokens: {first_line(error)}",
                    remedy="Lower compilation.max_cudagraph_capture_size, or the fixed dimensions "
                    "of the inputs.",
                ) from error
        tensors = [buffer.tensor for buffer in self.buffers.values()]
        # An address lies in a buffer where an odd number of bounds is at its left.
        self.bounds = sorted(
            at for t in tensors if t.nbytes for at in (t.data_ptr(), t.data_ptr() + t.nbytes)
        )

    @property
    def nbytes(self) -> int:
        return sum(b.tensor.nbytes for b in self.buffers.values())

    def views(self, num_tokens: int, num_reqs: int) -> dict[str, Tensor]:
        """The rows that a graph for this batch reads, by name, as new tensor objects that the
        caller may change.
        """
        return {
            name: b.view(b.count(num_tokens, num_reqs)).detach() for name, b in self.buffers.items()
        }

    def versions(self) -> list[int]:
        return [buffer.tensor._version for buffer in self.buffers.values()]

    def note_writes(self, before: list[int]) -> bool:
        """Find the buffers that the model has written into since ``versions`` gave ``before``;
        whether there is a new one.
        """
        now = self.versions()
        new = [
            b
            for b, v, w in zip(self.buffers.values(), before, now, strict=True)
            if v != w and not b.written
        ]
        for buffer in new:
            buffer.written = True
        return bool(new)

    def clear(self) -> None:
        """Make every row padding again: captures after the first batch have to begin with
        padding.
        """
        for buffer in self.buffers.values():
            buffer.clear()
        self.marks.tokens = self.marks.reqs = 0

    def restore(self) -> None:
        """The same after warm-ups and captures, and find the buffers into whose padding the model
        has written.
        """
        for buffer in self.buffers.values():
            buffer.restore()
        self.marks.tokens = self.marks.reqs = 0

    def expose(self, num_tokens: int, num_reqs: int) -> dict[str, Tensor]:
        """Views for the caller to write into; from now on their rows are never taken for
        padding.
        """
        marks = self.marks
        marks.exposed_tokens = max(marks.exposed_tokens, num_tokens)
        marks.exposed_reqs = max(marks.exposed_reqs, num_reqs)
        return self.views(num_tokens, num_reqs)


class StaticBoxes(dict[tuple[int, ...], StaticBuffers]):
    """The static buffers of a model by the sizes of its named dimensions: by ``()`` where only rows
    vary.
    """

    @property
    def nbytes(self) -> int:
        return sum(buffers.nbytes for buffers in self.values())

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor begins in one of the buffers."""
        return any(bisect_right(buffers.bounds, tensor.data_ptr()) & 1 for buffers in self.values())

    def restore(self) -> None:
        """See StaticBuffers."""
        for buffers in self.values():
            buffers.restore()

    def clear_all(self) -> None:
        """Make all rows padding."""
        for buffers in self.values():
            buffers.clear()

    @contextmanager
    def on_padding(self) -> Iterator[None]:
        """A block for captures between batches: all rows are padding in it, and get their bytes
        back.
        """
        marks = [(buffers.marks, replace(buffers.marks)) for buffers in self.values()]
        kept = [
            (b, b.tensor.clone()) for buffers in self.values() for b in buffers.buffers.values()
        ]
        self.clear_all()
        try:
            yield
        finally:
            self.restore()
            with torch.no_grad():
                for buffer, tensor in kept:
                    buffer.tensor.copy_(tensor)
            for now, before in marks:
                now.extend(before.tokens, before.reqs)


def example_batch(
    specs: Mapping[str, Input], num_tokens: int, num_reqs: int, device: torch.device, seed: int = 0
) -> dict[str, Tensor]:
    """A batch on the device as the `example` keys declare it, for warm-up and bench; equal seeds,
    equal batches.
    """
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: _example(spec, num_tokens, num_reqs, device, generator)
        for name, spec in specs.items()
    }


def _example(
    spec: Input, num_tokens: int, num_reqs: int, device: torch.device, generator: torch.Generator
) -> Tensor:
    shape, dtype, example = (
        [e.size(num_tokens, num_reqs) for e in spec.extents],
        torch_dtype(spec),
        spec.example,
    )
    if example is None:
        example = "normal" if dtype.is_floating_point else 0 if spec.pad == "last" else spec.pad
    if isinstance(example, tuple):
        return torch.randint(
            *example, shape, dtype=torch.int64, device=device, generator=generator
        ).to(dtype)
    if example == "normal":
        return torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(dtype)
    if example == "arange":
        count = torch.Size(shape).numel()
        return torch.arange(count, device=device).reshape(shape).to(dtype)
    if example == "spread":
        rows = torch.arange(shape[spec.row_dim or 0], device=device)
        return (
            (rows * num_tokens // max(num_reqs, 1)).clamp(max=num_tokens).to(dtype).reshape(shape)
        )
    return torch.full(shape, example, dtype=dtype, device=device)
