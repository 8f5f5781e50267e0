"""Copies and pads a batch by one kernel launch; host tensors go through pinned memory.

Note [Launching]
    A launch through Triton or a Python binding packs its arguments each time, as costly as the
    copies that it saves. Here they lie in memory for each size, and a call writes addresses there.
    The driver has read all when it returns, so a small batch from the host rides in the arguments.
"""

from __future__ import annotations

import ctypes
import math
import struct
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from ctypes import Array, c_char
from functools import cache
from importlib import resources
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cgplan.buffers.batch import is_dense
from cgplan.buffers.static import (
    BatchCopy,
    Copier,
    CopyIn,
    StaticBuffer,
    StaticBuffers,
    Values,
    pad_value,
)
from cgplan.errors import BackendError, CgplanError, first_line

ALIGNMENT = 16
LEAST_BYTES = 1 << 16


class Fence(Protocol):
    """As torch.cuda.Event."""

    def synchronize(self) -> None: ...


def stream_at(handle: int, device: torch.device) -> torch.cuda.Stream:
    if handle:
        return torch.cuda.ExternalStream(handle, device=device)
    return torch.cuda.default_stream(device)


def fence_behind(handle: int, device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream_at(handle, device))
    return event


def _release(wait: Callable[[], None], blocks: list[Tensor]) -> None:
    if blocks:
        wait()
    blocks.clear()


class StagingBlocks:
    """Two blocks of pinned memory, in turns. A fence after the work that reads a full block is
    waited for before the block is written again; another stream begins a new block.

    Args:
        new_fence: After a stream's work, by handle.
        wait: For the device.
    """

    def __init__(
        self,
        new_fence: Callable[[int], Fence],
        wait: Callable[[], None],
    ) -> None:
        self._new_fence = new_fence
        self._wait = wait
        self._blocks: list[Tensor] = []
        self._fences: list[Fence | None] = [None, None]
        self._turn = 0
        self._at = 0
        self._end = 0
        self._stream: int | None = None
        # torch hands freed blocks out while the device reads them
        weakref.finalize(self, _release, wait, self._blocks).atexit = False

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def take(
        self,
        nbytes: int,
        stream: int,
    ) -> int:
        """The address of ``nbytes`` bytes to write, and to read on ``stream``, before the next
        ``take``.
        """
        at = self._at
        if at + nbytes > self._end or stream != self._stream:
            if self._end and self._stream is not None:
                self._fences[self._turn] = self._new_fence(self._stream)
            self._turn = 1 - self._turn
            fence = self._fences[self._turn]
            if not self._blocks or self._blocks[0].nbytes < nbytes:
                self.close()
                size = max(LEAST_BYTES, 1 << (nbytes - 1).bit_length())
                self._blocks += [self.allocate(size), self.allocate(size)]  # both or none
            elif fence:
                fence.synchronize()
                self._fences[self._turn] = None
            block = self._blocks[self._turn]
            at = block.data_ptr()
            self._end = at + block.nbytes
            self._stream = stream
        self._at = at + nbytes
        return at

    def allocate(self, nbytes: int) -> Tensor:
        """The device reads it under its address. Raises CgplanError if the host has no more."""
        try:
            return torch.empty(
                nbytes,
                dtype=torch.uint8,
                device="cpu",
                pin_memory=True,
            )
        except RuntimeError as error:
            raise CgplanError(
                f"no pinned memory on the host for [{nbytes}] elements of torch.uint8: "
                f"{first_line(error)}",
                remedy="Free memory of the host, pass tensors on the device, or use runner.stage.",
            ) from error

    def close(self) -> None:
        """Waits for the device."""
        _release(self._wait, self._blocks)
        self._fences = [None, None]
        self._at = 0
        self._end = 0


