"""Outputs: whose memory they lie in, whose tensor objects they are, and which rows they have."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from checks import capture as bare
from checks import same
from torch import Tensor
from ways import GraphBackend, Model, all_ways, full
from ways import open_runner as open_way

import cgplan
from cgplan import (
    BatchDescriptor,
    CUDAGraphMode,
    CUDAGraphOptions,
    CUDAGraphWrapper,
    GraphRunner,
    Input,
    OutputShapeError,
    forward_context,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SQUARE = {"x": Input(shape=("num_tokens", 3), dtype="float32", pad=0)}


def double(x: Tensor) -> Tensor:
    return x * 2


def square(backend: GraphBackend) -> Tensor:
    return torch.arange(9.0, device=backend.device).view(3, 3)


def open_runner(
    backend: GraphBackend,
    model: Callable[..., Any] = double,
    specs: dict[str, Input] = SQUARE,
    compilation: dict[str, Any] | None = None,
    **sections: Any,
) -> GraphRunner:
    compilation = {"cudagraph_capture_sizes": [4, 8], **(compilation or {})}
    return cgplan.capture(
        model, specs, compilation=compilation, device=backend.device.type, **sections
    )


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "unsqueeze_": lambda t: t.unsqueeze_(1),
    "t_": lambda t: t.t_(),
    "requires_grad_": lambda t: t.requires_grad_(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__
)
def test_outputs_changed_in_place(
    backend: GraphBackend, change: str, mode: Callable[[], Any]
) -> None:
    for model in (double, lambda x: {"y": [x * 2, (x + 1, 3)]}):
        runner, x = open_runner(backend, model), square(backend)
        wanted = runner.run_eagerly(x=x)
        with mode():
            for _ in range(2):
                output = runner(x=x)
                held = output if isinstance(output, Tensor) else output["y"][0]
                CHANGES[change](held)
        same(runner(x=x), wanted)
        again = runner(x=x)
        leaf = again if isinstance(again, Tensor) else again["y"][0]
        assert leaf is not held
        assert not leaf.requires_grad
        leaf.add_(1)
        same(runner(x=x), wanted)


class Points(Tensor):
    pass


@pytest.mark.parametrize("outputs", ["clone", "borrow"])
def test_outputs_of_a_subclass_stay_of_it(backend: GraphBackend, outputs: str) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 2).as_subclass(Points), x + 1

    runner = open_runner(backend, model, compilation={"outputs": outputs})
    for _ in range(2):
        output = runner(x=square(backend))
        assert list(map(type, output)) == [Points, Tensor]
        same(output, model(square(backend)))


def test_models_that_return_no_tensor(backend: GraphBackend) -> None:
    total = torch.zeros(3, device=backend.device)
    for returned in (None, (), {"a": 3}):

        def model(x: Tensor, returned: Any = returned) -> Any:
            total.add_(x.sum(0))
            return returned

        runner = open_runner(backend, model)
        total.zero_()
        for _ in range(3):
            assert runner(x=square(backend)) == returned
        same(total, square(backend).sum(0) * 3)


@pytest.mark.parametrize("change", ["unsqueeze_", "t_"])
def test_views_of_static_buffers_changed_in_place(backend: GraphBackend, change: str) -> None:
    for mode, uniform in (
        ("FULL", None),
        ("PIECEWISE", None),
        ("FULL_DECODE_ONLY", False),
    ):  # the last runs eagerly
        compilation: dict[str, Any] = {"cudagraph_mode": mode}
        model: Callable[..., Any] = double
        if mode == "PIECEWISE":
            model, compilation["splitting_modules"] = Pieces(Doubled()), ["piece"]
        runner, x = open_runner(backend, model, compilation=compilation), square(backend)
        for count in (1, 2):
            with runner.stage(3, uniform_decode=uniform) as buffers:
                assert buffers["x"].shape == (3, 3), count
                buffers["x"].copy_(x)
                CHANGES[change](buffers["x"])
            same(buffers.output, x * 2)
            CHANGES[change](runner.input_views(3)["x"])
            same(runner(x=x, uniform_decode=uniform), x * 2)
            same(runner.run_eagerly(x=x), x * 2)
            assert runner.input_views(3)["x"].shape == (3, 3)


class Pieces(torch.nn.Module):
    def __init__(self, piece: torch.nn.Module) -> None:
        super().__init__()
        self.piece = piece

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.piece(x)
        return total * 1


class Doubled(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Chain(torch.nn.Module):
    """A segment, and one that writes into what the first one made and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = CUDAGraphWrapper(lambda x: x * 2, CUDAGraphMode.PIECEWISE)
        self.second = CUDAGraphWrapper(lambda h: h.add_(1), CUDAGraphMode.PIECEWISE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        return y.unsqueeze_(1) * 3


WRAPPERS = {"cudagraph_mode": "PIECEWISE", "piecewise": "wrappers", "outputs": "clone"}


@pytest.mark.parametrize("policy", ["off", "first", "always"])
def test_an_argument_that_comes_back_is_an_object_of_its_own(
    backend: GraphBackend, policy: str
) -> None:
    """What the code between segments does to it meets no later replay."""
    runner = open_runner(backend, Chain(), compilation={**WRAPPERS, "address_check": policy})
    for rows in (3, 3, 8, 1, 3):
        x = torch.randn(rows, 3, device=backend.device)
        same(runner(x=x), (x * 2 + 1)[:, None] * 3)
    runner.close()


def test_an_argument_that_comes_back_gives_its_memory_to_later_captures(
    backend: GraphBackend,
) -> None:
    # 1 MiB a row: from there on CUDA's allocator takes segments of 20 MiB, which the sum of all sizes passes.
    specs = {"x": Input(shape=("num_tokens", 1 << 18), dtype="float32", pad=0)}
    used = []
    for sizes in ([8], [8, 7, 6, 5, 4, 3]):
        compilation = {**WRAPPERS, "cudagraph_capture_sizes": sizes}
        runner = open_runner(backend, Chain(), specs=specs, compilation=compilation)
        used.append(runner.report.pool_bytes)
        runner.close()
    assert used[0] == used[1]


class Gives(torch.nn.Module):
    """Returns memory that no graph owns, by an object that each eager call makes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(8, 3))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("input", "detached"):
            x.mul_(2)
            return x[:, :3] if self.kind == "input" else x.detach()
        self.cache[: len(x)].copy_(x * 2)
        return self.cache[: len(x)]


@pytest.mark.parametrize("kind", ["input", "detached", "module", "method", "closure"])
@pytest.mark.parametrize("inference", [False, True])
def test_views_of_other_memory_are_new_objects_each_time(
    backend: GraphBackend, kind: str, inference: bool
) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        model = Gives(kind).to(backend.device)
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "method": model.forward,
            "closure": lambda x: model(x),
        }
        options = CUDAGraphOptions(num_of_warmups=0, address_check="always")
        wrapped = CUDAGraphWrapper(
            ways.get(kind, model), CUDAGraphMode.FULL, backend=backend, options=options
        )
        x = torch.ones(4, 3, device=backend.device)
        for turn in range(4):
            x.fill_(turn)
            with forward_context(CUDAGraphMode.FULL, BatchDescriptor(4)):
                y = wrapped(x)
            same(y.unsqueeze_(1).clone(), torch.full_like(x, 2 * turn)[:, None])
    wrapped.reset()


# --- rows -----------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "first second")


def test_outputs_of_any_structure_are_sliced(backend: GraphBackend) -> None:
    def model(x: Tensor) -> Any:
        known = torch.return_types.max((x * 2, x + 1))
        return {
            "a": [x, (x * 2, None)],
            "b": Pair(x + 1, 2.5),
            "c": OrderedDict(d=x[:, 0]),
            "e": 3,
            "f": known,
        }

    runner, x = open_runner(backend, model), square(backend)
    first = runner(x=x)
    assert (type(first["b"]), type(first["f"])) == (Pair, torch.return_types.max)
    same(first, model(x))
    second = runner(x=x)
    assert first["a"][0] is not second["a"][0]
    assert first["a"][0].data_ptr() == second["a"][0].data_ptr(), (
        "borrowed: the next call overwrites it"
    )
    first["a"].clear()
    first.clear()
    same(second, model(x))


@pytest.mark.parametrize("where", ["inputs", "metadata"])
def test_outputs_that_count_requests(backend: GraphBackend, where: str) -> None:
    specs = {"x": Input(shape=("num_tokens",), dtype="float32", pad=0)}
    lengths = {"lengths": Input(shape=("num_reqs",), dtype="int64", pad=0)}

    def model(x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return (forward_metadata() if lengths is None else lengths).float() + x.sum()

    def forward_metadata() -> Tensor:
        return cgplan.get_forward_context().metadata["lengths"]  # type: ignore[no-any-return]

    runner = cgplan.capture(
        model,
        {**specs, **(lengths if where == "inputs" else {})},
        metadata=lengths if where == "metadata" else None,
        compilation={"cudagraph_capture_sizes": [8]},
        scheduler={"max_num_seqs": 4},
        output_rows="num_reqs",
        device=backend.device.type,
    )
    two = torch.tensor([3, 2], device=backend.device)
    same(runner(x=torch.ones(5, device=backend.device), lengths=two), two + 5.0)
    assert runner.stats.padded_rows == 3


@dataclass
class Hidden:
    y: Tensor


class OwnDict(dict[str, Tensor]):
    pass


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (lambda x: x.sum(), r"shape \[\]; dimension 0 should have 8 rows"),
        (lambda x: x.t().contiguous(), r"shape \[3, 8\]"),
        (lambda x: (x, x[:1]), r"output 1 of the model has shape \[1, 3\]"),
        (lambda x: Hidden(x * 2), "a Hidden, whose tensors cannot be reached"),
        (lambda x: OwnDict(y=x * 2), "an? OwnDict, whose tensors cannot be reached"),
    ],
)
def test_outputs_whose_padding_cannot_be_cut_off(
    backend: GraphBackend, model: Callable[..., Any], complaint: str
) -> None:
    with pytest.raises(OutputShapeError, match=complaint) as caught:
        open_runner(backend, model)
    assert caught.value.remedy


def test_a_batch_of_a_fixed_number_of_rows_is_told_of_num_tokens(backend: GraphBackend) -> None:
    fixed = cgplan.Input(shape=(4, 3), dtype=torch.float32, pad=0)
    with pytest.raises(OutputShapeError, match="dimension 0 should have 8 rows") as caught:
        cgplan.capture(
            double,
            {"x": fixed},
            compilation={"cudagraph_capture_sizes": [8]},
            device=backend.device,
        )
    assert "num_tokens in place of the number of rows in shapes of inputs" in caught.value.remedy


def test_a_forward_without_a_return_is_pointed_out(backend: GraphBackend) -> None:
    for model, warned in ((lambda x: None, True), (double, False)):
        assert (
            any("returned no tensor" in w for w in open_runner(backend, model).report.warnings)
            is warned
        )


@all_ways
def test_an_output_that_the_next_replay_overwrites(backend: GraphBackend, way: str) -> None:
    """An output is memory of the graph: who keeps logits over the next step finds the next step's logits. Copy what
    you keep, or set `outputs: clone`.
    """
    x = full(backend, 1)
    graph, out = bare(backend, lambda: x * 2)
    backend.replay(graph)
    first = out
    x.fill_(5)
    backend.replay(graph)
    same(first, full(backend, 10))  # was 2
    for outputs, is_kept in (("borrow", False), ("clone", True)):
        runner = open_way(backend, Model(backend, way, double), way, outputs=outputs)
        first, second = (runner(x=full(backend, value)) for value in (1, 5))
        same(second, full(backend, 11))
        same(first, full(backend, 3 if is_kept else 11))
