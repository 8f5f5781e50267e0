"""Captures with eager pieces that several test files use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cgplan import BreakableCUDAGraphCapture, eager_break_during_capture
from cgplan.backends import GraphBackend
from cgplan.piecewise.breakable import Segment


def capture(backend: GraphBackend, forward: Callable[[], Any], pool: Any = None) -> tuple[Any, Any]:
    """(capture, output) of a forward, warmed up as a session does."""
    with backend.session(), torch.no_grad():
        forward()
        with BreakableCUDAGraphCapture(backend, backend.new_pool() if pool is None else pool) as made:
            output = forward()
    return made, output


def randn(backend: GraphBackend, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(backend.device)


@eager_break_during_capture
def doubled(x: Tensor) -> Tensor:
    """Through the host, so that inside a segment it would be an error."""
    return torch.tensor(x.tolist(), device=x.device) * 2


@eager_break_during_capture
def add_in_place(x: Tensor, value: float = 1.0) -> Tensor:
    return x.add_(len(x.tolist()) * value)


@eager_break_during_capture
def nothing(*_: Any) -> None:
    """Only a break."""


class Boom(Exception):
    pass


def explode(*_: Any) -> None:
    raise Boom


class Changing:
    """A piece that returns what it is told to."""

    result: Any = None

    def __call__(self, x: Tensor) -> Any:
        return self.result(x) if callable(self.result) else self.result


def kinds(made: BreakableCUDAGraphCapture) -> str:
    """S for a segment, e for an eager piece, in order."""
    return "".join("S" if isinstance(item, Segment) else "e" for item in made.segments)
