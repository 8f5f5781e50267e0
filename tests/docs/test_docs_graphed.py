"""The examples of docs/graphed.md run, one after the other."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "graphed.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "graphed_examples.py").write_text("\n".join(blocks), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    examples = import_module("graphed_examples")
    torch.testing.assert_close(examples.y, examples.scores(examples.x, examples.mask), rtol=1e-4, atol=1e-5)
    assert not examples.g.report.records, "an example alone captures nothing"
    assert "padding proven" in (tmp_path / "my.yaml").read_text()
