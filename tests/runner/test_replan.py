"""Graphs on demand: captured when a batch first asks for them, and exchanged for what traffic wants."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from checks import MIB, Tally, back_at, reserved, same
from decoding import (
    MAX_BLOCKS,
    VOCAB,
    Chunk,
    batch_of,
    configure,
    decoder,
    logits_of,
    one_thread,
    prompts,
)
from devices import LimitedTape, Unowned, Watching, WithDriver

from cgplan.backends import GraphBackend
from cgplan.backends.tape import TapeBackend
from cgplan.captures.captured_keys import NO_GRAPH
from cgplan.cli.plan import costs_of
from cgplan.config import Config, Input, LoadedConfig, validate_config
from cgplan.errors import (
    AddressError,
    BudgetError,
    CaptureMemoryError,
    CgplanError,
    DispatchMissError,
    InputError,
    StepTimeError,
    TrafficError,
)
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.optimizer.propose import PlanInputs, plan_graphs
from cgplan.planning import MissReason, build_plan
from cgplan.reports import CaptureReport
from cgplan.reports.records import FailedKey, ReplanReport, uncapturable
from cgplan.runner.runner import GraphRunner
from cgplan.runner.session import CaptureSession
from cgplan.traffic.histogram import StepShape as Batch
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes

pytestmark = pytest.mark.usefixtures("quiet_collector")
NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
WIDTH = 512
# Graphs take a tenth of eager steps, and each row counts: every size that is asked for deserves a graph.
TIMES = StepTimes.measured(
    {
        (NONE, 0): {1: 1000, 512: 3000, 8192: 33_000},
        (PIECEWISE, 0): {1: 200, 512: 1600, 8192: 22_600},
        (FULL, 0): {1: 100, 512: 1500, 8192: 22_500},
    },
    "made up",
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


class Net(torch.nn.Module):
    """Two layers. ``asks`` are numbers of rows for which it needs the host, which no graph can have."""

    def __init__(self, backend: GraphBackend) -> None:
        super().__init__()
        with torch.device(backend.device):
            self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False)
        self.asks: set[int] = set()
        self.runs = Tally()

    @property
    def calls(self) -> int:
        return len(self.runs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.append(None)
        if len(x) in self.asks:
            x = x * float(x.sum().item() != 0.125)
        return self.second(self.first(x).relu())


def config_of(
    backend: GraphBackend, policy: str, sizes: Any = (2, 4, 16), budget: Any = None, **changes: Any
) -> Config:
    return validate_config(
        {
            "inputs": {"x": Input(shape=("num_tokens", WIDTH), dtype="float32", pad=0)},
            "compilation": {
                "cudagraph_capture_sizes": list(sizes),
                "capture_policy": policy,
                **changes,
            },
            "budget": budget or {},
            "device": backend.device.type,
        }
    )


def open_runner(
    backend: GraphBackend, policy: str, model: Any = None, **options: Any
) -> GraphRunner:
    config = config_of(backend, policy, **options)
    return CaptureSession(build_plan(config), model or Net(backend), backend, config).run()


def rows(backend: GraphBackend, count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, device=backend.device)


def sizes_of(runner: GraphRunner) -> list[int]:
    return list(runner.plan.capture_sizes)


def equals_eager(runner: GraphRunner, **batch: torch.Tensor) -> torch.Tensor:
    """Run a batch, and compare it bit for bit with the model's own code, padded alike."""
    found = runner(**batch).clone()
    same(found, runner.run_eagerly(**batch))
    return found


# --- lazy -----------------------------------------------------------------------------------------------------


def test_each_key_is_captured_when_first_met(backend: GraphBackend) -> None:
    model = Net(backend)
    runner = open_runner(backend, "lazy", model)
    assert model.calls == 0, "nothing runs before the first batch"
    assert sizes_of(runner) == []
    assert list(runner.reachable.capture_sizes) == [2, 4, 16]
    assert runner.report.waiting == 3
    for count, sizes in ((3, [4]), (4, [4]), (9, [4, 16]), (1, [2, 4, 16]), (16, [2, 4, 16])):
        x = rows(backend, count)
        found = equals_eager(runner, x=x)
        torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)
        assert sizes_of(runner) == sizes, f"at most one for a batch of {count}"
    assert runner.stats.captures == 3
    assert not runner.stats.eager
    calls = model.calls
    runner(x=rows(backend, 3))
    assert model.calls == calls, "a replay runs no code of the model"
    assert [record.descriptor.num_tokens for record in runner.report.records] == [16, 4, 2]
    assert runner.report.waiting == 0
    runner(x=rows(backend, 17))
    assert runner.stats.eager == {MissReason.TOO_LARGE: 1}
    runner.close()


def test_evicted_keys_are_captured_again_on_demand(backend: GraphBackend) -> None:
    model = Net(backend)
    runner = open_runner(backend, "lazy", model)
    for count in (3, 9):
        runner(x=rows(backend, count))
    largest = runner.plan.keys[:1]
    runner.exchange(evicted=largest)
    assert sizes_of(runner) == [4]
    assert (runner.stats.captures, runner.stats.evictions) == (2, 1)
    for count in (9, 3):
        x = rows(backend, count)
        torch.testing.assert_close(equals_eager(runner, x=x), model(x), rtol=1e-4, atol=1e-5)
    assert sizes_of(runner) == [4, 16]
    assert runner.stats.captures == 3
    runner.exchange(runner.reachable.keys, evicted=largest)
    assert sizes_of(runner) == [2, 4, 16]
    assert not runner.report.waiting
    runner.close()


