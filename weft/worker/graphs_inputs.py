"""What a captured pass reads: one buffer on the device, which every step fills with one copy.

Owns the layout of the buffer, which depends on the bucket alone, and the host buffers that steps are written to: two,
so that one is filled while the other is still on its way. Does not know models or graphs.

Shapes use: T tokens of the step, K (row, page) entries. Tokens beyond T are padding: token 0 at position 0, of no row.
No KV is written for them, and what attention gives them is undefined.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.core.step import ForwardBatch
from weft.kernels.batch import AttentionBatch
from weft.kernels.work_items import ITEM_FIELDS, MERGE_FIELDS, WorkItems, WorkTables

ALIGNMENT = 16
"""Of every array in the buffer: kernels are compiled for pointers of this alignment, as for tensors of their own."""
NUM_STAGING = 2


class Bucket(NamedTuple):
    """The sizes of a pass."""

    tokens: int
    splits: int
    """Splits of rows, and rows of their partial results."""
    tiles: int
    merges: int
    gives_logits: bool
    """Of every token; else its hidden states after the last layer."""


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
        """Room for steps of buckets that exceed `largest` in nothing, with up to `max_entries` (row, page) entries."""
        size = _layout(largest, max_entries)["kv_page_ids"].end
        self._max_entries = max_entries
        self._on_device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._staging = [_Staging(size, device) for _ in range(NUM_STAGING)]

    def send(self, bucket: Bucket, forward: ForwardBatch, work: WorkItems) -> None:
        """Bring a step to the device. Does not wait for the device, but for the copy before the last one."""
        self._staging.append(staging := self._staging.pop(0))
        buffer = staging.when_free()
        layout = _layout(bucket, len(forward.kv_page_ids))
        _fill({name: _host_view(buffer, section) for name, section in layout.items()}, forward, work)
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


def attention_batch(views: dict[str, Tensor], page_size: int) -> AttentionBatch:
    """The batch that a pass over these arrays is given. It has no rows but those of its tables."""
    of_rows, none = views["kv_page_ids"][:0], np.zeros(0, np.int32)
    return AttentionBatch(
        positions=views["positions"],
        write_slots=views["write_slots"],
        q_indptr=of_rows,
        kv_indptr=of_rows,
        kv_page_ids=views["kv_page_ids"],
        kv_lens=of_rows,
        q_lens=none,
        kv_lens_host=none,
        q_indptr_host=none,
        kv_indptr_host=none,
        plain_rows=np.zeros(0, np.bool_),
        all_written=False,
        page_size=page_size,
        tables=WorkTables(views["splits"], views["tiles"], views["merges"]),
    )


def _fill(into: dict[str, npt.NDArray[Any]], forward: ForwardBatch, work: WorkItems) -> None:
    tokens = forward.num_tokens
    for name, values, padding in (
        ("positions", forward.positions, 0),
        ("write_slots", forward.write_slots, -1),
        ("token_ids", forward.token_ids, 0),
        ("token_slots", forward.token_slots, 0),
        ("splits", work.splits, 0),
        ("tiles", work.tiles, 0),
        ("merges", work.merges, 0),
    ):
        used = tokens if values is None else len(values)
        into[name][:used] = 0 if values is None else values
        into[name][used:] = padding
    # A token that is known may have slot -1, which is not looked up.
    np.maximum(into["token_slots"], 0, out=into["token_slots"])
    into["kv_page_ids"][:] = forward.kv_page_ids


def _layout(bucket: Bucket, num_entries: int) -> dict[str, Section]:
    """Where everything is. Page ids are last, so that their number moves nothing else."""
    arrays: tuple[tuple[str, type[np.generic], tuple[int, ...]], ...] = (
        ("positions", np.int64, (bucket.tokens,)),
        ("write_slots", np.int64, (bucket.tokens,)),
        ("token_ids", np.int64, (bucket.tokens,)),
        ("token_slots", np.int64, (bucket.tokens,)),
        ("splits", np.int32, (bucket.splits, ITEM_FIELDS)),
        ("tiles", np.int32, (bucket.tiles, ITEM_FIELDS)),
        ("merges", np.int32, (bucket.merges, MERGE_FIELDS)),
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
