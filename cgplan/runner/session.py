"""CaptureSession: captures a plan in one go; frees everything if it fails."""

import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from cgplan.backends import GraphBackend
from cgplan.captures.audit import prove
from cgplan.captures.captured_keys import CapturedKeys, Progress, fitting
from cgplan.captures.failures import drop_locals
from cgplan.captures.model_graphs import (
    SINGLE_RANK,
    BeforeKey,
    ModelGraphs,
    RankSync,
    RealRows,
    State,
)
from cgplan.config import Config
from cgplan.errors import CaptureMemoryError, CgplanError, ConfigError, PlanError
from cgplan.graphs.wrapper import GraphPool, PoolUse
from cgplan.modes import Key
from cgplan.piecewise.routes import SplitRoute
from cgplan.planning import Plan, config_hash
from cgplan.planning.difference import mismatches, named, unused_settings
from cgplan.planning.plan import refuse_auto
from cgplan.runner.runner import GraphRunner
from cgplan.runner.stats import RunnerStats


@dataclass(eq=False, repr=False)
class CaptureSession:
    """Captures the keys of a plan within the budget, and returns a runner.

    Args:
        model: Called with the declared inputs by name.
        progress: Called before each key.
        pool: Absent: by ``compilation.pool``.
        together: The sessions of other ranks.
        state: The objects whose tensors and attributes the model uses; absent: the model.
        before_key: Sets an engine's context ahead of each key's runs. It gets the runtime mode, the
            descriptor and static rows by name, which hold padding.
        real_rows: Absent: captures run on padding.
        route: Of a trial of FULL graphs, with its traces.
        trial: A block whose end frees the runner, then puts the model back; absent: none.
        began: When the report begins, by ``time.perf_counter()``; absent: now.

    Raises ConfigError for ``cudagraph_mode: AUTO``, which ``choose_mode`` decides.
    """

    plan: Plan
    model: Callable[..., Any]
    backend: GraphBackend
    config: Config
    _: KW_ONLY
    progress: Progress | None = None
    pool: GraphPool | None = None
    name: str = "runner"
    together: RankSync = SINGLE_RANK
    state: State = None
    before_key: BeforeKey | None = None
    began: float | None = None
    real_rows: RealRows | None = None
    route: SplitRoute | None = None
    trial: ExitStack | None = None

    def __post_init__(self) -> None:
        refuse_auto(self.config.compilation)
        policy = self.config.compilation.pool
        if self.pool and policy != "shared":
            raise CgplanError(
                f"compilation.pool is {policy}, but the runner was given a pool",
                remedy="Set compilation.pool: shared, or give it no pool.",
            )

    def run(self, stats: RunnerStats | None = None) -> GraphRunner:
        """Capture all keys, or none yet with ``capture_policy: lazy``. With a budget, a lack of
        memory ends the captures without an error. ``stats`` of an earlier runner go on.

        Raises:
            CaptureError: a key could not be captured; everything of this session is freed.
            ModelError: the model failed before its capture.
            BackendError: torch or the device lacks an input's dtype.
            PlanError: the plan was made from another configuration.
            ConfigError: graphs on demand, with several ranks.
            DistributedError: another rank failed.
            CgplanError: a call of another member of the pool is under way.
        """
        self._refuse_misfits()
        on_demand = self.config.compilation.is_lazy
        keys = () if on_demand else self.plan.keys
        use = self.pool.use if self.pool else PoolUse()
        with use.held(self.name):
            captured = self._capture_plan(self.plan, keys, on_demand, self.began)
            return GraphRunner(captured, self._capture_plan, use, self.name, stats)

    def _refuse_misfits(self) -> None:
        rules = self.plan.key_rules
        if rules != "vllm_v1":
            raise ConfigError(
                f"compilation.key_rules is {rules}, which only plans follow",
                remedy="Set compilation.key_rules: vllm_v1 for a capture.",
            )
        made = self.plan.config_hash
        own = config_hash(self.config)
        policy = self.config.compilation.capture_policy
        has_ranks = self.together is not SINGLE_RANK
        if made != own:
            if has_ranks:
                raise PlanError(
                    f"the plan of all ranks was made from configuration {made}; this rank has "
                    f"{own}",
                    remedy="Start all ranks from one file; agree_on_setup(), called before "
                    "agree_on_plan(), names the setting that differs.",
                )
            changes = (
                *mismatches(self.plan, self.config),
                *unused_settings(self.plan, self.config),
            )
            raise PlanError(
                f"the plan was made from configuration {made}; this session has {own}: "
                f"{named(changes)}",
                remedy="Pass build_plan(config) of the same configuration.",
            )
        if policy != "eager" and has_ranks:
            raise ConfigError(
                f"capture_policy is {policy}, and several ranks capture together",
                remedy="Set compilation.capture_policy: eager; ranks capture the same graphs in "
                "the same order.",
            )

    def _capture_plan(
        self,
        asked: Plan,
        keys: Collection[Key],
        on_demand: bool,
        began: float | None = None,
    ) -> CapturedKeys:
        backend = self.backend
        config = self.config
        ranks = self.together
        graphs = None
        try:
            backend.release_cached()
            began = began or time.perf_counter()
            before = backend.memory()
            free = ranks.begin(asked, before.free)
            wanted = asked
            if keys and not on_demand:
                wanted = fitting(asked, config, free)
            graphs = ModelGraphs(
                wanted,
                config,
                self.model,
                backend,
                state=self.state,
                before_key=self.before_key,
                real_rows=self.real_rows,
                pool=self.pool,
                ranks=ranks,
                on_demand=on_demand,
            )
            if self.trial:
                self.trial.enter_context(graphs.rehearsing())
            graphs.choose_route(self.route)
            captured = CapturedKeys(
                graphs,
                asked,
                wanted,
                before,
                self._prove,
                self.progress,
            )
            now = set(keys)
            captured.start_up([key for key in wanted.keys if key in now], began)
        except BaseException as error:
            drop_locals(error)
            failure = ranks.failed(error)
            if graphs:
                graphs.free()
            if failure is error:
                raise
            raise failure from error
        return captured

    def _prove(self, graphs: ModelGraphs, plan: Plan) -> None:
        twin = None
        has_wrappers = None in map(graphs.entry, plan.keys)
        if graphs.is_alone and not graphs.on_demand and not has_wrappers:
            config = self.config.with_values("compilation", audit="off")
            session = replace(
                self,
                plan=plan.changed(config_hash=config_hash(config)),
                config=config,
                pool=None,
                progress=None,
                trial=None,
            )
            try:
                twin = session.run()
            except CaptureMemoryError as error:
                drop_locals(error)
        if twin is None:
            graphs.facts.note(
                "audit: prove: no second capture: on demand, several ranks, wrappers in the model, "
                "or out of memory"
            )
            return
        try:
            prove(graphs, twin.graphs)
        finally:
            twin.close()
