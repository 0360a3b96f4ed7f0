"""Ranks become a choice: the fewest runs of smallest rank that free enough, `order` deciding between equals."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.sched.policies.snapshots import make_runs
from weft.sched.policies import NEVER, first_to_give_up
from weft.sched.policies.runs import FIRST_PART

RANKS = st.sampled_from([-2.0, 0.0, 0.5, 1.0, NEVER])


@given(
    rows=st.lists(st.tuples(RANKS, st.integers(1, 5)), max_size=4 * FIRST_PART),
    needed=st.integers(0, 500),
    seed=st.integers(0, 9),
)
def test_the_choice_is_the_shortest_start_of_the_sorted_rows(
    rows: list[tuple[float, int]], needed: int, seed: int
) -> None:
    order = np.random.default_rng(seed).permutation(len(rows))
    runs = make_runs(len(rows), num_pages=[pages for _, pages in rows], order=order)
    rank = np.array([value for value, _ in rows], np.float64)
    expected, freed = [], 0
    for row in sorted(range(len(rows)), key=lambda row: (rank[row], order[row])):
        if freed >= needed or rank[row] == NEVER:
            break
        expected.append(row)
        freed += rows[row][1]
    assert first_to_give_up(rank, runs, needed).tolist() == expected


def test_more_than_the_first_part_is_found() -> None:
    count = 10 * FIRST_PART
    runs = make_runs(count)
    rank = np.arange(count, 0.0, -1.0)
    assert first_to_give_up(rank, runs, 9 * FIRST_PART).tolist() == list(range(count - 1, FIRST_PART - 1, -1))
