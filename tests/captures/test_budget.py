"""Budgets that hold while graphs are captured: what is kept, what the report says, and that the runner still works."""

from __future__ import annotations

import gc
import json
import re
import threading
import time
from collections.abc import Callable
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checks import reserved, same
from devices import LimitedTape, WithDriver
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.tape import TapeBackend
from cgplan.captures.captured_keys import NO_GRAPH, fitting
from cgplan.config import Config, validate_config
from cgplan.errors import CaptureError, CaptureMemoryError, DispatchMissError, HostSyncError
from cgplan.graphs.wrapper import GraphPool
from cgplan.modes import CUDAGraphMode
from cgplan.optimizer.subset import restricted
from cgplan.planning import MissReason, Plan, build_plan
from cgplan.planning.plan import KeyCost, Predicted
from cgplan.reports import CaptureReport
from cgplan.reports.records import BudgetRecord
from cgplan.runner.runner import GraphRunner
from cgplan.runner.session import CaptureSession

pytestmark = pytest.mark.usefixtures("quiet_collector")

KIB = 1 << 10
SIZES = (1, 2, 4, 8, 16)
WIDTH = 64
ROW = WIDTH * 4  # bytes of a row of x
POOL_ROW = (
    4 * ROW
)  # of what the forward holds at once: x + 1, two tensors made of it, and their sum
DRIVER = 4 * 1000  # bytes that the driver takes for its four operators, at 1000 each
FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


