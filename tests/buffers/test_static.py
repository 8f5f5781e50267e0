"""How batches come into the static buffers: by torch's operators, and by one kernel, which the CPU can run, too."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cgplan
from cgplan import GraphRunner, Input
from cgplan.backends import GraphBackend
from cgplan.buffers import copy_kernel
from cgplan.buffers.copy_kernel import CopyKernel, KernelCopier, StagingBlocks
from cgplan.buffers.static import BatchCopy, Copier, StaticBuffers
from cgplan.errors import BackendError, InputError
from cgplan.planning import MissReason

pytestmark = pytest.mark.usefixtures("quiet_collector")

CPU = torch.device("cpu")
IDS = Input(shape=("num_tokens",), dtype="int64", pad=-1)
ROWS = Input(shape=("num_tokens",), dtype="float32", pad=0)
LENGTHS = Input(shape=("num_reqs",), dtype="int32", pad=0)
STARTS = Input(shape=("num_reqs + 1",), dtype="int64", pad="last")
WIDE = Input(shape=(3, "2 * num_tokens", 2), dtype="float16", pad=5)


# --- the kernel, run by the CPU -------------------------------------------------------------------------------

EMULATOR = """
#define __global__
#define __device__
#define __grid_constant__
#define __align__(n) alignas(n)
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Index { unsigned x, y, z; };
static Index blockIdx, threadIdx, blockDim, gridDim;
#include "copy_rows.cu"
struct Config {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
    void* stream; void* attributes; unsigned num_attributes;
};
static int launches, error;
extern "C" void* function_of(int inlined) { return inlined ? (void*)copy_rows_inline : (void*)copy_rows; }
extern "C" int launched() { return launches; }
extern "C" void fail_with(int code) { error = code; }
extern "C" int launch(Config* config, void* function, void** arguments, void*) {
    if (error) return error;
    ++launches;
    gridDim = {config->grid_x, config->grid_y, config->grid_z};
    blockDim = {config->block_x, 1, 1};
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
                for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
                    if (function == (void*)copy_rows) copy_rows(*(Batch*)arguments[0]);
                    else copy_rows_inline(*(InlineBatch*)arguments[0]);
                }
    return 0;
}
"""


class NoFence:
    """The CPU has read a block as soon as it was launched."""

    def __init__(self, stream: int) -> None:
        pass

    def synchronize(self) -> None:
        pass


class PlainBlocks(StagingBlocks):
    """In plain memory."""

    def allocate(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)


class Emulated:
    """``copy_rows.cu`` compiled for the CPU, launched by the driver's rules as far as they matter here."""

    def __init__(self, folder: Path) -> None:
        source, library = folder / "emulator.cc", folder / "emulator.so"
        source.write_text(EMULATOR, encoding="utf-8")
        include = Path(copy_kernel.__file__).parent
        options = ["-O1", "-shared", "-fPIC", "-std=c++17", f"-I{include}", "-include", "cstddef"]
        subprocess.run(
            ["g++", *options, f"-DINPUTS={copy_kernel.INPUTS}", str(source), "-o", str(library)],
            check=True,
        )
        self.library = ctypes.CDLL(str(library))
        self.library.function_of.restype = ctypes.c_void_p
        self.library.launch.argtypes = [ctypes.c_void_p] * 4
        self.kernel = CopyKernel(
            self.library.function_of(0), self.library.function_of(1), self.library.launch
        )

    @property
    def launches(self) -> int:
        return int(self.library.launched())

    def copier(self, buffers: StaticBuffers, *, copy_inputs: bool = True) -> KernelCopier:
        blocks = PlainBlocks(NoFence, lambda: None)
        return KernelCopier(buffers, self.kernel, blocks, copy_inputs=copy_inputs)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the kernel with")
    return Emulated(tmp_path_factory.mktemp("emulator"))


DTYPES = [
    "int64",
    "int32",
    "float32",
    "float16",
    "bfloat16",
    "bool",
    "uint8",
    "float64",
    "int16",
    "float8_e5m2",
]
ROW_DIMS = ["num_tokens", "num_reqs", "num_reqs + 1", "2 * num_tokens", "3 * num_reqs + 2"]


