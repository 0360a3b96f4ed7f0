"""The name of the processor model. Imports the standard library alone."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def cpu_name() -> str | None:
    """As the processor calls itself."""
    for line in cpu_lines():
        if line.startswith(("model name", "Hardware", "Processor")):
            return line.partition(":")[2].strip()
    return platform.processor() or None


def cpu_lines() -> list[str]:
    """What the system says of its processors; empty where it does not say it in a file."""
    try:
        return CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
