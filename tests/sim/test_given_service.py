from __future__ import annotations

import msgspec
import pytest

from weft.sim.agents import AGENT_WAITS, AgentParameters, agent_day
from weft.sim.bounds import ServiceTime, farthest_next_use, least_recently_used, replay, timed_turns, working_set
from weft.sim.given_service import simulate_given_service

SERVICE = ServiceTime(0.5, 0.1)
SMALL = AgentParameters(
    sessions=12,
    rate=0.2,
    turns_median=8,
    first_tokens=480,
    growth_median=120,
    growth_deviation=0.7,
    max_context=4_000,
    output_tokens=(5, 20),
    waits={name: wait for name, wait in AGENT_WAITS.items() if name != "person"},
    subagent_shared_tokens=320,
    subagent_task_tokens=60,
    subagent_turns_median=3,
)


def test_turns_take_the_given_time_whatever_is_recomputed() -> None:
    scripts = agent_day(SMALL, 0)
    turns = timed_turns(scripts, SERVICE)
    for part in (2.0, 0.6):
        found = simulate_given_service(scripts, int(working_set(turns).peak * part), SERVICE)
        played = sorted((record.number, turn.due_s) for record in found.records for turn in record.turns)
        assert [number for number, _ in played] == sorted(turn.session for turn in turns)
        # Each turn that comes while others generate waits for the end of their step, at most 0.1 s.
        late = [due_s - turn.begin_s for (_, due_s), turn in zip(played, sorted(turns), strict=True)]
        assert -1e-6 < min(late) <= max(late) < 1.5


@pytest.mark.parametrize("seed", [0, 1])
def test_plain_prefix_caching_recomputes_what_the_replay_says(seed: int) -> None:
    scripts = agent_day(SMALL, seed)
    turns = timed_turns(scripts, SERVICE)

    def simulated(part: float) -> int:
        return simulate_given_service(scripts, pool(part), SERVICE).summary.recomputed_tokens

    def pool(part: float) -> int:
        return int(working_set(turns).peak * part)

    assert simulated(2.0) == 0
    said = replay(turns, pool(0.6) // 16, 16, least_recently_used).recomputed_tokens
    assert simulated(0.6) == pytest.approx(said, rel=0.06)
    assert said > 1.5 * replay(turns, pool(0.6) // 16, 16, farthest_next_use).recomputed_tokens


def test_the_oracle_knows_returns_and_ends() -> None:
    # Half of the waits are for people, and an answer that nobody replies to is a wait for a person too.
    waits = {"tests": AGENT_WAITS["tests"], "person": AGENT_WAITS["tests"]._replace(share=0.1)}
    scripts = agent_day(msgspec.structs.replace(SMALL, sessions=24, waits=waits, subagent_share=0.0), 0)
    turns = timed_turns(scripts, SERVICE)
    pool = int(working_set(turns).peak * 0.6)
    least = replay(turns, pool // 16, 16, farthest_next_use).recomputed_tokens
    found = {
        estimator: simulate_given_service(
            scripts, pool, SERVICE, policy="min_waste", estimator=estimator
        ).summary.recomputed_tokens
        for estimator in ("oracle", "elapsed")
    }
    assert found["oracle"] < 1.25 * least
    assert found["elapsed"] > 1.5 * least
