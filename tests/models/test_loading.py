"""From a model target to a model, and every way that can fail."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import decoder
import pytest
import torch
from torch import nn

from cgplan.backends.context import forward_context
from cgplan.errors import ModelError
from cgplan.models.loading import forward_signature, load_model, parse_dtype

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _same_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a target leaves on sys.path does not reach the next test."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def load(target: str, base_dir: Path | None = None, **kwargs: Any) -> Any:
    return load_model(target, kwargs, device=CPU, base_dir=base_dir)


def write(folder: Path, text: str, name: str = "model.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


GOOD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.layer = nn.Linear(width, 2)
        self.made_on = torch.empty(0).device
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.layer(x))

class Zoo:
    def build(): return Net()

def build(width=4):
    return Net(width)

number = 3
"""


def test_module_target() -> None:
    loaded = load("decoder:build", num_layers=1)
    assert isinstance(loaded, decoder.Decoder)
    assert not loaded.training


def test_weights_are_made_on_the_device(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    module: Any = load_model(f"{path}:build", {"width": 3}, device=torch.device("meta"))
    assert (module.made_on.type, module.layer.weight.device.type) == ("meta", "meta")


def test_file_relative_to_the_configuration_then_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "yaml" / "models", "def build(): return lambda x: 'yaml'")
    write(tmp_path / "here" / "models", "def build(): return lambda x: 'here'")
    write(tmp_path / "here", "def build(): return lambda x: 'only here'", "other.py")
    monkeypatch.chdir(tmp_path / "here")
    assert load("models/model.py:build", tmp_path / "yaml")(0) == "yaml"
    assert load("models/model.py:build")(0) == "here"
    assert load("other.py:build", tmp_path / "yaml")(0) == "only here"


def test_modules_of_the_current_folder_and_plain_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, GOOD, "cgplan_test_local_module.py")
    monkeypatch.chdir(tmp_path)
    assert isinstance(load("cgplan_test_local_module:Zoo.build"), nn.Module)
    assert load(f"{write(tmp_path, 'def build(): return abs')}:build") is abs


