"""A folder with models and a configuration for the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from commands import CONFIG, MODELS


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file of models and a good configuration."""
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path
