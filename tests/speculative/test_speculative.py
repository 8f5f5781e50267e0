"""Speculative decoding by graphs: tokens are those of plain greedy decoding, and both caches hold what they should."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from checks import back_at, reserved
from decoder import Decoder, first_layers
from decoding import (
    BLOCK,
    CAPACITY,
    MAX_BLOCKS,
    NUM_BLOCKS,
    VOCAB,
    Chunk,
    batch_of,
    configure,
    decoder,
    greedy,
    logits_of,
    one_thread,
    prompts,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_decode import PagedModel, SpecDecodeGraphManager, fetch, send
from torch import Tensor

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.tape import TapeBackend
from cgplan.config import Config
from cgplan.errors import CgplanError, ConfigError, DispatchMissError, InputError, ModelError
from cgplan.graphs.wrapper import GraphPool
from cgplan.modes import CUDAGraphMode

pytestmark = pytest.mark.usefixtures("quiet_collector")
FULL = CUDAGraphMode.FULL
MAX_SEQS, MOST = 4, 5


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def spec_config(
    backend: GraphBackend, *, mode: str = "FULL_DECODE_ONLY", k: int = 3, **compilation: Any
) -> Config:
    return configure(
        backend,
        compilation={
            "cudagraph_mode": mode,
            "cudagraph_capture_sizes": [(1 + k) * reqs for reqs in (1, 2, 4)],
            **compilation,
        },
        speculative={"num_speculative_tokens": k},
    )


def pair(backend: GraphBackend) -> tuple[Decoder, Decoder]:
    """A target, and a draft that is often right and often wrong."""
    target = decoder(backend, num_layers=3)
    return target, first_layers(target, 2)


@dataclass
class Job:
    """One request of the engine below."""

    tokens: list[int]
    count: int
    blocks: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)


class Engine:
    """Continuous batching around a manager: requests of any lengths join as others are done."""

    def __init__(
        self, manager: SpecDecodeGraphManager, choose: random.Random, *, tight: bool = False
    ) -> None:
        self.manager, self.choose, self.tight = manager, choose, tight
        self.device = manager.backend.device
        self.free = list(range(NUM_BLOCKS))
        choose.shuffle(self.free)
        self.running: dict[int, Job] = {}

    def generate(self, given: list[list[int]], counts: list[int]) -> list[list[int]]:
        jobs = [Job(list(prompt), count) for prompt, count in zip(given, counts, strict=True)]
        waiting = list(jobs)
        while waiting or self.running:
            while waiting and len(self.running) < MAX_SEQS:
                self.admit(waiting.pop(0))
            self.decode()
        return [job.found[: job.count] for job in jobs]

    def admit(self, job: Job) -> None:
        """Prefill in one or two parts, and take the first token."""
        self.hold(job, len(job.tokens) + 1)
        cut, context = self.choose.randrange(len(job.tokens)), 0
        for part in (job.tokens[:cut], job.tokens[cut:]):
            if part:
                logits = self.manager.prefill(
                    **batch_of([Chunk(part, context, job.blocks)], self.device)
                )
                context += len(part)
        self.append(job, [int(logits[-1].argmax())])
        if len(job.found) < job.count:
            self.running[self.manager.add(job.tokens, job.blocks)] = job
        else:
            self.free += job.blocks

    def decode(self) -> None:
        """A step of some of the requests with some number of drafts; those that are done leave."""
        slots = self.choose.sample(
            sorted(self.running), self.choose.randint(min(1, len(self.running)), len(self.running))
        )
        number = self.choose.choice(self.manager.plan.draft_tokens)
        for slot in slots:
            job = self.running[slot]
            # A tight engine gives room for one token more; then drafts have no place, and none is accepted.
            self.hold(job, min(len(job.tokens) + (0 if self.tight else number), CAPACITY))
            self.manager.set_blocks(slot, job.blocks)
        if not slots:
            return
        for slot, tokens in zip(slots, self.manager.step(slots, number).tokens(), strict=True):
            job = self.running[slot]
            self.append(job, tokens)
            if len(job.found) >= job.count:
                self.manager.remove(slot)
                self.free += self.running.pop(slot).blocks

    def append(self, job: Job, tokens: list[int]) -> None:
        assert tokens, "every step brings a token"
        job.tokens += tokens
        job.found += tokens

    def hold(self, job: Job, length: int) -> None:
        while len(job.blocks) * BLOCK < length:
            job.blocks.append(self.free.pop())


@dataclass
class Captured:
    manager: SpecDecodeGraphManager
    target: Decoder
    draft: Decoder
    alone: Decoder  # the target's weights with a cache of its own


def captured(backend: GraphBackend, config: Config, **options: Any) -> Captured:
    target, draft = pair(backend)
    manager = SpecDecodeGraphManager(config, target, draft, backend, **options)
    manager.capture()
    return Captured(manager, target, draft, first_layers(target, 3))


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def for_all_tests(request: pytest.FixtureRequest, quiet_collector: None) -> Iterator[Captured]:
    """Captured for 1, 3 and 5 draft tokens, once for all tests that only decode."""
    backend = select_backend(request.param)
    found = captured(backend, spec_config(backend, k=MOST), draft_tokens=(1, 3))
    yield found
    found.manager.close()


@pytest.fixture
def shared(for_all_tests: Captured) -> Captured:
    """Without requests that a test before left in it."""
    forget(for_all_tests.manager)
    return for_all_tests


def forget(manager: SpecDecodeGraphManager) -> None:
    for slot in manager.slots:
        manager.remove(slot)


def begin(found: Captured, prompt: list[int], blocks: Sequence[int]) -> int:
    """Prefill a prompt, append its next token, and hand the request over."""
    logits = found.manager.prefill(
        **batch_of([Chunk(prompt, 0, blocks)], found.manager.backend.device)
    )
    prompt.append(int(logits[-1].argmax()))
    return found.manager.add(prompt, blocks)


# --- tokens ---------------------------------------------------------------------------------------------------


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 16)), min_size=1, max_size=7),
    seed=st.integers(0, 10_000),
    tight=st.booleans(),
)
def test_tokens_equal_plain_greedy_decoding(
    shared: Captured, lengths: list[tuple[int, int]], seed: int, tight: bool
) -> None:
    """Any batch size, any number of drafts at each step, requests that join and leave, blocks given bit by bit."""
    forget(shared.manager)
    given = prompts(seed, [length for length, _ in lengths])
    counts = [count for _, count in lengths]
    found = Engine(shared.manager, random.Random(seed), tight=tight).generate(given, counts)
    assert found == [
        greedy(shared.alone, prompt, count) for prompt, count in zip(given, counts, strict=True)
    ]


def test_each_number_of_draft_tokens(shared: Captured) -> None:
    for k in (1, 3, MOST):
        given, accepted = prompts(k, [7, 3, 12]), shared.manager.stats.accepted
        slots = [
            begin(shared, prompt, range(i * MAX_BLOCKS, (i + 1) * MAX_BLOCKS))
            for i, prompt in enumerate(given)
        ]
        for _ in range(2):
            for prompt, tokens in zip(given, shared.manager.step(slots, k).tokens(), strict=True):
                assert 1 <= len(tokens) <= k + 1
                prompt += tokens
        for slot, prompt, length in zip(slots, given, (7, 3, 12), strict=True):
            assert prompt[length:] == greedy(shared.alone, prompt[:length], len(prompt) - length)
            shared.manager.remove(slot)
        assert sum(map(len, given)) == 7 + 3 + 12 + 3 + 6 + shared.manager.stats.accepted - accepted


def test_some_drafts_are_accepted_and_some_rejected(shared: Captured) -> None:
    before = replace(shared.manager.stats, steps=shared.manager.stats.steps.copy())
    Engine(shared.manager, random.Random(1)).generate(prompts(1, [5] * 6), [16] * 6)
    stats = shared.manager.stats
    tokens, steps = stats.tokens - before.tokens, stats.steps.total() - before.steps.total()
    assert 0.1 < (stats.accepted - before.accepted) / (stats.drafted - before.drafted) < 0.9
    assert steps < tokens >= 6 * 15
    assert 0 < stats.acceptance < 1


def test_steps_can_be_queued_before_the_last_ones_are_read(shared: Captured) -> None:
    """The device knows by itself how far each request is; it stops at the end of the request's blocks."""
    [tokens], blocks = prompts(3, [6]), [9, 2, 5, 7]
    slot = begin(shared, tokens, blocks)
    steps = [shared.manager.step([slot], 3) for _ in range(14)]
    tokens += [token for step in steps for token in step.tokens()[0]]
    assert len(tokens) == len(blocks) * BLOCK + 1
    assert steps[-1].tokens() == [[]]
    with pytest.raises(InputError, match="has 16 tokens in the cache, and its blocks hold 16"):
        shared.manager.step([slot])
    shared.manager.set_blocks(slot, [*blocks, 11])
    tokens += shared.manager.step([slot]).tokens()[0]
    assert tokens[6:] == greedy(shared.alone, tokens[:6], len(tokens) - 6)


