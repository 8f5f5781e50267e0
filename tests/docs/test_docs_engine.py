"""The examples of docs/engine.md run, one after the other, and each gives what the model gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from pages import Block, run_page

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"


def test_the_examples_run_and_equal_the_model() -> None:
    torch.manual_seed(0)
    outputs: list[torch.Tensor] = []

    def keep(block: Block, page: Any) -> None:
        outputs.extend([page.logits.clone()] if "logits = " in block.text else [])

    with torch.no_grad():
        page: Any = run_page("engine", after=keep)
        page.CONTEXT.slots = page.slots
        wanted = page.model(page.ids)
    assert len(outputs) == 5
    for output in outputs:
        torch.testing.assert_close(output, wanted)


def test_a_batch_that_no_graph_serves_has_its_own_context() -> None:
    text = PAGE.read_text(encoding="utf-8").replace(
        "for each in (runner, bare):\n    each.close()\n", ""
    )
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "engine_page"}
    exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
    device, slots = names["device"], torch.arange(6, device=names["device"])
    with torch.no_grad():
        for count in (6, 1, 4, 5):
            ids = torch.arange(count, device=device) + 10
            found = names["step"](ids, slots[:count]).clone()
            names["CONTEXT"].slots = slots[:count]
            torch.testing.assert_close(found, names["model"](ids))
    assert [key.num_tokens for _, key in names["runner"].stats.replays] == [4, 1]
