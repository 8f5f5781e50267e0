"""Dispatch: a pure function of the plan."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import key, plan_of, plan_with, plans, plans_with_lanes

from cgplan.errors import InputError
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.planning import CudagraphDispatcher, MissReason, Plan

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
MODE_SETS = st.none() | st.sets(st.sampled_from([NONE, PIECEWISE, FULL]))
QUESTIONS = st.tuples(st.integers(0, 120), st.booleans(), st.integers(0, 12), MODE_SETS, MODE_SETS)


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
        if (
            (valid is not None and wanted not in valid)
            or wanted in (invalid or ())
            or (decode and not uniform)
        ):
            continue
        for case in range(loras, 13):
            sizes = [
                (d.num_tokens, (mode, d))
                for mode, d in plan.keys
                if mode is wanted
                and d.uniform == decode
                and d.num_active_loras == case
                and d.num_tokens >= tokens > 0
            ]
            if sizes:
                return min(sizes)[1]
    return NONE, BatchDescriptor(tokens)


@settings(max_examples=150, deadline=None)
@given(plan=plans() | plans_with_lanes(), questions=st.lists(QUESTIONS, min_size=1, max_size=8))
def test_answers_are_those_of_the_rule_on_every_rank(
    plan: Plan, questions: list[tuple[Any, ...]]
) -> None:
    """The same answers whatever was asked before, and from a plan that was saved."""
    one, other = (
        CudagraphDispatcher(plan),
        CudagraphDispatcher(Plan.from_json(plan.model_dump_json())),
    )
    answers = [one.dispatch(*question) for question in questions]
    assert answers == [naive_answer(plan, *question) for question in questions]
    assert [other.dispatch(*question) for question in reversed(questions)] == answers[::-1]
    for question, answer in zip(questions, answers, strict=True):
        assert one.dispatch(*question) is answer, "answers are shared, not built"
        assert (one.explain(*question) is None) == (answer[0] is not NONE)


def test_a_batch_that_one_lane_does_not_hold_goes_to_the_next() -> None:
    decode = [key(FULL, 2, uniform=True), key(FULL, 8, uniform=True, case=3)]
    plan = plan_with([*decode, key(PIECEWISE, 4), key(PIECEWISE, 32, case=3)], max_loras=2)
    dispatcher = CudagraphDispatcher(plan)

    def size(*question: int) -> tuple[str, int, int]:
        mode, d = dispatcher.dispatch(*question)
        return mode.name, d.num_tokens, d.num_active_loras

    assert size(1, True) == ("FULL", 2, 0)
    assert size(3, True) == ("FULL", 8, 3), (
        "graphs with adapters serve batches without, where no other is large enough"
    )
    assert size(9, True) == ("PIECEWISE", 32, 3)
    assert size(1, False) == ("PIECEWISE", 4, 0)
    assert size(5, False) == ("PIECEWISE", 32, 3)
    assert size(1, False, 1) == ("PIECEWISE", 32, 3)
    assert size(33, True) == ("NONE", 33, 0)


def test_modes_may_be_given_by_name() -> None:
    dispatcher = CudagraphDispatcher(plan_of("FULL_AND_PIECEWISE", [4, 16], seqs=8))
    assert dispatcher.dispatch(3, True, valid_modes=["full"]) == (FULL, BatchDescriptor(4, 4, True))
    assert dispatcher.dispatch(3, True, invalid_modes=["full"]) == (PIECEWISE, BatchDescriptor(4))


def test_adapters_round_up_to_the_next_case() -> None:
    plan = plan_of("FULL", [4], lora={"max_loras": 5, "specialize_active_lora": True})
    dispatcher = CudagraphDispatcher(plan)
    found = [dispatcher.dispatch(4, num_active_loras=n)[1].num_active_loras for n in range(7)]
    assert found == [0, 1, 2, 4, 4, 6, 6]
    one = CudagraphDispatcher(
        plan_of("FULL", [4], lora={"max_loras": 2}, cudagraph_specialize_lora=False)
    )
    assert one.dispatch(4)[1].num_active_loras == 3, (
        "one graph serves batches with and without adapters"
    )
    for loras in (
        7,
        -1,
        -2,
        -100,
    ):  # a table that is indexed from its end would answer a negative number
        assert dispatcher.dispatch(4, num_active_loras=loras) == (NONE, BatchDescriptor(4))
        assert dispatcher.explain(4, num_active_loras=loras) is MissReason.NO_LORA_CASE


def test_a_string_is_no_set_of_modes() -> None:
    for option in ("valid_modes", "invalid_modes"):
        with pytest.raises(InputError, match="modes is a string; pass a set"):
            CudagraphDispatcher(FULL_4).dispatch(4, **{option: "FULL"})


FULL_4 = plan_of("FULL", [4])
DECODE = plan_of("FULL_DECODE_ONLY", [4, 16], seqs=8)
SHORT = plan_with([key(FULL, 8, uniform=True), key(PIECEWISE, 2)])
ADAPTERS = plan_with([key(FULL, 8, uniform=True, case=3), key(PIECEWISE, 8)], max_loras=2)


@pytest.mark.parametrize(
    ("plan", "question", "excluded", "reason"),
    [
        (plan_of("NONE"), (1,), {}, MissReason.NOTHING_CAPTURED),
        (FULL_4, (4,), {}, None),
        (FULL_4, (5,), {}, MissReason.TOO_LARGE),
        (FULL_4, (4,), {"invalid_modes": {FULL}}, MissReason.MODE_EXCLUDED),
        (FULL_4, (4,), {"valid_modes": {PIECEWISE}}, MissReason.MODE_EXCLUDED),
        (FULL_4, (4, False, 1), {}, MissReason.NO_LORA_CASE),
        (DECODE, (4, True), {}, None),
        (DECODE, (4, False), {}, MissReason.NO_GRAPH_FOR_MIXED),
        (DECODE, (9, True), {}, MissReason.TOO_LARGE),
        (SHORT, (4, False), {}, MissReason.TOO_LARGE),  # of mixed batches
        (SHORT, (9, True), {}, MissReason.TOO_LARGE),
        (SHORT, (4, True), {"invalid_modes": {FULL}}, MissReason.MODE_EXCLUDED),
        (ADAPTERS, (4, False, 1), {}, MissReason.NO_LORA_CASE),
        (ADAPTERS, (4, True, 1), {}, None),
        (ADAPTERS, (4, True, 4), {}, MissReason.NO_LORA_CASE),
        (
            plan_with([key(FULL, 8)], lora_cases=(0, 3), max_loras=2),
            (4, False, 1),
            {},
            MissReason.NO_LORA_CASE,
        ),
    ],
)
def test_reasons(
    plan: Plan, question: tuple[Any, ...], excluded: Any, reason: MissReason | None
) -> None:
    assert CudagraphDispatcher(plan).explain(*question, **excluded) is reason
