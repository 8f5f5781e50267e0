"""Lint: each rule with what sets it off, and what does not."""

from __future__ import annotations

from functools import partial
from typing import Any

import plans
import pytest

from cgplan.modes import CUDAGraphMode
from cgplan.optimizer.lint import doubts, lint, lint_without_traffic, rows_without_graphs
from cgplan.optimizer.problem import Run
from cgplan.planning import LADDERS, Plan, build_plan
from cgplan.planning.engines import read_vllm
from cgplan.traffic.histogram import StepShape, Traffic
from cgplan.traffic.step_times import StepTimes

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
TIMES = StepTimes.measured(
    {
        (NONE, 0): {1: 20_000, 200: 20_000, 400: 40_000},
        (PIECEWISE, 0): {1: 6_000, 200: 20_000, 400: 40_000},
        (FULL, 0): {1: 4_000, 200: 20_000, 400: 40_000},
    },
    "by hand",
)


plan_of = partial(plans.plan_of, seqs=64, tokens=400)


def decode(counts: dict[int, float], loras: int = 0) -> dict[StepShape, float]:
    return {StepShape(n, n, True, loras): w for n, w in counts.items()}


def mixed(counts: dict[int, float], loras: int = 0) -> dict[StepShape, float]:
    return {StepShape(n, 1, False, loras): w for n, w in counts.items()}


def traffic(*parts: dict[StepShape, float]) -> Traffic:
    return Traffic.of([pair for part in parts for pair in part.items()], "by hand")


def warnings(plan: Plan, seen: Traffic, about: str = "", times: StepTimes = TIMES) -> list[str]:
    """Those with these words."""
    run = Run(plan.lanes(), seen, times)
    return [warning for warning in (*doubts(plan, run), *lint(plan, run)) if about in warning]


def test_a_plan_that_fits_has_no_warning() -> None:
    sizes = [1, 2, 4, 8, 16, 32, 48, 64, 100, 150, 190]
    plan = plan_of("FULL_AND_PIECEWISE", sizes)
    seen = traffic(decode({1: 5, 8: 5, 64: 5}), mixed({100: 1, 190: 1, 400: 1}))
    (told,) = warnings(plan, seen)
    assert "run in graphs between measured sizes (8, 64, 100, 190)" in told
    points = {
        (mode, 0): {size: TIMES.of(mode, size) for size in (*sizes, 400)}
        for mode in (NONE, PIECEWISE, FULL)
    }
    assert warnings(plan, seen, times=StepTimes.measured(points, "by hand")) == []


@pytest.mark.parametrize(
    ("largest", "start"),
    [
        (400, ""),
        (513, " and --max-cudagraph-capture-size 528"),
        (8190, " and --max-cudagraph-capture-size 8192"),
    ],
)
def test_sizes_beyond_the_measured_ones_are_told(largest: int, start: str) -> None:
    """vLLM's own sizes end at 512, and are multiples of 16 there."""
    plan = plans.plan_of("FULL", [1, 64, 256, largest], seqs=256, tokens=8192)
    seen = traffic(mixed({100: 1, 390: 1}))
    times = StepTimes.measured(
        {(NONE, 0): {1: 20_000, 400: 40_000}, (FULL, 0): {1: 4_000, 128: 9_000}}, "by hand"
    )
    (told,) = warnings(plan, seen, "measured up to", times)
    assert told.endswith(
        f"were measured up to 128 tokens, the gain of 256, {largest} is extrapolated; to leave it out, "
        "write max_cudagraph_capture_size 128, and no list of sizes; to measure it: send steps of "
        f"129 to {largest} tokens to vLLM with --max-num-seqs 256{start}, or a bench"
    )
    most = start.rpartition(" ")[2] or "null"
    vllm = read_vllm(
        f'{{"max_cudagraph_capture_size": {most}}}', max_num_seqs=256, max_num_batched_tokens=8192
    )
    assert not vllm.lost
    assert build_plan(vllm.loaded.config).max_capture_size >= largest


def test_piecewise_steps_that_were_not_measured_are_told_once() -> None:
    """By the step times, which take them from FULL."""
    plan = plans.plan_of("FULL_AND_PIECEWISE", [1, 64, 256], seqs=256, tokens=8192)
    points = {(NONE, 0): {1: 20_000, 400: 40_000}, (FULL, 0): {1: 4_000, 128: 9_000}}
    times = StepTimes.measured(points, "by hand")
    seen = traffic(decode({1: 1, 200: 1}), mixed({100: 1, 200: 1}))
    (told,) = warnings(plan, seen, "measured up to", times)
    assert told.startswith("FULL uniform: ")
    assert "PIECEWISE was not measured" in times.unsure[-1]


