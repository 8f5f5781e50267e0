"""The reference decoder and its attention operator."""

from __future__ import annotations

import copy
from typing import Any

import attention
import pytest
import torch
from decoder import Decoder, ExampleBatch, Projection, add_lora, build, example_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cgplan.backends.context import forward_context
from cgplan.errors import CgplanError, InputError, ModelError
from cgplan.modes import BatchDescriptor

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "head_dim": 16,
    "block_size": 4,
    "num_blocks": 64,
}


def run(model: Decoder, batch: ExampleBatch, descriptor: BatchDescriptor | None = None) -> Tensor:
    with forward_context(descriptor=descriptor, metadata=batch.metadata):
        return model(batch.input_ids, batch.positions)


def snapshot(model: Decoder) -> list[Tensor]:
    return [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("_cache")]


def restore(model: Decoder, saved: list[Tensor]) -> None:
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith("_cache")]
    for buffer, value in zip(buffers, saved, strict=True):
        buffer.copy_(value)


def metadata_of(batch: ExampleBatch, **changes: Tensor) -> ExampleBatch:
    return batch._replace(metadata={**batch.metadata, **changes})


# --- against transformers -------------------------------------------------------------------------------------


def qwen3_pair(*, tied: bool) -> tuple[Any, Decoder]:
    """transformers' Qwen3 and ours with the same weights; norms are not all ones, so that they count."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=80,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(3)
    theirs = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    ours = build(
        **SMALL,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        intermediate_size=80,
        rope_theta=5000.0,
        rms_norm_eps="1e-5",
        tie_word_embeddings=tied,
    )
    ours.load_state_dict(
        {name.removeprefix("model."): value for name, value in theirs.state_dict().items()}
    )
    return theirs, ours


def theirs_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("tied", [True, False])
def test_prefill_then_mixed_then_decode_equals_transformers(tied: bool) -> None:
    theirs, ours = qwen3_pair(tied=tied)
    generator = torch.Generator().manual_seed(1)
    lengths = [11, 6, 9]
    tokens = [torch.randint(97, (length,), generator=generator).tolist() for length in lengths]
    expected = [theirs_logits(theirs, row) for row in tokens]
    done = [0, 0, 0]
    # Two prompts in parts, the third later: prefill, a mixed batch, then decode steps of each request's own length.
    for step in ([5, 2, 0], [1, 3, 6], [4, 1, 1], [1, 0, 1], [0, 0, 1]):
        batch = example_batch(ours, done, step, seed=7)
        ids = [row[start : start + new] for row, start, new in zip(tokens, done, step, strict=True)]
        logits = run(
            ours, batch._replace(input_ids=torch.tensor([token for row in ids for token in row]))
        )
        wanted = [
            row[start : start + new] for row, start, new in zip(expected, done, step, strict=True)
        ]
        torch.testing.assert_close(logits, torch.cat(wanted), rtol=1e-4, atol=2e-5)
        done = [start + new for start, new in zip(done, step, strict=True)]
    assert done == lengths


def test_llama_shape_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=80,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    ours = build(**SMALL, intermediate_size=80, qk_norm=False, tie_word_embeddings=False)
    ours.load_state_dict(
        {name.removeprefix("model."): value for name, value in theirs.state_dict().items()}
    )
    batch = example_batch(ours, [0], [10])
    torch.testing.assert_close(
        run(ours, batch), theirs_logits(theirs, batch.input_ids.tolist()), rtol=1e-4, atol=1e-5
    )


# --- batches --------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    context=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    query_len=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_uniform_batch_equals_the_mixed_path(context: list[int], query_len: int, seed: int) -> None:
    model = build(**SMALL)
    run(model, example_batch(model, [0] * len(context), [9] * len(context), seed=seed))
    batch = example_batch(model, context, [query_len] * len(context), seed=seed)
    saved = snapshot(model)
    mixed = run(model, batch)
    restore(model, saved)
    del batch.metadata["query_start_loc"]
    uniform = run(
        model, batch, BatchDescriptor(len(context) * query_len, len(context), uniform=True)
    )
    assert torch.equal(mixed, uniform)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=4),
    extra_tokens=st.integers(0, 5),
    extra_reqs=st.integers(0, 3),
)
def test_padding_never_changes_real_rows(
    lengths: list[tuple[int, int]], extra_tokens: int, extra_reqs: int
) -> None:
    """Padding rows are NaN from the embedding on, and so is every cache row that no request owns."""
    model = build(**SMALL, max_loras=1, tie_word_embeddings=False)
    contexts, queries = [context for context, _ in lengths], [query for _, query in lengths]
    run(model, example_batch(model, [0] * len(lengths), [10] * len(lengths)))
    saved = snapshot(model)
    plain = example_batch(model, contexts, queries, max_blocks=4)
    used = len(plain.input_ids)
    plain = plain._replace(input_ids=plain.input_ids.clamp(max=95))
    expected = run(model, plain)

    restore(model, saved)
    model.embed_tokens.weight[96] = float("nan")
    for buffer in free_blocks(model, plain):
        buffer.fill_(float("nan"))
    padded = example_batch(
        model,
        contexts,
        queries,
        max_blocks=4,
        num_tokens=used + extra_tokens,
        num_reqs=len(lengths) + extra_reqs,
    )
    ids = torch.full_like(padded.input_ids, 96)
    ids[:used] = plain.input_ids
    tables = padded.metadata["block_tables"].clone()
    tables[len(lengths) :] = -1
    logits = run(model, metadata_of(padded._replace(input_ids=ids), block_tables=tables))
    torch.testing.assert_close(logits[:used], expected, rtol=1e-4, atol=1e-5)


def free_blocks(model: Decoder, batch: ExampleBatch) -> list[Tensor]:
    """The cache blocks that no request of the batch has in its table, the spare one included."""
    owned = set(batch.metadata["block_tables"].flatten().tolist())
    caches = [buffer for name, buffer in model.named_buffers() if name.endswith("_cache")]
    return [
        cache[block] for cache in caches for block in range(cache.shape[0]) if block not in owned
    ]


def test_padding_rows_of_attention_are_zero() -> None:
    query = torch.full((5, 4, 8), float("nan"))
    new = torch.full((5, 2, 8), float("nan"))
    query[:2], new[:2] = torch.randn(2, 4, 8), torch.randn(2, 2, 8)
    cache = torch.full((2, 4, 4, 2, 8), float("nan"))
    metadata = {
        "slot_mapping": torch.tensor([4, 8, -1, -1, -1]),
        "block_tables": torch.tensor([[1, 99], [2, -7], [0, 0]], dtype=torch.int32),
        "seq_lens": torch.tensor([1, 1, 0], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1, 2, 2], dtype=torch.int32),
    }
    output = torch.full_like(query, 7.0)
    with forward_context(metadata=metadata):
        torch.ops.cgplan.attention(query, new, new, cache[0], cache[1], output, 0.3)
    torch.testing.assert_close(
        output[:2], new[:2].repeat_interleave(2, dim=1)
    )  # one key: its value is the answer
    assert torch.equal(output[2:], torch.zeros(3, 4, 8))
    assert (
        not cache[0, :3].isfinite().all(-1).all(-1).flatten()[[0, 5, 9]].any()
    )  # nothing else was written


def test_layers_share_the_derived_values() -> None:
    model = build(**SMALL, num_layers=3)
    batch = example_batch(model, [0], [3])
    with forward_context(metadata=batch.metadata) as context:
        model(batch.input_ids, batch.positions)
        assert len(context.derived) == 1
        first = next(iter(context.derived.values()))
        model(batch.input_ids, batch.positions)
        assert next(iter(context.derived.values())) is first


def test_same_seed_same_weights() -> None:
    one, two, three = build(**SMALL, seed=1), build(**SMALL, seed=1), build(**SMALL, seed=2)
    weights = [model.layers[1].mlp.up_proj.weight for model in (one, two, three)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not any(parameter.requires_grad for parameter in one.parameters())
    head, batch = build(**SMALL, seed=1, logits=False), example_batch(one, [0], [3])
    hidden = run(head, batch)
    assert hidden.shape == (3, 48)
    assert torch.equal(head.compute_logits(hidden), run(one, batch))


# --- the operator ---------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_operator_is_one_visible_operator_without_host_reads() -> None:
    model = build(**SMALL)
    batch = example_batch(model, [0, 0], [3, 2], num_tokens=8)
    with Recorder() as recorder:
        run(model, batch)
    assert recorder.names.count("cgplan.attention.default") == 2
    with Recorder() as inside, forward_context(metadata=batch.metadata):
        layer = model.layers[0].self_attn
        query, key = torch.randn(8, 4, 16), torch.randn(8, 2, 16)
        attention.paged_attention(
            query, key, key, layer.key_cache, layer.value_cache, query.clone(), 1.0
        )
    assert not {
        "aten._local_scalar_dense.default",
        "aten.nonzero.default",
        "aten.item.default",
    } & set(inside.names)


def test_operators_pass_opcheck() -> None:
    tests = ("test_schema", "test_faketensor")
    cache = torch.zeros(2, 3, 4, 2, 8)
    metadata = example_batch(build(**SMALL), [0], [3]).metadata
    metadata["slot_mapping"] = torch.tensor([0, 1, 2])
    metadata["block_tables"] = torch.zeros(1, 1, dtype=torch.int32)
    metadata["lora_ids"] = torch.tensor([1, -1, 0])
    query, key = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    given = (query, key, key.clone(), cache[0], cache[1], torch.empty_like(query), 0.5)
    with forward_context(metadata=metadata):
        torch.library.opcheck(torch.ops.cgplan.attention.default, given, test_utils=tests)
    lora = torch.randn(3, 8), torch.randn(2, 4, 8), torch.randn(2, 4, 6), torch.randn(3, 6)
    for has_lora in (False, True):
        with forward_context(descriptor=BatchDescriptor(3, has_lora=has_lora), metadata=metadata):
            torch.library.opcheck(torch.ops.cgplan.add_lora.default, lora, test_utils=tests)


@pytest.mark.parametrize("name", ["slot_mapping", "block_tables", "seq_lens", "query_start_loc"])
def test_missing_metadata_is_named(name: str) -> None:
    model = build(**SMALL)
    batch = example_batch(model, [0], [3])
    del batch.metadata[name]
    with pytest.raises(InputError, match=f"needs `{name}`"):
        run(model, batch)


def test_metadata_of_the_wrong_length_is_refused() -> None:
    model = build(**SMALL)
    batch = example_batch(model, [0], [3])
    with pytest.raises(InputError, match="slot_mapping has 2 entries for 3 tokens"):
        run(model, metadata_of(batch, slot_mapping=torch.tensor([0, 1])))
    with pytest.raises(InputError, match="query_start_loc has 3 entries, seq_lens has 1"):
        run(model, metadata_of(batch, query_start_loc=torch.tensor([0, 3, 3], dtype=torch.int32)))
    with pytest.raises(CgplanError, match="no forward context"):
        model(batch.input_ids, batch.positions)


# --- LoRA -----------------------------------------------------------------------------------------------------


def lora_run(model: Decoder, batch: ExampleBatch, ids: list[int]) -> Tensor:
    descriptor = BatchDescriptor(len(ids), has_lora=True, num_active_loras=1)
    return run(model, metadata_of(batch, lora_ids=torch.tensor(ids)), descriptor)


def test_lora_without_adapters_is_the_base_model() -> None:
    model, base = build(**SMALL, max_loras=2), build(**SMALL)
    batch = example_batch(model, [0, 0], [3, 2])
    expected = run(base, batch)
    assert torch.equal(lora_run(model, batch, [-1] * 5), expected)
    assert torch.equal(run(model, batch), expected)  # has_lora is False: the branch is skipped


def merged(model: Decoder, slot: int) -> Decoder:
    """The decoder without LoRA whose weights have the slot's adapter in them; slot -1: none."""
    other = build(**{**model.config.model_dump(), "max_loras": 0}).to(model.norm.weight.dtype)
    other.load_state_dict(model.state_dict())
    adapted = {
        name: module for name, module in model.named_modules() if isinstance(module, Projection)
    }
    for name, projection in adapted.items() if slot >= 0 else ():
        other.get_submodule(name).weight += projection.lora_b[slot].T @ projection.lora_a[slot]
    return other


