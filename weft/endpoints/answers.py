"""Answers of a chat as their parts: what was thought, what was said, and which tools are called.

Owns the ids of calls that the model gave none. `AnswerParser` takes one choice's text as it comes; writers and
responses put it into the API's form.
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
from weft.text.deltas import CallArguments, CallStart, Content, Delta, Reasoning, joined
from weft.text.reasoning import ReasoningParser
from weft.text.tool_calls import PARSERS, ToolCallParser


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
    """Calls are told once they are complete. Not needed where a grammar holds them and nothing but the length can cut
    them."""

    @property
    def is_needed(self) -> bool:
        """Whether an answer may be anything but content."""
        return self.calls or self.dialect.reasoning


class AnswerParser:
    """Splits the text of one choice into content, reasoning and tool calls."""

    def __init__(self, reading: Reading):
        dialect = reading.dialect
        self._only_one = reading.only_one
        self._reasoning = ReasoningParser(opened=reading.reasoning_opened) if dialect.reasoning else None
        self._calls: ToolCallParser | None = None
        if reading.calls and dialect.tool_form is not None:
            self._calls = PARSERS[dialect.tool_form](reading.names, hold=reading.hold)
        self._num_calls = 0

    @property
    def num_complete_calls(self) -> int:
        """Calls to which nothing is added any more, whatever comes."""
        return 0 if self._calls is None else self._calls.num_complete

    def push(self, text: str) -> list[Delta]:
        """What is certain after the next piece of text."""
        deltas: list[Delta] = [Content(text)] if self._reasoning is None else self._reasoning.push(text)
        return self._read(deltas)

    def finish(self, reason: FinishReason) -> list[Delta]:
        """What was held back, once the text has ended. A call that the length cuts is told as far as it came; one that
        ends otherwise before it is complete is content."""
        deltas = self._read([] if self._reasoning is None else self._reasoning.finish())
        if self._calls is None:
            return deltas
        return joined([*deltas, *self._kept(self._calls.finish(cut=reason == "length"))])

    def finish_reason(self, reason: FinishReason) -> AnswerFinish:
        """The `finish_reason` of the choice, as OpenAI names it."""
        return "tool_calls" if self._num_calls and reason == "stop" else reason

    def _read(self, deltas: list[Delta]) -> list[Delta]:
        result: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, Content) and self._calls is not None:
                result += self._kept(self._calls.push(delta.text))
            else:
                result.append(delta)
        return joined(result)

    def _kept(self, deltas: list[Delta]) -> list[Delta]:
        self._num_calls += sum(isinstance(delta, CallStart) for delta in deltas)
        if not self._only_one:
            return deltas
        return [delta for delta in deltas if not isinstance(delta, CallStart | CallArguments) or delta.index == 0]


class FirstCall:
    """Reads one choice along, for a generation that ends with its first call."""

    def __init__(self, reading: Reading):
        self._parser = AnswerParser(reading)

    def __call__(self, text: str) -> bool:
        """Whether the first call is complete after the next piece of text."""
        self._parser.push(text)
        return self._parser.num_complete_calls > 0


def new_call_id() -> str:
    """An id that no other call has."""
    return "call_" + secrets.token_hex(12)


def chat_delta(delta: Delta) -> ChatDelta:
    """A delta as an event of a stream tells it."""
    match delta:
        case Content(text):
            return ChatDelta(content=text)
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
