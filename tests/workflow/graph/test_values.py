from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workflow.shapes import graph
from weft.workflow.graph import InvalidGraph, Reference, graph_from_dict
from weft.workflow.graph.nodes import (
    Body,
    FunctionNode,
    LlmNode,
    LoopNode,
    MapNode,
    PickNode,
    PromptMessage,
    SwitchNode,
)
from weft.workflow.graph.values import (
    MAX_NESTING,
    MAX_VALUE_CHARS,
    AnswerValue,
    RowError,
    answer_content,
    case_of,
    chat_messages,
    check_items,
    fill,
    fill_values,
    is_last_round,
    is_too_deep,
    items_of,
    join,
    list_of,
    pick,
    plain,
    split_ranges,
    text_of,
    value_at,
)
from weft.workflow.run.functions import checked_value

SAID = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"})
ANSWER = AnswerValue(value="Ho", messages=SAID)
VERDICT = AnswerValue(value={"winner": "pro", "ü": [1.5]}, messages=SAID, tool_calls=({"id": "1"},))
FUNCTION = FunctionNode(id="f", name="join")
EMPTY = Body(nodes=(), outputs={})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x {{y}}", "x {{y}}"),
        (True, "true"),
        (None, "null"),
        (3, "3"),
        (1.0, "1.0"),
        ([1, "ä"], '[1,"ä"]'),
        (ANSWER, "Ho"),
        (VERDICT, '{"winner":"pro","ü":[1.5]}'),
        ({"all": [ANSWER]}, '{"all":["Ho"]}'),
    ],
)
def test_a_value_as_text(value: Any, text: str) -> None:
    assert text_of(value) == text
    assert fill("{{a}}/{{a}}", lambda reference: value) == f"{text}/{text}"


def test_what_is_no_json_cannot_be_text() -> None:
    with pytest.raises(RowError, match="cannot be written as text"):
        text_of([object()])


def test_a_template_that_is_one_reference_passes_the_value_on() -> None:
    def value_of(reference: Reference) -> Any:
        return {"a": ANSWER, "b": [1]}[reference.name]

    given = {"x": ["{{a}}", "{{b}}", "{{a}} {{b}}"], "y": 3}
    assert fill_values(given, value_of) == {"x": [ANSWER, [1], "Ho [1]"], "y": 3}
    assert plain(fill_values(given, value_of)) == {"x": ["Ho", [1], "Ho [1]"], "y": 3}


def test_a_reference_leads_through_fields() -> None:
    outputs = {"value": VERDICT}
    assert value_at(outputs, Reference("n", ("value",))) is VERDICT
    assert value_at(outputs, Reference("n", ("value", "winner"))) == "pro"
    assert value_at(VERDICT, Reference("n", ("tool_calls",))) == [{"id": "1"}]
    with pytest.raises(RowError, match=r"n.winner.x: the text 'pro' has no field 'x'"):
        value_at(VERDICT, Reference("n", ("winner", "x")))
    with pytest.raises(RowError, match="has no field 'tool_calls'"):
        value_at(ANSWER, Reference("n", ("tool_calls",)))


def picked(value: Any, **way: Any) -> Any:
    return pick(PickNode(id="p", of="v", **way), value)


@pytest.mark.parametrize(
    ("value", "way", "expected"),
    [
        ({"k": 1}, {"field": "k"}, 1),
        (["a", "b"], {"field": "-1"}, "b"),
        ('[{"k": 2}]', {"field": "0"}, {"k": 2}),
        (AnswerValue(value='{"k": 3}'), {"field": "k"}, 3),
        (VERDICT, {"field": "winner"}, "pro"),
        (VERDICT, {"field": "tool_calls"}, [{"id": "1"}]),
        ("a1b2", {"regex": "[0-9]"}, "1"),
        ("a1b2", {"regex": "b([0-9])"}, "2"),
        ("a1b2", {"matches": "b."}, True),
        ("a1b2", {"matches": "^b"}, False),
        (" a\n", {"strip": True}, "a"),
        ("a, b", {"split": ", "}, ["a", "b"]),
        ("abcd", {"slice": (1, -1)}, "bc"),
        ([1, 2, 3], {"slice": (None, 2)}, [1, 2]),
        ([ANSWER, VERDICT], {"slice": (0, 1)}, [ANSWER]),
        ([1, 2], {"slice": (0, 1), "max_items": 2}, [1]),
        ([ANSWER, VERDICT], {"field": "0"}, ANSWER),
        (ANSWER, {"slice": (1, None)}, "o"),
    ],
)
def test_parts_and_forms(value: Any, way: dict[str, Any], expected: Any) -> None:
    assert picked(value, **way) == expected


