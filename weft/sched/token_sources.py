"""`TokenSources`: where the KV of a sequence's tokens came from since its last operation ended.

Each token has one source, so counts over a prompt add up to it. Tokens that nothing was noted of yet, such as those of
an operation that was cancelled before it ran, count as new.

A token whose KV was given up and computed again is recomputed, however it had been found or computed before. When an
operation ends, all KV that the sequence has becomes *cached*: the next operation finds it.
"""

from __future__ import annotations

from typing import NamedTuple

_CACHED, _HOST, _RECOMPUTED, _NEW = b"\0", b"\1", b"\2", b"\3"
_FROM_HOST = bytes.maketrans(_CACHED, _HOST)


class SourceCounts(NamedTuple):
    """Tokens of a prompt by source; the rest of it is new."""

    cached: int
    """KV was found, on the device or the host."""
    host: int
    """Of those, brought from the host."""
    recomputed: int
    """KV had existed and was given up."""
    continued: int
    """Of the cached ones, those that go on from other KV (`TokenSources.continued`)."""


class TokenSources:
    """One byte for each token, from the first on, that has or had KV."""

    __slots__ = ("_is_mixed", "_sources", "continued", "num_prefilled")

    def __init__(self, num_cached: int = 0):
        self._sources = bytearray(num_cached)
        self.continued = num_cached
        """The first so many tokens go on from KV of the sequence itself, of the one that it is a fork of, or of a
        finished turn: where they are cached, they were found as these."""
        self._is_mixed = False
        """Whether some tokens were found on the host, or recomputed."""
        self.num_prefilled = 0
        """Tokens that were computed since the last operation ended; those that were computed twice count twice."""

    def found(self, start: int, end: int, num_from_host: int) -> None:
        """The KV of tokens `start` to `end` was found, that of the last `num_from_host` of them on the host. What was
        computed since the last operation, and found again, stays computed."""
        sources = self._sources
        if end > len(sources):
            sources.extend(bytes(end - len(sources)))
        first = max(start, end - num_from_host)
        if first < end:
            self._is_mixed = True
            sources[first:end] = sources[first:end].translate(_FROM_HOST)

    def computed(self, start: int, end: int, num_known: int) -> None:
        """The KV of tokens `start` to `end` is computed; that of the first `num_known` tokens of the sequence had
        existed."""
        self.num_prefilled += end - start
        again = min(end, num_known) - start if num_known > start else 0
        self._is_mixed |= again > 0
        self._sources[start:end] = _RECOMPUTED * again + _NEW * (end - start - again)

    def settle(self, num_computed: int) -> None:
        """An operation has ended, and `num_computed` tokens have KV."""
        self._sources = bytearray(num_computed)
        self._is_mixed = False
        self.continued = num_computed
        self.num_prefilled = 0

    def counts(self, num_tokens: int) -> SourceCounts:
        """Of the first `num_tokens` tokens."""
        count = self._sources.count
        host = recomputed = 0
        if self._is_mixed:
            host, recomputed = count(_HOST, 0, num_tokens), count(_RECOMPUTED, 0, num_tokens)
        continued = cached = count(_CACHED, 0, num_tokens) + host
        if self.continued < num_tokens:
            continued = count(_CACHED, 0, self.continued)
            if host:
                continued += count(_HOST, 0, self.continued)
        return SourceCounts(cached, host, recomputed, continued)
