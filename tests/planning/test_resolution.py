"""Mode resolution: the whole table, and the reasons."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest

from cgplan.config import Config
from cgplan.errors import ConfigError, ModeError
from cgplan.modes import AttentionSupport, CUDAGraphMode
from cgplan.planning import build_plan
from cgplan.planning.build import attention_is_split, resolve_mode

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
FULL_DECODE_ONLY, FULL_AND_PIECEWISE = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE

SPLIT: list[list[str] | None] = [None, ["my::attention"], ["aten::scaled_dot_product_attention", "my::norm"]]
NOT_ATTENTION = ["my::norm"]  # segments are split, but attention stands inside them


def config(
    mode: CUDAGraphMode, support: str = "ALWAYS", splitting_ops: list[str] | None = None, spec: int = 0, **more: Any
) -> Config:
    compilation = {"cudagraph_mode": mode, "attention_support": support, "splitting_ops": splitting_ops, **more}
    return Config.model_validate(
        {"compilation": compilation, "speculative": {"num_speculative_tokens": spec}, "scheduler": {"max_num_seqs": 8}}
    )


def resolved(*args: Any, **kwargs: Any) -> CUDAGraphMode:
    return resolve_mode(config(*args, **kwargs))[0]


# (asked for, attention support, splitting_ops, draft tokens) -> mode; "error" where nothing can be captured
# fmt: off
TABLE: list[tuple[CUDAGraphMode, str, list[str] | None, int, CUDAGraphMode | str]] = [
    # attention that can always be captured: every mode stays
    (NONE, "ALWAYS", None, 0, NONE),
    (PIECEWISE, "ALWAYS", None, 0, PIECEWISE),
    (FULL, "ALWAYS", None, 0, FULL),
    (FULL, "ALWAYS", None, 2, FULL),
    (FULL, "ALWAYS", [], 0, FULL),
    (FULL, "ALWAYS", NOT_ATTENTION, 2, FULL),
    (FULL_DECODE_ONLY, "ALWAYS", None, 2, FULL_DECODE_ONLY),
    (FULL_DECODE_ONLY, "ALWAYS", [], 0, FULL_DECODE_ONLY),
    (FULL_AND_PIECEWISE, "ALWAYS", None, 2, FULL_AND_PIECEWISE),
    # mixed batches cannot be FULL
    (FULL, "UNIFORM_BATCH", None, 0, FULL_AND_PIECEWISE),
    (FULL, "UNIFORM_BATCH", None, 2, FULL_AND_PIECEWISE),
    (FULL, "UNIFORM_BATCH", ["my::attention"], 0, FULL_AND_PIECEWISE),
    (FULL, "UNIFORM_BATCH", NOT_ATTENTION, 0, FULL_DECODE_ONLY),
    (FULL, "UNIFORM_BATCH", [], 0, FULL_DECODE_ONLY),
    (FULL, "UNIFORM_SINGLE_TOKEN_DECODE", None, 0, FULL_AND_PIECEWISE),
    (FULL, "UNIFORM_SINGLE_TOKEN_DECODE", [], 0, FULL_DECODE_ONLY),
    # ... and an error where attention can never be captured
    (FULL, "NEVER", None, 0, "PIECEWISE or NONE"),
    (FULL, "NEVER", [], 0, "Choose NONE"),
    (FULL, "NEVER", NOT_ATTENTION, 0, "Choose NONE"),
    (FULL_AND_PIECEWISE, "NEVER", [], 0, "Choose NONE"),  # FULL by then: nothing to split at
    # decode cannot be FULL
    (FULL_DECODE_ONLY, "NEVER", None, 0, PIECEWISE),
    (FULL_DECODE_ONLY, "NEVER", [], 0, NONE),
    (FULL_DECODE_ONLY, "NEVER", NOT_ATTENTION, 0, NONE),
    (FULL_AND_PIECEWISE, "NEVER", None, 0, PIECEWISE),
    (PIECEWISE, "NEVER", None, 0, PIECEWISE),
    (NONE, "NEVER", None, 0, NONE),
    # decode of several tokens below UNIFORM_BATCH
    (FULL, "UNIFORM_SINGLE_TOKEN_DECODE", None, 2, PIECEWISE),
    (FULL, "UNIFORM_SINGLE_TOKEN_DECODE", [], 2, NONE),
    (FULL_DECODE_ONLY, "UNIFORM_SINGLE_TOKEN_DECODE", None, 0, FULL_DECODE_ONLY),
    (FULL_DECODE_ONLY, "UNIFORM_SINGLE_TOKEN_DECODE", None, 2, PIECEWISE),
    (FULL_DECODE_ONLY, "UNIFORM_SINGLE_TOKEN_DECODE", NOT_ATTENTION, 2, NONE),
    (FULL_DECODE_ONLY, "UNIFORM_BATCH", None, 2, FULL_DECODE_ONLY),
    (FULL_AND_PIECEWISE, "UNIFORM_SINGLE_TOKEN_DECODE", None, 0, FULL_AND_PIECEWISE),
    (FULL_AND_PIECEWISE, "UNIFORM_SINGLE_TOKEN_DECODE", None, 2, PIECEWISE),
    (FULL_AND_PIECEWISE, "UNIFORM_BATCH", None, 2, FULL_AND_PIECEWISE),
    # nothing to split at
    (PIECEWISE, "ALWAYS", [], 0, NONE),
    (PIECEWISE, "NEVER", [], 0, NONE),
    (FULL_AND_PIECEWISE, "ALWAYS", [], 0, FULL),
    (FULL_AND_PIECEWISE, "UNIFORM_BATCH", [], 2, FULL_DECODE_ONLY),
    (PIECEWISE, "ALWAYS", NOT_ATTENTION, 0, PIECEWISE),
]
# fmt: on


@pytest.mark.parametrize(("mode", "support", "ops", "spec", "expected"), TABLE)
def test_resolution_table(
    mode: CUDAGraphMode, support: str, ops: list[str] | None, spec: int, expected: CUDAGraphMode | str
) -> None:
    asked = config(mode, support, ops, spec)
    if isinstance(expected, str):
        with pytest.raises(ModeError) as caught:
            resolve_mode(asked)
        assert "NEVER" in caught.value.message
        assert expected in caught.value.remedy
        return
    found, changes = resolve_mode(asked)
    assert found is expected
    assert bool(changes) == (found is not mode), "each change is recorded, and nothing else"
    if changes:
        assert changes[0].requested is mode
        assert changes[-1].resolved is found
        assert all(a.resolved is b.requested for a, b in pairwise(changes))
        assert all(change.requested is not change.resolved for change in changes)


@pytest.mark.parametrize(
    ("mode", "support", "ops", "spec", "reasons"),
    [
        (PIECEWISE, "ALWAYS", [], 0, ["splitting_ops is empty"]),
        (FULL, "UNIFORM_BATCH", None, 0, ["attention_support is UNIFORM_BATCH: mixed batches"]),
        (FULL_DECODE_ONLY, "NEVER", None, 0, ["attention_support is NEVER"]),
        (FULL_DECODE_ONLY, "UNIFORM_SINGLE_TOKEN_DECODE", None, 2, ["speculative decoding has 3 tokens a request"]),
        (FULL_AND_PIECEWISE, "UNIFORM_BATCH", [], 0, ["splitting_ops is empty", "mixed batches"]),
        (FULL, "UNIFORM_SINGLE_TOKEN_DECODE", [], 1, ["mixed batches", "has 2 tokens a request"]),
    ],
)
def test_reasons_are_recorded_in_the_plan(
    mode: CUDAGraphMode, support: str, ops: list[str] | None, spec: int, reasons: list[str]
) -> None:
    plan = build_plan(config(mode, support, ops, spec))
    assert plan.requested_mode is mode
    assert len(plan.changes) == len(reasons)
    for change, reason in zip(plan.changes, reasons, strict=True):
        assert reason in change.reason
    assert plan.changes[-1].resolved is plan.mode


@pytest.mark.parametrize(
    ("mode", "support", "ops", "spec"),
    list(product(CUDAGraphMode, AttentionSupport, [*SPLIT, NOT_ATTENTION, []], [0, 1])),
)
def test_what_comes_out_can_always_be_captured(
    mode: CUDAGraphMode, support: AttentionSupport, ops: list[str] | None, spec: int
) -> None:
    try:
        found = resolved(mode, support.name, ops, spec)
    except ModeError:
        assert support is AttentionSupport.NEVER
        return
    if found.mixed_mode() is FULL:
        assert support is AttentionSupport.ALWAYS
    if found.decode_mode() is FULL:
        assert support is not AttentionSupport.NEVER
        assert spec == 0 or support >= AttentionSupport.UNIFORM_BATCH
    if found.has_mode(PIECEWISE):
        assert ops != []
    assert resolved(found, support.name, ops, spec) is found, "resolving twice changes nothing"


def test_operators_of_attention_are_known_by_name() -> None:
    assert attention_is_split(None)
    assert all(attention_is_split(None if ops is None else tuple(ops)) for ops in SPLIT)
    assert attention_is_split(("vllm::unified_attention_with_output",))
    assert attention_is_split(("torch_attn::_varlen_attn",))
    assert not attention_is_split(())
    assert not attention_is_split(tuple(NOT_ATTENTION))


# --- the modes themselves -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "decode", "mixed", "separate"),
    [
        (NONE, NONE, NONE, False),
        (PIECEWISE, PIECEWISE, PIECEWISE, False),
        (FULL, FULL, FULL, False),
        (FULL_DECODE_ONLY, FULL, NONE, True),
        (FULL_AND_PIECEWISE, FULL, PIECEWISE, True),
    ],
)
def test_what_each_mode_means(mode: CUDAGraphMode, decode: CUDAGraphMode, mixed: CUDAGraphMode, separate: bool) -> None:
    assert mode.decode_mode() is decode
    assert mode.mixed_mode() is mixed
    assert mode.separate_routine() is separate
    for runtime in (NONE, PIECEWISE, FULL):
        assert mode.has_mode(runtime) is (runtime in (decode, mixed))


@pytest.mark.parametrize("text", ["full_and_piecewise", "Full_And_Piecewise", " FULL_AND_PIECEWISE "])
def test_modes_are_read_in_any_case(text: str) -> None:
    assert CUDAGraphMode.parse(text) is FULL_AND_PIECEWISE
    assert AttentionSupport.parse("uniform_batch") is AttentionSupport.UNIFORM_BATCH


def test_an_unknown_mode_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        CUDAGraphMode.parse("FULL_DECODE")
    assert "did you mean FULL_DECODE_ONLY?" in caught.value.remedy
    with pytest.raises(ConfigError) as caught:
        AttentionSupport.parse("sometimes")
    assert "NEVER, UNIFORM_SINGLE_TOKEN_DECODE, UNIFORM_BATCH, ALWAYS" in caught.value.remedy


def test_levels_of_attention_support_are_ordered() -> None:
    assert [int(level) for level in AttentionSupport] == [0, 1, 2, 3]
    assert AttentionSupport.NEVER < AttentionSupport.UNIFORM_BATCH < AttentionSupport.ALWAYS
