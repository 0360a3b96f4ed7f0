"""Results of the offline API, and their construction from chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from weft.abi.errors import WeftError, from_kind
from weft.core.wire import OperationUsage, TokenLogprobs
from weft.endpoints.answers import Reading, chat_delta, ended, finish_of, message_of, read_answer, with_call_id
from weft.endpoints.constraints import named
from weft.endpoints.generate import Gathered, GatheredChoice, gather
from weft.endpoints.schemas.chat import AnswerFinish, ChatMessage
from weft.llm.chats import PlannedChat
from weft.llm.options import Conversation, Prompt
from weft.programs.builtin import beam, completion
from weft.programs.builtin.beam import BeamArgs
from weft.programs.runtime import Runtime
from weft.programs.types import WHOLE_ANSWER, Caller, Chunk, CompletionArgs
from weft.text.deltas import Delta, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: AnswerFinish
    """`tool_calls` where the answer to a chat ends with calls."""
    stop: str | int | None = None
    """The stop string or stop token that ended it."""
    logprobs: list[TokenLogprobs] | None = None
    """One per token, if requested."""
    usage: OperationUsage = field(default_factory=OperationUsage)
    score: float | None = None
    """Score by which beams are ranked; None without beam search."""
    message: dict[str, Any] | None = None
    """Of a chat: the answer as a message of OpenAI's chat API, which may be appended to the conversation. Beside
    `content` it has `reasoning_content` and `tool_calls` where there are any."""


class AnswerChunk(msgspec.Struct, frozen=True, kw_only=True):
    """New text and tokens of one answer to a chat; the fields that it shares with `Chunk` mean the same."""

    index: int
    text: str
    """As the model writes it, with the markup of calls and reasoning."""
    deltas: list[dict[str, Any]]
    """What the chunk adds to the answer's message, as `delta` in a stream of OpenAI's chat API: `content`,
    `reasoning_content` or `tool_calls`. A call comes once it is complete, unless a grammar holds it."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: AnswerFinish | None
    """`tool_calls` where the answer ends with calls."""
    stop: str | int | None
    usage: OperationUsage | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    message: dict[str, Any] | None
    """On the last chunk: the whole answer, as `CompletionOutput.message`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of one prompt: `outputs`, or an `error` if errors are returned."""

    index: int
    """The prompt's index among those given."""
    prompt: Prompt | Conversation
    """As given."""
    prompt_token_ids: list[int] = field(default_factory=list)
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One per prompt token, None for the first; if requested."""
    error: WeftError | None = None

    @property
    def text(self) -> str:
        """The first output's text. Raises the prompt's error, if any."""
        return self._first.text

    @property
    def token_ids(self) -> list[int]:
        """The first output's tokens. Raises the prompt's error, if any."""
        return self._first.token_ids

    @property
    def message(self) -> dict[str, Any] | None:
        """The first output's message. Raises the prompt's error where it has one."""
        return self._first.message

    @property
    def finish_reason(self) -> AnswerFinish:
        """Why the first output ended. Raises the prompt's error, if any."""
        return self._first.finish_reason

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was found instead of computed, on the device or the host."""
        return self._prompt_usage.num_cached_tokens

    @property
    def num_continued_tokens(self) -> int:
        """Of the cached tokens, those of the finished turn that the prompt continues."""
        return self._prompt_usage.num_continued_tokens

    @property
    def num_host_tokens(self) -> int:
        """Of the cached tokens, those whose KV was brought from the host."""
        return self._prompt_usage.num_host_tokens

    @property
    def num_recomputed_tokens(self) -> int:
        """Prompt tokens that were computed although their KV had existed: it was given up."""
        return self._prompt_usage.num_recomputed_tokens

    @property
    def num_new_tokens(self) -> int:
        """Prompt tokens that were neither found nor known to have had KV."""
        return self._prompt_usage.num_new_tokens

    @property
    def first_different_token(self) -> int | None:
        """Where the prompt continues a finished turn, the first token that differs from that turn's."""
        return self._prompt_usage.first_different_token

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens of all outputs."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def _prompt_usage(self) -> OperationUsage:
        return self.outputs[0].usage if self.outputs else OperationUsage()

    @property
    def _first(self) -> CompletionOutput:
        if self.error is not None:
            raise self.error
        return self.outputs[0]