def test_a_capture_leaves_memory_as_a_session_does(backend: GraphBackend) -> None:
    model = Net(backend)
    eager = open_runner(backend, "eager", model)
    before = reserved(backend)
    eager.close()
    after_close = reserved(backend)
    lazy = open_runner(backend, "lazy", model)
    for count in (16, 4, 2):  # as a session captures
        lazy(x=rows(backend, count))
    assert lazy.report.pool_bytes == eager.report.pool_bytes
    assert lazy.report.static_bytes == eager.report.static_bytes
    assert abs(reserved(backend) - before) <= 2 * MIB * (backend.device.type == "cuda")
    lazy.close()
    assert back_at(backend, after_close)


def test_live_requests_are_not_touched(backend: GraphBackend) -> None:
    """Decode steps of requests that come and go, each new size captured in the middle of them."""
    model, alone = decoder(backend), decoder(backend)
    alone.load_state_dict(model.state_dict())
    config = configure(
        backend,
        compilation={
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
            "capture_policy": "lazy",
        },
    )
    runner = CaptureSession(build_plan(config), model, backend, config).run()
    given, choose = prompts(3, [5, 9, 3, 7]), random.Random(0)
    lengths, blocks = [0] * 4, [list(range(8 * i, 8 * i + MAX_BLOCKS)) for i in range(4)]
    steps = [[0], [0, 1], [0, 1], [1, 2], [0, 1, 2, 3], [3], [0, 1, 2]]
    for step in steps:
        chunks = []
        for i in step:
            tokens = given[i] if not lengths[i] else [choose.randrange(VOCAB)]
            chunks.append(Chunk(tokens, lengths[i], blocks[i]))
        found = runner(**batch_of(chunks, backend.device)).clone()
        torch.testing.assert_close(found, logits_of(alone, chunks), rtol=1e-9, atol=1e-9)
        for i, chunk in zip(step, chunks, strict=True):
            lengths[i] += len(chunk.tokens)
    assert {mode for mode, _ in runner.plan.keys} == {PIECEWISE, FULL}
    assert runner.stats.captures == len(runner.plan.keys) >= 5
    assert not runner.stats.eager
    runner.close()


def test_rows_and_outputs_of_the_caller_survive_a_capture(backend: GraphBackend) -> None:
    """Rows in the static buffers; and an output that is the next input, which lies in the pool of the next capture."""
    model = Net(backend)
    runner = open_runner(backend, "lazy", model)
    for count in (3, 2, 16):
        x, view = rows(backend, count), runner.input_views(count)["x"]
        view.copy_(x)
        torch.testing.assert_close(runner(x=view).clone(), model(x), rtol=1e-4, atol=1e-5)
        same(view, x)
    assert runner.stats.captures == 3
    runner.recapture()
    runner.close()
    runner = open_runner(backend, "lazy", model)
    wanted = model(model(model(x)[:4])[:2])
    found = runner(x=runner(x=runner(x=x)[:4])[:2])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert runner.stats.captures == 3
    runner.close()


def test_a_staged_batch_is_captured_before_it_is_written(backend: GraphBackend) -> None:
    model, runner = Net(backend), None
    runner = open_runner(backend, "lazy", model)
    for count in (3, 9):
        x = rows(backend, count)
        with runner.stage(num_tokens=count) as buffers:
            buffers["x"].copy_(x)
        torch.testing.assert_close(buffers.output.clone(), model(x), rtol=1e-4, atol=1e-5)
    assert sizes_of(runner) == [4, 16]
    first = runner.stage(num_tokens=9)
    with first as buffers:
        second = runner.stage(
            num_tokens=1
        )  # inside a block nothing is captured: its rows are being written
        assert sizes_of(runner) == [4, 16]
        buffers["x"].copy_(x)
    torch.testing.assert_close(first.output.clone(), model(x), rtol=1e-4, atol=1e-5)
    with second as buffers:
        buffers["x"].copy_(x[:1])
    torch.testing.assert_close(second.output.clone(), model(x[:1]), rtol=1e-4, atol=1e-5)
    assert runner.stage(num_tokens=1) is not second, "what ran by a larger graph is looked at again"
    assert sizes_of(runner) == [2, 4, 16]
    with pytest.raises(CgplanError, match="staged for are gone"), second:
        pass
    with pytest.raises(InputError, match="hold 1 to 16 tokens"):
        runner.stage(num_tokens=17)
    runner.close()


def test_padding_is_padding_after_a_capture(backend: GraphBackend) -> None:
    """A larger batch before, then a capture, then a smaller batch: its padding rows must not hold the larger one's."""

    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum(0, keepdim=True).expand(x.shape)

    runner = open_runner(backend, "lazy", total)
    for count in (16, 3, 16, 2, 1, 15, 4):
        x = rows(backend, count)
        torch.testing.assert_close(runner(x=x), total(x), rtol=1e-4, atol=1e-4)
    runner.close()


def test_nothing_is_captured_where_it_is_forbidden(backend: GraphBackend) -> None:
    model = Net(backend)
    runner = open_runner(backend, "lazy", model)
    x, many = rows(backend, 3), rows(backend, 12)
    with runner.no_capture():
        torch.testing.assert_close(runner(x=x), model(x))
        with runner.no_capture():
            pass
        torch.testing.assert_close(runner(x=x), model(x))
    assert runner.stats.eager == {MissReason.NOT_CAPTURED_YET: 2}
    equals_eager(runner, x=many)
    with runner.no_capture():
        found = runner(x=x).clone()  # a larger graph serves it
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)
    assert sizes_of(runner) == [16]
    equals_eager(runner, x=x)
    assert sizes_of(runner) == [4, 16]
    assert sum(runner.stats.eager.values()) == 2
    runner.close()


