"""The config reference is what the models say, and the models say something about every key."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from cgplan.config.reference import json_schema, markdown
from cgplan.config.schema import Section

DOCUMENT = Path(__file__).parents[2] / "docs" / "config-reference.md"
SECTIONS = Section.__subclasses__()


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_field_has_a_row_with_a_sentence(section: type[BaseModel]) -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    for name, field in section.model_fields.items():
        sentence = " ".join((field.description or "").split())  # or else its section's
        row = next(row for row in rows if row.startswith(f"| `{name}` | ") and sentence in row)
        assert row.endswith(". |"), f"{section.__name__}.{name}: no description with a full stop"
        assert ("| required |" in row) == field.is_required()


def test_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == markdown(), "run `make docs`"


def test_json_schema_allows_its_own_defaults() -> None:
    schema = json.loads(json_schema())
    for node in _nodes(schema):
        if "enum" in node and node.get("default") is not None:
            assert node["default"] in node["enum"]
    compilation = schema["$defs"]["CompilationConfig"]["properties"]
    assert compilation["cudagraph_mode"]["default"] == "FULL"
    assert compilation["attention_support"]["default"] == "ALWAYS"


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every schema inside a schema; names of properties and definitions are no schemas."""
    yield node
    below = [
        *node.get("properties", {}).values(),
        *node.get("$defs", {}).values(),
        *node.get("anyOf", ()),
    ]
    below += [
        node[key] for key in ("items", "additionalProperties") if isinstance(node.get(key), dict)
    ]
    for inner in below:
        yield from _nodes(inner)
