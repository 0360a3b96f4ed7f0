"""Grammars of whole answers: reasoning, if the model writes it, then tool calls or text under a constraint.

They are written in llguidance's dialect of Lark. Calls have the white space that chat templates give them. The tools
come from `weft.endpoints.tools`, the constraints from `weft.endpoints.constraints`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from weft.core.grammar import Grammar, Trigger
from weft.endpoints.constraints import OPTIONS, Constraint
from weft.endpoints.dialect import CALL_ID, NAMED_ARGUMENTS, Dialect, ToolForm
from weft.text import reasoning
from weft.text.tool_calls import PARSERS

_AS_TEMPLATES_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_BOUNDED_BLANKS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,24}"}
"""White space between tokens of JSON. It is bounded because a model may repeat blanks without end."""
_BLANK = r"[ \t\r\n]"
_GAP = r"/\s{0,8}/"
"""White space between the reasoning and the rest of the answer."""
_CALL_ID = "/[A-Za-z0-9]{9}/"
"""The form of ids that Mistral's tokenizers accept."""
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class CallableTool(NamedTuple):
    """A tool that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """The JSON schema of the arguments, an object."""
    strict: bool = False
    """Whether arguments always follow the schema. Otherwise they follow it only where the request demands a call."""
    path: str = ""
    """The path of the schema in the request, for errors."""


class Calls(NamedTuple):
    """Calls that an answer may consist of."""

    tools: Sequence[CallableTool]
    only_one: bool
    """Whether calls after the first are neither generated nor returned."""


def answer_grammar(
    dialect: Dialect, calls: Calls | None, constraint: Constraint | None, *, reasoning_opened: bool
) -> Grammar | None:
    """The grammar of answers that are calls, or text under the constraint; None without calls and constraint.

    `reasoning_opened`: the prompt ends with the opening tag, so the answer must first end the reasoning.
    """
    body = None if constraint is None else constraint.grammar
    if calls is None and (body is None or not dialect.reasoning):
        return body
    rules = []
    options = []
    if calls is not None:
        rules += _call_rules(dialect, calls)
        options.append("calls")
    if body is not None:
        rules.append(f"body: {_inline(body)}")
        options.append("body")
    answer = f"({' | '.join(options)})"
    if dialect.reasoning:
        rules += _reasoning_rules(dialect, opened=reasoning_opened)
        answer = ("reasoning " if reasoning_opened else "reasoning? ") + answer
    return Grammar.lark("\n".join([f"start: {answer}", *rules]))


def triggered_grammar(dialect: Dialect, calls: Calls, *, reasoning_opened: bool) -> Grammar:
    """The grammar of answers that are free text until a call begins, and constrain every call to the tools.

    The arguments of a strict tool follow its schema; those of any other tool are any object.
    """
    form = _form_of(dialect)
    marker = PARSERS[form].marker
    special = dialect.special.get(marker)
    begin = "head" if special is None else f"(head | <[{special}]>)"
    rules = [
        f"start: FREE | {begin} rest",
        f"FREE: /(?s:.*)/ & ~/(?s:.*){_in_regex(marker)}(?s:.*)/",
        f"head[lazy]: TEXT {_quoted(marker)}",
        "TEXT: /(?s:.*)/",
        *_triggered_rules(dialect, form, calls),
    ]
    trigger = Trigger(
        marker,
        # A call without a closing marker extends to the end of the answer.
        repeats=form != "llama3_json" and not calls.only_one,
        reasoning=(reasoning.OPEN, reasoning.CLOSE) if dialect.reasoning else None,
        in_reasoning=dialect.reasoning and reasoning_opened,
    )
    return Grammar.lark("\n".join(rules), trigger)


def _triggered_rules(dialect: Dialect, form: ToolForm, calls: Calls) -> list[str]:
    """The rule `rest`, which matches the text after the marker of a call, and the rules that it uses."""
    if form == "mistral" and dialect.named_arguments:
        return [f"rest: {_named_calls(dialect, calls, _free_arguments)}"]
    key = _arguments_key(form)
    options, loose = [], [tool.name for tool in calls.tools if not tool.strict]
    for tool in calls.tools:
        if tool.strict:
            options.append(f"NAME {_quoted(json.dumps(tool.name))} ARGUMENTS {_free_arguments(tool)} END")
    if loose:
        any_name = f"({' | '.join(_quoted(json.dumps(name)) for name in loose)})"
        options += [f"NAME {any_name} ARGUMENTS any END", f"ARGUMENTS_FIRST any NAME_LAST {any_name} END"]
    rules = [
        f"object: {' | '.join(options)}",
        rf'NAME: /\{{{_BLANK}{{0,8}}"name"{_BLANK}?:{_BLANK}?/',
        rf'ARGUMENTS: /{_BLANK}?,{_BLANK}{{0,8}}"{key}"{_BLANK}?:{_BLANK}?/',
        rf'ARGUMENTS_FIRST: /\{{{_BLANK}{{0,8}}"{key}"{_BLANK}?:{_BLANK}?/',
        rf'NAME_LAST: /{_BLANK}?,{_BLANK}{{0,8}}"name"{_BLANK}?:{_BLANK}?/',
        rf"END: /{_BLANK}{{0,8}}\}}/",
    ]
    if loose:
        rules.append(f"any: {_json_rule(_ANY_OBJECT, _BOUNDED_BLANKS)}")
    match form:
        case "hermes":
            rules.append(f"rest: /{_BLANK}{{0,2}}/ object /{_BLANK}{{0,2}}/ {_mark(dialect, '</tool_call>')}")
        case "llama3_json":
            rules.append("rest: / ?/ object" + ("" if calls.only_one else " (/; ?/ object)*"))
        case "mistral":
            more = "" if calls.only_one else " (/, ?/ object)*"
            rules.append(f'rest: / ?/ "[" object{more} "]"')
    return rules


def _free_arguments(tool: CallableTool) -> str:
    """The rule body for the arguments of a call that the model chose to make."""
    return (
        _json_rule(tool.parameters, _BOUNDED_BLANKS, tool.path)
        if tool.strict
        else _json_rule(_ANY_OBJECT, _BOUNDED_BLANKS)
    )


def _form_of(dialect: Dialect) -> ToolForm:
    if dialect.tool_form is None:
        raise ValueError("calls need a form")
    return dialect.tool_form


def _arguments_key(form: ToolForm) -> str:
    return "parameters" if form == "llama3_json" else "arguments"


def _named_calls(dialect: Dialect, calls: Calls, arguments: Callable[[CallableTool], str]) -> str:
    """The rule body for calls in Mistral's newer form: a name, an id where the model writes one, and the arguments."""
    between = _mark(dialect, NAMED_ARGUMENTS)
    if dialect.call_ids:
        between = f"{_mark(dialect, CALL_ID)} {_CALL_ID} {between}"
    return " | ".join(f"{_quoted(tool.name)} {between} {arguments(tool)}" for tool in calls.tools)


