"""Converts chunks of programs to events of the chat and completion APIs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Protocol

import msgspec

from weft.core.wire import TokenLogprobs
from weft.endpoints.answers import Reading, chat_delta, ended, finish_of
from weft.endpoints.generate import INLINE_DETAILS, Head
from weft.endpoints.logprobs import CompletionLogprobsWriter, TokenBytes, chat_logprobs, finite
from weft.endpoints.observe import Observer
from weft.endpoints.schemas.chat import ChatChunk, ChatChunkChoice, ChatDelta, ChatLogprobs
from weft.endpoints.schemas.common import StreamOptions, UsageInfo
from weft.endpoints.schemas.completion import CompletionChoice, CompletionLogprobs, CompletionResponse
from weft.programs.types import Chunk
from weft.text.answers import AnswerParser
from weft.text.deltas import Content, joined
from weft.tokenizers.tokenizer import off_loop

UNSET = msgspec.UNSET


class StreamEvents(msgspec.Struct, frozen=True):
    """Events of a stream that became known together and are sent together."""

    values: list[ChatChunk] | list[CompletionResponse]
    is_long: bool
    """Whether the events are so large that a thread must encode them."""


class Writer(Protocol):
    """Converts the chunks of one request to events of its API."""

    def events(self, chunk: Chunk) -> list[ChatChunk] | list[CompletionResponse]:
        """The events of a chunk; empty if the chunk adds nothing."""
        ...

    def last_events(self) -> list[ChatChunk] | list[CompletionResponse]:
        """The events after the last chunk."""
        ...


async def streamed(
    chunks: AsyncGenerator[Chunk, None], writer: Writer, observer: Observer, tenant: str
) -> AsyncGenerator[StreamEvents, None]:
    """Yield the events of a request's chunks as they arrive; the observer sees each chunk first. Raises the programs'
    errors; always closes `chunks`."""
    with observer:
        async with aclosing(chunks):
            async for chunk in chunks:
                observer.see(chunk)
                # The log-probabilities of a long prompt come in one chunk; only they take long to convert.
                if chunk.prompt_logprobs is None or len(chunk.prompt_logprobs) <= INLINE_DETAILS:
                    yield StreamEvents(writer.events(chunk), False)
                else:
                    yield StreamEvents(await off_loop(partial(writer.events, chunk), tenant=tenant), True)
    yield StreamEvents(writer.last_events(), False)


class _Usage:
    """The usage in the events of a stream, as the request's options say."""

    def __init__(self, options: StreamOptions | None, observer: Observer):
        self.at_end = options is not None and options.include_usage
        self.always = self.at_end and options is not None and options.continuous_usage_stats
        self._observer = observer
        self._unless_always: msgspec.UnsetType | None = None if self.at_end else UNSET

    def of_event(self, unsaid_tokens: int = 0) -> UsageInfo | msgspec.UnsetType | None:
        """The usage of every event but the last: null if only the last has usage. `unsaid_tokens` come in later
        events."""
        return self._observer.usage(unsaid_tokens) if self.always else self._unless_always


class ChatWriter:
    """Events of `/v1/chat/completions`. `reading` says how the text of a choice is parsed."""

    def __init__(
        self,
        head: Head,
        options: StreamOptions | None,
        observer: Observer,
        token_bytes: TokenBytes,
        *,
        logprobs: bool,
        prompt_token_ids: list[int] | None,
        reading: Reading,
    ):
        self._head = head
        self._usage = _Usage(options, observer)
        self._observer = observer
        self._reading = reading
        self._parsers: dict[int, AnswerParser] = {}
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._token_ids = prompt_token_ids is not None
        self._prompt_token_ids = prompt_token_ids
        self._tells_tokens = logprobs or self._token_ids or self._usage.always

    def events(self, chunk: Chunk) -> list[ChatChunk]:
        """The events of a chunk: the role with a choice's first chunk, the text, and the end of the choice."""
        events = []
        parser = self._parsers.get(chunk.index)
        if parser is None:
            parser = self._parsers[chunk.index] = self._reading.parser()
            # The role is sent with the first chunk and not earlier: until then an error can still set the HTTP status.
            delta = ChatDelta(role="assistant", content="")
            role = ChatChunkChoice(index=chunk.index, delta=delta)
            usage = self._usage.of_event(unsaid_tokens=len(chunk.tokens))
            events.append(self._chunk([role], usage, self._prompt_token_ids or UNSET))
        self._add_parts(events, parser, chunk)
        if chunk.finish_reason is not None:
            choice = ChatChunkChoice(
                index=chunk.index,
                delta=ChatDelta(),
                finish_reason=finish_of(parser, chunk.finish_reason),
                stop_reason=chunk.stop,
                cumulative_logprob=UNSET if chunk.score is None else finite(chunk.score.logprob),
                score=UNSET if chunk.score is None else finite(chunk.score.score),
            )
            events.append(self._chunk([choice], self._usage.of_event()))
        return events

    def last_events(self) -> list[ChatChunk]:
        """The event with the usage, if the request asks for it."""
        return [self._chunk([], self._observer.usage())] if self._usage.at_end else []

    def _add_parts(self, events: list[ChatChunk], parser: AnswerParser, chunk: Chunk) -> None:
        """Add one event per delta. The first carries the details of the chunk's tokens."""
        found = parser.push(chunk.text)
        if chunk.finish_reason is not None:
            found = joined([*found, *ended(parser, chunk.finish_reason)])
        # Most chunks are one piece of content, and what follows runs for every token.
        logprobs: ChatLogprobs | None = None
        token_ids: list[int] | msgspec.UnsetType = UNSET
        if self._tells_tokens:
            if not found and chunk.tokens:
                found = [Content("")]
            if self._logprobs:
                logprobs = chat_logprobs(chunk.tokens, chunk.logprobs, self._token_bytes)
            if self._token_ids:
                token_ids = list(chunk.tokens)
        for delta in found:
            choice = ChatChunkChoice(
                index=chunk.index, delta=chat_delta(delta, self._reading), logprobs=logprobs, token_ids=token_ids
            )
            events.append(self._chunk([choice], self._usage.of_event()))
            logprobs, token_ids = None, UNSET

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: UsageInfo | msgspec.UnsetType | None,
        prompt: list[int] | msgspec.UnsetType = UNSET,
    ) -> ChatChunk:
        head = self._head
        return ChatChunk(
            id=head.id, created=head.created, model=head.model, choices=choices, usage=usage, prompt_token_ids=prompt
        )


