"""Tokens that a sequence hides from those that follow.

A mask holds from a position on: what stands there and later does not see the hidden tokens. So every token of a
sequence has one meaning, independent of the chunks in which it is computed, and a sequence with masks may be discarded
and recomputed like any other.

KV that was computed under a mask depends on more than its tokens, so the prefix index knows it by other keys: from the
first mask on, a token's key is the number of the *branch* that it belongs to. A branch is a stretch of one sequence
that only grows at its end. A mask, a fork and a cut begin a new one, so a branch and a position stand for one token
under certain masks. Only the sequence and its forks know the numbers: nothing else finds this KV.
"""

from __future__ import annotations

import struct
from array import array
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


class Branch(NamedTuple):
    """The tokens from `start` to the next branch, under keys of their own."""

    start: int
    number: int
    """Negative, as no token is; no other branch of an open sequence has it."""


def index_keys(tokens: array[int], branches: Items[Branch]) -> array[int]:
    """[tokens] by what the prefix index knows the tokens of a sequence: themselves, and of branches their numbers."""
    if not branches:
        return tokens
    keys = tokens[: branches[0].start]
    ends = [branch.start for branch in branches[1:]] + [len(tokens)]
    for branch, end in zip(branches, ends, strict=True):
        keys.extend(array("i", [branch.number]) * (end - branch.start))
    return keys


def unpack_ranges(packed: bytes, num_tokens: int) -> Ranges:
    """Packed int32 pairs -> ranges in order, none of which is empty or meets another, so that `visibility` looks at
    each hidden token once. Raises `InvalidRequest` for ranges that are not among the first `num_tokens`."""
    if len(packed) % 8:
        raise InvalidRequest(f"{len(packed)} bytes are not a whole number of pairs of int32", "ranges")
    pairs = list(struct.iter_unpack("<2i", packed))
    for first, last in pairs:
        if not 0 <= first <= last <= num_tokens:
            raise InvalidRequest(f"tokens {first} to {last} are not among the {num_tokens} of the sequence", "ranges")
    ranges: list[tuple[int, int]] = []
    for first, last in sorted(pairs):
        if ranges and first <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], last))
        elif first < last:
            ranges.append((first, last))
    return tuple(ranges)


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
