"""Models that are split already, and wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import cgplan
from cgplan import (
    BackendError,
    BatchDescriptor,
    BreakableCUDAGraphCapture,
    BreakableCUDAGraphWrapper,
    CaptureError,
    CgplanError,
    ConfigError,
    CUDAGraphMode,
    CUDAGraphOptions,
    CUDAGraphWrapper,
    GraphRunner,
    InputError,
    ModelError,
    compile_piecewise,
    eager_break_during_capture,
    forward_context,
)
from cgplan.backends import GraphBackend, select_backend
from cgplan.runner.manager import capture_together

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
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


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


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


def open_runner(model: Callable[..., Any], **compilation: Any) -> GraphRunner:
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
        open_runner(lambda x: segment(x), cudagraph_mode="PIECEWISE", piecewise="wrappers")


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
        open_runner(breaks_by_value, cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=[4, 8])
    assert "functions under eager_break_during_capture" in str(caught.value.remedy)
    assert "piecewise: modules" in str(caught.value.remedy)


def test_what_runs_a_model_to_see_whether_it_breaks_swallows_no_failure() -> None:
    class Fails(Breaks):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    for piecewise, kind in (("auto", CaptureError), ("modules", ModelError)):
        with pytest.raises(kind, match=r"at .*test_backend\.py:\d+: `raise ZeroDivisionError`"):
            open_runner(Fails(), cudagraph_mode="PIECEWISE", piecewise=piecewise)


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
    warnings = open_runner(Idle().eval(), cudagraph_mode="PIECEWISE", **compilation).report.warnings
    assert len(warnings) == (warned is not None)
    assert warned is None or warned in warnings[0]


class ReadsContext(Model):
    def forward(self, x: Tensor) -> Tensor:
        cgplan.get_forward_context()  # this line
        return super().forward(x)


def test_reading_the_context_in_traced_code_names_the_users_line() -> None:
    with pytest.raises(
        CgplanError, match=r"no forward context is set, at .*test_backend\.py:\d+: .*# this line"
    ):
        ReadsContext()(X)
    with pytest.raises(
        CaptureError, match=r"in code that is traced, at .*test_backend\.py:\d+: .*# this line"
    ):
        open_runner(ReadsContext(), **CONFIG["compilation"])  # type: ignore[arg-type]


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
