"""The commands in process, and the models and the configuration that their tests use."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from cgplan import errors
from cgplan.cli.main import app
from cgplan.planning import Plan
from cgplan.planning.plan import Predicted

MODELS = """
import pathlib
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 4)

    def forward(self, x, scale=None):
        y = self.down(torch.relu(self.up(x)))
        return y if scale is None else y * float(scale)

class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.stem = nn.Conv2d(3, 2, 7, stride=7, dtype=torch.bfloat16)

    def forward(self, pixels):
        return self.stem(self.drop(pixels)).flatten(1)

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8, padding_idx=7)
        self.drop = nn.Dropout(0.5)

    def forward(self, words, offsets):
        return self.drop(self.table(words)) + offsets[:, None]

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x, token_ids, n: int):
        return self.up(x) if x.sum() > 0 else x

def build(width=16):
    return Net(width)

def marking(path):
    pathlib.Path(path).write_text("built")
    return Net()

def chatty():
    print("the builder speaks")
    net = Net()
    def forward(x):
        print("the model speaks")
        return net(x)
    return forward

def raising():
    raise KeyError("weights are missing")

def interrupted():
    raise KeyboardInterrupt

def exiting():
    def forward(x):
        raise SystemExit(42)
    return forward

def not_a_model():
    return 3

def scalar():
    return lambda x: x.sum()

def syncing():
    def forward(x):
        return x * x.sum().item()
    return forward

class Syncing(nn.Module):
    def forward(self, x):
        return x * x.sum().item()

def partly():
    net = Net()
    net.down = nn.Sequential(net.down, Syncing())
    return net

def hungry():
    def forward(x):
        if x.shape[0] == 2:
            raise torch.OutOfMemoryError("tried to allocate 5 GiB")
        return x * 2
    return forward

not_callable = 7
"""


CONFIG: dict[str, Any] = {
    "model": {"target": "models.py:build"},
    "device": "cpu",
    "inputs": {"x": {"shape": ["num_tokens", 8], "dtype": "float32", "pad": 0}},
    "compilation": {"cudagraph_capture_sizes": [1, 2, 4]},
    "report": {"repeats": 3, "warmups": 1, "sizes": [1, 3, 9]},
}


def cgplan_command(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def good(*arguments: str) -> Result:
    result = cgplan_command(*arguments)
    assert result.exit_code == 0, result.output
    return result


def plan_of(*arguments: str) -> Plan:
    """The plan that a command prints with ``--json``."""
    return Plan.model_validate_json(good(*arguments, "--json").stdout)


def predicted(*arguments: str) -> Predicted:
    found = plan_of(*arguments).predicted
    assert found is not None
    return found


def settings(*values: str) -> tuple[str, ...]:
    """``--set`` before each value."""
    return tuple(part for value in values for part in ("--set", value))


def unwrapped(message: str) -> str:
    """Lines of a message that were cut at the terminal's width, whole again."""
    return re.sub(r"\n +(?!remedy: |more: |- )(?=\S)", " ", message)


def refused(error: type[errors.CgplanError], *arguments: str) -> str:
    """What standard error says of a command that ends with ``error``: a message with a remedy, and no traceback."""
    result = cgplan_command(*arguments)
    assert result.exit_code == error.exit_code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    message = unwrapped(result.stderr[result.stderr.index("error: ") :])
    assert "remedy: " in message
    return message


HISTOGRAM = "num_tokens,count\n1,500\n2,300\n7,200\n"
REQUESTS = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"{second},4,3\n" for second in range(20)
)
TABLE = "mode,num_tokens,microseconds\neager,1,1000\neager,16,1000\nFULL,1,100\nFULL,8,300\nFULL,16,900\n"


def use_traffic(home: Path) -> tuple[str, ...]:
    (home / "traffic.csv").write_text(HISTOGRAM)
    (home / "times.csv").write_text(TABLE)
    return "plan", "--config", "good.yaml", "--traffic", "traffic.csv", "--step-times", "times.csv"