class Model(nn.Module):
    """Holds four tensors of x's size at once; ``last`` can stay eager."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        return self.last(torch.relu(y) + torch.neg(y))  # type: ignore[no-any-return]


def expected(x: Tensor) -> Tensor:
    return torch.relu(x + 1) + torch.neg(x + 1)


def config_of(budget: dict[str, Any], **changes: Any) -> Config:
    compilation = {"cudagraph_capture_sizes": list(SIZES), **changes.pop("compilation", {})}
    inputs = {"x": {"shape": ["num_tokens", WIDTH], "dtype": "float32", "pad": 0}}
    return validate_config(
        {"inputs": inputs, "compilation": compilation, "budget": budget, **changes}
    )


def open_runner(
    budget: dict[str, Any],
    *,
    backend: GraphBackend | None = None,
    model: Callable[..., Any] | None = None,
    predicted: Callable[[Plan], Predicted] | None = None,
    **changes: Any,
) -> GraphRunner:
    config = config_of(budget, **changes)
    plan = build_plan(config)
    if predicted is not None:
        plan = plan.model_copy(update={"predicted": predicted(plan)})
    return CaptureSession(plan, model or Model(), backend or TapeBackend(), config).run()


def predict(
    seconds: float = 0.0, *, row: int = POOL_ROW, driver: int = 0, workspace: int = 0
) -> Callable[[Plan], Predicted]:
    """Predictions for a plan: the first key brings a pool of ``row`` bytes a token, each one driver memory."""

    def of(plan: Plan) -> Predicted:
        costs = [KeyCost(0, driver, seconds) for _ in plan.keys]
        costs[0] = KeyCost(plan.keys[0][1].num_tokens * row, driver, seconds)
        return Predicted(
            keys=tuple(costs),
            static_bytes=max(SIZES) * ROW,
            workspace_bytes=workspace,
            source="a guess",
            estimated=True,
        )

    return of


def captured_sizes(runner: GraphRunner) -> list[int]:
    return [descriptor.num_tokens for _, descriptor in runner.plan.keys]


def budget_of(runner: GraphRunner) -> BudgetRecord:
    assert runner.report.budget is not None
    return runner.report.budget


def sizes(keys: Any) -> list[int]:
    return [descriptor.num_tokens for _, descriptor in keys]


def check_numbers(runner: GraphRunner) -> None:
    """Every batch has the right result, from the next captured size or eagerly, and is counted as such."""
    kept = sorted(captured_sizes(runner))
    replays = eager = 0
    for rows in (*range(1, max(SIZES) + 3), 1, 5):
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
        same(runner(x=x), expected(x))
        padded = next((size for size in kept if size >= rows), None)
        replays, eager = replays + (padded is not None), eager + (padded is None)
        assert runner.route({"x": x}).descriptor.num_tokens == (padded or rows)
    assert sum(runner.stats.replays.values()) == replays
    assert sum(runner.stats.eager.values()) == eager
    assert {d.num_tokens for _, d in runner.stats.replays} <= set(kept)


def check_report(runner: GraphRunner, config_keys: int = len(SIZES)) -> None:
    """The report tells of all keys, and agrees with the runner."""
    report, budget = runner.report, runner.report.budget
    assert budget is not None
    assert report.plan == runner.plan
    assert [(r.mode, r.descriptor) for r in report.records] == list(runner.plan.keys)
    assert len(report.records) + len(budget.left_out) + len(budget.skipped) == config_keys
    assert budget.used_bytes == report.graph_bytes
    assert CaptureReport.model_validate_json(report.model_dump_json()) == report
    text = str(report)
    assert "budget" in text
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 100
    assert ("advice" in text) is bool(budget.left_out or budget.skipped)


# --- without a limit ------------------------------------------------------------------------------------------


def test_a_budget_that_is_absent_or_pays_for_all_changes_nothing() -> None:
    runner = open_runner({})
    assert runner.report.budget is None
    assert captured_sizes(runner) == [16, 8, 4, 2, 1]
    assert "budget" not in str(runner.report)
    assert "redicted" not in str(runner.report), "without predictions nothing is compared"
    saved = json.loads(runner.report.model_dump_json())
    del saved["budget"], saved["workspace_bytes"]
    assert CaptureReport.model_validate(saved).budget is None, (
        "a report of before budgets can still be read"
    )
    runner = open_runner(
        {"memory": "1GiB", "capture_time": "10min", "max_graphs": 5, "reserve": "1B"}
    )
    assert captured_sizes(runner) == [16, 8, 4, 2, 1]
    assert budget_of(runner).stops == ()
    check_numbers(runner)
    check_report(runner)


# --- number of graphs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "kept"), [(1, [16]), (2, [16, 8]), (4, [16, 8, 4, 2])])
def test_of_too_many_graphs_those_stay_that_pad_least(most: int, kept: list[int]) -> None:
    runner = open_runner({"max_graphs": most})
    assert captured_sizes(runner) == kept
    budget = budget_of(runner)
    assert sizes(budget.left_out) == sorted({*SIZES} - {*kept}, reverse=True)
    assert f"at most {most} graph{'' if most == 1 else 's'}\n" in str(runner.report)
    said = " ".join(str(runner.report).partition("left out")[2].split())
    assert said.startswith(f"{len(SIZES) - most} key")
    assert "): of the keys that fit, max_graphs keeps those that pad least" in said
    assert budget.stops == ()
    check_numbers(runner)
    check_report(runner)


def test_a_piecewise_key_counts_as_one_graph() -> None:
    compilation = {
        "cudagraph_mode": "PIECEWISE",
        "piecewise": "modules",
        "splitting_modules": ["last"],
    }
    runner = open_runner({"max_graphs": 2}, compilation=compilation)
    assert captured_sizes(runner) == [16, 8]
    assert runner.plan.mode is PIECEWISE
    check_numbers(runner)


def test_of_equal_sizes_piecewise_goes_before_full() -> None:
    compilation = {
        "cudagraph_mode": "FULL_AND_PIECEWISE", "piecewise": "modules", "splitting_modules": ["last"],
    }  # fmt: skip
    runner = open_runner({"capture_time": "3s"}, compilation=compilation, predicted=predict(1.0))
    assert [(mode, d.num_tokens) for mode, d in runner.plan.keys] == [
        (PIECEWISE, 1),
        (FULL, 2),
        (FULL, 1),
    ]
    check_report(runner, 2 * len(SIZES))
    for rows, mode in ((1, FULL), (2, FULL), (3, CUDAGraphMode.NONE)):
        x = torch.randn(rows, WIDTH)
        assert runner.route({"x": x}, uniform_decode=True).mode is mode
        same(runner(x=x, uniform_decode=True), expected(x))
        same(runner(x=x, uniform_decode=False), expected(x))


# --- memory ---------------------------------------------------------------------------------------------------


def test_a_size_that_is_too_large_by_itself_is_freed_and_the_next_one_tried() -> None:
    """Nothing was predicted: sizes 16 and 8 are captured, seen to be too large, and freed."""
    runner = open_runner({"memory": 16 * ROW + 4 * POOL_ROW})
    assert captured_sizes(runner) == [4, 2, 1]
    report = runner.report
    assert report.pool_bytes == 4 * POOL_ROW
    assert report.budget is not None
    assert [stop.limit for stop in report.budget.stops] == ["memory", "memory"]
    assert sizes(report.budget.skipped) == [16, 8]
    assert "20.0 KiB are used with it" in report.budget.stops[0].detail
    check_numbers(runner)
    check_report(runner)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 80 * KIB), st.booleans(), st.integers(0, 3), st.sampled_from([0, 700, 3000]))
def test_memory_stays_within_any_budget(limit: int, predicts: bool, chunks: int, rate: int) -> None:
    device = WithDriver(rate, 1 + chunks * 2048)
    before = reserved(device)
    runner = open_runner(
        {"memory": limit}, backend=device, predicted=predict(driver=4 * rate) if predicts else None
    )
    assert runner.report.graph_bytes <= limit or not runner.plan.keys
    assert before == device.memory().reserved - runner.report.pool_bytes
    free = device.memory().free
    assert free is not None
    assert device.total - free + runner.report.static_bytes <= max(
        limit, runner.report.static_bytes
    )
    x = torch.randn(3, WIDTH)
    same(runner(x=x), expected(x))
    check_report(runner)
    runner.close()
    assert (reserved(device), device.nodes) == (before, 0)


def test_a_graph_that_overshoots_is_freed_and_those_before_it_are_captured_again() -> None:
    """The driver's memory was not predicted: three keys fit, the fourth one does not."""
    device = WithDriver(rate=1000, chunk=1)
    limit = 16 * ROW + 16 * POOL_ROW + 3 * DRIVER + 2000
    runner = open_runner({"memory": limit}, backend=device, predicted=predict())
    assert captured_sizes(runner) == [16, 8, 4]
    assert device.captures == 4 + 3
    assert device.taken == 3 * DRIVER
    assert runner.report.graph_bytes == limit - 2000
    budget = budget_of(runner)
    assert [(stop.limit, stop.descriptor.num_tokens) for stop in budget.stops] == [("memory", 2)]
    assert sizes(budget.skipped) == [2, 1]
    check_numbers(runner)
    check_report(runner)


