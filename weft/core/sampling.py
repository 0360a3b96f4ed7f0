"""Sampling and stopping as the engine takes them: typed, and validated once, here.

Ranges are those of `weft.abi.parameters`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec

from weft.abi.errors import InvalidRequest
from weft.abi.parameters import MAX_LOGPROBS as MAX_LOGPROBS
from weft.abi.parameters import SAMPLING, STOP, Parameter

MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 4096
"""Tokens of all bad words together: each step compares them with the last tokens of its sequence."""
BANNING_BIAS = -100.0
"""A logit with this bias or less belongs to a token that is not sampled while another is left."""
GREEDY_TEMPERATURE = 1e-5
"""At or below this temperature the most probable token is taken; ties go to the lowest id."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is drawn from the logits.

    Order of application: allowed tokens, bad words and late masks; logit bias; repetition, then frequency and
    presence penalties; temperature; top-k; top-p; min-p. Reported log-probabilities are those of the model itself,
    before any of these.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already generated."""
    frequency_penalty: float = 0.0
    """Subtracted from a logit once per time its token was generated."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL, Keskar et al. 2019)."""
    seed: int | None = None
    """Fixes the random numbers of this request independently of the batch: the same tokens, as far as the model's
    logits are the same (exactly in float64; in bfloat16 a batch of another shape rounds differently). None: the engine
    chooses."""
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[list[int]] = []
    """Token sequences that must not be completed."""
    logprobs: int | None = None
    """None: none. k >= 0: the chosen token's and the k most probable tokens' log-probabilities."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether sampling needs the counts of earlier tokens."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def banned_by_bias(self) -> list[int]:
        """Tokens whose bias bans them."""
        return [token for token, bias in self.logit_bias.items() if bias <= BANNING_BIAS]

    def validate(self, vocab_size: int) -> None:
        """Raise `InvalidRequest`, naming the field, unless every value is usable with this vocabulary."""
        _check_ranges(_SAMPLING_NUMBERS, self)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            count = len(self.logit_bias)
            raise InvalidRequest(f"logit_bias has {count} entries, at most {MAX_LOGIT_BIAS}", "logit_bias")
        _check_tokens("logit_bias", self.logit_bias, vocab_size)
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequest(f'logit_bias["{token}"] must be in [-100, 100], got {bias}', "logit_bias")
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids is empty: no token could be sampled", "allowed_token_ids")
            _check_count("allowed_token_ids", self.allowed_token_ids, vocab_size)
            _check_tokens("allowed_token_ids", self.allowed_token_ids, vocab_size)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(f"bad_words has {len(self.bad_words)} entries, at most {MAX_BAD_WORDS}", "bad_words")
        num_tokens = sum(map(len, self.bad_words))
        if num_tokens > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"bad_words have {num_tokens} tokens together, at most {MAX_BAD_WORD_TOKENS}; leave some out",
                "bad_words",
            )
        for word in self.bad_words:
            if not word:
                raise InvalidRequest("bad_words has an empty entry", "bad_words")
            _check_tokens("bad_words", word, vocab_size)


class StopParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When generation ends: at the first condition that holds."""

    max_tokens: int | None = None
    """None: as many as the context leaves."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens cannot be sampled, and stop strings do not count, before this many."""
    stop: list[bytes] = []
    """Stop strings as UTF-8 bytes, matched on the bytes of the generated tokens."""
    stop_token_ids: list[int] = []
    ignore_eos: bool = False

    def validate(self, vocab_size: int) -> None:
        """Raise `InvalidRequest`, naming the field, unless every value is usable with this vocabulary."""
        _check_ranges(_STOP_NUMBERS, self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}", "min_tokens")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop has {len(self.stop)} strings, at most {MAX_STOP_STRINGS}", "stop")
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_BYTES:
                raise InvalidRequest(f"stop strings must have 1 to {MAX_STOP_BYTES} bytes, got {len(text)}", "stop")
        _check_count("stop_token_ids", self.stop_token_ids, vocab_size)
        _check_tokens("stop_token_ids", self.stop_token_ids, vocab_size)


def check_logprobs(count: int, field: str) -> None:
    """Raise `InvalidRequest`, naming the field, for more log-probabilities than there are, fewer than none, or a
    number that is not an `int` (`bool` is refused too)."""
    if type(count) is not int:
        raise InvalidRequest(f"{field} must be an int between 0 and {MAX_LOGPROBS}, got {count!r}", field)
    if not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"{field} must be between 0 and {MAX_LOGPROBS}, got {count}", field)


def check_together(sampling: SamplingParams, stop: StopParams, eos_ids: Sequence[int]) -> None:
    """Raise `InvalidRequest`, naming the fields, where `allowed_token_ids` allows only tokens that others forbid."""
    if sampling.allowed_token_ids is None:
        return
    ending = {*stop.stop_token_ids, *(() if stop.ignore_eos else eos_ids)} if stop.min_tokens else set()
    forbidden = {
        "bad_words": {word[0] for word in sampling.bad_words if len(word) == 1},
        "logit_bias": set(sampling.banned_by_bias),
        "min_tokens": ending,
    }
    allowed = set(sampling.allowed_token_ids)
    fields = [name for name, tokens in forbidden.items() if tokens & allowed]
    if fields and not allowed - set().union(*forbidden.values()):
        raise InvalidRequest(
            f"{' and '.join(fields)} forbid every token of allowed_token_ids; leave one of them out", fields[0]
        )


_SAMPLING_NUMBERS = [(p.name, p.default, p) for p in SAMPLING.values() if p.low is not None and p.name != "logit_bias"]
_STOP_NUMBERS = [(p.name, p.default, p) for p in STOP.values() if p.low is not None]


def _check_ranges(numbers: list[tuple[str, Any, Parameter]], params: SamplingParams | StopParams) -> None:
    """Raise `InvalidRequest` for a number that is out of range. Defaults are not, so they are not looked at."""
    for name, default, parameter in numbers:
        value = getattr(params, name)
        if value != default and not parameter.contains(value):
            raise InvalidRequest(f"{name} must be in {parameter.range}, got {value}", name)


def _check_count(name: str, tokens: Collection[int], vocab_size: int) -> None:
    """Raise `InvalidRequest` for more tokens than the vocabulary has, before any of them is looked at."""
    if len(tokens) > vocab_size:
        raise InvalidRequest(
            f"{name} has {len(tokens)} entries, at most {vocab_size}, the tokens of this model; name each token once",
            name,
        )


def _check_tokens(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{name} names token {token}; this model has tokens 0 to {vocab_size - 1}", name)
