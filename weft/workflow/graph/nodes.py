"""The nodes of a graph, as frozen records that are what the JSON form says.

A field that holds references says so by its type: `Named` is one reference, `Templated` is text with references,
`Values` is JSON whose strings are templates. `GraphNode.visit` goes through them, for all that reads or rewrites
references. A node knows nothing of the graph it stands in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from weft.workflow.graph.templates import (
    MAX_NAME_CHARS,
    NAME,
    REFERENCE,
    Reference,
    Template,
    parse_reference,
    parse_template,
)

VERSION = 1
MAX_NODES = 10_000
"""Nodes of a graph, those of bodies included."""
MAX_ROUNDS = 16
"""Of a loop that says nothing else."""
ROUNDS_LIMIT = 1000
"""Of any loop."""
MAX_ITEMS = 10_000
CALL_RETRIES = 3
DEFAULT_OUTPUT = "value"
"""The output of a body that returns one value without a name."""

# What stands in `extra_json_schema` is for the schema alone: the check refuses it with a message of its own.
Name = Annotated[str, Meta(extra_json_schema={"pattern": f"^{NAME}$", "maxLength": MAX_NAME_CHARS})]
Named = Annotated[
    str,
    Meta(
        description="A reference: the name of a node or an input, then fields: `verdict.winner`.",
        extra_json_schema={"pattern": f"^{REFERENCE}$"},
    ),
]
Templated = Annotated[str, Meta(description="Text with references: `Answer {{question}}`.")]
Values = Annotated[
    Any, Meta(description="JSON. Strings are templates; one that is a single reference passes the value as it is.")
]
Schema = Annotated[dict[str, Any], Meta(description="A JSON schema.")]
Seconds = Annotated[float, Meta(gt=0)]
Outputs = Annotated[
    dict[Name, Named], Meta(description="Name of an output -> its value.", extra_json_schema={"minProperties": 1})
]
Field = Literal["name", "text", "values"]
Visit = Callable[[str, Field, Any], Any]
"""(place in the node, what the value is, value) -> the value to have there."""


class GraphNode(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="op"
):
    """One operator. `id` names its value within the graph or body that it stands in."""

    ONE_OF: ClassVar[tuple[str, ...]] = ()
    """Fields of which exactly one is given."""

    id: Annotated[Name, Meta(description="Names the node's value.")]

    @property
    def op(self) -> str:
        """The kind of node, as JSON names it."""
        tag = self.__struct_config__.tag
        assert isinstance(tag, str)
        return tag

    def visit(self, visit: Visit) -> GraphNode:
        """A copy with every field that holds references replaced by what `visit` returns for it. Bodies are left."""
        raise NotImplementedError

    @property
    def bodies(self) -> Mapping[str, Body]:
        """The graphs inside, by their place in the node."""
        return {}

    def with_bodies(self, bodies: Mapping[str, Body]) -> GraphNode:
        """A copy with other graphs at the same places."""
        return self

    @property
    def bound(self) -> tuple[str, ...]:
        """Names that this node binds in its bodies."""
        return ()


class PromptMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A message of a chat: a role and a text, or the whole conversation that ended in an answer."""

    ONE_OF: ClassVar[tuple[str, ...]] = ("role", "chat")

    role: Literal["system", "developer", "user", "assistant", "tool"] | None = None
    content: Templated | None = None
    name: Annotated[str, Meta(description="Name of the speaker, for chat templates that use it.")] | None = None
    tool_call_id: Annotated[str, Meta(description="With role `tool`: the call that this answers.")] | None = None
    chat: (
        Annotated[Named, Meta(description="An answer to messages: the conversation with it. Only the first.")] | None
    ) = None


