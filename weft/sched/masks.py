"""Tokens that a sequence hides from those that follow.

A mask holds from a position on: what stands there and later does not see the hidden tokens. So every token of a
sequence has one meaning, independent of the chunks in which it is computed, and a sequence with masks may be discarded
and recomputed like any other. What was computed under a mask never enters the prefix index.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np

from weft.abi.errors import InvalidRequest
from weft.core.step import U32

Ranges = tuple[tuple[int, int], ...]


class Mask(NamedTuple):
    """Tokens from `start` on do not see the `hidden` ones, ranges of (first, past the last)."""

    start: int
    hidden: Ranges


def unpack_ranges(packed: bytes, num_tokens: int) -> Ranges:
    """Packed int32 pairs -> ranges. Raises `InvalidRequest` for ones that are not among the first `num_tokens`."""
    if len(packed) % 8:
        raise InvalidRequest(f"{len(packed)} bytes are not a whole number of pairs of int32", "ranges")
    pairs = list(struct.iter_unpack("<2i", packed))
    for first, last in pairs:
        if not 0 <= first <= last <= num_tokens:
            raise InvalidRequest(f"tokens {first} to {last} are not among the {num_tokens} of the sequence", "ranges")
    return tuple(pairs)


def mask_at(masks: Items[Mask], position: int) -> Mask | None:
    """The one that holds for the token at `position`."""
    found = None
    for mask in masks:
        if mask.start <= position:
            found = mask
    return found


def next_start(masks: Items[Mask], position: int) -> int | None:
    """Where the next mask after `position` begins to hold."""
    return next((mask.start for mask in masks if mask.start > position), None)


def add_mask(masks: Items[Mask], mask: Mask) -> list[Mask]:
    """The mask takes the place of all that begin where it does, or later."""
    return [*(other for other in masks if other.start < mask.start), mask]


def cut_masks(masks: Items[Mask], num_tokens: int) -> list[Mask]:
    """The masks of a sequence that is cut to `num_tokens`: what was set when it was no longer still holds."""
    return [mask for mask in masks if mask.start <= num_tokens]


def visibility(hidden: Ranges, num_pages: int, page_size: int) -> U32:
    """[num_pages] words: bit s is set where place s of the page is seen."""
    places = np.ones(num_pages * 32, np.bool_).reshape(num_pages, 32)
    for first, last in hidden:
        tokens = np.arange(first, min(last, num_pages * page_size))
        places[tokens // page_size, tokens % page_size] = False
    return np.packbits(places, axis=1, bitorder="little").view("<u4").ravel().astype(np.uint32)
