"""Debug mode finds what a replay gets wrong, and says where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cgplan
from cgplan import GraphRunner, Input, ModelError, NumbersError
from cgplan.backends import GraphBackend


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


@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_padding_that_is_not_looked_at_is_said_to_be(backend: GraphBackend, dtype: str) -> None:
    """Of whole numbers none is NaN."""
    inputs = {"x": Input(shape=("num_tokens",), dtype=dtype, pad=0), "scale": Input(shape=(1,), dtype="float32", pad=1)}
    runner = cgplan.capture(
        lambda x, scale: x * scale - x.sum(),
        inputs,
        compilation={"cudagraph_capture_sizes": [4], "debug": True},
        device=backend.device.type,
    )
    warned = [warning for warning in runner.report.warnings if "reaches real rows is not checked" in warning]
    assert len(warned) == (dtype == "int64")


def test_an_operator_that_takes_no_nan_is_checked_with_other_padding(backend: GraphBackend) -> None:
    """torch.multinomial, whose check needs the host, is not in a graph of CUDA's."""

    def model(x: Tensor, leaks: bool = False) -> Tensor:
        if backend.device.type == "cpu":
            torch.multinomial(x.softmax(-1), 1)
        return x - x.sum(0) if leaks else x * 2

    runner = debugged(backend, model)
    for count in (3, 8, 5):
        assert torch.equal(runner(x=rows(backend, count)), rows(backend, count) * 2)
    leaky = debugged(backend, lambda x: model(x, leaks=True))
    with pytest.raises(NumbersError, match="in its padding rows: output 0"):
        leaky(x=rows(backend, 3))


def test_no_nan_reaches_operators_that_check_values(backend: GraphBackend) -> None:
    """On a GPU a failed check would end the process. Indices of the padding row are computed from floats."""
    table = torch.arange(9.0, device=backend.device)
    checked: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
        "indices": (lambda x: table[(x[:, 0] / 4).long()] + x.sum(1), "aten::index, which checks indices"),
        "probabilities": (
            lambda x: torch.bernoulli(x.sigmoid()) * 0 + x,
            "aten::bernoulli, which checks probabilities",
        ),
    }
    for model, said in checked.values():
        runner = debugged(backend, model)
        assert [w for w in runner.report.warnings if f"not NaN: the forward has {said}" in w]
        for count in (3, 2, 5):
            assert torch.equal(runner(x=rows(backend, count)), model(rows(backend, count)))
    leaky = debugged(backend, lambda x: table[x[:, :1].long() % 9] + x - x.sum(0))
    with pytest.raises(NumbersError, match="with copies of real rows in its padding rows: output 0"):
        leaky(x=rows(backend, 3))
    harmless = debugged(backend, lambda x: x[torch.argsort(x[:, 0]).argsort()] * 2)
    assert not [w for w in harmless.report.warnings if "not NaN" in w]


