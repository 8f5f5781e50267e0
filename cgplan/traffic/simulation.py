"""From requests to steps: a discrete-event simulation of continuous batching with chunked
prefill.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from cgplan.errors import TrafficError
from cgplan.modes import CUDAGraphMode
from cgplan.planning import CudagraphDispatcher, Plan
from cgplan.traffic.histogram import StepShape, Traffic

if TYPE_CHECKING:
    from cgplan.traffic.step_times import Floats, StepTimes

NO_ADAPTER = -1
StepTime = Callable[[StepShape], float]  # shape of a step -> microseconds


class Request(NamedTuple):
    """One request: when it comes, and how long it is.

    Attributes:
        arrival_us: Microseconds since any moment that all requests share.
        context_tokens: Tokens of its prompt, at least 1.
        generated_tokens: Tokens that it generates; 0 counts as 1, for the prefill yields the first.
        adapter: Number of its LoRA adapter, NO_ADAPTER for none.
    """

    arrival_us: float
    context_tokens: int
    generated_tokens: int
    adapter: int = NO_ADAPTER


class RequestTrace(NamedTuple):
    """Requests, their source in words, and notes on requests that were left out."""

    requests: Sequence[Request]
    source: str = "requests"
    notes: tuple[str, ...] = ()
    cached: bool = False  # whether prompts lack the tokens that a prefix cache held

    def hurried(self, speedup: float) -> RequestTrace:
        """The same requests, so many times as fast. Raises TrafficError for a speedup that is not
        above 0.
        """
        if not 0 < speedup < math.inf:
            raise TrafficError(
                f"a speedup of {speedup} makes no sense",
                remedy="Give a number above 0; 1 is as it is.",
            )
        if speedup == 1:
            return self
        requests = []
        for request in self.requests:
            arrival = request.arrival_us / speedup
            requests.append(request._replace(arrival_us=arrival))
        return self._replace(
            requests=requests, source=f"{self.source}, {speedup:g} times as fast as recorded"
        )

    def spread(self, replicas: int) -> RequestTrace:
        """Requests that one of so many replicas serves behind a round-robin balancer: every
        ``replicas``-th by arrival. Raises TrafficError for fewer than 1.
        """
        if replicas < 1:
            raise TrafficError(
                f"{replicas} replicas serve no request", remedy="Give 1 replica or more."
            )
        if replicas == 1:
            return self
        by_arrival = sorted(self.requests, key=attrgetter("arrival_us"))
        notes = ("prefix caches are those of one server: replicas hit less",) if self.cached else ()
        source = f"{self.source}, for 1 of {replicas} replicas"
        return self._replace(
            requests=by_arrival[::replicas],
            source=source,
            notes=(*self.notes, *notes),
        )


@dataclass(frozen=True)
class SchedulerBounds:
    """Bounds of a step.

    Attributes:
        max_num_seqs: Running requests at most.
        max_num_batched_tokens: Tokens in one step at most.
        query_len: Tokens of each decoding request in a step: 1 + num_speculative_tokens.
        max_loras: Distinct adapters among the running requests at most; None: any number.
        accepted_tokens: Tokens that a request advances in a decode step on average; None:
            query_len, all drafts are accepted.
        mixes: Whether a step may prefill and decode, as in vLLM. False: it does one of them, as in
            SGLang.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    query_len: int = 1
    max_loras: int | None = None
    accepted_tokens: float | None = None
    mixes: bool = True

    @classmethod
    def of(
        cls,
        plan: Plan,
        accepted_tokens: float | None = None,
        mixes: bool = True,
    ) -> SchedulerBounds:
        """The bounds of a plan's batches."""
        return cls(
            plan.max_num_seqs,
            plan.max_num_batched_tokens,
            plan.query_len,
            plan.max_loras,
            accepted_tokens,
            mixes,
        )


