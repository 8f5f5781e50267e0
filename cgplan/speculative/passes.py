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

    A position without a block, at the end of what a request was given, is written nowhere. The
    token that follows from it is not accepted, so a request never gets past its blocks, even if the
    host runs steps ahead.
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
PREVIOUS, LAST, CONTEXT, BLOCKS = range(4)


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
        config, found = getattr(model, "config", None), dict[str, int]()
        for name in ("vocab_size", "block_size", "num_blocks"):
            if not isinstance(value := getattr(config, name, None), int):
                raise ModelError(
                    f"{type(model).__name__}.config has no {name}",
                    remedy="Pass PagedModel(forward, vocab_size, block_size, num_blocks).",
                )
            found[name] = value
        return cls(model, **found)


def new_state(max_num_seqs: int, max_blocks: int, device: torch.device) -> Tensor:
    """State of the requests on the device: one row for each, and a last one for padding, which
    graphs read and write.

    Returns:
        [max_num_seqs + 1, 3 + max_blocks] int64: the last two tokens, the length of the context,
        and the numbers of the blocks, -1 where there is none.
    """
    with torch.inference_mode(False):  # else it could be written to only there
        state = torch.full(
            (max_num_seqs + 1, BLOCKS + max_blocks), -1, dtype=torch.int64, device=device
        )
        state[:, :BLOCKS] = 0
    return state


class _Pass:
    """Forwards of one model over a batch of requests with equally many tokens each."""

    def __init__(
        self, model: PagedModel, metadata: Mapping[str, Input], state: Tensor, draft_tokens: int
    ) -> None:
        self.model, self.state, self.draft_tokens = model, state, draft_tokens
        self._dtypes = {name: torch_dtype(spec) for name, spec in metadata.items()}

    def slots(self, positions: Tensor, tables: Tensor) -> Tensor:
        """Cache slot of each position [num_reqs, q], -1 where the request has no block for it."""
        size, columns = self.model.block_size, tables.shape[1]
        pages = positions.div(size, rounding_mode="floor")
        blocks = tables.gather(1, pages.clamp(0, columns - 1))
        return torch.where((blocks >= 0) & (pages < columns), blocks * size + positions % size, -1)

    def choose(self, ids: Tensor, positions: Tensor, slots: Tensor, tables: Tensor) -> Tensor:
        """The most probable next token after each of ``ids`` [num_reqs, q] int64, likewise."""
        reqs, q = ids.shape
        made = {
            "slot_mapping": slots.flatten(),
            "block_tables": tables.clamp(min=0),
            "seq_lens": torch.where(tables[:, 0] >= 0, positions[:, -1] + 1, 0),
            "query_start_loc": torch.arange(0, (reqs + 1) * q, q, device=ids.device),
        }
        metadata = {name: made[name].to(dtype) for name, dtype in self._dtypes.items()}
        with forward_context(
            CUDAGraphMode.NONE, BatchDescriptor(reqs * q, reqs, uniform=True), metadata
        ):
            # Positions outside of the block table are dropped; a model's table of positions may end
            # there, too.
            places = positions.clamp(0, tables.shape[1] * self.model.block_size - 1)
            logits = self.model.forward(input_ids=ids.flatten(), positions=places.flatten())
        if logits.shape != (reqs * q, self.model.vocab_size):
            raise ModelError(
                f"the model returned {list(logits.shape)} for {reqs * q} tokens of a vocabulary of "
                f"{self.model.vocab_size}",
                remedy="Return logits [num_tokens, vocab_size], not hidden states.",
            )
        return logits.argmax(-1).view(reqs, q)


class Propose(_Pass):
    """The draft's loop: ``draft_tokens`` steps, each fed with the answer of the one before."""

    def __call__(self, rows: Tensor) -> Tensor:
        """The last token and the draft tokens [num_reqs, 1 + draft_tokens] int64 of the requests in
        these rows of the state, [num_reqs] int64.
        """
        state = self.state[rows]
        ids, tables = state[:, :CONTEXT], state[:, BLOCKS:]
        positions = state[:, CONTEXT, None] + torch.arange(-1, 1, device=rows.device)
        proposed = [ids[:, LAST]]
        for _ in range(self.draft_tokens):
            chosen = self.choose(ids, positions, self.slots(positions, tables), tables)[:, -1]
            proposed.append(chosen)
            ids, positions = chosen[:, None], positions[:, -1:] + 1
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
        state, ids = self.state[rows], input_ids.view(rows.shape[0], -1)
        context, tables = state[:, CONTEXT, None], state[:, BLOCKS:]
        positions = context + torch.arange(ids.shape[1], device=rows.device)
        slots = self.slots(positions, tables)
        chosen = self.choose(ids, positions, slots, tables)
        agrees = (ids[:, 1:] == chosen[:, :-1]) & (slots[:, 1:] >= 0)
        accepted = agrees.long().cumprod(1).sum(1, keepdim=True)
        new = torch.where(slots[:, :1] >= 0, accepted + 1, 0)
        # Tokens at positions n - 1, n, .. : the last two of them after `new` more are the next
        # previous and last.
        known = torch.cat((state[:, PREVIOUS:CONTEXT], chosen), 1)
        advanced = torch.cat((known.gather(1, new), known.gather(1, new + 1), context + new), 1)
        self.state[:, :BLOCKS].index_copy_(0, rows, advanced)
        return torch.cat((new, chosen), 1)
