"""The prompts of all rows, as lengths: how long each piece is in each row, and which rows share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from weft.workflow.analysis.operators import Unrolled
from weft.workflow.analysis.prefix_tree import PrefixTree
from weft.workflow.analysis.statistics import DEFAULT_VALUE_TOKENS, RowValue

I64 = npt.NDArray[np.int64]


RowValues = Mapping[str, Mapping[str | int, RowValue]]
"""By model and name of the input, or number of the placeholder of a known item: how long values are is a matter of the
model's tokenizer."""


class RowPrompts:
    """Lengths of prompts and of what they share, by operator and row. Two calls share the nodes of the prefix tree that
    both paths have, up to the first whose value differs between their rows."""

    def __init__(self, unrolled: Unrolled, tree: PrefixTree, values: RowValues, num_rows: int):
        """An input that is missing in `values` has the default length and differs in each row."""
        self.num_rows = num_rows
        self.paths = tree.paths
        self.parents = tuple(node.parent for node in tree.nodes)
        self.elements = tuple(len(node.elements) for node in tree.nodes)
        """[nodes] tokens and placeholders of templates."""
        self._own = np.arange(num_rows)
        self.tokens: list[I64] = []
        """[nodes][rows] length of the piece."""
        self.classes: list[I64] = []
        """[nodes][rows] equal where the prompts up to the end of the piece are."""
        self.values: list[RowValue | None] = []
        """[nodes] of a value of which something is known in each row."""
        for node in tree.nodes:
            value = None
            before = np.zeros(num_rows, np.int64) if node.parent is None else self.classes[node.parent]
            if node.placeholder is None:
                self.tokens.append(np.full(num_rows, len(node.elements)))
                self.classes.append(before)
            else:
                placeholder = unrolled.placeholders[node.placeholder]
                inputs = values.get(node.model, {})
                value = inputs.get(placeholder.name if placeholder.tokens is None else node.placeholder)
                if value is None:
                    expected = DEFAULT_VALUE_TOKENS if placeholder.tokens is None else placeholder.tokens
                    self.tokens.append(np.full(num_rows, expected))
                    self.classes.append(self._own)
                else:
                    self.tokens.append(np.array(value.tokens, np.int64))
                    self.classes.append(both(before, np.array(value.classes, np.int64)))
            self.values.append(value)
        self.depths = self._depths()
        """[nodes][rows] tokens from the beginning of the prompt to the end of the piece."""
        self.last_common = self._last_common()
        """[operators, operators] the last node that two prompts have in common, -1 for none."""

    def _depths(self) -> list[I64]:
        depths: list[I64] = []
        for parent, tokens in zip(self.parents, self.tokens, strict=True):
            depths.append(tokens if parent is None else depths[parent] + tokens)
        return depths

    def prompt_tokens(self, operator: int) -> I64:
        """[rows] tokens of an operator's prompt, placeholders at their expected lengths."""
        path = self.paths[operator]
        return self.depths[path[-1]] if path else np.zeros(self.num_rows, np.int64)

    def shared_by_items(self, operator: int, elements: int) -> I64:
        """[rows] tokens of the pieces that are within the first `elements` elements of an operator's template."""
        shared = np.zeros(self.num_rows, np.int64)
        for node in self.paths[operator]:
            elements -= self.elements[node]
            if elements < 0:
                break
            shared = self.depths[node]
        return shared

    def _last_common(self) -> I64:
        longest = max(map(len, self.paths), default=0)
        # A place past the end is -1 behind every path, where both paths may have it.
        steps = np.full((len(self.paths), longest + 1), -1, np.int64)
        for number, path in enumerate(self.paths):
            steps[number, : len(path)] = path
        last = np.full((len(self.paths), len(self.paths)), -1, np.int64)
        alike = np.ones(last.shape, np.bool_)
        for column in steps.T:
            alike &= (column[:, None] == column[None, :]) & (column[:, None] >= 0)
            last = np.where(alike, column[:, None], last)
        return last

    def common(self, one: int, other: int) -> tuple[int, ...]:
        """The nodes that two operators' prompts begin with."""
        last = int(self.last_common[one, other])
        path = self.paths[one]
        return path[: path.index(last) + 1] if last >= 0 else ()

    def shared(self, nodes: Sequence[int], rows: I64, others: I64) -> I64:
        """[n] tokens that prompts of `rows` [n] share with those of `others` [n], which have these nodes in common."""
        total = np.zeros(len(rows), np.int64)
        for node in nodes:
            total += self.tokens[node][rows] * (self.classes[node][rows] == self.classes[node][others])
        return total

    def shared_matrices(self, rows: I64) -> I64:
        """[nodes + 1, n, n] tokens that prompts of two of `rows` [n] share up to the end of a node that both have; the
        last is that of no node."""
        matrices = np.zeros((len(self.parents) + 1, len(rows), len(rows)), np.int64)
        tokens = np.array(self.tokens, np.int64).reshape(len(self.parents), self.num_rows)[:, rows]
        classes = np.array(self.classes, np.int64).reshape(len(self.parents), self.num_rows)[:, rows]
        np.multiply(tokens[:, :, None], classes[:, :, None] == classes[:, None, :], out=matrices[:-1])
        for number, parent in enumerate(self.parents):
            if parent is not None:
                matrices[number] += matrices[parent]
        return matrices


def both(one: I64, other: I64) -> I64:
    """Classes of pairs."""
    width = int(other.max(initial=0)) + 1
    classes: I64 = np.unique(one * width + other, return_inverse=True)[1].astype(np.int64)
    return classes
