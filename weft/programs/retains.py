"""`PrefixRetains`: prefixes that one engine keeps because a program of this process asked for it.

Owns how many pages the prefixes of each tenant hold, so that one tenant's programs leave the others theirs. The engine
has bounds of its own (`weft.cache.retention`). Pure: the link carries the commands, and the simulator has one too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from weft.abi.errors import LimitExceeded, WeftError
from weft.core.ids import TOKEN_BYTES
from weft.core.wire import Command, EndRetain, Finished, Retain

OnRetained = Callable[[int | WeftError], None]
"""Told how many tokens an engine keeps, in whole pages, or why it keeps none."""


class DevicePages(NamedTuple):
    """The device pages of an engine."""

    num_pages: int
    page_size: int


class RetainLink(Protocol):
    """The way of commands to one engine."""

    @property
    def pool(self) -> DevicePages:
        """Raises `EngineDead` while the engine does not answer."""
        ...

    def number(self) -> int:
        """A number for an operation; never the same again."""
        ...

    def post(self, command: Command) -> None:
        """Send a command soon, in the order of the calls."""
        ...

    def tell(self, op: int, told: Callable[[Finished | WeftError], None]) -> None:
        """Call `told` with the end of an operation that belongs to no sequence, and that will be posted."""
        ...


class RetainedPrefix:
    """One retain. It ends with `end`, with the client, or when the engine needs the pages."""

    def __init__(self, retains: PrefixRetains, tenant: str, num_pages: int, op: int):
        self._retains = retains
        self._tenant = tenant
        self._num_pages = num_pages
        self._op = op
        self._is_open = True

    def end(self) -> None:
        """End the retain; what it kept is as any other KV. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._retains.end(self._tenant, self._num_pages, self._op)


class PrefixRetains:
    """The retains of prefixes on one engine."""

    def __init__(self, link: RetainLink):
        self._link = link
        self._pages: Counter[str] = Counter()
        """By tenant."""

    def num_pages(self, tenant: str) -> int:
        """Pages that a tenant has asked to be kept; what prefixes share counts for each."""
        return self._pages[tenant]

    def retain(self, tenant: str, namespace: str, tokens: bytes, part: float, told: OnRetained) -> RetainedPrefix:
        """Pin what the engine has of these packed tokens, whole pages, and tell later what it keeps. Raises
        `EngineDead`, and `LimitExceeded` where the tenant's prefixes would hold more than `part` of its pages."""
        pool = self._link.pool
        most = int(pool.num_pages * part)
        num_pages = len(tokens) // TOKEN_BYTES // pool.page_size
        if self._pages[tenant] + num_pages > most:
            raise LimitExceeded(f"{most} pages may be pinned, and {self._pages[tenant]} are", "pinned_pages")
        op = self._link.number()
        self._link.tell(op, lambda end: told(end if isinstance(end, WeftError) else end.count * pool.page_size))
        self._link.post(Retain(op=op, tokens=tokens, namespace=namespace, weight=math.inf, ttl_s=math.inf))
        self._pages[tenant] += num_pages
        return RetainedPrefix(self, tenant, num_pages, op)

    def end(self, tenant: str, num_pages: int, retain: int) -> None:
        """End the retain with this operation number; in its order behind it, so it need not have been answered."""
        self._pages[tenant] -= num_pages
        if not self._pages[tenant]:
            del self._pages[tenant]
        self._link.post(EndRetain(op=self._link.number(), retain=retain))
