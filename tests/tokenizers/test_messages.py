"""Messages in every form that clients send, and errors that name the place."""

import pytest

from weft.abi.errors import InvalidRequest, Unsupported
from weft.tokenizers.messages import normalize, normalize_tools, num_characters, with_mapped_arguments

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, null]}'}}


def one(**message: object) -> dict[str, object]:
    return normalize([message])[0]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": "hi"}, {"role": "user", "content": "hi"}),
        ({"role": "user", "content": ""}, {"role": "user", "content": ""}),
        ({"role": "developer", "content": "hi"}, {"role": "system", "content": "hi"}),
        (
            {"role": "user", "content": "hi", "name": "Ann", "other": 1},
            {"role": "user", "content": "hi", "name": "Ann"},
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]},
            {"role": "user", "content": "a\nb\nc"},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {
                "role": "assistant",
                "tool_calls": [
                    {"type": "function", "function": {"name": "f", "arguments": {"a": [1, None]}}, "id": "c1"}
                ],
            },
        ),
        (
            {"role": "assistant", "function_call": {"name": "f", "arguments": ""}},
            {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]},
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{"}}]},
        ),
        (
            {"role": "assistant", "content": "x", "tool_calls": [], "reasoning_content": "r"},
            {"role": "assistant", "content": "x", "reasoning_content": "r"},
        ),
        ({"role": "assistant", "refusal": "no"}, {"role": "assistant", "content": "no"}),
        (
            {"role": "tool", "content": "21", "tool_call_id": "c0"},
            {"role": "tool", "content": "21", "tool_call_id": "c0"},
        ),
        ({"role": "function", "content": "21", "name": "f"}, {"role": "tool", "content": "21", "name": "f"}),
    ],
)
def test_forms(message: dict[str, object], expected: dict[str, object]) -> None:
    assert one(**message) == expected


@pytest.mark.parametrize("arguments", ["null", "[]", "5", '"x"', " ", "{", "true", 2000 * '{"a":'])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    messages = normalize(
        [{"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": arguments}}]}]
    )
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == arguments
    mapped = with_mapped_arguments(messages)
    assert mapped[0]["tool_calls"][0] == {
        "type": "function",
        "id": "c1",
        "function": {"name": "f", "arguments": {"arguments": arguments}},
    }
    assert with_mapped_arguments(mapped) == mapped


def test_a_tools_answer_names_the_function_that_was_called() -> None:
    messages = normalize(
        [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "x", "tool_call_id": "c1"}]
    )
    assert messages[1]["name"] == "f"


def test_a_template_that_knows_developers_gets_them() -> None:
    assert normalize([{"role": "developer", "content": "x"}], keep_developer=True)[0]["role"] == "developer"


GOOD = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ("text", "messages[1]"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "wizard", "content": "x"}, "messages[1].role"),
        ({"role": ["user"], "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "tool", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 7}, "messages[1].content"),
        ({"role": "user", "content": {"text": "x"}}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "hologram"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": ["a", 4]}, "messages[1].content[1]"),
        ({"role": "assistant"}, "messages[1].content"),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [7]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[1].tool_calls[0].function.name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"role": "user", "content": "x", "name": 3}, "messages[1].name"),
        ({"role": "tool", "content": "x", "tool_call_id": 3}, "messages[1].tool_call_id"),
        ({"role": "assistant", "content": "x", "reasoning": 3}, "messages[1].reasoning"),
    ],
)
def test_errors_name_the_place(message: object, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        normalize([GOOD, message])  # type: ignore[list-item]
    assert caught.value.param == path
    assert caught.value.message.startswith(path.removesuffix(".content")) or path in caught.value.message


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ({"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}, "image"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "audio"),
        ({"type": "video_url"}, "video"),
        ({"type": "file", "file": {"file_id": "x"}}, "file"),
    ],
)
def test_media_are_refused_by_name(part: dict[str, object], what: str) -> None:
    with pytest.raises(Unsupported, match=rf"messages\[0\]\.content\[1\] is {what} input") as caught:
        one(role="user", content=["look:", part])
    assert caught.value.param == "messages[0].content[1]"


def test_no_messages() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        normalize([])


def test_tools() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}, "strict": True}
    assert normalize_tools([tool]) == [tool]
    for bad, path in [
        ("x", "tools[0]"),
        ({"type": "function"}, "tools[0].function"),
        ({"function": {"name": None}}, "tools[0].function.name"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            normalize_tools([bad])  # type: ignore[list-item]
        assert caught.value.param == path
    with pytest.raises(Unsupported, match="web_search"):
        normalize_tools([{"type": "web_search"}])


def test_num_characters() -> None:
    assert num_characters([{"role": "user", "content": [{"text": "abc"}]}, None, 7]) == 7
