"""Pages of sequences that fork: each is counted once, for as long as a sequence uses it."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.abi.errors import LimitExceeded
from weft.config import ProgramsConfig
from weft.programs.quota.accounts import Accounts
from weft.programs.quota.budget import RunBudget
from weft.programs.quota.limits import Limits
from weft.programs.quota.page_quota import PageQuota

SIZE = 4


def budget(pages: int | None = None) -> RunBudget:
    return Accounts(ProgramsConfig()).open("t", Limits(pages=pages))


def test_what_a_fork_appends_after_a_truncation_is_counted() -> None:
    run = budget(15)
    root = PageQuota(run, SIZE)
    root.grow(10 * SIZE)
    fork = root.fork()
    fork.truncate(SIZE)
    fork.grow(5 * SIZE)
    assert run.used.pages == 15
    with pytest.raises(LimitExceeded):
        fork.grow(1)
    root.release()
    assert run.used.pages == 6
    fork.release()
    assert run.used.pages == 0


def test_a_fork_that_appends_to_a_shared_page_has_a_copy_of_it() -> None:
    run = budget(2)
    root = PageQuota(run, SIZE)
    root.grow(1)
    forks = [root.fork() for _ in range(3)]
    forks[0].grow(1)
    assert run.used.pages == 2
    with pytest.raises(LimitExceeded):
        forks[1].grow(1)
    for each in (root, forks[2]):
        each.release()
    forks[1].grow(1)  # no other sequence uses the page any more
    assert run.used.pages == 2


ACTIONS = st.lists(st.tuples(st.sampled_from(["grow", "truncate", "fork", "release"]), st.integers(0, 99)), max_size=60)


@given(ACTIONS)
@settings(max_examples=300, deadline=None)
def test_pages_are_counted_as_if_each_had_a_number(actions: list[tuple[str, int]]) -> None:
    run, numbers = budget(), count()
    sequences: list[tuple[PageQuota, list[int]]] = [(PageQuota(run, SIZE), [])]
    for place, (action, value) in enumerate(actions):
        quota, pages = sequences[place * 7 % len(sequences)]
        if action == "grow":
            others = {page for other, used in sequences if other is not quota for page in used}
            if value and quota.num_tokens % SIZE and pages[-1] in others:
                pages[-1] = next(numbers)
            quota.grow(value)
        elif action == "truncate":
            quota.truncate(value)
        elif action == "fork":
            sequences.append((quota.fork(), list(pages)))
        else:
            quota.release()
        wanted = -(-quota.num_tokens // SIZE)
        del pages[wanted:]
        pages += [next(numbers) for _ in range(wanted - len(pages))]
        assert run.used.pages == len({page for _, used in sequences for page in used})
    for quota, _ in sequences:
        quota.release()
    assert run.used.pages == 0
