"""What a forward over explicit pages looks like to attention: one row of a batch.

Owns the step from handles and positions to page ids, visibility words and masks. Pure arithmetic: decides nothing and
changes nothing.

A row's inputs stand somewhere among the tokens of its pages. Where they are simply the last ones, in order, and come
after everything before, the row is causal as any prompt's, and runs at full speed; only otherwise a mask says who sees
whom.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.abi.errors import InvalidRequest
from weft.core.step import Bool
from weft.sched.spaces.resources import PageHandle

MAX_CELLS = 1 << 27
"""Of a matrix of what each input sees of each place: 128 MiB."""
_ALL = 0xFFFFFFFF


class Place(NamedTuple):
    """Where an input's KV goes: the place `offset` of the row's page number `page`."""

    page: int
    offset: int


class ExplicitRow(NamedTuple):
    """One row of `ForwardBatch` over explicit pages: its pages, its KV length and what it sees."""

    page_ids: list[int]
    """[k]"""
    kv_len: int
    visibility: list[int] | None
    """[k] words; None: everything is seen."""
    causal: bool
    mask: bytes
    """Packed [q, kv_len], or nothing."""


def make_row(
    pages: Sequence[PageHandle], words: list[int], places: Sequence[Place], positions: Sequence[int], mask: Bool | None
) -> ExplicitRow:
    """One row.

    `pages` [k] are in order and know their new tokens already; `words` [k] say which of their places this row may see
    at all; `places` [q] and `positions` [q] are those of the inputs. `mask` [q, k * page size] says what each input
    sees of those, instead of the positions. Raises `InvalidRequest` when an input sees nothing.
    """
    size = len(pages[0].positions)
    own = [place.page * size + place.offset for place in places]
    if mask is None and _is_tail(pages, words, own, positions):
        kv_len = own[-1] + 1
        count = -(-kv_len // size)
        return ExplicitRow([page.page for page in pages[:count]], kv_len, _visibility(words, kv_len, size), True, b"")
    shown = _bits(words, size)
    kv_len = int(np.flatnonzero(shown)[-1]) + 1
    count = -(-kv_len // size)
    _check_cells(len(positions), kv_len)
    if mask is None:
        where = np.concatenate([np.array(page.positions, np.int64) for page in pages[:count]])[:kv_len]
        mask = where[None, :] <= np.array(positions, np.int64)[:, None]
    seen = mask[:, :kv_len] & shown[:kv_len]
    blind = np.flatnonzero(~seen.any(axis=1))
    if len(blind):
        raise InvalidRequest(f"input {int(blind[0])} of the forward sees no token at all", "mask")
    packed = np.packbits(seen, axis=1, bitorder="little").tobytes()
    return ExplicitRow([page.page for page in pages[:count]], kv_len, list(words[:count]), False, packed)


def explicit_mask(packed: bytes, pages: Sequence[PageHandle], num_read: int, places: Sequence[Place]) -> Bool:
    """A caller's mask, over the tokens of the pages it reads and the inputs, as a mask over all places of the row.

    `packed` has a row of [tokens of the first `num_read` pages + q] bits for each of q inputs. Tokens that were put
    there by this same forward are inputs. Raises `InvalidRequest` for a mask of another size.
    """
    size = len(pages[0].positions)
    _check_cells(len(places), len(pages) * size)
    new = {place.page * size + place.offset for place in places}
    old = [
        index * size + offset
        for index, page in enumerate(pages[:num_read])
        for offset in range(size)
        if page.filled >> offset & 1 and index * size + offset not in new
    ]
    columns = len(old) + len(places)
    row_bytes = -(-columns // 8)
    if len(packed) != len(places) * row_bytes:
        raise InvalidRequest(
            f"the mask has {len(packed)} bytes; {len(places)} inputs that may see {columns} tokens need "
            f"{len(places)} rows of {row_bytes} bytes",
            "mask",
        )
    bits = np.unpackbits(np.frombuffer(packed, np.uint8).reshape(len(places), row_bytes), axis=1, bitorder="little")
    mask = np.zeros((len(places), len(pages) * size), np.bool_)
    mask[:, old] = bits[:, : len(old)]
    mask[:, [place.page * size + place.offset for place in places]] = bits[:, len(old) : columns]
    return mask


def _check_cells(num_inputs: int, num_places: int) -> None:
    """Raise `InvalidRequest` where a matrix of what inputs see would take too much memory."""
    if num_inputs * num_places > MAX_CELLS:
        raise InvalidRequest(
            f"{num_inputs} inputs that see {num_places} places, not in rising order behind all of them, are more than "
            f"{MAX_CELLS} pairs; put fewer of them in one forward",
            "positions",
        )


def _is_tail(pages: Sequence[PageHandle], words: Sequence[int], own: Sequence[int], positions: Sequence[int]) -> bool:
    """Whether the inputs are the row's last tokens, in order, and come after all others."""
    size = len(pages[0].positions)
    begin, end, first = own[0], own[-1] + 1, positions[0]
    if end - begin != len(own) or not is_rising(own) or not is_rising(positions):
        return False
    last = (end - 1) // size
    if words[last] >> end - last * size or any(words[last + 1 :]):
        return False
    whole = begin // size
    if whole and max([page.last_position for page in pages[:whole]]) >= first:
        return False
    # What stands before the first input on its own page.
    return max(pages[whole].positions[: begin % size], default=-1) < first


def is_rising(numbers: Sequence[int]) -> bool:
    """Whether each is larger than the one before."""
    return len(numbers) < 2 or all(a < b for a, b in itertools.pairwise(numbers))


def _visibility(words: list[int], kv_len: int, size: int) -> list[int] | None:
    """Visibility words of a row's first `kv_len` places. A word without holes becomes all ones: fast kernels look for
    that."""
    count, whole = -(-kv_len // size), (1 << size) - 1
    last = whole >> count * size - kv_len
    if words[count - 1] & last == last and words[: count - 1] == [whole] * (count - 1):
        return None
    filled_up = [_ALL if word & whole == whole else word for word in words[:count]]
    filled_up[-1] = _ALL if words[count - 1] & last == last else words[count - 1]
    return filled_up


def _bits(words: Sequence[int], size: int) -> Bool:
    octets = np.array(words, "<u4").view(np.uint8).reshape(len(words), 4)
    return np.unpackbits(octets, axis=1, bitorder="little")[:, :size].astype(np.bool_).ravel()
