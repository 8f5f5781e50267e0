"""The HTML file of a report in chromium: charts are drawn, lists are searched, nothing is wrong to see or hear."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from audits import HOSTILE, audit_report
from saved import golden_report

from cgplan.planning.engines import with_emission
from cgplan.reports import load_report, render_text
from cgplan.reports.html import html_of, page_of
from cgplan.reports.records import Beside

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="needs the extra `browser`"
)
H200 = Path(__file__).parents[2] / "docs" / "pictures" / "report.json"
REPORTS = {
    "bench": load_report(H200),
    "capture": golden_report("capture_ranks"),
    "plan": with_emission(golden_report("plan_traffic"), "vllm"),
    "check": golden_report("bench_empty"),
    "gpu": golden_report("capture_gpu"),
    "against": golden_report("bench_against"),
    "audit": audit_report().model_copy(update={"owners": 4 * audit_report().owners}),
}
REPORTS["two benches"] = Beside(
    reports={"before.json": REPORTS["bench"], "after.json": golden_report("bench_gpu")}
)
REPORTS["two plans"] = Beside(
    reports={"before.json": REPORTS["plan"], "after.json": golden_report("plan_bounded")}
)

REPORTS["hostile"] = Beside(
    reports={"before.json": REPORTS["bench"], HOSTILE: golden_report("bench_gpu")}
)


@pytest.fixture
def shown(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """A function that opens the file of a report. At the end the browser must not have said anything."""
    said: list[str] = []
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))

    def show(name: str) -> Any:
        (tmp_path / "report.html").write_text(
            html_of(page_of(REPORTS[name]), render_text(REPORTS[name]))
        )
        page.goto(f"file://{tmp_path}/report.html")
        return page

    yield show
    page.close()
    assert said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", REPORTS)
def test_charts_are_drawn_and_everybody_can_read_them(shown: Any, name: str, scheme: str) -> None:
    page = shown(name)
    page.emulate_media(color_scheme=scheme)
    marks = "boxes => boxes.map(box => box.querySelectorAll('svg path, svg text').length)"
    drawn = page.eval_on_selector_all(".chart", marks)
    if not isinstance(REPORTS[name], Beside):
        assert len(drawn) == sum(len(section.charts) for section in page_of(REPORTS[name]).sections)
    assert all(count > 3 for count in drawn)
    page.eval_on_selector_all("details", "parts => parts.forEach(part => { part.open = true })")
    found = axe.Axe().run(page)
    assert [v["id"] for v in found.response["violations"]] == [], found.generate_report()


def until(page: Any, condition: str) -> None:
    """`wait_for_function` asks again by eval, which the page's policy forbids."""
    for _ in range(300):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"not so after 30 s: {condition}")


def narrow(page: Any) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    charts = "[...document.querySelectorAll('.chart svg')]"
    until(page, f"{charts}.every(chart => chart.clientWidth < 400)")  # they are drawn again


def test_many_notes_are_folded_below_the_verdict_and_warnings(shown: Any) -> None:
    page = shown("plan")
    noted = page_of(REPORTS["plan"]).notes
    notes = [text for label, text in noted if label not in ("verdict", "warning")]
    assert len(noted) > 6
    listed = page.locator(".notes li")
    assert listed.first.inner_text().startswith("verdict:")
    assert listed.filter(has_text="warning:").first.is_visible()
    assert listed.filter(has_text=notes[0]).is_hidden()
    page.get_by_text(f"{len(notes)} notes").click()
    assert listed.filter(has_text=notes[0]).is_visible()


def test_options_are_copied_or_selected(shown: Any) -> None:
    page = shown("plan")
    page.get_by_role("button", name="Copy").click()
    until(page, "!!document.querySelector('[role=status]').textContent")
    said = page.locator("section [role=status]").inner_text()
    assert said in ("Copied", "Selected: press Ctrl+C")
    assert page.evaluate("getSelection().toString()").startswith("--compilation-config '{")


@pytest.mark.parametrize("name", REPORTS)
def test_a_narrow_window_is_not_scrolled_sideways(shown: Any, name: str) -> None:
    page = shown(name)
    narrow(page)
    until(page, "document.documentElement.scrollWidth === 400")
    for chart in page.locator(".chart svg").all():
        assert chart.bounding_box()["width"] < 400, "charts are drawn again"


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("name", [name for name in REPORTS if name != "audit"])
def test_no_word_is_broken(shown: Any, broken_words: Any, name: str, width: int) -> None:
    page = shown(name)
    page.set_viewport_size({"width": width, "height": 800})
    page.eval_on_selector_all("details", "parts => parts.forEach(part => { part.open = true })")
    assert broken_words(page) == []


