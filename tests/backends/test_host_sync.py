"""Operators that need the host, and the user's line in messages."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import capture, host_sync_of, same
from torch import Tensor
from torch.utils._pytree import tree_leaves

import cgplan
from cgplan.backends import GraphBackend
from cgplan.backends.blame import Line, blamed_line
from cgplan.backends.host_sync import remedy_at
from cgplan.backends.tape import TapeBackend
from cgplan.errors import CaptureError, HostSyncError
from cgplan.graphs.fingerprint import Fingerprint
from cgplan.graphs.footprint import RunLog
from cgplan.graphs.put_back import PutBack

pytestmark = pytest.mark.usefixtures("quiet_collector")


def test_a_line_of_an_installed_package_is_not_the_users_to_change() -> None:
    package = Line("/venv/lib/python3.12/site-packages/transformers/models/bart.py", 626)
    assert remedy_at(package).startswith(
        "The line is of transformers. If it stands for an argument"
    )
    assert remedy_at(Line("/home/me/model.py", 3)).startswith("Keep the value on the device")


def _truth(x: Tensor) -> Any:
    return x if x.sum() > 0 else -x


def _mask_write(x: Tensor) -> Any:
    y = x.clone()
    y[x > 0] = x[x > 0] * 2
    return y


def _set_one(x: Tensor) -> Any:
    y = x.clone()
    y[2] = 7
    return y


NEEDS_HOST: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x * x.sum().item(), "aten::_local_scalar_dense"),
    "truth": (_truth, "aten::_local_scalar_dense"),
    "nonzero": (lambda x: x + x.nonzero().shape[0], "aten::nonzero"),
    "where": (lambda x: x + torch.where(x > 0)[0].numel(), "aten::nonzero"),
    "mask": (lambda x: x + x[x > 0].sum(), "aten::index with a boolean mask"),
    "mask_write": (_mask_write, "with a boolean mask"),
    "masked_select": (lambda x: x + x.masked_select(x > 0).sum(), "aten::masked_select"),
    "cpu": (lambda x: x + x.cpu().to(x.device), "cpu"),
    "tolist": (lambda x: x + len(x.tolist()), "tolist"),
    "numpy": (lambda x: x + x.numpy().shape[0], "numpy"),
    "equal": (lambda x: x + torch.equal(x, x * 2), "aten::equal"),
    "repeat": (lambda x: x + x.repeat_interleave((x > 0).long()).sum(), "repeat_interleave"),
    "constant": (lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device), ""),
    "set_one": (_set_one, ""),
}


@pytest.mark.parametrize("name", NEEDS_HOST)
def test_an_operator_that_needs_the_host_is_refused_with_its_line(
    backend: GraphBackend, name: str
) -> None:
    """In a session, with the user's file, line and source; the tape names the operator as well."""
    forward, operator = NEEDS_HOST[name]
    on_cpu = backend.device.type == "cpu"
    if name in (("constant", "set_one") if on_cpu else ("numpy",)):
        pytest.skip(
            "a copy from the host is none on the tape; numpy() of a CUDA tensor fails eagerly, too"
        )
    with pytest.raises(HostSyncError) as caught:
        cgplan.capture(
            lambda x: forward(x),
            inputs={"x": cgplan.Input(shape=("num_tokens",), dtype="float32", pad=1)},
            compilation={"cudagraph_capture_sizes": [4]},
            device=backend.device.type,
        )
    message = caught.value.message
    assert "FULL size=4" in message
    first = forward.__code__.co_firstlineno
    assert any(f"{__file__}:{line}: `" in message for line in range(first, first + 4)), message
    assert caught.value.remedy
    assert not on_cpu or operator in message
    x = torch.ones(4, device=backend.device)
    forward(x)  # outside of a capture nothing is refused
    assert not torch.equal(torch.rand_like(x), torch.rand_like(x)), (
        "the random generator is not left capturing"
    )
    graph, out = capture(backend, lambda: x * 2)
    backend.replay(graph)
    same(out, torch.full_like(x, 2))


LIBRARY = torch.library.Library("cgplan_host_tests", "FRAGMENT")
LIBRARY.define("first(Tensor x) -> Tensor")
LIBRARY.define("doubled(Tensor x) -> Tensor")
LIBRARY.define("doubled.by(Tensor x, float factor) -> Tensor")
LIBRARY.impl("first", lambda x: x + x.tolist()[0], "CompositeImplicitAutograd")
LIBRARY.impl("doubled", lambda x: x + x, "CompositeImplicitAutograd")
LIBRARY.impl("doubled.by", lambda x, factor: x * factor, "CompositeImplicitAutograd")
ops = torch.ops.cgplan_host_tests


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_host_read_inside_a_composite_operator_written_in_python_is_refused(
    mode: Callable[[], Any],
) -> None:
    """Such an operator never reaches a dispatch mode, and on a CPU its tolist() does not either."""
    x = torch.ones(4)
    for read in (ops.first, ops.first.default):
        with mode(), pytest.raises(HostSyncError, match=r"Tensor.tolist\(\)"):
            capture(TapeBackend(), lambda read=read: read(x * 2), warmups=0)
    with mode():
        graph, out = capture(
            backend := TapeBackend(), lambda: ops.doubled(x) + ops.doubled(x, 3.0), warmups=0
        )
    x.fill_(2)
    backend.replay(graph)
    same(out, torch.full((4,), 10.0))