def test_decode_of_drafts_beyond_the_measured_sizes_says_how_to_measure_it() -> None:
    """Four tokens a request: 64 requests are 256 tokens."""
    plan = plan_of("FULL_AND_PIECEWISE", [4, 64, 256, 400], spec=3)
    seen = traffic({StepShape(4 * n, n, True): 1 for n in (1, 64)}, mixed({390: 1}))
    points = {mode: {1: 4_000, 128: 9_000} for mode in ((PIECEWISE, 0), (FULL, 0))}
    times = StepTimes.measured({(NONE, 0): {1: 20_000, 400: 40_000}, **points}, "by hand")
    piecewise, decodes = sorted(warnings(plan, seen, "measured up to", times), reverse=True)
    assert "of 256, 400 is extrapolated" in piecewise
    with_drafts = f"--max-num-seqs {4 * plan.max_num_seqs}"
    start = f"to vLLM with no drafts and {with_drafts}, or a bench"
    assert piecewise.endswith(f"send steps of 129 to 400 tokens {start}")
    how = f"send up to 256 requests at once {start}"
    assert decodes.endswith(how)
    assert warnings(plan, seen, "measured up to") == []


# --- cliffs ---------------------------------------------------------------------------------------------------

HOLDS = "no graph holds"


def test_batches_above_every_graph_are_a_cliff_with_its_height() -> None:
    plan = plan_of("FULL_DECODE_ONLY", [8, 32])
    seen = traffic(decode({8: 96, 40: 3, 64: 1}), mixed({300: 100}))
    (warning,) = warnings(plan, seen, HOLDS)
    assert (
        "2.00% of the steps are uniform decode batches that no graph holds, up to 64 tokens"
        in warning
    )
    assert "20.0 ms eagerly, 9.07 ms in a FULL graph" in warning


def test_batches_that_a_graph_would_not_make_faster_are_no_cliff() -> None:
    plan = plan_of("FULL", [8, 32])
    for large in ({300: 100}, {100: 1, 300: 100}):
        assert (
            warnings(
                plan, traffic(decode({8: 96, 64: 1}), mixed(large)), "mixed batches that no graph"
            )
            == []
        )
    assert (
        warnings(plan, traffic(mixed({100: 1})), "mixed batches that no graph holds, up to 100")
        != []
    )


def test_the_schedulers_largest_batch_is_a_cliff_where_it_has_no_graph() -> None:
    plan = plan_of("FULL_DECODE_ONLY", [8, 32])
    (warning,) = warnings(plan, traffic(decode({8: 1})), HOLDS)
    assert (
        "scheduler.max_num_seqs allows uniform decode batches of 64 tokens, which no graph holds"
        in warning
    )
    assert warning.endswith(
        "20.0 ms eagerly, 9.07 ms in a FULL graph; at most 32 requests run in graphs: lower "
        "max_num_seqs to that, or accept eager steps"
    )
    assert warnings(plan_of("FULL_DECODE_ONLY", [64]), traffic(decode({8: 1})), HOLDS) == []
    (warning,) = warnings(plan, traffic(decode({64: 1})), HOLDS)
    assert warning.startswith("100.00% of the steps"), "the traffic's rule says it"
    (warning,) = warnings(plan_of("PIECEWISE", [64], tokens=100), traffic(decode({8: 1})), HOLDS)
    assert "scheduler.max_num_batched_tokens allows mixed batches of 100 tokens" in warning
    assert "at most 64 tokens run in graphs: lower max_num_batched_tokens to that" in warning
    wide = plan_of("FULL_DECODE_ONLY", [32], seqs=256)
    (warning,) = warnings(wide, traffic(decode({8: 1})), HOLDS)
    assert "allows uniform decode batches of 33 tokens" in warning, "at 256 eager is as fast"
    both = plan_of("FULL_AND_PIECEWISE", [64], tokens=64)
    no_mixed = both.changed(keys=tuple(key for key in both.keys if key[0] is FULL))
    (warning,) = warnings(no_mixed, traffic(decode({8: 1})), HOLDS)
    assert warning.endswith(" in a PIECEWISE graph: accept eager steps"), "no size to lower it to"


def test_batches_of_rows_beyond_the_graphs_are_a_note_that_lowers_no_bound() -> None:
    plan = plan_of("FULL", [1, 2], seqs=8, tokens=8)
    seen = traffic(mixed({1: 5, 2: 5}))
    assert warnings(plan, seen, HOLDS) == []
    (note,) = rows_without_graphs(plan, Run(plan.lanes(), seen, TIMES))
    assert note == (
        "batches of 3 to 8 rows, less than 0.01% of the steps, run eagerly: at 8 rows 20.0 ms eagerly, 4.56 ms in a FULL graph"
    )
    (warning,) = warnings(plan, traffic(decode({1: 9, 4: 1})), HOLDS)
    assert "10.00% of the steps are batches that no graph holds, up to 4" in warning
    for other in (
        plan_of("FULL", [1, 8], seqs=8, tokens=8),
        plan_of("FULL", [1, 2], seqs=8, tokens=9),
        plan_of("FULL_DECODE_ONLY", [1, 2], seqs=8, tokens=8),
    ):
        assert not [*rows_without_graphs(other, Run(other.lanes(), seen, TIMES))]


