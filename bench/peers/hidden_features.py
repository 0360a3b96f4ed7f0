"""Hides features of the processor from engines that no setting holds to a level.

`hidden_features.c`, preloaded into the process of an engine, answers its CPUID instructions. Libraries that choose
their kernels by CPUID, as all known ones do, take those of a processor without the features. It needs Linux, a
processor and kernel that let CPUID fault (`cpuid_fault` in /proc/cpuinfo), and a C compiler.
"""

from __future__ import annotations

import atexit
import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from weft.cli.probe import cpu_lines

_SOURCE = Path(__file__).with_suffix(".c")


def environment(features: Iterable[str]) -> dict[str, str]:
    """Variables that hide `features` ("avx512", "amx") from a process; none where that is not possible here."""
    library = _library()
    return {} if library is None else {"LD_PRELOAD": str(library), "WEFT_BENCH_HIDDEN": " ".join(features)}


def shows_avx512() -> bool | None:
    """Whether CPUID shows AVX-512 to this process; None: nothing is hidden from it."""
    try:
        return bool(ctypes.CDLL(None).weft_bench_shows_avx512())
    except AttributeError:
        return None


@cache
def _library() -> Path | None:
    compiler = shutil.which("cc")
    if compiler is None or not any("cpuid_fault" in line.split() for line in cpu_lines()):
        return None
    folder = tempfile.mkdtemp(prefix="weft-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = Path(folder) / "hidden_features.so"
    done = subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(file), str(_SOURCE)], capture_output=True)
    return file if done.returncode == 0 else None
