"""Operators, their replays on the tape and on CUDA, and the tape's own pool and limits."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import capture, same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cgplan.backends import GraphBackend
from cgplan.backends.tape import ALIGNMENT, TapeBackend, TapePool
from cgplan.errors import CaptureError, HostSyncError

pytestmark = pytest.mark.usefixtures("quiet_collector")

Shape = tuple[int, ...]
CASES: dict[str, tuple[Callable[..., Any], tuple[Shape, ...]]] = {}
X = (4, 6)
ROWS = "whole numbers from 0 to 3"


def case(*shapes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a forward over random inputs of these shapes; one marked (shape, ROWS) is of whole numbers."""

    def register(forward: Callable[..., Any]) -> Callable[..., Any]:
        CASES[forward.__name__] = (forward, shapes)
        return forward

    return register


@case(X)
def views(x: Tensor) -> Any:
    made = x * 2
    chained = (
        (x.t().reshape(3, 8)[:, ::2].unsqueeze(0).squeeze(0).permute(1, 0) * 2)
        .contiguous()
        .view(-1)
    )
    strided = (
        made.as_strided((3, 2), (2, 5)),
        made.diagonal() + 1,
        made.unfold(1, 2, 2),
        made.T.contiguous(),
    )
    return chained, strided, x[:1, :1].t().double() + 1, x[1:], x.t(), x, x.detach()[:, 2]


@case(X)
def chunk_split_unbind(x: Tensor) -> Any:
    a, b = x.chunk(2, dim=1)
    c, d = (x * 2).split([1, 5], dim=1)
    return {
        "sum": a + b,
        "parts": [c, d.clone()],
        "rows": (x + 1).unbind(0),
        "thirds": torch.tensor_split(x + 2, 3),
    }


@case(X)
def several_results(x: Tensor) -> Any:
    found = (
        x.topk(2, dim=1),
        x.sort(dim=1, descending=True),
        x.max(dim=1),
        x.argmax(dim=1),
        x.kthvalue(3),
    )
    return found, torch.native_layer_norm(x, [6], None, None, 1e-5)


@case(X)
def empty_tensors(x: Tensor) -> Any:
    none = x[:0] * 2
    return (
        torch.cat([none, x]),
        none,
        none.sum(),
        torch.zeros(0, 6, device=x.device) + none,
        x.new_empty((0,)),
    )


@case(X)
def complex_and_conj(x: Tensor) -> Any:
    z = torch.view_as_complex(x.reshape(4, 3, 2))
    turned = z.conj() * torch.polar(x.abs()[:, :3], x[:, 3:])
    return (
        turned,
        z.conj(),
        turned.conj().imag,
        torch.view_as_real(turned.conj().resolve_conj()),
        (-z).conj().real,
    )


@case(X, X)
def out_variants(x: Tensor, y: Tensor) -> Any:
    found = torch.empty_like(x)
    torch.add(x, y, out=found)
    wide = torch.zeros(4, 12, device=x.device)
    torch.mul(x, y, out=wide[:, 3:9])
    values, where = (
        torch.empty(4, device=x.device),
        torch.empty(4, device=x.device, dtype=torch.int64),
    )
    torch.max(x, 1, out=(values, where))
    return found, wide, values, where


@case((5, 3), ((4,), ROWS), (4, 3), ((4, 3), ROWS))
def indices(x: Tensor, rows: Tensor, values: Tensor, where: Tensor) -> Any:
    made = torch.zeros_like(x).index_put((rows,), values.round(), accumulate=True)
    found = (
        made,
        x.clone().index_add_(0, rows, values.round()),
        x[rows],
        x[rows, :2],
        x.index_select(0, rows),
    )
    scattered = torch.zeros(5, 3, device=x.device).scatter_add(0, where, x[:4].round())
    return (
        found,
        scattered,
        x.gather(0, where),
        torch.zeros_like(x).scatter_reduce(0, where, x[:4], "amax"),
    )


@case(X)
def foreach(x: Tensor) -> Any:
    parts = [x[0] * 1, x[1] * 1]
    torch._foreach_add_(parts, 2.0)
    torch._foreach_mul_(parts, [x[2], x[3]])
    return parts, torch._foreach_norm(parts), torch._foreach_sqrt([p.abs() for p in parts])


@case(X, X)
def in_place(x: Tensor, y: Tensor) -> Any:
    x[1:3, ::2].mul_(3).add_(1)
    x.t()[0].neg_()
    x[:, 5].copy_(x[:, 4])
    rows = x.sum(0)
    x.copy_(y * 2)
    y.zero_().add_(x, alpha=0.5)
    x.clamp_(min=0).sub_(1)
    return rows, x.addcmul_(y, y, value=2).sqrt_()


@case(X)
def layouts_that_change_in_place(x: Tensor) -> Any:
    return (x * 2).view(4, 6, 1).squeeze_(2).unsqueeze_(0).transpose_(1, 2) + 1


