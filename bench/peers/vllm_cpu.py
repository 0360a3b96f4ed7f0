"""vLLM on the CPU, in a process of its own: it brings versions of torch and transformers of its own.

`WEFT_BENCH_VLLM_PYTHON` (or `--vllm-python`) names the interpreter of an environment that has it. Set here: bfloat16,
the number of threads and the cores that they are bound to, a small pool of KV pages that fits all requests at once, no
prefix cache. Everything else, compilation included, is vLLM's default; starting takes minutes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from bench.peers.child import ChildPeer, script

PYTHON_VARIABLE = "WEFT_BENCH_VLLM_PYTHON"
KV_GIB = 4


def vllm_cpu(
    checkpoint: Path,
    threads: int,
    environment: Mapping[str, str],
    max_sequences: int = 32,
    context: int = 512,
) -> ChildPeer:
    """Start it for prompts of any number up to `max_sequences`. Raises `ImportError` where no interpreter with vLLM is
    named, and `ChildError`."""
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        raise ImportError(f"{PYTHON_VARIABLE} does not name the Python of an environment with vLLM")
    if shutil.which(python) is None:
        raise ImportError(f"{PYTHON_VARIABLE} names {python}, which is not a program")
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        # In this process: a second one would poll its socket while others are measured.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, script("vllm_child.py")]
    sizes = {"threads": threads, "max_sequences": max_sequences, "context": context}
    return ChildPeer("vllm", command, {**environment, **variables}, checkpoint=str(checkpoint), **sizes)
