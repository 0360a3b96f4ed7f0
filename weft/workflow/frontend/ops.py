"""The operators of flows: each makes a node of the graph and returns variables for its values.

Texts are templates: f-strings with variables, or `{{name}}` of an input; `weft.workflow.escape` makes a text of the
user's safe that has such braces. `name=` gives a node an id, by which explanations and statistics call it.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any

from weft.abi.errors import InvalidRequest, Unsupported
from weft.tokenizers.messages import content_text
from weft.workflow.frontend.json_values import NotJson, as_json
from weft.workflow.frontend.marks import readable
from weft.workflow.frontend.schemas import schema_of
from weft.workflow.frontend.trace import FlowError, FlowTrace, current_trace, tracing
from weft.workflow.frontend.variable import ChatSoFar, Variable, output_of, reference_in, type_in
from weft.workflow.function_args import graph_args, name_of
from weft.workflow.graph.builtin_functions import BUILTIN_FUNCTIONS, JOIN_SEPARATOR
from weft.workflow.graph.nodes import (
    MAX_ITEMS,
    MAX_ROUNDS,
    Body,
    DataNode,
    ExternalNode,
    FunctionNode,
    ListNode,
    LlmNode,
    LoopNode,
    MapNode,
    ProgramNode,
    PromptMessage,
    SwitchNode,
    TextNode,
)
from weft.workflow.graph.templates import is_name
from weft.workflow.graph.value_types import ANY, ValueType, common
from weft.workflow.graph.values import text_of

Result = Variable | tuple[Variable, ...]
"""The one value of a node, or its values in order."""


# ---- calls of models


def system(content: object) -> PromptMessage:
    """An instruction, the first message of a chat."""
    return PromptMessage(role="system", content=_text(content))


def user(content: object) -> PromptMessage:
    """A turn of the user."""
    return PromptMessage(role="user", content=_text(content))


def assistant(content: object) -> PromptMessage:
    """An earlier answer that is shown to the model. `answer.chat` shows the whole conversation that led to one."""
    return PromptMessage(role="assistant", content=_text(content))


def tool(content: object, tool_call_id: str | None = None) -> PromptMessage:
    """What a call of a tool gave."""
    return PromptMessage(role="tool", content=_text(content), tool_call_id=tool_call_id)


def llm(
    messages: Sequence[PromptMessage | ChatSoFar | Mapping[str, Any]] | object = None,
    *,
    prompt: object = None,
    schema: Any = None,
    name: str | None = None,
    **fields: Any,
) -> Variable:
    """A call of a model. `messages` is a chat, or a text as the user's turn; `prompt` a text to continue. `schema` is
    the form of the answer: a JSON schema, a dataclass or a pydantic model, whose fields the variable then has. Beside
    `model`, `cache` and `retries`, every field of a chat completion may be given, such as `max_tokens`."""
    trace = current_trace()
    own = call_fields({**fields, "schema": schema})
    if messages is not None:
        whole = [user(messages)] if isinstance(messages, (str, Variable)) else messages
        if not isinstance(whole, Sequence):
            raise FlowError(f"messages must be a list of ops.user(...) and others, not a {type(messages).__name__}")
        own["messages"] = tuple(_message(each, f"messages[{at}]", trace) for at, each in enumerate(whole))
    if prompt is not None:
        own["prompt"] = _text(prompt)
    return trace.add(LlmNode, "llm", own, name=name)


def call_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an `LlmNode` beside its prompt. Those that are None count as absent. Raises `FlowError` for a
    schema that is none."""
    request = {key: value for key, value in fields.items() if value is not None}
    own: dict[str, Any] = {key: request.pop(key) for key in ("cache", "retries", "schema") if key in request}
    if "schema" in own:
        own["schema"] = schema_of(own["schema"])
    return {**own, "request": request}


def _message(given: PromptMessage | ChatSoFar | Mapping[str, Any], place: str, trace: FlowTrace) -> PromptMessage:
    if isinstance(given, PromptMessage):
        return given
    if isinstance(given, ChatSoFar):
        return PromptMessage(chat=str(trace.see(given.answer)))
    if isinstance(given, Mapping) and set(given) <= {"role", "content", "name", "tool_call_id"}:
        fields: dict[str, Any] = {
            key: value if key == "role" else _text(value, f"{place}.{key}") for key, value in given.items()
        }
        return PromptMessage(**fields)
    raise FlowError(f"{given!r} is not a message: use ops.system, ops.user, ops.assistant, ops.tool or answer.chat")


