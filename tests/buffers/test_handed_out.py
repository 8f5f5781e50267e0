"""What callers hold of a runner, and what they may do with it without harm to the next call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import same
from torch import Tensor

import cgplan
from cgplan import (
    BatchDescriptor,
    CUDAGraphMode,
    CUDAGraphOptions,
    CUDAGraphWrapper,
    GraphRunner,
    Input,
    forward_context,
)
from cgplan.backends import GraphBackend
from cgplan.buffers.views import HandedViews
from cgplan.errors import AddressError, CgplanError, InputError

pytestmark = pytest.mark.usefixtures("quiet_collector")

SQUARE = {"x": Input(shape=("num_tokens", 3), dtype="float32", pad=0)}


def double(x: Tensor) -> Tensor:
    return x * 2


def open_runner(backend: GraphBackend, model: Callable[..., Any] = double, **sections: Any) -> GraphRunner:
    compilation = {"cudagraph_capture_sizes": [2, 4, 8], **sections.pop("compilation", {})}
    specs = sections.pop("specs", SQUARE)
    return cgplan.capture(model, specs, compilation=compilation, device=backend.device.type, **sections)


def square(backend: GraphBackend) -> Tensor:
    return torch.arange(9.0, device=backend.device).view(3, 3)


# --- blocks ---------------------------------------------------------------------------------------------------


def test_invalidating_inside_a_block(backend: GraphBackend) -> None:
    """Leaving the block raises, nothing runs, and the runner's lock is free."""
    runner, x = open_runner(backend), square(backend)

    def block() -> None:
        with runner.stage(3) as buffers:
            buffers["x"].copy_(x)
            runner.invalidate("kv_cache")

    with pytest.raises(AddressError, match="'kv_cache' moved"):
        block()
    with pytest.raises(AddressError, match="'kv_cache' moved"):
        runner(x=x)
    with pytest.raises(AddressError, match="'kv_cache' moved"), runner.stage(3):
        pass
    runner.recapture()
    same(runner(x=x), x * 2)
    with runner.stage(3) as buffers:
        buffers["x"].copy_(x)
    same(buffers.output, x * 2)
    runner.close()


def test_calls_of_all_kinds_are_looked_at_again(backend: GraphBackend) -> None:
    runner, x = open_runner(backend), square(backend)
    kept = runner.stage(3)
    for _ in range(2):
        runner(x=x)
        with kept as buffers:
            buffers["x"].copy_(x)
    runner.invalidate("kv_cache")
    for _ in range(2):
        with pytest.raises(AddressError, match="'kv_cache' moved"):
            runner(x=x)
        with pytest.raises(AddressError, match="'kv_cache' moved"), kept:
            pass
    large = torch.ones(9, 3, device=backend.device)
    same(runner(x=large), large * 2)


def test_invalidating_while_a_block_is_entered(backend: GraphBackend) -> None:
    """As from another thread, right after the lock was taken."""
    runner = open_runner(backend)
    staged = runner.stage(3)
    acquire = staged._acquire

    def acquire_late(blocking: bool) -> bool:
        taken = acquire(blocking)
        runner.invalidate("kv_cache")
        return taken

    staged._acquire = acquire_late
    with pytest.raises(AddressError, match="'kv_cache' moved"), staged:
        pass
    runner.close()


def test_a_block_whose_graphs_go_while_it_is_entered(backend: GraphBackend) -> None:
    runner = open_runner(backend)
    staged = runner.stage(3)
    acquire = staged._acquire

    def acquire_late(blocking: bool) -> bool:
        thread = threading.Thread(target=runner.recapture)
        thread.start()
        thread.join()
        return acquire(blocking)

    staged._acquire = acquire_late
    with pytest.raises(CgplanError, match="are gone"), staged:
        pass
    same(runner(x=square(backend)), square(backend) * 2)


