"""Guided attention: where the values of an answer stand in the conversation, and a loss that draws attention there.

A value in an answer (a name, a price, an argument of a call) nearly always stands word for word further up, and the
generator knows it. The loss on tokens alone teaches looking it up slowly: through a softmax over a hundred positions
that starts out flat. So chosen heads are told where to look. The heads are those that look there most already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.weft_tiny.examples import Check

_FLOOR = 0.03
"""Added to the attention on a source: cases that cannot be looked up (the value stands before what names it) weigh
little."""


def values(check: Check) -> list[str]:
    """What the answer must contain, as it may stand in the conversation."""
    found: list[object] = [*check.include]
    if check.record is not None:
        found += [*check.record, *check.record.values()]
    if check.call is not None:
        found += check.call[1].values()
    if check.exact is not None:
        found.append(check.exact)
    return [text for value in found if (text := str(value))]


def sources(
    tokens: Sequence[int], answer: Sequence[int], check: Check, tokenizer: Tokenizer
) -> Iterable[tuple[int, int]]:
    """Pairs of a position that predicts the first token of a value, and one before the answer where that token stands.

    ``answer`` follows ``tokens``; positions count from the start of ``tokens``. Later tokens of a value need no help:
    what follows the last one there is soon learned.
    """
    for value in values(check):
        ids = tokenizer.encode(value, add_special_tokens=False).ids
        at = next(_places(answer, ids), None)
        if at is None:
            continue
        number = value[0].isdigit()
        for place in _places(tokens, ids):
            if not (number and _within_number(tokens, place, len(ids), tokenizer)):
                yield len(tokens) + at - 1, place


def _places(tokens: Sequence[int], ids: Sequence[int]) -> Iterable[int]:
    """Where ``ids`` occurs in ``tokens``."""
    first, size = ids[0], len(ids)
    at = -1
    try:
        while True:
            at = tokens.index(first, at + 1)
            if tokens[at : at + size] == ids:
                yield at
    except ValueError:
        return


def _within_number(tokens: Sequence[int], place: int, size: int, tokenizer: Tokenizer) -> bool:
    """Whether digits go on before or after, so that this is a part of another number."""
    beside = [tokens[at] for at in (place - 1, place + size) if 0 <= at < len(tokens)]
    return any((tokenizer.id_to_token(token) or "").isdigit() for token in beside)


def attended(weights: Tensor, pairs: Tensor) -> Tensor:
    """The attention that each predicting position pays to all its sources.

    ``weights``: [rows, heads, queries, keys]; ``pairs``: [n, 3] of row, query and key, those of one query together.
    Returns [queries that have sources, heads].
    """
    row, query, key = pairs.unbind(1)
    picked = weights[row, :, query, key].float()
    _, group = torch.unique_consecutive(row * weights.shape[2] + query, return_inverse=True)
    total = picked.new_zeros(int(group[-1]) + 1, picked.shape[1])
    return total.index_add(0, group, picked)


def guidance_loss(weights: Tensor, pairs: Tensor) -> Tensor:
    """The mean of -log of the attention that the heads pay to the sources."""
    return -(attended(weights, pairs) + _FLOOR).log().mean()
