"""Differences of two plans, and of a saved plan and the configuration that it is to be captured
with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from cgplan.config import Config
from cgplan.config.schema import BudgetConfig
from cgplan.errors import PlanMismatchError
from cgplan.modes import CUDAGraphMode
from cgplan.planning.costs import Record
from cgplan.planning.plan import (
    Lane,
    LaneRecord,
    LeftOut,
    Machine,
    Plan,
    budget_of,
    capture_config,
    config_hash,
)

# Settings that a plan decides itself: its keys are captured whatever the configuration says of them
# now.
DECIDED_BY_THE_PLAN = (
    "compilation.cudagraph_mode",
    "compilation.cudagraph_capture_sizes",
    "compilation.max_cudagraph_capture_size",
)
MOST_NAMED = 4  # settings in a sentence
_NO_LIMIT: Mapping[str, Any] = dict.fromkeys(BudgetConfig.model_fields)
_COMPARED = {
    "traffic_source": "the expected steps are of different traffic: {} before, {} after",
    "times_source": "step times are from {} before, from {} after",
    "rule": "the number of graphs follows from {} before, from {} after",
}


class FieldChange(Record):
    """A setting that differs: its dotted name and both values as JSON has them, None where it is
    absent.
    """

    name: str
    old: Any
    new: Any

    def said(self, form: str) -> str:
        """``form`` with ``{name}``, ``{old}`` and ``{new}`` as JSON writes them, text without
        quotes.
        """
        old, new = (
            "absent" if value is None else value if isinstance(value, str) else json.dumps(value)
            for value in (self.old, self.new)
        )
        return form.format(name=self.name, old=old, new=new)


class LaneChange(LaneRecord):
    """Capture sizes that a lane gains, loses and keeps, in tokens, ascending."""

    added: tuple[int, ...]
    removed: tuple[int, ...]
    kept: tuple[int, ...]


class Figure(Record):
    """A figure of both plans; None where a plan has none."""

    old: float | None
    new: float | None

    @property
    def change(self) -> float | None:
        return None if self.old is None or self.new is None else self.new - self.old


class PlanDifference(Record):
    """The changes from one plan to another.

    Attributes:
        memory: Predicted, in bytes; ``seconds`` of start-up likewise.
        expected_us: Expected microseconds of a step over the traffic.
        failed: Keys that could not be captured and that the new plan leaves out, with their errors.
        settings: Other differences: the resolved mode, the configurations, the budgets, the
            machines.
        notes: Why figures may not be comparable.
    """

    kind: Literal["plan_difference"] = "plan_difference"
    lanes: tuple[LaneChange, ...]
    graphs: Figure
    memory: Figure
    seconds: Figure
    expected_us: Figure
    settings: tuple[FieldChange, ...]
    notes: tuple[str, ...]
    failed: tuple[LeftOut, ...] = ()

    @property
    def changed_lanes(self) -> tuple[LaneChange, ...]:
        return tuple(lane for lane in self.lanes if lane.added or lane.removed)


def compare(old: Plan, new: Plan) -> PlanDifference:
    """The changes that capturing ``new`` instead of ``old`` brings."""
    before, after = old.lanes(), new.lanes()

    def change(lane: Lane) -> LaneChange:
        had, has = before.get(lane, ()), after.get(lane, ())
        added, removed = (
            tuple(n for n in one if n not in other) for one, other in ((has, had), (had, has))
        )
        return LaneChange(
            **lane._asdict(), added=added, removed=removed, kept=tuple(n for n in has if n in had)
        )

    def figure(read: Callable[[Plan], float | None]) -> Figure:
        return Figure(old=read(old), new=read(new))

    return PlanDifference(
        lanes=tuple(
            map(change, sorted({*before, *after}, key=lambda lane: (lane.mode.name, *lane[1:])))
        ),
        graphs=figure(lambda plan: len(plan.keys)),
        memory=figure(lambda plan: None if plan.predicted is None else plan.predicted.total_bytes),
        seconds=figure(lambda plan: None if plan.predicted is None else plan.predicted.seconds),
        expected_us=figure(lambda plan: plan.expected_us),
        settings=tuple(_settings(old, new)),
        notes=tuple(_notes(old, new)),
        failed=tuple(
            LeftOut.model_validate(part) for part in (new.evidence or {}).get("failed", ())
        ),
    )


def mismatches(
    plan: Plan, config: Config, machine: Machine | None = None
) -> tuple[FieldChange, ...]:
    """Settings of a saved plan (old) and of the present configuration (new) that differ.

    Settings that the plan decides itself do not count, nor does the device, which does not change a
    plan. The present machine is compared where the plan's figures were measured on one.
    """
    ignored = (*DECIDED_BY_THE_PLAN, "device")
    found = [c for c in _changes(plan.config, capture_config(config)) if c.name not in ignored]
    if plan.machine is not None and machine is not None:
        found += machine_changes(plan.machine, machine)
    return tuple(found)


def unused_settings(plan: Plan, config: Config) -> tuple[FieldChange, ...]:
    """Settings of the configuration (new) that the plan decides otherwise than the one it was made
    from (old).
    """
    changes = _changes(plan.config, capture_config(config))
    return tuple(change for change in changes if change.name in DECIDED_BY_THE_PLAN)


def fitted(
    plan: Plan,
    config: Config,
    machine: Machine | None = None,
    *,
    force: bool = False,
    file: str | None = None,
) -> Plan:
    """The plan with its keys as they are, ready to be captured with a configuration.

    With ``force`` a plan that does not match gets a warning instead of a PlanMismatchError that
    names each field; ``file`` is the one that it was read from, for messages.
    """
    wrong = mismatches(plan, config, machine)
    # the plan decides which graphs, not if
    if plan.keys and config.compilation.cudagraph_mode is CUDAGraphMode.NONE:
        wrong += (FieldChange(name="compilation.cudagraph_mode", old=str(plan.mode), new="NONE"),)
    described = [change.said("{name}: {old} in the plan, {new} now") for change in wrong]
    if wrong and not force:
        raise PlanMismatchError(
            "the plan was made for something else" + "".join(f"\n  - {line}" for line in described),
            remedy="Make the plan again for what is there now, or capture it as it is with "
            "--force.",
        )
    warning = (
        (f"the plan was made for something else and was forced: {'; '.join(described)}",)
        if wrong
        else ()
    )
    present = {
        "config": capture_config(config),
        "config_hash": config_hash(config),
        "budget": budget_of(config),
    }
    return plan.model_copy(update={**present, "file": file, "warnings": (*plan.warnings, *warning)})


def machine_changes(old: Machine, new: Machine) -> list[FieldChange]:
    return _changes(old.model_dump(), new.model_dump())


def named(changes: Sequence[FieldChange]) -> str:
    """Settings that differ, the first few of them, as
    ``scheduler.max_num_seqs was 256, is 64 here``.
    """
    listed = [change.said("{name} was {old}, is {new} here") for change in changes[:MOST_NAMED]]
    return "; ".join(
        [*listed, *([f"and {len(changes) - MOST_NAMED} more"] if len(changes) > MOST_NAMED else [])]
    )


def _settings(old: Plan, new: Plan) -> Iterator[FieldChange]:
    yield from _changes({"mode": str(old.mode)}, {"mode": str(new.mode)})
    yield from (c for c in _changes(old.config, new.config) if c.name not in DECIDED_BY_THE_PLAN)
    yield from _changes(
        {"budget": {**_NO_LIMIT, **old.budget}}, {"budget": {**_NO_LIMIT, **new.budget}}
    )
    if old.machine is not None and new.machine is not None:
        yield from machine_changes(old.machine, new.machine)


def _notes(old: Plan, new: Plan) -> Iterator[str]:
    if (
        old.predicted is not None
        and new.predicted is not None
        and old.predicted.source != new.predicted.source
    ):
        yield (
            f"memory and start-up have other sources: {old.predicted.source} before, "
            f"{new.predicted.source} after"
        )
    for name, words in _COMPARED.items():
        given = [(plan.evidence or {}).get(name) for plan in (old, new)]
        if None not in given and given[0] != given[1]:
            yield words.format(*given)
    for plan, other, which in ((old, new, "first"), (new, old, "second")):
        if plan.expected_us is None and other.expected_us is not None:
            yield f"the {which} plan was not made for traffic, so that it expects no step time"
        if plan.predicted is None and other.predicted is not None:
            yield (
                f"the {which} plan was made without --costs, so that its memory and start-up "
                "are not known"
            )


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[FieldChange]:
    """Leaves that differ, in the order of ``new``."""
    before, after = dict(leaves(old)), dict(leaves(new))
    names = [name for name in {**after, **before} if before.get(name) != after.get(name)]
    return [FieldChange(name=name, old=before.get(name), new=after.get(name)) for name in names]


def leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a nested mapping."""
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner
