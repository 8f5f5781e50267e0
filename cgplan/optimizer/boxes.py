"""Boxes for batches with several sizes, such as batch x length, and other grids beside them.

A box is a graph with one size in each dimension; it runs the batches that are no larger in any.
The boxes of the grid of the traffic's sizes are the candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import inf

import numpy as np
import numpy.typing as npt

from cgplan.config import Config, Dim
from cgplan.errors import BudgetError, ConfigError, PlanError
from cgplan.modes import Key
from cgplan.optimizer.evidence import (
    EAGER_ROW,
    NOT_WORTH_IT,
    Evidence,
    Expected,
    LadderPoint,
    PlanLimit,
    SizeUse,
    of_costs,
)
from cgplan.optimizer.lint import BETWEEN, bench_of
from cgplan.optimizer.paths import Floats, Ints, best_paths
from cgplan.optimizer.propose import ALIKE, EXACT, NO_GAIN
from cgplan.optimizer.search import ROUNDING
from cgplan.planning.plan import (
    PLANNED_FOR,
    Lane,
    Plan,
    Predicted,
    build_plan,
    capture_fields,
    capture_order,
    lanes_of,
    sizes_of,
)
from cgplan.pricing import GraphCosts
from cgplan.traffic.histogram import SizeCounts
from cgplan.traffic.step_times import StepSurface
from cgplan.units import counted, format_bytes

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Purse:
    """What columns cost, and the limits.

    Attributes:
        graphs, memory, seconds: Limits of columns, bytes and seconds; inf: none.
        figures: [4, columns] bytes of the driver, seconds, bytes of the pool and of static buffers.
            The largest pool counts, and the largest static buffers of each group.
        groups: Column c is of group c % groups, in which neither of these falls.
    """

    graphs: int
    memory: float
    seconds: float
    figures: Floats
    groups: int = 1

    @classmethod
    def of_graphs(
        cls,
        graphs: int,
        columns: int,
    ) -> Purse:
        return cls(
            graphs,
            np.inf,
            np.inf,
            np.zeros((4, columns)),
        )

    def pays_beside(self, chosen: list[int]) -> Bools:
        """Whether the limits pay for each column beside the chosen ones."""
        driver, took, pool, static = self.figures
        held = np.zeros_like(static)
        held[chosen] = static[chosen]
        by_group = held.reshape(-1, self.groups)
        largest = by_group.max(axis=0)
        grown = static.reshape(-1, self.groups) - largest
        grown = np.maximum(grown, 0.0)
        memory = driver + driver[chosen].sum()
        memory += np.maximum(
            pool,
            pool[chosen].max(initial=0.0),
        )
        memory += largest.sum()
        memory += grown.ravel()
        seconds = took + took[chosen].sum()
        is_paid = (memory <= self.memory) & (seconds <= self.seconds)
        return np.asarray(is_paid & (len(chosen) < self.graphs))


def filled(cost: Floats, weights: Floats) -> Floats:
    """Finite costs with which no row is left without a column that holds it."""
    is_held = np.isfinite(cost)
    rarest = weights.min() / weights.sum()
    missed = 2 * cost[is_held].max() / rarest
    return np.where(is_held, cost, missed)


def exchanged(
    cost: Floats,
    weights: Floats,
    purse: Purse,
    start: Sequence[int] = (),
) -> tuple[list[int], float]:
    """Columns chosen one by one for the most gain, then exchanged for others, and their total.
    Begins with those of ``start`` that are paid for, or with the one of the least largest cost.
    """
    best: list[int] = []
    for column in start or [int(cost.max(axis=0).argmin())]:
        if purse.pays_beside(best)[column]:
            best.append(column)
    most = cost.max()
    now = cost[:, best].min(axis=1, initial=most)
    total = float(weights @ now)

    def more(then: Floats, now: Floats) -> Floats:
        """What columns gain more beside costs ``now`` of rows than beside ``then``."""
        rows = np.flatnonzero(then != now)
        own = cost[rows]
        saved = np.maximum(
            now[rows, None] - own,
            0.0,
        )
        saved -= np.maximum(
            then[rows, None] - own,
            0.0,
        )
        gained: Floats = weights[rows] @ saved
        return gained

    gains = more(np.zeros_like(now), now)
    idle = 0
    while idle <= len(best):
        first = min(idle, 1)  # one more, then one in the place of the first
        rest = best[first:]
        before = cost[:, rest].min(axis=1, initial=most)
        paid = purse.pays_beside(rest)
        gains_beside = gains + more(now, before)
        saved = paid * gains_beside
        column = int(saved.argmax())
        after = float(weights @ before - saved[column])
        if after < total * (1 - ROUNDING):
            best = [*rest, column]
            total = after
            then = now
            now = np.minimum(
                before,
                cost[:, column],
            )
            gains += more(then, now)
            idle = 0
        else:
            best = [*rest, *best[:first]]
            idle += 1
    return best, total


TRIES = 50  # other starts of a search, for which half of the best boxes are drawn anew
EFFORT = 1.5e9  # costs times boxes, by which these are fewer
CANDIDATES = 1600  # boxes to choose among, about
PRICED: tuple[PlanLimit, ...] = ("memory", "capture_time")
BOXES = 32  # where no budget says how many
NO_TIMES = (
    "no step times were given: a step counts 1 us for each element, the product of its sizes as "
    "often as an input has them, so these sizes are for the least padding: measure times by "
    "`cgplan bench FILE --output bench.json`, and give --step-times bench.json"
)


def least_padded(boxes: Ints, graphs: int) -> list[int]:
    """The boxes, by index, that pad batches least, where all those that one of ``boxes`` holds are
    as frequent.
    """
    axes = [np.unique(column) for column in boxes.T]
    holds = _holds(
        boxes,
        _grid(axes),
    )
    is_held = holds.any(axis=1)
    steps = [np.diff(axis, prepend=0) for axis in axes]
    batches = _elements(_grid(steps))[is_held]
    cost = np.where(
        holds[is_held],
        _elements(boxes),
        inf,
    )
    purse = Purse.of_graphs(graphs, len(boxes))
    return exchanged(filled(cost, batches), batches, purse)[0]


def dims_of(config: Config) -> list[Dim]:
    """The dimensions of a batch in the order of a box's sizes."""
    tokens = Dim(
        "num_tokens",
        max=config.scheduler.max_num_batched_tokens,
    )
    return [config.dims.get(name, tokens) for name in config.dim_names]


