"""Plans with some of their keys: those that are asked for, or those that ``budget.max_graphs`` allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cgplan.config import Config
from cgplan.modes import Key
from cgplan.planning.costs import KeyCost, static_bytes
from cgplan.planning.plan import Plan
from cgplan.pricing.allocator import unit_of


def restricted(plan: Plan, keys: Sequence[Key], config: Config) -> Plan:
    """The plan with these of its keys alone; what is predicted of them goes along.

    Pool memory that a left out key would have brought is brought by the next one, in proportion to their sizes.
    """
    kept = set(keys)
    if len(kept) == len(plan.keys):
        return plan
    sizes = tuple(sorted({descriptor.num_tokens for _, descriptor in kept}))
    predicted = plan.predicted
    if predicted is not None:
        costs = _costs_of(plan.keys, predicted.keys, kept)
        static = static_bytes(config, sizes[-1]) if sizes else 0
        workspace = predicted.workspace_bytes if sizes else 0
        predicted = predicted.model_copy(update={"keys": costs, "static_bytes": static, "workspace_bytes": workspace})
    left = tuple(key for key in plan.keys if key in kept)
    return plan.model_copy(update={"keys": left, "capture_sizes": sizes, "predicted": predicted})


def _costs_of(keys: Sequence[Key], costs: Sequence[KeyCost], kept: set[Key]) -> tuple[KeyCost, ...]:
    found, missing, size = [], 0, 1
    for key, cost in zip(keys, costs, strict=True):
        tokens = key[1].num_tokens
        if key not in kept:
            missing, size = missing + cost.pool_bytes, max(size, tokens)
            continue
        unit = unit_of([missing])  # whole segments stay whole
        brought = -(-missing * min(tokens, size) // size // unit) * unit
        found.append(replace(cost, pool_bytes=cost.pool_bytes + brought))
        missing, size = 0, 1
    return tuple(found)


def within_count(plan: Plan, config: Config) -> Plan:
    """The plan with as many keys as ``budget.max_graphs`` allows, as a capture chooses them, and a note that says so.

    A lazy capture counts the keys that batches ask for, so that its plan stays whole.
    """
    most = config.budget.max_graphs
    if most is None or len(plan.keys) <= most or config.compilation.capture_policy == "lazy":
        return plan
    from cgplan.optimizer.spread import Spread  # numpy from here on

    part = restricted(plan, Spread(plan, most).of(plan.keys), config)
    note = (
        f"budget.max_graphs = {most} keeps {len(part.keys)} of {len(plan.keys)} keys: the largest, and those with "
        "which batches are padded least if all sizes of them are as frequent"
    )
    return part.model_copy(update={"notes": (*plan.notes, note)})
