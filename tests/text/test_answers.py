"""Complete answers are split into reasoning, content and tool calls."""

from __future__ import annotations

import pytest

from weft.text.answers import AnswerParser
from weft.text.deltas import CallArguments, CallStart, Content, Delta, Reasoning, joined

CALL = '<tool_call>{"name": "%s", "arguments": {"a": 1}}</tool_call>'


def told(parser: AnswerParser, text: str, size: int, *, cut: bool = False) -> list[Delta]:
    deltas: list[Delta] = []
    for start in range(0, len(text), size):
        deltas += parser.push(text[start : start + size])
    return joined([*deltas, *parser.finish(cut=cut)])


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_parts_do_not_depend_on_how_the_text_is_cut(size: int) -> None:
    parser = AnswerParser("hermes", reasoning=True, hold=True)
    text = "<think>\nlet me see</think>\n\nfirst\n" + CALL % "f" + "\n" + CALL % "g"
    assert told(parser, text, size) == [
        Reasoning("let me see"),
        Content("first\n"),
        CallStart(0, "f"),
        CallArguments(0, '{"a": 1}'),
        CallStart(1, "g"),
        CallArguments(1, '{"a": 1}'),
    ]
    assert (parser.num_calls, parser.num_complete_calls) == (2, 2)


def test_without_a_form_calls_are_content() -> None:
    parser = AnswerParser(None, reasoning=False)
    text = "<think>x</think>" + CALL % "f"
    assert told(parser, text, 5) == [Content(text)]
    assert (parser.num_calls, parser.num_complete_calls) == (0, 0)


def test_calls_after_the_only_one_are_dropped_and_counted() -> None:
    parser = AnswerParser("hermes", reasoning=False, only_one=True)
    deltas = told(parser, CALL % "f" + CALL % "g", 7)
    assert deltas == [CallStart(0, "f"), CallArguments(0, '{"a": 1}')]
    assert parser.num_calls == 2


def test_a_call_is_complete_with_its_end() -> None:
    parser = AnswerParser("hermes", reasoning=False)
    text = CALL % "f"
    begun, ended = parser.push(text[:-1]), parser.num_complete_calls
    assert joined(begun) == [CallStart(0, "f"), CallArguments(0, '{"a": 1}')]
    assert (parser.num_calls, ended) == (1, 0)
    parser.push(text[-1])
    assert (parser.num_calls, parser.num_complete_calls) == (1, 1)


def test_a_call_of_another_name_is_content() -> None:
    parser = AnswerParser("hermes", reasoning=False, names=["f"])
    assert told(parser, CALL % "g", 6) == [Content(CALL % "g")]
    assert parser.num_calls == 0


def test_reasoning_that_the_prompt_opened_and_nothing_closed() -> None:
    # The last characters could have begun the closing tag.
    text = "still thinking </thi"
    assert told(AnswerParser("hermes", reasoning=True, opened=True), text, 4) == [Reasoning(text)]


@pytest.mark.parametrize("cut", [True, False])
def test_a_held_call_that_is_not_complete_is_told_only_where_the_length_cut_it(cut: bool) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": '
    deltas = told(AnswerParser("hermes", reasoning=False, hold=True), text, 6, cut=cut)
    assert deltas == ([CallStart(0, "f"), CallArguments(0, '{"a": ')] if cut else [Content(text)])
