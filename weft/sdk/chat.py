"""The messages of a chat, the open turn of the assistant, and their rendering into tokens.

Owns the edit (tokens to keep, tokens to add) that makes a sequence's tokens those of the rendered chat. It does not
hold the sequence: `weft.sdk.token_buffer` does, and calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.abi.errors import InvalidRequest, Unsupported
from weft.sdk.tokens import render, tokenize

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of a chat's tokens: keep the first `keep`, then append `add`."""

    keep: int
    add: list[int]


@dataclass(slots=True)
class Chat:
    """The messages of one context, and the text of its open turn."""

    messages: list[Message] = field(default_factory=list)
    raw: dict[int, str] = field(default_factory=dict)
    """Message index -> text as the model wrote it, for assistant messages whose tokens are still the generated ones."""
    text: str | None = ""
    """Text of all tokens of the chat; None: unknown, so the next edit compares tokens."""
    turn: str | None = None
    """Text so far of the assistant's open turn; None: no turn is open."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    template: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the template: documents, chat_template, template_kwargs."""

    def copy(self) -> Chat:
        """A copy that changes independently of this chat."""
        return Chat(
            [dict(message) for message in self.messages],
            dict(self.raw),
            self.text,
            self.turn,
            list(self.tools),
            dict(self.template),
        )

    def add(self, message: Mapping[str, Any]) -> None:
        """Add a message. An open turn ends with it and becomes the assistant's message before it."""
        self.end_turn()
        self.messages.append(dict(message))

    def cut(self, num_messages: int) -> None:
        """Keep only the first `num_messages`."""
        del self.messages[num_messages:]
        self.raw = {at: text for at, text in self.raw.items() if at < num_messages}
        self.turn, self.text = None, None if self.messages else ""

    def end_turn(self, message: Message | None = None) -> None:
        """Turn the assistant's open turn into a message: its text, or `message`, which has the same text in parts."""
        if self.turn is None:
            return
        self.raw[len(self.messages)] = self.turn
        self.messages.append(message or {"role": "assistant", "content": self.turn})
        self.turn = None

    def said(self, text: str, ending: str = "") -> None:
        """Add text to the open turn. `ending`: text of the token that ended the turn; it belongs to no message."""
        if self.turn is None:
            self.turn = ""
        self.turn += text
        if self.text is not None:
            self.text += text + ending

    async def edit(self, tokens: list[int], *, add_generation_prompt: bool) -> Edit:
        """The edit that turns `tokens`, those of the chat so far, into the tokens of its messages.

        `add_generation_prompt`: the rendered text ends with the beginning of the assistant's turn. Where the rendered
        text begins with the text so far, only the rest is tokenized, so that generated tokens stay as they are;
        otherwise all of it is tokenized and compared. Raises `InvalidRequest` for a chat without messages.
        """
        if not self.messages:
            raise InvalidRequest("the chat has no messages yet; add one with system or user", "messages")
        rest = None if self.text is None else await self._rest(self.text, add_generation_prompt)
        if rest is not None:
            added = await tokenize(rest) if rest else []
            edit = Edit(len(tokens), added)
            self.text = (self.text or "") + rest
        else:
            text = await self._render(self.messages, add_generation_prompt)
            wanted = await tokenize(text)
            keep = common_prefix(tokens, wanted)
            edit = Edit(keep, wanted[keep:])
            self.text = text
            self.raw.clear()
        if add_generation_prompt:
            self.turn = ""
        return edit

    async def _rest(self, known: str, add_generation_prompt: bool) -> str | None:
        """The rendered text after `known`; None where the rendered text does not begin with it."""
        if self.raw:
            plain = [
                {"role": "assistant", "content": self.raw[at]} if at in self.raw else message
                for at, message in enumerate(self.messages)
            ]
            try:
                text = await self._render(plain, add_generation_prompt)
            except Unsupported:
                raise
            except InvalidRequest:
                # Some templates refuse a tool's result that does not follow a structured call.
                text = ""
            if text.startswith(known):
                return text[len(known) :]
        text = await self._render(self.messages, add_generation_prompt)
        return text[len(known) :] if text.startswith(known) else None

    async def _render(self, messages: list[Message], add_generation_prompt: bool) -> str:
        return await render(messages, add_generation_prompt=add_generation_prompt, tools=self.tools, **self.template)


def common_prefix(left: list[int], right: list[int]) -> int:
    """Number of leading tokens that both lists share."""
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return min(len(left), len(right))