def test_an_error_of_the_model_is_typed(backend: GraphBackend) -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError("not today")

    model = Chosen(lambda x: x * 2, fails)
    runner = debugged(backend, model)
    model.is_captured = True
    with pytest.raises(ModelError, match="ValueError: not today"):
        runner(x=rows(backend, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_compiled_model_is_compared_with_itself(mode: str) -> None:
    """Its kernels round otherwise than the model's own."""
    torch._dynamo.reset()
    layers = [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Softmax(-1)]
    runner = cgplan.capture(
        torch.nn.Sequential(*layers, torch.nn.Linear(64, 64)).eval().cuda(),
        {"input": Input(shape=("num_tokens", 64), dtype="float32", pad=0)},
        compilation={
            "cudagraph_mode": mode, "cudagraph_capture_sizes": [8], "debug": True, "compiler": "inductor",
            "splitting_ops": ["aten::softmax"],
        },
        device="cuda",
    )  # fmt: skip
    for count in (8, 5, 3):
        x = torch.randn(count, 64, device="cuda")
        with torch.no_grad():
            torch.testing.assert_close(runner(input=x), runner.model(x))


def test_outputs_expire_in_whatever_mode_they_were_made(backend: GraphBackend) -> None:
    runner = debugged(backend, lambda x: x * 2)
    with torch.inference_mode():
        first = runner(x=rows(backend, 3))
    second = runner(x=rows(backend, 2))
    assert first.isnan().all()
    with torch.enable_grad():
        second.requires_grad_()
        third = runner(x=rows(backend, 2))
    assert second.isnan().all()
    assert not third.requires_grad
    with torch.inference_mode():
        runner(x=rows(backend, 2))
    assert third.isnan().all()


class Chosen:
    """A model whose code is another one once it has been captured."""

    def __init__(self, before: Callable[[Tensor], Any], after: Callable[[Tensor], Any]) -> None:
        self.choices, self.is_captured = (before, after), False

    def __call__(self, x: Tensor) -> Any:
        return self.choices[self.is_captured](x)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (lambda x: (x * 2).half(), r"output 0, torch\.float32 \[2, 4\] and torch\.float16 \[2, 4\]"),
        (lambda x: (x * 2)[:, :3], r"output 0, torch\.float32 \[2, 4\] and torch\.float32 \[2, 3\]"),
        (lambda x: 3.0, r"output 0, torch\.float32 \[2, 4\] and no tensor"),
        (lambda x: x * 2 + 1, r"the largest deviation is 1\n"),
        (lambda x: x * 2 + x.new_tensor([0, 0, 0, float("nan")]), r"the largest deviation is inf\n"),
    ],
)
def test_what_differs_in_kind_is_said_so(backend: GraphBackend, after: Callable[[Tensor], Any], said: str) -> None:
    model = Chosen(lambda x: x * 2, after)
    runner = debugged(backend, model)
    model.is_captured = True
    with pytest.raises(NumbersError, match=said) as caught:
        runner(x=rows(backend, 2))
    assert "random operators" in caught.value.remedy


def test_a_number_beside_tensors_that_python_froze_is_found(backend: GraphBackend) -> None:
    model = Chosen(lambda x: (x * 2, 2, object()), lambda x: (x * 2, 3, object()))
    runner = debugged(backend, model)
    model.is_captured = True
    with pytest.raises(NumbersError, match="output 1, 2 and 3"):
        runner(x=rows(backend, 2))


def test_outputs_of_8_bits(backend: GraphBackend) -> None:
    model = Chosen(lambda x: (x * 2).to(torch.float8_e4m3fn), lambda x: (x * 2).to(torch.float8_e4m3fn))
    runner = debugged(backend, model)
    model.is_captured = True
    assert torch.equal(runner(x=rows(backend, 1)).float(), rows(backend, 1) * 2)
    model.choices = (model.choices[0], lambda x: (x * 4).to(torch.float8_e4m3fn))
    with pytest.raises(NumbersError, match=r"the largest deviation is 16\n"):
        runner(x=rows(backend, 2))


class Stateful(torch.nn.Module):
    """Counts its calls in a buffer, an attribute and a tensor made anew, and adds the count to what it returns."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1, device=device))
        self.cache = torch.zeros(16, 4, device=device)
        self.attend = torch.nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        self.cache[: x.shape[0]].mul_(0.5).add_(x)
        return self.attend(x + self.cache[: x.shape[0]]) + self.count


@pytest.mark.parametrize("way", [{"cudagraph_mode": "FULL"}, {"splitting_modules": ["attend"]}])
def test_state_that_is_written_in_place_counts_once(backend: GraphBackend, way: dict[str, Any]) -> None:
    """Each checked call runs the forward several times; the state must be as after one."""
    plain, checked = Stateful(backend.device), Stateful(backend.device)
    mode = {"cudagraph_mode": "PIECEWISE", **way}
    runners = [debugged(backend, model, debug=model is checked, **mode) for model in (plain, checked)]
    for model in (plain, checked):
        model.count.zero_()
        model.cache.zero_()
    for count in (3, 2, 8, 3, 1, 2):
        x = rows(backend, count)
        wanted, found = (runner(x=x) for runner in runners)
        assert torch.equal(found, wanted)
        assert torch.equal(checked.count, plain.count)
        assert torch.equal(checked.cache[:count], plain.cache[:count])
    assert checked.count.item() == 6
