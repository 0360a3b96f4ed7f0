"""`RaggedRows`: the rows of the forward that is being built.

Rows of decoding sequences come first. They are computed for all of them at once (`DecodeTable.rows`) and stay as they
are in a step that has no others, as most do. Every other row goes into columns that grow.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from weft.core.step import I32
from weft.sched.columns import as_array

_NOWHERE = array("i", [-1])


class RowArrays(NamedTuple):
    """Rows as in `ForwardBatch`, with lengths in place of bounds: T query tokens, R rows, K pages."""

    token_ids: I32
    """[T], as the next three."""
    token_slots: I32
    positions: I32
    write_slots: I32
    q_lens: I32
    """[R], as the next two."""
    kv_lens: I32
    num_pages: I32
    page_ids: I32
    """[K]"""


class RaggedRows:
    """Rows in the order in which they are added."""

    def __init__(self) -> None:
        self.decodes: RowArrays | None = None
        """The first rows, where there are decoding sequences."""
        self._token_ids = array("i")
        self._token_slots = array("i")
        self._positions = array("i")
        self._write_slots = array("i")
        self._q_lens = array("i")
        self._kv_lens = array("i")
        self._num_pages = array("i")
        self._page_ids = array("i")

    def add(
        self,
        tokens: Iterable[int] | None,
        positions: Iterable[int],
        write_slots: Iterable[int],
        num_tokens: int,
        kv_len: int,
        pages: list[int],
    ) -> None:
        """Add a row of `num_tokens` query tokens. `tokens` is None where they are not token ids but stored vectors."""
        nowhere = _NOWHERE * num_tokens
        self._token_ids.extend(nowhere if tokens is None else tokens)
        self._token_slots.extend(nowhere)
        self._positions.extend(positions)
        self._write_slots.extend(write_slots)
        self._q_lens.append(num_tokens)
        self._kv_lens.append(kv_len)
        self._num_pages.append(len(pages))
        self._page_ids.extend(pages)

    def arrays(self) -> RowArrays:
        """All rows. None can be added any more."""
        decodes = self.decodes
        if decodes is not None and not self._q_lens:
            return decodes
        added = RowArrays(
            as_array(self._token_ids),
            as_array(self._token_slots),
            as_array(self._positions),
            as_array(self._write_slots),
            as_array(self._q_lens),
            as_array(self._kv_lens),
            as_array(self._num_pages),
            as_array(self._page_ids),
        )
        if decodes is None:
            return added
        return RowArrays(*(np.concatenate(pair) for pair in zip(decodes, added, strict=True)))