@st.composite
def inputs(draw: st.DrawFn) -> Input:
    dims: list[int | str] = draw(st.lists(st.integers(1, 3), max_size=2))
    fixed = draw(st.integers(0, 5)) == 0
    if not fixed:
        dims.insert(draw(st.integers(0, len(dims))), draw(st.sampled_from(ROW_DIMS)))
    dtype = draw(st.sampled_from(DTYPES))
    pads: list[Any] = [0, 1] if dtype in ("bool", "uint8") else [0, 1, -1]
    return Input(
        shape=tuple(dims),
        dtype=dtype,
        pad=draw(st.sampled_from(pads if fixed else [*pads, "last"])),
    )


SPECS = st.dictionaries(st.sampled_from("abcde"), inputs(), min_size=1, max_size=5)
MOST = 9


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(tokens, requests) of a batch and of what it is padded to."""
    tokens = draw(st.integers(1, MOST))
    padded = draw(st.integers(tokens, MOST))
    reqs = draw(st.integers(1, tokens))
    return tokens, reqs, padded, draw(st.integers(reqs, padded))


def values_for(specs: dict[str, Input], tokens: int, reqs: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for spec in specs.values():
        shape = [dim.size(tokens, reqs) for dim in spec.extents]
        made.append(
            torch.randint(0, 100, shape, generator=generator).to(getattr(torch, spec.dtype))
        )
    return made


def as_padded(spec: Input, value: Tensor, rows: int) -> Tensor:
    """What a static buffer's first rows have to hold, worked out slowly."""
    if spec.row_dim is None:
        return value
    if value.dtype is torch.float8_e5m2:  # which torch cannot concatenate everywhere
        return as_padded(spec.model_copy(update={"dtype": "float32"}), value.float(), rows).to(
            value.dtype
        )
    missing = rows - value.shape[spec.row_dim]
    if spec.pad == "last":
        tail = value.narrow(spec.row_dim, value.shape[spec.row_dim] - 1, 1)
    else:
        tail = torch.full_like(value.narrow(spec.row_dim, 0, 1), spec.pad)
    return torch.cat([value, *[tail] * missing], spec.row_dim)


def comparable(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.float8_e5m2 else tensor


def assert_staged(
    buffers: StaticBuffers,
    values: Sequence[Tensor],
    tokens: int,
    reqs: int,
    *,
    untouched: bool = True,
) -> None:
    """Padded to so many tokens and requests; ``untouched``: rows behind those hold their padding value, too."""
    for (name, buffer), value in zip(buffers.buffers.items(), values, strict=True):
        rows = buffer.count(tokens, reqs)
        same(comparable(buffer.view(rows)), comparable(as_padded(buffer.spec, value, rows)))
        if untouched and buffer.row_dim is not None and buffer.spec.pad != "last":
            behind = buffer.tensor.narrow(
                buffer.row_dim, rows, buffer.tensor.shape[buffer.row_dim] - rows
            )
            behind = comparable(behind)
            assert (behind == torch.full_like(behind, buffer.spec.pad)).all(), name


Bring = Callable[[BatchCopy, list[Tensor]], None]


def ways_in(copier: Copier, device: torch.device = CPU) -> dict[str, Bring]:
    """All ways in which a batch can come, for tensors on the copier's device and on the host."""

    def views_of(values: list[Tensor]) -> list[Tensor]:
        buffers = copier.buffers.buffers.values()
        views = [
            b.view(0 if b.row_dim is None else v.shape[b.row_dim])
            for b, v in zip(buffers, values, strict=True)
        ]
        for view, value in zip(views, values, strict=True):
            view.copy_(value)
        return views

    def by_path(copy: BatchCopy, values: list[Tensor]) -> None:
        copy.path(values)(values, 0, False)

    return {
        "by path": lambda copy, values: by_path(copy, [value.to(device) for value in values]),
        "any": lambda copy, values: copy.run([value.to(device) for value in values], 0),
        "strided": lambda copy, values: by_path(
            copy, [torch.stack([v, v], -1)[..., 0].to(device) for v in values]
        ),
        "in place": lambda copy, values: copy.pad(views_of(values), 0),
        "own views": lambda copy, values: by_path(copy, views_of(values)),
    }


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    specs=SPECS,
    steps=st.lists(batches(), min_size=1, max_size=6),
    host=st.booleans(),
)
@pytest.mark.parametrize("kind", ["kernel", "torch"])
def test_batches_and_padding_after_batches_of_any_size(
    emulated: Emulated, kind: str, data: Any, specs: dict[str, Input], steps: list[Any], host: bool
) -> None:
    buffers = StaticBuffers(specs, MOST, MOST, CPU)
    copier: Copier = Copier(buffers, copy_inputs=True)
    if kind == "kernel":
        copier = emulated.copier(buffers)
        copier.device = (
            torch.device("meta") if host else CPU
        )  # nothing is there: then all tensors are on the host
    ways = ways_in(copier)
    for number, (tokens, reqs, padded_tokens, padded_reqs) in enumerate(steps):
        values = values_for(specs, tokens, reqs, number)
        copy = copier.for_batch(tokens, reqs, padded_tokens, padded_reqs)
        ways[data.draw(st.sampled_from(sorted(ways)))](copy, values)
        assert_staged(buffers, values, padded_tokens, padded_reqs)
        assert (buffers.marks.tokens, buffers.marks.reqs) == (tokens, reqs)