def test_traffic_of_another_scheduler() -> None:
    plan = plan_of("FULL", [8])
    found = warnings(plan, traffic(decode({8: 3, 65: 1}), mixed({500: 4})), "another scheduler")
    assert any("50.00% of the steps have more tokens (up to 500)" in warning for warning in found)
    assert any(
        "12.50% of the steps have more requests (up to 65) than scheduler.max_num_seqs = 64" in w
        for w in found
    )
    assert warnings(plan, traffic(decode({64: 1}), mixed({400: 4})), "another scheduler") == []


# --- lanes ----------------------------------------------------------------------------------------------------


def test_lora_cases_never_seen() -> None:
    plan = plan_of("FULL", [4, 8], lora={"max_loras": 4})
    (warning,) = warnings(plan, traffic(decode({4: 1})), "never seen")
    assert (
        "no batch of the traffic uses adapters, but lora.max_loras is 4: 2 of 4 graphs" in warning
    )
    assert "in a column Adapter, a traffic section by lora_share, vLLM's log does not" in warning
    seen = traffic(decode({4: 1}), decode({4: 1}, 2))
    assert warnings(plan, seen, "never seen") == []
    by_count = plan_of("FULL", [4, 8], lora={"max_loras": 4, "specialize_active_lora": True})
    (warning,) = warnings(by_count, seen, "never seen")
    assert warning.startswith("LoRA cases 1, 4, 5 are never seen: ")
    assert warning.endswith("runs in their 6 graphs")
    (warning,) = warnings(plan, traffic(decode({4: 1}, 2)), "never seen")
    lever = "; with --runner v1 cudagraph_specialize_lora false drops those of case 0"
    assert warning.startswith("LoRA cases 0 are never seen")
    assert warning.endswith(f"runs in their 2 graphs{lever}")
    v1 = plan_of("FULL", [4, 8], lora={"max_loras": 4}, cudagraph_specialize_lora=False)
    assert len(v1.keys) == 2


def test_more_adapters_than_the_configuration_has() -> None:
    seen = traffic(decode({4: 3}, 2), decode({4: 1}, 9))
    (warning,) = warnings(
        plan_of("FULL", [4, 8], lora={"max_loras": 4}), seen, "more active adapters"
    )
    assert (
        "25.00% of the steps have more active adapters (up to 9) than lora.max_loras = 4" in warning
    )
    assert (
        warnings(plan_of("FULL", [4]), traffic(decode({4: 1}, 1)), "which has no lora section")
        != []
    )


def test_a_kind_of_batches_that_the_traffic_lacks() -> None:
    plan = plan_of("FULL_AND_PIECEWISE", [8])
    absent = (
        "the traffic has no mixed batch; PIECEWISE graphs in mode FULL_AND_PIECEWISE are for those"
    )
    assert absent in warnings(plan, traffic(decode({4: 1})))
    both = warnings(plan, traffic(decode({4: 1}), mixed({4: 1})))
    assert not any("the traffic has no" in warning for warning in both)
    only = warnings(plan_of("FULL_DECODE_ONLY", [8]), traffic(mixed({4: 1})))
    assert any("the traffic has no uniform decode batch" in warning for warning in only)


# --- without traffic ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (
            {"mode": "FULL_DECODE_ONLY", "sizes": [1, 8, 40], "lora": {"max_loras": 2}},
            [
                "scheduler.max_num_seqs allows uniform decode batches of 64 tokens, the largest graph holds 40: "
                "batches beyond it run eagerly; lower it, or list that size in cudagraph_capture_sizes",
            ],
        ),
        (
            {"mode": "FULL", "sizes": [8]},
            [
                "scheduler.max_num_seqs allows batches of 64 tokens, the largest graph holds 8: "
                "batches beyond it run eagerly; lower it, or list that size in cudagraph_capture_sizes",
            ],
        ),
    ],
)
def test_sizes_alone_tell_of_cliffs(options: Any, found: list[str]) -> None:
    plan = plan_of(**options)
    assert list(lint_without_traffic(plan)) == found
    pictures = plan.changed(dim_names=("pictures",))  # which the scheduler does not bound
    assert list(lint_without_traffic(pictures)) == []


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("spec", [0, 2])
def test_ladders_have_no_warning(ladder: str, spec: int) -> None:
    plan = plan_of("FULL_AND_PIECEWISE", ladder, spec=spec, tokens=512)
    assert [*lint_without_traffic(plan)] == []
