"""The HTML file of a report, without a browser: sections and tables, names that are hostile, nothing from outside."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from audits import HOSTILE, audit_report
from saved import SAVED, golden_report, plan_named

from cgplan.optimizer.evidence import Evidence
from cgplan.planning.engines import with_emission
from cgplan.reports import Report, load_report, render_text
from cgplan.reports.html import UNITS, html_of, page_of
from cgplan.reports.records import (
    BenchReport,
    Beside,
    FloorRecord,
    OwnerRecord,
    StaleRecord,
    WatchedRecord,
    WatchReport,
)


def watch_report() -> WatchReport:
    kinds: Any = {"graph pool": 30, "free block": 1}
    graphs = [
        WatchedRecord(name=f"graph {i}", line=HOSTILE, nodes=7, opaque=1, words=31, kinds=kinds)
        for i in range(2)
    ]
    stale = StaleRecord(
        problem="free block",
        name="layers[*].weight",
        pointers=2,
        of=4,
        graphs=("graph 0", "graph 1"),
        kernel="gemm",
        detail="freed",
    )
    return WatchReport(
        environment=golden_report("capture_gpu").environment,
        owners=(OwnerRecord(kind="graph pool", name="pool", nbytes=4096, words=60, keys=2),),
        graphs=tuple(graphs),
        stale=(stale,),
        read_seconds=1.5,
        classify_seconds=0.25,
        unwatched=0,
    )


H200 = Path(__file__).parents[2] / "docs" / "pictures" / "report.json"  # 35 keys
REPORTS = {
    **{name: golden_report(name) for name in SAVED},
    "audit": audit_report(),
    "watch": watch_report(),
    "h200": load_report(H200),
}
REPORTS["floor"] = REPORTS["h200"].model_copy(
    update={"floor": FloorRecord(weight_bytes=1 << 30, bytes_per_us=4e6, kernel_us=1.2)}
)


class Read(HTMLParser):
    """Tags with their attributes, cells of each table by row, and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
        elif tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        tag = self.tags[-1][0] if self.tags else ""
        if tag in ("th", "td"):
            self.tables[-1][-1][-1] += data.strip("\n")
        elif tag == "script":
            self.scripts[-1] += data


def made(report: Report) -> Read:
    return Read(html_of(page_of(report), render_text(report)))


@pytest.mark.parametrize(
    ("side", "model", "told"),
    [(64, None, ""), (96, {"target": "my_server.py:build"}, "my_server.py:build, ")],
)
def test_pages_of_two_resolutions_have_titles_of_their_own(
    side: int, model: Any, told: str
) -> None:
    shape = ["num_tokens", 3, side, side]
    bench = REPORTS["bench_gpu"]
    assert isinstance(bench, BenchReport)
    plan = bench.capture.plan
    inputs = {"lengths": {"shape": ["num_tokens"]}, "pixel_values": {"shape": shape}}
    plan = plan.changed(config={**plan.config, "model": model, "inputs": inputs})
    bench = bench.changed(capture=bench.capture.changed(plan=plan))
    subject = f"{told}pixel_values [num_tokens, 3, {side}, {side}]"
    assert page_of(plan).title == f"Plan of {subject}"
    assert page_of(bench).title == f"Bench of {subject}"
    assert f"  model  {subject}" in render_text(bench, 200)


@pytest.mark.parametrize("name", REPORTS)
def test_every_chart_stands_over_a_table_of_its_figures(name: str) -> None:
    page, content = made(REPORTS[name]), page_of(REPORTS[name])
    drawn = json.loads(page.scripts[0])
    assert len(page.tables) == len(content.sections) == len(drawn)
    for table, (file, title, columns, rows, charts), section in zip(
        page.tables, drawn, content.sections, strict=True
    ):
        names = [column.name for column in section.table.columns]
        assert (file, title) == ("", section.title)
        assert table[0] == names
        assert len(table) == 1 + len(section.table.rows)
        assert bool(charts) == bool(rows)
        formats = {unit: shown for shown, unit in UNITS.items()} | {"": str}
        for cells, row in zip(table[1:], rows, strict=False):
            for shown, value, (column, unit) in zip(cells, row, columns, strict=True):
                assert shown == ("-" if value is None else formats[unit](value)), column
        for chart in charts:
            used = [
                chart["x"],
                *chart["values"],
                *(chart[k] for k in ("by",) if k in chart),
            ]
            assert set(used) <= set(names)
            assert all(dict(columns)[name] for name in chart["values"]), (
                "page.js draws figures with a unit"
            )
            assert [row for row in rows if "where" not in chart or chart["where"][1] in row], (
                "nothing to draw"
            )


