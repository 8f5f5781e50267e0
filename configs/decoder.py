"""The reference decoder: a Llama or Qwen3 in plain PyTorch over a paged KV cache, made to be
captured. Parameter names are those of transformers' Llama and Qwen3.

LoRA is an operator, ``cgplan::add_lora``, which reads each row's adapter from the forward context:
``lora_ids`` [num_tokens] int64 in the metadata, -1 for none and for padding. So a traced forward
holds the operator and no batch, and each graph captured from it holds the case of its descriptor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attention  # noqa: F401  (registers cgplan::attention)
import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad, silu

from cgplan.backends.context import current_all_reduce, define_operator, get_forward_context
from cgplan.errors import InputError, ModelError, did_you_mean
from cgplan.models.loading import parse_dtype


class DecoderConfig(BaseModel):
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

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    vocab_size: PositiveInt = 512
    hidden_size: PositiveInt = 128
    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    head_dim: PositiveInt = Field(32, multiple_of=2)
    intermediate_size: PositiveInt = 256
    rope_theta: PositiveFloat = Field(10000.0, strict=False)  # YAML 1.1 reads 1e6 as text
    rms_norm_eps: PositiveFloat = Field(1e-6, strict=False)
    qk_norm: bool = True
    tie_word_embeddings: bool = True
    block_size: PositiveInt = 16
    num_blocks: PositiveInt = 128
    max_loras: NonNegativeInt = 0
    lora_rank: PositiveInt = 8
    logits: bool = True
    tensor_parallel: PositiveInt = 1
    dtype: str = "float32"
    seed: NonNegativeInt = 0

    @classmethod
    def parse(cls, kwargs: Mapping[str, Any]) -> DecoderConfig:
        """Config from plain values. Raises ModelError on an unknown name, a wrong type or an
        impossible shape.
        """
        try:
            return cls(**kwargs)
        except ValidationError as error:
            first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        if first["type"] == "extra_forbidden":
            hint = did_you_mean(name, cls.model_fields)
            raise ModelError(
                f"the decoder has no `{name}`",
                remedy=f"{hint}It takes {', '.join(cls.model_fields)}.",
            )
        if not name:
            raise ModelError(
                first["msg"].removeprefix("Value error, "), remedy="Correct model.kwargs."
            )
        raise ModelError(f"the decoder's {name} is {first['input']!r}", remedy=f"{first['msg']}.")

    @model_validator(mode="after")
    def _divides(self) -> DecoderConfig:
        split = ("num_heads", "num_kv_heads", "hidden_size", "intermediate_size")
        for name, by in (
            ("num_heads", "num_kv_heads"),
            *((name, "tensor_parallel") for name in split),
        ):
            if getattr(self, name) % getattr(self, by):
                raise ValueError(
                    f"{by} {getattr(self, by)} does not divide {name} {getattr(self, name)}"
                )
        if self.tensor_parallel > 1 and self.max_loras:
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel}, and adapters are not split over ranks"
            )
        return self


class Table(nn.Module):
    """One weight [rows, columns], for the token embedding and the output projection."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype), requires_grad=False)


def add_lora(x: Tensor, lora_a: Tensor, lora_b: Tensor, y: Tensor) -> None:
    """Add each row's adapter to ``y``; the body of ``cgplan::add_lora``.

    A batch whose descriptor has no LoRA launches nothing. Rows without an adapter, or with a number
    that no slot has, are left as they are.

    Args:
        x: [num_tokens, in].
        lora_a: [max_loras, rank, in], contiguous; finite. The model owns it.
        lora_b: [max_loras, rank, out], likewise.
        y: [num_tokens, out]; written. The caller owns it.

    Raises:
        InputError: the batch has LoRA, but its metadata no ``lora_ids`` of one entry a row.
        CgplanError: no forward context is set.
    """
    context = get_forward_context()
    if not context.descriptor.has_lora:
        return
    (num_tokens, _), (slots, rank, _) = x.shape, lora_a.shape

    def other_slots() -> Tensor:
        """[num_tokens, slots, 1] bool: False where the row's adapter lies in the slot."""
        ids = context.metadata.get("lora_ids")
        if not isinstance(ids, Tensor) or ids.shape != (num_tokens,):
            found = f"has shape {list(ids.shape)}" if isinstance(ids, Tensor) else "is missing"
            raise InputError(
                f"the batch has LoRA adapters, but `lora_ids` {found} in the forward context's "
                "metadata",
                remedy=f"Pass lora_ids [{num_tokens}] int64: each row's adapter slot, -1 for none.",
            )
        return (ids[:, None] != torch.arange(slots, device=ids.device)).unsqueeze(-1)

    others = context.derive(f"cgplan::add_lora {num_tokens} {slots}", x.device, other_slots)
    # All slots at once; in between, products with other rows' slots become exactly 0. Gathering
    # each row's matrices (lora_a[ids]) would move num_tokens * rank * (in + out) elements; this
    # reads slots * rank * (in + out) for any number of rows. With some tens of slots the products
    # with other slots cost a GPU less than that traffic.
    low = x @ lora_a.flatten(0, 1).T
    low.view(num_tokens, slots, rank).masked_fill_(others, 0)
    # (under autocast the three may differ)
    y.addmm_(low.to(y.dtype), lora_b.flatten(0, 1).to(y.dtype))


