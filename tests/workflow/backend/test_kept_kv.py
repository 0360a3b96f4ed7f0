"""Runs on an engine that keeps prefixes and conversations: tokens counted by the engine, answers those of plain runs,
and nothing retained afterwards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

import weft
from weft import ops
from weft.cache.retention import Retention
from weft.engine.inline import InlineEngine
from weft.llm import LLM
from weft.workflow import api
from weft.workflow.run.driver import Concurrency
from weft.workflow.run.results import RowResult

OPTIONS: dict[str, Any] = {"threads": 1, "dtype": "float64", "max_context": 320, "page_size": 8}
SMALL = 40
"""Pages that hold the longest call of these workflows, and not what lies between the calls of a role."""
ROWS = [{"topic": f"a lighthouse on island {number}"} for number in range(4)]
ROLES = [
    f"You are number {number}, {'who is patient and kind to all people at all times, ' * 2}." for number in range(3)
]


@weft.flow
def by_turns(topic: Any) -> Any:
    """Roles by turns, each call needing the one before: no order brings the calls of a role together."""
    said = topic
    for turn in range(6):
        said = ops.llm([ops.system(ROLES[turn % 3]), ops.user(f"{topic} {said}")], max_tokens=6, temperature=0)
    return said


def asked(name: str, *messages: dict[str, str]) -> dict[str, Any]:
    return {"id": name, "op": "llm", "messages": list(messages), "max_tokens": 10, "temperature": 0}


conversation = weft.Workflow.load(
    {
        "version": 1,
        "inputs": ["topic"],
        "nodes": [
            asked("first", {"role": "user", "content": "Tell me about {{topic}}."}),
            asked("critic", {"role": "system", "content": ROLES[0]}, {"role": "user", "content": "Why? {{first}}"}),
            asked("second", {"chat": "first"}, {"role": "user", "content": "They say: {{critic}}"}),
        ],
        "outputs": {"first": "first", "critic": "critic", "second": "second"},
    }
)
"""A conversation that goes on when others have had their turn."""


def llm_with(num_pages: int, **options: Any) -> LLM:
    return LLM("weft-tiny", **OPTIONS | {"num_pages": num_pages} | options)


@pytest.fixture(scope="module")
def large() -> Iterator[LLM]:
    with llm_with(512) as made:
        yield made


@pytest.fixture
def small() -> Iterator[LLM]:
    with llm_with(SMALL) as made:
        yield made


def retention_of(llm: LLM) -> Retention:
    (engine,) = llm._engine
    assert isinstance(engine, InlineEngine)
    assert engine.engine is not None
    return engine.engine.cache.retention


def assert_nothing_kept(llm: LLM) -> None:
    """Commands have an order: once the engine has answered a later one, retains that were ended have ended."""
    stats = next(stats for stats in (llm.stats() for _ in range(10_000)) if not stats.num_sequences)
    retention = retention_of(llm)
    assert retention.num_pages == 0
    assert not retention.has_pins
    assert llm._runtime.retains.num_pages("") == 0
    assert stats.device_pages_free + stats.device_pages_cached == stats.device_pages_total


def outputs(results: api.RunResults) -> list[Any]:
    assert results.errors == []
    return [dict(result.outputs) for result in results]


def prefilled(llm: LLM, flow: Any, rows: list[Any], **options: Any) -> tuple[int, api.RunResults]:
    """Prompt tokens that the engine computed for a run, by its own counter."""
    before = llm.stats().prefill_tokens
    results = flow.run(rows, llm, **options)
    return llm.stats().prefill_tokens - before, results


@pytest.mark.parametrize("flow", [by_turns, conversation], ids=["by turns", "conversation"])
@pytest.mark.slow
def test_answers_are_those_of_a_plain_run_in_a_small_pool(flow: Any, small: LLM, large: LLM) -> None:
    plain = outputs(flow.run(ROWS, large, planning=False))
    assert outputs(flow.run(ROWS, small)) == plain
    assert_nothing_kept(small)


def test_pins_hold_where_the_pool_is_small(small: LLM) -> None:
    """What two calls need besides their roles fills the pool, so a role is lost before its next call."""
    rows = [{"topic": f"{number} " + "ships and boats in the wide bay " * 5} for number in range(2)]
    without, plain = prefilled(small, by_turns, rows, planning={"pins": False}, concurrency=one_at_a_time())
    small._thread.run(reset(small))
    with_pins, results = prefilled(small, by_turns, rows, planning={"pinned_part": 0.5}, concurrency=one_at_a_time())
    assert outputs(results) == outputs(plain)
    assert results.counts.pins.retained > 0
    assert with_pins < 0.9 * without
    assert_nothing_kept(small)


def test_a_conversation_goes_on_from_its_kv_and_computes_what_follows_alone(large: LLM) -> None:
    rows = [{"topic": "the tides of the northern sea"}]
    large._thread.run(reset(large))
    computed, results = prefilled(large, conversation, rows)
    counts = results.counts.by_node
    first, second = counts["first"], counts["second"]
    # All but the last token of the answer has KV; the template may end a turn with a token of its own.
    assert first.prompt_tokens + first.output_tokens - 1 <= second.cached_tokens
    assert second.cached_tokens < second.prompt_tokens
    assert computed == sum(each.prompt_tokens - each.cached_tokens for each in counts.values())


@pytest.mark.slow
def test_a_conversation_that_will_go_on_outlives_what_will_not(small: LLM) -> None:
    """Without being told, the engine expects that people answer any of the calls."""
    rows = [{"topic": f"{number} boats on the lake"} for number in range(6)]
    told, results = prefilled(small, conversation, rows)
    least = sum(each.prompt_tokens - each.cached_tokens for each in results.counts.by_node.values())
    assert told == least, "what calls say that they computed is what the engine computed"
    assert_nothing_kept(small)


def one_at_a_time() -> Any:
    return Concurrency(calls=1)


async def reset(llm: LLM) -> None:
    """Forget all KV."""
    from weft.core.wire import ResetPrefixCache

    llm._runtime.post(ResetPrefixCache())
    await llm._runtime.engine.stats()


def test_cancelling_at_any_moment_leaves_nothing(small: LLM) -> None:
    draw = random.Random(1)
    for _ in range(6):
        stream = by_turns.stream(ROWS, small, planning={"pinned_part": 0.5})
        for _, _ in zip(range(draw.randrange(4)), stream, strict=False):
            pass
        stream.close()
        assert_nothing_kept(small)


def test_a_row_that_fails_leaves_nothing(small: LLM) -> None:
    def refuse(text: str) -> str:
        raise ValueError("no")

    @weft.flow
    def failing(topic: Any) -> Any:
        said = topic
        for turn in range(4):
            said = ops.llm([ops.system(ROLES[turn % 2]), ops.user(f"{topic} {said}")], max_tokens=4, temperature=0)
        return ops.function(refuse, text=said)

    results = failing.run(ROWS, small, planning={"pinned_part": 0.5})
    assert len(results.errors) == len(ROWS)
    assert_nothing_kept(small)


@pytest.mark.slow
def test_pins_that_break_change_no_answer(large: LLM) -> None:
    """The pool holds a pin or the longest prompt, not both: the engine breaks it."""
    long = [{"topic": "the long story of " * 20}, *ROWS[:2]]
    plain = outputs(by_turns.run(long, large, planning=False))
    with llm_with(44) as tight:
        results = by_turns.run(long, tight, planning={"pinned_part": 0.5})
        assert outputs(results) == plain
        assert_nothing_kept(tight)


def test_policies_that_find_nothing_again_are_run_without_pins(large: LLM) -> None:
    plain = outputs(by_turns.run(ROWS[:1], large, planning=False))
    with llm_with(64, intercept_policy="discard") as discarding:
        results = by_turns.run(ROWS[:1], discarding, planning={"pinned_part": 0.5})
        assert outputs(results) == plain
        pins = results.counts.pins
        assert (pins.retained, pins.refused) == (0, 1)
        assert "discard" in pins.refusal
        assert_nothing_kept(discarding)


def test_two_runs_of_a_tenant_share_the_room_for_pins(small: LLM) -> None:
    seen: list[int] = []

    async def both() -> list[list[RowResult]]:
        async def one(number: int) -> list[RowResult]:
            rows = [{"topic": f"{number} {row['topic']}"} for row in ROWS[:2]]
            run = api.GraphRun(by_turns.graph, rows, small, {"planning": {"pinned_part": 0.25}})
            found = []
            async for result in run.on_loop(iter(enumerate(run.rows)), small.workflow_host().backend):
                seen.append(small._runtime.retains.num_pages(""))
                found.append(result)
            return found

        return await asyncio.gather(one(1), one(2))

    for results in small._thread.run(both()):
        assert [result.error for result in results] == [None, None]
    assert max(seen) <= SMALL // 4
    assert_nothing_kept(small)
