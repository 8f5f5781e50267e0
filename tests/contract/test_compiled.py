"""Models with parts under torch.compile: compiled ahead of each capture, never inside one, and left compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from checks import Tally
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import cgplan
from cgplan import (
    BatchDescriptor,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphRunner,
    Input,
    forward_context,
)
from cgplan.backends import GraphBackend
from cgplan.backends.host_sync import is_probing

EVENTS = Tally()
IS_CAPTURING = Tally()


def counting(gm: Any, _: Any) -> Callable[..., Any]:
    EVENTS.append("compiled while capturing" if IS_CAPTURING and IS_CAPTURING[-1]() else "compiled")

    def run(*args: Any) -> Any:
        EVENTS.append("ran")
        return gm(*args)

    return run


class Norm(nn.Module):
    """As nano-vllm's layers: methods of a class under torch.compile."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    @torch.compile(backend=counting)
    def scaled(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)  # type: ignore[no-any-return]


@torch.compile(backend=counting)
def silu_and_mul(x: Tensor) -> Tensor:
    y, z = x.chunk(2, -1)
    return nn.functional.silu(y) * z


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(8), nn.Linear(8, 16), nn.Linear(8, 8)
        self.out = torch.compile(nn.Linear(8, 8), backend=counting)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.down(silu_and_mul(self.up(self.norm(x)))))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    EVENTS.clear()
    yield
    torch._dynamo.reset()


def open_runner(
    backend: GraphBackend, model: Callable[..., Any], **compilation: Any
) -> GraphRunner:
    return cgplan.capture(
        model,
        {"x": Input(shape=("num_tokens", 8), dtype="float32", pad=0)},
        compilation={"cudagraph_capture_sizes": [1, 2, 4], "outputs": "clone", **compilation},
        device=backend.device.type,
    )


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("warmups", [0, 1])
@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_compiled_parts_are_captured_and_stay_compiled(
    backend: GraphBackend, mode: str, warmups: int, policy: str
) -> None:
    torch.manual_seed(0)
    model = Layers().to(backend.device).eval()
    pieces = {"splitting_modules": ["down"]} if mode == "PIECEWISE" else {}
    IS_CAPTURING[:] = [backend.is_capturing]
    options = {
        "cudagraph_mode": mode,
        "cudagraph_num_of_warmups": warmups,
        "capture_policy": policy,
        **pieces,
    }
    with closing(open_runner(backend, model, **options)) as runner:
        batches = [torch.randn(rows, 8, device=backend.device) for rows in (3, 1, 2, 4, 9)]
        found = [runner(x=x) for x in batches]
        assert "compiled" in EVENTS
        assert "compiled while capturing" not in EVENTS
        for x, y in zip(batches, found, strict=True):
            torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-6)
        EVENTS.clear()
        model(batches[0])
        assert EVENTS == ["ran"] * 3, "what was compiled is neither skipped nor compiled again"


@pytest.mark.parametrize("way", ["full", "modules", "wrappers", "alone"])
def test_graph_code_is_warmed_up_under_the_guards_of_its_capture(
    backend: GraphBackend, way: str
) -> None:
    """Autocast's cache, which captures turn off, is one of Dynamo's guards; code between graphs runs with it on."""
    with torch.autocast(backend.device.type, torch.bfloat16):
        _graph_code_is_warmed_up(backend, way)


