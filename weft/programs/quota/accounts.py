"""`Accounts`: the accounts of the server and of its tenants in one program host.

Opens the budgets of runs. What is held is counted when it is taken and given back when its run ends, however that
happens. It does not wait: `weft.programs.host` and `weft.programs.run.command_queue` do. Used from one event loop.
"""

from __future__ import annotations

from weft.config import ProgramsConfig
from weft.core.clock import Clock, SystemClock
from weft.programs.quota.account import Account, NoPlace
from weft.programs.quota.budget import RunBudget
from weft.programs.quota.limits import Limits
from weft.programs.quota.rates import Rates


class Accounts:
    """Tenants without programs are forgotten once their rates would be as new."""

    def __init__(self, config: ProgramsConfig | None = None, clock: Clock | None = None):
        self._config = config or ProgramsConfig()
        self._clock = clock or SystemClock()
        self._server = Account(self._config)
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

    def open(self, tenant: str, limits: Limits, *, sandboxed: bool = True) -> RunBudget:
        """The budget of a run that no program launched. Raises `NoPlace`."""
        account = self._account(tenant)
        sandbox_bytes = limits.memory_bytes if sandboxed else 0
        wait = None if account.rates is None else account.rates.wait(self._clock.now())
        if wait is not None:
            raise NoPlace(str(wait), everybody=False, retry_after_s=wait.seconds, in_time=True)
        for above in account.chain:
            above.check_place(sandbox_bytes)
        self._tenants[tenant] = account
        self._idle.pop(tenant, None)
        return RunBudget(limits, account, self._clock, sandbox_bytes=sandbox_bytes)

    def charge(self, tenant: str, cpu_s: float) -> None:
        """Count processor time spent for a tenant outside of its runs against its rate."""
        account = self._account(tenant)
        if account.rates is not None:
            account.rates.spend("cpu_s", cpu_s, self._clock.now())
            self._tenants[tenant] = account
            if not account.programs:
                self._rest(tenant, account)

    def check_possible(self, tenant: str, limits: Limits) -> None:
        """Raise `InvalidRequest` for a sandboxed run that could never start."""
        for above in self._account(tenant).chain:
            above.check_possible(limits.memory_bytes)

    # ---- inside

    def _account(self, tenant: str) -> Account:
        """Its account; a new one is kept only once something runs on it."""
        known = self._tenants.get(tenant)
        if known is not None:
            return known
        self._forget_some()
        config = self._config.of(tenant)
        account = Account(config, Rates(config, self._clock.now()), self._server)
        account.on_empty = lambda: self._rest(tenant, account)
        return account

    def _rest(self, tenant: str, account: Account) -> None:
        if self._is_as_new(account):
            self._tenants.pop(tenant, None)
            self._idle.pop(tenant, None)
        else:
            self._idle[tenant] = account

    def _forget_some(self) -> None:
        """Tenants that have been idle long enough for it to make no difference."""
        for tenant, account in list(self._idle.items()):
            if self._is_as_new(account):
                del self._idle[tenant], self._tenants[tenant]

    def _is_as_new(self, account: Account) -> bool:
        return account.rates is None or account.rates.is_full(self._clock.now())
