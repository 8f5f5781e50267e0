"""Step times: where they come from, what lies between and beyond what was measured, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgplan.errors import StepTimeError
from cgplan.modes import RUNTIME_MODES, CUDAGraphMode
from cgplan.traffic.step_times import (
    FULL_OF_DECODE,
    LORA_OVERHEAD,
    PIECEWISE_SHARE,
    StepSurface,
    StepTimes,
)

NONE, PIECEWISE, FULL = RUNTIME_MODES
POINTS = st.dictionaries(st.integers(1, 300), st.floats(1, 1e6), min_size=1, max_size=8)


def times_of(**modes: dict[int, float]) -> StepTimes:
    return StepTimes.measured(
        {(CUDAGraphMode[name], 0): points for name, points in modes.items()}, "by hand"
    )


def record(
    size: int,
    eager: float,
    mode: str = "NONE",
    graph: float | None = None,
    padded: int = 0,
    loras: int = 0,
) -> Any:
    timing = None if graph is None else {"median": graph, "p99": 2 * graph}
    return {
        "num_tokens": size,
        "mode": mode,
        "descriptor": {
            "num_tokens": size + padded,
            "num_reqs": None,
            "uniform": False,
            "num_active_loras": loras,
        },
        "eager": {"median": eager, "p99": 9e9},
        "graph": timing,
        "replay": None,
    }


def bench(*records: Any) -> dict[str, Any]:
    return {
        "kind": "bench",
        "schema_version": 1,
        "environment": {"device": "NVIDIA H200"},
        "records": list(records),
    }


# --- between and beyond points --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "mode", "times"),
    [
        # linear between points, steps stay steps, the first point's time below it
        (
            {"FULL": {1: 10, 128: 10, 129: 20, 256: 20}},
            FULL,
            {1: 10, 64: 10, 128: 10, 129: 20, 200: 20, 256: 20},
        ),
        ({"FULL": {10: 10, 20: 30}}, FULL, {1: 10, 15: 20}),
        # on with the last slope, 0 after a single point
        ({"FULL": {1: 10, 100: 10, 200: 30}}, FULL, {300: 50}),
        ({"FULL": {4: 10}}, FULL, {400: 10}),
        # a point below an earlier one is raised
        ({"FULL": {1: 10.0, 8: 9.9, 64: 5.0, 65: 12.0}}, FULL, {1: 10, 8: 10, 64: 10, 65: 12}),
        # eager steps beyond their points do the work of a FULL graph
        (
            {"NONE": {1: 100, 10: 100}, "FULL": {1: 10, 10: 100, 20: 200}},
            NONE,
            {1: 100, 10: 100, 15: 150, 40: 400},
        ),
        # unless those points show that it was not measured far enough
        (
            {"NONE": {1: 80, 100: 200, 200: 300}, "FULL": {1: 10, 10: 100}},
            NONE,
            {200: 300, 201: 301, 400: 500},
        ),
        (
            {"NONE": {1: 900}, "PIECEWISE": {1: 80, 100: 200, 200: 300}, "FULL": {1: 10, 10: 100}},
            PIECEWISE,
            {200: 300, 201: 301, 400: 500},
        ),
        ({"NONE": {1: 100, 20: 100}, "FULL": {1: 10, 10: 40}}, NONE, {20: 100, 40: 140}),
        ({"NONE": {1: 100}, "PIECEWISE": {1: 10, 10: 100}}, NONE, {40: 100}),
        # what a graph saves beyond its points shrinks by what eager steps grow, not by PIECEWISE ones
        (
            {"NONE": {1: 100, 10: 100, 20: 200}, "FULL": {1: 10, 10: 40}},
            FULL,
            {10: 40, 11: 60, 13: 100, 16: 160, 20: 200},
        ),
        (
            {"NONE": {1: 100}, "PIECEWISE": {1: 50, 10: 50, 20: 70}, "FULL": {1: 10, 10: 10}},
            FULL,
            {15: 20, 20: 30, 30: 50},
        ),
        ({"NONE": {1: 20, 9: 30}, "PIECEWISE": {1: 25}}, PIECEWISE, {1: 25, 9: 30}),
        # PIECEWISE below its points: between FULL and eager, at most its first point
        ({"NONE": {1: 100}, "FULL": {1: 20}}, PIECEWISE, {1: 20 + PIECEWISE_SHARE * 80}),
        (
            {"NONE": {1: 100}, "FULL": {1: 20}, "PIECEWISE": {300: 30, 400: 60}},
            PIECEWISE,
            {1: 30, 300: 30, 350: 45, 500: 90},
        ),
    ],
)
def test_times_between_and_beyond_points(
    points: Any, mode: CUDAGraphMode, times: dict[int, float]
) -> None:
    found = times_of(**points)
    assert {n: found.of(mode, n) for n in times} == times


@pytest.mark.parametrize(
    ("points", "note"),
    [
        (
            {"NONE": {1: 10}, "FULL": {1: 5, 8: 6}},
            "eager was measured at 1 token only: taken as long for others; measure those, too",
        ),
        (
            {"NONE": {900: 10}, "FULL": {1: 5}},
            "eager below 900 tokens was not measured: taken as long as at 900",
        ),
        ({"FULL": {1: 10.0, 64: 5.0}}, "FULL at 64 tokens took 5.00 us, a smaller batch 10.0 us"),
        ({"NONE": {1: 100}, "FULL": {1: 20}}, "PIECEWISE was not measured"),
    ],
)
def test_assumptions_and_raised_points_are_noted(points: Any, note: str) -> None:
    times = times_of(**points)
    assert any(found.startswith(note) for found in (*times.unsure, *times.notes))


def test_small_changes_and_modes_that_a_plan_lacks_are_not_noted() -> None:
    assert not any("took" in note for note in times_of(FULL={1: 10.0, 8: 9.9}).notes)
    times = times_of(NONE={1: 100, 8: 100}, FULL={1: 20, 8: 20})
    assert times.notes == ()
    (warning,) = times.unsure
    assert "PIECEWISE was not measured" in warning
    assert "send prompts shorter than its largest size, a few at a time" in warning
    assert times.said_for(FULL) == ((), times.notes)
    assert times.said_for(CUDAGraphMode.FULL_AND_PIECEWISE) == (times.unsure, times.notes)


def test_times_of_adapters_take_the_place_of_all_others_with_adapters() -> None:
    points = {(NONE, 0): {8: 90}, (FULL, 0): {8: 20}, (NONE, 3): {8: 99}, (FULL, 3): {8: 40}}
    loras = times_of(NONE={8: 200}, FULL={8: 60})
    times = StepTimes.measured(points, "a bench").beside(loras)
    assert [times.of(FULL, 8, case) for case in (0, 1, 3)] == [20, 60, 60]
    assert [times.of(NONE, 8, case) for case in (0, 1, 3)] == [90, 200, 200]


@settings(max_examples=50, deadline=None)
@given(points=st.fixed_dictionaries({NONE: POINTS, FULL: POINTS}, optional={PIECEWISE: POINTS}))
def test_times_never_fall_as_batches_grow_and_are_not_below_what_was_measured(
    points: dict[CUDAGraphMode, dict[int, float]],
) -> None:
    times = StepTimes.measured({(mode, 0): values for mode, values in points.items()}, "drawn")
    for mode in RUNTIME_MODES:
        curve = times.at(mode, np.arange(1, 401))
        assert curve.shape == (400,)
        assert (np.diff(curve) >= -1e-9 * curve[1:]).all()
        assert curve[76] == times.of(mode, 77)
        if mode in points:
            assert all(
                times.of(mode, n) >= value * (1 - 1e-12) for n, value in points[mode].items()
            )


# --- adapters -------------------------------------------------------------------------------------------------


def test_steps_with_adapters_take_longer_by_an_assumed_share() -> None:
    times = times_of(NONE={1: 100}, FULL={1: 10})
    assert times.of(FULL, 4, 0) == 10
    assert times.of(FULL, 4, 1) == times.of(FULL, 4, 9) == pytest.approx(10 * (1 + LORA_OVERHEAD))
    assert times.of(NONE, 4, 2) == pytest.approx(100 * (1 + LORA_OVERHEAD))
    with_adapters = StepTimes.measured({(FULL, 9): {1: 11}, (NONE, 9): {1: 110}}, "x")
    assert with_adapters.of(FULL, 1, 0) == pytest.approx(10)
    assert with_adapters.of(FULL, 1, 4) == 11


def test_a_case_takes_the_time_of_the_next_measured_one_and_cases_are_told_apart_by_their_times() -> (
    None
):
    times = StepTimes.measured(
        {(FULL, 0): {1: 10}, (FULL, 2): {1: 12}, (FULL, 5): {1: 15}, (NONE, 0): {1: 90}}, "x"
    )
    assert [times.of(FULL, 1, case) for case in (0, 1, 2, 3, 5, 9)] == [10, 12, 12, 15, 15, 15]
    assert times.told_apart([0, 1, 2, 4, 5, 9]) == (0, 2, 9)
    assert times_of(NONE={1: 100}, FULL={1: 10}).told_apart([0, 1, 2, 4, 9]) == (0, 9)
    assert times_of(NONE={1: 100}, FULL={1: 10}).told_apart([9]) == (9,)


# --- the default ----------------------------------------------------------------------------------------------


def test_the_default_says_that_it_is_of_another_model() -> None:
    times = StepTimes.default()
    assert "H200" in times.source
    assert times.unsure[0].startswith(
        "sizes for another model: give --step-times, by `cgplan bench "
    )
    assert [times.of(FULL, n) for n in (1, 8, 64, 256)] == [3400, 3400, 4740, 8930]
    for n in range(1, 9000, 7):
        full, piecewise, eager = (times.of(mode, n) for mode in (FULL, PIECEWISE, NONE))
        assert full <= piecewise <= eager or n > 500, n
        assert full <= eager, "beyond 511 tokens eager steps are bound by the device"
    assert times.of(FULL, 512) == times.of(NONE, 512)


# --- files ----------------------------------------------------------------------------------------------------


def test_a_bench_gives_medians_by_the_size_that_ran() -> None:
    report = bench(
        record(3, 100, "FULL", 10, padded=1),
        record(4, 101, "FULL", 11),
        record(16, 120, "PIECEWISE", 50),
        record(99, 300),
    )
    times = StepTimes.parse(json.dumps(report), "bench.json")
    assert times.source == "bench.json, NVIDIA H200"
    assert [(c.mode, c.points) for c in times.curves] == [
        (NONE, ((3, 100), (4, 101), (16, 120), (99, 300))),
        (PIECEWISE, ((16, 50),)),
        (FULL, ((4, 11),)),
    ]
    with_adapters = StepTimes.parse(json.dumps(bench(record(4, 110, "FULL", 11, loras=5))), "b")
    assert with_adapters.of(FULL, 4, 5) == 11
    assert with_adapters.of(FULL, 4, 0) == pytest.approx(10)


def test_a_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text(
        "\ufeffMicroseconds, mode ,num_tokens\n100,eager,1\n\n90,NONE,8\n10,full,1\n\n50,PIECEWISE,8\n"
    )
    times = StepTimes.load(path)
    assert times.source == str(path)
    assert [(c.mode, c.points) for c in times.curves] == [
        (NONE, ((1, 100), (8, 100))),
        (PIECEWISE, ((8, 50),)),
        (FULL, ((1, 10),)),
    ]
    cases = "mode,num_tokens,microseconds,num_active_loras\nFULL,1,10,0\nFULL,1,12,3\neager,1,50,\n"
    assert [StepTimes.parse(cases, "t").of(FULL, 1, case) for case in (0, 2, 3)] == [10, 12, 12]
    assert StepTimes.parse(HEADER + "FULL,1,5\nfull,1,7\nFULL,1,6\n", "t").of(FULL, 1) == 7


def test_saved_step_times_read_back(tmp_path: Path) -> None:
    times, path = StepTimes.default(), tmp_path / "times"
    path.write_text(times.model_dump_json())
    assert StepTimes.load(path) == times


HEADER = "mode,num_tokens,microseconds\n"
FILES = "JSON file of `cgplan bench --output`, a CSV file with mode,num_tokens,microseconds"
SAVED = '{"kind": "step_times", "source": "x", "curves": [{"mode": "FULL", "points": %s}]}'


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("", "times: no row of step times", FILES),
        ("mode,num_tokens\nFULL,1\n", "times:1: column 'microseconds' is missing", FILES),
        ("mode,num_tokens,microseconds,color\n", "times:1: unknown column 'color'", FILES),
        (
            HEADER + "FULL,1\n",
            "times:2: 2 fields, but the header has 3",
            "one value for each column",
        ),
        (
            HEADER + "FULL,1,5\nHALF,1,5\n",
            "times:3: mode is 'HALF': not one of the runtime modes NONE",
            "Correct",
        ),
        (
            HEADER + "FULL,,5\n",
            "times:2: num_tokens is '': Input should be a valid integer",
            "Correct",
        ),
        (
            HEADER + "FULL,1,0\n",
            "times:2: microseconds is '0': Input should be greater than 0",
            "Correct",
        ),
        (
            HEADER + "FULL,1,fast\n",
            "times:2: microseconds is 'fast': Input should be a valid number",
            "Correct",
        ),
        ("{", "times:1: not JSON: Expecting property name", FILES),
        ("[1]", "times:1, entry 1: 1 is not an object", FILES),
        ("[]", "times: no row of step times", FILES),
        ("{}", "Unable to extract tag using discriminator 'kind'", FILES),
        (json.dumps(bench()), "bench.records: ", FILES),
        (json.dumps(bench(record(4, 0.0))), "bench.records.0.eager.median: ", FILES),
        (
            json.dumps(bench(record(4, 5), record(4, 5, "SIDEWAYS", 1))),
            "bench.records.1.mode: ",
            FILES,
        ),
        ('{"kind": "step_times"}', "step_times.source: Field required", FILES),
        (SAVED % "[[2, 5], [1, 6]]", "step_times.curves.0: FULL: points do not ascend", FILES),
    ],
)
def test_bad_files(text: str, message: str, remedy: str) -> None:
    with pytest.raises(StepTimeError) as caught:
        StepTimes.parse(text, "times")
    assert message in caught.value.message
    assert remedy in caught.value.remedy


# --- of other programs -------------------------------------------------------------------------------------------


def lines_of(*rows: Any) -> str:
    return "\n".join(map(json.dumps, rows))


def served(concurrency: int, itl: float, **more: Any) -> Any:
    """A result of ``vllm bench serve``."""
    fixed = {"backend": "vllm", "num_prompts": 99, "request_rate": "inf", "mean_itl_ms": 7.5}
    return {**fixed, "max_concurrency": concurrency, "median_itl_ms": itl, **more}


def served_by_sglang(concurrency: int, itl: float, **server: Any) -> Any:
    """A result of SGLang's bench_serving, which writes Infinity."""
    return {
        "backend": "sglang",
        "request_rate": float("inf"),
        "max_concurrency": concurrency,
        "server_info": server or None,
        "median_itl_ms": itl,
        "concurrency": 3.9,
        "accept_length": None,
    }