def _graph_code_is_warmed_up(backend: GraphBackend, way: str) -> None:
    graph_code, between = Tally(), Tally()

    class Segment(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not is_probing():
                graph_code.append(torch.is_autocast_cache_enabled())
            return x * 2

    class Outside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not is_probing():
                between.append(torch.is_autocast_cache_enabled())
            return x + 1

    class Both(nn.Module):
        def __init__(self, segment: Callable[..., Any]) -> None:
            super().__init__()
            self.segment, self.outside = segment, Outside()

        def forward(self, x: Tensor) -> Tensor:
            return self.outside(self.segment(x))  # type: ignore[no-any-return]

    segment: Any = Segment()
    if way == "alone":
        wrapper = CUDAGraphWrapper(segment, CUDAGraphMode.FULL, backend=backend)
        with forward_context(CUDAGraphMode.FULL, BatchDescriptor(2)):
            wrapper(torch.ones(2, 8, device=backend.device))
        assert graph_code
        assert not any(graph_code)
        return
    split = {
        "full": {"cudagraph_mode": "FULL"},
        "modules": {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["outside"]},
        "wrappers": {"cudagraph_mode": "PIECEWISE", "piecewise": "wrappers"},
    }[way]
    model = Both(
        CUDAGraphWrapper(segment, CUDAGraphMode.PIECEWISE) if way == "wrappers" else segment
    )
    options = {"verify": "off", "cudagraph_num_of_warmups": 1, **split}
    with closing(open_runner(backend, model, **options)) as runner:
        assert len(graph_code) == 6, "a warm-up and a capture of each size"
        assert not any(graph_code)
        if way == "full":
            assert not any(between)
            return
        captured = between[1::2]
        between.clear()
        runner(x=torch.ones(3, 8, device=backend.device))
        assert [*captured, *between] == [True] * 4, "captures, and a replay"


def test_what_was_compiled_before_is_captured(backend: GraphBackend) -> None:
    model = Layers().to(backend.device).eval()
    with torch.no_grad():
        for rows in (4, 2, 1):
            model(torch.randn(rows, 8, device=backend.device))
    EVENTS.clear()
    open_runner(backend, model).close()
    assert "compiled" not in EVENTS


def test_an_eager_piece_is_compiled_ahead_of_its_replays(backend: GraphBackend) -> None:
    model = Layers().to(backend.device).eval()
    split = {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["norm"]}
    with closing(open_runner(backend, model, verify="off", **split)) as runner:
        EVENTS.clear()
        for rows in (3, 1, 2):
            runner(x=torch.randn(rows, 8, device=backend.device))
        assert EVENTS == ["ran"] * 3


@pytest.mark.parametrize("split", [{"cudagraph_mode": "FULL"}, {"splitting_modules": ["norm"]}])
def test_the_first_eager_batch_compiles_nothing(
    backend: GraphBackend, split: dict[str, Any]
) -> None:
    model = Layers().to(backend.device).eval()
    with closing(open_runner(backend, model, **split)) as runner:
        EVENTS.clear()
        runner(x=torch.randn(9, 8, device=backend.device))
        assert sum(runner.stats.eager.values()) == 1
        assert set(EVENTS) == {"ran"}


def test_the_report_tells_of_a_function_that_torch_stopped_compiling(backend: GraphBackend) -> None:
    double = torch.compile(lambda x: x * 2, backend=counting, dynamic=False)
    x = torch.randn(4, 8, device=backend.device)
    limited = torch._dynamo.config.patch(recompile_limit=2)
    with limited, closing(open_runner(backend, lambda x: double(x) + 1)) as runner:
        assert [w for w in runner.report.warnings if "recompile_limit" in w and "dynamic=True" in w]
        torch.testing.assert_close(runner(x=x), x * 2 + 1, rtol=0, atol=0)
    torch._dynamo.reset()
    with closing(open_runner(backend, lambda x: double(x) + 1)) as runner:
        assert not runner.report.warnings


@functools.cache
def scale(device: torch.device) -> Tensor:
    return torch.full((2,), 3.0, device=device)


class CountsInAKernel(nn.Module):
    """In a tensor whose writes have no version; it also reads one that only a function holds."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.counts = torch.zeros(400_000, device=device)
        self.add = torch.compile(self._add, backend=unseen_by_modes, dynamic=False)

    def _add(self, x: Tensor) -> Tensor:
        self.counts.add_(1)
        return x + self.counts[:2]

    def forward(self, x: Tensor) -> Tensor:
        return self.add(x) * scale(x.device)


def unseen_by_modes(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with _disable_current_modes():
            return module(*args)

    return run


def test_what_compiled_kernels_write_is_put_back_where_others_are_watched() -> None:
    scale.cache_clear()
    device = torch.device("cpu")
    with torch.inference_mode():
        model = CountsInAKernel(device)
        scale(device)
        shape = ("num_tokens", 2)
        with closing(
            cgplan.capture(
                model,
                {"x": cgplan.Input(shape=shape, dtype=torch.float32, pad=0)},
                compilation={"cudagraph_capture_sizes": [2, 4], "verify": "off"},
                device="cpu",
            )
        ) as runner:
            kept = {state.path: state.kept for state in runner.report.state}
        assert kept["model.counts"] == "device"


class Positions(nn.Module):
    """A table of first use, which a longer input makes anew, read by compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    @torch.compile(backend="eager")
    def add(self, x: Tensor, table: Tensor) -> Tensor:
        return x + table[: len(x)]

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(2.0 * len(x), device=x.device).reshape(-1, 2)
        return self.add(x, self.table)


def test_a_longer_table_does_not_end_the_graphs_of_compiled_code(backend: GraphBackend) -> None:
    model = Positions().eval()
    spec = Input(shape=("num_tokens", 2), dtype="float32", pad=0)
    sizes = {"cudagraph_capture_sizes": [1, 2]}
    device = backend.device.type
    with closing(cgplan.capture(model, {"x": spec}, compilation=sizes, device=device)) as runner:
        for size in (2, 5, 2, 1):
            x = torch.rand(size, 2, device=device)
            torch.testing.assert_close(runner(x=x), model(x))
