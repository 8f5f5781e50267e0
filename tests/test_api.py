"""``cgplan.capture``: from Python sections, from a configuration, and from its file; and what is logged."""

from __future__ import annotations

import logging
from pathlib import Path

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


def test_a_configuration_stands_in_place_of_sections(path: Path) -> None:
    with pytest.raises(ConfigError, match="config and inputs, compilation were both given"):
        cgplan.capture(lambda x: x, {"x": Input(shape=(3,), dtype="int64", pad=0)}, config=path, compilation={})
    with pytest.raises(ModelError, match="no model was given"):
        cgplan.capture(config=path.parent / "plain.yaml")
    with pytest.raises(ModelError, match="the model is the text"):
        cgplan.capture("double.py:build")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="neither inputs nor config"):
        cgplan.capture(lambda x: x)


def test_captures_dispatches_and_misses_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "cgplan")
    specs = {"x": Input(shape=("num_tokens", 3), dtype="float32", pad=0)}
    runner = cgplan.capture(lambda x: x * 2, specs, compilation={"cudagraph_capture_sizes": [4]}, device="cpu")
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
    for invalid, mode in ((None, full), ({full}, piecewise), ([full, piecewise], None), ((), full)) * 2:
        with runner.stage(3, invalid_modes=invalid) as buffers:
            buffers["x"].copy_(X)
        torch.testing.assert_close(buffers.output, X.softmax(-1))
        torch.testing.assert_close(runner(x=X, invalid_modes=invalid), X.softmax(-1))
        assert runner.route({"x": X}, invalid_modes=invalid).mode is (mode or CUDAGraphMode.NONE)
    assert dict(runner.stats.eager) == {MissReason.MODE_EXCLUDED: 4}
    assert {mode: calls for (mode, _), calls in runner.stats.replays.items()} == {full: 8, piecewise: 4}
