from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.help import calls, content, cut, parsed
from weft.text.deltas import CallArguments, CallStart, Content
from weft.text.tool_calls import PARSERS, HermesParser, Llama3JsonParser, MistralParser, ToolCallParser

FAMILIES = list(PARSERS.values())
family = pytest.mark.parametrize("kind", FAMILIES)

# Texts of pieces that matter, so that half of them come near to a call.
PIECES = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<",
        "{",
        "}",
        "[",
        "]",
        ";",
        ",",
        ":",
    ),
    *('"name"', '"arguments"', '"parameters"', '"f"', '"', "\\", "\n", " ", "x", "f", "{}", '{"a": 1}', '{"a": "}"}'),
    *('{"name": "f", "arguments": {"a": "', '{"name": "f", "arguments": {}}', '{"parameters": {"x": 2}, "name": "g"}'),
)
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join)
places = st.lists(st.integers(0, 500), max_size=12)
names = st.text("abcXYZ019_.-", min_size=1, max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(max_size=6), values, max_size=4)


@family
@given(text=texts, at=places)
def test_however_a_text_is_cut_it_is_the_same(kind: type[ToolCallParser], text: str, at: list[int]) -> None:
    whole = parsed(kind(), [text])
    assert parsed(kind(), cut(text, at)) == whole
    assert parsed(kind(), text) == whole


@family
@given(text=texts)
def test_text_without_calls_is_content_to_the_letter(kind: type[ToolCallParser], text: str) -> None:
    deltas = parsed(kind(), text)
    if not calls(deltas):
        assert content(deltas) == text


@family
@given(text=texts)
def test_nothing_is_told_twice(kind: type[ToolCallParser], text: str) -> None:
    deltas = parsed(kind(), text)
    told = content(deltas) + "".join(arguments for _, arguments in calls(deltas))
    # "{}" is what stands for the arguments that a call leaves out.
    assert len(told) <= len(text) + 2 * len(calls(deltas))
    rest = iter(text)
    assert all(char in rest for char in content(deltas))  # in this order


@given(st.text())
def test_any_text(text: str) -> None:
    for kind in FAMILIES:
        assert content(parsed(kind(), [text])) == text


def hermes(calls: list[tuple[str, str]], reverse: bool, gap: str) -> str:
    return gap.join(f"<tool_call>{gap}{_object(*call, 'arguments', reverse)}{gap}</tool_call>" for call in calls)


def llama(calls: list[tuple[str, str]], reverse: bool, gap: str) -> str:
    return f"{gap};{gap}".join(_object(*call, "parameters", reverse) for call in calls)


def mistral(calls: list[tuple[str, str]], reverse: bool, gap: str) -> str:
    return f"[TOOL_CALLS]{gap}[" + f",{gap}".join(_object(*call, "arguments", reverse) for call in calls) + "]"


def mistral_named(calls: list[tuple[str, str]], reverse: bool, gap: str) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)


def _object(name: str, arguments: str, key: str, reverse: bool) -> str:
    members = [f'"name": {json.dumps(name)}', f'"{key}": {arguments}']
    return "{" + ", ".join(reversed(members) if reverse else members) + "}"


@pytest.mark.parametrize(
    ("kind", "write"),
    [(HermesParser, hermes), (Llama3JsonParser, llama), (MistralParser, mistral), (MistralParser, mistral_named)],
)
@given(
    given_calls=st.lists(st.tuples(names, arguments), min_size=1, max_size=3),
    reverse=st.booleans(),
    gap=st.sampled_from(["", " ", "\n", "\n\n"]),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 2]),
    at=places,
)
def test_calls_survive_the_way_there_and_back(kind, write, given_calls, reverse, gap, ascii_only, indent, at) -> None:
    written = [(name, json.dumps(args, ensure_ascii=ascii_only, indent=indent)) for name, args in given_calls]
    text = write(written, reverse, gap)
    deltas = parsed(kind(), cut(text, at))
    assert calls(deltas) == written
    assert content(deltas) == ""


def test_arguments_stream_before_the_call_ends() -> None:
    parser = HermesParser()
    assert parser.push('Sure.\n<tool_call>\n{"name": "look_up", "argu') == [Content("Sure.\n")]
    assert parser.push("ments") == []
    assert parser.push('": {') == []  # a brace is not yet an object
    assert parser.push('"ci') == [CallStart(0, "look_up"), CallArguments(0, '{"ci')]
    assert parser.push('ty": "Oslo"') == [CallArguments(0, 'ty": "Oslo"')]
    assert parser.push("}") == [CallArguments(0, "}")]
    assert parser.push("}\n</tool_call>") == []
    assert parser.finish() == []


