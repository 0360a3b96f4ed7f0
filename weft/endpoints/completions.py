"""`/v1/completions`: texts or token ids to continue."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import msgspec

from weft.core.ids import unpack_tokens
from weft.core.wire import TokenLogprobs
from weft.endpoints.arguments import completion_args
from weft.endpoints.beams import beam_args, check_beams, num_beams
from weft.endpoints.constraints import Constraint, constraint_of, named
from weft.endpoints.errors import require
from weft.endpoints.generate import INLINE_DETAILS, Args, Gathered, GatheredChoice, Head, begin, built, gather
from weft.endpoints.logprobs import CompletionLogprobsWriter, finite, prompt_logprobs
from weft.endpoints.models import ActiveModel, Models
from weft.endpoints.observe import Observer
from weft.endpoints.prompts import Fit, as_prompts, tokenize
from weft.endpoints.record import Record
from weft.endpoints.response_limit import bounded_tokens
from weft.endpoints.schemas.common import MAX_CHOICES, PromptLogprobs
from weft.endpoints.schemas.completion import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from weft.endpoints.writers import CompletionWriter, Echo, StreamEvents, streamed
from weft.tokenizers.tokenizer import off_loop

UNSET = msgspec.UNSET


async def create(
    body: CompletionRequest, record: Record, models: Models
) -> CompletionResponse | AsyncGenerator[StreamEvents, None]:
    """Continue every prompt, `n` times each."""
    _check(body)
    check_beams(body)
    constraint = constraint_of(body)
    model = models.recoverable(body.model)
    record.model, record.stream = model.names[0], body.stream
    fit = Fit(model, max_tokens=body.max_tokens, keep_last=body.truncate_prompt_tokens, param="prompt")
    prompts = as_prompts(body.prompt, "prompt", MAX_CHOICES // num_beams(body))
    packed = await tokenize(prompts, model.tokenizer, fit, add_special=body.add_special_tokens, tenant=record.tenant)
    record.mark("tokenized")
    args = _args(body, model, packed, constraint)
    bounded_tokens(
        model,
        packed,
        num_choices=num_beams(body),
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        echo=body.echo,
    )
    head, observer, chunks = begin(record, body, model, args, "cmpl")
    if constraint is not None:
        chunks = named(chunks, constraint.param)
    if body.stream:
        make = functools.partial(_writer, body, model, args, head, observer)
        # An echo decodes the whole prompt to text.
        is_short = record.prompt_tokens <= INLINE_DETAILS
        writer = make() if is_short else await off_loop(make, tenant=record.tenant)
        return streamed(chunks, writer, observer, record.tenant)
    gathered = await gather(observer.watch(chunks), num_prompts=len(args), n=body.n)
    build = functools.partial(_response, body, model, args, head, observer, gathered)
    return await built(build, record, num_told=record.prompt_tokens)


def _check(body: CompletionRequest) -> None:
    require(
        body.max_tokens > 0 or body.echo or body.prompt_logprobs is not None,
        "max_tokens is 0 and neither echo nor prompt_logprobs is set, so there is nothing to answer.",
        "max_tokens",
    )
    require(
        not body.use_beam_search or body.max_tokens > 0,
        "max_tokens is 0, and a beam has at least one token; leave out use_beam_search.",
        "max_tokens",
    )
    require(
        not (body.use_beam_search and body.echo and body.logprobs is not None),
        "echo with logprobs cannot be combined with use_beam_search; leave out echo, or logprobs.",
        "echo",
    )
    require(
        not (body.stream and body.prompt_logprobs is not None),
        "prompt_logprobs cannot be streamed; leave out stream, or use echo with logprobs.",
        "prompt_logprobs",
    )
    require(body.stream or body.stream_options is None, "stream_options needs stream.", "stream_options")


def _args(
    body: CompletionRequest, model: ActiveModel, prompts: list[bytes], constraint: Constraint | None
) -> Sequence[Args]:
    if body.use_beam_search:
        return beam_args(
            body,
            model,
            prompts,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            skip_special_tokens=body.skip_special_tokens,
        )
    args = completion_args(
        body,
        model,
        prompts,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=_prompt_logprobs(body),
    )
    return args if constraint is None else [replace(arg, grammar=constraint.grammar) for arg in args]


def _prompt_logprobs(body: CompletionRequest) -> int | None:
    """Number of candidates to report per prompt token: as requested, or as an echo needs; None: no report."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((k for k in wanted if k is not None), default=None)


