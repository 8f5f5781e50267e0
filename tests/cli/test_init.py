"""`cgplan init`: a starting configuration that loads, plans and captures as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import cgplan_command, good, refused

import cgplan
from cgplan.config import load_config
from cgplan.planning import build_plan
from cgplan.reports import CaptureReport


def started(home: Path, *arguments: str) -> tuple[str, cgplan.Config]:
    text = good("init", *arguments).stdout
    (home / "my.yaml").write_text(text)
    config = load_config("my.yaml")
    assert build_plan(config).capture_sizes == (1, 2, 4, 8, 16, 32)
    return text, config


def test_init_of_an_mlp_captures_as_it_is(home: Path) -> None:
    text, config = started(home, "models.py:Net", "--kwargs", '{"width": 24}')
    assert set(config.inputs) == {"x"}
    assert (config.inputs["x"].shape, config.inputs["x"].dtype) == (("num_tokens", 8), "float32")
    assert config.model is not None
    assert config.model.kwargs == {"width": 24}
    assert re.search(r"shape: \[num_tokens, 8\] +# guess: up is a Linear with in_features 8", text)
    assert re.search(r"^  # scale: +# has a default", text, re.MULTILINE)
    result = good("capture", "--config", "my.yaml", "--device", "cpu", "--json")
    assert len(CaptureReport.model_validate_json(result.stdout).records) == 6


def test_init_of_a_module_that_a_file_holds_captures_as_it_is(home: Path) -> None:
    (home / "made.py").write_text("from torch import nn\nnet = nn.Sequential(nn.Linear(3, 4))\n")
    _, config = started(home, "made.py:net")
    assert config.inputs["input"].shape == ("num_tokens", 3)
    good("capture", "--config", "my.yaml", "--device", "cpu", "--json")


def test_init_arguments_with_defaults_can_be_uncommented(home: Path) -> None:
    text, _ = started(home, "models.py:Net")
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("  # scale:"))
    lines[start : start + 4] = [line.replace("  # ", "  ", 1) for line in lines[start : start + 4]]
    (home / "more.yaml").write_text("\n".join(lines))
    assert set(load_config("more.yaml").inputs) == {"x", "scale"}


def test_init_reads_images_and_indices(home: Path) -> None:
    _, image = started(home, "models.py:Image")
    assert image.inputs["pixels"].shape == ("num_tokens", 3, 224, 224)
    assert image.inputs["pixels"].dtype == "bfloat16"
    text, words = started(home, "models.py:Words")
    assert (words.inputs["words"].dtype, words.inputs["words"].pad) == ("int64", 7)
    assert words.inputs["words"].example == (0, 50)
    assert words.inputs["offsets"].dtype == "float32"
    assert re.search(r"offsets:\n +shape: \[num_tokens\] +# guess: the code does not say it", text)


def test_init_does_not_pretend_where_the_forward_branches(home: Path) -> None:
    text, config = started(home, "models.py:Branches")
    assert config.inputs["x"].shape == ("num_tokens",)
    assert "in_features" not in text
    assert config.inputs["token_ids"].dtype == "int64"
    assert "the forward says int, but inputs are tensors" in text


HUGGING_FACE = """{"model_type": "llama", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2,
"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}"""


def test_init_of_a_hugging_face_model_captures_as_it_is(home: Path) -> None:
    pytest.importorskip("transformers")
    (home / "tiny").mkdir()
    (home / "tiny" / "config.json").write_text(HUGGING_FACE)
    _, config = started(home, "tiny", "--kwargs", "{max_cache_len: 16}")
    assert config.model is not None
    assert (config.model.target, config.model.kwargs["config_file"]) == (
        "transformers",
        "tiny/config.json",
    )
    ids, positions = config.inputs.values()
    assert (ids.dtype, ids.pad, ids.example) == ("int64", 0, (0, 61))
    assert (positions.dtype, positions.pad, positions.example) == ("int64", -1, (0, 16)), (
        "-1 writes nothing"
    )
    assert config.scheduler.max_num_seqs == config.scheduler.max_num_batched_tokens == 64, (
        "the rows of its cache"
    )
    result = good("capture", "my.yaml", "--device", "cpu", "--json")
    assert len(CaptureReport.model_validate_json(result.stdout).records) == 6
    text, _ = started(
        home, "transformers", "--kwargs", "{config_file: tiny/config.json, max_cache_len: 16}"
    )
    assert text == (home / "my.yaml").read_text()
    _, config = started(home, "tiny", "--kwargs", "{max_batch_size: 48}")
    assert config.scheduler.max_num_seqs == config.scheduler.max_num_batched_tokens == 48


def test_init_of_a_hugging_face_model_that_is_no_language_model_says_what_to_write(
    home: Path,
) -> None:
    pytest.importorskip("transformers")
    (home / "swin").mkdir()
    (home / "swin" / "config.json").write_text('{"model_type": "swin"}')
    shown = refused(cgplan.ModelError, "init", "swin")
    assert "model_type 'swin', of which this transformers builds no causal LM" in shown
    assert "`cgplan init my_model.py:build`" in shown


def test_init_finds_a_model_in_the_cache_of_hugging_face(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from transformers.utils import hub

    snapshot, refs = (home / "models--org--name" / part for part in ("snapshots/abc", "refs"))
    snapshot.mkdir(parents=True)
    refs.mkdir()
    (snapshot / "config.json").write_text(HUGGING_FACE)
    (refs / "main").write_text("abc")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(home))
    _, config = started(home, "org/name")
    assert config.model is not None
    assert Path(config.model.kwargs["config_file"]) == snapshot / "config.json"


def test_init_of_one_call_captures_as_it_is(home: Path) -> None:
    (home / "call.py").write_text(
        "import torch\n\n\ndef example():\n    return {'x': torch.randn(3, 8)}\n"
    )
    text = good(
        "init", "models.py:Net", "--call", "call.py:example", "--kwargs", "{width: 24}"
    ).stdout
    (home / "my.yaml").write_text(text)
    config = load_config("my.yaml")
    assert config.inputs["x"].shape == ("batch", 8)
    assert config.device == "auto"
    assert text.startswith(
        "# Written by cgplan, which saw calls of this kind:\n# batch: dimension 0 of x"
    )
    assert "# To correct: dims.batch.max, a guess from calls" in text
    result = good("capture", "my.yaml", "--device", "cpu", "--json")
    assert len(CaptureReport.model_validate_json(result.stdout).records) == 5


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("torch.ones(3, 8), 1, 2", "TypeError: Net.forward() takes from 2 to 3 positional"),
        ("torch.ones(3, 7)", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_init_of_a_call_that_the_model_does_not_take(
    home: Path, arguments: str, problem: str
) -> None:
    (home / "call.py").write_text(f"import torch\n\n\ndef example():\n    return {arguments}\n")
    message = refused(cgplan.ModelError, "init", "models.py:Net", "--call", "call.py:example")
    assert f"models.py:Net does not take what call.py:example returns: {problem}" in message


def test_init_of_a_call_with_a_name_that_kwargs_take(home: Path) -> None:
    (home / "made.py").write_text(
        "import torch\n\n\ndef build():\n    return model\n\n\n"
        "def model(pixels=None, **kwargs):\n    return pixels * 2\n\n\n"
        "def example():\n    return {'pixel': torch.ones(3)}\n"
    )
    message = refused(cgplan.ModelError, "init", "made.py:build", "--call", "made.py:example")
    assert "no argument 'pixel': its **kwargs took it. Did you mean 'pixels'?" in message


def test_an_object_that_builds_no_model_is_told(home: Path) -> None:
    """As the app of a web server, beside the function that builds its model."""
    (home / "made.py").write_text(
        "class App:\n    def __call__(self, scope):\n        pass\n\n\napp = App()\n"
    )
    message = refused(cgplan.ModelError, "init", "made.py:app")
    assert "made.py:app is of class App, no model" in message
    assert "Name a function that returns one." in message


def test_init_of_a_model_whose_arguments_all_have_defaults(home: Path) -> None:
    """Inputs are uncommented in the file as it is."""
    (home / "made.py").write_text(
        "def build():\n    return lambda pixels=None, flag=False: pixels\n"
    )
    text, config = started(home, "made.py:build")
    assert config.inputs == {}
    assert "flag" not in text
    (home / "more.yaml").write_text(re.sub("^  # (?=pixels|  )", "  ", text, flags=re.MULTILINE))
    assert set(load_config("more.yaml").inputs) == {"pixels"}


def test_init_of_a_function_that_takes_arguments(home: Path) -> None:
    (home / "call.py").write_text("def example(rows):\n    return None\n")
    message = refused(cgplan.ModelError, "init", "models.py:Net", "--call", "call.py:example")
    assert "kwargs" not in message
    assert "It takes (rows). Let it take none, and return those of the forward." in message


def test_init_without_a_model(home: Path) -> None:
    result = cgplan_command("init", "--call", "call.py:example")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Missing argument 'target'" in result.stderr
