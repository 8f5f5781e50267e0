"""Debug mode finds what a replay gets wrong, and says where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cgplan
from cgplan import GraphRunner, Input, NumbersError
from cgplan.graphs import GraphBackend


def debugged(backend: GraphBackend, model: Callable[..., Any], **compilation: Any) -> GraphRunner:
    return cgplan.capture(
        model,
        {"x": Input(shape=("num_tokens", 4), dtype="float32", pad=0)},
        compilation={"cudagraph_capture_sizes": [2, 8], "debug": True, **compilation},
        device=backend.device.type,
    )


def rows(backend: GraphBackend, count: int) -> Tensor:
    return torch.arange(count * 4.0, device=backend.device).reshape(count, 4) + 1


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_right_model_passes_and_gives_its_numbers(backend: GraphBackend, mode: str) -> None:
    torch._dynamo.reset()
    runner = debugged(backend, lambda x: (x * 2, {"y": x.softmax(-1)}), cudagraph_mode=mode)
    for count in (2, 3, 8, 1, 5):
        x = rows(backend, count)
        found = runner(x=x)
        assert torch.equal(found[0], x * 2)
        assert torch.equal(found[1]["y"], x.softmax(-1))


def test_a_model_that_writes_its_inputs_is_compared_on_the_same_inputs(backend: GraphBackend) -> None:
    runner = debugged(backend, lambda x: x.mul_(3).add_(1).clone())
    for count in (3, 2, 8):
        x = rows(backend, count)
        assert torch.equal(runner(x=x), x * 3 + 1)
        assert torch.equal(x, rows(backend, count))


def test_a_number_that_python_froze_is_found(backend: GraphBackend) -> None:
    scale = [2.0]
    runner = debugged(backend, lambda x: (x + 1, x * scale[0]))
    scale[0] = 5.0
    with pytest.raises(NumbersError, match="differs from the model's own code: output 1") as caught:
        runner(x=rows(backend, 2))
    assert "largest deviation is 24" in caught.value.message  # 8 * (5 - 2)
    scale[0] = 2.0
    assert torch.equal(runner(x=rows(backend, 2))[1], rows(backend, 2) * 2)


def test_padding_that_reaches_real_rows_is_found(backend: GraphBackend) -> None:
    runner = debugged(backend, lambda x: x - x.sum(0))
    runner(x=rows(backend, 2))  # no padding, no fault
    with pytest.raises(NumbersError, match="NaN in its padding rows: output 0"):
        runner(x=rows(backend, 3))


def test_outputs_expire_visibly(backend: GraphBackend) -> None:
    runner = debugged(backend, lambda x: x * 2)
    first = runner(x=rows(backend, 3))
    assert torch.equal(first, rows(backend, 3) * 2)
    second = runner(x=rows(backend, 2))
    assert first.isnan().all()
    assert torch.equal(second, rows(backend, 2) * 2)


def test_without_debug_nothing_is_checked(backend: GraphBackend) -> None:
    scale = [2.0]
    runner = debugged(backend, lambda x: x * scale[0], debug=False)
    scale[0] = 5.0
    x = rows(backend, 2)
    assert torch.equal(runner(x=x), x * 2), "the graph holds the number of its capture"