def test_on_miss_error_says_why() -> None:
    backend, model = TapeBackend(), Net(TapeBackend())
    model.asks = {4}
    runner = open_runner(backend, "lazy", model, on_miss="error", budget={"max_graphs": 1})
    with (
        runner.no_capture(),
        pytest.raises(DispatchMissError, match="its graph is not captured yet") as caught,
    ):
        runner(x=rows(backend, 2))
    assert "no_capture" in caught.value.remedy
    with pytest.raises(DispatchMissError, match="its graph could not be captured") as caught:
        runner(x=rows(backend, 3))
    assert "retry_failed" in caught.value.remedy
    equals_eager(runner, x=rows(backend, 2))
    with pytest.raises(DispatchMissError, match="the budget has no room for its graph"):
        runner(x=rows(backend, 9))
    with pytest.raises(DispatchMissError, match="larger than the largest capture size"):
        runner(x=rows(backend, 17))
    runner.close()


def test_a_key_that_fails_is_remembered_and_leaves_the_others_alone(backend: GraphBackend) -> None:
    model = Net(backend)
    runner = open_runner(backend, "lazy", model)
    equals_eager(runner, x=rows(backend, 2))
    pool, before = runner.report.pool_bytes, reserved(backend)
    model.asks = {4}
    x = rows(backend, 4)
    torch.testing.assert_close(runner(x=x), model(x))
    [failed] = runner.report.failed
    assert (failed.mode, failed.descriptor.num_tokens, failed.error) == (FULL, 4, "HostSyncError")
    assert "test_replan.py" in failed.detail
    assert runner.stats.failures == 1
    assert runner.report.pool_bytes == pool
    assert reserved(backend) <= before + 2 * MIB * (backend.device.type == "cuda")
    calls = model.calls
    runner(x=x)
    assert model.calls == calls + 1, "run eagerly, and not tried again"
    assert runner.stats.failures == 1
    assert runner.stats.eager == {MissReason.CAPTURE_FAILED: 2}
    equals_eager(runner, x=rows(backend, 1))
    equals_eager(runner, x=rows(backend, 9))
    assert sizes_of(runner) == [2, 16]
    found = runner(x=x).clone()  # now a larger graph serves it
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)
    assert sum(runner.stats.eager.values()) == 2
    assert "HostSyncError" in str(runner.report)
    assert 'cgplan_capture_failures_total{runner="runner"} 1.0' in runner.stats.prometheus()
    assert CaptureReport.model_validate_json(runner.report.model_dump_json()) == runner.report
    model.asks = set()
    runner.retry_failed()
    equals_eager(runner, x=x)
    assert sizes_of(runner) == [2, 4, 16]
    assert runner.report.failed == ()
    runner.close()


def test_a_piecewise_key_that_fails_half_way_leaves_nothing(backend: GraphBackend) -> None:
    """Its first segments are captured when the third one fails."""

    class Broken(torch.nn.Module):
        bad = False

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Net(backend) for _ in range(3))
            self.mix = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, (layer, mix) in enumerate(zip(self.layers, self.mix, strict=True)):
                x = mix(layer(x))
                if self.bad and number == 1 and len(x) == 4:
                    x = x * float(x.sum().item() != 0.125)
            return x

    model = Broken()
    options: Any = {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["mix.*"]}
    runner = open_runner(backend, "lazy", model, **options)
    equals_eager(runner, x=rows(backend, 2))
    pool = runner.report.pool_bytes
    model.bad = True
    x = rows(backend, 3)
    torch.testing.assert_close(runner(x=x), model(x), rtol=1e-4, atol=1e-5)
    assert [failed.descriptor.num_tokens for failed in runner.report.failed] == [4]
    assert runner.report.pool_bytes == pool
    equals_eager(runner, x=rows(backend, 2))
    model.bad = False
    runner.retry_failed()
    equals_eager(runner, x=x)
    assert sizes_of(runner) == [2, 4]
    runner.close()
    assert runner.backend.pool_bytes() == 0


@pytest.mark.parametrize(
    ("limit", "budget"),
    [("max_graphs", {"max_graphs": 1}), ("capture_time", {"capture_time": 1e-9}), ("device", {})],
)
def test_limits_cost_single_keys(limit: str, budget: dict[str, Any]) -> None:
    backend = LimitedTape(5 * 4 * WIDTH * 4 if limit == "device" else None)
    model = Net(backend)
    runner = open_runner(backend, "lazy", model, budget=budget)
    if limit != "capture_time":
        equals_eager(runner, x=rows(backend, 4))
    x = rows(backend, 16)
    for _ in range(2):
        torch.testing.assert_close(runner(x=x), model(x))
    [failed] = runner.report.failed
    assert failed.error == (CaptureMemoryError if limit == "device" else BudgetError).__name__
    assert "was freed" not in failed.detail
    assert sizes_of(runner) == ([] if limit == "capture_time" else [4])
    if limit != "device":
        assert runner.stats.eager == {MissReason.OVER_BUDGET: 2}
        assert runner.report.budget is not None
        assert [stop.limit for stop in runner.report.budget.stops] == [limit]
    equals_eager(runner, x=rows(backend, 3))
    runner.close()


def test_seconds_between_captures_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Slow(TapeBackend):
        def begin(self, graph: Any) -> None:
            now[0] += 60.0
            super().begin(graph)

    monkeypatch.setattr("cgplan.captures.captured_keys.time.perf_counter", lambda: now[0])
    backend = Slow()
    runner = open_runner(backend, "lazy", budget={"capture_time": 100})
    now[0] = 5000.0
    equals_eager(runner, x=rows(backend, 3))
    assert sizes_of(runner) == [4]
    now[0] = 9000.0
    runner(x=rows(backend, 9))
    assert sizes_of(runner) == [4], "60 s are used, and as many expected"
    assert runner.report.budget is not None
    assert runner.report.budget.used_seconds == 60
    runner.close()