def test_a_line_that_another_hides_is_named_with_it(shown: Any) -> None:
    legend = shown("bench").locator(".chart").first.locator("svg text").all_text_contents()
    assert "graph median, graph p99, replay median, replay p99" in legend
    assert {"eager median", "eager p99"} <= set(legend)


def test_notes_of_two_reports_stand_under_their_files(shown: Any) -> None:
    notes = shown("two benches").locator(".notes")
    assert notes.get_by_role("heading").all_inner_texts() == ["before.json", "after.json"]
    assert "before.json" not in " ".join(notes.locator("li").all_inner_texts())


TEXTS_OVER_OTHERS = """boxes => boxes.flatMap(box => {
    const texts = [...box.querySelectorAll('svg text')].filter(text => text.textContent.trim());
    const placed = texts.map(text => [text.textContent, text.getBoundingClientRect()]), found = [];
    placed.forEach(([one, a], i) => placed.slice(i + 1).forEach(([other, b]) => {
        if (a.left + 1 < b.right && b.left + 1 < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom) found.push(`${one} | ${other}`);
    }));
    const whole = box.getBoundingClientRect();
    return [...found, ...placed.filter(([, at]) => at.left < whole.left - 1 || at.right > whole.right + 1).map(([text]) => text)];
})"""


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("name", REPORTS)
def test_no_text_of_a_chart_is_over_another_or_cut(shown: Any, name: str, width: int) -> None:
    page = shown(name)
    page.set_viewport_size({"width": width, "height": 800})
    page.reload()
    assert page.eval_on_selector_all(".chart", TEXTS_OVER_OTHERS) == []


def test_this_plan_is_drawn_over_a_ladder_with_as_many_graphs(shown: Any) -> None:
    chart = shown("plan").locator("section", has_text="Graphs against step time").locator(".chart")
    sizes = """box => echarts.getInstanceByDom(box).getOption().series
        .filter(series => series.type === "scatter").map(({ name, symbolSize, z }) => [name, symbolSize, z])"""
    (_, own, above), *ladders = chart.first.evaluate(sizes)
    assert ladders
    assert all(own < size and above > z for _, size, z in ladders)


def test_a_ladder_has_one_colour_in_two_reports(shown: Any) -> None:
    chart = shown("two plans").locator("section", has_text="Graphs against step time")
    colours = chart.locator(".chart").first.evaluate(
        "box => echarts.getInstanceByDom(box).getOption().series.map(({ of, color }) => [of, color])"
    )
    assert len(colours) > len(dict(colours)) == len({tuple(pair) for pair in colours})


def test_a_figure_of_two_reports_names_the_file_of_each_line(shown: Any) -> None:
    page = shown("two plans")
    curve = page.locator("section", has=page.get_by_role("heading", name="Graphs against step"))
    legend = curve.locator(".chart svg text").all_text_contents()
    for name in ("this plan", "the best with so many graphs", "eager"):
        assert {f"{name} (before.json)", f"{name} (after.json)"} <= set(legend)


def test_a_legend_has_all_its_names_in_a_narrow_window(shown: Any) -> None:
    page = shown("plan")
    narrow(page)
    texts = page.locator(".chart").first.locator("svg text").all_text_contents()
    assert {"this plan", "configured", "vllm", "sglang", "trtllm", "powers_of_two", "eager"} <= set(
        texts
    )


def test_a_long_name_of_an_axis_keeps_its_size(shown: Any) -> None:
    page = shown("gpu")
    narrow(page)
    section = page.locator("section", has=page.get_by_role("heading", name="Start-up"))
    names = section.locator("svg text").all_text_contents()
    keys = [name for name in names if re.search(r": \d+$", name)]
    assert len(keys) == len(set(keys)) == len(REPORTS["gpu"].records)
    assert [name for name in keys if re.search(r"\.\.\.: \d+$", name)]


def test_an_axis_ends_with_all_of_it_and_begins_with_0(shown: Any) -> None:
    page = shown("plan")
    narrow(page)
    padding = page.locator("section", has=page.get_by_role("heading", name="Padding"))
    texts = padding.locator("svg text").all_text_contents()
    assert "100%" in texts
    assert "120%" not in texts
    start_up = page.locator("section", has=page.get_by_role("heading", name="Start-up"))
    assert "0" in start_up.locator("svg text").all_text_contents()


