"""Saved reports and plans, and the text that each is shown as.

The files are in ``tests/data/golden``; after a wanted change ``cgplan inspect NAME.json > NAME.txt`` writes a text;
``plain_text(brief(plan))`` is that of ``brief_NAME.txt``.
"""

from __future__ import annotations

import re

import pytest
from saved import SAVED, golden_report, golden_text, plan_named

from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.planning import Plan
from cgplan.planning.difference import compare
from cgplan.planning.engines import with_emission
from cgplan.reports import render, render_text
from cgplan.reports.layout import plain_text
from cgplan.reports.plan_tables import brief, render_difference
from cgplan.reports.records import FailedKey, ReplanReport


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_report_is_shown_as_ever(name: str) -> None:
    report = golden_report(name)
    assert render_text(report) == golden_text(name)
    assert golden_text(name).isascii()
    if not isinstance(report, Plan):
        assert str(report) == golden_text(name)


@pytest.mark.parametrize("name", SAVED)
def test_no_word_is_broken_in_80_columns(name: str) -> None:
    """Headings may go on after a hyphen or an underscore."""
    report = golden_report(name)
    wide, narrow = ([part for word in render_text(report, width).split() for part in re.split(r"(?<=[-_])", word)]
                    for width in (100, 80))  # fmt: skip
    assert max(map(len, render_text(report, 80).splitlines())) <= 80
    drawn = re.compile(
        r"[-#|+*.\d]*"
    )  # lines and bars are as long as there is room, axes have as many ticks
    assert {word for word in narrow if not drawn.fullmatch(word)} <= set(wide)


@pytest.mark.parametrize("name", [name for name in SAVED if name.startswith("plan")])
def test_a_short_report_of_a_plan_is_shown_as_ever_on_one_screen(name: str) -> None:
    shown, narrow = (plain_text(brief(plan_named(name)), width) for width in (100, 80))
    assert shown == golden_text(f"brief_{name}")
    assert len(shown.splitlines()) <= 45
    assert max(map(len, narrow.splitlines())) <= 80


def test_memory_that_looks_alike_is_not_compared() -> None:
    plan = plan_named("plan_traffic")
    assert plan.predicted is not None
    assert plan.evidence is not None
    eager, configured, *others = plan.evidence["ladders"]
    for more, compared in ((1, False), (1 << 20, True)):
        ladder = {**configured, "bytes": plan.predicted.total_bytes + more}
        changed = plan.changed(evidence={**plan.evidence, "ladders": [eager, ladder, *others]})
        head = " ".join(plain_text(brief(changed), 100).split("verdict")[0].split())
        assert ("memory 1.7 MiB instead of 2.7 MiB" in head) is compared
        alone = "memory 1.7 MiB; for less: --memory or --slo"
        assert head.endswith(alone) is not compared
    large = plan.predicted.model_copy(update={"static_bytes": 1000 << 20})
    ladder = {**configured, "bytes": large.total_bytes + (5 << 20)}
    near = plan.changed(predicted=large, evidence={**plan.evidence, "ladders": [ladder]})
    head = " ".join(plain_text(brief(near), 100).split("verdict")[0].split())
    assert re.search(r"MiB instead of \d+ MiB; for less: --memory or --slo$", head)
    evidence = {**changed.evidence, "ladders": [configured | {"bytes": plan.predicted.total_bytes}]}
    goal = {"name": "tpot_p99", "microseconds": 3e4}
    with_slo = changed.changed(evidence={**evidence, "slo": [goal]})
    assert "for less: --memory verdict" in " ".join(plain_text(brief(with_slo), 100).split())


