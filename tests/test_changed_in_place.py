"""Code that changes a tensor object itself (``transpose_``, ``unsqueeze_``), between graphs and after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import same
from torch import Tensor, nn

import cgplan
from cgplan import GraphRunner, Input
from cgplan.graphs import GraphBackend

pytestmark = pytest.mark.usefixtures("quiet_collector")

ROWS = 4


def open_runner(backend: GraphBackend, model: Callable[..., Any], **compilation: Any) -> GraphRunner:
    torch._dynamo.reset()
    return cgplan.capture(
        model,
        {"x": Input(shape=("num_tokens", 4), dtype="float32", pad=0)},
        compilation={"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [2, 4], **compilation},
        device=backend.device.type,
    )


def batch(backend: GraphBackend, seed: int) -> Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(seed)).to(backend.device)


def same_as_eager(backend: GraphBackend, runner: GraphRunner, model: nn.Module) -> None:
    for seed in range(5):
        x = batch(backend, seed)
        same(runner(x=x.clone()), model(x.clone()).detach())


def transposing(q: Tensor) -> Tensor:
    q.transpose_(0, 1)  # a square, so that the shape says nothing
    return torch.softmax(q, 1).t()


def unsqueezing(q: Tensor) -> Tensor:
    q.unsqueeze_(0)
    return torch.softmax(q, 1)[0]


def only_later(q: Tensor) -> Tensor:
    only_later.calls += 1  # type: ignore[attr-defined]
    y = torch.softmax(q, 1)
    if only_later.calls > 6:  # type: ignore[attr-defined]
        q.t_()
    return y


def returning_nothing(q: Tensor) -> None:
    q.copy_(torch.softmax(q, 1))
    q.unsqueeze_(0)


def returning_two(q: Tensor) -> tuple[Tensor, Tensor]:
    q.t_()
    return q.t() + 1, torch.softmax(q, 0).t()


def failing(q: Tensor) -> Tensor:
    """Changes its argument and then fails, on each second call."""
    failing.calls += 1  # type: ignore[attr-defined]
    if failing.calls % 2 == 0 and failing.fails:  # type: ignore[attr-defined]
        q.t_()
        raise ValueError("failed")
    return torch.softmax(q, 1)


class Attend(nn.Module):
    """Two linear maps, and between them what changes its argument."""

    def __init__(self, backend: GraphBackend, function: Callable[..., Any], first: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.attend, self.first = cgplan.eager_break_during_capture(function), first
        self.eval().to(backend.device)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:  # the runner's own input is the argument
            return self.down(self.attend(x[:]))
        h = self.up(x)
        found = self.attend(h)
        if found is None:
            found = h.reshape(-1, 4)
        return self.down(found[0] * 2 + found[1] if isinstance(found, tuple) else found)


@pytest.mark.parametrize(
    ("function", "first"),
    [(f, False) for f in (transposing, unsqueezing, only_later, returning_nothing, returning_two)]
    + [(f, True) for f in (transposing, unsqueezing)],
)
def test_eager_pieces_that_change_their_argument(
    backend: GraphBackend, function: Callable[..., Any], first: bool
) -> None:
    only_later.calls = 0  # type: ignore[attr-defined]
    model = Attend(backend, function, first)
    same_as_eager(backend, open_runner(backend, model), model)


class Softmax(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return transposing(q)


class Modules(nn.Module):
    """The same by splitting_modules."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.attend, self.down = nn.Linear(4, 4), Softmax(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.attend(self.up(x)))


def test_modules_that_change_their_argument(backend: GraphBackend) -> None:
    model = Modules().eval().to(backend.device)
    same_as_eager(backend, open_runner(backend, model, splitting_modules=["attend"]), model)


def test_an_eager_piece_that_fails_after_it_changed_its_argument(backend: GraphBackend) -> None:
    failing.calls, failing.fails = 0, False  # type: ignore[attr-defined]
    model = Attend(backend, failing)
    runner = open_runner(backend, model)
    for seed in range(3):
        x = batch(backend, seed)
        failing.calls, failing.fails = 1, True  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="failed"):
            runner(x=x)
        failing.fails = False  # type: ignore[attr-defined]
        same(runner(x=x), model(x).detach())
