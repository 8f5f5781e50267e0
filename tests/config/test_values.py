"""Amounts with units."""

from __future__ import annotations

from typing import Any

import pytest

from cgplan.config import load_config, validate_config
from cgplan.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 << 20), ("1.5 KiB", 1536), ("2GB", 2 * 10**9), ("7kB", 7000), ("10 B", 10), ("10", 10),
        ("' 2gib '", 2 << 30), ("0.1GiB", 107374182), ("1.5kB", 1500), ("12.0", 12),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("section", "key"), [("budget", "memory"), ("compilation", "state_copy")])
def test_bytes_have_units(write: Any, text: str, size: int, section: str, key: str) -> None:
    config = load_config(write(f"{section}: {{{key}: {text}}}\n"))
    assert getattr(getattr(config, section), key) == size
    assert validate_config(config.model_dump(mode="json")) == config, (
        "its own dump reads back equal"
    )


@pytest.mark.parametrize("text", ["1.5", "'1.5'", "2.25"])
def test_a_part_of_a_byte_asks_for_a_unit(write: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=r"was a unit meant\?.*2GiB"):
        load_config(write(f"budget: {{memory: {text}}}\n"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("500 ms", 0.5), ("1.5", 1.5), ("2 MIN", 120)],
)
def test_times_have_units(write: Any, text: str, seconds: float) -> None:
    config = load_config(write(f"budget: {{capture_time: {text}}}\n"))
    assert config.budget.capture_time == seconds
    assert validate_config(config.model_dump(mode="json")) == config