def test_a_report_has_its_subjects() -> None:
    titles = {
        name: [section.title for section in page_of(report).sections]
        for name, report in REPORTS.items()
    }
    queued = "Calls that follow one another without waiting"
    assert titles["h200"] == ["Latency", queued, "Memory", "Start-up", "Graphs", "Padding"]
    assert titles["floor"][:3] == ["Latency", queued, "What a replay cannot be faster than"]
    assert titles["bench_against"][:2] == ["Latency", "Beside other ways"]
    assert titles["plan_traffic"] == [
        "Capture sizes",
        "Graphs against step time",
        "Use of each graph",
        "Padding",
        "Memory",
        "Start-up",
    ]
    assert titles["audit"] == ["Findings", "Owners"]
    capture = REPORTS["capture_gpu"].model_copy(update={"audit": REPORTS["audit"]})
    assert [section.title for section in page_of(capture).sections][-2:] == titles["audit"]


@pytest.mark.parametrize("name", ["capture_budget", "capture_lora"])
def test_the_page_has_the_columns_of_the_table_of_graphs(name: str) -> None:
    report = REPORTS[name]
    titles = [section.title for section in page_of(report).sections]
    head, *rows = made(report).tables[titles.index("Graphs")]
    text = render_text(report)
    assert re.search(" +".join(map(re.escape, head)), text)
    assert len(rows) == len(report.records)
    for row in rows:
        assert re.search(" +".join(map(re.escape, row)), text)


def test_two_reports_of_a_kind_share_curves_and_have_their_tables_beside_each_other() -> None:
    bench: Any = REPORTS["h200"]
    fewer = bench.model_copy(update={"records": bench.records[1:]})
    both = Beside(reports={"old.json": bench, f"{HOSTILE}.json": fewer})
    page = Read(html_of(page_of(both), render_text(both)))
    alone = page_of(bench)
    heads = [table[0] for table in page.tables]
    assert heads[::2] == heads[1::2] == [table[0] for table in made(bench).tables]
    old, new = page.tables[:2]
    assert new[1:] == old[2:]
    drawn = [attributes for tag, attributes in page.tags if "data-chart" in attributes]
    for section in alone.sections:
        shared = [chart for chart in section.charts if chart["kind"] in ("lines", "curve")]
        apart = len(section.charts) - len(shared)
        of_section = [box["data-file"] for box in drawn if box["data-section"] == section.title]
        assert len(of_section) == len(shared) + 2 * apart
        assert of_section.count("") == len(shared)
    files = [part[0] for part in json.loads(page.scripts[0])]
    assert list(dict.fromkeys(files)) == list(both.reports)
    assert len(page.scripts) == 3


def test_pages_tell_of_a_busy_machine() -> None:
    bench: Any = REPORTS["h200"]
    records = [record.model_copy(update={"unsure": ("replay",)}) for record in bench.records]
    busy = bench.model_copy(update={"records": tuple(records)})
    told = "Not to be trusted, as over twice the fastest call: replay at"
    for report, count in (
        (bench, 0),
        (busy, 1),
        (Beside(reports={"a.json": busy, "b.json": busy}), 2),
    ):
        assert html_of(page_of(report), "").count(told) == count


def test_a_section_that_one_of_two_reports_lacks_is_there_once() -> None:
    traffic, ladder = plan_named("plan_traffic"), plan_named("plan_ladder")
    page = page_of(Beside(reports={"ladder.json": ladder, "traffic.json": traffic}))
    text = html_of(page, "")
    titles = re.findall(r"<h2[^>]*>(.*?)</h2>", text)
    assert titles[:2] == ["ladder.json", "traffic.json"]
    assert titles.count("Padding") == titles.count("Graphs against step time") == 1
    step = text.partition("Graphs against step time</h2>")[2].partition("</section>")[0]
    assert re.findall(r"<h3>(.*?)</h3>", step) == ["traffic.json"]


