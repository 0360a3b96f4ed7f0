"""Calls whose answers a cache has become constants (Helium section 4, "logical plan optimization with prompt cache").

Asked for are calls of models, and functions given as source: deterministic ones whose inputs are constants, and that
may be answered so (`cache`). A call that goes on with a cached conversation gets its messages as text, so it can be
asked for next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from msgspec.structs import replace

from weft.workflow.graph import values
from weft.workflow.graph.determinism import is_deterministic
from weft.workflow.graph.names import all_nodes
from weft.workflow.graph.nodes import (
    AnyNode,
    Body,
    DataNode,
    FunctionNode,
    ListNode,
    LlmNode,
    LoopNode,
    PromptMessage,
    WorkflowGraph,
    reference_of,
    uses,
)
from weft.workflow.graph.templates import Reference, escape
from weft.workflow.graph.values import AnswerValue, RowError
from weft.workflow.passes.base import (
    Lookup,
    OperatorCall,
    PassResult,
    UnknownValueError,
    body_of,
    nothing_cached,
    result,
)


def substitute_cached(graph: WorkflowGraph, lookup: Lookup = nothing_cached) -> PassResult:
    """Replace each deterministic call with constant inputs by a `DataNode` where `lookup` has its answer."""
    if lookup is nothing_cached:
        return PassResult(graph)
    return result(graph, _Substitution(graph, lookup).body(body_of(graph)))


def operator_call(node: AnyNode, value_of: values.ValueOf) -> OperatorCall | None:
    """What a cache is asked for; None for a node that no cache may answer. Raises `RowError`, and what `value_of`
    raises."""
    match node:
        case LlmNode() if node.cache and is_deterministic(node):
            fields: dict[str, Any] = {**node.request, "schema": node.schema}
            if node.prompt is not None:
                return OperatorCall(op=node.op, fields={**fields, "prompt": values.fill(node.prompt, value_of)})
            return OperatorCall(op=node.op, fields={**fields, "messages": list(values.chat_messages(node, value_of))})
        case FunctionNode() if node.source is not None and is_deterministic(node):
            args = values.plain(values.fill_values(node.args, value_of))
            return OperatorCall(op=node.op, fields={"source": node.source, "args": args})
    return None


class _Substitution:
    """One walk over a graph, in order: what a call needs was looked up before."""

    def __init__(self, graph: WorkflowGraph, lookup: Lookup):
        self._lookup = lookup
        self._known: dict[str, Any] = {}
        self._pinned = set(_continued_elsewhere(graph))

    def body(self, body: Body) -> Body:
        return replace(body, nodes=tuple(map(self._node, body.nodes)))

    def _node(self, node: AnyNode) -> AnyNode:
        if isinstance(node, DataNode):
            self._known[node.id] = node.value
        if isinstance(node, LlmNode):
            node = self._with_messages(node)
        if isinstance(node, (LlmNode, FunctionNode)) and node.id not in self._pinned:
            return self._substituted(node)
        return cast(AnyNode, node.with_bodies({place: self.body(body) for place, body in node.bodies.items()}))

    def _with_messages(self, node: LlmNode) -> LlmNode:
        """A call that goes on with a cached answer, with the conversation as messages."""
        before = None if node.continued is None else self._known.get(node.continued.name)
        if not isinstance(before, AnswerValue) or node.messages is None:
            return node
        said = (PromptMessage(**{**message, "content": escape(message["content"])}) for message in before.messages)
        return replace(node, messages=(*said, *node.messages[1:]))

    def _substituted(self, node: LlmNode | FunctionNode) -> AnyNode:
        try:
            call = operator_call(node, self._value_of)
            found = None if call is None else self._lookup(call)
            if call is None or found is None:
                return node
            value = found.value if isinstance(node, FunctionNode) else values.answer_content(node, found.value)
        except (UnknownValueError, RowError):
            return node
        self._known[node.id] = value
        if "messages" in call.fields:
            answer = {"role": "assistant", "content": found.value}
            self._known[node.id] = AnswerValue(value=value, messages=(*call.fields["messages"], answer))
        return DataNode(id=node.id, value=value)

    def _value_of(self, reference: Reference) -> Any:
        if reference.name not in self._known:
            raise UnknownValueError
        return values.value_at(self._known[reference.name], reference)


def _continued_elsewhere(graph: WorkflowGraph) -> Iterator[str]:
    """Calls that must not be replaced by a constant: those with tool calls, and any whose conversation may be continued
    through an item, an output or a loop state."""
    every = list(all_nodes(graph.nodes))
    calls = {node.id for node in every if isinstance(node, LlmNode)}
    yield from (node.id for node in every if isinstance(node, LlmNode) and node.request.get("tools"))
    continued = [node.continued for node in every if isinstance(node, LlmNode)]
    if all(reference is None or reference.name in calls for reference in continued):
        return
    for node in every:
        if isinstance(node, (ListNode, LoopNode)):
            yield from (use.reference.name for use in uses(node))
        for body in node.bodies.values():
            yield from (reference_of(text).name for text in body.outputs.values())