@pytest.mark.parametrize("act", ["recapture", "close"])
@pytest.mark.parametrize("late", [False, True])
def test_a_block_whose_graphs_go_while_it_is_made(backend: GraphBackend, act: str, late: bool) -> None:
    """By another thread: nobody would tell the new block that its graphs are gone."""
    runner = open_runner(backend)
    prepare = runner._preparer.prepare

    def prepare_slowly(route: Any) -> Any:
        batch = prepare(route) if late else None
        thread = threading.Thread(target=getattr(runner, act))
        thread.start()
        thread.join()
        return prepare(route) if batch is None else batch

    runner._preparer.prepare = prepare_slowly  # type: ignore[method-assign]
    with pytest.raises(CgplanError, match="while another call was under way"):
        runner.stage(3)
    if act == "close":
        with pytest.raises(CgplanError, match="closed"):
            runner.stage(3)
        return
    with runner.stage(3) as buffers:
        buffers["x"].copy_(square(backend))
    same(buffers.output, square(backend) * 2)


def test_failed_keys_are_not_forgotten_inside_a_block(backend: GraphBackend) -> None:
    runner = open_runner(backend)
    with runner.stage(3) as buffers:
        buffers["x"].fill_(1)
        with pytest.raises(CgplanError, match="while another call was under way"):
            runner.retry_failed()
    same(buffers.output, torch.full((3, 3), 2.0, device=backend.device))
    runner.retry_failed()


def test_tensors_cannot_be_exchanged_inside_a_block(backend: GraphBackend) -> None:
    runner, x = open_runner(backend), square(backend)

    def remove(buffers: Any) -> None:
        del buffers["x"]

    def put(buffers: Any) -> None:
        buffers["x"] = x

    def merge(buffers: Any) -> None:
        buffers |= {"x": x}

    wrong: list[Callable[[Any], Any]] = [
        put, remove, merge, lambda b: b.update(x=x), lambda b: b.pop("x"), lambda b: b.popitem(), lambda b: b.clear(),
        lambda b: b.setdefault("x", x), lambda b: b.setdefault("z", x), lambda b: put({"x": 0} and b),
    ]  # fmt: skip
    for change in wrong:
        with pytest.raises(InputError, match="cannot be put into staged buffers") as caught, runner.stage(3) as buffers:
            change(buffers)
        assert "copy_" in caught.value.remedy
        same(runner(x=x), x * 2)
    with pytest.raises(InputError, match="unknown input 'X'"), runner.stage(3) as buffers:
        buffers["X"] = x
    with runner.stage(3) as buffers:
        buffers["x"].copy_(x)
        buffers["x"] += 5
        assert (list(buffers), len(buffers), "x" in buffers) == (["x"], 1, True)
    same(buffers.output, (x + 5) * 2)
    with pytest.raises(CgplanError, match="outside of their"):
        put(buffers)


def test_what_a_block_holds_is_there_however_it_is_asked_for(backend: GraphBackend) -> None:
    """Tensors are put in when the first one is asked for, which functions of dict would not notice by themselves."""
    looks: dict[str, Callable[[Any], Any]] = {
        "len": len, "bool": bool, "in": lambda b: "x" in b, "==": lambda b: b == {"x": b["x"]}, "**": lambda b: {**b},
        "!=": lambda b: b != {}, "|": lambda b: (b | {}).keys() == {"x"}, "or": lambda b: ({} | b).keys() == {"x"},
        "copy": lambda b: list(b.copy()) == ["x"], "reversed": lambda b: list(reversed(b)) == ["x"],
        "repr": lambda b: "tensor" in repr(b), "dict": lambda b: list(dict(b)) == ["x"],
    }  # fmt: skip
    for name, look in looks.items():
        runner = open_runner(backend)
        staged = runner.stage(3)
        for _ in range(2):
            with staged as buffers:
                assert look(buffers), name
                assert "y" not in buffers
                assert buffers != {"y": 3}
            assert (len(staged), "x" in staged, staged == {}, repr(staged), staged.copy()) == (0, False, True, "{}", {})


