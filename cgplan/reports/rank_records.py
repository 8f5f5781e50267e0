"""What a capture came to on each of several ranks."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from cgplan.reports.layout import filled
from cgplan.reports.units import format_bytes, format_seconds


class RankRecord(BaseModel):
    """One rank of a capture.

    Attributes:
        rank, host, device: Which, and where: the GPU by its unique number, or ``cpu``.
        all_reduce: Who sums over the ranks: ``custom``, ``nccl`` (gloo on the CPU) or ``symm_mem``.
        rows: Rows of the pointer table: captured all-reduces that read their peers' graph buffers.
        buffers: Distinct graph buffers that were registered.
        bases: Allocations that they lie in; one handle was handed out for each.
        mapped_bytes: Bytes of peers' allocations that were mapped into this process for them.
        registration_seconds: From the end of the last capture until replays were allowed.
        pool_bytes, static_bytes, total_bytes: As in CaptureReport.
        session_seconds: The whole session.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    host: str
    device: str
    all_reduce: str
    rows: int = 0
    buffers: int = 0
    bases: int = 0
    mapped_bytes: int = 0
    registration_seconds: float = 0.0
    pool_bytes: int
    static_bytes: int
    total_bytes: int
    session_seconds: float


def rank_table(ranks: Sequence[RankRecord]) -> Table:
    """One row a rank, and one for all: sums of bytes and counts, the longest of the times."""
    rows = [_row(str(record.rank), [record]) for record in ranks]
    return filled([*rows, _row("all", ranks)], left=("rank", "all-reduce"))


def _row(name: str, records: Sequence[RankRecord]) -> dict[str, object]:
    return {
        "rank": name,
        "all-reduce": ", ".join(dict.fromkeys(r.all_reduce for r in records)),
        "rows": sum(r.rows for r in records),
        "buffers": sum(r.buffers for r in records),
        "bases": sum(r.bases for r in records),
        "mapped": format_bytes(sum(r.mapped_bytes for r in records)),
        "registration": format_seconds(max(r.registration_seconds for r in records)),
        "pool": format_bytes(sum(r.pool_bytes for r in records)),
        "memory": format_bytes(sum(r.total_bytes for r in records)),
        "session": format_seconds(max(r.session_seconds for r in records)),
    }


__all__ = ["RankRecord", "rank_table"]
