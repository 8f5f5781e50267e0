"""Device work in a step of speculative decoding: the draft's loop, the target's pass, the accepted
tokens.

Note [Positions and caches]
    Of a request with n tokens in the target's cache, the last token (at position n) is in neither
    cache yet. Each step

    1. proposes: the draft reads the last two tokens, at n - 1 and n, then one token at a time, each
       its own answer to the one before: d1 .. dk, written to its cache at n .. n + k - 1;
    2. verifies: the target reads the last token and d1 .. dk at n .. n + k, and answers with g0 ..
       gk;
    3. accepts the longest prefix in which d(i+1) = g(i), of a tokens: g0 .. ga are new, ga is the
       next last token, and n grows by a + 1.

    Rejected tokens left their keys at positions from the new n on. No query sees a position behind
    its own, and the next step writes each of them before a query sees it. The draft's cache lacks
    position n + k when all was accepted, because dk was its answer and never its input: that is why
    it begins with two tokens, of which the first fills the hole, or is written once more as it was.

    A position without a block, behind a request's last one, is written nowhere. The token that
    follows from it is not accepted, so a request never gets past its blocks, even if the host runs
    steps ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cgplan.backends.context import forward_context
from cgplan.buffers.static import torch_dtype
from cgplan.config import Input
from cgplan.errors import ModelError
from cgplan.modes import BatchDescriptor, CUDAGraphMode

# Columns of a request's row; its block table follows.
PREVIOUS = 0
LAST = 1
CONTEXT = 2
BLOCKS = 3


@dataclass(frozen=True)
class PagedModel:
    """A language model over a paged KV cache.

    Attributes:
        forward: Called with ``input_ids`` and ``positions`` [num_tokens] int64, reads slot_mapping,
            block_tables, seq_lens and query_start_loc from the forward context as
            ``cgplan::attention`` does, and returns logits [num_tokens, vocab_size]. In the last
            steps of a request, seq_lens may exceed the room of its blocks, by k at most; results of
            such queries are dropped. Positions stay below the room of a row of block_tables.
        vocab_size: Tokens that it knows.
        block_size: Tokens in a block of its cache.
        num_blocks: Blocks that tables may name.
    """

    forward: Callable[..., Tensor]
    vocab_size: int
    block_size: int
    num_blocks: int

    @classmethod
    def of(cls, model: Any) -> PagedModel:
        """A model whose ``config`` says it, such as the reference decoder. Raises ModelError where
        it does not.
        """
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
    """State of the requests on the device: one row for each, and a last one for padding, which
    graphs read and write.

    Returns:
        [max_num_seqs + 1, 3 + max_blocks] int64: the last two tokens, the length of the context,
        and the numbers of the blocks, -1 where there is none.
    """
    with torch.inference_mode(False):  # else it could be written to only there
        state = torch.zeros(
            max_num_seqs + 1,
            BLOCKS + max_blocks,
            dtype=torch.int64,
            device=device,
        )
        state[:, BLOCKS:] = -1
    return state


class _Pass:
    """Forwards of one model over a batch of requests with equally many tokens each."""

    def __init__(
        self,
        model: PagedModel,
        metadata: Mapping[str, Input],
        state: Tensor,
        draft_tokens: int,
    ) -> None:
        self.model = model
        self.state = state
        self.draft_tokens = draft_tokens
        self._dtypes = {name: torch_dtype(spec) for name, spec in metadata.items()}

    def slots(self, positions: Tensor, tables: Tensor) -> Tensor:
        """Cache slot of each position [num_reqs, q], -1 where the request has no block for it."""
        size = self.model.block_size
        columns = tables.shape[1]
        pages = positions.div(size, rounding_mode="floor")
        inside = pages.clamp(0, columns - 1)
        blocks = tables.gather(1, inside)
        has_block = (blocks >= 0) & (pages < columns)
        slots = blocks * size + positions % size
        return torch.where(has_block, slots, -1)

    def choose(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        tables: Tensor,
    ) -> Tensor:
        """The most probable next token after each of ``ids`` [num_reqs, q] int64, likewise."""
        reqs, query_len = ids.shape
        num_tokens = reqs * query_len
        is_padding = tables[:, 0] < 0
        lengths = positions[:, -1] + 1
        starts = torch.arange(
            0,
            num_tokens + 1,
            query_len,
            device=ids.device,
        )
        made = {
            "slot_mapping": slots.flatten(),
            "block_tables": tables.clamp(min=0),
            "seq_lens": lengths.masked_fill(is_padding, 0),
            "query_start_loc": starts,
        }
        metadata = {}
        for name, dtype in self._dtypes.items():
            metadata[name] = made[name].to(dtype)
        # Results of positions behind the block table are dropped; a model's own table of positions
        # may end there, too.
        room = tables.shape[1] * self.model.block_size
        places = positions.clamp(0, room - 1)
        descriptor = BatchDescriptor(num_tokens, reqs, uniform=True)
        with forward_context(CUDAGraphMode.NONE, descriptor, metadata):
            logits = self.model.forward(
                input_ids=ids.flatten(),
                positions=places.flatten(),
            )
        if logits.shape != (num_tokens, self.model.vocab_size):
            raise ModelError(
                f"the model returned {list(logits.shape)} for {num_tokens} tokens of a vocabulary "
                f"of {self.model.vocab_size}",
                remedy="Return logits [num_tokens, vocab_size], not hidden states.",
            )
        return logits.argmax(-1).view(reqs, query_len)


class Propose(_Pass):
    """The draft's loop: ``draft_tokens`` steps, each fed with the answer of the one before."""

    def __call__(self, rows: Tensor) -> Tensor:
        """The last token and the draft tokens [num_reqs, 1 + draft_tokens] int64 of the requests in
        these rows of the state, [num_reqs] int64.
        """
        state = self.state[rows]
        ids = state[:, :CONTEXT]
        tables = state[:, BLOCKS:]
        last = state[:, CONTEXT, None]
        positions = torch.cat((last - 1, last), 1)
        proposed = [ids[:, LAST]]
        for _ in range(self.draft_tokens):
            slots = self.slots(positions, tables)
            chosen = self.choose(ids, positions, slots, tables)
            ids = chosen[:, -1:]
            positions = positions[:, -1:] + 1
            proposed.append(ids[:, 0])
        return torch.stack(proposed, 1)