def one_batch(batch: int, length: int, prefill: float, **more: Any) -> Any:
    """A result of SGLang's bench_one_batch; times in seconds."""
    return {
        "run_name": "default",
        "batch_size": batch,
        "input_len": length,
        "output_len": 16,
        "prefill_latency": prefill,
        "prefill_throughput": batch * length / prefill,
        "total_latency": 2 * prefill,
        "overall_throughput": 1e4,
        **more,
    }


def one_batch_server(batch: int, throughput: float, **more: Any) -> Any:
    """A result of SGLang's bench_one_batch_server."""
    return {
        "run_name": "default",
        "batch_size": batch,
        "input_len": 1024,
        "output_len": 16,
        "latency": 1.2345,
        "input_throughput": 20000.0,
        "output_throughput": throughput,
        "overall_throughput": 9000.0,
        "last_ttft": 0.0512,
        "last_gen_throughput": -1,
        "acc_length": -1,
        "total_output_tokens": 16 * batch,
        "num_early_stopped": 0,
        "steady_state_output_throughput": None,
        "steady_state_window_s": None,
        "cache_hit_rate": None,
        **more,
    }


def forward(query_lens: list[int], median_us: float) -> Any:
    """An entry of ``vllm bench forward --output-json``."""
    requests = [
        {"query_len": length, "kv_len": length + 4096, "num_draft_tokens": 0, "chunked": False}
        for length in query_lens
    ]
    rank = {"num_tokens": sum(query_lens), "kv_blocks": 9, "latency_us": {"median": median_us}}
    return {"case": "x", "requests": requests, "median_us": median_us, "ranks": [rank]}


