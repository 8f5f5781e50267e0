"""The machine that a report was made on."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from cgplan.backends import GraphBackend
from cgplan.reports.records import Environment
from cgplan.version import __version__


def describe_environment(backend: GraphBackend, config_hash: str) -> Environment:
    driver = None
    cuda = None
    if backend.device.type == "cuda":
        device = torch.cuda.get_device_name(backend.device)
        cuda = torch.version.cuda
        for word in _text("/proc/driver/nvidia/version").split():
            if word[0].isdigit() and "." in word:
                driver = word
                break
    else:
        device = platform.processor() or platform.machine()
        for line in _text("/proc/cpuinfo").splitlines():
            if line.startswith("model name"):
                device = line.partition(":")[2].strip()
                break
    return Environment(
        backend=backend.name,
        machine=f"{platform.system()} {platform.machine()}",
        device=device,
        driver=driver,
        cuda=cuda,
        torch=torch.__version__,
        python=platform.python_version(),
        cgplan=__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        config_hash=config_hash,
    )


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