INPUTS = 16
ARGUMENT_BYTES = 4096
THREADS = 256
_MOST_BLOCKS = 512
_BYTES_A_BLOCK = THREADS * 64
_JOB = struct.Struct("=16s4Q6I8x")
_HEAD = struct.Struct("=4I")
_BATCH_BYTES = _HEAD.size + INPUTS * (8 + _JOB.size)
# CUlaunchConfig
_CONFIG = struct.Struct("=7I4xQ16x")
_STREAM = struct.Struct("=Q")
_STREAM_AT = 32
_COUNTS: dict[str | None, int] = {
    "num_tokens": 1,
    "num_reqs": 2,
}
_OTHER_CONTEXT = (201, 400)  # CUDA_ERROR_INVALID_CONTEXT, _HANDLE
_address = Tensor.data_ptr
_memcpy = ctypes.CDLL(None).memcpy
# quicker than to release the interpreter's lock
_memcpy_small = ctypes.PyDLL(None).memcpy
for _function in (_memcpy, _memcpy_small):
    _function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    _function.restype = None


class CopyKernel(NamedTuple):
    """``launch`` is cuLaunchKernelEx, of (address of a CUlaunchConfig, function, address of
    pointers to arguments, None).
    """

    function: int
    inline_function: int
    launch: Callable[[int, int, int, None], int]


@cache
def libcuda() -> ctypes.CDLL:
    """Raises OSError without a driver."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def load_copy_kernel(index: int) -> CopyKernel | None:
    """None without cuda-bindings, NVRTC, or a new enough driver."""
    try:
        cubin = compile_copy_rows(torch.cuda.get_device_capability(index))
        driver = libcuda()
        with torch.cuda.device(index):
            # makes the context current
            torch.cuda.current_stream().synchronize()
            module = ctypes.c_void_p()  # stays loaded
            function = ctypes.c_void_p()
            inline_function = ctypes.c_void_p()
            codes = [driver.cuModuleLoadData(ctypes.byref(module), cubin)]
            functions = {
                b"copy_rows": function,
                b"copy_rows_inline": inline_function,
            }
            for name, found in functions.items():
                code = driver.cuModuleGetFunction(ctypes.byref(found), module, name)
                codes.append(code)
        launch = driver.cuLaunchKernelEx
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None
    if any(codes):
        return None
    launch.argtypes = [ctypes.c_void_p] * 4
    launch.restype = ctypes.c_int
    return CopyKernel(
        function.value or 0,
        inline_function.value or 0,
        launch,
    )


def compile_copy_rows(capability: tuple[int, int]) -> bytes:
    """Raises ImportError without cuda-bindings, RuntimeError of NVRTC."""
    from cuda.bindings import nvrtc

    def checked(result: tuple[Any, ...]) -> Any:
        code, *answer = result
        if int(code) != 0:
            raise RuntimeError(f"NVRTC answered {code}")
        return answer[0] if answer else None

    source = resources.files("cgplan.buffers").joinpath("copy_rows.cu").read_bytes()
    program = checked(nvrtc.nvrtcCreateProgram(source, b"copy_rows.cu", 0, [], []))
    try:
        options = [
            b"--gpu-architecture=sm_%d%d" % capability,
            b"-DINPUTS=%d" % INPUTS,
        ]
        checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
        cubin = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program)))
        checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin)


class _Arguments:
    """The kernel's Batch or, with offsets of sources, its InlineBatch."""

    def __init__(
        self,
        kernel: CopyKernel,
        jobs: Sequence[bytes],
        offsets: Sequence[int] = (),
    ) -> None:
        sources = struct.pack(f"={len(offsets)}Q", *offsets)
        head = bytes(_HEAD.size)
        packed = head + sources.ljust(8 * INPUTS, b"\0") + b"".join(jobs)
        nbytes = ARGUMENT_BYTES if offsets else _BATCH_BYTES
        self.memory = ctypes.create_string_buffer(packed.ljust(_BATCH_BYTES, b"\0"), nbytes)
        self._pointers = ctypes.c_void_p(ctypes.addressof(self.memory))
        self.at = ctypes.addressof(self._pointers)
        self.function = kernel.inline_function if offsets else kernel.function