class LlmNode(GraphNode, frozen=True, kw_only=True, omit_defaults=True, tag="llm"):
    """A call of a model. All fields of a chat completion may stand beside the ones here, `model` too."""

    ONE_OF: ClassVar[tuple[str, ...]] = ("messages", "prompt")

    messages: (
        Annotated[
            tuple[PromptMessage, ...],
            Meta(description="The conversation; or `prompt`.", extra_json_schema={"minItems": 1}),
        ]
        | None
    ) = None
    prompt: Annotated[Templated, Meta(description="Text to continue, without a chat template.")] | None = None
    schema: Annotated[Schema, Meta(description="The form of the answer, whose fields are then values.")] | None = None
    cache: Annotated[bool, Meta(description="Whether an equal earlier call may answer, if it can only answer so.")] = (
        True
    )
    retries: Annotated[int, Meta(ge=0, le=100, description="Further tries after an overload or a crash.")] = (
        CALL_RETRIES
    )
    request: dict[str, Any] = {}
    """Fields of the chat completion, as `weft.endpoints.schemas.chat` has them. In JSON they stand in the node."""

    def visit(self, visit: Visit) -> GraphNode:
        """Visit `prompt`, a text, or of each message `chat`, a name, and `content`, a text."""
        prompt = None if self.prompt is None else visit("prompt", "text", self.prompt)
        if self.messages is None:
            return replace(self, prompt=prompt)
        messages = []
        for number, message in enumerate(self.messages):
            place = f"messages[{number}]"
            chat = None if message.chat is None else visit(f"{place}.chat", "name", message.chat)
            content = None if message.content is None else visit(f"{place}.content", "text", message.content)
            messages.append(replace(message, chat=chat, content=content))
        return replace(self, prompt=prompt, messages=tuple(messages))

    @property
    def continued(self) -> Reference | None:
        """The answer whose conversation this call goes on with."""
        chat = self.messages[0].chat if self.messages else None
        return None if chat is None else parse_reference(chat)


class TextNode(GraphNode, frozen=True, kw_only=True, omit_defaults=True, tag="text"):
    """Text made of values: its template with each reference replaced by the value as text."""

    template: Templated

    def visit(self, visit: Visit) -> GraphNode:
        """Visit `template`, a text."""
        return replace(self, template=visit("template", "text", self.template))


class DataNode(GraphNode, frozen=True, kw_only=True, omit_defaults=True, tag="data"):
    """A constant. Nothing in it is a template."""

    value: Annotated[Any, Meta(description="JSON.")]

    def visit(self, visit: Visit) -> GraphNode:
        """Visit nothing: braces in a constant are no references."""
        return self


class ListNode(GraphNode, frozen=True, kw_only=True, omit_defaults=True, tag="list"):
    """A list whose items are values, or JSON with values in it."""

    of: tuple[Values, ...]

    def visit(self, visit: Visit) -> GraphNode:
        """Visit the items, `of[N]`, each as values."""
        return replace(self, of=tuple(visit(f"of[{at}]", "values", value) for at, value in enumerate(self.of)))


class FunctionNode(GraphNode, frozen=True, kw_only=True, omit_defaults=True, tag="function"):
    """A call of a registered function or of a built-in one. Or Python `source`, which servers of Weft run."""

    ONE_OF: ClassVar[tuple[str, ...]] = ("name", "source")

    name: Annotated[str, Meta(description="A registered function, `join` or `split`.")] | None = None
    source: Annotated[str, Meta(description="Python with `async def main(args)`; servers of Weft run it.")] | None = (
        None
    )
    args: dict[Name, Values] = {}
    pure: Annotated[bool, Meta(description="Equal arguments give equal results, and nothing else happens.")] = False
    retries: Annotated[int, Meta(ge=0, le=100, description="Further tries after it raised.")] = 0

    def visit(self, visit: Visit) -> GraphNode:
        """Visit the arguments, `args.NAME`, each as values."""
        return replace(self, args={name: visit(f"args.{name}", "values", value) for name, value in self.args.items()})


class ProgramNode(GraphNode, frozen=True, kw_only=True, omit_defaults=True, tag="program"):
    """A run of an uploaded program, whose value is what the program returns. Servers of Weft run it; elsewhere its row
    fails with `Unsupported`."""

    program: Annotated[str, Meta(description="Name or hash of the program.")]
    args: Values = None

    def visit(self, visit: Visit) -> GraphNode:
        """Visit `args` as values."""
        return replace(self, args=visit("args", "values", self.args))


class ExternalNode(GraphNode, frozen=True, kw_only=True, omit_defaults=True, tag="external"):
    """A value that comes from outside while the workflow runs, such as a person's."""

    schema: Schema | None = None
    timeout_s: Annotated[Seconds, Meta(description="Seconds until the row fails; absent: it waits.")] | None = None

    def visit(self, visit: Visit) -> GraphNode:
        """Visit nothing: the value does not depend on the graph."""
        return self


