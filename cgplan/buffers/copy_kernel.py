"""The kernel that brings a batch in with one launch: compiled by NVRTC once a process, launched through the driver.

Note [Launching]
    A launch through Triton or a Python binding builds its arguments anew each time, which costs as much as the slice
    copies that it would save. Here the arguments lie in memory that is made once for each size of batch; a call writes
    the addresses of its tensors there and hands the driver four pointers. When it returns, the driver has read it all:
    a small batch from the host rides in the arguments themselves, and no memory has to be kept until it has arrived.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch

from cgplan.errors import BackendError

INPUTS = (8, 16, 32)  # a kernel is compiled for each of these numbers of inputs
ARGUMENT_BYTES = 4096  # that a kernel may have at most
THREADS = 256
_OTHER_CONTEXT = (201, 400)  # CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE
Launch = Callable[[int, int, int, None], int]


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True, eq=False)
class CopyKernel:
    """``copy_rows`` and ``copy_rows_inline``, ready to launch.

    Attributes:
        inputs: How many inputs its arguments hold at most.
        function, inline_function: The driver's handles.
        launch: cuLaunchKernelEx, of (address of a LaunchConfig, function, address of the pointers to the arguments,
            None); returns the driver's error number, 0 for none.
        launch_elsewhere: The same where the thread's current context is another one, or none.
    """

    inputs: int
    function: int
    inline_function: int
    launch: Launch
    launch_elsewhere: Launch

    def retry(self, code: int, config: int, function: int, arguments: int) -> None:
        """Launch again after error ``code``, if that can help. Raises BackendError."""
        if code in _OTHER_CONTEXT:
            code = self.launch_elsewhere(config, function, arguments, None)
        if code:
            raise BackendError(
                f"the driver refused to launch the copy of a batch: error {code}",
                remedy="An earlier kernel may have failed; run with CUDA_LAUNCH_BLOCKING=1 to see which.",
            )


def load_copy_kernel(device: torch.device, num_inputs: int) -> CopyKernel | None:
    """The kernel for so many inputs, or None where it cannot be had: without cuda-bindings, or for too many inputs.

    Args:
        device: A GPU, with its index; its context is current.
        num_inputs: Inputs and metadata of the model.
    """
    inputs = next((most for most in INPUTS if num_inputs <= most), None)
    return None if inputs is None else _load(device.index, inputs)


@cache
def _load(index: int, inputs: int) -> CopyKernel | None:
    try:
        cubin = compile_copy_rows(torch.cuda.get_device_capability(index), inputs)
        driver = ctypes.CDLL("libcuda.so.1")
        with torch.cuda.device(index):
            torch.cuda.current_stream().synchronize()  # makes the context current, whatever this thread did before
            return _loaded(driver, cubin, inputs)
    except (ImportError, OSError, RuntimeError, AttributeError):  # no bindings, no NVRTC, or an older driver
        return None


def compile_copy_rows(capability: tuple[int, int], inputs: int) -> bytes:
    """The kernel for GPUs of a compute capability. Raises ImportError without cuda-bindings, RuntimeError if NVRTC
    does not do it.
    """
    from cuda.bindings import nvrtc

    def checked(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise RuntimeError(f"NVRTC answered {result[0]}")
        return result[1] if len(result) > 1 else None

    source = resources.files("cgplan.backends").joinpath("copy_rows.cu").read_bytes()
    program = checked(nvrtc.nvrtcCreateProgram(source, b"copy_rows.cu", 0, [], []))
    try:
        options = [b"--gpu-architecture=sm_%d%d" % capability, b"-DINPUTS=%d" % inputs]
        checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
        cubin = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program)))
        checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin)


def _loaded(driver: ctypes.CDLL, cubin: bytes, inputs: int) -> CopyKernel:
    def checked(code: int) -> None:
        if code:
            raise RuntimeError(f"the driver answered {code}")

    module, context = ctypes.c_void_p(), ctypes.c_void_p()
    checked(driver.cuModuleLoadData(ctypes.byref(module), cubin))  # stays loaded as long as the process
    checked(driver.cuCtxGetCurrent(ctypes.byref(context)))
    function, inline_function = ctypes.c_void_p(), ctypes.c_void_p()
    checked(driver.cuModuleGetFunction(ctypes.byref(function), module, b"copy_rows"))
    checked(driver.cuModuleGetFunction(ctypes.byref(inline_function), module, b"copy_rows_inline"))
    launch: Any = driver.cuLaunchKernelEx
    launch.argtypes, launch.restype = [ctypes.c_void_p] * 4, ctypes.c_int

    def launch_elsewhere(config: int, function: int, arguments: int, extra: None) -> int:
        left = ctypes.c_void_p()
        pushed = int(driver.cuCtxPushCurrent_v2(context))
        if pushed:
            return pushed
        launched = launch(config, function, arguments, extra)
        popped = int(driver.cuCtxPopCurrent_v2(ctypes.byref(left)))  # also behind a launch that failed
        return launched or popped

    return CopyKernel(inputs, function.value or 0, inline_function.value or 0, launch, launch_elsewhere)
