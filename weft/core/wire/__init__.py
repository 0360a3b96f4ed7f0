"""What a client says to an engine, and what it hears back: the one wire format, in process and over sockets.

A client opens **sequences** and puts **operations** on them. Operations of one sequence run in order; sequences run
beside each other. The client chooses the numbers of its sequences and operations, so nothing has to be waited for; a
number may be used once. Every `Append` with outputs and every `Generate` ends in exactly one of `Finished`, `Failed`
or `Cancelled`; an operation without outputs is silent unless it fails. All events of one step for one client travel
in one message.

Below sequences there are **spaces**: KV pages and embeddings that the client names and fills itself, by commands on
**queues**. Commands of one queue run in order; those of different queues of a space are ordered by `Sync` alone.

Handles belong to (client, tenant) and die with the client's lease.

The modules of this package own a group of messages each; users import from here.
"""

from __future__ import annotations

from weft.core.wire.base import PROTOCOL_VERSION
from weft.core.wire.codec import (
    Command,
    Envelope,
    decode_commands,
    decode_envelope,
    encode_commands,
    encode_envelope,
    is_answered,
)
from weft.core.wire.control import Drain, Hello, Ping, ResetPrefixCache
from weft.core.wire.events import (
    Cancelled,
    Dists,
    Drained,
    Event,
    Failed,
    Finished,
    FinishReason,
    Loading,
    OpEvent,
    Stats,
    Token,
    TokenLogprobs,
    TraceSpan,
    Usage,
    Welcome,
)
from weft.core.wire.info import EngineInfo, EngineStats, HistogramPicture
from weft.core.wire.sequences import (
    MAX_DIST,
    Append,
    Cancel,
    Fork,
    Generate,
    Hold,
    MaskTokens,
    Open,
    PromptOutputs,
    Release,
    SetPriority,
    Truncate,
)
from weft.core.wire.spaces import (
    AllocEmbeds,
    AllocPages,
    Answered,
    CloseQueue,
    CloseSpace,
    CopyTokens,
    EmbedText,
    ExportPages,
    Forward,
    ForwardSample,
    FreeEmbeds,
    FreePages,
    ImportPages,
    MaskPage,
    NextDist,
    OpenQueue,
    OpenSpace,
    QueueCommand,
    ReleaseExport,
    SetQueuePriority,
    SpaceCommand,
    Sync,
)

__all__ = [
    "MAX_DIST",
    "PROTOCOL_VERSION",
    "AllocEmbeds",
    "AllocPages",
    "Answered",
    "Append",
    "Cancel",
    "Cancelled",
    "CloseQueue",
    "CloseSpace",
    "Command",
    "CopyTokens",
    "Dists",
    "Drain",
    "Drained",
    "EmbedText",
    "EngineInfo",
    "EngineStats",
    "Envelope",
    "Event",
    "ExportPages",
    "Failed",
    "FinishReason",
    "Finished",
    "Fork",
    "Forward",
    "ForwardSample",
    "FreeEmbeds",
    "FreePages",
    "Generate",
    "Hello",
    "HistogramPicture",
    "Hold",
    "ImportPages",
    "Loading",
    "MaskPage",
    "MaskTokens",
    "NextDist",
    "OpEvent",
    "Open",
    "OpenQueue",
    "OpenSpace",
    "Ping",
    "PromptOutputs",
    "QueueCommand",
    "Release",
    "ReleaseExport",
    "ResetPrefixCache",
    "SetPriority",
    "SetQueuePriority",
    "SpaceCommand",
    "Stats",
    "Sync",
    "Token",
    "TokenLogprobs",
    "TraceSpan",
    "Truncate",
    "Usage",
    "Welcome",
    "decode_commands",
    "decode_envelope",
    "encode_commands",
    "encode_envelope",
    "is_answered",
]