def test_up_to_the_end_of_the_block_table(shared: Captured) -> None:
    """Drafts that would lie behind the table's last column are written nowhere, so they spoil nothing before it."""
    [tokens], blocks = prompts(2, [CAPACITY - 6]), list(range(MAX_BLOCKS))
    slot = begin(shared, tokens, blocks)
    steps = [shared.manager.step([slot], 5) for _ in range(7)]
    tokens += [token for step in steps for token in step.tokens()[0]]
    assert tokens[CAPACITY - 6 :] == greedy(shared.alone, tokens[: CAPACITY - 6], 7)
    fresh = first_layers(shared.target, shared.target.config.num_layers)
    logits_of(fresh, [Chunk(tokens[:-1], 0, blocks)])
    for ours, wanted in zip(
        cached(shared.target, blocks, CAPACITY), cached(fresh, blocks, CAPACITY), strict=True
    ):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


def test_positions_stay_inside_what_a_block_table_holds(backend: GraphBackend) -> None:
    """A model may look its positions up in a table of that length: drafts behind its end must not read past it."""
    target, draft = pair(backend)
    table = torch.arange(CAPACITY, device=backend.device)

    def looking_up(model: Decoder) -> PagedModel:
        return PagedModel(
            lambda input_ids, positions: model(input_ids, table[positions]),
            VOCAB,
            BLOCK,
            NUM_BLOCKS,
        )

    [prompt], blocks = prompts(2, [CAPACITY - 6]), list(range(MAX_BLOCKS))
    for mode in ("NONE", "FULL_DECODE_ONLY"):
        config = spec_config(backend, mode=mode)
        with SpecDecodeGraphManager(
            config, looking_up(target), looking_up(draft), backend
        ) as manager:
            manager.capture()
            logits = manager.prefill(**batch_of([Chunk(prompt, 0, blocks)], backend.device))
            found = [int(logits[-1].argmax())]
            slot = manager.add([*prompt, *found], blocks)
            steps = [
                manager.step([slot]) for _ in range(6)
            ]  # the last ones begin at the table's end
            found += [token for step in steps for token in step.tokens()[0]]
        assert found == greedy(first_layers(target, 3), prompt, 7)


