"""Device work of a step of speculative decoding.

Note [Positions and caches]
    The target's cache holds n tokens; the last token, at n, is in no cache. The draft reads the
    last two, then d1 .. d(k-1). The target reads the last token and d1 .. dk, and answers g0 .. gk.
    Of the longest prefix with d(i+1) = g(i), a tokens, g0 .. ga are new, and n grows by a + 1. The
    draft begins with two tokens, because it has not read dk.
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


def new_state(
    max_num_seqs: int,
    max_blocks: int,
    device: torch.device,
) -> Tensor:
    """[max_num_seqs + 1, 3 + max_blocks] int64: two last tokens, the context's length, and blocks
    (-1: none); the last row is padding.
    """
    with torch.inference_mode(False):  # inference tensors are written in that mode alone
        state = torch.zeros(max_num_seqs + 1, BLOCKS + max_blocks, dtype=torch.int64, device=device)
        state[:, BLOCKS:] = -1
    return state


class _Pass:
    def __init__(
        self,
        model: PagedModel,
        metadata: Mapping[str, Input],
        state: Tensor,
        draft_tokens: int = 0,
    ) -> None:
        self.model = model
        self.state = state
        self.draft_tokens = draft_tokens
        self._dtypes = {name: torch_dtype(spec) for name, spec in metadata.items()}

    def choose(
        self,
        ids: Tensor,
        positions: Tensor,
        tables: Tensor,
    ) -> tuple[Tensor, Tensor]:
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
            "query_start_loc": torch.arange(
                0,
                num_tokens + 1,
                query_len,
                device=ids.device,
            ),
        }
        metadata = {name: made[name].to(dtype) for name, dtype in self._dtypes.items()}
        # a model's positions may end where block tables do
        places = positions.clamp(0, columns * size - 1)
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
            chosen, _ = self.choose(
                ids,
                positions,
                tables,
            )
            ids = chosen[:, -1:]
            positions = positions[:, -1:] + 1
            proposed.append(ids[:, 0])
        return torch.stack(proposed, 1)


class Verify(_Pass):
    def __call__(
        self,
        input_ids: Tensor,
        rows: Tensor,
    ) -> Tensor:
        """Accept tokens that the target chooses itself, and advance the requests.

        Takes [num_reqs * (1 + draft_tokens)] and [num_reqs] int64, returns [num_reqs, 2 +
        draft_tokens] int64: the number of new tokens, and the target's answers.
        """
        state = self.state[rows]
        ids = input_ids.view(rows.shape[0], -1)
        context = state[:, CONTEXT, None]
        tables = state[:, BLOCKS:]
        positions = context + torch.arange(ids.shape[1], device=rows.device)
        chosen, slots = self.choose(
            ids,
            positions,
            tables,
        )
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
