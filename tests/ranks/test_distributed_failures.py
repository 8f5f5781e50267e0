"""Ranks that are killed, run out of memory, come late or differ: the others end within the timeout, and say why."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import rank_programs as programs
import torch
from ranks import HANG, Outcome, run_ranks, shared_segments, values

from cgplan import errors
from cgplan.modes import CUDAGraphMode


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    """No segment of shared memory, and no block of a process that has ended."""
    before = shared_segments()
    yield
    assert shared_segments() <= before


def all_raise(outcomes: list[Outcome], error: str, words: str, skip: tuple[int, ...] = ()) -> None:
    """Every rank but those to skip ended by itself, with this error, these words, and the error's exit code."""
    for rank, outcome in enumerate(outcomes):
        if rank in skip:
            continue
        assert outcome.error != HANG, f"rank {rank} hangs"
        assert outcome.error == error, f"rank {rank}: {outcome.error}: {outcome.message}\n{outcome.trace}"
        assert re.search(words, outcome.message), f"rank {rank}: {outcome.message}"
        assert outcome.exit_code == getattr(errors, error).exit_code


def test_unequal_counts() -> None:
    found = run_ranks(4, programs.unequal_counts)
    all_raise(found, "RankMismatchError", "rank 1 captured 6 all-reduces, rank 0 captured 4")


UNLIKE = [
    ("shape", "[4, 48] torch.float32, rank 0 with [4, 32] torch.float32"),
    ("dtype", "[4, 32] torch.float16, rank 0 with [4, 32] torch.bfloat16"),
    ("layout", "[32, 4] torch.float32, rank 0 with [4, 32] torch.float32"),
]


@pytest.mark.parametrize(
    ("mode", "kind", "words"),
    [*((CUDAGraphMode.FULL, *unlike) for unlike in UNLIKE), (CUDAGraphMode.PIECEWISE, *UNLIKE[2])],
)
def test_graphs_that_sum_unlike_tensors_are_not_registered(mode: CUDAGraphMode, kind: str, words: str) -> None:
    """A kernel would read its peers' inputs, or their staged copies, as if they were laid out like its own."""
    found = run_ranks(2, programs.captures_unlike_inputs, kind, mode)
    all_raise(found, "RankMismatchError", f"^rank 1 captured all-reduce 3 of 3 with {re.escape(words)}$")


@pytest.mark.parametrize(("kind", "words"), UNLIKE)
def test_unlike_tensors_are_not_summed_on_the_cpu(kind: str, words: str) -> None:
    """All ranks raise the same, and the next sum is right."""
    said = ("RankMismatchError", f"rank 1 came to all-reduce 2 with {words}")
    assert values(run_ranks(2, programs.sums_unlike_tensors, kind)) == [(said, [2.0])] * 2


@pytest.mark.parametrize(("kind", "mode"), [("dtype", "FULL"), ("layout", "PIECEWISE")])
def test_a_model_whose_ranks_sum_unlike_tensors_is_not_captured(kind: str, mode: str) -> None:
    found = run_ranks(2, programs.model_of_unlike_sums, kind, mode)
    all_raise(found, "RankMismatchError", r"rank 1 came to all-reduce 1 with \[.*\] torch.float")


def test_a_rank_that_sums_more_often_in_its_warm_ups() -> None:
    """It waits in an all-reduce, the other one in the step after."""
    words = "rank 1 did not come to the capture pass within 3 s: .* waits in an all-reduce that rank 0"
    all_raise(run_ranks(2, programs.sums_once_more, patience=3), "RankFailedError", words)


@pytest.mark.parametrize(
    ("world_size", "method", "step"),
    [(2, "export", "exchanging the handles"), (4, "open", "opening the peers")],
)
def test_a_rank_whose_registration_fails(world_size: int, method: str, step: str) -> None:
    found = values(run_ranks(world_size, programs.raises_in_registration, method))
    assert len({str(said) for said, _ in found}) == 1
    assert found[0][0][0] == "RankFailedError"
    assert re.search(f"rank 1 failed in {step}.*{method} does not work", found[0][0][1])
    assert {again for _, again in found} == {("ok", None)}


