"""What vLLM's log of a start says of its graphs, their costs and steps."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cgplan.config import Config
from cgplan.errors import BudgetError, ReportError, StepTimeError
from cgplan.modes import RUNTIME_MODES, AttentionSupport, CUDAGraphMode
from cgplan.planning import build_plan
from cgplan.planning.engines import VERSIONS, emit, read_vllm
from cgplan.planning.plan import ladder_sizes
from cgplan.planning.vllm_log import StartLog, logged_steps, lowered, without_graphs
from cgplan.pricing import GraphCosts

NONE, PIECEWISE, FULL = RUNTIME_MODES
BOUND = "INFO Chunked prefill is enabled with max_num_batched_tokens=64\n"
LOG = (Path(__file__).parents[1] / "data" / "vllm_start.log").read_text()
GIB, MIB = 1 << 30, 1 << 20


def config_of(text: str = "{}", seqs: int = 8) -> Config:
    return read_vllm(text, max_num_seqs=seqs, max_num_batched_tokens=64).loaded.config


def started(text: str) -> StartLog:
    log = StartLog.parse(text)
    assert log is not None
    return log


PLAN = build_plan(config_of())


def costs_of(text: str, config: Config) -> GraphCosts:
    return GraphCosts.from_vllm_log(started(text), config, "start.log")


def test_the_figures_of_a_start() -> None:
    log = started(LOG)
    assert (log.seconds, log.bytes, log.reserved) == (3, GIB // 2, 3 * GIB // 4)
    assert log.graphs == {PIECEWISE: (5, 16), FULL: (4, 8)}
    assert StartLog.parse("vLLM API server version 0.33.0") is None


@pytest.mark.parametrize(
    ("version", "is_other"),
    [("0.33.0", False), ("0.33.1rc1.dev5+g4ba787e", False), ("0.31.2", True), ("1.0.0", True)],
)
def test_another_release_gets_the_rules_of_the_nearest(version: str, is_other: bool) -> None:
    text = LOG.replace("(v0.33.0)", f"(v{version})")
    log = started(text)
    assert log.version == version
    told = f"the log is of vLLM {version}, the rules are of {VERSIONS['vLLM']}, the nearest known"
    assert (f"warning: {told}" in log.said(PLAN)) == is_other
    assert (told in costs_of(text, config_of()).notes) == is_other
    assert [*started(LOG.replace("(v0.33.0) ", "")).doubts(PLAN)] == []


def test_what_the_graphs_leave_to_the_kv_cache() -> None:
    """72 GiB are asked for; 20 are weights, 1.25 activations, 0.5 graphs, and vLLM leaves 150 MiB free."""
    log = started(BOUND + LOG)
    alike, taken, advised = log.said(PLAN)
    assert alike == "as asked for: 9 graphs (5 PIECEWISE, 4 FULL)"
    assert (
        taken == "by the log the graphs took 512 MiB and 3 s, and vLLM kept 768 MiB free for them"
    )
    assert (
        "--kv-cache-memory-bytes 52992933888 to stay within --gpu-memory-utilization 0.9" in advised
    )
    (said,) = log.kv_cache(PLAN, log.bytes, None, None)
    room = int(re.findall(r"\d{9,}", said)[0])
    exact = (72 - 20 - 1.25 - 0.5) * GIB - 150 * MIB
    assert exact - GIB // 100 <= room <= exact
    assert " tokens)" not in said


@pytest.mark.parametrize(
    ("graphs", "share", "gpu", "more"),
    [
        (GIB // 2, 0.9, 80, 0),
        (GIB // 4, None, None, 1 / 4),
        (GIB // 2, 0.8, None, -8),
        (GIB // 2, None, 40, -36),
        (GIB, 0.5, 140, -2 - 1 / 2),
    ],
)
def test_the_kv_cache_of_other_graphs_shares_and_gpus(
    graphs: int, share: float | None, gpu: float | None, more: float
) -> None:
    """In GiB beside the start of the log, whose token takes 1 MiB."""
    log = replace(started(BOUND + LOG), kv_token_bytes=MIB)
    (own,) = log.kv_cache(PLAN, log.bytes, None, None)
    (said,) = log.kv_cache(PLAN, graphs, share, gpu)
    room, before = (int(re.findall(r"\d{9,}|\d+(?= \()", text)[0]) for text in (said, own))
    assert room == pytest.approx(before + more * GIB, abs=1)
    found = re.search(r"GiB on each GPU, ([\d,]+) tokens", said)
    assert found
    assert int(found[1].replace(",", "")) == round(room / MIB)
    assert f"{gpu or 80:g} GiB of the GPU x --gpu-memory-utilization {share or 0.9:g}" in said
    with pytest.raises(BudgetError, match=r"no KV cache fits: 14\.\d\d GiB are missing"):
        next(log.kv_cache(PLAN, GIB, 0.1, None))


@pytest.mark.parametrize(
    ("graphs", "change"), [(GIB, "0.40 GiB less"), (GIB // 2, "0.10 GiB more")]
)
def test_a_kv_cache_is_compared_with_todays(graphs: int, change: str) -> None:
    """vLLM kept 0.75 GiB free, and advises to leave 150 MiB."""
    (told,) = started(BOUND + LOG).kv_cache(PLAN, graphs, None, None)
    assert f" GiB on each GPU, {change} than in the log): " in told
    (other,) = started(BOUND + LOG).kv_cache(PLAN, graphs, 0.8, None)
    assert "than in the log" not in other


def test_a_log_without_its_bound_on_tokens_has_no_kv_cache() -> None:
    (told,) = started(LOG).kv_cache(PLAN, 0, 0.9, 80)
    assert told.startswith("no --kv-cache-memory-bytes: the log does not tell its --max-num-batch")


def test_engines_of_one_start_share_its_arguments() -> None:
    """Each engine of several ranks has its first line before the captures of all."""
    given = f"INFO non-default args: {{'enable_lora': True, 'max_loras': 4}}\n{BOUND}"
    engine, _, rest = LOG.partition("\n")
    log = started(f"{given}{engine}\n{engine}\n{rest}")
    assert (log.max_loras, log.max_num_batched_tokens, log.starts) == (4, 64, 1)
    eager = engine.replace("enforce_eager=False", "enforce_eager=True")
    for other in (f"{eager}\n", LOG):
        after = started(f"{given}{other}{LOG}")
        assert (after.max_loras, after.max_num_batched_tokens) == (None, 0)


def test_a_log_without_its_advice_has_no_kv_cache() -> None:
    silent = started("Graph capturing finished in 5 secs, took 0.5 GiB")
    (told,) = silent.kv_cache(PLAN, 0, 0.9, 80)
    assert told.startswith("the log has no line `Free memory on device`, as with ")


@pytest.mark.parametrize(
    "method", ["None", "SpeculativeConfig(method='eagle3', model='d', num_spec_tokens=3)"]
)
def test_costs_of_a_start_with_drafts_say_so(method: str) -> None:
    text = LOG.replace("model='m'", f"model='m', speculative_config={method}")
    notes = costs_of(text, config_of()).notes
    said = "start.log is of a start with drafts: each graph has its share of theirs"
    assert (said in notes) == (method != "None")


def test_of_several_starts_the_last_counts_and_of_several_ranks_the_worst() -> None:
    again = (
        LOG.replace("in 3 secs, took 0.50", "in 7 secs, took 0.25")
        + "Graph capturing finished in 2 secs, took 0.30 GiB"
    )
    both = started(LOG + again)
    assert (both.seconds, both.bytes) == (7, round(0.3 * GIB))
    assert "warning: the log has 2 starts with graphs; the last is read" in both.said(PLAN)
    assert not any("starts with graphs" in doubt for doubt in started(LOG).doubts(PLAN))


def test_a_log_without_a_profile_counts_graphs_by_its_progress_bars() -> None:
    """Model Runner V2 logs no line on its profile, and bars with the mode alone; those of the profile come first."""
    bars = "Capturing CUDA graphs (FULL): 100%|##| 2/2 [00:01<\rCapturing CUDA graphs (FULL):  10%|# | 1/35 [00:00<"
    log = started(f"{bars}\nGraph capturing finished in 5 secs, took 0.51 GiB")
    doubt, said = log.said(PLAN, ["others"])
    assert (log.graphs, log.reserved) == ({FULL: (35, 0)}, 0)
    assert said == "by the log the graphs took 522 MiB and 5 s"
    told = "the log does not name its capture sizes, which may be others"
    assert doubt.startswith(f"warning: {told}")
    assert "nor what was kept free for graphs, which the KV cache may have" in doubt
    notes = costs_of(
        f"{bars}\nGraph capturing finished in 5 secs, took 0.51 GiB", config_of()
    ).notes
    assert any(note.startswith(told) for note in notes)


def test_the_pool_is_that_of_the_sizes_that_the_log_names() -> None:
    """Without a line on their profile, which tells the largest of each mode."""
    bars = "".join(line for line in LOG.splitlines(keepends=True) if "Profiling CUDA" not in line)
    without = bars.replace("Capturing CUDA graphs", "-")
    assert started(without).graphs == {}
    for text in (bars, without):
        assert max(started(text).sizes) == 16
        pool = [costs_of(text, config_of(seqs=seqs)).pool_bytes(PIECEWISE, 4) for seqs in (2, 8)]
        assert pool[0] == pytest.approx(pool[1], rel=0.02)
        assert pool[1] == pytest.approx(503 / 4 * MIB, rel=0.02)


@pytest.mark.parametrize("graphs", [{"FULL": 4}, {"FULL": 8}, {}], ids=["bars", "LoRA", "no bars"])
def test_decode_graphs_alone_end_at_the_requests_though_the_log_names_larger_sizes(
    graphs: dict[str, int],
) -> None:
    """All their memory is a pool of 8 tokens, not of the 16 that the start named."""
    log = logged("FULL_DECODE_ONLY", [16, 8, 4, 2, 1], graphs)
    lora = 2 if graphs == {"FULL": 8} else None
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_loras": lora}
    config = read_vllm('{"cudagraph_mode": "FULL_DECODE_ONLY"}', **options).loaded.config  # type: ignore[arg-type]
    keys = build_plan(config).keys
    predicted = GraphCosts.from_vllm_log(log, config, "start.log").of(keys)
    assert predicted.total_bytes == pytest.approx(log.bytes, rel=0.01)
    assert predicted.seconds == pytest.approx(log.seconds)
    assert not predicted.extrapolated


def test_a_start_without_graphs_after_one_with_them_is_passed_over() -> None:
    eager = LOG.partition("\n")[0].replace("FULL_AND_PIECEWISE: (2, 1)", "NONE: 0")
    assert started(LOG + eager.replace("[1, 2, 4, 8, 16]", "[]")) == started(LOG)


@pytest.mark.parametrize("text", [LOG, LOG.partition("\n")[2]], ids=["whole", "cut"])
def test_costs_add_up_to_those_of_the_start(text: str) -> None:
    config = config_of()
    costs = costs_of(text, config)
    plan = build_plan(config)
    assert len(plan.keys) == 9
    whole = costs.of(plan.keys)
    assert whole.estimated
    assert whole.seconds == pytest.approx(3)
    assert whole.total_bytes == pytest.approx(GIB // 2, abs=64)
    assert "has the costs of 9 graphs together, 512 MiB and 3 s" in whole.notes[-1]
    fewer = costs.of([key for key in plan.keys if key[1].num_tokens in (1, 8)])
    assert fewer.seconds == pytest.approx(4 / 9 * 3)
    assert fewer.total_bytes < whole.total_bytes


def test_graphs_of_a_log_take_one_mebibyte_each_and_share_one_pool() -> None:
    costs = costs_of(LOG, config_of())
    assert {costs.driver_bytes(key) for key in build_plan(config_of()).keys} == {MIB}
    for mode in (PIECEWISE, FULL):
        pools = [costs.pool_bytes(mode, tokens) for tokens in (16, 4)]
        assert pools == pytest.approx([503 * MIB, 503 * MIB / 4], rel=1e-6)


def test_a_start_of_other_graphs_is_noted_and_one_without_graphs_refused() -> None:
    notes = costs_of(LOG, config_of(seqs=16)).notes
    assert any(
        "is of a start with 9 graphs (5 PIECEWISE, not 7; 4 FULL, not 5; without sizes 24, 32), not with "
        in note
        for note in notes
    )
    with pytest.raises(ReportError, match="captured no graph"):
        costs_of(
            "Graph capturing finished in 0 secs, took 0.00 GiB",
            config_of('{"cudagraph_mode": "NONE"}'),
        )


def logged(mode: str, sizes: list[int], graphs: dict[str, int]) -> StartLog:
    bars = [f"Capturing CUDA graphs ({of}): 100%|##| {n}/{n} [" for of, n in graphs.items()]
    named = f"'cudagraph_mode': <CUDAGraphMode.{mode}: 1>, 'cudagraph_capture_sizes': {sizes}"
    return started("\n".join(
        (f"Initializing a V1 LLM engine (v0.33.0) with config: {named}", *bars, "Graph capturing finished in 5 secs, took 0.51 GiB")
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "sizes", "graphs", "told"),
    [
        ("FULL_AND_PIECEWISE", [2, 8, 12], {"PIECEWISE": 3, "FULL": 2}, None),
        ("FULL_AND_PIECEWISE", [2, 8, 12], {}, None),
        (
            "FULL_AND_PIECEWISE",
            [4, 8, 16],
            {"PIECEWISE": 3, "FULL": 2},
            "3 PIECEWISE; 2 FULL; without sizes 2, 12; with sizes 4, 16",
        ),
        (
            "FULL_DECODE_ONLY",
            [2, 8, 12],
            {"FULL": 5},
            "5 FULL, not 2; mode FULL_DECODE_ONLY, not FULL_AND_PIECEWISE; without sizes 12",
        ),
        (
            "FULL_AND_PIECEWISE",
            [2, 8, 12],
            {"PIECEWISE": 5},
            "5 PIECEWISE, not 3; it does not tell its --max-num-seqs",
        ),
        ("FULL_AND_PIECEWISE", [2, 8, 12, 100], {}, "with sizes 100"),
    ],
)
def test_graphs_of_a_start_are_compared_by_size_and_mode(
    mode: str, sizes: list[int], graphs: dict[str, int], told: str | None
) -> None:
    """As many graphs as the plan's five, unless only more bounds allow them; the last but one is lowered by vLLM."""
    plan = build_plan(config_of('{"cudagraph_capture_sizes": [2, 8, 12]}'))
    number = sum(graphs.values())
    others = "" if number == 5 else ", not with 5 graphs"
    said = f"the log is of a start with {number or 'other'} graphs ({told}){others}"
    found = [*logged(mode, sizes, graphs).of_other_options(plan)]
    assert found == ([] if told is None else [said])


