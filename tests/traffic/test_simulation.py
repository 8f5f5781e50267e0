"""From requests to steps: the fast simulation against one step after the other, and cases worked out by hand; requests that are made up."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import plan_of, plans, plans_with_lanes

from cgplan.config import Config
from cgplan.errors import TrafficError
from cgplan.modes import CUDAGraphMode
from cgplan.optimizer.problem import step_clock
from cgplan.planning import CudagraphDispatcher, Plan, build_plan
from cgplan.traffic.histogram import Percentiles, StepShape
from cgplan.traffic.simulation import (
    NO_ADAPTER,
    Request,
    RequestTrace,
    SchedulerBounds,
    StepTime,
    simulate,
    synthetic_requests,
)
from cgplan.traffic.step_times import StepTimes


def steps_of(
    requests: list[Request], bounds: SchedulerBounds, step_time: StepTime = lambda batch: 10.0
) -> dict[StepShape, float]:
    return dict(simulate(RequestTrace(requests), bounds, step_time).histogram)


def decode(tokens: int, loras: int = 0) -> StepShape:
    return StepShape(tokens, tokens, True, loras)


def mixed(tokens: int, reqs: int, loras: int = 0) -> StepShape:
    return StepShape(tokens, reqs, False, loras)


# --- the reference: a running list, a waiting list, one step at a time -----------------------------------------


@dataclass
class Running:
    request: Request
    index: int
    prompt: int
    decodes: int
    began: int = 0  # decode steps before its first
    made: int = 0  # its own decode steps

    @property
    def adapter(self) -> int:
        return self.request.adapter


@dataclass
class Served:
    """What the reference found."""

    counts: Counter[StepShape]
    times: list[tuple[int, bool]]  # nanoseconds of each step, and whether it was uniform
    ttft: dict[int, int]
    tpot: list[float]
    preempted: int = 0
    ended: int = 0


def percentiles(nanoseconds: list[float] | list[int]) -> Percentiles | None:
    if not nanoseconds:
        return None
    ordered = sorted(nanoseconds)
    p50, p99 = (ordered[math.ceil(share * len(ordered)) - 1] / 1000 for share in (0.5, 0.99))
    return Percentiles(p50=p50, p99=p99)


def served_of(running: list[Running], bounds: SchedulerBounds) -> list[Running]:
    """Those that decode in a step: others stand by."""
    places = bounds.max_num_seqs
    if bounds.mixes:
        places = -(-bounds.max_num_batched_tokens // bounds.query_len)
    return [each for each in running if not each.prompt][:places]


def preempt(
    waiting: list[tuple[int, Request]], running: list[Running], bounds: SchedulerBounds
) -> bool:
    """Put back the last request that decodes, if the next step does not fit into the KV cache."""
    assert bounds.kv_tokens is not None
    advance = bounds.accepted_tokens or bounds.query_len
    served = served_of(running, bounds)
    held = sum(each.request.context_tokens + advance * each.made for each in running)
    if not served or held + advance * len(served) <= bounds.kv_tokens:
        return False
    last = max(served, key=lambda each: (each.began, each.index))
    running.remove(last)
    made = int(advance * last.made) + 1
    again = last.request._replace(
        context_tokens=last.request.context_tokens + made,
        generated_tokens=last.request.generated_tokens - made,
    )
    waiting.insert(0, (last.index, again))
    waiting.sort(key=lambda pair: pair[0])
    return True


@dataclass
class Rank:
    """One of the ranks that step together."""

    waiting: list[tuple[int, Request]] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    decoded: int = 0

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)


def largest(batches: list[StepShape]) -> StepShape:
    tokens, reqs, uniform, loras = zip(*batches, strict=True)
    return StepShape(max(tokens), max(reqs), all(uniform), max(loras))


def one_by_one(requests: list[Request], bounds: SchedulerBounds, step_time: StepTime) -> Served:
    """As the scheduler does it: each running request is looked at in each step."""
    ordered = sorted(requests, key=lambda request: round(request.arrival_us * 1000))
    coming = list(enumerate(ordered))
    ranks = [Rank() for _ in range(bounds.ranks)]
    counts: Counter[StepShape] = Counter()
    found = Served(counts, [], {}, [])
    first: dict[int, int] = {}
    now = 0
    while coming or any(rank.load for rank in ranks):
        while coming and round(coming[0][1].arrival_us * 1000) <= now:
            min(ranks, key=lambda rank: rank.load).waiting.append(coming.pop(0))
            ranks.append(ranks.pop(0))
        busy = [rank for rank in ranks if rank.load]
        if not busy:
            now = round(coming[0][1].arrival_us * 1000)
            continue
        given: list[list[tuple[Running, int]]] = []
        for rank in busy:
            while bounds.kv_tokens is not None and preempt(rank.waiting, rank.running, bounds):
                found.preempted += 1
            given.append(schedule(rank.waiting, rank.running, bounds))
        batch = largest([shape_of(part, bounds) for part in given])
        counts[batch] += 1
        length = max(1, round(step_time(batch) * 1000))
        found.times.append((length, batch.uniform))
        now += length
        for rank, part in zip(busy, given, strict=True):
            rank.decoded += any(not request.prompt for request, _ in part)
            for request, tokens in part:
                if not request.prompt:
                    request.decodes -= 1
                    request.made += 1
                    continue
                request.prompt -= tokens
                if not request.prompt:
                    request.began = rank.decoded
                    first.setdefault(request.index, now)
                    arrival = round(ordered[request.index].arrival_us * 1000)
                    found.ttft.setdefault(request.index, now - arrival)
            for request in rank.running:
                wanted = ordered[request.index].generated_tokens
                if not request.prompt and not request.decodes and wanted > 1:
                    found.tpot.append((now - first[request.index]) / (wanted - 1))
            rank.running[:] = [each for each in rank.running if each.prompt or each.decodes]
    found.ended = now
    return found


def shape_of(given: list[tuple[Running, int]], bounds: SchedulerBounds) -> StepShape:
    every = all(tokens == bounds.query_len and not request.prompt for request, tokens in given)
    loras = {request.adapter for request, _ in given} - {NO_ADAPTER}
    return StepShape(sum(tokens for _, tokens in given), len(given), every, len(loras))


def schedule(
    waiting: list[tuple[int, Request]], running: list[Running], bounds: SchedulerBounds
) -> list[tuple[Running, int]]:
    """Tokens that each running request gets in this step; requests that are admitted join the running ones."""
    left, given = bounds.max_num_batched_tokens, []
    for request in running if bounds.mixes else [request for request in running if request.prompt]:
        tokens = min(request.prompt or bounds.query_len, left)
        left -= tokens
        if tokens:
            given.append((request, tokens))
    advance = bounds.accepted_tokens or bounds.query_len
    decoding = len(served_of(running, bounds))
    for index, request in list(waiting):
        if not left or len(running) == bounds.max_num_seqs:
            break
        loaded = [other for other, _ in given] if bounds.mixes else running
        loras = {other.adapter for other in loaded} - {NO_ADAPTER}
        if (
            request.adapter not in loras | {NO_ADAPTER}
            and bounds.max_loras is not None
            and len(loras) >= bounds.max_loras
        ):
            continue
        held = sum(each.request.context_tokens + advance * each.made for each in running)
        step = advance * (decoding + 1)
        if bounds.kv_tokens is not None and held + step + request.context_tokens > bounds.kv_tokens:
            break
        waiting.remove((index, request))
        new = Running(
            request,
            index,
            request.context_tokens,
            math.ceil(max(request.generated_tokens - 1, 0) / advance),
        )
        running.append(new)
        tokens = min(new.prompt, left)
        left -= tokens
        given.append((new, tokens))
    return given or [(request, bounds.query_len) for request in running]


GRID = st.integers(0, 90).map(lambda tens: 10.0 * tens)  # so that steps end when requests arrive


def parts(count: int) -> float:
    return count / 2**20  # so that sums are exact


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Request], SchedulerBounds]:
    query_len = draw(st.integers(1, 4))
    bounds = SchedulerBounds(
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 24)),
        query_len=query_len,
        max_loras=draw(st.none() | st.integers(1, 3)),
        accepted_tokens=draw(st.none() | st.integers(2**20, 2**20 * query_len).map(parts)),
        mixes=draw(st.booleans()),
        kv_tokens=draw(st.none() | st.integers(75, 200)),
        ranks=draw(st.just(1) | st.integers(2, 3)),
    )
    adapters = st.just(NO_ADAPTER) | st.integers(0, 4)
    arrivals = draw(st.lists(GRID | st.floats(0, 3000), max_size=14, min_size=1))
    requests = [
        Request(time, draw(st.integers(1, 40)), draw(st.integers(0, 30)), draw(adapters))
        for time in arrivals
    ]
    return requests, bounds


@settings(max_examples=400, deadline=None)
@given(
    case=cases(),
    fixed=st.just(10.0) | st.floats(0.0005, 300),
    slope=st.just(0.0) | st.floats(0, 20),
)
def test_equal_steps_added_at_once_are_one_step_after_the_other(
    case: tuple[list[Request], SchedulerBounds], fixed: float, slope: float
) -> None:
    requests, bounds = case

    def step_time(batch: StepShape) -> float:
        return fixed + slope * batch.num_tokens

    trace = simulate(RequestTrace(requests), bounds, step_time)
    expected = one_by_one(requests, bounds, step_time)
    assert dict(trace.histogram) == dict(expected.counts)
    service = trace.service
    assert service is not None
    assert service.preempted == expected.preempted
    assert service.ttft_us == percentiles(list(expected.ttft.values()))
    assert service.tpot_us == percentiles(expected.tpot)
    assert service.step_us == percentiles([time for time, _ in expected.times])
    assert service.decode_us == percentiles([time for time, uniform in expected.times if uniform])
    wanted = sum(max(request.generated_tokens, 1) for request in requests)
    starts = min(round(request.arrival_us * 1000) for request in requests)
    assert wanted / service.tokens_per_s * 1e9 == pytest.approx(max(expected.ended - starts, 1))


# --- by hand ---------------------------------------------------------------------------------------------------


BOUNDS = SchedulerBounds(8, 64)
APART = SchedulerBounds(8, 8, mixes=False)
PASSING = [Request(0, 1, 3, 0), Request(0, 1, 3, 1), Request(0, 1, 3), Request(0, 1, 3, 0)]


@pytest.mark.parametrize(
    ("requests", "bounds", "steps"),
    [
        # a prefill in chunks; it yields the first of 4 tokens
        (
            [Request(5.0, 20, 4)],
            SchedulerBounds(8, 8),
            {mixed(8, 1): 2, mixed(4, 1): 1, decode(1): 3},
        ),
        # at most one token: the request ends with its prefill
        ([Request(0, 3, 0)], SchedulerBounds(8, 8), {mixed(3, 1): 1}),
        ([Request(0, 3, 1)], SchedulerBounds(8, 8), {mixed(3, 1): 1}),
        # requests beyond max_num_seqs wait
        (
            [Request(0, 1, 3)] * 5,
            SchedulerBounds(2, 64),
            {mixed(2, 2): 2, decode(2): 4, mixed(1, 1): 1, decode(1): 2},
        ),
        # a step with prefill is mixed, and decodes come first
        (
            [Request(0, 1, 9), Request(0, 30, 1)],
            SchedulerBounds(4, 8),
            {mixed(8, 2): 4, mixed(3, 2): 1, decode(1): 4},
        ),
        # query_len tokens of each decoding request
        (
            [Request(0, 5, 7)] * 2,
            SchedulerBounds(4, 64, 3),
            {mixed(10, 2): 1, StepShape(6, 2, True): 2},
        ),
        (
            [Request(0, 5, 7)] * 2,
            SchedulerBounds(4, 64, 3, None, 1.5),
            {mixed(10, 2): 1, StepShape(6, 2, True): 4},
        ),
        # decodes that do not fit wait their turn and are not uniform
        (
            [Request(0, 2, 3)] * 3,
            SchedulerBounds(4, 8, 3, None, 1.0),
            {mixed(6, 3): 1, mixed(8, 3): 2},
        ),
        # an adapter too many lets others pass; without a bound all run
        (
            PASSING,
            SchedulerBounds(8, 64, max_loras=1),
            {mixed(3, 3, 1): 1, decode(3, 1): 2, mixed(1, 1, 1): 1, decode(1, 1): 2},
        ),
        (PASSING, SchedulerBounds(8, 64), {mixed(4, 4, 2): 1, decode(4, 2): 2}),
        # apart: a prompt that comes while others decode is prefilled alone, in chunks, and they stand still
        (
            [Request(0, 1, 9), Request(15.0, 30, 1)],
            APART,
            {mixed(1, 1): 1, decode(1): 8, mixed(8, 1): 3, mixed(6, 1): 1},
        ),
        # waiting prompts share a step; decode has no bound of tokens
        (
            [Request(0, 3, 2)] * 4,
            replace(APART, query_len=4),
            {mixed(8, 3): 1, mixed(4, 2): 1, StepShape(16, 4, True): 1},
        ),
        # a step has the adapters of its own requests, and a decoding one keeps others out
        (
            PASSING,
            replace(APART, max_loras=1),
            {mixed(3, 3, 1): 1, decode(3, 1): 2, mixed(1, 1, 1): 1, decode(1, 1): 2},
        ),
        (
            [Request(0, 1, 4, 0), Request(15.0, 1, 1)],
            APART,
            {mixed(1, 1, 1): 1, decode(1, 1): 3, mixed(1, 1): 1},
        ),
    ],
)
def test_steps_by_hand(
    requests: list[Request], bounds: SchedulerBounds, steps: dict[StepShape, float]
) -> None:
    assert steps_of(requests, bounds) == steps


def test_an_arrival_is_seen_by_the_first_step_that_begins_after_it() -> None:
    first = Request(0, 1, 11)  # its prefill begins at 0 us, its decode steps at 10, 20, ... 100 us
    bounds = SchedulerBounds(8, 64)
    assert steps_of([first, Request(30.0, 7, 1)], bounds) == {
        StepShape(1, 1): 1,
        decode(1): 9,
        StepShape(8, 2): 1,
    }
    at_90 = steps_of([first, Request(90.0, 7, 3)], bounds)
    assert at_90 == {StepShape(1, 1): 1, decode(1): 8 + 1, StepShape(8, 2): 1, decode(2): 1}
    at_100 = steps_of([first, Request(90.001, 7, 3)], bounds)
    assert at_100 == {StepShape(1, 1): 1, decode(1): 9 + 2, StepShape(8, 2): 1}


def test_long_requests_cost_no_more_than_short_ones() -> None:
    """A step at a time, this would take hours."""
    found = steps_of([Request(0, 10**9, 10**9), Request(0, 1, 10**9)], SchedulerBounds(2, 1024))
    assert sum(found.values()) > 10**9
    assert found[decode(2)] < 10**9


@pytest.mark.parametrize(("most", "told"), [(1, True), (2, False), (None, False)])
def test_requests_that_wait_for_the_slot_of_an_adapter_are_told(
    most: int | None, told: bool
) -> None:
    bounds = SchedulerBounds(8, 64, max_loras=most)
    found = simulate(RequestTrace(PASSING, "passing"), bounds, lambda batch: 10.0).warnings
    assert [text for text in found if text.startswith("passing: 25% of the requests wait")] == [
        "passing: 25% of the requests wait, as max_loras = 1 other adapters run: a larger one "
        "shortens TTFT"
    ] * told


def test_all_requests_that_wait_for_one_adapter_are_counted() -> None:
    others = [Request(10.0 + index, 5, 10, adapter=2) for index in range(10)]
    trace = RequestTrace([Request(0.0, 5, 10, adapter=1), *others], "two adapters")
    bounds = SchedulerBounds(16, 64, max_loras=1)
    found = simulate(trace, bounds, lambda batch: 10.0).warnings
    assert [text[:38] for text in found if "max_loras" in text] == [
        "two adapters: 91% of the requests wait"
    ]


def test_idle_time_has_no_steps_and_the_notes_say_how_busy() -> None:
    traffic = simulate(
        RequestTrace([Request(0, 1, 1), Request(90.0, 1, 1)], "two"),
        SchedulerBounds(2, 8),
        lambda batch: 10.0,
    )
    assert traffic.total == 2
    assert traffic.source == "two"
    assert any("one request or more runs 20% of the time" in note for note in traffic.notes)


def test_bounds_are_those_of_the_plan() -> None:
    plan = plan_of(spec=2, seqs=4, tokens=128, lora={"max_loras": 3})
    assert SchedulerBounds.of(plan, accepted_tokens=1.5) == SchedulerBounds(4, 128, 3, 3, 1.5)
    assert SchedulerBounds.of(plan_of()) == SchedulerBounds(256, 8192)
    assert SchedulerBounds.of(plan_of(), mixes=False) == SchedulerBounds(256, 8192, mixes=False)


def test_a_trace_without_requests_is_refused() -> None:
    with pytest.raises(TrafficError, match="nothing: there is no request with a prompt"):
        simulate(RequestTrace([], "nothing"), SchedulerBounds(1, 1), lambda batch: 1.0)


# --- overload and replicas -------------------------------------------------------------------------------------

ONE_BY_ONE = SchedulerBounds(1, 64)  # 10 us for each request of 1 token


def every(gap: float, number: int, start: float = 0.0) -> list[Request]:
    return [Request(start + gap * i, 1, 1) for i in range(number)]


@pytest.mark.parametrize(
    ("requests", "times", "replicas"),
    [
        (every(8.0, 1000), "1.25", 2),
        (every(2.5, 1000), "4.00", 4),
        (every(2.4, 1000), "4.1", 5),
        (every(11.0, 500) + every(4.0, 2000, 5500.0), "2.50", 3),  # since the queue was last empty
    ],
)
def test_an_overload_is_a_warning_with_the_replicas_that_would_do(
    requests: list[Request], times: str, replicas: int
) -> None:
    trace = RequestTrace(requests)
    (warning,) = simulate(trace, ONE_BY_ONE, lambda batch: 10.0).warnings
    assert f"requests come {times}" in warning
    assert f"; {replicas} would do" in warning
    assert simulate(trace.spread(replicas), ONE_BY_ONE, lambda batch: 10.0).warnings == ()


@pytest.mark.parametrize(
    "requests",
    [
        every(10.0, 1000),
        every(0.0, 1000),  # all at once: no rate
        every(20.0, 1000) + every(0.0, 900, 2e4),  # a burst at the end
        every(2.0, 300) + every(20.0, 1000, 600.0),  # a burst at the beginning, and it drains
        [Request(15.0 * i, 1, 2) for i in range(400)]
        + every(15.0, 100, 6000.0),  # shorter ones at the end: it drains
        every(9.7, 20000),  # 3% too many
        every(2.0, 5),  # too few to tell
        [Request(0, 1, 1), Request(5.0, 1, 10**6)],  # the last one takes long
    ],
)
def test_what_drains_is_no_overload(requests: list[Request]) -> None:
    assert simulate(RequestTrace(requests), ONE_BY_ONE, lambda batch: 10.0).warnings == ()


def test_replicas_share_requests_by_their_arrival() -> None:
    trace = RequestTrace([Request(9.0 - i, i + 1, 1) for i in range(10)], "ten")
    shared = trace.spread(4)
    assert [request.arrival_us for request in shared.requests] == [0.0, 4.0, 8.0]
    assert shared.source == "ten, for 1 of 4 replicas"
    assert trace.spread(1) == trace


# --- ranks that step together --------------------------------------------------------------------------------


def test_ranks_step_together_at_the_size_of_the_largest() -> None:
    """Three requests of one rank's and another's batch; the second rank has one of them alone."""
    ranks = replace(BOUNDS, ranks=2)
    requests = [Request(0, 5, 3), Request(0, 1, 3), Request(0, 2, 3)]
    assert steps_of(requests, ranks) == {mixed(7, 2): 1, decode(2): 2}
    # a rank that decodes waits for one that prefills, and its step is as large
    assert steps_of([Request(0, 1, 4), Request(15, 30, 1)], ranks) == {
        mixed(1, 1): 1,
        decode(1): 2,
        mixed(30, 1): 1,
    }
    traffic = simulate(RequestTrace(requests), ranks, lambda batch: 10.0)
    assert traffic.service is not None
    assert traffic.service.tokens_per_s == pytest.approx(9 / 30e-6)
    assert any("2 ranks step together" in note for note in traffic.notes)


def test_a_request_goes_to_the_rank_with_the_fewest_and_ties_take_turns() -> None:
    """The first rank keeps its long request, so that all later ones go to the second."""
    requests = [Request(0, 1, 100), *[Request(100.0 * n, 1, 2) for n in range(1, 5)]]
    assert {shape.num_reqs for shape in steps_of(requests, replace(BOUNDS, ranks=2))} == {1}
    assert {shape.num_reqs for shape in steps_of(requests, BOUNDS)} == {1, 2}


def test_replicas_that_would_do_count_the_ranks() -> None:
    (warning,) = simulate(
        RequestTrace(every(2.5, 1000)), replace(ONE_BY_ONE, ranks=2), lambda batch: 10.0
    ).warnings
    assert "requests come 2.00" in warning
    assert "; 4 would do" in warning


# --- the clock -------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(plan=plans() | plans_with_lanes(), apart=st.booleans(), data=st.data())
def test_a_step_takes_the_time_of_the_graph_that_the_dispatcher_chooses(
    plan: Plan, apart: bool, data: st.DataObject
) -> None:
    times = StepTimes.default()
    clock = step_clock(plan, times, apart=apart)
    dispatcher = CudagraphDispatcher(plan)
    largest = plan.max_num_batched_tokens
    near = {size + by for size in plan.capture_sizes for by in (-1, 0, 1)}
    near = {size for size in near if 1 <= size <= largest}
    for size in [*near, *data.draw(st.lists(st.integers(1, largest), max_size=5))]:
        uniform = data.draw(st.booleans())
        adapters = data.draw(st.integers(0, (plan.max_loras or 0) + 1))
        own = CUDAGraphMode.FULL if uniform else CUDAGraphMode.PIECEWISE
        mode, ran = dispatcher.dispatch(size, uniform, adapters, {own} if apart else None)
        case = adapters if mode is CUDAGraphMode.NONE else ran.num_active_loras
        wanted = times.of(mode, ran.num_tokens, case)
        assert clock(StepShape(size, 1, uniform, adapters)) == pytest.approx(wanted)


def test_the_first_requests_are_those_that_come_first() -> None:
    trace = RequestTrace([Request(9.0 - i, i + 1, 1) for i in range(10)], "ten")
    assert [each.arrival_us for each in trace.first(3).requests] == [0.0, 1.0, 2.0]
    assert trace.first(10) is trace


def test_what_requests_get_by_hand() -> None:
    """A prefill of 10 us, and two decode steps; the second request waits for the first step's end."""
    traffic = simulate(
        RequestTrace([Request(0, 3, 3), Request(5, 3, 1)]), BOUNDS, lambda batch: 10.0
    )
    service = traffic.service
    assert service is not None
    assert service.ttft_us == Percentiles(p50=10.0, p99=15.0)
    assert service.tpot_us == Percentiles(p50=10.0, p99=10.0)
    assert service.tokens_per_s == pytest.approx(4 / 30e-6)
    assert service.preempted == 0


