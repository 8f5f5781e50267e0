"""Plans with some of their keys: those that are asked for, or those that ``budget.max_graphs``
allows.

Note [Spread]
    Without traffic, batches of every size up to a lane's largest count as equally frequent. A lane
    keeps its largest size, so that no batch of its kind loses its graph, and of the others those
    with which batches are padded to the fewest tokens on average: the optimizer's problem for one
    lane, with a step time that is the size itself. The least mean of a lane falls by less with each
    further graph, because its cost is Monge; so graphs that go to the lane where the next one saves
    most, one by one, are spread best over all lanes. Each lane counts the same; of equal ones
    decode comes first.

    With several sizes the lanes have as many graphs each, and their boxes are those that pad
    batches least.

    Where there are fewer graphs than lanes, the lanes stay that serve most kinds of batches: those
    for more adapters serve batches with fewer, those of mixed batches serve uniform decode.
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
    part = restricted(plan, (_one_list if one_list else spread)(plan, plan.keys, most), config)
    note = (
        f"budget.max_graphs = {most} keeps {len(part.keys)} of {len(plan.keys)} keys: the "
        "largest, and those with "
        "which batches are padded least if all sizes of them are as frequent"
    )
    return part.model_copy(update={"notes": (*part.notes, note)})


def spread(plan: Plan, keys: Sequence[Key], most: int) -> tuple[Key, ...]:
    """At most so many of ``keys`` (the plan's, or the rest of them without the largest of some
    lanes), in their order, see Note [Spread].
    """
    if len(keys) <= most:
        return tuple(keys)
    sizes, ends = plan.lanes(), Counter(Lane.of(*key) for key in keys)
    lanes = sorted(ends, key=lambda lane: (-lane.num_active_loras, lane.uniform))[:most]
    if len(plan.dim_names) > 1:
        import numpy as np

        from cgplan.optimizer.boxes import least_padded

        picked = set[Key]()
        for lane in lanes:
            found = [key for key in keys if Lane.of(*key) == lane]
            boxes = np.array([descriptor.box for _, descriptor in found])
            picked |= {found[index] for index in least_padded(boxes, most // len(lanes))}
        return tuple(key for key in keys if key in picked)
    strides = {lane: plan.query_len if lane.uniform else 1 for lane in lanes}
    paths = {lane: _least_padding(sizes[lane], strides[lane], most) for lane in lanes}

    def saved(lane: Lane) -> float:
        """Rows of padding that one more graph saves a batch, on average; below 0 where no size is
        left.
        """
        if numbers[lane] == ends[lane]:
            return -1.0
        cost = paths[lane].cost[numbers[lane] : numbers[lane] + 2, ends[lane]]
        return float(cost[0] - cost[1]) / (sizes[lane][ends[lane] - 1] // strides[lane])

    numbers = dict.fromkeys(lanes, 1)
    for _ in range(most - len(lanes)):
        numbers[max(lanes, key=lambda lane: (saved(lane), lane.uniform))] += 1
    kept = {
        (lane, sizes[lane][n - 1])
        for lane in lanes
        for n in paths[lane].sizes(numbers[lane], ends[lane])
    }
    return tuple(key for key in keys if (Lane.of(*key), key[1].num_tokens) in kept)


def _one_list(plan: Plan, keys: Sequence[Key], most: int) -> tuple[Key, ...]:
    sizes, lanes = sorted({key.num_tokens for _, key in keys}), plan.lanes().values()
    paths = _least_padding(tuple(sizes), 1, most)
    lists = [
        {sizes[n - 1] for n in paths.sizes(number, len(sizes))}
        for number in range(min(most, len(sizes)), 0, -1)
    ]
    ends, keys_of = {own[-1] for own in lanes}, Counter(key.num_tokens for _, key in keys)
    tried = (*(one | ends for one in lists), *lists)
    kept = next((one for one in tried if sum(keys_of[size] for size in one) <= most), set[int]())

    def saved(size: int) -> float:
        """Rows of padding that one more size saves a batch, on average, in the lanes that have
        it.
        """
        found = 0.0
        for own in (own for own in lanes if size in own):
            below = max((other for other in own if other < size and other in kept), default=0)
            above = min(
                (other for other in own if other > size and other in kept), default=2 * size
            )
            found += (size - below) * (above - size) / own[-1]
        return found

    while kept and (
        more := [
            s for s in sizes if s not in kept and keys_of[s] + sum(keys_of[k] for k in kept) <= most
        ]
    ):
        kept = kept | {max(more, key=saved)}  # sizes of fewer lanes may fit yet
    return tuple(key for key in keys if key[1].num_tokens in kept)


@lru_cache(64)
def _least_padding(sizes: tuple[int, ...], stride: int, most: int) -> Paths:
    import numpy as np

    from cgplan.optimizer.paths import best_paths

    times = np.array([0, *sizes], dtype=np.float64)
    return best_paths((times // stride)[None], times[None], min(most, len(sizes)))
