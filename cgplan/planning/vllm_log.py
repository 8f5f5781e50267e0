"""Traffic from a log of vLLM: the table of CUDA graph statistics that ``--cudagraph-metrics`` writes into it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cgplan.config import Config
from cgplan.errors import ConfigError, TrafficError
from cgplan.modes import RUNTIME_MODES, CUDAGraphMode
from cgplan.planning.traffic import Batch, Traffic
from cgplan.planning.traffic_rows import GUESSES, MOST_STEPS, MOST_TOKENS, likely_batch, whole

COLUMNS = ("Unpadded Tokens", "Padded Tokens", "Num Paddings", "Runtime Mode", "Count")
_HEADER = re.compile(r"\|\s*" + r"\s*\|\s*".join(COLUMNS) + r"\s*\|")
# What stands before a row on its line is the logger's. A row has 5 cells; one that was cut off begins with a number.
_ROW = re.compile(r"\|((?:[^|]*\|){5}|\s*-?\d+\s*(?:\|.*)?)$")
_MODE = re.compile(r"- Mode: *(?:CUDAGraphMode\.)?(\w+)\s*$")
_SIZES = re.compile(r"- Capture sizes: *\[([\d, ]*)\]\s*$")


@dataclass(frozen=True, slots=True)
class _Steps:
    """A row of a table.

    Attributes:
        num_tokens, count: Tokens of the batch before padding, and how many steps had it.
        ran_as: Runtime mode that vLLM chose.
        mode: cudagraph_mode of the server, None where the log does not say it.
        largest: Its largest capture size, 0 where the log does not say it.
    """

    num_tokens: int
    count: int
    ran_as: CUDAGraphMode
    mode: CUDAGraphMode | None
    largest: int


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
    told = guessed = odd = 0
    for steps in _rows(text, path):
        known = _was_uniform(steps)
        if known and steps.num_tokens % config.query_len:
            known, odd = False, odd + steps.count
        told, guessed = told + steps.count * (known is not None), guessed + steps.count * (known is None)
        batch = likely_batch(steps.num_tokens, config, uniform=known)
        counts[batch] = counts.get(batch, 0) + steps.count
    number = len(_HEADER.findall(text))
    notes = [f"{number} tables were added up; vLLM empties its counts after each"] if number > 1 else []
    if told:
        notes.append(f"the runtime mode tells uniform decode from mixed batches for {told} steps")
    if guessed:
        notes.append(f"of {guessed} steps, {GUESSES['uniform']}")
    if odd:
        notes.append(
            f"{odd} steps ran as uniform decode with a number of tokens that is no multiple of the query length "
            f"{config.query_len}, and count as mixed; is speculative.num_speculative_tokens that of the server?"
        )
    return Traffic.of(counts, f"{path.name}: vLLM log", [*notes, GUESSES["num_reqs"], GUESSES["num_active_loras"]])


def _was_uniform(steps: _Steps) -> bool | None:
    """What the runtime mode tells, None where it tells nothing."""
    if steps.mode is None or not steps.mode.separate_routine():
        return None
    if steps.ran_as is CUDAGraphMode.FULL:
        return True
    return False if steps.num_tokens <= steps.largest else None


def _rows(text: str, path: Path) -> Iterator[_Steps]:
    mode, largest, inside = None, 0, False
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.rstrip()
        if _HEADER.search(line):
            inside = True
        elif found := _MODE.search(line):
            mode = _mode_or_none(found[1])
        elif found := _SIZES.search(line):
            largest = max((int(size) for size in found[1].split(",") if size.strip()), default=0)
        elif inside and (found := _ROW.search(line)) and found[1].strip("|- "):  # not the rule below the header
            yield _steps(found[1], f"{path}:{number}", mode, largest)


def _steps(text: str, where: str, mode: CUDAGraphMode | None, largest: int) -> _Steps:
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
    return _Steps(num_tokens, whole(row, "Count", where, high=MOST_STEPS), ran_as, mode, largest)


def _mode_or_none(name: str) -> CUDAGraphMode | None:
    try:
        return CUDAGraphMode.parse(name)
    except ConfigError:
        return None
