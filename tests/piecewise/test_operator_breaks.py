"""Captures that break at operators by name, without a trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import pytest
import torch
from checks import same
from pieces import Attends, Boom, doubled, open_runner, randn
from torch import Tensor, nn

import cgplan
from cgplan import CaptureError, ConfigError, GraphRunner, eager_break_during_capture
from cgplan.backends import GraphBackend

pytestmark = pytest.mark.usefixtures("quiet_collector")

ATTENTION = "aten::scaled_dot_product_attention"
_LIBRARY = torch.library.Library("broken_at", "FRAGMENT")
_LIBRARY.define("scale_(Tensor(a!) x, float factor) -> ()")
_LIBRARY.define("halves(Tensor x) -> (Tensor, Tensor)")
_LIBRARY.define("explode(Tensor x) -> Tensor")


def _scale(x: Tensor, factor: float) -> None:
    x.mul_(len(x.tolist()) * factor)  # the host: only an eager piece may


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = x.clone()
    return whole[:, :4], whole[:, 4:]


def _explode(x: Tensor) -> Tensor:
    if cgplan.in_breakable_capture():
        raise Boom
    return x + 1


_LIBRARY.impl("scale_", _scale, "CompositeExplicitAutograd")
_LIBRARY.impl("halves", _halves, "CompositeExplicitAutograd")
_LIBRARY.impl("explode", _explode, "CompositeExplicitAutograd")


def broken(
    backend: GraphBackend, model: Callable[..., Any], *ops: str, **compilation: Any
) -> GraphRunner:
    sizes = {"cudagraph_capture_sizes": [4], **compilation}
    return open_runner(backend, model, piecewise="modules", splitting_ops=list(ops), **sizes)


def check(
    backend: GraphBackend, runner: GraphRunner, model: Callable[..., Tensor], rows: int = 4
) -> None:
    for seed in range(3):
        x = randn(backend, rows, 8, seed=seed)
        with torch.no_grad():
            wanted = model(x.clone())
        same(runner(x=x), wanted)


class Heads(nn.Module):
    """Attention inside a function of PyTorch, beside a branch that Dynamo cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.attend(x, x, x, need_weights=False)[0].relu()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["plain", "inference", "autocast"])
def test_attention_alone_is_eager(backend: GraphBackend, kind: str) -> None:
    model = Attends(3).to(backend.device).eval()
    mode: AbstractContextManager[object] = {
        "plain": nullcontext(),
        "inference": torch.inference_mode(),
        "autocast": torch.autocast(backend.device.type, torch.bfloat16),
    }[kind]
    with mode, closing(broken(backend, model, ATTENTION, cudagraph_capture_sizes=[1, 4])) as runner:
        split = runner.report.split
        assert split is not None
        assert (split.route, split.eager) == ("modules", {ATTENTION: 3})
        assert split.captured["aten::addmm"] == 3, "the projections are in graphs"
        assert {(record.graphs, record.eager_pieces) for record in runner.report.records} == {
            (4, 3)
        }
        check(backend, runner, model)
        check(backend, runner, model, rows=1)


@pytest.mark.parametrize("kind", ["plain", "autocast"])
def test_composite_operators_run_under_autocast_as_ever(backend: GraphBackend, kind: str) -> None:
    weight = randn(backend, 8, 8)

    def model(x: Tensor) -> Tensor:
        with torch.autocast(backend.device.type, enabled=False):
            x = torch.einsum("ij,kj->ik", x, weight)
        return torch.einsum("ij,kj->ik", x, weight).relu()

    for op in ("aten::relu", "aten::einsum", "aten::bmm"):
        mode = torch.autocast(backend.device.type, torch.bfloat16, enabled=kind == "autocast")
        with mode, closing(broken(backend, model, op)) as runner:
            check(backend, runner, model)


def test_operators_that_other_functions_call(backend: GraphBackend) -> None:
    model = Heads().to(backend.device).eval()
    with closing(broken(backend, model, ATTENTION, "aten::relu.default")) as runner:
        assert runner.report.split is not None
        assert runner.report.split.eager == {ATTENTION: 1, "aten::relu": 1}
        check(backend, runner, model)


