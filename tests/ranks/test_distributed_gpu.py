"""Two GPUs: CUDA IPC, the Triton kernels and NCCL, inside of captured graphs."""

from __future__ import annotations

import pytest
import rank_gpu as gpu
import rank_programs as programs
import torch
from ranks import run_ranks, values

from cgplan.modes import CUDAGraphMode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two GPUs"),
]
LIMITS = {"patience": 60, "timeout": 240}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("one_shot_bytes", [0, 1 << 23])
def test_sums_are_right_through_many_replays(dtype: torch.dtype, one_shot_bytes: int) -> None:
    """Both kernels: one pack, so that rank 1's slice is empty; several blocks; a last block and slice that are not
    whole; one pack more than blocks take.
    """
    sizes = [8, 24, 2048, 2056, 4104, 100_000, 131_080, 1 << 20]
    found = values(run_ranks(2, gpu.replays, dtype, sizes, one_shot_bytes, 50, **LIMITS))
    assert len({str(sums) for sums, _ in found}) == 1, "all ranks hold the same bits"
    for _, registration in found:
        assert registration.rows == 2 * len(sizes)
        assert registration.mapped_bytes


def test_a_rank_that_raises_behind_queued_sums() -> None:
    """Both ranks' kernels wait for others that never come; all end them, raise the same, and sum rightly again."""
    found = values(run_ranks(2, gpu.raises_behind_queued_sums, patience=15, timeout=240))
    assert len({said for said, _, _ in found}) == 1
    assert "rank 1 failed in the capture pass" in found[0][0][1]
    assert [wrong for _, *wrong in found] == [[0, 0], [0, 0]]


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE])
def test_graphs_that_sum_unlike_tensors_are_not_registered(mode: CUDAGraphMode) -> None:
    for outcome in run_ranks(2, programs.captures_unlike_inputs, "layout", mode, "cuda", **LIMITS):
        assert outcome.error == "RankMismatchError"
        assert (
            "rank 1 differs from rank 0: all-reduce 3: [32, 4] torch.float32, rank 0 has [4, 32]"
            in outcome.message
        )


def test_ranks_that_are_late_at_random() -> None:
    assert values(run_ranks(2, gpu.late_at_random, **LIMITS)) == [0, 0]


def test_a_handle_that_is_opened_twice() -> None:
    assert values(run_ranks(2, gpu.one_allocation, **LIMITS)) == [0, 0]


def test_counts_that_wrap_around() -> None:
    assert values(run_ranks(2, gpu.counts_wrap_around, **LIMITS)) == [0, 0]


@pytest.mark.parametrize("all_reduce", ["custom", "nccl"])
def test_the_split_decoder(all_reduce: str) -> None:
    given = {"all_reduce": all_reduce}
    for worst, _, rows, _ in values(
        run_ranks(2, programs.split_decoder, 2, "cuda", kwargs=given, **LIMITS)
    ):
        assert worst < 2e-3
        assert rows == (8 if all_reduce == "custom" else 0)


def test_piecewise_segments_reduce_over_the_staging_buffer() -> None:
    mode = {"cudagraph_mode": "PIECEWISE", "splitting_modules": '["layers.*.self_attn"]'}
    for worst, _, rows, _ in values(
        run_ranks(2, programs.split_decoder, 2, "cuda", kwargs=mode, **LIMITS)
    ):
        assert worst < 2e-3
        assert rows == 0


def test_a_replay_before_registration_sets_the_error_word() -> None:
    for said in values(run_ranks(2, gpu.unregistered, **LIMITS)):
        assert said == (
            "RegistrationError",
            "a graph was replayed before its buffers were registered",
        )


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_wait_ends_after_the_timeout(is_killed: bool) -> None:
    """Rank 1 does not come: rank 0's kernel leaves the barrier with NaN, and check() raises."""
    found = run_ranks(2, gpu.alone, is_killed, patience=5, timeout=120)
    assert (found[0].error, found[0].exit_code) == ("AllReduceError", 45), found[0].trace
    assert "timed out" in found[0].message
    assert found[1].exit_code == (-9 if is_killed else 0)


def test_two_ranks_on_one_gpu() -> None:
    for outcome in run_ranks(2, gpu.place, "cuda:0", **LIMITS):
        assert outcome.error == "BackendError"
        assert "ranks 0 and 1 are on one GPU" in outcome.message


def test_a_rank_without_a_gpu() -> None:
    count = torch.cuda.device_count() + 1
    for outcome in run_ranks(count, gpu.place, "cuda", **LIMITS):
        assert outcome.error == "BackendError"
        assert f"rank {count - 1} on" in outcome.message
        assert "has no GPU" in outcome.message


@pytest.mark.parametrize("wanted", ["custom", "auto"])
def test_expandable_segments(wanted: str) -> None:
    found = run_ranks(2, gpu.expandable, wanted, **LIMITS)
    if wanted == "auto":
        assert [outcome.value for outcome in found] == ["nccl", "nccl"]
        return
    for outcome in found:
        assert outcome.error == "AllReduceError"
        assert "expandable segments are on" in outcome.message


def test_memory_is_back_after_close_and_recapture() -> None:
    for reserved in values(run_ranks(2, gpu.memory, **LIMITS)):
        assert max(reserved) <= reserved[0] + (4 << 20), reserved


def test_an_audit_knows_the_memory_of_peers() -> None:
    for kinds, findings, closed in values(run_ranks(2, programs.audits, "cuda", **LIMITS)):
        assert findings == []
        assert "peer" in kinds
        assert closed == {"unmapped"}
