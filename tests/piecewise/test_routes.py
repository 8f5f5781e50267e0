"""How a session's PIECEWISE segments come about, what the report says of them, and captures on demand;
models that are split already, and wrong arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any, cast

import attention  # noqa: F401  (registers cgplan::attention)
import pytest
import torch
import torch.nn.functional as F
from checks import same
from pieces import Attends, Broken, open_runner
from torch import Tensor, nn

import cgplan
from cgplan import (
    BackendError,
    BatchDescriptor,
    BreakableCUDAGraphCapture,
    BreakableCUDAGraphWrapper,
    CaptureError,
    CaptureSession,
    CgplanError,
    ConfigError,
    CUDAGraphMode,
    CUDAGraphOptions,
    CUDAGraphWrapper,
    GraphRunner,
    Input,
    InputError,
    ModelError,
    build_plan,
    compile_piecewise,
    eager_break_during_capture,
    forward_context,
)
from cgplan.backends import GraphBackend, select_backend
from cgplan.config import Config, validate_config
from cgplan.measure.bench import describe_split
from cgplan.piecewise.trace import PiecewiseBackend
from cgplan.runner.manager import capture_together

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
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
    wrong = lambda x: torch.ones(7, 7, device=x.device) @ x  # noqa: E731
    with pytest.raises(ModelError) as caught:
        describe_split(wrong, softmax, backend)
    assert "Check the declared inputs, x [" in caught.value.remedy
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


# --- models that are split already, and wrong arguments --------------------------------------------------------

CONFIG = {
    "device": "cpu",
    "inputs": {"x": {"shape": ["num_tokens", 3], "dtype": "float32", "pad": 0}},
    "compilation": {
        "cudagraph_mode": "PIECEWISE",
        "cudagraph_capture_sizes": [2, 4],
        "splitting_ops": ["aten::softmax"],
    },
}
X = torch.ones(2, 3)


class Model(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).softmax(-1) * 3


def compiled(**given: Any) -> Any:
    return compile_piecewise(Model(), CONFIG, **given)


def told(**compilation: Any) -> Any:
    return compile_piecewise(
        Model(), {**CONFIG, "compilation": {**CONFIG["compilation"], **compilation}}
    )  # type: ignore[dict-item]


def entered(*args: Any, **kwargs: Any) -> None:
    with forward_context(*args, **kwargs):
        pass


def wrapped(*args: Any, options: CUDAGraphOptions) -> None:
    wrapper = CUDAGraphWrapper(
        lambda x: x + 1, FULL, backend=select_backend("cpu"), options=options
    )
    with forward_context(FULL, BatchDescriptor(2)):
        wrapper(*args)


def captured(block: Callable[[BreakableCUDAGraphCapture], object], pool: Any = None) -> None:
    backend = select_backend("cpu")
    with (
        backend.session(),
        BreakableCUDAGraphCapture(backend, backend.new_pool() if pool is None else pool) as capture,
    ):
        block(capture)


CASES: dict[str, tuple[Callable[[], object], type[CgplanError], str]] = {
    "no such section": (
        lambda: compile_piecewise(Model(), {"compilatoin": {}}),
        ConfigError,
        "mean 'compilation'",
    ),
    "the mode FULL": (
        lambda: told(cudagraph_mode="FULL"),
        ConfigError,
        "but compilation.cudagraph_mode is FULL",
    ),
    "modules": (
        lambda: told(splitting_modules=["*"]),
        ConfigError,
        "but compilation.splitting_modules is",
    ),
    "wrappers": (
        lambda: told(piecewise="wrappers"),
        ConfigError,
        "compilation.piecewise is wrappers",
    ),
    "compiled twice": (
        lambda: compile_piecewise(compiled(), CONFIG),
        ModelError,
        "compile_piecewise before",
    ),
    "no input": (lambda: compiled()(), InputError, "'x' is missing"),
    "another type": (lambda: compiled()(x=X.double()), InputError, "dtype torch.float64"),
    "mode of a plan": (
        lambda: CUDAGraphWrapper(abs, CUDAGraphMode.FULL_AND_PIECEWISE),
        CgplanError,
        "FULL_AND_PIECE",
    ),
    "warm-ups": (
        lambda: CUDAGraphOptions(num_of_warmups=-1),
        ConfigError,
        "num_of_warmups: found -1, expected greater than or equal to 0",
    ),
    "warm-ups as text": (
        lambda: CUDAGraphOptions(num_of_warmups=cast(Any, "a")),
        ConfigError,
        "num_of_warmups: found 'a', expected a valid integer",
    ),
    "positions as text": (
        lambda: CUDAGraphOptions(copied_arguments=cast(Any, ("x",))),
        ConfigError,
        "copied_arguments.0: found 'x', expected a valid integer",
    ),
    "a check that is none": (
        lambda: CUDAGraphOptions(address_check=cast(Any, "never")),
        ConfigError,
        "address_check: found 'never', expected 'off', 'first' or 'always'",
    ),
    "an unknown option": (
        lambda: CUDAGraphOptions(copied_argument=(0,)),  # type: ignore[call-arg]
        ConfigError,
        "did you mean 'copied_arguments'",
    ),
    "no such position": (
        lambda: wrapped(X, options=CUDAGraphOptions(copied_arguments=(3,))),
        CaptureError,
        "missing among 1",
    ),
    "a number copied": (
        lambda: wrapped(7, options=CUDAGraphOptions(copied_arguments=(0,))),
        CaptureError,
        "which is 7",
    ),
    "a foreign pool": (
        lambda: captured(print, pool=select_backend("cpu").new_pool()),
        BackendError,
        "is not a pool of this",
    ),
    "no managers": (lambda: capture_together([]), CgplanError, "an empty list cannot be"),
    "context mode of a plan": (
        lambda: entered(CUDAGraphMode.FULL_DECODE_ONLY, BatchDescriptor(2)),
        CgplanError,
        "FULL_DECODE_ONLY",
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_wrong_argument_is_a_typed_error_and_leaves_nothing_behind(name: str) -> None:
    call, kind, said = CASES[name]
    with pytest.raises(kind, match=said) as caught:
        call()
    assert caught.value.remedy
    assert (X + 1).tolist() == [[2.0] * 3] * 2, "no mode of a capture is left on"
    with torch.no_grad():
        assert torch.equal(compiled()(x=X), Model()(X))


def open_on_cpu(model: Callable[..., Any], **compilation: Any) -> GraphRunner:
    sizes = {"cudagraph_capture_sizes": [2, 4], **compilation}
    return cgplan.capture(model, CONFIG["inputs"], compilation=sizes, device="cpu")  # type: ignore[arg-type]


def test_a_model_under_torch_compile_is_split_as_the_model_that_it_holds() -> None:
    model = Model().eval()
    split: Any = compile_piecewise(torch.compile(model), {**CONFIG, "device": "cpu"})
    x = X.clone()
    with torch.no_grad():
        for _ in range(3):
            x.copy_(torch.randn(2, 3))
            with forward_context(CUDAGraphMode.PIECEWISE, BatchDescriptor(2)):
                assert torch.equal(split(x=x), model(x))
    assert [piece.eager for piece in split.splitter.pieces[0]] == [False, True, False]


def test_a_model_that_is_split_already_is_captured_as_wrappers(backend: GraphBackend) -> None:
    """Its wrappers have a backend of their own, and capture on the session's."""
    split: Any = compile_piecewise(Model().eval(), {**CONFIG, "device": backend.device.type})
    for _ in range(2):  # a second session has another backend again
        runner = cgplan.capture(
            split,
            CONFIG["inputs"],  # type: ignore[arg-type]
            compilation={**CONFIG["compilation"], "piecewise": "wrappers"},  # type: ignore[dict-item]
            device=backend.device.type,
        )
        assert runner.report.records[0].graphs == 2
        for rows in (3, 2, 4, 3):
            x = torch.randn(rows, 3, device=backend.device)
            assert torch.equal(runner(x=x), runner.run_eagerly(x=x))
        runner.close()


