"""`cgplan watch`: a program of its own runs, and its graphs are told of."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cgplan.cli.main import main
from cgplan.errors import AuditError, ModelError

Run = Callable[..., subprocess.CompletedProcess[str]]

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
elif what == "skip":
    os._exit(0)
elif what == "wait":
    time.sleep(60)
elif what.isdigit():
    raise SystemExit(int(what))
"""


FORKS = SERVE.replace(
    "what = ",
    """
import multiprocessing
fork = multiprocessing.get_context("fork")
KEPT = []
started = fork.Event()

def sleep():
    started.set()
    time.sleep(60)

def reload():
    one = Net().eval().requires_grad_(False)
    KEPT.extend([one.linear.weight, one, cgplan.capture(
        one, {"x": x}, compilation={"cudagraph_capture_sizes": [1]}, device="cpu"
    )])
    one.linear.weight = nn.Parameter(one.linear.weight.clone())

if __name__ == "__main__":
    child = fork.Process(target=reload)
    child.start()
    child.join()
    child = fork.Process(target=sleep)
    child.start()
    started.wait()
    child.terminate()
    child.join()
what = """,
)


def watch(*command: str, options: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, "-m", "cgplan", "watch", *options, "--", *command]


@pytest.fixture
def serve(tmp_path: Path) -> str:
    path = tmp_path / "serve.py"
    path.write_text(SERVE)
    return str(path)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """The command in this process, which has torch already; its programs are processes of their own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}

    def ran(*command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", watch(*command, options=options)[2:])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capfd.readouterr()
        code = ended.value.code or 0
        assert isinstance(code, int)
        return subprocess.CompletedProcess(command, code, said.out, said.err)

    yield ran
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_program_is_watched_to_its_end(run: Run, serve: str, tmp_path: Path) -> None:
    saved, page = tmp_path / "watch.json", tmp_path / "watch.html"
    done = run(sys.executable, serve, options=("--output", str(saved), "--html", str(page)))
    assert done.returncode == 0, done.stderr
    assert "served (2, 8)" in done.stdout
    assert "All pointers are live" in done.stdout
    report = json.loads(saved.read_text())
    assert (report["kind"], len(report["graphs"]), report["stale"]) == ("watch", 2, [])
    assert "serve.py" in report["graphs"][0]["line"]
    assert '<p class="lead">All pointers are live: ' in page.read_text()


def test_replaced_weights_are_told(run: Run, serve: str) -> None:
    done = run(sys.executable, serve, "reload", options=("--fail-on-stale",))
    assert "Net.linear.weight" in done.stdout
    assert "are stale" in done.stdout
    assert done.returncode == AuditError.exit_code


@pytest.mark.skipif(torch.cuda.is_available(), reason="a forked process has no CUDA")
def test_forked_processes_tell_of_their_own_graphs(run: Run, tmp_path: Path) -> None:
    program = tmp_path / "forks.py"
    program.write_text(FORKS)
    done = run(sys.executable, str(program), options=("--json",))
    report = json.loads(done.stdout)
    assert len(report["graphs"]) == 1, done.stderr
    assert done.returncode == 0  # stale, but held: no --fail-on-stale is given
    assert [found["name"] for found in report["stale"]] == ["Net#2.linear.weight"]
    assert done.stderr.count("process ") == 2
    assert ", 2 graphs, 0 stale tensors" in done.stderr


def test_a_program_without_graphs_has_a_report(run: Run, tmp_path: Path) -> None:
    saved = tmp_path / "watch.json"
    done = run(sys.executable, "-c", "print('serves')", options=("--output", str(saved)))
    assert done.returncode == 0, done.stderr
    assert "No graph lives that the watch saw" in done.stdout
    report = json.loads(saved.read_text())
    assert (report["kind"], report["graphs"]) == ("watch", [])


@pytest.mark.parametrize("code", ["print('serves')", "import torch"])
def test_it_is_said_where_no_process_was_watched(run: Run, code: str) -> None:
    done = run(sys.executable, "-c", f"{code}; raise SystemExit(3)")
    assert done.returncode == 3, done.stderr
    assert "the command ended with exit code 3" in done.stderr
    assert ("no process imported torch" in done.stderr) is ("torch" not in code)


def test_an_isolated_process_is_not_watched(run: Run) -> None:
    done = run(sys.executable, "-I", "-c", "print('serves')")
    assert "nothing was watched, no Python process got its PYTHONPATH" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a forked process has no CUDA")
def test_the_report_is_of_the_process_with_freed_memory(run: Run, tmp_path: Path) -> None:
    """Its parent has more stale tensors, which something still holds."""
    program = tmp_path / "forks.py"
    text = FORKS.replace("one.linear.weight = nn.Parameter(", "one.linear.weight.data = (")
    text = text.replace("KEPT.extend([one.linear.weight, ", "KEPT.extend([")
    reloads = "net.linear.bias = nn.Parameter(net.linear.bias.clone())"
    program.write_text(text.replace('if what == "reload":', f'if what == "reload":\n    {reloads}'))
    done = run(sys.executable, str(program), "reload", options=("--json",))
    assert done.returncode == AuditError.exit_code
    assert ", 2 stale tensors" in done.stderr
    assert [found["problem"] for found in json.loads(done.stdout)["stale"]] == ["free block"]


def test_a_program_of_any_rank_is_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    saved = tmp_path / "watch.json"
    done = run(sys.executable, "-c", "print('ran')", options=("--output", str(saved)))
    assert "ran" in done.stdout
    assert not saved.exists()  # it is of the first rank


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signal here")
def test_the_handlers_of_the_program_stay(run: Run) -> None:
    code = """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: print("mine", flush=True))