def point(kind: str, batch: int, seconds: float, graph: str, **more: Any) -> Any:
    """A point of Dynamo's self-benchmark: what ``iteration_groups`` has of it."""
    fixed = {
        "point_type": kind,
        "benchmark_id": 1,
        "total_prefill_tokens": 0,
        "total_kv_read_tokens": 100 * batch,
        "batch_size": batch,
        "expected_cudagraph_mode": graph,
        "expected_capture_size": None,
        "padding_tokens": None,
        "sample_reasons": ["generated"],
    }
    return {
        "benchmark_id": 1,
        "point": {**fixed, **more},
        "expected_dp_ranks": [0],
        "complete": True,
        "wall_time": seconds,
        "rank_results": [{"dp_rank": 0, "fpms": [{"wall_time": seconds}]}],
    }


def artifact(*points: Any) -> str:
    """Dynamo's file, indented as it writes it."""
    return json.dumps(
        {
            "schema_version": 2,
            "artifact_type": "rank",
            "status": "complete",
            "usable": True,
            "cudagraph": {"mode": "FULL_AND_PIECEWISE", "capture_sizes": [1, 8]},
            "results": [{"point": each["point"], "fpms": []} for each in points],
            "iteration_groups": list(points),
        },
        indent=2,
    )


def passes(*rows: str, columns: str = "") -> str:
    """A forward-pass table of AISimulate, saved as CSV."""
    header = "cell_id,system,workload_kind,batch_size,total_prefill_tokens,total_kv_read_tokens,latency_ms"
    return "\n".join([header + columns, *rows])