def test_mixed_adapters_equal_weights_with_the_adapter_in_them() -> None:
    model = build(**SMALL, max_loras=5, lora_rank=4).double()
    model.load_lora(3, {})
    queries, adapters = [3, 2, 4, 1, 2, 1], [0, 2, -1, 4, 0, 3]
    batch = example_batch(model, [0] * 6, queries, num_tokens=16, num_reqs=8)
    ids = torch.tensor(adapters).repeat_interleave(torch.tensor(queries)).tolist()
    together, start = lora_run(model, batch, [*ids, -1, -1, -1]), 0
    for count, adapter in zip(queries, adapters, strict=True):
        rows, other = slice(start, start + count), merged(model, adapter)
        alone = example_batch(other, [0], [count])._replace(input_ids=batch.input_ids[rows])
        torch.testing.assert_close(together[rows], run(other, alone), rtol=1e-10, atol=1e-12)
        base = run(merged(model, -1), alone)
        assert torch.allclose(together[rows], base, atol=1e-3) == (adapter in (-1, 3))
        start += count


def project(projection: Projection, x: Tensor, ids: list[int] | Tensor | None) -> Tensor:
    """One projection in a context with these adapters; None: in a batch without LoRA."""
    descriptor = BatchDescriptor(
        len(x), has_lora=ids is not None, num_active_loras=int(ids is not None)
    )
    metadata = {} if ids is None else {"lora_ids": torch.as_tensor(ids)}
    with forward_context(descriptor=descriptor, metadata=metadata):
        return projection(x)


