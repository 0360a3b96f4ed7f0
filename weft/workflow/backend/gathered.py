"""The pieces of a streamed answer, put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.abi.errors import EngineDead
from weft.workflow.actuals import CallUsage
from weft.workflow.run.calls import ModelAnswer


class GatheredAnswer:
    """One answer, from the events of its stream."""

    def __init__(self, *, is_chat: bool):
        self._is_chat = is_chat
        self._text: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish_reason = ""
        self._usage = CallUsage()

    def add(self, chunk: Mapping[str, Any]) -> str:
        """Take in one event of the stream. Returns the text that it adds."""
        used = chunk.get("usage")
        if used:
            self._usage = usage_of(used)
        added = ""
        for choice in chunk.get("choices") or ():
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            delta = choice.get("delta") or {}
            added += (delta.get("content") if self._is_chat else choice.get("text")) or ""
            for call in delta.get("tool_calls") or ():
                self._add_call(call)
        self._text.append(added)
        return added

    def _add_call(self, piece: Mapping[str, Any]) -> None:
        function = piece.get("function") or {}
        call = self._calls.setdefault(
            piece["index"], {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = piece.get("id") or call["id"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""

    def answer(self) -> ModelAnswer:
        """The whole. Raises `EngineDead` for a stream that was cut."""
        if not self._finish_reason:
            raise EngineDead("the answer ended before it was complete")
        calls = tuple(self._calls[index] for index in sorted(self._calls))
        return ModelAnswer("".join(self._text), self._finish_reason, calls, self._usage)


def usage_of(used: Mapping[str, Any]) -> CallUsage:
    """The tokens of a call, from `usage` of an answer. Servers of others do not tell all of them: what is not known to
    be cached counts as computed."""
    details = used.get("prompt_tokens_details") or {}
    prompt, cached = used.get("prompt_tokens") or 0, details.get("cached_tokens") or 0
    continued = details.get("continued_tokens") or 0
    return CallUsage(prompt, cached, used.get("completion_tokens") or 0, continued, max(prompt - cached, 0))
