"""Sampling as slowly and plainly as possible: one row, Python and float64, following the documented order."""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.core.sampling import SamplingParams


def probabilities(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
    mask: Sequence[bool] | None = None,
) -> list[float]:
    """The distribution that the next token is drawn from. Masks must leave at least one token."""
    x = list(map(float, logits))
    vocabulary = range(len(x))
    history = [*prompt, *output]
    banned = set(stop_ids)
    for word in params.bad_words:
        start = word[:-1]
        if not start or history[-len(start) :] == start:
            banned.add(word[-1])
    if params.allowed_token_ids is not None:
        banned |= set(vocabulary) - set(params.allowed_token_ids)
    if mask is not None:
        banned |= {v for v in vocabulary if not mask[v]}
    for v in vocabulary:
        x[v] += params.logit_bias.get(v, 0.0)
        if v in history:
            x[v] = x[v] / params.repetition_penalty if x[v] > 0 else x[v] * params.repetition_penalty
        count = list(output).count(v)
        x[v] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        if v in banned:
            x[v] = -math.inf
    if params.is_greedy:
        best = min(vocabulary, key=lambda v: (-x[v], v))
        return [float(v == best) for v in vocabulary]
    largest = max(x)
    x = [(value - largest) / params.temperature for value in x]
    ranked = sorted(vocabulary, key=lambda v: (-x[v], v))
    if params.top_k > 0:
        for v in ranked[params.top_k :]:
            x[v] = -math.inf
    weights = [math.exp(value) for value in x]
    if params.top_p < 1:
        total, mass, kept = sum(weights), 0.0, set()
        for v in ranked:
            kept.add(v)
            mass += weights[v]
            if mass >= params.top_p * total:
                break
        weights = [w if v in kept else 0.0 for v, w in enumerate(weights)]
    weights = [w if w >= params.min_p else 0.0 for w in weights]
    total = sum(weights)
    return [w / total for w in weights]


def draw(distribution: Sequence[float], uniform: float) -> int:
    """The first token, by id, at which the running sum exceeds `uniform`."""
    total = 0.0
    for token, probability in enumerate(distribution):
        total += probability
        if total > uniform:
            return token
    return max(v for v, probability in enumerate(distribution) if probability > 0)
