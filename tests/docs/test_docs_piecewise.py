"""The examples of docs/piecewise.md run, one after the other."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "piecewise.md"
SHOWN = (
    *("compile_piecewise", "eager_break_during_capture", "BreakableCUDAGraphCapture", 'backend="cgplan"'),
    *(" CUDAGraphWrapper(", "copied_arguments", '"piecewise": "wrappers"', "BreakableCUDAGraphWrapper(", "key_fn"),
)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for name in SHOWN:
        assert any(name in block for block in blocks)
    (tmp_path / "piecewise_examples.py").write_text("\n".join(blocks), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)  # Dynamo traces code of modules that can be imported
    with torch.no_grad():
        examples = import_module("piecewise_examples")
    assert examples.capture.num_graphs == 0, "the last one freed what it captured"