def test_adapters_are_loaded_in_place() -> None:
    model = build(**SMALL, max_loras=2, lora_rank=4)
    projection = model.layers[0].self_attn.q_proj
    address = projection.lora_a.data_ptr()
    a, b = torch.randn(2, 48), torch.randn(64, 2)
    model.load_lora(
        1, {"layers.0.self_attn.q_proj.lora_A": a, "layers.0.self_attn.q_proj.lora_B": b}
    )
    x = torch.randn(1, 48)
    torch.testing.assert_close(project(projection, x, [1]), x @ (projection.weight + b @ a).T)
    assert not model.layers[1].mlp.up_proj.lora_a[1].any()  # not named: no adapter
    model.remove_lora(1)
    assert torch.equal(project(projection, x, [1]), project(projection, x, None))
    assert projection.lora_a.data_ptr() == address


def test_adapters_that_are_trained_leave_nothing_of_their_graph_behind() -> None:
    model = build(**SMALL, max_loras=1, lora_rank=4)
    projection = model.layers[0].self_attn.q_proj
    a, b = torch.nn.Parameter(torch.randn(4, 48)), torch.nn.Parameter(torch.randn(64, 4))
    with torch.enable_grad():
        model.load_lora(
            0, {"layers.0.self_attn.q_proj.lora_A": a, "layers.0.self_attn.q_proj.lora_B": b}
        )
    assert torch.equal(projection.lora_a[0], a)
    assert torch.equal(projection.lora_b[0], b.T)
    assert not any(buffer.requires_grad for buffer in model.buffers())
    copy.deepcopy(model)


