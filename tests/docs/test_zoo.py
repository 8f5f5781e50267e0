"""docs/measure/zoo.py on a few small models: what it captures equals eager, and what cannot run says why."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ZOO = ROOT / "docs" / "measure" / "zoo.py"


def zoo(*arguments: object) -> str:
    """Run the script."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, ZOO, "--device", "cpu", *arguments]
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def without_models(*arguments: object) -> None:
    """The same here, which saves the imports, where no model runs."""
    runpy.run_path(str(ZOO))["main"](["--device", "cpu", *map(str, arguments)])


def test_models_are_captured_timed_and_compared(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    page, models, sizes = tmp_path / "zoo.md", ("vit", "mlip_energy"), ("1", "2", "4")
    asked = [
        "--only",
        "mlip_energy,vit",
        "--ways",
        "FULL,PIECEWISE,AUTO",
        "--sizes",
        ",".join(sizes),
        "--jobs",
        2,
    ]
    printed = zoo(*asked, "--out", tmp_path, "--report", page)
    records = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in models}
    assert json.loads((tmp_path / "all.json").read_text()) == list(records.values())
    for name, record in records.items():
        assert record["error"] is None
        assert record["jobs"] == 2
        assert list(record["ways"]) == ["eager", "FULL", "PIECEWISE", "AUTO"]
        for way in record["ways"].values():
            assert way["captured"]
            assert {
                size: found["difference"] for size, found in way["sizes"].items()
            } == dict.fromkeys(sizes, 0.0)
            timed = {size: found for size, found in way["sizes"].items() if "device_us" in found}
            assert list(timed) == ["1", "4"]
            assert all(found["device_us"] > 0 < found["host_us"] for found in timed.values())
        assert record["ways"]["FULL"]["padded"] == {"size": 3, "difference": 0.0}
        chosen = record["ways"]["AUTO"]["chosen"]
        assert list(chosen) == list(sizes)
        assert set(chosen.values()) <= {"FULL", "PIECEWISE", "eager"}
        assert any(line.split()[:2] == [name, "equal"] for line in printed.splitlines())
        assert f"| {name} | equal | equal |" in page.read_text()
        assert (
            f"| {name} | {' | '.join(chosen.values())} | {record['ways']['AUTO']['reason']} |"
            in page.read_text()
        )
    assert (
        records["vit"]["ways"]["PIECEWISE"]["graphs"]
        > records["vit"]["ways"]["FULL"]["graphs"]
        == 1
    )
    (first, first_end), (second, second_end) = (record["timed_at"] for record in records.values())
    assert first_end <= second or second_end <= first
    assert max(map(len, printed.splitlines())) <= 160
    assert printed.splitlines()[1].split()[-1] == "reduce-overhead"

    before = {name: (tmp_path / f"{name}.json").stat().st_mtime_ns for name in models}
    without_models("--only", "mlip_energy,vit", "--out", tmp_path, "--resume")
    assert before == {name: (tmp_path / f"{name}.json").stat().st_mtime_ns for name in before}


def test_the_page_names_models_that_miss_an_aim(tmp_path: Path) -> None:
    def way(us: float, host: float, **more: object) -> dict[str, object]:
        found = {
            "device_us": us,
            "latency_us": us,
            "host_us": host,
            "first_call_seconds": 10.0,
            "difference": 0.0,
        }
        costs = {"captured": True, "note": None, "ready_seconds": 1.0, "memory_bytes": 0}
        return {**costs, "sizes": {"1": found}, **more}

    def record(name: str, **ways: object) -> dict[str, object]:
        machine = {
            "scale": "real",
            "backend": "cuda",
            "device": "a GPU",
            "torch": "2.13",
            "dtype": "float32",
            "jobs": 14,
        }
        run = {"sizes": [1], "timed": [1], "largest_output": 1.0, "seconds": 9.0, "error": None}
        return {"name": name, "family": "", **machine, **run, "ways": ways}

    taken, left = (
        {"chosen": {"1": what}, "reason": why}
        for what, why in (("FULL", "FULL, 2x"), ("eager", "less than 2%"))
    )
    records = [
        record(
            "llama",
            eager=way(100, 20),
            FULL=way(98, 5),
            inductor=way(51, 5),
            dynamic=way(60, 5, compile_seconds=12.0),
            AUTO=way(100, 20, **left),
            **{"reduce-overhead": way(50, 50)},
        ),
        record(
            "vit",
            eager=way(100, 95),
            FULL=way(52, 5),
            inductor=way(66, 20),
            dynamic=way(66, 5, compile_seconds=15.0),
            AUTO=way(102, 20, **taken),
            bare=way(50, 5),
            **{"reduce-overhead": way(60, 50)},
        ),
    ]
    page = tmp_path / "zoo.md"
    (tmp_path / "all.json").write_text(json.dumps(records))
    without_models(
        "--only", "", "--out", tmp_path, "--report", page, "--html", tmp_path / "zoo.html"
    )
    assert (
        '<td class="text">vit</td><td class="text">FULL</td><td>0.52x</td>'
        in (tmp_path / "zoo.html").read_text()
    )
    lines = page.read_text().splitlines()
    for expected in (
        "- inductor, device, 1: median 1.06 of 2 models, above 1.02: vit 1.10",
        "- inductor, host, 1: median 0.25 of 2 models, above 0.2: vit 0.40",
        "- dynamic, device, 1: median 1.15 of 2 models, above 1.15: llama 1.20",
        "- dynamic, compiling: median 1.35 of 2 models, above 1.3: vit 1.50",
        "- eager, 1: median 0.98 of 1 models, above 1.02: none",
        "- bare, 1: median 1.04 of 1 models, above 1.02: vit 1.04",
        "- AUTO: steps of 2 models timed, slower than eager by more than 1%: vit 1.02 at 1",
        "- AUTO: of 2 models on which FULL gains 2%, 1 are captured; left out: llama",
        "| llama | eager | less than 2% |",
    ):
        assert expected in lines


def test_models_that_do_not_exist_are_named_with_close_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        without_models("--only", "vit,mlip_enrgy", "--out", tmp_path)
    assert "no model or family is mlip_enrgy; close are mlip_energy" in capsys.readouterr().err


def test_a_limit_leaves_models_that_a_later_run_resumes(tmp_path: Path) -> None:
    without_models("--only", "mlip_energy,policy", "--out", tmp_path, "--limit", 0)
    records = json.loads((tmp_path / "all.json").read_text())
    assert [record["limited"] for record in records] == [True] * len(records)
    assert "not begun before --limit" in records[0]["error"]
    printed = zoo("--only", "mlip_energy", "--out", tmp_path, "--resume", "--timeout", 0)
    assert "took too long" in json.loads((tmp_path / "mlip_energy.json").read_text())["error"]
    assert f"{len(records)} models, 0 of them ran" in printed


def test_the_zoo_has_models_of_each_family() -> None:
    table = yaml.safe_load(ZOO.with_suffix(".yaml").read_text())
    assert len(table["models"]) >= 44
    assert {row["family"] for row in table["models"].values()} == set(table["families"])
