"""Forms that a request asks for, under all their names: the grammar that the engine gets."""

from __future__ import annotations

import json

import pytest

from tests.server.conftest import RunningServer
from tests.server.test_requests import error_of
from weft.core.grammar import Grammar
from weft.core.wire import Generate

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PATHS = ("/v1/chat/completions", "/v1/completions")
both = pytest.mark.parametrize("path", PATHS)


PLACES = [f"place number {number}" for number in range(10_000)]


def wrapped(**schema) -> dict:
    return {"type": "json_schema", "json_schema": schema}


def post(server: RunningServer, path: str, **fields):
    given = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": ["hi", "ho"]}
    return server.post(path, given | {"max_tokens": 4} | fields)


def grammars(server: RunningServer, path: str, **fields) -> list[Grammar | None]:
    """Of every choice."""
    server.on_loop(server.engine.sent.clear)
    response = post(server, path, **fields)
    assert response.status_code == 200, response.text
    return [c.grammar for c in server.on_loop(lambda: list(server.engine.sent)) if isinstance(c, Generate)]


@both
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        (
            {"response_format": wrapped(name="x", schema=SCHEMA)},
            Grammar.json_schema(SCHEMA),
        ),
        (
            {"response_format": wrapped(name="x", strict=True, schema={})},
            Grammar.json_schema({}),
        ),
        ({"guided_json": SCHEMA}, Grammar.json_schema(SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar.json_schema(SCHEMA)),
        ({"guided_regex": r"\d+/\d+"}, Grammar.regex(r"\d+/\d+")),
        ({"guided_choice": ["yes", "no"]}, Grammar.choice(["yes", "no"])),
        ({"guided_grammar": 'start: "a"+'}, Grammar.lark('start: "a"+')),
        ({"guided_grammar": 'start: "::="\nx: "root ::= 1"'}, Grammar.lark('start: "::="\nx: "root ::= 1"')),
        ({"guided_grammar": '# a\n root ::= "a" [b]\n'}, Grammar.lark('start : "a" /[b]/\n')),
        ({"structured_outputs": {"grammar": 'root::="a"'}}, Grammar.lark('start : "a"\n')),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar.json_schema(SCHEMA)),
        ({"structured_outputs": {"regex": "a+", "json": None}}, Grammar.regex("a+")),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar.choice(["a"])),
        ({"guided_choice": PLACES}, Grammar.choice(PLACES)),
        ({"structured_outputs": {"choice": PLACES}}, Grammar.choice(PLACES)),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar.lark('start: "a"')),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, Grammar.regex("a")),
        ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"},
            Grammar.json_schema({"x-guidance": {"whitespace_pattern": "[ ]?"}} | SCHEMA),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": r"\s*"}},
            Grammar.json_schema({"x-guidance": {"whitespace_pattern": r"\s*"}} | SCHEMA),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            Grammar.json_schema({"x-guidance": {"whitespace_flexible": False}} | SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}, Grammar.json_schema(SCHEMA)),
    ],
)
def test_every_choice_gets_the_grammar(server: RunningServer, path: str, fields: dict, grammar: Grammar | None) -> None:
    choices = 2 if "chat" in path else 4
    assert grammars(server, path, n=2, **fields) == [grammar] * choices


@both
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": ["text"] * 1000}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": wrapped(name="x", schema={"x-guidance": {"max_string_chars": "a"}, "type": "integer"})},
            "response_format",
        ),
        ({"guided_json": {"x-guidance": {"max_string_chars": None}}}, "guided_json"),
        ({"guided_json": r'{"x\u002dguidance": {}}', "guided_whitespace_pattern": ""}, "guided_json"),
        ({"structured_outputs": {"json": {"x-guidance": {}}}}, "structured_outputs.json"),
        ({"guided_grammar": 'start: %json {"x-guidance": {"max_string_chars": 0}}'}, "guided_grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": {"description": "x" * 70_000}}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_choice": ["x" * 1000] * 1100}, "guided_choice"),
        ({"guided_json": '{"items":' * 5000 + "{}" + "}" * 5000}, "guided_json"),
        ({"guided_regex": "x" * 70_000}, "guided_regex"),
        ({"guided_grammar": "start: /" + "x" * 70_000 + "/"}, "guided_grammar"),
        ({"guided_grammar": 'root ::= "a"\nb ::= c'}, "guided_grammar"),
        ({"guided_grammar": 'expr ::= "a"'}, "guided_grammar"),
        ({"structured_outputs": {"grammar": 'root ::= "a'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"xml": True}}, "structured_outputs.xml"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": 5}}, "structured_outputs.whitespace_pattern"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_wrong_forms_are_named(server: RunningServer, path: str, fields: dict, param: str) -> None:
    error = error_of(post(server, path, **fields))
    assert error["param"] == param
    assert param in error["message"]


def test_gbnf_that_is_none_says_in_which_line(server: RunningServer) -> None:
    error = error_of(post(server, PATHS[1], guided_grammar='root ::= "a"\n\nb ::= c'))
    assert error["message"] == "guided_grammar, read as GBNF: line 3 of the grammar refers to an undefined rule: c."


@both
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_compiler_says_is_about_the_field(server: RunningServer, path: str, stream: bool) -> None:
    server.on_loop(lambda: server.engine.fail_next("invalid_request", "the regular expression is wrong", "grammar"))
    error = error_of(post(server, path, guided_regex="(", stream=stream))
    assert (error["param"], error["message"]) == ("guided_regex", "guided_regex: the regular expression is wrong")


def test_other_errors_keep_their_field(server: RunningServer) -> None:
    server.on_loop(lambda: server.engine.fail_next("invalid_request", "no", "seed"))
    assert error_of(server.chat(guided_regex="a"))["param"] == "seed"


def test_a_conflict_is_named_by_both_fields(server: RunningServer) -> None:
    said = "allowed_token_ids forbid every token that the grammar allows here; leave one of them out"
    server.on_loop(lambda: server.engine.fail_next("invalid_request", said, "grammar"))
    error = error_of(server.chat(guided_regex="a", allowed_token_ids=[1]))
    assert (error["param"], error["message"]) == ("guided_regex", f"guided_regex: {said}")


def test_a_type_that_is_not_a_string_is_named_without_its_content(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    answer = server.post("/v1/chat/completions", {"messages": messages, "response_format": {"type": ["text", 1]}})
    assert "got a value of type list" in error_of(answer)["message"]
