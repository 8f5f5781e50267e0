"""Plans in the words of engines, and vLLM's words as a plan."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from plans import FULL, PIECEWISE, key, plan_of, plan_with, plans, plans_with_lanes

from cgplan.config import validate_config
from cgplan.errors import ConfigError
from cgplan.planning import Plan, build_plan
from cgplan.planning.engines import VllmConfig, emit, read_vllm


def vllm_json(plan: Plan) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What a shell would hand to vLLM, parsed."""
    emission = emit(plan, "vllm")
    option, value = shlex.split(emission.text)
    assert option == "--compilation-config"
    return json.loads(value), emission.notes


def read_back(plan: Plan) -> Plan:
    """The plan of what was emitted for vLLM, with the options that the note names."""
    by_count = any(0 < case <= (plan.max_loras or 0) for case in plan.lora_cases)
    return build_plan(
        read_vllm(
            shlex.split(emit(plan, "vllm").text)[1],
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            num_speculative_tokens=plan.query_len - 1,
            max_loras=plan.max_loras,
            specialize_active_lora=by_count,
        ).config
    )


# --- vLLM -----------------------------------------------------------------------------------------------------


def test_vllm_literally() -> None:
    emission = emit(plan_of("FULL_AND_PIECEWISE", [1, 2, 8], seqs=4), "vllm")
    assert emission.text == (
        '--compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 8], '
        '"max_cudagraph_capture_size": 8}\''
    )
    assert emission.notes == ("made for --max-num-seqs 4 --max-num-batched-tokens 8192",)


@given(plan=plans())
def test_vllm_captures_the_same_keys_for_one_list_of_sizes(plan: Plan) -> None:
    assert read_back(plan).keys == plan.keys
    assert len(emit(plan, "vllm").notes) == 1