define_operator(
    "add_lora(Tensor x, Tensor lora_a, Tensor lora_b, Tensor(a!) y) -> ()",
    add_lora,
    lambda *_: None,
)


def _zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """A buffer that may be written to in any mode: one made in inference mode could be written to
    only there.
    """
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype)


class Split(NamedTuple):
    """How projections are split: number of ranks, this one's rank, and the number of the all-reduce
    that sums over them (see ``cgplan.distributed.AllReduce``).
    """

    parts: int = 1
    rank: int = 0
    group: int = 0


class Projection(nn.Module):
    """A linear map without bias, with room for LoRA adapters; with several ranks, a part of one.

    The adapters of all slots lie in two stacked tensors whose addresses never change, so that
    loading an adapter does not disturb captured graphs: ``lora_a`` [max_loras, rank, in] and
    ``lora_b`` [max_loras, rank, out]. A slot without an adapter is zero.
    """

    split_dim: int  # of the weight [out, in]
    lora_a: Tensor
    lora_b: Tensor

    def __init__(
        self, size_in: int, size_out: int, dtype: torch.dtype, lora: tuple[int, int], split: Split
    ) -> None:
        super().__init__()
        shape = [size_out, size_in]
        shape[self.split_dim] //= split.parts
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        self.split = split
        self.max_loras, rank = lora
        if self.max_loras:
            for name, size in (("lora_a", size_in), ("lora_b", size_out)):
                self.register_buffer(
                    name, _zeros(self.max_loras, rank, size, dtype=dtype), persistent=False
                )

    def forward(self, x: Tensor) -> Tensor:
        """Map x [num_tokens, in] to [num_tokens, out], each row with the adapter that the forward
        context says.
        """
        y = linear(x, self.weight)
        if self.max_loras:
            torch.ops.cgplan.add_lora(x, self.lora_a, self.lora_b, y)
        return y

    def load(self, slot: int, adapter: Mapping[str, Tensor]) -> None:
        """Copy ``lora_A`` [rank, in] and ``lora_B`` [out, rank] into the slot, also where they are
        views of it; empty: zero the slot. The rank may be below the slot's.
        """
        # else adapters that require grad would make the slots part of their graph
        with torch.no_grad():
            given = (adapter["lora_A"], adapter["lora_B"].T) if adapter else ()
            copies = [weights.to(self.lora_a, copy=True) for weights in given]
            for slots in (self.lora_a, self.lora_b):
                slots[slot].zero_()
            for slots, weights in zip((self.lora_a, self.lora_b), copies, strict=False):
                slots[slot, : weights.shape[0]] = weights


class ColumnParallel(Projection):
    """This rank's rows of a projection's weight: it takes the whole input, and gives its part of
    the output.
    """

    split_dim = 0


class RowParallel(Projection):
    """This rank's columns of a projection's weight: it takes its part of the input, and the ranks'
    results are summed.

    Behind a ColumnParallel projection that makes one all-reduce for the two, inside of the graph.
    """

    split_dim = 1

    def forward(self, x: Tensor) -> Tensor:
        """Map x [num_tokens, in / parts] to [num_tokens, out], the same on all ranks."""
        y = super().forward(x)
        if self.split.parts == 1:
            return y
        summed: Tensor = torch.ops.cgplan.all_reduce(y, self.split.group)
        return summed


