"""Why a plan has the graphs that it has: figures that are saved with it and shown beside it."""

from typing import Any, Literal

from cgplan.config.schema import Record
from cgplan.planning.plan import LaneRecord, LeftOut
from cgplan.pricing import GraphCosts
from cgplan.traffic.histogram import Goal, Service
from cgplan.units import counted

ASKED_FOR = "asked for"
EAGER_ROW = "eager"
NOTHING_SAVED = "no graph saves time for this traffic: eager steps take no longer"
NOT_WORTH_IT = "no graph of this plan is worth it"
MOST_UNMEASURED = 0.5  # share of the steps, above which a plan is extrapolated
PlanLimit = Literal["max_graphs", "memory", "capture_time", "slo"]


def ladder_words(name: str) -> str:
    return "the configured sizes" if name == "configured" else f"the {name} ladder"


def limit_words(limit: PlanLimit) -> str:
    return "the SLO, which holds without more" if limit == "slo" else f"budget.{limit}"


def of_costs(costs: GraphCosts | None) -> dict[str, Any]:
    """Where memory and seconds come from, for ``Evidence``."""
    if costs is None:
        return {}
    return {
        "costs_source": costs.source,
        "costs_estimated": costs.estimated,
        "costs_notes": costs.notes,
    }


class Expected(Record):
    """Mean microseconds of a step with the plan's graphs, without graphs (None: not known), and
    with each batch at its best (``bound``), in a graph or eager; and of the plan's steps of uniform
    decode alone, and of the others.
    """

    plan: float
    eager: float | None
    bound: float
    decode_us: float | None = None
    mixed_us: float | None = None


class ParetoPoint(Record):
    """The best plan with so many graphs, if nothing else were limited; bytes of device memory and
    seconds of start-up are None where costs are not known.
    """

    graphs: int
    expected_us: float
    bytes: int | None = None
    seconds: float | None = None


class LadderPoint(ParetoPoint, extra="ignore"):
    """A ladder, the sizes that the configuration lists, the graphs asked for in another mode, or no
    graph (``EAGER_ROW``).

    Attributes:
        drafts: Graphs of a draft model, which ``graphs`` does not count.
        no_gain: Steps are within 1% of the bound.
        decode_us, mixed_us: As in ``Expected``.
    """

    name: str
    padding: float
    no_gain: bool = False
    decode_us: float | None = None
    mixed_us: float | None = None
    drafts: int = 0

    @property
    def num_graphs(self) -> int:
        return self.graphs + self.drafts

    @property
    def words(self) -> str:
        if self.name == ASKED_FOR:
            asked = f"the {self.num_graphs} graphs asked for"
            return asked if self.graphs else "no graphs, as asked for"
        whose = "'" if self.name == "configured" else "'s"
        return f"{ladder_words(self.name)}{whose} {counted(self.num_graphs, 'graph')}"


class ServicePoint(Record):
    """What requests get by some graphs; ``load``: of several, which one."""

    name: str
    graphs: int
    service: Service
    load: str = ""


class LoadPoint(Record, extra="ignore"):
    """One of several traffics of a plan: mean microseconds of a step with the plan, with the
    configured ladder.
    """

    source: str
    expected_us: float
    ladder_us: float | None = None


class SizeUse(LaneRecord):
    """The steps that one graph of ``size`` tokens runs, or (mode NONE, size None) the eager steps.

    Attributes:
        share, padding: Of all steps, and of the tokens that it runs; from 0 to 1.
        sizes: In the dimensions after the first one.
        step_us, own_us: Mean microseconds of these steps, and at their batches' own sizes; None
            for boxes.
    """

    size: int | None
    share: float
    padding: float
    sizes: tuple[int, ...] = ()
    step_us: float | None = None
    own_us: float | None = None


class LaneSizes(LaneRecord):
    """Capture sizes of one lane, in tokens, ascending."""

    sizes: tuple[int, ...]


class NextGraph(Record):
    """What one graph more, or one size of a list, brings the traffic alone, if only their number
    counted: microseconds a step, and percent of it.
    """

    microseconds: float
    percent: float


