"""The backend contract, on the tape and on CUDA alike: what a graph keeps, what it does not, and its hazards."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import MIB, back_at, capture, host_sync_of, reserved, same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import cgplan
from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.blame import blamed_line
from cgplan.backends.tape import TapeBackend
from cgplan.backends.tape_pool import ALIGNMENT, TapePool
from cgplan.errors import BackendError, CaptureError, HostSyncError

pytestmark = pytest.mark.usefixtures("quiet_collector")


def ramp(*shape: int, device: Any, start: float = 0.0) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), device=device, dtype=torch.float32).reshape(shape) + start


# --- replay equals eager --------------------------------------------------------------------------------------

Forward = Callable[..., Any]
Case = tuple[Forward, list[tuple[tuple[int, ...], torch.dtype]]]
CASES: dict[str, Callable[[], Case]] = {}
F32, I64 = torch.float32, torch.int64


def case(*inputs: tuple[tuple[int, ...], torch.dtype]) -> Callable[[Forward], Forward]:
    """Register a forward over inputs of these shapes and dtypes; whole-number inputs run from 0 to 3."""

    def register(forward: Forward) -> Forward:
        CASES[forward.__name__] = lambda: (forward, list(inputs))
        return forward

    return register


class WithoutFastPath(nn.Module):
    """torch leaves the fused path of its attention modules while a mode watches, as the tape's does: compare like."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        enabled = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return self.inner(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(enabled)


def module_case(name: str, make: Callable[[], nn.Module], *inputs: tuple[tuple[int, ...], torch.dtype]) -> None:
    CASES[name] = lambda: (make().eval(), list(inputs))


@case(((4, 6), F32), ((6, 3), F32))
def matmul_relu(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w) + 1


@case(((4, 6), F32))
def views(x: Tensor) -> Tensor:
    return (x.t().reshape(3, 8)[:, ::2].unsqueeze(0).squeeze(0).permute(1, 0) * 2).contiguous().view(-1)


@case(((4, 6), F32))
def one_element_with_strides(x: Tensor) -> Tensor:
    return x[:1, :1].t().double() + 1


@case(((4, 6), F32))
def chunk_split_unbind(x: Tensor) -> Any:
    a, b = x.chunk(2, dim=1)
    c, d = (x * 2).split([1, 5], dim=1)
    return {"sum": a + b, "parts": [c, d.clone()], "rows": (x + 1).unbind(0), "thirds": torch.tensor_split(x + 2, 3)}


@case(((4, 6), F32))
def topk_sort_max(x: Tensor) -> Any:
    return x.topk(2, dim=1), x.sort(dim=1, descending=True), x.max(dim=1), x.argmax(dim=1), x.kthvalue(3)


@case(((4, 6), F32))
def native_layer_norm(x: Tensor) -> Any:
    return torch.native_layer_norm(x, [6], None, None, 1e-5)


@case(((4, 6), F32))
def reductions(x: Tensor) -> Any:
    return torch.var_mean(x, dim=1), x.sum(), x.mean(0), x.softmax(1), x.logsumexp(1), x.amax(), torch.aminmax(x)


@case(((4, 6), F32))
def empty_tensors(x: Tensor) -> Any:
    none = x[:0] * 2
    return torch.cat([none, x]), none, none.sum(), torch.zeros(0, 6, device=x.device) + none, x.new_empty((0,))


@case(((4, 6), F32))
def complex_and_conj(x: Tensor) -> Any:
    z = torch.view_as_complex(x.reshape(4, 3, 2))
    turned = z.conj() * torch.polar(x.abs()[:, :3], x[:, 3:])
    return turned, z.conj(), turned.conj().imag, torch.view_as_real(turned.conj().resolve_conj()), (-z).conj().real


@case(((4, 6), F32))
def dtypes(x: Tensor) -> Any:
    return x.half(), x.to(torch.bfloat16).float(), x.long(), (x > 0), x.double() * 2, x.to(torch.int8), x.int() // 2


@case(((4, 6), F32), ((4, 6), F32))
def out_variants(x: Tensor, y: Tensor) -> Any:
    given = torch.empty_like(x)
    torch.add(x, y, out=given)
    wide = torch.zeros(4, 12, device=x.device)
    torch.mul(x, y, out=wide[:, 3:9])
    values, where = torch.empty(4, device=x.device), torch.empty(4, device=x.device, dtype=I64)
    torch.max(x, 1, out=(values, where))
    return given, wide, values, where


@case(((4, 6), F32), ((4, 6), F32))
def out_variant_that_grows_its_result(x: Tensor, y: Tensor) -> Any:
    made = torch.empty(0, device=x.device)
    returned = torch.add(x, y, out=made)
    return made * 2, returned, made


@case(((4, 1), F32))
def expanded(x: Tensor) -> Any:
    wide = x.expand(4, 5)
    return wide, wide + 1, (x * 2).expand(-1, 3), torch.broadcast_to(x, (2, 4, 3)).sum(0)


@case(((5, 3), F32), ((4,), I64), ((4, 3), F32))
def index_put_accumulate(x: Tensor, rows: Tensor, values: Tensor) -> Any:
    made = torch.zeros_like(x).index_put((rows,), values.round(), accumulate=True)
    return made, x.clone().index_add_(0, rows, values.round()), x[rows], x[rows, :2]


@case(((5, 3), F32), ((4, 3), I64))
def scatter_gather(x: Tensor, where: Tensor) -> Any:
    made = torch.zeros(5, 3, device=x.device).scatter_add(0, where, x[:4].round())
    return made, x.gather(0, where), torch.zeros_like(x).scatter_reduce(0, where, x[:4], "amax")


