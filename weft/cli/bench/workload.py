"""Prompts of random tokens. Pure: the same arguments give the same prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import typer


def random_prompts(
    seed: int, tokens: Sequence[int], *, count: int, length: int, shared_prefix: int = 0
) -> list[list[int]]:
    """`count` prompts of `length` tokens each, drawn from `tokens`; the first `shared_prefix` are the same in all.

    Raises `typer.BadParameter` for a prefix that leaves nothing to differ in.
    """
    if shared_prefix >= length:
        raise typer.BadParameter(f"--shared-prefix-len {shared_prefix} must be less than --input-len {length}")
    draw = random.Random(f"prompts {seed}")  # as text: of a number, the sign would not count
    prefix = draw.choices(tokens, k=shared_prefix)
    return [[*prefix, *draw.choices(tokens, k=length - shared_prefix)] for _ in range(count)]


def arrivals(seed: int, count: int, rate: float | None) -> Iterator[float]:
    """When each request is sent, in seconds from the start: a Poisson process of `rate` per second, or all at once."""
    draw = random.Random(f"arrivals {seed}")
    at = 0.0
    for _ in range(count):
        yield at
        at += draw.expovariate(rate) if rate is not None else 0.0
