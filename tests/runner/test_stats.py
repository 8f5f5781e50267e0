"""What a runner says about its calls: counts, tables, JSON, metrics, and traffic to plan from."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cgplan
from cgplan import BatchDescriptor, Config, CUDAGraphMode, GraphRunner, Input, build_plan
from cgplan.backends import GraphBackend
from cgplan.backends.backend import Trace
from cgplan.buffers.batch import Batch as Rows
from cgplan.config import Dim
from cgplan.errors import CgplanError, InputError, TrafficError
from cgplan.planning import MissReason
from cgplan.runner import stats as stats_module
from cgplan.runner.routing import RoutedBatch
from cgplan.runner.stats import BatchCount, RunnerStats, StatsCollector
from cgplan.traffic.files import log_traffic, read_sizes, read_traffic
from cgplan.traffic.histogram import StepShape as Batch
from cgplan.traffic.histogram import Traffic

pytestmark = pytest.mark.usefixtures("quiet_collector")

NONE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.FULL
ROWS = Input(shape=("num_tokens",), dtype="float32", pad=0)
LENGTHS = Input(shape=("num_reqs",), dtype="int64", pad=0)


def open_runner(backend: GraphBackend, *, reqs: bool = True, **sections: Any) -> GraphRunner:
    metadata = {"lengths": LENGTHS} if reqs else None
    compilation = {"cudagraph_capture_sizes": [2, 4, 8], "cudagraph_mode": "FULL_DECODE_ONLY"}
    compilation |= sections.pop("compilation", {})
    return cgplan.capture(
        lambda x: x * 2,
        {"x": ROWS},
        metadata=metadata,
        compilation=compilation,
        device=backend.device.type,
        **sections,
    )


def count_of(
    stats: RunnerStats,
    tokens: int,
    reqs: int | None,
    mode: CUDAGraphMode,
    descriptor: BatchDescriptor,
    reason: MissReason | None = None,
) -> BatchCount:
    return stats.count_of(RoutedBatch(Rows(tokens, reqs), False, 0, None, mode, descriptor), reason)


def call(runner: GraphRunner, tokens: int, reqs: int) -> None:
    device = runner.backend.device
    runner(
        x=torch.zeros(tokens, device=device),
        lengths=torch.ones(reqs, dtype=torch.int64, device=device),
    )


def stage(runner: GraphRunner, tokens: int, reqs: int) -> None:
    with runner.stage(tokens, reqs) as buffers:
        buffers["x"].fill_(1)


STEPS = [(3, 3), (3, 3), (1, 1), (8, 8), (8, 2), (9, 9), (7, 3), (3, 3)]


@pytest.fixture
def called(backend: GraphBackend) -> GraphRunner:
    runner = open_runner(backend)
    for index, step in enumerate(STEPS):
        (stage if index in (1, 6) else call)(runner, *step)
    return runner


def test_every_call_is_counted_by_what_answered_it(called: GraphRunner) -> None:
    stats = called.stats
    assert stats.replays == {
        (FULL, BatchDescriptor(4, 4, uniform=True)): 3,
        (FULL, BatchDescriptor(2, 2, uniform=True)): 1,
        (FULL, BatchDescriptor(8, 8, uniform=True)): 1,
    }
    assert stats.eager == {MissReason.NO_GRAPH_FOR_MIXED: 2, MissReason.TOO_LARGE: 1}
    assert stats.calls == len(STEPS)
    assert stats.real_tokens == sum(tokens for tokens, _ in STEPS)
    assert stats.padded_rows == 3 * 1 + 1
    assert (stats.captures, stats.evictions) == (3, 0)
    called.recapture()
    assert stats is called.stats
    assert stats.captures == 6
    call(called, 3, 3)
    assert stats.calls == len(STEPS) + 1
    stats.reset()
    assert (stats.calls, stats.replays, stats.eager, stats.padded_rows, stats.captures) == (
        0,
        {},
        {},
        0,
        6,
    )
    call(called, 3, 3)
    assert stats.calls == 1


def test_a_call_that_failed_before_its_launch_is_not_counted(called: GraphRunner) -> None:
    before = called.stats.mark()
    with pytest.raises(CgplanError):
        call(called, 3, 4)
    with pytest.raises(ZeroDivisionError), called.stage(3):
        _ = 1 / 0
    assert called.stats.mark() == before


def test_the_table_is_vllms_and_the_planner_reads_it(called: GraphRunner, tmp_path: Path) -> None:
    table = called.stats.table()
    assert table == (
        "**CUDAGraph Config Settings:**\n"
        "\n"
        "- Mode: FULL_DECODE_ONLY\n"
        "- Capture sizes: [2, 4, 8]\n"
        "\n"
        "**CUDAGraph Stats:**\n"
        "\n"
        "| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |\n"
        "|-----------------|---------------|--------------|--------------|-------|\n"
        "| 3               | 4             | 1            | FULL         | 3     |\n"
        "| 1               | 2             | 1            | FULL         | 1     |\n"
        "| 7               | 7             | 0            | NONE         | 1     |\n"
        "| 8               | 8             | 0            | FULL         | 1     |\n"
        "| 8               | 8             | 0            | NONE         | 1     |\n"
        "| 9               | 9             | 0            | NONE         | 1     |\n"
    )
    read = log_traffic(table, tmp_path / "server.log", called.plan)
    assert by_tokens(read) == {1: 1, 3: 3, 7: 1, 8: 2, 9: 1}
    assert dict(read.histogram)[Batch(3, 3, True)] == 3


PLAN = build_plan(Config.model_validate({"inputs": {"x": ROWS}}))


def by_tokens(traffic: Traffic) -> Counter[int]:
    counts: Counter[int] = Counter()
    for shape, count in traffic.histogram:
        counts[shape.num_tokens] += int(count)
    return counts


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 600),
            st.sampled_from(["FULL", "PIECEWISE", "NONE"]),
            st.integers(1, 10**6),
        ),
        max_size=20,
    )
)
def test_any_table_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, str, int]]
) -> None:
    stats, wanted = RunnerStats(PLAN), Counter[int]()
    for tokens, mode, calls in steps:
        reason = MissReason.TOO_LARGE if mode == "NONE" else None
        descriptor = BatchDescriptor(tokens + (0 if reason else tokens % 5))
        count_of(stats, tokens, None, CUDAGraphMode[mode], descriptor, reason).calls += calls
        wanted[tokens] += calls
    if not steps:
        with pytest.raises(TrafficError):
            log_traffic(stats.table(), Path("x.log"), PLAN)
        return
    assert by_tokens(log_traffic(stats.table(), Path("x.log"), PLAN)) == wanted
    assert by_tokens(stats.traffic()) == wanted


def test_traffic_is_exact_and_can_be_planned_for(called: GraphRunner) -> None:
    traffic = called.stats.traffic()
    assert dict(traffic.histogram) == {
        Batch(1, 1, True): 1, Batch(3, 3, True): 3, Batch(7, 3): 1, Batch(8, 2): 1, Batch(8, 8, True): 1,
        Batch(9, 9, True): 1,
    }  # fmt: skip
    assert traffic.source == "runner.stats"
    assert traffic.notes == ()
    assert Traffic.from_json(traffic.model_dump_json()) == traffic


def test_traffic_tells_adapters_and_guesses_requests_where_no_input_counts_them(
    backend: GraphBackend,
) -> None:
    runner = cgplan.capture(
        lambda x: x * 2, {"x": ROWS}, lora={"max_loras": 4}, scheduler={"max_num_seqs": 5},
        speculative={"num_speculative_tokens": 2}, device=backend.device.type,
        compilation={"cudagraph_capture_sizes": [3, 6, 12]},
    )  # fmt: skip
    x = torch.zeros(9, device=backend.device)
    runner(x=x, uniform_decode=True, num_active_loras=3)
    runner(x=x)
    runner(x=x[:3], num_active_loras=1)
    traffic = runner.stats.traffic()
    assert dict(traffic.histogram) == {
        Batch(9, 3, True, 3): 1,
        Batch(9, 5): 1,
        Batch(3, 3, False, 1): 1,
    }
    assert traffic.notes == (
        "no input counts requests: num_reqs of these batches are as many as their tokens allow",
    )


def test_statistics_of_any_number_of_adapters_can_be_planned_for(
    backend: GraphBackend, tmp_path: Path
) -> None:
    """A runner takes max_loras + 1 for any number of them; of more it knows nothing, and nor does the planner."""
    runner = cgplan.capture(
        lambda x: x * 2, {"x": ROWS}, lora={"max_loras": 2}, device=backend.device.type,
        compilation={"cudagraph_capture_sizes": [2, 4]},
    )  # fmt: skip
    runner(x=torch.zeros(3, device=backend.device), num_active_loras=3)
    path = tmp_path / "stats.json"
    path.write_text(runner.stats.traffic().model_dump_json())
    found = read_traffic(path, runner.plan)
    assert dict(found.histogram) == {Batch(3, 3, True, 3): 1}
    path.write_text(Traffic.of({Batch(3, 3, True, 4): 1}, "made up").model_dump_json())
    with pytest.raises(
        TrafficError, match="a batch has 4 active LoRA adapters, the configuration allows 2"
    ):
        read_traffic(path, runner.plan)
    runner.close()


def test_traffic_since_a_mark_and_since_a_reset(backend: GraphBackend) -> None:
    runner = open_runner(backend)
    for _ in range(5):
        call(runner, 3, 3)
    mark = runner.stats.mark()
    call(runner, 3, 3)
    assert [calls for _, calls in runner.stats.traffic(mark).histogram] == [1]
    runner.stats.reset()
    for _ in range(7):
        call(runner, 3, 3)
    assert [calls for _, calls in runner.stats.traffic(mark).histogram] == [7]
    runner.close()


def test_statistics_of_a_batch_beyond_max_num_seqs_can_be_planned_for(
    backend: GraphBackend, tmp_path: Path
) -> None:
    """No input tells its requests, and there can be no uniform batch of that size."""
    specs = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    runner = cgplan.capture(
        lambda x: x + 1, specs, compilation={"cudagraph_capture_sizes": [4]}, scheduler={"max_num_seqs": 8},
        device=str(backend.device),
    )  # fmt: skip
    for size in (3, 20):
        runner(x=torch.zeros(size, 2, device=backend.device))
    (tmp_path / "stats.json").write_text(runner.stats.traffic().model_dump_json())
    found = read_traffic(tmp_path / "stats.json", PLAN).histogram
    assert [(batch.num_tokens, batch.num_reqs, batch.uniform, calls) for batch, calls in found] == [
        (3, 3, True, 1),
        (20, 8, False, 1),
    ]
    runner.close()


def test_no_traffic_before_the_first_call(backend: GraphBackend) -> None:
    runner = open_runner(backend)
    runner.stage(3)  # prepared, and not run
    with pytest.raises(TrafficError, match="the runner had no call since its warm-up"):
        runner.stats.traffic()
    assert runner.stats.table().endswith(
        "Count |\n|-----------------|---------------|--------------|--------------|-------|\n"
    )


def test_very_many_different_batches_are_told_by_tokens_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stats_module, "MOST_BATCHES", 5)
    stats = RunnerStats(PLAN)
    for reqs in (1, 2, 3, 4, 5, 6, 7, 2):
        count_of(stats, 8, reqs, FULL, BatchDescriptor(8, 8)).calls += 1
    counts = {count.num_reqs: count.calls for count in stats.counts}
    assert counts == {1: 1, 2: 2, 3: 1, 4: 1, 5: 1, None: 2}
    assert stats.replays == {(FULL, BatchDescriptor(8, 8)): 8}
    assert stats.traffic().total == 8
    assert len(stats.traffic().notes) == 1


def test_numbers_are_read_while_other_threads_add_to_them() -> None:
    """As a server of metrics does."""
    stats, most = RunnerStats(PLAN), 3000

    def add() -> None:
        for tokens in range(1, most + 1):
            count_of(stats, tokens, None, FULL, BatchDescriptor(most)).calls += 1

    thread = threading.Thread(target=add)
    thread.start()
    while thread.is_alive():
        for read in (stats.__str__, stats.table, stats.prometheus, stats.mark, lambda: stats.calls):
            read()
    thread.join()
    assert stats.calls == stats.traffic().total == most
    assert sum(stats.mark()[1].values()) == most
    stats.reset()
    assert stats.calls == 0


# --- host time ------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock that is 1000 ns further each time it is read; counts the readings."""
    readings: list[int] = []

    def read() -> int:
        readings.append(0)
        return 1000 * len(readings)

    monkeypatch.setattr("cgplan.runner.runner.perf_counter_ns", read)
    return readings


