"""Replays are compared with the model's own code: what they get wrong is found, and said where."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import same
from torch import Tensor, nn

import cgplan
from cgplan import GraphRunner, Input, ModelError, NumbersError
from cgplan.backends import GraphBackend


def verified(backend: GraphBackend, model: Callable[..., Any], **compilation: Any) -> GraphRunner:
    return cgplan.capture(
        model,
        {"x": Input(shape=("num_tokens", 4), dtype="float32", pad=0)},
        compilation={"cudagraph_capture_sizes": [2, 8], "verify": "always", **compilation},
        device=backend.device.type,
    )


def rows(backend: GraphBackend, count: int) -> Tensor:
    return torch.arange(count * 4.0, device=backend.device).reshape(count, 4) + 1


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_right_model_passes_and_gives_its_numbers(backend: GraphBackend, mode: str) -> None:
    torch._dynamo.reset()
    runner = verified(backend, lambda x: (x * 2, {"y": x.softmax(-1)}), cudagraph_mode=mode)
    for count in (2, 3, 8, 1, 5):
        x = rows(backend, count)
        found = runner(x=x)
        assert torch.equal(found[0], x * 2)
        assert torch.equal(found[1]["y"], x.softmax(-1))


def test_the_model_is_compared_under_the_defaults_of_its_capture(backend: GraphBackend) -> None:
    """As engines set them while they load and capture."""

    def thirds(x: Tensor) -> Tensor:
        return x + torch.full((4,), 1 / 3)

    torch.set_default_dtype(torch.float64)
    try:
        with torch.device(backend.device):
            runner = verified(backend, thirds)
            wanted = thirds(rows(backend, 3))
    finally:
        torch.set_default_dtype(torch.float32)
    assert runner.verify(x=rows(backend, 3)).failure is None
    found = runner(x=rows(backend, 3))
    assert found.dtype is torch.float64
    assert torch.equal(found, wanted)
    assert torch.get_default_dtype() is torch.float32


def test_a_model_that_writes_its_inputs_is_compared_on_the_same_inputs(
    backend: GraphBackend,
) -> None:
    runner = verified(backend, lambda x: x.mul_(3).add_(1).clone())
    for count in (3, 2, 8):
        x = rows(backend, count)
        assert torch.equal(runner(x=x), x * 3 + 1)
        assert torch.equal(x, rows(backend, count))


def test_a_number_that_python_froze_is_found(backend: GraphBackend) -> None:
    scale = [2.0]
    runner = verified(backend, lambda x: (x + 1, x * scale[0]))
    scale[0] = 5.0
    with pytest.raises(NumbersError, match="differs from the model's own code: output 1") as caught:
        runner(x=rows(backend, 2))
    assert "largest deviation is 24" in caught.value.message  # 8 * (5 - 2)
    scale[0] = 2.0
    assert torch.equal(runner(x=rows(backend, 2))[1], rows(backend, 2) * 2)


def test_padding_that_reaches_real_rows_is_found(backend: GraphBackend) -> None:
    for leaks in (lambda x: x - x.mean(0), lambda x: x * x.amin()):
        runner = verified(backend, leaks)
        runner(x=rows(backend, 2))  # no padding, no fault
        with pytest.raises(
            NumbersError, match="the output depends on what the padding holds"
        ) as caught:
            runner(x=rows(backend, 3))
        assert torch.equal(caught.value.output, leaks(rows(backend, 3)))
        assert caught.value.remedy.startswith("Rows reach each other, or the model is in training")


def test_state_of_a_refused_replay_is_that_without_padding(backend: GraphBackend) -> None:
    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.copy_(x.mean(0))
            return x - self.mean

    model = Mean().to(backend.device)
    runner = verified(backend, model)
    with pytest.raises(NumbersError, match="depends on what the padding holds") as caught:
        runner(x=rows(backend, 3))
    assert torch.equal(caught.value.output, rows(backend, 3) - rows(backend, 3).mean(0))
    assert torch.equal(model.mean, rows(backend, 3).mean(0))


def test_a_cache_of_a_refused_replay_is_that_without_padding(backend: GraphBackend) -> None:
    cache = torch.zeros(9, 4, device=backend.device)

    def model(x: Tensor, slots: Tensor) -> Tensor:
        cache[slots] = x - x.mean(0)
        return x - x.mean(0)

    runner = cgplan.capture(
        model,
        {
            "x": Input(shape=("num_tokens", 4), dtype="float32", pad=0),
            "slots": Input(shape=("num_tokens",), dtype="int64", pad=8),
        },
        compilation={"cudagraph_capture_sizes": [8], "state_copy": 64},  # less than the cache
        device=backend.device.type,
    )
    slots = torch.arange(3, device=backend.device)
    with pytest.raises(NumbersError, match="depends on what the padding holds"):
        runner(x=rows(backend, 3), slots=slots)
    assert torch.equal(cache[:3], rows(backend, 3) - rows(backend, 3).mean(0))


def test_a_comparison_tells_what_the_number_of_rows_changes(backend: GraphBackend) -> None:
    runner = verified(backend, lambda x: x / x.shape[0])
    runner(x=rows(backend, 3))  # the padded batch agrees
    record = runner.verify(x=rows(backend, 3))
    assert record.failure is None
    assert record.differences == {"output 0": pytest.approx(2.5)}  # 12 / 3 - 12 / 8
    assert "differs from the batch without padding: output 0, the largest deviation is 2.5" in str(
        record
    )
    assert "verified" in str(runner.verify(x=rows(backend, 8)))


def test_padding_of_whole_numbers_is_found(backend: GraphBackend) -> None:
    runner = cgplan.capture(
        lambda x: x - x.sum(),
        {"x": Input(shape=("num_tokens",), dtype="int64", pad=7)},
        compilation={"cudagraph_capture_sizes": [4]},
        device=backend.device.type,
    )
    with pytest.raises(NumbersError, match="depends on what the padding holds"):
        runner(x=torch.arange(3, device=backend.device))


def test_padding_that_is_harmless_stays(backend: GraphBackend) -> None:
    """Operators that check their values take copies of real rows. torch.multinomial needs the host."""
    table = torch.arange(9.0, device=backend.device)

    def model(x: Tensor) -> Tensor:
        if backend.device.type == "cpu":
            torch.multinomial(x.softmax(-1), 1)
        drawn = torch.bernoulli(x.sigmoid()) * 0
        return table[(x[:, :1] / 4).long() % 9] + x * 2 + drawn

    runner = verified(backend, model)
    for count in (3, 8, 5):
        assert torch.equal(runner(x=rows(backend, count)), model(rows(backend, count)))


def test_an_error_of_the_model_is_typed(backend: GraphBackend) -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError("not today")

    model = Chosen(lambda x: x * 2, fails)
    runner = verified(backend, model)
    model.is_captured = True
    with pytest.raises(ModelError, match="ValueError: not today"):
        runner(x=rows(backend, 2))


def test_an_error_in_a_comparison_is_not_the_last_comparison(backend: GraphBackend) -> None:
    hidden = threading.local()
    hidden.factor = 2

    def model(x: Tensor) -> Tensor:
        if hidden.factor is None:
            raise ValueError("not today")
        return x * hidden.factor

    runner = verified(backend, model)
    hidden.factor = None
    with pytest.raises(ModelError, match="not today"):
        runner(x=rows(backend, 2))
    hidden.factor = 3
    with pytest.raises(NumbersError):
        runner(x=rows(backend, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_compiled_model_is_compared_with_itself(mode: str) -> None:
    """Its kernels round otherwise than the model's own."""
    torch._dynamo.reset()
    layers = [
        torch.nn.Linear(64, 64),
        torch.nn.GELU(),
        torch.nn.LayerNorm(64),
        torch.nn.Softmax(-1),
    ]
    runner = cgplan.capture(
        torch.nn.Sequential(*layers, torch.nn.Linear(64, 64)).eval().cuda(),
        {"input": Input(shape=("num_tokens", 64), dtype="float32", pad=0)},
        compilation={
            "cudagraph_mode": mode, "cudagraph_capture_sizes": [8], "verify": "always", "compiler": "inductor",
            "splitting_ops": ["aten::softmax"],
        },
        device="cuda",
    )  # fmt: skip
    for count in (8, 5, 3):
        x = torch.randn(count, 64, device="cuda")
        with torch.no_grad():
            torch.testing.assert_close(runner(input=x), runner.model(x))


def test_outputs_expire_in_whatever_mode_they_were_made(backend: GraphBackend) -> None:
    runner = verified(backend, lambda x: x * 2, debug=True)
    with torch.inference_mode():
        first = runner(x=rows(backend, 3))
    second = runner(x=rows(backend, 2))
    assert first.isnan().all()
    with torch.enable_grad():
        second.requires_grad_()
        third = runner(x=rows(backend, 2))
    assert second.isnan().all()
    assert not third.requires_grad
    with torch.inference_mode():
        runner(x=rows(backend, 2))
    assert third.isnan().all()


class Chosen:
    """A model whose code is another one once it has been captured."""

    def __init__(self, before: Callable[[Tensor], Any], after: Callable[[Tensor], Any]) -> None:
        self.choices, self.is_captured = (before, after), False

    def __call__(self, x: Tensor) -> Any:
        return self.choices[self.is_captured](x)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (
            lambda x: (x * 2).half(),
            r"output 0, torch\.float32 \[2, 4\] and torch\.float16 \[2, 4\]",
        ),
        (
            lambda x: (x * 2)[:, :3],
            r"output 0, torch\.float32 \[2, 4\] and torch\.float32 \[2, 3\]",
        ),
        (lambda x: 3.0, r"output 0, torch\.float32 \[2, 4\] and no tensor"),
        (lambda x: x * 2 + 1, r"the largest deviation is 1, allowed are"),
        (
            lambda x: x * 2 + x.new_tensor([0, 0, 0, float("nan")]),
            r"the largest deviation is inf, allowed are",
        ),
    ],
)
def test_what_differs_in_kind_is_said_so(
    backend: GraphBackend, after: Callable[[Tensor], Any], said: str
) -> None:
    model = Chosen(lambda x: x * 2, after)
    runner = verified(backend, model)
    model.is_captured = True
    with pytest.raises(NumbersError, match=said) as caught:
        runner(x=rows(backend, 2))
    assert "random operators" in caught.value.remedy