def test_a_budget_of_memory_holds_and_gives_back() -> None:
    """A key that turns out too large is freed, and so is what the pool grew by."""
    row = WIDTH * 4
    backend, model = WithDriver(rate=0), None
    limit = 16 * row + 5 * 4 * row
    runner = open_runner(backend, "lazy", model, budget={"memory": limit})
    equals_eager(runner, x=rows(backend, 3))
    pool = runner.report.pool_bytes
    x = rows(backend, 16)
    runner(x=x)
    assert sizes_of(runner) == [4]
    assert runner.report.pool_bytes == pool
    assert runner.report.graph_bytes <= limit
    assert runner.stats.eager == {MissReason.OVER_BUDGET: 1}
    equals_eager(runner, x=rows(backend, 3))
    equals_eager(runner, x=rows(backend, 1))
    assert sizes_of(runner) == [2, 4]
    runner.close()
    assert backend.memory().reserved == 0


def test_recapture_and_moved_memory(backend: GraphBackend) -> None:
    model = Net(backend)
    runner = open_runner(backend, "lazy", model, address_check="always")
    x = rows(backend, 3)
    before = equals_eager(runner, x=x)
    with torch.no_grad():
        model.first.weight.data = -model.first.weight.data
    for count in (9, 3):
        with pytest.raises(AddressError, match=r"first\.weight") as caught:
            runner(x=rows(backend, count))
    assert "runner.recapture()" in caught.value.remedy
    assert sizes_of(runner) == [4], "a capture would bless what has moved"
    runner.recapture()
    assert sizes_of(runner) == [4]
    after = equals_eager(runner, x=x)
    assert not torch.allclose(before, after)
    runner.invalidate("kv_cache")
    with pytest.raises(AddressError, match="kv_cache"):
        runner(x=rows(backend, 9))
    runner.recapture()
    equals_eager(runner, x=rows(backend, 9))
    assert sizes_of(runner) == [4, 16]
    runner.close()
    with pytest.raises(CgplanError, match="closed"):
        runner(x=x)


def test_autocast_at_a_capture_is_refused_and_captures_nothing(backend: GraphBackend) -> None:
    runner = open_runner(backend, "lazy")
    x = rows(backend, 3)
    with (
        torch.autocast(backend.device.type, torch.bfloat16),
        pytest.raises(CgplanError, match="autocast"),
    ):
        runner(x=x)
    assert sizes_of(runner) == []
    assert not runner.report.failed
    with torch.inference_mode():
        equals_eager(runner, x=x)
    equals_eager(runner, x=x.requires_grad_())
    runner.close()


# --- adaptive -------------------------------------------------------------------------------------------------


def ask(runner: GraphRunner, backend: GraphBackend, *counts: int) -> None:
    for count in counts:
        equals_eager(runner, x=rows(backend, count))


def traffic_of(*counts: int) -> Traffic:
    """One batch of each size."""
    return Traffic.of([(Batch(count, count, True, 0), 1) for count in counts], "given")


def test_a_replan_reads_the_file_of_step_times_and_refuses_that_of_traffic(
    backend: GraphBackend, tmp_path: Path
) -> None:
    path = tmp_path / "times.csv"
    table = ["mode,num_tokens,microseconds", "eager,1,1000", "eager,8192,33000"]
    path.write_text("\n".join([*table, "FULL,1,100", "FULL,8192,22500"]))
    runner = open_runner(backend, "adaptive", Net(backend), sizes=(8,))
    given = traffic_of(5, 60)
    read = runner.replan(traffic=given, times=str(path), apply=False)
    known = runner.replan(traffic=given, times=StepTimes.load(path), apply=False)
    assert read.difference == known.difference
    assert read.difference.lanes[0].added
    wrong: Any = str(path)
    with pytest.raises(TrafficError, match="traffic is a str") as caught:
        runner.replan(traffic=wrong, times=TIMES)
    assert "runner.stats.traffic()" in caught.value.remedy
    with pytest.raises(StepTimeError, match=r"missing\.csv"):
        runner.replan(traffic=given, times=tmp_path / "missing.csv")


def test_a_replan_captures_what_traffic_wants_and_evicts_the_rest(backend: GraphBackend) -> None:
    model = Net(backend)
    runner = open_runner(backend, "adaptive", model, sizes=(8, 64), budget={"max_graphs": 2})
    ask(runner, backend, *[5] * 6, *[60] * 4, 8)
    report = runner.replan(times=TIMES)
    assert [d.num_tokens for _, d in report.captured] == [60]
    assert sizes_of(runner) == [8, 60]
    predicted = runner.plan.predicted
    assert predicted is not None
    assert predicted.static_bytes == runner.report.static_bytes == 64 * WIDTH * 4, (
        "the buffers of before are kept"
    )
    assert "sizes     2 (8, 60), planned for runner.stats" in str(runner.report)
    assert [d.num_tokens for _, d in report.evicted] == [64]
    ask(runner, backend, *[20] * 20, *[33] * 20)
    report = runner.replan(times=TIMES)
    assert sizes_of(runner) == [20, 33]
    assert (runner.stats.captures, runner.stats.evictions) == (5, 3)
    assert [record.descriptor.num_tokens for record in runner.report.records] == [33, 20]
    ask(runner, backend, 5, 20, 33)
    assert not runner.stats.eager
    runner(x=rows(backend, 60))
    assert runner.stats.eager == {MissReason.TOO_LARGE: 1}, (
        "dispatch follows the keys that are there"
    )
    text = str(report)
    for words in ("captured -> wanted", "20, 33", "8, 60", "2 captured, 2 evicted"):
        assert words in text
    assert ReplanReport.model_validate_json(report.model_dump_json()) == report
    runner.close()


