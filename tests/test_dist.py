"""The wheel: what users get who have no copy of the sources."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import cgplan

ROOT = Path(__file__).parents[1]
pytest.importorskip("hatchling")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked; built by way of the source distribution, as a release is."""
    folder = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t")
    subprocess.run([*build, "sdist"], cwd=ROOT, check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(folder)], check=True)
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    subprocess.run([*build, "wheel"], cwd=unpacked, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_all_files_are_there(installed: Path) -> None:
    package = {
        p.relative_to(ROOT)
        for p in (ROOT / "cgplan").rglob("*")
        if p.is_file() and p.suffix != ".pyc"
    }
    examples = {
        Path("cgplan/examples") / p.name for p in (ROOT / "configs").iterdir() if p.is_file()
    }
    docs = {Path("cgplan") / p.relative_to(ROOT) for p in (ROOT / "docs").rglob("*.md")}
    found = {p.relative_to(installed) for p in installed.rglob("*") if p.is_file()}
    assert {path for path in found if path.parts[0] == "cgplan"} == package | examples | docs
    assert Path("cgplan/py.typed") in found


def test_metadata(installed: Path) -> None:
    (info,) = installed.glob("*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text(encoding="utf-8"))
    assert (metadata["Name"], metadata["Version"]) == ("cgplan", cgplan.__version__)
    assert (metadata["License-Expression"], metadata.get_all("License-File")) == (
        "Apache-2.0",
        ["LICENSE"],
    )
    assert (info / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert "cgplan = cgplan.cli.main:main" in (info / "entry_points.txt").read_text()


COMMANDS = """
import shlex, sys
from typer.testing import CliRunner
from cgplan.cli.main import app

for line in sys.argv[1:]:
    done = CliRunner().invoke(app, shlex.split(line))
    assert done.exit_code == 0, done.output
"""


def test_an_example_runs_from_where_it_is_copied(installed: Path, tmp_path: Path) -> None:
    """One process for all commands, because torch takes seconds to import."""
    names = ("vision", "decoder_cpu")
    one = "--set compilation.cudagraph_capture_sizes=[1] --set device=cpu"
    lines = [f"examples copy {name} {name}" for name in names]
    lines += [f"capture --config {name}/{name}.yaml {one} --output {name}.json" for name in names]
    command = (sys.executable, "-c", COMMANDS, *lines)
    environment = {"PYTHONPATH": str(installed)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    for name in names:
        report = json.loads((tmp_path / f"{name}.json").read_text())
        assert [record["descriptor"]["num_tokens"] for record in report["records"]] == [1]