@settings(max_examples=60, deadline=None)
@given(specs=SPECS, steps=st.lists(batches(), min_size=1, max_size=5), exposed=st.booleans())
@pytest.mark.parametrize("kind", ["kernel", "torch"])
def test_padding_where_model_or_caller_write_at_any_time(
    emulated: Emulated, kind: str, specs: dict[str, Input], steps: list[Any], exposed: bool
) -> None:
    buffers = StaticBuffers(specs, MOST, MOST, CPU)
    if exposed:
        buffers.expose(MOST, MOST)
    for buffer in buffers.buffers.values():
        buffer.written = not exposed
    copier: Copier = (
        emulated.copier(buffers) if kind == "kernel" else Copier(buffers, copy_inputs=True)
    )
    for number, (tokens, reqs, padded_tokens, padded_reqs) in enumerate(steps):
        values = values_for(specs, tokens, reqs, number)
        copier.for_batch(tokens, reqs, padded_tokens, padded_reqs).run(values, 0)
        assert_staged(buffers, values, padded_tokens, padded_reqs, untouched=False)
        for view in buffers.views(padded_tokens, padded_reqs).values():
            view.fill_(77 if view.dtype is not torch.bool else True)


def test_nothing_is_launched_for_padding_that_holds(emulated: Emulated) -> None:
    buffers = StaticBuffers({"ids": IDS, "lengths": LENGTHS}, 16, 16, CPU)
    copier = emulated.copier(buffers)

    def launches(tokens: int) -> int:
        before = emulated.launches
        copier.for_batch(tokens, tokens, 16, 16).pad((), 0)
        return emulated.launches - before

    assert [launches(n) for n in (3, 3, 5, 16, 16)] == [0, 0, 0, 0, 0], (
        "a batch may grow into the padding"
    )
    assert [launches(n) for n in (15, 15, 4, 4)] == [1, 0, 1, 0]
    buffers.expose(2, 2)
    assert launches(4) == 1
    last = emulated.copier(StaticBuffers({"starts": STARTS}, 4, 4, CPU))
    for tokens, wanted in ((2, 1), (2, 1), (4, 0)):
        before = emulated.launches
        last.for_batch(tokens, tokens, 4, 4).pad((), 0)
        assert emulated.launches - before == wanted, "the last row may be another one in each batch"


def test_a_large_batch_and_the_padding_behind_it(emulated: Emulated) -> None:
    """More bytes than one block of threads copies at once, and a small batch behind a large one."""
    specs = {
        "wide": Input(shape=("num_tokens", 700), dtype="int16", pad=7),
        "across": WIDE,
        "starts": STARTS,
    }
    buffers = StaticBuffers(specs, 300, 300, CPU)
    copier = emulated.copier(buffers)
    for tokens, padded in ((299, 300), (1, 2), (200, 256), (3, 256)):
        values = values_for(specs, tokens, tokens, tokens)
        copier.for_batch(tokens, tokens, padded, padded).run(values, 0)
        assert_staged(buffers, values, padded, padded)


