"""What tenants, and the server as a whole, let programs hold and use: caps, and who has how much of them.

Owns the counts above those of single runs (`weft.programs.quota.limits.Budget`, which this opens): programs alive, KV
pages, memory that sandboxes may grow to, and each tenant's rates. What is held is counted when it is taken and given
back when its run ends, however that happens. It does not wait: `weft.programs.host` and
`weft.programs.run.command_queue` do. Used from one event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from weft.abi.errors import InvalidRequest, OutOfPages, Overloaded
from weft.core.clock import Clock, SystemClock
from weft.programs.quota.limits import Budget, Limits
from weft.programs.quota.rates import Rates, Wait


class Caps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all programs of a server, and those of each tenant, may hold at once, and a tenant use per minute.

    None: whatever there is.
    """

    programs: int = 4096
    pages: int | None = None
    """KV pages, counted as in `Limits`."""
    sandbox_bytes: int | None = None
    """Memory that sandboxes may grow to: the sum of their limits, whatever they hold now."""
    tenant_programs: int = 1024
    tenant_pages: int | None = None
    tenant_sandbox_bytes: int | None = None
    tenant_explicit_share: float = 1.0
    """Of the pages that an engine has for programs' explicit ones, what a tenant may hold of them."""
    tenant_cpu_s_per_minute: float | None = None
    tenant_host_calls_per_minute: float | None = None
    tenant_tokens_per_minute: float | None = None
    store_bytes: int = 64 << 20
    """Names and values that a tenant may store."""


class NoPlace(Overloaded):
    """A run cannot start now; it may when others have ended, or after `retry_after_s`."""

    def __init__(self, message: str, *, everybody: bool, retry_after_s: float = 1.0, in_time: bool = False):
        super().__init__(message, retry_after_s=retry_after_s)
        self.everybody = everybody
        """It is the server that is full, not a tenant."""
        self.in_time = in_time
        """Nothing has to end for it: there is a place after `retry_after_s`."""


class Account:
    """Of a tenant, or of the server."""

    def __init__(
        self,
        name: str,
        *,
        programs: int,
        pages: int | None,
        sandbox_bytes: int | None,
        explicit_share: float = 1.0,
        rates: Rates | None = None,
        above: Account | None = None,
    ):
        self._name, self._above = name, above
        self._most_programs, self._most_pages, self._most_bytes = programs, pages, sandbox_bytes
        self._explicit_share = explicit_share
        self.rates = rates or None
        """None where no rate is set."""
        self.chain: tuple[Account, ...] = (self,) if above is None else (self, *above.chain)
        self.programs = 0
        self.pages = 0
        self.sandbox_bytes = 0
        self.explicit_pages: Counter[str] = Counter()
        """By model."""
        self.on_empty: Callable[[], None] = lambda: None
        """Called when its last program has ended."""

    def check_place(self, sandbox_bytes: int) -> None:
        """Raise `NoPlace` where it has none for one more program, with a sandbox of this size."""
        everybody = self._above is None
        setting = "" if everybody else "_per_tenant"
        if self.programs >= self._most_programs:
            raise NoPlace(
                f"{self._name} runs {self.programs} programs, as many as it may (programs.max_runs{setting}); "
                "try again shortly",
                everybody=everybody,
            )
        if self._most_bytes is not None and sandbox_bytes and self.sandbox_bytes + sandbox_bytes > self._most_bytes:
            raise NoPlace(
                f"sandboxes of {self._name} may grow to {self.sandbox_bytes} bytes, and {sandbox_bytes} more would "
                f"exceed {self._most_bytes} (programs.max_sandbox_bytes{setting}); try again when one has ended, or "
                "with a smaller limit memory_bytes",
                everybody=everybody,
            )

    def check_possible(self, sandbox_bytes: int) -> None:
        """Raise `InvalidRequest` for a sandbox that has no place even alone."""
        if self._most_bytes is not None and sandbox_bytes > self._most_bytes:
            raise InvalidRequest(
                f"limits.memory_bytes is {sandbox_bytes}; all sandboxes of {self._name} together have "
                f"{self._most_bytes}",
                "limits.memory_bytes",
            )

    def check_pages(self, count: int) -> None:
        """Raise `OutOfPages` where `count` more pages exceed the account's cap."""
        if self._most_pages is not None and self.pages + count > self._most_pages:
            raise OutOfPages(
                f"programs of {self._name} hold {self.pages} KV pages, and {count} more would exceed "
                f"{self._most_pages}; free some, or try again later"
            )

    def check_explicit(self, model: str, count: int, of: int) -> None:
        """Raise `OutOfPages` for explicit pages beyond its share of the `of` that the model's engine has for all."""
        most = int(of * self._explicit_share)
        if self._explicit_share < 1 and self.explicit_pages[model] + count > most:
            raise OutOfPages(
                f"programs of {self._name} hold {self.explicit_pages[model]} explicit KV pages of {model}, and {count} "
                f"more would exceed its share of {most} (programs.tenant_pages_fraction); free some, or try again later"
            )

    def enter(self, sandbox_bytes: int) -> None:
        """Count a program that begins, with the memory that its sandbox may grow to."""
        self.programs += 1
        self.sandbox_bytes += sandbox_bytes

    def leave(self, sandbox_bytes: int) -> None:
        """Uncount a program that ended; calls `on_empty` after the last one."""
        self.programs -= 1
        self.sandbox_bytes -= sandbox_bytes
        if not self.programs:
            self.on_empty()