class Verify(_Pass):
    """The target's pass over the proposed tokens, which advances the requests."""

    def __call__(self, input_ids: Tensor, rows: Tensor) -> Tensor:
        """Accept the tokens that the target would have chosen itself, and advance the requests.

        Args:
            input_ids: [num_reqs * (1 + draft_tokens)] int64, the result of ``Propose``.
            rows: [num_reqs] int64, the requests' rows of the state.

        Returns:
            [num_reqs, 2 + draft_tokens] int64: how many tokens are new, then the target's answers,
            the new ones first.
        """
        state = self.state[rows]
        ids = input_ids.view(rows.shape[0], -1)
        context = state[:, CONTEXT, None]
        tables = state[:, BLOCKS:]
        positions = context + torch.arange(ids.shape[1], device=rows.device)
        slots = self.slots(positions, tables)
        chosen = self.choose(ids, positions, slots, tables)
        drafts = ids[:, 1:]
        has_slot = slots >= 0
        agrees = (drafts == chosen[:, :-1]) & has_slot[:, 1:]
        accepted = agrees.long().cumprod(1)
        count = 1 + accepted.sum(1, keepdim=True)
        new = torch.where(
            has_slot[:, :1],
            count,
            0,
        )
        # Tokens at positions n - 1, n, ...: after `new` more, the last two are at `new`, `new` + 1.
        before = state[:, PREVIOUS:CONTEXT]
        known = torch.cat((before, chosen), 1)
        advanced = [
            known.gather(1, new),
            known.gather(1, new + 1),
            context + new,
        ]
        to = self.state[:, :BLOCKS]
        to.index_copy_(
            0,
            rows,
            torch.cat(advanced, 1),
        )
        return torch.cat((new, chosen), 1)