def _reasoning_rules(dialect: Dialect, *, opened: bool) -> list[str]:
    begin = "" if opened else _mark(dialect, reasoning.OPEN) + " "
    if reasoning.CLOSE in dialect.special:
        return [
            f"reasoning: {begin}thought {_mark(dialect, reasoning.CLOSE)} {_GAP}",
            "thought: /(?s:.*)/",
        ]
    return [
        f"reasoning: {begin}thought {_GAP}",
        f"thought[suffix={_quoted(reasoning.CLOSE)}]: /(?s:.*)/",
    ]


def _call_rules(dialect: Dialect, calls: Calls) -> list[str]:
    """The rule `calls` and the rules that it uses."""
    form = _form_of(dialect)
    marker = _mark(dialect, PARSERS[form].marker)
    if form == "mistral" and dialect.named_arguments:
        named = _named_calls(dialect, calls, _arguments)
        return [f"calls: call{'' if calls.only_one else '+'}", f"call: {marker} ({named})"]
    key = _arguments_key(form)
    names = [f"call_{number}" for number in range(len(calls.tools))]
    rules = [f"object: {' | '.join(names)}"]
    for name, tool in zip(names, calls.tools, strict=True):
        head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
        rules.append(f'{name}: {_quoted(head)} {_arguments(tool)} "}}"')
    match form:
        case "hermes":
            rules.append(f"call: {marker} /\\n?/ object /\\n?/ {_mark(dialect, '</tool_call>')}")
            rules.append("calls: call" + ("" if calls.only_one else " (/\\n?/ call)*"))
        case "llama3_json":
            rules.append("calls: object" + ("" if calls.only_one else ' ("; " object)*'))
        case "mistral":
            more = "" if calls.only_one else ' (", " object)*'
            rules.append(f'calls: {marker} / ?/ "[" object{more} "]"')
    return rules


def _arguments(tool: CallableTool) -> str:
    """The rule body for the arguments of a call that the request demands."""
    return _json_rule(tool.parameters, _AS_TEMPLATES_WRITE, tool.path)


def _json_rule(schema: Mapping[str, Any], blanks: Mapping[str, Any], path: str = "") -> str:
    """The rule body for a JSON schema; errors name it `path`. Strings may have any length."""
    options = {**blanks, "max_string_chars": None, "path": path}
    return "%json " + json.dumps({**schema, OPTIONS: options}, ensure_ascii=False)


def _inline(grammar: Grammar) -> str:
    """A grammar as the right-hand side of a rule."""
    match grammar.kind:
        case "json_schema":
            return "%json " + grammar.text
        case "regex":
            pattern = re.sub(r"\\.|/", lambda match: "\\/" if match[0] == "/" else match[0], grammar.text, flags=re.S)
            return "/" + pattern.replace("\n", "\\n") + "/"
        case "lark":
            return "%lark {\n" + re.sub(r"^\s*%llguidance\s*\{\s*\}", "", grammar.text) + "\n}"


def _mark(dialect: Dialect, text: str) -> str:
    """A marker in Lark: its token if it is a special token, otherwise its text."""
    token = dialect.special.get(text)
    return _quoted(text) if token is None else f"<[{token}]>"


def _in_regex(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