@pytest.mark.parametrize("modules", [None, ["inner"]])
def test_a_model_that_reads_the_host_in_a_composite_operator(modules: list[str] | None) -> None:
    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(ops.first(x * 2)) * 2

    mode = {} if modules is None else {"cudagraph_mode": "PIECEWISE", "splitting_modules": modules}
    with pytest.raises(HostSyncError, match=r"Tensor.tolist\(\)"):
        cgplan.capture(
            Reads(),
            inputs={"x": cgplan.Input(shape=("num_tokens",), dtype="float32", pad=1)},
            compilation={"cudagraph_capture_sizes": [4], **mode},
            device="cpu",
        )


@torch.library.custom_op(
    "cgplan_host_tests::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def unsafe(x: Tensor) -> Tensor:
    return x + 1


unsafe.register_fake(torch.empty_like)


class CallsUnsafe(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return unsafe(x * 2) * 3


UNSAFE: list[dict[str, Any]] = [
    {"cudagraph_mode": "FULL"},
    {"cudagraph_mode": "PIECEWISE", "splitting_ops": ["aten::mul"]},
    {"cudagraph_mode": "PIECEWISE", "splitting_ops": ["cgplan_host_tests::unsafe"]},
]


@pytest.mark.parametrize("compilation", UNSAFE)
def test_operators_that_are_tagged_unsafe(compilation: dict[str, Any]) -> None:
    inputs = {"x": cgplan.Input(shape=("num_tokens",), dtype="float32", pad=1)}
    compilation = {**compilation, "cudagraph_capture_sizes": [4]}
    if "cgplan_host_tests::unsafe" not in compilation.get("splitting_ops", ()):
        said = r"cgplan_host_tests::unsafe is tagged .*test_host_sync\.py:\d+: `return unsafe"
        with pytest.raises(CaptureError, match=said) as caught:
            cgplan.capture(CallsUnsafe(), inputs, compilation=compilation, device="cpu")
        assert "splitting_ops" in caught.value.remedy
        return
    runner = cgplan.capture(CallsUnsafe(), inputs, compilation=compilation, device="cpu")
    x = torch.arange(3.0)
    same(runner(x=x), (x * 2 + 1) * 3)
    assert runner.report.records[0].eager_pieces == 1
    runner.close()


def test_the_look_sees_operators_that_are_tagged_unsafe(backend: GraphBackend) -> None:
    x = torch.ones(4, device=backend.device)
    found = host_sync_of(lambda: unsafe(x), backend.device)
    assert type(found) is CaptureError
    assert "is tagged torch.Tag.cudagraph_unsafe, at" in found.message


def test_the_look_for_the_operator_keeps_no_memory(backend: GraphBackend) -> None:
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


def test_operators_that_only_look_as_if_they_needed_the_host_are_allowed(
    backend: GraphBackend,
) -> None:
    x = torch.arange(4.0, device=backend.device)

    def forward() -> Any:
        assert x.shape[0] == x.numel() == len(x)
        y = x.clone()
        y[x > 1] = 5.0
        return (
            y,
            x.repeat_interleave(2),
            x.masked_fill(x > 1, 0),
            str(x.dtype),
            x.to(x.device),
            list(x)[1],
        )

    graph, out = capture(backend, forward)
    backend.replay(graph)
    same(tree_leaves(out)[0], torch.tensor([0.0, 1.0, 5.0, 5.0], device=backend.device))


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
        graph, out = capture(
            backend, lambda: F.layer_norm(x.repeat_interleave(2, 0).view(2, 4), [4])
        )
    x.copy_(torch.arange(4.0))
    backend.replay(graph)
    same(out, F.layer_norm(x.repeat_interleave(2, 0).view(2, 4), [4]))


def test_printing_inside_a_forward_is_refused_by_the_tape() -> None:
    x = torch.ones(3)
    with pytest.raises(HostSyncError):
        capture(TapeBackend(), lambda: str(x * 2), warmups=0)


def test_a_user_line_in_a_package_whose_name_begins_with_torch() -> None:
    neighbour = str(Path(torch.__file__).parent) + "vision/models.py"
    space: dict[str, Any] = {}
    exec(compile("def forward():\n    raise ValueError\n", neighbour, "exec"), space)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        space["forward"]()
    assert f"{neighbour}:2" in str(blamed_line(caught.value.__traceback__))


def test_a_line_of_traced_code_is_the_users_line_that_it_came_from() -> None:
    def inner(x: Tensor, table: Tensor) -> Tensor:
        return table[(x.abs() + 7).long()]  # row 7 of 2

    def forward(x: Tensor) -> Tensor:
        y = F.relu(x) + 1
        return inner(y, x.new_zeros(2)) * 2

    def generated(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        assert gm.code  # it is made when it is first read
        return gm.forward

    torch._dynamo.reset()
    with pytest.raises(IndexError) as caught:
        torch.compile(forward, backend=generated, fullgraph=True)(torch.ones(3))
    line = str(blamed_line(caught.value.__traceback__))
    assert f"{__file__}:" in line
    assert "# row 7 of 2" in line
    torch._dynamo.reset()


@torch.library.custom_op("cgplan_host_tests::fill", mutates_args={"target"})
def fill(target: Tensor) -> None:
    target.view(-1).fill_(2)


def test_writes_that_torch_counts_in_no_mode_count_where_operators_are_logged() -> None:
    """A capture runs nothing, so the count alone tells that a cache was written."""
    cache = torch.zeros(2, 2)

    def writes() -> int:
        before = cache._version
        fill(cache)
        cache.fill_(1)
        torch._foreach_add_([cache], 1.0)
        return cache._version - before

    with torch.no_grad():
        alone = writes()
        put_back = PutBack(Fingerprint.of({}, cache.device), 0)
        with RunLog("cpu", put_back.storages, ()):
            assert writes() == alone
