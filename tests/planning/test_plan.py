"""The plan: lanes, capture order, predictions, the JSON form and the digest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from plans import key, plan_of, plan_with, plans

from cgplan.config import Config
from cgplan.errors import ReportError
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.planning import Plan, build_plan, config_hash
from cgplan.planning.plan import KeyCost, Lane, Machine, Predicted, capture_order

PIECEWISE, FULL = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


# --- lanes ----------------------------------------------------------------------------------------------------


def test_lanes_have_sizes_of_their_own() -> None:
    plan = plan_with(
        [
            key(PIECEWISE, 64),
            key(FULL, 8, uniform=True),
            key(FULL, 1, uniform=True),
            key(FULL, 8, uniform=True, case=3),
        ],
        max_loras=2,
    )
    assert plan.lanes() == {
        Lane(PIECEWISE, False, 0): (64,),
        Lane(FULL, True, 3): (8,),
        Lane(FULL, True, 0): (1, 8),
    }
    assert [str(lane) for lane in plan.lanes()] == [
        "PIECEWISE",
        "FULL uniform, 3 adapters",
        "FULL uniform",
    ]
    assert plan.max_capture_size == 64
    first, *lanes = str(plan).splitlines()
    assert first == "FULL_AND_PIECEWISE, 4 graphs"
    assert lanes == [
        "  PIECEWISE: 64 tokens",
        "  FULL uniform, 3 adapters: 8 tokens",
        "  FULL uniform: 1, 8 tokens",
    ]
    assert str(plan_of("NONE", [1])) == "NONE, 0 graphs"


def test_capture_order_is_piecewise_first_and_largest_first() -> None:
    keys = [
        key(FULL, 4),
        key(PIECEWISE, 2),
        key(FULL, 8, case=1),
        key(FULL, 8, case=2),
        key(PIECEWISE, 16),
    ]
    assert capture_order(reversed(keys)) == (keys[4], keys[1], keys[3], keys[2], keys[0])


# --- predictions ----------------------------------------------------------------------------------------------

COST = Predicted(
    keys=(KeyCost(2 << 20, 100, 0.5), KeyCost(0, 50, 0.25)),
    static_bytes=1 << 10,
    workspace_bytes=8 << 20,
    source="three captures",
    estimated=False,
)


def predicted_plan(**fields: Any) -> Plan:
    given = {
        "predicted": COST,
        "machine": Machine(gpu="NVIDIA H200", driver="580.1", torch="2.13.0"),
        "evidence": {"expected_us": {"plan": 1600.0}, "nested": [1, {"a": None}]},
    }
    return plan_with([key(FULL, 4), key(FULL, 2)], **{**given, **fields})


def test_a_plan_with_predictions_reloads_to_an_equal_value() -> None:
    plan = predicted_plan()
    again = Plan.from_json(plan.model_dump_json())
    assert again == plan
    assert again.predicted is not None
    assert again.predicted == COST
    assert (again.predicted.total_bytes, again.predicted.seconds) == (
        (10 << 20) + (1 << 10) + 150,
        0.75,
    )
    assert plan.expected_us == 1600.0
    assert predicted_plan(evidence=None).expected_us is None


# --- the JSON form --------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(plan=plans())
def test_a_saved_plan_reloads_to_an_equal_value(plan: Plan) -> None:
    again = Plan.from_json(plan.model_dump_json())
    assert again == plan
    assert hash(again.keys) == hash(plan.keys)
    assert all(type(d) is BatchDescriptor and type(m) is CUDAGraphMode for m, d in again.keys)
    assert again.model_dump_json() == plan.model_dump_json()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not a plan"),
        ("[]", "schema version None"),
        ('{"schema_version": 1, "kind": "plan"}', "schema version 1, this cgplan reads 2"),
        ('{"schema_version": 2, "kind": "capture"}', "not a plan"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ReportError, match=complaint):
        Plan.from_json(text)


def test_the_hash_follows_the_settings_that_a_capture_depends_on() -> None:
    assert config_hash(Config()) != config_hash(
        Config.model_validate({"compilation": {"outputs": "clone"}})
    )
    assert len(config_hash(Config())) == 12
    planned_from = {
        "report": {"repeats": 7},
        "budget": {"memory": "2GiB", "max_graphs": 3},
        "traffic": {
            "request_rate": 3.0,
            "prompt_median": 10,
            "prompt_p95": 20,
            "output_median": 10,
            "output_p95": 20,
        },
        "speculative": {"accepted_tokens": 1.0},
    }
    config = Config.model_validate(planned_from)
    assert config_hash(config) == config_hash(Config())
    assert build_plan(config).config == build_plan(Config()).config
    assert not {"report", "budget", "traffic"} & set(build_plan(config).config or {})
