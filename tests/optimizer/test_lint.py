"""Lint: each rule with what sets it off, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from cgplan.config import Config
from cgplan.modes import CUDAGraphMode
from cgplan.optimizer.lanes import serve
from cgplan.optimizer.lint import (
    beyond_the_scheduler,
    lint,
    lint_without_traffic,
    lora_cases,
    milliseconds,
    scheduler_cliffs,
    traffic_cliffs,
    uneven_sizes,
    unreachable_sizes,
    unused_modes,
    wide_steps,
)
from cgplan.planning import Plan, build_plan
from cgplan.traffic.histogram import StepShape as Batch
from cgplan.traffic.histogram import Traffic
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


def config_of(
    mode: str, sizes: list[int] | None = None, *, seqs: int = 64, tokens: int = 400, spec: int = 0, **sections: Any
) -> Config:
    return Config.model_validate(
        {
            "compilation": {"cudagraph_mode": mode, "cudagraph_capture_sizes": sizes},
            "scheduler": {"max_num_seqs": seqs, "max_num_batched_tokens": tokens},
            "speculative": {"num_speculative_tokens": spec},
            **sections,
        }
    )


def plan_of(mode: str, sizes: list[int], **options: Any) -> Plan:
    return build_plan(config_of(mode, sizes, **options))


def decode(counts: dict[int, float], loras: int = 0) -> dict[Batch, float]:
    return {Batch(n, n, True, loras): w for n, w in counts.items()}


def mixed(counts: dict[int, float], loras: int = 0) -> dict[Batch, float]:
    return {Batch(n, 1, False, loras): w for n, w in counts.items()}


def traffic(*parts: dict[Batch, float]) -> Traffic:
    return Traffic.of([pair for part in parts for pair in part.items()], "by hand")


def test_a_plan_that_fits_has_no_warning() -> None:
    config = config_of("FULL_AND_PIECEWISE", [1, 2, 4, 8, 16, 32, 48, 64, 100, 150, 190])
    seen = traffic(decode({1: 5, 8: 5, 64: 5}), mixed({100: 1, 190: 1, 400: 1}))
    assert lint(build_plan(config), seen, TIMES) == ()


def test_lint_gathers_every_rule() -> None:
    config = config_of("FULL_AND_PIECEWISE", [16, 31], seqs=32, spec=1, lora={"max_loras": 2})
    warnings = lint(build_plan(config), traffic(decode({30: 1, 2: 5, 60: 1})), TIMES)
    for piece in (
        "that no graph holds, up to 60",
        "max_num_seqs allows",
        "more requests (up to 60)",
        "not multiples of 2",
        "LoRA cases, which are never seen",
        "of what runs is padding",
        "no batch of the traffic runs in the",
        "has no mixed batch",
    ):
        assert any(piece in warning for warning in warnings), (piece, warnings)


# --- cliffs ---------------------------------------------------------------------------------------------------


def test_batches_above_every_graph_are_a_cliff_with_its_height() -> None:
    plan = plan_of("FULL_DECODE_ONLY", [8, 32])
    (warning,) = traffic_cliffs(plan, traffic(decode({8: 96, 40: 3, 50: 1}), mixed({300: 100})), TIMES)
    assert "2.00% of the steps are uniform decode batches that no graph holds, up to 50 tokens" in warning
    assert "20 ms eagerly, 7.94 ms in a FULL graph" in warning


def test_batches_that_a_graph_would_not_make_faster_are_no_cliff() -> None:
    plan = plan_of("FULL", [8, 32])
    assert list(traffic_cliffs(plan, traffic(decode({8: 96}), mixed({300: 100})), TIMES)) == []
    mixed_cliff = traffic(mixed({100: 1, 300: 100}))
    assert list(traffic_cliffs(plan, mixed_cliff, TIMES)) == [], "the largest of them would not gain"
    assert "mixed batches that no graph holds, up to 100" in next(traffic_cliffs(plan, traffic(mixed({100: 1})), TIMES))


def test_the_schedulers_largest_batch_is_a_cliff_where_it_has_no_graph() -> None:
    plan = plan_of("FULL_DECODE_ONLY", [8, 32])
    (warning,) = scheduler_cliffs(plan, traffic(decode({8: 1})), TIMES)
    assert "scheduler.max_num_seqs allows uniform decode batches of 64 tokens, which no graph holds" in warning
    assert "20 ms eagerly, 9.07 ms in a FULL graph" in warning
    assert list(scheduler_cliffs(plan_of("FULL_DECODE_ONLY", [64]), traffic(decode({8: 1})), TIMES)) == []
    seen = traffic(decode({64: 1}))
    assert list(scheduler_cliffs(plan, seen, TIMES)) == [], "that is for the traffic's rule to say"
    (warning,) = scheduler_cliffs(plan_of("PIECEWISE", [64], tokens=100), traffic(decode({8: 1})), TIMES)
    assert "scheduler.max_num_batched_tokens allows mixed batches of 100 tokens" in warning


def test_traffic_of_another_scheduler() -> None:
    plan = plan_of("FULL", [8])
    found = list(beyond_the_scheduler(plan, traffic(decode({8: 3, 65: 1}), mixed({500: 4}))))
    assert any("50.00% of the steps have more tokens (up to 500)" in warning for warning in found)
    assert any("12.50% of the steps have more requests (up to 65) than scheduler.max_num_seqs = 64" in w for w in found)
    assert list(beyond_the_scheduler(plan, traffic(decode({64: 1}), mixed({400: 4})))) == []


# --- sizes ----------------------------------------------------------------------------------------------------


def with_sizes(plan: Plan, *changed: tuple[int, int | None, bool]) -> Plan:
    """A plan whose keys someone has written by hand."""
    keys = tuple(
        (plan.keys[0][0], plan.keys[0][1]._replace(num_tokens=n, num_reqs=r, uniform=u)) for n, r, u in changed
    )
    return plan.model_copy(update={"keys": keys})


def test_sizes_that_no_batch_reaches() -> None:
    plan = plan_of("FULL_DECODE_ONLY", [64])
    assert list(unreachable_sizes(plan)) == []
    (warning,) = unreachable_sizes(with_sizes(plan, (60, 60, True), (70, 64, True), (90, 64, True), (99, 64, True)))
    assert "no batch reaches the 2 graphs of lane FULL uniform at 90, 99 tokens" in warning
    assert "up to 64" in warning, "70 is reached by batches of 61 to 64"
    pairs = plan_of("FULL_DECODE_ONLY", [64], spec=1)
    (warning,) = unreachable_sizes(with_sizes(pairs, (4, 2, True), (5, 2, True), (8, 4, True)))
    assert "graph of lane FULL uniform at 5 tokens: it runs multiples of 2 up to 128" in warning


def test_sizes_that_are_no_multiples_of_the_query_length() -> None:
    config = config_of("FULL_DECODE_ONLY", [4, 9, 10, 12], spec=2)
    (warning,) = uneven_sizes(build_plan(config))
    assert "cudagraph_capture_sizes 4, 10 are not multiples of 3" in warning
    assert "captured at 6, 12" in warning
    config = config_of("FULL_DECODE_ONLY", [1, 3, 7], spec=2)
    (warning,) = uneven_sizes(build_plan(config))
    assert "1, 7 are not multiples of 3" in warning
    assert "captured at 3 instead and dropped at 7" in warning
    assert build_plan(config).capture_sizes == (3,)
    even = config_of("FULL_DECODE_ONLY", [3, 9], spec=2)
    assert list(uneven_sizes(build_plan(even))) == []
    assert list(uneven_sizes(plan_of("FULL", [5]))) == []
    (by_hand,) = uneven_sizes(with_sizes(build_plan(even), (7, 2, True)))
    assert "sizes 7 of uniform decode are not multiples of 3" in by_hand


def test_wide_steps_are_told_with_what_they_cost() -> None:
    plan = plan_of("FULL_DECODE_ONLY", [4, 64])
    (warning,) = wide_steps(serve(plan.keys, traffic(decode({4: 50, 20: 30, 64: 20})), TIMES))
    assert "FULL uniform at 64 tokens: 41% of what runs is padding, in 50.0% of the steps" in warning
    assert "37.6 tokens on average" in warning
    assert "2.12 ms less" in warning


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ({3: 50, 4: 20, 60: 30}, "a quarter at most"),
        ({4: 9999, 20: 1}, "seldom"),
    ],
)
def test_narrow_and_seldom_steps_are_not_worth_a_word(counts: dict[int, float], why: str) -> None:
    plan = plan_of("FULL_DECODE_ONLY", [4, 64])
    assert list(wide_steps(serve(plan.keys, traffic(decode(counts)), TIMES))) == [], why


def test_padding_that_takes_no_time_is_not_worth_a_word() -> None:
    flat = StepTimes.measured({(NONE, 0): {1: 9}, (FULL, 0): {1: 5, 64: 5}}, "flat")
    plan = plan_of("FULL_DECODE_ONLY", [64])
    assert list(wide_steps(serve(plan.keys, traffic(decode({2: 1})), flat))) == []


# --- lanes ----------------------------------------------------------------------------------------------------


def served_lora(seen: Traffic, **lora: Any) -> list[str]:
    plan = plan_of("FULL", [4, 8], lora={"max_loras": 4, **lora})
    return list(lora_cases(plan, seen, serve(plan.keys, seen, TIMES)))


def test_lora_cases_never_seen() -> None:
    (warning,) = served_lora(traffic(decode({4: 1})))
    assert "no batch of the traffic uses adapters, but lora.max_loras is 4: 2 of 4 graphs" in warning
    assert served_lora(traffic(decode({4: 1}), decode({4: 1}, 2))) == []
    by_count = served_lora(traffic(decode({4: 1}), decode({4: 1}, 2)), specialize_active_lora=True)
    assert [w.split(":")[0] for w in by_count] == [f"LoRA case {case} is never seen" for case in (1, 4, 5)]
    assert "runs in its 2 graphs" in by_count[0]


def test_more_adapters_than_the_configuration_has() -> None:
    unseen, warning = served_lora(traffic(decode({4: 3}, 2), decode({4: 1}, 9)))
    assert "LoRA case 0 is never seen" in unseen
    assert "25.00% of the steps have more active adapters (up to 9) than lora.max_loras = 4" in warning
    plan, seen = plan_of("FULL", [4]), traffic(decode({4: 1}, 1))
    found = list(lora_cases(plan, seen, serve(plan.keys, seen, TIMES)))
    assert "which has no lora section" in found[-1]


def test_modes_that_the_traffic_never_uses() -> None:
    plan = plan_of("FULL_AND_PIECEWISE", [8])
    seen = traffic(decode({4: 1}))
    assert list(unused_modes(plan, seen, serve(plan.keys, seen, TIMES))) == [
        "no batch of the traffic runs in the 1 PIECEWISE graph of the plan",
        "the traffic has no mixed batch; PIECEWISE graphs in mode FULL_AND_PIECEWISE are for those",
    ]
    both = traffic(decode({4: 1}), mixed({4: 1}))
    assert list(unused_modes(plan, both, serve(plan.keys, both, TIMES))) == []
    only = plan_of("FULL_DECODE_ONLY", [8])
    seen = traffic(mixed({4: 1}))
    (unused, absent) = unused_modes(only, seen, serve(only.keys, seen, TIMES))
    assert "1 FULL graph" in unused
    assert "no uniform decode batch" in absent


# --- without traffic ------------------------------------------------------------------------------------------


def test_sizes_alone_tell_of_cliffs_and_wide_steps() -> None:
    config = config_of("FULL_DECODE_ONLY", [1, 8, 40], lora={"max_loras": 2})
    cliff, step = lint_without_traffic(build_plan(config))
    assert "uniform decode batches of 64 tokens, the largest graph holds 40" in cliff
    assert step == "FULL uniform: batches of 9 to 40 tokens run at 40, 39% of which is padding on average"


@pytest.mark.parametrize("ladder", ["vllm", "sglang", "trtllm", "powers_of_two"])
@pytest.mark.parametrize("spec", [0, 2])
def test_ladders_have_no_warning(ladder: str, spec: int) -> None:
    config = config_of("FULL_AND_PIECEWISE", spec=spec, seqs=64, tokens=512)
    compilation = config.compilation.model_copy(update={"cudagraph_capture_sizes": ladder})
    config = config.model_copy(update={"compilation": compilation})
    assert lint_without_traffic(build_plan(config)) == ()


def test_steps_of_a_request_more_are_those_of_uniform_decode() -> None:
    config = config_of("FULL_DECODE_ONLY", [3, 60], spec=2, seqs=20)
    (step,) = lint_without_traffic(build_plan(config))
    assert step == "FULL uniform: batches of 6 to 60 tokens run at 60, 45% of which is padding on average"


def test_many_wide_steps_are_counted() -> None:
    sizes = [3**n for n in range(9)]
    config = config_of("FULL", sizes, tokens=8192, seqs=64)
    steps = lint_without_traffic(build_plan(config))
    assert len(steps) == 4
    assert steps[-1] == "FULL: and 3 more steps as wide"


def test_times_are_written_without_exponents() -> None:
    assert [milliseconds(us) for us in (4740.0, 999_400.0, 8_012_345.0)] == ["4.74 ms", "999 ms", "8012 ms"]
