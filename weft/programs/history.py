"""The runs that are under way or over, by tenant: what is asked for by id.

Owns how much is remembered, and for how long: the runs of each tenant that ended last, and of all that is over no more
than so many bytes of results, messages and logs (records stay). What it remembers of records it tells a journal, where
there is one, and is told again after a restart. It does not know how runs are carried out; hosts call it.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator

from weft.abi.errors import InvalidRequest, UnknownRun
from weft.programs.run.runs import Run, RunRecord
from weft.programs.run_records import RunRecords


class History:
    """Remembers every run that has not ended (the hosts bound their number), and some of those that have."""

    def __init__(
        self,
        *,
        max_ended: int = 200,
        max_bytes: int = 64 << 20,
        max_age_s: float = math.inf,
        journal: RunRecords | None = None,
        now: Callable[[], float] = time.time,
    ):
        """`max_age_s` counts from a run's end; `now` is in seconds since 1970, as records are."""
        self.endings: dict[str, int] = {}
        """How many runs of all tenants have ended so, forgotten ones included."""
        self._max_ended = max_ended
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._journal = journal
        self._now = now
        self._runs: dict[str, OrderedDict[str, Run]] = {}
        """By tenant, oldest first."""
        self._ended: dict[str, OrderedDict[str, Run]] = {}
        """Of those, the ones that are over, in the order in which that was heard of."""
        self._with_content: dict[str, deque[Run]] = {}
        """Ended, by tenant, oldest first."""
        self._bytes: dict[str, int] = {}
        """What is kept of those, by tenant."""

    def restore(self, records: Iterable[RunRecord]) -> None:
        """Runs that ended before this process began, oldest first."""
        restored = [Run.restored(record) for record in records]
        for run in restored:
            self._runs.setdefault(run.tenant, OrderedDict())[run.id] = run
        for run in sorted(restored, key=_end_of):
            self._ended.setdefault(run.tenant, OrderedDict())[run.id] = run
        for tenant in list(self._runs):
            self._forget_old(tenant)

    def add(self, run: Run) -> None:
        """Remember a run. Raises `ValueError` for an id that is there already."""
        runs = self._runs.setdefault(run.tenant, OrderedDict())
        if run.id in runs:
            raise ValueError(f"there is a run {run.id} already")
        runs[run.id] = run
        if self._journal is not None:
            self._journal.began(run.record())

    def ended(self, run: Run) -> None:
        """A run that was added is over; older ones may be forgotten for it."""
        tenant = run.tenant
        if tenant not in self._runs or run.id not in self._runs[tenant]:
            return
        self._ended.setdefault(tenant, OrderedDict())[run.id] = run
        self.endings[run.status] = self.endings.get(run.status, 0) + 1
        self._with_content.setdefault(tenant, deque()).append(run)
        self._bytes[tenant] = self._bytes.get(tenant, 0) + run.kept_bytes
        self._make_room()
        if self._journal is not None:
            self._journal.ended(run.record())
        self._forget_old(tenant)

    def find(self, tenant: str, run_id: str) -> Run:
        """Raises `UnknownRun`, for those of other tenants too."""
        self._forget_old(tenant)
        runs = self._runs.get(tenant)
        run = runs.get(run_id) if runs is not None else None
        if run is None:
            raise UnknownRun(f"There is no run {run_id[:80]!r}, or it was so long ago that it is forgotten.", "run")
        return run

    def runs(self, tenant: str) -> list[Run]:
        """Runs of a tenant that are remembered, newest first."""
        self._forget_old(tenant)
        return list(reversed(self._runs.get(tenant, {}).values()))

    def active(self) -> Iterator[Run]:
        """Of all tenants, those that have not ended."""
        for runs in list(self._runs.values()):
            yield from [run for run in runs.values() if not run.ended]

    def forget(self, tenant: str, run_id: str) -> None:
        """Forget a run that is over. Raises `UnknownRun`, and `InvalidRequest` for one that is not."""
        run = self.find(tenant, run_id)
        if not run.ended:
            raise InvalidRequest(f"The run {run_id} is {run.status}; cancel it first.", "run")
        self._forget(run)

    # ---- inside

    def _forget_old(self, tenant: str) -> None:
        """Those that are too many, or ended too long ago."""
        since_s = self._now() - self._max_age_s
        while ended := self._ended.get(tenant):
            first = next(iter(ended.values()))
            if len(ended) <= self._max_ended and _end_of(first) >= since_s:
                return
            self._forget(first)

    def _forget(self, run: Run) -> None:
        tenant = run.tenant
        if run in self._with_content.get(tenant, ()):
            self._with_content[tenant].remove(run)
            self._bytes[tenant] -= run.kept_bytes
            self._drop_if_empty(tenant)
        for runs in (self._ended, self._runs):
            if tenant in runs:
                runs[tenant].pop(run.id, None)
                if not runs[tenant]:
                    del runs[tenant]
        if self._journal is not None:
            self._journal.forgotten([run.id])

    def _make_room(self) -> None:
        """The tenant with most bytes loses its oldest results: no tenant's results make room for another's."""
        while sum(self._bytes.values()) > self._max_bytes:
            tenant = max(self._bytes, key=self._bytes.__getitem__)
            old = self._with_content[tenant].popleft()
            self._bytes[tenant] -= old.kept_bytes
            old.drop_content()
            self._drop_if_empty(tenant)

    def _drop_if_empty(self, tenant: str) -> None:
        if not self._with_content[tenant]:
            del self._with_content[tenant], self._bytes[tenant]


def _end_of(run: Run) -> float:
    return run.record().finished_s or 0.0
