"""Precision and the state around a call: dtypes, autocast, grad and inference mode, random generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import capture as bare
from checks import same
from torch import Tensor, nn
from torch.nn import functional as F

from cgplan import (
    AddressError,
    BackendError,
    BatchDescriptor,
    CaptureError,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphRunner,
    NumbersError,
    build_plan,
    forward_context,
)
from cgplan.backends import GraphBackend
from cgplan.backends.context import AmbientState, random_state_kept
from cgplan.config import Input, validate_config
from cgplan.runner.session import CaptureSession

pytestmark = pytest.mark.usefixtures("quiet_collector")

WIDTH = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def open_runner(
    backend: GraphBackend, model: Callable[..., Any], dtype: str = "float32", **compilation: Any
) -> GraphRunner:
    config = validate_config(
        {
            "inputs": {"x": Input(shape=("num_tokens", WIDTH), dtype=dtype, pad=0)},
            "compilation": {"cudagraph_capture_sizes": [2, 4], **compilation},
            "device": backend.device.type,
        }
    )
    return CaptureSession(build_plan(config), model, backend, config).run()


def rows(backend: GraphBackend, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, WIDTH, device=backend.device).to(dtype)


def autocast(backend: GraphBackend, **options: Any) -> torch.autocast:
    return torch.autocast(backend.device.type, **{"dtype": torch.bfloat16, **options})


class Attends(nn.Module):
    """A segment, attention (which PIECEWISE splits at), and a segment."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)[:, None]
        return self.after(F.scaled_dot_product_attention(y, y, y)[:, 0])


# --- precision --------------------------------------------------------------------------------------------------


def test_runners_of_different_precision_side_by_side(backend: GraphBackend) -> None:
    """Each gives what its model gives, after calls of the others too."""
    opened = []
    for dtype in DTYPES:
        model = (
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
            .to(backend.device, dtype)
            .eval()
        )
        opened.append(
            (model, open_runner(backend, lambda x, model=model: model(x), str(dtype)), dtype)
        )
    model = nn.Linear(WIDTH, WIDTH).to(backend.device)
    with autocast(backend):
        mixed = open_runner(backend, lambda x: model(x))
    for count in (4, 2, 4):
        for net, runner, dtype in opened:
            x = rows(backend, count, dtype)
            with torch.no_grad():
                same(runner(x=x), net(x))
            assert runner(x=x).dtype is dtype
        x = rows(backend, count)
        with autocast(backend), torch.no_grad():
            same(mixed(x=x), model(x))
            assert mixed(x=x).dtype is torch.bfloat16


class EightBits(nn.Module):
    """A linear layer whose weights are 8-bit floats with a scale."""

    def __init__(self, how: str) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH)
        scale = weight.abs().max() / 448
        self.register_buffer("weight", (weight / scale).to(torch.float8_e4m3fn))
        self.register_buffer("scale", scale)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "dequantised":
            return x @ (self.weight.to(x.dtype) * self.scale.to(x.dtype)).t()
        if self.how == "scaled_mm":
            one = torch.ones_like(self.scale)
            return torch._scaled_mm(
                x.to(torch.float8_e4m3fn),
                self.weight.t(),
                scale_a=one,
                scale_b=self.scale,
                out_dtype=torch.bfloat16,
            )
        return x + self.weight[: len(x)]  # no device adds 8-bit floats


def computes_in_8_bits(backend: GraphBackend) -> bool:
    return backend.device.type == "cpu" or torch.cuda.get_device_capability(backend.device) >= (
        8,
        9,
    )


@pytest.mark.parametrize("how", ["dequantised", "scaled_mm"])
def test_weights_of_8_bits(backend: GraphBackend, how: str) -> None:
    model = EightBits(how).to(backend.device)
    on_gpu = backend.device.type == "cuda"
    if how == "scaled_mm" and on_gpu and torch.cuda.get_device_capability(backend.device) < (8, 9):
        with pytest.raises(BackendError, match="lacks an operator for a dtype"):
            open_runner(backend, model, "bfloat16")
        return
    runner = open_runner(backend, model, "bfloat16", cudagraph_capture_sizes=[16, 32])
    for count in (32, 16):
        x = rows(backend, count, torch.bfloat16)
        same(runner(x=x), model(x))
        assert runner(x=x).abs().sum() > 0


