"""Masks on sequences: from where each holds, and what it hides."""

from __future__ import annotations

import random
import struct
from array import array

import pytest

from weft.abi.errors import InvalidRequest
from weft.sched.masks import (
    Branch,
    Mask,
    add_mask,
    cut_masks,
    index_keys,
    mask_at,
    next_start,
    unpack_ranges,
    visibility,
)

FIRST, SECOND = Mask(3, ((0, 2),)), Mask(7, ((1, 4), (5, 6)))


def test_a_mask_holds_from_its_start_to_that_of_the_next() -> None:
    masks = [FIRST, SECOND]
    assert [mask_at(masks, position) for position in (2, 3, 6, 7, 100)] == [None, FIRST, FIRST, SECOND, SECOND]
    assert [next_start(masks, position) for position in (0, 2, 3, 6, 7)] == [3, 3, 7, 7, None]


def test_a_new_mask_takes_the_place_of_those_that_begin_there_or_later() -> None:
    again = Mask(7, ())
    assert add_mask([FIRST, SECOND], again) == [FIRST, again]
    early = Mask(2, ())
    assert add_mask([FIRST, SECOND], early) == [early]
    assert add_mask([], FIRST) == [FIRST]


def test_a_cut_keeps_what_was_set_by_then() -> None:
    assert cut_masks([FIRST, SECOND], 6) == [FIRST]
    assert cut_masks([FIRST, SECOND], 7) == [FIRST, SECOND], "it holds for what is appended next"
    assert cut_masks([FIRST, SECOND], 2) == []


def test_words_have_a_bit_for_each_place() -> None:
    assert visibility((), 2, 16).tolist() == [0xFFFFFFFF] * 2
    hidden = visibility(((1, 3), (15, 18), (31, 99)), 2, 16)
    for token in range(32):
        shown = bool(hidden[token // 16] >> token % 16 & 1)
        assert shown is (token not in {1, 2, 15, 16, 17, 31}), token


def test_ranges_are_of_the_sequence() -> None:
    assert unpack_ranges(struct.pack("<4i", 0, 2, 3, 5), 5) == ((0, 2), (3, 5))
    for pair in ((3, 6), (4, 3), (-1, 2)):
        with pytest.raises(InvalidRequest, match="not among the 5"):
            unpack_ranges(struct.pack("<2i", *pair), 5)
    with pytest.raises(InvalidRequest, match="pairs"):
        unpack_ranges(bytes(4), 5)


def test_ranges_are_merged_where_they_meet() -> None:
    def unpacked(*pairs: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        return unpack_ranges(b"".join(struct.pack("<2i", *pair) for pair in pairs), 64)

    assert unpacked(*[(0, 64)] * 1024) == ((0, 64),)
    assert unpacked((5, 9), (0, 2), (2, 4), (3, 3), (6, 7), (12, 12)) == ((0, 4), (5, 9))
    assert unpacked((4, 4)) == ()
    chance = random.Random(3)
    for _ in range(300):
        pairs = [tuple(sorted(chance.choices(range(65), k=2))) for _ in range(chance.randint(0, 12))]
        merged = unpacked(*pairs)
        ends = [end for pair in merged for end in pair]
        assert ends == sorted(set(ends)), "in order, none of them empty, none meets another"
        assert visibility(merged, 4, 16).tolist() == visibility(tuple(pairs), 4, 16).tolist(), pairs


def test_the_index_knows_a_token_by_its_branch() -> None:
    tokens = array("i", range(100, 108))
    assert index_keys(tokens, []) is tokens
    keys = index_keys(tokens, [Branch(3, -5), Branch(6, -9)])
    assert keys.tolist() == [100, 101, 102, -5, -5, -5, -9, -9]
    assert index_keys(tokens, [Branch(8, -2)]) == tokens, "of no token yet"
