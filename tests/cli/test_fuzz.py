"""Mutated configurations and overrides, damaged reports: each command ends with 0 or a documented error."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from cgplan import errors
from cgplan.cli.main import app
from cgplan.config import Config

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"
CODES = {0, *(kind.exit_code for kind in vars(errors).values() if hasattr(kind, "exit_code"))} - {1}
ODD: list[Any] = [
    None, True, 0, -1, 1, 3, 10**6, 2**31, 2**63, 10**40, 10**400, 1.5, -0.0, 1e308, float("nan"), float("inf"), "",
    " ", "last", "num_tokens", "num_reqs + 1", "num_tokens * 0", "999999999999 * num_tokens", "\N{SNOWMAN}", "a" * 300,
    "FULL", "none", "lazy", "vllm", "2GiB", "1e400GiB", "30s", "9" * 400 + "GiB", "0x10", "torch.int8", [], {}, [[]],
    {"a": 1}, {1: 2}, {None: None}, [1] * 50, ["*"], "os:system", "cuda:99999999999999999999", ["num_reqs", 0], [2**63],
]  # fmt: skip
YAML_BITS = [
    "&a ", "*a", "!!python/object/apply:os.system ['echo x']", "!!binary aGVsbG8=", "!!bool abc", "!!int ''",
    "!!float _", "!!timestamp abc", "!!timestamp 2001-13-45", "!!null x", "!!set {a, b}", "!!omap [a: 1]", "!foo 1",
    "? [a, b]\n: c", "<<: *a", "<<: 3", "<<: [1]", "{{{{", "[" * 3000, "\t", "%YAML 9.9\n---\n", "---\n---\n",
    "190:20:30:45", "~", "'", "|", "@", "\x07", "!!value =", "1e1000", "!!int 1:99:99", "\ufeff", "\x00",
    "&z [*z]", '"\\U99999999"',
]  # fmt: skip


def places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def mutated(data: Any, rng: random.Random) -> Any:
    """A copy with up to four values that are odd, gone, or the whole once more."""
    whole = copy.deepcopy(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        *parents, last = rng.choice(list(places(whole)) or [(None,)])
        below = whole
        for parent in parents:
            below = below[parent]
        if last is None:
            break
        how = rng.random()
        if how < 0.15:
            del below[last]
        else:
            below[last] = copy.deepcopy(data if how < 0.2 else rng.choice(ODD))
    return whole


def cases(rng: random.Random, folder: Path) -> Iterator[list[str]]:
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "configs").glob("*.yaml"))]
    config, report = folder / "c.yaml", folder / "r.json"
    names = [
        (section, getattr(info.annotation, "model_fields", {}))
        for section, info in Config.model_fields.items()
    ]
    for _ in range(20):
        given = mutated(yaml.safe_load(rng.choice(texts)), rng)
        section, fields = rng.choice([(name, list(fields)) for name, fields in names if fields])
        if isinstance(given.get(section, {}), dict) and rng.random() < 0.5:
            given[section] = {**given.get(section, {}), rng.choice(fields): rng.choice(ODD)}
        config.write_text(yaml.safe_dump(given), encoding="utf-8")
        yield ["inspect", "--config", str(config)]
    for _ in range(20):
        text = rng.choice(texts)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice([*YAML_BITS, ""]) + text[at + rng.randrange(9) :]
        config.write_bytes(text.encode("utf-8", "replace"))
        yield ["inspect", "--config", str(config)]
    for _ in range(20):
        section, fields = rng.choice([(name, list(fields)) for name, fields in names if fields])
        value = rng.choice(
            [json.dumps(rng.choice(ODD)), str(rng.choice(ODD)), rng.choice(YAML_BITS)]
        )
        key = rng.choice(
            [
                section,
                f"{section}.{rng.choice(fields)}",
                f"{section}.{rng.choice(fields)}.x",
                "",
                "a..b",
            ]
        )
        yield [
            "inspect",
            "--config",
            str(ROOT / "configs" / "decoder_cpu.yaml"),
            "--set",
            f"{key}={value}",
        ]
    saved = [path.read_text(encoding="utf-8") for path in sorted(GOLDEN.glob("*.json"))]
    for _ in range(15):
        text = rng.choice(saved)
        damaged = [
            "[" * 100_000,
            '{"a":' * 100_000,
            "",
            "null",
            "[]",
            text[: rng.randrange(len(text))],
        ]
        report.write_text(rng.choice(damaged), encoding="utf-8")
        yield ["inspect", str(report)]


def test_no_input_is_an_internal_error(tmp_path: Path) -> None:
    for arguments in cases(random.Random(0), tmp_path):
        result = CliRunner().invoke(app, arguments)
        kept = {path.name: path.read_text(errors="replace") for path in tmp_path.iterdir()}
        assert result.exit_code in CODES, (arguments, result.output, kept)
        assert result.exit_code == 0 or "error: " in result.stderr, (arguments, result.output)
