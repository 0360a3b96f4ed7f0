"""Calls of models: the request that a node makes of its values, and the value that an answer becomes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from weft.abi.errors import InvalidRequest
from weft.workflow.actuals import CallTrace, CallUsage
from weft.workflow.graph.nodes import LlmNode
from weft.workflow.graph.values import AnswerValue, RowError, ValueOf, answer_content, chat_messages, fill
from weft.workflow.planner.ranks import NextTurn

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
COMPLETION: Literal["/v1/completions"] = "/v1/completions"


class PromptFound(NamedTuple):
    """What is known of a call when the model begins with it; None: nothing."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    continued_tokens: int | None = None


class CallBound(NamedTuple):
    """The most tokens that a call may use."""

    prompt_tokens: int
    output_tokens: int | None
    """None: nothing bounds the answer."""


class CallTimes(NamedTuple):
    """When a call was sent, begun and answered, in seconds since 1970; all 0 for an answer of an earlier call."""

    sent_s: float = 0.0
    started_s: float = 0.0
    ended_s: float = 0.0


class ModelAnswer(NamedTuple):
    """A model's answer to a call: text, reason of its end, tool calls and tokens used."""

    text: str
    finish_reason: str = "stop"
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    usage: CallUsage = CallUsage()
    is_cached: bool = False
    """Whether it is that of an equal earlier request."""
    times: CallTimes = CallTimes()

    @property
    def again(self) -> ModelAnswer:
        """The answer to a later, equal request, which costs nothing."""
        return self._replace(usage=CallUsage(), is_cached=True, times=CallTimes())


class AnswerRefused(RowError):
    """A model has answered, and used tokens, but the answer cannot be taken."""

    def __init__(self, message: str, answer: ModelAnswer):
        super().__init__(message)
        self.answer = answer


class EveryCallRefused(InvalidRequest):
    """The server of models refuses each call alike: its key is missing, it does not serve the run's model, or calls
    name no model where it has several."""


class CallAdvice(NamedTuple):
    """What the plan knows of a call and no field of a request says. It changes nothing of the answer."""

    replica: int | None = None
    """The engine that the plan has for it, among those of its model; None: any."""
    next_turn: NextTurn | None = None
    """What goes on from its KV; None: not known."""


class ModelRequest(NamedTuple):
    """A body, and the endpoint of OpenAI's API that takes it."""

    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]
    hints: Mapping[str, Any] = {}
    """Further fields, which say when and where the call is to run and change nothing of its answer. Only a server of
    ours knows them."""
    advice: CallAdvice = CallAdvice()
    """For models of this process."""

    @property
    def key(self) -> str | None:
        """Equal for requests that have the same answer; None for one that is drawn anew each time: only greedy
        sampling that the request itself asks for, or a seed, gives an answer twice."""
        if self.body.get("temperature") != 0 and self.body.get("seed") is None:
            return None
        return hashlib.sha256(msgspec.json.encode((self.endpoint, self.body), order="deterministic")).hexdigest()

    @property
    def hinted(self) -> dict[str, Any]:
        """The body with the hints, which give way to fields of the call's own; a deadline is part of an objective."""
        given = {**self.hints, **self.body}
        if "objective" in self.body and "deadline_s" not in self.body:
            given.pop("deadline_s", None)
        return given


def request_of(node: LlmNode, value_of: ValueOf) -> ModelRequest:
    """The request of a node, its references replaced. Raises `RowError`."""
    if node.prompt is not None:
        return request_with({"prompt": fill(node.prompt, value_of), **node.request}, node.schema)
    return request_with({"messages": list(chat_messages(node, value_of)), **node.request}, node.schema)


def request_with(fields: Mapping[str, Any], schema: Mapping[str, Any] | None) -> ModelRequest:
    """The request of a prompt or of messages, with its other fields, for an answer of this form."""
    body = dict(fields)
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return ModelRequest(COMPLETION if "prompt" in body else CHAT, body)


def value_of_answer(node: LlmNode, request: ModelRequest, answer: ModelAnswer) -> AnswerValue:
    """The value of a node whose call ended. Raises `RowError` where the text has not the form of its schema."""
    try:
        value = answer_content(node, answer.text)
    except RowError as error:
        if answer.finish_reason != "length":
            raise
        raise RowError(f"{error.message}; it was cut at max_tokens", node.id) from None
    offered = bool(node.request.get("tools"))
    if request.endpoint == COMPLETION:
        return AnswerValue(value=value)
    said: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.tool_calls:
        said["tool_calls"] = list(answer.tool_calls)
    return AnswerValue(
        value=value,
        messages=(*request.body["messages"], said),
        tool_calls=answer.tool_calls if offered else None,
    )


def trace_of(path: str, node: str, answer: ModelAnswer) -> CallTrace:
    """What is kept of an answer."""
    used, times = answer.usage, answer.times
    return CallTrace(
        path,
        node,
        used.prompt_tokens,
        used.cached_tokens,
        used.continued_tokens,
        used.prefill_tokens,
        used.output_tokens,
        *times,
    )
