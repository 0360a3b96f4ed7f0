"""A rendered chat is the same text as transformers renders, and a template's complaints reach the caller."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from tests.tokenizers import templates
from tests.tokenizers.conftest import BOS, EOS, byte_level_backend
from weft.abi.errors import InvalidRequest
from weft.core.ids import unpack_tokens
from weft.tokenizers.chat_template import ChatTemplate
from weft.tokenizers.load import load_tokenizer
from weft.tokenizers.messages import normalize

SPECIAL = {"bos_token": BOS, "eos_token": EOS}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Tells the "weather" <b>now</b> in Zürich & elsewhere',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "time", "description": "The time", "parameters": {}}},
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
TALK = [
    {"role": "user", "content": "hi  "},
    {"role": "assistant", "content": "  hello\n"},
    {"role": "user", "content": "?"},
]
CHATS = {
    "one": TALK[:1],
    "talk": TALK,
    "system": [{"role": "system", "content": " be brief "}, *TALK],
    "ended": [*TALK, {"role": "assistant", "content": "The answer is "}],
    "thought": [
        *TALK[:1],
        {"role": "assistant", "content": "yes", "reasoning_content": "hm"},
        {"role": "user", "content": "so?"},
        {"role": "assistant", "content": "<think>\nwell\n</think>\n\nso"},
    ],
    "tools": [
        *TALK[:1],
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"degrees": 21}'},
    ],
}
SOURCES = {
    "chatml": templates.CHATML,
    "headers": templates.HEADERS,
    "reasoning": templates.REASONING,
    "brackets": templates.BRACKETS,
    "odds": templates.ODDS,
}


def theirs() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), **SPECIAL)


THEIRS = theirs()


def both(source: str, messages: list[dict], **options: object) -> tuple[str, str]:
    """What they and we render, each an error where it refuses."""
    chat = normalize(messages)
    flags = {name: options.pop(name, False) for name in ("add_generation_prompt", "continue_final_message")}
    tools = options.pop("tools", None)
    try:
        expected = THEIRS.apply_chat_template(
            chat, chat_template=source, tokenize=False, tools=tools, **flags, **options
        )
    except Exception:
        expected = "refused"
    try:
        got = ChatTemplate(source).render(chat, tools=tools, special_tokens=SPECIAL, variables=options, **flags)
    except InvalidRequest:
        got = "refused"
    return expected, got


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("chat", CHATS)
def test_same_text_as_transformers(source: str, chat: str) -> None:
    for tools in (None, TOOLS):
        for add_generation_prompt in (True, False):
            expected, got = both(SOURCES[source], CHATS[chat], tools=tools, add_generation_prompt=add_generation_prompt)
            assert got == expected


def test_not_everything_is_refused() -> None:
    rendered = [(s, c) for s in SOURCES for c in CHATS if both(SOURCES[s], CHATS[c], tools=TOOLS)[1] != "refused"]
    assert len(rendered) >= 24
    assert ("headers", "tools") in rendered
    assert ("brackets", "tools") in rendered


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("chat", CHATS)
def test_same_continuation_as_transformers(source: str, chat: str) -> None:
    expected, got = both(SOURCES[source], CHATS[chat], continue_final_message=True)
    assert got == expected


def test_a_continued_message_stays_open() -> None:
    chat = CHATS["ended"]
    text = ChatTemplate(templates.CHATML).render(chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("assistant\nThe answer is ")
    trimmed = ChatTemplate(templates.HEADERS).render(
        chat, add_generation_prompt=False, continue_final_message=True, special_tokens=SPECIAL
    )
    assert trimmed.endswith("\n\nThe answer is")


def test_variables_reach_the_template() -> None:
    expected, got = both(templates.REASONING, TALK, add_generation_prompt=True, enable_thinking=False)
    assert got == expected
    assert got.endswith("</think>\n\n")
    expected, got = both(templates.HEADERS, TALK, date_string="tomorrow", bos_token="mine")
    assert got == expected
    assert got.startswith("mine")


def test_documents_reach_the_template() -> None:
    source = "{% for document in documents %}{{ document.title }}: {{ document.text }}\n{% endfor %}"
    text = ChatTemplate(source).render(TALK, documents=[{"title": "a", "text": "b"}])
    assert text == "a: b\n"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_variables_cannot_replace_fields(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        ChatTemplate("x").render(TALK, variables={name: []})
    assert caught.value.param == "chat_template_kwargs"


def test_the_templates_own_message_is_told() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate user and assistant") as caught:
        ChatTemplate(templates.BRACKETS).render([*TALK, *TALK], special_tokens=SPECIAL)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{% for %}", "{{ }", "{% include 'x' %}", "{% if %}", "{{ 'a' | nofilter }}"])
def test_a_broken_template_says_so(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate(source).render(TALK)


def test_continuing_and_opening_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest, match="exclude each other"):
        ChatTemplate("x").render(TALK, continue_final_message=True)


def test_nothing_to_continue() -> None:
    calls = [{"role": "assistant", "tool_calls": []}]
    with pytest.raises(InvalidRequest, match="final message with text") as caught:
        ChatTemplate("x").render(calls, add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == "messages[0].content"
    with pytest.raises(InvalidRequest, match="changes or drops"):
        ChatTemplate("x").render(TALK, add_generation_prompt=False, continue_final_message=True)


def test_the_callers_messages_are_left_alone() -> None:
    before = json.dumps(CHATS)
    for chat in CHATS.values():
        both(templates.CHATML, chat, continue_final_message=True)
    assert json.dumps(CHATS) == before


def test_no_doubled_beginning() -> None:
    """A template writes the beginning of the sequence itself; encoding must not put another before it."""
    from tests.programs.help import tokenizer_with

    tokenizer = tokenizer_with(templates.HEADERS)
    text = tokenizer.chat_template().render(TALK, special_tokens=tokenizer.special_tokens)
    ids = list(unpack_tokens(tokenizer.encode(text, add_special_tokens=False)))
    assert ids.count(tokenizer.bos_token_id) == 1
    assert unpack_tokens(tokenizer.encode("x"))[0] == tokenizer.bos_token_id


def test_embedded_model_renders_tools() -> None:
    from transformers import AutoTokenizer

    import weft

    tokenizer = load_tokenizer("weft-tiny")
    folder = weft.__path__[0] + "/assets/weft-tiny"
    reference = AutoTokenizer.from_pretrained(folder)
    for chat in CHATS.values():
        messages = normalize(chat, keep_developer=True)
        expected = reference.apply_chat_template(
            messages, tools=TOOLS, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        text = tokenizer.chat_template(with_tools=True).render(
            messages, tools=TOOLS, special_tokens=tokenizer.special_tokens
        )
        assert list(unpack_tokens(tokenizer.encode(text, add_special_tokens=False))) == expected
