"""Tiny models of transformers, made from their configurations, as they are called and as they generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from programs.harness import Program, check, program
from programs.parts import Steps, Wrap, device, ids, rows
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

programs: list[Program] = []
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
TOKENS = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}


def made(kind: str, config: str, **settings: Any) -> Any:
    """A model of a class, for evaluation."""
    return getattr(transformers, kind)(getattr(transformers, config)(**settings)).to(device).eval()


def llama(**settings: Any) -> Any:
    return made(
        "LlamaForCausalLM",
        "LlamaConfig",
        **{**SMALL, **TOKENS, "num_key_value_heads": 1, **settings},
    )


def qwen(**settings: Any) -> Any:
    return made(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        **{**SMALL, **TOKENS, "num_key_value_heads": 2, **settings},
    )


def gpt2(**settings: Any) -> Any:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    return made("GPT2LMHeadModel", "GPT2Config", **{**sizes, **TOKENS, **settings})


def bert(kind: str = "BertForSequenceClassification", **settings: Any) -> Any:
    return made(
        kind, "BertConfig", **{**SMALL, "vocab_size": 32, "max_position_embeddings": 32, **settings}
    )


def t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return made(
        "T5ForConditionalGeneration", "T5Config", **{**sizes, **TOKENS, "decoder_start_token_id": 0}
    )


def prompt(length: int = 5, batch: int = 2) -> Tensor:
    return ids(batch, length)


@program(programs, graphs=True)
def llama_without_cache(graphed: Wrap) -> Steps:
    """Scores texts of one length."""
    g = graphed(llama())
    with torch.no_grad():
        for _ in range(9):
            yield g(prompt(), use_cache=False).logits


@program(programs)
def llama_with_the_default_cache(graphed: Wrap) -> Steps:
    """Calls with ids alone, and gets a new cache with the logits."""
    g = graphed(llama())
    with torch.no_grad():
        for _ in range(8):
            found = g(prompt())
            yield (
                found.logits,
                type(found).__name__,
                found.past_key_values.get_seq_length(),
                list(found),
            )


@program(programs)
def llama_hands_the_cache_on(graphed: Wrap) -> Steps:
    """Passes the dynamic cache of one step to the next."""
    g = graphed(llama())
    with torch.no_grad():
        for _ in range(2):
            found, cache = None, None
            for at in range(6):
                found = g(prompt(3 if at == 0 else 1), past_key_values=cache, use_cache=True)
                cache = found.past_key_values
                yield found.logits, cache.get_seq_length()


@program(programs)
def llama_hidden_states(graphed: Wrap) -> Steps:
    """Asks for hidden states."""
    g = graphed(llama(), dynamic={})
    with torch.no_grad():
        for _ in range(9):
            found = g(prompt(), use_cache=False, output_hidden_states=True)
            yield found.logits, found.hidden_states


@program(programs)
def llama_attentions(graphed: Wrap) -> Steps:
    """Asks for attention maps."""
    g = graphed(llama(attn_implementation="eager"), dynamic={})
    with torch.no_grad():
        for _ in range(9):
            found = g(prompt(), use_cache=False, output_attentions=True)
            yield found.logits, found.attentions


@program(programs)
def hidden_states_now_and_then(graphed: Wrap) -> Steps:
    """Asks for hidden states in some calls of g, and of the model itself."""
    net = bert()
    g = graphed(net)
    with torch.no_grad():
        for at in range(14):
            x, more = prompt(), at % 3 == 0
            found, plain = g(x, output_hidden_states=more), net(x, output_hidden_states=more)
            yield found.logits, found.hidden_states, plain.hidden_states, list(found), list(plain)


@program(programs)
def hidden_states_by_the_configuration(graphed: Wrap) -> Steps:
    """Sets output_hidden_states in the model's configuration, and takes it back."""
    net = bert()
    g = graphed(net, dynamic={})
    with torch.no_grad():
        for at in range(18):
            net.config.output_hidden_states = 6 <= at < 12
            found = g(prompt())
            yield found.logits, list(found)


@program(programs)
def llama_static_cache(graphed: Wrap) -> Steps:
    """Steps by hand with one static cache, which is reset between prompts."""
    net = llama()
    cache = transformers.StaticCache(config=net.config, max_cache_len=16)
    net.forward = graphed(net.forward, dynamic={})
    with torch.no_grad():
        for length in (4, 4, 6):
            cache.reset()
            at = torch.arange(length, device=device)
            tokens = prompt(length, 1)
            for _ in range(6):
                found = net(tokens, past_key_values=cache, position_ids=at[None], use_cache=True)
                yield found.logits, cache.layers[0].keys
                tokens, at = found.logits[:, -1:].argmax(-1), at[-1:] + 1