def test_a_late_answer_is_not_taken_for_the_next_request_in_the_slot(shared: Captured) -> None:
    one, two = prompts(5, [CAPACITY - 1, 4])
    slot = begin(shared, one, range(MAX_BLOCKS))
    late = shared.manager.step([slot], 1)
    shared.manager.remove(slot)
    assert begin(shared, two, range(MAX_BLOCKS)) == slot
    late.tokens()
    for _ in range(3):
        two += shared.manager.step([slot], 3).tokens()[0]
    assert two[4:] == greedy(shared.alone, two[:4], len(two) - 4)


# --- caches ---------------------------------------------------------------------------------------------------


def cached(model: Decoder, blocks: list[int], count: int) -> list[Tensor]:
    """What a model's caches hold of the first ``count`` tokens of a request."""
    caches = [buffer for name, buffer in model.named_buffers() if name.endswith("_cache")]
    return [cache[blocks].flatten(0, 1)[:count] for cache in caches]


def test_both_caches_hold_what_a_prefill_of_the_tokens_writes(shared: Captured) -> None:
    """Also where rejected tokens were, and where the draft's last token was accepted, which it had not read."""
    manager, choose, partly, wholly = shared.manager, random.Random(2), 0, 0
    for number, prompt in enumerate(prompts(8, [5, 3, 9])):
        blocks = list(range(number * MAX_BLOCKS, (number + 1) * MAX_BLOCKS))
        slot, tokens = begin(shared, prompt, blocks), prompt
        while len(tokens) < CAPACITY - MOST:
            k = choose.choice((1, 3))
            new = manager.step([slot], k).tokens()[0]
            partly, wholly = partly + (len(new) <= k), wholly + (len(new) == k + 1)
            tokens += new
        manager.step([slot], 1)  # the draft reads what it has not read
        manager.remove(slot)
        for model in (shared.target, shared.draft):
            fresh = first_layers(model, model.config.num_layers)
            logits_of(fresh, [Chunk(tokens, 0, blocks)])
            for found, wanted in zip(
                cached(model, blocks, len(tokens)), cached(fresh, blocks, len(tokens)), strict=True
            ):
                torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert partly > 2
    assert wholly > 2


