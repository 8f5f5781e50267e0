"""Configuration files: what is read, overrides, and where each value came from."""

from __future__ import annotations

from typing import Any

import pytest

from cgplan.config import Config, load_config, read_config
from cgplan.errors import ConfigFileError
from cgplan.modes import CUDAGraphMode

# Nine lines that stand for 9^9 values.
BOMB = ", ".join(
    f"n{i}: &n{i} [{', '.join([f'*n{i - 1}' if i else '{x: 1}'] * 9)}]" for i in range(9)
)


def test_a_saved_report_is_named_in_one_line(refusal: Any) -> None:
    message = refusal('{"kind": "capture", "records": []}', kind=ConfigFileError)
    assert message.splitlines()[0].endswith("c.yaml is a saved capture")


def test_a_saved_report_is_sent_to_the_command_that_shows_it(write: Any) -> None:
    with pytest.raises(ConfigFileError) as caught:
        load_config(write('{"kind": "capture", "records": []}'))
    assert caught.value.remedy.startswith("`cgplan inspect ")


def test_yaml_of_another_program_is_told_by_its_keys(refusal: Any) -> None:
    message = refusal("services: {web: {image: a}}\nversion: 3\n", kind=ConfigFileError)
    told = (
        "c.yaml is no configuration: its keys are services, version, and those of a configuration"
    )
    assert f"{told} model, device, dims" in message


def test_a_configuration_whose_keys_are_all_misspelled_has_their_names(refusal: Any) -> None:
    message = refusal("schedular: {max_num_seqs: 8}\ncompilaton: {}\n")
    assert "did you mean 'scheduler'" in message
    assert "did you mean 'compilation'" in message


@pytest.mark.parametrize("text", ["# nothing\n", "{}"])
def test_an_empty_mapping_is_all_defaults(write: Any, text: str) -> None:
    assert load_config(write(text)) == Config()


def test_an_empty_file_is_no_configuration(write: Any) -> None:
    """As of `curl` from a server that still starts."""
    with pytest.raises(ConfigFileError, match=r"c.yaml is empty\n.* {} means all defaults"):
        load_config(write("\n"))


@pytest.mark.parametrize(
    ("text", "where", "complaint"),
    [
        ("device: cpu\na: b: c\n", ":2:5", "mapping values are not allowed"),
        ("device: !!python/object:os.system {}\n", ":1:9", "could not determine a constructor"),
        (
            "report: {repeats: 1}\nreport: {}\n",
            ":2:1",
            "the key 'report' is given twice (first in line 1)",
        ),
        ("device: !!int abc\n", ":1:9", "'abc' is no int: invalid literal"),
        ("\ndevice: 2024-13-45\n", ":2:9", "'2024-13-45' is no timestamp: month must be in 1..12"),
        ("device: !!int ''\n", ":1:9", "'' is no int"),
        ("device: !!float _\n", ":1:9", "'_' is no float"),
        ("device: !!bool abc\n", ":1:9", "'abc' is no bool"),
        ('device: "\\U99999999"\n', "", "too large to convert"),
        (f"device: {'[' * 3000}\n", "", "maximum recursion depth exceeded"),
        ("device: &a [*a]\n", "", "maximum recursion depth exceeded"),
        (f"device: [{BOMB}]\n", ":1:1", "more than 10,000 values"),
        (
            f"device: {{{BOMB.replace('[', '{<<: [').replace(']', ']}')}}}\n",
            ":1:1",
            "more than 10,000 values",
        ),
        (f"device: {[1] * 10_001}\n", ":1:1", "more than 10,000 values"),
    ],
    ids=range(14),
)
def test_text_that_is_not_yaml(refusal: Any, text: str, where: str, complaint: str) -> None:
    message = refusal(text, kind=ConfigFileError)
    assert f"c.yaml{where}: not valid YAML: " in message
    assert complaint in message
    if text.startswith("device: "):
        given = text.partition(": ")[2].strip()
        assert "--set device: the value is not YAML: " in refusal("{}", f"device={given}")


@pytest.mark.parametrize(("text", "kind"), [("- 1\n", "list"), ("hello\n", "str")])
def test_a_document_that_is_no_mapping(refusal: Any, text: str, kind: str) -> None:
    assert f"holds a {kind}, not a mapping" in refusal(text, kind=ConfigFileError)


