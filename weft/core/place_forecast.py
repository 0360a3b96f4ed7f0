"""`PlaceForecast`: when a refused request can expect a place, from when places became free before.

Pure: `now` is in seconds of one clock. The server counts its requests in progress by it, the scheduler its queue.
"""

from __future__ import annotations

from collections import deque

REMEMBERED = 256
"""Number of freed places from which their rate is estimated."""
MAX_RETRY_S = 60.0


class PlaceForecast:
    """Predicts free places for requests that were refused, in the order of their refusal."""

    def __init__(self) -> None:
        self._freed: deque[float] = deque(maxlen=REMEMBERED)
        self._promised = 0
        """Refused requests for which no place has become free yet."""

    def freed(self, now: float) -> None:
        """Note that a place has become free."""
        self._freed.append(now)
        self._promised = max(0, self._promised - 1)

    def refused(self, now: float) -> float:
        """Note a refused request. Returns the seconds until a place is expected for it, from 1 to `MAX_RETRY_S`."""
        self._promised += 1
        # The time since the last place counts, too.
        mean_s = (now - self._freed[0]) / len(self._freed) if self._freed else 0.0
        return min(max(1.0, self._promised * mean_s), MAX_RETRY_S)