@pytest.mark.parametrize(
    ("value", "way", "message"),
    [
        ({"k": 1}, {"field": "j"}, "p: the object {'k': 1} has no field 'j'"),
        (["a"], {"field": "1"}, "p: the list ['a'] has no field '1'"),
        (["a"], {"field": "9" * 5000}, "has no field"),
        ("3", {"field": "k"}, "p: the number 3 has no field 'k'"),
        ("no", {"field": "k"}, "p: the text 'no' is not JSON"),
        ("[" * 200_000, {"field": "k"}, "is not JSON"),
        ("abc", {"regex": "x"}, "p: 'x' is not found in the text 'abc'"),
        ("b", {"regex": "(a)|b"}, "p: '(a)|b' is not found in the text 'b'"),
        (3, {"matches": "3"}, "p: takes a text, and this is the number 3"),
        (VERDICT, {"strip": True}, "takes a text, and this is the object"),
        ([1, 2, 3], {"slice": (0, 1), "max_items": 2}, "p: the list has 3 items, and max_items is 2"),
        (None, {"slice": (0, 1)}, "takes a slice of a text or a list, and this is the value None"),
        ("x" * 1000, {"regex": "y"}, "is not found in the text 'xxxxx"),
    ],
)
def test_what_has_no_such_part(value: Any, way: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError) as caught:
        picked(value, **way)
    assert message in str(caught.value)
    assert caught.value.node == "p"
    assert len(str(caught.value)) < 200 + len(way.get("field", ""))


def test_a_conversation_goes_on() -> None:
    node = LlmNode(
        id="a",
        messages=(PromptMessage(chat="b"), PromptMessage(role="tool", content="{{c}}", tool_call_id="1")),
    )
    messages = chat_messages(node, lambda reference: {"b": ANSWER, "c": 3}[reference.name])
    assert messages == (*SAID, {"role": "tool", "content": "3", "tool_call_id": "1"})
    with pytest.raises(RowError, match="a: b is the text 'x', not the answer of a model"):
        chat_messages(node, lambda reference: "x")


def test_an_answer_with_a_schema_is_json() -> None:
    assert answer_content(LlmNode(id="a", prompt=""), '{"k": 1}') == '{"k": 1}'
    assert answer_content(LlmNode(id="a", prompt="", schema={}), '{"k": 1}') == {"k": 1}
    with pytest.raises(RowError, match=r"a: the text .\{. is not JSON"):
        answer_content(LlmNode(id="a", prompt="", schema={}), "{")


def test_join_takes_a_list() -> None:
    assert join(["a", 1, ANSWER], "; ", FUNCTION) == "a; 1; Ho"
    with pytest.raises(RowError, match="f: takes a list"):
        join("abc", "; ", FUNCTION)


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 8))
def test_split_covers_a_text(num_tokens: int, size: int, overlap: int) -> None:
    args = {"max_tokens": size, "overlap_tokens": overlap}
    if overlap >= size:
        with pytest.raises(RowError, match="leaves nothing"):
            split_ranges(args, range(num_tokens + 1), FUNCTION)
        return
    parts = split_ranges(args, range(num_tokens + 1), FUNCTION)
    assert all(0 < end - start <= size for start, end in parts)
    assert [start for start, _ in parts[1:]] == [end - overlap for _, end in parts[:-1]]
    assert ([parts[0][0], parts[-1][1]] if parts else [0, 0]) == [0, num_tokens]


@pytest.mark.parametrize("args", [{"max_tokens": 0}, {"max_tokens": "3"}, {"max_tokens": 3, "overlap_tokens": -1}])
def test_sizes_of_parts_are_numbers(args: dict[str, Any]) -> None:
    with pytest.raises(RowError, match="not an integer of"):
        split_ranges(args, range(11), FUNCTION)


@given(st.text("a🙂é日", max_size=12), st.lists(st.integers(1, 5), max_size=60), st.integers(1, 6), st.integers(0, 5))
def test_split_takes_whole_characters(text: str, lengths: list[int], size: int, overlap: int) -> None:
    """Tokens of any lengths in bytes, which begin and end within characters."""
    overlap = min(overlap, size - 1)
    whole = text.encode()
    ends = [0, *itertools.takewhile(lambda end: end < len(whole), itertools.accumulate(lengths))]
    ends += [len(whole)] if whole else []
    cuts = [len(text[:at].encode()) for at in range(len(text) + 1)]

    def num_tokens(start: int, end: int) -> int:
        return sum(max(first, start) < min(last, end) for first, last in itertools.pairwise(ends))

    args = {"max_tokens": size, "overlap_tokens": overlap}
    parts = split_ranges(args, ends, FUNCTION, set(cuts).__contains__)
    assert all(num_tokens(*part) <= size or len(whole[slice(*part)].decode()) == 1 for part in parts)
    assert all(one[0] < other[0] <= one[1] < other[1] for one, other in itertools.pairwise(parts))
    assert all(num_tokens(other[0], one[1]) <= overlap for one, other in itertools.pairwise(parts))
    assert ([parts[0][0], parts[-1][1]] if parts else [0, 0]) == [0, len(whole)]