def test_small_batches_from_the_host_ride_in_the_arguments(emulated: Emulated) -> None:
    specs = {"x": Input(shape=("num_tokens", 8), dtype="float32", pad=0), "ids": IDS}
    buffers = StaticBuffers(specs, 512, 512, CPU)
    copier = emulated.copier(buffers)
    copier.device = torch.device("meta")
    for tokens, through_blocks in ((60, False), (13, False), (512, True), (13, True)):
        values = values_for(specs, tokens, tokens, tokens)
        bring = copier.for_batch(tokens, tokens, 512, 512).path(values)
        for _ in range(2):
            bring(values, 0, False)
            assert_staged(buffers, values, 512, 512)
        assert (copier.blocks.nbytes > 0) == through_blocks
    assert copier.blocks.nbytes == 2 * 65536
    copier.close()
    assert copier.blocks.nbytes == 0


def test_inputs_that_lie_in_other_inputs_buffers(emulated: Emulated) -> None:
    """An output may be a view of a static buffer, and come back as another input, shifted or in another order."""
    specs = {"x": ROWS, "y": ROWS}
    for make in (emulated.copier, lambda b: Copier(b, copy_inputs=True)):
        buffers = StaticBuffers(specs, 8, 8, CPU)
        copier = make(buffers)
        x, y = (buffers.buffers[name].tensor for name in "xy")
        x.copy_(torch.arange(8.0))
        y.copy_(torch.arange(8.0) + 100)
        buffers.marks.extend(8, 8)
        values = [y[:6], x[2:8]]
        wanted = [value.clone() for value in values]
        copy = copier.for_batch(6, 6, 8, 8)
        copy.path(values)(values, 0, False)
        assert_staged(buffers, wanted, 8, 8)


@pytest.mark.parametrize("alike", [False, True])
def test_the_same_device_tensors_again_after_anything_else(emulated: Emulated, alike: bool) -> None:
    """Addresses that others wrote into the arguments of a launch meanwhile are not read."""
    buffers = StaticBuffers({"x": ROWS, "y": ROWS}, 8, 8, CPU)
    copier = emulated.copier(buffers)
    copy = copier.for_batch(5, 5, 8, 8)
    values, others = ([torch.arange(5.0) + 10 * i + n for i in range(2)] for n in (0, 100))
    bring = copy.path(values)

    def larger() -> None:
        more = [torch.ones(8), torch.ones(8)]
        copier.for_batch(8, 8, 8, 8).run(more, 0)

    between: list[Callable[[], object]] = [
        lambda: None, lambda: bring(others, 0, False), lambda: copy.run(others, 0), lambda: copy.pad((), 0), larger,
        lambda: (larger(), copy.pad((), 0)), lambda: bring([others[0], values[1]], 0, False),
        lambda: bring([b.view(5) for b in buffers.buffers.values()], 0, False),
        lambda: copy.run([v[::1].expand(5).flip(0) for v in others], 0),
    ]  # fmt: skip
    for number, act in enumerate(between * 2):
        bring(values, 0, alike)
        act()
        values[0].fill_(number)
        bring(values, 0, alike)
        assert_staged(buffers, values, 8, 8)


class Tagged(Tensor):
    """A subclass that does nothing of its own."""


def test_bytes_that_are_not_the_values(emulated: Emulated) -> None:
    buffers = StaticBuffers({"x": ROWS}, 4, 4, CPU)
    copy = emulated.copier(buffers).for_batch(3, 3, 4, 4)
    c = torch.tensor([1 + 2j, 3 - 1j, 5j], dtype=torch.complex64)
    lazily_negated = c.conj().imag.clone(memory_format=torch.preserve_format)
    negated = torch._neg_view(torch.arange(3.0))
    assert negated.is_contiguous()
    tagged = torch.arange(3.0).as_subclass(Tagged)
    for value in (
        c.conj().imag,
        lazily_negated,
        negated,
        torch.nn.Parameter(torch.ones(3)),
        tagged,
    ):
        copy.path([value])([value], 0, False)
        same(buffers.buffers["x"].view(3), value.as_subclass(Tensor).detach().resolve_neg().clone())


