"""What a process that starts an engine sends to it, and no more of the engine: the front need not import it."""

from __future__ import annotations

import msgspec

from weft.config import EngineConfig


class LaunchArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The line that the parent writes to stdin."""

    config: EngineConfig
    trace: bool = False
    log_level: str = "warning"
