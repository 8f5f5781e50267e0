"""The trace of a runner's model: made once, ahead of the first capture, on padding and in the session's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from cgplan.config import Config
from cgplan.descriptors import BatchDescriptor
from cgplan.errors import CgplanError
from cgplan.graphs import GraphBackend
from cgplan.graphs.buffers import StaticBuffers
from cgplan.modes import CUDAGraphMode
from cgplan.planning import Plan
from cgplan.runtime.ambient import AmbientState, random_state_kept
from cgplan.runtime.traced import sizes_of_trace


class FirstTrace:
    """Lets the compiler of a route see the model once, on padding that lies in memory of its own.

    What is traced holds for the inference mode and autocast of the trace, so that it is made in those of the session,
    whatever the call has that asks for it.

    Args:
        plan, config, backend: As for a session.
        ambient: Torch's state in the session.
        is_made: Whether there is nothing to trace.
    """

    def __init__(
        self, plan: Plan, config: Config, backend: GraphBackend, ambient: AmbientState, *, is_made: bool
    ) -> None:
        self._plan, self._config, self._backend, self._ambient = plan, config, backend, ambient
        self._is_made = is_made
        self._failure: CgplanError | None = None
        self._is_too_large = False

    def forget_failure(self) -> None:
        """Have a trace that failed tried again."""
        self._failure, self._is_too_large = None, False

    def make(
        self,
        run: Callable[[BatchDescriptor, Mapping[str, torch.Tensor]], Any],
        descriptor: BatchDescriptor,
        generators: Iterable[torch.Generator],
    ) -> None:
        """Trace, unless that is done.

        Args:
            run: Runs what is traced.
            descriptor: The key that is captured next.
            generators: Those that the model draws from.

        Raises:
            CgplanError: as the trace; each time, until ``forget_failure``.
        """
        if self._is_made:
            return
        if (failure := self._failure) is not None:
            raise type(failure)(failure.message, remedy=failure.remedy)
        device = self._backend.device
        mixed = self._plan.mode.has_mode(CUDAGraphMode.PIECEWISE)
        most = descriptor.num_tokens if self._is_too_large else self._plan.max_capture_size
        rows, reqs = sizes_of_trace(most, self._plan.max_num_seqs, mixed=mixed)
        batch = descriptor._replace(num_tokens=rows, num_reqs=reqs, uniform=False)
        try:
            with self._ambient.without_grad(device.type), random_state_kept(device, generators):
                specs = {**self._config.inputs, **self._config.metadata}
                run(batch, StaticBuffers(specs, rows, reqs, device).views(rows, reqs))
        except CgplanError as error:
            self._failure = type(error)(error.message, remedy=error.remedy)  # without the traceback, which holds memory
            raise
        except Exception:
            self._is_too_large = True  # out of memory, say: the next key is smaller
            raise
        self._is_made = True


__all__ = ["FirstTrace"]