def test_results_of_vllm_bench_serve_are_step_times() -> None:
    text = lines_of(
        served(1, 5.0),
        served(64, 6.5),
        served(1, 18.0, mode="eager"),
        served(64, 19.0, mode="NONE"),
    )
    times = StepTimes.parse(text, "serve.json")
    assert [times.of(FULL, 1), times.of(FULL, 64), times.of(NONE, 64)] == [5000, 6500, 19000]
    assert "the median time between tokens at --max-concurrency N" in times.notes[0]


def test_sglang_says_itself_whether_its_server_had_graphs() -> None:
    decode = {"backend": "disabled", "max_bs": None}
    text = lines_of(
        served_by_sglang(4, 6.0),
        served_by_sglang(4, 7.0, cuda_graph_config={"decode": {"backend": "breakable"}}),
        served_by_sglang(4, 20.0, cuda_graph_config={"decode": decode, "prefill": {}}),
        served_by_sglang(8, 21.0, disable_cuda_graph=True),
    )
    times = StepTimes.parse(text, "serving.jsonl")
    assert [times.of(mode, 4) for mode in (FULL, PIECEWISE, NONE)] == [6000, 7000, 20000]
    assert times.of(NONE, 8) == 21000


def modes_of(times: StepTimes) -> dict[CUDAGraphMode, dict[int, Any]]:
    return {c.mode: {n: pytest.approx(us) for n, us in c.points} for c in times.curves}


