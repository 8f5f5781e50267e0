"""Several named dimensions: batches are padded in all of them, and outputs are cut in all of them."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from checks import same
from torch import Tensor, nn
from ways import GraphBackend

import cgplan
from cgplan import (
    ConfigError,
    DispatchMissError,
    GraphRunner,
    Input,
    InputError,
    NumbersError,
    OutputShapeError,
    PlanError,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

DIMS = {"batch": {"max": 8}, "length": {"max": 64, "multiple_of": 16}}
SHAPES = [["batch", "length", 8], ["batch", 8], [3]]
IDS, MASK = (
    {"shape": ["batch", "length"], "dtype": "int64", "pad": 0},
    {"shape": ["batch", "length"], "dtype": "bool", "pad": False},
)


class Encoder(nn.Module):
    """Attention over the length, which sees padding where the mask does not hide it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(50, 8), nn.Linear(8, 8)
        self.register_buffer("constant", torch.ones(3))

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.linear(self.embedding(ids)).tanh()
        scores = (hidden @ hidden.transpose(1, 2)).masked_fill(~mask[:, None], -1e9)
        hidden = scores.softmax(-1) @ hidden
        return hidden, (hidden * mask[..., None]).sum(1), self.constant + 1


def open_runner(backend: GraphBackend, encoder: nn.Module, **changes: Any) -> GraphRunner:
    compilation = {
        name: changes.pop(name) for name in list(changes) if name not in ("model", "dims", "inputs")
    }
    config = {
        "dims": DIMS,
        "inputs": {"ids": IDS, "mask": MASK},
        "model": {"output_shapes": SHAPES},
        "device": str(backend.device),
        "compilation": compilation,
    }
    return cgplan.capture(encoder.to(backend.device).eval(), config={**config, **changes})


def batch(backend: GraphBackend, rows: int, length: int) -> dict[str, Tensor]:
    lengths = torch.randint(1, length + 1, (rows, 1))
    given = {"ids": torch.randint(0, 50, (rows, length)), "mask": torch.arange(length) < lengths}
    return {name: tensor.to(backend.device) for name, tensor in given.items()}


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"capture_policy": "lazy"},
        {"cudagraph_mode": "PIECEWISE", "splitting_ops": ["aten::softmax"]},
        {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["linear"]},
        {"outputs": "clone", "boxes": [[8, 64], [2, 64], [8, 16]]},
        {"debug": True},
    ],
    ids=["all", "lazy", "ops", "modules", "boxes", "debug"],
)
def test_batches_of_all_shapes(
    backend: GraphBackend, settings: dict[str, Any], on_host: bool
) -> None:
    model = Encoder()
    with closing(open_runner(backend, model, **settings)) as runner:
        for rows, length in [
            (1, 1),
            (3, 20),
            (8, 64),
            (5, 33),
            (2, 16),
            (2, 17),
            (9, 3),
            (3, 65),
            (1, 1),
            (3, 20),
        ]:
            given = batch(backend, rows, length)
            asked = {name: tensor.cpu() for name, tensor in given.items()} if on_host else given
            wanted = model(**given)
            for _ in range(2):
                found = runner(**asked)
                assert [tensor.shape for tensor in found] == [tensor.shape for tensor in wanted]
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
            served = rows <= 8 and length <= 64
            assert (runner.route(given).mode is cgplan.CUDAGraphMode.NONE) == (not served)
            torch.testing.assert_close(runner.run_eagerly(**asked), wanted, rtol=1e-4, atol=1e-5)


def test_the_box_with_the_fewest_elements_serves(backend: GraphBackend) -> None:
    with closing(
        open_runner(backend, Encoder(), boxes=[[8, 16], [1, 64], [8, 64]], on_miss="error")
    ) as runner:
        boxes = {(1, 16): (1, 64), (2, 16): (8, 16), (1, 17): (1, 64), (2, 17): (8, 64)}
        for asked, box in boxes.items():
            assert runner.route(batch(backend, *asked)).descriptor.box == box
            assert runner.padded(*asked) == box[0]
        assert runner.padded(1, 65) is None
        with pytest.raises(
            DispatchMissError, match="a batch of 1 x 65 tokens: larger than the largest"
        ):
            runner(**batch(backend, 1, 65))
        assert "1x64" in str(runner.report)
        assert "batch x length" in str(runner.report)


def test_rows_of_tokens_beside_a_named_dimension(backend: GraphBackend) -> None:
    inputs = {
        "x": Input(shape=("num_tokens", "width"), dtype="float32", pad=0),
        "w": Input(shape=("width",), dtype="float32", pad=0),
    }
    config = {
        "dims": {"width": {"max": 6, "sizes": [2, 6]}},
        "inputs": inputs,
        "device": str(backend.device),
    }
    shapes = {
        "model": {"output_shapes": ["num_tokens"]},
        "compilation": {"cudagraph_capture_sizes": [4, 8]},
    }
    with closing(
        cgplan.capture(lambda x, w: (x * w).sum(1), config={**config, **shapes})
    ) as runner:
        for rows, width in ((3, 1), (5, 6), (1, 2), (8, 5)):
            x, w = (
                torch.randn(*shape, device=backend.device) for shape in ((rows, width), (width,))
            )
            torch.testing.assert_close(runner(x=x, w=w), (x * w).sum(1))


