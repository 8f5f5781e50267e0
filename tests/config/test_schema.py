"""The sections of a configuration: defaults, shapes, paddings. Amounts with units. Messages of refused values: the line, the key, the allowed values, the nearest name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cgplan.config import Config, Dim, Extent, Input, load_config, validate_config
from cgplan.errors import ConfigError
from cgplan.modes import CUDAGraphMode


def test_a_whole_file(write: Any) -> None:
    config = load_config(
        write(
            """
model:
  target: my_model.py:build
  kwargs: {layers: 2}
  output_rows: num_reqs
device: cuda:1
inputs:
  x: {shape: [num_tokens, 3], dtype: torch.float16, pad: 0, example: normal}
metadata:
  starts: {shape: [num_reqs + 1], dtype: int32, pad: last, example: spread}
  flags: {shape: num_tokens, dtype: bool, pad: false}
compilation:
  cudagraph_mode: full_and_piecewise
  cudagraph_capture_sizes: [1, 2]
  attention_support: uniform_batch
scheduler: {max_num_seqs: 4}
lora: {max_loras: 2}
speculative: {num_speculative_tokens: 1}
traffic: {request_rate: 5, prompt_median: 9, prompt_p95: 99, output_median: 8, output_p95: 88}
budget: {reserve: 0}
"""
        )
    )
    assert config.model is not None
    assert config.model.kwargs == {"layers": 2}
    assert config.inputs["x"].dtype == "float16"
    assert config.metadata["starts"].row_dim == 0
    assert config.metadata["flags"].pad is False
    assert config.compilation.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE
    assert config.compilation.cudagraph_capture_sizes == (1, 2)
    assert config.query_len == 2
    assert config.traffic is not None
    assert (config.traffic.num_requests, config.budget.reserve) == (10_000, 0)
    assert config == Config.model_validate(config.model_dump(mode="json")), (
        "its own dump reads back equal"
    )


@pytest.mark.parametrize(
    ("text", "dim"),
    [
        (7, Extent(None, 0, 7)),
        (" num_reqs ", Extent("num_reqs", 1, 0)),
        ("num_reqs+1", Extent("num_reqs", 1, 1)),
        ("2 * num_tokens", Extent("num_tokens", 2, 0)),
    ],
)
def test_dimensions(text: int | str, dim: Extent) -> None:
    assert Extent.parse(text) == dim


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2tokens",
        "num_tokens - 1",
        "num_tokens * 2",
        "0 * num_tokens",
        "num_tokens + num_reqs",
        -1,
    ],
)
def test_dimensions_that_cannot_be_read(text: int | str) -> None:
    with pytest.raises(ValueError, match=r"dimension|factor"):
        Extent.parse(text)


@pytest.mark.parametrize("shape", [("num_tokens", 0), (0, 4), ("num_tokens", "up to 0")])
def test_inputs_without_elements_are_refused(shape: tuple[int | str, ...]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Input(shape=shape, dtype="float32", pad=0)


@given(
    factor=st.integers(1, 9),
    offset=st.integers(0, 9),
    symbol=st.sampled_from(["num_tokens", "num_reqs"]),
    tokens=st.integers(0, 999),
    reqs=st.integers(0, 999),
)
def test_dimension_size_and_count_are_inverse(
    factor: int, offset: int, symbol: str, tokens: int, reqs: int
) -> None:
    dim = Extent.parse(f"{factor} * {symbol} + {offset}")
    count = tokens if symbol == "num_tokens" else reqs
    size = dim.size(tokens, reqs)
    assert size == factor * count + offset
    assert dim.count(size) == count
    for other in range(max(size - factor, 0), size):
        assert dim.count(other) != count
    assert dim.count(offset - 1) is None
    if factor > 1:
        assert dim.count(size + 1) is None


def test_shapes_say_which_dimension_counts_rows() -> None:
    assert Input(shape=(3, "num_tokens"), dtype="int64", pad=0).row_dim == 1
    assert Input(shape=(3, 4), dtype="int64", pad=0).row_dim is None
    assert Input(shape=(), dtype="int64", pad=0).extents == ()
    assert Input.model_validate({"shape": "num_reqs", "dtype": "int64", "pad": 0}).shape == (
        "num_reqs",
    )


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"shape": ["num_tokens", "num_reqs"]}, "only one dimension may count rows"),
        ({"shape": [2], "pad": "last"}, "pad: last needs a dimension that counts rows"),
        ({"pad": 1.5}, "pad 1.5 is not a value of dtype int64"),
        ({"pad": float("nan")}, "pad nan is not a value of dtype int64"),
        ({"pad": "zero"}, "found 'zero', expected a number, true, false, or `last`"),
        ({"pad": 300, "dtype": "int8"}, "pad 300 is not a value of dtype int8"),
        ({"pad": -1, "dtype": "uint8"}, "pad -1 is not a value of dtype uint8"),
        ({"pad": 2**63, "dtype": "int64"}, "is not a value of dtype int64"),
        ({"pad": -1e9, "dtype": "float16"}, "is not a value of dtype float16"),
        ({"dtype": "int65"}, "found 'int65'"),
        ({"example": [3, 3]}, "low must be below high"),
        ({"example": "gauss"}, "found 'gauss'"),
    ],
)
def test_declarations_that_cannot_be(spec: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config(
            {"inputs": {"x": {"shape": ["num_tokens"], "dtype": "int64", "pad": 0, **spec}}}
        )
    assert expected in caught.value.message
    assert "inputs.x" in caught.value.message


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        ("int8", -128), ("uint8", 255), ("int64", -1), ("int64", 2.0), ("bool", True), ("float16", -65504.0),
        ("float32", float("nan")), ("float16", float("-inf")), ("bfloat16", -1e30), ("float8_e4m3fn", 0),
    ],
)  # fmt: skip
def test_paddings_that_fit(dtype: str, pad: float) -> None:
    assert validate_config(
        {"inputs": {"x": {"shape": ["num_tokens"], "dtype": dtype, "pad": pad}}}
    ).inputs["x"]


def test_inputs_in_short() -> None:
    given = {
        "x": ["num_tokens", "int32", -1],
        "y": (("num_tokens", 8), "torch.float32", 0.5),
        "z": ["num_reqs + 1", "int64", "last"],
    }
    found = validate_config({"inputs": given, "metadata": {"m": [[3], "bool", False]}})
    assert found.inputs == {
        "x": Input(shape=("num_tokens",), dtype="int32", pad=-1),
        "y": Input(shape=("num_tokens", 8), dtype="float32", pad=0.5),
        "z": Input(shape=("num_reqs + 1",), dtype="int64", pad="last"),
    }
    assert found.metadata["m"].shape == (3,)
    assert validate_config(found.model_dump(mode="json")) == found


@pytest.mark.parametrize(
    ("short", "expected"),
    [
        (["num_tokens", "int32"], 'dtype and pad, as in [["num_tokens", 8], "float32", 0]'),
        (["num_tokens", 8, "float32", 0], "expected shape with rows first, dtype and pad"),
        ((3, 32, 32), "found (3, 32, 32), expected shape with rows first, dtype and pad"),
        (["num_tokens", 8, 8], "expected shape with rows first, dtype and pad"),
        (["num_tokens", "int33", 0], "found 'int33'"),
        (["num_tokens", "int32", 0.5], "pad 0.5 is not a value of dtype int32"),
        (["num_token", "int32", 0], "did you mean 'num_tokens'?"),
    ],
)
def test_inputs_in_short_that_cannot_be(short: Any, expected: str) -> None:
    for section in ("inputs", "metadata"):
        with pytest.raises(ConfigError) as caught:
            validate_config({section: {"x": short}})
        assert expected in caught.value.message
        assert "x" in caught.value.message


def test_inputs_like_a_tensor() -> None:
    tensor = torch.zeros(3, 5, dtype=torch.int32)
    assert Input.like(tensor, pad=-1) == Input(shape=("num_tokens", 5), dtype="int32", pad=-1)
    assert Input.like(tensor, -1, pad=0, symbol="2 * num_reqs").shape == (3, "2 * num_reqs")
    with pytest.raises(ConfigError, match="no dimension 2 that could count num_tokens"):
        Input.like(tensor, rows=2, pad=0)
    with pytest.raises(ConfigError, match=r"no dimension 0"):
        Input.like(torch.tensor(1.0), pad=0)
    with pytest.raises(ConfigError, match=r"pad 0\.5 is not a value of dtype int32"):
        Input.like(tensor, pad=0.5)


PICTURES = {"x": {"shape": ["num_tokens", 3, "side", "side"], "dtype": "float32", "pad": 0}}
TEXT = {
    "model": {"output_shapes": [["batch", "length", 8], "batch"]},
    "dims": {"batch": {"max": 64, "sizes": [1, 4, 16]}, "length": {"max": 500, "multiple_of": 64}},
    "inputs": {
        "ids": {"shape": ["batch", "length"], "dtype": "int64", "pad": 0},
        "mask": {"shape": ["batch", 1, "length", "2 * length + 1"], "dtype": "bool", "pad": False},
    },
}


def test_named_dimensions() -> None:
    config = validate_config(TEXT)
    assert config.dim_names == ("batch", "length")
    assert config.dims["length"].top == 512
    shapes = [spec.shape for spec in config.tensors_at((128,)).values()]
    assert shapes == [("num_tokens", 128), ("num_tokens", 1, 128, 257)]
    mixed = validate_config(
        {**TEXT, "inputs": {"x": {"shape": ["num_tokens", "length"], "dtype": "int64", "pad": 0}}}
    )
    assert mixed.dim_names == ("num_tokens", "batch", "length")
    assert Dim("batch", max=3).name == "batch"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"dims": {"side": {"max": 96}}, "inputs": PICTURES, "model": None},
            "num_tokens and side vary: write model.output_shapes",
        ),
        (
            {"dims": {"batch": {"max": 64}}},
            "input 'ids' has a dimension 'length', which `dims` does not declare",
        ),
        (
            {"dims": {**TEXT["dims"], "lenght": {"max": 2}}, "model": None},
            "in Python cgplan.capture(..., output_shapes=[['batch', 10]])",
        ),
        ({"dims": {"batch": {"max": 2, "min": 3}}}, "min is 3, which is above max = 2"),
        (
            {"dims": {"batch": {"max": 64, "sizes": [3], "multiple_of": 2}}},
            "size 3 cannot be captured; 1 to 64",
        ),
        (
            {"dims": {"batch": {"max": 64, "min": 6, "sizes": [4]}}},
            "size 4 cannot be captured; 6 to 64",
        ),
        ({"dims": {"9 x!": {"max": 64}}}, "String should match pattern"),
        ({"compilation": {"boxes": [[4, 100_000]]}}, "100000 is above the max of length, 512"),
        ({"compilation": {"max_cudagraph_capture_size": 16}}, "write dims.batch.max"),
        ({"dims": {"num_reqs": {"max": 64}}}, "'num_reqs' cannot name a dimension"),
        (
            {"inputs": {"x": {"shape": ["batch", "batch"], "dtype": "int64", "pad": 0}}},
            "has 'batch' twice",
        ),
        (
            {"compilation": {"boxes": [[1, 2, 3]]}},
            "compilation.boxes has sizes of batch, length each",
        ),
        ({"dims": {"batch": {1: 2}}}, "dims.batch has keys that are not text: 1"),
    ],
)
def test_named_dimensions_that_cannot_be(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        validate_config({**TEXT, **change})


@pytest.mark.parametrize(
    ("dims", "problem"),
    [
        ({}, "'batch', which `dims` does not declare: known are num_tokens, num_reqs"),
        ({"batch": {"sizes": [1, 4, 16]}}, "'dims.batch.max' is missing"),
    ],
)
def test_a_refusal_of_dims_says_what_to_write(dims: Any, problem: str) -> None:
    inputs = {"pixels": {"shape": ["batch", 3], "dtype": "float32", "pad": 0}}
    with pytest.raises(ConfigError, match=problem) as caught:
        validate_config({"dims": dims, "inputs": inputs})
    for written in (
        'dims={"batch": {"max": 16, "sizes": [1, 4, 16]}}',
        "dims: {batch: {max: 16, sizes: [1, 4, 16]}}",
    ):
        assert written in caught.value.remedy
    validate_config({"dims": {"batch": {"max": 16, "sizes": [1, 4, 16]}}, "inputs": inputs})


def test_pictures_whose_side_comes_first_have_the_rows_to_declare() -> None:
    side = {"max": 96, "sizes": [64, 96]}
    pictures = {
        "dims": {"side": side},
        "inputs": {"x": [["num_reqs", 3, "side", "side"], "float32", 0]},
        "model": {"output_shapes": [["num_reqs", 10]]},
    }
    validate_config(pictures)
    pictures["dims"] = {"side": side, "batch": {"max": 4}}
    pictures["inputs"] = {"x": [["batch", 3, "side", "side"], "float32", 0]}
    with pytest.raises(ConfigError, match="declare another before it, such as batch"):
        validate_config(pictures)
    pictures["dims"] = {"batch": {"max": 4}, "side": side}
    validate_config({**pictures, "model": {"output_shapes": [["batch", 10]]}})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 << 20), ("1.5 KiB", 1536), ("2GB", 2 * 10**9), ("7kB", 7000), ("10 B", 10), ("10", 10),
        ("' 2gib '", 2 << 30), ("0.1GiB", 107374182), ("1.5kB", 1500), ("12.0", 12),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("section", "key"), [("budget", "memory"), ("compilation", "state_copy")])
def test_bytes_have_units(write: Any, text: str, size: int, section: str, key: str) -> None:
    config = load_config(write(f"{section}: {{{key}: {text}}}\n"))
    assert getattr(getattr(config, section), key) == size
    assert validate_config(config.model_dump(mode="json")) == config, (
        "its own dump reads back equal"
    )


@pytest.mark.parametrize("text", ["1.5", "'1.5'", "2.25"])
def test_a_part_of_a_byte_asks_for_a_unit(write: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=r"was a unit meant\?.*2GiB"):
        load_config(write(f"budget: {{memory: {text}}}\n"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("500 ms", 0.5), ("1.5", 1.5), ("2 MIN", 120)],
)
def test_times_have_units(write: Any, text: str, seconds: float) -> None:
    config = load_config(write(f"budget: {{capture_time: {text}}}\n"))
    assert config.budget.capture_time == seconds
    assert validate_config(config.model_dump(mode="json")) == config


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
    ("inputs: 3", "line 1: inputs: found 3"),
    ("inputs: {x: }", "line 1: inputs.x: found None"),
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
    with pytest.raises(ConfigError, match="remove one of the two, or set it to null"):
        load_config(path, [override])
    config = load_config(path, [override, "compilation.max_cudagraph_capture_size=null"])
    assert config.compilation.cudagraph_capture_sizes == (1, 4)


def test_an_input_without_padding_is_told_what_to_give() -> None:
    with pytest.raises(ConfigError, match="'pad' is missing") as caught:
        Input(shape=["num_tokens", 8], dtype="float32")  # type: ignore[call-arg, arg-type]
    assert caught.value.remedy == "Give pad=0, or the value that padding rows may hold."
    with pytest.raises(ConfigError, match="pad: found 'zero'") as caught:
        Input(shape=["num_tokens", 8], dtype="float32", pad="zero")  # type: ignore[arg-type]
    assert caught.value.remedy == "Give pad=0, or the value that padding rows may hold."
