"""Which operators a report names as captured and as eager, where the model is not traced."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import Tally, host_sync_of
from torch import Tensor, nn

import cgplan
from cgplan import CUDAGraphMode, CUDAGraphOptions, CUDAGraphWrapper, GraphRunner, Input, build_plan
from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.tape import TapeBackend
from cgplan.config import load_config
from cgplan.models.loading import load_model
from cgplan.piecewise.breakable import BreakableCUDAGraphWrapper, eager_break_during_capture
from cgplan.reports.records import SplitRecord
from cgplan.runner.session import CaptureSession

PIECEWISE = CUDAGraphMode.PIECEWISE
CONFIGS = Path(__file__).parents[2] / "configs"


def open_runner(
    backend: GraphBackend, model: Callable[..., Any], **compilation: Any
) -> GraphRunner:
    return cgplan.capture(
        model,
        {"x": Input(shape=("num_tokens", 6), dtype="float32", pad=0)},
        compilation={
            "cudagraph_mode": "PIECEWISE",
            "cudagraph_capture_sizes": [2, 4],
            **compilation,
        },  # type: ignore[dict-item]
        device=backend.device.type,
    )


def split_of(runner: GraphRunner) -> SplitRecord:
    assert runner.report.split is not None
    return runner.report.split


@eager_break_during_capture
def twice(x: Tensor) -> Tensor:
    return torch.tensor(x.tolist(), device=x.device) * 2


@eager_break_during_capture
def doubled(x: Tensor) -> Tensor:
    return x * 2


class Blocks(nn.Module):
    """What it does to its state shows how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.mix = nn.Linear(6, 6), nn.Linear(6, 6)
        self.turns: list[Tensor] = [torch.zeros(2), torch.ones(2)]
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = twice(self.outer(x.view(-1, 6)))
        self.turns = self.turns[::-1]
        self.last = self.mix(x).relu().reshape(-1, 3, 2).transpose(1, 2).contiguous().view(-1, 6)
        return self.last + torch.empty_like(x).fill_(1.0)


def test_views_and_eager_pieces_are_none_of_the_captured(backend: GraphBackend) -> None:
    model = Blocks().to(backend.device).eval()
    with closing(open_runner(backend, model)) as runner:
        split = split_of(runner)
        assert split.captured == {
            "aten::addmm": 2,
            "aten::relu": 1,
            "aten::clone": 1,
            "aten::fill_": 1,
            "aten::add": 1,
        }
        assert split.eager == {"twice": 1}
        assert split.eager_operators["aten::mul"] == 1
        shown = str(runner.report)
        assert re.search(r"eager +twice\n", shown)
        assert re.search(r"eager calls +.*aten::mul", shown)


class Many(nn.Module):
    """Operators made of others, of several results, with copies that may be none, random ones, views of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 6), nn.LayerNorm(6)
        self.heads = nn.MultiheadAttention(6, 2, batch_first=True)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)  # type: ignore[operator]
        y = self.norm(x).to(torch.float32).to(torch.float64).float() + self.embed(x.argmax(-1))
        y = self.heads(y[:, None], y[:, None], y[:, None], need_weights=False)[0].squeeze(1)
        low, high = y.chunk(2, -1)
        values, indices = y.topk(2)
        y = torch.cat([low, high], -1) @ y.new_ones(6, 6) + values.sum() + indices.max().float()
        y = y[:, None, :].expand(-1, 2, -1).matmul(torch.eye(6, device=x.device)).mean(1)
        y = torch.where(y > 0, y, y.std()).clamp_(max=3).contiguous() + torch.rand_like(y) * 0
        return (
            twice(nn.functional.dropout(y, 0.5, training=False).split([2, 4], -1)[1])
            .softmax(-1)
            .log_()
        )


@pytest.mark.parametrize("make", [Blocks, Many])
@pytest.mark.parametrize("inference", [False, True])
def test_operators_are_those_of_the_tape(
    make: Callable[[], nn.Module], inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the look as by the tape's steps; these are what replays run."""
    found: Counter[str] = Counter()

    def end(self: TapeBackend, graph: Any, end: Callable[..., None] = TapeBackend.end) -> None:
        end(self, graph)
        found.update(step.operator for step in graph.steps)

    monkeypatch.setattr(TapeBackend, "end", end)
    sizes, backend = {"cudagraph_capture_sizes": [4]}, TapeBackend()
    with (
        torch.inference_mode(inference),
        closing(open_runner(backend, make().eval(), **sizes)) as runner,
    ):
        assert len(found) > 3
        assert split_of(runner).captured == found


