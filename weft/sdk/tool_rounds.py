"""The rounds of an agent: the model generates, its tool calls are run, and it continues in the same KV.

A call is complete with its last character, while the model may still be generating the next one, so it can run
meanwhile. The form of calls is the model's (`Model.tool_call_parser`), or the argument `parser`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

from weft.abi.errors import InvalidRequest, LimitExceeded, Unsupported
from weft.sdk.chat import Chat
from weft.sdk.generation import Generation
from weft.sdk.model import own_model
from weft.sdk.sampling import Sampler
from weft.sdk.toolbox import Tool, ToolCall, execute
from weft.text.answers import AnswerParser
from weft.text.deltas import CallArguments, CallStart, Content, Delta
from weft.text.reasoning import is_open
from weft.text.tool_calls import PARSERS


class ToolHost(Protocol):
    """The members of a context that its rounds use."""

    chat: Chat
    runnable_tools: list[Tool]
    unanswered: dict[str, ToolCall]
    num_calls: int

    @property
    def last_text(self) -> str:
        """The last generated text, without its reasoning."""

    async def flush(self, *, add_generation_prompt: bool = False) -> None:
        """Append the queued input to the sequence."""

    def generate(self, sampler: Sampler | None, *, max_tokens: int | None, special: bool) -> Generation:
        """Generate with this sampler, or with the context's own."""

    def expect(self, kind: str, seconds: float | None = None) -> None:
        """Say what the program waits for before it goes on."""

    def tool(self, call: ToolCall, result: object) -> ToolHost:
        """Add the result of a call."""


class AnswerCalls:
    """Parses one answer as it arrives: its content, its reasoning, and each call as soon as it is complete."""

    def __init__(self, form: str, *, reasoning: bool, opened: bool = False, first_id: int = 0):
        if form not in PARSERS:
            raise Unsupported(f"there is no parser {form} for calls of tools; there are {', '.join(PARSERS)}", "parser")
        self.content = ""
        self.reasoning = ""
        self.calls: list[ToolCall] = []
        """The calls that are complete so far."""
        self._parser = AnswerParser(form, reasoning=reasoning or opened, opened=opened)
        self._first_id = first_id
        self._id = ""
        self._name: str | None = None
        self._text = ""

    def push(self, text: str) -> list[ToolCall]:
        """Parse the next piece of text. Returns the calls that it completes."""
        return self._take(self._parser.push(text))

    def finish(self) -> list[ToolCall]:
        """Parse the end of the text. Returns the remaining calls, including a call that was cut off."""
        return [*self._take(self._parser.finish()), *self._complete()]

    def message(self) -> dict[str, Any]:
        """The answer as a message of the chat."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content.strip() or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.to_json() for call in self.calls]
        else:
            message["content"] = self.content
        return message

    def _take(self, deltas: Iterable[Delta]) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for delta in deltas:
            if isinstance(delta, CallStart):
                calls += self._complete()
                self._name, self._text, self._id = delta.name, "", delta.id
            elif isinstance(delta, CallArguments):
                self._text += delta.text
                if self._name is not None and _is_whole(self._text):
                    calls += self._complete()
            elif isinstance(delta, Content):
                self.content += delta.text
            else:
                self.reasoning += delta.text
        return calls

    def _complete(self) -> list[ToolCall]:
        """End the call that is arriving, with the arguments so far."""
        if self._name is None:
            return []
        # If the model gives no id, the id has nine letters and digits: some templates accept nothing else.
        number = self._id or f"call{self._first_id + len(self.calls):05d}"
        call = ToolCall(number, self._name, self._text)
        self.calls.append(call)
        self._name = None
        return [call]


async def tool_calls(
    ctx: ToolHost, max_rounds: int, sampler: Sampler | None, max_tokens: int | None, parser: str | None
) -> AsyncIterator[ToolCall]:
    """The implementation of `Context.tool_calls`; raises what it documents."""
    for _ in range(max_rounds):
        called = False
        async for call in _one_round(ctx, sampler, max_tokens, parser):
            called = True
            yield call
        if not called:
            return
        if ctx.unanswered:
            missing = ", ".join(call.name for call in ctx.unanswered.values())
            raise InvalidRequest(f"calls have no result yet: {missing}; give each one with ctx.tool(call, result)")
    raise LimitExceeded(f"the model still calls tools after {max_rounds} rounds; allow more", "max_rounds")


async def run_tools(
    ctx: ToolHost, max_rounds: int, sampler: Sampler | None, *, max_tokens: int | None, parser: str | None
) -> str:
    """The implementation of `Context.run_tools`: runs each tool as soon as its call is complete."""
    for _ in range(max_rounds):
        tasks: list[tuple[ToolCall, asyncio.Task[str]]] = []
        try:
            async for call in _one_round(ctx, sampler, max_tokens, parser):
                tasks.append((call, asyncio.ensure_future(execute(call, ctx.runnable_tools))))
            for call, task in tasks:
                ctx.tool(call, await task)
        finally:
            for _, task in tasks:
                task.cancel()
        if not tasks:
            return ctx.last_text
    raise LimitExceeded(f"the model still calls tools after {max_rounds} rounds; allow more", "max_rounds")


async def _one_round(
    ctx: ToolHost, sampler: Sampler | None, max_tokens: int | None, parser: str | None
) -> AsyncIterator[ToolCall]:
    """The calls of one answer, each as soon as it is complete. At the end the answer is the chat's last message."""
    model = await own_model()
    form = parser or model.tool_call_parser
    if form is None:
        raise Unsupported(
            f"the model {model.name} was not trained to call tools; name a form with parser= to try", "parser"
        )
    await ctx.flush(add_generation_prompt=True)
    if not ctx.chat.messages:
        raise InvalidRequest("calls of tools need a chat; add a message with user or system first", "messages")
    opened = is_open(ctx.chat.text or "")
    answer = AnswerCalls(form, reasoning=model.reasoning, opened=opened, first_id=ctx.num_calls)
    async for piece in ctx.generate(sampler, max_tokens=max_tokens, special=True):
        for call in answer.push(piece):
            ctx.unanswered[call.id] = call
            ctx.expect("tool")
            yield call
    for call in answer.finish():
        ctx.unanswered[call.id] = call
        ctx.expect("tool")
        yield call
    _note(ctx, answer)


def _note(ctx: ToolHost, answer: AnswerCalls) -> None:
    """Replace the model's last message, which the context holds as text, by one with its calls."""
    ctx.num_calls += len(answer.calls)
    if not answer.calls:
        return
    if ctx.chat.turn is not None:
        ctx.chat.end_turn(answer.message())
    elif ctx.chat.messages:
        ctx.chat.messages[-1] = answer.message()


def _is_whole(text: str) -> bool:
    if not text.rstrip().endswith("}"):
        return False
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
