"""Copies by one kernel launch: all inputs of a batch, from the device and from the host, and their padding."""

from __future__ import annotations

import ctypes
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cgplan.buffers.copier import PLAIN, BatchCopy, Copier, CopyIn, as_plain
from cgplan.buffers.copy_kernel import ARGUMENT_BYTES, THREADS, CopyKernel, LaunchConfig
from cgplan.buffers.pinned import ALIGNMENT, StagingBlocks
from cgplan.buffers.static import StaticBuffer, StaticBuffers

_JOB = struct.Struct("=16s4Q6I8x")
_HEAD = struct.calcsize("=4I")
_write_head = struct.Struct("=4I").pack_into
_COUNTS: dict[str | None, int] = {"num_tokens": 1, "num_reqs": 2}
_MOST_BLOCKS = 512  # of threads, for one input
_BYTES_A_BLOCK = THREADS * 64
_address = torch.Tensor.data_ptr
_memcpy = ctypes.CDLL(None).memcpy
_memcpy_small = ctypes.PyDLL(None).memcpy  # a few kilobytes are copied before the interpreter's lock has changed hands
for _function in (_memcpy, _memcpy_small):
    _function.argtypes, _function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None


@dataclass(frozen=True, slots=True, eq=False)
class _Arguments:
    """The arguments of one launch, in memory.

    Attributes:
        memory: The kernel's Batch, or InlineBatch.
        pointers: The list of arguments: one, the address of the memory.
        pointers_at: The address of that.
        function: The kernel that takes them.
    """

    memory: ctypes.Array[ctypes.c_char]
    pointers: ctypes.Array[ctypes.c_void_p]
    pointers_at: int
    function: int

    @classmethod
    def of(cls, kernel: CopyKernel, jobs: Sequence[bytes], offsets: Sequence[int] | None = None) -> _Arguments:
        """For jobs whose sources are written later, or lie inline at these offsets."""
        sources = struct.pack(f"={kernel.inputs}Q", *(offsets or ()), *[0] * (kernel.inputs - len(offsets or ())))
        packed = b"".join((bytes(_HEAD), sources, *jobs)).ljust(_batch_bytes(kernel), b"\0")
        memory = ctypes.create_string_buffer(packed, len(packed) if offsets is None else ARGUMENT_BYTES)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
        function = kernel.function if offsets is None else kernel.inline_function
        return cls(memory, pointers, ctypes.addressof(pointers), function)


def _batch_bytes(kernel: CopyKernel) -> int:
    return _HEAD + kernel.inputs * (8 + _JOB.size)


