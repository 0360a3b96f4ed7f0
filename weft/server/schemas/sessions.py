"""Responses about sequences that wait."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000


class SessionCard(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that waits. Times are seconds since 1970."""

    id: Annotated[int, Meta(description="Number of the sequence in its engine; used once while the engine lives.")]
    engine: Annotated[int, Meta(description="Index of the engine; 0 where the model has one.")]
    request_id: Annotated[str, Meta(description="The request, or the request that launched the run.")]
    model: Annotated[str, Meta(description="The model's first served name.")]
    state: Annotated[
        Literal["intercepted", "finished", "queued"],
        Meta(
            description="`intercepted`: an open sequence of a program that waits for something other than the device; "
            "`finished`: a turn that the next request may continue; `queued`: it has work and waits for its turn."
        ),
    ]
    waits_for: Annotated[
        str,
        Meta(description="The kind of wait, such as `chat`, `tools:NAME`, `http`, `sleep`; `queue` if queued."),
    ]
    tokens: Annotated[int, Meta(description="All tokens of the sequence.")]
    device_tokens: Annotated[int, Meta(description="Tokens whose KV is on the device.")]
    host_tokens: Annotated[int, Meta(description="Tokens whose KV only the host has.")]
    gone_tokens: Annotated[int, Meta(description="Tokens whose KV was given up: a return computes them again.")]
    since: Annotated[float, Meta(description="Start of the wait.")]
    until: (
        Annotated[
            float,
            Meta(
                description="The expected return; null: it waits for the device alone, or nothing was announced and "
                "the interception policy estimates no waits."
            ),
        ]
        | None
    ) = None
    expected_by: (
        Annotated[
            Literal["announced", "learned", "elapsed"],
            Meta(
                description="What `until` rests on. `announced`: the program or the plan announced it; `learned`: "
                "earlier waits of the kind; `elapsed`: too few of these are known, so as long again as it has waited."
            ),
        ]
        | None
    ) = None


class SessionCards(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences of the caller that wait, those that wait longest first."""

    object: Literal["list"] = "list"
    data: list[SessionCard]
    left_out: int
    """Further ones, for which `limit` left no room."""