def test_a_start_that_failed_says_nothing_of_the_next_one() -> None:
    """Its attention backend allowed fewer modes; each server's log begins with its options."""
    given = "INFO non-default args: {'model': 'm', 'max_num_seqs': 8}\n"
    lowered = (
        "WARNING CUDAGraphMode.FULL_AND_PIECEWISE is not supported with A backend (support: "
        "AttentionCGSupport.NEVER); setting cudagraph_mode=PIECEWISE\n"
    )
    engine = LOG.partition("\n")[0] + "\n"
    failed = f"{given}{engine}{lowered}ERROR torch.OutOfMemoryError\n"
    log = started(failed + given + LOG)
    assert (log.mode, log.support) == (CUDAGraphMode.FULL_AND_PIECEWISE, None)
    log = started(given + lowered + LOG)  # a rank's line may stand before another rank's engine
    assert (log.mode, log.support) == (CUDAGraphMode.PIECEWISE, AttentionSupport.NEVER)


def test_a_start_with_more_requests_is_named_by_its_bound() -> None:
    """Its sizes and mode are those of the plan; the server logs the options that it was given."""
    plan = build_plan(config_of('{"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}'))
    given = "INFO non-default args: {'model': 'm', 'max_num_seqs': 16, 'port': 80}\n"
    text = LOG.replace("FULL=4 (largest=8)", "FULL=5 (largest=16)").replace("4/4", "5/5")
    (said,) = started(given + text).of_other_options(plan)
    assert " 10 graphs (5 PIECEWISE; 5 FULL, not 4; --max-num-seqs 16, not 8), " in said
    (said,) = started(text).of_other_options(plan)
    assert " 10 graphs (5 PIECEWISE; 5 FULL, not 4; it does not tell its --max-num-seqs), " in said
    same = started(given + LOG)
    assert [*same.of_other_options(plan)] == []
    assert [*same.doubts(plan)] == ["the log is of --max-num-seqs 16, not 8"]


