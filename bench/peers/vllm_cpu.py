"""vLLM on the CPU, in a process of its own: it brings versions of torch and transformers of its own.

`BENCH_VLLM_PYTHON` (or `--vllm-python`) names the interpreter of an environment that has it. Set here: bfloat16,
the number of threads and the cores that they are bound to, a small pool of KV pages that fits all requests at once, no
prefix cache. The server gets prefix caching and a pool of a given size instead. Everything else, compilation included,
is vLLM's default; starting takes minutes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.peers.child import ChildPeer, script
from weft.abi.errors import WeftError
from weft.cli.bench.server import HOST, ServerProcess, free_port, server_process

PYTHON_VARIABLE = "BENCH_VLLM_PYTHON"
KV_GIB = 4
SERVER_BLOCK = 32
"""Tokens of a KV block: the least that vLLM recommends on a CPU."""
_SHOWN_CHARS = 2000


def vllm_cpu(
    checkpoint: Path,
    threads: int,
    environment: Mapping[str, str],
    max_sequences: int = 32,
    context: int = 512,
) -> ChildPeer:
    """Start it for prompts of any number up to `max_sequences`. Raises `ImportError` where no interpreter with vLLM is
    named, and `ChildError`."""
    # In this process: a second one would poll its socket while others are measured.
    variables = {**_variables(threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [_interpreter(), script("vllm_child.py")]
    sizes = {"threads": threads, "max_sequences": max_sequences, "context": context}
    return ChildPeer("vllm", command, {**environment, **variables}, checkpoint=str(checkpoint), **sizes)


@contextlib.contextmanager
def vllm_server(checkpoint: Path, threads: int, kv_tokens: int, max_context: int) -> Iterator[ServerProcess]:
    """vLLM's server for OpenAI's API, ready. bfloat16, prefix caching, KV blocks for `kv_tokens`, rounded up,
    and requests of up to `max_context` tokens; everything else is vLLM's default. Raises as `vllm_cpu`, and `WeftError`
    with the end of its output."""
    port = free_port()
    command = [_interpreter(), "-m", "vllm.entrypoints.openai.api_server", "--host", HOST, "--port", str(port)]
    command += ["--model", str(checkpoint), "--dtype", "bfloat16", "--max-model-len", str(max_context)]
    command += ["--block-size", str(SERVER_BLOCK), "--num-gpu-blocks-override", str(-(-kv_tokens // SERVER_BLOCK))]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    with tempfile.TemporaryFile() as log:
        try:
            environment = {**os.environ, **_variables(threads)}
            with server_process(command, environment, port, ready="/health", log=log) as server:
                yield server
        except WeftError as error:
            log.seek(0)
            said = log.read()[-_SHOWN_CHARS:].decode(errors="replace")
            raise WeftError(f"vLLM's server ended; it wrote:\n{said}") from error


def _interpreter() -> str:
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        raise ImportError(f"{PYTHON_VARIABLE} does not name the Python of an environment with vLLM")
    if shutil.which(python) is None:
        raise ImportError(f"{PYTHON_VARIABLE} names {python}, which is not a program")
    return python


def _variables(threads: int) -> dict[str, str]:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
