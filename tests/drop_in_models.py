"""Models of the tests of ``cgplan.graphed``, and how calls are compared with them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import cgplan
from cgplan.backends import GraphBackend

Point = namedtuple("Point", ("x", "y"))


@dataclass(frozen=True)
class Scene:
    points: Point
    labels: list[Tensor]
    scale: float = 2.0


@cgplan.graphed
def doubled(x: Tensor) -> Tensor:
    return x * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.note = "a note"
        self.factor: Any = 1.0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.inner(x) * scale * self.factor


class Counting(nn.Module):
    """Counts its calls in a tensor, and adds the count."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + self.calls


class Noted(nn.Module):
    """Counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)


class Scaled(nn.Module):
    """Its methods are decorated in the class body."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = nn.Linear(4, 3), factor

    @cgplan.graphed
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor

    @cgplan.graphed
    def only(self, x: Tensor) -> Tensor:
        return x * self.factor


class Cache:
    """An object argument with a flag."""

    def __init__(self, device: torch.device) -> None:
        self.total, self.is_ready = torch.zeros(4, device=device), False

    def reset(self) -> None:
        self.total.zero_()
        self.is_ready = False


def rows(backend: GraphBackend, count: int, *inner: int) -> Tensor:
    return torch.randn(count, *(inner or (4,)), device=backend.device)


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


def ready(g: Any, model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Three calls of a kind, the last of which captures; its output."""
    for _ in range(3):
        found = g(*args, **kwargs)
        close(found, model(*args, **kwargs))
    return found


def as_the_model(
    g: Any, model: Callable[[Tensor], Any], backend: GraphBackend, *counts: int
) -> None:
    """Calls with these numbers of rows give what the model gives."""
    for count in counts:
        x = rows(backend, count).abs()
        close(g(x), model(x))


def sizes(g: Any) -> set[int]:
    return {key.num_tokens for runner in g.runners for _, key in runner.plan.keys}


def replays(g: Any) -> int:
    return sum(runner.stats.replays.total() for runner in g.runners)
