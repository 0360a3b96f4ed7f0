"""How hard training examples are, by kind: from one fact to many, as fast as the model learns."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from training.weft_tiny.grammar import TOP

_PASSED = 0.8
_LEAST_ANSWERS = 400
_MEMORY = 0.995
_CURRENT = 0.6


@dataclass
class Curriculum:
    """The level of each kind, and the share of right answers at it among examples that were trained on just then.

    Examples are never repeated, so the share is a fair check on trained values and phrasings, and costs nothing.
    """

    levels: dict[str, int] = field(default_factory=dict)
    _right: dict[str, float] = field(default_factory=dict)
    _answers: dict[str, int] = field(default_factory=dict)

    def level(self, kind: str, rng: random.Random) -> int:
        """The level of the next example: mostly the current one, else a lower one."""
        current = self.levels.setdefault(kind, 1)
        return current if rng.random() < _CURRENT else rng.randint(1, current)

    def count(self, kind: str, level: int, answers: list[bool]) -> None:
        """Record the answers of one example; the level rises after enough right ones."""
        if level != self.levels.get(kind):
            return
        for right in answers:
            self._right[kind] = _MEMORY * self._right.get(kind, 0.0) + (1 - _MEMORY) * right
            self._answers[kind] = self._answers.get(kind, 0) + 1
        if self._answers.get(kind, 0) >= _LEAST_ANSWERS and self.share(kind) >= _PASSED and level < TOP:
            self.levels[kind] = level + 1
            self._right[kind], self._answers[kind] = 0.0, 0

    def share(self, kind: str) -> float:
        """The share of right answers at the current level; 0.5 before the first one."""
        answers = self._answers.get(kind, 0)
        return self._right[kind] / (1 - _MEMORY**answers) if answers else 0.5

    def shares(self) -> dict[str, float]:
        """`share` of every kind that has answers."""
        return {kind: round(self.share(kind), 3) for kind in sorted(self._answers)}

    def mixture(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Return the shares of the kinds. A kind that is learned at the top level gets down to a third of its share."""
        learnt = {kind: self.share(kind) if self.levels.get(kind) == TOP else 0.0 for kind in weights}
        return {kind: weight * min(1.0, max(1 / 3, 10 * (1.0 - learnt[kind]))) for kind, weight in weights.items()}

    def dump(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"levels": self.levels, "right": self._right, "answers": self._answers}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `dump` returned."""
        for mine, stored in ((self.levels, "levels"), (self._right, "right"), (self._answers, "answers")):
            mine.clear()
            mine.update(state[stored])