def test_one_call_of_some_is_timed(backend: GraphBackend, clock: list[int]) -> None:
    runner = open_runner(backend)
    stats = runner.stats
    assert stats.time_every == 16
    for _ in range(15):
        call(runner, 3, 3)
    assert (stats.timed_calls, clock) == (0, [])
    call(runner, 3, 3)
    assert (stats.timed_calls, stats.timed_nanoseconds, len(clock)) == (1, 1000, 2)
    stats.time_every = 3
    for _ in range(7):
        call(runner, 9, 9)
    assert (stats.timed_calls, stats.timed_nanoseconds, len(clock)) == (3, 3000, 6)
    stats.time_every = 1
    for _ in range(4):
        call(runner, 3, 3)
    assert stats.timed_calls == 7
    stats.time_every = 0
    for _ in range(40):
        call(runner, 3, 3)
    assert (stats.timed_calls, len(clock)) == (7, 14)


def test_a_call_that_raised_is_timed_by_a_later_one(
    backend: GraphBackend, clock: list[int]
) -> None:
    runner = open_runner(backend)
    runner.stats.time_every = 1
    with pytest.raises(CgplanError):
        call(runner, 3, 4)
    assert runner.stats.timed_calls == 0
    call(runner, 3, 3)
    assert (runner.stats.timed_calls, runner.stats.timed_nanoseconds) == (1, 1000)