@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError])
def test_a_rank_that_raises_between_replays(error: type[Exception]) -> None:
    found = run_ranks(2, programs.raises_in_replay, error)
    all_raise(found, "RankFailedError", f"rank 1 has ended: {error.__name__}: a defect of the caller", skip=(1,))
    assert found[1].error == error.__name__, "the rank itself raises its own error"


@pytest.mark.parametrize(
    ("phase", "error", "words"),
    [
        ("eager", "RankFailedError", "rank 1 did not come to an all-reduce within 2 s"),
        ("open", "RankFailedError", "rank 1 did not come to opening the peers' handles within 2 s"),
        ("replay", "AllReduceError", "rank 1 did not come to an all-reduce within 2 s"),
    ],
)
def test_a_rank_that_is_killed(phase: str, error: str, words: str) -> None:
    """The others end once the timeout is over, and wait no second time for it."""
    found = run_ranks(2, programs.killed_in, 1, phase, patience=2)
    assert found[1].exit_code == -9
    all_raise(found, error, words, skip=(1,))


@pytest.mark.parametrize("phase", ["capture", "replay"])
def test_the_rank_that_keeps_the_store_is_killed(phase: str) -> None:
    found = run_ranks(3, programs.killed_in, 0, phase)
    assert found[0].exit_code == -9
    all_raise(found, "RankFailedError", "rank 0, which keeps the store, ended while rank [12] was in ", skip=(0,))
    assert max(outcome.seconds for outcome in found[1:]) < 10, "as soon as they ask the store"


def test_a_rank_that_does_not_come() -> None:
    found = run_ranks(3, programs.killed_in, 1, "rendezvous", patience=2)
    all_raise(found, "RendezvousError", "rank 1 of 3 did not come within 2 s", skip=(1,))


def test_no_rank_0() -> None:
    found = run_ranks(2, programs.rank_0s_plan, absent=(0,), patience=2)
    all_raise(found, "RendezvousError", "rank 1 does not reach rank 0, which keeps the store, at", skip=(0,))


def test_a_rank_that_runs_out_of_memory() -> None:
    found = run_ranks(2, programs.oom, False)
    all_raise(found, "RankFailedError", "rank 1 failed in the capture pass: CaptureMemoryError: out of memory at FULL")


def test_with_a_budget_all_keep_what_each_has_memory_for() -> None:
    """And each report names the rank that had no more."""
    for keys, stops, shown in values(run_ranks(2, programs.oom, True)):
        assert (keys, stops) == ([1], [(1, "device memory", 4)])
        assert "device memory of rank 1 at FULL, 4 tokens: it ran out" in shown


def test_a_budget_holds_for_all_ranks() -> None:
    assert values(run_ranks(2, programs.budget_of_one)) == [[4], [4]]


def test_replay_before_registration_and_capture_after_it() -> None:
    for said, late in values(run_ranks(2, programs.replay_before_registration)):
        assert said == ("RegistrationError", "a graph was replayed before its buffers were registered")
        assert late[0] == "RegistrationError"
        assert "captured after the graph buffers had been registered" in late[1]


def test_order_of_teardown() -> None:
    """Note [Teardown]: a step, peers' handles, a step, graphs, pool; exports; the group."""
    for events in values(run_ranks(2, programs.order_of_teardown, False)):
        assert events == [
            "the end of all replays", "handle", "closing the peers' handles", "graph", "graph", "pool",
            "the end of all reductions", "handle", "handle", "closing the peers' blocks", "exports",
            "ranks", "the end", "group",
        ]  # fmt: skip


def test_order_of_teardown_after_a_failure() -> None:
    """The same, without the steps."""
    for events in values(run_ranks(2, programs.order_of_teardown, True)):
        assert events == ["handle", "graph", "graph", "pool", "handle", "handle", "exports", "ranks", "group"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("config", 'rank 1 differs from rank 0: compilation.address_check: "off", rank 0 has "first"'),
        ("torch", "rank 1 differs from rank 0: version of torch: 1.0.0, rank 0 has "),
        ("model", r"rank 1 differs from rank 0: tensor weight: \[5, 4\] torch.float32, rank 0 has \[4, 4\]"),
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
