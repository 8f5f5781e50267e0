"""Which keys ``budget.max_graphs`` keeps without traffic: those that pad least, and the same in plans and captures."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from math import inf
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cgplan.cli.main import app
from cgplan.config import Config, validate_config
from cgplan.modes import CUDAGraphMode
from cgplan.optimizer.subset import spread, within_count
from cgplan.planning import build_plan

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


def config_of(most: int | None, sizes: Any = None, mode: str = "FULL", **changes: Any) -> Config:
    compilation = {
        "cudagraph_capture_sizes": sizes,
        "cudagraph_mode": mode,
        **changes.pop("compilation", {}),
    }
    budget = {} if most is None else {"max_graphs": most}
    return validate_config({"compilation": compilation, "budget": budget, **changes})


def kept(
    most: int, sizes: Any = None, mode: str = "FULL", **changes: Any
) -> dict[str, tuple[int, ...]]:
    config = config_of(most, sizes, mode, **changes)
    return {
        str(lane): found for lane, found in within_count(build_plan(config), config).lanes().items()
    }


def padding(sizes: Any, stride: int = 1) -> float:
    """Mean padding of batches of every size up to the largest, in tokens; counted one by one."""
    batches = range(stride, max(sizes) + 1, stride)
    return sum(min(size for size in sizes if size >= n) - n for n in batches) / len(batches)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (32,)),
        (2, (16, 32)),
        (3, (8, 16, 32)),
        (5, (2, 4, 8, 16, 32)),
        (6, (1, 2, 4, 8, 16, 32)),
    ],
)
def test_the_largest_stays_and_what_pads_least(most: int, sizes: tuple[int, ...]) -> None:
    assert kept(most, [1, 2, 4, 8, 16, 32]) == {"FULL": sizes}


def test_a_fine_ladder_is_thinned_out_evenly() -> None:
    assert kept(4, list(range(1, 65))) == {"FULL": (16, 32, 48, 64)}


@pytest.mark.parametrize("most", [1, 2, 3, 4, 9, 12])
def test_boxes_that_pad_least_are_kept(most: int) -> None:
    """Against each choice that keeps a graph for all batches, counted one by one."""
    dims = {"batch": {"max": 8, "sizes": [1, 3, 8]}, "length": {"max": 6, "sizes": [1, 2, 4, 6]}}
    config = config_of(most, dims=dims)
    boxes = [key.box for _, key in build_plan(config).keys]
    found = {key.box for _, key in within_count(build_plan(config), config).keys}

    def elements(chosen: Iterable[tuple[int, ...]]) -> float:
        held = (
            [a * b for a, b in chosen if a >= n and b >= m]
            for n, m in product(range(1, 9), range(1, 7))
        )
        return sum(min(sizes, default=inf) for sizes in held)

    assert len(found) == most
    assert elements(found) == min(map(elements, combinations(boxes, most)))


def test_boxes_of_all_lanes_are_kept() -> None:
    dims = {"batch": {"max": 8}, "length": {"max": 64}}
    config = config_of(
        5, dims=dims, lora={"max_loras": 2}, compilation={"cudagraph_specialize_lora": True}
    )
    found = within_count(build_plan(config), config).keys
    assert sorted(key.num_active_loras for _, key in found) == [0, 0, 3, 3]
    assert all(
        (8, 64) in {key.box for _, key in found if key.num_active_loras == case} for case in (0, 3)
    )


@settings(deadline=None)
@given(st.sets(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 9), st.integers(1, 3))
def test_no_other_choice_pads_less(found: set[int], most: int, stride: int) -> None:
    sizes = sorted(size * stride for size in found)
    spec = {"speculative": {"num_speculative_tokens": stride - 1}} if stride > 1 else {}
    config = config_of(most, sizes, "FULL_DECODE_ONLY", **spec)
    plan = within_count(build_plan(config), config)
    assert plan.max_capture_size == sizes[-1]
    assert len(plan.keys) == min(most, len(sizes))
    others = ({*few, sizes[-1]} for few in combinations(sizes[:-1], len(plan.keys) - 1))
    assert padding(plan.capture_sizes, stride) == pytest.approx(
        min(padding(few, stride) for few in others)
    )


@settings(deadline=None)
@given(st.sets(st.integers(1, 24), min_size=2, max_size=6), st.integers(2, 8), st.integers(1, 24))
def test_graphs_are_shared_out_best_between_lanes(found: set[int], most: int, seqs: int) -> None:
    """Decode graphs end at max_num_seqs, so that the two lanes differ."""
    config = config_of(most, sorted(found), "FULL_AND_PIECEWISE", scheduler={"max_num_seqs": seqs})
    plan = build_plan(config)
    if len(plan.lanes()) < 2 or len(plan.keys) <= most:
        return
    lanes = list(plan.lanes().values())
    subsets = [
        [few for number in range(len(sizes)) for few in combinations(sizes[:-1], number)]
        for sizes in lanes
    ]
    best = min(
        padding((*one, lanes[0][-1])) + padding((*two, lanes[1][-1]))
        for one in subsets[0]
        for two in subsets[1]
        if len(one) + len(two) + 2 <= most
    )
    chosen = within_count(plan, config).lanes().values()
    assert sum(map(len, chosen)) == most
    assert sum(map(padding, chosen)) == pytest.approx(best)


def test_lanes_that_serve_most_batches_stay_where_there_are_fewer_graphs_than_lanes() -> None:
    asked: dict[str, Any] = {
        "sizes": [1, 2, 4, 8],
        "mode": "FULL_AND_PIECEWISE",
        "lora": {"max_loras": 2},
    }
    assert kept(1, **asked) == {"PIECEWISE, LoRA case 3": (8,)}
    assert kept(2, **asked) == {"PIECEWISE, LoRA case 3": (8,), "FULL uniform, LoRA case 3": (8,)}
    four = kept(4, **asked)
    assert set(four) == {
        "PIECEWISE, LoRA case 3",
        "PIECEWISE",
        "FULL uniform, LoRA case 3",
        "FULL uniform",
    }
    five = kept(5, **asked)
    assert {lane: sizes for lane, sizes in five.items() if len(sizes) > 1} == {
        "FULL uniform, LoRA case 3": (4, 8)
    }


def test_without_the_largest_sizes_the_rest_is_spread() -> None:
    plan = build_plan(config_of(None, [1, 2, 4, 8, 16, 32]))
    part = spread(plan, [key for key in plan.keys if key[1].num_tokens <= 8], 2)
    assert [key.num_tokens for _, key in part] == [8, 4]


def test_a_plan_says_what_the_number_of_graphs_has_left_out() -> None:
    config = config_of(2, [1, 2, 4])
    plan = build_plan(config)
    part = within_count(plan, config)
    assert part.keys == plan.keys[:2]
    [note] = part.notes
    assert note.startswith("budget.max_graphs = 2 keeps 2 of 3 keys")
    for most in (3, None):
        whole = config_of(most, [1, 2, 4])
        assert within_count(plan, whole) is plan
    lazy = config_of(2, [1, 2, 4], compilation={"capture_policy": "lazy"})
    assert within_count(plan, lazy) is plan, "it counts the keys that batches ask for"


MODEL = "import torch\n\ndef build():\n    return lambda x: torch.relu(x + 1)\n"
CONFIG: dict[str, Any] = {
    "model": {"target": "model.py:build"},
    "device": "cpu",
    "inputs": {"x": {"shape": ["num_tokens", 4], "dtype": "float32", "pad": 0}},
    "compilation": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32], "cudagraph_mode": "FULL"},
}


def test_inspect_names_the_budget_where_it_took_sizes_away(tmp_path: Path) -> None:
    (tmp_path / "few.yaml").write_text(yaml.safe_dump({**CONFIG, "budget": {"max_graphs": 2}}))

    def origin(*options: str) -> str:
        result = CliRunner().invoke(
            app, ["inspect", "--config", str(tmp_path / "few.yaml"), "--all", *options]
        )
        assert result.exit_code == 0, result.output
        words = " ".join(result.stdout.split())
        return words[
            words.rindex("compilation.cudagraph_capture_sizes") : words.index(
                "compilation.max_cudagraph"
            )
        ]

    listed = origin()
    assert "budget.max_graphs" in listed
    assert "num_speculative_tokens" not in listed
    assert "budget.max_graphs" in origin("--set", "compilation.cudagraph_capture_sizes=null")
    assert "budget.max_graphs" not in origin("--set", "budget.max_graphs=6")
