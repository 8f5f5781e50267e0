"""The shape of the reference decoder, from plain values such as YAML holds."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cgplan.errors import ModelError


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder. The defaults make one that a CPU runs in about a millisecond.

    Attributes:
        vocab_size: Rows of the token embedding.
        hidden_size: Width of the residual stream.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides ``num_heads``.
        head_dim: Size of one head; even.
        intermediate_size: Width inside the gated MLP.
        rope_theta: Base of the rotary frequencies.
        rms_norm_eps: Added to the mean square in every norm.
        qk_norm: Whether each query and key head is normed before rotation, as in Qwen3.
        tie_word_embeddings: Whether the output projection is the token embedding.
        block_size: Tokens per block of the KV cache.
        num_blocks: Blocks that block tables may name; one more is allocated, for padding.
        max_loras: Adapter slots; 0 leaves LoRA out.
        lora_rank: Largest rank of an adapter.
        logits: Whether ``forward`` returns logits; else hidden states.
        tensor_parallel: Ranks that the heads and the MLP are split over; 1 for one process.
        dtype: Of weights and cache: float32, bfloat16 or float16.
        seed: Of the random weights.
    """

    vocab_size: int = 512
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 256
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    qk_norm: bool = True
    tie_word_embeddings: bool = True
    block_size: int = 16
    num_blocks: int = 128
    max_loras: int = 0
    lora_rank: int = 8
    logits: bool = True
    tensor_parallel: int = 1
    dtype: str = "float32"
    seed: int = 0

    @classmethod
    def parse(cls, kwargs: Mapping[str, Any]) -> DecoderConfig:
        """Config from plain values. Raises ModelError on an unknown name, a wrong type or an impossible shape."""
        known = {field.name: field.default for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"Did you mean `{near[0]}`? " if near else ""
                raise ModelError(f"the decoder has no `{name}`", remedy=f"{hint}It takes {', '.join(known)}.")
            values[name] = _coerce(name, value, type(known[name]))
        config = cls(**values)
        config._check()
        return config

    def _check(self) -> None:
        may_be_zero = {"max_loras", "seed"}
        for name, value in vars(self).items():
            low = name in may_be_zero and value >= 0
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0 and not low:
                raise ModelError(f"the decoder's {name} is {value}", remedy="Give a number above 0.")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}",
                remedy="Choose num_heads as a multiple of num_kv_heads.",
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd", remedy="Rotary positions need an even head_dim.")
        self._check_split()

    def _check_split(self) -> None:
        parts = self.tensor_parallel
        for name in ("num_heads", "num_kv_heads", "hidden_size", "intermediate_size"):
            if getattr(self, name) % parts:
                raise ModelError(
                    f"tensor_parallel {parts} does not divide {name} {getattr(self, name)}",
                    remedy="Start as many ranks as divide the heads, hidden_size and intermediate_size.",
                )
        if parts > 1 and self.max_loras:
            raise ModelError(
                f"tensor_parallel is {parts} and max_loras {self.max_loras}: adapters are not split over ranks",
                remedy="Leave LoRA out, or run the model in one process.",
            )


def _coerce(name: str, value: object, kind: type) -> object:
    """``value`` as ``kind``. Text is taken for a float, because YAML 1.1 reads 1e6 as text."""
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    elif isinstance(value, kind) and (kind is not int or not isinstance(value, bool)):
        return value
    raise ModelError(f"the decoder's {name} is {value!r}", remedy=f"Give a value of type {kind.__name__}.")


__all__ = ["DecoderConfig"]