def test_only_what_was_asked_since_the_last_replan_counts() -> None:
    backend = TapeBackend()
    runner = open_runner(
        backend, "adaptive", sizes=(64,), budget={"max_graphs": 1, "memory": 32 * WIDTH * 4}
    )
    assert NO_GRAPH in runner.report.warnings
    ask(runner, backend, 2)
    runner.replan(times=TIMES)
    assert runner.plan.keys
    assert NO_GRAPH not in runner.report.warnings
    runner.close()
    runner = open_runner(backend, "adaptive", sizes=(64,), budget={"max_graphs": 1})
    with pytest.raises(TrafficError):
        runner.replan(times=TIMES)
    ask(runner, backend, *[10] * 100)
    proposed = runner.replan(times=TIMES, apply=False)
    assert proposed.way == "proposed"
    assert proposed.difference.lanes[0].added == (10,)
    assert sizes_of(runner) == [64]
    runner.replan(times=TIMES)
    assert sizes_of(runner) == [10]
    ask(runner, backend, 7, 7)
    runner.replan(times=TIMES)
    assert sizes_of(runner) == [7]
    with pytest.raises(TrafficError):
        runner.replan(times=TIMES)
    runner.stats.reset()
    ask(runner, backend, 3)
    runner.replan(times=TIMES)
    assert sizes_of(runner) == [3]
    given = traffic_of(50)
    runner.replan(times=TIMES, traffic=given)
    assert sizes_of(runner) == [50]
    ask(runner, backend, 50, 3)
    runner.close()
    assert backend.memory().reserved == 0


def test_replans_with_adapters_and_pieces_equal_a_fresh_runner(backend: GraphBackend) -> None:
    model = decoder(backend, num_layers=1, max_loras=2, lora_rank=4)
    compilation = {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": [2, 4, 16],
        "capture_policy": "adaptive",
    }
    config = configure(backend, max_loras=2, compilation=compilation)
    runner = CaptureSession(build_plan(config), model, backend, config).run()
    points = {
        (mode, case): {1: t, 64: 10 * t}
        for mode, t in ((NONE, 900), (PIECEWISE, 200), (FULL, 90))
        for case in (0, 3)
    }
    times = StepTimes.measured(points, "made up")

    def batch(lengths: list[int], ids: list[int]) -> dict[str, Any]:
        chunks = [
            Chunk([n % VOCAB] * n, 0, [4 * i, 4 * i + 1, 4 * i + 2]) for i, n in enumerate(lengths)
        ]
        made = batch_of(chunks, backend.device)
        lora = [i for i, n in zip(ids, lengths, strict=True) for _ in range(n)]
        lora_ids = torch.tensor(lora, device=backend.device)
        return {**made, "lora_ids": lora_ids, "num_active_loras": len({i for i in ids if i >= 0})}

    rounds = [
        [([1, 1, 1], [-1, -1, -1]), ([1, 1], [0, -1]), ([5, 3], [1, 0])],
        [([1, 1, 1, 1], [0, 1, 0, -1]), ([3, 3], [0, 0]), ([2, 4, 6, 8], [-1, -1, -1, -1])],
    ]
    for seen in rounds:
        for lengths, ids in seen:
            equals_eager(runner, **batch(lengths, ids))
        report = runner.replan(times=times)
        assert report.captured
        assert not report.failed
        eager = sum(runner.stats.eager.values())
        fresh = CaptureSession(runner.plan, model, runner.backend, runner.config).run()
        for lengths, ids in seen:
            made = batch(lengths, ids)
            same(runner(**made).clone(), fresh(**made))
        fresh.close()
        assert sum(runner.stats.eager.values()) == eager
    assert {mode for mode, _ in runner.plan.keys} == {PIECEWISE, FULL}
    assert runner.stats.evictions > 0
    runner.close()


def test_a_replan_may_take_sizes_above_those_that_were_timed(backend: GraphBackend) -> None:
    """It captures them, and times them from then on."""
    runner = open_runner(backend, "adaptive", sizes=(4,))
    points = {(NONE, 0): {1: 1000, 4: 1000}, (FULL, 0): {1: 100, 4: 100}}
    runner.replan(times=StepTimes.measured(points, "by hand"), traffic=traffic_of(16))
    assert sizes_of(runner) == [16]


def test_a_new_generation_begins_where_it_takes_less(backend: GraphBackend) -> None:
    """Graphs are exchanged inside the pool while the new ones fit; all are captured again where they are larger, or
    much smaller.
    """
    runner = open_runner(backend, "adaptive", sizes=(4096,))
    most = runner.report.pool_bytes
    report = runner.replan(times=TIMES, traffic=traffic_of(4096, 2048))
    assert (report.way, runner.report.generation, runner.report.pool_bytes) == (
        "exchanged",
        1,
        most,
    )
    report = runner.replan(times=TIMES, traffic=traffic_of(64))
    assert (report.way, runner.report.generation) == ("new generation", 2)
    assert runner.report.pool_bytes < most / 4
    report = runner.replan(times=TIMES, traffic=traffic_of(3000, 64))
    assert (report.way, report.recaptured) == ("new generation", 1)
    assert [d.num_tokens for _, d in report.captured] == [3000]
    if (
        backend.device.type == "cuda"
    ):  # either size fills one segment of 20 MiB; 64 rows lie in one of 2 MiB beside it
        assert runner.report.pool_bytes == most + 2 * MIB
    else:
        assert runner.report.pool_bytes < most
    report = runner.replan(times=TIMES, traffic=traffic_of(5000, 3000))
    assert report.way == "new buffers"
    ask(runner, backend, 5000, 64, 1)
    runner.close()


def test_moved_memory_is_refused_by_a_replan_without_graphs(backend: GraphBackend) -> None:
    runner = open_runner(backend, "adaptive", sizes=(4,))
    ask(runner, backend, *[4] * 3)
    nothing = StepTimes.measured(
        {(CUDAGraphMode.NONE, 0): {1: 1.0, 64: 1.0}, (FULL, 0): {1: 9.0, 64: 9.0}}, "given"
    )
    proposed = runner.replan(times=nothing, apply=False)
    wanted = "no graph saves time for this traffic: eager steps take no longer"
    assert proposed.verdict == wanted
    text = str(runner.replan(times=nothing))
    assert re.search(rf"\n +verdict +{wanted}\n", text)
    assert "all given up with their pools, and none captured" in text
    assert "0 captured, 1 evicted" in text
    assert sizes_of(runner) == []
    runner.invalidate("kv")
    ask(runner, backend, *[4] * 3)
    with pytest.raises(AddressError, match="'kv' moved"):
        runner.replan(times=TIMES)
    runner.close()


