"""Chats of the offline API: what may be asked of their answers, through the same plan and readers as the server's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict

from weft.abi.errors import InvalidRequest
from weft.core.sampling import SamplingParams, StopParams
from weft.endpoints.answer_plan import AnswerPlan, answer_plan
from weft.endpoints.answers import Reading
from weft.endpoints.dialect import Dialect
from weft.endpoints.fields import request_from
from weft.endpoints.schemas.chat import ChatRequest
from weft.llm.options import Conversation, Extras, Options, arguments
from weft.programs.types import CompletionArgs
from weft.tokenizers import chats
from weft.tokenizers.chats import ChatPrompt
from weft.tokenizers.tokenizer import Tokenizer


class TemplateOptions(TypedDict, total=False):
    """What a chat template is given besides messages and tools."""

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: Mapping[str, Any]


class AnswerOptions(TypedDict, total=False):
    """What may be asked of the answers of a chat, as in OpenAI's chat API."""

    tools: Sequence[Mapping[str, Any]]
    """Functions that the model may call: `{"type": "function", "function": {...}}`."""
    tool_choice: str | Mapping[str, Any]
    """`auto`, `none`, `required`, or the function that must be called."""
    parallel_tool_calls: bool
    """Whether there may be several calls in one answer."""
    response_format: Mapping[str, Any]
    """`{"type": "json_schema", "json_schema": ...}`, `json_object` or `text`."""
    reasoning_effort: str
    """Given to the chat template under this name; no effect where it reads none."""


class ChatOptions(Options, AnswerOptions, total=False):
    """What may be given by keyword for a chat."""


class PlannedChat(NamedTuple):
    """How one conversation is completed and its answers are read."""

    args: CompletionArgs
    reading: Reading
    param: str | None
    """The option that errors about the grammar name; None: that is `grammar` itself."""


class ChatPlan(NamedTuple):
    """What all conversations of a call have in common."""

    args: CompletionArgs
    """Without a prompt."""
    extras: Extras
    template: TemplateOptions
    answers: AnswerPlan

    async def of(self, messages: Conversation, tokenizer: Tokenizer) -> PlannedChat:
        """The plan of one conversation. Raises what its rendering raises."""
        body = self.answers.body
        options: dict[str, Any] = dict(self.template)
        if body.reasoning_effort is not None:
            options["template_kwargs"] = {
                "reasoning_effort": body.reasoning_effort,
                **self.template.get("template_kwargs", {}),
            }
        prompt = await chats.encode(ChatPrompt(messages=messages, tools=body.tools or None, **options), tokenizer)
        form = self.answers.form(opened=prompt.opens_reasoning, begun=prompt.continues_reasoning)
        # A grammar of the caller's holds the whole text, as it does for prompts.
        args = replace(
            self.args,
            prompt=prompt.tokens,
            grammar=form.grammar if self.args.grammar is None else self.args.grammar,
            until=form.until,
            skip_special_tokens=self.args.skip_special_tokens and not form.shows_special,
        )
        return PlannedChat(args, form.reading, self.answers.param if self.args.grammar is None else None)


def chat_plan(
    sampling: SamplingParams | None,
    stopping: StopParams | None,
    template: TemplateOptions | None,
    options: ChatOptions,
    dialect: Dialect,
    defaults: Mapping[str, float],
) -> ChatPlan:
    """Check what is asked of chats. Raises `InvalidRequest` and `Unsupported`, naming the field and the place in it."""
    given: dict[str, Any] = dict(options)
    asked = {name: given.pop(name) for name in AnswerOptions.__annotations__ if name in given}
    args, extras = arguments(sampling, stopping, given, defaults, ChatOptions)
    for name in ("tools", "response_format"):
        if args.grammar is not None and asked.get(name):
            raise InvalidRequest(f"{name} cannot be combined with grammar: a text can have one form", name)
    request = request_from(
        ChatRequest,
        # The messages are those of each conversation.
        {"messages": [{"role": "user", "content": ""}], "stop_token_ids": args.stop.stop_token_ids, **asked}
        | {"stop": [text.decode(errors="replace") for text in args.stop.stop]},
    )
    return ChatPlan(args, extras, template or {}, answer_plan(request, dialect))