def test_a_decoder_built_in_inference_mode_is_written_to_outside_of_it() -> None:
    with torch.inference_mode():
        model = build(**SMALL, max_loras=1, lora_rank=4)
    assert not any(buffer.is_inference() for buffer in model.buffers())
    adapter = {"lora_A": torch.randn(4, 48), "lora_B": torch.randn(64, 4)}
    model.load_lora(
        0, {f"layers.0.self_attn.q_proj.{name}": value for name, value in adapter.items()}
    )
    assert torch.equal(model.layers[0].self_attn.q_proj.lora_a[0], adapter["lora_A"])
    run(model, example_batch(model, [0], [3]))  # writes the caches


def test_rows_of_other_adapters_and_padding_do_not_matter() -> None:
    """Exactly, whatever stands in them: NaN in a padding row, values that overflow in an adapter of another row."""
    projection = build(**SMALL, max_loras=3, lora_rank=4, dtype="float16").layers[0].mlp.up_proj
    x = torch.randn(5, 48).half()
    expected = project(projection, x, [0, -1, 1, 0, -1])
    assert torch.equal(expected[[1, 4]], project(projection, x, None)[[1, 4]])
    projection.lora_a[2].fill_(60000)
    projection.lora_b[2].fill_(60000)
    x[4] = float("nan")
    found = project(projection, x, [0, -1, 1, 0, -1])
    assert torch.equal(found[:4], expected[:4])
    assert torch.equal(
        project(projection, x, [0, 3, 1, 0, 99])[:4], expected[:4]
    )  # numbers of no slot: no adapter
    assert found[4].isnan().all()
    assert not project(projection, x, [2] * 5).isfinite().any()


