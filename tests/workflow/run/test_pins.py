"""Pins of a run: retained once computed, let go with their last call, and nothing left however the run ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Any

import pytest

from tests.workflow.planner.test_pins import agent, rows_of
from tests.workflow.run.caching_backend import PAGE, CachingBackend
from tests.workflow.run.test_planning import map_reduce
from tests.workflow.shapes import Json, graph
from weft.abi.errors import EngineDead, InvalidRequest, LimitExceeded, Unsupported, WeftError
from weft.core.ids import pack_tokens, unpack_tokens
from weft.programs.retains import OnRetained
from weft.testing.word_tokens import WordTokens
from weft.workflow.actuals import PinCounts
from weft.workflow.graph import graph_from_dict
from weft.workflow.planner.place import PlanEngine
from weft.workflow.planner.ranks import PlannedPin
from weft.workflow.run.backend import CallProgress
from weft.workflow.run.calls import ModelAnswer, ModelRequest
from weft.workflow.run.driver import Concurrency, Driver, RunServices
from weft.workflow.run.instructions import RowDone
from weft.workflow.run.keeper import KeepsPrefixes
from weft.workflow.run.order import row_by_row
from weft.workflow.run.pins import MAX_REFUSALS, KvPrefix, RunPins
from weft.workflow.run.planned_order import PlannedOrder
from weft.workflow.run.planning import PlanSources, RunPlanner
from weft.workflow.run.settings import NO_PLANS, PlanSettings
from weft.workflow.run.state import RunState

ROLES = 6


class _Kept:
    def __init__(self, backend: KeepingBackend, prefix: KvPrefix):
        self.backend, self.prefix = backend, prefix

    def end(self) -> None:
        if self in self.backend.kept:
            self.backend.kept.remove(self)
            self.backend.unpin(self.prefix)


class KeepingBackend(CachingBackend):
    """A server in memory that keeps prefixes on request."""

    def __init__(self, kv_tokens: int, tokens: WordTokens):
        super().__init__(kv_tokens)
        self.tokens = tokens
        self.kept: list[_Kept] = []
        self.asked: list[KvPrefix] = []
        self.most_kept = 0
        self.refuse: Callable[[KvPrefix], WeftError | None] = lambda prefix: None
        self.on_call: Callable[[int], None] = lambda number: None

    def retain(self, prefix: KvPrefix, pinned_part: float, told: OnRetained) -> _Kept:
        kept = _Kept(self, prefix)
        asyncio.get_running_loop().call_soon(lambda: told(self.refuse(prefix) or prefix.num_tokens))
        self.asked.append(prefix)
        self.kept.append(kept)
        self.most_kept = max(self.most_kept, sum(each.prefix.num_tokens for each in self.kept))
        self.pin(prefix)
        return kept

    def pin(self, prefix: KvPrefix) -> None:
        tokens = tuple(unpack_tokens(prefix.tokens))
        for end in range(PAGE, len(tokens) + 1, PAGE):
            self.pins[tokens[:end]] += 1

    def unpin(self, prefix: KvPrefix) -> None:
        tokens = tuple(unpack_tokens(prefix.tokens))
        for end in range(PAGE, len(tokens) + 1, PAGE):
            self.pins[tokens[:end]] -= 1

    async def complete(self, request: ModelRequest, started: CallProgress) -> ModelAnswer:  # type: ignore[override]
        self.on_call(len(self.sent))
        answer = await super().complete(request, started)
        started.first_token()
        return answer


def chain(length: int = 12) -> Json:
    """Roles by turns, each call needing the one before: no order keeps a role in a small cache."""
    nodes = [agent("n0", "role0_", "{{q}}")]
    nodes += [agent(f"n{at}", f"role{at % ROLES}_", f"{{{{q}}}} {{{{n{at - 1}}}}}") for at in range(1, length)]
    return graph(*nodes)


class PinnedRun:
    """A run on a backend that keeps prefixes."""

    def __init__(self, raw: Json, kv_tokens: int, settings: PlanSettings | None = None, *, knows_lengths: bool = True):
        read = graph_from_dict(raw)
        tokens = WordTokens()
        self.backend = KeepingBackend(kv_tokens, tokens)
        settings = settings or PlanSettings()
        order = PlannedOrder(row_by_row(read), settings)
        self.state = RunState(read, order, hints=order.hints)
        sources = PlanSources(lambda name: tokens, [PlanEngine("m", kv_tokens, page_size=PAGE)], "m")
        statistics = {node["id"]: {"output_tokens": 20} for node in raw["nodes"]} if knows_lengths else {}

        async def at_once(make: Callable[[Any], Any], rows: Any) -> Any:
            return make(rows)

        self.planner = RunPlanner(read, order, sources, statistics, at_once, settings)

    def driver(self, rows: Iterable[Json], **at_once: int) -> Driver:
        services, planner = RunServices(self.backend), self.planner if self.planner.settings.needs_plans else None
        return Driver(self.state, enumerate(rows), services, Concurrency(**at_once), planner=planner)

    def run(self, rows: Iterable[Json], **at_once: int) -> dict[int, Any]:
        async def collected() -> dict[int, Any]:
            done = [each async for each in self.driver(rows, **at_once).results()]
            return {each.row: each.outputs for each in done if isinstance(each, RowDone)}

        return asyncio.run(collected())


def test_the_backend_can_keep_prefixes() -> None:
    assert isinstance(KeepingBackend(400, WordTokens()), KeepsPrefixes)
    assert not isinstance(CachingBackend(400), KeepsPrefixes)


def test_pins_save_what_the_plan_cannot_and_change_no_answer() -> None:
    pinned, plain = PinnedRun(chain(), 1400), PinnedRun(chain(), 1400, PlanSettings(pins=False))
    rows = rows_of(6)
    assert pinned.run(rows) == plain.run(rows)
    # Each role is used twice; those that are kept are computed once.
    assert plain.backend.prefill_tokens - pinned.backend.prefill_tokens == 60 * len(pinned.backend.asked) > 0
    assert plain.backend.asked == []
    counts = pinned.state.counts.pins
    assert counts.retained == len(pinned.backend.asked) > 0
    assert (counts.broken, counts.refused) == (0, 0)
    assert counts.tokens == sum(prefix.num_tokens for prefix in pinned.backend.asked)
    assert pinned.backend.most_kept <= 0.25 * 1400
    assert pinned.backend.kept == []


def test_a_sample_leaves_its_prefixes_to_the_plan_of_the_rest() -> None:
    """The calls of the sample compute all roles. Were they lost until the plan comes to them, most would be computed
    twice, where row by row computes each once. Windows of rows, or pins, keep them."""
    rows = rows_of(12)
    by_row = PinnedRun(map_reduce(), 3000, NO_PLANS)
    answers = by_row.run(rows)
    pinned, plain = (
        PinnedRun(map_reduce(), 3000, settings, knows_lengths=False)
        for settings in (PlanSettings(), PlanSettings(pins=False))
    )
    assert pinned.run(rows) == plain.run(rows) == answers
    assert pinned.planner.rounds.num_plans == 2, "the sample and the rest: its lengths are what was assumed"
    # 9 roles of 60 tokens in whole pages, and of each row what follows them: the least that any order computes.
    assert pinned.backend.prefill_tokens == plain.backend.prefill_tokens == by_row.backend.prefill_tokens == 4620


def test_what_no_call_needs_any_more_is_let_go_at_once() -> None:
    """The last role's first call comes when the others have had their last."""
    raw = chain(ROLES + 2)
    run = PinnedRun(raw, 600)
    kept_at: dict[str, int] = {}

    def note(number: int) -> None:
        kept_at[f"n{number}"] = len(run.backend.kept)

    run.backend.on_call = note
    run.run(rows_of(1))
    # n6 and n7 are the second calls of the first two roles.
    assert kept_at["n6"] == 2
    assert kept_at["n7"] == 1
    assert run.backend.kept == []


