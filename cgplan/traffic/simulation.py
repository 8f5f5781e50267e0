"""From requests to steps: a discrete-event simulation of continuous batching with chunked
prefill.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from cgplan.errors import TrafficError
from cgplan.modes import CUDAGraphMode
from cgplan.planning import CudagraphDispatcher, Plan
from cgplan.planning.dispatcher import Answer
from cgplan.traffic.histogram import Percentiles, Service, StepShape, Traffic

if TYPE_CHECKING:
    from cgplan.traffic.step_times import Floats, StepTimes
from cgplan.units import counted

NO_ADAPTER = -1
NEVER = 1 << 100  # nanoseconds, or steps
ROUNDING = 1e-9  # tokens and steps, of products of accepted tokens
_Shape = tuple[int, int, bool, int]  # as StepShape, which takes longer to make
_Run = tuple[CUDAGraphMode, int, int]  # mode, tokens that run, LoRA case
StepTime = Callable[[StepShape], float]  # shape of a step -> microseconds


class Request(NamedTuple):
    """One request.

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
        """The same requests, ``speedup`` times as fast. Raises TrafficError unless it is above
        0.
        """
        if not 0 < speedup < math.inf:
            raise TrafficError(
                f"a speedup of {speedup} makes no sense",
                remedy="Give a number above 0; 1 is as it is.",
            )
        if speedup == 1:
            return self
        sooner = [each._replace(arrival_us=each.arrival_us / speedup) for each in self.requests]
        source = f"{self.source}, {speedup:g} times as fast as recorded"
        return self._replace(requests=sooner, source=source)

    def first(self, most: int) -> RequestTrace:
        """The first requests to come."""
        if len(self.requests) <= most:
            return self
        by_arrival = sorted(self.requests, key=attrgetter("arrival_us"))
        return self._replace(requests=by_arrival[:most])

    def spread(self, replicas: int) -> RequestTrace:
        """Requests of one of ``replicas`` servers behind a round-robin balancer. Raises
        TrafficError for fewer than 1.
        """
        if replicas < 1:
            raise TrafficError(
                f"{replicas} replicas serve no request", remedy="Give 1 replica or more."
            )
        if replicas == 1:
            return self
        by_arrival = sorted(self.requests, key=attrgetter("arrival_us"))
        notes = self.notes
        if self.cached:
            notes += ("prefix caches are those of one server: replicas hit less",)
        return self._replace(
            requests=by_arrival[::replicas],
            source=f"{self.source}, for 1 of {replicas} replicas",
            notes=notes,
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
            query_len.
        mixes: Whether a step may prefill and decode, as in vLLM. False: it does one of them, as in
            SGLang.
        kv_tokens: Tokens that the KV cache holds; None: no limit.
        ranks: Data-parallel ranks that step together; bounds are of each.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    query_len: int = 1
    max_loras: int | None = None
    accepted_tokens: float | None = None
    mixes: bool = True
    kv_tokens: int | None = None
    ranks: int = 1

    @classmethod
    def of(cls, plan: Plan, **others: Any) -> SchedulerBounds:
        """The bounds of a plan's batches, and ``others``."""
        return cls(
            plan.max_num_seqs,
            plan.max_num_batched_tokens,
            plan.query_len,
            plan.max_loras,
            **others,
        )


def simulate(trace: RequestTrace, bounds: SchedulerBounds, step_time: StepTime) -> Traffic:
    """Traffic of a server with these requests and bounds: how many steps of each shape it runs.

    The scheduler is that of vLLM's V1 engine in its default settings. Running requests come first,
    in order of admission: each decoding one gets ``query_len`` tokens; a prefill under way gets the
    rest of its prompt, or what fits. Then waiting requests are admitted, first come first served,
    while tokens are left and fewer than ``max_num_seqs`` run. With ``max_loras``, a request whose
    adapter is one too many lets later ones pass. A step is uniform if all its requests decode
    ``query_len`` tokens.

    With ``mixes`` False it is SGLang's (0.5.23, srt/managers/scheduler.py, without
    --enable-mixed-chunk and --prefill-decode-interval): a step prefills while there are prompts to
    prefill, and ``max_num_batched_tokens`` is its --chunked-prefill-size. Else it decodes all
    running requests.

    With ``kv_tokens`` a request is admitted while its prompt, and one step more of all that decode,
    fit into the KV cache. Where the next decode step does not fit, the request that was admitted
    last is preempted: it waits again, in front, and all its tokens are its prompt.

    Assumptions: one engine, nothing cancelled; speculation advances each request evenly, by
    ``accepted_tokens`` a step; steps follow each other at once. The clock counts whole nanoseconds.

    The traffic has a warning of an overload if the queue has not been empty for half of the
    arrivals, and at the last one holds 5% of those since then, and more than three standard
    deviations of a Poisson count. The capacity is the rate at which the queue then drains: above
    it a queue grows at the difference of the two rates.

    Args:
        trace: Requests in any order; equal arrivals keep theirs.
        bounds: Of the scheduler.
        step_time: Microseconds, above 0, of a step; called once for each distinct shape.

    Raises:
        TrafficError: there is no request, or one that the KV cache cannot hold.
    """
    if not trace.requests:
        raise TrafficError(
            f"{trace.source}: there is no request with a prompt",
            remedy="Give at least one request.",
        )
    largest = max(request.context_tokens + request.generated_tokens for request in trace.requests)
    if bounds.kv_tokens is not None and largest + bounds.query_len > bounds.kv_tokens:
        raise TrafficError(
            f"{trace.source}: a request of {largest} tokens does not fit into a KV cache of "
            f"{bounds.kv_tokens} beside a step's {bounds.query_len}",
            remedy="Give the KV cache of your engine in tokens, as its log says it at the start.",
        )
    engine = _Engine(bounds, trace.requests)
    engine.run(step_time)
    lasted = max(engine.now - engine.arrivals.times[0], 1)
    apart = "" if bounds.mixes else " apart from decode, prefill first"
    other = "other " if trace.cached else ""
    service = engine.service(lasted)
    memory = "no KV cache limit"
    if bounds.kv_tokens is not None:
        preempted = counted(service.preempted, "preemption")
        memory = f"a KV cache of {bounds.kv_tokens:,} tokens, {preempted}"
    longest_wait = max(rank.longest_wait for rank in engine.ranks)
    notes = [
        *trace.notes,
        f"simulated {len(trace.requests)} requests through continuous batching with chunked "
        f"prefill{apart}, at most {bounds.max_num_seqs} requests and "
        f"{bounds.max_num_batched_tokens} tokens a step; {memory}, no {other}prefix cache",
        f"the server is busy {engine.busy / lasted:.0%} of the time; a request waits "
        f"{longest_wait / 1e9:.3g} s at most",
    ]
    if bounds.query_len > 1:
        advance = bounds.accepted_tokens or bounds.query_len
        notes.append(
            f"a decode step advances each request by {advance:g} of {bounds.query_len} tokens"
        )
    if bounds.ranks > 1:
        notes.append(
            f"{bounds.ranks} ranks step together, each with a batch as large as the largest; a "
            "request goes to the rank with the fewest"
        )
    return Traffic.of(
        {StepShape(*shape): ran.count for shape, ran in engine.steps.items()},
        trace.source,
        notes,
        engine.overload(),
        service=service,
    )


def _nanoseconds(request: Request) -> int:
    return round(request.arrival_us * 1000)


class _Arrivals:
    """Requests in the order in which they come. Times are whole nanoseconds."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = sorted(requests, key=_nanoseconds)
        self.times = list(map(_nanoseconds, self.requests))
        self.wanted = [max(request.generated_tokens, 1) for request in self.requests]
        self.next = self.times[0]
        self.came = 0

    def until(self, now: int) -> range:
        """The indices of those that have come since the last call."""
        first = self.came
        self.came = bisect_right(
            self.times,
            now,
            first,
        )
        self.next = NEVER
        if self.came < len(self.times):
            self.next = self.times[self.came]
        return range(first, self.came)


class _Prefill(NamedTuple):
    """The prompts of a step, by index; those that end with it; their adapters; and how often it
    repeats until one of them ends.
    """

    requests: Sequence[int]
    ending: Sequence[int]
    tokens: int
    adapters: int
    repeats: int


class _Decoding(NamedTuple):
    """A request that decodes: the number of its last step, its adapter, its place in the queue, the
    number of steps before its first, and its tokens in the KV cache then.
    """

    last: int
    adapter: int
    place: int
    before: int
    tokens: int


@dataclass(slots=True)
class _Ran:
    """Steps of one shape: nanoseconds of each, and how many ran."""

    length: int
    count: int = 0


class _Rank:
    """The scheduler of one rank. Its running requests are, in order of admission, those that
    decode, then at most one whose prefill is under way and took all tokens that were left.

    Where decoding requests alone want more tokens than a step has, the first ``places`` of them are
    served and the others stand by; each one that is done lets the next one in.
    """

    def __init__(
        self,
        bounds: SchedulerBounds,
        arrivals: _Arrivals,
    ) -> None:
        self.bounds = bounds
        self.arrivals = arrivals
        self.requests = arrivals.requests
        self.max_loras = NEVER
        if bounds.max_loras is not None:
            self.max_loras = bounds.max_loras
        self.tokens_a_step = bounds.accepted_tokens or bounds.query_len
        self.places = bounds.max_num_seqs
        if bounds.mixes:
            self.places = -(-bounds.max_num_batched_tokens // bounds.query_len)
        self.waiting: dict[int, deque[int]] = {}  # indices of requests, by adapter
        self.put_back_at: dict[int, int] = {}  # when, of preempted requests
        self.longest_wait = 0
        self.last_admission = 0
        self.load = 0  # requests that wait or run
        self.running = 0
        self.decoded = 0  # steps
        self.decoding: list[_Decoding] = []  # a heap of those served
        self.standby: deque[int] = deque()
        self.adapters: Counter[int] = Counter()  # of those that decode and are served
        # of the step that is scheduled
        self.prefill: _Prefill | None = None
        self.decodes = False
        self.repeats = NEVER  # unless a request comes
        self.is_open = False  # whether one could join it
        self.under_way: int | None = None
        self.prompt_left = 0  # tokens of the prompt that is under way
        self.is_bounded = bounds.kv_tokens is not None
        self.kv_tokens = bounds.kv_tokens or 0  # if it is bounded
        self.prompts = 0  # tokens of requests that are admitted and do not decode yet
        self.at_start = 0.0  # of those that decode, less what they grew until ``decoded``
        self.preempted = 0
        self.first_token: dict[int, int] = {}  # when it came, of requests that run
        self.ttft: list[int] = []
        self.tpot: list[float] = []

    def wait(self, index: int) -> None:
        """A request has come."""
        adapter = self.requests[index].adapter
        queue = self.waiting.setdefault(adapter, deque())
        queue.append(index)
        self.load += 1

    def schedule(self, now: int) -> _Shape | None:
        """The next step; None: it has no request."""
        bounds = self.bounds
        decodes = len(self.decoding)
        tokens = bounds.query_len * decodes
        left = bounds.max_num_batched_tokens
        uniform = True
        if bounds.mixes:
            uniform = tokens <= left
            tokens = tokens if uniform else left
            left -= tokens
        prefill = None
        if self.waiting or self.under_way is not None:
            prefill = self._prefill(left, now)
        self.prefill = prefill
        repeats = NEVER
        requests = decodes
        adapters = len(self.adapters)
        if prefill:
            if not bounds.mixes:
                decodes = tokens = 0
            uniform = False
            left -= prefill.tokens
            tokens += prefill.tokens
            requests = decodes + len(prefill.requests)
            adapters = prefill.adapters
            repeats = prefill.repeats
        self.decodes = decodes > 0
        if decodes:
            until_next = self.decoding[0].last - self.decoded
            if until_next < repeats:
                repeats = until_next
            if self.is_bounded:
                repeats = min(repeats, int(self._steps_in_memory()))
        self.repeats = repeats
        self.is_open = left > 0 and self.running < bounds.max_num_seqs
        if not requests:
            return None
        return tokens, requests, uniform, adapters

    def end(self, repeats: int, now: int) -> None:
        """The step that was scheduled ran so many times, until now."""
        if self.decodes:
            self.decoded += repeats
        if self.prefill:
            self.prompt_left -= (repeats - 1) * self.prefill.tokens
            for index in self.prefill.ending:
                self._end_prefill(index, now)
        decoding = self.decoding
        while decoding and decoding[0].last == self.decoded:
            entry = heapq.heappop(decoding)
            self._leave(entry)
            self._end(entry.place, now)
        if self.standby:
            self._serve()

    def _prefill(self, left: int, now: int) -> _Prefill | None:
        """Schedule prompts for the tokens that are left."""
        requests = self.requests
        adapters = {NO_ADAPTER, *self.adapters}
        under_way = self.under_way
        if under_way is not None and left:
            adapters.add(requests[under_way].adapter)
        prompts = self._admit(left - self.prompt_left, adapters, now)
        wanted = self.prompt_left
        for index in prompts:
            wanted += requests[index].context_tokens
        self.prompts += wanted - self.prompt_left
        if under_way is not None:
            prompts.insert(0, under_way)
        if not left or not prompts:
            return None
        if not self.bounds.mixes:
            adapters = {NO_ADAPTER, *(requests[index].adapter for index in prompts)}
        tokens = min(wanted, left)
        self.prompt_left = wanted - tokens
        ending = list(prompts)
        self.under_way = ending.pop() if self.prompt_left else None
        return _Prefill(
            prompts,
            ending,
            tokens,
            len(adapters) - 1,
            1 if ending else (wanted - 1) // tokens,
        )

    def _admit(self, tokens: int, adapters: set[int], now: int) -> list[int]:
        """Requests that begin to prefill now, until they want the tokens or more, or the KV cache
        does not hold the next one.

        Adds their adapters to ``adapters``: NO_ADAPTER, and the loaded ones.
        """
        memory = math.inf
        if self.is_bounded:
            held = self._held(self.decoded + 1)
            memory = self.kv_tokens - held - self.tokens_a_step
        admitted: list[int] = []
        while self.waiting and tokens > 0 and self.running < self.bounds.max_num_seqs:
            names: Iterable[int] = self.waiting
            if len(adapters) > self.max_loras:
                names = adapters.intersection(self.waiting)
            firsts = [self.waiting[name][0] for name in names]
            if not firsts:
                break
            first = min(firsts)
            request = self.requests[first]
            memory -= request.context_tokens
            if memory < 0:
                break
            queue = self.waiting[request.adapter]
            queue.popleft()
            if not queue:
                del self.waiting[request.adapter]
            adapters.add(request.adapter)
            tokens -= request.context_tokens
            admitted.append(first)
            self.running += 1
            since = self.put_back_at.get(first)
            if since is None:
                since = self.arrivals.times[first]
                self.last_admission = now
            if now - since > self.longest_wait:
                self.longest_wait = now - since
        return admitted

    def _end_prefill(
        self,
        index: int,
        now: int,
    ) -> None:
        """The step that ended yields the first token, or the next one of a preempted request."""
        request = self.requests[index]
        if index not in self.first_token:
            self.first_token[index] = now
            self.ttft.append(now - self.arrivals.times[index])
        if request.generated_tokens > 1:
            self.standby.append(index)
        else:
            self.prompts -= request.context_tokens
            self._end(index, now)

    def _serve(self) -> None:
        """Those that stand by decode, while there are places."""
        while self.standby and len(self.decoding) < self.places:
            index = self.standby.popleft()
            request = self.requests[index]
            steps = math.ceil((request.generated_tokens - 1) / self.tokens_a_step)
            held = request.context_tokens
            entry = _Decoding(
                self.decoded + steps,
                request.adapter,
                index,
                self.decoded,
                held,
            )
            heapq.heappush(self.decoding, entry)
            if request.adapter != NO_ADAPTER:
                self.adapters[request.adapter] += 1
            self.prompts -= held
            self.at_start += held - self.tokens_a_step * self.decoded

    def _leave(self, entry: _Decoding) -> None:
        """A request decodes no longer."""
        if entry.adapter != NO_ADAPTER:
            self.adapters[entry.adapter] -= 1
            if not self.adapters[entry.adapter]:
                del self.adapters[entry.adapter]
        self.at_start -= entry.tokens - self.tokens_a_step * entry.before

    def _end(self, index: int, now: int) -> None:
        self.running -= 1
        self.load -= 1
        lasted = now - self.first_token.pop(index)
        wanted = self.arrivals.wanted[index]
        if wanted > 1:
            self.tpot.append(lasted / (wanted - 1))

    # --- the KV cache -----------------------------------------------------------------------------

    def _held(self, decoded: int) -> float:
        """Tokens in the KV cache after so many decode steps."""
        grown = self.tokens_a_step * decoded * len(self.decoding)
        return self.prompts + self.at_start + grown

    def _steps_in_memory(self) -> float:
        """Decode steps for which the KV cache has room."""
        free = self.kv_tokens - self._held(self.decoded)
        return free / (self.tokens_a_step * len(self.decoding)) + ROUNDING

    def make_room(self, now: int) -> None:
        """Preempt, until the next decode step fits."""
        while self.decoding and self._steps_in_memory() < 1:
            self._preempt(now)
            self._serve()

    def _preempt(self, now: int) -> None:
        """The decoding request that was admitted last waits again, ahead of those that came
        later.
        """
        entry = max(self.decoding, key=attrgetter("before", "place"))
        self.decoding.remove(entry)
        heapq.heapify(self.decoding)
        self._leave(entry)
        index = entry.place
        request = self.requests[index]
        decoded = self.decoded - entry.before
        made = int(self.tokens_a_step * decoded + ROUNDING) + 1
        self.requests[index] = request._replace(
            context_tokens=request.context_tokens + made,
            generated_tokens=request.generated_tokens - made,
        )
        self.put_back_at[index] = now
        others = self.waiting.get(request.adapter, ())
        self.waiting[request.adapter] = deque(sorted((index, *others)))
        self.running -= 1
        self.preempted += 1


class _Engine:
    """Ranks that step together: each step is of the largest batch of them."""

    def __init__(self, bounds: SchedulerBounds, requests: Sequence[Request]) -> None:
        self.arrivals = _Arrivals(requests)
        self.ranks = [_Rank(bounds, self.arrivals) for _ in range(bounds.ranks)]
        self.is_bounded = bounds.kv_tokens is not None
        self.now = self.last_step = self.last_empty = self.arrivals.times[0]
        self.busy = 0  # nanoseconds
        self.came_before = 0  # by last_empty
        self.length = 0  # of the queue at the last arrival
        self.repeats = NEVER
        self.is_open = False
        self.steps: dict[_Shape, _Ran] = {}

    def run(self, step_time: StepTime) -> None:
        """Run all requests. A turn of the loop is a step and the equal ones after it."""
        arrivals = self.arrivals
        ranks = self.ranks
        while True:
            if self.is_bounded:
                for rank in ranks:
                    rank.make_room(self.now)
            if arrivals.next <= self.now:
                self._receive()
            self.last_step = self.now
            shape = self._schedule()
            if shape is None:
                if arrivals.next == NEVER:
                    return
                self.now = arrivals.next
                continue
            ran = self.steps.get(shape)
            if ran is None:
                time = step_time(StepShape(*shape))
                ran = _Ran(max(1, round(time * 1000)))
                self.steps[shape] = ran
            repeats = self.repeats
            if self.is_open:
                # the first step that begins at or after the next arrival is another one
                until = arrivals.next - self.now
                if until < repeats * ran.length:
                    repeats = -(-until // ran.length)
            lasted = repeats * ran.length
            ran.count += repeats
            self.now += lasted
            self.busy += lasted
            for rank in ranks:
                rank.end(repeats, self.now)

    def _schedule(self) -> _Shape | None:
        """The next step of all ranks; None: there is no request."""
        first = self.ranks[0]
        others = self.ranks[1:]
        shape = first.schedule(self.now)
        self.repeats = first.repeats
        # the balancer looks at a request when it comes
        self.is_open = first.is_open or bool(others)
        for rank in others:
            own = rank.schedule(self.now)
            if own is None:
                continue
            self.repeats = min(self.repeats, rank.repeats)
            if shape is not None:
                own = (
                    max(shape[0], own[0]),
                    max(shape[1], own[1]),
                    shape[2] and own[2],
                    max(shape[3], own[3]),
                )
            shape = own
        return shape

    def _receive(self) -> None:
        """Each request that has come goes to the rank with the fewest; ties take turns."""
        arrivals = self.arrivals
        if not any(rank.waiting for rank in self.ranks):
            self.last_empty = self.last_step
            self.came_before = arrivals.came
        rank = self.ranks[0]
        for index in arrivals.until(self.now):
            if len(self.ranks) > 1:
                rank = min(self.ranks, key=attrgetter("load"))
                self.ranks.append(self.ranks.pop(0))
            rank.wait(index)
        if arrivals.next == NEVER:
            for rank in self.ranks:
                self.length += sum(map(len, rank.waiting.values()))

    def overload(self) -> list[str]:
        """A warning if requests came faster than they were served, as ``simulate`` defines it."""
        times = self.arrivals.times
        last = times[-1]
        lasted = last - self.last_empty
        came = len(times) - self.came_before
        wait = max(rank.last_admission for rank in self.ranks) - last
        is_long = lasted > (last - times[0]) / 2
        by_chance = 3 * math.sqrt(came)
        is_deep = self.length > max(came / 20, by_chance)
        is_slow = came * wait > lasted * self.length
        if not (is_long and is_deep and is_slow):
            return []
        load = came / lasted * wait / self.length
        replicas = math.ceil(load * len(self.ranks))
        return [
            f"overload: requests come {load:.2f} times as fast as this server serves them; "
            f"{self.length:,} of {came:,} wait when the last one comes; {replicas} replicas "
            "would do. This plan is for full batches alone"
        ]

    def service(self, lasted: int) -> Service:
        """What requests and steps took, of the whole run of ``lasted`` nanoseconds."""
        every: list[tuple[int, int]] = []
        decodes: list[tuple[int, int]] = []
        for shape, ran in self.steps.items():
            every.append((ran.length, ran.count))
            if shape[2]:
                decodes.append((ran.length, ran.count))
        ttft: list[int] = []
        tpot: list[float] = []
        for rank in self.ranks:
            ttft += rank.ttft
            tpot += rank.tpot
        return Service(
            step_us=Percentiles.of(every),
            decode_us=Percentiles.of(decodes) if decodes else None,
            ttft_us=Percentiles.of_each(ttft),
            tpot_us=Percentiles.of_each(tpot) if tpot else None,
            tokens_per_s=sum(self.arrivals.wanted) / lasted * 1e9,
            preempted=sum(rank.preempted for rank in self.ranks),
        )


def _runs_of(plan: Plan, apart: bool) -> Callable[[StepShape], _Run]:
    """How the plan runs a step; ``apart`` as in Traffic."""
    dispatch = CudagraphDispatcher(plan).dispatch
    # batches between two of these sizes run as the larger one does
    captured = [descriptor.num_tokens for _, descriptor in plan.keys]
    bounds = sorted({*captured, plan.max_num_batched_tokens + 1})

    @cache
    def answer(
        size: int,
        uniform: bool,
        adapters: int,
    ) -> Answer:
        excluded = None
        if apart:
            excluded = {CUDAGraphMode.PIECEWISE if uniform else CUDAGraphMode.FULL}
        return dispatch(
            size,
            uniform,
            adapters,
            invalid_modes=excluded,
        )

    def run_of(shape: StepShape) -> _Run:
        size, _, uniform, adapters = shape
        bound = bounds[bisect_left(bounds, size)]
        mode, descriptor = answer(bound, uniform, adapters)
        if mode is not CUDAGraphMode.NONE:
            size = descriptor.num_tokens
            adapters = descriptor.num_active_loras
        return mode, size, adapters

    return run_of


def step_clock(
    plan: Plan,
    times: StepTimes,
    *,
    apart: bool = False,
) -> StepTime:
    """Microseconds of a step in the graph that the plan's dispatcher chooses; ``apart`` as in
    Traffic.
    """
    import numpy as np  # takes longer than all of planning, and most commands do without

    run_of = _runs_of(plan, apart)
    largest = max(plan.max_num_batched_tokens, plan.max_capture_size)
    tokens = np.arange(largest + 1)

    @cache
    def table(mode: CUDAGraphMode, adapters: int) -> Floats:
        return times.at(mode, tokens, adapters)

    def microseconds(shape: StepShape) -> float:
        mode, size, adapters = run_of(shape)
        return float(table(mode, adapters)[size])

    return microseconds


def unmeasured(
    plan: Plan,
    times: StepTimes,
    traffic: Traffic,
    *,
    apart: bool = False,
) -> float:
    """The share of the steps that are larger than those whose times were measured."""
    run_of = _runs_of(plan, apart)
    measured_to = cache(times.measured_to)
    found = 0.0
    for shape, weight in traffic.histogram:
        mode, size, adapters = run_of(shape)
        if size > measured_to(mode, adapters):
            found += weight
    return found / traffic.total
