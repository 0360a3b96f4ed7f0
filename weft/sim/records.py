"""What is noted while sessions are played: how turns went, and which tokens had KV at some time."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class TurnRecord(NamedTuple):
    """How a turn went. Times are virtual seconds."""

    due_s: float
    """When its tokens were there: the arrival, or the end of the wait before it."""
    first_token_s: float
    end_s: float
    prompt_tokens: int
    known_tokens: int
    """Tokens at the prompt's begin whose KV was computed before, for this session or a prompt that it shares."""
    output_tokens: int


class SessionRecord(msgspec.Struct):
    """Times and tokens of a session, from its arrival to its last turn."""

    number: int
    kind: str
    arrive_s: float
    turns: list[TurnRecord] = []
    tools_s: float = 0.0
    """Time in waits."""
    end_s: float | None = None
    """None: it has not ended."""
    num_before: int = 0
    """As in `SessionScript`."""

    @property
    def output_tokens(self) -> int:
        """Tokens generated in all turns so far."""
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def latency_per_token_s(self) -> float | None:
        """(end to end - time in tools) / output tokens, without the turns before a window; None before the end, and
        without other turns."""
        before, turns = self.turns[: self.num_before], self.turns[self.num_before :]
        if self.end_s is None or not turns:
            return None
        before_s = sum(turn.end_s - turn.due_s for turn in before)
        return (self.end_s - self.arrive_s - self.tools_s - before_s) / sum(turn.output_tokens for turn in turns)


class KnownTokens:
    """How many tokens of each open sequence had KV at some time: computing them again is recomputation."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        """By handle."""

    def expect(self, handle: int, num_tokens: int) -> None:
        """The first `num_tokens` tokens of a sequence have been computed before, for it or for another."""
        self._known[handle] = max(num_tokens, self._known.get(handle, 0))

    def forget(self, handle: int) -> None:
        """Drop what is known of a sequence that was closed."""
        self._known.pop(handle, None)

    def compute(self, handle: int, start: int, end: int) -> int:
        """Tokens `start` to `end` of a sequence are computed: how many of them not for the first time."""
        known = self._known.get(handle, 0)
        if end > known:
            self._known[handle] = end
        return max(0, min(end, known) - start)
