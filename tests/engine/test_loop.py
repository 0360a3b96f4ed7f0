"""Leases: a client that pings keeps its sequences however long a step takes, and one that is silent loses them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.driver import Driver
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.core.sampling import StopParams
from weft.engine.loop import EngineLoop

LEASE_S = 30.0
REQUEST = (
    wire.Open(seq=1),
    wire.Append(seq=1, op=2, tokens=pack_tokens([5] * 20)),
    wire.Generate(seq=1, op=3, stop=StopParams(max_tokens=5, ignore_eos=True)),
)


class Box:
    """A mailbox with messages of client 1: a request, then what it says before each step. Stops after so many."""

    def __init__(self, says: list[list[wire.Command]]):
        self._says: list[list[wire.Command]] = [list(REQUEST), *says]
        self.sent: list[wire.Event] = []

    def receive(self, wait_s: float) -> list[tuple[int, list[wire.Command]]]:
        said = self._says.pop(0)
        return [(1, said)] if said else []

    def send(self, client: int, envelope: wire.Envelope) -> None:
        self.sent += envelope.events

    @property
    def stopped(self) -> bool:
        return not self._says


@pytest.mark.parametrize(("pings", "ending"), [(True, wire.Finished), (False, wire.Failed)])
def test_a_client_that_pings_keeps_its_sequences_through_steps_longer_than_its_lease(
    pings: bool, ending: type[Any]
) -> None:
    driver = Driver()
    box = Box([[wire.Ping()] if pings else []] * 12)
    step = driver.engine.step

    def long_step() -> None:
        step()
        driver.clock.advance(2 * LEASE_S)

    driver.engine.step = long_step  # type: ignore[method-assign]
    driver.engine._publish = lambda client, envelope: box.send(client, envelope)
    EngineLoop(driver.engine, box, LEASE_S).run()
    ends = [event for event in box.sent if isinstance(event, wire.Finished | wire.Failed)]
    assert [type(event) for event in ends] == [ending]
