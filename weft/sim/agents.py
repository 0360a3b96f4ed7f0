"""The coding-agent day: sessions of agents that work on code.

The parameters are public figures of coding agents, as far as there are any; what there is none for is marked as
assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from weft.sim.scripts import SessionScript, TurnScript

MAIN, SUBAGENT = "agent", "subagent"
LAST_KIND = "person"
"""An answer that calls nothing, of a subagent too: a server takes both for turns that a person may reply to."""


class AgentWait(NamedTuple):
    """A kind of wait: log-normal."""

    median_s: float
    deviation: float
    """Of the logarithm."""
    share: float
    """Of all waits."""


AGENT_WAITS: Mapping[str, AgentWait] = {
    "read": AgentWait(0.05, 0.7, 0.35),
    "edit": AgentWait(0.1, 0.7, 0.15),
    "grep": AgentWait(0.2, 0.8, 0.15),
    "shell": AgentWait(1.0, 1.3, 0.20),
    "tests": AgentWait(20.0, 1.0, 0.10),
    "person": AgentWait(120.0, 1.2, 0.05),
}
"""By name. Subagents wait for tools alone."""


class AgentParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals, turns, lengths and waits of the sessions of a coding-agent day."""

    sessions: int = 400
    rate: float = 0.02
    """Sessions per second; arrivals are a Poisson process. Infinity: all at once."""
    turns_median: float = 43.0
    turns_deviation: float = 0.5
    """Of the logarithm; assumed."""
    first_tokens: int = 20_000
    """The context before the first answer."""
    growth_median: float = 2_500.0
    """Tokens by which a turn and what its wait returns lengthen the context: log-normal."""
    growth_deviation: float = 1.0
    max_context: int = 200_000
    output_tokens: tuple[int, int] = (50, 800)
    """Uniform, both ends included."""
    min_returned_tokens: int = 16
    waits: Mapping[str, AgentWait] = msgspec.field(default_factory=lambda: AGENT_WAITS)
    subagent_share: float = 0.44
    """Of the sessions, those that use subagents."""
    subagents_per_session: tuple[int, int] = (1, 4)
    """Uniform, at random turns; assumed."""
    subagent_shared_tokens: int = 12_000
    """The prompt that all subagents of the day begin with; assumed."""
    subagent_task_tokens: int = 1_000
    """Assumed."""
    subagent_turns_median: float = 8.0
    """Assumed."""


def agent_day(parameters: AgentParameters, seed: int) -> list[SessionScript]:
    """The sessions in order of arrival. The same parameters and seed give the same ones."""
    return list(_Day(parameters, seed).sessions())


class _Day:
    def __init__(self, parameters: AgentParameters, seed: int):
        self._p = parameters
        self._source = np.random.default_rng([seed, 3])
        self._number = 0
        self._all = _Mix(parameters.waits)
        self._tools = _Mix({name: wait for name, wait in parameters.waits.items() if name != "person"})

    def sessions(self) -> Iterator[SessionScript]:
        arrive_s = 0.0
        for _ in range(self._p.sessions):
            arrive_s += self._source.exponential(1.0 / self._p.rate)
            yield self._session(arrive_s)

    def _session(self, arrive_s: float) -> SessionScript:
        p, source = self._p, self._source
        self._number += 1
        number = self._number
        turns = self._turns(p.first_tokens, p.turns_median, self._all)
        if len(turns) > 1 and source.random() < p.subagent_share:
            low, high = p.subagents_per_session
            for at in source.integers(len(turns) - 1, size=source.integers(low, high + 1)).tolist():
                turns[at] = turns[at]._replace(wait_kind=SUBAGENT, subagents=(*turns[at].subagents, self._subagent()))
        return SessionScript(number, MAIN, arrive_s, tuple(turns), last_kind=LAST_KIND)

    def _subagent(self) -> SessionScript:
        p = self._p
        self._number += 1
        first = p.subagent_shared_tokens + p.subagent_task_tokens
        number = self._number
        turns = self._turns(first, p.subagent_turns_median, self._tools)
        return SessionScript(number, SUBAGENT, 0.0, tuple(turns), p.subagent_shared_tokens, LAST_KIND)

    def _turns(self, first: int, median: float, waits: _Mix) -> list[TurnScript]:
        """Turns whose context stays within the limit: late growth is cut, the number of turns is not."""
        p, source = self._p, self._source
        low, high = p.output_tokens
        room = p.max_context - first
        most = room // (high + p.min_returned_tokens)
        if most < 1:
            raise ValueError(f"max_context {p.max_context} leaves no room for a turn behind {first} tokens")
        count = int(min(max(1, round(source.lognormal(math.log(median), p.turns_deviation))), most))
        outputs = source.integers(low, high + 1, count)
        growths = source.lognormal(math.log(p.growth_median), p.growth_deviation, count)
        reserved = int(outputs.sum()) + p.min_returned_tokens * (count - 1)
        spare = room - reserved
        turns, added = [], first
        for index, output in enumerate(outputs.tolist()):
            if index + 1 == count:
                turns.append(TurnScript(added, output))
                break
            kind, wait_s = waits.draw(source)
            turns.append(TurnScript(added, output, kind, wait_s))
            more = min(max(0, round(growths[index]) - output - p.min_returned_tokens), spare)
            spare -= more
            added = p.min_returned_tokens + more
        return turns


class _Mix:
    """Kinds of waits by their shares."""

    def __init__(self, waits: Mapping[str, AgentWait]):
        self._names = list(waits)
        self._waits = waits
        shares = np.array([wait.share for wait in waits.values()])
        self._bounds = np.cumsum(shares / shares.sum())

    def draw(self, source: np.random.Generator) -> tuple[str, float]:
        """A kind, and the seconds of one wait."""
        name = self._names[min(int(np.searchsorted(self._bounds, source.random(), "right")), len(self._names) - 1)]
        wait = self._waits[name]
        return name, float(source.lognormal(math.log(wait.median_s), wait.deviation))


def coarsened(scripts: Sequence[SessionScript], stride: int) -> list[SessionScript]:
    """The same sessions with one generated token for `stride` of them; the others are added with what the wait returns.

    Contexts and waits are the same, and so is the time of a turn on a device whose steps take `stride` times as long.
    A simulation takes that many steps less.
    """
    return [_coarsened(script, stride) for script in scripts]


def _coarsened(script: SessionScript, stride: int) -> SessionScript:
    turns, left = [], 0
    for turn in script.turns:
        output = -(-turn.output_tokens // stride)
        children = tuple(_coarsened(child, stride) for child in turn.subagents)
        turns.append(turn._replace(new_tokens=turn.new_tokens + left, output_tokens=output, subagents=children))
        left = turn.output_tokens - output
    return script._replace(turns=tuple(turns))
