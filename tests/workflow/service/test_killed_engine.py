"""An engine that is killed while the plan of a run holds pins: equal results, and nothing stays retained."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.programs.killable_engine import KillableEngine
from tests.server.conftest import running
from tests.workflow.shapes import Json

ROLES = [f"You are number {number}, and you always say what you mean in a few words." for number in range(2)]
ROWS = [{"q": f"question {number}"} for number in range(3)]
SPEC: dict[str, Any] = {"num_device_pages": 64, "max_context": 320}


def call(name: str, turn: int, user: str) -> Json:
    messages = [{"role": "system", "content": ROLES[turn % 2]}, {"role": "user", "content": user}]
    return {"id": name, "op": "llm", "messages": messages, "max_tokens": 4, "seed": 7, "ignore_eos": True}


BY_TURNS: Json = {
    "version": 1,
    "inputs": ["q"],
    "nodes": [
        call("a", 0, "{{q}}"),
        call("b", 1, "{{q}} {{a}}"),
        call("c", 0, "{{q}} {{b}}"),
        call("d", 1, "{{q}} {{c}}"),
    ],
    "outputs": {"out": "d", "first": "a"},
}


class Watched(KillableEngine):
    """Notes at which of its messages pins were held, and whether one was when it died."""

    def __init__(self, *args: Any, **spec: Any):
        self.pinned_at: list[int] = []
        self.died_with_pins = False
        super().__init__(*args, **spec)

    def die(self) -> None:
        self.died_with_pins |= self.engine.cache.retention.has_pins
        super().die()

    def _receive(self, envelope: Any) -> None:
        super()._receive(envelope)
        if self.engine.cache.retention.has_pins:
            self.pinned_at.append(self.num_messages)


def ran(engine: Watched) -> tuple[Json, dict[int, Json]]:
    """A run of the workflow to its end, after which nothing is left in the engine. Returns its counts of pins and its
    outputs by row."""
    with running(engine=engine) as server, server.http() as client:
        stored = client.post("/v1/workflows", json={"graph": BY_TURNS}).json()
        body = {"rows": ROWS, "cache": False, "planning": {"pinned_part": 0.5}}
        run = client.post(f"/v1/workflows/{stored['id']}/runs", json=body).json()
        assert (run["status"], run["workflow"]["failed"]) == ("finished", 0), run
        retention = engine.engine.cache.retention
        server.wait_until(lambda: not retention.has_pins and not engine._scheduled)
        assert retention.num_pages == 0
        assert server.runtime.retains.num_pages("") == 0
        assert server.runtime.num_operations == 0
        server.on_loop(engine.check_empty)
        return run["workflow"]["pins"], {row["row"]: row["outputs"] for row in run["results"]["data"]}


def deaths() -> tuple[dict[int, Json], list[int]]:
    """The outputs of a run that nothing disturbs, and the messages at which it held pins."""
    engine = Watched(**SPEC)
    pins, expected = ran(engine)
    assert pins["retained"] > 0
    assert engine.pinned_at
    return expected, engine.pinned_at


def assert_survived(dies_at: list[int], expected: dict[int, Json]) -> Watched:
    engine = Watched(dies_at, **SPEC)
    _, outputs = ran(engine)
    assert 1 <= engine.num_deaths <= len(dies_at), "the run may end before the last one"
    assert outputs == expected
    return engine


def test_a_killed_engine_leaves_no_page_retained() -> None:
    expected, pinned_at = deaths()
    middle = pinned_at[len(pinned_at) // 2]
    assert assert_survived([middle], expected).died_with_pins
    assert_survived([pinned_at[0]], expected)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
def test_an_engine_that_is_killed_again_and_again(seed: int) -> None:
    expected, pinned_at = deaths()
    drawn = random.Random(seed)
    num_with_pins = 0
    for _ in range(12):
        first = drawn.choice(pinned_at)
        num_with_pins += assert_survived([first, first + drawn.randrange(2, 20)], expected).died_with_pins
    assert num_with_pins > 0
