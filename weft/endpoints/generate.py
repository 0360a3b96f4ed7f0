"""Runs the built-in program of one request for each of its prompts, and gathers their chunks.

Owns the numbering of choices over several prompts and how many of a request's prompts run at once. It knows chunks, not
the form in which an API sends them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from weft.core.wire import FinishReason, TokenLogprobs
from weft.endpoints.observe import Observer
from weft.programs.builtin import beam, completion
from weft.programs.builtin.beam import BeamArgs
from weft.programs.runtime import Runtime
from weft.programs.types import BeamScore, Caller, Chunk, CompletionArgs

PROMPTS_AT_ONCE = 64
"""Of one request: the rest waits here, so that one caller does not fill the engine's queue."""
Args = CompletionArgs | BeamArgs


def _start(args: Args, caller: Caller, runtime: Runtime) -> AsyncGenerator[Chunk, None]:
    if isinstance(args, BeamArgs):
        return beam.chunks(args, caller, runtime)
    return completion.main(args, caller, runtime)


def chunks_of(args: Sequence[Args], n: int, caller: Caller, runtime: Runtime) -> AsyncGenerator[Chunk, None]:
    """Chunks of all prompts as they come; choice `p * n + i` is the i-th of prompt p. Close it to give all pages back.

    Raises what the first failing program raised; the others are then closed.
    """
    if len(args) == 1:
        return _start(args[0], caller, runtime)
    return _merged(args, n, caller, runtime)


async def _merged(args: Sequence[Args], n: int, caller: Caller, runtime: Runtime) -> AsyncGenerator[Chunk, None]:
    # One place: a program that is ahead of its reader waits, and its tokens gather in its own operation.
    ready: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue(maxsize=1)
    waiting = list(enumerate(args))[::-1]

    async def run_prompts() -> None:
        try:
            while waiting:
                number, prompt = waiting.pop()
                async with aclosing(_start(prompt, caller, runtime)) as chunks:
                    async for chunk in chunks:
                        await ready.put(replace(chunk, index=number * n + chunk.index))
        except Exception as error:
            await ready.put(error)
        else:
            await ready.put(None)

    tasks = [asyncio.create_task(run_prompts()) for _ in range(min(PROMPTS_AT_ONCE, len(args)))]
    try:
        running = len(tasks)
        while running:
            news = await ready.get()
            if isinstance(news, BaseException):
                raise news
            if news is None:
                running -= 1
            else:
                yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class GatheredChoice:
    """All chunks of one choice, joined."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    stop: str | int | None = None
    score: BeamScore | None = None


@dataclass(slots=True)
class Gathered:
    """All chunks of a request, joined."""

    choices: list[GatheredChoice]
    prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]]
    """By prompt."""


async def gather(
    chunks: AsyncGenerator[Chunk, None],
    observer: Observer,
    *,
    num_prompts: int,
    n: int,
) -> Gathered:
    """Read the programs of a request to their end. Raises what they raise."""
    texts: list[list[str]] = [[] for _ in range(num_prompts * n)]
    gathered = Gathered([GatheredChoice() for _ in texts], {})
    failure: BaseException | None = None
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                observer.see(chunk)
                choice = gathered.choices[chunk.index]
                texts[chunk.index].append(chunk.text)
                choice.tokens += chunk.tokens
                choice.logprobs += chunk.logprobs
                if chunk.prompt_logprobs is not None:
                    gathered.prompt_logprobs[chunk.index // n] = chunk.prompt_logprobs
                if chunk.finish_reason is not None:
                    choice.finish_reason, choice.stop = chunk.finish_reason, chunk.stop
                    choice.score = chunk.score
    except BaseException as error:
        failure = error
        raise
    finally:
        observer.close(failure)
    for choice, parts in zip(gathered.choices, texts, strict=True):
        choice.text = "".join(parts)
    return gathered