@pytest.mark.parametrize("place", ["device", "host", "torch"])
@pytest.mark.parametrize("tokens", [3, 30_000])
def test_writes_by_the_model_are_learnt_of(emulated: Emulated, place: str, tokens: int) -> None:
    """Whichever way a batch comes by, made before or after."""
    buffers = StaticBuffers({"x": ROWS}, 30_001, 30_001, CPU)
    copier: Copier = Copier(buffers, copy_inputs=True)
    if place != "torch":
        copier = emulated.copier(buffers)
        copier.device = torch.device("meta") if place == "host" else CPU
    copy = copier.for_batch(tokens, tokens, 30_001, 30_001)
    values = [torch.ones(tokens)]
    bring = copy.path(values)
    bring(values, 0, False)
    before = buffers.versions()
    copier.note_writes(before)
    assert not buffers.buffers["x"].written
    buffers.buffers["x"].tensor.fill_(7)
    copier.note_writes(before)
    assert buffers.buffers["x"].written
    bring(values, 0, True)
    assert_staged(buffers, values, 30_001, 30_001)
    buffers.buffers["x"].tensor[tokens:] = 7
    copy.pad((), 0)
    assert_staged(buffers, values, 30_001, 30_001)


@pytest.mark.parametrize("known", [False, True])
def test_storages_that_were_freed(emulated: Emulated, known: bool) -> None:
    buffers = StaticBuffers({"x": ROWS}, 30_000, 30_000, CPU)
    copier = emulated.copier(buffers)
    for host in (False, True):
        copier.device = torch.device("meta") if host else CPU
        for tokens in (3, 30_000):
            values = [torch.ones(tokens)]
            bring = copier.for_batch(tokens, tokens, 30_000, 30_000).path(values)
            values[0].untyped_storage().resize_(0)
            with pytest.raises(InputError, match="'x' has no memory"):
                bring(values, 0, known)


def test_an_error_of_the_driver(emulated: Emulated) -> None:
    copy = emulated.copier(StaticBuffers({"x": ROWS}, 4, 4, CPU)).for_batch(3, 3, 4, 4)
    emulated.library.fail_with(719)
    with pytest.raises(
        BackendError, match="refused to launch the copy of a batch: error 719"
    ) as caught:
        copy.run([torch.ones(3)], 0)
    assert "CUDA_LAUNCH_BLOCKING" in caught.value.remedy
    emulated.library.fail_with(0)


def test_what_captures_write_into_padding_is_told_from_what_batches_left() -> None:
    """For captures after the first batch: the buffers are cleared before, and looked at after."""
    buffers = StaticBuffers({"x": ROWS, "ids": IDS}, 4, 4, CPU)
    copier = Copier(buffers, copy_inputs=True)
    copier.for_batch(3, 3, 4, 4).run([torch.ones(3), torch.ones(3, dtype=torch.int64)], 0)
    buffers.fill_padding()
    assert_staged(buffers, [torch.zeros(1), torch.full((1,), -1)], 4, 4)
    buffers.refill()
    assert [buffer.written for buffer in buffers.buffers.values()] == [False, False]
    buffers.buffers["x"].view(2).add_(0)  # a write that leaves padding as it is
    buffers.refill()
    assert [buffer.written for buffer in buffers.buffers.values()] == [True, False]
    buffers.fill_padding()
    buffers.refill()
    assert buffers.buffers["x"].written, "its graphs are still there"
    assert (buffers.marks.tokens, buffers.marks.reqs) == (0, 0)


# --- host and device tensors through a runner -----------------------------------------------------------------

FIVE = {
    "ids": IDS,
    "x": ROWS,
    "wide": Input(shape=("num_tokens", 3), dtype="float16", pad=0),
    "across": WIDE,
    "scale": Input(shape=(), dtype="float64", pad=0),
}


def five(ids: Tensor, x: Tensor, wide: Tensor, across: Tensor, scale: Tensor) -> Tensor:
    """Each row sees all others and the padding."""
    everything = ids.sum() + wide.float().sum() + across.float().sum() + scale
    return (x + ids + wide.float().sum(1) + everything).float()


def open_runner(
    backend: GraphBackend,
    model: Callable[..., Any] = five,
    specs: dict[str, Input] = FIVE,
    **sections: Any,
) -> GraphRunner:
    compilation = {"cudagraph_capture_sizes": [2, 4, 8], **sections.pop("compilation", {})}
    return cgplan.capture(
        model, specs, compilation=compilation, device=backend.device.type, **sections
    )


def batch_of(count: int, seed: int = 0, specs: dict[str, Input] = FIVE) -> dict[str, Tensor]:
    return dict(zip(specs, values_for(specs, count, count, seed), strict=True))