def test_nothing_is_written_outside_of_a_requests_blocks(shared: Captured) -> None:
    """At the end of its blocks, in the padding of a graph for more requests, and next to other requests."""
    manager, device = shared.manager, shared.manager.backend.device
    given, blocks = prompts(9, [3, 6, 2]), [[1], [2, 3], [4]]  # of 3 requests, padded to 4
    slots = []
    for prompt, held in zip(given, blocks, strict=True):
        manager.prefill(**batch_of([Chunk(prompt, 0, held)], device))
        slots.append(manager.add([*prompt, 1], held))
    others = [block for block in range(NUM_BLOCKS) if block not in (1, 2, 3, 4)]
    before = [cached(model, others, NUM_BLOCKS * BLOCK) for model in (shared.target, shared.draft)]
    found = manager.step(slots, 5).tokens()
    after = [cached(model, others, NUM_BLOCKS * BLOCK) for model in (shared.target, shared.draft)]
    assert len(found[0]) == 1  # one place was left
    for model, (was, now) in enumerate(zip(before, after, strict=True)):
        assert all(torch.equal(x, y) for x, y in zip(was, now, strict=True)), model


# --- the plan, the pool, the modes ----------------------------------------------------------------------------


def test_one_plan_names_all_graphs() -> None:
    backend = TapeBackend()
    target, draft = pair(backend)
    manager = SpecDecodeGraphManager(spec_config(backend), target, draft, backend, draft_tokens=[1])
    plan = manager.plan
    assert list(plan.parts) == [
        "verify k=3",
        "verify k=1",
        "propose k=3",
        "propose k=1",
        "target",
        "draft",
    ]
    assert plan.num_reqs == (1, 2, 4)
    assert plan.draft_tokens == (3, 1)
    for name, q in (("verify k=3", 4), ("verify k=1", 2), ("propose k=3", 1), ("propose k=1", 1)):
        assert [
            (part, mode, d.num_tokens, d.num_reqs, d.uniform)
            for part, mode, d in plan.keys
            if part == name
        ] == [(name, FULL, q * reqs, reqs, True) for reqs in (4, 2, 1)]
    assert len(plan.keys) == 12
    assert "12 graphs in one pool" in str(plan)
    report = manager.capture()
    assert report.graphs == 12
    assert (
        manager.managers["propose k=3"].report.records[0].nodes
        > manager.managers["propose k=1"].report.records[0].nodes
    )
    manager.close()


