"""A rank is killed, runs out of memory, raises, comes late or differs: all ranks raise the same error, no sum is wrong,
and all go on, or all know that they cannot.
"""

from __future__ import annotations

import re

import pytest
import rank_programs as programs
import torch
from ranks import HANG, Outcome, run_ranks, values

from cgplan import errors
from cgplan.modes import CUDAGraphMode


def all_raise(outcomes: list[Outcome], error: str, words: str, skip: tuple[int, ...] = ()) -> None:
    """Every rank but those to skip ended by itself, with this error, these words, and the error's exit code."""
    for rank, outcome in enumerate(outcomes):
        if rank in skip:
            continue
        assert outcome.error != HANG, f"rank {rank} hangs"
        assert outcome.error == error, (
            f"rank {rank}: {outcome.error}: {outcome.message}\n{outcome.trace}"
        )
        assert re.search(words, outcome.message), f"rank {rank}: {outcome.message}"
        assert outcome.exit_code == getattr(errors, error).exit_code


def all_say(said: list[tuple[str, object]], words: str, error: str = "RankFailedError") -> None:
    """Every rank noted this error, with the same words."""
    assert {name for name, _ in said} == {error}
    assert len({message for _, message in said}) == 1, said
    assert re.search(words, str(said[0][1])), said[0][1]


def test_unequal_counts() -> None:
    found = run_ranks(4, programs.unequal_counts)
    all_raise(
        found,
        "RankMismatchError",
        "rank 1 differs from rank 0: captured all-reduces: 6, rank 0 has 4, ",
    )


UNLIKE = [
    ("shape", "[4, 48] torch.float32, rank 0 has [4, 32] torch.float32"),
    ("dtype", "[4, 32] torch.float16, rank 0 has [4, 32] torch.bfloat16"),
    ("layout", "[32, 4] torch.float32, rank 0 has [4, 32] torch.float32"),
]


@pytest.mark.parametrize(
    ("mode", "kind", "words"),
    [
        (CUDAGraphMode.FULL, *UNLIKE[0]),
        (CUDAGraphMode.FULL, *UNLIKE[1]),
        (CUDAGraphMode.PIECEWISE, *UNLIKE[2]),
    ],
)
def test_graphs_that_sum_unlike_tensors_are_not_registered(
    mode: CUDAGraphMode, kind: str, words: str
) -> None:
    """A kernel would read its peers' inputs, or their staged copies, as if they were laid out like its own."""
    found = run_ranks(2, programs.captures_unlike_inputs, kind, mode)
    all_raise(
        found,
        "RankMismatchError",
        f"^rank 1 differs from rank 0: all-reduce 3: {re.escape(words)}$",
    )


def test_unlike_tensors_are_not_summed_on_the_cpu() -> None:
    """All ranks raise the same, and the next sum is right."""
    wanted = [
        (("RankMismatchError", f"rank 1 differs from rank 0: an all-reduce: {words}"), [2.0])
        for _, words in UNLIKE
    ]
    assert (
        values(run_ranks(2, programs.sums_unlike_tensors, [kind for kind, _ in UNLIKE]))
        == [wanted] * 2
    )


def test_a_rank_that_sums_more_often_in_its_warm_ups() -> None:
    """It waits in an all-reduce, the other one in the step after."""
    words = (
        "rank 1 did not come to the capture pass within 3 s: .* waits in an all-reduce that rank 0"
    )
    all_raise(run_ranks(2, programs.sums_once_more, patience=3), "RankFailedError", words)


@pytest.mark.parametrize(
    ("world_size", "method", "step"),
    [(2, "export", "exporting the graph pool"), (4, "open", "opening the graph pool")],
)
def test_a_rank_whose_registration_fails(world_size: int, method: str, step: str) -> None:
    found = values(run_ranks(world_size, programs.raises_in_registration, method))
    assert len({str(said) for said, _ in found}) == 1
    assert found[0][0][0] == "RankFailedError"
    assert re.search(f"rank 1 failed in {step}.*{method} does not work", found[0][0][1])
    assert {again for _, again in found} == {("ok", None)}


def test_a_rank_that_raises_between_replays() -> None:
    found = run_ranks(2, programs.raises_in_replay, torch.OutOfMemoryError)
    all_raise(
        found,
        "RankFailedError",
        "rank 1 has ended: OutOfMemoryError: a defect of the caller",
        skip=(1,),
    )
    assert found[1].error == "OutOfMemoryError", "the rank itself raises its own error"