def test_a_wrapper_of_another_device_is_refused() -> None:
    class Elsewhere(type(select_backend("cpu"))):  # type: ignore[misc]
        device = torch.device("meta")

        def __init__(self) -> None:
            super().__init__()
            self.device = torch.device("meta")

    segment = CUDAGraphWrapper(lambda x: x + 1, PIECEWISE, backend=Elsewhere())
    with pytest.raises(CaptureError, match="a wrapper on meta inside a session on cpu"):
        open_on_cpu(lambda x: segment(x), cudagraph_mode="PIECEWISE", piecewise="wrappers")


@eager_break_during_capture
def attend(x: Tensor) -> Tensor:
    """The eager piece of a model that breaks by itself."""
    return x.softmax(-1)


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return attend(x * 2) * 3


@pytest.mark.parametrize(
    ("compilation", "route"),
    [
        ({}, "modules"),
        ({"splitting_ops": ["aten::softmax"]}, "ops"),
        ({"piecewise": "modules"}, "modules"),
    ],
)
def test_functions_that_break_choose_the_route(
    backend: GraphBackend, compilation: dict[str, Any], route: str
) -> None:
    runner = cgplan.capture(
        Breaks().eval(),
        CONFIG["inputs"],  # type: ignore[arg-type]
        compilation={
            "cudagraph_mode": "PIECEWISE",
            "cudagraph_capture_sizes": [2, 4],
            **compilation,
        },
        device=backend.device.type,
    )
    split = runner.report.split
    assert split is not None
    assert split.route == route
    assert split.eager == ({"attend": 1} if route == "modules" else {"aten::softmax": 1})
    assert runner.report.records[0].graphs == 2
    assert runner.report.warnings == ()
    x = torch.randn(3, 3, device=backend.device)
    assert torch.equal(runner(x=x), runner.run_eagerly(x=x))