@pytest.mark.parametrize(("us", "is_told"), [(104.0, False), (264.3, True)])
def test_a_load_whose_steps_are_longer_is_a_warning_above_the_sizes(
    us: float, is_told: bool
) -> None:
    plan = plan_named("plan_traffic")
    loads = [
        {"source": "today", "expected_us": 90.0, "ladder_us": 100.0},
        {"source": "4 times the load", "expected_us": us, "ladder_us": 100.0},
    ]
    changed = plan.changed(evidence={**(plan.evidence or {}), "loads": loads, "other_loads": 0.1})
    shown = " ".join(plain_text(brief(changed), 100).split())
    told = (
        "4 times the load: 264 us a step, 100 us with the graphs asked for; keep those if "
        "these steps matter"
    )
    assert (told in shown.partition(" sizes ")[0]) is is_told
    remedies = {
        "max_graphs": "larger --max-graphs",
        "capture_time": "larger --capture-time",
        "slo": "smaller --slo",
    }
    for limit, remedy in remedies.items():
        bound = changed.changed(evidence={**(changed.evidence or {}), "binding": [limit]})
        shown = " ".join(plain_text(brief(bound), 100).split())
        assert (f"; a {remedy} shortens it" in shown) is is_told
        whole = " ".join(plain_text(render(bound), 100).split())
        assert f"steps {us / 100 - 1:+.1%} at worst" in whole


def test_a_next_graph_for_insured_batches_is_not_one_for_the_traffic() -> None:
    """A graph that lint misses may bring the traffic something."""
    plan = plan_named("plan_traffic")
    insured = plan.changed(evidence={**(plan.evidence or {}), "insurance": 0.1})
    told = "next graph  is for 10% of unseen sizes, and would bring this traffic nothing"
    assert told in plain_text(brief(insured), 200)


@pytest.mark.parametrize(("graphs", "told"), [(3, "; 8 graphs are as good"), (8, "")])
def test_graphs_to_keep_are_the_headline(graphs: int, told: str) -> None:
    plan = plan_named("plan_bounded")
    evidence = plan.evidence or {}
    ladder = {**evidence["ladders"][1], "graphs": graphs}
    kept = plan.changed(evidence={**evidence, "keep": True, "ladders": [ladder]})
    head = (
        f"Plan: keep the configured sizes' {graphs} graphs{told}; --costs estimate tells start-up"
    )
    assert plain_text(brief(kept), 200).startswith(head)
    options = "--compilation-config"
    assert options in plain_text(brief(with_emission(plan, "vllm")), 200)
    assert options not in plain_text(brief(with_emission(kept, "vllm")), 200)


def test_padding_is_of_what_the_dimension_counts() -> None:
    pictures = plan_named("plan_ladder").changed(dim_names=("pictures",))
    assert "batch of (pictures)  is padded to" in plain_text(render(pictures), 100)


def test_a_plan_in_mode_none_says_how_graphs_are_asked_for() -> None:
    none = plan_named("plan_traffic").changed(mode=CUDAGraphMode.NONE, keys=())
    assert plain_text(brief(none), 100).startswith(
        "Plan: 0 graphs instead of the configured sizes' 12 graphs in mode NONE: leave out cudagraph_mode, or"
    )


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [("plan_priced", "plan_traffic", "diff_traffic"), ("plan_bounded", "plan_lora", "diff_lora")],
)
def test_a_difference_is_shown_as_ever(old: str, new: str, name: str) -> None:
    shown = render_difference(
        compare(plan_named(old), plan_named(new)), f"{old}.json", f"{new}.json"
    )
    assert plain_text(shown) == golden_text(name)


def test_a_replan_is_shown_as_ever() -> None:
    descriptor = BatchDescriptor(12, 12, True)
    report = ReplanReport(
        difference=compare(plan_named("plan_priced"), plan_named("plan_traffic")),
        verdict="steps are shorter",
        way="new generation",
        captured=((CUDAGraphMode.FULL, descriptor),),
        evicted=plan_named("plan_priced").keys,
        recaptured=2,
        failed=(
            FailedKey(
                mode=CUDAGraphMode.FULL, descriptor=descriptor, error="HostSyncError", detail="item"
            ),
        ),
        pool_bytes=(3 << 20, 1 << 20),
        seconds=0.25,
    )
    assert str(report) == golden_text("replan")
    proposed = report.model_copy(
        update={"way": "proposed", "captured": (), "recaptured": 0, "failed": ()}
    )
    assert "proposed only: nothing was captured" in str(proposed)
