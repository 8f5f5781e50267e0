"""Why keys that a configuration has without a plan are not in the plan: which limit, or that they bring nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from cgplan.config import Config
from cgplan.errors import PlanError
from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.evidence import LeftOut
from cgplan.optimizer.lanes import Routes, lanes_of
from cgplan.planning.build import build_plan
from cgplan.planning.costs import GraphCosts
from cgplan.planning.plan import Lane, Plan, capture_order
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes

NO_BATCH = "no batch would run in it"
NO_GAIN = "no gain"
FAILED = "it could not be captured"
CASE = "its LoRA case was not planned for, see the notes"
RULE = "without a budget the plan ends at 99% of what graphs can bring"
UNPROVEN = "the search did not find it, and the plan is not proven to be the best"


def left_out(
    config: Config,
    plan: Plan,
    traffic: Traffic,
    times: StepTimes,
    costs: GraphCosts | None,
    *,
    failed: Mapping[Key, str],
    budgeted: bool,
    exact: bool,
    worth: float,
) -> Iterator[LeftOut]:
    """Keys of the configured list or ladder that the plan does not have, those of a lane with the same reason together.

    Each is added to the plan by itself: if that brings less than ``worth`` (a share of the step), there is no gain, or
    no batch that would run in it; if it brings more, the limits that it would break are the reason.

    Args:
        config: Its capture sizes, and its budget.
        plan: For this traffic.
        costs, failed: Of the plan, see ``propose``.
        budgeted: Whether the plan is bounded by the budget, not by the rule without one.
        exact: Whether no plan within the limits is better.
    """
    try:
        keys = build_plan(config).keys
    except PlanError:
        return
    present, planned_cases = set(plan.keys), set(times.told_apart(plan.lora_cases))
    gains = Gains(plan, traffic, times)
    reasons: dict[Key, str] = {}
    for key in keys:
        if key in present:
            continue
        lane, size = Lane.of(*key), key[1].num_tokens
        weight, gain = gains.of(lane, size)
        if lane.num_active_loras not in planned_cases:
            reason = CASE
        elif key in failed:
            reason = FAILED
        elif weight == 0:
            reason = NO_BATCH
        elif gain < worth:
            reason = NO_GAIN
        elif broken := _broken(config, [*plan.keys, key], costs):
            reason = ", ".join(f"budget.{limit}" for limit in broken)
        elif budgeted:
            reason = NO_GAIN if exact else UNPROVEN
        else:
            reason = RULE
        reasons[key] = reason
    yield from by_lane(reasons)


def by_lane(reasons: Mapping[Key, str]) -> Iterator[LeftOut]:
    """Keys with their reasons, those of a lane with the same reason together."""
    found: dict[tuple[Lane, str], list[int]] = {}
    for key, reason in reasons.items():
        found.setdefault((Lane.of(*key), reason), []).append(key[1].num_tokens)
    for (lane, reason), sizes in sorted(found.items(), key=lambda item: (item[0][0].mode.name, *item[0][0][1:])):
        yield LeftOut(**lane._asdict(), sizes=tuple(sorted(sizes)), reason=reason)


def _broken(config: Config, keys: Sequence[Key], costs: GraphCosts | None) -> list[str]:
    """Limits that these keys together are beyond."""
    budget, cost = config.budget, None if costs is None else costs.of(capture_order(keys))
    spent = {
        "max_graphs": (len(keys), budget.max_graphs),
        "memory": (None if cost is None else cost.total_bytes, budget.memory),
        "capture_time": (None if cost is None else cost.seconds, budget.capture_time),
    }
    return [name for name, (used, limit) in spent.items() if used is not None and limit is not None and used > limit]


class Gains:
    """What one key more would change, for a plan and traffic."""

    def __init__(self, plan: Plan, traffic: Traffic, times: StepTimes) -> None:
        self._times = times
        self._lanes = lanes_of(plan.mode, plan.lora_cases)
        routes, eager = Routes(plan.keys), len(self._lanes)
        rows = []
        for batch, weight in traffic.histogram:
            lane, size = routes.of(batch) or (None, batch.num_tokens)
            mode, case = (CUDAGraphMode.NONE, batch.num_active_loras) if lane is None else (lane[0], lane[2])
            rank = eager if lane is None else self._lanes.index(lane)
            rows.append((*batch, weight, rank, size, times.of(mode, size, case)))
        table = np.array(rows, dtype=np.float64).T
        self._tokens, _, self._uniform, self._loras, self._weight, self._rank, self._size, self._time = table
        self._total = float(self._weight @ self._time)

    def of(self, lane: Lane, size: int) -> tuple[float, float]:
        """Weight of the batches that would run in the key, and how much shorter that makes the step, as a share."""
        rank = self._lanes.index(lane)
        may_run = (self._tokens <= size) & (self._loras <= lane.num_active_loras)
        if lane.uniform:
            may_run &= self._uniform > 0
        moved = may_run & ((self._rank > rank) | ((self._rank == rank) & (self._size > size)))
        time = self._times.of(lane.mode, size, lane.num_active_loras)
        gain = float(self._weight[moved] @ (self._time[moved] - time))
        return float(self._weight[moved].sum()), gain / self._total


__all__ = ["Gains", "left_out"]
