"""The captures of a model's keys, one by one.

Note [Captures without a warm-up]
    docs/concepts.md, Warm-ups, has the rules. A capture computes nothing before its first replay,
    and graphs of a pool write over each other's memory, so what a capture left may be read before
    it was computed. Where one leaves something, or fails for no known reason, as others may, all
    keys start again, with warm-ups and in a new pool: there what the model keeps has been computed,
    and lies where no graph writes.
    No replay computes what a failed capture left, so the smallest key of a lane runs ahead of
    captures: a model that keeps something for each size shows it there.
"""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cgplan.backends import GraphBackend, MemoryReading
from cgplan.backends.context import random_state_kept, refuse_forbidden_capture
from cgplan.backends.host_sync import storages_of
from cgplan.captures.failures import drop_locals, explain_failure, raise_caused
from cgplan.captures.model_graphs import REBUILD_AND_WARM_UP, ModelGraphs, Rehearsal
from cgplan.errors import CaptureError, CaptureMemoryError
from cgplan.graphs.footprint import RunLog
from cgplan.modes import CUDAGraphMode, Key
from cgplan.planning.plan import Lane
from cgplan.reports.records import GraphRecord

_QUIET_KEYS = 2  # in a row, whose warm-ups compile nothing: others need none
_STOPPED = (
    "torch has compiled a function of the model as often as torch._dynamo.config.recompile_limit "
    "allows, and runs it uncompiled in graphs of further sizes: raise the limit, or compile the "
    "function with dynamic=True"
)


class Next(Enum):
    TRY_AGAIN = auto()  # this key, with a warm-up or another look
    START_AGAIN = auto()  # all keys, with warm-ups
    GIVE_UP = auto()  # by CapturedKeys alone


class _Clock(NamedTuple):
    """Times, and compilations so far; ``stopped``: functions at torch.compile's limit."""

    at: float
    compile_seconds: float
    cached: int
    stopped: int

    @classmethod
    def now(cls) -> _Clock:
        at = time.perf_counter()
        if "torch._dynamo" not in sys.modules:
            return cls(at, 0.0, 0, 0)
        utils = torch._dynamo.utils
        counts = utils.counters
        stopped = 0
        for reason, times in counts["unimplemented"].items():
            if "recompile limit" in reason:
                stopped += times
        return cls(
            at,
            utils.calculate_time_spent().get("total_wall_time", 0.0),
            max(
                counts["inductor"]["fxgraph_cache_hit"],
                counts["aot_autograd"]["autograd_cache_hit"],
            ),
            stopped,
        )


@dataclass
class _Attempt:
    """All tries of a key. ``capture_began``: None ahead of the capture."""

    key: Key
    began: _Clock
    needs_warm_up: bool = False
    warm_ups: int = 0
    capture_began: _Clock | None = None

    def __str__(self) -> str:
        mode, descriptor = self.key
        return f"{mode} {descriptor}"

    @property
    def is_cold(self) -> bool:
        return self.capture_began is not None and not self.warm_ups

    @property
    def has_compiled(self) -> bool:
        assert self.capture_began, "the capture has begun"
        return _Clock.now().compile_seconds > self.capture_began.compile_seconds


def driver_bytes(
    backend: GraphBackend,
    before: MemoryReading,
    after: MemoryReading,
) -> int | None:
    """Free memory lost between them, less what torch's allocator reserved."""
    if not backend.counts_driver_bytes or after.free is None or before.free is None:
        return None
    return before.free - after.free - (after.reserved - before.reserved)


