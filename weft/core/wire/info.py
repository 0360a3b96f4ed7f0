"""What an engine says of itself: what it is, and how it is doing."""

from __future__ import annotations

from typing import Literal

import msgspec

from weft.core.cost.model import ForwardModel
from weft.core.waits import ExpectedBy


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs to know of an engine. Constant while the engine lives."""

    model: str
    vocab_size: int
    hidden_size: int
    page_size: int
    num_device_pages: int
    num_host_pages: int
    max_context: int
    """Longest sequence, in tokens, prompt and output together."""
    max_running: int
    max_step_tokens: int
    eos_token_ids: list[int]
    device: str
    dtype: str
    bytes_per_page: int
    pid: int = 0
    explicit_pages: bool = False
    """Whether there are spaces: not with sliding windows."""
    num_embeds: int = 0
    """Embeddings of all spaces together."""
    max_space_pages: int = 0
    """Device pages of all spaces together."""
    forward: ForwardModel | None = None
    """Times of steps by the engine's cost profile; None without one."""
    held_factor: float = 1.0
    """How many times as long background work takes at most beside work whose latency matters."""


SessionState = Literal["intercepted", "finished", "queued"]
"""An open sequence that waits for something other than the device; a closed one that another may continue; one that has
work and waits for the device."""


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that does not run now: why, since when, and where the KV of its tokens is."""

    id: int
    """Number of the sequence in its engine."""
    request_id: str
    state: SessionState
    kind: str
    """What it waits for (`weft.core.waits`)."""
    num_tokens: int
    device_tokens: int
    """Tokens whose KV is on the device."""
    host_tokens: int
    """Tokens whose KV only the host has."""
    gone_tokens: int
    """Tokens whose KV was given up."""
    waited_s: float
    expected_in_s: float | None = None
    """Seconds to the expected return; None: nothing is expected, or it waits for the device alone."""
    expected_by: ExpectedBy | None = None
    """What `expected_in_s` rests on."""
    engine: int = 0
    """Index of the engine among those of its model. The front sets it; an engine does not know it."""


class HistogramSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """Bounds, counts and total of a `weft.metrics.Histogram`, frozen."""

    bounds: tuple[float, ...]
    counts: list[int]
    """[len(bounds) + 1] observations of each bucket alone."""
    total: float


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen snapshot of an engine. Counters grow for the engine's life; gauges are of this moment."""

    num_running: int = 0
    num_waiting: int = 0
    num_held: int = 0
    num_sequences: int = 0
    num_spaces: int = 0
    space_pages: int = 0
    """Device pages in spaces, reserved ones and exports included."""
    device_pages_total: int = 0
    device_pages_free: int = 0
    device_pages_cached: int = 0
    host_pages_total: int = 0
    host_pages_free: int = 0
    steps: int = 0
    step_device_s: float = 0.0
    """Summed device time of all steps."""
    objective_device_s: dict[str, float] = {}
    """By objective: device time of steps, each divided among its query tokens. Tokens of explicit pages count as
    `latency`."""
    step_host_s: float = 0.0
    """Summed time the loop spent scheduling, building and updating."""
    prompt_tokens: int = 0
    """Prompt tokens of operations that began, cached or not."""
    prefill_tokens: int = 0
    """Prompt tokens that went through a forward pass, recomputation included."""
    recomputed_tokens: int = 0
    """Of those, tokens that had been computed before and were discarded."""
    generated_tokens: int = 0
    space_tokens: int = 0
    """Inputs of forwards in spaces."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix index."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    preemptions: int = 0
    evictions: int = 0
    """Pages evicted from the device tier."""
    swapped_in_pages: int = 0
    swapped_out_pages: int = 0
    finished: dict[str, int] = {}
    """Operations by how they ended: stop, length, cancelled, failed."""
    step_time: HistogramSnapshot | None = None
    """Seconds of a step on the device."""
    batch_size: HistogramSnapshot | None = None
    """Sequences in a step."""
    batch_tokens: HistogramSnapshot | None = None
    """Query tokens in a step."""
    waste: dict[str, float] = {}
    """Token-seconds of KV memory by cause (`weft.sched.waste_meter`)."""
    wait_returns: dict[str, dict[str, int]] = {}
    """By kind of wait: where the KV was when waits ended ("kept", "host", "recomputed"), and how often."""
    pages_given_up: dict[str, dict[str, int]] = {}
    """By kind of wait: where pages went that were given up ("host", "nowhere"), and how many."""
    wait_ratio: dict[str, HistogramSnapshot] = {}
    """By kind of wait: time that waits took, divided by the time expected when they began; of policies that expect."""
    cost_ratio: HistogramSnapshot | None = None
    """Measured to predicted time of steps; None without a cost profile."""
    cost_factor: float | None = None
    """What the profile's predictions are multiplied by now; None without one."""
    saturation_tokens: int | None = None
    """The saturation point of the profile; None without one."""
    retains_ended: dict[str, int] = {}
    """Retains that ended, by cause (`weft.cache.retention.RetainEnd`)."""
