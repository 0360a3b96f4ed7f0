"""What interception policies see, and what they answer.

Owns the frozen snapshot `Load` and the protocol `InterceptPolicy`. `PageRuns`, the other snapshot, and the order in
which runs go are the prefix index's. Knows no sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

import numpy as np

from weft.cache.runs import PageRuns
from weft.core.cost.model import CostModel
from weft.core.step import F64, Bool

NEVER = np.inf
"""Rank of a run that must not be given up."""
START = Literal["keep", "discard", "swap", "swap_in_budget"]


class Load(NamedTuple):
    """The system around the runs."""

    now: float
    running_tokens: int = 0
    """KV tokens of the running sequences: C_other of the paper."""
    running_rows: int = 0
    """Query tokens that a step has for the running sequences."""
    saturation_tokens: int | None = None
    """S: query tokens per step from which more cost in proportion; None: not known, so nothing is chunked."""
    page_size: int = 16
    host_pages: int = 0
    """Size of the host tier; 0: there is none."""
    costs: CostModel | None = None
    """None: nothing was profiled. Then recomputing counts in proportion to its tokens, which is enough for an order."""
    swap_hidden: float = 0.0
    """Part of the time of a transfer in which forwards go on: 0 where steps stall for all of it, 1 for none."""
    queued_s: Mapping[str, float] = {}
    """By tenant: seconds for which its returns wait for the device, of late. Only then is their KV needed."""


class InterceptPolicy(Protocol):
    """Decides whose KV goes, over everything that is not running. Answers depend on the arguments and on earlier
    `observe` alone."""

    @property
    def name(self) -> str:
        """The value of `intercept_policy` that selects it."""
        ...

    @property
    def keeps_rank(self) -> bool:
        """Whether a return keeps the place of its sequence; False: it queues last."""
        ...

    @property
    def uses_index(self) -> bool:
        """Whether a return finds the KV that is still there; False: what is discarded at the start is gone at once."""
        ...

    @property
    def acts_at_start(self) -> bool:
        """Whether `at_start` is not "keep" for some kind."""
        ...

    @property
    def preserves(self) -> bool:
        """Whether newcomers wait for what it `spares` at all times; False: only while much is computed again."""
        ...

    def at_start(self, kind: str) -> START:
        """What happens at the moment of interception. "keep" is lazy: pages are taken when others need them.
        "swap_in_budget" moves as many pages to the host as the step may, and discards the rest."""
        ...

    def rank(self, runs: PageRuns, load: Load, *, may_move: bool = True) -> F64:
        """[n] the run with the smallest value is given up first; `NEVER`: it stays. Without `may_move` runs would be
        forgotten that are worth a copy on the host: no value is smaller then."""
        ...

    def moves(self, runs: PageRuns, load: Load) -> Bool:
        """[n] whether a run that is given up is worth a copy on the host, where it has none."""
        ...

    def kept(self, runs: PageRuns, load: Load) -> Bool:
        """[n] whether a run is kept from tenants that exceed their fair share; `rank` has all others before it."""
        ...

    def spares(self, runs: PageRuns, load: Load) -> Bool:
        """[n] whether a newcomer waits rather than have the run given up, as long as other sequences run."""
        ...

    def observe(self, tenant: str, kind: str, wait_s: float, *, ended: bool = True, since_s: float = math.nan) -> None:
        """A wait ended after `wait_s` seconds; of kinds "prefix" and "unused", a run was used again after so long.
        Without `ended`, its run was given up after so long, before that."""
        ...


def keep_pins(rank: F64, runs: PageRuns) -> F64:
    """[n] `rank`, and `NEVER` for the runs that are pinned."""
    return np.where(runs.weight == np.inf, NEVER, rank)