class PickNode(GraphNode, frozen=True, kw_only=True, omit_defaults=True, tag="pick"):
    """A part or a form of one value: exactly one of the fields beside `of`, and `max_items` with `slice`."""

    ONE_OF: ClassVar[tuple[str, ...]] = ("field", "regex", "strip", "split", "slice", "matches")

    of: Named
    field: (
        Annotated[str, Meta(description="A field of an object, or a number for an item of a list. A text is JSON.")]
        | None
    ) = None
    regex: Annotated[str, Meta(description="The first match, or its first group.")] | None = None
    strip: (
        Annotated[bool, Meta(description="true: without white space at both ends.", extra_json_schema={"const": True})]
        | None
    ) = None
    split: Annotated[str, Meta(min_length=1, description="A separator: the parts between, as a list.")] | None = None
    slice: (
        Annotated[tuple[int | None, int | None], Meta(description="From, to (exclusive); negative: from the end.")]
        | None
    ) = None
    matches: Annotated[str, Meta(description="A regular expression: whether it is found.")] | None = None
    max_items: (
        Annotated[int, Meta(ge=1, le=MAX_ITEMS, description="With `slice`: a longer list is an error of its row.")]
        | None
    ) = None

    def visit(self, visit: Visit) -> GraphNode:
        """Visit `of`, a name."""
        return replace(self, of=visit("of", "name", self.of))

    @property
    def way(self) -> str:
        """Which of the fields is given; empty where there is none, which the check refuses."""
        return next((name for name in self.ONE_OF if getattr(self, name) is not None), "")


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A graph inside a node. Names resolve to its nodes, then to what the node binds, then outwards."""

    nodes: Annotated[tuple[AnyNode, ...], Meta(description="In any order.")]
    outputs: Outputs


class MapNode(GraphNode, frozen=True, kw_only=True, omit_defaults=True, tag="map"):
    """A body for each item of a list. Each output is the list of the items' values."""

    over: Named
    item: Annotated[Name, Meta(description="The name of the item in the body.")]
    body: Body
    max_items: Annotated[int, Meta(ge=1, le=MAX_ITEMS, description="A longer list is an error of its row.")] = MAX_ITEMS

    def visit(self, visit: Visit) -> GraphNode:
        """Visit `over`, a name outside the body."""
        return replace(self, over=visit("over", "name", self.over))

    @property
    def bodies(self) -> Mapping[str, Body]:
        """The body of an item, at the place `body`."""
        return {"body": self.body}

    def with_bodies(self, bodies: Mapping[str, Body]) -> GraphNode:
        """A copy whose items have the graph at `body`."""
        return replace(self, **bodies)

    @property
    def bound(self) -> tuple[str, ...]:
        """The name of the item."""
        return (self.item,)


class SwitchNode(GraphNode, frozen=True, kw_only=True, omit_defaults=True, tag="switch"):
    """One of several bodies, by a value; all have the same outputs."""

    on: Named
    cases: Annotated[dict[str, Body], Meta(description="By the value of `on` as text.")]
    default: Annotated[Body, Meta(description="For other values; absent: they are an error of their row.")] | None = (
        None
    )

    def visit(self, visit: Visit) -> GraphNode:
        """Visit `on`, a name outside the bodies."""
        return replace(self, on=visit("on", "name", self.on))

    @property
    def bodies(self) -> Mapping[str, Body]:
        """The bodies at `cases[VALUE]`, then `default` where there is one."""
        cases = {f"cases[{name}]": body for name, body in self.cases.items()}
        return cases if self.default is None else {**cases, "default": self.default}

    def with_bodies(self, bodies: Mapping[str, Body]) -> GraphNode:
        """A copy with other graphs for the same cases, and for `default`."""
        cases = {name: bodies[f"cases[{name}]"] for name in self.cases}
        return replace(self, cases=cases, default=bodies.get("default"))


