"""Something went wrong on one rank: all raise the same, no sum is wrong, and all go on or all know they cannot."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
import rank_faults as faults
import rank_programs as programs
import torch
from ranks import run_ranks, values

from cgplan.distributed.ranks import Ranks

AGREED = "rank 1 failed in {}: .*{}"


def all_say(said: list[tuple[str, object]], words: str, error: str = "RankFailedError") -> None:
    assert {name for name, _ in said} == {error}
    assert len({message for _, message in said}) == 1, said
    assert re.search(words, str(said[0][1])), said[0][1]


@pytest.mark.parametrize(("world_size", "budget"), [(2, True), (4, True), (2, False)])
@pytest.mark.parametrize("phase", ["eager", "capture"])
def test_a_rank_that_raises_twice(world_size: int, budget: bool, phase: str) -> None:
    found = values(run_ranks(world_size, faults.raises_twice, phase, budget))
    for turn in range(2):
        all_say([said[turn] for said in found], AGREED.format("the capture pass", "a defect of the model"))
    assert {said[2] for said in found} == {("ok", None)}


def test_a_rank_that_raises_while_gloo_waits_for_it() -> None:
    """What was left half done of gloo's is not taken up by the next sum, and nobody waits for gloo's own timeout."""
    found = run_ranks(2, faults.raises_twice, "eager", False, "nccl", patience=30, timeout=60)
    for turn in range(2):
        said = [said[turn] for said in values(found)]
        all_say(said, AGREED.format("the capture pass", "a defect of the model"))
    assert {said[2] for said in values(found)} == {("ok", None)}
    assert max(outcome.seconds for outcome in found) < 30


class EndsJustAfterTheLook:
    """A collective of gloo's that ends between the end of a look at it and the question whether it has."""

    def __init__(self, error: str | None) -> None:
        self.error, self.waits = error, 0

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waits += 1
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return True


def test_a_collective_that_ends_just_after_a_look_has_not_failed() -> None:
    work = EndsJustAfterTheLook(None)
    Ranks.wait(None, work)  # type: ignore[arg-type]  # nobody needs to be asked
    assert work.waits == 2
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        Ranks.wait(None, EndsJustAfterTheLook("connection closed by peer"))  # type: ignore[arg-type]


def test_ranks_that_are_opened_again() -> None:
    assert values(run_ranks(2, faults.opened_again)) == [[("ok", None)] * 2] * 2


def test_no_memory_for_static_buffers_on_one_rank() -> None:
    assert values(run_ranks(2, faults.no_memory_for_buffers)) == [("ok", 0), ("ok", 0)]


def test_a_rank_whose_report_fails() -> None:
    found = values(run_ranks(2, faults.no_report))
    all_say([said[0] for said in found], AGREED.format("the report", "the nodes cannot be counted"))
    assert {said[1] for said in found} == {("ok", None)}


def test_eager_calls_after_a_failed_capture() -> None:
    """A rank that left an all-reduce half done does not count one less than the others from then on."""
    found = values(run_ranks(2, faults.eagerly_instead))
    all_say([said for said, _ in found], AGREED.format("the capture pass", "a defect of the model"))
    assert [wrong for _, wrong in found] == [0, 0]


def test_a_rank_that_comes_when_the_others_have_given_up() -> None:
    """Counts are out of step then: an error on both sides, and no sum of what another rank has not written yet."""
    found = values(run_ranks(2, faults.comes_late, patience=2))
    assert found[0][0][0] == ("AllReduceError", "rank 1 did not come to an all-reduce within 2 s")
    for said, wrong in found:
        assert wrong == []
        assert {name for name, _ in said} <= {"AllReduceError", "RankFailedError"}
        assert re.search("rank [01] did not come to", said[0][1])


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_data_parallel_rank_that_is_late_for_a_batch(world_size: int) -> None:
    """All name the rank and the batch, the late one too, and can close."""
    for said in values(run_ranks(world_size, programs.late_for_a_batch, patience=3)):
        assert "Error" not in said[0]
        for words in said[1:]:
            assert words.startswith("RankFailedError: ")
            assert "rank 1 did not come to batch 2 within 3 s" in words


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
        assert "open_all_reduce()" in remedy
        assert again == ("ok", None)


@pytest.mark.parametrize(("all_reduce", "dtype"), [("nccl", torch.float32), ("custom", torch.float64)])
def test_a_key_that_one_rank_has_no_memory_for_while_gloo_waits_for_it(all_reduce: str, dtype: torch.dtype) -> None:
    """The sum that is left is not taken up by one of another size, in the captures that follow."""
    for keys, sums in values(run_ranks(2, faults.out_of_memory_beside_a_sum, all_reduce, dtype)):
        assert keys == [4]
        assert sums == [81.0, 21.0, 41.0, 61.0]