def test_a_file_is_loaded_twice_as_two_modules(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    one, two = load(f"{path}:build"), load(f"{path}:build")
    assert type(one) is not type(two)
    assert sys.modules[type(one).__module__].Net is type(one)
    assert "model" not in sys.modules


def test_a_copy_of_the_decoder_is_loaded_beside_the_first(tmp_path: Path) -> None:
    """The copy registers its operators again."""
    configs = Path(decoder.__file__).parent
    for name in ("decoder.py", "attention.py"):
        shutil.copy(configs / name, tmp_path)
    models = [load("decoder.py:build", folder, num_layers=1) for folder in (configs, tmp_path)]
    batch = decoder.example_batch(models[0], [2, 5], [3, 1])
    with forward_context(metadata=batch.metadata):
        first, second, again = (
            model(batch.input_ids, batch.positions) for model in (*models, models[0])
        )
    assert first.equal(second)
    assert first.equal(again)


def test_a_file_named_like_a_library_does_not_hide_it(tmp_path: Path) -> None:
    path = write(tmp_path, "import json\ndef build(): return json.dumps", "json.py")
    import json

    assert load(f"{path}:build") is json.dumps


def test_neighbours_in_the_same_folder(tmp_path: Path) -> None:
    """Two folders with a neighbour of the same name each get their own, also when it is imported late."""
    text = "import cgplan_test_near\ndef build():\n    import cgplan_test_late\n    return lambda: cgplan_test_near.WHO"
    for who in ("first", "second"):
        write(tmp_path / who, text)
        write(tmp_path / who, f"WHO = {who!r}", "cgplan_test_near.py")
        write(tmp_path / who, "", "cgplan_test_late.py")
    first, second = (load(f"{tmp_path / who}/model.py:build") for who in ("first", "second"))
    again = load(f"{tmp_path}/first/model.py:build")
    assert [first(), second(), again()] == ["first", "second", "first"]


def test_dataclasses_and_annotations_work_in_a_file(tmp_path: Path) -> None:
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    text += "@dataclass\nclass Model:\n    scale: float = 2.0\n    def __call__(self, x): return x * self.scale\n"
    assert load(f"{write(tmp_path, text)}:Model", scale=3.0)(2) == 6.0


# --- mistakes -------------------------------------------------------------------------------------------------


def failure(target: str, base_dir: Path | None = None, **kwargs: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load(target, base_dir, **kwargs)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("target", ["decoder", ":build", "decoder:", "", "model.py"])
def test_malformed_target(target: str) -> None:
    error = failure(target)
    assert "malformed" in error.message
    assert "package.module:callable" in error.remedy


def test_module_that_is_not_there() -> None:
    error = failure("cgplan_no_such_package.sub:build")
    assert "no module named 'cgplan_no_such_package'" in error.message
    assert isinstance(error.__cause__, ModuleNotFoundError)
    assert "no module named 'cgplan.models.hff'" in failure("cgplan.models.hff:build").message


def test_attribute_that_is_not_there_or_not_callable(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert "Did you mean 'build'?" in failure(f"{path}:biuld").remedy
    assert "has no `zzz`" in failure(f"{path}:zzz").message
    assert ":number is int, which is not callable" in failure(f"{path}:number").message


def test_a_target_that_is_a_module_is_the_model(tmp_path: Path) -> None:
    path = write(tmp_path, "import torch\nnet = torch.nn.Linear(3, 4)")
    model = load(f"{path}:net")
    assert isinstance(model, torch.nn.Linear)
    assert not model.training
    assert "failed" in failure(f"{path}:net", width=3).message


def test_other_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = failure("nowhere/model.py:build", tmp_path)
    assert str(tmp_path / "nowhere" / "model.py") in error.message
    assert str(Path.cwd()) in error.message
    error = failure(f"{write(tmp_path, GOOD)}:build", widht=3)
    assert "widht" in error.message
    assert "width=4" in error.remedy
    path = write(tmp_path, "def build(): return {'a': 1}")
    assert "returned dict, which is not callable" in failure(f"{path}:build").message
    assert "num_layers is 0" in failure("decoder:build", num_layers=0).message
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "cgplan.models.hf", raising=False)
    assert "pip install cgplan[transformers]" in failure("transformers").remedy


def test_builder_that_raises_names_the_users_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "import torch\n\ndef build(n=2):\n    return torch.zeros(n) @ torch.zeros(n + 1)\n",
    )
    error = failure(f"{path}:build", n=3)
    assert "RuntimeError" in error.message
    assert f"at {path}:4" in error.message
    assert isinstance(error.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("text", "kind", "line"),
    [
        ("x = 1\nraise ValueError('no')\n", "ValueError: no", 2),
        ("def build(:\n    pass\n", "SyntaxError", 1),
        ("import cgplan_not_installed\n", "ModuleNotFoundError", 1),
        ("\n\nimport sys\nsys.exit(3)\n", "SystemExit", 4),
    ],
)
def test_file_that_does_not_import(tmp_path: Path, text: str, kind: str, line: int) -> None:
    path, before = write(tmp_path, text), set(sys.modules)
    error = failure(f"{path}:build")
    assert kind in error.message
    assert f"at {path}:{line}" in error.message
    assert not {name for name in set(sys.modules) - before if name.startswith("cgplan_target")}


# --- small things ---------------------------------------------------------------------------------------------


def test_forward_signature() -> None:
    found = forward_signature(decoder.Decoder.__new__(decoder.Decoder))
    assert [(a.name, a.required, a.annotation) for a in found] == [
        ("input_ids", True, "Tensor"),
        ("positions", True, "Tensor"),
    ]

    def model(  # type: ignore[no-untyped-def]
        x: torch.Tensor, kept: bool, scale=2.0, *rest, flag: bool = True, other=False, **more
    ):
        return x

    assert [(a.name, a.required) for a in forward_signature(model)] == [
        ("x", True),
        ("kept", True),
        ("scale", False),
    ], "a flag that has a default is no input"
    assert forward_signature(nn.Linear(2, 2))[0].annotation == "torch.Tensor"


def test_dtypes() -> None:
    assert parse_dtype("bfloat16") is parse_dtype("torch.bfloat16") is torch.bfloat16
    for name in ("int8", "float33", None, "nn"):
        with pytest.raises(ModelError, match=r"model\.kwargs\.dtype: unknown dtype"):
            parse_dtype(name)


@pytest.mark.parametrize("target", ["sys:exit", "time:sleep"])
def test_a_builtin_that_makes_no_model(target: str) -> None:
    with pytest.raises(ModelError, match=f"calling {target} failed"):
        load(target)