def test_operators_beside_modules_and_functions(backend: GraphBackend) -> None:
    """What an eager piece calls stays in it, and a piece between two operators leaves no mode behind."""
    model = (
        nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8)).to(backend.device).eval()
    )

    @eager_break_during_capture
    def halved(x: Tensor) -> Tensor:
        return (x / 2).softmax(-1)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            x = doubled(self.inner(x.softmax(-1)) + 1)
            return halved(x + 1).softmax(-1) * 3

    mixed = Mixed()
    with closing(broken(backend, mixed, "aten::softmax", splitting_modules=["inner.2"])) as runner:
        assert runner.report.split is not None
        eager = runner.report.split.eager
        assert (eager["aten::softmax"], eager["inner.2"], len(eager)) == (3, 1, 4)
        check(backend, runner, mixed)


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.index_copy_(0, torch.arange(2, device=x.device), x[2:] + 1)
    return y + 1


def by_out(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    z = torch.add(x, 1, out=y)
    return y * z


def custom(x: Tensor) -> Tensor:
    y = x + 1
    torch.ops.broken_at.scale_(y[:, :4], 2.0)
    return y * 2


def in_parts(x: Tensor) -> Tensor:
    first, second = torch.ops.broken_at.halves(x + 1)
    first.mul_(2)
    return first + second + (x * 3)[:, :4]


def viewed(x: Tensor) -> Tensor:
    y = x + 1
    z = y.transpose(0, 1)
    z.mul_(3)
    return y + z.transpose_(0, 1)


@pytest.mark.parametrize(
    ("model", "op", "count"),
    [
        (in_place, "aten::index_copy_", 1),
        (by_out, "aten::add.out", 1),
        (custom, "broken_at::scale_", 1),
        (in_parts, "broken_at::halves", 1),
        (viewed, "aten::transpose", 1),
        (viewed, "aten::transpose_", 1),
    ],
)
def test_writes_views_and_tuples(
    backend: GraphBackend, model: Callable[..., Tensor], op: str, count: int
) -> None:
    with closing(broken(backend, model, op)) as runner:
        assert [record.eager_pieces for record in runner.report.records] == [count]
        check(backend, runner, model)


def test_numbers_of_the_capture_are_pointed_out(backend: GraphBackend) -> None:
    with closing(
        broken(backend, lambda x: x.softmax(-1) + x.relu(), "aten::softmax", "aten::relu")
    ) as runner:
        assert runner.report.warnings == (
            "numbers that are arguments of aten::softmax stay those of the capture",
        )


@pytest.mark.parametrize(
    ("wanted", "said", "near", "policies"),
    [
        (
            "aten::topk",
            "does not occur in the model",
            "aten::tanh",
            ["eager"],
        ),  # otherwise the first batch finds it
        ("aten::scaled_dot_product_atention", "does not exist", ATTENTION, ["eager", "lazy"]),
    ],
)
def test_operators_that_are_not_there(
    backend: GraphBackend, wanted: str, said: str, near: str, policies: list[str]
) -> None:
    model = Attends(1).to(backend.device).eval()
    for policy in policies:
        with pytest.raises(ConfigError, match=f"'{wanted}' {said}") as caught:
            broken(backend, model, ATTENTION, wanted, capture_policy=policy)
        assert near in caught.value.remedy


def test_an_operator_that_fails_leaves_nothing_behind(backend: GraphBackend) -> None:
    with pytest.raises(CaptureError, match="Boom"):
        broken(backend, lambda x: torch.ops.broken_at.explode(x * 2), "broken_at::explode")
    assert torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack() == 0
    assert torch.ones(2).tolist() == [1, 1]
    model = Attends(1).to(backend.device).eval()
    with closing(broken(backend, model, ATTENTION)) as runner:
        check(backend, runner, model)


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "OPT"])
def test_decoders_of_transformers(backend: GraphBackend, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "Llama": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
                  "num_key_value_heads": 1, "vocab_size": 32},
        "GPT2": {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 32, "n_positions": 32},
        "OPT": {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 32,
                "max_position_embeddings": 32, "word_embed_proj_dim": 16},
    }[kind]  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        **sizes, attn_implementation="sdpa", use_cache=False
    )
    torch.manual_seed(0)
    decoder = getattr(transformers, f"{kind}Model")(config).to(backend.device).eval()

    def model(x: Tensor) -> Tensor:
        mask = torch.zeros(
            x.shape[0], 1, 8, 8, device=x.device
        )  # a mask of ours: no question on the host
        places = torch.arange(8, device=x.device).expand(x.shape[0], 8)
        out = decoder(
            inputs_embeds=x.unflatten(1, (8, 16)), attention_mask=mask, position_ids=places
        )
        return out.last_hidden_state  # type: ignore[no-any-return]

    with closing(broken(backend, model, ATTENTION, width=128)) as runner:
        assert [record.eager_pieces for record in runner.report.records] == [3]
        x = randn(backend, 4, 128)
        with torch.no_grad():
            assert torch.equal(runner(x=x), model(x))
