"""Templated radix tree (Helium, section 5 and appendix A): which operators' prompts begin alike. Each model has a tree
of its own, because models share no KV.

A node is a run of tokens or one placeholder, so that a prefix can end before, between and after values. An operator
hangs at the node where its prompt ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from weft.workflow.analysis.operators import Unrolled
from weft.workflow.analysis.prompts import Template
from weft.workflow.analysis.statistics import common_prefix


class PrefixNode(NamedTuple):
    """A piece that prompts share: tokens that are known, or one value to come."""

    parent: int | None
    """None: prompts begin here."""
    elements: Template
    """Tokens, or one placeholder."""
    model: str

    @property
    def placeholder(self) -> int | None:
        """The number of the placeholder; None for tokens."""
        return -1 - self.elements[0] if self.elements[0] < 0 else None


class PrefixTree(NamedTuple):
    """Nodes, each after its parent, and the path of each operator from the root on."""

    nodes: tuple[PrefixNode, ...]
    paths: tuple[tuple[int, ...], ...]
    """[operators]"""

    def to_dict(self, unrolled: Unrolled) -> list[dict[str, Any]]:
        """The nodes for people and for JSON: parent, tokens or the value, and the operators whose prompts end here."""
        ends: list[list[str]] = [[] for _ in self.nodes]
        for operator, path in zip(unrolled.operators, self.paths, strict=True):
            if path and operator.node not in ends[path[-1]]:
                ends[path[-1]].append(operator.node)
        rows = []
        for node, nodes in zip(self.nodes, ends, strict=True):
            own: dict[str, Any] = {"parent": node.parent} | ({"model": node.model} if node.parent is None else {})
            if node.placeholder is None:
                own["tokens"] = len(node.elements)
            else:
                own["value"] = unrolled.placeholders[node.placeholder].name
            rows.append(own | ({"nodes": nodes} if nodes else {}))
        return rows


def prefix_tree(prompts: Sequence[tuple[str, Template]]) -> PrefixTree:
    """The trees of prompts, each the name of its model and its template. Their order follows that of the prompts and
    nothing else."""
    builders: dict[str, _Builder] = {}
    for model, template in prompts:
        builders.setdefault(model, _Builder()).insert(template)
    nodes: list[PrefixNode] = []
    numbers = {model: builder.number(model, nodes) for model, builder in builders.items()}
    return PrefixTree(
        tuple(nodes), tuple(builders[model].path(template, numbers[model]) for model, template in prompts)
    )


class _Node:
    def __init__(self, elements: Template):
        self.elements = elements
        self.children: dict[int, _Node] = {}


class _Builder:
    def __init__(self) -> None:
        self._root = _Node(())

    def insert(self, template: Template) -> None:
        node, rest = self._root, template
        while rest:
            child = node.children.get(rest[0])
            if child is None:
                for piece in _pieces(rest):
                    below = _Node(piece)
                    node.children[piece[0]] = below
                    node = below
                return
            common = common_prefix(child.elements, rest)
            if common < len(child.elements):
                tail = _Node(child.elements[common:])
                tail.children = child.children
                child.elements, child.children = child.elements[:common], {tail.elements[0]: tail}
            node, rest = child, rest[common:]

    def number(self, model: str, nodes: list[PrefixNode]) -> dict[int, int]:
        """Append the nodes, each after its parent. Returns their numbers by identity."""
        numbers: dict[int, int] = {}
        waiting: list[tuple[_Node, int | None]] = [(child, None) for child in reversed(self._root.children.values())]
        while waiting:
            node, parent = waiting.pop()
            numbers[id(node)] = number = len(nodes)
            nodes.append(PrefixNode(parent, node.elements, model))
            waiting += [(child, number) for child in reversed(node.children.values())]
        return numbers

    def path(self, template: Template, numbers: dict[int, int]) -> tuple[int, ...]:
        """The numbers of the nodes that a prompt is made of."""
        path = []
        node, at = self._root, 0
        while at < len(template):
            node = node.children[template[at]]
            path.append(numbers[id(node)])
            at += len(node.elements)
        return tuple(path)


def _pieces(template: Template) -> list[Template]:
    """Runs of tokens, and placeholders one by one."""
    pieces: list[Template] = []
    start = 0
    for at, element in enumerate(template):
        if element < 0:
            if start < at:
                pieces.append(template[start:at])
            pieces.append((element,))
            start = at + 1
    if start < len(template):
        pieces.append(template[start:])
    return pieces