@pytest.mark.parametrize(
    ("given", "most", "told"),
    [
        ("'enable_lora': True, 'max_loras': 4", 4, None),
        ("'enable_lora': True, 'max_loras': 8", 4, "--max-loras 8, not 4"),
        ("'enable_lora': True", 1, None),
        ("'max_num_seqs': 8", 4, "--max-loras 0, not 4"),
        ("'enable_lora': True, 'max_loras': 4", None, "--max-loras 4, not 0"),
        ("'max_num_seqs': 8", None, None),
        (None, 4, None),
    ],
)
def test_a_start_with_other_adapters_leaves_another_kv_cache(
    given: str | None, most: int | None, told: str | None
) -> None:
    """Adapters take memory besides graphs; a log without its first line does not tell theirs."""
    plan = build_plan(read_vllm("{}", max_num_seqs=8, max_loras=most).loaded.config)
    text = "" if given is None else f"INFO non-default args: {{'model': 'm', {given}}}\n"
    log = replace(started(text + BOUND + LOG), graphs={}, sizes=())
    assert [*log.other_memory(plan)] == ([told] if told else [])
    (said,) = log.kv_cache(plan, log.bytes, None, None)
    assert said.startswith("no --kv-cache-memory-bytes: ") == (told is not None)
    is_untold = "speculative tokens or --max-loras" in " ".join(log.doubts(plan))
    assert is_untold == (given is None)
    others = " ".join(log.of_other_options(plan))
    assert (f"; {told}" in others or f"({told}" in others) == (told is not None)


