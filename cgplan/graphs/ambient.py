"""Torch's state around a call: grad and inference mode, autocast, dtype, random generators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch.overrides import _get_current_function_mode
from torch.utils._device import DeviceContext

from cgplan.errors import CaptureError


class AmbientState(NamedTuple):
    """Torch's state in this thread, and its defaults, which compiled functions are guarded by.

    Graphs depend on autocast alone.
    """

    grad: bool
    inference: bool
    autocast: torch.dtype | None
    dtype: torch.dtype
    device: torch.device | None

    @classmethod
    def now(cls, device: str) -> AmbientState:
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast,
            torch.get_default_dtype(),
            # as it was given: compiled functions tell `cuda` from `cuda:0`
            getattr(_get_current_function_mode(), "device", None),
        )

    @contextmanager
    def entered(self, device: str) -> Iterator[None]:
        autocast = torch.autocast(device, self.autocast, enabled=self.autocast is not None)
        before = AmbientState.now(device)
        placed: AbstractContextManager[None] = nullcontext()
        if self.device is not None and self.device != before.device:
            placed = DeviceContext(self.device)
        torch.set_default_dtype(self.dtype)
        try:
            with (
                torch.inference_mode(self.inference),
                torch.set_grad_enabled(self.grad),
                autocast,
                placed,
            ):
                yield
        finally:
            torch.set_default_dtype(before.dtype)

    def refuse_other_autocast(self, device: str, done: str = "captured") -> None:
        """Raise CaptureError if autocast is another one now."""
        now = AmbientState.now(device)
        if now.autocast != self.autocast:
            raise CaptureError(
                f"the model was {done} with autocast {self.autocast_words} and is called with "
                f"autocast {now.autocast_words}",
                remedy="Call it with autocast as at its capture, or capture again.",
            )

    @property
    def autocast_words(self) -> str:
        return "off" if self.autocast is None else f"in {self.autocast}"


@contextmanager
def random_state_kept(
    device: torch.device,
    generators: Iterable[torch.Generator] = (),
) -> Iterator[None]:
    """A block; restores the default generators and these."""
    before = [(generator, generator.get_state()) for generator in generators]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for generator, state in before:
                generator.set_state(state)
