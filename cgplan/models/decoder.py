"""The reference decoder: a Llama or Qwen3 in plain PyTorch over a paged KV cache, made to be captured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad

from cgplan.backends.context import current_all_reduce
from cgplan.errors import InputError, ModelError, did_you_mean
from cgplan.models.layers import (
    DecoderConfig,
    DecoderLayer,
    Projection,
    RMSNorm,
    Split,
    Table,
    rotary_angles,
)
from cgplan.models.loading import parse_dtype


class Decoder(nn.Module):
    """Token embedding, decoder layers, final norm, output projection; random weights, no autograd.

    The state dict has the names of transformers' ``Qwen3ForCausalLM`` (or, without ``qk_norm``,
    ``LlamaForCausalLM``) less the prefix ``model.``, so weights of a checkpoint can be loaded.

    With ``tensor_parallel`` it has its rank's part of each layer, cut from the weights that one process would draw. It
    is built inside ``all_reduce_by`` then, with as many ranks; else it raises ModelError.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        dtype, split, parts, reducer = parse_dtype(config.dtype), Split(), config.tensor_parallel, current_all_reduce()
        if parts > 1:
            if reducer is None or reducer.world_size != parts:
                found = 1 if reducer is None else reducer.world_size
                raise ModelError(
                    f"the decoder is split over {parts} ranks (tensor_parallel), and {found} run",
                    remedy=f"Start it with torchrun --nproc-per-node {parts}, or set tensor_parallel to {found}.",
                )
            split = Split(parts, reducer.rank, reducer.number)
        self.embed_tokens = Table(config.vocab_size, config.hidden_size, dtype)
        self.layers = nn.ModuleList(DecoderLayer(config, dtype, split) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        tied = config.tie_word_embeddings
        self.lm_head = self.embed_tokens if tied else Table(config.vocab_size, config.hidden_size, dtype)
        self._randomise(config.seed)

    def _randomise(self, seed: int) -> None:
        """Fill weights and adapters on their device: 0.6 billion numbers take a GPU milliseconds."""
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
                parameter.copy_(whole.chunk(module.split.parts, module.split_dim)[module.split.rank])
        for projection in self._projections().values() if self.config.max_loras else ():
            rank, size_in = projection.lora_a.shape[1:]
            projection.lora_a.normal_(0.0, size_in**-0.5, generator=generator)
            projection.lora_b.normal_(0.0, rank**-0.5, generator=generator)

    def _projections(self) -> dict[str, Projection]:
        return {name: module for name, module in self.named_modules() if isinstance(module, Projection)}

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Run one batch of flat tokens; the forward context's metadata says which request each belongs to.

        Args:
            input_ids: [num_tokens] int64.
            positions: [num_tokens] int64, the place of each token in its request, from 0.

        Returns:
            Logits [num_tokens, vocab_size], or hidden states [num_tokens, hidden_size] where the config
            says ``logits: false``; in the model's dtype. The caller owns them.

        Raises:
            InputError: The forward context's metadata does not fit (see ``cgplan.models.attention``).
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
        """Copy an adapter into a slot, in place: graphs that were captured before serve it from the next replay on.

        Args:
            slot: From 0 to max_loras - 1.
            state: ``<projection>.lora_A`` [rank, in] and ``<projection>.lora_B`` [out, rank], the scale
                alpha / rank multiplied into B; ``<projection>`` is such as ``layers.0.self_attn.q_proj``.
                Projections that are not named get no adapter.

        Raises:
            ModelError: no such slot or projection, a matrix is missing or has another shape, or holds values that are
                not floating-point or not finite in the model's dtype. The slot is as it was.
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
                    remedy=f"{did_you_mean(projection, projections)}Name <projection>.lora_A and .lora_B.",
                )
            adapters[projection][part] = tensor
        for name, adapter in adapters.items():
            if not adapter:
                continue
            weight, most = projections[name].weight, self.config.lora_rank
            size_out, size_in = weight.shape
            shapes = {part: tuple(tensor.shape) for part, tensor in adapter.items()}
            rank = (*shapes.get("lora_A", ()), 0)[0]
            if not 0 < rank <= most or shapes != {"lora_A": (rank, size_in), "lora_B": (size_out, rank)}:
                raise ModelError(
                    f"the adapter of {name} has shapes {shapes}",
                    remedy=f"It needs lora_A (rank, {size_in}) and lora_B ({size_out}, rank), rank at most {most}.",
                )
            # Rows of other adapters are multiplied with it, too, by 0: that must give 0.
            if not all(t.is_floating_point() and t.to(weight.dtype).isfinite().all() for t in adapter.values()):
                raise ModelError(
                    f"the adapter of {name} has values that are not finite in {weight.dtype}",
                    remedy="Look whether the checkpoint is damaged or quantized, or build the decoder in a dtype of a "
                    "wider range.",
                )
        for name, module in projections.items():
            module.load(slot, adapters[name])

    def remove_lora(self, slot: int) -> None:
        """Zero a slot, in place: from the next replay on its rows are the base model's. Raises ModelError for a slot
        that does not exist.
        """
        self.load_lora(slot, {})


def build(**kwargs: Any) -> Decoder:
    """The decoder on the current default device; ``kwargs`` and errors are those of `DecoderConfig.parse`."""
    return Decoder(DecoderConfig.parse(kwargs))


def first_layers(model: Decoder, num_layers: int) -> Decoder:
    """The first layers of a decoder as a second decoder: a draft for speculative decoding without training.

    It shares the model's weights, and has separate caches and no LoRA adapters. Raises ModelError unless
    ``num_layers`` is from 1 to as many as the model has.
    """
    most = model.config.num_layers
    if not 1 <= num_layers <= most:
        raise ModelError(f"no first {num_layers} layers: the decoder has {most}", remedy=f"Choose from 1 to {most}.")
    with torch.device(model.norm.weight.device):
        draft = build(**{**model.config.model_dump(), "num_layers": num_layers, "max_loras": 0})
    weights = model.state_dict()
    draft.to(model.norm.weight.dtype).load_state_dict({name: weights[name] for name in draft.state_dict()}, assign=True)
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

    Block tables are a random permutation that depends only on the seed and the number of requests, so a
    prompt and the decode steps after it, made with the same seed, find the same cache.

    Args:
        model: Gives block size, blocks, vocabulary, device.
        context_lens, query_lens: Of each request the tokens that are in the cache already, and the new ones.
        num_tokens: Pad to this many tokens (id 0, position 0, slot -1); absent: no padding.
        num_reqs: Pad to this many requests (length 0); absent: no padding.
        max_blocks: Columns of the block tables; absent: as many as the longest request needs.
        seed: Of tokens and block tables.

    Returns:
        input_ids and positions [num_tokens] int64; metadata as ``cgplan::attention`` reads it, and with LoRA
        ``lora_ids`` [num_tokens] int64, all -1.

    Raises:
        InputError: the two lists differ in length, or padding or cache are too small.
    """
    config, used, real = model.config, sum(query_lens), len(query_lens)
    rows, reqs = used if num_tokens is None else num_tokens, real if num_reqs is None else num_reqs
    totals = [context + new for context, new in zip(context_lens, query_lens, strict=False)]
    columns = max_blocks or math.ceil(max(totals, default=1) / config.block_size)
    room = columns * config.block_size >= max(totals, default=1) and columns * real <= config.num_blocks
    if len(context_lens) != real or rows < used or reqs < real or not room:
        raise InputError(
            f"{len(context_lens)} context lengths and {real} query lengths do not fit {rows} rows, {reqs} requests "
            f"and {config.num_blocks} blocks at {columns} a request",
            remedy="Give as many context_lens as query_lens, and room for all of them.",
        )
    generator, size = torch.Generator().manual_seed(seed), config.block_size
    more_rows, more_reqs = rows - used, reqs - real
    with torch.device("cpu"):
        # Page i of request r is entry i * real + r, so that the tables of a longer step begin with the shorter one's.
        blocks = (
            torch.randperm(config.num_blocks, generator=generator)[: columns * real].view(columns, real).T.contiguous()
        )
        input_ids = torch.randint(config.vocab_size, (used,), generator=generator)
        places = [torch.arange(context, total) for context, total in zip(context_lens, totals, strict=True)]
        slots = [row[place // size] * size + place % size for place, row in zip(places, blocks, strict=True)]
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
    ids, positions = (pad(t, (0, more_rows)).to(device) for t in (input_ids, torch.cat([none, *places])))
    return ExampleBatch(ids, positions, moved)
