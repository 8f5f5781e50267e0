"""From requests to steps: a discrete-event simulation of continuous batching with chunked
prefill; and requests made up from a few figures.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from cgplan.config.schema import TrafficConfig
from cgplan.errors import TrafficError
from cgplan.planning import Plan
from cgplan.traffic.histogram import MOST_BATCHED_TOKENS, Percentiles, Service, StepShape, Traffic
from cgplan.units import counted, format_microseconds

if TYPE_CHECKING:
    import numpy as np

NO_ADAPTER = -1
NEVER = 1 << 100  # nanoseconds, or steps
ARRIVAL = attrgetter("arrival_us")
LOAD = attrgetter("load")
WAITING = attrgetter("waiting")
MANY = 0.05  # of the requests, worth a warning
_PARTS = 1 << 20  # of an accepted token: sums of multiples are exact
_P95_DEVIATIONS = 1.6448536269514722
_Shape = tuple[int, int, bool, int]  # as StepShape, which takes longer to make
StepTime = Callable[[StepShape], float]  # shape of a step -> microseconds


class Request(NamedTuple):
    """A request.

    Attributes:
        arrival_us: Microseconds since any moment that all requests share.
        context_tokens: Tokens of its prompt, at least 1.
        generated_tokens: Tokens that it generates; 0 counts as 1, for the prefill yields the first.
    """

    arrival_us: float
    context_tokens: int
    generated_tokens: int
    adapter: int = NO_ADAPTER


class RequestTrace(NamedTuple):
    """Requests, their source in words, and notes on what was left out."""

    requests: Sequence[Request]
    source: str = "requests"
    notes: tuple[str, ...] = ()
    cached: bool = False  # whether prompts lack the tokens that a prefix cache held
    warnings: tuple[str, ...] = ()

    def hurried(self, speedup: float) -> RequestTrace:
        """``speedup`` times as fast. Raises TrafficError unless it is above 0."""
        if not 0 < speedup < math.inf:
            raise TrafficError(
                f"a speedup of {speedup} makes no sense",
                remedy="Give a number above 0; 1 changes nothing.",
            )
        if speedup == 1:
            return self
        sooner = []
        for each in self.requests:
            arrival = each.arrival_us / speedup
            sooner.append(each._replace(arrival_us=arrival))
        source = f"{self.source}, {speedup:g} times as fast as recorded"
        return self._replace(
            requests=sooner,
            source=source,
            warnings=(),
        )

    def first(self, most: int) -> RequestTrace:
        if len(self.requests) <= most:
            return self
        by_arrival = sorted(self.requests, key=ARRIVAL)
        return self._replace(requests=by_arrival[:most])

    def spread(self, replicas: int) -> RequestTrace:
        """Those of one of ``replicas`` servers behind a round-robin balancer."""
        if replicas == 1:
            return self
        by_arrival = sorted(self.requests, key=ARRIVAL)
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
        query_len: Tokens of a decoding request in a step.
        max_loras: Distinct adapters among the running requests; None: any number.
        accepted_tokens: Tokens that a request advances in a decode step on average; None:
            query_len.
        mixes: Whether a step may prefill and decode, as in vLLM, or does one of them, as in SGLang.
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
        """Those of a plan's batches, and ``others``."""
        return cls(
            plan.max_num_seqs,
            plan.max_num_batched_tokens,
            plan.query_len,
            plan.max_loras,
            **others,
        )


