"""Sequences of `FakeEngine`, and the model in its place: tokens from a script or a hash. For tests only.

Owns what a generation yields and what ends it. It does not know operations of other kinds, nor their order.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.core.ids import pack_tokens
from weft.core.wire import (
    Append,
    Dists,
    EngineInfo,
    Finished,
    FinishReason,
    Fork,
    Generate,
    OperationUsage,
    PromptOutputs,
    Token,
    TokenLogprobs,
)

FakeOperation = Append | Generate | Fork


@dataclass
class FakeSequence:
    """The state of one open sequence, for tests to read."""

    id: int
    namespace: str = ""
    tenant: str = ""
    priority: int = 0
    request_id: str = ""
    tokens: list[int] = field(default_factory=list)
    operations: deque[FakeOperation] = field(default_factory=deque)
    """Not yet ended, in order; the first is running."""
    generated: list[int] = field(default_factory=list)
    """Tokens of the running `Generate`."""
    text: bytes = b""
    """Their bytes."""
    script: deque[int] | None = None
    num_prompt: int = 0
    generating: int = 0
    """The operation that is generating; 0: none."""

    def begin(self, op: Generate, script: deque[int] | None, model: FakeModel) -> None:
        """Begin a generation, with the last `num_generated` tokens of the sequence as its own. `script` has the next
        tokens; None: the model's."""
        self.generating = op.op
        self.num_prompt = len(self.tokens) - op.num_generated
        self.generated = self.tokens[self.num_prompt :]
        self.text = b"".join(map(model.bytes_of, self.generated))
        self.script = script

    def end(self) -> None:
        """Forget the generation; the tokens stay in the sequence."""
        self.generated, self.text, self.script = [], b"", None

    def usage(self) -> OperationUsage:
        """What the generation has used: everything is computed once."""
        return OperationUsage(
            num_prompt_tokens=self.num_prompt,
            num_output_tokens=len(self.generated),
            num_prefill_tokens=self.num_prompt,
        )


class FakeEnding(NamedTuple):
    """Why a generation ended, and what of its text is not returned."""

    reason: FinishReason
    stop: str | int | None = None
    """The stop string or token."""
    cut_bytes: int = 0
    """From the begin of the stop string to the end of the text."""


class FakeModel:
    """Tokens for sequences. The arguments are those of `FakeEngine`."""

    def __init__(self, info: EngineInfo, alphabet: Sequence[int], token_bytes: Sequence[bytes] | None):
        self._info = info
        self._alphabet = list(alphabet)
        self._token_bytes = token_bytes

    def bytes_of(self, token: int) -> bytes:
        """What stop strings see of a token."""
        if self._token_bytes is not None:
            return self._token_bytes[token]
        return bytes([token]) if token < 256 else b""

    def generate(self, seq: FakeSequence, op: Generate) -> Token:
        """Append the next token to a sequence and return its event."""
        token = self._next(seq, op)
        seq.tokens.append(token)
        seq.generated.append(token)
        seq.text += self.bytes_of(token)
        k = op.sampling.logprobs
        logprobs = None if k is None else _logprobs(token, k, self._info.vocab_size)
        return Token(op.op, token, _hold_bytes(seq.text, op.stop.stop), logprobs)

    def ending(self, seq: FakeSequence, op: Generate) -> FakeEnding | None:
        """What ends a generation after its last token; None: it goes on."""
        count, stop, token = len(seq.generated), op.stop, seq.generated[-1]
        if count >= stop.min_tokens:
            found = [(seq.text.find(text), text) for text in stop.stop if text in seq.text]
            if token in stop.stop_token_ids:
                return FakeEnding("stop", token)
            if token in self._info.eos_token_ids and not stop.ignore_eos:
                return FakeEnding("stop")
            if found:
                at, text = min(found)
                return FakeEnding("stop", text.decode(), len(seq.text) - at)
        limit = self._info.max_context - seq.num_prompt
        return FakeEnding("length") if count >= min(stop.max_tokens or limit, limit) else None

    def report(self, seq: FakeSequence, op: int, outputs: PromptOutputs, tokens: Sequence[int]) -> Finished:
        """The end of an operation that has appended `tokens` and asked for outputs."""
        logprobs: list[TokenLogprobs | None] | None = None
        if outputs.logprobs is not None:
            logprobs = [_logprobs(token, outputs.logprobs, self._info.vocab_size) for token in tokens]
            if len(tokens) == len(seq.tokens) and logprobs:
                logprobs[0] = None
        hidden = [float(i + 1) for i in range(self._info.hidden_size)] if outputs.hidden else None
        dists = None if outputs.dist is None else _dists(seq.tokens, outputs.dist, self._info.vocab_size)
        usage = OperationUsage(num_prompt_tokens=len(seq.tokens))
        return Finished(op=op, usage=usage, prompt_logprobs=logprobs, hidden=hidden, dists=dists)

    def _next(self, seq: FakeSequence, op: Generate) -> int:
        if seq.script is not None:
            return seq.script.popleft() if seq.script else self._info.eos_token_ids[0]
        seed = 0 if op.sampling.is_greedy else (op.sampling.seed or 0)
        digest = zlib.crc32(pack_tokens(seq.tokens), zlib.crc32(repr(seed).encode()))
        allowed = op.sampling.allowed_token_ids or self._alphabet
        return allowed[digest % len(allowed)]


def _hold_bytes(text: bytes, stops: list[bytes]) -> int:
    """Bytes at the end of a text with which a stop string may begin."""
    sizes = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(sizes, default=0)


def _logprobs(token: int, k: int, vocab_size: int) -> TokenLogprobs:
    """Synthetic but consistent: the chosen token is the most probable, each next one half as probable."""
    tops = [(token + i) % vocab_size for i in range(k)]
    return TokenLogprobs(-0.5, 1, tops, [-0.5 - 0.75 * i for i in range(k)])


def _dists(tokens: Sequence[int], k: int, vocab_size: int) -> Dists:
    """Synthetic: a hash of the tokens selects the most probable one, each next one is half as probable."""
    first = zlib.crc32(pack_tokens(tokens)) % vocab_size
    ids = [(first + i) % vocab_size for i in range(k)]
    return Dists(pack_tokens(ids), array("f", [-0.7 * (i + 1) for i in range(k)]).tobytes())
