"""`cgplan watch`: a program of its own runs, and its graphs are told of."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cgplan.errors import AuditError, ModelError

SERVE = """
import os, sys, time
import torch
from torch import nn
import cgplan

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)

device = "cuda" if torch.cuda.is_available() else "cpu"
net = Net().to(device).eval().requires_grad_(False)
x = cgplan.Input(shape=("num_tokens", 8), dtype="float32", pad=0)
runner = cgplan.capture(net, {"x": x}, compilation={"cudagraph_capture_sizes": [1, 2]}, device=device)
print("served", tuple(runner(x=torch.ones(2, 8, device=device)).shape), flush=True)
what = sys.argv[1] if len(sys.argv) > 1 else ""
if what == "reload":
    net.linear.weight = nn.Parameter(net.linear.weight.clone())
elif what == "wait":
    time.sleep(60)
elif what.isdigit():
    raise SystemExit(int(what))
"""


def watch(*command: str, options: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, "-m", "cgplan", "watch", *options, "--", *command]


@pytest.fixture
def serve(tmp_path: Path) -> str:
    path = tmp_path / "serve.py"
    path.write_text(SERVE)
    return str(path)


def run(*command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        watch(*command, options=options), capture_output=True, text=True, check=False, timeout=120
    )


def test_a_program_is_watched_to_its_end(serve: str, tmp_path: Path) -> None:
    saved, page = tmp_path / "watch.json", tmp_path / "watch.html"
    done = run(sys.executable, serve, options=("--output", str(saved), "--html", str(page)))
    assert done.returncode == 0, done.stderr
    assert "served (2, 8)" in done.stdout
    assert "All pointers are live" in done.stdout
    report = json.loads(saved.read_text())
    assert (report["kind"], len(report["graphs"]), report["stale"]) == ("watch", 2, [])
    assert "serve.py" in report["graphs"][0]["line"]
    assert "<title>Watch of 2 graphs</title>" in page.read_text()


def test_replaced_weights_are_told(serve: str) -> None:
    done = run(sys.executable, serve, "reload")
    assert "Net.linear.weight" in done.stdout
    assert "are stale" in done.stdout
    assert done.returncode in (0, AuditError.exit_code)  # the tape keeps the old tensor


def test_replays_that_read_living_memory_go_on(serve: str) -> None:
    done = run(sys.executable, serve, options=("--every-replay",))
    assert done.returncode == 0, done.stderr
    assert "served (2, 8)" in done.stdout


def test_the_exit_code_is_that_of_the_program(serve: str) -> None:
    assert run(sys.executable, serve, "3").returncode == 3
    missing = run("no-such-program")
    assert missing.returncode == ModelError.exit_code
    assert "no-such-program" in missing.stderr
    assert "Traceback" not in missing.stderr
    assert run(sys.executable, "-c", "print(1)").returncode == 0


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signal here")
def test_a_signal_shows_the_table_so_far(serve: str) -> None:
    process = subprocess.Popen(
        watch(sys.executable, serve, "wait"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline().startswith("served")
        os.kill(process.pid, signal.SIGUSR1)
        assert process.stderr.readline() == "Watch\n"
        assert "All pointers are live" in process.stderr.readline()
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "All pointers are live" in output


def test_a_program_that_is_killed_could_not_tell(tmp_path: Path) -> None:
    program = tmp_path / "dies.py"
    program.write_text("import os, signal, torch\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = run(sys.executable, str(program))
    assert done.returncode == 128 + signal.SIGKILL
    assert "died of signal 9 before it told of its graphs" in done.stderr
