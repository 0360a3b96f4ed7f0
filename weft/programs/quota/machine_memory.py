"""How much memory this process may use at most, which the share of sandboxes is taken of."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def machine_memory_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes of the machine, or of the smallest enclosing cgroup where that has less: containers are such."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = root / path.strip("/")
        # A container sees its own cgroup as the root; its path outside does not exist inside.
        inside = [folder, *folder.parents]
        found = [_read(one / name) for one in (*inside[: inside.index(root)], root)]
        limits += [int(text) for text in found if text.isdecimal()]
    return min(limits)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
