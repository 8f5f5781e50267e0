"""The gallery: each example runs, compares itself with eager code, and is short."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

GALLERY = sorted((Path(__file__).parents[2] / "docs" / "examples" / "gallery").glob("*.py"))
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")
def test_an_example_gives_what_eager_code_gives(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    if "from transformers" in text:
        pytest.importorskip("transformers")
    example = load(path)
    if path.stem == "robot_policy":
        example.main(steps=20)
    else:
        example.main()
    assert capsys.readouterr().out
