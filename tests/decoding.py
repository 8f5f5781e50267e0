"""Small decoders, their batches, and plain greedy decoding, which tests compare with."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from decoder import Decoder, build
from torch import Tensor

from cgplan.backends import GraphBackend
from cgplan.backends.context import forward_context
from cgplan.config import Config, Input, validate_config

VOCAB, BLOCK, MAX_BLOCKS, NUM_BLOCKS = 97, 4, 8, 48
CAPACITY = BLOCK * MAX_BLOCKS
# Double precision: passes over one token and over several choose the same token, unless two are as good as equal.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "head_dim": 16, "block_size": BLOCK, "num_blocks": NUM_BLOCKS,
    "num_layers": 4, "tie_word_embeddings": False, "dtype": "float64",
}  # fmt: skip


def decoder(backend: GraphBackend, **changes: Any) -> Decoder:
    """A decoder whose greedy tokens vary."""
    with torch.device(backend.device):
        model = build(**{**SHAPE, **changes})
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(12)
    return model


def configure(backend: GraphBackend, *, max_loras: int = 0, **sections: Any) -> Config:
    """A configuration for the decoder; ``sections`` replace whole sections."""
    rows, reqs = "num_tokens", "num_reqs"
    metadata = {
        "slot_mapping": Input(shape=(rows,), dtype="int64", pad=-1),
        "block_tables": Input(shape=(reqs, MAX_BLOCKS), dtype="int32", pad=0),
        "seq_lens": Input(shape=(reqs,), dtype="int32", pad=0),
        "query_start_loc": Input(shape=("num_reqs + 1",), dtype="int32", pad="last"),
    }
    if max_loras:
        sections = {"lora": {"max_loras": max_loras}, **sections}
        metadata["lora_ids"] = Input(shape=(rows,), dtype="int64", pad=-1)
    return validate_config(
        {
            "inputs": {
                name: Input(shape=(rows,), dtype="int64", pad=0)
                for name in ("input_ids", "positions")
            },
            "metadata": metadata,
            "compilation": {"cudagraph_mode": "FULL_DECODE_ONLY"},
            "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
            "device": backend.device.type,
            **sections,
        }
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """A block in which torch uses one thread: with matrices as small as these, several only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Chunk(NamedTuple):
    """New tokens of one request: how many are in the cache before them, and its blocks."""

    tokens: Sequence[int]
    context: int
    blocks: Sequence[int]


def batch_of(chunks: Sequence[Chunk], device: torch.device) -> dict[str, Tensor]:
    """Inputs and metadata of a batch, by name."""
    ids, positions, slots, ends = [], [], [], [0]
    for tokens, context, blocks in chunks:
        places = range(context, context + len(tokens))
        ids += tokens
        positions += places
        slots += [blocks[place // BLOCK] * BLOCK + place % BLOCK for place in places]
        ends.append(len(ids))
    tables = [[*chunk.blocks, *[0] * (MAX_BLOCKS - len(chunk.blocks))] for chunk in chunks]
    lengths = [chunk.context + len(chunk.tokens) for chunk in chunks]
    made: dict[str, Tensor] = {
        "input_ids": torch.tensor(ids),
        "positions": torch.tensor(positions),
        "slot_mapping": torch.tensor(slots),
        "block_tables": torch.tensor(tables, dtype=torch.int32),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "query_start_loc": torch.tensor(ends, dtype=torch.int32),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def logits_of(model: Decoder, chunks: Sequence[Chunk]) -> Tensor:
    """Logits of the model's own code on a batch, its caches written."""
    batch = batch_of(chunks, model.norm.weight.device)
    arguments = {name: batch.pop(name) for name in ("input_ids", "positions")}
    with torch.no_grad(), forward_context(metadata=batch):
        return model(**arguments)


def greedy(model: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """``count`` tokens after a prompt, one at a time, the request alone, in the cache's blocks 0, 1, 2, ..."""
    blocks, found, fresh, context = range(MAX_BLOCKS), [], list(prompt), 0
    for _ in range(count):
        logits = logits_of(model, [Chunk(fresh, context, blocks)])
        context += len(fresh)
        fresh = [int(logits[-1].argmax())]
        found += fresh
    return found


def prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    """Random prompts of these lengths."""
    choose = random.Random(seed)
    return [[choose.randrange(VOCAB) for _ in range(length)] for length in lengths]
