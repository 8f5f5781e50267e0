"""cudagraph_mode AUTO: what is tried, and what is chosen."""

from __future__ import annotations

import itertools
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from checks import same
from spec_decode import plan_speculation
from torch import Tensor, nn

import cgplan
from cgplan import CUDAGraphMode, GraphRunner, Input
from cgplan.backends import GraphBackend
from cgplan.config import CompilationConfig, validate_config
from cgplan.modes import Key
from cgplan.piecewise.trace import PiecewiseModel
from cgplan.reports import CaptureReport
from cgplan.runner import auto

NONE, FULL, PIECEWISE = CUDAGraphMode.NONE, CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


class ReadsTheHost(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(x.tolist()[0])


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear, self.inner, self.n = nn.Linear(4, 4), inner, nn.Buffer(torch.zeros(1))
        for parameter in self.linear.parameters():  # whole numbers: sums are exact in any order
            nn.init.normal_(parameter, std=2.0).data.round_()

    def forward(self, x: Tensor) -> Tensor:
        self.n.add_(1)
        return self.inner(self.linear(x)) + self.n


class Net(nn.Module):
    def __init__(self, inner: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(inner()), Block(inner()))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def as_timed(patch: pytest.MonkeyPatch, *gains: float, spread: float = 0.0) -> list[int]:
    """Each way that is captured gets the next of these gains for one token, and its root for more; rounds lie around.
    Returns the list of the sizes that are timed.
    """
    left, sizes = list(gains), list[int]()

    def timed(graphed: Any, keys: list[Key]) -> Any:
        gain = left.pop(0)
        sizes.extend(descriptor.num_tokens for _, descriptor in keys)
        rounds = [1 + spread, 1.0, 1.0, 1.0, 1 - spread]
        return {
            key: (
                [
                    100.0 * gain ** (1.0 if key[1].num_tokens == 1 else 0.5) * part
                    for part in rounds
                ],
                5 * [100.0],
            )
            for key in keys
        }

    patch.setattr(auto, "time_on_padding", timed)
    return sizes


def open_runner(
    backend: GraphBackend,
    model: nn.Module,
    sections: dict[str, Any] | None = None,
    **compilation: Any,
) -> GraphRunner:
    return cgplan.capture(
        model.to(backend.device).eval(),
        {"x": Input(shape=("num_tokens", 4), dtype="float32", pad=0)},
        compilation={
            "cudagraph_mode": "AUTO",
            "cudagraph_capture_sizes": [1, 2, 4, 8],
            "compiler": "eager",
            "outputs": "clone",
            **compilation,
        },
        device=backend.device.type,
        **(sections or {}),
    )


def serves_right(runner: GraphRunner, model: nn.Module) -> None:
    with closing(runner), torch.no_grad():
        for count in (1, 3, 8):
            before = model.state_dict()
            before = {name: value.clone() for name, value in before.items()}
            x = torch.randint(-4, 5, (count, 4), device=runner.backend.device).float()
            found = runner(x=x)
            model.load_state_dict(before)
            same(found, model(x))


def test_a_model_that_can_be_captured_whole_is(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net(nn.ReLU)
    as_timed(monkeypatch, 4.0, 4.01)
    runner = open_runner(backend, model)
    assert (runner.plan.requested_mode, runner.plan.mode) == (CUDAGraphMode.AUTO, FULL)
    assert runner.plan.capture_sizes == (1, 2, 4, 8)
    said = "FULL, against eager steps 4x at 1 (4 to 4), 2x at 8 (2 to 2) tokens, in 5 rounds"
    assert said in " ".join(str(runner.report).split())
    assert all(int(block.n) == 0 for block in model.layers)  # the runs that were timed left nothing
    serves_right(runner, model)
    asked = open_runner(backend, Net(nn.ReLU), splitting_modules=["layers.*.inner"])
    assert asked.plan.mode is FULL
    assert not asked.report.warnings, "of modules that AUTO had no need to split at"


def test_modules_that_fail_stay_out_of_the_graphs(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net(ReadsTheHost)
    as_timed(monkeypatch, 4.0)
    runner = open_runner(backend, model)
    assert (runner.plan.mode, runner.config.compilation.splitting_modules) == (
        PIECEWISE,
        ("layers.*.inner",),
    )
    failed = [note for note in runner.plan.notes if note.startswith("AUTO: FULL failed")]
    assert len(failed) == 1
    assert "test_auto.py" in failed[0]
    serves_right(runner, model)


@pytest.mark.parametrize(
    ("gain", "said"), [(1.01, "graphs bring less than 2%"), (None, "no way to capture the model")]
)
@pytest.mark.filterwarnings("error")
def test_nothing_is_captured_where_it_brings_nothing(
    backend: GraphBackend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gain: float | None,
    said: str,
) -> None:
    model: nn.Module = ReadsTheHost() if gain is None else Net(nn.ReLU)
    as_timed(monkeypatch, *(() if gain is None else (gain, gain)))
    with caplog.at_level(logging.INFO, "cgplan"), closing(open_runner(backend, model)) as runner:
        assert runner.plan.mode is NONE
        assert f"AUTO -> NONE: {said}" in str(runner.report)
        (line,) = caplog.messages
        assert f"AUTO -> NONE: {said}" in line
        assert gain is None or "1.01x at 1" in line
        x = torch.ones(2, 4, device=backend.device)
        assert runner(x=x).shape == (2, 4)


def test_large_sizes_that_bring_nothing_are_left_out(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_timed(monkeypatch, 1.03, 1.03)  # 1.015 at 8 tokens
    with closing(open_runner(backend, Net(nn.ReLU))) as runner:
        assert runner.plan.capture_sizes == (1,)


def test_piecewise_is_not_tried_beside_graphs_of_the_whole_forward(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_timed(monkeypatch, 4.0)
    with closing(open_runner(backend, Net(nn.ReLU))) as runner:
        said = "AUTO: PIECEWISE by operators not tried: a FULL graph holds the whole forward"
        assert said in runner.plan.notes


class BeginsWithItsFirstBatch(Block):
    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.is_first = True

    def forward(self, x: Tensor) -> Tensor:
        self.n.copy_(x[0, 0]) if self.is_first else self.n.mul_(0.5).add_(x[0, 0])
        self.is_first = False
        return x + self.n


def test_no_compiler_is_tried_for_a_model_that_was_refused(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = auto._ways

    def ways(compilation: CompilationConfig, _: GraphBackend) -> Iterator[auto.Way]:
        given = compilation.model_fields_set - {"compiler"}  # which open_runner sets
        free = CompilationConfig(**{name: getattr(compilation, name) for name in given})
        return asked(free, SimpleNamespace(is_tape=False))  # type: ignore[arg-type]

    monkeypatch.setattr(auto, "_ways", ways)
    with closing(open_runner(backend, BeginsWithItsFirstBatch())) as runner:
        said = "AUTO: FULL with inductor not tried: the model was refused for FULL"
        assert said in runner.plan.notes


class BindsItsBuffer(Block):
    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.n = x[0].clone() if self.runs == 1 else self.n * 0.5 + x[0]
        return x + self.n


def test_a_way_whose_graphs_lose_a_tensor_is_left_out(backend: GraphBackend) -> None:
    model = BindsItsBuffer()
    with closing(open_runner(backend, model)) as runner:
        assert runner.plan.mode is NONE
        assert model.runs == 0
        assert any("AUTO: PIECEWISE by operators failed" in note for note in runner.plan.notes)


class ReadsTheHostUntraced(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[1] if torch.compiler.is_compiling() else len(x.tolist()[0])
        return x * width


@pytest.mark.parametrize(("spread", "chosen"), [(0.0, "modules"), (0.2, "ops")])
def test_of_ways_within_the_spread_the_one_with_the_smallest_pool_is_taken(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch, spread: float, chosen: str
) -> None:
    def pool_bytes(report: CaptureReport) -> int:
        assert report.split is not None
        return (report.split.route == "modules") << 40

    monkeypatch.setattr(CaptureReport, "pool_bytes", property(pool_bytes), raising=False)
    as_timed(monkeypatch, 4.0, 3.5, spread=spread)
    with closing(open_runner(backend, Net(ReadsTheHostUntraced))) as runner:
        monkeypatch.undo()
        assert runner.plan.mode is PIECEWISE
        assert runner.report.split is not None
        assert runner.report.split.route == chosen
        reason = runner.plan.changes[0].reason
        tie = "a tie with PIECEWISE without layers.*.inner: its pool is no larger"
        assert (tie in reason) == (spread > 0)
        assert spread == 0 or "3.5x at 1 (2.8 to 4.2)" in reason


@pytest.mark.parametrize(
    ("sections", "timed"),
    [
        ({}, {1, 8}),
        ({"scheduler": {"max_num_seqs": 4}}, {1, 4, 8}),
        ({"report": {"sizes": [2, 3, 9]}}, {2, 4}),
    ],
    ids=["ends", "all requests", "asked for"],
)
def test_a_few_sizes_are_timed_or_those_of_the_report_section(
    backend: GraphBackend,
    monkeypatch: pytest.MonkeyPatch,
    sections: dict[str, Any],
    timed: set[int],
) -> None:
    sizes = as_timed(monkeypatch, 4.0, 4.0)
    open_runner(backend, Net(nn.ReLU), sections).close()
    assert set(sizes) == timed


def test_a_budget_that_leaves_all_graphs_out_captures_nothing(backend: GraphBackend) -> None:
    with closing(open_runner(backend, Net(nn.ReLU), {"budget": {"memory": "1B"}})) as runner:
        assert runner.plan.mode is NONE
        said = "AUTO: FULL has no graphs: the configuration or its budget leaves all of them out"
        assert any(note.startswith(said) for note in runner.plan.notes)


@pytest.mark.parametrize("given", ["note", "file"])
def test_the_choice_can_be_kept(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str
) -> None:
    model = Net(ReadsTheHost)
    as_timed(monkeypatch, 1.03)  # not worth it at 8 tokens
    runner = open_runner(backend, model, max_cudagraph_capture_size=8)
    (note,) = (note for note in runner.plan.notes if "To keep this choice" in note)
    if given == "note":
        again = open_runner(
            backend, model, **yaml.safe_load(note.partition("write into compilation: ")[2])
        )
    else:
        (tmp_path / "kept.yaml").write_text(runner.config.model_dump_json())
        again = cgplan.capture(model, config=tmp_path / "kept.yaml")
    with closing(runner), closing(again):
        assert again.plan.keys == runner.plan.keys
        assert again.config.compilation.splitting_modules == ("layers.*.inner",)
        assert again.plan.capture_sizes == (1,)
        assert not again.plan.notes


@pytest.mark.parametrize("change", ["", "weights", "config", "file", "model", "setting", "hook"])
def test_a_later_start_takes_the_choice_of_an_earlier_one(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
) -> None:
    monkeypatch.setenv("CGPLAN_CACHE_DIR", str(tmp_path / "kept"))
    model = Net(ReadsTheHost)
    sizes = as_timed(monkeypatch, 1.03, 4.0)
    with closing(open_runner(backend, model, max_cudagraph_capture_size=8)) as runner:
        timed = len(sizes)
        first = runner.plan
        assert first.capture_sizes == (1,)
    (file,) = (tmp_path / "kept").iterdir()
    config: dict[str, Any] = {}
    if change == "weights":
        with torch.no_grad():
            model.layers[0].linear.bias[0] += 1
    elif change == "config":
        config = {"budget": {"capture_time": 1000.0}}
    elif change == "file":
        file.write_text('{"compilation": {"cudagraph_mode": "SOME"}, "reason": "", "notes": []}')
    elif change == "setting":
        model.layers[0].scale = 2
    elif change == "hook":
        model.layers[0].register_forward_hook(lambda *_: None)
    elif change == "model":
        model.layers[1].inner = nn.Sequential(ReadsTheHost())
    with closing(open_runner(backend, model, config, max_cudagraph_capture_size=8)) as runner:
        again = runner.plan
    if change:
        assert len(sizes) > timed
        assert max(again.capture_sizes) > 1
        return
    assert len(sizes) == timed
    assert again.keys == first.keys
    assert again.changes == first.changes
    assert again.notes[:-1] == first.notes
    assert str(file) in again.notes[-1]


class Turns(nn.Module):
    reads_the_host = False  # which is no part of a choice's key

    def forward(self, x: Tensor) -> Tensor:
        return ReadsTheHost.forward(self, x) if self.reads_the_host else x * 4  # type: ignore[arg-type]


def test_a_kept_choice_that_fails_is_made_again(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CGPLAN_CACHE_DIR", str(tmp_path))
    as_timed(monkeypatch, *4 * [4.0])
    model = Net(Turns)
    with closing(open_runner(backend, model)) as runner:
        assert runner.plan.mode is FULL
    monkeypatch.setattr(Turns, "reads_the_host", True)
    runner = open_runner(backend, model)
    assert runner.plan.mode is PIECEWISE
    assert "the choice of an earlier start failed" in runner.plan.notes[-1]
    serves_right(runner, model)
    with closing(open_runner(backend, model)) as runner:
        assert runner.plan.mode is PIECEWISE
        assert not any("failed:" in note and "earlier" in note for note in runner.plan.notes)


def test_a_choice_is_not_kept_where_it_cannot_be_or_where_time_ran_out(
    backend: GraphBackend,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CGPLAN_CACHE_DIR", str(tmp_path / "file" / "below"))
    as_timed(monkeypatch, 4.0, 4.0)
    with caplog.at_level(logging.INFO, "cgplan"), closing(open_runner(backend, Net(nn.ReLU))):
        assert "AUTO's choice is not kept" in caplog.text
    monkeypatch.setenv("CGPLAN_CACHE_DIR", str(tmp_path))
    model = Net(ReadsTheHost)
    with closing(open_runner(backend, model, {"budget": {"capture_time": 1e-9}})) as runner:
        assert any("budget.capture_time was spent" in note for note in runner.plan.notes)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_capture_time_that_is_shown_counts_the_trials_once(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def timed(graphed: Any, keys: list[Key]) -> Any:
        now[0] += 50
        return {key: ([4.0] * 5, [1.0] * 5) for key in keys if graphed}

    monkeypatch.setattr(auto, "time_on_padding", timed)
    with closing(open_runner(backend, Net(nn.ReLU))) as runner:
        assert runner.report.session_seconds == 50.0
        assert any(note.startswith("AUTO took 50") for note in runner.plan.notes)
        runner.recapture()
        assert runner.report.session_seconds == 0.0


def test_a_session_or_manager_needs_a_mode_that_is_decided(backend: GraphBackend) -> None:
    auto_config = validate_config(
        {
            "model": {},
            "inputs": {"x": {"shape": ["num_tokens", 4], "dtype": "float32", "pad": 0}},
            "compilation": {
                "cudagraph_mode": "AUTO",
                "cudagraph_capture_sizes": [1, 2],
                "compiler": "eager",
            },
            "speculative": {"num_speculative_tokens": 1},
        }
    )
    model = Net(nn.ReLU).to(backend.device).eval()
    plan = cgplan.build_plan(auto_config)
    makers: list[Callable[[], object]] = [
        lambda: cgplan.CaptureSession(plan, model, backend, auto_config),
        lambda: cgplan.CudaGraphManager(auto_config, model, backend),
        lambda: plan_speculation(auto_config),
    ]
    for make in makers:
        with pytest.raises(cgplan.ConfigError, match="cudagraph_mode is AUTO") as raised:
            make()
        assert "choose_mode" in raised.value.remedy
    config, plan = cgplan.choose_mode(auto_config, model, backend)
    with cgplan.CudaGraphManager(config, model, backend, plan=plan) as manager:
        assert manager.capture().plan.requested_mode is CUDAGraphMode.AUTO


def test_steps_are_timed_without_hooks(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = list[int]()
    time_on_padding = auto.time_on_padding

    def timed(graphed: Any, keys: list[Key]) -> Any:
        hooks.append(len(nn.modules.module._global_forward_hooks))
        return time_on_padding(graphed, keys)

    monkeypatch.setattr(auto, "time_on_padding", timed)
    with closing(open_runner(backend, Net(nn.ReLU))):
        assert hooks
        assert not any(hooks)


def test_the_captures_take_over_the_traces_of_the_trial(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend.is_tape:
        pytest.skip("inductor needs a GPU")
    made = list[PiecewiseModel]()
    init = PiecewiseModel.__init__

    def noted(self: PiecewiseModel, *args: Any) -> None:
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(PiecewiseModel, "__init__", noted)
    as_timed(monkeypatch, 2.0)
    with closing(open_runner(backend, Net(nn.ReLU), compiler="inductor")) as runner:
        assert runner.plan.mode is FULL
        assert len(made) == 1
        assert len(made[0].splitter.traces) == 3  # 1, 8, and those between


class Alternates(nn.Module):
    """Python code that computes something else on each second call, by what no look sees."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = itertools.cycle([torch.abs, torch.neg])

    def forward(self, x: Tensor) -> Tensor:
        return next(self.turns)(x)


def test_a_way_whose_numbers_are_not_those_of_eager_code_is_left_out(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_timed(monkeypatch, 3.0, 3.0)
    x = torch.tensor([[1.0, -2.0, 3.0, -4.0]], device=backend.device)
    with closing(open_runner(backend, Alternates())) as runner:
        assert runner.plan.mode is NONE
        assert any(
            "FULL left out: on example batches at 8 tokens: output " in note  # 0 or 1: runs turn it
            for note in runner.plan.notes
        )
        found = [runner(x=x), runner(x=x)]  # the looks turned it, too
        same(found, [x.abs(), x.neg()] if found[0].min() >= 0 else [x.neg(), x.abs()])


@pytest.mark.gpu
def test_a_model_of_products_alone_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    as_timed(monkeypatch, 3.0)
    model = nn.Linear(4096, 4096, bias=False).cuda().eval().requires_grad_(False)
    inputs = {"input": Input(shape=("num_tokens", 4096), dtype="float32", pad=0)}
    settings = {"cudagraph_mode": "AUTO", "cudagraph_capture_sizes": [1, 8]}
    with closing(cgplan.capture(model, inputs, compilation=settings, device="cuda")) as runner:
        assert runner.config.compilation.compiler == "eager"
        said = "FULL with inductor not tried: kernels that it can join take "
        (note,) = [note for note in runner.plan.notes if said in note]
        assert re.search(r"take [01]\.\d% of a step$", note)


class Rounds(nn.Module):
    """Whole numbers for the model's own code; inductor joins the operators, and rounds once."""

    def forward(self, x: Tensor) -> Tensor:
        return ((x.bfloat16() + 256) - 256).float()


@pytest.mark.gpu
def test_a_faster_way_that_is_left_out_is_told_with_the_settings_that_accept_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_timed(monkeypatch, 3.0, 9.0)
    inputs = {"x": Input(shape=("num_tokens", 4), dtype="float32", pad=0)}
    sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
    model = Rounds().eval()
    with closing(
        cgplan.capture(
            model, inputs, compilation={"cudagraph_mode": "AUTO", **sizes}, device="cuda"
        )
    ) as runner:
        notes = runner.plan.notes
        assert (runner.plan.mode, runner.config.compilation.compiler) == (FULL, "eager")
    (note,) = [note for note in notes if "FULL with inductor left out" in note]
    assert re.search(r"at \d tokens: output .*, in \d+\.\d% of its elements; ", note)
    assert "against eager steps 9x at 1" in note
    settings, _ = json.JSONDecoder().raw_decode(note[note.index("{") :])
    taken = cgplan.capture(model, inputs, compilation={**settings, **sizes}, device="cuda")
    with closing(taken) as runner, torch.no_grad():
        assert runner.config.compilation.compiler == "inductor"
        x = torch.full((3, 4), 1.25, device="cuda")
        same(runner(x=x), x)
        same(model(x), torch.full_like(x, 2))