@pytest.mark.parametrize("phase", ["eager", "replay"])
def test_a_rank_that_is_killed(phase: str) -> None:
    """The others end once the timeout is over, and wait no second time for it."""
    found = run_ranks(2, programs.killed_in, 1, phase, patience=2)
    assert found[1].exit_code == -9
    words = "rank 1 did not come to an all-reduce within 2 s"
    all_raise(found, "RankFailedError", words, skip=(1,))


def test_the_rank_that_keeps_the_store_is_killed() -> None:
    found = run_ranks(3, programs.killed_in, 0, "replay")
    assert found[0].exit_code == -9
    all_raise(
        found,
        "RankFailedError",
        "rank 0, which keeps the store, ended while rank [12] was in ",
        skip=(0,),
    )
    assert max(outcome.seconds for outcome in found[1:]) < 10, "as soon as they ask the store"


def test_a_rank_that_runs_out_of_memory() -> None:
    found = run_ranks(2, programs.oom, False)
    all_raise(
        found,
        "RankFailedError",
        "rank 1 failed in the capture pass: CaptureMemoryError: out of memory at FULL",
    )


def test_with_a_budget_all_keep_what_each_has_memory_for() -> None:
    """And each report names the rank that had no more."""
    for keys, stops, shown in values(run_ranks(2, programs.oom, True)):
        assert (keys, stops) == ([1], [(1, "device memory", 4)])
        assert "device memory of rank 1 at FULL, 4 tokens: it ran out" in shown


def test_replay_before_registration_and_capture_after_it() -> None:
    for said, late in values(run_ranks(2, programs.replay_before_registration)):
        assert said == (
            "RegistrationError",
            "a graph was replayed before its buffers were registered",
        )
        assert late[0] == "RegistrationError"
        assert "captured after the graph buffers had been registered" in late[1]


def test_order_of_teardown() -> None:
    """Note [Teardown]: a step, peers' handles, a step, graphs, pool; exports; the group."""
    for events in values(run_ranks(2, programs.order_of_teardown, False)):
        assert events == [
            "the end of all replays", "handle", "closing the peers' handles", "graph", "graph", "pool",
            "the end of all reductions", "handle", "closing the peers' blocks", "exports",
            "ranks", "the end", "group",
        ]  # fmt: skip


def test_order_of_teardown_after_a_failure() -> None:
    """The same, without the steps."""
    for events in values(run_ranks(2, programs.order_of_teardown, True)):
        assert events == [
            "handle",
            "graph",
            "graph",
            "pool",
            "handle",
            "exports",
            "ranks",
            "group",
        ]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "config",
            'rank 1 differs from rank 0: compilation.address_check: "off", rank 0 has "always"',
        ),
        ("torch", "rank 1 differs from rank 0: version of torch: 1.0.0, rank 0 has "),
        (
            "model",
            r"rank 1 differs from rank 0: tensor weight: \[5, 4\] torch.float32, rank 0 has \[4, 4\]",
        ),
    ],
)
def test_ranks_that_differ(what: str, words: str) -> None:
    all_raise(run_ranks(2, programs.different_setup, what), "RankMismatchError", words)


def test_steps() -> None:
    """Ranks at different steps, with the same error, and with one that is late."""
    for said in values(run_ranks(2, programs.several_steps, patience=2)):
        assert said == [
            ("RankMismatchError", "rank 1 came to 'tea', rank 0 to 'coffee'"),
            ("ModelError", "the same everywhere"),
            said[2],
            said[2],
        ]
        assert said[2][0] == "RankFailedError"
        assert said[2][1].startswith("rank 1 did not come to breakfast within 2 s")


AGREED = "rank 1 failed in {}: .*{}"


@pytest.mark.parametrize(
    ("world_size", "budget", "phase", "all_reduce"),
    [
        (2, True, "eager", "custom"),
        (2, True, "behind the last sum", "custom"),
        (4, False, "capture", "custom"),
        (2, False, "eager", "nccl"),
    ],
)
def test_a_rank_that_raises_twice(
    world_size: int, budget: bool, phase: str, all_reduce: str
) -> None:
    """An unfinished sum of gloo's is not taken up by the next one, and where the others have captured their key, they
    meet the error in the budget's step.
    """
    patience = 3 if all_reduce == "nccl" else 60  # others need not wait so long in a custom sum
    outcomes = run_ranks(
        world_size, programs.raises_twice, phase, budget, all_reduce, patience=patience, timeout=90
    )
    found = values(outcomes)
    for turn in range(2):
        all_say(
            [said[turn] for said in found],
            AGREED.format("the capture pass", "a defect of the model"),
        )
    assert {said[2] for said in found} == {("ok", None)}
    assert max(outcome.seconds for outcome in outcomes) < 60


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("memory", AGREED.format("the capture pass", "the device does not answer")),
        ("report", AGREED.format("the capture pass", "the segments are not counted")),
        ("handles", AGREED.format("closing the peers' handles", "the handle cannot be closed")),
    ],
)
def test_a_rank_that_fails_before_its_capture_and_after_it(what: str, words: str) -> None:
    found = values(run_ranks(3, programs.fails_beside_the_capture, what))
    all_say([said[0] for said in found], words)
    assert {said[1] for said in found} == {("ok", None)}