@pytest.mark.parametrize("end", ["cancelled", "failed", "error", "done"])
def test_nothing_is_kept_however_a_run_ends(end: str) -> None:
    run = PinnedRun(chain(), 1400)
    seen: list[int] = []

    def on_call(number: int) -> None:
        seen.append(len(run.backend.kept))
        if number >= 20 and end == "failed":
            raise InvalidRequest("the model does not like it")
        if number >= 20 and end == "error":
            raise SystemExit("interrupted")

    run.backend.on_call = on_call

    async def part_of_it() -> int:
        count = 0
        async with aclosing(run.driver(rows_of(4), calls=3).results()) as results:
            async for _ in results:
                count += 1
                if end == "cancelled":
                    break
        return count

    if end == "error":
        with pytest.raises(SystemExit):
            asyncio.run(part_of_it())
    else:
        assert asyncio.run(part_of_it()) > 0
    assert max(seen) > 0
    assert run.backend.kept == []
    assert +run.backend.pins == {}


def test_a_run_goes_on_without_what_is_refused() -> None:
    run, plain = PinnedRun(chain(), 1400), PinnedRun(chain(), 1400, NO_PLANS)
    run.backend.refuse = lambda prefix: LimitExceeded("the tenant's share is used up")
    rows = rows_of(5)
    assert run.run(rows) == plain.run(rows)
    counts = run.state.counts.pins
    assert counts.retained == 0
    assert counts.refused == len(run.backend.asked)
    assert counts.refusal == "the tenant's share is used up"
    assert max(run.backend.asked.count(prefix) for prefix in run.backend.asked) <= MAX_REFUSALS
    assert run.backend.kept == []