@pytest.mark.parametrize("asked", ["", ", 'enable_lora': True, 'max_loras': 4"])
def test_more_graphs_than_sizes_are_of_adapters_that_no_line_tells(asked: str) -> None:
    """10 PIECEWISE graphs of 5 sizes, whose server's line came from another file, maybe."""
    twice = LOG.replace("PIECEWISE=5", "PIECEWISE=10").replace("FULL=4", "FULL=8")
    log = started(f"INFO non-default args: {{'max_num_seqs': 8{asked}}}\n{twice}")
    plan = build_plan(read_vllm("{}", max_num_seqs=8, max_loras=4).loaded.config)
    assert log.max_loras == (4 if asked else None)
    assert [*log.other_memory(plan)] == []
    is_untold = "speculative tokens or --max-loras" in " ".join(log.doubts(plan))
    assert is_untold == (not asked)


def test_other_drafts_leave_another_kv_cache() -> None:
    drafts = {"num_speculative_tokens": 3, "speculative_method": "eagle3"}
    plan = build_plan(read_vllm("{}", max_num_seqs=8, **drafts).loaded.config)  # type: ignore[arg-type]
    log = started(LOG.replace("model='m'", "model='m', speculative_config=None"))
    (said,) = log.kv_cache(plan, log.bytes, None, None)
    assert said.startswith("no --kv-cache-memory-bytes: the log has 0 speculative tokens, not 3; ")
    assert said.endswith("; give no drafts and no adapters, or another log")
    drafted = replace(log, drafts=3, method="eagle3", max_loras=4)
    (said,) = drafted.kv_cache(build_plan(config_of()), log.bytes, None, None)
    assert said.endswith(
        "; give --spec-method eagle3 --spec-tokens 3 and --enable-lora --max-loras 4, or another log"
    )
    alike = next(log.said(plan))
    assert alike.endswith(f"; {len(plan.draft_keys)} of the draft model were not compared")


