"""Attention over a paged KV cache as one operator, ``cgplan::attention``.

The operator takes the tensors of one layer. It reads the batch's metadata from the forward
context, so that a graph captured around it, or split at it, needs no extra arguments:

    slot_mapping [num_tokens] int64: cache slot that takes the token's key and value; -1: none.
    block_tables [num_reqs, max_blocks] int32: blocks of each request, in order; any value past its
        end.
    seq_lens [num_reqs] int32: keys of each request, those of new tokens included; 0 in padding.
    query_start_loc [num_reqs + 1] int32: first token of each request, then the end; padding repeats
        the end.

``query_start_loc`` may be absent where the descriptor says that the batch is uniform. Slot ``s`` is
row ``s % block_size`` of block ``s // block_size``. The caches have one block more than the tables
may name: tokens without a slot are written there, because a branch on the device's data cannot be
captured.

Importing this file registers the operator. Each graph of PIECEWISE mode ends before it, unless
``splitting_ops`` says otherwise. decoder.py uses it; your model can too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from cgplan.backends.context import ForwardContext, define_operator, get_forward_context
from cgplan.errors import InputError

_SCHEMA = """attention(
    Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,
    Tensor(c!) output, float scale
) -> ()"""


@dataclass(frozen=True)
class _GatherLayout:
    """Derived from the metadata once per forward, for the gather path."""

    slots: Tensor  # [num_tokens] int64: the cache row each token is written to
    blind: Tensor  # [num_tokens, 1, 1] bool: whether the token sees no key (padding)
    pages: Tensor  # [num_tokens, max_blocks] int64: the token's blocks
    # [num_tokens, max_blocks * block_size, 1, 1] bool: gathered keys that the token does not see
    unseen: Tensor
    # [num_tokens, 1, 1, max_blocks * block_size] bool: keys that it sees; all of them in blind rows
    mask: Tensor


@dataclass(frozen=True)
class _PageLayout:
    """Likewise for the flash path, in which each (token, page) pair is one query."""

    slots: Tensor  # [num_tokens] int64: the cache row each token is written to
    query_starts: Tensor  # [num_tokens * max_blocks + 1] int32: 0, 1, 2, ...
    # [num_tokens * max_blocks + 1] int32: the cache row where each pair's page begins
    page_starts: Tensor
    used: Tensor  # [num_tokens * max_blocks] int32: keys of the page that the token sees
    empty: Tensor  # [num_tokens, max_blocks, 1] bool: whether it sees none of them


def _tensor(context: ForwardContext, name: str, dim: int) -> Tensor:
    """One metadata tensor, checked on the host without a look at its data."""
    value = context.metadata.get(name)
    if not isinstance(value, Tensor) or value.dim() != dim:
        found = (
            f"a tensor of shape {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else type(value).__name__
        )
        raise InputError(
            f"cgplan::attention needs `{name}` ({dim} dimensions) in the forward context's "
            f"metadata; found {found}",
            remedy="Pass slot_mapping, block_tables, seq_lens and query_start_loc as metadata of "
            "the batch.",
        )
    return value


def _requests_and_visible(context: ForwardContext, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Request of each token and the number of keys it sees (0 for padding), both [num_tokens]
    int64.
    """
    seq_lens = _tensor(context, "seq_lens", 1)
    num_reqs, query_len = seq_lens.shape[0], context.descriptor.uniform_query_len
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=seq_lens.device)
    if query_len and query_len * num_reqs == num_tokens:
        requests = (tokens // query_len).long()
        last = requests * query_len + (query_len - 1)
        return requests, (seq_lens[requests] - (last - tokens)).clamp_(min=0)
    starts = _tensor(context, "query_start_loc", 1)
    if starts.shape[0] != num_reqs + 1:
        raise InputError(
            f"query_start_loc has {starts.shape[0]} entries, seq_lens has {num_reqs}: it must "
            "have one more",
            remedy="Give query_start_loc the first token of each request, then the end of the "
            "last one.",
        )
    ends = starts[1:]
    # Tokens past the last request's end are padding; searchsorted sends them one past the last
    # request.
    requests = torch.searchsorted(ends, tokens.to(ends.dtype), right=True).clamp_(max=num_reqs - 1)
    visible = seq_lens[requests] - (ends[requests] - 1 - tokens)
    return requests, torch.where(tokens < starts[-1:], visible, 0).clamp_(min=0).long()


def reads_pages_in_place(query: Tensor) -> bool:
    """Whether ``query`` takes the flash path (half precision on a GPU of compute capability 8 or
    more).
    """
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    size, has_flash = (
        query.shape[-1],
        torch.backends.cuda.is_flash_attention_available() and torch.version.hip is None,
    )
    return (
        size % 8 == 0
        and size <= 256
        and has_flash
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _layout(
    context: ForwardContext, query: Tensor, key_cache: Tensor
) -> _GatherLayout | _PageLayout:
    num_tokens, (num_blocks, block_size) = query.shape[0], key_cache.shape[:2]
    slot_mapping = _tensor(context, "slot_mapping", 1)
    tables = _tensor(context, "block_tables", 2)
    if slot_mapping.shape[0] != num_tokens:
        raise InputError(
            f"slot_mapping has {slot_mapping.shape[0]} entries for {num_tokens} tokens",
            remedy="Give slot_mapping one entry per row of the batch, -1 for padding rows.",
        )
    slots = torch.where(slot_mapping < 0, (num_blocks - 1) * block_size, slot_mapping)
    requests, visible = _requests_and_visible(context, num_tokens)
    # Entries past a request's end may hold anything, also a block number that does not exist.
    pages = tables[requests].clamp_(0, num_blocks - 1)
    max_blocks = pages.shape[1]
    if not reads_pages_in_place(query):
        rows = torch.arange(max_blocks * block_size, device=visible.device)
        unseen, blind = rows >= visible[:, None], (visible == 0)[:, None]
        mask = ~unseen | blind
        return _GatherLayout(
            slots, blind[..., None], pages.long(), unseen[..., None, None], mask[:, None, None, :]
        )
    firsts = torch.arange(0, max_blocks * block_size, block_size, device=visible.device)
    used = (visible[:, None] - firsts).clamp_(0, block_size).int()
    return _PageLayout(
        slots=slots,
        query_starts=torch.arange(
            num_tokens * max_blocks + 1, dtype=torch.int32, device=visible.device
        ),
        page_starts=pad((pages * block_size).flatten(), (0, 1)).int(),
        used=used.flatten(),
        empty=(used == 0).unsqueeze(-1),
    )


def _attend_gathered(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, layout: _GatherLayout, scale: float
) -> Tensor:
    """Gathers each token's keys and values, then one scaled_dot_product_attention over all tokens.

    Keys that a token does not see become zeros, not only masked: a block may hold NaN from an
    earlier life, and 0 * NaN is NaN. A row that sees no key attends to zeros and gives zeros.
    """
    keys = key_cache[layout.pages].flatten(1, 2).masked_fill_(layout.unseen, 0)
    values = value_cache[layout.pages].flatten(1, 2).masked_fill_(layout.unseen, 0)
    out = scaled_dot_product_attention(
        q.unsqueeze(2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        layout.mask,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(2).masked_fill_(layout.blind, 0)


def _attend_pages(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, layout: _PageLayout, scale: float
) -> Tensor:
    """Reads the pages where they lie: each (token, page) pair is one sequence of the flash kernel.

    Softmax attention over keys that are cut into parts is the mean of the parts' results, weighted
    with the softmax of their log-sum-exps (Dao, Haziza, Massa and Sizov, "Flash-Decoding for
    long-context inference", 2023). The parts are the pages, because torch 2.11's flash kernel takes
    each sequence's first row and length, and no block table.
    """
    num_tokens, num_heads, head_dim = q.shape
    max_blocks, (block_size, num_kv_heads) = layout.empty.shape[1], key_cache.shape[1:3]
    # Lengths come from seqused_k; of cum_seq_k the kernel reads only where a sequence begins, so
    # its entries need not increase.
    out, log_sum_exp = torch.ops.aten._flash_attention_forward(
        q.unsqueeze(1).expand(-1, max_blocks, -1, -1).reshape(-1, num_heads, head_dim),
        key_cache.view(-1, num_kv_heads, head_dim),
        value_cache.view(-1, num_kv_heads, head_dim),
        layout.query_starts,
        layout.page_starts,
        1,
        block_size,
        0.0,
        False,
        False,
        scale=scale,
        seqused_k=layout.used,
    )[:2]
    out = out.view(num_tokens, max_blocks, num_heads, head_dim)
    # The kernel's log-sum-exp of an empty page is undefined. This one is so low that the page
    # weighs exactly 0 beside any filled page, and finite, so that a row of empty pages does not
    # become NaN.
    weights = (
        log_sum_exp.T.view(num_tokens, max_blocks, num_heads)
        .masked_fill_(layout.empty, -1e30)
        .softmax(1)
    )
    weighted: Tensor = (out * weights.unsqueeze(-1)).masked_fill_(layout.empty.unsqueeze(-1), 0)
    return weighted.sum(1)


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    scale: float,
) -> None:
    """Write the new keys and values to the cache, then attend; the body of ``cgplan::attention``.

    It can be captured, and serves uniform decode, prefill and mixed batches. Rows of padding tokens
    become zeros. On the CPU, and in float32, each token gathers a copy of its keys: memory in
    proportion to num_tokens * max_blocks * block_size. Half precision on a GPU reads the cache in
    place.

    Args:
        query: [num_tokens, num_heads, head_dim].
        key: [num_tokens, num_kv_heads, head_dim]; num_kv_heads divides num_heads.
        value: Like ``key``.
        key_cache: [num_blocks + 1, block_size, num_kv_heads, head_dim], contiguous; written. The
            last block takes the keys of padding tokens. The model owns it.
        value_cache: Like ``key_cache``; written.
        output: Like ``query``; written. The caller owns it.
        scale: Factor of the scores, usually head_dim ** -0.5.

    Raises:
        InputError: The metadata lacks a tensor, or shapes do not agree.
        CgplanError: No forward context is set.
    """
    context = get_forward_context()
    name = (
        f"cgplan::attention {query.shape[0]} {key_cache.shape[0]}x{key_cache.shape[1]} "
        f"{query.dtype}"
    )
    # The first layer derives the layout, the other layers of the forward reuse it.
    layout = context.derive(name, query.device, lambda: _layout(context, query, key_cache))
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, layout.slots, new)
    if isinstance(layout, _PageLayout):
        output.copy_(_attend_pages(query, key_cache, value_cache, layout, scale))
    else:
        output.copy_(_attend_gathered(query, key_cache, value_cache, layout, scale))


define_operator(_SCHEMA, paged_attention, lambda *_: None)
