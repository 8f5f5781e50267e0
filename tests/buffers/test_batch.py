"""Tensors of a call: what is wrong with them, by name, and unusual ones that are right."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from checks import same
from torch import Tensor

import cgplan
from cgplan import GraphRunner, Input
from cgplan.backends import GraphBackend
from cgplan.errors import CaptureMemoryError, InputError

pytestmark = pytest.mark.usefixtures("quiet_collector")

ROWS = Input(shape=("num_tokens", 3), dtype="float32", pad=0)


def double(x: Tensor) -> Tensor:
    return x * 2


def open_runner(
    backend: GraphBackend, model: Callable[..., Any] = double, **sections: Any
) -> GraphRunner:
    compilation = {"cudagraph_capture_sizes": [4, 8], **sections.pop("compilation", {})}
    specs = sections.pop("specs", {"x": ROWS})
    return cgplan.capture(
        model, specs, compilation=compilation, device=backend.device.type, **sections
    )


def test_flags_and_counts_of_numpy_are_the_same_batch(backend: GraphBackend) -> None:
    runner, x = open_runner(backend), torch.ones(3, 3, device=backend.device)
    for flag, loras in ((np.True_, np.int64(0)), (True, 0), (np.True_, torch.tensor(0))):
        same(runner(x=x, uniform_decode=flag, num_active_loras=loras), x * 2)  # type: ignore[arg-type]
    assert len(runner.stats.counts) == 1
    with runner.stage(np.int64(3), np.int64(3)) as buffers:  # type: ignore[arg-type]
        buffers["x"].fill_(4)
    same(buffers.output, torch.full((3, 3), 8.0, device=backend.device))
    assert runner.stage(3, 3) is buffers
    assert runner.input_views(np.int64(3))["x"].shape == (3, 3)  # type: ignore[arg-type]


# --- wrong calls ----------------------------------------------------------------------------------------------

X, LENGTHS = (
    Input(shape=("num_tokens", 2), dtype="float32", pad=0),
    Input(shape=("num_reqs",), dtype="int64", pad=0),
)
TWO_INPUTS = {"x": X, "lengths": LENGTHS}


def wrong_calls() -> dict[str, tuple[Callable[[Any], dict[str, Any]], str]]:
    def good(device: Any, **changes: Any) -> dict[str, Any]:
        given = {
            "x": torch.zeros(4, 2, device=device),
            "lengths": torch.ones(4, dtype=torch.int64, device=device),
        }
        return {**given, **changes}

    def without(device: Any, name: str) -> dict[str, Any]:
        return {k: v for k, v in good(device).items() if k != name}

    return {
        "name": (
            lambda d: {**without(d, "lengths"), "length": torch.zeros(4)},
            "unknown input 'length'",
        ),
        "more": (lambda d: good(d, extra=torch.zeros(4)), "unknown input 'extra'"),
        "missing": (lambda d: without(d, "lengths"), "input 'lengths' is missing"),
        "nothing": (lambda d: {}, "is missing"),
        "dtype": (
            lambda d: good(d, x=torch.zeros(4, 2, device=d).double()),
            "dtype torch.float64, declared",
        ),
        "device": (lambda d: good(d, x=torch.zeros(4, 2, device="meta")), "input 'x' is on meta"),
        "ndim": (
            lambda d: good(d, x=torch.zeros(4, 2, 1, device=d)),
            r"shape \[4, 2, 1\], declared is \['num_tokens', 2",
        ),
        "fewer dimensions": (
            lambda d: good(d, x=torch.zeros(4, device=d)),
            r"input 'x' has shape \[4\]",
        ),
        "fixed": (
            lambda d: good(d, x=torch.zeros(4, 3, device=d)),
            r"input 'x' has shape \[4, 3\]",
        ),
        "no rows": (
            lambda d: good(
                d, x=torch.zeros(0, 2, device=d), lengths=torch.zeros(0, device=d).long()
            ),
            "0 rows",
        ),
        "no requests": (lambda d: good(d, lengths=torch.zeros(0, device=d).long()), "0 rows"),
        "many requests": (
            lambda d: good(d, lengths=torch.zeros(5, device=d).long()),
            "5 requests, but 4 tokens",
        ),
        "too many": (
            lambda d: {
                "x": torch.zeros(9, 2, device=d),
                "lengths": torch.zeros(9, device=d).long(),
            },
            "has 9 requests, but 9 tokens and scheduler.max_num_seqs 8 allow 8",
        ),
        "uniform": (
            lambda d: good(d, lengths=torch.zeros(2, device=d).long(), uniform_decode=True),
            "uniform_decode=True, but 4 tokens are not 2 requests of 1",
        ),
    }


@pytest.mark.parametrize("name", list(wrong_calls()))
def test_wrong_calls_are_refused_before_anything_runs(backend: GraphBackend, name: str) -> None:
    make, complaint = wrong_calls()[name]
    runs: list[int] = []

    def model(x: Tensor, lengths: Tensor) -> Tensor:
        runs.append(1)
        return x

    runner = open_runner(backend, model, specs=TWO_INPUTS, scheduler={"max_num_seqs": 8})
    before = len(runs)
    for call in (runner, runner.run_eagerly):
        with pytest.raises(InputError, match=complaint) as caught:
            call(**make(backend.device))
        assert ("Did you mean 'lengths'?" in caught.value.remedy) is (name == "name")
    assert len(runs) == before
    assert not runner.stats.replays


def test_inputs_of_one_call_are_one_batch(backend: GraphBackend) -> None:
    row = Input(shape=("num_tokens",), dtype="float32", pad=0)
    inputs = {"x": row, "y": row, "z": row.model_copy(update={"shape": ("2 * num_tokens",)})}
    runner = open_runner(backend, lambda x, y, z: x + y, specs=inputs)
    three, four, six = (torch.zeros(n, device=backend.device) for n in (3, 4, 6))
    with pytest.raises(InputError, match="input 'y' has num_tokens = 4, but 'x' has 3"):
        runner(x=three, y=four, z=six)
    with pytest.raises(InputError, match="input 'z' has 3 rows; declared are 2 \\* num_tokens"):
        runner(x=three, y=three, z=three)
    same(runner(x=three, y=three, z=six), three)


def test_a_size_that_an_input_has_twice_is_one_number(backend: GraphBackend) -> None:
    picture = {"shape": ["num_tokens", "side", "side"], "dtype": "float32", "pad": 0}
    config = {
        "dims": {"side": {"max": 8, "sizes": [8]}},
        "inputs": {"x": picture},
        "model": {"output_shapes": [picture["shape"]]},
        "compilation": {"cudagraph_capture_sizes": [1]},
        "device": str(backend.device),
    }
    with (
        closing(cgplan.capture(torch.neg, config=config)) as runner,
        pytest.raises(InputError, match="input 'x' has side = 8, also 6") as raised,
    ):
        runner(torch.zeros(1, 6, 8, device=backend.device))
    assert raised.value.remedy == "Give one side in a call."


def test_scalars_and_fixed_shapes_are_inputs_too(backend: GraphBackend) -> None:
    inputs = {
        "x": X,
        "scale": Input(shape=(), dtype="float32", pad=1),
        "w": Input(shape=(2,), dtype="int64", pad=0),
    }
    runner = open_runner(backend, lambda x, scale, w: x * scale + w, specs=inputs)
    w = torch.tensor([1, 2], device=backend.device)
    for scale in (2.0, 3.0):
        given = torch.tensor(scale, device=backend.device)
        x = torch.ones(3, 2, device=backend.device)
        same(runner(x=x, scale=given, w=w), x * scale + w)


# --- odd tensors ----------------------------------------------------------------------------------------------


def freed(device: torch.device) -> Tensor:
    x = torch.ones(3, 3, device=device)
    x.untyped_storage().resize_(0)
    return x


ODD: dict[str, tuple[Callable[[torch.device], Any], str]] = {
    "freed": (freed, "'x' has no memory"),
    "nested": (
        lambda device: torch.nested.nested_tensor(
            [torch.ones(1, 3), torch.ones(2, 3)], device=device
        ),
        "'x' is a nested tensor",
    ),
    "jagged": (
        lambda device: torch.nested.nested_tensor(
            [torch.ones(1, 3), torch.ones(2, 3)], layout=torch.jagged
        ),
        "'x' is a nested tensor",
    ),
    "sparse": (
        lambda device: torch.eye(3, device=device).to_sparse(),
        "'x' is of layout torch.sparse_coo",
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_tensors_without_numbers(backend: GraphBackend, kind: str) -> None:
    runner, x = open_runner(backend), torch.ones(3, 3, device=backend.device)
    make, message = ODD[kind]
    for _ in range(
        1 if kind in ("nested", "sparse") else 2
    ):  # then torch itself raises, or ends the process
        with pytest.raises(InputError, match=message):
            runner(x=make(backend.device))
        with pytest.raises(InputError, match=message):
            runner.run_eagerly(x=make(backend.device))
        same(runner(x=x), x * 2)


def test_outputs_that_lie_in_static_buffers_come_back(backend: GraphBackend) -> None:
    """Each is the other's input, from inside a buffer: neither may be overwritten before it is read."""
    runner = open_runner(backend, lambda a, b: (a, b), specs={"a": ROWS, "b": ROWS})
    a = torch.arange(24.0, device=backend.device).view(8, 3)
    out_a, out_b = runner(a=a, b=a + 100)
    new_a, new_b = out_b[1:], out_a[1:]
    wanted = new_a.clone(), new_b.clone()
    same(runner(a=new_a, b=new_b), wanted)


