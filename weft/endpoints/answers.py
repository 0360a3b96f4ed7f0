"""Answers of a chat in the API's form: how the text of a choice is read, and the messages and deltas it becomes.

Owns the ids of calls that the model gave none.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import msgspec

from weft.core.wire import FinishReason
from weft.endpoints.dialect import Dialect
from weft.endpoints.schemas.chat import (
    AnswerFinish,
    ChatDelta,
    ChatMessage,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from weft.text.answers import AnswerParser
from weft.text.deltas import CallArguments, CallStart, Content, Delta, Reasoning


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers of one request are read."""

    dialect: Dialect
    calls: bool
    """Whether calls are looked for."""
    only_one: bool
    """Calls after the first are dropped."""
    reasoning_opened: bool
    names: frozenset[str] = frozenset()
    """Of the tools: a call of another is content."""
    hold: bool = True
    """Calls are returned once they are complete. Not needed where a grammar holds them and nothing but the length can
    cut them."""

    def parser(self) -> AnswerParser:
        """A new parser, for the text of one choice."""
        return AnswerParser(
            self.dialect.tool_form if self.calls else None,
            reasoning=self.dialect.reasoning,
            opened=self.reasoning_opened,
            names=self.names,
            hold=self.hold,
            only_one=self.only_one,
        )


class FirstCall:
    """Reads one choice along, for a generation that ends with its first call."""

    def __init__(self, reading: Reading):
        self._parser = reading.parser()

    def __call__(self, text: str) -> bool:
        """Whether the first call is complete after the next piece of text."""
        self._parser.push(text)
        return self._parser.num_complete_calls > 0


def ended(parser: AnswerParser, reason: FinishReason) -> list[Delta]:
    """What the parser held back, once its choice has ended."""
    return parser.finish(cut=reason == "length")


def finish_of(parser: AnswerParser, reason: FinishReason) -> AnswerFinish:
    """The `finish_reason` of a choice, as OpenAI names it."""
    return "tool_calls" if parser.num_calls and reason == "stop" else reason


def read_answer(text: str, reason: FinishReason, reading: Reading) -> tuple[ChatMessage, AnswerFinish]:
    """A whole choice: its message, and its `finish_reason`."""
    parser = reading.parser()
    message = message_of([*parser.push(text), *ended(parser, reason)])
    return message, finish_of(parser, reason)


def new_call_id() -> str:
    """An id that no other call has."""
    return "call_" + secrets.token_hex(12)


def chat_delta(delta: Delta) -> ChatDelta:
    """A delta as an event of a stream tells it."""
    if isinstance(delta, Content):  # a match would take several times as long, for every token
        return ChatDelta(content=delta.text)
    match delta:
        case Reasoning(text):
            return ChatDelta(reasoning_content=text)
        case CallStart(index, name, call_id):
            function = FunctionDelta(name=name, arguments="")
            call = ToolCallDelta(index=index, id=call_id or new_call_id(), type="function", function=function)
            return ChatDelta(tool_calls=[call])
        case CallArguments(index, text):
            return ChatDelta(tool_calls=[ToolCallDelta(index=index, function=FunctionDelta(arguments=text))])


def message_of(deltas: list[Delta]) -> ChatMessage:
    """The assistant's turn that the deltas make up."""
    content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        if isinstance(delta, CallArguments):
            arguments.setdefault(delta.index, []).append(delta.text)
    calls = [
        ToolCall(
            id=delta.id or new_call_id(),
            function=FunctionCall(delta.name, "".join(arguments.get(delta.index, ()))),
        )
        for delta in deltas
        if isinstance(delta, CallStart)
    ]
    return ChatMessage(
        role="assistant",
        content=None if not content and (calls or reasoning) else content,
        reasoning_content=reasoning or msgspec.UNSET,
        tool_calls=calls or msgspec.UNSET,
    )
