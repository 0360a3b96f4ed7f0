"""What of a graph cannot run on a server, found before anything runs, and which models it calls."""

from __future__ import annotations

from collections.abc import Iterator

from weft.abi.errors import WeftError
from weft.endpoints.models import Models
from weft.workflow.graph.builtin_functions import BUILTIN_FUNCTIONS
from weft.workflow.graph.labels import label_prefix
from weft.workflow.graph.mistakes import InvalidGraph, Mistake
from weft.workflow.graph.nodes import AnyNode, ExternalNode, FunctionNode, LlmNode, ProgramNode, WorkflowGraph

_PYTHON = (
    "is a Python function, which does not run on a server; the built-in ones are {}. Run the workflow from Python, on "
    "the address of this server"
)


def labelled_nodes(nodes: tuple[AnyNode, ...], prefix: str = "") -> Iterator[tuple[str, AnyNode]]:
    """These nodes and those of their bodies, with their labels."""
    for node in nodes:
        label = prefix + node.id
        yield label, node
        for place, body in node.bodies.items():
            yield from labelled_nodes(body.nodes, label_prefix(label, node, place))


def called_models(graph: WorkflowGraph, model: str | None, models: Models) -> tuple[str, ...]:
    """First served names of the models that a graph calls, where calls that name none ask `model`. Raises
    `InvalidGraph` with every node that cannot run here."""
    found: dict[str, None] = {}
    mistakes = []
    for label, node in labelled_nodes(graph.nodes):
        reason = _reason(node)
        if reason:
            mistakes.append(Mistake(label, reason))
        splits = isinstance(node, FunctionNode) and node.name == "split"
        if not isinstance(node, LlmNode) and not splits:
            continue
        named = node.request.get("model") if isinstance(node, LlmNode) else None
        try:
            found[models.find(named or model).names[0]] = None
        except WeftError as error:
            mistakes.append(Mistake(f"{label}.model", error.message))
    if mistakes:
        raise InvalidGraph(mistakes)
    return tuple(sorted(found))


def _reason(node: AnyNode) -> str:
    """Why a node cannot run on this server; empty where it can."""
    match node:
        case FunctionNode(name=str(name)) if name not in BUILTIN_FUNCTIONS:
            return f"{name!r} {_PYTHON.format(' and '.join(BUILTIN_FUNCTIONS))}"
        case FunctionNode(source=str()):
            return "functions with source do not run in workflows of a server yet"
        case ProgramNode():
            return "programs do not run in workflows of a server yet"
        case ExternalNode():
            return "values from outside cannot be given to workflows of a server yet"
    return ""
