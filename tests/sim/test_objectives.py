"""Chat beside map-reduce on one device: the chat keeps its pace, and the map-reduce goes on."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from weft.core.objectives import Objective
from weft.sim.devices import Device, linear_forward
from weft.sim.records import SessionRecord
from weft.sim.run import SimulationSettings, simulate
from weft.sim.scripts import SessionScript, TurnScript

CHATS, CHUNKS = 40, 150
FACTOR = 1.5


def small_accelerator() -> Device:
    """7 ms of a step, 40 µs of a token: a step of 512 tokens takes four times as long as one of a few."""
    return Device(
        name="small",
        about="a small accelerator",
        kv_tokens=40_000,
        forward=linear_forward(0.007, 0.00004),
        swap_out=None,
        swap_in=None,
        saturation_tokens=512,
    )


def chats(seed: int) -> list[SessionScript]:
    """Chats that arrive at about four a second."""
    source = np.random.default_rng([seed, 1])
    arrivals = np.cumsum(source.exponential(0.25, CHATS))
    return [
        SessionScript(number, "chat", float(arrival_s), (TurnScript(int(prompt), int(output)),))
        for number, (arrival_s, prompt, output) in enumerate(
            zip(arrivals, source.integers(50, 400, CHATS), source.integers(30, 150, CHATS), strict=True)
        )
    ]


def map_reduce(seed: int, objective: Objective) -> list[SessionScript]:
    """Summaries of documents' chunks: thirty chunks of one every two seconds."""
    source = np.random.default_rng([seed, 2])
    turns = [(TurnScript(int(source.integers(400, 900)), int(source.integers(30, 80))),) for _ in range(CHUNKS)]
    return [
        SessionScript(1000 + number, "map", 2.0 * (number // 30), turn, objective=objective)
        for number, turn in enumerate(turns)
    ]


class Outcome(NamedTuple):
    """How a simulation went."""

    records: list[SessionRecord]

    def of(self, kind: str) -> list[SessionRecord]:
        return [record for record in self.records if record.kind == kind]

    def token_times(self) -> list[float]:
        """Seconds per output token of each chat, after its first."""
        turns = [record.turns[0] for record in self.of("chat")]
        return [(turn.end_s - turn.first_token_s) / (turn.output_tokens - 1) for turn in turns]

    def end_s(self, kind: str) -> float:
        return max(record.end_s or math.inf for record in self.of(kind))


@cache
def outcome(objective: str = "", factor: float = FACTOR) -> Outcome:
    """`objective`: of the map-reduce; empty: there is none."""
    scripts = chats(1) + (map_reduce(1, objective) if objective else [])  # type: ignore[arg-type]
    settings = SimulationSettings(max_running=64, latency_factor=factor)
    return Outcome(simulate(small_accelerator(), scripts, settings).records)


def slowdowns(beside: Outcome) -> list[float]:
    """Of each chat, its time per output token to that without map-reduce."""
    return [b / a for a, b in zip(outcome().token_times(), beside.token_times(), strict=True)]


def test_chats_keep_their_pace_beside_throughput_work() -> None:
    """Each step is within the factor; a chat may meet more of others' prompts than it would have alone."""
    assert max(slowdowns(outcome("latency"))) > 3.0, "the map-reduce would be in their way"
    for objective, factor in (("throughput", FACTOR), ("batch", FACTOR), ("throughput", 1.2)):
        found = slowdowns(outcome(objective, factor))
        assert np.mean(found) <= factor
        assert max(found) <= 1.1 * factor


def test_throughput_work_uses_what_it_is_left() -> None:
    beside, alone = outcome("throughput"), outcome("latency")
    assert beside.end_s("map") < 1.25 * alone.end_s("map")
    assert beside.end_s("chat") < alone.end_s("chat")


def test_throughput_work_gets_its_share_whatever_the_factor() -> None:
    """With a factor of 1, chats leave it a tenth of the time, in which a token takes 40 microseconds."""
    beside = outcome("batch", 1.0)
    until_s = beside.end_s("chat")
    done = [record.turns[0] for record in beside.of("map") if record.end_s is not None and record.end_s <= until_s]
    spent_s = 0.00004 * sum(turn.prompt_tokens + turn.output_tokens for turn in done)
    assert 0.08 <= spent_s / until_s <= 0.15
    assert np.mean(slowdowns(beside)) <= 1.15