def breaks_by_value(x: Tensor) -> Tensor:
    return attend(x * 2) * 3 if bool((x > 0).any()) else x * 2


def test_a_mark_that_padding_does_not_reach_can_be_said() -> None:
    with pytest.raises(CaptureError) as caught:
        open_on_cpu(breaks_by_value, cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=[4, 8])
    assert "functions under eager_break_during_capture" in str(caught.value.remedy)
    assert "piecewise: modules" in str(caught.value.remedy)


def test_what_runs_a_model_to_see_whether_it_breaks_swallows_no_failure() -> None:
    class Fails(Breaks):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    for piecewise, kind in (("auto", CaptureError), ("modules", ModelError)):
        with pytest.raises(kind, match=r"at .*test_routes\.py:\d+: `raise ZeroDivisionError`"):
            open_on_cpu(Fails(), cudagraph_mode="PIECEWISE", piecewise=piecewise)


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle, self.spare = nn.ReLU(), nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x * 2) * 3


@pytest.mark.parametrize(
    ("compilation", "warned"),
    [
        ({"splitting_modules": ["idle"]}, "nothing broke the capture"),
        ({"splitting_modules": ["*"]}, "never called: idle, spare"),
        ({"splitting_modules": ["used"]}, None),
        ({"piecewise": "modules"}, "nothing broke the capture"),
        ({}, "no operator of the model is a splitting op"),
        ({"splitting_ops": ["aten::relu"]}, None),
    ],
)
def test_a_split_that_leaves_nothing_eager_is_warned_of(
    compilation: dict[str, Any], warned: str | None
) -> None:
    warnings = open_on_cpu(Idle().eval(), cudagraph_mode="PIECEWISE", **compilation).report.warnings
    assert len(warnings) == (warned is not None)
    assert warned is None or warned in warnings[0]


class ReadsContext(Model):
    def forward(self, x: Tensor) -> Tensor:
        cgplan.get_forward_context()  # this line
        return super().forward(x)


def test_reading_the_context_in_traced_code_names_the_users_line() -> None:
    with pytest.raises(
        CgplanError, match=r"no forward context is set, at .*test_routes\.py:\d+: .*# this line"
    ):
        ReadsContext()(X)
    with pytest.raises(
        CaptureError, match=r"in code that is traced, at .*test_routes\.py:\d+: .*# this line"
    ):
        open_on_cpu(ReadsContext(), **CONFIG["compilation"])  # type: ignore[arg-type]


@pytest.mark.parametrize("breaks", [False, True])
def test_metadata_that_a_segment_reads_is_checked_outside_of_runners_too(
    backend: GraphBackend, breaks: bool
) -> None:
    """And what only eager pieces read may lie elsewhere on each call."""

    @eager_break_during_capture
    def piece(x: Tensor) -> Tensor:
        return x + cgplan.get_forward_context().metadata["eager"]

    def segment(x: Tensor) -> Tensor:
        h = x * cgplan.get_forward_context().metadata["scale"]
        return piece(h) * 1 if breaks else h + 1

    kind: Any = BreakableCUDAGraphWrapper if breaks else CUDAGraphWrapper
    wrapper = kind(segment, PIECEWISE, backend=backend)
    x, scale = (
        torch.randn(2, 3, device=backend.device),
        torch.full((3,), 2.0, device=backend.device),
    )

    def call(scale: Tensor) -> Tensor:
        metadata = {"scale": scale, "eager": torch.ones(3, device=backend.device)}
        with torch.no_grad(), forward_context(PIECEWISE, BatchDescriptor(2), metadata):
            return wrapper(x)  # type: ignore[no-any-return]

    for _ in range(3):
        assert torch.equal(call(scale), x * 2 + 1)
    wrapper.reset()
    call(scale)
    with pytest.raises(
        cgplan.AddressError, match=r"1 changed, 0 missing, 0 added\n  changed  metadata\.scale"
    ):
        call(scale.clone())
    assert torch.equal(call(scale), x * 2 + 1)
