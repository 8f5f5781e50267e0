"""The target ``transformers``: any causal LM of that library, one decode step for each row."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cgplan
from cgplan.backends import GraphBackend
from cgplan.errors import InputError, ModelError
from cgplan.models.loading import load_model

pytest.importorskip("transformers")
from transformers import CONFIG_MAPPING, AutoModel, GPT2LMHeadModel

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
QWEN3 = {"model_type": "qwen3", **SHAPE}
MAMBA = {"model_type": "mamba", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1}
RWKV = {"model_type": "rwkv", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
BLOOM = {"model_type": "bloom", "vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3,
    "llama": {"model_type": "llama", **SHAPE},
    "qwen2": {"model_type": "qwen2", **SHAPE},
    "gpt2": {"model_type": "gpt2", **GPT2},
    "mistral, sliding": {"model_type": "mistral", **SHAPE, "sliding_window": 4},
    "gemma3, sliding and full": {
        "model_type": "gemma3_text",
        **SHAPE,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gptj, eager only": {"model_type": "gptj", **GPT2, "rotary_dim": 4},
    "phi3, longrope": {
        "model_type": "phi3",
        **SHAPE,
        "pad_token_id": 0,
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
        },
    },
    "opt, learned positions": {"model_type": "opt", **SHAPE, "ffn_dim": 48, "pad_token_id": 0},
    "mixtral": {"model_type": "mixtral", **SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def load(base_dir: Path | None = None, **kwargs: Any) -> Any:
    values = {"dtype": "float32", "max_cache_len": 16, "max_batch_size": 4, **kwargs}
    return load_model("transformers", values, device=CPU, base_dir=base_dir)


def step(model: Any, tokens: list[int], positions: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor(tokens), torch.tensor(positions))


def whole(model: Any, tokens: list[int]) -> Tensor:
    """Logits of the whole sequence at once, without our cache."""
    with torch.no_grad():
        return model.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def decode(model: Any, rows: list[list[int]]) -> list[list[Tensor]]:
    """Feed each row from its own start: row i begins i calls later, so all rows stand at different positions."""
    logits: list[list[Tensor]] = [[] for _ in rows]
    for call in range(max(len(row) for row in rows) + len(rows)):
        places = [
            call - late if 0 <= call - late < len(row) else -1 for late, row in enumerate(rows)
        ]
        out = step(
            model,
            [row[place] if place >= 0 else 0 for row, place in zip(rows, places, strict=True)],
            places,
        )
        assert out.isfinite().all()
        for row, place in enumerate(places):
            if place >= 0:
                logits[row].append(out[row])
    return logits


@pytest.mark.parametrize(
    ("kind", "attention"),
    [*((kind, None) for kind in KINDS), ("qwen3", "eager"), ("gemma3, sliding and full", "eager")],
)
def test_decode_equals_the_whole_sequence(kind: str, attention: str | None) -> None:
    model = load(config=KINDS[kind], attn_implementation=attention)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(61, (length,), generator=generator).tolist() for length in (9, 12, 5)]
    for row, logits in zip(rows, decode(model, rows), strict=True):
        torch.testing.assert_close(torch.stack(logits), whole(model, row), rtol=1e-4, atol=1e-5)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=8), min_size=1, max_size=4))
def test_rows_do_not_see_each_other(rows: list[list[int]]) -> None:
    model = load(config=QWEN3)
    for row, together in zip(rows, decode(model, rows), strict=True):
        alone = [step(model, [token], [place])[0] for place, token in enumerate(row)]
        torch.testing.assert_close(torch.stack(together), torch.stack(alone), rtol=1e-4, atol=1e-5)


def test_a_place_beyond_the_cache_and_more_rows_than_it_has_are_told() -> None:
    model = load(config=QWEN3)
    with pytest.raises(InputError, match="a position is 16, and max_cache_len is 16") as refused:
        step(model, [3, 3], [16, 2])
    assert refused.value.remedy.startswith("Raise model.kwargs.max_cache_len, or end the request")
    with pytest.raises(InputError, match="5 tokens, but the cache has 4 rows") as refused:
        step(model, [3] * 5, [0] * 5)
    assert "list sizes up to 4" in refused.value.remedy


def test_a_replay_of_a_place_beyond_the_cache_says_which_input_it_is() -> None:
    model = load(config=QWEN3)
    g = cgplan.graphed(model, dynamic={})
    for place in range(4):
        g(torch.tensor([3]), torch.tensor([place]))
    assert g.graph_calls
    with pytest.raises(RuntimeError, match="out of bounds") as caught:
        g(torch.tensor([3]), torch.tensor([16]))
    (note,) = caught.value.__notes__
    assert note.startswith("A graph replayed aten::scatter_")
    assert "`positions` from max_cache_len on" in note


def test_of_a_model_with_an_encoder_the_decoder_alone_is_loaded_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sides = {f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")}
    bart = {"model_type": "bart", "vocab_size": 61, "d_model": 32, "decoder_layers": 1, **sides}
    load(config={**bart, "decoder_attention_heads": 4, "encoder_layers": 1})
    assert "the model has an encoder, and this is its decoder alone" in caplog.text
    caplog.clear()
    load(config=QWEN3)
    assert not caplog.text


def test_a_cache_that_is_longer_than_the_positions_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    load(config=KINDS["gpt2"], max_cache_len=64)
    assert "max_cache_len" not in caplog.text
    load(config=KINDS["gpt2"], max_cache_len=65)
    assert "max_cache_len is 65, and max_position_embeddings of the model is 64" in caplog.text


def test_rows_outside_the_batch_and_padding_rows_are_untouched() -> None:
    model = load(config=QWEN3)
    step(model, [1, 2, 3, 4], [0, 0, 0, 0])
    layers = model.cache.layers
    addresses = [layer.keys.data_ptr() for layer in layers]
    before = [layer.keys[:, :, :16].clone() for layer in layers]
    step(model, [5, 6, 7], [1, -1, 1])
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer.keys[1, :, :16], old[1])
        assert torch.equal(layer.keys[3, :, :16], old[3])
        assert not torch.equal(layer.keys[0, :, :16], old[0])
    assert [layer.keys.data_ptr() for layer in layers] == addresses
    with pytest.raises(InputError, match="5 tokens, but the cache has 4 rows"):
        step(model, [0] * 5, [0] * 5)


def test_padding_rows_of_nan_never_change_real_rows() -> None:
    model = load(config=QWEN3)
    expected = step(model, [1, 2, 0, 0], [0, 0, -1, -1])
    with torch.no_grad():
        model.model.get_input_embeddings().weight[60] = float("nan")
    model.model.lm_head.weight = torch.nn.Parameter(
        model.model.lm_head.weight.detach().nan_to_num()
    )
    poisoned = step(model, [1, 2, 60, 60], [0, 0, -1, -1])
    assert torch.equal(poisoned[:2, :60], expected[:2, :60])
    assert step(model, [1, 2, 3, 4], [1, 1, 0, 0]).isfinite().all()  # rows 2 and 3 start anew


def test_a_row_is_taken_over_by_starting_at_zero() -> None:
    """Also one that was full to its last place."""
    model = load(config=QWEN3, max_cache_len=5)
    old, new = [7, 8, 9, 10, 11], [3, 4]
    logits = [step(model, [token], [place])[0] for place, token in enumerate(old)]
    torch.testing.assert_close(torch.stack(logits), whole(model, old), rtol=1e-4, atol=1e-5)
    logits = [step(model, [token], [place])[0] for place, token in enumerate(new)]
    torch.testing.assert_close(torch.stack(logits), whole(model, new), rtol=1e-4, atol=1e-5)


def test_published_config_file(tmp_path: Path) -> None:
    """The old top-level rope_theta and keys that do not shape the model are understood, and the path is the YAML's."""
    published = {
        "architectures": ["Qwen3ForCausalLM"],
        **QWEN3,
        "rope_theta": 12345.0,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "sliding_window": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(published), encoding="utf-8")
    model = load(tmp_path, config_file="config.json", dtype="bfloat16")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be read"):
        load(tmp_path, config_file="broken.json")
    assert model.model.config.rope_parameters["rope_theta"] == 12345.0
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert step(model, [1], [0]).dtype == torch.bfloat16