def placed(
    batch: dict[str, Tensor], where: Callable[[int], bool], device: torch.device
) -> dict[str, Tensor]:
    return {
        name: value.to(device) if where(i) else value
        for i, (name, value) in enumerate(batch.items())
    }


@pytest.mark.parametrize(
    "where", [lambda i: True, lambda i: False, lambda i: i % 2 == 0], ids=["device", "host", "mix"]
)
def test_tensors_from_host_and_device(backend: GraphBackend, where: Callable[[int], bool]) -> None:
    runner = open_runner(backend, compilation={"outputs": "clone"})
    for seed, count in enumerate([8, 3, 3, 5, 1, 8, 2, 4, 9, 9, 3]):  # 9 runs eagerly
        batch = batch_of(count, seed)
        found = runner(**placed(batch, where, backend.device))
        padded = next((size for size in (2, 4, 8) if size >= count), count)
        full = {n: as_padded(s, batch[n], s.extents[s.row_dim].size(padded, padded) if s.row_dim is not None else 0)
                for n, s in FIVE.items()}  # fmt: skip
        torch.testing.assert_close(found.cpu(), five(**full)[:count])
    assert runner.stats.eager == {MissReason.TOO_LARGE: 2}
    assert sum(runner.stats.replays.values()) == 9


def test_host_tensors_may_be_written_once_the_call_is_over(backend: GraphBackend) -> None:
    """Many steps are queued before the first has run; each has to see its own values."""
    wide = Input(shape=("num_tokens", 2048), dtype="float32", pad=0)
    for spec in (ROWS, wide):  # in the kernel's arguments, and through pinned memory
        total = torch.zeros((), dtype=torch.float64, device=backend.device)

        def model(x: Tensor, total: Tensor = total) -> Tensor:
            total.add_(x.double().sum())
            return x * 1

        runner = open_runner(
            backend, model, {"x": spec}, compilation={"cudagraph_capture_sizes": [8]}
        )
        total.zero_()
        x = torch.zeros(8, *spec.shape[1:])
        for step in range(200):
            x.fill_(step)
            runner(x=x)
        x.fill_(-1e9)
        assert total.item() == x.numel() * sum(range(200))


def test_calls_of_all_kinds_of_tensors_after_one_another(backend: GraphBackend) -> None:
    """What was learnt from one call must not be taken for granted in the next."""
    runner = open_runner(
        backend, lambda x, y: x * 2 + y, {"x": ROWS, "y": ROWS}, compilation={"outputs": "clone"}
    )
    device = backend.device
    base = torch.arange(12.0, device=device)
    kinds = [
        (base[:3], base[3:6]),
        (base[::4], base[1::4]),
        (base[:3], base[:3]),
        (base[:3].expand(3), base[0].expand(3)),
        (torch.nn.Parameter(base[:3].clone()), base[:3].clone().requires_grad_()),
        (base[:3].cpu(), base[4:7]),
        (base[:3].cpu(), base[4:7].cpu()),
        (base[:6].cpu()[::2], base[4:7].cpu()),
        (base[:3].as_subclass(Tagged), base[3:6]),
    ]
    for _ in range(2):
        for x, y in kinds:
            wanted = x.as_subclass(Tensor).detach().cpu() * 2 + y.detach().cpu()
            same(runner(x=x, y=y).cpu(), wanted)
            with torch.inference_mode():
                same(runner(x=x, y=y).cpu(), wanted)
    for wrong in (base[:3].double(), base[:3].to("meta"), base[:3].reshape(3, 1), base[:2]):
        with pytest.raises(InputError):
            runner(x=base[:3], y=wrong)
        same(runner(x=base[:3], y=base[:3]).cpu(), base[:3].cpu() * 3)
    with pytest.raises(InputError, match="unknown input 'z'"):
        runner(x=base[:3], y=base[:3], z=base[:3])


