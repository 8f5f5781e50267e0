"""What a replan changed, as a value that prints."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict
from rich.console import Group
from rich.text import Text

from cgplan.planning.difference import PlanDifference
from cgplan.planning.plan import Key, Lane
from cgplan.reports.layout import TEXT_WIDTH, facts, plain_text
from cgplan.reports.plan_tables import render_difference
from cgplan.reports.records import FailedKey
from cgplan.reports.units import format_bytes, format_seconds

Way = Literal["proposed", "exchanged", "new generation", "new buffers"]
_WAYS: dict[Way, str] = {
    "proposed": "proposed only: nothing was captured",
    "exchanged": "exchanged inside the pools that were there",
    "new generation": "all captured anew into new pools, because the new graphs need a larger or much smaller one",
    "new buffers": "all captured anew into new pools and static buffers, because the largest size grew",
}


class ReplanReport(BaseModel):
    """What a replan changed.

    Attributes:
        difference: From the plan that was captured to the one that traffic deserves now.
        way: How the graphs were exchanged.
        captured: Keys that have a graph now and had none before, in capture order.
        evicted: Keys that had a graph and have none now.
        recaptured: How many of those that stay were captured again.
        failed: Keys of the new plan that have no graph, with the reason; and those that failed before, which the plan
            does without: ``difference.failed`` has them by lane.
        pool_bytes: All pools before and after, in bytes.
        seconds: Planning, measuring and capturing together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["replan"] = "replan"
    difference: PlanDifference
    way: Way
    captured: tuple[Key, ...] = ()
    evicted: tuple[Key, ...] = ()
    recaptured: int = 0
    failed: tuple[FailedKey, ...] = ()
    pool_bytes: tuple[int, int]
    seconds: float

    def __str__(self) -> str:
        has_new = self.captured or self.recaptured or self.way in ("proposed", "exchanged")
        rows = [("graphs", _WAYS[self.way] if has_new else "all given up with their pools, and none captured")]
        if self.way != "proposed":
            again = f", {self.recaptured} captured again" if self.recaptured else ""
            rows.append(("keys", f"{len(self.captured)} captured, {len(self.evicted)} evicted{again}"))
        told = {(part.lane, size) for part in self.difference.failed for size in part.sizes}
        for key in self.failed:
            descriptor = key.descriptor
            if (Lane.of(key.mode, descriptor), descriptor.num_tokens) not in told:
                rows.append(("failed", f"{key.mode} {descriptor}: {key.text}"))
        before, after = map(format_bytes, self.pool_bytes)
        rows += [("pools", f"{before} before, {after} after"), ("time", format_seconds(self.seconds))]
        table = render_difference(self.difference, "captured", "wanted")
        return plain_text(Group(table, Text(), facts("Replan", rows)), TEXT_WIDTH)
