"""Figures that earlier runs measured, by label of the nodes of a graph: a run that has them needs no sample.

An operator is known again by what it does: its request and the text of its prompt between the values. Its name and the
rest of its graph do not matter. A later run counts as much as all before it, so figures follow what changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from weft.abi.errors import StorageFailed
from weft.store.statistics import StatisticsTable
from weft.workflow.analysis.statistics import NodeStatistics
from weft.workflow.graph.digest import node_digest
from weft.workflow.graph.labels import labelled_nodes
from weft.workflow.graph.nodes import AnyNode, LlmNode, LoopNode, MapNode, SwitchNode, WorkflowGraph
from weft.workflow.graph.templates import Reference

MAX_FIGURES_BYTES = 4096
"""Of an operator, as JSON: a switch with more cases than that holds is forgotten."""
_UNRELATED = frozenset({"cache_salt", "deadline_s", "objective", "priority", "session_id", "user"})
"""Fields of requests on which lengths do not depend."""


class KnownStatistics:
    """The figures of one graph's nodes in a database."""

    def __init__(self, table: StatisticsTable, graph: WorkflowGraph, model: str, tenant: str = ""):
        """`model` is what lengths depend on besides the nodes."""
        self._table = table
        self._model = model
        self._tenant = tenant
        self._operators = {
            label: operator_digest(node)
            for label, node in labelled_nodes(graph.nodes)
            if isinstance(node, (LlmNode, MapNode, LoopNode, SwitchNode))
        }
        """By label."""
        self._found: dict[str, NodeStatistics] = {}
        """By operator."""

    def load(self) -> dict[str, dict[str, Any]]:
        """Known figures by label, as `weft.workflow.plan` takes them. Blocks. Nothing where they cannot be read: the
        database has logged why."""
        try:
            found = self._table.get(self._tenant, self._model, set(self._operators.values()))
        except StorageFailed:
            return {}
        self._found = {name: msgspec.json.decode(figures, type=NodeStatistics) for name, figures in found.items()}
        return {
            label: msgspec.to_builtins(self._found[operator])
            for label, operator in self._operators.items()
            if operator in self._found
        }

    def keep(self, measured: Mapping[str, Mapping[str, Any]]) -> None:
        """Note what a run measured, by label. It is written some time later."""
        figures = {}
        for label, found in measured.items():
            operator = self._operators.get(label)
            if operator is not None:
                new = msgspec.convert(dict(found), NodeStatistics)
                encoded = msgspec.json.encode(_joined(self._found.get(operator), new))
                if len(encoded) <= MAX_FIGURES_BYTES:
                    figures[operator] = encoded
        if figures:
            with suppress(StorageFailed):  # the database says where and why, here and where the write fails later
                self._table.put(self._tenant, self._model, figures)


def operator_digest(node: AnyNode) -> str:
    """A digest of what a node does, the same for every name and every source of its values."""
    if isinstance(node, LlmNode):
        request = {name: value for name, value in node.request.items() if name not in _UNRELATED}
        node = msgspec.structs.replace(node, request=request)
    return node_digest(node, lambda reference: Reference("value", reference.path))


def _joined(before: NodeStatistics | None, new: NodeStatistics) -> NodeStatistics:
    """Means of both, each as much."""
    if before is None:
        return new
    shares = new.shares
    if shares is not None and before.shares is not None:
        places = sorted({*shares, *before.shares})
        shares = {place: (shares.get(place, 0.0) + before.shares.get(place, 0.0)) / 2 for place in places}
    return NodeStatistics(
        output_tokens=_mean(before.output_tokens, new.output_tokens),
        items=_mean(before.items, new.items),
        rounds=_mean(before.rounds, new.rounds),
        shares=before.shares if shares is None else shares,
    )


def _mean(before: float | None, new: float | None) -> float | None:
    if before is None or new is None:
        return before if new is None else new
    return (before + new) / 2


def with_given(
    known: Mapping[str, Mapping[str, Any]], given: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """Known figures, and those that a user gives in place of them."""
    return {label: {**known.get(label, {}), **given.get(label, {})} for label in {**known, **given}}
