"""Which operators a report names as captured and as eager, where the model is not traced."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgplan
from cgplan import CUDAGraphMode, CUDAGraphOptions, CUDAGraphWrapper, GraphRunner, Input, build_plan
from cgplan.config import load_config
from cgplan.graphs import GraphBackend, select_backend
from cgplan.graphs.host_sync import find_host_sync, is_probing
from cgplan.graphs.plain_code import as_written
from cgplan.models.loading import load_model
from cgplan.reports.records import SplitRecord
from cgplan.runtime.breakable_models import BreakableCUDAGraphWrapper
from cgplan.runtime.breaks import eager_break_during_capture
from cgplan.runtime.graphed import GraphedModel
from cgplan.runtime.operators import note_operators
from cgplan.runtime.piecewise import cgplan_backend
from cgplan.runtime.session import CaptureSession
from cgplan.runtime.written import WrittenState

PIECEWISE = CUDAGraphMode.PIECEWISE
CONFIGS = Path(__file__).parent.parent / "configs"


def open_runner(backend: GraphBackend, model: Callable[..., Any], **compilation: Any) -> GraphRunner:
    return cgplan.capture(
        model,
        {"x": Input(shape=("num_tokens", 6), dtype="float32", pad=0)},
        compilation={"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [2, 4], **compilation},  # type: ignore[dict-item]
        device=backend.device.type,
    )


def split_of(runner: GraphRunner) -> SplitRecord:
    assert runner.report.split is not None
    return runner.report.split


@eager_break_during_capture
def twice(x: Tensor) -> Tensor:
    return torch.tensor(x.tolist(), device=x.device) * 2


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


def captured_on_the_tape(runner: GraphRunner) -> Counter[str]:
    """What the graphs of the smallest key run, by the tape itself."""
    scope, smallest = runner._graphed.scope, runner.plan.keys[-1][1]
    graphs = [
        graph
        for wrapper in scope.wrappers
        for entry in wrapper.entries.values()
        if entry.scope is scope and entry.descriptor == smallest
        for graph in entry.segments
    ]
    return Counter(step.call._schema.name for graph in graphs for step in graph.steps)


def test_views_and_eager_pieces_are_none_of_the_captured(backend: GraphBackend) -> None:
    model = Blocks().to(backend.device).eval()
    with closing(open_runner(backend, model)) as runner:
        split = split_of(runner)
        assert split.captured == {"aten::addmm": 2, "aten::relu": 1, "aten::clone": 1, "aten::fill_": 1, "aten::add": 1}
        assert split.eager == {"twice": 1}
        assert split.eager_operators["aten::mul"] == 1
        shown = str(runner.report)
        assert re.search(r"eager +twice\n", shown)
        assert re.search(r"eager calls +.*aten::mul", shown)


def test_operators_are_those_of_the_tape() -> None:
    with closing(open_runner(select_backend("cpu"), Blocks().eval())) as runner:
        assert split_of(runner).captured == captured_on_the_tape(runner)


def test_operators_of_the_decoder_are_those_of_the_tape() -> None:
    """Attention is an operator with Python code of its own; of one layer it is captured."""
    config = load_config(
        CONFIGS / "decoder_cpu.yaml",
        [
            "compilation.cudagraph_mode=PIECEWISE",
            "compilation.cudagraph_capture_sizes=[2, 4]",
            "compilation.splitting_modules=[layers.0.self_attn]",
            "device=cpu",
        ],
    )
    assert config.model is not None
    cpu = select_backend("cpu")
    model = load_model(config.model.target, config.model.kwargs, device=cpu.device).forward
    with closing(CaptureSession(build_plan(config), model, cpu, config).run()) as runner:
        found = captured_on_the_tape(runner)
        assert split_of(runner).captured == found
        assert found["aten::mm"] == 4 * 7 - 4 + 1, "four projections of the first layer are eager"
        eager = split_of(runner).eager_operators
        assert (eager["aten::mm"], eager["cgplan::attention"]) == (4, 1), "as eager code calls them, and no deeper"


def test_a_look_leaves_the_model_as_it_was(backend: GraphBackend) -> None:
    """Attributes, lists that are bound anew, and random numbers."""
    model = Blocks().to(backend.device).eval()
    first, second = model.turns
    looks: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:

        def spied(graphed: GraphedModel) -> None:
            before = model.last, list(model.turns), torch.get_rng_state()
            note_operators(graphed)
            looks.append((before, (model.last, list(model.turns), torch.get_rng_state())))

        patch.setattr("cgplan.runtime.session.note_operators", spied)
        with closing(open_runner(backend, model)) as runner:
            assert split_of(runner).captured
    [(before, after)] = looks
    assert before[0] is not None
    assert after[0] is before[0]
    assert [t is first or t is second for t in after[1]] == [True, True]
    assert all(one is other for one, other in zip(before[1], after[1], strict=True))
    assert torch.equal(before[2], after[2])


class Wrapped(nn.Module):
    """Segments that its author has wrapped, with eager code between them."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.run_one = kind(self.one, PIECEWISE)
        self.run_two = kind(lambda x: self.two(x).relu(), PIECEWISE, options=CUDAGraphOptions(copied_arguments=(0,)))

    def forward(self, x: Tensor) -> Tensor:
        assert self.run_one.weight is self.one.weight, "a wrapper looks like what it wraps"
        return self.run_two(self.run_one(x).softmax(1)).exp()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