class PlanCheck(Record):
    """A plan on other traffic than it was made for.

    Attributes:
        points: The plan, the best ones for this traffic, and the ladders.
        regret, decode_regret: How much longer steps are than with the best that the plan's budget
            allows, and those of uniform decode alone (None: there is none); 0.01 is 1% longer.
        slo_missed: As in ``Evidence``.
    """

    kind: Literal["plan_check"] = "plan_check"
    schema_version: int = 1
    traffic_source: str
    traffic_weight: float
    times_source: str
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    points: tuple[LadderPoint, ...]
    regret: float
    decode_regret: float | None = None
    uses: tuple[SizeUse, ...]
    verdict: str
    slo_missed: str | None = None


class Evidence(Record, extra="ignore"):
    """Everything that a plan's report shows.

    Attributes:
        costs_source, costs_notes: Of memory and seconds; None: not known, as these then.
        step_times: ``StepTimes`` in JSON, which a check takes unless it is given others.
        unbounded: Limits of the budget that bound nothing, because costs are not known.
        rule: How the number of graphs was chosen.
        insurance: Share of steps that were planned for, and that the traffic need not show.
        one_list: Whether all lanes have the same sizes, as vLLM captures them.
        apart: Whether FULL graphs run decode alone, and PIECEWISE ones prefill alone, as in SGLang.
        loads: Of several traffics, each; other loads, which are insured, come last.
        other_loads: Their share of the steps that were planned for.
        service: Of the plan, of the graphs asked for, and without graphs.
        unmeasured, unmeasured_graphs: Share of the steps at sizes above those that were timed, and
            how many graphs have such sizes.
        decided, decisions: On the SLO and a changed mode, and on the rest.
        slo_missed: How the plan misses an SLO that none holds.
        asked: The ladder asked for; None: the first.
        keep: Whether its graphs are as good as the plan's, and not more.
        binding: The limits that the next better plan breaks.
        next_graph: None if the curve ends there, or memory or time binds.
        pareto: From one graph to where more bring nothing.
        padding: Share of all tokens that run, those of eager steps included; from 0 to 1.
        failed: Keys that could not be captured.
        notes, warnings: Assumptions of the planner, and lint.
    """

    kind: Literal["evidence"] = "evidence"
    traffic_source: str
    traffic_weight: float
    traffic_notes: tuple[str, ...]
    times_source: str
    times_notes: tuple[str, ...] = ()
    costs_source: str | None = None
    costs_estimated: bool | None = None
    rule: str
    graphs: int
    bytes: int | None = None
    seconds: float | None = None
    expected_us: Expected
    binding: tuple[PlanLimit, ...]
    next_graph: NextGraph | None = None
    lanes: tuple[LaneSizes, ...] = ()
    uses: tuple[SizeUse, ...]
    pareto: tuple[ParetoPoint, ...] = ()
    ladders: tuple[LadderPoint, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    verdict: str
    costs_notes: tuple[str, ...] = ()
    unbounded: tuple[PlanLimit, ...] = ()
    # absent from plans of earlier versions, as all from costs_notes on
    padding: float | None = None
    failed: tuple[LeftOut, ...] = ()
    insurance: float = 0.0
    other_loads: float = 0.0
    one_list: bool = False
    apart: bool = False
    loads: tuple[LoadPoint, ...] = ()
    service: tuple[ServicePoint, ...] = ()
    slo: tuple[Goal, ...] = ()
    slo_missed: str | None = None
    asked: str | None = None
    keep: bool = False
    decided: tuple[str, ...] = ()
    decisions: tuple[str, ...] = ()
    step_times: dict[str, Any] | None = None
    unmeasured: float = 0.0
    unmeasured_graphs: int = 0
    unsure: tuple[str, ...] = ()
    objective: str = "robust"
    kv_tokens: int | None = None
    replicas: int = 1

    def as_point(self, name: str) -> LadderPoint:
        """The plan's own figures, as a row beside ladders."""
        # no padding in earlier versions
        own = self.model_dump(include={"graphs", "bytes", "seconds", "padding"})
        expected = self.expected_us.model_dump(include={"decode_us", "mixed_us"})
        return LadderPoint.model_construct(
            name=name, expected_us=self.expected_us.plan, **own, **expected
        )
