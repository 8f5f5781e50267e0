"""Torch's state around captures and calls: autocast, inference and grad mode, random generators, threads.

Each test first shows the hazard with the bare backend, then what a runner makes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import capture as bare
from checks import same
from torch import Tensor, nn
from torch.nn.utils import parametrize
from ways import (
    GraphBackend,
    Model,
    all_ways,
    double,
    full,
    open_runner,
)

import cgplan
from cgplan import (
    CaptureError,
    HostSyncError,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@all_ways
def test_the_autocast_cache_of_weights(backend: GraphBackend, way: str) -> None:
    """Autocast keeps weights that it has cast until its block ends; a graph captured in such a block reads that cast
    for ever, whatever is loaded later, and after the block the memory is free. cgplan captures without that cache.
    """
    autocast = {"device_type": backend.device.type, "dtype": torch.bfloat16}
    x, layer = full(backend, 1), nn.Linear(2, 2, bias=False, device=backend.device)
    graph = backend.new_graph(backend.new_pool())
    with backend.session(), torch.no_grad(), torch.autocast(**autocast):
        layer(x)  # the warm-up fills the cache
        backend.begin(graph)
        out = layer(x)
        backend.end(graph)
    nn.init.constant_(layer.weight, 4)
    backend.replay(graph)
    assert not (out == 8).all()
    model = Model(backend, way)
    with torch.autocast(**autocast):
        runner = open_runner(backend, model, way)
    nn.init.constant_(model.stem.weight, 4)
    with torch.autocast(**autocast):
        same(runner(x=x), full(backend, 9).bfloat16())


def test_the_cache_of_parametrizations(backend: GraphBackend) -> None:
    """In a block of ``parametrize.cached()`` torch keeps computed weights; a capture that reads them has them for ever."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU()).to(backend.device).eval()
    double_weight = nn.Sequential(nn.Identity(), Twice())
    parametrize.register_parametrization(model[0], "weight", double_weight)
    nn.init.constant_(model[0].parametrizations.weight.original, 1)
    x = full(backend, 1)
    with parametrize.cached(), torch.no_grad():
        model(x)
        inputs = {"input": cgplan.Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
        sizes = {"cudagraph_capture_sizes": [len(x)]}
        runner = cgplan.capture(model, inputs, compilation=sizes, device=str(backend.device))
    nn.init.constant_(model[0].parametrizations.weight.original, 4)
    same(runner(input=x), full(backend, 16))
    runner.close()


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class Between(nn.Module):
    """A layer with nothing to do, behind what is tested."""

    def __init__(self, first: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.middle = first, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.first(x)) * 2


@torch.library.custom_op("torch_state_tests::product", mutates_args=())
def product(x: Tensor, y: Tensor) -> Tensor:
    """A product that autocast casts for, inside of an operator that it does not know."""
    return x @ y


@pytest.mark.parametrize(
    "compilation",
    [
        {"cudagraph_mode": "FULL"},
        {"cudagraph_mode": "FULL", "audit": "report"},
        {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["middle"]},
        {
            "cudagraph_mode": "PIECEWISE",
            "splitting_modules": ["middle"],
            "splitting_ops": ["aten::mul"],
        },
    ],
)
@pytest.mark.parametrize("kind", ["encoder", "operator in Python"])
@pytest.mark.parametrize("inference", [False, True])
def test_autocast_inside_of_operators(
    backend: GraphBackend, compilation: dict[str, Any], kind: str, inference: bool
) -> None:
    """The kernels of some operators call others that autocast casts for; dispatch modes would turn it off there."""
    weight = torch.randn(8, 8, device=backend.device)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder.eval().to(backend.device)
    first = {
        "encoder": lambda x: encoder(x.unsqueeze(0))[0],
        "operator in Python": lambda x: product(x, weight),
    }
    model = Between(first[kind])
    grad_mode = torch.inference_mode() if inference else torch.no_grad()
    with grad_mode, torch.autocast(backend.device.type, torch.bfloat16):
        runner = cgplan.capture(
            model,
            {"x": cgplan.Input(shape=("num_tokens", 8), dtype="float32", pad=0)},
            compilation={"cudagraph_capture_sizes": [4], **compilation},
            device=backend.device.type,
        )
        for _ in range(3):
            x = torch.randn(4, 8, device=backend.device)
            wanted = model(x)
            same(runner(x=x), wanted)
    runner.close()


@pytest.mark.parametrize("way", ["full", "ops"])
@pytest.mark.parametrize("captured_under", [False, True])
def test_a_model_that_is_run_under_another_autocast_state(
    backend: GraphBackend, way: str, captured_under: bool
) -> None:
    """A replay takes no notice of `torch.autocast` around it: results keep the dtype of the capture. A runner compares
    the state with that of the capture, or of the trace, and refuses another one.
    """
    x, weight, kind = full(backend, 1), full(backend, 2, 2, 2), backend.device.type
    graph, out = bare(backend, lambda: x @ weight)
    with torch.autocast(kind, torch.bfloat16):
        backend.replay(graph)
        assert out.dtype is not (x @ weight).dtype
    with torch.autocast(kind, torch.bfloat16, enabled=captured_under):
        runner = open_runner(backend, Model(backend, way), way)
        kept = {runner(x=x).dtype, runner(x=full(backend, 1, 9, 2)).dtype}
    assert kept == {torch.bfloat16 if captured_under else torch.float32}, (
        "a replay, and an eager run beside it"
    )
    with torch.autocast(kind, torch.bfloat16, enabled=not captured_under):
        with pytest.raises(CaptureError, match=r"was (captured|traced) with autocast") as caught:
            runner(x=x)
        assert "autocast" in caught.value.remedy
    with torch.autocast(kind, torch.bfloat16, enabled=captured_under):
        assert runner(x=x).dtype in kept


@pytest.mark.parametrize("way", ["full", "ops", "modules"])
def test_a_capture_in_inference_mode(backend: GraphBackend, way: str) -> None:
    """A buffer made in inference mode can be written to only there, so serving fails with "Inplace update to inference
    tensor". A runner's buffers can.
    """
    x = full(backend, 3)
    with torch.inference_mode():
        static = torch.zeros_like(x)
    with pytest.raises(RuntimeError, match="inference tensor"):
        static.copy_(x)
    model = Model(backend, way, double)
    with torch.inference_mode():
        runner = open_runner(backend, model, way)
        same(runner(x=x).clone(), x * 2 + 1)
    same(runner(x=x + 1), (x + 1) * 2 + 1)


@all_ways
def test_gradients_through_a_replay(backend: GraphBackend, way: str) -> None:
    """Captured with gradients on, an output belongs to the autograd graph of the capture: one backward works on old
    values, the next fails with "a second time". A runner's outputs never require gradients, replayed or eager.
    """
    x, weight = full(backend, 1), full(backend, 2).requires_grad_()
    graph = backend.new_graph(backend.new_pool())
    with backend.session(), backend.capturing(graph):
        out = x * weight
    backend.replay(graph)
    out.sum().backward()
    backend.replay(graph)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    runner = open_runner(backend, Model(backend, way), way)
    for rows in (3, 9):
        assert not runner(x=full(backend, 1, rows, 2)).requires_grad


@all_ways
def test_the_random_generator_after_a_failed_capture(backend: GraphBackend, way: str) -> None:
    """After a capture that failed, torch's generator may believe that the capture still runs, and the next dropout
    anywhere raises "offset increment outside graph capture". Here it works at once, and so does the next capture.
    """

    def stem(x: Tensor) -> Tensor:
        return (x + torch.rand_like(x)) * x.sum().item()

    x = full(backend, 1)
    with pytest.raises((RuntimeError, HostSyncError)):
        bare(backend, lambda: stem(x))
    with pytest.raises(HostSyncError):
        open_runner(backend, Model(backend, way, stem), way)
    assert not torch.equal(torch.rand_like(x), torch.rand_like(x))
    same(open_runner(backend, Model(backend, way, double), way)(x=x), x * 2 + 1)


def test_a_generator_that_the_forward_makes(backend: GraphBackend) -> None:
    """A replay would go on drawing where each run of the model begins anew."""

    def forward(x: Tensor) -> Tensor:
        generator = torch.Generator(x.device).manual_seed(0)
        return x + torch.rand(2, generator=generator, device=x.device)

    inputs = {"x": cgplan.Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    with pytest.raises(CaptureError):
        cgplan.capture(forward, inputs, device=str(backend.device))