def test_both_sides_of_a_model_with_wrappers(backend: GraphBackend, kind: Callable[..., Any]) -> None:
    model = Wrapped(kind).to(backend.device).eval()
    held = model.run_one.runnable
    with closing(open_runner(backend, model, piecewise="wrappers")) as runner:
        split = split_of(runner)
        assert split.captured == {"aten::addmm": 2, "aten::relu": 1}
        assert split.eager == {"aten::_softmax": 1, "aten::exp": 1}
        x = torch.randn(3, 6, device=backend.device)
        assert torch.equal(runner(x=x), runner.run_eagerly(x=x))
    assert model.run_one.runnable is held


def test_graphs_on_demand_are_described_once_there_are_any(backend: GraphBackend) -> None:
    model = Blocks().to(backend.device).eval()
    with closing(open_runner(backend, model, capture_policy="lazy")) as runner:
        assert split_of(runner).captured == {}
        runner(x=torch.randn(3, 6, device=backend.device))
        assert split_of(runner).captured["aten::addmm"] == 2


def test_a_forward_that_fails_when_looked_at_is_not_described(backend: GraphBackend) -> None:
    """The capture has gone well, and is what was asked for."""
    model = Blocks().to(backend.device).eval()
    calls = 0

    def fails_alone(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if is_probing():
            raise RuntimeError("not while somebody looks")
        return model(x)  # type: ignore[no-any-return]

    with closing(open_runner(backend, fails_alone, piecewise="modules")) as runner:
        assert split_of(runner).captured == {}
        assert calls > 2
        x = torch.randn(3, 6, device=backend.device)
        assert torch.equal(runner(x=x), runner.run_eagerly(x=x))


# --- compiled code --------------------------------------------------------------------------------------------


class Compiled(nn.Module):
    """A function of it is compiled by a backend that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.last: Tensor | None = None
        self.scaled = torch.compile(lambda x: x.sin() * 2, backend=self._count, dynamic=True)

    def _count(self, gm: Any, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.runs += 1
            return gm(*args)

        return run

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.scaled(x)
        return twice(self.last) + 1


@pytest.mark.parametrize("look", ["operators", "host_sync", "written"])
def test_code_that_was_compiled_still_runs_after_a_look(backend: GraphBackend, look: str) -> None:
    """Under a dispatch mode Dynamo would skip it, then and ever after."""
    torch._dynamo.reset()
    model = Compiled()
    x = torch.randn(4, 6, device=backend.device)
    with torch.no_grad():
        for _ in range(2):
            model(x)
        before = model.runs
        assert before == 2
        if look == "operators":
            with closing(open_runner(backend, model)) as runner:
                assert split_of(runner).captured["aten::sin"] == 1
                before = model.runs
        elif look == "host_sync":
            assert find_host_sync(lambda: model(x), backend.device) is None
        else:
            WrittenState(model, lambda: model(x))
        assert model.runs == before, "as it is written, meanwhile"
        model(x)
        assert model.runs == before + 1
    torch._dynamo.reset()


def test_looks_in_two_threads_end_in_any_order() -> None:
    torch._dynamo.reset()
    inside, leave = threading.Event(), threading.Event()

    def looks() -> None:
        with as_written():
            inside.set()
            leave.wait(10)

    model, x = Compiled(), torch.randn(4, 6)
    model(x)
    thread = threading.Thread(target=looks)
    with as_written():
        thread.start()
        assert inside.wait(10)
    model(x)
    assert model.runs == 1, "the other look is not over"
    leave.set()
    thread.join()
    model(x)
    assert model.runs == 2
    torch._dynamo.reset()


def test_segments_in_compiled_code_are_known_from_their_traces(backend: GraphBackend) -> None:
    torch._dynamo.reset()

    def forward(x: Tensor) -> Tensor:
        return (x * 2).softmax(1).exp()

    compiled: Any = torch.compile(
        forward, backend=cgplan_backend, options={"splitting_ops": ["aten::softmax"]}, dynamic=True
    )
    with closing(open_runner(backend, compiled, piecewise="wrappers", cudagraph_capture_sizes=[4])) as runner:
        assert split_of(runner).captured == {"aten::mul": 1, "aten::exp": 1}
        x = torch.randn(3, 6, device=backend.device)
        assert torch.equal(runner(x=x), runner.run_eagerly(x=x))
    torch._dynamo.reset()
