"""Session scripts: what sessions will do, fixed before a simulation begins and independent of what it decides.

A *session* is a conversation of a model with tools or people: turns, each of which adds tokens to the context,
generates, and then waits for something. `workloads.py` and `agents.py` draw sessions; `sessions.py` plays them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from weft.core.objectives import Objective

TOKEN_BYTES = 4
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