def test_a_capture_after_a_sum_of_gloos_that_was_left() -> None:
    left, skipped = values(run_ranks(2, faults.captured_after_a_left_sum, patience=6))
    assert left[0][0] == "AllReduceError"
    assert [left[1], skipped[1]] == [("ok", None)] * 2


@pytest.mark.parametrize(
    ("all_reduce", "dtype"), [("nccl", torch.int16), ("nccl", torch.float8_e4m3fn), ("custom", torch.float8_e4m3fn)]
)
def test_a_dtype_that_gloo_does_not_sum(all_reduce: str, dtype: torch.dtype) -> None:
    for said, total in values(run_ranks(2, faults.refused_dtype, all_reduce, dtype)):
        assert said == ("AllReduceError", f"gloo, torch's all-reduce on the CPU, sums no {dtype}")
        assert total == 3.0


def test_every_dtype_that_gloo_is_said_to_sum() -> None:
    assert values(run_ranks(2, faults.sums_of_each_dtype)) == [[]] * 2


def test_an_idle_data_parallel_rank_with_wrong_arguments() -> None:
    """The others hear of each one, and their batch does not meet that rank's next one."""
    good, bad = values(run_ranks(2, faults.wrong_arguments))
    assert good == [("RankFailedError", "rank 1 refused its batch")] * 5
    assert bad == [
        ("InputError", "input 'starts' is a NoneType, not a tensor"),
        ("InputError", "unknown input 'other'"),
        ("InputError", "input 'starts' has shape [], declared is ['num_reqs + 1']"),
        ("InputError", "the runner takes no positional arguments"),
        ("OutOfMemoryError", "no memory"),
    ]


@pytest.mark.parametrize("all_reduce", ["custom", "nccl"])
def test_what_is_used_after_it_was_closed(all_reduce: str) -> None:
    for said in values(run_ranks(2, faults.used_after_close, all_reduce)):
        assert [name for name, _ in said] == ["DistributedError"] * 4
        assert "there is no all-reduce" in said[0][1]
        assert said[3][1] == "tea: the ranks are closed"


def test_a_rank_that_looks_for_breaks_sums_alone() -> None:
    assert values(run_ranks(2, faults.breaks_on_one_rank)) == [("ok", None)] * 2


@pytest.mark.parametrize("method", ["_exchange", "_seal"])
def test_a_rank_that_is_interrupted_in_the_registration(method: str) -> None:
    found = values(run_ranks(2, faults.interrupted, method))
    assert found[0] == ("RankFailedError", "rank 1 has ended: KeyboardInterrupt: no message")
    assert found[1][0] == "KeyboardInterrupt"


def test_a_value_that_cannot_be_sent() -> None:
    found = values(run_ranks(2, faults.cannot_be_sent))
    all_say([said[0] for said in found], AGREED.format("lunch", "Can't pickle|Can't get local"))
    assert [said[1] for said in found] == [("ok", [0, 1])] * 2


def test_numbers_that_differ_on_one_rank() -> None:
    """Debug mode runs the forward as often on all ranks, whatever it finds on one."""
    good, bad = values(run_ranks(2, faults.differs))
    assert good == [("ok", True)] * 3
    assert [name for name, _ in bad] == ["NumbersError"] * 3


def test_the_rank_that_keeps_the_store_stands_still() -> None:
    found = run_ranks(2, faults.keeper_is_frozen, patience=8, stopped=(0,))
    said, closed = values(found[1:])[0]
    assert said[0] == "RankFailedError"
    assert re.search("rank 0, which keeps the store, has shown no sign of life", said[1])
    assert closed == ("ok", None)
    assert found[1].seconds < 20


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (faults.no_memory_reading, AGREED.format("the capture pass", "the device does not answer")),
        (faults.handles_stay_open, AGREED.format("closing the peers' handles", "the handle cannot be closed")),
    ],
)
def test_a_rank_that_fails_before_its_capture_and_after_it(program: Callable[..., object], words: str) -> None:
    found = values(run_ranks(3, program))
    all_say([said[0] for said in found], words)
    assert {said[1] for said in found} == {("ok", None)}


def test_the_rank_that_was_killed_is_named_and_not_one_that_ended_since() -> None:
    found = run_ranks(3, faults.killed_beside_one_that_ends)
    for said in values(found[:2]):
        assert said == ("RankFailedError", "rank 2 has ended without a word (killed, or out of memory?)")


def test_no_graph_is_replayed_that_would_wait_for_a_lost_rank() -> None:
    """On a GPU such a replay comes back with wrong sums, and without an error."""
    said, begun = values(run_ranks(2, faults.replays_after_a_loss)[:1])[0]
    assert begun == 0
    assert said == [("RankFailedError", "rank 1 has ended without a word (killed, or out of memory?)")] * 3
