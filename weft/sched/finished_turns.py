"""`FinishedTurns`: which turn of a plain client a request continues, and where it stops to be what that turn was.

It knows turns whose KV is gone too, so their waits end with the request that continues them as any others do, and that
request has the age of the session.

A client that sends a conversation again expects that the turn before it is found whole. A chat template may render an
old answer differently from how it was generated: without its reasoning, with rewritten arguments of a tool call. Then
computation starts at the first token that differs, and this names it.

A request *continues* a finished turn where it agrees with it up to the answer. The prompts of chats end with tokens of
the template that open the answer, behind the token that ends the message before it. These may be rendered differently
too (an opened block of reasoning): as many of them, at most `MAX_OPENING`, as the request ends with too. Without such a
token the request must have the whole prompt.

Bounded: the last `MAX_TURNS` turns, of each its last tokens, at most `MAX_TAIL`. Owned by `ClosedWaits`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from weft.cache.nodes import Wait
from weft.cache.radix import common_tokens
from weft.core.ids import TOKEN_BYTES, unpack_tokens
from weft.core.step import U64

MAX_TURNS = 4096
MAX_TAIL = 2048
MAX_OPENING = 16
MAX_COMPARED = 32
"""Turns with the same prompt that a request is compared with, the newest ones."""


class _Turn(NamedTuple):
    wait: Wait
    tail: bytes
    """Its tokens from the opening of its answer on."""
    opening: bytes
    """The last tokens of its prompt, with which `tail` begins."""


class ContinuedTurn(NamedTuple):
    """The turn that a request continues."""

    wait: Wait
    """What has waited for the request."""
    first_different: int | None
    """Index of the first token that differs from it; None: the request has the whole turn."""
    num_tokens: int
    """Its first tokens, prompt and answer, that the request has; of a tail that is not known whole, as many as may
    be."""


class FinishedTurns:
    """The last turns that ended, by the number of the tokens before their answer."""

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        self._starts = np.zeros(MAX_TURNS, np.int64)
        """[MAX_TURNS] tokens before `tail`."""
        self._numbers = np.zeros(MAX_TURNS, np.uint64)
        """[MAX_TURNS] number of the prefix of those tokens (`weft.cache.given_up`)."""
        self._next = 0
        """Place of the next turn, and of the oldest one where there are `MAX_TURNS`."""

    def __bool__(self) -> bool:
        return bool(self._turns)

    def add(self, wait: Wait, tokens: bytes, num_prompt: int, numbers: U64, ends: Collection[int] = ()) -> None:
        """A turn has ended with these tokens, the first `num_prompt` of which were its prompt, and waits for its
        client. `numbers` [n + 1] are those of its prefixes, the empty one included, up to at least the prompt; `ends`
        are the tokens that end a message."""
        start = num_prompt - _num_opening(tokens[: num_prompt * TOKEN_BYTES], ends)
        first, opened, last = (place * TOKEN_BYTES for place in (start, num_prompt, start + MAX_TAIL))
        turn = _Turn(wait, tokens[first:last], tokens[first:opened])
        place = self._next
        if place == len(self._turns):
            self._turns.append(turn)
        else:
            self._turns[place] = turn
        self._starts[place], self._numbers[place] = start, numbers[start]
        self._next = (place + 1) % MAX_TURNS

    def find(self, tokens: bytes, numbers: U64) -> ContinuedTurn | None:
        """The finished turn that a request with these tokens continues; None: there is none. `numbers` [n + 1] are
        those of the prefixes of `tokens`."""
        count = len(self._turns)
        starts = np.minimum(self._starts[:count], len(numbers) - 1)
        alike = np.flatnonzero((numbers[starts] == self._numbers[:count]) & (starts == self._starts[:count]))
        if not len(alike):
            return None
        newest_first = np.sort((self._next - 1 - alike) % MAX_TURNS)[:MAX_COMPARED]
        best = (-1, False, False, 0)
        """(tokens in common, whether that is all of the turn, whether it is the turn up to its answer, its place)."""
        for place in ((self._next - 1 - newest_first) % MAX_TURNS).tolist():
            turn, start = self._turns[place], int(self._starts[place])
            end = start + common_tokens(turn.tail, tokens[start * TOKEN_BYTES :])
            is_whole = end == start + len(turn.tail) // TOKEN_BYTES
            least = start + len(turn.opening) // TOKEN_BYTES - _common_end(turn.opening, tokens)
            best = max(best, (end, is_whole, end >= least, place))
        end, is_whole, is_continued, place = best
        if not is_continued or end == len(tokens) // TOKEN_BYTES:
            return None
        wait = self._turns[place].wait
        return ContinuedTurn(wait, None if is_whole else end, wait.num_tokens if is_whole else end)


def _num_opening(prompt: bytes, ends: Collection[int]) -> int:
    """Tokens of a prompt behind the last one of `ends`, if that is among the last ones."""
    last = unpack_tokens(prompt[-(MAX_OPENING + 1) * TOKEN_BYTES :]).tolist()
    return next((count for count, token in enumerate(reversed(last)) if token in ends), 0)


def _common_end(opening: bytes, tokens: bytes) -> int:
    """How many tokens `opening` and `tokens` have in common at their ends."""
    count = 0
    for end in range(len(opening), 0, -TOKEN_BYTES):
        place = len(tokens) - len(opening) + end
        if place < TOKEN_BYTES or opening[end - TOKEN_BYTES : end] != tokens[place - TOKEN_BYTES : place]:
            break
        count += 1
    return count
