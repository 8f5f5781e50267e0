"""Ladders, and the way from a configuration to its capture sizes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgplan.config import Config
from cgplan.errors import PlanError
from cgplan.modes import CUDAGraphMode
from cgplan.planning import LADDERS, build_plan
from cgplan.planning.build import resolve_sizes

maxima = st.integers(1, 2000)


def sizes_of(mode: str = "FULL", q: int = 1, seqs: int = 256, tokens: int = 8192, **compilation: Any) -> list[int]:
    return list(resolve_sizes(config(q, seqs, tokens, **compilation), CUDAGraphMode[mode]).sizes)


def warnings_of(mode: str = "FULL", q: int = 1, seqs: int = 256, tokens: int = 8192, **compilation: Any) -> list[str]:
    return list(resolve_sizes(config(q, seqs, tokens, **compilation), CUDAGraphMode[mode]).warnings)


def config(q: int, seqs: int, tokens: int, **compilation: Any) -> Config:
    return Config.model_validate(
        {
            "compilation": compilation,
            "scheduler": {"max_num_seqs": seqs, "max_num_batched_tokens": tokens},
            "speculative": {"num_speculative_tokens": q - 1},
        }
    )


# --- the ladders ----------------------------------------------------------------------------------------------

# fmt: off
LITERAL = [
    ("vllm", 1, [1]),
    ("vllm", 3, [1, 2]),
    ("vllm", 8, [1, 2, 4, 8]),
    ("vllm", 30, [1, 2, 4, 8, 16, 24]),
    ("vllm", 300, [1, 2, 4, *range(8, 249, 8), 256, 272, 288]),
    ("vllm", 512, [1, 2, 4, *range(8, 249, 8), *range(256, 513, 16)]),
    ("sglang", 1, [1]),
    ("sglang", 3, [1, 2, 3]),
    ("sglang", 12, [1, 2, 4, 8, 12]),
    ("sglang", 13, [1, 2, 4, 8, 12, 13]),
    ("sglang", 40, [1, 2, 4, 8, 12, 16, 24, 32, 40]),
    ("sglang", 256, [1, 2, 4, 8, 12, *range(16, 257, 8)]),
    ("sglang", 300, [1, 2, 4, 8, 12, *range(16, 257, 8), 272, 288, 300]),
    ("sglang", 600, [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 497, 16), 512, 544, 576, 600]),
    ("trtllm", 1, [1]),
    ("trtllm", 6, [1, 2, 4, 6]),
    ("trtllm", 128, [1, 2, 4, *range(8, 129, 8)]),
    ("trtllm", 129, [1, 2, 4, *range(8, 129, 8), 129]),
    ("trtllm", 300, [1, 2, 4, *range(8, 129, 8), 192, 256, 300]),
    ("trtllm", 512, [1, 2, 4, *range(8, 129, 8), *range(192, 513, 64)]),
    ("powers_of_two", 1, [1]),
    ("powers_of_two", 8, [1, 2, 4, 8]),
    ("powers_of_two", 100, [1, 2, 4, 8, 16, 32, 64, 100]),
]
# fmt: on


@pytest.mark.parametrize(("name", "maximum", "expected"), LITERAL)
def test_ladders_literally(name: str, maximum: int, expected: list[int]) -> None:
    assert list(LADDERS[name](maximum)) == expected


@given(name=st.sampled_from(sorted(LADDERS)), maximum=maxima)
def test_ladders_ascend_from_one_and_stay_below_the_maximum(name: str, maximum: int) -> None:
    sizes = LADDERS[name](maximum)
    assert sizes[0] == 1
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] <= maximum
    if name != "vllm":
        assert sizes[-1] == maximum


@given(name=st.sampled_from(sorted(LADDERS)), small=maxima, large=maxima)
def test_a_larger_maximum_keeps_the_smaller_ladder(name: str, small: int, large: int) -> None:
    small, large = sorted((small, large))
    kept = set(LADDERS[name](small)) - {small}
    assert kept <= set(LADDERS[name](large))


# --- sizes that the user gave ---------------------------------------------------------------------------------


def test_given_sizes_are_sorted_and_unique() -> None:
    assert sizes_of(cudagraph_capture_sizes=[16, 1, 4, 4, 1]) == [1, 4, 16]
    assert warnings_of(cudagraph_capture_sizes=[16, 1, 4, 4, 1]) == []


def test_given_sizes_above_the_scheduler_are_dropped_with_a_warning() -> None:
    assert sizes_of(tokens=100, cudagraph_capture_sizes=[8, 128, 256, 100]) == [8, 100]
    (warning,) = warnings_of(tokens=100, cudagraph_capture_sizes=[8, 128, 256, 100])
    assert "128, 256" in warning
    assert "max_num_batched_tokens = 100" in warning


def test_no_size_left_is_an_error_that_says_what_to_raise() -> None:
    with pytest.raises(PlanError) as caught:
        sizes_of(tokens=4, cudagraph_capture_sizes=[8, 16])
    assert "8, 16" in caught.value.message
    assert "max_num_batched_tokens" in caught.value.remedy


def test_nothing_is_captured_in_mode_none() -> None:
    assert sizes_of("NONE", cudagraph_capture_sizes=[1, 2]) == []
    assert build_plan(Config.model_validate({"compilation": {"cudagraph_mode": "NONE"}})).keys == ()


# --- sizes from a ladder --------------------------------------------------------------------------------------


def test_the_default_is_vllms_ladder_up_to_twice_the_requests() -> None:
    assert sizes_of(seqs=10) == [1, 2, 4, 8, 10, 16]  # the maximum 20 is off the stride
    assert sizes_of(seqs=16) == [1, 2, 4, 8, 16, 24, 32]
    assert sizes_of(seqs=1000)[-1] == 512
    assert sizes_of(seqs=256, tokens=100) == [1, 2, 4, *range(8, 97, 8), 100]  # max_num_batched_tokens itself fits


def test_speculative_sizes_hold_whole_requests() -> None:
    assert sizes_of(q=3, seqs=4) == [3, 6, 9, 12, 18, 24]


@pytest.mark.parametrize(("asked", "largest"), [(20, 16), (24, 24), (300, 288)])
def test_a_maximum_off_the_stride_is_truncated_with_a_warning(asked: int, largest: int) -> None:
    assert sizes_of(seqs=8, max_cudagraph_capture_size=asked)[-1] == largest
    warnings = warnings_of(seqs=8, max_cudagraph_capture_size=asked)
    assert bool(warnings) == (asked != largest)
    if warnings:
        assert str(asked) in warnings[0]
        assert str(largest) in warnings[0]


def test_a_maximum_above_the_scheduler_says_so() -> None:
    assert sizes_of(tokens=64, max_cudagraph_capture_size=512)[-1] == 64
    assert "max_num_batched_tokens is 64" in warnings_of(tokens=64, max_cudagraph_capture_size=512)[0]


def test_a_named_ladder_reaches_the_maximum() -> None:
    assert sizes_of(seqs=50, cudagraph_capture_sizes="powers_of_two") == [1, 2, 4, 8, 16, 32, 64, 100]
    assert sizes_of(cudagraph_capture_sizes="sglang", max_cudagraph_capture_size=13) == [1, 2, 4, 8, 12, 13]
    assert sizes_of(q=4, seqs=8, cudagraph_capture_sizes="powers_of_two") == [4, 8, 16, 32, 64]


def test_a_query_length_above_the_maximum_leaves_no_size() -> None:
    with pytest.raises(PlanError, match="no capture size is left"):
        sizes_of(q=8, cudagraph_capture_sizes="trtllm", max_cudagraph_capture_size=4)
    with pytest.raises(PlanError, match="no capture size is left"):
        sizes_of(q=3, cudagraph_capture_sizes=[1, 2])


@given(
    mode=st.sampled_from([m for m in CUDAGraphMode if m is not CUDAGraphMode.NONE]),
    q=st.integers(1, 6),
    seqs=st.integers(1, 300),
    tokens=st.integers(1, 2000),
    sizes=st.none() | st.sampled_from(sorted(LADDERS)) | st.lists(st.integers(1, 600), min_size=1, max_size=12),
    maximum=st.none() | st.integers(1, 900),
)
def test_sizes_stay_within_all_bounds(
    mode: CUDAGraphMode, q: int, seqs: int, tokens: int, sizes: list[int] | str | None, maximum: int | None
) -> None:
    if isinstance(sizes, list):
        maximum = None
    asked = config(q, seqs, tokens, cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=maximum)
    try:
        found = resolve_sizes(asked, mode)
    except PlanError as error:
        assert "no capture size is left" in error.message  # noqa: PT017
        assert (isinstance(sizes, list) and min(sizes) > tokens) or q > 1
        return
    assert list(found.sizes) == sorted(set(found.sizes))
    assert found.sizes[0] >= 1
    assert found.sizes[-1] <= tokens
    if isinstance(sizes, list):
        assert found.sizes[-1] <= max(sizes)
    else:
        assert found.sizes[-1] <= (maximum or min(2 * q * seqs, 512))
    if mode.decode_mode() is CUDAGraphMode.FULL and q > 1:
        assert all(size % q == 0 for size in found.sizes)
    elif isinstance(sizes, list):
        assert set(found.sizes) == {s for s in sizes if s <= tokens}
