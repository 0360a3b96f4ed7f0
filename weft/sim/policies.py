"""Which interception policy a simulated scheduler follows: the one place that turns its name into a scheduler."""

from __future__ import annotations

from weft.abi.errors import ConfigError, InvalidRequest
from weft.cache.manager import KVCache
from weft.core.cost.model import Costs
from weft.sched.policies import DEFAULT_ESTIMATOR, make_policy
from weft.sched.scheduler import Scheduler, SchedulerConfig


def check_policy(policy: str, estimator: str = DEFAULT_ESTIMATOR) -> None:
    """Raise `ConfigError` for a policy or an estimator that does not exist."""
    try:
        make_policy(policy, estimator)
    except InvalidRequest as error:
        raise ConfigError(error.message) from error


def make_scheduler(
    policy: str,
    config: SchedulerConfig,
    cache: KVCache,
    costs: Costs | None = None,
    estimator: str = DEFAULT_ESTIMATOR,
) -> Scheduler:
    """A scheduler that follows a policy. Raises `ConfigError` for one that does not exist."""
    check_policy(policy, estimator)
    return Scheduler(config, cache, policy=make_policy(policy, estimator), costs=costs)
