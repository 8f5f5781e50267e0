"""From requests to steps: a discrete-event simulation of continuous batching with chunked prefill."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from cgplan.errors import TrafficError
from cgplan.modes import CUDAGraphMode
from cgplan.planning import CudagraphDispatcher, Plan
from cgplan.traffic.histogram import StepShape, Traffic

if TYPE_CHECKING:
    from cgplan.traffic.step_times import StepTimes

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


@dataclass(frozen=True)
class SchedulerBounds:
    """Bounds of a step.

    Attributes:
        max_num_seqs: Running requests at most.
        max_num_batched_tokens: Tokens in one step at most.
        query_len: Tokens of each decoding request in a step: 1 + num_speculative_tokens.
        max_loras: Distinct adapters among the running requests at most; None: any number.
        accepted_tokens: Tokens that a request advances in a decode step on average; None: query_len, all drafts are
            accepted.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    query_len: int = 1
    max_loras: int | None = None
    accepted_tokens: float | None = None

    @classmethod
    def of(cls, plan: Plan, accepted_tokens: float | None = None) -> SchedulerBounds:
        """The bounds of a plan's batches."""
        return cls(plan.max_num_seqs, plan.max_num_batched_tokens, plan.query_len, plan.max_loras, accepted_tokens)

    def decode_steps(self, request: Request) -> int:
        """Steps that a request takes after its prefill, which yields its first token."""
        return math.ceil(max(request.generated_tokens - 1, 0) / (self.accepted_tokens or self.query_len))


