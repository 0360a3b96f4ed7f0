"""JSON schemas as llguidance compiles them, from JSON schemas as callers write them.

Owns what differs: numbers that the library would round or that end its process, `format` as an annotation, the length
of strings and of names, white space, and how an error names the place in the schema. A schema may have options of its
own under `x-guidance`, the library's key, at its top: those of the library, `max_string_chars` (null: no limit) and
`path`, the name of the schema in errors. Weft writes them; `refuse_options` refuses those of requests and programs,
which could otherwise switch off the limits of the engine's configuration.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

from weft.abi.errors import InvalidRequest
from weft.core.grammar import Grammar

MAX_DEPTH = 100
MAX_LOCATED = 200
"""Parts of a schema that are compiled alone to find the one that is wrong."""
MAX_LISTED_CHARS = 1024
"""Characters of the listed names of an object, up to which a pattern excludes them from other names."""
MAX_INT = 2**63 - 1024
"""The largest bound of an integer that llguidance, which reads bounds as float64, keeps exactly."""
MAX_NUMBER = 1e15
"""The largest bound of a number that it writes without an exponent, which its grammar of numbers does not have."""
COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""At most one space behind a comma or a colon, and no other white space."""
OPTIONS = "x-guidance"
NO_OPTIONS = (
    f'"{OPTIONS}" cannot be set in a JSON schema; leave it out. The length of a string is set by maxLength, and white '
    "space by fields of the request"
)
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Formats that the library holds strings to; any other is an annotation."""
TYPES = frozenset(("null", "boolean", "number", "integer", "string", "array", "object"))
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains")
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_FIXES_VALUE = ("enum", "const", "$ref", "anyOf", "oneOf", "allOf")
"""Keywords beside which a schema gets no limits: they say the value, or their parts get the limits."""
_FIXES_TEXT = ("maxLength", "pattern", "format")
_ESCAPED = re.compile(r'["\\\x00-\x1f\x7f]')
"""Characters of names that JSON writes as escapes, which the library's complement of a class does not see."""
_END = r"(?=\n)|\\?\Z"
_LARK = re.compile(
    rf'"(?:\\.|[^"\\\n])*(?:"|{_END})|/(?!/)(?:\\.|[^/\\\n])+(?:/|{_END})|//[^\n]*|#[^\n]*|%json\b\s*', re.S
)
"""Literals, comments and `%json`. A literal without an end goes on to that of its line, so that no character is read
twice: the library refuses it later."""


class SchemaBlock(NamedTuple):
    """A schema within a grammar."""

    schema: Any
    path: str
    """What errors call it; empty where there is only one."""


def prepared(schema: Any, max_string_chars: int | None, *, limits_untyped: bool = True) -> Any:
    """The schema for llguidance. Raises `InvalidRequest` for what cannot be kept, naming the place in the schema.

    `max_string_chars` limits strings whose schema does not, unless the schema's options say otherwise; with
    `limits_untyped` also values of any type, and names and values of properties that are not listed. The library cannot
    intersect some such schemas (`allOf`): then it reports an error.
    """
    if not isinstance(schema, dict):
        if schema is False:
            return schema
        schema = {}
    given = schema.get(OPTIONS)
    options = dict(given) if isinstance(given, dict) else {}
    limit = limit_of(schema, max_string_chars)
    options.pop("max_string_chars", None)
    path = options.pop("path", "")
    if not isinstance(path, str):
        raise InvalidRequest(f"{OPTIONS}.path must be a string, got {path!r:.60}", "grammar")
    body = {key: value for key, value in schema.items() if key != OPTIONS}
    return {OPTIONS: options or COMPACT, **_Walk(limit, path, limits_untyped).root(body)}


def prepared_lark(text: str, max_string_chars: int | None, *, limits_untyped: bool = True) -> str:
    """A grammar in Lark with its `%json` schemas prepared."""
    parts, end = [], 0
    for start, stop, schema in _blocks(text):
        block = prepared(schema, max_string_chars, limits_untyped=limits_untyped)
        parts += [text[end:start], json.dumps(block, ensure_ascii=False)]
        end = stop
    return "".join([*parts, text[end:]])


def blocks(text: str) -> list[SchemaBlock]:
    """The `%json` schemas of a grammar in Lark."""
    found = []
    for _, _, schema in _blocks(text):
        options = schema.get(OPTIONS) if isinstance(schema, dict) else None
        found.append(SchemaBlock(schema, options.get("path", "") if isinstance(options, dict) else ""))
    return found


