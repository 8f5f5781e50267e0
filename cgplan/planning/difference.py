"""Differences of two plans, and of a saved plan and a configuration."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from cgplan.config import Config
from cgplan.config.schema import Record
from cgplan.errors import PlanMismatchError
from cgplan.modes import CUDAGraphMode
from cgplan.planning.plan import (
    RULES,
    SIMULATED,
    LaneRecord,
    LeftOut,
    Machine,
    Plan,
    budget_of,
    build_plan,
    capture_fields,
)

# Settings that a plan decides, whatever the configuration says.
DECIDED_BY_THE_PLAN = (
    "compilation.cudagraph_mode",
    "compilation.cudagraph_capture_sizes",
    "compilation.max_cudagraph_capture_size",
)
# How names of settings begin that decide how long a step takes, beside the inputs.
_TIMED = (
    "model.target",
    "model.kwargs",
    "compilation.all_reduce",
    "compilation.compile",
    "compilation.piecewise",
    "compilation.splitting",
    "lora",
    "metadata",
)
MOST_NAMED = 4  # settings in a sentence
_COMPARED = {
    "traffic_source": "the expected steps are of different traffic: {} before, {} after",
    "traffic_weight": "the expected steps count {:,.0f} batches before, {:,.0f} after",
    "times_source": "step times are from {} before, from {} after",
}


class FieldChange(Record):
    """A setting that differs: its dotted name and both values in JSON; None: absent."""

    name: str
    old: Any
    new: Any

    def said(self, form: str) -> str:
        """``form`` with ``{name}``, ``{old}`` and ``{new}`` in JSON, text without quotes."""
        return form.format(name=self.name, old=_shown(self.old), new=_shown(self.new))


def _shown(value: Any) -> str:
    if value is None:
        return "absent"
    return value if isinstance(value, str) else json.dumps(value)


class LaneChange(LaneRecord):
    """Capture sizes in tokens, ascending."""

    added: tuple[int, ...]
    removed: tuple[int, ...]
    kept: tuple[int, ...]


class Figure(Record):
    old: float | None
    new: float | None

    @property
    def change(self) -> float | None:
        if self.old is None or self.new is None:
            return None
        return self.new - self.old


class PlanDifference(Record):
    """The changes from one plan to another.

    Attributes:
        memory: In bytes; ``seconds`` of start-up likewise.
        failed: Keys that the new plan leaves out because their capture failed, with errors.
        settings: Of the resolved mode, the configurations, the budgets, the machines, and ``RULES``
            of the evidence.
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
    before = old.lanes()
    after = new.lanes()
    lanes = []
    either = sorted({*before, *after}, key=lambda lane: (lane.mode.name, *lane[1:]))
    for lane in either:
        had = set(before.get(lane, ()))
        has = set(after.get(lane, ()))
        change = LaneChange(
            **lane._asdict(),
            added=tuple(sorted(has - had)),
            removed=tuple(sorted(had - has)),
            kept=tuple(sorted(has & had)),
        )
        lanes.append(change)
    failed = (new.evidence or {}).get("failed", ())
    return PlanDifference(
        lanes=tuple(lanes),
        graphs=Figure(old=old.num_graphs, new=new.num_graphs),
        memory=_predicted(old, new, "total_bytes"),
        seconds=_predicted(old, new, "seconds"),
        expected_us=Figure(old=old.expected_us, new=new.expected_us),
        settings=tuple(_settings(old, new)),
        notes=tuple(_notes(old, new)),
        failed=tuple(map(LeftOut.model_validate, failed)),
    )


def _predicted(
    old: Plan,
    new: Plan,
    name: str,
) -> Figure:
    return Figure(
        old=getattr(old.predicted, name, None),
        new=getattr(new.predicted, name, None),
    )


def mismatches(
    plan: Plan,
    config: Config,
    machine: Machine | None = None,
) -> tuple[FieldChange, ...]:
    """Settings of a saved plan (old) and of the present configuration (new) that differ.

    The device and the settings that the plan decides do not count. The present ``machine`` is
    compared if the plan's figures were measured on one.
    """
    changes = _changes(plan.config, capture_fields(config)["config"])
    ignored = *DECIDED_BY_THE_PLAN, "device"
    found = [change for change in changes if change.name not in ignored]
    if plan.machine and machine:
        found += machine_changes(plan.machine, machine)
    return tuple(found)