def test_a_full_kv_cache_preempts_the_last_request() -> None:
    requests = [Request(0, 10, 10), Request(0, 10, 10)]
    roomy = simulate(RequestTrace(requests), replace(BOUNDS, kv_tokens=60), lambda batch: 10.0)
    tight = simulate(RequestTrace(requests), replace(BOUNDS, kv_tokens=30), lambda batch: 10.0)
    assert roomy.service is not None
    assert tight.service is not None
    assert (roomy.service.preempted, tight.service.preempted) == (0, 1)
    assert tight.service.ttft_us.p99 == roomy.service.ttft_us.p99
    assert tight.service.tokens_per_s < roomy.service.tokens_per_s
    assert any("a KV cache of 30 tokens, 1 preemption, " in note for note in tight.notes)


def test_a_preempted_request_waits_from_when_it_was_put_back() -> None:
    """Two requests decode for 5 steps; the second begins again when the first is done, 4 steps later."""
    requests = [Request(0, 10, 10), Request(0, 10, 10)]
    bounds = replace(BOUNDS, kv_tokens=30)
    traffic = simulate(RequestTrace(requests), bounds, lambda batch: 1e6)
    (waited,) = [note for note in traffic.notes if "a request waits" in note]
    assert waited.endswith("a request waits 4.00 s at most")


