"""Costs that are known before a capture: estimated from recordings, and calibrated by captures that are freed again. Costs that captures measured, which were freed again."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checks import MIB, Tally, back_at, reserved
from costing import FULL, METADATA, PIECEWISE, WIDE, Chain, config_of, decoder_config, key
from decoder import build
from devices import WithDriver
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

from cgplan.backends.tape import TapeBackend, TapePool
from cgplan.cli.main import app
from cgplan.config import Config, Input, validate_config
from cgplan.errors import CaptureError, CaptureMemoryError, HostSyncError, ModelError
from cgplan.graphs.wrapper import CUDAGraphWrapper
from cgplan.measure.costs import AllocationLog, bytes_per_node, calibrate, estimate, fake_tensors
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.piecewise.breakable import eager_break_during_capture
from cgplan.piecewise.routes import SplitRoute
from cgplan.planning import Plan, build_plan
from cgplan.pricing import NODE_BYTES, Allocation, CachingPool, GraphCosts, Recording, static_bytes
from cgplan.runner.session import CaptureSession

pytestmark = pytest.mark.usefixtures("quiet_collector")


def estimated(model: Callable[..., Any], config: Config) -> GraphCosts:
    return estimate(config, model, build_plan(config))


# --- the allocation log ---------------------------------------------------------------------------------------


def logged(forward: Callable[[], Any]) -> AllocationLog:
    """What a forward takes and gives back, with its output dropped at the end."""
    with fake_tensors() as fake, torch.no_grad():
        log = AllocationLog(fake)
        log.run(SplitRoute("full", forward, forward, forward), {})
    return log


def test_results_of_operators_are_logged_at_their_sizes() -> None:
    x = torch.zeros(8)

    def forward() -> Tensor:
        y = x.double()  # 64 bytes
        z = y.reshape(2, 4)[0] + 1  # a view takes nothing, its sum 32
        del y
        return z.half()  # 8, while z lives

    log = logged(forward)
    assert [event.nbytes for event in log.events] == [64, 32, None, 8, None, None]
    first, second = log.events[0].block, log.events[1].block
    assert (log.events[2].block, log.events[4].block) == (first, second)
    assert not log.hidden
    assert log.operators == 3


def test_views_of_weights_and_results_that_share_memory_take_nothing() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    log = logged(lambda: weight.t()[0].view(2, 2))
    assert (log.events, log.operators) == ([], 0)
    log = logged(lambda: torch.zeros(16).chunk(4)[1] + 1)
    assert [event.nbytes for event in log.events if event.nbytes is not None] == [64, 16]


def test_temporaries_of_an_operator_with_python_code_are_left_out() -> None:
    library = torch.library.Library("cgplan_tests_estimate", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: (x.double() + 1).float(), "CPU")
    x = torch.zeros(8)
    log = logged(lambda: torch.ops.cgplan_tests_estimate.twice(x) + 1)
    name = "cgplan_tests_estimate::twice"
    assert [event.nbytes for event in log.events] == [32, 32, None, None], "its result and the sum"
    assert log.hidden == {name: 128}


# --- recordings -----------------------------------------------------------------------------------------------


def recording_of(tokens: int, *events: Allocation) -> Recording:
    return Recording(FULL, False, tokens, 1, events)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=5),
    st.integers(1, 300),
)
def test_other_sizes_lie_on_the_line_through_two_recordings(
    blocks: list[tuple[int, int]], num_tokens: int
) -> None:
    def recorded(tokens: int) -> Recording:
        log = [Allocation(i, fixed + each * tokens) for i, (fixed, each) in enumerate(blocks)]
        return recording_of(tokens, *log, Allocation(0, None))

    wanted = list(recorded(num_tokens).events)
    assert recorded(4).scaled(recorded(100), num_tokens) == wanted
    assert recorded(100).scaled(recorded(4), num_tokens) == wanted


def test_where_two_recordings_differ_bytes_are_in_proportion() -> None:
    one = recording_of(4, Allocation(0, 40), Allocation(0, None))
    other = recording_of(8, Allocation(0, 80), Allocation(1, 8), Allocation(0, None))
    assert one.scaled(other, 6) == one.scaled(one, 6) == [Allocation(0, 60), Allocation(0, None)]


# --- pools, worked out by hand --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "pool"),
    [
        (2, 2),  # two of 1 MiB in a segment of 2
        (3, 20 + 2),  # two of 1.5 MiB, in a segment of 20; the smaller sizes need the segment of 2
        (19, 20 + 2),  # two of 9.5 MiB
        (20, 20 + 2),  # two of 10 MiB, in segments of their own; smaller sizes fit into them
        (64, 64 + 2),
    ],
)
def test_pools_of_a_chain_of_layers(rows: int, pool: int) -> None:
    costs = estimated(Chain(5), config_of([1, 2, rows] if rows > 2 else [rows]))
    assert costs.pool_bytes(FULL, rows) == pool * MIB


@pytest.mark.parametrize("recorded", [[2, 64], [2, 8, 64]])
@pytest.mark.parametrize("layers", [1, 6])
def test_a_size_that_was_not_recorded_costs_what_it_does_when_it_is(
    layers: int, recorded: list[int]
) -> None:
    between = estimated(Chain(layers), config_of(recorded))
    for rows in (3, 5, 19, 37):
        itself = estimated(Chain(layers), config_of([2, rows]))
        assert between.pool_bytes(FULL, rows) == itself.pool_bytes(FULL, rows)


def test_a_larger_size_than_those_recorded_costs_what_it_does_when_it_is() -> None:
    """A plan for traffic weighs sizes up to ``max_num_batched_tokens``."""
    beyond = estimated(Chain(6), config_of([2, 8]))
    most = config_of([2]).scheduler.max_num_batched_tokens
    itself = estimated(Chain(6), config_of([2, most]))
    assert most > 100
    assert beyond.pool_bytes(FULL, most) == itself.pool_bytes(FULL, most)
    assert not beyond.of([key(most)]).extrapolated


def test_what_was_not_recorded_is_priced_as_what_was() -> None:
    costs = estimated(Chain(3), config_of([2, 64]))
    full, piecewise = ((mode, BatchDescriptor(8, 8, False)) for mode in (FULL, PIECEWISE))
    assert costs.pool_bytes(PIECEWISE, 8) == costs.pool_bytes(FULL, 8) > 0
    assert costs.driver_bytes(piecewise) == costs.driver_bytes(full) > 0
    assert costs.seconds(piecewise) == costs.seconds(full) > 0
    [note] = costs.notes
    assert note.startswith("the costs are estimated as on an H200")


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_nodes_are_stood_in_for_by_operators(compiler: str) -> None:
    """Inductor's graph is recorded as traced."""
    config = config_of(
        [2, 4, 8], cudagraph_mode="FULL", cudagraph_num_of_warmups=2, compiler=compiler
    )
    costs = estimated(Chain(3), config)
    assert costs.driver_bytes(key(4)) == 3 * NODE_BYTES
    assert costs.seconds(key(4)) == pytest.approx(3 * (15e-6 + 2 * 17e-6))
    assert costs.workspace_bytes == 32 * MIB
    assert costs.static_bytes(8) == static_bytes(config, 8) == 8 * WIDE * 4
    assert costs.estimated
    for words in (
        "2 keys recorded on the CPU",
        "2 KiB of driver memory",
        "32 MiB of cuBLAS workspace",
        "not seen",
    ):
        assert words in costs.source
    assert "left out" not in costs.source
    assert ("without inductor" in costs.source) == (compiler == "inductor")
    nothing = estimated(Chain(3), config_of([2, 8], cudagraph_mode="NONE"))
    assert (
        nothing.of(()).total_bytes,
        nothing.pool_bytes(FULL, 8),
        nothing.driver_bytes(key(4)),
    ) == (0, 0, 0)


