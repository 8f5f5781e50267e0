"""What of torch's state around a call a graph depends on: grad and inference mode, autocast, random generators.

Note [Ambient state]
    A graph takes no notice of what is around its replay. Each part of that state is dealt with in its own way.
    Autocast decides dtypes: it is recorded, and a call under another state is refused. Gradients are off in every
    capture and in every call, so no output ever requires one. Inference mode changes nothing that a graph computes;
    outputs are ordinary tensors in either mode, so runners may be captured in one and called in the other. Code that
    Dynamo traced holds for the grad and inference mode of the trace, and is refused elsewhere. Random numbers follow
    the default generator of the device, as eager ones do; what a session draws on its way is given back, and
    generators of the model's own are found, so that graphs can draw from them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from cgplan.errors import AddressError, CaptureError


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
    def without_grad(self, device: str) -> Iterator[None]:
        """A block in this state, autocast for a type of device, but with gradients off, as in captures and calls."""
        autocast = torch.autocast(device, self.autocast, enabled=self.autocast is not None)
        with torch.inference_mode(self.inference), torch.no_grad(), autocast:
            yield

    def words(self) -> dict[str, str]:
        """Each part by name, in words."""
        on = {True: "on", False: "off"}
        autocast = "off" if self.autocast is None else f"in {self.autocast}"
        return {"gradients": on[self.grad], "inference mode": on[self.inference], "autocast": autocast}

    def refuse_other(self, now: AmbientState, done: str, names: Sequence[str] = ()) -> None:
        """Raise CaptureError if ``now`` differs from this state.

        Args:
            now: The state of a call.
            done: What was done in this state, ``captured`` or ``traced``.
            names: Parts that count; all if empty.
        """
        if now == self:
            return
        here, there = now.words(), self.words()
        differ = [name for name in names or here if here[name] != there[name]]
        if differ:
            raise CaptureError(
                f"the model was {done} with {_listed(there, differ)} and is called with {_listed(here, differ)}",
                remedy=f"Call it with {' and '.join(differ)} as at its capture, or capture again as it is now.",
            )


def _listed(words: Mapping[str, str], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {words[name]}" for name in names)


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


def generators_of(model: Callable[..., Any], device: torch.device) -> tuple[torch.Generator, ...]:
    """The generators of a device that a model holds, in the order that they are found.

    Looked at are the attributes of the model and of the modules inside it, lists, tuples, sets and dicts there, what
    functions are closed over or bound to, and the global names that they use. Default generators are left out.
    """
    found: dict[int, torch.Generator] = {}
    seen: dict[int, Any] = {}  # holds what was visited, so that ids stay valid
    defaults = (torch.default_generator, *torch.cuda.default_generators)
    todo: list[Any] = [model, model.__call__]  # type: ignore[operator]
    while todo:
        value = todo.pop()
        if type(value) in _NOTHING_INSIDE or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Generator):
            if value.device == device and all(value is not default for default in defaults):
                found[id(value)] = value
        else:
            todo.extend(_inside(value))
    return tuple(found.values())


def refuse_other_generators(before: Sequence[torch.Generator], now: Sequence[torch.Generator], what: str) -> None:
    """Raise AddressError if these are other objects than ``what``, a graph, was captured with."""
    if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
        raise AddressError(
            f"{what} was captured with other torch.Generator objects than the model holds now: a replay would draw "
            "from the old ones",
            remedy="Seed a generator in place (manual_seed, set_state), or call runner.recapture().",
        )


_NOTHING_INSIDE = frozenset({str, bytes, int, float, bool, type(None), torch.Tensor, torch.nn.Parameter})


def _inside(value: Any) -> Iterable[Any]:
    """What a value holds that may be, or hold, a generator."""
    if isinstance(value, torch.nn.Module):
        return (*vars(value).values(), type(value).forward)
    if isinstance(value, Mapping):
        return tuple(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.MethodType):
        holder = value.__self__
        return (value.__func__, holder, *getattr(holder, "__dict__", {}).values())
    if isinstance(value, types.FunctionType):
        names = (value.__globals__.get(name) for name in value.__code__.co_names)
        return (*_cells(value), *(value.__defaults__ or ()), *(g for g in names if isinstance(g, torch.Generator)))
    return ()


def _cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