# ---- values


def text(template: object, *, name: str | None = None) -> Variable:
    """Text made of values: `ops.text(f"{first} and {second}")`."""
    return current_trace().add(TextNode, "text", {"template": _text(template)}, name=name)


def data(value: Any, *, name: str | None = None) -> Variable:
    """A constant: any JSON. Braces in its texts mean nothing."""
    return current_trace().add(DataNode, "data", {"value": value}, name=name)


def list(*values: Any, name: str | None = None) -> Variable:
    """A list whose items are variables, or JSON with variables in it."""
    return current_trace().add(ListNode, "list", {"of": tuple(_values(value) for value in values)}, name=name)


def join(values: Variable | Sequence[Any], separator: object = JOIN_SEPARATOR, *, name: str | None = None) -> Variable:
    """The texts of a list, one after the other, with `separator` between them."""
    if isinstance(values, str):
        raise FlowError(f"ops.join takes a list, not the text {readable(values)!r:.60}")
    whole = values if isinstance(values, Variable) else list(*values)
    args = {"of": str_alone(whole), "separator": _values(separator)}
    return current_trace().add(FunctionNode, "join", {"name": "join", "args": args}, name=name)


def split(value: object, *, max_tokens: int, overlap_tokens: int = 0, name: str | None = None) -> Variable:
    """Parts of a text of at most `max_tokens` tokens of the model, of which up to `overlap_tokens` end the part before.
    A part begins and ends between characters, so one has more tokens where a single character has; none is empty.
    Without an overlap the parts together are the text. `value.split(separator)` splits at a text."""
    args: dict[str, Any] = {"text": _text(value), "max_tokens": max_tokens}
    if overlap_tokens:
        args["overlap_tokens"] = overlap_tokens
    return current_trace().add(FunctionNode, "split", {"name": "split", "args": args}, name=name)


def matches(value: Variable | str, pattern: str) -> Variable:
    """Whether a regular expression is found in a text."""
    return current_trace().lift(value).matches(pattern)


# ---- work outside the model


def function(
    called: Callable[..., Any] | str, /, *args: Any, pure: bool = False, retries: int = 0, **named: Any
) -> Variable:
    """A call of a Python function, which runs where the workflow is started from, or of one that the server has by
    this name. `pure` says that equal arguments give equal results and that nothing else happens; `retries` is how often
    it is tried again after it raised. A function with parameters of these names has them by position, or is called as a
    `weft.native_function`. Raises `FlowError` for arguments that the function does not take."""
    for option, is_given in (("pure", pure is not False), ("retries", retries != 0)):
        if is_given and callable(called) and _is_own(called, option, args):
            raise FlowError(
                f"{name_of(called)} has a parameter {option!r}, and ops.function has too: give it by position, or make "
                "a weft.native_function of it"
            )
    return call_function(called, args, named, pure=pure, retries=retries)


def _is_own(called: Callable[..., Any], option: str, args: Sequence[Any]) -> bool:
    """Whether a function has a parameter of this name that no argument by position is for."""
    try:
        parameters = builtins.list(inspect.signature(called).parameters)
    except ValueError:  # some functions of C have no signature
        return False
    return option in parameters[len(args) :]


def call_function(
    called: Callable[..., Any] | str, args: Sequence[Any], named: Mapping[str, Any], *, pure: bool, retries: int
) -> Variable:
    """A call of a Python function, or of one of the server by name. Arguments are collections, so parameters may have
    any name. Raises `FlowError` for arguments that the function does not take."""
    trace = current_trace()
    if isinstance(called, str):
        if args:
            raise FlowError(f"arguments of {called!r} are given by name: its parameters are not known here")
        name, given = called, named
    else:
        if not callable(called):
            raise FlowError(f"ops.function takes a function first, not {called!r:.60}")
        name = name_of(called)
        try:
            given = graph_args(called, args, named)
        except TypeError as error:
            raise FlowError(f"{name}: {error}") from None
        if not is_name(name):
            raise FlowError(f"a function of a workflow needs a name, and {name} is not one: define it with def")
        if name in BUILTIN_FUNCTIONS:
            raise FlowError(f"workflows have a built-in function {name!r}: rename this one")
        if trace.names.functions.setdefault(name, called) != called:  # methods are equal, and not the same
            raise FlowError(f"two functions are called {name!r}: rename one of them")
    fields = {"name": name, "args": {key: _values(value) for key, value in given.items()}, "pure": pure}
    return trace.add(FunctionNode, "function", {**fields, "retries": retries})