def test_inputs_and_outputs_of_8_bits(backend: GraphBackend) -> None:
    runner = open_runner(
        backend, lambda x: (x.float() * 2).to(x.dtype), "float8_e4m3fn", debug=True
    )
    x = rows(backend, 3, torch.float8_e4m3fn)
    found = runner(x=x)
    assert found.dtype is torch.float8_e4m3fn
    same(found.float(), (x.float() * 2).to(x.dtype).float())


@pytest.mark.parametrize("warmups", [1, 0])
def test_a_dtype_that_the_device_does_not_compute_in(backend: GraphBackend, warmups: int) -> None:
    """Told with the line and a remedy before any graph is there; the model is as it was, and can be captured."""
    model = EightBits("added").to(backend.device)
    with pytest.raises(
        BackendError, match=r"Float8_e4m3fn(.|\n)*`return x \+ self.weight"
    ) as caught:
        open_runner(
            backend, lambda x: model(x.to(torch.float8_e4m3fn)), cudagraph_num_of_warmups=warmups
        )
    assert "torch.bfloat16" in caught.value.remedy
    model.how, x = "dequantised", rows(backend, 4)
    same(open_runner(backend, model)(x=x), model(x))


# --- autocast ---------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Computes in bfloat16 by an autocast object made beforehand, which turns the cache of casts on when entered."""

    def __init__(self, backend: GraphBackend) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.context = autocast(backend)

    def forward(self, x: Tensor) -> Tensor:
        with self.context:
            return self.layer(x)


def test_casts_made_inside_a_capture_are_not_used_after_it(backend: GraphBackend) -> None:
    """They lie in the graph's memory, and on a GPU nothing has computed them: under an autocast block around all, the
    cache would hand them to eager calls.
    """
    model, x = Mixed(backend).to(backend.device), rows(backend, 9)
    with autocast(backend):
        runner = open_runner(backend, model)
        nn.init.eye_(model.layer.weight)
        same(runner(x=x), x.bfloat16())  # eager: no graph has 9 rows
        same(runner(x=x[:4]), x[:4].bfloat16())


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("captured_under", [None, torch.bfloat16])
def test_another_autocast_state_is_refused(
    backend: GraphBackend, mode: str, captured_under: torch.dtype | None
) -> None:
    """Also where the model is traced and a FULL graph serves the batch: its replay would keep the captured dtype."""
    torch._dynamo.reset()
    model, x = Attends().to(backend.device), rows(backend, 4)
    with autocast(backend, enabled=captured_under is not None):
        runner = open_runner(backend, model, cudagraph_mode=mode, max_cudagraph_capture_size=4)
        kept = runner(x=x).clone()
    assert kept.dtype is (captured_under or torch.float32)
    for other in {None, torch.bfloat16, torch.float16} - {captured_under}:
        for batch in (x, x[:3], rows(backend, 9)):  # two replays, and an eager run beside them
            with (
                autocast(backend, enabled=other is not None, **({"dtype": other} if other else {})),
                pytest.raises(CaptureError) as caught,
            ):
                runner(x=batch)
            words = {
                dtype: f"autocast in {dtype}" if dtype else "autocast off"
                for dtype in (captured_under, other)
            }
            assert (
                f"with {words[captured_under]} and is called with {words[other]}"
                in caught.value.message
            )
            assert "capture again" in caught.value.remedy
    with autocast(backend, enabled=captured_under is not None):
        same(runner(x=x), kept)


def test_a_wrapper_of_its_own_compares_autocast_too(backend: GraphBackend) -> None:
    layer, x = nn.Linear(WIDTH, WIDTH).to(backend.device), rows(backend, 4)
    wrapper = CUDAGraphWrapper(layer, CUDAGraphMode.FULL, backend=backend)
    with forward_context(CUDAGraphMode.FULL, BatchDescriptor(4)):
        first = wrapper(x).clone()
        with (
            autocast(backend),
            pytest.raises(CaptureError, match=r"autocast off and is called with autocast in"),
        ):
            wrapper(x)
        same(wrapper(x), first)


