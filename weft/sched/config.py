"""`SchedulerConfig`: the bounds of steps and waits, and what the scheduler must know of its model."""

from __future__ import annotations

import msgspec

from weft.sched.sequence import ReturnOrder


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds a step, and a wait."""

    max_context: int
    max_running: int
    max_step_tokens: int
    """What the device has room for."""
    saturation_tokens: int | None = None
    """A step that has so many tokens gets no more of prompts than a page: they would take proportionally longer, and
    decoding sequences would wait for them. None: as many as fit."""
    max_waiting: int = 4096
    aging_s: float = 30.0
    latency_factor: float = 1.5
    """How much longer background work may make a step than it would be without."""
    min_share: float = 0.1
    """Of the device's time, what background work gets nevertheless."""
    prefix_cache: bool = True
    return_order: ReturnOrder = "fair"
    """Where sequences that were intercepted take their place in the queue."""
    prefix_wait_steps: int = 64
    vocab_size: int = 0
    eos_token_ids: list[int] = []
    seed: int = 0
    trace: bool = False
    space_fraction: float = 0.5
    """Of the device pages, how many may be in spaces."""
    alloc_wait_s: float = 5.0
    """How long a command waits for pages or embeddings."""
    max_rows: int | None = None
    """Sequences and commands that share a step. None: as many as fit."""
    num_device_slots: int | None = None
    """Device slots of the worker; those past `max_running` draw single tokens for spaces."""
    num_embeds: int = 0
    has_windows: bool = False
    """The model has layers with a sliding window, which explicit pages do not allow."""


def prompt_budget(config: SchedulerConfig, num_tokens: int, page_size: int) -> int:
    """Tokens of a step from which on prompts get none, where those who decode and commands of programs have
    `num_tokens`: S - `num_tokens` are left for prompts up to the saturation point S (APIServe, section 4.2), and a page
    at least, so that none waits for others to end; but never more than there is."""
    if config.saturation_tokens is None:
        return config.max_step_tokens
    return min(max(config.saturation_tokens, num_tokens + page_size), config.max_step_tokens)
