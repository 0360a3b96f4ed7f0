"""Arguments and results of the built-in programs: what an endpoint or the offline API passes in and gets back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import msgspec

from weft.core.grammar import Grammar
from weft.core.objectives import LEAST_DEADLINE_S, Objective
from weft.core.sampling import SamplingParams, StopParams
from weft.core.waits import WaitKind
from weft.core.wire import FinishReason, Open, OperationUsage, Started, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """On whose behalf a program runs."""

    request_id: str = ""
    tenant: str = ""
    namespace: str = ""
    """Pages are shared within it, never across: tenant, joined with the request's `cache_salt`."""
    priority: int = 0
    objective: Objective = "latency"
    """What its sequences are to be fast at."""
    deadline_at_s: float | None = None
    """With objective `deadline`: when they should be done, on the monotonic clock."""

    def open_command(self, seq: int) -> Open:
        """The command that opens a sequence on its behalf, now."""
        left_s = None if self.deadline_at_s is None else max(self.deadline_at_s - time.monotonic(), LEAST_DEADLINE_S)
        return Open(
            seq=seq,
            tenant=self.tenant,
            namespace=self.namespace,
            priority=self.priority,
            request_id=self.request_id,
            objective=self.objective,
            deadline_s=left_s,
        )


class ToolReader(Protocol):
    """Reads the text of one choice as it is generated: an answer may be long, and its end should take no longer than
    its other tokens."""

    def push(self, text: str) -> object:
        """Read the next piece of the choice's text; a piece may end within a word or a tag."""

    def wait_kind(self, reason: FinishReason) -> str:
        """What the client does after the text that was read (a `WaitKind`, or what `tool_wait` returns)."""


WHOLE_ANSWER = 32
"""`CompletionArgs.chunk_tokens` for a client that gets the answer at its end: to wake its task for each token would be
most of what a front does. More would save little, and an answer that is given up has its tokens counted up to here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionArgs:
    """What the built-in completion program needs."""

    prompt: bytes
    """Packed token ids, at least one."""
    n: int = 1
    """Choices: the prompt is computed once and forked. Choice i draws with seed + i."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """`sampling.seed` None: a random one for each choice."""
    stop: StopParams = field(default_factory=StopParams)
    include_stop: bool = False
    """Whether the text keeps the stop string that ended it."""
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    """What each choice must look like."""
    prompt_logprobs: int | None = None
    wait_kind: str = WaitKind.COMPLETION
    """What the client does after a choice: the engine learns from this how long it will be before another request
    continues the choice. Empty: none does."""
    expected_in_s: float | None = None
    """How long that will be, if it is known."""
    tools_called: Callable[[], ToolReader] | None = None
    """Makes, for each choice, the reader of its text that says which tools the client runs instead."""
    max_tokens: int | None = None
    """Of all choices; 0 computes the prompt alone (for `echo` with log-probabilities)."""
    until: Callable[[], Callable[[str], bool]] | None = None
    """Makes, for each choice, what is called with its text, token by token, and ends the choice by returning True. The
    last token is the one after which it did so, also where the engine sampled more before it learned of it."""
    on_start: Callable[[Started], None] | None = None
    """Told when the engine begins with the first choice; after a crash again."""
    chunk_tokens: int = 1
    """As many tokens of a choice, behind its first one, come in one chunk, or all that are left; they may be fewer."""


class BeamScore(NamedTuple):
    """What a beam is worth."""

    logprob: float
    """Of all its tokens together, in nats."""
    score: float
    """What beams are ranked by."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """New text and tokens of one choice. The text of all its chunks is the choice's text; no chunk splits a character.

    `tokens` may be ahead of `text` while bytes are held back for a character or a possible stop string.
    """

    index: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per entry of `tokens` where asked for."""
    finish_reason: FinishReason | None = None
    """Set on the choice's last chunk, and only there."""
    stop: str | int | None = None
    """The stop string or stop token id that ended it."""
    usage: OperationUsage | None = None
    """On the last chunk."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """On the first chunk of choice 0, where asked for."""
    score: BeamScore | None = None
    """Of a choice that a beam search found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingArgs:
    """What the built-in embedding program needs."""

    prompt: bytes
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True
    dimensions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingResult:
    """[hidden size], or the first `dimensions` of it."""

    embedding: list[float]
    usage: OperationUsage