def test_a_dimension_that_may_be_narrower(backend: GraphBackend) -> None:
    """Block tables: the graph reads all columns, a batch has as many as it needs."""
    table = Input(shape=("num_tokens", "up to 4"), dtype="int32", pad=-1)
    sizes = {"cudagraph_capture_sizes": [4]}
    with closing(
        cgplan.capture(
            lambda t: (t >= 0).sum(1), {"t": table}, compilation=sizes, device=backend.device
        )
    ) as r:
        for width in (1, 4, 2):
            t = torch.arange(3 * width, dtype=torch.int32, device=backend.device).view(3, width)
            same(r(t=t), torch.full((3,), width, device=backend.device))
        with pytest.raises(
            InputError, match=r"has shape \[3, 5\], declared is \['num_tokens', 'up to 4'\]"
        ):
            r(t=torch.zeros(3, 5, dtype=torch.int32, device=backend.device))


def test_what_cannot_be(backend: GraphBackend) -> None:
    with pytest.raises(OutputShapeError, match=r"model\.output_shapes says") as caught:
        open_runner(backend, Encoder(), model={"output_shapes": [["batch", 8], ["batch", 8], [3]]})
    assert caught.value.remedy.startswith("Write batch or length in place of the number of rows")
    with pytest.raises(OutputShapeError, match="has 1 shape, the model returns") as caught:
        open_runner(backend, Encoder(), model={"output_shapes": [["batch", 8]]})
    assert caught.value.remedy.startswith("Write a shape for each tensor")
    last = {"shape": ["length"], "dtype": "int64", "pad": "last"}
    with pytest.raises(ConfigError, match="pad: last goes with rows of the batch"):
        open_runner(backend, Encoder(), inputs={"ids": IDS, "mask": MASK, "starts": last})
    with closing(open_runner(backend, Encoder())) as runner:
        with pytest.raises(InputError, match="'mask' has length = 5, but 'ids' has 4"):
            runner(ids=batch(backend, 2, 4)["ids"], mask=batch(backend, 2, 5)["mask"])
        for way in (runner.stage, runner.input_views):
            with pytest.raises(InputError, match="batches of length cannot be written in place"):
                way(2)
    with closing(open_runner(backend, Encoder(), capture_policy="adaptive")) as runner:
        runner(**batch(backend, 2, 4))
        with pytest.raises(PlanError, match="steps of requests have no batch, length"):
            runner.replan()


@pytest.mark.parametrize("rows", [3, 4], ids=["padded in both", "padded in length"])
@pytest.mark.parametrize("settings", [{}, {"debug": True}], ids=str)
def test_padding_that_reaches_real_rows_from_any_dimension_is_found(
    backend: GraphBackend, settings: dict[str, Any], rows: int
) -> None:
    config = {
        "dims": {"batch": {"max": 4}, "length": {"max": 8}},
        "inputs": {"x": {"shape": ["batch", "length"], "dtype": "float32", "pad": 0}},
        "model": {"output_shapes": ["batch"]},
        "compilation": settings,
        "device": str(backend.device),
    }
    x = torch.ones(rows, 6, device=backend.device)
    with closing(cgplan.capture(lambda x: x.nansum(1), config=config)) as runner:
        same(runner(x=x), torch.full((rows,), 6.0, device=backend.device))
    with (
        closing(cgplan.capture(lambda x: x.mean(1), config=config)) as runner,
        pytest.raises(NumbersError, match="output 0 depends on what the padding holds"),
    ):
        runner(x=x)


def test_padding_of_each_dimension_is_compared_once(backend: GraphBackend) -> None:
    """Padding in rows, which is harmless, had been the one padded comparison."""

    def mean(x: Tensor) -> Tensor:
        return x.mean(1)

    dims = {"batch": {"max": 4}, "side": {"max": 96, "sizes": [64, 96]}}
    shape = ("batch", "side")
    config = {
        "dims": dims,
        "inputs": {"x": {"shape": shape, "dtype": "float32", "pad": 0}},
        "model": {"output_shapes": ["batch"]},
        "device": str(backend.device),
    }
    wide, narrow = (torch.ones(3, side, device=backend.device) for side in (96, 80))
    with closing(cgplan.capture(mean, config=config)) as runner:
        same(runner(x=wide), mean(wide))
        with pytest.raises(NumbersError, match="; side 80 is padded to 96") as caught:
            runner(x=narrow)
    assert caught.value.remedy.startswith(
        "List each side in dims.side.sizes: none is padded then, but a plan may merge them. "
    )
    kinds = {at: cgplan.Dim(name, **dims[name]) for at, name in enumerate(shape)}
    g = cgplan.graphed(mean, dynamic={"x": kinds}, pad={"x": 0})
    for x in (*[wide] * 6, *[narrow] * 4):
        same(g(x), mean(x))
    assert "; side 80 is padded to 96; so nothing is padded" in g.explain()
