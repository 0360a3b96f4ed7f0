"""`WaitLog`: what became of waits, by kind: where the KV was at the return, and how long it was expected to take. And
when waits that go on are expected to end.

Tells the policy of ended waits when it is asked for an order, since programs that look at every token wait thousands of
times a second. Counts have the labels of `weft.core.waits`, of which there are few.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from weft.cache.runs import PREFIX, PageRuns
from weft.core.waits import ExpectedBy, WaitKind, label_of, without_cohort
from weft.metrics import Histogram
from weft.sched.policies.estimators import WaitEstimator, elapsed_s
from weft.sched.policies.runs import InterceptPolicy

LAST_QUEUED = 0.05
"""Weight of a tenant's last return in the average of the times for which its returns wait for the device."""
MAX_TENANTS = 1024
"""Whose averages are kept: those with the last returns."""
MAX_PAST = 4096
"""Waits that are kept for the policy; older ones are dropped."""
_OF_WEFT: frozenset[str] = frozenset(WaitKind)
WAIT_RATIO_BUCKETS = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.25, 2.0, 3.0, 10.0, 30.0, 100.0)

Found = Literal["kept", "host", "recomputed"]
"""Where the KV of a sequence was when its wait ended: all on the device; all there, but a part of it on the host; or a
part of it was given up."""


class PastWait(NamedTuple):
    """A wait that has ended, or whose run was given up."""

    tenant: str
    kind: str
    """With its cohort where it has one."""
    wait_s: float
    announced_s: float
    """How long it was announced to take; nan: it was not."""
    has_ended: bool = True
    since_s: float = math.nan
    """When the wait of a client began; nan: that of an open sequence, or a run that nothing waits for."""


class OngoingWait(NamedTuple):
    """A wait that goes on."""

    tenant: str
    kind: str
    """As it is estimated: with its cohort where that has enough waits."""
    since_s: float
    expected_s: float | None
    """When it is announced to end."""


class Expected(NamedTuple):
    """The expected end of a wait."""

    in_s: float
    """Seconds from now; not negative."""
    by: ExpectedBy


@runtime_checkable
class Predicting(Protocol):
    """A policy that estimates waits."""

    estimator: WaitEstimator


class WaitLog:
    """Waits that ended, and counts of them."""

    def __init__(self) -> None:
        self.past: deque[PastWait] = deque(maxlen=MAX_PAST)
        """Those that the policy does not know of yet."""
        self.returns: Counter[tuple[str, str]] = Counter()
        """(label of the kind, `Found`) -> waits that ended so."""
        self.ratios: dict[str, Histogram] = {}
        """By label: how long waits took, divided by how long they were expected to take when they began."""
        self.queued_s: OrderedDict[str, float] = OrderedDict()
        """By tenant: average of the seconds for which its last returns waited for the device."""

    def queued(self, tenant: str, queued_s: float) -> None:
        """A return has waited for the device for so many seconds."""
        before_s = self.queued_s.pop(tenant, 0.0)
        self.queued_s[tenant] = before_s + LAST_QUEUED * (queued_s - before_s)
        if len(self.queued_s) > MAX_TENANTS:
            self.queued_s.popitem(last=False)

    def returned(self, kind: str, found: Found) -> None:
        """Count a wait that has ended."""
        self.returns[label_of(kind), found] += 1

    @staticmethod
    def group(policy: InterceptPolicy, tenant: str, cohort: str) -> str:
        """From which waits a policy estimates one of a kind and cohort (`weft.core.waits.of_cohort`)."""
        return policy.estimator.group(tenant, cohort) if isinstance(policy, Predicting) else ""

    def tell(self, policy: InterceptPolicy) -> None:
        """Tell the policy of the waits that have ended, after comparing them with what it would have expected."""
        if not self.past:
            return
        past = list(self.past)
        self.past.clear()
        if isinstance(policy, Predicting):
            kinds = [policy.estimator.group(wait.tenant, wait.kind) for wait in past]
            starts = [
                OngoingWait(wait.tenant, kind, 0.0, wait.announced_s) for wait, kind in zip(past, kinds, strict=True)
            ]
            predicted = policy.estimator.remaining_s(_as_runs(starts), 0.0)
            for wait, expected_s in zip(past, predicted.tolist(), strict=True):
                if expected_s > 0 and wait.has_ended:
                    label = label_of(wait.kind)
                    if label not in self.ratios:
                        self.ratios[label] = Histogram(WAIT_RATIO_BUCKETS)
                    self.ratios[label].observe(wait.wait_s / expected_s)
        for wait in past:
            policy.observe(wait.tenant, wait.kind, wait.wait_s, ended=wait.has_ended, since_s=wait.since_s)

    def expected(self, policy: InterceptPolicy, waits: list[OngoingWait], now: float) -> list[Expected | None]:
        """When each wait is expected to end, as the policy estimates it after being told of the waits that have ended.
        None: its end was not announced, and the policy estimates nothing. An announcement for later than now counts
        under every policy.

        Tenants are told of this. What was learned from other tenants would tell how long a tool takes them: it is left
        out, except for kinds of Weft itself, which have no name of a tool.
        """
        self.tell(policy)
        found = [
            None if wait.expected_s is None else Expected(max(0.0, wait.expected_s - now), "announced")
            for wait in waits
        ]
        if not waits or not isinstance(policy, Predicting):
            return found
        runs = _as_runs(waits)
        estimator = policy.estimator
        estimates = map(Expected, estimator.remaining_s(runs, now).tolist(), estimator.expected_by(runs, now))
        elapsed = (Expected(waited_s, "elapsed") for waited_s in elapsed_s(runs, now).tolist())
        may_be_told = [
            is_own or without_cohort(wait.kind) in _OF_WEFT
            for is_own, wait in zip(estimator.is_own(runs, now).tolist(), waits, strict=True)
        ]
        told = [
            estimate if may or estimate.by != "learned" else other
            for may, estimate, other in zip(may_be_told, estimates, elapsed, strict=True)
        ]
        return [
            announced if announced is not None and announced.in_s > 0 else estimate
            for announced, estimate in zip(found, told, strict=True)
        ]


def _as_runs(waits: list[OngoingWait]) -> PageRuns:
    """The waits as a snapshot for an estimator, which reads no sizes."""
    kinds, tenants = {PREFIX: 0}, dict[str, int]()
    for wait in waits:
        kinds.setdefault(wait.kind, len(kinds))
        tenants.setdefault(wait.tenant, len(tenants))
    zeros, ones = np.zeros(len(waits)), np.ones(len(waits), np.int64)
    return PageRuns(
        since_s=np.array([wait.since_s for wait in waits]),
        expected_s=np.array([math.nan if wait.expected_s is None else wait.expected_s for wait in waits]),
        kind=np.array([kinds[wait.kind] for wait in waits], np.int64),
        num_tokens=ones,
        num_pages=ones,
        num_behind=np.zeros(len(waits), np.int64),
        has_copy=np.zeros(len(waits), np.bool_),
        over_share=np.zeros(len(waits), np.bool_),
        weight=zeros,
        order=np.arange(len(waits)),
        tenant=np.array([tenants[wait.tenant] for wait in waits], np.int64),
        explicit=np.zeros(len(waits), np.bool_),
        kinds=tuple(kinds),
        tenants=tuple(tenants),
    )
