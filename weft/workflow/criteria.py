"""What a value of a session is asked for: the criteria of `get` (Parrot, section 4.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from weft.core.objectives import Objective

_STRICTNESS: Mapping[Objective, int] = {"batch": -1, "throughput": 0, "deadline": 1, "ttft": 2, "latency": 2}


class Criterion(NamedTuple):
    """A criterion; use `LATENCY`, `TTFT`, `THROUGHPUT` and `deadline`."""

    name: Objective
    seconds: float | None = None
    """Of a deadline, from when the value is asked for."""


LATENCY = Criterion("latency")
"""The value as early as possible."""
TTFT = Criterion("ttft")
"""The first token of the value as early as possible."""
THROUGHPUT = Criterion("throughput")
"""This value and others: all of them early, none by itself."""


def is_stricter(one: Criterion, other: Criterion) -> bool:
    """Whether a value that is wanted for both is scheduled for the first."""
    if _STRICTNESS[one.name] != _STRICTNESS[other.name]:
        return _STRICTNESS[one.name] > _STRICTNESS[other.name]
    if one.seconds is not None and other.seconds is not None:
        return one.seconds < other.seconds
    return (one.name, other.name) == ("latency", "ttft")


def deadline(seconds: float) -> Criterion:
    """The value within so many seconds from when it is asked for. Raises `ValueError` for no such time."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"a deadline is more than 0 seconds away, not {seconds}")
    return Criterion("deadline", seconds)


def checked_criterion(given: object) -> Criterion | None:
    """A criterion of a user's. Raises `TypeError` for what is none."""
    if given is None or isinstance(given, Criterion):
        return given
    raise TypeError(
        f"a criterion is weft.LATENCY, weft.TTFT, weft.THROUGHPUT or weft.deadline(seconds), not {given!r}; "
        "how long to wait at most is timeout_s="
    )
