"""Grammars as llguidance reads them, and its errors in the terms of the caller's grammar."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from weft.abi.errors import InvalidRequest, WeftError
from weft.core.grammar import Grammar
from weft.engine import json_schema

MAX_JSON_STRING_CHARS = 4096
"""Of a string in JSON whose schema sets no length, where the configuration does not say otherwise."""
MAX_MESSAGE = 500
CompileError = Callable[[str], str]
"""Compiles a grammar in llguidance's form: the error, or an empty text."""
_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
_REGEX = re.compile(r"regex parse error:\n {4}[^\n]*\n {4}( *)\^+\nerror: ([^\n]*)")
_POSITION = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_PHRASES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"lookarounds not supported yet.*", re.S), r"word boundaries and other look-around are not supported"),
    (re.compile(r'Unimplemented keys: \["(.*)"\]'), r'"\1" is not supported'),
    (re.compile(r"Unsatisfiable schema: (.*)", re.S), r"no JSON value can satisfy it: \1"),
    (re.compile(r"Expected f64 for"), "expected a number for"),
    (
        re.compile(r"oneOf constraints are not supported.*", re.S),
        "oneOf with overlapping options is not supported; use anyOf",
    ),
    (re.compile(r"Pointer '(.*?)' does not exist"), r"$ref names #\1, which does not exist"),
    (
        re.compile(r"Resource '(.*?)' is not present.*", re.S),
        r"$ref names \1; only places within the schema can be named",
    ),
    (re.compile(r"Failed to generate regex for \w+ range.*", re.S), "no number can be generated within its bounds"),
    (re.compile(r"lexer error"), "this is not a token of the grammar's notation"),
    (re.compile(r" \(at .*", re.S), ""),
    (re.compile(r"; following (?:special tokens )?are available.*", re.S), ""),
    (re.compile(r'invalid regex "(?:.*)" \(in regex\): ', re.S), ""),
    (re.compile(r"Expected positive integer for ('\w+'), got \S+"), r"\1 must be an integer of at most 64 bits"),
    (re.compile(r".*grammar\) too big.*", re.S), "it is too large once its terminals are put together"),
)


def compiled_grammar(grammar: Grammar, vocabulary: LLTokenizer, max_string_chars: int | None) -> LLMatcher:
    """Compile a grammar over the tokens of a vocabulary, within the stack of the thread. Raises `InvalidRequest` for
    one that cannot be followed, naming the place."""
    message = ""
    # Schemas that the library cannot intersect once untyped values are limited compile without those limits.
    for limits_untyped in (True, False):
        try:
            text = translated(grammar, max_string_chars, limits_untyped=limits_untyped)
            matcher = LLMatcher(vocabulary, text, log_level=0)
            message = matcher.get_error() if matcher.is_error() else ""
        except WeftError:
            raise
        except Exception as error:  # every error that a caller's text causes in llguidance is the caller's
            message = str(error) or type(error).__name__
        if not message:
            return matcher

    def error_of(text: str) -> str:
        try:
            matcher = LLMatcher(vocabulary, text, log_level=0)
        except Exception as error:  # as above
            return str(error) or type(error).__name__
        return matcher.get_error() if matcher.is_error() else ""

    raise InvalidRequest(explained(grammar, message, error_of), "grammar")


def check_grammar(grammar: Grammar) -> None:
    """Raise `InvalidRequest` for a caller's grammar that no engine can follow with any tokens, naming the place.
    Compiles within the stack of the thread: not for grammars that may be nested without a bound."""
    json_schema.refuse_options(grammar)
    compiled_grammar(grammar, _bytes_alone(), MAX_JSON_STRING_CHARS)


@functools.cache
def _bytes_alone() -> LLTokenizer:
    return LLTokenizer("byte")


def translated(grammar: Grammar, max_string_chars: int | None, *, limits_untyped: bool = True) -> str:
    """The grammar in llguidance's form; the limits as in `json_schema.prepared`. Raises `InvalidRequest` for what
    cannot be kept, naming the place."""
    match grammar.kind:
        case "json_schema":
            schema = _decoded(grammar.text)
            return _of_schema(json_schema.prepared(schema, max_string_chars, limits_untyped=limits_untyped))
        case "regex":
            return str(LLMatcher.grammar_from_regex(grammar.text))
        case "lark":
            text = json_schema.prepared_lark(grammar.text, max_string_chars, limits_untyped=limits_untyped)
            return str(LLMatcher.grammar_from_lark(text))


def max_digits(grammar: Grammar, max_string_chars: int | None) -> int | None:
    """Most digits in a row of a number, None: no limit. It is that of strings, and holds for JSON schemas alone: in
    other grammars it is not known which digits are those of numbers."""
    if grammar.kind != "json_schema":
        return None
    return json_schema.limit_of(_decoded(grammar.text), max_string_chars)


def explained(grammar: Grammar, message: str, compile_error: CompileError) -> str:
    """What is wrong with a grammar of which llguidance says `message`, and where."""
    name = f"the {_NAMES[grammar.kind]} cannot be used"
    if grammar.kind == "json_schema":
        return f"{name}: {_schema_error(_decoded(grammar.text), '', compile_error)}"
    if grammar.kind == "lark" and "failed to compile JSON schema" in message:
        for block in json_schema.blocks(grammar.text):
            error = _schema_error(block.schema, block.path, compile_error)
            if error:
                return f"{name}: {error}"
    return f"{name}: {phrased(message, with_position=grammar.kind == 'lark')}"


def phrased(message: str, *, with_position: bool = True) -> str:
    """A message of llguidance without its internals."""
    position = _POSITION.match(message)
    regex = _REGEX.search(message)
    if regex is not None:
        text = f"at character {len(regex[1]) + 1} of the regular expression: {regex[2]}"
    else:
        text = message[position.end() :] if position is not None else message
        text = text.split("\n   1 | ")[0]
        for pattern, words in _PHRASES:
            text = pattern.sub(words, text)
    if position is not None and with_position:
        text = f"line {position[1]}, column {position[2]}: {text}"
    return short(text)


def _schema_error(schema: Any, path: str, compile_error: CompileError) -> str:
    """Where a schema cannot be compiled, and why; empty for one that can."""

    def error_of(part: Any) -> str:
        try:
            return compile_error(_of_schema(json_schema.prepared(part, None)))
        except InvalidRequest as error:
            return error.message
        except Exception as error:  # as in `compiled_grammar`
            return str(error) or type(error).__name__

    place, message = json_schema.located(schema, error_of)
    if not message:
        return ""
    place = ".".join(part for part in (path, place) if part)
    return f"{place}: {phrased(message)}" if place else phrased(message)


def _of_schema(schema: Any) -> str:
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False)))


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the JSON schema is not valid JSON: {short(str(error))}", "grammar") from error


def short(message: str) -> str:
    """The message on one line, cut to `MAX_MESSAGE` characters."""
    return " ".join(message.split())[:MAX_MESSAGE]