def timed_otherwise(plan: Plan, config: Config) -> list[FieldChange]:
    """What decides step times, and differs between a bench's plan (old) and the configuration."""
    shapes = [{"inputs": each.fixed_inputs} for each in (plan, build_plan(config))]
    found = _changes(*shapes)
    for change in mismatches(plan, config):
        if change.name.startswith(_TIMED) or change.name.endswith(".dtype"):
            found.append(change)
    return found


def unused_settings(plan: Plan, config: Config) -> tuple[FieldChange, ...]:
    """Settings that the plan decides, and that the configuration (new) changes."""
    changes = _changes(plan.config, capture_fields(config)["config"])
    return tuple(change for change in changes if change.name in DECIDED_BY_THE_PLAN)


def fitted(
    plan: Plan,
    config: Config,
    machine: Machine | None = None,
    *,
    force: bool = False,
    file: str | None = None,
) -> Plan:
    """The plan, to be captured with a configuration; ``file`` is the one that it was read from.

    Raises PlanMismatchError, which names each setting that differs; with ``force`` the plan has a
    warning instead.
    """
    wrong = mismatches(
        plan,
        config,
        machine,
    )
    # the plan decides which graphs, not if
    if plan.keys and config.compilation.cudagraph_mode is CUDAGraphMode.NONE:
        wrong += (
            FieldChange(
                name="compilation.cudagraph_mode",
                old=str(plan.mode),
                new="NONE",
            ),
        )
    described = [change.said("{name}: {old} in the plan, {new} now") for change in wrong]
    problem = "the plan was made for something else"
    warnings = plan.warnings
    if wrong:
        if not force:
            raise PlanMismatchError(
                "\n  - ".join((problem, *described)),
                remedy="Give the configuration that the plan was made for, or make the plan again "
                "for this one, with the same --set. --force captures it unchanged.",
            )
        warnings += (f"{problem} and was forced: {'; '.join(described)}",)
    return plan.changed(
        **capture_fields(config),
        budget=budget_of(config),
        file=file,
        warnings=warnings,
    )


def machine_changes(old: Machine, new: Machine) -> list[FieldChange]:
    return _changes(old.model_dump(), new.model_dump())


def named(changes: Sequence[FieldChange]) -> str:
    """The first changes, as ``scheduler.max_num_seqs was 256, is 64 here``."""
    shown = [change.said("{name} was {old}, is {new} here") for change in changes[:MOST_NAMED]]
    if len(changes) > MOST_NAMED:
        shown.append(f"and {len(changes) - MOST_NAMED} more")
    return "; ".join(shown)


def _settings(
    old: Plan,
    new: Plan,
) -> list[FieldChange]:
    usual = Config().model_dump(mode="json", include={"budget": True, **SIMULATED})
    both = []
    for plan in (old, new):
        found: dict[str, Any] = {"mode": str(plan.mode)}
        parts = (usual, plan.config, plan.simulated, {"budget": plan.budget})
        for part in parts:
            found.update(leaves(part))
        for name in DECIDED_BY_THE_PLAN:
            found.pop(name, None)
        if old.evidence and new.evidence:
            evidence = plan.evidence or {}
            for name in RULES:
                found[name] = evidence.get(name)
        if old.machine and new.machine:
            found.update(plan.machine or ())
        both.append(found)
    changes = _changes(*both)
    if all("model.target" in settings for settings in both):
        return changes
    return [change for change in changes if not change.name.startswith("model.")]


def _notes(old: Plan, new: Plan) -> Iterator[str]:
    if old.predicted and new.predicted:
        source, its = old.predicted.source, new.predicted.source
        if source != its:
            yield f"memory and start-up have other sources: {source} before, {its} after"
    for name, words in _COMPARED.items():
        before = (old.evidence or {}).get(name)
        after = (new.evidence or {}).get(name)
        if None not in (before, after) and before != after:
            yield words.format(before, after)
    for plan, other, which in ((old, new, "first"), (new, old, "second")):
        if plan.expected_us is None and other.expected_us is not None:
            yield f"the {which} plan was not made for traffic, so that it expects no step time"
        if plan.predicted is None and other.predicted:
            yield (
                f"the {which} plan was made without --costs, so that its memory and start-up "
                "are not known"
            )


def _changes(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
) -> list[FieldChange]:
    before = dict(leaves(old))
    after = dict(leaves(new))
    found = []
    for name in {**after, **before}:
        change = FieldChange(
            name=name,
            old=before.get(name),
            new=after.get(name),
        )
        if change.old != change.new:
            found.append(change)
    return found


def leaves(
    value: Mapping[str, Any],
    prefix: str = "",
) -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner
