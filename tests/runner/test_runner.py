"""Sessions, runners and wrappers, on the tape and on CUDA alike. Batches that the caller writes in place: the block, its tensors, its output, and its end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from checks import MIB, Tally, back_at, reserved, same
from devices import LimitedTape
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import DeviceContext

import cgplan
from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.context import forward_context, get_forward_context
from cgplan.backends.tape import TapeBackend
from cgplan.captures.captured_keys import CaptureProgress
from cgplan.config import Input, validate_config
from cgplan.errors import (
    AddressError,
    CaptureError,
    CaptureMemoryError,
    CgplanError,
    DispatchMissError,
    HostSyncError,
    InputError,
    ModelError,
    OutputShapeError,
    PlanError,
    SealedError,
)
from cgplan.graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper, GraphPool
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.planning import MissReason, build_plan
from cgplan.planning.difference import fitted
from cgplan.runner import runner as runner_module
from cgplan.runner.runner import GraphRunner
from cgplan.runner.session import CaptureSession

pytestmark = pytest.mark.usefixtures("quiet_collector")

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
X = Input(shape=("num_tokens", 2), dtype="float32", pad=0)
ROWS = Input(shape=("num_tokens",), dtype="float32", pad=0)
LENGTHS = Input(shape=("num_reqs",), dtype="int64", pad=0)
STARTS = Input(shape=("num_reqs + 1",), dtype="int64", pad="last")


def open_runner(
    backend: GraphBackend,
    model: Callable[..., Any],
    inputs: dict[str, Input] | None = None,
    *,
    sizes: list[int] | None = None,
    output_rows: str = "num_tokens",
    progress: Callable[[CaptureProgress], None] | None = None,
    compilation: dict[str, Any] | None = None,
    pool: GraphPool | None = None,
    **sections: Any,
) -> GraphRunner:
    config = validate_config(
        {
            "model": {"target": "tests:model", "output_rows": output_rows},
            "inputs": inputs or {"x": X},
            "compilation": {"cudagraph_capture_sizes": sizes or [2, 4, 8], **(compilation or {})},
            **sections,
        }
    )
    return CaptureSession(
        build_plan(config), model, backend, config, progress=progress, pool=pool
    ).run()


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_default_device_sees_the_same_of_calls_of_all_models(
    backend: GraphBackend, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a microsecond for each look at a tensor; the model's own code runs in it."""
    seen: list[Any] = []

    def counted(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func)
        return func(*args, **(kwargs or {}))

    def seen_of(call: Callable[[], Any]) -> list[Any]:
        for _ in range(7):  # the sixth is compared
            call()
        seen.clear()
        call()
        return [func for func in seen if not isinstance(func, torch._ops.OpOverload)]

    def block(runner: GraphRunner) -> None:
        with runner.stage(num_tokens=3) as buffers:
            buffers["x"].fill_(1)

    def looks(layers: int) -> list[int]:
        parts = [nn.Linear(2, 2) for _ in range(layers)]
        model = nn.Sequential(*parts).to(backend.device).eval()
        x, large = (torch.ones(count, 2, device=backend.device) for count in (3, 9))
        made = open_runner(
            backend, lambda x: model(piece(model(x))), compilation={"cudagraph_mode": mode}
        )
        with closing(made) as runner, torch.device(backend.device):
            g = cgplan.graphed(model)
            graphs = seen_of(lambda: runner(x=x)), seen_of(lambda: block(runner))
            eager, wrapped = seen_of(lambda: runner(x=large)), seen_of(lambda: g(x))
        assert eager.count(torch.nn.functional.linear) == 2 * layers
        for found in graphs:
            assert (torch.nn.functional.celu in found) == (mode == "PIECEWISE")
        # on the tape segments are operators, which it sees
        return [len(wrapped), *map(len, graphs if mode == "FULL" else ())]

    monkeypatch.setattr(DeviceContext, "__torch_function__", counted)
    piece = cgplan.eager_break_during_capture(torch.nn.functional.celu)
    assert looks(1) == looks(9)


def test_a_default_device_sees_the_copy_alone_of_the_first_call_of_a_size(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def counted(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func)
        return func(*args, **(kwargs or {}))

    monkeypatch.setattr(DeviceContext, "__torch_function__", counted)
    names = [f"x{i}" for i in range(9)]
    runner = open_runner(
        backend,
        lambda **given: given["x0"] + 1,
        dict.fromkeys(names, X),
        compilation={"verify": "off"},
    )
    runner(**dict.fromkeys(names, batch(backend, 2)))  # the first replay of this kind
    given = dict.fromkeys(names, batch(backend, 3))
    with torch.device(backend.device):
        seen.clear()
        found = runner(**given)
    assert len(seen) < len(names)
    same(found, given["x0"] + 1)


def rows(*values: float, device: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def batch(backend: GraphBackend, count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed)).to(backend.device)


def test_a_sleeping_runner_gives_its_memory_back_until_it_wakes(
    backend: GraphBackend,
) -> None:
    x = batch(backend, 3)
    open_runner(backend, total).close()  # what libraries keep
    before = reserved(backend)
    runner = open_runner(backend, total)
    wanted = runner(x=x).clone()
    held = reserved(backend)
    runner.sleep()
    assert back_at(backend, before)
    for use in (lambda: runner(x=x), lambda: runner.stage(3), lambda: runner.invalidate("x")):
        with pytest.raises(cgplan.CgplanError, match="asleep") as caught:
            use()
        assert "wake" in caught.value.remedy
    runner.sleep()
    runner.wake()
    same(runner(x=x).clone(), wanted)
    assert reserved(backend) <= held + 2 * MIB * (backend.device.type == "cuda")
    runner.sleep()
    runner.recapture()
    runner.wake()  # awake already
    same(runner(x=x).clone(), wanted)
    runner.suspend()
    runner.close()
    for use in (runner.recapture, runner.sleep, runner.wake):
        with pytest.raises(cgplan.CgplanError, match="closed"):
            use()


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.runs = Tally()

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(len(x))
        found: Tensor = self.layer(x)
        return found


def open_weighted(backend: GraphBackend, **compilation: Any) -> tuple[GraphRunner, Weighted]:
    model = Weighted().to(backend.device).eval().requires_grad_(False)
    runner = cgplan.capture(
        model,
        {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)},
        compilation={"cudagraph_capture_sizes": [2, 4, 8], **compilation},
        device=backend.device.type,
    )
    return runner, model


@pytest.mark.parametrize("policy", ["eager", "lazy", "adaptive"])
def test_a_runner_wakes_with_the_keys_that_it_used(backend: GraphBackend, policy: str) -> None:
    runner, model = open_weighted(backend, capture_policy=policy)
    with closing(runner):
        for _ in range(3):
            runner(x=batch(backend, 3))
        runner.sleep()
        runner.sleep()
        runner.wake()
        assert runner.plan.capture_sizes == (4,)
        assert runner.report.waiting == 2
        for count in (3, 7, 1, 7):
            x = batch(backend, count, count)
            same(runner(x=x).clone(), model(x))
        assert runner.plan.capture_sizes == (2, 4, 8)
        runner.sleep()
        runner.wake()
        assert runner.plan.capture_sizes == (2, 4, 8)
        runner(x=batch(backend, 2))
        for _ in range(2):  # nothing was used before the second one
            runner.sleep()
            runner.wake()
            assert runner.plan.capture_sizes == (2,)
        same(runner(x=batch(backend, 2)).clone(), model(batch(backend, 2)))
        runner.recapture()
        assert len(runner.plan.keys) == (1 if policy == "lazy" else 3)


def test_a_runner_wakes_with_the_keys_that_it_used_since_its_statistics_began_anew(
    backend: GraphBackend,
) -> None:
    runner, _ = open_weighted(backend)
    with closing(runner):
        for _ in range(3):
            runner(x=batch(backend, 2))
            runner(x=batch(backend, 3))
        runner.sleep()
        runner.wake()
        runner(x=batch(backend, 2))
        runner.stats.reset()
        runner(x=batch(backend, 3))
        runner(x=batch(backend, 8))
        runner.sleep()
        runner.wake()
        assert runner.plan.capture_sizes == (4, 8)


def test_a_runner_sleeps_on_where_a_wake_fails(backend: GraphBackend) -> None:
    runner, model = open_weighted(backend)
    x = batch(backend, 4)
    with closing(runner):
        runner(x=x)
        runner.sleep()
        with cgplan.capture_allowed(False), pytest.raises(SealedError):
            runner.wake()
        with pytest.raises(cgplan.CgplanError, match="asleep"):
            runner(x=x)
        runner.wake()
        same(runner(x=x).clone(), model(x))


def test_weights_may_move_while_a_runner_sleeps_and_must_look_the_same(
    backend: GraphBackend,
) -> None:
    runner, model = open_weighted(backend)
    x = batch(backend, 4)
    with closing(runner):
        runner(x=x)
        runner.sleep()
        old = model.layer.weight.data
        model.layer.weight = nn.Parameter(old.clone() + 1, requires_grad=False)
        runner.wake()
        same(runner(x=x).clone(), model(x))
        runner.sleep()
        model.layer.weight.mul_(2)  # memory that was discarded, and filled again
        runner.wake()
        same(runner(x=x).clone(), model(x))
        runner.sleep()
        layer = model.layer
        model.layer = nn.Linear(2, 3, device=backend.device).requires_grad_(False)
        for _ in range(2):
            with pytest.raises(AddressError, match=r"layer.weight") as caught:
                runner.wake()
            assert "recapture" in caught.value.remedy
            with pytest.raises(cgplan.CgplanError, match="asleep"):
                runner(x=x)
        del model.layer
        with pytest.raises(AddressError, match=r"layer.weight is gone"):
            runner.wake()
        model.layer = layer
        runner.wake()
        same(runner(x=x).clone(), model(x))


@pytest.mark.gpu
def test_the_memory_of_weights_may_be_unmapped_while_a_runner_sleeps() -> None:
    """As an allocator does that discards the memory of its pools: addresses stay, what is behind them does not."""
    from cuda.bindings import driver

    def checked(result: tuple[Any, ...]) -> Any:
        code, *answers = result
        assert int(code) == 0, code
        return answers[0] if answers else None

    x = torch.randn(4, 2, device="cuda")
    nbytes = 2 * MIB
    kind = driver.CUmemAllocationProp()
    kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access = driver.CUmemAccessDesc()
    access.location = kind.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    base = checked(driver.cuMemAddressReserve(nbytes, 0, 0, 0))

    def map_new_memory() -> None:
        memory = checked(driver.cuMemCreate(nbytes, kind, 0))
        checked(driver.cuMemMap(base, nbytes, 0, memory, 0))
        checked(driver.cuMemSetAccess(base, nbytes, [access], 1))
        checked(driver.cuMemRelease(memory))

    map_new_memory()
    shape = {"shape": (2, 2), "typestr": "<f4", "data": (int(base), False), "version": 3}
    weight = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=shape), device="cuda")
    weight.normal_()
    model = Weighted().to("cuda").eval().requires_grad_(False)
    model.layer.weight = nn.Parameter(weight, requires_grad=False)
    specs = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    sizes = {"cudagraph_capture_sizes": [2, 4, 8]}
    with closing(cgplan.capture(model, specs, compilation=sizes, device="cuda")) as runner:
        wanted = runner(x=x).clone()
        kept = weight.cpu()
        runner.sleep()
        torch.cuda.synchronize()
        checked(driver.cuMemUnmap(base, nbytes))
        map_new_memory()
        weight.copy_(kept)
        runner.wake()
        same(runner(x=x).clone(), wanted)
        weight.mul_(2)
        same(runner(x=x).clone(), model(x))


def test_the_first_replays_after_a_sleep_are_compared_again(backend: GraphBackend) -> None:
    runner, model = open_weighted(backend)
    x = batch(backend, 4)
    with closing(runner):
        runner(x=x)
        runner(x=x)
        runner.sleep()
        runner.wake()
        model.runs.clear()
        runner(x=x)
        assert model.runs == [4]
        runner(x=x)
        assert model.runs == [4]


def test_one_of_two_runners_of_a_pool_sleeps(backend: GraphBackend) -> None:
    pool = GraphPool(backend)
    x = batch(backend, 3)
    first = open_runner(backend, total, pool=pool)
    second = open_runner(backend, lambda x: x * 2, pool=pool)
    with closing(first), closing(second):
        same(first(x=x).clone(), total(x))
        first.sleep()
        same(second(x=x).clone(), x * 2)
        first.wake()
        same(first(x=x).clone(), total(x))
        same(second(x=x).clone(), x * 2)


def total(x: Tensor) -> Tensor:
    """A model in which every row sees all others, so that padding shows."""
    return x + x.sum()


# --- calls ----------------------------------------------------------------------------------------------------


def test_a_call_equals_the_model_and_counts_itself(backend: GraphBackend) -> None:
    layer = nn.Linear(2, 2).to(backend.device)
    runner = open_runner(backend, lambda x: torch.tanh(layer(x)))
    for count in (1, 2, 3, 4, 8, 9, 40):
        x = batch(backend, count, count)
        found = runner(x=x)
        assert found.shape == (count, 2)
        with torch.no_grad():
            torch.testing.assert_close(found, torch.tanh(layer(x)), rtol=1e-5, atol=1e-6)
    stats = runner.stats
    assert {d.num_tokens: n for (mode, d), n in stats.replays.items() if mode is FULL} == {
        2: 2,
        4: 2,
        8: 1,
    }
    assert dict(stats.eager) == {MissReason.TOO_LARGE: 2}
    assert stats.padded_rows == 1 + 1


def test_a_nested_tensor_after_a_call_of_its_shape_is_refused(backend: GraphBackend) -> None:
    runner = open_runner(backend, total)
    x = batch(backend, 3)
    for _ in range(2):
        runner(x=x)
    with pytest.raises(InputError, match="'x' is a nested tensor"):
        runner(x=torch.nested.nested_tensor([x], layout=torch.strided))
    same(runner(x=x), total(x))


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
def test_run_eagerly_equals_the_call_bit_for_bit(backend: GraphBackend, mode: str) -> None:
    layer = nn.Sequential(nn.Linear(2, 16), nn.GELU(), nn.Linear(16, 2)).to(backend.device)
    runner = open_runner(
        backend,
        lambda x: layer(x) + x.mean(),  # which counts the padding, too
        compilation={"cudagraph_mode": mode, "outputs": "clone", "verify": "off"},
    )
    counts = torch.randint(1, 12, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    for seed, count in enumerate(counts):
        x = batch(backend, count, seed)
        same(runner(x=x), runner.run_eagerly(x=x))
    assert sum(runner.stats.replays.values()) == sum(count <= 8 for count in counts)


FORMS: list[Callable[[Tensor], Any]] = [
    lambda x: (x + 1, x.sum(1), x * 2),
    lambda x: ((), (x + 1, x.sum(1)), x * 2),
    lambda x: [x.sum(1), {"twice": x * 2, "none": None}],
    lambda x: (x.t().contiguous().t(), x[:, :1].expand(-1, 3)),
    lambda x: (x.int(), x * 2, x.bool()),
    lambda x: (torch.complex(x, x).conj(), torch.complex(x, x)),
]


@pytest.mark.parametrize("forward", FORMS)
def test_outputs_are_cloned_together_and_stay_as_they_are(
    backend: GraphBackend,
    forward: Callable[[Tensor], Any],
) -> None:
    runner = open_runner(backend, forward, compilation={"outputs": "clone", "verify": "off"})
    first, second = batch(backend, 3, 1), batch(backend, 3, 2)
    kept = runner(x=first)
    same(runner(x=second), forward(second))
    same(kept, forward(first))
    assert sum(runner.stats.replays.values()) == 2


def test_eager_runs_may_leave_the_padding_out(backend: GraphBackend) -> None:
    runner = open_runner(backend, lambda x: x + x.shape[0], {"x": ROWS}, sizes=[8])
    x = torch.zeros(3, device=backend.device)
    same(runner.run_eagerly(x=x), torch.full_like(x, 8))
    same(runner.run_eagerly(padded=False, x=x), torch.full_like(x, 3))
    assert not runner.stats.replays


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
def test_a_miss_of_a_saved_plan_is_about_that_plan(backend: GraphBackend, mode: str) -> None:
    """What the configuration says of sizes and mode does not count there."""
    given = {"cudagraph_mode": mode, "cudagraph_capture_sizes": [2, 4], "on_miss": "error"}
    config = validate_config({"inputs": {"x": X}, "compilation": given})
    plan = build_plan(config)
    saved = fitted(plan, config, file="plan.json")
    planned = plan.model_copy(update={"evidence": {}})
    advice = {
        "": plan,
        "those of the plan plan.json": saved,
        "those of a plan for traffic": planned,
    }
    for words, chosen in advice.items():
        runner = CaptureSession(chosen, lambda x: x * 2, backend, config).run()
        for rows, uniform in ((9, True), (2, False)):
            if mode == "FULL" and not uniform:
                continue
            with pytest.raises(DispatchMissError) as caught:
                runner(x=batch(backend, rows), uniform_decode=uniform)
            assert words in caught.value.remedy
            assert ("`cgplan plan`" in caught.value.remedy) == bool(words)
            assert ("cudagraph_" in caught.value.remedy) != bool(words)
        runner.close()


def test_a_miss_says_why_its_graph_could_not_be_captured(backend: GraphBackend) -> None:
    settings = {"capture_policy": "lazy", "cudagraph_capture_sizes": [4], "on_miss": "error"}
    config = validate_config({"inputs": {"x": X}, "compilation": settings})
    model = lambda x: x * x.sum().item()  # noqa: E731
    runner = CaptureSession(build_plan(config), model, backend, config).run()
    with pytest.raises(DispatchMissError, match=r"could not be captured \(capture of FULL .*item"):
        runner(x=batch(backend, 3))


# --- modes ----------------------------------------------------------------------------------------------------


def sums_by_request(x: Tensor) -> Tensor:
    """Each token gets its request's sum; the metadata say where requests start."""
    starts = get_forward_context().metadata["starts"]
    ends = x.cumsum(0)
    padded = torch.cat([ends.new_zeros(1), ends])
    owner = torch.searchsorted(starts, torch.arange(x.shape[0], device=x.device), right=True) - 1
    owner = owner.clamp(max=starts.shape[0] - 2)
    return (padded[starts[1:]] - padded[starts[:-1]])[owner]


def expected_sums(x: Tensor, lengths: list[int]) -> Tensor:
    return torch.cat([part.sum().expand(len(part)) for part in x.split(lengths)])


def test_full_decode_only_with_metadata(backend: GraphBackend) -> None:
    runner = open_runner(
        backend,
        sums_by_request,
        {"x": ROWS},
        sizes=[1, 4, 8],
        metadata={"starts": STARTS},
        scheduler={"max_num_seqs": 4},
        compilation={"cudagraph_mode": "FULL_DECODE_ONLY"},
    )
    assert [d.num_tokens for _, d in runner.plan.keys] == [4, 1]
    for lengths in ([1, 1, 1], [1], [2, 1], [1, 1, 1, 1], [5, 1, 1]):
        tokens = sum(lengths)
        x = torch.arange(1.0, tokens + 1, device=backend.device)
        starts = torch.tensor([0, *lengths], device=backend.device).cumsum(0)
        same(runner(x=x, starts=starts), expected_sums(x, lengths))
    assert sum(runner.stats.replays.values()) == 3
    assert dict(runner.stats.eager) == {MissReason.NO_GRAPH_FOR_MIXED: 2}
    assert all(d.uniform for _, d in runner.stats.replays)


def test_speculative_decode(backend: GraphBackend) -> None:
    runner = open_runner(
        backend,
        sums_by_request,
        {"x": ROWS},
        sizes=[3, 6, 12],
        metadata={"starts": STARTS},
        scheduler={"max_num_seqs": 4},
        speculative={"num_speculative_tokens": 2},
        compilation={"cudagraph_mode": "FULL_DECODE_ONLY"},
    )
    assert [(d.num_tokens, d.num_reqs) for _, d in runner.plan.keys] == [(12, 4), (6, 2), (3, 1)]
    for lengths, uniform in (
        ([3], True),
        ([3, 3, 3], True),
        ([3, 3], False),
        ([3, 3], True),
        ([3, 1], False),
    ):
        x = torch.arange(1.0, sum(lengths) + 1, device=backend.device)
        starts = torch.tensor([0, *lengths], device=backend.device).cumsum(0)
        same(runner(x=x, starts=starts, uniform_decode=uniform), expected_sums(x, lengths))
    assert {d.num_tokens: n for (_, d), n in runner.stats.replays.items()} == {3: 1, 12: 1, 6: 1}
    starts = torch.tensor([0, 3, 6], device=backend.device)
    runner(x=torch.ones(6, device=backend.device), starts=starts)
    assert runner.stats.eager[MissReason.NO_GRAPH_FOR_MIXED] == 3, (
        "unclaimed, a batch counts as mixed"
    )
    starts = torch.tensor([0, 2, 4, 6], device=backend.device)
    with pytest.raises(InputError, match="6 tokens are not 3 requests of 3"):
        runner(x=torch.ones(6, device=backend.device), starts=starts, uniform_decode=True)


def test_lora_cases_have_graphs_of_their_own(backend: GraphBackend) -> None:
    """A model freezes what it does for the number of adapters that its descriptor names."""

    def model(x: Tensor) -> Tensor:
        descriptor = get_forward_context().descriptor
        return x + 100 * descriptor.num_active_loras + 1000 * descriptor.has_lora

    runner = open_runner(
        backend,
        model,
        {"x": ROWS},
        sizes=[4],
        lora={"max_loras": 3, "specialize_active_lora": True},
    )
    assert sorted(d.num_active_loras for _, d in runner.plan.keys) == [0, 1, 2, 4]
    x = torch.zeros(3, device=backend.device)
    for active, wanted in ((0, 0), (1, 1100), (2, 1200), (3, 1400), (0, 0)):
        same(runner(x=x, num_active_loras=active), torch.full_like(x, wanted))
    for wrong in (9, -1):
        said = f"num_active_loras is {wrong}, lora.max_loras is 3: 0 to 3 are allowed, and 4 for any number of adapters"
        with pytest.raises(InputError, match=said) as caught:
            runner(x=x, num_active_loras=wrong)
        assert "raise lora.max_loras" in caught.value.remedy
    assert not runner.stats.eager
    without = open_runner(backend, model, {"x": ROWS}, sizes=[4])
    with pytest.raises(InputError, match="num_active_loras is 1") as caught:
        without(x=x, num_active_loras=1)
    assert "`lora` section" in caught.value.remedy


def test_a_model_in_training_mode_is_warned_of() -> None:
    specs = {"x": Input(shape=("num_tokens", 8), dtype="float32", pad=0)}
    for training in (True, False):
        model = torch.nn.BatchNorm1d(8).train(training)
        runner = cgplan.capture(
            model, {"input": specs["x"]}, compilation={"cudagraph_capture_sizes": [4]}, device="cpu"
        )
        assert any("training mode" in warning for warning in runner.report.warnings) is training
        assert int(model.num_batches_tracked) == 0
        assert not model.running_mean.any()
        statistics = {"model.running_mean", "model.running_var", "model.num_batches_tracked"}
        assert {record.path for record in runner.report.state} == (
            statistics if training else set()
        )
        runner.close()


def test_mode_none_captures_nothing_and_runs(backend: GraphBackend) -> None:
    runner = open_runner(backend, lambda x: x * 2, compilation={"cudagraph_mode": "NONE"})
    assert runner.plan.keys == ()
    assert runner.report.records == ()
    assert runner.report.pool_bytes == 0
    same(runner(x=batch(backend, 3)), batch(backend, 3) * 2)
    same(runner.run_eagerly(x=batch(backend, 3)), batch(backend, 3) * 2)
    assert dict(runner.stats.eager) == {MissReason.NOTHING_CAPTURED: 1}
    runner.close()


class Pieces(nn.Module):
    """Two segments with an eager piece between them; the piece counts its runs."""

    def __init__(self, backend: GraphBackend) -> None:
        super().__init__()
        self.eager_runs = 0
        self.first = CUDAGraphWrapper(lambda x: x * 2 + 1, PIECEWISE, backend=backend)
        self.second = CUDAGraphWrapper(lambda x: x.relu() * 3, PIECEWISE, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.eager_runs += 1
        y.sub_(1)  # in place: the second segment reads the first one's output where it lies
        return self.second(y)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_piecewise_wrappers_inside_a_model(backend: GraphBackend, mode: str) -> None:
    model = Pieces(backend)
    inputs = {"x": ROWS, "lengths": LENGTHS}
    runner = open_runner(
        backend,
        lambda x, lengths: model(x) + lengths.sum(),
        inputs,
        sizes=[2, 4, 8],
        compilation={"cudagraph_mode": mode, "piecewise": "wrappers"},
    )
    graphs = {(r.mode, r.descriptor.num_tokens): r.graphs for r in runner.report.records}
    assert graphs[PIECEWISE, 8] == 2
    assert (FULL, 8) not in graphs or graphs[FULL, 8] == 1
    assert sorted(d.num_tokens for d in model.first.entries) == [2, 4, 8]
    model.eager_runs = 0
    for tokens, reqs in ((3, 2), (8, 1), (1, 1), (4, 4), (2, 2)):
        x = torch.arange(float(tokens), device=backend.device) - 1
        lengths = torch.ones(reqs, dtype=torch.int64, device=backend.device)
        same(runner(x=x, lengths=lengths), (x * 2).relu() * 3 + reqs)
    uniform = 3 if mode == "FULL_AND_PIECEWISE" else 0
    assert {
        mode: sum(n for (m, _), n in runner.stats.replays.items() if m is mode)
        for mode in (PIECEWISE, FULL)
    } == {
        PIECEWISE: 5 - uniform,
        FULL: uniform,
    }
    assert model.eager_runs == 5 - uniform, (
        "the eager piece runs in PIECEWISE, and is part of a FULL graph"
    )


@pytest.mark.parametrize(
    ("runners", "own", "refused_at"),
    [
        ({"address_check": "first"}, "first", None),
        ({}, "first", 2),
        ({}, "off", 2),
        ({"debug": True}, "first", 2),
        ({"address_check": "first"}, "always", 2),
        ({"address_check": "off"}, "always", None),
    ],
)
def test_the_runners_policy_of_addresses_rules_the_wrappers_inside(
    backend: GraphBackend, runners: dict[str, Any], own: Any, refused_at: int | None
) -> None:
    """The memory between two segments is the model's own, and here it is another one from the third batch on."""
    first, second = (
        CUDAGraphWrapper(
            lambda x, k=k: x * k, PIECEWISE, options=CUDAGraphOptions(address_check=own)
        )
        for k in (2, 3)
    )
    buffers = [torch.zeros(4, device=backend.device) for _ in range(2)]
    turn = [0]

    def between(x: Tensor) -> Tensor:
        return second(buffers[turn[0]].copy_(first(x)))

    compilation = {"cudagraph_mode": "PIECEWISE", "piecewise": "wrappers", **runners}
    runner = open_runner(backend, between, {"x": ROWS}, sizes=[4], compilation=compilation)
    for batch_number in range(4):
        turn[0] = batch_number // 2
        x = rows(1, 2, 3, batch_number, device=backend.device)
        if refused_at is not None and batch_number >= refused_at:
            with pytest.raises(AddressError, match=r"args\[0\]"):
                runner(x=x)
        elif batch_number < 2:
            same(runner(x=x), x * 6)
        else:
            runner(x=x)  # nobody looks, and the numbers are old ones
    with (
        forward_context(PIECEWISE, BatchDescriptor(4)),
        torch.no_grad(),
    ):  # outside of runners its own counts
        second(buffers[0])
        second(buffers[0])
        if own == "off":
            second(buffers[1])
        if own == "always":
            with pytest.raises(AddressError):
                second(buffers[1])


def test_a_closed_runner_holds_no_static_buffer(backend: GraphBackend) -> None:
    runner = open_runner(backend, lambda x: x * 2)
    held = StorageWeakRef(runner.input_views(3)["x"].untyped_storage())
    runner(x=torch.ones(3, 2, device=backend.device))
    assert not held.expired()
    runner.close()
    gc.collect()
    assert held.expired()


def test_closing_frees_the_graphs_inside_the_model(backend: GraphBackend) -> None:
    model = Pieces(backend)
    before = reserved(backend)
    big = Input(shape=("num_tokens", MIB), dtype="float32", pad=0)
    runner = open_runner(
        backend,
        lambda x: model(x),
        {"x": big},
        sizes=[2],
        compilation={"cudagraph_mode": "PIECEWISE", "piecewise": "wrappers"},
    )
    assert backend.memory().reserved > before
    runner.close()
    del runner
    gc.collect()
    assert back_at(backend, before)
    assert not model.first.entries


class Scaled(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(MIB, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).softmax(-1)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_dropped_runner_frees_model_and_graphs_without_a_garbage_collection(
    backend: GraphBackend, mode: str
) -> None:
    before = reserved(backend)
    big = Input(shape=("num_tokens", MIB), dtype="float32", pad=0)
    gc.disable()
    try:
        model = Scaled(backend.device)
        runner = open_runner(backend, model, {"x": big}, compilation={"cudagraph_mode": mode})
        freed = weakref.ref(model.weight)
        del runner, model
        assert freed() is None
        assert back_at(backend, before)
    finally:
        gc.enable()


def test_a_failed_session_leaves_no_graphs_inside_the_model(backend: GraphBackend) -> None:
    model = Pieces(backend)

    def fails_for_two(x: Tensor) -> Tensor:
        y = model(x)
        return (
            y + y.sum().item() if len(x) == 2 and get_forward_context().runtime_mode is FULL else y
        )

    with pytest.raises(HostSyncError):
        open_runner(
            backend,
            fails_for_two,
            {"x": ROWS},
            sizes=[2, 4],
            compilation={"cudagraph_mode": "FULL_AND_PIECEWISE", "piecewise": "wrappers"},
        )
    assert not model.first.entries
    assert not model.second.entries
    runner = open_runner(
        backend,
        lambda x: model(x),
        {"x": ROWS},
        compilation={"cudagraph_mode": "PIECEWISE", "piecewise": "wrappers"},
    )
    x = rows(1, 2, 3, device=backend.device)
    same(runner(x=x), x * 6)


def test_output_rows_of_piecewise_keys_follow_the_metadata(backend: GraphBackend) -> None:
    """A PIECEWISE key leaves the number of requests open; the static buffers hold at most max_num_seqs."""
    inner = CUDAGraphWrapper(lambda x: x * 2, PIECEWISE, backend=backend)
    runner = open_runner(
        backend,
        lambda x, last: inner(x)[last],
        {"x": ROWS, "last": LENGTHS},
        sizes=[8],
        output_rows="num_reqs",
        scheduler={"max_num_seqs": 2},
        compilation={"cudagraph_mode": "PIECEWISE", "piecewise": "wrappers"},
    )
    x, last = torch.arange(6.0, device=backend.device), torch.tensor([2, 5], device=backend.device)
    same(runner(x=x, last=last), rows(4, 10, device=backend.device))
    same(runner(x=x, last=last[:1]), rows(4, device=backend.device))


def test_piecewise_without_wrappers_says_so(backend: GraphBackend) -> None:
    with pytest.raises(
        CaptureError, match="nothing in the model captured for PIECEWISE size=8"
    ) as caught:
        open_runner(
            backend,
            lambda x: x * 2,
            compilation={"cudagraph_mode": "PIECEWISE", "piecewise": "wrappers"},
        )
    assert "CUDAGraphWrapper" in caught.value.remedy


# --- wrappers and the forward context -------------------------------------------------------------------------


def test_the_forward_context_is_each_threads_own() -> None:
    seen: list[str] = []

    def work() -> None:
        with forward_context(metadata={"name": "one"}):
            seen.append(get_forward_context().metadata["name"])
        try:
            get_forward_context()
        except CgplanError as error:
            seen.append(error.remedy)

    with forward_context(FULL, BatchDescriptor(3), {"name": "main"}) as outer:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert get_forward_context() is outer
        with forward_context() as inner:
            assert get_forward_context() is inner
            assert inner.runtime_mode is NONE
            assert inner.derived is not outer.derived
        assert get_forward_context() is outer
    assert seen[0] == "one"
    assert "forward_context" in seen[1]
    with pytest.raises(CgplanError, match="no forward context"):
        get_forward_context()
    with pytest.raises(CgplanError, match="needs a batch descriptor"), forward_context(FULL):
        pass


def test_the_model_sees_its_batch_in_the_context(backend: GraphBackend) -> None:
    seen = Tally()

    def model(x: Tensor) -> Tensor:
        context = get_forward_context()
        seen.append((context.runtime_mode, context.descriptor, sorted(context.metadata)))
        return x * 2

    runner = open_runner(backend, model, {"x": ROWS}, sizes=[4], metadata={"lengths": LENGTHS})
    key = BatchDescriptor(4, 4)
    eager = (NONE, key, ["lengths"])
    assert seen == [eager, eager, (FULL, key, ["lengths"])], "a look, a warm-up and the capture"
    x, lengths = (
        torch.zeros(5, device=backend.device),
        torch.zeros(2, dtype=torch.int64, device=backend.device),
    )
    runner(x=x, lengths=lengths)
    assert seen[-1] == (NONE, BatchDescriptor(5, 2), ["lengths"])


def test_what_a_warm_up_derived_is_not_frozen_into_a_graph(backend: GraphBackend) -> None:
    """Layers share what they derive from the metadata; it has to be derived inside each capture anew."""

    def layer(x: Tensor) -> Tensor:
        context = get_forward_context()
        if "total" not in context.derived:
            context.derived["total"] = context.metadata["lengths"].sum()
        return x + context.derived["total"]

    metadata = {"lengths": LENGTHS}
    runner = open_runner(
        backend, lambda x: layer(layer(x)), {"x": ROWS}, sizes=[4], metadata=metadata
    )
    for value in (1, 5):
        lengths = torch.full((3,), value, device=backend.device)
        x = torch.zeros(3, device=backend.device)
        same(runner(x=x, lengths=lengths), torch.full_like(x, 2 * 3 * value))


# --- sessions -------------------------------------------------------------------------------------------------


def test_a_session_captures_in_order_and_reports(backend: GraphBackend) -> None:
    steps: list[CaptureProgress] = []
    runner = open_runner(backend, lambda x: (x * 2).relu(), sizes=[1, 4, 16], progress=steps.append)
    assert [(s.index, s.total, s.mode, s.descriptor.num_tokens) for s in steps] == [
        (0, 3, FULL, 16),
        (1, 3, FULL, 4),
        (2, 3, FULL, 1),
    ]
    report = runner.report
    assert report.plan == runner.plan
    assert [r.descriptor.num_tokens for r in report.records] == [16, 4, 1]
    assert all(r.graphs == 1 for r in report.records)
    assert all(r.nodes == 2 for r in report.records)
    assert report.records[0].pool_growth > 0
    assert [r.pool_growth for r in report.records[1:]] == [0, 0], (
        "smaller graphs fit into the first one's memory"
    )
    assert report.pool_bytes == sum(r.pool_growth for r in report.records)
    assert report.static_bytes == 16 * 2 * 4
    assert report.environment.backend == backend.name
    assert type(report).model_validate_json(report.model_dump_json()) == report


def test_the_number_of_warm_ups(backend: GraphBackend) -> None:
    for warmups in (0, 1, 3):
        runs = Tally()

        def model(x: Tensor, runs: list[int] = runs) -> Tensor:
            runs.append(len(x))
            return x * 2

        open_runner(backend, model, sizes=[2, 4], compilation={"cudagraph_num_of_warmups": warmups})
        assert runs == [4] * (warmups + 2) + [2] * (warmups + 1), "and a look at the first key"


@pytest.mark.usefixtures("collector_as_users_have_it")
def test_sessions_leave_the_collector_as_they_found_it(backend: GraphBackend) -> None:
    inside = Tally()

    def model(x: Tensor) -> Tensor:
        inside.append(gc.isenabled())
        return x * 2

    open_runner(backend, model, sizes=[2])
    assert inside == [False] * 3
    assert gc.isenabled()
    with pytest.raises(OutputShapeError):
        open_runner(backend, lambda x: x.sum(), sizes=[2])
    assert gc.isenabled()
    assert gc.get_freeze_count() < 10_000, (
        "from Python 3.12 on some objects are always frozen, but not all"
    )


def test_a_failure_of_the_model_itself_names_the_users_line(backend: GraphBackend) -> None:
    def model(x: Tensor) -> Tensor:
        return x @ torch.zeros(7, 7, device=x.device)

    line = model.__code__.co_firstlineno + 1
    with pytest.raises(ModelError) as caught:
        open_runner(backend, model)
    message = caught.value.message
    assert f"{__file__}:{line}: `return x @ torch.zeros(7, 7, device=x.device)`" in message
    assert "failed on a batch padded to FULL size=8" in message
    assert "mat1 and mat2 shapes" in message
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_failure_of_the_model_names_the_arguments_of_its_forward(backend: GraphBackend) -> None:
    def model(picture: Tensor, scale: float = 1.0) -> Tensor:
        return picture * scale

    with pytest.raises(ModelError, match="unexpected keyword argument 'x'") as caught:
        open_runner(backend, model)
    assert ", against the model's forward(picture, scale)." in caught.value.remedy


def test_a_failure_of_the_model_shows_that_its_forward_takes_any_name(
    backend: GraphBackend,
) -> None:
    """As those of transformers, where a wrong name is no TypeError."""

    def model(picture: Tensor | None = None, **kwargs: Tensor) -> Tensor:
        assert kwargs
        return picture * 2  # type: ignore[operator]

    with pytest.raises(ModelError, match="NoneType") as caught:
        open_runner(backend, model)
    assert caught.value.remedy.startswith(
        "The forward has no argument 'x': its **kwargs took it. Check the declared inputs, x "
    )
    assert ", against the model's forward(picture, **kwargs)." in caught.value.remedy


def test_a_failure_under_capture_names_the_users_line(backend: GraphBackend) -> None:
    runs = Tally()

    def model(x: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) == 4:  # after a look and two warm-ups
            raise KeyError("only under capture")
        return x * 2

    with pytest.raises(CaptureError) as caught:
        open_runner(backend, model)
    assert type(caught.value) is CaptureError
    assert (
        f"{__file__}:{model.__code__.co_firstlineno + 3}: `raise KeyError" in caught.value.message
    )
    assert "capture of FULL size=8" in caught.value.message
    assert "ran eagerly" in caught.value.remedy
    same(open_runner(backend, model)(x=batch(backend, 3)), batch(backend, 3) * 2)


def test_errors_of_the_caller_pass_through_and_free_all(backend: GraphBackend) -> None:
    before = reserved(backend)

    def stop(step: CaptureProgress) -> None:
        if step.index == 1:
            raise KeyboardInterrupt

    big = Input(shape=("num_tokens", MIB), dtype="float32", pad=0)
    with pytest.raises(KeyboardInterrupt):
        open_runner(backend, lambda x: x * 2, {"x": big}, progress=stop)
    assert back_at(backend, before)


@contextmanager
def short_of_memory(backend: GraphBackend, limit: int) -> Iterator[GraphBackend]:
    """The backend, or one like it, that has ``limit`` bytes left."""
    if isinstance(backend, TapeBackend):
        yield LimitedTape(limit)
        return
    reading = backend.memory()
    torch.cuda.set_per_process_memory_fraction((reading.reserved + limit) / reading.total)
    try:
        yield backend
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_memory_that_runs_out_in_the_middle_of_a_session(backend: GraphBackend) -> None:
    """The first keys fit, a later one does not: all is freed, and the message says at which key and what to lower."""

    def model(x: Tensor) -> Tensor:
        small = get_forward_context().descriptor.num_tokens < 4
        kept = [x.repeat(64, 1) + i for i in range(64 if small else 1)]  # 8 MiB each for two rows
        return x + torch.stack([part[0, 0] for part in kept]).sum()

    wide = {"x": Input(shape=("num_tokens", 16384), dtype="float32", pad=0)}
    reserved(backend)
    with short_of_memory(
        backend, 160 * MIB
    ) as short:  # the look at the first key takes as much as its capture
        before = reserved(short)
        steps: list[CaptureProgress] = []
        with pytest.raises(CaptureMemoryError) as caught:
            open_runner(
                short, model, wide, sizes=[2, 4, 8], progress=steps.append, compilation=NO_WARM_UP
            )
        assert back_at(short, before), "while the error is still held"
        assert steps[-1].descriptor.num_tokens == 2
        message = caught.value.message
        assert "out of memory at FULL size=2 num_reqs=2" in message
        assert "free on the device" in message
        assert "everything captured in this session was freed" in message
        assert "max_cudagraph_capture_size" in caught.value.remedy
        x = torch.ones(3, 16384, device=backend.device)
        with torch.no_grad(), forward_context(descriptor=BatchDescriptor(8)):
            assert model(x).shape == x.shape, "the model runs eagerly"
        again = open_runner(short, lambda x: x * 2, wide, sizes=[2, 4])
        same(again(x=x), x * 2)


NO_WARM_UP = {"cudagraph_num_of_warmups": 0}


# --- what first-time users tried ------------------------------------------------------------------------------


def test_metadata_that_is_not_declared_is_named(backend: GraphBackend) -> None:
    def model(x: Tensor) -> Tensor:
        return x * get_forward_context().metadata["lenghts"].sum()

    with pytest.raises(InputError, match="metadata 'lenghts', which is not declared") as caught:
        open_runner(backend, model, {"x": ROWS}, metadata={"lengths": LENGTHS})
    assert "lengths" in caught.value.remedy


def test_an_eager_piece_is_told_of_metadata_that_is_not_declared(backend: GraphBackend) -> None:
    """In a replay, too, where the piece reads it first then."""
    names = ["lengths"]

    @cgplan.eager_break_during_capture
    def piece(x: Tensor) -> Tensor:
        return x * get_forward_context().metadata[names[0]].sum()

    def model(x: Tensor) -> Tensor:
        return piece(x + 1) + 1

    pieces = {"cudagraph_mode": "PIECEWISE"}
    metadata = {"lengths": LENGTHS}
    runner = open_runner(backend, model, {"x": ROWS}, metadata=metadata, compilation=pieces)
    given = {
        "x": torch.ones(3, device=backend.device),
        "lengths": torch.ones(3, dtype=torch.int64, device=backend.device),
    }
    runner(**given)
    names[0] = "lenghts"
    for run in (runner, runner.run_eagerly):
        with pytest.raises(InputError, match="metadata 'lenghts', which is not declared"):
            run(**given)


def test_a_plan_of_another_configuration_is_refused(backend: GraphBackend) -> None:
    one, other = (
        validate_config({"compilation": {"cudagraph_capture_sizes": [size]}, "inputs": {"x": ROWS}})
        for size in (4, 8)
    )
    said = r"this session has \w+: compilation.cudagraph_capture_sizes was \[4\], is \[8\] here"
    with pytest.raises(PlanError, match=said):
        CaptureSession(build_plan(one), lambda x: x, backend, other).run()
    longer = other.model_copy(update={"report": other.report.model_copy(update={"repeats": 7})})
    assert build_plan(longer).config_hash == build_plan(other).config_hash, (
        "what bench measures decides no capture"
    )


def test_bench_without_copies_writes_into_the_static_buffers(backend: GraphBackend) -> None:
    runner = open_runner(
        backend,
        lambda x: x * 2,
        sizes=[2, 4],
        compilation={"cudagraph_copy_inputs": False},
        report={"repeats": 2},
    )
    report = cgplan.bench(runner)
    assert [(r.num_tokens, r.graph is not None) for r in report.records] == [(2, True), (4, True)]


def test_an_error_that_is_its_own_cause_ends_the_session(backend: GraphBackend) -> None:
    def model(x: Tensor) -> Tensor:
        try:
            raise ValueError("boom")
        except ValueError as error:
            raise error from error

    with pytest.raises(ModelError, match="ValueError: boom"):
        open_runner(backend, model)


def test_wrappers_held_by_a_module_keep_out_of_its_manifest(backend: GraphBackend) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.run_inner = CUDAGraphWrapper(self.inner, PIECEWISE)

        def forward(self, x: Tensor) -> Tensor:
            return self.run_inner(x)

    model = Holder().to(backend.device)
    options: dict[str, Any] = {
        "compilation": {"cudagraph_mode": "PIECEWISE", "piecewise": "wrappers"}
    }
    first = open_runner(backend, model, **options)
    x = batch(backend, 3)
    with torch.no_grad():
        torch.testing.assert_close(first(x=x), model.inner(x))
        second = open_runner(backend, model, **options)
        torch.testing.assert_close(second(x=x), model.inner(x))
    with pytest.raises(SealedError, match="captured again by a later session"):
        first(x=x)
    first.close()
    with torch.no_grad():
        torch.testing.assert_close(second(x=x), model.inner(x))


@pytest.mark.parametrize("earlier", ["nobody", "a runner", "by hand"])
def test_the_first_check_is_that_of_the_graph_captured_last(
    backend: GraphBackend, earlier: str
) -> None:
    """A check of the graph that an earlier runner captured, or a call by hand, is none of this one's."""
    first, second = (
        CUDAGraphWrapper(lambda x, k=k: x * k, PIECEWISE, backend=backend) for k in (2, 3)
    )
    buffers, turn = [torch.zeros(4, device=backend.device) for _ in range(2)], 0

    def between(x: Tensor) -> Tensor:
        return second(buffers[turn].copy_(first(x)))

    options: dict[str, Any] = {
        "compilation": {"cudagraph_mode": "PIECEWISE", "piecewise": "wrappers"},
        "sizes": [4],
    }
    x = rows(1, 2, 3, 4, device=backend.device)
    if earlier == "a runner":
        same(open_runner(backend, between, {"x": ROWS}, **options)(x=x), x * 6)
    if earlier == "by hand":
        with forward_context(PIECEWISE, BatchDescriptor(4)), torch.no_grad():
            same([between(x) for _ in range(2)], [x * 6] * 2)
    runner = open_runner(backend, between, {"x": ROWS}, **options)
    turn = 1
    with pytest.raises(AddressError, match=r"args\[0\]"):
        runner(x=x)
    turn = 0
    same(runner(x=x), x * 6)


def test_static_buffers_that_do_not_fit_are_told_and_leave_the_model_alone(
    backend: GraphBackend,
) -> None:
    model = nn.Sequential(nn.Linear(2, 2)).to(backend.device)
    huge = Input(shape=("num_tokens", 1 << 48), dtype="float32", pad=0)
    modules = {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["0"]}
    with pytest.raises(CaptureMemoryError, match="no memory for static buffers of 8 tokens"):
        open_runner(backend, model, {"x": huge}, compilation=modules)
    assert "forward" not in vars(model[0]), "no break is left in the module"


class Remembers(nn.Module):
    """Keeps its last result in an attribute, as adapters around other models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2), requires_grad=False)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * self.weight
        return self.last + 1


def test_what_a_forward_keeps_is_no_state_that_could_move(backend: GraphBackend) -> None:
    model = Remembers().to(backend.device)
    runner = open_runner(backend, model, compilation={"address_check": "always"})
    for rows in (1, 3, 9, 2):  # 9 rows run eagerly and leave another tensor in the attribute
        x = batch(backend, rows)
        same(runner(x=x), x + 1)
    model.extra = batch(backend, 1)  # no graph can depend on what was not there
    same(runner(x=batch(backend, 2)), batch(backend, 2) + 1)
    model.weight.data = torch.full((2,), 5.0, device=backend.device)
    with pytest.raises(AddressError, match=r"model\.weight"):
        runner(x=batch(backend, 1))


# --- for engines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_inputs_by_position_and_by_name_are_the_same_batch(
    backend: GraphBackend, policy: str
) -> None:
    def model(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale[:, None] + get_forward_context().metadata["shift"][:, None]

    runner = open_runner(
        backend,
        model,
        {"x": X, "scale": ROWS},
        compilation={"capture_policy": policy},
        metadata={"shift": {"shape": ["num_tokens"], "dtype": "float32", "pad": 0}},
    )
    x, device = torch.randn(3, 2, device=backend.device), backend.device
    scale, shift = rows(1, 2, 3, device=device), rows(4, 5, 6, device=device)
    wanted = x * scale[:, None] + shift[:, None]
    for _ in range(2):
        same(runner(x, scale, shift=shift), wanted)
        same(runner(x, shift=shift, scale=scale), wanted)
        same(runner(shift=shift, scale=scale, x=x), wanted)
        same(runner.run_eagerly(x, scale, shift=shift), wanted)
    assert [key[1].num_tokens for key in runner.stats.replays] == [4]
    for wrong, named in (
        ((x, scale, shift), {}),
        ((x,), {"x": x, "scale": scale}),
        ((x, scale), {"scale": scale}),
    ):
        with pytest.raises(InputError, match=f"{len(wrong)} tensors by position") as caught:
            runner(*wrong, **named, **({} if len(wrong) == 3 else {"shift": shift}))
        assert "in the order x, scale" in caught.value.remedy
    with pytest.raises(InputError, match="'shift' is missing"):
        runner(x, scale)


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "NONE"])
@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_padded_tells_what_a_call_computes(backend: GraphBackend, mode: str, policy: str) -> None:
    runner = open_runner(
        backend,
        lambda x: x * 2,
        sizes=[2, 4, 8, 16],
        compilation={"cudagraph_mode": mode, "capture_policy": policy},
        speculative={"num_speculative_tokens": 1},
    )
    for count, uniform in (
        (1, False),
        (3, False),
        (2, True),
        (6, True),
        (16, True),
        (17, False),
        (18, True),
    ):
        captured = runner.plan.keys
        padded = runner.padded(count, uniform_decode=uniform)
        assert runner.plan.keys == captured
        runner.stats.reset()
        runner(x=torch.ones(count, 2, device=backend.device), uniform_decode=uniform)
        assert [key.num_tokens for _, key in runner.stats.replays] == (
            [] if padded is None else [padded]
        )
        with runner.no_capture():
            assert runner.padded(count, uniform_decode=uniform) == padded
    with pytest.raises(InputError, match="not whole requests of 2"):
        runner.padded(3, uniform_decode=True)
    for count in (0, -3):
        with pytest.raises(InputError):
            runner.padded(count)
    runner.close()
    with pytest.raises(CgplanError, match="closed"):
        runner.padded(1)


def test_a_runner_says_what_it_is(backend: GraphBackend) -> None:
    runner = open_runner(backend, lambda x: x * 2)
    for count in (1, 3, 9):
        runner(x=torch.ones(count, 2, device=backend.device))
    lines = str(runner).splitlines()
    assert len(lines) <= 8
    assert lines[0].startswith(
        f"runner on {backend.device} (open): FULL, 3 graphs, sizes 2, 4, 8; "
    )
    assert lines[1] == "inputs: x"
    assert "\n".join(lines[2:]) == str(runner.stats)
    runner.close()
    assert "(closed)" in str(runner)


def test_calls_of_several_threads_wait_for_each_other(backend: GraphBackend) -> None:
    inputs = {"x": Input(shape=("num_tokens", 4), dtype="float32", pad=0)}
    sizes = {"cudagraph_capture_sizes": [1, 2, 4], "outputs": "clone"}
    device = backend.device.type
    with closing(cgplan.capture(lambda x: x * 2, inputs, compilation=sizes, device=device)) as run:
        xs = [torch.full((1 + i % 4, 4), float(i), device=device) for i in range(200)]
        for x in xs[:4]:
            run(x=x)
        with ThreadPoolExecutor(4) as threads:
            for x, y in zip(xs, threads.map(lambda x: run(x=x), xs), strict=True):
                assert torch.equal(y, x * 2)


class Gathered(nn.Module):
    """Reads one matrix whole, rows of a table, and a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 8)
        self.linear = nn.Linear(8, 8, bias=False)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.linear(self.table(x)) * self.steps  # type: ignore[no-any-return]


def test_the_floor_of_a_bench_counts_weights_that_are_read_whole(backend: GraphBackend) -> None:
    model = Gathered().to(backend.device).eval()
    inputs = {"x": Input(shape=("num_tokens",), dtype="int64", pad=0, example=(0, 1000))}
    runner = cgplan.capture(
        model,
        inputs,
        compilation={"cudagraph_capture_sizes": [2, 4]},
        report={"repeats": 3},
        device=backend.device.type,
    )
    with closing(runner):
        assert runner.graphs.facts.weight_bytes == 8 * 8 * 4
        assert runner.graphs.facts.state_bytes == 1000 * 8 * 4 + 4
        floor = cgplan.bench(runner).floor
    if backend.is_tape:
        assert floor is None
    else:
        assert floor is not None
        assert floor.weight_bytes == 8 * 8 * 4
        assert floor.state_bytes == 1000 * 8 * 4 + 4
        assert 1e5 < floor.bytes_per_us < 1e8
        assert 0.1 < floor.kernel_us < 100


class Read(nn.Module):
    """100 rows of memory, which ``read`` reads."""

    def __init__(self, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(100, 8))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x, self.rows)


def through_a_cache(x: Tensor, rows: Tensor) -> Tensor:
    rows.index_copy_(0, torch.zeros(1, dtype=torch.int64, device=x.device), x[:1])
    return x @ rows.T


@pytest.mark.parametrize(
    ("read", "weight_rows"),
    [
        (lambda x, rows: x @ rows.T, 100),
        (lambda x, rows: x @ rows[:60].T + (x @ rows[60:].T).sum(), 100),  # two weights in one
        (lambda x, rows: x @ rows.T + (x @ rows[60:].T).sum(), 100),
        (lambda x, rows: x + rows[: len(x)], 4),  # a table of positions
        (lambda x, rows: x + rows[1:2].expand_as(x), 1),
        (lambda x, rows: x + rows[x.sum(1).long()], 0),
        (lambda x, rows: x + torch.zeros_like(rows).sum(), 0),
        (through_a_cache, 0),
        (lambda x, rows: torch.ops.mkldnn._linear_pointwise(x, rows, None, "none", [], ""), 0),
    ],
)
def test_a_floor_counts_what_is_read_whatever_the_values_are(read: Any, weight_rows: int) -> None:
    """An operator of another package may read a part of what it is given."""
    inputs = {"x": Input(shape=("num_tokens", 8), dtype="float32", pad=0)}
    backend = select_backend("cpu")
    with torch.no_grad(), closing(open_runner(backend, Read(read), inputs, sizes=[2, 4])) as runner:
        facts = runner.graphs.facts
        assert facts.weight_bytes == weight_rows * 8 * 4
        assert facts.state_bytes == (100 - weight_rows) * 8 * 4


REQUEST_LENGTHS = Input(shape=("num_reqs",), dtype="int32", pad=0)
SUMS = {"x": ROWS, "lengths": REQUEST_LENGTHS}


def sums(x: Tensor, lengths: Tensor) -> Tensor:
    return x + x.sum() + 100 * lengths.sum()


def open_staged(
    backend: GraphBackend,
    model: Callable[..., Any] = lambda x: x * 2,
    specs: dict[str, Input] | None = None,
    **sections: Any,
) -> GraphRunner:
    compilation = {"cudagraph_capture_sizes": [2, 4, 8], **sections.pop("compilation", {})}
    return cgplan.capture(
        model, specs or {"x": ROWS}, compilation=compilation, device=backend.device.type, **sections
    )


def test_a_staged_batch_that_no_graph_serves_runs_eagerly(backend: GraphBackend) -> None:
    runner = open_staged(
        backend,
        sums,
        SUMS,
        compilation={"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8]},
    )
    with runner.stage(num_tokens=7, num_reqs=2) as buffers:
        assert [len(buffers["x"]), len(buffers["lengths"])] == [7, 2]
        buffers["x"].fill_(1)
        buffers["lengths"].fill_(1)
    same(buffers.output, torch.full((7,), 208.0, device=backend.device))
    assert dict(runner.stats.eager) == {MissReason.NO_GRAPH_FOR_MIXED: 1}
    x = torch.ones(3, device=backend.device)
    same(runner(x=x, lengths=x.int())[0].item(), 304.0)
    strict = open_staged(
        backend, sums, SUMS, compilation={"cudagraph_mode": "FULL_DECODE_ONLY", "on_miss": "error"}
    )
    with pytest.raises(DispatchMissError, match="mixed batches run eagerly"):
        strict.stage(num_tokens=7, num_reqs=2)


def test_staged_batches_in_other_modes(backend: GraphBackend) -> None:
    x = torch.arange(3.0, device=backend.device)
    for compilation in ({"cudagraph_mode": "PIECEWISE"}, {"debug": True}, {"outputs": "clone"}):
        torch._dynamo.reset()
        runner = open_staged(backend, lambda x: x * 2, {"x": ROWS}, compilation=compilation)
        outputs = []
        for value in (x, x + 1):
            with runner.stage(num_tokens=3) as buffers:
                buffers["x"].copy_(value)
            same(buffers.output, value * 2)
            outputs.append(buffers.output)
        assert sum(runner.stats.replays.values()) == 2
        if compilation == {"outputs": "clone"}:
            same(outputs[0], x * 2)


def test_staged_buffers_are_of_no_use_outside_of_their_block(backend: GraphBackend) -> None:
    runner = open_staged(backend, lambda x: x * 2, {"x": ROWS})
    staged = runner.stage(num_tokens=3)
    uses: list[Callable[[], Any]] = [
        lambda: staged["x"], lambda: staged.get("x"), lambda: list(staged.items()), lambda: dict(**staged),
    ]  # fmt: skip
    for _ in range(2):
        for use in uses:
            with pytest.raises(CgplanError, match="used outside of their `with` block") as caught:
                use()
            assert "with runner.stage" in caught.value.remedy
        with staged as buffers:
            assert buffers is staged
            assert [*buffers] == [*buffers.keys()] == ["x"]
            with pytest.raises(CgplanError, match="these staged buffers have no output"):
                _ = buffers.output
            with pytest.raises(InputError, match="unknown input 'xs'") as unknown:
                _ = buffers["xs"]
            assert "Did you mean 'x'?" in unknown.value.remedy
            buffers["x"].fill_(4)
        same(staged.output, torch.full((3,), 8.0, device=backend.device))
    with runner.stage(num_tokens=2) as later:
        later["x"].fill_(1)
    with pytest.raises(CgplanError, match="no output") as caught:
        _ = staged.output
    assert "before the next batch is staged" in caught.value.remedy
    with pytest.raises(CgplanError, match="outside of their"):
        staged.__exit__(None, None, None)
    same(
        runner(x=torch.ones(3, device=backend.device)), torch.full((3,), 2.0, device=backend.device)
    )


def test_nothing_else_runs_inside_a_block(backend: GraphBackend) -> None:
    runner = open_staged(backend, lambda x: x * 2, {"x": ROWS})
    x = torch.ones(3, device=backend.device)
    outcomes: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outcomes.append(runner(x=x).clone()))
    with runner.stage(num_tokens=3) as buffers:
        buffers["x"].fill_(5)
        calls: list[Callable[[], Any]] = [
            lambda: runner(x=x), lambda: runner.run_eagerly(x=x), runner.stage(num_tokens=2).__enter__,
            runner.stage(num_tokens=3).__enter__, runner.close, runner.recapture, runner.retry_failed,
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(CgplanError, match="while another call was under way") as caught:
                call()
            assert "leave the block" in caught.value.remedy
        thread.start()
        thread.join(0.2)
        assert thread.is_alive(), "a call of another thread waits"
    thread.join()
    same(outcomes[0], x * 2)
    same(runner(x=x), x * 2)


def test_batches_that_cannot_be_staged(backend: GraphBackend) -> None:
    runner = open_staged(backend, sums, SUMS, scheduler={"max_num_seqs": 4})
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"num_tokens": 9}, "hold 1 to 8 tokens, asked for 9", "Ask for fewer"),
        ({"num_tokens": 0}, "asked for 0", "Ask for at least one"),
        ({"num_tokens": -1}, "asked for -1", "Ask for at least one"),
        ({"num_tokens": 4.0}, "asked for 4.0", "whole number"),
        ({"num_tokens": 3, "num_reqs": -1}, "has -1 requests", "at least one"),
        ({"num_tokens": 5}, "5 tokens does not tell how many requests", "num_reqs"),
        ({"num_tokens": 3, "num_reqs": 4}, "4 requests, but 3 tokens", "at least one token"),
        (
            {"num_tokens": 8, "num_reqs": 5},
            "5 requests, but 8 tokens and scheduler.max_num_seqs 4",
            "max_num_seqs",
        ),
        (
            {"num_tokens": 3, "num_reqs": 2, "uniform_decode": True},
            "3 tokens are not 2 requests of 1",
            "mixed",
        ),
        ({"num_tokens": 3, "num_active_loras": 1}, "num_active_loras is 1", "`lora` section"),
    ]
    for asked, message, remedy in wrong:
        with pytest.raises(InputError, match=message) as caught:
            runner.stage(**asked)
        assert remedy in caught.value.remedy
    with runner.stage(num_tokens=8, num_reqs=4) as buffers:
        buffers["x"].fill_(1)
        buffers["lengths"].fill_(0)
    same(buffers.output[0].item(), 9.0)
    drafting = open_staged(
        backend,
        sums,
        SUMS,
        speculative={"num_speculative_tokens": 1},
        compilation={"cudagraph_mode": "FULL"},
    )
    with pytest.raises(InputError, match="does not tell how many requests"):
        drafting.stage(num_tokens=4)
    with drafting.stage(num_tokens=4, uniform_decode=True) as buffers:
        assert len(buffers["lengths"]) == 2


def test_staged_buffers_end_with_their_graphs(backend: GraphBackend) -> None:
    before = reserved(backend)
    big = Input(shape=("num_tokens", 1 << 18), dtype="float32", pad=0)
    runner = open_staged(backend, lambda x: x * 2, {"x": big})
    staged = runner.stage(num_tokens=3)
    with staged as buffers:
        buffers["x"].fill_(1)
    old = weakref.ref(staged.output)
    runner.recapture()
    with pytest.raises(CgplanError, match="are gone") as caught, staged:
        pass
    assert "Call runner.stage" in caught.value.remedy
    with pytest.raises(CgplanError, match="no output"):
        _ = staged.output
    with runner.stage(num_tokens=3) as buffers:
        buffers["x"].fill_(2)
    same(buffers.output[0, 0].item(), 4.0)
    runner.close()
    assert old() is None
    assert back_at(backend, before), "though staged buffers are still held"
    with pytest.raises(CgplanError, match="the runner is closed"):
        runner.stage(num_tokens=3)


def test_only_so_many_sizes_are_kept_ready(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "MOST_PREPARED", 3)
    runner = open_staged(backend, lambda x: x * 2, {"x": ROWS})
    kept = runner.stage(num_tokens=1)
    for count in (1, 2, 3, 4, 5, 1, 5):
        x = torch.arange(float(count), device=backend.device)
        same(runner(x=x), x * 2)
        with runner.stage(num_tokens=count) as buffers:
            buffers["x"].copy_(x)
        same(buffers.output, x * 2)
    assert runner.stage(num_tokens=1) is not kept
    with kept as buffers:
        buffers["x"].fill_(3)
    same(kept.output, torch.full((1,), 6.0, device=backend.device))
    assert runner.stats.calls == 15
    runner.close()
    with pytest.raises(CgplanError, match="are gone"), kept:
        pass


def test_a_dropped_runner_gives_its_memory_back_at_once(backend: GraphBackend) -> None:
    """No cycle of references keeps it: a collection may be far away."""
    runner = open_staged(backend, lambda x: x * 2, {"x": ROWS})
    runner(x=torch.ones(3, device=backend.device))
    with runner.stage(num_tokens=3) as buffers:
        buffers["x"].fill_(1)
    gone = weakref.ref(runner)
    assert not gc.isenabled()
    del runner
    assert gone() is None


def test_what_a_call_checks_is_checked_when_a_block_is_left(backend: GraphBackend) -> None:
    runner = open_staged(backend, lambda x: x * 2, {"x": ROWS})
    with runner.stage(num_tokens=3) as buffers:
        buffers["x"].fill_(1)
    with (
        torch.autocast(backend.device.type, torch.bfloat16),
        pytest.raises(CaptureError, match="was captured with autocast"),
        runner.stage(num_tokens=3) as buffers,
    ):
        buffers["x"].fill_(1)
    runner.invalidate("kv_cache")
    for _ in range(2):
        with (
            pytest.raises(AddressError, match="'kv_cache' moved"),
            runner.stage(num_tokens=3) as buffers,
        ):
            buffers["x"].fill_(2)
        with pytest.raises(AddressError, match="'kv_cache' moved"):
            runner(x=torch.ones(3, device=backend.device))
    large = torch.ones(9, device=backend.device)
    same(runner(x=large), large * 2)
    runner.recapture()
    with runner.stage(num_tokens=3) as buffers:
        buffers["x"].fill_(3)
    same(buffers.output, torch.full((3,), 6.0, device=backend.device))


def test_tensors_cannot_be_exchanged_inside_a_block(backend: GraphBackend) -> None:
    runner, x = open_staged(backend), torch.arange(3.0, device=backend.device)
    with (
        pytest.raises(InputError, match="cannot be put into staged buffers") as caught,
        runner.stage(3) as buffers,
    ):
        buffers["x"] = x
    assert "copy_" in caught.value.remedy
    with pytest.raises(InputError, match="cannot be put into"), runner.stage(3) as buffers:
        buffers["x"] = cast(Any, 3)
    with pytest.raises(InputError, match="unknown input 'X'"), runner.stage(3) as buffers:
        buffers["X"] = x
    with runner.stage(3) as buffers:
        buffers["x"].copy_(x)
        buffers["x"] += 5
        buffers["x"].unsqueeze_(1)  # a tensor object of the caller's own
        assert (list(buffers), len(buffers), "x" in buffers) == (["x"], 1, True)
    same(buffers.output, (x + 5) * 2)
    with pytest.raises(CgplanError, match="outside of their"):
        buffers["x"] = x


def test_a_model_that_changes_its_input_object_in_place_gets_it_as_it_was_made(
    backend: GraphBackend,
) -> None:
    """Batches without a graph run the model's own code on the staged tensors themselves."""
    runner = open_staged(
        backend,
        lambda x: (x.unsqueeze_(0) * 2)[0],
        compilation={"cudagraph_mode": "FULL_DECODE_ONLY"},
        scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 8},
    )
    staged = runner.stage(4, uniform_decode=False)
    for value in (1.0, 2.0, 3.0):
        with staged as buffers:
            buffers["x"].fill_(value)
        same(staged.output, torch.full((4,), 2 * value, device=backend.device))
    assert sum(runner.stats.eager.values()) == 3


