"""Greedy speculative decoding by graphs.

Note [Which tokens]
    Each token is the most probable one in a pass over 1 + k tokens. In bfloat16 and float16 its
    kernels may round otherwise than those for one token, and nearly equal tokens change places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
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
    """Counts of the steps that were read."""

    steps: Counter[int] = field(default_factory=Counter)
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0

    @property
    def acceptance(self) -> float:
        """Accepted share of the draft tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(slots=True, eq=False)
class SpecRequest:
    context: int  # tokens in the target's cache
    room: int  # tokens that its blocks hold


@dataclass(frozen=True, slots=True)
class SpecStep:
    """A step under way. ``tokens`` waits for it: of each of ``slots`` 1 to 1 + draft_tokens new
    tokens, none if no block was left.
    """

    slots: tuple[int, ...]
    draft_tokens: int
    tokens: Callable[[], list[list[int]]] = field(repr=False)


class SpecDecodeGraphManager:
    """Greedy speculative decoding: a draft proposes k tokens, one pass of the target verifies them.

    The engine owns the blocks, whose numbers hold for both KV caches. For one thread. See Notes
    [Positions and caches] and [Which tokens].

    Args:
        config: Of the target; the budget limits each part by itself.
        target, draft: On the device, with vocab_size, block_size, num_blocks in ``config``, or
            PagedModels; the caller owns them.
        draft_tokens: More numbers that ``step`` takes.

    Raises:
        ModelError: vocabularies or blocks do not fit.
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
                remedy="Choose a draft with the target's vocabulary.",
            )
        if drafter.block_size != size or drafter.num_blocks < blocks:
            raise ModelError(
                f"the draft's cache has {drafter.num_blocks} blocks of {drafter.block_size} "
                f"tokens, the target's {blocks} of {size}",
                remedy="Take the target's block_size and num_blocks: they share block tables.",
            )
        self.config = config
        self.stats = SpecStats()
        self.plan = plan_speculation(config, draft_tokens)
        if not pool:
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
            models[f"verify k={number}"] = Verify(verifier, config.metadata, state)
            models[f"propose k={number}"] = Propose(drafter, config.metadata, state, number)
        self.managers = {
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
        self._chosen: tuple[int, ...] = ()
        self._rows = torch.empty(0)

    def capture(self) -> PoolReport:
        """Capture all parts, or none. Raises as CaptureSession.run. Requests stay."""
        return capture_together(list(self.managers.values()))

    def prefill(self, **batch: Any) -> Any:
        """Run both models on prompts; returns the target's output, valid until the next call."""
        self.managers["draft"].run(uniform_decode=False, **batch)
        return self.managers["target"].run(uniform_decode=False, **batch)

    def add(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
    ) -> int:
        """Begin to decode a request; returns its slot.

        Args:
            tokens: Both caches hold all but the last.
            blocks: In order; positions without one give no token.

        Raises:
            InputError: no slot is free, or tokens or blocks do not fit.
            CgplanError: work on another stream is not done.
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
                remedy=f"Give at least one token more, below {self._target.vocab_size}.",
            )
        context = len(tokens) - 1
        table = self._table(blocks, context)
        slot = next(slot for slot in range(most) if slot not in self._requests)
        self._write(slot, 0, [*last, context, *table])
        self._requests[slot] = SpecRequest(context, len(blocks) * self._target.block_size)
        return slot

    def set_blocks(
        self,
        slot: int,
        blocks: Sequence[int],
    ) -> None:
        """Give a request other blocks; those that hold its context stay. Raises InputError."""
        request = self._request(slot)
        table = self._table(blocks, request.context)
        self._write(slot, BLOCKS, table)  # tokens on the device may be ahead of the host's
        request.room = len(blocks) * self._target.block_size

    def remove(self, slot: int) -> None:
        """End a request. Its blocks are free at once."""
        self._request(slot)
        del self._requests[slot]

    def step(
        self,
        slots: Sequence[int] | None = None,
        draft_tokens: int | None = None,
    ) -> SpecStep:
        """Queue a step for ``slots`` (absent: all), even if the last is not read.

        Raises:
            InputError: wrong arguments, or full blocks; nothing was launched.
            DispatchMissError: no graph serves the requests, which stay.
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
        proposed = self.managers[f"propose k={number}"].run(rows=self._rows)
        result = self.managers[f"verify k={number}"].run(
            input_ids=proposed.flatten(), rows=self._rows, uniform_decode=True
        )
        fetched = self.backend.fetch(result)  # graphs may overwrite the result after this copy
        return SpecStep(chosen, number, cache(partial(self._read, number, requests, fetched)))

    def _read(
        self,
        draft_tokens: int,
        requests: Sequence[SpecRequest],
        fetched: Callable[[], torch.Tensor],
    ) -> list[list[int]]:
        rows = fetched().tolist()
        self.stats.steps[draft_tokens] += 1
        self.stats.drafted += draft_tokens * len(rows)
        found: list[list[int]] = []
        for request, (count, *answers) in zip(requests, rows, strict=True):
            found.append(answers[:count])
            request.context += count
            self.stats.accepted += max(count - 1, 0)
            self.stats.tokens += count
        return found

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(sorted(self._requests))

    @property
    def report(self) -> PoolReport:
        parts = {name: part.report for name, part in self.managers.items()}
        return PoolReport(parts, self.pool.nbytes)

    def close(self) -> None:
        """Free all graphs and the pool. ``capture`` may follow."""
        for manager in self.managers.values():
            manager.close()

    def __enter__(self) -> SpecDecodeGraphManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Fails where a call would."""
        use = self.pool.use
        with use.held("speculation"):
            use.take_stream(self.backend.stream_getter()(), "speculation", self.backend)
            yield

    def _write(
        self,
        slot: int,
        column: int,
        values: Sequence[int],
    ) -> None:
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

    def _table(
        self,
        blocks: Sequence[int],
        context: int,
    ) -> list[int]:
        size = self._target.block_size
        most = self._target.num_blocks
        if len(blocks) > self._max_blocks or context >= len(blocks) * size:
            raise InputError(
                f"{len(blocks)} blocks of {size} tokens for a request with {context} tokens in "
                f"the cache; block_tables has {self._max_blocks} columns",
                remedy="Give it room for one token more, in wider block_tables if need be.",
            )
        seen = set[int]()
        for block in blocks:
            if not 0 <= block < most:
                raise InputError(
                    f"block {block} does not exist", remedy=f"The cache has blocks 0 to {most - 1}."
                )
            if block in seen:
                raise InputError(
                    f"block {block} was given twice",
                    remedy="Each holds other tokens of the request.",
                )
            seen.add(block)
        return [*blocks, *[-1] * (self._max_blocks - len(blocks))]
