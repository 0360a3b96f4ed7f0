"""Stop strings on token bytes, against the obvious search in the whole text."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from weft.engine.stop import StopMatcher

TOKENS = [b"a", b"b", b"ab", b"ba", b"aab", b"\xc3", b"\xa9", b"\xc3\xa9", b"", b"abab"]


def naive(stop: list[bytes], tokens: list[int]) -> tuple[int, bytes, int] | None:
    """(tokens needed, stop string, bytes to cut), by looking at the whole text after every token."""
    text = b""
    for count, token in enumerate(tokens, 1):
        text += TOKENS[token]
        found = [(text.find(s), -len(s), s) for s in stop if s in text]
        if found:
            at, _, which = min(found)
            return count, which, len(text) - at
    return None


@given(
    stop=st.lists(st.binary(min_size=1, max_size=4).map(lambda b: bytes(b"ab\xc3\xa9"[x % 4] for x in b)), max_size=3),
    tokens=st.lists(st.integers(0, len(TOKENS) - 1), max_size=30),
)
def test_finds_what_a_search_in_the_whole_text_finds(stop: list[bytes], tokens: list[int]) -> None:
    matcher = StopMatcher(stop, TOKENS)
    expected = naive(stop, tokens)
    for count, token in enumerate(tokens, 1):
        verdict = matcher.push(token, counts=True)
        if verdict.stop is not None:
            assert expected == (count, expected[1] if expected else b"", verdict.cut_bytes)
            assert expected is not None
            assert verdict.stop == expected[1].decode("utf-8", "replace")
            return
    assert expected is None


@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=4).map(str.encode), min_size=1, max_size=3),
    tokens=st.lists(st.integers(0, 4), max_size=30),
)
def test_what_is_shown_early_is_never_taken_back(stop: list[bytes], tokens: list[int]) -> None:
    matcher = StopMatcher(stop, TOKENS)
    text, shown = b"", 0
    for token in tokens:
        text += TOKENS[token]
        verdict = matcher.push(token, counts=True)
        if verdict.stop is not None:
            assert len(text) - verdict.cut_bytes >= shown
            return
        shown = len(text) - verdict.hold_bytes
    held = text[shown:]
    assert not held or any(s.startswith(held) for s in stop)


def test_a_stop_string_that_was_let_pass_ends_nothing_later() -> None:
    matcher = StopMatcher([b"a", b"abab"], TOKENS)
    assert matcher.push(TOKENS.index(b"a"), counts=False).stop is None
    assert matcher.push(TOKENS.index(b"b"), counts=True).stop is None
    assert matcher.push(TOKENS.index(b"ba"), counts=True)[1:] == ("a", 1)


def test_a_stop_string_before_the_minimum_is_let_pass() -> None:
    matcher = StopMatcher([b"ab"], TOKENS)
    assert matcher.push(2, counts=False).stop is None
    assert matcher.push(0, counts=True).stop is None
    assert matcher.push(1, counts=True).stop == "ab"


def held_by_search(stop: list[bytes], text: bytes) -> int:
    """Bytes at the end of `text` that are the beginning of some stop string, by trying every number of them."""
    longest = max(map(len, stop), default=0)
    sizes = range(min(len(text), longest - 1), 0, -1)
    return next((size for size in sizes if any(s.startswith(text[-size:]) for s in stop)), 0)


def test_what_is_held_is_what_a_search_of_the_whole_text_holds() -> None:
    chance = random.Random(5)
    for _ in range(2000):
        stop = [bytes(chance.choices(b"ab", k=chance.randint(1, 12))) for _ in range(chance.randint(0, 4))]
        matcher = StopMatcher(stop, TOKENS)
        text = b""
        for _ in range(40):
            token, counts = chance.randrange(len(TOKENS)), chance.random() < 0.5
            text += TOKENS[token]
            verdict = matcher.push(token, counts)
            if verdict.stop is not None:
                break
            assert verdict.hold_bytes == held_by_search(stop, text), (stop, text)


class Counted(bytes):
    """A stop string that counts how often the matcher compares it."""

    compared = 0

    def startswith(self, *args: object) -> bool:
        Counted.compared += 1
        return super().startswith(*args)


def test_each_byte_is_compared_a_bounded_number_of_times() -> None:
    stop = [Counted(b"b" * 512 + bytes([number]) * 512) for number in range(64)]
    tokens = [b"a", b"b"]
    matcher = StopMatcher(stop, tokens)
    Counted.compared = 0
    text = [0] * 2000 + [1] * 400 + [0] + [1] * 400 + [0] * 1000
    for token in text:
        matcher.push(token, counts=True)
    assert 0 < Counted.compared <= 2 * len(text) * len(stop)
