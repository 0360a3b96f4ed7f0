"""Interception policies and estimators by the names under which they are configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from weft.abi.errors import InvalidRequest
from weft.sched.policies.discard import DiscardPolicy
from weft.sched.policies.estimators import ElapsedEstimator, LearnedEstimator, OracleEstimator, WaitEstimator
from weft.sched.policies.heuristic import HeuristicPolicy
from weft.sched.policies.improved_discard import ImprovedDiscardPolicy
from weft.sched.policies.lru import LruPolicy
from weft.sched.policies.min_waste import MinWastePolicy
from weft.sched.policies.preserve import PreservePolicy
from weft.sched.policies.runs import InterceptPolicy
from weft.sched.policies.swap import SwapPolicy

ESTIMATORS: dict[str, Callable[[], WaitEstimator]] = {
    "elapsed": ElapsedEstimator,
    "learned": LearnedEstimator,
    "oracle": OracleEstimator,
}
POLICIES: dict[str, Callable[[WaitEstimator], InterceptPolicy]] = {
    "lru": lambda estimator: LruPolicy(),
    "discard": lambda estimator: DiscardPolicy(),
    "improved_discard": lambda estimator: ImprovedDiscardPolicy(),
    "preserve": lambda estimator: PreservePolicy(),
    "swap": lambda estimator: SwapPolicy(),
    "heuristic": lambda estimator: HeuristicPolicy(),
    "min_waste": MinWastePolicy,
}
DEFAULT_POLICY = "min_waste"
DEFAULT_ESTIMATOR = "learned"

Made = TypeVar("Made")


def make_policy(name: str = DEFAULT_POLICY, estimator: str = DEFAULT_ESTIMATOR) -> InterceptPolicy:
    """A new policy with an estimator of its own; `min_waste` alone asks it. Raises `InvalidRequest` for a name that
    does not exist, with those that do."""
    make = _find(POLICIES, name, "intercept policy", "policy")
    return make(_find(ESTIMATORS, estimator, "estimator", "estimator")())


def _find(table: Mapping[str, Made], name: str, what: str, param: str) -> Made:
    if name not in table:
        raise InvalidRequest(f"there is no {what} {name!r}; there are {', '.join(table)}", param)
    return table[name]
