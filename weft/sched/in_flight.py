"""`InFlight`: what the results of a launched step mean, as it was decided when the step was built.

Every entry of a sequence carries the `epoch` or `kv_epoch` that the sequence had then: where it has grown since, the
entry is void. `StepBuilder` writes these records, `update` reads them when the step is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from weft.sched.sequence import AppendOp, Sequence
from weft.sched.spaces.parts import SpaceDist, SpaceSample

SampledToken = tuple[Sequence, int]
"""A sampler of a step in flight: (sequence, its `epoch`). What every decoding sequence and every chunk of a step has is
a plain tuple: making a named one takes five times as long."""
DecodedToken = tuple[Sequence, int, int]
"""One token of a decoding sequence: (sequence, its `kv_epoch`, how many tokens have KV once the step is done)."""
WrittenTokens = tuple[Sequence, int, int]
"""Of a chunk: (sequence, its `kv_epoch`, how many tokens have KV once the step is done)."""
Distribution = tuple[Sequence, int, AppendOp]
"""One of a step's distributions: (sequence, its `kv_epoch`, the append that asks for it)."""


class ScoredTokens(NamedTuple):
    """`num` scores of a step, the first for token `first` of the sequence."""

    sequence: Sequence
    epoch: int
    op: AppendOp
    first: int
    num: int


class HiddenSum(NamedTuple):
    """One of a step's hidden sums, over `num` tokens."""

    sequence: Sequence
    epoch: int
    op: AppendOp
    num: int


@dataclass(slots=True)
class InFlight:
    """What the results of a launched step mean."""

    step_id: int
    sampled: list[SampledToken] = field(default_factory=list)
    decoded: list[DecodedToken] = field(default_factory=list)
    written: list[WrittenTokens] = field(default_factory=list)
    scored: list[ScoredTokens] = field(default_factory=list)
    hidden_sums: list[HiddenSum] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)
    space_samples: list[SpaceSample] = field(default_factory=list)
    """Their samplers come after all of `sampled`."""
    space_dists: list[SpaceDist] = field(default_factory=list)
    """Their rows come after all of `distributions` and `scored`."""
    num_tokens: int = 0
    num_rows: int = 0
    recomputed_tokens: int = 0
    """Query tokens of sequences whose KV had existed."""
    recomputing_rows: list[int] = field(default_factory=list)
    """Rows of the forward that they are in."""
    objective_tokens: dict[str, int] = field(default_factory=dict)
    """Query tokens by objective; empty: all count as `latency`. So do those that are not in it, of spaces."""
    waits_for_pages: bool = False
    """Some sequence or space could not go on in this step, because pages were missing."""
    intercepted_tokens: int = 0
    """With `waits_for_pages`: KV tokens on the device of sequences that wait for something other than the device."""
