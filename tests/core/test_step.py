"""What a batch says of the KV that it reads."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.core.step import ForwardBatch

PAGE = 4


def batch(rows: list[tuple[int, list[int]]]) -> ForwardBatch:
    """Rows of (KV entries, pages), one query token each."""
    ends = np.cumsum([0, *(len(pages) for _, pages in rows)])
    return ForwardBatch(
        token_ids=np.zeros(len(rows), np.int32),
        positions=np.zeros(len(rows), np.int32),
        write_slots=np.zeros(len(rows), np.int32),
        q_indptr=np.arange(len(rows) + 1, dtype=np.int32),
        kv_indptr=ends.astype(np.int32),
        kv_page_ids=np.array([page for _, pages in rows for page in pages], np.int32),
        kv_lens=np.array([entries for entries, _ in rows], np.int32),
    )


def test_pages_that_rows_share_count_once() -> None:
    parent, fork, other = (10, [5, 6, 7]), (9, [5, 6, 8]), (4, [9])
    found = batch([parent, fork, other])
    assert found.kv_tokens(PAGE) == 8 + 2 + 1 + 4
    assert found.kv_tokens(PAGE, [0, 1]) == 8 + 2 + 1
    assert found.kv_tokens(PAGE, [2]) == 4
    assert (found.kv_tokens(PAGE, []), batch([]).kv_tokens(PAGE), batch([(0, [])]).kv_tokens(PAGE)) == (0, 0, 0)


def test_a_page_that_one_row_has_in_part_is_as_full_as_the_other_has_it() -> None:
    assert batch([(8, [1, 2]), (6, [1, 2])]).kv_tokens(PAGE) == 8
    assert batch([(6, [1, 2]), (8, [1, 2])]).kv_tokens(PAGE) == 8
    assert batch([(9, [1, 2, 3]), (6, [1, 2])]).kv_tokens(PAGE) == 9


@given(st.data())
def test_rows_hold_the_entries_of_their_pages(data: st.DataObject) -> None:
    prefixes = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))
    rows, held = list[tuple[int, list[int]]](), set[tuple[int, int]]()
    for number, shared in enumerate(prefixes):
        own = [10 * (number + 1) + place for place in range(data.draw(st.integers(1, 3)))]
        entries = PAGE * (shared + len(own)) - data.draw(st.integers(0, PAGE - 1))
        rows.append((entries, [*range(shared), *own]))
        held.update((rows[-1][1][entry // PAGE], entry % PAGE) for entry in range(entries))
    assert batch(rows).kv_tokens(PAGE) == len(held)