@pytest.mark.parametrize(
    ("given", "untold"),
    [
        ("", "; it does not tell its --max-num-seqs"),
        ("INFO non-default args: {'max_num_seqs': 8}\n", ""),
    ],
)
def test_what_the_log_tells_is_not_taken_for_the_reason_of_other_graphs(
    given: str, untold: str
) -> None:
    text = LOG.replace("FULL=4 (largest=8)", "FULL=3 (largest=4)").replace("4/4", "3/3")
    (said,) = started(given + text).of_other_options(PLAN)
    assert said == (
        f"the log is of a start with 8 graphs (5 PIECEWISE; 3 FULL, not 4{untold}), not with 9 graphs"
    )


def test_memory_of_larger_graphs_than_the_log_has_is_extrapolated() -> None:
    for seqs, is_told in ((8, False), (32, True)):
        plan = build_plan(read_vllm("{}", max_num_seqs=seqs).loaded.config)
        assert costs_of(LOG, plan.settings).of(plan.keys).extrapolated is is_told


def test_a_plan_with_sizes_for_each_mode_is_not_what_vllm_captures() -> None:
    plan = build_plan(config_of('{"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}'))
    apart = plan.changed(
        keys=tuple(key for key in plan.keys if key[1].num_tokens != 2 or key[1].uniform)
    )
    (said,) = started(LOG).of_other_options(apart)
    assert "5 PIECEWISE, not 4; 4 FULL; vLLM has one list of sizes for all modes: " in said
    assert "plan by --emit vllm" in said