class Accounts:
    """Of one program host. Tenants without programs are forgotten once their rates have nothing to remember."""

    def __init__(
        self, caps: Caps | None = None, clock: Clock | None = None, caps_of: Callable[[str], Caps] | None = None
    ):
        """`caps_of` a tenant says what it has, where that is not the same for all."""
        self.caps = caps or Caps()
        self._caps_of = caps_of or (lambda tenant: self.caps)
        self._clock = clock or SystemClock()
        self._server = Account(
            "this server",
            programs=self.caps.programs,
            pages=self.caps.pages,
            sandbox_bytes=self.caps.sandbox_bytes,
        )
        self._tenants: dict[str, Account] = {}
        self._idle: dict[str, Account] = {}
        """Without programs, in the order in which they became so."""

    @property
    def num_programs(self) -> int:
        """Programs that have begun and not ended, of all tenants."""
        return self._server.programs

    @property
    def num_pages(self) -> int:
        """KV pages counted as held by programs."""
        return self._server.pages

    @property
    def sandbox_bytes(self) -> int:
        """What sandboxes may grow to."""
        return self._server.sandbox_bytes

    @property
    def num_tenants(self) -> int:
        """Tenants that something is counted for."""
        return len(self._tenants)

    def open(self, tenant: str, limits: Limits, *, sandboxed: bool = True) -> Budget:
        """The budget of a run that no program launched. Raises `NoPlace`."""
        account = self._tenant(tenant)
        sandbox_bytes = limits.memory_bytes if sandboxed else 0
        wait = self._wait_of(account)
        if wait is not None:
            raise NoPlace(str(wait), everybody=False, retry_after_s=wait.seconds, in_time=True)
        for above in account.chain:
            above.check_place(sandbox_bytes)
        self._tenants[tenant] = account
        self._idle.pop(tenant, None)
        return Budget(limits, account, self._clock, sandbox_bytes=sandbox_bytes)

    def check_possible(self, tenant: str, limits: Limits) -> None:
        """Raise `InvalidRequest` for a sandboxed run that could never start."""
        for above in self._tenant(tenant).chain:
            above.check_possible(limits.memory_bytes)

    # ---- inside

    def _tenant(self, tenant: str) -> Account:
        """Its account; a new one is kept only once something runs on it."""
        account = self._tenants.get(tenant)
        if account is not None:
            return account
        self._forget_some()
        caps = self._caps_of(tenant)
        per_minute = {
            "cpu_s": caps.tenant_cpu_s_per_minute,
            "host_calls": caps.tenant_host_calls_per_minute,
            "tokens": caps.tenant_tokens_per_minute,
        }
        account = Account(
            "this tenant",
            programs=caps.tenant_programs,
            pages=caps.tenant_pages,
            sandbox_bytes=caps.tenant_sandbox_bytes,
            explicit_share=caps.tenant_explicit_share,
            rates=Rates(per_minute, self._clock.now()),
            above=self._server,
        )
        kept = account

        def on_empty() -> None:
            if kept.rates is None or kept.rates.is_full(self._clock.now()):
                self._tenants.pop(tenant, None)
            else:
                self._idle[tenant] = kept

        account.on_empty = on_empty
        return account

    def _forget_some(self) -> None:
        """Tenants that have been idle long enough for it to make no difference."""
        now = self._clock.now()
        for tenant, account in list(self._idle.items()):
            if account.rates is None or account.rates.is_full(now):
                del self._idle[tenant], self._tenants[tenant]

    def _wait_of(self, account: Account) -> Wait | None:
        return None if account.rates is None else account.rates.wait(self._clock.now())