def propose_boxes(
    config: Config,
    traffic: SizeCounts,
    surface: StepSurface | None = None,
    costs: GraphCosts | None = None,
) -> Plan:
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

    def plan_of(boxes: Sequence[Sequence[int]]) -> Plan:
        boxed = config.with_values("compilation", boxes=tuple(boxes))
        return build_plan(boxed)

    largest = tuple(dim.top for dim in dims_of(config))
    base = plan_of([largest])
    lanes = lanes_of(base.mode, base.lora_cases)
    most = config.budget.max_graphs
    if not lanes:
        raise PlanError(
            "the resolved cudagraph_mode has no graphs",
            remedy="Set another compilation.cudagraph_mode.",
        )
    if most is not None and most < len(lanes):
        raise BudgetError(
            f"budget.max_graphs is {most}, too few for {' and '.join(map(str, lanes))}",
            remedy=f"Raise it to {len(lanes)}, which one box takes.",
        )
    problem = _BoxProblem(
        config,
        traffic,
        surface,
        costs,
        base,
        lanes,
    )
    evidence = problem.evidence(BOXES if most is None else most // len(lanes))
    plan = plan_of([(use.size or 0, *use.sizes) for use in evidence.uses])
    return plan.changed(
        predicted=costs and costs.of(plan.keys),
        **capture_fields(config),
        sizes_source=f"{PLANNED_FOR} {traffic.source}",
        evidence=evidence.model_dump(mode="json"),
    )


@dataclass
class _BoxProblem:
    """Batches, and the sizes that boxes may have. Arrays of sizes and boxes are [n, dimensions]."""

    config: Config
    traffic: SizeCounts
    surface: StepSurface | None
    costs: GraphCosts | None
    base: Plan
    lanes: Sequence[Lane]

    def __post_init__(self) -> None:
        traffic = self.traffic
        self._dims = dims_of(self.config)
        powers = []
        for name in traffic.names:
            most = 1
            for tensor in self.config.inputs.values():
                symbols = [extent.symbol for extent in tensor.extents]
                most = max(most, symbols.count(name))
            powers.append(most)
        self._powers = np.array(powers)  # how often an input has each size
        given = self.config.budget.model_dump(exclude_none=True)
        self._given = {limit: most * (1 + ROUNDING) for limit, most in given.items()}
        batches = np.array([*traffic.counts])
        self._weights = np.array(
            [*traffic.counts.values()],
            dtype=np.float64,
        )
        self._total = float(self._weights.sum())
        self._real = self._weights * self._work(batches)
        multiples = np.array([dim.multiple_of for dim in self._dims])
        batches = np.maximum(
            batches,
            [dim.min for dim in self._dims],
        )
        self._least = -(-batches // multiples) * multiples  # the smallest box of each batch
        dims = len(self._dims)
        most = round(CANDIDATES ** (1 / dims))
        self._sizes = [self._sizes_of(dim, most) for dim in range(dims)]
        self._thinned = [
            name
            for name, column in zip(traffic.names, self._least.T, strict=True)
            if np.unique(column).size > most
        ]
        self._rounded, index = np.unique(
            _up(self._least, self._sizes),
            axis=0,
            return_inverse=True,
        )
        # of ``rounded``
        self._counts = np.bincount(index.ravel(), self._weights).astype(np.float64)

    def _sizes_of(
        self,
        dim: int,
        most: int,
    ) -> Ints:
        """Sizes of the batches in one dimension; of too many those that pad batches least in this
        dimension alone.
        """
        sizes, index = np.unique(
            self._least[:, dim],
            return_inverse=True,
        )
        most = min(most, sizes.size)
        weights = np.cumsum(np.bincount(index, self._weights))
        paths = best_paths(
            np.append(0.0, weights)[None],
            np.append(0.0, sizes)[None],
            most,
        )
        picked = paths.sizes(most, sizes.size)
        return np.asarray(sizes[np.array(picked) - 1])

    def _times(self, boxes: Ints) -> Floats:
        if self.surface is None:
            return self._work(boxes)
        return self.surface.at(boxes)

    def _work(self, boxes: Ints) -> Floats:
        """Elements of the input that has each size most often."""
        return _elements(boxes**self._powers)

    def _purse(
        self,
        boxes: Ints,
        most: int,
    ) -> Purse:
        costs = self.costs
        if costs is None:
            return Purse.of_graphs(most, len(boxes))
        figures = np.zeros((4, len(boxes)))
        for index in range(len(boxes)):
            paid = costs.of(self._keys(boxes[[index]]))
            figures[:, index] = (
                paid.driver_bytes,
                paid.seconds - costs.once_seconds,
                paid.pool_bytes,
                paid.static_bytes,
            )
        memory = self._given.get("memory", inf)
        memory -= costs.workspace_bytes
        seconds = self._given.get("capture_time", inf)
        seconds -= costs.once_seconds
        return Purse(
            most,
            max(memory, 1),
            max(seconds, 1e-9),
            figures,
            groups=len(boxes) // self._sizes[0].size,
        )

    def _keys(self, boxes: Ints) -> tuple[Key, ...]:
        keys = []
        base = self.base
        for first, *rest in boxes.tolist():
            for lane in self.lanes:
                keys.append(
                    lane.key(
                        first,
                        base.query_len,
                        base.max_num_seqs,
                        tuple(rest),
                    )
                )
        return capture_order(keys)

    def _price(self, boxes: Ints) -> Predicted | None:
        if self.costs is None:
            return None
        return self.costs.of(self._keys(boxes))

    def _broken(self, boxes: Ints) -> list[PlanLimit]:
        graphs = len(boxes) * len(self.lanes)
        spent: dict[PlanLimit, float] = {"max_graphs": graphs}
        paid = self._price(boxes)
        if paid:
            spent["memory"] = paid.total_bytes
            spent["capture_time"] = paid.seconds
        return [limit for limit, used in spent.items() if used > self._given.get(limit, inf)]

    def _best(self, most: int) -> tuple[Ints, list[PlanLimit]]:
        """Boxes, and the limits that the next box would break."""
        boxes = _grid(self._sizes)
        holds = _holds(boxes, self._rounded)
        times = np.where(holds, self._times(boxes), inf)
        cost = filled(times, self._counts)
        purse = self._purse(boxes, most)
        rng = np.random.default_rng(0)
        chosen, least = exchanged(
            cost,
            self._counts,
            purse,
        )
        tries = min(
            TRIES,
            EFFORT / cost.size / most,
        )
        rounds = 1 + int(tries)
        for _ in range(rounds):
            number = len(chosen)
            others = rng.integers(
                len(boxes),
                size=number,
            )
            is_kept = rng.random(number) < 0.5
            start = np.where(
                is_kept,
                chosen,
                others,
            )
            found, total = exchanged(
                cost,
                self._counts,
                purse,
                start.tolist(),
            )
            if total < least:
                chosen = found
                least = total
        whole = self._least.max(axis=0)[None]
        tried = [whole]
        if holds[:, chosen].any(axis=1).all():
            some = boxes[chosen]
            tried = [self._tight(some), some, whole]
        for some in tried:
            broken = self._broken(some)
            if not broken:
                return some, self._binding(some, boxes)
        paid = self._price(whole)
        assert paid, "without costs the number of graphs was looked at before"
        limits = [f"budget.{limit}" for limit in broken]
        raise BudgetError(
            f"{' and '.join(limits)}: no boxes were found that it pays for and that hold all "
            f"batches; one for all takes {format_bytes(paid.total_bytes)} and "
            f"{paid.seconds:.3g} s, by costs {paid.source}",
            remedy="Raise the budget, or lower max in `dims`: larger batches run eagerly.",
        )

    def _binding(self, found: Ints, boxes: Ints) -> list[PlanLimit]:
        times = np.where(
            _holds(boxes, self._least),
            self._times(boxes),
            inf,
        )
        runs = self._runs_in(found)
        now = self._times(found)[runs]
        step = self._weights @ now
        steps = self._weights @ np.minimum(now[:, None], times)
        best = int(steps.argmin())
        if steps[best] >= step * (1 - EXACT):
            return []
        more = np.append(
            found,
            boxes[[best]],
            axis=0,
        )
        return self._broken(self._tight(more))

    def _runs_in(self, boxes: Ints) -> Ints:
        """The box of each batch, as the dispatcher has it: the one with the fewest elements."""
        order = np.argsort(
            _elements(boxes),
            kind="stable",
        )
        holds = _holds(boxes[order], self._least)
        first = holds.argmax(axis=1)
        return np.asarray(order[first])

    def _tight(self, boxes: Ints) -> Ints:
        """Those that run a batch, shrunk to what they run."""
        before = boxes[:0]
        while not np.array_equal(before, boxes):
            before = boxes
            runs = self._runs_in(boxes)
            largest = []
            for box in np.unique(runs):
                held = self._least[runs == box]
                largest.append(held.max(axis=0))
            boxes = np.unique(largest, axis=0)
        return boxes

    def _point(self, name: str, boxes: Ints) -> LadderPoint:
        runs = self._runs_in(boxes)
        paid = self._price(boxes)
        took = self._times(boxes)[runs]
        ran = self._work(boxes)[runs]
        return LadderPoint(
            name=name,
            graphs=len(self.lanes) * len(boxes),
            bytes=None if paid is None else paid.total_bytes,
            seconds=None if paid is None else paid.seconds,
            expected_us=float(self._weights @ took) / self._total,
            padding=1 - self._real.sum() / (self._weights @ ran),
        )

    def _ladders(self) -> dict[str, Ints]:
        found = {}
        by_powers = _grid([sizes_of(dim.changed(sizes=None)) for dim in self._dims])
        with suppress(ConfigError, PlanError):
            asked = {descriptor.box for _, descriptor in build_plan(self.config).keys}
            boxes = np.array(sorted(asked))
            holds = _holds(boxes, self._least).any(axis=1)
            if holds.all() and not np.array_equal(boxes, by_powers):
                found["the configured sizes"] = boxes
        found["powers of two"] = by_powers
        return found

    def _uses(self, boxes: Ints) -> Iterator[SizeUse]:
        runs = self._runs_in(boxes)
        counts = np.bincount(runs, self._weights)
        real = np.bincount(runs, self._real)
        padding = 1 - real / counts / self._work(boxes)
        shares = counts / self._total
        for index, (first, *others) in enumerate(boxes.tolist()):
            yield SizeUse(
                **self.lanes[0]._asdict(),
                size=first,
                sizes=tuple(others),
                share=shares[index],
                padding=padding[index],
            )

    def evidence(self, most: int) -> Evidence:
        boxes, binding = self._best(most)
        order = np.argsort(
            _elements(boxes),
            kind="stable",
        )
        boxes = boxes[order]
        own = self._point("this plan", boxes)
        least = self._times(self._least)
        eager = None
        surface = self.surface
        compared = {}
        measured = boxes.max(axis=0)
        if surface:
            measured = np.array([axis[-1] for axis in surface.axes])
        if surface and surface.eager is not None and self.config.compilation.on_miss == "eager":
            batches = np.array([*self.traffic.counts])
            each = surface._replace(values=surface.eager).at(batches)
            least = np.minimum(least, each)
            eager = float(self._weights @ each) / self._total
            compared[EAGER_ROW] = eager
        bound = float(self._weights @ least) / self._total
        near = bound * (1 + NO_GAIN)
        ladders = []
        if eager is not None:
            no_graph = own.changed(
                name=EAGER_ROW,
                graphs=0,
                bytes=own.bytes and 0,
                seconds=own.seconds and 0.0,
                expected_us=eager,
                padding=0.0,
                no_gain=eager <= near,
            )
            ladders.append(no_graph)
        for name, other in self._ladders().items():
            ladder = self._point(name, other)
            is_near = eager is not None and ladder.expected_us <= near
            ladders.append(ladder.changed(no_gain=is_near))
            words = f"with {name} ({counted(ladder.graphs, 'graph')})"
            compared[words] = ladder.expected_us
        is_far = (boxes > measured).any(axis=1)
        step = own.expected_us
        found = []
        for words, theirs in compared.items():
            by = step / theirs - 1
            longer = "longer" if by > 0 else "shorter"
            change = f"{abs(by):.1%} {longer} than"
            if abs(by) < ALIKE:
                change = "as long as"
            found.append(f"{change} {words}")
        verdict = f"steps {', '.join(found)}"
        warnings = []
        unsure = [*self.traffic.warnings]
        unsure += surface.unsure if surface else [NO_TIMES]
        if eager is not None and step > eager * (1 - NO_GAIN):
            verdict = f"{NOT_WORTH_IT}: {verdict}"
        if surface:
            verdict = surface.doubt + verdict
        unsure += self._between(boxes)
        beyond = self.traffic.beyond
        if beyond:
            share = f"{beyond:,} of {beyond + self._total:,.0f} batches"
            verdict += f"; {share} are left out"
            larger = " or ".join(f"--set dims.{name}.max=N" for name in self.config.dims)
            warnings.append(
                f"{share} are above the max of a dimension: they run eagerly, and no figure has "
                f"them; {larger} has them planned for"
            )
        runs = boxes[self._runs_in(boxes)].T
        for dim, sizes, padded in zip(self._dims[1:], self._least.T[1:], runs[1:], strict=True):
            if isinstance(dim.sizes, tuple):
                unsure += [
                    f"batches of {dim.name} {size} run in larger boxes: right only where padding "
                    f"of {dim.name} has no effect"
                    for size in np.intersect1d(sizes[sizes < padded], dim.sizes)
                ]
        return Evidence(
            traffic_source=f"{self.traffic.source}: {' x '.join(self.traffic.names)}",
            traffic_weight=self._total,
            traffic_notes=tuple(self._notes(boxes)),
            times_source=surface.source if surface else "1 us for each element",
            **of_costs(self.costs),
            unbounded=tuple(
                limit for limit in PRICED if self.costs is None and limit in self._given
            ),
            rule=f"the best {most} boxes of sizes of the traffic within the budget; each of its "
            "batches has a graph",
            graphs=own.graphs,
            unmeasured_graphs=int(is_far.sum()) * len(self.lanes),
            bytes=own.bytes,
            seconds=own.seconds,
            expected_us=Expected(plan=step, eager=eager, bound=bound),
            binding=tuple(binding),
            uses=tuple(self._uses(boxes)),
            ladders=tuple(ladders),
            asked="",
            unsure=tuple(unsure),
            warnings=tuple(warnings),
            verdict=verdict,
            padding=own.padding,
        )

    def _between(self, boxes: Ints) -> Iterator[str]:
        if self.surface:
            axes = self.surface.axes
            ran = boxes[self._runs_in(boxes)]
            inside = np.minimum(ran, [axis[-1] for axis in axes])
            above = _up(inside, axes)
            late = np.maximum(self._times(above) / self._times(ran) - 1, 0.0)
            if self._weights @ late > BETWEEN * self._total:
                share = self._weights[late > 0].sum() / self._total
                between = ran[late > 0]
                sizes = map(np.union1d, axes, between.T)
                yield (
                    f"{share:.1%} of the steps run in graphs between measured sizes: their times "
                    f"are guessed; measure them: {bench_of(self.base, *sizes)}"
                )

    def _notes(self, boxes: Ints) -> Iterator[str]:
        if self._thinned:
            yield (
                f"too many sizes of {' and '.join(self._thinned)}: only those that pad batches "
                "least in their dimension were tried"
            )
        top = [dim.max for dim in self._dims]
        if not (boxes >= top).all(axis=1).any():
            yield (
                f"a batch of {' x '.join(map(str, top))}, the declared max, is in no box: batches "
                "above all boxes run eagerly"
            )


def _grid(sizes: Sequence[Ints | tuple[int, ...]]) -> Ints:
    return np.array(list(product(*sizes)))


def _elements(boxes: Ints) -> Floats:
    return np.asarray(
        boxes.prod(axis=1),
        dtype=np.float64,
    )


def _holds(boxes: Ints, batches: Ints) -> Bools:
    """[batches, boxes]"""
    return np.asarray((batches[:, None] <= boxes).all(axis=-1))


def _up(batches: Ints, sizes: Sequence[Ints | Floats]) -> Ints:
    columns = zip(sizes, batches.T, strict=True)
    return np.stack(
        [of[np.searchsorted(of, column)] for of, column in columns],
        axis=1,
    )