@case(((4, 6), F32))
def scans(x: Tensor) -> Any:
    whole = x.round()
    return whole.cumsum(1), whole.long().cumprod(0), whole.cummax(1), whole.diff(dim=1)


@case(((2, 4, 5, 8), F32), ((2, 4, 5, 8), F32))
def sdpa(q: Tensor, k: Tensor) -> Any:
    return F.scaled_dot_product_attention(q, k, k * 2), F.scaled_dot_product_attention(q, k, k, is_causal=True)


@case(((4, 6), F32))
def foreach(x: Tensor) -> Any:
    parts = [x[0] * 1, x[1] * 1]
    torch._foreach_add_(parts, 2.0)
    torch._foreach_mul_(parts, [x[2], x[3]])
    return parts, torch._foreach_norm(parts), torch._foreach_sqrt([p.abs() for p in parts])


@case(((4, 6), F32))
def in_place_on_a_view_of_an_input(x: Tensor) -> Tensor:
    x[1:3, ::2].mul_(3).add_(1)
    x.t()[0].neg_()
    x[:, 5].copy_(x[:, 4])
    return x.sum(0)


@case(((4, 6), F32))
def output_is_a_view_of_an_input(x: Tensor) -> Any:
    return x[1:], x.t(), x, x.detach()[:, 2]


@case(((4, 6), F32), ((4, 6), F32))
def in_place_between_inputs(x: Tensor, y: Tensor) -> Tensor:
    x.copy_(y * 2)
    y.zero_().add_(x, alpha=0.5)
    x.clamp_(min=0).sub_(1)
    return x.addcmul_(y, y, value=2).sqrt_()


@case(((4, 6), F32))
def made_inside(x: Tensor) -> Any:
    mask = torch.ones(4, 4, device=x.device).tril().bool()
    steps = torch.arange(6, device=x.device) + torch.full((6,), 2, device=x.device)
    return x.new_zeros(2, 3), steps, mask, torch.eye(3, device=x.device), torch.linspace(0, 1, 5, device=x.device)


@case(((4, 6), F32))
def written_in_place_after_it_was_made(x: Tensor) -> Any:
    made = torch.empty(4, 6, device=x.device)
    made[:2] = x[2:]
    made[2:].fill_(3)
    later = made.view(-1)
    later[5:7] += 1
    return made, later


@case(((4, 6), F32))
def masks(x: Tensor) -> Any:
    positive = x > 0
    filled = x.clone()
    filled[positive] = 0.5
    return filled, torch.where(positive, x, -x), x.masked_fill(positive, 9), positive.logical_not(), x.clamp(-1, 1)


@case(((4, 6), F32), ((6,), I64))
def shuffled(x: Tensor, order: Tensor) -> Any:
    return x.index_select(1, order), x.flip(0), x.roll(1, 1), x.repeat(2, 1), x.repeat_interleave(2, 0), x.rot90()


@case(((3, 4, 6), F32))
def products(x: Tensor) -> Any:
    y = x.transpose(1, 2)
    return (
        torch.einsum("bij,bkj->bik", x, x),
        torch.baddbmm(x @ y, x, y, beta=2),
        torch.cdist(x, x),
        torch.stack([x, x]),
    )


@case(((2, 3, 8, 8), F32))
def images(x: Tensor) -> Any:
    last = x.to(memory_format=torch.channels_last)
    pooled = F.max_pool2d(x, 2), F.avg_pool2d(last, 2), F.interpolate(x, scale_factor=2), F.pad(x, (1, 2))
    return *pooled, F.unfold(x, 3), F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2), last + 1


@case(((4, 6), F32))
def strided(x: Tensor) -> Any:
    made = x * 2
    return made.as_strided((3, 2), (2, 5)), made.diagonal() + 1, made.unfold(1, 2, 2), made.T.contiguous()


@case(((4, 6), F32))
def small_floats(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(torch.float32) * 2


@case(((4, 6), F32))
def mapped(x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: row.softmax(0) * row.sum())(x)


@case(((4, 6), F32))
def scalars_and_zero_dimensions(x: Tensor) -> Any:
    total = x.sum()
    return total, total * 2 + 1, x / total, torch.stack([total, total]), x[2, 3] + 1


module_case("embedding", lambda: nn.Embedding(4, 5), ((3, 2), I64))
module_case("conv2d", lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU()), ((2, 3, 6, 6), F32))
module_case("lstm", lambda: nn.LSTM(6, 5, num_layers=2, batch_first=True), ((2, 3, 6), F32))
module_case("gru", lambda: nn.GRU(6, 5), ((3, 2, 6), F32))
module_case("attention", lambda: WithoutFastPath(nn.TransformerEncoderLayer(8, 2, 16)), ((2, 3, 8), F32))
module_case("norms", lambda: nn.Sequential(nn.LayerNorm(6), nn.RMSNorm(6), nn.GroupNorm(2, 4)), ((3, 4, 6), F32))
module_case("dropout", lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.GELU()), ((4, 6), F32))


def fresh_inputs(specs: list[tuple[tuple[int, ...], torch.dtype]], seed: int, device: torch.device) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(shape, generator=made) if dtype.is_floating_point else torch.randint(4, shape, generator=made)).to(
            device=device, dtype=dtype
        )
        for shape, dtype in specs
    ]


