"""Static buffers, which graphs read and the runner owns, outside the graph pool; tensors of a
call are copied into them and padded.

Note [Copying in]
    Sources may lie anywhere, and overlap the buffers: a buffer's own view stays, other tensors in
    buffers are cloned first. The caller may write to a host tensor once the call has returned.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from cgplan.config import Extent, Input
from cgplan.errors import CaptureMemoryError, InputError, first_line

Tensors = Mapping[str, Tensor]


def torch_dtype(spec: Input) -> torch.dtype:
    return getattr(torch, spec.dtype)  # type: ignore[no-any-return]


def pad_value(spec: Input) -> float:
    """0 where padding repeats the last row."""
    return 0 if spec.pad == "last" else spec.pad


@dataclass(slots=True)
class Marks:
    """How far batches reach into static buffers. The caller may write exposed rows at any time."""

    tokens: int = 0
    reqs: int = 0
    exposed_tokens: int = 0
    exposed_reqs: int = 0

    def extend(
        self,
        num_tokens: int,
        num_reqs: int,
    ) -> None:
        self.tokens = max(self.tokens, num_tokens)
        self.reqs = max(self.reqs, num_reqs)

    def clear(self) -> None:
        """All rows but exposed ones hold padding."""
        self.tokens = 0
        self.reqs = 0


class StaticBuffer:
    """One input's memory for the largest batch.

    Attributes:
        tensor: Its address never changes.
        row_dim, rows: The dimension that counts rows, and how.
        written: The model writes into it: padding lasts for one replay.
        version: torch's count of writes when it was all padding.
    """

    def __init__(
        self,
        spec: Input,
        num_tokens: int,
        num_reqs: int,
        device: torch.device,
        marks: Marks,
    ) -> None:
        extents = spec.extents
        shape = [extent.size(num_tokens, num_reqs) for extent in extents]
        self.spec = spec
        self.row_dim = row_dim = spec.row_dim
        self.rows: Extent | None = None if row_dim is None else extents[row_dim]
        self.marks = marks
        self.written = False
        self._views: dict[int, Tensor] = {}
        # tensors of inference mode can be written only there
        with torch.inference_mode(False):
            self.tensor = torch.zeros(
                shape,
                dtype=torch_dtype(spec),
                device=device,
            )
        self.fill_padding()

    def count(
        self,
        num_tokens: int,
        num_reqs: int,
    ) -> int:
        """0 for a fixed shape."""
        return 0 if self.rows is None else self.rows.size(num_tokens, num_reqs)

    def view(self, rows: int) -> Tensor:
        """The first rows; all of a fixed shape. Users get ``detach()`` of it."""
        if self.row_dim is None:
            return self.tensor
        view = self._views.get(rows)
        if view is None:
            with torch.inference_mode(False):
                view = self.tensor.narrow(self.row_dim, 0, rows)
            self._views[rows] = view
        return view

    def pad(
        self,
        rows: int,
        padded_rows: int,
    ) -> None:
        """The rows after a batch."""
        if self.row_dim is None:
            return
        if self.spec.pad == "last":
            if padded_rows > rows > 0:
                tail = self.tensor.narrow(self.row_dim, rows, padded_rows - rows)
                tail.copy_(self.tensor.narrow(self.row_dim, rows - 1, 1))
            return
        marks = self.marks
        tokens = max(marks.tokens, marks.exposed_tokens)
        reqs = max(marks.reqs, marks.exposed_reqs)
        end = self.count(tokens, reqs)
        if self.written:
            end = max(end, padded_rows)
        if end > rows:
            self.tensor.narrow(self.row_dim, rows, end - rows).fill_(self.spec.pad)

    def fill_padding(self) -> None:
        self.tensor.fill_(pad_value(self.spec))
        self.version = self.tensor._version

    def refill(self) -> None:
        """``fill_padding``; notes whether the model wrote into it."""
        self.written |= self.tensor._version != self.version
        before = self.tensor.clone().reshape(-1)
        self.fill_padding()
        now = self.tensor.reshape(-1)
        # only torch's operators count writes; as bytes: NaN equals nothing
        self.written |= not torch.equal(before.view(torch.uint8), now.view(torch.uint8))


class StaticBuffers:
    """All inputs and metadata, for the largest batch.

    Attributes:
        bounds: Begin and end of each buffer, ascending.

    Raises:
        CaptureMemoryError: the device has no memory for them.
    """

    def __init__(
        self, specs: Mapping[str, Input], num_tokens: int, num_reqs: int, device: torch.device
    ) -> None:
        self.marks = Marks()
        self.buffers = {}
        try:
            for name, spec in specs.items():
                buffer = StaticBuffer(spec, num_tokens, num_reqs, device, self.marks)
                self.buffers[name] = buffer
        except RuntimeError as error:
            on_cpu = "allocate memory" in str(error)
            if not on_cpu and not isinstance(error, torch.OutOfMemoryError):
                raise
            raise CaptureMemoryError(
                f"no memory for static buffers of {num_tokens} tokens: {first_line(error)}",
                remedy="Lower compilation.max_cudagraph_capture_size, or fixed dimensions.",
            ) from error
        self.bounds = []
        for buffer in self.buffers.values():
            start = buffer.tensor.data_ptr()
            nbytes = buffer.tensor.nbytes
            if nbytes:
                self.bounds += [start, start + nbytes]
        self.bounds.sort()

    @property
    def nbytes(self) -> int:
        return sum(buffer.tensor.nbytes for buffer in self.buffers.values())

    def views(
        self,
        num_tokens: int,
        num_reqs: int,
    ) -> dict[str, Tensor]:
        return {
            name: buffer.view(buffer.count(num_tokens, num_reqs)).detach()
            for name, buffer in self.buffers.items()
        }

    def versions(self) -> list[int]:
        return [buffer.tensor._version for buffer in self.buffers.values()]

    def note_writes(
        self,
        before: list[int],
    ) -> bool:
        """Whether the model has written into more buffers since ``versions`` gave ``before``."""
        is_new = False
        for buffer, version in zip(self.buffers.values(), before, strict=True):
            if buffer.tensor._version != version and not buffer.written:
                buffer.written = True
                is_new = True
        return is_new

    def fill_padding(self) -> None:
        for buffer in self.buffers.values():
            buffer.fill_padding()
        self.marks.clear()

    def refill(self) -> None:
        for buffer in self.buffers.values():
            buffer.refill()
        self.marks.clear()

    def expose(
        self,
        num_tokens: int,
        num_reqs: int,
    ) -> dict[str, Tensor]:
        """For the caller to write into; never padding again."""
        marks = self.marks
        marks.exposed_tokens = max(marks.exposed_tokens, num_tokens)
        marks.exposed_reqs = max(marks.exposed_reqs, num_reqs)
        return self.views(num_tokens, num_reqs)


class StaticBoxes(dict[tuple[int, ...], StaticBuffers]):
    """By the sizes of named dimensions, ``()`` without any; made on demand.

    Args:
        rows: Tokens and requests of the largest batch, by sizes.
        specs_at: The tensors of a batch, by sizes.
    """

    def __init__(
        self,
        rows: Mapping[tuple[int, ...], tuple[int, int]],
        specs_at: Callable[[tuple[int, ...]], Mapping[str, Input]],
        device: torch.device,
    ) -> None:
        super().__init__()
        self._rows = rows
        self._specs_at = specs_at
        self._device = device

    def __missing__(self, sizes: tuple[int, ...]) -> StaticBuffers:
        tokens, reqs = self._rows[sizes]
        made = StaticBuffers(self._specs_at(sizes), tokens, reqs, self._device)
        self[sizes] = made
        return made

    @property
    def nbytes(self) -> int:
        return sum(buffers.nbytes for buffers in self.values())

    def owns(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        return any(bisect_right(buffers.bounds, address) % 2 for buffers in self.values())

    def refill(self) -> None:
        for buffers in self.values():
            buffers.refill()

    def fill_padding(self) -> None:
        for buffers in self.values():
            buffers.fill_padding()

    @contextmanager
    def on_padding(self) -> Iterator[None]:
        """Captures in the block see padding; afterwards the bytes are as before."""
        marks = []
        kept = []
        for buffers in self.values():
            marks.append((buffers.marks, replace(buffers.marks)))
            for buffer in buffers.buffers.values():
                kept.append((buffer.tensor, buffer.tensor.clone()))
        self.fill_padding()
        try:
            yield
        finally:
            self.refill()
            with torch.no_grad():
                for tensor, before in kept:
                    tensor.copy_(before)
            for now, earlier in marks:
                now.extend(earlier.tokens, earlier.reqs)


def example_batch(
    specs: Mapping[str, Input], num_tokens: int, num_reqs: int, device: torch.device, seed: int = 0
) -> dict[str, Tensor]:
    """By the `example` keys; equal seeds give equal batches."""
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: _example(spec, num_tokens, num_reqs, generator).to(torch_dtype(spec))
        for name, spec in specs.items()
    }


def _example(
    spec: Input,
    num_tokens: int,
    num_reqs: int,
    generator: torch.Generator,
) -> Tensor:
    device = generator.device
    dtype = torch_dtype(spec)
    shape = [extent.size(num_tokens, num_reqs) for extent in spec.extents]
    example = spec.example
    if example is None:
        example = pad_value(spec)
        if dtype.is_floating_point:
            example = "normal"
    if isinstance(example, tuple):
        return torch.randint(
            *example,
            shape,
            dtype=torch.int64,
            device=device,
            generator=generator,
        )
    if example == "normal":
        return torch.randn(
            shape,
            dtype=torch.float32,
            device=device,
            generator=generator,
        )
    if example == "arange":
        count = torch.Size(shape).numel()
        return torch.arange(count, device=device).reshape(shape)
    if example == "spread":
        rows = torch.arange(shape[spec.row_dim or 0], device=device)
        spread = rows * num_tokens // max(num_reqs, 1)
        return spread.clamp(max=num_tokens).reshape(shape)
    return torch.full(
        shape,
        example,
        dtype=dtype,
        device=device,
    )


Values = Sequence[Tensor]
CopyIn = Callable[[Values, int, bool], None]
Group = tuple[list[Tensor], list[Tensor]]


class BatchCopy:
    """For batches of one size.

    Its functions take the batch's checked tensors in the order of the buffers, the current stream's
    handle, and whether they are dense and like the last call's: ``PreparedCall.is_alike``.
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
        self._always_padded_to = list(self._padded_rows)  # for copy_kernel.py
        for index, buffer in enumerate(self._buffers):
            keeps_padding = buffer.spec.pad != "last" and not buffer.written
            if keeps_padding or self._padded_rows[index] <= self._rows[index]:
                self._always_padded_to[index] = 0
        self._always_pads = any(self._always_padded_to)

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
        """Reset padding after the batch: all that one written in place needs."""
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
