"""The least that a workload's prompts could cost to prefill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class TrieTokens(NamedTuple):
    """Tokens of the trie of all prompts with their outputs."""

    total: int
    prefill: int
    """Of those, tokens that no call decodes: with KV that is never lost, what has to be computed from prompts."""


def count(calls: Iterable[tuple[Sequence[int], Sequence[int]]]) -> TrieTokens:
    """Of (prompt, output) pairs as token ids. An output that a later prompt repeats after the same tokens is decoded
    once and not computed again."""
    arrays = ((np.asarray(prompt), np.asarray(output)) for prompt, output in calls)
    # As bytes they sort as the tokens do, so texts with a common beginning follow each other.
    texts = sorted((np.concatenate(both).astype(">u4").tobytes(), len(both[0])) for both in arrays)
    total = prefill = 0
    path = np.zeros(0, np.uint32)
    is_decoded = np.zeros(0, np.bool_)
    """Of the trie's nodes on the path to the text before, whether some call decodes them."""
    for packed, num_prompt in texts:
        text = np.frombuffer(packed, ">u4")
        most = min(len(path), len(text))
        differ = np.flatnonzero(path[:most] != text[:most])
        common = int(differ[0]) if len(differ) else most
        prefill += int((~is_decoded[common:]).sum())
        total += len(text) - common
        path, is_decoded = text, np.concatenate((is_decoded[:common], np.zeros(len(text) - common, np.bool_)))
        is_decoded[num_prompt:] = True
    return TrieTokens(total, prefill + int((~is_decoded).sum()))