def program(program: str, args: Any = None, *, name: str | None = None) -> Variable:
    """A run of an uploaded program, by its name or hash; the value is what it returns. Servers of Weft run it;
    elsewhere its row fails with `Unsupported`."""
    return current_trace().add(ProgramNode, "program", {"program": program, "args": _values(args)}, name=name)


def external(schema: Any = None, *, timeout_s: float | None = None, name: str | None = None) -> Variable:
    """A value that is set from outside while the workflow runs, such as a person's decision."""
    fields = {"schema": None if schema is None else schema_of(schema), "timeout_s": timeout_s}
    return current_trace().add(ExternalNode, "external", fields, name=name)


# ---- control


def map(
    body: Callable[[Variable], Any],
    over: Variable | Sequence[Any],
    *,
    max_items: int = MAX_ITEMS,
    name: str | None = None,
) -> Result:
    """Call `body` for each item of a list, which may be known only at run time. Returns the list of what it returns; of
    several values, a list each. A list with more than `max_items` items is an error of its row."""
    trace = current_trace()
    _check_body("map", "body, over", body)
    if isinstance(over, (builtins.list, tuple)):
        over = list(*over)
    over = trace.lift(over)
    items = type_in(over).items or ANY
    inside = FlowTrace(trace)
    item = inside.bind(_parameters(body, 1)[0], items)
    outputs = inside.outputs(body, (item,))
    traced = inside.body(outputs)
    fields = {"over": trace.named(over), "item": reference_in(item).name, "body": traced, "max_items": max_items}
    return _results(trace.add(MapNode, "map", fields, name=name, bodies={"body": _types(outputs)}), outputs)


def switch(
    on: Variable,
    cases: Mapping[Any, Callable[[], Any]],
    default: Callable[[], Any] | None = None,
    *,
    name: str | None = None,
) -> Result:
    """Do one of several things, by a value. The keys of `cases` are values of `on`; the functions take nothing and
    return as many values as each other. A value without a case is an error of its row unless there is `default`."""
    trace = current_trace()
    bodies: dict[str, Body] = {}
    types: dict[str, dict[str, ValueType]] = {}
    outputs: dict[str, Variable] = {}
    if not isinstance(cases, Mapping):
        raise FlowError(f"ops.switch(value, cases) takes a mapping of cases, not {cases!r:.60}")
    every: dict[str, Callable[[], Any]] = {}
    for value, body in cases.items():
        case = _case(value)
        if case in every:
            raise FlowError(f"two cases are {case!r}: {value!r} is compared as text")
        every[case] = body
    places = {f"cases[{case}]": body for case, body in every.items()}
    for place, body in (places if default is None else {**places, "default": default}).items():
        _check_body("switch", "value, {case: body}, default", body)
        inside = FlowTrace(trace)
        before, outputs = outputs, inside.outputs(body)
        if before and set(before) != set(outputs):
            first = next(iter(bodies))
            raise FlowError(
                f"all cases of a switch return the same outputs; {first} returns {', '.join(before)}, and {place} "
                f"{', '.join(outputs)}"
            )
        bodies[place] = inside.body(outputs)
        types[place] = _types(outputs)
    fields = {
        "on": trace.named(on),
        "cases": {case: bodies[f"cases[{case}]"] for case in every},
        "default": bodies.get("default"),
    }
    return _results(trace.add(SwitchNode, "switch", fields, name=name, bodies=types), outputs)


def _case(value: Any) -> str:
    """A key of `cases` as a run compares it with the value. Raises `FlowError` for one that no value has."""
    try:
        plain = as_json(value)
    except NotJson:
        plain = ()
    if isinstance(plain, (Mapping, builtins.list, tuple)):
        raise FlowError(f"the case {value!r:.60} is never met: a case is a text, a number, True, False or None")
    return text_of(plain)


