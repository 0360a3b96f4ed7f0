"""Grammars on the embedded model: texts follow them, and those that cannot be used are refused."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from functools import partial

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from weft import LLM, Grammar
from weft.abi.errors import InvalidRequest, Overloaded
from weft.core.sampling import SamplingParams, StopParams
from weft.engine.digits import DigitRun
from weft.engine.grammar import (
    MAX_FLAT_BYTES,
    MAX_GRAMMAR_BYTES,
    MAX_TENANT_COMPILED,
    Grammars,
    _Vocabulary,
)
from weft.engine.json_schema import prepared, refuse_options
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.tokenizers.load import load_tokenizer

PROMPTS = ["Once upon a time", "The price is", "{", "Who are you?", "Ann is 9.", "[1, 2"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("weft-tiny", dtype="float32", device="cpu", num_pages=400, max_context=512, threads=2) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_json_that_the_schema_allows(llm: LLM, temperature: float) -> None:
    results = llm.generate(PROMPTS, grammar=Grammar.json_schema(SCHEMA), temperature=temperature, seed=3)
    for result in results:
        found = json.loads(result.text)
        assert list(found) == ["name", "tags", "age"]
        assert len(found["name"]) <= 8
        assert set(found["tags"]) <= {"a", "b"}
        assert len(found["tags"]) <= 3
        assert 0 <= found["age"] <= 120
        assert result.outputs[0].finish_reason == "stop"


def test_a_regular_expression_matches_the_whole_text(llm: LLM) -> None:
    pattern = r"(north|south)-[0-9]{2,4}(!|\?)"
    for result in llm.generate(PROMPTS, grammar=Grammar.regex(pattern), temperature=1.0, n=4, seed=1):
        for output in result.outputs:
            assert re.fullmatch(pattern, output.text)


def test_a_choice_is_one_of_its_options_to_the_letter(llm: LLM) -> None:
    options = ["yes", "yes, but", 'say "no"\n', "naïve – 中文"]
    results = llm.generate(PROMPTS * 4, grammar=Grammar.choice(options), temperature=2.0, seed=2)
    assert {result.text for result in results} <= set(options)
    assert len({result.text for result in results}) > 1


def test_a_grammar_of_the_caller(llm: LLM) -> None:
    grammar = Grammar.lark('start: "(" inner ")"\ninner: /[a-c]/ | "(" inner ")"\n')
    for result in llm.generate(PROMPTS, grammar=grammar, temperature=1.0, seed=5, max_tokens=200):
        if result.outputs[0].finish_reason == "stop":
            assert re.fullmatch(r"\(+[a-c]\)+", result.text)
            assert result.text.count("(") == result.text.count(")")


def test_a_text_that_is_complete_ends_without_end_of_sequence(llm: LLM) -> None:
    result = llm.generate("x", grammar=Grammar.regex("[0-9]{3}"), ignore_eos=True, min_tokens=50)[0]
    assert re.fullmatch("[0-9]{3}", result.text)
    assert result.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("whitespace", [None, r"[ \n]{1,9}"])
def test_blanks_in_json_come_to_an_end(llm: LLM, whitespace: str | None) -> None:
    blanks = {token: 100.0 for token in range(llm.info.vocab_size) if not llm.tokenizer.bytes_of(token).strip()}
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    if whitespace is not None:
        schema["x-guidance"] = {"whitespace_pattern": whitespace}
    result = llm.generate("x", grammar=Grammar.json_schema(schema), logit_bias=blanks, temperature=0, max_tokens=400)[0]
    assert json.loads(result.text) == {"a": 1}
    if whitespace is None:
        assert result.text == '{"a": 1}'
    else:
        assert result.text.count(" ") + result.text.count("\n") > 4


@pytest.mark.parametrize("count", [2100, 5000])
def test_a_choice_of_thousands(llm: LLM, count: int) -> None:
    options = [f"item {number}" for number in range(count)]
    for result in llm.generate(PROMPTS, grammar=Grammar.choice(options), temperature=1.5, seed=4):
        assert result.text in options


def test_a_format_that_is_not_known_is_an_annotation(llm: LLM) -> None:
    schema = {"type": "string", "format": "iban", "maxLength": 4}
    assert isinstance(json.loads(llm.generate("x", grammar=Grammar.json_schema(schema), seed=1)[0].text), str)
    for unknown in (["date"], {"date": 1}, 5, None):
        grammar = Grammar.json_schema(schema | {"format": unknown})
        assert isinstance(json.loads(llm.generate("x", grammar=grammar, seed=1)[0].text), str)
    date = {"type": "string", "format": "date"}
    assert re.fullmatch(r'"\d{4}-\d\d-\d\d"', llm.generate("x", grammar=Grammar.json_schema(date), seed=1)[0].text)


def test_strings_without_a_length_come_to_an_end() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "string", "maxLength": 40}, "c": {"$ref": "#/$defs/x"}},
        "required": ["a", "b", "c"],
        "additionalProperties": False,
        "$defs": {"x": {"type": ["null", "string"], "minLength": 24}},
    }
    options = {"dtype": "float32", "device": "cpu", "num_pages": 100, "max_context": 512, "threads": 2}
    with LLM("weft-tiny", json_string_chars=20, **options) as llm:
        tokens = llm.tokenizer.token_bytes
        # No token with which `null` begins.
        letters = [t for t, data in enumerate(tokens) if data.isalnum() and t > 10 and data[:1] != b"n"]
        never_closed = {"logit_bias": dict.fromkeys(letters[:1024], 40.0), "temperature": 0.0, "max_tokens": 300}
        found = json.loads(llm.generate("x", grammar=Grammar.json_schema(schema), **never_closed)[0].text)
        assert [len(found[key]) for key in "abc"] == [20, 40, 24]


def test_names_and_untyped_strings_come_to_an_end() -> None:
    options = {"dtype": "float32", "device": "cpu", "num_pages": 100, "max_context": 512, "threads": 2}
    with LLM("weft-tiny", json_string_chars=20, **options) as llm:
        # No token with which `null`, `true` or `false` begins.
        letters = [t for t, data in enumerate(llm.tokenizer.token_bytes) if data.isalpha() and data[0] not in b"ntf"]
        quotes = [t for t, data in enumerate(llm.tokenizer.token_bytes) if data == b'"']
        # A string is begun where one may be, and never closed where it may go on.
        biases = dict.fromkeys(letters[:1000], 40.0) | dict.fromkeys(quotes, 20.0)

        def longest(schema: dict, pattern: str = r'"([^"]*)"?') -> int:
            never_closed = {"logit_bias": biases, "temperature": 0.0, "max_tokens": 200}
            text = llm.generate("x", grammar=Grammar.json_schema(schema), **never_closed)[0].text
            found = re.findall(pattern, text)
            assert found, text
            return max(map(len, found))

        closed = {"required": ["a"], "additionalProperties": False}
        for schema in (
            {"type": "object"},
            {"type": "object", "additionalProperties": {"type": "string"}},
            {"type": "object", "properties": {"a": {}}, **closed},
            {"type": "object", "properties": {"a": True}, **closed},
            {"type": "array", "minItems": 1},
        ):
            assert 8 <= longest(schema) <= 20, schema
        beside_listed = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 7}}}
        assert 8 <= longest(beside_listed, r'"([^"]*)":') <= 20
        for listed in (["a"], ["a", "ab", "b-]^"], ["", "é"]):
            beside = {"type": "object", "properties": {name: {"const": 1} for name in listed}}
            assert 8 <= longest(beside) <= 22, listed
        assert longest({"type": "object", "x-guidance": {"max_string_chars": None}}) > 100


def test_listed_names_keep_their_schema_beside_others() -> None:
    listed = {"a": {"const": 1}, "ab": {"const": 2}, "é-]": {"const": 3}, "": {"const": 5}}
    schema = {"type": "object", "properties": listed, "additionalProperties": {"type": "boolean"}}
    grammar = prepared(schema, 10)
    for text, is_allowed in {
        '{"a":1,"ab":2}': True,
        '{"a":true}': False,
        '{"ab":true}': False,
        '{"é-]":true}': False,
        '{"":true}': False,
        '{"é-]":3}': True,
        '{"":5}': True,
        '{"b":true,"abc":false,"é":true,"é-]x":true,"q":true}': True,
        '{"b":1}': False,
        '{"bbbbbbbbbb":true}': True,
        '{"bbbbbbbbbbb":true}': False,
    }.items():
        assert is_valid(grammar, text) == is_allowed, text


def is_valid(schema: dict, text: str) -> bool:
    """Whether a prepared schema allows a text, byte by byte."""
    tokenizer = byte_tokenizer()
    vocabulary = _Vocabulary(tokenizer.token_bytes, tokenizer.special_ids, tokenizer.eos_token_ids[0], tokenizer.encode)
    made = LLMatcher(LLTokenizer(TokenizerWrapper(vocabulary)), LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not made.is_error(), made.get_error()
    data = list(text.encode())
    return made.try_consume_tokens(data) == len(data) and made.is_accepting()


def test_schemas_that_limits_of_untyped_values_would_break_compile_without_them(llm: LLM) -> None:
    parts = [{"type": "object", "required": [name]} for name in "ab"]
    grammar = Grammar.json_schema({"allOf": parts, "maxProperties": 2})
    tokens = llm.generate("x", grammar=grammar, max_tokens=8, seed=1)[0].text
    assert tokens.startswith('{"a":')


def test_numbers_beyond_the_library_s_range_keep_their_bounds(llm: LLM) -> None:
    for low, high in ((-(2**63), 2**63 - 1), (2**62 + 1, 2**64), (-(2**70), -(2**53) - 1)):
        grammar = Grammar.json_schema({"type": "integer", "minimum": low, "maximum": high})
        for output in llm.generate("1", grammar=grammar, n=8, temperature=2.0, seed=1)[0].outputs:
            assert low <= int(output.text) <= high


def test_max_tokens_still_cuts(llm: LLM) -> None:
    result = llm.generate("x", grammar=Grammar.json_schema(SCHEMA), max_tokens=2)[0]
    assert result.outputs[0].finish_reason == "length"
    assert len(result.outputs[0].token_ids) == 2


OBJECT = {"type": "object"}


INTEGER = {"type": "integer"}


def schema_of(part: dict) -> Grammar:
    """A schema with the part at `properties.a.anyOf[1]`."""
    return Grammar.json_schema({"properties": {"b": {}, "a": {"anyOf": [{"type": "null"}, part]}}})


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar.json_schema({"type": "objekt"}), "type: 'objekt' is not a type; the types are array"),
        (Grammar("json_schema", '{"type"'), "the JSON schema is not valid JSON"),
        (Grammar.json_schema({"type": "object", "not": {}}), 'JSON schema cannot be used: "not" is not supported'),
        (
            schema_of({"type": "string", "pattern": "(a"}),
            "a.anyOf[1]: at character 1 of the regular expression: unclosed",
        ),
        (
            Grammar.json_schema(
                {"properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}}, "required": ["a"]} | OBJECT
            ),
            "properties.a: no JSON value can satisfy it",
        ),
        (schema_of({"$ref": "#/$defs/none"}), "a.anyOf[1]: $ref names #/$defs/none, which does not exist"),
        (schema_of({"uniqueItems": True}), 'properties.a.anyOf[1]: "uniqueItems" is not supported'),
        (schema_of({"const": -(2**63)}), "a.anyOf[1].const: -9223372036854775808 has more than 64 bits"),
        (schema_of({"enum": [1, {"b": 2**70}]}), "a.anyOf[1].enum: 1180591620717411303424 has more than 64 bits"),
        (
            schema_of({"type": "integer", "minimum": 2**63}),
            "a.anyOf[1].minimum: no number that can be generated is within",
        ),
        (Grammar.lark(f'start: %json {{"const": -{2**63}}}'), "has more than 64 bits"),
        (Grammar.lark('start: "a" %json {"properties": {"b": {"not": {}}}}'), 'properties.b: "not" is not supported'),
        (Grammar.regex("a(a"), "at character 2 of the regular expression: unclosed group"),
        (Grammar.regex(r"(a)\1"), "backreferences are not supported"),
        (Grammar.regex(r"a\b"), "word boundaries and other look-around are not supported"),
        (Grammar.lark("x: /a/\nstart: MISSING"), 'line 2, column 8: unknown name: "MISSING"'),
        (Grammar.lark('start: "a'), "line 1, column 10: this is not a token of the grammar's notation"),
        (Grammar.lark("x" * (MAX_FLAT_BYTES + 1)), "2048 KiB"),
        (Grammar.regex("x" * (MAX_GRAMMAR_BYTES + 1)), "256 KiB"),
        (Grammar.lark("\n" * (MAX_GRAMMAR_BYTES + 1)), "256 KiB"),
        (Grammar.lark("start: start"), "no text follows it"),
        (schema_of({"type": "string", "minLength": 2**70}), "'minLength' must be an integer of at most 64 bits"),
        (Grammar.lark("start: " + '\\"' * 30_000), "this is not a token of the grammar's notation"),
        (Grammar.lark("start: " + '"\\"' * 30_000 + "\\"), "this is not a token of the grammar's notation"),
        (Grammar.lark("start: " + "\\/" * 30_000), "this is not a token of the grammar's notation"),
        (
            Grammar.json_schema({"x-guidance": {"max_string_chars": "a"}, **INTEGER}),
            "max_string_chars must be an integer",
        ),
        (
            Grammar.json_schema({"x-guidance": {"max_string_chars": -1}, **INTEGER}),
            "max_string_chars must be an integer",
        ),
        (
            Grammar.json_schema({"x-guidance": {"max_string_chars": True}, **INTEGER}),
            "max_string_chars must be an integer",
        ),
        (Grammar.json_schema({"x-guidance": {"path": 1}, "type": "objekt"}), "x-guidance.path must be a string"),
        (Grammar.lark('start: %json {"x-guidance": {"path": []}}'), "x-guidance.path must be a string"),
        (schema_of({"format": ["date"], "not": {}}), 'properties.a.anyOf[1]: "not" is not supported'),
        (Grammar.json_schema({"type": "object", "properties": 5}), "JSON schema cannot be used"),
    ],
)
def test_a_grammar_that_cannot_be_used_fails_its_request_alone(llm: LLM, grammar: Grammar, says: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(says)) as failed:
        llm.generate("x", grammar=grammar)
    assert "\n" not in failed.value.message
    assert "start: /" not in failed.value.message
    assert llm.generate("x", max_tokens=3)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "chain",
    [
        Grammar.lark("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(12_000)) + 'r12000: "ab"'),
        Grammar.lark("start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(8_000)) + 'r8000: "ab"'),
        Grammar.lark("start: R0\n" + "".join(f"R{i}: R{i + 1}\n" for i in range(12_000)) + 'R12000: "ab"'),
        Grammar.json_schema(
            {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5_000)} | {"d5000": {"const": 7}}}
            | {"$ref": "#/$defs/d0"}
        ),
    ],
)
def test_rules_within_rules_do_not_end_the_process(llm: LLM, chain: Grammar) -> None:
    """On the stack of a usual thread a few thousand do: the library calls itself for each."""
    assert llm.generate("x", grammar=chain, max_tokens=3)[0].outputs[0].token_ids


def test_more_grammars_than_are_kept(llm: LLM) -> None:
    grammars = [Grammar.regex(f"{number:03}") for number in range(MAX_TENANT_COMPILED + 10)]
    for number, grammar in enumerate(grammars):
        assert llm.generate("x", grammar=grammar)[0].text == f"{number:03}"


def test_sampling_sees_the_mask_after_everything_else(llm: LLM) -> None:
    """A bias against them and stop ids give way: the text stays in the grammar."""
    digits = {token: -99.0 for token in range(llm.info.vocab_size) if llm.tokenizer.bytes_of(token) in b"0123456789"}
    result = llm.generate(
        "x",
        SamplingParams(temperature=1.0, logit_bias=digits, bad_words=[[token] for token in digits][:5]),
        StopParams(min_tokens=10, max_tokens=20),
        grammar=Grammar.regex("[0-9]{4}"),
    )[0]
    assert re.fullmatch("[0-9]{4}", result.text)


DIGITS = [token for token, data in enumerate(load_tokenizer("weft-tiny").token_bytes) if re.fullmatch(rb"[0-9]+", data)]
LETTER = load_tokenizer("weft-tiny").token_to_id("a")


@pytest.mark.parametrize(
    ("sampling", "fields"),
    [
        ({"allowed_token_ids": [LETTER]}, "allowed_token_ids"),
        ({"bad_words": [[token] for token in DIGITS]}, "bad_words"),
        ({"bad_words": [[LETTER, token] for token in DIGITS]}, "bad_words"),
        ({"logit_bias": dict.fromkeys(DIGITS, -100.0)}, "logit_bias"),
        (
            {"allowed_token_ids": DIGITS[:2], "bad_words": [[DIGITS[0]]], "logit_bias": {DIGITS[1]: -100.0}},
            "allowed_token_ids and bad_words and logit_bias",
        ),
    ],
)
def test_fields_that_leave_a_grammar_no_token_fail_the_request(llm: LLM, sampling: dict, fields: str) -> None:
    static = len(sampling) == 3
    if static:
        sampling["allowed_token_ids"] = sampling["allowed_token_ids"] + [LETTER]
    with pytest.raises(InvalidRequest, match=f"{fields} forbid every token that the grammar allows") as failed:
        llm.generate("Hi", SamplingParams(**sampling), grammar=Grammar.regex("a[0-9]{3}" if not static else "[0-9]{3}"))
    assert failed.value.param == "grammar"


@pytest.mark.parametrize(
    ("sampling", "stop", "fields"),
    [
        ({"bad_words": [[5]]}, {}, "bad_words"),
        ({"logit_bias": {5: -100.0}}, {}, "logit_bias"),
        ({}, {"min_tokens": 2, "stop_token_ids": [5]}, "min_tokens"),
    ],
)
def test_fields_that_leave_no_token_at_all_fail_the_request(llm: LLM, sampling: dict, stop: dict, fields: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{fields} forbid every token of allowed_token_ids"):
        llm.generate("Hi", SamplingParams(allowed_token_ids=[5], **sampling), StopParams(**stop, max_tokens=4))
    left = SamplingParams(allowed_token_ids=[5, 6], **sampling)
    assert llm.generate("Hi", left, StopParams(**stop, max_tokens=4))[0].token_ids


def test_what_a_grammar_leaves_no_choice_in_is_written_in_the_models_tokens(llm: LLM) -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    result = llm.generate("x", grammar=Grammar.choice([text]), temperature=1.0)[0]
    assert result.text == text
    assert result.token_ids == list(memoryview(llm.tokenizer.encode(text)).cast("i"))


def test_a_fault_with_a_mask_fails_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def bound(self: DigitRun, mask: object) -> None:
        raise TypeError("no such digit")

    with monkeypatch.context() as patched:
        patched.setattr(DigitRun, "bound", bound)
        with pytest.raises(InvalidRequest, match="cannot be followed: TypeError: no such digit"):
            llm.generate("x", grammar=Grammar.json_schema(INTEGER), max_tokens=5)
        assert llm.generate("x", grammar=Grammar.regex("[0-9]{3}"))[0].text.isdigit()
    assert llm.generate("x", grammar=Grammar.json_schema(INTEGER), max_tokens=5)[0].token_ids


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema({"x-guidance": {}}),
        Grammar("json_schema", '{"x\\u002dguidance": {"max_string_chars": null}}'),
        Grammar.lark('start: "a" %json {"type": "string", "x-guidance": {"max_string_chars": null}}'),
        Grammar.lark('start: %lark {\n start: %json {"x\\u002dguidance": 1}\n}'),
    ],
)
def test_options_of_a_callers_schema_are_refused(grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest, match='"x-guidance" cannot be set in a JSON schema; leave it out'):
        refuse_options(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema({"properties": {"x-guidance": {"type": "string"}}}),
        Grammar.json_schema({"description": 'Not "x-guidance".'}),
        Grammar.regex('"x-guidance"'),
        Grammar.lark('start: "\\"x-guidance\\""'),
        Grammar("json_schema", '{"x-guidance":'),
    ],
)
def test_what_sets_no_options_is_not_refused(grammar: Grammar) -> None:
    refuse_options(grammar)


def test_a_grammar_that_gets_no_thread_is_refused_and_compiled_for_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = byte_tokenizer()
    encode = partial(tokenizer.encode, add_special_tokens=False)
    grammars = Grammars(tokenizer.token_bytes, tokenizer.special_ids, tokenizer.eos_token_ids, encode)
    grammar = Grammar.regex("ab")

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    try:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            assert grammars.is_ready(grammar, "a")
            with pytest.raises(Overloaded, match="thread"):
                grammars.guide(grammar, "a")
        assert grammars.guide(grammar, "a").matcher is not None
    finally:
        grammars.close()
