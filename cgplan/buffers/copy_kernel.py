"""Copies by one kernel launch: all inputs of a batch, from the device or the host, and their
padding.

Note [Launching]
    The kernel is compiled by NVRTC once a process, and launched through the driver. A launch
    through Triton or a Python binding packs its arguments each time, which costs as much as the
    slice copies that it would save. Here the arguments lie in memory that is made once for each
    size of batch; a call writes the addresses of its tensors there and hands the driver four
    pointers. When it returns, the driver has read it all: a small batch from the host rides in the
    arguments themselves, and no memory has to be kept until it has arrived.
"""

from __future__ import annotations

import ctypes
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from cgplan.buffers.copier import BatchCopy, Copier, CopyIn
from cgplan.buffers.pinned import ALIGNMENT, StagingBlocks
from cgplan.buffers.static import StaticBuffer, StaticBuffers
from cgplan.errors import BackendError

INPUTS = 16  # that one launch copies at most
ARGUMENT_BYTES = 4096  # that a kernel may have at most
THREADS = 256
_MOST_BLOCKS = 512  # of threads, for one input
_BYTES_A_BLOCK = THREADS * 64
_JOB = struct.Struct("=16s4Q6I8x")
_HEAD = struct.Struct("=4I")
_BATCH_BYTES = _HEAD.size + INPUTS * (8 + _JOB.size)
_COUNTS: dict[str | None, int] = {"num_tokens": 1, "num_reqs": 2}
_OTHER_CONTEXT = (201, 400)  # CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE
_address, _is_contiguous = Tensor.data_ptr, Tensor.is_contiguous
_is_conj, _is_neg = Tensor.is_conj, Tensor.is_neg
_memcpy = ctypes.CDLL(None).memcpy
# a few kilobytes are copied before the interpreter's lock has changed hands
_memcpy_small = ctypes.PyDLL(None).memcpy
for _function in (_memcpy, _memcpy_small):
    _function.argtypes, _function.restype = (
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t],
        None,
    )


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        *(
            (name, ctypes.c_uint)
            for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")
        ),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True, eq=False)
class CopyKernel:
    """The driver's handles of ``copy_rows`` and ``copy_rows_inline``. ``launch`` is
    cuLaunchKernelEx, of (address of a LaunchConfig, function, address of the pointers to the
    arguments, None); it returns the driver's error number.
    """

    function: int
    inline_function: int
    launch: Callable[[int, int, int, None], int]


@cache
def load_copy_kernel(index: int) -> CopyKernel | None:
    """The kernel on the GPU of this index; None without cuda-bindings, NVRTC, or a new enough
    driver.
    """
    try:
        cubin = compile_copy_rows(torch.cuda.get_device_capability(index))
        driver = ctypes.CDLL("libcuda.so.1")
        with torch.cuda.device(index):
            # makes the context current, whatever this thread did before
            torch.cuda.current_stream().synchronize()
            module, function, inline_function = (
                ctypes.c_void_p(),
                ctypes.c_void_p(),
                ctypes.c_void_p(),
            )
            for code in (
                # stays loaded as long as the process
                driver.cuModuleLoadData(ctypes.byref(module), cubin),
                driver.cuModuleGetFunction(ctypes.byref(function), module, b"copy_rows"),
                driver.cuModuleGetFunction(
                    ctypes.byref(inline_function), module, b"copy_rows_inline"
                ),
            ):
                if code:
                    return None
        launch: Any = driver.cuLaunchKernelEx
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None
    launch.argtypes, launch.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    return CopyKernel(function.value or 0, inline_function.value or 0, launch)


def compile_copy_rows(capability: tuple[int, int]) -> bytes:
    """The kernel for GPUs of a compute capability. Raises ImportError without cuda-bindings,
    RuntimeError of NVRTC.
    """
    from cuda.bindings import nvrtc

    def checked(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise RuntimeError(f"NVRTC answered {result[0]}")
        return result[1] if len(result) > 1 else None

    source = resources.files("cgplan.buffers").joinpath("copy_rows.cu").read_bytes()
    program = checked(nvrtc.nvrtcCreateProgram(source, b"copy_rows.cu", 0, [], []))
    try:
        options = [b"--gpu-architecture=sm_%d%d" % capability, b"-DINPUTS=%d" % INPUTS]
        checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
        cubin = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program)))
        checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin)