def test_an_output_changed_in_place_before_it_is_read(backend: GraphBackend) -> None:
    """The same object was handed out before; whoever reads later gets one as it was made."""
    runner, x = open_staged(backend), torch.arange(3.0, device=backend.device)
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
    copies = open_staged(backend, compilation={"outputs": "clone"})
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


def test_writing_into_static_buffers_from_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused ahead of the first write, while the stream before has work; the stream of each write is noted."""
    backend = cgplan.backends.select_backend("cpu")
    current, busy = 0, True
    monkeypatch.setattr(type(backend), "stream_getter", lambda self: lambda: current)
    monkeypatch.setattr(type(backend), "is_busy", lambda self, stream: busy)
    runner, x = open_staged(backend), torch.arange(3.0)
    runner(x=x)
    current = 7
    staged = runner.stage(3)
    ways: list[Callable[[], Any]] = [
        staged.__enter__, lambda: runner.run_eagerly(x=x), lambda: runner.run_eagerly(x=x, padded=False),
    ]  # fmt: skip
    for way in ways:
        with pytest.raises(
            CgplanError, match="from another stream than before, whose work is not done"
        ):
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
    runner = cgplan.capture(
        lambda x: x * 2, {"x": ROWS}, device="cuda", compilation={"cudagraph_capture_sizes": [4]}
    )
    x = torch.ones(3, device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(500_000_000)
        output = runner.run_eagerly(x=x)
    with torch.cuda.stream(second):
        with pytest.raises(CgplanError, match="from another stream"), runner.stage(3) as buffers:
            buffers["x"].fill_(5)
        for call in (runner, runner.run_eagerly):
            with pytest.raises(CgplanError, match="from another stream"):
                call(x=x * 5)
        first.synchronize()
        same(output, x * 2)
        with runner.stage(3) as buffers:
            buffers["x"].fill_(5)
        same(buffers.output, x * 10)


def test_a_call_inside_a_capture_by_a_staged_batch_is_refused() -> None:
    """It does not wait for itself."""
    refused = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        if made and not refused:
            with pytest.raises(CgplanError, match="while another call was under way") as found:
                made[0](x=torch.ones(3, 8))
            refused.append(found.value)
        return x + 1

    made: list[GraphRunner] = []
    inputs = {"x": cgplan.Input(shape=("num_tokens", 8), dtype="float32", pad=0)}
    compilation = {"cudagraph_capture_sizes": [4], "capture_policy": "lazy", "verify": "off"}
    runner = cgplan.capture(forward, inputs, compilation=compilation, device="cpu")
    made.append(runner)
    with runner.stage(num_tokens=3) as buffers:
        buffers["x"].fill_(1.0)
    assert buffers.output.sum() == 3 * 8 * 2
    runner.close()
    assert refused