def test_without_predictions_sizes_are_left_out_from_the_top() -> None:
    """The first graph shows what the driver takes for each: sizes 16 and 8 leave too little for the others."""
    device = WithDriver(rate=1000, chunk=1)
    limit = 16 * ROW + 4 * POOL_ROW + 3 * DRIVER + 100
    runner = open_runner({"memory": limit}, backend=device)
    assert captured_sizes(runner) == [4, 2, 1]
    assert device.captures == 5
    assert runner.report.graph_bytes == limit - 100
    budget = budget_of(runner)
    assert [(stop.limit, stop.descriptor.num_tokens) for stop in budget.stops] == [
        ("memory", 16),
        ("memory", 8),
    ]
    assert (
        budget.stops[1].detail
        == "15.9 KiB are used with it, 11.7 KiB expected for the 3 keys after it"
    )
    check_numbers(runner)
    check_report(runner)


def test_without_predictions_a_key_is_expected_to_cost_what_others_did() -> None:
    """So that nothing is captured in vain. In chunks the first graph does not show what the driver will take."""
    device = WithDriver(rate=1000, chunk=3 * DRIVER - 1, total=1 << 20)
    device.nodes = 1  # room in a chunk from before
    device._count(0)
    limit = 16 * ROW + 16 * POOL_ROW + 3 * DRIVER
    runner = open_runner({"memory": limit}, backend=device)
    assert captured_sizes(runner) == [16, 8, 4]
    assert device.captures == 3
    budget = budget_of(runner)
    assert budget.stops[0].detail == "31.7 KiB are used, 11.7 KiB expected for it"


def test_workspaces_count() -> None:
    """Nobody predicted that the first warm-up leaves 6 KiB in the allocator."""
    limit = 16 * ROW + 16 * POOL_ROW + KIB
    free, taken = WithDriver(rate=0), WithDriver(rate=0, workspace=6 * KIB + 16 * ROW)
    assert captured_sizes(open_runner({"memory": limit}, backend=free)) == [16, 8, 4, 2, 1]
    runner = open_runner({"memory": limit}, backend=taken)
    assert runner.report.workspace_bytes == 6 * KIB
    assert captured_sizes(runner) == [8, 4, 2, 1]
    assert runner.report.graph_bytes == 6 * KIB + 16 * ROW + 8 * POOL_ROW


def test_what_others_captured_into_the_pool_does_not_count() -> None:
    device, config = WithDriver(rate=0), config_of({})
    pool = GraphPool(device)
    other = CaptureSession(build_plan(config), Model(), device, config, pool=pool).run()
    limited = config_of({"memory": 16 * ROW + KIB})  # not a byte of it is new
    runner = CaptureSession(build_plan(limited), Model(), device, limited, pool=pool).run()
    assert captured_sizes(runner) == [16, 8, 4, 2, 1]
    budget = budget_of(runner)
    assert budget.used_bytes == 16 * ROW
    assert runner.report.pool_bytes == 16 * POOL_ROW
    other.close()


def test_predictions_leave_the_largest_out_before_the_start() -> None:
    device = WithDriver(rate=1000, chunk=1)
    runner = open_runner(
        {"memory": 8 * ROW + 8 * POOL_ROW + 4 * DRIVER},
        backend=device,
        predicted=predict(driver=DRIVER),
    )
    assert captured_sizes(runner) == [8, 4, 2, 1]
    assert device.captures == 4
    assert runner.report.static_bytes == 8 * ROW
    budget = budget_of(runner)
    assert (sizes(budget.left_out), budget.skipped, budget.stops) == ([16], (), ())
    predicted = runner.plan.predicted
    assert predicted is not None
    assert predicted.total_bytes == runner.report.graph_bytes == budget.memory
    check_numbers(runner)
    check_report(runner)


