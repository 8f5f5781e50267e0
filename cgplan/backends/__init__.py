"""The choice of a backend: CUDA graphs or the tape."""

import torch

from cgplan.backends.backend import GraphBackend, MemoryReading
from cgplan.errors import BackendError


def select_backend(device: str = "auto") -> GraphBackend:
    """Choose a backend: ``auto`` (a GPU if there is one), ``cuda``, ``cuda:N`` or ``cpu``.

    Raises BackendError for another device or a missing GPU.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        from cgplan.backends.tape import TapeBackend

        return TapeBackend()
    if not device.startswith("cuda"):
        raise BackendError(
            f"there is no backend for device {device!r}", remedy="Choose auto, cpu, cuda or cuda:N."
        )
    from cgplan.backends.cuda import CudaBackend

    return CudaBackend(torch.device(device))


__all__ = ["GraphBackend", "MemoryReading", "select_backend"]
