"""Pages of the site in chromium: everybody can read them, and a narrow window is not scrolled sideways."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="needs the extra `browser`"
)
ROOT = Path(__file__).parents[2]
OF_THE_THEME = "landmark-unique"  # each of its buttons that copy is in a <nav> without a name


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("material", "mkdocstrings_handlers.python"):
        pytest.importorskip(name, reason="needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    build = ["mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run([sys.executable, "-m", *build], check=True, cwd=ROOT)
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize(
    "name", ["index", "graphed", "benchmarks", "api/capture", "api/errors", "api/planning"]
)
def test_everybody_can_read_a_page(
    browser: Any, site: Path, name: str, width: int, scheme: Any
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(f"file://{site}/{name}.html")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    found = axe.Axe().run(page)
    ids = {violation["id"] for violation in found.response["violations"]}
    assert ids <= {OF_THE_THEME}, found.generate_report()
    page.close()


@pytest.mark.parametrize("name", ["index", "architecture", "config-reference", "serving", "zoo"])
def test_no_word_of_a_page_is_broken(
    browser: Any, site: Path, broken_words: Any, name: str
) -> None:
    page = browser.new_page(viewport={"width": 400, "height": 900})
    page.goto(f"file://{site}/{name}.html")
    assert broken_words(page) == []
    page.close()
