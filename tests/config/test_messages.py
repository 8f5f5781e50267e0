"""Messages of refused values: the line, the key, the allowed values, the nearest name."""

from __future__ import annotations

from typing import Any

import pytest

from cgplan.config import Config, Dim, Input, load_config, validate_config
from cgplan.errors import ConfigError

ONE = "{shape: num_tokens, dtype: int64, pad: 0}"
RATE = "request_rate: 5"
LENGTHS = "prompt_median: 9, prompt_p95: 99, output_median: 8, output_p95: 88"
BYTES = "expected a number of bytes, or one with a unit (B, kB, MB, GB, KiB, MiB, GiB), such as 2GiB or 512MiB"
SECONDS = "expected a number of seconds, or one with a unit (ms, s, min), such as 30s or 2min"
REFUSED = [
    (
        "compilation:\n  cudagraph_mod: FULL",
        "line 2: unknown key 'compilation.cudagraph_mod' (did you mean 'cuda",
    ),
    ("\n\nshceduler: {}", "line 3: unknown key 'shceduler' (did you mean 'scheduler'?)"),
    (
        "cudagraph_mode: FULL",
        "line 1: unknown key 'cudagraph_mode' (it belongs under 'compilation')",
    ),
    (
        "compilation: {sizes: [4]}",
        "unknown key 'compilation.sizes' (did you mean 'cudagraph_capture_sizes'?)",
    ),
    ("report:\n  zzz: 1", "(allowed here: sizes, repeats, warmups, nvtx)"),
    (
        "inputs:\n  x:\n    dtype: int8\n    shape: [1]\n    pads: 0",
        "line 5: unknown key 'inputs.x.pads' (did you",
    ),
    ("inputs:\n  x: {shape: [2], dtype: int8}", "line 2: 'inputs.x.pad' is missing"),
    ("lora:\n  rank: 4", "line 1: 'lora.max_loras' is missing"),
    (
        "scheduler:\n  max_num_seqs: many",
        "line 2: scheduler.max_num_seqs: found 'many', expected a valid integer",
    ),
    (
        "scheduler:\n  max_num_seqs: 0",
        "line 2: scheduler.max_num_seqs: found 0, expected greater than or equal",
    ),
    ("scheduler: 3", "line 1: scheduler: found 3"),
    ("inputs:", "line 1: inputs: found None"),
    ("compilation: {cudagraph_copy_inputs: 1}", "found 1, expected a valid boolean"),
    ("compilation: {splitting_modules: a.*}", "splitting_modules: found 'a.*', expected a list"),
    ("compilation: {outputs: borow}", "found 'borow', expected 'borrow' or 'clone'"),
    ("compilation: {cudagraph_mode: FULL_DECODE}", "Did you mean 'FULL_DECODE_ONLY'?"),
    ("compilation: {attention_support: 3}", "unknown attention_support 3"),
    (
        "compilation:\n  cudagraph_mode:",
        "line 2: compilation.cudagraph_mode: cudagraph_mode has no value",
    ),
    (
        "compilation: {hide_capture_from: [torch]}",
        "line 1: compilation.hide_capture_from.0: found 'torch', expected a top-level package other than torch",
    ),
    ("compilation: {hide_capture_from: [a.b]}", "found 'a.b', expected a top-level package"),
    ("compilation: {state_copy: lots}", f"line 1: compilation.state_copy: found 'lots', {BYTES}"),
    ("device: gpu", "line 1: device: found 'gpu'"),
    (
        "model: {target: a:b, output_rows: rows}",
        "found 'rows', expected 'num_tokens' or 'num_reqs'",
    ),
    (f"inputs: {{x: {ONE}}}\nmetadata: {{x: {ONE}}}", "'x' is both an input and metadata"),
    (f"inputs: {{uniform_decode: {ONE}}}", "'uniform_decode' is a word of the runner's call"),
    (
        "compilation: {cudagraph_capture_sizes: []}",
        "cudagraph_capture_sizes: the list of capture sizes is empty",
    ),
    (
        "compilation: {cudagraph_capture_sizes: [1, 0]}",
        "capture_sizes.1: found 0, expected greater than or equal to 1",
    ),
    (
        "compilation: {cudagraph_capture_sizes: [1, 2.5]}",
        "capture_sizes.1: found 2.5, expected a valid integer",
    ),
    (
        "compilation: {cudagraph_capture_sizes: sglan}",
        "unknown ladder 'sglan'; choose one of vllm, sglang, trtllm,",
    ),
    ("compilation: {cudagraph_capture_sizes: 8}", "compilation.cudagraph_capture_sizes: found 8"),
    ("budget: {memory: 2 gigs}", f"line 1: budget.memory: found '2 gigs', {BYTES}"),
    ("budget: {memory: -5}", f"found -5, which is not between 0 and 1.1259e+15 bytes; {BYTES}"),
    ("budget: {memory: 9999999GiB}", "found '9999999GiB', which is not between 0 and"),
    (
        "budget: {memory: 0}",
        "budget.memory: found 0, which pays for no graph; leave it out for no bound",
    ),
    ("budget: {capture_time: 2m}", f"found '2m', {SECONDS}"),
    ("budget: {capture_time: .inf}", "found inf, which is not between 0 and 1e+06 seconds"),
    ("traffic: {}", "'traffic.request_rate' is missing"),
    (
        f"traffic: {{{RATE}, {LENGTHS}, num_requests: 9999999}}",
        "found 9999999, expected less than or equal to 1048576",
    ),
    (
        f"traffic: {{{RATE}, {LENGTHS}, lora_share: 0.5}}",
        "lora_share is 0.5, but there is no `lora` section; add",
    ),
    (
        f"traffic: {{{RATE}, {LENGTHS}}}".replace("99", "3"),
        "prompt_p95 is 3, which is below prompt_median = 9",
    ),
    (
        f"traffic: {{{RATE}, {LENGTHS}}}".replace("88", "3"),
        "output_p95 is 3, which is below output_median = 8",
    ),
    (
        "speculative: {accepted_tokens: 1.5}",
        "speculative: accepted_tokens is 1.5, but with 0 draft tokens a request",
    ),
    ("speculative: {num_speculative_tokens: 3, accepted_tokens: .inf}", "advances by 4 at most"),
]


