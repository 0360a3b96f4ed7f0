"""Cases of the coding-agent day for `bench.simulated_rates`: what policies compute again, and how long jobs take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from bench.simulations import DEVICE
from weft.sim.agents import MAIN, AgentParameters, agent_day, coarsened
from weft.sim.bounds import (
    Replayed,
    ServiceTime,
    TimedTurn,
    farthest_next_use,
    least_recently_used,
    replay,
    timed_turns,
    working_set,
)
from weft.sim.devices import PAGE_SIZE, Device, find_device, linear_forward
from weft.sim.given_service import simulate_given_service
from weft.sim.hindsight import replay_by_kind
from weft.sim.run import SimulationSettings, simulate
from weft.sim.scripts import SessionScript

SESSIONS, JOB_SESSIONS = 400, 60
STRIDE = 20
"""Output tokens of a step."""
SERVICE = ServiceTime(per_token_s=ServiceTime().per_token_s * STRIDE)
Replay = Callable[[Sequence[TimedTurn], int, int], Replayed]
BOUNDS: Mapping[str, Replay] = {
    "bound of lru": partial(replay, first_to_go=least_recently_used),
    "bound by kind": replay_by_kind,
    "optimum": partial(replay, first_to_go=farthest_next_use),
}
"""By name: replays, which schedule nothing."""


def day(sessions: int, rate: float, seed: int) -> list[SessionScript]:
    """The sessions of a day, coarsened."""
    return coarsened(agent_day(AgentParameters(sessions=sessions, rate=rate), seed), STRIDE)


class DayCase(NamedTuple):
    """A policy, or one of `BOUNDS`, on a day whose turns take a given time; `pool` is a part of the working set."""

    policy: str
    rate: float
    pool: float
    seed: int

    @property
    def key(self) -> str:
        """As `Case`."""
        return f"day, {self.policy}, {self.rate:g}/s, pool {self.pool:g}, seed {self.seed}"

    def run(self) -> dict[str, Any]:
        """Tokens that are computed again."""
        scripts = day(SESSIONS, self.rate, self.seed)
        turns = timed_turns(scripts, SERVICE)
        pool_tokens = int(working_set(turns).peak * self.pool)
        if self.policy in BOUNDS:
            found = BOUNDS[self.policy](turns, pool_tokens // PAGE_SIZE, PAGE_SIZE).recomputed_tokens
        else:
            done = simulate_given_service(scripts, pool_tokens, SERVICE, policy=self.policy, seed=self.seed)
            found = done.summary.recomputed_tokens
        return {"recomputed_tokens": found, "pool_tokens": pool_tokens}


class JobCase(NamedTuple):
    """A policy on a day on a device with costs, which recomputation and swaps make slower."""

    policy: str
    rate: float
    pool: float
    seed: int
    with_host: bool
    """A host tier that holds the working set."""

    @property
    def key(self) -> str:
        """As `Case`."""
        tier = "host tier" if self.with_host else "no host tier"
        return f"jobs, {self.policy}, {tier}, {self.rate:g}/s, pool {self.pool:g}, seed {self.seed}"

    def run(self) -> dict[str, Any]:
        """Seconds of the sessions of main agents, from arrival to last token."""
        scripts = day(JOB_SESSIONS, self.rate, self.seed)
        peak = working_set(timed_turns(scripts, SERVICE)).peak
        device = coarse_device(int(peak * self.pool))
        settings = SimulationSettings(
            policy=self.policy,
            driving="clients",
            host_tokens=peak if self.with_host else 0,
            max_step_tokens=SimulationSettings().max_step_tokens * STRIDE,
        )
        done = simulate(device, scripts, settings, seed=self.seed)
        jobs = [(r.end_s - r.arrive_s, r.tools_s) for r in done.records if r.kind == MAIN and r.end_s is not None]
        times_s = [time_s for time_s, _ in jobs]
        return {
            "median_s": statistics.median(times_s),
            "mean_s": statistics.fmean(times_s),
            "mean_without_waits_s": statistics.fmean(time_s - waits_s for time_s, waits_s in jobs),
            "last_s": done.summary.simulated_s,
            "recomputed_tokens": done.summary.recomputed_tokens,
            "swapped_pages": done.summary.swapped_pages,
            "pool_tokens": device.kv_tokens,
        }


def coarse_device(kv_tokens: int) -> Device:
    """`DEVICE` with other memory, whose steps stand for `STRIDE` steps each: prompts and pages cost what they do there,
    and the query tokens of all but one of the decoding steps nothing."""
    device = find_device(DEVICE, kv_tokens=kv_tokens)
    forward = linear_forward(device.forward.base_s * STRIDE, device.forward.slopes[0])
    return msgspec.structs.replace(device, forward=forward, saturation_tokens=device.saturation_tokens * STRIDE)