def test_a_text_has_a_bounded_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.workflow.graph.values.MAX_PARTS", 3)
    ends = range(9)
    assert len(split_ranges({"max_tokens": 2}, range(7), FUNCTION)) == 3
    with pytest.raises(RowError, match="f: a text may be split into 3 parts"):
        split_ranges({"max_tokens": 2}, ends, FUNCTION)
    with pytest.raises(RowError, match="f: a text may be split into 3 parts"):  # characters of two tokens
        split_ranges({"max_tokens": 3}, ends, FUNCTION, lambda at: at % 2 == 0)


def test_a_map_goes_over_a_list() -> None:
    node = MapNode(id="m", over="v", item="i", body=EMPTY, max_items=2)
    assert items_of(node, [1, ANSWER]) == [1, ANSWER]
    assert items_of(node, AnswerValue(value=[1])) == [1]
    with pytest.raises(RowError, match="m: takes a list"):
        items_of(node, "ab")
    with pytest.raises(RowError, match="m: the list has 3 items, and max_items is 2"):
        items_of(node, [1, 2, 3])


def test_a_switch_goes_by_text() -> None:
    node = SwitchNode(id="s", on="v", cases={"true": EMPTY, "7": EMPTY, "Ho": EMPTY})
    assert [case_of(node, value) for value in (True, 7, ANSWER)] == ["cases[true]", "cases[7]", "cases[Ho]"]
    with pytest.raises(RowError, match="s: there is no case for the text 'ho' and no default"):
        case_of(node, "ho")
    with pytest.raises(RowError, match="s: takes a text, a number or a boolean"):
        case_of(node, [7])
    assert case_of(SwitchNode(id="s", on="v", cases={}, default=EMPTY), "ho") == "default"


def test_rounds_of_a_loop() -> None:
    counted = LoopNode(id="l", init={}, body=EMPTY, max_rounds=2)
    assert [is_last_round(counted, number, None) for number in (1, 2)] == [False, True]
    searching = LoopNode(id="l", init={}, body=EMPTY, max_rounds=2, until="ok")
    assert [is_last_round(searching, 1, until) for until in (False, True)] == [False, True]
    assert is_last_round(searching, 2, True)
    with pytest.raises(RowError, match="l: ok was not true after 2 rounds"):
        is_last_round(searching, 2, False)
    with pytest.raises(RowError, match="l: ok is the text 'true'; it must be true or false"):
        is_last_round(searching, 1, "true")
    stopping = LoopNode(id="l", init={}, body=EMPTY, max_rounds=2, until="ok", at_limit="stop")
    assert is_last_round(stopping, 2, False)


def test_values_are_nested_so_deep_and_no_deeper() -> None:
    deep: Any = 1
    for _ in range(MAX_NESTING):
        deep = [deep]
    assert not is_too_deep(deep)
    assert is_too_deep({"a": deep})
    with pytest.raises(InvalidGraph, match="deep at most"):
        graph_from_dict(graph({"id": "d", "op": "data", "value": [deep]}))
    with pytest.raises(RowError, match="deep at most"):
        checked_value([deep])
    with pytest.raises(RowError, match="deep at most"):
        pick(PickNode(id="p", of="q", field="0"), json.dumps([deep]))
    assert list_of(["{{x}}", "{{x}}"], lambda reference: deep[0]) == [deep[0], deep[0]]
    for values in (["{{x}}"], [{"a": "{{x}}"}]):
        with pytest.raises(RowError, match="deep at most"):
            list_of(values, lambda reference: deep)
    check_items(deep)
    with pytest.raises(RowError, match="deep at most"):
        check_items([1, deep])


def test_what_items_of_a_map_repeat_is_bounded() -> None:
    large = ["x" * (MAX_VALUE_CHARS // 2)]
    check_items([large, list(large), list(large)])
    check_items([large, large])
    with pytest.raises(RowError, match="16 Mi characters"):
        check_items([large, large, [large]])


class Counted(list[Any]):
    """Knows how many of its items were read."""

    num_read = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.num_read += 1
            yield item


def test_a_message_reads_what_it_shows_of_a_value() -> None:
    items = Counted([{"a": 1}, *range(1000)])
    with pytest.raises(RowError, match=re.escape("the list [{'a': 1}, 0, 1, 2, 3, 4")) as caught:
        pick(PickNode(id="p", of="x", field="2000"), items)
    assert "…" in caught.value.message
    assert items.num_read < 60
