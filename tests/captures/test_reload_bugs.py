"""Twelve public bugs of memory that was replaced below a graph, each rebuilt small.

A watch names the tensor of each, in graphs of cgplan, ``torch.cuda.graph`` and ``torch.compile``;
and it names none where the same code writes in place.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import cgplan
from cgplan import GraphWatch
from cgplan.reports.records import StaleRecord

ROWS = 4
WIDTH = 64
Replay = Callable[[Tensor], Tensor]


def weights() -> Tensor:
    return torch.randn(WIDTH, WIDTH)


def parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


# --- the bugs: `breaks` is the code of the thread, `mends` the same in place ----------------------


class DerivedWeight(nn.Module):
    """MLA attention absorbs a weight after loading, and does so anew after each reload."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b = linear()
        self.w_uv = self.kv_b.weight.detach().T.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w_uv

    def breaks(self) -> None:
        self.kv_b.weight.copy_(weights())
        self.w_uv = self.kv_b.weight.detach().T.contiguous()

    def mends(self) -> None:
        self.kv_b.weight.copy_(weights())
        self.w_uv.copy_(self.kv_b.weight.T)


class ShuffledExperts(nn.Module):
    """A kernel wants its weights shuffled, and each reload makes a parameter of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = parameter(weights().flip(0))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.experts

    def breaks(self) -> None:
        self.experts = parameter(weights().flip(0))

    def mends(self) -> None:
        self.experts.copy_(weights().flip(0))


class QuantizedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(weights())
        self.weight_scale = parameter(torch.rand(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.weight_scale)


class TransposedScales(nn.Module):
    """Scales come in the checkpoint's layout, and are transposed after each reload."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(QuantizedLayer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def breaks(self) -> None:
        for layer in self.layers:
            scale = torch.rand(WIDTH, WIDTH)
            layer.weight_scale.data = scale.T.contiguous()

    def mends(self) -> None:
        for layer in self.layers:
            scale = torch.rand(WIDTH, WIDTH)
            layer.weight_scale.copy_(scale.T)


class RecurrentState(nn.Module):
    """The state of linear attention goes to the host in sleep, and wakes up in other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = linear()
        self.register_buffer("conv_state", torch.zeros(ROWS, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.conv_state.copy_(x)
        return self.proj(x) + self.conv_state

    def breaks(self) -> None:
        asleep = self.conv_state.to("cpu", copy=True)
        self.conv_state = asleep.to(self.proj.weight.device)

    def mends(self) -> None:
        asleep = self.conv_state.to("cpu", copy=True)
        self.conv_state.copy_(asleep)


class SwappedAdapter(nn.Module):
    """Another LoRA is chosen, and its tensors take the places of the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = linear()
        self.lora_down = parameter(torch.randn(WIDTH, 16))
        self.lora_up = parameter(torch.randn(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) + x @ self.lora_down @ self.lora_up

    def breaks(self) -> None:
        self.lora_up = parameter(torch.randn(16, WIDTH))

    def mends(self) -> None:
        self.lora_up.copy_(torch.randn(16, WIDTH))


class ResetCache(nn.Module):
    """The next request starts with a KV cache of zeros, which is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = linear()
        self.register_buffer("kv_cache", torch.zeros(16, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        slots = self.kv_cache[:ROWS]
        slots.copy_(x)
        return self.proj(x) + slots

    def breaks(self) -> None:
        self.kv_cache = torch.zeros_like(self.kv_cache)

    def mends(self) -> None:
        self.kv_cache.zero_()


class GrownWorkspace(nn.Module):
    """Kernels share a workspace by name, and a larger call has it made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = linear()
        self.workspaces = {"gemm": torch.zeros(16, WIDTH)}

    def forward(self, x: Tensor) -> Tensor:
        scratch = self.workspaces["gemm"][:ROWS]
        scratch.copy_(x)
        return self.proj(x) + scratch

    def breaks(self) -> None:
        self.workspaces["gemm"] = torch.zeros(32, WIDTH)

    def mends(self) -> None:
        self.workspaces["gemm"][:8].copy_(torch.randn(8, WIDTH))  # it has room for the largest call


class LongerRotary(nn.Module):
    """A longer input has the table of angles registered anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sin_cos", torch.zeros(32, WIDTH), persistent=False)
        self.sin_cos[:16].copy_(torch.randn(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.sin_cos[:ROWS]

    def breaks(self) -> None:
        self.register_buffer("sin_cos", torch.randn(64, WIDTH), persistent=False)

    def mends(self) -> None:
        self.sin_cos.copy_(torch.randn(32, WIDTH))


class AssignedState(nn.Module):
    """``load_state_dict(assign=True)`` takes the tensors of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def _checkpoint(self) -> dict[str, Tensor]:
        return {name: torch.randn_like(value) for name, value in self.state_dict().items()}

    def breaks(self) -> None:
        self.load_state_dict(self._checkpoint(), assign=True)

    def mends(self) -> None:
        self.load_state_dict(self._checkpoint())


class OffloadedWeights(nn.Module):
    """``.to()``, ``.half()`` and offloading all give each parameter the memory of a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = linear()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.proj(x)
        return found

    def breaks(self) -> None:
        self._apply(lambda weight: weight.to("cpu", copy=True).to(weight.device, copy=True))

    def mends(self) -> None:
        offloaded = self.proj.weight.to("cpu", copy=True)
        self.proj.weight.copy_(offloaded)


class UntiedHead(nn.Module):
    """A checkpoint with both weights gives the head its own memory, although it was tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.head = linear()
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x @ self.embed.weight)
        return found

    def breaks(self) -> None:
        loaded = weights()
        self.embed.weight.copy_(loaded)
        self.head.weight = parameter(loaded + 1)

    def mends(self) -> None:
        self.embed.weight.copy_(weights())


