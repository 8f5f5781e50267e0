"""Choice of the backend for a device."""

from __future__ import annotations

import torch

from cgplan.graphs.backend import GraphBackend


def select_backend(device: str = "auto") -> GraphBackend:
    """Backend for ``auto`` (a GPU if torch sees one), ``cuda``, ``cuda:N`` or ``cpu``.

    Raises BackendError if a GPU is asked for and none is there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        from cgplan.graphs.tape import TapeBackend

        return TapeBackend()
    from cgplan.graphs.cuda import CudaBackend

    return CudaBackend(torch.device(device))


def throwaway_tape() -> GraphBackend:
    """A tape for recordings alone, of a model that is given up then: what a recording writes to stays written."""
    from cgplan.graphs.tape import TapeBackend

    return TapeBackend(restores=False)
