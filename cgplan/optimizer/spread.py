"""Which keys stay where a plan has more than ``budget.max_graphs``, and no traffic says which are worth most.

Note [Spread]
    Batches of every size up to a lane's largest count as equally frequent. A lane keeps its largest size, so that no
    batch of its kind loses its graph, and of the others those with which batches are padded to the fewest tokens on
    average: the optimizer's problem for one lane, with a step time that is the size itself. The least mean of a lane
    falls by less with each further graph, because its cost is Monge; so graphs that go to the lane where the next one
    saves most, one by one, are spread best over all lanes. Each lane counts the same; of equal ones decode comes first.

    Where there are fewer graphs than lanes, the lanes stay that serve most kinds of batches: those for more adapters
    serve batches with fewer, those of mixed batches serve uniform decode.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cgplan.modes import Key
from cgplan.optimizer.paths import Paths, best_paths
from cgplan.planning.plan import Lane, Plan


class Spread:
    """Chooses among a plan's keys, see Note [Spread].

    Args:
        plan: Its keys, and the tokens of a request in uniform decode.
        most: How many keys to keep.
    """

    def __init__(self, plan: Plan, most: int) -> None:
        self._most = most
        self._query_len = plan.query_len
        self._sizes = plan.lanes()
        self._found: dict[tuple[tuple[int, ...], int], Paths] = {}  # LoRA cases have the same sizes, as a rule

    def of(self, keys: Sequence[Key]) -> tuple[Key, ...]:
        """At most so many of these keys, in their order.

        Args:
            keys: Those of the plan, or what is left of them without the largest sizes of some lanes.
        """
        if len(keys) <= self._most:
            return tuple(keys)
        found: dict[Lane, int] = {}
        for key in keys:
            lane = Lane.of(*key)
            found[lane] = found.get(lane, 0) + 1
        order = sorted(found, key=lambda lane: (-lane.num_active_loras, lane.uniform))[: self._most]
        numbers = self._shared_out({lane: found[lane] for lane in order})
        kept = {
            (lane, self._sizes[lane][index - 1])
            for lane, number in numbers.items()
            for index in self._paths(lane).sizes(number, found[lane])
        }
        return tuple(key for key in keys if (Lane.of(*key), key[1].num_tokens) in kept)

    def _shared_out(self, ends: dict[Lane, int]) -> dict[Lane, int]:
        """How many graphs each lane gets; ``ends``: how many sizes it has."""
        numbers = dict.fromkeys(ends, 1)
        for _ in range(self._most - len(ends)):
            saved = {lane: self._saved(lane, end, numbers[lane]) for lane, end in ends.items()}
            numbers[max(ends, key=lambda lane: (saved[lane], lane.uniform))] += 1
        return numbers

    def _saved(self, lane: Lane, end: int, number: int) -> float:
        """Padding rows of a batch, on average, that one more graph saves; below 0 where there is no more size."""
        if number >= end:
            return -1.0
        cost, batches = self._paths(lane).cost[:, end], self._sizes[lane][end - 1] // self._stride(lane)
        return float(cost[number] - cost[number + 1]) / batches

    def _paths(self, lane: Lane) -> Paths:
        sizes, stride = self._sizes[lane], self._stride(lane)
        if (sizes, stride) not in self._found:
            times = np.array([0, *sizes], dtype=np.float64)
            weights = (times // stride)[None]
            (self._found[sizes, stride],) = best_paths(weights, times, min(self._most, len(sizes)))
        return self._found[sizes, stride]

    def _stride(self, lane: Lane) -> int:
        return self._query_len if lane.uniform else 1


__all__ = ["Spread"]
