"""The algorithm of beam search, apart from what computes: distributions in, beams to follow and beams found out.

The rules are those of transformers' beam search. `weft.sdk.beam` drives it in programs, `weft.programs.builtin.beam` in
the server and the offline API.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Protocol, Self, TypeVar

MAX_WIDTH = 64
D = TypeVar("D")


class Forkable(Protocol):
    """A sequence of the driver's."""

    def fork(self) -> Self:
        """A second sequence with the same tokens."""

    def release(self) -> None:
        """Free the sequence on the engine. Idempotent."""


B = TypeVar("B", bound=Forkable)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamRules:
    """How beams grow and are ranked."""

    width: int
    """Beams that are followed at once."""
    max_tokens: int
    min_tokens: int = 0
    """No beam is complete before it has so many tokens, and one that ends it."""
    length_penalty: float = 1.0
    """A beam's score is its log-probability divided by its length to this power."""
    early_stopping: bool | Literal["never"] = False
    """When `width` beams are complete, the search ends: True: at once; False: when no other would be better at its
    present length; "never": when no other can become better at any length."""
    ends: frozenset[int] = frozenset()
    """Tokens that complete a beam."""

    @property
    def num_candidates(self) -> int:
        """Next tokens that the search needs to know after each beam: enough where all ends are among them."""
        return self.width * (1 + len(self.ends))

    def score(self, logprob: float, length: int) -> float:
        """What a beam is ranked by."""
        score: float = logprob / length**self.length_penalty
        return score

    def ranked(self, complete: Iterable[FoundBeam[D]]) -> list[FoundBeam[D]]:
        """The best ones, best first; of equals, the one that was complete first."""
        return sorted(complete, key=lambda beam: -beam.score)[: self.width]


@dataclass(frozen=True, slots=True)
class LiveBeam(Generic[B, D]):
    """A beam that goes on."""

    branch: B
    """Its sequence, which lacks the last token."""
    tokens: tuple[int, ...]
    details: tuple[D, ...]
    """What the driver keeps of each token."""
    logprob: float
    """Of all tokens together, in nats."""


@dataclass(frozen=True, slots=True)
class FoundBeam(Generic[D]):
    """One continuation that the search found."""

    tokens: tuple[int, ...]
    """The token that completed it included."""
    details: tuple[D, ...]
    logprob: float
    score: float
    reason: Literal["stop", "length"]


class _Candidate(NamedTuple):
    """A beam and the token that would extend it."""

    logprob: float
    """Of the beam with the token."""
    token: int
    parent: int
    """Number of the beam among those that are live."""
    place: int
    """Of the token in the beam's distribution, from 0."""


class BeamSearch(Generic[B, D]):
    """One search. While `goes_on`, the driver appends the last token of every live beam to its sequence and hands the
    distributions that follow to `advance`; in the end it releases the search."""

    def __init__(self, rules: BeamRules, root: B):
        """`root` is the sequence of the prompt; the search owns it from here on."""
        self._rules = rules
        self._length = 0
        self._complete: list[FoundBeam[D]] = []
        self.live: list[LiveBeam[B, D]] = [LiveBeam(root, (), (), 0.0)]
        """Best first."""
        self.goes_on = True

    def advance(self, dists: Sequence[Iterable[tuple[int, float]]], describe: Callable[[int, int], D]) -> None:
        """Extend the beams. `dists`: after each live beam, (token, log-probability), most probable first.

        `describe(parent, place)` is kept of a token: of the `place`-th of the distribution after beam `parent`.
        """
        rules = self._rules
        self._length += 1
        banned = rules.ends if self._length <= rules.min_tokens else frozenset[int]()
        grown: list[_Candidate] = []
        for rank, candidate in enumerate(self._best(dists, banned)):
            if candidate.token not in rules.ends:
                grown.append(candidate)
            elif rank < rules.width:
                beam = self._extended(candidate, self.live[candidate.parent].branch, describe)
                self._complete.append(self._ended(beam, "stop"))
            if len(grown) == rules.width:
                break
        self._complete = rules.ranked(self._complete)
        self._grow(grown, describe)
        self.goes_on = bool(self.live) and self._length < rules.max_tokens and not self._is_decided()

    def results(self) -> list[FoundBeam[D]]:
        """At most `width` beams, by falling score."""
        rules, complete = self._rules, self._complete
        if self._length < rules.max_tokens or (len(complete) == rules.width and rules.early_stopping is True):
            return complete
        return rules.ranked([*complete, *(self._ended(beam, "length") for beam in self.live)])

    def release(self) -> None:
        """Give up the sequences of all beams."""
        for beam in self.live:
            beam.branch.release()

    def _best(self, dists: Sequence[Iterable[tuple[int, float]]], banned: frozenset[int]) -> list[_Candidate]:
        """The likeliest extensions of all beams, best first, without banned tokens; ties go to the earlier beam."""
        candidates = (
            _Candidate(beam.logprob + logprob, token, parent, place)
            for parent, (beam, dist) in enumerate(zip(self.live, dists, strict=True))
            for place, (token, logprob) in enumerate(dist)
            if token not in banned
        )
        return heapq.nlargest(self._rules.num_candidates, candidates, key=lambda candidate: candidate.logprob)

    def _extended(self, candidate: _Candidate, branch: B, describe: Callable[[int, int], D]) -> LiveBeam[B, D]:
        parent, detail = self.live[candidate.parent], describe(candidate.parent, candidate.place)
        return LiveBeam(branch, (*parent.tokens, candidate.token), (*parent.details, detail), candidate.logprob)

    def _ended(self, beam: LiveBeam[B, D], reason: Literal["stop", "length"]) -> FoundBeam[D]:
        score = self._rules.score(beam.logprob, len(beam.tokens))
        return FoundBeam(beam.tokens, beam.details, beam.logprob, score, reason)

    def _grow(self, grown: Sequence[_Candidate], describe: Callable[[int, int], D]) -> None:
        """Follow these. A beam's last heir takes its sequence over; the others get forks."""
        heirs = Counter(candidate.parent for candidate in grown)
        for parent, beam in enumerate(self.live):
            if parent not in heirs:
                beam.branch.release()
        following: list[LiveBeam[B, D]] = []
        try:
            for candidate in grown:
                branch = self.live[candidate.parent].branch
                heirs[candidate.parent] -= 1
                own = branch.fork() if heirs[candidate.parent] else branch
                following.append(self._extended(candidate, own, describe))
        except BaseException:
            # The engine was lost meanwhile: `release` knows of the parents alone.
            for beam in following:
                beam.branch.release()
            raise
        self.live = following

    def _is_decided(self) -> bool:
        """Whether no live beam is taken for one that could still be among the best: log-probabilities only fall."""
        rules = self._rules
        if len(self._complete) < rules.width or rules.early_stopping is True:
            return len(self._complete) >= rules.width
        at_any_length = rules.early_stopping == "never" and rules.length_penalty > 0
        length = rules.max_tokens if at_any_length else self._length
        return rules.score(max(beam.logprob for beam in self.live), length) <= self._complete[-1].score
