"""How a session's PIECEWISE segments come about, what the report says of them, and captures on demand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import attention  # noqa: F401  (registers cgplan::attention)
import pytest
import torch
import torch.nn.functional as F
from checks import same
from pieces import Attends, Broken, open_runner
from torch import Tensor, nn

import cgplan
from cgplan import (
    CaptureError,
    CaptureSession,
    ConfigError,
    CUDAGraphMode,
    GraphRunner,
    Input,
    ModelError,
    build_plan,
)
from cgplan.backends import GraphBackend
from cgplan.config import Config, validate_config
from cgplan.measure.bench import describe_split
from cgplan.piecewise.trace import PiecewiseBackend

PIECEWISE = CUDAGraphMode.PIECEWISE
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def splitting(backend: GraphBackend, mode: str = "PIECEWISE", **compilation: Any) -> Config:
    return validate_config(
        {
            "inputs": {"x": Input(shape=("num_tokens", 6), dtype="float32", pad=0)},
            "compilation": {
                "cudagraph_mode": mode,
                "cudagraph_capture_sizes": [1, 4, 8],
                **compilation,
            },
            "device": backend.device.type,
        }
    )


@pytest.mark.parametrize(
    "way", [{"splitting_ops": ["aten::softmax"]}, {"splitting_modules": ["layers.*.mix"]}]
)
def test_a_split_is_described_as_the_session_reports_it(
    backend: GraphBackend, way: dict[str, Any]
) -> None:
    torch._dynamo.reset()
    model = Broken().to(backend.device).eval()
    config, before = splitting(backend, **way), backend.memory().reserved
    found = describe_split(model, config, backend)
    assert found is not None
    if "splitting_ops" in way:
        assert (found.route, found.segments, found.eager_pieces) == ("ops", 3, 2)
        assert found.eager == {"aten::softmax": 2}
        assert found.captured == {"aten::linear": 4}
    else:
        assert (found.route, found.segments, found.eager_pieces) == ("modules", None, None)
        assert found.eager == {"layers.0.mix": 1, "layers.1.mix": 1}
        assert model.layers[0]["mix"].eager_runs == 0, "nothing runs"
    assert all("forward" not in vars(module) for module in model.modules())
    assert backend.memory().reserved <= before + 2 * MIB
    assert describe_split(model, splitting(backend, compiler="inductor", **way), backend) == found
    torch._dynamo.reset()
    reported = CaptureSession(build_plan(config), model, backend, config).run().report.split
    assert reported is not None
    if "splitting_modules" in way:  # known once it has run
        assert reported.captured == {"aten::addmm": 2}, "the others are in the modules"
        assert reported.eager_operators["aten::_softmax"] == 2
        reported = reported.model_copy(update={"captured": {}, "eager_operators": {}})
    assert reported == found
    torch._dynamo.reset()


def test_only_modules_that_break_are_described(backend: GraphBackend) -> None:
    model = Broken().to(backend.device).eval()
    config = splitting(backend, splitting_modules=["layers", "layers.*.mix", "layers.*.mix.inner"])
    found = describe_split(model, config, backend)
    assert found is not None
    assert found.eager == {"layers.0.mix": 1, "layers.1.mix": 1}, (
        "a list is not called, and inner is in mix"
    )
    with closing(CaptureSession(build_plan(config), model, backend, config).run()) as runner:
        assert runner.report.split is not None
        assert runner.report.split.eager == found.eager
        assert (
            runner.report.warnings[0]
            == "modules that splitting_modules names were never called: layers"
        )


def test_splits_that_are_none_or_cannot_be(backend: GraphBackend) -> None:
    torch._dynamo.reset()
    model, softmax = (
        Broken().to(backend.device).eval(),
        splitting(backend, splitting_ops=["aten::softmax"]),
    )
    before = backend.memory().reserved
    assert describe_split(model, splitting(backend, "FULL"), backend) is None
    with pytest.raises(ConfigError, match="'aten::topk' does not occur"):
        describe_split(model, splitting(backend, splitting_ops=["aten::topk"]), backend)
    with pytest.raises(ConfigError, match="no submodule matches"):
        describe_split(model, splitting(backend, splitting_modules=["layer.*"]), backend)
    torch._dynamo.reset()
    with pytest.raises(
        (ModelError, CaptureError), match=r"unexpected keyword argument 'x'|missing .* argument: y"
    ):
        describe_split(lambda y: y.softmax(1), softmax, backend)
    assert backend.memory().reserved <= before + 2 * MIB
    torch._dynamo.reset()


def test_the_report_says_what_is_captured_and_what_is_not(backend: GraphBackend) -> None:
    runner = open_runner(backend, Attends(3).to(backend.device))
    split = runner.report.split
    assert split is not None
    assert (split.route, split.segments, split.eager_pieces) == ("ops", 4, 3)
    assert {(key.graphs, key.eager_pieces) for key in runner.report.records} == {(4, 3)}
    assert split.eager == {"aten::scaled_dot_product_attention": 3}
    assert split.captured["aten::linear"] == 3
    assert split.captured["aten::sigmoid"] == 1
    assert type(runner.report).model_validate_json(runner.report.model_dump_json()) == runner.report
    text = str(runner.report)
    assert "4 segments, 3 eager pieces" in text
    assert "aten::scaled_dot_product_attention x3" in text
    by_modules = open_runner(backend, Attends(2).to(backend.device), splitting_modules=["layers.*"])
    assert by_modules.report.split is not None
    assert set(by_modules.report.split.eager) == {"layers.0", "layers.1"}
    assert by_modules.report.split.captured["aten::sigmoid"] == 1
    assert "aten::sigmoid" in str(by_modules.report)
    assert open_runner(backend, lambda x: x * 2, cudagraph_mode="FULL").report.split is None


def test_a_plan_without_piecewise_keys_is_not_traced(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed batches run the model itself then, and need no trace at capture."""
    monkeypatch.setattr(PiecewiseBackend, "__call__", lambda *_: pytest.fail("traced"))
    config = validate_config(
        {
            "inputs": {"x": Input(shape=("num_tokens", 8), dtype="float32", pad=0)},
            "compilation": {
                "cudagraph_mode": "FULL_AND_PIECEWISE",
                "cudagraph_capture_sizes": [2, 4],
            },
            "device": backend.device.type,
        }
    )
    plan = build_plan(config)
    plan = plan.model_copy(
        update={"keys": tuple(key for key in plan.keys if key[0] is CUDAGraphMode.FULL)}
    )
    model = Attends(layers=2).to(backend.device)
    runner = CaptureSession(plan, model, backend, config).run()
    assert runner.report.split is None
    x = torch.randn(3, 8).to(backend.device)
    torch.testing.assert_close(runner(x=x, uniform_decode=True), model(x))
    torch.testing.assert_close(runner(x=x, uniform_decode=False), model(x))
    assert (sum(runner.stats.replays.values()), sum(runner.stats.eager.values())) == (1, 1)


