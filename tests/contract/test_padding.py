"""Padding: rows behind a batch hold what their declaration says, whichever batches and models came before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import same
from torch import Tensor, nn

import cgplan
from cgplan import GraphRunner, Input
from cgplan.backends import GraphBackend

pytestmark = pytest.mark.usefixtures("quiet_collector")

X = Input(shape=("num_tokens", 2), dtype="float32", pad=0)
ROWS = Input(shape=("num_tokens",), dtype="float32", pad=0)
STARTS = Input(shape=("num_reqs + 1",), dtype="int64", pad="last")


def open_runner(
    backend: GraphBackend,
    model: Callable[..., Any],
    inputs: dict[str, Input],
    sizes: list[int],
    compilation: dict[str, Any] | None = None,
) -> GraphRunner:
    compilation = {"cudagraph_capture_sizes": sizes, **(compilation or {})}
    return cgplan.capture(model, inputs, compilation=compilation, device=backend.device.type)


def batch(backend: GraphBackend, count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed)).to(backend.device)


def total(x: Tensor) -> Tensor:
    """A model in which every row sees all others, so that padding shows."""
    return x + x.sum()


def test_rows_behind_a_batch_are_padding_again_after_a_larger_one(backend: GraphBackend) -> None:
    pad = Input(shape=("num_tokens",), dtype="float32", pad=-1)
    runner = open_runner(backend, total, {"x": pad}, sizes=[8])
    for count in (8, 3, 5, 1, 7, 7, 2):
        x = torch.full((count,), 10.0, device=backend.device)
        wanted = 10 + count * 10.0 - (8 - count)
        same(runner(x=x), torch.full((count,), wanted, device=backend.device))
    assert runner.stats.padded_rows == 0 + 5 + 3 + 7 + 1 + 1 + 6


def test_padding_holds_across_sizes_and_dimensions(backend: GraphBackend) -> None:
    wide = Input(shape=(3, "2 * num_tokens"), dtype="float32", pad=5)
    runner = open_runner(backend, lambda w, x: x + w.sum(), {"w": wide, "x": ROWS}, sizes=[2, 4])
    for count, padded in ((4, 4), (1, 2), (3, 4), (2, 2), (1, 2)):
        x = torch.zeros(count, device=backend.device)
        w = torch.ones(3, 2 * count, device=backend.device)
        wanted = 3.0 * (2 * count + 5 * 2 * (padded - count))
        same(runner(w=w, x=x), torch.full_like(x, wanted))


def test_padding_with_the_last_row(backend: GraphBackend) -> None:
    def model(x: Tensor, starts: Tensor) -> Tensor:
        lengths = starts.diff()  # 0 for requests that are not there
        return x + lengths.sum() * 100 + starts[-1] + (lengths > 0).sum()

    runner = open_runner(backend, model, {"x": ROWS, "starts": STARTS}, sizes=[8])
    for lengths in ([3, 2], [1, 1, 1, 1, 1, 1, 1, 1], [7], [1, 2, 1]):
        tokens = sum(lengths)
        starts = torch.tensor([0, *lengths]).cumsum(0).to(backend.device)
        wanted = tokens * 101.0 + len(lengths)
        same(runner(x=torch.zeros(tokens, device=backend.device), starts=starts)[0].item(), wanted)


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
def test_poisoned_padding_never_changes_real_rows(backend: GraphBackend, mode: str) -> None:
    layer = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).to(backend.device)
    poison = Input(shape=("num_tokens", 2), dtype="float32", pad=float("nan"))
    runner = open_runner(backend, lambda x: layer(x), {"x": poison}, sizes=[8], compilation={"cudagraph_mode": mode})
    for count in (8, 1, 5, 3):
        x = batch(backend, count, count)
        found = runner(x=x)
        assert found.shape == (count, 2)
        assert not found.isnan().any()
        clean = torch.cat([x, torch.zeros(8 - count, 2, device=backend.device)])
        with torch.no_grad():
            same(found, layer(clean)[:count])


def test_a_model_that_writes_its_input_finds_padding_each_time(backend: GraphBackend) -> None:
    """The padding rows of a static buffer are written by warm-ups and by each replay."""

    def model(x: Tensor) -> Tensor:
        x.add_(1)
        return x + x.sum()

    runner = open_runner(backend, model, {"x": ROWS}, sizes=[2, 4])
    for count, padded in ((3, 4), (3, 4), (1, 2), (3, 4), (2, 2), (4, 4)):
        x = torch.zeros(count, device=backend.device)
        same(runner(x=x), torch.full((count,), 1.0 + padded, device=backend.device))
        same(x, torch.zeros_like(x))


def test_rows_written_through_input_views_never_pass_for_padding(backend: GraphBackend) -> None:
    """The caller may write into the views at any time, whatever becomes of the batch then."""
    cache = torch.zeros(64, device=backend.device)

    def model(slots: Tensor, x: Tensor) -> Tensor:
        cache.index_copy_(0, torch.where(slots < 0, torch.full_like(slots, 63), slots), x)
        return x * 1

    runner = open_runner(
        backend,
        model,
        {"slots": Input(shape=("num_tokens",), dtype="int64", pad=-1), "x": ROWS},
        sizes=[4, 8],
        compilation={"cudagraph_mode": "FULL_DECODE_ONLY"},
    )
    views = runner.input_views(8)
    views["slots"].copy_(torch.arange(8))
    views["x"].fill_(1)
    runner(**views, uniform_decode=False)  # eager, on the views themselves
    cache.fill_(100)
    slots = torch.tensor([10, 11, 12], device=backend.device)
    runner(slots=slots, x=torch.ones(3, device=backend.device), uniform_decode=True)
    assert cache[:10].tolist() == [100.0] * 10


def test_a_write_that_leaves_padding_as_it_is_is_seen_too(backend: GraphBackend) -> None:
    def model(x: Tensor) -> Tensor:
        x.sub_(x.mean(0, keepdim=True))
        return x.clone()

    for warmups in (0, 1):
        runner = open_runner(
            backend, model, {"x": X}, sizes=[4], compilation={"outputs": "clone", "cudagraph_num_of_warmups": warmups}
        )
        x = batch(backend, 3)
        first = runner(x=x)
        for _ in range(3):
            same(runner(x=x), first)


def test_views_of_the_static_buffers_save_the_copy(backend: GraphBackend) -> None:
    runner = open_runner(backend, total, {"x": ROWS}, sizes=[4])
    x = torch.ones(4, device=backend.device)
    same(runner(x=x), x + 4)
    views = runner.input_views(2)
    views["x"].fill_(3)
    same(runner(**views), torch.full((2,), 9.0, device=backend.device))
