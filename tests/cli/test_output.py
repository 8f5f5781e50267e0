"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from commands import cgplan_command, good, refused

from cgplan import errors
from cgplan.reports import CaptureReport, load_report

needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder that nobody can write to")
needs_rights = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("nowhere/run.json", "cannot write nowhere/run.json: No such file or directory"),
        ("there", "cannot write there: Is a directory"),
        pytest.param("/proc/run.json", "cannot write /proc/run.json", marks=needs_proc),
        pytest.param("old.json", "cannot write old.json", marks=needs_rights),
    ],
)
def test_a_path_that_cannot_be_written_is_told_before_the_model_is_built(home: Path, output: str, said: str) -> None:
    (home / "there").mkdir()
    (home / "old.json").write_text("old")
    (home / "old.json").chmod(0o444)
    marking = f"model={{target: 'models.py:marking', kwargs: {{path: {home / 'marker'}}}}}"
    command = ("capture", "--config", "good.yaml", "--set", marking)
    assert said in refused(errors.OutputPathError, *command, "--output", output)
    assert not (home / "marker").exists()
    good(*command)
    assert (home / "marker").exists()


def test_failed_capture_leaves_no_file(home: Path) -> None:
    before = {p.name for p in home.iterdir()}
    raising = ("capture", "--config", "good.yaml", "--set", "model.target=models.py:raising")
    refused(errors.ModelError, *raising, "--output", "run.json")
    assert {p.name for p in home.iterdir()} - before <= {"__pycache__"}


def test_output_replaces_the_old_file_and_keeps_link_and_mode(home: Path) -> None:
    (home / "real.json").write_text("old")
    (home / "real.json").chmod(0o640)
    (home / "run.json").symlink_to("real.json")
    good("capture", "--config", "good.yaml", "--output", "run.json")
    assert (home / "run.json").is_symlink()
    assert isinstance(load_report("real.json"), CaptureReport)
    assert (home / "real.json").stat().st_mode & 0o777 == 0o640


def test_report_is_shown_even_if_it_cannot_be_saved(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