def test_results_of_one_batch_tell_decode_and_prefill() -> None:
    text = lines_of(
        one_batch(4, 256, 0.05, median_decode_latency=0.005),
        one_batch(4, 1024, 0.09, median_decode_latency=0.007),
        one_batch(1, 3, 0.001),
        one_batch(4, 256, 0.06, median_decode_latency=0.02, run_name="eager"),
    )
    times = StepTimes.parse(text, "result.jsonl")
    assert modes_of(times) == {
        FULL: {4: 6000},  # of two contexts
        NONE: {4: 20_000, 1024: 55_000, 4096: 90_000},  # not the prefill of 3 tokens
    }
    assert "taken to run in FULL graphs" in times.notes[0]


def test_a_batch_beyond_all_schedulers_is_left_out() -> None:
    row = one_batch(4096, 4096, 9.0, median_decode_latency=0.005)
    assert [curve.mode for curve in StepTimes.parse(json.dumps(row), "x").curves] == [FULL]


def test_results_of_one_batch_server_count_a_step_as_its_tokens() -> None:
    text = lines_of(
        one_batch_server(1, 200.0),
        one_batch_server(8, 1000.0, steady_state_output_throughput=1600.0),
        one_batch_server(8, 400.0, run_name="eager"),
    )
    times = StepTimes.parse(text, "result.jsonl")
    assert [times.of(FULL, 1), times.of(FULL, 8), times.of(NONE, 8)] == [5000, 5000, 20_000]


def test_results_of_vllm_bench_forward_are_times_of_graphs() -> None:
    text = json.dumps([forward([1] * 32, 4000.0), forward([512, 1, 1], 9000.0)], indent=2)
    times = StepTimes.parse(text, "forward.json")
    assert [(c.mode, c.points) for c in times.curves] == [(FULL, ((32, 4000), (514, 9000)))]
    assert times.source == "a result of vllm bench forward, forward.json"
    with pytest.raises(StepTimeError, match="no eager step times") as caught:
        times.of(NONE, 4)
    assert "of vLLM without --speculative-config, into the same file" in caught.value.remedy
    assert "cat graphs.log eager.log > both.log" in caught.value.remedy


