"""Costs that captures measured, which were freed again."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
from checks import MIB, Tally, back_at, reserved
from costing import Chain, config_of, decoder_config, key
from decoder import build
from devices import WithDriver
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cgplan.backends.tape import TapeBackend
from cgplan.errors import CaptureError
from cgplan.measure.calibrate import bytes_per_node, calibrate
from cgplan.planning import Plan, build_plan
from cgplan.pricing.costs import GraphCosts
from cgplan.pricing.estimated import NODE_BYTES
from cgplan.runner.session import CaptureSession

pytestmark = pytest.mark.usefixtures("quiet_collector")

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
