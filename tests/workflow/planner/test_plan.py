"""Plans as users get them: their keys, their sums, and that equal arguments give equal plans everywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.workflow.naive import NaiveRunner
from tests.workflow.planner.analysed import scheduled, words
from tests.workflow.random_graphs import INPUTS, graphs
from tests.workflow.shapes import body, graph, llm, loop, mapped, pick, switch, text
from weft.abi.errors import InvalidRequest
from weft.core.cost.model import ForwardModel
from weft.testing.word_tokens import WordTokens
from weft.workflow import plan
from weft.workflow.graph import canonical, graph_from_dict
from weft.workflow.graph.nodes import LlmNode
from weft.workflow.graph.values import RowError
from weft.workflow.planner.place import PlanEngine
from weft.workflow.planner.plan import Plan

ENGINE = PlanEngine(model="m", kv_tokens=8192)
FORWARD = ForwardModel(0.01, 0.0, 0.0, 0.0, 1e-8, 0.0, 0.0, (), (1e-4,))
KEYS = ["digest", "passes", "tree", "objectives", "schedule", "pins", "predicted", "by_node"]


def planned(raw: dict[str, Any], rows: Any = 4, **options: Any) -> Plan:
    tokens = WordTokens()
    options = {"engines": [ENGINE], "tokens": lambda model: tokens} | options
    return plan(raw, rows, "m", **options)


DEBATE = graph(
    *(llm(name, f"{words(30, name)} {{{{q}}}}") for name in ("pro", "con")),
    {"id": "reply", "op": "llm", "messages": [{"chat": "pro"}, {"role": "user", "content": "They say: {{con}}"}]},
    llm("judge", "{{reply}} {{con}}"),
)


def test_the_keys_are_those_of_the_contract() -> None:
    made = planned(DEBATE, statistics={"pro": {"output_tokens": 70}}).to_dict()
    assert list(made) == KEYS
    assert json.loads(json.dumps(made)) == made
    assert [report["name"] for report in made["passes"]][:2] == ["prune", "merge_duplicates"]
    assert {key for part in made["schedule"] for key in part} == {"engine", "group", "order", "rows", "start"}
    assert set(made["by_node"]) == {"pro", "con", "reply", "judge"}
    assert set(made["predicted"]) == set(made["by_node"]["pro"])
    assert made["predicted"]["seconds"] is None  # no profile


def test_figures_of_a_node_are_part_of_those_of_the_run() -> None:
    made = planned(DEBATE).to_dict()
    whole = made["predicted"]
    for name in ("calls", "prompt_tokens", "cached_tokens", "continued_tokens", "prefill_tokens", "output_tokens"):
        assert sum(each[name] for each in made["by_node"].values()) == whole[name]
    assert whole["prompt_tokens"] == whole["cached_tokens"] + whole["continued_tokens"] + whole["prefill_tokens"]
    assert whole["calls"] == 16
    assert made["by_node"]["reply"]["continued_tokens"] > 0
    assert whole["min_prefill_tokens"] <= whole["prefill_tokens"]


@settings(max_examples=25, deadline=None)
@given(graphs())
def test_any_graph_is_scheduled_once_and_in_order(raw: dict[str, Any]) -> None:
    rows = [{name: f"{name} {row}" for name in INPUTS} for row in range(3)]
    made = planned(raw, rows, engines=[ENGINE, ENGINE], optimise=False)
    operators = made.analysed.unrolled.operators
    calls = scheduled(made)
    assert sorted((call.label, call.rounds, call.row) for call in calls) == sorted(
        (operator.node, operator.rounds, row) for operator in operators for row in range(3)
    )
    ranks = made.ranks()
    for engine in (0, 1):
        mine = [call for call in calls if call.engine == engine]
        assert [ranks.rank(call.label, call.rounds, call.row) for call in mine] == list(range(len(mine)))


def test_rounds_that_were_not_expected_stand_with_the_last_one() -> None:
    raw = graph(loop("l", {"s": "q"}, body(llm("say", "{{s}}"), pick("end", "say", matches="x"), s="say"), until="end"))
    ranks = planned(raw, 2, statistics={"l": {"rounds": 2}}).ranks()
    assert ranks.rank("l.say", (5,), 1) == ranks.rank("l.say", (1,), 1) > ranks.rank("l.say", (0,), 1)


MANY = graph(
    *(llm(f"n{number}", f"{words(number % 7 + 1)} {{{{q}}}} {number}") for number in range(7)),
    *(llm(f"m{number}", f"{words(5)} {{{{n{number}}}}} {{{{n{(number * 3) % 7}}}}}") for number in range(7)),
    pick("parts", "q", split=";"),
    mapped("each", "parts", body(llm("note", "{{i}} {{m3}}"), value="note")),
    outputs={**{f"m{number}": f"m{number}" for number in range(7)}, "notes": "each.value"},
)
SCRIPT = """
import json, sys
from tests.workflow.planner.test_plan import MANY, planned
raw = dict(MANY, nodes=MANY["nodes"][:: int(sys.argv[1])])
rows = [{"q": f"a b{row % 3} c"} for row in range(9)]
print(json.dumps(planned(raw, rows, statistics={"n1": {"output_tokens": 9}}).to_dict()))
"""


def computed(raw: dict[str, Any], rows: list[dict[str, Any]]) -> int:
    """Tokens of the tree of all prompts, each once."""
    tokens, prefixes = WordTokens(), set()

    def model(node: LlmNode, request: Mapping[str, Any]) -> str:
        if node.messages is None:
            said = request["prompt"]
        else:
            said = tokens.chat([{"content": "", **message} for message in request["messages"]], request)
        prompt = tuple(tokens.encode(said))
        prefixes.update(prompt[: end + 1] for end in range(len(prompt)))
        return "x x" if len(prompt) % 2 else ""

    for row in rows:
        NaiveRunner(model=model).run(canonical(graph_from_dict(raw)), row)
    return len(prefixes)


@settings(max_examples=60, deadline=None)
@given(graphs(), st.lists(st.sampled_from(["y. x. y", "y. x", "a b c", "", "a b. a b d"]), min_size=1, max_size=4))
def test_no_run_computes_less_than_the_least(raw: dict[str, Any], values: list[str]) -> None:
    rows = [dict.fromkeys(INPUTS, value) for value in values]
    try:
        most = computed(raw, rows)
    except RowError:
        assume(False)
    assert planned(raw, rows, optimise=False).predicted.min_prefill_tokens <= most


NOTES = graph(mapped("m", "q", body(llm("note", f"{words(20)} {{{{i}}}}"), v="note")))


@pytest.mark.parametrize(
    ("lists", "different"),
    [
        ([["a b c", "d e f"]] * 20, 2),
        ([["a b c"], ["d e f", "a b c"], [], ["d e f"], ["g h i", "d e f"]], 3),
        ([["a b c", "a b c", "a b c"]], 1),
    ],
)
def test_lists_of_rows_are_counted_as_they_are(lists: list[list[str]], different: int) -> None:
    rows = [{"q": each} for each in lists]
    count = sum(map(len, lists))
    engine = {"model": "m", "kv_tokens": 8192, "page_size": 1}
    found = planned(NOTES, rows, engines=[engine]).predicted
    # <user>, 20 words, an item of three words, <end> <assistant>
    assert (found.calls, found.prompt_tokens) == (count, count * 26)
    # Of each item and each text behind one a token may be part of what is before.
    assert found.min_prefill_tokens == 21 + different * (2 + 1)
    assert found.min_prefill_tokens <= computed(NOTES, rows) == 21 + different * 5


def test_items_that_other_lists_have_too_are_found_again() -> None:
    engine = {"model": "m", "kv_tokens": 8192, "page_size": 1}
    pairs = [[f"{words(30, f'x{row}_')}", f"{words(30, f'x{row + 1}_')}"] for row in range(8)]
    lone = [[f"{words(30, f'x{row}_')}", f"{words(30, f'y{row}_')}"] for row in range(8)]
    again, new = (
        planned(NOTES, [{"q": each} for each in lists], engines=[engine]).predicted for lists in (pairs, lone)
    )
    assert again.prompt_tokens == new.prompt_tokens
    assert new.cached_tokens - 10 < again.cached_tokens - 7 * 30 < new.cached_tokens + 10


def test_what_is_not_known_is_not_part_of_the_least() -> None:
    parts = pick("parts", "a", split=" ")
    raw = graph(llm("a", f"{words(9)} {{{{q}}}}"), parts, mapped("m", "parts", body(llm("b", "{{i}} {{a}}"), v="b")))
    made = planned(raw, [{"q": f"{row} x y"} for row in range(3)])
    # <user> and 9 words; for each row two of its words, and one of <end> <assistant>
    assert made.predicted.min_prefill_tokens == 10 + 3 * (2 + 1)
    assert made.prediction.by_node()["m.b"].min_prefill_tokens == 0
    assert planned(raw, 3).predicted.min_prefill_tokens == 10 + 1  # of the rows only the number is known


def test_every_process_makes_the_same_plan() -> None:
    found = set()
    for seed, order in (("0", "1"), ("1", "-1"), ("12345", "1")):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[3])}
        ran = subprocess.run([sys.executable, "-c", SCRIPT, order], env=env, capture_output=True, text=True, check=True)
        found.add(ran.stdout)
    assert len(found) == 1
    assert json.loads(found.pop())["schedule"]


def _calls_made(work: Callable[[], object]) -> int:
    count = 0

    def counted(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_the_work_of_a_schedule_grows_with_the_operators_and_not_with_the_rows() -> None:
    from weft.workflow.planner.plan import make_plan

    raw = graph(
        *(llm(f"n{number}", f"{words(number % 5)} {{{{q}}}}") for number in range(44)),
        *(llm(f"m{number}", f"{words(5)} {{{{n{number}}}}}") for number in range(44)),
        outputs={f"m{number}": f"m{number}" for number in range(44)},
    )
    few, many = (planned(raw, rows, optimise=False).analysed for rows in (100, 1000))
    calls = _calls_made(lambda: make_plan(few, [ENGINE]))
    assert calls < 250_000
    assert _calls_made(lambda: make_plan(many, [ENGINE])) < 1.2 * calls


def test_times_are_predicted_where_there_is_a_profile() -> None:
    engine = PlanEngine(model="m", kv_tokens=8192, forward=FORWARD)
    made = planned(DEBATE, 20, engines=[engine]).predicted
    assert made.seconds is not None
    assert made.lower_bound_s is not None
    assert 0 < made.lower_bound_s <= made.seconds
    twice = planned(DEBATE, 20, engines=[engine, engine]).predicted
    assert twice.lower_bound_s is not None
    assert twice.lower_bound_s <= made.lower_bound_s


def test_a_chain_bounds_the_time_from_below() -> None:
    engine = PlanEngine(model="m", kv_tokens=10**6, forward=FORWARD)
    made = planned(graph(llm("a", "{{q}}", max_tokens=20), llm("b", "{{a}}", max_tokens=20)), 1, engines=[engine])
    assert made.predicted.lower_bound_s is not None
    # Ten tokens each, none of which takes less than a step of one token.
    assert made.predicted.lower_bound_s >= 20 * (0.01 + 1e-4)


def test_models_have_engines_of_their_own() -> None:
    tokens = {"m": WordTokens(), "n": WordTokens()}
    raw = graph(llm("a", "{{q}}"), llm("b", "{{a}}", model="n"))
    engines = [{"model": "n", "kv_tokens": 100}, {"model": "m", "kv_tokens": 100}]
    made = planned(raw, [{"q": "x y"}], engines=engines, tokens=tokens.__getitem__)
    assert [(call.label, call.engine) for call in scheduled(made)] == [("a", 1), ("b", 0)]
    assert {node["model"] for node in made.to_dict()["tree"] if node["parent"] is None} == {"m", "n"}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"engines": []}, "engines"),
        ({"engines": [{"model": "other", "kv_tokens": 1}]}, "engines"),
        ({"engines": [{"model": "m", "kv_tokens": 0}]}, "engines"),
        ({"engines": [{"model": "m", "pages": 1, "kv_tokens": 9}]}, "engines"),
        ({"statistics": {"pro": {"tokens": 1}}}, "statistics"),
        ({"statistics": {"nobody": {"output_tokens": 1}}}, "statistics"),
        ({"statistics": [1]}, "statistics"),
        ({"objective": {"nothing": "latency"}}, "objective"),
        ({"rows": -1}, "rows"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(options: dict[str, Any], param: str) -> None:
    rows = options.pop("rows", 2)
    with pytest.raises(InvalidRequest) as caught:
        planned(DEBATE, rows, **options)
    assert caught.value.param == param


CHOICE = graph(
    pick("parts", "q", split=" "),
    mapped("m", "parts", body(llm("a", "{{i}}"), v="a")),
    switch("s", "q", a=body(llm("b"), v="b")) | {"default": body(text("c", "z"), v="c")},
    outputs={"m": "m", "s": "s"},
)


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        ({"m": {"items": -3}}, "statistics: m.items: is -3; a number from 0 to 10,000 is needed"),
        ({"m": {"items": 1e308}}, "m.items: is 1e+308; a number from 0"),
        ({"m": {"items": float("nan")}}, "m.items: is nan; a number from 0"),
        ({"m": {"items": True}}, "m.items: is True; a number from 0"),
        ({"m": {"rounds": 0}}, "m.rounds: is 0; a number from 1 to 1,000 is needed"),
        ({"q": {"output_tokens": float("inf")}}, "q.output_tokens: is inf; a number from 0 to 10,000,000 is needed"),
        ({"q": {"tokens": 1}}, "q.tokens: there is no such figure; there are output_tokens, items, rounds, shares"),
        ({"q": 3}, "q: an object is needed, with output_tokens, items, rounds, shares"),
        ({"s": {"shares": {"cases[a]": -1}}}, "s.shares.cases[a]: is -1; a number from 0 to 1 is needed"),
        ({"s": {"shares": {"cases[a]": 0.6, "default": 0.5}}}, "s.shares: the shares are 1.1 together; at most 1"),
        ({"s": {"shares": {"a": 0.9}}}, "s.shares: there is no case 'a'; there are cases[a], default"),
        ({"s": {"shares": [1]}}, "s.shares: an object is needed, with the part of the rows by case"),
        ({"m": {"shares": {"a": 0.9}}}, "m.shares: there is no case 'a'; m is no switch"),
        ({"q": {"output_tokens": -5}, "mm": {}, "m": {"items": -1}}, "The statistics have 3 mistakes:\n  q.output"),
    ],
)
def test_statistics_that_cannot_be_true_are_refused(statistics: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)) as caught:
        planned(CHOICE, 2, statistics=statistics)
    assert caught.value.param == "statistics"


def test_statistics_at_their_limits_are_taken() -> None:
    shares = {"cases[a]": 1 / 3, "default": 2 / 3}
    figures = {"m": {"items": 0, "rounds": None}, "s": {"shares": shares}, "q": {"output_tokens": 10_000_000}}
    assert planned(CHOICE, 3, statistics=figures).predicted.calls == pytest.approx(1)


def test_a_workflow_that_would_take_too_long_is_refused() -> None:
    many = [llm(f"n{number}", f"{number} {{{{q}}}}") for number in range(300)]
    inside = body(*many, s="n0")
    raw = graph(loop("l", {"s": "q"}, inside, max_rounds=2), outputs={"out": "l.s"})
    assert planned(raw, 1, optimise=True).predicted.calls == 2  # of which most are pruned
    with pytest.raises(InvalidRequest, match="500") as caught:
        planned(raw, 1, optimise=False)
    assert caught.value.param == "graph"


def test_rows_that_are_alike_stay_together() -> None:
    experts = [llm(f"expert{number}", f"{words(30, f'role{number}_')} {{{{q}}}}") for number in range(8)]
    answers = " ".join(f"{{{{expert{number}}}}}" for number in range(8))
    statistics = {f"expert{number}": {"output_tokens": 20} for number in range(8)}
    engine = PlanEngine(model="m", kv_tokens=600)
    made = planned(graph(*experts, llm("summary", answers)), 12, engines=[engine], statistics=statistics)
    assert len(scheduled(made)) == 9 * 12
    assert len(made.arrangement.parts) < 9


def test_a_plan_may_be_for_a_graph_object() -> None:
    assert planned(graph_from_dict(DEBATE)).to_dict() == planned(DEBATE).to_dict()