class _Target:
    def __init__(self, buffer: StaticBuffer) -> None:
        tensor = buffer.tensor
        self.address = tensor.data_ptr()
        self.pads_last = buffer.spec.pad == "last"
        pad = torch.full(
            (1,),
            pad_value(buffer.spec),
            dtype=tensor.dtype,
            device="cpu",
        )
        copies = ALIGNMENT // pad.itemsize
        self.pattern = bytes(pad.untyped_storage().tolist()) * copies
        self.slices = 1
        self.row_bytes = tensor.nbytes
        self.counted = (0, 0, 0)
        if buffer.row_dim is not None and buffer.rows:
            rows = buffer.rows
            row = tensor.shape[buffer.row_dim + 1 :]
            self.row_bytes = row.numel() * tensor.itemsize
            self.slices = tensor.shape[: buffer.row_dim].numel()
            self.counted = _COUNTS[rows.symbol], rows.factor, rows.offset
        self.pitch = tensor.nbytes // self.slices

    def nbytes(self, rows: int) -> int:
        if not self.counted[0]:
            rows = 1
        return self.slices * self.row_bytes * rows

    def job(
        self,
        rows: int,
        least_rows: int,
    ) -> bytes:
        return _JOB.pack(
            self.pattern,
            self.address,
            self.pitch,
            self.nbytes(rows) // self.slices,
            self.row_bytes,
            self.slices,
            *self.counted,
            least_rows,
            self.pads_last,
        )


class KernelBatchCopy(BatchCopy):
    """Contiguous tensors are read in place on the device; small ones of the host ride in the
    arguments, others go through pinned memory. ``run`` takes the rest.
    """

    def __init__(
        self,
        copier: KernelCopier,
        *counts: int,
    ) -> None:
        self._copier = copier
        self._targets = copier.targets
        super().__init__(copier, *counts)
        self._in_place = [target.address for target in self._targets]
        self._write = struct.Struct(f"=4I{len(self._in_place)}Q").pack_into
        # the second covers all padding, after a much larger batch
        self._near = counts[2]
        near = list(map(_Target.nbytes, self._targets, self._padded_rows))
        far = [buffer.tensor.nbytes for buffer in self._buffers]
        self._configs = (copier.config(near), copier.config(far))
        self._near_at, self._far_at = map(ctypes.addressof, self._configs)
        self._stream = 0

    def look_at_writes(self) -> None:
        super().look_at_writes()
        self._sizes = []  # bytes
        self._offsets = []  # among staged bytes
        self._staged_bytes = 0
        jobs = []
        for target, rows, least in zip(
            self._targets, self._rows, self._always_padded_to, strict=True
        ):
            size = target.nbytes(rows)
            self._sizes.append(size)
            self._offsets.append(self._staged_bytes)
            self._staged_bytes += math.ceil(size / ALIGNMENT) * ALIGNMENT
            jobs.append(target.job(rows, least))
        kernel = self._copier.kernel
        self._arguments = _Arguments(kernel, jobs)
        self._held: list[int] = []  # addresses there, where none lies in a buffer
        self._fits_inline = self._staged_bytes <= ARGUMENT_BYTES - _BATCH_BYTES
        if self._fits_inline:
            self._inline = _Arguments(kernel, jobs, self._offsets)
            start = ctypes.addressof(self._inline.memory) + _BATCH_BYTES
            addresses = [ctypes.c_void_p(start + offset) for offset in self._offsets]
            sizes = map(ctypes.c_size_t, self._sizes)
            self._inline_addresses = list(zip(addresses, sizes, strict=True))

    def run(
        self,
        values: Values,
        stream: int,
        is_alike: bool = False,  # noqa: ARG002
    ) -> None:
        sources = list(self._in_place)
        on_host = []
        kept = []  # until the launch is queued
        with torch.no_grad():
            for index, value in enumerate(values):
                source = self._source(index, value)
                if source is None:
                    continue
                plain = source.resolve_conj().resolve_neg().contiguous()
                if plain.device != self._copier.device:
                    on_host.append(index)
                kept.append(plain)
                sources[index] = plain.data_ptr()
        if sources == self._in_place:
            self.pad(values, stream)
            return
        base = self._copier.blocks.take(self._staged_bytes, stream) if on_host else 0
        for index in on_host:
            address = base + self._offsets[index]
            _memcpy(address, sources[index], self._sizes[index])
            sources[index] = address
        self._launch(self._arguments, sources, stream)

    def _path(
        self,
        values: Values,
    ) -> CopyIn:
        if not self._copy_inputs:
            return self.run
        if all(value.device == self._copier.device for value in values):
            return self._from_device
        if any(value.device.type != "cpu" for value in values):
            return self.run
        return self._from_host

    def _from_device(
        self,
        values: Values,
        stream: int,
        is_alike: bool,
    ) -> None:
        sources = [*map(_address, values)]
        if is_alike and sources == self._held:
            self._launch(self._arguments, (), stream)
            return
        lie_in_buffers = [bisect_right(self._static.bounds, source) & 1 for source in sources]
        if 1 in lie_in_buffers or not _are_dense(values, sources, is_alike):
            self.run(values, stream)
            return
        self._launch(self._arguments, sources, stream)
        self._held = sources

    def _from_host(
        self,
        values: Values,
        stream: int,
        is_alike: bool,
    ) -> None:
        sources = [*map(_address, values)]
        if not _are_dense(values, sources, is_alike):
            self.run(values, stream)
            return
        if self._fits_inline:
            for (place, nbytes), source in zip(self._inline_addresses, sources):  # noqa: B905
                _memcpy_small(place, source, nbytes)
            self._launch(self._inline, (), stream)
            return
        base = self._copier.blocks.take(self._staged_bytes, stream)
        addresses = [base + offset for offset in self._offsets]
        for address, source, size in zip(addresses, sources, self._sizes):  # noqa: B905
            _memcpy(address, source, size)
        self._launch(self._arguments, addresses, stream)

    def _reset_padding(self, stream: int) -> None:
        self._launch(self._arguments, self._in_place, stream)

    def _launch(
        self,
        arguments: _Arguments,
        sources: Sequence[int],
        stream: int,
    ) -> None:
        marks = self._marks
        write = _HEAD.pack_into
        if sources:
            write = self._write
            self._held = []
        write(
            arguments.memory,
            0,
            marks.tokens,
            marks.reqs,
            marks.exposed_tokens,
            marks.exposed_reqs,
            *sources,
        )
        if stream != self._stream:
            for config in self._configs:
                _STREAM.pack_into(config, _STREAM_AT, stream)
            self._stream = stream
        # either is right: the kernel strides
        near = marks.tokens <= self._near and marks.exposed_tokens <= self._near
        config_at = self._near_at if near else self._far_at
        launch = self._copier.kernel.launch
        code = launch(config_at, arguments.function, arguments.at, None)
        # this thread is on no GPU yet, or on another
        if code in _OTHER_CONTEXT:
            with torch.cuda.device(self._copier.device):
                torch.cuda.current_stream().query()  # makes the context current
                code = launch(config_at, arguments.function, arguments.at, None)
        if code:
            raise BackendError(
                f"the driver refused to launch the copy of a batch: error {code}",
                remedy="Find an earlier kernel that failed with CUDA_LAUNCH_BLOCKING=1.",
            )
        marks.tokens = self._tokens
        marks.reqs = self._reqs