@case(X)
def made_inside(x: Tensor) -> Any:
    mask = torch.ones(4, 4, device=x.device).tril().bool()
    steps = torch.arange(6, device=x.device) + torch.full((6,), 2, device=x.device)
    made = torch.empty(4, 6, device=x.device)
    made[:2] = x[2:]
    made[2:].fill_(3)
    later = made.view(-1)
    later[5:7] += 1
    others = (
        x.new_zeros(2, 3),
        torch.eye(3, device=x.device),
        torch.linspace(0, 1, 5, device=x.device),
    )
    return steps, mask, made, later, others


@case(X)
def masks(x: Tensor) -> Any:
    positive = x > 0
    filled = x.clone()
    filled[positive] = 0.5
    return (
        filled,
        torch.where(positive, x, -x),
        x.masked_fill(positive, 9),
        positive.logical_not(),
        x.clamp(-1, 1),
    )


@case(X, X)
def overloads_and_growing_out_variants(x: Tensor, y: Tensor) -> Any:
    """Some overloads differ only in an argument that they require; out variants of some losses grow their result."""
    x, y = x.sigmoid(), y.sigmoid()
    losses = [
        f(x, y, reduction=r)
        for f in (F.binary_cross_entropy, F.huber_loss)
        for r in ("mean", "sum", "none")
    ]
    return losses, F.pairwise_distance(x, y), x.norm(2.0, 1), x.sum(1, dtype=torch.float64)


@case(X)
def mapped(x: Tensor) -> Any:
    return torch.func.vmap(lambda row: row.softmax(0) * row.sum())(x)


@case(X)
def forward_mode_derivatives(x: Tensor) -> Any:
    weight = torch.linspace(-1, 1, 18, device=x.device).view(3, 6)
    return torch.func.jvp(
        lambda x: F.linear(x, weight, weight[:, 0]).tanh(), (x,), (torch.ones_like(x),)
    )


@case(X, ((4,), ROWS))
def what_lies_on_the_host(x: Tensor, rows: Tensor) -> Any:
    scale = torch.tensor([3, 4]) * torch.tensor(2)
    return (
        x * scale.prod().item(),
        x * scale.tolist()[0],
        F.one_hot(rows, num_classes=5),
        F.one_hot(rows, 4),
    )


@case(X)
def results_that_grow(x: Tensor) -> Any:
    grown = torch.empty(0, device=x.device)
    torch.mm(x, x.t(), out=grown)
    return grown.relu(), torch.add(x, 1, out=x.new_empty(0))


@case(X)
def foreach_on_state(x: Tensor) -> Any:
    torch._foreach_mul_([x[0], x[1]], 0.5)
    torch._foreach_add_([x[0]], [x[2]])
    torch._foreach_copy_([x[3]], [x[0]])
    return x * 1


MODULES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "conv2d": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU()),
        (2, 3, 6, 6),
    ),
    "lstm": (lambda: nn.LSTM(6, 5, num_layers=2, batch_first=True), (2, 3, 6)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 3, 8)),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.GELU()), X),
}


def inputs_of(shapes: Any, seed: int, device: torch.device) -> list[Tensor]:
    generator, made = torch.Generator().manual_seed(seed), []
    for shape in shapes:
        if shape[-1] == ROWS:
            made.append(torch.randint(4, shape[0], generator=generator).to(device))
        else:
            made.append(torch.randn(shape, generator=generator).to(device))
    return made


@pytest.mark.parametrize("name", sorted({*CASES, *MODULES}))
def test_replay_equals_eager_bit_for_bit(backend: GraphBackend, name: str) -> None:
    if name in MODULES:
        make, shape = MODULES[name]
        forward, shapes = make().eval().to(backend.device), (shape,)
    else:
        forward, shapes = CASES[name]  # type: ignore[assignment]
    static = inputs_of(shapes, 0, backend.device)
    graph, output = capture(backend, lambda: forward(*static))
    for seed in (1, 2, 3):
        fresh = inputs_of(shapes, seed, backend.device)
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


def test_the_tape_refuses_tensors_that_it_cannot_place() -> None:
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(CaptureError, match="sparse"):
        capture(TapeBackend(), lambda: sparse @ torch.ones(3, 3), warmups=0)


def test_numbers_that_come_from_an_input_are_no_constants() -> None:
    x = torch.ones(2)
    for forward in (
        lambda: torch.tensor([1.0, 2.0]).add_(x).tolist(),
        lambda: (torch.tensor(2.0) * x).cpu(),
    ):
        with pytest.raises(HostSyncError):
            capture(TapeBackend(), forward)


