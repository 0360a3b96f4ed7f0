"""`RunBudget`: what is left to one run of its limits, and where what it uses is charged.

Owns the counting. Budgets are a tree: a run, its children, theirs; what one spends counts against all above it, so a
child can never get more than its parent has left, and against the accounts of tenant and server. It does not know what
is counted (traits of a run do) nor how a run is ended. Used from one event loop.
"""

from __future__ import annotations

from typing import Any

import msgspec

from weft.abi.errors import LimitExceeded
from weft.core.clock import Clock
from weft.programs.quota.account import Account
from weft.programs.quota.limits import SPENT, Limits, Spent, smallest, used_up
from weft.programs.quota.rates import RateWait


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """What a run, its children included, has used so far."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    host_calls: int = 0
    tokens: int = 0
    pages: int = 0
    """Held now."""
    pages_peak: int = 0
    log_bytes: int = 0
    children: int = 0
    """Alive now."""


class RunBudget:
    """What is left to a run. Opened by `Accounts.open` and, for children, by `child`: it is alive from then on, with a
    sandbox of `sandbox_bytes`, until it is closed."""

    def __init__(self, limits: Limits, parent: RunBudget | Account, clock: Clock, *, sandbox_bytes: int = 0):
        self.limits = limits
        self._clock = clock
        self._began_s = clock.now()
        above = parent._line if isinstance(parent, RunBudget) else ()
        self._line: tuple[RunBudget, ...] = (self, *above)
        """This budget and those above it."""
        self._accounts: tuple[Account, ...] = parent._accounts if isinstance(parent, RunBudget) else parent.chain
        self._rates = self._accounts[0].rates
        self._sandbox_bytes = sandbox_bytes
        self._spent: dict[str, float] = dict.fromkeys(SPENT, 0)
        self._pages = 0
        """Of it and its children, as all other counts but the next."""
        self._own_pages = 0
        self._pages_peak = 0
        self._children = 0
        self._closed = False
        for budget in self._line[1:]:
            budget._children += 1
        for account in self._accounts:
            account.enter(sandbox_bytes)

    @property
    def used(self) -> Used:
        """What the run and its children have used until now."""
        spent: dict[str, Any] = self._spent
        return Used(
            wall_s=self._clock.now() - self._began_s,
            pages=self._pages,
            pages_peak=self._pages_peak,
            children=self._children,
            **spent,
        )

    def remaining(self) -> Limits:
        """What may still be used here, and so by a child that is launched now: its ancestors' remainders count too."""
        used = msgspec.structs.asdict(self.used)
        left = {
            name: max(0, limit - used[name])
            for name in (*SPENT, "wall_s", "pages", "children")
            if (limit := getattr(self.limits, name)) is not None
        }
        own = msgspec.structs.replace(self.limits, **left)
        # Depth counts down from generation to generation; an ancestor's is larger by nature.
        return own if len(self._line) == 1 else own.within(self._line[1].remaining())

    def child(self, limits: Limits) -> RunBudget:
        """The budget of a child that is being launched, in a sandbox as far as is known. Raises `LimitExceeded` for
        `children` and `depth`, and `Overloaded` where server or tenant have no place for it."""
        if self.limits.depth < 1:
            raise LimitExceeded("programs are launched by programs too deep here; the limit is depth", "depth")
        for budget in self._line:
            if budget._children >= budget.limits.children:
                most = budget.limits.children
                raise LimitExceeded(f"{most} children are alive, as many as the limit children allows", "children")
        limits = limits.within(self.remaining())
        for account in self._accounts:
            account.check_place(limits.memory_bytes)
        limits = msgspec.structs.replace(limits, depth=min(limits.depth, self.limits.depth - 1))
        return RunBudget(limits, self, self._clock, sandbox_bytes=limits.memory_bytes)

    def without_sandbox(self) -> None:
        """It turned out to be trusted, and reserves no memory."""
        for account in self._accounts:
            account.sandbox_bytes -= self._sandbox_bytes
        self._sandbox_bytes = 0

    # ---- rates of the tenant

    @property
    def is_rated(self) -> bool:
        """Whether `wait` can ever say anything."""
        return self._rates is not None

    def wait(self) -> RateWait | None:
        """For how long the tenant begins nothing more; None: not at all."""
        return None if self._rates is None else self._rates.wait(self._clock.now())

    # ---- what is spent

    def spend(self, name: Spent, amount: float) -> None:
        """Count an amount here, above, and against the tenant's rate. Raises `LimitExceeded`, having counted it."""
        over = False
        for budget in self._line:
            budget._spent[name] += amount
            most = getattr(budget.limits, name)
            over = over or (most is not None and budget._spent[name] > most)
        if self._rates is not None:
            self._rates.spend(name, amount, self._clock.now())
        if over:
            raise used_up(name, smallest(*(getattr(budget.limits, name) for budget in self._line)) or 0)

    def spend_tenant_cpu(self, seconds: float) -> None:
        """Count processor time that is spent for the tenant outside of the run's own code, on compiling it say: it
        counts against the tenant's rate alone."""
        if self._rates is not None:
            self._rates.spend("cpu_s", seconds, self._clock.now())

    @property
    def host_calls_left(self) -> int:
        """How many more there may be, here and above."""
        return min(budget.limits.host_calls - int(budget._spent["host_calls"]) for budget in self._line)

    @property
    def wall_left_s(self) -> float:
        """How much longer it may run: no longer than any run above."""
        now = self._clock.now()
        return max(0.0, min(budget.limits.wall_s + budget._began_s - now for budget in self._line))

    @property
    def wall_limit_s(self) -> float:
        """The limit that `wall_left_s` counts down: that of the run which ends first, of this one and those above."""
        return min(reversed(self._line), key=lambda budget: budget.limits.wall_s + budget._began_s).limits.wall_s

    # ---- what is held

    def explicit_pages(self, most: int) -> int | None:
        """Of the `most` pages that an engine has for explicit use, those that the tenant may hold; None: all."""
        return self._accounts[0].explicit_pages(most)

    def check_pages(self, count: int) -> None:
        """Raise `LimitExceeded` where `count` pages more exceed a limit of the run or of its parents."""
        for budget in self._line:
            most = budget.limits.pages
            if most is not None and budget._pages + count > most:
                held = budget._pages
                raise LimitExceeded(f"{count} more KV pages, with {held} held, exceed the limit of {most}", "pages")

    def take_pages(self, count: int) -> None:
        """Hold `count` more pages. Raises, having taken none: `LimitExceeded` for a limit of the run or of its parents,
        `OutOfPages` for one of its tenant or of the server."""
        self.check_pages(count)
        for account in self._accounts:
            account.check_pages(count)
        self._add_pages(count)

    def count_pages(self, count: int) -> None:
        """Count `count` pages that are held already, whatever the limits."""
        self._add_pages(count)

    def give_pages(self, count: int) -> None:
        """Return pages that `take_pages` counted."""
        self._add_pages(-count)

    def close(self) -> None:
        """The run is over: it holds nothing and is not alive any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._add_pages(-self._own_pages)
        for budget in self._line[1:]:
            budget._children -= 1
        for account in self._accounts:
            account.leave(self._sandbox_bytes)

    def _add_pages(self, count: int) -> None:
        for budget in self._line:
            budget._pages += count
            budget._pages_peak = max(budget._pages_peak, budget._pages)
        for account in self._accounts:
            account.pages += count
        self._own_pages += count