def test_the_state_of_a_moment() -> None:
    with torch.inference_mode():
        assert AmbientState.now("cpu") == (False, True, None, torch.float32, None)
    with torch.autocast("cpu", torch.float16):
        AmbientState.now("cpu").refuse_other_autocast("cpu")


# --- grad and inference mode ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["after"]}]
)
def test_outputs_of_a_capture_in_inference_mode_are_ordinary_tensors(
    backend: GraphBackend, options: dict[str, Any]
) -> None:
    """Tensors made in inference mode can be neither written to nor used for gradients outside of it."""
    model, x = Attends().to(backend.device), rows(backend, 4)
    with torch.inference_mode():
        runner = open_runner(backend, model, **options)
        runner(x=x)  # what is prepared here is used outside
    wanted = model(x).detach()
    weight = torch.ones(WIDTH, device=backend.device, requires_grad=True)
    (runner(x=x) * weight).sum().backward()
    same(weight.grad, wanted.sum(0))
    found = runner(x=x)
    found += 1
    same(found, wanted + 1)


# --- random numbers ---------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x + 1, 0.5),
    "rand": lambda x: x + torch.rand(x.shape, device=x.device),
    "randn_like": lambda x: x + torch.randn_like(x),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "multinomial": lambda x: torch.multinomial(torch.softmax(x, -1), 1),
    "multinomial with replacement": lambda x: torch.multinomial(
        torch.softmax(x, -1), 4, replacement=True
    ),
    "exponential_": lambda x: (torch.softmax(x, -1) / torch.empty_like(x).exponential_(1)).argmax(
        -1
    ),
    "randint": lambda x: torch.randint(0, 1000, x.shape, device=x.device),
    "normal_": lambda x: x.clone().normal_(),
}


@pytest.mark.parametrize("name", list(DRAWS))
def test_random_operators_follow_the_seed_as_eager_ones_do(
    backend: GraphBackend, name: str
) -> None:
    """Fresh numbers on each replay, the same ones from the same seed, and those of eager."""
    draw = DRAWS[name]
    runner, x = open_runner(backend, draw, outputs="clone"), rows(backend, 4)
    drawn = []
    for call in (runner, runner, runner.run_eagerly):
        torch.manual_seed(7)
        drawn.append([call(x=x).clone() for _ in range(4)])
    first, again, eager = drawn
    assert any(not torch.equal(first[0], other) for other in first[1:])
    same(again, first)
    same(eager, first)


class Drops(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self, backend: GraphBackend) -> None:
        super().__init__()
        self.generator = torch.Generator(backend.device).manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, device=x.device, generator=self.generator)


def test_a_generator_of_the_models_own(backend: GraphBackend) -> None:
    """It is found; captures leave it alone, and replays advance it as eager calls do."""
    model, other, x = Drops(backend), Drops(backend), rows(backend, 4)
    runner = open_runner(backend, model, outputs="clone")
    wanted = [other(x) for _ in range(3)]
    same([runner(x=x) for _ in range(3)], wanted)
    assert not torch.equal(wanted[0], wanted[1])
    model.generator.manual_seed(3)
    same(runner(x=x), wanted[0])
    before = model.generator.get_state()
    graph, found = bare(backend, lambda: model(x), warmups=0)  # known to the backend by now
    same(model.generator.get_state(), before)
    backend.replay(graph)
    same(found, wanted[1])


def test_a_generator_that_was_exchanged_is_told(backend: GraphBackend) -> None:
    """A replay would draw from the old one, however the new one is seeded."""
    model, x = Drops(backend), rows(backend, 4)
    runner = open_runner(backend, model)
    model.generator = torch.Generator(backend.device).manual_seed(11)
    with pytest.raises(AddressError, match=r"other torch\.Generator objects") as caught:
        runner(x=x)
    assert "manual_seed" in caught.value.remedy
    runner.recapture()
    wanted = x + torch.rand(
        x.shape, device=x.device, generator=torch.Generator(backend.device).manual_seed(11)
    )
    same(runner(x=x), wanted)


