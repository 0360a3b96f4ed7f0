"""The metadata of one ragged forward pass, as tensors on a device.

Owns the lowering of a `ForwardBatch` (host numbers) to an `AttentionBatch` (device tensors and the host copies that
kernels need for shapes). Does not know models, samplers or where pages come from. A worker makes one per pass, and
hands it to every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.core.step import I32, Bool, ForwardBatch
from weft.kernels.work_items import WorkTables


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """A `ForwardBatch` on a device; the fields of the same name mean the same.

    Shapes: T query tokens, R rows, K (row, page) entries, P page size.
    """

    positions: Tensor
    """[T] int64."""
    write_slots: Tensor
    """[T] int64, `page * P + offset`; -1: the token's KV is not written."""
    q_indptr: Tensor
    """[R + 1] int32."""
    kv_indptr: Tensor
    """[R + 1] int32."""
    kv_page_ids: Tensor
    """[K] int32."""
    kv_lens: Tensor
    """[R] int32."""
    q_lens: I32
    """[R] host: query tokens of each row."""
    kv_lens_host: I32
    """[R] host copy of `kv_lens`."""
    q_indptr_host: I32
    """[R + 1] host copy of `q_indptr`."""
    kv_indptr_host: I32
    """[R + 1] host copy of `kv_indptr`."""
    plain_rows: Bool
    """[R] host: causal, every KV entry visible, no mask. Fast kernels may take these alone."""
    all_written: bool
    """No write slot is -1."""
    page_size: int
    causal: Tensor | None = None
    """[R] bool; None: every row is causal."""
    visibility: Tensor | None = None
    """[K] int32 holding the bits of the unsigned words; None: everything is visible."""
    mask_bits: Tensor | None = None
    """uint8, as in `ForwardBatch`; None: no row has a mask."""
    mask_indptr: Tensor | None = None
    """[R + 1] int32; with `mask_bits`."""
    tables: WorkTables | None = None
    """What attention follows in a pass of fixed shape, all of whose rows are plain: what the batch says of rows, on the
    host and on the device, then means nothing. None: attention follows the rows."""
    cache: dict[Any, Any] = field(default_factory=dict)
    """What kernels and layers derive once per pass and share among layers, by a key of their own."""

    @property
    def num_tokens(self) -> int:
        """T, the number of query tokens."""
        return self.positions.shape[0]

    @property
    def num_rows(self) -> int:
        """R, the number of rows."""
        return len(self.q_lens)


def lower(forward: ForwardBatch, page_size: int, device: torch.device | str = "cpu") -> AttentionBatch:
    """Copy what attention needs of `forward` to `device`. On a GPU the copies are asynchronous."""
    target = torch.device(device)
    q_lens = np.diff(forward.q_indptr)
    plain = _plain_rows(forward)
    masked = forward.mask_bits is not None and forward.mask_indptr is not None
    return AttentionBatch(
        positions=_put(forward.positions, target, np.int64),
        write_slots=_put(forward.write_slots, target, np.int64),
        q_indptr=_put(forward.q_indptr, target),
        kv_indptr=_put(forward.kv_indptr, target),
        kv_page_ids=_put(forward.kv_page_ids, target),
        kv_lens=_put(forward.kv_lens, target),
        q_lens=q_lens,
        kv_lens_host=forward.kv_lens,
        q_indptr_host=forward.q_indptr,
        kv_indptr_host=forward.kv_indptr,
        plain_rows=plain,
        all_written=bool((forward.write_slots >= 0).all()),
        page_size=page_size,
        causal=None if forward.causal is None else _put(forward.causal, target),
        visibility=None if forward.visibility is None else _put(forward.visibility.view(np.int32), target),
        mask_bits=_put(forward.mask_bits, target) if masked and forward.mask_bits is not None else None,
        mask_indptr=_put(forward.mask_indptr, target) if masked and forward.mask_indptr is not None else None,
    )


def _plain_rows(forward: ForwardBatch) -> Bool:
    rows = forward.num_rows
    plain: Bool = np.ones(rows, np.bool_) if forward.causal is None else forward.causal.astype(np.bool_)
    if forward.visibility is not None:
        # A word may leave bits beyond the row's last entry clear, so only bits of existing entries would tell exactly;
        # a cleared bit anywhere sends the row to the general kernel, which is right for both.
        row_of_page = np.repeat(np.arange(rows), np.diff(forward.kv_indptr))
        plain[row_of_page[forward.visibility != np.uint32(0xFFFFFFFF)]] = False
    if forward.mask_bits is not None and forward.mask_indptr is not None:
        plain &= np.diff(forward.mask_indptr) == 0
    return plain


def _put(array: npt.NDArray[Any], device: torch.device, dtype: type[np.generic] | None = None) -> Tensor:
    # `copy` because arrays decoded from the wire are read-only, which torch tensors cannot be.
    host = torch.from_numpy(np.array(array, dtype=dtype, copy=True, order="C"))
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
