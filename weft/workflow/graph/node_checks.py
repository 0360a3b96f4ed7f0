"""What each kind of node requires of its own fields and of the types of what it refers to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import singledispatch
from typing import Any

from weft.abi.errors import InvalidRequest, Unsupported
from weft.abi.parameters import SAMPLING, STOP
from weft.endpoints.fields import ADVISORY, REFUSED, request_from
from weft.endpoints.schemas.chat import ChatRequest
from weft.endpoints.schemas.completion import CompletionRequest
from weft.workflow.graph.answer_schemas import answer_schema_mistake
from weft.workflow.graph.builtin_functions import BUILTIN_FUNCTIONS
from weft.workflow.graph.mistakes import nearest
from weft.workflow.graph.node_types import alone_type
from weft.workflow.graph.nodes import (
    FunctionNode,
    GraphNode,
    LlmNode,
    LoopNode,
    MapNode,
    PickNode,
    SwitchNode,
    reference_of,
)
from weft.workflow.graph.regexes import RegexError, compile_regex
from weft.workflow.graph.templates import Reference, is_name, parse_reference
from weft.workflow.graph.value_types import ANY, ValueType

Found = Iterator[tuple[str, str]]
TypeOf = Callable[[Reference], ValueType]

NOT_IN_WORKFLOWS = {
    "n": "make several calls, or a map",
    "stream": "ask the run for its events",
    "stream_options": "ask the run for its events",
    "logprobs": "a value is a text",
    "top_logprobs": "a value is a text",
    "prompt_logprobs": "a value is a text",
    "return_token_ids": "a value is a text",
    "echo": "a value is the answer alone",
    "use_beam_search": "send it to /v1/completions",
}
"""Fields of a completion that a call in a workflow cannot have -> what to do instead."""
REQUESTS = (ChatRequest, CompletionRequest)
"""What a call with `messages` becomes, and one with `prompt`."""
CALL_FIELDS = frozenset(name for kind in REQUESTS for name in (*kind.__struct_fields__, *REFUSED[kind], *ADVISORY))
"""Names of their fields; some may only have a value without an effect."""
_RANGES = [
    each
    for each in (*SAMPLING.values(), STOP["min_tokens"])
    if each.low is not None and each.name not in ("logit_bias", *NOT_IN_WORKFLOWS)
]
"""Parameters with a range, which the types of requests leave to the engine; that of `logit_bias` is of its values."""


@singledispatch
def own_mistakes(node: GraphNode, type_of: TypeOf) -> Found:
    """(place in the node, message) of each mistake. `type_of` gives the types of what the node refers to."""
    return iter(())


@own_mistakes.register
def _llm(node: LlmNode, type_of: TypeOf) -> Found:
    if len(_given(node)) != 1:
        yield "", f"give either {' or '.join(node.ONE_OF)}"
    for number, message in enumerate(node.messages or ()):
        place = f"messages[{number}]"
        if message.chat is not None:
            if number:
                yield place, "`chat` is only allowed in the first message"
            if any(value is not None for value in (message.role, message.content, message.name, message.tool_call_id)):
                yield place, "a message with `chat` has no other fields"
        elif message.role is None or message.content is None:
            yield place, "a message must have a role and a content"
    if node.messages is not None and not any(message.chat is None for message in node.messages):
        yield "messages", "there is no message for the model to answer"
    if node.schema is not None:
        mistake = answer_schema_mistake(node.schema)
        if mistake is not None:
            yield "schema", mistake
        for name in ("response_format", "structured_outputs"):
            if name in node.request:
                yield name, "cannot be combined with schema"
    kind, base = (CompletionRequest, {"prompt": ""}) if node.messages is None else (ChatRequest, _ONE_MESSAGE)
    fields = {}
    for name, value in node.request.items():
        if name in NOT_IN_WORKFLOWS and value is not None:
            yield name, f"is not supported in workflows; {NOT_IN_WORKFLOWS[name]}"
        else:
            fields[name] = value
    if _refused(kind, {**base, **fields}):
        for name, value in fields.items():
            if refused := _refused(kind, {**base, name: value}):
                yield name, refused.removeprefix(f"{name}: ")


def _refused(kind: type[ChatRequest] | type[CompletionRequest], body: dict[str, Any]) -> str:
    """Why a request with this body is refused; empty: it is not."""
    try:
        request = request_from(kind, body)
    except (InvalidRequest, Unsupported) as error:
        return error.message
    for each in _RANGES:
        value = getattr(request, each.name)
        if value is not None and not each.contains(value):
            return f"{each.name}: must be in {each.range}, got {value}"
    return "truncate_prompt_tokens: must be 1 or more, or -1" if request.truncate_prompt_tokens == 0 else ""


def _given(node: GraphNode) -> list[str]:
    """The fields of `ONE_OF` that are given."""
    return [name for name in node.ONE_OF if getattr(node, name) is not None]


_ONE_MESSAGE: dict[str, Any] = {"messages": [{"role": "user", "content": ""}]}


@own_mistakes.register
def _function(node: FunctionNode, type_of: TypeOf) -> Found:
    if len(_given(node)) != 1:
        yield "", f"give either {' or '.join(node.ONE_OF)}"
    for name in node.args:
        if not is_name(name):
            yield f"args.{name[:100]}", "is not a name"
    builtin = BUILTIN_FUNCTIONS.get(node.name or "")
    if builtin is None:
        return
    known = (*builtin.required, *builtin.optional)
    for name in builtin.required:
        if name not in node.args:
            yield "args", f"{node.name} needs {name!r}"
    for name, value in node.args.items():
        if name not in known:
            yield f"args.{name}", f"{node.name} has no argument {name!r}: it has {', '.join(known)}"
            continue
        kind, wanted = alone_type(value, type_of).kind, builtin.takes.get(name, "any")
        if wanted != "any" and kind not in (wanted, "any"):
            yield f"args.{name}", f"{node.name} takes a {wanted} here, not a {kind}"


@own_mistakes.register
def _pick(node: PickNode, type_of: TypeOf) -> Found:
    given = _given(node)
    if len(given) != 1:
        yield "", f"give one of {', '.join(node.ONE_OF)}; given: {' and '.join(given) or 'none'}"
        return
    way = given[0]
    kind = type_of(reference_of(node.of)) if parse_reference(node.of) is not None else ANY
    wanted = {"field": ("object", "list", "text"), "slice": ("list", "text")}.get(way, ("text",))
    if kind.kind not in (*wanted, "any"):
        yield way, f"takes a {' or a '.join(wanted)}, and {node.of} is a {kind.kind}"
    if way == "field" and kind.kind == "list" and not (node.field or "").removeprefix("-").isdecimal():
        yield way, f"{node.of} is a list, whose items are numbered; {node.field!r} is not a number"
    if way == "field" and kind.kind == "object" and kind.fields is not None and node.field not in kind.fields:
        yield way, f"{node.of} has no field {node.field!r}.{nearest(node.field or '', kind.fields)}"
    if node.max_items is not None and way != "slice":
        yield "max_items", f"is a bound of the list of a slice, and this is {way}"
    if way == "strip" and node.strip is False:
        yield way, "must be true"
    if way in ("regex", "matches"):
        try:
            compile_regex(getattr(node, way))
        except RegexError as error:
            yield way, str(error)


@own_mistakes.register
def _map(node: MapNode, type_of: TypeOf) -> Found:
    if not is_name(node.item):
        yield "item", f"{node.item[:100]!r} is not a name"
    if parse_reference(node.over) is None:
        return
    kind = type_of(reference_of(node.over))
    if not kind.is_list:
        yield "over", f"must be a list, and {node.over} is a {kind.kind}: use split, or a list"


@own_mistakes.register
def _switch(node: SwitchNode, type_of: TypeOf) -> Found:
    if not node.bodies:
        yield "cases", "a switch must have a case"
    if parse_reference(node.on) is None:
        return
    kind = type_of(reference_of(node.on)).kind
    if kind in ("list", "object"):
        yield "on", f"must be a text, a number or a boolean, and {node.on} is a {kind}"
    if kind == "boolean":
        for case in node.cases:
            if case not in ("true", "false"):
                yield f"cases[{case}]", f"{node.on} is true or false"


@own_mistakes.register
def _loop(node: LoopNode, type_of: TypeOf) -> Found:
    if not node.init:
        yield "init", "a loop must have at least one value"
    for name in node.init:
        if not is_name(name):
            yield f"init.{name[:100]}", "is not a name"
