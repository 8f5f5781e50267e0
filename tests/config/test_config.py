"""Configuration files: what is read, where each value came from, and what the messages of bad ones say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgplan.config import Config, Dim, Input, LoadedConfig, load_config, read_config, validate_config
from cgplan.errors import ConfigError, ConfigFileError
from cgplan.modes import AttentionSupport, CUDAGraphMode


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(text: str) -> Path:
        path = tmp_path / "c.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def failure(path: Path, *overrides: str, kind: type[ConfigError] = ConfigError) -> str:
    """The message of a configuration that is refused; it names the file."""
    with pytest.raises(ConfigError) as caught:
        read_config(path, overrides)
    assert type(caught.value) is kind
    assert caught.value.remedy
    return caught.value.message


# --- reading --------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    config = Config()
    assert config.compilation.cudagraph_mode is CUDAGraphMode.FULL
    assert config.compilation.attention_support is AttentionSupport.ALWAYS
    assert config.compilation.cudagraph_capture_sizes is None
    assert config.scheduler.max_num_seqs == 256
    assert config.query_len == 1
    assert (config.model, config.lora, dict(config.inputs)) == (None, None, {})


def test_a_whole_file(write: Any) -> None:
    config = load_config(
        write(
            """
model:
  target: my_model.py:build
  kwargs: {layers: 2}
  output_rows: num_reqs
device: cuda:1
inputs:
  x: {shape: [num_tokens, 3], dtype: torch.float16, pad: 0, example: normal}
metadata:
  starts: {shape: [num_reqs + 1], dtype: int32, pad: last, example: spread}
  flags: {shape: num_tokens, dtype: bool, pad: false}
compilation:
  cudagraph_mode: full_and_piecewise
  cudagraph_capture_sizes: [1, 2]
  attention_support: uniform_batch