class Echo(msgspec.Struct, frozen=True):
    """The prompt that the text of each of its choices begins with."""

    text: str
    tokens: list[int]


class CompletionWriter:
    """Events of `/v1/completions`. `logprobs` creates a writer of log-probabilities per choice, or is None."""

    def __init__(
        self,
        head: Head,
        options: StreamOptions | None,
        observer: Observer,
        *,
        n: int,
        echoes: list[Echo] | None,
        logprobs: Callable[[], CompletionLogprobsWriter] | None,
        prompt_token_ids: list[list[int]] | None,
    ):
        self._head = head
        self._usage = _Usage(options, observer)
        self._observer = observer
        self._n = n
        self._echoes = echoes
        self._logprobs = logprobs
        self._prompt_token_ids = prompt_token_ids
        self._tells_tokens = bool(logprobs or prompt_token_ids or self._usage.always)
        self._begun: set[int] = set()
        """Indices of the choices that have begun."""
        self._logprob_writers: dict[int, CompletionLogprobsWriter] = {}
        self._reported: dict[int, tuple[TokenLogprobs | None, ...]] = {}
        """Index of the prompt -> log-probabilities of its tokens."""

    def events(self, chunk: Chunk) -> list[CompletionResponse]:
        """The event of a chunk: its text, with the echo before a choice's first text, and the end of the choice."""
        first = chunk.index not in self._begun
        self._begun.add(chunk.index)
        text = chunk.text
        if first and self._echoes is not None:
            text = self._echoes[chunk.index // self._n].text + text
        # Token ids and log-probabilities may precede their text.
        tells = text or chunk.finish_reason or (self._tells_tokens and (chunk.tokens or first))
        return [self._event(self._choice(chunk, text, first))] if tells else []

    def last_events(self) -> list[CompletionResponse]:
        """The event with the usage, if the request asks for it."""
        return [self._response([], self._observer.usage())] if self._usage.at_end else []

    def _choice(self, chunk: Chunk, text: str, first: bool) -> CompletionChoice:
        prompts = self._prompt_token_ids
        return CompletionChoice(
            index=chunk.index,
            text=text,
            logprobs=self._chunk_logprobs(chunk, first),
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop,
            token_ids=list(chunk.tokens) if prompts is not None else UNSET,
            prompt_token_ids=prompts[chunk.index // self._n] if prompts is not None and first else UNSET,
            cumulative_logprob=UNSET if chunk.score is None else finite(chunk.score.logprob),
            score=UNSET if chunk.score is None else finite(chunk.score.score),
        )

    def _chunk_logprobs(self, chunk: Chunk, first: bool) -> CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        tokens = list(chunk.tokens)
        entries: list[TokenLogprobs | None] = [*chunk.logprobs]
        if first:
            self._logprob_writers[chunk.index] = self._logprobs()
            if self._echoes is not None:
                prompt = chunk.index // self._n
                # The first chunk of a prompt has them, but other choices of the prompt need them too.
                if chunk.prompt_logprobs is not None:
                    self._reported[prompt] = chunk.prompt_logprobs
                tokens = self._echoes[prompt].tokens + tokens
                entries = [*self._reported[prompt], *entries]
        writer = self._logprob_writers[chunk.index]
        return writer.write(tokens, entries)

    def _event(self, choice: CompletionChoice) -> CompletionResponse:
        return self._response([choice], self._usage.of_event())

    def _response(
        self, choices: list[CompletionChoice], usage: UsageInfo | msgspec.UnsetType | None
    ) -> CompletionResponse:
        head = self._head
        return CompletionResponse(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)
