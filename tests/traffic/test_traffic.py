"""Traffic: its histogram, the files it is read from, what is guessed on the way, and what bad files are told."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgplan.config import Config
from cgplan.errors import ConfigError, TrafficError
from cgplan.traffic.files import read_traffic, synthetic_traffic
from cgplan.traffic.histogram import Batch, Traffic
from cgplan.traffic.rows import GUESSES
from cgplan.traffic.simulation import Limits, Request, simulate

DATA = Path(__file__).parents[1] / "data"
AZURE = DATA / "azure_llm_code_2023.csv"


def config_of(**sections: Any) -> Config:
    return Config.model_validate(sections)


LORA = config_of(lora={"max_loras": 4})
SPECULATIVE = config_of(speculative={"num_speculative_tokens": 1})


def step_time(batch: Batch) -> float:
    return 3300 + 22 * batch.num_tokens


def read(path: Path, config: Config | None = None, speedup: float = 1.0) -> Traffic:
    return read_traffic(path, config=config or Config(), step_time=step_time, speedup=speedup)


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def read_text(
        text: str | bytes, config: Config | None = None, name: str = "t.txt", speedup: float = 1.0
    ) -> Traffic:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read(path, config, speedup)

    return read_text


@pytest.fixture
def refused(written: Any) -> Any:
    def read_text(text: str | bytes, config: Config | None = None, speedup: float = 1.0) -> tuple[str, str]:
        with pytest.raises(TrafficError) as caught:
            written(text, config, speedup=speedup)
        assert "t.txt" in caught.value.message
        return caught.value.message, caught.value.remedy

    return read_text


# --- the value -------------------------------------------------------------------------------------------------

batches = st.builds(
    lambda reqs, q, uniform, loras: Batch(reqs * q, reqs, uniform, loras),
    st.integers(1, 50),
    st.integers(1, 9),
    st.booleans(),
    st.integers(0, 3),
)


@given(counts=st.lists(st.tuples(batches, st.integers(0, 1000)), min_size=1))
def test_a_histogram_holds_each_batch_once_and_reads_back_equal(counts: list[tuple[Batch, int]]) -> None:
    if not any(count for _, count in counts):
        with pytest.raises(TrafficError, match="no batch with a count above 0"):
            Traffic.of(counts, "drawn")
        return
    traffic = Traffic.of(counts, "drawn", ["a note"])
    found = [batch for batch, _ in traffic.histogram]
    assert found == sorted(set(found))
    assert traffic.total == sum(count for _, count in counts)
    assert traffic.max_tokens == max(batch.num_tokens for batch, count in counts if count)
    assert sum(traffic.by_tokens().values()) == traffic.total
    assert sum(traffic.by_tokens(uniform=True).values()) == sum(count for batch, count in counts if batch.uniform)
    assert Traffic.from_json(traffic.model_dump_json()) == traffic
    assert Traffic.from_json(traffic.model_dump_json(indent=2)) == traffic


@pytest.mark.parametrize("count", [-1.0, float("nan"), float("inf")])
def test_counts_of_the_value_are_not_negative_and_finite(count: float) -> None:
    with pytest.raises(TrafficError, match="has count") as caught:
        Traffic.of({Batch(1, 1): count}, "here")
    assert "from 0 up" in caught.value.remedy


@pytest.mark.parametrize("batch", [Batch(0, 0), Batch(1, 2), Batch(1, 1, False, -1)])
def test_batches_of_the_value_can_be(batch: Batch) -> None:
    with pytest.raises(TrafficError, match="cannot be a batch") as caught:
        Traffic.of({batch: 1}, "here")
    assert "at least 1 request" in caught.value.remedy


# --- histograms ------------------------------------------------------------------------------------------------

WHOLE = "num_tokens,count,num_reqs,uniform,num_active_loras\n8,3,8,true,0\n100,2,4,False,2\n8,1,8,1,0\n"


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.log", "t"])
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
        WHOLE.replace("100,2,4", "100.0,2.0,4"),
        "count,uniform,num_tokens,num_active_loras,num_reqs\n4,1,8,0,8\n0,1,9,0,9\n2,0,100,2,4\n",
    ],
)
def test_a_histogram_in_csv(written: Any, text: str, name: str) -> None:
    traffic = written(text, LORA, name)
    assert dict(traffic.histogram) == {Batch(8, 8, True, 0): 4, Batch(100, 4, False, 2): 2}
    assert traffic.source == f"{name}: histogram"
    assert traffic.notes == (), "nothing was guessed"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_a_histogram_in_lines_of_json(written: Any, end: str) -> None:
    rows = [
        {"num_tokens": 8, "count": 3, "num_reqs": 8, "uniform": True, "num_active_loras": 0},
        {"count": 2.0, "num_tokens": 100, "num_reqs": 4, "uniform": False, "num_active_loras": 2},
    ]
    traffic = written(end.join(map(json.dumps, rows)) + end, LORA)
    assert dict(traffic.histogram) == {Batch(8, 8, True, 0): 3, Batch(100, 4, False, 2): 2}
    assert written(json.dumps(rows[0])).total == 3, "one line alone"


def test_what_a_histogram_does_not_say_is_guessed_and_noted(written: Any) -> None:
    traffic = written("num_tokens,count\n6,1\n7,1\n512,1\n514,1\n", SPECULATIVE)
    assert [batch for batch, _ in traffic.histogram] == [
        Batch(6, 3, True),
        Batch(7, 7, False),
        Batch(512, 256, True),
        Batch(514, 256, False),
    ]
    assert traffic.notes == (
        f"of 4 steps with 1,039 tokens, {GUESSES['uniform']}; 2 of these steps are taken as uniform",
        GUESSES["num_reqs"],
        GUESSES["num_active_loras"],
    )
    part = written("num_tokens,count,uniform\n6,3,\n7,2,\n8,90,true\n9,0,\n", SPECULATIVE)
    assert part.notes[0].startswith("of 5 steps with 32 tokens, whether")
    assert part.notes[0].endswith("3 of these steps are taken as uniform")


def test_requests_and_uniform_follow_from_each_other(written: Any) -> None:
    reqs = written("num_tokens,count,num_reqs\n6,1,3\n6,1,2\n", SPECULATIVE)
    assert [batch for batch, _ in reqs.histogram] == [Batch(6, 2, False), Batch(6, 3, True)]
    uniform = written("num_tokens,count,uniform\n6,1,true\n6,1,false\n6,1,\n", SPECULATIVE)
    assert dict(uniform.histogram) == {Batch(6, 6, False): 1, Batch(6, 3, True): 2}


def test_batches_beyond_the_scheduler_are_kept_and_noted(written: Any) -> None:
    config = config_of(scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 64})
    traffic = written("num_tokens,count,num_reqs,uniform,num_active_loras\n65,1,4,0,0\n5,1,5,1,0\n4,2,4,1,0\n", config)
    assert traffic.total == 4
    assert traffic.notes == (
        "50.0% of the steps are larger than this scheduler makes them (max_num_seqs 4, max_num_batched_tokens 64)",
    )


@pytest.mark.parametrize(
    ("text", "line", "message", "remedy"),
    [
        ("num_tokens,count\n", "", "no batch with a count above 0", "Give traffic with a batch"),
        ("num_tokens,count\n1,0\n2,0\n", "", "no batch with a count above 0", "Give traffic with a batch"),
        ("num_tokens,count\n1,1\n2,-3\n", 3, "count is '-3', not a whole number from 0", "Correct that row"),
        ("num_tokens,count\n1,1.5\n", 2, "count is '1.5', not a whole number", "Correct"),
        ("num_tokens,count\n1,nan\n", 2, "count is 'nan', not a whole number", "Correct"),
        ("num_tokens,count\n1,inf\n", 2, "count is 'inf', not a whole number", "Correct"),
        ("num_tokens,count\n1,many\n", 2, "count is 'many', not a whole number", "Correct"),
        ("num_tokens,count\n1,\n", 2, "count is '', not a whole number", "Correct"),
        ("num_tokens,count\n1,1e400\n", 2, "count is '1e400', not a whole number from 0 to", "Correct"),
        ("num_tokens,count\n1," + "9" * 5000 + "\n", 2, "count is '9999", "Correct"),
        ("num_tokens,count\n0,1\n", 2, "num_tokens is '0', not a whole number from 1", "Correct"),
        (
            "num_tokens,count\n1048577,1\n",
            2,
            "num_tokens is '1048577', not a whole number from 1 to 1048576",
            "Correct",
        ),
        ("num_tokens,count\n1,1\n2\n", 3, "1 fields, but the header has 2", "one value for each column"),
        ("num_tokens,count\n1,1,1\n", 2, "3 fields, but the header has 2", "one value for each column"),
        ("num_token,count\n1,1\n", 1, "unknown column 'num_token' (did you mean 'num_tokens'?)", "num_reqs, uniform"),
        (
            "num_tokens,count,colour\n1,1,1\n",
            1,
            "unknown column 'colour'",
            "a histogram has num_tokens, count, and may",
        ),
        ("num_tokens,num_reqs\n1,1\n", 1, "column 'count' is missing", "a histogram has num_tokens, count"),
        ("\nnum_reqs,count\n1,1\n", 2, "column 'num_tokens' is missing", "a histogram has"),
        ("num_tokens,count,count\n1,1,1\n", 1, "column 'count' stands twice", "Keep one"),
        ("num_tokens\tcount\n1\t1\n", 1, "the columns are separated by tabs", "commas, as in num_tokens,count"),
        ("\nnum_tokens; count;uniform\n1;1;0\n", 2, "the columns are separated by semicolons", "Separate them"),
        ("num_tokens  count\n1 1\n", 1, "the columns are separated by spaces", "Separate them"),
        ("num_tokens, count,colour\n1,1,1\n", 1, "unknown column 'colour'", "a histogram has"),
        ("TIMESTAMP|ContextTokens|GeneratedTokens\n1|1|0\n", 1, "the columns are separated by bars", "Separate them"),
        ("num_tokens,count,uniform\n1,1,maybe\n", 2, "uniform is 'maybe'", "true or false"),
        ("num_tokens,count,num_reqs\n2,1,3\n", 2, "3 requests have 2 tokens", "Correct that batch"),
        ("num_tokens,count,num_reqs\n2,1,0\n", 2, "num_reqs is '0', not a whole number from 1", "Correct"),
        ("num_tokens,count,num_active_loras\n2,1,-1\n", 2, "num_active_loras is '-1'", "Correct"),
        (
            "num_tokens,count,num_active_loras\n2,1,1\n",
            2,
            "1 active LoRA adapters, the configuration",
            "`lora` section",
        ),
        (
            "num_tokens,count,num_reqs,uniform\n6,1,3,1\n",
            2,
            "6 tokens for 3 requests, but the query length is 1",
            "spec",
        ),
        ('{"num_tokens": 1, "count": 1}\n{"num_tokens": 1}\n', 2, "column 'count' is missing", "a histogram has"),
        ('{"num_tokens": 1, "count": 1}\n{"num_tokens": 1,\n', 2, "not JSON", "one JSON object a line"),
        ('{"num_tokens": 1, "count": 1}\n[1]\n', 2, "[1] is not an object", "one JSON object a line"),
        ('{"num_tokens": 1, "cout": 1}\n', 1, "unknown column 'cout' (did you mean 'count'?)", "a histogram has"),
        ('{"num_tokens": true, "count": 1}\n', 1, "num_tokens is True", "Correct"),
        ('{"num_tokens": 1, "count": NaN}\n', 1, "count is nan", "Correct"),
        ('{"num_tokens": 1, "count": [1]}\n', 1, "count is [1]", "Correct"),
        ('{"num_tokens": 1, "count": ' + "9" * 5000 + "}\n", 1, "not JSON", "one JSON object a line"),
        ('{"num_tokens": 1, "count": ' + "[" * 100_000 + "}\n", 1, "not JSON", "one JSON object a line"),
    ],
)
def test_bad_histograms(refused: Any, text: str, line: int | str, message: str, remedy: str) -> None:
    found, advice = refused(text)
    assert message in found
    assert f"t.txt:{line}: " in found or not line
    assert remedy in advice
    assert len(found) < 500, "what was found is cut short"


# --- files that are none ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        (b"", "is empty", "Give a file"),
        (b" \r\n\n", "is empty", "Give a file"),
        (b"\xef\xbb\xbf", "is empty", "Give a file"),
        (b"num_tokens,count\n1,1\n\xff\xfe\n", "t.txt:3: not UTF-8", "save it as UTF-8"),
        (b"\x1f\x8b\x08\x00\x00", "t.txt:1: not UTF-8", "Unpack it"),
        ("num_tokens,count\n1,1\n".encode("utf-16"), "t.txt:1: not UTF-8", "save it as UTF-8"),
        ("num_tokens,count\n1,1\n".encode("utf-16-le"), "holds NUL bytes", "save it as UTF-8"),
        (b"a,b\n1,2\n", "unknown columns 'a', 'b'", "a histogram has num_tokens, count"),
        (b"1,2\n3,4\n", "the first line holds numbers, not the names of columns", "such as num_tokens,count"),
        (b"[1, 2]\n", "the first line holds numbers", "such as num_tokens,count"),
        (b"hello\n", "unknown columns 'hello'", "a request trace has TIMESTAMP"),
        (b'[{"num_tokens": 1, "count": 1}]\n', "unknown columns", "a histogram has"),
        (b"{}\n", "no column has a name", "a Mooncake trace has timestamp"),
        (b",,\n1,2,3\n", "no column has a name", "a histogram has num_tokens, count"),
        (b'"",colour\n1,2\n', "unknown columns 'colour'", "a histogram has num_tokens, count"),
        (b'{"kind": "plan"}', "holds a plan, not traffic", "a plan or report is none"),
        (b'{\n"a": 1\n}', "unknown columns 'a'", "a histogram has"),
        (b'{"kind": "traffic"}', "histogram: Field required", "as it was saved"),
        (b'{"kind": "traffic", "source": "", "histogram": []}', "no batch with a count above 0", "with a batch"),
        (b'{"kind": "traffic", "source": "", "histogram": [[[1], 1]]}', "histogram.0.0", "as it was saved"),
        (b'{"kind": "traffic", "source": "", "histogram": [[[1, 1], -1]]}', "has count -1.0", "from 0 up"),
        (
            b'{"kind": "traffic", "source": "", "histogram": [[[6, 3, true], 1]]}',
            "the query length is 1",
            "speculative",
        ),
        (b'{"kind": "traffic", "source": "", "histogram": [[[9999999, 3], 1]]}', "9999999 tokens", "1048576 tokens"),
        (b'{"kind": "traffic", "source": "", "histogram": [[[9, 9, true, 1], 1]]}', "1 active LoRA", "`lora` section"),
    ],
)
def test_files_that_hold_no_traffic(refused: Any, text: bytes, message: str, remedy: str) -> None:
    found, advice = refused(text)
    assert message in found
    assert remedy in advice


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "azure_code.csv").touch()
    with pytest.raises(TrafficError, match="no such file") as caught:
        read(tmp_path / "azurecode.csv")
    assert f"Did you mean {tmp_path / 'azure_code.csv'}?" in caught.value.remedy
    with pytest.raises(TrafficError, match="no such file") as caught:
        read(tmp_path / "nowhere" / "t.csv")
    assert caught.value.remedy.startswith(f"There is no folder {tmp_path / 'nowhere'}. Give")


def test_a_missing_file_without_a_near_name_is_told_what_is_there(tmp_path: Path) -> None:
    for name in ("azure_2023.csv", "histogram.csv", "plan.json"):
        (tmp_path / name).touch()
    with pytest.raises(TrafficError) as caught:
        read(tmp_path / "nope.csv")
    assert caught.value.remedy.startswith("That folder has azure_2023.csv, histogram.csv. Give")
    for name in ("it.csv", "synthetic.csv"):
        (tmp_path / name).touch()
    with pytest.raises(TrafficError) as caught:
        read(tmp_path / "nope.csv")
    assert caught.value.remedy.startswith("That folder has azure_2023.csv, histogram.csv, it.csv and 1 more. Give")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(TrafficError, match="cannot read") as caught:
        read(tmp_path)
    assert "readable file" in caught.value.remedy


@given(junk=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_junk_is_refused_as_such(junk: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "junk"
    path.write_bytes(junk)
    with pytest.raises(TrafficError):
        read(path)


@given(
    cells=st.lists(
        st.lists(st.text(alphabet='0123456789.,-+eE_ "naif:TZ\r\x1c\u0661', max_size=12), max_size=4), max_size=4
    )
)
def test_junk_below_a_header_is_refused_or_read(
    cells: list[list[str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    for header in ("num_tokens,count,num_reqs,uniform", "TIMESTAMP,ContextTokens,GeneratedTokens"):
        path = tmp_path_factory.getbasetemp() / "rows"
        path.write_text("\n".join([header, *map(",".join, cells)]), encoding="utf-8")
        try:
            assert read(path).total > 0
        except TrafficError as error:
            assert "rows" in error.message  # noqa: PT017


# --- request traces --------------------------------------------------------------------------------------------


def test_the_azure_trace_becomes_steps() -> None:
    traffic = read(AZURE)
    rows = [line.split(",") for line in AZURE.read_text().splitlines()[1:]]
    prompts, generated = (sum(int(row[i]) for row in rows) for i in (1, 2))
    tokens = sum(batch.num_tokens * weight for batch, weight in traffic.histogram)
    assert tokens == prompts + generated - len(rows), "each prefill yields the first token"
    assert traffic.source == "azure_llm_code_2023.csv: 8819 requests"
    assert {batch.num_active_loras for batch, _ in traffic.histogram} == {0}
    faster = read(AZURE, speedup=8)
    assert faster.total < traffic.total, "the same tokens in fewer, larger steps"
    assert faster.source == "azure_llm_code_2023.csv: 8819 requests, 8 times as fast as recorded"
    assert max(b.num_reqs for b, _ in faster.histogram) > max(b.num_reqs for b, _ in traffic.histogram)


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
    assert dict(written(text).histogram) == {Batch(7, 1): 2, Batch(1, 1, True): 8}
    assert dict(written(text, speedup=1000).histogram) == {
        Batch(7, 1): 1,
        Batch(8, 2): 1,
        Batch(2, 2, True): 3,
        Batch(1, 1, True): 1,
    }


def test_a_mooncake_trace() -> None:
    traffic = read(DATA / "mooncake.jsonl")
    requests = [Request(0, 675, 50), Request(0, 1732, 9), Request(3e6, 9, 1), Request(5.999e6, 2309, 0)]
    assert traffic.histogram == simulate(requests, Limits(256, 8192), step_time).histogram
    assert traffic.source == "mooncake.jsonl: 4 requests"


def test_a_trace_may_name_adapters(written: Any) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens,Adapter\n1,5,3,0\n1,5,3,\n1,5,3,7\n"
    assert dict(written(text, LORA).histogram) == {Batch(15, 3, False, 2): 1, Batch(3, 3, True, 2): 2}
    lines = '{"timestamp": 0, "input_length": 5, "output_length": 3, "adapter": 1}\n'
    assert dict(written(lines, LORA).histogram) == {Batch(5, 1, False, 1): 1, Batch(1, 1, True, 1): 2}


def test_requests_without_a_prompt_are_left_out_and_noted(written: Any) -> None:
    traffic = written("TIMESTAMP,ContextTokens,GeneratedTokens\n1,0,3\n1,5,1\n")
    assert dict(traffic.histogram) == {Batch(5, 1): 1}
    assert traffic.notes[0] == "1 requests without a prompt were left out"


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
MOON = '{"timestamp": %s, "input_length": 1, "output_length": 1}\n'


@pytest.mark.parametrize(
    ("text", "line", "message", "remedy"),
    [
        (HEAD, "", "no request with a prompt", "at least one request"),
        (HEAD + "1,0,1\n", "", "no request with a prompt", "at least one request"),
        (HEAD + "2,1,1\n3,1,1\n2.5,1,1\n", 4, "TIMESTAMP 2.5 is before that of the row above", "Sort the rows"),
        (HEAD + "2023-11-16 18:17:03.5,1,1\n2023-11-16 18:17:03.4,1,1\n", 3, "TIMESTAMP 2023-11-16", "Sort the rows"),
        (HEAD + "yesterday,1,1\n", 2, "TIMESTAMP 'yesterday' is neither a date and time nor seconds", "as in 2023-11"),
        (HEAD + "2023-13-45 00:00:00,1,1\n", 2, "TIMESTAMP '2023-13-45 00:00:00' is neither", "as in 2023-11"),
        (HEAD + ",1,1\n", 2, "TIMESTAMP '' is neither", "as in 2023-11"),
        (HEAD + "nan,1,1\n", 2, "TIMESTAMP 'nan' is neither", "as in 2023-11"),
        (HEAD + "1,1,1\n1e999,1,1\n", 3, "a timestamp of inf us makes no sense", "Correct"),
        (HEAD + "1,1,1\n2023-11-16 18:17:03,1,1\n", 3, "another form than that of the first row", "all of them alike"),
        (HEAD + "2023-11-16 18:17:03,1,1\n2023-11-16 18:17:03Z,1,1\n", 3, "another form than that of the", "time zone"),
        (HEAD + "1,-1,1\n", 2, "ContextTokens is '-1', not a whole number from 0", "Correct"),
        (HEAD + "1,1,1.5\n", 2, "GeneratedTokens is '1.5'", "Correct"),
        (HEAD + "1,1,99999999999\n", 2, "GeneratedTokens is '99999999999', not a whole number from 0 to", "Correct"),
        (HEAD + "1,1\n", 2, "2 fields, but the header has 3", "one value for each column"),
        (
            HEAD.replace("Context", "Prompt") + "1,1,1\n",
            1,
            "unknown column 'PromptTokens'",
            "a request trace has TIMESTAMP",
        ),
        (HEAD.replace("ContextTokens", "ContextToken") + "1,1,1\n", 1, "(did you mean 'ContextTokens'?)", "a request"),
        ("TIMESTAMP,ContextTokens\n1,1\n", 1, "column 'GeneratedTokens' is missing", "a request trace has TIMESTAMP"),
        (HEAD.replace("\n", ",Adapter\n") + "1,1,1,2\n", 2, "the request uses an adapter, but", "Add a `lora` section"),
        (
            HEAD.replace("\n", ",Adapter\n") + "1,1,1,\n1,1,1,sql-lora\n",
            3,
            "Adapter is 'sql-lora', not a whole number from 0",
            "Write adapters as numbers from 0 up, one for each name, and leave the field empty for none",
        ),
        (MOON % 5 + MOON % 4, 2, "timestamp 4 is before that of the row above", "Sort the rows"),
        (MOON % '"5"', 1, "timestamp '5' is not a number", "milliseconds"),
        (MOON % "true", 1, "timestamp True is not a number", "milliseconds"),
        (MOON % "NaN", 1, "a timestamp of nan us makes no sense", "Correct"),
        (MOON % "1" + MOON % "Infinity", 2, "a timestamp of inf us makes no sense", "Correct"),
        (
            '{"timestamp": 1, "input_length": 1}\n',
            1,
            "column 'output_length' is missing",
            "a Mooncake trace has timestamp",
        ),
        (
            '{"timestamp": 1, "input_lenght": 1, "output_length": 1}\n',
            1,
            "(did you mean 'input_length'?)",
            "a Mooncake",
        ),
    ],
)
def test_bad_traces(refused: Any, text: str, line: int | str, message: str, remedy: str) -> None:
    found, advice = refused(text)
    assert message in found
    assert f"t.txt:{line}: " in found or not line
    assert remedy in advice


@pytest.mark.parametrize("speedup", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speedup_is_a_number_above_0(speedup: float) -> None:
    with pytest.raises(TrafficError, match=r"a speedup of .* makes no sense") as caught:
        read(AZURE, speedup=speedup)
    assert "above 0" in caught.value.remedy


def test_steps_cannot_be_sped_up(refused: Any) -> None:
    found, advice = refused("num_tokens,count\n1,1\n", speedup=2)
    assert "cannot be sped up" in found
    assert "Leave the speedup out" in advice


# --- logs of vLLM ----------------------------------------------------------------------------------------------

TABLE = "| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |\n|---|---|---|---|---|\n"


def log(*rows: str, mode: str = "") -> str:
    settings = f"INFO 11-20 x.py:1] - Mode: {mode}\n- Capture sizes: [1, 2, 64]\n" if mode else ""
    return settings + TABLE + "".join(f"INFO 11-20 [x.py:12] {row}\n" for row in rows)


def test_a_log_with_two_tables() -> None:
    traffic = read(DATA / "vllm.log")
    assert dict(traffic.histogram) == {
        Batch(1, 1, True): 40,
        Batch(3, 3, True): 20,
        Batch(29, 29, False): 2,
        Batch(40, 40, True): 3,
        Batch(415, 256, False): 1,
    }
    assert traffic.source == "vllm.log: vLLM log"
    assert "2 tables were added up" in traffic.notes[0]
    assert "tells uniform decode from mixed batches for 62 steps" in traffic.notes[1]
    assert traffic.notes[2].startswith("of 4 steps with 535 tokens, whether a batch is uniform decode was guessed")
    assert traffic.notes[2].endswith("; 3 of these steps are taken as uniform")


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
def test_uniform_is_told_by_the_mode_or_guessed(written: Any, mode: str, uniform: dict[str, bool]) -> None:
    for ran_as, expected in uniform.items():
        traffic = written(log(f"| 9 | 9 | 0 | {ran_as} | 5 |", mode=mode))
        assert dict(traffic.histogram) == {Batch(9, 9, expected): 5}
        told = mode.endswith(("ONLY", "AND_PIECEWISE"))
        assert any("the runtime mode tells" in note for note in traffic.notes) == told
        assert any("of 5 steps with 45 tokens, whether" in note for note in traffic.notes) != told


SERVER = {"max_num_seqs": 64, "max_num_batched_tokens": 256}


def other_server(text: str, written: Any, **compilation: Any) -> list[str]:
    notes = written(text, config_of(compilation=compilation, scheduler=SERVER)).notes
    return [note for note in notes if "the log" in note]


def test_a_log_of_another_ladder_says_what_differs(written: Any) -> None:
    text = log("| 9 | 64 | 55 | FULL | 5 |", mode="FULL_DECODE_ONLY")
    same = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 64]}
    assert other_server(text, written, **same) == []
    assert other_server(text, written, **{**same, "cudagraph_mode": "FULL"}) == [
        "the log's server ran with cudagraph_mode FULL_DECODE_ONLY, the configuration comes to FULL"
    ]
    assert other_server(text, written, **{**same, "cudagraph_capture_sizes": [2, 4, 8]}) == [
        "the log's server captured 3 sizes up to 64, the configuration without traffic 3 up to 8: 1, 64 not here; "
        "4, 8 only here"
    ]
    (many,) = other_server(text, written, cudagraph_mode="FULL_DECODE_ONLY")
    assert "only here" in many
    assert " more only here" in many


def test_a_log_that_names_no_ladder_is_compared_by_what_ran(written: Any) -> None:
    text = log("| 9 | 24 | 15 | FULL | 5 |", "| 3 | 4 | 1 | FULL | 7 |", "| 65 | 65 | 0 | NONE | 1 |")
    sizes = {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [4, 24]}
    assert other_server(text, written, **sizes) == []
    assert other_server(text, written, **{**sizes, "cudagraph_capture_sizes": [4, 8]}) == [
        "5 steps of the log were padded to sizes that the configuration does not have without traffic: 24"
    ]


def test_above_the_largest_capture_size_the_mode_tells_nothing(written: Any) -> None:
    rows = ("| 64 | 64 | 0 | PIECEWISE | 1 |", "| 65 | 65 | 0 | NONE | 1 |", "| 257 | 257 | 0 | NONE | 1 |")
    traffic = written(log(*rows, mode="FULL_AND_PIECEWISE"))
    assert [batch.uniform for batch, _ in traffic.histogram] == [False, True, False]


def test_a_query_length_that_is_not_the_servers_is_noted(written: Any) -> None:
    traffic = written(log("| 9 | 9 | 0 | FULL | 5 |", "| 8 | 8 | 0 | FULL | 1 |", mode="FULL_DECODE_ONLY"), SPECULATIVE)
    assert dict(traffic.histogram) == {Batch(8, 4, True): 1, Batch(9, 9, False): 5}
    assert any(note.startswith("5 steps ran as uniform decode with a number of tokens") for note in traffic.notes)


@pytest.mark.parametrize(
    "prefix", ["", "\x1b[0;36m(EngineCore pid=1)\x1b[0;0m INFO 1 [a.py:1] ", "2025-11-20 | INFO | a:1 - "]
)
def test_what_stands_before_a_row_does_not_matter(written: Any, prefix: str) -> None:
    text = "".join(
        f"{prefix}{line}\r\n" for line in (*TABLE.splitlines(), "| 12 | 16 | 4 | PIECEWISE | 7 |", "other | 5 things")
    )
    assert dict(written(text).histogram) == {Batch(12, 12, True): 7}


@pytest.mark.parametrize(
    ("text", "line", "message", "remedy"),
    [
        (
            "INFO 11-20 started\nINFO done\n",
            "",
            "the log holds no table of CUDA graph statistics",
            "--cudagraph-metrics",
        ),
        (TABLE, "", "no batch with a count above 0", "Give traffic with a batch"),
        (log("| 1 | 1 | 0 | FULL | 0 |"), "", "no batch with a count above 0", "Give traffic with a batch"),
        (log("| 1 | 1 | 0 | FULL |"), 3, "4 cells where the table has 5 columns", "cut off"),
        (log("| 1 | 1 | 0 | FULL | 3"), 3, "5 cells where the table has 5 columns", "cut off"),
        (log("| 1"), 3, "1 cells where", "cut off"),
        (log("| 1 | 1 | 0 | FULL | 3 |", "| 1 | 1 | 0 | FULL | -3 |"), 4, "Count is '-3', not a whole", "Correct"),
        (log("| x | 1 | 0 | FULL | 3 |"), 3, "Unpadded Tokens is 'x'", "Correct"),
        (log("| 0 | 0 | 0 | FULL | 3 |"), 3, "Unpadded Tokens is '0'", "Correct"),
        (log("| 1 | 1 | 0 | HALF | 3 |"), 3, "unknown runtime mode 'HALF'", "NONE, PIECEWISE, FULL"),
        (log("| 1 | 1 | 0 | FULL_DECODE_ONLY | 3 |"), 3, "unknown runtime mode", "NONE, PIECEWISE, FULL"),
        (log("| 1 | 4 | 0 | FULL | 3 |"), 3, "4 padded tokens are not 1 and 0 paddings", "damaged"),
    ],
)
def test_bad_logs(refused: Any, text: str, line: int | str, message: str, remedy: str) -> None:
    found, advice = refused(text)
    assert (f"t.txt:{line}: {message}" if line else message) in found
    assert remedy in advice


# --- saved traffic, and traffic that is made up ----------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 2])
def test_saved_traffic_reads_back(written: Any, indent: int | None) -> None:
    traffic = Traffic.of({Batch(4, 4, True): 1.5, Batch(9, 2): 2}, "somewhere", ["a note"])
    assert written(traffic.model_dump_json(indent=indent)) == traffic


MADE = {"request_rate": 20, "num_requests": 4000, "prompt_median": 400, "prompt_p95": 2000}
MADE |= {"output_median": 50, "output_p95": 200}


def test_synthetic_traffic_has_the_lengths_and_the_rate_that_were_asked_for() -> None:
    seen: list[Request] = []

    def keep(requests: Any, limits: Limits, time_of: Any, *, source: str) -> Traffic:
        seen.extend(requests)
        return simulate(seen, limits, time_of, source=source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cgplan.traffic.files.simulate", keep)
        traffic = synthetic_traffic(config_of(traffic=MADE), step_time)
    assert traffic.source == "synthetic: 4000 requests, 20 a second, seed 0"
    prompts, outputs = (sorted(request[i] for request in seen) for i in (1, 2))
    for lengths, median, p95 in ((prompts, 400, 2000), (outputs, 50, 200)):
        assert lengths[2000] == pytest.approx(median, rel=0.1)
        assert lengths[3800] == pytest.approx(p95, rel=0.1)
    assert seen[-1].arrival_us == pytest.approx(4000 / 20 * 1e6, rel=0.1)
    gaps = [b.arrival_us - a.arrival_us for a, b in pairwise(seen)]
    above_mean = sum(gap > 1e6 / 20 for gap in gaps) / len(gaps)
    assert above_mean == pytest.approx(0.368, abs=0.03), "1 / e of exponential times are above their mean"


def test_equal_seeds_give_equal_traffic() -> None:
    first, again, other = (synthetic_traffic(config_of(traffic=MADE | {"seed": s}), step_time) for s in (1, 1, 2))
    assert first == again
    assert first.histogram != other.histogram


def test_synthetic_lengths_may_be_fixed() -> None:
    fixed = MADE | {"prompt_median": 7, "prompt_p95": 7, "output_median": 1, "output_p95": 1, "request_rate": 0.001}
    assert dict(synthetic_traffic(config_of(traffic=fixed), step_time).histogram) == {Batch(7, 1): 4000}


def test_synthetic_traffic_uses_adapters() -> None:
    lora = {"max_loras": 3}
    some = synthetic_traffic(config_of(traffic=MADE | {"lora_share": 0.5}, lora=lora), step_time)
    assert {batch.num_active_loras for batch, _ in some.histogram} == {0, 1, 2, 3}
    one = synthetic_traffic(config_of(traffic=MADE | {"lora_share": 1, "num_adapters": 1}, lora=lora), step_time)
    assert {batch.num_active_loras for batch, _ in one.histogram} == {1}
    none = synthetic_traffic(config_of(traffic=MADE, lora=lora), step_time)
    assert {batch.num_active_loras for batch, _ in none.histogram} == {0}


def test_without_a_traffic_section_there_is_nothing_to_plan_for() -> None:
    with pytest.raises(ConfigError, match="no traffic to plan for") as caught:
        synthetic_traffic(Config(), step_time)
    assert "`traffic` section" in caught.value.remedy


@pytest.mark.parametrize(
    ("batch", "count", "message"),
    [(Batch(1 << 28, 4), 1.0, "tokens is too large"), (Batch(4, 4), 1e300, "has count 1e\\+300")],
)
def test_what_would_overflow_is_refused(batch: Batch, count: float, message: str) -> None:
    with pytest.raises(TrafficError, match=message):
        Traffic.of({batch: count}, "t")