# --- what a model writes into its inputs only now and then ----------------------------------------------------


class WritesSometimes(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 0).any()):  # not on padding, so no warm-up shows it
            x.add_(1)
        return x.clone()


class SumsBefore(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.piece = WritesSometimes()

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum(0, keepdim=True)  # sees the padding
        seen: Tensor = self.piece(x) * 0 + total
        return seen


@pytest.mark.parametrize(
    "mode", [torch.enable_grad, torch.inference_mode], ids=lambda m: m.__name__
)
def test_an_eager_piece_that_writes_its_input_only_for_some_data(
    backend: GraphBackend, mode: Callable[[], Any]
) -> None:
    compilation = {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["piece"]}
    runner = open_runner(backend, SumsBefore(), compilation=compilation)
    x = torch.ones(3, 3, device=backend.device)
    with mode():
        for count in (3, 3, 2, 3, 6, 5, 3):
            x = torch.ones(count, 3, device=backend.device)
            same(runner(x=x).clone(), torch.full_like(x, float(count)))
            with runner.stage(count) as buffers:
                buffers["x"].fill_(1)
            same(buffers.output.clone(), torch.full_like(x, float(count)))


def test_a_model_that_writes_its_input_in_an_eager_run(backend: GraphBackend) -> None:
    """A graph keeps the way that padding took; the model's own code, run beside it, may take another."""
    writes = False

    def model(x: Tensor) -> Tensor:
        total = x.sum(0, keepdim=True).expand(x.shape[0], -1) * 1
        if writes:
            x.add_(1)
        return total

    runner = open_runner(backend, model)
    x = torch.ones(3, 3, device=backend.device)
    same(runner(x=x), x * 3)
    writes = True
    same(runner.run_eagerly(x=x), x * 3)
    for _ in range(2):
        same(runner(x=x), x * 3)
        same(runner.run_eagerly(x=x), x * 3)


def test_memory_that_is_out_is_told_by_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.zeros

    def zeros(shape: Any, **options: Any) -> Tensor:
        if options["device"] != "cpu":
            raise torch.OutOfMemoryError("no memory")
        return real(shape, **options)

    monkeypatch.setattr("cgplan.buffers.static.torch.zeros", zeros)
    with pytest.raises(CaptureMemoryError, match="no memory for static buffers of 8 tokens"):
        open_runner(cgplan.backends.select_backend("cpu"))


@pytest.mark.parametrize(
    "value", [3, 2.5, None, [1.0, 2.0], np.ones((3, 3), dtype="float32"), {"x": 1}, object()]
)
def test_an_input_that_is_no_tensor(backend: GraphBackend, value: Any) -> None:
    runner = open_runner(backend, lambda x: x + 1)
    x = torch.ones(3, 3, device=backend.device)
    for given in (value, x, value):  # ahead of a call that is known, and behind it
        if given is x:
            same(runner(x=x), x + 1)
            continue
        with pytest.raises(InputError, match="input 'x' is of type"):
            runner(x=given)