def _token_ids(args: Sequence[Args]) -> list[list[int]]:
    return [unpack_tokens(arg.prompt).tolist() for arg in args]


def _echoes(body: CompletionRequest, model: ActiveModel, args: Sequence[Args]) -> list[Echo] | None:
    if not body.echo:
        return None
    skip = body.skip_special_tokens
    return [Echo(model.tokenizer.decode(ids, skip_special=skip), ids) for ids in _token_ids(args)]


def _logprobs_writer(body: CompletionRequest, model: ActiveModel) -> CompletionLogprobsWriter:
    hidden = model.tokenizer.special_ids if body.skip_special_tokens else frozenset()
    return CompletionLogprobsWriter(
        model.tokenizer.bytes_of,
        lambda token: token not in hidden,
        body.logprobs or 0,
        strips_space=body.echo and model.tokenizer.strips_leading_space,
    )


def _writer(
    body: CompletionRequest, model: ActiveModel, args: Sequence[Args], head: Head, observer: Observer
) -> CompletionWriter:
    return CompletionWriter(
        head,
        body.stream_options,
        observer,
        n=body.n,
        echoes=_echoes(body, model, args),
        logprobs=functools.partial(_logprobs_writer, body, model) if body.logprobs is not None else None,
        prompt_token_ids=_token_ids(args) if body.return_token_ids else None,
    )


def _response(
    body: CompletionRequest,
    model: ActiveModel,
    args: Sequence[Args],
    head: Head,
    observer: Observer,
    gathered: Gathered,
) -> CompletionResponse:
    choices = _choices(body, model, args, gathered)
    return CompletionResponse(
        id=head.id, created=head.created, model=head.model, choices=choices, usage=observer.usage()
    )


def _choices(
    body: CompletionRequest, model: ActiveModel, args: Sequence[Args], gathered: Gathered
) -> list[CompletionChoice]:
    echoes = _echoes(body, model, args)
    prompt_ids = _token_ids(args)
    choices = []
    for index, choice in enumerate(gathered.choices):
        prompt = index // body.n
        echo = echoes[prompt] if echoes is not None else None
        reported = gathered.prompt_logprobs.get(prompt, ())
        told: PromptLogprobs | msgspec.UnsetType = UNSET
        # The details of a prompt are sent once, with its first choice.
        if body.prompt_logprobs is not None and index % body.n == 0:
            told = prompt_logprobs(prompt_ids[prompt], reported, model.tokenizer.bytes_of, body.prompt_logprobs)
        choices.append(
            CompletionChoice(
                index=index,
                text=(echo.text if echo is not None else "") + choice.text,
                logprobs=_choice_logprobs(body, model, choice, echo, reported),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop,
                token_ids=choice.tokens if body.return_token_ids else UNSET,
                prompt_token_ids=prompt_ids[prompt] if body.return_token_ids else UNSET,
                prompt_logprobs=told,
                cumulative_logprob=UNSET if choice.score is None else finite(choice.score.logprob),
                score=UNSET if choice.score is None else finite(choice.score.score),
            )
        )
    return choices


def _choice_logprobs(
    body: CompletionRequest,
    model: ActiveModel,
    choice: GatheredChoice,
    echo: Echo | None,
    reported: tuple[TokenLogprobs | None, ...],
) -> CompletionLogprobs | None:
    if body.logprobs is None:
        return None
    writer = _logprobs_writer(body, model)
    if echo is None:
        return writer.write(choice.tokens, choice.logprobs)
    return writer.write([*echo.tokens, *choice.tokens], [*reported, *choice.logprobs])
