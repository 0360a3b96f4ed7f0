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
from weft.workflow.frontend.variable import Values, Variable, reference_in
from weft.workflow.graph.check import check
from weft.workflow.graph.digest import canonical, free_references, node_digest
from weft.workflow.graph.json import growth_from_list
from weft.workflow.graph.mistakes import InvalidGraph, Mistake
from weft.workflow.graph.names import all_nodes
from weft.workflow.graph.nodes import MAX_NODES, AnyNode, ExternalNode, GraphNode, WorkflowGraph, count_nodes
from weft.workflow.graph.schema_check import unchecked_keywords
from weft.workflow.graph.templates import Reference
from weft.workflow.graph.value_types import ValueType
from weft.workflow.passes.merge_duplicates import may_merge


class SessionTrace(FlowTrace):
    """The nodes of a session. Calls are made from one thread at a time."""

    def __init__(
        self,
        submit: Callable[[AnyNode], None],
        has_failed: Callable[[str], bool],
        values: Values | None = None,
        check_more: Callable[[AnyNode], None] = lambda node: None,
    ):
        """`submit` takes each new node; `has_failed` says it of a node that was submitted. Without `values`, which
        variables ask for theirs, the nodes are a client's: mistakes have no lines. `check_more` may refuse a node
        before it is submitted."""
        super().__init__()
        self.values = values
        self._submit = submit
        self._has_failed = has_failed
        self.check_more = check_more
        self._nodes: dict[str, AnyNode] = {}
        self._by_digest: dict[str, str] = {}
        """Digests of nodes that may answer for others -> their ids."""
        self._num_nodes = 0

    @property
    def is_empty(self) -> bool:
        """Whether no node was submitted."""
        return not self._nodes

    def add(
        self,
        kind: type[GraphNode],
        op: str,
        fields: Mapping[str, Any],
        *,
        name: str | None = None,
        bodies: Mapping[str, Mapping[str, ValueType]] | None = None,
    ) -> Variable:
        """Check a node, merge it with an equal one or submit it. Raises `InvalidGraph` for a mistake, and `FlowError`
        where the session has too many nodes or a body has a value from outside."""
        added = reference_in(super().add(kind, op, fields, name=name, bodies=bodies)).name
        try:
            node = self._checked(self.nodes.pop())
        except BaseException:
            del self._types[added]
            self.names.used.discard(added)
            raise
        kept = self._kept(node)
        if kept != added:
            del self._types[added]
        return Variable(self, Reference(kept), self._types[kept])

    def variable(self, reference: Reference) -> Variable:
        """A variable of a node that was added."""
        return Variable(self, reference, self.type_of(reference))

    def extend(self, raw: Any) -> tuple[str, ...]:
        """Add nodes from decoded JSON, which begin to run. Returns their ids. Raises as `add`."""
        nodes, types = growth_from_list(raw, self._types, self._nodes)
        self._bounded(nodes)
        for node in nodes:
            self.names.used.add(node.id)
            self._types[node.id] = types[node.id]
            self._nodes[node.id] = node
            self._submit(node)
        return tuple(node.id for node in nodes)

    def _checked(self, node: AnyNode) -> AnyNode:
        names = {reference.name for reference in free_references(node)} & set(self._types)
        graph = WorkflowGraph(inputs=tuple(sorted(names)), nodes=(node,), outputs={"value": node.id})
        lines = self.names.lines if self.values is not None else None
        mistakes = check(graph, lines, inputs={name: self._types[name] for name in names})
        if mistakes:
            raise InvalidGraph(mistakes)
        self._bounded((node,))
        return canonical(graph, self._nodes).nodes[0]

    def _bounded(self, nodes: tuple[AnyNode, ...]) -> None:
        outer = {node.id for node in nodes}
        for inner in all_nodes(nodes):
            if isinstance(inner, ExternalNode) and inner.id not in outer:
                raise FlowError(f"{inner.id}: a value from outside is set by its variable, so it cannot be in a body")
        for node in nodes:
            if isinstance(node, ExternalNode) and (unchecked := unchecked_keywords(node.schema or {})):
                what = f"values from outside are not checked against {', '.join(unchecked)[:300]}"
                raise InvalidGraph([Mistake(f"{node.id}.schema", what)])
            self.check_more(node)
        count = self._num_nodes + count_nodes(nodes)
        if count > MAX_NODES:
            raise FlowError(f"a session may have {MAX_NODES:,} nodes: open another one")
        self._num_nodes = count

    def _kept(self, node: AnyNode) -> str:
        """The node that computes the value: an equal one that was submitted before, or this one."""
        if may_merge(node):
            digest = node_digest(node, lambda reference: reference)
            known = self._by_digest.get(digest)
            if known is not None and not self._has_failed(known):
                return known
            self._by_digest[digest] = node.id
        self._nodes[node.id] = node
        self._submit(node)
        return node.id
