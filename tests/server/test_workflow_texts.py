"""Texts of outputs and starts of calls as events of a run: positions, connections that are lost, slow clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.server.conftest import RunningServer, running
from tests.server.test_workflow_runs import assert_nothing_left, create, start
from tests.workflow.shapes import graph, llm
from weft.client import Client
from weft.workflow.run.feed import TextKey

TELL = graph(llm("a", "Say {{q}}", max_tokens=8), llm("b", "Again {{a}}", max_tokens=4), outputs={"a": "a", "b": "b"})
ROWS = [{"q": str(number)} for number in range(3)]


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with running() as server:
        yield server


def told(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(id, event) of each."""
    found = []
    for part in text.split("\n\n"):
        if part.startswith("id: "):
            number, data = part.split("\n", 1)
            found.append((number.removeprefix("id: "), json.loads(data.removeprefix("data: "))))
    return found


def take(texts: dict[TextKey, str], events: list[tuple[str, dict[str, Any]]]) -> None:
    for _, event in events:
        for piece in event.get("texts", ()):
            key = piece["row"], piece["output"]
            known = texts.get(key, "")
            assert piece["start"] <= len(known)
            texts[key] = known[: piece["start"]] + piece["text"]


def test_texts_are_those_of_the_results(shared: RunningServer) -> None:
    with shared.http() as client:
        id = create(client, TELL)
        response = client.post(f"/v1/workflows/{id}/runs", json={"rows": ROWS, "stream": ["b"], "starts": True})
        events, texts = told(response.text), {}
        take(texts, events)
        rows = {event["row"]["row"]: event["row"]["outputs"] for _, event in events if event["type"] == "row"}
        assert texts == {(row, "b"): outputs["b"] for row, outputs in rows.items()}
        assert len([event for _, event in events if event["type"] == "live"]) > 3
        starts = [each for _, event in events for each in event.get("starts", ())]
        assert sorted((each["row"], each["node"]) for each in starts) == [(r, n) for r in range(3) for n in "ab"]
        assert all(each["cached_tokens"] == 0 < each["prompt_tokens"] for each in starts)
        positions = [int(each.partition(".")[2]) for each, event in events if event["type"] == "live"]
        assert positions == sorted(positions)
    assert_nothing_left(shared)


def test_a_stream_that_begins_after_the_end_has_all_texts(shared: RunningServer) -> None:
    with shared.http() as client, Client(shared.url) as reader:
        run = start(client, TELL, ROWS, background=True, stream=["b"])["id"]
        for _ in range(2):  # the second one begins when the run is over
            events = list(reader.workflows.events(run))
            rows = {event.row.row: event.row.outputs for event in events if event.row is not None}
            pieces = [piece for event in events for piece in event.texts]
            texts = {row: "".join(piece.text for piece in pieces if piece.row == row) for row in rows}
            assert texts == {row: outputs["b"] for row, outputs in rows.items()}
        behind = list(reader.workflows.events(run, events[-2].id))
        assert not [piece for event in behind for piece in event.texts]
    assert_nothing_left(shared)


def test_a_stream_goes_on_where_it_was() -> None:
    with running(auto=False) as server, server.http() as client, Client(server.url) as reader:
        run = start(client, TELL, ROWS, background=True, stream=["a", "b"])["id"]
        server.wait_until(lambda: len(server.engine.sequences) == 3)
        texts: dict[TextKey, str] = {}
        last = "0"
        for _ in range(5):
            server.on_loop(server.engine.step)
            with closing(reader.workflows.events(run, last)) as events:
                live = next(event for event in events if event.type == "live")
            for piece in live.texts:
                assert piece.start == len(texts.get((piece.row, piece.output), "")), "nothing twice, nothing missing"
                texts[piece.row, piece.output] = texts.get((piece.row, piece.output), "") + piece.text
            last = live.id
        assert {len(text) for text in texts.values()} == {5}
        client.post(f"/v1/runs/{run}/cancel")
        assert_nothing_left(server)


def test_what_cannot_be_streamed_is_refused(shared: RunningServer) -> None:
    with shared.http() as client:
        id = create(client, TELL)
        for fields, message in (
            ({"stream": ["c"]}, "no output is called 'c'"),
            ({"stream": True, "background": True}, "exclude each other"),
            ({"stream": "a"}, "stream"),
        ):
            refused = client.post(f"/v1/workflows/{id}/runs", json={"rows": ROWS, **fields})
            assert refused.status_code == 400
            assert message in refused.json()["error"]["message"]
        run = start(client, TELL, ROWS, background=True, stream=["a"])["id"]
        for after in ("1.x", "x", ".", "1.2.3"):
            assert client.get(f"/v1/runs/{run}/events", params={"after": after}).status_code == 400
        client.get(f"/v1/runs/{run}/events")
    assert_nothing_left(shared)
