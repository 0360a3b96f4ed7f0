"""A row over explicit pages shows each input exactly the tokens that its positions, handles and mask allow."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weft.abi.errors import InvalidRequest
from weft.sched.spaces import rows
from weft.sched.spaces.resources import PageHandle
from weft.sched.spaces.rows import ExplicitRow, Place, explicit_mask, make_row

SIZE = 8


def seen_in(row: ExplicitRow, num_inputs: int) -> list[set[int]]:
    """Which places each input sees, as attention reads the row."""
    assert len(row.page_ids) == -(-row.kv_len // SIZE)
    words = row.visibility or [0xFFFFFFFF] * len(row.page_ids)
    shown = {place for place in range(row.kv_len) if words[place // SIZE] >> place % SIZE & 1}
    if row.causal:
        return [{place for place in shown if place <= row.kv_len - num_inputs + index} for index in range(num_inputs)]
    bits = np.frombuffer(row.mask, np.uint8).reshape(num_inputs, -(-row.kv_len // 8))
    mask = np.unpackbits(bits, axis=1, bitorder="little")[:, : row.kv_len]
    return [{place for place in shown if mask[index, place]} for index in range(num_inputs)]


def some_pages(rng: random.Random) -> tuple[list[PageHandle], list[int], list[Place], list[int]]:
    """Pages with holes and hidden tokens, and inputs put on the first free places of some of them."""
    pages = [PageHandle.empty(10 + number, SIZE) for number in range(rng.randrange(1, 4))]
    tidy = rng.random() < 0.5
    position = 0
    for page in pages:
        for offset in range(SIZE):
            if rng.random() < (0.9 if page is not pages[-1] else 0.4):
                page.fill(offset, position if tidy else rng.randrange(12))
                position += 1
            elif tidy and page is pages[-1]:
                break
        page.hidden = rng.getrandbits(SIZE) if rng.random() < 0.3 else 0
    words = [page.filled & ~page.hidden for page in pages]
    free = [
        Place(index, offset)
        for index, page in enumerate(pages)
        for offset in range(SIZE)
        if not page.filled >> offset & 1
    ]
    places = free[: rng.randrange(1, 5)]
    positions = [position + index if tidy else rng.randrange(16) for index in range(len(places))]
    for place, own in zip(places, positions, strict=True):
        pages[place.page].fill(place.offset, own)
        words[place.page] |= 1 << place.offset
    return pages, words, places, positions


@pytest.mark.parametrize("seed", range(4))
def test_positions_say_who_sees_whom(seed: int) -> None:
    rng = random.Random(seed)
    kinds = set()
    for _ in range(400):
        pages, words, places, positions = some_pages(rng)
        if not places:
            continue
        row = make_row(pages, list(words), places, positions, None)
        where = [position for page in pages for position in page.positions]
        shown = [place for place in range(len(where)) if words[place // SIZE] >> place % SIZE & 1]
        expected = [{place for place in shown if where[place] <= own} for own in positions]
        assert seen_in(row, len(places)) == expected, (pages, places, positions)
        kinds.add((row.causal, row.visibility is None))
    assert kinds >= {(True, True), (True, False), (False, False)}


@pytest.mark.parametrize("seed", range(4))
def test_a_mask_says_who_sees_whom(seed: int) -> None:
    """Its columns are the tokens that were on the pages to read, in their order, then the inputs."""
    rng = random.Random(seed)
    for _ in range(200):
        pages, words, places, positions = some_pages(rng)
        if not places:
            continue
        num_read = rng.randrange(len(pages) + 1)
        new = [place.page * SIZE + place.offset for place in places]
        old = [
            index * SIZE + offset
            for index, page in enumerate(pages[:num_read])
            for offset in range(SIZE)
            if page.filled >> offset & 1 and index * SIZE + offset not in new
        ]
        bits = np.array([[rng.random() < 0.5 for _ in old + new] for _ in places], np.bool_)
        for index in range(len(places)):
            bits[index, len(old) + index] = True  # each sees itself at least
        packed = np.packbits(bits, axis=1, bitorder="little").tobytes()
        mask = explicit_mask(packed, pages, num_read, places)
        row = make_row(pages, list(words), places, positions, mask)
        shown = {place for place in range(len(pages) * SIZE) if words[place // SIZE] >> place % SIZE & 1}
        columns = old + new
        expected = [{columns[at] for at in np.flatnonzero(line)} & shown for line in bits]
        assert seen_in(row, len(places)) == expected
        with pytest.raises(InvalidRequest, match="the mask has"):
            explicit_mask(packed + b"\0", pages, num_read, places)


def test_an_input_that_sees_nothing_is_refused() -> None:
    page = PageHandle.empty(3, SIZE)
    page.fill(0, 5)
    with pytest.raises(InvalidRequest, match="input 0 of the forward sees no token at all"):
        make_row([page], [1], [Place(0, 0)], [5], np.zeros((1, SIZE), np.bool_))
    page.fill(1, 6)
    only_the_first = np.arange(SIZE)[None, :] == 0
    with pytest.raises(InvalidRequest, match="input 0 of the forward sees no token at all"):
        make_row([page], [0b10], [Place(0, 1)], [6], only_the_first)  # which its handle hides


def test_a_matrix_that_would_take_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_CELLS", 5)
    page = PageHandle.empty(1, SIZE)
    for offset in (0, 1, 2):
        page.fill(offset, 7)
    places = [Place(0, 1), Place(0, 2)]
    with pytest.raises(InvalidRequest, match="2 inputs that see 3 places"):
        make_row([page], [0b111], places, [7, 7], None)
    with pytest.raises(InvalidRequest, match="2 inputs that see 8 places"):
        explicit_mask(bytes(2), [page], 1, places)
    in_order = PageHandle.empty(1, SIZE)
    for offset in (0, 1, 2):
        in_order.fill(offset, offset)
    assert make_row([in_order], [0b111], places, [1, 2], None).causal