class Capturer:
    """Captures keys with the warm-ups that they need.

    Attributes:
        in_service: Graphs of other keys stay, so each key has warm-ups.
        inspection_seconds: Time that served the report.
    """

    def __init__(self, graphs: ModelGraphs) -> None:
        self.in_service = False
        self.inspection_seconds = 0.0
        self.returns_nothing = False
        self.started_again: str | None = None
        self._graphs = graphs
        self._asked_warm_ups = graphs.config.compilation.cudagraph_num_of_warmups
        # asked for, or all graphs cannot be freed for a new start
        self._all_need_warm_up = (
            self._asked_warm_ups not in ("auto", 0) or not graphs.is_alone or graphs.pools.is_given
        )
        self._lanes = set[Lane]()
        self._quiet_keys = 0  # in a row
        self._may_be_uncomputed = False

    def capture(self, key: Key) -> GraphRecord | Next:
        """Raises CaptureError; ModelError if the model failed before its capture. What a key that
        raises has left goes back ahead of the next.
        """
        refuse_forbidden_capture(*key)
        self._graphs.addresses.is_outdated = True
        self._all_need_warm_up |= self.in_service
        attempt = _Attempt(key, _Clock.now())
        found: GraphRecord | Next = Next.TRY_AGAIN
        with self._graphs.rehearsing() as rehearsal:
            while found is Next.TRY_AGAIN:
                attempt.capture_began = None
                rehearsal.put_back.rewind()
                found = self._try(rehearsal, attempt)
        return found

    def _try(self, rehearsal: Rehearsal, attempt: _Attempt) -> GraphRecord | Next:
        graphs = self._graphs
        backend = graphs.backend
        key = attempt.key
        mode, descriptor = key
        log: AbstractContextManager[object] = nullcontext()
        if graphs.config.compilation.audit != "off":
            log = backend.logging_operators()
        graphs.scope.pool = graphs.pools.of(key)
        graphs.scope.entries = []
        if graphs.real_rows:
            graphs.real_rows.fill(graphs.views(descriptor))
        try:
            rehearsal.look(key)
            attempt.warm_ups = self._warm_ups_of(rehearsal, key) or int(attempt.needs_warm_up)
            with random_state_kept(backend.device, graphs.generators):
                if attempt.warm_ups:
                    self._warm_up(rehearsal, key, attempt.warm_ups)
                attempt.capture_began = _Clock.now()
                memory = backend.memory()
                self.inspection_seconds += time.perf_counter() - attempt.capture_began.at
                answers = graphs.capture_answers(mode, capturing=True)
                with rehearsal.judged_run(mode, captures=True), answers, log:
                    output = graphs.run_wrapped(key, graphs.views(descriptor))
            rehearsal.refuse_first_use()
        except Exception as error:
            return self._failed(rehearsal, attempt, error)
        self._check(attempt, output)
        del output  # it holds memory of the pool
        done = time.perf_counter()
        is_held = backend.is_held(graphs.scope.pool)
        # other keys would hold some, too
        self._all_need_warm_up |= bool(attempt.warm_ups) and is_held
        if attempt.is_cold:
            left = rehearsal.left
            if is_held:
                left = left or "memory of its pool"
            # PIECEWISE captures have computed what the model keeps, others need a replay
            if left and mode is not CUDAGraphMode.PIECEWISE:
                with random_state_kept(backend.device, graphs.generators):
                    graphs.run_wrapped(key, graphs.views(descriptor))
            if left:
                rehearsal.put_back.count_as_run()
            if left or attempt.has_compiled:
                graphs.evict([key])
                return self._again_with_warm_up(attempt, left and f"{attempt} leaves {left}")
        record = self._record_of(attempt, memory)
        self.inspection_seconds += time.perf_counter() - done
        return record

    def _failed(self, rehearsal: Rehearsal, attempt: _Attempt, error: Exception) -> Next:
        """Raises where another attempt does not help."""
        graphs = self._graphs
        mode = attempt.key[0]
        has_begun = attempt.capture_began is not None
        found = rehearsal.footprints.get(mode)
        failure = explain_failure(
            error,
            str(attempt),
            capturing=has_begun,
            free=graphs.backend.memory().free,
            host_sync=None if found is None else found.host_sync,
            all_freed=not self.in_service,
            model=graphs.model,
            inputs=graphs.config.inputs,
        )
        looks_again = rehearsal.forget_look(mode, failure if has_begun else None)
        # a warm-up changes no verdict of ours, and gives no memory
        is_verdict = type(error) is CaptureError or isinstance(failure, CaptureMemoryError)
        needs_warm_up = attempt.is_cold and not is_verdict
        if not looks_again and not needs_warm_up:
            raise_caused(failure, error)
        drop_locals(error)
        graphs.evict([attempt.key])
        if not needs_warm_up:
            return Next.TRY_AGAIN
        rehearsal.refuse_changed(str(attempt))
        any_held = graphs.pools.memory().held > 0
        self._may_be_uncomputed |= any_held
        is_explained = looks_again or attempt.has_compiled
        concerns_others = any_held or not is_explained
        return self._again_with_warm_up(attempt, failure.message if concerns_others else "")

    def _again_with_warm_up(self, attempt: _Attempt, because: str) -> Next:
        """``because``: why other keys need warm-ups, too; empty where they do not."""
        attempt.needs_warm_up = True
        if not because:
            return Next.TRY_AGAIN
        self._all_need_warm_up = True
        self.started_again = because
        return Next.START_AGAIN

    def refuse_uncomputed(self) -> None:
        if self._may_be_uncomputed and self._graphs.pools.left_bytes:
            raise CaptureError(
                "the model keeps tensors of a capture that failed without a warm-up",
                remedy=REBUILD_AND_WARM_UP,
            )

    # --- warm-ups ---------------------------------------------------------------------------------

    def _warm_ups_of(self, rehearsal: Rehearsal, key: Key) -> int:
        graphs = self._graphs
        facts = graphs.facts
        asked = self._asked_warm_ups
        runs = graphs.route.whole if key[0] is CUDAGraphMode.FULL else graphs.route.warm
        is_compiled = runs is not graphs.model or rehearsal.put_back.before.is_compiled
        may_compile = is_compiled and self._quiet_keys < _QUIET_KEYS
        # put back, so a capture would be a first call
        is_undone = any(map(rehearsal.put_back.may_undo, facts.changes_python))
        if self._all_need_warm_up or may_compile or is_undone or facts.outside:
            return 1 if asked == "auto" else max(asked, 1)
        return int(asked == "auto" and Lane.of(*key) not in self._lanes)

    def _warm_up(self, rehearsal: Rehearsal, key: Key, runs: int) -> None:
        graphs = self._graphs
        compiled = _Clock.now().compile_seconds
        self._run(rehearsal, key, runs)
        if key in rehearsal.put_back.storages.unsure:
            self._run(rehearsal, key, 1)  # tells first use from what each run writes
        is_quiet = _Clock.now().compile_seconds == compiled
        self._quiet_keys = self._quiet_keys + 1 if is_quiet else 0
        lane = Lane.of(*key)
        self._lanes.add(lane)
        smallest = key
        for other in graphs.plan.keys:  # the largest first
            if Lane.of(*other) == lane:
                smallest = other
        if smallest == key or self._warm_ups_of(rehearsal, smallest):
            return
        held = graphs.backend.memory().held
        try:
            rehearsal.look(smallest)  # looks in `wake` under `lazy` alone; sets its context
            self._run(rehearsal, smallest, 1)
            has_left = bool(rehearsal.left) or graphs.backend.memory().held != held
        except Exception as error:  # its own capture raises it again
            drop_locals(error)
            has_left = True
        self._all_need_warm_up |= has_left
        rehearsal.set_context(key)

    def _run(self, rehearsal: Rehearsal, key: Key, times: int) -> None:
        graphs = self._graphs
        facts = graphs.facts
        put_back = rehearsal.put_back
        found = rehearsal.footprints[key[0]]
        # compiled kernels show no operators; after a look that failed this run fails, too, and a
        # line of RunLog would be blamed
        can_watch = not put_back.before.is_compiled and found.error is None
        for _ in range(times):
            log: RunLog | None = None
            # other sizes and runs after first use write and read other tensors; `unsure`: a first
            # run's writes that no version shows
            may_differ = (
                put_back.is_first_run or put_back.perhaps_made or key in put_back.storages.unsure
            )
            if facts.outside or (can_watch and may_differ):
                tensors = [*put_back.before.tensors, *graphs.views(key[1]).values()]
                log = RunLog(
                    graphs.backend.device.type,
                    put_back.storages,
                    storages_of(tensors),
                    shows_writes=can_watch,
                )
            earlier = put_back.last
            with rehearsal.judged_run(key[0]), log or nullcontext():
                graphs.warm_up(key)
                if log:
                    read = log.outside.read_of(earlier, found.aside)
                    found.reads |= read  # for the judgement at the block's end
                    if graphs.judges_first_use:
                        graphs.addresses.first_use |= read.keys()
            if log:
                changes = *earlier.values(), *put_back.last.values()
                facts.outside += log.outside.tensors([change.now for change in changes])
        graphs.backend.synchronize()

    # --- what was captured ------------------------------------------------------------------------

    def _check(self, attempt: _Attempt, output: Any) -> None:
        graphs = self._graphs
        descriptor = attempt.key[1]
        self.returns_nothing |= not any(isinstance(leaf, Tensor) for leaf in tree_leaves(output))
        graphs.outputs.check(output, descriptor, graphs.padded_reqs(descriptor))
        if graphs.scope.entries:
            return
        remedy = (
            "Outside of eager pieces the forward computed nothing on padding: name fewer "
            "pieces, or choose FULL or NONE. If padding misses a function under "
            "eager_break_during_capture, set piecewise: modules."
        )
        if graphs.route.name == "wrappers":
            remedy = (
                "Wrap the model's segments in CUDAGraphWrapper(..., "
                "CUDAGraphMode.PIECEWISE), or choose piecewise: ops, FULL or "
                "FULL_DECODE_ONLY."
            )
        raise CaptureError(f"nothing in the model captured for {attempt}", remedy=remedy)

    def _record_of(
        self,
        attempt: _Attempt,
        memory: MemoryReading,
    ) -> GraphRecord:
        backend = self._graphs.backend
        facts = self._graphs.facts
        after = backend.memory()
        began = attempt.began
        assert attempt.capture_began
        now = _Clock.now()
        nodes = []
        eager_pieces = 0
        capture_seconds = 0.0
        for entry in self._graphs.scope.entries:
            eager_pieces += entry.eager_pieces
            capture_seconds += entry.capture_seconds
            for graph in entry.segments:
                nodes.append(backend.num_nodes(graph))
                facts.note(*backend.notes(graph))
        if now.stopped > began.stopped:
            facts.note(_STOPPED)
        return GraphRecord(
            mode=attempt.key[0],
            descriptor=attempt.key[1],
            graphs=len(nodes),
            nodes=sum(nodes),
            eager_pieces=eager_pieces,
            pool_growth=after.reserved - memory.reserved,
            driver_bytes=driver_bytes(backend, memory, after),
            warmup_seconds=attempt.capture_began.at - began.at if attempt.warm_ups else 0.0,
            capture_seconds=capture_seconds,
            segment_nodes=tuple(nodes),
            compile_seconds=now.compile_seconds - began.compile_seconds,
            cached=now.cached - began.cached,
        )
