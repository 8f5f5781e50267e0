"""Modes and descriptors, the words of plans."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from pages import PAGES
from plans import plan_of

from cgplan.errors import ConfigError
from cgplan.modes import RUNTIME_MODES, AttentionSupport, BatchDescriptor, CUDAGraphMode
from cgplan.optimizer.problem import Run
from cgplan.planning import CudagraphDispatcher, build_plan
from cgplan.planning.engines import emit, read_vllm
from cgplan.reports import render_text
from cgplan.traffic.histogram import StepShape, Traffic
from cgplan.traffic.step_times import StepTimes

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
FULL_DECODE_ONLY, FULL_AND_PIECEWISE = (
    CUDAGraphMode.FULL_DECODE_ONLY,
    CUDAGraphMode.FULL_AND_PIECEWISE,
)


@pytest.mark.parametrize(
    ("mode", "decode", "mixed", "separate"),
    [
        (NONE, NONE, NONE, False),
        (PIECEWISE, PIECEWISE, PIECEWISE, False),
        (FULL, FULL, FULL, False),
        (FULL_DECODE_ONLY, FULL, NONE, True),
        (FULL_AND_PIECEWISE, FULL, PIECEWISE, True),
    ],
)
def test_what_each_mode_means(
    mode: CUDAGraphMode, decode: CUDAGraphMode, mixed: CUDAGraphMode, separate: bool
) -> None:
    assert mode.decode_mode() is decode
    assert mode.mixed_mode() is mixed
    assert mode.separate_routine() is separate
    for runtime in (NONE, PIECEWISE, FULL):
        assert mode.has_mode(runtime) is (runtime in (decode, mixed))


@pytest.mark.parametrize("rules", ["vllm_v1", "vllm_v2"])
@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_all_that_reads_a_mode_runs_its_batches_alike(mode: CUDAGraphMode, rules: str) -> None:
    plan = plan_of(mode.name, [4, 7, 16], seqs=8, tokens=64, spec=1, key_rules=rules)
    if mode is CUDAGraphMode.AUTO:
        mode = plan.mode
    decode, mixed = mode.decode_mode(), mode.mixed_mode()
    assert plan.mode is mode

    kinds = {(runtime, key.uniform) for runtime, key in plan.keys}
    own = {(decode, True)} if mode.separate_routine() else set()
    assert kinds == {kind for kind in {*own, (mixed, False)} if kind[0] is not NONE}
    assert all(key.num_tokens == 2 * key.num_reqs for _, key in plan.keys if key.uniform)

    dispatcher = CudagraphDispatcher(plan)
    for uniform, runtime in ((True, decode), (False, mixed)):
        assert dispatcher.dispatch(6, uniform, num_reqs=3)[0] is runtime
        traffic = Traffic.of({StepShape(6, 3, uniform): 1}, "one batch")
        [use] = Run(plan.lanes(), traffic, StepTimes.default()).uses
        assert use.lane.mode is runtime

    words = {runtime: str(runtime) for runtime in RUNTIME_MODES} | {NONE: "eager"}
    batches = f"all: {words[mixed]}"
    if mode.separate_routine():
        batches = f"uniform decode: {words[decode]}; mixed: {words[mixed]}"
    assert f" {batches}\n" in render_text(plan)


# of vLLM 0.33
VLLM_MODES = {"NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"}


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_engines_are_told_each_mode_in_their_words(mode: CUDAGraphMode) -> None:
    plan = plan_of(mode.name, [4, 8, 16], seqs=8, key_rules="vllm_v2")
    decode, mixed = plan.mode.decode_mode(), plan.mode.mixed_mode()

    _, text = shlex.split(emit(plan, "vllm").options)
    assert json.loads(text)["cudagraph_mode"] in VLLM_MODES
    read = read_vllm(text, max_num_seqs=8, max_num_batched_tokens=plan.max_num_batched_tokens)
    assert build_plan(read.loaded.config).keys == plan.keys

    graphs = (decode is FULL, mixed is PIECEWISE)  # the two kinds that the other engines have
    sglang, trtllm = (emit(plan, engine).options for engine in ("sglang", "trtllm"))
    assert tuple(f"--cuda-graph-bs-{kind}" in sglang for kind in ("decode", "prefill")) == graphs
    assert ("batch_sizes" in trtllm, "prefill_capture_num_tokens" in trtllm) == graphs


def test_the_page_of_concepts_has_a_row_for_each_mode() -> None:
    words = {"eager": NONE, "PIECEWISE": PIECEWISE, "FULL": FULL}
    rows = re.findall(r"^\| `([A-Z_]+)` \| (.+) \| (.+) \|$", PAGES["concepts"].read_text(), re.M)
    found = {CUDAGraphMode[mode]: (decode, mixed) for mode, decode, mixed in rows}
    assert set(found) == set(CUDAGraphMode)
    for mode in set(found) - {CUDAGraphMode.AUTO}:
        decode, mixed = found[mode]
        assert (words[decode], words[mixed]) == (mode.decode_mode(), mode.mixed_mode())


def test_modes_are_read_in_any_case() -> None:
    assert CUDAGraphMode.parse(" Full_And_Piecewise ") is FULL_AND_PIECEWISE
    assert AttentionSupport.parse("uniform_batch") is AttentionSupport.UNIFORM_BATCH


def test_an_unknown_mode_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        CUDAGraphMode.parse("FULL_DECODE")
    assert "Did you mean 'FULL_DECODE_ONLY'?" in caught.value.remedy
    with pytest.raises(ConfigError) as caught:
        AttentionSupport.parse("sometimes")
    assert "NEVER, UNIFORM_SINGLE_TOKEN_DECODE, UNIFORM_BATCH, ALWAYS" in caught.value.remedy


def test_descriptors_print_what_matters() -> None:
    assert str(BatchDescriptor(8)) == "size=8"
    assert (
        str(BatchDescriptor(8, 4, True, True, 3)) == "size=8 num_reqs=4 uniform num_active_loras=3"
    )
    assert BatchDescriptor(8, 4, True).uniform_query_len == 2
    assert BatchDescriptor(8, 4).uniform_query_len is None
