"""Which interception policy a simulated scheduler follows: the one place that turns its name into a scheduler."""

from __future__ import annotations

from weft.abi.errors import ConfigError
from weft.cache.manager import KVCache
from weft.sched.scheduler import Scheduler, SchedulerConfig

POLICIES = ("lru",)
"""Names of what a scheduler can follow. `lru`: sequences that wait give way first, the longest idle one before others,
and their cached prefixes go in order of their last use."""


def check_policy(policy: str) -> None:
    """Raise `ConfigError` for a policy that does not exist."""
    if policy not in POLICIES:
        raise ConfigError(f"policy {policy!r} is not available in this version: there are {', '.join(POLICIES)}")


def make_scheduler(policy: str, config: SchedulerConfig, cache: KVCache) -> Scheduler:
    """A scheduler that follows a policy. Raises `ConfigError` for one that does not exist."""
    check_policy(policy)
    return Scheduler(config, cache)
