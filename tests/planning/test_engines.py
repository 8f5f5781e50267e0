"""Plans in the words of engines, and vLLM's words as a plan."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import FULL, PIECEWISE, key, plan_of, plan_with, plans, plans_with_lanes

from cgplan.errors import ConfigError, PlanError
from cgplan.optimizer.lint import lint_without_traffic
from cgplan.planning import Plan, build_plan, engines
from cgplan.planning.engines import (
    VERSIONS,
    EngineOptions,
    VllmConfig,
    describe_batches,
    emit,
    read_sglang,
    read_vllm,
    sizes_by_lane,
    with_emission,
)
from cgplan.planning.plan import KeyCost, Predicted

DATA = Path(__file__).parents[1] / "data"


def vllm_json(plan: Plan) -> dict[str, Any]:
    """What a shell would hand to vLLM, parsed."""
    option, value = shlex.split(emit(plan, "vllm").options)
    assert option == "--compilation-config"
    return json.loads(value)


def read_back(plan: Plan) -> Plan:
    """The plan of what was emitted for vLLM, within its bounds."""
    read = read_vllm(
        json.dumps(vllm_json(plan)),
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        num_speculative_tokens=plan.query_len - 1,
        runner=plan.key_rules.removeprefix("vllm_"),
        max_loras=plan.max_loras,
        specialize_active_lora=any(0 < case <= (plan.max_loras or 0) for case in plan.lora_cases),
    )
    return build_plan(read.loaded.config)


# --- vLLM -----------------------------------------------------------------------------------------------------


def test_vllm_literally() -> None:
    emission = emit(plan_of("FULL_AND_PIECEWISE", [1, 2, 8], seqs=4), "vllm")
    assert emission.options == (
        '--compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 8], '
        '"max_cudagraph_capture_size": 8}\''
    )
    assert emission.bounds == "--max-num-seqs 4 --max-num-batched-tokens 8192"
    assert (emission.engine, emission.version) == ("vLLM", engines.VERSIONS["vLLM"])
    assert (emission.notes, emission.environment) == ((), ())
    assert emission.block == f"{emission.options} {emission.bounds}"


@settings(max_examples=40, deadline=None)
@given(plan=plans())
def test_vllm_captures_the_same_keys_for_one_list_of_sizes(plan: Plan) -> None:
    assert read_back(plan).keys == plan.keys
    notes = emit(plan, "vllm").notes
    told = ("speculative token", "`--runner v1`")
    assert [note for note in notes if not any(words in note for words in told)] == []
    is_v1 = emit(plan, "vllm").environment == ("VLLM_USE_V2_MODEL_RUNNER=0",)
    assert any("add `--runner v1` to `cgplan vllm check`" in note for note in notes) is is_v1


@settings(max_examples=40, deadline=None)
@given(plan=plans_with_lanes())
def test_every_plan_can_be_emitted_and_vllm_captures_at_least_the_sizes_of_all_lanes(
    plan: Plan,
) -> None:
    assert all(emit(plan, engine).block.isascii() for engine in ("vllm", "sglang", "trtllm"))
    assert sizes_by_lane(plan).isascii()
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
            ["it captures 6 keys, the plan has 3"],
        ),
        (  # whole requests: vLLM would drop 12, were 10 the largest
            plan_with([key(FULL, 6, uniform=True, q=3), key(PIECEWISE, 10)], query_len=3),
            [6, 12],
            ["multiples of 3", "it captures", "2 speculative tokens", "model runner V1"],
        ),
        (  # no further than a batch goes
            plan_with(
                [key(FULL, 6, uniform=True, q=3), key(PIECEWISE, 10)],
                query_len=3,
                max_num_batched_tokens=11,
            ),
            [6, 9],
            ["multiples of 3", "it captures", "2 speculative tokens", "model runner V1"],
        ),
    ],
)
def test_vllm_has_one_list_and_notes_say_what_it_costs(
    plan: Plan, sizes: list[int], notes: list[str]
) -> None:
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
    ("lora", "specialize", "given", "options", "environment"),
    [
        ({"max_loras": 4}, True, None, "--enable-lora --max-loras 4", ()),
        (
            {"max_loras": 4},
            False,
            False,
            "--enable-lora --max-loras 4",
            ("VLLM_USE_V2_MODEL_RUNNER=0",),
        ),
        (
            {"max_loras": 4, "specialize_active_lora": True},
            True,
            None,
            "--max-loras 4 --specialize-active-lora",
            (),
        ),
    ],
)
def test_vllm_is_told_of_lora_cases(
    lora: dict[str, Any],
    specialize: bool,
    given: bool | None,
    options: str,
    environment: tuple[str, ...],
) -> None:
    plan = plan_of("FULL", [4], lora=lora, cudagraph_specialize_lora=specialize)
    assert vllm_json(plan).get("cudagraph_specialize_lora") is given
    emission = emit(plan, "vllm")
    assert emission.bounds.endswith(options)
    assert emission.environment == environment
    assert emission.block == "\n".join((*environment, f"{emission.options} {emission.bounds}"))


def test_a_key_that_changes_no_case_of_model_runner_v2_is_repeated() -> None:
    found = read('{"cudagraph_specialize_lora": false}', max_loras=4)
    assert vllm_json(build_plan(found.loaded.config))["cudagraph_specialize_lora"] is False


# --- SGLang, TensorRT-LLM, JSON -------------------------------------------------------------------------------


Q3 = plan_with(
    [key(FULL, 3, uniform=True, q=3), key(FULL, 12, uniform=True, q=3), key(PIECEWISE, 64)],
    query_len=3,
)
CASES = plan_with(
    [key(FULL, 4, uniform=True), key(FULL, 8, uniform=True, case=2)], mode="FULL_DECODE_ONLY"
)
REQUESTS = "decode sizes are in requests of 3 tokens, the plan's in tokens"
PREFILL = "prefill sizes are in tokens"
EAGER = "prefill batches of {} tokens run eagerly"
MIXED = "prefill sizes are tokens of batches with a prompt"
NO_DECODE, NO_PREFILL = (
    f"--cuda-graph-backend-{kind} disabled turns off" for kind in ("decode", "prefill")
)
BEYOND = "40 tokens became 32 requests"  # more than a decode batch has


@pytest.mark.parametrize(
    ("plan", "decode", "prefill", "of_sglang", "of_trtllm"),
    [
        (
            Q3,
            "1 4",
            "64",
            [REQUESTS, PREFILL, EAGER.format("1 to 31")],
            [REQUESTS, MIXED],
        ),
        (
            plan_of("NONE"),
            "",
            "",
            [NO_DECODE, NO_PREFILL],
            ["null turns off TensorRT-LLM's default"],
        ),
        (plan_of("FULL_DECODE_ONLY", [1, 2]), "1 2", "", [NO_PREFILL], []),
        (
            plan_of("PIECEWISE", [4, 512], seqs=16),
            "",
            "4 512",
            [PREFILL, EAGER.format("1, 5 to 255"), NO_DECODE],
            ["null turns off TensorRT-LLM's default", MIXED],
        ),
        (
            CASES,
            "4 8",
            "",
            ["2 sizes were emitted for 2 keys", NO_PREFILL],
            ["2 sizes were emitted for 2 keys"],
        ),
        (
            plan_of("FULL", [4, 40], seqs=32),
            "4 32",
            "",
            [BEYOND, NO_PREFILL, "full experimental"],
            [BEYOND],
        ),
    ],
)
def test_sglang_and_trtllm_have_decode_sizes_in_requests(
    plan: Plan, decode: str, prefill: str, of_sglang: list[str], of_trtllm: list[str]
) -> None:
    sglang, trtllm = emit(plan, "sglang"), emit(plan, "trtllm")
    options = [
        f"--cuda-graph-bs-{kind} {sizes} --cuda-graph-max-bs-{kind} {sizes.split()[-1]}"
        if sizes
        else f"--cuda-graph-backend-{kind} disabled"
        for kind, sizes in (("decode", decode), ("prefill", prefill))
    ]
    assert sglang.options == " ".join(options)
    expected: dict[str, Any] = {"cuda_graph_config": None}
    if decode:
        sizes = [int(size) for size in decode.split()]
        expected["cuda_graph_config"] = {"batch_sizes": sizes, "enable_padding": True}
    if prefill:
        expected["prefill_cuda_graph_backend"] = "breakable"
        expected["prefill_capture_num_tokens"] = [int(size) for size in prefill.split()]
    assert yaml.safe_load(trtllm.options) == expected
    bounds = {"max_batch_size": plan.max_num_seqs, "max_num_tokens": plan.max_num_batched_tokens}
    assert yaml.safe_load(trtllm.block) == {**expected, **bounds}
    for emission, notes in ((sglang, of_sglang), (trtllm, of_trtllm)):
        assert all(words in note for note, words in zip(emission.notes, notes, strict=True))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", EngineOptions()),
        ("--tp-size 8 --model-path m --port 1", EngineOptions()),  # nothing is gathered
        ("--tp-size 8 --attn-dp-size 2", EngineOptions(4, ranks=2)),
        ("--tp 8 --dp 4 --enable-dp-attention", EngineOptions(2, ranks=4)),
        ("--tp 8 --dp 4", EngineOptions()),  # replicas
        ("--tensor-parallel-size=8 --moe-a2a-backend deepep", EngineOptions(8)),
        ("--tp 4 --moe-dense-tp-size 1", EngineOptions(4)),
        ("--enable-two-batch-overlap --tp 2 --moe-a2a-backend deepep", EngineOptions(4, True)),
        ("--tp 8 --attn-cp-size 2", EngineOptions(2)),
        ("--tp 8 --attn-cp-size 2 --attn-dp-size 2", EngineOptions(2, ranks=2)),
        ("--tp 6 --attn-cp-size 3 --attn-dp-size 1 --moe-a2a-backend mori", EngineOptions(6)),
        (
            "--max-running-requests 16 --disable-cuda-graph --cuda-graph-max-bs=8",
            EngineOptions(
                decided=("--max-running-requests", "--disable-cuda-graph", "--cuda-graph-max-bs")
            ),
        ),
    ],
)
def test_sizes_are_multiples_of_what_sglang_gathers(options: str, expected: EngineOptions) -> None:
    """As ``get_cuda_graph_batch_size_alignment`` of its utils/common.py has it."""
    assert read_sglang(options) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tp-size", "expected one argument"),
        ("--tp-size two", "invalid int value"),
        ("--tp-size '8", "No closing quotation"),
        ("--tp-size 6 --attn-dp-size 4", "size of 6 is not 4 equal groups"),
        ("--tp-size 0", "size of 0 is not 1 equal groups"),
        ("--attn-cp-size -2", "-2 equal groups"),
    ],
)
def test_what_sglang_would_not_take_is_refused(options: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_sglang(options)


@settings(max_examples=60, deadline=None)
@given(
    plan=plans_with_lanes(),
    multiple=st.integers(1, 12),
    in_requests=st.booleans(),
    ranks=st.integers(1, 4),
)
def test_sglang_drops_no_size_that_is_emitted(
    plan: Plan, multiple: int, in_requests: bool, ranks: int
) -> None:
    """By the filter of ``get_batch_sizes_to_capture``, and each batch of the plan still has a size."""
    emission = emit(plan, "sglang", EngineOptions(multiple, in_requests, ranks))
    asked, found = (
        {
            kind: [int(size) for size in sizes.split()]
            for kind, sizes in re.findall(r"--cuda-graph-bs-(\w+) ([\d ]+)", text)
        }
        for text in (emit(plan, "sglang").options, emission.options)
    )
    width = 1 if in_requests else plan.query_len
    most = -(-plan.max_num_seqs // multiple) * multiple
    for size in found.get("decode", ()):
        assert size * width % multiple == 0
        assert size <= most
    assert all(size % multiple == 0 for size in found.get("prefill", ()))
    assert asked.keys() == found.keys()
    for kind, sizes in asked.items():
        for size in sizes:
            assert 0 <= min(one for one in found[kind] if one >= size) - size < multiple
    assert f"--max-running-requests {plan.max_num_seqs * ranks} " in emission.bounds


def test_a_plan_says_which_sizes_sglang_drops() -> None:
    plan = plan_of("FULL_AND_PIECEWISE", [1, 4, 6, 8], seqs=8)
    emission = emit(plan, "sglang", EngineOptions(4, ranks=2))
    assert emission.options.startswith("--cuda-graph-bs-decode 4 8 --cuda-graph-max-bs-decode 8")
    assert emission.bounds == "--max-running-requests 16 --chunked-prefill-size 16384"
    assert emission.notes[0].startswith(
        "SGLang would drop 1, 6: its decode sizes are multiples of 4"
    )
    assert emission.notes[1].startswith("prefill sizes were rounded up to multiples of 4")
    given = emit(plan, "sglang", EngineOptions(decided=("--max-running-requests",)))
    assert given.notes[0].startswith("--sglang: --max-running-requests ignored")
    drafted = plan_of("FULL_DECODE_ONLY", [4, 8, 16], spec=3)
    assert emit(drafted, "sglang", EngineOptions(4)).options.startswith(
        "--cuda-graph-bs-decode 1 2 4 "
    )
    assert "multiples of 4" in emit(drafted, "sglang", EngineOptions(4, True)).notes[1]


def test_graphs_that_no_option_asks_for_are_not_emitted() -> None:
    varlen = read("{}", overrides=("speculative.varlen_decode=true",), num_speculative_tokens=2)
    for plan in (
        build_plan(varlen.loaded.config),
        plan_of().model_copy(update={"config": {"dims": {"n": 1}}}),
    ):
        assert with_emission(plan, "vllm").emission is None
    plan = with_emission(plan_of("FULL", [4]), "trtllm")
    assert plan.emission == emit(plan, "trtllm")
    assert Plan.from_json(plan.model_dump_json()) == plan


def test_json_has_the_sizes_by_lane() -> None:
    plan = plan_with([key(FULL, 4, uniform=True), key(PIECEWISE, 64, case=3)], max_loras=2)
    assert json.loads(sizes_by_lane(plan)) == {
        "query_len": 1,
        "lanes": [
            {"mode": "PIECEWISE", "uniform": False, "num_active_loras": 3, "sizes": [64]},
            {"mode": "FULL", "uniform": True, "num_active_loras": 0, "sizes": [4]},
        ],
    }


def test_json_of_a_priced_plan_has_the_memory_of_its_graphs() -> None:
    """Without static buffers, of which an engine has its own."""
    cost = KeyCost(pool_bytes=300, driver_bytes=20, seconds=1.0)
    predicted = Predicted(
        keys=(cost,), static_bytes=5000, workspace_bytes=7, source="x", estimated=False
    )
    plan = plan_with([key(FULL, 4)], predicted=predicted)
    assert json.loads(sizes_by_lane(plan))["cuda_graph_reserved_bytes"] == 327


# --- names of options ------------------------------------------------------------------------------------------

RECORDED: dict[str, set[str]] = {}
for part in json.loads((DATA / "engine_options.json").read_text()):
    RECORDED.setdefault(part["engine"], set()).update(part["names"])


@settings(max_examples=20, deadline=None)
@given(plan=plans_with_lanes())
def test_emitted_names_are_those_of_the_engines(plan: Plan) -> None:
    for engine in ("vllm", "sglang", "trtllm"):
        emission = emit(plan, engine, EngineOptions(4))
        text, notes = emission.block, emission.notes
        of_engine = re.sub("`[^`]*`", "", " ".join((text, *notes)))  # cgplan's are quoted
        names = set(re.findall(r"--[a-z][a-z-]*", of_engine))
        if engine == "vllm":
            names |= set(vllm_json(plan))
        elif engine == "trtllm":
            names |= set(re.findall(r"(\w+): ", text)) | set(
                re.findall(r"[a-z]+_[a-z_]+", " ".join(notes))
            )
        assert names <= RECORDED[engine]


def test_the_options_that_are_read_are_sglangs() -> None:
    read_from = re.findall(r'"(--[a-z-]+)"', inspect.getsource(read_sglang))
    short = {"--tp", "--dp"}  # unique beginnings
    assert set(read_from) - short <= RECORDED["sglang"]


def test_the_versions_are_those_that_names_were_recorded_of() -> None:
    versions = {"vLLM": "vllm", "SGLang": "sglang", "TensorRT-LLM": "trtllm"}
    parts = json.loads((DATA / "engine_options.json").read_text())
    for engine, recorded in versions.items():
        found = {part["version"] for part in parts if part["engine"] == recorded}
        assert found - {"before 0.33"} == {VERSIONS[engine]}


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        (
            "accepted_token=2",
            "--set unknown key 'speculative.accepted_token' (did you mean 'accepted_tokens'?)",
        ),
        ("accepted_tokens=9", "--set speculative: accepted_tokens is 9, but with 3 draft tokens"),
    ],
)
def test_a_setting_is_blamed_not_the_options_of_its_section(setting: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read("{}", num_speculative_tokens=3, overrides=[f"speculative.{setting}"])
    assert str(caught.value).startswith(told)


def test_a_largest_size_is_in_the_command_that_plans_again() -> None:
    plan = build_plan(read('{"max_cudagraph_capture_size": 4}').loaded.config)
    command = emit(plan, "vllm").command
    assert """--vllm '{"max_cudagraph_capture_size": 4}'""" in command
    pasted = build_plan(read(json.dumps(vllm_json(plan))).loaded.config)
    assert "max_cudagraph" not in emit(pasted, "vllm").command, "it repeats the largest of a list"


def test_options_of_the_ladder_are_in_the_command_that_plans_again() -> None:
    found = read("{}", performance_mode="interactivity", blackwell=True)
    command = emit(build_plan(found.loaded.config), "vllm", found.options).command
    assert command.endswith(
        "--max-num-batched-tokens 64 --performance-mode interactivity --blackwell"
    )


def test_a_largest_size_bounds_the_ladder_of_each_size_and_what_is_planned_for_it() -> None:
    """As in vllm/config/vllm.py of 0.33.0: each size up to min(maximum, 32), then the ladder to the maximum."""
    for blackwell in (False, True):
        found = read(
            '{"max_cudagraph_capture_size": 42}',
            performance_mode="interactivity",
            blackwell=blackwell,
        )
        plan = build_plan(found.loaded.config)
        assert plan.capture_sizes == (*range(1, 33), 40)
        assert plan.largest_allowed == 42
        assert (
            "max_cudagraph_capture_size 42 is truncated to 40: the ladder ends at 40" in found.lost
        )
        command = emit(plan, "vllm", found.options).command
        assert """--vllm '{"max_cudagraph_capture_size": 42}'""" in command


def test_keys_of_the_compilation_config_are_vllms() -> None:
    known = {*engines._TAKEN_OVER, *engines._WITHOUT_EFFECT, *engines._OTHER_GRAPHS, "mode"}
    assert known <= RECORDED["vllm"]
    fields = next(part["names"] for part in json.loads((DATA / "engine_options.json").read_text()))
    for name in fields:
        assert read(json.dumps({name: None})).loaded.config


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
        (0, 5),
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
    assert (
        any("vLLM has PIECEWISE graphs with mode 3 only" in note for note in found.notes) == lowered
    )


@pytest.mark.parametrize(
    ("options", "rules", "words"),
    [
        ({}, "vllm_v2", "model runner V2, vLLM's default"),
        ({"runner": "v1"}, "vllm_v1", "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"speculative_method": "suffix"}, "vllm_v1", "V2 has no speculative method suffix"),
        ({"speculative_method": "eagle"}, "vllm_v2", "model runner V2"),
    ],
)
def test_the_model_runner_and_why(options: dict[str, Any], rules: str, words: str) -> None:
    found = read("{}", num_speculative_tokens=3, **options)
    assert build_plan(found.loaded.config).key_rules == rules
    assert words in found.notes[0]


def test_a_runner_without_the_speculative_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="V2 has no speculative method suffix"):
        read("{}", runner="v2", num_speculative_tokens=3, speculative_method="suffix")


def test_a_key_that_the_model_runner_ignores_is_told() -> None:
    told = "model runner V2 ignores cudagraph_specialize_lora; V1 does not: --runner v1"
    one = '{"cudagraph_specialize_lora": false}'
    assert told in read(one, max_loras=4).notes
    assert told not in read(one, max_loras=4, runner="v1").notes
    assert told not in read("{}", max_loras=4).notes


def test_specialized_adapters_without_their_number_are_told() -> None:
    told = "--specialize-active-lora: no adapter is counted without --max-loras"
    for most in (None, 4):
        found = read("{}", specialize_active_lora=True, max_loras=most)
        assert (told in found.notes) is (most is None)
        assert (found.loaded.config.lora is None) is (most is None)
    assert told not in read("{}").notes


def test_graphs_of_a_draft_model_are_those_of_eagle_and_mtp() -> None:
    for method, has_drafts in (
        ("eagle", True),
        ("eagle3", True),
        ("mtp", True),
        ("ngram", False),
        ("draft_model", False),
    ):
        options = {"num_speculative_tokens": 3, "speculative_method": method}
        assert bool(build_plan(read("{}", **options).loaded.config).draft_keys) == has_drafts
    with pytest.raises(ConfigError, match="method eagle: the number of drafts is missing"):
        read("{}", speculative_method="eagle")
    unknown = read("{}", num_speculative_tokens=3)
    assert any("graphs of a draft model" in note for note in unknown.notes)


def test_keys_without_effect_and_absent_bounds_are_noted() -> None:
    notes = read_vllm('{"backend": "inductor", "pass_config": {"fuse_norm_quant": true}}').notes
    assert notes[1:3] == (
        "backend does not change what is captured",
        "pass_config does not change what is captured",
    )
    assert "--max-num-seqs was not given: 256 was taken" in notes[3]
    assert "--max-num-batched-tokens was not given: 8192 was taken" in notes[4]
    notes = read_vllm('{"pass_config": {"enable_sp": true}}').notes
    assert "with enable_sp vLLM drops sizes" in notes[1]


def test_keys_that_no_plan_decides_are_emitted_as_they_were_given() -> None:
    given = {"custom_ops": ["+rms_norm"], "cudagraph_num_of_warmups": 2, "mode": 3}
    asked = {**given, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [4, 8]}
    found = read(json.dumps(asked))
    plan = build_plan(found.loaded.config)
    _, text = shlex.split(emit(plan, "vllm", found.options).options)
    assert json.loads(text) == {**asked, "max_cudagraph_capture_size": 8}
    unlike = read('{"cudagraph_specialize_lora": false}', max_loras=4)
    _, text = shlex.split(
        emit(build_plan(read("{}").loaded.config), "vllm", unlike.options).options
    )
    assert "cudagraph_specialize_lora" not in text


@pytest.mark.parametrize(
    ("sizes", "common"), [([1, 2, 4], 1), ([4, 8, 518], 2), ([4, 8], 4), ([8, 24], 8)]
)
@pytest.mark.parametrize("is_on", [True, False])
def test_sizes_that_sequence_parallelism_may_drop_are_told(
    sizes: list[int], common: int, is_on: bool
) -> None:
    given = {"pass_config": {"enable_sp": is_on}, "cudagraph_capture_sizes": sizes}
    found = read(json.dumps(given), max_num_batched_tokens=1024)
    notes = emit(build_plan(found.loaded.config), "vllm", found.options).notes
    assert len(notes) == (is_on and common < 8)
    if notes:
        assert (
            f"these are multiples of {common}. For multiples of 8 (any multiple of that size "
            in notes[0]
        )
        *_, text, option, bound = shlex.split(notes[0].split("`")[1])[:6]
        again = json.loads(text)
        assert all(size % 8 == 0 for size in again["cudagraph_capture_sizes"])
        assert again["pass_config"] == given["pass_config"]
        assert (option, bound) == (
            "--max-num-seqs",
            str(found.loaded.config.scheduler.max_num_seqs),
        )


def test_the_command_of_sizes_for_sequence_parallelism_has_the_adapters_and_drafts() -> None:
    given = {"pass_config": {"enable_sp": True}, "cudagraph_capture_sizes": [4, 12]}
    options: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
    options |= {"max_loras": 4, "num_speculative_tokens": 3, "speculative_method": "eagle"}
    accepted = "speculative.accepted_tokens=2.5"
    found = read(json.dumps(given), **options, overrides=[accepted])
    files = found.options._replace(again=" --costs start.log", rounded=" --output 'my plan.json'")
    emission = emit(build_plan(found.loaded.config), "vllm", files)
    assert emission.command.endswith(" --costs start.log")
    command, files_told = emission.notes[0].split("`")[1].split(" --output ")
    assert files_told == "'my plan.json'"
    assert command.endswith(
        " --max-num-seqs 64 --max-num-batched-tokens 512 --enable-lora --max-loras 4 "
        f"--num-speculative-tokens 3 --speculative-method eagle --set {accepted}"
    )
    again = json.loads(shlex.split(command)[3])
    mode = {"cudagraph_mode": "FULL_AND_PIECEWISE"}
    assert again == {**given, "cudagraph_capture_sizes": [8, 16], **mode}
    given["cudagraph_specialize_lora"] = False
    old = read(json.dumps(given), **(options | {"speculative_method": "suffix"}))
    notes = emit(build_plan(old.loaded.config), "vllm", old.options).notes
    assert "--runner v1 --num-speculative-tokens 3`" in notes[0]
    assert '"cudagraph_specialize_lora": false' in notes[0]


@pytest.mark.parametrize(
    ("text", "options", "sizes"),
    [
        ("{}", {"performance_mode": "interactivity"}, (*range(1, 33), *range(40, 65, 8))),
        ("{}", {"performance_mode": "throughput"}, (1, 2, 4, *range(8, 65, 8))),
        (
            '{"max_cudagraph_capture_size": 5}',
            {"performance_mode": "interactivity"},
            (1, 2, 3, 4, 5),
        ),
        ("{}", {"max_num_seqs": 600}, (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))),
        (
            "{}",
            {"max_num_seqs": 600, "blackwell": True},
            (1, 2, 4, *range(8, 256, 8), *range(256, 1025, 16), 600),
        ),
        (
            '{"cudagraph_capture_sizes": [3]}',
            {"performance_mode": "interactivity", "blackwell": True},
            (3,),
        ),
        ("{}", {"overrides": ["compilation.cudagraph_capture_sizes=[2]"], "blackwell": True}, (2,)),
    ],
)
def test_the_ladder_depends_on_the_performance_mode_and_the_gpu(
    text: str, options: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    """As vllm/config/vllm.py of 0.33.0 has it; data centre Blackwell is compute capability 10.x."""
    found = read(text, **{"max_num_seqs": 32, "max_num_batched_tokens": 8192, **options})
    assert build_plan(found.loaded.config).capture_sizes == tuple(sorted(sizes))
    told = any("--blackwell" in note for note in found.notes)
    assert told == (options == {"max_num_seqs": 600})


@pytest.mark.parametrize(
    ("text", "options", "lost"),
    [
        # vLLM pull 37865: 42 tokens were asked for, and the 6th request ran eagerly
        ({"max_cudagraph_capture_size": 42}, {"max_num_seqs": 6, "num_speculative_tokens": 6, "runner": "v1"},
         ["max_cudagraph_capture_size 42 is truncated to 35: the ladder ends at 40, and the last multiple of 7 tokens, a request's"]),
        ({"cudagraph_capture_sizes": [7, 42]}, {"max_num_seqs": 6, "num_speculative_tokens": 6}, []),
        ({"max_cudagraph_capture_size": 100}, {}, ["size 100 is truncated to 64: max_num_batched_tokens is 64"]),
        ({"cudagraph_capture_sizes": [4, 20], "cudagraph_mode": "FULL_DECODE_ONLY"}, {},
         ["capture sizes 20 have no graph: a decode batch has at most 8 requests"]),
        ({"cudagraph_capture_sizes": [4, 16, 70]}, {"num_speculative_tokens": 2, "runner": "v1"},
         ["capture sizes 16 are dropped: as multiples of 3 tokens", "capture sizes 70 are dropped: max_num_batched_tokens is 64; raise it to 70, or list at most 64"]),
        # V2 captures it for mixed batches
        ({"max_cudagraph_capture_size": 42}, {"max_num_seqs": 6, "num_speculative_tokens": 6},
         ["size 42 is truncated to 40: the ladder ends at 40"]),
        ({"cudagraph_capture_sizes": [4, 16, 70]}, {"num_speculative_tokens": 2},
         ["capture sizes 16 have no decode graph: as multiples of 3", "capture sizes 70 are dropped: max_num_batched_tokens is 64; raise it to 70, or list at most 64"]),
        ({}, {"max_num_seqs": 2048}, []),
        ({"max_cudagraph_capture_size": 42, "cudagraph_mode": "NONE"}, {}, []),
    ],
)  # fmt: skip
def test_sizes_that_vllm_does_not_capture_are_named(
    text: dict[str, Any], options: dict[str, Any], lost: list[str]
) -> None:
    found = read(json.dumps(text), **options).lost
    assert all(words in line for line, words in zip(found, lost, strict=True))


def test_batches_are_described_by_their_graphs() -> None:
    plan = build_plan(read("{}", max_num_seqs=24, num_speculative_tokens=1).loaded.config)
    assert [*describe_batches(plan)] == [
        "decode batches, by requests of 2 tokens: 1 to 24 in FULL graphs",
        "mixed batches, by tokens: 1 to 64 in PIECEWISE graphs",
    ]
    drafts = {"num_speculative_tokens": 3, "speculative_method": "eagle3"}
    for sizes, told in {
        "[4, 12, 16]": ["draft model, decode: 5 to 8 requests run eagerly without size 8"],
        "[12, 16]": ["draft model, decode: 1 to 8 requests run eagerly without size 8"],
        "[4, 8, 16]": [],
    }.items():
        plan = build_plan(
            read(f'{{"cudagraph_capture_sizes": {sizes}}}', max_num_seqs=8, **drafts).loaded.config
        )
        assert [*describe_batches(plan)][2:] == told
        assert [*lint_without_traffic(plan)][: len(told)] == told
    plan = build_plan(
        read('{"cudagraph_capture_sizes": [2], "cudagraph_mode": "FULL_DECODE_ONLY"}').loaded.config
    )
    assert [*describe_batches(plan)] == [
        "decode batches, by requests of 1 token: 1 to 2 in FULL graphs, 3 to 8 eagerly",
        "mixed batches, by tokens: 1 to 64 eagerly",
    ]


def test_graphs_of_encoders_and_of_decoder_replay_are_known() -> None:
    notes = read('{"cudagraph_decoder_replay": false, "decoder_replay_trim_threshold": 300}').notes
    assert notes[1].startswith(
        "cudagraph_decoder_replay and decoder_replay_trim_threshold: graphs of encoders and"
    )


def test_no_size_that_is_left_is_a_plan_error() -> None:
    with pytest.raises(PlanError, match="no capture size is left"):
        read('{"cudagraph_capture_sizes": [100]}')


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["--vllm '{' is not JSON", "--compilation-config"]),
        ("3", ["--vllm '3' is not a JSON object", "'{}' shows vLLM's defaults"]),
        (
            '{"cudagraph_mod": "FULL"}',
            ["no key 'cudagraph_mod' (did you mean 'cudagraph_mode'?)", "Correct or remove"],
        ),
        (
            '{"cudagraph_mode": "FUL"}',
            [
                "--vllm: vLLM has no cudagraph_mode FUL",
                "Did you mean 'FULL'?",
                "FULL_AND_PIECEWISE.",
            ],
        ),
        (
            '{"cudagraph_capture_sizes": [0]}',
            ["cudagraph_capture_sizes.0: found 0, expected greater than"],
        ),
        (
            '{"cudagraph_capture_sizes": "sglang"}',
            ["--vllm: found cudagraph_capture_sizes 'sglang'", "a list of numbers"],
        ),
        (
            '{"cudagraph_capture_sizes": [4], "max_cudagraph_capture_size": 8}',
            ["remove one of the two"],
        ),
        ('{"mode": 7}', ["found mode 7", "3 (VLLM_COMPILE)"]),
        ('{"mode": [3]}', ["found mode [3]"]),
        (
            '{"mode": 0, "cudagraph_mode": 3}',
            ["--vllm: compilation.cudagraph_mode", "NONE, PIECEWISE, FULL"],
        ),
        ('{"cudagraph_mode": [2, 0]}', ["compilation.cudagraph_mode"]),
    ],
)
def test_what_vllm_would_not_take_is_refused(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.remedy
