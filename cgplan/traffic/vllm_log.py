"""Traffic from a log of vLLM: the table of CUDA graph statistics that ``--cudagraph-metrics`` writes into it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from cgplan.errors import ConfigError, TrafficError
from cgplan.modes import CUDAGraphMode
from cgplan.planning import Plan
from cgplan.traffic.histogram import StepCounts, Traffic
from cgplan.traffic.rows import MOST_STEPS, MOST_TOKENS, Form, Row, RuntimeMode, whole
from cgplan.units import listed

COLUMNS = ("Unpadded Tokens", "Padded Tokens", "Num Paddings", "Runtime Mode", "Count")
MOST_SIZES = 8  # that a note lists
_HEADER = re.compile(r"\|\s*" + r"\s*\|\s*".join(COLUMNS) + r"\s*\|")
# The logger writes in front of a row, too. A row has 5 cells; one that was cut off begins with a number.
_ROW = re.compile(r"\|((?:[^|]*\|){5}|\s*-?\d+\s*(?:\|.*)?)$")
_MODE = re.compile(r"- Mode: *(?:CUDAGraphMode\.)?(\w+)\s*$")
_SIZES = re.compile(r"- Capture sizes: *\[([\d, ]*)\]\s*$")


class _Row(Row):
    num_tokens: Annotated[int, whole(1, MOST_TOKENS)] = Field(alias="Unpadded Tokens")
    padded: Annotated[int, whole()] = Field(alias="Padded Tokens")
    paddings: Annotated[int, whole()] = Field(alias="Num Paddings")
    ran_as: RuntimeMode = Field(alias="Runtime Mode")
    count: Annotated[int, whole(high=MOST_STEPS)] = Field(alias="Count")


_TABLE = Form("a table of CUDA graph statistics", _Row)


class _Server(NamedTuple):
    """cudagraph_mode and capture sizes of the server; None and empty where the log does not tell them."""

    mode: CUDAGraphMode | None = None
    sizes: tuple[int, ...] = ()


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
        plan: Informs the guesses, and notes say where the server's mode and sizes differ from it.

    Raises:
        TrafficError: a row is cut off, or holds something else than numbers and a runtime mode.
    """
    steps, told, odd = StepCounts(plan), 0, 0
    rows = list(_rows(text, path))
    for row, server in rows:
        uniform = None
        if server.mode is not None and server.mode.separate_routine():
            if row.ran_as is CUDAGraphMode.FULL:
                uniform = True
            elif row.num_tokens <= max(server.sizes, default=0):
                uniform = False
        if uniform and row.num_tokens % plan.query_len:
            uniform, odd = False, odd + row.count
        told += row.count * (uniform is not None)
        steps.add(row.num_tokens, row.count, uniform=uniform)
    number = len(_HEADER.findall(text))
    notes = [f"{number} tables were added up; vLLM empties its counts after each"] if number > 1 else []
    if told:
        notes.append(f"the runtime mode tells uniform decode from mixed batches for {told} steps")
    if odd:
        notes.append(
            f"{odd} steps ran as uniform decode with a number of tokens that is no multiple of the query length "
            f"{plan.query_len}, and count as mixed; is speculative.num_speculative_tokens that of the server?"
        )
    notes += [*steps.notes(), *_of_another_server(rows, plan)]
    return Traffic.of(steps.counts, f"{path.name}: vLLM log", notes)


def _rows(text: str, path: Path) -> Iterator[tuple[_Row, _Server]]:
    server, inside = _Server(), False
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.rstrip()
        if _HEADER.search(line):
            inside = True
        elif found := _MODE.search(line):
            try:
                server = server._replace(mode=CUDAGraphMode.parse(found[1]))
            except ConfigError:
                server = server._replace(mode=None)
        elif found := _SIZES.search(line):
            server = server._replace(sizes=tuple(sorted({int(size) for size in found[1].split(",") if size.strip()})))
        elif inside and (found := _ROW.search(line)) and found[1].strip("|- "):  # not the rule below the header
            yield _row(found[1], f"{path}:{number}"), server


def _row(text: str, where: str) -> _Row:
    cells = [cell.strip() for cell in text.removesuffix("|").split("|")]
    if len(cells) != len(COLUMNS) or not text.endswith("|"):
        raise TrafficError(
            f"{where}: {len(cells)} cells where the table has {len(COLUMNS)} columns",
            remedy="The line may have been cut off, or two processes wrote into it; correct or remove it.",
        )
    row = _TABLE.read(dict(zip(COLUMNS, cells, strict=True)), where)
    if row.padded - row.num_tokens != row.paddings:
        raise TrafficError(
            f"{where}: {row.padded} padded tokens are not {row.num_tokens} and {row.paddings} paddings",
            remedy="The line is damaged; correct or remove it.",
        )
    return row


def _of_another_server(rows: Sequence[tuple[_Row, _Server]], plan: Plan) -> Iterator[str]:
    """Notes on settings of the server that differ from the plan's; the tokens before padding do not depend on them."""
    servers = dict.fromkeys(server for _, server in rows)
    for mode in dict.fromkeys(server.mode for server in servers):
        if mode not in (None, plan.mode):
            yield f"the log's server ran with cudagraph_mode {mode}, the configuration comes to {plan.mode}"
    ladder = plan.capture_sizes
    if not ladder:
        return
    for sizes in dict.fromkeys(server.sizes for server in servers if server.sizes):
        parts = {"not here": sorted({*sizes} - {*ladder}), "only here": sorted({*ladder} - {*sizes})}
        if any(parts.values()):
            differing = "; ".join(f"{listed(found, MOST_SIZES)} {where}" for where, found in parts.items() if found)
            yield (
                f"the log's server captured {len(sizes)} sizes up to {max(sizes)}, the configuration without traffic "
                f"{len(ladder)} up to {ladder[-1]}: {differing}"
            )
    padded = [row for row, server in rows if not server.sizes and row.ran_as is not CUDAGraphMode.NONE]
    others = sorted({row.padded for row in padded} - {*ladder})
    if others:
        yield (
            f"{sum(row.count for row in padded if row.padded in others):,} steps of the log were padded to sizes that "
            f"the configuration does not have without traffic: {listed(others, MOST_SIZES)}"
        )
