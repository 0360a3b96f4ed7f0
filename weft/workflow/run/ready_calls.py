"""`ReadyCalls`: the calls of a run that can be sent, in order.

Those that go on with a conversation are apart. The pages of their conversation are in use until they are done, and an
engine takes them before calls that begin one. Were they held back while such calls wait for pages, these would wait for
longer, or take the pages of conversations, which then are computed again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from weft.workflow.run.instructions import TaskName

Rank = tuple[Any, ...]


class ReadyCalls:
    """Names of calls, each with its rank."""

    def __init__(self) -> None:
        self._beginning: list[tuple[Rank, TaskName]] = []
        """A heap, as the other one."""
        self._going_on: list[tuple[Rank, TaskName]] = []

    def add(self, rank: Rank, name: TaskName, *, goes_on: bool) -> None:
        """A call can be sent."""
        heapq.heappush(self._going_on if goes_on else self._beginning, (rank, name))

    def first(self, *, may_begin: bool) -> TaskName | None:
        """The next call in order; where none `may_begin` a conversation, of those that go on with one."""
        heads = [heap[0] for heap in (self._going_on, self._beginning if may_begin else []) if heap]
        return min(heads)[1] if heads else None

    def remove(self, name: TaskName) -> None:
        """It is the `first` one, and is sent or fails."""
        for heap in (self._going_on, self._beginning):
            if heap and heap[0][1] == name:
                heapq.heappop(heap)
                return
        raise ValueError(f"{name} is not the first call")

    def sort(self, rank: Callable[[TaskName], Rank]) -> None:
        """Ranks have changed."""
        for heap in (self._going_on, self._beginning):
            heap[:] = [(rank(name), name) for _, name in heap]
            heapq.heapify(heap)

    def clear(self) -> None:
        """No call is sent any more."""
        self._going_on.clear()
        self._beginning.clear()
