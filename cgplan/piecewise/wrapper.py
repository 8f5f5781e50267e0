"""BreakableCUDAGraphWrapper: a forward that is captured as one breakable capture for each batch descriptor."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import torch

from cgplan.backends import GraphBackend
from cgplan.backends.host_sync import tensors_in
from cgplan.errors import CgplanError
from cgplan.graphs.wrapper import CUDAGraphEntry, CUDAGraphOptions, CUDAGraphWrapper
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.piecewise.breakable import BreakableCUDAGraphCapture, recording_capture

_DEFAULTS = CUDAGraphOptions()


class BreakableCUDAGraphWrapper(CUDAGraphWrapper):
    """CUDAGraphWrapper whose graphs break at eager pieces: see there for when it captures and when it replays.

    Entries hold a BreakableCUDAGraphCapture each. A call that captures also computes its result.

    Args:
        runnable: The forward. Its eager pieces are functions under ``eager_break_during_capture``, or modules that
            ``break_at_modules`` named.
        runtime_mode: PIECEWISE or FULL.
        backend, pool, options: As for CUDAGraphWrapper.
        key_fn: Called with the arguments on every call; its hashable result is part of the key, beside the descriptor.
            It must hold no tensor, which would be another key on each call.
    """

    _computes_while_capturing: ClassVar[bool] = True

    def __init__(
        self,
        runnable: Callable[..., Any],
        runtime_mode: CUDAGraphMode = CUDAGraphMode.PIECEWISE,
        *,
        backend: GraphBackend | None = None,
        pool: Any = None,
        options: CUDAGraphOptions = _DEFAULTS,
        key_fn: Callable[..., Hashable] | None = None,
    ) -> None:
        super().__init__(runnable, runtime_mode, backend=backend, pool=pool, options=options)
        self._key_fn = key_fn

    def _key(self, descriptor: BatchDescriptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        if self._key_fn is None:
            return descriptor
        key = (descriptor, self._key_fn(*args, **kwargs))
        try:
            is_known = key in self.entries
        except TypeError as error:
            raise CgplanError(f"key_fn returned {key[1]!r:.200}: {error}", remedy="Return a hashable value.") from None
        if not is_known and tensors_in(key[1]):  # they are hashed by identity
            raise CgplanError(
                f"key_fn returned a tensor: {key[1]!r:.200}",
                remedy="Return a shape, a dtype or a Python number that tells batches apart.",
            )
        return key

    def _record(
        self, pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any, dict[int, torch.Tensor]]:
        copied = self._copied_arguments(args, pool)
        with BreakableCUDAGraphCapture(self.backend, pool) as capture:
            slots = {i: capture.new_slot(args[i]) for i in copied}
            output = self.runnable(*(slots.get(i, arg) for i, arg in enumerate(args)), **kwargs)
        return capture, output, slots

    def _is_reading(self) -> bool:
        return recording_capture() is not None

    def _replay(self, entry: CUDAGraphEntry) -> None:
        entry.graph.replay()

    def _free(self, entry: CUDAGraphEntry) -> None:
        entry.graph.reset()

    def _parts(self, graph: BreakableCUDAGraphCapture) -> tuple[tuple[Any, ...], int]:
        return graph.graphs, graph.num_eager_breaks