def simulate(
    trace: RequestTrace,
    bounds: SchedulerBounds,
    step_time: StepTime,
) -> Traffic:
    """How many steps of each shape a server with these requests and bounds runs.

    The scheduler is that of vLLM's V1 engine in its default settings. Running requests come first,
    in order of admission: each decoding one gets ``query_len`` tokens; a prefill under way gets the
    rest of its prompt, or what fits. Then waiting requests are admitted, first come first served,
    while tokens are left and fewer than ``max_num_seqs`` run; one whose adapter is one too many
    lets later ones pass. A step is uniform if all its requests decode.

    Without ``mixes`` it is SGLang's (0.5.23, srt/managers/scheduler.py, without
    --enable-mixed-chunk and --prefill-decode-interval): a step prefills while there are prompts,
    else it decodes.

    With ``kv_tokens`` a request is admitted while its prompt, and one step more of all that decode,
    fit into the KV cache. If the next decode step does not fit, the request admitted last is
    preempted: it waits again, in front, and all its tokens are its prompt.

    Assumptions: one engine, nothing cancelled; steps follow each other at once; speculation
    advances each request evenly, by ``accepted_tokens`` a step.

    docs/planning.md, Overload, says when the traffic has a warning.

    Args:
        trace: In any order; equal arrivals keep theirs.
        step_time: Microseconds, above 0, of a step; called once for each distinct shape.

    Raises:
        TrafficError: there is no request, or one that the KV cache cannot hold.
    """
    if not trace.requests:
        raise TrafficError(
            f"{trace.source}: there is no request with a prompt",
            remedy="Give at least one request.",
        )
    largest = 0
    for request in trace.requests:
        tokens = request.context_tokens + request.generated_tokens
        largest = max(largest, tokens)
    if bounds.kv_tokens is not None and largest + bounds.query_len > bounds.kv_tokens:
        raise TrafficError(
            f"{trace.source}: a request of {largest} tokens does not fit into a KV cache of "
            f"{bounds.kv_tokens} beside a step's {bounds.query_len}",
            remedy="Give the KV cache of your engine in tokens, as its log says it at the start.",
        )
    engine = _Engine(bounds, trace.requests)
    engine.run(step_time)
    lasted = engine.now - engine.times[0]
    lasted = max(lasted, 1)
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
        f"simulated {len(trace.requests)} requests, prefill in chunks{apart}; {memory}, no "
        f"{other}prefix cache",
        f"one request or more runs {engine.busy / lasted:.0%} of the time; a request waits "
        f"{format_microseconds(longest_wait / 1000)} at most",
    ]
    warnings = [*trace.warnings, *engine.overload()]
    if bounds.query_len > 1:
        warnings.append(
            "step times are without drafting, unless each row of a table has it: TPOT lacks that "
            "time, with all graphs alike, so take an SLO from the row `asked for`"
        )
    if bounds.query_len > 1 and not bounds.accepted_tokens:
        warnings.append(
            "all drafts count as accepted, so TPOT is too short: --set "
            "speculative.accepted_tokens=N, vLLM's mean acceptance length"
        )
    passed = sum(rank.passed for rank in engine.ranks) / len(trace.requests)
    if passed > MANY:
        warnings.append(
            f"{trace.source}: {passed:.0%} of the requests wait, as max_loras = {bounds.max_loras} "
            "other adapters run: a larger one shortens TTFT"
        )
    if bounds.ranks > 1:
        notes.append(
            f"{bounds.ranks} ranks step together, each with a batch as large as the largest; a "
            "request goes to the rank with the fewest"
        )
    counts = {}
    for shape, (_, count) in engine.steps.items():
        counts[StepShape(*shape)] = count
    return Traffic.of(
        counts,
        trace.source,
        notes,
        warnings,
        service=service,
    )


