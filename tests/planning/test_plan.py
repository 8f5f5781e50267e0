"""The plan: keys, their order, the padding table, and the JSON form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from plans import key, plan_of, plan_with, plans

from cgplan.config import Config
from cgplan.errors import ReportError
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.planning import Plan, build_plan, config_hash
from cgplan.planning.costs import KeyCost, PlanCost
from cgplan.planning.plan import Lane, Machine, Predicted, capture_order

PIECEWISE, FULL = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


def numbers(plan: Plan) -> list[tuple[str, int, int | None, bool, int]]:
    return [(mode.name, d.num_tokens, d.num_reqs, d.uniform, d.num_active_loras) for mode, d in plan.keys]


# --- keys -----------------------------------------------------------------------------------------------------


def test_keys_of_full() -> None:
    assert numbers(plan_of("FULL", [1, 4, 16], seqs=8)) == [
        ("FULL", 16, 8, False, 0),
        ("FULL", 4, 4, False, 0),
        ("FULL", 1, 1, False, 0),
    ]


def test_keys_of_piecewise_leave_the_requests_open() -> None:
    assert numbers(plan_of("PIECEWISE", [1, 4], seqs=2)) == [
        ("PIECEWISE", 4, None, False, 0),
        ("PIECEWISE", 1, None, False, 0),
    ]


def test_keys_of_full_and_piecewise() -> None:
    """PIECEWISE before FULL, largest first; FULL only as far as uniform decode reaches."""
    assert numbers(plan_of("FULL_AND_PIECEWISE", [1, 4, 16], seqs=4)) == [
        ("PIECEWISE", 16, None, False, 0),
        ("PIECEWISE", 4, None, False, 0),
        ("PIECEWISE", 1, None, False, 0),
        ("FULL", 4, 4, True, 0),
        ("FULL", 1, 1, True, 0),
    ]


def test_a_plan_prints_its_lanes() -> None:
    assert str(plan_of("FULL_AND_PIECEWISE", [1, 4, 16], seqs=4)) == (
        "FULL_AND_PIECEWISE, 5 graphs\n  PIECEWISE: 1, 4, 16 tokens\n  FULL uniform: 1, 4 tokens"
    )
    assert str(plan_of("NONE", [1])) == "NONE, 0 graphs"


def test_keys_of_speculative_decode() -> None:
    plan = plan_of("FULL_DECODE_ONLY", [1, 4, 8, 24], seqs=4, spec=2)
    assert plan.query_len == 3
    assert plan.capture_sizes == (3, 6, 9, 24)
    assert numbers(plan) == [("FULL", 9, 3, True, 0), ("FULL", 6, 2, True, 0), ("FULL", 3, 1, True, 0)]


@pytest.mark.parametrize(
    ("max_loras", "specialize_active", "specialize", "cases"),
    [
        (None, False, True, (0,)),
        (4, False, True, (0, 5)),
        (4, True, True, (0, 1, 2, 4, 5)),
        (5, True, True, (0, 1, 2, 4, 6)),
        (1, True, True, (0, 1, 2)),
        (4, False, False, (5,)),
        (4, True, False, (5,)),
    ],
)
def test_lora_cases(max_loras: int | None, specialize_active: bool, specialize: bool, cases: tuple[int, ...]) -> None:
    lora = None if max_loras is None else {"max_loras": max_loras, "specialize_active_lora": specialize_active}
    plan = plan_of("FULL", [1, 2], lora=lora, cudagraph_specialize_lora=specialize)
    assert plan.lora_cases == cases
    assert [(d.num_tokens, d.num_active_loras) for _, d in plan.keys] == [
        (size, case) for size in (2, 1) for case in sorted(cases, reverse=True)
    ]
    assert all(d.has_lora == (d.num_active_loras > 0) for _, d in plan.keys)


@given(plan=plans())
def test_keys_follow_the_law(plan: Plan) -> None:
    q, seqs = plan.query_len, plan.max_num_seqs
    assert len(set(plan.keys)) == len(plan.keys)
    order = [(mode is FULL, -d.num_tokens) for mode, d in plan.keys]
    assert order == sorted(order), "PIECEWISE before FULL, each largest first"
    for mode, d in plan.keys:
        assert d.num_tokens in plan.capture_sizes
        assert d.num_active_loras in plan.lora_cases
        if mode is PIECEWISE:
            assert d.num_reqs is None
            assert not d.uniform
        elif d.uniform:
            assert d.num_tokens % q == 0
            assert d.num_reqs == d.num_tokens // q <= seqs
            assert d.query_len == q
        else:
            assert plan.mode is FULL
            assert d.num_reqs == min(d.num_tokens, seqs)
    mixed = plan.mode.mixed_mode()
    expected = 0 if mixed is CUDAGraphMode.NONE else len(plan.capture_sizes) * len(plan.lora_cases)
    assert sum(not d.uniform for _, d in plan.keys) == expected


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
    assert [str(lane) for lane in plan.lanes()] == ["PIECEWISE", "FULL uniform, 3 adapters", "FULL uniform"]
    assert plan.max_capture_size == 64


@given(plan=plans())
def test_lanes_of_a_ladder_add_up_to_its_keys(plan: Plan) -> None:
    found = {
        (lane, size): (lane.mode, lane.uniform, lane.num_active_loras, size)
        for lane, sizes in plan.lanes().items()
        for size in sizes
    }
    assert sorted(found.values(), key=str) == sorted(
        ((mode, d.uniform, d.num_active_loras, d.num_tokens) for mode, d in plan.keys), key=str
    )


@pytest.mark.parametrize(
    ("keys", "fields", "complaint"),
    [
        ([key(FULL, 4), key(FULL, 2)], {"capture_sizes": (2,)}, "4 is not among capture_sizes"),
        ([key(FULL, 4)], {"capture_sizes": (4, 2)}, "capture_sizes are not ascending"),
        ([key(FULL, 4)], {"keys": (key(FULL, 4), key(FULL, 4))}, "a key stands twice"),
        ([key(FULL, 4)], {"mode": PIECEWISE}, "the plan's mode PIECEWISE has no such graphs"),
        ([(CUDAGraphMode.NONE, BatchDescriptor(4))], {}, "NONE num_tokens=4: the plan's mode FULL has no such graphs"),
        ([key(FULL, 4, uniform=True)], {"mode": FULL}, "in mode FULL, uniform is False for FULL graphs"),
        ([key(FULL, 4)], {"mode": "FULL_AND_PIECEWISE"}, "in mode FULL_AND_PIECEWISE, uniform is True for FULL graphs"),
        ([(FULL, BatchDescriptor(4))], {}, "num_reqs is None"),
        ([(PIECEWISE, BatchDescriptor(4, 4))], {}, "num_reqs is 4"),
        ([(FULL, BatchDescriptor(4, 2, True))], {"mode": "FULL_DECODE_ONLY"}, "a uniform batch has num_reqs . 1"),
        ([key(FULL, 4, case=1)], {"lora_cases": (0,)}, "1 active adapters are not among lora_cases"),
        ([(FULL, BatchDescriptor(4, 4, False, True, 0))], {}, "has_lora is wrong"),
    ],
)
def test_plans_that_contradict_themselves_are_refused(keys: list[Any], fields: dict[str, Any], complaint: str) -> None:
    """Someone may have edited the file; the dispatcher and the buffers rely on it."""
    with pytest.raises(ValueError, match=complaint):
        plan_with(keys, **fields)


def test_capture_order_is_piecewise_first_and_largest_first() -> None:
    keys = [key(FULL, 4), key(PIECEWISE, 2), key(FULL, 8, case=1), key(FULL, 8, case=2), key(PIECEWISE, 16)]
    assert capture_order(reversed(keys)) == (keys[4], keys[1], keys[3], keys[2], keys[0])


# --- predictions ----------------------------------------------------------------------------------------------

COST = PlanCost((KeyCost(2 << 20, 100, 0.5), KeyCost(0, 50, 0.25)), 1 << 10, 8 << 20)


def predicted_plan(**fields: Any) -> Plan:
    given = {
        "predicted": Predicted.of(COST, source="three captures", estimated=False),
        "machine": Machine(gpu="NVIDIA H200", driver="580.1", torch="2.13.0"),
        "evidence": {"expected_us": {"plan": 1600.0}, "nested": [1, {"a": None}]},
    }
    return plan_with([key(FULL, 4), key(FULL, 2)], **{**given, **fields})


def test_a_plan_with_predictions_reloads_to_an_equal_value() -> None:
    plan = predicted_plan()
    again = Plan.from_json(plan.model_dump_json())
    assert again == plan
    assert again.predicted is not None
    assert again.predicted.cost == COST
    assert (again.predicted.cost.total_bytes, again.predicted.cost.seconds) == ((10 << 20) + (1 << 10) + 150, 0.75)


def test_predictions_are_one_a_key() -> None:
    with pytest.raises(ValueError, match="1 keys, but predictions for 2"):
        predicted_plan(keys=(key(FULL, 4),))


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        ({"expected_us": {"plan": 1600.0, "eager": 9.0}}, 1600.0),
        ({"expected_us": 12}, 12.0),
        ({"expected_us": None}, None),
        ({}, None),
        (None, None),
    ],
)
def test_the_expected_step_comes_from_the_evidence(evidence: dict[str, Any] | None, expected: float | None) -> None:
    assert predicted_plan(evidence=evidence).expected_us == expected


# --- the JSON form --------------------------------------------------------------------------------------------


@given(plan=plans())
def test_a_saved_plan_reloads_to_an_equal_value(plan: Plan) -> None:
    again = Plan.from_json(plan.model_dump_json())
    assert again == plan
    assert hash(again.keys) == hash(plan.keys)
    assert all(type(d) is BatchDescriptor and type(m) is CUDAGraphMode for m, d in again.keys)
    assert again.model_dump_json() == plan.model_dump_json()


def test_the_json_form_is_readable() -> None:
    data = json.loads(plan_of("FULL", [2], attention_support="UNIFORM_BATCH").model_dump_json())
    assert data["kind"] == "plan"
    assert data["mode"] == "FULL_AND_PIECEWISE"
    assert data["keys"][0][0] == "PIECEWISE"
    assert data["keys"][0][1]["num_tokens"] == 2
    assert data["changes"][0]["requested"] == "FULL"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not a plan"),
        ("[]", "schema version None"),
        ('"plan"', "schema version None"),
        ("{}", "schema version None"),
        ('{"schema_version": 99}', "schema version 99"),
        ('{"schema_version": 1, "kind": "plan"}', "schema version 1, this cgplan reads 2"),
        ('{"schema_version": 2, "kind": "capture"}', "not a plan"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ReportError, match=complaint):
        Plan.from_json(text)


def test_a_plan_with_unknown_keys_is_refused() -> None:
    data = json.loads(plan_of().model_dump_json())
    with pytest.raises(ReportError):
        Plan.from_json(json.dumps({**data, "surprise": 1}))


def test_plans_are_frozen_and_pure() -> None:
    plan = plan_of("FULL", [1, 2])
    with pytest.raises(ValueError, match="frozen"):
        plan.mode = CUDAGraphMode.NONE
    assert plan_of("FULL", [2, 1, 2]).keys == plan.keys
    assert plan_of("FULL", [1, 2]) == plan


def test_the_hash_follows_the_configuration() -> None:
    one, two = Config(), Config.model_validate({"compilation": {"outputs": "clone"}})
    assert config_hash(one) == config_hash(Config.model_validate({"scheduler": {"max_num_seqs": 256}}))
    assert config_hash(one) != config_hash(two)
    assert len(config_hash(one)) == 12


def test_the_hash_leaves_out_what_no_capture_depends_on() -> None:
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


def test_a_plan_names_its_configuration() -> None:
    plan = plan_of("FULL", [1, 2], seqs=8)
    assert plan.config is not None
    assert plan.config["scheduler"]["max_num_seqs"] == 8
    assert config_hash(Config.model_validate(plan.config)) == plan.config_hash


def test_warnings_reach_the_plan() -> None:
    plan = plan_of("FULL", [1, 99], tokens=10)
    assert len(plan.warnings) == 1
    assert plan.sizes_source == "compilation.cudagraph_capture_sizes"


def test_descriptors_print_what_matters() -> None:
    assert str(BatchDescriptor(8)) == "num_tokens=8"
    assert str(BatchDescriptor(8, 4, True, True, 3)) == "num_tokens=8 num_reqs=4 uniform num_active_loras=3"
    assert BatchDescriptor(8, 4, True).query_len == 2
    assert BatchDescriptor(8, 4).query_len is None


@pytest.mark.parametrize(
    ("piecewise", "unused"),
    [("auto", ["ops"]), ("modules", ["ops"]), ("ops", ["modules"]), ("wrappers", ["ops", "modules"])],
)
def test_splits_that_nothing_looks_at_are_pointed_out(piecewise: str, unused: list[str]) -> None:
    split = {"piecewise": piecewise, "splitting_ops": ["aten::softmax"], "splitting_modules": ["attend"]}
    warnings = plan_of("PIECEWISE", [1, 4], **split).warnings
    assert [warning.partition(" are not looked at")[0] for warning in warnings] == [
        f"compilation.splitting_{kind}" for kind in unused
    ]
    assert not plan_of("PIECEWISE", [1, 4], **{**split, f"splitting_{unused[0]}": []}).warnings[1:]
    assert not plan_of("FULL", [1, 4], **split).warnings
    assert not plan_of("PIECEWISE", [1, 4], splitting_ops=["aten::softmax"]).warnings


def test_listed_sizes_without_a_graph_are_pointed_out() -> None:
    sections = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [2, 4, 16]}
    plan = build_plan(Config(compilation=sections, scheduler={"max_num_seqs": 4}))
    assert [descriptor.num_tokens for _, descriptor in plan.keys] == [4, 2]
    (warning,) = plan.warnings
    assert "capture sizes 16 have no graph" in warning
    assert "max_num_seqs = 4" in warning
    assert not build_plan(
        Config(compilation={**sections, "cudagraph_mode": "FULL"}, scheduler={"max_num_seqs": 4})
    ).warnings
