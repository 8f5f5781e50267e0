"""Device work of a step of speculative decoding.

Note [Positions and caches]
    The target's cache holds n tokens of a request; the last token, at position n, is in no cache
    yet. A step

    1. proposes: the draft reads the last two tokens, at n - 1 and n, then each of its answers d1 ..
       d(k-1) at n + 1 .. n + k - 1;
    2. verifies: the target reads the last token and d1 .. dk at n .. n + k; it answers g0 .. gk;
    3. accepts the longest prefix with d(i+1) = g(i), of a tokens: g0 .. ga are new, ga is the next
       last token, and n grows by a + 1.

    The next step overwrites the keys of rejected tokens before a query sees them. Where all are
    accepted, the draft has not read dk at n + k: so it begins with two tokens. Positions without a
    block are not written, and give no token.
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
            room of a request's blocks by up to k; positions stay within block_tables.
        block_size: Tokens in a block.
    """

    forward: Callable[..., Tensor]
    vocab_size: int
    block_size: int
    num_blocks: int

    @classmethod
    def of(cls, model: Any) -> PagedModel:
        """From the model's ``config``. Raises ModelError for a model without the figures."""
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


def new_state(
    max_num_seqs: int,
    max_blocks: int,
    device: torch.device,
) -> Tensor:
    """A row for each request, and a last one for padding.

    Returns:
        [max_num_seqs + 1, 3 + max_blocks] int64: the last two tokens, the context's length, and the
        blocks, -1: none.
    """
    with torch.inference_mode(False):  # inference tensors are written in that mode alone
        state = torch.zeros(max_num_seqs + 1, BLOCKS + max_blocks, dtype=torch.int64, device=device)
        state[:, BLOCKS:] = -1
    return state


class _Pass:
    """Forwards of a model on requests with equally many tokens; ``draft_tokens``: of Propose."""

    def __init__(
        self, model: PagedModel, metadata: Mapping[str, Input], state: Tensor, draft_tokens: int = 0
    ) -> None:
        self.model = model
        self.state = state
        self.draft_tokens = draft_tokens
        self._dtypes = {name: torch_dtype(spec) for name, spec in metadata.items()}

    def slots(
        self,
        positions: Tensor,
        tables: Tensor,
    ) -> Tensor:
        """Cache slot of each position [num_reqs, q], -1: no block."""
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
        """The most probable next token after each of ``ids``; both [num_reqs, q] int64."""
        reqs, query_len = ids.shape
        num_tokens = reqs * query_len
        is_padding = tables[:, 0] < 0
        lengths = positions[:, -1] + 1
        made = {
            "slot_mapping": slots.flatten(),
            "block_tables": tables.clamp(min=0),
            "seq_lens": lengths.masked_fill(is_padding, 0),
            "query_start_loc": torch.arange(
                0,
                num_tokens + 1,
                query_len,
                device=ids.device,
            ),
        }
        metadata = {name: made[name].to(dtype) for name, dtype in self._dtypes.items()}
        # a model's table of positions may end where block tables do; results there are dropped
        room = tables.shape[1] * self.model.block_size
        places = positions.clamp(0, room - 1)
        descriptor = BatchDescriptor(
            num_tokens,
            reqs,
            uniform=True,
        )
        with forward_context(CUDAGraphMode.NONE, descriptor, metadata):
            logits = self.model.forward(input_ids=ids.flatten(), positions=places.flatten())
        if logits.shape != (num_tokens, self.model.vocab_size):
            raise ModelError(
                f"the model returned {list(logits.shape)} for {num_tokens} tokens of a vocabulary "
                f"of {self.model.vocab_size}",
                remedy="Return logits [num_tokens, vocab_size], not hidden states.",
            )
        return logits.argmax(-1).view(reqs, query_len)


class Propose(_Pass):
    """The draft's loop of ``draft_tokens`` steps."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Last and draft tokens [num_reqs, 1 + draft_tokens] of rows [num_reqs], all int64."""
        state = self.state[rows]
        ids = state[:, :CONTEXT]
        tables = state[:, BLOCKS:]
        last = state[:, CONTEXT, None]
        positions = torch.cat((last - 1, last), 1)
        proposed = [ids[:, LAST]]
        for _ in range(self.draft_tokens):
            slots = self.slots(positions, tables)
            chosen = self.choose(
                ids,
                positions,
                slots,
                tables,
            )
            ids = chosen[:, -1:]
            positions = positions[:, -1:] + 1
            proposed.append(ids[:, 0])
        return torch.stack(proposed, 1)


class Verify(_Pass):
    """The target's pass over proposed tokens."""

    def __call__(
        self,
        input_ids: Tensor,
        rows: Tensor,
    ) -> Tensor:
        """Accept the tokens that the target chooses itself, and advance the requests.

        Args:
            input_ids: [num_reqs * (1 + draft_tokens)] int64, from ``Propose``.
            rows: [num_reqs] int64, of the state.

        Returns:
            [num_reqs, 2 + draft_tokens] int64: the number of new tokens, and the target's answers.
        """
        state = self.state[rows]
        ids = input_ids.view(rows.shape[0], -1)
        context = state[:, CONTEXT, None]
        tables = state[:, BLOCKS:]
        positions = context + torch.arange(ids.shape[1], device=rows.device)
        slots = self.slots(positions, tables)
        chosen = self.choose(
            ids,
            positions,
            slots,
            tables,
        )
        drafts = ids[:, 1:]
        has_slot = slots >= 0
        agrees = (drafts == chosen[:, :-1]) & has_slot[:, 1:]
        accepted = agrees.long().cumprod(1)
        count = 1 + accepted.sum(1, keepdim=True)
        new = torch.where(has_slot[:, :1], count, 0)
        # tokens from position n - 1 on: after `new` more, the last two are at `new`, `new` + 1
        known = torch.cat((state[:, :CONTEXT], chosen), 1)
        advanced = [known.gather(1, new), known.gather(1, new + 1), context + new]
        self.state[:, :BLOCKS].index_copy_(0, rows, torch.cat(advanced, 1))
        return torch.cat((new, chosen), 1)
