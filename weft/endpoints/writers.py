"""Chunks as events of the chat and completion APIs.

What a stream repeats in every event (id, model, time) is encoded once; a plain text chunk is that prefix, the text as
JSON, and a suffix. Chunks that carry more (log-probabilities, token ids, running usage) go through the structs.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from weft.core.wire import TokenLogprobs
from weft.endpoints.answers import AnswerParser, chat_delta
from weft.endpoints.logprobs import CompletionLogprobsWriter, TokenBytes, chat_logprobs, finite
from weft.endpoints.observe import Observer
from weft.endpoints.schemas.chat import AnswerFinish, ChatChunk, ChatChunkChoice, ChatDelta
from weft.endpoints.schemas.common import StreamOptions, UsageInfo
from weft.endpoints.schemas.completion import CompletionChoice, CompletionLogprobs, CompletionResponse
from weft.programs.types import Chunk
from weft.text.deltas import Content, Delta, joined

UNSET = msgspec.UNSET
_encoder = msgspec.json.Encoder()
_encode = _encoder.encode


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What all events of a stream, or the one response, begin with."""

    id: str
    created: int
    model: str


class _Usage:
    """When and where a stream tells usage."""

    def __init__(self, options: StreamOptions | None, observer: Observer):
        self.at_end = options is not None and options.include_usage
        self.always = self.at_end and options is not None and options.continuous_usage_stats
        self._observer = observer

    def of_event(self, unsaid_tokens: int) -> UsageInfo | msgspec.UnsetType | None:
        """For every event but the last: null where usage is told at the end. `unsaid_tokens` come in later events."""
        if self.always:
            return self._observer.usage(unsaid_tokens)
        return None if self.at_end else UNSET


class ChatWriter:
    """Events of `/v1/chat/completions`. `new_parser` makes what reads a choice's text, or is None: all is content."""

    def __init__(
        self,
        head: Head,
        options: StreamOptions | None,
        observer: Observer,
        token_bytes: TokenBytes,
        *,
        logprobs: bool,
        prompt_token_ids: list[int] | None,
        new_parser: Callable[[], AnswerParser] | None = None,
    ):
        self._head = head
        self._usage = _Usage(options, observer)
        self._observer = observer
        self._new_parser = new_parser
        self._parsers: dict[int, AnswerParser] = {}
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._token_ids = prompt_token_ids is not None
        self._prompt_token_ids = prompt_token_ids
        self._plain = not (logprobs or self._token_ids or self._usage.always)
        self._prefixes: dict[int, bytes] = {}
        template = self._event(ChatChunkChoice(index=0, delta=ChatDelta(content="")))
        self._common, rest = template.split(b'"index":0,"delta":{"content":""', 1)
        self._suffix = rest

    def events(self, chunk: Chunk) -> bytes:
        """The role with a choice's first chunk, its text, and its end."""
        parts = []
        prefix = self._prefixes.get(chunk.index)
        if prefix is None:
            prefix = self._prefixes[chunk.index] = self._common + b'"index":%d,"delta":{"content":' % chunk.index
            prompt = self._prompt_token_ids if self._token_ids else UNSET
            # The role comes with the first chunk and not before: until then an error still has a status of its own.
            delta = ChatDelta(role="assistant", content="")
            role = ChatChunkChoice(index=chunk.index, delta=delta)
            parts.append(self._event(role, prompt or UNSET, unsaid_tokens=len(chunk.tokens)))
        finish: AnswerFinish | None = chunk.finish_reason
        if self._new_parser is not None:
            parser = self._parsers.get(chunk.index)
            if parser is None:
                parser = self._parsers[chunk.index] = self._new_parser()
            parts += self._parsed(parser, chunk, prefix)
            finish = None if chunk.finish_reason is None else parser.finish_reason(chunk.finish_reason)
        elif self._plain:
            if chunk.text:
                parts.append(prefix + _encode(chunk.text) + self._suffix)
        elif chunk.text or chunk.tokens:
            parts.append(self._detailed(chunk, ChatDelta(content=chunk.text)))
        if finish is not None:
            choice = ChatChunkChoice(
                index=chunk.index,
                delta=ChatDelta(),
                finish_reason=finish,
                stop_reason=chunk.stop,
                cumulative_logprob=UNSET if chunk.score is None else finite(chunk.score.logprob),
                score=UNSET if chunk.score is None else finite(chunk.score.score),
            )
            parts.append(self._event(choice))
        return b"".join(parts)

    def last_events(self) -> bytes:
        """The usage, where asked for."""
        if not self._usage.at_end:
            return b""
        return _event(_chat_chunk(self._head, [], self._observer.usage()))

    def _parsed(self, parser: AnswerParser, chunk: Chunk, prefix: bytes) -> list[bytes]:
        """An event per delta. What is told of the chunk's tokens comes with the first."""
        found = parser.push(chunk.text)
        if chunk.finish_reason is not None:
            found = joined([*found, *parser.finish(chunk.finish_reason)])
        if self._plain or not (found or chunk.tokens):
            return [self._delta(chunk.index, delta, prefix) for delta in found]
        first = chat_delta(found[0]) if found else ChatDelta(content="")
        return [self._detailed(chunk, first), *(self._delta(chunk.index, delta, prefix) for delta in found[1:])]

    def _delta(self, index: int, delta: Delta, prefix: bytes) -> bytes:
        if self._plain and isinstance(delta, Content):
            return prefix + _encode(delta.text) + self._suffix
        return self._event(ChatChunkChoice(index=index, delta=chat_delta(delta)))

    def _detailed(self, chunk: Chunk, delta: ChatDelta) -> bytes:
        logprobs = chat_logprobs(chunk.tokens, chunk.logprobs, self._token_bytes) if self._logprobs else None
        return self._event(
            ChatChunkChoice(
                index=chunk.index,
                delta=delta,
                logprobs=logprobs,
                token_ids=list(chunk.tokens) if self._token_ids else UNSET,
            )
        )

    def _event(
        self, choice: ChatChunkChoice, prompt: list[int] | msgspec.UnsetType = UNSET, *, unsaid_tokens: int = 0
    ) -> bytes:
        return _event(_chat_chunk(self._head, [choice], self._usage.of_event(unsaid_tokens), prompt))


