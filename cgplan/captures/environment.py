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
    """Machine, GPU, driver, versions and the time now."""
    gpu = backend.device.type == "cuda"
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in _lines("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        "",
    )
    words = " ".join(_lines("/proc/driver/nvidia/version")).split()
    # of the kernel module
    driver = next((word for word in words if word[:1].isdigit() and "." in word), None)
    return Environment(
        backend=backend.name,
        machine=f"{platform.system()} {platform.machine()}",
        device=torch.cuda.get_device_name(backend.device)
        if gpu
        else cpu or platform.processor() or platform.machine(),
        driver=driver if gpu else None,
        cuda=torch.version.cuda if gpu else None,
        torch=torch.__version__,
        python=platform.python_version(),
        cgplan=__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        config_hash=config_hash,
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