def test_no_more_is_held_back_than_may_be_a_marker() -> None:
    parser = HermesParser()
    assert parser.push("a < b <tool") == [Content("a < b ")]
    assert parser.push("box>") == [Content("<toolbox>")]
    parser = Llama3JsonParser()
    assert parser.push("  ") == []
    assert parser.push("An object: {") == [Content("  An object: {")]
    assert parser.push("}") == [Content("}")]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (HermesParser, "<tool_call>"),
        (HermesParser, "  <tool_call> \n"),
        (HermesParser, "<tool_call>look up</tool_call>"),
        (HermesParser, '<tool_call>{"name": "f", "arguments": '),
        (HermesParser, '<tool_call>{"name": "f", "arguments": {bad}}</tool_call>'),
        (HermesParser, '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
        (HermesParser, '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        (HermesParser, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        (HermesParser, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        (HermesParser, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        (HermesParser, '<tool_call>{"arguments": {"a": 1}, "name"'),
        (Llama3JsonParser, '{"name": "Ada", "age": 36}'),
        (Llama3JsonParser, '{"name": "Ada"}'),
        (Llama3JsonParser, '{"city": "Oslo"}'),
        (Llama3JsonParser, 'So: {"name": "f", "parameters": {}}'),
        (Llama3JsonParser, "<|python_tag|>print(1)"),
        (MistralParser, "[TOOL_CALLS] []"),
        (MistralParser, "[TOOL_CALLS]f[ARG]{}"),
        (MistralParser, "[TOOL_CALLS]f[ARGS]x"),
        (MistralParser, "[TOOL_CALLS]" + "f" * 65 + "[ARGS]{}"),
    ],
)
def test_what_is_no_call_is_content(kind: type[ToolCallParser], text: str) -> None:
    assert parsed(kind(), text) == [Content(text)]


@pytest.mark.parametrize(
    ("kind", "text", "found", "rest"),
    [
        (
            HermesParser,
            '<tool_call>x<tool_call>{"name": "f", "arguments": {}}</tool_call>',
            [("f", "{}")],
            "<tool_call>x",
        ),
        (HermesParser, '<tool_call>{"name": "f"}</tool_call> done', [("f", "{}")], " done"),
        (HermesParser, '<tool_call>{"name": "f", "arguments": {}, "id": "x"}</tool_call>', [("f", "{}")], ""),
        # A call that the length cut, one without its end, and one whose end is something else.
        (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "b', [("f", '{"a": "b')], ""),
        (HermesParser, '<tool_call>{"name": "f", "arguments": {}}\n', [("f", "{}")], ""),
        (HermesParser, '<tool_call>{"name": "f", "arguments": {}}</tool>', [("f", "{}")], "</tool>"),
        (
            HermesParser,
            '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
            [("f", "{}"), ("g", "{}")],
            "",
        ),
        (Llama3JsonParser, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')], ""),
        (Llama3JsonParser, '{"type": "function", "name": "f", "parameters": {}}', [("f", "{}")], ""),
        (Llama3JsonParser, '{"name": "f", "parameters": {}}; and', [("f", "{}")], "; and"),
        (MistralParser, '[TOOL_CALLS] [{"name": "f", "arguments": {}}, 7]', [("f", "{}")], ", 7]"),
    ],
)
def test_calls_beside_other_text(kind: type[ToolCallParser], text: str, found: list, rest: str) -> None:
    deltas = parsed(kind(), text)
    assert calls(deltas) == found
    assert content(deltas) == rest


@family
@pytest.mark.parametrize("begin", ['{"a": [', '{"a": ["', '{"arguments": {"a": "', '[{"name": "f", "x": {'])
def test_beginnings_of_calls_without_number_cost_no_square_of_it(kind: type[ToolCallParser], begin: str) -> None:
    text = f"{kind.marker}{begin}" * 5000 + "!"
    assert content(parsed(kind(), [text])) == text


@family
@given(text=texts, at=places)
def test_held_calls_do_not_depend_on_how_the_text_is_cut(kind: type[ToolCallParser], text: str, at: list[int]) -> None:
    def reader() -> ToolCallParser:
        return kind({"f"}, hold=True)

    whole = parsed(reader(), [text])
    assert parsed(reader(), cut(text, at)) == whole
    for name, arguments in calls(whole):
        assert name == "f"
        assert isinstance(json.loads(arguments), dict)
    if not calls(whole):
        assert content(whole) == text


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {"a": 1',
        '<tool_call>{"name": "f", "arguments": {"a": oh}}</tool_call>',
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
    ],
)
def test_a_held_call_that_is_cut_or_wrong_is_content(text: str) -> None:
    deltas = parsed(HermesParser({"f"}, hold=True), text)
    assert (calls(deltas), content(deltas)) == ([], text)


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool_'),
        (MistralParser, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"na'),
    ],
)
def test_markup_that_the_length_cuts_behind_a_call_is_no_content(
    kind: type[ToolCallParser], text: str, hold: bool
) -> None:
    reader = kind({"f"}, hold=hold)
    deltas = [*reader.push(text), *reader.finish(cut=True)]
    assert calls(deltas) == [("f", '{"a": 1}')]
    assert content(deltas) == ""


def test_a_call_that_the_length_cuts_is_told_as_far_as_it_came() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1'
    for hold in (False, True):
        reader = HermesParser({"f"}, hold=hold)
        deltas = [*reader.push(text), *reader.finish(cut=True)]
        assert calls(deltas) == [("f", '{"a": 1')]
        assert content(deltas) == ""
