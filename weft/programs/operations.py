"""Operations of a program that have not ended, and how their tokens and their end reach the task that waits.

Owns the buffer between the event loop's receiver (which must never wait) and the program (which may be slow): tokens
pile up in a list, and the program takes the whole list when it comes back. It knows nothing of engines or numbers;
`weft.programs.runtime` calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, Self

import msgspec

from weft.abi.errors import Cancelled, WeftError
from weft.core.wire import Finished, OperationUsage, Started, Token

OnStart = Callable[[Started], None]


class Wakes(Protocol):
    """A listener of an operation."""

    def wake(self) -> None:
        """The operation has tokens to take, or has ended. Must not wait."""


class Waiter:
    """One waiting task, woken at most once per envelope by any of several operations."""

    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Wake the waiting task, if there is one."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def wait(self) -> asyncio.Future[None]:
        """What ends with `wake`. The caller checks first that there is nothing to take, and awaits this at once."""
        # A future and not a coroutine: it saves a frame for every token. A task that is cancelled cancels it.
        if self._waiter is not None and not self._waiter.done():
            raise RuntimeError("two tasks wait for the same operation; let one of them read it")
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


_NO_USAGE = OperationUsage()


class EngineOperation:
    """What is common: a number, and exactly one ending."""

    __slots__ = ("_mailbox", "cancelled_by_program", "ended", "error", "finished", "handle", "op", "usage")

    def __init__(self, op: int, handle: int):
        self.op = op
        self.handle = handle
        self.ended = False
        self.finished: Finished | None = None
        """How it ended, where it ended well."""
        self.error: WeftError | None = None
        """Why it failed."""
        self.usage = _NO_USAGE
        """What it cost; known after the end."""
        self.cancelled_by_program = False
        self._mailbox: Wakes | None = None
        """Woken with each event; made when the operation is awaited, which most are not."""

    def report_to(self, listener: Wakes) -> None:
        """Wake this listener from now on; the operation cannot be awaited then."""
        self._mailbox = listener

    def put(self, token: Token) -> bool:
        """Take a token. Whether the task is to be woken."""
        return False

    def begin(self, event: Started) -> None:
        """The engine has begun with it."""

    def finish(self, event: Finished) -> None:
        """The operation ended without an error."""
        if not self.ended:
            self.ended, self.finished, self.usage = True, event, event.usage

    def fail(self, error: WeftError, usage: OperationUsage | None = None) -> None:
        """The operation ended with an error."""
        if not self.ended:
            self.ended, self.error, self.usage = True, error, usage or self.usage

    def cancel(self, usage: OperationUsage | None = None) -> None:
        """The engine ended the operation, on behalf of its program or by itself."""
        if not self.ended:
            self.ended, self.usage = True, usage or self.usage
            if not self.cancelled_by_program:
                self.error = Cancelled("the engine ended this operation before it was done; try again")

    def wake(self) -> None:
        """Wake the listener or the waiting task."""
        if self._mailbox is not None:
            self._mailbox.wake()

    def _own_mailbox(self) -> Waiter:
        if self._mailbox is None:
            self._mailbox = Waiter()
        if not isinstance(self._mailbox, Waiter):
            raise RuntimeError("this operation reports to a listener; it cannot be awaited")
        return self._mailbox


class SilentAppend(EngineOperation):
    """An append that reports nothing unless it fails."""

    __slots__ = ()


class Report(EngineOperation):
    """An append with outputs. Awaiting it gives its `Finished`; raises what it failed with."""

    __slots__ = ()

    def __await__(self) -> Generator[None, None, Finished]:
        while not self.ended:
            yield from self._own_mailbox().wait().__await__()
        if self.error is not None:
            raise self.error
        if self.finished is None:
            raise Cancelled("the program ended this operation before it was done")
        return self.finished


class TokenStream(EngineOperation):
    """Tokens as they come. Iterating gives lists of `Token`, each all that arrived since the last one.

    Ends when the operation finished, or when its own program cancelled it; otherwise raises what it failed with.
    """

    __slots__ = ("least", "on_start", "tokens")

    def __init__(self, op: int, handle: int):
        super().__init__(op, handle)
        self.tokens: list[Token] = []
        """Those that have arrived and were not yet taken."""
        self.least = 1
        """As many tokens, or the end, wake the task. Set where none are left to take."""
        self.on_start: OnStart | None = None
        """Told when the engine has begun with it. Must not wait."""

    def begin(self, event: Started) -> None:
        """The engine has begun with it."""
        if self.on_start is not None:
            self.on_start(event)

    def put(self, token: Token) -> bool:
        """Take a token. Whether the task is to be woken, once since the program last looked."""
        self.tokens.append(token)
        return len(self.tokens) == self.least

    def take(self) -> list[Token]:
        """The tokens that have arrived and were not yet taken. Never waits."""
        tokens, self.tokens = self.tokens, []
        return tokens

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Token]:
        while not (self.tokens or self.ended):
            await self._own_mailbox().wait()
        tokens = self.take()
        if tokens:
            return tokens
        if self.error is not None:
            raise self.error
        raise StopAsyncIteration


class GenerationUpdate(msgspec.Struct, frozen=True):
    """New tokens, or the end, of one of several generations."""

    choice: int
    """Its place among them."""
    tokens: list[Token]
    ended: bool
    """Nothing more will come of it."""


class Generations:
    """Several generations that one task reads, in turns: none is looked at twice before every other was once.

    The task is woken once per envelope, also where it has events of several generations:

        while generations.live:
            updates = generations.take()
            if not updates:
                await generations.arrival()
            for update in updates:
                ...
    """

    def __init__(self, generations: Sequence[TokenStream]):
        self._mailbox = Waiter()
        for generation in generations:
            generation.report_to(self._mailbox)
        self.live = dict(enumerate(generations))
        """Those whose end was not taken, by their place among all."""
        self._failure: WeftError | None = None
        self.arrival = self._mailbox.wait
        """The next event of any of them. Awaited at once, after a `take` that found nothing."""

    def take(self) -> list[GenerationUpdate]:
        """What has arrived and was not yet taken. Raises the error of the first that failed, after its last tokens."""
        if self._failure is not None:
            raise self._failure
        updates: list[GenerationUpdate] = []
        for index, generation in list(self.live.items()):
            tokens, ended = generation.tokens, generation.ended
            if not tokens:
                if not ended:
                    continue
                if generation.error is not None:
                    self._failure = generation.error
                    break
            generation.tokens = []
            ended = ended and generation.error is None
            if ended:
                del self.live[index]
            updates.append(GenerationUpdate(index, tokens, ended))
        if self._failure is not None and not updates:
            raise self._failure
        return updates
