"""Chromium, for the tests of this folder. They are skipped where it or the extra `browser` is missing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
    if chromium is None:
        pytest.skip("needs chromium")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


WORDS_IN_TWO_LINES = """() => {
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), broken = [], range = document.createRange();
    while (texts.nextNode()) {
        const text = texts.currentNode;
        if (text.parentElement.closest('script, style, pre')) continue;
        for (const word of text.data.matchAll(/[^\\s-]+/g)) {
            range.setStart(text, word.index);
            range.setEnd(text, word.index + word[0].length);
            if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) broken.push(word[0]);
        }
    }
    return broken;
}"""


@pytest.fixture
def broken_words() -> Callable[[Any], list[str]]:
    """Words of a page that two lines share."""
    return lambda page: page.evaluate(WORDS_IN_TWO_LINES)
