"""The trace of a session: each node is checked, merged with an equal one, and handed on when it is made.

Of the passes, `merge_duplicates` holds here too, node by node: a deterministic node that is equal to an earlier one is
that one, unless it failed. `prune` and `push_slices` do not: it is not known what will be asked for, and what is sliced
runs already. Texts and constants are computed at once, which is all that `fold_constants` would do, and
`substitute_cached` is done call by call, as in runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.workflow.frontend.trace import FlowError, FlowTrace
from weft.workflow.frontend.variable import Values, Variable
from weft.workflow.graph.check import check
from weft.workflow.graph.digest import canonical, free_references, node_digest
from weft.workflow.graph.mistakes import InvalidGraph
from weft.workflow.graph.names import all_nodes
from weft.workflow.graph.nodes import MAX_NODES, AnyNode, ExternalNode, GraphNode, WorkflowGraph, count_nodes
from weft.workflow.graph.templates import Reference
from weft.workflow.graph.value_types import ValueType
from weft.workflow.passes.merge_duplicates import may_merge


class SessionTrace(FlowTrace):
    """The nodes of a session. Calls are made from one thread at a time."""

    def __init__(self, values: Values, submit: Callable[[AnyNode], None], has_failed: Callable[[str], bool]):
        """`submit` takes each new node; `has_failed` says it of a node that was submitted."""
        super().__init__()
        self.values = values
        self._submit = submit
        self._has_failed = has_failed
        self._by_digest: dict[str, str] = {}
        """Digests of nodes that may answer for others -> their ids."""
        self._num_nodes = 0

    def add(
        self,
        kind: type[GraphNode],
        op: str,
        fields: Mapping[str, Any],
        *,
        name: str | None = None,
        bodies: Mapping[str, Mapping[str, ValueType]] | None = None,
    ) -> Variable:
        """As `FlowTrace.add`; the node begins to run. Raises `InvalidGraph` for a mistake, and `FlowError` where the
        session has too many nodes or a body has a value from outside."""
        super().add(kind, op, fields, name=name, bodies=bodies)
        node = self._checked(self.nodes.pop())
        kept = self._kept(node)
        return Variable(self, Reference(kept), self._types[kept])

    def _checked(self, node: AnyNode) -> AnyNode:
        names = {reference.name for reference in free_references(node)} & set(self._types)
        graph = WorkflowGraph(inputs=tuple(sorted(names)), nodes=(node,), outputs={"value": node.id})
        mistakes = check(graph, self.names.lines, inputs={name: self._types[name] for name in names})
        if mistakes:
            raise InvalidGraph(mistakes)
        inside = [inner.id for inner in all_nodes((node,)) if isinstance(inner, ExternalNode) and inner is not node]
        if inside:
            raise FlowError(f"{inside[0]}: a value from outside is set by its variable, so it stands in no body")
        self._num_nodes += count_nodes((node,))
        if self._num_nodes > MAX_NODES:
            raise FlowError(f"a session has at most {MAX_NODES:,} nodes: open another one")
        return canonical(graph).nodes[0]

    def _kept(self, node: AnyNode) -> str:
        """The node that computes the value: an equal one that was submitted before, or this one."""
        if may_merge(node):
            digest = node_digest(node, lambda reference: reference)
            known = self._by_digest.get(digest)
            if known is not None and not self._has_failed(known):
                return known
            self._by_digest[digest] = node.id
        self._submit(node)
        return node.id
