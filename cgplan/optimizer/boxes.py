"""The best boxes for batches with several sizes, such as batch x length, and full grids beside
them.

Note [Boxes]
~~~~~~~~~~~~
A box is a graph with one size in each dimension; it runs the batches that are no larger in any. To
choose K boxes is the p-median problem: rows are batches, columns boxes, and a cost is the time of
the box, or so large that no choice leaves a batch without a box. A box is a candidate if each of
its sizes is that of a batch which it holds: another one shrinks to such a box, holds the same
batches, and takes no longer.

Greedy choice and exchanges of one box for another give a plan. A price u(p) for serving each batch
p gives a bound:

    L(u) = sum of w(p) u(p) - the K largest gains,    gain(j) = sum of w(p) max(u(p) - cost(p, j),
    0)

is below every plan (Lagrangian relaxation), and subgradient steps raise it. A box whose gain is
farther from the K-th than the plan from the bound is in all better plans or in none. Branching on
the others closes the gap, or the effort ends and the gap is reported. The best-known full grid
comes from exchanges in one dimension at a time.

Budgets of memory and time bound the number of boxes, if all cost what the cheapest do, and leave
boxes out that they do not pay for alone: of what is left comes the bound. Where its boxes cost too
much, there are fewer, until they are paid for; then come others that save most and are paid for,
too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, count, product
from math import prod
from operator import itemgetter
from typing import get_args

import numpy as np
import numpy.typing as npt

from cgplan.config import Config, Dim
from cgplan.errors import BudgetError, PlanError
from cgplan.optimizer.evidence import Evidence, Expected, LadderPoint, Limit, PaddingMap, SizeUse
from cgplan.optimizer.lanes import key_of, lanes_of
from cgplan.optimizer.paths import Floats, Ints, best_paths
from cgplan.optimizer.propose import EXACT, Proposal
from cgplan.planning.build import build_plan, lora_cases, resolve_mode, sizes_of
from cgplan.planning.costs import GraphCosts, Predicted
from cgplan.planning.plan import PLANNED_FOR, Plan, capture_config, capture_order, config_hash
from cgplan.traffic.histogram import SizeCounts
from cgplan.traffic.step_times import StepSurface
from cgplan.units import format_bytes

CANDIDATES = 1600  # boxes to choose among, about
LIMITS: tuple[Limit, ...] = get_args(Limit)
BOXES = 32  # where no budget says how many
EFFORT = 1 << 30  # batches times boxes times subgradient steps, about
STEPS, NODE_STEPS, PATIENCE = 2000, 60, 20  # at the root, at other nodes, without progress at least
PROVEN = 1e-9  # relative gap that counts as none
ROUNDS = 3  # of exchanges in each dimension of a grid
EVEN = (np.arange(1, 5), np.arange(1, 9))  # steps of a grid of 4 x 8 evenly spaced sizes
TRIED = 64  # boxes, as one more that the budget may pay for
MAP_SIZES = 12  # rows and columns of the map of padding
NO_TIMES = (
    "no step times were given: a step counts 1 us for each element of its box, the product of its "
    "sizes, so that these "
    "figures compare padding alone. --step-times FILE gives times"
)
Bools = npt.NDArray[np.bool_]


def best_boxes(
    cost: Floats, weights: Floats, graphs: int, start: Sequence[int] = ()
) -> tuple[list[int], float]:
    """At most so many columns with the least total of each row's weight times its least cost, and a
    bound on it, see Note [Boxes]. The choice is the best one where the bound is its total.

    Args:
        cost: [rows, columns].
        weights: [rows], above 0.
        graphs: At least 1.
        start: A choice to begin with; what is found is at least as good.
    """

    best, value, effort, number = list[int](), np.inf, EFFORT, count()

    def look_around(chosen: Sequence[int]) -> None:
        nonlocal best, value
        found = _exchanged(cost, weights, graphs, chosen)
        if (total := _total(cost, weights, found)) < value:
            best, value = found, total

    look_around(())
    look_around(start)
    price = np.full(len(cost), cost[:, best].min(1).max())
    nodes = [(-np.inf, next(number), list[int](), np.arange(cost.shape[1]), price)]
    while nodes and effort > 0 and nodes[0][0] < value * (1 - PROVEN):
        low, step, sure, free, price = heappop(nodes)
        part, left, steps = (
            cost[:, free],
            graphs - len(sure),
            NODE_STEPS if step else min(STEPS, EFFORT // cost.size),
        )
        if not left or free.size <= left:
            look_around([*sure, *free[:left].tolist()])
            continue
        most = cost[:, np.array(sure, dtype=int)].min(1, initial=cost.max())
        bound, price, gains = _relaxed(part, weights, most, left, value, price, steps)
        effort -= part.size * steps
        order = np.argsort(-gains, kind="stable")
        free, gains = free[order], gains[order]
        opened = [*sure, *free[:left].tolist()]
        bound = max(bound, low)
        if not step or _total(cost, weights, opened) < value * (1 - PROVEN):
            look_around(opened)
        if bound < value * (1 - PROVEN):
            rest = np.delete(free[gains > gains[left - 1] - (value - bound)], left - 1)
            heappush(nodes, (bound, next(number), [*sure, opened[-1]], rest, price))
            heappush(nodes, (bound, next(number), sure, rest, price))
    return best, min(value, *(node[0] for node in nodes), np.inf)


def _total(cost: Floats, weights: Floats, chosen: Sequence[int] | Ints) -> float:
    return float(weights @ cost[:, chosen].min(1))


def _gains(cost: Floats, weights: Floats, price: Floats, reach: Floats) -> Floats:
    """Of each column; ``reach`` takes what each row saves."""
    return np.asarray(
        weights @ np.maximum(np.subtract(price[:, None], cost, out=reach), 0, out=reach)
    )


def _exchanged(cost: Floats, weights: Floats, graphs: int, chosen: Sequence[int] = ()) -> list[int]:
    """Columns chosen one by one for the most gain, then exchanged for others as long as that
    gains.
    """
    best, reach = [*chosen] or [int(cost.max(0).argmin())], np.empty_like(cost)
    turn = idle = 0
    while idle < len(best):
        rest = best if len(best) < graphs else [*best[:turn], *best[turn + 1 :]]
        before = cost[:, rest].min(1) if rest else np.full(weights.size, cost.max())
        more = [*rest, int(_gains(cost, weights, before, reach).argmax())]
        gained = _total(cost, weights, more) < _total(cost, weights, best) * (1 - PROVEN)
        if not gained and rest is best:
            break
        idle = 0 if gained else idle + 1
        best, turn = (more if gained else best), (turn if gained else turn + 1) % graphs
    return best


def _relaxed(
    cost: Floats,
    weights: Floats,
    most: Floats,
    graphs: int,
    value: float,
    price: Floats,
    steps: int,
) -> tuple[float, Floats, Floats]:
    """The largest bound that was found, its prices, and the gains; a row costs ``most`` without any
    of the columns.
    """
    found, length, idle, reach = (-np.inf, price, price), 1.5, 0, np.empty_like(cost)
    for _ in range(steps):
        price = np.clip(price, 0, most)
        gains = _gains(cost, weights, price, reach)
        opened = np.argpartition(-gains, graphs - 1)[:graphs]
        bound = float(weights @ price - gains[opened].sum())
        found, idle = ((bound, price, gains), 0) if bound > found[0] else (found, idle + 1)
        slope = 1.0 - np.count_nonzero(reach[:, opened], axis=1)
        slope[(slope > 0) & (price >= most)] = 0
        if not slope.any() or bound >= value * (1 - PROVEN):
            break
        if idle > max(PATIENCE, steps // 30):
            price, length, idle = found[1], length / 2, 0
        else:
            price = price + length * (value - bound) / (weights @ slope**2) * slope
    return found


def _held(times: Floats, holds: Bools, weights: Floats) -> Floats:
    """Costs with which no batch is left without a box."""
    return np.where(holds, times, 2 * times.max() * weights.sum() / weights.min())


def least_padded(boxes: Ints, graphs: int) -> list[int]:
    """The boxes, by index, that pad batches least, where all those that one of ``boxes`` holds are
    as frequent.
    """
    axes = [np.unique(column) for column in boxes.T]
    holds = np.asarray((_grid(axes)[:, None] <= boxes).all(-1))
    held = holds.any(1)
    batches = _grid([np.diff(axis, prepend=0) for axis in axes])[held].prod(1) * 1.0
    return _exchanged(_held(boxes.prod(1) * 1.0, holds[held], batches), batches, graphs)


def dims_of(config: Config) -> list[Dim]:
    """The dimensions of a batch in the order of a box's sizes."""
    tokens = Dim("num_tokens", max=config.scheduler.max_num_batched_tokens)
    return [config.dims.get(name, tokens) for name in config.dim_names]