def test_seed_decides_the_weights_and_leaves_the_callers_random_state() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, two, three = (
        load(config=QWEN3, seed=1),
        load(config=QWEN3, seed=1),
        load(config=QWEN3, seed=2),
    )
    assert torch.equal(torch.rand(1), expected)
    a, b, c = (model.model.model.layers[0].mlp.up_proj.weight for model in (one, two, three))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({}, "needs either `config` or `config_file`"),
        ({"config": QWEN3, "config_file": "x.json"}, "no file x.json"),
        ({"config": {"hidden_size": 4}}, "model_type"),
        ({"config": {"model_type": "qwen33"}}, "'qwen33'"),
        (
            {"config": {**QWEN3, "hiden_size": 64}},
            "config: unknown key 'hiden_size'\n  remedy: Did you mean 'hidden_size'?",
        ),
        (
            {"config": {**QWEN3, "num_layers": 2}},
            "config: unknown key 'num_layers'\n  remedy: Did you mean 'num_hidden_layers'?",
        ),
        ({"config_file": "."}, ". is a folder\n  remedy: Give config.json."),
        ({"config_file": "/tmp"}, "/tmp is a folder\n  remedy: Give /tmp/config.json."),
        (
            {"config": QWEN3, "max_cache_length": 5},
            "remedy: Did you mean 'max_cache_len'? It takes",
        ),
        (
            {"config": {"model_type": "vit"}},
            "'vit', of which this transformers builds no causal LM",
        ),
        (
            {"config": QWEN3, "dtype": "bflot16"},
            "unknown dtype 'bflot16'\n  remedy: Choose float32, bfloat16 or float16",
        ),
        ({"config": MAMBA, "attn_implementation": "sdpa"}, "no causal LM from mamba"),
        ({"config": MAMBA}, "layers of kind linear_attention"),
        ({"config": RWKV}, "rwkv does not use the key-value cache"),
        ({"config": BLOOM}, "bloom does not run on a key-value cache"),
        ({"config": {"model_type": "xlnet", "d_model": 7}}, "does not describe a xlnet"),
        (
            {"config": {**QWEN3, "layer_types": ["linear_attention"] * 2}},
            "layers of kind linear_attention",
        ),
        (
            {
                "config": {
                    **QWEN3,
                    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                    "max_position_embeddings": 8,
                }
            },
            "qwen3 chooses its rotary factors by the longest row of a batch",
        ),
        ({"config": [1]}, "no mapping"),
        ({"config": QWEN3, "attn_implementation": "flash"}, "Choose sdpa or eager"),
        ({"config": QWEN3, "max_cache_len": 0}, "above 0"),
        ({"config": QWEN3, "max_cache_len": "x"}, "max_cache_len is 'x', no whole number above 0"),
        ({"config": QWEN3, "dtype": "float5"}, "unknown dtype"),
        ({"config": QWEN3, "batch": 5}, "do not fit"),
    ],
)
def test_mistakes(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(**kwargs)
    assert text in str(caught.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["qwen3", "gemma3, sliding and full", "llama"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_replay_equals_eager_bit_for_bit(kind: str, dtype: str) -> None:
    kwargs = {"config": KINDS[kind], "dtype": dtype, "max_cache_len": 32, "max_batch_size": 8}
    model: Any = load_model("transformers", kwargs, device=torch.device("cuda"))
    tokens = torch.zeros(4, dtype=torch.int64, device="cuda")
    positions = torch.full_like(tokens, -1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(2):
            model(tokens, positions)
        torch.cuda.synchronize()
        graph.capture_begin()
        captured = model(tokens, positions)
        graph.capture_end()
        for call in range(6):
            tokens.copy_(torch.randint(61, (4,)))
            positions.copy_(torch.tensor([call, call - 2, call, -1]).clamp(min=-1))
            expected = model(tokens, positions)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured[:3], expected[:3])
            assert captured.isfinite().all()


VIT = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
}
CONFIGS = Path(__file__).parents[2] / "configs"


def vision(dtype: str, device: torch.device = CPU) -> Any:
    kwargs = {"dtype": dtype, "classes": 10, **VIT}
    return load_model("vit_model.py:build", kwargs, device=device, base_dir=CONFIGS)


def test_the_vision_model_is_that_of_transformers() -> None:
    model = vision("float32")
    x = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(x), model.model(pixel_values=x).logits)


@pytest.mark.gpu
def test_the_vision_models_graphs_run_what_runs_eagerly() -> None:
    """Inside a capture transformers would mask attention, which gives other numbers."""
    model = vision("bfloat16", torch.device("cuda"))
    inputs = {"x": cgplan.Input(shape=("num_tokens", 3, 32, 32), dtype="bfloat16", pad=0)}
    compilation = {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [2, 8]}
    runner = cgplan.capture(model, inputs=inputs, compilation=compilation, device="cuda")
    for rows in (8, 2):
        x = torch.randn(rows, 3, 32, 32, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(runner(x=x), model(x))
    runner.close()


MASK = ("attention_mask",)
TINY_BERT = {**SHAPE, "max_position_embeddings": 64}
T5 = {
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
# from 5.24 on its argument has this name, and fewer models ask torch about captures
IS_NEW = "cache" in inspect.signature(GPT2LMHeadModel.forward).parameters
PLAIN: dict[
    str, tuple[dict[str, Any], tuple[str, ...], bool]
] = {  # the config, more inputs, whether it is told
    "llama": (KINDS["llama"], (), False),
    "gpt2": (KINDS["gpt2"], (), False),
    "gemma3": (KINDS["gemma3, sliding and full"], (), False),
    "llama, no cache": ({**KINDS["llama"], "use_cache": False}, (), True),
    "qwen3, mask": (QWEN3, MASK, True),
    "qwen3, mask and positions": (QWEN3, (*MASK, "position_ids"), True),
    "opt": (KINDS["opt, learned positions"], (), not IS_NEW),
    "bert": ({"model_type": "bert", **TINY_BERT}, (), False),
    "bert, positions": ({"model_type": "bert", **TINY_BERT}, ("position_ids",), False),
    "bert, mask": ({"model_type": "bert", **TINY_BERT}, MASK, True),
    "modernbert": (
        {"model_type": "modernbert", **SHAPE, "local_attention": 4, "pad_token_id": 0},
        (),
        False,
    ),
    "t5": ({"model_type": "t5", **T5}, ("decoder_input_ids",), False),
}


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("way", ["FULL", "PIECEWISE"])
def test_plain_models_are_captured_with_the_kernels_of_eager_calls(
    backend: GraphBackend, kind: str, way: str
) -> None:
    """transformers asks whether a capture is under way. It is told only where it would read values on the host."""
    if kind == "gemma3" and backend.device.type == "cuda":
        pytest.skip(
            "its sliding cache copies a constant from unpinned memory, which no CUDA capture takes"
        )
    config, more, is_told = PLAIN[kind]
    values = CONFIG_MAPPING[config["model_type"]].from_dict(
        {k: v for k, v in config.items() if k != "model_type"}
    )
    model = AutoModel.from_config(values).to(backend.device).eval()

    def forward(**inputs: Tensor) -> Tensor:
        return model(**inputs).last_hidden_state

    rows = cgplan.Input(shape=("num_tokens", 6), dtype="int64", pad=1)
    compilation = {"cudagraph_mode": way, "cudagraph_capture_sizes": [2, 4], "piecewise": "modules"}
    inputs = dict.fromkeys(("input_ids", *more), rows)
    runner = cgplan.capture(forward, inputs, compilation=compilation, device=str(backend.device))
    for size in (2, 4):
        places = torch.arange(6, device=backend.device).repeat(size, 1)
        batch = {name: torch.randint(2, 61, places.shape, device=backend.device) for name in inputs}
        batch |= {name: places for name in inputs if name == "position_ids"}
        batch |= {
            name: (places >= places[0, :size, None]).long()
            for name in inputs
            if name == "attention_mask"
        }
        with torch.no_grad():
            wanted = forward(**batch)
        found = runner(**batch)
        if is_told:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(found, wanted)
    assert any("transformers is told" in text for text in runner.report.warnings) is is_told
    runner.close()


def test_a_vision_model_is_captured_with_the_kernels_of_eager_calls(backend: GraphBackend) -> None:
    model = vision("float32", backend.device).model
    inputs = {"x": cgplan.Input(shape=("num_tokens", 3, 32, 32), dtype="float32", pad=0)}

    def forward(x: Tensor) -> Tensor:
        return model(pixel_values=x).logits

    x = torch.randn(2, 3, 32, 32, device=backend.device)
    found = {}
    for hidden in (["transformers"], []):
        compilation = {"cudagraph_capture_sizes": [2], "hide_capture_from": hidden}
        runner = cgplan.capture(
            forward, inputs, compilation=compilation, device=str(backend.device)
        )
        with torch.no_grad():
            torch.testing.assert_close(
                runner(x=x), forward(x), rtol=0 if hidden else 1e-4, atol=0 if hidden else 1e-4
            )
        found[bool(hidden)] = runner.report.records[0].nodes
        runner.close()
    if backend.device.type == "cpu" and not IS_NEW:
        assert found[True] < found[False]  # no mask is built
