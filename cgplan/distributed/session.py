"""A capture session's meetings with those of the other ranks: comparisons before it, and
RankedCapture.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from cgplan.backends import GraphBackend
from cgplan.captures.environment import describe_environment
from cgplan.captures.together import PeerMemory, Together
from cgplan.config import Config
from cgplan.distributed.all_reduce import AllReduce
from cgplan.distributed.ranks import Ranks
from cgplan.distributed.registry import Registration
from cgplan.errors import CgplanError, DistributedError, RankMismatchError, RegistrationError
from cgplan.planning import Plan
from cgplan.planning.difference import leaves
from cgplan.reports.records import CaptureReport, RankRecord
from cgplan.units import listed

logger = logging.getLogger(__name__)


def agree_on_setup(
    ranks: Ranks, config: Config, backend: GraphBackend, *, also: Mapping[str, Any] | None = None
) -> None:
    """All ranks have rank 0's configuration (but for the device), torch, CUDA, driver, kind of GPU
    and cgplan.

    ``also``: other values that have to be the same, by their names in messages: the caller's
        options, say. Raises
    RankMismatchError on all ranks; it names the rank, the setting, and both values.
    """
    found = describe_environment(backend, "")
    versions = {"torch": found.torch, "cgplan": found.cgplan}
    if torch.version.cuda and found.backend == "cuda":
        versions |= {
            "the GPU driver": str(found.driver),
            "CUDA": str(found.cuda),
            "the GPU": str(found.device),
        }
    own = {**(also or {}), **{f"version of {name}": value for name, value in versions.items()}}
    settings = leaves(config.model_dump(mode="json", exclude={"device"}))
    own |= {name: json.dumps(value) for name, value in settings}
    _compare(
        ranks.agree("comparing the ranks", value=own),
        "Start all ranks from one file and one installation.",
    )


def agree_on_model(ranks: Ranks, model: Callable[..., Any]) -> None:
    """All ranks have built the same model: its class, and names, shapes and dtypes of its
    parameters and buffers.

    Values are not compared; where a model is split, they differ. Raises RankMismatchError on all
    ranks.
    """
    own: dict[str, Any] = {
        "the model's class": f"{type(model).__module__}.{type(model).__qualname__}"
    }
    if isinstance(model, nn.Module):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            own[f"tensor {name}"] = f"{list(tensor.shape)} {tensor.dtype}"
    _compare(
        ranks.agree("comparing the models", value=own), "Every rank has to build the same model."
    )


def agree_on_plan(ranks: Ranks, plan: Plan) -> Plan:
    """Rank 0's plan, on all ranks; ``RankedCapture`` compares its hash. Raises as
    ``Ranks.agree``.
    """
    value = plan.model_dump_json() if ranks.rank == 0 else None
    return Plan.from_json(ranks.agree("broadcasting the plan", value=value)[0])


class RankedCapture(Together):
    """The steps that capture sessions of several ranks take together; one for each session, whose
    graphs read the buffers of ``reducer``. With a budget in ``config``, ranks agree before and
    after each key.
    """

    def __init__(self, ranks: Ranks, reducer: AllReduce, config: Config) -> None:
        self._ranks, self._reducer = ranks, reducer
        self._has_budget = any(limit is not None for limit in vars(config.budget).values())
        self._registration = Registration()
        self._failed = False

    def begin(self, plan: Plan, free: int | None) -> int | None:
        """Unregister the last pass's buffers, and compare the plans.

        Raises:
            RegistrationError: another runner's graphs are registered: their rows would be
                overwritten.
            RankMismatchError: ranks have different plans.
        """
        self._failed = False
        if self._reducer.is_read:
            raise RegistrationError(
                "graphs of another runner reduce by this all-reduce, and new ones would take "
                "their rows",
                remedy="close() that runner first; where it was dropped without close(), or is to "
                "stay, open "
                "another all-reduce for this model: open_all_reduce().",
            )
        self._reducer.begin_pass()
        own = {"the plan's hash": hashlib.sha256(plan.model_dump_json().encode()).hexdigest()[:12]}
        found = self._ranks.agree("beginning the capture", value=(own, free))
        _compare([theirs for theirs, _ in found], "Capture the plan that agree_on_plan returns.")
        return min((free for _, free in found if free is not None), default=None)

    def any_refuses(self, refused: bool, because: BaseException | None = None) -> bool:
        """Whether any rank's budget refuses a key; where there is a budget, a step of all ranks."""
        if not self._has_budget:
            return refused
        if because is not None:
            self._ranks.announce(because)
        found = self._ranks.agree("the budget", value=(refused, because is not None))
        if any(failed for _, failed in found):
            self._reducer.abort()
        return any(refused for refused, _ in found)

    def dropped(self) -> None:
        """Forget the rows of graphs that were freed, and sums that were not finished."""
        self._reducer.begin_pass()

    def end(self) -> None:
        """Register the graphs' buffers; from now on they may be replayed. Raises as
        AllReduce.end_pass.
        """
        self._registration = self._reducer.end_pass()

    def failed(self, error: BaseException) -> BaseException:
        """Come with the error to the step at which the others are or will be, and return the one
        that all ranks raise.

        A rank that is interrupted leaves, and waits for none.
        """
        self._failed = True
        if not isinstance(error, Exception):
            self._ranks.leave(error)
            return error
        # by another runner, or by graphs of this pass, whose sums are all finished
        is_read = self._reducer.is_read
        if not is_read:
            self._reducer.abort()
        if error is not self._ranks.agreed_on:
            try:
                self._ranks.agree("the capture pass", error=error)
            except Exception as agreed:
                error = agreed
        # all ranks are here, and may capture again or run eagerly
        if self._ranks.lost is None and not is_read:
            with suppress(CgplanError):
                self._reducer.begin_pass()
        return error

    def peer_memory(self) -> PeerMemory:
        return self._reducer.peer_memory()

    def release(self) -> None:
        """Close the peers' handles, between two steps: then graphs may be freed."""
        try:
            self._reducer.release()
        except DistributedError as error:
            if not self._failed:
                raise
            logger.warning("rank %d: %s", self._ranks.rank, error.message)

    def completed(self, report: CaptureReport) -> CaptureReport:
        """The report with a record of each rank and the stops of all budgets, on all ranks."""
        presence = self._ranks.presences[self._ranks.rank]
        own = RankRecord(
            rank=self._ranks.rank,
            host=presence.host,
            device=presence.device,
            all_reduce=self._reducer.name,
            **asdict(self._registration),
            pool_bytes=report.pool_bytes,
            static_bytes=report.static_bytes,
            total_bytes=report.total_bytes,
            session_seconds=report.session_seconds,
        )
        stops = () if report.budget is None else report.budget.stops
        told = self._ranks.agree("the report", value=(own, stops))
        found = report.model_copy(update={"ranks": tuple(record for record, _ in told)})
        if found.budget is None:
            return found
        of_all = [
            stop.model_copy(update={"rank": rank})
            for rank, (_, stops) in enumerate(told)
            for stop in stops
        ]
        return found.model_copy(
            update={"budget": found.budget.model_copy(update={"stops": tuple(of_all)})}
        )


def _compare(found: Sequence[Mapping[str, Any]], remedy: str) -> None:
    """All ranks have rank 0's values, by name. Raises RankMismatchError; it names the rank and both
    values.
    """
    for rank, theirs in enumerate(found):
        unlike = [
            f"{name}: {theirs.get(name, 'nothing')}, rank 0 has {found[0].get(name, 'nothing')}"
            for name in {**found[0], **theirs}
            if theirs.get(name) != found[0].get(name)
        ]
        if unlike:
            raise RankMismatchError(
                f"rank {rank} differs from rank 0: {listed(unlike, 3)}", remedy=remedy
            )
