"""Chats as prompts: rendered by a template, then tokenized."""

import asyncio
import json
import re

import pytest

from tests.programs.help import tokenizer_with
from tests.tokenizers.templates import BRACKETS, HEADERS
from weft.abi.errors import InvalidRequest, Unsupported
from weft.core.ids import TOKEN_BYTES, unpack_tokens
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.tokenizers.chats import ChatPrompt, encode, render

PLAIN = byte_tokenizer()
TALK = [{"role": "user", "content": "hi"}]


def test_a_chat() -> None:
    assert render(ChatPrompt(messages=TALK), byte_tokenizer()) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_special_tokens_of_the_template_are_tokens() -> None:
    tokens = unpack_tokens(asyncio.run(encode(ChatPrompt(messages=TALK), byte_tokenizer())).tokens)
    assert (tokens[0], tokens.count(257), tokens.count(258)) == (257, 2, 1)


def test_no_doubled_beginning_of_sequence() -> None:
    tokenizer = tokenizer_with(HEADERS)
    tokens = unpack_tokens(asyncio.run(encode(ChatPrompt(messages=TALK), tokenizer)).tokens)
    assert tokens[0] == tokenizer.bos_token_id
    assert tokens.count(tokenizer.bos_token_id) == 1


def test_long_chats_leave_the_loop_free() -> None:
    long = [{"role": "user", "content": "some words of a long message " * 20_000}]

    async def test() -> None:
        task = asyncio.create_task(encode(ChatPrompt(messages=long), byte_tokenizer()))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        assert len(task.result().tokens) > TOKEN_BYTES * 500_000
        assert turns > 10

    asyncio.run(test())


def test_a_text_is_checked_before_it_is_tokenized() -> None:
    def refuse(text: str) -> None:
        raise InvalidRequest(f"{len(text)} characters", "messages")

    with pytest.raises(InvalidRequest, match="52 characters"):
        asyncio.run(encode(ChatPrompt(messages=TALK), byte_tokenizer(), check=refuse))


def test_a_template_that_expects_a_text_beside_calls_gets_an_empty_one() -> None:
    source = "{% for m in messages %}{{ m.role + ':' + m.content }}{% for call in m.tool_calls %}"
    source += "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}{% endfor %}"
    source += "{% endfor %}"
    call = {"function": {"name": "f", "arguments": "[]"}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render(ChatPrompt(messages=messages, chat_template=source), PLAIN) == "user:aassistant:arguments=[];"


ITERATES = "{% for key, value in call.arguments ITEMS %}{{ key }}={{ value }};{% endfor %}"


@pytest.mark.parametrize("arguments", ["null", "[]", "5", '"x"', "{", '{"a": 1}'])
@pytest.mark.parametrize(
    "template",
    ["{{ call.arguments | tojson }}", ITERATES.replace("ITEMS", "|items"), ITERATES.replace(" ITEMS", ".items()")],
)
def test_a_chat_goes_on_after_a_call_with_odd_arguments(arguments: str, template: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    source = "{% for each in messages[0].tool_calls %}{% set call = each.function %}" + template + "{% endfor %}"
    text = render(ChatPrompt(messages=[{"role": "assistant", "tool_calls": [call]}], chat_template=source), PLAIN)
    as_mapping = "a=1;" if arguments == '{"a": 1}' else f"arguments={arguments};"
    as_json = arguments if arguments == '{"a": 1}' else json.dumps(arguments)
    assert text == (as_json if "tojson" in template else as_mapping)


@pytest.mark.parametrize("arguments", ['{"a": 1}', "[]"])
def test_ids_that_a_template_refuses_become_short_ones(arguments: str) -> None:
    ids = ["call_0123456789abcdef01234567", "abc-efghi", "abcdefghi"]
    messages = [
        *TALK,
        {
            "role": "assistant",
            "tool_calls": [{"id": id, "function": {"name": "f", "arguments": arguments}} for id in ids],
        },
        *[{"role": "tool", "tool_call_id": id, "content": "1"} for id in reversed(ids)],
    ]
    text = render(ChatPrompt(messages=messages, chat_template=BRACKETS), PLAIN)
    of_calls = re.findall('"id": "(.*?)"', text)
    assert [bool(re.fullmatch("[a-zA-Z0-9]{9}", id)) for id in of_calls] == [True, True, True]
    assert of_calls[2] == "abcdefghi"
    assert len(set(of_calls)) == 3
    assert re.findall('"call_id": "(.*?)"', text) == of_calls[::-1]
    as_given = "{{ messages[1].tool_calls[0].id }}"
    assert render(ChatPrompt(messages=messages, chat_template=as_given), PLAIN) == ids[0]


def test_a_template_that_refuses_for_another_reason_says_it() -> None:
    call = {"function": {"name": "f", "arguments": "null"}}
    chat = ChatPrompt(
        messages=[{"role": "assistant", "tool_calls": [call]}], chat_template="{{ raise_exception('never') }}"
    )
    with pytest.raises(InvalidRequest, match="never"):
        render(chat, PLAIN)


@pytest.mark.parametrize(("end", "opens"), [("<think>\n", True), ("<think></think>", False), ("", False)])
def test_a_prompt_may_open_the_reasoning(end: str, opens: bool) -> None:
    chat = ChatPrompt(messages=TALK, chat_template="{{ messages[0].content }}" + end)
    assert asyncio.run(encode(chat, byte_tokenizer(None))).opens_reasoning is opens


@pytest.mark.parametrize(
    ("role", "content", "expected"),
    [
        ("assistant", "<think>\nLet me", (True, True)),
        ("assistant", [{"type": "text", "text": "<think>"}, {"type": "text", "text": "Let me"}], (True, True)),
        ("assistant", "<think>\n", (True, False)),
        ("assistant", "<think>\nLet me</think>\nHi", (False, False)),
        ("assistant", "Hi", (False, False)),
        ("user", "What is <think> for", (False, False)),
    ],
)
def test_a_continued_message_may_be_in_the_middle_of_reasoning(
    role: str, content: object, expected: tuple[bool, bool]
) -> None:
    messages = [{"role": "user", "content": "Write <think>."}, {"role": role, "content": content}]
    chat = ChatPrompt(messages=messages, add_generation_prompt=False, continue_final_message=True)
    encoded = asyncio.run(encode(chat, byte_tokenizer()))
    assert (encoded.opens_reasoning, encoded.continues_reasoning) == expected
    whole = ChatPrompt(messages=messages, add_generation_prompt=False)
    assert not asyncio.run(encode(whole, byte_tokenizer())).opens_reasoning


def test_a_template_of_the_request() -> None:
    chat = ChatPrompt(messages=TALK, chat_template="{{ messages[0].content }}{{ x }}", template_kwargs={"x": 3})
    assert render(chat, byte_tokenizer(None)) == "hi3"


def test_a_model_without_template() -> None:
    with pytest.raises(Unsupported, match="/v1/completions"):
        render(ChatPrompt(messages=TALK), byte_tokenizer(None))