class _Arguments:
    """The arguments of one launch, in memory: the kernel's Batch; or, with offsets of its sources,
    its InlineBatch.
    """

    def __init__(
        self, kernel: CopyKernel, jobs: Sequence[bytes], offsets: Sequence[int] = ()
    ) -> None:
        sources = struct.pack(f"={INPUTS}Q", *offsets, *[0] * (INPUTS - len(offsets)))
        packed = b"".join((bytes(_HEAD.size), sources, *jobs)).ljust(_BATCH_BYTES, b"\0")
        self.memory = ctypes.create_string_buffer(
            packed, ARGUMENT_BYTES if offsets else _BATCH_BYTES
        )
        # the list of arguments: there is one
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.memory))
        self.at = ctypes.addressof(self._pointers)
        self.function = kernel.inline_function if offsets else kernel.function


class _Target:
    """A static buffer as the kernel sees it: slices of rows of bytes, one slice for each index in
    front of the rows.
    """

    def __init__(self, buffer: StaticBuffer) -> None:
        tensor, row_dim, dim, pad = buffer.tensor, buffer.row_dim, buffer.rows, buffer.spec.pad
        one = torch.zeros(1, dtype=tensor.dtype, device="cpu").fill_(0 if pad == "last" else pad)
        self.pattern = bytes(one.untyped_storage().tolist()) * (ALIGNMENT // one.itemsize)
        self.address, self.pads_last = tensor.data_ptr(), pad == "last"
        # as in the kernel's Job
        self.slices, self.row_bytes, self.counted = 1, tensor.nbytes, (0, 0, 0)
        if row_dim is not None and dim is not None:
            self.slices = tensor.shape[:row_dim].numel()
            self.row_bytes = tensor.shape[row_dim + 1 :].numel() * tensor.itemsize
            self.counted = (_COUNTS[dim.symbol], dim.factor, dim.offset)
        self.pitch = tensor.nbytes // self.slices

    def nbytes(self, rows: int) -> int:
        return self.slices * self.row_bytes * (rows if self.counted[0] else 1)

    def job(self, rows: int, least_rows: int) -> bytes:
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
    """One size of batch. The arguments of its launch lie ready; a call writes the addresses of its
    tensors there.

    There are three paths for contiguous tensors, chosen by where they lie: ``_from_device`` reads
    them where they are, ``_inline_from_host`` takes small ones along in the arguments,
    ``_staged_from_host`` sends them through pinned memory. ``run`` takes any mixture, and all that
    overlaps the static buffers.
    """

    def __init__(self, copier: KernelCopier, *counts: int) -> None:
        self._copier, self._targets = copier, copier.targets
        super().__init__(copier, *counts)
        self._may_be_lazy = any(
            b.tensor.is_floating_point() or b.tensor.is_complex() for b in self._buffers
        )
        self._own = [target.address for target in self._targets]
        # After a much larger batch far more padding is reset than rows are copied: the grid then
        # covers whole buffers.
        self._near = counts[2]
        self._config = copier.config(
            [t.nbytes(n) for t, n in zip(self._targets, self._padded_rows, strict=True)]
        )
        self._wide_config = copier.config([buffer.tensor.nbytes for buffer in self._buffers])
        self._config_at, self._wide_config_at = (
            ctypes.addressof(self._config),
            ctypes.addressof(self._wide_config),
        )
        self._stream = 0
        self._write = struct.Struct(f"=4I{len(self._own)}Q").pack_into

    def look_at_writes(self) -> None:
        super().look_at_writes()
        self._sizes = [
            target.nbytes(rows) for target, rows in zip(self._targets, self._rows, strict=True)
        ]
        *self._places, self._staged_bytes = accumulate(
            (-(-n // ALIGNMENT) * ALIGNMENT for n in self._sizes), initial=0
        )
        kernel = self._copier.kernel
        jobs = [
            t.job(*counts)
            for t, *counts in zip(self._targets, self._rows, self._least_rows, strict=True)
        ]
        self._arguments = _Arguments(kernel, jobs)
        self._fits_inline = self._staged_bytes <= ARGUMENT_BYTES - _BATCH_BYTES
        if self._fits_inline:
            self._inline = _Arguments(kernel, jobs, self._places)
            start = ctypes.addressof(self._inline.memory) + _BATCH_BYTES
            self._inline_places = [
                (ctypes.c_void_p(start + place), ctypes.c_size_t(size))
                for place, size in zip(self._places, self._sizes, strict=True)
            ]

    def run(self, values: Sequence[Tensor], stream: int, known: bool = False) -> None:  # noqa: ARG002
        sources, on_host, kept = [], [], []
        with torch.no_grad():
            for index, value in enumerate(values):
                source = self._source(index, value)
                if source is None:
                    sources.append(self._own[index])
                    continue
                plain = source.resolve_conj().resolve_neg().contiguous()
                if plain.device != self._copier.device:
                    on_host.append(index)
                # until the launch is queued; later users of its memory are queued behind it
                kept.append(plain)
                sources.append(plain.data_ptr())
        if sources == self._own:
            self.pad(values, stream)
            return
        base = self._copier.blocks.take(self._staged_bytes, stream) if on_host else 0
        for index in on_host:
            place = base + self._places[index]
            _memcpy(place, sources[index], self._sizes[index])
            sources[index] = place
        self._launch(self._arguments, sources, stream)

    def _path(self, values: Sequence[Tensor]) -> CopyIn:
        if not self._copy_inputs:
            return self.run
        if all(value.device == self._copier.device for value in values):
            return self._from_device
        if any(value.device.type != "cpu" for value in values):
            return self.run
        return self._inline_from_host if self._fits_inline else self._staged_from_host

    def _addresses(self, values: Sequence[Tensor], known: bool) -> list[int] | None:
        """Where dense tensors lie; None if one is something else, which ``run`` takes care of."""
        if not known:
            if not all(map(_is_contiguous, values)):
                return None
            if self._may_be_lazy and (any(map(_is_neg, values)) or any(map(_is_conj, values))):
                return None
        sources = [*map(_address, values)]
        return None if 0 in sources else sources

    def _from_device(self, values: Sequence[Tensor], stream: int, known: bool) -> None:
        sources, bounds = self._addresses(values, known), self._static.bounds
        if sources is None:
            self.run(values, stream)
            return
        if max(sources) >= bounds[0] and min(sources) < bounds[-1]:
            for source in sources:
                if bisect_right(bounds, source) & 1:  # it lies in a static buffer
                    self.run(values, stream)
                    return
        self._launch(self._arguments, sources, stream)

    def _staged_from_host(self, values: Sequence[Tensor], stream: int, known: bool) -> None:
        sources = self._addresses(values, known)
        if sources is None:
            self.run(values, stream)
            return
        base = self._copier.blocks.take(self._staged_bytes, stream)
        places = [base + place for place in self._places]
        for place, source, size in zip(places, sources, self._sizes):  # noqa: B905  (of equal length)
            _memcpy(place, source, size)
        self._launch(self._arguments, places, stream)

    def _inline_from_host(self, values: Sequence[Tensor], stream: int, known: bool) -> None:
        sources = self._addresses(values, known)
        if sources is None:
            self.run(values, stream)
            return
        for (place, size), source in zip(self._inline_places, sources):  # noqa: B905
            _memcpy_small(place, source, size)
        self._launch(self._inline, (), stream)

    def _reset_padding(self, stream: int) -> None:
        self._launch(self._arguments, self._own, stream)

    def _launch(self, arguments: _Arguments, sources: Sequence[int], stream: int) -> None:
        marks, write, launch = (
            self._marks,
            self._write if sources else _HEAD.pack_into,
            self._copier.kernel.launch,
        )
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
            self._config.stream = self._wide_config.stream = self._stream = stream
        near = marks.tokens <= self._near and marks.exposed_tokens <= self._near
        launched = (
            self._config_at if near else self._wide_config_at,
            arguments.function,
            arguments.at,
            None,
        )
        code = launch(*launched)
        # this thread has done nothing with the GPU yet, or works on another one
        if code in _OTHER_CONTEXT:
            with torch.cuda.device(self._copier.device):
                torch.cuda.current_stream().query()  # makes the context current
                code = launch(*launched)
        if code:
            raise BackendError(
                f"the driver refused to launch the copy of a batch: error {code}",
                remedy="An earlier kernel may have failed; run with CUDA_LAUNCH_BLOCKING=1 to see "
                "which.",
            )
        marks.tokens, marks.reqs = self._tokens, self._reqs


class KernelCopier(Copier):
    """Copies at most INPUTS inputs by ``copy_rows``, host tensors through ``blocks``, see Note
    [Launching].
    """

    name = "one kernel"
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
        self.kernel, self.blocks = kernel, blocks
        self.targets = [_Target(buffer) for buffer in buffers.buffers.values()]
        self.device = next(iter(buffers.buffers.values())).tensor.device

    def config(self, sizes: Sequence[int]) -> LaunchConfig:
        """A launch that writes so many bytes of each input."""
        blocks = max(
            -(-size // (_BYTES_A_BLOCK * t.slices))
            for size, t in zip(sizes, self.targets, strict=True)
        )
        slices = min(max(target.slices for target in self.targets), _MOST_BLOCKS)
        return LaunchConfig(min(max(blocks, 1), _MOST_BLOCKS), len(sizes), slices, THREADS, 1, 1)

    def close(self) -> None:
        """Free the staging blocks."""
        self.blocks.close()
