"""Which calls of a graph write the texts of its outputs, so that these can be told while they are generated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from weft.abi.errors import InvalidRequest
from weft.workflow.graph.labels import label_prefix
from weft.workflow.graph.mistakes import nearest
from weft.workflow.graph.nodes import AnyNode, LlmNode, SwitchNode, WorkflowGraph, reference_of
from weft.workflow.graph.templates import Reference


def check_streamed(graph: WorkflowGraph, names: Iterable[str]) -> None:
    """Raise `InvalidRequest` for an output that does not exist or cannot be streamed: one computed from an answer, an
    answer with a schema, or the output of a map or a loop."""
    if isinstance(names, str):
        raise InvalidRequest("stream: give a list of outputs", "stream")
    for name in names:
        if name not in graph.outputs:
            raise InvalidRequest(f"stream: no output is called {name!r}.{nearest(name, graph.outputs)}", "stream")
        if not any(_writers(graph.outputs[name], graph.nodes)):
            raise InvalidRequest(
                f"stream: the output {name!r} ({graph.outputs[name]}) is not the text of one call: only answers "
                "without a schema are streamed, those in cases of a switch too",
                "stream",
            )


def streamed_calls(graph: WorkflowGraph, names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """The paths of the calls whose texts are outputs of these names -> the outputs. The graph may be what the optimiser
    made of one that was checked: an output that is a constant by now has no call."""
    found: dict[str, dict[str, None]] = {}
    for name in names:
        for path in _writers(graph.outputs[name], graph.nodes):
            found.setdefault(path, {})[name] = None
    return {path: tuple(outputs) for path, outputs in found.items()}


def _writers(output: str, nodes: tuple[AnyNode, ...]) -> Iterator[str]:
    """Labels of the calls whose text the value is, one for each case of a switch. They are paths as well, because no
    map and no loop is around them."""
    pending: list[tuple[Reference, tuple[AnyNode, ...], str]] = [(reference_of(output), nodes, "")]
    while pending:
        reference, inside, prefix = pending.pop()
        node = next((node for node in inside if node.id == reference.name), None)
        if isinstance(node, LlmNode) and not reference.path and node.schema is None:
            yield prefix + node.id
        elif isinstance(node, SwitchNode) and len(reference.path) == 1:
            for place, body in node.bodies.items():
                inner = label_prefix(prefix + node.id, node, place)
                pending.append((reference_of(body.outputs[reference.path[0]]), body.nodes, inner))
