"""`bench --against`: the same model and tensors run in other ways, in turns with the runner; what of
a step runs inside graphs, and what a replay cannot be faster than.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from checks import Tally, same
from torch import Tensor, nn

import cgplan
from cgplan import ConfigError, GraphRunner, build_plan, get_forward_context
from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.tape import TapeBackend
from cgplan.config import Input, validate_config
from cgplan.measure.bench import (
    BASELINES,
    Baseline,
    BenchBatch,
    Comparison,
    bare,
    bench,
    bench_baselines,
    check_up,
    examples,
    floor_of,
    reduce_overhead,
    used_bytes,
)
from cgplan.reports import BenchReport, render_text
from cgplan.reports.records import BASELINE_NAMES, BaselineRecord, DoctorReport, FloorRecord
from cgplan.reports.run_tables import FLOOR
from cgplan.runner.session import CaptureSession

pytestmark = pytest.mark.usefixtures("quiet_collector")

WIDTH = 8
X = Input(shape=("num_tokens", WIDTH), dtype="float32", pad=0)
REDRAWN = "the model draws random numbers, and padding and inductor's code draw others"
SHIFT = Input(shape=("num_tokens",), dtype="float32", pad=0, example=2)


class Net(nn.Module):
    """Attention between two layers, and a tensor that it holds beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.held = [torch.ones(WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)[:, None]
        return self.after(nn.functional.scaled_dot_product_attention(y, y, y)[:, 0]) + self.held[0]


def net(backend: GraphBackend) -> Net:
    with torch.device(backend.device):
        return Net().eval()


def open_runner(
    backend: GraphBackend,
    model: Callable[..., Any],
    *,
    metadata: dict[str, Input] | None = None,
    **compilation: Any,
) -> GraphRunner:
    config = validate_config(
        {
            "inputs": {"x": X},
            "metadata": metadata or {},
            "compilation": {"cudagraph_capture_sizes": [2, 4], **compilation},
            "report": {"repeats": 6, "sizes": [3, 4]},
            "device": backend.device.type,
        }
    )
    return CaptureSession(build_plan(config), model, backend, config).run()


def test_a_busy_while_does_not_make_the_first_size_slow(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ten measurements are those of both sizes, eager, graph and replay, once each."""
    asked = list[int]()
    busy = 10

    def time_calls(_: Any, call: Callable[[], Any], repeats: int, **__: Any) -> tuple[Any, Any]:
        call()
        asked.append(repeats)
        times = [500.0 if len(asked) <= busy else 5.0] * repeats
        return times, times

    monkeypatch.setattr(type(backend), "time_calls", time_calls)
    monkeypatch.setattr("cgplan.measure.bench.floor_of", lambda _: None)
    runner = open_runner(backend, net(backend))
    report = bench(runner)
    assert [record.eager.median for record in report.records] == [5.0, 5.0]
    assert [record.speedup for record in report.records] == [1.0, 1.0]
    assert sum(asked[: 2 * 5 * 5]) == 2 * 5 * 6  # repeats of each figure, over all rounds
    asked.clear()
    busy = 40
    assert [record.unsure for record in bench(runner).records] == [("eager", "graph", "replay")] * 2


def batch_of(backend: GraphBackend, rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, device=backend.device)


def test_nothing_is_run_for_an_unknown_baseline() -> None:
    assert set(BASELINE_NAMES) == set(BASELINES) - {"cgplan"}
    calls = Tally()
    runner = open_runner(select_backend("cpu"), lambda x: calls.append(1) or x * 2)
    calls.clear()
    with pytest.raises(ConfigError, match="'fast' to bench against"):
        bench(runner, against=("eager", "fast"))
    assert calls == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cudagraph_mode": "FULL_AND_PIECEWISE"},
        {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["after"]},
        {"cudagraph_copy_inputs": False},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_each_way_gives_the_models_numbers_and_the_runner_lives_on(
    backend: GraphBackend, options: dict[str, Any]
) -> None:
    """Also a traced runner: whatever the baselines compile, its trace is there afterwards."""
    torch._dynamo.reset()
    model = net(backend)
    runner = open_runner(backend, model, **options)
    weights = runner.graphs.facts.weight_bytes
    report = bench(runner, against=("bare", "eager"), seed=5)
    peers = report.peers
    assert runner.graphs.facts.weight_bytes == weights  # captured again
    assert (report.floor is None) == backend.is_tape
    if report.floor is not None:
        assert report.floor.weight_bytes == weights
        is_whole = options.get("cudagraph_mode") != "PIECEWISE"
        assert (FLOOR in render_text(report)) == is_whole
    assert peers is not None
    assert [way.name for way in peers.ways] == ["cgplan", "bare", "eager"]
    assert [(r.name, r.num_tokens) for r in peers.records] == [
        (w, n) for n in (3, 4) for w in ("cgplan", "bare", "eager")
    ]
    for record in peers.records:
        assert record.deviation is not None
        assert record.deviation < 1e-5
        assert (
            min(
                record.device.median,
                record.latency.median,
                record.host.median,
                record.first_call_seconds,
            )
            > 0
        )
    for way in peers.ways:
        assert way.failure is None
        assert way.ready_seconds is not None
        assert way.ready_seconds >= sum(
            r.first_call_seconds for r in peers.records if r.name == way.name
        )
    assert peers.capture_seconds is not None
    assert peers.ways[0].ready_seconds is not None
    assert 0 < peers.capture_seconds < peers.ways[0].ready_seconds
    assert (peers.seed, peers.keys) == (5, len(runner.plan.keys))
    if "cudagraph_copy_inputs" not in options:
        x = batch_of(backend, 3)
        torch.testing.assert_close(runner(x=x), model(x).detach())
    runner.close()


def test_on_the_tape_the_baselines_of_cuda_are_rows_that_say_so() -> None:
    backend = select_backend("cpu")
    report = bench(open_runner(backend, net(backend)), against=BASELINE_NAMES, seed=1)
    assert report.peers is not None
    assert {way.name: way.failure for way in report.peers.ways} == {
        "cgplan": None,
        "eager": None,
        "bare": None,
        "make_graphed_callables": "it needs CUDA, and this is cpu (tape)",
        "reduce-overhead": "it needs CUDA, and this is cpu (tape)",
    }
    assert {r.name for r in report.peers.records} == {"cgplan", "eager", "bare"}
    assert BenchReport.model_validate_json(report.model_dump_json()) == report
    shown = render_text(report)
    assert "random, seed 1; 5 rounds, 10 calls of each way and size" in shown
    assert "reduce-overhead                -" in shown
    assert "failed: it needs CUDA, and this is cpu (tape)" in shown
    assert max(map(len, render_text(report, 80).splitlines())) <= 80


def test_a_baseline_that_fails_is_a_row_that_says_why(backend: GraphBackend) -> None:
    """The piece that needs the host runs eagerly in the runner; as one graph the model cannot be captured."""

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (x.abs().sum().item() > 0)

    model = net(backend)
    model.after = nn.Sequential(model.after, Asks())
    options = {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["after"]}
    names = BASELINE_NAMES[:3] if backend.device.type == "cuda" else ("eager", "bare")
    runner = open_runner(backend, model, **options)
    report = bench(runner, against=names, seed=0)
    assert report.peers is not None
    failures = {way.name: way.failure for way in report.peers.ways}
    assert failures["cgplan"] is failures["eager"] is None
    for name in names[1:]:
        assert "aten::_local_scalar_dense" in str(failures[name])
        assert len(str(failures[name])) <= 160
        assert report.peers.of(name, 4) is None
    assert report.peers.of("eager", 4) is not None
    assert not torch.equal(
        torch.rand(4, device=backend.device), torch.rand(4, device=backend.device)
    )
    x = batch_of(backend, 4)
    torch.testing.assert_close(runner(x=x), model(x).detach())


@pytest.mark.parametrize("failing", ["cgplan", "eager"])
def test_where_one_way_fails_the_others_go_on(backend: GraphBackend, failing: str) -> None:
    """A long reason loses its middle: messages begin with what happened, or end with it."""
    fails = Tally([False])

    def forward(x: Tensor) -> Tensor:
        if fails[0]:
            raise ValueError("begin " + "x" * 300 + " end")
        return x * 2

    def step(_: int, __: int, text: str) -> None:
        fails[0] = text == f"{failing}, alone"

    peers = bench(open_runner(backend, forward), against=("eager",), seed=0, progress=step).peers
    assert peers is not None
    reason = next(str(way.failure) for way in peers.ways if way.name == failing)
    assert reason.endswith(" end")
    assert "ValueError: begin" in reason or failing == "cgplan"
    assert len(reason) == 160
    assert (peers.capture_seconds is None) == (peers.keys == 0) == (failing == "cgplan")
    assert {r.name for r in peers.records} == {"cgplan", "eager"} - {failing}


def test_models_that_read_metadata_find_it_in_each_way(backend: GraphBackend) -> None:
    def forward(x: Tensor) -> Tensor:
        context = get_forward_context()
        shift = context.derive("shift", x.device, lambda: context.metadata["shift"] * 2)
        return x + shift[:, None]

    runner = open_runner(backend, forward, metadata={"shift": SHIFT})
    peers = bench(runner, against=("eager", "bare"), seed=0).peers
    assert peers is not None
    assert [r.deviation for r in peers.records] == [0.0] * 6


def test_a_call_by_hand_takes_new_tensors(backend: GraphBackend) -> None:
    """Else it would be compared with a runner that does more."""
    model = net(backend)
    runner = open_runner(backend, model)
    x = batch_of(backend, 3)
    batch = BenchBatch(3, {"x": x}, {}, {}, runner.route({"x": x}).unpadded)
    way = Baseline("bare")
    with torch.no_grad(), way.undo:
        bare(Comparison(runner, [batch]), way)
        for _ in range(2):
            x.normal_()
            same(way.calls[3](), model(x))


def test_each_way_is_priced_with_nothing_else_ready(backend: GraphBackend) -> None:
    runner = open_runner(backend, net(backend))
    runner.suspend()
    empty, found = used_bytes(backend), {}

    def look(_: int, __: int, step: str) -> None:
        found[step] = used_bytes(backend) - empty

    runner.recapture()
    peers = bench(runner, against=("bare", "eager"), seed=3, progress=look).peers
    assert peers is not None
    slack = 0 if backend.device.type == "cpu" else 64 << 20  # libraries' workspaces stay
    assert all(abs(found[f"{name}, alone"]) <= slack for name in ("cgplan", "bare", "eager"))
    assert found["round 1"] > 0, "then they are there together"
    ours, by_hand, eager = peers.ways
    assert ours.memory_bytes
    assert by_hand.memory_bytes
    assert eager.memory_bytes == 0


def test_rounds_are_in_random_order_and_the_seed_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, original = list[tuple[str, int]](), dict(BASELINES)

    def noted(name: str, size: int, call: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: seen.append((name, size)) or call()

    def noting(name: str) -> Callable[[Comparison, Baseline], None]:
        def prepare(bench: Comparison, way: Baseline) -> None:
            original[name](bench, way)
            way.calls = {size: noted(name, size, call) for size, call in way.calls.items()}

        return prepare

    for name in original:
        monkeypatch.setitem(BASELINES, name, noting(name))
    orders, runner = [], open_runner(select_backend("cpu"), lambda x: x * 2)
    for seed in (1, 1, 2, None):
        rounds: list[list[tuple[str, int]]] = []

        def step(_: int, __: int, text: str, rounds: list[list[tuple[str, int]]] = rounds) -> None:
            if "round" in text:
                rounds.append(seen.copy())
                seen.clear()

        peers = bench(runner, against=("eager", "bare"), seed=seed, progress=step).peers
        assert peers is not None
        assert seed in (None, peers.seed)
        orders.append([list(dict.fromkeys(each)) for each in rounds[1:]])
        assert len(orders[-1]) == 4
        pairs = {(name, size) for name in ("cgplan", "eager", "bare") for size in (3, 4)}
        assert all(set(each) == pairs for each in orders[-1])
        assert len(set(map(tuple, orders[-1]))) > 1
    assert orders[0] == orders[1] != orders[2]


def test_wrong_results_show(backend: GraphBackend) -> None:
    """A graph that froze what the model computes anew, say."""
    factor = Tally([1.0])

    def change(_: int, __: int, step: str) -> None:
        factor[0] = 3.0 if step.startswith("round") else 1.0

    runner = open_runner(backend, lambda x: x * factor[0])
    peers = bench(runner, against=("eager", "bare"), seed=0, progress=change).peers
    assert peers is not None
    deviations = {(r.name, r.num_tokens): r.deviation for r in peers.records}
    assert deviations["bare", 4] == deviations["cgplan", 4] == 0
    assert deviations["eager", 4]
    assert deviations["eager", 4] > 0.1


class Counts(nn.Module):
    """Adds one to a counter on each call, writes into its input, and draws from a generator of its own, if asked."""

    def __init__(self, *does: str) -> None:
        super().__init__()
        self.does = does
        self.register_buffer("count", torch.zeros(()))
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        if "input" in self.does:
            x.mul_(1.5)
        if "state" in self.does:
            self.count.add_(1)
        if "random" in self.does:
            x = x + torch.rand(x.shape, device=x.device)
        if "own" in self.does:
            x = x + torch.rand(x.shape, device=x.device, generator=self.generator)
        return x + self.count


@pytest.mark.parametrize("does", ["input state", "random", "own", "input state random own"])
def test_models_whose_next_call_says_something_else(backend: GraphBackend, does: str) -> None:
    """Each compared call starts from the same inputs, state and seed; afterwards they are as they were."""
    model = Counts(*does.split()).to(backend.device)
    model.generator = torch.Generator(backend.device).manual_seed(3)
    runner = open_runner(backend, model)
    generators = (model.generator, torch.default_generator)
    before = [generator.get_state() for generator in generators]
    bench(runner)
    same([generator.get_state() for generator in generators], before)
    count = model.count.clone()
    batches = [examples(runner, size)[0] for size in (3, 4)]
    inputs = [batch.inputs["x"].clone() for batch in batches]
    peers = bench_baselines(runner, batches, ("eager", "bare"), seed=0)
    found = {(r.name, r.num_tokens): (r.deviation, r.not_comparable) for r in peers.records}
    padded = found.pop(("cgplan", 3))
    assert len(found) == 5
    assert set(found.values()) == {(0.0, None)}
    if padded != (0.0, None):
        assert "random" in does or "own" in does
        assert padded == (None, REDRAWN)
    same((model.count, [batch.inputs["x"] for batch in batches]), (count, inputs))


def test_padding_that_draws_other_numbers(backend: GraphBackend) -> None:
    """The first row gets what the last one has drawn: of three rows another one than of four."""
    runner = open_runner(backend, lambda x: x + torch.rand(x.shape, device=x.device).flip(0))
    peers = bench(runner, against=("eager", "bare"), seed=0).peers
    assert peers is not None
    reasons = {
        (r.name, r.num_tokens): r.not_comparable for r in peers.records if r.deviation is None
    }
    assert reasons == {("cgplan", 3): REDRAWN}
    assert [r.deviation for r in peers.records if r.deviation is not None] == [0.0] * 5
    shown = render_text(peers_report := bench(runner, against=("eager",), seed=0), 80)
    assert "Not comparable" in shown
    assert "cgplan 3" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert BenchReport.model_validate_json(peers_report.model_dump_json()) == peers_report


def test_a_model_that_cannot_be_compared_with_itself(backend: GraphBackend) -> None:
    """Its state lies where nobody looks: no figure, but the reason, for its own code as for the others."""

    hidden = threading.local()  # which no walk enters
    hidden.state = torch.zeros((), device=backend.device)

    def forward(x: Tensor) -> Tensor:
        hidden.state.add_(1)
        return x + hidden.state

    runner = open_runner(backend, forward, verify="off")
    peers = bench(runner, against=("eager", "bare"), seed=0).peers
    assert peers is not None
    assert len(peers.records) == 6
    for record in peers.records:
        assert record.deviation is None
        assert "run twice from the same inputs, state and seed, gives different" in str(
            record.not_comparable
        )
        assert record.device.median > 0


def test_outputs_of_another_structure_are_told(backend: GraphBackend) -> None:
    wraps = Tally([False])

    def change(_: int, __: int, step: str) -> None:
        wraps[0] = step.startswith("round")

    runner = open_runner(backend, lambda x: (x * 2,) if wraps[0] else x * 2)
    peers = bench(runner, against=("eager",), seed=0, progress=change).peers
    assert peers is not None
    for record in peers.records:
        assert (record.deviation is None) == (record.name == "eager")
        assert (record.not_comparable or "another structure").count("another structure") == 1


def test_reduce_overhead_leaves_no_mark_on_the_model() -> None:
    """Nothing is compiled here: that comes with the first call."""
    backend = select_backend("cpu")
    model = net(backend)
    runner = open_runner(backend, model)
    way = Baseline("reduce-overhead")
    with way.undo:
        reduce_overhead(Comparison(runner, []), way)
        assert model.held[0]._dynamo_static_input_type == "unguarded"
        assert not hasattr(model.before.weight, "_dynamo_static_input_type"), (
            "parameters are static anyway"
        )
    assert not hasattr(model.held[0], "_dynamo_static_input_type")


# --- on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_all_baselines_on_a_gpu(mode: str) -> None:
    """The traced runner's results are those of the model after all of them, and nobody's graphs are damaged."""
    torch._dynamo.reset()
    backend = select_backend("cuda")
    model = net(backend)
    runner = open_runner(backend, model, cudagraph_mode=mode)
    peers = bench(runner, against=BASELINE_NAMES, seed=0).peers
    assert peers is not None
    assert {way.name: (way.failure, way.note) for way in peers.ways} == dict.fromkeys(
        ("cgplan", *BASELINE_NAMES), (None, None)
    )
    found = {(r.name, r.num_tokens): r for r in peers.records}
    assert len(found) == 10
    assert all(_small(record) for record in found.values())
    assert found["reduce-overhead", 4].first_call_seconds > found["bare", 4].first_call_seconds
    for rows in (3, 4, 2):
        x = batch_of(backend, rows)
        torch.testing.assert_close(runner(x=x), model(x).detach(), rtol=1e-4, atol=1e-5)


def _small(record: BaselineRecord) -> bool:
    return record.deviation is not None and record.deviation < 1e-2  # inductor may use TF32


@pytest.mark.gpu
def test_metadata_reaches_all_baselines_on_a_gpu() -> None:
    backend = select_backend("cuda")
    weight = torch.randn(WIDTH, WIDTH, device=backend.device)

    def forward(x: Tensor) -> Tensor:
        return x @ weight + get_forward_context().metadata["shift"][:, None]

    runner = open_runner(backend, forward, metadata={"shift": SHIFT})
    peers = bench(runner, against=BASELINE_NAMES, seed=0).peers
    assert peers is not None
    assert [way.failure for way in peers.ways[:4]] == [None] * 4
    assert all(_small(record) for record in peers.records)


class Positions(torch.nn.Module):
    """Each run takes the next row of a cache of 40."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))
        self.register_buffer("rows", torch.randn(40, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.at.add_(1)
        return x + self.rows[self.at]


class Keeps(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(x.clone())
        return x + float(len(self.kept))


def test_turns_begin_in_one_state_and_leave_it(backend: GraphBackend) -> None:
    positions, keeps = Positions(), Keeps()
    model = torch.nn.Sequential(positions, keeps, torch.nn.Linear(8, 8)).to(backend.device).eval()
    runner = cgplan.capture(
        model,
        {"input": cgplan.Input(shape=("num_tokens", 8), dtype="float32", pad=0)},
        compilation={
            "cudagraph_mode": "PIECEWISE", "splitting_modules": ["1"],
            "cudagraph_capture_sizes": [2, 4], "verify": "off",
        },
        device=backend.device.type,
    )  # fmt: skip
    runner(torch.zeros(4, 8, device=backend.device))
    runner(torch.zeros(2, 8, device=backend.device))
    before = positions.at.item(), len(keeps.kept)
    report = bench(runner, against=("eager",), seed=1)
    assert len(check_up(runner).records) == 2
    assert (positions.at.item(), len(keeps.kept)) == before
    assert report.peers is not None
    for record in report.peers.records:
        assert record.deviation is not None
        assert record.deviation < 1e-5
    runner.close()


class ShortCache(torch.nn.Module):
    """It has room for three calls, which Python and a tensor count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))
        self.register_buffer("rows", torch.zeros(3, 8))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls == len(self.rows):
            raise RuntimeError("the cache is full")
        self.calls += 1
        self.rows.index_copy_(0, self.at, x[:1])
        self.at.add_(1)
        return x + self.rows[0]


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_a_bench_of_a_model_that_counts_its_calls_leaves_no_trace(
    backend: GraphBackend, policy: str
) -> None:
    model = ShortCache().to(backend.device).eval()
    runner = cgplan.capture(
        model,
        {"x": cgplan.Input(shape=("num_tokens", 8), dtype="float32", pad=0)},
        compilation={
            "cudagraph_capture_sizes": [1, 2, 4, 8], "verify": "off", "capture_policy": policy,
        },
        report={"repeats": 3, "warmups": 1},
        device=backend.device.type,
    )  # fmt: skip
    with closing(runner):
        assert [record.mode.name for record in bench(runner).records] == ["FULL"] * 4
        assert runner.stats.captures == 4
    assert (model.at.item(), model.calls) == (0, 0)
    assert not model.rows.any()


# --- what of a step runs inside graphs, and the floor of a replay ----------------------------------------------


def test_a_check_up_has_the_floor_of_its_keys(backend: GraphBackend) -> None:
    with torch.no_grad():
        model = torch.nn.Linear(8, 8).to(backend.device)
        inputs = {"input": cgplan.Input(shape=("num_tokens", 8), dtype="float32", pad=0)}
        runner = cgplan.capture(
            model,
            inputs,
            compilation={"cudagraph_capture_sizes": [2, 4]},
            device=backend.device.type,
        )
        report = check_up(runner)
        assert [record.inside for record in report.records] == [1.0, 1.0]
        assert (report.floor is None) is backend.is_tape
        floor = FloorRecord(weight_bytes=4_000_000, bytes_per_us=4e6, kernel_us=0.5)
        text = render_text(report.model_copy(update={"floor": floor}))
        table = text[text.index("What a replay cannot be faster than") :]
        assert "1.00us" in table
        nodes = report.capture.records[0].nodes
        assert nodes is not None
        assert f"{nodes * 0.5:.0f}ns" in table or f"{nodes * 0.5:.2f}us" in table
        runner.close()


@pytest.mark.parametrize(
    ("measure", "policy"), [(bench, "eager"), (bench, "lazy"), (check_up, "eager")]
)
def test_constants_of_the_floor_are_measured_before_the_model(
    monkeypatch: pytest.MonkeyPatch, measure: Callable[[GraphRunner], Any], policy: str
) -> None:
    order = list[str]()

    def floor(runner: GraphRunner) -> FloorRecord:
        order.append("floor")
        weights = runner.graphs.facts.weight_bytes
        return FloorRecord(weight_bytes=weights, bytes_per_us=1, kernel_us=1)

    def time_calls(self: TapeBackend, *args: Any, **options: Any) -> Any:
        order.append("model")
        return own_times(self, *args, **options)

    own_times = TapeBackend.time_calls
    monkeypatch.setattr("cgplan.measure.bench.floor_of", floor)
    monkeypatch.setattr(TapeBackend, "time_calls", time_calls)
    backend = select_backend("cpu")
    with closing(open_runner(backend, net(backend), capture_policy=policy)) as runner:
        found = measure(runner).floor
    assert found is not None
    assert found.weight_bytes > 0  # known once a key is captured
    assert order[:2] == ["floor", "model"]
    assert order.count("floor") == 1


def open_small() -> cgplan.GraphRunner:
    backend = select_backend("cpu")
    return open_runner(backend, lambda x: x * 2, cudagraph_mode="FULL")


def test_the_floor_is_left_out_without_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with closing(open_small()) as runner:
        monkeypatch.setattr(TapeBackend, "is_tape", False)
        monkeypatch.setattr("cgplan.measure.bench.COPIED_BYTES", 1 << 20)
        monkeypatch.setattr(torch, "zeros", refuse)
        assert floor_of(runner) is None


@pytest.mark.parametrize("busy", [None, 0, 1])
def test_the_floor_is_left_out_on_a_busy_device(
    monkeypatch: pytest.MonkeyPatch, busy: int | None
) -> None:
    """``busy``: during the copies, or the kernels."""
    rounds = list[Any]()

    def times(*args: object, **options: object) -> Any:
        rounds.append([1000.0] * 4 + [(2100.0 if len(rounds) == busy else 1900.0)] * 6)
        return rounds[-1], []

    with closing(open_small()) as runner:
        monkeypatch.setattr(TapeBackend, "is_tape", False)
        monkeypatch.setattr("cgplan.measure.bench.COPIED_BYTES", 1 << 20)
        monkeypatch.setattr(TapeBackend, "time_calls", times)
        floor = floor_of(runner)
    assert (floor is None) == (busy is not None)
    if floor is not None:
        assert floor.kernel_us == 1.9
        assert floor.bytes_per_us == pytest.approx((2 << 20) / 1900)


class Napping(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return x + 1


def test_a_check_up_tells_the_share_of_graphs_and_times_that_noise_decides(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Napping(), torch.nn.Linear(8, 8))
    runner = cgplan.capture(
        model.to(backend.device),
        {"input": cgplan.Input(shape=("num_tokens", 8), dtype="float32", pad=0)},
        compilation={
            "cudagraph_capture_sizes": [4], "cudagraph_mode": "PIECEWISE", "splitting_modules": ["1"],
        },
        device=backend.device.type,
    )  # fmt: skip
    [place] = check_up(runner).outside
    assert place.startswith("1, at ")

    def with_times(*times: float) -> DoctorReport:
        def time_calls(
            call: Callable[[], object], repeats: int, **_: object
        ) -> tuple[list[float], list[float]]:
            began = time.perf_counter()
            call()
            base = 3.0 if time.perf_counter() - began > 0.002 else 1.0
            measured = [base * times[at % len(times)] for at in range(repeats)]
            return measured, measured

        monkeypatch.setattr(runner.backend, "time_calls", time_calls)
        return check_up(runner)

    [record] = with_times(5.0, 6.0).records
    assert (record.inside, record.speedup, record.unsure) == (1 / 3, 1.0, ())
    report = with_times(1.0, 3.0, 3.0)
    text = " ".join(render_text(report).split())
    assert "Not to be trusted" in text
    assert "eager at 4" in text
    assert "unsure -" in text  # neither a speed-up nor a share
    assert "of a step runs" not in text
    assert ("say little about a GPU" in text) is backend.is_tape
    runner.close()


def test_calls_that_are_compared_go_on_during_a_bench(backend: GraphBackend) -> None:
    runner = open_runner(backend, net(backend), verify="always")
    x = torch.ones(2, WIDTH, device=backend.device)
    done = []

    def call(*_: object) -> None:
        thread = threading.Thread(target=runner, args=(x,))
        thread.start()
        thread.join(10)
        done.append(not thread.is_alive())

    with closing(runner):
        bench(runner, progress=call)
    assert done
    assert all(done)