@program(programs)
def llama_generates(graphed: Wrap) -> Steps:
    """Generates greedily by the default cache."""
    net = llama()
    net.forward = graphed(net.forward, dynamic={})
    for length in (4, 4, 6):
        yield net.generate(prompt(length), **GREEDY)


@program(programs)
def qwen_generates_with_a_kept_cache(graphed: Wrap) -> Steps:
    """Generates with one static cache, as docs/graphed.md has it."""
    net = qwen()
    cache = transformers.StaticCache(config=net.config, max_cache_len=16)
    net.forward = graphed(net.forward, dynamic={})
    for length in (4, 4, 6, 4):
        cache.reset()
        yield net.generate(prompt(length), past_key_values=cache, **GREEDY)


@program(programs)
def llama_generates_with_a_static_cache(graphed: Wrap) -> Steps:
    """Asks for a static cache, which is made anew in each call."""
    net = llama()
    net.forward = graphed(net.forward, dynamic={})
    for length in (4, 4, 6):
        yield net.generate(prompt(length), cache_implementation="static", **GREEDY)


@program(programs)
def gpt2_samples(graphed: Wrap) -> Steps:
    """Samples, by a seed for each text."""
    net = gpt2()
    net.forward = graphed(net.forward, dynamic={})
    for seed in range(3):
        torch.manual_seed(seed)
        yield net.generate(
            prompt(4), max_new_tokens=6, do_sample=True, top_k=5, disable_compile=True
        )


@program(programs)
def qwen_samples_with_a_kept_cache(graphed: Wrap) -> Steps:
    """Samples with one static cache."""
    net = qwen()
    cache = transformers.StaticCache(config=net.config, max_cache_len=16)
    net.forward = graphed(net.forward, dynamic={})
    for _ in range(3):
        cache.reset()
        options = {
            "max_new_tokens": 6,
            "do_sample": True,
            "temperature": 2.0,
            "disable_compile": True,
        }
        yield net.generate(prompt(4), past_key_values=cache, **options)


@program(programs)
def gpt2_searches_by_beams(graphed: Wrap) -> Steps:
    """Generates by a beam search, which reorders the cache."""
    net = gpt2()
    net.forward = graphed(net.forward, dynamic={})
    for length in (4, 4):
        yield net.generate(prompt(length), num_beams=2, **GREEDY)


@program(programs)
def inner_model_is_graphed(graphed: Wrap) -> Steps:
    """Puts g in the place of the decoder inside of the model, and generates."""
    net = llama()
    net.model = graphed(net.model)
    for length in (4, 4, 6):
        yield net.generate(prompt(length), **GREEDY)


@program(programs, graphs=True)
def inner_model_without_cache(graphed: Wrap) -> Steps:
    """Puts g in the place of the decoder, and scores."""
    net = llama()
    net.model = graphed(net.model)
    with torch.no_grad():
        for _ in range(9):
            yield net(prompt(), use_cache=False).logits


@program(programs)
def layers_are_graphed(graphed: Wrap) -> Steps:
    """Puts g in the place of each layer."""
    net = qwen(num_hidden_layers=2)
    for at, layer in enumerate(net.model.layers):
        net.model.layers[at] = graphed(layer)
    with torch.no_grad():
        for _ in range(8):
            yield net(prompt(), use_cache=False).logits


@program(programs)
def gpt2_with_a_mask(graphed: Wrap) -> Steps:
    """Passes left-padded prompts with a mask."""
    g = graphed(gpt2())
    with torch.no_grad():
        for at in range(10):
            mask = torch.ones(2, 6, dtype=torch.long, device=device)
            mask[0, : at % 4] = 0
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            found = g(prompt(6), attention_mask=mask, position_ids=positions, use_cache=False)
            yield found.logits[mask.bool()]


@program(programs)
def gpt2_by_embeddings(graphed: Wrap) -> Steps:
    """Passes embeddings in place of ids, for other numbers of texts."""
    g = graphed(gpt2())
    with torch.no_grad():
        for batch in (2, 3, 2, 4, 3, 3, 2, 1, 4):
            yield g(inputs_embeds=rows(batch, 5, 16), use_cache=False).logits


@program(programs, graphs=True)
def bert_classifies(graphed: Wrap) -> Steps:
    """Classifies texts with a mask, in batches of one size."""
    g = graphed(bert(), dynamic={})
    with torch.no_grad():
        for at in range(9):
            mask = torch.ones(2, 6, dtype=torch.long, device=device)
            mask[1, 3 + at % 3 :] = 0
            yield g(input_ids=prompt(6), attention_mask=mask).logits


