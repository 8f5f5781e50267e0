"""What changes from one plan to another, and whether a saved plan is for what is there now."""

from __future__ import annotations

from typing import Any

import pytest
from plans import key, plan_of, plan_with

from cgplan.config import Config
from cgplan.errors import PlanMismatchError
from cgplan.modes import CUDAGraphMode
from cgplan.planning import Plan, build_plan, config_hash
from cgplan.planning.difference import (
    FieldChange,
    Figure,
    compare,
    fitted,
    mismatches,
    timed_otherwise,
    unused_settings,
)
from cgplan.planning.engines import read_vllm
from cgplan.planning.plan import KeyCost, Lane, Machine, Predicted

PIECEWISE, FULL = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL

H200 = Machine(gpu="NVIDIA H200", driver="580.1", torch="2.13.0")


def config_with(**sections: Any) -> Config:
    return Config.model_validate(sections)


def priced(
    plan: Plan, each: int, expected_us: float, source: str = "captures", traffic: str = "a.csv"
) -> Plan:
    keys = tuple(KeyCost(each, 0, 0.5) for _ in plan.keys)
    cost = Predicted(keys=keys, static_bytes=100, workspace_bytes=0, source=source, estimated=False)
    evidence = {"expected_us": {"plan": expected_us}, "traffic_source": traffic}
    return plan.model_copy(update={"predicted": cost, "evidence": evidence})


# --- two plans ------------------------------------------------------------------------------------------------


def test_sizes_are_compared_lane_by_lane() -> None:
    old = plan_with([key(FULL, 4, uniform=True), key(FULL, 2, uniform=True), key(PIECEWISE, 8)])
    new = plan_with(
        [key(FULL, 4, uniform=True), key(FULL, 3, uniform=True), key(FULL, 3, uniform=True, case=2)]
    )
    found = {
        change.lane: (change.added, change.removed, change.kept)
        for change in compare(old, new).lanes
    }
    assert found == {
        Lane(FULL, True, 0): ((3,), (2,), (4,)),
        Lane(FULL, True, 2): ((3,), (), ()),
        Lane(PIECEWISE, False, 0): ((), (8,), ()),
    }
    assert compare(old, new).graphs == Figure(old=3, new=3)
    assert compare(old, old).changed_lanes == compare(old, old).settings == ()


def test_figures_come_from_predictions_and_evidence() -> None:
    old, new = (
        priced(plan_of("FULL", [1, 2, 4]), 1000, 1700.0),
        priced(plan_of("FULL", [1, 4]), 1000, 1650.0),
    )
    found = compare(old, new)
    assert found.memory == Figure(old=3100, new=2100)
    assert found.seconds == Figure(old=1.5, new=1.0)
    assert found.expected_us.change == -50.0
    assert found.notes == ()
    absent = compare(plan_of("FULL", [1]), new)
    assert (absent.memory.old, absent.memory.new, absent.memory.change) == (None, 2100, None)
    assert absent.expected_us == Figure(old=None, new=1650.0)
    assert absent.notes == (
        "the first plan was not made for traffic, so that it expects no step time",
        "the first plan was made without --costs, so that its memory and start-up are not known",
    )


def test_figures_that_cannot_be_compared_are_pointed_out() -> None:
    old = priced(plan_of("FULL", [1]), 10, 5.0)
    new = priced(plan_of("FULL", [1]), 10, 5.0, source="the allocator's model", traffic="b.csv")
    assert compare(old, new).notes == (
        "memory and start-up have other sources: captures before, the allocator's model after",
        "the expected steps are of different traffic: a.csv before, b.csv after",
    )
    few = new.changed(evidence={**(new.evidence or {}), "traffic_weight": 43.0})
    all_of_them = few.changed(evidence={**(new.evidence or {}), "traffic_weight": 1098})
    assert compare(few, all_of_them).notes == (
        "the expected steps count 43 batches before, 1,098 after",
    )


PLAN = plan_of("FULL", [4])
DRAFTED = read_vllm("{}", num_speculative_tokens=3, speculative_method="eagle").loaded.config
LIMITED = build_plan(config_with(budget={"memory": "1GiB", "max_graphs": 4}))


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        (
            plan_of("FULL", [1, 2], seqs=256),
            plan_of("FULL", [1, 4], seqs=64, attention_support="UNIFORM_BATCH"),
            [
                ("mode", "FULL", "FULL_AND_PIECEWISE"),
                ("compilation.attention_support", "ALWAYS", "UNIFORM_BATCH"),
                ("scheduler.max_num_seqs", 256, 64),
            ],
        ),
        (
            LIMITED,
            build_plan(config_with(budget={"memory": "2GiB", "capture_time": "5s"})),
            [
                ("budget.memory", 1 << 30, 2 << 30),
                ("budget.capture_time", None, 5.0),
                ("budget.max_graphs", 4, None),
            ],
        ),
        (
            PLAN.model_copy(update={"machine": H200}),
            PLAN.model_copy(update={"machine": H200.model_copy(update={"driver": "590.2"})}),
            [("driver", "580.1", "590.2")],
        ),
        (
            build_plan(DRAFTED),
            build_plan(
                DRAFTED.with_values("speculative", method="ngram", accepted_tokens=2.1)
                .with_values("compilation", key_rules="vllm_v1")
                .with_values("scheduler", mixed_batches=False)
            ),
            [
                ("compilation.key_rules", "vllm_v2", "vllm_v1"),
                ("scheduler.mixed_batches", True, False),
                ("speculative.method", "eagle", "ngram"),
                ("speculative.accepted_tokens", None, 2.1),
            ],
        ),
        (
            PLAN.changed(evidence={"objective": "mean", "insurance": 0.1, "slo": []}),
            PLAN.changed(evidence={"objective": "robust", "insurance": 0.1, "slo": []}),
            [("objective", "mean", "robust")],
        ),
    ],
)
def test_settings_that_differ_are_named(
    old: Plan, new: Plan, changes: list[tuple[str, Any, Any]]
) -> None:
    assert [
        (change.name, change.old, change.new) for change in compare(old, new).settings
    ] == changes


