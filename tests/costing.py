"""Models and configurations whose graphs are priced."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cgplan.config import Config, validate_config
from cgplan.modes import BatchDescriptor, CUDAGraphMode

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
WIDE = 128 * 1024  # elements of a row; in float32 half a MiB


def config_of(sizes: list[int], shape: Any = ("num_tokens", WIDE), **compilation: Any) -> Config:
    inputs = {"x": {"shape": list(shape), "dtype": "float32", "pad": 0}}
    return validate_config(
        {
            "inputs": inputs,
            "compilation": {"cudagraph_capture_sizes": sizes, **compilation},
            "scheduler": {"max_num_seqs": 64},
        }
    )


def key(num_tokens: int, mode: CUDAGraphMode = FULL) -> Any:
    return mode, BatchDescriptor(num_tokens, num_tokens)


class Chain(nn.Module):
    """Each layer makes a tensor of half a MiB a row; two live at a time."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.layers):
            x = x + 1
        return x


METADATA = {
    "slot_mapping": {"shape": ["num_tokens"], "dtype": "int64", "pad": -1},
    "block_tables": {"shape": ["num_reqs", 4], "dtype": "int32", "pad": 0},
    "seq_lens": {"shape": ["num_reqs"], "dtype": "int32", "pad": 0},
    "query_start_loc": {"shape": ["num_reqs + 1"], "dtype": "int32", "pad": "last"},
}


def decoder_config(mode: str, sizes: list[int], **sections: Any) -> Config:
    tokens = {"shape": ["num_tokens"], "dtype": "int64", "pad": 0}
    return validate_config(
        {
            "inputs": {"input_ids": tokens, "positions": tokens},
            "metadata": METADATA,
            "compilation": {"cudagraph_mode": mode, "cudagraph_capture_sizes": sizes},
            "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 64},
            **sections,
        }
    )