def test_only_what_is_handed_out_is_looked_at(backend: GraphBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    for name in ("tensors", "single"):
        original = getattr(HandedViews, name)

        def look(self: HandedViews, name: str = name, original: Any = original) -> Any:
            looks.append(name)
            return original(self)

        monkeypatch.setattr(HandedViews, name, look)
    runner = open_runner(backend)
    staged = runner.stage(3)
    looks.clear()
    for _ in range(3):
        with staged:
            pass
    assert looks == []
    same(staged.output, staged.output)
    assert looks == ["single"], "once for each batch"
    with staged as buffers:
        buffers["x"].fill_(3)
        buffers["x"].add_(1)
    first = staged.output
    same(first, torch.full((3, 3), 8.0, device=backend.device))
    assert looks == ["single", "tensors", "single"]
    with staged:
        pass
    assert staged.output is first


def test_a_model_that_changes_its_input_object_in_place_gets_it_as_it_was_made(backend: GraphBackend) -> None:
    """Batches without a graph run the model's own code on the staged tensors themselves."""
    runner = open_runner(
        backend,
        lambda x: (x.unsqueeze_(0) * 2)[0],
        compilation={"cudagraph_mode": "FULL_DECODE_ONLY"},
        scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 8},
    )
    staged = runner.stage(4, uniform_decode=False)
    for value in (1.0, 2.0, 3.0):
        with staged as buffers:
            buffers["x"].fill_(value)
        same(staged.output, torch.full((4, 3), 2 * value, device=backend.device))
    assert sum(runner.stats.eager.values()) == 3


def test_an_output_changed_in_place_before_it_is_read(backend: GraphBackend) -> None:
    """The same object was handed out before; whoever reads later gets one as it was made."""
    runner, x = open_runner(backend), square(backend)
    staged = runner.stage(3)
    outputs = []
    for _ in range(2):
        with staged as buffers:
            buffers["x"].copy_(x)
        if outputs:
            outputs[0].unsqueeze_(1)
        outputs.append(staged.output)
        assert staged.output is outputs[-1]
    same(outputs[1], x * 2)
    copies = open_runner(backend, compilation={"outputs": "clone"})
    with copies.stage(3) as buffers:
        buffers["x"].copy_(x)
    copies(x=x + 5)
    same(buffers.output, x * 2)
    with runner.stage(2):
        pass
    with pytest.raises(CgplanError, match="no output"):
        _ = staged.output
    last = runner.stage(3)
    with last:
        pass
    runner.close()
    with pytest.raises(CgplanError, match="no output"):
        _ = last.output


# --- tensor objects -------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "unsqueeze_": lambda t: t.unsqueeze_(1),
    "t_": lambda t: t.t_(),
    "requires_grad_": lambda t: t.requires_grad_(),
    "resize_": lambda t: t.resize_(1, 3),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_outputs_changed_in_place(backend: GraphBackend, change: str, mode: Callable[[], Any]) -> None:
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


def test_untouched_outputs_are_the_same_objects_in_each_mode(backend: GraphBackend) -> None:
    runner, x = open_runner(backend), square(backend)
    first = runner(x=x)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            assert runner(x=x) is first


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


def test_outputs_of_classes_that_pytree_knows(backend: GraphBackend) -> None:
    made = torch.return_types.max

    def model(x: Tensor) -> Any:
        return made((x * 2, x + 1)), (x * 3, None, "text")

    runner, x = open_runner(backend, model), square(backend)
    for _ in range(2):
        pair, rest = runner(x=x)
        assert type(pair) is made
        same((pair.values, pair.indices), (x * 2, x + 1))
        same(rest[0], x * 3)
        assert rest[1:] == (None, "text")
        pair.values.t_()