# --- a plan and what it is captured for -----------------------------------------------------------------------


def test_a_plan_fits_its_own_configuration_on_any_machine_but_with_measured_figures() -> None:
    config, other = (
        config_with(scheduler={"max_num_seqs": 8}),
        Machine(gpu="NVIDIA L4", driver="1", torch="2"),
    )
    plan = build_plan(config)
    assert fitted(plan, config, H200) == plan
    measured = plan.model_copy(update={"machine": H200})
    assert [change.name for change in mismatches(measured, config, other)] == [
        "gpu",
        "driver",
        "torch",
    ]
    assert mismatches(measured, config) == ()


@pytest.mark.parametrize(
    "sections",
    [
        {"compilation": {"cudagraph_capture_sizes": [1, 2, 3], "cudagraph_mode": "PIECEWISE"}},
        {"compilation": {"max_cudagraph_capture_size": 8}},
        {"report": {"repeats": 3}, "budget": {"max_graphs": 3}, "device": "cpu"},
    ],
)
def test_what_the_plan_decides_does_not_matter(sections: dict[str, Any]) -> None:
    plan, config = build_plan(Config()), config_with(**sections)
    found = fitted(plan, config)
    assert found.keys == plan.keys
    assert found.mode is plan.mode
    assert found.config_hash == config_hash(config), "the session compares it"
    assert found.warnings == ()


def test_a_plan_with_graphs_is_refused_where_no_graph_is_wanted() -> None:
    plan, config = build_plan(Config()), config_with(compilation={"cudagraph_mode": "NONE"})
    with pytest.raises(
        PlanMismatchError, match=r"compilation\.cudagraph_mode: FULL in the plan, NONE now"
    ):
        fitted(plan, config)
    assert fitted(plan, config, force=True).keys == plan.keys
    none = build_plan(config)
    assert fitted(none, config) == none


def test_settings_that_the_plan_overrules_are_named() -> None:
    plan = build_plan(Config())
    config = config_with(compilation={"cudagraph_capture_sizes": [1, 2], "outputs": "clone"})
    assert unused_settings(plan, config) == (
        FieldChange(name="compilation.cudagraph_capture_sizes", old=None, new=[1, 2]),
    )
    assert unused_settings(plan, Config()) == ()


def test_each_field_that_differs_is_named_with_both_values() -> None:
    plan = build_plan(
        config_with(
            model={"target": "a.py:build", "kwargs": {"depth": 2}},
            lora={"max_loras": 2},
            inputs={"x": {"shape": ["num_tokens", 8], "dtype": "float16", "pad": 0}},
        )
    ).model_copy(update={"machine": H200})
    config = config_with(
        model={"target": "b.py:build", "kwargs": {"depth": 3}},
        inputs={"x": {"shape": ["num_tokens", 9], "dtype": "float16", "pad": 0}},
        scheduler={"max_num_seqs": 8},
    )
    with pytest.raises(PlanMismatchError) as caught:
        fitted(plan, config, Machine(gpu="NVIDIA L4", driver=None, torch="2.13.0"))
    assert caught.value.message.splitlines() == [
        "the plan was made for something else",
        "  - model.target: a.py:build in the plan, b.py:build now",
        "  - model.kwargs.depth: 2 in the plan, 3 now",
        '  - inputs.x.shape: ["num_tokens", 8] in the plan, ["num_tokens", 9] now',
        "  - scheduler.max_num_seqs: 256 in the plan, 8 now",
        "  - lora.max_loras: 2 in the plan, absent now",
        "  - lora.rank: 16 in the plan, absent now",
        "  - lora.specialize_active_lora: false in the plan, absent now",
        "  - gpu: NVIDIA H200 in the plan, NVIDIA L4 now",
        "  - driver: 580.1 in the plan, absent now",
    ]
    assert "--force" in caught.value.remedy
    assert "again" in caught.value.remedy
    assert "configuration that the plan was made for" in caught.value.remedy


def test_force_takes_the_plan_with_a_warning_and_keeps_its_keys() -> None:
    plan = build_plan(config_with(scheduler={"max_num_seqs": 8}))
    found = fitted(plan, Config(), force=True)
    assert found.keys == plan.keys
    assert found.config_hash == config_hash(Config())
    assert found.warnings == (
        "the plan was made for something else and was forced: scheduler.max_num_seqs: 8 in the plan, 256 now",
    )
    assert fitted(build_plan(Config()), Config(), force=True).warnings == (), (
        "nothing had to be forced"
    )


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("metadata", "lengths", {"shape": ["num_reqs"], "dtype": "int32", "pad": 0, "example": 9}),
        ("compilation", "compile_shapes", "static"),
        ("compilation", "all_reduce", "nccl"),
    ],
)
def test_what_decides_step_times_is_named(section: str, name: str, value: Any) -> None:
    lengths = {"shape": ["num_reqs"], "dtype": "int32", "pad": 0, "example": 8}
    given = {"metadata": {"lengths": lengths}}
    measured = build_plan(Config.model_validate(given))
    assert timed_otherwise(measured, Config.model_validate(given)) == []
    given[section] = {name: value}
    found = [change.name for change in timed_otherwise(measured, Config.model_validate(given))]
    assert [".".join(each.split(".")[:2]) for each in found] == [f"{section}.{name}"]