# --- Prometheus -----------------------------------------------------------------------------------------------


def test_metrics_in_prometheus_text_format(called: GraphRunner) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    called.stats.timed_nanoseconds, called.stats.timed_calls = 25_000, 2
    families = {
        f.name: f for f in parser.text_string_to_metric_families(called.stats.prometheus("target"))
    }

    def samples(family: str) -> dict[tuple[str, ...], float]:
        found = families[family].samples
        assert all(sample.labels["runner"] == "target" for sample in found)
        return {
            (
                sample.name,
                *(v for k, v in sorted(sample.labels.items()) if k != "runner"),
            ): sample.value
            for sample in found
        }

    assert samples("cgplan_replays") == {
        ("cgplan_replays_total", "FULL", "0", str(n), str(n), "true"): float(calls)
        for n, calls in ((4, 3), (2, 1), (8, 1))
    }
    assert samples("cgplan_eager_calls") == {
        ("cgplan_eager_calls_total", str(reason)): float(calls)
        for reason, calls in called.stats.eager.items()
    }
    assert samples("cgplan_tokens") == {
        ("cgplan_tokens_total", "real"): 42.0,
        ("cgplan_tokens_total", "padding"): 4.0,
    }
    assert samples("cgplan_captures") == {("cgplan_captures_total",): 3.0}
    assert samples("cgplan_evictions") == {("cgplan_evictions_total",): 0.0}
    assert samples("cgplan_host_seconds") == {
        ("cgplan_host_seconds_count",): 2.0, ("cgplan_host_seconds_sum",): 25e-6,
    }  # fmt: skip