def test_a_request_that_no_kv_cache_holds_is_refused() -> None:
    with pytest.raises(
        TrafficError, match="a request of 20 tokens does not fit into a KV cache of 20"
    ):
        simulate(
            RequestTrace([Request(0, 10, 10)]), replace(BOUNDS, kv_tokens=20), lambda batch: 10.0
        )


# --- requests that are made up ---------------------------------------------------------------------------------


def made_up(lora: Any = None, **section: Any) -> RequestTrace:
    config = Config.model_validate({"traffic": MADE | section, "lora": lora})
    assert config.traffic is not None
    return synthetic_requests(config.traffic, build_plan(config))


MADE = {"request_rate": 20, "num_requests": 4000, "prompt_median": 400, "prompt_p95": 2000}
MADE |= {"output_median": 50, "output_p95": 200}


def test_synthetic_requests_have_the_lengths_and_the_rate_that_were_asked_for() -> None:
    trace = made_up()
    assert trace.source == "synthetic: 4000 requests, 20 a second, seed 0"
    prompts, outputs = (sorted(request[i] for request in trace.requests) for i in (1, 2))
    for lengths, median, p95 in ((prompts, 400, 2000), (outputs, 50, 200)):
        assert lengths[2000] == pytest.approx(median, rel=0.1)
        assert lengths[3800] == pytest.approx(p95, rel=0.1)
    assert trace.requests[-1].arrival_us == pytest.approx(4000 / 20 * 1e6, rel=0.1)
    gaps = [b.arrival_us - a.arrival_us for a, b in pairwise(trace.requests)]
    above_mean = sum(gap > 1e6 / 20 for gap in gaps) / len(gaps)
    assert above_mean == pytest.approx(0.368, abs=0.03), (
        "1 / e of exponential times are above their mean"
    )


def test_equal_seeds_give_equal_requests() -> None:
    first, again, other = (made_up(seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.requests != other.requests


@pytest.mark.parametrize(
    ("share", "adapters"),
    [
        ({"lora_share": 0.5}, {NO_ADAPTER, 0, 1, 2}),
        ({"lora_share": 1, "num_adapters": 1}, {0}),
        ({}, {NO_ADAPTER}),
    ],
)
def test_synthetic_requests_use_adapters(share: dict[str, Any], adapters: set[int]) -> None:
    assert {
        request.adapter for request in made_up(lora={"max_loras": 3}, **share).requests
    } == adapters
