"""The text of a starting configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Any, NamedTuple

import yaml


class InputGuess(NamedTuple):
    name: str
    required: bool
    shape: tuple[int | str, ...]
    dtype: str
    reason: str
    pad: int = 0
    example: tuple[int, int] | None = None


def starting_yaml(target: str, kwargs: Mapping[str, Any], inputs: Sequence[InputGuess]) -> str:
    model: dict[str, Any] = {"target": target}
    hint = "  # kwargs: {hidden_size: 64}       # keyword arguments of the target\n"
    if kwargs:
        model["kwargs"] = dict(kwargs)
        hint = ""
    text = yaml.safe_dump({"model": model}, sort_keys=False, width=100, allow_unicode=True)
    head = "inputs:\n"
    if not any(guess.required for guess in inputs):
        head = "inputs: {}\n  # {} because the forward has no argument without a default\n"
    return f"{_HEAD}\n{text}{hint}{_MODEL_HINT}\n{head}{''.join(map(_input, inputs))}\n{_REST}"


def inline_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def _input(guess: InputGuess) -> str:
    lines = [
        (
            f"{inline_yaml(guess.name)}:",
            "" if guess.required else "has a default; uncomment it to make it an input",
        ),
        (f"  shape: [{', '.join(map(str, guess.shape))}]", f"guess: {guess.reason}"),
        (f"  dtype: {guess.dtype}", "guess, as above"),
        (f"  pad: {guess.pad}", "a choice: what padding rows hold"),
    ]
    if guess.example is not None:
        lines.append(
            (
                f"  example: {list(guess.example)}",
                "random values for warm-up and bench: from, below",
            )
        )
    text = ""
    for line, comment in lines:
        text += f"{line:<33} # {comment}\n" if comment else f"{line}\n"
    return indent(text, "  " if guess.required else "  # ")


_HEAD = """\
# Written by `cgplan init`. Correct what it guessed, then look at the plan:
#   cgplan inspect FILE
# All keys: `cgplan schema --format markdown`.
"""

_MODEL_HINT = """\
  # output_rows: num_reqs           # one row for each request, not for each token

device: auto                        # a GPU if there is one, else the CPU stand-in
"""

_REST = """\
# metadata:                         # tensors that the model reads from cgplan.get_forward_context()
#   seq_lens:
#     shape: [num_reqs]
#     dtype: int32
#     pad: 1

compilation:
  cudagraph_mode: FULL              # NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE
  cudagraph_capture_sizes: [1, 2, 4, 8, 16, 32]  # or the name of a ladder, such as vllm
  outputs: borrow                   # views, valid until the next call; clone: copies
  on_miss: eager                    # batches without a graph; error: they are refused

scheduler:
  max_num_seqs: 256                 # most requests of a batch, where inputs count num_reqs
  max_num_batched_tokens: 8192      # tokens in one batch at most
"""