@pytest.mark.parametrize("name", sorted(CASES))
def test_replay_equals_eager_bit_for_bit(backend: GraphBackend, name: str) -> None:
    forward, specs = CASES[name]()
    if isinstance(forward, nn.Module):
        forward.to(backend.device)
    static = fresh_inputs(specs, 0, backend.device)
    graph, output = capture(backend, lambda: forward(*static))
    for seed in (1, 2, 3):
        fresh = fresh_inputs(specs, seed, backend.device)
        for target, value in zip(static, fresh, strict=True):
            target.copy_(value)
        with torch.no_grad():
            wanted = forward(*fresh)
        backend.replay(graph)
        same(output, wanted)
        same(static, fresh)  # what the forward wrote into its inputs


def test_constants_of_the_python_code_are_fresh_on_each_replay() -> None:
    backend, x = TapeBackend(), torch.zeros(3)  # on CUDA such a constant is a copy from host memory
    graph, out = capture(backend, lambda: torch.tensor([1.0, 2.0, 3.0]).add_(x))
    for value in (5.0, 7.0):
        x.fill_(value)
        backend.replay(graph)
        same(out, torch.tensor([1.0, 2.0, 3.0]) + value)


def test_state_of_a_model_moves_on_with_each_replay(backend: GraphBackend) -> None:
    norm = nn.BatchNorm1d(3, device=backend.device)
    twin = nn.BatchNorm1d(3, device=backend.device)
    x = ramp(4, 3, device=backend.device)
    graph, out = capture(backend, lambda: norm(x), warmups=0)
    same(dict(norm.state_dict()), dict(twin.state_dict()))  # the capture itself ran nothing
    for _ in range(2):
        backend.replay(graph)
        with torch.no_grad():
            wanted = twin(x)
        same(out, wanted)
    same(dict(norm.state_dict()), dict(twin.state_dict()))


# --- what a capture itself changes: nothing -------------------------------------------------------------------


def test_a_capture_runs_nothing_and_each_replay_does(backend: GraphBackend) -> None:
    counter, log = torch.zeros(3, device=backend.device), torch.zeros(2, 3, device=backend.device)

    def forward() -> Tensor:
        counter.add_(1)
        log[1].copy_(counter)
        return counter * 10

    graph, out = capture(backend, forward, warmups=0)
    same(counter, torch.zeros_like(counter))
    same(log, torch.zeros_like(log))
    for done in (1, 2, 3):
        backend.replay(graph)
        same(counter, torch.full_like(counter, done))
        same(log[1], counter)
        same(out, counter * 10)


def test_a_capture_leaves_another_graphs_output_alone(backend: GraphBackend) -> None:
    """Memory of the pool that somebody holds counts as outside memory, too."""
    pool, x = backend.new_pool(), torch.ones(4, device=backend.device)
    first, held = capture(backend, lambda: x * 2, pool)
    backend.replay(first)
    second, _ = capture(backend, lambda: held.add_(1), pool, warmups=0)
    same(held, torch.full_like(held, 2))
    backend.replay(second)
    same(held, torch.full_like(held, 3))


def random_state(backend: GraphBackend) -> Tensor:
    return torch.cuda.get_rng_state() if backend.device.type == "cuda" else torch.get_rng_state()


def draws(x: Tensor) -> tuple[Tensor, ...]:
    return torch.rand_like(x), F.dropout(x, 0.5), torch.empty_like(x).normal_(), torch.bernoulli(x / 2)


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_leaves_the_random_state_alone(backend: GraphBackend, fails: bool) -> None:
    """A capture runs nothing, so it draws no numbers; nor does one that fails after it has recorded some."""
    x = torch.ones(256, device=backend.device)
    state = random_state(backend)
    if fails:
        with pytest.raises((RuntimeError, HostSyncError)):
            capture(backend, lambda: draws(x)[0].sum().item(), warmups=0)
    else:
        capture(backend, lambda: draws(x), warmups=0)
    same(random_state(backend), state)


def test_random_numbers_are_fresh_on_each_replay(backend: GraphBackend) -> None:
    """A seed gives the numbers that it gives eagerly, whichever of replays and eager calls they are drawn by."""
    x = torch.ones(256, device=backend.device)
    torch.manual_seed(5)
    eager = [draws(x) for _ in range(4)]
    after = random_state(backend)
    for one, other in itertools.combinations(eager, 2):
        assert all(not torch.equal(a, b) for a, b in zip(one, other, strict=True))
    graph, outs = capture(backend, lambda: draws(x))
    for replayed in ({0, 1, 2, 3}, {1, 2}):
        torch.manual_seed(5)
        for step, wanted in enumerate(eager):
            if step in replayed:
                backend.replay(graph)
            same(outs if step in replayed else draws(x), wanted)
        same(random_state(backend), after)


# --- hazards, reproduced --------------------------------------------------------------------------------------


def test_a_parameter_that_moved_leaves_the_graph_on_the_old_memory(backend: GraphBackend) -> None:
    layer, x = nn.Linear(3, 3, bias=False, device=backend.device), torch.ones(2, 3, device=backend.device)
    scale = nn.Parameter(torch.ones(3, device=backend.device))
    graph, out = capture(backend, lambda: layer(x) * scale)
    old, factor = layer.weight.data, scale.data
    layer.weight.data, scale.data = torch.zeros_like(old), torch.zeros_like(factor)
    backend.replay(graph)
    same(out, F.linear(x, old))
    old.copy_(torch.full_like(old, 2))
    factor.fill_(10)
    backend.replay(graph)
    same(out, torch.full_like(out, 60))


