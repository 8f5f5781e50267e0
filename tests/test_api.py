"""``cgplan.capture``: from Python sections, from a configuration, and from its file; and what is logged."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import cgplan
from cgplan import CUDAGraphMode, Input
from cgplan.errors import ConfigError, ModelError
from cgplan.planning import MissReason

FILE = """
device: cpu
{model}
inputs:
  x: {{shape: [num_tokens, 3], dtype: float32, pad: 0}}
compilation: {{cudagraph_capture_sizes: [4]}}
"""
X = torch.arange(9.0).view(3, 3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "double.py").write_text("def build(by): return lambda x: x * by\n")
    (tmp_path / "plain.yaml").write_text(FILE.format(model=""))
    file = tmp_path / "my.yaml"
    file.write_text(FILE.format(model="model: {target: 'double.py:build', kwargs: {by: 3}}"))
    return file


def test_a_file_names_sizes_inputs_and_the_model(path: Path) -> None:
    for config in (path, str(path)):
        runner = cgplan.capture(config=config)
        assert runner.plan.capture_sizes == (4,)
        assert torch.equal(runner(x=X), X * 3)
    runner = cgplan.capture(lambda x: x + 1, config=cgplan.load_config(path), device="cpu")
    assert torch.equal(runner(x=X), X + 1), "a model that is given comes before the target"


def test_several_dimensions_take_shapes_of_the_outputs() -> None:
    runner = cgplan.capture(
        lambda x: x * 2,
        {"x": (("num_tokens", "side", "side"), torch.float32, 0)},
        compilation={"cudagraph_capture_sizes": [2]},
        scheduler={"max_num_seqs": 2, "max_num_batched_tokens": 2},
        dims={"side": {"max": 3, "sizes": [2, 3]}},
        output_shapes=[["num_tokens", "side", "side"]],
        device="cpu",
    )
    assert torch.equal(runner(x=X[None]), 2 * X[None])
    with pytest.raises(ConfigError, match="config and output_shapes, inputs were both given"):
        cgplan.capture(config=runner.config, inputs={"x": X}, output_shapes=[["num_tokens"]])


def test_nested_inputs_point_to_graphed() -> None:
    x = torch.zeros(4, 3)
    for nested in ({"position": x}, [x], (Input.like(x, pad=0),)):
        with pytest.raises(ConfigError, match="input 'obs' is nested") as caught:
            cgplan.capture(lambda obs: obs, {"obs": nested}, device="cpu")
        assert "cgplan.graphed" in caught.value.remedy


def test_warnings_of_the_report_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(3, 3).requires_grad_(False)
    x = torch.zeros(4, 3)
    cgplan.capture(model, {"input": x}, device="cpu")
    assert caplog.text.count("the model is in training mode: call .eval()") == 1
    caplog.clear()
    cgplan.capture(model.eval(), {"input": x}, device="cpu")
    assert not caplog.text


def test_a_configuration_stands_in_place_of_sections(path: Path) -> None:
    with pytest.raises(ConfigError, match="config and inputs, compilation were both given"):
        cgplan.capture(
            lambda x: x, {"x": Input(shape=(3,), dtype="int64", pad=0)}, config=path, compilation={}
        )
    with pytest.raises(ModelError, match="no model was given"):
        cgplan.capture(config=path.parent / "plain.yaml")
    with pytest.raises(ModelError, match=r"the model is 'double\.py:build'"):
        cgplan.capture("double.py:build")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="neither inputs nor config"):
        cgplan.capture(lambda x: x)
    with pytest.raises(ConfigError, match="inputs is a list"):
        cgplan.capture(lambda x: x, [X])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="configuration: found 3"):
        cgplan.capture(lambda x: x, config=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("capture", [cgplan.capture, cgplan.graphed])
@pytest.mark.parametrize("model", ["double.py:build", torch.nn.Linear])
def test_capture_and_graphed_refuse_what_is_no_model_alike(capture: Any, model: Any) -> None:
    with pytest.raises(ModelError, match=r"the model is ('double|<class)") as caught:
        capture(model)
    said = "an instance: Linear(...)" if model is torch.nn.Linear else "model.target"
    assert said in caught.value.remedy


def test_an_argument_that_capture_has_not_is_named() -> None:
    with pytest.raises(ConfigError, match="capture has no argument 'sizes'") as caught:
        cgplan.capture(lambda x: x, {"x": X}, sizes=[1, 4])  # type: ignore[arg-type]
    assert 'compilation={"cudagraph_capture_sizes": [1, 4]}' in caught.value.remedy
    assert "CaptureSession(plan, model, backend, config).run()" in caught.value.remedy


@pytest.mark.parametrize("state", [3, torch.nn.Linear(3, 3)])
def test_state_is_a_list_of_objects(state: Any) -> None:
    with pytest.raises(ConfigError, match=r"state is (3|Linear\()") as caught:
        cgplan.capture(torch.nn.Linear(3, 3), {"input": X}, state=state, device="cpu")
    assert "state=[model]" in caught.value.remedy


def test_captures_dispatches_and_misses_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "cgplan")
    specs = {"x": Input(shape=("num_tokens", 3), dtype="float32", pad=0)}
    runner = cgplan.capture(
        lambda x: x * 2, specs, compilation={"cudagraph_capture_sizes": [4]}, device="cpu"
    )
    assert ["capturing a FULL graph" in message for message in caplog.messages] == [True]
    for _ in range(3):
        runner(x=X)
        runner(x=torch.ones(5, 3))
    assert len(caplog.messages) == 3
    assert "runs as FULL" in caplog.messages[1]
    assert "runs as NONE" in caplog.messages[2]
    assert str(MissReason.TOO_LARGE) in caplog.messages[2]


def test_modes_that_cannot_run_a_batch() -> None:
    """As for a batch whose attention cannot be in a graph; it is looked up as soon as any other."""
    specs = {"x": Input(shape=("num_tokens", 3), dtype="float32", pad=0)}
    runner = cgplan.capture(
        lambda x: x.softmax(-1),
        specs,
        compilation={
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "splitting_ops": ["aten::softmax"],
            "cudagraph_capture_sizes": [4],
        },
        device="cpu",
    )
    full, piecewise = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
    for invalid, mode in (
        (None, full),
        ({full}, piecewise),
        ([full, piecewise], None),
        ((), full),
    ) * 2:
        with runner.stage(3, invalid_modes=invalid) as buffers:
            buffers["x"].copy_(X)
        torch.testing.assert_close(buffers.output, X.softmax(-1))
        torch.testing.assert_close(runner(x=X, invalid_modes=invalid), X.softmax(-1))
        assert runner.route({"x": X}, invalid_modes=invalid).mode is (mode or CUDAGraphMode.NONE)
    assert dict(runner.stats.eager) == {MissReason.MODE_EXCLUDED: 4}
    assert {mode: calls for (mode, _), calls in runner.stats.replays.items()} == {
        full: 8,
        piecewise: 4,
    }


def test_examples_declare_inputs() -> None:
    """Of floating point, in one batch; all else has to be declared."""
    ids = torch.zeros(3, dtype=torch.int64)

    def forward(x: torch.Tensor, scale: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x * scale[:, None] + ids[:, None]

    declared = {"x": X, "scale": torch.ones(3), "ids": Input.like(ids, pad=0)}
    runner = cgplan.capture(
        forward, declared, compilation={"cudagraph_capture_sizes": [4]}, device=torch.device("cpu")
    )
    assert runner.config.inputs == {
        "x": Input(shape=("num_tokens", 3), dtype="float32", pad=0),
        "scale": Input(shape=("num_tokens",), dtype="float32", pad=0),
        "ids": Input(shape=("num_tokens",), dtype="int64", pad=0),
    }
    assert torch.equal(runner(X[:2], torch.ones(2), ids=ids[:2]), X[:2])
    for wrong, message in (
        (
            {"x": X, "ids": ids},
            r"'ids' is an example of torch.int64, which does not say what padding rows hold",
        ),
        ({"x": X, "mask": torch.ones(3, dtype=torch.bool)}, "'mask' is an example of torch.bool"),
        ({"x": X, "scale": torch.ones(4)}, r"dimension 0 differs: x \[3, 3\], scale \[4\]"),
        ({"x": X, "scale": torch.tensor(2.0)}, r"dimension 0 differs"),
        ({"scale": torch.tensor(2.0)}, "no dimension 0"),
        ({"x": X.to(torch.complex64)}, "an example of torch.complex64"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            cgplan.capture(forward, wrong, device="cpu")
        assert "cgplan.Input" in caught.value.remedy


def test_a_runner_captures_where_it_may(path: Path) -> None:
    with (
        cgplan.capture_allowed(False),
        pytest.raises(
            cgplan.SealedError, match=r"the graph for FULL size=4.* is to be captured inside"
        ),
    ):
        cgplan.capture(config=path)
    runner = cgplan.capture(config=path)
    with cgplan.capture_allowed(False):
        assert torch.equal(runner(x=X), X * 3)
    runner.close()


def test_named_dimensions_are_a_section() -> None:
    runner = cgplan.capture(
        lambda x: x * 2,
        {"x": Input(shape=("pictures", 5), dtype="float32", pad=0)},
        dims={"pictures": {"max": 4}},
        device="cpu",
    )
    x = torch.ones(3, 5)
    assert torch.equal(runner(x=x), x * 2)
    assert runner.stats.replays
    runner.close()


def test_inputs_without_names_are_refused_without_their_contents() -> None:
    model = torch.nn.Linear(4, 4).eval()
    for inputs, kind in ((torch.randn(2, 4), "Tensor"), ([torch.randn(2, 4)], "list")):
        with pytest.raises(cgplan.ConfigError, match=f"inputs is a {kind}") as raised:
            cgplan.capture(model, inputs)  # type: ignore[arg-type]
        assert "tensor(" not in str(raised.value)
