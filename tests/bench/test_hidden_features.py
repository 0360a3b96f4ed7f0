"""Features of the processor that a process does not see."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from bench.peers import hidden_features, levels
from weft.cli.probe import cpu_features

HIDDEN = hidden_features.environment(("avx512", "amx"))
needs_faults = pytest.mark.skipif(not HIDDEN, reason="CPUID cannot be made to fault here")


def run(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@needs_faults
def test_libraries_of_the_process_and_its_threads_see_no_avx512() -> None:
    code = (
        "import threading, torch; from bench.peers.hidden_features import shows_avx512; found = []\n"
        "thread = threading.Thread(target=lambda: found.append(shows_avx512())); thread.start(); thread.join()\n"
        "print(torch.backends.cpu.get_cpu_capability(), shows_avx512(), *found)"
    )
    assert run(code, HIDDEN).stdout.split() == ["AVX2", "False", "False"]


@needs_faults
def test_what_is_not_hidden_is_seen() -> None:
    code = "from bench.peers.hidden_features import shows_avx512; print(shows_avx512())"
    assert run(code, {**HIDDEN, "WEFT_BENCH_HIDDEN": "amx"}).stdout.strip() == str("avx512f" in cpu_features())


@needs_faults
def test_a_segmentation_fault_still_ends_the_process() -> None:
    done = run("import ctypes; ctypes.string_at(0)", {**HIDDEN, "PYTHONFAULTHANDLER": ""})
    assert done.returncode == -signal.SIGSEGV


def test_nothing_is_hidden_without_a_level() -> None:
    assert hidden_features.shows_avx512() is None
    assert levels.environment(None) == {}


@needs_faults
def test_a_level_hides_what_lies_beyond_it() -> None:
    assert levels.environment("avx512")["WEFT_BENCH_HIDDEN"] == "amx"
    assert levels.environment("avx2").items() >= HIDDEN.items()
