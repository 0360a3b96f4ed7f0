"""How much memory and how many cores this process may use.

Owns the reading of /proc and of cgroup files, where containers keep limits that the machine's totals do not show.
"""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 62
"""Version 1 writes a number near 2**63 for "no limit"."""


def free_host_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that could be allocated now without swapping: the least of the machine's and every enclosing cgroup's."""
    room = [_available(proc)]
    for controller, path in _memberships(proc):
        if controller == "":
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controller.split(","):
            root = cgroups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        room += [_room(folder, *names) for folder in _ancestors(root, path)]
    return max(0, min(room))


def usable_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Cores that this process may run on, at least 1: its affinity, and the processor quota of its cgroups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for controller, path in _memberships(proc):
        if controller == "":
            limits = [_quota(_read(folder / "cpu.max").split()) for folder in _ancestors(cgroups, path)]
        elif "cpu" in controller.split(","):
            folders = [f for root in (cgroups / "cpu", cgroups / controller) for f in _ancestors(root, path)]
            limits = [_quota([_read(f / "cpu.cfs_quota_us"), _read(f / "cpu.cfs_period_us")]) for f in folders]
        else:
            continue
        cores = min([cores, *limits])
    return max(1, cores)


def _available(proc: Path) -> int:
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    # Not Linux. What is free is not told everywhere; half of what there is, is a guess that leaves room.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _memberships(proc: Path) -> list[tuple[str, str]]:
    """(controllers, path) of each hierarchy that the process is in; version 2 has no controllers here."""
    lines = [line.split(":", 2) for line in _read(proc / "self" / "cgroup").splitlines()]
    return [(parts[1], parts[2]) for parts in lines if len(parts) == 3]


def _ancestors(root: Path, path: str) -> list[Path]:
    """The cgroup's folder and those above it, down to `root`: each may have a limit.

    Inside a container the path may be the host's and lead nowhere; the container's own group is then the root.
    """
    folder = root / path.strip("/")
    return [folder, *(parent for parent in folder.parents if parent == root or root in parent.parents)]


def _room(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int:
    """What is left under one cgroup's limit. Inactive pages of the file cache count as left."""
    limit, usage = _number(folder / limit_name), _number(folder / usage_name)
    if limit is None or usage is None or limit >= UNLIMITED:
        return UNLIMITED
    cached = 0
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == cache_name and value.isdigit():
            cached = int(value)
    return limit - max(0, usage - cached)


def _quota(fields: list[str]) -> int:
    """(microseconds, period) -> whole cores, rounded up; "max", -1 or nothing: no limit."""
    if len(fields) != 2 or not all(field.isdigit() for field in fields) or int(fields[1]) == 0:
        return UNLIMITED
    return -(-int(fields[0]) // int(fields[1]))


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
