"""Graphs of a CUDA device, through torch.

All graphs of a worker share one pool of memory: they run one after the other, and what one leaves there is read before
the next begins.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from weft.abi.errors import WeftError
from weft.worker.graphs import Graph

MIN_FREE_BYTES = 256 << 20
"""Of the device: with less, the memory of another graph could be what a later step lacks."""


class CudaGraphs:
    """`graphs.GraphBackend` of the current CUDA device. Captures on the current stream, which must not be the default
    one."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, body: Callable[[], None]) -> Graph:
        """Capture a CUDA graph of a step (`graphs.GraphBackend`)."""
        free, _ = torch.cuda.mem_get_info()
        if free < MIN_FREE_BYTES:
            torch.cuda.empty_cache()  # what torch keeps of finished steps
            free, _ = torch.cuda.mem_get_info()
        if free < MIN_FREE_BYTES:
            raise WeftError(f"{free >> 20} MiB of device memory are free, {MIN_FREE_BYTES >> 20} are needed")
        graph = torch.cuda.CUDAGraph()
        torch.cuda.current_stream().synchronize()
        # Other threads wait for events meanwhile, which only this mode allows them.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            body()
        except BaseException:
            with suppress(RuntimeError):  # the body may have broken the capture, and its own error says more
                self._end(graph)
            raise
        self._end(graph)
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            # torch's allocator believes that the capture goes on, and would not take back what other streams have used.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            raise
