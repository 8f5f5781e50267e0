"""Torch primitives: the backend protocol, CUDA graphs, the tape, pools and static buffers."""

from cgplan.graphs.backend import GraphBackend, MemoryReading
from cgplan.graphs.select import select_backend, throwaway_tape

__all__ = ["GraphBackend", "MemoryReading", "select_backend", "throwaway_tape"]
