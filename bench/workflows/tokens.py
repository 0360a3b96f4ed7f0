"""The least that a workload's prompts could cost to prefill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class TrieTokens(NamedTuple):
    """Tokens of the trie of all prompts with their outputs."""

    total: int
    prefill: int
    """Of those, tokens that no call decodes: with KV that is never lost, what has to be computed from prompts."""


def count(calls: Iterable[tuple[Sequence[int], Sequence[int]]]) -> TrieTokens:
    """Of (prompt, output) pairs as token ids. An output that a later prompt repeats after the same tokens is decoded
    once and not computed again."""
    children: dict[tuple[int, int], int] = {}
    decoded: set[int] = set()
    for prompt, output in calls:
        node = 0
        for token in prompt:
            node = children.setdefault((node, token), len(children) + 1)
        for token in output:
            node = children.setdefault((node, token), len(children) + 1)
            decoded.add(node)
    return TrieTokens(len(children), len(children) - len(decoded))
