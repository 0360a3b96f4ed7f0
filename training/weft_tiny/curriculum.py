"""How hard training examples are, by kind: from one fact to many, as fast as the model learns."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from multiprocessing.sharedctypes import RawArray
from typing import Any

from training.weft_tiny.grammar import TOP

_PASSED = 0.8
_LEAST_ANSWERS = 400
_MEMORY = 0.995
_CURRENT = 0.6


class Curriculum:
    """The level of each kind, and the share of right answers at it among examples that were trained on just then.

    Only the first use of an example counts, so the share is a fair check on trained values and phrasings, and costs
    nothing. The numbers are in memory that processes forked by the trainer share with it; only the trainer writes them.
    """

    def __init__(self, kinds: Iterable[str]) -> None:
        self._kinds = {kind: index for index, kind in enumerate(kinds)}
        self._levels = RawArray("i", [1] * len(self._kinds))
        self._right = RawArray("d", len(self._kinds))
        self._answers = RawArray("q", len(self._kinds))

    @property
    def levels(self) -> dict[str, int]:
        """The current level of each kind."""
        return {kind: self._levels[index] for kind, index in self._kinds.items()}

    def level(self, kind: str, rng: random.Random) -> int:
        """The level of the next example: mostly the current one, else any."""
        return self._levels[self._kinds[kind]] if rng.random() < _CURRENT else rng.randint(1, TOP)

    def count(self, kind: str, level: int, right: bool) -> None:
        """Record an answer; the level rises after enough right ones."""
        index = self._kinds.get(kind)
        if index is None or level != self._levels[index]:
            return
        self._right[index] = _MEMORY * self._right[index] + (1 - _MEMORY) * right
        self._answers[index] += 1
        if self._answers[index] >= _LEAST_ANSWERS and self.share(kind) >= _PASSED and level < TOP:
            self._levels[index] = level + 1
            self._right[index], self._answers[index] = 0.0, 0

    def share(self, kind: str) -> float:
        """The share of right answers at the current level; 0.5 before the first one."""
        index = self._kinds[kind]
        answers = self._answers[index]
        return self._right[index] / (1 - _MEMORY**answers) if answers else 0.5

    def shares(self) -> dict[str, float]:
        """`share` of every kind that has answers."""
        return {kind: round(self.share(kind), 3) for kind, index in self._kinds.items() if self._answers[index]}

    def mixture(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Return the shares of the kinds. A kind that is learned at the top level gets down to a third of its share."""
        learnt = {kind: self.share(kind) if self._levels[self._kinds[kind]] == TOP else 0.0 for kind in weights}
        return {kind: weight * min(1.0, max(1 / 3, 10 * (1.0 - learnt[kind]))) for kind, weight in weights.items()}

    def dump(self) -> dict[str, Any]:
        """The state for a checkpoint: by kind the level, the right answers and the answers at it."""
        return {
            name: {kind: values[index] for kind, index in self._kinds.items()}
            for name, values in (("levels", self._levels), ("right", self._right), ("answers", self._answers))
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `dump` returned; kinds that it lacks begin anew."""
        for values, name in ((self._levels, "levels"), (self._right, "right"), (self._answers, "answers")):
            for kind, value in state[name].items():
                values[self._kinds[kind]] = value
