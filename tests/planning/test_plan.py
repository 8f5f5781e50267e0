"""The plan: lanes, capture order, predictions, the JSON form and the digest. From a configuration to its plan: the mode, ladders, capture sizes, warnings. For keys see test_conformance."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from plans import key, plan_of, plan_with, plans

from cgplan.config import Config, validate_config
from cgplan.config.schema import LadderName
from cgplan.errors import ConfigError, ModeError, PlanError, ReportError
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.planning import LADDERS, Plan, build_plan, config_hash
from cgplan.planning.plan import (
    CaptureSizes,
    KeyCost,
    Lane,
    Machine,
    Predicted,
    attention_is_split,
    capture_order,
    resolve_mode,
    resolve_sizes,
)

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
        "FULL uniform, LoRA case 3",
        "FULL uniform",
    ]
    assert plan.max_capture_size == 64
    first, *lanes = str(plan).splitlines()
    assert first == "FULL_AND_PIECEWISE, 4 graphs"
    assert lanes == [
        "  PIECEWISE: 64 tokens",
        "  FULL uniform, LoRA case 3: 8 tokens",
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
        ("[]", "it is of kind None"),
        ('{"schema_version": 1, "kind": "plan"}', "schema version 1, this cgplan reads 2"),
        ('{"schema_version": 2, "kind": "capture"}', "not a plan"),
        ('{"schema_version": 1, "kind": "capture"}', "not a plan: it is of kind capture"),
        ("plan.json", r"Path\(file\).read_text\(\)"),
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


NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
FULL_DECODE_ONLY, FULL_AND_PIECEWISE = (
    CUDAGraphMode.FULL_DECODE_ONLY,
    CUDAGraphMode.FULL_AND_PIECEWISE,
)
NOT_ATTENTION = ["my::norm"]  # segments are split, but attention stands inside them


# --- the mode -------------------------------------------------------------------------------------------------


def with_mode(
    mode: CUDAGraphMode,
    support: str = "ALWAYS",
    splitting_ops: list[str] | None = None,
    spec: int = 0,
) -> Config:
    compilation = {
        "cudagraph_mode": mode,
        "attention_support": support,
        "splitting_ops": splitting_ops,
    }
    return Config.model_validate(
        {
            "compilation": compilation,
            "speculative": {"num_speculative_tokens": spec},
            "scheduler": {"max_num_seqs": 8},
        }
    )


# (asked for, attention support, splitting_ops, draft tokens) -> mode; "error" where nothing can be captured
# fmt: off
TABLE: list[tuple[CUDAGraphMode, str, list[str] | None, int, CUDAGraphMode | str]] = [
    # attention that can always be captured: every mode stays
    (NONE, "ALWAYS", None, 0, NONE),
    (PIECEWISE, "ALWAYS", None, 0, PIECEWISE),
    (FULL, "ALWAYS", None, 0, FULL),
    (FULL, "ALWAYS", NOT_ATTENTION, 2, FULL),
    (FULL_DECODE_ONLY, "ALWAYS", None, 2, FULL_DECODE_ONLY),
    (FULL_AND_PIECEWISE, "ALWAYS", None, 2, FULL_AND_PIECEWISE),
    # mixed batches cannot be FULL
    (FULL, "UNIFORM_BATCH", None, 0, FULL_AND_PIECEWISE),
    (FULL, "UNIFORM_BATCH", ["my::attention"], 0, FULL_AND_PIECEWISE),
    (FULL, "UNIFORM_BATCH", NOT_ATTENTION, 0, FULL_DECODE_ONLY),
    (FULL, "UNIFORM_BATCH", [], 0, FULL_DECODE_ONLY),
    # ... and an error where attention can never be captured
    (FULL, "NEVER", None, 0, "PIECEWISE or NONE"),
    (FULL, "NEVER", [], 0, "Choose NONE"),
    (FULL_AND_PIECEWISE, "NEVER", [], 0, "Choose NONE"),  # FULL by then: nothing to split at
    # decode cannot be FULL
    (FULL_DECODE_ONLY, "NEVER", None, 0, PIECEWISE),
    (FULL_DECODE_ONLY, "NEVER", [], 0, NONE),
    (FULL_AND_PIECEWISE, "NEVER", None, 0, PIECEWISE),
    # decode of several tokens below UNIFORM_BATCH
    (FULL, "UNIFORM_SINGLE_TOKEN_DECODE", None, 2, PIECEWISE),
    (FULL_DECODE_ONLY, "UNIFORM_SINGLE_TOKEN_DECODE", None, 2, PIECEWISE),
    (FULL_DECODE_ONLY, "UNIFORM_SINGLE_TOKEN_DECODE", NOT_ATTENTION, 2, NONE),
    (FULL_DECODE_ONLY, "UNIFORM_BATCH", None, 2, FULL_DECODE_ONLY),
    (FULL_AND_PIECEWISE, "UNIFORM_SINGLE_TOKEN_DECODE", None, 2, PIECEWISE),
    (FULL_AND_PIECEWISE, "UNIFORM_BATCH", None, 2, FULL_AND_PIECEWISE),
    # nothing to split at
    (PIECEWISE, "ALWAYS", [], 0, NONE),
    (FULL_AND_PIECEWISE, "ALWAYS", [], 0, FULL),
    (FULL_AND_PIECEWISE, "UNIFORM_BATCH", [], 2, FULL_DECODE_ONLY),
    (PIECEWISE, "ALWAYS", NOT_ATTENTION, 0, PIECEWISE),
]
# fmt: on


@pytest.mark.parametrize(("mode", "support", "ops", "spec", "expected"), TABLE)
def test_resolution_table(
    mode: CUDAGraphMode,
    support: str,
    ops: list[str] | None,
    spec: int,
    expected: CUDAGraphMode | str,
) -> None:
    asked = with_mode(mode, support, ops, spec)
    if isinstance(expected, str):
        with pytest.raises(ModeError, match="NEVER") as caught:
            resolve_mode(asked)
        assert expected in caught.value.remedy
        return
    found, changes = resolve_mode(asked)
    assert found is expected
    assert bool(changes) == (found is not mode), "each change is recorded, and nothing else"
    if changes:
        assert (changes[0].requested, changes[-1].resolved) == (mode, found)
        assert all(a.resolved is b.requested for a, b in pairwise(changes))
        assert all(change.requested is not change.resolved for change in changes)


def test_reasons_are_recorded_in_the_plan() -> None:
    plan = build_plan(with_mode(FULL, "UNIFORM_SINGLE_TOKEN_DECODE", [], 1))
    assert plan.requested_mode is FULL
    assert plan.changes[-1].resolved is plan.mode
    assert [change.reason for change in plan.changes] == [
        "attention_support is UNIFORM_SINGLE_TOKEN_DECODE: mixed batches cannot run as FULL graphs",
        "attention_support is UNIFORM_SINGLE_TOKEN_DECODE, but speculative decoding has 2 tokens a request",
    ]


def test_operators_of_attention_are_known_by_name() -> None:
    assert attention_is_split(None)
    assert attention_is_split(("vllm::unified_attention_with_output",))
    assert attention_is_split(("my::norm", "torch_attn::_varlen_attn"))
    assert not attention_is_split(())
    assert not attention_is_split(tuple(NOT_ATTENTION))


# --- ladders --------------------------------------------------------------------------------------------------

# fmt: off
LITERAL = [
    ("vllm", 3, [1, 2]),
    ("vllm", 30, [1, 2, 4, 8, 16, 24]),
    ("vllm", 300, [1, 2, 4, *range(8, 249, 8), 256, 272, 288]),
    ("vllm", 512, [1, 2, 4, *range(8, 249, 8), *range(256, 513, 16)]),
    ("sglang", 3, [1, 2, 3]),
    ("sglang", 13, [1, 2, 4, 8, 12, 13]),
    ("sglang", 40, [1, 2, 4, 8, 12, 16, 24, 32, 40]),
    ("sglang", 300, [1, 2, 4, 8, 12, *range(16, 257, 8), 272, 288, 300]),
    ("sglang", 600, [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 497, 16), 512, 544, 576, 600]),
    ("trtllm", 6, [1, 2, 4, 6]),
    ("trtllm", 129, [1, 2, 4, *range(8, 129, 8), 129]),
    ("trtllm", 300, [1, 2, 4, *range(8, 129, 8), 192, 256, 300]),
    ("trtllm", 512, [1, 2, 4, *range(8, 129, 8), *range(192, 513, 64)]),
    ("powers_of_two", 100, [1, 2, 4, 8, 16, 32, 64, 100]),
    ("vllm_interactivity", 20, [*range(1, 21)]),
    ("vllm_interactivity", 300, [*range(1, 33), *range(40, 257, 8), 272, 288]),
]
# fmt: on


def test_a_configuration_may_name_each_ladder() -> None:
    assert set(get_args(LadderName)) == set(LADDERS) == {name for name, *_ in LITERAL}


@pytest.mark.parametrize(("name", "maximum", "expected"), LITERAL)
def test_ladders_literally(name: str, maximum: int, expected: list[int]) -> None:
    assert list(LADDERS[name](maximum)) == expected


# --- capture sizes --------------------------------------------------------------------------------------------


def config_of(q: int = 1, seqs: int = 256, tokens: int = 8192, **compilation: Any) -> Config:
    return Config.model_validate(
        {
            "compilation": compilation,
            "scheduler": {"max_num_seqs": seqs, "max_num_batched_tokens": tokens},
            "speculative": {"num_speculative_tokens": q - 1},
        }
    )


def resolved(mode: str = "FULL", **given: Any) -> CaptureSizes:
    return resolve_sizes(config_of(**given), CUDAGraphMode[mode])


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        # listed sizes are sorted and unique
        ({"cudagraph_capture_sizes": [16, 1, 4, 4, 1]}, [1, 4, 16]),
        ({"mode": "NONE", "cudagraph_capture_sizes": [1, 2]}, []),
        # vLLM's ladder up to twice the requests, with max_num_seqs and max_num_batched_tokens where they fit
        ({"seqs": 10}, [1, 2, 4, 8, 10, 16]),
        ({"seqs": 16}, [1, 2, 4, 8, 16, 24, 32]),
        ({"tokens": 100}, [1, 2, 4, *range(8, 97, 8), 100]),
        ({"seqs": 10, "max_cudagraph_capture_size": 16}, [1, 2, 4, 8, 16]),
        # whole requests
        ({"q": 3, "seqs": 4}, [3, 6, 9, 12, 18, 24]),
        ({"q": 4, "cudagraph_capture_sizes": [5]}, [4]),
        # other ladders reach the maximum
        ({"seqs": 50, "cudagraph_capture_sizes": "powers_of_two"}, [1, 2, 4, 8, 16, 32, 64, 100]),
        (
            {"cudagraph_capture_sizes": "sglang", "max_cudagraph_capture_size": 13},
            [1, 2, 4, 8, 12, 13],
        ),
        ({"q": 4, "seqs": 8, "cudagraph_capture_sizes": "powers_of_two"}, [4, 8, 16, 32, 64]),
    ],
)
def test_sizes(given: dict[str, Any], sizes: list[int]) -> None:
    found = resolved(**given)
    assert list(found.sizes) == sizes


@pytest.mark.parametrize(
    ("given", "largest", "warning"),
    [
        ({"seqs": 8, "max_cudagraph_capture_size": 24}, 24, None),
        (
            {"seqs": 8, "max_cudagraph_capture_size": 20},
            16,
            "max_cudagraph_capture_size 20 is truncated to 16: the ladder ends at 16",
        ),
        (
            {"tokens": 64, "max_cudagraph_capture_size": 512},
            64,
            "max_cudagraph_capture_size 512 is truncated to 64: max_num_batched_tokens is 64",
        ),
        ({"seqs": 1000}, 512, None),
        (
            {"tokens": 100, "cudagraph_capture_sizes": [8, 128, 256, 100]},
            100,
            "capture sizes 128, 256 are dropped: max_num_batched_tokens is 100; raise it to 256, or list at most 100",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_left_out_with_a_warning(
    given: Any, largest: int, warning: str | None
) -> None:
    plan = build_plan(config_of(**given))
    assert plan.max_capture_size == largest
    assert plan.warnings == (() if warning is None else (warning,))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tokens": 4, "cudagraph_capture_sizes": [8, 16]}, "8, 16"),
        (
            {"q": 8, "cudagraph_capture_sizes": "trtllm", "max_cudagraph_capture_size": 4},
            "ladder trtllm",
        ),
        ({"q": 3, "cudagraph_capture_sizes": [1, 2]}, "multiples of 3"),
    ],
)
def test_no_size_left_is_an_error_that_says_what_to_raise(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match="no capture size is left") as caught:
        resolved(**given)
    assert words in caught.value.message
    assert "max_num_batched_tokens" in caught.value.remedy


# --- warnings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("piecewise", "unused"),
    [("auto", []), ("modules", []), ("ops", ["modules"]), ("wrappers", ["ops", "modules"])],
)
def test_splits_that_nothing_looks_at_are_pointed_out(piecewise: str, unused: list[str]) -> None:
    split = {
        "piecewise": piecewise,
        "splitting_ops": ["aten::softmax"],
        "splitting_modules": ["attend"],
    }
    warnings = plan_of("PIECEWISE", [1, 4], **split).warnings
    assert [warning.partition(" are not looked at")[0] for warning in warnings] == [
        f"compilation.splitting_{kind}" for kind in unused
    ]
    for kind in unused:
        assert not plan_of("PIECEWISE", [1, 4], **{**split, f"splitting_{kind}": []}).warnings[1:]
    assert plan_of("FULL", [1, 4], **split).warnings == (
        "compilation.splitting_modules are not looked at: mode FULL has no segments; set "
        "cudagraph_mode to PIECEWISE",
    )
    assert not plan_of("FULL", [1, 4], splitting_ops=["aten::softmax"]).warnings
    assert not plan_of("AUTO", [1, 4], splitting_modules=["attend"]).warnings
    assert not plan_of("PIECEWISE", [1, 4], splitting_ops=["aten::softmax"]).warnings


def test_listed_sizes_without_a_graph_are_pointed_out() -> None:
    plan = plan_of("FULL_DECODE_ONLY", [2, 4, 16], seqs=4)
    assert [descriptor.num_tokens for _, descriptor in plan.keys] == [4, 2]
    assert plan.warnings == (
        "capture sizes 16 have no graph: a decode batch has at most 4 requests, 1 token each",
    )
    assert not plan_of("FULL", [2, 4, 16], seqs=4).warnings


def of_dims(sizes: dict[str, int], **compilation: Any) -> Config:
    dims = {name: {"max": 999, "sizes": list(range(1, n + 1))} for name, n in sizes.items()}
    shape = {"shape": list(dims), "dtype": "float32", "pad": 0}
    return validate_config(
        {
            "model": {"output_shapes": [["a"]]},
            "dims": dims,
            "inputs": {"x": shape},
            "compilation": compilation,
        }
    )


def test_a_grid_of_too_many_boxes_is_refused_before_it_is_made() -> None:
    with pytest.raises(ConfigError, match="c has 41 sizes: a x b x c span 10,250 boxes") as caught:
        build_plan(of_dims({"a": 10, "b": 25, "c": 41}))
    assert "10,000 are allowed" in caught.value.message
    assert "dims.c.sizes" in caught.value.remedy
    assert len(build_plan(of_dims({"a": 10, "b": 25, "c": 40})).keys) == 10_000


def test_boxes_that_span_too_large_a_grid_are_refused() -> None:
    """A dispatcher has an answer for each combination of their sizes."""
    sizes = {"a": 50, "b": 50, "c": 50}
    with pytest.raises(ConfigError, match="a has 50 sizes: a x b x c span 125,000 boxes") as caught:
        build_plan(of_dims(sizes, boxes=[[n, n, n] for n in range(1, 51)]))
    assert "share sizes" in caught.value.remedy
    assert len(build_plan(of_dims(sizes, boxes=[[n, n, n] for n in range(1, 41)])).keys) == 40