GRAPHS = artifact(
    point("decode", 1, 0.004, "FULL", expected_capture_size=1),
    point("decode", 5, 0.005, "FULL", expected_capture_size=8),
    point("decode", 8, 0.007, "FULL", expected_capture_size=8),
    point("prefill", 2, 0.008, "PIECEWISE", total_prefill_tokens=6, expected_capture_size=8),
    point("prefill", 2, 0.030, "NONE", total_prefill_tokens=600),
)


@pytest.mark.parametrize(
    ("text", "is_of_decode"),
    [
        (json.dumps([forward([1] * 32, 4000.0), forward([1] * 8, 3000.0)]), True),
        (json.dumps([forward([1] * 32, 4000.0), forward([512, 1, 1], 9000.0)]), False),
        ("mode,num_tokens,microseconds\nFULL,8,3000\nNONE,8,9000\n", False),
        ("mode,num_tokens,microseconds\nNONE,8,9000\n", False),
        ((Path(__file__).parents[1] / "data" / "vllm_start.log").read_text(), True),
        (json.dumps(bench(record(8, 9000.0, "FULL", 3000.0))), False),
    ],
)
def test_full_times_of_uniform_decode_alone_are_known_as_such(
    text: str, is_of_decode: bool
) -> None:
    times = StepTimes.parse(text, "x")
    assert times.full_of_decode is is_of_decode
    warnings, _ = times.said_for(FULL)
    assert (FULL_OF_DECODE in warnings) is is_of_decode
    assert FULL_OF_DECODE not in times.said_for(CUDAGraphMode.FULL_AND_PIECEWISE)[0]
    assert StepTimes.parse(times.model_dump_json(), "x").full_of_decode is is_of_decode


def test_a_self_benchmark_tells_the_graph_of_each_point() -> None:
    times = StepTimes.parse(GRAPHS, "benchmark.json")
    assert modes_of(times) == {FULL: {1: 4000, 8: 6000}, NONE: {600: 30_000}}
    steps = artifact(point("decode", 3, 0.01, "PIECEWISE", expected_capture_size=4))
    assert modes_of(StepTimes.parse(steps, "x")) == {PIECEWISE: {4: 10_000}}


def test_files_of_graphs_and_of_eager_steps_stand_one_after_the_other() -> None:
    eager = artifact(point("decode", 1, 0.02, "NONE"))
    both = StepTimes.parse(GRAPHS + eager, "both.json")
    assert both.of(NONE, 1) == pytest.approx(20_000)
    mixed = StepTimes.parse(f"{GRAPHS}\n{lines_of(served(1, 25.0, mode='eager'))}\n", "both.json")
    assert mixed.of(NONE, 1) == pytest.approx(25_000)
    assert mixed.source == (
        "Dynamo's self-benchmark of vLLM, "
        "a result of vllm bench serve or SGLang's bench_serving, both.json"
    )


def test_a_forward_pass_table_is_read() -> None:
    rows = ("a,h200,decode,1,0,96,4.0", "a,h200,decode,1,0,9000,6.0", "b,h200,prefill,2,48,0,9")
    times = StepTimes.parse(passes(*rows), "fpm.csv")
    assert modes_of(times) == {FULL: {1: 5000}, NONE: {48: 9000}}
    modes = passes("a,h200,decode,1,0,96,4.0,", "a,h200,decode,1,0,96,20,eager", columns=",mode")
    assert [StepTimes.parse(modes, "x").of(mode, 1) for mode in (FULL, NONE)] == [4000, 20_000]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            lines_of({"model_id": "m", "avg_latency": 1.0, "latencies": [1.0], "percentiles": {}}),
            "x:1: a result of vllm bench latency, which does not tell the batch of a step",
        ),
        (lines_of({"elapsed_time": 9.0, "tokens_per_second": 1.0}), "of vllm bench throughput,"),
        (lines_of({"successful_requests": 9}), "of SGLang's bench_offline_throughput,"),
        (
            lines_of(one_batch_server(1, 9.0), one_batch_server(8, 9.0, acc_length=2.4)),
            "x:2: acc_length is 2.4: Input should be less than or equal to 1",
        ),
        (lines_of(one_batch_server(1, 9.0, output_len=1)), "x:1: output_len is 1"),
        (lines_of(one_batch(1, 0, 9.0)), "x:1: input_len is 0"),
        (lines_of(one_batch(1, 4, float("nan"))), "x:1: prefill_latency is nan"),
        (lines_of({"prefill_latency": 1.0}), "x:1: column 'run_name' is missing"),
        (
            json.dumps([forward([1], 4.0), forward([1, -2], 4.0)]),
            "x:1, entry 2: requests.1.query_len is -2",
        ),
        (json.dumps([forward([], 4.0)]), "x:1, entry 1: requests is "),
        (artifact(), "x: no row of step times"),
        (
            artifact(point("decode", 1, 0.1, "HALF")),
            "x:1, entry 1: point.expected_cudagraph_mode is 'HALF': not one of the runtime modes",
        ),
        (artifact(point("decode", 1, 0.0, "FULL")), "x:1, entry 1: wall_time is 0.0"),
        (GRAPHS + GRAPHS[:-9], "x:[0-9]+: not JSON: Expecting"),
        ('cgplan_batches_total{num_tokens="1"} 2', "x: metrics of a runner, which have no times"),
        (passes("a,h200,encode,1,0,9,4.0"), "x:2: workload_kind is 'encode'"),
        (passes("a,h200,decode,1,0,9,4.0", "b,h200,decode,1,0,9,4.0"), "of several deployments"),
    ],
)
def test_wrong_files_of_other_programs(text: str, message: str) -> None:
    with pytest.raises(StepTimeError, match=message):
        StepTimes.parse(text, "x")