class Softmax(nn.Module):
    """Rows of whole numbers, and one operator to split at; ``breaks`` makes it untraceable."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, device=device)
        self.breaks = False

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.softmax(self.up(x), -1) * 2


def lazy(
    backend: GraphBackend, model: nn.Module, *splitting_ops: str, **compilation: Any
) -> GraphRunner:
    ops = list(splitting_ops) or ["aten::softmax"]
    return open_runner(backend, model, splitting_ops=ops, capture_policy="lazy", **compilation)


def rows_of(backend: GraphBackend, count: int) -> Tensor:
    return torch.randn(count, 8, device=backend.device)


def run_without_capture(runner: GraphRunner, x: Tensor) -> Tensor:
    with runner.no_capture():
        found: Tensor = runner(x=x)
    return found


EAGER: dict[str, tuple[int, Callable[[GraphRunner, Tensor], Any]]] = {
    "too large": (9, lambda runner, x: runner(x=x)),
    "no_capture": (2, run_without_capture),
    "run_eagerly": (2, lambda runner, x: runner.run_eagerly(x=x)),
}


@pytest.mark.parametrize("first", ["run_eagerly", "graphed"])
def test_a_trace_on_demand_is_made_in_the_inference_mode_of_the_session(
    backend: GraphBackend, first: str
) -> None:
    model = Softmax(backend.device)
    runner = lazy(backend, model)
    with torch.inference_mode():
        count, call = (2, lambda runner, x: runner(x=x)) if first == "graphed" else EAGER[first]
        x = rows_of(backend, count)
        torch.testing.assert_close(call(runner, x), model(x))
    for count in (2, 4):
        x = rows_of(backend, count)
        assert torch.equal(runner(x=x), runner.run_eagerly(x=x))
    assert runner.plan.capture_sizes == (2, 4)
    assert not runner.report.failed
    runner.close()


def test_a_trace_on_demand_is_made_in_the_autocast_of_the_session(backend: GraphBackend) -> None:
    model, kind = Softmax(backend.device), backend.device.type
    runner = lazy(backend, model)
    x = rows_of(backend, 2)
    with torch.autocast(kind, dtype=torch.bfloat16):
        runner.run_eagerly(x=x)
        with pytest.raises(CaptureError, match="autocast"):
            runner(x=x)
    assert torch.equal(runner(x=x), runner.run_eagerly(x=x))
    assert not runner.report.failed
    runner.close()
    with torch.autocast(kind, dtype=torch.bfloat16):
        runner = lazy(backend, model)
    runner.run_eagerly(x=x)
    with torch.autocast(kind, dtype=torch.bfloat16):
        assert torch.equal(runner(x=x), model(x))
    assert runner.plan.capture_sizes == (2,)
    runner.close()


def test_what_runs_eagerly_needs_no_trace_and_a_trace_that_fails_is_remembered(
    backend: GraphBackend,
) -> None:
    model = Softmax(backend.device)
    model.breaks = True
    runner = lazy(backend, model)
    for count, call in EAGER.values():
        x = rows_of(backend, count)
        torch.testing.assert_close(call(runner, x), model(x))
    assert not runner.report.failed
    for failures, count in enumerate((2, 2, 8, 8), start=1):
        x = rows_of(backend, count)
        torch.testing.assert_close(runner(x=x), model(x))
        with runner.stage(count) as buffers:
            buffers["x"].copy_(x)
        torch.testing.assert_close(buffers.output, model(x))
        assert len(runner.report.failed) == runner.stats.failures == (failures + 1) // 2
    for key in runner.report.failed:
        assert key.error == "CaptureError"
        assert key.detail.startswith(
            f"capture of PIECEWISE {key.descriptor}: the model cannot be traced as one graph"
        )
    model.breaks = False
    runner(x=rows_of(backend, 4))
    runner(x=rows_of(backend, 2))
    assert runner.plan.capture_sizes == (4,), "a key that failed is not tried again by itself"
    runner.retry_failed()
    for count in (4, 2):
        x = rows_of(backend, count)
        assert torch.equal(runner(x=x), runner.run_eagerly(x=x))
    assert runner.plan.capture_sizes == (2, 4)
    runner.close()


def test_a_splitting_op_that_does_not_occur_is_remembered_on_demand(backend: GraphBackend) -> None:
    model = Softmax(backend.device)
    runner = lazy(backend, model, "aten::softmax", "aten::gelu")
    x = rows_of(backend, 2)
    for _ in range(2):
        torch.testing.assert_close(runner(x=x), model(x))
        [failed] = runner.report.failed
        assert failed.error == "ConfigError"
        assert "'aten::gelu' does not occur in the model" in failed.detail
    assert runner.stats.failures == 1
    runner.close()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("softmax", "aten::softmax"), ("cgplan::atention", "cgplan::attention"),
        ("aten::softmax.nonesuch", "aten::softmax"), ("python::nonesuch", "namespace::name"),
    ],
)  # fmt: skip
def test_a_splitting_op_that_does_not_exist_is_an_error_at_the_start(
    backend: GraphBackend, name: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=f"the operator '{name}' does not exist") as caught:
        lazy(backend, Softmax(backend.device), "aten::softmax", name)
    assert hint in caught.value.remedy


def test_a_splitting_op_may_be_a_function_that_is_no_operator(backend: GraphBackend) -> None:
    assert not hasattr(torch.ops.aten, "softsign")
    runner = open_runner(
        backend,
        lambda x: F.softsign(x * 2) + 1,
        splitting_ops=["aten::softsign"],
        capture_policy="lazy",
    )
    x = rows_of(backend, 2)
    assert torch.equal(runner(x=x), F.softsign(x * 2) + 1)
    assert [piece.eager for piece in runner.graphs.route.pieces] == [False, True, False]
    runner.close()
    for name in ("aten::softmax.int", "aten::__add__", "python::getitem", "higher_order::cond"):
        lazy(backend, Softmax(backend.device), name).close()  # may occur in other models


class PythonThatGraphsLeaveOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.runs = nn.Softmax(-1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.attend(x * 2) * 2


def test_a_replan_where_no_full_key_is_captured(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of PIECEWISE graphs stand in for those of FULL ones. On a machine under load a replay may take longer than
    a slow eager step, and a plan without graphs be right: here a step takes what its Python takes.
    """
    model = PythonThatGraphsLeaveOut()

    def time_calls(
        self: GraphBackend, call: Callable[[], Any], repeats: int
    ) -> tuple[list[float], list[float]]:
        before = model.runs
        call()
        return [100.0 + 2000.0 * (model.runs - before)], [0.0]

    monkeypatch.setattr(type(backend), "time_calls", time_calls)
    runner = cgplan.capture(
        model,
        {"x": Input(shape=("num_tokens", 8), dtype="float32", pad=0)},
        compilation={
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": [4],
            "capture_policy": "adaptive",
            "splitting_modules": ["attend"],
        },
        budget={"max_graphs": 1},
        device=backend.device.type,
    )
    assert [mode for mode, _ in runner.plan.keys] == [PIECEWISE]
    for uniform in (False, True):
        x = rows_of(backend, 4)
        same(runner(x=x, uniform_decode=uniform), model(x))
    runner.replan()
    assert len(runner.plan.keys) == 1
    for uniform in (False, True):
        same(runner(x=x, uniform_decode=uniform), model(x))
    runner.close()
