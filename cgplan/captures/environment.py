"""The machine that a report was made on."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from cgplan.backends import GraphBackend
from cgplan.reports.records import Environment
from cgplan.version import __version__

_DRIVER = Path("/proc/driver/nvidia/version")


def describe_environment(backend: GraphBackend, config_hash: str) -> Environment:
    """Machine, GPU, driver, versions and the time now."""
    gpu = backend.device.type == "cuda"
    return Environment(
        backend=backend.name,
        machine=f"{platform.system()} {platform.machine()}",
        device=torch.cuda.get_device_name(backend.device) if gpu else _processor(),
        driver=_driver() if gpu else None,
        cuda=torch.version.cuda if gpu else None,
        torch=torch.__version__,
        python=platform.python_version(),
        cgplan=__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        config_hash=config_hash,
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver() -> str | None:
    """Version of the NVIDIA kernel module, the first word of its line that looks like one."""
    try:
        words = _DRIVER.read_text().split()
    except OSError:
        return None
    return next((w for w in words if w[:1].isdigit() and "." in w), None)