def test_a_table_may_be_in_another_unit_and_a_bench_may_not() -> None:
    rows = HEADER + "NONE,1,14\nFULL,1,4\n"
    told, *_ = StepTimes.parse(rows, "times.csv").unsure
    assert told == "eager at 1 token takes 14.0 us, 0.00097 times the default: is the unit right?"
    milli = rows.replace("micro", "milli")
    with pytest.raises(StepTimeError, match="times are in microseconds: convert them, rename"):
        StepTimes.parse(milli, "times.csv")
    small = bench(record(1, 14.0, "FULL", 4.0))
    other, *_ = reversed(StepTimes.parse(json.dumps(small), "bench.json").unsure)
    assert "PIECEWISE was not measured" in other


def test_a_point_that_is_raised_far_is_a_warning() -> None:
    for smaller, warned in ((10.0, True), (6.0, False)):
        times = times_of(NONE={1: 20}, FULL={8: smaller, 24: 5})
        said = [text for text in times.unsure if text.startswith("FULL at 24 tokens took 5.00 us")]
        assert len(said) is int(warned)
        assert all(
            text.endswith("were they steps of other ranks, adapters or contexts?") for text in said
        )
        assert any(text.startswith("FULL at 24 tokens") for text in times.notes) is not warned


def test_iterations_of_a_vllm_log_are_step_times() -> None:
    text = (Path(__file__).parents[1] / "data" / "vllm_start.log").read_text()
    times = StepTimes.parse(text, "vllm.log")
    assert [times.of(FULL, 4), times.of(PIECEWISE, 16), times.of(NONE, 62)] == [2200, 9000, 20000]
    with pytest.raises(StepTimeError, match="no iteration without speculative tokens"):
        StepTimes.parse(text.partition("\n")[2], "vllm.log")
    steps = [line for line in text.splitlines() if "Iteration(3)" in line or "Iteration(4)" in line]
    late = "\n".join(steps)
    both = StepTimes.parse(f"{late}\n{text}", "vllm.log")
    assert both.source.endswith(
        " (without 2 iterations before its first start: give graphs.log from its first line)"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            served(4, 5.0, request_rate=10.0),
            "serve:2: request_rate is '10.0': Input should be 'inf'",
        ),
        (served(4, 5.0, max_concurrency=None), "max_concurrency"),
        (served(4, 5.0, spec_decode_num_drafts=30), "spec_decode_num_drafts"),
        (served(4, 0.0), "median_itl_ms"),
        (served(4, 5.0, mode="FAST"), "mode is 'FAST': not one of the runtime modes"),
    ],
)
def test_results_that_do_not_tell_a_step_time_are_refused(line: Any, message: str) -> None:
    with pytest.raises(StepTimeError, match=message):
        StepTimes.parse(lines_of(served(1, 5.0), line), "serve")


@pytest.mark.parametrize(
    ("points", "mode", "message"),
    [
        ({"FULL": {1: 5}}, NONE, "no eager step times, found FULL"),
        ({"NONE": {1: 5}, "PIECEWISE": {1: 2}}, FULL, "no FULL step times, found eager, PIECEWISE"),
        ({"NONE": {1: 5}}, PIECEWISE, "no PIECEWISE step times, found eager"),
        ({"FULL": {1: 5}}, PIECEWISE, "no eager step times, found FULL"),
    ],
)
def test_missing_modes_are_named(points: Any, mode: CUDAGraphMode, message: str) -> None:
    with pytest.raises(StepTimeError, match=message) as caught:
        times_of(**points).of(mode, 1)
    assert caught.value.remedy.startswith("Measure ")