def test_a_list_is_searched_by_words_in_any_order(shown: Any) -> None:
    section = shown("audit").locator(
        "section", has=shown("audit").get_by_role("heading", name="Owners")
    )
    for text, left in {
        "weight parameter": [0, 1, 3, 4, 6, 7, 9, 10],
        "[1]": [1, 4, 7, 10],
        "onerror=alert": [2, 5, 8, 11],
        "nothing": [],
    }.items():
        section.get_by_role("searchbox", name="Search").fill(text)
        assert [
            i for i, row in enumerate(section.locator("tbody tr").all()) if row.is_visible()
        ] == left
        assert section.locator("output").inner_text() == f"{len(left)} of 12 rows"


def test_colours_follow_the_reader(shown: Any) -> None:
    page = shown("bench")
    label = page.locator(".chart text").first
    light = label.get_attribute("fill")
    page.emulate_media(color_scheme="dark")
    sync_api.expect(page.locator(".chart text").first).not_to_have_attribute("fill", light)


def test_keys_alone_reach_tables(shown: Any) -> None:
    page = shown("bench")
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert (
        page.evaluate("document.activeElement.getAttribute('aria-label')") == "Latency as a table"
    )


def test_a_tooltip_shows_a_hostile_name_as_text(shown: Any) -> None:
    page = shown("hostile")
    chart = page.locator(".chart").first
    chart.hover(position={"x": 200, "y": 150})
    sync_api.expect(chart.locator("> div").nth(1)).to_contain_text(HOSTILE)
    assert page.locator("img").count() == 0


@pytest.mark.parametrize(
    ("title", "said"),
    [("Latency", "tokens: 16"), ("Memory", "graph pool, FULL uniform: 256: 104 MiB, 28%")],
)
def test_a_pointer_says_what_it_is_at(shown: Any, title: str, said: str) -> None:
    section = shown("bench").locator(
        "section", has=shown("bench").get_by_role("heading", name=title)
    )
    chart = section.locator(".chart").first
    box = chart.bounding_box()
    x = {"Latency": 0.5, "Memory": 0.25}[title]
    chart.hover(position={"x": box["width"] * x, "y": 120})
    sync_api.expect(chart.locator("> div").nth(1)).to_contain_text(said)


def test_bars_tell_their_figures_all_along_the_row(shown: Any) -> None:
    page = shown("bench")
    chart = page.locator("section", has=page.get_by_role("heading", name="Start-up")).locator(
        ".chart"
    )
    chart.hover(position={"x": 900, "y": 50})
    sync_api.expect(chart.locator("> div").nth(1)).to_contain_text("FULL uniform: 256")


def test_charts_over_the_same_sizes_share_their_pointer(shown: Any) -> None:
    page = shown("against")
    section = page.locator("section", has=page.get_by_role("heading", name="Beside other ways"))
    first, second = section.locator(".chart").all()
    first.hover(position={"x": 200, "y": 150})
    for chart in (first, second):
        sync_api.expect(chart.locator("> div").nth(1)).to_contain_text("cgplan")


def test_a_range_that_is_dragged_is_zoomed(shown: Any) -> None:
    page = shown("bench")
    chart = page.locator("section", has=page.get_by_role("heading", name="Padding")).locator(
        ".chart"
    )
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    x, y, width = box["x"], box["y"], box["width"]
    assert "1" in chart.locator("svg text").all_text_contents()
    page.mouse.click(x + width - 33, y + 8)
    page.mouse.move(x + width / 2, y + 150)
    page.mouse.down()
    page.mouse.move(x + width / 2 + 60, y + 150, steps=4)
    page.mouse.move(x + width - 60, y + 150, steps=4)
    page.mouse.up()
    sync_api.expect(chart.locator("svg text", has_text="64")).to_be_attached()
    assert "1" not in chart.locator("svg text").all_text_contents()


def test_a_map_names_each_part_with_its_size(shown: Any) -> None:
    page = shown("bench")
    narrow(page)
    maps = page.locator("section", has=page.get_by_role("heading", name="Memory")).locator(".chart")
    texts = maps.first.locator("svg text").all_text_contents()
    parts = [text for text in texts if text.endswith("iB") and text[0].isalpha()]
    assert parts == [
        "graph pool 176 MiB",
        "driver 160 MiB",
        "workspaces 36 MiB",
        "static buffers 10 KiB",
    ]


def test_a_map_has_whole_words_or_none(shown: Any) -> None:
    page = shown("bench")
    narrow(page)
    maps = page.locator("section", has=page.get_by_role("heading", name="Memory")).locator(".chart")
    sync_api.expect(maps.first.locator("svg text").first).to_be_attached()
    texts = [text for text in maps.locator("svg text").all_text_contents() if text]
    assert texts
    for text in texts:
        assert re.search(r"(: \d+|all keys|kernels and others| [KM]iB)$", text), text
