"""Completion as a program: a prompt goes in, chunks of one or several choices come out.

It opens a sequence, puts operations on it, and passes on what they report. However it ends (the last token, an error, a
client that went away), leaving the `async with` gives all pages back. When the engine dies, `Recovery` makes a further
attempt, which appends the tokens that were told and generates behind them.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

import msgspec
import numpy as np

from weft.abi.errors import ContextTooLong, InvalidRequest
from weft.core.ids import TOKEN_BYTES
from weft.core.sampling import SamplingParams, StopParams, check_logprobs
from weft.core.wire import EngineInfo, Finished, OperationUsage, PromptOutputs, TokenLogprobs
from weft.programs.builtin.choice import ChoiceText
from weft.programs.operations import Generations, GenerationUpdate, TokenStream
from weft.programs.runtime import Runtime
from weft.programs.sequence import SequenceHandle
from weft.programs.types import Caller, Chunk, CompletionArgs
from weft.programs.wire_sizes import check_sizes

MAX_CHOICES = 128
_SEEDS = 2**63


async def main(args: CompletionArgs, caller: Caller, rt: Runtime) -> AsyncGenerator[Chunk, None]:
    """Chunks of all choices, as they come; each choice's last one has its `finish_reason`.

    Raises `InvalidRequest` (`ContextTooLong` among them) before anything is computed, what the engine fails with, and
    what `Recovery.stream` raises.
    """
    check(args, rt.engine.info)
    completion = Completion(args, caller, rt)
    async with aclosing(rt.recovery.stream(completion.attempt, caller.request_id)) as chunks:
        async for chunk in chunks:
            yield chunk


class Completion:
    """The choices of one completion and what has been told of them, from which it continues on a restarted engine."""

    def __init__(self, args: CompletionArgs, caller: Caller, rt: Runtime):
        self._args, self._caller, self._rt = args, caller, rt
        self._stop = stop_params(args)
        # Drawn once, so that a continuation draws as the attempt before it would have.
        self._sampling = [seeded(args.sampling, index) for index in range(args.n)]
        self._choices = [
            ChoiceText(index, args, rt, is_enough=None if args.until is None else args.until())
            for index in range(args.n)
        ]
        self._tools_called = [None if args.tools_called is None else args.tools_called() for _ in range(args.n)]
        self._needs_report = args.prompt_logprobs is not None
        self._chunk_tokens = args.chunk_tokens if args.until is None else 1
        """Of the next attempt: what sees the text as it comes may end it, and `Recovery` reads the first chunks of a
        suspect alone."""
        self._prompt_usage: OperationUsage | None = None
        """Of the operation that computed the prompt, where the attempt has one apart from the generation."""

    async def attempt(self) -> AsyncGenerator[Chunk, None]:
        """The chunks that have not been told, on sequences of their own. Raises what the engine fails with."""
        args = self._args
        chunk_tokens, self._chunk_tokens = self._chunk_tokens, 1
        for choice in self._choices:
            if choice.has_enough and not choice.ended:
                usage = OperationUsage(num_prompt_tokens=len(args.prompt) // TOKEN_BYTES)
                yield self._enough(choice, Chunk(index=choice.index), usage)
        choices = [choice for choice in self._choices if not choice.ended]
        if not choices:
            return
        async with AsyncExitStack() as scope:
            prompt = await scope.enter_async_context(self._rt.open(self._caller))
            if args.max_tokens == 0:
                for chunk in prompt_only(args, await prompt.append(args.prompt, _prompt_outputs(args))):
                    yield chunk
                return
            # Forks before the first token share the prompt's pages, so it is computed once.
            report = self._prompt_usage = None
            if self._needs_report:
                report = prompt.append(args.prompt, _prompt_outputs(args))
            else:
                prompt.append(args.prompt)
            sequences = [prompt, *[await scope.enter_async_context(prompt.fork()) for _ in choices[1:]]]
            generations = [self._generate(*pair) for pair in zip(sequences, choices, strict=True)]
            if report is not None:
                finished = await report
                prompt_logprobs, self._prompt_usage = _logprobs(finished), finished.usage
                self._needs_report = False
                yield Chunk(index=0, prompt_logprobs=prompt_logprobs)
            reading = Generations(generations)
            while reading.live:
                updates = reading.take()
                if not updates:
                    await reading.arrival()
                for news in updates:
                    generations[news.choice].least = chunk_tokens
                    told = self._chunk(choices[news.choice], news, generations[news.choice], sequences[news.choice])
                    if told is not None:
                        yield told

    def _generate(self, sequence: SequenceHandle, choice: ChoiceText) -> TokenStream:
        """Generate behind the tokens that have been told."""
        if choice.tokens:
            sequence.append(choice.tokens.tobytes())
        return sequence.generate(
            self._sampling[choice.index],
            self._stop,
            self._args.grammar,
            num_generated=len(choice.tokens),
            on_start=self._args.on_start if choice.index == 0 else None,
        )

    def _chunk(
        self, choice: ChoiceText, news: GenerationUpdate, generation: TokenStream, sequence: SequenceHandle
    ) -> Chunk | None:
        """What the news of a choice add; None where the choice had enough before. The sequence is released with the
        choice's end, since its pages serve others while the other choices go on."""
        had_enough = choice.has_enough
        chunk = choice.chunk(news.tokens, generation.finished if news.ended else None)
        tools_called = self._tools_called[choice.index]
        if tools_called is not None:
            tools_called.push(chunk.text)
        usage = generation.usage
        if news.choice == 0 and self._prompt_usage is not None:
            usage = usage.with_prompt_of(self._prompt_usage)
            chunk = chunk if chunk.usage is None else msgspec.structs.replace(chunk, usage=usage)
        if news.ended:
            kind = self._wait_kind(choice, generation)
            sequence.release(kind, self._args.expected_in_s if kind else None)
            if choice.has_enough:
                return self._enough(choice, chunk, usage)
            choice.ended = True
        elif had_enough:
            return None
        elif choice.has_enough:
            # The engine says with the end what it cost.
            sequence.cancel()
        return chunk

    def _wait_kind(self, choice: ChoiceText, generation: TokenStream) -> str:
        """What the client does after an answer; nothing after one that failed or was cancelled by it."""
        finished = generation.finished
        if finished is None and not choice.has_enough:
            return ""
        tools_called = self._tools_called[choice.index]
        if tools_called is None:
            return self._args.wait_kind
        if finished is None or choice.has_enough:
            return tools_called.wait_kind("stop")
        tools_called.push(choice.stop_text(finished))
        return tools_called.wait_kind(finished.reason)

    def _enough(self, choice: ChoiceText, chunk: Chunk, usage: OperationUsage) -> Chunk:
        """The last chunk of a choice whose reader has had enough of it."""
        choice.ended = True
        usage = msgspec.structs.replace(usage, num_output_tokens=len(choice.tokens))
        return msgspec.structs.replace(chunk, finish_reason="stop", stop=None, usage=usage)