def test_a_new_tensor_under_the_old_name_is_not_seen(backend: GraphBackend) -> None:
    given = {"x": torch.ones(3, device=backend.device)}
    kept = given["x"]
    graph, out = capture(backend, lambda: given["x"] * 2)
    given["x"] = torch.full((3,), 100.0, device=backend.device)
    backend.replay(graph)
    same(out, kept * 2)


def test_branches_and_numbers_of_the_python_code_are_frozen(backend: GraphBackend) -> None:
    x, state = torch.ones(3, device=backend.device), {"negative": False, "scale": 2.0, "calls": 0}

    def forward() -> Tensor:
        state["calls"] += 1
        scaled = x * state["scale"]
        return -scaled if state["negative"] else scaled

    graph, out = capture(backend, forward, warmups=0)
    state.update(negative=True, scale=50.0)
    backend.replay(graph)
    same(out, torch.full_like(x, 2))
    assert state["calls"] == 1, "a replay runs none of the model's Python code"


def test_a_borrowed_output_is_overwritten_by_the_next_replay(backend: GraphBackend) -> None:
    pool, x = backend.new_pool(), torch.ones(4, device=backend.device)
    first, out = capture(backend, lambda: x * 2, pool)
    borrowed = backend.borrow(out)
    assert borrowed.data_ptr() == out.data_ptr()
    del out
    second, other = capture(backend, lambda: x * 3, pool)
    assert other.data_ptr() == borrowed.data_ptr(), "the block was free for the next capture"
    backend.replay(first)
    same(borrowed, torch.full_like(x, 2))
    backend.replay(second)
    same(borrowed, torch.full_like(x, 3))


def test_a_held_output_is_kept(backend: GraphBackend) -> None:
    pool, x = backend.new_pool(), torch.ones(4, device=backend.device)
    first, held = capture(backend, lambda: x * 2, pool)
    second, other = capture(backend, lambda: x * 3, pool)
    backend.replay(first)
    backend.replay(second)
    same(held, torch.full_like(x, 2))
    same(other, torch.full_like(x, 3))


def test_borrowing_what_is_outside_the_pool_or_a_view(backend: GraphBackend) -> None:
    x = ramp(4, 3, device=backend.device)
    assert backend.borrow(x).data_ptr() == x.data_ptr()
    graph, out = capture(backend, lambda: (x * 2).t()[1:, ::2])
    borrowed = backend.borrow(out)
    backend.replay(graph)
    same(borrowed, (x * 2).t()[1:, ::2])
    assert borrowed.stride() == out.stride()
    assert not borrowed.requires_grad


def test_memory_is_reused_inside_a_graph(backend: GraphBackend) -> None:
    x, pool = torch.ones(MIB, device=backend.device), backend.new_pool()  # 4 MiB

    def forward() -> Tensor:
        y = x
        for _ in range(40):
            y = y + 1
        return y

    graph, out = capture(backend, forward, pool, warmups=0)
    assert 4 * MIB <= backend.pool_bytes(pool) <= 40 * 4 * MIB / 4
    backend.replay(graph)
    same(out, torch.full_like(x, 41))


def test_a_smaller_graph_fits_into_the_pool_of_a_larger_one(backend: GraphBackend) -> None:
    pool, w = backend.new_pool(), torch.ones(256, 256, device=backend.device)
    inputs = {rows: torch.ones(rows, 256, device=backend.device) for rows in (512, 256, 64)}
    outs, grown = {}, {}
    for rows, x in inputs.items():  # largest first
        before = backend.pool_bytes(pool)
        graph, out = capture(backend, lambda x=x: torch.relu(x @ w) + x, pool)
        outs[rows] = (graph, backend.borrow(out))
        del out
        grown[rows] = backend.pool_bytes(pool) - before
    assert grown[512] > 0
    assert grown[256] == grown[64] == 0
    for rows, (graph, out) in outs.items():
        backend.replay(graph)
        same(out, torch.full((rows, 256), 257.0, device=backend.device))


def test_a_held_output_costs_the_next_graph_its_memory(backend: GraphBackend) -> None:
    pool, x = backend.new_pool(), torch.ones(8 * MIB, device=backend.device)
    _, held = capture(backend, lambda: x * 2, pool, warmups=0)
    before = backend.pool_bytes(pool)
    capture(backend, lambda: x * 3, pool, warmups=0)
    assert backend.pool_bytes(pool) - before >= held.nbytes


# --- the life of a graph --------------------------------------------------------------------------------------


def test_nodes_are_counted(backend: GraphBackend) -> None:
    x = torch.ones(4, device=backend.device)
    graph, _ = capture(backend, lambda: torch.relu(x * 2 + 1).view(2, 2).t())
    assert backend.num_nodes(graph) in (3, None)
    empty, _ = capture(backend, lambda: x.view(2, 2))
    assert backend.num_nodes(empty) in (0, None)
    backend.replay(empty)
    backend.reset(graph)
    assert backend.num_nodes(graph) is None


def test_the_last_reset_frees_the_pool(backend: GraphBackend) -> None:
    x = torch.ones(8 * MIB, device=backend.device)  # 32 MiB
    before, pool = reserved(backend), backend.new_pool()
    one, out = capture(backend, lambda: x + 1, pool, warmups=0)
    other, _ = capture(backend, lambda: x + 2, pool, warmups=0)
    del out, _
    backend.release_cached()
    assert backend.memory().reserved - before >= x.nbytes
    backend.reset(one)
    backend.release_cached()
    assert backend.memory().reserved - before >= x.nbytes, "the other graph still replays on it"
    backend.replay(other)
    backend.reset(other)
    del one, other  # on CUDA a graph also holds the few bytes of its random generator's state
    assert back_at(backend, before)
    assert backend.pool_bytes(pool) == 0


