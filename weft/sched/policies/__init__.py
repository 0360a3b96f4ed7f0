"""Interception: whose KV goes while sequences wait for something other than the device.

`runs.py` says what a policy sees and answers; one file per policy. `waste.py` has the equations, `estimators.py` how
long waits still take, `registry.py` the names.
"""

from weft.sched.policies.registry import DEFAULT_ESTIMATOR, DEFAULT_POLICY, ESTIMATORS, POLICIES, make_policy
from weft.sched.policies.runs import NEVER, InterceptPolicy, Load

__all__ = [
    "DEFAULT_ESTIMATOR",
    "DEFAULT_POLICY",
    "ESTIMATORS",
    "NEVER",
    "POLICIES",
    "InterceptPolicy",
    "Load",
    "make_policy",
]
