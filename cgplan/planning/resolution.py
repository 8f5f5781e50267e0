"""Mode resolution: what was asked for, what the model can do, and each change with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from cgplan.config import Config
from cgplan.errors import ModeError
from cgplan.modes import AttentionSupport, CUDAGraphMode

DEFAULT_SPLITTING_OPS = (
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "higher_order::flex_attention",
    "torch_attn::_varlen_attn",
    "cgplan::attention",
)


@dataclass(frozen=True, slots=True)
class ModeChange:
    """One step of mode resolution, kept so that nothing is downgraded in silence."""

    requested: CUDAGraphMode
    resolved: CUDAGraphMode
    reason: str


def attention_is_split(splitting_ops: tuple[str, ...] | None) -> bool:
    """Whether attention stands outside the graph segments. An operator counts as attention by its name."""
    ops = DEFAULT_SPLITTING_OPS if splitting_ops is None else splitting_ops
    return any("attention" in op or "attn" in op for op in ops)


def resolve_mode(config: Config) -> tuple[CUDAGraphMode, tuple[ModeChange, ...]]:
    """The mode that can be captured, and the changes that led there, in order.

    Raises ModeError where mixed batches are to run as FULL graphs and the attention supports none.
    """
    compilation = config.compilation
    mode: CUDAGraphMode = compilation.cudagraph_mode
    support: AttentionSupport = compilation.attention_support
    split = attention_is_split(compilation.splitting_ops)
    piecewise_or_none = CUDAGraphMode.PIECEWISE if split else CUDAGraphMode.NONE
    changes: list[ModeChange] = []

    def change(to: CUDAGraphMode, reason: str) -> CUDAGraphMode:
        changes.append(ModeChange(mode, to, reason))
        return to

    if compilation.splitting_ops == () and mode.has_mode(CUDAGraphMode.PIECEWISE):
        to = CUDAGraphMode.FULL if mode is CUDAGraphMode.FULL_AND_PIECEWISE else CUDAGraphMode.NONE
        mode = change(to, "splitting_ops is empty: there is nothing to split at")
    if mode.mixed_mode() is CUDAGraphMode.FULL and support is not AttentionSupport.ALWAYS:
        if support is AttentionSupport.NEVER:
            raise ModeError(
                f"cudagraph_mode {mode} captures attention, but attention_support is NEVER",
                remedy=f"Choose {'PIECEWISE or NONE' if split else 'NONE'} for compilation.cudagraph_mode.",
            )
        to = CUDAGraphMode.FULL_AND_PIECEWISE if split else CUDAGraphMode.FULL_DECODE_ONLY
        mode = change(to, f"attention_support is {support}: mixed batches cannot run as FULL graphs")
    if mode.decode_mode() is CUDAGraphMode.FULL and support is AttentionSupport.NEVER:
        mode = change(piecewise_or_none, "attention_support is NEVER: attention cannot stand inside a graph")
    if mode.decode_mode() is CUDAGraphMode.FULL and config.query_len > 1 and support < AttentionSupport.UNIFORM_BATCH:
        mode = change(
            piecewise_or_none,
            f"attention_support is {support}, but speculative decoding has {config.query_len} tokens a request",
        )
    return mode, tuple(changes)
