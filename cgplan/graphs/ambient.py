"""Torch's state around a call that a graph depends on: grad and inference mode, autocast, random generators.

Note [Ambient state]
    A graph takes no notice of torch's state around its replay. Autocast decides dtypes: it is recorded, and a call
    under another state is refused. Gradients are off in every capture and call, so no output ever requires one.
    Inference mode changes nothing that a graph computes; outputs are ordinary tensors in either mode. Code that Dynamo
    traced holds for the grad and inference mode of the trace, and is refused elsewhere. Random numbers follow the
    default generator of the device, as eager ones do; what a session draws on its way is given back, and the model's
    own generators are found, so that graphs can draw from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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

    def refuse_other(self, now: AmbientState, done: str, names: Sequence[str] = ()) -> None:
        """Raise CaptureError if ``now``, the state of a call, differs from this state.

        Args:
            done: ``captured`` or ``traced``: the work of this state.
            names: Parts that count (``gradients``, ``inference mode``, ``autocast``); all if empty.
        """
        if now == self:
            return
        here, there = now._words(), self._words()
        differ = [name for name in names or here if here[name] != there[name]]
        if differ:
            then, at_call = (", ".join(f"{name} {words[name]}" for name in differ) for words in (there, here))
            raise CaptureError(
                f"the model was {done} with {then} and is called with {at_call}",
                remedy=f"Call it with {' and '.join(differ)} as at its capture, or capture again as it is now.",
            )

    def _words(self) -> dict[str, str]:
        gradients, inference = ("on" if flag else "off" for flag in (self.grad, self.inference))
        autocast = "off" if self.autocast is None else f"in {self.autocast}"
        return {"gradients": gradients, "inference mode": inference, "autocast": autocast}


def number_of(generator: torch.Generator) -> int:
    """A number that is equal for all Python objects of one generator: operators are given others than the model has."""
    number: int = generator._cdata  # type: ignore[attr-defined]
    return number


@contextmanager
def random_state_kept(device: torch.device, generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """A block that draws random numbers and leaves the default generators, and these, as they were."""
    before = [(generator, generator.get_state()) for generator in generators]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for generator, state in before:
                generator.set_state(state)