def test_what_lora_launches() -> None:
    model = build(**SMALL, max_loras=3, lora_rank=4)
    projection = model.layers[0].mlp.up_proj
    x, y = torch.randn(4, 48), torch.zeros(4, 256)
    counts = []
    for has_lora in (False, True):
        metadata, descriptor = (
            {"lora_ids": torch.tensor([0, -1, 2, 0])},
            BatchDescriptor(4, has_lora=has_lora),
        )
        with forward_context(descriptor=descriptor, metadata=metadata):
            for _ in range(2):
                with Recorder() as inside:
                    add_lora(x, projection.lora_a, projection.lora_b, y)
                counts.append(
                    [name.removeprefix("aten.").partition(".")[0] for name in inside.names]
                )
    assert counts[:2] == [[], []]
    views = {"view", "t", "unsqueeze", "transpose", "permute", "select", "slice", "alias", "detach"}
    first, second = ([name for name in names if name not in views] for names in counts[2:])
    assert second == ["mm", "masked_fill_", "addmm_"]
    assert len(first) == len(second) + 2, (
        "which rows have which adapter is worked out once in a forward"
    )


def test_lora_under_autocast() -> None:
    projection = build(**SMALL, max_loras=2, lora_rank=4).layers[0].mlp.up_proj
    x = torch.randn(3, 48)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = project(projection, x, [0, -1, 1])
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(
        found.float(), project(projection, x, [0, -1, 1]), rtol=5e-2, atol=5e-2
    )


def test_a_traced_forward_takes_the_adapters_of_each_batch() -> None:
    model = build(**SMALL, max_loras=3, lora_rank=4)
    batch = example_batch(model, [0, 0], [3, 2])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for ids in (None, [0, 0, 0, -1, 2], [-1, 1, 1, 0, 0], None):
        changed = batch if ids is None else metadata_of(batch, lora_ids=torch.tensor(ids))
        descriptor = BatchDescriptor(5, has_lora=ids is not None)
        restore(model, [torch.zeros_like(cache) for cache in snapshot(model)])
        with forward_context(descriptor=descriptor, metadata=changed.metadata):
            found = compiled(batch.input_ids, batch.positions)
        caches = snapshot(model)
        torch.testing.assert_close(found, run(model, changed, descriptor))
        torch.testing.assert_close(caches, snapshot(model), msg="the cache is written, too")
    torch._dynamo.reset()


