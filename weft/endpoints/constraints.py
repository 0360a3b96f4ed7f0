"""The fields of a request that constrain its text, under the names of OpenAI and vLLM, converted to one grammar.

Owns those fields and their limits. The engine compiles the grammar; `named` gives an error of the compilation the name
of the request's field.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec

from weft.abi.errors import InvalidRequest, Unsupported
from weft.abi.errors import InvalidRequest as SdkInvalidRequest
from weft.core.grammar import Grammar
from weft.endpoints.schemas.common import GenerationRequest
from weft.engine import json_schema
from weft.programs.types import Chunk
from weft.text import gbnf

MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICE_BYTES = 1 << 20
"""Of the strings that a text may be: they are one automaton, which is compiled in a second."""
MAX_CHOICE_STRINGS = 1 << 16
"""Each takes time beside its bytes; it may have none."""
FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_BLANKS = ("whitespace_pattern", "disable_any_whitespace")
"""Options of `structured_outputs` about white space in JSON."""
_GBNF = re.compile(r"^[ \t]*[A-Za-z][\w-]*\s*::=", re.M)
"""Matches the first line of a rule in GBNF and nothing in Lark."""
OPTIONS = json_schema.OPTIONS
"""The key of a JSON schema that holds options of its grammar. A request's schema may not have it."""
Blanks = Mapping[str, str | bool]


class Constraint(NamedTuple):
    """A grammar, and the field that asks for it."""

    grammar: Grammar
    param: str


def constraint_of(body: GenerationRequest) -> Constraint | None:
    """The constraint of a request, or None. Raises `InvalidRequest` and `Unsupported`, naming the field."""
    found = []
    blanks = None
    if body.guided_whitespace_pattern is not None:
        blanks = _whitespace("guided_whitespace_pattern", {"whitespace_pattern": body.guided_whitespace_pattern})
    for field in FIELDS:
        value = getattr(body, field)
        grammar = None if value is None else _grammar(field, value, blanks)
        if grammar is not None:
            found.append(Constraint(grammar, field))
    if len(found) > 1:
        fields = " and ".join(constraint.param for constraint in found)
        raise InvalidRequest(f"{fields} exclude each other: a text can have one form. Leave one.", found[1].param)
    return found[0] if found else None


async def named(chunks: AsyncGenerator[Chunk, None], param: str) -> AsyncGenerator[Chunk, None]:
    """Pass the chunks on. An error about the grammar gets the name of the request's field. Closes `chunks`."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield chunk
        except (InvalidRequest, Unsupported) as error:
            if error.param == "grammar":
                raise type(error)(f"{param}: {error.message}", param) from error
            raise


def check_size(size: int, param: str, most: int = MAX_GRAMMAR_BYTES) -> None:
    """Raise `InvalidRequest` for a schema or a grammar of too many bytes."""
    if size > most:
        raise InvalidRequest(f"{param} has {size} bytes, at most {most}.", param)


def _grammar(field: str, value: Any, blanks: Blanks | None) -> Grammar | None:
    match field:
        case "response_format":
            grammar = _response_format(value, blanks)
        case "structured_outputs":
            given = {key: entry for key, entry in value.items() if entry is not None and entry is not False}
            own = {key: given.pop(key) for key in _BLANKS if key in given}
            if len(given) != 1 or not set(given) <= set(_KINDS):
                options = " and ".join(_BLANKS)
                raise InvalidRequest(
                    f"{field} must have exactly one of {', '.join(_KINDS)}; beside it, {options} are known.", field
                )
            (kind,) = given
            blanks = _whitespace(field, own) if own else blanks
            grammar = _of_kind(kind, given[kind], f"{field}.{kind}", blanks)
        case _:
            grammar = _of_kind(field.removeprefix("guided_"), value, field, blanks)
    return grammar


def _whitespace(field: str, given: Mapping[str, Any]) -> Blanks:
    """The white space that JSON may have, as an option of its grammar."""
    pattern = given.get("whitespace_pattern")
    if given.get("disable_any_whitespace") or pattern == "":
        return {"whitespace_flexible": False}
    if not isinstance(pattern, str):
        path = f"{field}.whitespace_pattern"
        raise InvalidRequest(f"{path} must be a regular expression, a string.", path)
    return {"whitespace_pattern": pattern}


def _response_format(value: Mapping[str, Any], blanks: Blanks | None) -> Grammar | None:
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return _json({"type": "object"}, "response_format", blanks)
        case "json_schema":
            path = "response_format.json_schema"
            wrapper = value.get("json_schema")
            if not isinstance(wrapper, dict):
                raise InvalidRequest(f'{path} must be an object with a "name" and a "schema".', path)
            if not isinstance(wrapper.get("name"), str):
                raise InvalidRequest(f"{path}.name must be a string.", f"{path}.name")
            if not isinstance(wrapper.get("schema"), dict):
                raise InvalidRequest(f"{path}.schema must be a JSON schema, an object.", f"{path}.schema")
            return _json(wrapper["schema"], "response_format", blanks)
        case other:
            # Only of a string: the representation of a list is made whole before it is cut.
            got = repr(other[:60]) if isinstance(other, str) else f"a value of type {type(other).__name__}"
            raise InvalidRequest(
                f"response_format.type must be text, json_object or json_schema, got {got}.",
                "response_format.type",
            )


def _of_kind(kind: str, value: Any, path: str, blanks: Blanks | None) -> Grammar:
    if kind == "json_object":
        if value is not True:
            raise InvalidRequest(f"{path} must be true.", path)
        return _json({"type": "object"}, path, blanks)
    if kind == "json":
        if isinstance(value, str):
            check_size(len(value), path)
            try:
                value = msgspec.json.decode(value)
            except (msgspec.DecodeError, RecursionError) as error:
                raise InvalidRequest(f"{path} is not valid JSON: {error}.", path) from error
        if not isinstance(value, dict):
            raise InvalidRequest(f"{path} must be a JSON schema: an object, or its text.", path)
        return _json(value, path, blanks)
    if kind == "choice":
        if isinstance(value, list) and len(value) > MAX_CHOICE_STRINGS:
            raise InvalidRequest(f"{path} has {len(value):,} strings, at most {MAX_CHOICE_STRINGS:,}.", path)
        if not isinstance(value, list) or not value or not all(isinstance(option, str) for option in value):
            raise InvalidRequest(f"{path} must be a list of at least one string.", path)
        check_size(sum(len(option.encode(errors="replace")) for option in value), path, MAX_CHOICE_BYTES)
        return Grammar.choice(value)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{path} must be a string that is not empty.", path)
    check_size(len(value.encode(errors="replace")), path)
    if kind == "regex":
        return Grammar.regex(value)
    grammar = Grammar.lark(_lark(value, path) if _GBNF.search(value) else value)
    check_size(len(grammar.text.encode(errors="replace")), path)
    try:
        json_schema.refuse_options(grammar)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error.message}.", path) from error
    return grammar


def _lark(rules: str, path: str) -> str:
    """Convert a grammar from GBNF to Lark."""
    try:
        return gbnf.to_lark(rules)
    except SdkInvalidRequest as error:
        raise InvalidRequest(f"{path}, read as GBNF: {error}.", path) from error


def _json(schema: Mapping[str, Any], path: str, blanks: Blanks | None) -> Grammar:
    check_size(len(msgspec.json.encode(schema)), path)
    if OPTIONS in schema:
        raise InvalidRequest(f"{path}: {json_schema.NO_OPTIONS}.", path)
    return Grammar.json_schema(schema if blanks is None else {OPTIONS: blanks, **schema})
