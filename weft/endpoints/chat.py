"""`/v1/chat/completions`: a conversation to continue."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import msgspec

from weft.core.ids import unpack_tokens
from weft.core.sampling import check_logprobs
from weft.core.waits import WaitKind
from weft.endpoints.answer_plan import AnswerForm, answer_plan
from weft.endpoints.answers import Reading, ToolsCalled, read_answer
from weft.endpoints.arguments import completion_args
from weft.endpoints.beams import beam_args, check_beams, num_beams
from weft.endpoints.constraints import named
from weft.endpoints.errors import require
from weft.endpoints.generate import Args, Gathered, GatheredChoice, Head, begin, built, gather
from weft.endpoints.logprobs import TokenBytes, chat_logprobs, finite, prompt_logprobs
from weft.endpoints.models import ActiveModel, Models
from weft.endpoints.observe import Observer
from weft.endpoints.prompts import Fit, chat_prompt_of, forget_inputs
from weft.endpoints.record import Record
from weft.endpoints.response_limit import bounded_tokens
from weft.endpoints.schemas.chat import ChatChoice, ChatRequest, ChatResponse
from weft.endpoints.writers import ChatWriter, StreamEvents, streamed
from weft.tokenizers import chats

UNSET = msgspec.UNSET


async def create(
    body: ChatRequest, record: Record, models: Models
) -> ChatResponse | AsyncGenerator[StreamEvents, None]:
    """Generate the assistant's next turn, `n` times."""
    _check(body)
    model = models.recoverable(body.model)
    check_beams(body)
    plan = answer_plan(body, model.dialect)
    record.model, record.stream = model.names[0], body.stream
    max_tokens, logprobs = _max_tokens(body), _logprobs(body)
    fit = Fit(model, max_tokens=max_tokens, keep_last=body.truncate_prompt_tokens, param="messages")
    prompt = record.prompt or await chats.encode(
        chat_prompt_of(body),
        model.tokenizer,
        num_chars=record.body_bytes,
        check=fit.check_text,
        add_special_tokens=body.add_special_tokens,
        tenant=record.tenant,
    )
    tokens = fit.packed(prompt.tokens)
    record.mark("tokenized")
    form = plan.form(opened=prompt.opens_reasoning, begun=prompt.continues_reasoning)
    args = _args(body, model, tokens, form, max_tokens, logprobs)
    most_tokens = bounded_tokens(
        model,
        [tokens],
        num_choices=num_beams(body),
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )
    if most_tokens != max_tokens:
        args = _args(body, model, tokens, form, most_tokens, logprobs)
    forget_inputs(body)
    head, observer, chunks = begin(record, body, model, args, "chatcmpl")
    if form.grammar is not None:
        chunks = named(chunks, plan.param)
    told = body.return_token_ids or body.prompt_logprobs is not None
    prompt_ids = unpack_tokens(tokens).tolist() if told else []
    if body.stream:
        writer = ChatWriter(
            head,
            body.stream_options,
            observer,
            model.tokenizer.bytes_of,
            logprobs=body.logprobs,
            prompt_token_ids=prompt_ids if body.return_token_ids else None,
            reading=form.reading,
        )
        return streamed(chunks, writer, observer, record.tenant)
    gathered = await gather(observer.watch(chunks), num_prompts=1, n=body.n)
    build = functools.partial(_response, body, model, head, observer, gathered, prompt_ids, form.reading)
    return await built(build, record, num_told=len(prompt_ids))


def _max_tokens(body: ChatRequest) -> int | None:
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _logprobs(body: ChatRequest) -> int | None:
    """Number of candidates to report per token beside the chosen one; None: no report."""
    return (body.top_logprobs or 0) if body.logprobs else None


def _args(
    body: ChatRequest, model: ActiveModel, prompt: bytes, form: AnswerForm, max_tokens: int | None, logprobs: int | None
) -> Sequence[Args]:
    skip_special = body.skip_special_tokens and not form.shows_special
    if body.use_beam_search:
        return beam_args(
            body, model, [prompt], max_tokens=max_tokens, logprobs=logprobs, skip_special_tokens=skip_special
        )
    (args,) = completion_args(
        body,
        model,
        [prompt],
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )
    return [
        replace(
            args,
            grammar=form.grammar,
            skip_special_tokens=skip_special,
            until=form.until,
            wait_kind=WaitKind.CHAT,
            tools_called=functools.partial(ToolsCalled, form.reading) if form.reading.calls else None,
        )
    ]


def _check(body: ChatRequest) -> None:
    require(body.logprobs or body.top_logprobs is None, "top_logprobs needs logprobs to be true.", "top_logprobs")
    if body.top_logprobs is not None:
        check_logprobs(body.top_logprobs, "top_logprobs")
    require(
        not (body.stream and body.prompt_logprobs is not None),
        "prompt_logprobs cannot be streamed; leave out stream.",
        "prompt_logprobs",
    )
    require(body.stream or body.stream_options is None, "stream_options needs stream.", "stream_options")


def _response(
    body: ChatRequest,
    model: ActiveModel,
    head: Head,
    observer: Observer,
    gathered: Gathered,
    prompt_ids: list[int],
    reading: Reading,
) -> ChatResponse:
    token_bytes = model.tokenizer.bytes_of
    reported = gathered.prompt_logprobs.get(0, ())
    return ChatResponse(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=[_choice(index, choice, body, token_bytes, reading) for index, choice in enumerate(gathered.choices)],
        usage=observer.usage(),
        prompt_token_ids=prompt_ids if body.return_token_ids else UNSET,
        prompt_logprobs=(
            UNSET
            if body.prompt_logprobs is None
            else prompt_logprobs(prompt_ids, reported, token_bytes, body.prompt_logprobs)
        ),
    )


def _choice(
    index: int, choice: GatheredChoice, body: ChatRequest, token_bytes: TokenBytes, reading: Reading
) -> ChatChoice:
    message, finish_reason = read_answer(choice.text, choice.finish_reason, reading)
    return ChatChoice(
        index=index,
        message=message,
        logprobs=chat_logprobs(choice.tokens, choice.logprobs, token_bytes) if body.logprobs else None,
        finish_reason=finish_reason,
        stop_reason=choice.stop,
        token_ids=choice.tokens if body.return_token_ids else UNSET,
        cumulative_logprob=UNSET if choice.score is None else finite(choice.score.logprob),
        score=UNSET if choice.score is None else finite(choice.score.score),
    )