def test_all_parts_share_one_pool(backend: GraphBackend) -> None:
    """It is hardly larger than what the largest part takes alone, and it is free again after close."""
    target, draft = pair(backend)
    pool = GraphPool(backend)
    manager = SpecDecodeGraphManager(spec_config(backend), target, draft, pool=pool)
    assert manager.backend is backend
    manager.capture()  # what libraries keep for themselves is there from now on
    manager.close()
    before = reserved(backend)
    together = manager.capture()
    assert together.pool_bytes == manager.pool.nbytes == pool.nbytes > 0
    assert (
        together.static_bytes == sum(report.static_bytes for report in together.parts.values()) > 0
    )
    assert str(manager.report) == str(together)
    manager.close()
    manager.close()
    assert back_at(backend, before)
    alone = []
    for part in list(manager.managers.values())[:2]:
        part.capture()
        alone.append(part.pool.nbytes)
        part.close()
    assert len(alone) == 2
    assert max(alone) <= together.pool_bytes < sum(alone)


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_other_modes(backend: GraphBackend, mode: str) -> None:
    """Decoding is captured where the mode has FULL graphs for it, else it runs eagerly; tokens are the same."""
    torch._dynamo.reset()
    found = captured(
        backend, spec_config(backend, mode=mode, splitting_modules=["layers.*.self_attn"])
    )
    manager = found.manager
    assert bool(manager.plan.num_reqs) == mode.startswith("FULL")
    given = prompts(4, [5, 9])
    assert Engine(manager, random.Random(4)).generate(given, [9, 12]) == [
        greedy(found.alone, given[0], 9),
        greedy(found.alone, given[1], 12),
    ]
    captured_steps = sum(manager.managers["verify k=3"].stats.replays.values())
    assert (captured_steps > 0) == mode.startswith("FULL")
    mixed = manager.managers["draft"].stats
    assert (sum(mixed.replays.values()) > 0) == (mode != "NONE")
    manager.close()


def test_a_step_replays_two_graphs_of_the_padded_number_of_requests(shared: Captured) -> None:
    manager = shared.manager
    slots = [
        begin(shared, prompt, [index, 10 + index])
        for index, prompt in enumerate(prompts(6, [4, 4, 4]))
    ]
    before = {name: dict(part.stats.replays) for name, part in manager.managers.items()}
    manager.step(slots, 3).tokens()
    new = {
        (name, key): count - before[name].get(key, 0)
        for name, part in manager.managers.items()
        for key, count in part.stats.replays.items()
        if count != before[name].get(key, 0)
    }
    assert {(name, d.num_tokens, d.num_reqs): count for (name, (_, d)), count in new.items()} == {
        ("propose k=3", 4, 4): 1,
        ("verify k=3", 16, 4): 1,
    }


def test_capture_again_after_close_and_after_a_failure(backend: GraphBackend) -> None:
    target, draft = pair(backend)
    fails = [False]

    def brittle(input_ids: Tensor, positions: Tensor) -> Tensor:
        if (
            fails[0] and input_ids.shape[0] == 8
        ):  # the first step of the draft's loop, with 4 requests
            raise RuntimeError("the draft does not feel like it")
        return draft(input_ids, positions)

    spec = PagedModel(brittle, VOCAB, BLOCK, NUM_BLOCKS)
    manager = SpecDecodeGraphManager(spec_config(backend), target, spec, backend)
    manager.capture()
    manager.close()
    before = reserved(backend)
    fails[0] = True
    with pytest.raises(ModelError, match="does not feel like it"):
        manager.capture()
    assert back_at(backend, before)
    with pytest.raises(CgplanError, match="'draft' has no graphs"):
        manager.prefill(**batch_of([Chunk([1, 2], 0, [0])], backend.device))
    fails[0] = False
    alone = first_layers(target, 3)
    manager.capture()
    [prompt] = prompts(1, [4])
    assert Engine(manager, random.Random(1)).generate([prompt], [8]) == [greedy(alone, prompt, 8)]
    manager.close()


