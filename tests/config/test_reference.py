"""The config reference is what the models say, and the models say something about every key; errors likewise."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from cgplan import errors
from cgplan.config.reference import json_schema, markdown
from cgplan.config.schema import Section

DOCUMENT = Path(__file__).parents[2] / "docs" / "config-reference.md"
SECTIONS = Section.__subclasses__()


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_field_has_a_description(section: type[BaseModel]) -> None:
    for name, field in section.model_fields.items():
        assert (field.description or "").endswith("."), f"{section.__name__}.{name}: no description with a full stop"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_field_has_a_row(section: type[BaseModel]) -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    for name, field in section.model_fields.items():
        row = next(
            (
                row
                for row in rows
                if row.startswith(f"| `{name}` | ") and " ".join(str(field.description).split()) in row
            ),
            None,
        )
        assert row is not None, f"{section.__name__}.{name} is not in the reference"
        assert ("| required |" in row) == field.is_required()


def test_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == markdown(), "run `make docs`"


def test_troubleshooting_lists_all_errors_and_exit_codes() -> None:
    text = (DOCUMENT.parent / "troubleshooting.md").read_text(encoding="utf-8")
    listed = {name: int(code) for name, code in re.findall(r"^[│├└─ ]*(\w+Error) +(\d+)  ", text, re.MULTILINE)}
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert listed == {name: kind.exit_code for name, kind in kinds.items() if issubclass(kind, errors.CgplanError)}


def test_types_are_in_readable_words() -> None:
    rows = {row.split("`")[1]: row for row in markdown().splitlines() if row.startswith("| `")}
    assert "one of `eager`, `error` | `eager` |" in rows["on_miss"]
    assert "list of whole numbers >= 1 or one of `vllm`, `sglang`" in rows["cudagraph_capture_sizes"].replace(
        ", or", " or"
    )
    assert "| whole number >= 1 | `256` |" in rows["max_num_seqs"]
    assert "number, or true or false, or `last` | required |" in rows["pad"]
    assert "| true or false | `true` |" in rows["cudagraph_copy_inputs"]
    assert "`FULL_DECODE_ONLY`" in rows["cudagraph_mode"]
    assert "| `FULL` |" in rows["cudagraph_mode"]


def test_json_schema_allows_its_own_defaults() -> None:
    schema = json.loads(json_schema())
    for node in _nodes(schema):
        if "enum" in node and node.get("default") is not None:
            assert node["default"] in node["enum"]
    compilation = schema["$defs"]["CompilationConfig"]["properties"]
    assert compilation["cudagraph_mode"]["default"] == "FULL"
    assert compilation["attention_support"]["default"] == "ALWAYS"


def test_json_schema_uses_only_known_words() -> None:
    words = {
        "maximum", "minimum", "exclusiveMinimum", "type", "items", "anyOf", "enum", "const", "default", "description",
        "title", "properties", "additionalProperties", "$ref", "$defs", "$schema", "required", "pattern", "prefixItems",
        "minItems", "maxItems",
    }  # fmt: skip
    for node in _nodes(json.loads(json_schema())):
        assert set(node) <= words


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every schema inside a schema; names of properties and definitions are no schemas."""
    yield node
    below = [*node.get("properties", {}).values(), *node.get("$defs", {}).values(), *node.get("anyOf", ())]
    below += [node[key] for key in ("items", "additionalProperties") if isinstance(node.get(key), dict)]
    for inner in below:
        yield from _nodes(inner)
