"""Lengths of prompts in rows, and what calls share, against prompts that are written out."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.workflow.analysis.operators import Placeholder, Unrolled
from weft.workflow.analysis.prefix_tree import prefix_tree
from weft.workflow.analysis.prompts import Template
from weft.workflow.analysis.row_prompts import RowPrompts
from weft.workflow.analysis.statistics import RowValue

PLACEHOLDERS = (Placeholder("q", None), Placeholder("a", 3, 0))
Piece = tuple[object, ...]


def written(template: Template, row: int, value: RowValue) -> list[Piece]:
    """One item per token; those of different values differ."""
    said: list[Piece] = []
    for element in template:
        if element == -1:
            said += [("q", value.classes[row], at) for at in range(value.tokens[row])]
        elif element == -2:
            said += [("a", row, at) for at in range(3)]
        else:
            said.append((element,))
    return said


def common(one: list[Piece], other: list[Piece]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(
    st.lists(st.lists(st.integers(-2, 2), max_size=6).map(tuple), min_size=1, max_size=4),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
def test_shared_tokens_are_those_of_the_written_prompts(templates: list[Template], classes: list[int]) -> None:
    value = RowValue(tuple(number + 1 for number in classes), tuple(classes))
    tree = prefix_tree([("m", template) for template in templates])
    rows = np.arange(len(classes))
    prompts = RowPrompts(Unrolled((), PLACEHOLDERS, ()), tree, {"m": {"q": value}}, len(classes))
    matrices = prompts.shared_matrices(rows)
    for a, one in enumerate(templates):
        assert prompts.prompt_tokens(a).tolist() == [len(written(one, row, value)) for row in rows]
        for b, other in enumerate(templates):
            nodes = prompts.common(a, b)
            for row in rows:
                expected = [common(written(one, row, value), written(other, to, value)) for to in rows]
                assert matrices[prompts.last_common[a, b]][row].tolist() == expected
                assert prompts.shared(nodes, np.full(len(rows), row), rows).tolist() == expected


def test_unknown_values_differ_in_each_row() -> None:
    tree = prefix_tree([("m", (5, -1))])
    prompts = RowPrompts(Unrolled((), (Placeholder("q", None),), ()), tree, {}, 3)
    assert prompts.classes[1].tolist() == [0, 1, 2]
