"""Runs of workflows on simulated engines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from tests.sim.small import small_device, small_settings
from weft.abi.errors import Unsupported
from weft.cache.integrity import check_integrity
from weft.core.ids import unpack_tokens
from weft.core.wire import Command, Release
from weft.sim.clock import VirtualClock
from weft.sim.cluster import LeastQueue, RouterChoice, SimulatedCluster
from weft.sim.engine import SimulatedEngine
from weft.sim.run import simulated_engine
from weft.sim.workflow_run import PlayedCall, PlayerLimits, SpelledPrompts, WorkflowPlayer, letters_of
from weft.workflow.actuals import PinCounts
from weft.workflow.analysis.prompts import mark, template_of
from weft.workflow.graph import WorkflowGraph, canonical, graph_from_dict
from weft.workflow.planner.place import PlanEngine
from weft.workflow.run.calls import ModelAnswer
from weft.workflow.run.order import no_hints, row_by_row
from weft.workflow.run.plan_rounds import PlanRounds, PlanSources
from weft.workflow.run.planned_order import PlannedOrder
from weft.workflow.run.settings import NO_PLANS, PlanSettings
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
        self, limits: PlayerLimits | None = None, *, settings: PlanSettings | None = None, num_engines: int = 1,
        graph: WorkflowGraph | None = None, rows: list[dict[str, str]] = ROWS, num_pages: int = 200,
        routes: bool = False, knows_lengths: bool = False, **options: Any,
    ):  # fmt: skip
        """Without `settings` the calls are those of a client."""
        graph = graph or debate(temperature=0)
        device, clock = small_device(num_pages), VirtualClock()
        of_engines = small_settings(policy="min_waste")
        engines = [simulated_engine(device, of_engines, clock) for _ in range(num_engines)]
        choice = RouterChoice.of(device, of_engines, num_engines) if routes else LeastQueue(num_engines)
        self.cluster = SimulatedCluster(engines, clock, choice)
        self.released: list[Release] = []
        for engine in engines:
            self._listen(engine)
        order = PlannedOrder(row_by_row(graph), settings)
        planned = [PlanEngine("m", device.kv_tokens, forward=device.forward, replica=at) for at in range(num_engines)]
        sources = PlanSources(lambda name: PROMPTS, planned, "m")
        known = {node.id: {"output_tokens": node.request["max_tokens"]} for node in graph.nodes if knows_lengths}  # type: ignore[union-attr]
        self.calls: list[PlayedCall] = []
        self.player = WorkflowPlayer(
            self.cluster,
            RunState(graph, order, hints=no_hints if settings is None else order.hints),
            rows,
            limits,
            PlanRounds(graph, order, sources, known, settings) if settings and settings.needs_plans else None,
            on_call=self.calls.append,
            **options,
        )
        self.player.begin()
        self.cluster.run()

    def _listen(self, engine: SimulatedEngine) -> None:
        submit = engine.submit

        def listening(commands: Sequence[Command]) -> None:
            self.released += [command for command in commands if isinstance(command, Release)]
            submit(commands)

        engine.submit = listening  # type: ignore[method-assign]


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


@pytest.mark.parametrize("settings", [None, PlanSettings(), PlanSettings(order=False), PlanSettings(engines=False)])
@pytest.mark.parametrize("limits", [PlayerLimits(), PlayerLimits(rows=1), PlayerLimits(waiting_calls=2)])
def test_every_order_gives_the_same_answers(limits: PlayerLimits, settings: PlanSettings | None) -> None:
    reference = Played()
    played = Played(limits, settings=settings, num_engines=2)
    assert_nothing_kept(played)
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


def test_calls_begin_conversations_while_fewer_wait_than_may() -> None:
    most = 3
    played = Played(PlayerLimits(waiting_calls=most))
    waits = [(one.times.asked_s, one.times.first_s) for one in played.calls]
    num_waiting = {
        (one.row, one.path): sum(asked <= one.times.asked_s < first for asked, first in waits) for one in played.calls
    }
    assert max(count for (_, path), count in num_waiting.items() if path.startswith("first")) == most
    assert max(num_waiting.values()) > most, "those that go on with one do not wait for others"
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


# What of plans is followed


def by_turns(length: int = 8, roles: int = 4) -> WorkflowGraph:
    """Roles by turns, each call needing the one before: no order keeps a role in a small pool."""
    nodes = []
    for at in range(length):
        system = {"role": "system", "content": f"{at % roles} is the number of this role. " * 6}
        user = {"role": "user", "content": "{{question}}" + (f" {{{{n{at - 1}}}}}" if at else "")}
        nodes.append({"id": f"n{at}", "op": "llm", "messages": [system, user], "max_tokens": 40, "temperature": 0})
    raw = {"version": 1, "inputs": ["question"], "nodes": nodes, "outputs": {"last": f"n{length - 1}"}}
    return canonical(graph_from_dict(raw))


def prefilled(played: Played) -> int:
    return sum(engine.scheduler.stats().prefill_tokens for engine in played.cluster.engines)


def assert_nothing_kept(played: Played) -> None:
    for engine, retains in zip(played.cluster.engines, played.cluster.retains, strict=True):
        cache = engine.scheduler._state.cache
        check_integrity(cache, [])
        assert not cache.retention.has_pins
        assert cache.retention.num_pages == retains.num_pages("") == 0


def test_pins_keep_what_a_small_pool_loses() -> None:
    options: dict[str, Any] = {"graph": by_turns(), "num_pages": 80, "knows_lengths": True}
    plain = Played(settings=PlanSettings(pins=False), **options)
    pinned = Played(settings=PlanSettings(), **options)
    assert pinned.player.results == plain.player.results
    assert prefilled(pinned) < prefilled(plain)
    counts = pinned.player.counts.pins
    assert counts.retained > 0
    assert counts.tokens >= 16 * counts.retained
    assert plain.player.counts.pins == PinCounts()
    assert_nothing_kept(pinned)
    assert_nothing_kept(plain)


@pytest.mark.parametrize("turns", [True, False])
def test_engines_are_told_which_turns_go_on(turns: bool) -> None:
    played = Played(settings=PlanSettings(turns=turns))
    for one in played.calls:
        if not turns:
            assert (one.call.wait_kind, one.call.expected_in_s) == ("chat", None)
        elif one.path.startswith("first"):
            assert one.call.wait_kind == "workflow"
            assert one.call.expected_in_s is not None
        else:
            assert (one.call.wait_kind, one.call.expected_in_s) == ("", None)
    released = [each for each in played.released if each.kind == "workflow"]
    assert len(released) == turns * 2 * len(ROWS)
    assert all(each.expected_in_s is not None for each in released)


@pytest.mark.parametrize("engines", [True, False])
def test_calls_go_to_the_engines_of_the_plan(engines: bool) -> None:
    played = Played(settings=PlanSettings(engines=engines), num_engines=2, routes=True, knows_lengths=True)
    for one in played.calls:
        assert one.call.replica == (one.row * 2 // len(ROWS) if engines else None)
    if engines:
        assert all(one.times.engine == one.call.replica for one in played.calls)


def test_without_plans_calls_are_as_of_any_client() -> None:
    played = Played(settings=NO_PLANS, num_engines=2)
    assert {(one.call.replica, one.call.wait_kind) for one in played.calls} == {(None, "chat")}
    assert {one.call.objective for one in played.calls} == {"throughput"}


def test_the_kv_of_answers_is_found_unless_a_run_does_not_continue() -> None:
    found = {}
    for continues in (True, False):
        played = Played(continues=continues)
        calls = {(one.row, one.path): one for one in played.calls}
        first, second = calls[0, "first_a"], calls[0, "second_a"]
        found[continues] = second.times.usage.num_cached_tokens
        prompt, answer = len(first.call.prompt) // 4, first.call.num_output
        assert found[continues] >= prompt // 16 * 16
        assert (found[continues] > prompt) is continues
        assert found[continues] < prompt + answer
        assert_nothing_kept(played)


def test_a_prompt_cache_answers_what_was_asked_before() -> None:
    cache: dict[str, ModelAnswer] = {}
    cold = Played(cache=cache)
    assert len(cache) == len(cold.calls) == 4 * len(ROWS)
    changed = [*ROWS[:-1], {"question": "another one"}]
    warm = Played(cache=cache, rows=changed)
    assert {one.row for one in warm.calls} == {len(ROWS) - 1}
    assert {row: warm.player.results[row] for row in range(5)} == {row: cold.player.results[row] for row in range(5)}
    assert warm.player.counts.calls.cached_calls == 4 * (len(ROWS) - 1)
    assert len(Played(cache=cache, graph=debate()).calls) == 4 * len(ROWS), "answers that are drawn anew are not kept"


def test_no_more_calls_run_than_may() -> None:
    played = Played(PlayerLimits(calls=3))
    times = sorted([(one.times.end_s, -1) for one in played.calls] + [(one.times.asked_s, 1) for one in played.calls])
    assert max(itertools.accumulate(change for _, change in times)) == 3


def test_salts_are_refused() -> None:
    with pytest.raises(Unsupported, match="cache_salt"):
        Played(graph=debate(cache_salt="x"))
