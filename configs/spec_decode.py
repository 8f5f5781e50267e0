"""Greedy speculative decoding by graphs: parts of a draft and a target model, in one pool.

Note [Which tokens]
    Each token is the most probable one in a pass over 1 + k tokens. In bfloat16 and float16 its
    kernels may round otherwise than those for one token, and nearly equal tokens change places.

Note [Positions and caches]
    The target's cache holds n tokens; the last token, at n, is in no cache. The draft reads the
    last two, then d1 .. d(k-1). The target reads the last token and d1 .. dk, and answers g0 .. gk.
    Of the longest prefix with d(i+1) = g(i), a tokens, g0 .. ga are new, and n grows by a + 1. The
    draft begins with two tokens, because it has not read dk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.context import forward_context
from cgplan.buffers.static import torch_dtype
from cgplan.captures.captured_keys import Progress
from cgplan.config import Config, Input, ModelConfig
from cgplan.errors import ConfigError, InputError, ModelError
from cgplan.graphs.wrapper import GraphPool
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.planning import Plan, build_plan
from cgplan.planning.plan import refuse_auto
from cgplan.reports.layout import Column, Grid, TextColumn, describe_sizes, plain_text
from cgplan.runner.manager import CudaGraphManager, PoolReport, capture_together

INPUTS = ("input_ids", "positions")
METADATA = ("slot_mapping", "block_tables", "seq_lens", "query_start_loc")


@dataclass(frozen=True)
class SpecPlan:
    """The graphs of speculative decoding, in parts of one pool.

    ``target`` and ``draft`` run mixed batches, ``verify k=3`` 4 tokens a request, ``propose k=3``
    3 steps of the draft.

    ``parts`` are in capture order; ``num_reqs`` have graphs for decoding.
    """

    parts: Mapping[str, Plan]
    configs: Mapping[str, Config]
    draft_tokens: tuple[int, ...]
    num_reqs: tuple[int, ...]

    @property
    def keys(self) -> tuple[tuple[str, CUDAGraphMode, BatchDescriptor], ...]:
        """(part, runtime mode, descriptor) of each graph, in capture order."""
        return tuple((name, *key) for name, plan in self.parts.items() for key in plan.keys)

    def __str__(self) -> str:
        table = Grid(
            self.parts.items(),
            TextColumn("part", "0"),
            TextColumn("mode", "1.mode"),
            Column(
                "tokens a request",
                lambda row: row[1].query_len if row[0].startswith("verify") else None,
            ),
            Column("graphs", lambda row: len(row[1].keys)),
            TextColumn("sizes", "1.capture_sizes", describe_sizes),
        )
        return f"{plain_text(table)}\n\n{len(self.keys)} graphs in one pool"


def plan_speculation(config: Config, draft_tokens: Sequence[int] | None = None) -> SpecPlan:
    """Plan speculative decoding; ``draft_tokens`` are more numbers, up to the configuration's.

    Decoding is captured if uniform decode has FULL graphs, for as many requests as the sizes hold.

    Raises:
        ConfigError: mode AUTO, no draft tokens, LoRA, several pools, or an unknown input.
        InputError: ``draft_tokens`` out of range.
        PlanError: as build_plan.
    """
    _check(config)
    most = config.speculative.num_speculative_tokens
    numbers = sorted({most, *(draft_tokens or ())}, reverse=True)
    for number in numbers:
        check_draft_tokens(number, range(1, most + 1))
    plan = build_plan(config)
    counts = set()
    if plan.mode.decode_mode() is CUDAGraphMode.FULL:
        for mode, descriptor in plan.keys:
            count = min(descriptor.num_tokens // plan.query_len, plan.max_num_seqs)
            if mode is CUDAGraphMode.FULL and count:
                counts.add(count)
    mixed = _part(config, plan.mode.mixed_mode(), plan.capture_sizes)
    propose = _decode(config, counts, {}, 0)
    configs = {"target": mixed, "draft": mixed}
    for number in numbers:
        configs[f"verify k={number}"] = _decode(config, counts, {"input_ids": "num_tokens"}, number)
        configs[f"propose k={number}"] = propose
    plans = [(name, build_plan(part)) for name, part in configs.items()]
    plans.sort(key=lambda plan: -plan[1].max_capture_size)
    return SpecPlan(dict(plans), configs, tuple(numbers), tuple(sorted(counts)))


def check_draft_tokens(number: int, allowed: Sequence[int]) -> None:
    """Raises InputError."""
    if number not in allowed:
        possible = ", ".join(map(str, sorted(allowed)))
        raise InputError(
            f"{number} draft tokens were asked for; possible are {possible}",
            remedy="Raise speculative.num_speculative_tokens, or add the number to draft_tokens.",
        )


def _check(config: Config) -> None:
    refuse_auto(config.compilation)
    if config.speculative.num_speculative_tokens < 1:
        raise ConfigError(
            "speculative.num_speculative_tokens is 0: nothing is drafted",
            remedy="Set it to the most draft tokens of a request, such as 3.",
        )
    if config.lora:
        raise ConfigError(
            "the configuration has a `lora` section, which speculative decoding does not fill",
            remedy="Leave `lora` and `lora_ids` out.",
        )
    if config.compilation.pool != "shared":
        raise ConfigError(
            f"compilation.pool is {config.compilation.pool}, and speculative decoding captures "
            "all parts into one pool",
            remedy="Set compilation.pool: shared.",
        )
    wrong = {*(set(config.inputs) ^ set(INPUTS)), *(set(config.metadata) - set(METADATA))}
    tables = config.metadata.get("block_tables")
    if not tables:
        wrong.add("block_tables")
    if wrong:
        raise ConfigError(
            f"speculative decoding cannot fill the model's inputs: {', '.join(sorted(wrong))}",
            remedy=f"Declare the inputs {', '.join(INPUTS)}, the metadata block_tables, and those "
            f"of {', '.join(METADATA)} that the model reads.",
        )
    if tables and [dim.symbol for dim in tables.extents] != ["num_reqs", None]:
        raise ConfigError(
            f"block_tables has shape {list(tables.shape)}",
            remedy="Declare it as [num_reqs, blocks of a request at most].",
        )


def _part(config: Config, mode: CUDAGraphMode, sizes: Sequence[int], **settings: Any) -> Config:
    settings |= {
        "cudagraph_mode": mode,
        "cudagraph_capture_sizes": tuple(sizes) or None,
        "max_cudagraph_capture_size": None,
        "cudagraph_copy_inputs": True,  # one batch goes to two models
    }
    return config.with_values("compilation", **settings)


def _decode(
    config: Config, counts: set[int], inputs: Mapping[str, str], draft_tokens: int
) -> Config:
    query_len = 1 + draft_tokens
    scheduler = config.scheduler
    declared = {name: Input(shape=(rows,), dtype="int64", pad=0) for name, rows in inputs.items()}
    # padding has the last row
    declared["rows"] = Input(shape=("num_reqs",), dtype="int64", pad=scheduler.max_num_seqs)
    most = max(scheduler.max_num_batched_tokens, query_len * scheduler.max_num_seqs)
    speculative = {"num_speculative_tokens": draft_tokens, "accepted_tokens": None}
    part = _part(
        config,
        CUDAGraphMode.FULL_DECODE_ONLY if counts else CUDAGraphMode.NONE,
        [query_len * count for count in sorted(counts)],
        outputs="borrow",
        compiler="eager",
        splitting_modules=(),
        debug=False,  # comparing runs a forward twice, and these advance requests
    )
    return part.changed(
        model=ModelConfig(output_rows="num_reqs"),
        inputs=declared,
        metadata={},
        scheduler=scheduler.changed(max_num_batched_tokens=most),
        speculative=config.speculative.changed(**speculative),
    )


# columns of a request's row: previous token, last token, context, block table
LAST = 1
CONTEXT = 2
BLOCKS = 3


@dataclass(frozen=True)
class PagedModel:
    """A language model over a paged KV cache.

    Attributes:
        forward: Takes ``input_ids`` and ``positions`` [num_tokens] int64 and the metadata of
            ``cgplan::attention``, returns logits [num_tokens, vocab_size]. seq_lens may pass the
            blocks' room by up to k; positions do not.
        block_size: In tokens.
    """

    forward: Callable[..., Tensor]
    vocab_size: int
    block_size: int
    num_blocks: int

    @classmethod
    def of(cls, model: Any) -> PagedModel:
        """From the model's ``config``. Raises ModelError."""
        if isinstance(model, cls):
            return model
        config = getattr(model, "config", None)
        found = []
        for name in ("vocab_size", "block_size", "num_blocks"):
            value = getattr(config, name, None)
            if not isinstance(value, int):
                raise ModelError(
                    f"{type(model).__name__}.config has no {name}",
                    remedy="Pass PagedModel(forward, vocab_size, block_size, num_blocks).",
                )
            found.append(value)
        return cls(model, *found)