def rotary_angles(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine factors for `rotate`, each [num_tokens, 1, head_dim], of positions
    [num_tokens].

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
    """Grouped-query attention; owns the layer's KV cache, which never moves. Split over ranks, it
    has their heads.
    """

    key_cache: Tensor
    value_cache: Tensor

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, split: Split) -> None:
        super().__init__()
        self.head_dim, self.scale = config.head_dim, config.head_dim**-0.5
        lora, kv_size = (config.max_loras, config.lora_rank), config.num_kv_heads * config.head_dim
        self.q_proj = ColumnParallel(
            config.hidden_size, config.num_heads * config.head_dim, dtype, lora, split
        )
        self.k_proj = ColumnParallel(config.hidden_size, kv_size, dtype, lora, split)
        self.v_proj = ColumnParallel(config.hidden_size, kv_size, dtype, lora, split)
        self.o_proj = RowParallel(
            config.num_heads * config.head_dim, config.hidden_size, dtype, lora, split
        )
        self.q_norm = (
            nn.RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)
            if config.qk_norm
            else None
        )
        self.k_norm = (
            nn.RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)
            if config.qk_norm
            else None
        )
        heads = config.num_kv_heads // split.parts
        for name in ("key_cache", "value_cache"):
            cache = _zeros(
                config.num_blocks + 1, config.block_size, heads, config.head_dim, dtype=dtype
            )
            self.register_buffer(name, cache, persistent=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Write the cache and attend; x and the result are [num_tokens, hidden_size]."""
        heads = (x.shape[0], -1, self.head_dim)
        query = self.q_proj(x).view(heads)
        key = self.k_proj(x).view(heads)
        value = self.v_proj(x).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        output = torch.empty_like(query)
        torch.ops.cgplan.attention(
            query, key, value, self.key_cache, self.value_cache, output, self.scale
        )
        return self.o_proj(output.view(x.shape[0], -1))  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, split: Split) -> None:
        super().__init__()
        lora = (config.max_loras, config.lora_rank)
        self.gate_proj = ColumnParallel(
            config.hidden_size, config.intermediate_size, dtype, lora, split
        )
        self.up_proj = ColumnParallel(
            config.hidden_size, config.intermediate_size, dtype, lora, split
        )
        self.down_proj = RowParallel(
            config.intermediate_size, config.hidden_size, dtype, lora, split
        )

    def forward(self, x: Tensor) -> Tensor:
        """x and the result are [num_tokens, hidden_size]."""
        gated = silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(gated)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention, then the gated MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, split: Split) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.self_attn = SelfAttention(config, dtype, split)
        self.post_attention_layernorm = nn.RMSNorm(
            config.hidden_size, config.rms_norm_eps, dtype=dtype
        )
        self.mlp = GatedMLP(config, dtype, split)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x and the result are [num_tokens, hidden_size]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Token embedding, decoder layers, final norm, output projection; random weights, no autograd.

    The state dict has the names of transformers' ``Qwen3ForCausalLM`` (or, without ``qk_norm``,
    ``LlamaForCausalLM``) less the prefix ``model.``, so weights of a checkpoint can be loaded.

    With ``tensor_parallel`` it has its rank's part of each layer, cut from the weights that one
    process would draw. It is built inside ``all_reduce_by`` then, with as many ranks; else it
    raises ModelError.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        dtype, split, parts, reducer = (
            parse_dtype(config.dtype),
            Split(),
            config.tensor_parallel,
            current_all_reduce(),
        )
        if parts > 1:
            if reducer is None or reducer.world_size != parts:
                found = 1 if reducer is None else reducer.world_size
                raise ModelError(
                    f"the decoder is split over {parts} ranks (tensor_parallel), and {found} run",
                    remedy=f"Start it with torchrun --nproc-per-node {parts}, or set "
                    f"tensor_parallel to {found}.",
                )
            split = Split(parts, reducer.rank, reducer.number)
        self.embed_tokens = Table(config.vocab_size, config.hidden_size, dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(config, dtype, split) for _ in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        tied = config.tie_word_embeddings
        self.lm_head = (
            self.embed_tokens if tied else Table(config.vocab_size, config.hidden_size, dtype)
        )
        self.requires_grad_(False)
        self._randomise(config.seed)

    def _randomise(self, seed: int) -> None:
        """Fill weights and adapters on their device: 0.6 billion numbers take a GPU
        milliseconds.
        """
        generator = torch.Generator(self.norm.weight.device).manual_seed(seed)
        for module in self.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.dim() < 2:
                    continue
                if not isinstance(module, Projection) or module.split.parts == 1:
                    parameter.normal_(0.0, 0.02, generator=generator)
                    continue
                shape = list(parameter.shape)
                shape[module.split_dim] *= module.split.parts
                whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
                whole.normal_(0.0, 0.02, generator=generator)
                parameter.copy_(
                    whole.chunk(module.split.parts, module.split_dim)[module.split.rank]
                )
        for projection in self._projections().values() if self.config.max_loras else ():
            rank, size_in = projection.lora_a.shape[1:]
            projection.lora_a.normal_(0.0, size_in**-0.5, generator=generator)
            projection.lora_b.normal_(0.0, rank**-0.5, generator=generator)

    def _projections(self) -> dict[str, Projection]:
        return {
            name: module for name, module in self.named_modules() if isinstance(module, Projection)
        }

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Run one batch of flat tokens; the forward context's metadata says which request each
        belongs to.

        Args:
            input_ids: [num_tokens] int64.
            positions: [num_tokens] int64, the place of each token in its request, from 0.

        Returns:
            Logits [num_tokens, vocab_size], or hidden states [num_tokens, hidden_size] where the
            config says ``logits: false``; in the model's dtype. The caller owns them.

        Raises:
            InputError: The forward context's metadata does not fit (see
                attention.py).
        """
        x = embedding(input_ids, self.embed_tokens.weight)
        cos, sin = rotary_angles(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        hidden: Tensor = self.norm(x)
        return self.compute_logits(hidden) if self.config.logits else hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab_size] of hidden states [rows, hidden_size]."""
        return linear(hidden, self.lm_head.weight)

    @property
    def max_loras(self) -> int:
        """Adapter slots."""
        return self.config.max_loras

    def load_lora(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Copy an adapter into a slot, in place: graphs that were captured before serve it from the
        next replay on.

        Args:
            slot: From 0 to max_loras - 1.
            state: ``<projection>.lora_A`` [rank, in] and ``<projection>.lora_B`` [out, rank], the
                scale alpha / rank multiplied into B; ``<projection>`` is such as
                ``layers.0.self_attn.q_proj``. Projections that are not named get no adapter.

        Raises:
            ModelError: no such slot or projection, a matrix is missing or has another shape, or
                holds values that are not floating-point or not finite in the model's dtype. The
                slot is as it was.
        """
        if not 0 <= slot < self.config.max_loras:
            raise ModelError(
                f"no adapter slot {slot}: the decoder has {self.config.max_loras}",
                remedy="Choose a slot from 0 to max_loras - 1, or build the decoder with more.",
            )
        projections = self._projections()
        adapters: dict[str, dict[str, Tensor]] = {name: {} for name in projections}
        for name, tensor in state.items():
            projection, _, part = name.rpartition(".")
            if projection not in projections or part not in ("lora_A", "lora_B"):
                raise ModelError(
                    f"the adapter's {name!r} fits no projection",
                    remedy=f"{did_you_mean(projection, projections)}Name <projection>.lora_A and "
                    ".lora_B.",
                )
            adapters[projection][part] = tensor
        for name, adapter in adapters.items():
            if not adapter:
                continue
            weight, most = projections[name].weight, self.config.lora_rank
            size_out, size_in = weight.shape
            shapes = {part: tuple(tensor.shape) for part, tensor in adapter.items()}
            rank = (*shapes.get("lora_A", ()), 0)[0]
            if not 0 < rank <= most or shapes != {
                "lora_A": (rank, size_in),
                "lora_B": (size_out, rank),
            }:
                raise ModelError(
                    f"the adapter of {name} has shapes {shapes}",
                    remedy=f"It needs lora_A (rank, {size_in}) and lora_B ({size_out}, rank), "
                    f"rank at most {most}.",
                )
            # Rows of other adapters are multiplied with it, too, by 0: that must give 0.
            if not all(
                t.is_floating_point() and t.to(weight.dtype).isfinite().all()
                for t in adapter.values()
            ):
                raise ModelError(
                    f"the adapter of {name} has values that are not finite in {weight.dtype}",
                    remedy="Look whether the checkpoint is damaged or quantized, or build the "
                    "decoder in a dtype of a "
                    "wider range.",
                )
        for name, module in projections.items():
            module.load(slot, adapters[name])

    def remove_lora(self, slot: int) -> None:
        """Zero a slot, in place: from the next replay on its rows are the base model's. Raises
        ModelError for a slot that does not exist.
        """
        self.load_lora(slot, {})


def build(**kwargs: Any) -> Decoder:
    """The decoder on the current default device; ``kwargs`` and errors are those of
    `DecoderConfig.parse`.
    """
    return Decoder(DecoderConfig.parse(kwargs))


def first_layers(model: Decoder, num_layers: int) -> Decoder:
    """The first layers of a decoder as a second decoder: a draft for speculative decoding without
    training.

    It shares the model's weights, and has separate caches and no LoRA adapters. Raises ModelError
    unless ``num_layers`` is from 1 to as many as the model has.
    """
    most = model.config.num_layers
    if not 1 <= num_layers <= most:
        raise ModelError(
            f"no first {num_layers} layers: the decoder has {most}",
            remedy=f"Choose from 1 to {most}.",
        )
    with torch.device(model.norm.weight.device):
        draft = build(**{**model.config.model_dump(), "num_layers": num_layers, "max_loras": 0})
    weights = model.state_dict()
    draft.to(model.norm.weight.dtype).load_state_dict(
        {name: weights[name] for name in draft.state_dict()}, assign=True
    )
    return draft


class ExampleBatch(NamedTuple):
    """One batch for the decoder; the caller owns the tensors. See `example_batch`."""

    input_ids: Tensor
    positions: Tensor
    metadata: dict[str, Tensor]


def example_batch(
    model: Decoder,
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    num_tokens: int | None = None,
    num_reqs: int | None = None,
    max_blocks: int | None = None,
    seed: int = 0,
) -> ExampleBatch:
    """A consistent batch with random tokens, on the model's device.

    Block tables are a random permutation that depends only on the seed and the number of requests,
    so a prompt and the decode steps after it, made with the same seed, find the same cache.

    Args:
        model: Gives block size, blocks, vocabulary, device.
        context_lens, query_lens: Of each request the tokens that are in the cache already, and the
            new ones.
        num_tokens: Pad to this many tokens (id 0, position 0, slot -1); absent: no padding.
        num_reqs: Pad to this many requests (length 0); absent: no padding.
        max_blocks: Columns of the block tables; absent: as many as the longest request needs.
        seed: Of tokens and block tables.

    Returns:
        input_ids and positions [num_tokens] int64; metadata as ``cgplan::attention`` reads it, and
        with LoRA ``lora_ids`` [num_tokens] int64, all -1.

    Raises:
        InputError: the two lists differ in length, or padding or cache are too small.
    """
    config, used, real = model.config, sum(query_lens), len(query_lens)
    rows, reqs = used if num_tokens is None else num_tokens, real if num_reqs is None else num_reqs
    totals = [context + new for context, new in zip(context_lens, query_lens, strict=False)]
    columns = max_blocks or math.ceil(max(totals, default=1) / config.block_size)
    room = (
        columns * config.block_size >= max(totals, default=1)
        and columns * real <= config.num_blocks
    )
    if len(context_lens) != real or rows < used or reqs < real or not room:
        raise InputError(
            f"{len(context_lens)} context lengths and {real} query lengths do not fit {rows} "
            f"rows, {reqs} requests "
            f"and {config.num_blocks} blocks at {columns} a request",
            remedy="Give as many context_lens as query_lens, and room for all of them.",
        )
    generator, size = torch.Generator().manual_seed(seed), config.block_size
    more_rows, more_reqs = rows - used, reqs - real
    with torch.device("cpu"):
        # Page i of request r is entry i * real + r, so that the tables of a longer step begin with
        # the shorter one's.
        blocks = (
            torch.randperm(config.num_blocks, generator=generator)[: columns * real]
            .view(columns, real)
            .T.contiguous()
        )
        input_ids = torch.randint(config.vocab_size, (used,), generator=generator)
        places = [
            torch.arange(context, total)
            for context, total in zip(context_lens, totals, strict=True)
        ]
        slots = [
            row[place // size] * size + place % size
            for place, row in zip(places, blocks, strict=True)
        ]
        none = torch.empty(0, dtype=torch.int64)  # a batch may have no request
        ends = torch.tensor([0, *itertools.accumulate(query_lens)])
        metadata = {
            "slot_mapping": pad(torch.cat([none, *slots]), (0, more_rows), value=-1),
            "block_tables": pad(blocks, (0, 0, 0, more_reqs)).int(),
            "seq_lens": pad(torch.tensor(totals), (0, more_reqs)).int(),
            "query_start_loc": pad(ends, (0, more_reqs), value=used).int(),
        }
        if config.max_loras:
            metadata["lora_ids"] = torch.full((rows,), -1)
    device = model.norm.weight.device
    moved = {name: tensor.to(device) for name, tensor in metadata.items()}
    ids, positions = (
        pad(t, (0, more_rows)).to(device) for t in (input_ids, torch.cat([none, *places]))
    )
    return ExampleBatch(ids, positions, moved)
