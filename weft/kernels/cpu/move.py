"""Movements of pages between two pools on the C++ library: one call for all layers, with addresses looked up once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor


class CpuMove:
    """`base.MovePages` for pools of bytes on the CPU, whose last dimension is contiguous."""

    def __init__(self, function: Callable[..., None], source: Sequence[Tensor], destination: Sequence[Tensor]):
        """`function` is the library's `weft_move_pages`."""
        self._function = function
        self._pools = (*source, *destination)  # they live as long as their addresses are held
        columns = (
            *([t.data_ptr() for t in pool] for pool in (source, destination)),
            *([t.stride(0) for t in pool] for pool in (source, destination)),
            [t.shape[1] for t in source],
        )
        self._table = np.array(columns, np.int64)
        self._rows = [row.ctypes.data for row in self._table]

    def __call__(self, source_pages: Tensor, destination_pages: Tensor) -> None:
        """Copy pages, on as many threads as torch has."""
        pages = (source_pages.contiguous(), destination_pages.contiguous())
        sizes = (self._table.shape[1], len(source_pages), torch.get_num_threads())
        self._function(*self._rows, *(t.data_ptr() for t in pages), *sizes)
