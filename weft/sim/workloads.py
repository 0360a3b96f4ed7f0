"""Interceptions: requests that call tools, services or people, as APIServe (InferCept) describes them in table 1.

Its table gives time in a call, calls of a request and context length at a call as (mean, variance); the second figure
only fits the text as a standard deviation and is read so. What calls return and what is generated between them is in
figures only, so they are parameters here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from weft.sim.scripts import SessionScript, TurnScript


class MeanSpread(NamedTuple):
    """Of a normal distribution, cut off where values have no meaning."""

    mean: float
    deviation: float


class InterceptionKind(NamedTuple):
    """A row of the table."""

    exec_s: MeanSpread
    """Seconds of a call."""
    calls: MeanSpread
    """Calls of a request."""
    context_tokens: MeanSpread
    """Tokens of the context at a call."""
    returned_tokens: float
    """Median of what a call returns; assumed."""


INTERCEPTIONS: Mapping[str, InterceptionKind] = {
    "math": InterceptionKind(MeanSpread(9e-05, 6e-05), MeanSpread(3.75, 1.3), MeanSpread(1422, 738), 30),
    "qa": InterceptionKind(MeanSpread(0.69, 0.17), MeanSpread(2.52, 1.73), MeanSpread(1846, 428), 150),
    "ve": InterceptionKind(MeanSpread(0.09, 0.014), MeanSpread(28.18, 15.2), MeanSpread(2185, 115), 30),
    "chatbot": InterceptionKind(MeanSpread(28.6, 15.6), MeanSpread(4.45, 1.96), MeanSpread(753, 703), 150),
    "image": InterceptionKind(MeanSpread(20.03, 7.8), MeanSpread(6.91, 3.93), MeanSpread(1247, 792), 30),
    "tts": InterceptionKind(MeanSpread(17.24, 7.6), MeanSpread(6.91, 3.93), MeanSpread(1251, 792), 30),
}
"""By name."""
LAST_KIND = "chatbot"
"""An answer that calls nothing: a person may reply to it."""


class MixtureParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Of a mixture of interceptions, its kinds drawn uniformly."""

    rate: float
    """Requests per second; arrivals are a Poisson process. Infinity: all at once."""
    minutes: float = 30.0
    """For which requests arrive, unless `requests` is given."""
    requests: int | None = None
    """How many arrive."""
    kinds: Mapping[str, InterceptionKind] = msgspec.field(default_factory=lambda: INTERCEPTIONS)
    generated_tokens: tuple[int, int] = (30, 150)
    """Generated before each call and after the last one: uniform, both ends included."""
    returned_factor: float = 1.0
    """On the medians of what calls return."""
    returned_deviation: float = 0.6
    """Of the logarithm of what calls return; assumed."""
    min_prompt_tokens: int = 16


def mixture(parameters: MixtureParameters, seed: int) -> list[SessionScript]:
    """The requests that arrive, in order. The same parameters and seed give the same ones."""
    if parameters.requests is None and math.isinf(parameters.rate):
        raise ValueError("requests that arrive at once need a number (`requests`)")
    source = np.random.default_rng([seed, 2])
    names = list(parameters.kinds)
    scripts: list[SessionScript] = []
    arrive_s = 0.0
    while parameters.requests is None or len(scripts) < parameters.requests:
        arrive_s += source.exponential(1.0 / parameters.rate)
        if parameters.requests is None and arrive_s >= parameters.minutes * 60:
            break
        name = names[source.integers(len(names))]
        turns = _turns(parameters, name, source)
        scripts.append(SessionScript(len(scripts) + 1, name, arrive_s, turns, last_kind=LAST_KIND))
    return scripts


def _turns(parameters: MixtureParameters, name: str, source: np.random.Generator) -> tuple[TurnScript, ...]:
    kind = parameters.kinds[name]
    calls = max(1, round(source.normal(*kind.calls)))
    low, high = parameters.generated_tokens
    generated = source.integers(low, high + 1, calls + 1)
    median = kind.returned_tokens * parameters.returned_factor
    returned = np.maximum(1, source.lognormal(np.log(median), parameters.returned_deviation, calls).round()).astype(int)
    waits = np.maximum(0.0, source.normal(*kind.exec_s, calls))
    # The drawn length is the mean over the calls: what is generated and returned on the way does not add to it.
    grown = np.cumsum(generated[:-1]) + np.concatenate(([0], np.cumsum(returned[:-1])))
    context = max(0.0, source.normal(*kind.context_tokens))
    prompt = max(parameters.min_prompt_tokens, round(context - float(grown.mean())))
    added = [prompt, *returned.tolist()]
    return tuple(
        TurnScript(new, output, name if index < calls else "", float(waits[index]) if index < calls else 0.0)
        for index, (new, output) in enumerate(zip(added, generated.tolist(), strict=True))
    )
