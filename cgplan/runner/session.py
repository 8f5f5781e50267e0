"""CaptureSession: captures a plan, in order, in one go; frees everything if it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from cgplan.backends import GraphBackend, select_backend
from cgplan.captures.budget import fitting
from cgplan.captures.captured_keys import CapturedKeys, Progress
from cgplan.captures.failures import drop_locals, explain_eager_failure
from cgplan.captures.model_graphs import BeforeKey, ModelGraphs, RealRows
from cgplan.captures.rank_sync import SINGLE_RANK, RankSync
from cgplan.config import Config
from cgplan.errors import ConfigError, PlanError
from cgplan.graphs.ambient import random_state_kept
from cgplan.graphs.pools import GraphPool, PoolUse
from cgplan.modes import CUDAGraphMode, Key
from cgplan.planning import Plan, build_plan, config_hash
from cgplan.planning.build import refuse_auto
from cgplan.reports.records import SplitRecord
from cgplan.runner.runner import GraphRunner


class CaptureSession:
    """Captures the keys of a plan, as far as the configuration's budget goes, and returns a sealed
    runner.

    Args:
        model: Any callable or nn.Module; called with the declared inputs by name.
        progress: Called before each key.
        pool: A pool of the same backend that other runners use too; absent: new ones, as
            ``compilation.pool`` says.
        name: What messages call the runner.
        together: The sessions of other ranks, where several processes capture one model.
        state: The objects whose tensors and attributes the model relies on, where it is a method of
            a larger one; absent: the model.
        before_key: Sets the context that an engine's layers read, ahead of each key's look,
            warm-ups and capture, at start-up and later: called with the runtime mode, the
            descriptor and the static buffers' rows by name, which the key's graph reads. They hold
            padding; the runner owns them. Its errors are raised as the model's own.
        real_rows: Where captures run on rows of real batches; absent: on padding.
        began: ``time.perf_counter()`` when the work began that the report's time counts from;
            absent: now.

    Raises:
        ConfigError: ``cudagraph_mode`` is AUTO, which ``choose_mode`` decides.
    """

    def __init__(
        self,
        plan: Plan,
        model: Callable[..., Any],
        backend: GraphBackend,
        config: Config,
        *,
        progress: Progress | None = None,
        pool: GraphPool | None = None,
        name: str = "runner",
        together: RankSync = SINGLE_RANK,
        state: Sequence[object] | Mapping[str, object] | None = None,
        before_key: BeforeKey | None = None,
        began: float | None = None,
        real_rows: RealRows | None = None,
    ) -> None:
        refuse_auto(config)
        self._plan, self._model, self._backend, self._config = plan, model, backend, config
        self._progress, self._pool, self._name = progress, pool, name
        self._together, self._state, self._before, self._began = together, state, before_key, began
        self._real_rows = real_rows

    def run(self) -> GraphRunner:
        """Capture all keys that the budget pays for. The runner's plan holds those that were
        captured.

        With ``capture_policy: lazy`` nothing is captured yet. Without a budget, a key that cannot
        be captured is an error. With one, running out of memory is no error: the keys before it are
        kept, and the report says where it stopped.

        Raises:
            CaptureError: a key could not be captured (HostSyncError, CaptureMemoryError and
                OutputShapeError say why); everything of this session is freed and the model runs as
                before.
            ModelError: the model failed before its capture began.
            BackendError: torch or the device lacks the dtype of an input.
            PlanError: the plan was made from another configuration.
            ConfigError: graphs on demand were asked for with several ranks.
            DistributedError: with other ranks, one of them failed; all raise it.
            CgplanError: a call of another member of the pool is under way.
        """
        config, use = self._config, PoolUse() if self._pool is None else self._pool.use
        made, own, policy = (
            self._plan.config_hash,
            config_hash(config),
            config.compilation.capture_policy,
        )
        ranks = self._together is not SINGLE_RANK
        if made != own:
            raise PlanError(
                f"the plan {'of all ranks ' * ranks}was made from configuration {made}; this "
                f"{'rank' if ranks else 'session'} has {own}",
                remedy="Start all ranks from one file; agree_on_setup(), called before "
                "agree_on_plan(), names the "
                "setting that differs."
                if ranks
                else "Pass build_plan(config) of the same configuration.",
            )
        if policy != "eager" and ranks:
            raise ConfigError(
                f"capture_policy is {policy}, and several ranks capture together",
                remedy="Set compilation.capture_policy: eager; ranks capture the same graphs in "
                "the same order.",
            )
        with use.held(self._name):
            captured = self._captured(self._plan, () if policy == "lazy" else None)
            return GraphRunner(captured, self._captured, use, self._name)

    def _captured(self, asked: Plan, keys: Collection[Key] | None) -> CapturedKeys:
        """Make buffers for the plan, and capture these keys; None: shrink the plan to the budget,
        capture it all.
        """
        backend, config, together = self._backend, self._config, self._together
        graphed: ModelGraphs | None = None
        try:
            backend.release_cached()
            before, start, self._began = backend.memory(), self._began or time.perf_counter(), None
            free = together.begin(asked, before.free)
            plan = fitting(asked, config, free) if keys is None else asked
            graphed = ModelGraphs(
                plan,
                config,
                self._model,
                backend,
                self._pool,
                self._state,
                together,
                self._before,
                self._real_rows,
            )
            captured = CapturedKeys(graphed, asked, plan, before, together, self._progress)
            captured.capture_first([key for key in plan.keys if keys is None or key in keys], start)
        except BaseException as error:
            drop_locals(error)
            failure = together.failed(error)
            if graphed is not None:
                graphed.free()
            if failure is error:
                raise
            raise failure from error
        return captured


def describe_split(
    model: Callable[..., Any], config: Config, backend: GraphBackend | None = None
) -> SplitRecord | None:
    """What a session's report would say of the split, before any capture.

    By operators, the model is traced, for which it runs on padding values as in a session's
    warm-up: it may write to its KV cache where padding writes. By modules, the patterns are matched
    and nothing runs. Either way the model is left as it was, and all memory is given back. Inductor
    is left out where it does not itself decide on the split.

    Returns:
        The split; None where the plan has no PIECEWISE keys.

    Raises:
        ConfigError: a splitting op, or a module pattern, that does not occur in the model.
        CaptureError: the model cannot be traced as one graph.
        ModelError: the model itself failed.
    """
    plan = build_plan(config)
    piecewise = [key for key in plan.keys if key[0] is CUDAGraphMode.PIECEWISE]
    if not piecewise:
        return None
    if not config.compilation.use_inductor_graph_partition:
        compilation = config.compilation.model_copy(update={"compiler": "eager"})
        config = config.model_copy(update={"compilation": compilation})
    graphed = ModelGraphs(plan, config, model, backend or select_backend(config.device))
    mode, smallest = piecewise[-1]
    try:
        if graphed.route.splitter is not None:
            with (
                graphed.keeping_state(),
                random_state_kept(graphed.backend.device, graphed.generators),
            ):
                graphed.look(mode, smallest)
                graphed.warm_up(mode, smallest)
        return graphed.route.describe()
    except Exception as error:
        failure = explain_eager_failure(error, f"{mode} {smallest}")
        drop_locals(error)
        raise failure from (error if failure is not error else error.__cause__)
    finally:
        graphed.free()
