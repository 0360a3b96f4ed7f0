"""The runs that are under way or over, by tenant: what is asked for by id.

Owns how much is remembered: the last runs of each tenant, and of all that is over no more than so many bytes of
results, messages and logs (records stay). It does not know how runs are carried out; hosts call it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from weft.core.errors import InvalidRequest
from weft.programs.errors import UnknownRun
from weft.programs.runs import Run


class History:
    """Runs that have not ended are always remembered; their number is bounded by those who launch them."""

    def __init__(self, *, max_ended: int = 200, max_bytes: int = 64 << 20):
        self.endings: dict[str, int] = {}
        """How many runs of all tenants have ended so, forgotten ones included."""
        self._max_ended = max_ended
        self._max_bytes = max_bytes
        self._runs: dict[str, OrderedDict[str, Run]] = {}
        """By tenant, oldest first."""
        self._num_ended: dict[str, int] = {}
        self._with_content: dict[str, deque[Run]] = {}
        """Ended, by tenant, oldest first."""
        self._bytes: dict[str, int] = {}
        """What is kept of those, by tenant."""

    def add(self, run: Run) -> None:
        """Remember a run. Raises `ValueError` for an id that is there already."""
        runs = self._runs.setdefault(run.tenant, OrderedDict())
        if run.id in runs:
            raise ValueError(f"there is a run {run.id} already")
        runs[run.id] = run

    def ended(self, run: Run) -> None:
        """A run that was added is over; older ones may be forgotten for it."""
        tenant = run.tenant
        if tenant not in self._runs or run.id not in self._runs[tenant]:
            return
        self._num_ended[tenant] = self._num_ended.get(tenant, 0) + 1
        self.endings[run.status] = self.endings.get(run.status, 0) + 1
        self._with_content.setdefault(tenant, deque()).append(run)
        self._bytes[tenant] = self._bytes.get(tenant, 0) + run.kept_bytes
        self._make_room()
        if self._num_ended[tenant] > self._max_ended:
            oldest = next(other for other in self._runs[tenant].values() if other.ended)
            self.forget(tenant, oldest.id)

    def find(self, tenant: str, run_id: str) -> Run:
        """Raises `UnknownRun`, for those of other tenants too."""
        runs = self._runs.get(tenant)
        run = runs.get(run_id) if runs is not None else None
        if run is None:
            raise UnknownRun(f"There is no run {run_id[:80]!r}, or it was so long ago that it is forgotten.", "run")
        return run

    def runs(self, tenant: str) -> list[Run]:
        """Newest first."""
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
        del self._runs[tenant][run_id]
        if run in self._with_content.get(tenant, ()):
            self._with_content[tenant].remove(run)
            self._bytes[tenant] -= run.kept_bytes
            self._drop_if_empty(tenant)
        self._num_ended[tenant] -= 1
        if not self._runs[tenant]:
            del self._runs[tenant], self._num_ended[tenant]

    # ---- inside

    def _make_room(self) -> None:
        """Whoever has most kept loses the oldest of it: nobody's results make place for those of others."""
        while sum(self._bytes.values()) > self._max_bytes:
            tenant = max(self._bytes, key=self._bytes.__getitem__)
            old = self._with_content[tenant].popleft()
            self._bytes[tenant] -= old.kept_bytes
            old.drop_content()
            self._drop_if_empty(tenant)

    def _drop_if_empty(self, tenant: str) -> None:
        if not self._with_content[tenant]:
            del self._with_content[tenant], self._bytes[tenant]