def test_eager_calls_after_a_failed_capture() -> None:
    """A rank that left an all-reduce does not count one less than the others from then on."""
    found = values(run_ranks(2, programs.eagerly_instead))
    all_say([said for said, _ in found], AGREED.format("the capture pass", "a defect of the model"))
    assert [wrong for _, wrong in found] == [0, 0]


@pytest.mark.parametrize(
    ("all_reduce", "error", "words"),
    [
        ("custom", "RankFailedError", "rank 1 did not come to an all-reduce within 2 s"),
        ("nccl", "AllReduceError", "torch's all-reduce failed on rank 0"),
    ],
)
def test_a_rank_that_comes_when_the_others_have_given_up(
    all_reduce: str, error: str, words: str
) -> None:
    """An error on both sides, and no sum of what another rank has not written yet."""
    found = values(run_ranks(2, programs.comes_late, all_reduce, patience=2))
    assert found[0][0][0][0] == error
    assert words in found[0][0][0][1]
    for said, wrong in found:
        assert wrong == []
        assert {name for name, _ in said} <= {"AllReduceError", "RankFailedError"}


def test_a_data_parallel_rank_that_is_late_for_a_batch() -> None:
    """All name the batch, the late one too, and can close."""
    for said in values(run_ranks(3, programs.late_for_a_batch, patience=2)):
        assert said[0] == ("ok", True)
        for name, message in said[1:]:
            assert name == "RankFailedError"
            assert "a rank did not come to batch 2 within 2 s" in message


def test_a_second_runner_on_one_all_reduce() -> None:
    """Its rows would be those of the first one, whose replays would sum other memory."""
    found = values(run_ranks(2, programs.several_runners))
    for turn in (0, 2):  # the first runner is open; a third one was dropped without close()
        all_say(
            [said[turn] for said, _ in found],
            "graphs of another runner reduce by this",
            "RegistrationError",
        )
    for said, remedy in found:
        assert (said[1], said[3]) == (("ok", None), ("ok", None))
        assert "if it was dropped without close()" in remedy


@pytest.mark.parametrize(
    ("all_reduce", "dtype"), [("nccl", torch.float32), ("custom", torch.float64)]
)
def test_a_key_that_one_rank_has_no_memory_for_while_gloo_waits_for_it(
    all_reduce: str, dtype: torch.dtype
) -> None:
    """The unfinished sum is not taken up by one of another size, in the captures that follow."""
    for keys, sums in values(
        run_ranks(2, programs.out_of_memory_beside_a_sum, all_reduce, dtype, patience=3)
    ):
        assert keys == [4]
        assert sums == [81.0, 21.0, 41.0, 61.0]


@pytest.mark.parametrize(
    ("all_reduce", "dtype"), [("nccl", torch.int16), ("custom", torch.float8_e4m3fn)]
)
def test_dtypes_that_gloo_sums_and_does_not_sum(all_reduce: str, dtype: torch.dtype) -> None:
    for said, wrong in values(run_ranks(2, programs.dtypes, all_reduce, dtype)):
        assert said == (
            "AllReduceError",
            f"gloo, torch's all-reduce on the CPU, cannot sum {dtype}",
        )
        assert wrong == []


def test_a_use_after_close() -> None:
    for said in values(run_ranks(2, programs.used_after_close)):
        assert [name for name, _ in said] == ["DistributedError"] * 4
        assert re.search(r"all-reduce \d is closed", said[0][1])
        assert said[3][1] == "tea: the ranks are closed"


def test_a_rank_that_is_interrupted_in_the_registration() -> None:
    found = values(run_ranks(2, programs.interrupted))
    assert found[0] == ("RankFailedError", "rank 1 has ended: KeyboardInterrupt: no message")
    assert found[1][0] == "KeyboardInterrupt"


def test_numbers_that_differ_on_one_rank() -> None:
    """Debug mode runs the forward as often on all ranks, whether numbers differ or not."""
    good, bad = values(run_ranks(2, programs.differs))
    assert good == [("ok", 0)] * 3
    assert [name for name, _ in bad] == ["NumbersError"] * 3
