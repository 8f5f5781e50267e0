"""The parts of the reference decoder. Parameter names are those of transformers' Llama and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

import cgplan.models.attention  # noqa: F401  (registers cgplan::attention)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm of x [..., size]."""
        return rms_norm(x, tuple(self.weight.shape), self.weight, self.eps)


class Table(nn.Module):
    """One weight [rows, columns], for the token embedding and the output projection."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype), requires_grad=False)


class Projection(nn.Module):
    """A linear map without bias, with room for LoRA adapters.

    The adapters of all slots lie in two stacked tensors whose addresses never change, so that loading an
    adapter does not disturb captured graphs: ``lora_a`` [max_loras + 1, rank, in] and ``lora_b``
    [max_loras + 1, out, rank]. The last slot stays zero: index -1 (no adapter) hits it.
    """

    lora_a: Tensor
    lora_b: Tensor

    def __init__(self, size_in: int, size_out: int, dtype: torch.dtype, max_loras: int, lora_rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in, dtype=dtype), requires_grad=False)
        if max_loras:
            slots = max_loras + 1
            self.register_buffer("lora_a", torch.zeros(slots, lora_rank, size_in, dtype=dtype), persistent=False)
            self.register_buffer("lora_b", torch.zeros(slots, size_out, lora_rank, dtype=dtype), persistent=False)

    def forward(self, x: Tensor, lora_ids: Tensor | None) -> Tensor:
        """Map x [num_tokens, in] to [num_tokens, out]; ``lora_ids`` [num_tokens] int64 names each row's adapter."""
        y = linear(x, self.weight)
        if lora_ids is None:
            return y
        low = torch.bmm(self.lora_a[lora_ids], x.unsqueeze(-1))
        return y + torch.bmm(self.lora_b[lora_ids], low).squeeze(-1)

    def load(self, slot: int, adapter: Mapping[str, Tensor]) -> None:
        """Copy ``lora_A`` [rank, in] and ``lora_B`` [out, rank] into the slot; rank may be below the slot's."""
        self.lora_a[slot].zero_()
        self.lora_b[slot].zero_()
        if adapter:
            rank = adapter["lora_A"].shape[0]
            self.lora_a[slot, :rank].copy_(adapter["lora_A"])
            self.lora_b[slot, :, :rank].copy_(adapter["lora_B"])


def rotary_angles(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine factors for `rotate`, each [num_tokens, 1, head_dim], of positions [num_tokens].

    Angles are float32, the result has ``dtype``. The first half of the sines is negative.
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions.float()[:, None, None] * (1.0 / theta ** (steps / head_dim))
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [num_tokens, heads, head_dim]: pairs are (i, i + head_dim // 2)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class SelfAttention(nn.Module):
    """Grouped-query attention; owns the layer's KV cache, which never moves."""

    key_cache: Tensor
    value_cache: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        norm_eps: float | None,
        cache_shape: tuple[int, int],
        dtype: torch.dtype,
        lora: tuple[int, int],
    ) -> None:
        super().__init__()
        self.head_dim, self.scale = head_dim, head_dim**-0.5
        self.q_proj = Projection(hidden_size, num_heads * head_dim, dtype, *lora)
        self.k_proj = Projection(hidden_size, num_kv_heads * head_dim, dtype, *lora)
        self.v_proj = Projection(hidden_size, num_kv_heads * head_dim, dtype, *lora)
        self.o_proj = Projection(num_heads * head_dim, hidden_size, dtype, *lora)
        self.q_norm = RMSNorm(head_dim, norm_eps, dtype) if norm_eps is not None else None
        self.k_norm = RMSNorm(head_dim, norm_eps, dtype) if norm_eps is not None else None
        shape = (*cache_shape, num_kv_heads, head_dim)
        self.register_buffer("key_cache", torch.zeros(shape, dtype=dtype), persistent=False)
        self.register_buffer("value_cache", torch.zeros(shape, dtype=dtype), persistent=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lora_ids: Tensor | None) -> Tensor:
        """Write the cache and attend; x and the result are [num_tokens, hidden_size]."""
        heads = (x.shape[0], -1, self.head_dim)
        query = self.q_proj(x, lora_ids).view(heads)
        key = self.k_proj(x, lora_ids).view(heads)
        value = self.v_proj(x, lora_ids).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        output = torch.empty_like(query)
        torch.ops.cgplan.attention(query, key, value, self.key_cache, self.value_cache, output, self.scale)
        return self.o_proj(output.view(x.shape[0], -1), lora_ids)  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, lora: tuple[int, int]) -> None:
        super().__init__()
        self.gate_proj = Projection(hidden_size, intermediate_size, dtype, *lora)
        self.up_proj = Projection(hidden_size, intermediate_size, dtype, *lora)
        self.down_proj = Projection(intermediate_size, hidden_size, dtype, *lora)

    def forward(self, x: Tensor, lora_ids: Tensor | None) -> Tensor:
        """x and the result are [num_tokens, hidden_size]."""
        gated = silu(self.gate_proj(x, lora_ids)) * self.up_proj(x, lora_ids)
        return self.down_proj(gated, lora_ids)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention, then the gated MLP, each behind a norm and added to the residual stream."""

    def __init__(self, attention: SelfAttention, mlp: GatedMLP, hidden_size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps, dtype)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, dtype)
        self.mlp = mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lora_ids: Tensor | None) -> Tensor:
        """x and the result are [num_tokens, hidden_size]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, lora_ids)
        return x + self.mlp(self.post_attention_layernorm(x), lora_ids)  # type: ignore[no-any-return]


__all__ = ["DecoderLayer", "GatedMLP", "Projection", "RMSNorm", "SelfAttention", "Table", "rotary_angles", "rotate"]
