"""Runs the built-in program of a request for each of its prompts, and merges their chunks.

Owns the numbering of choices over several prompts, and how many prompts of a request run at once. It handles chunks;
`weft.endpoints.writers` gives them the form of an API.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import msgspec

from weft.abi.errors import InvalidRequest
from weft.core.ids import TOKEN_BYTES
from weft.core.wire import FinishReason, OperationUsage, TokenLogprobs
from weft.endpoints.models import ActiveModel
from weft.endpoints.observe import Observer
from weft.endpoints.record import Record
from weft.endpoints.schemas.common import GenerationRequest
from weft.programs.builtin import beam, completion
from weft.programs.builtin.beam import BeamArgs
from weft.programs.runtime import Runtime
from weft.programs.types import BeamScore, Caller, Chunk, CompletionArgs
from weft.tokenizers.tokenizer import off_loop

T = TypeVar("T")
INLINE_DETAILS = 1024
"""Most tokens whose details are built and encoded on the event loop; more are handled on a thread."""
PROMPTS_AT_ONCE = 64
"""Prompts of one request that run at once. The others wait here, so that they do not fill the engine's queue."""
Args = CompletionArgs | BeamArgs


class _Place(NamedTuple):
    """Where the programs of a request run."""

    model: ActiveModel
    session: str
    n: int
    replica: int | None
    """As `Record.replica`."""


def _start(args: Args, caller: Caller, place: _Place) -> AsyncGenerator[Chunk, None]:
    if len(place.model.runtimes) == 1:
        return _program(args, caller, place.model.runtime)
    return _routed(args, caller, place)


async def _routed(args: Args, caller: Caller, place: _Place) -> AsyncGenerator[Chunk, None]:
    """A program on the engine that its prompt goes to."""
    most = args.max_tokens if isinstance(args, BeamArgs) or args.max_tokens is not None else args.stop.max_tokens
    choices = args.width if isinstance(args, BeamArgs) else args.n
    placing = place.model.engine.placed(
        args.prompt,
        caller.namespace,
        session=place.session,
        max_output=most,
        num_choices=choices,
        preferred=place.replica,
        objective=caller.objective,
    )
    with placing as placed:
        async with aclosing(_program(args, caller, place.model.runtimes[placed.engine])) as chunks:
            async for chunk in chunks:
                if chunk.tokens:
                    placed.generated(chunk.index, chunk.tokens)
                yield chunk


def _program(args: Args, caller: Caller, runtime: Runtime) -> AsyncGenerator[Chunk, None]:
    if isinstance(args, BeamArgs):
        return beam.chunks(args, caller, runtime)
    return completion.main(args, caller, runtime)


def _chunks_of(args: Sequence[Args], caller: Caller, place: _Place) -> AsyncGenerator[Chunk, None]:
    """Run the programs and yield their chunks as they arrive; choice `p * n + i` is choice i of prompt p. Closing the
    generator releases all pages.

    Raises the error of the first program that fails, and closes the others.
    """
    if len(args) == 1:
        return _start(args[0], caller, place)
    return _merged(args, caller, place)