def test_a_replay_under_autocast(backend: GraphBackend) -> None:
    theta, image = (
        torch.eye(2, 3, device=backend.device)[None],
        torch.randn(1, 1, 4, 6, device=backend.device),
    )

    def forward() -> Any:
        return F.grid_sample(
            image, F.affine_grid(theta, [1, 1, 4, 6], align_corners=False), align_corners=False
        )

    graph, out = capture(backend, forward)
    image.mul_(2)
    with torch.autocast(backend.device.type, torch.bfloat16):
        backend.replay(graph)
    same(out, forward())


def test_a_capture_warns_of_nothing_that_the_forward_does_not(backend: GraphBackend) -> None:
    x = torch.rand(4, 6, device=backend.device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph, out = capture(backend, lambda: F.mse_loss(x, x * 2))
    x.mul_(3)
    backend.replay(graph)
    same(out, F.mse_loss(x, x * 2))


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
LIBRARY.define("silent(Tensor x) -> Tensor")


def plain_impl(x: Tensor) -> Tensor:
    CALLS.append("plain")
    return x.sum(0, keepdim=True) * 2


for key in ("CPU", "CUDA"):
    LIBRARY.impl("plain", plain_impl, key)
LIBRARY.impl("silent", lambda x: x.add_(len(x.tolist())), "CPU")


def test_operators_written_in_python_are_recorded_inside(backend: GraphBackend) -> None:
    x = torch.arange(-2.0, 4.0, device=backend.device).reshape(3, 2)
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


@torch.library.custom_op("cgplan_tests::by_values", mutates_args={"count"})
def by_values_op(x: Tensor, count: Tensor) -> Tensor:
    CALLS.append("by_values")
    count.add_(1)
    noise = torch.rand(2)
    return (
        torch.stack([x[int(n)] for n in count.tolist()])
        + noise
        + float(x.sum())
        + x.numpy().shape[0]
    )


@torch.library.custom_op("cgplan_tests::around", mutates_args={"count"})
def around_op(x: Tensor, count: Tensor) -> Tensor:
    CALLS.append("around")
    return by_values_op(x * 2, count) * 2


def test_an_operator_whose_python_code_needs_the_host_is_called_again() -> None:
    """Its writes and random numbers count once; an operator around it is looked into."""
    backend, x, count = TapeBackend(), torch.randn(4, 2), torch.zeros(2, dtype=torch.int64)
    torch.manual_seed(3)
    graph, out = capture(backend, lambda: around_op(x, count) + 1, warmups=0)
    assert count.tolist() == [0, 0], "a capture leaves memory as it was"
    assert len(backend.notes(graph)) == 1
    assert "operator cgplan_tests::by_values again" in backend.notes(graph)[0]
    CALLS.clear()
    fresh = torch.randn(4, 2)
    x.copy_(fresh)
    torch.manual_seed(3)
    for _ in range(2):
        backend.replay(graph)
    assert CALLS == ["by_values"] * 2
    assert count.tolist() == [2, 2]
    torch.manual_seed(3)
    wanted = [around_op(fresh, torch.full((2,), done)) + 1 for done in range(2)]
    same(out, wanted[-1])


def test_an_operator_that_returns_its_argument_in_silence_is_no_view() -> None:
    backend, x = TapeBackend(), torch.zeros(3)
    graph, _ = capture(backend, lambda: torch.ops.cgplan_tests.silent(x), warmups=0)
    before = x.clone()
    backend.replay(graph)
    same(x, before + 3)
    assert any("cgplan_tests::silent returns an argument" in note for note in backend.notes(graph))


# --- the tape's pool ------------------------------------------------------------------------------------------


def free_bytes(pool: TapePool) -> int:
    return sum(end - start for start, end, is_free in pool.spans() if is_free)


@settings(max_examples=30)
@given(
    steps=st.lists(st.tuples(st.integers(0, 900), st.booleans(), st.integers(0, 30)), max_size=40)
)
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
        assert pool.nbytes - free_bytes(pool) == held
        assert pool.nbytes >= max(peak, held)
        peak = max(peak, held)
    taken.clear()
    assert free_bytes(pool) == pool.nbytes
    pool.trim()
    assert pool.nbytes == 0


def test_pool_reuses_freed_blocks_and_joins_neighbours() -> None:
    pool = TapePool()
    whole = pool.take(1024)
    del whole
    halves = [pool.take(512), pool.take(512)]
    assert pool.nbytes == 1024
    halves.clear()
    again = pool.take(1024)
    assert pool.nbytes == 1024, "the halves were joined"
    assert again.nbytes() == 1024


def test_an_alias_does_not_take_the_block() -> None:
    pool = TapePool()
    storage = pool.take(256)
    alias = pool.aliases.get(storage._cdata)
    assert alias is not None
    assert alias.data_ptr() == storage.data_ptr()
    assert free_bytes(pool) == 0
    del storage
    assert free_bytes(pool) == 256
    alias.fill_(7)  # the memory itself is still there
    assert torch.ones(3).untyped_storage()._cdata not in pool.aliases
