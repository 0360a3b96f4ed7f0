"""Texts of outputs and starts of calls while a run goes on, from Python."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import weft
from tests.server.conftest import running
from tests.workflow.shapes import Json, body, graph, llm, loop, mapped, pick, switch, text
from weft import ops
from weft.abi.errors import InvalidRequest, Overloaded
from weft.client import Client
from weft.llm import LLM
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine
from weft.workflow import api
from weft.workflow.actuals import CallUsage
from weft.workflow.graph import graph_from_dict
from weft.workflow.graph.streamed import check_streamed, streamed_calls
from weft.workflow.run.backend import CallProgress
from weft.workflow.run.calls import ModelAnswer, ModelRequest
from weft.workflow.run.feed import CallStarted, TextDelta
from weft.workflow.run.results import RowResult

ROWS = [{"q": str(number)} for number in range(4)]


@weft.flow
def tell(q: Any) -> Any:
    draft = ops.llm(f"Tell of {q}.", max_tokens=12)
    return {"draft": draft, "short": ops.llm([draft.chat, ops.user("Shorter.")], max_tokens=6)}


@pytest.fixture(scope="module")
def local() -> Iterator[LLM]:
    with LLM.over(FakeEngine, byte_tokenizer()) as llm:
        yield llm


def texts_of(events: list[Any]) -> dict[tuple[int, str], str]:
    """Texts by row and output; every piece goes on where the one before it ended."""
    found: dict[tuple[int, str], str] = {}
    ended: set[int] = set()
    for event in events:
        if isinstance(event, TextDelta):
            assert event.row not in ended, "a piece after the result of its row"
            known = found.get((event.row, event.output), "")
            assert event.start == len(known)
            found[event.row, event.output] = known + event.text
        elif isinstance(event, RowResult):
            ended.add(event.row)
    return found


def check_events(events: list[Any], names: list[str]) -> None:
    results = {event.row: event for event in events if isinstance(event, RowResult)}
    expected = {(row, name): results[row][name] for row in results for name in names}
    assert texts_of(events) == expected
    assert len(results) == len(ROWS)
    assert len([event for event in events if isinstance(event, TextDelta)]) >= len(expected)


def test_texts_of_outputs_come_piece_by_piece(local: LLM) -> None:
    check_events(list(tell.stream(ROWS, on=local, stream=["short", "draft"])), ["short", "draft"])
    assert texts_of(list(tell.stream(ROWS, on=local))) == {}


def test_over_http_and_on_a_server() -> None:
    with running() as server, Client(server.url) as client:
        for on in (server.url, client):
            events = list(tell.stream(ROWS, on=on, stream=["short"], starts=True))
            check_events(events, ["short"])
            starts = {(event.row, event.node) for event in events if isinstance(event, CallStarted)}
            assert len(starts) == 2 * len(ROWS)


class LateReader:
    """A client that begins to read events when the run has ended."""

    def __init__(self, client: Client):
        self._server = client.workflow_server()

    def workflow_server(self) -> LateReader:
        return self

    def events(self, run_id: str, after: int | str = 0) -> Iterator[Any]:
        for _ in self._server.events(run_id):
            pass
        yield from self._server.events(run_id, after)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


def test_a_run_that_ends_before_its_events_are_read_is_told_whole() -> None:
    with running() as server, Client(server.url) as client:
        events = list(tell.stream(ROWS, on=LateReader(client), stream=["short"], starts=True))
    check_events(events, ["short"])
    starts = {(event.row, event.node) for event in events if isinstance(event, CallStarted)}
    assert len(starts) == 2 * len(ROWS)


def test_starts_say_what_was_known(local: LLM) -> None:
    events = list(tell.stream(ROWS, on=local, starts=True))
    starts = [event for event in events if isinstance(event, CallStarted)]
    assert sorted((start.row, start.node) for start in starts) == sorted(
        (row, node) for row in range(4) for node in ("llm_1", "llm_2")
    )
    assert all(start.prompt_tokens and start.cached_tokens == 0 for start in starts)


def test_run_tells_a_listener(local: LLM) -> None:
    told: list[Any] = []
    results = tell.run(ROWS, on=local, stream=["draft"], listen=told.append)
    assert texts_of(told) == {(row.row, "draft"): row["draft"] for row in results}
    with pytest.raises(InvalidRequest, match="listen"):
        tell.run(ROWS, on=local, stream=["draft"])


def test_one_answer_for_equal_calls_is_the_text_of_all(local: LLM) -> None:
    flow = weft.flow(lambda q: {"same": ops.llm("Always this.", max_tokens=9, temperature=0), "q": ops.text(f"{q}")})
    events = list(flow.stream(ROWS, on=local, stream=["same"], optimise=False))
    results = {event.row: event for event in events if isinstance(event, RowResult)}
    assert texts_of(events) == {(row, "same"): each["same"] for row, each in results.items()}


def test_answers_of_the_cache_are_in_the_result(local: LLM, tmp_path: Any) -> None:
    flow = weft.flow(lambda q: {"a": ops.llm(f"Say {q}", max_tokens=9, temperature=0)})
    first = list(flow.stream(ROWS, on=local, stream=["a"], cache=tmp_path))
    again = list(flow.stream(ROWS, on=local, stream=["a"], starts=True, cache=tmp_path))
    assert not [event for event in again if isinstance(event, CallStarted)]
    results = {event.row: event for event in again if isinstance(event, RowResult)}
    assert {row: each["a"] for row, each in results.items()} == {
        event.row: event["a"] for event in first if isinstance(event, RowResult)
    }
    assert texts_of(again) == {(row, "a"): each["a"] for row, each in results.items()}


class Asked:
    """Says a word when the one before it was read."""

    def __init__(self) -> None:
        self.read = asyncio.Event()

    async def complete(self, request: ModelRequest, started: CallProgress) -> ModelAnswer:
        for word in ("one ", "two ", "three"):
            started.text(word)
            await self.read.wait()
            self.read.clear()
        return ModelAnswer("one two three")

    async def split(self, text: str, ranges: Any) -> list[str]:
        raise NotImplementedError


def test_each_piece_comes_before_the_next_is_there() -> None:
    async def main() -> list[Any]:
        backend, events = Asked(), []
        read = graph_from_dict(graph(llm("a", "{{q}}")))
        async for event in api.stream_on_loop(read, ROWS[:1], backend, stream=["out"]):
            events.append(event)
            backend.read.set()
        return events

    *pieces, result = asyncio.run(main())
    assert pieces == [TextDelta(0, "out", 0, "one "), TextDelta(0, "out", 4, "two "), TextDelta(0, "out", 8, "three")]
    assert result["out"] == "one two three"


class Flaky:
    """Gives a part of an answer, fails, and gives `texts` in the tries that follow."""

    def __init__(self, *texts: str, fails_after: int):
        self.texts = list(texts)
        self.fails_after = fails_after
        self.seeds: list[Any] = []

    async def complete(self, request: ModelRequest, started: CallProgress) -> ModelAnswer:
        started()
        self.seeds.append(request.hinted.get("seed"))
        said = self.texts.pop(0)
        assert started.wants_text
        for at, char in enumerate(said):
            if self.texts and at == self.fails_after:
                raise Overloaded("no room")
            started.text(char)
            await asyncio.sleep(0)
        return ModelAnswer(said, usage=CallUsage(1, 0, len(said)))

    async def split(self, text: str, ranges: Any) -> list[str]:
        raise NotImplementedError


@pytest.mark.parametrize(("second", "pieces"), [("one two three", []), ("one six", [4])])
def test_a_call_that_is_tried_again(monkeypatch: pytest.MonkeyPatch, second: str, pieces: list[int]) -> None:
    monkeypatch.setattr("weft.workflow.run.state.FIRST_PAUSE_S", 0.0)
    backend = Flaky("one two four", second, fails_after=7)

    async def main() -> list[Any]:
        read = graph_from_dict(graph(llm("a", "{{q}}")))
        return [event async for event in api.stream_on_loop(read, ROWS[:1], backend, stream=["out"])]

    events = asyncio.run(main())
    shown, replaced = "", []
    for event in events:
        if isinstance(event, TextDelta):
            replaced += [event.start] if event.start < len(shown) else []
            shown = shown[: event.start] + event.text
    assert (shown, replaced) == (second, pieces)
    assert backend.seeds[0] == backend.seeds[1]
    assert isinstance(backend.seeds[0], int), "another try draws what the first one drew"


BODY = body(llm("x", "{{i}}"), value="x")
CASES = switch("which", "q", x=body(llm("x", "1"), out="x"), y=body(text("t"), out="t"))


@pytest.mark.parametrize(
    ("raw", "name", "message"),
    [
        (graph(llm("a")), "other", "no output is called 'other'"),
        (graph(llm("a"), text("t", "{{a}}")), "out", "not the text of one call"),
        (graph(llm("a"), pick("p", "a", strip=True)), "out", "not the text of one call"),
        (graph(llm("a", schema={"type": "object"})), "out", "without a schema"),
        (graph(mapped("m", "q", BODY), outputs={"out": "m.value"}), "out", "not the text of one call"),
        (
            graph(
                loop("l", {"i": "q"}, body(llm("x", "{{i}}"), i="x"), max_rounds=2),
                outputs={"out": "l.i"},
            ),
            "out",
            "not the text of one call",
        ),
    ],
)
def test_what_cannot_be_streamed_is_refused(raw: Json, name: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        check_streamed(graph_from_dict(raw), [name])
    assert refused.value.param == "stream"


def test_a_name_is_no_list_of_names() -> None:
    with pytest.raises(InvalidRequest, match="list"):
        check_streamed(graph_from_dict(graph(llm("a"))), "out")


def test_the_calls_of_outputs() -> None:
    both = graph_from_dict(graph(llm("a"), outputs={"one": "a", "two": "a"}))
    assert streamed_calls(both, ["two", "one"]) == {"a": ("two", "one")}
    cases = graph_from_dict(graph(CASES, outputs={"out": "which.out"}))
    check_streamed(cases, ["out"])
    assert streamed_calls(cases, ["out"]) == {"which[x].x": ("out",)}


def test_the_case_that_is_taken_is_streamed(local: LLM) -> None:
    flow = weft.Workflow.load(graph(CASES, outputs={"out": "which.out"}))
    events = list(flow.stream([{"q": "x"}, {"q": "y"}], on=local, stream=["out"]))
    results = {event.row: event for event in events if isinstance(event, RowResult)}
    assert texts_of(events) == {(0, "out"): results[0]["out"], (1, "out"): "x"}