def _are_dense(
    values: Values,
    sources: Sequence[int],
    is_alike: bool,
) -> bool:
    return 0 not in sources and (is_alike or all(map(is_dense, values)))


class KernelCopier(Copier):
    batch_copy = KernelBatchCopy

    def __init__(
        self,
        buffers: StaticBuffers,
        kernel: CopyKernel,
        blocks: StagingBlocks,
        *,
        copy_inputs: bool,
    ) -> None:
        super().__init__(buffers, copy_inputs=copy_inputs)
        self.kernel = kernel
        self.blocks = blocks
        self.targets = [_Target(buffer) for buffer in buffers.buffers.values()]
        first, *_ = buffers.buffers.values()
        self.device = first.tensor.device

    def config(
        self,
        sizes: Sequence[int],
    ) -> Array[c_char]:
        """A launch by the bytes to write of each input."""
        blocks = 1
        slices = 1
        for size, target in zip(sizes, self.targets, strict=True):
            blocks = max(blocks, math.ceil(size / target.slices / _BYTES_A_BLOCK))
            slices = max(slices, target.slices)
        grid = [
            min(blocks, _MOST_BLOCKS),
            len(sizes),
            min(slices, _MOST_BLOCKS),
        ]
        packed = _CONFIG.pack(*grid, THREADS, 1, 1, 0, 0)
        return ctypes.create_string_buffer(packed, _CONFIG.size)

    def close(self) -> None:
        self.blocks.close()
