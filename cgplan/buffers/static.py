"""Static buffers: memory outside the graph pool that graphs read; the runner owns it."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cgplan.config import Extent, Input
from cgplan.errors import CaptureMemoryError, first_line

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
        # only torch's operators count writes
        self.written |= self.tensor._version != self.version
        before = self.tensor.clone().reshape(-1)
        self.fill_padding()
        now = self.tensor.reshape(-1)
        # as bytes: NaN equals nothing
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
        self.buffers: dict[str, StaticBuffer] = {}
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
        self.bounds: list[int] = []
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
