"""Two and four real processes: the registry, the all-reduce on the CPU, agreement, recapture."""

from __future__ import annotations

import pytest
import rank_programs as programs
import torch
from ranks import run_ranks, values


@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.bfloat16), (2, torch.float16), (4, torch.float32)])
def test_sums_are_right_through_many_replays(world_size: int, dtype: torch.dtype) -> None:
    """Inputs change, and each rank finds bit for bit what a sum in the order of the ranks gives."""
    found = values(run_ranks(world_size, programs.replays, dtype, [(3, 8), (1, 64), (5, 40)], 3, 20))
    for registration, _ in found:
        assert registration.rows == 9
        assert registration.opened == (world_size - 1) * registration.bases


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_session_captures_registers_and_captures_again(world_size: int) -> None:
    for rows, records in values(run_ranks(world_size, programs.capture_and_run, world_size)):
        assert rows == [4, 4]
        assert [record.rank for record in records] == list(range(world_size))
        for record in records:
            assert (record.all_reduce, record.rows, record.buffers, record.bases) == ("custom", 4, 4, 1)
            assert record.mapped_bytes == (world_size - 1) << 20
            assert 0 < record.registration_seconds < record.session_seconds


def test_rank_0s_plan_is_captured() -> None:
    assert values(run_ranks(2, programs.rank_0s_plan)) == [(1, 2), (1, 2)]


SUMS = [16.0, 6.0, 10.0, 8, 2.0 * (1 << 16), 0.0, 24.0]


def test_the_custom_all_reduce_says_once_what_it_leaves_to_others() -> None:
    for rank, (name, said, sums) in enumerate(values(run_ranks(2, programs.choice, "custom"))):
        assert (name, sums) == ("custom", SUMS)
        assert said == ([] if rank else [
            "custom all-reduce: 12 bytes are not a multiple of 16; nccl does it",
            "custom all-reduce: torch.int64 is none of float32, float16, bfloat16; nccl does it",
            "custom all-reduce: 256 KiB are more than distributed.all_reduce_max_size; nccl does it",
        ])  # fmt: skip


def test_auto_is_torch_distributed_where_custom_cannot_work() -> None:
    for rank, (name, said, sums) in enumerate(values(run_ranks(2, programs.choice, "auto", 2))):
        assert (name, sums) == ("nccl", SUMS)
        assert said == ([] if rank else ["custom all-reduce: rank 0: the ranks are on several machines; nccl does it"])


@pytest.mark.parametrize(("wanted", "hosts"), [("custom", 2), ("symm_mem", 1)])
def test_what_was_asked_for_and_cannot_work_is_an_error_on_all_ranks(wanted: str, hosts: int) -> None:
    for outcome in run_ranks(2, programs.choice, wanted, hosts):
        assert (outcome.error, outcome.exit_code) == ("AllReduceError", 45)
        assert f"compilation.all_reduce: {wanted} cannot work here: rank 0: " in outcome.message