@pytest.mark.parametrize("way", ["call", "stage", "after an eager call", "after one that failed"])
def test_a_generator_that_was_exchanged_before_anything_was_captured(
    backend: GraphBackend, way: str
) -> None:
    """A lazy runner has no graph yet that could draw from the old one."""
    model, x = Drops(backend), rows(backend, 4)
    runner = open_runner(backend, model, capture_policy="lazy", outputs="clone")
    if way == "after an eager call":
        with runner.no_capture():
            runner(x=x)
    if way == "after one that failed":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Drops, "forward", lambda self, x: x * float(x.sum().item() != 0.125))
            runner(x=x)
        assert len(runner.report.failed) == 1
        runner.retry_failed()
    model.generator, fresh = (torch.Generator(backend.device).manual_seed(11) for _ in range(2))
    for _ in range(3):
        if way == "stage":
            with runner.stage(4) as buffers:
                buffers["x"].copy_(x)
        found = buffers.output if way == "stage" else runner(x=x)
        same(found, x + torch.rand(x.shape, device=x.device, generator=fresh))
    assert runner.stats.captures == 1


def test_a_generator_that_only_the_look_finds(backend: GraphBackend) -> None:
    hidden = Drops(backend).generator

    class Hides:
        @property
        def generator(self) -> torch.Generator:
            return hidden

    hides, x = Hides(), rows(backend, 4)
    runner = open_runner(
        backend,
        lambda x: x + torch.rand(x.shape, device=x.device, generator=hides.generator),
        outputs="clone",
    )
    hidden.manual_seed(5)
    first = [runner(x=x) for _ in range(2)]
    hidden.manual_seed(5)
    same([runner(x=x) for _ in range(2)], first)
    assert not torch.equal(*first)


class DropsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dropout(), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_a_session_draws_nothing_from_the_caller(backend: GraphBackend) -> None:
    """Captures between two samples do not change the second one."""
    graph, _ = bare(backend, lambda: torch.rand(4, device=backend.device))
    torch.manual_seed(7)
    wanted = [torch.rand(4), torch.rand(4, device=backend.device)]
    torch.manual_seed(7)
    backend.reset(graph)
    bare(backend, lambda: torch.rand(4, device=backend.device))
    assert not torch.equal(
        torch.rand(4, device=backend.device), wanted[backend.device.type == "cuda"]
    )
    for mode in ("FULL", "PIECEWISE"):
        torch.manual_seed(7)
        open_runner(backend, DropsTwice(), cudagraph_mode=mode, splitting_modules=["second"])
        same([torch.rand(4), torch.rand(4, device=backend.device)], wanted)


def test_a_kept_state_comes_back_after_an_error(backend: GraphBackend) -> None:
    own = torch.Generator(backend.device).manual_seed(1)
    before = torch.get_rng_state(), own.get_state()

    def draw_and_fail() -> None:
        with random_state_kept(backend.device, [own]):
            torch.rand(1)
            torch.rand(1, device=backend.device, generator=own)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        draw_and_fail()
    same((torch.get_rng_state(), own.get_state()), before)


@pytest.mark.parametrize("own", [False, True])
def test_debug_mode_compares_random_models_too(backend: GraphBackend, own: bool) -> None:
    """Eager and replay draw the same numbers, so a difference is one of the model."""
    factor, generator = [1.0], torch.Generator(backend.device) if own else None

    def draw(x: Tensor) -> Tensor:
        return x * factor[0] + torch.rand(x.shape, device=x.device, generator=generator)

    runner, x = open_runner(backend, draw, debug=True), rows(backend, 3)
    first = runner(x=x).clone()
    assert not torch.equal(runner(x=x), first)
    factor[0] = 2.0  # frozen in the graph
    with pytest.raises(NumbersError):
        runner(x=x[:2])
