"""From a batch to the graph that serves it."""

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import SupportsIndex

from cgplan.buffers.batch import Batch
from cgplan.captures.captured_keys import CapturedKeys
from cgplan.errors import DispatchMissError, InputError
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.planning import CudagraphDispatcher, MissReason
from cgplan.planning.dispatcher import Modes

_REMEDIES = {
    MissReason.NOT_CAPTURED_YET: "Let the runner capture it, outside of runner.no_capture()",
    MissReason.CAPTURE_FAILED: "See runner.report.failed, and call runner.retry_failed() once "
    "that is mended",
    MissReason.OVER_BUDGET: "Raise the budget",
    MissReason.MODE_EXCLUDED: "Leave invalid_modes out",
}


@dataclass(frozen=True)
class RoutedBatch:
    """A batch with the dispatcher's answer.

    Attributes:
        missing: A key without a graph that fits better; a call may capture it.
    """

    batch: Batch
    uniform: bool
    num_active_loras: int
    invalid_modes: Modes
    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    missing: Key | None = None

    @property
    def key(self) -> Key:
        return self.mode, self.descriptor

    @property
    def unpadded(self) -> BatchDescriptor:
        reqs = self.batch.num_reqs
        uniform = self.uniform and reqs is not None
        return BatchDescriptor(
            self.batch.num_tokens,
            reqs,
            uniform,
            self.num_active_loras > 0,
            self.num_active_loras,
            self.batch.sizes,
        )


class BatchRouter:
    def __init__(self, captured: CapturedKeys) -> None:
        self._captured = captured
        self._plan = captured.graphs.plan
        self._dispatcher = CudagraphDispatcher(self._plan)
        self._dispatcher_of_wanted = None
        if captured.graphs.on_demand:
            self._dispatcher_of_wanted = CudagraphDispatcher(captured.wanted)

    def staged(
        self,
        num_tokens: int,
        num_reqs: int | None,
        uniform_decode: bool | None,
        *,
        counts_reqs: bool,
    ) -> Batch:
        """``counts_reqs``: an input counts requests. Raises InputError where tokens do not tell
        their number.
        """
        q = self._plan.query_len
        num_tokens = self.check_size(num_tokens)
        if not counts_reqs:
            return Batch(num_tokens, None)
        if num_reqs is None:
            if not uniform_decode and (q > 1 or num_tokens > self._plan.max_num_seqs):
                raise InputError(
                    f"a batch of {num_tokens} tokens does not tell how many requests it has",
                    remedy="Pass num_reqs, or uniform_decode=True if it is uniform decode.",
                )
            num_reqs = num_tokens // q if uniform_decode else num_tokens
        return Batch(num_tokens, operator.index(num_reqs))

    def check_size(self, num_tokens: SupportsIndex) -> int:
        most = self._captured.graphs.most_tokens
        is_whole = isinstance(num_tokens, SupportsIndex)
        count = operator.index(num_tokens) if is_whole else 0
        if 0 < count <= most:
            return count
        holds = "nothing is captured, so there are no buffers"
        if most:
            holds = f"static buffers hold 1 to {most} tokens"
        remedy = "Ask for fewer, or call the runner with tensors: it runs larger batches eagerly."
        if count < 1:
            remedy = "Ask for at least one." if is_whole else "Pass a whole number."
        raise InputError(f"{holds}, asked for {num_tokens}", remedy=remedy)

    def route(
        self,
        batch: Batch,
        uniform_decode: bool | None = None,
        num_active_loras: int = 0,
        invalid_modes: Modes = None,
    ) -> RoutedBatch:
        q = self._plan.query_len
        reqs = batch.num_reqs
        tokens = batch.num_tokens
        most = self._plan.max_num_seqs
        num_active_loras = operator.index(num_active_loras)
        if uniform_decode is None:
            uniform_decode = q == 1 and (reqs is None or reqs == tokens)
        elif uniform_decode and (tokens % q or (reqs is not None and reqs != tokens // q)):
            raise InputError(
                f"uniform_decode=True, but {tokens} tokens are not "
                f"{'whole' if reqs is None else reqs} requests of {q}",
                remedy="Pass uniform_decode=False for a mixed batch.",
            )
        if reqs is not None and not 0 < reqs <= min(tokens, most):
            raise InputError(
                f"the batch has {reqs} requests, but {tokens} tokens and scheduler.max_num_seqs "
                f"{most} allow "
                f"{min(tokens, most)}",
                remedy="Each request has at least one token; raise scheduler.max_num_seqs for "
                "larger batches.",
            )
        loras = self._plan.max_loras or 0
        most_loras = loras + 1 if loras else 0  # one more stands for any number
        if not 0 <= num_active_loras <= most_loras:
            allowed = " and no `lora` section allows adapters"
            if loras:
                allowed = (
                    f" lora.max_loras is {loras}: 0 to {loras} are allowed, and {most_loras} for "
                    "any number of adapters"
                )
            raise InputError(
                f"num_active_loras is {num_active_loras},{allowed}",
                remedy="Pass the number of distinct adapters in the batch; raise lora.max_loras "
                "in the `lora` section.",
            )
        uniform = bool(uniform_decode)
        counts = tokens, uniform, num_active_loras, None, invalid_modes, batch.sizes
        key = self._dispatcher.dispatch(*counts)
        missing = None
        if self._dispatcher_of_wanted:
            missing = self._dispatcher_of_wanted.dispatch(*counts)
            if missing == key or missing[0] is CUDAGraphMode.NONE:
                missing = None
        return RoutedBatch(batch, uniform, num_active_loras, invalid_modes, *key, missing)

    @cached_property
    def _dispatcher_of_asked(self) -> CudagraphDispatcher:
        return CudagraphDispatcher(self._captured.asked)

    def reason_for_none(self, route: RoutedBatch) -> MissReason:
        tokens = route.batch.num_tokens
        sizes = route.batch.sizes
        counts = tokens, route.uniform, route.num_active_loras, None, route.invalid_modes, sizes
        missing = route.missing
        plan = self._plan
        if missing is None:
            missing = self._dispatcher_of_asked.dispatch(*counts)
        if missing[0] is not CUDAGraphMode.NONE:
            reason = self._captured.reason_against(missing)
        else:
            dispatcher = self._dispatcher_of_wanted or self._dispatcher_of_asked
            reason = dispatcher.explain(*counts) or MissReason.NOTHING_CAPTURED
        if self._captured.graphs.config.compilation.on_miss != "error":
            return reason
        remedy = _REMEDIES.get(reason)
        cause = ""
        failed = self._captured.failed.get(missing)
        if failed:
            cause = f" ({failed.detail})"
        # not sizes of the configuration
        if remedy is None and (plan.file is not None or plan.evidence is not None):
            which = "a plan for traffic" if plan.file is None else f"the plan {plan.file}"
            remedy = (
                f"The graphs are those of {which}: make it again for traffic that has such "
                "batches (`cgplan plan`)"
            )
        elif reason is MissReason.TOO_LARGE:
            remedy = "Add the size to cudagraph_capture_sizes"
        raise DispatchMissError(
            f"no graph serves a batch of {' x '.join(map(str, route.batch.box))} tokens: {reason}"
            f"{cause}",
            remedy=f"{remedy or 'Choose another cudagraph_mode'}, or set on_miss: eager.",
        )
