"""Strategies of prompting: trees, graphs and recursions of contexts."""

from __future__ import annotations

import json
import re
from fractions import Fraction

import pytest

from tests.examples.help import Lab


def steps(lab: Lab) -> int:
    """Forward passes of the engine so far."""
    return lab.runner.run(lab.engine.stats()).steps


@pytest.mark.parametrize("numbers", [[4, 9, 10, 13], [1, 2, 3, 4]])
def test_a_tree_of_thoughts_finds_24(lab: Lab, numbers: list[int]) -> None:
    result = lab.example("tree_of_thought", {"numbers": numbers})
    left = [Fraction(number) for number in numbers]
    for line in result["solution"]:
        one, sign, two, value, rest = re.fullmatch(r"(\S+) (\S) (\S+) = (\S+) \(left: (.*)\)", line).groups()
        a, b = Fraction(one), Fraction(two)
        left.remove(a)
        left.remove(b)
        assert Fraction(value) == {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[sign]
        left.append(Fraction(value))
        assert sorted(left) == sorted(Fraction(number) for number in rest.split())
    assert left == [24]
    # Far fewer than the 36 * 18 * 6 lines of the whole tree, and never more than were asked for.
    assert result["tried"] <= 12 + 5 * 12 + 5 * 12


def test_a_tree_without_a_solution_says_so(lab: Lab) -> None:
    result = lab.example("tree_of_thought", {"numbers": [1, 1, 1], "proposals": 3, "breadth": 2})
    assert result == {"solution": None, "tried": 9}


def test_recursion_keeps_contexts_short(lab: Lab) -> None:
    problem = "((14 + 38) * (17 - 12)) - (18 * (9 + 4))"
    deep = lab.example("recursion_of_thought", {"problem": problem})
    assert deep["value"] == 52 * 5 - 18 * 13
    assert deep["contexts"] == len(deep["steps"]) == 6
    flat = lab.example("recursion_of_thought", {"problem": "260 - 234"})
    assert (flat["value"], flat["contexts"]) == (26, 1)
    # The longest context of the large problem is no longer than the one of its largest step.
    assert deep["longest"] == flat["longest"]
    with pytest.raises(AssertionError, match="max_depth"):
        lab.example("recursion_of_thought", {"problem": problem, "max_depth": 2})


def test_a_graph_has_the_best_of_its_drafts_and_vertices_of_many(lab: Lab) -> None:
    notes = ["bread: $4, milk: $2", "cheese: $9, honey: $7", "soap: $3, tea: $5"]
    result = lab.example("graph_of_thought", {"notes": notes})
    assert result["names"] == ["bread", "milk", "cheese", "honey", "soap", "tea"]
    graph = result["graph"]
    assert all(vertex["text"] in vertex["drafts"] and len(vertex["drafts"]) == 3 for vertex in graph)
    assert all(source < vertex["id"] for vertex in graph for source in vertex["from"])
    assert any(len(set(vertex["from"])) >= 2 for vertex in graph)
    assert graph[-1]["score"] == 1.0
    for note in notes:
        read = next(vertex for vertex in graph if not vertex["from"] and vertex["text"].find(note.split(":")[0]) > 0)
        assert read["score"] == max(share(draft, note) for draft in read["drafts"])
    # What is not right is refined: nothing that was left alone has a lower score.
    refined = {source for vertex in graph for source in vertex["from"]}
    assert all(vertex["score"] == 1.0 for vertex in graph if vertex["id"] not in refined)


def share(text: str, note: str) -> float:
    """How many of a note's names a text has, and nothing else."""
    right = [entry.split(":")[0] for entry in note.split(", ")]
    found = re.split(", | and ", text.removeprefix("The items are ").removesuffix("."))
    return len(set(right) & set(found)) / max(len(right), len(found))


def test_points_of_a_skeleton_are_written_at_the_same_time(lab: Lab) -> None:
    before = steps(lab)
    result = lab.example("skeleton_of_thought")
    took = steps(lab) - before
    assert result["points"] == ["lamp", "kite", "drum"]
    assert len(result["texts"]) == 3
    for point, text in zip(result["points"], result["texts"], strict=True):
        assert point in text
        assert "Ada" in text
    lengths = [len(lab.encode(text)) for text in result["texts"]]
    # As long as the longest of them, not as all together.
    assert took < len(lab.encode(result["skeleton"])) + max(lengths) + 25 < sum(lengths)


def test_what_went_wrong_is_learned_and_kept(lab: Lab) -> None:
    keys = ["job", "name", "age", "city"]
    first = lab.example("reflexion", {"keys": keys, "seed": 12})
    assert first["record"] == {"name": "Szczepan", "city": "Quetzaltenango", "age": 83, "job": "goldsmith"}
    lessons = [trial["lesson"] for trial in first["trials"]]
    assert len(lessons) > 1
    assert lessons[-1] is None
    assert all(lessons[:-1])
    assert first["learned"] == list(dict.fromkeys(lessons[:-1]))
    # The next run begins with what this one learned.
    assert lab.example("reflexion", {"trials": 0})["learned"] == first["learned"]
    assert json.loads(first["trials"][-1]["said"]) == first["record"]


@pytest.mark.parametrize("words", [["king", "river", "bread", "lamp"], ["queen", "river", "key"]])
def test_a_search_finds_what_greedy_decoding_does_not(lab: Lab, words: list[str]) -> None:
    result, stories = lab.told("mcts", {"rounds": 3, "words": words})
    assert len({told["story"] for told in stories}) == 3
    assert result["worth"] == max(told["worth"] for told in stories) > result["greedy"]
    assert result["worth"] == sum(word in result["text"] for word in words) / len(words)
    assert result["text"] in [told["story"] for told in stories]
    assert 1 < result["nodes"] <= 1 + result["rounds"] == 4
