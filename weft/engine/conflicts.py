"""Fields of a request that leave a grammar no token: a token that a grammar needs and another field forbids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weft.core.sampling import SamplingParams

U32 = npt.NDArray[np.uint32]


def conflict(sampling: SamplingParams, mask: U32, tokens: Sequence[int]) -> str:
    """Which fields forbid every token of the mask, [ceil(V / 32)] words; empty while one is left. `tokens` are those of
    the sequence so far."""
    left, blocking = mask, []
    for name, forbidden in _forbidden(sampling, tokens):
        ids = np.asarray([token for token in forbidden if token < 32 * len(mask)], np.int64)
        words = np.zeros_like(mask)
        np.bitwise_or.at(words, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
        keep = words if name == "allowed_token_ids" else ~words
        if (left & keep != left).any():
            blocking.append(name)
        left = left & keep
    if not blocking or left.any() or not mask.any():
        return ""
    return f"{' and '.join(blocking)} forbid every token that the grammar allows here; leave one of them out"


def _forbidden(sampling: SamplingParams, tokens: Sequence[int]) -> list[tuple[str, list[int]]]:
    """The fields that forbid tokens now, with the tokens: those of `allowed_token_ids` are allowed."""
    found = []
    if sampling.allowed_token_ids is not None:
        found.append(("allowed_token_ids", sampling.allowed_token_ids))
    words = [word[-1] for word in sampling.bad_words if list(tokens[len(tokens) - len(word) + 1 :]) == word[:-1]]
    if words:
        found.append(("bad_words", words))
    biased = sampling.banned_by_bias
    if biased:
        found.append(("logit_bias", biased))
    return found
