"""The script of docs/distributed.md runs as it is printed, in one process and under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import run_script
from ranks import environment, free_port

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    path = tmp_path_factory.mktemp("docs") / "serve.py"
    path.write_text(block, encoding="utf-8")
    return path


def printed_by_two_ranks(script: Path) -> list[str]:
    given = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    whole = [sys.executable, "-m", *torchrun, str(script)]
    done = subprocess.run(whole, env=given, capture_output=True, text=True, timeout=90, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_two_ranks_print_the_tokens_of_one_process(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds to it
    alone = run_script(str(script)).splitlines()
    assert [line.split(" ")[0] for line in alone] == ["0", "1", "2"]
    assert len({line.partition(" ")[2] for line in alone}) == 3, "each batch has tokens of its own"
    for name, value in environment(0, 1, free_port(), patience=10).items():
        monkeypatch.setenv(name, value)  # as for `torchrun --nproc-per-node 1`
    assert run_script(str(script)).splitlines() == alone
    assert printed_by_two_ranks(script) == alone