def simulate(trace: RequestTrace, bounds: SchedulerBounds, step_time: StepTime) -> Traffic:
    """Traffic of a server with these requests and bounds: how many steps of each shape it runs.

    The scheduler is that of vLLM's V1 engine in its default settings. Each step has ``max_num_batched_tokens`` to
    give. Running requests come first, in order of admission: a decoding one gets ``query_len`` tokens, one whose
    prefill is under way gets the rest of its prompt, or as much as fits. Then waiting requests are admitted, first
    come first served, while there are tokens left and fewer than ``max_num_seqs`` run. With ``max_loras``, a request
    whose adapter would be one too many lets later ones pass. Requests that came while a step ran are seen by the next.
    A step is uniform if it holds decoding requests alone, and all of them with ``query_len`` tokens.

    Assumptions: no limit on the KV cache, so no preemption; no prefix cache; one engine; nothing is cancelled;
    speculation advances each request evenly, by ``accepted_tokens`` a step; a step lasts ``step_time`` and the next one
    begins at once. The server starts empty and runs until the last request is done. Time without requests has no steps.

    The clock counts whole nanoseconds. While no request arrives, ends, or changes from prefill to decode, steps are
    equal and are added up at once; the result is exactly that of one step after the other.

    Args:
        trace: Requests in any order; equal arrivals keep theirs. The traffic has its source and notes.
        bounds: Of the scheduler.
        step_time: Microseconds, above 0, that a step of this shape lasts. Asked once for each distinct shape.

    Raises:
        TrafficError: there is no request.
    """
    if not trace.requests:
        raise TrafficError(f"{trace.source}: there is no request with a prompt", remedy="Give at least one request.")
    arriving = ((round(request.arrival_us * 1000), request) for request in trace.requests)
    pending = deque(sorted(arriving, key=lambda timed: timed[0]))

    @cache
    def nanoseconds(shape: StepShape) -> int:
        return max(1, round(step_time(shape) * 1000))

    server, first = _Server(bounds), pending[0][0]
    now, busy, counts = first, 0, Counter[StepShape]()
    while True:
        while pending and pending[0][0] <= now:
            server.arrive(*pending.popleft())
        shape = server.next_step(now)
        if shape is None:
            if not pending:
                break
            now = pending[0][0]
            continue
        length, repeats = nanoseconds(shape), server.equal_steps
        if server.admits and pending:  # the first step that begins at or after the next arrival is another one
            repeats = min(repeats, -((now - pending[0][0]) // length))
        counts[shape] += repeats
        now += repeats * length
        busy += repeats * length
        server.advance(repeats)
    said = [
        *trace.notes,
        f"simulated {len(trace.requests)} requests through continuous batching with chunked prefill, at most "
        f"{bounds.max_num_seqs} requests and {bounds.max_num_batched_tokens} tokens a step; no KV cache limit, "
        "preemption or prefix cache",
        f"the server is busy {busy / max(now - first, 1):.0%} of the time; a request waits "
        f"{server.longest_wait / 1e9:.3g} s at most",
    ]
    if bounds.query_len > 1:
        accepted = bounds.accepted_tokens or bounds.query_len
        said.append(f"a decode step advances each request by {accepted:g} of {bounds.query_len} tokens")
    return Traffic.of(dict(counts), trace.source, said)


class _Server:
    """Requests that wait and run.

    Running requests, in order of admission: those that decode, then at most one whose prefill is under way: it took
    all the tokens that were left. Where decoding requests alone want more tokens than a step has, the first
    ``places`` of them are served and the others stand by; each one that is done lets the next one in.
    """

    def __init__(self, bounds: SchedulerBounds) -> None:
        self.bounds = bounds
        self.places = -(-bounds.max_num_batched_tokens // bounds.query_len)
        self.waiting: dict[int, deque[tuple[int, int, Request]]] = {}  # by adapter: number, arrival, request
        self.arrived = self.running = self.steps = self.longest_wait = 0
        self.decoding: list[tuple[int, int]] = []  # a heap of those served: the last step of each, its adapter
        self.standby: deque[Request] = deque()
        self.prefill: tuple[Request, int] | None = None  # and the tokens that are left of its prompt
        self.adapters: Counter[int] = Counter()  # of those that decode and are served
        # Of the step that next_step scheduled:
        self.equal_steps = 0  # it and those after it that are equal, if nothing arrives
        self.admits = False  # whether a request that arrives could join the next of them
        self.finishing: list[Request] = []  # requests whose prefill ends with it
        self.chunk = 0  # prompt tokens of the request whose prefill goes on after it

    def arrive(self, time: int, request: Request) -> None:
        self.waiting.setdefault(request.adapter, deque()).append((self.arrived, time, request))
        self.arrived += 1

    def next_step(self, now: int) -> StepShape | None:
        """Schedule a step that begins now (nanoseconds), and admit requests to it; None if there is nothing to run."""
        decodes, bounds = len(self.decoding), self.bounds
        left = max(bounds.max_num_batched_tokens - bounds.query_len * decodes, 0)
        num_reqs, adapters = decodes, set(self.adapters)
        self.finishing, self.chunk = [], 0
        while left > 0 and (entry := self.prefill or self._admit(now, adapters)):
            request, prompt = entry
            chunk = min(prompt, left)
            left -= chunk
            num_reqs += 1
            if request.adapter != NO_ADAPTER:
                adapters.add(request.adapter)
            if chunk == prompt:
                self.finishing.append(request)
                self.prefill = None
            else:
                self.chunk = chunk
        if num_reqs == 0:
            return None
        ends = [1] if self.finishing else []
        if self.decoding:  # the next one is done
            ends.append(self.decoding[0][0] - self.steps)
        if self.prefill and self.chunk:  # the rest of the prompt no longer fills a chunk
            ends.append((self.prefill[1] - 1) // self.chunk)
        self.equal_steps = min(ends)
        self.admits = left > 0 and self.running < bounds.max_num_seqs
        num_tokens = bounds.max_num_batched_tokens - left
        uniform = num_reqs == decodes and num_tokens == bounds.query_len * decodes
        return StepShape(num_tokens, num_reqs, uniform, len(adapters))

    def advance(self, repeats: int) -> None:
        """End so many of the steps."""
        self.steps += repeats
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
        while self.standby and len(self.decoding) < self.places:
            self._serve(self.standby.popleft())
        for request in self.finishing:
            if self.bounds.decode_steps(request) == 0:
                self.running -= 1
            elif len(self.decoding) < self.places:
                self._serve(request)
            else:
                self.standby.append(request)

    def _admit(self, now: int, adapters: set[int]) -> tuple[Request, int] | None:
        if self.running >= self.bounds.max_num_seqs:
            return None
        full = self.bounds.max_loras is not None and len(adapters) >= self.bounds.max_loras
        names = (NO_ADAPTER, *adapters) if full else self.waiting
        queues = [self.waiting[name] for name in names if name in self.waiting]
        if not queues:
            return None
        queue = min(queues, key=lambda queue: queue[0])
        _, time, request = queue.popleft()
        if not queue:
            del self.waiting[request.adapter]
        self.running += 1
        self.longest_wait = max(self.longest_wait, now - time)
        self.prefill = request, request.context_tokens
        return self.prefill

    def _serve(self, request: Request) -> None:
        heapq.heappush(self.decoding, (self.steps + self.bounds.decode_steps(request), request.adapter))
        if request.adapter != NO_ADAPTER:
            self.adapters[request.adapter] += 1


def step_clock(plan: Plan, times: StepTimes) -> StepTime:
    """Microseconds of a step: in the mode and at the size that the plan's dispatcher gives it."""
    dispatch = CudagraphDispatcher(plan).dispatch

    def microseconds(shape: StepShape) -> float:
        mode, descriptor = dispatch(shape.num_tokens, shape.uniform, shape.num_active_loras)
        adapters = shape.num_active_loras if mode is CUDAGraphMode.NONE else descriptor.num_active_loras
        return times.of(mode, descriptor.num_tokens, adapters)

    return microseconds
