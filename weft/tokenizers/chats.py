"""Rendering of a chat to the prompt of a model, for the server, the offline API and programs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weft.abi.errors import ContextTooLong, InvalidRequest
from weft.text import reasoning
from weft.tokenizers.chat_template import ChatTemplate
from weft.tokenizers.messages import (
    content_text,
    normalize,
    normalize_tools,
    num_characters,
    with_content,
    with_mapped_arguments,
    with_short_ids,
)
from weft.tokenizers.tokenizer import INLINE_CHARS, Tokenizer, off_loop


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Input of a chat template."""

    messages: Sequence[Mapping[str, Any]]
    """As in OpenAI's chat API; at least one."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """As in OpenAI's chat API: `{"type": "function", "function": {...}}`."""
    documents: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    """Instead of the model's."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Leave the last message open for the model to continue. Excludes `add_generation_prompt`."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""


class EncodedChat(NamedTuple):
    """Token ids of a rendered chat, and how the answer to it begins."""

    tokens: bytes
    """Packed token ids."""
    opens_reasoning: bool
    """Whether the prompt ends inside the model's reasoning."""
    continues_reasoning: bool
    """Whether it ends there behind a part of the reasoning's text."""


def render(chat: ChatPrompt, tokenizer: Tokenizer) -> str:
    """The prompt as text.

    Raises `InvalidRequest` for invalid messages or an invalid template, `Unsupported` for a model without a
    template.
    """
    template = (
        tokenizer.chat_template(with_tools=bool(chat.tools))
        if chat.chat_template is None
        else ChatTemplate(chat.chat_template)
    )
    messages = normalize(chat.messages, keep_developer=template.knows_role("developer"))
    write = functools.partial(
        template.render,
        tools=None if chat.tools is None else normalize_tools(chat.tools),
        documents=chat.documents,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        special_tokens=tokenizer.special_tokens,
        variables=chat.template_kwargs,
    )
    try:
        return write(messages)
    except ContextTooLong:
        raise
    except InvalidRequest as error:
        refusal, refused = error, [messages]
    # Mistral's templates refuse ids of another server. Many templates write arguments that are text; those that iterate
    # over them need a mapping. Some expect a text beside calls.
    short = with_short_ids(messages)
    mapped = with_mapped_arguments(short)
    for other in (short, mapped, with_content(short), with_content(mapped)):
        if other not in refused:
            refused.append(other)
            try:
                return write(other)
            except InvalidRequest as error:
                refusal = error
    raise refusal


async def encode(
    chat: ChatPrompt,
    tokenizer: Tokenizer,
    *,
    num_chars: int | None = None,
    check: Callable[[str], None] | None = None,
    add_special_tokens: bool = False,
    tenant: str = "",
) -> EncodedChat:
    """The prompt as token ids. Raises the errors of `render`, and those of `check`, which is called with the text
    before tokenization.

    Long chats, and chats with their own template, are rendered and tokenized on a thread. `num_chars` is an upper bound
    of the chat's characters, if the caller knows one; otherwise they are counted.
    """

    if num_chars is None:
        num_chars = num_characters([chat.messages, chat.tools or (), chat.documents or ()])
    if chat.chat_template is None and num_chars <= INLINE_CHARS:
        text = render(chat, tokenizer)
    else:
        text = await off_loop(functools.partial(render, chat, tokenizer), tenant=tenant)
    if check is not None:
        check(text)
    tokens = await tokenizer.encode_async(text, add_special_tokens=add_special_tokens, tenant=tenant)
    is_open = reasoning.is_open(text)
    is_continued = not is_open and chat.continue_final_message and _ends_in_reasoning(chat.messages[-1])
    return EncodedChat(tokens, is_open or is_continued, is_continued)


def _ends_in_reasoning(message: Mapping[str, Any]) -> bool:
    """Whether an assistant's message, which was rendered, ends inside the reasoning. Only its own text counts: tags in
    other messages or in the template say nothing about it."""
    content = message.get("content")
    if message["role"] != "assistant" or content is None:
        return False
    return reasoning.is_unfinished(content_text(content, "content"))
