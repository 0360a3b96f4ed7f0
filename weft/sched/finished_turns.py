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

Bounded: `MAX_TURNS` turns, of each its last tokens, at most `MAX_TAIL`. Beyond that, the tenant that has most loses its
oldest one (`FairFifo`). Owned by `ClosedWaits`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from weft.cache.fair_fifo import FairFifo
from weft.cache.nodes import Wait
from weft.cache.radix import common_tokens
from weft.core.ids import TOKEN_BYTES, unpack_tokens
from weft.core.step import U64

MAX_TURNS = 4096
MAX_TAIL = 2048
MAX_OPENING = 16
MAX_PROMPTS = 32
"""Prompts to whose turns a request is compared: those with which it has most in common. All turns of each are."""
_NOWHERE = np.iinfo(np.int64).max
"""Ends of a slot without a prompt."""
_AFTER = b"\xff" * TOKEN_BYTES
"""Sorts behind all tokens, which are not negative."""


class _Turn(NamedTuple):
    tail: bytes
    """Its tokens from the opening of its answer on."""
    number: int
    """Grows from turn to turn."""
    opening: bytes
    """The last tokens of its prompt, with which `tail` begins."""
    slot: int
    """Of its prompt."""
    wait: Wait


_TAIL = attrgetter("tail")
_NUMBER = attrgetter("number")


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
    """The last turns that ended, by their prompts."""

    def __init__(self) -> None:
        self._turns = FairFifo[_Turn](MAX_TURNS)
        self._by_prompt: dict[int, list[_Turn]] = {}
        """By slot of their prompt, sorted by their tails."""
        self._slots: dict[int, int] = {}
        """By number of the prompt."""
        self._free = list(range(MAX_TURNS, -1, -1))
        """Slots that no prompt has: one is left for the turn that is added before another one goes for it."""
        self._ends = np.full((3, MAX_TURNS + 1), _NOWHERE, np.int64)
        """[3, slots] tokens before the tails, of the prompt, and up to the end of the longest tail that there was."""
        self._numbers = np.zeros((2, MAX_TURNS + 1), np.uint64)
        """[2, slots] numbers of the prefixes (`weft.cache.given_up`) that end before the tails, and with the prompt."""
        self._next = 0
        """Number of the next turn."""

    def __bool__(self) -> bool:
        return self._turns.total > 0

    def add(self, wait: Wait, tokens: bytes, num_prompt: int, numbers: U64, ends: Collection[int] = ()) -> None:
        """A turn has ended with these tokens, the first `num_prompt` of which were its prompt, and waits for its
        client. `numbers` [n + 1] are those of its prefixes, the empty one included, up to at least the prompt; `ends`
        are the tokens that end a message."""
        start = num_prompt - _num_opening(tokens[: num_prompt * TOKEN_BYTES], ends)
        first, opened, last = (place * TOKEN_BYTES for place in (start, num_prompt, start + MAX_TAIL))
        prompt = int(numbers[num_prompt])
        slot = self._slots.get(prompt)
        if slot is None:
            slot = self._slots[prompt] = self._free.pop()
            self._by_prompt[slot] = []
            self._ends[:, slot] = start, num_prompt, start
            self._numbers[:, slot] = numbers[start], prompt
        turn = _Turn(tokens[first:last], self._next, tokens[first:opened], slot, wait)
        insort(self._by_prompt[slot], turn, key=_TAIL)
        self._ends[2, slot] = max(self._ends[2, slot], start + len(turn.tail) // TOKEN_BYTES)
        self._next += 1
        for lost in self._turns.add(wait.tenant, [turn]):
            self._forget(lost)

    def find(self, tokens: bytes, numbers: U64) -> ContinuedTurn | None:
        """The finished turn that a request with these tokens continues; None: there is none. `numbers` [n + 1] are
        those of the prefixes of `tokens`."""
        ends = np.minimum(self._ends[:2], len(numbers) - 1)
        has_start, has_prompt = (numbers[ends] == self._numbers) & (ends == self._ends[:2])
        alike = np.flatnonzero(has_start)
        if not len(alike):
            return None
        starts, _, lasts = self._ends[:, alike]
        # The request has all tokens before the longest of these starts, so turns that end there or later are enough.
        alike = alike[lasts >= starts.max()]
        if len(alike) > MAX_PROMPTS:
            shared = 2 * self._ends[0, alike] + has_prompt[alike]
            alike = alike[np.argpartition(shared, -MAX_PROMPTS)[-MAX_PROMPTS:]]
        found: list[tuple[int, bool, bool, int, Wait]] = []
        """(tokens in common, whether that is all of the turn, whether it is the turn up to its answer, its number and
        wait)."""
        for slot, start in zip(alike.tolist(), self._ends[0, alike].tolist(), strict=True):
            tail = tokens[start * TOKEN_BYTES : (start + MAX_TAIL) * TOKEN_BYTES]
            turn, common = _closest(self._by_prompt[slot], tail)
            is_whole = common * TOKEN_BYTES == len(turn.tail)
            least = len(turn.opening) // TOKEN_BYTES
            is_continued = common >= least or common >= least - _common_end(turn.opening, tokens)
            found.append((start + common, is_whole, is_continued, turn.number, turn.wait))
        end, is_whole, is_continued, _, wait = max(found)
        if not is_continued or end == len(tokens) // TOKEN_BYTES:
            return None
        return ContinuedTurn(wait, None if is_whole else end, wait.num_tokens if is_whole else end)

    def _forget(self, turn: _Turn) -> None:
        slot = turn.slot
        turns = self._by_prompt[slot]
        del turns[turns.index(turn, bisect_left(turns, turn.tail, key=_TAIL))]
        if not turns:
            del self._by_prompt[slot], self._slots[int(self._numbers[1, slot])]
            self._ends[:, slot] = _NOWHERE
            self._free.append(slot)


def _closest(turns: list[_Turn], tokens: bytes) -> tuple[_Turn, int]:
    """Of turns with the same prompt, sorted by their tails, the one that has most first tokens in common with `tokens`,
    and how many: if several have, one that `tokens` has whole, or else the newest."""
    # Among sorted tails, the one before the place of `tokens` or the one after it has most in common with them.
    place = bisect_left(turns, tokens, key=_TAIL)
    before, after = turns[max(place - 1, 0)], turns[min(place, len(turns) - 1)]
    common = common_tokens(before.tail, tokens)
    if after is not before:
        common = max(common, common_tokens(after.tail, tokens))
    prefix = tokens[: common * TOKEN_BYTES]
    first = bisect_right(turns, prefix, key=_TAIL)
    if first and turns[first - 1].tail == prefix:
        return turns[first - 1], common
    last = bisect_left(turns, prefix + _AFTER, first, key=_TAIL)
    return max(turns[first:last], key=_NUMBER), common


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
