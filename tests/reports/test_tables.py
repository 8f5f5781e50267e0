"""Rules of the tables that the golden texts do not show."""

from __future__ import annotations

import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from saved import SAVED, golden_report, plan_named

from cgplan.config import Config
from cgplan.planning import Plan, build_plan
from cgplan.planning.engines import EngineOptions, with_emission
from cgplan.reports import BenchReport, CaptureReport, StateRecord, Timing, render, render_text
from cgplan.reports.layout import Column, Grid, TextColumn, describe_sizes, plain_text
from cgplan.reports.plan_tables import brief
from cgplan.reports.records import FloorRecord


def make_plan(**sections: Any) -> Plan:
    return build_plan(Config.model_validate(sections))


def capture_named(name: str) -> CaptureReport:
    found = golden_report(name)
    assert isinstance(found, CaptureReport)
    return found


def rows_of(text: str) -> list[list[str]]:
    """Cells of the first table in a text."""
    lines = text.splitlines()
    rule = next(i for i, line in enumerate(lines) if re.fullmatch("-+", line))
    end = next((i for i in range(rule, len(lines)) if not lines[i]), len(lines))
    return [re.split(r"  +", line) for line in lines[rule + 1 : end]]


# --- layout ---------------------------------------------------------------------------------------------------


def test_describe_sizes() -> None:
    texts = {
        (): "none",
        (5,): "5",
        (1, 2, 3): "1, 2, 3",
        (1, 2, 4, 8, 16, 24, 32): "1, 2, 4, 8 to 32 by 8",
        (1, 8, 16, 24, 32, 33): "1, 8 to 32 by 8, 33",
    }
    assert {sizes: describe_sizes(sizes) for sizes in texts} == texts


WORDS = [("first", 10**6, "several words that go on"), ("second", None, "one")]
TABLE = Grid(WORDS, TextColumn("name", "0"), Column("start-up time", "1"), TextColumn("note", "2"))


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (80, ["name    start-up time  note", "-" * 47, "first         1000000  several words that go on",
              "second              -  one"]),
        (44, ["         start-", "             up", "name       time  note", "-" * 41,
              "first   1000000  several words that go on", "second        -  one"]),
        (38, ["name    start-up time  note", "-" * 38, "first         1000000  several words",
              "                       that go on", "second              -  one"]),
    ],
)  # fmt: skip
def test_a_table_breaks_headings_first_then_texts_and_never_a_word(
    width: int, lines: list[str]
) -> None:
    shown = plain_text(TABLE, width).splitlines()
    assert [line.lstrip() for line in shown] == [line.lstrip() for line in lines]
    assert max(map(len, shown)) <= width


def test_a_first_column_goes_on_in_further_lines_where_it_must() -> None:
    table = Grid(
        [("requests of a long name", "12 ms")],
        TextColumn("load", "0"),
        Column("expected_step", "1"),
    )
    assert [line.split() for line in plain_text(table, 30).splitlines()[2:]] == [
        ["requests", "of", "a", "12", "ms"],
        ["long", "name"],
    ]


@pytest.mark.parametrize("name", SAVED)
def test_reports_fit_80_columns_with_whole_words(name: str) -> None:
    narrow, wide = (render_text(golden_report(name), width) for width in (80, 300))
    assert max(map(len, narrow.splitlines())) <= 80
    assert {*re.findall(r"[A-Za-z_]+", narrow)} <= {*re.findall(r"[A-Za-z_]+", wide)}


def test_a_word_that_is_longer_than_the_table_runs_over_in_its_row_alone() -> None:
    path = "/models/" + "a" * 40
    table = Grid(
        [("short", "x", "one"), ("long", path, "two")],
        *(TextColumn(str(i), str(i)) for i in range(3)),
    )
    assert plain_text(table, 50).splitlines()[2] == f"short {'x':<40} one"
    assert path in plain_text(table, 50).split()


def test_a_terminal_gets_the_same_words_in_style() -> None:
    report = golden_report("capture_ranks")
    console = Console(force_terminal=True, width=100, color_system="standard", _environ={})
    with console.capture() as captured:
        console.print(render(report))
    assert "\x1b[33mthe driver is older" in captured.get()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", captured.get())
    assert [line.rstrip() for line in plain.splitlines()] == str(report).splitlines()


# --- plans ----------------------------------------------------------------------------------------------------