@pytest.mark.parametrize("change", ["unsqueeze_", "t_"])
def test_views_of_static_buffers_changed_in_place(backend: GraphBackend, change: str) -> None:
    for mode, uniform in (("FULL", None), ("PIECEWISE", None), ("FULL_DECODE_ONLY", False)):  # the last runs eagerly
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


@pytest.mark.parametrize("uniform", [None, False])
def test_static_buffers_cannot_be_moved_by_resizing_them(backend: GraphBackend, uniform: bool | None) -> None:
    specs = {
        **SQUARE,
        "flags": Input(shape=(3,), dtype="bool", pad=0),
        "half": Input(shape=(), dtype="bfloat16", pad=1),
    }
    runner = open_runner(backend, lambda x, flags, half: x * 2 + flags + half, specs=specs)
    batch = {"x": square(backend), "flags": torch.tensor([True, False, True], device=backend.device)}
    batch["half"] = torch.ones((), dtype=torch.bfloat16, device=backend.device)
    wanted = runner.run_eagerly(**batch)
    addresses = {name: view.data_ptr() for name, view in runner.input_views(3).items()}
    for name in batch:
        with (
            pytest.raises(InputError, match="cannot be resized") as caught,
            runner.stage(3, uniform_decode=uniform) as buffers,
        ):
            buffers[name].resize_(1 << 20)
        assert "runner.stage(num_tokens)" in caught.value.remedy
        with pytest.raises(RuntimeError, match="not resizable"):
            runner.input_views(3)[name].untyped_storage().resize_(1 << 20)
        assert {name: view.data_ptr() for name, view in runner.input_views(3).items()} == addresses
        with runner.stage(3, uniform_decode=uniform) as buffers:
            for given, tensor in batch.items():
                buffers[given].copy_(tensor)
        same(buffers.output, wanted)
        same(runner(**batch), wanted)
    kept = runner.input_views(3)["x"]
    runner.close()
    same(kept, batch["x"])


def test_a_buffer_of_fixed_shape_changed_in_place(backend: GraphBackend) -> None:
    specs = {**SQUARE, "scale": Input(shape=(3,), dtype="float32", pad=0)}
    runner = open_runner(backend, lambda x, scale: x * scale, specs=specs)
    x, scale = square(backend), torch.tensor([1.0, 2.0, 3.0], device=backend.device)
    with runner.stage(3) as buffers:
        buffers["x"].copy_(x)
        buffers["scale"].copy_(scale)
        buffers["scale"].unsqueeze_(1)
    same(buffers.output, x * scale)
    runner.input_views(3)["scale"].unsqueeze_(1)
    for _ in range(2):
        same(runner(x=x, scale=scale), x * scale)


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


def test_a_model_that_changes_its_inputs_shape_in_place(backend: GraphBackend) -> None:
    """Each warm-up, capture and run gets a tensor of its own."""

    def model(x: Tensor) -> Tensor:
        x.unsqueeze_(1)
        return (x * 2).squeeze(1)

    runner, x = open_runner(backend, model), square(backend)
    same(runner(x=x), x * 2)
    same(runner.run_eagerly(x=x), x * 2)


# --- streams --------------------------------------------------------------------------------------------------


