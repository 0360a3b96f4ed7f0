"""Movements of pages between two pools in Triton: one launch for all layers, with addresses looked up once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from weft.kernels import reference
from weft.kernels.base import MovePages
from weft.kernels.triton.device import elementwise as device
from weft.kernels.triton.launch import INTERPRETED

WORD = 16
"""Bytes that a thread moves at a time. Page parts, and where they begin, are multiples of it, or go to torch."""
BLOCK = 2048
"""Halves of a `WORD` that a program moves. Not tuned by measurement."""


class TritonMove:
    """`base.MovePages` for pools of bytes on one device, whose last dimension is contiguous."""

    def __init__(self, source: Sequence[Tensor], destination: Sequence[Tensor], columns: Sequence[Sequence[int]]):
        """`columns` are those of the table that the kernel reads."""
        self._pools = (*source, *destination)  # they live as long as their addresses are held
        # The copy is done when this returns: the table is read on any stream.
        self._table = torch.tensor(columns, dtype=torch.int64).to(source[0].device)
        words = max(columns[-1])
        self._block = min(BLOCK, triton.next_power_of_2(words))
        self._grid = len(source), triton.cdiv(words, self._block)

    def __call__(self, source_pages: Tensor, destination_pages: Tensor) -> None:
        """Copy pages, on the current stream."""
        if len(source_pages):
            pages = (source_pages.contiguous(), destination_pages.contiguous())
            device.move_pages[len(source_pages), *self._grid](
                self._table, *pages, LAYERS=self._table.shape[1], BLOCK=self._block
            )


def prepare_move(source: Sequence[Tensor], destination: Sequence[Tensor]) -> MovePages:
    """Movements of pages between pools, in Triton. Contract: `base.PrepareMove`."""
    pools = (source, destination)
    placed = [
        *([t.data_ptr() for t in pool] for pool in pools),
        *([t.stride(0) for t in pool] for pool in pools),
        [t.shape[1] for t in source],
    ]
    fit = all(t.is_cpu == INTERPRETED and t.dtype == torch.uint8 and t.stride(1) == 1 for pool in pools for t in pool)
    if not fit or any(number % WORD for column in placed for number in column):
        return reference.prepare_move(source, destination)
    return TritonMove(source, destination, [*placed[:-1], [width // 8 for width in placed[-1]]])
