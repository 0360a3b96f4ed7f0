"""Grammars that a program follows itself, token by token.

Owns the run's matchers. Compiling and each step run on threads, in the order in which they were asked for.
`weft.programs.run.context` calls it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from weft.abi.errors import InvalidRequest, Overloaded, UnknownHandle
from weft.core.ids import unpack_tokens
from weft.programs.run.calls.call_kinds import answer_by_task
from weft.programs.run.calls.sampling import MAX_SPEC_BYTES, GrammarArgs
from weft.programs.run.calls.tokenize import check_tokens
from weft.programs.run.calls.view import UNREADABLE, RunView, check_size
from weft.programs.run.messages import reason

if TYPE_CHECKING:
    from weft.engine.guide import Guide

MAX_MATCHERS = 1024
"""Of one program, open at once."""
_grammar_args = msgspec.json.Decoder(GrammarArgs)


class GrammarCalls:
    """Calls of the trait Grammar for one run."""

    def __init__(self, view: RunView):
        self._calls = view.calls
        self._model = view.model
        self._tenant = view.caller.tenant
        self._charge = view.outlet.charge
        self._open: dict[int, asyncio.Task[Guide]] = {}

    def open(self, call: int, number: int, about: bytes) -> None:
        """Compile a grammar and stand at its beginning."""
        self._calls.check_free(call)
        if number in self._open:
            raise InvalidRequest(f"matcher {number} is open; give every matcher a number of its own", "matcher")
        if len(self._open) >= MAX_MATCHERS:
            raise Overloaded(f"this program has {MAX_MATCHERS} matchers open; close some of them")
        check_size(about, MAX_SPEC_BYTES, "grammar")
        try:
            grammar = _grammar_args.decode(about).grammar()
        except UNREADABLE as error:
            raise InvalidRequest(f"the grammar cannot be used: {reason(error)}", "grammar") from error
        opening = self._calls.loop.create_task(self._model.guide(grammar, self._tenant, self._charge))
        # Where nobody waits for it any more, its failure interests nobody.
        opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._open[number] = opening
        answer_by_task(self._calls, call, self._opened(opening))

    def push(self, call: int, number: int, tokens: bytes) -> None:
        """Take tokens in; what may follow."""
        check_size(tokens, MAX_SPEC_BYTES, "tokens")
        check_tokens(tokens)
        opening = self._find(number)
        answer_by_task(self._calls, call, self._pushed(opening, list(unpack_tokens(tokens))), held=len(tokens))

    def close_matcher(self, call: int, number: int) -> None:
        """Release a matcher. Raises `UnknownHandle` for a number that is not open."""
        self._find(number).cancel()
        del self._open[number]

    def close(self) -> None:
        """Give all of them back."""
        for opening in self._open.values():
            opening.cancel()
        self._open.clear()

    def _find(self, number: int) -> asyncio.Task[Guide]:
        opening = self._open.get(number)
        if opening is None:
            raise UnknownHandle(f"this program has no matcher {number}: it was never opened, or closed")
        return opening

    @staticmethod
    async def _opened(opening: asyncio.Task[Guide]) -> tuple[bytes, ...]:
        await asyncio.shield(opening)
        return ()

    async def _pushed(self, opening: asyncio.Task[Guide], tokens: list[int]) -> tuple[bytes, ...]:
        guide = await asyncio.shield(opening)
        return await self._model.follow(partial(_push, guide, tokens), self._tenant, self._charge)


def _push(guide: Guide, tokens: list[int]) -> tuple[bytes, ...]:
    """u8; packed bits. On a thread."""
    matcher = guide.matcher
    if matcher is None:
        raise InvalidRequest("a grammar with a trigger is followed by a generation alone", "grammar")
    stopped = bool(matcher.is_stopped())
    for token in tokens:
        if stopped or token < 0 or not matcher.validate_tokens([token]):
            raise InvalidRequest(f"the grammar does not allow token {token} here; nothing after it was taken", "tokens")
        stopped = guide.push(token)
        if guide.error:
            raise InvalidRequest(guide.error, "grammar")
    return bytes([stopped]), matcher.compute_bitmask()
