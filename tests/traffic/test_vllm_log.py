"""Tables of CUDA graph statistics in logs of vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cgplan.traffic.histogram import StepShape

TABLE = "| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |\n|---|---|---|---|---|\n"
SPECULATIVE = {"speculative": {"num_speculative_tokens": 1}}


def log(*rows: str, mode: str = "") -> str:
    settings = f"INFO 11-20 x.py:1] - Mode: {mode}\n- Capture sizes: [1, 2, 64]\n" if mode else ""
    return settings + TABLE + "".join(f"INFO 11-20 [x.py:12] {row}\n" for row in rows)


def test_a_log_with_two_tables(read: Any) -> None:
    traffic = read(Path(__file__).parents[1] / "data" / "vllm.log")
    assert dict(traffic.histogram) == {
        StepShape(1, 1, True): 40,
        StepShape(3, 3, True): 20,
        StepShape(29, 29, False): 2,
        StepShape(40, 40, True): 3,
        StepShape(415, 256, False): 1,
    }
    assert traffic.source == "vllm.log: vLLM log"
    assert "2 tables were added up" in traffic.notes[0]
    assert "tells uniform decode from mixed batches for 62 steps" in traffic.notes[1]
    assert traffic.notes[2].startswith("uniform decode was guessed for 4 steps with 535 tokens")
    assert traffic.notes[2].endswith("; 3 of these steps do")


@pytest.mark.parametrize(
    ("mode", "uniform"),
    [
        ("FULL_AND_PIECEWISE", {"FULL": True, "PIECEWISE": False, "NONE": False}),
        ("FULL_DECODE_ONLY", {"FULL": True, "NONE": False}),
        ("CUDAGraphMode.FULL_DECODE_ONLY", {"CUDAGraphMode.FULL": True, "NONE": False}),
        ("FULL", {"FULL": True, "NONE": True}),
        ("PIECEWISE", {"PIECEWISE": True, "NONE": True}),
        ("SOMETHING_NEW", {"FULL": True}),
        ("", {"FULL": True, "PIECEWISE": True}),
    ],
)
def test_uniform_is_told_by_the_mode_or_guessed(written: Any, mode: str, uniform: dict[str, bool]) -> None:
    for ran_as, expected in uniform.items():
        traffic = written(log(f"| 9 | 9 | 0 | {ran_as} | 5 |", mode=mode))
        assert dict(traffic.histogram) == {StepShape(9, 9, expected): 5}
        told = mode.endswith(("ONLY", "AND_PIECEWISE"))
        assert any("the runtime mode tells" in note for note in traffic.notes) == told
        assert any("guessed for 5 steps with 45 tokens" in note for note in traffic.notes) != told


def test_above_the_largest_capture_size_the_mode_tells_nothing(written: Any) -> None:
    rows = ("| 64 | 64 | 0 | PIECEWISE | 1 |", "| 65 | 65 | 0 | NONE | 1 |", "| 257 | 257 | 0 | NONE | 1 |")
    traffic = written(log(*rows, mode="FULL_AND_PIECEWISE"))
    assert [shape.uniform for shape, _ in traffic.histogram] == [False, True, False]


def test_a_query_length_that_is_not_the_servers_is_noted(written: Any) -> None:
    text = log("| 9 | 9 | 0 | FULL | 5 |", "| 8 | 8 | 0 | FULL | 1 |", mode="FULL_DECODE_ONLY")
    traffic = written(text, **SPECULATIVE)
    assert dict(traffic.histogram) == {StepShape(8, 4, True): 1, StepShape(9, 9, False): 5}
    assert any(note.startswith("5 steps ran as uniform decode with a number of tokens") for note in traffic.notes)


@pytest.mark.parametrize(
    "prefix", ["", "\x1b[0;36m(EngineCore pid=1)\x1b[0;0m INFO 1 [a.py:1] ", "2025-11-20 | INFO | a:1 - "]
)
def test_text_before_a_row_does_not_matter(written: Any, prefix: str) -> None:
    lines = (*TABLE.splitlines(), "| 12 | 16 | 4 | PIECEWISE | 7 |", "other | 5 things")
    text = "".join(f"{prefix}{line}\r\n" for line in lines)
    assert dict(written(text).histogram) == {StepShape(12, 12, True): 7}


@pytest.mark.parametrize(
    ("text", "line", "message", "remedy"),
    [
        ("INFO 1 started\nINFO done\n", None, "no table of CUDA graph statistics", "--cudagraph-metrics"),
        (TABLE, None, "no batch with a count above 0", "Give traffic with a batch"),
        (log("| 1 | 1 | 0 | FULL |"), 3, "4 cells where the table has 5 columns", "cut off"),
        (log("| 1 | 1 | 0 | FULL | 3"), 3, "5 cells where the table has 5 columns", "cut off"),
        (log("| 1"), 3, "1 cells where", "cut off"),
        (log("| 1 | 1 | 0 | FULL | 3 |", "| 1 | 1 | 0 | FULL | -3 |"), 4, "Count is '-3'", "Correct"),
        (log("| x | 1 | 0 | FULL | 3 |"), 3, "Unpadded Tokens is 'x'", "Correct"),
        (log("| 1 | 1 | 0 | FULL_DECODE_ONLY | 3 |"), 3, "not one of the runtime modes NONE", "Correct"),
    ],
)
def test_bad_logs(refused: Any, text: str, line: int | None, message: str, remedy: str) -> None:
    refused(text, line, message, remedy)
