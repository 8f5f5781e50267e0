"""docs/measure/zoo.py on a few small models: what it captures equals eager, and what cannot run says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ZOO = ROOT / "docs" / "measure" / "zoo.py"


def zoo(*arguments: object) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ZOO, "--device", "cpu", *arguments]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_models_are_captured_timed_and_compared(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    page = tmp_path / "zoo.md"
    printed = zoo("--only", "mlip_energy,vit,nothing*", "--out", tmp_path, "--report", page, "--sizes", "1,4")
    records = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("mlip_energy", "vit")}
    for name, record in records.items():
        assert record["error"] is None
        assert list(record["ways"]) == ["eager", "FULL", "PIECEWISE"]
        for way in record["ways"].values():
            assert way["captured"]
            assert {size: found["difference"] for size, found in way["sizes"].items()} == {"1": 0.0, "4": 0.0}
            assert all(found["device_us"] > 0 < found["host_us"] for found in way["sizes"].values())
        assert record["ways"]["FULL"]["padded"] == {"size": 3, "difference": 0.0}
        assert any(line.split()[:3] == [name, "equal", "equal"] for line in printed.splitlines())
        assert f"| {name} | equal | equal |" in page.read_text()
    assert records["vit"]["ways"]["PIECEWISE"]["graphs"] > records["vit"]["ways"]["FULL"]["graphs"] == 1
    assert max(map(len, printed.splitlines())) <= 160

    before = {name: (tmp_path / f"{name}.json").stat().st_mtime_ns for name in ("mlip_energy", "vit")}
    assert "mlip_energy" not in zoo("--only", "mlip_energy,vit", "--out", tmp_path, "--resume")
    assert before == {name: (tmp_path / f"{name}.json").stat().st_mtime_ns for name in before}


def test_a_model_that_takes_too_long_ends_alone(tmp_path: Path) -> None:
    printed = zoo("--only", "mlip_energy", "--out", tmp_path, "--timeout", "0")
    assert "took too long" in json.loads((tmp_path / "mlip_energy.json").read_text())["error"]
    assert "1 models, 0 of them ran" in printed


def test_the_zoo_has_models_of_each_family() -> None:
    table = yaml.safe_load(ZOO.with_suffix(".yaml").read_text())
    assert len(table["models"]) >= 44
    assert {row["family"] for row in table["models"].values()} == set(table["families"])