def new_state(max_num_seqs: int, max_blocks: int, device: torch.device) -> Tensor:
    """[max_num_seqs + 1, 3 + max_blocks] int64: two last tokens, the context's length, and blocks
    (-1: none); the last row is padding.
    """
    with torch.inference_mode(False):  # inference tensors are written in that mode alone
        state = torch.zeros(max_num_seqs + 1, BLOCKS + max_blocks, dtype=torch.int64, device=device)
        state[:, BLOCKS:] = -1
    return state


class _Pass:
    def __init__(
        self, model: PagedModel, metadata: Mapping[str, Input], state: Tensor, draft_tokens: int = 0
    ) -> None:
        self.model = model
        self.state = state
        self.draft_tokens = draft_tokens
        self._dtypes = {name: torch_dtype(spec) for name, spec in metadata.items()}

    def choose(self, ids: Tensor, positions: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        """The most probable next token after each of ``ids``, and the cache slots of their
        positions, -1 without a block; all [num_reqs, q] int64.
        """
        size = self.model.block_size
        columns = tables.shape[1]
        pages = positions.div(size, rounding_mode="floor")
        inside = pages.clamp(0, columns - 1)
        blocks = tables.gather(1, inside)
        has_block = (blocks >= 0) & (pages < columns)
        slots = torch.where(has_block, blocks * size + positions % size, -1)
        reqs, query_len = ids.shape
        num_tokens = reqs * query_len
        is_padding = tables[:, 0] < 0
        lengths = positions[:, -1] + 1
        made = {
            "slot_mapping": slots.flatten(),
            "block_tables": tables.clamp(min=0),
            "seq_lens": lengths.masked_fill(is_padding, 0),
            "query_start_loc": torch.arange(0, num_tokens + 1, query_len, device=ids.device),
        }
        metadata = {name: made[name].to(dtype) for name, dtype in self._dtypes.items()}
        # a model's positions may end where block tables do
        places = positions.clamp(0, columns * size - 1)
        descriptor = BatchDescriptor(num_tokens, reqs, uniform=True)
        with forward_context(CUDAGraphMode.NONE, descriptor, metadata):
            logits = self.model.forward(input_ids=ids.flatten(), positions=places.flatten())
        if logits.shape != (num_tokens, self.model.vocab_size):
            raise ModelError(
                f"the model returned {list(logits.shape)} for {num_tokens} tokens of a vocabulary "
                f"of {self.model.vocab_size}",
                remedy="Return logits [num_tokens, vocab_size], not hidden states.",
            )
        return logits.argmax(-1).view(reqs, query_len), slots


class Propose(_Pass):
    def __call__(self, rows: Tensor) -> Tensor:
        """Last and draft tokens [num_reqs, 1 + draft_tokens] of rows [num_reqs], all int64."""
        state = self.state[rows]
        ids = state[:, :CONTEXT]
        tables = state[:, BLOCKS:]
        last = state[:, CONTEXT, None]
        positions = torch.cat((last - 1, last), 1)
        proposed = [ids[:, LAST]]
        for _ in range(self.draft_tokens):
            chosen, _ = self.choose(ids, positions, tables)
            ids = chosen[:, -1:]
            positions = positions[:, -1:] + 1
            proposed.append(ids[:, 0])
        return torch.stack(proposed, 1)


class Verify(_Pass):
    def __call__(self, input_ids: Tensor, rows: Tensor) -> Tensor:
        """Accept tokens that the target chooses itself, and advance the requests.

        Takes [num_reqs * (1 + draft_tokens)] and [num_reqs] int64, returns [num_reqs, 2 +
        draft_tokens] int64: the number of new tokens, and the target's answers.
        """
        state = self.state[rows]
        ids = input_ids.view(rows.shape[0], -1)
        context = state[:, CONTEXT, None]
        tables = state[:, BLOCKS:]
        positions = context + torch.arange(ids.shape[1], device=rows.device)
        chosen, slots = self.choose(ids, positions, tables)
        drafts = ids[:, 1:]
        has_slot = slots >= 0
        agrees = (drafts == chosen[:, :-1]) & has_slot[:, 1:]
        accepted = agrees.long().cumprod(1)
        count = 1 + accepted.sum(1, keepdim=True)
        new = torch.where(has_slot[:, :1], count, 0)
        # tokens from position n - 1 on: the last two are at `new`, `new` + 1
        known = torch.cat((state[:, :CONTEXT], chosen), 1)
        advanced = [known.gather(1, new), known.gather(1, new + 1), context + new]
        self.state[:, :BLOCKS].index_copy_(0, rows, torch.cat(advanced, 1))
        return torch.cat((new, chosen), 1)


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


def send(values: Sequence[int], device: torch.device) -> Tensor:
    """int64, without a wait for the device."""
    numbers = torch.tensor(values, dtype=torch.int64, device="cpu")
    if device.type == "cpu":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def fetch(tensor: Tensor) -> Callable[[], Tensor]:
    """Queue a copy to the host; the returned function waits for it."""
    if tensor.device.type == "cpu":
        copy = tensor.clone()
        return lambda: copy
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    copied = torch.cuda.current_stream(tensor.device).record_event()

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return wait


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

    def add(self, tokens: Sequence[int], blocks: Sequence[int]) -> int:
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

    def set_blocks(self, slot: int, blocks: Sequence[int]) -> None:
        """Give a request other blocks; those that hold its context stay. Raises InputError."""
        request = self._request(slot)
        table = self._table(blocks, request.context)
        self._write(slot, BLOCKS, table)  # tokens on the device may be ahead of the host's
        request.room = len(blocks) * self._target.block_size

    def remove(self, slot: int) -> None:
        """End a request. Its blocks are free at once."""
        self._request(slot)
        del self._requests[slot]

    def step(self, slots: Sequence[int] | None = None, draft_tokens: int | None = None) -> SpecStep:
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
                self._rows = send(chosen, self.backend.device)
        proposed = self.managers[f"propose k={number}"].run(rows=self._rows)
        result = self.managers[f"verify k={number}"].run(
            input_ids=proposed.flatten(), rows=self._rows, uniform_decode=True
        )
        fetched = fetch(result)  # graphs may overwrite the result after this copy
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

    def _write(self, slot: int, column: int, values: Sequence[int]) -> None:
        with self._writing():
            self._state[slot, column:] = send(values, self.backend.device)

    def _request(self, slot: int) -> SpecRequest:
        if slot not in self._requests:
            known = ", ".join(map(str, sorted(self._requests))) or "none"
            raise InputError(
                f"no request has slot {slot}",
                remedy=f"Slots in use: {known}; `add` hands them out.",
            )
        return self._requests[slot]

    def _table(self, blocks: Sequence[int], context: int) -> list[int]:
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