def test_a_graph_is_captured_once_and_replayed_only_then(backend: GraphBackend) -> None:
    x = torch.ones(2, device=backend.device)
    graph, _ = capture(backend, lambda: x + 1)
    with pytest.raises((CaptureError, RuntimeError)):
        capture(backend, lambda: x + 1, warmups=0)[0] if backend.begin(graph) is None else None
    backend.reset(graph)
    with pytest.raises((CaptureError, RuntimeError)):
        backend.replay(graph)
    with pytest.raises((CaptureError, RuntimeError)):
        backend.replay(backend.new_graph(backend.new_pool()))
    same(capture(backend, lambda: x + 1)[1].shape, x.shape)  # the device works as before


class OwnError(Exception):
    pass


def failing(x: Tensor) -> Tensor:
    y = x * 2
    raise OwnError("in the middle")
    return y


def test_an_exception_inside_a_capture_leaves_no_trace(backend: GraphBackend) -> None:
    x = torch.ones(8 * MIB, device=backend.device)
    state = torch.ones(4, device=backend.device)
    before, pool = reserved(backend), backend.new_pool()

    def forward() -> Tensor:
        state.add_(1)
        return failing(x)

    with pytest.raises(OwnError, match="in the middle"):
        capture(backend, forward, pool, warmups=0)
    gc.collect()
    assert back_at(backend, before)
    assert backend.pool_bytes(pool) == 0
    same(state, torch.ones_like(state))
    same(x * 2, torch.full_like(x, 2))  # the model runs eagerly, and not into the pool
    assert backend.pool_bytes(pool) == 0
    graph, out = capture(backend, lambda: x + 1, pool)
    backend.replay(graph)
    same(out, torch.full_like(x, 2))


def test_an_exception_leaves_earlier_graphs_of_the_pool_alone(backend: GraphBackend) -> None:
    pool, x = backend.new_pool(), torch.ones(1000, device=backend.device)
    graph, out = capture(backend, lambda: x * 5, pool)
    with pytest.raises(OwnError):
        capture(backend, lambda: failing(x), pool, warmups=0)
    backend.replay(graph)
    same(out, x * 5)
    later, other = capture(backend, lambda: x * 7, pool)
    backend.replay(later)
    same(other, x * 7)
    same(out, x * 5)


