"""``cgplan.graphed``: what it infers, what it proves of padding, and how it stands in for a model."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import pickle
import weakref
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from typer.testing import CliRunner

import cgplan
from cgplan.backends import GraphBackend
from cgplan.cli.main import app
from cgplan.errors import (
    CgplanError,
    ConfigError,
    DispatchMissError,
    InputError,
    ModelError,
    NumbersError,
    OutputShapeError,
)

Point = namedtuple("Point", ("x", "y"))


@dataclass(frozen=True)
class Scene:
    points: Point
    labels: list[Tensor]
    scale: float = 2.0


@cgplan.graphed
def doubled(x: Tensor) -> Tensor:
    return x * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.note = "a note"

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.inner(x) * scale


class Counting(nn.Module):
    """Counts its calls, and adds the count."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + self.calls


@pytest.fixture
def net(backend: GraphBackend) -> Net:
    return Net().to(backend.device).eval()


def rows(backend: GraphBackend, count: int, *inner: int) -> Tensor:
    return torch.randn(count, *(inner or (4,)), device=backend.device)


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def sizes(g: Any) -> set[int]:
    return {key.num_tokens for runner in g.runners for _, key in runner.plan.keys}


# --- calls ------------------------------------------------------------------------------------------------------------


def test_two_lines_to_the_first_replay(backend: GraphBackend, net: Net) -> None:
    g = cgplan.graphed(net)
    kept = []
    for count in (3, 1, 4, 20, 2, 5, 3):
        x = rows(backend, count)
        kept.append((g(x), net(x)))
    for found, wanted in kept:  # copies, which later calls leave alone
        close(found, wanted)
        assert not found.requires_grad
    assert sizes(g) == {1, 2, 4, 8, 32}, "graphs come along where buffers grow"
    assert not g.runners[0].stats.eager
    assert "detached" in g.explain()
    assert g.report.records


def test_sizes_and_what_is_larger(backend: GraphBackend, net: Net) -> None:
    g = cgplan.graphed(net, sizes=[4, 1])
    for count in (3, 1, 9):
        x = rows(backend, count)
        close(g(x), net(x))
    assert sizes(g) == {1, 4}
    assert sum(g.runners[0].stats.eager.values()) == 1
    assert "1 calls ran eagerly: larger than the largest capture size" in g.explain()
    strict = cgplan.graphed(net, max_size=6, compilation={"on_miss": "error"})
    close(strict(x[:5]), net(x[:5]))
    assert sizes(strict) == {6}
    with pytest.raises(DispatchMissError):
        strict(x)


def test_the_first_batch_may_be_too_large(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net, sizes=[2]), rows(backend, 5)
    close(g(x), net(x))
    close(g(x[:1]), net(x[:1]))
    assert sizes(g) == {2}


def test_structures_go_in_and_come_out(backend: GraphBackend) -> None:
    def model(scene: Scene, extra: dict[str, Any], *more: Tensor, name: str | None = None) -> Any:
        x, y = scene.points
        return {
            "scene": Scene(Point(x * scene.scale, y + more[0]), [label + 1 for label in scene.labels], 3.0),
            "same": (name, [extra["deep"][0]["z"] - 1, 7], None),
        }

    g = cgplan.graphed(model)
    for count in (3, 2):
        x, y, z = (rows(backend, count) for _ in range(3))
        labels = [torch.arange(count, device=backend.device), x[:, 0]]
        found = g(Scene(Point(x, y), labels), {"deep": ({"z": z},)}, y, name="n")
        assert type(found["scene"]) is Scene
        assert type(found["scene"].points) is Point
        assert (found["scene"].scale, found["same"][0], found["same"][1][1], found["same"][2]) == (3.0, "n", 7, None)
        close(list(found["scene"].points), [x * 2, y * 2])
        close(found["scene"].labels, [label + 1 for label in labels])
        close(found["same"][1][0], z - 1)
    assert len(g.runners) == 1


def test_outputs_of_transformers_come_out(backend: GraphBackend) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def model(x: Tensor, mask: Tensor | None = None) -> Any:
        return outputs.BaseModelOutputWithPooling(
            last_hidden_state=x * 2, pooler_output=None if mask is None else mask + x
        )

    g, x = cgplan.graphed(model), rows(backend, 3)
    for mask in (x, None):
        found, wanted = g(x, mask=mask), model(x, mask)
        assert type(found) is type(wanted)
        assert found.keys() == wanted.keys()
        close(found.to_tuple(), wanted.to_tuple())


def test_positional_and_keyword_arguments_are_one_kind(backend: GraphBackend) -> None:
    g = cgplan.graphed(lambda a, b, c=1.0: a - 2 * b + c)
    a, b = rows(backend, 3), rows(backend, 3)
    for found in (g(a, b), g(a, b=b), g(b=b, a=a), g(a, a * 0 + b)):
        close(found, a - 2 * b + 1)
    close(g(b=a, a=a), a - 2 * a + 1)
    assert len(g.runners) == 1
    with pytest.raises(TypeError):
        g(a)


