"""`Account`: what the programs of one tenant, or of the whole server, hold at once, and the bounds on it.

Owns the counts and the errors, which name the setting at fault. `weft.programs.quota.budget` charges it.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.abi.errors import InvalidRequest, OutOfPages, Overloaded
from weft.config import ProgramsConfig
from weft.programs.quota.rates import Rates


class NoPlace(Overloaded):
    """A run cannot start now; it may when others have ended, or after `retry_after_s`."""

    def __init__(self, message: str, *, everybody: bool, retry_after_s: float = 1.0, in_time: bool = False):
        super().__init__(message, retry_after_s=retry_after_s)
        self.everybody = everybody
        """The server is full, not a tenant."""
        self.in_time = in_time
        """No run has to end for it: there is a place after `retry_after_s`."""


class Account:
    """Of a tenant, whose account `above` is the server's; or of the server."""

    def __init__(self, config: ProgramsConfig, rates: Rates | None = None, above: Account | None = None):
        """`config` is that of the tenant (`ProgramsConfig.of`)."""
        self._config = config
        self._is_server = above is None
        self._name = "this server" if above is None else "this tenant"
        self.rates = rates or None
        """None where no rate is set."""
        self.chain: tuple[Account, ...] = (self,) if above is None else (self, *above.chain)
        self.programs = 0
        self.pages = 0
        self.sandbox_bytes = 0
        """What its sandboxes may grow to."""
        self.on_empty: Callable[[], None] = lambda: None
        """Called when its last program has ended."""

    def check_place(self, sandbox_bytes: int) -> None:
        """Raise `NoPlace` where it has none for one more program, with a sandbox of this size."""
        most_programs, setting = self._most("max_runs")
        if most_programs is not None and self.programs >= most_programs:
            raise NoPlace(
                f"{self._name} runs {self.programs} programs, as many as it may ({setting}); try again shortly",
                everybody=self._is_server,
            )
        most, setting = self._most("max_sandbox_bytes")
        if most is not None and sandbox_bytes and self.sandbox_bytes + sandbox_bytes > most:
            raise NoPlace(
                f"sandboxes of {self._name} may grow to {self.sandbox_bytes} bytes, and {sandbox_bytes} more would "
                f"exceed {most} ({setting}); try again when one has ended, or with a smaller limit memory_bytes",
                everybody=self._is_server,
            )

    def check_possible(self, sandbox_bytes: int) -> None:
        """Raise `InvalidRequest` for a sandbox that has no place even alone."""
        most, setting = self._most("max_sandbox_bytes")
        if most is not None and sandbox_bytes > most:
            raise InvalidRequest(
                f"limits.memory_bytes is {sandbox_bytes}; sandboxes of {self._name} have {most} together ({setting})",
                "limits.memory_bytes",
            )

    def check_pages(self, count: int) -> None:
        """Raise `OutOfPages` where `count` more pages exceed the account's bound."""
        most, setting = self._most("max_pages")
        if most is not None and self.pages + count > most:
            raise OutOfPages(
                f"programs of {self._name} hold {self.pages} KV pages, and {count} more would exceed {most} "
                f"({setting}); free some, or try again later"
            )

    def explicit_pages(self, most: int) -> int | None:
        """Of the `most` pages that an engine has for explicit use, the tenant's share (`tenant_pages_fraction`); None:
        all."""
        fraction = self._config.tenant_pages_fraction
        return None if fraction is None or fraction >= 1 else int(most * fraction)

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

    def _most(self, name: str) -> tuple[int | None, str]:
        """A bound of the server, or the one of the same name for each tenant; and the setting as users write it."""
        field = name if self._is_server else f"{name}_per_tenant"
        return getattr(self._config, field), f"programs.{field}"