# --- mistakes -------------------------------------------------------------------------------------------------


def works(found: Captured) -> bool:
    """Whether the manager still decodes rightly."""
    [prompt] = prompts(12, [6])
    return Engine(found.manager, random.Random(0)).generate([prompt], [7]) == [
        greedy(found.alone, prompt, 7)
    ]


def launched(found: Captured) -> list[Any]:
    """All that a launch would change: counts of calls, and the caches."""
    stats = [
        (dict(part.stats.replays), dict(part.stats.eager))
        for part in found.manager.managers.values()
    ]
    blocks = list(range(NUM_BLOCKS + 1))
    caches = [
        cache.sum().item()
        for model in (found.target, found.draft)
        for cache in cached(model, blocks, 10**6)
    ]
    return [stats, caches]


def test_a_draft_of_another_vocabulary_or_cache() -> None:
    backend = TapeBackend()
    target = decoder(backend)
    config = spec_config(backend)
    with pytest.raises(ModelError, match="the draft knows 96 tokens, the target 97") as caught:
        SpecDecodeGraphManager(config, target, decoder(backend, vocab_size=96), backend)
    assert "target's vocabulary" in caught.value.remedy
    for changes in ({"block_size": 8}, {"num_blocks": NUM_BLOCKS - 1}):
        with pytest.raises(ModelError, match="the draft's cache has") as caught:
            SpecDecodeGraphManager(config, target, decoder(backend, **changes), backend)
        assert "share block tables" in caught.value.remedy
    with pytest.raises(ModelError, match=r"function.config has no vocab_size") as caught:
        SpecDecodeGraphManager(config, target, lambda input_ids, positions: input_ids, backend)
    assert "PagedModel(" in caught.value.remedy
    hidden = decoder(backend, logits=False)
    with pytest.raises(
        ModelError, match="returned \\[16, 48\\] for 16 tokens of a vocabulary of 97"
    ):
        SpecDecodeGraphManager(config, hidden, hidden, backend).capture()


def test_more_draft_tokens_than_the_configuration_says(shared: Captured) -> None:
    backend = TapeBackend()
    target, draft = pair(backend)
    for wrong in (0, 4, -1):
        with pytest.raises(
            InputError, match=f"{wrong} draft tokens were asked for; possible are 1, 2, 3"
        ) as caught:
            SpecDecodeGraphManager(
                spec_config(backend), target, draft, backend, draft_tokens=[wrong]
            )
        assert "num_speculative_tokens" in caught.value.remedy
    blocks = [0, 1]
    shared.manager.prefill(**batch_of([Chunk([1, 2, 3], 0, blocks)], shared.manager.backend.device))
    slot = shared.manager.add([1, 2, 3, 4], blocks)
    before = launched(shared)
    for wrong in (0, 6):
        with pytest.raises(
            InputError, match=f"{wrong} draft tokens were asked for; possible are 1, 3, 5"
        ):
            shared.manager.step([slot], wrong)
    assert launched(shared) == before
    shared.manager.remove(slot)
    assert works(shared)


