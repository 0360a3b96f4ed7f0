"""What a run may use: `Limits` as a value, and `Budget`, what is left of them while it runs.

Owns the counting. Budgets are a tree: a run, its children, theirs; what one spends counts against all above it, so a
child can never get more than its parent has left, and against the accounts of tenant and server
(`weft.programs.quota.accounts`, which opens budgets). It does not know what is counted (sessions do) nor how a run is
ended. Used from one event loop.

A limit that is *used up* (`cpu_s`, `wall_s`, `host_calls`, `tokens`, `log_bytes`) ends its run. One that something
would go beyond (`pages`, `children`, `depth`, `message_bytes`, `pending_messages`) refuses that one call: nothing was
taken, and the program may give something back and try again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from weft.abi.errors import InvalidRequest, LimitExceeded, WeftError
from weft.core.clock import Clock
from weft.programs.network.allow_list import covered
from weft.programs.quota.rates import Wait

if TYPE_CHECKING:
    from weft.programs.quota.accounts import Account

REFUSED = frozenset({"pages", "children", "depth", "message_bytes", "pending_messages"})
"""Limits that refuse a call instead of ending the run."""
MAX_COUNT = 1 << 63
"""Counts are below: larger ones cannot be told to another process."""
MAX_NETWORK, MAX_NETWORK_CHARS = 64, 300
"""Entries of a run's list of hosts, and their length."""
_SMALLER = (
    "cpu_s",
    "memory_bytes",
    "host_calls",
    "pages",
    "tokens",
    "wall_s",
    "children",
    "depth",
    "message_bytes",
    "pending_messages",
    "log_bytes",
)


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one run, its children included. Where None is allowed, only the server's own bounds hold."""

    cpu_s: float = 30.0
    """Processor time of its own code, and of its host on its behalf: rendering, tokenization, decoding of what it says
    (not of the model). Not enforced for trusted programs."""
    memory_bytes: int = 64 << 20
    """Of the sandbox; each child has one of its own, no larger. Not enforced for trusted programs."""
    host_calls: int = 1_000_000
    """Commands sent to the host."""
    pages: int | None = None
    """KV pages held at once: those allocated, and those that the tokens of its sequences fill."""
    tokens: int | None = None
    """Tokens put on sequences and forwards, and generated."""
    wall_s: float = 3600.0
    children: int = 64
    """Programs launched by it, and by those, alive at once."""
    depth: int = 8
    """Generations of children below it."""
    message_bytes: int = 1 << 20
    """Of one message, sent, received or broadcast, and of the arguments of a child."""
    pending_messages: int = 1000
    """Messages that wait to be read, of each sender and subscription."""
    log_bytes: int = 1 << 20
    network: list[str] = []
    """Hosts that it may talk to, as in `weft.programs.network.allow_list`; the server's own list holds besides."""

    def __post_init__(self) -> None:
        for name in _SMALLER:
            value = getattr(self, name)
            most = math.inf if isinstance(value, float) else MAX_COUNT
            # Written so that NaN is refused too.
            if value is not None and not 0 <= value < most:
                raise InvalidRequest(f"limits.{name} must be a number from 0, got {value}", f"limits.{name}")
        # They are kept in the record of the run.
        if len(self.network) > MAX_NETWORK or any(len(entry) > MAX_NETWORK_CHARS for entry in self.network):
            allowed = f"{MAX_NETWORK} hosts of at most {MAX_NETWORK_CHARS} characters"
            raise InvalidRequest(f"limits.network may have {allowed}", "limits.network")

    def within(self, remaining: Limits) -> Limits:
        """The smaller of both, limit by limit; of the network, what both allow."""
        smaller = {name: _min(getattr(self, name), getattr(remaining, name)) for name in _SMALLER}
        network = [entry for entry in self.network if any(covered(entry, by) for by in remaining.network)]
        return msgspec.structs.replace(self, **smaller, network=network)


def limits_from_json(data: bytes, remaining: Limits) -> Limits:
    """Limits of a child from the JSON object that its parent gave: what is not said is what the parent has left.

    Raises `InvalidRequest` for unknown names and values that cannot be.
    """
    try:
        asked = msgspec.json.decode(data, type=dict[str, object])
        return msgspec.convert({**msgspec.structs.asdict(remaining), **asked}, Limits).within(remaining)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"the limits cannot be used: {error}", "limits") from error


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