def test_a_budget_that_pays_for_nothing_leaves_a_runner_without_graphs() -> None:
    backend = TapeBackend()
    before = reserved(backend)
    runner = open_runner(
        {"memory": 100}, backend=backend, compilation={"cudagraph_mode": "FULL_DECODE_ONLY"}
    )
    assert captured_sizes(runner) == []
    assert reserved(backend) == before
    assert (runner.report.graph_bytes, runner.report.static_bytes) == (0, 0)
    assert NO_GRAPH in runner.report.warnings
    text = " ".join(str(runner.report).split())
    assert "budget 0 B of 100 B used" in text
    assert "memory at FULL uniform, 16 tokens: the static buffers take 4.0 KiB" in text
    check_numbers(runner)
    assert set(runner.stats.eager) == {MissReason.OVER_BUDGET, MissReason.TOO_LARGE}
    check_report(runner)


def test_keys_that_a_budget_leaves_out_are_a_warning() -> None:
    for budget, said in (
        ({"max_graphs": 2}, "the budget leaves 3 keys without a graph"),
        ({"max_graphs": 4}, "the budget leaves 1 key without a graph"),
    ):
        assert said in open_runner(budget).report.warnings
    assert "the budget" not in str(open_runner({"memory": "1GiB"}).report.warnings)


def test_a_budget_that_is_known_to_pay_for_nothing_says_so() -> None:
    runner = open_runner({"memory": 100}, predicted=predict())
    assert captured_sizes(runner) == []
    assert NO_GRAPH in runner.report.warnings
    assert "budget 0 B of 100 B used left out 5 keys" in " ".join(str(runner.report).split())
    assert NO_GRAPH not in open_runner({"memory": "1GiB"}).report.warnings
    assert (
        NO_GRAPH
        not in open_runner({"memory": 100}, compilation={"cudagraph_mode": "NONE"}).report.warnings
    )


# --- memory runs out ------------------------------------------------------------------------------------------


def test_without_a_budget_running_out_of_memory_is_an_error() -> None:
    with pytest.raises(CaptureMemoryError, match="out of memory"):
        open_runner({}, backend=LimitedTape(4 * POOL_ROW))


def test_under_a_budget_running_out_of_memory_at_large_sizes_leaves_small_ones() -> None:
    backend = LimitedTape(4 * POOL_ROW)
    runner = open_runner({"memory": "1GiB"}, backend=backend)
    assert captured_sizes(runner) == [4, 2, 1]
    budget = budget_of(runner)
    assert [stop.limit for stop in budget.stops] == ["device memory"] * 2
    check_numbers(runner)
    check_report(runner)


class RunsOut(Model):
    """Memory runs out at one size, in the given calls with it."""

    def __init__(self, rows: int, calls: set[int]) -> None:
        super().__init__()
        self.rows, self.calls, self.seen = rows, calls, count()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == self.rows and next(self.seen) in self.calls:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


@pytest.mark.parametrize(("warm_ups", "call"), [("auto", 0), (1, 0), (1, 1)])
def test_running_out_of_memory_on_the_way_keeps_what_was_captured(warm_ups: Any, call: int) -> None:
    backend = TapeBackend()
    runner = open_runner(
        {"memory": "1GiB"},
        backend=backend,
        model=RunsOut(4, {call}),
        compilation={"cudagraph_num_of_warmups": warm_ups},
    )
    assert captured_sizes(runner) == [16, 8]
    budget = budget_of(runner)
    assert [(stop.limit, stop.descriptor.num_tokens) for stop in budget.stops] == [
        ("device memory", 4)
    ]
    assert "ran out" in str(runner.report)
    check_numbers(runner)
    check_report(runner)