def test_engines_that_keep_nothing_are_asked_no_more() -> None:
    run = PinnedRun(chain(), 1400)
    run.backend.refuse = lambda prefix: Unsupported("this policy finds no KV again")
    run.run(rows_of(5), calls=1)
    assert len(run.backend.asked) == 1
    assert run.backend.kept == []


def test_an_engine_that_is_dead_for_a_moment_keeps_nothing() -> None:
    run = PinnedRun(chain(), 1400)
    dead = iter([True, True])
    retain = run.backend.retain

    def sometimes(prefix: KvPrefix, pinned_part: float, told: OnRetained) -> _Kept:
        if next(dead, False):
            raise EngineDead("the engine is starting")
        return retain(prefix, pinned_part, told)

    run.backend.retain = sometimes  # type: ignore[method-assign]
    assert len(run.run(rows_of(3))) == 3
    assert run.state.counts.pins.refused == 2
    assert run.state.counts.pins.retained > 0
    assert run.backend.kept == []


def test_a_broken_retain_costs_recomputation_and_is_made_again() -> None:
    run, plain = PinnedRun(chain(24), 1400), PinnedRun(chain(24), 1400, NO_PLANS)

    def on_call(number: int) -> None:
        if number == 13:
            run.backend.forget()

    run.backend.on_call = on_call
    rows = rows_of(1)
    assert run.run(rows, calls=1) == plain.run(rows)
    counts = run.state.counts.pins
    assert counts.broken > 0
    assert counts.retained > counts.broken
    assert run.backend.kept == []


def test_settings_switch_each_thing_off() -> None:
    rows = rows_of(4)
    results = []
    for settings in (PlanSettings(), PlanSettings(order=False), PlanSettings(pins=False), NO_PLANS):
        run = PinnedRun(chain(4), 900, settings)
        results.append(run.run(rows))
        assert (run.planner.rounds.num_plans > 0) == settings.needs_plans
        if not settings.order:
            assert run.backend.sent[:2] == [row["q"] for row in rows[:2]]
    assert all(each == results[0] for each in results)


def test_counts_are_nothing_where_nothing_is_kept() -> None:
    assert PinCounts() == (0, 0, 0, 0, "")


def test_a_plan_that_takes_over_all_uses_of_a_kept_prefix_keeps_it() -> None:
    def pin(num_rows: int) -> PlannedPin:
        return PlannedPin(pack_tokens(range(16)), "m", 0, None, {"a": ((0, num_rows),)})

    pins = RunPins()
    assert pins.plan([pin(2)], [0, 1], {0, 1}, {0, 1}) == []
    (prefix,) = pins.has_started("a")
    pins.was_retained(prefix, 16)
    assert pins.has_settled(0, "a") == []
    assert pins.plan([pin(1)], [1], {1}, {0, 1}) == []
    assert pins.begins_with("a") == [prefix]
    assert pins.has_started("a") == []  # it is kept already
    assert pins.has_settled(1, "a") == [prefix]
