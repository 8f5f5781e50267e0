"""The page on reloads: its example, and its table of bugs beside those that are rebuilt."""

from __future__ import annotations

import re

import pytest
from pages import PAGES, ROOT, run_script

EXAMPLE = ROOT / "docs" / "examples" / "watch_reload.py"
REBUILT = ROOT / "tests" / "captures" / "test_reload_bugs.py"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_example_breaks_numbers_names_the_weights_and_mends(device: str) -> None:
    said = run_script(str(EXAMPLE), device)
    assert said.splitlines()[:3] == [
        "a reload that copies: 0 stale, numbers right",
        "a reload that assigns: 1 stale, numbers wrong",
        "the new numbers in the old memory: 0 stale, numbers right",
    ]
    assert "model.layers[*].weight" in said


def test_each_bug_of_the_table_is_rebuilt() -> None:
    table = PAGES["reload"].read_text(encoding="utf-8").split("## Twelve bugs")[1].split("## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| [")]
    threads = [re.findall(r"\(https://github\.com/\S+/(\d+)\)", row)[0] for row in rows]
    rebuilt = REBUILT.read_text(encoding="utf-8")
    assert len(threads) == len(set(threads)) == 12
    assert [thread for thread in threads if f'/{thread}"' not in rebuilt] == []
