"""The form of a chat's answers and how they are parsed, from the tools, formats and reasoning of a request together.

The server's chat endpoint and the offline API both use it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from weft.abi.errors import InvalidRequest
from weft.core.grammar import Grammar
from weft.endpoints.answers import FirstCall, Reading
from weft.endpoints.constraints import Constraint, constraint_of
from weft.endpoints.dialect import Dialect
from weft.endpoints.grammars import answer_grammar, triggered_grammar
from weft.endpoints.schemas.chat import ChatRequest
from weft.endpoints.tools import ToolPlan, tool_plan


class AnswerForm(NamedTuple):
    """How the answers to one prompt are generated and parsed."""

    reading: Reading
    grammar: Grammar | None
    until: Callable[[], Callable[[str], bool]] | None
    """The value of `CompletionArgs.until`: ends a choice with its first call."""
    shows_special: bool
    """Whether the text must keep special tokens, which mark reasoning or calls."""


class AnswerPlan(NamedTuple):
    """The requirements of a request on its answers, before its prompt is known."""

    body: ChatRequest
    dialect: Dialect
    tools: ToolPlan
    constraint: Constraint | None

    @property
    def param(self) -> str:
        """The request's field that errors about the grammar name."""
        return "tools" if self.constraint is None else self.constraint.param

    def form(self, *, opened: bool, begun: bool) -> AnswerForm:
        """The form of the answers to a prompt. `opened`: the prompt ends inside the model's reasoning; `begun`: behind
        a part of its text."""
        reading = replace(self._reading(opened), reasoning_begun=begun)
        return AnswerForm(
            reading,
            self._grammar(opened),
            functools.partial(FirstCall, reading) if self.tools.ends_with_a_call else None,
            self.dialect.hides(calls=reading.calls),
        )

    def _grammar(self, opened: bool) -> Grammar | None:
        calls = self.tools.calls
        if calls is not None and self.tools.choice == "auto" and self.constraint is None:
            return triggered_grammar(self.dialect, calls, reasoning_opened=opened)
        return answer_grammar(self.dialect, calls, self.constraint, reasoning_opened=opened)

    def _reading(self, opened: bool) -> Reading:
        body, calls = self.body, self.tools.calls
        if calls is None:
            return Reading(self.dialect, False, False, opened)
        # Llama's calls may begin without the marker that triggers a grammar; beam search follows no grammar.
        is_held = self.tools.choice == "required" or not (
            self.dialect.tool_form == "llama3_json" or body.use_beam_search
        )
        return Reading(
            self.dialect,
            True,
            calls.only_one,
            opened,
            names=frozenset(tool.name for tool in calls.tools),
            hold=bool(body.stop or body.stop_token_ids) or not is_held,
        )


def answer_plan(body: ChatRequest, dialect: Dialect) -> AnswerPlan:
    """Check the tools and formats of a request. Raises `InvalidRequest` and `Unsupported`, naming the field."""
    constraint = constraint_of(body)
    tools = tool_plan(body, dialect)
    if tools.choice == "required":
        # The constraint applies to content, and this answer is a call.
        constraint = None
        if body.use_beam_search:
            raise InvalidRequest(
                "tool_choice requires a call, which use_beam_search cannot enforce; leave one of them out.",
                "tool_choice",
            )
    return AnswerPlan(body, dialect, tools, constraint)