def test_metrics_are_read_as_the_traffic_that_they_count(
    called: GraphRunner, tmp_path: Path
) -> None:
    pytest.importorskip("prometheus_client")
    stats = called.stats
    for tokens, calls in ((513, 2), (570, 3), (512, 1), (8190, 1_000_000)):
        count_of(
            stats, tokens, 2, NONE, BatchDescriptor(tokens), MissReason.TOO_LARGE
        ).calls = calls
    (tmp_path / "metrics.txt").write_text(stats.prometheus("target"))
    found = read_traffic(tmp_path / "metrics.txt", stats.plan)
    assert isinstance(found, Traffic)
    expected: Counter[tuple[int, bool]] = Counter()
    for shape, weight in stats.traffic().histogram:
        expected[
            {513: 576, 570: 576, 8190: 8192}.get(shape.num_tokens, shape.num_tokens), shape.uniform
        ] += int(weight)
    assert {
        (shape.num_tokens, shape.uniform): weight for shape, weight in found.histogram
    } == expected
    (tmp_path / "both.txt").write_text(stats.prometheus("target") + stats.prometheus("draft"))
    with pytest.raises(TrafficError, match="several runners: draft, target"):
        read_traffic(tmp_path / "both.txt", stats.plan)


def test_metrics_of_a_runner_with_other_sizes_are_told(tmp_path: Path) -> None:
    """Sizes that the configuration has, too, may be another runner's."""
    path = tmp_path / "metrics.txt"
    replays = "".join(
        f'cgplan_replays_total{{runner="96",mode="FULL",num_tokens="{size}"}} 3.0\n'
        for size in (3, 4)
    )
    path.write_text(
        f'cgplan_batches_total{{runner="96",num_tokens="3",uniform="false"}} 600.0\n{replays}'
    )
    for sizes, told in (([3, 4], []), ([1, 4], ["has graphs of 3, which"])):
        plan = build_plan(
            PLAN.settings.with_values("compilation", cudagraph_capture_sizes=tuple(sizes))
        )
        warnings = read_traffic(path, plan).warnings
        assert len(warnings) == len(told)
        assert all(part in warning for part, warning in zip(told, warnings, strict=True))


