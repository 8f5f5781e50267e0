"""Memory of the host: how much is left, what bounds it, and models that are built without taking any."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checks import MIB
from torch import nn
from typer.testing import CliRunner

from cgplan.backends import throwaway_tape
from cgplan.cli.main import app
from cgplan.config import validate_config
from cgplan.errors import CaptureMemoryError
from cgplan.measure import host_memory
from cgplan.measure.estimate import estimate
from cgplan.measure.host_memory import KEPT, BoundedMemory, available_memory, is_out_of_memory
from cgplan.measure.untouched import LARGE, UntouchedMemory
from cgplan.models.decoder import build
from cgplan.planning import build_plan

linux = pytest.mark.skipif(sys.platform != "linux", reason="the bound is Linux's")
MEMINFO = "MemTotal:       2000 kB\nMemAvailable:   1000 kB\nSwapFree: 5 kB\n"


def written(folder: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "proc", folder / "cg"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, 1000 * 1024),
        ({"proc/self/cgroup": "0::/\n", "cg/memory.max": "max\n", "cg/memory.current": "5\n"}, 1000 * 1024),
        ({"proc/self/cgroup": "0::/\n", "cg/memory.max": "900\n", "cg/memory.current": "500\n"}, 400),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "cg/a/memory.max": "900\n",
                "cg/a/memory.current": "850\n",
                "cg/a/memory.stat": "anon 1\ninactive_file 30\n",
                "cg/a/b/memory.max": "900\n",
                "cg/a/b/memory.current": "100\n",
            },
            80,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n0::/\n",
                "cg/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "cg/memory/memory.usage_in_bytes": "7\n",
                "cg/memory/x/memory.limit_in_bytes": "1000\n",
                "cg/memory/x/memory.usage_in_bytes": "999\n",
                "cg/memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 9\n",
            },
            10,
        ),
    ],
)
def test_what_is_left_is_the_least_of_the_machine_and_all_groups(
    tmp_path: Path, files: dict[str, str], left: int
) -> None:
    assert available_memory(*written(tmp_path, {"proc/meminfo": MEMINFO, **files})) == left


def test_where_the_system_does_not_tell_nothing_is_known(tmp_path: Path) -> None:
    assert available_memory(tmp_path, tmp_path) is None


@linux
def test_inside_the_block_an_allocation_fails_and_after_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_memory", lambda: KEPT + 64 * MIB)
    with BoundedMemory() as memory:
        torch.empty(8 * MIB, dtype=torch.uint8)
        with pytest.raises(RuntimeError) as caught:
            torch.empty(1024 * MIB, dtype=torch.uint8)
        memory.allow(1024 * MIB)
        torch.empty(1024 * MIB, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    torch.empty(2048 * MIB, dtype=torch.uint8)


def test_other_errors_are_no_lack_of_memory() -> None:
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))


# --- models without memory ------------------------------------------------------------------------------------


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def made(mapped: list[int] | None = None) -> UntouchedMemory:
    return UntouchedMemory(([] if mapped is None else mapped).append)


@linux
def test_large_weights_and_caches_take_no_memory() -> None:
    mapped: list[int] = []
    before = resident()
    with made(mapped):
        layer = nn.Linear(8192, 8192)
        cache = torch.zeros(256, MIB)
        cache.zero_()
        noise = torch.randn(64, MIB).to("cpu")
    assert sum(mapped) == 4 * (8192 * 8192 + 320 * MIB)
    assert resident() - before < 128 * MIB
    assert not any(t.flatten()[:: 1 << 20].any() for t in (layer.weight, cache, noise))
    assert layer.bias.abs().max() > 0, "small tensors are as they are"


def test_what_is_written_stays() -> None:
    with made():
        cache = torch.empty(LARGE)
        cache[3] = 7
        kept = cache.clone()
        cache.zero_()
        ones = torch.ones(LARGE)
    assert kept[3] == 7
    assert cache[3] == 0
    assert ones.min() == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(LARGE, dtype=torch.bfloat16),
        lambda: torch.empty(512, 1024, 4, dtype=torch.float64).permute(2, 0, 1),
        lambda: torch.empty_strided((1024, 1024), (1, 1024)),
        lambda: torch.zeros_like(torch.empty(1024, 1024).t()),
        lambda: torch.ones(2).new_zeros(1024, 1024, dtype=torch.int64),
        lambda: torch.zeros(LARGE, device="meta"),
        lambda: torch.randn(LARGE, generator=torch.Generator().manual_seed(0)),
    ],
)
def test_tensors_are_laid_out_as_usual(make: Any) -> None:
    usual = make()
    with made():
        found = make()
    assert (found.shape, found.stride(), found.dtype, found.device) == (
        usual.shape,
        usual.stride(),
        usual.dtype,
        usual.device,
    )
    assert found.untyped_storage().nbytes() == usual.untyped_storage().nbytes()


METADATA = {
    "slot_mapping": {"shape": ["num_tokens"], "dtype": "int64", "pad": -1},
    "block_tables": {"shape": ["num_reqs", 4], "dtype": "int32", "pad": 0},
    "seq_lens": {"shape": ["num_reqs"], "dtype": "int32", "pad": 0},
    "query_start_loc": {"shape": ["num_reqs + 1"], "dtype": "int32", "pad": "last"},
}


@linux
@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_a_model_without_memory_is_estimated_alike(mode: str) -> None:
    tokens = {"shape": ["num_tokens"], "dtype": "int64", "pad": 0}
    config = validate_config(
        {
            "inputs": {"input_ids": tokens, "positions": tokens},
            "metadata": METADATA,
            "compilation": {"cudagraph_mode": mode, "cudagraph_capture_sizes": [4, 16]},
            "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 64},
        }
    )
    plan, shape = build_plan(config), {"num_layers": 2, "vocab_size": 4096, "hidden_size": 256}
    usual = estimate(config, build(**shape, num_blocks=64), plan).of(plan.keys)
    before = resident()
    with made():
        model = build(**shape, num_blocks=65536)
    assert estimate(config, model, plan, throwaway_tape()).of(plan.keys) == usual
    assert sum(buffer.nbytes for buffer in model.buffers()) > 1024 * MIB
    assert resident() - before < 256 * MIB


# --- on the command line --------------------------------------------------------------------------------------

MODELS = """
import torch

class Held(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones({held}, 4))

    def forward(self, x):
        return x.repeat(1, {wide}) + self.weight[0, 0]
"""


@linux
@pytest.mark.parametrize(("held", "wide"), [(1 << 26, 1), (1, 1 << 22)], ids=["building", "recording"])
def test_too_little_memory_is_an_error_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int, wide: int
) -> None:
    (tmp_path / "models.py").write_text(MODELS.format(held=held, wide=wide))
    config = {
        "model": {"target": "models.py:Held"},
        "inputs": {"x": {"shape": ["num_tokens", 4], "dtype": "float32", "pad": 0}},
        "compilation": {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [8, 16]},
    }
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host_memory, "available_memory", lambda: KEPT + 128 * MIB)
    result = CliRunner().invoke(app, ["inspect", "--config", "it.yaml", "--costs", "estimate"])
    assert result.exit_code == CaptureMemoryError.exit_code, result.output
    assert "do not fit into this machine's memory, of which 384 MiB were left" in result.stderr
    assert "remedy: Give model.kwargs a smaller KV cache" in result.stderr
