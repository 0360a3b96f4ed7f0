"""Answers of a chat in the API's form: the parsing of a choice's text into messages and deltas.

Owns the ids of calls to which the model gave none.
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, replace

import msgspec

from weft.core.waits import WaitKind, tool_wait
from weft.core.wire import FinishReason
from weft.endpoints.dialect import Dialect
from weft.endpoints.schemas.chat import (
    AnswerFinish,
    ChatDelta,
    ChatMessage,
    ChatToolCall,
    FunctionCall,
    FunctionDelta,
    ToolCallDelta,
)
from weft.text.answers import AnswerParser
from weft.text.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from weft.tokenizers.messages import SHORT_ID_LENGTH

_SHORT_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers of one request are parsed."""

    dialect: Dialect
    calls: bool
    """Whether calls are parsed."""
    only_one: bool
    """Calls after the first are dropped."""
    reasoning_opened: bool
    names: frozenset[str] = frozenset()
    """Names of the tools; a call of any other name is content."""
    hold: bool = True
    """Whether a call is returned only once it is complete. Not needed where a grammar constrains the calls and only the
    length limit can cut them."""
    reasoning_begun: bool = False
    """Whether the prompt ends in the middle of the reasoning, behind a part of its text."""

    def parser(self) -> AnswerParser:
        """Create a parser for the text of one choice."""
        return AnswerParser(
            self.dialect.tool_form if self.calls else None,
            reasoning=self.dialect.reasoning,
            opened=self.reasoning_opened,
            begun=self.reasoning_begun,
            names=self.names,
            hold=self.hold,
            only_one=self.only_one,
        )

    def new_call_id(self) -> str:
        """A new id of a call, in the form that the model's chat template accepts: Mistral's templates refuse any id but
        one of `SHORT_ID_LENGTH` letters and digits."""
        if self.dialect.tool_form == "mistral":
            return "".join(secrets.choice(_SHORT_ID_CHARS) for _ in range(SHORT_ID_LENGTH))
        return "call_" + secrets.token_hex(12)


class ToolsCalled:
    """Parses the text of one choice as it is generated, for what its client does next: it runs the tools that are
    called, or a person reads."""

    def __init__(self, reading: Reading):
        self._parser = reading.parser()
        self._names: list[str] = []

    def push(self, text: str) -> None:
        """Parse the next piece of the choice's text and note the names of the tools that it calls."""
        self._take(self._parser.push(text))

    def wait_kind(self, reason: FinishReason) -> str:
        """What the client does now that the choice has ended."""
        self._take(ended(self._parser, reason))
        return tool_wait(self._names) if self._names else WaitKind.CHAT

    def _take(self, deltas: list[Delta]) -> None:
        self._names += [delta.name for delta in deltas if isinstance(delta, CallStart)]


class FirstCall:
    """Parses the text of one choice as it is generated, to end the generation with its first call."""

    def __init__(self, reading: Reading):
        self._parser = reading.parser()

    def __call__(self, text: str) -> bool:
        """Whether the first call is complete after the next piece of text."""
        self._parser.push(text)
        return self._parser.num_complete_calls > 0


def ended(parser: AnswerParser, reason: FinishReason) -> list[Delta]:
    """The deltas that the parser held back, once its choice has ended."""
    return parser.finish(cut=reason == "length")


def finish_of(parser: AnswerParser, reason: FinishReason) -> AnswerFinish:
    """The `finish_reason` of a choice, as OpenAI names it."""
    return "tool_calls" if parser.num_calls and reason == "stop" else reason


def read_answer(text: str, reason: FinishReason, reading: Reading) -> tuple[ChatMessage, AnswerFinish]:
    """The message and the `finish_reason` of a complete choice."""
    parser = reading.parser()
    message = message_of([*parser.push(text), *ended(parser, reason)], reading)
    return message, finish_of(parser, reason)


def with_call_id(delta: Delta, reading: Reading) -> Delta:
    """The delta; the start of a call has an id, a new one if the model gave it none."""
    return replace(delta, id=reading.new_call_id()) if isinstance(delta, CallStart) and not delta.id else delta


def chat_delta(delta: Delta, reading: Reading) -> ChatDelta:
    """A delta in the form of a stream's events."""
    if isinstance(delta, Content):  # `match` takes several times as long, for every token
        return ChatDelta(content=delta.text)
    match delta:
        case Reasoning(text):
            return ChatDelta(reasoning_content=text)
        case CallStart(index, name, call_id):
            function = FunctionDelta(name=name, arguments="")
            call = ToolCallDelta(index=index, id=call_id or reading.new_call_id(), type="function", function=function)
            return ChatDelta(tool_calls=[call])
        case CallArguments(index, text):
            return ChatDelta(tool_calls=[ToolCallDelta(index=index, function=FunctionDelta(arguments=text))])


def message_of(deltas: list[Delta], reading: Reading) -> ChatMessage:
    """The assistant's message from all its deltas."""
    content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        if isinstance(delta, CallArguments):
            arguments.setdefault(delta.index, []).append(delta.text)
    calls = [
        ChatToolCall(
            id=delta.id or reading.new_call_id(),
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