def test_overrides_win_and_are_yaml(write: Any) -> None:
    path = write("compilation:\n  cudagraph_mode: NONE\n  cudagraph_capture_sizes: [1]\n")
    loaded = read_config(
        path,
        [
            "compilation.cudagraph_mode=FULL",
            "compilation.cudagraph_capture_sizes=[2, 4]",
            "lora.max_loras=3",
        ],
    )
    assert loaded.config.compilation.cudagraph_mode is CUDAGraphMode.FULL
    assert loaded.config.compilation.cudagraph_capture_sizes == (2, 4)
    assert loaded.config.lora is not None
    assert loaded.config.lora.max_loras == 3
    assert loaded.origin("compilation.cudagraph_capture_sizes.0") == "--set"
    assert read_config(path, ["device=cpu", "device=cuda"]).config.device == "cuda", (
        "the last one wins"
    )
    sizes = read_config(
        path, ["compilation.cudagraph_capture_sizes="]
    ).config.compilation.cudagraph_capture_sizes
    assert sizes is None, "an empty value takes the key back"


@pytest.mark.parametrize("word", ["off", "'off'"])
def test_off_is_a_word(write: Any, word: str) -> None:
    """YAML reads it as false."""
    setting = f"address_check: {word}"
    assert load_config(write(f"compilation: {{{setting}}}")).compilation.address_check == "off"
    assert (
        read_config(
            write("{}"), [f"compilation.address_check={word}"]
        ).config.compilation.address_check
        == "off"
    )


def test_an_override_of_a_section_replaces_it_and_its_origins(write: Any) -> None:
    loaded = read_config(write("lora:\n  max_loras: 1\n  rank: 4\n"), ["lora={max_loras: 2}"])
    assert loaded.config.lora is not None
    assert (loaded.config.lora.max_loras, loaded.config.lora.rank) == (2, 16)
    assert loaded.origin("lora.max_loras") == loaded.origin("lora.rank") == "--set"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("device", "not of the form key=value"),
        ("a..b=1", "not of the form key=value"),
        (
            "device=[",
            "--set device: the value is not YAML: expected the node content, but found '<stream end>'",
        ),
        ("device.x=1", "--set device.x: device is not a section"),
        ("device=gpu", "--set device: found 'gpu'"),
        (
            "scheduler.max_seqs=1",
            "--set unknown key 'scheduler.max_seqs' (did you mean 'max_num_seqs'?)",
        ),
    ],
)
def test_bad_overrides(refusal: Any, override: str, expected: str) -> None:
    assert expected in refusal("device: cpu\n", override)


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


def test_aliases_and_merge_keys(write: Any) -> None:
    loaded = read_config(write(ALIASED))
    inputs = loaded.config.inputs
    assert inputs["y"] == inputs["x"]
    assert inputs["z"] == inputs["x"].model_copy(update={"pad": -1})
    assert loaded.origin("inputs.x.dtype") == "line 4"
    assert loaded.origin("inputs.y.dtype") == "line 4"
    assert loaded.origin("inputs.z.dtype") == "line 4", "a merged value stands where it was written"
    assert loaded.origin("inputs.z.pad") == "line 8", (
        "the key's own value wins, wherever the merge stands"
    )
    assert not [key for key in loaded.origins if "<<" in key]


def test_a_mistake_in_a_merged_value_points_at_its_line(refusal: Any) -> None:
    text = ALIASED.replace("pad: 0", "pad: no idea").replace("  y: *tokens\n", "")
    assert "line 5: inputs.x.pad: found 'no idea'" in refusal(text)
    wrong = ALIASED.replace("    pad: -1\n", "    pad: -1\n    dtype: int65\n")
    assert "line 9: inputs.z.dtype: found 'int65'" in refusal(wrong)


def test_an_override_of_an_aliased_value_changes_that_one_alone(write: Any) -> None:
    inputs = read_config(write(ALIASED), ["inputs.x.pad=5"]).config.inputs
    assert (inputs["x"].pad, inputs["y"].pad) == (5, 0)
    inputs = read_config(write(ALIASED), ["inputs.y.pad=5"]).config.inputs
    assert (inputs["x"].pad, inputs["y"].pad) == (0, 5)


def test_a_file_of_a_million_sizes_is_refused_unread(refusal: Any) -> None:
    text = f"compilation: {{cudagraph_capture_sizes: {list(range(1, 1_000_001))}}}"
    assert "holds more than 1.0 MiB" in refusal(text, kind=ConfigFileError)
