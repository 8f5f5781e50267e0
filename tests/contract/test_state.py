"""A capture leaves the model as it found it, in all ways to capture."""

from __future__ import annotations

import gc
import operator
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache, partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from checks import Wrapper, same
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_map_only

import cgplan
from cgplan import AddressError, CaptureError, GraphRunner, Input
from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.context import current_forward_context
from cgplan.backends.host_sync import storage_id
from cgplan.graphs.footprint import current_look
from cgplan.modes import CUDAGraphMode

POLICIES = ["eager", "adaptive", "lazy"]


class Counts(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.n = torch.zeros(1, device=device)

    def forward(self, x: Tensor) -> Tensor:
        self.n.add_(1)
        return x + self.n


def open_runner(
    backend: GraphBackend, model: Callable[..., Any], **compilation: Any
) -> GraphRunner:
    return cgplan.capture(
        model,
        {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)},
        compilation={"cudagraph_capture_sizes": [1, 2, 4], "outputs": "clone", **compilation},
        device=backend.device.type,
    )


def answers(call: Callable[..., Tensor], device: torch.device, *sizes: int) -> list[float]:
    found = []
    for size in sizes:
        (value,) = set(call(x=torch.zeros(size, 2, device=device)).flatten().tolist())
        found.append(value)
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("warmups", [0, 2])
def test_the_first_call_answers_like_a_fresh_model(
    backend: GraphBackend, policy: str, mode: str, warmups: int
) -> None:
    device = backend.device
    piecewise = {"splitting_modules": ["inner"]} if mode == "PIECEWISE" else {}

    class Model(Counts):
        def __init__(self) -> None:
            super().__init__(device)
            self.inner = nn.Softmax(-1)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.inner(x) * 0

    model = Model()
    options = {
        "cudagraph_mode": mode,
        "cudagraph_num_of_warmups": warmups,
        "capture_policy": policy,
        **piecewise,
    }
    with closing(open_runner(backend, model, **options)) as runner:
        if policy != "lazy":
            assert "model (Model): 1 tensors" in runner.report.looked_at
            assert [(place.path, place.nbytes, place.kept) for place in runner.report.state] == [
                ("model.n", 4, "device")
            ]
        assert answers(runner, device, 4, 1, 2, 3, 9) == [1, 2, 3, 4, 5]
        assert model.n.item() == 5
        runner.recapture()
        assert answers(runner, device, 1, 3) == [6, 7]
        if policy == "adaptive":
            runner.replan(apply=False)
            assert answers(runner, device, 3) == [8]
            runner.replan()
            assert answers(runner, device, 3, 1) == [9, 10]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_capture_that_fails_leaves_nothing_of_its_warm_ups(
    backend: GraphBackend, policy: str
) -> None:
    class Asks(Counts):
        rows = 0

        def forward(self, x: Tensor) -> Tensor:
            self.rows = len(x)
            y = super().forward(x)
            return y * float(y.sum().item() != 0.125)

    model = Asks(backend.device)
    if policy != "lazy":
        with pytest.raises(
            CaptureError, match=r"aten::_local_scalar_dense needs the host, at .*y\.sum"
        ):
            open_runner(backend, model, capture_policy=policy, cudagraph_mode="FULL")
        assert model.n.item() == 0
        assert "rows" not in vars(model)
        return
    with closing(
        open_runner(backend, model, capture_policy=policy, cudagraph_mode="FULL")
    ) as runner:
        assert answers(runner, backend.device, 3) == [1]
        assert len(runner.report.failed) == 1
        assert (model.n.item(), model.rows) == (1, 3)


LIBRARY = torch.library.Library("state_test", "DEF")
LIBRARY.define("tick(Tensor(a!) count) -> ()")
for key in ("CPU", "CUDA"):
    LIBRARY.impl("tick", lambda count: (count.add_(1), None)[1], key)


def test_writes_of_a_custom_operator_in_python_are_put_back(backend: GraphBackend) -> None:
    model = Counts(backend.device)

    def forward(x: Tensor) -> Tensor:
        torch.ops.state_test.tick(model.n)
        return x + model.n

    with closing(open_runner(backend, forward)) as runner:
        assert model.n.item() == 0
        assert [place.kept for place in runner.report.state] == ["device"]
        assert answers(runner, backend.device, 4, 2) == [1, 2]


class Wrapped(Wrapper):
    """Its operators run on the tensor inside, where autograd counts no writes."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda wrapped: wrapped.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


class OfSubclass(nn.Module):
    """A weight that the forward reads, and a counter that it writes in place."""

    def __init__(self, device: torch.device, wrap: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = wrap(torch.full((2, 2), 0.5, device=device))
        self.n = wrap(torch.zeros(1, device=device))
        self.softmax = nn.Softmax(-1)
        self.of_input = wrap if wrap is not Wrapped else torch.clone

    def forward(self, x: Tensor) -> Tensor:
        self.n.add_(1)
        y = self.of_input(x + 1) @ self.weight + self.n
        if isinstance(y, DTensor):
            y = y.to_local()
        return y + self.softmax(y) * 0


@pytest.fixture
def only_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["wrapper", "DTensor"])
def wrap(request: pytest.FixtureRequest, backend: GraphBackend) -> Any:
    """Makes a tensor of a subclass of a dense one."""
    if request.param == "wrapper":
        return Wrapped
    request.getfixturevalue("only_rank")
    mesh = DeviceMesh(backend.device.type, [0])
    return lambda tensor: DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


@pytest.mark.filterwarnings("error:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    "how",
    [
        {"cudagraph_mode": "FULL"},
        {"cudagraph_mode": "FULL", "cudagraph_num_of_warmups": 1},
        {"splitting_modules": ["softmax"], "cudagraph_mode": "PIECEWISE"},
    ],
)
def test_what_a_subclass_wraps_is_read_and_put_back(
    backend: GraphBackend, wrap: Any, how: dict[str, Any]
) -> None:
    model = OfSubclass(backend.device, wrap).eval()
    inner = "inner" if wrap is Wrapped else "_local_tensor"
    with closing(open_runner(backend, model, **how)) as runner:
        assert (f"model.n.{inner}", 4, "device") in [
            (place.path, place.nbytes, place.kept) for place in runner.report.state
        ]
        assert answers(runner, backend.device, 4, 1, 2, 9) == [2, 3, 4, 5]
        assert sum(runner.stats.replays.values()) == 3
        assert getattr(model.n, inner).item() == 4
        getattr(model.weight, inner).fill_(1)
        assert answers(runner, backend.device, 3) == [7]
        setattr(model.weight, inner, torch.zeros(2, 2, device=backend.device))
        with pytest.raises(AddressError, match=rf"changed +model\.weight\.{inner}"):
            answers(runner, backend.device, 3)


def test_tensor_parallel_layers_of_torch_are_captured(only_rank: None) -> None:
    """Weights are DTensors, and their sums tensors that wait for the collective."""
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    x = torch.randn(3, 2)
    with torch.no_grad():
        want = model(x)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        split = parallelize_module(model, DeviceMesh("cpu", [0]), plan)
        inputs = {"input": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
        compilation = {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [4]}
        with closing(
            cgplan.capture(split, inputs, compilation=compilation, device="cpu")
        ) as runner:
            same(runner(input=x), want)
            model[0].weight.to_local().zero_()
            same(runner(input=x), model(x))
            assert sum(runner.stats.replays.values()) == 2


def test_a_wrapper_of_a_tensor_is_no_output(backend: GraphBackend, wrap: Any) -> None:
    def model(x: Tensor) -> Any:
        return wrap(x * 2)

    with pytest.raises(CaptureError, match=r"the model returns a (DTensor|Wrapped)") as refused:
        open_runner(backend, model, cudagraph_mode="FULL")
    assert "to_local" in (refused.value.remedy or "")
    x = torch.rand(3, 2, device=backend.device)
    g = cgplan.graphed(model)
    for _ in range(4):
        assert type(g(x)) is type(wrap(x))
    assert not g.graph_calls


def test_graphed_reads_and_puts_back_what_a_subclass_wraps(
    backend: GraphBackend, wrap: Any
) -> None:
    model = OfSubclass(backend.device, wrap).eval()
    g = cgplan.graphed(model)
    x = torch.zeros(3, 2, device=backend.device)
    with torch.no_grad():
        assert [g(x)[0, 0].item() for _ in range(5)] == [2, 3, 4, 5, 6]
        assert g.graph_calls == 3


def test_a_session_that_fails_at_its_last_key_keeps_nothing_of_the_first(
    backend: GraphBackend,
) -> None:
    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: Tensor | None = None
            self.register_buffer("filled", torch.zeros(1, device=backend.device))

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.ones(1, device=x.device)
                self.filled.fill_(5)
            return x.nonzero() if len(x) == 1 else x + self.filled + self.table

    model = Fills()
    with pytest.raises(CaptureError, match="nonzero"):
        open_runner(backend, model, cudagraph_mode="FULL")
    assert model.table is None
    assert model.filled.item() == 0


class Folds(nn.Module):
    """Scales its weight once, on first use, by a write that torch's versions do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 4.0))
        self.folded = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.folded:
            self.weight.data.div_(2)
            self.folded = True
        return x * self.weight


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("warmups", [0, 1])
def test_a_weight_that_is_folded_once_stays_with_its_flag(
    backend: GraphBackend, policy: str, inference: bool, warmups: int
) -> None:
    with torch.inference_mode(inference):
        model = Folds().to(backend.device)
        options = {"capture_policy": policy, "cudagraph_num_of_warmups": warmups}
        with closing(open_runner(backend, model, **options)) as runner:
            for _ in range(2):
                same(
                    runner(x=torch.ones(4, 2, device=backend.device)),
                    torch.full((4, 2), 2.0, device=backend.device),
                )
        same(
            model(torch.ones(1, 2, device=backend.device)),
            torch.full((1, 2), 2.0, device=backend.device),
        )