def test_memory_goes_back_down(backend: GraphBackend) -> None:
    model = Net(backend)
    open_runner(backend, "eager", model, sizes=(64,)).close()  # what libraries keep
    start = reserved(backend)
    runner = open_runner(backend, "adaptive", model, sizes=(64, 4096), address_check="off")
    large = reserved(backend)
    for _ in range(3):
        runner.replan(times=TIMES, traffic=traffic_of(64))
        assert reserved(backend) < large - 4096 * WIDTH * 4
        runner.replan(times=TIMES, traffic=traffic_of(64, 4096))
        assert reserved(backend) <= large + 2 * MIB * (backend.device.type == "cuda")
    ask(runner, backend, 64, 4096)
    runner.close()
    assert back_at(backend, start)


def test_outputs_that_were_handed_out_outlive_their_graphs(backend: GraphBackend) -> None:
    """Their numbers are no longer valid, but to read them must not crash."""
    runner = open_runner(backend, "adaptive", sizes=(4096,))
    held = runner(x=rows(backend, 4096))
    tail = held[-1]
    assert runner.replan(times=TIMES, traffic=traffic_of(8)).way == "new generation"
    backend.release_cached()
    assert float(held.sum()) == float(held.sum())
    assert tail.shape == (WIDTH,)
    float(tail.sum())
    del held
    ask(runner, backend, 8, 3)
    if backend.device.type == "cuda":
        lingering = runner.report.pool_bytes
        del tail
        gc.collect()
        runner.replan(times=TIMES, traffic=traffic_of(16))
        assert runner.report.pool_bytes < lingering
    runner.close()


def test_a_graph_whose_output_is_held_is_freed_later() -> None:
    backend = Watching()
    runner = open_runner(backend, "adaptive", sizes=(64,))
    ask(runner, backend, 64, *[8] * 9)
    backend.held = True
    given = [traffic_of(8), traffic_of(16)]
    runner.replan(times=TIMES, traffic=given[0])
    both = backend.memory().reserved
    assert runner.report.pool_bytes == both, "the old pool counts as long as it is there"
    ask(runner, backend, 5)
    backend.held = False
    runner.replan(times=TIMES, traffic=given[1])
    assert backend.memory().reserved < both
    assert runner.report.pool_bytes == backend.memory().reserved
    backend.held = True
    ask(runner, backend, 16)
    runner.replan(times=TIMES, traffic=given[0])
    runner.close()
    assert backend.memory().reserved == 0, "closing waits for nobody"


def test_no_graph_is_kept_by_the_runners_own_hold_on_its_output() -> None:
    """Neither for a moment: what is given up is free before anything else is captured, the collector off."""
    backend = Unowned()
    runner = open_runner(backend, "adaptive", sizes=(4096,))
    ask(runner, backend, 4096)
    most = runner.report.pool_bytes
    assert runner.replan(times=TIMES, traffic=traffic_of(64)).way == "new generation"
    assert runner.report.pool_bytes < most / 4
    runner.close()


@pytest.mark.parametrize("kind", ["its input", "its input besides", "a view of its cache"])
def test_outputs_outside_of_the_pool_keep_no_graph(kind: str) -> None:
    """The static buffers and the model hold that memory for ever."""

    class Returns(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(4096, WIDTH))

        def forward(self, x: torch.Tensor) -> Any:
            y = (x * 3).relu()
            if kind == "a view of its cache":
                self.cache[: len(x)].copy_(y)
                return self.cache[: len(x)]
            return x.add_(y) if kind == "its input" else (y, x)

    backend = Unowned()
    runner = open_runner(backend, "adaptive", Returns(), sizes=(4096,), outputs="clone")
    pools = []
    for size in (64, 1024) * 2:
        runner(x=rows(backend, size))
        runner.replan(times=TIMES, traffic=traffic_of(size))
        pools.append(runner.report.pool_bytes)
    assert pools[:2] == pools[2:]
    runner.close()