class Echo(msgspec.Struct, frozen=True):
    """What the text of a prompt's choices begins with."""

    text: str
    tokens: list[int]


class CompletionWriter:
    """Events of `/v1/completions`. `logprobs` makes a writer of log-probabilities per choice, or is None."""

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
        self._plain = not (logprobs or prompt_token_ids or self._usage.always)
        self._logprob_writers: dict[int, CompletionLogprobsWriter] = {}
        self._reported: dict[int, tuple[TokenLogprobs | None, ...]] = {}
        """Of the prompt's own tokens, by prompt."""
        self._prefixes: dict[int, bytes] = {}
        template = self._event(CompletionChoice(index=0, text=""))
        self._common, self._suffix = template.split(b'"index":0,"text":""', 1)

    def events(self, chunk: Chunk) -> bytes:
        """A chunk's text, after the echo where it is a choice's first; and its end."""
        prefix = self._prefixes.get(chunk.index)
        first = prefix is None
        if prefix is None:
            prefix = self._prefixes[chunk.index] = self._common + b'"index":%d,"text":' % chunk.index
        text = chunk.text
        if first and self._echoes is not None:
            text = self._echoes[chunk.index // self._n].text + text
        if not self._plain or chunk.finish_reason is not None:
            # Token ids and log-probabilities may come ahead of their text.
            return self._detailed(chunk, text, first) if text or chunk.tokens or chunk.finish_reason or first else b""
        return prefix + _encode(text) + self._suffix if text else b""

    def last_events(self) -> bytes:
        """The usage, where asked for."""
        if not self._usage.at_end:
            return b""
        return _event(_completion(self._head, [], self._observer.usage()))

    def _detailed(self, chunk: Chunk, text: str, first: bool) -> bytes:
        prompts = self._prompt_token_ids
        return self._event(
            CompletionChoice(
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
                # Told with the prompt's very first chunk, whichever of its choices comes next.
                if chunk.prompt_logprobs is not None:
                    self._reported[prompt] = chunk.prompt_logprobs
                tokens = self._echoes[prompt].tokens + tokens
                entries = [*self._reported[prompt], *entries]
        writer = self._logprob_writers[chunk.index]
        return writer.write(tokens, entries)

    def _event(self, choice: CompletionChoice) -> bytes:
        return _event(_completion(self._head, [choice], self._usage.of_event(0)))


def _chat_chunk(
    head: Head,
    choices: list[ChatChunkChoice],
    usage: UsageInfo | msgspec.UnsetType | None,
    prompt: list[int] | msgspec.UnsetType = UNSET,
) -> ChatChunk:
    return ChatChunk(
        id=head.id, created=head.created, model=head.model, choices=choices, usage=usage, prompt_token_ids=prompt
    )


def _completion(
    head: Head, choices: list[CompletionChoice], usage: UsageInfo | msgspec.UnsetType | None
) -> CompletionResponse:
    return CompletionResponse(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)


def _event(value: msgspec.Struct) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"