def simulate(trace: RequestTrace, bounds: SchedulerBounds, step_time: StepTime) -> Traffic:
    """Traffic of a server with these requests and bounds: how many steps of each shape it runs.

    The scheduler is that of vLLM's V1 engine in its default settings. Each step has
    ``max_num_batched_tokens`` to give. Running requests come first, in order of admission: a
    decoding one gets ``query_len`` tokens, one whose prefill is under way gets the rest of its
    prompt, or as much as fits. Then waiting requests are admitted, first come first served, while
    there are tokens left and fewer than ``max_num_seqs`` run. With ``max_loras``, a request whose
    adapter would be one too many lets later ones pass. Requests that came while a step ran are seen
    by the next. A step is uniform if it holds decoding requests alone, and all of them with
    ``query_len`` tokens.

    With ``mixes`` False it is SGLang's (0.5.23, srt/managers/scheduler.py, without
    --enable-mixed-chunk and --prefill-decode-interval): while a prompt is under way, or a request
    waits that may run, a step prefills, and ``max_num_batched_tokens`` is its
    --chunked-prefill-size. Else it decodes all running requests.

    Assumptions: the KV cache has no limit, so nothing is preempted; prompts are prefilled but for
    the tokens that the trace takes for cached; there is one engine; nothing is cancelled;
    speculation advances each request evenly, by ``accepted_tokens`` a step; a step lasts
    ``step_time`` and the next one begins at once. The server starts empty and runs until the last
    request is done. Time without requests has no steps.

    The clock counts whole nanoseconds. While no request arrives, ends, or changes from prefill to
    decode, steps are equal and are added up at once; the result is exactly that of one step after
    the other.

    A warning tells an overload, by the fluid approximation of a queue: above its capacity it grows
    at the difference of the two rates. So it has not been empty for half of the arrivals, and holds
    5% of those since then when the last one comes, and more than chance brings (three standard
    deviations of a Poisson count). The capacity is the rate at which it then drains.

    Args:
        trace: Requests in any order; equal arrivals keep theirs. The traffic has its source and
            notes.
        bounds: Of the scheduler.
        step_time: Microseconds, above 0, that a step of this shape lasts. Asked once for each
            distinct shape.

    Raises:
        TrafficError: there is no request.
    """
    if not trace.requests:
        raise TrafficError(
            f"{trace.source}: there is no request with a prompt",
            remedy="Give at least one request.",
        )
    server = _Server(bounds, trace.requests)
    lengths: dict[StepShape, int] = {}  # in nanoseconds
    counts: Counter[StepShape] = Counter()
    now, busy = server.first_arrival, 0
    while True:
        if server.next_arrival <= now:
            server.arrive(now)
        shape = server.next_step(now)
        if shape is None:
            if not server.pending:
                break
            now = server.pending[0].time
            continue
        if shape not in lengths:
            lengths[shape] = max(1, round(step_time(shape) * 1000))
        length, repeats = lengths[shape], server.equal_steps
        # the first step that begins at or after the next arrival is another one
        if server.admits and server.pending:
            until = server.pending[0].time - now
            repeats = min(repeats, -(-until // length))
        counts[shape] += repeats
        now += repeats * length
        busy += repeats * length
        server.advance(repeats)
    apart = "" if bounds.mixes else " apart from decode, prefill first"
    other = "other " if trace.cached else ""
    notes = [
        *trace.notes,
        f"simulated {len(trace.requests)} requests through continuous batching with chunked "
        f"prefill{apart}, at most {bounds.max_num_seqs} requests and "
        f"{bounds.max_num_batched_tokens} tokens a step; no KV cache limit, preemption or "
        f"{other}prefix cache",
        f"the server is busy {busy / max(now - server.first_arrival, 1):.0%} of the time; a "
        f"request waits {server.longest_wait / 1e9:.3g} s at most",
    ]
    if bounds.query_len > 1:
        accepted = bounds.accepted_tokens or bounds.query_len
        notes.append(
            f"a decode step advances each request by {accepted:g} of {bounds.query_len} tokens"
        )
    return Traffic.of(counts, trace.source, notes, server.overload())


class _Timed(NamedTuple):
    time: int  # nanoseconds
    request: Request


class _Waiting(NamedTuple):
    number: int
    time: int
    request: Request


class _Server:
    """Requests that come, wait and run.

    Running requests, in order of admission: those that decode, then at most one whose prefill is
    under way: it took all the tokens that were left. Where decoding requests alone want more tokens
    than a step has, the first ``places`` of them are served and the others stand by; each one that
    is done lets the next one in.
    """

    def __init__(self, bounds: SchedulerBounds, requests: Sequence[Request]) -> None:
        self.bounds = bounds
        self.tokens_a_step = bounds.accepted_tokens or bounds.query_len
        places = -(-bounds.max_num_batched_tokens // bounds.query_len)
        self.places = places if bounds.mixes else bounds.max_num_seqs
        timed = []
        for request in requests:
            timed.append(_Timed(round(request.arrival_us * 1000), request))
        timed.sort(key=attrgetter("time"))
        self.pending = deque(timed)
        self.first_arrival = timed[0].time
        self.last_arrival = timed[-1].time
        self.next_arrival: float = self.first_arrival  # infinite after the last one
        self.waiting: dict[int, deque[_Waiting]] = {}  # by adapter
        self.arrived = 0
        self.running = 0
        self.steps = 0
        # a heap of those served: the last step of each, its adapter
        self.decoding: list[tuple[int, int]] = []
        self.standby: deque[Request] = deque()
        # and the tokens that are left of its prompt
        self.prefill: tuple[Request, int] | None = None
        self.adapters: Counter[int] = Counter()  # of those that decode and are served
        # Of the queue:
        self.longest_wait = 0
        self.last_admission = 0
        self.last_empty = self.first_arrival
        self.arrived_before = 0  # until then
        self.length = 0  # at the last arrival
        # Of the step that next_step scheduled:
        self.equal_steps = 0  # it and those after it that are equal, if nothing arrives
        self.admits = False  # whether a request that arrives could change the next of them
        self.decodes = False  # whether decoding requests are in it
        self.finishing: list[Request] = []  # requests whose prefill ends with it
        self.chunk = 0  # prompt tokens of the request whose prefill goes on after it

    def arrive(self, now: int) -> None:
        """Let requests wait that came until now (nanoseconds)."""
        while self.next_arrival <= now:
            time, request = self.pending.popleft()
            queue = self.waiting.setdefault(request.adapter, deque())
            queue.append(_Waiting(self.arrived, time, request))
            self.arrived += 1
            self.next_arrival = self.pending[0].time if self.pending else math.inf
        if not self.pending:
            self.length = sum(map(len, self.waiting.values()))

    def next_step(self, now: int) -> StepShape | None:
        """Schedule a step that begins now, and admit requests to it; None if there is nothing to
        run.
        """
        bounds, decodes = self.bounds, len(self.decoding)
        num_reqs = decodes if bounds.mixes else 0
        adapters = set(self.adapters)
        # adapters of the step; the others are those that are loaded
        ran = adapters if bounds.mixes else set[int]()
        left = max(bounds.max_num_batched_tokens - bounds.query_len * num_reqs, 0)
        self.finishing, self.chunk = [], 0
        while left > 0:
            if self.prefill is None:
                if self.waiting and self.running < bounds.max_num_seqs:
                    self._admit(now, adapters)
                if self.prefill is None:
                    break
            request, prompt = self.prefill
            chunk = min(prompt, left)
            left -= chunk
            num_reqs += 1
            if request.adapter != NO_ADAPTER:
                adapters.add(request.adapter)
                ran.add(request.adapter)
            if chunk == prompt:
                self.finishing.append(request)
                self.prefill = None
            else:
                self.chunk = chunk
        if self.pending and not self.waiting:
            self.last_empty, self.arrived_before = now, self.arrived
        num_tokens = bounds.max_num_batched_tokens - left
        self.decodes = bounds.mixes or num_reqs == 0
        if num_reqs == 0:
            num_reqs, num_tokens, ran = decodes, bounds.query_len * decodes, adapters
        if num_reqs == 0:
            return None
        ends = [1] if self.finishing else []
        if self.decodes and self.decoding:  # the next one is done
            last_step, _ = self.decoding[0]
            ends.append(last_step - self.steps)
        if self.prefill and self.chunk:  # the rest of the prompt no longer fills a chunk
            _, prompt = self.prefill
            ends.append((prompt - 1) // self.chunk)
        self.equal_steps = min(ends)
        self.admits = left > 0 and self.running < bounds.max_num_seqs
        prefills = self.finishing or self.chunk
        uniform = not prefills and num_tokens == bounds.query_len * decodes
        return StepShape(num_tokens, num_reqs, uniform, len(ran))

    def advance(self, repeats: int) -> None:
        """End so many of the steps; ``self.steps`` counts those that decode."""
        self.steps += repeats * self.decodes
        if self.prefill:
            request, prompt = self.prefill
            self.prefill = request, prompt - repeats * self.chunk
        while self.decoding and self.decoding[0][0] == self.steps:
            _, adapter = heapq.heappop(self.decoding)
            self.running -= 1
            if adapter != NO_ADAPTER:
                self.adapters[adapter] -= 1
                if not self.adapters[adapter]:
                    del self.adapters[adapter]
        for request in self.finishing:
            if request.generated_tokens > 1:
                self.standby.append(request)
            else:  # the prefill yields the first token
                self.running -= 1
        while self.standby and len(self.decoding) < self.places:
            request = self.standby.popleft()
            steps = math.ceil((request.generated_tokens - 1) / self.tokens_a_step)
            last_step = self.steps + steps
            heapq.heappush(self.decoding, (last_step, request.adapter))
            if request.adapter != NO_ADAPTER:
                self.adapters[request.adapter] += 1

    def _admit(self, now: int, adapters: set[int]) -> None:
        """Begin the prefill of the request that waits longest and may run, if there is one."""
        most = self.bounds.max_loras
        names: Iterable[int] = self.waiting
        if most is not None and len(adapters) >= most:
            names = (NO_ADAPTER, *adapters)
        chosen: deque[_Waiting] | None = None
        for name in names:
            queue = self.waiting.get(name)
            if queue is None:
                continue
            if chosen is None or queue[0].number < chosen[0].number:
                chosen = queue
        if chosen is None:
            return
        _, time, request = chosen.popleft()
        if not chosen:
            del self.waiting[request.adapter]
        self.running += 1
        self.longest_wait = max(self.longest_wait, now - time)
        self.last_admission = now
        self.prefill = request, request.context_tokens

    def overload(self) -> list[str]:
        """A warning if requests came faster than they were served, as ``simulate`` tells it."""
        lasted = self.last_arrival - self.last_empty
        came = self.arrived - self.arrived_before
        wait = self.last_admission - self.last_arrival
        is_long = lasted > (self.last_arrival - self.first_arrival) / 2
        by_chance = 3 * math.sqrt(came)
        is_deep = self.length > max(came / 20, by_chance)
        is_slow = came * wait > lasted * self.length
        if not (is_long and is_deep and is_slow):
            return []
        load = came / lasted * wait / self.length
        return [
            f"overload: requests come {load:.2f} times as fast as this server serves them; "
            f"{self.length:,} of {came:,} wait when the last one comes; {math.ceil(load)} replicas "
            "would do. This plan is for full batches alone"
        ]


def step_clock(
    plan: Plan,
    times: StepTimes,
    *,
    apart: bool = False,
) -> StepTime:
    """Microseconds of a step: in the mode and at the size of the plan's dispatcher; ``apart`` as in
    Traffic.
    """
    # it takes longer to import than all of planning, which most commands do without
    import numpy as np

    dispatch = CudagraphDispatcher(plan).dispatch
    sizes = np.arange(plan.max_num_batched_tokens + 1)

    @cache
    def table(mode: CUDAGraphMode, adapters: int) -> Floats:
        return times.at(mode, sizes, adapters)

    def microseconds(shape: StepShape) -> float:
        excluded = None
        if apart:
            excluded = {CUDAGraphMode.PIECEWISE if shape.uniform else CUDAGraphMode.FULL}
        adapters = shape.num_active_loras
        mode, descriptor = dispatch(
            shape.num_tokens, shape.uniform, adapters, invalid_modes=excluded
        )
        if mode is not CUDAGraphMode.NONE:
            adapters = descriptor.num_active_loras
        return float(table(mode, adapters)[descriptor.num_tokens])

    return microseconds
