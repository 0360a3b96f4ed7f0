"""A chat on its way into tokens: messages, the turn of the assistant that is still open, and the text so far.

Owns what has to be appended (or forgotten) so that a sequence's tokens are those of the rendered chat. It does not hold
the sequence: `weft.sdk.context` does, and calls it.
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
    """How the tokens of a chat change: keep the first ones, then add others."""

    keep: int
    add: list[int]


@dataclass(slots=True)
class Chat:
    """Of one context."""

    messages: list[Message] = field(default_factory=list)
    raw: dict[int, str] = field(default_factory=dict)
    """What the model wrote, of assistant messages whose tokens are still its own; by the message's place."""
    text: str | None = ""
    """Of all tokens of the chat; None: not known any more, so that they have to be compared."""
    turn: str | None = None
    """What the assistant's open turn has so far; None: none is open."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    template: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the template: documents, chat_template, template_kwargs."""

    def copy(self) -> Chat:
        """Another one that changes by itself."""
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
        """Keep the first messages only."""
        del self.messages[num_messages:]
        self.raw = {at: text for at, text in self.raw.items() if at < num_messages}
        self.turn, self.text = None, None if self.messages else ""

    def end_turn(self, message: Message | None = None) -> None:
        """The assistant's open turn becomes a message: its text, or `message`, which says the same in parts."""
        if self.turn is None:
            return
        self.raw[len(self.messages)] = self.turn
        self.messages.append(message or {"role": "assistant", "content": self.turn})
        self.turn = None

    def said(self, text: str, ending: str = "") -> None:
        """More text of the open turn, and of what ended it and is part of no message."""
        if self.turn is None:
            self.turn = ""
        self.turn += text
        if self.text is not None:
            self.text += text + ending

    async def edit(self, tokens: list[int], *, cue: bool) -> Edit:
        """What makes `tokens`, those of the chat so far, the tokens of its messages. `cue`: so that the assistant's
        turn begins.

        Where the text so far is what the rendered text begins with, only the rest is tokenized, so that what the model
        generated stays as it is. Else all is tokenized and compared.
        """
        if not self.messages:
            raise InvalidRequest("the chat has no messages yet; add one with system or user", "messages")
        rest = None if self.text is None else await self._rest(self.text, cue)
        if rest is not None:
            added = await tokenize(rest) if rest else []
            edit = Edit(len(tokens), added)
            self.text = (self.text or "") + rest
        else:
            text = await self._render(self.messages, cue)
            wanted = await tokenize(text)
            keep = common_prefix(tokens, wanted)
            edit = Edit(keep, wanted[keep:])
            self.text = text
            self.raw.clear()
        if cue:
            self.turn = ""
        return edit

    async def _rest(self, known: str, cue: bool) -> str | None:
        """What is to follow the text so far; None if the chat is no longer what it was."""
        if self.raw:
            plain = [
                {"role": "assistant", "content": self.raw[at]} if at in self.raw else message
                for at, message in enumerate(self.messages)
            ]
            try:
                text = await self._render(plain, cue)
            except Unsupported:
                raise
            except InvalidRequest:
                # Some templates refuse a tool's answer that no structured call precedes.
                text = ""
            if text.startswith(known):
                return text[len(known) :]
        text = await self._render(self.messages, cue)
        return text[len(known) :] if text.startswith(known) else None

    async def _render(self, messages: list[Message], cue: bool) -> str:
        return await render(messages, cue=cue, tools=self.tools, **self.template)


def common_prefix(left: list[int], right: list[int]) -> int:
    """How many of the first tokens are the same."""
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return min(len(left), len(right))