class _Rank:
    """The scheduler of one rank. In order of admission it runs those that decode, then at most one
    whose prefill is under way and took all tokens left.

    Where decoding requests alone want more tokens than a step has, the first ``places`` of them are
    served; each one that is done lets the next one in.
    """

    def __init__(
        self,
        bounds: SchedulerBounds,
        requests: list[Request],
    ) -> None:
        self.bounds = bounds
        self.requests = requests  # of all ranks, in the order in which they come
        # nanoseconds at which each began to wait, and had its first and its last token
        self.since: dict[int, int] = {}
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.max_loras = NEVER if bounds.max_loras is None else bounds.max_loras
        self.kv_tokens = bounds.kv_tokens or NEVER
        accepted = bounds.accepted_tokens or bounds.query_len
        self.tokens_a_step = round(accepted * _PARTS) / _PARTS
        self.slots = bounds.max_num_seqs
        if bounds.mixes:
            self.slots = -(-bounds.max_num_batched_tokens // bounds.query_len)
        self.waiting: deque[int] = deque()  # indices of requests, ascending
        self.longest_wait = 0
        self.passed = 0  # requests, for want of an adapter's slot
        self.last_full = -1  # when such a slot was last missing
        self.last_admission = 0  # but for preempted ones
        self.load = 0
        self.running = 0
        self.decoded = 0
        self.decoding: list[tuple[int, int]] = []  # a heap of those served: last step, index
        self.standby: deque[int] = deque()
        self.adapters: Counter[int] = Counter()  # of those served
        self.held = 0.0  # in the KV cache, but for ``decoded`` steps of each one served
        self.preempted = 0
        self.began: dict[int, int] = {}  # decode steps before the first one, of those served
        # a step of those that decode
        self.shape: _Shape = (0, 0, True, 0)
        self.left = bounds.max_num_batched_tokens  # for prompts
        self.until = NEVER  # so many are decoded
        # of the next step
        self.under_way: list[int] = []  # the prompt that it does not end
        self.prompt_left = 0  # tokens of that
        self.ending: list[int] = []  # prompts that it ends
        self.prefilled = 0  # tokens of prompts
        self.repeats = NEVER  # unless a request comes

    def prefill(self, now: int) -> _Shape | None:
        """Schedule a step with prompts; None if no prompt fits."""
        self.prefilled = 0
        left = self.left
        if left <= 0:
            return None
        bounds = self.bounds
        requests = self.requests
        prompts = self.under_way
        adapters = {NO_ADAPTER, *self.adapters}
        for index in prompts:
            adapters.add(requests[index].adapter)
        wanted = self.prompt_left
        after = self.decoded + 1
        grown = len(self.decoding) * after + 1
        memory = self.kv_tokens - self.held
        memory -= self.tokens_a_step * grown
        while self.waiting and wanted < left and self.running < bounds.max_num_seqs:
            index = self.waiting[0]
            if len(adapters) > self.max_loras:
                known = (other for other in self.waiting if requests[other].adapter in adapters)
                index = next(known, NEVER)
            if index == NEVER:
                self.last_full = now
                break
            request = requests[index]
            memory -= request.context_tokens
            if memory < 0:
                break
            self.waiting.remove(index)
            adapters.add(request.adapter)
            wanted += request.context_tokens
            self.held += request.context_tokens
            self.running += 1
            since = self.since[index]
            self.longest_wait = max(self.longest_wait, now - since)
            is_first = index not in self.first
            self.passed += is_first and since <= self.last_full
            self.last_admission = now if is_first else self.last_admission
            prompts.append(index)
        if not prompts:
            return None
        tokens, number, _, _ = self.shape
        if not bounds.mixes:
            tokens = number = 0
            adapters = {requests[index].adapter for index in prompts}
            adapters.add(NO_ADAPTER)
        number += len(prompts)
        prefilled = min(wanted, left)
        self.prompt_left = wanted - prefilled
        self.under_way = []
        if self.prompt_left:
            self.under_way.append(prompts.pop())
        self.repeats = 1
        if not prompts:
            self.repeats = (wanted - 1) // prefilled
            if bounds.kv_tokens:
                self.go_on(now)  # it has room for fewer steps
            until = self.until if bounds.mixes else NEVER
            decodes = until - self.decoded
            self.repeats = min(self.repeats, decodes)
        self.ending = prompts
        self.prefilled = prefilled
        return tokens + prefilled, number, False, len(adapters) - 1

    def go_on(self, now: int) -> None:
        """After equal steps requests are done, and others begin to decode."""
        requests = self.requests
        decoding = self.decoding
        done = []
        for index in self.ending:
            self.first.setdefault(index, now)
            if requests[index].generated_tokens > 1:
                self.standby.append(index)
            else:
                done.append(index)
        self.ending = []
        self.prefilled = 0
        while decoding and decoding[0][0] == self.decoded:
            _, index = heapq.heappop(decoding)
            done.append(index)
        self.load -= len(done)
        steps = 0
        while not steps:
            self.until = NEVER
            self.running -= len(done)
            for index in done:
                request = requests[index]
                self.last[index] = now
                self.held -= request.context_tokens
                if index in self.began:
                    self.held += self.tokens_a_step * self.began.pop(index)
                    self.adapters[request.adapter] -= 1
                    if not self.adapters[request.adapter]:
                        del self.adapters[request.adapter]
            while self.standby and len(decoding) < self.slots:
                index = self.standby.popleft()
                request = requests[index]
                more = request.generated_tokens - 1
                last = self.decoded + math.ceil(more / self.tokens_a_step)
                heapq.heappush(decoding, (last, index))
                self.began[index] = self.decoded
                self.held -= self.tokens_a_step * self.decoded
                self.adapters[request.adapter] += 1
            if not decoding:
                break
            each = self.tokens_a_step * len(decoding)
            free = self.kv_tokens - self.held - each * self.decoded
            steps = max(int(free // each), 0)
            first_end, _ = decoding[0]
            memory_end = self.decoded + steps
            self.until = min(first_end, memory_end)
            if not steps:
                done = [self._preempted(now)]
        bounds = self.bounds
        wanted = bounds.query_len * len(decoding)
        tokens = min(wanted, bounds.max_num_batched_tokens) if bounds.mixes else wanted
        if bounds.mixes:
            self.left = bounds.max_num_batched_tokens - tokens
        has_others = NO_ADAPTER in self.adapters
        loaded = len(self.adapters) - has_others
        uniform = tokens == wanted
        self.shape = tokens, len(decoding), uniform, loaded

    def _preempted(self, now: int) -> int:
        """The decoding request that was admitted last waits again, ahead of later ones."""
        newest = [(self.began[index], index, last) for last, index in self.decoding]
        began, index, last = max(newest)
        self.decoding.remove((last, index))
        heapq.heapify(self.decoding)
        request = self.requests[index]
        decoded = self.decoded - began
        made = int(self.tokens_a_step * decoded) + 1
        self.requests[index] = request._replace(
            context_tokens=request.context_tokens + made,
            generated_tokens=request.generated_tokens - made,
        )
        self.held += made
        self.since[index] = now
        insort(self.waiting, index)
        self.preempted += 1
        return index


class _Engine:
    """Ranks that step together: each step is of the largest batch of them."""

    def __init__(self, bounds: SchedulerBounds, requests: Sequence[Request]) -> None:
        came = [round(request.arrival_us * 1000) for request in requests]
        order = sorted(range(len(came)), key=came.__getitem__)
        ordered = []
        self.wanted = []
        for index in order:
            request = requests[index]
            ordered.append(request)
            self.wanted.append(max(request.generated_tokens, 1))
        self.times = sorted(came)
        self.came = 0
        self.bounds = bounds
        self.ranks = []
        for _ in range(bounds.ranks):
            rank = _Rank(bounds, ordered)
            self.ranks.append(rank)
        self.now = self.times[0]
        self.last_empty = self.now
        self.busy = 0
        self.came_before = 0  # by last_empty
        self.length = 0  # of the queue at the last arrival
        self.steps: dict[_Shape, tuple[int, int]] = {}  # nanoseconds of each, and how many ran

    def run(self, step_time: StepTime) -> None:
        """A turn of the loop is a step and the equal ones after it."""
        bounds = self.bounds
        times = [*self.times, NEVER]
        ranks = self.ranks
        last_step = self.now
        while times[self.came] < NEVER or any(map(LOAD, ranks)):
            first = self.came
            if times[first] <= self.now:
                if not any(map(WAITING, ranks)):
                    self.last_empty = last_step
                    self.came_before = first
                self.came = bisect_right(times, self.now, first)
                # each request goes to the rank with the fewest; ties take turns
                for index in range(first, self.came):
                    rank = min(ranks, key=LOAD)
                    ranks.append(ranks.pop(0))
                    rank.waiting.append(index)
                    rank.since[index] = times[index]
                    rank.load += 1
                queues = map(WAITING, ranks)
                self.length = sum(map(len, queues))
            last_step = self.now
            repeats = NEVER
            is_open = len(ranks) > 1  # the balancer looks at a request when it comes
            tokens = requests = adapters = 0
            uniform = True
            for rank in ranks:
                own = rank.prefill(self.now) if rank.waiting or rank.under_way else None
                if own is None:
                    own = rank.shape
                    rank.repeats = rank.until - rank.decoded
                tokens = max(tokens, own[0])
                requests = max(requests, own[1])
                uniform &= own[2]
                adapters = max(adapters, own[3])
                repeats = min(repeats, rank.repeats)
                is_open |= rank.left > rank.prefilled and rank.running < bounds.max_num_seqs
            if not requests:
                self.now = times[self.came]
                continue
            shape = tokens, requests, uniform, adapters
            length, count = self.steps.get(shape, (0, 0))
            if not count:
                time = step_time(StepShape(*shape))
                length = max(1, round(time * 1000))
            until = times[self.came] - self.now if is_open else NEVER
            # the first step that begins at or after the next arrival is another one
            repeats = min(repeats, -(-until // length))
            self.steps[shape] = length, count + repeats
            self.busy += repeats * length
            self.now += repeats * length
            for rank in ranks:
                if bounds.mixes or not rank.prefilled:
                    rank.decoded += repeats
                rank.prompt_left -= (repeats - 1) * rank.prefilled
                is_done = rank.decoded == rank.until
                if is_done or rank.ending:
                    rank.go_on(self.now)

    def overload(self) -> list[str]:
        """Warnings, see docs/planning.md, Overload."""
        times = self.times
        last = times[-1]
        lasted = last - self.last_empty
        came = len(times) - self.came_before
        admitted = max(rank.last_admission for rank in self.ranks)
        wait = admitted - last
        half = (last - times[0]) / 2
        is_long = lasted > half
        by_chance = 3 * math.sqrt(came)
        by_load = came / 20
        is_deep = self.length > max(by_load, by_chance)
        is_slow = came * wait > lasted * self.length
        if not (is_long and is_deep and is_slow):
            return []
        load = came / lasted * wait / self.length
        replicas = math.ceil(load * len(self.ranks))
        return [
            f"overload: requests come {load:.2f} times as fast as this server serves them; "
            f"{self.length:,} of {came:,} wait when the last one comes, so the plan is for full "
            f"batches alone. If servers share them, give --replicas; {replicas} would do"
        ]

    def service(self, lasted: int) -> Service:
        decodes = [ran for shape, ran in self.steps.items() if shape[2]]
        ttft = []
        tpot = []
        for rank in self.ranks:
            for index, last in rank.last.items():
                first = rank.first[index]
                waited = first - self.times[index]
                ttft.append((waited, 1))
                more = self.wanted[index] - 1
                if more:
                    each = (last - first) / more
                    tpot.append((each, 1))
        return Service(
            step_us=Percentiles.of(self.steps.values()),
            decode_us=Percentiles.of(decodes) if decodes else None,
            ttft_us=Percentiles.of(ttft),
            tpot_us=Percentiles.of(tpot) if tpot else None,
            tokens_per_s=sum(self.wanted) / lasted * 1e9,
            preempted=sum(rank.preempted for rank in self.ranks),
        )


def synthetic_requests(made: TrafficConfig, plan: Plan) -> RequestTrace:
    """Requests made up from the `traffic` section of a configuration; equal seeds give equal
    requests.

    They arrive as a Poisson process. Lengths are lognormal with the given median and 95th
    percentile, rounded, between 1 and 2^20 tokens. All draws are independent.
    """
    import numpy as np

    rng = np.random.default_rng(made.seed)
    number = made.num_requests

    def lengths(median: int, p95: int) -> list[int]:
        deviation = math.log(p95 / median) / _P95_DEVIATIONS
        drawn = rng.lognormal(math.log(median), deviation, number)
        allowed = np.clip(np.rint(drawn), 1, MOST_BATCHED_TOKENS)
        return list(map(int, allowed))

    arrivals = poisson_arrivals(made.request_rate, number, rng)
    prompts = lengths(made.prompt_median, made.prompt_p95)
    outputs = lengths(made.output_median, made.output_p95)
    adapters = [NO_ADAPTER] * number
    if made.lora_share > 0 and plan.max_loras:
        chosen = rng.integers(made.num_adapters or plan.max_loras, size=number)
        is_adapted = rng.random(number) < made.lora_share
        adapters = np.where(is_adapted, chosen, NO_ADAPTER).tolist()
    requests = list(map(Request, arrivals, prompts, outputs, adapters))
    rate = f"{made.request_rate:g} a second"
    return RequestTrace(
        requests,
        source=f"synthetic: {number} requests, {rate}, seed {made.seed}",
    )


def poisson_arrivals(
    request_rate: float,
    number: int,
    rng: np.random.Generator | None = None,
) -> list[float]:
    import numpy as np  # takes longer than all of planning, and most commands do without

    if rng is None:
        rng = np.random.default_rng(0)
    gaps = rng.exponential(1e6 / request_rate, number)
    times = np.cumsum(gaps)
    return list(map(float, times))
