"""What a captured decode pass reads: one buffer on the device, which every step fills with one copy.

Owns the layout of the buffer, which depends on the bucket alone, and the host buffers that steps are written to: two,
so that one is filled while the other is still on its way. Does not know models or graphs.

Shapes use: R rows of the step, B rows of the bucket, S its items, K (row, page) entries. Rows beyond R are padding:
they have token 0 at position 0, see no KV and write none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.core.step import I32, ForwardBatch
from weft.kernels import splits
from weft.kernels.batch import AttentionBatch
from weft.kernels.splits import SplitTables

I64 = npt.NDArray[np.int64]
ALIGNMENT = 16
"""Of every array in the buffer: kernels are compiled for pointers of this alignment, as for tensors of their own."""
NUM_STAGING = 2


class Bucket(NamedTuple):
    """The sizes of a pass."""

    rows: int
    items: int
    """Of the table of splits; as many as rows: each has a single one."""

    @property
    def merges(self) -> bool:
        """Whether a row may have several splits."""
        return self.items > self.rows


class Section(NamedTuple):
    """One array in the buffer."""

    dtype: type[np.generic]
    shape: tuple[int, ...]
    start: int
    """Bytes."""
    end: int


class StaticInputs:
    """The buffers. Used by one thread."""

    def __init__(self, largest: Bucket, max_entries: int, device: torch.device):
        """Room for steps of up to `largest`, with up to `max_entries` (row, page) entries."""
        size = _layout(largest, max_entries)["kv_page_ids"].end
        self._max_entries = max_entries
        self._on_device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._staging = [_Staging(size, device) for _ in range(NUM_STAGING)]

    def send(self, bucket: Bucket, forward: ForwardBatch) -> None:
        """Bring a step of one query per row to the device. Does not wait for the device, but for the copy before the
        last one."""
        self._staging.append(staging := self._staging.pop(0))
        buffer = staging.when_free()
        layout = _layout(bucket, len(forward.kv_page_ids))
        _fill({name: _host_view(buffer, section) for name, section in layout.items()}, forward)
        used = layout["kv_page_ids"].end
        self._on_device[:used].copy_(staging.host[:used], non_blocking=True)
        staging.sent()

    def views(self, bucket: Bucket) -> dict[str, Tensor]:
        """The arrays of a pass on the device, always at the same place. Entries beyond a step's own hold anything."""
        layout = _layout(bucket, self._max_entries)
        return {name: _device_view(self._on_device, section) for name, section in layout.items()}


class _Staging:
    """A host buffer, and whether its last copy is still under way."""

    def __init__(self, size: int, device: torch.device):
        self.host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._array: npt.NDArray[np.uint8] = self.host.numpy()
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def when_free(self) -> npt.NDArray[np.uint8]:
        """The buffer, once nothing reads it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._array

    def sent(self) -> None:
        """The current stream has a copy of it to make."""
        if self._copied is not None:
            self._copied.record()


def attention_batch(views: dict[str, Tensor], bucket: Bucket, page_size: int) -> AttentionBatch:
    """The batch that a pass over these arrays is given."""
    unknown = np.full(bucket.rows + 1, -1, np.int32)
    return AttentionBatch(
        positions=views["positions"],
        write_slots=views["write_slots"],
        q_indptr=views["q_indptr"],
        kv_indptr=views["kv_indptr"],
        kv_page_ids=views["kv_page_ids"],
        kv_lens=views["kv_lens"],
        q_lens=np.ones(bucket.rows, np.int32),
        kv_lens_host=unknown[1:],
        q_indptr_host=np.arange(bucket.rows + 1, dtype=np.int32),
        kv_indptr_host=unknown,
        plain_rows=np.ones(bucket.rows, np.bool_),
        all_written=False,
        page_size=page_size,
        splits=SplitTables(views["items"], views["merges"] if bucket.merges else None),
    )


def _fill(into: dict[str, npt.NDArray[Any]], forward: ForwardBatch) -> None:
    rows = forward.num_rows
    for name, values, padding in (
        ("positions", forward.positions, 0),
        ("write_slots", forward.write_slots, -1),
        ("token_ids", forward.token_ids, 0),
        ("token_slots", forward.token_slots, 0),
        ("kv_lens", forward.kv_lens, 0),
    ):
        into[name][:rows] = 0 if values is None else values
        into[name][rows:] = padding
    # A row whose token is known may have slot -1, which is not looked up.
    np.maximum(into["token_slots"], 0, out=into["token_slots"])
    into["q_indptr"][:] = np.arange(len(into["q_indptr"]))
    into["kv_indptr"][: rows + 1] = forward.kv_indptr
    into["kv_indptr"][rows + 1 :] = forward.kv_indptr[-1]
    into["kv_page_ids"][:] = forward.kv_page_ids
    first_pages: I32 = into["kv_indptr"][:-1]
    splits.fill(first_pages, into["kv_lens"], into["items"], into["merges"])


def _layout(bucket: Bucket, num_entries: int) -> dict[str, Section]:
    """Where everything is. Page ids are last, so that their number moves nothing else."""
    rows = bucket.rows
    arrays: tuple[tuple[str, type[np.generic], tuple[int, ...]], ...] = (
        ("positions", np.int64, (rows,)),
        ("write_slots", np.int64, (rows,)),
        ("token_ids", np.int64, (rows,)),
        ("token_slots", np.int64, (rows,)),
        ("kv_lens", np.int32, (rows,)),
        ("q_indptr", np.int32, (rows + 1,)),
        ("kv_indptr", np.int32, (rows + 1,)),
        ("items", np.int32, (bucket.items, splits.ITEM_FIELDS)),
        ("merges", np.int32, (rows, splits.MERGE_FIELDS)),
        ("kv_page_ids", np.int32, (num_entries,)),
    )
    found: dict[str, Section] = {}
    start = 0
    for name, dtype, shape in arrays:
        end = start + int(np.prod(shape)) * np.dtype(dtype).itemsize
        found[name] = Section(dtype, shape, start, end)
        start = -(-end // ALIGNMENT) * ALIGNMENT
    return found


def _host_view(buffer: npt.NDArray[np.uint8], section: Section) -> npt.NDArray[Any]:
    return buffer[section.start : section.end].view(section.dtype).reshape(section.shape)


def _device_view(buffer: Tensor, section: Section) -> Tensor:
    dtype = torch.int64 if section.dtype is np.int64 else torch.int32
    return buffer[section.start : section.end].view(dtype).view(section.shape)
