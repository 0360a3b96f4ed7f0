"""`LoopShare`: what the commands of all programs may take of one pass of the event loop, and who is next, by tenant.

Owns the time that commands took in this pass, and the programs whose commands wait for another. A pass that programs
have used up goes on with everything else that the loop has to do. Tenants then take turns, each as one, with
any number of programs. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

PASS_S = 0.02
"""What commands of programs may take of a pass, all together; the last command begun in it is finished."""
TURN_S = 0.005
"""What one program may take of it while others wait."""
SMALL_PART = 0.05
"""Of a pass's share: less than it counts for the next pass too. The callback that ends the count would cost a program's
only command as much as carrying it out does."""

GoesOn = Callable[[], bool]
"""Whether the next command may be carried out in this turn."""
Portion = Callable[[GoesOn], bool]
"""Carries commands out, at least one; whether there are more."""


class LoopShare:
    """One for each event loop that carries out commands of programs."""

    def __init__(
        self, *, pass_s: float = PASS_S, turn_s: float = TURN_S, clock: Callable[[], float] = time.perf_counter
    ):
        self._pass_s, self._turn_s, self._clock = pass_s, turn_s, clock
        self._spent_s = 0.0
        self._waiting: dict[str, deque[Portion]] = {}
        """By tenant, in the order of their turns; no tenant has an empty one."""
        self._next: asyncio.Handle | None = None

    @property
    def is_used_up(self) -> bool:
        """Whether commands have to wait for another pass, behind those that wait already."""
        return bool(self._waiting) or self._spent_s >= self._pass_s

    def run(self, portion: Portion) -> bool:
        """A turn, now; what the portion returns, or raises."""
        began_s = self._clock()
        until_s = began_s + min(self._turn_s, self._pass_s - self._spent_s)
        try:
            return portion(lambda: self._clock() < until_s)
        finally:
            self._spent_s += self._clock() - began_s
            if self._spent_s >= self._pass_s * SMALL_PART:
                self._schedule()

    def wait(self, tenant: str, portion: Portion) -> None:
        """Turns in later passes, until there is no more. The portion must not raise."""
        self._waiting.setdefault(tenant, deque()).append(portion)
        self._schedule()

    # ---- inside

    def _schedule(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._begin_pass)

    def _begin_pass(self) -> None:
        self._next, self._spent_s = None, 0.0
        while self._waiting and self._spent_s < self._pass_s:
            tenant = next(iter(self._waiting))
            portions = self._waiting.pop(tenant)
            portion = portions.popleft()
            if self.run(portion):
                portions.append(portion)
            # Its next turn comes after those of the other tenants, and of its own programs that wait.
            portions.extend(self._waiting.pop(tenant, ()))
            if portions:
                self._waiting[tenant] = portions
        if self._waiting:
            self._schedule()
