"""A small device, and sessions written by hand."""

from __future__ import annotations

from weft.core.cost.model import SwapModel
from weft.sim.devices import Device, linear_forward
from weft.sim.run import SimulationSettings
from weft.sim.scripts import SessionScript, TurnScript


def small_settings(**changes: object) -> SimulationSettings:
    """Of an engine that runs few sequences, so that S holds: it is never less than may run."""
    return SimulationSettings(**{"max_running": 32, **changes})  # type: ignore[arg-type]


def small_device(num_pages: int = 64) -> Device:
    """Steps of 10 ms and 1 ms for each token, up to S = 64; pages of 16 tokens, each of which takes 1 ms to move."""
    swap = SwapModel(base_s=0.0, per_page_s=0.001)
    return Device(
        name="small",
        about="a small device",
        kv_tokens=16 * num_pages,
        forward=linear_forward(0.010, 0.001),
        swap_out=swap,
        swap_in=swap,
        saturation_tokens=64,
    )


def session(number: int, *turns: tuple[int, int, float], arrive_s: float = 0.0) -> SessionScript:
    """Turns as (new tokens, output tokens, seconds of the wait after it)."""
    scripts = [
        TurnScript(new, output, "tool" if index + 1 < len(turns) else "", wait_s)
        for index, (new, output, wait_s) in enumerate(turns)
    ]
    return SessionScript(number, "test", arrive_s, tuple(scripts))
