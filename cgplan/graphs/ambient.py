"""Torch's state around a call that a graph depends on: grad and inference mode, autocast, random
generators.

Note [Ambient state]
    A graph takes no notice of torch's state around its replay. Autocast decides dtypes: it is
    recorded, and a call under another state is refused. Gradients are off in every capture and
    call, so no output ever requires one. Inference mode changes nothing that a graph computes;
    outputs are ordinary tensors in either mode. Random numbers follow the default generator of the
    device, as eager ones do; what a session draws on its way is given back, and the model's own
    generators are found, so that graphs can draw from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from cgplan.errors import CaptureError


class AmbientState(NamedTuple):
    """Torch's state in this thread that decides what a forward computes; see Note [Ambient state].

    Attributes:
        grad: Whether gradients are on.
        inference: Whether inference mode is on.
        autocast: The dtype that autocast computes in; None where it is off.
    """

    grad: bool
    inference: bool
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device: str) -> AmbientState:
        """The state now, autocast for a type of device."""
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    @contextmanager
    def entered(self, device: str) -> Iterator[None]:
        """A block in this state, autocast for a type of device."""
        autocast = torch.autocast(device, self.autocast, enabled=self.autocast is not None)
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), autocast:
            yield

    def refuse_other_autocast(self, device: str, done: str = "captured") -> None:
        """Raise CaptureError if autocast for a type of device is not as in this state, of what is
        ``done``.
        """
        states = AmbientState.now(device), self
        here, there = (
            "off" if state.autocast is None else f"in {state.autocast}" for state in states
        )
        if here != there:
            raise CaptureError(
                f"the model was {done} with autocast {there} and is called with autocast {here}",
                remedy="Call it with autocast as at its capture, or capture again as it is now.",
            )


def number_of(generator: torch.Generator) -> int:
    """A number that is equal for all Python objects of one generator: operators are given others
    than the model has.
    """
    number: int = generator._cdata  # type: ignore[attr-defined]
    return number


@contextmanager
def random_state_kept(
    device: torch.device, generators: Iterable[torch.Generator] = ()
) -> Iterator[None]:
    """A block that draws random numbers and leaves the default generators, and these, as they
    were.
    """
    before = [(generator, generator.get_state()) for generator in generators]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for generator, state in before:
                generator.set_state(state)
