from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.help import content, cut, parsed, reasoning
from weft.text.deltas import Content, Reasoning
from weft.text.reasoning import ReasoningParser, is_unfinished

PIECES = ("<think>", "</think>", "<", "</", "think>", " ", "\n", "x")
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=10).map("".join)
places = st.lists(st.integers(0, 200), max_size=8)


@given(text=texts, at=places, opened=st.booleans())
def test_however_a_text_is_cut_it_is_the_same(text: str, at: list[int], opened: bool) -> None:
    whole = parsed(ReasoningParser(opened=opened), [text])
    assert parsed(ReasoningParser(opened=opened), cut(text, at)) == whole
    assert parsed(ReasoningParser(opened=opened), text) == whole


@given(text=texts)
def test_text_that_does_not_begin_with_the_tag_is_content(text: str) -> None:
    if not text.lstrip().startswith("<think>"):
        assert content(parsed(ReasoningParser(), text)) == text


@given(thought=st.text(), answer=st.text(), opened=st.booleans())
def test_both_come_out(thought: str, answer: str, opened: bool) -> None:
    thought = thought.replace("</think>", "")
    text = ("" if opened else "<think>\n") + thought + "\n</think>\n\n" + answer
    deltas = parsed(ReasoningParser(opened=opened), text)
    assert (reasoning(deltas), content(deltas)) == (thought.strip(), answer.lstrip())


@pytest.mark.parametrize(
    ("text", "opened", "deltas"),
    [
        ("<think>unfinished", False, [Reasoning("unfinished")]),
        ("unfinished </thi", True, [Reasoning("unfinished </thi")]),
        ("<think>\n\n</think>\n\nHi", False, [Content("Hi")]),
        ("<think>a</think>b<think>c</think>", False, [Reasoning("a"), Content("b<think>c</think>")]),
        ("Hi </think>", False, [Content("Hi </think>")]),
    ],
)
def test_examples(text: str, opened: bool, deltas: list) -> None:
    assert parsed(ReasoningParser(opened=opened), text) == deltas


def test_it_streams() -> None:
    parser = ReasoningParser()
    assert parser.push("<think>\nfirst ") == [Reasoning("first")]
    assert parser.push("second") == [Reasoning(" second")]
    assert parser.push("\n</th") == []
    assert parser.push("ink>\n\n") == []
    assert parser.push("Hi ") == [Content("Hi ")]


def test_reasoning_that_has_begun_keeps_its_first_white_space() -> None:
    text = " think\n</think>\n\nHi"
    assert parsed(ReasoningParser(opened=True, begun=True), text) == [Reasoning(" think"), Content("Hi")]
    assert parsed(ReasoningParser(opened=True), text) == [Reasoning("think"), Content("Hi")]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("<think>\nLet me", True),
        ("<think>", True),
        ("<think>a</think>b<think>c", True),
        ("<think>a</think>", False),
        ("a</think>b", False),
        ("", False),
    ],
)
def test_a_message_may_end_inside_reasoning(message: str, expected: bool) -> None:
    assert is_unfinished(message) is expected
