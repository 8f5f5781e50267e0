"""Steps of capture sessions on several ranks."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from cgplan.backends import GraphBackend
from cgplan.captures.model_graphs import PeerMemory, RankSync
from cgplan.config import Config
from cgplan.distributed.all_reduce import AllReduce
from cgplan.distributed.ranks import Ranks, refuse_unlike
from cgplan.distributed.registry import Registration
from cgplan.errors import (
    CgplanError,
    DistributedError,
    RegistrationError,
)
from cgplan.planning import Plan
from cgplan.planning.difference import leaves
from cgplan.reports.records import CaptureReport, RankRecord

logger = logging.getLogger(__name__)


def agree_on_setup(
    ranks: Ranks,
    config: Config,
    backend: GraphBackend,
    *,
    also: Mapping[str, Any] | None = None,
) -> None:
    """All ranks have rank 0's configuration (but for the device), versions, kind of GPU, and values
    in ``also``. Raises RankMismatchError on all ranks.
    """
    found = backend.environment()
    own = dict(also or {})
    own["version of torch"] = found.torch
    own["version of cgplan"] = found.cgplan
    if torch.version.cuda and not found.is_tape:
        own["version of the GPU driver"] = str(found.driver)
        own["version of CUDA"] = str(found.cuda)
        own["version of the GPU"] = str(found.device)
    for name, value in leaves(config.model_dump(mode="json", exclude={"device"})):
        own[name] = json.dumps(value)
    refuse_unlike(
        ranks.agree("comparing the ranks", value=own),
        "Start all ranks from one file and one installation.",
    )


def agree_on_model(ranks: Ranks, model: Callable[..., Any]) -> None:
    """All ranks have the same class, names, shapes and dtypes. Raises RankMismatchError on all
    ranks.
    """
    kind = type(model)
    own = {"the model's class": f"{kind.__module__}.{kind.__qualname__}"}
    tensors = dict[str, torch.Tensor]()
    if isinstance(model, nn.Module):
        tensors |= model.named_parameters()
        tensors |= model.named_buffers()
    for name, tensor in tensors.items():
        own[f"tensor {name}"] = f"{list(tensor.shape)} {tensor.dtype}"
    found = ranks.agree("comparing the models", value=own)
    refuse_unlike(found, "Every rank has to build the same model.")


def agree_on_plan(ranks: Ranks, plan: Plan) -> Plan:
    """Rank 0's plan. Raises as ``Ranks.agree``."""
    value = plan.model_dump_json() if ranks.rank == 0 else None
    found = ranks.agree("broadcasting the plan", value=value)
    return Plan.from_json(found[0])


@dataclass(eq=False)
class RankedCapture(RankSync):
    ranks: Ranks
    reducer: AllReduce
    config: Config

    def __post_init__(self) -> None:
        self._registration = Registration()
        self._failed = False

    def begin(self, plan: Plan, free: int | None) -> int | None:
        """Raises RegistrationError where another runner's graphs are registered, RankMismatchError
        for another plan.
        """
        self._failed = False
        if self.reducer.is_read:
            raise RegistrationError(
                "graphs of another runner reduce by this all-reduce, and new ones would take "
                "their rows",
                remedy="close() that runner first; if it was dropped without close(), or has to "
                "stay, open another all-reduce: open_all_reduce().",
            )
        self.reducer.begin_pass()
        digest = hashlib.sha256(plan.model_dump_json().encode()).hexdigest()
        own = {"the plan's hash": digest[:12]}
        found = self.ranks.agree("beginning the capture", value=(own, free))
        hashes = [theirs for theirs, _ in found]
        refuse_unlike(hashes, "Capture the plan that agree_on_plan returns.")
        readings = [reading for _, reading in found if reading is not None]
        return min(readings, default=None)

    def any_refuses(self, refused: bool, because: BaseException | None = None) -> bool:
        """With a budget, a step of all ranks."""
        limits = vars(self.config.budget).values()
        if all(limit is None for limit in limits):
            return refused
        if because is not None:
            self.ranks.announce(because)
        ran_out = because is not None
        found = self.ranks.agree("the budget", value=(refused, ran_out))
        if any(failed for _, failed in found):
            self.reducer.abort()
        return any(refused for refused, _ in found)

    def dropped(self) -> None:
        self.reducer.begin_pass()

    def end(self) -> None:
        """Raises as AllReduce.end_pass."""
        self._registration = self.reducer.end_pass()

    def failed(self, error: BaseException) -> BaseException:
        """Bring the error to the others' step; returns what all ranks raise. An interrupted rank
        leaves.
        """
        self._failed = True
        if not isinstance(error, Exception):
            self.ranks.leave(error)
            return error
        # perhaps by another runner
        is_read = self.reducer.is_read
        if not is_read:
            self.reducer.abort()
        if error is not self.ranks.agreed_on:
            try:
                self.ranks.agree("the capture pass", error=error)
            except Exception as agreed:
                error = agreed
        if self.ranks.lost is None and not is_read:
            with suppress(CgplanError):
                self.reducer.begin_pass()
        return error

    def peer_memory(self) -> PeerMemory:
        return self.reducer.peer_memory()

    def release(self) -> None:
        try:
            self.reducer.release()
        except DistributedError as error:
            if not self._failed:
                raise
            logger.warning(
                "rank %d: %s",
                self.ranks.rank,
                error.message,
            )

    def completed(self, report: CaptureReport) -> CaptureReport:
        rank = self.ranks.rank
        presence = self.ranks.presences[rank]
        own = RankRecord(
            rank=rank,
            host=presence.host,
            device=presence.device,
            all_reduce=self.reducer.name,
            **asdict(self._registration),
            pool_bytes=report.pool_bytes,
            static_bytes=report.static_bytes,
            total_bytes=report.total_bytes,
            session_seconds=report.session_seconds,
        )
        budget = report.budget
        stops = budget.stops if budget else ()
        told = self.ranks.agree("the report", value=(own, stops))
        records = []
        stops_of_all = []
        for rank, (record, stops) in enumerate(told):
            records.append(record)
            for stop in stops:
                stops_of_all.append(stop.changed(rank=rank))
        if budget:
            budget = budget.changed(stops=tuple(stops_of_all))
        return report.changed(ranks=tuple(records), budget=budget)
