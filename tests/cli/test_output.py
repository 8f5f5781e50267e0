"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from commands import cgplan_command, good, refused

from cgplan import errors
from cgplan.cli.output import save
from cgplan.reports import CaptureReport, load_report

needs_rights = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("nowhere/run", "cannot write nowhere/run: No such file or directory"),
        ("there", "cannot write there: Is a directory"),
        pytest.param("old", "cannot write old", marks=needs_rights),
    ],
)
def test_a_path_that_cannot_be_written_is_told_before_the_model_is_built(
    home: Path, output: str, said: str
) -> None:
    (home / "there").mkdir()
    (home / "old").write_text("old")
    (home / "old").chmod(0o444)
    marking = f"model={{target: 'models.py:marking', kwargs: {{path: {home / 'marker'}}}}}"
    command = ("capture", "--config", "good.yaml", "--set", marking)
    for option in ("--output", "--html"):
        assert said in refused(errors.OutputPathError, *command, option, output)
    assert "two is to hold two results" in refused(
        errors.OutputPathError, *command, "--output", "two", "--html", "./two"
    )
    assert "good.yaml is an input of the command" in refused(
        errors.OutputPathError, *command, "--html", "good.yaml"
    )
    assert not (home / "marker").exists()
    good(*command)
    assert (home / "marker").exists()


@pytest.mark.parametrize(("option", "file"), [("--html", "b.json"), ("-o", "b.html")])
def test_a_result_does_not_replace_a_file_of_the_other_form(
    home: Path, option: str, file: str
) -> None:
    (home / file).write_text("old")
    result = cgplan_command("bench", "good.yaml", option, file)
    assert result.exit_code == 2
    assert "--output writes JSON, --html writes HTML" in " ".join(result.stderr.split())
    assert (home / file).read_text() == "old"


def test_output_replaces_the_old_file_and_keeps_link_and_mode(home: Path) -> None:
    (home / "real.json").write_text("old")
    (home / "real.json").chmod(0o640)
    (home / "run.json").symlink_to("real.json")
    good("capture", "--config", "good.yaml", "--output", "run.json")
    assert (home / "run.json").is_symlink()
    assert isinstance(load_report("real.json"), CaptureReport)
    assert (home / "real.json").stat().st_mode & 0o777 == 0o640


def test_a_link_at_the_temporary_name_is_not_followed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "victim").write_text("mine")
    monkeypatch.setattr(os, "urandom", lambda count: b"known")
    (home / ".run.json.6b6e6f776e.tmp").symlink_to("victim")
    with pytest.raises(errors.OutputPathError, match=r"cannot write run\.json: File exists"):
        save(Path("run.json"), "new")
    assert (home / "victim").read_text() == "mine"
    assert (home / ".run.json.6b6e6f776e.tmp").is_symlink()


def test_a_page_has_the_report_of_each_command_and_of_a_saved_one(home: Path) -> None:
    titles = {}
    for command in ("capture", "bench", "plan", "audit", "doctor"):
        good(
            command, "--config", "good.yaml", "--html", "report.html", "--output", f"{command}.json"
        )
        first = (home / "report.html").read_text()
        titles[command] = re.findall(r"<h2[^>]*>(.*?)</h2>", first)
        good("inspect", f"{command}.json", "--html", "again.html")
        assert (home / "again.html").read_text() == first
    assert titles == {
        "capture": ["Memory", "Start-up", "Graphs", "Padding"],
        "bench": ["Latency", "Memory", "Start-up", "Graphs", "Padding"],
        "plan": ["Capture sizes", "Padding"],
        "audit": ["Owners"],
        "doctor": ["Steps", "Memory", "Start-up", "Graphs", "Padding"],
    }
    old = (home / "plan.json").read_text().replace('"schema_version": 2', '"schema_version": 1', 1)
    (home / "old.json").write_text(old)
    assert "schema version 1" in refused(
        errors.ReportError, "inspect", "old.json", "--html", "old.html"
    )
    assert not (home / "old.html").exists()


def test_report_is_shown_even_if_it_cannot_be_saved(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    result = cgplan_command("capture", "--config", "good.yaml", "--output", "run.json", "--json")
    assert result.exit_code == errors.OutputPathError.exit_code
    assert "No space left on device" in result.stderr
    assert len(CaptureReport.model_validate_json(result.stdout).records) == 3
    assert not list(home.glob("*.tmp")) + list(home.glob(".*.tmp"))


def test_output_to_a_pipe_does_not_replace_it(home: Path) -> None:
    os.mkfifo("pipe")  # a device would do, too, but a defect would cost the machine its device
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        good("capture", "--config", "good.yaml", "--output", "pipe")
        assert Path("pipe").is_fifo()
        assert len(CaptureReport.model_validate_json(os.read(reader, 2**16)).records) == 3
    finally:
        os.close(reader)
