"""The answers that vLLM 0.33.0's own dispatchers give: of its model runner V1 for 100 configurations and 4,000 dispatches, of V2
for 60 and 1,800.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from cgplan.config import Config
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.planning import CudagraphDispatcher, build_plan

DATA = Path(__file__).parents[1] / "data"
FILES = ("dispatch_vllm_0_33.jsonl", "dispatch_vllm_0_33_maxima.jsonl")
OMITTED = ("sizes", "max_query_len")  # which V1 does not know
VECTORS = [json.loads(line) for name in FILES for line in (DATA / name).read_text().splitlines()]


V2 = [json.loads(line) for line in (DATA / "runner_v2_vllm_0_33.jsonl").read_text().splitlines()]


def to_config(peer: dict[str, Any], **more: Any) -> Config:
    compilation = {
        **more,
        "cudagraph_mode": peer["cudagraph_mode"],
        "cudagraph_capture_sizes": peer["user_capture_sizes"],
        "max_cudagraph_capture_size": peer["user_max_capture_size"],
        "cudagraph_specialize_lora": peer["cudagraph_specialize_lora"],
    }
    lora = {
        "max_loras": peer["max_loras"],
        "specialize_active_lora": peer["specialize_active_lora"],
    }
    return Config.model_validate(
        {
            "compilation": compilation,
            "scheduler": {k: peer[k] for k in ("max_num_seqs", "max_num_batched_tokens")},
            "speculative": {
                "num_speculative_tokens": peer["num_speculative_tokens"],
                "varlen_decode": peer.get("varlen_decode", False),
                "method": "eagle" if more else None,
            },
            "lora": None if peer["max_loras"] is None else lora,
        }
    )


def test_all_vectors_are_there() -> None:
    assert len(VECTORS) == 100
    assert sum(len(vector["dispatch"]) for vector in VECTORS) == 4000


def vllm_fields(descriptor: BatchDescriptor) -> dict[str, Any]:
    assert not any(getattr(descriptor, name) for name in OMITTED)
    return {name: value for name, value in descriptor._asdict().items() if name not in OMITTED}


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_plan_and_dispatch_equal_the_peer(vector: dict[str, Any]) -> None:
    plan = build_plan(to_config(vector["config"]))
    assert list(plan.capture_sizes) == vector["capture_sizes"]
    assert plan.max_capture_size == vector["max_capture_size"]
    captured = [[mode.name, vllm_fields(descriptor)] for mode, descriptor in plan.keys]
    assert captured == [
        [mode, d] for mode, descriptors in vector["capture_descs"] for d in descriptors
    ]
    dispatcher = CudagraphDispatcher(plan)
    for asked in vector["dispatch"]:
        batch = (asked["num_tokens"], asked["uniform_decode"], asked["num_active_loras"])
        invalid = {CUDAGraphMode[name] for name in asked["invalid_modes"]}
        mode, descriptor = dispatcher.dispatch(*batch, invalid_modes=invalid)
        assert [mode.name, vllm_fields(descriptor)] == asked["answer"], asked
        assert (mode is CUDAGraphMode.NONE) == (
            dispatcher.explain(*batch, invalid_modes=invalid) is not None
        )


def v2_fields(mode: CUDAGraphMode, descriptor: BatchDescriptor) -> list[Any]:
    return [
        mode.name,
        descriptor.num_tokens,
        descriptor.num_reqs,
        descriptor.uniform_query_len,
        descriptor.max_query_len,
        descriptor.num_active_loras,
    ]


def test_all_vectors_of_v2_are_there() -> None:
    assert len(V2) == 60
    assert sum(len(vector["dispatch"]) for vector in V2) == 1800
    assert any(vector["draft_decode_descs"] for vector in V2)
    assert any(vector["config"]["varlen_decode"] for vector in V2)


@pytest.mark.parametrize("vector", V2, ids=range(len(V2)))
def test_plan_and_dispatch_equal_those_of_runner_v2(vector: dict[str, Any]) -> None:
    plan = build_plan(to_config(vector["config"], key_rules="vllm_v2"))
    assert list(plan.capture_sizes) == vector["capture_sizes"]
    assert list(plan.lora_cases) == vector["lora_cases"]
    assert [v2_fields(*key) for key in plan.keys] == vector["capture_descs"]
    assert [v2_fields(*key) for key in plan.draft_prefill_keys] == vector["draft_prefill_descs"]
    assert [v2_fields(*key) for key in plan.draft_decode_keys] == vector["draft_decode_descs"]
    dispatcher = CudagraphDispatcher(plan)
    for asked in vector["dispatch"]:
        found = dispatcher.dispatch(
            asked["num_tokens"],
            num_reqs=asked["num_reqs"],
            uniform_query_len=asked["uniform_token_count"],
            max_query_len=asked["max_query_len"],
            num_active_loras=asked["num_active_loras"],
        )
        assert v2_fields(*found) == asked["answer"], asked
