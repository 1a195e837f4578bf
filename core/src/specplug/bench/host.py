"""What a figure depends on besides the code: machine, versions, load."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

QUIET_LOAD = 0.5
"""Load average above which timings are not to be trusted."""


def load_average() -> float:
    """Return the load average of the last minute; 0 where the system keeps none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def describe(plugins: Mapping[str, str]) -> dict[str, Any]:
    """Return time, machine and versions; `plugins`: distribution -> version of the algorithms compared."""
    names = ("specplug", "torch", "transformers", "numpy")
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())] if cuda else [],
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": load_average(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in names}, **plugins},
        "command": ["specplug", *sys.argv[1:]],
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
