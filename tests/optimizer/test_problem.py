"""Traffic run through graphs, against the dispatcher of the same plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import plan_of

from cgplan.errors import PlanError
from cgplan.modes import RUNTIME_MODES, CUDAGraphMode
from cgplan.optimizer.problem import EAGER, Run
from cgplan.planning import CudagraphDispatcher
from cgplan.planning.plan import Lane
from cgplan.traffic.histogram import StepShape, Traffic
from cgplan.traffic.step_times import StepTimes

TIMES = StepTimes.default()
LORA = [
    None,
    {"max_loras": 2},
    {"max_loras": 4, "specialize_active_lora": True},
]


@pytest.mark.parametrize("rules", ["vllm_v1", "vllm_v2"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_batch_runs_where_the_dispatcher_sends_it(rules: str, data: st.DataObject) -> None:
    spec = data.draw(st.integers(0, 3), label="spec")
    seqs = data.draw(st.integers(1, 12), label="seqs")
    tokens = data.draw(st.integers(spec + 1, 40), label="tokens")
    lora = data.draw(st.sampled_from(LORA), label="lora")
    try:
        plan = plan_of(
            data.draw(st.sampled_from(CUDAGraphMode).map(str)),
            data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6)),
            spec=spec,
            seqs=seqs,
            tokens=tokens,
            lora=lora,
            key_rules=rules,
            attention_support="ALWAYS",
        )
    except PlanError:  # no size is left
        return
    uniform = data.draw(st.booleans(), label="uniform")
    reqs = data.draw(st.integers(1, max(min(seqs, tokens // (spec + 1)), 1)), label="reqs")
    size = reqs * (spec + 1) if uniform else data.draw(st.integers(reqs, tokens), label="size")
    loras = data.draw(st.integers(0, lora["max_loras"] if lora else 0), label="loras")
    batch = StepShape(size, reqs, uniform, loras)

    [use] = Run(plan.lanes(), Traffic.of({batch: 1}, "one"), TIMES).uses

    mode, key = CudagraphDispatcher(plan).dispatch(size, uniform, loras, num_reqs=reqs)
    if mode is CUDAGraphMode.NONE:
        assert use.lane == EAGER
    else:
        assert (use.lane, use.size) == (Lane.of(mode, key), key.num_tokens)


def test_steps_beyond_those_measured_are_a_share() -> None:
    points = {(mode, 0): {1: 5.0, 4: 9.0} for mode in RUNTIME_MODES}
    traffic = Traffic.of({StepShape(4, 4, True): 3, StepShape(100, 4): 1}, "some")
    run = Run(plan_of(seqs=4, tokens=128).lanes(), traffic, StepTimes.measured(points, "few"))
    assert run.unmeasured == 0.25
    nearly = StepTimes.measured({key: {1: 5.0, 103: 9.0} for key in points}, "to 103")
    assert Run(plan_of(seqs=4, tokens=128).lanes(), traffic, nearly).unmeasured == 0, (
        "it runs in a graph of 104: 1% above is as good as measured"
    )
    without_piecewise = StepTimes.measured(
        {(CUDAGraphMode.NONE, 0): {1: 9.0, 200: 9.0}, (CUDAGraphMode.FULL, 0): {1: 5.0, 90: 6.0}},
        "no PIECEWISE",
    )
    piecewise = {Lane(CUDAGraphMode.PIECEWISE, False, 0): [128]}
    assert Run(piecewise, traffic, without_piecewise).unmeasured == 1
    assert Run({}, traffic, without_piecewise).unmeasured == 0
