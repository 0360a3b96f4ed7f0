"""vLLM on the CPU, in a process of its own: it brings versions of torch and transformers of its own.

`WEFT_BENCH_VLLM_PYTHON` (or `--vllm-python`) names the interpreter of an environment that has it. Set here: bfloat16,
the number of threads and the cores that they are bound to, a small pool of KV pages that fits all requests at once, no
prefix cache. Everything else, compilation included, is vLLM's default; starting takes minutes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from bench.peers.child import ChildPeer, script

PYTHON_VARIABLE = "WEFT_BENCH_VLLM_PYTHON"
KV_GIB = 4


class VllmCpu(ChildPeer):
    """Prompts of any number up to `max_sequences`; raises `ImportError` where no interpreter with vLLM is named."""

    name = "vllm"

    def __init__(self, checkpoint: Path, threads: int, max_sequences: int = 32, context: int = 512):
        python = os.environ.get(PYTHON_VARIABLE)
        if not python:
            raise ImportError(f"{PYTHON_VARIABLE} does not name the Python of an environment with vLLM")
        if shutil.which(python) is None:
            raise ImportError(f"{PYTHON_VARIABLE} names {python}, which is no program")
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        super().__init__(
            [python, script("vllm_child.py")],
            {
                "VLLM_CPU_OMP_THREADS_BIND": cores,
                "OMP_NUM_THREADS": str(threads),
                "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
                # In this process: a second one would poll its socket while others are measured.
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
            },
            checkpoint=str(checkpoint),
            threads=threads,
            max_sequences=max_sequences,
            context=context,
        )
