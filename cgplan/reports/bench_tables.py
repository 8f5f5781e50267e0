"""How cgplan beside its peers is shown."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from cgplan.reports.layout import describe_sizes, facts, filled
from cgplan.reports.records import OURS, PeerRecord, PeersRecord, Timing, WayRecord
from cgplan.units import format_bytes, format_microseconds, format_ratio, format_seconds


def peers_tables(peers: PeersRecord, backend: str) -> RenderableType:
    """Two tables: what each way needs to be ready, and times by size with their ratios to cgplan's.

    Args:
        peers: What was measured.
        backend: Where, by its name.
    """
    lost = "device memory" if backend == "cuda" else f"memory of pools on {backend}"
    own = "failed" if peers.capture_seconds is None else f"{format_seconds(peers.capture_seconds)}, {peers.keys} keys"
    head = facts(
        "Against peers",
        [
            ("order", f"random, seed {peers.seed}; {peers.rounds} rounds, {peers.repeats} calls of each way and size"),
            ("ready", f"until all sizes had their first call, each way alone; memory: {lost} that was gone then"),
            ("capture", f"{OURS}'s own: {own}; its peers made one graph for each size below"),
            ("times", "medians; device: calls that follow one another; latency: from an idle device; host: until the "
             "call returned"),
            ("x", f"how many times {OURS}'s"),
            ("diff", "largest difference from the model's own code, after all calls; from the same inputs, state and "
             "seed"),
        ],
    )  # fmt: skip
    parts: list[RenderableType] = [head, Text(), filled([_way_row(way) for way in peers.ways], left=("way", "note"))]
    if peers.records:
        parts += [Text(), filled([_row(peers, record) for record in peers.records], left=("way",), gap=1)]
    if reasons := _not_comparable(peers):
        parts += [Text(), facts("Not comparable", reasons)]
    return Group(*parts)


def _not_comparable(peers: PeersRecord) -> list[tuple[str, str]]:
    """Ways whose results could not be compared, sizes with the same reason together."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for record in peers.records:
        if record.not_comparable is not None:
            sizes.setdefault((record.name, record.not_comparable), []).append(record.num_tokens)
    return [(f"{name} {describe_sizes(found)}", reason) for (name, reason), found in sizes.items()]


def _way_row(way: WayRecord) -> dict[str, object]:
    note = f"failed: {way.failure}" if way.failure is not None else way.note
    return {
        "way": way.name,
        "ready in": format_seconds(way.ready_seconds),
        "memory": format_bytes(way.memory_bytes),
        "note": note or "",
    }


def _row(peers: PeersRecord, record: PeerRecord) -> dict[str, object]:
    ours = peers.of(OURS, record.num_tokens)
    return {
        "way": record.name,
        "tokens": record.num_tokens,
        "device": _short(record.device),
        "device\nx": _over(record.device, ours.device if ours else None),
        "latency": _short(record.latency),
        "latency\nx": _over(record.latency, ours.latency if ours else None),
        "host": _short(record.host),
        "host\nx": _over(record.host, ours.host if ours else None),
        "first\ncall": format_seconds(record.first_call_seconds).replace(" ", ""),
        "diff": "n/a" if record.deviation is None else f"{record.deviation:.2g}",
    }


def _short(timing: Timing) -> str:
    return format_microseconds(timing.median).replace(" ", "")


def _over(timing: Timing, ours: Timing | None) -> str:
    return format_ratio(None if ours is None else timing.median / ours.median)
