"""The best boxes for batches with several sizes, such as batch x length, and full grids beside
them.

A box is a graph with one size in each dimension; it runs the batches that are no larger in any. A
box is a candidate if each of its sizes is that of a batch which it holds: another one shrinks to
such a box, holds the same batches, and takes no longer. Where costs are limited, all boxes of the
grid of sizes are candidates, since a larger one may cost less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf, prod
from operator import itemgetter
from typing import get_args

import numpy as np

from cgplan.config import Config, Dim
from cgplan.errors import BudgetError, PlanError
from cgplan.modes import Key
from cgplan.optimizer.cover import Bools, Purse, best_columns, exchanged, total_of
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
ROUNDS = 3  # of exchanges in each dimension of a grid
EVEN = (np.arange(1, 5), np.arange(1, 9))  # steps of a grid of 4 x 8 evenly spaced sizes
MAP_SIZES = 12  # rows and columns of the map of padding
NO_TIMES = (
    "no step times were given: a step counts 1 us for each element of its box, the product of its "
    "sizes, so that these figures compare padding alone. --step-times FILE gives times"
)


def _held(times: Floats, holds: Bools, weights: Floats) -> Floats:
    """Costs with which no batch is left without a box."""
    return np.where(
        holds,
        times,
        2 * times.max() * weights.sum() / weights.min(),
    )


def least_padded(boxes: Ints, graphs: int) -> list[int]:
    """The boxes, by index, that pad batches least, where all those that one of ``boxes`` holds are
    as frequent.
    """
    axes = [np.unique(column) for column in boxes.T]
    holds = np.asarray((_grid(axes)[:, None] <= boxes).all(axis=-1))
    held = holds.any(axis=1)
    batches = _grid([np.diff(axis, prepend=0) for axis in axes])[held].prod(axis=1) * 1.0
    cost = _held(
        boxes.prod(axis=1) * 1.0,
        holds[held],
        batches,
    )
    return exchanged(
        cost,
        batches,
        Purse.of_graphs(graphs, len(boxes)),
    )


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
    evidence = _Case(
        config,
        traffic,
        surface,
        costs,
        base,
    ).evidence(BOXES if most is None else most // len(lanes))
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
        columns = zip(
            traffic.names,
            self._sizes,
            self._least.T,
            strict=True,
        )
        self._thinned = [
            name for name, sizes, column in columns if not np.isin(column, sizes).all()
        ]
        self._rounded, index = np.unique(
            _up(self._least, self._sizes),
            axis=0,
            return_inverse=True,
        )
        # of ``rounded``
        self._counts: Floats = np.bincount(index.ravel(), self._weights).astype(np.float64)

    def _sizes_of(self, dim: int, most: int) -> Ints:
        """Sizes of the batches in one dimension; of too many those that pad batches least in this
        dimension alone.
        """
        sizes, index = np.unique(self._least[:, dim], return_inverse=True)
        most, weights = min(most, sizes.size), np.cumsum([0.0, *np.bincount(index, self._weights)])
        paths = best_paths(
            weights[None],
            np.append(0.0, sizes)[None],
            most,
        )
        return np.asarray(sizes[np.array(paths.sizes(most, sizes.size)) - 1])

    def _times(self, boxes: Ints) -> Floats:
        return boxes.prod(-1) * 1.0 if self._surface is None else self._surface.at(boxes)

    def _cost(self, boxes: Ints, holds: Bools) -> Floats:
        times = self._times(boxes.reshape(-1, len(self._dims))).reshape(boxes.shape[:-1])
        return _held(times, holds, self._counts)

    def _candidates(self, most: int) -> tuple[Ints, Bools, Purse]:
        """Boxes to choose among, which batches they hold, [batches, boxes], and what they cost."""
        boxes, batches = _grid(self._sizes), self._rounded[:, None]
        holds = np.asarray((batches <= boxes).all(axis=-1))
        shrunk = np.where(holds[..., None], batches, 0).max(axis=0)
        places = map(np.searchsorted, self._sizes, shrunk.T)
        index = np.ravel_multi_index([*places], [sizes.size for sizes in self._sizes])
        figures = self._figures(boxes)
        cheaper = (figures < figures[:, index]).any(axis=0)
        some = holds.any(axis=0) & (cheaper | (index == np.arange(len(boxes))))
        boxes, holds, figures = boxes[some], holds[:, some], figures[:, some]
        _, group = np.unique(
            boxes[:, 1:],
            axis=0,
            return_inverse=True,
        )
        least = [float(np.where(holds, of, inf).min(axis=1).max()) for of in figures[2:]]
        memory, seconds = inf, inf
        if self._costs is not None:
            if self._budget.memory is not None:
                memory = self._budget.memory - self._costs.workspace_bytes
            if self._budget.capture_time is not None:
                seconds = self._budget.capture_time - self._costs.once_seconds
        purse = Purse(
            graphs=most,
            memory=memory,
            seconds=seconds,
            driver=figures[0],
            took=figures[1],
            pool=figures[2],
            static=figures[3],
            group=group.ravel(),
            least=(least[0], least[1]),
        )
        return boxes, holds, purse

    def _figures(self, boxes: Ints) -> Floats:
        """[4, boxes] bytes of the driver, seconds, bytes of the pool and of the static buffers."""
        figures, costs = np.zeros((4, len(boxes))), self._costs
        if costs is None:
            return figures
        for index, (first, *rest) in enumerate(boxes.tolist()):
            for mode, key in self._keys([(first, *rest)]):
                figures[0, index] += costs.driver_bytes((mode, key))
                figures[1, index] += costs.seconds((mode, key))
                pool = costs.pool_bytes(mode, key.elements)
                figures[2, index] = max(figures[2, index], pool)
            figures[3, index] = costs.static_bytes(first, tuple(rest))
        return figures

    def _keys(self, boxes: Sequence[Sequence[int]]) -> Iterator[Key]:
        for first, *rest in boxes:
            for lane in self._lanes:
                mode, key = key_of(lane, first, self._base)
                yield mode, key._replace(sizes=tuple(rest))

    def _price(self, boxes: Ints) -> Predicted | None:
        if self._costs is None:
            return None
        return self._costs.of(capture_order(self._keys(boxes.tolist())))

    def _broken(self, boxes: Ints) -> tuple[Limit, ...]:
        """The limits that these boxes break."""
        paid, spent = self._price(boxes), dict[str, float](max_graphs=len(boxes) * len(self._lanes))
        if paid is not None:
            spent |= {"memory": paid.total_bytes, "capture_time": paid.seconds}
        given = self._budget.model_dump(exclude_none=True)
        return tuple(
            name for name in LIMITS if name in spent and spent[name] > given.get(name, np.inf)
        )

    def _best(self, most: int, grid: Ints) -> tuple[Ints, float, tuple[Limit, ...]]:
        """Boxes within the budget, the lower bound, and the limits that the next box would
        break.
        """
        boxes, holds, purse = self._candidates(most)
        cost = self._cost(boxes, holds)
        tight = self._tight(grid, _up(self._least, self._sizes))
        start = [int((boxes == box).all(axis=1).argmax()) for box in tight]
        chosen, bound = best_columns(
            cost,
            self._counts,
            purse,
            start,
        )
        whole = self._least.max(axis=0)[None]
        found = whole
        if holds[:, chosen].any(axis=1).all():
            tried = (
                self._tight(boxes[chosen], self._least),
                boxes[chosen],
                whole,
            )
            found = next((some for some in tried if not self._broken(some)), whole)
        if broken := self._broken(found):
            paid = self._price(whole)
            assert paid is not None, "without costs the number of graphs was looked at before"
            raise BudgetError(
                f"{' and '.join(f'budget.{limit}' for limit in broken)}: no boxes were found that "
                "it pays for and that hold all batches; one for all takes "
                f"{format_bytes(paid.total_bytes)} and {paid.seconds:.3g} s, by costs "
                f"{paid.source}",
                remedy="Raise the budget, or lower max in `dims`: larger batches run eagerly.",
            )
        return found, bound, self._binding(found, boxes)

    def _binding(self, found: Ints, boxes: Ints) -> tuple[Limit, ...]:
        """The limits that the box breaks which would save most."""
        holds = (self._least[:, None] <= boxes).all(axis=-1)
        times = np.where(holds, self._times(boxes), inf)
        now = self._times(found)[self._runs_in(found)]
        steps = self._weights @ np.minimum(now[:, None], times)
        if steps.min() >= self._weights @ now * (1 - EXACT):
            return ()
        more = np.concatenate([found, boxes[[int(steps.argmin())]]])
        return self._broken(self._tight(more, self._least))

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
                boxes = np.repeat(
                    _up(self._rounded, sizes)[:, None],
                    self._sizes[dim].size,
                    axis=1,
                )
                boxes[..., dim] = self._sizes[dim]
                cost = self._cost(boxes, self._rounded[:, [dim]] <= self._sizes[dim])
                purse = Purse.of_graphs(int(shape[dim]), cost.shape[1])
                columns = exchanged(cost, self._counts, purse)
                sizes[dim] = self._sizes[dim][np.sort(columns)]
            found.append((total_of(cost, self._counts, columns), _grid(sizes)))
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
        grid = self._best_grid(most)
        boxes, lower, binding = self._best(most, grid)
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
        uses = zip(
            boxes.tolist(),
            counts / total,
            1 - real / counts / boxes.prod(1),
            strict=True,
        )
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