def test_recording_leaves_no_memory_and_a_model_that_works() -> None:
    model = Chain(2)
    config = config_of(
        [2, 8], piecewise="modules", cudagraph_mode="PIECEWISE", splitting_modules=["inner"]
    )
    outer = nn.Module()
    outer.inner = model
    outer.forward = lambda x: outer.inner(x) * 2  # type: ignore[method-assign, assignment]
    before = vars(model).get("forward")
    costs = estimate(config, outer, build_plan(config))
    assert costs.driver_bytes(key(8, PIECEWISE)) == NODE_BYTES  # the doubling alone is captured
    assert vars(model).get("forward") is before
    torch.testing.assert_close(outer(torch.ones(2, 3)), torch.full((2, 3), 6.0))


def test_a_model_that_fails_is_an_error() -> None:
    def model(x: Tensor) -> Tensor:
        raise ValueError("no")

    with pytest.raises(ModelError, match="ValueError: no") as caught:
        estimated(model, config_of([2, 4]))
    assert "Check the declared inputs, x [" in caught.value.remedy


# --- a whole model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"splitting_modules": ["layers.*.self_attn"]}], ids=["ops", "modules"]
)
def test_what_a_tape_captures_for_a_decoder_runs_through_the_allocator_as_estimated(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every key of the plan, recorded in capture order into one pool, against the estimate from a few of them."""
    model, config = build(num_layers=1, num_blocks=16), decoder_config("PIECEWISE", [1, 2, 8, 64])
    config = config.model_copy(
        update={"compilation": config.compilation.model_copy(update=options)}
    )
    plan = build_plan(config)
    costs, log, take, numbers = (
        estimate(config, model, plan),
        list[Allocation](),
        TapePool.take,
        itertools.count(),
    )

    def logging(pool: TapePool, nbytes: int) -> torch.UntypedStorage:
        storage, number = take(pool, nbytes), next(numbers)
        log.append(Allocation(number, nbytes))
        weakref.finalize(storage, lambda: log.append(Allocation(number, None)))
        return storage

    monkeypatch.setattr(TapePool, "take", logging)
    runner = CaptureSession(plan, model, TapeBackend(), config).run()
    pool = CachingPool()
    pool.run(log)
    found = costs.of(plan.keys)
    assert sum(k.pool_bytes for k in found.keys) == pool.reserved
    assert sum(k.driver_bytes for k in found.keys) == NODE_BYTES * sum(
        r.nodes or 0 for r in runner.report.records
    )
    assert found.static_bytes == runner.report.static_bytes


@pytest.mark.parametrize(
    ("mode", "pool_mib", "operators"), [("FULL", 2, 1050), ("FULL_AND_PIECEWISE", 2, 1444)]
)
def test_a_decoder_costs_what_it_did_when_forwards_were_recorded_on_a_tape(
    mode: str, pool_mib: int, operators: int
) -> None:
    config = decoder_config(mode, [1, 2, 4, 8, 16, 32, 64])
    plan = build_plan(config)
    costs = estimate(config, build(num_layers=2, num_blocks=16), plan)
    found = costs.of(plan.keys)
    assert sum(k.pool_bytes for k in found.keys) == pool_mib * MIB
    assert sum(k.driver_bytes for k in found.keys) == NODE_BYTES * operators
    assert "cgplan::attention" in costs.source, "whose temporaries are left out"


def test_a_model_without_memory_is_estimated_alike() -> None:
    config = decoder_config("FULL_AND_PIECEWISE", [4, 16])
    plan, shape = build_plan(config), {"num_layers": 1}
    usual = estimate(config, build(**shape, num_blocks=64), plan).of(plan.keys)
    with fake_tensors():
        model = build(**shape, num_blocks=1 << 30).to(torch.float32)  # terabytes
        assert estimate(config, model, plan).of(plan.keys) == usual


def test_real_weights_and_caches_stay_as_they_are() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x + self.count

    model = Counts()
    estimated(model, config_of([2, 4]))
    assert model.count == 0


def test_wrapped_segments_and_functions_that_break_a_capture() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.segment = CUDAGraphWrapper(lambda x: x + 1, PIECEWISE)

        def forward(self, x: Tensor) -> Tensor:
            return self.segment(x * 2) * 3

    @eager_break_during_capture
    def middle(x: Tensor) -> Tensor:
        return (x * 2).exp() - 1

    costs = estimated(
        Wrapped(), config_of([2, 8], cudagraph_mode="PIECEWISE", piecewise="wrappers")
    )
    assert costs.driver_bytes(key(8, PIECEWISE)) == NODE_BYTES
    costs = estimated(lambda x: middle(x + 1) * 3, config_of([2, 8], cudagraph_mode="PIECEWISE"))
    assert costs.driver_bytes(key(8, PIECEWISE)) == 2 * NODE_BYTES


@pytest.mark.parametrize(
    ("forward", "error", "words"),
    [
        (lambda x: x * x.sum().item(), HostSyncError, "needs the host"),
        (lambda x: x * x.cpu(), HostSyncError, r"Tensor.cpu\(\) needs the host"),
        (lambda x: torch.ops.cgplan_tests_estimate.unknown(x), ModelError, "unknown"),
    ],
)
def test_forwards_that_cannot_be_estimated(
    forward: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        estimated(forward, config_of([2, 4]))


def test_an_eager_piece_that_reads_values_is_an_error_with_a_remedy() -> None:
    @eager_break_during_capture
    def piece(x: Tensor) -> Tensor:
        return x * x.sum().item()

    with pytest.raises(CaptureError, match="without values of tensors") as caught:
        estimated(lambda x: piece(x + 1) * 3, config_of([2, 8], cudagraph_mode="PIECEWISE"))
    assert "--costs measure" in str(caught.value.remedy)


def test_a_decoder_with_adapters_costs_more_with_them() -> None:
    lora_ids = {"lora_ids": {"shape": ["num_tokens"], "dtype": "int64", "pad": -1}}
    config = decoder_config(
        "FULL_DECODE_ONLY", [4, 16], lora={"max_loras": 2}, metadata={**METADATA, **lora_ids}
    )
    plan = build_plan(config)
    costs = estimate(config, build(num_layers=1, num_blocks=16, max_loras=2), plan)
    without, with_them = (
        costs.driver_bytes(next(k for k in plan.keys if k[1].has_lora is lora))
        for lora in (False, True)
    )
    assert 0 < without < with_them


def test_a_larger_size_is_never_estimated_to_need_less() -> None:
    """A block just below 10 MiB takes a segment of 20, a larger one only itself; a search relies on the order."""
    inputs = {"x": Input(shape=("num_tokens", 1024), dtype="float32", pad=0)}
    compilation = {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [64, 512, 4000]}
    config = validate_config({"inputs": inputs, "compilation": compilation, "device": "cpu"})
    costs = estimate(config, lambda x: x + 1, build_plan(config))
    pools = [costs.pool_bytes(CUDAGraphMode.FULL, size) for size in range(1, 4000, 13)]
    assert pools == sorted(pools)


# --- on the command line --------------------------------------------------------------------------------------

BUILDS = """
import torch

class Plus(torch.nn.Linear):
    def __init__(self, what):
        super().__init__(4, 4)
        if what == "too large":
            raise MemoryError("no more")
        if what == "reads values":
            self.scales = [scale.item() for scale in torch.linspace(1, 2, 3)]
"""


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("fits", 0, "on tensors without memory"),
        (
            "reads values",
            0,
            "built with memory for its weights; without, building fails: aten._local_scalar_dense",
        ),
        (
            "too large",
            CaptureMemoryError.exit_code,
            "the model does not fit into this machine's memory",
        ),
    ],
)
def test_a_model_is_built_without_memory_if_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, code: int, words: str
) -> None:
    (tmp_path / "models.py").write_text(BUILDS)
    config = {
        "model": {"target": "models.py:Plus", "kwargs": {"what": what}},
        "inputs": {"input": {"shape": ["num_tokens", 4], "dtype": "float32", "pad": 0}},
        "compilation": {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [8, 16]},
    }
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["inspect", "--config", "it.yaml", "--costs", "estimate"])
    assert result.exit_code == code, result.output
    assert words in " ".join(result.stderr.split())


# --- the driver's chunks --------------------------------------------------------------------------------------


def readings(rate: float, nodes: int, chunk: int, room: float, times: int) -> list[tuple[int, int]]:
    used = [-room + rate * nodes * (i + 1) for i in range(times)]
    return [(nodes * (i + 1), max(-(-int(u) // chunk) * chunk, 0)) for i, u in enumerate(used)]


@settings(max_examples=200, deadline=None)
@given(
    st.floats(300, 3000),
    st.integers(20, 2000),
    st.sampled_from([1 << 16, 1 << 21]),
    st.floats(0, 2),
)
def test_bytes_of_a_node_are_found_in_spite_of_chunks(
    rate: float, nodes: int, chunk: int, room: float
) -> None:
    enough = int((room + 6) * chunk / (rate * nodes)) + 16
    found = bytes_per_node(readings(rate, nodes, chunk, room * chunk, enough))
    span = rate * nodes * enough - room * chunk - 2 * chunk  # of what the readings tell, at least
    assert abs(found - rate) <= rate * 1.1 * chunk / span + 1


def test_without_a_chunk_nothing_is_known_and_nothing_counted() -> None:
    assert bytes_per_node([(10, 0), (20, 0)]) == 0
    assert bytes_per_node([]) == 0


def test_with_few_chunks_another_gpus_figure_decides() -> None:
    assert bytes_per_node([(100, 0), (200, MIB)]) == NODE_BYTES
    one_chunk = [(1000 * i, MIB) for i in range(1, 11)]
    assert bytes_per_node(one_chunk) == pytest.approx(
        MIB / 9000
    )  # 9,000 nodes fitted in: no more than that


def test_chunks_of_several_sizes_give_the_average() -> None:
    assert bytes_per_node([(1, 100), (2, 110), (3, 800), (4, 810), (5, 1500)]) == pytest.approx(
        1400 / 4
    )


# --- calibration ----------------------------------------------------------------------------------------------


def predicted_plan(plan: Plan, costs: GraphCosts) -> Plan:
    return plan.model_copy(update={"predicted": costs.of(plan.keys)})


@pytest.mark.parametrize(
    ("chunk", "keeps"), [(1, False), (4096, True), (100_000, False), (100_000, True)]
)
def test_calibrated_costs_predict_the_whole_ladder(chunk: int, keeps: bool) -> None:
    device = WithDriver(rate=1500, chunk=chunk, keeps=keeps, workspace=3 * MIB)
    config = config_of([1, 2, 3, 4, 6, 8, 12, 16], ("num_tokens", 1024))
    plan, model = build_plan(config), Chain(40)
    costs = calibrate(config, model, device, plan)
    assert costs.workspace_bytes == pytest.approx(3 * MIB, abs=16 * 1024 * 4)
    assert costs.driver_bytes(plan.keys[0]) == pytest.approx(40 * 1500, abs=20 + 0.05 * chunk)
    fresh = WithDriver(rate=1500, chunk=chunk, workspace=3 * MIB)
    report = CaptureSession(predicted_plan(plan, costs), model, fresh, config).run().report
    cost = costs.of(plan.keys)
    assert sum(k.pool_bytes for k in cost.keys) == report.pool_bytes
    assert cost.static_bytes == report.static_bytes
    assert cost.total_bytes == pytest.approx(
        report.graph_bytes, abs=chunk + 0.05 * report.graph_bytes
    )
    assert "measured on" in str(report)


@pytest.mark.parametrize("by", ["calibration", "report"])
@pytest.mark.parametrize("sizes", [[1], [6], [2, 4, 12]])
def test_plans_of_other_sizes_on_the_tape_cost_what_measured_ones_tell(
    sizes: list[int], by: str
) -> None:
    """Those of a plan's sizes that were measured tell what each of the others would cost by itself."""
    whole, model, device = (
        config_of([1, 2, 3, 4, 6, 8, 12, 16], ("num_tokens", 1024)),
        Chain(40),
        TapeBackend(),
    )
    plan = build_plan(whole)
    if by == "report":
        costs = GraphCosts.from_report(
            CaptureSession(plan, model, device, whole).run().report, whole
        )
    else:
        costs = calibrate(whole, model, device, plan)
    config = config_of(sizes, ("num_tokens", 1024))
    part = build_plan(config)
    found = CaptureSession(part, model, TapeBackend(), config).run().report.pool_bytes
    assert sum(cost.pool_bytes for cost in costs.of(part.keys).keys) == pytest.approx(
        found, rel=0.05
    )


@pytest.mark.parametrize(
    ("mode", "compilation"),
    [
        ("FULL_AND_PIECEWISE", {}),
        ("PIECEWISE", {"piecewise": "modules", "splitting_modules": ["layers.*.self_attn"]}),
    ],
)
def test_calibration_gives_everything_back(mode: str, compilation: dict[str, Any]) -> None:
    device, model = WithDriver(chunk=1000), build(num_layers=1, num_blocks=16)
    config = decoder_config(mode, [1, 4, 16])
    config = config.model_copy(
        update={"compilation": config.compilation.model_copy(update=compilation)}
    )
    plan = build_plan(config)
    before = reserved(device)
    costs = calibrate(config, model, device, plan)
    gc.collect()
    assert reserved(device) == before
    assert (device.nodes, device.taken) == (0, 0)
    assert costs.of(plan.keys).total_bytes > 0
    runner = CaptureSession(
        plan, model, device, config
    ).run()  # and the model can still be captured
    assert len(runner.report.records) == len(plan.keys)


def test_each_modes_nodes_have_their_own_bytes() -> None:
    """Graphs of few nodes cost more for each: there are more of them."""

    class Device(WithDriver):
        def end(self, graph: Any) -> None:
            super().end(graph)
            self._count(20)

        def reset(self, graph: Any) -> None:
            if graph.steps is not None:
                self._count(-20)
            super().reset(graph)

    device = Device(rate=100, chunk=1)
    config = decoder_config("FULL_AND_PIECEWISE", [4])
    plan = build_plan(config)
    model = build(num_layers=1, num_blocks=16)
    costs = calibrate(config, model, device, plan)
    records = CaptureSession(plan, model, TapeBackend(), config).run().report.records
    nodes = [record.nodes or 0 for record in records]
    piecewise, full = (costs.driver_bytes(key) / n for key, n in zip(plan.keys, nodes, strict=True))
    assert piecewise > 1.3 * full > 100


def test_what_is_spent_once_is_known_apart() -> None:
    calls = Tally()

    def model(x: Tensor) -> Tensor:
        calls.append(len(x))
        if len(calls) == 1:
            time.sleep(1)  # a trace, say
        return x + 1

    config = config_of([2, 4], ("num_tokens", 8))
    costs = calibrate(config, model, TapeBackend(), build_plan(config))
    assert costs.once_seconds > 0.9
    assert (costs.driver_bytes(key(4)), costs.workspace_bytes) == (0, 0), "the tape has no driver"
    assert costs.seconds(key(4)) < 0.5, "of a capture, a millisecond on an idle machine"
    assert costs.of(build_plan(config).keys).keys[1].seconds < costs.once_seconds


def test_a_calibration_leaves_nothing_in_lists() -> None:
    sizes = list[int]()

    def model(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return x + 1

    config = config_of([2, 4], ("num_tokens", 8))
    calibrate(config, model, TapeBackend(), build_plan(config))
    assert sizes == []


def test_a_calibration_that_fails_gives_everything_back() -> None:
    device = WithDriver()
    before = reserved(device)

    def model(x: Tensor) -> Tensor:
        return x * x.sum().item() if len(x) == 2 else x + 1

    config = config_of([2, 4, 8], ("num_tokens", 8))
    with pytest.raises(CaptureError, match="needs the host"):
        calibrate(config, model, device, build_plan(config))
    gc.collect()
    assert back_at(device, before)
    assert device.nodes == 0


def test_a_report_predicts_what_a_calibration_does() -> None:
    device, model = WithDriver(rate=1500, chunk=1), Chain(10)
    config = config_of([1, 2, 4, 8], ("num_tokens", 1024))
    plan = build_plan(config)
    report = CaptureSession(plan, model, device, config).run().report
    saved, live = (
        GraphCosts.from_report(report, config),
        calibrate(config, model, WithDriver(1500, 1), plan),
    )
    assert saved.of(plan.keys).total_bytes == report.graph_bytes == live.of(plan.keys).total_bytes
