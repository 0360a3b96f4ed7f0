"""Who computes next, among guests that share the loop's thread: turns by tenant. Used by `fibers`.

Owns an account for each tenant: the seconds that all its guests have computed. The next turn is that of the tenant with
the least (start-time fair queueing, as in `weft.sched.order`). Invariant: while a guest waits for its turn, a guest
of a tenant whose account is larger does not begin to compute, also one that its host has just answered. So each other
tenant computes for one turn at most before it, with any number of guests. A tenant that comes (again) begins level with
those that wait: it has saved nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import NamedTuple

PASS_S = 0.02
"""Most seconds that guests answered by their host compute in a pass of the loop without turns; the last one that begins
in it goes on to the end of its turn. Further ones wait for turns, so that the loop comes to its other work."""
SMALL_PART = 0.05
"""Of `PASS_S`: less than it counts for the next pass too. The callback that ends the count would cost a guest's only
exchange as much as it takes."""
MIN_COST_S = 1e-6
"""Minimum cost of a turn, so that turns without a measurable cost alternate too."""


class _Turn(NamedTuple):
    begins: asyncio.Future[None]
    part: float


class _Line:
    """The guests of one tenant that wait. Those that their host has answered and those that gave way alternate."""

    def __init__(self) -> None:
        self.answered: deque[_Turn] = deque()
        self.computing: deque[_Turn] = deque()
        self._is_answered_next = True

    def pop(self) -> _Turn:
        line = self.answered if self.answered and (self._is_answered_next or not self.computing) else self.computing
        self._is_answered_next = line is self.computing
        return line.popleft()

    def __bool__(self) -> bool:
        return bool(self.answered or self.computing)


class Turns:
    """One for all guests of a loop. `turn_s` is about how long a turn takes."""

    def __init__(self, turn_s: float) -> None:
        self._turn_s = turn_s
        self._waiting: dict[str, _Line] = {}
        """By tenant; no line is empty."""
        self._computed_s: dict[str, float] = {}
        self._level_s = 0.0
        """The least account that counts: the tenants that wait have at least as much. Never falls."""
        self._pass_s = 0.0
        """What guests have computed in this pass."""
        self._next_pass: asyncio.Handle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def runs_at_once(self, tenant: str) -> bool:
        """Whether a guest that its host has answered goes on without waiting for a turn."""
        if self._pass_s >= PASS_S:
            return False
        if not self._waiting:
            return True
        line = self._waiting.get(tenant)
        if line is not None and line.answered:
            return False
        account = self._account(tenant)
        return all(account <= self._account(other) for other in self._waiting if other != tenant)

    async def next(self, tenant: str, *, part: float = 1.0, answered: bool = False) -> None:
        """Wait for the guest's next turn. A pass of the loop begins turns that make up one by their `part`, and only
        one of each tenant where several wait. `answered`: the guest was answered by its host; else it begins or gives
        way."""
        turn = _Turn(self._running_loop().create_future(), part)
        line = self._waiting.setdefault(tenant, _Line())
        (line.answered if answered else line.computing).append(turn)
        self._schedule()
        await turn.begins

    def spent(self, tenant: str, seconds: float) -> None:
        """Count what a guest has computed, in its turn or at once."""
        account = self._account(tenant)
        if not self._waiting:
            self._level_s = account
        self._computed_s[tenant] = account + max(seconds, MIN_COST_S)
        self._pass_s += seconds
        if self._pass_s >= PASS_S * SMALL_PART:
            self._schedule()

    # ---- inside

    def _account(self, tenant: str) -> float:
        return max(self._level_s, self._computed_s.get(tenant, 0.0))

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # Another loop; the one before is gone, with the tasks that waited there.
            self._loop, self._next_pass, self._pass_s = loop, None, 0.0
            self._waiting.clear()
        return loop

    def _schedule(self) -> None:
        loop = self._running_loop()
        if self._next_pass is None:
            self._next_pass = loop.call_soon(self._begin_pass)

    def _begin_pass(self) -> None:
        self._next_pass, self._pass_s = None, 0.0
        if self._waiting:
            self._level_s = min(map(self._account, self._waiting))
        begun: Counter[str] = Counter()
        parts, is_alone = 0.0, len(self._waiting) == 1
        while self._waiting and parts < 1.0:
            # What the turns of this pass take is known after it.
            tenant = min(self._waiting, key=lambda tenant: self._account(tenant) + begun[tenant] * self._turn_s)
            if begun[tenant] and not is_alone:
                break
            line = self._waiting[tenant]
            turn = line.pop()
            if not line:
                del self._waiting[tenant]
            # Cancelled meanwhile, otherwise.
            if not turn.begins.done():
                turn.begins.set_result(None)
                begun[tenant] += 1
                parts += turn.part
        if self._waiting:
            self._schedule()
        else:
            self._computed_s = {name: least for name, least in self._computed_s.items() if least > self._level_s}
