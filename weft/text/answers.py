"""Incremental parser of chat answers: separates reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Collection

from weft.text.deltas import CallArguments, CallStart, Content, Delta, joined
from weft.text.reasoning import ReasoningParser
from weft.text.tool_calls import PARSERS, ToolCallParser


class AnswerParser:
    """Splits one answer into deltas.

    `form` is the format of calls, a key of `PARSERS`, or None: calls are content. `reasoning`: the answer may
    begin with reasoning; `opened` and `begun` are those of `ReasoningParser`, `names` and `hold` those of
    `ToolCallParser`. With `only_one`, calls after the first are dropped.
    """

    def __init__(
        self,
        form: str | None,
        *,
        reasoning: bool,
        opened: bool = False,
        begun: bool = False,
        names: Collection[str] | None = None,
        hold: bool = False,
        only_one: bool = False,
    ):
        self._reasoning = ReasoningParser(opened=opened, begun=begun) if reasoning else None
        self._calls: ToolCallParser | None = None if form is None else PARSERS[form](names, hold=hold)
        self._only_one = only_one
        self.num_calls = 0
        """Calls so far, including the incomplete one and dropped ones."""

    @property
    def num_complete_calls(self) -> int:
        """Calls whose arguments have ended."""
        return 0 if self._calls is None else self._calls.num_complete

    def push(self, text: str) -> list[Delta]:
        """Process the next piece of text. Returns the deltas that are final."""
        if self._reasoning is None and self._calls is None:
            return [Content(text)] if text else []  # the common case, for every token
        deltas: list[Delta] = [Content(text)] if self._reasoning is None else self._reasoning.push(text)
        return joined(self._read(deltas))

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """Process the end of the text. Returns the deltas that were held back.

        An incomplete call is content if calls are held back, unless it was `cut` by the token limit: then it is
        returned as far as it came.
        """
        deltas = self._read([] if self._reasoning is None else self._reasoning.finish())
        if self._calls is not None:
            deltas += self._kept(self._calls.finish(cut=cut))
        return joined(deltas)

    def _read(self, deltas: list[Delta]) -> list[Delta]:
        """Parse tool calls in content."""
        if self._calls is None:
            return deltas
        result: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, Content):
                result += self._kept(self._calls.push(delta.text))
            else:
                result.append(delta)
        return result

    def _kept(self, deltas: list[Delta]) -> list[Delta]:
        self.num_calls += sum(isinstance(delta, CallStart) for delta in deltas)
        if not self._only_one:
            return deltas
        return [delta for delta in deltas if not isinstance(delta, CallStart | CallArguments) or delta.index == 0]
