"""Configuration files that tests write, and the messages of those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cgplan.config import read_config
from cgplan.errors import ConfigError


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(text: str) -> Path:
        path = tmp_path / "c.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def refusal(write: Any) -> Callable[..., str]:
    """The message for a text that is refused as a configuration; it names the file."""

    def message_of(text: str, *overrides: str, kind: type[ConfigError] = ConfigError) -> str:
        with pytest.raises(ConfigError) as caught:
            read_config(write(text), overrides)
        assert type(caught.value) is kind
        assert caught.value.remedy
        return caught.value.message

    return message_of