def test_calls_like_the_last_one_but_for_what_is_asked(backend: GraphBackend) -> None:
    """Tensors alike, and another flag: another way. Sizes in turns, and more or fewer tensors than declared."""
    runner = open_runner(
        backend, lambda x: x * 2, {"x": ROWS}, compilation={"cudagraph_mode": "FULL_DECODE_ONLY"}
    )
    wanted = {None: 0, True: 0, False: 0}
    for count in (3, 3, 2, 3, 2, 2):
        x = torch.arange(float(count), device=backend.device)
        for flag in (None, None, True, False, False, None, True, True, False):
            same(runner(x=x, uniform_decode=flag), x * 2)
            wanted[flag] += 1
        with pytest.raises(InputError, match="unknown input 'y'"):
            runner(x=x, y=x)
        same(runner(x=x), x * 2)
        wanted[None] += 1
        with pytest.raises(InputError, match="num_active_loras is 1"):
            runner(x=x, num_active_loras=1)
    assert dict(runner.stats.eager) == {MissReason.NO_GRAPH_FOR_MIXED: wanted[False]}
    assert sum(runner.stats.replays.values()) == wanted[None] + wanted[True]


@pytest.mark.gpu
def test_the_kernel_is_used_where_it_can_be_had() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    runner = cgplan.capture(five, FIVE, device="cuda", compilation={"cudagraph_capture_sizes": [8]})
    assert isinstance(runner._copiers[()], KernelCopier)
    many = {f"x{i}": ROWS for i in range(copy_kernel.INPUTS + 1)}
    runner = cgplan.capture(lambda **x: sum(x.values()), many, device="cuda")
    assert not isinstance(runner._copiers[()], KernelCopier)


