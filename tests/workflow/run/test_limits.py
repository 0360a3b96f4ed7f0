"""Limits of a run: what it uses stays within them, whatever is in progress at once, and what is refused says so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.server.conftest import RunningServer, running
from tests.workflow.run.player import Player, fake_answer
from tests.workflow.run.test_driver import ManualBackend, collected, settled
from tests.workflow.shapes import graph, llm
from weft import ops
from weft.abi.errors import LimitExceeded
from weft.client import Client
from weft.llm import LLM
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine
from weft.workflow.actuals import CallUsage
from weft.workflow.backend.openai import OpenAIBackend
from weft.workflow.graph import graph_from_dict
from weft.workflow.run.allowance import bound_of
from weft.workflow.run.backend import BoundsCalls
from weft.workflow.run.calls import CHAT, COMPLETION, AnswerRefused, CallBound, ModelAnswer, ModelRequest
from weft.workflow.run.driver import Driver, RunServices
from weft.workflow.run.instructions import CallModel, FindCost, Instruction, RowDone, RunLimits
from weft.workflow.run.state import RunState
from weft.workflow.run.value_errors import NodeFailed

MAX_TOKENS = 20
ROWS = [{"q": f"{row:03}"} for row in range(60)]
BOUNDED = graph(llm("a", "{{q}}", max_tokens=MAX_TOKENS))
UNBOUNDED = graph(llm("a", "{{q}}"))


def short_answer(request: ModelRequest) -> ModelAnswer:
    """It uses as much as it may in one call of three."""
    longest = MAX_TOKENS if "0" in request.body["messages"][0]["content"] else 3
    answer = fake_answer(request)
    return answer._replace(text="x" * longest, usage=answer.usage._replace(output_tokens=longest))


@pytest.mark.parametrize("seed", range(10))
def test_tokens_stay_within_the_limit_and_use_it(seed: int) -> None:
    most = 2000
    player = Player(
        graph_from_dict(BOUNDED),
        ROWS,
        seed=seed,
        limits=RunLimits(tokens=most),
        answer=short_answer,
        max_calls=1000,
    )
    done = player.play()
    used = player.state.counts.calls
    largest = max(len(str(call.request.body)) for call in player.sent) + MAX_TOKENS
    assert most - largest < used.prompt_tokens + used.output_tokens <= most
    errors = [row.failure.error for row in done if row.failure is not None]
    assert len(errors) == len(ROWS) - used.calls > 0
    for error in errors:
        assert isinstance(error, LimitExceeded)
        assert error.param == "tokens"
        assert "2,000 tokens that it may use" in error.message
    assert not player.state._allowance._reserved


def calls_of(state: RunState, bound: CallBound | None) -> list[CallModel]:
    """The calls that leave at once when all are counted alike."""
    instructions: list[Instruction] = state.take(100)
    for each in instructions:
        if isinstance(each, RowDone):
            continue
        assert isinstance(each, FindCost)
        state.counted(each.task, bound)
    return [call for call in state.take(100) if isinstance(call, CallModel)]


def state_of(raw: dict[str, Any], rows: int, most: int) -> RunState:
    state = RunState(graph_from_dict(raw), limits=RunLimits(tokens=most))
    for number in range(rows):
        state.open_row(number, ROWS[number])
    return state


def test_calls_that_may_use_all_that_is_left_run_alone() -> None:
    state = state_of(UNBOUNDED, 3, 100)
    (first,) = calls_of(state, CallBound(10, None))
    assert not state.has_next()
    state.answered(first.task, ModelAnswer("x", usage=CallUsage(10, 0, 5)))
    assert state.has_next()
    (second,) = state.take(100)[1:]
    assert isinstance(second, CallModel)


def test_an_answer_past_the_limit_is_an_error_and_so_is_every_later_call() -> None:
    state = state_of(UNBOUNDED, 3, 100)
    (first,) = calls_of(state, CallBound(10, None))
    state.answered(first.task, ModelAnswer("x", usage=CallUsage(10, 0, 3000)))
    ended = {done.row: done for done in [*state.take(100), *state.take(100)]}  # type: ignore[union-attr]
    assert sorted(ended) == [0, 1, 2]
    for done in ended.values():
        assert isinstance(done.failure.error, LimitExceeded)  # type: ignore[union-attr]
    assert "with this answer 3,010" in str(ended[0].failure.error)  # type: ignore[union-attr]


def test_a_call_that_failed_gives_back_what_it_might_have_used() -> None:
    state = state_of(BOUNDED, 2, 100)
    (first,) = calls_of(state, CallBound(60, 20))
    assert not state.has_next()
    state.failed(first.task, ValueError("no"), 0.0)
    assert state.has_next()


def test_tokens_of_an_answer_that_is_refused_are_used() -> None:
    state = state_of(BOUNDED, 3, 100)
    first, *_ = calls_of(state, CallBound(10, 20))
    refused = ModelAnswer("{}", usage=CallUsage(10, 0, 90))
    state.failed(first.task, AnswerRefused("the answer does not follow its schema", refused), 0.0)
    assert (state.counts.calls.prompt_tokens, state.counts.calls.output_tokens) == (10, 90)


def test_an_answer_without_usage_counts_as_all_that_it_might_use() -> None:
    state = state_of(BOUNDED, 3, 100)
    (first,) = calls_of(state, CallBound(40, 20))
    state.answered(first.task, ModelAnswer("x"))
    *_, refused = state.take(100)
    assert isinstance(refused, RowDone)
    assert "of them 60, and this call may use 40" in str(refused.failure.error)  # type: ignore[union-attr]


def test_an_earlier_answer_without_usage_counts_nothing() -> None:
    state = state_of(BOUNDED, 2, 100)
    (first,) = calls_of(state, CallBound(40, 20))
    state.answered(first.task, ModelAnswer("x", is_cached=True))
    assert state.has_next()


def test_a_call_waits_for_what_is_in_progress_without_turning() -> None:
    async def main() -> None:
        backend = ManualBackend()
        raw = graph(llm("a", "{{q}}", max_tokens=60))
        state = RunState(graph_from_dict(raw), limits=RunLimits(tokens=100))
        running = asyncio.create_task(collected(Driver(state, enumerate(ROWS[:2]), RunServices(backend))))
        await settled()
        assert backend.asked == ["000"]
        backend.answers["000"].set_result(ModelAnswer("x", usage=CallUsage(9, 0, 1)))
        await settled()
        assert backend.asked == ["000", "001"]
        backend.answers["001"].set_result(ModelAnswer("x", usage=CallUsage(9, 0, 1)))
        assert [done.failure for done in (await running).values()] == [None, None]

    asyncio.run(main())


def test_bounds_of_requests() -> None:
    chat = {"messages": [{"role": "user", "content": "x" * 400}]}
    assert bound_of(ModelRequest(CHAT, chat), 7) == (7, None)
    assert bound_of(ModelRequest(CHAT, chat), 7, 100) == (7, 93)
    assert bound_of(ModelRequest(CHAT, {**chat, "max_tokens": 5}), 7, 100) == (7, 5)
    assert bound_of(ModelRequest(CHAT, {**chat, "max_tokens": 5, "max_completion_tokens": 6}), 7) == (7, 6)
    assert bound_of(ModelRequest(COMPLETION, {"prompt": "x"}), 7, 100) == (7, 16)
    assert 100 < bound_of(ModelRequest(CHAT, chat), None).prompt_tokens < 120


# ---- what counts


@pytest.mark.parametrize("limits", [RunLimits(calls=0), RunLimits(tokens=0), RunLimits(calls=0, tokens=0)])
def test_answers_of_the_prompt_cache_are_no_calls(limits: RunLimits, tmp_path: Path) -> None:
    greedy = weft.flow(lambda q: ops.llm(f"Tell me about {q}.", max_tokens=4, temperature=0))
    with LLM.over(FakeEngine, byte_tokenizer()) as made:
        expected = greedy.run(ROWS[:5], on=made, cache=tmp_path).column("value")
        results = greedy.run(ROWS[:6], on=made, cache=tmp_path, limits=limits)
    assert results.column("value") == [*expected, None]
    assert (results.counts.calls.calls, results.counts.calls.cached_calls) == (0, 5)
    assert [(error.row, error.kind) for error in results.errors] == [(5, "limit_exceeded")]


def test_calls_are_made_up_to_the_limit_beside_answers_of_the_prompt_cache(tmp_path: Path) -> None:
    greedy = weft.flow(lambda q: ops.llm(f"Tell me about {q}.", max_tokens=4, temperature=0))
    with LLM.over(FakeEngine, byte_tokenizer()) as made:
        greedy.run(ROWS[:5], on=made, cache=tmp_path)
        results = greedy.run(ROWS[:10], on=made, cache=tmp_path, limits=RunLimits(calls=3))
    assert (results.counts.calls.calls, results.counts.calls.cached_calls) == (3, 5)
    assert len(results.errors) == 2


def test_a_call_that_another_run_has_made_meanwhile_gives_back_its_place() -> None:
    state = RunState(graph_from_dict(UNBOUNDED), limits=RunLimits(calls=1))
    state.open_row(0, ROWS[0])
    (first,) = calls_of(state, None)
    state.answered(first.task, ModelAnswer("x", is_cached=True))
    state.open_row(1, ROWS[1])
    assert len(calls_of(state, None)) == 1


# ---- on models


@weft.flow
def tell(q: Any) -> Any:
    return ops.llm(f"Tell me about {q}.", max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as made:
        yield made


@pytest.fixture(params=["model", "address", "client"])
def target(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[Any]:
    if request.param == "address":
        yield server.url
    elif request.param == "client":
        with Client(server.url) as client:
            yield client
    else:
        with LLM.over(FakeEngine, byte_tokenizer()) as made:
            yield made


def test_a_limit_of_tokens_holds_everywhere(target: Any) -> None:
    most = 400
    results = tell.run(ROWS, on=target, limits=weft.RunLimits(tokens=most))
    used = results.counts.calls
    assert 0 < used.prompt_tokens + used.output_tokens <= most
    assert {error.kind for error in results.errors} == {"limit_exceeded"}
    assert len(results.errors) + used.calls == len(ROWS)


def test_a_limit_of_seconds_holds_everywhere(target: Any) -> None:
    """So short that no call is answered within it."""
    results = tell.run(ROWS, on=target, limits=weft.RunLimits(seconds=1e-9))
    assert {(error.kind, error.message) for error in results.errors} == {
        ("limit_exceeded", "the run has taken the 1e-09 seconds that it may take")
    }
    assert len(results.errors) == len(ROWS)
    assert results.counts.calls.calls == 0


def test_bounds_are_those_of_the_model(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me something."}], "max_tokens": 3}

    async def asked(backend: BoundsCalls) -> CallBound | None:
        assert isinstance(backend, BoundsCalls)
        return await backend.call_bound(ModelRequest(CHAT, body))

    with LLM.over(FakeEngine, byte_tokenizer()) as made:
        host = made.workflow_host()
        known = host.thread.run(asked(host.backend))  # type: ignore[arg-type]
        flow = weft.flow(lambda: ops.llm("Tell me something.", max_tokens=3))
        counted = flow.run([{}], on=made).counts.calls
    assert known == (counted.prompt_tokens, 3)

    async def over_http() -> CallBound | None:
        backend = OpenAIBackend(server.url)
        try:
            return await asked(backend)
        finally:
            await backend.close()

    assert asyncio.run(over_http()) == known


def test_a_session_has_the_same_limit() -> None:
    with LLM.over(FakeEngine, byte_tokenizer()) as made:
        with weft.session(on=made, limits=weft.RunLimits(tokens=100)) as session:
            values = [ops.llm(f"Tell me about {number}.", max_tokens=MAX_TOKENS) for number in range(5)]
            session.wait()
        used = session.counts.calls
        assert 0 < used.prompt_tokens + used.output_tokens <= 100
        with pytest.raises(NodeFailed, match="100 tokens that it may use"):
            values[-1].get()