class LoopNode(GraphNode, frozen=True, kw_only=True, omit_defaults=True, tag="loop"):
    """A body, again and again: its outputs are the next round's values, and the last ones are the node's."""

    init: Annotated[
        dict[Name, Named],
        Meta(description="Name in the body -> the first round's value.", extra_json_schema={"minProperties": 1}),
    ]
    body: Body
    until: (
        Annotated[Named, Meta(description="A value of the body, looked at after each round: true ends the loop.")]
        | None
    ) = None
    max_rounds: Annotated[int, Meta(ge=1, le=ROUNDS_LIMIT, description="Rounds at most; without `until`, exactly.")] = (
        MAX_ROUNDS
    )
    at_limit: Annotated[
        Literal["fail", "stop"], Meta(description="If the last round does not end it: an error, or its values.")
    ] = "fail"

    def visit(self, visit: Visit) -> GraphNode:
        """Visit the first values, `init.NAME`, names outside the body. `until` is a name of the body and stays."""
        return replace(self, init={name: visit(f"init.{name}", "name", value) for name, value in self.init.items()})

    @property
    def bodies(self) -> Mapping[str, Body]:
        """The body of a round, at the place `body`."""
        return {"body": self.body}

    def with_bodies(self, bodies: Mapping[str, Body]) -> GraphNode:
        """A copy whose rounds have the graph at `body`."""
        return replace(self, **bodies)

    @property
    def bound(self) -> tuple[str, ...]:
        """The names of `init`, whose values change with each round."""
        return tuple(self.init)


AnyNode = (
    LlmNode
    | TextNode
    | DataNode
    | ListNode
    | FunctionNode
    | ProgramNode
    | ExternalNode
    | PickNode
    | MapNode
    | SwitchNode
    | LoopNode
)
NODES: dict[str, type[GraphNode]] = {str(kind.__struct_config__.tag): kind for kind in AnyNode.__args__}


class WorkflowGraph(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workflow for one row of inputs."""

    version: Literal[1] = 1
    """In JSON it is required."""
    inputs: Annotated[tuple[Name, ...], Meta(description="Columns of the rows.")] = ()
    nodes: Annotated[tuple[AnyNode, ...], Meta(description="In any order.")]
    """`canonical` gives the one order that does not depend on how the graph was written."""
    outputs: Outputs


class Use(msgspec.Struct, frozen=True):
    """A reference, where it stands, and what stands there."""

    place: str
    field: Field
    reference: Reference
    is_alone: bool
    """Whether the value is passed on as it is; False: as text among text."""


def reference_of(text: str) -> Reference:
    """The reference of a `Named` field. The graph must have passed `check`, which refuses other texts."""
    reference = parse_reference(text)
    assert reference is not None, text
    return reference


def uses(node: GraphNode) -> tuple[Use, ...]:
    """The references of a node by their places, without those of its bodies."""
    found: list[Use] = []

    def visit(place: str, field: Field, value: Any) -> Any:
        if field == "name":
            reference = parse_reference(value)
            if reference is not None:
                found.append(Use(place, field, reference, True))
            return value
        for inner, template in _templates(place, value):
            alone = field == "values" and template.alone is not None
            found.extend(Use(inner, field, reference, alone) for reference in template.references)
        return value

    node.visit(visit)
    return tuple(sorted(found, key=lambda use: use.place))


def unread_names(node: GraphNode) -> tuple[tuple[str, str], ...]:
    """The places of `Named` fields that are no reference, and their texts."""
    found: list[tuple[str, str]] = []

    def visit(place: str, field: Field, value: Any) -> Any:
        if field == "name" and parse_reference(value) is None:
            found.append((place, value))
        return value

    node.visit(visit)
    return tuple(sorted(found))


def with_references(node: GraphNode, new: Callable[[Reference], Reference]) -> GraphNode:
    """A copy whose references are replaced, those of its bodies excepted."""

    def text(value: str) -> str:
        template = parse_template(value)
        if not template.references:
            return value
        parts = (new(part) if isinstance(part, Reference) else part for part in template.parts)
        return str(Template(tuple(parts)))

    def visit(place: str, field: Field, value: Any) -> Any:
        if field == "name":
            reference = parse_reference(value)
            return value if reference is None else str(new(reference))
        return map_strings(value, text)

    return node.visit(visit)


def map_strings(value: Any, new: Callable[[str], Any]) -> Any:
    """A copy of a JSON value with every string replaced, keys excepted."""
    if isinstance(value, str):
        return new(value)
    if isinstance(value, Mapping):
        return {key: map_strings(inner, new) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_strings(inner, new) for inner in value)
    return value


def _templates(place: str, value: Any) -> Iterator[tuple[str, Template]]:
    if isinstance(value, str):
        yield place, parse_template(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _templates(f"{place}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _templates(f"{place}[{number}]", inner)


def count_nodes(nodes: tuple[AnyNode, ...]) -> int:
    """How many nodes these are, with those of their bodies."""
    return sum(1 + sum(count_nodes(body.nodes) for body in node.bodies.values()) for node in nodes)