def test_a_curve_has_the_step_without_graphs_where_the_plan_knows_it() -> None:
    plan = plan_named("plan_traffic")
    eager = ["eager", "0", "1.01 ms", "0 B", "0.00 us"]
    assert eager in made(plan).tables[1]
    evidence = Evidence.model_validate(plan.evidence)
    unknown = evidence.model_copy(update={"ladders": evidence.ladders[1:]}).model_dump()
    names = [row[0] for row in made(plan.model_copy(update={"evidence": unknown})).tables[1]]
    assert "eager" not in names


def test_sizes_are_numbers_one_by_one() -> None:
    plan = plan_named("plan_ladder")
    sizes = page_of(plan).sections[0]
    rows = made(plan).tables[0][1:]
    assert sizes.title == "Capture sizes"
    assert [row[0] for row in rows] == [str(lane) for lane in plan.lanes()]
    for row, found in zip(rows, plan.lanes().values(), strict=True):
        assert row[1:] == [str(len(found)), ", ".join(map(str, found))]


def test_options_for_an_engine_can_be_copied() -> None:
    plan = with_emission(plan_named("plan_ladder"), "vllm")
    assert plan.emission is not None
    page = made(plan)
    shown = html_of(page_of(plan), render_text(plan))
    block, _ = re.findall(r"<pre.*?>(.*?)</pre>", shown, re.DOTALL)
    assert html.unescape(block) == plan.emission.block
    assert plan.emission.title in shown
    ids = {attributes.get("id") for tag, attributes in page.tags if tag == "pre"}
    (button,) = [attributes for tag, attributes in page.tags if tag == "button"]
    assert button["data-copies"] in ids
    assert [tag for tag, _ in made(plan_named("plan_ladder")).tags].count("button") == 0


def test_memory_is_whole_and_predictions_stand_beside() -> None:
    report: Any = REPORTS["h200"]
    (memory,) = [section for section in page_of(report).sections if section.title == "Memory"]
    rows = memory.table.rows
    measured, predicted = (sum(row[i] for row in rows if row[i] is not None) for i in (2, 3))
    assert measured == report.capture.total_bytes
    assert predicted == report.capture.plan.predicted.total_bytes
    assert [chart["values"] for chart in memory.charts] == [("measured",), ("predicted",)]


def test_a_map_of_one_rectangle_or_two_is_left_out() -> None:
    one: Any = REPORTS["capture_lora"]
    two = one.model_copy(update={"static_bytes": one.pool_bytes})
    three = two.model_copy(update={"workspace_bytes": one.pool_bytes})
    for report, large, maps in ((one, 1, 0), (two, 2, 0), (three, 3, 1)):
        (memory,) = [s for s in page_of(report).sections if s.title == "Memory"]
        sizes = sorted(row[2] for row in memory.table.rows)
        assert sum(sizes[-large:]) > 0.98 * sum(sizes)
        assert len(memory.charts) == maps


def test_padding_of_a_planned_traffic_has_the_steps_up_to_each_batch() -> None:
    plan = plan_named("plan_traffic")
    (padding,) = [section for section in page_of(plan).sections if section.title == "Padding"]
    assert {chart["values"] for chart in padding.charts} == {("padding", "steps so far")}
    uses = Evidence.model_validate(plan.evidence).uses
    for lane, batch, size, share, steps in padding.table.rows:
        assert share == (size - batch) / size
        below = [u.share for u in uses if str(u.lane) == lane and u.size and u.size <= size]
        assert steps == pytest.approx(sum(below))
    (padding,) = [s for s in page_of(plan_named("plan_ladder")).sections if s.title == "Padding"]
    assert {chart["values"] for chart in padding.charts} == {("padding",)}


def test_a_lane_without_padding_has_no_curve_of_it() -> None:
    (padding,) = [s for s in page_of(REPORTS["capture_gpu"]).sections if s.title == "Padding"]
    padded = {row[0] for row in padding.table.rows if row[3]}
    lanes = {row[0] for row in padding.table.rows}
    assert {chart["caption"] for chart in padding.charts} == padded < lanes


def test_sizes_have_the_names_that_the_configuration_gives_them() -> None:
    report: Any = REPORTS["floor"]
    plan = report.capture.plan.model_copy(update={"dim_names": ("images", "side")})
    records = [record.model_copy(update={"unsure": ("replay",)}) for record in report.records]
    capture = report.capture.model_copy(update={"plan": plan})
    named = report.model_copy(
        update={"capture": capture, "records": (*records[:1], *report.records[1:])}
    )
    page = page_of(named)
    for section in page.sections[:3]:
        assert "images x side" in [column.name for column in section.table.columns]
        assert {chart["x"] for chart in section.charts} <= {"images x side"}
    assert "images x side" in page.lead
    assert "tokens" not in page.lead
    against: Any = REPORTS["bench_against"]
    capture = against.capture.model_copy(update={"plan": plan})
    text = render_text(against.model_copy(update={"capture": capture})).partition("Environment")[0]
    assert not re.search(r"(?<!_)tokens", text)


