"""Traffic from a log of vLLM: the table of CUDA graph statistics that ``--cudagraph-metrics`` writes into it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from cgplan.errors import TrafficError
from cgplan.modes import CUDAGraphMode
from cgplan.planning import Plan
from cgplan.planning.costs import Record
from cgplan.traffic.histogram import MOST_BATCHED_TOKENS, StepCounts, Traffic
from cgplan.traffic.rows import Form, RuntimeMode, Whole

COLUMNS = ("Unpadded Tokens", "Padded Tokens", "Num Paddings", "Runtime Mode", "Count")
_HEADER = re.compile(r"\|\s*" + r"\s*\|\s*".join(COLUMNS) + r"\s*\|")
# The logger writes in front of a row, too. A row has 5 cells; one that was cut off begins with a number.
_ROW = re.compile(r"\|((?:[^|]*\|){5}|\s*-?\d+\s*(?:\|.*)?)$")
_MODE = re.compile(r"- Mode: *(?:CUDAGraphMode\.)?(\w+)\s*$")
_SIZES = re.compile(r"- Capture sizes: *\[([\d, ]*)\]\s*$")


class _Row(Record):
    num_tokens: Annotated[int, Field(alias="Unpadded Tokens", ge=1, le=MOST_BATCHED_TOKENS)]
    padded: Whole = Field(alias="Padded Tokens")
    paddings: Whole = Field(alias="Num Paddings")
    ran_as: RuntimeMode = Field(alias="Runtime Mode")
    count: Whole = Field(alias="Count")


_TABLE = Form("a table of CUDA graph statistics", _Row)


def has_table(text: str) -> bool:
    """Whether the text holds such a table."""
    return _HEADER.search(text) is not None


def log_traffic(text: str, path: Path, plan: Plan) -> Traffic:
    """Traffic from all tables of a log.

    vLLM empties its counts after each table (``CUDAGraphLogging.log`` in vllm/compilation/cuda_graph.py), so the
    tables are added up. A row does not say whether its batch was uniform decode. Where the server's mode keeps FULL
    graphs for uniform decode (FULL_DECODE_ONLY, FULL_AND_PIECEWISE), batches that ran FULL were uniform, and others
    were not, up to the largest capture size. Elsewhere a batch is taken to be uniform if it could be.

    Args:
        text, path: The log; ``path`` names it in messages.
        plan: Informs the guesses.

    Raises:
        TrafficError: a row is cut off, or holds something else than numbers and a runtime mode.
    """
    steps = StepCounts(plan)
    mode: CUDAGraphMode | None = None  # of the server, as its largest size; None where the log does not tell it
    tables = largest = told = odd = 0
    for number, line in enumerate(map(str.rstrip, text.split("\n")), start=1):
        if _HEADER.search(line):
            tables += 1
        elif found := _MODE.search(line):
            mode = CUDAGraphMode.__members__.get(found[1])
        elif found := _SIZES.search(line):
            largest = max(map(int, re.findall(r"\d+", found[1])), default=0)
        elif tables and (found := _ROW.search(line)) and found[1].strip("|- "):  # not the rule below the header
            row, uniform = _row(found[1], f"{path}:{number}"), None
            if mode is not None and mode.separate_routine():
                if row.ran_as is CUDAGraphMode.FULL:
                    uniform = row.num_tokens % plan.query_len == 0
                    odd += 0 if uniform else row.count
                elif row.num_tokens <= largest:
                    uniform = False
            told += row.count * (uniform is not None)
            steps.add(row.num_tokens, row.count, uniform=uniform)
    notes = [f"{tables} tables were added up; vLLM empties its counts after each"] if tables > 1 else []
    if told:
        notes.append(f"the runtime mode tells uniform decode from mixed batches for {told} steps")
    if odd:
        notes.append(
            f"{odd} steps ran as uniform decode with a number of tokens that is no multiple of the query length "
            f"{plan.query_len}, and count as mixed; is speculative.num_speculative_tokens that of the server?"
        )
    return Traffic.of(steps.counts, f"{path.name}: vLLM log", [*notes, *steps.notes()])


def _row(text: str, where: str) -> _Row:
    cells = [cell.strip() for cell in text.removesuffix("|").split("|")]
    if len(cells) != len(COLUMNS) or not text.endswith("|"):
        raise TrafficError(
            f"{where}: {len(cells)} cells where the table has {len(COLUMNS)} columns",
            remedy="The line may have been cut off, or two processes wrote into it; correct or remove it.",
        )
    return _TABLE.read(dict(zip(COLUMNS, cells, strict=True)), where)
