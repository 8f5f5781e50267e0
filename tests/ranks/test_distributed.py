"""Two and four real processes: the registry, the all-reduce on the CPU, agreement, recapture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import rank_programs as programs
import torch
from checks import capture, host_sync_of
from ranks import run_ranks, values

from cgplan.backends import select_backend
from cgplan.captures.model_graphs import RankSync
from cgplan.config import DistributedConfig
from cgplan.distributed import open_ranks
from cgplan.distributed.all_reduce import AllReduce
from cgplan.distributed.ranks import Place, Presence, check_devices
from cgplan.errors import BackendError, CgplanError, ConfigError, PlanError, RankMismatchError
from cgplan.piecewise.breakable import eager_break_during_capture
from cgplan.planning import build_plan, config_hash
from cgplan.runner.session import CaptureSession


@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.bfloat16), (4, torch.float32)])
def test_sums_are_right_through_many_replays(world_size: int, dtype: torch.dtype) -> None:
    """Inputs change, and each rank finds bit for bit what a sum in the order of the ranks gives."""
    found = values(run_ranks(world_size, programs.replays, dtype, [(3, 8), (5, 40)], 3, 12))
    for registration in found:
        assert registration.rows == 6
        assert 1 << 16 < registration.mapped_bytes // (world_size - 1) < 1 << 17


@pytest.mark.parametrize("world_size", [1, 2])
def test_replays_repeat_collectives_of_torch(world_size: int) -> None:
    """Their operators write and return their arguments without saying so in their schemas."""
    assert values(run_ranks(world_size, programs.collectives_in_a_forward)) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_session_captures_registers_and_captures_again(world_size: int) -> None:
    for rows, records in values(run_ranks(world_size, programs.capture_and_run)):
        assert rows == [4, 4]
        assert [record.rank for record in records] == list(range(world_size))
        for record in records:
            assert (record.all_reduce, record.rows) == ("custom", 4)
            assert 1 << 16 < record.mapped_bytes // (world_size - 1) < 1 << 17
            assert 0 < record.registration_seconds < record.session_seconds


def test_a_rank_that_looks_at_its_state_sums_alone() -> None:
    """A look at the forward on one rank only must not wait for the others, nor count as one of their sums."""
    assert values(run_ranks(2, programs.counts_its_calls)) == [("ok", None)] * 2


def test_rank_0s_plan_is_captured() -> None:
    assert values(run_ranks(2, programs.rank_0s_plan)) == [(1, 2), (1, 2)]


SUMS = [16.0, 6.0, 10.0, 8, 2.0 * (1 << 16), 0.0, 24.0]


def test_the_custom_all_reduce_says_once_what_it_leaves_to_others() -> None:
    for rank, (name, said, sums) in enumerate(values(run_ranks(2, programs.choice, "custom"))):
        assert (name, sums) == ("custom", SUMS)
        assert said == ([] if rank else [
            "custom all-reduce: a tensor's bytes are not a multiple of 16; nccl does it",
            "custom all-reduce: torch.int64 is none of float32, float16, bfloat16; nccl does it",
            "custom all-reduce: a tensor has more than distributed.all_reduce_max_size, 64.0 KiB; nccl does it",
        ])  # fmt: skip


def test_auto_is_torch_distributed_on_the_cpu() -> None:
    assert values(run_ranks(2, programs.choice, "auto")) == [("nccl", [], SUMS)] * 2


def test_what_was_asked_for_and_cannot_work_is_an_error_on_all_ranks() -> None:
    for outcome in run_ranks(2, programs.choice, "custom", 2):
        assert (outcome.error, outcome.exit_code) == ("AllReduceError", 45)
        assert "compilation.all_reduce: custom cannot work here: rank 0: " in outcome.message


@pytest.mark.parametrize(
    ("batches", "settings", "wanted"),
    [
        pytest.param(
            [
                [(1, 1), (1, 1), (3, 3), (2, 2), (4, 4), (5, 2)],
                [(1, 1), (3, 3), (5, 2), (9, 3), (4, 4), (7, 7)],
            ],
            {},
            [
                ("FULL", 1),
                ("FULL", 4),
                ("PIECEWISE", 8),
                ("NONE", 9),
                ("FULL", 4),
                ("PIECEWISE", 8),
            ],
            id="the largest size and the weakest mode",
        ),
        pytest.param(
            [[(10, 3)], [(2, 2)]],
            {"mode": "FULL", "sizes": (4, 16)},
            [("FULL", 16)],
            id="more tokens than there can be requests: those behind a decode batch belong to no request",
        ),
        pytest.param(
            [[(3, 3), (0, 0), (0, 0), (0, 0)], [(0, 0), (5, 2), (0, 0), (9, 3)]],
            {},
            [("FULL", 4), ("PIECEWISE", 8), ("FULL", 1), ("NONE", 9)],
            id="ranks that are idle",
        ),
        pytest.param(
            [[(2, 1), (4, 2), (6, 3), (0, 0)], [(4, 2), (3, 2), (0, 0), (0, 0)]],
            {"speculative": 1, "sizes": (2, 4, 8)},
            [("FULL", 4), ("PIECEWISE", 4), ("FULL", 8), ("FULL", 2)],
            id="speculative tokens",
        ),
    ],
)
def test_data_parallel_ranks_run_one_graph(
    batches: Any, settings: dict[str, Any], wanted: Any
) -> None:
    assert values(run_ranks(2, programs.data_parallel, batches, True, kwargs=settings)) == [
        wanted,
        wanted,
    ]


def test_statistics_of_data_parallel_ranks_count_what_each_was_asked_for() -> None:
    """Not what its batches were padded to for the others; a rank that is idle has no batch."""
    batches = [[(3, 3), (1, 1), (0, 0), (5, 2)], [(7, 3), (2, 2), (1, 1), (6, 2)]]
    found = values(run_ranks(2, programs.data_parallel, batches, True, kwargs={"stats": True}))
    asked = [[(1, 1), (3, 3), (5, 2)], [(1, 1), (2, 2), (6, 2), (7, 3)]]
    for (ran, counted), own, padding in zip(
        found, asked, [8 + 4 + 8 - 9, 8 + 4 + 1 + 8 - 16], strict=True
    ):
        assert ran == [("PIECEWISE", 8), ("FULL", 4), ("FULL", 1), ("PIECEWISE", 8)]
        histogram, *figures = counted
        assert [(batch.num_tokens, batch.num_reqs) for batch, _ in histogram] == own
        assert figures == [sum(tokens for tokens, _ in own), padding]


def test_a_data_parallel_rank_that_refuses_its_batch() -> None:
    """The others do not wait for it, and the next batch is run by all."""
    found = values(run_ranks(2, programs.data_parallel, [[(3, 3), (2, 2)], [(9, 9), (3, 3)]], True))
    assert found[0] == [("RankFailedError", "rank 1 refused its batch"), ("FULL", 4)]
    assert found[1][0][0] == "InputError"
    assert found[1][1] == ("FULL", 4)


def test_data_parallel_ranks_are_not_held_in_step_unless_asked() -> None:
    assert values(run_ranks(2, programs.data_parallel, [[(1, 1)], []], False)) == [
        ["GraphRunner"],
        [],
    ]


def presence(device: str, host: str = "one", problem: str = "") -> Presence:
    return Presence(host, device, problem)


@pytest.mark.parametrize(
    ("found", "error", "words"),
    [
        ([presence("GPU-1"), presence("none", problem="has no GPU: it wants cuda:1, torch sees 1")], BackendError,
         "rank 1 on one has no GPU: it wants cuda:1, torch sees 1"),
        ([presence("GPU-1"), presence("GPU-2"), presence("GPU-1")], BackendError,
         "ranks 0 and 2 are on one GPU (GPU-1) of one"),
        ([presence("GPU-1"), presence("cpu")], RankMismatchError, "rank 1 runs on the CPU, rank 0 on a GPU"),
    ],
)  # fmt: skip
def test_devices_that_cannot_be(
    found: list[Presence], error: type[CgplanError], words: str
) -> None:
    with pytest.raises(error) as raised:
        check_devices(found)
    assert raised.value.message == words
    assert raised.value.remedy


def test_devices_that_can_be() -> None:
    check_devices([presence("cpu"), presence("cpu")])
    check_devices([presence("GPU-1"), presence("GPU-1", host="two")])


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "rank 0 of 2: not set: MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "rank 0 of 2: not set: MASTER_PORT"),
    ],
)
def test_environments_that_are_invalid(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Place.from_environment(environment)


def test_a_plan_that_another_rank_made_for_its_own_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANKS_TIMEOUT", "5")
    config, other = programs.config_of(), programs.config_of(compilation={"outputs": "clone"})
    session = CaptureSession(
        build_plan(other), torch.nn.Identity(), select_backend("cpu"), config, together=RankSync()
    )
    with pytest.raises(
        PlanError, match=rf"^the plan of all ranks was .* {config_hash(other)}; this rank has"
    ) as error:
        session.run()
    assert "agree_on_setup()" in error.value.remedy


def test_one_process_has_no_ranks() -> None:
    assert Place.from_environment({}) is None
    alone = Place(0, 1, 0, "127.0.0.1", 1)
    assert open_ranks(DistributedConfig(), "cpu", place=alone) is None


class _Doubling(AllReduce):
    """Stands for a sum over two equal ranks."""

    name = "doubling"

    def run(self, x: torch.Tensor, out: torch.Tensor, row: torch.Tensor) -> None:
        out.copy_(x * 2)


def test_what_is_captured_while_a_rank_looks_at_its_forward_holds_the_sum() -> None:
    backend = select_backend("cpu")
    reduce, x, made = (
        _Doubling(SimpleNamespace(rank=0, world_size=2, is_closed=False), backend),
        torch.ones(3),
        {},
    )  # type: ignore[arg-type]

    @eager_break_during_capture
    def piece() -> torch.Tensor:
        made["graph"], made["output"] = capture(backend, lambda: reduce(x))
        return reduce(x)

    def forward() -> None:
        made["eager"] = piece()

    assert host_sync_of(forward, backend.device) is None
    assert torch.equal(made["eager"], x), "no rank sums with it now"
    x.fill_(5)
    backend.replay(made["graph"])
    assert torch.equal(made["output"], x * 2)


def test_an_audit_has_no_findings_among_ranks() -> None:
    for kinds, findings in values(run_ranks(2, programs.audits, "cpu")):
        assert findings == []
        assert "peer" in kinds