@pytest.mark.parametrize(("text", "expected"), REFUSED, ids=range(len(REFUSED)))
def test_messages_name_the_line_the_key_and_what_is_allowed(
    refusal: Any, text: str, expected: str
) -> None:
    message = refusal(f"{text}\n")
    assert "c.yaml" in message
    assert expected in message
    assert "pydantic" not in message


def test_all_mistakes_are_listed_at_once(refusal: Any) -> None:
    message = refusal("device: gpu\nscheduler:\n  max_num_seqs: 0\n  max_num_tokens: 3\n")
    assert message.count("\n  - ") == 3
    assert "line 1" in message
    assert "line 3" in message
    assert (
        "line 4: unknown key 'scheduler.max_num_tokens' (did you mean 'max_num_batched_tokens'?)"
        in message
    )


def test_sizes_of_dims_have_a_line(refusal: Any) -> None:
    assert "line 3: dims.batch.max: found 'many'" in refusal("dims:\n  batch:\n    max: many\n")


def test_values_without_a_name_are_refused_but_for_the_name_of_a_dim() -> None:
    assert Dim("batch", max=8) == Dim(name="batch", max=8)
    make: Any
    for make in (lambda: Dim("batch", 3), lambda: Input(("num_tokens",), "float32", 0)):
        with pytest.raises(TypeError, match="positional argument"):
            make()


def test_models_made_in_python_raise_our_errors() -> None:
    with pytest.raises(ConfigError, match="Input: cannot read the dimension 'batch - 1'"):
        Input(shape=("batch - 1", 3), dtype="float32", pad=0)
    with pytest.raises(ConfigError, match="did you mean 'cudagraph_capture_sizes'"):
        Config(compilation={"cudagraph_capture_size": [1]})
    with pytest.raises(
        ConfigError,
        match=r"unknown key 'compilation.cudagraph_mod' \(did you mean 'cudagraph_mode'",
    ):
        validate_config({"compilation": {"cudagraph_mod": "FULL"}})


@pytest.mark.parametrize(
    "override", ["compilation.cudagraph_capture_sizes=[1, 4]", "report.repeats=1"]
)
def test_one_of_two_values_that_cannot_both_stand_is_taken_back(write: Any, override: str) -> None:
    sizes = "" if override.startswith("compilation") else "  cudagraph_capture_sizes: [1, 4]\n"
    path = write(f"compilation:\n  max_cudagraph_capture_size: 256\n{sizes}")
    with pytest.raises(
        ConfigError, match="remove one of the two, or take one back with --set KEY=null"
    ):
        load_config(path, [override])
    config = load_config(path, [override, "compilation.max_cudagraph_capture_size=null"])
    assert config.compilation.cudagraph_capture_sizes == (1, 4)