@pytest.mark.gpu
@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    specs=SPECS,
    steps=st.lists(batches(), min_size=1, max_size=6),
    host=st.booleans(),
)
@pytest.mark.parametrize("kind", ["kernel", "torch"])
def test_batches_and_padding_on_the_gpu(
    kind: str, data: Any, specs: dict[str, Input], steps: list[Any], host: bool
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    buffers = StaticBuffers(specs, MOST, MOST, device)
    backend = cgplan.backends.select_backend("cuda")
    copier = (
        backend.copier(buffers, copy_inputs=True)
        if kind == "kernel"
        else Copier(buffers, copy_inputs=True)
    )
    stream = backend.stream_getter()()
    ways = ways_in(copier, CPU if host else device)
    for number, (tokens, reqs, padded_tokens, padded_reqs) in enumerate(steps):
        values = values_for(specs, tokens, reqs, number)
        assert stream == 0
        ways[data.draw(st.sampled_from(sorted(ways)))](
            copier.for_batch(tokens, reqs, padded_tokens, padded_reqs), values
        )
        found = StaticBuffers(specs, MOST, MOST, CPU)
        for name, buffer in buffers.buffers.items():
            found.buffers[name].tensor.copy_(buffer.tensor)
        assert_staged(found, values, padded_tokens, padded_reqs)
    copier.close()


@pytest.mark.gpu
def test_calls_from_a_thread_without_a_context_and_from_side_streams() -> None:
    runner = cgplan.capture(
        five, FIVE, device="cuda", compilation={"cudagraph_capture_sizes": [8], "outputs": "clone"}
    )
    batch = batch_of(5, 1)
    wanted = runner(**batch).cpu()
    found: list[Tensor] = []

    def work() -> None:
        found.append(runner(**batch).cpu())  # the first thing that this thread does with the GPU
        found.append(runner(**{name: value.cuda() for name, value in batch.items()}).cpu())

    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with torch.cuda.stream(torch.cuda.Stream()):
        found.append(runner(**batch).cpu())
    for output in found:
        same(output, wanted)
    assert len(found) == 3


# --- both copiers under a runner ------------------------------------------------------------------------------


def sums(x: Tensor, lengths: Tensor) -> Tensor:
    return x + x.sum() + 100 * lengths.sum()


SUMS = {"x": ROWS, "lengths": LENGTHS}


@pytest.fixture(params=["kernel", "torch"])
def any_copier(
    request: pytest.FixtureRequest, backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GraphBackend]:
    """Backends with either copier; on the CPU the kernel is the emulated one."""
    if request.param == "torch":
        monkeypatch.setattr(
            type(backend),
            "copier",
            lambda self, buffers, *, copy_inputs: Copier(buffers, copy_inputs=copy_inputs),
        )
    elif backend.device.type == "cpu":
        emulator: Emulated = request.getfixturevalue("emulated")
        monkeypatch.setattr(
            type(backend),
            "copier",
            lambda self, buffers, *, copy_inputs: emulator.copier(buffers, copy_inputs=copy_inputs),
        )
    return backend


def test_staged_batches_equal_calls(any_copier: GraphBackend) -> None:
    runner = open_runner(any_copier, sums, SUMS)
    for count in (8, 3, 3, 5, 1, 2, 8, 4, 3):
        x = torch.arange(float(count), device=any_copier.device)
        with runner.stage(num_tokens=count) as buffers:
            assert {name: list(view.shape) for name, view in buffers.items()} == {
                "x": [count],
                "lengths": [count],
            }
            buffers["x"].copy_(x)
            buffers["lengths"].fill_(2)
        wanted = x + x.sum() + 200 * count
        same(buffers.output, wanted)
        lengths = torch.full((count,), 2, dtype=torch.int32, device=any_copier.device)
        same(runner(x=x, lengths=lengths), wanted)
    assert sum(runner.stats.replays.values()) == 18


def test_staged_batches_after_larger_ones_have_their_padding(any_copier: GraphBackend) -> None:
    runner = open_runner(any_copier, sums, SUMS)
    ones = torch.ones(8, device=any_copier.device)

    def staged(count: int) -> float:
        with runner.stage(num_tokens=count) as buffers:
            buffers["x"].fill_(1)
            buffers["lengths"].fill_(0)
        return float(buffers.output[0])

    assert [staged(n) for n in (8, 7, 5, 6, 8, 1)] == [9.0, 8.0, 6.0, 7.0, 9.0, 2.0]
    runner(x=ones, lengths=ones.int())
    assert staged(5) == 6.0
    with pytest.raises(ZeroDivisionError), runner.stage(num_tokens=8) as buffers:
        _ = buffers["x"].fill_(1000), 1 / 0
    assert staged(5) == 6.0, "rows that were written in a block that failed are no padding"
    same(runner(x=ones[:5], lengths=ones[:5].int())[0].item(), 1.0 + 5 + 500)


def test_views_passed_to_a_call_where_copies_are_off(any_copier: GraphBackend) -> None:
    runner = open_runner(any_copier, sums, SUMS, compilation={"cudagraph_copy_inputs": False})
    for count in (8, 3, 3):
        views = runner.input_views(count)
        views["x"].fill_(1)
        views["lengths"].fill_(0)
        for _ in range(2):
            same(runner(**views)[0].item(), 1.0 + count)
        with pytest.raises(InputError, match="'x' is not in its static buffer") as caught:
            runner(x=views["x"].clone(), lengths=views["lengths"])
        assert "runner.stage" in caught.value.remedy
        with pytest.raises(InputError, match="'lengths' is not in"):
            runner(x=views["x"], lengths=torch.zeros(count, dtype=torch.int32))
        with runner.stage(num_tokens=count) as buffers:
            buffers["x"].fill_(2)
        same(buffers.output[0].item(), 2.0 + 2 * count)


def test_the_same_tensor_objects_on_other_memory_or_in_another_layout(
    any_copier: GraphBackend,
) -> None:
    """A call that is like the last one takes a short way; an object may have changed in place meanwhile."""
    square = Input(shape=("num_tokens", 4), dtype="float32", pad=0)
    runner = open_runner(
        any_copier, lambda x: x * 2 + x.sum(), {"x": square}, compilation={"outputs": "clone"}
    )
    device = any_copier.device
    x = torch.arange(16.0, device=device).view(4, 4)
    other, wide = torch.rand(4, 4, device=device), torch.rand(4, 8, device=device)

    def follow(new: Tensor) -> None:
        x.data = new

    changes: list[Callable[[], Any]] = [
        lambda: None, x.t_, x.t_, lambda: x.add_(1), lambda: follow(other), lambda: follow(wide[:, ::2]),
        lambda: follow(torch._neg_view(other)), lambda: follow(other), lambda: x.resize_(2, 4),
        lambda: x.set_(wide.untyped_storage(), 3, (4, 4), (4, 1)), x.requires_grad_, lambda: x.requires_grad_(False),
    ]  # fmt: skip
    for change in changes:
        change()
        with torch.no_grad():
            wanted = x * 2 + x.sum()
        for _ in range(3):
            torch.testing.assert_close(runner(x=x), wanted)
        with torch.inference_mode():
            torch.testing.assert_close(runner(x=x), wanted)
    follow(other.double())
    with pytest.raises(InputError, match="dtype"):
        runner(x=x)
    follow(other)
    runner(x=x)
    x.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="'x' has no memory"):
        runner(x=x)
