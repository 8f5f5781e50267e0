"""Plans in the words of engines, and vLLM's words as a plan."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from plans import FULL, PIECEWISE, key, plan_of, plan_with, plans, plans_with_lanes

from cgplan.errors import ConfigError
from cgplan.planning import Plan, build_plan
from cgplan.planning.engines import VllmConfig, emit, read_vllm


def vllm_json(plan: Plan) -> dict[str, Any]:
    """What a shell would hand to vLLM, parsed."""
    option, value = shlex.split(emit(plan, "vllm").text)
    assert option == "--compilation-config"
    return json.loads(value)


def read_back(plan: Plan) -> Plan:
    """The plan of what was emitted for vLLM, with the options that the note names."""
    read = read_vllm(
        json.dumps(vllm_json(plan)),
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        num_speculative_tokens=plan.query_len - 1,
        max_loras=plan.max_loras,
        specialize_active_lora=any(0 < case <= (plan.max_loras or 0) for case in plan.lora_cases),
    )
    return build_plan(read.loaded.config)


# --- vLLM -----------------------------------------------------------------------------------------------------


def test_vllm_literally() -> None:
    emission = emit(plan_of("FULL_AND_PIECEWISE", [1, 2, 8], seqs=4), "vllm")
    assert emission.text == (
        '--compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 8], '
        '"max_cudagraph_capture_size": 8}\''
    )
    assert emission.notes == ("made for --max-num-seqs 4 --max-num-batched-tokens 8192",)


@settings(max_examples=40, deadline=None)
@given(plan=plans())
def test_vllm_captures_the_same_keys_for_one_list_of_sizes(plan: Plan) -> None:
    assert read_back(plan).keys == plan.keys
    assert len(emit(plan, "vllm").notes) == 1


@settings(max_examples=40, deadline=None)
@given(plan=plans_with_lanes())
def test_every_plan_can_be_emitted_and_vllm_captures_at_least_the_sizes_of_all_lanes(plan: Plan) -> None:
    assert all(emit(plan, engine).text.isascii() for engine in ("vllm", "sglang", "trtllm", "json"))
    captured = {(mode, d.num_tokens) for mode, d in read_back(plan).keys}
    for mode, d in plan.keys:
        rounded = -(-d.num_tokens // plan.query_len) * plan.query_len
        assert {(mode, d.num_tokens), (mode, rounded)} & captured


@pytest.mark.parametrize(
    ("plan", "sizes", "notes"),
    [
        (
            plan_with([key(FULL, 1, uniform=True), key(FULL, 4, uniform=True), key(PIECEWISE, 64)]),
            [1, 4, 64],
            ["it captures 6 keys, the plan has 3", "made for --max-num-seqs 256"],
        ),
        (  # whole requests: vLLM would drop 12, were 10 the largest
            plan_with([key(FULL, 6, uniform=True, q=3), key(PIECEWISE, 10)], query_len=3),
            [6, 12],
            ["multiples of 3", "it captures", "2 speculative tokens"],
        ),
        (  # no further than a batch goes
            plan_with([key(FULL, 6, uniform=True, q=3), key(PIECEWISE, 10)], query_len=3, max_num_batched_tokens=11),
            [6, 9],
            ["multiples of 3", "it captures", "2 speculative tokens"],
        ),
    ],
)
def test_vllm_has_one_list_and_notes_say_what_it_costs(plan: Plan, sizes: list[int], notes: list[str]) -> None:
    config = vllm_json(plan)
    assert config["cudagraph_capture_sizes"] == sizes
    assert config["max_cudagraph_capture_size"] == sizes[-1]
    for note, words in zip(emit(plan, "vllm").notes, notes, strict=True):
        assert words in note


@pytest.mark.parametrize(
    ("plan", "mode"),
    [
        (plan_of("NONE"), "NONE"),
        (plan_of("FULL", [4]), "FULL"),
        (plan_with([key(FULL, 4, uniform=True)], mode="FULL_AND_PIECEWISE"), "FULL_DECODE_ONLY"),
        (plan_with([key(PIECEWISE, 4)], mode="FULL_AND_PIECEWISE"), "PIECEWISE"),
        (plan_with([], mode="FULL_AND_PIECEWISE"), "NONE"),
    ],
)
def test_vllm_is_asked_for_the_graphs_that_are_left(plan: Plan, mode: str) -> None:
    config = vllm_json(plan)
    assert config["cudagraph_mode"] == mode
    assert ("cudagraph_capture_sizes" in config) == bool(plan.keys)


@pytest.mark.parametrize(
    ("lora", "specialize", "given", "options"),
    [
        ({"max_loras": 4}, True, None, "--enable-lora --max-loras 4"),
        ({"max_loras": 4}, False, False, "--enable-lora --max-loras 4"),
        ({"max_loras": 4, "specialize_active_lora": True}, True, None, "--max-loras 4 --specialize-active-lora"),
    ],
)
def test_vllm_is_told_of_lora_cases(lora: dict[str, Any], specialize: bool, given: bool | None, options: str) -> None:
    plan = plan_of("FULL", [4], lora=lora, cudagraph_specialize_lora=specialize)
    assert vllm_json(plan).get("cudagraph_specialize_lora") is given
    assert emit(plan, "vllm").notes[-1].endswith(options)


# --- SGLang, TensorRT-LLM, JSON -------------------------------------------------------------------------------


Q3 = plan_with([key(FULL, 3, uniform=True, q=3), key(FULL, 12, uniform=True, q=3), key(PIECEWISE, 64)], query_len=3)
CASES = plan_with([key(FULL, 4, uniform=True), key(FULL, 8, uniform=True, case=2)], mode="FULL_DECODE_ONLY")
REQUESTS = "decode sizes are in requests of 3 tokens, the plan's in tokens"
PREFILL, LEFT_OUT = "prefill sizes are in tokens", "PIECEWISE keys are left out"
BEYOND = "40 tokens became 32 requests"  # more than a decode batch has


@pytest.mark.parametrize(
    ("plan", "decode", "prefill", "of_sglang", "of_trtllm"),
    [
        (Q3, "1 4", "64", [REQUESTS, PREFILL], [REQUESTS, LEFT_OUT]),
        (plan_of("NONE"), "", "", [], []),
        (plan_of("FULL_DECODE_ONLY", [1, 2]), "1 2", "", [], []),
        (plan_of("PIECEWISE", [4, 512], seqs=16), "4 16", "4 512", [PREFILL, "has no FULL graphs"], [LEFT_OUT]),
        (CASES, "4 8", "", ["2 sizes were emitted for 2 keys"], ["2 sizes were emitted for 2 keys"]),
        (plan_of("FULL", [4, 40], seqs=32), "4 32", "", [BEYOND, "no FULL graphs of mixed batches"], [BEYOND]),
    ],
)
def test_sglang_and_trtllm_have_decode_sizes_in_requests(
    plan: Plan, decode: str, prefill: str, of_sglang: list[str], of_trtllm: list[str]
) -> None:
    sglang, trtllm = emit(plan, "sglang"), emit(plan, "trtllm")
    options = [
        f"--cuda-graph-bs-{kind} {sizes} --cuda-graph-max-bs-{kind} {sizes.split()[-1]}"
        if sizes
        else f"--disable-{kind}-cuda-graph"
        for kind, sizes in (("decode", decode), ("prefill", prefill))
    ]
    assert sglang.text == " ".join(options)
    expected = {"batch_sizes": [int(size) for size in decode.split()], "enable_padding": True} if decode else None
    assert yaml.safe_load(trtllm.text) == {"cuda_graph_config": expected}
    for emission, notes in ((sglang, of_sglang), (trtllm, of_trtllm)):
        assert all(words in note for note, words in zip(emission.notes, notes, strict=True))


def test_json_has_the_sizes_by_lane() -> None:
    plan = plan_with([key(FULL, 4, uniform=True), key(PIECEWISE, 64, case=3)], max_loras=2)
    assert json.loads(emit(plan, "json").text) == {
        "query_len": 1,
        "lanes": [
            {"mode": "PIECEWISE", "uniform": False, "num_active_loras": 3, "sizes": [64]},
            {"mode": "FULL", "uniform": True, "num_active_loras": 0, "sizes": [4]},
        ],
    }


# --- vLLM's words ---------------------------------------------------------------------------------------------


def read(text: str, **options: Any) -> VllmConfig:
    return read_vllm(text, **{"max_num_seqs": 8, "max_num_batched_tokens": 64, **options})


def test_vllm_defaults_are_vllms() -> None:
    found = read("{}")
    compilation = found.loaded.config.compilation
    assert str(compilation.cudagraph_mode) == "FULL_AND_PIECEWISE"
    assert compilation.cudagraph_num_of_warmups == 1
    assert not compilation.cudagraph_copy_inputs
    assert compilation.cudagraph_specialize_lora
    assert found.loaded.origin("compilation.cudagraph_mode") == "vLLM's default"
    assert found.loaded.origin("scheduler.max_num_seqs") == "--max-num-seqs"
    assert build_plan(found.loaded.config).capture_sizes == (1, 2, 4, 8, 16)


def test_given_keys_win_over_vllms_defaults() -> None:
    found = read(
        '{"cudagraph_mode": "full_decode_only", "cudagraph_capture_sizes": [8, 4], "cudagraph_num_of_warmups": 3, '
        '"splitting_ops": [], "max_cudagraph_capture_size": null, "cudagraph_specialize_lora": false}',
        num_speculative_tokens=1,
        max_loras=4,
    )
    assert found.loaded.config.compilation.cudagraph_num_of_warmups == 3
    assert found.loaded.config.compilation.splitting_ops == ()
    assert found.loaded.origin("compilation.cudagraph_capture_sizes") == "--vllm"
    plan = build_plan(found.loaded.config)
    assert (str(plan.mode), plan.capture_sizes, plan.query_len, plan.lora_cases) == (
        "FULL_DECODE_ONLY",
        (4, 8),
        2,
        (5,),
    )


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ('{"cudagraph_mode": 1}', "PIECEWISE"),
        ('{"cudagraph_mode": 2, "mode": 0}', "FULL"),
        ('{"cudagraph_mode": 1, "mode": 0}', "NONE"),
        ('{"mode": 0}', "NONE"),
        ('{"mode": "none", "cudagraph_mode": "PIECEWISE"}', "NONE"),
        ('{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}', "FULL_DECODE_ONLY"),
        ('{"mode": "VLLM_COMPILE"}', "FULL_AND_PIECEWISE"),
    ],
)
def test_modes_are_vllms_and_piecewise_graphs_need_its_compilation(text: str, mode: str) -> None:
    found = read(text)
    assert str(found.loaded.config.compilation.cudagraph_mode) == mode
    lowered = mode == "NONE"
    assert any("vLLM has PIECEWISE graphs with mode 3 only" in note for note in found.notes) == lowered


def test_keys_without_effect_and_absent_bounds_are_noted() -> None:
    notes = read_vllm('{"backend": "inductor", "pass_config": {"fuse_norm_quant": true}}').notes
    assert notes[:2] == ("backend does not change what is captured", "pass_config does not change what is captured")
    assert "--max-num-seqs was not given: 256 was taken" in notes[2]
    assert "--max-num-batched-tokens was not given: 8192 was taken" in notes[3]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["--vllm '{' is not JSON", "--compilation-config"]),
        ("3", ["--vllm '3' is not a JSON object", "'{}' shows vLLM's defaults"]),
        ('{"cudagraph_mod": "FULL"}', ["no key 'cudagraph_mod' (did you mean 'cudagraph_mode'?)", "Correct or remove"]),
        ('{"cudagraph_mode": "FUL"}', ["--vllm: compilation.cudagraph_mode", "Did you mean 'FULL'?"]),
        ('{"cudagraph_capture_sizes": [0]}', ["cudagraph_capture_sizes.0: found 0, expected greater than"]),
        ('{"cudagraph_capture_sizes": [4], "max_cudagraph_capture_size": 8}', ["remove one of the two"]),
        ('{"mode": 7}', ["found mode 7", "3 (VLLM_COMPILE)"]),
        ('{"mode": [3]}', ["found mode [3]"]),
        ('{"mode": 0, "cudagraph_mode": 3}', ["--vllm: compilation.cudagraph_mode", "NONE, PIECEWISE, FULL"]),
        ('{"cudagraph_mode": [2, 0]}', ["compilation.cudagraph_mode"]),
    ],
)
def test_what_vllm_would_not_take_is_refused(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.remedy
