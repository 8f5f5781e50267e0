"""Padding: rows behind a batch hold what their declaration says, whichever batches and models came before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import capture as bare
from checks import same
from torch import Tensor
from ways import KEYS, Cached, GraphBackend, Model, all_ways, double, each_size, full
from ways import open_runner as open_way

import cgplan
from cgplan import GraphRunner, Input, NumbersError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

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


def test_padding_holds_across_sizes_and_dimensions(backend: GraphBackend) -> None:
    wide = Input(shape=(3, "2 * num_tokens"), dtype="float32", pad=5)
    options = {"sizes": [2, 4], "compilation": {"verify": "off"}}  # real rows see the padding
    runner = open_runner(backend, lambda w, x: x + w.sum(), {"w": wide, "x": ROWS}, **options)
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


def sees_all_rows(x: Tensor) -> Tensor:
    return x + x.sum(0)


@all_ways
def test_stale_padding_after_a_larger_batch(backend: GraphBackend, way: str) -> None:
    """The rows behind a small batch hold what a larger batch left there, and real rows that look at all rows change
    with it. A runner makes them padding again on each call.
    """
    static = full(backend, 0, 8, 2)
    graph, out = bare(backend, lambda: sees_all_rows(static))
    for rows in (8, 3):
        static[:rows] = 10
        backend.replay(graph)
    same(out[:3], full(backend, 90, 3, 2))  # right is 40
    runner = open_way(backend, Model(backend, way, sees_all_rows), way)
    for rows in (8, 3, 5, 7, 1, 4, 2):
        x = full(backend, 10, rows, 2)
        same(runner(x=x), sees_all_rows(x) + 1)


@all_ways
def test_padding_that_poisons_real_rows(backend: GraphBackend, way: str) -> None:
    """Padding that is not neutral reaches real rows: 0 * NaN is NaN, slot 0 of a KV cache is somebody's. Every input
    declares its padding value, and NaN as that value proves that a model's rows do not look at padding.
    """
    static, x = full(backend, torch.nan, 4, 2), full(backend, 10, 3, 2)
    graph, out = bare(backend, lambda: sees_all_rows(static))
    static[:3] = x
    backend.replay(graph)
    assert out.isnan().all()
    same(open_way(backend, Model(backend, way, sees_all_rows), way)(x=x), sees_all_rows(x) + 1)
    poison = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=float("nan"))}
    assert open_way(backend, sees_all_rows, inputs=poison, verify="off")(x=x).isnan().all()
    with pytest.raises(NumbersError, match="the output depends on what the padding holds"):
        open_way(backend, Model(backend, way, sees_all_rows), way, inputs=poison)(x=x)
    proof = open_way(backend, Model(backend, way, double), way, inputs=poison)
    for rows in (3, 8, 1, 5):
        same(proof(x=full(backend, 10, rows, 2)), full(backend, 21, rows, 2))


@each_size
def test_padding_that_writes_to_real_memory(backend: GraphBackend, way: str) -> None:
    """Padding rows run too: with slot 0 for padding, each step destroys the first token of somebody's KV cache. Say
    which value is harmless (here -1, a spare row); warm-ups and captures run on it as well.
    """
    x, cached = full(backend, 1, 3, 2), Cached(backend)
    slots = torch.tensor([5, 6, 7, 0], device=backend.device)  # the last row is padding
    cached.cache[:8] = 9
    graph, _ = bare(backend, lambda: cached(full(backend, 0), slots))
    backend.replay(graph)
    assert not cached.cache[0].any()  # was 9
    model = Model(backend, way, Cached(backend))
    model.stem.cache[:8] = 9
    same(open_way(backend, model, way, inputs=KEYS)(x=x, slots=slots[:3]), x + 1)
    same(model.stem.cache[5:8], x)
    assert (model.stem.cache[:5] == 9).all()
