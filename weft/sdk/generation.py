"""One generation on a context: a stream while it runs, a value after its end.

    async for piece in ctx.generate(max_tokens=50):     # pieces of text
        run.send(piece)

    reply = await ctx.generate(max_tokens=50)           # all of it
    reply.text, reply.tokens, reply.reason, reply.usage

Owns the text and tokens read so far. `weft.sdk.token_buffer` applies them to the tokens and messages of the context.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from typing import Any, Protocol

from weft.abi.errors import InvalidRequest, WeftError
from weft.sdk.grammar import Grammar
from weft.sdk.sampling import Sampler, Stop
from weft.sdk.sequence import Generating, Logprob, Part, Usage
from weft.text.deltas import Content, Delta, Reasoning
from weft.text.reasoning import ReasoningParser


class GenerationHost(Protocol):
    """The methods of a context that its generations call."""

    async def begin(self, generation: Generation) -> Generating:
        """Start a generation on the sequence."""

    def grow(self, part: Part) -> None:
        """Record that the sequence has grown by the tokens of a part."""

    async def end(self, generation: Generation, *, is_whole: bool) -> None:
        """Record the end of the generation. `is_whole`: it was not interrupted, so text and tokens agree."""


class Generation:
    """A generation on a context. It starts when it is first awaited or iterated over."""

    def __init__(
        self,
        host: GenerationHost,
        sampler: Sampler,
        stop: Stop,
        grammar: Grammar | None = None,
        *,
        special: bool = False,
    ):
        self.sampler = sampler
        self.stopping = stop
        self.grammar = grammar
        self.special = special
        self._text = ""
        self.tokens: list[int] = []
        """All tokens read so far, with those of a stop string and the end of sequence."""
        self.logprobs: list[Logprob] = []
        """One entry per token if the sampler sets `logprobs`, else none."""
        self.reason = ""
        """After the end: `stop`, `length`, `cancelled`, or the kind of an error. Before: empty."""
        self.stop: str | int | None = None
        """The stop string or token that ended it; None for the end of sequence."""
        self.usage = Usage()
        self.prompt_thinks = False
        """Whether the prompt ends inside the model's reasoning."""
        self.is_whole = False
        """Whether no task reads parts as they come: the host then sends everything in one part."""
        self.is_reading = False
        """Whether a task is waiting for the next part."""
        self._host = host
        self._generating: Generating | None = None
        self._ended = False

    @property
    def text(self) -> str:
        """The text so far, without the stop string. Raises `InvalidRequest` before the generation has begun."""
        if self._generating is None and not self._ended:
            raise InvalidRequest("the generation has not begun: `await` it or iterate over it before you read its text")
        return self._text

    @property
    def ended(self) -> bool:
        """Whether the generation has ended and all its parts were read."""
        return self._ended

    @property
    def reasoning(self) -> str:
        """The text between `<think>` and `</think>`."""
        return "".join(delta.text for delta in self._split() if isinstance(delta, Reasoning))

    @property
    def answer(self) -> str:
        """The text without the reasoning."""
        return "".join(delta.text for delta in self._split() if isinstance(delta, Content))

    def __await__(self) -> Generator[Any, None, Generation]:
        return self._read().__await__()

    async def __aiter__(self) -> AsyncIterator[str]:
        """Iterate over pieces of text as they become final: text that a stop string may still remove is held back."""
        async for part in self.parts():
            if part.text:
                yield part.text

    async def each_token(self) -> AsyncIterator[int]:
        """Iterate over the tokens one by one."""
        async for part in self.parts():
            for token in part.tokens:
                yield token

    async def parts(self) -> AsyncIterator[Part]:
        """Iterate over parts; a part is the tokens and text that arrived together."""
        while (part := await self._next()) is not None:
            yield part

    async def cancel(self) -> None:
        """Stop the generation. The context keeps the tokens that were read and drops the others."""
        if self._ended:
            return
        if self._generating is None:
            self._ended, self.reason = True, "cancelled"
            return
        self._generating.cancel()
        try:
            async for _ in self._generating:
                pass
        except WeftError:
            # The generation has ended; the next use of the sequence raises its error.
            pass
        finally:
            self._ended, self.reason = True, "cancelled"
            await self._host.end(self, is_whole=False)

    # Inside

    async def _read(self) -> Generation:
        self.is_whole = self._generating is None
        while await self._next() is not None:
            pass
        return self

    async def _next(self) -> Part | None:
        """The next part; None at the end."""
        if self._ended:
            return None
        if self.is_reading:
            raise InvalidRequest("two tasks read the same generation; let one of them read it")
        self.is_reading = True
        try:
            if self._generating is None:
                self._generating = await self._host.begin(self)
            part = await anext(self._generating, None)
        except WeftError as error:
            # Earlier parts stay, so that the context can be restored and continue.
            if self._generating is not None:
                self._ended, self.reason = True, error.kind
                await self._host.end(self, is_whole=False)
            raise
        finally:
            self.is_reading = False
        if part is None:
            await self._end(self._generating)
            return None
        self._text += part.text
        self.tokens += part.tokens
        self.logprobs += part.logprobs
        self._host.grow(part)
        return part

    async def _end(self, generating: Generating) -> None:
        self.reason, self.stop, self.usage = generating.ending
        self._ended = True
        await self._host.end(self, is_whole=True)

    def _split(self) -> list[Delta]:
        parser = ReasoningParser(opened=self.prompt_thinks)
        return [*parser.push(self._text), *parser.finish()]