def test_a_log_that_does_not_tell_its_drafts_is_doubted() -> None:
    read = read_vllm("{}", max_num_seqs=8, max_num_batched_tokens=64, num_speculative_tokens=3)
    plan = build_plan(read.loaded.config)
    for config, is_doubted in (("", True), (", speculative_config=None", False)):
        log = started(LOG.replace("model='m'", f"model='m'{config}"))
        told = [said for said in log.doubts(plan) if "speculative tokens" in said]
        assert len(told) == is_doubted
        assert [*log.doubts(PLAN)] == []


@pytest.mark.parametrize("method", ["eagle", "ngram", None])
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("given", ["{}", '{"cudagraph_capture_sizes": [1, 6, 20, 41]}'])
def test_a_start_with_the_options_of_a_plan_has_its_graphs(
    method: Any, runner: Any, given: str
) -> None:
    """vLLM logs its sizes before it rounds them to whole requests of four tokens."""
    read = read_vllm(
        given,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_speculative_tokens=3,
        speculative_method=method,
        runner=runner,
    )
    plan = build_plan(read.loaded.config)
    options = json.loads(shlex.split(emit(plan, "vllm").options)[1])
    asked = json.loads(given).get(
        "cudagraph_capture_sizes", ladder_sizes(read.loaded.config, "vllm").sizes
    )
    for sizes in (options["cudagraph_capture_sizes"], asked):
        assert [*logged("FULL_AND_PIECEWISE", list(sizes), {}).of_other_options(plan)] == []


@pytest.mark.parametrize(
    ("asked", "logged_config", "told"),
    [
        (("eagle3", 3), "SpeculativeConfig(method='eagle3', model='d', num_spec_tokens=3)", None),
        (("eagle", 3), "SpeculativeConfig(method='eagle3', model='d', num_spec_tokens=3)", None),
        (("eagle3", 3), "SpeculativeConfig(method='eagle', model='d', num_spec_tokens=3)", None),
        (("mtp", 1), "SpeculativeConfig(method='qwen3_next_mtp', model='d', num_spec_tokens=1)", None),
        (("ngram", 3), "SpeculativeConfig(method='ngram_gpu', model=None, num_spec_tokens=3)", None),
        ((None, 3), "SpeculativeConfig(method='medusa', model='d', num_spec_tokens=3)", None),
        (("suffix", 3), "SpeculativeConfig(method='suffix', model=None, num_spec_tokens=3)", None),
        (("eagle3", 3), None, None),
        ((None, 0), "None", None),
        (("eagle3", 3), "None", "0 speculative tokens, not 3"),
        (("eagle3", 3), "SpeculativeConfig(method='eagle3', model='d', num_spec_tokens=1)", "1 speculative token, not 3"),
        ((None, 0), "SpeculativeConfig(method='ngram', model=None, num_spec_tokens=5)", "5 speculative tokens, not 0"),
        (("eagle3", 3), "SpeculativeConfig(method='mtp', model='d', num_spec_tokens=3)", "drafts of mtp, not eagle3"),
        (("draft_model", 3), "SpeculativeConfig(method='eagle3', model='d', num_spec_tokens=3)", "drafts of eagle3, not draft_model"),
    ],
)  # fmt: skip
def test_a_start_with_other_drafts_is_another(
    asked: tuple[Any, int], logged_config: str | None, told: str | None
) -> None:
    """Also where its graphs are those of the plan, by their sizes: eagle3 is eagle with another head."""
    method, number = asked
    read = read_vllm(
        '{"cudagraph_capture_sizes": [4, 8, 16]}',
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_speculative_tokens=number,
        speculative_method=method,
    )
    plan = build_plan(read.loaded.config)
    first, _, rest = LOG.partition("\n")
    first = first.replace("[1, 2, 4, 8, 16]", "[4, 8, 16]")
    if logged_config:
        first = first.replace("model='m'", f"model='m', speculative_config={logged_config}")
    log = replace(started(f"{first}\n{rest}"), graphs={})
    found = [*log.of_other_options(plan)]
    assert len(found) == (told is not None)
    asked = re.compile(rf" graphs \({re.escape(str(told))}\)(, not with {len(plan.keys)} graphs|$)")
    assert all(asked.search(said) for said in found)
    assert all(("of the draft model" in said) == (method == "eagle3") for said in found)