@pytest.mark.parametrize(
    ("tokens", "blocks", "text", "remedy"),
    [
        (
            [1] * 34,
            list(range(9)),
            "9 blocks of 4 tokens for a request with 33 tokens",
            "wider block_tables",
        ),
        (
            [1] * 6,
            [0],
            "1 blocks of 4 tokens for a request with 5 tokens",
            "room for one token more",
        ),
        (
            [1] * 5,
            [0],
            "1 blocks of 4 tokens for a request with 4 tokens",
            "room for one token more",
        ),
        ([1] * 2, [NUM_BLOCKS], f"block {NUM_BLOCKS} does not exist", f"0 to {NUM_BLOCKS - 1}"),
        ([1] * 2, [-1], "block -1 does not exist", "The cache has blocks"),
        ([1], [0], "a request of 1 tokens", "at least one token more"),
        ([1, VOCAB], [0], f"ending in \\[1, {VOCAB}\\]", f"below {VOCAB}"),
        ([-1, 1], [0], "cannot be decoded", f"below {VOCAB}"),
        ([1, 2], [3, 1, 3], "block 3 was given twice", "Each holds other tokens"),
    ],
)
def test_requests_that_do_not_fit(
    shared: Captured, tokens: list[int], blocks: list[int], text: str, remedy: str
) -> None:
    before = launched(shared)
    with pytest.raises(InputError, match=text) as caught:
        shared.manager.add(tokens, blocks)
    assert remedy in caught.value.remedy
    assert launched(shared) == before
    with pytest.raises(InputError, match="a step of slots none"):
        shared.manager.step()
    assert works(shared)


def test_what_graphs_read_is_not_written_from_another_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither new requests nor other blocks, while the stream of the last step still has work."""
    current, busy = 0, False
    monkeypatch.setattr(TapeBackend, "stream_getter", lambda self: lambda: current)
    monkeypatch.setattr(TapeBackend, "is_busy", lambda self, stream: busy)
    backend = TapeBackend()
    found = captured(backend, spec_config(backend))
    [tokens], manager = prompts(3, [6]), found.manager
    slot = begin(found, tokens, [9, 2, 3])
    tokens += manager.step([slot], 3).tokens()[0]
    manager.add([1, 2], [1])
    current, busy = 7, True
    calls: list[Callable[[], Any]] = [lambda: manager.set_blocks(slot, [9, 1, 3, 5]), manager.step]
    for call in calls:
        with pytest.raises(CgplanError, match="another stream"):
            call()
    busy = False
    manager.set_blocks(slot, [9, 2, 3, 5])
    tokens += manager.step([slot]).tokens()[0]
    assert tokens[6:] == greedy(found.alone, tokens[:6], len(tokens) - 6)
    manager.close()


@pytest.mark.gpu
def test_tokens_come_from_the_stream_of_the_step() -> None:
    """The copy is waited for, and what is queued behind it is not."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        value = torch.full((3, 2), 7, device="cuda")
        fetched = fetch(value)
        value.zero_()
        torch.cuda._sleep(2_000_000_000)
    assert fetched().tolist() == [[7, 7]] * 3
    assert not stream.query(), "a second of work is still queued"
    stream.synchronize()
    with torch.device("cuda"):  # the default device of a process may be the GPU
        assert fetch(value)().device.type == "cpu"
        assert send([1, 2], value.device).tolist() == [1, 2]


def test_slots_and_batches_that_cannot_be(shared: Captured) -> None:
    slot = shared.manager.add([1, 2], [0])
    before = launched(shared)
    with pytest.raises(InputError, match="no request has slot 3") as caught:
        shared.manager.step([slot, 3])
    assert "Slots in use: 0" in caught.value.remedy
    with pytest.raises(InputError, match="a step of slots 0, 0"):
        shared.manager.step([slot, slot])
    with pytest.raises(InputError, match="no request has slot 2"):
        shared.manager.remove(2)
    with pytest.raises(InputError, match="no request has slot 2"):
        shared.manager.set_blocks(2, [0])
    with pytest.raises(InputError, match="9 blocks of 4 tokens"):
        shared.manager.set_blocks(slot, range(9))
    batch = batch_of([Chunk([1, 2, 3], 0, [0])], shared.manager.backend.device)
    with pytest.raises(InputError, match="input 'positions' has num_tokens = 2"):
        shared.manager.prefill(**{**batch, "positions": batch["positions"][:2]})
    with pytest.raises(InputError, match="is missing"):
        shared.manager.prefill(input_ids=batch["input_ids"])
    for index in range(1, MAX_SEQS):
        shared.manager.add([1, 2], [index])
    with pytest.raises(InputError, match="4 requests are being decoded") as caught:
        shared.manager.add([1, 2], [9])
    assert "Remove one that is done" in caught.value.remedy
    assert launched(shared) == before
    forget(shared.manager)
    assert works(shared)