class WithoutInstances(TapeBackend):
    """A driver without memory to instantiate the graph of one capture."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def end(self, graph: Any) -> None:
        self.left -= 1
        if self.left:
            super().end(graph)
            return
        self.abort(graph)
        raise CaptureMemoryError("no memory to instantiate a graph", remedy="Capture fewer sizes.")


@pytest.mark.parametrize("at", [1, 2, 5])
def test_without_memory_to_instantiate_a_graph_all_memory_is_given_back(at: int) -> None:
    backend = WithoutInstances(at)
    before = reserved(backend)
    said = f"capture of FULL size={SIZES[-at]} .*: no memory to instantiate a graph"
    with pytest.raises(CaptureMemoryError, match=said):
        open_runner({}, backend=backend)
    assert reserved(backend) == before
    runner = open_runner({}, backend=backend)
    assert captured_sizes(runner) == [16, 8, 4, 2, 1]
    check_numbers(runner)


@pytest.mark.parametrize(("at", "kept"), [(1, [8, 4, 2, 1]), (3, [16, 8])])
def test_a_budget_keeps_the_graphs_beside_one_that_cannot_be_instantiated(
    at: int, kept: list[int]
) -> None:
    runner = open_runner({"memory": "1GiB"}, backend=WithoutInstances(at))
    assert captured_sizes(runner) == kept
    assert [stop.limit for stop in budget_of(runner).stops] == ["device memory"]
    check_numbers(runner)
    check_report(runner)


class IsBusy(RunsOut):
    """A flag that a run turns off again, unless it fails."""

    is_busy = False

    def forward(self, x: Tensor) -> Tensor:
        assert not self.is_busy
        self.is_busy = True
        found = super().forward(x)
        self.is_busy = False
        return found


@pytest.mark.parametrize(("warm_ups", "call"), [("auto", 0), ("auto", 1), (1, 1)])
def test_other_keys_see_nothing_of_a_run_without_memory(warm_ups: Any, call: int) -> None:
    model = IsBusy(4, {call})
    settings = {"cudagraph_num_of_warmups": warm_ups}
    runner = open_runner({"memory": "1GiB"}, model=model, compilation=settings)
    assert captured_sizes(runner)[:2] == [16, 8]
    assert not model.is_busy
    check_numbers(runner)


def test_a_key_that_memory_refuses_is_tried_once_where_all_keys_warm_up() -> None:
    """The smallest key has told by then that the model keeps something for each size."""
    sizes: dict[int, bool] = {}
    hidden = threading.local()  # which no walk enters
    hidden.calls = 0
    model = Model()

    def forward(x: Tensor) -> Any:
        sizes[len(x)] = True
        if len(x) == 16:
            hidden.calls += 1
            if hidden.calls == 3:  # after a look and a warm-up
                raise torch.OutOfMemoryError("CUDA out of memory")
        return model(x)

    runner = open_runner({"memory": "1GiB"}, model=forward)
    assert captured_sizes(runner) == [8, 4, 2, 1]
    assert [stop.descriptor.num_tokens for stop in budget_of(runner).stops] == [16]
    check_numbers(runner)


class Remembers(Model):
    """Its first run keeps the largest number of its input. Memory runs out after some runs with one size."""

    def __init__(self, *, reads_value: bool, runs: int, rows: int | None = None) -> None:
        super().__init__()
        self.reads_value, self.runs, self.rows = reads_value, runs, rows
        self.kept: Tensor | None = None
        self.seen = threading.local()  # which no walk enters
        self.seen.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            largest = x.amax()
            self.kept = (
                torch.full_like(x[0], float(largest)) if self.reads_value else x[0] * 0 + largest
            )
        if self.rows in (None, len(x)):
            self.seen.runs += 1
            if self.seen.runs > self.runs:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return x + self.kept


@pytest.mark.parametrize("reads_value", [False, True])
@pytest.mark.parametrize("runs", [1, 2])
def test_first_use_that_a_forgotten_look_saw_is_refused(reads_value: bool, runs: int) -> None:
    """Of the largest size, whose look, warm-up or capture then finds no memory."""
    model = Remembers(reads_value=reads_value, runs=runs, rows=16)
    with pytest.raises(CaptureError, match="the forward computes "):
        open_runner({"memory": "1GiB"}, model=model)
    assert model.kept is None


@pytest.mark.parametrize("runs", [1, 2])
def test_where_no_graph_stays_first_use_is_undone(runs: int) -> None:
    model = Remembers(reads_value=True, runs=runs)
    runner = open_runner({"memory": "1GiB"}, model=model)
    assert not captured_sizes(runner)
    model.seen.runs = -10
    x = torch.randn(3, WIDTH)
    same(runner(x=x), x + x.amax())


def test_a_second_failure_keeps_what_was_captured_before_it() -> None:
    """Size 8 is captured, then freed because of size 4; memory runs out when it is captured again."""
    backend, model = TapeBackend(), RunsOut(4, {0})
    again = RunsOut(8, {2})

    def forward(x: Tensor) -> Any:
        return again(x) if len(x) == 8 else model(x)

    runner = open_runner(
        {"memory": "1GiB"},
        backend=backend,
        model=forward,
        compilation={"cudagraph_num_of_warmups": 1},
    )
    assert captured_sizes(runner) == [16]
    assert [stop.descriptor.num_tokens for stop in budget_of(runner).stops] == [4, 8]
    check_numbers(runner)


def test_other_errors_are_errors_under_a_budget_too() -> None:
    backend = TapeBackend()
    before = reserved(backend)

    def model(x: Tensor) -> Tensor:
        return x * x.sum().item() if len(x) < 8 else x * 2

    with pytest.raises(HostSyncError):
        open_runner({"memory": "1GiB"}, backend=backend, model=model)
    gc.collect()
    assert reserved(backend) == before


# --- time -----------------------------------------------------------------------------------------------------


def ticking(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    """A clock for the budget that goes on by ``step`` seconds each time somebody looks."""
    clock = count()
    monkeypatch.setattr(
        "cgplan.captures.captured_keys.time",
        SimpleNamespace(perf_counter=lambda: next(clock) * step),
    )
    monkeypatch.setattr(
        "cgplan.runner.session.time", SimpleNamespace(perf_counter=lambda: next(clock) * step)
    )


def test_predicted_seconds_leave_the_largest_out_before_the_start() -> None:
    runner = open_runner({"capture_time": "35s"}, predicted=predict(10.0))
    assert captured_sizes(runner) == [4, 2, 1]
    check_numbers(runner)
    check_report(runner)


def test_when_time_is_over_the_rest_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Largest first: smaller batches are padded to the smallest size that was captured."""
    ticking(monkeypatch, 10.0)
    runner = open_runner({"capture_time": "35s"})
    assert captured_sizes(runner) == [16, 8, 4]
    budget = budget_of(runner)
    assert [(stop.limit, stop.descriptor.num_tokens) for stop in budget.stops] == [
        ("capture_time", 2)
    ]
    assert re.match(r"\d0\.0 s are used", budget.stops[0].detail)
    ticking(monkeypatch, 20.0)
    short = open_runner({"capture_time": "35s"}).report
    assert len(short.records) == 1
    assert "of 35.0 s used" in " ".join(str(short).split())
    monkeypatch.undo()
    check_numbers(runner)
    check_report(runner)