def propose_boxes(
    config: Config,
    traffic: SizeCounts,
    surface: StepSurface | None = None,
    costs: GraphCosts | None = None,
) -> Proposal:
    """The plan with the shortest expected step for batches of several sizes, inside
    ``config.budget``.

    Each batch of the traffic gets a graph. ``budget.max_graphs`` bounds their number; absent: 32
    boxes. Without ``costs`` nothing else does.

    Args:
        traffic: Batches by the sizes of ``dims_of(config)``.
        surface: How long steps take; None: 1 us for each element, of which a box has the product of
            its sizes.

    Raises:
        ModeError, PlanError: as ``build_plan`` does; or the resolved mode has no graphs.
        BudgetError: no boxes were found that hold all batches and that the budget pays for.
    """
    lanes, most = lanes_of(resolve_mode(config)[0], lora_cases(config)), config.budget.max_graphs
    if not lanes:
        raise PlanError(
            "the resolved cudagraph_mode has no graphs",
            remedy="Set another compilation.cudagraph_mode.",
        )
    if most is not None and most < len(lanes):
        remedy = f"Raise it to {len(lanes)}, which one box takes."
        raise BudgetError(
            f"budget.max_graphs is {most}, too few for {' and '.join(map(str, lanes))}",
            remedy=remedy,
        )

    def plan_of(*boxes: tuple[int, ...]) -> Plan:
        compilation = config.compilation.model_copy(update={"boxes": boxes})
        return build_plan(config.model_copy(update={"compilation": compilation}))

    base = plan_of(tuple(dim.top for dim in dims_of(config)))
    evidence = _Case(config, traffic, surface, costs, base).evidence(
        BOXES if most is None else most // len(lanes)
    )
    plan = plan_of(*((use.size or 0, *use.sizes) for use in evidence.uses))
    plan = plan.model_copy(
        update={
            "predicted": costs and costs.of(plan.keys),
            "config_hash": config_hash(config),
            "config": capture_config(config),
            "sizes_source": f"{PLANNED_FOR} {traffic.source}",
            "evidence": evidence.model_dump(mode="json"),
        }
    )
    return Proposal(plan=plan, evidence=evidence)