def test_memory_that_runs_out_is_told_and_given_back(backend: GraphBackend) -> None:
    x = torch.ones(MIB, device=backend.device)
    if isinstance(backend, TapeBackend):
        backend = TapeBackend(pool_limit=20 * MIB)
    before, pool = reserved(backend), backend.new_pool()
    if backend.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction((before + 64 * MIB) / backend.memory().total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            capture(backend, lambda: [x + i for i in range(60)], pool, warmups=0)
        gc.collect()
        assert back_at(backend, before)
        graph, out = capture(backend, lambda: x + 1, pool)
        backend.replay(graph)
        same(out, torch.full_like(x, 2))
    finally:
        if backend.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("collector_as_users_have_it")
def test_sessions_hold_the_garbage_collector_still_and_restore_it(backend: GraphBackend) -> None:
    with backend.session():
        assert not gc.isenabled()
        with backend.session():
            assert not gc.isenabled()
        assert not gc.isenabled(), "a session inside a session is part of it"
    assert gc.isenabled()
    with pytest.raises(OwnError), backend.session():
        raise OwnError
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        with backend.session():
            pass
        assert not gc.isenabled(), "who had it off keeps it off"
    finally:
        gc.enable()
    assert gc.get_freeze_count() - frozen < 1000, "objects that stay frozen are garbage for ever"
    gc.freeze()
    frozen = gc.get_freeze_count()
    with backend.session():
        pass
    assert gc.get_freeze_count() >= frozen, "what the caller froze stays frozen"
    gc.unfreeze()


def test_sessions_of_two_threads_take_turns() -> None:
    backend, entered = TapeBackend(), threading.Event()

    def other() -> None:
        with backend.session():
            entered.set()

    gc.enable()
    thread = threading.Thread(target=other)
    with backend.session(), backend.session():
        thread.start()
        assert not entered.wait(0.1)
        assert not gc.isenabled()
    thread.join(5)
    assert entered.is_set()
    assert gc.isenabled()
    gc.disable()


@pytest.mark.usefixtures("collector_as_users_have_it")
def test_a_session_collects_once_not_once_for_each_graph(backend: GraphBackend) -> None:
    runs: list[str] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            runs.append(phase)

    x, pool = torch.ones(2, device=backend.device), backend.new_pool()
    gc.callbacks.append(count)
    try:
        with backend.session():
            for _ in range(5):
                with backend.capturing(backend.new_graph(pool)):
                    x + 1
    finally:
        gc.callbacks.remove(count)
    assert len(runs) == 1


def test_times_are_microseconds_of_each_call(backend: GraphBackend) -> None:
    x, calls = torch.ones(8, device=backend.device), []
    device, host = backend.time_calls(lambda: calls.append(x + 1), 4)
    assert len(device) == len(host) == len(calls) == 4
    assert all(t > 0 for t in (*device, *host))


def test_readings(backend: GraphBackend) -> None:
    reading = backend.memory()
    assert reading.total > 0
    assert reading.free is None or 0 < reading.free <= reading.total
    assert reading.reserved >= 0
    assert backend.supports("borrow") in (True, False)
    assert backend.supports("driver_bytes") is (backend.device.type == "cuda")


def test_backends_are_chosen_by_device() -> None:
    assert isinstance(select_backend("cpu"), TapeBackend)
    if torch.cuda.is_available():
        assert select_backend("auto").name == "cuda"
        with pytest.raises(BackendError, match="cuda:99"):
            select_backend("cuda:99")
    else:
        assert select_backend("auto").name == "cpu (tape)"
        with pytest.raises(BackendError) as caught:
            select_backend("cuda")
        assert "device: cpu" in caught.value.remedy


# --- custom operators -----------------------------------------------------------------------------------------

CALLS: list[str] = []


@torch.library.custom_op("cgplan_tests::scaled", mutates_args=())
def scaled_op(x: Tensor, factor: float) -> Tensor:
    CALLS.append("scaled")
    return (x * factor).relu()


@torch.library.custom_op("cgplan_tests::store", mutates_args={"target"})
def store_op(target: Tensor, x: Tensor) -> None:
    CALLS.append("store")
    target[1:].copy_(x[1:] * 2)


@torch.library.custom_op("cgplan_tests::pair", mutates_args=())
def pair_op(x: Tensor) -> tuple[Tensor, Tensor]:
    CALLS.append("pair")
    return x + 1, scaled_op(x, 2.0)


LIBRARY = torch.library.Library("cgplan_tests", "FRAGMENT")
LIBRARY.define("plain(Tensor x) -> Tensor")


def plain_impl(x: Tensor) -> Tensor:
    CALLS.append("plain")
    return x.sum(0, keepdim=True) * 2


for key in ("CPU", "CUDA"):
    LIBRARY.impl("plain", plain_impl, key)


def test_operators_written_in_python_are_recorded_inside(backend: GraphBackend) -> None:
    x = ramp(3, 2, device=backend.device, start=-2)
    target = torch.zeros_like(x)

    def forward(x: Tensor, target: Tensor) -> Any:
        store_op(target, x)
        return scaled_op(x, 3.0), pair_op(x), torch.ops.cgplan_tests.plain(x), target * 1

    CALLS.clear()
    graph, out = capture(backend, lambda: forward(x, target), warmups=0)
    assert CALLS == ["store", "scaled", "pair", "scaled", "plain"]
    same(target, torch.zeros_like(target))
    x.add_(3)
    CALLS.clear()
    backend.replay(graph)
    assert CALLS == [], "their Python code does not run again"
    wanted_target = torch.zeros_like(x)
    same(out, forward(x, wanted_target))
    same(target, wanted_target)
    assert (backend.num_nodes(graph) or 9) >= 9, "the operators inside are the nodes"


# --- what needs the host --------------------------------------------------------------------------------------


def _item(x: Tensor) -> Any:
    return x * x.sum().item()


def _truth(x: Tensor) -> Any:
    return x if x.sum() > 0 else -x


def _nonzero(x: Tensor) -> Any:
    return x + x.nonzero().shape[0]


def _where(x: Tensor) -> Any:
    return x + torch.where(x > 0)[0].numel()


def _mask(x: Tensor) -> Any:
    return x + x[x > 0].sum()


def _mask_write(x: Tensor) -> Any:
    y = x.clone()
    y[x > 0] = x[x > 0] * 2
    return y


def _masked_select(x: Tensor) -> Any:
    return x + x.masked_select(x > 0).sum()


def _cpu(x: Tensor) -> Any:
    return x + x.cpu().to(x.device)


def _unique(x: Tensor) -> Any:
    return x + x.unique().numel()


def _tolist(x: Tensor) -> Any:
    return x + len(x.tolist())


def _numpy(x: Tensor) -> Any:
    return x + x.numpy().shape[0]


def _equal(x: Tensor) -> Any:
    return x + torch.equal(x, x * 2)


def _repeat(x: Tensor) -> Any:
    return x + x.repeat_interleave((x > 0).long()).sum()


def _integer(x: Tensor) -> Any:
    return x + torch.zeros(int(x.numel() + x[0]), device=x.device).sum()


def _text(x: Tensor) -> Any:
    return x + len(f"{x.sum():.2f}")


def _index_by_tensor(x: Tensor) -> Any:
    return x + x[(x[0] * 0).long()]


def _constant(x: Tensor) -> Any:
    return x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)


def _set_one(x: Tensor) -> Any:
    y = x.clone()
    y[2] = 7
    return y


NEEDS_HOST: list[tuple[Forward, str]] = [
    (_item, "aten::_local_scalar_dense"),
    (_truth, "aten::_local_scalar_dense"),
    (_nonzero, "aten::nonzero"),
    (_where, "aten::nonzero"),
    (_mask, "aten::index with a boolean mask"),
    (_mask_write, "with a boolean mask"),
    (_masked_select, "aten::masked_select"),
    (_cpu, "cpu"),
    (_unique, "aten::_unique2"),
    (_tolist, "tolist"),
    (_numpy, "numpy"),
    (_equal, "aten::equal"),
    (_repeat, "repeat_interleave"),
    (_integer, "aten::_local_scalar_dense"),
    (_text, "aten::_local_scalar_dense"),
    (_index_by_tensor, "aten::_local_scalar_dense"),
    (_constant, ""),
    (_set_one, ""),
]


