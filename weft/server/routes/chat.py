"""`/v1/chat/completions`: a conversation to continue."""

from __future__ import annotations

import functools

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.core.ids import unpack_tokens
from weft.server.arguments import completion_args
from weft.server.chat_prompt import chat_args, check_tools, render
from weft.server.generate import Gathered, gather
from weft.server.logprobs import chat_logprobs, prompt_logprobs
from weft.server.observe import Observer
from weft.server.prompts import Fit
from weft.server.record import record_of
from weft.server.routes.base import answer_from, read, require, route
from weft.server.routes.generation import begin
from weft.server.schemas.chat import ChatChoice, ChatMessage, ChatRequest, ChatResponse
from weft.server.sse import EventStream
from weft.server.state import Model, Service
from weft.server.writers import ChatWriter, Head

UNSET = msgspec.UNSET


def routes(service: Service) -> list[Route]:
    """The routes of this family."""
    return [route(service, "POST", "/v1/chat/completions", create)]


async def create(service: Service, request: Request) -> ASGIApp:
    """The assistant's next turn, `n` times."""
    body = await read(service, request, ChatRequest)
    _check(body)
    model = service.usable(body.model)
    record = record_of(request)
    record.model, record.stream = model.names[0], body.stream
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    fit = Fit(model, max_tokens=max_tokens, keep_last=body.truncate_prompt_tokens, param="messages")
    prompt = await render(chat_args(body), model.tokenizer, fit, record, add_special=body.add_special_tokens)
    record.mark("tokenized")
    args = completion_args(
        body,
        model,
        [prompt],
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    head, observer, chunks = begin(request, body, model, args, "chatcmpl")
    prompt_ids = unpack_tokens(prompt).tolist() if body.return_token_ids or body.prompt_logprobs is not None else []
    if body.stream:
        writer = ChatWriter(
            head,
            body.stream_options,
            observer,
            model.tokenizer.bytes_of,
            logprobs=body.logprobs,
            prompt_token_ids=prompt_ids if body.return_token_ids else None,
        )
        return EventStream(request, service, chunks, writer, observer)
    gathered = await gather(request, service, chunks, observer, num_prompts=1, n=body.n)
    build = functools.partial(_response, body, model, head, observer, gathered, prompt_ids)
    return await answer_from(build, record.completion_tokens + len(prompt_ids))


def _check(body: ChatRequest) -> None:
    check_tools(body)
    require(body.logprobs or body.top_logprobs is None, "top_logprobs needs logprobs to be true.", "top_logprobs")
    require(
        not (body.stream and body.prompt_logprobs is not None),
        "prompt_logprobs cannot be streamed; leave out stream.",
        "prompt_logprobs",
    )
    require(body.stream or body.stream_options is None, "stream_options needs stream.", "stream_options")


def _response(
    body: ChatRequest, model: Model, head: Head, observer: Observer, gathered: Gathered, prompt_ids: list[int]
) -> ChatResponse:
    token_bytes = model.tokenizer.bytes_of
    choices = [
        ChatChoice(
            index=index,
            message=ChatMessage("assistant", choice.text),
            logprobs=chat_logprobs(choice.tokens, choice.logprobs, token_bytes) if body.logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop,
            token_ids=choice.tokens if body.return_token_ids else UNSET,
        )
        for index, choice in enumerate(gathered.choices)
    ]
    reported = gathered.prompt_logprobs.get(0, ())
    return ChatResponse(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=choices,
        usage=observer.usage(),
        prompt_token_ids=prompt_ids if body.return_token_ids else UNSET,
        prompt_logprobs=(
            UNSET
            if body.prompt_logprobs is None
            else prompt_logprobs(prompt_ids, reported, token_bytes, body.prompt_logprobs)
        ),
    )
