"""Lengths of prompts and answers: a number of tokens, or a distribution. Pure."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

KINDS = "128, uniform:64:256, normal:512:100 or lognormal:512:400"


class Lengths(NamedTuple):
    """Numbers of tokens, at least 1 each."""

    kind: str
    """`fixed`, `uniform` (between `first` and `second`), or `normal` and `lognormal` (mean and standard deviation of
    the length itself)."""
    first: float
    second: float = 0.0

    def draw(self, source: random.Random) -> int:
        """Draw one length in tokens from `source`."""
        if self.kind == "uniform":
            value = source.uniform(self.first, self.second)
        elif self.kind == "normal":
            value = source.gauss(self.first, self.second)
        elif self.kind == "lognormal":
            variance = math.log1p((self.second / self.first) ** 2)
            value = source.lognormvariate(math.log(self.first) - variance / 2, math.sqrt(variance))
        else:
            value = self.first
        return max(1, round(value))

    def scaled(self, factor: float) -> Lengths:
        """Return the same distribution with all lengths times `factor`."""
        return Lengths(self.kind, self.first * factor, self.second * factor)

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.first:g}"
        return f"{self.kind}:{self.first:g}:{self.second:g}"


def fixed(length: float) -> Lengths:
    """Return the distribution that always gives `length`."""
    return Lengths("fixed", length)


def parse_lengths(text: str) -> Lengths:
    """`128`, `uniform:LOW:HIGH`, `normal:MEAN:DEVIATION` or `lognormal:MEAN:DEVIATION`. Raises `ValueError`."""
    kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    wanted = {"fixed": 1, "uniform": 2, "normal": 2, "lognormal": 2}.get(kind)
    if wanted is None or len(values) != wanted or not all(map(math.isfinite, values)):
        raise ValueError(f"{text!r} is not a length; write {KINDS}")
    if values[0] < 1 or min(values) < 0 or (kind == "uniform" and values[1] < values[0]):
        raise ValueError(
            f"{text!r} is not a length: lengths are at least 1, deviations at least 0, and LOW is at most HIGH"
        )
    return Lengths(kind, *values)