def loop(
    body: Callable[..., Any],
    init: Any,
    *,
    until: Callable[..., Any] | None = None,
    max_rounds: int = MAX_ROUNDS,
    at_limit: str = "fail",
    name: str | None = None,
) -> Result:
    """Call `body` again and again, first with the values of `init`, then with what it returned, until the variable
    that `until` returns for those values is true. Without `until` there are `max_rounds` rounds; with it, the row fails
    after so many, or goes on with the last values if `at_limit` is "stop"."""
    trace = current_trace()
    _check_body("loop", "body, init", body)
    if until is not None and not callable(until):
        raise FlowError(
            f"ops.loop(body, init, until): until is a function of what the body returns, such as lambda draft: "
            f"draft.matches('done'), and {until!r:.60} is none; without until there are max_rounds rounds"
        )
    first = init if isinstance(init, tuple) else (init,)
    first = tuple(trace.lift(value) for value in first)
    inside = FlowTrace(trace)
    wanted = _parameters(body, len(first))
    states = tuple(inside.bind(each, type_in(value)) for each, value in zip(wanted, first, strict=True))
    names = tuple(reference_in(state).name for state in states)
    outputs = inside.outputs(body, states, names=names)
    with tracing(inside):
        if tuple(outputs) != names:
            raise FlowError(
                f"the body of a loop returns {', '.join(names)}, in this order; it returned {', '.join(outputs)}"
            )
        end = None if until is None else str(reference_in(inside.lift(until(*outputs.values()))))
    fields = {
        "init": {each: str(reference_in(value)) for each, value in zip(names, first, strict=True)},
        "body": inside.body(outputs),
        "until": end,
        "max_rounds": max_rounds,
        "at_limit": at_limit,
    }
    types = {each: common([type_in(value), type_in(outputs[each])]) for each, value in zip(names, first, strict=True)}
    return _results(trace.add(LoopNode, "loop", fields, name=name, bodies={"body": types}), outputs)


def _parameters(body: Callable[..., Any], count: int) -> tuple[str, ...]:
    names = tuple(inspect.signature(body).parameters)
    if len(names) != count:
        raise FlowError(f"{name_of(body)} takes {len(names)} values and is given {count}")
    return names


def _check_body(operator: str, takes: str, body: Any) -> None:
    if not callable(body):
        raise FlowError(f"ops.{operator}({takes}): a body is a function, and {body!r:.60} is none")
    if isinstance(body, (type, BuiltinFunctionType)):
        name = name_of(body)
        raise FlowError(
            f"ops.{operator}({takes}): a body makes nodes of variables, and {name} takes values: write "
            f"lambda value: ops.function({name}, value)"
        )


def _types(outputs: Mapping[str, Variable]) -> dict[str, ValueType]:
    return {name: type_in(value) for name, value in outputs.items()}


def _results(made: Variable, outputs: Mapping[str, Variable]) -> Result:
    values = tuple(output_of(made, name) for name in outputs)
    return values[0] if len(values) == 1 else values


# ---- values of the user's


def _text(value: object, place: str = "content") -> str:
    """What the user wrote as a text; of the parts that OpenAI's chats have, their texts. Raises `FlowError` for parts
    that are none."""
    if not isinstance(value, (builtins.list, tuple)) or not all(isinstance(part, Mapping) for part in value):
        return value if isinstance(value, str) else str(value)
    parts = [
        {key: str(inner) if isinstance(inner, Variable) else inner for key, inner in part.items()} for part in value
    ]
    try:
        return content_text(parts, place)
    except (InvalidRequest, Unsupported) as error:
        raise FlowError(error.message) from None


def str_alone(variable: Variable) -> str:
    """The template that passes a value on as it is, a list too."""
    return f"{{{{{reference_in(variable)}}}}}"


def _values(value: Any) -> Any:
    """JSON with templates for variables, at any depth."""
    if isinstance(value, Variable):
        return str_alone(value)
    if isinstance(value, Mapping):
        return {str(key): _values(inner) for key, inner in value.items()}
    if isinstance(value, (builtins.list, tuple)):
        return [_values(inner) for inner in value]
    return value