def test_a_key_that_would_end_too_late_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan was predicted to take 20 s, but other things take time, too."""
    ticking(monkeypatch, 4.0)
    runner = open_runner({"capture_time": "23s"}, predicted=predict(4.0))
    assert captured_sizes(runner) == [16, 8, 4, 2]
    assert "4.00 s expected for it" in budget_of(runner).stops[0].detail


def test_seconds_are_those_of_captures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan predicts is what counts: a plan inside the budget is captured whole, however long buffers take."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("cgplan.captures.captured_keys.time", clock)
    monkeypatch.setattr("cgplan.runner.session.time", clock)

    class Slow(TapeBackend):
        def release_cached(self) -> None:
            now[0] += 100.0
            super().release_cached()

        def begin(self, graph: Any) -> None:
            now[0] += 2.0
            super().begin(graph)

    runner = open_runner({"capture_time": "11s"}, backend=Slow(), predicted=predict(2.0))
    assert captured_sizes(runner) == [16, 8, 4, 2, 1]
    budget = budget_of(runner)
    assert budget.used_seconds == 10.0
    assert "because the last capture took longer" not in str(runner.report)


def test_graphs_that_are_captured_again_outlast_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value for the host fails the third capture, and all start again, with warm-ups."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("cgplan.captures.captured_keys.time", clock)

    class Slow(TapeBackend):
        def begin(self, graph: Any) -> None:
            now[0] += 2.0
            super().begin(graph)

    tuned = cache(lambda _rows: torch.ones(1).max().item())
    runner = open_runner(
        {"capture_time": "5s"},
        backend=Slow(),
        model=lambda x: expected(x) * (tuned(4) if len(x) == 4 else 1),
    )
    assert "needs the host" in str(runner.report.started_again)
    assert captured_sizes(runner) == [16, 8]
    check_numbers(runner)


# --- reserve --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foresees", [True, False])
def test_memory_that_is_reserved_stays_free(foresees: bool) -> None:
    """Of 48 KiB 20 stay free: 28 do not hold 16 of a pool and 4 KB of the driver's for each of five graphs."""
    device = WithDriver(rate=1000, chunk=1, total=48 * KIB)
    runner = open_runner(
        {"reserve": "20KiB"}, backend=device, predicted=None if foresees else predict()
    )
    free = device.memory().free
    assert free is not None
    assert free >= 20 * KIB
    stopped, kept = (16, [8, 4, 2, 1]) if foresees else (2, [16, 8, 4])
    assert captured_sizes(runner) == kept
    budget = budget_of(runner)
    assert [(stop.limit, stop.descriptor.num_tokens) for stop in budget.stops] == [
        ("reserve", stopped)
    ]
    assert (
        "are free, 15.6 KiB expected for the 4 keys after it" in budget.stops[0].detail
    ) is foresees
    check_numbers(runner)
    check_report(runner)


def test_a_reserve_is_kept_by_predictions_before_the_start() -> None:
    device = WithDriver(rate=0, total=40 * KIB)
    runner = open_runner({"reserve": "30KiB"}, backend=device, predicted=predict())
    assert captured_sizes(runner) == [8, 4, 2, 1]
    assert sizes(budget_of(runner).left_out) == [16]
    device = WithDriver(total=40 * KIB)
    runner = open_runner({"reserve": "1GiB"}, backend=device)
    assert (captured_sizes(runner), device.captures) == ([], 0)
    check_numbers(runner)