def test_a_number_beside_tensors_that_python_froze_is_found(backend: GraphBackend) -> None:
    model = Chosen(lambda x: (x * 2, 2, object()), lambda x: (x * 2, 3, object()))
    runner = verified(backend, model)
    model.is_captured = True
    with pytest.raises(NumbersError, match=r"output 1 \(2, not 3\)"):
        runner(x=rows(backend, 2))


def test_outputs_of_8_bits(backend: GraphBackend) -> None:
    model = Chosen(
        lambda x: (x * 2).to(torch.float8_e4m3fn), lambda x: (x * 2).to(torch.float8_e4m3fn)
    )
    runner = verified(backend, model)
    model.is_captured = True
    assert torch.equal(runner(x=rows(backend, 1)).float(), rows(backend, 1) * 2)
    model.choices = (model.choices[0], lambda x: (x * 4).to(torch.float8_e4m3fn))
    with pytest.raises(NumbersError, match=r"the largest deviation is 16, allowed are"):
        runner(x=rows(backend, 2))


class Stateful(torch.nn.Module):
    """Counts its calls in a buffer, an attribute and a tensor made anew, and adds the count to what it returns."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1, device=device))
        self.cache = torch.zeros(16, 4, device=device)
        self.attend = torch.nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        self.cache[: x.shape[0]].mul_(0.5).add_(x)
        return self.attend(x + self.cache[: x.shape[0]]) + self.count


@pytest.mark.parametrize("way", [{"cudagraph_mode": "FULL"}, {"splitting_modules": ["attend"]}])
def test_state_that_is_written_in_place_counts_once(
    backend: GraphBackend, way: dict[str, Any]
) -> None:
    """Each checked call runs the forward several times; the state must be as after one."""
    plain, checked = Stateful(backend.device), Stateful(backend.device)
    mode = {"cudagraph_mode": "PIECEWISE", **way}
    runners = [
        verified(backend, model, verify="always" if model is checked else "off", **mode)
        for model in (plain, checked)
    ]
    for model in (plain, checked):
        model.count.zero_()
        model.cache.zero_()
    for count in (3, 2, 8, 3, 1, 2):
        x = rows(backend, count)
        wanted, found = (runner(x=x) for runner in runners)
        assert torch.equal(found, wanted)
        assert torch.equal(checked.count, plain.count)
        assert torch.equal(checked.cache[:count], plain.cache[:count])
    assert checked.count.item() == 6


class Watched:
    """Counts the runs of its code by a mutable list that decides nothing, and adds a number that may be changed."""

    def __init__(self) -> None:
        self.runs, self.more = [0], torch.zeros(())

    def __call__(self, x: Tensor) -> Tensor:
        self.runs[0] += 1
        return x * 2


@pytest.mark.parametrize(
    ("policy", "compared"),
    [
        ("off", []),
        ("first", [1]),
        ("rarely", [1, 2, 4, 8]),
        ("always", [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_a_policy_says_which_replays_are_compared(
    backend: GraphBackend, policy: str, compared: list[int]
) -> None:
    model = Watched()
    runner = verified(
        backend, model, verify=policy, cudagraph_capture_sizes=[2], ignore=["model.runs[0]"]
    )
    found = []
    for replay in range(1, 10):
        before = model.runs[0]
        runner(x=rows(backend, 2))
        found += [replay] * (model.runs[0] > before)
    assert found == compared


def test_a_graph_that_differed_is_compared_at_each_replay_until_it_agrees(
    backend: GraphBackend,
) -> None:
    scale = [2.0]
    runner = verified(backend, lambda x: x * scale[0], verify="first")
    scale[0] = 3.0
    for _ in range(2):
        with pytest.raises(NumbersError) as caught:
            runner(x=rows(backend, 2))
        assert torch.equal(caught.value.output, rows(backend, 2) * 3)
    scale[0] = 2.0
    runner(x=rows(backend, 2))
    scale[0] = 3.0  # no longer looked at
    assert torch.equal(runner(x=rows(backend, 2)), rows(backend, 2) * 2)


def test_a_batch_is_verified_when_it_is_asked_for(backend: GraphBackend) -> None:
    """The model's tensors, and the random numbers that follow, are as before."""
    model = Stateful(backend.device)
    runner = verified(backend, model, verify="off")
    kept, random = (model.count.clone(), model.cache.clone()), torch.get_rng_state()
    record = runner.verify(x=rows(backend, 3))
    assert torch.equal(model.count, kept[0])
    assert torch.equal(model.cache, kept[1])
    assert torch.equal(torch.get_rng_state(), random)
    assert record.failure is None
    assert record.descriptor.num_tokens == 8
    assert set(record.differences) == {"output 0", "model.count", "model.cache"}
    assert record.tolerance > 0
    assert record.eager_us > 0
    assert record.graph_us > 0
    assert str(record).endswith(" us, one run each"), "no bench"
    line = str(record)
    assert "\n" not in line
    assert "FULL size=8" in line
    assert "verified; largest difference 0, " in line