@pytest.mark.parametrize(("forward", "operator"), NEEDS_HOST, ids=[f.__name__[1:] for f, _ in NEEDS_HOST])
def test_what_needs_the_host_is_refused_with_its_line(backend: GraphBackend, forward: Forward, operator: str) -> None:
    """In a session, with the user's file, line and source; the tape names the operator as well."""
    if forward is _numpy and backend.device.type == "cuda":
        pytest.skip("numpy() of a CUDA tensor fails eagerly, too")
    if forward in (_constant, _set_one) and backend.device.type == "cpu":
        pytest.skip("a copy from the host is none on the tape")
    with pytest.raises(HostSyncError) as caught:
        cgplan.capture(
            lambda x: forward(x),
            inputs={"x": cgplan.Input(shape=("num_tokens",), dtype="float32", pad=1)},
            compilation={"cudagraph_capture_sizes": [4]},
            device=backend.device.type,
        )
    message = caught.value.message
    assert "FULL num_tokens=4" in message
    lines = range(forward.__code__.co_firstlineno + 1, forward.__code__.co_firstlineno + 4)
    assert any(f"{__file__}:{line}: `" in message for line in lines), message
    assert caught.value.remedy
    if backend.name == "cpu (tape)":
        assert operator in message
    x = torch.ones(4, device=backend.device)
    forward(x)  # outside of a capture nothing is refused
    assert not torch.equal(torch.rand_like(x), torch.rand_like(x)), "the random generator is not left capturing"
    graph, out = capture(backend, lambda: x * 2)
    backend.replay(graph)
    same(out, torch.full_like(x, 2))


def test_the_search_for_the_operator_keeps_no_memory(backend: GraphBackend) -> None:
    """On CUDA a failed forward is run once more to name the operator; its tensors must go with it."""
    kept: list[weakref.ref[Tensor]] = []

    def forward() -> Any:
        big = torch.ones(10, device=backend.device)
        kept.append(weakref.ref(big))
        return big.sum().item()

    error = host_sync_of(forward, backend.device)
    assert isinstance(error, HostSyncError)
    assert "aten::_local_scalar_dense" in error.message
    assert kept[0]() is None
    assert host_sync_of(lambda: torch.ones(3, device=backend.device) * 2, backend.device) is None


def test_what_only_looks_as_if_it_needed_the_host_is_allowed(backend: GraphBackend) -> None:
    x = ramp(4, device=backend.device)

    def forward() -> Any:
        assert x.shape[0] == x.numel() == len(x)
        y = x.clone()
        y[x > 1] = 5.0
        return y, x.repeat_interleave(2), x.masked_fill(x > 1, 0), str(x.dtype), x.to(x.device), list(x)[1]

    graph, out = capture(backend, forward)
    backend.replay(graph)
    same(tree_leaves(out)[0], torch.tensor([0.0, 1.0, 5.0, 5.0], device=backend.device))


def test_the_tape_refuses_tensors_that_it_cannot_place() -> None:
    backend = TapeBackend()
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(CaptureError, match="sparse"):
        capture(backend, lambda: sparse @ torch.ones(3, 3), warmups=0)


def test_a_user_line_inside_torchs_neighbours_is_a_user_line(tmp_path: Any) -> None:
    """``site-packages/torchvision`` begins with ``site-packages/torch`` and is no machinery for that."""
    from pathlib import Path

    from cgplan.backends.blame import blamed_line

    neighbour = str(Path(torch.__file__).parent) + "vision/models.py"
    space: dict[str, Any] = {}
    exec(compile("def forward():\n    raise ValueError\n", neighbour, "exec"), space)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        space["forward"]()
    assert f"{neighbour}:2" in blamed_line(caught.value.__traceback__)