def test_lora_mistakes() -> None:
    model = build(**SMALL, max_loras=1, lora_rank=2)
    q_proj = "layers.0.self_attn.q_proj"
    with pytest.raises(ModelError, match="no adapter slot 1"):
        model.load_lora(1, {})
    with pytest.raises(ModelError, match="fits no projection") as caught:
        model.load_lora(0, {"layers.0.self_attn.qproj.lora_A": torch.zeros(2, 48)})
    assert q_proj in caught.value.remedy
    for wrong in (
        {"lora_A": (2, 48)},
        {"lora_A": (3, 48), "lora_B": (64, 3)},
        {"lora_A": (2, 48), "lora_B": (64, 1)},
    ):
        with pytest.raises(ModelError, match="has shapes"):
            model.load_lora(
                0, {f"{q_proj}.{part}": torch.zeros(shape) for part, shape in wrong.items()}
            )
    for value, dtype in ((float("nan"), torch.float32), (1e5, torch.float16)):
        half = build(**SMALL, max_loras=1, lora_rank=2).to(dtype)
        adapter = {
            f"{q_proj}.lora_A": torch.zeros(2, 48),
            f"{q_proj}.lora_B": torch.full((64, 2), value),
        }
        with pytest.raises(ModelError, match=f"not finite in {dtype}"):
            half.load_lora(0, adapter)
    batch = example_batch(model, [0], [3])
    with pytest.raises(InputError, match=r"`lora_ids` has shape \[2\]"):
        run(
            model,
            metadata_of(batch, lora_ids=torch.tensor([0, 0])),
            BatchDescriptor(3, has_lora=True),
        )
    del batch.metadata["lora_ids"]
    with pytest.raises(InputError, match="`lora_ids` is missing"):
        run(model, batch, BatchDescriptor(3, has_lora=True))
    with pytest.raises(CgplanError, match="no forward context"):
        model.layers[0].mlp.up_proj(torch.zeros(3, 48))


# --- mistakes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"hiden_size": 4}, "Did you mean 'hidden_size'"),
        ({"hidden_size": "many"}, "hidden_size is 'many'"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_heads": 4, "num_kv_heads": 3}, "does not divide"),
        ({"head_dim": 5}, "head_dim is 5"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
    ],
)
def test_impossible_shapes(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError) as caught:
        build(**kwargs)
    assert text in str(caught.value)


def test_example_batch_that_does_not_fit() -> None:
    model = build(**SMALL)
    for kwargs in ({"num_tokens": 2}, {"num_reqs": 1}, {"max_blocks": 40}):
        with pytest.raises(InputError):
            example_batch(model, [0, 0], [3, 1], **kwargs)
    with pytest.raises(InputError):
        example_batch(model, [0], [3, 1])
    with pytest.raises(InputError):
        example_batch(model, [0], [9], max_blocks=2)


# --- on a GPU -------------------------------------------------------------------------------------------------

gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@gpu
@needs_cuda
@pytest.mark.parametrize("heads", [(16, 8, 128), (8, 8, 64), (14, 2, 64)])
@pytest.mark.parametrize(
    ("max_blocks", "block_size", "num_reqs"), [(1, 16, 9), (7, 16, 1), (7, 256, 1), (5, 64, 200)]
)
def test_flash_path_equals_the_gather_path(
    heads: tuple[int, int, int],
    max_blocks: int,
    block_size: int,
    num_reqs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(num_reqs)
    num_blocks, capacity = num_reqs * max_blocks, max_blocks * block_size
    queries = torch.randint(1, min(5, capacity), (num_reqs,), generator=generator)
    contexts = (torch.rand(num_reqs, generator=generator) * (capacity - queries + 1)).long()
    spec = {
        "hidden_size": 8,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "block_size": block_size,
    }
    with torch.device("cuda"):
        tiny = build(**spec, num_blocks=num_blocks)
    count = int(queries.sum())
    batch = example_batch(
        tiny,
        contexts.tolist(),
        queries.tolist(),
        num_tokens=count + 5,
        num_reqs=num_reqs + 2,
        max_blocks=max_blocks,
    )
    half = {"dtype": torch.bfloat16, "device": "cuda"}
    caches = torch.randn(2, num_blocks + 1, block_size, num_kv_heads, head_dim, **half)
    key, value = torch.randn(2, count + 5, num_kv_heads, head_dim, **half)
    query = torch.randn(count + 5, num_heads, head_dim, **half)
    query[count:] = float("nan")
    # What no request owns, and what lies past a request's last key, must not be read.
    owned = torch.zeros(num_blocks + 1, block_size, dtype=torch.bool, device="cuda")
    for table, length in zip(
        batch.metadata["block_tables"], batch.metadata["seq_lens"].tolist(), strict=True
    ):
        for page in range(max_blocks):
            owned[table[page], : max(0, min(block_size, length - page * block_size))] = True
    caches[:, ~owned] = float("nan")

    def attend() -> Tensor:
        output, copies = torch.full_like(query, 7.0), caches.clone()
        with forward_context(metadata=batch.metadata):
            torch.ops.cgplan.attention(
                query, key, value, copies[0], copies[1], output, head_dim**-0.5
            )
        return output

    paged = attend()
    monkeypatch.setattr(attention, "reads_pages_in_place", lambda _: False)
    gathered = attend()
    assert not paged[count:].any()
    torch.testing.assert_close(paged, gathered, rtol=2e-2, atol=1e-2)


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("uniform", [True, False])
def test_replay_equals_eager_bit_for_bit_on_new_inputs(dtype: str, uniform: bool) -> None:
    with torch.device("cuda"):
        model = build(
            num_heads=8, num_kv_heads=4, head_dim=64, dtype=dtype, num_blocks=64, max_loras=2
        )
    shape: dict[str, Any] = {"max_blocks": 6, "num_tokens": 8, "num_reqs": 4, "seed": 1}
    run(model, example_batch(model, [0] * 4, [40] * 4, seed=1))
    descriptor = BatchDescriptor(8, 4, uniform=uniform, has_lora=True, num_active_loras=2)
    first = example_batch(model, [4, 17, 30], [2, 2, 2], **shape)
    steps = [
        example_batch(model, [40, 3, 20, 7], [2, 2, 2, 2], **shape),
        example_batch(model, [80, 9], [2, 2], **shape),
        example_batch(model, [6, 50, 2], [2, 2, 2] if uniform else [1, 4, 2], **shape),
    ]

    def forward() -> Tensor:
        with forward_context(metadata=first.metadata, descriptor=descriptor):
            return model(first.input_ids, first.positions)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.stream(stream):
        # The warm-up and the capture share one context: what the warm-up derived must not be captured.
        with forward_context(metadata=first.metadata, descriptor=descriptor):
            model(first.input_ids, first.positions)
            torch.cuda.synchronize()
            graph.capture_begin()
            captured = model(first.input_ids, first.positions)
            graph.capture_end()
        for number, step in enumerate(steps):
            first.input_ids.copy_(step.input_ids)
            first.positions.copy_(step.positions)
            for name, tensor in step.metadata.items():
                first.metadata[name].copy_(tensor)
            first.metadata["lora_ids"].copy_(
                torch.arange(8, device="cuda") % 3 - 1 if number else -torch.ones(8).long()
            )
            saved = snapshot(model)
            expected = forward()
            written = snapshot(model)
            restore(model, saved)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured, expected)
            for cache, eager in zip(snapshot(model), written, strict=True):
                assert torch.equal(cache[:-1], eager[:-1])
            assert captured.isfinite().all()
