"""Which interception policy a simulated scheduler follows: the one place that turns its name into a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weft.abi.errors import ConfigError, InvalidRequest
from weft.cache.manager import KVCache
from weft.core.cost.model import CostModel
from weft.sched.policies import DEFAULT_ESTIMATOR, InterceptPolicy, make_policy
from weft.sched.policies.heuristic import BudgetedHeuristicPolicy
from weft.sched.policies.swap import BudgetedSwapPolicy
from weft.sched.scheduler import Scheduler, SchedulerConfig

TECHNIQUES: Mapping[str, Callable[[], InterceptPolicy]] = {
    "budgeted_swap": BudgetedSwapPolicy,
    "budgeted_heuristic": BudgetedHeuristicPolicy,
}
"""Policies for simulations alone: steps on the way from `improved_discard` to `min_waste` (APIServe, section 5.2)."""


def check_policy(policy: str, estimator: str = DEFAULT_ESTIMATOR) -> None:
    """Raise `ConfigError` for a policy or an estimator that does not exist."""
    _make(policy, estimator)


def _make(policy: str, estimator: str) -> InterceptPolicy:
    if policy in TECHNIQUES:
        return TECHNIQUES[policy]()
    try:
        return make_policy(policy, estimator)
    except InvalidRequest as error:
        raise ConfigError(error.message) from error


def make_scheduler(
    policy: str,
    config: SchedulerConfig,
    cache: KVCache,
    costs: CostModel | None = None,
    estimator: str = DEFAULT_ESTIMATOR,
) -> Scheduler:
    """A scheduler that follows a policy. Raises `ConfigError` for one that does not exist."""
    return Scheduler(config, cache, policy=_make(policy, estimator), costs=costs)