def refuse_options(grammar: Grammar) -> None:
    """Raise `InvalidRequest` for a grammar that sets options of its own in a JSON schema."""
    # A key that is not written as it is has an escape.
    if grammar.kind == "regex" or not (f'"{OPTIONS}"' in grammar.text or "\\u" in grammar.text):
        return
    if grammar.kind == "lark":
        schemas = [block.schema for block in blocks(grammar.text)]
    else:
        try:
            schemas = [json.loads(grammar.text)]
        except (ValueError, RecursionError):
            return  # refused when it is compiled
    if any(isinstance(schema, dict) and OPTIONS in schema for schema in schemas):
        raise InvalidRequest(NO_OPTIONS, "grammar")


def located(schema: Any, compile_error: Callable[[Any], str]) -> tuple[str, str]:
    """Where in a schema that does not compile the error is, and the error. `compile_error` is empty for a schema that
    compiles."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}
    budget, path, message = MAX_LOCATED, [""][:0], compile_error(schema)
    while isinstance(schema, dict) and budget > 0:
        for steps, child in _children(schema):
            budget -= 1
            if budget <= 0 or not isinstance(child, dict):
                continue
            error = compile_error({**shared, **child})
            if error:
                path, schema, message = [*path, *steps], child, error
                break
        else:
            break
    return dotted(path), message


def dotted(steps: list[str] | tuple[str, ...]) -> str:
    """A place in a schema: `properties.age.anyOf[1]`."""
    return re.sub(r"\.(?=\[)", "", ".".join(steps))


class _Walk:
    """One schema on its way to llguidance."""

    def __init__(self, max_string_chars: int | None, path: str, limits_untyped: bool):
        self._limit = max_string_chars
        self._path = path
        self._limits_untyped = limits_untyped and bool(max_string_chars)
        self._any_value: Any = True
        """A value of any type. With limits on untyped values, a reference to a definition that `root` adds."""

    def root(self, value: dict[str, Any]) -> dict[str, Any]:
        """The outermost schema."""
        if not self._limits_untyped:
            return cast(dict[str, Any], self.schema(value, (), 0))
        given = value.get("$defs")
        definitions = given if isinstance(given, dict) else {}
        name = "any"
        while name in definitions:
            name += "_"
        self._any_value = {"$ref": f"#/$defs/{name}"}
        result = self.schema(value, (), 0)
        if isinstance(given, dict) or given is None:
            result["$defs"] = {**result.get("$defs", {}), name: self.schema({}, (), 0)}
        return cast(dict[str, Any], result)

    def schema(self, value: Any, at: tuple[str, ...], depth: int) -> Any:
        """The value in the place of a schema."""
        if value is True or (value == {} and at):
            return self._any_value
        if not isinstance(value, dict):
            return value
        if depth > MAX_DEPTH:
            self._fail(at[:3], f"it nests deeper than {MAX_DEPTH} levels")
        result = dict(value)
        for steps, child in _children(value):
            _put(result, steps, self.schema(child, (*at, *steps), depth + 1))
        self._check_type(value, at)
        for key in ("const", "enum"):
            self._check_literal(value.get(key), (*at, key), 0)
        known = value.get("format")
        if not isinstance(known, str) or known not in FORMATS:
            result.pop("format", None)
        self._bound_numbers(result, at)
        if self._limit and not any(key in result for key in _FIXES_VALUE):
            self._bound_texts(result, self._limit)
        return result

    def _bound_texts(self, schema: dict[str, Any], limit: int) -> None:
        """Lengths of strings and of names that the schema leaves open, here and in values of any type below."""
        given = schema.get("type", list(TYPES) if self._limits_untyped else [])
        kinds = given if isinstance(given, list) else [given]
        if "string" in kinds and not any(key in schema for key in _FIXES_TEXT):
            schema["maxLength"] = max(limit, _least_length(schema))
        if not self._limits_untyped:
            return
        if "array" in kinds and schema.get("items", True) is True:
            schema["items"] = self._any_value
        further = schema.get("additionalProperties", True)
        if "object" not in kinds or further is False or schema.get("patternProperties"):
            return
        listed = [*schema.get("properties", ())]
        pattern = f"^(?s:.{{0,{limit}}})$"
        if sum(map(len, listed)) <= MAX_LISTED_CHARS and not any(map(_ESCAPED.search, listed)):
            pattern = _other_names(listed, limit) if listed else pattern
            further = self._any_value if further is True else further
        elif further is not True:
            return
        # Beside more names, or names with escapes, values have no limit: the pattern holds for listed names, too.
        schema["patternProperties"] = {pattern: further}
        schema["additionalProperties"] = False

    def _check_type(self, value: dict[str, Any], at: tuple[str, ...]) -> None:
        kinds = value.get("type", [])
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if not isinstance(kind, str) or kind not in TYPES:
                self._fail((*at, "type"), f"{kind!r:.60} is not a type; the types are {', '.join(sorted(TYPES))}")

    def _check_literal(self, value: Any, at: tuple[str, ...], depth: int) -> None:
        if isinstance(value, float) and not math.isfinite(value):
            self._fail(at, "the number is too large for JSON")
        if isinstance(value, int) and abs(value) >= 2**63:
            self._fail(at, f"{str(value)[:40]} has more than 64 bits; write it as a string")
        if depth > MAX_DEPTH:
            self._fail(at[:3], f"it nests deeper than {MAX_DEPTH} levels")
        entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for entry in entries:
            self._check_literal(entry, at, depth + 1)

    def _bound_numbers(self, schema: dict[str, Any], at: tuple[str, ...]) -> None:
        """Bounds that a float64 holds, never wider than those given."""
        limit = MAX_INT if schema.get("type") == "integer" else MAX_NUMBER
        for keywords, sign in ((_LOWER, 1), (_UPPER, -1)):
            for key in keywords:
                bound = schema.get(key)
                if not isinstance(bound, int | float) or isinstance(bound, bool):
                    continue
                # Turned so that the bound is a lower one.
                low = bound * sign
                if low > limit:
                    self._fail((*at, key), f"no number that can be generated is within {str(bound)[:40]}")
                schema[key] = sign * (_float_at_least(low) if low > -limit else -limit)

    def _fail(self, at: tuple[str, ...], message: str) -> None:
        place = ".".join(part for part in (self._path, dotted(at)) if part)
        raise InvalidRequest(f"{place}: {message}" if place else message, "grammar")


def _float_at_least(value: float) -> float:
    """The least float64 that is not below the number; integers stay integers."""
    found = float(value)
    if found < value:
        found = math.nextafter(found, math.inf)
    return int(found) if found.is_integer() else found


def _other_names(listed: list[str], limit: int) -> str:
    """A pattern of all names but the listed ones, of at most `limit` characters, or one more than the longest of them.
    The library's patterns have no look-ahead, so it follows the tree of the listed names and leaves it at every
    character."""

    def after(rests: list[str], room: int) -> str:
        """What may follow a common beginning so that the whole is none of those that end with `rests`."""
        if rests == [""]:
            return f"(?s:.{{1,{room}}})"
        firsts = sorted({rest[0] for rest in rests if rest})
        others = "".join("\\" + char if char in "^-]\\[&~" else char for char in firsts)
        options = [] if "" in rests else [""]
        options.append(f"[^{others}](?s:.{{0,{room - 1}}})")
        for char in firsts:
            options.append(re.escape(char) + after([rest[1:] for rest in rests if rest[:1] == char], room - 1))
        return f"({'|'.join(options)})"

    return f"^{after(sorted(set(listed)), max(limit, 1 + max(map(len, listed))))}$"


def limit_of(schema: Any, max_string_chars: int | None) -> int | None:
    """The limit of a schema's strings and of the digits of its numbers: its own option, else `max_string_chars`. Raises
    `InvalidRequest` for an option that is no limit."""
    options = schema.get(OPTIONS) if isinstance(schema, dict) else None
    limit = options.get("max_string_chars", max_string_chars) if isinstance(options, dict) else max_string_chars
    if limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0):
        return limit
    raise InvalidRequest(
        f"{OPTIONS}.max_string_chars must be an integer that is not negative, or null for no limit; got {limit!r:.60}",
        "grammar",
    )


def _least_length(schema: dict[str, Any]) -> int:
    least = schema.get("minLength")
    return least if isinstance(least, int) else 0


def _children(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The schemas directly within a schema, each with the steps that lead to it."""
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            yield from (((key, name), child) for name, child in schema[key].items())
    for key in (*_LISTS, "items"):
        if isinstance(schema.get(key), list):
            yield from (((key, f"[{number}]"), child) for number, child in enumerate(schema[key]))
    for key in _SCHEMAS:
        if isinstance(schema.get(key), dict):
            yield (key,), schema[key]


def _put(schema: dict[str, Any], steps: tuple[str, ...], child: Any) -> None:
    """Replace a schema within a schema, whose containers are copied."""
    key, *rest = steps
    if not rest:
        schema[key] = child
    elif rest[0].startswith("[") and isinstance(schema[key], list):
        schema[key] = [*schema[key]]
        schema[key][int(rest[0][1:-1])] = child
    else:
        schema[key] = {**schema[key], rest[0]: child}


def _blocks(text: str) -> Iterator[tuple[int, int, Any]]:
    """The `%json` schemas of a grammar in Lark, with their places. Invalid JSON is left to llguidance."""
    decoder, at = json.JSONDecoder(), 0
    while (match := _LARK.search(text, at)) is not None:
        at = match.end()
        if match[0].startswith("%json"):
            try:
                schema, at = decoder.raw_decode(text, match.end())
            except (ValueError, RecursionError):
                continue
            yield match.end(), at, schema