# --- afterwards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "route"),
    [
        ("FULL_DECODE_ONLY", "ops"),
        ("PIECEWISE", "ops"),
        ("PIECEWISE", "modules"),
        ("FULL_AND_PIECEWISE", "modules"),
    ],
)
def test_every_route_works_with_half_of_the_memory(mode: str, route: str) -> None:
    def changes(budget: dict[str, Any]) -> GraphRunner:
        how = {"piecewise": route, "splitting_modules": ["last"]} if route == "modules" else {
            "piecewise": "ops", "splitting_ops": ["aten::relu"],
        }  # fmt: skip
        return open_runner(budget, compilation={"cudagraph_mode": mode, **how})

    whole = changes({})
    runner = changes({"memory": whole.report.graph_bytes // 2})
    assert 0 < len(runner.plan.keys) < len(whole.plan.keys)
    assert runner.report.graph_bytes <= whole.report.graph_bytes // 2
    for rows in range(1, 20):
        x = torch.randn(rows, WIDTH)
        same(runner(x=x), expected(x))
        same(runner(x=x, uniform_decode=False), expected(x))


def test_a_runner_captures_again_within_its_budget() -> None:
    runner = open_runner({"memory": 16 * ROW + 4 * POOL_ROW})
    runner.recapture()
    assert captured_sizes(runner) == [4, 2, 1]
    check_numbers(runner)


def test_a_miss_can_still_be_an_error() -> None:
    runner = open_runner(
        {"capture_time": "2s"}, compilation={"on_miss": "error"}, predicted=predict(1.0)
    )
    assert captured_sizes(runner) == [2, 1]
    same(runner(x=torch.ones(2, WIDTH)), torch.zeros(2, WIDTH))
    with pytest.raises(
        DispatchMissError, match="3 tokens: the budget has no room for its graph"
    ) as caught:
        runner(x=torch.ones(3, WIDTH))
    assert "Raise the budget" in caught.value.remedy
    with pytest.raises(DispatchMissError, match="17 tokens: larger than the largest capture size"):
        runner(x=torch.ones(17, WIDTH))


@pytest.mark.parametrize("policy", ["eager", "adaptive"])
def test_what_a_budget_dropped_is_counted_as_such(policy: str) -> None:
    runner = open_runner(
        {"capture_time": "2s"}, compilation={"capture_policy": policy}, predicted=predict(1.0)
    )
    runner(x=torch.ones(9, WIDTH))
    assert runner.stats.eager == {MissReason.OVER_BUDGET: 1}


# --- plans with some of their keys ----------------------------------------------------------------------------


def test_what_a_left_out_key_would_have_brought_is_brought_by_the_next_in_proportion() -> None:
    config = config_of({})
    plan = build_plan(config)
    plan = plan.model_copy(update={"predicted": predict(1.0, driver=5, workspace=9)(plan)})
    part = restricted(plan, [key for key in plan.keys if key[1].num_tokens in (1, 4)], config)
    assert part.capture_sizes == (1, 4)
    assert part.predicted is not None
    assert part.predicted.keys == (KeyCost(4 * POOL_ROW, 5, 1.0), KeyCost(0, 5, 1.0))
    assert (part.predicted.static_bytes, part.predicted.workspace_bytes) == (4 * ROW, 9)
    assert Plan.from_json(part.model_dump_json()) == part
    nothing = restricted(plan, [], config)
    assert (nothing.keys, nothing.capture_sizes) == ((), ())
    assert nothing.predicted is not None
    assert nothing.predicted.total_bytes == 0
    assert restricted(plan, plan.keys, config) is plan
    plan = plan.model_copy(update={"predicted": predict(row=1 << 20)(plan)})
    part = restricted(plan, [key for key in plan.keys if key[1].num_tokens <= 1], config)
    assert part.predicted is not None
    assert part.predicted.keys[0].pool_bytes == 2 << 20, "segments stay whole"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6), st.integers(0, 60 * KIB), st.floats(0.001, 60), st.integers(0, 60 * KIB))
def test_what_is_left_is_predicted_to_fit(
    graphs: int, memory: int, seconds: float, free: int
) -> None:
    budget = {
        "max_graphs": graphs + 1,
        "memory": memory + 1,
        "capture_time": seconds,
        "reserve": 10 * KIB,
    }
    config = config_of(budget)
    plan = build_plan(config)
    plan = plan.model_copy(update={"predicted": predict(7.0, driver=1000)(plan)})
    part = fitting(plan, config, free)
    left_out = [key for key in plan.keys if key not in part.keys]
    assert part.predicted is not None
    cost = part.predicted
    assert len(part.keys) <= graphs + 1
    assert not part.keys or (cost.total_bytes <= memory + 1 and cost.seconds <= seconds)
    assert not part.keys or free - cost.total_bytes >= 10 * KIB
    assert [*part.keys] == [key for key in plan.keys if key not in left_out]
    largest_first = not left_out or not part.keys or min(sizes(left_out)) > max(sizes(part.keys))
    assert largest_first or len(part.keys) == graphs + 1


def test_memory_goes_before_the_number_of_graphs() -> None:
    """Of the sizes that memory pays for, not of all, as many stay as may: 8 is too large, and 4 takes its place."""
    config = config_of({"max_graphs": 2, "memory": 4 * (ROW + POOL_ROW) + DRIVER})
    plan = build_plan(config)
    plan = plan.model_copy(update={"predicted": predict()(plan)})
    assert sizes(fitting(plan, config, None).keys) == [4, 2]


