"""Sampling parameters and stop conditions as values.

    await ctx.generate(Sampler(temperature=0.7, top_p=0.9), stop=Stop(strings=["\\n\\n"]), max_tokens=100)

Names, defaults and ranges are those of `weft.abi.parameters`; the engine checks them and defines their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Parameters of the sampling of each token. The defaults leave the model's distribution as it is."""

    temperature: float = 1.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    """Token sequences that must not be completed."""
    logprobs: int | None = None
    """Return the log-probability of each token and of the `logprobs` most probable ones; None: none of them."""

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from the defaults, as JSON values."""
        return _changed(self)

    def replace(self, **changes: Any) -> Sampler:
        """A copy with some fields changed."""
        return replace(self, **changes)


def greedy() -> Sampler:
    """Always take the most probable token."""
    return Sampler(temperature=0.0)


def multinomial(temperature: float = 1.0, *, seed: int | None = None) -> Sampler:
    """Sample from the whole distribution."""
    return Sampler(temperature=temperature, seed=seed)


def top_k(k: int, temperature: float = 1.0, *, seed: int | None = None) -> Sampler:
    """Sample from the `k` most probable tokens."""
    return Sampler(temperature=temperature, top_k=k, seed=seed)


def top_p(p: float, temperature: float = 1.0, *, seed: int | None = None) -> Sampler:
    """Sample from the fewest tokens whose probabilities sum to `p` (nucleus sampling, Holtzman et al. 2020)."""
    return Sampler(temperature=temperature, top_p=p, seed=seed)


def min_p(p: float, temperature: float = 1.0, *, seed: int | None = None) -> Sampler:
    """Sample from the tokens at least `p` times as probable as the most probable one."""
    return Sampler(temperature=temperature, min_p=p, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Conditions that end a generation: the first that holds. The end of sequence ends it too, unless `ignore_eos`."""

    max_tokens: int | None = None
    """None: as many as fit in the context."""
    min_tokens: int = 0
    strings: Sequence[str] = ()
    """Stop strings; they are not part of the generated text."""
    token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from the defaults, under the names of `weft.abi.parameters`."""
        names = {"strings": "stop", "token_ids": "stop_token_ids"}
        return {names.get(name, name): value for name, value in _changed(self).items()}


def stopping(stop: Stop | str | Iterable[str] | None, max_tokens: int | None) -> Stop:
    """One `Stop` from the arguments `stop` and `max_tokens` of `generate`. `max_tokens` wins where both are set."""
    if stop is None:
        stop = Stop()
    elif isinstance(stop, str):
        stop = Stop(strings=(stop,))
    elif not isinstance(stop, Stop):
        stop = Stop(strings=tuple(stop))
    return stop if max_tokens is None else replace(stop, max_tokens=max_tokens)


def _changed(value: Sampler | Stop) -> dict[str, Any]:
    """Fields that differ from their defaults, as JSON values."""
    plain: dict[str, Any] = {}
    default = type(value)()
    for name in [item.name for item in fields(value)]:
        chosen = getattr(value, name)
        if chosen == getattr(default, name):
            continue
        if isinstance(chosen, Mapping):
            chosen = {str(key): item for key, item in chosen.items()}
        elif not isinstance(chosen, int | float | str) and chosen is not None:
            chosen = [list(item) if isinstance(item, list | tuple) else item for item in chosen]
        plain[name] = chosen
    return plain