def test_costs_of_a_log_without_drafts_say_that_drafts_are_not_priced() -> None:
    options = {"max_num_seqs": 8, "num_speculative_tokens": 3}
    for method, text, told in (
        ("eagle", LOG, True),
        ("ngram", LOG, False),
        ("eagle", LOG.replace("model='m'", "model='m', speculative_config=SpeculativeConfig(method='eagle', model='d', num_spec_tokens=3)"), False),
    ):  # fmt: skip
        config = read_vllm("{}", speculative_method=method, **options).loaded.config  # type: ignore[arg-type]
        assert ("(no graph of the draft model)" in costs_of(text, config).source) == told


def test_a_start_with_another_bound_on_tokens_names_both() -> None:
    """By what its server logged before its engine; an eager start follows in the same file."""
    bound = "INFO [scheduler.py:231] Chunked prefill is enabled with max_num_batched_tokens="
    told = "the log is of --max-num-batched-tokens 8192, not 64"
    for own in (64, 8192):
        text = f"{bound}{own}.\n{LOG}\n{bound}32.\nInitializing a V1 LLM engine (v0.33.0)\n"
        assert (f"warning: {told}" in started(text).said(PLAN)) == (own == 8192)
        assert (told in costs_of(text, config_of()).notes) == (own == 8192)


def test_without_its_first_line_the_sizes_are_those_of_the_tables() -> None:
    table = "".join(
        f"INFO [cuda_graph.py:117] {line}\n"
        for line in ("", "- Mode: FULL", "- Capture sizes: [1, 2, 16]")
    )
    log = started(LOG.partition("\n")[2] + table)
    assert (log.mode, log.sizes) == (FULL, (1, 2, 16))
    assert started(LOG + table).sizes == (1, 2, 4, 8, 16)


def test_steps_run_in_the_graphs_of_the_start_before_them() -> None:
    found = [*logged_steps(LOG)]
    assert found == [
        (PIECEWISE, 16, 9000, True),
        (FULL, 4, 2000, False),
        (FULL, 4, 2200, False),
        (FULL, 4, 90000, False),
        (NONE, 62, 20000, True),
    ]
    assert next(logged_steps(LOG.replace("FULL_AND_PIECEWISE: (2, 1)", "NONE: 0"))) == (
        NONE,
        12,
        9000,
        True,
    )
    assert [*logged_steps(LOG.partition("\n")[2])] == []


def iteration(rank: int, number: int, prompts: int, decoded: int, milliseconds: float) -> str:
    return (
        f"INFO [loggers.py:199] Engine {rank:03d}: Iteration({number}): {int(prompts > 0)} context requests, {prompts} "
        f"context tokens, {decoded} generation requests, {decoded} generation tokens, iteration elapsed time: "
        f"{milliseconds:.2f} ms, GPU KV cache usage: 0.1%\n"
    )


def test_ranks_that_run_together_have_the_steps_of_the_largest_in_the_weakest_mode() -> None:
    """The eager start counts its iterations anew; a rank without requests logs a dummy, which is no step."""
    start = LOG.splitlines()[0] + "\n"
    eager = start.replace("FULL_AND_PIECEWISE: (2, 1)", "NONE: 0")
    lines = [
        *(start, start),
        iteration(0, 0, 0, 2, 9.0),
        *(iteration(0, 1, 0, 2, 2.0), iteration(1, 1, 0, 7, 2.1)),
        iteration(1, 0, 12, 0, 9.5),
        *(iteration(1, 2, 0, 3, 2.0), iteration(0, 2, 1, 2, 2.0).replace(" ms,", " ms (dummy),")),
        *(eager, eager, iteration(0, 1, 0, 3, 20.0), iteration(1, 1, 0, 5, 20.0)),
    ]
    text = "".join(lines)
    assert [*logged_steps(text, in_step=True)] == [
        (PIECEWISE, 16, 9500, True),
        (FULL, 8, 2100, False),
        (FULL, 4, 2000, False),
        (NONE, 5, 20000, False),
    ]
    assert len([*logged_steps(text)]) == 7, "each engine is its own server"


def test_iterations_of_ranks_that_do_not_align_in_time_are_refused() -> None:
    start = LOG.splitlines()[0] + "\n"
    text = start + "".join(
        iteration(rank, number, 0, 4, 9.0 if (number + rank) % 5 == 0 else 2.0)
        for number in range(20)
        for rank in (0, 1)
    )
    assert len([*logged_steps(text)]) == 40
    with pytest.raises(StepTimeError, match="by number, 8 took unlike times"):
        [*logged_steps(text, in_step=True)]
    alone = LOG.replace("model='m',", "model='m', data_parallel_size=2,")
    with pytest.raises(StepTimeError, match="no iteration of the log is of several"):
        [*logged_steps(alone, in_step=True)]
    assert [*logged_steps(LOG, in_step=True)] == [*logged_steps(LOG)], "a server of one rank"