def test_other_constants_are_other_kinds(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net), rows(backend, 2)
    for scale in (1, True, 1.0, 2.5, None):
        close(g(x, scale or 0.0), net(x, scale or 0.0))
    assert len(g.runners) == 5
    close(g(x.to(x.device), scale=2.5), net(x, 2.5))
    assert len(g.runners) == 5


def test_an_object_is_known_by_identity_and_its_tensors_are_state(backend: GraphBackend) -> None:
    class Cache:
        def __init__(self) -> None:
            self.total = torch.zeros(4, device=backend.device)

    def model(x: Tensor, cache: Cache) -> Tensor:
        cache.total.add_(1)
        return x + cache.total

    g, cache, x = cgplan.graphed(model, dynamic={}), Cache(), rows(backend, 2)
    for turn in (1, 2, 3):
        close(g(x, cache), x + turn)
    assert cache.total.tolist() == [3] * 4
    close(g(x, Cache()), x + 1)
    assert len(g.runners) == 2
    with pytest.raises(InputError, match="ndarray"):
        g(x, x.cpu().numpy())


@pytest.mark.parametrize(
    "wrong", [{"max_graphs": 0}, {"compilation": {"cudagraph_mod": "FULL"}}, {"pad": {"x": "last"}}]
)
def test_wrong_settings_are_refused_at_once(backend: GraphBackend, net: Net, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        cgplan.graphed(net, **wrong)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripts_and_builtins(backend: GraphBackend, net: Net) -> None:
    x = rows(backend, 3)
    for model in (torch.relu, torch.jit.trace(net, x)):
        g = cgplan.graphed(model)
        close(g(x[:2]), model(x[:2]))
        assert sizes(g) == {2}


def test_functions_are_decorated(backend: GraphBackend) -> None:
    @cgplan.graphed(sizes="powers_of_two", max_size=8)
    def policy(obs: Tensor) -> Tensor:
        """Acts."""
        return obs.tanh()

    x = rows(backend, 3)
    close(policy(x), x.tanh())
    assert (policy.__name__, policy.__doc__) == ("policy", "Acts.")
    assert list(inspect.signature(policy).parameters) == ["obs"]
    assert sizes(policy) == {4}


# --- what varies ------------------------------------------------------------------------------------------------------


def test_inputs_that_disagree_are_named(backend: GraphBackend) -> None:
    g = cgplan.graphed(lambda a, b: a.sum() + b)
    with pytest.raises(InputError, match="'a' and 'b' disagree in dimension 0: 3 and 5"):
        g(rows(backend, 3), rows(backend, 5))
    named = cgplan.graphed(lambda a, b: a + b, dynamic={"a": {0: "batch"}, "b": {0: "batch"}})
    with pytest.raises(InputError, match="'b' is a batch of batch = 5, but 'a' of 3"):
        named(rows(backend, 3), rows(backend, 5))


def test_inputs_beside_the_batch_are_fixed(backend: GraphBackend) -> None:
    def model(x: Tensor, y: Tensor, table: Tensor, time: Tensor, one: Tensor) -> tuple[Tensor, Tensor]:
        return x * y + table[0] + time + one, table * 2

    g = cgplan.graphed(model)
    table, time, one = rows(backend, 7), torch.tensor(3.0, device=backend.device), rows(backend, 1)
    for count in (3, 2):
        x, y = rows(backend, count), rows(backend, count)
        close(g(x, y, table, time, one), model(x, y, table, time, one))
    assert len(g.runners) == 1
    assert "output 1: [7, 4] (fixed)" in g.explain()
    close(g(x, y, table[:5], time, one), model(x, y, table[:5], time, one))
    assert len(g.runners) == 2


@pytest.mark.parametrize("kind", ["cgplan", "torch"])
def test_two_dimensions(backend: GraphBackend, kind: str) -> None:
    def pooled(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights = mask / mask.sum(1, keepdim=True).clamp(min=1)
        return (x * weights[..., None]).sum(1), x + 1

    batch, length = (
        (cgplan.Dim("batch", max=4), cgplan.Dim("length", max=16, multiple_of=4))
        if kind == "cgplan"
        else (torch.export.Dim("batch", max=4), torch.export.Dim("length", min=2, max=16))
    )
    g = cgplan.graphed(pooled, dynamic={"x": {0: batch, 1: length}, "mask": {0: "batch", 1: "length"}}, max_graphs=6)
    for count, long in ((3, 7), (1, 16), (4, 3), (2, 12)):
        x, mask = rows(backend, count, long, 4), torch.ones(count, long, dtype=torch.int64, device=backend.device)
        close(g(x, mask), pooled(x, mask))
    assert not g.runners[0].stats.eager
    assert "output 0: [batch, 4]" in g.explain()
    assert "output 1: [batch, length, 4]" in g.explain()


def test_a_text_encoder_in_batch_and_length(backend: GraphBackend) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    bert = transformers.BertModel(config).to(backend.device).eval()
    shape = {0: cgplan.Dim("batch", max=4), 1: cgplan.Dim("length", max=32, multiple_of=8)}
    g = cgplan.graphed(bert, dynamic={"input_ids": shape, "attention_mask": shape})
    for count, length in ((3, 11), (4, 32), (1, 5), (2, 16)):
        ids = torch.randint(1, 64, (count, length), device=backend.device)
        mask = torch.ones_like(ids)
        mask[-1, length // 2 + 1 :] = 0
        found, wanted = g(ids, attention_mask=mask), bert(ids, attention_mask=mask)
        assert type(found) is type(wanted)
        for name in wanted:
            assert found[name].shape == wanted[name].shape
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-3)
    boxes = {(key.num_tokens, *key.sizes) for _, key in g.runners[0].plan.keys}
    assert boxes == {(4, 16), (4, 32), (1, 8), (2, 16)}
    with pytest.raises(NumbersError, match="depends on padding of input_ids, where length = 9 is padded to 16"):
        cgplan.graphed(bert, dynamic={"input_ids": shape})(ids[:1, :1].repeat(3, 11))


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Mistral"])
def test_generate_of_transformers_by_a_static_cache(
    backend: GraphBackend, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Mistral's cache slides: what it does depends on a number of Python, so the model's own code runs."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 64}
    if family != "GPT2":
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 32}
    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    slides = {"sliding_window": 8} if family == "Mistral" else {}
    config = getattr(transformers, f"{family}Config")(max_position_embeddings=64, **sizes, **ends, **slides)
    model = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(config)
    model.to(backend.device).eval()
    prompts = [torch.randint(2, 64, (2, length), device=backend.device) for length in (9, 5, 9, 3)]
    settings = {"max_new_tokens": 12, "do_sample": False, "disable_compile": True}
    wanted = [model.generate(prompt, **settings) for prompt in prompts]
    model.forward = g = cgplan.graphed(model.forward, dynamic={})
    cache = transformers.StaticCache(config=config, max_cache_len=21)  # with room for one run of a prompt
    for prompt, tokens in zip(prompts, wanted, strict=True):
        cache.reset()
        assert torch.equal(model.generate(prompt, past_key_values=cache, **settings), tokens)
    replays = [runner.stats.replays.total() for runner in g.runners]
    if family != "Mistral":
        assert replays == [44, 2, 1, 1], "one graph for all steps behind prompts"
    else:
        assert sum(replays) == 0
        assert "arguments.past_key_values.layers[0].cumulative_length_int" in caplog.text
        assert "calls ran eagerly: no graph could be captured with its StaticCache" in g.explain()


def test_a_beam_search_binds_other_tensors_in_a_cache(backend: GraphBackend, caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=32, vocab_size=64,
        bos_token_id=1, eos_token_id=5, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(backend.device).eval()
    prompts = [torch.randint(6, 64, (2, length), device=backend.device) for length in (9, 5, 9)]
    settings = {"max_new_tokens": 12, "do_sample": False, "disable_compile": True, "num_beams": 2}
    wanted = [model.generate(prompt, **settings) for prompt in prompts]
    model.forward = g = cgplan.graphed(model.forward, dynamic={})
    cache = transformers.StaticCache(config=config, max_cache_len=32)
    for prompt, tokens in zip(prompts, wanted, strict=True):
        cache.reset()
        assert torch.equal(model.generate(prompt, past_key_values=cache, **settings), tokens)
    assert "calls ran eagerly: an argument holds other tensors than at the capture" in g.explain()
    assert len([line for line in caplog.messages if "runs the model's own code" in line]) == 1


def test_indices_may_not_point_behind_a_batch_that_is_cut_for_the_proof(backend: GraphBackend) -> None:
    def gathered(atoms: Tensor, edges: Tensor) -> Tensor:
        return torch.zeros_like(atoms).index_add(0, edges[1], atoms[edges[0]]) * 0 + atoms

    dims = {"atoms": {0: cgplan.Dim("atoms", max=4)}, "edges": {1: cgplan.Dim("edges", max=8)}}
    g = cgplan.graphed(gathered, dynamic=dims)
    full = torch.tensor([[3, 0, 1], [0, 3, 2]], device=backend.device)
    with pytest.raises(InputError, match="no padding can be tried for atoms"):
        g(rows(backend, 4), full)
    x = rows(backend, 3)
    close(g(x, full.clamp(max=2)), x)
    x = rows(backend, 4)
    close(g(x, full), x)


def test_nothing_varies_with_an_empty_dynamic(backend: GraphBackend) -> None:
    def centred(x: Tensor) -> Tensor:
        return x - x.mean(0)

    g = cgplan.graphed(centred, dynamic={})
    for count in (3, 2, 3):
        x = rows(backend, count)
        close(g(x), centred(x))
    assert sizes(g) == {2, 3}


def test_wrong_dynamic(backend: GraphBackend) -> None:
    with pytest.raises(ConfigError, match="no dimension 7"):
        cgplan.graphed(lambda x: x, dynamic={"x": {7: "batch"}})(rows(backend, 2))
    with pytest.raises(ConfigError, match="names no dimension"):
        cgplan.graphed(lambda x: x, dynamic={"x": {0: torch.export.Dim.AUTO}})
    with pytest.raises(ConfigError, match="batch has a Dim, and sizes"):
        cgplan.graphed(lambda x: x, sizes=[2], dynamic={"x": {0: cgplan.Dim("batch", max=4)}})(rows(backend, 2))
    with pytest.raises(ConfigError, match="dynamic names 'y'"):
        cgplan.graphed(lambda x: x, dynamic={"y": {0: "batch"}})


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        lambda x, mask: x + x.mean(0),
        lambda x, mask: x / len(x),
        lambda x, mask: x - x.max(0).values,
        lambda x, mask: (x + 1).softmax(0),
        lambda x, mask: x.flip(0),
    ],
    ids=["mean", "count", "max", "softmax", "flip"],
)
def test_padding_that_reaches_real_rows_is_refused(backend: GraphBackend, model: Any) -> None:
    x = rows(backend, 3).abs()
    with pytest.raises(NumbersError, match=r"row \d of output 0 depends on padding of x") as caught:
        cgplan.graphed(model)(x, torch.ones(3, dtype=torch.int64, device=backend.device))
    assert "pad={name: value}" in str(caught.value)


def test_a_leak_names_its_input_alone(backend: GraphBackend) -> None:
    g = cgplan.graphed(lambda a, b: a + b.amax(0) * 0 + (b.amax(0) > 1e6))
    with pytest.raises(NumbersError, match="row 0 of output 0 depends on padding of b, where"):
        g(rows(backend, 3).abs(), rows(backend, 3).abs())


def test_pad_names_the_value_that_is_ignored(backend: GraphBackend) -> None:
    def largest(x: Tensor) -> Tensor:
        return x - x.max(0).values

    g = cgplan.graphed(largest, pad={"x": float("-inf")})
    for x in (rows(backend, 3), -rows(backend, 3).abs() - 1):
        close(g(x), largest(x))
    with pytest.raises(NumbersError):
        cgplan.graphed(largest, pad={"x": 100.0})(x)


def test_a_length_without_a_mask_is_refused(backend: GraphBackend) -> None:
    g = cgplan.graphed(lambda x: x.mean(1), dynamic={"x": {0: "batch", 1: "length"}})
    with pytest.raises(NumbersError, match="length = 5 is padded to 8"):
        g(rows(backend, 3, 5))


def test_masked_padding_may_be_a_product(backend: GraphBackend) -> None:
    """NaN times a mask of 0 is NaN; padding never holds it."""
    g = cgplan.graphed(lambda x, mask: (x * mask).sum(0), dynamic={"x": {0: "n"}, "mask": {0: "n"}})
    x, mask = rows(backend, 3), torch.ones(3, 1, dtype=torch.int64, device=backend.device)
    close(g(x, mask), x.sum(0))
    assert "NaN in x reaches real rows" in g.explain()


def test_floats_that_become_indices_meet_no_extremes(backend: GraphBackend) -> None:
    table = torch.arange(10.0, device=backend.device)
    g = cgplan.graphed(lambda x: table[x.long()])
    x = torch.tensor([3.0, 9.0, 1.0], device=backend.device)
    close(g(x), x)
    assert "checks indices" in g.explain()


def test_a_model_that_fails_on_padding(backend: GraphBackend) -> None:
    other = rows(backend, 3)
    with pytest.raises(ModelError, match="batch = 3 is padded to batch = 4"):
        cgplan.graphed(lambda x: x + other)(rows(backend, 3))

    def broken(x: Tensor) -> Tensor:
        raise ValueError("the user's")

    with pytest.raises(ValueError, match="the user's"):
        cgplan.graphed(broken)(rows(backend, 3))


def test_outputs_whose_shapes_do_not_follow_are_refused(backend: GraphBackend) -> None:
    def pairs(x: Tensor) -> Tensor:
        return (x[:, None] - x[None]).flatten(0, 1)

    with pytest.raises(OutputShapeError, match="product of sizes"):
        cgplan.graphed(pairs)(rows(backend, 3))
    with pytest.raises(OutputShapeError, match="structure"):
        cgplan.graphed(lambda x: (x, len(x)))(rows(backend, 3))
    with pytest.raises(OutputShapeError, match="cannot be reached"):
        cgplan.graphed(lambda x: Counting())(rows(backend, 3))


def test_outputs_of_several_sizes(backend: GraphBackend) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.t() + 1, x.repeat_interleave(2, 0), x.new_ones(3) + 1

    g = cgplan.graphed(model)
    for count in (3, 5, 1):
        x = rows(backend, count)
        close(g(x), model(x))
    with pytest.raises(NumbersError, match="row 3 of output 0"):  # the graph's last row is not behind the real ones
        cgplan.graphed(lambda x: nn.functional.pad(x, (0, 0, 0, 1)))(rows(backend, 3))


def test_the_model_and_random_numbers_are_as_before_the_proof(backend: GraphBackend) -> None:
    model = Counting().to(backend.device).eval()
    g, x = cgplan.graphed(model), rows(backend, 3)
    torch.manual_seed(3)
    wanted = torch.randn(2, device=backend.device)
    torch.manual_seed(3)
    for turn in (1, 2, 3):
        close(g(x[: 4 - turn]), x[: 4 - turn] + turn)
    assert model.calls == 3
    assert torch.equal(torch.randn(2, device=backend.device), wanted)


def test_random_models_are_compared_padded_alone(backend: GraphBackend) -> None:
    g = cgplan.graphed(lambda x: x + torch.rand_like(x))
    x = rows(backend, 3)
    assert not torch.equal(g(x), g(x))
    assert "draws random numbers" in g.explain()


def test_padding_that_is_written_into_state_is_said(backend: GraphBackend, caplog: pytest.LogCaptureFixture) -> None:
    class Slots(nn.Module):
        slots: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("slots", torch.full((9,), 7.0, device=backend.device))

        def forward(self, x: Tensor, slot: Tensor) -> Tensor:
            self.slots.index_copy_(0, slot, x)
            return self.slots[slot]

    model = Slots().eval()
    x, slot = torch.ones(3, device=backend.device), torch.tensor([4, 2, 5], device=backend.device)
    g = cgplan.graphed(model)
    close(g(x, slot), x)
    assert "padding is written into the model's state: slots" in g.explain()
    assert "written into the model's state" in caplog.text
    caplog.clear()
    quiet = cgplan.graphed(model, pad={"slot": 8}, dynamic={})
    close(quiet(x, slot), x)
    assert not caplog.text


# --- a stand-in for a model -------------------------------------------------------------------------------------------


def test_a_forward_may_be_exchanged(backend: GraphBackend, net: Net, caplog: pytest.LogCaptureFixture) -> None:
    """As with ``torch.compile``: the module keeps it as its forward, not as a module inside."""
    x = torch.randn(3, 4, device=backend.device)
    wanted = net(x)
    net.forward = g = cgplan.graphed(net.forward)
    close(net(x), wanted)
    assert g.runners[0].stats.calls == 1
    assert net.inner in set(net.modules())
    assert list(inspect.signature(net.forward).parameters) == ["x", "scale"]
    close(copy.deepcopy(net)(x), wanted)
    net.double().float()  # other memory
    net.inner.bias.data.add_(1)
    wanted = wanted + 1
    close(net(x), wanted)
    assert "captured again: " in caplog.text
    close(net.train()(x), wanted)
    assert "training mode" in g.explain()


def test_inside_of_torch_compile(backend: GraphBackend, net: Net) -> None:
    """Dynamo leaves it as it is: what is around it is compiled, and the graphs run."""
    x = torch.randn(3, 4, device=backend.device)
    g = cgplan.graphed(net)
    compiled = torch.compile(nn.Sequential(nn.ReLU(), g, nn.ReLU()), backend="eager")
    with torch.no_grad():
        for _ in range(2):
            close(compiled(x), net(x.relu()).relu())
    assert g.runners[0].stats.replays.total() == 2


def test_it_has_what_the_model_has(backend: GraphBackend, net: Net) -> None:
    g = cgplan.graphed(net)
    assert isinstance(g, nn.Module)
    assert g.note == "a note"
    assert g.inner is net.inner
    assert g.state_dict().keys() == net.state_dict().keys()
    assert nn.Sequential(g).state_dict().keys() == nn.Sequential(net).state_dict().keys()
    assert [id(p) for p in g.parameters()] == [id(p) for p in net.parameters()]
    assert list(inspect.signature(g.forward).parameters) == ["x", "scale"]
    with pytest.raises(AttributeError):
        _ = g.nonsense
    seen = list[Tensor]()
    with g.register_forward_hook(lambda module, args, output: seen.append(output)):
        close(g(rows(backend, 2)), seen[0])
    state = {name: value * 2 for name, value in net.state_dict().items()}
    x = rows(backend, 2)
    g(x)
    g.load_state_dict(state)
    close(g(x), net(x))


def test_moving_it_captures_again(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net), rows(backend, 3)
    close(g(x), net(x))
    assert g.to(torch.float64) is g
    assert not g.runners
    close(g(x.double()), net(x.double()))
    assert g.runners
    g.note = "another"
    assert net.note == "another"
    assert not g.runners


def test_training_mode_runs_eagerly_and_says_so(
    backend: GraphBackend, net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    g, x = cgplan.graphed(net), rows(backend, 3)
    g(x)
    nn.Sequential(g).train()
    assert net.training
    for _ in range(2):
        assert g(x).requires_grad
    assert caplog.text.count("training mode") == 1
    assert "2 calls ran eagerly: the model is in training mode" in g.explain()
    g.eval()
    assert not g(x).requires_grad


def test_gradients_run_eagerly(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net), rows(backend, 3).requires_grad_()
    g(x).sum().backward()
    assert x.grad is not None
    assert not g.runners
    with torch.no_grad():
        close(g(x), net(x))
    assert len(g.runners) == 1
    assert "1 calls ran eagerly: a tensor argument asks for a gradient" in g.explain()


@pytest.mark.parametrize("odd", [torch.zeros(()), torch.zeros(0, 4), torch.zeros(2, 4, dtype=torch.complex64)])
def test_other_tensors_run_eagerly(backend: GraphBackend, odd: Tensor) -> None:
    g, odd = cgplan.graphed(lambda x: x + 1), odd.to(backend.device)
    close(g(odd), odd + 1)
    assert not g.runners
    assert "1 calls ran eagerly" in g.explain()


def test_copies_and_pickles_have_no_graphs(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net, sizes=[4], max_graphs=3), rows(backend, 3)
    g(x)
    for other in (copy.deepcopy(g), pickle.loads(pickle.dumps(g))):
        assert not other.runners
        assert other.inner is not net.inner
        close(other(x), net(x))
        assert sizes(other) == {4}
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    with pytest.raises(CgplanError, match="has no graphs"):
        _ = cgplan.graphed(net).report


def test_autocast_is_part_of_a_call(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net), rows(backend, 3)
    assert g(x).dtype is torch.float32
    with torch.autocast(backend.device.type, torch.bfloat16):
        assert g(x).dtype is torch.bfloat16
    assert g(x).dtype is torch.float32


def test_inside_another_runner_the_model_itself_runs(backend: GraphBackend, net: Net) -> None:
    g = cgplan.graphed(net)
    x = rows(backend, 3)
    g(x)
    outer = cgplan.capture(
        nn.Sequential(g).eval(),
        {"input": cgplan.Input(shape=("num_tokens", 4), dtype="float32", pad=0)},
        compilation={"cudagraph_capture_sizes": [4]},
        device=str(backend.device),
    )
    close(outer(input=x), net(x))
    assert not [warning for warning in outer.report.warnings if "changes" in warning]
    g.recapture()
    close(g(x), net(x))
    close(outer(input=x), net(x))


def test_at_most_max_graphs_and_the_least_used_go(
    backend: GraphBackend, net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    g = cgplan.graphed(net, sizes=[1, 2, 4, 8], max_graphs=3)
    for count in (1, 1, 1, 2, 4, 4, 8, 8, 2):
        x = rows(backend, count)
        close(g(x), net(x))
        assert len(sizes(g)) <= 3
    assert 1 in sizes(g)
    assert caplog.text.count("the least used go") == 1
    for scale in range(5):
        close(g(x, float(scale)), net(x, float(scale)))
        assert sum(len(runner.plan.keys) for runner in g.runners) <= 3
    assert len(g.runners) <= 3


def test_graphs_of_all_kinds_count(backend: GraphBackend, net: Net) -> None:
    g = cgplan.graphed(net, sizes=[1, 2, 4], max_graphs=4, compilation={"capture_policy": "eager"})
    x = rows(backend, 3)
    for scale in (1.0, 2.0, 1.0):
        close(g(x, scale), net(x, scale))
        assert sum(len(runner.plan.keys) for runner in g.runners) <= 4
    assert not any(runner.stats.eager for runner in g.runners)


def test_a_model_that_cannot_be_captured_runs_eagerly_and_is_said(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    def model(x: Tensor) -> Tensor:
        return x * 2 if x[0, 0].item() > 1e9 else x

    g, x = cgplan.graphed(model), rows(backend, 3)
    for _ in range(2):
        close(g(x), x)
    assert not sizes(g)
    assert "not captured" in g.explain()
    assert caplog.text.count("was not captured") == 1
    with pytest.raises(DispatchMissError):
        cgplan.graphed(model, compilation={"on_miss": "error"})(x)


def test_an_example_teaches_ahead_of_calls(backend: GraphBackend, net: Net) -> None:
    x = rows(backend, 3)
    for example in (x, (x,), {"x": x}):
        g = cgplan.graphed(net, example=example, sizes=[2, 4], compilation={"capture_policy": "eager"})
        assert sizes(g) == {2, 4}
        assert "from the example" in g.explain()
        close(g(x), net(x))


def test_the_configuration_is_saved(backend: GraphBackend, net: Net, tmp_path: Path) -> None:
    g, x = cgplan.graphed(net, sizes=[1, 4]), rows(backend, 3)
    wanted = g(x)
    g.save_config(tmp_path / "my.yaml")
    text = (tmp_path / "my.yaml").read_text()
    assert "# x: float32 [batch, 4], from the first call" in text
    assert "padding proven" in text
    assert f"target: {Net.__module__}:Net" in text
    runner = cgplan.capture(net, config=tmp_path / "my.yaml")
    close(runner(x=x), wanted)
    assert runner.plan.capture_sizes == (1, 4)
    cgplan.graphed(lambda x: x + 1, example=(x,)).save_config(tmp_path / "other.yaml")
    assert "# To fill in: model.target" in (tmp_path / "other.yaml").read_text()


class Nested(nn.Module):
    """Asks for more than tensors by name."""

    def forward(self, batch: dict[str, Any], *more: Tensor, scale: Any = None, **named: Tensor) -> Any:
        first, (second, places) = batch["x"], batch["pair"]
        assert type(batch["pair"]) is tuple
        total = first * (scale or 1.0) + second[:, places[0] :] + sum(more)
        return Scene(Point(total, first), [named.get("other", second)]) if batch["whole"] else (total, first)


@pytest.mark.parametrize("whole", [False, True])
def test_a_saved_configuration_calls_as_calls_were(backend: GraphBackend, tmp_path: Path, *, whole: bool) -> None:
    """With constants and nested arguments: the commands take the file as it is, in any order of its inputs."""
    x, y, z = rows(backend, 3), rows(backend, 3), rows(backend, 3)
    args = ({"x": x, "pair": (y, [0, "a"]), "whole": whole}, z)
    g = cgplan.graphed(Nested().eval())
    wanted = g(*args, scale=2.0, other=z)
    g.save_config(tmp_path / "my.yaml")
    values = yaml.safe_load((tmp_path / "my.yaml").read_text())
    values["inputs"] = dict(reversed(values["inputs"].items()))
    values["device"] = str(backend.device)
    (tmp_path / "turned.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    runner = cgplan.capture(config=tmp_path / "turned.yaml")
    named = {"batch.x": x, "batch.pair.0": y, "more.0": z, "other": z}
    assert set(named) == set(values["inputs"])
    close(runner(**named)[:2], [wanted.points.x, wanted.points.y] if whole else wanted)
    run = CliRunner().invoke(app, ["capture", str(tmp_path / "my.yaml")])
    assert run.exit_code == 0, run.output


def test_what_a_file_cannot_say_is_refused(backend: GraphBackend, net: Net, tmp_path: Path) -> None:
    x = rows(backend, 3)
    for given, named in ((Point(x, 1.0), "batch.pair"), ((x, [0], "$x"), "batch.pair.2")):
        g = cgplan.graphed(lambda batch: batch["x"] + batch["pair"][0], example=({"x": x, "pair": given},))
        with pytest.raises(ConfigError, match=f"argument {named} is .*cannot hold"):
            g.save_config(tmp_path / "my.yaml")
    with torch.autocast(backend.device.type, torch.bfloat16):
        g = cgplan.graphed(net, example=(x,))
    with pytest.raises(ConfigError, match="autocast"):
        g.save_config(tmp_path / "my.yaml")
    assert not (tmp_path / "my.yaml").exists()


def test_borrowed_outputs(backend: GraphBackend, net: Net) -> None:
    g = cgplan.graphed(net, outputs="borrow")
    x, y = rows(backend, 3), rows(backend, 3)
    found = g(x)
    g(y)
    close(found, net(y))


def test_calls_in_inference_mode(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net), rows(backend, 3)
    with torch.inference_mode():
        close(g(x), net(x))
    close(g(x), net(x))
    with torch.inference_mode():
        close(g(rows(backend, 3) * 0 + x), net(x))


def test_models_in_half_precision_round_more_and_choose_otherwise(backend: GraphBackend) -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones((), dtype=torch.bfloat16, device=backend.device))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            odd = len(x) & 1  # other numbers in a batch of another size
            first = torch.arange(len(x), device=x.device) == 0
            return x.argmax(1) + odd * first, x.sigmoid() * (1 + odd * 1e-2)

    x = rows(backend, 3)
    assert cgplan.graphed(Greedy().eval())(x)[0].shape == (3,)
    with torch.autocast(backend.device.type, torch.bfloat16):
        assert cgplan.graphed(Greedy().float().eval())(x)[0].shape == (3,)
    with pytest.raises(NumbersError):
        cgplan.graphed(Greedy().float().eval())(x)


def test_what_captures_log(backend: GraphBackend, net: Net, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    cgplan.graphed(net)(rows(backend, 3))
    assert not caplog.text


def test_one_that_is_dropped_frees_its_graphs_at_once(backend: GraphBackend) -> None:
    graphs = cgplan.graphed(nn.Linear(4, 4).to(backend.device).eval())
    graphs(torch.randn(3, 4, device=backend.device))
    held = [weakref.ref(graphs), weakref.ref(graphs.runners[0])]
    gc.disable()
    try:
        del graphs
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


def test_a_short_batch_tells_of_padding_that_a_long_one_hides(backend: GraphBackend) -> None:
    """A first batch of the whole size is cut, so that as much is padded as in any batch there."""
    net = nn.Embedding(20, 16).to(backend.device, torch.bfloat16).eval()
    mean = cgplan.graphed(lambda ids: net(ids).mean(1), dynamic={"ids": {1: "length"}})
    with pytest.raises(NumbersError, match="depends on padding of ids"):
        mean(torch.randint(1, 20, (3, 64), device=backend.device))


def test_large_numbers_of_a_mask_hide_no_difference(backend: GraphBackend) -> None:
    def scores(ids: Tensor) -> Tensor:
        low = torch.full((len(ids), 1), torch.finfo(torch.float32).min, device=ids.device)
        return torch.cat([ids.float().mean(1, keepdim=True), low], 1)

    graphs = cgplan.graphed(scores, dynamic={"ids": {1: "length"}})
    with pytest.raises(NumbersError):
        graphs(torch.full((1, 5), 8, device=backend.device))


def test_outputs_that_count_rows_twice_and_strided_ones(backend: GraphBackend) -> None:
    square = cgplan.graphed(lambda x: x @ x.t())
    for rows in (3, 4, 1, 7):
        x = torch.randn(rows, 2, device=backend.device)
        torch.testing.assert_close(square(x), x @ x.t())
    halved = cgplan.graphed(lambda x: x[::2])
    x = torch.randn(3, 4, device=backend.device)
    torch.testing.assert_close(halved(x), x[::2])
    for _ in range(2):
        with pytest.raises(OutputShapeError, match=r"shape \[1, 4\] for batch = 2, and \[2, 4\]"):
            halved(x[:2])


def test_parameters_that_are_exchanged(backend: GraphBackend) -> None:
    net, x = nn.Linear(4, 4).to(backend.device).eval(), torch.randn(3, 4, device=backend.device)
    graphs = cgplan.graphed(net)
    graphs(x)
    graphs.load_state_dict({name: tensor + 1 for name, tensor in net.state_dict().items()}, assign=True)
    torch.testing.assert_close(graphs(x), net(x))


def test_parts_that_an_argument_has_not(backend: GraphBackend) -> None:
    graphs = cgplan.graphed(lambda point: point.x * 2, dynamic={"point.x": {0: "rows"}})
    with pytest.raises(ConfigError, match=r"names 'point\.x'") as caught:
        graphs(Point(torch.ones(2, device=backend.device), torch.ones(2, device=backend.device)))
    assert "point.0, point.1" in caught.value.remedy
    with pytest.raises(ConfigError, match="the example is a int"):
        cgplan.graphed(nn.Linear(4, 4), example=5)


@pytest.mark.parametrize("settings", [{"splitting_ops": ["aten::relu"]}, {"splitting_modules": ["1"]}], ids=str)
def test_segments_of_a_model(backend: GraphBackend, settings: dict[str, Any]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(backend.device).eval()
    graphs = cgplan.graphed(net, compilation={"cudagraph_mode": "PIECEWISE", **settings})
    for rows in (3, 1, 8):
        x = torch.randn(rows, 4, device=backend.device)
        torch.testing.assert_close(graphs(x), net(x))
    assert not graphs.report.failed
    assert graphs.report.records[0].eager_pieces == 1


def test_a_smaller_batch_is_proven_too(backend: GraphBackend) -> None:
    first_rows = cgplan.graphed(lambda x: (x[:4], x + 1), device=str(backend.device))
    assert first_rows(torch.ones(9, 2, device=backend.device))[0].shape == (4, 2)
    assert first_rows(torch.ones(5, 2, device=backend.device))[0].shape == (4, 2)
    with pytest.raises(OutputShapeError, match=r"output 0 has shape \[3, 2\] for batch = 3, and \[4, 2\]"):
        first_rows(torch.ones(3, 2, device=backend.device))


def test_whole_numbers_in_half_precision_are_compared(backend: GraphBackend) -> None:
    table = torch.randn(50, 32, device=backend.device, dtype=torch.bfloat16)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(table)

        def forward(self, ids: Tensor) -> Tensor:
            return (self.table[ids].cumsum(1) @ self.table.T)[:, -1].argmax(-1)

    g = cgplan.graphed(Last().eval(), dynamic={"ids": {0: "batch", 1: "length"}})
    with pytest.raises(NumbersError, match="of output 0 depends on padding of ids, where length"):
        g(torch.randint(1, 50, (7, 6), device=backend.device))


def test_what_the_forward_writes_into_its_arguments_is_said(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    g = cgplan.graphed(lambda x: x.add_(1), device=str(backend.device))
    x = torch.zeros(3, device=backend.device)
    assert g(x).equal(torch.ones(3, device=backend.device))
    assert not x.any()
    assert "the forward writes into x: graphs write into copies" in g.explain()
    assert "the caller's tensors stay as they are" in caplog.text
