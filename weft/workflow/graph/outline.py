"""A graph as text: a line a node, with what it needs."""

from __future__ import annotations

from collections.abc import Iterator

from weft.workflow.graph.digest import digest, free_references
from weft.workflow.graph.nodes import (
    AnyNode,
    Body,
    DataNode,
    FunctionNode,
    LlmNode,
    PickNode,
    ProgramNode,
    TextNode,
    WorkflowGraph,
    map_strings,
)

MAX_SHOWN_CHARS = 60


def outline(graph: WorkflowGraph) -> str:
    """Inputs, nodes in canonical order with what they need, outputs, and the digest."""
    body = Body(nodes=graph.nodes, outputs=graph.outputs)
    lines = [f"inputs: {', '.join(graph.inputs) or 'none'}", *_lines(body, ""), f"digest: {digest(graph)}"]
    return "\n".join(lines)


def _lines(body: Body, indent: str) -> Iterator[str]:
    width = max((len(node.id) for node in body.nodes), default=0)
    for node in body.nodes:
        needs = ", ".join(dict.fromkeys(str(reference) for reference in free_references(node)))
        yield f"{indent}{node.id:{width}}  {node.op}{_detail(node)}" + (f"  <- {needs}" if needs else "")
        for place, inner in node.bodies.items():
            yield f"{indent}  {place}{f' ({chr(44).join(node.bound)})' if node.bound else ''}:"
            yield from _lines(inner, indent + "    ")
    outputs = (name if name == text else f"{name} = {text}" for name, text in body.outputs.items())
    yield f"{indent}outputs: {', '.join(outputs)}"


def _detail(node: AnyNode) -> str:
    match node:
        case LlmNode():
            fields = [f"{name}={value}" for name, value in node.request.items() if isinstance(value, (int, float, str))]
            last = node.prompt if node.messages is None else node.messages[-1].content
            return f"({', '.join(fields)}) {_short(last or '')}"
        case TextNode():
            return f" {_short(node.template)}"
        case DataNode():
            return f" {_short(str(map_strings(node.value, str)))}"
        case PickNode():
            return f" {node.way}={_short(str(getattr(node, node.way)))}"
        case FunctionNode():
            return f" {node.name or 'source'}"
        case ProgramNode():
            return f" {node.program}"
    return ""


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…")
