"""SpecDecodeGraphManager: greedy speculative decoding by graphs, a draft and a target in one plan
and one pool.

Note [Which tokens]
    Every token is the most probable one in a pass of the target over 1 + k tokens of each request.
    With exact arithmetic that is plain greedy decoding, whatever the draft says. In floating point
    a device may take other kernels for 1 + k tokens than for one, and two tokens that are as good
    as equal may change places: hardly ever in float32 and float64, now and then in bfloat16 and
    float16, on random weights more often than on trained ones. Captured and eager runs of the same
    passes agree bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from cgplan.backends import GraphBackend, select_backend
from cgplan.captures.captured_keys import Progress
from cgplan.config import Config
from cgplan.errors import InputError, ModelError
from cgplan.graphs.pools import GraphPool
from cgplan.runner.manager import CudaGraphManager, PoolReport, capture_together
from cgplan.speculative.passes import BLOCKS, PagedModel, Propose, Verify, new_state
from cgplan.speculative.plan import check_draft_tokens, plan_speculation


@dataclass(slots=True)
class SpecStats:
    """Counts of the steps whose tokens were read.

    Attributes:
        steps: Steps by number of draft tokens.
        drafted: Draft tokens of all requests.
        accepted: Those that the target agreed with.
        tokens: New tokens, the target's own included.
    """

    steps: Counter[int] = field(default_factory=Counter)
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens that was accepted, 0 if there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(slots=True, eq=False)
class SpecRequest:
    """A request as the host knows it.

    Attributes:
        context: Tokens in the target's cache, as of the last step that was read.
        room: Tokens that its blocks hold.
    """

    context: int
    room: int


@dataclass(slots=True, eq=False)
class SpecStep:
    """One step under way on the device; ``tokens`` waits for it.

    Attributes:
        slots: The requests, in order.
        draft_tokens: How many tokens were drafted for each.
    """

    slots: tuple[int, ...]
    draft_tokens: int
    # waits for the result of ``Verify``, on the host
    _result: Callable[[], torch.Tensor] = field(repr=False)
    _requests: Sequence[SpecRequest] = field(repr=False)
    _stats: SpecStats = field(repr=False)
    _tokens: list[list[int]] | None = field(
        default=None,
        init=False,
        repr=False,
    )

    def tokens(self) -> list[list[int]]:
        """The new tokens of each request, in the order of ``slots``: 1 to 1 + draft_tokens of them,
        and none where the request had no block left when the step ran.
        """
        if self._tokens is None:
            self._tokens = []
            self._stats.steps[self.draft_tokens] += 1
            rows = self._result().tolist()
            for request, (count, *answers) in zip(self._requests, rows, strict=True):
                self._tokens.append(answers[:count])
                request.context += count
                self._stats.drafted += self.draft_tokens
                self._stats.accepted += max(count - 1, 0)
                self._stats.tokens += count
        return self._tokens


class SpecDecodeGraphManager:
    """Greedy speculative decoding: a draft proposes k tokens for each request, one pass of the
    target verifies them.

    Both are captured for the same numbers of requests, into one pool: the draft's loop of k steps,
    and the target's pass over 1 + k tokens a request with the acceptance inside. The state of a
    request (its last tokens, length and blocks) lies on the device and is advanced there, so that a
    step is two replays and one small copy back. See Notes [Positions and caches] and [Which
    tokens].

    The engine prefills prompts with ``prefill``, hands requests over with ``add``, runs ``step`` on
    any of them, and takes them out with ``remove``. It owns the blocks of the KV cache; both models
    use the same numbers, each in a separate cache. Not for use from several threads.

    Args:
        config: Of the target: inputs input_ids and positions, metadata as ``cgplan::attention``
            reads it, sizes, modes and bounds, and ``speculative.num_speculative_tokens``. Limits of
            its budget hold for each part by itself.
        target, draft: Models with a ``config`` that says vocab_size, block_size and num_blocks, or
            PagedModels, on the device already. The caller owns them.
        backend: The device; absent: the pool's, else ``config.device``.
        draft_tokens: Numbers of draft tokens to capture for besides the configuration's; ``step``
            takes any of them.
        pool: All parts capture into it; absent: a new pool.
        progress: Called before each key.

    Attributes:
        plan: The graphs, in parts.
        stats: Drafted and accepted tokens so far.

    Raises:
        ModelError: the draft's vocabulary or blocks are not the target's.
        ConfigError, InputError, PlanError: as plan_speculation.
    """

    def __init__(
        self,
        config: Config,
        target: Any,
        draft: Any,
        backend: GraphBackend | None = None,
        *,
        draft_tokens: Sequence[int] | None = None,
        pool: GraphPool | None = None,
        progress: Progress | None = None,
    ) -> None:
        verifier = PagedModel.of(target)
        drafter = PagedModel.of(draft)
        size = verifier.block_size
        blocks = verifier.num_blocks
        if drafter.vocab_size != verifier.vocab_size:
            raise ModelError(
                f"the draft knows {drafter.vocab_size} tokens, the target {verifier.vocab_size}",
                remedy="Choose a draft with the target's vocabulary: a token's number has to mean "
                "the same to both.",
            )
        if drafter.block_size != size or drafter.num_blocks < blocks:
            raise ModelError(
                f"the draft's cache has {drafter.num_blocks} blocks of {drafter.block_size} "
                f"tokens, the target's {blocks} of {size}",
                remedy="Build the draft with the target's block_size and at least its num_blocks: "
                "they share block tables.",
            )
        self.config = config
        self.stats = SpecStats()
        self.plan = plan_speculation(config, draft_tokens)
        if pool is None:
            pool = GraphPool(select_backend(config.device) if backend is None else backend)
        self.pool = pool
        self.backend = pool.backend
        self._target = verifier
        self._max_blocks = config.metadata["block_tables"].extents[1].offset
        self._state = state = new_state(
            config.scheduler.max_num_seqs, self._max_blocks, self.backend.device
        )
        models: dict[str, Callable[..., Any]] = {
            "target": verifier.forward,
            "draft": drafter.forward,
        }
        for number in self.plan.draft_tokens:
            models[f"verify k={number}"] = Verify(
                verifier,
                config.metadata,
                state,
                number,
            )
            models[f"propose k={number}"] = Propose(
                drafter,
                config.metadata,
                state,
                number,
            )
        self._managers = {
            name: CudaGraphManager(
                self.plan.configs[name],
                models[name],
                backend,
                pool=pool,
                plan=plan,
                name=name,
                progress=progress,
            )
            for name, plan in self.plan.parts.items()
        }
        self._requests: dict[int, SpecRequest] = {}
        # the requests of the last step, and the same on the device
        self._chosen: tuple[int, ...] = ()
        self._rows = torch.empty(0)

    def capture(self) -> PoolReport:
        """Capture all parts, or none. Raises as CaptureSession.run; requests that are being decoded
        stay.
        """
        return capture_together(list(self._managers.values()))

    def prefill(self, **batch: Any) -> Any:
        """Run both models on a mixed batch of prompts or parts of them.

        Args:
            batch: The configuration's inputs and metadata, by name, as for a runner's call.

        Returns:
            The target's output, valid until the next call. The token that follows a prompt is the
            caller's to take from it. Errors are those of GraphRunner's call; an InputError is
            raised before anything is launched.
        """
        self._managers["draft"].run(uniform_decode=False, **batch)
        return self._managers["target"].run(uniform_decode=False, **batch)

    def add(self, tokens: Sequence[int], blocks: Sequence[int]) -> int:
        """Hand a request over for decoding.

        Args:
            tokens: All its tokens so far, the prompt's and at least one more. All but the last are
                in both caches.
            blocks: Its blocks, in order. A step writes to 1 + k positions; those without a block
                give no token.

        Returns:
            The slot by which the other methods know it, until ``remove``.

        Raises:
            InputError: all ``scheduler.max_num_seqs`` slots are taken, or tokens or blocks do not
                fit; nothing changed.
            CgplanError: the last call's work on another stream is not done.
        """
        most = self.config.scheduler.max_num_seqs
        if len(self._requests) >= most:
            raise InputError(
                f"{most} requests are being decoded, scheduler.max_num_seqs is {most}",
                remedy="Remove one that is done first, or raise scheduler.max_num_seqs.",
            )
        last = list(tokens[-2:])
        if len(last) < 2 or not all(0 <= token < self._target.vocab_size for token in last):
            raise InputError(
                f"a request of {len(tokens)} tokens ending in {last} cannot be decoded",
                remedy="Give the prompt and at least one token more, each below "
                f"{self._target.vocab_size}.",
            )
        self._check_blocks(blocks, len(tokens) - 1)
        slot = next(slot for slot in range(most) if slot not in self._requests)
        context = len(tokens) - 1
        self._write(
            slot,
            0,
            [*last, context, *self._padded(blocks)],
        )
        self._requests[slot] = SpecRequest(context, len(blocks) * self._target.block_size)
        return slot

    def set_blocks(self, slot: int, blocks: Sequence[int]) -> None:
        """Give a request other blocks, usually more; those that hold its context must stay. Raises
        InputError.
        """
        request = self._request(slot)
        self._check_blocks(blocks, request.context)
        # the device may be ahead of the host: its tokens have to stay
        self._write(slot, BLOCKS, self._padded(blocks))
        request.room = len(blocks) * self._target.block_size

    def remove(self, slot: int) -> None:
        """Take a request out. Its blocks are free at once: later steps run behind those queued."""
        self._request(slot)
        del self._requests[slot]

    def step(self, slots: Sequence[int] | None = None, draft_tokens: int | None = None) -> SpecStep:
        """Draft, verify and accept for a batch of requests.

        Args:
            slots: The requests; absent: all.
            draft_tokens: One of ``plan.draft_tokens``; absent: the configuration's.

        Returns:
            The step, whose work is queued. The next one may be queued before its tokens are read.

        Raises:
            InputError: an unknown slot, a slot twice, no request, another number of draft tokens,
                or a request whose blocks are full; nothing was launched.
            DispatchMissError: no graph serves as many requests and ``compilation.on_miss`` is
                ``error``; no request has changed.
        """
        chosen = self.slots if slots is None else tuple(slots)
        number = self.plan.draft_tokens[0] if draft_tokens is None else draft_tokens
        check_draft_tokens(number, self.plan.draft_tokens)
        if not chosen or len(set(chosen)) < len(chosen):
            raise InputError(
                f"a step of slots {', '.join(map(str, chosen)) or 'none'}",
                remedy="Give each request of the batch once.",
            )
        requests = [self._request(slot) for slot in chosen]
        for slot, request in zip(chosen, requests, strict=True):
            if request.context >= request.room:
                raise InputError(
                    f"the request in slot {slot} has {request.context} tokens in the cache, and "
                    f"its blocks hold {request.room}",
                    remedy="Give it another block with set_blocks, or remove it.",
                )
        with self._writing():
            if self._chosen != chosen:
                self._chosen = chosen
                self._rows = self.backend.send(chosen)
        proposed = self._managers[f"propose k={number}"].run(rows=self._rows)
        result = self._managers[f"verify k={number}"].run(
            input_ids=proposed.flatten(), rows=self._rows, uniform_decode=True
        )
        # The only copy to the host; graphs may overwrite the result behind it.
        return SpecStep(
            chosen,
            number,
            self.backend.fetch(result),
            requests,
            self.stats,
        )

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(sorted(self._requests))

    @property
    def managers(self) -> dict[str, CudaGraphManager]:
        """The parts of the plan by name, each with its report and stats."""
        return dict(self._managers)

    @property
    def report(self) -> PoolReport:
        """Memory and time of the captures."""
        parts = {name: part.report for name, part in self._managers.items()}
        return PoolReport(parts, self.pool.nbytes)

    def close(self) -> None:
        """Free all graphs and the pool. Twice does no harm; ``capture`` may follow."""
        for manager in self._managers.values():
            manager.close()

    def __enter__(self) -> SpecDecodeGraphManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A block that writes the state that graphs read; it fails where a call would."""
        use = self.pool.use
        with use.held("speculation"):
            use.take_stream(self.backend.stream_getter()(), "speculation", self.backend)
            yield

    def _write(self, slot: int, column: int, values: Sequence[int]) -> None:
        with self._writing():
            self._state[slot, column:] = self.backend.send(values)

    def _request(self, slot: int) -> SpecRequest:
        if slot not in self._requests:
            known = ", ".join(map(str, sorted(self._requests))) or "none"
            raise InputError(
                f"no request has slot {slot}",
                remedy=f"Slots in use: {known}; `add` hands them out.",
            )
        return self._requests[slot]

    def _check_blocks(self, blocks: Sequence[int], context: int) -> None:
        size = self._target.block_size
        most = self._target.num_blocks
        if len(blocks) > self._max_blocks or context >= len(blocks) * size:
            raise InputError(
                f"{len(blocks)} blocks of {size} tokens for a request with {context} tokens in "
                f"the cache; block_tables has {self._max_blocks} columns",
                remedy="Give it room for one token more at least; declare wider block_tables for "
                "longer requests.",
            )
        seen = set[int]()
        for block in blocks:
            if not 0 <= block < most:
                raise InputError(
                    f"block {block} does not exist",
                    remedy=f"The cache has blocks 0 to {most - 1}.",
                )
            if block in seen:
                raise InputError(
                    f"block {block} was given twice",
                    remedy="Each holds other tokens of the request.",
                )
            seen.add(block)

    def _padded(self, blocks: Sequence[int]) -> list[int]:
        return [*blocks, *[-1] * (self._max_blocks - len(blocks))]