def test_metrics_of_a_runner_with_other_inputs_and_of_few_steps_are_told(tmp_path: Path) -> None:
    client = pytest.importorskip("prometheus_client")
    path = tmp_path / "metrics.txt"
    plans = {}
    for side in (64, 96):
        shape = {"shape": ["num_tokens", 3, side, side], "dtype": "float32", "pad": 0}
        config = {"inputs": {"x": shape}, "compilation": {"cudagraph_capture_sizes": [1, 4]}}
        plans[side] = build_plan(Config.model_validate(config))
    stats = RunnerStats(plans[96])
    count = count_of(stats, 3, 3, NONE, BatchDescriptor(3), MissReason.TOO_LARGE)
    count.calls = 1
    others = RunnerStats(plans[64])
    count_of(others, 3, 3, NONE, BatchDescriptor(3), MissReason.TOO_LARGE).calls = 1
    path.write_text(stats.prometheus("a") + others.prometheus("b"))
    for side, name in ((96, "a"), (64, "b")):
        with pytest.raises(TrafficError) as caught:
            read_traffic(path, plans[side])
        assert f"""'runner="{name}"'""" in caught.value.remedy
    for calls, side, told in (
        (100, 96, []),
        (
            100,
            64,
            ["takes x [num_tokens, 3, 96, 96], the configuration declares x [num_tokens, 3, 64"],
        ),
        (1, 96, ["metrics.txt has 1 step: let the server run"]),
    ):
        count.calls = calls
        both = StatsCollector({"64": RunnerStats(plans[64]), "96": stats})
        path.write_text(client.generate_latest(both).decode())
        warnings = read_traffic(path, plans[side]).warnings
        assert len(warnings) == len(told)
        assert all(part in warning for part, warning in zip(told, warnings, strict=True))


def test_saved_traffic_of_a_runner_with_other_inputs_is_told(tmp_path: Path) -> None:
    plans = {}
    for side in (64, 96):
        shape = {"shape": ["num_tokens", 3, side, side], "dtype": "float32", "pad": 0}
        plans[side] = build_plan(Config.model_validate({"inputs": {"x": shape}}))
    stats = RunnerStats(plans[96])
    count_of(stats, 3, 3, NONE, BatchDescriptor(3), MissReason.TOO_LARGE).calls = 5
    path = tmp_path / "calls.json"
    path.write_text(stats.traffic().model_dump_json())
    wrong = (
        "the runner of calls.json takes x [num_tokens, 3, 96, 96], the configuration declares "
        "x [num_tokens, 3, 64, 64]"
    )
    few = "calls.json has 5 steps: let the server run for a typical hour"
    for side, told in ((96, [few]), (64, [wrong, few])):
        of_sizes = read_sizes(path, [Dim("num_tokens", max=8)], plans[side])
        for warnings in (read_traffic(path, plans[side]).warnings, of_sizes.warnings):
            assert len(warnings) == len(told)
            assert all(map(str.startswith, warnings, told))
    warning, _ = read_traffic(path, build_plan(Config())).warnings
    assert "the configuration declares no input of a fixed size: take" in warning