scheduler: {max_num_seqs: 4}
lora: {max_loras: 2}
speculative: {num_speculative_tokens: 1}
"""
        )
    )
    assert config.model is not None
    assert config.model.kwargs == {"layers": 2}
    assert config.inputs["x"].dtype == "float16"
    assert config.metadata["starts"].row_dim == 0
    assert config.metadata["flags"].pad is False
    assert config.compilation.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE
    assert config.compilation.cudagraph_capture_sizes == (1, 2)
    assert config.query_len == 2
    assert config == Config.model_validate(config.model_dump(mode="json")), "its own dump reads back equal"


def test_an_empty_file_is_all_defaults(write: Any) -> None:
    assert load_config(write("")) == Config()
    assert load_config(write("# nothing\n")) == Config()


def test_configurations_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().device = "cpu"


# --- files that cannot be read --------------------------------------------------------------------------------


def test_a_missing_file_names_the_nearest(write: Any) -> None:
    path: Path = write("")
    with pytest.raises(ConfigFileError) as caught:
        load_config(path.with_name("cc.yaml"))
    assert "no such file" in caught.value.message
    assert "c.yaml?" in caught.value.remedy
    with pytest.raises(ConfigFileError, match="no such file"):
        load_config(path.parent / "nowhere" / "c.yaml")


def test_a_folder_and_bytes_are_no_yaml_file(tmp_path: Path) -> None:
    assert "cannot read" in failure(tmp_path, kind=ConfigFileError)
    (tmp_path / "b.yaml").write_bytes(b"a: \xff\xfe\n")
    assert "b.yaml:1: not UTF-8 text" in failure(tmp_path / "b.yaml", kind=ConfigFileError)


@pytest.mark.parametrize(
    ("text", "where", "complaint"),
    [
        ("device: cpu\na: b: c\n", ":2:5", "mapping values are not allowed"),
        ("scheduler: [1, 2\n", ":2:1", "expected ',' or ']'"),
        ("device: 'cpu\n", ":2:1", "unexpected end of stream"),
        ("a: 1\n---\nb: 2\n", ":2:1", "another document"),
        ("device: *missing\n", ":1:9", "undefined alias"),
        ("device: !!python/object:os.system {}\n", ":1:9", "could not determine a constructor"),
        ("device: cpu\n\tx: 1\n", ":2:1", "cannot start any token"),
        ("? [a, b]\n: 1\n", ":1:3", "key"),
        ("device: cpu\n? {a: 1}\n: 1\n", ":2:3", "key"),
        ("model: &a\n  kwargs: *a\n", ":1", "alias refers to itself"),
    ],
)
def test_text_that_is_not_yaml(write: Any, text: str, where: str, complaint: str) -> None:
    message = failure(write(text), kind=ConfigFileError)
    assert f"c.yaml{where}" in message
    assert complaint in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x: \x01\n", "not valid YAML"),
        ("device: !!int abc\n", "c.yaml:1:9: not valid YAML: 'abc' is not a valid int"),
        ("\ndevice: 2024-13-45\n", "c.yaml:2:9: not valid YAML: '2024-13-45' is not a valid timestamp"),
        ("device: !!int ''\n", "'' is not a valid int"),
        ("device: !!float _\n", "'_' is not a valid float"),
        ("device: !!bool abc\n", "'abc' is not a valid bool"),
        ("device: !!timestamp abc\n", "'abc' is not a valid timestamp"),
        (f"device: {'9' * 5000}\n", f"'{'9' * 40}' is not a valid int"),
        (f"device: {'[' * 3000}\n", "nested too deeply"),
    ],
)
def test_values_that_yaml_itself_refuses(write: Any, text: str, expected: str) -> None:
    assert expected in failure(write(text), kind=ConfigFileError)
    given = text.partition(": ")[2].strip()
    with pytest.raises(ConfigError, match="--set device: the value is n"):
        read_config(write(""), [f"device={given}"])


@pytest.mark.parametrize(("text", "kind"), [("- 1\n", "list"), ("hello\n", "str"), ("3\n", "int")])
def test_a_document_that_is_no_mapping(write: Any, text: str, kind: str) -> None:
    assert f"holds a {kind}, not a mapping" in failure(write(text), kind=ConfigFileError)


def test_a_key_that_stands_twice(write: Any) -> None:
    text = "scheduler:\n  max_num_seqs: 1\n  max_num_batched_tokens: 8\n  max_num_seqs: 2\n"
    message = failure(write(text), kind=ConfigFileError)
    assert "c.yaml:4" in message
    assert "'max_num_seqs' stands twice (first in line 2)" in message


# --- wrong keys and values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "compilation:\n  cudagraph_mod: FULL\n",
            "line 2: unknown key 'compilation.cudagraph_mod' (did you mean 'cuda",
        ),
        ("\n\nshceduler: {}\n", "line 3: unknown key 'shceduler' (did you mean 'scheduler'?)"),
        ("cudagraph_mode: FULL\n", "line 1: unknown key 'cudagraph_mode' (it belongs under 'compilation')"),
        ("report:\n  zzz: 1\n", "(allowed here: sizes, repeats, warmups, nvtx)"),
        (
            "inputs:\n  x:\n    dtype: int8\n    shape: [1]\n    pads: 0\n",
            "line 5: unknown key 'inputs.x.pads' (did you",
        ),
        ("inputs:\n  x: {shape: [2], dtype: int8}\n", "line 2: 'inputs.x.pad' is missing"),
        ("lora:\n  rank: 4\n", "line 1: 'lora.max_loras' is missing"),
        (
            "scheduler:\n  max_num_seqs: many\n",
            "line 2: scheduler.max_num_seqs: found 'many', expected a valid integer",
        ),
        ("scheduler:\n  max_num_seqs: 0\n", "line 2: scheduler.max_num_seqs: found 0, expected greater than or equal"),
        ("scheduler:\n  max_num_seqs: 1.0\n", "found 1.0"),
        ("scheduler:\n  max_num_seqs: true\n", "found True"),
        ("scheduler: 3\n", "line 1: scheduler: found 3"),
        ("inputs:\n", "line 1: inputs: found None"),
        ("compilation:\n  cudagraph_copy_inputs: 1\n", "found 1, expected a valid boolean"),
        ("compilation:\n  splitting_modules: a.*\n", "splitting_modules: found 'a.*', expected a list"),
        ("compilation:\n  outputs: borow\n", "found 'borow', expected 'borrow' or 'clone'"),
        ("compilation:\n  cudagraph_mode: FULL_DECODE\n", "did you mean FULL_DECODE_ONLY?"),
        ("compilation:\n  attention_support: 3\n", "unknown attention_support 3"),
        (
            "compilation:\n  cudagraph_mode:\n",
            "line 2: compilation.cudagraph_mode: cudagraph_mode has no value",
        ),
        ("compilation: {attention_support: null}\n", "line 1: compilation.attention_support: attention_support has no"),
        ("device: gpu\n", "line 1: device: found 'gpu'"),
        ("speculative: {num_speculative_tokens: -1}\n", "found -1"),
        ("report: {sizes: [0]}\n", "line 1: report.sizes.0: a capture size must be at least 1, found 0"),
        ("model: {target: a:b, output_rows: rows}\n", "found 'rows', expected 'num_tokens' or 'num_reqs'"),
    ],
)
def test_messages_name_the_line_the_key_and_what_is_allowed(write: Any, text: str, expected: str) -> None:
    message = failure(write(text))
    assert "c.yaml" in message
    assert expected in message
    assert "pydantic" not in message


def test_all_mistakes_are_listed_at_once(write: Any) -> None:
    message = failure(write("device: gpu\nscheduler:\n  max_num_seqs: 0\n  max_num_tokens: 3\n"))
    assert message.count("\n  - ") == 3
    assert "line 1" in message
    assert "line 3" in message
    assert "line 4: unknown key 'scheduler.max_num_tokens' (did you mean 'max_num_batched_tokens'?)" in message


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ("[]", "line 2: compilation.cudagraph_capture_sizes: the list of capture sizes is empty"),
        ("[1, 0]", "line 2: compilation.cudagraph_capture_sizes.1: a capture size must be at least 1, found 0"),
        ("[-4]", "compilation.cudagraph_capture_sizes.0: a capture size must be at least 1, found -4"),
        ("[1, 2.5]", "sizes.1: a capture size must be a whole number, found 2.5"),
        ("[true]", "sizes.0: a capture size must be a whole number, found True"),
        ("['4']", "sizes.0: a capture size must be a whole number, found '4'"),
        ("[[4]]", "sizes.0: a capture size must be a whole number, found [4]"),
        ("sglan", "unknown ladder 'sglan'; choose one of vllm, sglang, trtllm, powers_of_two"),
        ("8", "compilation.cudagraph_capture_sizes: found 8"),
        ("[1, 4]\n  max_cudagraph_capture_size: 8", "is 8, but the largest of cudagraph_capture_sizes is 4"),
    ],
)
def test_bad_capture_sizes(write: Any, sizes: str, expected: str) -> None:
    assert expected in failure(write(f"compilation:\n  cudagraph_capture_sizes: {sizes}\n"))


def test_sizes_and_a_maximum_may_agree(write: Any) -> None:
    text = "compilation:\n  cudagraph_capture_sizes: [8, 1]\n  max_cudagraph_capture_size: 8\n"
    assert load_config(write(text)).compilation.max_cudagraph_capture_size == 8


def test_names_that_cannot_be_inputs(write: Any) -> None:
    one = "{shape: num_tokens, dtype: int64, pad: 0}"
    assert "'x' is both an input and metadata" in failure(write(f"inputs: {{x: {one}}}\nmetadata: {{x: {one}}}\n"))
    assert "'uniform_decode' is a word of the runner's call" in failure(write(f"inputs: {{uniform_decode: {one}}}\n"))


def test_mappings_are_checked_alike() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'compilation.cudagraph_mod' \(did you mean 'cudagraph_mode'"):
        validate_config({"compilation": {"cudagraph_mod": "FULL"}})
    assert validate_config({"device": "cpu"}).device == "cpu"


@given(
    junk=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    section=st.sampled_from([*Config.model_fields, "inputs.x", "compilation.cudagraph_capture_sizes", "model.kwargs"]),
)
def test_no_value_escapes_as_anything_but_a_config_error(junk: object, section: str) -> None:
    data: dict[str, Any] = {}
    *parents, last = section.split(".")
    at = data
    for parent in parents:
        at = at.setdefault(parent, {})
    at[last] = junk
    try:
        assert isinstance(validate_config(data), Config)
    except ConfigError as error:
        assert section.split(".")[0] in error.message  # noqa: PT017


# --- budgets and traffic --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("512MiB", 512 << 20),
        ("1.5 KiB", 1536),
        ("2GB", 2 * 10**9),
        ("3 MB", 3 * 10**6),
        ("7kB", 7000),
        ("10 B", 10),
        ("10", 10),
        ("' 2gib '", 2 << 30),
        ("1048576", 1 << 20),
        ("1_000", 1000),
        ("4.0", 4),
        ("0.1GiB", 107374182),
    ],
)
def test_bytes_have_units(write: Any, text: str, size: int) -> None:
    for key in ("memory", "reserve"):
        config = load_config(write(f"budget: {{{key}: {text}}}\n"))
        assert getattr(config.budget, key) == size
        assert validate_config(config.model_dump(mode="json")) == config, "its own dump reads back equal"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("2min", 120), ("500 ms", 0.5), ("0.1s", 0.1), ("45", 45), ("1.5", 1.5), ("2 MIN", 120)],
)
def test_times_have_units(write: Any, text: str, seconds: float) -> None:
    config = load_config(write(f"budget: {{capture_time: {text}}}\n"))
    assert config.budget.capture_time == seconds
    assert validate_config(config.model_dump(mode="json")) == config


def test_no_budget_and_no_reserve_are_the_default(write: Any) -> None:
    budget = load_config(write("budget: {reserve: 0}\n")).budget
    assert (budget.memory, budget.capture_time, budget.max_graphs, budget.reserve) == (None, None, None, 0)
    assert Config().budget.reserve is None
    assert Config().traffic is None


ALLOWED_BYTES = "expected a number of bytes, or one with a unit (B, kB, MB, GB, KiB, MiB, GiB), such as 2GiB or 512MiB"
ALLOWED_SECONDS = "expected a number of seconds, or one with a unit (ms, s, min), such as 30s or 2min"


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("memory: 2 gigs", f"line 1: budget.memory: found '2 gigs', {ALLOWED_BYTES}"),
        ("memory: 2GIBS", f"found '2GIBS', {ALLOWED_BYTES}; did you mean GiB?"),
        ("memory: lots", f"found 'lots', {ALLOWED_BYTES}"),
        ("memory: 1e9", f"found '1e9', {ALLOWED_BYTES}"),
        ("memory: -1GiB", f"found '-1GiB', {ALLOWED_BYTES}"),
        ("memory: ''", f"found '', {ALLOWED_BYTES}"),
        ("memory: [2]", f"found [2], {ALLOWED_BYTES}"),
        ("memory: true", f"found True, {ALLOWED_BYTES}"),
        ("memory: 1.5", "found 1.5, a part of a byte; add a unit, as in 1.5GiB"),
        ("memory: -5", f"found -5, which is not between 0 and 1.1259e+15 bytes; {ALLOWED_BYTES}"),
        ("memory: .nan", "found nan, which is not between 0 and"),
        ("memory: 9999999GiB", "found '9999999GiB', which is not between 0 and"),
        ("memory: 0", "budget.memory: found 0, which pays for no graph; leave it out for no bound"),
        ("memory: 0.1B", "budget.memory: found 0, which pays for no graph"),
        ("reserve: 5 bytes", f"line 1: budget.reserve: found '5 bytes', {ALLOWED_BYTES}"),
        ("capture_time: 2mins", f"found '2mins', {ALLOWED_SECONDS}; did you mean min?"),
        ("capture_time: 30sec", f"line 1: budget.capture_time: found '30sec', {ALLOWED_SECONDS}"),
        ("capture_time: 2m", f"found '2m', {ALLOWED_SECONDS}"),
        ("capture_time: -1", "found -1, which is not between 0 and 1e+06 seconds"),
        ("capture_time: .inf", "found inf, which is not between 0 and 1e+06 seconds"),
        ("capture_time: 0s", "budget.capture_time: found 0, which pays for no graph"),
        ("max_graphs: 0", "line 1: budget.max_graphs: found 0, expected greater than or equal to 1"),
        ("max_graphs: 2.5", "budget.max_graphs: found 2.5"),
        ("memroy: 2GiB", "unknown key 'budget.memroy' (did you mean 'memory'?)"),
    ],
)
def test_bad_budgets(write: Any, budget: str, expected: str) -> None:
    assert expected in failure(write(f"budget: {{{budget}}}\n"))


TRAFFIC = "request_rate: 5, prompt_median: 9, prompt_p95: 99, output_median: 8, output_p95: 88"


def test_synthetic_traffic(write: Any) -> None:
    config = load_config(write(f"traffic: {{{TRAFFIC}}}\n"))
    assert config.traffic is not None
    assert (config.traffic.num_requests, config.traffic.seed, config.traffic.lora_share) == (10_000, 0, 0.0)
    assert validate_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("traffic: {}", "'traffic.request_rate' is missing"),
        (f"traffic: {{{TRAFFIC}, request_rate: 0}}".replace("request_rate: 5, ", ""), "traffic.request_rate: found 0"),
        (f"traffic: {{{TRAFFIC}, num_requests: 0}}", "traffic.num_requests: found 0"),
        (f"traffic: {{{TRAFFIC}, num_requests: 9999999}}", "found 9999999, expected less than or equal to 1048576"),
        (f"traffic: {{{TRAFFIC}, lora_share: 0.5}}", "traffic.lora_share is 0.5, but there is no `lora` section; add"),
        (f"traffic: {{{TRAFFIC}, lora_share: 1.5}}", "traffic.lora_share: found 1.5"),
        (f"traffic: {{{TRAFFIC}, seed: -1}}", "traffic.seed: found -1"),
        (f"traffic: {{{TRAFFIC}}}".replace("99", "3"), "traffic: prompt_p95 is 3, which is below prompt_median = 9"),
        (f"traffic: {{{TRAFFIC}}}".replace("88", "3"), "traffic: output_p95 is 3, which is below output_median = 8"),
        (f"traffic: {{{TRAFFIC}}}".replace("99", "many"), "traffic.prompt_p95: found 'many', expected a valid integer"),
        ("prompt_median: 4", "unknown key 'prompt_median' (it belongs under 'traffic')"),
        (
            "speculative: {accepted_tokens: 1.5}",
            "speculative: accepted_tokens is 1.5, but with 0 draft tokens a request",
        ),
        ("speculative: {num_speculative_tokens: 3, accepted_tokens: 0.5}", "speculative.accepted_tokens: found 0.5"),
        ("speculative: {num_speculative_tokens: 3, accepted_tokens: .inf}", "advances by 4 at most"),
    ],
)
def test_bad_traffic(write: Any, text: str, expected: str) -> None:
    assert expected in failure(write(f"{text}\n"))


# --- --set ----------------------------------------------------------------------------------------------------


def test_overrides_win_and_are_yaml(write: Any) -> None:
    path = write("compilation:\n  cudagraph_mode: NONE\n  cudagraph_capture_sizes: [1]\n")
    loaded = read_config(
        path,
        ["compilation.cudagraph_mode=FULL", "compilation.cudagraph_capture_sizes=[2, 4]", "lora.max_loras=3"],
    )
    assert loaded.config.compilation.cudagraph_mode is CUDAGraphMode.FULL
    assert loaded.config.compilation.cudagraph_capture_sizes == (2, 4)
    assert loaded.config.lora is not None
    assert loaded.config.lora.max_loras == 3
    assert loaded.origin("compilation.cudagraph_capture_sizes.0") == "--set"
    assert read_config(path, ["device=cpu", "device=cuda"]).config.device == "cuda", "the last one wins"
    sizes = read_config(path, ["compilation.cudagraph_capture_sizes="]).config.compilation.cudagraph_capture_sizes
    assert sizes is None, "an empty value takes the key back"


@pytest.mark.parametrize("word", ["off", "'off'", "Off", "false"])
def test_off_is_a_word(write: Any, word: str) -> None:
    """YAML reads it as false."""
    setting = f"address_check: {word}"
    assert load_config(write(f"compilation: {{{setting}}}")).compilation.address_check == "off"
    assert read_config(write("{}"), [f"compilation.address_check={word}"]).config.compilation.address_check == "off"
    assert "address_check" in failure(write("compilation: {address_check: on}"))
    assert "address_check" in failure(write("{}"), "compilation.address_check=no way")


def test_an_override_of_a_section_replaces_it_and_its_origins(write: Any) -> None:
    loaded = read_config(write("lora:\n  max_loras: 1\n  rank: 4\n"), ["lora={max_loras: 2}"])
    assert loaded.config.lora is not None
    assert (loaded.config.lora.max_loras, loaded.config.lora.rank) == (2, 16)
    assert loaded.origin("lora.max_loras") == loaded.origin("lora.rank") == "--set"


def test_overrides_open_sections_that_are_empty(write: Any) -> None:
    assert read_config(write("lora:\n"), ["lora.max_loras=1"]).config.lora is not None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("device", "not of the form key=value"),
        ("=cpu", "not of the form key=value"),
        ("a..b=1", "not of the form key=value"),
        ("device=[", "--set device: the value is not YAML: expected the node content, but found '<stream end>'"),
        ("device.x=1", "--set device.x: device is not a section"),
        ("device=gpu", "--set device: found 'gpu'"),
        ("scheduler.max_seqs=1", "--set unknown key 'scheduler.max_seqs' (did you mean 'max_num_seqs'?)"),
    ],
)
def test_bad_overrides(write: Any, override: str, expected: str) -> None:
    assert expected in failure(write("device: cpu\n"), override)


# --- origins, aliases and merge keys --------------------------------------------------------------------------

ALIASED = """\
inputs:
  x: &tokens
    shape: [num_tokens]
    dtype: int64
    pad: 0
  y: *tokens
  z:
    pad: -1
    <<: *tokens
