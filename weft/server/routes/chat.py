"""`/v1/chat/completions`: a conversation to continue."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.core.grammar import Grammar
from weft.core.ids import unpack_tokens
from weft.endpoints.answers import AnswerParser, FirstCall, Reading, message_of
from weft.endpoints.arguments import completion_args
from weft.endpoints.beams import beam_args, check_beams
from weft.endpoints.chat_prompt import chat_args, render
from weft.endpoints.constraints import Constraint, constraint_of, named
from weft.endpoints.dialect import Dialect
from weft.endpoints.generate import Args, Gathered, GatheredChoice, gather
from weft.endpoints.grammars import answer_grammar, triggered_grammar
from weft.endpoints.logprobs import TokenBytes, chat_logprobs, finite, prompt_logprobs
from weft.endpoints.models import Model
from weft.endpoints.observe import Observer
from weft.endpoints.prompts import Fit
from weft.endpoints.schemas.chat import ChatChoice, ChatRequest, ChatResponse
from weft.endpoints.tools import ToolPlan, tool_plan
from weft.endpoints.writers import ChatWriter, Head
from weft.server.guard import Guard
from weft.server.record import record_of
from weft.server.routes.base import answer_from, read, require, route
from weft.server.routes.generation import begin
from weft.server.sse import EventStream
from weft.server.state import Service

UNSET = msgspec.UNSET


def routes(service: Service) -> list[Route]:
    """The routes of this family."""
    return [route(service, "POST", "/v1/chat/completions", create)]


async def create(service: Service, request: Request) -> ASGIApp:
    """The assistant's next turn, `n` times."""
    body = await read(service, request, ChatRequest)
    _check(body)
    model = service.models.recoverable(body.model)
    check_beams(body)
    constraint = constraint_of(body)
    plan = tool_plan(body, model.dialect)
    if plan.choice == "required":
        # The form is that of an answer, and this answer is a call.
        constraint = None
    require(
        plan.choice == "auto" or not body.use_beam_search,
        "tool_choice asks for a call, which use_beam_search does not hold its texts to; leave one of them out.",
        "tool_choice",
    )
    record = record_of(request)
    record.model, record.stream = model.names[0], body.stream
    fit = Fit(model, max_tokens=_max_tokens(body), keep_last=body.truncate_prompt_tokens, param="messages")
    prompt = await render(chat_args(body), model.tokenizer, fit, record, add_special=body.add_special_tokens)
    record.mark("tokenized")
    reading = _reading(body, model.dialect, plan, opened=prompt.opens_reasoning)
    grammar = _grammar(model.dialect, plan, constraint, opened=prompt.opens_reasoning)
    args = _args(body, model, prompt.tokens, reading, grammar, ends_with_a_call=plan.ends_with_a_call)
    head, observer, chunks = begin(request, body, model, args, "chatcmpl")
    if grammar is not None:
        chunks = named(chunks, "tools" if constraint is None else constraint.param)
    told = body.return_token_ids or body.prompt_logprobs is not None
    prompt_ids = unpack_tokens(prompt.tokens).tolist() if told else []
    if body.stream:
        writer = ChatWriter(
            head,
            body.stream_options,
            observer,
            model.tokenizer.bytes_of,
            logprobs=body.logprobs,
            prompt_token_ids=prompt_ids if body.return_token_ids else None,
            new_parser=functools.partial(AnswerParser, reading) if reading.is_needed else None,
        )
        return EventStream(request, service, chunks, writer, observer)
    async with Guard(request, service):
        gathered = await gather(chunks, observer, num_prompts=1, n=body.n)
    build = functools.partial(_response, body, model, head, observer, gathered, prompt_ids, reading)
    return await answer_from(build, record.completion_tokens + len(prompt_ids), record.tenant)


def _grammar(dialect: Dialect, plan: ToolPlan, constraint: Constraint | None, *, opened: bool) -> Grammar | None:
    if plan.calls is not None and plan.choice == "auto" and constraint is None:
        return triggered_grammar(dialect, plan.calls, reasoning_opened=opened)
    return answer_grammar(dialect, plan.calls, constraint, reasoning_opened=opened)


def _reading(body: ChatRequest, dialect: Dialect, plan: ToolPlan, *, opened: bool) -> Reading:
    if plan.calls is None:
        return Reading(dialect, False, False, opened)
    # Llama's calls may begin without the marker that would trigger a grammar; a search follows none.
    is_held = plan.choice == "required" or not (dialect.tool_form == "llama3_json" or body.use_beam_search)
    return Reading(
        dialect,
        True,
        plan.calls.only_one,
        opened,
        names=frozenset(tool.name for tool in plan.calls.tools),
        hold=bool(body.stop or body.stop_token_ids) or not is_held,
    )


def _max_tokens(body: ChatRequest) -> int | None:
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _args(
    body: ChatRequest,
    model: Model,
    prompt: bytes,
    reading: Reading,
    grammar: Grammar | None,
    *,
    ends_with_a_call: bool,
) -> Sequence[Args]:
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    skip_special = body.skip_special_tokens and not model.dialect.hides(calls=reading.calls)
    if body.use_beam_search:
        return beam_args(
            body, model, [prompt], max_tokens=_max_tokens(body), logprobs=logprobs, skip_special_tokens=skip_special
        )
    (args,) = completion_args(
        body,
        model,
        [prompt],
        max_tokens=_max_tokens(body),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )
    until = functools.partial(FirstCall, reading) if ends_with_a_call else None
    return [replace(args, grammar=grammar, skip_special_tokens=skip_special, until=until)]


def _check(body: ChatRequest) -> None:
    require(body.logprobs or body.top_logprobs is None, "top_logprobs needs logprobs to be true.", "top_logprobs")
    require(
        not (body.stream and body.prompt_logprobs is not None),
        "prompt_logprobs cannot be streamed; leave out stream.",
        "prompt_logprobs",
    )
    require(body.stream or body.stream_options is None, "stream_options needs stream.", "stream_options")


def _response(
    body: ChatRequest,
    model: Model,
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
    parser = AnswerParser(reading)
    message = message_of([*parser.push(choice.text), *parser.finish(choice.finish_reason)])
    return ChatChoice(
        index=index,
        message=message,
        logprobs=chat_logprobs(choice.tokens, choice.logprobs, token_bytes) if body.logprobs else None,
        finish_reason=parser.finish_reason(choice.finish_reason),
        stop_reason=choice.stop,
        token_ids=choice.tokens if body.return_token_ids else UNSET,
        cumulative_logprob=UNSET if choice.score is None else finite(choice.score.logprob),
        score=UNSET if choice.score is None else finite(choice.score.score),
    )