def test_a_miss_is_an_error_where_the_configuration_says_so() -> None:
    backend = TapeBackend()
    config = spec_config(backend, mode="FULL", cudagraph_capture_sizes=[8], on_miss="error")
    found = captured(backend, config)
    blocks = [[0, 1], [2, 3], [4, 5]]
    for held in blocks:
        found.manager.prefill(**batch_of([Chunk([1, 2, 3], 0, held)], backend.device))
    slots = [found.manager.add([1, 2, 3, 4], held) for held in blocks]
    before = launched(found)
    with pytest.raises(DispatchMissError, match="no graph serves a batch of 3 tokens"):
        found.manager.step(slots)
    assert launched(found) == before
    assert 1 <= len(found.manager.step(slots[:2]).tokens()[0]) <= 4
    found.manager.close()


def test_configurations_that_cannot_be() -> None:
    backend = TapeBackend()
    target, draft = pair(backend)
    good = spec_config(backend)
    without = {name: spec for name, spec in good.metadata.items() if name != "block_tables"}
    odd = {
        **good.metadata,
        "block_tables": good.metadata["block_tables"].model_copy(update={"shape": ("num_reqs",)}),
    }
    more = {**good.metadata, "lora_ids": good.metadata["slot_mapping"]}
    cases: list[tuple[Config, str]] = [
        (configure(backend), "num_speculative_tokens is 0"),
        (
            configure(backend, max_loras=1, speculative={"num_speculative_tokens": 1}),
            "has a `lora` section",
        ),
        (
            spec_config(backend, pool="per_mode"),
            "compilation.pool is per_mode, and speculative decoding captures all",
        ),
        (
            good.model_copy(update={"metadata": without}),
            "cannot fill the model's inputs: block_tables",
        ),
        (good.model_copy(update={"metadata": odd}), "block_tables has shape"),
        (good.model_copy(update={"metadata": more}), "cannot fill the model's inputs: lora_ids"),
        (
            good.model_copy(update={"inputs": {"tokens": good.inputs["input_ids"]}}),
            "input_ids, positions, tokens",
        ),
    ]
    for config, text in cases:
        with pytest.raises(ConfigError, match=text) as caught:
            SpecDecodeGraphManager(config, target, draft, backend)
        assert caught.value.remedy


def test_first_layers() -> None:
    target = decoder(TapeBackend(), max_loras=1)
    draft = first_layers(target, 2)
    assert (
        draft.layers[1].mlp.up_proj.weight.data_ptr()
        == target.layers[1].mlp.up_proj.weight.data_ptr()
    )
    assert (
        draft.layers[1].self_attn.key_cache.data_ptr()
        != target.layers[1].self_attn.key_cache.data_ptr()
    )
    assert not any(parameter.requires_grad for parameter in draft.parameters())
    prompt = prompts(1, [5])[0]
    hidden = first_layers(target, 4)
    torch.testing.assert_close(
        logits_of(hidden, [Chunk(prompt, 0, [0, 1])]), logits_of(target, [Chunk(prompt, 0, [0, 1])])
    )
    for wrong in (0, 5):
        with pytest.raises(ModelError, match=f"no first {wrong} layers") as caught:
            first_layers(target, wrong)
        assert "1 to 4" in caught.value.remedy