@pytest.mark.parametrize("wrong", [["stats"], {"a": "runner"}, "stats"])
def test_a_collector_of_what_is_no_stats_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(CgplanError, match=r"StatsCollector got a (list|str), and takes"):
        StatsCollector(wrong)


def test_metrics_of_several_runners_in_a_registry_of_the_user(called: GraphRunner) -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    registry.register(StatsCollector({"draft": RunnerStats(PLAN), "target": called.stats}))
    alone = client.generate_latest(StatsCollector(called.stats)).decode()
    assert alone == called.stats.prometheus("runner")
    labels = {"runner": "target", "kind": "real"}
    assert registry.get_sample_value("cgplan_tokens_total", labels) == 42
    call(called, 8, 8)
    assert registry.get_sample_value("cgplan_tokens_total", labels) == 50
    assert registry.get_sample_value("cgplan_tokens_total", {**labels, "runner": "draft"}) == 0


def test_metrics_have_a_label_for_each_named_dimension(backend: GraphBackend) -> None:
    """Without it two series of a page were the same, which Prometheus refuses."""
    client = pytest.importorskip("prometheus_client")
    config = {
        "dims": {"batch": {"max": 1}, "side": {"max": 96, "sizes": [64, 96]}},
        "inputs": {"x": {"shape": ["batch", "side"], "dtype": "float32", "pad": 0}},
        "model": {"output_shapes": [["batch", "side"]]},
        "device": str(backend.device),
    }
    registry = client.CollectorRegistry()
    with closing(cgplan.capture(lambda x: x * 2, config=config)) as runner:
        registry.register(StatsCollector({"draft": RunnerStats(PLAN), "target": runner.stats}))
        for side in (64, 80, 96, 128):
            runner(x=torch.ones(1, side, device=backend.device))
    found = {
        (sample.name, sample.labels.get("mode"), sample.labels["side"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if "side" in sample.labels
    }
    replays, batches = "cgplan_replays_total", "cgplan_batches_total"
    assert found == {
        (replays, "FULL", "64"): 1,
        (replays, "FULL", "96"): 2,
        (batches, None, "64"): 1,
        (batches, None, "96"): 2,
    }, "an eager batch has no such label: each length would be a series"


def test_metrics_without_the_client_say_how_to_get_it(
    called: GraphRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(
        CgplanError, match="needs prometheus_client, which is not installed"
    ) as caught:
        called.stats.prometheus()
    assert "pip install prometheus_client" in caught.value.remedy


# --- NVTX -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [False, True])
def test_ranges_are_named_by_key(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch, on: bool
) -> None:
    named: list[str] = []
    inside: list[bool] = []

    @contextmanager
    def annotate(self: GraphBackend, name: str) -> Iterator[None]:
        named.append(name)
        inside.append(True)
        yield
        inside.pop()

    monkeypatch.setattr(type(backend), "annotate", annotate)
    runner = open_runner(backend, report={"nvtx": on})
    for step in ((3, 3), (3, 3), (8, 2)):
        call(runner, *step)
        stage(runner, *step)
    assert inside == []
    decode = "cgplan FULL size=4 num_reqs=4 uniform"
    assert named == ([decode] * 4 + ["cgplan NONE size=8"] * 2 if on else [])
    x = torch.arange(3.0, device=backend.device)
    lengths = torch.ones(3, dtype=torch.int64, device=backend.device)
    assert torch.equal(runner(x=x, lengths=lengths), x * 2)
    assert runner.stats.calls == 7


def nested(trace: Trace) -> list[tuple[int, str]]:
    """(depth, name) of each event as a reader of Chrome's format nests them; an event ends inside of its parent."""
    found, around = [], list[int]()
    for event in json.loads(trace.to_json())["traceEvents"]:
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            continue
        assert event.keys() == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert event["ph"] == "X"
        start = round(event["ts"] * 1000)  # readers count whole nanoseconds
        end = start + round(event["dur"] * 1000)
        while around and around[-1] <= start:
            around.pop()
        assert all(end <= outer for outer in around), event
        found.append((len(around), event["name"]))
        around.append(end)
    return found


def test_a_trace_of_calls(backend: GraphBackend) -> None:
    runner = open_runner(backend)
    call(runner, 3, 3)
    with runner.trace() as trace:
        call(runner, 3, 3)
        with pytest.raises(InputError):
            runner(x=torch.zeros(3, 3), lengths=torch.ones(3))
        stage(runner, 3, 3)
        call(runner, 8, 2)
    call(runner, 3, 3)
    with runner.stage(3, 3):
        pass
    decode = "FULL size=4 num_reqs=4 uniform"
    called = [(0, decode), (1, "dispatch"), (1, "copy"), (1, "launch")]
    staged = [(0, decode), (1, "copy"), (1, "launch")]
    eager = [(0, "NONE size=8"), (1, "dispatch"), (1, "copy"), (1, "launch")]
    assert nested(trace) == called + staged + eager
    args = {event["name"]: event["args"] for event in trace.events}
    assert args[decode] == {"num_tokens": 3, "num_reqs": 3}
    assert next(e for e in trace.events if e["name"] == "copy")["args"] == {"bytes": 3 * 4 + 3 * 8}
    assert Trace.current is None


def test_a_trace_shows_the_look_at_inputs_by_position(backend: GraphBackend) -> None:
    runner = cgplan.capture(
        lambda x: x + 1,
        {"x": Input(shape=("num_tokens", 8), dtype="float32", pad=0)},
        compilation={"cudagraph_capture_sizes": [4]},
        device=backend.device,
    )
    x = torch.ones(3, 8, device=backend.device)
    for _ in range(2):
        with runner.trace() as trace:
            runner(x)
        dispatch = next(event for event in trace.events if event["name"] == "dispatch")
        assert dispatch["dur"] > 0
        runner(x)
    with runner.trace() as trace:
        with runner.trace():
            pass
        runner(x)
    dispatch = next(event for event in trace.events if event["name"] == "dispatch")
    assert dispatch["dur"] > 0  # the inner trace leaves the outer one's look at inputs


def test_a_trace_of_captures_and_pieces(backend: GraphBackend) -> None:
    piecewise = {
        "cudagraph_mode": "PIECEWISE",
        "splitting_ops": ["aten::softmax"],
        "cudagraph_capture_sizes": [4],
    }
    with Trace().on() as trace:
        runner = cgplan.capture(
            lambda x: (x + 1).softmax(-1) * 2,
            {"x": Input(shape=("num_tokens", 8), dtype="float32", pad=0)},
            compilation=piecewise,
            device=backend.device,
        )
        with runner.trace():
            runner(x=torch.ones(3, 8, device=backend.device))
    found, key = nested(trace), "PIECEWISE size=4"
    assert [name for depth, name in found if depth == 0] == ["capture session", key]
    session = [name for depth, name in found[: found.index((0, key))] if depth == 2]
    assert session == ["look", "warm-up", "capture", "capture"]
    assert (3, "compile") in found
    assert [name for _, name in found[-4:]] == ["launch", "segment", "aten::softmax", "segment"]


def test_stats_in_a_few_lines(backend: GraphBackend) -> None:
    specs = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    runner = cgplan.capture(
        lambda x: x + 1,
        specs,
        compilation={"cudagraph_capture_sizes": [2, 4]},
        device=backend.device,
    )
    assert str(runner.stats).splitlines() == [
        "0 calls: 0 tokens, and 0 of padding",
        "by graphs: none",
        "eagerly: none",
        "keys: 2 captured, 0 evicted, 0 failed",
    ]
    for count in (1, 3, 3, 5):
        runner(torch.ones(count, 2, device=backend.device))
    assert str(runner.stats).splitlines()[:3] == [
        "4 calls: 12 tokens, and 3 of padding",
        "by graphs: FULL size=4 num_reqs=4: 2, FULL size=2 num_reqs=2: 1",
        "eagerly: larger than the largest capture size: 1",
    ]