# --- several sizes ----------------------------------------------------------------------------------------------


def surface_of(tmp_path: Path, text: str) -> StepSurface:
    return StepSurface.parse(text, tmp_path / "times.csv", ("batch", "length"))


def test_times_of_several_sizes(tmp_path: Path) -> None:
    rows = {(1, 10): 100, (1, 20): 200, (5, 10): 90, (5, 20): 600}
    text = "length,batch,microseconds\n" + "".join(
        f"{length},{batch},{us}\n" for (batch, length), us in rows.items()
    )
    surface = surface_of(tmp_path, text + "10,1,80\n")
    asked = {
        (1, 10): 100,  # the longest of two
        (5, 10): 100,  # raised to that of a smaller batch
        (5, 20): 600,
        (3, 20): 400,  # halfway in one size
        (3, 15): 250,  # and in both
        (1, 5): 100,  # below the first size
        (1, 40): 400,  # in proportion beyond the last one
        (10, 40): 2400,
    }
    assert surface.at(np.array(list(asked))).tolist() == pytest.approx(list(asked.values()))
    assert surface.eager is None
    (warning,) = surface.unsure
    assert warning == (
        "graph at batch x length 5 x 10 took 90.0 us, a smaller batch 100 us: raised to that, as "
        "larger batches take no less time; measure again"
    )


def test_times_of_one_length(tmp_path: Path) -> None:
    surface = surface_of(tmp_path, "batch,length,microseconds\n1,10,100\n4,10,400\n")
    assert surface.at(np.array([[2, 5], [2, 10], [2, 20]])).tolist() == pytest.approx(
        [200, 200, 400]
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("batch,microseconds\n1,10\n", "column 'length' is missing"),
        ("batch,length,microseconds\n1,10,0\n", "microseconds is '0'"),
        ("batch,length,microseconds\n", "no times of a full grid of batch x length: 0 rows"),
        ("batch,length,microseconds\n1,10,5\n2,20,9\n", "2 rows, not (1, 20)"),
    ],
)
def test_bad_times_of_several_sizes(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(StepTimeError) as raised:
        surface_of(tmp_path, text)
    assert told in str(raised.value)


def test_times_of_several_sizes_from_a_bench(tmp_path: Path) -> None:
    def boxed(batch: int, length: int, graph: float | None, eager: float = 9) -> dict[str, Any]:
        descriptor = {"num_tokens": batch, "sizes": [length]}
        graphed = graph and {"median": graph}
        return {
            "num_tokens": batch,
            "mode": "FULL",
            "descriptor": descriptor,
            "eager": {"median": eager},
            "graph": graphed,
        }

    measured = [
        boxed(1, 10, 100),
        boxed(1, 20, 200),
        boxed(4, 10, 300),
        boxed(4, 10, 290, eager=8),
        boxed(4, 20, 500, eager=11),
        boxed(9, 9, None),
    ]
    text = json.dumps({"kind": "bench", "records": measured})
    surface = surface_of(tmp_path, text)
    assert surface.at(np.array([[1, 15], [4, 20]])).tolist() == pytest.approx([150, 500])
    assert surface.eager is not None
    assert surface.eager.tolist() == [[9, 9], [9, 11]], "raised to that of a smaller batch"
    assert surface.unsure == (), "of 4 x 10 the longest time counts"
    with pytest.raises(StepTimeError, match="times of batches of several sizes"):
        StepTimes.parse(text, "bench.json")
    with pytest.raises(StepTimeError, match="is a saved capture, which has no step times"):
        surface_of(tmp_path, '{"kind": "capture"}')


def test_noise_of_neighbours_is_no_slope() -> None:
    """Truth: 10 us a token; the last sizes of a log lie close together."""
    sizes = [*range(256, 4097, 256), 8000, 8008, 8016]
    noise = dict(zip(sizes[-3:], (1.03, 0.98, 1.02), strict=True))
    rows = [f"eager,{size},{10 * size * noise.get(size, 1.0)}" for size in sizes]
    text = "\n".join(("mode,num_tokens,microseconds", *rows)) + "\n"
    (curve,) = StepTimes.parse(text, "times.csv").curves
    assert 8 < curve.last_slope < 12
