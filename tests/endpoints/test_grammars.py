"""Grammars of whole answers, followed by llguidance over the tokens of the embedded model."""

from __future__ import annotations

import functools

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from weft.core.grammar import Grammar
from weft.core.ids import unpack_tokens
from weft.endpoints.constraints import Constraint
from weft.endpoints.dialect import Dialect, dialect_of
from weft.endpoints.grammars import CallableTool, Calls, answer_grammar, triggered_grammar
from weft.engine.grammar_text import translated
from weft.testing.byte_tokenizer import CHATML, byte_tokenizer
from weft.tokenizers.load import load_tokenizer

CITY = {"$ref": "#/$defs/place"}
WEATHER = CallableTool(
    "weather",
    {
        "type": "object",
        "properties": {"city": CITY, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"place": {"enum": ["Oslo", 'Say "Oslo"']}},
    },
)
NOW = CallableTool("now", {"type": "object", "properties": {}, "additionalProperties": False})
BOTH, ONE = Calls([WEATHER, NOW], False), Calls([WEATHER, NOW], True)
SCHEMA = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


class Vocabulary:
    def __init__(self) -> None:
        tokenizer = load_tokenizer("weft-tiny")
        self.tokens, self.special_token_ids = tokenizer.token_bytes, sorted(tokenizer.special_ids)
        self.bos_token_id, self.eos_token_id = None, tokenizer.eos_token_ids[0]

    def __call__(self, text: bytes) -> list[int]:
        return encode(text.decode())


def encode(text: str) -> list[int]:
    return unpack_tokens(load_tokenizer("weft-tiny").encode(text, add_special_tokens=False)).tolist()


@functools.cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Vocabulary()))


def allows(grammar: Grammar | None, text: str | list[int]) -> bool:
    assert grammar is not None
    matcher = LLMatcher(vocabulary(), translated(grammar, None), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = encode(text) if isinstance(text, str) else text
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


OSLO = '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}'
CLOCK = '{"name": "now", "arguments": {}}'
hermes = functools.partial(answer_grammar, Dialect("hermes"), reasoning_opened=False)


def test_hermes() -> None:
    grammar = hermes(BOTH, None)
    one, two = f"<tool_call>{OSLO}</tool_call>", f"<tool_call>\n{CLOCK}\n</tool_call>"
    assert all(allows(grammar, text) for text in (one, two, one + two, f"{one}\n{two}"))
    quoted = OSLO.replace("Oslo", 'Say \\"Oslo\\"')
    assert allows(grammar, f"<tool_call>{quoted}</tool_call>")
    for wrong in ("Oslo", one + "x", one.replace("Oslo", "Bergen"), one.replace("weather", "snow"), one[:-1], ""):
        assert not allows(grammar, wrong), wrong
    assert allows(hermes(ONE, None), one)
    assert not allows(hermes(ONE, None), one + two)


def test_llama() -> None:
    grammar = answer_grammar(Dialect("llama3_json"), BOTH, None, reasoning_opened=False)
    one, two = (text.replace("arguments", "parameters") for text in (OSLO, CLOCK))
    assert allows(grammar, one)
    assert allows(grammar, f"{one}; {two}")
    assert not allows(grammar, OSLO)


def test_mistral() -> None:
    grammar = answer_grammar(Dialect("mistral"), BOTH, None, reasoning_opened=False)
    assert allows(grammar, f"[TOOL_CALLS][{OSLO}]")
    assert allows(grammar, f"[TOOL_CALLS] [{OSLO}, {CLOCK}]")
    assert not allows(grammar, "[TOOL_CALLS][]")
    newer = answer_grammar(Dialect("mistral", named_arguments=True), BOTH, None, reasoning_opened=False)
    assert allows(newer, '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}')
    assert not allows(newer, "[TOOL_CALLS]snow[ARGS]{}")


def test_special_tokens_are_themselves_and_not_their_text() -> None:
    dialect = Dialect("mistral", special={"[TOOL_CALLS]": 1})
    grammar = answer_grammar(dialect, BOTH, None, reasoning_opened=False)
    assert allows(grammar, [1, *encode(f"[{CLOCK}]")])
    assert not allows(grammar, f"[TOOL_CALLS][{CLOCK}]")
    dialect = Dialect("mistral", reasoning=True, special={"<think>": 1, "</think>": 0})
    grammar = answer_grammar(dialect, BOTH, None, reasoning_opened=False)
    assert allows(grammar, [1, *encode("Hm. "), 0, *encode(f"\n[TOOL_CALLS][{CLOCK}]")])
    assert allows(grammar, [1, 0, *encode(f"[TOOL_CALLS][{CLOCK}]")])
    assert not allows(grammar, f"<think>Hm.</think>[TOOL_CALLS][{CLOCK}]")


def test_reasoning_may_come_first() -> None:
    dialect = Dialect("hermes", reasoning=True)
    call = f"<tool_call>{CLOCK}</tool_call>"
    free = answer_grammar(dialect, BOTH, None, reasoning_opened=False)
    assert allows(free, call)
    assert allows(free, f"<think>\nHm, {{\n</think>\n\n{call}")
    opened = answer_grammar(dialect, BOTH, None, reasoning_opened=True)
    assert allows(opened, f"Hm.\n</think>\n\n{call}")
    assert not allows(opened, call)


@pytest.mark.parametrize(
    ("body", "good", "bad"),
    [
        (SCHEMA, '{"a": 1}', '{"a": "1"}'),
        (Grammar.json_object(), '{"b": [1]}', "[1]"),
        (Grammar.regex(r'a/b\/c\d+"[^/]\\/'), 'a/b/c12"x\\/', 'a/b/c"/'),
        (Grammar.choice(["yes}", 'n"o']), 'n"o', "yes"),
        (Grammar.lark('%llguidance {}\nstart: call\ncall: "}" body\nbody: /[a-z]+/'), "}abc", "}"),
    ],
)
def test_a_form_beside_calls_and_reasoning(body: Grammar, good: str, bad: str) -> None:
    constraint = Constraint(body, "response_format")
    assert answer_grammar(Dialect("hermes"), None, constraint, reasoning_opened=False) is body
    dialect = Dialect("hermes", reasoning=True)
    grammar = answer_grammar(dialect, BOTH, constraint, reasoning_opened=False)
    for before in ("", "<think>So.</think>\n"):
        assert allows(grammar, before + good)
        assert not allows(grammar, before + bad)
        assert allows(grammar, f"{before}<tool_call>{CLOCK}</tool_call>")


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("a <tool_call> b", "hermes"),
        ("<|python_tag|>", "llama3_json"),
        ("[TOOL_CALLS]", "mistral"),
        ("<tool_call>\n<function=", None),
        ("<tool_call>{name}\n<arg_key>", None),
        ("", None),
    ],
)
def test_the_template_shows_the_form(template: str, form: str | None) -> None:
    tokenizer = byte_tokenizer(CHATML + template)
    assert dialect_of(tokenizer).tool_form == form
    assert dialect_of(tokenizer, tool_call_parser="none").tool_form is None
    assert dialect_of(tokenizer, tool_call_parser="mistral").tool_form == "mistral"