def test_state_is_put_back_whatever_becomes_of_a_batch(backend: GraphBackend) -> None:
    model = Stateful(backend.device)
    runner = verified(backend, model, verify="off", state_copy=0)
    kept = model.count.clone()
    assert "not verified" in str(runner.verify(x=rows(backend, 3)))
    assert torch.equal(model.count, kept)

    class Failing(Stateful):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            answer = super().forward(x)
            if type(self).fails:
                raise ValueError("not today")
            return answer

    model = Failing(backend.device)
    runner = verified(backend, model, verify="off")
    kept = model.count.clone()
    Failing.fails = True
    with pytest.raises(ModelError, match="not today"):
        runner.verify(x=rows(backend, 3))
    assert torch.equal(model.count, kept)


def test_what_is_found_when_asked_for_is_no_error(backend: GraphBackend) -> None:
    scale = [2.0]
    runner = verified(backend, lambda x: (x, x * scale[0]), verify="off")
    scale[0] = 5.0
    record = runner.verify(x=rows(backend, 2))
    assert record.failure is not None
    assert "output 1, the largest deviation is 24" in record.failure
    assert record.differences == {"output 0": 0.0, "output 1": 24.0}
    assert record.failure in str(record)


def test_a_batch_without_a_graph_cannot_be_verified(backend: GraphBackend) -> None:
    runner = verified(backend, lambda x: x * 2)
    with pytest.raises(cgplan.DispatchMissError) as caught:
        runner.verify(x=rows(backend, 9))
    assert "of at most 8 tokens" in caught.value.remedy