import torch
os.kill(os.getpid(), signal.SIGUSR1)
"""
    assert "mine" in run(sys.executable, "-c", code).stdout


def test_replays_that_read_living_memory_go_on_and_json_stands_alone(run: Run, serve: str) -> None:
    done = run(sys.executable, serve, "3", options=("--every-replay", "--json"))
    assert done.returncode == 3, done.stderr  # that of the program
    assert "served (2, 8)" in done.stderr
    assert len(json.loads(done.stdout)["graphs"]) == 2


def test_a_program_that_is_not_there_is_an_error(run: Run) -> None:
    missing = run("no-such-program")
    assert missing.returncode == ModelError.exit_code
    assert "no-such-program" in missing.stderr
    assert "Traceback" not in missing.stderr


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


def test_a_program_that_is_killed_could_not_tell(run: Run, tmp_path: Path) -> None:
    program = tmp_path / "dies.py"
    program.write_text("import os, signal, torch\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = run(sys.executable, str(program))
    assert done.returncode == 128 + signal.SIGKILL
    assert "died, or called os._exit, before it told of its graphs" in done.stderr
    assert "no process loaded PyTorch" not in done.stderr
    assert not done.stdout


def test_a_program_that_skips_its_exit_handlers_could_not_tell(run: Run, serve: str) -> None:
    done = run(sys.executable, serve, "skip", options=("--json",))
    assert done.returncode == 0
    assert "died, or called os._exit, before it told of its graphs" in done.stderr
    assert "no process loaded PyTorch" not in done.stderr
    assert not done.stdout


TWO = (
    SERVE.partition("what = ")[0]
    + """
other = Net().to(device).eval().requires_grad_(False)
second = cgplan.capture(other, {"x": x}, compilation={"cudagraph_capture_sizes": [1]}, device=device)
kept = other.linear.weight
other.linear.weight = nn.Parameter(kept.clone())
"""
)


def test_a_second_model_has_paths(run: Run, tmp_path: Path) -> None:
    program = tmp_path / "two.py"
    program.write_text(TWO)
    done = run(sys.executable, str(program), options=("--json",))
    report = json.loads(done.stdout)
    assert [found["name"] for found in report["stale"]] == ["Net#2.linear.weight"], done.stderr
