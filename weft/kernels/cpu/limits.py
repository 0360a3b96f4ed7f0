"""What this machine does at most: bytes read from memory and operations of products, per second.

Owns two measurements, each a fraction of a second, for benchmarks to compare kernels with. On machines shared with
others both vary from one second to the next: measure them beside what they are compared with.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from weft.kernels.cpu import huge_pages, ops

READ_BYTES = 512 << 20
"""More than the caches hold that a process has to itself."""
BYTES_PER_THREAD = 32 << 10
ROUNDS = 20_000


def read_bandwidth(kernels: ops.CpuKernels, threads: int, runs: int = 3) -> float:
    """Bytes per second, the best of `runs`."""
    data = torch.empty(READ_BYTES, dtype=torch.uint8)
    huge_pages.ask(data)
    data.zero_()
    return READ_BYTES / _best(lambda: kernels.probe_read(data, threads), runs)


def product_peak(kernels: ops.CpuKernels, dtype: torch.dtype, threads: int, runs: int = 3) -> float:
    """Operations per second on operands in the first-level cache, the best of `runs`; an addition counts as one."""
    operations = 0.0

    def run() -> None:
        nonlocal operations
        operations = kernels.probe_product(data, ROUNDS, threads)

    # Numbers, not zeros: arithmetic on zeros takes less power, and some processors then run faster.
    data = torch.randn(threads * BYTES_PER_THREAD // dtype.itemsize).to(dtype)
    seconds = _best(run, runs)
    return operations / seconds


def _best(run: Callable[[], object], runs: int) -> float:
    run()
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)