# --- what the report shows ------------------------------------------------------------------------------------


def test_the_report_sets_predicted_beside_measured() -> None:
    device = WithDriver(rate=1000, chunk=1)
    runner = open_runner({}, backend=device, predicted=predict(0.5, driver=5000))
    text = str(runner.report)
    assert "a guess, an estimate" in text
    assert "pool            16.0 KiB predicted, 16.0 KiB measured: +0.0%" in text
    assert "driver          24.4 KiB predicted, 19.5 KiB measured: +25.0%" in text
    assert "memory          44.4 KiB predicted, 39.5 KiB measured: +12.4%" in text
    assert "time            2.50 s predicted" in text


def test_the_prediction_says_which_keys_it_leaves_out() -> None:
    """Size 16 is known not to fit, 4 is seen not to."""
    device = WithDriver(rate=1000, chunk=1)
    limit = 8 * ROW + 8 * POOL_ROW + DRIVER + 2000
    runner = open_runner({"memory": limit}, backend=device, predicted=predict())
    budget = budget_of(runner)
    assert (sizes(budget.left_out), sizes(budget.skipped)) == ([16], [4, 2, 1])
    part = " ".join(str(runner.report).partition("Prediction")[2].partition("Totals")[0].split())
    assert (
        "note 4 keys (FULL: 1, 2, 4, 16) over the budget: not captured, and neither predicted nor measured"
        in part
    )
    assert "failed" not in part
    whole = str(open_runner({"memory": "1GiB"}, predicted=predict()).report)
    assert "neither predicted nor measured" not in whole


def test_the_prediction_says_which_keys_failed_or_wait() -> None:
    def asking(x: Tensor) -> Tensor:
        return x * x.sum().item() if x.shape[0] == 4 else x * 2

    lazy = {"compilation": {"capture_policy": "lazy"}, "model": asking, "predicted": predict()}
    runner = open_runner({"max_graphs": 2}, **lazy)
    for rows in (8, 3, 2, 1):
        runner(x=torch.ones(rows, WIDTH))
    part = " ".join(str(runner.report).partition("Prediction")[2].partition("Totals")[0].split())
    assert "note 1 key (FULL: 4) failed: not captured" in part
    assert "note 1 key (FULL: 1) over the budget: not captured" in part
    assert "note 1 key waiting for a batch" in part
    runner.close()


def test_graphs_that_served_stay_if_a_slow_key_is_given_up() -> None:
    def asking(x: Tensor) -> Tensor:
        if x.shape[0] == 16:
            time.sleep(0.7)
            return x * x.sum().item()
        return x * 2

    lazy = {"compilation": {"capture_policy": "lazy"}, "model": asking}
    runner = open_runner({"capture_time": 1.3}, **lazy)
    for rows in (1, 4, 16):
        runner(x=torch.ones(rows, WIDTH))
    assert sizes(runner.plan.keys) == [4, 1]
    assert [failed.descriptor.num_tokens for failed in runner.report.failed] == [16]
    runner.close()


def test_a_tape_has_no_driver_to_compare() -> None:
    text = str(open_runner({}, predicted=predict(driver=4000, workspace=1 << 20)).report)
    part = text[text.index("Prediction") : text.index("Totals")]
    assert "driver" not in part
    assert "workspaces" not in part
    assert "memory          20.0 KiB predicted, 20.0 KiB measured: +0.0%" in part


def test_a_long_list_of_stops_is_cut_short() -> None:
    text = str(open_runner({"memory": 16 * ROW + POOL_ROW}).report)
    assert text.count("stopped by") == 3
    assert "and at 1 more keys" in text
    assert "not captured  4 keys (FULL: 2, 4, 8, 16): padded to other sizes, or run eagerly" in text


@pytest.mark.gpu
def test_half_of_the_memory_is_enough_for_half_of_the_graphs_on_a_gpu() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, 4096), nn.ReLU(), nn.Linear(4096, WIDTH)).cuda().eval()

    def model(x: torch.Tensor) -> torch.Tensor:
        return layers(x)

    backend, ladder = (
        select_backend("cuda"),
        {"cudagraph_capture_sizes": [512 * n for n in range(1, 17)]},
    )
    whole = open_runner(
        {}, backend=backend, model=model, compilation=ladder, scheduler={"max_num_seqs": 8192}
    )
    limit = whole.report.graph_bytes // 2
    whole.close()
    runner = open_runner(
        {"memory": limit},
        backend=backend,
        model=model,
        compilation=ladder,
        scheduler={"max_num_seqs": 8192},
    )
    assert runner.plan.keys
    assert runner.report.graph_bytes <= limit
    for rows in (1, 500, 3000, 8000):
        x = torch.randn(rows, WIDTH, device="cuda")
        same(runner(x=x), runner.run_eagerly(x=x))