def test_the_template_shows_reasoning() -> None:
    assert not dialect_of(byte_tokenizer()).reasoning
    assert dialect_of(byte_tokenizer(), reasoning_parser="think").reasoning
    thinks = byte_tokenizer(CHATML + "<think>")
    assert dialect_of(thinks).reasoning
    assert not dialect_of(thinks, reasoning_parser="none").reasoning
    assert dialect_of(byte_tokenizer(None)) == Dialect()
    assert dialect_of(load_tokenizer("weft-tiny")) == Dialect("hermes")


FREE = [
    (Dialect("hermes"), f"<tool_call>{OSLO}</tool_call>", f"<tool_call>\n{CLOCK}\n</tool_call>"),
    (Dialect("llama3_json"), f"<|python_tag|>{OSLO}".replace("arguments", "parameters"), None),
    (Dialect("mistral"), f"[TOOL_CALLS] [{OSLO}, {CLOCK}]", f"[TOOL_CALLS][{CLOCK}]"),
    (
        Dialect("mistral", named_arguments=True),
        '[TOOL_CALLS]now[ARGS]{"a": [1]}',
        '[TOOL_CALLS]weather[ARGS]{"city": 1}',
    ),
]


@pytest.mark.parametrize(("dialect", "one", "two"), FREE, ids=["hermes", "llama", "mistral", "mistral, named"])
def test_calls_that_the_model_may_make(dialect: Dialect, one: str, two: str | None) -> None:
    """Text without a marker, or text that ends with one call (or a list of them)."""
    grammar = triggered_grammar(dialect, BOTH, reasoning_opened=False)
    for text in ("", "No calls: <tool, [TOOL or {}", one, f"So:\n{one}", two or one):
        assert allows(grammar, text), text
    for wrong in (one.replace("weather", "snow").replace("now[", "snow["), one[:-1], f"{one}x"):
        assert not allows(grammar, wrong), wrong


def test_arguments_may_come_before_the_name() -> None:
    grammar = triggered_grammar(Dialect("hermes"), BOTH, reasoning_opened=False)
    assert allows(grammar, '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>')
    strict = triggered_grammar(Dialect("hermes"), Calls([WEATHER._replace(strict=True)], False), reasoning_opened=False)
    assert allows(strict, f"<tool_call>{OSLO}</tool_call>")
    assert not allows(strict, f"<tool_call>{OSLO.replace('Oslo', 'Rome')}</tool_call>")


def test_a_marker_that_is_a_special_token_triggers_as_itself_and_as_text() -> None:
    dialect = Dialect("mistral", special={"[TOOL_CALLS]": 1})
    grammar = triggered_grammar(dialect, BOTH, reasoning_opened=False)
    assert allows(grammar, [1, *encode(f"[{CLOCK}]")])
    assert allows(grammar, f"[TOOL_CALLS][{CLOCK}]")
    assert not allows(grammar, [1, *encode("[{")])
