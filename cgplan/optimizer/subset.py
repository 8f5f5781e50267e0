"""Plans with some of their keys: those that are asked for, or those that ``budget.max_graphs``
allows.

Note [Spread]
    Without traffic, batches of every size up to a lane's largest count as equally frequent. A lane
    keeps its largest size, and the other graphs are those with which batches are padded least, of
    the mean of all lanes. Of more lanes than graphs
    those stay that serve most kinds of batches. With several sizes each lane has as many boxes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from cgplan.config import Config
from cgplan.modes import Key
from cgplan.planning.plan import Lane, Plan
from cgplan.pricing import static_bytes, unit_of, widest
from cgplan.units import grouped


def restricted(
    plan: Plan,
    keys: Sequence[Key],
    config: Config,
) -> Plan:
    """The plan with these of its keys alone, and with the prediction for them.

    Pool memory that a left out key would have brought is brought by the next one, in proportion to
    their sizes.
    """
    kept = set(keys)
    if len(kept) == len(plan.keys):
        return plan
    sizes = set(map(_tokens_of, kept))
    predicted = plan.predicted
    if predicted:
        static = 0
        for others, tokens in widest(kept).items():
            static += static_bytes(config, tokens, others)
        costs = []
        missing = 0
        size = 1
        for key, cost in zip(plan.keys, predicted.keys, strict=True):
            tokens = key[1].elements
            if key not in kept:
                missing += cost.pool_bytes
                size = max(size, tokens)
                continue
            unit = unit_of([missing])  # whole segments stay whole
            share = missing * min(tokens, size)
            segments = -(-share // size // unit)
            pool = cost.pool_bytes + segments * unit
            costs.append(replace(cost, pool_bytes=pool))
            missing = 0
            size = 1
        predicted = predicted.changed(
            keys=tuple(costs),
            static_bytes=static,
            workspace_bytes=predicted.workspace_bytes if kept else 0,
        )
    return plan.changed(
        keys=tuple(key for key in plan.keys if key in kept),
        capture_sizes=tuple(sorted(sizes)),
        predicted=predicted,
    )


def within_count(
    plan: Plan,
    config: Config,
    *,
    one_list: bool = False,
) -> Plan:
    """The plan with as many keys as ``budget.max_graphs`` allows, as a capture chooses them, and a
    note that says so; ``one_list``: each size stays in all lanes that have it, or in none.

    A lazy capture counts the keys that batches ask for, so that its plan stays whole.
    """
    most = config.budget.max_graphs
    if most is None or len(plan.keys) <= most or config.compilation.is_lazy:
        return plan
    keys = spread(plan, plan.keys, most)
    if one_list:
        keys = _one_list(plan, most)
    part = restricted(plan, keys, config)
    note = (
        f"budget.max_graphs = {most} keeps {len(part.keys)} of {len(plan.keys)} keys: the largest, "
        "and those that pad batches least if all sizes are equally frequent"
    )
    notes = (*part.notes, note)
    return part.changed(notes=notes)


def spread(
    plan: Plan,
    keys: Sequence[Key],
    most: int,
) -> tuple[Key, ...]:
    """At most so many of ``keys`` (the plan's, or the rest of them without the largest of some
    lanes), in their order, see Note [Spread].
    """
    if len(keys) <= most:
        return tuple(keys)
    groups = grouped((Lane.of(*key), key) for key in keys)
    lanes = sorted(groups, key=attrgetter("uniform"))
    lanes.sort(key=attrgetter("num_active_loras"), reverse=True)
    lanes = sorted(lanes[:most], key=attrgetter("uniform"), reverse=True)
    import numpy as np

    kept = set[Key]()
    if len(plan.dim_names) > 1:
        from cgplan.optimizer.boxes import least_padded

        share = most // len(lanes)
        for lane in lanes:
            own = groups[lane]
            boxes = [descriptor.box for _, descriptor in own]
            found = least_padded(np.array(boxes), share)
            kept.update(own[index] for index in found)
    else:
        from cgplan.optimizer.paths import best_paths

        # one path for all lanes, each so far above the one before that its largest size stays
        apart = len(lanes) * plan.max_capture_size
        ordered = []
        weights = [0.0]
        rows = [0.0]
        for place, lane in enumerate(lanes):
            stride = plan.query_len if lane.uniform else 1
            own = sorted(groups[lane], key=_tokens_of)
            largest = _tokens_of(own[-1])
            for key in own:
                size = _tokens_of(key)
                ordered.append(key)
                weights.append(place + size / largest)
                rows.append(place * apart + size / stride)
        paths = best_paths(
            np.array([weights]),
            np.array([rows]),
            most,
        )
        chosen = paths.sizes(most, len(ordered))
        kept.update(ordered[index - 1] for index in chosen)
    return tuple(key for key in keys if key in kept)


def _tokens_of(key: Key) -> int:
    return key[1].num_tokens


def _one_list(
    plan: Plan,
    most: int,
) -> tuple[Key, ...]:
    import numpy as np

    from cgplan.optimizer.paths import best_paths

    lanes_of = Counter(map(_tokens_of, plan.keys))
    lanes_of[0] = 1
    every = sorted(lanes_of)
    sizes = np.array(every, dtype=float)
    weights = np.zeros(sizes.size)
    for own in plan.lanes().values():
        largest = own[-1]
        held = np.minimum(sizes, largest)
        weights += held / largest
    each = [lanes_of[size] for size in every]
    paths = best_paths(
        weights[None],
        sizes[None],
        most,
        each=np.array(each),
    )
    is_paid = np.isfinite(paths.cost[most])
    last = np.flatnonzero(is_paid)[-1]
    chosen = paths.sizes(most, int(last))
    kept = {every[index] for index in chosen}
    return tuple(key for key in plan.keys if _tokens_of(key) in kept)
