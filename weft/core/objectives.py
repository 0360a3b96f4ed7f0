"""Objectives: which time of a sequence matters to whom asked for it (Parrot, section 5.2).

One table of names and meanings. Requests, engines and their documentation take them from here.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from weft.abi.errors import InvalidRequest

Objective = Literal["latency", "ttft", "throughput", "deadline", "batch"]

OBJECTIVES = get_args(Objective)
BACKGROUND: frozenset[Objective] = frozenset({"throughput", "deadline", "batch"})
"""Those that give way to the others, `deadline` as long as it has slack."""
LEAST_DEADLINE_S = 1e-3
"""What is said of a deadline that has passed."""
MAX_DEADLINE_S = 30 * 86400.0


def check_objective(objective: Objective, deadline_s: float | None) -> None:
    """Raise `InvalidRequest`, naming the field, for an objective that does not exist, and unless there is a deadline
    in seconds where the objective is one, and nowhere else."""
    if objective not in OBJECTIVES:
        raise InvalidRequest(f"objective must be one of {', '.join(OBJECTIVES)}, got {objective!r}", "objective")
    if deadline_s is None:
        if objective == "deadline":
            raise InvalidRequest("objective deadline needs deadline_s: in how many seconds to be done", "deadline_s")
    elif objective != "deadline":
        raise InvalidRequest("deadline_s has an effect with objective deadline alone", "deadline_s")
    elif not (math.isfinite(deadline_s) and 0 < deadline_s <= MAX_DEADLINE_S):
        raise InvalidRequest(f"deadline_s must be in (0, {MAX_DEADLINE_S:g}], got {deadline_s}", "deadline_s")
