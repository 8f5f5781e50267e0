"""Something went wrong on one rank: all raise the same, no sum is wrong, and all go on or all know they cannot."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import rank_faults as faults
import torch
from ranks import run_ranks, values

AGREED = "rank 1 failed in {}: .*{}"


def all_say(said: list[tuple[str, object]], words: str, error: str = "RankFailedError") -> None:
    assert {name for name, _ in said} == {error}
    assert len({message for _, message in said}) == 1, said
    assert re.search(words, str(said[0][1])), said[0][1]


@pytest.mark.parametrize(
    ("world_size", "budget", "phase", "all_reduce"),
    [(2, True, "eager", "custom"), (4, False, "capture", "custom"), (2, False, "eager", "nccl")],
)
def test_a_rank_that_raises_twice(world_size: int, budget: bool, phase: str, all_reduce: str) -> None:
    """An unfinished sum of gloo's is not taken up by the next one."""
    patience = 3 if all_reduce == "nccl" else 60  # others need not wait so long in a custom sum
    outcomes = run_ranks(world_size, faults.raises_twice, phase, budget, all_reduce, patience=patience, timeout=90)
    found = values(outcomes)
    for turn in range(2):
        all_say([said[turn] for said in found], AGREED.format("the capture pass", "a defect of the model"))
    assert {said[2] for said in found} == {("ok", None)}
    assert max(outcome.seconds for outcome in outcomes) < 60


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (faults.no_report, AGREED.format("the capture pass", "the nodes cannot be counted")),
        (faults.no_memory_reading, AGREED.format("the capture pass", "the device does not answer")),
        (faults.handles_stay_open, AGREED.format("closing the peers' handles", "the handle cannot be closed")),
    ],
)
def test_a_rank_that_fails_before_its_capture_and_after_it(program: Callable[..., object], words: str) -> None:
    found = values(run_ranks(3, program))
    all_say([said[0] for said in found], words)
    assert {said[1] for said in found} == {("ok", None)}


def test_ranks_that_are_opened_again() -> None:
    assert values(run_ranks(2, faults.opened_again)) == [[("ok", None)] * 2] * 2


def test_no_memory_for_static_buffers_on_one_rank() -> None:
    assert values(run_ranks(2, faults.no_memory_for_buffers)) == [("ok", 0), ("ok", 0)]


def test_eager_calls_after_a_failed_capture() -> None:
    """A rank that left an all-reduce does not count one less than the others from then on."""
    found = values(run_ranks(2, faults.eagerly_instead))
    all_say([said for said, _ in found], AGREED.format("the capture pass", "a defect of the model"))
    assert [wrong for _, wrong in found] == [0, 0]


@pytest.mark.parametrize(
    ("all_reduce", "words"),
    [("custom", "rank 1 did not come to an all-reduce within 2 s"), ("nccl", "torch's all-reduce failed on rank 0")],
)
def test_a_rank_that_comes_when_the_others_have_given_up(all_reduce: str, words: str) -> None:
    """An error on both sides, and no sum of what another rank has not written yet."""
    found = values(run_ranks(2, faults.comes_late, all_reduce, patience=2))
    assert found[0][0][0][0] == "AllReduceError"
    assert words in found[0][0][0][1]
    for said, wrong in found:
        assert wrong == []
        assert {name for name, _ in said} <= {"AllReduceError", "RankFailedError"}


def test_a_data_parallel_rank_that_is_late_for_a_batch() -> None:
    """All name the batch, the late one too, and can close."""
    for said in values(run_ranks(3, faults.late_for_a_batch, patience=2)):
        assert said[0] == ("ok", True)
        for name, message in said[1:]:
            assert name == "RankFailedError"
            assert "a rank did not come to batch 2 within 2 s" in message


def test_a_second_runner_on_one_all_reduce() -> None:
    """Its rows would be those of the first one, whose replays would sum other memory."""
    found = values(run_ranks(2, faults.two_runners))
    all_say([said for said, _ in found], "graphs of another runner reduce by this all-reduce", "RegistrationError")
    assert {again for _, again in found} == {("ok", None)}


def test_a_runner_that_was_dropped_without_close() -> None:
    found = values(run_ranks(2, faults.dropped_runner))
    all_say([said for said, *_ in found], "graphs of another runner reduce by this all-reduce", "RegistrationError")
    for _, remedy, again in found:
        assert "where it was dropped without close()" in remedy
        assert again == ("ok", None)


@pytest.mark.parametrize(("all_reduce", "dtype"), [("nccl", torch.float32), ("custom", torch.float64)])
def test_a_key_that_one_rank_has_no_memory_for_while_gloo_waits_for_it(all_reduce: str, dtype: torch.dtype) -> None:
    """The unfinished sum is not taken up by one of another size, in the captures that follow."""
    for keys, sums in values(run_ranks(2, faults.out_of_memory_beside_a_sum, all_reduce, dtype, patience=3)):
        assert keys == [4]
        assert sums == [81.0, 21.0, 41.0, 61.0]


@pytest.mark.parametrize(("all_reduce", "dtype"), [("nccl", torch.int16), ("custom", torch.float8_e4m3fn)])
def test_a_dtype_that_gloo_does_not_sum(all_reduce: str, dtype: torch.dtype) -> None:
    for said, total in values(run_ranks(2, faults.refused_dtype, all_reduce, dtype)):
        assert said == ("AllReduceError", f"gloo, torch's all-reduce on the CPU, cannot sum {dtype}")
        assert total == 3.0


def test_every_dtype_that_gloo_is_said_to_sum() -> None:
    assert values(run_ranks(2, faults.sums_of_each_dtype)) == [[]] * 2


def test_an_idle_data_parallel_rank_with_wrong_arguments() -> None:
    """The others hear of each one, and their batch does not meet that rank's next one."""
    good, bad = values(run_ranks(2, faults.wrong_arguments))
    assert good == [("RankFailedError", "rank 1 refused its batch")] * 4
    assert [name for name, _ in bad] == ["InputError"] * 3 + ["OutOfMemoryError"]


@pytest.mark.parametrize("all_reduce", ["custom", "nccl"])
def test_a_use_after_close(all_reduce: str) -> None:
    for said in values(run_ranks(2, faults.used_after_close, all_reduce)):
        assert [name for name, _ in said] == ["DistributedError"] * 4
        assert re.search(r"all-reduce \d is closed", said[0][1])
        assert said[3][1] == "tea: the ranks are closed"


def test_a_rank_that_looks_for_breaks_sums_alone() -> None:
    assert values(run_ranks(2, faults.breaks_on_one_rank)) == [("ok", None)] * 2


def test_a_rank_that_is_interrupted_in_the_registration() -> None:
    found = values(run_ranks(2, faults.interrupted))
    assert found[0] == ("RankFailedError", "rank 1 has ended: KeyboardInterrupt: no message")
    assert found[1][0] == "KeyboardInterrupt"


def test_a_value_that_cannot_be_sent() -> None:
    found = values(run_ranks(2, faults.cannot_be_sent))
    all_say([said[0] for said in found], AGREED.format("lunch", "Can't pickle|Can't get local"))
    assert [said[1] for said in found] == [("ok", [0, 1])] * 2


def test_numbers_that_differ_on_one_rank() -> None:
    """Debug mode runs the forward as often on all ranks, whether numbers differ or not."""
    good, bad = values(run_ranks(2, faults.differs))
    assert good == [("ok", 0)] * 3
    assert [name for name, _ in bad] == ["NumbersError"] * 3