def test_operators_of_the_decoder(backend: GraphBackend) -> None:
    """Attention is named as splitting_ops name it, where it is captured and where it is not."""
    config = load_config(
        CONFIGS / "decoder_cpu.yaml",
        [
            "compilation.cudagraph_mode=PIECEWISE",
            "compilation.cudagraph_capture_sizes=[2, 4]",
            "compilation.splitting_modules=[layers.0.self_attn]",
            f"device={backend.device.type}",
        ],
    )
    assert config.model is not None
    model = load_model(
        config.model.target, config.model.kwargs, device=backend.device, base_dir=CONFIGS
    )
    with closing(CaptureSession(build_plan(config), model, backend, config).run()) as runner:
        split = split_of(runner)
        assert (
            split.captured["cgplan::attention"],
            split.eager_operators["cgplan::attention"],
        ) == (3, 1)
        assert split.captured["aten::silu"] == 4
        assert "aten::silu" not in split.eager_operators
        assert split.eager_operators["aten::mm"] == 4, "the projections of the first layer"


class Wrapped(nn.Module):
    """Segments that its author has wrapped, with eager code between them."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.run_one = kind(self._sigmoid_of_one, PIECEWISE)
        self.run_two = kind(
            lambda x: self.two(x).relu(), PIECEWISE, options=CUDAGraphOptions(copied_arguments=(0,))
        )

    def _sigmoid_of_one(self, x: Tensor) -> Tensor:
        return sigmoid(self.one(x)) + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.run_two(self.run_one(x).softmax(1)).exp()  # type: ignore[no-any-return]


@eager_break_during_capture
def sigmoid(x: Tensor) -> Tensor:
    return x.sigmoid()


@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
def test_both_sides_of_a_model_with_wrappers(
    backend: GraphBackend, kind: Callable[..., Any]
) -> None:
    """What is copied to where a graph reads it is neither; a function that stays eager does so in one kind alone."""
    model = Wrapped(kind).to(backend.device).eval()
    with closing(open_runner(backend, model, piecewise="wrappers")) as runner:
        split = split_of(runner)
        captured = {"aten::addmm": 2, "aten::add": 1, "aten::relu": 1}
        eager = {"aten::_softmax": 1, "aten::exp": 1}
        (captured if kind is CUDAGraphWrapper else eager)["aten::sigmoid"] = 1
        assert (split.captured, split.eager) == (captured, eager)
        x = torch.randn(3, 6, device=backend.device)
        assert torch.equal(runner(x=x), runner.run_eagerly(x=x))


@pytest.mark.parametrize("where", ["piece", "loop"])
def test_a_wrapper_inside_an_eager_piece_or_called_several_times(
    backend: GraphBackend, where: str
) -> None:
    """It is counted as it is captured; its replays in the forward that captures it are no eager code."""
    linear = nn.Linear(6, 6).to(backend.device)
    segment = CUDAGraphWrapper(linear, PIECEWISE, options=CUDAGraphOptions(copied_arguments=(0,)))

    @eager_break_during_capture
    def piece(x: Tensor) -> Tensor:
        return segment(x * 2).exp()  # type: ignore[no-any-return]

    def loop(x: Tensor) -> Tensor:
        for _ in range(3):
            x = segment(x * 2).clone()
        return x

    with closing(
        open_runner(backend, piece if where == "piece" else loop, piecewise="wrappers")
    ) as runner:
        eager = {
            "piece": {"aten::mul": 1, "aten::exp": 1},
            "loop": {"aten::mul": 3, "aten::clone": 3},
        }
        assert (split_of(runner).captured, split_of(runner).eager) == (
            {"aten::addmm": 1},
            eager[where],
        )


def test_graphs_on_demand_are_described_once_there_are_any(backend: GraphBackend) -> None:
    model = Blocks().to(backend.device).eval()
    with closing(open_runner(backend, model, capture_policy="lazy")) as runner:
        assert split_of(runner).captured == {}
        runner(x=torch.randn(3, 6, device=backend.device))
        assert split_of(runner).captured["aten::addmm"] == 2


@pytest.mark.parametrize("piece", [doubled, twice], ids=["doubled", "twice"])
def test_the_model_runs_no_more_often_than_it_is_captured(
    backend: GraphBackend, piece: Callable[[Tensor], Tensor]
) -> None:
    """Also where an eager piece reads values of its inputs on the host."""
    calls = Tally()

    def forward(x: Tensor) -> Tensor:
        calls.append(len(x))
        return piece(x * 2) + 1

    with closing(
        open_runner(backend, forward, piecewise="modules", cudagraph_num_of_warmups=1)
    ) as runner:
        assert split_of(runner).captured == {"aten::mul": 1, "aten::add": 1}
    assert calls == [4, 4, 4, 2, 2], "one look, then a warm-up and the capture of each key"


@pytest.mark.parametrize("where", ["around", "segment", "piece"])
def test_a_capture_under_a_profiler_and_a_forward_that_profiles_itself(
    backend: GraphBackend, where: str
) -> None:
    def profile(part: str) -> Any:
        return (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            if part == where
            else nullcontext()
        )

    @eager_break_during_capture
    def piece(x: Tensor) -> Tensor:
        with profile("piece"):
            return x * 2

    def forward(x: Tensor) -> Tensor:
        with profile("segment"):
            return piece(x + 1) + 1

    with (
        profile("around") as profiler,
        closing(open_runner(backend, forward, piecewise="modules")) as runner,
    ):
        x = torch.randn(3, 6, device=backend.device)
        assert torch.equal(runner(x=x), (x + 1) * 2 + 1)
        assert split_of(runner).captured == {"aten::add": 2}
    if profiler is not None:
        assert sum(event.name == "aten::add" for event in profiler.events()) >= 4


# --- compiled code --------------------------------------------------------------------------------------------


class Compiled(nn.Module):
    """A function of it is compiled by a backend that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = Tally()
        self.scaled = torch.compile(lambda x: x.sin() * 2, backend=self._count, dynamic=True)

    def _count(self, gm: Any, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.runs.append("ran")
            return gm(*args)

        return run

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x) + 1  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_code_that_was_compiled_still_runs_after_a_look(backend: GraphBackend) -> None:
    """Under a dispatch mode Dynamo would skip it, then and ever after."""
    model = Compiled()
    x = torch.randn(4, 6, device=backend.device)
    with torch.no_grad():
        for _ in range(2):
            model(x)
        assert len(model.runs) == 2
        assert host_sync_of(lambda: model(x), backend.device) is None
        assert len(model.runs) == 2, "as it is written, meanwhile"
        model(x)
        assert len(model.runs) == 3


@pytest.mark.gpu
def test_further_keys_are_captured_with_compiled_code() -> None:
    """The first one has been looked at, for the state that it binds anew. A tape records code as it is written."""
    compiled = Compiled()

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.last = compiled(x)
            return self.last * 2

    model = Keeps()
    cuda = select_backend("cuda")
    with closing(
        open_runner(cuda, model, cudagraph_mode="FULL", cudagraph_num_of_warmups=1, verify="off")
    ) as runner:
        assert len(compiled.runs) == 4, "a warm-up and a capture of each key"
        x = torch.randn(3, 6, device=cuda.device)
        assert torch.equal(runner(x=x), runner.run_eagerly(x=x))
        assert len(compiled.runs) == 5
