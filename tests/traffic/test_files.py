"""Traffic from files: each form, guesses on the way, and the errors of bad files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgplan.config import Config, Dim
from cgplan.errors import TrafficError
from cgplan.planning import build_plan
from cgplan.traffic.files import FORMS, read_sizes, read_traffic
from cgplan.traffic.histogram import StepShape, Traffic
from cgplan.traffic.simulation import Request, RequestTrace

DATA = Path(__file__).parents[1] / "data"
AZURE = DATA / "azure_llm_code_2023.csv"
PLAN = build_plan(Config())
LORA = {"lora": {"max_loras": 4}}
SPECULATIVE = {"speculative": {"num_speculative_tokens": 1}}


# --- histograms ------------------------------------------------------------------------------------------------

WHOLE = (
    "num_tokens,count,num_reqs,uniform,num_active_loras\n8,3,8,true,0\n100,2,4,False,2\n8,1,8,1,0\n"
)


@pytest.mark.parametrize(
    "text",
    [
        WHOLE,
        WHOLE.replace("\n", "\r\n"),
        "\ufeff" + WHOLE,
        "\n" + WHOLE.replace("\n", "\n\n"),
        WHOLE.upper().replace("TRUE", "true"),
        '"num_tokens","count","num_reqs","uniform","num_active_loras"\n"8",4,"8",true,0\n100,2,4,0,2\n',
        WHOLE.replace(",", " , "),
        *(WHOLE.replace(",", separator) for separator in "\t;|"),
        WHOLE.replace("100,2,4", "100.0,2.0,4"),
        "count,uniform,num_tokens,num_active_loras,num_reqs\n4,1,8,0,8\n0,1,9,0,9\n2,0,100,2,4\n",
    ],
)
def test_a_histogram_in_csv(written: Any, text: str) -> None:
    traffic = written(text, "t.log", **LORA)  # whose name tells nothing
    assert dict(traffic.histogram) == {StepShape(8, 8, True, 0): 4, StepShape(100, 4, False, 2): 2}
    assert traffic.source == "t.log: histogram"
    assert traffic.notes == (), "nothing was guessed"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_a_histogram_in_lines_of_json(written: Any, end: str) -> None:
    rows = [
        {"num_tokens": 8, "count": 3, "num_reqs": 8, "uniform": True, "num_active_loras": 0},
        {"count": 2.0, "num_tokens": 100, "num_reqs": 4, "uniform": False, "num_active_loras": 2},
    ]
    traffic = written(end.join(map(json.dumps, rows)) + end, **LORA)
    assert dict(traffic.histogram) == {StepShape(8, 8, True, 0): 3, StepShape(100, 4, False, 2): 2}
    assert written(json.dumps(rows[0])).total == 3, "one line alone"


def test_columns_that_a_histogram_lacks_are_guessed_and_noted(written: Any) -> None:
    traffic = written("num_tokens,count\n6,1\n7,1\n512,1\n514,1\n", **SPECULATIVE)
    assert [shape for shape, _ in traffic.histogram] == [
        StepShape(6, 3, True),
        StepShape(7, 7, False),
        StepShape(512, 256, True),
        StepShape(514, 256, False),
    ]
    (uniform,) = traffic.notes
    assert uniform.startswith(
        "uniform decode was guessed for 4 steps: a batch counts as uniform if"
    )
    part = written("num_tokens,count,uniform\n6,3,\n7,2,\n8,90,true\n9,0,\n", **SPECULATIVE)
    assert part.notes[0].startswith("uniform decode was guessed for 5 steps: a")


def test_requests_and_uniform_follow_from_each_other(written: Any) -> None:
    reqs = written("num_tokens,count,num_reqs\n6,1,3\n6,1,2\n", **SPECULATIVE)
    assert [shape for shape, _ in reqs.histogram] == [StepShape(6, 2, False), StepShape(6, 3, True)]
    uniform = written("num_tokens,count,uniform\n6,1,true\n6,1,false\n6,1,\n", **SPECULATIVE)
    assert dict(uniform.histogram) == {StepShape(6, 6, False): 1, StepShape(6, 3, True): 2}


def test_batches_beyond_the_scheduler_are_kept_and_noted(written: Any) -> None:
    text = "num_tokens,count,num_reqs,uniform,num_active_loras\n65,1,4,0,0\n5,1,5,1,0\n4,2,4,1,0\n"
    traffic = written(text, scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 64})
    assert traffic.total == 4
    assert traffic.notes == (
        "50.0% of the steps are larger than this scheduler makes them (max_num_seqs 4, max_num_batched_tokens 64)",
    )


HIST, JSON = "num_tokens,count\n", '{"num_tokens": 1, "count": 1}\n'


@pytest.mark.parametrize(
    ("text", "line", "message", "remedy"),
    [
        (HIST + "1,0\n2,0\n", None, "no batch with a count above 0", "Give traffic with a batch"),
        (
            HIST + "1,1\n2,-3\n",
            3,
            "count is '-3': Input should be greater than or equal to 0",
            "Correct that row",
        ),
        (HIST + "1,\n", 2, "count is '': Input should be a valid integer", "Correct"),
        (HIST + "1," + "9" * 5000 + "\n", 2, "count is '9999", "Correct"),
        (
            HIST + "0,1\n",
            2,
            "num_tokens is '0': Input should be greater than or equal to 1",
            "Correct",
        ),
        (HIST + "1,1\n2\n", 3, "1 fields, but the header has 2", "one value for each column"),
        (
            "num_token,count\n1,1\n",
            1,
            "unknown column 'num_token' (did you mean 'num_tokens'?)",
            "num_reqs, uniform",
        ),
        ("\nnum_reqs,count\n1,1\n", 2, "column 'num_tokens' is missing", "a histogram has"),
        (
            "num_tokens,count,num_seqs\n1,1,1\n",
            1,
            "unknown column 'num_seqs' (did you mean 'num_reqs'?)",
            "num_reqs",
        ),
        ("num_tokens,count,count\n1,1,1\n", 1, "column 'count' is there twice", "Keep one"),
        (
            "num_tokens,count,uniform\n1,1,maybe\n",
            2,
            "uniform is 'maybe': Input should be a valid boolean",
            "Correct",
        ),
        (
            "num_tokens,count,num_reqs\n2,1,3\n",
            None,
            "1 batches of 2 tokens and 3 requests cannot be",
            "at least 1",
        ),
        (
            "num_tokens,count,num_active_loras\n2,1,1\n",
            None,
            "1 active LoRA adapters, the config",
            "`lora` section",
        ),
        (
            "num_tokens,count,num_reqs,uniform\n6,1,3,1\n",
            None,
            "6 tokens for 3 requests, but the query",
            "speculative",
        ),
        (JSON + '{"num_tokens": 1}\n', 2, "column 'count' is missing", "a histogram has"),
        (JSON + '{"num_tokens": 1,\n', 2, "not JSON", "one JSON object a line"),
        (JSON + "[1]\n", None, "t.txt:2, entry 1: 1 is not an object", "one JSON object a line"),
        ('{"num_tokens": 1, "count": [1]}\n', 1, "count is [1]", "Correct"),
    ],
)
def test_bad_histograms(
    refused: Any, text: str, line: int | None, message: str, remedy: str
) -> None:
    refused(text, line, message, remedy)


# --- other files -----------------------------------------------------------------------------------------------


SAVED = b'{"kind": "traffic", "source": "", "histogram": [%b]}'


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        (b" \r\n\n", "is empty", "Give a file"),
        (b"num_tokens,count\n1,1\n\xff\xfe\n", "t.txt:3: not UTF-8", "Save it as UTF-8"),
        (
            b"\x28\xb5\x2f\xfd",
            "t.txt:1: not UTF-8",
            "of a packed file give /dev/stdin, after `zstdcat ",
        ),
        (
            b"a,b\n1,2\n",
            "t.txt has no known column in 'a,b'",
            "a histogram has num_tokens, count",
        ),
        (b'[{"num_tokens": 1, "count": 1}]\n', "no known column in", "a histogram has"),
        (b"# TYPE up gauge\nup 1\n", "the metrics count no batches", "a runner that has run some"),
        (b"{}\n", "no known column in '{}'", "a Mooncake trace has timestamp"),
        (
            b'{"kind": "plan"}',
            "a saved plan, not traffic",
            "counts of steps",
        ),
        (b'{"kind": "traffic"}', "histogram: Field required", "as it was saved"),
        (SAVED % b"", "no batch with a count above 0", "with a batch"),
        (SAVED % b"[[1, 1], -1]", "-1.0 batches of 1 tokens", "a count is 0 or more"),
        (SAVED % b"[[6, 3, true], 1]", "the query length is 1", "speculative"),
        (SAVED % b"[[9, 9, true, 1], 1]", "1 active LoRA", "`lora` section"),
    ],
)
def test_files_that_hold_no_traffic(refused: Any, text: bytes, message: str, remedy: str) -> None:
    refused(text, None, message, remedy)


def test_yaml_is_no_traffic(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: {target: model.py:build}\n")
    with pytest.raises(TrafficError, match=r"serve\.yaml is YAML, not traffic"):
        read_traffic(path, build_plan(Config()))


CELLS = st.text(alphabet='0123456789.,-+eE_ "naif:TZ\r\x1c\u0661', max_size=12)


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.lists(CELLS, max_size=4), max_size=4))
def test_junk_below_a_header_is_refused_or_read(
    rows: list[list[str]], read: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for header in ("num_tokens,count,num_reqs,uniform", "TIMESTAMP,ContextTokens,GeneratedTokens"):
        path = tmp_path_factory.getbasetemp() / "rows"
        path.write_text("\n".join([header, *map(",".join, rows)]), encoding="utf-8")
        try:
            assert read(path).total > 0
        except TrafficError as error:
            assert "rows" in error.message  # noqa: PT017


@pytest.mark.parametrize("indent", [None, 2])
def test_saved_traffic_reads_back(written: Any, indent: int | None) -> None:
    traffic = Traffic.of(
        {StepShape(4, 4, True): 150.5, StepShape(9, 2): 2}, "somewhere", ["a note"]
    )
    assert written(traffic.model_dump_json(indent=indent)) == traffic


# --- request traces --------------------------------------------------------------------------------------------


def test_the_azure_trace_becomes_steps(read: Any) -> None:
    traffic = read(AZURE)
    rows = [line.split(",") for line in AZURE.read_text().splitlines()[1:]]
    prompts, generated = (sum(int(row[i]) for row in rows) for i in (1, 2))
    tokens = sum(shape.num_tokens * weight for shape, weight in traffic.histogram)
    assert tokens == prompts + generated - len(rows), "each prefill yields the first token"
    assert traffic.source == "azure_llm_code_2023.csv: 8819 requests"
    assert {shape.num_active_loras for shape, _ in traffic.histogram} == {0}
    faster = read(AZURE, speedup=8)
    assert faster.total < traffic.total, "the same tokens in fewer, larger steps"
    assert faster.source == "azure_llm_code_2023.csv: 8819 requests, 8 times as fast as recorded"
    assert max(s.num_reqs for s, _ in faster.histogram) > max(
        s.num_reqs for s, _ in traffic.histogram
    )


STAMPS = {
    "7 digits": ("2023-11-16 18:17:03.9799600", "2023-11-16 18:17:04.9799600"),
    "6 digits": ("2023-11-16 18:17:03.979960", "2023-11-16 18:17:04.979960"),
    "none": ("2023-11-16 18:17:59", "2023-11-16 18:18:00"),
    "zone": ("2024-05-10 00:00:00.009930+00:00", "2024-05-10T01:00:01.009930+01:00"),
    "utc": ("2024-05-10T23:59:59Z", "2024-05-11T00:00:00Z"),
    "seconds": ("5", "6.0"),
    "epoch": ("1.7e9", "1700000001"),
}


@pytest.mark.parametrize("stamps", STAMPS.values(), ids=STAMPS)
def test_forms_of_timestamps(written: Any, stamps: tuple[str, str]) -> None:
    """Requests 1 s apart: 5 tokens take less, so that each runs alone; 1000 times as fast, they meet."""
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n{stamps[0]},7,5\n{stamps[1]},7,5\n"
    assert dict(written(text).histogram) == {StepShape(7, 1): 2, StepShape(1, 1, True): 8}
    assert dict(written(text, speedup=1000).histogram) == {
        StepShape(7, 1): 1,
        StepShape(8, 2): 1,
        StepShape(2, 2, True): 3,
        StepShape(1, 1, True): 1,
    }


def test_a_mooncake_trace() -> None:
    trace = read_traffic(DATA / "mooncake.jsonl", build_plan(Config()))
    assert trace.requests == [
        Request(0, 675, 50),
        Request(0, 1220, 9),
        Request(3e6, 9, 1),
        Request(5.999e6, 1285, 0),
    ]
    assert trace.source == "mooncake.jsonl: 4 requests"


def requests_of(tmp_path: Path, text: str, **given: Any) -> RequestTrace:
    (tmp_path / "t").write_text(text)
    found = read_traffic(tmp_path / "t", build_plan(Config()), **given)
    assert isinstance(found, RequestTrace)
    return found


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_1_2 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
)
BAILIAN = {
    "chat_id": 9,
    "parent_chat_id": -1,
    "timestamp": 61.5,
    "input_length": 40,
    "output_length": 3,
    "type": "text",
}
BAILIAN |= {"turn": 1, "hash_ids": [1, 2, 3]}
SGLANG = {
    "request_parameters": "{}",
    "id": "a",
    "finish_reason": {"type": "stop"},
    "request_received_ts": 1.7e9,
}
SGLANG |= {"prompt_tokens": 40, "completion_tokens": 3, "cached_tokens": 30, "e2e_latency": 0.5}
FAILED = "1 requests without output were left out: they failed"


@pytest.mark.parametrize(
    ("text", "requests", "notes"),
    [
        (
            BURST
            + "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087,0,1087,API log\n118,GPT-4,417,276,693,API log\n",
            [Request(0, 472, 18), Request(113e6, 417, 276)],
            [FAILED],
        ),
        (BURST_1_2 + "5,,4.1,ChatGPT,472,18,490,API log\n", [Request(0, 472, 18)], []),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
            "2024-05-10 00:00:00.017335+00:00,2399,6\n",
            [Request(0, 2162, 5), Request(7405, 2399, 6)],
            [],
        ),
        (
            lines(
                {
                    "TIMESTAMP": "2024-05-10 00:00:01",
                    "ContextTokens": 7,
                    "GeneratedTokens": 5,
                    "Adapter": None,
                }
            ),
            [Request(0, 7, 5)],
            [],
        ),
        (
            "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n1,2,7,5\n",
            [Request(0, 7, 5)],
            ["columns that nothing needs were ignored: NumImages"],
        ),
        (
            lines(BAILIAN, BAILIAN | {"timestamp": 62.0, "hash_ids": [1, 2, 4], "turn": 2}),
            [Request(0, 40, 3), Request(0.5e6, 8, 3)],
            [
                "40.0% of the prompts' 80 tokens were cached, so not prefilled: an unbounded cache of blocks of 16"
            ],
        ),
        (
            lines(
                SGLANG,
                SGLANG
                | {"request_received_ts": 1.7e9 + 2, "cached_tokens": 40, "completion_tokens": 1},
            ),
            [Request(0, 10, 3), Request(2e6, 1, 1)],
            ["86.2% of the prompts' 80 tokens were cached, so not prefilled: by the file"],
        ),
    ],
    ids=[
        "burstgpt",
        "burstgpt 1.2",
        "azure 2024",
        "azure in json",
        "azure multimodal",
        "bailian",
        "sglang",
    ],
)
def test_published_traces_and_logs(
    tmp_path: Path, text: str, requests: list[Request], notes: list[str]
) -> None:
    found = requests_of(tmp_path, text)
    assert found.requests == requests
    assert [note[: len(start)] for note, start in zip(found.notes, notes, strict=True)] == notes


RUN = {
    "request_throughput": 2.0,
    "input_lens": [5, 6, 7],
    "output_lens": [3, 0, 4],
    "ttfts": [0.1, 0.0, 0.1],
}
RUN |= {"itls": [[0.1], [], [0.1]], "generated_texts": ["| a", "", "{"], "errors": ["", "no", ""]}


@pytest.mark.parametrize(
    ("run", "arrivals", "note"),
    [
        (
            {"request_rate": "inf", "max_concurrency": None, "start_times": [90.5, 91.0, 93.5]},
            [0, 3e6],
            FAILED,
        ),
        (
            {"request_rate": "inf"},
            [0, 0],
            "the benchmark has no start_times: requests come all at once",
        ),
        (
            {"request_rate": math.inf},
            [0, 0],
            "the benchmark has no start_times: requests come all at once",
        ),
        ({"request_rate": 50.0}, None, "requests come as a Poisson process of 50 a second"),
        ({"request_rate": "trace"}, None, "requests come as a Poisson process of 2 a second"),
        (
            {"request_rate": math.inf, "max_concurrency": 8},
            None,
            "requests come as a Poisson process of 2 a second",
        ),
    ],
)
def test_results_of_serving_benchmarks(
    tmp_path: Path, run: dict[str, Any], arrivals: list[float] | None, note: str
) -> None:
    found = requests_of(tmp_path, json.dumps(RUN | run))  # without a line's end, as vLLM writes it
    assert [request[1:3] for request in found.requests] == [(5, 3), (7, 4)]
    assert any(note in said for said in found.notes)
    assert FAILED in found.notes
    if arrivals is None:
        assert found.requests[0].arrival_us < found.requests[1].arrival_us
    else:
        assert [request.arrival_us for request in found.requests] == arrivals


def test_a_result_may_be_spread_over_lines(tmp_path: Path) -> None:
    assert requests_of(tmp_path, "\n" + json.dumps(RUN, indent=2)) == requests_of(
        tmp_path, json.dumps(RUN)
    )


def test_runs_of_a_benchmark_come_one_after_the_other(tmp_path: Path) -> None:
    run = RUN | {"start_times": [7.0, 6.0, 8.0]}
    found = requests_of(tmp_path, lines(run, run))
    assert [request.arrival_us for request in found.requests] == [0, 1e6, 2e6, 3e6]


def test_a_poisson_process_has_the_rate_of_the_benchmark(tmp_path: Path) -> None:
    found = requests_of(
        tmp_path,
        json.dumps(
            RUN | {"request_rate": 50.0, "input_lens": [1] * 4000, "output_lens": [1] * 4000}
        ),
    )
    assert found.requests[-1].arrival_us == pytest.approx(4000 / 50 * 1e6, rel=0.1)


def test_conversations_have_lengths_alone(tmp_path: Path) -> None:
    talk = [
        {"from": "human", "value": "x" * 9},
        {"from": "gpt", "value": "y" * 8},
        {"from": "human", "value": "z"},
    ]
    entries = [
        {"id": "a", "conversations": talk},
        {"id": "b", "conversations": talk[:1]},
        {"conversations": talk[1:]},
    ]
    found = requests_of(tmp_path, json.dumps(entries, indent=1), request_rate=4.0)
    assert [request[1:3] for request in found.requests] == [(3, 2), (2, 1)]
    assert found.requests[0].arrival_us < found.requests[1].arrival_us
    assert "4 characters a token" in found.notes[0]
    with pytest.raises(TrafficError, match="conversations have no times") as caught:
        requests_of(tmp_path, json.dumps(entries))
    assert "traffic.request_rate" in caught.value.remedy


MOON_ROW = {"timestamp": 0, "input_length": 1200, "output_length": 1}


def test_blocks_of_earlier_prompts_are_not_prefilled_again(tmp_path: Path) -> None:
    blocks = ([0, 1, 2], [0, 1, 3], [0, 9, 2], [9, 1], [0, 1, 2], [])
    found = requests_of(tmp_path, lines(*(MOON_ROW | {"hash_ids": ids} for ids in blocks)))
    assert [request.context_tokens for request in found.requests] == [1200, 176, 688, 176, 1, 1200]


@pytest.mark.parametrize(
    ("row", "step", "note"),
    [
        (MOON_ROW, 500, ""),
        (
            MOON_ROW,
            0.5,
            "taken for milliseconds: 2e+03 requests and 2.4e+06 tokens a second. If they are seconds, it is 2 ",
        ),
        (BAILIAN, 0.5, ""),
        (
            BAILIAN,
            500,
            "taken for seconds: 0.002 requests and 0.086 tokens a second. If they are milliseconds, it is 2 ",
        ),
    ],
)
def test_the_wrong_unit_of_timestamps_is_noticed(
    tmp_path: Path, row: dict[str, Any], step: float, note: str
) -> None:
    rows = [row | {"timestamp": i * step, "hash_ids": []} for i in range(100)]
    found = requests_of(tmp_path, lines(*rows))
    assert [note in said for said in found.warnings] == ([True] if note else [])
    assert found.hurried(1000.0).warnings == ()
    unit = 1e3 if row is MOON_ROW else 1e6
    assert found.requests[-1].arrival_us == pytest.approx(99 * step * unit), (
        "it is a warning: nothing is changed"
    )
    if note:
        speedup = float(found.warnings[0].rpartition(" ")[2])
        hurried = requests_of(tmp_path, lines(*rows), speedup=speedup)
        assert hurried.requests[-1].arrival_us == pytest.approx(99 * 0.5e6)


def test_dates_have_no_wrong_unit(tmp_path: Path) -> None:
    rows = [f"2024-05-{day + 1} 00:00:00,9000,900\n" for day in range(9, 20)]
    assert requests_of(tmp_path, HEAD + "".join(rows)).notes == ()


def test_unknown_columns_are_ignored_and_noted_once(written: Any) -> None:
    note = "columns that nothing needs were ignored: color, server"
    row = (
        '{"num_tokens": 8, "count": 1, "num_reqs": 8, "uniform": true, "num_active_loras": 0, %s}\n'
    )
    assert written(row % '"color": 1' + row % '"server": "a"').notes == (note,)
    assert written(
        WHOLE.replace("count", "color,count,server")
        .replace(",3,", ",,3,x,")
        .replace(",2,4", ",,2,x,4")
        .replace(",1,8", ",,1,,8"),
        **LORA,
    ).notes == (note,)


def test_a_trace_may_name_adapters(written: Any) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens,Adapter\n1,5,3,0\n1,5,3,\n1,5,3,7\n"
    assert dict(written(text, **LORA).histogram) == {
        StepShape(15, 3, False, 2): 1,
        StepShape(3, 3, True, 2): 2,
    }
    lines = '{"timestamp": 0, "input_length": 5, "output_length": 3, "adapter": 1}\n'
    assert dict(written(lines, **LORA).histogram) == {
        StepShape(5, 1, False, 1): 1,
        StepShape(1, 1, True, 1): 2,
    }


def test_requests_without_a_prompt_are_left_out_and_noted(written: Any) -> None:
    traffic = written("TIMESTAMP,ContextTokens,GeneratedTokens\n1,0,3\n1,5,1\n")
    assert dict(traffic.histogram) == {StepShape(5, 1): 1}
    assert traffic.notes[0] == "1 requests without a prompt were left out"


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
NAMED = HEAD.replace("\n", ",Adapter\n")
MOON = '{"timestamp": %s, "input_length": 1, "output_length": 1}\n'


@pytest.mark.parametrize(
    ("text", "line", "message", "remedy"),
    [
        (HEAD, None, "there is no request with a prompt", "at least one request"),
        (HEAD + "1,0,1\n", None, "there is no request with a prompt", "at least one request"),
        (
            HEAD + "yesterday,1,1\n",
            2,
            "TIMESTAMP is 'yesterday': neither a date and time, such as 2023-11-16",
            "Correct",
        ),
        (HEAD + "1,1,1\n1e999,1,1\n", 3, "TIMESTAMP is '1e999': neither a date", "Correct"),
        (
            HEAD + "1,-1,1\n",
            2,
            "ContextTokens is '-1': Input should be greater than or equal to 0",
            "Correct",
        ),
        (
            HEAD.replace("Context", "Prompt") + "1,1,1\n",
            1,
            "unknown column 'PromptTokens'",
            "a request trace has TIME",
        ),
        (
            "TIMESTAMP,ContextTokens\n1,1\n",
            1,
            "column 'GeneratedTokens' is missing",
            "a request trace has TIMESTAMP",
        ),
        (
            NAMED + "1,1,1,2\n",
            2,
            "the request uses an adapter, but the configuration has none",
            "Plan with a `lora` section",
        ),
        (
            NAMED + "1,1,1,\n1,1,1,sql-lora\n",
            3,
            "Adapter is 'sql-lora': Input should be a valid integer",
            "Correct that row. Number adapters 1 to N, in any order.",
        ),
        (NAMED + "1,-5,1,\n", 2, "ContextTokens is '-5'", "Correct that row."),
        (MOON % '"soon"', 1, "timestamp is 'soon': Input should be a valid number", "Correct"),
        (MOON % "1" + MOON % "Infinity", 2, "timestamp is inf", "Correct"),
        (
            MOON.replace("output_length", "output") % 1,
            1,
            "unknown column 'output' (did",
            "a Mooncake trace has",
        ),
        (
            '{"timestamp": 1, "input_length": 1}\n',
            1,
            "column 'output_length' is missing",
            "a Mooncake trace has",
        ),
        (
            HEAD.replace("\n", ",Adaptor\n") + "1,1,1,1\n",
            1,
            "unknown column 'Adaptor' (did you mean 'Adapter'?)",
            "has TIM",
        ),
        (
            '{"TIMESTAMP": [1], "ContextTokens": 1, "GeneratedTokens": 1}\n',
            1,
            "TIMESTAMP is [1]: neither a date",
            "Correct",
        ),
        (BURST + "5,GPT-4,-1,18,490,API log\n", 2, "Request tokens is '-1'", "Correct"),
        (
            lines(RUN | {"output_lens": [1]}),
            1,
            "3 input_lens, 1 output_lens, 0 start_times",
            "as the benchmark wrote it",
        ),
        (
            lines({"request_throughput": 2.0, "request_rate": 1}),
            1,
            "column 'input_lens' is missing",
            "--save-detailed",
        ),
        (lines(RUN | {"input_lens": [1, -1, 1]}), 1, "input_lens.1 is -1", "Correct"),
    ],
)
def test_bad_traces(refused: Any, text: str, line: int | None, message: str, remedy: str) -> None:
    refused(text, line, message, remedy)


def test_requests_in_any_order_are_simulated_by_their_arrivals(written: Any) -> None:
    rows = ["2023-11-16 18:17:04,3,1\n", "2023-11-16 18:17:03,7,5\n"]
    assert (
        written(HEAD + "".join(rows)).histogram == written(HEAD + "".join(reversed(rows))).histogram
    )


@pytest.mark.parametrize("speedup", [0.0, float("nan"), float("inf")])
def test_a_speedup_is_a_number_above_0(read: Any, speedup: float) -> None:
    with pytest.raises(TrafficError, match=r"a speedup of .* makes no sense") as caught:
        read(AZURE, speedup=speedup)
    assert "above 0" in caught.value.remedy


def test_steps_cannot_be_sped_up(refused: Any) -> None:
    refused(
        "num_tokens,count\n1,1\n", None, "cannot be sped up", "Leave the speedup out", speedup=2
    )


# --- logs of vLLM -----------------------------------------------------------------------------------------------

TABLE = "| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |\n|---|---|---|---|---|\n"


def log(*rows: str, mode: str = "") -> str:
    settings = f"INFO 11-20 x.py:1] - Mode: {mode}\n- Capture sizes: [1, 2, 64]\n" if mode else ""
    return settings + TABLE + "".join(f"INFO 11-20 [x.py:12] {row}\n" for row in rows)


def test_a_log_with_two_tables(read: Any) -> None:
    traffic = read(Path(__file__).parents[1] / "data" / "vllm.log")
    assert dict(traffic.histogram) == {
        StepShape(1, 1, True): 40,
        StepShape(3, 3, True): 20,
        StepShape(29, 29, False): 2,
        StepShape(40, 40, True): 3,
        StepShape(415, 256, False): 1,
    }
    assert traffic.source == "vllm.log: vLLM log"
    (note,) = traffic.notes
    assert note.startswith("uniform decode was guessed for 4 steps: a")


@pytest.mark.parametrize(
    ("mode", "uniform"),
    [
        ("FULL_AND_PIECEWISE", {"FULL": True, "PIECEWISE": False, "NONE": False}),
        ("FULL_DECODE_ONLY", {"FULL": True, "NONE": False}),
        ("CUDAGraphMode.FULL_DECODE_ONLY", {"CUDAGraphMode.FULL": True, "NONE": False}),
        ("FULL", {"FULL": True, "NONE": True}),
        ("PIECEWISE", {"PIECEWISE": True, "NONE": True}),
        ("SOMETHING_NEW", {"FULL": True}),
        ("", {"FULL": True, "PIECEWISE": True}),
    ],
)
def test_uniform_is_told_by_the_mode_or_guessed(
    written: Any, mode: str, uniform: dict[str, bool]
) -> None:
    for ran_as, expected in uniform.items():
        traffic = written(log(f"| 9 | 9 | 0 | {ran_as} | 5 |", mode=mode))
        assert dict(traffic.histogram) == {StepShape(9, 9, expected): 5}
        told = mode.endswith(("ONLY", "AND_PIECEWISE"))
        assert any("guessed for 5 steps: " in note for note in traffic.notes) != told


def test_tables_without_their_mode_have_it_of_their_rows_or_a_warning(written: Any) -> None:
    rows = "| 9 | 9 | 0 | FULL | 5 |", "| 16 | 16 | 0 | PIECEWISE | 1 |"
    both = written(log(*rows))
    assert dict(both.histogram) == {StepShape(9, 9, True): 5, StepShape(16, 16, False): 1}
    unnamed = "tables without the lines `- Mode:` and `- Capture sizes:` above them, so decode was"
    assert unnamed not in str(both.warnings)
    for row in rows:
        assert unnamed in str(written(log(row)).warnings)
        assert unnamed not in str(written(log(row, mode="FULL")).warnings)


def test_above_the_largest_capture_size_the_mode_tells_nothing(written: Any) -> None:
    rows = (
        "| 64 | 64 | 0 | PIECEWISE | 1 |",
        "| 65 | 65 | 0 | NONE | 1 |",
        "| 257 | 257 | 0 | NONE | 1 |",
    )
    traffic = written(log(*rows, mode="FULL_AND_PIECEWISE"))
    assert [shape.uniform for shape, _ in traffic.histogram] == [False, True, False]


def test_a_query_length_that_is_not_the_servers_is_noted(written: Any) -> None:
    text = log("| 9 | 9 | 0 | FULL | 5 |", "| 8 | 8 | 0 | FULL | 1 |", mode="FULL_DECODE_ONLY")
    traffic = written(text, **SPECULATIVE)
    assert dict(traffic.histogram) == {StepShape(8, 4, True): 1, StepShape(9, 9, False): 5}
    assert any(
        note.startswith("5 steps ran as uniform decode with a number of tokens")
        for note in traffic.notes
    )


@pytest.mark.parametrize(
    "prefix",
    ["", "\x1b[0;36m(EngineCore pid=1)\x1b[0;0m INFO 1 [a.py:1] ", "2025-11-20 | INFO | a:1 - "],
)
def test_text_before_a_row_does_not_matter(written: Any, prefix: str) -> None:
    lines = (*TABLE.splitlines(), "| 12 | 16 | 4 | PIECEWISE | 7 |", "other | 5 things")
    text = "".join(f"{prefix}{line}\r\n" for line in lines)
    assert dict(written(text).histogram) == {StepShape(12, 12, True): 7}


@pytest.mark.parametrize(
    ("text", "line", "message", "remedy"),
    [
        (
            "INFO 1 started\nINFO done\n",
            None,
            "no table of CUDA graph statistics",
            "--cudagraph-metrics",
        ),
        (TABLE, None, "no batch with a count above 0", "Give traffic with a batch"),
        (log("| 1 | 1 | 0 | FULL |"), 3, "4 cells where the table has 5 columns", "cut off"),
        (log("| 1 | 1 | 0 | FULL | 3"), 3, "5 cells where the table has 5 columns", "cut off"),
        (log("| 1"), 3, "1 cells where", "cut off"),
        (
            log("| 1 | 1 | 0 | FULL | 3 |", "| 1 | 1 | 0 | FULL | -3 |"),
            4,
            "Count is '-3'",
            "Correct",
        ),
        (log("| x | 1 | 0 | FULL | 3 |"), 3, "Unpadded Tokens is 'x'", "Correct"),
        (
            log("| 1 | 1 | 0 | FULL_DECODE_ONLY | 3 |"),
            3,
            "not one of the runtime modes NONE",
            "Correct",
        ),
    ],
)
def test_bad_logs(refused: Any, text: str, line: int | None, message: str, remedy: str) -> None:
    refused(text, line, message, remedy)


# --- batches of several sizes -----------------------------------------------------------------------------------

SIZES = (Dim("batch", max=8), Dim("length", max=100))


@pytest.mark.parametrize(
    "text",
    [
        "batch,length,count\n2,50,3\n8,100,1\n9,1,4\n1,101,1\n",
        "length;batch\n50;2\n50;2\n50;2\n100;8\n" + "101;1\n" * 5,
        '{"batch": 2, "length": 50, "count": 3}\n{"length": 100, "batch": 8}\n{"batch": 9, "length": 1, "count": 5}\n',
    ],
)
def test_batches_of_several_sizes(tmp_path: Path, text: str) -> None:
    (tmp_path / "lengths.csv").write_text(text)
    found = read_sizes(tmp_path / "lengths.csv", SIZES, PLAN)
    assert (found.names, found.source) == (("batch", "length"), "lengths.csv")
    assert found.counts == {(2, 50): 3, (8, 100): 1}
    assert found.beyond == 5, "batches above a max are counted apart"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("batch,lenght\n1,2\n", "unknown column 'lenght' (did you mean 'length'?)"),
        ("batch\n1\n", "column 'length' is missing"),
        ("batch,length\n0,2\n", "lengths.csv:2: batch is '0'"),
        ("batch,length,count\n1,2,-1\n", "count is '-1'"),
        ("batch,length,count\n1,2,0\n9,9,1\n", "no batch up to {'batch': 8, 'length': 100}"),
        ('{"kind": "bench", "records": []}', "lengths.csv is a saved bench, not traffic"),
    ],
)
def test_bad_batches_of_several_sizes(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "lengths.csv").write_text(text)
    with pytest.raises(TrafficError) as raised:
        read_sizes(tmp_path / "lengths.csv", SIZES, PLAN)
    assert told in str(raised.value)


@pytest.mark.parametrize(("number", "is_few"), [(99, True), (100, False)])
def test_few_batches_of_several_sizes_are_told(tmp_path: Path, number: int, is_few: bool) -> None:
    (tmp_path / "lengths.csv").write_text(f"batch,length,count\n2,50,{number - 1}\n9,1,1\n")
    warnings = read_sizes(tmp_path / "lengths.csv", SIZES, PLAN).warnings
    assert (
        any("lengths.csv has 99 steps: let the server run" in each for each in warnings) is is_few
    )


def test_a_dimension_may_be_called_count(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("count,weight\n3,7\n")
    assert read_sizes(tmp_path / "lengths.csv", [Dim("count", max=8)], PLAN).counts == {(3,): 7}


@pytest.mark.parametrize(
    "text",
    [
        '{"kind": "traffic", "source": "", "histogram": [[[3, 3, true, 0], 2], [[9, 9, true, 0], 1], [[3, 3, false, 0], 5]]}',
        'cgplan_batches_total{num_tokens="3",uniform="true"} 7\ncgplan_batches_total{num_tokens="9",uniform="true"} 1\n',
    ],
)
def test_a_runner_counts_batches_of_one_dimension(tmp_path: Path, text: str) -> None:
    (tmp_path / "stats").write_text(text)
    found = read_sizes(tmp_path / "stats", [Dim("batch", max=8)], PLAN)
    assert (found.counts, found.beyond) == ({(3,): 7}, 1)
    told = "stats counts batches by one size, and `dims` has .* or capture a runner for each length"
    with pytest.raises(TrafficError, match=f"(?s){told}"):
        read_sizes(tmp_path / "stats", SIZES, PLAN)


def test_no_two_forms_have_the_same_columns() -> None:
    """The columns tell the form: of two alike the second would never be read."""
    columns = [frozenset(map(str.lower, form.columns)) for form in FORMS]
    assert len(set(columns)) == len(columns)


def test_dates_in_milliseconds_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1700158623980,4808,10\n")
    with pytest.raises(TrafficError, match="divide milliseconds by 1000"):
        read_traffic(path, PLAN)