@given(plan=plans_with_lanes())
def test_vllm_captures_at_least_the_sizes_of_all_lanes(plan: Plan) -> None:
    captured = {(mode, d.num_tokens) for mode, d in read_back(plan).keys}
    for mode, d in plan.keys:
        rounded = -(-d.num_tokens // plan.query_len) * plan.query_len
        assert {(mode, d.num_tokens), (mode, rounded)} & captured


def test_vllm_has_one_list_and_says_what_it_costs() -> None:
    plan = plan_with([key(FULL, 1, uniform=True), key(FULL, 4, uniform=True), key(PIECEWISE, 64)])
    config, notes = vllm_json(plan)
    assert config["cudagraph_capture_sizes"] == [1, 4, 64]
    assert "it captures 6 keys, the plan has 3" in notes[0]


def test_vllm_rounds_sizes_to_whole_requests() -> None:
    plan = plan_with([key(FULL, 6, uniform=True, q=3), key(PIECEWISE, 10)], query_len=3)
    config, notes = vllm_json(plan)
    assert config["cudagraph_capture_sizes"] == [6, 12], "vLLM would drop 12, were 10 the largest"
    assert config["max_cudagraph_capture_size"] == 12
    assert "multiples of 3" in notes[0]
    assert "2 speculative tokens" in notes[-1]


def test_vllm_rounds_no_further_than_a_batch_goes() -> None:
    plan = plan_with([key(FULL, 6, uniform=True, q=3), key(PIECEWISE, 10)], query_len=3, max_num_batched_tokens=11)
    assert vllm_json(plan)[0]["cudagraph_capture_sizes"] == [6, 9]


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
    config, _ = vllm_json(plan)
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
    config, notes = vllm_json(plan_of("FULL", [4], lora=lora, cudagraph_specialize_lora=specialize))
    assert config.get("cudagraph_specialize_lora") is given
    assert notes[-1].endswith(options)


# --- SGLang, TensorRT-LLM, JSON -------------------------------------------------------------------------------


def test_sglang_has_a_list_for_decode_and_one_for_prefill() -> None:
    plan = plan_with(
        [key(FULL, 3, uniform=True, q=3), key(FULL, 12, uniform=True, q=3), key(PIECEWISE, 64)], query_len=3
    )
    emission = emit(plan, "sglang")
    assert emission.text == (
        "--cuda-graph-bs-decode 1 4 --cuda-graph-max-bs-decode 4 "
        "--cuda-graph-bs-prefill 64 --cuda-graph-max-bs-prefill 64"
    )
    assert emission.notes[0] == "decode sizes are in requests of 3 tokens, the plan's in tokens"


def test_sglang_without_graphs() -> None:
    assert emit(plan_of("NONE"), "sglang").text == "--disable-decode-cuda-graph --disable-prefill-cuda-graph"
    decode = emit(plan_of("FULL_DECODE_ONLY", [1, 2]), "sglang")
    assert decode.text == "--cuda-graph-bs-decode 1 2 --cuda-graph-max-bs-decode 2 --disable-prefill-cuda-graph"
    assert decode.notes == ()


def test_sglang_notes_what_it_cannot_do() -> None:
    assert any("no FULL graphs of mixed batches" in note for note in emit(plan_of("FULL", [4]), "sglang").notes)
    piecewise = emit(plan_of("PIECEWISE", [4, 512], seqs=16), "sglang")
    assert "--cuda-graph-bs-decode 4 16 " in piecewise.text, "no more requests than there can be"
    assert any("has no FULL graphs" in note for note in piecewise.notes)
    cases = plan_with([key(FULL, 4, uniform=True), key(FULL, 8, uniform=True, case=2)], mode="FULL_DECODE_ONLY")
    assert "2 sizes were emitted for 2 keys" in emit(cases, "sglang").notes[0]


def test_trtllm_is_a_file_of_request_counts() -> None:
    emission = emit(plan_of("FULL_AND_PIECEWISE", [2, 4, 8], spec=1, seqs=3), "trtllm")
    assert yaml.safe_load(emission.text) == {"cuda_graph_config": {"batch_sizes": [1, 2], "enable_padding": True}}
    assert emission.notes[0] == "decode sizes are in requests of 2 tokens, the plan's in tokens"
    assert "3 PIECEWISE keys are left out" in emission.notes[1]


def test_trtllm_without_graphs() -> None:
    assert yaml.safe_load(emit(plan_of("NONE"), "trtllm").text) == {"cuda_graph_config": None}


def test_json_has_the_sizes_by_lane() -> None:
    plan = plan_with([key(FULL, 4, uniform=True), key(PIECEWISE, 64, case=3)], max_loras=2)
    assert json.loads(emit(plan, "json").text) == {
        "query_len": 1,
        "lanes": [
            {"mode": "PIECEWISE", "uniform": False, "num_active_loras": 3, "sizes": [64]},
            {"mode": "FULL", "uniform": True, "num_active_loras": 0, "sizes": [4]},
        ],
    }


@given(plan=plans() | plans_with_lanes(), engine=st.sampled_from(["vllm", "sglang", "trtllm", "json"]))
def test_every_plan_can_be_emitted(plan: Plan, engine: Any) -> None:
    emission = emit(plan, engine)
    assert emission.text.isascii()
    assert not emission.text.endswith("\n")


# --- vLLM's words ---------------------------------------------------------------------------------------------


def read(text: str, **options: Any) -> VllmConfig:
    return read_vllm(text, **{"max_num_seqs": 8, "max_num_batched_tokens": 64, **options})


def test_vllm_defaults_are_vllms() -> None:
    found = read("{}")
    compilation = found.config.compilation
    assert str(compilation.cudagraph_mode) == "FULL_AND_PIECEWISE"
    assert compilation.cudagraph_num_of_warmups == 1
    assert not compilation.cudagraph_copy_inputs
    assert compilation.cudagraph_specialize_lora
    assert found.loaded.origin("compilation.cudagraph_mode") == "vLLM's default"
    assert found.loaded.origin("scheduler.max_num_seqs") == "--max-num-seqs"
    assert build_plan(found.config).capture_sizes == (1, 2, 4, 8, 16)


def test_what_is_given_wins_over_vllms_defaults() -> None:
    found = read(
        '{"cudagraph_mode": "full_decode_only", "cudagraph_capture_sizes": [8, 4], "cudagraph_num_of_warmups": 3, '
        '"splitting_ops": [], "max_cudagraph_capture_size": null, "cudagraph_specialize_lora": false}',
        num_speculative_tokens=1,
        max_loras=4,
    )
    assert str(found.config.compilation.cudagraph_mode) == "FULL_DECODE_ONLY"
    assert found.config.compilation.cudagraph_num_of_warmups == 3
    assert found.config.compilation.splitting_ops == ()
    assert found.loaded.origin("compilation.cudagraph_capture_sizes") == "--vllm"
    plan = build_plan(found.config)
    assert (plan.capture_sizes, plan.query_len, plan.lora_cases) == ((4, 8), 2, (5,))


@pytest.mark.parametrize(("number", "mode"), [(0, "NONE"), (1, "PIECEWISE"), (2, "FULL")])
def test_vllms_numbers_of_modes_are_its_names(number: int, mode: str) -> None:
    found = read(f'{{"cudagraph_mode": {number}}}')
    assert str(found.config.compilation.cudagraph_mode) == mode
    assert found.loaded.origin("compilation.cudagraph_mode") == "--vllm"
    without = read(f'{{"cudagraph_mode": {number}, "mode": 0}}')
    assert str(without.config.compilation.cudagraph_mode) == ("NONE" if mode == "PIECEWISE" else mode)


def test_known_keys_without_effect_are_noted() -> None:
    notes = read('{"backend": "inductor", "pass_config": {"fuse_norm_quant": true}}').notes
    assert notes[:2] == ("backend does not change what is captured", "pass_config does not change what is captured")


def test_bounds_that_were_not_given_are_noted() -> None:
    found = read_vllm("{}")
    assert "--max-num-seqs was not given: 256 was taken" in found.notes[0]
    assert "--max-num-batched-tokens was not given: 8192 was taken" in found.notes[1]


@pytest.mark.parametrize(
    ("text", "mode", "noted"),
    [
        ('{"mode": 0}', "NONE", True),
        ('{"mode": "none", "cudagraph_mode": "PIECEWISE"}', "NONE", True),
        ('{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}', "FULL_DECODE_ONLY", False),
        ('{"mode": "VLLM_COMPILE"}', "FULL_AND_PIECEWISE", False),
        ('{"mode": null}', "FULL_AND_PIECEWISE", False),
    ],
)
def test_piecewise_graphs_need_vllms_compilation(text: str, mode: str, noted: bool) -> None:
    found = read(text)
    assert str(found.config.compilation.cudagraph_mode) == mode
    assert any("vLLM has PIECEWISE graphs with mode 3 only" in note for note in found.notes) == noted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["--vllm '{' is not JSON", "--compilation-config"]),
        ("{'cudagraph_mode': 'FULL'}", ["is not JSON", "in single quotes"]),
        ("3", ["--vllm '3' is not a JSON object", "'{}' shows vLLM's defaults"]),
        ('{"cudagraph_mod": "FULL"}', ["no key 'cudagraph_mod' (did you mean 'cudagraph_mode'?)", "Correct or remove"]),
        ('{"nonsense": 1}', ["no key 'nonsense'", "cudagraph_capture_sizes"]),
        ('{"cudagraph_mode": "FUL"}', ["--vllm: compilation.cudagraph_mode", "did you mean FULL?"]),
        ('{"cudagraph_capture_sizes": [0]}', ["a capture size must be at least 1, found 0"]),
        ('{"cudagraph_capture_sizes": [4], "max_cudagraph_capture_size": 8}', ["remove one of the two"]),
        ('{"mode": 7}', ["found mode 7", "3 (VLLM_COMPILE)"]),
        ('{"mode": "FAST"}', ["found mode 'FAST'"]),
        ('{"mode": true}', ["found mode True"]),
        ('{"mode": [3]}', ["found mode [3]"]),
        ('{"mode": 0, "cudagraph_mode": 3}', ["found cudagraph_mode 3", "0 (NONE), 1 (PIECEWISE), 2 (FULL)"]),
        ('{"cudagraph_mode": -1}', ["found cudagraph_mode -1"]),
        ('{"cudagraph_mode": [2, 0]}', ["compilation.cudagraph_mode"]),
        ('{"cudagraph_mode": true}', ["compilation.cudagraph_mode"]),
    ],
)
def test_what_vllm_would_not_take_is_refused(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.remedy


def test_numbers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--vllm: scheduler\.max_num_seqs: found 0"):
        read("{}", max_num_seqs=0)
    with pytest.raises(ConfigError, match=r"lora\.max_loras: found 0"):
        read("{}", max_loras=0)


@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_graphs_beyond_a_decode_batch_are_emitted_as_its_largest(engine: str) -> None:
    given = {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [4, 40]}
    plan = build_plan(validate_config({"compilation": given, "scheduler": {"max_num_seqs": 32}}))
    emission = emit(plan, engine)  # type: ignore[arg-type]
    assert "32" in emission.text
    assert "40" not in emission.text
    assert any("40 tokens became 32 requests" in note for note in emission.notes)