def test_an_audit_without_findings_says_so_and_has_no_empty_list() -> None:
    report: Any = REPORTS["audit"].model_copy(update={"findings": ()})
    page = page_of(report)
    assert page.lead.startswith(f"No dangling pointers in {len(report.keys)} graphs.")
    assert "Findings" not in [section.title for section in page.sections]


def test_a_watch_has_what_is_stale_its_graphs_and_their_owners() -> None:
    report: Any = REPORTS["watch"]
    assert "the watch keeps them: about 26.7 KiB of host memory" in " ".join(
        render_text(report).split()
    )
    page = page_of(report)
    assert page.lead == "2 of 62 pointers of 2 graphs are stale."
    stale, graphs, owners = made(report).tables
    assert stale[1][:3] == ["layers[*].weight", "freed", "2 of 4"]
    assert [row[0] for row in graphs[1:]] == ["graph 0", "graph 1"]
    assert owners[1][:3] == ["4.0 KiB", "pool", "graph pool"]
    live = page_of(report.model_copy(update={"stale": ()}))
    assert live.sections[0].title == "Graphs"
    assert live.lead.startswith("All pointers are live: 62 in 2 graphs.")
    gone = page_of(report.model_copy(update={"stale": (), "graphs": ()}))
    assert not gone.sections
    assert gone.lead.startswith("No graph lives that the watch saw.")


def test_figures_of_the_stand_in_say_so() -> None:
    report: Any = REPORTS["h200"]
    as_tape = {"environment": report.environment.model_copy(update={"backend": "cpu (tape)"})}
    capture = report.capture.model_copy(update=as_tape)
    page = page_of(report.model_copy(update={**as_tape, "capture": capture}))
    assert "cpu (tape)" in page.made
    assert ("note", "bytes and times of the CPU stand-in say little about a GPU") in page.notes


def test_a_page_says_where_its_figures_are_from() -> None:
    bench = page_of(REPORTS["h200"])
    assert bench.made == "NVIDIA H200, cuda, torch 2.11.0+cu130, 2026-11-23"
    assert dict(bench.notes)["times"].startswith("median and p99 of 30 calls")
    plan = dict(page_of(plan_named("plan_traffic")).notes)
    assert plan["traffic"] == "hist.csv: histogram: 1,275 steps"
    assert plan["step times"] == "times.csv"
    assert plan["costs"].startswith("measured: a capture of 12 keys on AMD EPYC")


def test_a_file_loads_nothing_and_runs_its_own_scripts_alone() -> None:
    page = made(REPORTS["audit"])
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "srcset", "action", "data"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
        assert (attributes.get("href") or "#").startswith("#")
    (policy,) = [
        a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert re.fullmatch(
        r"default-src 'none'; style-src 'unsafe-inline'; script-src( 'sha256-[\w+/]{43}='){2}",
        policy or "",
    )
    assert "@import" not in page.scripts[2]


def test_hostile_names_are_text() -> None:
    page = made(REPORTS["audit"])
    assert len(page.scripts) == 3
    assert HOSTILE in [cell for row in page.tables[0] for cell in row]
    bench: Any = REPORTS["bench_against"]
    way = bench.peers.records[0].changed(name=HOSTILE)
    peers = bench.peers.changed(records=(way,))
    drawn = made(bench.changed(peers=peers)).scripts[0]
    assert HOSTILE in [row[0] for row in json.loads(drawn)[1][3]]
    assert "<" not in drawn


def test_a_long_list_says_what_it_leaves_out() -> None:
    report = audit_report()
    page = html_of(page_of(report.model_copy(update={"owners": report.owners * 600})), "")
    assert f"{600 * len(report.owners):d} rows, the first 1000 of them here" in page
    assert len(Read(page).tables[1]) == 1001


def test_35_keys_are_at_most_one_and_a_half_mebibytes() -> None:
    report: Any = REPORTS["h200"]
    assert len(report.capture.records) == 35
    assert len(html_of(page_of(report), render_text(report)).encode()) < 1.5 * 2**20
