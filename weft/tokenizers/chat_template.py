"""Chat messages to the text of a prompt, with a model's own Jinja template.

Owns the variables of a template and the continuation of a final message; both follow transformers'
`apply_chat_template`, so prompts are the same text. `weft.tokenizers.limits` limits the cost of a template. Knows
neither tokens nor requests; messages come from `weft.tokenizers.messages`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from weft.abi.errors import ContextTooLong, InvalidRequest
from weft.tokenizers.limits import (
    MAX_OUTPUT_CHARS,
    MAX_TEMPLATE_CHARS,
    TemplateBudget,
    TemplateLimit,
    TextLimit,
    budget,
)
from weft.tokenizers.template_env import TemplateEnvironment

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of a message that is to be continued. The space shows whether the template trims messages."""
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Field names of reasoning in messages; templates read the first, some the second."""


@functools.cache
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


class ChatTemplate:
    """A template; compiled when first used. Raises `InvalidRequest` for one that is too long."""

    def __init__(self, source: str):
        if len(source) > MAX_TEMPLATE_CHARS:
            raise InvalidRequest(
                f"the chat template has {len(source):,} characters, at most {MAX_TEMPLATE_CHARS:,}", "chat_template"
            )
        self.source = source

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            with budget(TemplateBudget()):
                return _environment().from_string(self.source)
        except (jinja2.TemplateError, TemplateLimit, ValueError, RecursionError, MemoryError, SyntaxError) as error:
            raise InvalidRequest(f"the chat template cannot be compiled: {_say(error)}", "chat_template") from error

    def knows_role(self, role: str) -> bool:
        """Whether the template mentions a role and so supports its messages."""
        return role in self.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        special_tokens: Mapping[str, str] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `messages` and all else must be plain JSON values.

        `continue_final_message` leaves the last message open. `variables` are additional variables of the template,
        which override `special_tokens`. Raises `InvalidRequest` with the template's error.
        """
        _check_variables(variables or {})
        chat = [_plain(message) for message in messages]
        if not chat:
            raise InvalidRequest("messages is empty; send at least one", "messages")
        final = self._open_final(chat, add_generation_prompt) if continue_final_message else None
        values = {
            **(special_tokens or {}),
            **(variables or {}),
            "messages": chat,
            "tools": None if tools is None else list(tools),
            "documents": None if documents is None else list(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(values)
        return text if final is None else _cut_at_tag(text, final)

    def _render(self, values: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
        try:
            with budget(TemplateBudget()):
                for piece in self._compiled.generate(values):
                    num_chars += len(piece)
                    if num_chars > MAX_OUTPUT_CHARS:
                        raise TextLimit(f"the prompt grows beyond {MAX_OUTPUT_CHARS:,} characters")
                    pieces.append(piece)
        except InvalidRequest:
            raise
        except TextLimit as error:
            raise ContextTooLong(
                f"the chat template makes more of these messages than any context holds: {error}", "messages"
            ) from error
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refused the messages: {_say(error)}", "messages") from error
        # A template is a program: unexpected values may raise any Python exception.
        except Exception as error:
            raise InvalidRequest(f"the chat template failed on these messages: {_say(error)}", "messages") from error
        return "".join(pieces)

    def _open_final(self, chat: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """Append the tag to the last message's content; returns the original content."""
        if add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other; set the second to false",
                "continue_final_message",
            )
        content = chat[-1].get("content")
        if not isinstance(content, str):
            raise InvalidRequest(
                "continue_final_message needs a final message with text content to continue",
                f"messages[{len(chat) - 1}].content",
            )
        chat[-1]["content"] = content + _CONTINUE_TAG
        return content


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: without nulls, which many would render, and with reasoning under every name
    that they read."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING_FIELDS if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _cut_at_tag(text: str, final: str) -> str:
    """The text up to where the final message ends."""
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise InvalidRequest(
            "the final message cannot be continued: this model's chat template changes or drops its text",
            "continue_final_message",
        )
    whole = text.startswith(_CONTINUE_TAG, at)
    # A template that trims messages has trimmed the tag's space, so the message's trailing space is trimmed too.
    return text[:at] if whole else text[:at].rstrip()


def _check_variables(variables: Mapping[str, Any]) -> None:
    for name in ("messages", "tools", "documents", "add_generation_prompt"):
        if name in variables:
            raise InvalidRequest(
                f"chat_template_kwargs cannot replace {name}; use the field of that name", "chat_template_kwargs"
            )


def _say(error: BaseException) -> str:
    """The error's message in one line."""
    if isinstance(error, RecursionError):
        return "it nests or recurses too deeply"
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    text = " ".join(str(error).split())[:500]
    return text or type(error).__name__