def check_prompt(prompt: bytes, info: EngineInfo) -> None:
    """Raise `InvalidRequest` for packed tokens that no sequence can begin with."""
    if not prompt or len(prompt) % TOKEN_BYTES:
        raise InvalidRequest("the prompt is empty; it needs at least one token", "prompt")
    tokens = np.frombuffer(prompt, dtype="<i4")
    if tokens.min() < 0 or tokens.max() >= info.vocab_size:
        raise InvalidRequest(f"the prompt has token ids outside 0 to {info.vocab_size - 1}", "prompt")


def check_room(prompt: bytes, wanted: int, info: EngineInfo) -> None:
    """Raise `ContextTooLong` for packed tokens that leave no room for `wanted` more."""
    num_tokens = len(prompt) // TOKEN_BYTES
    if num_tokens + wanted > info.max_context:
        raise ContextTooLong(
            f"the prompt has {num_tokens} tokens and at least {wanted} more are asked for, but this model takes "
            f"{info.max_context} in all; shorten the prompt or lower max_tokens",
            "prompt",
        )


def check(args: CompletionArgs, info: EngineInfo) -> None:
    """Raise `InvalidRequest`, naming the field, for what this engine could not carry out."""
    check_prompt(args.prompt, info)
    if not 1 <= args.n <= MAX_CHOICES:
        raise InvalidRequest(f"n must be between 1 and {MAX_CHOICES}, got {args.n}", "n")
    if args.max_tokens is not None and args.max_tokens < 0:
        raise InvalidRequest(f"max_tokens must not be negative, got {args.max_tokens}", "max_tokens")
    args.sampling.validate(info.vocab_size)
    if args.prompt_logprobs is not None:
        check_logprobs(args.prompt_logprobs, "prompt_logprobs")
    stop = stop_params(args)
    check_sizes(args.sampling)
    check_sizes(stop)
    if args.max_tokens != 0:
        stop.validate(info.vocab_size)
    wanted = 0 if args.max_tokens == 0 else (stop.max_tokens or 1)
    check_room(args.prompt, wanted, info)


def stop_params(args: CompletionArgs) -> StopParams:
    """When each choice ends: `args.max_tokens` counts, where it is set."""
    return args.stop if not args.max_tokens else msgspec.structs.replace(args.stop, max_tokens=args.max_tokens)


def seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one choice, which draws with the seed + its index (within 64 bits)."""
    seed = secrets.randbelow(_SEEDS) if sampling.seed is None else sampling.seed
    return msgspec.structs.replace(sampling, seed=(seed + index + _SEEDS) % (2 * _SEEDS) - _SEEDS)


def prompt_only(args: CompletionArgs, finished: Finished) -> list[Chunk]:
    """The single chunk of each choice where nothing is generated."""
    logprobs = _logprobs(finished) if args.prompt_logprobs is not None else None
    return [
        Chunk(
            index=index,
            finish_reason="length",
            usage=finished.usage,
            prompt_logprobs=logprobs if index == 0 else None,
        )
        for index in range(args.n)
    ]


def _prompt_outputs(args: CompletionArgs) -> PromptOutputs:
    return PromptOutputs(logprobs=args.prompt_logprobs)


def _logprobs(finished: Finished) -> tuple[TokenLogprobs | None, ...]:
    return tuple(finished.prompt_logprobs or ())