async def _merged(args: Sequence[Args], caller: Caller, place: _Place) -> AsyncGenerator[Chunk, None]:
    # One slot: a program that is ahead of the reader waits, and its tokens accumulate in its own operation.
    ready: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue(maxsize=1)
    waiting = list(enumerate(args))[::-1]

    async def run_prompts() -> None:
        try:
            while waiting:
                number, prompt = waiting.pop()
                async with aclosing(_start(prompt, caller, place)) as chunks:
                    async for chunk in chunks:
                        await ready.put(msgspec.structs.replace(chunk, index=number * place.n + chunk.index))
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


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The fields common to all events of a stream, or to the one response."""

    id: str
    created: int
    model: str


class StartedRequest(NamedTuple):
    """The programs of a request. The reader of `chunks` closes them, and shows each to the observer first."""

    head: Head
    observer: Observer
    chunks: AsyncGenerator[Chunk, None]


def begin(
    record: Record, body: GenerationRequest, model: ActiveModel, args: Sequence[Args], kind: str
) -> StartedRequest:
    """Start a program for each of `args`. `kind` is the prefix of the answer's id. Raises `InvalidRequest` if more
    generations would wait at once than the engine lets wait."""
    _check_waiting(args, model)
    prompt_tokens = sum(len(arg.prompt) // TOKEN_BYTES for arg in args)
    first = args[0]
    if record.on_start is not None and isinstance(first, CompletionArgs):
        args = [replace(first, on_start=record.on_start), *args[1:]]
    caller = record.caller(
        cache_salt=body.cache_salt, priority=body.priority, objective=body.objective, deadline_s=body.deadline_s
    )
    observer = Observer(record, model.metrics, num_prompts=len(args), n=body.n, prompt_tokens=prompt_tokens)
    return StartedRequest(
        Head(id=f"{kind}-{record.request_id}", created=int(time.time()), model=body.model or model.names[0]),
        observer,
        _chunks_of(_with_next(args, record), caller, _Place(model, body.session_id, body.n, record.replica)),
    )


def _check_waiting(args: Sequence[Args], model: ActiveModel) -> None:
    # The engine's own refusal says that the request may be sent again, and this one would be refused again.
    first = args[0]
    if model.max_waiting is None or isinstance(first, BeamArgs):
        return
    at_once = min(len(args), PROMPTS_AT_ONCE) * first.n
    if at_once > model.max_waiting:
        raise InvalidRequest(
            f"The request needs {at_once} generations at once (prompts times n), and this server lets "
            f"{model.max_waiting} wait (engine.max_waiting). Send fewer prompts, or ask for fewer choices.",
            "prompt" if len(args) > 1 else "n",
        )


def _with_next(args: Sequence[Args], record: Record) -> Sequence[Args]:
    """The programs, told what comes after their answers as far as the record knows it."""
    if record.wait_kind is None:
        return args
    known: dict[str, Any] = {"wait_kind": record.wait_kind, "expected_in_s": record.expected_in_s, "tools_called": None}
    return [replace(each, **known) if isinstance(each, CompletionArgs) else each for each in args]


@dataclass(slots=True)
class GatheredChoice:
    """All chunks of one choice, joined."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    stop: str | int | None = None
    usage: OperationUsage = field(default_factory=OperationUsage)
    score: BeamScore | None = None


@dataclass(slots=True)
class Gathered:
    """All chunks of a request, joined."""

    choices: list[GatheredChoice]
    prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]]
    """Index of the prompt -> log-probabilities of its tokens."""


async def gather(chunks: AsyncGenerator[Chunk, None], *, num_prompts: int, n: int) -> Gathered:
    """Read the programs of a request to their end, and close them. Raises their errors."""
    texts: list[list[str]] = [[] for _ in range(num_prompts * n)]
    gathered = Gathered([GatheredChoice() for _ in texts], {})
    async with aclosing(chunks):
        async for chunk in chunks:
            choice = gathered.choices[chunk.index]
            texts[chunk.index].append(chunk.text)
            choice.tokens += chunk.tokens
            choice.logprobs += chunk.logprobs
            if chunk.prompt_logprobs is not None:
                gathered.prompt_logprobs[chunk.index // n] = chunk.prompt_logprobs
            if chunk.finish_reason is not None:
                choice.finish_reason, choice.stop = chunk.finish_reason, chunk.stop
                choice.usage, choice.score = chunk.usage or OperationUsage(), chunk.score
    for choice, parts in zip(gathered.choices, texts, strict=True):
        choice.text = "".join(parts)
    return gathered


async def built(build: Callable[[], T], record: Record, *, num_told: int) -> T:
    """Call `build`; on a thread if its result has details of many tokens: those of the answer and `num_told` others."""
    record.num_details = record.completion_tokens + num_told
    return build() if record.num_details <= INLINE_DETAILS else await off_loop(build, tenant=record.tenant)
