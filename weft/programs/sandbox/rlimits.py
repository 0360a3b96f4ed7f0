"""The limits that a process sets on itself before it reads untrusted code. Standard library only."""

from __future__ import annotations

import resource


def limit(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """No more processor time, address space and disk than this, few files, and no core dumps.

    Beyond `cpu_s` the process ends with SIGXCPU.
    """
    for kind, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # At the hard limit of processor time comes SIGKILL, which says less.
        most = soft + 1 if kind == resource.RLIMIT_CPU and (hard == resource.RLIM_INFINITY or soft < hard) else soft
        resource.setrlimit(kind, (soft, most))