async def complete(args: CompletionArgs, caller: Caller, runtime: Runtime) -> Result:
    """A completion as a result without its prompt."""
    gathered = await gather(completion.main(_whole(args), caller, runtime), num_prompts=1, n=args.n)
    return _result(gathered, args.sampling.logprobs is not None)


async def answer(chat: PlannedChat, caller: Caller, runtime: Runtime) -> Result:
    """The answers to a conversation as a result without its prompt."""
    chat = chat._replace(args=_whole(chat.args))
    gathered = await gather(_chunks(chat, caller, runtime), num_prompts=1, n=chat.args.n)
    return _result(gathered, chat.args.sampling.logprobs is not None, chat.reading)


def _whole(args: CompletionArgs) -> CompletionArgs:
    return replace(args, chunk_tokens=WHOLE_ANSWER)


async def answer_chunks(chat: PlannedChat, caller: Caller, runtime: Runtime) -> AsyncGenerator[AnswerChunk, None]:
    """The answers to a conversation as they come."""
    answers = [_StreamedAnswer(chat.reading) for _ in range(chat.args.n)]
    async with aclosing(_chunks(chat, caller, runtime)) as chunks:
        async for chunk in chunks:
            yield answers[chunk.index].chunk(chunk)


class _StreamedAnswer:
    """One answer so far."""

    def __init__(self, reading: Reading):
        self._reading = reading
        self._parser = reading.parser()
        self._deltas: list[Delta] = []

    def chunk(self, chunk: Chunk) -> AnswerChunk:
        """What a chunk adds."""
        deltas = self._parser.push(chunk.text)
        finish_reason: AnswerFinish | None = None
        if chunk.finish_reason is not None:
            deltas = joined([*deltas, *ended(self._parser, chunk.finish_reason)])
            finish_reason = finish_of(self._parser, chunk.finish_reason)
        # Here, so that a call has the same id in its delta and in the message.
        deltas = [with_call_id(delta, self._reading) for delta in deltas]
        self._deltas += deltas
        return AnswerChunk(
            index=chunk.index,
            text=chunk.text,
            deltas=[msgspec.to_builtins(chat_delta(delta, self._reading)) for delta in deltas],
            tokens=chunk.tokens,
            logprobs=chunk.logprobs,
            finish_reason=finish_reason,
            stop=chunk.stop,
            usage=chunk.usage,
            prompt_logprobs=chunk.prompt_logprobs,
            message=None if finish_reason is None else _message(message_of(self._deltas, self._reading)),
        )


def _chunks(chat: PlannedChat, caller: Caller, runtime: Runtime) -> AsyncGenerator[Chunk, None]:
    chunks = completion.main(chat.args, caller, runtime)
    return chunks if chat.param is None else named(chunks, chat.param)


async def search(args: BeamArgs, caller: Caller, runtime: Runtime) -> Result:
    """The beams of a prompt as outputs, best first, as a result without its prompt."""
    chunks = beam.chunks(args, caller, runtime)
    return _result(await gather(chunks, num_prompts=1, n=args.num_results), args.logprobs is not None)


def _result(gathered: Gathered, has_logprobs: bool, reading: Reading | None = None) -> Result:
    outputs = [_output(index, choice, has_logprobs, reading) for index, choice in enumerate(gathered.choices)]
    reported = gathered.prompt_logprobs.get(0)
    return Result(index=0, prompt=[], outputs=outputs, prompt_logprobs=None if reported is None else list(reported))


def _output(index: int, choice: GatheredChoice, has_logprobs: bool, reading: Reading | None) -> CompletionOutput:
    message: dict[str, Any] | None = None
    finish_reason: AnswerFinish = choice.finish_reason
    if reading is not None:
        read, finish_reason = read_answer(choice.text, choice.finish_reason, reading)
        message = _message(read)
    return CompletionOutput(
        index=index,
        text=choice.text,
        token_ids=choice.tokens,
        finish_reason=finish_reason,
        stop=choice.stop,
        logprobs=choice.logprobs if has_logprobs else None,
        usage=choice.usage,
        score=None if choice.score is None else choice.score.score,
        message=message,
    )


def _message(read: ChatMessage) -> dict[str, Any]:
    message: dict[str, Any] = msgspec.to_builtins(read)
    del message["refusal"]  # it is never set
    return message


def of_prompt(index: int, error: WeftError) -> WeftError:
    """The same error with the index of its prompt in the message."""
    message = f"prompt {index}: {error.message}"
    return from_kind(error.kind, message, param=error.param, retry_after_s=error.retry_after_s)