def test_steps_of_two_models_in_one_file_are_refused() -> None:
    """A start without steps, or whose line does not name its model, contradicts nothing."""
    first, other = LOG.replace("model='m'", "model='a/m'"), LOG.replace("model='m'", "model='b/n'")
    unnamed = LOG.replace("model='m', ", "")
    start = other.partition("(APIServer")[0]
    alike = [*logged_steps(first + first)]
    for text in (start + first + first, first + unnamed, unnamed + first):
        assert [*logged_steps(text)] == alike
    with pytest.raises(StepTimeError, match="the log has steps of a/m and of b/n"):
        [*logged_steps(first + other)]


def test_a_start_of_another_model_than_that_of_the_costs_is_told() -> None:
    predicted = costs_of(LOG, config_of()).of(PLAN.keys)
    plan = PLAN.changed(predicted=predicted)
    told = "warning: the log is of b/n, the plan's costs of m"
    for text, is_other in ((LOG, False), (LOG.replace("model='m'", "model='b/n'"), True)):
        assert (told in started(text).said(plan)) is is_other
        assert told not in started(text).said(PLAN)
    assert told not in started(LOG.replace("model='m', ", "")).said(plan)


def test_the_api_server_names_the_release_too() -> None:
    text = (Path(__file__).parents[1] / "data" / "vllm.log").read_text()
    said = next(started(text).doubts(PLAN))
    assert said.startswith("the log is of vLLM 0.13.0")


LOWERED = (
    "WARNING 11-20 14:03:19 [compilation.py:1416] CUDAGraphMode.FULL_AND_PIECEWISE is not supported with {} "
    "(support: AttentionCGSupport.{}); setting cudagraph_mode={}\n"
)


@pytest.mark.parametrize(
    ("of", "support", "because"),
    [
        ("FlexBackend backend", "NEVER", " because attention is compiled piecewise"),
        (
            "spec-decode for attention backend FlashInferBackend",
            "UNIFORM_SINGLE_TOKEN_DECODE",
            "",
        ),
    ],
)
def test_a_start_whose_mode_vllm_lowered_is_of_that_attention(
    of: str, support: str, because: str
) -> None:
    """Its graphs are those of the configuration then; what was given wins over the log."""
    drafts = 3 * bool(not because)
    first, _, rest = LOG.partition("\n")
    text = f"{first}\n{LOWERED.format(of, support, f'PIECEWISE{because}')}{rest}"
    log = started(re.sub(r"Capturing CUDA graphs \(decode.*\n|, FULL=4 \(largest=8\)", "", text))
    assert log.mode is PIECEWISE
    options: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    if drafts:
        options |= {"num_speculative_tokens": drafts, "speculative_method": "ngram"}
    read = read_vllm('{"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}', **options)
    plan = build_plan(lowered(read.loaded, log).config)
    assert plan.mode is PIECEWISE
    assert plan.changes[-1].reason.startswith(f"attention_support is {support}")
    assert [*replace(log, drafts=drafts, method="ngram").of_other_options(plan)] == []
    told = f"vLLM lowered the mode to PIECEWISE: its attention_support is {support}"
    assert f"warning: {told}" in log.said(plan)
    given = read_vllm("{}", **options, overrides=["compilation.attention_support=UNIFORM_BATCH"])
    assert lowered(given.loaded, log) is given.loaded
    assert lowered(read.loaded, None) is lowered(read.loaded, started(LOG)) is read.loaded


def test_steps_of_a_lowered_mode_are_those_of_its_graphs() -> None:
    first, _, rest = LOG.partition("\n")
    change = LOWERED.format("FlexBackend backend", "NEVER", "PIECEWISE")
    assert {step[0] for step in logged_steps(LOG)} == {NONE, PIECEWISE, FULL}
    assert {step[0] for step in logged_steps(f"{first}\n{change}{rest}")} == {NONE, PIECEWISE}
    assert [*logged_steps(change + rest)] == [], "no start before it"


def test_a_log_whose_mode_was_set_to_none_says_why_it_has_no_graph() -> None:
    change = LOWERED.format("FlexBackend backend", "NEVER", "NONE")
    assert "`setting cudagraph_mode=NONE` in it says" in without_graphs(change)