"""


def test_each_value_has_its_origin(write: Any) -> None:
    loaded = read_config(write("device: cpu\n\nscheduler:\n  max_num_seqs: 4\n"), ["report.repeats=2"])
    assert isinstance(loaded, LoadedConfig)
    assert loaded.origin("device") == "c.yaml:1"
    assert loaded.origin("scheduler.max_num_seqs") == "c.yaml:4"
    assert loaded.origin("scheduler.max_num_batched_tokens") == "default"
    assert loaded.origin("report.repeats") == "--set"
    assert loaded.origin("compilation.cudagraph_mode") == "default"
    assert loaded.base_dir.is_absolute()


def test_aliases_and_merge_keys(write: Any) -> None:
    loaded = read_config(write(ALIASED))
    inputs = loaded.config.inputs
    assert inputs["y"] == inputs["x"]
    assert inputs["z"] == inputs["x"].model_copy(update={"pad": -1})
    assert loaded.origin("inputs.x.dtype") == "c.yaml:4"
    assert loaded.origin("inputs.y.dtype") == "c.yaml:4"
    assert loaded.origin("inputs.z.dtype") == "c.yaml:4", "a merged value stands where it was written"
    assert loaded.origin("inputs.z.pad") == "c.yaml:8", "the key's own value wins, wherever the merge stands"
    assert not [key for key in loaded.origins if "<<" in key]


def test_several_merges_the_first_wins(write: Any) -> None:
    text = ALIASED + "  w:\n    <<: [{pad: 7}, *tokens]\n"
    loaded = read_config(write(text))
    assert loaded.config.inputs["w"].pad == 7
    assert loaded.origin("inputs.w.pad") == "c.yaml:11"
    assert loaded.origin("inputs.w.dtype") == "c.yaml:4"


def test_a_mistake_in_a_merged_value_points_at_its_line(write: Any) -> None:
    text = ALIASED.replace("pad: 0", "pad: no idea").replace("  y: *tokens\n", "")
    assert "line 5: inputs.x.pad: found 'no idea'" in failure(write(text))
    wrong = ALIASED.replace("    pad: -1\n", "    pad: -1\n    dtype: int65\n")
    assert "line 9: inputs.z.dtype: found 'int65'" in failure(write(wrong))


def test_an_override_of_an_aliased_value_changes_that_one_alone(write: Any) -> None:
    inputs = read_config(write(ALIASED), ["inputs.x.pad=5"]).config.inputs
    assert (inputs["x"].pad, inputs["y"].pad) == (5, 0)
    inputs = read_config(write(ALIASED), ["inputs.y.pad=5"]).config.inputs
    assert (inputs["x"].pad, inputs["y"].pad) == (0, 5)


# --- shapes and padding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "dim"),
    [
        (7, Dim(None, 0, 7)),
        ("num_tokens", Dim("num_tokens", 1, 0)),
        (" num_reqs ", Dim("num_reqs", 1, 0)),
        ("num_reqs + 1", Dim("num_reqs", 1, 1)),
        ("num_reqs+1", Dim("num_reqs", 1, 1)),
        ("2 * num_tokens", Dim("num_tokens", 2, 0)),
        ("2*num_tokens+3", Dim("num_tokens", 2, 3)),
    ],
)
def test_dimensions(text: int | str, dim: Dim) -> None:
    assert Dim.parse(text) == dim


@pytest.mark.parametrize(
    "text", ["", "tokens", "num_tokens - 1", "num_tokens * 2", "0 * num_tokens", "num_tokens + num_reqs", 0, -1, "8"]
)
def test_dimensions_that_cannot_be_read(text: int | str) -> None:
    with pytest.raises(ValueError, match=r"dimension|factor"):
        Dim.parse(text)


@given(
    factor=st.integers(1, 9),
    offset=st.integers(0, 9),
    symbol=st.sampled_from(["num_tokens", "num_reqs"]),
    tokens=st.integers(0, 999),
    reqs=st.integers(0, 999),
)
def test_dimension_size_and_count_are_inverse(factor: int, offset: int, symbol: str, tokens: int, reqs: int) -> None:
    dim = Dim.parse(f"{factor} * {symbol} + {offset}")
    count = tokens if symbol == "num_tokens" else reqs
    size = dim.size(tokens, reqs)
    assert size == factor * count + offset
    assert dim.count(size) == count
    for other in range(max(size - factor, 0), size):
        assert dim.count(other) != count
    assert dim.count(offset - 1) is None
    if factor > 1:
        assert dim.count(size + 1) is None


def test_shapes_say_which_dimension_counts_rows() -> None:
    assert Input(shape=(3, "num_tokens"), dtype="int64", pad=0).row_dim == 1
    assert Input(shape=(3, 4), dtype="int64", pad=0).row_dim is None
    assert Input(shape=(), dtype="int64", pad=0).dims == ()
    assert Input.model_validate({"shape": "num_reqs", "dtype": "int64", "pad": 0}).shape == ("num_reqs",)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"shape": ["num_tokens", "num_reqs"]}, "only one dimension may count rows"),
        ({"shape": [2], "pad": "last"}, "pad: last needs a dimension that counts rows"),
        ({"pad": 1.5}, "pad 1.5 is not a value of dtype int64"),
        ({"pad": float("nan")}, "pad nan is not a value of dtype int64"),
        ({"pad": "zero"}, "found 'zero', expected a number, true, false, or `last`"),
        ({"pad": None}, "found None"),
        ({"pad": 300, "dtype": "int8"}, "pad 300 is not a value of dtype int8"),
        ({"pad": -1, "dtype": "uint8"}, "pad -1 is not a value of dtype uint8"),
        ({"pad": 2**31, "dtype": "int32"}, "is not a value of dtype int32"),
        ({"pad": 2**63, "dtype": "int64"}, "is not a value of dtype int64"),
        ({"pad": -1e9, "dtype": "float16"}, "is not a value of dtype float16"),
        ({"dtype": "int65"}, "found 'int65'"),
        ({"dtype": None}, "dtype"),
        ({"example": [3, 3]}, "low must be below high"),
        ({"example": "gauss"}, "found 'gauss'"),
        ({"example": [1, 2, 3]}, "found [1, 2, 3]"),
    ],
)
def test_declarations_that_cannot_be(spec: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config({"inputs": {"x": {"shape": ["num_tokens"], "dtype": "int64", "pad": 0, **spec}}})
    assert expected in caught.value.message
    assert "inputs.x" in caught.value.message


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        ("int8", -128), ("uint8", 255), ("int64", -1), ("int64", 2.0), ("bool", True), ("float16", -65504.0),
        ("float32", float("nan")), ("float16", float("-inf")), ("bfloat16", -1e30), ("float8_e4m3fn", 0),
    ],
)  # fmt: skip
def test_paddings_that_fit(dtype: str, pad: float) -> None:
    assert validate_config({"inputs": {"x": {"shape": ["num_tokens"], "dtype": dtype, "pad": pad}}}).inputs["x"]


def test_models_made_in_python_raise_our_errors() -> None:
    with pytest.raises(ConfigError, match="Input: cannot read the dimension 'batch'"):
        Input(shape=("batch", 3), dtype="float32", pad=0)
    with pytest.raises(ConfigError, match="'pad' is missing"):
        Input(shape=("num_tokens",), dtype="float32")
    with pytest.raises(ConfigError, match="did you mean 'cudagraph_capture_sizes'"):
        Config(compilation={"cudagraph_capture_size": [1]})


@pytest.mark.parametrize("name", ["padded", "self", "uniform_decode"])
def test_words_of_the_call_cannot_name_inputs(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name!r} is a word of the runner's call"):
        Config(inputs={name: Input(shape=("num_tokens",), dtype="float32", pad=0)})


def test_a_value_by_option_that_contradicts_the_file_is_remedied_by_a_command(tmp_path: Path) -> None:
    """Of two values that cannot both stand, the one in the file gives way, and the remedy says by which option."""
    sizes, most = "compilation.cudagraph_capture_sizes", "compilation.max_cudagraph_capture_size"
    files = {"most.yaml": ("max_cudagraph_capture_size: 256", f"{sizes}=[1, 4]", most),
             "sizes.yaml": ("cudagraph_capture_sizes: [1, 4]", f"{most}=8", sizes)}  # fmt: skip
    for name, (line, override, other) in files.items():
        path = tmp_path / name
        path.write_text(f"compilation:\n  {line}\n")
        with pytest.raises(ConfigError) as caught:
            load_config(path, [override])
        assert caught.value.remedy == f"Add --set {other}=null, which takes back what {name}:2 says."
        config = load_config(path, [override, f"{other}=null"])
        assert getattr(config.compilation, other.removeprefix("compilation.")) is None
    both = tmp_path / "both.yaml"
    both.write_text("compilation:\n  max_cudagraph_capture_size: 256\n  cudagraph_capture_sizes: [1, 4]\n")
    for path, overrides in ((both, []), (tmp_path / "most.yaml", [f"{sizes}=[1]", f"{most}=2"])):
        with pytest.raises(ConfigError, match="remove one of the two") as caught:
            load_config(path, overrides)
        assert "--set" not in (caught.value.remedy or "")
