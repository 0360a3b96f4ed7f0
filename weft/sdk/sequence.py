"""The Sequence trait: tokens with KV on the engine. The engine knows the tokens of every sequence: it shares prefixes,
recomputes evicted pages, and runs `generate` as a loop inside its scheduler.

    async with Sequence() as seq:
        seq.append(await tokenize("Once upon", special=True))
        async for part in seq.generate(Sampler(temperature=0.8), Stop(max_tokens=20)):
            part.tokens, part.text

A sequence takes and returns token ids and does not keep them; `weft.sdk.Context` does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

from weft.abi.errors import InvalidRequest
from weft.abi.operations import Op
from weft.sdk.answers import Answer, dump, pack_ints, unpack_floats, unpack_ints
from weft.sdk.calls import Blobs, Stream
from weft.sdk.channel import Channel, OwnedResource, current
from weft.sdk.dist import Dist, unpack_dist
from weft.sdk.grammar import Grammar
from weft.sdk.sampling import Sampler, Stop

DIST_K = 256


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that a generation used; `weft.abi.parameters.USAGE` describes the fields."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    queued_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    num_host_tokens: int = 0
    num_recomputed_tokens: int = 0
    first_different_token: int | None = None
    num_continued_tokens: int = 0
    num_prefill_tokens: int = 0

    @property
    def num_new_tokens(self) -> int:
        """Prompt tokens that were neither found nor known to have had KV before."""
        return self.num_prompt_tokens - self.num_cached_tokens - self.num_recomputed_tokens

    def __add__(self, other: Usage) -> Usage:
        """Sums; of `first_different_token`, the first that is known."""
        first = self.first_different_token
        if first is None:
            first = other.first_different_token
        names = [item.name for item in fields(self) if item.name != "first_different_token"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Usage(**sums, first_different_token=first)


class Logprob(NamedTuple):
    """Log-probability and rank of one token, and the most probable tokens at its position."""

    logprob: float
    rank: int
    """1: the most probable token; 0: unknown."""
    top: Dist


class Part(NamedTuple):
    """Tokens that arrived together, and the text that became final with them."""

    tokens: list[int]
    text: str
    logprobs: list[Logprob] = []  # noqa: RUF012


class Ending(NamedTuple):
    """Reason, stop condition and usage of a generation that has ended."""

    reason: str
    """`stop` or `length`."""
    stop: str | int | None
    """The stop string or stop token; None for the end of sequence and for `length`."""
    usage: Usage


class Generating:
    """A generation in progress: iterate over its parts, then read `ending`."""

    def __init__(self, stream: Stream):
        self._stream = stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Part:
        return _part(await anext(self._stream))

    @property
    def ending(self) -> Ending:
        """How the generation ended. Raises `RuntimeError` before the last part was read."""
        fields_ = json.loads(self._stream.result[0])
        return Ending(fields_["reason"], fields_.get("stop"), usage_of(fields_.get("usage") or {}))

    @property
    def ended(self) -> bool:
        """Whether the end has arrived; parts may still be unread."""
        return self._stream.ended

    def cancel(self) -> None:
        """Stop the generation; the sequence keeps its tokens. Iterating then raises `Cancelled`."""
        self._stream.cancel()


class Sequence(OwnedResource):
    """A sequence of the program. Methods return at once; its operations run in order."""

    noun = "sequence"
    release_op = Op.SEQ_RELEASE

    def __init__(self, priority: int = 0, *, channel: Channel | None = None):
        super().__init__(channel or current())
        self.channel.post(Op.SEQ_OPEN, self.number, priority, owner=self)

    def append(self, tokens: Iterable[int]) -> None:
        """Append known tokens. The engine computes them when its batch has room, the last one when an operation needs
        it."""
        self.check()
        self.channel.post(Op.SEQ_APPEND, self.number, pack_ints(tokens), owner=self)

    def generate(
        self,
        sampler: Sampler | None = None,
        stop: Stop | None = None,
        grammar: Grammar | None = None,
        *,
        text: bool = True,
        special: bool = False,
        whole: bool = False,
    ) -> Generating:
        """Sample tokens until a condition of `stop` holds.

        `special`: the text contains the names of special tokens. `whole`: everything arrives in one part at the end,
        which saves a program that does not stream one wake-up per token.
        """
        self.check()
        about: dict[str, Any] = {
            "sampling": (sampler or Sampler()).to_json(),
            "stop": (stop or Stop()).to_json(),
        }
        if grammar is not None:
            about["grammar"] = grammar.to_json()
        form = (0 if not text else 2 if special else 1) + (4 if whole else 0)
        return Generating(self.channel.stream(Op.SEQ_GENERATE, self.number, form, dump(about), owner=self))

    def next_dist(self, k: int = DIST_K, *, append: Iterable[int] = ()) -> Answer[Dist]:
        """Append tokens and return the `k` most probable next tokens: one step of a decoding loop in one round trip."""
        self.check()
        call = self.channel.ask(Op.SEQ_DIST, self.number, k, pack_ints(append), owner=self)
        return Answer(call, lambda blobs: unpack_dist(*blobs[:2]))

    def score(self, tokens: Iterable[int], k: int = 0) -> Answer[list[Logprob]]:
        """Append tokens and return the log-probability of each (NaN for the first token of a sequence) and of the `k`
        most probable tokens at its position."""
        self.check()
        call = self.channel.ask(Op.SEQ_SCORE, self.number, k, pack_ints(tokens), owner=self)
        return Answer(call, _logprobs)

    @classmethod
    def reserved(cls, channel: Channel) -> Sequence:
        """Create a handle for a sequence that does not exist yet, to be passed to `fork`."""
        sequence = cls.__new__(cls)
        OwnedResource.__init__(sequence, channel)
        return sequence

    def fork(self, into: Sequence | None = None) -> Sequence:
        """Create a copy that shares all KV, after the operations put on this sequence so far. `into`: a reserved
        handle for the copy."""
        self.check()
        child = into or Sequence.reserved(self.channel)
        self.channel.post(Op.SEQ_FORK, self.number, child.number, owner=child)
        return child

    def truncate(self, num_tokens: int) -> None:
        """Drop all tokens past the first `num_tokens`. Cancels the operations on the sequence."""
        self.check()
        if num_tokens < 0:
            raise InvalidRequest(f"a sequence cannot keep {num_tokens} tokens", "num_tokens")
        self.channel.post(Op.SEQ_TRUNCATE, self.number, num_tokens, owner=self)

    def mask(self, *ranges: tuple[int, int]) -> None:
        """Hide ranges of tokens (first, past the last) from all tokens appended and generated from now on, instead of
        those hidden before. Without ranges all tokens are visible again.

        Later tokens are computed as if the hidden ones did not exist, at unchanged positions; other sequences do not
        share their KV. The next operation raises `InvalidRequest` for ranges outside the sequence.
        """
        self.check()
        if any(not 0 <= first <= last for first, last in ranges):
            raise InvalidRequest(f"{ranges} are no ranges of tokens: each is (first, past the last)", "ranges")
        self.channel.post(Op.SEQ_MASK, self.number, pack_ints(end for pair in ranges for end in pair), owner=self)

    def cancel(self) -> None:
        """Cancel the operations on the sequence, which keeps its tokens."""
        self.check()
        self.channel.post(Op.SEQ_CANCEL, self.number, owner=self)

    def set_priority(self, priority: int) -> None:
        """Set the priority of the sequence; lower runs earlier."""
        self.check()
        self.channel.post(Op.SEQ_PRIORITY, self.number, priority, owner=self)

    def expect(self, kind: str, seconds: float | None = None) -> None:
        """Tell the engine what the program waits for before its next operation on the sequence: `tool`, `http`, `sleep`
        or `message`, and for how long if that is known. The engine decides with it whose KV gives way.

        The host sees `http`, `run.sleep` and `run.receive` by itself, and a context tells of its tool calls. The next
        operation raises `InvalidRequest` for another kind or a negative time.
        """
        self.check()
        known = float("nan") if seconds is None else float(seconds)
        self.channel.post(Op.SEQ_EXPECT, self.number, known, kind.encode(), owner=self)

    def hold(self, seconds: float) -> None:
        """Release the sequence, but keep its KV for `seconds` for a sequence that begins with the same tokens."""
        self.check()
        self.channel.post(Op.SEQ_HOLD, self.number, float(seconds), owner=self)
        self.close()


def usage_of(values: dict[str, Any]) -> Usage:
    """Usage from its JSON values. Drops fields that this version does not know."""
    names = {item.name for item in fields(Usage)}
    return Usage(**{key: value for key, value in values.items() if key in names})


def _part(blobs: Blobs) -> Part:
    tokens = unpack_ints(blobs[0])
    text = blobs[1].decode("utf-8", "replace") if len(blobs) > 1 else ""
    return Part(tokens, text, _logprobs(blobs[2:5]) if len(blobs) > 2 else [])


def _logprobs(blobs: Blobs) -> list[Logprob]:
    """Decode log-probabilities [n], ids [n, k] and log-probabilities [n, k]."""
    chosen = unpack_floats(blobs[0])
    ids, values = blobs[1], blobs[2]
    size = len(ids) // len(chosen) if chosen else 0
    found = []
    for at, logprob in enumerate(chosen):
        row = slice(size * at, size * (at + 1))
        top = unpack_dist(ids[row], values[row])
        rank = 1 + sum(value > logprob for value in top.logprobs)
        is_known = not math.isnan(logprob) and 0 < rank <= len(top)
        found.append(Logprob(logprob, rank if is_known else 0, top))
    return found
