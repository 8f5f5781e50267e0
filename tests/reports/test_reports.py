"""How reports and plans are shown, saved and reloaded. The values are made up; nothing is captured here."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from plans import key, plan_with
from rich.console import Console

from cgplan.config import Config
from cgplan.errors import ReportError
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.planning import Plan, build_plan
from cgplan.planning.costs import KeyCost, Predicted
from cgplan.planning.difference import compare
from cgplan.planning.plan import Machine
from cgplan.reports import (
    BenchRecord,
    BenchReport,
    CaptureReport,
    Environment,
    GraphRecord,
    Timing,
    load_report,
    render,
    render_text,
)
from cgplan.reports.layout import describe_sizes, plain_text
from cgplan.reports.plan_tables import render_difference

WIDTH = 100


def make_plan(**sections: Any) -> Plan:
    return build_plan(Config.model_validate(sections))


def make_environment(gpu: bool) -> Environment:
    return Environment(
        backend="cuda" if gpu else "cpu (tape)",
        machine="Linux x86_64",
        device="NVIDIA H200" if gpu else "A Processor With A Long Name (R) @ 2.10 GHz",
        driver="570.124.06" if gpu else None,
        cuda="12.8" if gpu else None,
        torch="2.13.0",
        python="3.11.7",
        cgplan="0.1.0",
        date="2026-01-02T03:04:05+00:00",
        config_hash="0123456789ab",
    )


def make_capture(plan: Plan, gpu: bool = True, graphs: int = 1, warnings: tuple[str, ...] = ()) -> CaptureReport:
    records = tuple(
        GraphRecord(
            mode=mode,
            descriptor=descriptor,
            graphs=graphs,
            nodes=451 if gpu else 37,
            pool_growth=58 * 2**20 if index == 0 else 0,
            driver_bytes=3 * 2**20 // 2 if gpu else None,
            warmup_seconds=0.01234,
            capture_seconds=0.00567,
        )
        for index, (mode, descriptor) in enumerate(plan.keys)
    )
    return CaptureReport(
        environment=make_environment(gpu),
        plan=plan,
        records=records,
        pool_bytes=58 * 2**20,
        static_bytes=1536,
        driver_bytes=12 * 2**20 if gpu else None,
        free_before=139 * 2**30,
        free_after=138 * 2**30,
        session_seconds=1.5,
        inspection_seconds=0.25,
        borrowed_outputs=True,
        warnings=warnings,
    )


def make_bench(capture: CaptureReport, repeats: int = 30) -> BenchReport:
    def timing(median: float) -> Timing:
        return Timing(median=median, p99=2 * median)

    served = BenchRecord(
        num_tokens=3,
        mode=CUDAGraphMode.FULL,
        descriptor=BatchDescriptor(4, 4),
        padded_rows=1,
        eager=timing(5500.0),
        graph=timing(1612.3),
        replay=timing(1590.0),
        graph_queued=timing(1603.0),
        replay_queued=timing(1585.0),
        eager_host=timing(5400.0),
        graph_host=timing(8.4),
    )
    missed = BenchRecord(
        num_tokens=100,
        mode=CUDAGraphMode.NONE,
        descriptor=BatchDescriptor(100),
        padded_rows=0,
        eager=timing(7000.0),
        graph=None,
        replay=None,
        graph_queued=None,
        replay_queued=None,
        eager_host=timing(6000.0),
        graph_host=None,
    )
    return BenchReport(environment=capture.environment, capture=capture, repeats=repeats, records=(served, missed))


SMALL = make_plan(compilation={"cudagraph_capture_sizes": [1, 2, 4]})
LORA = make_plan(
    compilation={"cudagraph_mode": "FULL_AND_PIECEWISE"}, lora={"max_loras": 4}, scheduler={"max_num_seqs": 64}
)
LANES = plan_with(
    [
        *(key(CUDAGraphMode.FULL, size, uniform=True, case=case) for size in (1, 2, 6) for case in (0, 3)),
        key(CUDAGraphMode.PIECEWISE, 64),
    ],
    max_loras=2,
)
PRICED = SMALL.model_copy(
    update={
        "predicted": Predicted(
            keys=(KeyCost(58 << 20, 1 << 20, 0.5), KeyCost(0, 1 << 20, 0.25), KeyCost(0, 0, 0.25)),
            static_bytes=1536,
            workspace_bytes=8 << 20,
            source="captures of sizes 4 and 1",
            estimated=False,
        ),
        "machine": Machine(gpu="NVIDIA H200", driver="570.124.06", torch="2.13.0"),
        "evidence": {"expected_us": {"plan": 1600.0}},
    }
)
EMPTY = make_plan(compilation={"cudagraph_mode": "NONE"})
REPORTS = [
    SMALL,
    LORA,
    LANES,
    PRICED,
    EMPTY,
    make_capture(SMALL, gpu=False),
    make_capture(LORA, graphs=29),
    make_capture(EMPTY),
    make_bench(make_capture(SMALL, gpu=False)),
    make_bench(make_capture(LORA)),
]


def table_lines(text: str) -> list[str]:
    """Header and rows of the table in a text: from the line before the rule to the next empty line."""
    lines = text.splitlines()
    rule = next(i for i, line in enumerate(lines) if re.fullmatch("-+", line))
    end = next((i for i in range(rule, len(lines)) if not lines[i]), len(lines))
    return [lines[rule - 1], *lines[rule + 1 : end]]


@pytest.mark.parametrize("report", REPORTS, ids=range(len(REPORTS)))
def test_text_is_plain_and_fits(report: Any) -> None:
    text = render_text(report, WIDTH)
    assert text.isascii()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("report", REPORTS, ids=range(len(REPORTS)))
def test_saved_report_reloads_equal(report: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(report.model_dump_json())
    assert load_report(path) == report
    assert render_text(load_report(path)) == render_text(report)


def test_capture_report_names_the_machine() -> None:
    text = str(make_capture(SMALL))
    for part in ("NVIDIA H200", "cuda", "driver 570.124.06", "CUDA 12.8", "torch 2.13.0", "2026-01-02", "0123456789ab"):
        assert part in text


def test_capture_report_has_a_row_for_each_key_in_order() -> None:
    header, *rows = table_lines(str(make_capture(SMALL)))
    assert header.split() == [
        "mode",
        "num_tokens",
        "num_reqs",
        "nodes",
        "pool",
        "growth",
        "driver",
        "warm-up",
        "capture",
    ]
    assert [row.split()[:4] for row in rows] == [["FULL", n, n, "451"] for n in ("4", "2", "1")]
    assert rows[0].split()[4:] == ["58.0", "MiB", "1.5", "MiB", "12.3", "ms", "5.67", "ms"]
    assert len({len(row) for row in rows}) == 1, "numbers stand right, so that rows end together"


def test_capture_report_totals() -> None:
    text = str(make_capture(SMALL))
    assert "pool 58.0 MiB, static buffers 1.5 KiB, driver 12.0 MiB; total 70.0 MiB" in text
    assert "139 GiB before, 138 GiB after" in text
    assert "warm-up 37.0 ms, capture 17.0 ms, inspection 250 ms, whole session 1.50 s" in text


def test_columns_that_say_nothing_are_left_out() -> None:
    plain, _ = table_lines(str(make_capture(SMALL, gpu=False)))[:2]
    assert "operators" in plain
    assert not {"nodes", "driver", "graphs", "LoRA"} & set(plain.split())
    lora, row = table_lines(str(make_capture(LORA, graphs=29)))[:2]
    assert {"nodes", "driver", "graphs", "LoRA"} <= set(lora.split())
    assert row.split()[:5] == ["PIECEWISE", "128", "-", "5", "29"]


def test_uniform_keys_are_told_from_others() -> None:
    plan = make_plan(compilation={"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [2]})
    piecewise, full = table_lines(str(make_capture(plan)))[1:]
    assert piecewise.split()[:3] == ["PIECEWISE", "2", "-"]
    assert full.split()[:4] == ["FULL", "uniform", "2", "2"]
    assert "uniform decode: FULL; mixed: PIECEWISE" in render_text(plan)


def test_reports_name_the_model() -> None:
    plan = make_plan(model={"target": "serve.py:build"}, compilation={"cudagraph_capture_sizes": [2, 4]})
    capture = make_capture(plan)
    for report in (plan, capture, make_bench(capture)):
        assert re.search(r"^  model +serve\.py:build$", render_text(report), re.MULTILINE)
    unnamed = plan.model_copy(update={"config": None})
    assert "serve.py" not in render_text(unnamed) + str(make_capture(unnamed))


@pytest.mark.parametrize(
    ("kept", "ways"),
    [
        (("FULL",), "uniform decode: FULL; mixed: eager"),
        (("PIECEWISE",), "uniform decode: PIECEWISE; mixed: PIECEWISE"),
        ((), "uniform decode: eager; mixed: eager"),
    ],
    ids=" ".join,
)
def test_the_ways_of_batches_are_those_that_the_plan_has_graphs_for(kept: tuple[str, ...], ways: str) -> None:
    plan = make_plan(compilation={"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [2, 4]})
    assert ways not in render_text(plan)
    some = plan.model_copy(update={"keys": tuple(key for key in plan.keys if str(key[0]) in kept)})
    assert ways in render_text(some)


def test_a_plan_of_one_routine_without_a_graph_runs_all_batches_eagerly() -> None:
    plan = make_plan(compilation={"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [2]})
    assert "all: FULL" in render_text(plan)
    assert "all: eager" in render_text(plan.model_copy(update={"keys": ()}))


def test_long_tables_are_shown_whole() -> None:
    plan = make_plan(scheduler={"max_num_seqs": 256})
    assert len(plan.keys) > 40
    rows = table_lines(str(make_capture(plan)))[1:]
    assert [int(row.split()[1]) for row in rows] == [key.num_tokens for _, key in plan.keys]
    assert len({len(row) for row in rows}) == 1


def test_mode_changes_and_warnings_are_shown_with_reasons() -> None:
    plan = make_plan(
        compilation={
            "cudagraph_mode": "FULL",
            "attention_support": "UNIFORM_BATCH",
            "cudagraph_capture_sizes": [1, 9999],
        }
    )
    for report in (plan, make_capture(plan, warnings=plan.warnings), make_bench(make_capture(plan))):
        assert "FULL -> FULL_AND_PIECEWISE: attention_support is UNIFORM_BATCH" in render_text(report)
    for shown in (plan, make_capture(plan, warnings=plan.warnings)):
        assert "9999" in render_text(shown).partition("warning")[2]


def test_tape_figures_are_marked() -> None:
    for report in (make_capture(SMALL, gpu=False), make_bench(make_capture(SMALL, gpu=False))):
        assert re.search(r"note +.*cpu \(tape\)", render_text(report))
    for report in (make_capture(SMALL), make_bench(make_capture(SMALL))):
        assert "tape" not in render_text(report)


def test_empty_capture_reports_zero_graphs() -> None:
    text = str(make_capture(EMPTY))
    assert "Graphs: none" in text
    assert "0 for 0 keys" in text


def test_bench_report_rows() -> None:
    served, missed = table_lines(str(make_bench(make_capture(SMALL))))[1:]
    figures = "5.50ms 11.0ms 1.61ms 3.22ms 1.59ms 3.41x 5.40ms 8.40us"
    assert served.split() == ["3", "FULL", "4", "1", *figures.split()]
    assert missed.split() == ["100", "eager", "0", "7.00ms", "14.0ms", "-", "-", "-", "-", "6.00ms", "-"]


def test_bench_fits_a_terminal_of_80_columns() -> None:
    text = render_text(make_bench(make_capture(SMALL)), 80)
    assert len(table_lines(text)) == 3, "no row is broken"


def test_queued_calls_have_a_table_on_a_gpu() -> None:
    on_gpu, on_tape = (str(make_bench(make_capture(SMALL, gpu=gpu))) for gpu in (True, False))
    rows = table_lines(on_gpu.partition("Calls that follow")[2])
    assert rows[1].split() == ["3", "1.60ms", "3.21ms", "1.58ms", "3.17ms", "1.01x"]
    assert len(rows) == 2, "a size without a graph has no row"
    assert "Calls that follow" not in on_tape


@pytest.mark.parametrize(
    ("eager", "padded", "gpu", "said"),
    [(1500.0, 0, True, True), (1550.0, 0, True, False), (1500.0, 1, True, False), (1500.0, 0, False, False)],
)
def test_bench_says_where_graphs_are_slower(eager: float, padded: int, gpu: bool, said: bool) -> None:
    report = make_bench(make_capture(SMALL, gpu=gpu))
    times = {"eager": Timing(median=eager, p99=eager), "padded_rows": padded}  # the bare replay takes 1,590 us
    slow = report.records[0].model_copy(update=times)
    text = " ".join(str(report.model_copy(update={"records": (slow, *report.records[1:])})).split())
    assert ("graphs take the device longer than the model's own code at 3 tokens" in text) == said


@pytest.mark.parametrize(("repeats", "said"), [(30, True), (100, False)])
def test_bench_says_what_p99_is_worth(repeats: int, said: bool) -> None:
    assert ("p99 is close to the slowest one" in str(make_bench(make_capture(SMALL), repeats))) == said


def test_plan_shows_sizes_keys_and_padding() -> None:
    text = render_text(make_plan(scheduler={"max_num_seqs": 256}))
    assert "51 (1, 2, 4, 8 to 256 by 8, 272 to 512 by 16), from ladder vllm up to 512" in text.replace(
        "\n" + " " * 12, " "
    )
    assert "51 FULL" in text
    rows = [re.split(r"  +", row) for row in table_lines(text)[1:]]
    assert rows == [
        ["1 to 2", "as it is", "0"],
        ["3 to 4", "4", "1"],
        ["5 to 8", "8", "3"],
        ["9 to 256", "next of 16 to 256 by 8", "7"],
        ["257 to 512", "next of 272 to 512 by 16", "15"],
        ["above 512", "no graph", "-"],
    ]


def test_irregular_padding_is_summarised() -> None:
    sizes = [1, 3, 4, 7, 9, 14, 15, 21, 30, 31, 40, 57, 58, 80, 99, 120, 200]
    plan = make_plan(compilation={"cudagraph_capture_sizes": sizes})
    rows = [re.split(r"  +", row) for row in table_lines(render_text(plan))[1:-1]]
    assert len(rows) <= 12
    for span, _, most in rows:
        first, _, last = span.partition(" to ")
        batches = range(int(first), int(last or first) + 1)
        assert int(most) == max(min(size for size in sizes if size >= n) - n for n in batches)
    covered = [n for span, *_ in rows for n in range(int(span.split()[0]), int(span.split()[-1]) + 1)]
    assert covered == list(range(1, 201))


def test_lanes_that_differ_have_a_table_each() -> None:
    text = render_text(LANES)
    assert "4 (1, 2, 6, 64), from cudagraph_mode is NONE; each lane has some of them" in text
    assert "1 PIECEWISE, 6 FULL uniform" in text
    decode, mixed = text.index("FULL uniform, 0, 3 active adapters: 3 (1, 2, 6)"), text.index("PIECEWISE, 0 active")
    assert mixed < decode, "in capture order"
    rows = [re.split(r"  +", row) for row in table_lines(text[decode:])[1:]]
    assert rows == [
        ["1 to 2", "as it is", "0"],
        ["3 to 6", "6", "3"],
        ["above 6", "another lane, or no graph", "-"],
    ]
    assert table_lines(text[mixed:])[1].split() == ["1", "to", "64", "64", "63"]


def test_lanes_of_one_list_share_a_table() -> None:
    """FULL decode graphs end before the list does; what a batch is padded to is the same."""
    text = render_text(LORA)
    assert "each lane" not in text
    assert text.count("is padded to") == 1
    assert "\nPIECEWISE and FULL uniform up to 64; 0, 5 active adapters\nbatch of (tokens)" in text


def test_a_plan_shows_what_it_is_predicted_to_cost() -> None:
    text = render_text(PRICED, 140)
    assert "pool 58.0 MiB, static buffers 1.5 KiB, driver 2.0 MiB, workspaces 8.0 MiB; total 68.0 MiB" in text
    assert re.search(r"start-up +1\.00 s", text)
    assert re.search(r"predicted +by captures of sizes 4 and 1$", text, re.MULTILINE)
    assert re.search(r"measured on +NVIDIA H200, driver 570\.124\.06, torch 2\.13\.0", text)


def test_estimates_are_marked() -> None:
    assert PRICED.predicted is not None
    estimate = PRICED.predicted.model_copy(update={"estimated": True})
    text = render_text(PRICED.model_copy(update={"predicted": estimate, "machine": None}), 140)
    assert "by captures of sizes 4 and 1 (an estimate: nothing of it was measured on the device)" in text
    assert "measured on  " not in text


def difference_text(old: Plan, new: Plan) -> str:
    return plain_text(render_difference(compare(old, new), "old.json", "new.json"), WIDTH)


def test_a_difference_shows_sizes_and_figures() -> None:
    new = make_plan(compilation={"cudagraph_capture_sizes": [1, 8]}, scheduler={"max_num_seqs": 64})
    text = difference_text(PRICED, new)
    assert text.startswith("old.json -> new.json\n  scheduler.max_num_seqs  256 -> 64\n")
    first, second = text.split("\n\n")[1:]
    assert re.split(r"  +", table_lines(first)[1]) == ["FULL", "8", "2, 4", "1"]
    assert [re.split(r"  +", row) for row in table_lines(second)[1:]] == [
        ["graphs", "3", "2", "-1", "-33.3%"],
        ["memory", "68.0 MiB", "-", "-", "-"],
        ["start-up", "1.00 s", "-", "-", "-"],
        ["expected step", "1.60 ms", "-", "-", "-"],
    ]


def test_a_difference_of_figures_has_a_sign_and_a_share() -> None:
    dearer = PRICED.model_copy(update={"evidence": {"expected_us": {"plan": 2000.0}}})
    assert re.search(r"expected step +1\.60 ms +2\.00 ms +\+400 us +\+25\.0%", difference_text(PRICED, dearer))
    same = difference_text(PRICED, PRICED)
    assert "settings  the same" in same
    assert "No graph is added or removed." in same
    assert re.search(r"graphs +3 +3 +0 +\+0\.0%", same)


def test_users_brackets_are_no_markup() -> None:
    report = make_capture(SMALL, warnings=("look at [bold]this[/bold] and [1, 2]",))
    assert "look at [bold]this[/bold] and [1, 2]" in str(report)


def test_terminal_gets_the_same_words_in_style() -> None:
    console = Console(force_terminal=True, width=WIDTH, color_system="standard", _environ={})
    with console.capture() as captured:
        console.print(render(make_capture(SMALL, warnings=("too hot",))))
    assert "\x1b[33mtoo hot" in captured.get()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", captured.get())
    assert [line.rstrip() for line in plain.splitlines()] == str(
        make_capture(SMALL, warnings=("too hot",))
    ).splitlines()


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((), "none"),
        ((5,), "5"),
        ((1, 2, 3), "1, 2, 3"),
        ((1, 2, 3, 4), "1 to 4"),
        ((1, 2, 4, 8, 16, 24, 32), "1, 2, 4, 8 to 32 by 8"),
        ((1, 8, 16, 24, 32, 33), "1, 8 to 32 by 8, 33"),
    ],
)
def test_describe_sizes(sizes: tuple[int, ...], text: str) -> None:
    assert describe_sizes(sizes) == text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "run.json:1:2: not JSON"),
        ("[]", "not a cgplan report"),
        ('{"kind": "capture", "schema_version": 999}', "schema version 999, this cgplan reads 1"),
        ('{"kind": "plan", "schema_version": 2}', "damaged report: requested_mode"),
        (
            make_plan().model_dump_json().replace('"capture_sizes":[1,2,4', '"capture_sizes":[2,1,4'),
            "damaged report: capture_sizes are not ascending",
        ),
        (make_plan().model_dump_json().replace('"query_len":1', '"query_len":0'), "damaged report: query_len: Input"),
        ('{"kind": "plan", "schema_version": 1}', "schema version 1, this cgplan reads 2"),
    ],
)
def test_other_files_are_refused(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(ReportError, match=re.escape(words)):
        load_report(path)


def test_a_report_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    data = {**json.loads(make_capture(SMALL).model_dump_json()), "extra": 1}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ReportError, match="damaged report: extra"):
        load_report(path)
