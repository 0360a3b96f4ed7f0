"""`PrefixRetains`: prefixes that one engine keeps because a program of this process asked for it.

Owns how many pages the prefixes of each tenant hold, so that one tenant's programs leave the others theirs. The engine
has bounds of its own (`weft.cache.retention`). Used from one event loop.
"""

from __future__ import annotations

import math
from collections import Counter

from weft.abi.errors import EngineDead, LimitExceeded
from weft.core.ids import TOKEN_BYTES
from weft.core.wire import EndRetain, Retain
from weft.programs.engine_link import EngineLink
from weft.programs.operations import Report

NO_HANDLE = 0
"""Retains of prefixes belong to no sequence."""


class RetainedPrefix:
    """One retain. It ends with `end`, with the client, or when the engine needs the pages."""

    def __init__(self, retains: PrefixRetains, tenant: str, num_pages: int, report: Report):
        self._retains = retains
        self._tenant = tenant
        self._num_pages = num_pages
        self._report = report
        self._is_open = True

    async def num_tokens(self) -> int:
        """Wait for the engine's answer: how many tokens it keeps, in whole pages. Raises why it keeps none."""
        finished = await self._report
        return finished.count * self._retains.page_size

    def end(self) -> None:
        """End the retain; what it kept is as any other KV. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._retains.end(self._tenant, self._num_pages, self._report.op)


class PrefixRetains:
    """The retains of prefixes on one engine."""

    def __init__(self, link: EngineLink):
        self._link = link
        self._pages: Counter[str] = Counter()
        """By tenant."""

    @property
    def page_size(self) -> int:
        """Tokens of a page. Raises `EngineDead` before the engine has answered."""
        return self._link.engine.info.page_size

    def num_pages(self, tenant: str) -> int:
        """Pages that a tenant has asked to be kept; what prefixes share counts for each."""
        return self._pages[tenant]

    def retain(self, tenant: str, namespace: str, tokens: bytes, part: float) -> RetainedPrefix:
        """Pin what the engine has of these packed tokens, whole pages. Raises `EngineDead`, and `LimitExceeded` where
        the tenant's prefixes would hold more than `part` of the engine's pages."""
        if not self._link.engine.ready:
            raise EngineDead("the engine is starting or restarting; try again in a moment")
        most = int(self._link.engine.info.num_device_pages * part)
        num_pages = len(tokens) // TOKEN_BYTES // self.page_size
        if self._pages[tenant] + num_pages > most:
            raise LimitExceeded(f"{most} pages may be pinned, and {self._pages[tenant]} are", "pinned_pages")
        report = Report(self._link.number(), NO_HANDLE)
        self._link.add_operation(report)
        self._link.post(Retain(op=report.op, tokens=tokens, namespace=namespace, weight=math.inf, ttl_s=math.inf))
        self._pages[tenant] += num_pages
        return RetainedPrefix(self, tenant, num_pages, report)

    def end(self, tenant: str, num_pages: int, retain: int) -> None:
        """End the retain with this operation number; in its order behind it, so it need not have been answered."""
        self._pages[tenant] -= num_pages
        if not self._pages[tenant]:
            del self._pages[tenant]
        self._link.post(EndRetain(op=self._link.number(), retain=retain))
