"""Modes and descriptors, the words of plans."""

from __future__ import annotations

import pytest

from cgplan.errors import ConfigError
from cgplan.modes import AttentionSupport, BatchDescriptor, CUDAGraphMode

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
FULL_DECODE_ONLY, FULL_AND_PIECEWISE = (
    CUDAGraphMode.FULL_DECODE_ONLY,
    CUDAGraphMode.FULL_AND_PIECEWISE,
)


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
def test_what_each_mode_means(
    mode: CUDAGraphMode, decode: CUDAGraphMode, mixed: CUDAGraphMode, separate: bool
) -> None:
    assert mode.decode_mode() is decode
    assert mode.mixed_mode() is mixed
    assert mode.separate_routine() is separate
    for runtime in (NONE, PIECEWISE, FULL):
        assert mode.has_mode(runtime) is (runtime in (decode, mixed))


def test_modes_are_read_in_any_case() -> None:
    assert CUDAGraphMode.parse(" Full_And_Piecewise ") is FULL_AND_PIECEWISE
    assert AttentionSupport.parse("uniform_batch") is AttentionSupport.UNIFORM_BATCH


def test_an_unknown_mode_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        CUDAGraphMode.parse("FULL_DECODE")
    assert "Did you mean 'FULL_DECODE_ONLY'?" in caught.value.remedy
    with pytest.raises(ConfigError) as caught:
        AttentionSupport.parse("sometimes")
    assert "NEVER, UNIFORM_SINGLE_TOKEN_DECODE, UNIFORM_BATCH, ALWAYS" in caught.value.remedy


def test_descriptors_print_what_matters() -> None:
    assert str(BatchDescriptor(8)) == "num_tokens=8"
    assert (
        str(BatchDescriptor(8, 4, True, True, 3))
        == "num_tokens=8 num_reqs=4 uniform num_active_loras=3"
    )
    assert BatchDescriptor(8, 4, True).uniform_query_len == 2
    assert BatchDescriptor(8, 4).uniform_query_len is None
