"""Dispatch: a pure function of the plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import key, plan_of, plan_with, plans, plans_with_lanes

from cgplan.config import Config
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.planning import CudagraphDispatcher, MissReason, Plan, build_plan

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
MODE_SETS = st.none() | st.sets(st.sampled_from([NONE, PIECEWISE, FULL]))


def slow_answer(
    plan: Plan,
    tokens: int,
    uniform: bool,
    loras: int,
    valid: set[CUDAGraphMode] | None,
    invalid: set[CUDAGraphMode] | None,
) -> tuple[CUDAGraphMode, BatchDescriptor]:
    """The same question answered from the words of the design: search the keys, best mode first."""
    sizes = [s for s in plan.capture_sizes if s >= tokens]
    cases = [c for c in plan.lora_cases if c >= loras]
    if tokens > 0 and sizes and cases:
        for wanted in (FULL, PIECEWISE):
            if (valid is not None and wanted not in valid) or (invalid and wanted in invalid):
                continue
            served = [
                (mode, d)
                for mode, d in plan.keys
                if mode is wanted
                and d.num_tokens == sizes[0]
                and d.num_active_loras == min(cases)
                and (uniform or not d.uniform)
            ]
            if served:
                return max(served, key=lambda key: key[1].uniform)
    return NONE, BatchDescriptor(tokens)


@given(
    plan=plans(),
    tokens=st.integers(0, 120),
    uniform=st.booleans(),
    loras=st.integers(0, 12),
    valid=MODE_SETS,
    invalid=MODE_SETS,
)
def test_dispatch_answers_from_the_keys(
    plan: Plan,
    tokens: int,
    uniform: bool,
    loras: int,
    valid: set[CUDAGraphMode] | None,
    invalid: set[CUDAGraphMode] | None,
) -> None:
    dispatcher = CudagraphDispatcher(plan)
    mode, descriptor = dispatcher.dispatch(tokens, uniform, loras, valid, invalid)
    assert (mode, descriptor) == slow_answer(plan, tokens, uniform, loras, valid, invalid)
    reason = dispatcher.explain(tokens, uniform, loras, valid, invalid)
    assert (reason is None) == (mode is not NONE)
    if mode is NONE:
        assert descriptor == BatchDescriptor(tokens)
    else:
        assert (mode, descriptor) in plan.keys
        assert descriptor.num_tokens >= tokens
        assert descriptor.num_active_loras >= loras


def naive_answer(
    plan: Plan,
    tokens: int,
    uniform: bool,
    loras: int,
    valid: set[CUDAGraphMode] | None,
    invalid: set[CUDAGraphMode] | None,
) -> tuple[CUDAGraphMode, BatchDescriptor]:
    """The rule as it is said: FULL decode, FULL mixed, PIECEWISE; fewest adapters that are enough; smallest size."""
    for wanted, decode in ((FULL, True), (FULL, False), (PIECEWISE, False)):
        if (valid is not None and wanted not in valid) or wanted in (invalid or ()) or (decode and not uniform):
            continue
        for case in range(loras, 10):
            sizes = [
                (d.num_tokens, (mode, d))
                for mode, d in plan.keys
                if mode is wanted and d.uniform == decode and d.num_active_loras == case and d.num_tokens >= tokens > 0
            ]
            if sizes:
                return min(sizes)[1]
    return NONE, BatchDescriptor(tokens)


@settings(max_examples=300)
@given(
    plan=plans_with_lanes(),
    tokens=st.integers(0, 45),
    uniform=st.booleans(),
    loras=st.integers(0, 6),
    valid=MODE_SETS,
    invalid=MODE_SETS,
)
def test_each_lane_has_its_own_sizes(
    plan: Plan,
    tokens: int,
    uniform: bool,
    loras: int,
    valid: set[CUDAGraphMode] | None,
    invalid: set[CUDAGraphMode] | None,
) -> None:
    dispatcher = CudagraphDispatcher(plan)
    answer = dispatcher.dispatch(tokens, uniform, loras, valid, invalid)
    assert answer == naive_answer(plan, tokens, uniform, loras, valid, invalid)
    assert dispatcher.dispatch(tokens, uniform, loras, valid, invalid) == answer
    assert (dispatcher.explain(tokens, uniform, loras, valid, invalid) is None) == (answer[0] is not NONE)


def test_a_batch_that_one_lane_does_not_hold_goes_to_the_next() -> None:
    plan = plan_with(
        [
            key(FULL, 2, uniform=True),
            key(FULL, 8, uniform=True, case=3),
            key(PIECEWISE, 4),
            key(PIECEWISE, 32, case=3),
        ],
        max_loras=2,
    )
    dispatcher = CudagraphDispatcher(plan)

    def size(*question: int) -> tuple[str, int, int]:
        mode, d = dispatcher.dispatch(*question)
        return mode.name, d.num_tokens, d.num_active_loras

    assert size(1, True) == ("FULL", 2, 0)
    assert size(3, True) == ("FULL", 8, 3), (
        "a graph with adapters serves a batch without, where no other is large enough"
    )
    assert size(9, True) == ("PIECEWISE", 32, 3)
    assert size(1, False) == ("PIECEWISE", 4, 0)
    assert size(5, False) == ("PIECEWISE", 32, 3)
    assert size(1, False, 1) == ("PIECEWISE", 32, 3)
    assert size(33, True) == ("NONE", 33, 0)


def test_explain_tells_lanes_apart() -> None:
    decode = plan_with([key(FULL, 8, uniform=True)], mode="FULL_DECODE_ONLY")
    assert CudagraphDispatcher(decode).explain(4, False) is MissReason.NO_GRAPH_FOR_MIXED
    short = plan_with([key(FULL, 8, uniform=True), key(PIECEWISE, 2)])
    assert CudagraphDispatcher(short).explain(4, False) is MissReason.TOO_LARGE, "of mixed batches"
    assert CudagraphDispatcher(short).explain(9, True) is MissReason.TOO_LARGE
    assert CudagraphDispatcher(short).explain(4, True, invalid_modes={FULL}) is MissReason.MODE_EXCLUDED
    adapters = plan_with([key(FULL, 8, uniform=True, case=3), key(PIECEWISE, 8)], max_loras=2)
    assert CudagraphDispatcher(adapters).explain(4, False, 1) is MissReason.NO_LORA_CASE
    assert CudagraphDispatcher(adapters).explain(4, True, 1) is None
    assert CudagraphDispatcher(adapters).explain(4, True, 4) is MissReason.NO_LORA_CASE
    dropped = plan_with([key(FULL, 8)], lora_cases=(0, 3), max_loras=2)
    assert CudagraphDispatcher(dropped).explain(4, False, 1) is MissReason.NO_LORA_CASE


@given(plan=plans(), questions=st.lists(st.tuples(st.integers(0, 120), st.booleans(), st.integers(0, 12), MODE_SETS)))
def test_dispatch_is_pure(plan: Plan, questions: list[tuple[int, bool, int, set[CUDAGraphMode] | None]]) -> None:
    """Two ranks that were asked different things before still answer alike."""
    one, other = CudagraphDispatcher(plan), CudagraphDispatcher(Plan.from_json(plan.model_dump_json()))
    first = [one.dispatch(t, u, n, valid_modes=v) for t, u, n, v in questions]
    assert [other.dispatch(t, u, n, valid_modes=v) for t, u, n, v in reversed(questions)] == first[::-1]
    assert [one.dispatch(t, u, n, valid_modes=v) for t, u, n, v in questions] == first


def test_answers_are_shared_not_built() -> None:
    dispatcher = CudagraphDispatcher(plan_of("FULL_AND_PIECEWISE", [4, 8], seqs=8))
    for question in [(3, True), (3, False), (7, True), (1000, False)]:
        assert dispatcher.dispatch(*question) is dispatcher.dispatch(*question)
    assert dispatcher.dispatch(3) is dispatcher.dispatch(4), "batches that are padded alike share their answer"


def test_full_before_piecewise_before_none() -> None:
    dispatcher = CudagraphDispatcher(plan_of("FULL_AND_PIECEWISE", [4, 16], seqs=8))
    uniform, mixed = BatchDescriptor(4, 4, True), BatchDescriptor(4)
    assert dispatcher.dispatch(3, True) == (FULL, uniform)
    assert dispatcher.dispatch(3, False) == (PIECEWISE, mixed)
    assert dispatcher.dispatch(3, True, invalid_modes={FULL}) == (PIECEWISE, mixed)
    assert dispatcher.dispatch(3, True, valid_modes={PIECEWISE}) == (PIECEWISE, mixed)
    assert dispatcher.dispatch(3, True, valid_modes={NONE}) == (NONE, BatchDescriptor(3))
    assert dispatcher.dispatch(3, True, valid_modes=[]) == (NONE, BatchDescriptor(3))
    assert dispatcher.dispatch(3, True, valid_modes=[FULL, PIECEWISE], invalid_modes=[FULL]) == (PIECEWISE, mixed)
    assert dispatcher.dispatch(9, True) == (PIECEWISE, BatchDescriptor(16)), "uniform decode ends at max_num_seqs"


def test_a_full_graph_of_mixed_batches_serves_uniform_ones() -> None:
    dispatcher = CudagraphDispatcher(plan_of("FULL", [4]))
    assert dispatcher.dispatch(3, True) == dispatcher.dispatch(3, False) == (FULL, BatchDescriptor(4, 4))


def test_adapters_round_up_to_the_next_case() -> None:
    plan = plan_of("FULL", [4], lora={"max_loras": 5, "specialize_active_lora": True})
    dispatcher = CudagraphDispatcher(plan)
    found = [dispatcher.dispatch(4, num_active_loras=n)[1].num_active_loras for n in range(7)]
    assert found == [0, 1, 2, 4, 4, 6, 6]
    assert dispatcher.dispatch(4, num_active_loras=7) == (NONE, BatchDescriptor(4))
    assert dispatcher.explain(4, num_active_loras=7) is MissReason.NO_LORA_CASE


def test_one_graph_serves_batches_with_and_without_adapters() -> None:
    plan = plan_of("FULL", [4], lora={"max_loras": 2}, cudagraph_specialize_lora=False)
    dispatcher = CudagraphDispatcher(plan)
    assert dispatcher.dispatch(4) == dispatcher.dispatch(4, num_active_loras=2)
    assert dispatcher.dispatch(4)[1].num_active_loras == 3


@pytest.mark.parametrize("loras", [-1, -2, -100])
def test_a_negative_number_of_adapters_has_no_graph(loras: int) -> None:
    """A table that is indexed from its end would answer with the graph of the most adapters."""
    dispatcher = CudagraphDispatcher(plan_of("FULL", [4], lora={"max_loras": 2}))
    assert dispatcher.dispatch(4, num_active_loras=loras) == (NONE, BatchDescriptor(4))
    assert dispatcher.explain(4, num_active_loras=loras) is MissReason.NO_LORA_CASE


def test_reasons() -> None:
    none = CudagraphDispatcher(plan_of("NONE"))
    assert none.explain(1) is MissReason.NOTHING_CAPTURED
    full = CudagraphDispatcher(plan_of("FULL", [4]))
    assert full.explain(4) is None
    assert full.explain(5) is MissReason.TOO_LARGE
    assert full.explain(4, invalid_modes={FULL}) is MissReason.MODE_EXCLUDED
    assert full.explain(4, valid_modes={PIECEWISE}) is MissReason.MODE_EXCLUDED
    assert full.explain(4, num_active_loras=1) is MissReason.NO_LORA_CASE
    decode = CudagraphDispatcher(plan_of("FULL_DECODE_ONLY", [4, 16], seqs=8))
    assert decode.explain(4, True) is None
    assert decode.explain(4, False) is MissReason.NO_GRAPH_FOR_MIXED
    assert decode.explain(9, True) is MissReason.TOO_LARGE


def test_modes_may_be_given_by_name() -> None:
    dispatcher = CudagraphDispatcher(build_plan(Config(compilation={"cudagraph_capture_sizes": [4]})))
    assert dispatcher.dispatch(3)[0] is CUDAGraphMode.FULL
    assert dispatcher.dispatch(3, valid_modes=["FULL"])[0] is CUDAGraphMode.FULL
    assert dispatcher.dispatch(3, invalid_modes=["full"])[0] is CUDAGraphMode.NONE
