"""State that a forward reads and binds anew is refused at capture; state that it only keeps is not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from checks import back_at, reserved
from torch import Tensor, nn

import cgplan
from cgplan import CaptureError, GraphRunner, Input
from cgplan.graphs import GraphBackend

WAYS: dict[str, dict[str, Any]] = {
    "full": {"cudagraph_mode": "FULL"},
    "ops": {"cudagraph_mode": "PIECEWISE", "splitting_ops": ["aten::softmax"]},
    "modules": {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["middle"]},
}
all_ways = pytest.mark.parametrize("way", list(WAYS))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Middle(nn.Module):
    """The eager piece."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class Model(nn.Module):
    """``softmax(x * scale)`` and whatever ``change`` does to its attributes on the way."""

    def __init__(self, backend: GraphBackend, change: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.middle = Middle()
        self.inner = nn.Module()
        self.step, self.inner.total = 0, 0
        self.cache = torch.ones(2, device=backend.device)
        self.inner._kept = torch.ones(2, device=backend.device)
        self.listed = [torch.ones(2, device=backend.device)]
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.change(self, x))


def open_runner(backend: GraphBackend, model: Callable[..., Any], way: str) -> GraphRunner:
    return cgplan.capture(
        model,
        {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)},
        compilation={"cudagraph_capture_sizes": [4, 8], "outputs": "clone", **WAYS[way]},
        device=backend.device.type,
    )


def adds_to_a_tensor(model: Model, x: Tensor) -> Tensor:
    model.cache = model.cache + x.sum(0)
    return x + model.cache


def adds_to_a_private_one_inside(model: Model, x: Tensor) -> Tensor:
    model.inner._kept = model.inner._kept * 2
    return x + model.inner._kept


def adds_to_one_in_a_list(model: Model, x: Tensor) -> Tensor:
    model.listed[0] = model.listed[0] + 1
    return x + model.listed[0]


def counts_and_uses_it(model: Model, x: Tensor) -> Tensor:
    model.step += 1
    return x * model.step


def counts_inside_and_makes_a_tensor_of_it(model: Model, x: Tensor) -> Tensor:
    model.inner.total += 1
    return x * torch.full((2,), float(model.inner.total), device=x.device)


@all_ways
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (adds_to_a_tensor, "cache"),
        (adds_to_a_private_one_inside, "inner._kept"),
        (counts_and_uses_it, "step"),
        (counts_inside_and_makes_a_tensor_of_it, "inner.total"),
    ],
)
def test_state_that_is_read_and_bound_anew_is_refused(
    backend: GraphBackend, way: str, change: Callable[..., Tensor], named: str
) -> None:
    model = Model(backend, change).eval()
    before = reserved(backend)
    with pytest.raises(CaptureError, match=f"the forward reads {named} and binds it anew") as caught:
        open_runner(backend, model, way)
    assert "in place" in caught.value.remedy
    del caught
    gc.collect()
    assert back_at(backend, before), "attributes hold what the warm-up left, no graph memory"


def test_state_in_a_list_is_refused(backend: GraphBackend) -> None:
    with pytest.raises(CaptureError, match=r"the forward reads listed\[0\]"):
        open_runner(backend, Model(backend, adds_to_one_in_a_list).eval(), "full")


def keeps_its_result(model: Model, x: Tensor) -> Tensor:
    model.last = x * 2
    return model.last + 0


def keeps_its_input(model: Model, x: Tensor) -> Tensor:
    model.last = x
    return x * 2


def reads_what_it_has_just_made(model: Model, x: Tensor) -> Tensor:
    model.cache = x.sum(0)
    return x * 2 + 0 * model.cache


def writes_in_place(model: Model, x: Tensor) -> Tensor:
    model.cache.add_(1)
    return x * 2


@pytest.mark.parametrize("way", ["full", "modules"])
@pytest.mark.parametrize("change", [keeps_its_result, keeps_its_input, reads_what_it_has_just_made, writes_in_place])
def test_state_that_is_kept_or_written_in_place_is_none(
    backend: GraphBackend, way: str, change: Callable[..., Tensor]
) -> None:
    with closing(open_runner(backend, Model(backend, change).eval(), way)) as runner:
        assert runner.report.warnings == ()
        x = torch.randn(3, 2, device=backend.device)
        assert torch.equal(runner(x=x), (x * 2).softmax(-1))


def test_a_count_that_no_operator_sees_is_a_warning(backend: GraphBackend) -> None:
    def counts(model: Model, x: Tensor) -> Tensor:
        model.step += 1
        return x * 2

    model = Model(backend, counts).eval()
    with closing(open_runner(backend, model, "full")) as runner:
        assert runner.report.warnings == ("the forward changes step; replays do not, nor do they see it change",)
        step, x = model.step, torch.randn(3, 2, device=backend.device)
        assert torch.equal(runner(x=x), (x * 2).softmax(-1))
        assert model.step == step, "that is what the warning says"


def test_eager_pieces_may_bind_their_state_anew(backend: GraphBackend) -> None:
    class Remembers(Middle):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen = self.seen.to(x.device) + 1
            return x.softmax(-1) * self.seen

    model = Model(backend, lambda _, x: x * 2).eval()
    model.middle = Remembers()
    with closing(open_runner(backend, model, "modules")) as runner:
        model.middle.seen = torch.zeros(2)
        x = torch.randn(3, 2, device=backend.device)
        for count in (1, 2, 3):
            assert torch.equal(runner(x=x), (x * 2).softmax(-1) * count)


def test_the_search_leaves_the_model_as_the_capture_did(backend: GraphBackend) -> None:
    """Looking runs the forward again; what that changes is put back, and nothing is kept of the model."""
    runs = []

    def counts(model: Model, x: Tensor) -> Tensor:
        model.step += 1
        runs.append(model.step)
        return x * 2

    model = Model(backend, counts).eval()
    with closing(open_runner(backend, model, "full")):
        assert model.step == 4, "a warm-up and a capture for each of two sizes"
        assert len(runs) > 4, "and runs to look"
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