@program(programs)
def bert_in_batches_of_other_sizes(graphed: Wrap) -> Steps:
    """Classifies texts in batches of other sizes and lengths, without any option."""
    g = graphed(bert())
    with torch.no_grad():
        for batch, length in (
            (2, 5),
            (3, 5),
            (2, 5),
            (4, 7),
            (3, 5),
            (1, 5),
            (2, 7),
            (3, 7),
            (2, 5),
            (3, 5),
        ):
            x = prompt(length, batch)
            yield g(x, attention_mask=torch.ones_like(x)).logits


@program(programs)
def bert_with_labels(graphed: Wrap) -> Steps:
    """Passes labels, and gets a loss with the logits; batches differ in size."""
    g = graphed(bert())
    with torch.no_grad():
        for batch in (3, 3, 4, 3, 3, 2, 4, 3, 3):
            found = g(prompt(5, batch), labels=torch.arange(batch, device=device) % 2)
            yield found.loss, found.logits


@program(programs, graphs=True)
def bert_returns_a_tuple(graphed: Wrap) -> Steps:
    """Asks for tuples in place of dicts."""
    g = graphed(bert("BertModel"), dynamic={})
    with torch.no_grad():
        for _ in range(9):
            yield g(prompt(), return_dict=False)


@program(programs)
def bert_learns(graphed: Wrap) -> Steps:
    """Fine-tunes by g with recomputation, dropout off."""
    net = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    g, optimizer = graphed(net, grad="recompute"), torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(8):
        loss = g(prompt(), labels=torch.tensor([0, 1], device=device)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, net.classifier.weight.grad, net.bert.embeddings.word_embeddings.weight.grad


@program(programs)
def gradient_checkpointing(graphed: Wrap) -> Steps:
    """Enables gradient checkpointing after some calls, and trains."""
    net = llama().train()
    g = graphed(net, grad="recompute")
    for at in range(10):
        if at == 4:
            net.gradient_checkpointing_enable()
        if at == 8:
            net.gradient_checkpointing_disable()
        net.zero_grad()
        x = prompt()
        loss = g(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        yield loss, net.lm_head.weight.grad, net.model.embed_tokens.weight.grad


@program(programs)
def t5_forward(graphed: Wrap) -> Steps:
    """Runs encoder and decoder in one call."""
    g = graphed(t5(), dynamic={})
    with torch.no_grad():
        for _ in range(8):
            yield g(input_ids=prompt(), decoder_input_ids=prompt(3), use_cache=False).logits


@program(programs)
def t5_decodes_what_was_encoded(graphed: Wrap) -> Steps:
    """Encodes by the model, and passes the encoder's output to g."""
    net = t5()
    g = graphed(net, dynamic={})
    with torch.no_grad():
        for _ in range(3):
            encoded = net.encoder(prompt())
            for _ in range(3):
                yield g(
                    encoder_outputs=encoded, decoder_input_ids=prompt(3), use_cache=False
                ).logits


@program(programs)
def t5_keeps_its_cache(graphed: Wrap) -> Steps:
    """Keeps one encoder-decoder cache over several inputs, with a reset before each."""
    net = t5()
    parts = [transformers.StaticCache(config=net.config, max_cache_len=length) for length in (8, 5)]
    cache = transformers.EncoderDecoderCache(*parts)
    net.forward = graphed(net.forward, dynamic={})
    with torch.no_grad():
        for _ in range(3):
            cache.reset()
            encoded, token = (
                net.encoder(prompt()),
                torch.zeros(2, 1, dtype=torch.long, device=device),
            )
            for _ in range(5):
                found = net(
                    encoder_outputs=encoded,
                    decoder_input_ids=token,
                    past_key_values=cache,
                    use_cache=True,
                )
                yield found.logits, list(cache.is_updated.values())
                token = found.logits[:, -1:].argmax(-1)


@program(programs)
def t5_generates(graphed: Wrap) -> Steps:
    """Generates from other inputs."""
    net = t5()
    net.forward = graphed(net.forward, dynamic={})
    for _ in range(3):
        yield net.generate(prompt(), **GREEDY)


@program(programs, graphs=True)
def whisper_encodes(graphed: Wrap) -> Steps:
    """Encodes features of sound."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    more = {
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "num_mel_bins": 8,
    }
    net = made("WhisperModel", "WhisperConfig", **sizes, **more, **TOKENS, max_source_positions=10)
    g = graphed(net.get_encoder(), dynamic={})
    with torch.no_grad():
        for _ in range(9):
            yield g(rows(1, 8, 20)).last_hidden_state


@program(programs, graphs=True, tolerance=5e-3)
def vit_classifies(graphed: Wrap) -> Steps:
    """Classifies pictures, in batches of other sizes."""
    g = graphed(made("ViTForImageClassification", "ViTConfig", **SMALL, image_size=8, patch_size=4))
    with torch.no_grad():
        for batch in (2, 2, 3, 2, 4, 4, 3, 2, 1, 4):
            yield g(pixel_values=rows(batch, 3, 8, 8)).logits


@program(programs)
def vit_at_other_resolutions(graphed: Wrap) -> Steps:
    """Interpolates positions for larger pictures."""
    g = graphed(made("ViTModel", "ViTConfig", **SMALL, image_size=8, patch_size=4), dynamic={})
    with torch.no_grad():
        for size in (8, 8, 8, 12, 12, 12, 12, 8, 8):
            yield g(rows(1, 3, size, size), interpolate_pos_encoding=True).pooler_output


@program(programs, tolerance=5e-3)
def clip_compares(graphed: Wrap) -> Steps:
    """Compares pictures with texts, and asks for features by methods of g."""
    text = {**SMALL, "vocab_size": 32, "max_position_embeddings": 8, "eos_token_id": 2}
    config = {
        "text_config": text,
        "vision_config": {**SMALL, "image_size": 8, "patch_size": 4},
        "projection_dim": 8,
    }
    g = graphed(made("CLIPModel", "CLIPConfig", **config))
    with torch.no_grad():
        for batch in (2, 2, 3, 3, 2, 2, 3, 3):
            x, pixels = prompt(5, 2), rows(batch, 3, 8, 8)
            found = g(input_ids=x, pixel_values=pixels)
            yield (
                found.logits_per_image,
                found.text_embeds,
                g.get_image_features(pixels).pooler_output,
            )


@program(programs)
def mistral_slides(graphed: Wrap) -> Steps:
    """Generates past the window of a sliding cache."""
    sizes = {**SMALL, **TOKENS, "num_key_value_heads": 1, "sliding_window": 4}
    net = made("MistralForCausalLM", "MistralConfig", **sizes)
    cache = transformers.StaticCache(config=net.config, max_cache_len=16)
    net.forward = graphed(net.forward, dynamic={})
    for _ in range(3):
        cache.reset()
        yield net.generate(prompt(3), past_key_values=cache, **GREEDY)


@program(programs)
def mixtral_routes(graphed: Wrap) -> Steps:
    """Routes tokens to experts, in batches of other sizes."""
    sizes = {**SMALL, **TOKENS, "num_key_value_heads": 1, "num_local_experts": 4}
    g = graphed(made("MixtralForCausalLM", "MixtralConfig", **sizes))
    with torch.no_grad():
        for batch in (2, 3, 2, 2, 4, 3, 2, 3):
            yield g(prompt(4, batch), use_cache=False).logits


@program(programs, graphs=True)
def embeddings_are_resized(graphed: Wrap) -> Steps:
    """Adds tokens to the vocabulary between calls."""
    net = gpt2()
    g = graphed(net, dynamic={})
    with torch.no_grad():
        for at in range(14):
            if at == 7:
                net.resize_token_embeddings(40, mean_resizing=False)
                net.transformer.wte.weight[32:] = 0.1
            yield g(prompt(), use_cache=False).logits


@program(programs)
def attention_is_exchanged(graphed: Wrap) -> Steps:
    """Switches to another implementation of attention, and asks for the maps then."""
    net = llama()
    g = graphed(net, dynamic={})
    with torch.no_grad():
        for at in range(14):
            if at == 7:
                net.set_attn_implementation("eager")
            found = g(prompt(), use_cache=False, output_attentions=at >= 7)
            yield found.logits, found.attentions if at >= 7 else None


@program(programs)
def logits_of_the_last_token(graphed: Wrap) -> Steps:
    """Asks for logits of some positions, by a number and by a tensor."""
    g = graphed(llama(), dynamic={})
    with torch.no_grad():
        for at in range(12):
            keep: Any = at % 2 + 1 if at < 8 else torch.tensor([0, at % 3], device=device)
            yield g(prompt(), use_cache=False, logits_to_keep=keep).logits


@program(programs)
def probe_of_hidden_states(graphed: Wrap) -> Steps:
    """Reads hidden states by a probe of one's own, below no_grad."""
    g, probe = graphed(llama(), dynamic={}), nn.Linear(16, 2).to(device)
    for _ in range(8):
        with torch.no_grad():
            states = g(prompt(), use_cache=False, output_hidden_states=True).hidden_states[-1]
        probe.zero_grad()
        probe(states).square().mean().backward()
        yield states, probe.weight.grad


@program(programs)
def batches_of_a_tokenizer(graphed: Wrap) -> Steps:
    """Passes a BatchEncoding by keywords, whose parts have other lengths each time."""
    g = graphed(bert("BertModel"))
    with torch.no_grad():
        for length in (4, 6, 4, 5, 4, 6, 6, 4):
            batch = transformers.BatchEncoding({"input_ids": prompt(length)})
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            yield g(**batch).pooler_output


@pytest.mark.parametrize("case", programs, ids=lambda p: p.name)
def test_program(case: Program) -> None:
    check(case)
