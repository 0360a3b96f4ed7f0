"""Runs of workflows on simulated engines."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.sim.small import small_device, small_settings
from weft.abi.errors import Unsupported
from weft.core.ids import unpack_tokens
from weft.sim.clock import VirtualClock
from weft.sim.cluster import SimulatedCluster
from weft.sim.run import simulated_engine
from weft.sim.workflow_run import PlayedCall, PlayerLimits, SpelledPrompts, WorkflowPlayer, letters_of
from weft.workflow.analysis.prompts import mark, template_of
from weft.workflow.graph import WorkflowGraph, canonical, graph_from_dict
from weft.workflow.planner.place import PlanEngine
from weft.workflow.run.order import row_by_row
from weft.workflow.run.plan_rounds import PlanRounds, PlanSources
from weft.workflow.run.planned_order import PlannedOrder
from weft.workflow.run.state import RunState

PROMPTS = SpelledPrompts()
ROWS = [{"question": f"row number {number} asks something of its own"} for number in range(6)]


def debate(**fields: Any) -> WorkflowGraph:
    """Two agents that answer, and answer again when they have heard the other."""
    nodes: list[dict[str, Any]] = []
    for agent in "ab":
        said = [{"role": "system", "content": f"agent {agent} " * 8}, {"role": "user", "content": "{{question}}"}]
        nodes.append({"id": f"first_{agent}", "op": "llm", "messages": said, "max_tokens": 20, **fields})
    for agent, other in ("ab", "ba"):
        said = [{"chat": f"first_{agent}"}, {"role": "user", "content": f"heard: {{{{first_{other}}}}}"}]
        nodes.append({"id": f"second_{agent}", "op": "llm", "messages": said, "max_tokens": 10, **fields})
    raw = {"version": 1, "inputs": ["question"], "nodes": nodes, "outputs": {"a": "second_a", "b": "second_b"}}
    return canonical(graph_from_dict(raw))


class Played:
    """A run of `ROWS`, and its calls in the order in which they ended."""

    def __init__(
        self, limits: PlayerLimits | None = None, *, plans: bool = False, num_engines: int = 1,
        graph: WorkflowGraph | None = None, rows: list[dict[str, str]] = ROWS, **options: Any,
    ):  # fmt: skip
        graph = graph or debate(temperature=0)
        device, clock = small_device(200), VirtualClock()
        engines = [simulated_engine(device, small_settings(), clock) for _ in range(num_engines)]
        self.cluster = SimulatedCluster(engines, clock)
        order = PlannedOrder(row_by_row(graph))
        engine = PlanEngine("m", device.kv_tokens, forward=device.forward)
        sources = PlanSources(lambda name: PROMPTS, [engine], "m")
        self.calls: list[PlayedCall] = []
        self.player = WorkflowPlayer(
            self.cluster,
            RunState(graph, order),
            rows,
            limits,
            PlanRounds(graph, order, sources) if plans else None,
            on_call=self.calls.append,
            **options,
        )
        self.player.begin()
        self.cluster.run()


def test_prompts_are_spelled_as_plans_count_them() -> None:
    prompts = SpelledPrompts()
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": f"x{mark(0)}y"}]
    template = template_of(prompts.chat(messages, {}), prompts)
    filled = prompts.chat([messages[0], {"role": "user", "content": "xVALUEy"}], {})
    assert len(template) - 1 + len("VALUE") == len(filled) == prompts.count(filled)
    assert template.count(-1) == 1


def test_answers_depend_on_the_prompt_alone() -> None:
    assert letters_of(b"one", 9) == letters_of(b"one", 12)[:9]
    assert letters_of(b"one", 9) != letters_of(b"two", 9)
    assert letters_of(b"one", 9).isalpha()


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("limits", [PlayerLimits(), PlayerLimits(rows=1), PlayerLimits(waiting_calls=2)])
def test_every_order_gives_the_same_answers(limits: PlayerLimits, plans: bool) -> None:
    reference = Played()
    played = Played(limits, plans=plans, num_engines=2)
    assert played.player.results == reference.player.results
    assert len(played.calls) == 4 * len(ROWS)
    assert played.player.end_s == played.cluster.clock.now()
    # A second answer is behind the first one, and the first one is not computed again but for what fills no page.
    for one in played.calls:
        text = "".join(map(chr, unpack_tokens(one.call.prompt)))
        if one.path == "second_a":
            first = next(each for each in played.calls if each.row == one.row and each.path == "first_a")
            before = "".join(map(chr, unpack_tokens(first.call.prompt + first.call.answer)))
            assert text.startswith(before)


def test_operators_end_before_the_next_begin() -> None:
    labels = ["first_a", "first_b", "second_a", "second_b"]
    played = Played(PlayerLimits(operators=labels))
    assert [one.path for one in played.calls] == [label for label in labels for _ in ROWS]
    ends = {label: max(one.times.end_s for one in played.calls if one.path == label) for label in labels}
    starts = {label: min(one.times.asked_s for one in played.calls if one.path == label) for label in labels}
    assert all(starts[after] >= ends[before] for before, after in itertools.pairwise(labels))


def test_one_row_after_the_other() -> None:
    played = Played(PlayerLimits(rows=1))
    assert [one.row for one in played.calls] == [number for number in range(len(ROWS)) for _ in range(4)]


def test_no_more_calls_wait_than_may() -> None:
    most = 3
    played = Played(PlayerLimits(waiting_calls=most))
    times = sorted([(one.times.asked_s, 1) for one in played.calls] + [(one.times.first_s, -1) for one in played.calls])
    waiting = peak = 0
    for _, change in times:
        waiting += change
        peak = max(peak, waiting)
    assert peak == most
    free = Played()
    assert sum(one.times.asked_s == 0.0 for one in free.calls) == 2 * len(ROWS)


def test_equal_calls_are_made_once_where_their_answers_are_equal() -> None:
    twice = [ROWS[0], ROWS[0]]
    assert len(Played(rows=twice).calls) == 4
    assert len(Played(rows=twice, graph=debate()).calls) == 8


def test_clients_far_away_wait_for_each_call() -> None:
    near, far = Played(), Played(round_trip_s=lambda path: 0.25)
    assert near.player.end_s is not None
    assert far.player.end_s is not None
    assert far.player.end_s == pytest.approx(near.player.end_s + 2 * 0.25, rel=0.02)


def test_what_has_no_model_is_refused() -> None:
    raw = {"version": 1, "inputs": ["question"], "outputs": {"x": "x"},
           "nodes": [{"id": "x", "op": "function", "name": "shout", "args": {"text": "{{question}}"}}]}  # fmt: skip
    with pytest.raises(Unsupported, match="CallFunction"):
        Played(graph=canonical(graph_from_dict(raw)))