def test_a_count_by_data_is_put_back(backend: GraphBackend) -> None:
    model = Counts(backend.device)

    def forward(x: Tensor) -> Tensor:
        model.n.data.add_(1)
        return x + model.n

    with closing(open_runner(backend, forward)) as runner:
        assert answers(runner, backend.device, 4, 2, 1) == [1, 2, 3]


@pytest.mark.parametrize("start", [list, partial(deque, maxlen=2)])
def test_a_list_that_each_call_reads_and_adds_to_is_told_and_found_by_its_numbers(
    backend: GraphBackend, start: Callable[[], Any]
) -> None:
    class Past(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.past, self.seen = start(), list[Tensor]()

        def forward(self, x: Tensor) -> Tensor:
            y = sum(self.past, x + 1)
            self.past.append(y[0].clone())
            self.seen.append(y)  # which nothing reads
            return y

    with closing(
        open_runner(backend, Past().eval(), cudagraph_mode="FULL", verify="always")
    ) as runner:
        told = "the forward changes len(model.past), len(model.seen); replays do not, nor do they see it change"
        assert runner.report.warnings == (told,)
        with pytest.raises(
            cgplan.NumbersError, match="differs from the model's own code: output 0"
        ):
            answers(
                runner, backend.device, 4, 4, 4
            )  # it holds memory of the pool, whose first numbers may be any


@pytest.mark.gpu
def test_copies_of_the_state_are_freed_with_the_session() -> None:
    """An exception that a forward or a library keeps holds the frames of a whole session."""
    seen: SimpleQueue[ValueError] = SimpleQueue()

    class Keeps(Counts):
        def forward(self, x: Tensor) -> Tensor:
            try:
                raise ValueError
            except ValueError as error:
                seen.put(error)
            self.n.add_(1)
            return x + self.n[: x.shape[0], None]

    backend = select_backend("cuda")
    model = Keeps(backend.device)
    model.n = torch.zeros(1 << 26, device=backend.device)  # 256 MiB
    before = torch.cuda.memory_allocated()
    with closing(open_runner(backend, model)) as runner:
        assert runner.report.state[0].kept == "device"
        assert torch.cuda.memory_allocated() - before < 200 << 20
        assert runner.report.workspace_bytes < 200 << 20


def test_a_cache_has_room_for_a_few_calls_only(backend: GraphBackend) -> None:
    """Positions move on with each run, so they are put back between keys, and between the runs that time a replan."""

    class Cache(Counts):
        def __init__(self) -> None:
            super().__init__(backend.device)
            self.n = torch.zeros(1, dtype=torch.long, device=backend.device)
            self.rows = torch.zeros(6, 2, device=backend.device)

        def forward(self, x: Tensor) -> Tensor:
            self.rows.index_copy_(0, self.n, x[:1])
            self.n.add_(1)
            return x + self.rows.sum(0)

    with closing(open_runner(backend, Cache(), capture_policy="adaptive")) as runner:
        x = torch.ones(4, 2, device=backend.device)
        for call in range(1, 4):
            same(runner(x=x), x * (1 + call))
        runner.replan()
        same(runner(x=x), x * 5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_eager_piece_that_reads_a_weight_which_a_hook_makes(backend: GraphBackend) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.utils.spectral_norm(nn.Linear(2, 2))).to(
        backend.device
    )
    with pytest.raises(
        CaptureError, match=r"an eager piece reads model\[1\]\.weight, which graph code binds"
    ):
        cgplan.capture(
            model,
            {"input": Input(shape=("num_tokens", 2), dtype="float32", pad=0)},
            compilation={
                "cudagraph_capture_sizes": [4],
                "cudagraph_mode": "PIECEWISE",
                "splitting_modules": ["1"],
            },
            device=backend.device.type,
        )


class Stale(nn.Module):
    """Graph code binds attributes of a piece: on each call, or on first use."""

    def __init__(self, bind: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.bind, self.piece = bind, Adds()

    def forward(self, x: Tensor) -> Tensor:
        self.bind(self.piece, x)
        return self.piece(x * 2) * 1


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m: Tensor | None = torch.zeros(2)

    def forward(self, h: Tensor) -> Tensor:
        assert self.m is not None
        return h + self.m.to(h.device)


@pytest.mark.parametrize(
    "bind", [lambda p, x: setattr(p, "m", x), lambda p, x: setattr(p, "m", x + 1)]
)
def test_an_eager_piece_that_reads_what_graph_code_binds(
    backend: GraphBackend, bind: Callable[..., None]
) -> None:
    with pytest.raises(
        CaptureError, match=r"an eager piece reads piece\.m, which graph code binds on each call"
    ):
        open_runner(backend, Stale(bind), cudagraph_mode="PIECEWISE", splitting_modules=["piece"])


class Layer:
    """As in transformers' DynamicCache: a flag says that the tensors are there, and each call binds longer ones."""

    def __init__(self) -> None:
        self.is_ready, self.keys = False, None

    def update(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            self.keys, self.is_ready = x[:0].clone(), True
        self.keys = torch.cat([self.keys, x])
        return self.keys


class Attention(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        if not self.layers:
            self.layers.append(Layer())
        return x + self.layers[0].update(x).sum(0)


@pytest.mark.parametrize("warmups", [0, 1])
@pytest.mark.parametrize("has_layers", [True, False])
def test_a_cache_that_grows_is_refused_although_the_first_run_makes_it(
    backend: GraphBackend, has_layers: bool, warmups: int
) -> None:
    model = Attention([Layer()] if has_layers else [])
    options = {"cudagraph_mode": "FULL", "cudagraph_num_of_warmups": warmups}
    with pytest.raises(
        CaptureError, match=r"the forward reads layers\[0\]\.keys and binds it again"
    ):
        open_runner(backend, model, **options)
    if has_layers:
        assert (model.layers[0].is_ready, model.layers[0].keys) == (False, None)


@pytest.mark.parametrize("strict", [False, True])
def test_a_cache_that_an_eager_piece_makes_may_grow(backend: GraphBackend, strict: bool) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.piece = Attention([])

        def forward(self, x: Tensor) -> Tensor:
            return self.piece(x * 1) * 1  # type: ignore[no-any-return]

    options = {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["piece"], "strict": strict}
    with closing(open_runner(backend, Whole().eval(), **options)) as runner:
        assert not runner.report.warnings
        assert answers(runner, backend.device, 4, 1) == [0, 0]


@pytest.mark.parametrize("reads", [lambda piece: piece.step, lambda piece: len(piece.past)])
def test_numbers_that_an_eager_piece_changes_and_a_segment_is_given(
    backend: GraphBackend, reads: Any
) -> None:
    """A step in Python, and the length of a cache that grows: a segment would add that of the capture for ever."""

    class Piece(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step, self.past = 3, torch.zeros(3, 8, device=backend.device)

        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            self.past = torch.cat([self.past, x[:1] * 0])
            return x * 1

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.piece = Piece()

        def forward(self, x: Tensor) -> Tensor:
            return self.piece(x + reads(self.piece))

    compilation = {
        "cudagraph_mode": "PIECEWISE",
        "cudagraph_capture_sizes": [4],
        "splitting_modules": ["piece"],
    }
    inputs = {"x": Input(shape=("num_tokens", 8), dtype="float32", pad=0)}
    runner = cgplan.capture(
        Whole().eval(), inputs, compilation=compilation, device=backend.device.type
    )
    with (
        closing(runner),
        pytest.raises(cgplan.NumbersError, match="differs from the model's own code") as caught,
    ):
        runner(x=torch.zeros(4, 8, device=backend.device))
    same(caught.value.output, torch.full((4, 8), 3.0, device=backend.device))


def test_an_eager_piece_may_read_what_graph_code_binds_on_first_use(backend: GraphBackend) -> None:
    def bind(piece: Any, x: Tensor) -> None:
        if piece.m is None:
            piece.m = torch.ones(2, device=x.device)

    model = Stale(bind)
    model.piece.m = None
    with closing(
        open_runner(backend, model, cudagraph_mode="PIECEWISE", splitting_modules=["piece"])
    ) as runner:
        assert answers(runner, backend.device, 4, 1) == [1, 1]


def test_a_global_with_the_name_of_an_attribute_is_not_looked_at(backend: GraphBackend) -> None:
    global n
    n = torch.zeros(1, device=backend.device)
    with closing(open_runner(backend, Counts(backend.device))) as runner:
        for size in (1, 2, 4):
            n = runner(x=torch.zeros(size, 2, device=backend.device))
    del n


def test_a_table_for_each_size_stays_with_the_graph_that_reads_it(backend: GraphBackend) -> None:
    """It is made ahead of its capture, even without warm-ups: a capture would make it in graph memory."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            rows = len(x)
            if rows not in self.tables:
                self.tables[rows] = torch.arange(float(rows), device=x.device)
            return x + self.tables[rows][:, None]

    model = Tables()
    with closing(
        open_runner(backend, model, cudagraph_mode="FULL", cudagraph_num_of_warmups=0)
    ) as runner:
        assert list(model.tables) == [4, 2, 1], "entries of a dict stay"
        kept = torch.full((4,), 7.0, device=backend.device)  # where a freed table lay
        for rows in (4, 2, 1):
            x = torch.zeros(rows, 2, device=backend.device)
            assert runner(x=x)[:, 0].tolist() == list(range(rows))
        assert kept.sum() == 28


def test_state_without_tensors_is_told(backend: GraphBackend) -> None:
    inputs = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    options: Any = {"compilation": {"cudagraph_capture_sizes": [4]}, "device": backend.device.type}
    with closing(
        cgplan.capture(lambda x: x + 1, inputs, state=[Counts(backend.device), 3], **options)
    ) as runner:
        assert any(text.startswith("state[1] (int) holds no") for text in runner.report.warnings)


def test_state_says_what_is_looked_at(backend: GraphBackend) -> None:
    class Engine:
        def __init__(self) -> None:
            self.model = Counts(backend.device)
            self.requests = [torch.zeros(1, device=backend.device)]

        def forward_decode(self, x: Tensor) -> Tensor:
            return self.model(x)  # type: ignore[no-any-return]

    engine = Engine()
    inputs = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    compilation = {
        "cudagraph_capture_sizes": [4],
        "cudagraph_mode": "FULL",
        "address_check": "always",
    }
    runner = cgplan.capture(
        engine.forward_decode,
        inputs,
        compilation=compilation,
        device=backend.device.type,
        state=[engine.model],
    )
    with closing(runner):
        assert answers(runner, backend.device, 3) == [1]
        engine.requests[0] = torch.zeros(1, device=backend.device)
        assert answers(runner, backend.device, 3) == [2]
        kept, engine.model.n = engine.model.n, torch.zeros(1, device=backend.device)
        with pytest.raises(cgplan.AddressError, match=r"state\[0\]\.n"):
            runner(x=torch.zeros(3, 2, device=backend.device))
        assert kept.item() == 2


SCALES: dict[str, Tensor] = {}


def scaled(x: Tensor) -> Tensor:
    return x * SCALES["now"]


class Held(nn.Module):
    """Reads a tensor of its class: a default of its own, of a method that ``forward`` names, and of another class."""

    W: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self._shifted(x * self.W)

    def _shifted(self, x: Tensor) -> Tensor:
        return sum([x + Table.shift for _ in range(2)], start=x)


class Table:
    shift: Tensor


by_helpers = types.ModuleType("by_helpers")  # as another file: a function and what it reads
exec("def scaled_elsewhere(x):\n    return x * FACTOR", vars(by_helpers))
scaled_elsewhere = by_helpers.scaled_elsewhere


def in_hook(holder: Any) -> nn.Module:
    hooked = nn.Linear(2, 2).to(holder[0].device)
    hooked.register_forward_hook(lambda _, args, output: output + holder[0])
    return hooked


EXCHANGED: dict[str, tuple[Any, Any, Callable[[Any], Callable[[Tensor], Tensor]]]] = {
    "dict of the file": (SCALES, "now", lambda _: lambda x: scaled(x)),
    "hook": ([None], 0, in_hook),
    "class": (Held, "W", lambda _: Held()),
    "another class": (Table, "shift", lambda _: Held()),
    "function of another file": (by_helpers, "FACTOR", lambda _: lambda x: scaled_elsewhere(x)),
}


@pytest.mark.parametrize("place", EXCHANGED)
@pytest.mark.parametrize("warm", [False, True])
def test_a_tensor_that_is_exchanged_is_noticed_wherever_it_is(
    backend: GraphBackend, place: str, warm: bool
) -> None:
    holder, key, make = EXCHANGED[place]
    bind: Callable[[Any, Any, Any], None] = (
        operator.setitem if isinstance(holder, dict | list) else setattr
    )
    held = {
        (h, k): torch.ones(2, device=backend.device)
        for h, k in ((Held, "W"), (Table, "shift"), (by_helpers, "FACTOR"))
    }
    for (owner, name), tensor in held.items():
        setattr(owner, name, tensor)
    kept = torch.ones(2, device=backend.device)
    bind(holder, key, kept)
    model, x = make(holder), torch.zeros(2, 2, device=backend.device)
    with closing(
        open_runner(backend, lambda x: model(x), address_check="always" if warm else "first")
    ) as runner:
        if warm:
            runner(x=x)
            runner(x=x)
        bind(holder, key, torch.full((2,), 5.0, device=backend.device))
        with pytest.raises(cgplan.AddressError, match="1 changed"):
            runner(x=x)
    assert kept.tolist() == [1, 1]


@pytest.mark.parametrize("kind", ["scripted", "traced", "nested"])
def test_torchscript_models_are_captured(backend: GraphBackend, kind: str) -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).to(backend.device).eval()
    x = torch.randn(3, 2, device=backend.device)
    model: Any = {
        "scripted": lambda: torch.jit.script(plain),
        "traced": lambda: torch.jit.trace(plain, x),
        "nested": lambda: nn.Sequential(torch.jit.script(plain), nn.Identity()),
    }[kind]()
    call = (lambda x: model(x)) if kind != "scripted" else model
    for mode in ("FULL",):
        with closing(open_runner(backend, lambda x: call(x), cudagraph_mode=mode)) as runner:
            torch.testing.assert_close(runner(x=x), plain(x), rtol=0, atol=0)


CALLS = 0


class Filled(nn.Module):
    """A table that the first call fills, behind a flag that no walk over the model sees."""

    def __init__(
        self, device: torch.device, flag: str, source: str = "numbers", counts: str = ""
    ) -> None:
        super().__init__()
        self.counts, self.calls = counts, 0
        self.register_buffer("table", torch.zeros(2, device=device))
        self.flag, self.source = flag, source
        self.of_thread = threading.local()
        self.cached = cache(self.fill)

    def fill(self) -> None:
        self.table.copy_(torch.arange(1.0, 3.0, device=self.table.device))

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        if self.counts == "attribute":
            self.calls += 1
        elif self.counts == "global":
            CALLS += 1
        if self.flag == "functools.cache":
            self.cached()
        elif not hasattr(self.of_thread, "is_filled"):
            self.of_thread.is_filled = True
            if self.source == "numbers":
                self.fill()
            else:
                self.table.copy_(x.mean(0) + 1)
        return x + self.table


@pytest.mark.parametrize("counts", ["", "attribute", "global"])
@pytest.mark.parametrize("flag", ["functools.cache", "threading.local"])
def test_a_table_behind_a_hidden_flag_stays_filled(
    backend: GraphBackend, flag: str, counts: str
) -> None:
    """Also where each run changes an attribute, which might be the flag, or a global, which is not put back."""
    x = torch.rand(4, 2, device=backend.device)
    plain = Filled(backend.device, flag)
    for ways in ({}, {"cudagraph_num_of_warmups": 2}):
        model = Filled(backend.device, flag, counts=counts)
        sizes = [4] if counts == "global" else [2, 4]
        with closing(
            open_runner(backend, model, **{"cudagraph_capture_sizes": sizes, **ways})
        ) as runner:
            same(runner(x=x), plain(x))
            same(model(x), plain(x))


class WritesUncounted(nn.Module):
    """One size writes in place, on first use or in each run, and no version shows it."""

    def __init__(self, device: torch.device, *, by_data: bool, numel: int, once: bool) -> None:
        super().__init__()
        self.piece = nn.Linear(2, 2, device=device)
        self.register_buffer("table", torch.zeros(numel, device=device))
        self.by_data = by_data
        self.once = once
        self.is_done = False

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 2 and not self.is_done:
            (self.table.data if self.by_data else self.table).add_(1)
            self.is_done = self.once
        return self.piece(x * 2) + self.table[:2]


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("numel", [2, 300_000])
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_write_that_no_version_shows_is_put_back_or_stays_with_its_flag(
    backend: GraphBackend, by_data: bool, numel: int, once: bool, mode: str
) -> None:
    warm = {"cudagraph_num_of_warmups": 1, "cudagraph_mode": mode, "verify": "off"}
    pieces = ["piece"] if mode == "PIECEWISE" else []
    with torch.inference_mode(not by_data), torch.no_grad():
        model = WritesUncounted(backend.device, by_data=by_data, numel=numel, once=once)
        with closing(open_runner(backend, model, splitting_modules=pieces, **warm)) as runner:
            assert model.table[0] == model.is_done == once
            for rows in (4, 2, 1, 2):
                x = torch.rand(rows, 2, device=backend.device)
                before = model.table.clone()
                found = runner(x=x)
                after = model.table.clone()
                model.table.copy_(before)
                same(found, model(x))
                same(after, model.table)


class Scaled:
    def __init__(self) -> None:
        self.by: float | None = None


class SharesAnObject(nn.Module):
    """Graph code fills an object between the pieces that it is given to, once."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(GivenAnObject(device) for _ in range(2))
        self.shared = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        for piece in self.pieces:
            x = x + piece(x, self.shared)
            if self.shared.by is None:
                self.shared.by = 2.0
        return x * self.shared.by


class GivenAnObject(nn.Linear):
    def __init__(self, device: torch.device) -> None:
        super().__init__(2, 2, device=device)

    def forward(self, x: Tensor, shared: Scaled) -> Tensor:
        return super().forward(x)


def test_an_object_given_to_pieces_may_be_filled_on_first_use(backend: GraphBackend) -> None:
    model = SharesAnObject(backend.device).requires_grad_(False)
    split = {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["pieces.*"]}
    with closing(open_runner(backend, model, **split)) as runner:
        x = torch.rand(4, 2, device=backend.device)
        same(runner(x=x), model(x))


class GrowingTable(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.table = torch.arange(1.0, device=device)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < len(x):
            self.table = torch.arange(float(len(x)), device=x.device)
        return x + self.table[: len(x), None]


def test_tables_that_graphs_on_demand_read_stay_when_larger_ones_take_their_place(
    backend: GraphBackend,
) -> None:
    model = GrowingTable(backend.device)
    tables = []
    with closing(open_runner(backend, model, capture_policy="lazy")) as runner:
        for size in (1, 2, 4):
            runner(x=torch.zeros(size, 2, device=backend.device))
            tables.append(weakref.ref(model.table))
        gc.collect()
        assert len(runner.plan.keys) == 3
        assert None not in [table() for table in tables]
        x = torch.rand(1, 2, device=backend.device)
        same(runner(x=x), model(x))


class ScalesOnceAtTwoRows(nn.Module):
    """And sets a number for each size, which its eager piece reads."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.piece = nn.Linear(2, 2, device=device)
        self.register_buffer("scale", torch.ones(2, device=device))
        self.is_scaled = False
        self.rows = 0

    def forward(self, x: Tensor) -> Tensor:
        self.rows = len(x)
        if self.rows == 2 and not self.is_scaled:
            self.scale.mul_(3)
            self.is_scaled = True
        return self.piece(x * 2) + self.scale


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_first_use_of_a_middle_size_is_computed_once(backend: GraphBackend, mode: str) -> None:
    model = ScalesOnceAtTwoRows(backend.device).requires_grad_(False)
    pieces = ["piece"] if mode == "PIECEWISE" else []
    runner = open_runner(backend, model, cudagraph_mode=mode, splitting_modules=pieces)
    with closing(runner):
        assert (model.is_scaled, model.scale.tolist()) == (True, [3, 3])
        x = torch.rand(2, 2, device=backend.device)
        same(runner(x=x), model(x))
        assert "the forward sets rows anew for each size" in "".join(runner.report.warnings)


def test_a_number_of_each_size_may_be_ignored(backend: GraphBackend) -> None:
    model = ScalesOnceAtTwoRows(backend.device).requires_grad_(False)
    runner = open_runner(backend, model, cudagraph_mode="FULL", ignore=["model.rows"])
    with closing(runner):
        assert "rows" not in "".join(runner.report.warnings)


class CacheAtAFreedAddress(nn.Module):
    """Its cache has the storage id of a tensor that the same run had read and freed."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, device=device))
        self.values: Tensor | None = None

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        freed = self.weight + 1
        freed_id = storage_id(freed)
        rows = x * (freed * 2)
        del freed
        if self.values is None:
            tried = []
            for _ in range(10_000):
                tried.append(torch.zeros(32, 2, device=x.device))
                if storage_id(tried[-1]) == freed_id:
                    break
            else:
                pytest.skip("the address was not used again")
            self.values = tried[-1]
        self.values.index_copy_(0, places, rows)
        return self.values[places] * self.weight


def test_a_cache_made_at_the_address_of_a_freed_tensor_is_captured(backend: GraphBackend) -> None:
    model = CacheAtAFreedAddress(backend.device).requires_grad_(False)
    inputs = {
        "x": Input(shape=("num_tokens", 2), dtype="float32", pad=0),
        "places": Input(shape=("num_tokens",), dtype="int64", pad=0),
    }
    compilation = {"cudagraph_capture_sizes": [1, 2]}
    capture = partial(cgplan.capture, compilation=compilation, device=backend.device.type)
    with closing(capture(model, inputs)) as runner:
        batch = {
            "x": torch.rand(2, 2, device=backend.device),
            "places": torch.arange(2, device=backend.device),
        }
        same(runner(**batch), model(**batch))


def test_a_table_made_of_padding_behind_a_hidden_flag_is_refused(backend: GraphBackend) -> None:
    model = Filled(backend.device, "threading.local", "inputs")
    with pytest.raises(CaptureError, match=r"computes table on first use, from inputs") as refused:
        open_runner(backend, model)
    assert "build the model again" in (refused.value.remedy or "")


class Made(nn.Module):
    """State that is computed from the inputs on first use, in one of several ways."""

    def __init__(self, device: torch.device, kind: str) -> None:
        super().__init__()
        self.kind, self.scale, self.kept = kind, torch.ones(1, device=device), dict[str, Tensor]()
        self.last: Tensor | None = None
        self.factor: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "statistics of the first batch" and self.last is None:
            self.scale.data.copy_(x.mean() + 2)
        elif self.kind == "entry of a dict" and "memory" not in self.kept:
            self.kept["memory"] = x.mean() + 2
        elif self.kind == "filled later" and "memory" not in self.kept:
            self.kept["memory"] = x.new_zeros(1)
            self.kept["memory"].index_copy_(
                0, torch.zeros(1, dtype=torch.int64, device=x.device), x.mean()[None] + 2
            )
        elif self.kind == "a number" and self.factor is None:
            self.factor = float(x.mean()) + 2
        elif self.kind == "running mean":
            now = x.mean()[None] + 2
            self.kept["memory"] = (
                self.kept["memory"].lerp_(now, 0.1) if "memory" in self.kept else now
            )
        elif self.kind == "made for its shape" and "memory" not in self.kept:
            self.kept["memory"] = torch.ones_like(x[:1, :1]) * 2
        elif self.kind == "written on each run":
            memory = self.kept.setdefault("memory", x.new_zeros(1))
            memory.copy_(x.mean()[None] + 2)
        self.last = x + 1  # it is never read
        return (
            x * self.kept.get("memory", self.scale) * (1.0 if self.factor is None else self.factor)
        )


class Prepares(nn.Module):
    """A tensor that the first call makes; each call leaves something of Python."""

    def __init__(self, kind: str, leaves: str) -> None:
        super().__init__()
        self.kind, self.leaves, self.calls = kind, leaves, 0
        self.sizes, self.counts = list[int](), {"calls": 0}
        self.table: Tensor | None = None
        self.last: Tensor | None = None
        self.prepared = cache(self.prepare)

    def prepare(self, device: torch.device) -> None:
        self.table = torch.arange(1.0, 3.0, device=device)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "of numbers":
            self.prepared(x.device)
        elif self.kind == "of a number read" and self.table is None:
            self.table = torch.full((2,), float(x.max()) + 2, device=x.device)
        elif self.table is None:
            self.table = x.mean(0) + 2
        if self.leaves == "list":
            self.sizes.append(len(x))
        elif self.leaves == "dict":
            self.counts["calls"] += 1
        elif self.leaves == "output":
            self.last = x * 2
        elif self.leaves == "attribute":
            self.calls += 1
        assert self.table is not None
        return x * self.table


@pytest.mark.parametrize("leaves", ["", "attribute", "list", "dict", "output"])
@pytest.mark.parametrize("kind", ["of numbers", "of a batch", "of a number read"])
def test_what_the_first_call_makes_after_warm_up(
    backend: GraphBackend, kind: str, leaves: str
) -> None:
    """Numbers behind a hidden flag stay; those of the batch of a warm-up go."""
    model, plain = (Prepares(kind, leaves).eval() for _ in range(2))
    g = cgplan.graphed(model)
    g.warm_up(torch.zeros(2, 2, device=backend.device))
    for _ in range(5):
        x = torch.rand(2, 2, device=backend.device)
        same(g(x), plain(x))


MADE_WAYS = pytest.mark.parametrize("ops", [(), ("aten::add",), ("aten::mul",)])


def way_of(ops: tuple[str, ...]) -> dict[str, Any]:
    return (
        {"cudagraph_mode": "PIECEWISE", "piecewise": "modules", "splitting_ops": list(ops)}
        if ops
        else {}
    )


@MADE_WAYS
@pytest.mark.parametrize("kind", ["entry of a dict", "filled later", "a number", "running mean"])
def test_state_made_of_inputs_on_first_use_is_refused_until_a_real_batch_made_it(
    backend: GraphBackend, kind: str, ops: tuple[str, ...]
) -> None:
    x = torch.rand(4, 2, device=backend.device)
    model, plain = Made(backend.device, kind), Made(backend.device, kind)
    with pytest.raises(
        CaptureError,
        match=r"the forward computes (kept\.memory|a value for the host .*) on first use",
    ) as refused:
        open_runner(backend, model, **way_of(ops))
    assert "on one real batch" in (refused.value.remedy or "")
    assert not model.kept, "a dict is put back"
    same(model(x), plain(x))
    with closing(open_runner(backend, model, **way_of(ops))) as runner:
        same(runner(x=x * 3), plain(x * 3))


@MADE_WAYS
def test_statistics_of_a_first_batch_are_those_of_a_real_one(
    backend: GraphBackend, ops: tuple[str, ...]
) -> None:
    """Those of padding are put back, also where torch's versions do not count the write."""
    x = torch.rand(4, 2, device=backend.device)
    model, plain = (Made(backend.device, "statistics of the first batch") for _ in range(2))
    with pytest.raises(CaptureError, match=r"the forward computes scale on first use"):
        open_runner(backend, model, **way_of(ops))
    same(model.scale, torch.ones_like(model.scale))
    same(model(x), plain(x))
    with closing(open_runner(backend, model, **way_of(ops))) as runner:
        same(runner(x=x * 3), plain(x * 3))


@pytest.mark.parametrize("kind", ["made for its shape", "written on each run"])
def test_state_that_no_padding_stays_in_is_captured_unused(
    backend: GraphBackend, kind: str
) -> None:
    x = torch.rand(4, 2, device=backend.device)
    with closing(open_runner(backend, Made(backend.device, kind))) as runner:
        same(runner(x=x), Made(backend.device, kind)(x))


class Refilled(nn.Module):
    """A table in one buffer, computed again where the size differs from the last one."""

    def __init__(self, device: torch.device, way: str) -> None:
        super().__init__()
        self.way, self.size = way, 0
        self.last, self.sizes = {"size": 0}, list[int]()
        self.register_buffer("table", torch.zeros(1 if way == "resized" else 8, 1, device=device))

    def is_of(self, size: int) -> bool:
        if self.way == "dict":
            known, self.last["size"] = self.last["size"], size
        elif self.way == "list":
            known, self.sizes[:] = sum(self.sizes), [size]
        elif self.way == "resized":
            known = len(self.table)
        else:
            known, self.size = self.size, size
        return known == size

    def forward(self, x: Tensor) -> Tensor:
        size = len(x)
        if not self.is_of(size):
            values = torch.linspace(-1, 1, size, device=x.device)[:, None]
            if self.way == "out":
                torch.mul(values, 1, out=self.table[:size])
            elif self.way == "resized":
                self.table.resize_(size, 1).copy_(values)
            else:
                self.table[:size].copy_(values)
        return x + self.table[:size]


@pytest.mark.parametrize("warm_ups", ["auto", 0, 1])
@pytest.mark.parametrize("ops", [(), ("aten::add",)])
@pytest.mark.parametrize("way", ["attribute", "dict", "list", "out", "resized"])
def test_a_table_of_the_last_size_is_refused(
    backend: GraphBackend, way: str, ops: tuple[str, ...], warm_ups: Any
) -> None:
    model, plain = (Refilled(backend.device, way).eval() for _ in range(2))
    with pytest.raises(CaptureError, match=r"prepares table.* on first use"):
        open_runner(backend, model, cudagraph_num_of_warmups=warm_ups, **way_of(ops))
    g = cgplan.graphed(model, dynamic={})
    for size in 4 * (4, 2, 1, 1, 2):
        x = torch.rand(size, 2, device=backend.device)
        same(g(x), plain(x))


def test_a_look_that_fails_says_nothing_of_what_runs_write(backend: GraphBackend) -> None:
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(8, 2, device=backend.device))

        def forward(self, x: Tensor) -> Tensor:
            if current_look():
                raise torch.OutOfMemoryError("another process took it")
            self.cache[: len(x)].copy_(x + 1)
            return self.cache[: len(x)] * 2

    model, plain = Caches().eval(), Caches().eval()
    runner = open_runner(backend, model)
    for size in (4, 2, 1, 4):
        x = torch.rand(size, 2, device=backend.device)
        same(runner(x=x), plain(x))
        same(model.cache, plain.cache)


@pytest.mark.parametrize("is_bound", [False, True])
def test_a_warm_up_undoes_flags_in_containers_with_what_it_made_of_its_arguments(
    backend: GraphBackend, is_bound: bool
) -> None:
    class Calibrated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones((), device=backend.device))
            self.bound: Any = None
            self.ready, self.done = {"scale": False}, [False]

        def forward(self, x: Tensor) -> Tensor:
            if is_bound and not self.done[0]:
                self.bound, self.done[0] = x.abs().max(), True
            if not is_bound and not self.ready["scale"]:
                self.scale.copy_(x.abs().max())
                self.ready["scale"] = True
            return x / (self.bound if is_bound else self.scale)

    model, plain = Calibrated().eval(), Calibrated().eval()
    g = cgplan.graphed(model, dynamic={})
    g.warm_up(torch.full((3, 4), 7.0, device=backend.device))
    for _ in range(6):
        x = torch.rand(3, 4, device=backend.device)
        same(g(x), plain(x))
    assert g.graph_calls


class RowsBySize(nn.Module):
    """A row of a table for each size, made at its first batch, as a flag that no walk sees, a set or an array knows."""

    def __init__(self, device: torch.device, flag: str, write: str, numel: int) -> None:
        super().__init__()
        self.write = write
        self.table = torch.zeros(9, numel, device=device)
        self.fill = self.make
        self.known: Any = set[int]() if flag == "set" else frozenset[int]()
        self.flags = numpy.zeros(9, bool)
        self.flag = flag
        if flag == "hidden":
            self.fill = cache(self.make)

    def make(self, size: int) -> None:
        if self.write == "bound":
            self.table = self.table.clone()
        table = self.table.data if self.write == "data" else self.table
        table[size].fill_(size)

    def forward(self, x: Tensor) -> Tensor:
        size = len(x)
        if self.flag == "hidden":
            self.fill(size)
        elif self.flag == "array" and not self.flags[size]:
            self.fill(size)
            self.flags[size] = True
        elif self.flag != "array" and size not in self.known:
            self.fill(size)
            if self.flag == "set":
                self.known.add(size)
            else:
                self.known |= {size}
        return x + self.table[size, :1]


@pytest.mark.parametrize(
    ("write", "numel"), [("in place", 1), ("in place", 60_000), ("data", 1), ("bound", 1)]
)
@pytest.mark.parametrize("flag", ["hidden", "set", "frozenset", "array"])
def test_a_table_that_first_use_of_each_size_fills(
    backend: GraphBackend, flag: str, write: str, numel: int
) -> None:
    """By graphs and by the model's own code, whatever says that a size is there."""
    in_parts = way_of(("aten::add",))
    for way in ({}, in_parts, in_parts | {"cudagraph_mode": "FULL_AND_PIECEWISE"}):
        model, plain = (RowsBySize(backend.device, flag, write, numel).eval() for _ in range(2))
        with closing(open_runner(backend, model, **way)) as runner:
            for size in 2 * (4, 2, 1, 1, 2):
                x = torch.rand(size, 2, device=backend.device)
                same(runner(x=x), plain(x))
                same(model(x), plain(x))
    model, plain = (RowsBySize(backend.device, flag, write, numel).eval() for _ in range(2))
    policy = {"capture_policy": "eager"}
    g = cgplan.graphed(model, sizes=[1, 2, 4], compilation=policy)
    for size in 3 * (4, 4, 2, 1):
        x = torch.rand(size, 2, device=backend.device)
        same(g(x), plain(x))
    assert g.graph_calls, g.explain()


class RemembersTables(RowsBySize):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device, "set", "bound", 1)
        self.read: dict[int, weakref.ref[Tensor]] = {}  # by size, in its last run

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.read[len(x)] = weakref.ref(self.table)
        return y


@pytest.mark.parametrize("policy", ["eager", "adaptive"])
def test_a_table_that_another_size_exchanges_lives_as_long_as_the_graph_that_reads_it(
    backend: GraphBackend, policy: str
) -> None:
    model = RemembersTables(backend.device).eval()
    model.known |= {8, 1}  # 8 is captured with the first table
    runner = open_runner(
        backend,
        model,
        verify="off",
        ignore=["model.read"],
        cudagraph_capture_sizes=[1, 2, 4, 8],
        cudagraph_num_of_warmups=1,
        capture_policy=policy,
    )
    for size in (8, 4, 2, 1):
        runner(x=torch.rand(size, 2, device=backend.device))
    model(torch.rand(3, 2, device=backend.device))  # by the model's own code
    tables = {size: model.read[size] for size in (8, 4, 2, 1)}
    assert None not in [table() for table in tables.values()]
    if policy == "adaptive":
        runner.exchange(evicted=[key for key in runner.plan.keys if key[1].num_tokens == 4])
        gc.collect()
        assert [size for size, table in tables.items() if table() is None] == [4]
    runner.close()
    gc.collect()
    assert [table() for table in tables.values()] == [None] * 4


class FailsWithALongerTable(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.table = torch.full((2, 1), 7.0, device=device)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        size = len(x)
        if size > len(self.table):
            table = torch.empty(size, 1, device=x.device)
            self.table = table.fill_(7)
        y = x + self.table[:size]
        if size == 2:
            return y
        grown = x.new_zeros(4 << 20, 2)  # so does the pool
        return (y + grown[:size])[1:]


def test_graphs_that_are_captured_again_read_what_the_size_that_failed_made(
    backend: GraphBackend,
) -> None:
    model = FailsWithALongerTable(backend.device).eval()
    sizes = {"cudagraph_capture_sizes": [2, 4], "capture_policy": "lazy"}
    with closing(open_runner(backend, model, ignore=["model.runs"], **sizes)) as runner:
        for size, runs in ((2, 1), (2, 0), (4, 1), (2, 1), (2, 0)):  # the first are compared
            x = torch.rand(size, 2, device=backend.device)
            before = model.runs
            wanted = x + 7
            same(runner(x=x), wanted if size == 2 else wanted[1:])
            assert bool(runs) == (model.runs > before)
        assert runner.report.failed
        assert runner.report.generation == 2


class LeavesHalf(nn.Module):
    """The capture at 2 rows runs out of memory ahead of the line that sets `n` back."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.kept = where, types.SimpleNamespace(n=0)
        self.of: dict[str, int] = {"n": 0} if where == "dict" else vars(self.kept)

    def forward(self, x: Tensor) -> Tensor:
        n = self.of["n"]
        self.of["n"] = 5
        context = current_forward_context()
        if len(x) == 2:
            y = (torch.cat([x] * 9000) * 0)[:2]  # the pool grows
            if context is not None and context.runtime_mode is not CUDAGraphMode.NONE:
                raise torch.OutOfMemoryError("out of memory")
            x = x + y
        self.of["n"] = n
        return x + n


@pytest.mark.parametrize("policy", ["eager", "lazy"])
@pytest.mark.parametrize("warm_ups", ["auto", 0, 1])
@pytest.mark.parametrize("where", ["dict", "attribute"])
def test_what_a_capture_without_memory_left_half_done_is_undone(
    backend: GraphBackend, where: str, warm_ups: Any, policy: str
) -> None:
    model = LeavesHalf(where).eval()
    opened = cgplan.capture(
        model,
        {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)},
        compilation={
            "cudagraph_capture_sizes": [1, 2, 4],
            "capture_policy": policy,
            "cudagraph_num_of_warmups": warm_ups,
        },
        budget={"memory": "1GiB"},
        device=backend.device.type,
    )
    with closing(opened) as runner:
        for size in (1, 1, 2, 1, 1, 4, 2, 9):
            x = torch.rand(size, 2, device=backend.device)
            same(runner(x=x), x)
        assert model.of["n"] == 0
        assert 2 not in runner.plan.capture_sizes


class Grows(nn.Module):
    """Rows of a table that a size fills for itself, or that grow with it, stay right for others."""

    def __init__(self, device: torch.device, way: str) -> None:
        super().__init__()
        self.way, self.size, self.known = way, 0, set[int]()
        self.table = torch.zeros(9, 1, device=device)

    def forward(self, x: Tensor) -> Tensor:
        size = len(x)
        if self.way == "each" and size not in self.known:
            self.known.add(size)
            self.table[size].fill_(size)
        elif self.way == "all" and size > self.size:
            self.table[1 : size + 1] = torch.arange(size, device=x.device)[:, None] + 1.0
            self.size = size
        return x + self.table[size]


@pytest.mark.parametrize("way", ["each", "all"])
def test_a_table_with_rows_of_their_own_is_captured(backend: GraphBackend, way: str) -> None:
    model, plain = (Grows(backend.device, way) for _ in range(2))
    with closing(open_runner(backend, model)) as runner:
        for size in 2 * (4, 2, 1, 1, 2):
            x = torch.rand(size, 2, device=backend.device)
            same(runner(x=x), plain(x))


class Stream(nn.Module):
    """Its state starts at a value that a first run writes, where a flag or the absence of a tensor tells it so."""

    def __init__(self, device: torch.device, kind: str, *, numel: int = 2) -> None:
        super().__init__()
        self.kind, self.numel, self.fresh = kind, numel, True
        self.begun_list = list[str]()
        self.begun_set = {"others"}
        self.past: Tensor | None = None
        if kind in ("flag", "list", "set", "instead"):
            self.past = torch.zeros(numel, device=device)

    def begins(self) -> bool:
        if self.kind == "list" and not self.begun_list:
            self.begun_list.append("past")
            return True
        if self.kind == "set" and "past" not in self.begun_set:
            self.begun_set.add("past")
            return True
        begins = self.kind in ("flag", "instead") and self.fresh
        self.fresh = self.fresh and not begins
        return begins

    def forward(self, x: Tensor) -> Tensor:
        if self.begins():
            assert self.past is not None
            self.past.fill_(-1.0)
            if self.kind == "instead":  # one write, as later runs have
                return x + self.past
        elif self.past is None:
            self.past = torch.zeros(self.numel, device=x.device)
            if self.kind == "made":
                self.past[0] = 1
        if self.kind != "instead":
            self.past.mul_(0.5)
        self.past += x.mean()
        return x + self.past[:2]


@pytest.mark.parametrize("kind", ["flag", "list", "set", "made", "instead"])
def test_state_that_first_use_prepares_is_refused(backend: GraphBackend, kind: str) -> None:
    """What padding ran on it is put back to before that, and so is the flag, as no graph stays."""
    x = torch.rand(1, 2, device=backend.device)
    model, plain = (Stream(backend.device, kind) for _ in range(2))
    with pytest.raises(CaptureError, match="prepares past on first use") as refused:
        open_runner(backend, model)
    assert "on one real batch" in (refused.value.remedy or "")
    for _ in range(2):
        same(model(x), plain(x))
    with closing(open_runner(backend, model)) as runner:
        same(runner(x=x), plain(x))
    model, plain = (Stream(backend.device, kind) for _ in range(2))
    g = cgplan.graphed(model)
    g.warm_up(torch.zeros_like(x))
    for _ in range(4):
        same(g(x), plain(x))


class Streams(nn.Module):
    """A row of state for each size, begun at its first batch, as a set knows; each run counts in another row."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.begun = set[int]()
        self.rows = torch.zeros(9, 2, device=device)

    def forward(self, x: Tensor) -> Tensor:
        self.rows[0].add_(1)
        if len(x) not in self.begun:
            self.begun.add(len(x))
            self.rows[len(x)].fill_(len(x))
        return x * self.rows[len(x)] + self.rows[0]


@pytest.mark.parametrize("way", ["capture", "lazy", "warm_up"])
def test_state_that_first_use_of_each_size_prepares(backend: GraphBackend, way: str) -> None:
    model, plain = (Streams(backend.device) for _ in range(2))
    batches = [torch.rand(rows, 2, device=backend.device) for rows in (4, 2, 1)]
    if way == "capture":
        with pytest.raises(CaptureError, match="prepares rows on first use"):
            open_runner(backend, model)
        served: Any = model
    elif way == "warm_up":
        served = cgplan.graphed(model, dynamic={})
        for x in batches:
            served.warm_up(x)
    else:
        runner = open_runner(backend, model, capture_policy="lazy")
        served = lambda x: runner(x=x)  # noqa: E731
    for x in 3 * batches:
        same(served(x), plain(x))


@pytest.mark.parametrize("numel", [2, 400_000])
def test_state_that_first_use_makes_is_put_back_of_any_size(
    backend: GraphBackend, numel: int
) -> None:
    x = torch.rand(1, 2, device=backend.device)
    model, plain = (Stream(backend.device, "zeros", numel=numel) for _ in range(2))
    with closing(open_runner(backend, model)) as runner:
        for _ in range(3):
            same(runner(x=x), plain(x))


SEEDS: dict[str, Callable[[torch.Generator], Any]] = {
    "manual_seed": lambda _: torch.manual_seed(3),
    "own": lambda g: g.manual_seed(3),
    "set_state": lambda g: g.set_state(torch.Generator(g.device).get_state()),
}


@pytest.mark.parametrize("name", [*SEEDS, "fork_rng"])
def test_a_forward_that_sets_the_random_state_is_refused(backend: GraphBackend, name: str) -> None:
    class Seeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = torch.Generator(backend.device)

        def forward(self, x: Tensor) -> Tensor:
            generator = self.own if name in ("own", "set_state") else None
            if name == "fork_rng":
                with torch.random.fork_rng():
                    y = x + torch.rand(x.shape, device=x.device)
                return y + 1
            y = x * 2
            SEEDS[name](self.own)
            return y + torch.rand(x.shape, device=x.device, generator=generator)

    before = torch.get_rng_state()
    match = "own" if name in ("own", "set_state") else "torch's default generator"
    with pytest.raises(
        CaptureError,
        match=rf"the forward, or another thread, sets the state of .*{match}.*test_state\.py:\d+",
    ):
        open_runner(backend, Seeds(), cudagraph_mode="FULL")
    assert torch.equal(torch.get_rng_state(), before)


def test_numbers_that_another_thread_draws_meanwhile_seed_nothing() -> None:
    class Beside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + torch.rand_like(x)
            other = threading.Thread(target=torch.rand, args=(3,))
            other.start()
            other.join()
            return y + torch.rand_like(x)

    with closing(open_runner(select_backend("cpu"), Beside(), cudagraph_mode="FULL")) as runner:
        assert runner.report.records


@pytest.mark.parametrize("when", ["after the prompt", "before the prompt"])
def test_a_decode_loop_with_a_static_cache_gives_the_tokens_of_the_loop_without_graphs(
    backend: GraphBackend, when: str
) -> None:
    """The cache counts its tokens in the forward; padding tokens of captures must not."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(backend.device).eval()
    prompt = torch.randint(0, 64, (1, 7), device=backend.device)

    class Decode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.cache = transformers.StaticCache(config=config, max_cache_len=32)

        def forward(self, token: Tensor, position: Tensor) -> Tensor:
            kwargs = {
                "past_key_values": self.cache,
                "use_cache": True,
                "position_ids": position[None],
            }
            return self.model(input_ids=token[None], **kwargs).logits[0]  # type: ignore[no-any-return]

    def captured(decode: Decode) -> GraphRunner:
        return cgplan.capture(
            decode,
            {
                name: Input(shape=("num_tokens",), dtype="int64", pad=0)
                for name in ("token", "position")
            },
            compilation={"cudagraph_capture_sizes": [1], "cudagraph_mode": "FULL"},
            device=backend.device.type,
        )

    def tokens(captures: bool) -> list[int]:
        decode = Decode()
        step: Any = captured(decode) if captures and when == "before the prompt" else decode
        with torch.no_grad():
            found = [int(decode(prompt[0], torch.arange(7, device=backend.device))[-1].argmax())]
        step = captured(decode) if captures and step is decode else step
        for position in range(7, 20):
            given = (
                torch.tensor([value], device=backend.device) for value in (found[-1], position)
            )
            with torch.no_grad():
                found.append(
                    int(step(**dict(zip(("token", "position"), given, strict=True)))[-1].argmax())
                )
        if captures:
            assert sum(step.stats.replays.values()) == 13
            step.close()
        return found

    assert tokens(captures=True) == tokens(captures=False)


class FlagAfterState(nn.Module):
    """State on first use, and a flag that the second run binds."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "position"):
            self.position = torch.zeros(1, device=x.device)
        elif not hasattr(self, "is_warm"):
            self.is_warm = True
        self.position.add_(1)
        return x + self.position


def test_what_the_second_run_binds_takes_nothing_of_first_use(backend: GraphBackend) -> None:
    model = FlagAfterState().eval()
    given = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    sizes = {"cudagraph_capture_sizes": [2, 4]}
    with (
        closing(
            cgplan.capture(model, given, compilation=sizes, device=backend.device.type)
        ) as runner,
        torch.no_grad(),
    ):
        for number, rows in enumerate((2, 9, 4, 9, 2), 1):
            x = torch.zeros(rows, 2, device=backend.device)
            assert torch.equal(runner(x=x), x + number)


class FilledBySecondUse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.step == 0:
            self.step = 1
        elif self.step == 1:
            self.table.fill_(7)
            self.step = 2
        return x + self.table


def test_a_table_of_the_second_run_is_not_lost_beside_its_flag(backend: GraphBackend) -> None:
    model = FilledBySecondUse().to(backend.device).eval()
    given = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    with pytest.raises(CaptureError, match="prepares table on first use"):
        cgplan.capture(model, given, device=backend.device.type)
    plain = FilledBySecondUse().to(backend.device).eval()
    g = cgplan.graphed(FilledBySecondUse().to(backend.device).eval())
    x = torch.zeros(3, 2, device=backend.device)
    g.warm_up(x)
    for _ in range(5):
        assert torch.equal(g(x), plain(x))


class OfFirstBatch(nn.Module):
    """Scaled by its first batch, and one more thing that no run undoes."""

    def __init__(self, beside: str) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2))
        self.is_ready = False
        self.beside = beside
        self.generator = numpy.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            scale = 1 / (x.abs().amax(0) + 1)
            if self.beside == "data":
                self.scale.data = scale
            else:
                self.scale.copy_(scale)
                self.generator.random()
            self.is_ready = True
        return x * self.scale


@pytest.mark.parametrize("beside", ["data", "a draw of NumPy"])
def test_statistics_go_beside_what_cannot_be_undone(backend: GraphBackend, beside: str) -> None:
    model, plain = (OfFirstBatch(beside).to(backend.device).eval() for _ in range(2))
    g = cgplan.graphed(model)
    g.warm_up(torch.full((3, 2), 9.0, device=backend.device))
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(3, 2, device=backend.device)
            assert torch.equal(g(x), plain(x))


class TableOfItsSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) != len(x):
            self.table = torch.arange(1.0, len(x) + 1, device=x.device)[:, None]
        return x * self.table


def test_a_buffer_of_the_last_size_is_bound_again(backend: GraphBackend) -> None:
    model = TableOfItsSize().to(backend.device).eval()
    given = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    sizes = {"cudagraph_capture_sizes": [1, 2, 4]}
    device = backend.device
    with closing(cgplan.capture(model, given, compilation=sizes, device=device.type)) as runner:
        for rows in (4, 4, 2, 1, 4):
            x = torch.randn(rows, 2, device=device)
            assert torch.equal(runner(x=x), x * torch.arange(1.0, rows + 1, device=device)[:, None])


class WorkspaceBesideATable(nn.Module):
    """Prompts and single tokens overwrite a workspace by other operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale: Tensor | None = None
        self.register_buffer("work", torch.zeros(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.linspace(1, 2, 2, device=x.device)
        work = self.work[: len(x)]
        if len(x) > 1:
            work.copy_(self.linear(x))
        else:
            work.zero_()
            work.add_(self.linear(x))
        return work * self.scale


def test_sizes_may_overwrite_state_in_other_ways(backend: GraphBackend) -> None:
    model = WorkspaceBesideATable().to(backend.device).eval()
    given = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    sizes = {"cudagraph_capture_sizes": [1, 2, 4], "cudagraph_mode": "FULL"}
    device = backend.device
    with closing(cgplan.capture(model, given, compilation=sizes, device=device.type)) as runner:
        for rows in (4, 1, 1, 2, 1, 4):
            x = torch.randn(rows, 2, device=device)
            same(runner(x=x), model(x))


class FilledAheadOfItsWrites(nn.Module):
    """First use fills a cache by a write that counts no version; each run writes a row."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = False
        self.register_buffer("kept", torch.zeros(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.kept.data.fill_(0.5)
            self.ready = True
        self.kept.data[:1].copy_(x[:1])
        return x + self.kept[5]


def test_a_cache_that_first_use_fills_is_refused(backend: GraphBackend) -> None:
    model, plain = (FilledAheadOfItsWrites().to(backend.device).eval() for _ in range(2))
    given = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    sizes = {"cudagraph_capture_sizes": [2], "cudagraph_mode": "FULL"}
    with pytest.raises(CaptureError, match="prepares kept on first use"):
        cgplan.capture(model, given, compilation=sizes, device=backend.device.type)
    x = torch.ones(2, 2, device=backend.device)
    same(model(x), plain(x))


class FailsUnderModes(nn.Module):
    """As an operator without support for modes does, between two writes of an attribute."""

    scale = 0

    def forward(self, x: Tensor) -> Tensor:
        before, self.scale = self.scale, 5
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("no modes")
        self.scale = before
        return x + before


def test_a_look_that_fails_half_way_leaves_nothing(backend: GraphBackend) -> None:
    model = FailsUnderModes().eval()
    g = cgplan.graphed(model)
    x = torch.ones(4, 4, device=backend.device)
    for _ in range(6):
        assert torch.equal(g(x), x)
        assert model.scale == 0


class StateBesideTables(nn.Module):
    """An attribute that each run changes, beside tables that are made on first use."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(2)
        self.angles: Tensor | None = None
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.angles is None:
            self.angles = torch.arange(2.0, device=x.device)
        if len(x) not in self.masks:
            self.masks[len(x)] = torch.ones(len(x), 1, device=x.device)
        self.state = torch.tanh(self.state.to(x.device) * 0.5 + x[0])
        return (x + self.state + self.angles) * self.masks[len(x)]


@pytest.mark.parametrize("warms_up", [False, True])
def test_an_attribute_that_each_run_changes_is_put_back_beside_tables(
    backend: GraphBackend, warms_up: bool
) -> None:
    model, plain = StateBesideTables().eval(), StateBesideTables().eval()
    g = cgplan.graphed(model, compilation={"capture_policy": "eager"})
    with torch.no_grad():
        if warms_up:
            g.warm_up(torch.ones(3, 2, device=backend.device))
        for rows in (3, 3, 3, 2, 2, 4):
            x = torch.randn(rows, 2, device=backend.device)
            same(g(x), plain(x))


class DoublesFirstRuns(nn.Module):
    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x * 2 if self.runs < 3 else x


def test_an_attribute_is_put_back_although_the_replays_that_are_timed_do_not_change_it(
    backend: GraphBackend,
) -> None:
    model = DoublesFirstRuns().eval()
    with closing(open_runner(backend, model, cudagraph_mode="AUTO")) as runner:
        assert model.runs == 0
        assert answers(lambda x: runner(x=x + 1), backend.device, 2, 2, 2) == [2, 2, 1]


def opened(backend: GraphBackend, model: nn.Module, way: str, verify: str = "first") -> Any:
    if way == "lazy":
        return open_runner(backend, model, capture_policy="lazy", verify=verify)
    if way == "AUTO":
        return open_runner(backend, model, cudagraph_mode="AUTO", verify=verify)
    g = cgplan.graphed(model, compilation={"capture_policy": "eager"} if way == "eager" else {})
    if way == "warm_up":
        g.warm_up(torch.zeros(4, 2, device=backend.device))
    return g


class MakesItsParts(nn.Module):
    """In place of None, which Python keeps elsewhere; then it reads the host."""

    def __init__(self, part: Callable[[], Any]) -> None:
        super().__init__()
        self.part, self.made, self.last = part, None, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.made is None:
            self.made = self.part()
        scale = self.made.weight if isinstance(self.made, nn.Module) else self.made
        return x * scale.to(x.device) if (x < 9).all().item() else x


@pytest.mark.parametrize("way", ["FULL", "lazy", "AUTO", "warm_up", "eager"])
@pytest.mark.parametrize(
    "part",
    [
        lambda: nn.PReLU(1, init=2.0),
        lambda: nn.Parameter(torch.full((1,), 2.0)),
    ],
)
def test_a_part_that_first_use_makes_in_place_of_none_is_made_again(
    backend: GraphBackend, part: Callable[[], Any], way: str
) -> None:
    model = MakesItsParts(part).eval()
    attributes = set(vars(model))
    x = torch.rand(4, 2, device=backend.device)
    run: Any = model
    if way == "FULL":
        with pytest.raises(CaptureError, match="item"):
            open_runner(backend, model)
        assert model.made is None
        assert set(vars(model)) == attributes
    else:
        run = opened(backend, model, way)
    with torch.no_grad():
        for _ in range(4):
            same(run(x), x * 2)


class FirstBatchDiffers(nn.Module):
    """Statistics of the first batch, which padding leaves at 0, or that later batches go on with."""

    def __init__(self, later: str) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.is_first = True
        self.later = later

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            # versions do not count the latter
            where = self.mean if self.later else self.mean.data
            where.copy_(x[0])
            self.is_first = False
        elif self.later == "two writes":
            self.mean.mul_(0.5).add_(x[0], alpha=0.5)
        elif self.later == "as many writes":
            self.mean.lerp_(x[0], 0.5)
        elif self.later == "the same operator":
            self.mean.copy_((self.mean + x[0]) / 2)
        return x + self.mean


@pytest.mark.parametrize("way", ["FULL", "lazy", "AUTO", "warm_up", "eager"])
@pytest.mark.parametrize("later", ["", "two writes", "as many writes", "the same operator"])
@pytest.mark.parametrize("holds_compiled", [False, True])
def test_statistics_that_the_first_batch_begins_are_not_of_padding(
    backend: GraphBackend, holds_compiled: bool, later: str, way: str
) -> None:
    model, plain = (FirstBatchDiffers(later).to(backend.device).eval() for _ in range(2))
    if holds_compiled:
        model.lin = nn.Linear(2, 2, device=backend.device)
        model.lin.compile(backend="eager", dynamic=True)
    run: Any = model
    if way == "FULL":
        with pytest.raises(CaptureError, match="mean on first use"):
            open_runner(backend, model)
    else:
        verify = "off" if way == "lazy" and later != "two writes" else "first"
        run = opened(backend, model, way, verify)
    for rows in (4, 2, 1, 4, 2, 1):
        x = torch.randn(rows, 2, device=backend.device)
        same(run(x), plain(x))


class WritesInOneSize(nn.Module):
    """Counts batches of one size in a tensor too large to be copied unseen, or as told."""

    def __init__(self, size: int, how: str = "large") -> None:
        super().__init__()
        self.size = size
        counts = torch.zeros(400_000 if how == "large" else 2)
        if how == "parameter":
            self.counts: Tensor = nn.Parameter(counts, requires_grad=False)
        else:
            self.register_buffer("counts", counts)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == self.size:
            self.counts.add_(1)
        return x + self.counts[:2]


@pytest.mark.parametrize("how", ["large", "parameter"])
@pytest.mark.parametrize("warmups", ["auto", 1])
@pytest.mark.parametrize("size", [4, 2, 1])
def test_a_tensor_that_one_size_writes_is_put_back(
    backend: GraphBackend, size: int, warmups: Any, how: str
) -> None:
    model, plain = (WritesInOneSize(size, how).to(backend.device).eval() for _ in range(2))
    with closing(open_runner(backend, model, cudagraph_num_of_warmups=warmups)) as runner:
        assert [record.kept for record in runner.report.state] == ["device"]
        for rows in 2 * (4, 2, 1):
            x = torch.rand(rows, 2, device=backend.device)
            same(runner(x=x), plain(x))


def test_what_only_compiled_code_of_one_size_writes_is_refused_and_lazy_captures_it(
    backend: GraphBackend,
) -> None:
    model, plain = (WritesInOneSize(1).to(backend.device).eval() for _ in range(2))
    model.compile(backend="aot_eager", dynamic=False)
    with pytest.raises(CaptureError, match="not all sizes write counts") as refused:
        open_runner(backend, model, cudagraph_num_of_warmups=1)
    assert "capture_policy: lazy" in (refused.value.remedy or "")
    model.counts.zero_()
    with closing(open_runner(backend, model, capture_policy="lazy")) as runner:
        for _ in range(2):
            for rows in 2 * (4, 2, 1):
                x = torch.rand(rows, 2, device=backend.device)
                same(runner(x=x), plain(x))
            runner.sleep()
            runner.wake()  # captures all that served


def test_a_large_tensor_made_in_inference_mode_that_one_size_writes_is_put_back(
    backend: GraphBackend,
) -> None:
    with torch.inference_mode():
        model, plain = (WritesInOneSize(1).to(backend.device).eval() for _ in range(2))
        for each in (model, plain):
            each.counts = torch.zeros(400_000, device=backend.device)
        with closing(open_runner(backend, model)) as runner:
            for rows in 2 * (4, 2, 1):
                x = torch.rand(rows, 2, device=backend.device)
                same(runner(x=x), plain(x))


class KeepsResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.results: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.results[len(self.results)] = x * 2
        return x + 1


def test_entries_of_a_dict_that_each_run_adds_to_are_no_first_use(backend: GraphBackend) -> None:
    model = KeepsResults().to(backend.device).eval()
    with closing(open_runner(backend, model)) as runner:
        assert not runner.report.state


class SwapsBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.piece = nn.Identity()
        self.piece.register_buffer("a", torch.zeros(4))
        self.piece.register_buffer("b", torch.zeros(4))
        self.piece.forward = self.swap

    def swap(self, x: Tensor) -> Tensor:
        piece = self.piece
        piece.a, piece.b = piece.b, piece.a
        return x + piece.a.add_(1).sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.piece(x * 2) + 1  # type: ignore[no-any-return]


def test_buffers_that_a_piece_swaps_and_writes_are_put_back(backend: GraphBackend) -> None:
    model = SwapsBuffers().to(backend.device).eval()
    options = {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["piece"]}
    with closing(open_runner(backend, model, **options)):
        assert not model.piece.a.any()
        assert not model.piece.b.any()


class CountsInAPiece(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.piece = WritesInOneSize(2, "small")

    def forward(self, x: Tensor) -> Tensor:
        return self.piece(x * 2) + 1  # type: ignore[no-any-return]


def test_a_counter_that_an_eager_piece_of_a_middle_size_writes_is_put_back(
    backend: GraphBackend,
) -> None:
    model, plain = (CountsInAPiece().to(backend.device).eval() for _ in range(2))
    options = {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["piece"]}
    with closing(open_runner(backend, model, **options)) as runner:
        for rows in 2 * (4, 2, 1):
            x = torch.rand(rows, 2, device=backend.device)
            same(runner(x=x), plain(x))


class FoldsItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(400_000))
        self.is_folded = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_folded:
            self.weight.mul_(0.5)
            self.is_folded = True
        return x * self.weight[:2]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("inference", [False, True])
def test_a_large_weight_that_first_use_changes_stays_with_its_flag(
    backend: GraphBackend, inference: bool, policy: str
) -> None:
    with torch.inference_mode() if inference else torch.no_grad():
        model, plain = (FoldsItsWeight().to(backend.device).eval() for _ in range(2))
        with closing(open_runner(backend, model, capture_policy=policy)) as runner:
            for rows in (4, 1, 2, 3, 9):
                x = torch.rand(rows, 2, device=backend.device)
                same(runner(x=x), plain(x))


class FilledByTheSecondRun(nn.Module):
    """As a counter says that no walk sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2))
        calls = count()
        self.number = lambda: next(calls)

    def forward(self, x: Tensor) -> Tensor:
        if self.number() == 1:
            self.table.fill_(3.0)
        return x * self.table


@pytest.mark.parametrize("policy", POLICIES)
def test_a_table_that_the_second_run_fills_stays(backend: GraphBackend, policy: str) -> None:
    model = FilledByTheSecondRun().to(backend.device).eval()
    with closing(open_runner(backend, model, capture_policy=policy)) as runner:
        for rows in (4, 2, 1, 4):
            x = torch.ones(rows, 2, device=backend.device)
            assert runner(x=x).tolist() == [[3.0, 3.0]] * rows


class GoesOn(nn.Module):
    """One size goes on with state that the others overwrite."""

    def __init__(self, size: int, numel: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("state", torch.zeros(numel))
        self.register_buffer("rows", torch.arange(2))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == self.size:
            self.state.add_(x[0].sum())
        else:
            self.state.index_copy_(0, self.rows, x[0])
        return x + self.state[:2]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("size", "numel"), [(1, 2), (2, 2), (1, 400_000), (2, 400_000)])
def test_state_that_one_size_overwrites_and_another_goes_on_with(
    backend: GraphBackend, size: int, numel: int, policy: str
) -> None:
    model, plain = (GoesOn(size, numel).to(backend.device).eval() for _ in range(2))
    with closing(open_runner(backend, model, capture_policy=policy)) as runner:
        for rows in (4, 1, 2, 2, 1, 1, 4):
            x = torch.rand(rows, 2, device=backend.device)
            same(runner(x=x), plain(x))
        same(model.state, plain.state)


class CachesAnew(nn.Module):
    """As transformers with ``use_cache``: each call makes caches, of which the piece fills one."""

    class Piece(nn.Module):
        def forward(self, x: Tensor, cache: Layer, _: Layer) -> Tensor:
            return x + cache.update(x).sum(0)

    def __init__(self) -> None:
        super().__init__()
        self.piece = self.Piece()

    def forward(self, x: Tensor) -> Tensor:
        return self.piece(x * 1, Layer(), Layer()) * 1  # type: ignore[no-any-return]


class Place:
    layer = 0


class Layers(nn.Module):
    """One object goes through all pieces, which read what graph code sets between them."""

    class Piece(nn.Module):
        def forward(self, x: Tensor, place: Place) -> Tensor:
            return x * (place.layer + 1)

    def __init__(self, place: Place | None) -> None:
        super().__init__()
        self.pieces = nn.ModuleList([self.Piece(), self.Piece()])
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        place = self.place or Place()
        for layer, piece in enumerate(self.pieces):
            place.layer = layer
            x = x + piece(x * 2, place)
        return x


@pytest.mark.parametrize("place", [None, Place()])
def test_an_object_that_graph_code_changes_between_eager_pieces_is_refused(
    backend: GraphBackend, place: Place | None
) -> None:
    options = {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["pieces.*"]}
    told = r"reads Place 0\.layer \(it was 0 and is 1\), which graph code binds"
    with pytest.raises(CaptureError, match=told):
        open_runner(backend, Layers(place), **options)
    model = Layers(place)
    ignored = {"ignore": ["Place 0.layer"], "verify": "off"}
    open_runner(backend, model, **options, **ignored).close()
    with closing(open_runner(backend, model, cudagraph_mode="FULL")) as runner:
        x = torch.rand(3, 2, device=backend.device)
        same(runner(x=x), model(x))


class Sums(nn.Module):
    """Pieces are given a container, which graph code fills between them."""

    class Piece(nn.Module):
        def forward(self, held: Any) -> Tensor:
            return sum(held.values() if isinstance(held, dict) else held) * 2  # type: ignore[no-any-return]

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.pieces = nn.ModuleList([self.Piece(), self.Piece()])
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        held = self.make(x)
        for piece in self.pieces:
            y = piece(held)
            if isinstance(held, dict):
                held["x"] = y * 2
            else:
                held.append(y)
        return y + 1  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: [x],
        lambda x: {"x": x},
        lambda x: deque([x * 1]),
        lambda x: OrderedDict(x=x * 1),
    ],
)
def test_a_container_that_graph_code_changes_between_eager_pieces_is_refused(
    backend: GraphBackend, make: Callable[[Tensor], Any]
) -> None:
    options = {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["pieces.*"], "verify": "off"}
    with pytest.raises(CaptureError, match="which graph code binds on each call"):
        open_runner(backend, Sums(make), **options)


@pytest.mark.parametrize("make", [lambda x: [x * 1], lambda x: {"x": x * 1}])
def test_replays_give_eager_pieces_lists_and_dicts_anew(
    backend: GraphBackend, make: Callable[[Tensor], Any]
) -> None:
    model = Sums(make)
    options = {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["pieces.*"], "verify": "off"}
    with closing(open_runner(backend, model, **options)) as runner:
        for rows in (4, 2, 2):
            x = torch.rand(rows, 2, device=backend.device)
            same(runner(x=x), model(x))


def test_a_cache_of_each_call_that_an_eager_piece_fills_is_refused(backend: GraphBackend) -> None:
    model = CachesAnew().eval()
    options = {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["piece"]}
    with pytest.raises(CaptureError, match=r"an eager piece changes Layer 0\.") as refused:
        open_runner(backend, model, **options)
    assert "use_cache=False" in (refused.value.remedy or "")
    with closing(open_runner(backend, model, cudagraph_mode="FULL")) as runner:
        for rows in (4, 1, 2, 4):
            x = torch.rand(rows, 2, device=backend.device)
            same(runner(x=x), model(x))
