"""How much the programs of a tenant may use per minute: a bucket of each kind, and when there is something in it.

Owns the arithmetic alone: no tasks, no timers; `now` comes from a clock. An `Account` has the `Rates` of its
tenant, `weft.programs.run.command_queue` makes programs wait.

A bucket holds what may be used in a minute, and fills at that rate. What is used is taken out afterwards, when it is
known, and the bucket may go below empty: a generation that was begun is finished. Then nothing more is begun until the
debt is paid. So over any time t a tenant uses at most rate x (t + one minute), and what its programs had begun when the
bucket ran empty.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.config import ProgramsConfig
from weft.programs.quota.limits import Spent

WINDOW_S = 60.0
RATED: tuple[Spent, ...] = ("cpu_s", "host_calls", "tokens")
"""Limits of a run that a tenant may have a rate of: the setting `tenant_NAME_per_minute`."""


class RateWait(NamedTuple):
    """Why nothing is begun now, and for how long."""

    name: str
    """The rate: `cpu_s`, `host_calls` or `tokens`."""
    per_minute: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"the programs of this tenant used more than {self.per_minute:g} {self.name} per minute "
            f"(programs.tenant_{self.name}_per_minute); it goes on in {self.seconds:.1f} s"
        )


class TokenBucket:
    """One kind. `level` is what may be used now; below 0 it is a debt."""

    def __init__(self, per_minute: float, now: float):
        self.per_minute = per_minute
        self._level, self._at_s = float(per_minute), now

    def spend(self, amount: float, now: float) -> None:
        """Take an amount out; the level may go below 0."""
        self._level = self.level(now) - amount
        self._at_s = now

    def level(self, now: float) -> float:
        """What may be used now."""
        filled = self._level + (now - self._at_s) * self.per_minute / WINDOW_S
        return min(filled, float(self.per_minute))

    def wait_s(self, now: float) -> float:
        """Until there is no debt."""
        return max(0.0, -self.level(now) * WINDOW_S / self.per_minute)

    def is_full(self, now: float) -> bool:
        """Whether the bucket is as full as a new one."""
        return self.level(now) >= self.per_minute


class Rates:
    """The buckets of one tenant: of those kinds that have a rate."""

    def __init__(self, config: ProgramsConfig, now: float):
        rates: dict[str, float | None] = {name: getattr(config, f"tenant_{name}_per_minute") for name in RATED}
        self._buckets = {name: TokenBucket(most, now) for name, most in rates.items() if most is not None}

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def spend(self, name: str, amount: float, now: float) -> None:
        """Count what was used of a kind; does nothing for one without a rate."""
        bucket = self._buckets.get(name)
        if bucket is not None:
            bucket.spend(amount, now)

    def wait(self, now: float) -> RateWait | None:
        """The longest wait; None where there is none."""
        waits = [
            RateWait(name, bucket.per_minute, seconds)
            for name, bucket in self._buckets.items()
            if (seconds := bucket.wait_s(now)) > 0
        ]
        return max(waits, key=lambda wait: wait.seconds, default=None)

    def is_full(self, now: float) -> bool:
        """Whether new ones would be the same."""
        return all(bucket.is_full(now) for bucket in self._buckets.values())
