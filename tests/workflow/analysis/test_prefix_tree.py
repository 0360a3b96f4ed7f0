"""Which prompts begin alike, token by token, and values by what makes them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.workflow.analysis.prefix_tree import PrefixTree, prefix_tree
from weft.workflow.analysis.prompts import Template

VALUE, OTHER = -1, -2
"""Placeholders 0 and 1."""
templates = st.lists(st.lists(st.integers(-2, 2), max_size=8).map(tuple), max_size=6)


def common(one: Template, other: Template) -> int:
    length = 0
    while one[length : length + 1] == other[length : length + 1] != ():
        length += 1
    return length


def elements(tree: PrefixTree, path: tuple[int, ...]) -> Template:
    return tuple(element for node in path for element in tree.nodes[node].elements)


@given(templates)
def test_paths_spell_the_prompts_and_share_exactly_their_common_prefix(prompts: list[Template]) -> None:
    tree = prefix_tree([("m", prompt) for prompt in prompts])
    for prompt, path in zip(prompts, tree.paths, strict=True):
        assert elements(tree, path) == prompt
        assert [tree.nodes[node].parent for node in path] == [None, *path[:-1]][: len(path)]
    for one, path in zip(prompts, tree.paths, strict=True):
        for other, other_path in zip(prompts, tree.paths, strict=True):
            shared = tuple(a for a, b in zip(path, other_path, strict=False) if a == b)
            assert len(elements(tree, shared)) == common(one, other)
    for node in tree.nodes:
        assert len(node.elements) == 1 or min(node.elements) >= 0


def test_a_node_is_a_run_of_tokens_or_one_value() -> None:
    tree = prefix_tree([("m", (1, 2, VALUE, 3)), ("m", (1, 2, VALUE, 4)), ("m", (1, 5, OTHER))])
    assert [(node.parent, node.elements, node.placeholder) for node in tree.nodes] == [
        (None, (1,), None),
        (0, (2,), None),
        (1, (VALUE,), 0),
        (2, (3,), None),
        (2, (4,), None),
        (0, (5,), None),
        (5, (OTHER,), 1),
    ]
    assert tree.paths == ((0, 1, 2, 3), (0, 1, 2, 4), (0, 5, 6))


def test_models_share_nothing() -> None:
    tree = prefix_tree([("one", (1, 2)), ("other", (1, 2)), ("one", (1, 3))])
    assert [(node.parent, node.elements, node.model) for node in tree.nodes] == [
        (None, (1,), "one"),
        (0, (2,), "one"),
        (0, (3,), "one"),
        (None, (1, 2), "other"),
    ]
    assert tree.paths == ((0, 1), (3,), (0, 2))