class Budget:
    """What is left to a run. Opened by `Accounts.open` and, for children, by `child`: it is alive from then on, with a
    sandbox of `sandbox_bytes`, until it is closed."""

    def __init__(self, limits: Limits, parent: Budget | Account, clock: Clock, *, sandbox_bytes: int = 0):
        self.limits = limits
        self._clock = clock
        self._began_s = clock.now()
        self._above: tuple[Budget, ...] = (parent, *parent._above) if isinstance(parent, Budget) else ()
        self._accounts: tuple[Account, ...] = parent._accounts if isinstance(parent, Budget) else parent.chain
        self._rates = self._accounts[0].rates
        self._sandbox_bytes = sandbox_bytes
        self._cpu_s = 0.0
        self._host_calls = 0
        self._tokens = 0
        self._pages = 0
        self._own_pages = 0
        self._explicit = _Explicit()
        self._pages_peak = 0
        self._log_bytes = 0
        self._children = 0
        self._closed = False
        for budget in self._above:
            budget._children += 1
        for account in self._accounts:
            account.enter(sandbox_bytes)

    @property
    def used(self) -> Used:
        """What the run and its children have used until now."""
        return Used(
            cpu_s=self._cpu_s,
            wall_s=self._clock.now() - self._began_s,
            host_calls=self._host_calls,
            tokens=self._tokens,
            pages=self._pages,
            pages_peak=self._pages_peak,
            log_bytes=self._log_bytes,
            children=self._children,
        )

    def remaining(self) -> Limits:
        """What may still be used here, and so by a child that is launched now: its ancestors' remainders count too."""
        limits, used = self.limits, self.used
        own = Limits(
            cpu_s=max(0.0, limits.cpu_s - used.cpu_s),
            memory_bytes=limits.memory_bytes,
            host_calls=max(0, limits.host_calls - used.host_calls),
            pages=_less(limits.pages, used.pages),
            tokens=_less(limits.tokens, used.tokens),
            wall_s=max(0.0, limits.wall_s - used.wall_s),
            children=max(0, limits.children - used.children),
            depth=limits.depth,
            message_bytes=limits.message_bytes,
            pending_messages=limits.pending_messages,
            log_bytes=max(0, limits.log_bytes - used.log_bytes),
            network=limits.network,
        )
        if not self._above:
            return own
        # Depth counts down from generation to generation; an ancestor's is larger by nature.
        return own.within(self._above[0].remaining())

    def child(self, limits: Limits) -> Budget:
        """The budget of a child that is being launched, in a sandbox as far as is known. Raises `LimitExceeded` for
        `children` and `depth`, and `Overloaded` where server or tenant have no place for it."""
        if self.limits.depth < 1:
            raise LimitExceeded("programs are launched by programs too deep here; the limit is depth", "depth")
        for budget in (self, *self._above):
            if budget._children >= budget.limits.children:
                most = budget.limits.children
                raise LimitExceeded(f"{most} children are alive, as many as the limit children allows", "children")
        limits = limits.within(self.remaining())
        for account in self._accounts:
            account.check_place(limits.memory_bytes)
        limits = msgspec.structs.replace(limits, depth=min(limits.depth, self.limits.depth - 1))
        return Budget(limits, self, self._clock, sandbox_bytes=limits.memory_bytes)

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

    def wait(self) -> Wait | None:
        """For how long nothing of this tenant is begun; None: not at all."""
        return None if self._rates is None else self._rates.wait(self._clock.now())

    # ---- what is used

    def spend_host_calls(self, count: int) -> None:
        """Count calls of the host, here, above, and against the tenant's rate. Raises `LimitExceeded`."""
        over = False
        for budget in (self, *self._above):
            budget._host_calls += count
            over = over or budget._host_calls > budget.limits.host_calls
        if self._rates is not None:
            self._rates.spend("host_calls", count, self._clock.now())
        if over:
            raise _used_up("host_calls", self._smallest("host_calls"), "calls of its host")

    @property
    def host_calls_left(self) -> int:
        """How many more there may be, here and above."""
        return min(budget.limits.host_calls - budget._host_calls for budget in (self, *self._above))

    @property
    def wall_left_s(self) -> float:
        """How much longer it may run: no longer than anybody above."""
        now = self._clock.now()
        return max(0.0, min(budget.limits.wall_s + budget._began_s - now for budget in (self, *self._above)))

    def spend_tokens(self, count: int) -> None:
        """Count tokens appended and generated, here, above, and against the tenant's rate. Raises `LimitExceeded`."""
        over = False
        for budget in (self, *self._above):
            budget._tokens += count
            over = over or (budget.limits.tokens is not None and budget._tokens > budget.limits.tokens)
        if self._rates is not None:
            self._rates.spend("tokens", count, self._clock.now())
        if over:
            raise _used_up("tokens", self._smallest("tokens"), "tokens")

    def spend_cpu(self, seconds: float) -> None:
        """Count processor time, here, above, and against the tenant's rate. Raises `LimitExceeded`."""
        over = False
        for budget in (self, *self._above):
            budget._cpu_s += seconds
            over = over or budget._cpu_s > budget.limits.cpu_s
        if self._rates is not None:
            self._rates.spend("cpu_s", seconds, self._clock.now())
        if over:
            raise _used_up("cpu_s", self._smallest("cpu_s"), "seconds of processor time")

    def spend_tenant_cpu(self, seconds: float) -> None:
        """Processor time spent for the tenant outside of the run's own code, on compiling it say: it counts against the
        tenant's rate alone."""
        if self._rates is not None:
            self._rates.spend("cpu_s", seconds, self._clock.now())

    def spend_log(self, count: int) -> None:
        """Bytes of log. Raises `LimitExceeded`."""
        over = False
        for budget in (self, *self._above):
            budget._log_bytes += count
            over = over or budget._log_bytes > budget.limits.log_bytes
        if over:
            raise _used_up("log_bytes", self._smallest("log_bytes"), "bytes of log")

    def take_pages(self, count: int) -> None:
        """Raises, having taken none: `LimitExceeded` for a limit of the run or of its parents, `OutOfPages` for one of
        its tenant or of the server."""
        chain = (self, *self._above)
        for budget in chain:
            most = budget.limits.pages
            if most is not None and budget._pages + count > most:
                held = budget._pages
                raise LimitExceeded(f"{count} more KV pages, with {held} held, exceed the limit of {most}", "pages")
        for account in self._accounts:
            account.check_pages(count)
        for budget in chain:
            budget._pages += count
            budget._pages_peak = max(budget._pages_peak, budget._pages)
        for account in self._accounts:
            account.pages += count
        self._own_pages += count

    def give_pages(self, count: int) -> None:
        """Return pages that `take_pages` counted."""
        for budget in (self, *self._above):
            budget._pages -= count
        for account in self._accounts:
            account.pages -= count
        self._own_pages -= count

    def reserve_explicit_pages(self, count: int, model: str, of: int) -> None:
        """Explicit pages that are this run's from now on, allocated or not; once. `of` is what the model's engine has
        of them for all. Raises as `take_explicit_pages`, for its own limit of pages too."""
        most = self.limits.pages
        if most is not None and count > most:
            raise LimitExceeded(f"{count} reserved KV pages exceed the limit of {most}", "pages")
        self._hold_explicit(self._explicit._replace(reserved=count, model=model), of)

    def take_explicit_pages(self, count: int, model: str, of: int) -> None:
        """As `take_pages`, for pages that the program places itself, which nobody can take away from it: a tenant has a
        share of them."""
        before = self._explicit._replace(model=model)
        self._hold_explicit(before._replace(taken=before.taken + count), of)
        try:
            self.take_pages(count)
        except WeftError:
            self._set_explicit(before)
            raise

    def give_explicit_pages(self, count: int) -> None:
        """Return pages that `take_explicit_pages` counted."""
        self._set_explicit(self._explicit._replace(taken=self._explicit.taken - count))
        self.give_pages(count)

    def close(self) -> None:
        """The run is over: it holds nothing and is not alive any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._set_explicit(_Explicit(model=self._explicit.model))
        if self._own_pages:
            self.give_pages(self._own_pages)
        for budget in self._above:
            budget._children -= 1
        for account in self._accounts:
            account.leave(self._sandbox_bytes)

    # ---- inside

    def _hold_explicit(self, wanted: _Explicit, of: int) -> None:
        more = wanted.held - self._explicit.held
        for account in self._accounts if more > 0 else ():
            account.check_explicit(wanted.model, more, of)
        self._set_explicit(wanted)

    def _set_explicit(self, now: _Explicit) -> None:
        before, self._explicit = self._explicit, now
        for account in self._accounts if now.held != before.held else ():
            account.explicit_pages[now.model] += now.held - before.held

    def _smallest(self, name: str) -> float:
        values = [getattr(budget.limits, name) for budget in (self, *self._above)]
        return float(min(value for value in values if value is not None))


class _Explicit(NamedTuple):
    """Explicit pages of one run: those it allocates come out of those it reserved, as far as they go."""

    model: str = ""
    reserved: int = 0
    taken: int = 0

    @property
    def held(self) -> int:
        return max(self.reserved, self.taken)


def _min(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def _less(limit: int | None, used: int) -> int | None:
    return None if limit is None else max(0, limit - used)


def _used_up(name: str, most: float, what: str) -> LimitExceeded:
    return LimitExceeded(f"the program used up its limit {name} of {most:g} {what}, its children's included", name)
