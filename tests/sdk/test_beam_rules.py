"""The algorithm of beam search, without a model."""

from __future__ import annotations

import math

import pytest

from weft.sdk.beam_rules import BeamRules, BeamSearch

A, B, END = 1, 2, 9
HALF = math.log(0.5)


class Branch:
    """Counts itself among the open ones."""

    def __init__(self, opened: list[Branch], fails_at: int = 10**9):
        self.opened, self.fails_at = opened, fails_at
        opened.append(self)

    def fork(self) -> Branch:
        if len(self.opened) == self.fails_at:
            raise RuntimeError("lost")
        return Branch(self.opened, self.fails_at)

    def release(self) -> None:
        if self in self.opened:
            self.opened.remove(self)


def search(dists: list[list[list[tuple[int, float]]]], **rules) -> BeamSearch[Branch, tuple[int, int]]:
    """A search that was given a list of distributions per step."""
    found: BeamSearch[Branch, tuple[int, int]] = BeamSearch(BeamRules(**rules), Branch([]))
    for step in dists:
        assert found.goes_on
        found.advance(step, lambda parent, place: (parent, place))
    return found


def test_beams_fork_and_keep_what_the_driver_says_of_each_token() -> None:
    first = [(A, math.log(0.6)), (B, math.log(0.4))]
    found = search([[first], [[(A, -0.1), (B, -0.2)], [(A, -3.0), (B, -4.0)]]], width=2, max_tokens=2)
    assert not found.goes_on
    assert [beam.tokens for beam in found.results()] == [(A, A), (A, B)]
    assert [beam.details for beam in found.results()] == [((0, 0), (0, 0)), ((0, 0), (0, 1))]
    assert [beam.reason for beam in found.results()] == ["length", "length"]
    opened = found.live[0].branch.opened
    assert [beam.branch for beam in found.live] == opened[::-1]  # the last heir has its parent's
    found.release()
    assert opened == []


@pytest.mark.parametrize(
    ("early_stopping", "penalty", "goes_on"),
    [(True, 1.0, False), (False, 1.0, False), ("never", 1.0, True), ("never", 0.0, False)],
)
def test_when_a_search_is_decided(early_stopping, penalty: float, goes_on: bool) -> None:
    """One complete beam of score -0.5; the live one has -0.9 now and may have -0.9 / 4 at most."""
    dist = [(END, -0.5), (A, -0.9)]
    found = search(
        [[dist]], width=1, max_tokens=4, ends=frozenset([END]), early_stopping=early_stopping, length_penalty=penalty
    )
    assert found.goes_on is goes_on


def test_ends_count_only_among_the_best_and_after_the_least_length() -> None:
    rules = {"width": 1, "max_tokens": 3, "ends": frozenset([END]), "early_stopping": True}
    assert search([[[(A, HALF), (END, HALF)]]], **rules).results() == []
    ranked = search([[[(A, -1.0), (8, -2.0), (END, -3.0), (B, -4.0)]]], width=2, max_tokens=3, ends=frozenset([8, END]))
    assert [beam.tokens for beam in ranked.results()] == [(8,)]
    early = search([[[(END, HALF), (A, HALF)]]], **rules, min_tokens=1)
    assert (early.goes_on, early.live[0].tokens) == (True, (A,))
    ended = search([[[(END, HALF), (A, HALF)]]], **rules)
    assert [(beam.tokens, beam.reason) for beam in ended.results()] == [((END,), "stop")]


def test_a_fork_that_fails_leaves_only_what_release_knows() -> None:
    opened: list[Branch] = []
    found: BeamSearch[Branch, None] = BeamSearch(BeamRules(width=3, max_tokens=4), Branch(opened, fails_at=2))
    with pytest.raises(RuntimeError):
        found.advance([[(1, -1.0), (2, -2.0), (3, -3.0)]], lambda parent, place: None)
    found.release()
    assert opened == []
