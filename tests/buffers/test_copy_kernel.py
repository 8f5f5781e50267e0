"""Pinned blocks that host tensors pass through: filled in turns, never overwritten in flight, freed in the end."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from checks import same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cgplan
from cgplan import Input
from cgplan.buffers.copy_kernel import StagingBlocks
from cgplan.errors import CgplanError

pytestmark = pytest.mark.usefixtures("quiet_collector")


class Fence:
    """Waits for nothing, and remembers that it was asked to."""

    def __init__(self, stream: int) -> None:
        self.stream, self.waited = stream, 0

    def synchronize(self) -> None:
        self.waited += 1


class Plain(StagingBlocks):
    """In plain memory."""

    def allocate(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)


def blocks_of(fences: list[Fence] | None = None, waits: list[str] | None = None) -> StagingBlocks:
    """Staging blocks in plain memory."""

    def new_fence(stream: int) -> Fence:
        fence = Fence(stream)
        if fences is not None:
            fences.append(fence)
        return fence

    def wait() -> None:
        if waits is not None:
            waits.append("wait")

    return Plain(new_fence, wait)


def test_blocks_are_filled_before_the_other_one_is_taken() -> None:
    fences: list[Fence] = []
    blocks = blocks_of(fences)
    first = blocks.take(1024, 0)
    assert [blocks.take(1024, 0) - first for _ in range(63)] == [1024 * n for n in range(1, 64)]
    assert fences == []
    second = blocks.take(1024, 0)
    assert abs(second - first) >= 65536
    assert len(fences) == 1, "behind what reads the first block"
    assert fences[0].waited == 0
    for _ in range(63):
        blocks.take(1024, 0)
    assert blocks.take(1024, 0) == first
    assert fences[0].waited == 1, "before it is written again"
    assert len(fences) == 2


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 5000).map(lambda n: n * 16), st.integers(0, 1)),
        min_size=1,
        max_size=80,
    ),
    st.integers(1, 3),
)
def test_bytes_in_flight_are_never_handed_out(takes: list[tuple[int, int]], depth: int) -> None:
    """Each batch is read, on its stream, until a fence behind it has been waited for."""
    in_flight: list[tuple[int, int, int]] = []

    class Behind:
        def __init__(self, stream: int) -> None:
            self.stream, self.number = stream, len(in_flight)

        def synchronize(self) -> None:
            in_flight[:] = [
                (start, end, stream)
                if number >= self.number or stream != self.stream
                else (0, 0, stream)
                for number, (start, end, stream) in enumerate(in_flight)
            ]

    def wait() -> None:
        in_flight[:] = [(0, 0, stream) for _, _, stream in in_flight]

    blocks = Plain(Behind, wait)
    for nbytes, stream in takes:
        start = blocks.take(nbytes, stream)
        assert start % 16 == 0
        assert all(start + nbytes <= other or end <= start for other, end, _ in in_flight)
        assert any(
            b.data_ptr() <= start and start + nbytes <= b.data_ptr() + b.nbytes
            for b in blocks._blocks
        )
        in_flight.append((start, start + nbytes, stream))


@pytest.mark.parametrize("closed", [False, True])
def test_blocks_are_freed_once_the_device_has_read_them(closed: bool) -> None:
    """Though their owner was dropped without a close."""
    waits: list[str] = []
    blocks = blocks_of(waits=waits)
    blocks.take(16, 0)
    held = weakref.ref(blocks._blocks[0])
    if closed:
        blocks.close()
        assert (waits, held()) == (["wait"], None)
    del blocks
    assert (waits, held()) == (["wait"], None)


def test_pinned_memory_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: Any, **asked: Any) -> Tensor:
        raise RuntimeError(f"CUDA error: out of memory on {asked['device']}\nmore lines")

    monkeypatch.setattr(torch, "empty", empty)
    blocks = StagingBlocks(Fence, lambda: None)
    with pytest.raises(
        CgplanError, match=r"no pinned memory on the host for \[65536\] .*out of memory on cpu\n"
    ) as caught:
        blocks.take(16, 0)
    assert "runner.stage" in caught.value.remedy
    monkeypatch.undo()
    assert blocks.nbytes == 0


@pytest.mark.gpu
def test_host_tensors_under_a_default_device() -> None:
    """Blocks of pinned memory lie on the host, whatever torch.set_default_device says."""
    wide = Input(shape=("num_tokens", 2048), dtype="float32", pad=0)
    with torch.device("cuda"):
        runner = cgplan.capture(lambda x: x * 2, {"x": wide}, device="cuda")
        x = torch.ones(8, 2048, device="cpu")
        same(runner(x=x).cpu(), x * 2)
    assert StagingBlocks(Fence, lambda: None).allocate(64).is_pinned()
