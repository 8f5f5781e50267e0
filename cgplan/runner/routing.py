"""From what a caller asks for to where it goes: the rules that a batch has to keep, and the dispatcher's answer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cgplan.buffers.batch import Batch, BatchReader
from cgplan.errors import DispatchMissError, InputError
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.planning import CudagraphDispatcher, MissReason, Plan

_LATER = {
    MissReason.NOT_CAPTURED_YET: "Let the runner capture it, outside of runner.no_capture()",
    MissReason.CAPTURE_FAILED: "See runner.report.failed, and call runner.retry_failed() once that is mended",
    MissReason.OVER_BUDGET: "Raise the budget",
}


def _miss_remedy(plan: Plan, reason: MissReason) -> str:
    """What to do so that a graph serves such a batch. Of a plan that was chosen for traffic or read from a file, the
    configuration does not decide the sizes.
    """
    if reason in _LATER:
        return _LATER[reason]
    if plan.file is not None or plan.evidence is not None:
        which = f"the plan {plan.file}" if plan.file is not None else "a plan for traffic"
        return f"The graphs are those of {which}: make it again for traffic that has such batches (`cgplan plan`)"
    sizes = reason is MissReason.TOO_LARGE
    return "Add the size to cudagraph_capture_sizes" if sizes else "Choose another cudagraph_mode"


def as_count(name: str, value: Any) -> int:
    """A count that a caller gives, as a plain int. Raises InputError for what is no whole number."""
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):
        raise _no_count(name, value) from None


def as_rows(name: str, value: Any) -> int:
    """The same for a count of rows or adapters, of which a truth value is none."""
    if isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool:
        raise _no_count(name, value)
    return as_count(name, value)


def _no_count(name: str, value: Any) -> InputError:
    return InputError(f"{name} is {value!r:.100}, a {type(value).__name__}", remedy="Pass an int.")


def as_flag(value: Any) -> bool | None:
    """``uniform_decode`` as a caller gives it. Raises InputError for what is no truth value."""
    if value is None or type(value) is bool:
        return value
    if type(value).__name__ in ("bool", "bool_") and type(value).__module__ == "numpy":
        return bool(value)
    raise InputError(
        f"uniform_decode is {value!r:.100}, a {type(value).__name__}", remedy="Pass True or False, or leave it out."
    )


@dataclass(frozen=True, slots=True)
class Route:
    """Where a batch goes.

    Attributes:
        batch: Its rows.
        uniform: Whether it counts as uniform decode.
        num_active_loras: Distinct adapters in it.
        mode, descriptor: What the dispatcher answered.
        wanted: The key that would serve it, where that is another one and may be captured; None elsewhere.
    """

    batch: Batch
    uniform: bool
    num_active_loras: int
    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    wanted: Key | None = None

    @property
    def unpadded(self) -> BatchDescriptor:
        """The batch as an eager forward sees it."""
        tokens, reqs = self.batch.num_tokens, self.batch.num_reqs
        uniform = self.uniform and reqs is not None
        return BatchDescriptor(tokens, reqs, uniform, self.num_active_loras > 0, self.num_active_loras)


class BatchRouter:
    """Routes the batches of one plan.

    Args:
        plan: What is captured.
        reader: Checks tensors and counts their rows.
        most_tokens: What the static buffers hold: graphs may be fewer, and smaller.
        wanted: What may be captured when a batch asks for it; absent: nothing else.
        reason_against: Why a key that is wanted, or was planned, has no graph.
        asked: What was planned at first, where a budget has dropped some of it; absent: the plan.
    """

    def __init__(
        self,
        plan: Plan,
        reader: BatchReader,
        most_tokens: int,
        wanted: Plan | None = None,
        reason_against: Callable[[Key], MissReason] | None = None,
        asked: Plan | None = None,
    ) -> None:
        self._plan = plan
        self._reader = reader
        self._dispatcher = CudagraphDispatcher(plan)
        self._wanted = None if wanted is None else CudagraphDispatcher(wanted)
        self._reason_against = reason_against
        self._asked = None if asked is None else CudagraphDispatcher(asked)
        self._most_tokens = most_tokens

    def of_tensors(self, inputs: Mapping[str, Any], uniform_decode: bool | None, num_active_loras: int) -> Route:
        """Where a batch of tensors goes. Raises InputError."""
        return self._route(self._reader.read(inputs), uniform_decode, num_active_loras)

    def of_counts(
        self, num_tokens: int, num_reqs: int | None, uniform_decode: bool | None, num_active_loras: int
    ) -> Route:
        """Where a batch goes that will be written into the static buffers. Raises InputError.

        Requests that are not given are as many as the tokens allow: one for each token of a decode batch, one for each
        ``query_len`` tokens where the batch is said to be uniform. Elsewhere nothing follows, and they have to be given
        if an input counts them.
        """
        plan, q = self._plan, self._plan.query_len
        self.check_size(num_tokens)
        if num_reqs is not None and num_reqs < 1:
            raise InputError(f"asked for {num_reqs} requests", remedy="A batch has at least one.")
        if self._reader.counting("num_reqs") is None:
            num_reqs = None
        elif num_reqs is None:
            if not uniform_decode and (q > 1 or num_tokens > plan.max_num_seqs):
                raise InputError(
                    f"a batch of {num_tokens} tokens does not tell how many requests it has",
                    remedy="Pass num_reqs, or uniform_decode=True if it is uniform decode.",
                )
            num_reqs = num_tokens // q if uniform_decode else num_tokens
        return self._route(Batch(num_tokens, num_reqs), uniform_decode, num_active_loras)

    def check_size(self, num_tokens: int) -> None:
        """Raise InputError if the static buffers do not hold so many tokens."""
        most = self._most_tokens
        if not 0 < num_tokens <= most:
            hold = (
                f"static buffers hold 1 to {most} tokens"
                if most
                else "nothing is captured, so no static buffer holds any"
            )
            raise InputError(
                f"{hold}, asked for {num_tokens}",
                remedy="Ask for at least one."
                if num_tokens < 1
                else "Ask for fewer, or call the runner with tensors: it runs larger batches eagerly.",
            )

    def reason_for_none(self, route: Route, on_miss: str) -> MissReason:
        """Why no graph serves a batch. Raises DispatchMissError where ``on_miss`` is ``error``."""
        asked = tokens, _, _ = route.batch.num_tokens, route.uniform, route.num_active_loras
        reason, missing = None, route.wanted
        if missing is None and self._asked is not None:
            planned = self._asked.dispatch(*asked)
            missing = None if planned[0] is CUDAGraphMode.NONE else planned
        if missing is not None and self._reason_against is not None:
            reason = self._reason_against(missing)
        else:
            reason = (self._wanted or self._asked or self._dispatcher).explain(*asked)
        reason = reason or MissReason.NOTHING_CAPTURED
        if on_miss == "error":
            raise DispatchMissError(
                f"no graph serves a batch of {tokens} tokens: {reason}",
                remedy=f"{_miss_remedy(self._plan, reason)}, or set on_miss: eager.",
            )
        return reason

    def _route(self, batch: Batch, uniform_decode: bool | None, num_active_loras: int) -> Route:
        q, reqs, tokens, most = self._plan.query_len, batch.num_reqs, batch.num_tokens, self._plan.max_num_seqs
        if uniform_decode is None:
            uniform_decode = q == 1 and (reqs is None or reqs == tokens)
        elif uniform_decode and (tokens % q or (reqs is not None and reqs != tokens // q)):
            raise InputError(
                f"uniform_decode=True, but {tokens} tokens are not {'whole' if reqs is None else reqs} requests of {q}",
                remedy="Pass uniform_decode=False for a mixed batch.",
            )
        if reqs is not None and reqs > min(tokens, most):
            raise InputError(
                f"the batch has {reqs} requests, but {tokens} tokens and scheduler.max_num_seqs {most} allow "
                f"{min(tokens, most)}",
                remedy="Each request has at least one token; raise scheduler.max_num_seqs for larger batches.",
            )
        if num_active_loras:
            self._check_loras(num_active_loras)
        mode, descriptor = self._dispatcher.dispatch(tokens, uniform_decode, num_active_loras)
        wanted: Key | None = None
        if self._wanted is not None:
            wanted = self._wanted.dispatch(tokens, uniform_decode, num_active_loras)
            if wanted == (mode, descriptor) or wanted[0] is CUDAGraphMode.NONE:
                wanted = None
        return Route(batch, uniform_decode, num_active_loras, mode, descriptor, wanted)

    def _check_loras(self, num_active_loras: int) -> None:
        most = self._plan.max_loras or 0
        if 0 <= num_active_loras <= (most and most + 1):  # max_loras + 1 stands for any number, as in descriptors
            return
        allowed = f", lora.max_loras is {most}: 0 to {most} are allowed, and {most + 1} for any number of adapters"
        remedy = "Raise lora.max_loras." if most else "Add a `lora` section to the configuration."
        raise InputError(
            f"num_active_loras is {num_active_loras}{allowed if most else ', and no `lora` section allows adapters'}",
            remedy=remedy if num_active_loras > 0 else "Pass the number of distinct adapters in the batch, 0 for none.",
        )
