"""Plans with some of their keys: those that are asked for, or those that ``budget.max_graphs``
allows.

Note [Spread]
    Without traffic, batches of every size up to a lane's largest count as equally frequent. A lane
    keeps its largest size, and of the others those with which batches are padded least. The next
    graph goes to the lane where it saves most: a lane's least padding falls by less with each one,
    so that graphs are spread best. Where there are fewer graphs than lanes, those lanes stay that
    serve most kinds of batches. With several sizes each lane has as many boxes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from cgplan.config import Config
from cgplan.modes import Key
from cgplan.planning.costs import KeyCost, static_bytes, widest
from cgplan.planning.plan import Lane, Plan
from cgplan.pricing.allocator import unit_of

if TYPE_CHECKING:
    from cgplan.optimizer.paths import Paths


def restricted(plan: Plan, keys: Sequence[Key], config: Config) -> Plan:
    """The plan with these of its keys alone, and with the prediction for them.

    Pool memory that a left out key would have brought is brought by the next one, in proportion to
    their sizes.
    """
    kept = set(keys)
    if len(kept) == len(plan.keys):
        return plan
    sizes = tuple(sorted({descriptor.num_tokens for _, descriptor in kept}))
    predicted = plan.predicted
    if predicted is not None:
        costs = _costs_of(plan.keys, predicted.keys, kept)
        static = sum(
            static_bytes(config, tokens, others) for others, tokens in widest(kept).items()
        )
        workspace = predicted.workspace_bytes if sizes else 0
        predicted = predicted.model_copy(
            update={"keys": costs, "static_bytes": static, "workspace_bytes": workspace}
        )
    left = tuple(key for key in plan.keys if key in kept)
    return plan.model_copy(update={"keys": left, "capture_sizes": sizes, "predicted": predicted})


def _costs_of(keys: Sequence[Key], costs: Sequence[KeyCost], kept: set[Key]) -> tuple[KeyCost, ...]:
    found, missing, size = [], 0, 1
    for key, cost in zip(keys, costs, strict=True):
        tokens = key[1].elements
        if key not in kept:
            missing, size = missing + cost.pool_bytes, max(size, tokens)
            continue
        unit = unit_of([missing])  # whole segments stay whole
        brought = -(-missing * min(tokens, size) // size // unit) * unit
        found.append(replace(cost, pool_bytes=cost.pool_bytes + brought))
        missing, size = 0, 1
    return tuple(found)


def within_count(plan: Plan, config: Config, *, one_list: bool = False) -> Plan:
    """The plan with as many keys as ``budget.max_graphs`` allows, as a capture chooses them, and a
    note that says so; ``one_list``: each size stays in all lanes that have it, or in none.

    A lazy capture counts the keys that batches ask for, so that its plan stays whole.
    """
    most = config.budget.max_graphs
    if most is None or len(plan.keys) <= most or config.compilation.capture_policy == "lazy":
        return plan
    keep = _one_list if one_list else spread
    part = restricted(plan, keep(plan, plan.keys, most), config)
    note = (
        f"budget.max_graphs = {most} keeps {len(part.keys)} of {len(plan.keys)} keys: the largest, "
        "and those with which batches are padded least if all sizes of them are as frequent"
    )
    return part.model_copy(update={"notes": (*part.notes, note)})


def spread(plan: Plan, keys: Sequence[Key], most: int) -> tuple[Key, ...]:
    """At most so many of ``keys`` (the plan's, or the rest of them without the largest of some
    lanes), in their order, see Note [Spread].
    """
    if len(keys) <= most:
        return tuple(keys)
    counts = Counter(Lane.of(*key) for key in keys)
    lanes = sorted(counts, key=lambda lane: (-lane.num_active_loras, lane.uniform))[:most]
    if len(plan.dim_names) > 1:
        picked = set[Key]()
        for lane in lanes:
            picked |= _least_padded_boxes(
                [key for key in keys if Lane.of(*key) == lane],
                most // len(lanes),
            )
        return tuple(key for key in keys if key in picked)
    lists, paths = {}, {}
    for lane in lanes:
        stride = plan.query_len if lane.uniform else 1
        lists[lane] = tuple(size // stride for size in plan.lanes()[lane][: counts[lane]])
        paths[lane] = _least_padding(lists[lane], min(most, counts[lane]))

    def saved(lane: Lane) -> float:
        """Rows of padding that one more graph saves a batch, on average; below 0 where no size is
        left.
        """
        number = numbers[lane]
        if number == counts[lane]:
            return -1.0
        cost = paths[lane].cost[:, -1]
        return float(cost[number] - cost[number + 1]) / lists[lane][-1]

    numbers = dict.fromkeys(lanes, 1)
    for _ in range(most - len(lanes)):
        best = max(lanes, key=lambda lane: (saved(lane), lane.uniform))
        numbers[best] += 1
    kept = set[tuple[Lane, int]]()
    for lane in lanes:
        sizes = plan.lanes()[lane]
        for index in paths[lane].sizes(numbers[lane], counts[lane]):
            kept.add((lane, sizes[index - 1]))
    return tuple(key for key in keys if (Lane.of(*key), key[1].num_tokens) in kept)


def _least_padded_boxes(keys: Sequence[Key], most: int) -> set[Key]:
    import numpy as np

    from cgplan.optimizer.boxes import least_padded

    boxes = np.array([descriptor.box for _, descriptor in keys])
    return {keys[index] for index in least_padded(boxes, most)}


def _one_list(plan: Plan, keys: Sequence[Key], most: int) -> tuple[Key, ...]:
    """The same of keys whose sizes stay in all lanes that have them, or in none."""
    import numpy as np

    from cgplan.optimizer.paths import best_paths

    lanes_of = Counter(key.num_tokens for _, key in keys)
    sizes = np.array([0, *sorted(lanes_of)], dtype=np.float64)
    weights = np.zeros(sizes.size)
    for own in plan.lanes().values():
        weights += np.minimum(sizes, own[-1]) / own[-1]
    each = np.array([lanes_of.get(size, 1) for size in sizes.tolist()])
    paths = best_paths(weights[None], sizes[None], most, each=each)
    (ends,) = np.isfinite(paths.cost[most]).nonzero()
    kept = {int(sizes[index]) for index in paths.sizes(most, int(ends[-1]))}
    return tuple(key for key in keys if key[1].num_tokens in kept)


@lru_cache(64)
def _least_padding(sizes: tuple[int, ...], most: int) -> Paths:
    import numpy as np

    from cgplan.optimizer.paths import best_paths

    rows = np.array([[0, *sizes]], dtype=np.float64)
    return best_paths(rows, rows, most)
