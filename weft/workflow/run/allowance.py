"""What a run may still use: calls, tokens and seconds. Owns what was used, and what calls in progress may use at most.

Calls that are made count, and nothing else: not those whose answers were known before. A limit of tokens is kept before
it is reached: a call is sent when all that it may use fits beside all that the calls in progress may use.
"""

from __future__ import annotations

import msgspec

from weft.abi.errors import LimitExceeded
from weft.core.wording import plural
from weft.workflow.actuals import CallCounts
from weft.workflow.run.calls import COMPLETION, CallBound, ModelAnswer, ModelRequest
from weft.workflow.run.instructions import RunLimits, TaskName

_BYTES_PER_TOKEN = 4
"""Of a prompt, where no tokenizer is known; as plans have it."""
_COMPLETION_TOKENS = 16
"""Of a plain completion that names no length, in OpenAI's API."""
_PROMPT_FIELDS = ("messages", "prompt", "tools", "documents")


class RunAllowance:
    """The limits of one run, and what of them is used."""

    def __init__(self, limits: RunLimits):
        self._limits = limits
        self._num_calls = 0
        """Those in progress included."""
        self._num_tokens = 0
        """Of calls that have ended."""
        self._reserved: dict[TaskName, int] = {}
        """Tokens of calls in progress; 0 without a limit of tokens."""
        self._seconds_before = 0.0
        """Used before the run was interrupted."""
        self._began_s: float | None = None
        """On the clock of the caller; None before `begin`."""

    @property
    def counts_calls(self) -> bool:
        """Whether it matters what a call costs before it is sent."""
        return self._limits.calls is not None or self._limits.tokens is not None

    @property
    def counts_tokens(self) -> bool:
        """Whether the bound of each call has to be known before it is sent."""
        return self._limits.tokens is not None

    def add(self, before: CallCounts, seconds: float = 0.0) -> None:
        """The run made these calls, and took so many seconds, before it was interrupted."""
        self._num_calls += before.calls
        self._num_tokens += before.prompt_tokens + before.output_tokens
        self._seconds_before += seconds

    def begin(self, now: float) -> float | None:
        """The run begins or goes on. Returns when its seconds have passed; None without a limit of them."""
        self._began_s = now
        most = self._limits.seconds
        return None if most is None else now + max(most - self._seconds_before, 0.0)

    def seconds(self, now: float) -> float:
        """Seconds that the run has taken so far."""
        return self._seconds_before + (0.0 if self._began_s is None else now - self._began_s)

    def out_of_time(self) -> LimitExceeded:
        """The error of what has not ended when the seconds have passed."""
        most = self._limits.seconds
        assert most is not None
        shown = plural(int(most) if most == int(most) else most, "second")
        return LimitExceeded(f"the run has taken the {shown} that it may take", "seconds")

    def has_room(self, bound: CallBound | None) -> bool:
        """Whether a call may be sent now; if not, calls in progress may leave room for it. Raises `LimitExceeded` where
        the limit leaves none."""
        limits, used_tokens = self._limits, self._num_tokens
        if limits.calls is not None and self._num_calls >= limits.calls:
            raise LimitExceeded(f"the run has made the {plural(limits.calls, 'call')} that it may make", "calls")
        if limits.tokens is None:
            return True
        assert bound is not None
        answer = 1 if bound.output_tokens is None else bound.output_tokens
        least = bound.prompt_tokens + answer
        if used_tokens + least > limits.tokens:
            parts = f"{bound.prompt_tokens:,} for its prompt and {answer:,} for its answer, which max_tokens bounds"
            raise self._used_up(limits.tokens, f"of them {used_tokens:,}, and this call may use {parts}")
        return used_tokens + sum(self._reserved.values()) + least <= limits.tokens

    def send(self, call: TaskName, bound: CallBound | None) -> None:
        """A call that has room is sent. One whose answer has no bound may use all that is left."""
        self._num_calls += 1
        if self._limits.tokens is None or bound is None:
            self._reserved[call] = 0
            return
        left = self._limits.tokens - self._num_tokens - sum(self._reserved.values())
        self._reserved[call] = left if bound.output_tokens is None else bound.prompt_tokens + bound.output_tokens

    def end(self, call: TaskName, answer: ModelAnswer | None = None) -> LimitExceeded | None:
        """A call was answered, or has failed (None). An answer of a server that does not count tokens counts as all
        that the call might use. Returns the error of an answer that went past the limit of tokens: its prompt was
        longer than counted, or nothing bounded it."""
        reserved = self._reserved.pop(call, None)
        if reserved is None or answer is None:
            return None  # it was not sent, for its answer was known; or it has none
        if answer.is_cached:
            self._num_calls -= 1  # someone else has made the call meanwhile
            return None
        self._num_tokens += (answer.usage.prompt_tokens + answer.usage.output_tokens) or reserved
        most = self._limits.tokens
        if most is None or self._num_tokens <= most:
            return None
        return self._used_up(most, f"with this answer {self._num_tokens:,}")

    def _used_up(self, most: int, why: str) -> LimitExceeded:
        return LimitExceeded(f"the run has used the {plural(most, 'token')} that it may use ({why})", "tokens")


def bound_of(request: ModelRequest, prompt_tokens: int | None, context: int | None = None) -> CallBound:
    """The most that a request may use, with so many prompt tokens (None: one for four bytes), on a model with this
    context."""
    body = request.body
    if prompt_tokens is None:
        said = {name: body[name] for name in _PROMPT_FIELDS if body.get(name)}
        prompt_tokens = -(-len(msgspec.json.encode(said)) // _BYTES_PER_TOKEN)
    longest = body.get("max_completion_tokens")
    if longest is None:
        longest = body.get("max_tokens")
    if longest is None and request.endpoint == COMPLETION:
        longest = _COMPLETION_TOKENS
    if longest is None and context is not None:
        longest = max(context - prompt_tokens, 1)
    return CallBound(prompt_tokens, longest)