def test_sizes_of_equal_distance_share_a_row() -> None:
    assert rows_of(render_text(make_plan(scheduler={"max_num_seqs": 256}))) == [
        ["1 to 2", "as it is", "0"],
        ["3 to 4", "4", "1"],
        ["5 to 8", "8", "3"],
        ["9 to 256", "next of 16 to 256 by 8", "7"],
        ["257 to 512", "next of 272 to 512 by 16", "15"],
        ["above 512", "no graph", "-"],
    ]


def test_irregular_padding_is_summarised() -> None:
    sizes = [1, 3, 4, 7, 9, 14, 15, 21, 30, 31, 40, 57, 58, 80, 99, 120, 200]
    rows = rows_of(render_text(make_plan(compilation={"cudagraph_capture_sizes": sizes})))[:-1]
    assert len(rows) <= 12
    for span, _, most in rows:
        first, _, last = span.partition(" to ")
        batches = range(int(first), int(last or first) + 1)
        assert int(most) == max(min(size for size in sizes if size >= n) - n for n in batches)
    assert [
        n for span, *_ in rows for n in range(int(span.split()[0]), int(span.split()[-1]) + 1)
    ] == list(range(1, 201))


@pytest.mark.parametrize(
    ("mode", "kept", "served"),
    [
        ("FULL_AND_PIECEWISE", ("FULL",), "uniform decode: FULL; mixed: eager"),
        ("FULL_AND_PIECEWISE", ("PIECEWISE",), "uniform decode: PIECEWISE; mixed: PIECEWISE"),
        ("FULL", ("FULL",), "all: FULL"),
        ("FULL", (), "all: eager"),
    ],
)
def test_batches_run_in_the_graphs_that_the_plan_has(
    mode: str, kept: tuple[str, ...], served: str
) -> None:
    plan = make_plan(compilation={"cudagraph_mode": mode, "cudagraph_capture_sizes": [2, 4]})
    some = plan.model_copy(update={"keys": tuple(key for key in plan.keys if str(key[0]) in kept)})
    assert f"batches  {served}\n" in render_text(some)


def test_mode_changes_and_warnings_are_shown_with_reasons() -> None:
    plan = make_plan(
        compilation={"attention_support": "UNIFORM_BATCH", "cudagraph_capture_sizes": [1, 9999]}
    )
    shown = render_text(plan)
    assert "FULL -> FULL_AND_PIECEWISE: attention_support is UNIFORM_BATCH" in shown
    assert "9999" in shown.partition("warning")[2]


@pytest.mark.parametrize("name", ["plan_ladder", "plan_traffic"])
def test_a_report_ends_with_what_one_pastes(name: str) -> None:
    plan = with_emission(plan_named(name), "sglang", EngineOptions(64))
    assert plan.emission is not None
    assert len(plan.emission.block) > 120, "longer than a line"
    before, without = plan_named(name), plan.emission
    for shown, older in (
        (plain_text(brief(plan), 80), plain_text(brief(before), 80)),
        (render_text(plan), render_text(before)),
    ):
        assert shown.startswith(f"{older}\n\nFor SGLang, by the rules of ")
        assert shown.endswith(f"\n{without.block}")
        assert "SGLang would drop" in shown


def test_a_terminal_does_not_cut_what_one_pastes() -> None:
    plan = with_emission(plan_named("plan_ladder"), "vllm")
    assert plan.emission is not None
    console = Console(width=60, file=StringIO(), force_terminal=True, color_system=None)
    console.print(brief(plan), crop=False)
    assert plan.emission.block in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_short_report_has_all_doubts_and_names_how_much_it_does_not_show() -> None:
    plan = plan_named("plan_traffic")
    assert plan.evidence is not None
    many = [f"warning {number}: " + "long " * 40 for number in range(7)]
    lanes = [plan.evidence["lanes"][0] | {"sizes": [n * n for n in range(1, 101)]}]
    plan = plan.model_copy(update={"evidence": plan.evidence | {"warnings": many, "lanes": lanes}})
    shown, whole = plain_text(brief(plan)), render_text(plan)
    assert "5 more with --verbose" in shown, "notes alone"
    assert re.search(r"1, 4, 9, 16, .*, \.\.\.; --verbose shows all", " ".join(shown.split()))
    for number in range(7):
        assert f"warning {number}:" in shown
    assert "note        " not in shown
    assert "note        " in whole
    assert "9801, 10000" in " ".join(whole.split())


# --- captures and benches -------------------------------------------------------------------------------------


