"""`weft.LLM` from the merged settings, for commands that need no server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from weft.cli.loading import loading_progress

if TYPE_CHECKING:
    from weft.config import EngineConfig
    from weft.llm import LLM


def local_llm(config: EngineConfig) -> LLM:
    """An engine in this process. Raises `ModelLoadError` or `ConfigError`."""
    from weft.llm import LLM

    options = msgspec.structs.asdict(config)
    return LLM(options.pop("model"), load_progress=loading_progress(config.model), **options)
