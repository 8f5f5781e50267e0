"""The page of errors: a section for each class, to which the command line leads, and messages that the code has."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from pages import PAGES, ROOT

from cgplan import errors
from cgplan.cli.output import section_of

PAGE = PAGES["troubleshooting"]
CLASSES = [
    c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.CgplanError)
]


def test_each_error_has_its_section_with_its_exit_code() -> None:
    sections = re.findall(r"^### (\w+)\n\nExit code (\d+)\. ", PAGE.read_text(), re.MULTILINE)
    assert {name: int(code) for name, code in sections} == {
        c.__name__: c.exit_code for c in CLASSES
    }
    for error, (path, _, anchor) in zip(
        CLASSES, (section_of(c).partition("#") for c in CLASSES), strict=True
    ):
        assert Path(path).samefile(PAGE)
        assert anchor == error.__name__.lower()  # as GitHub and the site make it of the heading


def test_the_first_table_names_each_error_once_with_its_exit_code() -> None:
    rows = re.findall(r"^\| .* \|$", PAGE.read_text(), re.MULTILINE)
    named = re.findall(r"\[(\w+)\]\(#\w+\) (\d+)", "\n".join(rows))
    assert sorted(named) == sorted((c.__name__, str(c.exit_code)) for c in CLASSES)


def test_pages_in_the_package_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a wheel they lie in the package; in a checkout beside it."""
    monkeypatch.setattr(
        "cgplan.cli.output.__file__", str(tmp_path / "cgplan" / "cli" / "output.py")
    )
    for folder in (tmp_path / "docs", tmp_path / "cgplan" / "docs"):
        folder.mkdir(parents=True)
        assert section_of(errors.InputError) == f"{folder}/troubleshooting.md#inputerror"


def test_messages_that_the_page_quotes_are_in_the_code() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "cgplan").rglob("*.py"))
    code = re.sub(r'"\s+f?"', "", code)
    quoted = re.findall(r"\*\*(\".*?)\*\*", PAGE.read_text().replace("\n", " "))
    assert len(quoted) > 30
    parts = (
        words.strip(" ,:.")
        for message in re.findall(r'"([^"]+)"', " ".join(quoted))
        for words in message.split("...")
    )
    assert {words for words in parts if words not in code} == set()
