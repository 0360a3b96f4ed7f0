"""Session scripts: what sessions will do, fixed before a simulation begins and independent of what it decides.

A *session* is a conversation of a model with tools or people: turns, each of which adds tokens to the context,
generates, and then waits for something. `workloads.py` and `agents.py` draw sessions; `sessions.py` plays them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from weft.core.objectives import Objective

TOKEN_BYTES = 4
TOKEN_S = 0.01
"""Seconds of an answer's token, where the time of a turn has to be known before it is played."""
WARM_UP_S = 10.0
"""In which a window's sessions begin that were under way before it."""
FIRST_TOKEN = 2
"""Smaller ids are for what the simulated device generates."""


class TurnScript(NamedTuple):
    """One generation, and the wait after it."""

    new_tokens: int
    """Added to the context before it: the prompt, later what the wait returned."""
    output_tokens: int
    wait_kind: str = ""
    """What is waited for then; empty after the last turn."""
    wait_s: float = 0.0
    subagents: tuple[SessionScript, ...] = ()
    """Sessions that begin with the wait, one after the other; it lasts until they have ended, `wait_s` at least.
    Their `arrive_s` counts for nothing."""


class SessionScript(NamedTuple):
    """A session: all of its turns, and when it begins."""

    number: int
    """Unique in a workload; the session's tokens depend on it and the seed alone."""
    kind: str
    arrive_s: float
    turns: tuple[TurnScript, ...]
    shared_tokens: int = 0
    """The first so many tokens are the same in all sessions of the same `kind`."""
    last_kind: str = ""
    """How a server takes the end of the last turn: as a wait of this kind, which never ends."""
    objective: Objective = "latency"
    deadline_s: float | None = None
    """With objective `deadline`: seconds from the opening of its sequence."""
    num_before: int = 0
    """The first so many turns stand for what came before a window; latencies of the session do not count them."""

    @property
    def num_tokens(self) -> int:
        """The context after the last turn."""
        return sum(turn.new_tokens + turn.output_tokens for turn in self.turns)

    def contexts(self) -> Iterator[int]:
        """The context at the end of each turn, which is its length while the session waits."""
        length = 0
        for turn in self.turns:
            length += turn.new_tokens + turn.output_tokens
            yield length


def with_subagents(scripts: Iterable[SessionScript]) -> Iterator[SessionScript]:
    """All sessions, those of subagents included."""
    for script in scripts:
        yield script
        for turn in script.turns:
            yield from with_subagents(turn.subagents)


def scaled(scripts: Iterable[SessionScript], tokens: float, waits: float = 1.0) -> list[SessionScript]:
    """The same sessions with all lengths times `tokens`, at least 1 each, and all waits times `waits`."""
    return [_scaled(script, tokens, waits) for script in scripts]


def _scaled(script: SessionScript, tokens: float, waits: float) -> SessionScript:
    turns = tuple(
        TurnScript(
            max(1, round(turn.new_tokens * tokens)),
            max(1, round(turn.output_tokens * tokens)),
            turn.wait_kind,
            turn.wait_s * waits,
            tuple(_scaled(child, tokens, waits) for child in turn.subagents),
        )
        for turn in script.turns
    )
    # Less than the prompt: every session has a token of its own.
    shared = min(round(script.shared_tokens * tokens), turns[0].new_tokens - 1)
    return script._replace(turns=turns, shared_tokens=shared)


def window(scripts: Iterable[SessionScript], begin_s: float, end_s: float) -> list[SessionScript]:
    """The part of sessions between two times, as if they had run before `begin_s`: a load that is stationary at once.

    A turn is due when all earlier answers of its session took `TOKEN_S` a token. Sessions under way at `begin_s` begin
    with one turn that has their whole context so far as its prompt. These turns arrive evenly in the first `WARM_UP_S`
    seconds, and the window begins after them; without such sessions it begins at 0. Turns that are due at `end_s` or
    later are left out. The time of subagents is not counted.
    """
    under_way: list[tuple[float, SessionScript]] = []
    later: list[SessionScript] = []
    for script in scripts:
        due = _due(script)
        begun = sum(due_s < begin_s for due_s in due)
        ended = sum(due_s < end_s for due_s in due)
        if begun == 0:
            later.append(script._replace(turns=_last(script.turns[:ended]), arrive_s=script.arrive_s - begin_s))
        elif begun < len(due):
            context = sum(turn.new_tokens + turn.output_tokens for turn in script.turns[:begun])
            first = TurnScript(context - 1, 1, script.turns[begun - 1].wait_kind, due[begun] - begin_s)
            turns = _last((first, *script.turns[begun:ended]))
            under_way.append((due[begun] - begin_s, script._replace(turns=turns, num_before=1)))
    warm_up_s = WARM_UP_S if under_way else 0.0
    found: list[SessionScript] = []
    for index, (due_s, script) in enumerate(under_way):
        arrive_s = warm_up_s * index / len(under_way)
        first, *rest = script.turns
        wait_s = warm_up_s + due_s - arrive_s if rest else 0.0
        found.append(script._replace(arrive_s=arrive_s, turns=(first._replace(wait_s=wait_s), *rest)))
    found += [script._replace(arrive_s=script.arrive_s + warm_up_s) for script in later if script.turns]
    return found


def _due(script: SessionScript) -> list[float]:
    """When each turn is due."""
    waits = [turn.output_tokens * TOKEN_S + turn.wait_s for turn in script.turns[:-1]]
    return list(itertools.accumulate(waits, initial=script.arrive_s))


def _last(turns: tuple[TurnScript, ...]) -> tuple[TurnScript, ...]:
    """The turns, nothing waited for after the last one."""
    return (*turns[:-1], *(turn._replace(wait_kind="", wait_s=0.0, subagents=()) for turn in turns[-1:]))


class TokenSource:
    """The token ids of sessions: a function of seed, session and place."""

    def __init__(self, seed: int, vocab_size: int):
        self._seed = seed
        self._vocab_size = vocab_size
        self._shared: dict[str, bytes] = {}

    def shared(self, kind: str, count: int) -> bytes:
        """The first `count` tokens that sessions of a kind share, packed."""
        known = self._shared.get(kind, b"")
        if len(known) < count * TOKEN_BYTES:
            source = np.random.default_rng([self._seed, 1, *kind.encode()])
            known = self._shared[kind] = self._draw(source, count)
        return known[: count * TOKEN_BYTES]

    def own(self, number: int) -> OwnTokens:
        """The tokens of one session."""
        return OwnTokens(self, np.random.default_rng([self._seed, 0, number]))

    def _draw(self, source: np.random.Generator, count: int) -> bytes:
        return source.integers(FIRST_TOKEN, self._vocab_size, count, dtype=np.int32).tobytes()


class OwnTokens:
    """Token ids of one session, in order."""

    def __init__(self, source: TokenSource, generator: np.random.Generator):
        self._source = source
        self._generator = generator

    def take(self, count: int) -> bytes:
        """The next `count` tokens, packed."""
        return self._source._draw(self._generator, count)
