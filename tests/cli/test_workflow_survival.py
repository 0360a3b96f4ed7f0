"""`kill -9` under runs of workflows on a server: streamed texts go on, and so do runs whose plan holds pins."""

from __future__ import annotations

import random
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.cli.test_killed import engine_of, lines_of
from tests.cli.test_serve import SMALL, free_port, serving
from tests.workflow.shapes import graph, llm
from weft.client import Client

pytestmark = pytest.mark.slow
KEY = "secret"
EXACT = (*SMALL, "--dtype", "float64", "--api-key", KEY, "--log-level", "error")
"""What is computed does not depend on the batch. Nobody reads the log, so it must not fill its pipe."""
TELL = graph(llm("a", "Tell me of {{q}}.", max_tokens=300, temperature=0, ignore_eos=True))
ROWS = [{"q": name} for name in ("the sea", "a shell")]
ROLES = [f"You are number {number}, {'who is patient and kind to all people, ' * 4}." for number in range(3)]


def read_by(turn: int) -> list[str]:
    """The second half waits for a value from outside, so the run goes on for as long as a test wants."""
    return ["q", f"n{turn - 1}" if turn else "q", *(["go"] if turn == 3 else [])]


BY_TURNS = graph(
    {"id": "go", "op": "external"},
    *(
        {
            "id": f"n{turn}",
            "op": "llm",
            "messages": [
                {"role": "system", "content": ROLES[turn % 3]},
                {"role": "user", "content": " ".join(f"{{{{{name}}}}}" for name in read_by(turn))},
            ],
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
        }
        for turn in range(6)
    ),
)


def begun(http: httpx.Client, raw: Any, **fields: Any) -> str:
    stored = http.post("/v1/workflows", json={"graph": raw}).json()
    body = {"rows": ROWS, "cache": False, "background": True, **fields}
    response = http.post(f"/v1/workflows/{stored['id']}/runs", json=body)
    assert response.status_code == 202, response.text
    return str(response.json()["id"])


def ended(http: httpx.Client, run: str) -> dict[int, Any]:
    """The outputs of a run, once it has ended."""
    assert http.get(f"/v1/runs/{run}/events").text.endswith("data: [DONE]\n\n")
    card = http.get(f"/v1/runs/{run}").json()
    assert (card["status"], card["workflow"]["failed"]) == ("finished", 0), card
    return {each["row"]: each["outputs"] for each in http.get(f"/v1/runs/{run}/results").json()["data"]}


class Reader:
    """A client that reads the events of a run, behind the last one that it has."""

    def __init__(self, run: str):
        self.run, self.last = run, "0"
        self.texts: dict[int, str] = {}
        self.outputs: dict[int, Any] = {}
        self.positions: list[tuple[int, ...]] = []

    def read(self, client: Client, num_chars: int | None = None) -> None:
        """To the end, or until texts have grown by so many characters."""
        most = None if num_chars is None else sum(map(len, self.texts.values())) + num_chars
        with closing(client.workflows.events(self.run, self.last)) as events:
            for event in events:
                self.last = event.id
                self.positions.append(tuple(map(int, event.id.split("."))))
                for piece in event.texts:
                    before = self.texts.get(piece.row, "")
                    assert piece.start <= len(before), "nothing is missing"
                    self.texts[piece.row] = before[: piece.start] + piece.text
                if event.row is not None:
                    assert event.row.row not in self.outputs, "a result comes once"
                    self.outputs[event.row.row] = event.row.outputs
                if most is not None and sum(map(len, self.texts.values())) >= most:
                    return


def stream_with_kills(folder: Path, kills: list[int]) -> None:
    """Kill the server each time that texts have grown by so many characters, and start it again."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with serving(*EXACT, port=port, WEFT_DATA=str(folder / "data")) as (front, http):
        expected = ended(http, begun(http, TELL))
        reader = Reader(begun(http, TELL, stream=["out"]))
        engine = engine_of(front.pid)
        with Client(url, api_key=KEY) as client:
            reader.read(client, kills[0])
        front.kill()
    assert not psutil.wait_procs([engine], timeout=60)[1]
    for num_chars in [*kills[1:], None]:
        with (
            serving(*EXACT, port=port, WEFT_DATA=str(folder / "data")) as (front, _),
            Client(url, api_key=KEY) as client,
        ):
            reader.read(client, num_chars)
            front.kill()
    assert reader.outputs == expected
    assert reader.texts == {row: outputs["out"] for row, outputs in expected.items()}
    assert reader.positions == sorted(reader.positions)


def test_a_streamed_text_goes_on_when_the_server_was_killed(tmp_path: Path) -> None:
    stream_with_kills(tmp_path, [60])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_a_streamed_text_goes_on_after_many_kills(tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    stream_with_kills(tmp_path, [drawn.randrange(1, 60) for _ in range(5)])


def workflow_of(http: httpx.Client, run: str) -> dict[str, Any]:
    """What a run that has not ended says of itself."""
    card = http.get(f"/v1/runs/{run}").json()
    assert card["status"] in ("queued", "running"), card
    return dict(card["workflow"])


def go(http: httpx.Client, run: str) -> None:
    """Set the value that each row waits for."""
    while len(waits := workflow_of(http, run).get("waits_for", [])) < len(ROWS):
        time.sleep(0.01)
    for wait in waits:
        response = http.put(f"/v1/variables/{wait['id']}", json={"value": "on"})
        assert response.status_code == 200, response.text


def assert_nothing_retained(http: httpx.Client) -> None:
    """All pages of the engine are free, or cached and evictable: a request that needs nearly all of them gets them."""
    long = {"prompt": [65] * 1900, "max_tokens": 1, "n": 1}
    assert http.post("/v1/completions", json=long).status_code == 200
    [used] = lines_of(http, "weft:kv_cache_usage_perc{")
    assert float(used.split()[-1]) == 0.0


def test_a_killed_engine_leaves_nothing_retained_and_the_run_goes_on(tmp_path: Path) -> None:
    with serving(*EXACT, WEFT_DATA=str(tmp_path)) as (front, http):
        run = begun(http, BY_TURNS)
        go(http, run)
        expected = ended(http, run)
        run = begun(http, BY_TURNS, planning={"pinned_part": 0.5})
        while not workflow_of(http, run)["pins"]["retained"]:
            time.sleep(0.01)
        engine_of(front.pid).kill()
        go(http, run)
        assert ended(http, run) == expected
        assert_nothing_retained(http)
