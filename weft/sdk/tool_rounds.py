"""Rounds of an agent: the model writes, calls of tools in it are carried out, and it goes on in the same KV.

A call is known as soon as its last character is written, while the model may still be writing the next: so it can be
carried out meanwhile. Which form calls have is the model's (`Model.tool_call_parser`), or what `parser` says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

from weft.abi.errors import InvalidRequest, LimitExceeded, Unsupported
from weft.sdk.generation import thinks
from weft.sdk.model import own_model
from weft.sdk.sampling import Sampler
from weft.sdk.toolbox import ToolCall, execute
from weft.text.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from weft.text.reasoning import ReasoningParser
from weft.text.tool_calls import PARSERS

if TYPE_CHECKING:
    from weft.sdk.context import Context


class AnswerParser:
    """One answer, taken apart while it arrives: reasoning, content, and calls of tools."""

    def __init__(self, form: str, *, reasoning: bool, opened: bool = False, first_id: int = 0):
        if form not in PARSERS:
            raise Unsupported(f"there is no parser {form} for calls of tools; there are {', '.join(PARSERS)}", "parser")
        self.content = ""
        self.reasoning = ""
        self.calls: list[ToolCall] = []
        """Complete ones."""
        self._reasoning = ReasoningParser(opened=opened) if reasoning or opened else None
        self._parser = PARSERS[form]()
        self._first_id = first_id
        self._id = ""
        self._name: str | None = None
        self._text = ""

    def push(self, text: str) -> list[ToolCall]:
        """Calls that are complete with the next piece of text."""
        return self._take(self._answers([Content(text)] if self._reasoning is None else self._reasoning.push(text)))

    def finish(self) -> list[ToolCall]:
        """Calls that are there once the text has ended; one that was cut off among them."""
        rest = [] if self._reasoning is None else self._reasoning.finish()
        calls = self._take([*self._answers(rest), *self._parser.finish()])
        return [*calls, *self._complete()]

    def message(self) -> dict[str, Any]:
        """The answer as a message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content.strip() or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.to_json() for call in self.calls]
        else:
            message["content"] = self.content
        return message

    def _answers(self, deltas: Iterable[Delta]) -> list[Delta]:
        """What the parser of calls makes of the text behind the reasoning."""
        found: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, Reasoning):
                self.reasoning += delta.text
            elif isinstance(delta, Content):
                found += self._parser.push(delta.text)
        return found

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
        return calls

    def _complete(self) -> list[ToolCall]:
        """The call that is arriving, as it is."""
        if self._name is None:
            return []
        # Where the model gives none, nine letters and digits: some templates take nothing else.
        number = self._id or f"call{self._first_id + len(self.calls):05d}"
        call = ToolCall(number, self._name, self._text)
        self.calls.append(call)
        self._name = None
        return [call]


async def tool_calls(
    ctx: Context, max_rounds: int, sampler: Sampler | None, max_tokens: int | None, parser: str | None
) -> AsyncIterator[ToolCall]:
    """See `Context.tool_calls`. Raises `Unsupported` for a model that writes no calls, `InvalidRequest` for a call that
    was left without a result, and `LimitExceeded` if the model still calls after `max_rounds` rounds."""
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
    ctx: Context, max_rounds: int, sampler: Sampler | None, *, max_tokens: int | None, parser: str | None
) -> str:
    """See `Context.run_tools`."""
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
    ctx: Context, sampler: Sampler | None, max_tokens: int | None, parser: str | None
) -> AsyncIterator[ToolCall]:
    """The calls of one answer, each as soon as it is complete. Afterwards the answer is the chat's last message."""
    model = await own_model()
    form = parser or model.tool_call_parser
    if form is None:
        raise Unsupported(
            f"the model {model.name} was not trained to call tools; name a form with parser= to try", "parser"
        )
    await ctx.flush(cue=True)
    if not ctx.chat.messages:
        raise InvalidRequest("calls of tools need a chat; add a message with user or system first", "messages")
    opened = thinks(ctx.chat.text)
    answer = AnswerParser(form, reasoning=model.reasoning, opened=opened, first_id=ctx.num_calls)
    async for piece in ctx.generate(sampler, max_tokens=max_tokens, special=True):
        for call in answer.push(piece):
            ctx.unanswered[call.id] = call
            yield call
    for call in answer.finish():
        ctx.unanswered[call.id] = call
        yield call
    _note(ctx, answer)


def _note(ctx: Context, answer: AnswerParser) -> None:
    """Make the model's last message, which the context knows as text, one with calls."""
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
