"""docs/examples/nano_vllm.py with a checkout of nano-vllm, which the environment variable NANO_VLLM names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "nano_vllm.py"


@pytest.mark.gpu
@pytest.mark.skipif(
    "NANO_VLLM" not in os.environ, reason="NANO_VLLM names no checkout of nano-vllm"
)
def test_its_tokens_are_equal_and_a_watch_names_what_a_reload_leaves() -> None:
    options = "--requests", "8", "--layers", "2", "--watch"
    done = subprocess.run(
        [sys.executable, EXAMPLE, os.environ["NANO_VLLM"], *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "requests with the tokens of its own graphs: cgplan 8 of 8" in done.stdout
    # of six runs, three with its own graphs
    assert done.stdout.count("All pointers are live") == 6
    assert done.stdout.count("are stale") == 6
    assert "qkv_proj.weight" in done.stdout