def test_state_that_is_too_large_to_copy_is_said_to_be(backend: GraphBackend) -> None:
    runner = verified(backend, Stateful(backend.device), state_copy=0, verify="first")
    record = runner.verify(x=rows(backend, 3))
    assert record.remark is not None
    assert "not verified" in record.remark


def test_state_that_a_graph_writes_wrongly_is_found(backend: GraphBackend) -> None:
    """The output alone would not tell; the state is that of the model's own code then."""

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = [1.0]
            self.register_buffer("total", torch.zeros(1, device=backend.device))

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(self.step[0])
            return x * 2

    model = Counting()
    runner = verified(backend, model, verify="first")
    model.step[0] = 3.0
    with pytest.raises(NumbersError, match=r"model\.total, the largest deviation is 2"):
        runner(x=rows(backend, 2))
    assert model.total.item() == 3


def test_a_staged_batch_is_compared_without_its_padding_too(backend: GraphBackend) -> None:
    runner = verified(backend, lambda x: x * x.mean(), verify="first")
    with pytest.raises(NumbersError, match="padding"), runner.stage(num_tokens=3) as buffers:
        buffers["x"].copy_(rows(backend, 3))


def test_a_counter_of_floats_counts_the_rows_that_came(backend: GraphBackend) -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.tensor(5000.0, device=backend.device))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(x.shape[0])
            return x * 2

    model = Counting().eval()
    g = cgplan.graphed(model, sizes=[4])
    for _ in range(9):
        assert torch.equal(g(rows(backend, 3)), rows(backend, 3) * 2)
    assert float(model.seen) == 5000 + 9 * 3


def test_state_that_one_size_reads_first_is_compared_though_another_overwrites_it(
    backend: GraphBackend,
) -> None:
    """Else a comparison runs the size twice on what it wrote."""

    class Model(torch.nn.Module):
        state: Tensor
        places: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(8, 4, device=backend.device))
            self.register_buffer("places", torch.arange(8, device=backend.device))

        def forward(self, x: Tensor) -> Tensor:
            count = x.shape[0]
            y = x + self.state[:count] if count > 2 else x * 2
            self.state.index_copy_(0, self.places[:count], y)
            return y + 0

    # copies for a comparison would take more
    model = Model().eval()
    runner = verified(backend, model, capture_policy="lazy", state_copy=200)
    for count in (8, 2):
        runner(x=rows(backend, count))
    runner.recapture()  # looks at 8 rows, then at 2
    before = model.state.clone()
    assert torch.equal(runner(x=rows(backend, 8)), rows(backend, 8) + before)


class KeepsATable(nn.Module):
    """Of the last length, whose number tells whether it is made again."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != self.length:
            self.length = len(x)
            self.table = torch.arange(1.0, len(x) + 1, device=x.device)
        assert self.table is not None
        return x * self.table[:, None]


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_a_comparison_leaves_a_number_with_its_table(backend: GraphBackend, policy: str) -> None:
    model = KeepsATable()
    sizes = [2, 4]
    options = {"capture_policy": policy, "verify": "first"}
    runner = verified(backend, model, cudagraph_capture_sizes=sizes, **options)
    for count in (1, 2, 2, 5, 2, 5):
        x = rows(backend, count)
        same(runner(x=x), KeepsATable()(x))
        same(model(x), KeepsATable()(x))


def test_a_model_that_uses_the_number_of_rows_is_logged_once(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    runner = verified(backend, lambda x: x * x.shape[0], verify="first")
    for count in (8, 5, 1, 3):
        runner(x=rows(backend, count))
    (told,) = caplog.messages
    assert "FULL size=8 num_reqs=8: differs from the batch without padding: output 0" in told