def test_a_capture_says_what_is_checked_and_what_it_left_changed() -> None:
    report = capture_named("capture_gpu")
    state = [
        StateRecord(path="layers.0.cache", nbytes=3 << 30, kept="not kept"),
        StateRecord(path="layers.0.table", nbytes=1 << 10, kept="new"),
        StateRecord(path="steps", nbytes=8, kept="device"),
        StateRecord(path="rows", nbytes=1 << 20, kept="host"),
    ]
    shown = str(
        report.model_copy(update={"looked_at": "the model, 12 modules", "state": tuple(state)})
    )
    assert re.search(r"^  checked +the model, 12 modules$", shown, re.MULTILINE)
    assert rows_of(shown.partition("\nstate ")[2])[:2] == [
        ["layers.0.cache", "3072 MiB", "written, not put back"],
        ["layers.0.table", "1.0 KiB", "new: stays"],
    ]
    assert "\nstate " not in str(report.model_copy(update={"state": tuple(state[2:])}))
    assert "checked" not in str(report)


@pytest.mark.parametrize(
    ("eager", "padded", "gpu", "said"),
    [
        (1500.0, 0, True, True),
        (1550.0, 0, True, False),
        (1500.0, 1, True, False),
        (1500.0, 0, False, False),
    ],
)
def test_a_bench_says_where_graphs_are_slower(
    eager: float, padded: int, gpu: bool, said: bool
) -> None:
    """The bare replay takes 1,590 us."""
    report = golden_report("bench_gpu")
    environment = (
        report.environment
        if gpu
        else report.environment.model_copy(update={"backend": "cpu (tape)"})
    )
    record = report.records[0].model_copy(
        update={"eager": Timing(median=eager, p99=eager), "padded_rows": padded}
    )
    text = " ".join(
        str(report.model_copy(update={"records": (record,), "environment": environment})).split()
    )
    assert ("graphs take the device longer than the model's own code at 3 tokens" in text) == said
    assert ("Calls that follow one another" in text) == gpu


def test_a_bench_says_which_median_is_not_to_be_trusted() -> None:
    report = golden_report("bench_gpu")
    second = report.records[1].model_copy(update={"unsure": ("eager", "replay")})
    report = report.model_copy(update={"records": (report.records[0], second)})
    answer, table = render_text(report, 200).split("tokens runs as", 1)
    doubt = "Not to be trusted, as over twice the fastest call: eager at 4, replay at 4"
    assert f"{doubt}; measure again on an idle machine, on a CPU" in " ".join(answer.split())
    by_one = report.changed(environment=report.environment.changed(threads=1))
    assert "OMP_NUM_THREADS" not in render_text(by_one)
    assert "  3.41 times as fast as eager at 3 tokens" in answer
    assert [" unsure " in "".join(cells) for cells in rows_of(table)[:2]] == [False, True]


def test_a_bench_says_what_no_replay_can_be_faster_than() -> None:
    report = golden_report("bench_gpu")
    assert isinstance(report, BenchReport)
    said = render_text(report)
    assert "cannot be faster" not in said
    assert "not measured: it needs an idle GPU with 512 MiB free" in said
    on_cpu = render_text(golden_report("bench_against"))
    assert "floor  not measured: it needs an idle GPU" in on_cpu
    floor = FloorRecord(weight_bytes=2_000_000, bytes_per_us=1_000.0, kernel_us=1.5)
    text = render_text(report.model_copy(update={"floor": floor}))
    title, table = text.split("What a replay cannot be faster than")
    assert "1.9 MiB of weights at 954 MiB/s, 1.50 us for each kernel" in title
    rows = rows_of(table)
    assert [row[-4:] for row in rows] == [["2.00ms", "451", "676us", "0.00us"]] * 2
    assert "besides" not in title
    cache = floor.changed(state_bytes=3 << 20)
    title, same_table = render_text(report.changed(floor=cache), 200).split("What a replay cannot")
    assert "besides  3.0 MiB (KV caches" in title
    assert "a step may read a part: 3.15 ms for all" in title
    assert rows_of(same_table) == rows


def test_a_curve_does_not_begin_with_no_graph() -> None:
    plan = plan_named("plan_traffic")
    assert plan.evidence is not None
    none = {"graphs": 1, "expected_us": 9.0, "bytes": 0, "seconds": 0.0}
    evidence = plan.evidence | {"pareto": [none, *plan.evidence["pareto"][1:]]}
    curve = render_text(plan.model_copy(update={"evidence": evidence})).partition("Graphs against")
    assert "9.00 us" not in curve[2]
