"""The decoder split over ranks, and the commands on ranks; a page of the docs runs them under torchrun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import rank_programs as programs
from commands import unwrapped
from decoder import build
from ranks import run_ranks, values

from cgplan import build_plan, load_config
from cgplan.errors import ModelError

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "decoder_tp2_cpu.yaml"
SMALL = ["--set", "model.kwargs.num_layers=1", "--set", "compilation.cudagraph_capture_sizes=[1,2]",
         "--set", "report.repeats=2", "--set", "distributed.timeout=20"]  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 4])
def test_logits_and_tokens_are_those_of_one_process(world_size: int) -> None:
    found = values(run_ranks(world_size, programs.split_decoder, world_size))
    assert len({str(tokens) for _, tokens, _, _ in found}) == 1
    for worst, _, rows, weights in found:
        assert 0 < worst < 2e-5  # another order of summation, so not 0
        assert rows == 2 * 2 * 2  # two sizes, two layers, two all-reduces each
        assert weights < sum(p.numel() for p in build(num_heads=8, num_kv_heads=4).parameters())


def test_piecewise_segments_reduce_over_the_staging_buffer() -> None:
    """A segment runs while the next one is captured, so before anything is registered."""
    mode = {"cudagraph_mode": "PIECEWISE", "splitting_modules": '["layers.*.self_attn"]'}
    for worst, _, rows, _ in values(run_ranks(2, programs.split_decoder, 2, "cpu", kwargs=mode)):
        assert worst < 2e-5
        assert rows == 0


def test_torch_distributed_does_it_too() -> None:
    for worst, _, rows, _ in values(
        run_ranks(2, programs.split_decoder, 2, "cpu", kwargs={"all_reduce": "nccl"})
    ):
        assert worst < 2e-5
        assert rows == 0


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel 3 does not divide num_heads 4"),
        (
            {"tensor_parallel": 2, "num_kv_heads": 1},
            "tensor_parallel 2 does not divide num_kv_heads 1",
        ),
        (
            {"tensor_parallel": 2, "hidden_size": 127},
            "tensor_parallel 2 does not divide hidden_size 127",
        ),
        (
            {"tensor_parallel": 2, "intermediate_size": 3},
            "tensor_parallel 2 does not divide intermediate_size 3",
        ),
        (
            {"tensor_parallel": 4, "num_kv_heads": 4},
            "split over 4 ranks (tensor_parallel), and 2 run",
        ),
        ({"tensor_parallel": 2, "max_loras": 1}, "adapters are not split over ranks"),
    ],
)
def test_splits_that_cannot_be(kwargs: dict[str, Any], words: str) -> None:
    if "run" not in words:
        with pytest.raises(ModelError) as error:
            build(**kwargs)
        assert words in error.value.message
        return
    for outcome in run_ranks(2, programs.impossible_split, kwargs=kwargs):
        assert (outcome.error, outcome.exit_code) == ("ModelError", 7)
        assert words in outcome.message


def test_bench_on_ranks(tmp_path: Path) -> None:
    """Rank 0 prints and saves, and the report has all ranks."""
    line = ["bench", "--config", str(CONFIG), *SMALL, "--output", str(tmp_path / "b.json")]
    (code, printed, said), second = values(run_ranks(2, programs.command, line, line))
    assert code == 0, said
    assert second[:2] == (0, ""), "one rank prints"
    report = json.loads((tmp_path / "b.json").read_text())
    ranks = report["capture"]["ranks"]
    assert [(r["rank"], r["all_reduce"], r["rows"]) for r in ranks] == [
        (0, "custom", 4),
        (1, "custom", 4),
    ]
    assert all(r["mapped_bytes"] and r["registration_seconds"] > 0 for r in ranks)
    assert len(report["records"]) == 2
    assert printed.count("Bench") == 1
    rows = [line.split()[:3] for line in printed.splitlines() if " custom " in line]
    assert rows == [["0", "custom", "4"], ["1", "custom", "4"]]


def test_inspect_and_plan_run_on_rank_0_alone(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    for name in (["inspect"], ["plan", "--output", str(plan)]):
        line = [*name, "--config", str(CONFIG)]
        first, second = values(run_ranks(2, programs.command, line, line))
        assert (first[0], second) == (0, (0, "", ""))
        assert "Plan" in first[1]
    assert json.loads(plan.read_text())["capture_sizes"] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("command_of_rank_1", "words"),
    [
        (
            ["capture", "--set", "compilation.outputs=clone"],
            'compilation.outputs: "clone", rank 0 has "borrow"',
        ),
        (["bench"], "the command: cgplan bench, rank 0 has cgplan capture"),
    ],
)
def test_ranks_with_other_settings_end_with_the_same_message(
    command_of_rank_1: list[str], words: str
) -> None:
    name, *options = command_of_rank_1
    common = ["--config", str(CONFIG), *SMALL]
    for code, _, said in values(
        run_ranks(2, programs.command, ["capture", *common], [name, *common, *options])
    ):
        assert code == 42, said
        assert f"rank 1 differs from rank 0: {words}" in unwrapped(said)
        assert "remedy: Start all ranks from one file" in said
        assert "Traceback" not in said


def test_a_saved_plan_on_ranks_is_noted_once(tmp_path: Path) -> None:
    """Rank 0 alone says what a saved plan decides, and it alone needs a place to write to."""
    plan, report = tmp_path / "plan.json", tmp_path / "r.json"
    plan.write_text(build_plan(load_config(CONFIG, SMALL[1::2])).model_dump_json())
    line = ["capture", "--config", str(CONFIG), *SMALL, "--plan", str(plan), "--force"]
    line += ["--set", "compilation.cudagraph_capture_sizes=[1,4]", "--output"]
    lines = [[*line, str(report)], [*line, str(tmp_path / "nowhere" / "r.json")]]
    found = values(run_ranks(2, programs.command, *lines))
    assert [code for code, _, _ in found] == [0, 0], found
    assert [said.count("decides compilation.cudagraph_capture_sizes") for _, _, said in found] == [
        1,
        0,
    ]
    assert json.loads(report.read_text())["plan"]["capture_sizes"] == [1, 2]


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        (0, "rank 1 does not reach rank 0, which keeps the store, at"),
        (1, "rank 1 of 2 did not come within 1 s"),
    ],
)
def test_a_missing_rank_ends_the_command_in_three_lines(absent: int, words: str) -> None:
    line = ["capture", "--config", str(CONFIG), *SMALL, "--set", "distributed.timeout=1"]
    code, printed, said = values(run_ranks(2, programs.command, line, line, absent=(absent,)))[
        1 - absent
    ]
    assert (code, printed) == (41, "")
    lines = unwrapped(said).splitlines()
    assert [text.split(":")[0].strip() for text in lines] == ["error", "remedy", "more"], said
    assert words in lines[0]
