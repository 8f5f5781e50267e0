"""Traffic from a log of vLLM: the table of CUDA graph statistics that ``--cudagraph-metrics`` writes into it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cgplan.config import Config
from cgplan.errors import ConfigError, PlanError, TrafficError
from cgplan.modes import RUNTIME_MODES, CUDAGraphMode
from cgplan.planning.build import build_plan
from cgplan.traffic.histogram import Batch, Traffic
from cgplan.traffic.rows import GUESSES, MOST_STEPS, MOST_TOKENS, Guessed, likely_batch, whole

MOST_SIZES = 8  # that a note lists
COLUMNS = ("Unpadded Tokens", "Padded Tokens", "Num Paddings", "Runtime Mode", "Count")
_HEADER = re.compile(r"\|\s*" + r"\s*\|\s*".join(COLUMNS) + r"\s*\|")
# What stands before a row on its line is the logger's. A row has 5 cells; one that was cut off begins with a number.
_ROW = re.compile(r"\|((?:[^|]*\|){5}|\s*-?\d+\s*(?:\|.*)?)$")
_MODE = re.compile(r"- Mode: *(?:CUDAGraphMode\.)?(\w+)\s*$")
_SIZES = re.compile(r"- Capture sizes: *\[([\d, ]*)\]\s*$")


class _Server(NamedTuple):
    """What a log says of its server: cudagraph_mode, None where it does not say it; capture sizes, empty likewise."""

    mode: CUDAGraphMode | None = None
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Steps:
    """A row of a table.

    Attributes:
        num_tokens, count: Tokens of the batch before padding, and how many steps had it.
        ran_as: Runtime mode that vLLM chose.
        padded: Tokens that ran.
        server: Mode and capture sizes of the server.
    """

    num_tokens: int
    count: int
    ran_as: CUDAGraphMode
    padded: int
    server: _Server


def has_table(text: str) -> bool:
    """Whether the text holds such a table."""
    return _HEADER.search(text) is not None


def log_traffic(text: str, path: Path, config: Config) -> Traffic:
    """Traffic from all tables of a log.

    vLLM empties its counts after each table (``CUDAGraphLogging.log`` in vllm/compilation/cuda_graph.py), so the
    tables are added up. A row does not say whether its batch was uniform decode. Where the server's mode keeps FULL
    graphs for uniform decode (FULL_DECODE_ONLY, FULL_AND_PIECEWISE), what ran FULL was uniform, and what ran otherwise
    was not, up to the largest capture size. Elsewhere a batch is taken to be uniform if it could be.

    Raises:
        TrafficError: a row is cut off, or holds something else than numbers and a runtime mode.
    """
    counts: dict[Batch, float] = {}
    guessed, told, odd = Guessed(), 0, 0
    rows = list(_rows(text, path))
    for steps in rows:
        known = _was_uniform(steps)
        if known and steps.num_tokens % config.query_len:
            known, odd = False, odd + steps.count
        told += steps.count * (known is not None)
        batch = likely_batch(steps.num_tokens, config, uniform=known)
        for column in GUESSES:
            if column != "uniform" or known is None:
                guessed.add(column, batch, steps.count)
        counts[batch] = counts.get(batch, 0) + steps.count
    number = len(_HEADER.findall(text))
    notes = [f"{number} tables were added up; vLLM empties its counts after each"] if number > 1 else []
    if told:
        notes.append(f"the runtime mode tells uniform decode from mixed batches for {told} steps")
    if odd:
        notes.append(
            f"{odd} steps ran as uniform decode with a number of tokens that is no multiple of the query length "
            f"{config.query_len}, and count as mixed; is speculative.num_speculative_tokens that of the server?"
        )
    return Traffic.of(counts, f"{path.name}: vLLM log", [*notes, *guessed.notes(), *_of_another_server(rows, config)])


def _was_uniform(steps: _Steps) -> bool | None:
    """What the runtime mode tells, None where it tells nothing."""
    mode, sizes = steps.server
    if mode is None or not mode.separate_routine():
        return None
    if steps.ran_as is CUDAGraphMode.FULL:
        return True
    return False if steps.num_tokens <= max(sizes, default=0) else None


def _of_another_server(rows: Sequence[_Steps], config: Config) -> Iterator[str]:
    """What of the server's settings differs from the configuration's. The tokens before padding do not depend on it."""
    try:
        plan = build_plan(config)
    except PlanError:
        return
    servers = dict.fromkeys(steps.server for steps in rows)
    for mode in dict.fromkeys(server.mode for server in servers):
        if mode not in (None, plan.mode):
            yield f"the log's server ran with cudagraph_mode {mode}, the configuration comes to {plan.mode}"
    ladder = plan.capture_sizes
    if not ladder:
        return
    for sizes in dict.fromkeys(server.sizes for server in servers if server.sizes):
        parts = {"not here": sorted({*sizes} - {*ladder}), "only here": sorted({*ladder} - {*sizes})}
        if any(parts.values()):
            differing = "; ".join(f"{_listed(found)} {where}" for where, found in parts.items() if found)
            yield (
                f"the log's server captured {len(sizes)} sizes up to {max(sizes)}, the configuration without traffic "
                f"{len(ladder)} up to {ladder[-1]}: {differing}"
            )
    graphed = [steps for steps in rows if not steps.server.sizes and steps.ran_as is not CUDAGraphMode.NONE]
    others = sorted({steps.padded for steps in graphed} - {*ladder})
    if others:
        count = sum(steps.count for steps in graphed if steps.padded in others)
        yield (
            f"{count:,} steps of the log were padded to sizes that the configuration does not have without traffic: "
            f"{_listed(others)}"
        )


def _listed(sizes: Sequence[int]) -> str:
    shown = ", ".join(map(str, sizes[:MOST_SIZES]))
    return shown if len(sizes) <= MOST_SIZES else f"{shown} and {len(sizes) - MOST_SIZES} more"


def _rows(text: str, path: Path) -> Iterator[_Steps]:
    server, inside = _Server(), False
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.rstrip()
        if _HEADER.search(line):
            inside = True
        elif found := _MODE.search(line):
            server = server._replace(mode=_mode_or_none(found[1]))
        elif found := _SIZES.search(line):
            server = server._replace(sizes=tuple(sorted({int(size) for size in found[1].split(",") if size.strip()})))
        elif inside and (found := _ROW.search(line)) and found[1].strip("|- "):  # not the rule below the header
            yield _steps(found[1], f"{path}:{number}", server)


def _steps(text: str, where: str, server: _Server) -> _Steps:
    cells = [cell.strip() for cell in text.removesuffix("|").split("|")]
    if len(cells) != len(COLUMNS) or not text.endswith("|"):
        raise TrafficError(
            f"{where}: {len(cells)} cells where the table has {len(COLUMNS)} columns",
            remedy="The line may have been cut off, or two processes wrote into it; correct or remove it.",
        )
    row = dict(zip(COLUMNS, cells, strict=True))
    padded = whole(row, "Padded Tokens", where)
    num_tokens = whole(row, "Unpadded Tokens", where, low=1, high=MOST_TOKENS)
    if padded - num_tokens != whole(row, "Num Paddings", where):
        raise TrafficError(
            f"{where}: {padded} padded tokens are not {num_tokens} and {row['Num Paddings']} paddings",
            remedy="The line is damaged; correct or remove it.",
        )
    ran_as = _mode_or_none(row["Runtime Mode"].rpartition(".")[2])
    if ran_as not in RUNTIME_MODES:
        raise TrafficError(
            f"{where}: unknown runtime mode {row['Runtime Mode']!r}",
            remedy=f"A step runs as one of {', '.join(map(str, RUNTIME_MODES))}.",
        )
    return _Steps(num_tokens, whole(row, "Count", where, high=MOST_STEPS), ran_as, padded, server)


def _mode_or_none(name: str) -> CUDAGraphMode | None:
    try:
        return CUDAGraphMode.parse(name)
    except ConfigError:
        return None