def test_a_line_of_traced_code_is_the_users_line_that_it_came_from() -> None:
    def inner(x: Tensor, table: Tensor) -> Tensor:
        return table[(x.abs() + 7).long()]  # row 7 of 2

    def forward(x: Tensor) -> Tensor:
        y = F.relu(x) + 1
        return inner(y, x.new_zeros(2)) * 2

    def generated(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        assert gm.code  # until somebody asks for it there is none
        return gm.forward

    torch._dynamo.reset()
    with pytest.raises(IndexError) as caught:
        torch.compile(forward, backend=generated, fullgraph=True)(torch.ones(3))
    assert f"{__file__}:" in blamed_line(caught.value.__traceback__)
    assert "# row 7 of 2" in blamed_line(caught.value.__traceback__)
    torch._dynamo.reset()


# --- the tape's pool ------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(steps=st.lists(st.tuples(st.integers(0, 900), st.booleans(), st.integers(0, 30)), max_size=40))
def test_pool_blocks_never_overlap_and_bytes_are_exact(steps: list[tuple[int, bool, int]]) -> None:
    pool, taken = TapePool(), []
    peak = 0
    for nbytes, drop, which in steps:
        if drop and taken:
            taken.pop(which % len(taken))
        else:
            taken.append((pool.take(nbytes), nbytes))
        spans = sorted((s.data_ptr(), s.data_ptr() + max(n, 1)) for s, n in taken)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert all(start % ALIGNMENT == 0 for start, _ in spans)
        held = sum(max(-(-n // ALIGNMENT), 1) * ALIGNMENT for _, n in taken)
        assert pool.nbytes - pool.free_bytes == held
        assert pool.nbytes >= max(peak, held)
        peak = max(peak, held)
    taken.clear()
    assert pool.free_bytes == pool.nbytes
    pool.trim()
    assert pool.nbytes == 0


def test_pool_reuses_freed_blocks_and_joins_neighbours() -> None:
    pool = TapePool()
    whole = pool.take(1024)
    assert pool.nbytes == 1024
    del whole
    halves = [pool.take(512), pool.take(512)]
    assert pool.nbytes == 1024
    halves.clear()
    again = pool.take(1024)
    assert pool.nbytes == 1024, "the halves were joined"
    assert again.nbytes() == 1024


def test_pool_limit() -> None:
    pool = TapePool(limit=1024)
    first = pool.take(1000)
    with pytest.raises(torch.OutOfMemoryError, match="64 bytes asked for, 1024 of 1024 reserved"):
        pool.take(1)
    del first
    assert pool.take(900).nbytes() == 900


def test_an_alias_does_not_take_the_block() -> None:
    pool = TapePool()
    storage = pool.take(256)
    alias = pool.alias_of(storage)
    assert alias is not None
    assert alias.data_ptr() == storage.data_ptr()
    assert pool.free_bytes == 0
    del storage
    assert pool.free_bytes == 256
    alias.fill_(7)  # the memory itself is still there
    assert pool.alias_of(torch.ones(3).untyped_storage()) is None


# --- what a hunt for wrong numbers found ----------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_out_variants_that_grow_their_result_are_not_used(backend: GraphBackend, reduction: str) -> None:
    x, y = torch.rand(40, 40, device=backend.device), torch.rand(40, 40, device=backend.device)
    for loss in (F.binary_cross_entropy, F.huber_loss):
        graph, out = capture(backend, lambda loss=loss: loss(x, y, reduction=reduction))
        for _ in range(2):
            x.uniform_()
            backend.replay(graph)
            same(out, loss(x, y, reduction=reduction))


def test_overloads_are_told_apart_by_what_they_require(backend: GraphBackend) -> None:
    x, y = torch.rand(6, 3, device=backend.device), torch.rand(6, 3, device=backend.device)
    graph, out = capture(backend, lambda: (F.pairwise_distance(x, y), x.norm(2.0, 1), x.sum(1, dtype=torch.float64)))
    x.uniform_()
    backend.replay(graph)
    same(out, (F.pairwise_distance(x, y), x.norm(2.0, 1), x.sum(1, dtype=torch.float64)))


def test_layouts_that_change_in_place(backend: GraphBackend) -> None:
    x = torch.rand(4, 4, device=backend.device)

    def forward() -> Tensor:
        y = (x * 2).view(4, 4, 1).squeeze_(2).unsqueeze_(0).transpose_(1, 2)
        return y + 1

    graph, out = capture(backend, forward)
    x.uniform_()
    backend.replay(graph)
    same(out, forward())


def test_inference_mode_hides_nothing_from_the_tape() -> None:
    backend, x = TapeBackend(), torch.ones(4)
    for forward in (
        lambda: x * 2 if x.sum() > 0 else x,
        lambda: torch.where(x > 0)[0],
        lambda: x.nonzero(as_tuple=True)[0],
    ):
        with torch.inference_mode(), pytest.raises(HostSyncError, match="needs the host"):
            capture(backend, forward, warmups=0)
    with torch.inference_mode():
        graph, out = capture(backend, lambda: F.layer_norm(x.repeat_interleave(2, 0).view(2, 4), [4]))
    x.copy_(torch.arange(4.0))
    backend.replay(graph)
    same(out, F.layer_norm(x.repeat_interleave(2, 0).view(2, 4), [4]))


def test_borrowing_keeps_conjugation_and_sign(backend: GraphBackend) -> None:
    x = torch.arange(4.0, device=backend.device)
    graph, _ = capture(backend, lambda: None, warmups=0)
    backend.reset(graph)
    pool = backend.new_pool()
    graph = backend.new_graph(pool)
    with backend.session(), torch.no_grad(), backend.capturing(graph):
        made = torch.polar(x, x).conj()
        parts = made, made.imag
    backend.replay(graph)
    same([backend.borrow(part) for part in parts], (torch.polar(x, x).conj(), torch.polar(x, x).conj().imag))


def test_printing_inside_a_forward_is_refused_by_the_tape() -> None:
    x = torch.ones(3)
    for look in (repr, str, lambda t: f"{t.sum():.2f}"):
        with pytest.raises(HostSyncError):
            capture(TapeBackend(), lambda look=look: look(x * 2), warmups=0)


def test_a_pool_with_graphs_takes_more_after_a_failed_capture(backend: GraphBackend) -> None:
    """Again and again; what was captured before and after replays, and all of it counts until it is freed."""
    x = torch.arange(1.0, 9.0, device=backend.device)
    pool = backend.new_pool()
    graphs = [capture(backend, lambda: (x * 2).cumsum(0), pool)]
    for factor in (3, 4):
        with pytest.raises((CaptureError, RuntimeError)):
            capture(backend, lambda: x * float((x * 2).sum().item()), pool)
        graphs.append(capture(backend, lambda n=factor: (x * n).cumsum(0), pool))  # type: ignore[misc]
        assert backend.in_pool(graphs[0][1], pool)
        assert backend.in_pool(graphs[-1][1], pool)
    x.add_(1)
    for (graph, output), factor in zip(graphs, (2, 3, 4), strict=True):
        backend.replay(graph)
        same(output, (x * factor).cumsum(0))
    assert backend.pool_bytes(pool) > 0
    captured = [graph for graph, _ in graphs]
    del graphs, output, graph
    for one in captured:
        backend.reset(one)
    backend.release_cached()
    assert backend.pool_bytes(pool) == 0
    graph, output = capture(backend, lambda: x * 5, pool)
    backend.replay(graph)
    same(output, x * 5)
