"""The algorithm of beam search, without the model: it takes distributions and returns beams to follow and beams found.

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
    """A sequence of the program or engine that drives the search."""

    def fork(self) -> Self:
        """Create a second sequence with the same tokens."""

    def release(self) -> None:
        """Free the sequence on the engine. Idempotent."""


B = TypeVar("B", bound=Forkable)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamRules:
    """The rules by which beams grow and are ranked."""

    width: int
    """Number of beams that are followed at once."""
    max_tokens: int
    min_tokens: int = 0
    """A beam can end only after this number of tokens."""
    length_penalty: float = 1.0
    """A beam's score is its log-probability divided by its length to this power."""
    early_stopping: bool | Literal["never"] = False
    """When a search with `width` complete beams ends. True: at once; False: when no live beam scores better at its
    present length; "never": when no live beam can score better at any length."""
    ends: frozenset[int] = frozenset()
    """Tokens that complete a beam."""

    @property
    def num_candidates(self) -> int:
        """Number of next tokens that the search needs after each beam: enough even if all end tokens are among them."""
        return self.width * (1 + len(self.ends))

    def score(self, logprob: float, length: int) -> float:
        """The score by which beams are ranked."""
        score: float = logprob / length**self.length_penalty
        return score

    def ranked(self, complete: Iterable[FoundBeam[D]]) -> list[FoundBeam[D]]:
        """At most `width` beams, best first; ties go to the one that was complete first."""
        return sorted(complete, key=lambda beam: -beam.score)[: self.width]


@dataclass(frozen=True, slots=True)
class LiveBeam(Generic[B, D]):
    """A beam that is not complete."""

    branch: B
    """The beam's sequence, without the last token."""
    tokens: tuple[int, ...]
    details: tuple[D, ...]
    """One value of the driver per token (see `BeamSearch.advance`)."""
    logprob: float
    """Sum over all tokens, in nats."""


@dataclass(frozen=True, slots=True)
class FoundBeam(Generic[D]):
    """One continuation that the search found."""

    tokens: tuple[int, ...]
    """All tokens, with the end token that completed the beam."""
    details: tuple[D, ...]
    logprob: float
    score: float
    reason: Literal["stop", "length"]


class _Candidate(NamedTuple):
    """A beam and the token that would extend it."""

    logprob: float
    """Log-probability of the beam with the token, in nats."""
    token: int
    parent: int
    """Index of the beam among the live beams."""
    place: int
    """Index of the token in the beam's distribution."""


class BeamSearch(Generic[B, D]):
    """One search. While `goes_on`, the driver appends the last token of every live beam to its sequence and passes the
    next distributions to `advance`; at the end it releases the search."""

    def __init__(self, rules: BeamRules, root: B):
        """`root` is the sequence of the prompt; the search owns it from here on."""
        self._rules = rules
        self._length = 0
        self._complete: list[FoundBeam[D]] = []
        self.live: list[LiveBeam[B, D]] = [LiveBeam(root, (), (), 0.0)]
        """Beams that are not complete, best first."""
        self.goes_on = True

    def advance(self, dists: Sequence[Iterable[tuple[int, float]]], describe: Callable[[int, int], D]) -> None:
        """Extend the beams. `dists`: after each live beam, (token, log-probability), most probable first.

        `describe(parent, place)` gives the value kept for a token: number `place` of the distribution after beam
        `parent`, both from 0.
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
        """At most `width` beams, best first."""
        rules, complete = self._rules, self._complete
        if self._length < rules.max_tokens or (len(complete) == rules.width and rules.early_stopping is True):
            return complete
        return rules.ranked([*complete, *(self._ended(beam, "length") for beam in self.live)])

    def release(self) -> None:
        """Release the sequences of all live beams."""
        for beam in self.live:
            beam.branch.release()

    def _best(self, dists: Sequence[Iterable[tuple[int, float]]], banned: frozenset[int]) -> list[_Candidate]:
        """The most probable extensions of all beams, best first, without banned tokens; ties go to the earlier beam."""
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
        """Follow these candidates. The last candidate of a beam takes its sequence over; the others get forks."""
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
            # `fork` fails when the engine is lost. `release` knows only the parents, so the forks are released here.
            for beam in following:
                beam.branch.release()
            raise
        self.live = following

    def _is_decided(self) -> bool:
        """Whether no live beam can displace a complete one, by the rule of `early_stopping`. Log-probabilities of beams
        only fall."""
        rules = self._rules
        if len(self._complete) < rules.width or rules.early_stopping is True:
            return len(self._complete) >= rules.width
        at_any_length = rules.early_stopping == "never" and rules.length_penalty > 0
        length = rules.max_tokens if at_any_length else self._length
        return rules.score(max(beam.logprob for beam in self.live), length) <= self._complete[-1].score