class _Case:
    """Batches, and the sizes that boxes may have. Arrays of sizes and boxes are [n, dimensions]."""

    def __init__(
        self,
        config: Config,
        traffic: SizeCounts,
        surface: StepSurface | None,
        costs: GraphCosts | None,
        base: Plan,
    ) -> None:
        self._costs, self._base, self._lanes = costs, base, lanes_of(base.mode, base.lora_cases)
        self._traffic, self._surface, self._dims, self._budget = (
            traffic,
            surface,
            dims_of(config),
            config.budget,
        )
        batches, self._weights = (
            np.array([*traffic.counts]),
            np.array([*traffic.counts.values()], dtype=np.float64),
        )
        self._real = self._weights * batches.prod(1)
        multiples = np.array([dim.multiple_of for dim in self._dims])
        batches = np.maximum(batches, [dim.min for dim in self._dims])
        self._least = -(-batches // multiples) * multiples  # the smallest box of each batch
        most = round(CANDIDATES ** (1 / len(self._dims)))
        self._sizes = [self._sizes_of(dim, most) for dim in range(len(self._dims))]
        columns = zip(traffic.names, self._sizes, self._least.T, strict=True)
        self._thinned = [
            name for name, sizes, column in columns if not np.isin(column, sizes).all()
        ]
        self._rounded, index = np.unique(_up(self._least, self._sizes), axis=0, return_inverse=True)
        # of ``rounded``
        self._counts: Floats = np.bincount(index.ravel(), self._weights).astype(np.float64)

    def _sizes_of(self, dim: int, most: int) -> Ints:
        """Sizes of the batches in one dimension; of too many those that pad batches least in this
        dimension alone.
        """
        sizes, index = np.unique(self._least[:, dim], return_inverse=True)
        most, weights = min(most, sizes.size), np.cumsum([0.0, *np.bincount(index, self._weights)])
        (paths,) = best_paths(weights[None], np.append(0.0, sizes), most)
        return np.asarray(sizes[np.array(paths.sizes(most, sizes.size)) - 1])

    def _times(self, boxes: Ints) -> Floats:
        return boxes.prod(-1) * 1.0 if self._surface is None else self._surface.at(boxes)

    def _cost(self, boxes: Ints, holds: Bools) -> Floats:
        times = self._times(boxes.reshape(-1, len(self._dims))).reshape(boxes.shape[:-1])
        return _held(times, holds, self._counts)

    def _candidates(self) -> tuple[Ints, Bools]:
        """Boxes to choose among, and which batches they hold: [batches, boxes]."""
        boxes, batches = _grid(self._sizes), self._rounded[:, None]
        holds = np.asarray((batches <= boxes).all(-1))
        tight = np.asarray((holds[..., None] & (batches == boxes)).any(0).all(-1))
        return boxes[tight], holds[:, tight]

    def _price(self, boxes: Ints) -> Predicted | None:
        keys = [
            (key_of(lane, box[0], self._base), box[1:])
            for box in boxes.tolist()
            for lane in self._lanes
        ]
        sized = ((mode, key._replace(sizes=tuple(sizes))) for (mode, key), sizes in keys)
        return None if self._costs is None else self._costs.of(capture_order(sized))

    def _broken(self, boxes: Ints) -> tuple[Limit, ...]:
        """The limits that these boxes break."""
        paid, spent = self._price(boxes), dict[str, float](max_graphs=len(boxes) * len(self._lanes))
        if paid is not None:
            spent |= {"memory": paid.total_bytes, "capture_time": paid.seconds}
        given = self._budget.model_dump(exclude_none=True)
        return tuple(
            name for name in LIMITS if name in spent and spent[name] > given.get(name, np.inf)
        )

    def _paid(self, boxes: Ints, most: int) -> tuple[Bools, int]:
        """Which boxes a plan within the budget may have, and how many it may have at most."""
        costs, elements = self._costs, boxes.prod(1)
        if costs is None:
            return np.ones(len(boxes), dtype=bool), most
        limits = [
            np.inf if of is None else of for of in (self._budget.memory, self._budget.capture_time)
        ]
        # Where larger boxes cost less, those count: between bends costs lie on lines.
        ends = np.unique([*elements, *costs.bends, prod(dim.top for dim in self._dims)])
        keys = [[key_of(lane, end, self._base) for lane in self._lanes] for end in ends.tolist()]
        each = np.array(
            [[sum(map(of, some)) for of in (costs.driver_bytes, costs.seconds)] for some in keys]
        )
        least = np.minimum.accumulate(each[::-1])[::-1][np.searchsorted(ends, elements)]
        pools = [
            max(costs.pool_bytes(lane.mode, n) for lane in self._lanes) for n in elements.tolist()
        ]
        static = [costs.static_bytes(first, tuple(rest)) for first, *rest in boxes.tolist()]
        shared = np.stack(
            [
                np.add(pools, static) + costs.workspace_bytes,
                np.full(len(boxes), costs.once_seconds),
            ],
            1,
        )
        spent = shared.min(0) + np.cumsum(np.sort(least, axis=0), axis=0)
        return (shared + least <= limits).all(1), min(most, int((spent <= limits).all(1).sum()))

    def _best(
        self, most: int, boxes: Ints, holds: Bools, grid: Ints
    ) -> tuple[Ints, float, tuple[Limit, ...]]:
        """Boxes within the budget, the lower bound, and the limits that the next box would
        break.
        """
        found = whole = self._least.max(0)[None]
        chosen, bound = list[int](), np.inf
        if most and holds.any(1).all():
            cost, tight = self._cost(boxes, holds), self._tight(grid, _up(self._least, self._sizes))
            start = [int((boxes == box).all(1).argmax()) for box in tight]
            chosen, bound = best_boxes(cost, self._counts, most, start)
        while chosen:
            if holds[:, chosen].any(1).all() and not self._broken(
                found := self._tight(boxes[chosen], self._least)
            ):
                break
            chosen, found = (
                _exchanged(cost, self._counts, len(chosen) - 1) if len(chosen) > 1 else [],
                whole,
            )
        if not chosen and (broken := self._broken(whole)):
            paid = self._price(whole)
            assert paid is not None, "without costs the number of graphs was looked at before"
            raise BudgetError(
                f"{' and '.join(f'budget.{limit}' for limit in broken)}: no boxes were found that "
                "it pays for and that "
                f"hold all batches; one for all takes {format_bytes(paid.total_bytes)} and "
                f"{paid.seconds:.3g} s, by "
                f"costs {paid.source}",
                remedy="Raise the budget, or lower max in `dims`: larger batches run eagerly.",
            )
        times = np.where((self._least[:, None] <= boxes).all(-1), self._times(boxes), np.inf)

        def tried(some: Ints) -> list[Ints]:
            """These boxes with one more that then hold all batches, those with the shortest steps
            first.
            """
            each = np.where((self._least[:, None] <= some).all(-1), self._times(some), np.inf).min(
                1, initial=np.inf
            )
            steps, now = (
                self._weights @ np.minimum(each[:, None], times),
                self._weights @ each * (1 - PROVEN),
            )
            order = np.argsort(steps, kind="stable")[: min(TRIED, np.count_nonzero(steps < now))]
            return [self._tight(np.concatenate([some, boxes[[n]]]), self._least) for n in order]

        # spend the rest of the budget on the box that saves most, or have it in the place of
        # another one
        while True:
            more = tried(found)
            binding = self._broken(more[0]) if more else ()
            others = (
                np.delete(found, n, 0) for n in range(len(found) if binding and self._costs else 0)
            )
            least = self._weights @ self._times(found)[self._runs_in(found)] * (1 - PROVEN)
            fewer = (
                some
                for some in chain(more, chain.from_iterable(map(tried, others)))
                if len(some) <= most
            )
            better = (
                some
                for some in fewer
                if self._weights @ self._times(some)[self._runs_in(some)] < least
            )
            if (filled := next((some for some in better if not self._broken(some)), None)) is None:
                return found, bound, binding
            found = filled

    def _best_grid(self, graphs: int) -> Ints:
        """The best full grid that exchanges of the sizes of one dimension at a time find."""
        numbers = (range(1, min(sizes.size, graphs) + 1) for sizes in self._sizes)
        shapes, found = (
            np.array([shape for shape in product(*numbers) if prod(shape) <= graphs]),
            [],
        )
        for shape in shapes:
            if np.count_nonzero((shapes >= shape).all(1)) > 1:  # a larger one is as cheap
                continue
            sizes = list(map(self._sizes_of, range(len(shape)), shape))
            for dim in [*range(len(shape))] * ROUNDS:
                boxes = np.repeat(_up(self._rounded, sizes)[:, None], self._sizes[dim].size, axis=1)
                boxes[..., dim] = self._sizes[dim]
                cost = self._cost(boxes, self._rounded[:, [dim]] <= self._sizes[dim])
                columns = _exchanged(cost, self._counts, shape[dim])
                sizes[dim] = self._sizes[dim][np.sort(columns)]
            found.append((_total(cost, self._counts, columns), _grid(sizes)))
        return min(found, key=itemgetter(0))[1]

    def _runs_in(self, boxes: Ints) -> Ints:
        """The box of each batch: of those that hold it the one with the fewest elements, as the
        dispatcher has it.
        """
        order = np.argsort(boxes.prod(1), kind="stable")
        return np.asarray(order[(self._least[:, None] <= boxes[order]).all(-1).argmax(1)])

    def _tight(self, boxes: Ints, batches: Ints) -> Ints:
        """Those that run a batch, shrunk to the largest sizes of the batches that they run."""
        before = boxes[:0]
        while not np.array_equal(before, boxes):
            before, runs = boxes, self._runs_in(boxes)
            boxes = np.unique([batches[runs == box].max(0) for box in np.unique(runs)], axis=0)
        return boxes

    def _point(self, name: str, boxes: Ints) -> LadderPoint:
        runs, paid = self._runs_in(boxes), self._price(boxes)
        return LadderPoint(
            name=name,
            graphs=len(self._lanes) * len(boxes),
            bytes=None if paid is None else paid.total_bytes,
            seconds=None if paid is None else paid.seconds,
            expected_us=self._weights @ self._times(boxes)[runs] / self._weights.sum(),
            padding=1 - self._real.sum() / (self._weights @ boxes.prod(1)[runs]),
            unused=len(boxes) - np.unique(runs).size,
        )

    def _map(self, ran: Floats) -> PaddingMap | None:
        if len(self._dims) < 2:
            return None
        axes = [self._sizes_of(dim, MAP_SIZES) for dim in (0, 1)]
        place = np.ravel_multi_index(
            [*map(np.searchsorted, axes, self._least.T[:2])], (shape := [*map(len, axes)])
        )
        real, run = (np.bincount(place, of, prod(shape)).reshape(shape) for of in (self._real, ran))
        pairs = zip(real.tolist(), run.tolist(), strict=True)
        shares = tuple(
            tuple(1 - a / b if b else None for a, b in zip(*row, strict=True)) for row in pairs
        )
        first, second, *_ = self._traffic.names
        return PaddingMap(
            names=(first, second), rows=axes[0].tolist(), columns=axes[1].tolist(), shares=shares
        )

    def evidence(self, most: int) -> Evidence:
        boxes, holds = self._candidates()
        may, most = self._paid(boxes, most)
        grid = self._best_grid(max(most, 1))
        boxes, lower, binding = self._best(most, boxes[may], holds[:, may], grid)
        boxes = boxes[np.argsort(boxes.prod(1), kind="stable")]
        runs, total = self._runs_in(boxes), float(self._weights.sum())
        counts, real = (np.bincount(runs, of) for of in (self._weights, self._real))
        even = zip(self._dims, EVEN, strict=False)
        grids = {
            "this plan": boxes,
            "the best full grid": grid,
            "powers of two": _grid(
                [sizes_of(dim.model_copy(update={"sizes": None})) for dim in self._dims]
            ),
            "even 4 x 8": _grid(
                [
                    np.unique(-(-dim.top * n // (n[-1] * dim.multiple_of))) * dim.multiple_of
                    for dim, n in even
                ]
            ),
        }
        if len(self._dims) != len(EVEN):
            del grids["even 4 x 8"]
        own, *ladders = (self._point(name, grid) for name, grid in grids.items())
        step = own.expected_us
        lower, costs = min(lower / total, step), self._costs
        bound = float(self._weights @ self._times(self._least)) / total
        changes = [(step / ladder.expected_us - 1, ladder.name) for ladder in ladders]
        compared = (
            f"{abs(by):.1%} {'longer' if by > 0 else 'shorter'} than with {name}"
            for by, name in changes
        )
        uses = zip(boxes.tolist(), counts / total, 1 - real / counts / boxes.prod(1), strict=True)
        return Evidence(
            traffic_source=f"{self._traffic.source}: {' x '.join(self._traffic.names)}",
            traffic_weight=total,
            traffic_notes=tuple(self._notes(boxes)),
            times_source=self._surface.source if self._surface else "1 us for each element",
            costs_source=None if costs is None else costs.source,
            costs_estimated=None if costs is None else costs.estimated,
            costs_notes=() if costs is None else costs.notes,
            unbounded=tuple(
                limit
                for limit in LIMITS[1:]
                if costs is None and getattr(self._budget, limit) is not None
            ),
            rule=f"the best {most} boxes of sizes of the traffic within the budget; each of its "
            "batches has a graph",
            graphs=own.graphs,
            bytes=own.bytes,
            seconds=own.seconds,
            expected_us=Expected(plan=step, eager=None, bound=bound),
            lower_bound_us=lower,
            gap=step / lower - 1,
            exact=step <= lower * (1 + EXACT) and not self._thinned,
            binding=binding,
            uses=tuple(
                SizeUse(
                    **self._lanes[0]._asdict(),
                    size=first,
                    sizes=tuple(others),
                    share=share,
                    padding=padding,
                )
                for (first, *others), share, padding in uses
            ),
            ladders=tuple(ladders),
            warnings=() if self._surface else (NO_TIMES,),
            verdict=f"steps {', '.join(compared)}",
            padding=own.padding,
            padding_map=self._map(self._weights * boxes.prod(1)[runs]),
        )

    def _notes(self, boxes: Ints) -> Iterator[str]:
        if self._thinned:
            yield (
                f"so many sizes of {' and '.join(self._thinned)} that those were tried which pad "
                "batches least in this "
                "dimension alone; the lower bound is of these"
            )
        top = [dim.max for dim in self._dims]
        if not (boxes >= top).all(1).any():
            yield (
                f"batches that no box holds run eagerly: one of {' x '.join(map(str, top))}, "
                "the largest, is not held"
            )
        if beyond := self._traffic.beyond:
            yield (
                f"{beyond:,} batches are above the max of a dimension: they run eagerly, and no "
                "figure has them"
            )


def _grid(sizes: Sequence[Ints | tuple[int, ...]]) -> Ints:
    return np.array(list(product(*sizes)))


def _up(batches: Ints, sizes: Sequence[Ints]) -> Ints:
    """Each size rounded up to the next of its dimension."""
    return np.stack(
        [of[np.searchsorted(of, column)] for of, column in zip(sizes, batches.T, strict=True)], 1
    )
