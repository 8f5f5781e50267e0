"""What each LoRA case adds to a plan: graphs, memory and start-up time."""

from __future__ import annotations

from dataclasses import dataclass

from cgplan.planning.costs import GraphCosts
from cgplan.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class CaseCost:
    """What a plan would save without one of its LoRA cases; batches of that case then take the next larger one.

    Attributes:
        num_active_loras: The case.
        graphs: Its keys.
        bytes: Device memory that they add to the other cases' keys: pool, static buffers, driver. None: not known.
        seconds: Warm-ups and captures of them; None likewise.
    """

    num_active_loras: int
    graphs: int
    bytes: int | None
    seconds: float | None


def case_costs(plan: Plan, costs: GraphCosts | None) -> tuple[CaseCost, ...]:
    """The marginal cost of each LoRA case, fewest adapters first; empty without LoRA.

    The cases share the pool, the static buffers and the workspaces, so that their marginal costs do not add up to the
    cost of the plan.
    """
    if plan.max_loras is None:
        return ()
    whole = None if costs is None else costs.of(plan.keys)
    found = []
    for case in plan.lora_cases:
        rest = [key for key in plan.keys if key[1].num_active_loras != case]
        graphs = len(plan.keys) - len(rest)
        if costs is None or whole is None:
            found.append(CaseCost(case, graphs, None, None))
        else:
            without = costs.of(rest)
            found.append(
                CaseCost(case, graphs, whole.total_bytes - without.total_bytes, whole.seconds - without.seconds)
            )
    return tuple(found)


__all__ = ["CaseCost", "case_costs"]