def test_a_key_that_fails_late_moves_the_others_to_a_new_pool() -> None:
    """It has grown the pool, so all are captured again, the largest first. The calls before hold no older output."""

    class FailsLate(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            return super().forward(x) * (1.0 if len(x) < 1024 else float(x.sum().item() != 0.125))

    seen, backend = Tally(), Unowned()
    runner = open_runner(backend, "lazy", FailsLate(backend), sizes=(2, 8, 1024))
    for count in (2, 2, 8):
        runner(x=rows(backend, count))
    pool = runner.report.pool_bytes
    runner(x=rows(backend, 1000))
    assert [failed.descriptor.num_tokens for failed in runner.report.failed] == [1024]
    assert runner.report.generation == 2
    assert runner.report.pool_bytes <= pool
    again = [size for size in seen[seen.index(1024) :] if size < 1000]
    assert again == sorted(again, reverse=True)
    assert {2, 8} == set(again)
    ask(runner, backend, 8, 2)
    runner.close()


def test_what_failed_is_left_out_of_later_plans(backend: GraphBackend) -> None:
    """A size that cannot be captured takes no place in the budget, and nothing is made ready for it."""
    model = Net(backend)
    runner = open_runner(backend, "adaptive", model, sizes=(16,), budget={"max_graphs": 2})
    model.asks = {300}

    def traffic() -> None:
        for count in (300,) * 9 + (20,) * 3 + (5,) * 3:
            runner(x=rows(backend, count))

    traffic()
    first = runner.replan(times=TIMES)
    assert [key.descriptor.num_tokens for key in first.failed] == [300]
    assert first.difference.failed == (), "it was not known before"
    report = runner.report
    assert report.budget.skipped == (), "no budget left it out"
    assert not any("the budget leaves" in warning for warning in report.warnings)
    assert len(sizes_of(runner)) == 1
    traffic()
    x = rows(backend, 300)
    torch.testing.assert_close(runner(x=x), model(x))
    proposed = runner.replan(times=TIMES, apply=False)
    second = runner.replan(times=TIMES)
    assert sizes_of(runner) == [5, 20], "both places go to sizes that can be captured"
    for report in (proposed, second):
        [left_out] = report.difference.failed
        assert (left_out.mode, left_out.sizes) == (FULL, (300,))
        assert left_out.reason.startswith("HostSyncError: ")
        assert report.failed == first.failed
        assert "left out  FULL 300: HostSyncError" in str(report)
        assert "failed" not in str(report), "it is said once"
        assert ReplanReport.model_validate_json(report.model_dump_json()) == report
    assert runner.report.static_bytes == 20 * WIDTH * 4 or second.way != "new buffers"
    assert runner.stats.failures == 1
    model.asks = set()
    runner.retry_failed()
    traffic()
    assert runner.replan(times=TIMES).difference.failed == ()
    assert 300 in sizes_of(runner)
    runner.close()


def test_what_the_budget_refused_may_be_planned_again() -> None:
    """Its cost beside others was too high; the key itself can be captured."""
    refused = FailedKey(
        mode=FULL, descriptor=BatchDescriptor(5, 5, False), error="BudgetError", detail="memory"
    )
    assert uncapturable([refused]) == {}
    assert len(uncapturable([refused.model_copy(update={"error": "HostSyncError"})])) == 1


def test_a_plan_from_the_report_of_a_lazy_runner_knows_what_failed(tmp_path: Path) -> None:
    backend, model = TapeBackend(), Net(TapeBackend())
    runner = open_runner(backend, "lazy", model)
    model.asks = {4}
    for count in (2, 4, 16):
        runner(x=rows(backend, count))
    report = tmp_path / "report.json"
    report.write_text(runner.report.model_dump_json(), encoding="utf-8")
    priced = costs_of(LoadedConfig(runner.config, {}, tmp_path), str(report))
    assert priced.costs is not None
    assert {key[1].num_tokens: reason.split(":")[0] for key, reason in priced.failed.items()} == {
        4: "HostSyncError"
    }
    traffic = runner.stats.traffic()
    inputs = PlanInputs(runner.config, [(traffic, 1.0)], TIMES, failed=priced.failed)
    plan = plan_graphs(inputs).plan
    assert plan.capture_sizes == (2, 16)
    runner.close()


def test_a_budget_holds_through_replans() -> None:
    row = WIDTH * 4
    backend = WithDriver(rate=1)
    limit = 64 * row + 3 * 64 * row + 4096
    runner = open_runner(
        backend, "adaptive", sizes=(8, 64), budget={"memory": limit, "max_graphs": 3}
    )
    for seen in ([64, 32, 16, 8], [60, 50, 40, 30], [1, 2, 3, 4], [9, 64]):
        ask(runner, backend, *seen)
        runner.replan(times=TIMES)
        assert runner.report.graph_bytes <= limit
        assert 0 < len(runner.plan.keys) <= 3
        ask(runner, backend, *seen)
    with pytest.raises(BudgetError):
        runner.replan(times=TIMES, traffic=Traffic.of([(Batch(4000, 200, False, 0), 1)], "given"))
    ask(runner, backend, 9, 64)
    runner.close()
    assert backend.memory().reserved == 0


def test_buffers_that_cannot_grow_leave_the_old_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TapeBackend()
    runner = open_runner(backend, "adaptive", sizes=(8, 64))
    ask(runner, backend, 3)
    real, full = torch.zeros, torch.OutOfMemoryError("no memory")

    def zeros(shape: Any, **options: Any) -> torch.Tensor:
        if shape and shape[0] > 64:
            raise full
        return real(shape, **options)

    monkeypatch.setattr("cgplan.buffers.static.torch.zeros", zeros)
    given = traffic_of(100)
    with pytest.raises(CaptureMemoryError, match="static buffers of 100 tokens"):
        runner.replan(times=TIMES, traffic=given)
    assert sizes_of(runner) == [8, 64]
    ask(runner, backend, 3, 33)
    runner.close()


def test_the_largest_size_that_the_configuration_allows_holds() -> None:
    backend = TapeBackend()
    config = config_of(backend, "adaptive", sizes=(1,))
    compilation = config.compilation.model_copy(
        update={"cudagraph_capture_sizes": "powers_of_two", "max_cudagraph_capture_size": 16}
    )
    config = config.model_copy(update={"compilation": compilation})
    runner = CaptureSession(build_plan(config), Net(backend), backend, config).run()
    ask(runner, backend, *[13] * 5)
    for _ in range(5):
        runner(x=rows(backend, 40))
    runner.replan(times=TIMES)
    assert sizes_of(runner) == [13]
    assert runner.plan.max_num_batched_tokens == config.scheduler.max_num_batched_tokens
    runner.recapture()
    assert sizes_of(runner) == [13], "a recapture captures the plan that was captured last"
    ask(runner, backend, 13)
    runner.close()


def test_step_times_are_measured_on_padding(backend: GraphBackend) -> None:
    """A proposal changes nothing: static buffers hold their rows, staged blocks stay good, random numbers stay."""
    runner = open_runner(backend, "adaptive", sizes=(8, 64))
    with pytest.raises(InputError, match=r"asked for 5\.0"):
        runner.input_views(cast(Any, 5.0))
    with pytest.raises(InputError, match="inputs are of type Tensor"):
        runner.route(cast(Any, torch.ones(3)))
    written = runner.input_views(5)["x"]
    x = rows(backend, 5)
    written.copy_(x)
    runner(x=written)
    staged = runner.stage(num_tokens=4)
    before = torch.get_rng_state()
    report = runner.replan(apply=False)
    assert report.way == "proposed"
    assert report.difference.lanes
    assert torch.equal(torch.get_rng_state(), before)
    same(written, x)
    with staged as buffers:
        buffers["x"].copy_(x[:4])
    same(staged.output.clone(), runner(x=x[:4]))
    runner.replan()
    evidence = runner.plan.evidence
    assert evidence is not None
    assert evidence["times_source"] == "the runner, on padding"
    runner.close()


class Remembers(Net):
    """Counts its calls in a buffer, and keeps its last result."""

    def __init__(self, backend: GraphBackend) -> None:
        super().__init__(backend)
        self.register_buffer("count", torch.zeros(4, device=backend.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = super().forward(x)
        self.count.add_(1)
        return self.last + self.count[0]


def test_steps_that_are_timed_leave_the_models_state(backend: GraphBackend) -> None:
    """One run is looked at, then steps are timed: no later run tells what the first one made."""
    model = Remembers(backend)
    runner = open_runner(backend, "adaptive", model, sizes=(8, 64), cudagraph_num_of_warmups=0)
    runner(x=rows(backend, 5))
    for apply in (False, True):
        runner.replan(apply=apply)
        assert model.count.tolist() == [1, 1, 1, 1]
    runner.close()


def test_who_may_replan() -> None:
    backend = TapeBackend()
    for policy in ("eager", "lazy"):
        runner = open_runner(backend, policy)
        runner(x=rows(backend, 3))
        with pytest.raises(CgplanError, match=f"capture_policy is {policy}") as caught:
            runner.replan()
        assert "adaptive" in caught.value.remedy
        runner.close()
    runner = open_runner(backend, "adaptive")
    runner(x=rows(backend, 3))
    with runner.no_capture(), pytest.raises(CgplanError, match="no_capture"):
        runner.replan()
    with runner.stage(num_tokens=2) as buffers:
        buffers["x"].zero_()
        with pytest.raises(CgplanError, match="another call was under way"):
            runner.replan(times=TIMES)
    runner.replan(times=TIMES)
    ask(runner, backend, 3)
    runner.invalidate("kv_cache")
    with pytest.raises(AddressError, match="kv_cache"):
        runner.replan(times=TIMES)
    runner.recapture()
    ask(runner, backend, 3)
    runner.close()
    with pytest.raises(CgplanError, match="closed"):
        runner.replan()


def test_what_the_buffers_hold_can_be_staged_without_a_graph() -> None:
    """After a replan the graphs may be smaller than the buffers."""
    backend, model = TapeBackend(), Net(TapeBackend())
    runner = open_runner(backend, "adaptive", model, sizes=(16,))
    runner.replan(times=TIMES, traffic=traffic_of(3))
    assert sizes_of(runner) == [3]
    x = rows(backend, 16)
    with runner.stage(16) as buffers:
        buffers["x"].copy_(x)
    torch.testing.assert_close(buffers.output, model(x), rtol=1e-4, atol=1e-5)
    assert runner.stats.eager == {MissReason.TOO_LARGE: 1}
    ask(runner, backend, 2, 3)  # padded behind what the large one left
    with pytest.raises(InputError, match="static buffers hold 1 to 16 tokens, asked for 17"):
        runner.stage(17)
    runner.close()


# --- anything in any order ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["shared", "per_mode", "per_graph"])
@pytest.mark.parametrize("policy", ["lazy", "adaptive"])
@pytest.mark.parametrize("seed", range(2))
def test_every_answer_equals_eager_whatever_was_done(
    backend: GraphBackend, policy: str, pool: str, seed: int
) -> None:
    model, choose = Net(backend), random.Random(seed)
    runner = open_runner(backend, policy, model, sizes=(2, 8, 32), pool=pool)

    def call() -> None:
        x = rows(backend, choose.randint(1, 40))
        found = runner(x=x).clone()
        same(found, runner.run_eagerly(x=x))
        torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)

    def staged() -> None:
        x = rows(backend, choose.randint(1, 2))
        with runner.stage(num_tokens=len(x)) as buffers:
            buffers["x"].copy_(x)
        torch.testing.assert_close(buffers.output.clone(), model(x), rtol=1e-4, atol=1e-5)

    def replan() -> None:
        if policy == "adaptive":
            call()
            runner.replan(times=TIMES)
            if max(runner.plan.capture_sizes) < 2:
                runner.replan(times=TIMES, traffic=Traffic.of([(Batch(2, 2, True, 0), 1)], "given"))

    def forbid() -> None:
        with runner.no_capture():
            call()

    def invalidate() -> None:
        runner.invalidate("cache")
        with pytest.raises(AddressError):
            runner(x=rows(backend, 1))
        runner.recapture()

    def fail() -> None:
        model.asks = {choose.choice([2, 8, 32])}
        call()
        model.asks = set()
        runner.retry_failed()

    if policy == "lazy":
        call()
    for _ in range(25):
        choose.choice([call, call, call, staged, replan, forbid, invalidate, fail])()
    runner.close()
    gc.collect()
    if backend.device.type == "cpu":
        assert backend.memory().reserved == 0


def test_sizes_that_the_budget_left_out_are_those_of_the_plan_in_service(
    backend: GraphBackend,
) -> None:
    runner = open_runner(backend, "adaptive", sizes=(4, 16), budget={"max_graphs": 1})
    runner(x=rows(backend, 3))
    assert [key.num_tokens for _, key in runner.report.budget.left_out] == [4]
    for _ in range(9):
        runner(x=rows(backend, 13))
    runner.replan(times=TIMES)
    assert sizes_of(runner) == [13]
    assert runner.report.budget.left_out == ()
    assert not any("the budget leaves" in warning for warning in runner.report.warnings)
    runner.close()
