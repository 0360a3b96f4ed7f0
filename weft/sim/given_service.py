"""The coding-agent day on the scheduler and the cache of an engine, with the service time of turns given.

The device takes the same time for every step and has no bound on its tokens, so a turn takes what `ServiceTime` says,
independent of what the cache holds: results compare with `bounds.replay` of the same turns. Every turn is a plain
client's request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.sim.bounds import ServiceTime
from weft.sim.devices import Device, linear_forward
from weft.sim.records import SessionRecord
from weft.sim.run import SimulationResult, SimulationSettings, simulate
from weft.sim.scripts import SessionScript

NO_BOUND = 1 << 30
"""Tokens of a step."""


def given_service_device(kv_tokens: int, service: ServiceTime) -> Device:
    """A device with room for `kv_tokens` whose steps all take the service time of one output token."""
    return Device(
        name="given-service",
        about=f"{service.fixed_s:g} s + {1000 * service.per_token_s:g} ms per output token",
        kv_tokens=kv_tokens,
        forward=linear_forward(service.per_token_s, 0.0),
        swap_out=None,
        swap_in=None,
        saturation_tokens=NO_BOUND,
    )


def simulate_given_service(
    scripts: Sequence[SessionScript],
    kv_tokens: int,
    service: ServiceTime | None = None,
    *,
    policy: str = "lru",
    estimator: str = "learned",
    seed: int = 0,
    on_done: Callable[[SessionRecord], None] = lambda record: None,
) -> SimulationResult:
    """Play sessions with a pool of `kv_tokens` and without a host tier. Raises as `simulate`."""
    service = service or ServiceTime()
    settings = SimulationSettings(
        policy=policy,
        estimator=estimator,
        driving="clients",
        max_step_tokens=NO_BOUND,
        saturate=False,
        latency_s=service.fixed_s,
        overlap=False,
    )
    return simulate(given_service_device(kv_tokens, service), scripts, settings, seed=seed, on_done=on_done)
