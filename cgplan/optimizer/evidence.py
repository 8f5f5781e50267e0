"""Why a plan has the graphs that it has: figures that are saved with it and shown beside it."""

from __future__ import annotations

from typing import Literal

from cgplan.planning.costs import Record
from cgplan.planning.plan import LaneRecord, LeftOut

NO_BATCH = "no batch would run in it"
Limit = Literal["max_graphs", "memory", "capture_time"]


class Expected(Record):
    """Mean microseconds of a step with the plan's graphs, without graphs, and if each batch had a graph of its own size
    in the best of its modes (no plan is below that ``bound``).
    """

    plan: float
    eager: float
    bound: float


class ParetoPoint(Record):
    """The best plan with so many graphs, if nothing else were limited: mean microseconds of a step, bytes of device
    memory, and seconds of start-up (both None where costs are not known).
    """

    graphs: int
    expected_us: float
    bytes: int | None
    seconds: float | None


class LadderPoint(Record):
    """A ladder on the same traffic.

    Attributes:
        name: Of the ladder; ``configured`` for the sizes that the configuration lists.
        graphs, expected_us, bytes, seconds: As for a ParetoPoint.
        padding: Share of all tokens that run which are padding, from 0 to 1; eager steps included.
        unused: Graphs that run no batch of the traffic.
        equal: The plan with the fewest graphs that is no slower; None if the curve does not reach that far.
        alike: The same for a step that is at most 0.1% longer.
        no_gain: Whether steps are within 1% of the bound: no other sizes make them notably faster.
    """

    name: str
    graphs: int
    expected_us: float
    bytes: int | None
    seconds: float | None
    padding: float
    unused: int
    equal: ParetoPoint | None
    alike: ParetoPoint | None
    no_gain: bool


class SizeUse(LaneRecord):
    """The steps that one graph of the plan runs, or (mode NONE) the eager steps.

    Attributes:
        size: Of the graph, in tokens; None for eager steps.
        share: Of all steps, from 0 to 1.
        padding: Share of the tokens it runs which are padding, from 0 to 1.
    """

    size: int | None
    share: float
    padding: float


class LaneSizes(LaneRecord):
    """Capture sizes of one lane, in tokens, ascending."""

    sizes: tuple[int, ...]


class NotWorth(LaneRecord):
    """Sizes of one lane at which a graph brings nothing: tokens from ``first`` to ``last``, and why."""

    num_active_loras: int = 0  # absent from plans of earlier versions
    first: int
    last: int
    reason: str


class NextGraph(Record):
    """The gain of one graph more, if only their number counted: microseconds a step, and percent of it."""

    microseconds: float
    percent: float


class Evidence(Record):
    """Everything that a plan's report shows.

    Attributes:
        traffic_source, traffic_weight, traffic_notes: The traffic that the plan is for.
        times_source, times_notes: Where the step times come from.
        costs_source, costs_estimated, costs_notes: Where memory and seconds come from, and why they may be other ones
            than this configuration's; None: not known.
        unbounded: Limits of the budget that could not bound the plan, because costs are not known.
        rule: How the number of graphs was chosen, in words.
        graphs, bytes, seconds: Of the plan; bytes and seconds None where costs are not known.
        expected_us: Mean microseconds of a step.
        lower_bound_us: Within the same limits, no plan of the same lanes has a shorter mean step.
        gap: (plan - lower bound) / lower bound of the mean step.
        exact: Whether no plan within the limits is better (to 1e-6), the tolerance that ``rule`` names apart.
        binding: The limits that the next better plan breaks; empty if none does.
        next_graph: Worth of one more; None if the curve ends there.
        lanes, uses: Sizes of the plan, and the steps that each graph runs.
        pareto: From one graph to where more bring nothing.
        ladders: Those that fit the configuration.
        padding: Share of all tokens that run which are padding, from 0 to 1; eager steps included.
        left_out: Sizes of the configured list or ladder that the plan does not have.
        failed: Keys that could not be captured, with the error; the plan does without them.
        not_worth: Where graphs bring nothing.
        notes, warnings, verdict: Assumptions of the planner, lint, and a summary in one sentence.
    """

    kind: Literal["evidence"] = "evidence"
    traffic_source: str
    traffic_weight: float
    traffic_notes: tuple[str, ...]
    times_source: str
    times_notes: tuple[str, ...]
    costs_source: str | None
    costs_estimated: bool | None
    rule: str
    graphs: int
    bytes: int | None
    seconds: float | None
    expected_us: Expected
    lower_bound_us: float
    gap: float
    exact: bool
    binding: tuple[Limit, ...]
    next_graph: NextGraph | None
    lanes: tuple[LaneSizes, ...]
    uses: tuple[SizeUse, ...]
    pareto: tuple[ParetoPoint, ...]
    ladders: tuple[LadderPoint, ...]
    not_worth: tuple[NotWorth, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    verdict: str
    costs_notes: tuple[str, ...] = ()
    unbounded: tuple[Limit, ...] = ()
    padding: float | None = None  # absent from plans of earlier versions, as all from costs_notes on
    left_out: tuple[LeftOut, ...] = ()
    failed: tuple[LeftOut, ...] = ()