class DroppedInput(nn.Module):
    """A mask is made for the capture, and nobody keeps it for the replays."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = linear()
        self.inputs = {"mask": torch.rand(ROWS, WIDTH)}

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) * self.inputs["mask"]

    def breaks(self) -> None:
        self.inputs.clear()

    def mends(self) -> None:
        self.inputs["mask"].copy_(torch.rand(ROWS, WIDTH))


class Bug(NamedTuple):
    name: str
    thread: str
    model: Any
    path: str


GITHUB = "https://github.com"
VLLM = f"{GITHUB}/vllm-project/vllm/pull"
SGLANG = f"{GITHUB}/sgl-project/sglang"
BUGS = (
    Bug("derived_weight", f"{VLLM}/48251", DerivedWeight, "model.w_uv"),
    Bug("shuffled_experts", f"{VLLM}/40390", ShuffledExperts, "model.experts"),
    Bug(
        "transposed_scales",
        f"{GITHUB}/vllm-project/vllm-ascend/pull/13902",
        TransposedScales,
        "model.layers[*].weight_scale",
    ),
    Bug("sleep_and_wake", f"{SGLANG}/pull/27140", RecurrentState, "model.conv_state"),
    Bug(
        "swapped_adapter",
        f"{GITHUB}/chengzeyi/stable-fast/issues/143",
        SwappedAdapter,
        "model.lora_up",
    ),
    Bug("reset_cache", f"{GITHUB}/infinigence/ApxInf/pull/89", ResetCache, "model.kv_cache"),
    Bug(
        "grown_workspace",
        f"{GITHUB}/flashinfer-ai/flashinfer/issues/4398",
        GrownWorkspace,
        "model.workspaces.gemm",
    ),
    Bug("longer_rotary", f"{SGLANG}/issues/29216", LongerRotary, "model.sin_cos"),
    Bug(
        "assigned_state",
        f"{GITHUB}/pytorch/pytorch/issues/129362",
        AssignedState,
        "model.layers[*].weight",
    ),
    Bug("offloaded_weights", f"{SGLANG}/pull/23664", OffloadedWeights, "model.proj.weight"),
    Bug("untied_head", f"{VLLM}/51665", UntiedHead, "model.head.weight"),
    Bug(
        "dropped_input",
        f"{GITHUB}/pytorch/pytorch/pull/174649",
        DroppedInput,
        "model.inputs.mask",
    ),
)


# --- the ways to capture --------------------------------------------------------------------------


def by_cgplan(model: nn.Module, device: str) -> Replay:
    runner = cgplan.capture(
        model,
        {"x": cgplan.Input(shape=("num_tokens", WIDTH), dtype="float32", pad=0)},
        compilation={"cudagraph_capture_sizes": [ROWS], "address_check": "off", "verify": "off"},
        device=device,
    )
    return lambda x: runner(x=x)


def by_torch(model: nn.Module, device: str) -> Replay:
    static = torch.zeros(ROWS, WIDTH, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(static)

    def replay(x: Tensor) -> Tensor:
        static.copy_(x)
        graph.replay()
        return output

    return replay


def by_inductor(model: nn.Module, device: str) -> Replay:
    compiled = torch.compile(model, mode="reduce-overhead")

    def replay(x: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        found: Tensor = compiled(x)
        return found

    for _ in range(3):  # the first one warms up, the second one records
        replay(torch.zeros(ROWS, WIDTH, device=device))
    return replay


WAYS = [
    pytest.param((by_cgplan, "cpu"), id="cgplan-tape"),
    pytest.param((by_cgplan, "cuda"), id="cgplan", marks=pytest.mark.gpu),
    pytest.param((by_torch, "cuda"), id="torch.cuda.graph", marks=pytest.mark.gpu),
    pytest.param((by_inductor, "cuda"), id="reduce-overhead", marks=pytest.mark.gpu),
]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[tuple[Callable[..., Replay], str]]:
    torch.manual_seed(0)
    if request.param[0] is by_inductor:
        torch._dynamo.reset()
    yield request.param
    if request.param[0] is by_inductor:
        torch._dynamo.reset()
    gc.collect()


def stale_ones(watch: GraphWatch) -> tuple[StaleRecord, ...]:
    gc.collect()
    return watch.changed().stale


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_watch_names_what_was_replaced_and_nothing_that_was_written_in_place(
    bug: Bug, way: tuple[Callable[..., Replay], str]
) -> None:
    capture, device = way
    on_device = torch.device(device)
    with on_device:
        model = bug.model().eval().requires_grad_(False)
    with torch.no_grad(), cgplan.watch({"model": model}, operators=True) as watch:
        replay = capture(model, device)
        before = watch.baseline()
        captured = [graph.name for graph in before.graphs if graph.nodes]
        assert len(captured) == 1
        assert not before.stale

        with on_device:
            model.mends()
        assert not stale_ones(watch)
        x = torch.randn(ROWS, WIDTH, device=device)
        torch.testing.assert_close(replay(x), model(x), rtol=1e-4, atol=1e-4)
        assert not stale_ones(watch)

        with on_device:
            model.breaks()
        found = stale_ones(watch)  # several, where the allocator gave a part of the memory away
        assert {part.name for part in found} == {bug.path}
        for part in found:
            assert part.pointers >= 1
            assert list(part.graphs) == captured
        assert [graph.name for graph in watch.check().graphs if graph.nodes] == captured
