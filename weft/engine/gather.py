"""When a step begins: at once, or a little later, with those who are about to come back.

A program that looks at every distribution has no work for the engine between an answer and its next command. If the
device began a step the moment one program is ready, programs would fall apart into groups that take turns, each in a
step of its own that costs nearly as much as one for all. So the engine asks a policy before each step that would
begin on an idle device with nothing but such programs.

`Adaptive` is the default. `Eager`, `KOnly` and `TOnly` are the strategies that Pie (section 6.1, table 5) compares it
with; they serve comparisons, not users.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from weft.config import EngineConfig
from weft.core.wire import Command

MOST_WAIT_S = 0.05
"""Upper bound on the wait before a step, in seconds, for every policy."""
_SMOOTHING = 0.2


class Ready(NamedTuple):
    """The programs that are ready or expected, and times in seconds: the view of a policy."""

    num_ready: int
    """Programs whose commands wait for a step."""
    num_answered: int
    """Programs that were answered and have not come back yet."""
    step_s: float
    """What the step would take on the device, in seconds: as predicted, or as steps took lately."""
    waited_s: float
    """Since the last answer went out, or since the step could have begun."""
    return_s: float
    """How long programs have lately taken to come back, in seconds."""


class Policy(Protocol):
    """Decides how long a step that could begin waits for programs that are about to come back."""

    def wait_s(self, ready: Ready) -> float:
        """How many more seconds; 0: begin."""
        ...


class Adaptive:
    """Wait for those who come back soon, as long as all together gain by it.

    Beginning now makes the `b` that were answered wait for a whole step; waiting makes the `a` that are ready wait for
    the `b`. So it pays up to `step_s * b / (a + b)`, and is tried if the `b` usually need less.
    """

    def wait_s(self, ready: Ready) -> float:
        """Up to the time that pays, or twice the usual time of return; 0 where neither is worth it."""
        if not ready.num_answered:
            return 0.0
        pays_s = ready.step_s * ready.num_answered / (ready.num_ready + ready.num_answered)
        if ready.return_s >= pays_s:
            return 0.0
        return max(0.0, min(pays_s, 2 * ready.return_s) - ready.waited_s)


class Eager:
    """Never wait (and, by `max_rows` of the scheduler, never batch)."""

    def wait_s(self, ready: Ready) -> float:
        """0: the step never waits for commands."""
        return 0.0


class KOnly:
    """Wait for `k` programs; at most as long as `MOST_WAIT_S`, or the last ones would wait for ever."""

    def __init__(self, k: int):
        self._k = k

    def wait_s(self, ready: Ready) -> float:
        """Until there are so many."""
        return 0.0 if ready.num_ready >= self._k else MOST_WAIT_S - ready.waited_s


class TOnly:
    """Wait for a fixed time, however many programs are ready."""

    def __init__(self, wait_s: float):
        self._wait_s = wait_s

    def wait_s(self, ready: Ready) -> float:
        """What is left of it."""
        return self._wait_s - ready.waited_s


def policy_of(config: EngineConfig) -> Policy:
    """The policy that `EngineConfig.batching` names."""
    match config.batching:
        case "eager":
            return Eager()
        case "k":
            return KOnly(config.batching_k)
        case "t":
            return TOnly(config.batching_wait_s)
        case _:
            return Adaptive()


class Gather:
    """Keeps count of who was answered and came back, for a policy. Times are seconds on the engine's clock."""

    def __init__(self, policy: Policy):
        self._policy = policy
        self._out: set[tuple[int, int]] = set()
        self._since_s = 0.0
        self._step_s = 0.0
        self._return_s = 0.0

    def answered(self, who: tuple[int, int], now: float) -> None:
        """A (client, sequence or space) has nothing more to do than what it will ask next."""
        if now > self._since_s:
            # Who has not come back while a whole step went by does something else.
            self._out.clear()
            self._since_s = now
        self._out.add(who)

    def returned(self, client: int, commands: Iterable[Command], now: float) -> None:
        """Sequences and spaces of a client have asked for something."""
        if not self._out:
            return
        for command in commands:
            who = client, getattr(command, "seq", 0) or getattr(command, "space", 0)
            if who in self._out:
                self._out.discard(who)
                self._return_s += _SMOOTHING * (now - self._since_s - self._return_s)

    def gone(self, client: int) -> None:
        """A client will not come back."""
        self._out = {who for who in self._out if who[0] != client}

    def stepped(self, device_s: float) -> None:
        """A step has taken so long."""
        self._step_s += _SMOOTHING * (device_s - self._step_s) if self._step_s else device_s

    def wait_s(self, num_ready: int, now: float, step_s: float | None = None) -> float:
        """How many more seconds to wait before a step for `num_ready` programs begins; 0: begin. `step_s` is what that
        step is predicted to take; None: as long as steps took lately."""
        waited_s = now - self._since_s
        if waited_s >= MOST_WAIT_S:
            self._out.clear()
            return 0.0
        expected_s = self._step_s if step_s is None else step_s
        ready = Ready(num_ready, len(self._out), expected_s, waited_s, self._return_s)
        return max(0.0, self._policy.wait_s(ready))