def test_writing_into_static_buffers_from_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused ahead of the first write, while the stream before has work; the stream of each write is noted."""
    backend = cgplan.backends.select_backend("cpu")
    current, busy = 0, True
    monkeypatch.setattr(type(backend), "stream_getter", lambda self: lambda: current)
    monkeypatch.setattr(type(backend), "is_busy", lambda self, stream: busy)
    runner, x = open_runner(backend), square(backend)
    runner(x=x)
    current = 7
    staged = runner.stage(3)
    ways: list[Callable[[], Any]] = [
        staged.__enter__, lambda: runner.run_eagerly(x=x), lambda: runner.run_eagerly(x=x, padded=False),
    ]  # fmt: skip
    for way in ways:
        with pytest.raises(CgplanError, match="from another stream than before, whose work is not done"):
            way()
    for number, eagerly in enumerate((True, False)):
        busy, current = False, 10 + number
        if eagerly:
            same(runner.run_eagerly(x=x), x * 2)
        else:
            with pytest.raises(ZeroDivisionError), staged:  # it was written to, and nothing ran
                raise ZeroDivisionError
        busy, current = True, 7
        with pytest.raises(CgplanError, match="from another stream"):
            runner(x=x)
    busy = False
    same(runner(x=x), x * 2)


@pytest.mark.gpu
def test_static_buffers_are_not_written_behind_the_back_of_a_busy_stream() -> None:
    runner = cgplan.capture(double, SQUARE, device="cuda", compilation={"cudagraph_capture_sizes": [4]})
    x = torch.ones(3, 3, device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(500_000_000)
        output = runner.run_eagerly(x=x)
    with torch.cuda.stream(second):
        with pytest.raises(CgplanError, match="from another stream"), runner.stage(3) as buffers:
            buffers["x"].fill_(5)
        with pytest.raises(CgplanError, match="from another stream"):
            runner.run_eagerly(x=x * 5)
        first.synchronize()
        same(output, x * 2)
        with runner.stage(3) as buffers:
            buffers["x"].fill_(5)
        same(buffers.output, x * 10)


# --- outputs that lie in what a call was given ------------------------------------------------------------------


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
def test_an_argument_that_comes_back_is_an_object_of_its_own(backend: GraphBackend, policy: str) -> None:
    """What the code between segments does to it meets no later replay."""
    runner = open_runner(backend, Chain(), compilation={**WRAPPERS, "address_check": policy})
    for rows in (3, 3, 8, 1, 3):
        x = torch.randn(rows, 3, device=backend.device)
        same(runner(x=x), (x * 2 + 1)[:, None] * 3)
    runner.close()


def test_an_argument_that_comes_back_gives_its_memory_to_later_captures(backend: GraphBackend) -> None:
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
    """Returns memory that no graph owns, by an object that each eager call makes anew."""

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


@pytest.mark.parametrize("kind", ["input", "detached", "state"])
@pytest.mark.parametrize("inference", [False, True])
def test_views_of_other_memory_are_handed_out_anew(backend: GraphBackend, kind: str, inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        model = Gives(kind).to(backend.device)
        options = CUDAGraphOptions(num_of_warmups=0, address_check="always")
        wrapped = CUDAGraphWrapper(model, CUDAGraphMode.FULL, backend=backend, options=options)
        x = torch.ones(4, 3, device=backend.device)
        for _ in range(4):
            x.fill_(1)
            with forward_context(CUDAGraphMode.FULL, BatchDescriptor(4)):
                y = wrapped(x)
            same(y.unsqueeze_(1).clone(), torch.full_like(x, 2)[:, None])
    wrapped.reset()


class Holds:
    """No module: its cache is found in neither arguments nor modules."""

    def __init__(self, device: torch.device) -> None:
        self.cache = torch.zeros(8, 3, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        self.cache[: len(x)].copy_(x * 2)
        return self.cache[: len(x)]


@pytest.mark.parametrize("kind", ["object", "method", "closure"])
def test_views_of_memory_that_is_held_in_other_ways(backend: GraphBackend, kind: str) -> None:
    held = Holds(backend.device)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "object": held,
        "method": held.__call__,
        "closure": lambda x: held(x),
    }
    wrapped = CUDAGraphWrapper(ways[kind], CUDAGraphMode.FULL, backend=backend)
    x = torch.ones(4, 3, device=backend.device)
    with torch.no_grad():
        for turn in range(4):
            x.fill_(turn)
            with forward_context(CUDAGraphMode.FULL, BatchDescriptor(4)):
                y = wrapped(x)
            same(y.unsqueeze_(1).clone(), torch.full_like(x, 2 * turn)[:, None])
    wrapped.reset()