@dataclass(frozen=True, slots=True)
class _Target:
    """A static buffer as the kernel sees it: slices of rows of bytes, one slice for each index in front of the rows.

    Attributes:
        address: Of its memory.
        pattern: The padding value, repeated to 16 bytes.
        last: Whether padding repeats the last row.
        slices, pitch: Their number, and the bytes from one to the next.
        row_bytes: Of a row within a slice; of all for a fixed shape.
        counted: What the rows count, and how: as in the kernel's Job.
    """

    address: int
    pattern: bytes
    last: bool
    slices: int
    pitch: int
    row_bytes: int
    counted: tuple[int, int, int]

    @classmethod
    def of(cls, buffer: StaticBuffer) -> _Target:
        tensor, row_dim, dim, pad = buffer.tensor, buffer.row_dim, buffer.rows, buffer.spec.pad
        one = torch.zeros(1, dtype=tensor.dtype, device="cpu").fill_(0 if pad == "last" else pad)
        pattern = bytes(one.untyped_storage().tolist()) * (ALIGNMENT // one.itemsize)
        if row_dim is None or dim is None:
            return cls(tensor.data_ptr(), pattern, False, 1, tensor.nbytes, tensor.nbytes, (0, 0, 0))
        row_bytes = tensor.shape[row_dim + 1 :].numel() * tensor.itemsize
        return cls(
            tensor.data_ptr(),
            pattern,
            pad == "last",
            tensor.shape[:row_dim].numel(),
            tensor.shape[row_dim] * row_bytes,
            row_bytes,
            (_COUNTS[dim.symbol], dim.factor, dim.offset),
        )

    def nbytes(self, rows: int) -> int:
        """Bytes of so many rows."""
        return self.slices * self.row_bytes * (rows if self.counted[0] else 1)

    def job(self, rows: int, least_rows: int) -> bytes:
        """The kernel's Job for a batch of so many rows."""
        nbytes = self.nbytes(rows) // self.slices
        return _JOB.pack(
            self.pattern, self.address, self.pitch, nbytes, self.row_bytes, self.slices, *self.counted, least_rows,
            self.last,
        )  # fmt: skip


class KernelCopier(Copier):
    """Copies by ``copy_rows``, see Note [Launching] in copy_kernel.py.

    Args:
        buffers: Where to; the caller owns them.
        kernel: For as many inputs or more.
        blocks: Where host tensors are staged.
        copy_inputs: As for BatchCopy.
    """

    name = "one kernel"

    def __init__(self, buffers: StaticBuffers, kernel: CopyKernel, blocks: StagingBlocks, *, copy_inputs: bool) -> None:
        super().__init__(buffers, copy_inputs=copy_inputs)
        self.kernel, self.blocks = kernel, blocks
        tensors = [buffer.tensor for buffer in buffers.buffers.values()]
        self.targets = [_Target.of(buffer) for buffer in buffers.buffers.values()]
        self.device = tensors[0].device

    def _prepare(self, num_tokens: int, num_reqs: int, padded_tokens: int, padded_reqs: int) -> KernelBatchCopy:
        return KernelBatchCopy(self, num_tokens, num_reqs, padded_tokens, padded_reqs)

    def config(self, sizes: Sequence[int]) -> LaunchConfig:
        """A launch that writes so many bytes of each input."""
        blocks = max(-(-size // (_BYTES_A_BLOCK * t.slices)) for size, t in zip(sizes, self.targets, strict=True))
        slices = min(max(target.slices for target in self.targets), _MOST_BLOCKS)
        return LaunchConfig(min(max(blocks, 1), _MOST_BLOCKS), len(sizes), slices, THREADS, 1, 1)

    def close(self) -> None:
        """Free the staging blocks."""
        self.blocks.close()


class KernelBatchCopy(BatchCopy):
    """One size of batch. What a launch needs lies ready; a call writes the addresses of its tensors into it."""

    def __init__(self, copier: KernelCopier, num_tokens: int, num_reqs: int, padded_tokens: int, padded_reqs: int):
        self._kernel, self._launch, self._targets = copier.kernel, copier.kernel.launch, copier.targets
        # Arguments for a batch that rides in them, with the place and the size of each input.
        self._inline: tuple[_Arguments, list[tuple[ctypes.c_void_p, ctypes.c_size_t]]] | None = None
        self._passed: list[int] | None = None  # addresses of device tensors that lie in the arguments and may be read
        super().__init__(
            copier.buffers, num_tokens, num_reqs, padded_tokens, padded_reqs, copy_inputs=copier.copy_inputs
        )
        self._blocks, self._bounds, self._device = copier.blocks, copier.buffers.bounds, copier.device
        self._is_plain = all(target.slices == 1 for target in copier.targets)
        self._low, self._high = self._bounds[0], self._bounds[-1]
        self._own = [target.address for target in copier.targets]
        self._sizes = [target.nbytes(rows) for target, rows in zip(copier.targets, self._rows, strict=True)]
        self._places = [0]
        for size in self._sizes:
            self._places.append(self._places[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        self._staged_bytes = self._places.pop()
        # A batch behind a much larger one has far more padding to reset than rows to copy.
        self._near = padded_tokens
        self._config = copier.config(
            [target.nbytes(count) for target, count in zip(copier.targets, self._padded_rows, strict=True)]
        )
        self._wide_config = copier.config([buffer.tensor.nbytes for buffer in self._buffers])
        self._config_at, self._wide_config_at = ctypes.addressof(self._config), ctypes.addressof(self._wide_config)
        self._stream = 0
        self._write = struct.Struct(f"=4I{len(self._jobs)}Q").pack_into

    def look_at_writes(self) -> None:
        """Prepare for the buffers that the model is known to write into."""
        super().look_at_writes()
        self._jobs = [t.job(*counts) for t, *counts in zip(self._targets, self._rows, self._least_rows, strict=True)]
        self._arguments, self._passed = _Arguments.of(self._kernel, self._jobs), None
        if self._inline is not None:
            self._inline = self._inline_arguments()

    def run(self, values: Sequence[torch.Tensor], stream: int) -> None:
        """Copy any tensors in, with padding behind them."""
        sources, on_host, kept = [], [], []
        with torch.no_grad():
            for index, value in enumerate(map(as_plain, values)):
                if self._is_own(index, value):
                    sources.append(self._own[index])
                    continue
                plain = value.resolve_conj().resolve_neg().contiguous()
                if bisect_right(self._bounds, plain.data_ptr()) & 1:
                    plain = plain.clone()
                if plain.device != self._device:
                    on_host.append(index)
                kept.append(plain)  # until the launch is queued; later users of its memory are queued behind it
                sources.append(plain.data_ptr())
        if sources == self._own:
            self.pad(values, stream)
            return
        base = self._blocks.take(self._staged_bytes, stream) if on_host else 0
        for index in on_host:
            place = base + self._places[index]
            _memcpy(place, sources[index], self._sizes[index])
            sources[index] = place
        self._queue(sources, stream)

    def _reset_padding(self, stream: int) -> None:
        self._queue(self._own, stream)

    def quickest(self, values: Sequence[torch.Tensor]) -> CopyIn:
        """For contiguous tensors that are all on the device, or all on the host, less is left to ask."""
        plain = all(type(v) in PLAIN and v.is_contiguous() and not v.is_conj() and not v.is_neg() for v in values)
        if not plain or not self._copy_inputs:
            return self.run
        if all(value.device == self._device for value in values):
            return self._from_device
        if any(value.device.type != "cpu" for value in values):
            return self.run
        if self._staged_bytes > ARGUMENT_BYTES - _batch_bytes(self._kernel):
            return self._from_host
        if self._inline is None:
            self._inline = self._inline_arguments()
        return self._inline_from_host

    def _inline_arguments(self) -> tuple[_Arguments, list[tuple[ctypes.c_void_p, ctypes.c_size_t]]]:
        arguments = _Arguments.of(self._kernel, self._jobs, self._places)
        start = ctypes.addressof(arguments.memory) + _batch_bytes(self._kernel)
        places = [ctypes.c_void_p(start + place) for place in self._places]
        return arguments, list(zip(places, map(ctypes.c_size_t, self._sizes), strict=True))

    def _from_device(self, values: Sequence[torch.Tensor], stream: int) -> None:
        sources = list(map(_address, values))
        if sources == self._passed:  # the very addresses that were looked at and written below lie there still
            marks, arguments = self._marks, self._arguments
            _write_head(arguments.memory, 0, marks.tokens, marks.reqs, marks.exposed_tokens, marks.exposed_reqs)
            self._launch_with(arguments, stream)
            return
        if 0 in sources:
            self.run(values, stream)  # which refuses them
            return
        if max(sources) >= self._low and min(sources) < self._high:
            if sources == self._own and self._is_plain:
                self.pad(values, stream)
                return
            for source in sources:
                if bisect_right(self._bounds, source) & 1:
                    self.run(values, stream)
                    return
        self._queue(sources, stream)
        self._passed = sources

    def _from_host(self, values: Sequence[torch.Tensor], stream: int) -> None:
        sources = list(map(_address, values))
        if 0 in sources:
            self.run(values, stream)
            return
        base = self._blocks.take(self._staged_bytes, stream)
        places = [base + place for place in self._places]
        for place, source, size in zip(places, sources, self._sizes):  # noqa: B905  (of equal length)
            _memcpy(place, source, size)
        self._queue(places, stream)

    def _inline_from_host(self, values: Sequence[torch.Tensor], stream: int) -> None:
        arguments, places = self._inline  # type: ignore[misc]
        sources = list(map(_address, values))
        if 0 in sources:
            self.run(values, stream)
            return
        for (place, size), source in zip(places, sources):  # noqa: B905
            _memcpy_small(place, source, size)
        marks = self._marks
        _write_head(arguments.memory, 0, marks.tokens, marks.reqs, marks.exposed_tokens, marks.exposed_reqs)
        self._launch_with(arguments, stream)

    def _queue(self, sources: Sequence[int], stream: int) -> None:
        marks, arguments = self._marks, self._arguments
        self._passed = None
        self._write(arguments.memory, 0, marks.tokens, marks.reqs, marks.exposed_tokens, marks.exposed_reqs, *sources)
        self._launch_with(arguments, stream)

    def _launch_with(self, arguments: _Arguments, stream: int) -> None:
        marks = self._marks
        if stream != self._stream:
            self._config.stream = self._wide_config.stream = self._stream = stream
        near = marks.tokens <= self._near and marks.exposed_tokens <= self._near
        config = self._config_at if near else self._wide_config_at
        code = self._launch(config, arguments.function, arguments.pointers_at, None)
        if code:
            self._kernel.retry(code, config, arguments.function, arguments.pointers_at)
        marks.tokens, marks.reqs = self._tokens, self._reqs
