"""What of a graph cannot run on a server, found before anything runs, and which models it calls."""

from __future__ import annotations

from collections.abc import Sequence

from weft.abi.errors import WeftError
from weft.endpoints.models import Models
from weft.workflow.graph.builtin_functions import BUILTIN_FUNCTIONS
from weft.workflow.graph.labels import labelled_nodes
from weft.workflow.graph.mistakes import InvalidGraph, Mistake
from weft.workflow.graph.nodes import AnyNode, ExternalNode, FunctionNode, LlmNode, WorkflowGraph
from weft.workflow.graph.schema_check import unchecked_keywords
from weft.workflow.service.record import WorkflowRunSpec

_PYTHON = (
    "is a Python function, which does not run on a server; the built-in ones are {}. Run the workflow from Python "
    "with on=weft.client.Client(...), or name it in `functions` and set its results"
)


def called_models(
    graph: WorkflowGraph, spec: WorkflowRunSpec, models: Models, mistakes: Sequence[Mistake] = ()
) -> tuple[str, ...]:
    """First served names of the models that a graph calls. Raises `InvalidGraph` with every node that cannot run
    here, those of `mistakes` first, and every function of the client that no node calls."""
    unused = set(spec.functions)
    found: dict[str, None] = {}
    mistakes = list(mistakes)
    for label, node in labelled_nodes(graph.nodes):
        if isinstance(node, FunctionNode):
            unused.discard(node.name or "")
        reason = _reason(node, spec.functions)
        if reason:
            mistakes.append(Mistake(label, reason))
        splits = isinstance(node, FunctionNode) and node.name == "split"
        if not isinstance(node, LlmNode) and not splits:
            continue
        named = node.request.get("model") if isinstance(node, LlmNode) else None
        try:
            found[models.find(named or spec.model).names[0]] = None
        except WeftError as error:
            mistakes.append(Mistake(f"{label}.model", error.message))
    mistakes += (Mistake("functions", f"no node calls {name!r}") for name in sorted(unused))
    if mistakes:
        raise InvalidGraph(mistakes)
    return tuple(sorted(found))


def named_models(graph: WorkflowGraph) -> set[str | None]:
    """The models that calls name; None: a call names none."""
    nodes = (node for _, node in labelled_nodes(graph.nodes))
    return {node.request.get("model") for node in nodes if isinstance(node, LlmNode)}


def _reason(node: AnyNode, functions: tuple[str, ...]) -> str:
    """Why a node cannot run on this server; empty where it can."""
    match node:
        case FunctionNode(name=str(name)) if name not in BUILTIN_FUNCTIONS and name not in functions:
            return f"{name!r} {_PYTHON.format(' and '.join(BUILTIN_FUNCTIONS))}"
        case ExternalNode(schema=schema) if schema is not None and (found := unchecked_keywords(schema)):
            return f"values from outside are not checked against {', '.join(found)[:300]}"
    return ""
